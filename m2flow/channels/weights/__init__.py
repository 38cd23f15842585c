"""Publish model weights from a trainer to the engines that sample from them: verified, in buckets, over the transport that fits.

    trainer.weights() --Publisher.publish--> Manifest --control link--> Subscriber.tensors --> rollout.load_weights
                        staged once, checksums        shared memory | cuda ipc | broadcast | tcp | file

Modules, from the inside out: `tensors` (types, conversion, checksums), `payload` (the manifest, buckets, and what changed since
the last version), `transport` (the interface of all transports), a module for each of them (`shared_segment`, `device` for CUDA IPC,
`broadcast`, `streams`, `weight_files`). Their table, and both ends, are here.

    trainer.weights() --type conversion--> the transport's stage --> Manifest
    or each rank its pieces, ungathered -------->|
                                                |  compared with the version before, where that can pay
                                                +--> each transport that sends: the whole model, or what changed

    Manifest --Subscriber.tensors--> (name, tensor), ... --> rollout.load_weights

The staged copy has the receivers' type, stays from one version to the next, and is what the next version is compared with. So training goes
on as soon as it is written, and a receiver that is late or restarted takes the current version from it. A transport that sends carries the
whole model or a delta to the version before, whichever takes less time (`is_delta_worth_it`).

A subscriber's tensors are views that are valid until the next one is taken (in place: until the next publication).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from m2flow.channels.weights.broadcast import Broadcast
from m2flow.channels.weights.device import CudaIpc
from m2flow.channels.weights.payload import BUCKET_BYTES, Changes, Content, Manifest, TensorEntry, Written
from m2flow.channels.weights.shared_segment import PieceWriter, SharedMemory, SharedWeights, SharedWeightsReader, remove_segments
from m2flow.channels.weights.streams import Streams
from m2flow.channels.weights.tensors import RawBits, Tied, Weight, digest
from m2flow.channels.weights.transport import Bytes, Held, Offer, Receiver, Sender, Spread, Stage, Transport, WeightOptions
from m2flow.channels.weights.weight_files import Files
from m2flow.errors import InternalError

if TYPE_CHECKING:
    from m2flow.channels.zeromq import Keys

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

TRANSPORTS: dict[str, Transport] = {
    "shared memory": SharedMemory(),
    "cuda ipc": CudaIpc(),
    "broadcast": Broadcast(),
    "tcp": Streams(),
    "file": Files(),
}
"""Every way of weights between processes, by its name in plans and cluster specs."""
_MOST_SKIPPED = 16


@dataclass
class Published:
    """Sizes of the last publication, and why it was sent whole or as a delta."""

    num_bytes: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes by transport, as far as they are known here."""
    written: tuple[int, ...] = ()
    """Bytes that each process of a spread version wrote; empty: one process wrote all."""
    share_changed: float = -1.0
    """Share of values that changed; -1: not compared, or not to the end."""
    why: str = ""


