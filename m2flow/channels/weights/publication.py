"""Publish and subscribe: the two ends of a weight sync.

    trainer.weights() --type conversion--> shared memory --> Manifest
                                                |  compared with the version before, where that can pay
                                                +--> file: the whole model, or what changed
                                                +--> broadcast, tcp: whichever of them a receiver asks for

    Manifest --Subscriber.tensors--> (name, Weight), ... --> rollout.load_weights

The staged copy has the receivers' type, stays from one version to the next, and is what the next version is compared with. So training goes
on as soon as it is written, and a receiver that is late or restarted takes the current version from it. Each transport then carries the
whole model or a delta to the version before, whichever takes less time (`is_delta_worth_it`).

A subscriber's tensors are views that are valid until the next one is taken (shared memory: until the next publication).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.endpoints import Keys
from m2flow.channels.weights.broadcast import BroadcastReceiver, BroadcastServer, Offer
from m2flow.channels.weights.buckets import BUCKET_BYTES, join_buckets, receive_buckets, unpack_buckets
from m2flow.channels.weights.delta import Changes, applied
from m2flow.channels.weights.manifest import ALIGNMENT, Change, Content, Manifest, TensorEntry, listed, named
from m2flow.channels.weights.shared_segment import SharedWeights, SharedWeightsReader
from m2flow.channels.weights.streams import StreamReceiver, StreamServer
from m2flow.channels.weights.tensors import Tied, Weight, bytes_of, checksum
from m2flow.channels.weights.weight_files import WeightFile, WeightFiles, open_file
from m2flow.errors import BrokenChannel, ChannelError, DecodeError, InternalError

Transport = Literal["same process", "shared memory", "broadcast", "tcp", "file"]
_MOST_SKIPPED = 16


@dataclass(frozen=True)
class WeightOptions:
    """How weights are transferred. Affects time only."""

    transports: tuple[str, ...] = ("shared memory",)
    """Transports that some receiver uses."""
    directory: str = ""
    """For `file`: a directory that both sides reach."""
    host: str = "127.0.0.1"
    """For `broadcast` and `tcp`: the address to listen at."""
    keys: Keys | None = None
    """For `tcp`: the cluster's key. Without one it listens at loopback alone."""
    device: str = "cpu"
    """For `broadcast`: a GPU's name for NCCL."""
    num_receivers: int = 1
    changes: Literal["auto", "never", "always"] = "auto"
    """Send deltas where that takes less time; never; or wherever there is a version to compare with."""
    bucket_bytes: int = BUCKET_BYTES


