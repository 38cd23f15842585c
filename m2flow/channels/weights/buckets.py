"""Send and receive a stream of bytes in buckets of one size, double-buffered: one bucket is filled while the other is in flight.

    sender     blocks --copied in the caller's thread--> two buffers --send, in a thread of its own-->
    receiver   --receive, in a thread of its own--> two buffers --unpack_buckets--> (entry, bytes) in the caller's thread

Gathering, converting and loading stay in the caller's thread, because engines do them with collectives or on a device whose context belongs
to a thread. Neither side holds more than two buckets, and one tensor where it spans several.
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
"""Large enough to make a message's fixed cost negligible, small enough for two to stay in a server CPU's cache."""


def send_buckets(blocks: Iterable[Bytes], send: Callable[[Bytes], None], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Send blocks of any size as buckets of one size; the last may be shorter. Raises what `send` or the blocks raise."""
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


def receive_buckets(receive: Callable[[Bytes], None], num_bytes: int, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bytes]:
    """Yield the buckets of a stream, each valid until the next is taken. `receive` fills the buffer it is given; its errors pass on."""
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
        free.put(None)  # If the caller stops in the middle, the thread ends at the next bucket.


def unpack_buckets(buckets: Iterable[Bytes], entries: Sequence[TensorEntry], num_bytes: int) -> Iterator[tuple[TensorEntry, Bytes]]:
    """Yield the tensors of a body that comes in buckets, in the order of their offsets; each is valid until the next is taken.

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
    for _ in source:  # The rest is padding, which the sender has to get rid of.
        pass


def join_buckets(buckets: Iterable[Bytes], num_bytes: int) -> Bytes:
    """Join the buckets of a small body."""
    body, done = np.empty(num_bytes, np.uint8), 0
    for bucket in buckets:
        body[done : done + len(bucket)] = bucket
        done += len(bucket)
    return body


def blocks_of(body: Bytes, entries: Sequence[TensorEntry]) -> Iterator[Bytes]:
    """Yield a body as one block, after checking that it holds the entries."""
    for entry in entries:
        part_of(body, entry)
    yield body


def _next(source: Iterator[Bytes], entry: TensorEntry) -> Bytes:
    bucket = next(source, None)
    if bucket is None or not len(bucket):
        raise DecodeError(f"the stream ends before tensor {entry.name!r}")
    return bucket
