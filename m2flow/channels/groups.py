"""A torch.distributed group of a few processes: bytes from the first to all others, or from one to another.

Gloo on a CPU. NCCL where a GPU is named: bytes then go through a buffer on that GPU, which each member must have for itself (not run on
GPUs so far). Neither encrypts or authenticates. An operation that runs out of time ends the group for all of its members.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from m2flow.errors import BrokenChannel, SpecError

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