@dataclass
class Published:
    """Sizes of the last publication, and why it was sent whole or as a delta."""

    num_bytes: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes by transport, as far as they are known here."""
    share_changed: float = -1.0
    """Share of values that changed; -1: not compared, or not to the end."""
    why: str = ""


@final
class Publisher:
    """Publishes one role's weights. The name starts with the prefix that `remove_segments` and `remove_files` are given. One thread."""

    def __init__(self, name: str, options: WeightOptions) -> None:
        self._options = options
        self._shared = SharedWeights(name)
        self._files = WeightFiles(options.directory, name) if "file" in options.transports else None
        self._server: BroadcastServer | None = None
        self._address = ""
        self._streams: StreamServer | None = None
        self._stream = ""
        self._name = name
        self._version = -1
        self._num_bytes = 0
        self._file_bytes_per_s = 0.0
        self._num_to_skip = 0
        self._num_skipped_last = 0
        self.last = Published()

    def publish(self, tensors: Iterable[tuple[str, Weight | Tied]], version: int) -> Manifest:
        """Stage a version and offer it.

        Raises:
            ChannelError: a tensor's type can't be sent, or there is no room for it.
        """
        if self._server is not None:
            self._server.withdraw()
        if self._streams is not None:
            self._streams.withdraw()
        changes = self._changes()
        base, self._version = self._version, -1
        start = time.monotonic()
        manifest = self._shared.write(tensors, version=version, changes=changes)
        took_s = time.monotonic() - start
        self._version, self._num_bytes = version, manifest.num_bytes
        body = self._shared.body(manifest.num_bytes)
        self.last = Published(manifest.num_bytes, {"shared memory": manifest.num_bytes})
        found = None
        if changes is not None:
            result = changes.result()
            if result is None:
                self.last.why = "whole: too much changed, or there is nothing to compare with"
                self._num_skipped_last = min(2 * self._num_skipped_last + 1, _MOST_SKIPPED)
                self._num_to_skip = self._num_skipped_last
            else:
                self._num_skipped_last = 0
                self.last.share_changed = changes.num_changed / max(changes.num_values, 1)
                found = (Content(version, base, len(result[1]), manifest.tensors, manifest.tied, result[0]), result[1])
        if self._files is not None:
            self._to_file(manifest.whole(), body, found, took_s)
            manifest = msgspec.structs.replace(manifest, files=self._files.chain)
        if "broadcast" in self._options.transports:
            speed = self._server.bytes_per_s if self._server is not None else 0.0
            pays = found is not None and self._is_delta_worth_it(len(found[1]), manifest.num_bytes, speed, took_s)
            self._broadcast_server().offer(Offer((manifest.whole(), body), found if pays else None))
            manifest = msgspec.structs.replace(manifest, address=self._address)
            self.last.sent["broadcast"] = len(found[1]) if pays and found is not None else manifest.num_bytes
        if "tcp" in self._options.transports:
            streams = self._stream_server()
            pays = found is not None and self._is_delta_worth_it(len(found[1]), manifest.num_bytes, streams.bytes_per_s, took_s)
            streams.offer(Offer((manifest.whole(), body), found if pays else None))
            manifest = msgspec.structs.replace(manifest, stream=self._stream)
            self.last.sent["tcp"] = len(found[1]) if pays and found is not None else manifest.num_bytes
        return manifest

    def close(self) -> None:
        """Stop the servers and remove files and the staged copy. May be called twice."""
        if self._server is not None:
            self._server.close()
        if self._streams is not None:
            self._streams.close()
        if self._files is not None:
            self._files.close()
        self._shared.close()

    def _changes(self) -> Changes | None:
        """A collector of what changed since the version before; None where a delta can't be of use."""
        can = set(self._options.transports) & {"file", "broadcast", "tcp"} and self._version >= 0
        if not can or self._options.changes == "never":
            return None
        if self._options.changes == "always":
            return Changes(float("inf"), hopeless=1.0)
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        return Changes(self._num_bytes / 2)

    def _to_file(self, whole: Content, body: object, found: tuple[Content, object] | None, took_s: float) -> None:
        assert self._files is not None
        if found is not None:
            content, new = found
            size = content.num_bytes
            pays = self._is_delta_worth_it(size, whole.num_bytes, self._file_bytes_per_s, took_s)
            if pays and self._files.takes(size, whole.num_bytes):
                self._files.write(content, new)  # type: ignore[arg-type]
                self.last.sent["file"] = size
                return
        start = time.monotonic()
        self._files.write(whole, body)  # type: ignore[arg-type]
        self._file_bytes_per_s = whole.num_bytes / max(time.monotonic() - start, 1e-9)
        self.last.sent["file"] = whole.num_bytes

    def _is_delta_worth_it(self, num_bytes: int, whole_bytes: int, bytes_per_s: float, took_s: float) -> bool:
        if self._options.changes == "always":
            self.last.why = "changes: asked for"
            return True
        is_worth_it, self.last.why = is_delta_worth_it(num_bytes, whole_bytes, bytes_per_s, took_s)
        return is_worth_it

    def _broadcast_server(self) -> BroadcastServer:
        if self._server is None:
            self._server = BroadcastServer(
                host=self._options.host,
                device=self._options.device,
                num_expected=self._options.num_receivers,
                bucket_bytes=self._options.bucket_bytes,
            )
            self._address = self._server.open()
        return self._server

    def _stream_server(self) -> StreamServer:
        if self._streams is None:
            self._streams = StreamServer(host=self._options.host, keys=self._options.keys)
            self._stream = self._streams.open()
        return self._streams


def is_delta_worth_it(num_bytes: int, whole_bytes: int, bytes_per_s: float, apply_s: float) -> tuple[bool, str]:
    """Whether to send a delta instead of the whole model, and why.

    Args:
        bytes_per_s: the transport's last speed; 0: not known yet.
        apply_s: time to apply the delta at a receiver: about what comparing took here.

    >>> is_delta_worth_it(10_000_000, 1_000_000_000, 1e8, 0.2)[0], is_delta_worth_it(10_000_000, 1_000_000_000, 1e10, 0.2)[0]
    (True, False)
    """
    if not bytes_per_s:
        is_worth_it = num_bytes < whole_bytes / 2
        return is_worth_it, f"{_kind_of(is_worth_it)}: {num_bytes:,} of {whole_bytes:,} bytes changed, speed not known yet"
    small_s, whole_s = num_bytes / bytes_per_s + apply_s, whole_bytes / bytes_per_s
    return small_s < whole_s, (
        f"{_kind_of(small_s < whole_s)}: {small_s:.3f} s with {num_bytes:,} bytes and applying them, "
        f"{whole_s:.3f} s with {whole_bytes:,} bytes, at {bytes_per_s / 1e9:.2f} GB/s"
    )


