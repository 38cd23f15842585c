"""Large columns over torch.distributed, point to point: each way from a process to an inbox is a group of two.

    sender   PairSender.announce -> Passage --(over a socket, with the head of the parcel)--> PairReceiver.receive    receiver
             PairSender.send ==== a thread for each way, frames of at most 4 MiB, over Gloo or NCCL ====^

Gloo between processes on CPUs; NCCL between two that have a GPU each, which the plan's route says: the same code, with the frames passing
through a buffer on each GPU. A receiver asks for frames only once the head has told it of them, so that no GPU spins for what may never
come. Frames wait in the sender's process until they are asked for.

Limits: torch's store and Gloo neither encrypt nor authenticate, so this is for loopback. A receiver waits for a sender whose head has come
and which is stopped. A thread that waits for a receiver ends with it, or with this process.
"""

from __future__ import annotations

import ctypes
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, final

import msgspec
import numpy as np

from m2flow.channels.codec import FRAME_BYTES, MAX_FRAMES
from m2flow.channels.groups import Bytes, Group, open_store, split_address
from m2flow.errors import BrokenChannel, DecodeError, SpecError

Backend = Literal["gloo", "nccl"]
PAIRS: dict[str, Backend] = {"torch gloo": "gloo", "torch nccl": "nccl"}
"""By the plan's name of a transport (`m2flow.micro.plan.Route`)."""
HOST = "127.0.0.1"
_MEETS_S = 10.0
"""For two processes of a host to find each other. Where one dies just then, torch takes twice this to notice."""
_WAITS_S = 7 * 86_400.0
"""For what was announced. Whoever dies ends a wait at once, whoever hangs is killed; and a time-out would end the pair for both."""
_MAX_GROUP_NAME = 64
_NUM_TOGETHER = 16
T = TypeVar("T")
_SENDER, _RECEIVER = 0, 1


