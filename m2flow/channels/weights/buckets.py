"""Streams of bytes in buckets of one size, with two buffers, so that one is filled while the other is on its way.

    sender     blocks --copied in the caller's thread--> two buffers --send, in a thread of its own-->
    receiver   --receive, in a thread of its own--> two buffers --arriving--> unpacked --> (entry, bytes) in the caller's thread

Gathering, converting and loading stay in the caller's thread, because engines do them with collectives or on a device that goes by
threads. Neither side ever holds more than two buckets, and of a tensor that lies across several, that tensor.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from m2flow.channels.weights.manifest import TensorEntry, part_of
from m2flow.errors import DecodeError

Bytes = npt.NDArray[np.uint8]

BUCKET_BYTES = 16 << 20
"""Large enough that a message's fixed cost does not count, small enough for two to stay in a server's cache."""


def pump(blocks: Iterable[Bytes], send: Callable[[Bytes], None], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Send blocks of any size as buckets of one; the last may be shorter. Raises what `send` or the blocks raise."""
    free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[Bytes, int] | None] = queue.SimpleQueue()
    failed: list[BaseException] = []
    for _ in range(2):
        free.put(np.empty(bucket_bytes, np.uint8))

    def drain() -> None:
        while (item := full.get()) is not None:
            buffer, size = item
            if not failed:
                try:
                    send(buffer[:size])
                except BaseException as error:
                    failed.append(error)
            free.put(buffer)

    thread = threading.Thread(target=drain, name="m2flow-bucket-sender", daemon=True)
    thread.start()
    try:
        buffer, size = free.get(), 0
        for block in blocks:
            start = 0
            while start < len(block):
                if size == bucket_bytes:
                    full.put((buffer, size))
                    buffer, size = free.get(), 0
                    if failed:
                        raise failed[0]
                taken = min(len(block) - start, bucket_bytes - size)
                buffer[size : size + taken] = block[start : start + taken]
                start, size = start + taken, size + taken
        if size:
            full.put((buffer, size))
    finally:
        full.put(None)
        thread.join()
    if failed:
        raise failed[0]


def arriving(receive: Callable[[Bytes], None], num_bytes: int, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bytes]:
    """The buckets of a stream; each is valid until the next is asked for. `receive` fills what it is given. Raises what it raises."""
    free: queue.SimpleQueue[Bytes | None] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[Bytes, int] | BaseException] = queue.SimpleQueue()
    for _ in range(2):
        free.put(np.empty(min(bucket_bytes, num_bytes), np.uint8))

    def fill() -> None:
        try:
            for start in range(0, num_bytes, bucket_bytes):
                buffer, size = free.get(), min(bucket_bytes, num_bytes - start)
                if buffer is None:
                    return
                receive(buffer[:size])
                full.put((buffer, size))
        except BaseException as error:
            full.put(error)

    thread = threading.Thread(target=fill, name="m2flow-bucket-receiver", daemon=True)
    thread.start()
    try:
        for _ in range(0, num_bytes, bucket_bytes):
            item = full.get()
            if isinstance(item, BaseException):
                raise item
            yield item[0][: item[1]]
            free.put(item[0])
    finally:
        free.put(None)  # One that is left in the middle ends its thread at the next bucket.


def unpacked(buckets: Iterable[Bytes], entries: Sequence[TensorEntry], num_bytes: int) -> Iterator[tuple[TensorEntry, Bytes]]:
    """The tensors of a body that comes in buckets, in the order of their places; each is valid until the next is asked for.

    Raises:
        DecodeError: tensors overlap or lie outside, or the stream is short.
    """
    source = iter(buckets)
    bucket, start = np.zeros(0, np.uint8), 0
    for entry in entries:
        size = entry.num_bytes
        if entry.offset < start or entry.offset % 64 or entry.offset + size > num_bytes:
            raise DecodeError(f"tensor {entry.name!r} at {entry.offset:,} does not follow what came before it")
        while size and entry.offset >= start + len(bucket):
            start += len(bucket)
            bucket = _next(source, entry)
        first = bucket[entry.offset - start :][:size] if size else bucket[:0]
        if len(first) == size and (first.ctypes.data % 8 == 0):
            yield entry, first
            continue
        whole, done = np.empty(size, np.uint8), len(first)
        whole[:done] = first
        while done < size:
            start += len(bucket)
            bucket = _next(source, entry)
            taken = bucket[: size - done]
            whole[done : done + len(taken)] = taken
            done += len(taken)
        yield entry, whole
    for _ in source:  # What is left is padding; who sends must not be left with it.
        pass


def collected(buckets: Iterable[Bytes], num_bytes: int) -> Bytes:
    """A whole body that comes in buckets; for small ones."""
    body, done = np.empty(num_bytes, np.uint8), 0
    for bucket in buckets:
        body[done : done + len(bucket)] = bucket
        done += len(bucket)
    return body


def blocks_of(body: Bytes, entries: Sequence[TensorEntry]) -> Iterator[Bytes]:
    """A body as one block, checked to hold the entries."""
    for entry in entries:
        part_of(body, entry)
    yield body


def _next(source: Iterator[Bytes], entry: TensorEntry) -> Bytes:
    bucket = next(source, None)
    if bucket is None or not len(bucket):
        raise DecodeError(f"the stream ends before tensor {entry.name!r}")
    return bucket
