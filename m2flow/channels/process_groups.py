"""Move bytes through torch.distributed: broadcast within a group, and point to point for large columns of parcels.

Gloo on CPUs; NCCL where a GPU is named: bytes then pass through a staging buffer on that GPU, which each member must have for itself (not
run on GPUs so far). An operation that times out ends the group for all of its members.

    sender   PairSender.announce -> PairTransfer --(over a socket, with the head of the parcel)--> PairReceiver.receive    receiver
             PairSender.send ==== a thread for each receiver, frames of at most 4 MiB, over Gloo or NCCL ====^

A receiver asks for frames only once the head has announced them, so that no GPU spins for what may never come. Frames wait in the sender's
process until they are asked for.

Limits: torch's store and Gloo neither encrypt nor authenticate, so pairs are for loopback. A receiver waits for a sender whose head has
come and which is stopped. A sending thread ends with its receiver, or with this process.
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
    """One member of a torch.distributed group, in which rank 0 broadcasts. One thread.

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
        """Send a block on rank 0; receive into it on the others."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._move([block], lambda tensors: self._group.broadcast(tensors, options), "a broadcast of weights", is_taken=True)

    def send(self, blocks: Sequence[Bytes], to: int) -> None:
        """Send blocks to one member, which receives the same number at once. Returns when it, or the operating system, has taken them."""
        self._move(blocks, lambda tensors: self._group.send(tensors, to, 0), "what was sent", is_taken=False)

    def receive(self, blocks: Sequence[Bytes], source: int) -> None:
        """Fill blocks with what one member sends in one `send`."""
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
    """Open the rendezvous store, or connect to it; port 0: a free one. Raises `BrokenChannel`: nobody is there."""
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
    """Split an address into host and port. Raises `SpecError`."""
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


# ---- point to point

Backend = Literal["gloo", "nccl"]
PAIRS: dict[str, Backend] = {"torch gloo": "gloo", "torch nccl": "nccl"}
"""By the plan's name of a transport (`m2flow.micro.protocol.plan.Route`)."""
HOST = "127.0.0.1"
_RENDEZVOUS_TIMEOUT_S = 10.0
"""For two processes of a host to find each other. If one dies during it, torch takes twice this to notice."""
_OPERATION_TIMEOUT_S = 7 * 86_400.0
"""For announced frames. A peer's death ends the wait at once, a hung peer is killed, and a time-out would end the pair for both."""
_MAX_GROUP_NAME = 64
_MAX_CONCURRENT = 16
T = TypeVar("T")
_SENDER, _RECEIVER = 0, 1


class PairTransfer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Announces the frames that follow a head frame over a pair."""

    store: str
    """Where its two processes find each other."""
    group: str
    backend: Backend
    sizes: tuple[int, ...]
    """Bytes of each frame."""


@final
class PairSender:
    """Send frames to any number of peers, each from a thread of its own.

    Args:
        device: the GPU that NCCL sends from, if this process has one.
    """

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = device
        self._store: Any = None
        self._address = ""
        self._queues: dict[str, _PairQueue] = {}

    def announce(self, frames: Sequence[memoryview], to: str, backend: Backend) -> PairTransfer:
        """Describe frames that are about to be sent, for the head frame. Starts the peer's thread the first time."""
        queued = self._queues.get(to)
        if queued is None:
            if self._store is None:
                self._store = open_store(HOST, 0, is_server=True, timeout_s=_RENDEZVOUS_TIMEOUT_S)
                self._address = f"{HOST}:{self._store.port}"
            device = self._device if backend == "nccl" else "cpu"
            queued = self._queues[to] = _PairQueue(self._address, f"pair-{secrets.token_hex(8)}", device)
            queued.open()
        return PairTransfer(self._address, queued.group, backend, tuple(frame.nbytes for frame in frames))

    def send(self, frames: Sequence[memoryview], to: str) -> None:
        """Queue frames whose head has been sent. They must not change until they have been received."""
        self._queues[to].put(frames)

    def num_on_their_way(self, to: str | None = None) -> int:
        """Count parcels that this peer, or any, has not received yet."""
        return sum(queued.num_waiting for peer, queued in self._queues.items() if to in (peer, None))

    def is_broken(self, to: str) -> bool:
        """Whether sending to a peer has failed: it is gone."""
        return to in self._queues and self._queues[to].is_broken

    def forget(self, peer: str) -> None:
        """Drop a peer that is gone."""
        queued = self._queues.pop(peer, None)
        if queued is not None:
            queued.close(0.0)

    def close(self, deadline: float = 0.0) -> None:
        """End the threads once everything is sent, or at this time of `time.monotonic`. May be called twice."""
        for queued in self._queues.values():
            queued.close(max(deadline - time.monotonic(), 0.0))
        self._queues.clear()
        self._store = None