class Passage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What follows a head over a pair."""

    store: str
    """Where its two processes find each other."""
    group: str
    backend: Backend
    sizes: tuple[int, ...]
    """Bytes of each frame."""


@final
class PairSender:
    """The sender's side of all its ways.

    Args:
        device: the GPU that NCCL sends from, if this process has one.
    """

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = device
        self._store: Any = None
        self._address = ""
        self._ways: dict[str, _Way] = {}

    def announce(self, frames: Sequence[memoryview], to: str, backend: Backend) -> Passage:
        """What a head says of frames that follow it."""
        way = self._ways.get(to)
        if way is None:
            if self._store is None:
                self._store = open_store(HOST, 0, is_server=True, timeout_s=_MEETS_S)
                self._address = f"{HOST}:{self._store.port}"
            device = self._device if backend == "nccl" else "cpu"
            way = self._ways[to] = _Way(self._address, f"pair-{secrets.token_hex(8)}", device)
            way.open()
        return Passage(self._address, way.group, backend, tuple(frame.nbytes for frame in frames))

    def send(self, frames: Sequence[memoryview], to: str) -> None:
        """The head has left: so may these. They must not change until they are there."""
        self._ways[to].put(frames)

    def num_on_their_way(self, to: str | None = None) -> int:
        """Parcels that this peer, or any, has not taken yet."""
        return sum(way.num_waiting for peer, way in self._ways.items() if to in (peer, None))

    def is_broken(self, to: str) -> bool:
        """Whether frames could not leave: the peer is gone."""
        return to in self._ways and self._ways[to].is_broken

    def forget(self, peer: str) -> None:
        """A peer is gone."""
        way = self._ways.pop(peer, None)
        if way is not None:
            way.close(0.0)

    def close(self, deadline: float = 0.0) -> None:
        """End the ways, as soon as all that was sent has left, or at this time of `time.monotonic`. May be called twice."""
        for way in self._ways.values():
            way.close(max(deadline - time.monotonic(), 0.0))
        self._ways.clear()
        self._store = None


@dataclass(eq=False)
class _Way:
    """To one inbox."""

    store: str
    group: str
    device: str
    num_waiting: int = 0
    is_broken: bool = False
    _frames: queue.SimpleQueue[Sequence[memoryview] | None] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    def open(self) -> None:
        self._thread = threading.Thread(target=self._run, name="m2flow-pair", daemon=True)
        self._thread.start()

    def put(self, frames: Sequence[memoryview]) -> None:
        with self._lock:
            self.num_waiting += 1
        self._frames.put(frames)

    def close(self, drain_s: float) -> None:
        self._frames.put(None)
        if self._thread is not None and drain_s:
            self._thread.join(drain_s)

    def _run(self) -> None:
        pair = None
        while (frames := self._frames.get()) is not None:
            try:
                if not self.is_broken:
                    pair = pair or _pair(self.store, self.group, _SENDER, self.device)
                    for some in _together(frames):
                        pair.send([_writable(frame) for frame in some], _RECEIVER)
            except BrokenChannel:
                self.is_broken = True
            with self._lock:
                self.num_waiting -= 1


@final
class PairReceiver:
    """The other side; keeps its pairs from one parcel to the next. One thread.

    Args:
        device: the GPU that NCCL receives on, if this process has one.
    """

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = device
        self._pairs: dict[str, Group] = {}

    def receive(self, passage: Passage) -> list[memoryview]:
        """The frames that follow a head, each in memory of its own.

        Raises:
            BrokenChannel: the sender is gone. DecodeError: no passage that there could be.
        """
        try:
            host, _ = split_address(passage.store)
        except SpecError as error:
            raise DecodeError(f"columns by way of {passage.store!r}: {error.what}") from None
        if host != HOST or not 0 < len(passage.group) <= _MAX_GROUP_NAME:
            raise DecodeError(f"columns by way of {passage.store[:100]!r} and the pair {passage.group[:100]!r}")
        if len(passage.sizes) > MAX_FRAMES or not all(0 < size <= FRAME_BYTES for size in passage.sizes):
            raise DecodeError(f"columns in {len(passage.sizes):,} frames of up to {max(passage.sizes, default=0):,} bytes")
        if passage.backend == "nccl" and self._device == "cpu":
            raise DecodeError("columns by way of NCCL to a process that has no GPU")
        pair = self._pairs.get(passage.group)
        if pair is None:
            device = self._device if passage.backend == "nccl" else "cpu"
            pair = self._pairs[passage.group] = _pair(passage.store, passage.group, _RECEIVER, device)
        frames = []
        for sizes in _together(passage.sizes):  # Some at a time: no more memory is taken for what does not come.
            some = [np.empty(size, np.uint8) for size in sizes]
            try:
                pair.receive(some, _SENDER)
            except BrokenChannel:
                self._pairs.pop(passage.group, None)
                raise
            frames += [frame.data for frame in some]
        return frames

    def forget(self, group: str) -> None:
        """Its sender has ended, or is gone."""
        self._pairs.pop(group, None)

    def close(self) -> None:
        """Leave all pairs. May be called twice."""
        self._pairs.clear()


def _pair(store: str, name: str, rank: int, device: str) -> Group:
    host, port = split_address(store)
    try:
        socket.create_connection((host, port), _MEETS_S).close()  # Torch would try again and again for who is gone.
    except OSError as error:
        raise BrokenChannel(f"nobody to meet at {store}: {error.strerror or error}") from None
    met = open_store(host, port, is_server=False, timeout_s=_MEETS_S)
    return Group(met, name, rank, 2, host=host, device=device, timeout_s=_WAITS_S)


def _together(frames: Sequence[T]) -> Iterator[Sequence[T]]:
    """Frames that are under way at the same time."""
    return (frames[i : i + _NUM_TOGETHER] for i in range(0, len(frames), _NUM_TOGETHER))


def _writable(frame: memoryview) -> Bytes:
    """The same memory as an array that torch takes, which has no tensors that can't be written. It is only read."""
    address = np.frombuffer(frame, np.uint8).ctypes.data
    return np.ctypeslib.as_array((ctypes.c_uint8 * frame.nbytes).from_address(address))
