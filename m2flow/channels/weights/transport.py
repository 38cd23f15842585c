"""Define the transport of weights: what every way from a trainer's process to the process of a rollout engine implements.

    engine.weights() --Stage.write--> memory of the host or of a GPU --Sender.offer--> Receiver.receive --> engine.load_weights
                                      Manifest, by the control link ------------------->

A `Transport` names the stage that it needs and makes its two ends. In place, receivers map the stage itself, and there is no sender: shared
memory, CUDA IPC. The others have one that sends what is staged, whole or as changes, to receivers that ask. Each vendor is one module;
`m2flow.channels.weights.TRANSPORTS` is the table of them, and the plan chooses by name. Publisher and subscriber know this interface alone,
and lowering asks it what a transport can do. A copy inside one process needs no transport.

What a vendor's own server offers for weights is no transport of this table but that engine's business: `m2flow.engines.servers.sglang` has
its `WeightTransfer` (on a GPU by CUDA IPC handles of SGLang's), which begins where these end, in the process of the rollout engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt

from m2flow.channels.weights.payload import (
    ALIGNMENT,
    BUCKET_BYTES,
    Changes,
    Content,
    Manifest,
    TensorEntry,
    Written,
    changes_by_name,
    join_buckets,
    listed,
    named,
    unpack_buckets,
    updated,
)
from m2flow.channels.weights.tensors import Weight, bytes_of, checksum
from m2flow.errors import BrokenChannel, ChannelError, DecodeError, InternalError

if TYPE_CHECKING:
    from m2flow.channels.zeromq import Keys

Bytes = npt.NDArray[np.uint8]
_ATTEMPTS = 3


@dataclass(frozen=True)
class WeightOptions:
    """How weights are transferred. Affects time only."""

    transports: tuple[str, ...] = ("shared memory",)
    """Transports that some receiver uses. Those of one publication stage in the same memory."""
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


@dataclass(frozen=True)
class Offer:
    """A version that can be sent, whole or as a delta."""

    whole: tuple[Content, Bytes]
    changes: tuple[Content, Bytes] | None
    """What changed since another version, for receivers that hold that one."""


class Held(NamedTuple):
    """The version that a receiver's engine holds, to which a delta may be enough."""

    version: int
    tensors: Callable[[], Iterable[tuple[str, Weight]]]
    """Its tensors, as they were published."""


@dataclass(frozen=True)
class Spread:
    """A version that several processes have pieces of, none of them all."""

    forms: Sequence[tuple[str, str, tuple[int, ...]]]
    """Name, type and shape of each tensor, whole."""
    write: Callable[[Manifest], Sequence[Written]]
    """Has each process write its pieces to where the manifest says; returns when all have."""


class Stage(ABC):
    """Holds a role's current version in memory that other processes can map. One thread."""

    takes_pieces: bool = False
    """Several processes can write to it (`write_spread`)."""

    @abstractmethod
    def write(
        self, tensors: Iterable[tuple[str, Any]], *, version: int = -1, dtype: str | None = None, changes: Changes | None = None
    ) -> Manifest:
        """Copy engines' tensors in, over the last version. They are taken one by one, so need not all be in memory at once.

        Args:
            dtype: type that floating-point tensors are converted to; None: keep theirs.
            changes: collects what changed in each tensor, if the stage can compare.
        Raises:
            ChannelError: a type that does not travel, a name that comes twice, or no room.
        """

    def write_spread(self, spread: Spread, *, version: int = -1, dtype: str | None = None) -> Manifest:
        """Have processes write a version that they hold together, over the last version, where `takes_pieces`. Otherwise as `write`.

        Raises:
            ChannelError: also where their pieces are not each tensor exactly once.
        """
        raise InternalError(f"{type(self).__name__} is written by one process")

    @abstractmethod
    def body(self, num_bytes: int) -> Bytes:
        """Return a view of the first bytes staged, which must not be written."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. May be called twice."""


class Sender(ABC):
    """Sends one role's staged versions to receivers that ask. All methods are called from one thread."""

    bytes_per_s: float = 0.0
    """Bandwidth of the last whole model; 0: not known yet."""

    @abstractmethod
    def open(self) -> str:
        """Begin to serve. Returns the address."""

    @abstractmethod
    def withdraw(self) -> None:
        """Stop offering, since the staged bytes are about to be overwritten. Waits for what is being read."""

    def takes(self, num_bytes: int, whole_bytes: int) -> bool:
        """Whether a delta of this size can be sent now."""
        return True

    @abstractmethod
    def offer(self, offer: Offer) -> None:
        """Send this version to receivers that ask from now on."""

    @abstractmethod
    def found_at(self, manifest: Manifest) -> Manifest:
        """Add where receivers find the version that is offered."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving and remove what was made for it. May be called twice."""


