"""The vLLM rollout engine: a server of its own, spoken to over HTTP by its public endpoints.

Source: the endpoints of vLLM 0.32 (vllm/entrypoints/scale_out/token_in_token_out, vllm/entrypoints/rl/online), by their public names alone.

add -> POST /inference/v1/generate with token ids --tokens stream in--> step -> Generated
    load_weights -> files in memory -> /pause, /collective_rpc reload_weights, /update_weight_version, /resume

Which weights made which token is what the server says (`weight_versions`). A change of weights under requests takes them out of the
running batch (/reset_prefix_cache with `reset_running_requests`): their caches are computed anew, so no token sees an older one. With
`keep_kv` they stay, caches and all, and what comes after is marked. No request finds a cache of other weights: they salt its key.

Options: those of `m2flow.engines.servers.inference_server`, and `OWN_OPTIONS`.

Limits:
    running server: one given by its `url` must have been started with `--enable-scale-out` and `VLLM_SERVER_DEV_MODE=1`. Everyone who
        reaches its port can change its weights: keep it on loopback.
    tied embeddings: served as a separate head, which costs its memory, since vLLM 0.32 reads the embedding again and keeps the head that
        it had. A running server needs `--hf-overrides '{"tie_word_embeddings": false}'` for such a model; the probe of the first weight
        sync stops a run that lacks it.
    log-probabilities: those of temperature 1, of samples of temperature 0 or 1, whatever top-k, top-p, min-p, biases, penalties or
        `min_new_tokens` change; with `tempered_logprobs` at the sample's temperature, and then none of these is allowed. A sample for
        which the server's mode is wrong is refused. Greedy samples work in both.
    experts of each token (`routed_experts`): vLLM 0.32 reports them with its second model runner, that of GPUs. A running server needs
        `--enable-return-routed-experts`.
    random numbers: they depend on the sample's seed; a sample that is stopped and resumed draws new ones.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from m2flow.engines.installed import VLLM, gpus_from
from m2flow.engines.models.requests import Job
from m2flow.engines.registry import built_in
from m2flow.engines.servers.inference_server import Dialect, FinishReason, Heard, Launch, TokenSpan, error_summary
from m2flow.engines.servers.served_rollout import (
    ROUTING_OPTION,
    ServedRollout,
    load_config,
    read_tensors,
    shapes_in,
    write_tensors,
)
from m2flow.errors import EngineError
from m2flow.samples import SampleId

_PREFIX = "generate-tokens-"
"""Prefix that the server adds to a request's id, and expects in an abort."""


class _Logprob(msgspec.Struct, frozen=True):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[TokenSpan] | None = None
    routed_experts: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Chunk).decode


@final
class VllmDialect(Dialect):
    """vLLM's stream: a chunk has the new tokens alone; the last one says which weights made which."""

    product = "vLLM"
    generate_path = "/inference/v1/generate"
    abort_path = "/abort_requests"

    def named(self, rid: str, body: Mapping[str, object]) -> dict[str, object]:
        return {**body, "request_id": rid, "stream": True}

    def heard(self, rid: str, text: bytes) -> Heard:
        chunk = _decode(text)
        if chunk.error:
            return Heard(rid, [], [], error=error_summary(text))
        if not chunk.choices:
            return Heard(rid, [], [])
        (choice,) = chunk.choices
        logprobs = [one.logprob for one in (choice.logprobs.content or [] if choice.logprobs else [])]
        finish = FinishReason(choice.finish_reason) if choice.finish_reason else None
        spans = tuple(choice.weight_versions or ())
        return Heard(rid, choice.token_ids or [], logprobs, finish, spans, choice.routed_experts or "")

    def experts(self, said: str) -> npt.NDArray[Any]:
        """A NumPy file [T, layers, experts of a token] in base64, of the fewest bytes that name an expert."""
        if not said:
            return np.empty(0, np.int16)
        return np.asarray(np.load(io.BytesIO(base64.b64decode(said)), allow_pickle=False))

    def abort_bodies(self, rids: Sequence[str]) -> list[dict[str, object]]:
        return [{"request_ids": [_PREFIX + rid for rid in rids]}]


