"""The receivers' end: the tensors of a publication, over one transport, from the whole or from what changed since the version held.

    Manifest --Subscriber.tensors--> (name, Weight), ... --> rollout.load_weights

Tensors are views that are valid until the next one is asked for (shared memory: until the next publication).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from typing import final

import numpy as np
import numpy.typing as npt

from m2flow.channels.keys import Keys
from m2flow.channels.weights.broadcast import BroadcastReceiver
from m2flow.channels.weights.buckets import BUCKET_BYTES, arriving, collected, unpacked
from m2flow.channels.weights.checksum import checksum
from m2flow.channels.weights.delta import applied
from m2flow.channels.weights.files import WeightFile, open_file
from m2flow.channels.weights.manifest import ALIGNMENT, Change, Content, Manifest, TensorEntry, listed, named
from m2flow.channels.weights.shared import SharedWeightsReader
from m2flow.channels.weights.streams import StreamReceiver
from m2flow.channels.weights.tensors import Weight, bytes_of
from m2flow.errors import BrokenChannel, ChannelError, DecodeError, InternalError

Bytes = npt.NDArray[np.uint8]
Held = Callable[[], Iterable[tuple[str, Weight]]]
_ATTEMPTS = 3


@final
class Subscriber:
    """Takes one role's weights in. One thread.

    Args:
        name: of the worker.
        directory: where files are.
    """

    def __init__(
        self, name: str, *, directory: str = "", device: str = "cpu", bucket_bytes: int = BUCKET_BYTES, keys: Keys | None = None
    ) -> None:
        self._directory = directory
        self._bucket_bytes = bucket_bytes
        self._shared = SharedWeightsReader()
        self._broadcast = BroadcastReceiver(name, device=device, bucket_bytes=bucket_bytes)
        self._streams = StreamReceiver(name, keys=keys, bucket_bytes=bucket_bytes)
        self.num_bytes = 0
        """What the last publication took to get here."""

    def tensors(
        self,
        manifest: Manifest,
        transport: str,
        *,
        held_version: int = -1,
        held: Held | None = None,
        verify: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Weight]]:
        """The tensors of a publication.

        Args:
            held: the tensors of version `held_version`, as they were published; what changed since may then be enough.
            verify: names of tensors whose checksums are compared on arrival, None for all; the caller sees to the others.
        Raises:
            ChannelError: tensors are not what was published; they are named. BrokenChannel: the other side is gone.
        """
        self.num_bytes = 0
        base = held_version if held is not None else -1
        if transport == "shared memory":
            self.num_bytes = manifest.num_bytes
            return self._shared.read(manifest, verify=verify is None or len(verify) > 0)
        if transport == "file":
            parts = self._from_files(manifest, base, held)
        elif transport == "broadcast":
            parts = self._asked_for(lambda base: self._broadcast.receive(manifest.address, manifest.version, base), manifest, base, held)
        elif transport == "tcp":
            parts = self._asked_for(lambda base: self._streams.receive(manifest.stream, manifest.version, base), manifest, base, held)
        else:
            raise InternalError(f"weights do not come by {transport!r}")
        return named(manifest.whole(), _verified(parts, manifest, verify))

    def close(self) -> None:
        """Let go of mappings and groups. May be called twice."""
        self._shared.close()
        self._broadcast.close()
        self._streams.close()

    def _from_files(self, manifest: Manifest, base: int, held: Held | None) -> Iterator[tuple[TensorEntry, Bytes]]:
        with ExitStack() as stack:
            opened: list[WeightFile] = []
            for name in reversed(manifest.files):  # From the last back to a version that is held, or to a whole model.
                file = open_file(self._directory, name)
                stack.callback(file.close)
                opened.append(file)
                if file.content.base == base:
                    break
            opened.reverse()
            if not opened or opened[-1].content.version != manifest.version:
                raise ChannelError(f"there are no files of version {manifest.version} of the weights")
            is_whole = opened[0].content.base < 0
            updates = [self._update(file.content, file.read) for file in opened[is_whole:]]
            if is_whole:
                first = opened[0]
                self.num_bytes += first.content.num_bytes
                buckets = arriving(first.read, first.content.num_bytes, self._bucket_bytes)
                parts = unpacked(buckets, first.content.tensors, first.content.num_bytes)
            else:
                parts = _held_parts(manifest, held)
            yield from _updated(parts, updates)

    def _asked_for(
        self, receive: Callable[[int], tuple[Content, Iterator[Bytes]]], manifest: Manifest, base: int, held: Held | None
    ) -> Iterator[tuple[TensorEntry, Bytes]]:
        done: set[str] = set()
        for attempt in range(_ATTEMPTS):
            content, buckets = receive(base)
            if content.base not in (-1, base):
                raise ChannelError(f"changes to version {content.base} came to who holds {base}")
            if not 0 <= content.num_bytes <= (manifest.num_bytes if content.base < 0 else _most_bytes(manifest)):
                raise DecodeError(f"{content.num_bytes:,} bytes of weights are announced, of a model of {manifest.num_bytes:,}")
            try:
                if content.base < 0:
                    self.num_bytes += content.num_bytes
                    parts = unpacked(buckets, manifest.tensors, manifest.num_bytes)
                else:
                    self.num_bytes += content.num_bytes
                    body = collected(buckets, content.num_bytes)
                    parts = _updated(_held_parts(manifest, held), [(_by_name(content), body)])
                for entry, raw in parts:
                    if entry.name not in done:
                        yield entry, raw
                        done.add(entry.name)
                return
            except BrokenChannel:
                # Another receiver may have died, which ends the group for all: the rest comes with the next.
                base = -1
                if attempt + 1 == _ATTEMPTS:
                    raise

    def _update(self, content: Content, read: Callable[[Bytes], None]) -> tuple[dict[str, Change], Bytes]:
        body = collected(arriving(read, content.num_bytes, self._bucket_bytes), content.num_bytes)
        self.num_bytes += content.num_bytes
        return _by_name(content), body


def _most_bytes(manifest: Manifest) -> int:
    """No change of a tensor is larger than the tensor, but for the padding of its parts."""
    return manifest.num_bytes + 3 * ALIGNMENT * len(manifest.tensors)


def _by_name(content: Content) -> dict[str, Change]:
    return {change.name: change for change in content.changes}


def _held_parts(manifest: Manifest, held: Held | None) -> Iterator[tuple[TensorEntry, Bytes]]:
    """The tensors that are here already, in the manifest's types and shapes."""
    assert held is not None
    wanted = {entry.name: entry for entry in manifest.tensors}
    for name, weight in held():
        entry = wanted.pop(name, None)
        if entry is None:
            continue
        dtype, shape, raw = bytes_of(name, weight)
        if (dtype, shape) != (entry.dtype, entry.shape):
            raise ChannelError(f"tensor {name!r} is held as {dtype} {list(shape)}; changes came for {entry.dtype} {list(entry.shape)}")
        yield entry, raw
    if wanted:
        raise ChannelError(f"changes came for tensors that are not held: {listed(sorted(wanted))}")


