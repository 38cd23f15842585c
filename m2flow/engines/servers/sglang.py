"""The SGLang rollout engine: a server of its own, spoken to over HTTP by its public endpoints.

    EngineSettings (the plan's), ServedRolloutOptions (the cluster spec's), Model --> arguments of sglang.launch_server
    add -> POST /generate with token ids (`request_body`) --tokens stream in--> step -> Generated
    load_weights -> files in memory -> pause, into the server, continue

The server reports which weights made which token (`weight_versions`). A change of weights under requests takes them out of the
running batch (`retract`): their KV caches are computed anew, so no token sees an older one. With `keep_kv` they stay, caches and all, and
later tokens are marked. No request finds a prefix cache of other weights: the version is a part of its key (`extra_key`). Of mixtures
it reports the experts of each token.

Options: those of `m2flow.engines.servers.inference_server`, and `OWN_OPTIONS`.

Limits:
    random numbers: they belong to the server, so migrating or resuming changes a sample, unless `deterministic_inference: true`.
    log-probabilities: at the sample's temperature, before top-p and top-k. For the first `min_new_tokens` tokens they are of the
        distribution without the stop tokens, so larger than the trainer's by -log(1 - p), with p the stop tokens' mass;
        `rollout_diff/mean` shows it.
    architectures: tested against transformers are Qwen2, Qwen3, Qwen3-MoE, Llama, Mistral, Gemma (some 1e-4 off in log-probability, for
        its GELU), DeepSeek V2 and V3.
    CPU: `tp: 2` needs `SGLANG_CPU_OMP_THREADS_BIND=0|1` in `env`.

Source: the endpoints of SGLang 0.5 (sglang/srt/entrypoints/http_server.py, managers/io_struct.py), by their public names alone.

Weights are transferred into the server's process as `weights: {into_server: ...}` of the cluster spec says.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from m2flow.engines.contract import EngineSettings, Memory
from m2flow.engines.installed import SGLANG
from m2flow.engines.models.requests import Job
from m2flow.engines.registry import built_in
from m2flow.engines.servers.inference_server import (
    Dialect,
    FinishReason,
    Heard,
    Launch,
    ServedRolloutOptions,
    ServerClient,
    TokenSpan,
    error_summary,
)
from m2flow.engines.servers.served_rollout import ROUTING_OPTION, ServedRollout, read_tensors, records_routing
from m2flow.errors import EngineError
from m2flow.recipe import Model
from m2flow.samples import SampleId

# ---- weights


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
            raise EngineError(
                f"the SGLang server did not take the weights of version {version}: {answer.get('message')}",
                now="The server's log in the run's logs/ says why; `weights: {transport: ...}` names other ways.",
            )

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
            raise EngineError(
                f"a broadcast of weights to the SGLang server broke off: {_first_line(error)}",
                now="The server's log in the run's logs/ says why.",
            ) from None

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
            raise EngineError(
                f"no group came about with the SGLang server at {self._client.url}: {_first_line(error)}",
                now="Check that the server reaches the trainer's host (`weights: {host: ...}`), and its log in logs/.",
            ) from None


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


# ---- the engine


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[TokenSpan] = []
    routed_experts: str | None = None
    cached_tokens: int | None = None
    num_retractions: int | None = None


class _Chunk(msgspec.Struct, frozen=True):
    output_ids: list[int] = []
    meta_info: _Meta = _Meta()
    error: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Chunk).decode


@final
class SglangDialect(Dialect):
    """SGLang's stream: a chunk has the new tokens alone, if the server was started so; the last one says which weights made which."""

    product = "SGLang"
    generate_path = "/generate"
    abort_path = "/abort_request"

    def named(self, rid: str, body: Mapping[str, object]) -> dict[str, object]:
        return {**body, "rid": rid, "stream": True}

    def heard(self, rid: str, text: bytes) -> Heard:
        chunk = _decode(text)
        if chunk.error:
            return Heard(rid, [], [], error=error_summary(text))
        meta = chunk.meta_info
        logprobs = [0.0 if value is None else value for value, *_ in meta.output_token_logprobs]
        if meta.finish_reason is None:
            return Heard(rid, chunk.output_ids, logprobs)
        said = (chunk.output_ids, logprobs, meta.finish_reason, tuple(meta.weight_versions), meta.routed_experts or "")
        return Heard(rid, *said, num_cached=meta.cached_tokens or 0, num_put_back=meta.num_retractions or 0)

    def experts(self, said: str) -> npt.NDArray[Any]:
        return np.frombuffer(base64.b64decode(said), np.int32)

    def abort_bodies(self, rids: Sequence[str]) -> list[dict[str, object]]:
        return [{"rid": rid} for rid in rids]


