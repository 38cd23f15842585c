"""Model weights from a trainer to the engines that sample from them: verified, in buckets, over the transport that fits.

    trainer.weights() --Publisher.publish--> Manifest --control link--> Subscriber.tensors --> rollout.load_weights
                        staged once, checksums                 shared memory | broadcast | file

Files, from the inside out: `tensors` (what travels), `checksum`, `manifest`, `shared` (the segment that every publication is staged in),
`delta` (what changed since the last version), `buckets` (double buffering), `broadcast` and `files` (to other hosts), `torch_tensors`
(the one that knows torch), `publishing` and `receiving` (both ends).
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