def _updated(
    parts: Iterable[tuple[TensorEntry, Bytes]], updates: list[tuple[dict[str, Change], Bytes]]
) -> Iterator[tuple[TensorEntry, Bytes]]:
    for entry, raw in parts:
        for changes, body in updates:
            change = changes.get(entry.name)
            if change is not None:
                raw = applied(entry, change, body, raw)
        yield entry, raw


def _verified(
    parts: Iterable[tuple[TensorEntry, Bytes]], manifest: Manifest, verify: Collection[str] | None
) -> Iterator[tuple[TensorEntry, Bytes]]:
    """The same, with the manifest's entries; raises at the end if tensors were not what they should be."""
    wanted = {entry.name: entry for entry in manifest.tensors}
    wrong = []
    for entry, raw in parts:
        known = wanted.pop(entry.name, None)
        if known is None or (known.dtype, known.shape) != (entry.dtype, entry.shape):
            raise ChannelError(f"tensor {entry.name!r} came, which was not published so")
        if (verify is None or entry.name in verify) and checksum(raw) != known.checksum:
            wrong.append(entry.name)
        yield known, raw
    wrong += sorted(wanted)
    if wrong:
        raise ChannelError(
            f"{len(wrong)} of {len(manifest.tensors)} tensors are not what was published: {listed(wrong)}",
            now="The weights were damaged on their way. Please report this run.",
        )
