"""Transfer weights into an SGLang server's process: `weights: {into_server: ...}` of the cluster spec.

    files:    a directory in memory                          --its path--> /update_weights_from_disk
    tensors:  a bucket in shared memory (on a GPU: CUDA IPC)  --handles---> /update_weights_from_tensor, for each bucket
    group:    a bucket --broadcast, Gloo or NCCL------------------------> /update_weights_from_distributed, for each bucket

`auto` is files where the server is on this host, since they lie in its memory and the server copies out of it, and a group elsewhere.
Buckets go in a session that the server opens and closes, while it generates nothing: no request sees a part of the new weights.

Limits: tensors and groups reach tensor-parallel ranks, not stages of a pipeline. A group neither encrypts nor authenticates. Handles are a
pickle of SGLang's own endpoint, which goes to a server on this host only. NCCL needs a GPU here that is not one of the server's.
Source: SGLang's `init_custom_process_group` and `FlattenedTensorBucket`, whose keys and layout of bytes these are.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import datetime
import ipaddress
import secrets
import socket
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from m2flow.engines.servers.served_rollout import read_tensors
from m2flow.engines.servers.server_client import ServerClient
from m2flow.errors import EngineError

Way = Literal["files", "tensors", "group"]
_BUCKET_BYTES = 128 << 20
_TIMEOUT_S = 600.0
_MEET_S = 60.0
_LEAVE_S = 5.0
_LOOK_S = 0.002


class WeightTransfer(ABC):
    """Transfers weights into one server: `put`, any number of times, then `close`."""

    pauses = True
    """Whether the server must be paused during the transfer."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    @abstractmethod
    def put(self, directory: Path, version: int, *, flush: bool) -> None:
        """Load a directory's weights into the server, under this version.

        Args:
            flush: its caches are not of use any more.
        Raises:
            EngineError: it did not take them; what it holds then is not known.
        """

    def close(self) -> None:
        """Free what is kept from one version to the next. May be called twice."""

    def _taken(self, answer: Any, version: int) -> None:
        if not answer.get("success"):
            raise EngineError(f"the SGLang server did not take the weights of version {version}: {answer.get('message')}")

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        self._client.call("/begin_weight_update", {}, timeout_s=_TIMEOUT_S)
        try:
            yield
        finally:
            self._client.call("/end_weight_update", {}, timeout_s=_TIMEOUT_S)


@final
class FileTransfer(WeightTransfer):
    """The server reads whole files, and restores the weights that it had if it can't."""

    pauses = False

    def put(self, directory: Path, version: int, *, flush: bool) -> None:
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": flush}
        self._taken(self._client.call("/update_weights_from_disk", body, timeout_s=_TIMEOUT_S), version)


