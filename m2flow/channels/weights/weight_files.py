"""Weights as files in a directory that both sides reach: on shared storage, or where a network link is too slow.

    WeightFiles.write(content, body) -> name        open_file(directory, name) -> Content, and its body to read        FileReceiver

    file    "m2w1", header length u32 (little-endian), header (msgpack, `Content`), zeros up to a multiple of 64, body

A file is written under another name and renamed, so no reader sees a part of one. It is not forced to the disk: publications are of no use
after the run. A whole model is followed by files with what changed, as long as these together are smaller than the model.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.weights.payload import (
    BUCKET_BYTES,
    Change,
    Content,
    Manifest,
    TensorEntry,
    changes_by_name,
    join_buckets,
    named,
    padded,
    receive_buckets,
    unpack_buckets,
    updated,
)
from m2flow.channels.weights.shared_segment import SharedWeights
from m2flow.channels.weights.tensors import Weight
from m2flow.channels.weights.transport import Held, Offer, Receiver, Sender, Transport, WeightOptions, held_parts, verified
from m2flow.errors import ChannelError, DecodeError, SpecError

_read_content = msgspec.msgpack.Decoder(Content).decode

Bytes = npt.NDArray[np.uint8]
_PREFIX = struct.Struct("<4sI")
_MAGIC = b"m2w1"
_MAX_HEADER_BYTES = 256 << 20
_SUFFIX = ".m2weights"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{5,200}")


@final
class Files(Transport):
    """Receivers read what the trainer writes to a directory that both reach."""

    stage_class = SharedWeights
    crosses_hosts = True

    def stage(self, name: str) -> SharedWeights:
        return SharedWeights(name)

    def sender(self, name: str, options: WeightOptions) -> WeightFiles:
        return WeightFiles(options.directory, name)

    def receiver(self, worker: str, options: WeightOptions) -> FileReceiver:
        return FileReceiver(options.directory, options.bucket_bytes)


@final
class WeightFiles(Sender):
    """Writes and removes the files of one publisher, whose names start with `prefix`. One thread."""

    def __init__(self, directory: str, prefix: str) -> None:
        self._directory = Path(directory)
        self._prefix = prefix
        self._chain: list[tuple[str, int]] = []
        self._num_written = 0

    @property
    def chain(self) -> tuple[str, ...]:
        """Names of a whole model and the changes since, oldest first."""
        return tuple(name for name, _ in self._chain)

    def open(self) -> str:
        return str(self._directory)

    def withdraw(self) -> None:
        """Do nothing: files stay as they are while the stage is overwritten."""

    def found_at(self, manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(manifest, files=self.chain)

    def offer(self, offer: Offer) -> None:
        if offer.changes is not None:
            self.write(*offer.changes)
            return
        start = time.monotonic()
        self.write(*offer.whole)
        self.bytes_per_s = len(offer.whole[1]) / max(time.monotonic() - start, 1e-9)

    def takes(self, num_bytes: int, whole_bytes: int) -> bool:
        """Whether a delta of this size may be added: a receiver that holds nothing reads the whole chain."""
        return bool(self._chain) and sum(size for _, size in self._chain[1:]) + num_bytes <= whole_bytes

    def write(self, content: Content, body: Bytes) -> str:
        """Write a file. A whole model replaces the chain.

        Raises:
            ChannelError: the directory refuses it.
        """
        kind = "whole" if content.base < 0 else "changes"
        name = f"{self._prefix}-v{content.version}-{self._num_written}-{kind}{_SUFFIX}"
        self._num_written += 1
        header = msgspec.msgpack.encode(content)
        start = _PREFIX.pack(_MAGIC, len(header)) + header
        part = self._directory / f".{name}.part"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with open(part, "wb", buffering=0, opener=_private) as file:
                _write_all(file, np.frombuffer(start + bytes(padded(len(start)) - len(start)), np.uint8))
                _write_all(file, body)
            part.rename(self._directory / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise ChannelError(
                f"weights can't be written to {self._directory}: {error.strerror or error}",
                now="Name one that the trainer can write to and all workers reach: weights: {directory: ...} in the cluster spec.",
            ) from None
        if content.base < 0:
            self._remove(self.chain)
            self._chain = []
        self._chain.append((name, len(body)))
        return name

    def close(self) -> None:
        """Remove all files. May be called twice."""
        self._remove(self.chain)
        self._chain = []

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()


@final
class FileReceiver(Receiver):
    """Reads a whole model and the changes since, or only the changes to what its engine holds."""

    def __init__(self, directory: str, bucket_bytes: int) -> None:
        self._directory = directory
        self._bucket_bytes = bucket_bytes

    def receive(self, manifest: Manifest, held: Held | None, verify: Collection[str] | None) -> Iterator[tuple[str, Weight]]:
        return named(manifest.whole(), verified(self._parts(manifest, held), manifest, verify))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _parts(self, manifest: Manifest, held: Held | None) -> Iterator[tuple[TensorEntry, Bytes]]:
        self.num_bytes = 0
        base = held.version if held is not None else -1
        with ExitStack() as stack:
            opened: list[WeightFile] = []
            for name in reversed(manifest.files):  # From the last back to the held version, or to a whole model.
                file = open_file(self._directory, name)
                stack.callback(file.close)
                opened.append(file)
                if file.content.base == base:
                    break
            opened.reverse()
            if not opened or opened[-1].content.version != manifest.version:
                raise ChannelError(f"there are no files of version {manifest.version} of the weights")
            is_whole = opened[0].content.base < 0
            updates = [self._update(file) for file in opened[is_whole:]]
            if is_whole:
                first = opened[0]
                self.num_bytes += first.content.num_bytes
                buckets = receive_buckets(first.read, first.content.num_bytes, self._bucket_bytes)
                parts = unpack_buckets(buckets, first.content.tensors, first.content.num_bytes)
            else:
                parts = held_parts(manifest, held)
            yield from updated(parts, updates)

    def _update(self, file: WeightFile) -> tuple[dict[str, Change], Bytes]:
        size = file.content.num_bytes
        self.num_bytes += size
        return changes_by_name(file.content), join_buckets(receive_buckets(file.read, size, self._bucket_bytes), size)


@final
class WeightFile:
    """An open file; `read` fills a buffer with the next bytes of the body."""

    def __init__(self, file: BinaryIO, content: Content, name: str) -> None:
        self._file = file
        self.content = content
        self._name = name

    def read(self, into: Bytes) -> None:
        """Fill a buffer. Raises `DecodeError` at the end of the file."""
        done = 0
        while done < len(into):
            taken = self._file.readinto(into[done:].data)  # type: ignore[attr-defined]
            if not taken:
                raise DecodeError(f"{self._name} is shorter than its header says")
            done += taken

    def close(self) -> None:
        self._file.close()


def open_file(directory: str, name: str) -> WeightFile:
    """Open a file that `WeightFiles` wrote.

    Raises:
        ChannelError: it is not there. DecodeError: it is not such a file.
    """
    if not _NAME.fullmatch(name):
        raise DecodeError(f"{name!r} names no file of weights")
    try:
        file = open(os.path.join(directory, name), "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise ChannelError(
            f"the weights {name} can't be read from {directory}: {error.strerror}", now="Do all workers reach that directory?"
        ) from None
    try:
        size = os.fstat(file.fileno()).st_size
        magic, num_header = _PREFIX.unpack(file.read(_PREFIX.size).ljust(_PREFIX.size))
        if magic != _MAGIC or num_header > min(size, _MAX_HEADER_BYTES):
            raise DecodeError(f"{name} is no file of weights")
        try:
            content = _read_content(file.read(num_header))
        except msgspec.MsgspecError as error:
            raise DecodeError(f"{name} has no readable header: {error}") from None
        start = padded(_PREFIX.size + num_header)
        if not 0 <= content.num_bytes == size - start:
            raise DecodeError(f"{name} has {size - start:,} bytes where its header says {content.num_bytes:,}")
        file.seek(start)
        return WeightFile(file, content, name)
    except BaseException:
        file.close()
        raise


def remove_files(directory: str, prefix: str) -> int:
    """Remove every file of weights whose name starts with a prefix, for owners that were killed. Returns how many."""
    if not _NAME.fullmatch(prefix):
        raise SpecError(f"{prefix!r} can't name files of weights")
    found = [p for p in Path(directory).glob("*") if p.name.lstrip(".").startswith(prefix) and _SUFFIX in p.name]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _write_all(file: BinaryIO | object, body: Bytes) -> None:
    for start in range(0, len(body), BUCKET_BYTES):
        block = body[start : start + BUCKET_BYTES].data
        while len(block):
            block = block[file.write(block) :]  # type: ignore[union-attr]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
