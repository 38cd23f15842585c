"""Publish model weights from a trainer to the engines that sample from them: verified, in buckets, over the transport that fits.

    trainer.weights() --Publisher.publish--> Manifest --control link--> Subscriber.tensors --> rollout.load_weights
                        staged once, checksums        shared memory | cuda ipc | broadcast | tcp | file

Modules, from the inside out: `tensors` (types, conversion, checksums), `payload` (the manifest, buckets, and what changed since
the last version), `transport` (the interface of all transports), a module for each of them (`shared_segment`, `device` for CUDA IPC,
`broadcast`, `streams`, `weight_files`), `publication` (their table, and both ends).
"""

from m2flow.channels.weights.payload import Manifest, TensorEntry, Written
from m2flow.channels.weights.publication import TRANSPORTS, Publisher, Subscriber
from m2flow.channels.weights.shared_segment import PieceWriter, SharedWeights, SharedWeightsReader, remove_segments
from m2flow.channels.weights.tensors import RawBits, Tied, Weight, digest
from m2flow.channels.weights.transport import Spread, Transport, WeightOptions

__all__ = [
    "TRANSPORTS",
    "Manifest",
    "PieceWriter",
    "Publisher",
    "RawBits",
    "SharedWeights",
    "SharedWeightsReader",
    "Spread",
    "Subscriber",
    "TensorEntry",
    "Tied",
    "Transport",
    "Weight",
    "WeightOptions",
    "Written",
    "digest",
    "remove_segments",
]
