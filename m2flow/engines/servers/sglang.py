"""The SGLang rollout engine: a server of its own, spoken to over HTTP by its public endpoints.

    EngineSettings (the plan's), ServedRolloutOptions (the cluster spec's), Model --> arguments of sglang.launch_server
    add -> POST /generate with token ids (`request_body`) --tokens stream in--> step -> Generated
    load_weights -> files in memory -> pause, into the server (`m2flow.engines.servers.sglang_weights`), continue

The server reports which weights made which token (`weight_versions`). A change of weights under requests takes them out of the
running batch (`retract`): their KV caches are computed anew, so no token sees an older one. With `keep_kv` they stay, caches and all, and
later tokens are marked. No request finds a prefix cache of other weights: the version is a part of its key (`extra_key`). For mixtures,
`Routing` decodes the experts of each token.

Options: those of `m2flow.engines.servers.server_process`, and `OWN_OPTIONS`.

Limits:
    random numbers: they belong to the server, so migrating or resuming changes a sample, unless `deterministic_inference: true`.
    log-probabilities: at the sample's temperature, before top-p and top-k. For the first `min_new_tokens` tokens they are of the
        distribution without the stop tokens, so larger than the trainer's by -log(1 - p), with p the stop tokens' mass;
        `rollout_diff/mean` shows it.
    architectures: tested against transformers are Qwen2, Qwen3, Qwen3-MoE, Llama, Mistral, Gemma (some 1e-4 off in log-probability, for
        its GELU), DeepSeek V2 and V3.
    CPU: `tp: 2` needs `SGLANG_CPU_OMP_THREADS_BIND=0|1` in `env`.

Source: the endpoints of SGLang 0.5 (sglang/srt/entrypoints/http_server.py, managers/io_struct.py), by their public names alone.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.engines.contract import EngineSettings, Generated, Memory
from m2flow.engines.installed import SGLANG
from m2flow.engines.models.requests import Job
from m2flow.engines.registry import built_in
from m2flow.engines.servers.served_rollout import ServedRollout
from m2flow.engines.servers.server_client import Dialect, FinishReason, Heard, Running, Span, error_summary
from m2flow.engines.servers.server_process import Launch, ServedRolloutOptions
from m2flow.engines.servers.sglang_weights import WeightTransfer, choose_transfer, open_transfer
from m2flow.errors import EngineError
from m2flow.recipe import Model
from m2flow.samples import Finish, SampleId, compact_experts


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[Span] = []
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
    "routed_experts": "Record with each sample the experts of each token and layer (mixtures of experts).",
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
    given += ["--enable-return-routed-experts"] if options.is_set("routed_experts") or model.routing == "rollout" else []
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


@dataclass(frozen=True)
class Routing:
    """Decodes which experts of each layer the server routed a mixture's tokens to."""

    num_layers: int
    num_of_token: int
    num_experts: int = 0
    """0: not known."""

    @classmethod
    def of(cls, config: Any) -> Routing:
        """Read the sizes from a language model's configuration. Raises `EngineError`: it is no mixture of experts."""
        each = getattr(config, "num_experts_per_tok", None)
        if not each:
            raise EngineError(
                f"the option routed_experts is for mixtures of experts, and a {config.model_type} model is none",
                now="Leave it out of rollout.options.",
            )
        from m2flow.engines.models.hf_model import num_experts

        return cls(int(config.num_hidden_layers), int(each), num_experts(config))

    def read(self, said: str, num_tokens: int) -> npt.NDArray[np.int16]:
        """Decode the experts of `num_tokens` tokens, int16 [T, layers, experts of a token]; -1 where none were reported."""
        found = np.full((num_tokens, self.num_layers, self.num_of_token), -1, np.int16)
        values = np.frombuffer(base64.b64decode(said), np.int32)
        if len(values) % found[:1].size or len(values) > found.size:
            raise EngineError(f"the SGLang server said {len(values)} experts of {num_tokens} tokens in {self.num_layers} layers")
        rows = values.reshape(-1, self.num_layers, self.num_of_token)
        found[: len(rows)] = rows
        return found

    def completed(self, job: Job) -> Job:
        """Complete a job that leaves: a row for each of its tokens, also where the server reported nothing, in the fewest bytes."""
        num_tokens = len(job.prompt) + len(job.tokens)
        is_whole = job.routed_experts is not None and len(job.routed_experts) == num_tokens
        experts = job.routed_experts if is_whole else self.read("", num_tokens)
        return replace(job, routed_experts=compact_experts(np.asarray(experts, np.int16), self.num_experts))


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
        self._routing: Routing | None = None
        self._has = Memory()
        self._frees = False
        if self._options.is_set("deterministic_inference"):
            self.capabilities = replace(SglangRollout.capabilities, keyed_seeds=True)

    def rest(self) -> None:
        """Release the KV cache alone, otherwise as `offload`."""
        self._make_room("kv_cache")

    def memory(self) -> Memory:
        """What the server reported after its start, less what it has released."""
        away = self._away if self._frees else ()
        return Memory(weights=self._has.weights * ("weights" not in away), kv=self._has.kv * ("kv_cache" not in away))

    def _check_config(self, config: Any) -> None:
        self._routing = Routing.of(config) if self._says_routing else None

    @property
    def _says_routing(self) -> bool:
        return self._options.is_set("routed_experts") or self._source.routing == "rollout"

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

    def _extended(self, one: Running, heard: Heard) -> Job:
        job = super()._extended(one, heard)
        if self._routing is None:
            return job
        num_tokens = len(job.prompt) + len(job.tokens)
        return replace(job, routed_experts=self._routing.read(heard.routed_experts, num_tokens + one.num_dropped)[:num_tokens])

    @property
    def _must_hear_end(self) -> bool:
        return self._routing is not None

    def _check(self, job: Job) -> None:
        if job.sampling.logit_bias or job.sampling.repetition_penalty != 1:
            raise EngineError(
                f"sample {SampleId.unpack(job.id)} has logit_bias or repetition_penalty, and the SGLang server says log-probabilities of "
                "the logits that they change",
                now="Leave them out, or take the engine 'embedded' or 'vllm'.",
            )

    def _leaving(self, job: Job, finish: Finish) -> Generated:
        return super()._leaving(self._routing.completed(job) if self._routing else job, finish)

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
