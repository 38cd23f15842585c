"""The other process of the shared-weights tests. It reads or writes manifests as hexadecimal msgpack, one a line.

python weights_peer.py own NAME | read
"""

from __future__ import annotations

import signal
import sys

import msgspec
import numpy as np

from m2flow.channels.weights import Manifest, SharedWeights, SharedWeightsReader, digest


def own(name: str) -> None:
    """Publish, and wait to be killed."""
    shared = SharedWeights(name)
    manifest = shared.write([("w", np.arange(1000, dtype=np.float32))])
    print(msgspec.msgpack.encode(manifest).hex(), flush=True)
    signal.pause()


def read() -> None:
    """Answer each manifest with the digest of what it points to."""
    reader = SharedWeightsReader()
    for line in sys.stdin:
        manifest = msgspec.msgpack.decode(bytes.fromhex(line), type=Manifest)
        print(digest(reader.read(manifest)), flush=True)


if __name__ == "__main__":
    {"own": own, "read": read}[sys.argv[1]](*sys.argv[2:])