def _kind_of(is_worth_it: bool) -> str:
    return "changes" if is_worth_it else "whole"


# ---- the receiving end

Bytes = npt.NDArray[np.uint8]
Held = Callable[[], Iterable[tuple[str, Weight]]]
_ATTEMPTS = 3


@final
class Subscriber:
    """Receives one role's weights. One thread.

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
        """Bytes that the last publication took to get here."""

    def tensors(
        self,
        manifest: Manifest,
        transport: str,
        *,
        held_version: int = -1,
        held: Held | None = None,
        verify: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Weight]]:
        """Yield the tensors of a publication.

        Args:
            held: gives the tensors of version `held_version`, as they were published; a delta to them may then be enough.
            verify: names of tensors whose checksums are compared on arrival, None for all; the caller checks the others.
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
            parts = self._from_server(lambda base: self._broadcast.receive(manifest.address, manifest.version, base), manifest, base, held)
        elif transport == "tcp":
            parts = self._from_server(lambda base: self._streams.receive(manifest.stream, manifest.version, base), manifest, base, held)
        else:
            raise InternalError(f"weights do not come by {transport!r}")
        return named(manifest.whole(), _verified(parts, manifest, verify))

    def close(self) -> None:
        """Drop mappings, groups and connections. May be called twice."""
        self._shared.close()
        self._broadcast.close()
        self._streams.close()

    def _from_files(self, manifest: Manifest, base: int, held: Held | None) -> Iterator[tuple[TensorEntry, Bytes]]:
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
            updates = [self._update(file.content, file.read) for file in opened[is_whole:]]
            if is_whole:
                first = opened[0]
                self.num_bytes += first.content.num_bytes
                buckets = receive_buckets(first.read, first.content.num_bytes, self._bucket_bytes)
                parts = unpack_buckets(buckets, first.content.tensors, first.content.num_bytes)
            else:
                parts = _held_parts(manifest, held)
            yield from _updated(parts, updates)

    def _from_server(
        self, receive: Callable[[int], tuple[Content, Iterator[Bytes]]], manifest: Manifest, base: int, held: Held | None
    ) -> Iterator[tuple[TensorEntry, Bytes]]:
        done: set[str] = set()
        for attempt in range(_ATTEMPTS):
            content, buckets = receive(base)
            if content.base not in (-1, base):
                raise ChannelError(f"changes to version {content.base} came to who holds {base}")
            if not 0 <= content.num_bytes <= (manifest.num_bytes if content.base < 0 else _max_delta_bytes(manifest)):
                raise DecodeError(f"{content.num_bytes:,} bytes of weights are announced, of a model of {manifest.num_bytes:,}")
            try:
                if content.base < 0:
                    self.num_bytes += content.num_bytes
                    parts = unpack_buckets(buckets, manifest.tensors, manifest.num_bytes)
                else:
                    self.num_bytes += content.num_bytes
                    body = join_buckets(buckets, content.num_bytes)
                    parts = _updated(_held_parts(manifest, held), [(_by_name(content), body)])
                for entry, raw in parts:
                    if entry.name not in done:
                        yield entry, raw
                        done.add(entry.name)
                return
            except BrokenChannel:
                # Another receiver may have died, which ends the group for all: ask for the rest in the next one.
                base = -1
                if attempt + 1 == _ATTEMPTS:
                    raise

    def _update(self, content: Content, read: Callable[[Bytes], None]) -> tuple[dict[str, Change], Bytes]:
        body = join_buckets(receive_buckets(read, content.num_bytes, self._bucket_bytes), content.num_bytes)
        self.num_bytes += content.num_bytes
        return _by_name(content), body


def _max_delta_bytes(manifest: Manifest) -> int:
    """Bound on a delta: no tensor's change is larger than the tensor, except for the padding of its parts."""
    return manifest.num_bytes + 3 * ALIGNMENT * len(manifest.tensors)


def _by_name(content: Content) -> dict[str, Change]:
    return {change.name: change for change in content.changes}


def _held_parts(manifest: Manifest, held: Held | None) -> Iterator[tuple[TensorEntry, Bytes]]:
    """Yield the tensors of the base version, which the receiver holds, in the manifest's types and shapes."""
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
    """Pass tensors on with the manifest's entries; raise at the end if some differ from what was published."""
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
