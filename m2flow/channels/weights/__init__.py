"""Publish model weights from a trainer to the engines that sample from them: verified, in buckets, over the transport that fits.

    trainer.weights() --Publisher.publish--> Manifest --control link--> Subscriber.tensors --> rollout.load_weights
                        staged once, checksums                 shared memory | broadcast | tcp | file

Modules, from the inside out: `tensors` (names, types, checksums), `manifest`, `shared_segment` (where every publication is staged), `delta`
(what changed since the last version), `buckets` (double buffering), `broadcast`, `streams` and `weight_files` (to other hosts), `device`
(CUDA IPC), `torch_tensors` (the one that knows torch tensors), `publication` (both ends).
"""

from m2flow.channels.weights.manifest import Manifest, TensorEntry
from m2flow.channels.weights.publication import Publisher, Subscriber, WeightOptions
from m2flow.channels.weights.shared_segment import SharedWeights, SharedWeightsReader, remove_segments
from m2flow.channels.weights.tensors import RawBits, Tied, Weight, digest

__all__ = [
    "Manifest",
    "Publisher",
    "RawBits",
    "SharedWeights",
    "SharedWeightsReader",
    "Subscriber",
    "TensorEntry",
    "Tied",
    "Weight",
    "WeightOptions",
    "digest",
    "remove_segments",
]
