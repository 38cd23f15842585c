"""A torch.distributed group of one process that has weights and those that take them: bytes from the first to all others.

Gloo on a CPU. NCCL where a GPU is named: buckets then go through a buffer on that GPU (not run on a GPU so far).
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
from typing import Any, final

import numpy as np
import numpy.typing as npt

from m2flow.errors import BrokenChannel, SpecError

Bytes = npt.NDArray[np.uint8]


@final
class BroadcastGroup:
    """One member. Rank 0 has the bytes. One thread.

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
            raise BrokenChannel(f"no group for a broadcast of weights came about: {_first_line(error)}") from None

    def broadcast(self, block: Bytes) -> None:
        """Send this from rank 0, or take it in, elsewhere."""
        import torch
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        tensor = torch.from_numpy(block)
        try:
            if self._device == "cpu":
                self._group.broadcast([tensor], options).wait()
                return
            if self._staging is None or len(self._staging) < len(block):
                self._staging = torch.empty(len(block), dtype=torch.uint8, device=self._device)
            staged = self._staging[: len(block)]
            staged.copy_(tensor)
            self._group.broadcast([staged], options).wait()
            tensor.copy_(staged)
        except RuntimeError as error:
            raise BrokenChannel(f"a broadcast of weights broke off: {_first_line(error)}") from None


def open_store(host: str, port: int, *, is_server: bool, timeout_s: float) -> Any:
    """The store that members meet at; port 0: one that is free. Raises `BrokenChannel`: nobody is there."""
    import torch.distributed as dist

    try:
        return dist.TCPStore(host, port, is_master=is_server, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise BrokenChannel(f"nobody hands out weights at {host}:{port}: {_first_line(error)}") from None


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