class Receiver(ABC):
    """Receives one role's versions; keeps connections and mappings from one to the next. One thread."""

    num_bytes: int = 0
    """Bytes that the last version took to get here."""

    @abstractmethod
    def receive(self, manifest: Manifest, held: Held | None, verify: Collection[str] | None) -> Iterator[tuple[str, Any]]:
        """Yield a version's tensors under all of their names, each valid until the next is taken.

        Arrays or raw bits of host memory, torch tensors of a GPU (`tensors.from_wire` makes one of both).

        Args:
            verify: names of tensors whose checksums are compared on arrival, None for all; the caller checks the others.
        Raises:
            ChannelError: tensors are not what was published; they are named. BrokenChannel: the other side is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop connections and mappings. May be called twice."""


class Transport(ABC):
    """Makes both ends of one way of weights between processes, and says what it can do."""

    stage_class: type[Stage]
    """What `stage` makes."""
    is_in_place: bool = False
    """Receivers map the stage itself, so what they read can be read again."""
    crosses_hosts: bool = False
    """The two processes may be on different hosts."""
    needs_gpu: bool = False
    """Both processes must have a GPU."""
    takes_adapters: bool = True
    """The adapters of a model can go without the weights that they are added to."""

    @property
    def takes_pieces(self) -> bool:
        """Whether each rank of a trainer can send what it holds."""
        return self.stage_class.takes_pieces

    @property
    def sends_changes(self) -> bool:
        """Whether it can send what changed since the version before: then the stage is compared, and one process writes it."""
        return not self.is_in_place

    @abstractmethod
    def stage(self, name: str) -> Stage:
        """Make the memory that it sends from. Transports whose stages are of one class can share it."""

    @abstractmethod
    def sender(self, name: str, options: WeightOptions) -> Sender | None:
        """Make the trainer's end; None: receivers map the stage."""

    @abstractmethod
    def receiver(self, worker: str, options: WeightOptions) -> Receiver:
        """Make the rollout engine's end. It connects when it receives."""


@final
class ServerReceiver(Receiver):
    """Receives from a trainer's server: asks for what follows the version that is held, and again where a broadcast broke off.

    Args:
        ask: asks for a manifest's version while a version (-1: none) is held; returns what will come, and its buckets.
    """

    def __init__(self, ask: Callable[[Manifest, int], tuple[Content, Iterator[Bytes]]], close: Callable[[], None]) -> None:
        self._ask = ask
        self._close = close

    def receive(self, manifest: Manifest, held: Held | None, verify: Collection[str] | None) -> Iterator[tuple[str, Any]]:
        return named(manifest.whole(), verified(self._parts(manifest, held), manifest, verify))

    def close(self) -> None:
        self._close()

    def _parts(self, manifest: Manifest, held: Held | None) -> Iterator[tuple[TensorEntry, Bytes]]:
        self.num_bytes = 0
        base = held.version if held is not None else -1
        done: set[str] = set()
        for attempt in range(_ATTEMPTS):
            content, buckets = self._ask(manifest, base)
            if content.base not in (-1, base):
                raise ChannelError(f"changes to version {content.base} of the weights arrived at a receiver that holds version {base}")
            if not 0 <= content.num_bytes <= (manifest.num_bytes if content.base < 0 else _max_delta_bytes(manifest)):
                raise DecodeError(f"{content.num_bytes:,} bytes of weights are announced, of a model of {manifest.num_bytes:,}")
            try:
                self.num_bytes += content.num_bytes
                if content.base < 0:
                    parts = unpack_buckets(buckets, manifest.tensors, manifest.num_bytes)
                else:
                    body = join_buckets(buckets, content.num_bytes)
                    parts = updated(held_parts(manifest, held), [(changes_by_name(content), body)])
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


def _max_delta_bytes(manifest: Manifest) -> int:
    """Bound on a delta: no tensor's change is larger than the tensor, except for the padding of its parts."""
    return manifest.num_bytes + 3 * ALIGNMENT * len(manifest.tensors)


def held_parts(manifest: Manifest, held: Held | None) -> Iterator[tuple[TensorEntry, Bytes]]:
    """Yield the tensors of the base version, which the receiver holds, in the manifest's types and shapes."""
    assert held is not None
    wanted = {entry.name: entry for entry in manifest.tensors}
    for name, weight in held.tensors():
        entry = wanted.pop(name, None)
        if entry is None:
            continue
        dtype, shape, raw = bytes_of(name, weight)
        if (dtype, shape) != (entry.dtype, entry.shape):
            raise ChannelError(f"tensor {name!r} is held as {dtype} {list(shape)}; changes came for {entry.dtype} {list(entry.shape)}")
        yield entry, raw
    if wanted:
        raise ChannelError(f"changes came for tensors that are not held: {listed(sorted(wanted))}")


def verified(
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