def reported_memory(info: Mapping[str, Any]) -> Memory:
    """Read what a server holds on its first device from `/server_info`, which counts in GiB to the thousandth; all zero if missing.

    >>> reported_memory({"internal_states": [{"memory_usage": {"weight": 2.5, "kvcache": 40.0}}]}).words()
    'kv 40.00 GiB, weights 2.50 GiB'
    >>> reported_memory({}).words()
    'nothing'
    """
    states = info.get("internal_states") or [{}]
    usage = states[0].get("memory_usage") or {}
    weights, kv = (round(max(float(usage.get(name) or 0.0), 0.0) * 2**30) for name in ("weight", "kvcache"))
    return Memory(weights=weights, kv=kv)


OWN_OPTIONS = {
    "deterministic_inference": "Random numbers go by a sample's seed and the token's position, at a cost in speed.",
    **ROUTING_OPTION,
}
"""Options beyond those that all served rollout engines have."""


def server_arguments(settings: EngineSettings, options: ServedRolloutOptions, model: Model, version: int) -> list[str]:
    """Build the server's arguments; the user's own `args` follow, and override them.

    Args:
        version: of the weights that it begins with.
    """
    device, _, index = settings.device.partition(":")
    given = ["--device", device, "--dtype", model.rollout_dtype or model.dtype, "--weight-version", str(version)]
    given += ["--incremental-streaming-output", "--stream-interval", str(options.stream_interval)]
    given += ["--max-running-requests", str(settings.max_running), "--skip-server-warmup"]
    given += ["--base-gpu-id", index] if index else []
    for name, degree in (("--tp-size", settings.tp), ("--pp-size", settings.pp), ("--ep-size", settings.ep)):
        given += [name, str(degree)] if degree > 1 else []
    given += ["--enable-deterministic-inference"] if options.is_set("deterministic_inference") else []
    given += ["--enable-return-routed-experts"] if records_routing(options, model) else []
    return given if device == "cpu" else [*given, "--enable-memory-saver"]