@final
class Publisher:
    """Publishes one role's weights. The name starts with the prefix that `remove_segments` and `remove_files` are given. One thread."""

    def __init__(self, name: str, options: WeightOptions) -> None:
        self._options = options
        self._stage = _stage_of(name, options)
        self._senders = {each: sender for each in options.transports if (sender := transport_named(each).sender(name, options)) is not None}
        self._opened: set[str] = set()
        self._version = -1
        self._num_bytes = 0
        self._num_to_skip = 0
        self._num_skipped_last = 0
        self.last = Published()

    def publish(self, tensors: Iterable[tuple[str, Any]], version: int, dtype: str | None = None, spread: Spread | None = None) -> Manifest:
        """Stage a version and offer it.

        Args:
            tensors: an engine's, in memory of the host or, for transports that stage there, on a device; or arrays, raw bits, ties.
            dtype: type that floating-point tensors are converted to; None: keep theirs.
            spread: the same tensors, as several processes hold them. They are then written by these, and `tensors` is not read, unless
                the stage takes no pieces, or what is written over is compared.
        Raises:
            ChannelError: a tensor's type can't be sent, or there is no room for it.
        """
        for sender in self._senders.values():
            sender.withdraw()
        changes = self._changes()
        base, self._version = self._version, -1
        start = time.monotonic()
        written: list[int] = []
        if spread is not None and self._stage.takes_pieces and changes is None:
            manifest = self._stage.write_spread(_noting(spread, written), version=version, dtype=dtype)
        else:
            manifest = self._stage.write(tensors, version=version, dtype=dtype, changes=changes)
        took_s = time.monotonic() - start
        self._version, self._num_bytes = version, manifest.num_bytes
        self.last = Published(manifest.num_bytes, dict.fromkeys(self._in_place(), manifest.num_bytes), tuple(written))
        delta = self._delta(changes, base, manifest) if changes is not None else None
        whole = manifest.whole()
        for name, sender in self._senders.items():
            pays = delta is not None and self._pays(sender, delta[0].num_bytes, manifest.num_bytes, took_s)
            if name not in self._opened:
                sender.open()
                self._opened.add(name)
            sender.offer(Offer((whole, self._stage.body(manifest.num_bytes)), delta if pays else None))
            manifest = sender.found_at(manifest)
            self.last.sent[name] = delta[0].num_bytes if pays and delta is not None else manifest.num_bytes
        return manifest

    def close(self) -> None:
        """Stop the senders and free the staged copy. May be called twice."""
        for sender in self._senders.values():
            sender.close()
        self._stage.close()

    def _in_place(self) -> list[str]:
        return [name for name in self._options.transports if name not in self._senders]

    def _changes(self) -> Changes | None:
        """A collector of what changed since the version before; None where a delta can't be of use."""
        if not self._senders or self._version < 0 or self._options.changes == "never":
            return None
        if self._options.changes == "always":
            return Changes(float("inf"), hopeless=1.0)
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        return Changes(self._num_bytes / 2)

    def _delta(self, changes: Changes, base: int, manifest: Manifest) -> tuple[Content, Bytes] | None:
        """What changed since the base version; None where that is too much, and then some versions are not compared."""
        result = changes.result()
        if result is None:
            self.last.why = "whole: too much changed, or there is nothing to compare with"
            self._num_skipped_last = min(2 * self._num_skipped_last + 1, _MOST_SKIPPED)
            self._num_to_skip = self._num_skipped_last
            return None
        self._num_skipped_last = 0
        self.last.share_changed = changes.num_changed / max(changes.num_values, 1)
        return Content(manifest.version, base, len(result[1]), manifest.tensors, manifest.tied, result[0]), result[1]

    def _pays(self, sender: Sender, num_bytes: int, whole_bytes: int, took_s: float) -> bool:
        """Whether a sender sends a delta rather than the whole model."""
        if self._options.changes == "always":
            is_worth_it, self.last.why = True, "changes: asked for"
        else:
            is_worth_it, self.last.why = is_delta_worth_it(num_bytes, whole_bytes, sender.bytes_per_s, took_s)
        return is_worth_it and sender.takes(num_bytes, whole_bytes)


def _noting(spread: Spread, written: list[int]) -> Spread:
    """The same; the bytes that each process writes are written down."""

    def write(manifest: Manifest) -> Sequence[Written]:
        found = spread.write(manifest)
        written.extend(one.num_bytes for one in found)
        return found

    return Spread(spread.forms, write)


def transport_named(name: str) -> Transport:
    """Return the transport that a plan names."""
    if name not in TRANSPORTS:
        raise InternalError(f"weights do not come by {name!r}")
    return TRANSPORTS[name]


def _stage_of(name: str, options: WeightOptions) -> Stage:
    """The one stage of all transports of a publication."""
    first, *others = (transport_named(each).stage(name) for each in options.transports)
    if any(type(other) is not type(first) for other in others):
        raise InternalError(f"weights can't be staged for {' and '.join(options.transports)} at once")
    return first


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
        self._name = name
        self._options = WeightOptions(directory=directory, device=device, bucket_bytes=bucket_bytes, keys=keys)
        self._receivers: dict[str, Receiver] = {}
        self._last: Receiver | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that the last publication took to get here."""
        return self._last.num_bytes if self._last is not None else 0

    def tensors(
        self,
        manifest: Manifest,
        transport: str,
        *,
        held_version: int = -1,
        held: Callable[[], Iterable[tuple[str, Weight]]] | None = None,
        verify: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Yield the tensors of a publication (`Receiver.receive`).

        Args:
            held: gives the tensors of version `held_version`, as they were published; a delta to them may then be enough.
            verify: names of tensors whose checksums are compared on arrival, None for all; the caller checks the others.
        Raises:
            ChannelError: tensors are not what was published; they are named. BrokenChannel: the other side is gone.
        """
        receiver = self._receivers.get(transport)
        if receiver is None:
            receiver = self._receivers[transport] = transport_named(transport).receiver(self._name, self._options)
        self._last = receiver
        return receiver.receive(manifest, Held(held_version, held) if held is not None else None, verify)

    def close(self) -> None:
        """Drop mappings, groups and connections. May be called twice."""
        for receiver in self._receivers.values():
            receiver.close()