@dataclass(eq=False)
class _PairQueue:
    """Frames queued for one receiver, and the thread that sends them."""

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
                    for some in _concurrent(frames):
                        pair.send([_writable(frame) for frame in some], _RECEIVER)
            except BrokenChannel:
                self.is_broken = True
            with self._lock:
                self.num_waiting -= 1


@final
class PairReceiver:
    """Receive frames; keeps its pairs from one parcel to the next. One thread.

    Args:
        device: the GPU that NCCL receives on, if this process has one.
    """

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = device
        self._pairs: dict[str, Group] = {}

    def receive(self, transfer: PairTransfer) -> list[memoryview]:
        """Receive the frames that a head announced, each in memory of its own.

        Raises:
            BrokenChannel: the sender is gone. DecodeError: the announcement is not valid.
        """
        try:
            host, _ = split_address(transfer.store)
        except SpecError as error:
            raise DecodeError(f"columns by way of {transfer.store!r}: {error.what}") from None
        if host != HOST or not 0 < len(transfer.group) <= _MAX_GROUP_NAME:
            raise DecodeError(f"columns by way of {transfer.store[:100]!r} and the pair {transfer.group[:100]!r}")
        if len(transfer.sizes) > MAX_FRAMES or not all(0 < size <= FRAME_BYTES for size in transfer.sizes):
            raise DecodeError(f"columns in {len(transfer.sizes):,} frames of up to {max(transfer.sizes, default=0):,} bytes")
        if transfer.backend == "nccl" and self._device == "cpu":
            raise DecodeError("columns by way of NCCL to a process that has no GPU")
        pair = self._pairs.get(transfer.group)
        if pair is None:
            device = self._device if transfer.backend == "nccl" else "cpu"
            pair = self._pairs[transfer.group] = _pair(transfer.store, transfer.group, _RECEIVER, device)
        frames = []
        for sizes in _concurrent(transfer.sizes):  # Some at a time: no more memory is taken for what does not come.
            some = [np.empty(size, np.uint8) for size in sizes]
            try:
                pair.receive(some, _SENDER)
            except BrokenChannel:
                self._pairs.pop(transfer.group, None)
                raise
            frames += [frame.data for frame in some]
        return frames

    def forget(self, group: str) -> None:
        """Drop the pair of a sender that has ended or is gone."""
        self._pairs.pop(group, None)

    def close(self) -> None:
        """Leave all pairs. May be called twice."""
        self._pairs.clear()


def _pair(store: str, name: str, rank: int, device: str) -> Group:
    host, port = split_address(store)
    try:
        socket.create_connection((host, port), _RENDEZVOUS_TIMEOUT_S).close()  # Torch would try again and again for who is gone.
    except OSError as error:
        raise BrokenChannel(f"nobody to meet at {store}: {error.strerror or error}") from None
    met = open_store(host, port, is_server=False, timeout_s=_RENDEZVOUS_TIMEOUT_S)
    return Group(met, name, rank, 2, host=host, device=device, timeout_s=_OPERATION_TIMEOUT_S)


def _concurrent(frames: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split frames into runs that are in flight at the same time."""
    return (frames[i : i + _MAX_CONCURRENT] for i in range(0, len(frames), _MAX_CONCURRENT))


def _writable(frame: memoryview) -> Bytes:
    """The same memory as a writable array, since torch has no read-only tensors. It is only read."""
    address = np.frombuffer(frame, np.uint8).ctypes.data
    return np.ctypeslib.as_array((ctypes.c_uint8 * frame.nbytes).from_address(address))