def request_body(job: Job) -> dict[str, object]:
    """What /generate is told. Log-probabilities are the server's: of softmax(logits / temperature), before top-p and top-k, after
    `min_new_tokens`."""
    sampling = job.sampling
    parameters = {
        "max_new_tokens": sampling.max_new_tokens - len(job.tokens),
        "min_new_tokens": max(0, sampling.min_new_tokens - len(job.tokens)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": job.stop_ids.tolist(),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "sampling_seed": job.seed % (1 << 63),
    }
    return {"input_ids": [*job.prompt.tolist(), *job.tokens.tolist()], "sampling_params": parameters, "return_logprob": True}


_DRAIN_S = 30.0
_SERVER_RESERVE = 2
"""Tokens of the context that the server keeps for itself."""


@final
class SglangRollout(ServedRollout):
    """A rollout engine on one SGLang server."""

    name = "sglang"
    dialect = SglangDialect()
    own_options = OWN_OPTIONS
    capabilities = built_in("sglang", "rollout")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._into: WeightTransfer | None = None
        self._has = Memory()
        self._frees = False

    def rest(self) -> None:
        """Release the KV cache alone, otherwise as `offload`."""
        self._make_room("kv_cache")

    def memory(self) -> Memory:
        """What the server reported after its start, less what it has released."""
        away = self._away if self._frees else ()
        return Memory(weights=self._has.weights * ("weights" not in away), kv=self._has.kv * ("kv_cache" not in away))

    def _launch(self, directory: Path) -> Launch:
        arguments = server_arguments(self._settings, self._options, self._source, self._version)
        return Launch(SGLANG, ("-m", "sglang.launch_server", "--model-path", str(directory), *arguments))

    def _on_server_started(self) -> None:
        info = self._call("/server_info")
        if self._routing and not info.get("enable_return_routed_experts"):
            raise EngineError(f"the SGLang server at {self.url} does not return routed experts", now="Start it with that argument.")
        self._has, self._frees = reported_memory(info), bool(info.get("enable_memory_saver"))
        if self._server is None:
            with contextlib.suppress(EngineError):  # Refused, unless who had it before was killed within a change of weights.
                self._call("/end_weight_update", {})
        way = choose_transfer(self._settings.into_server, self.url, int(info.get("pp_size") or 1))
        self._into = open_transfer(way, self._started(), self._settings.device, int(info.get("tp_size") or 1))

    def _on_server_left(self) -> None:
        if self._into is not None:
            self._into.close()
        self._into = None

    def _cache_size_and_context(self, longest: int) -> tuple[int, int]:
        room = int(self._call("/server_info").get("max_total_num_tokens") or 0)
        return room, min(longest, room or longest) - _SERVER_RESERVE

    def _body(self, job: Job) -> Mapping[str, object]:
        return {**request_body(job), "extra_key": self._cache_key, "return_routed_experts": self._routing is not None}

    def _check(self, job: Job) -> None:
        if job.sampling.logit_bias or job.sampling.repetition_penalty != 1:
            raise EngineError(
                f"sample {SampleId.unpack(job.id)} has logit_bias or repetition_penalty, and the SGLang server says log-probabilities of "
                "the logits that they change",
                now="Leave them out, or take the engine 'embedded' or 'vllm'.",
            )

    def _logprobs_of(self, tokens: list[int]) -> list[float]:
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "return_logprob": True}
        found = self._call("/generate", {**body, "extra_key": self._cache_key, "logprob_start_len": 0}, timeout_s=600.0)
        return [value for value, *_ in found["meta_info"]["input_token_logprobs"][1:]]

    def _read_weights(self, directory: Path, version: int, *, flush: bool = True) -> None:
        assert self._into is not None
        self._into.put(directory, version, flush=flush)

    @property
    def _must_pause_to_read(self) -> bool:
        return self._into is not None and self._into.pauses

    def _pause(self, *, keeps: bool) -> None:
        self._call("/pause_generation", {"mode": "in_place" if keeps else "retract"})

    def _unpause(self) -> None:
        self._call("/continue_generation", {})

    def _generate_one_token(self, timeout_s: float) -> None:
        self._call("/health_generate", timeout_s=timeout_s)

    def _release(self, tags: list[str]) -> None:
        """Release memory. Without a memory saver, as on a CPU, the server answers as if it did, and frees nothing."""
        if not tags:
            return
        # It ends itself if it is asked while a request is on its way out: an abort is said before its batch is gone.
        self._call(f"/flush_cache?timeout={_DRAIN_S:g}", {}, timeout_s=2 * _DRAIN_S)
        self._call("/release_memory_occupation", {"tags": tags})
        self._away += tags

    def _resume(self) -> None:
        # Tags that it has not released would end it.
        tags, self._away = self._away[::-1], []
        self._call("/resume_memory_occupation", {"tags": tags})

    @property
    def _cache_key(self) -> str:
        return f"weights-{self._version}"