_GENERATE = VllmDialect.generate_path
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


OWN_OPTIONS = {
    "tempered_logprobs": "Log-probabilities at the sample's temperature, of what top-k, top-p and `min_new_tokens` leave.",
    **ROUTING_OPTION,
}
"""Options beyond those that all served rollout engines have."""


@final
class VllmRollout(ServedRollout):
    """A rollout engine on one vLLM server."""

    name = "vllm"
    dialect = VllmDialect()
    own_options = OWN_OPTIONS
    capabilities = built_in("vllm", "rollout")

    def load_weights(self, tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool = False) -> None:
        super().load_weights(_with_head(tensors) if self._is_tied else tensors, version, under_requests=under_requests)

    def weights(self) -> Iterator[tuple[str, Any]]:
        return ((name, tensor) for name, tensor in super().weights() if not (self._is_tied and name == _HEAD))

    def _directory(self) -> Path:
        """A directory with an untied head: the server's head does not follow its embedding when weights are read again."""
        source = super()._directory()
        self._is_tied = bool(load_config(source).tie_word_embeddings)
        if not self._is_tied:
            return source
        shapes = shapes_in(source)
        assert self._place is not None
        directory = self._place / f"weights-{next(self._names)}"
        held = ((name, tensor) for name, tensor in read_tensors(source) if name != _HEAD)
        dtype = getattr(torch, self._source.rollout_dtype or self._source.dtype)
        write_tensors(directory, source, {**shapes, _HEAD: shapes[_EMBEDDING]}, _with_head(held), dtype)
        if source.parent == self._place:
            shutil.rmtree(source)
        return directory

    def _launch(self, directory: Path) -> Launch:
        settings = self._settings
        given = ["-m", "vllm.entrypoints.cli.main", "serve", str(directory), "--enable-scale-out", "--generation-config", "vllm"]
        given += ["--dtype", self._source.rollout_dtype or self._source.dtype, "--logprobs-mode", self._logprobs_mode]
        given += ["--max-num-seqs", str(settings.max_running), "--stream-interval", str(self._options.stream_interval)]
        given += ["--enable-return-routed-experts"] if self._routing else []
        if self._is_tied:
            given += ["--hf-overrides", '{"tie_word_embeddings": false}']
        given += ["--tensor-parallel-size", str(settings.tp)] if settings.tp > 1 else []
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if not self._is_on_cpu:
            given.append("--enable-sleep-mode")
            # It takes the first GPUs that it sees.
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            shown = gpus_from(settings.device, settings.tp, seen, whose=f"a vLLM server has {settings.tp} GPUs")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
        return Launch(VLLM, tuple(given), environment)

    def _on_server_started(self) -> None:
        self._name_version(self._version)

    def _cache_size_and_context(self, longest: int) -> tuple[int, int]:
        config = self._call("/server_info?config_format=json")["vllm_config"]
        cache, mode = config["cache_config"], config["model_config"]["logprobs_mode"]
        if mode != self._logprobs_mode:
            raise EngineError(
                f"the vLLM server at {self.url} says {mode}, and is to say {self._logprobs_mode}",
                now=f"Start it with --logprobs-mode {self._logprobs_mode}, or see `tempered_logprobs` in docs/reference/engines.md.",
            )
        if self._routing and not (config.get("aux_output_config") or {}).get("enable_return_routed_experts"):
            raise EngineError(
                f"the vLLM server at {self.url} does not return routed experts", now="Start it with --enable-return-routed-experts."
            )
        (served, *_) = self._call("/v1/models")["data"]
        room = int(cache.get("num_gpu_blocks") or 0) * int(cache.get("block_size") or 0)
        return room, min(longest, int(served["max_model_len"]), room or longest)

    def _check(self, job: Job) -> None:
        sampling, who = job.sampling, SampleId.unpack(job.id)
        if self._logprobs_mode == "raw_logprobs" and sampling.temperature not in (0.0, 1.0):
            raise EngineError(
                f"sample {who} is of temperature {sampling.temperature}; the vLLM server says log-probabilities at temperature 1",
                now="Set rollout.options.tempered_logprobs: true in the cluster spec, or take temperature 0 or 1.",
            )
        is_shifted = bool(sampling.logit_bias) or sampling.repetition_penalty != 1
        is_cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.min_new_tokens > len(job.tokens) or is_shifted
        if self._logprobs_mode == "processed_logprobs" and sampling.temperature > 0 and is_cut:
            raise EngineError(
                f"sample {who} has top_k, top_p, min_p, min_new_tokens, a bias or a penalty, and with tempered_logprobs the vLLM server "
                "says log-probabilities of what they leave",
                now="Leave them out, or tempered_logprobs (then temperature is 0 or 1).",
            )

    def _body(self, job: Job) -> Mapping[str, object]:
        """Its own end-of-sequence token does not count: all that stop a sample are in `stop_token_ids`."""
        sampling = job.sampling
        parameters = {
            "max_tokens": sampling.max_new_tokens - len(job.tokens),
            "min_tokens": max(0, sampling.min_new_tokens - len(job.tokens)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": dict(sampling.logit_bias),
            "stop_token_ids": job.stop_ids.tolist(),
            "ignore_eos": True,
            "seed": job.seed % (1 << 63),
            "logprobs": 0,
            "detokenize": False,
        }
        return self._salted([*job.prompt.tolist(), *job.tokens.tolist()], parameters)

    def _salted(self, tokens: list[int], parameters: Mapping[str, object]) -> dict[str, object]:
        # No two weights share a salt, not even those of another engine that has used this server.
        salt = f"{self._prefix}-{self._held.name}"
        return {"token_ids": tokens, "sampling_params": dict(parameters), "cache_salt": salt}

    def _generate_one(self, tokens: list[int], *, timeout_s: float = 60.0, **parameters: object) -> Mapping[str, Any]:
        body = self._salted(tokens, {"max_tokens": 1, "temperature": 0.0, "detokenize": False, **parameters})
        return cast(Mapping[str, Any], self._call(_GENERATE, body, timeout_s=timeout_s))

    def _logprobs_of(self, tokens: list[int]) -> list[float]:
        found = self._generate_one(tokens, timeout_s=600.0, prompt_logprobs=0)["prompt_logprobs"]
        return [of[str(token)]["logprob"] for token, of in zip(tokens[1:], found[1:], strict=False)]

    def _read_weights(self, directory: Path, version: int, *, flush: bool = True) -> None:
        read = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        self._call("/collective_rpc", read, timeout_s=600.0)
        self._name_version(version)
        if flush:
            self._call("/reset_prefix_cache", {})  # For room alone, so it may be refused: by their salt nothing finds them any more.

    def _name_version(self, version: int) -> None:
        self._call("/update_weight_version", {"new_version": str(version)})

    def _pause(self, *, keeps: bool) -> None:
        self._call("/pause?mode=keep", {})
        if not keeps:
            self._call("/reset_prefix_cache?reset_running_requests=true", {})

    def _unpause(self) -> None:
        self._call("/resume", {})

    def _generate_one_token(self, timeout_s: float) -> None:
        self._generate_one([0], timeout_s=timeout_s)

    def _release(self, tags: list[str]) -> None:
        """Release memory by vLLM's sleep mode, which a CPU does not have."""
        if tags and not self._is_on_cpu:
            self._call("/sleep?level=2&mode=keep", {})
            self._away += tags

    def _resume(self) -> None:
        self._call("/wake_up?tags=weights", {})
        self._read_weights(self._held, self._version, flush=False)
        self._given = self._held
        self._call("/wake_up?tags=kv_cache", {})

    @property
    def _is_on_cpu(self) -> bool:
        return self._settings.device.partition(":")[0] == "cpu"

    @property
    def _logprobs_mode(self) -> str:
        return "processed_logprobs" if self._options.is_set("tempered_logprobs") else "raw_logprobs"


def _with_head(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, and the embedding once more as the head."""
    for name, tensor in tensors:
        yield name, tensor
        if name == _EMBEDDING:
            yield _HEAD, tensor