@final
class TensorTransfer(WeightTransfer):
    """The server maps a bucket that this process has.

    Args:
        device: where the bucket is; one that the server has too.
        num_ranks: the server's, each of which maps it.
    """

    def __init__(self, client: ServerClient, device: str, num_ranks: int) -> None:
        super().__init__(client)
        self._device = device
        self._num_ranks = num_ranks
        self._bucket = torch.empty(0, dtype=torch.uint8)

    def put(self, directory: Path, version: int, *, flush: bool) -> None:
        with self._session():
            for part, is_last in _parts(read_tensors(directory)):
                laid = self._in_bucket(part)
                body: dict[str, object] = {"serialized_named_tensors": [_handles(laid) for _ in range(self._num_ranks)]}
                answer = self._client.call("/update_weights_from_tensor", body | _ending(version, flush, is_last), timeout_s=_TIMEOUT_S)
                self._taken(answer, version)

    def close(self) -> None:
        self._bucket = torch.empty(0, dtype=torch.uint8)

    def _in_bucket(self, part: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copy tensors into the bucket; returns them there."""
        num_bytes = sum(tensor.nbytes for _, tensor in part)
        if len(self._bucket) < num_bytes:
            self._bucket = torch.empty(max(num_bytes, min(_BUCKET_BYTES, 2 * num_bytes)), dtype=torch.uint8, device=self._device)
        laid, start = [], 0
        for name, tensor in part:
            place = self._bucket[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            laid.append((name, place.copy_(tensor)))
            start += tensor.nbytes
        return laid


@final
class BroadcastTransfer(WeightTransfer):
    """Broadcast from rank 0 of a group whose other members are the server's ranks."""

    def __init__(self, client: ServerClient, device: str, num_ranks: int) -> None:
        super().__init__(client)
        self._device = device
        self._num_ranks = num_ranks
        self._name = ""
        self._group: Any = None
        self._store: Any = None

    def put(self, directory: Path, version: int, *, flush: bool) -> None:
        if self._group is None:
            self._join_group()
        try:
            with self._session():
                for part, is_last in _parts(read_tensors(directory)):
                    body = {
                        "names": [name for name, _ in part],
                        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
                        "shapes": [list(tensor.shape) for _, tensor in part],
                        "group_name": self._name,
                        "load_format": "flattened_bucket",
                    }
                    flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in part]).to(self._device)
                    asked = self._client.begin("/update_weights_from_distributed", body | _ending(version, flush, is_last), _TIMEOUT_S)
                    self._send(flat, asked, version)
                    self._taken(asked.result(), version)
        except EngineError:
            self.close()  # Nobody knows what its members still wait for.
            raise

    def close(self) -> None:
        if self._group is None:
            return
        with contextlib.suppress(EngineError):  # The server may be gone.
            self._client.call("/destroy_weights_update_group", {"group_name": self._name}, timeout_s=_LEAVE_S)
        self._group = self._store = None

    def _send(self, flat: Tensor, asked: concurrent.futures.Future[Any], version: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            work = self._group.broadcast([flat], options)
            while not work.is_completed():
                if concurrent.futures.wait([asked], _LOOK_S).done:
                    self._taken(asked.result(), version)  # Who refuses takes no part: nothing would ever end this.
                    break
            work.wait()
        except RuntimeError as error:
            raise EngineError(f"a broadcast of weights to the SGLang server broke off: {_first_line(error)}") from None

    def _join_group(self) -> None:
        host = _host_towards(self._client.url)
        self._name = f"m2flow-{secrets.token_hex(8)}"
        timeout = datetime.timedelta(seconds=_MEET_S)
        # A socket of ours: torch's own would listen at every interface.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach(), use_libuv=True
        )
        backend, kind = ("gloo", "cpu") if self._device == "cpu" else ("nccl", "cuda")
        size = 1 + self._num_ranks
        body = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size, "group_name": self._name}
        asked = self._client.begin("/init_weights_update_group", {**body, "backend": backend}, _MEET_S)
        own = dist.PrefixStore(f"{kind}/", dist.PrefixStore(f"{self._name}/", dist.PrefixStore(self._name, self._store)))
        try:
            if backend == "gloo":
                options = dist.ProcessGroupGloo._Options()
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                options._timeout = timeout
                self._group = dist.ProcessGroupGloo(own, 0, size, options)
            else:
                torch.cuda.set_device(self._device)
                self._group = dist.ProcessGroupNCCL(own, 0, size, timeout)
            self._taken(asked.result(), 0)
        except (RuntimeError, EngineError) as error:
            self._group = self._store = None
            raise EngineError(f"no group came about with the SGLang server at {self._client.url}: {_first_line(error)}") from None


def choose_transfer(wanted: str, url: str, pipeline_stages: int) -> Way:
    """Choose the transfer that the spec names (`auto`: by the server's address).

    Raises:
        EngineError: the server can't be reached that way.
    """
    if pipeline_stages > 1 and wanted in ("tensors", "group"):
        raise EngineError(
            f"SGLang takes weights by {wanted} without pipeline parallelism only, and the server has {pipeline_stages} stages",
            now="Leave into_server out of the spec's `weights`.",
        )
    is_here = _is_loopback(url)
    if wanted == "tensors" and not is_here:
        raise EngineError(
            f"the SGLang server at {url} is not on this host: it can't map tensors that lie here",
            now="Say `weights: {into_server: group}`, or `files` where both see the same weights_dir.",
        )
    if wanted == "auto":
        return "files" if is_here or pipeline_stages > 1 else "group"
    return wanted  # type: ignore[return-value]


def open_transfer(way: Way, client: ServerClient, device: str, num_ranks: int) -> WeightTransfer:
    """
    Args:
        device: of this process; the server is on one of the same kind.
        num_ranks: tensor-parallel ranks of the server.
    """
    if way == "files":
        return FileTransfer(client)
    return TensorTransfer(client, device, num_ranks) if way == "tensors" else BroadcastTransfer(client, device, num_ranks)


def _parts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Split tensors into buckets of one type each, for alignment; yields each with whether it is the last."""
    part: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if part and (tensor.dtype != part[0][1].dtype or sum(held.nbytes for _, held in part) + tensor.nbytes > _BUCKET_BYTES):
            yield part, False
            part = []
        part.append((name, tensor))
    yield part, True


def _ending(version: int, flush: bool, is_last: bool) -> dict[str, object]:
    """Fields of the last request: the version, and flushing the cache, which only all weights together justify."""
    return {"flush_cache": flush, "weight_version": str(version)} if is_last else {"flush_cache": False}


def _handles(tensors: list[tuple[str, Tensor]]) -> str:
    """Serialise handles of tensors as SGLang reads them; no data goes with them."""
    before = torch.multiprocessing.get_sharing_strategy()
    # Those of the default strategy are fetched from here with a secret that only this process's own children have.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        return base64.b64encode(ForkingPickler.dumps(tensors)).decode()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _is_loopback(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _host_towards(url: str) -> str:
    """The address of this host on the route to a server."""
    parts = urllib.parse.urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # Of a datagram socket this sends nothing.
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
