"""Mapped files in place of a GPU's memory, for the transport that lends weights on a device: all but the driver's part runs without a GPU.

python device_files.py: the other process. It reads manifests as hexadecimal msgpack, one a line, and answers with the sum of each tensor.
"""

from __future__ import annotations

import mmap
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import msgspec
import torch

from m2flow.channels.weights import Manifest
from m2flow.channels.weights.device import DeviceMemory, DeviceWeightsReader


@final
class FileMemory(DeviceMemory):
    """Allocates files of a directory; a handle is a file's path."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def allocate(self, num_bytes: int) -> tuple[Any, bytes]:
        path = self._directory / secrets.token_hex(4)
        path.write_bytes(bytes(num_bytes))
        handle = str(path).encode()
        return self.map(handle, num_bytes), handle

    def map(self, handle: bytes, num_bytes: int) -> Any:
        with open(handle.decode(), "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)

    def free(self, tensor: Any) -> None:
        pass

    def unmap(self, tensor: Any) -> None:
        pass

    def finish(self) -> None:
        pass


def file_memory(directory: Path) -> Callable[[str], DeviceMemory]:
    """Return what opens the memory of every device: files of this directory."""
    return lambda device: FileMemory(directory)


if __name__ == "__main__":
    reader = DeviceWeightsReader(file_memory(Path()))
    for line in sys.stdin:
        manifest = msgspec.msgpack.decode(bytes.fromhex(line), type=Manifest)
        sums = {name: tensor.float().sum().item() for name, tensor in reader.receive(manifest, None, None)}
        print(msgspec.json.encode(sums).decode(), flush=True)
