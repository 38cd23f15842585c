"""Groups of processes in torch.distributed: bytes from the first to all others, or point to point for large columns.

Gloo on a CPU. NCCL where a GPU is named: bytes then go through a buffer on that GPU, which each member must have for itself (not run on
GPUs so far). Neither encrypts or authenticates. An operation that runs out of time ends the group for all of its members.

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
import datetime
import ipaddress
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.codec import FRAME_BYTES, MAX_FRAMES
from m2flow.errors import BrokenChannel, DecodeError, SpecError

Bytes = npt.NDArray[np.uint8]


@final
class Group:
    """One member. Of a broadcast rank 0 has the bytes. One thread.

    Args:
        store: a torch.distributed store that all members reach.
        name: of the group, new for each.
        host: the address of this member that others connect to.
        device: `cpu`, or the GPU whose NCCL is used.
    Raises:
        BrokenChannel: the others do not come, or go away.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, *, host: str, device: str, timeout_s: float) -> None:
        import torch
        import torch.distributed as dist

        self._device = device
        self._staging: Any = None
        timeout = datetime.timedelta(seconds=timeout_s)
        own = dist.PrefixStore(name, store)
        try:
            if device == "cpu":
                options = dist.ProcessGroupGloo._Options()
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                options._timeout = timeout
                self._group: Any = dist.ProcessGroupGloo(own, rank, size, options)
            else:
                torch.cuda.set_device(device)
                self._group = dist.ProcessGroupNCCL(own, rank, size, timeout)
        except RuntimeError as error:
            raise BrokenChannel(f"no group of processes came about: {_first_line(error)}") from None

    def broadcast(self, block: Bytes) -> None:
        """Send this from rank 0, or take it in, elsewhere."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._move([block], lambda tensors: self._group.broadcast(tensors, options), "a broadcast of weights", is_taken=True)

    def send(self, blocks: Sequence[Bytes], to: int) -> None:
        """Send these to one member, which takes as many together. Returns when it has taken them, or the system has."""
        self._move(blocks, lambda tensors: self._group.send(tensors, to, 0), "what was sent", is_taken=False)

    def receive(self, blocks: Sequence[Bytes], source: int) -> None:
        """Fill these with what one member sends together."""
        self._move(blocks, lambda tensors: self._group.recv(tensors, source, 0), "what was to come", is_taken=True)

    def _move(self, blocks: Sequence[Bytes], begin: Callable[[list[Any]], Any], what: str, *, is_taken: bool) -> None:
        import torch

        tensors = [torch.from_numpy(block) for block in blocks]
        try:
            if self._device == "cpu":
                for work in [begin([tensor]) for tensor in tensors]:
                    work.wait()
                return
            for tensor in tensors:
                if self._staging is None or len(self._staging) < len(tensor):
                    self._staging = torch.empty(len(tensor), dtype=torch.uint8, device=self._device)
                staged = self._staging[: len(tensor)]
                staged.copy_(tensor)
                begin([staged]).wait()
                if is_taken:
                    tensor.copy_(staged)
                else:
                    torch.cuda.current_stream(self._device).synchronize()  # NCCL's wait is the stream's, not ours.
        except RuntimeError as error:
            raise BrokenChannel(f"{what} broke off: {_first_line(error)}") from None


def open_store(host: str, port: int, *, is_server: bool, timeout_s: float) -> Any:
    """The store that members meet at; port 0: one that is free. Raises `BrokenChannel`: nobody is there."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        if not is_server:
            return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        # A socket of ours: torch's own would listen at every interface, whatever the host is called.
        listener = socket.create_server((host, port))
        port = listener.getsockname()[1]
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach(), use_libuv=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise BrokenChannel(f"nobody to meet at {host}:{port}: {_first_line(error)}") from None


def split_address(address: str) -> tuple[str, int]:
    """Host and port. Raises `SpecError`."""
    host, _, port = address.rpartition(":")
    try:
        ipaddress.IPv4Address(host)
        return host, int(port)
    except ValueError:
        raise SpecError(f"{address!r} is no address of weights", now="An IPv4 address and a port, like 10.0.0.7:29500.") from None


def own_address(peer: str) -> str:
    """The address of this host on the way to a peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # Of a datagram socket this sends nothing.
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


Backend = Literal["gloo", "nccl"]
PAIRS: dict[str, Backend] = {"torch gloo": "gloo", "torch nccl": "nccl"}
"""By the plan's name of a transport (`m2flow.micro.protocol.plan.Route`)."""
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
