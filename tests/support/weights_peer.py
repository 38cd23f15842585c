"""The other process of the shared-weights tests. It reads or writes manifests as hexadecimal msgpack, one a line.

python weights_peer.py own NAME | read | ask ADDRESS VERSION
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec
import numpy as np

from m2flow.channels.weights import Manifest, SharedWeights, SharedWeightsReader, digest
from m2flow.channels.weights.broadcast import BroadcastReceiver


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


def ask(address: str, version: str) -> None:
    """Take part in a broadcast, and die after its first bucket."""
    receiver = BroadcastReceiver("dying", bucket_bytes=1000)
    print("ready", flush=True)
    sys.stdin.readline()
    next(receiver.receive(address, int(version), -1)[1])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    {"own": own, "read": read, "ask": ask}[sys.argv[1]](*sys.argv[2:])
