"""SGLang as a rollout engine: a server of its own, spoken to over HTTP by its public endpoints.

    add -> POST /generate with token ids --tokens stream in--> step -> Generated
    load_weights -> files in memory -> pause, into the server (`m2flow.engines.sglang_weights`), continue

Which weights made which token is what the server says (`weight_versions`). A change of weights under requests takes them out of the
running batch (`retract`): their caches are computed anew, so no token sees an older one. With `keep_kv` they stay, caches and all, and
what comes after is marked. No request finds a cache of other weights: the version is a part of its key (`extra_key`).

Options: `python` (an interpreter that has SGLang), `args` and `env` of the server, `start_timeout_s`; or `url` of one that runs already.
`deterministic_inference`: random numbers belong to the sample (the server's `sampling_seed`), at a cost in speed. `stream_interval`
(tokens between two pieces of news of a sample, default 8), `weights_dir` (where weights are handed over, default /dev/shm), `restarts`
(how often a server that is lost is started again, default 2), `hung_after_s` (default 120), `keep_kv`, `routed_experts` (of a mixture: keep
which experts each token went to).

Limits: random numbers are the server's own functions of seed and position. Log-probabilities of the first `min_new_tokens` tokens are of
what is left without the stop tokens. Those of `m2flow.engines.served_rollout`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from m2flow.engines.accounting import Memory
from m2flow.engines.contract import Capabilities, EngineSettings, Generated, ParallelLayouts
from m2flow.engines.jobs import Job
from m2flow.engines.served_requests import Running
from m2flow.engines.served_rollout import ServedRollout
from m2flow.engines.server_client import Heard
from m2flow.engines.server_process import Launch
from m2flow.engines.sglang_dialect import SglangDialect, memory_said
from m2flow.engines.sglang_installed import SGLANG
from m2flow.engines.sglang_options import OWN_OPTIONS, server_arguments
from m2flow.engines.sglang_requests import Routing, request_body
from m2flow.engines.sglang_weights import IntoServer, open_way, way_of
from m2flow.errors import EngineError
from m2flow.recipe import Model
from m2flow.samples import Finish

_DRAIN_S = 30.0
_SERVER_RESERVE = 2
"""Tokens of the context that the server keeps for itself."""


@final
class SglangRollout(ServedRollout):
    """One SGLang server."""

    name = "sglang"
    dialect = SglangDialect()
    own_options = OWN_OPTIONS
    capabilities = Capabilities(
        kind="rollout",
        keyed_seeds=False,
        self_paced=True,
        weights_under_requests=True,
        deterministic=False,
        rests=True,
        probes=True,
        devices=("cuda", "cpu"),
        into_server=("files", "tensors", "group"),
        routed_experts=True,
        parallel_layouts=ParallelLayouts(tp=None, pp=8, dp=None, ep=None),
    )

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._into: IntoServer | None = None
        self._routing: Routing | None = None
        self._has = Memory()
        self._frees = False
        if self._options.is_set("deterministic_inference"):
            self.capabilities = replace(SglangRollout.capabilities, keyed_seeds=True)

    def rest(self) -> None:
        """As `offload`, with the cache's memory alone."""
        self._make_room("kv_cache")

    def memory(self) -> Memory:
        """As the server has said when it came up, less what it has released."""
        away = self._away if self._frees else ()
        return Memory(weights=self._has.weights * ("weights" not in away), kv=self._has.kv * ("kv_cache" not in away))

    def _meet(self, config: Any) -> None:
        self._routing = Routing.of(config) if self._options.is_set("routed_experts") else None

    def _launch(self, directory: Path) -> Launch:
        arguments = server_arguments(self._settings, self._options, self._source, self._version)
        return Launch(SGLANG, ("-m", "sglang.launch_server", "--model-path", str(directory), *arguments))

    def _came_up(self) -> None:
        info = self._call("/server_info")
        if self._routing and not info.get("enable_return_routed_experts"):
            raise EngineError(f"the SGLang server at {self.url} does not return routed experts", now="Start it with that argument.")
        self._has, self._frees = memory_said(info), bool(info.get("enable_memory_saver"))
        if self._server is None:
            with contextlib.suppress(EngineError):  # Refused, unless who had it before was killed within a change of weights.
                self._call("/end_weight_update", {})
        way = way_of(self._settings.into_server, self.url, int(info.get("pp_size") or 1))
        self._into = open_way(way, self._started(), self._settings.device, int(info.get("tp_size") or 1))

    def _let_go(self) -> None:
        if self._into is not None:
            self._into.close()
        self._into = None

    def _room_and_context(self, longest: int) -> tuple[int, int]:
        room = int(self._call("/server_info").get("max_total_num_tokens") or 0)
        return room, min(longest, room or longest) - _SERVER_RESERVE

    def _body(self, job: Job) -> Mapping[str, object]:
        return {**request_body(job), "extra_key": self._key_of_caches, "return_routed_experts": self._routing is not None}

    def _grown(self, one: Running, heard: Heard) -> Job:
        job = super()._grown(one, heard)
        if self._routing is None:
            return job
        return replace(job, routed_experts=self._routing.read(heard.routed_experts, len(job.prompt) + len(job.tokens)))

    def _leaving(self, job: Job, finish: Finish) -> Generated:
        return super()._leaving(self._routing.completed(job) if self._routing else job, finish)

    def _logprobs_of(self, tokens: list[int]) -> list[float]:
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "return_logprob": True}
        found = self._call("/generate", {**body, "extra_key": self._key_of_caches, "logprob_start_len": 0}, timeout_s=600.0)
        return [value for value, *_ in found["meta_info"]["input_token_logprobs"][1:]]

    def _read_weights(self, directory: Path, version: int, *, flush: bool = True) -> None:
        assert self._into is not None
        self._into.put(directory, version, flush=flush)

    @property
    def _reading_pauses(self) -> bool:
        return self._into is not None and self._into.pauses

    def _pause(self, *, keeps: bool) -> None:
        self._call("/pause_generation", {"mode": "in_place" if keeps else "retract"})

    def _unpause(self) -> None:
        self._call("/continue_generation", {})

    def _have_it_speak(self, timeout_s: float) -> None:
        self._call("/health_generate", timeout_s=timeout_s)

    def _release(self, tags: list[str]) -> None:
        """Without a memory saver, as on a CPU, the server answers all of this and frees nothing."""
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
    def _key_of_caches(self) -> str:
        return f"weights-{self._version}"
