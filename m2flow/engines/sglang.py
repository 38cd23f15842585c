"""SGLang as a rollout engine: a server of its own, spoken to over HTTP by its public endpoints.

    add -> POST /generate with token ids --tokens stream in--> step -> Generated
    load_weights -> files in memory -> pause, into the server (`m2flow.engines.sglang_weights`), continue

Which weights made which token is what the server says (`weight_versions`). A change of weights under requests takes them out of the
running batch (`retract`): their caches are computed anew, so no token sees an older one. With `keep_kv` they stay, caches and all, and
what comes after is marked. No request finds a cache of other weights: the version is a part of its key (`extra_key`).

    a server that was started here dies, or answers nothing for `hung_after_s` --restart--> the weights that it held, under their version;
    what ran goes on from its tokens

Options: `python` (an interpreter that has SGLang), `args` and `env` of the server, `start_timeout_s`; or `url` of one that runs already.
`deterministic_inference`: random numbers belong to the sample (the server's `sampling_seed`), at a cost in speed. `stream_interval`
(tokens between two pieces of news of a sample, default 8), `weights_dir` (where weights are handed over, default /dev/shm), `restarts`
(how often a server that is lost is started again, default 2), `hung_after_s` (default 120), `keep_kv`, `routed_experts` (of a mixture: keep
which experts each token went to).

Limits: random numbers are the server's own functions of seed and position. One weight set.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch

from m2flow.engines.contract import Capabilities, EngineSettings, Generated, Occupancy, ParallelLayouts, Request, RolloutEngine
from m2flow.engines.guarded_place import GuardedPlace
from m2flow.engines.held_files import Shapes, read_tensors, shapes_in, write_tensors
from m2flow.engines.hf_model import load_model, load_tokenizer, model_directory
from m2flow.engines.jobs import Job, finish_of_prefix, generated_of, job_of
from m2flow.engines.sglang_client import Heard, SglangClient, Span
from m2flow.engines.sglang_options import check_names, number, server_arguments, server_options, weights_place
from m2flow.engines.sglang_requests import Routing, Running, grown, request_body
from m2flow.engines.sglang_server import SglangServer
from m2flow.engines.sglang_weights import IntoServer, open_way, way_of
from m2flow.errors import EngineError
from m2flow.recipe import Model
from m2flow.samples import Finish, SampleId

_LOG = logging.getLogger("m2flow.engines.sglang")
_T = TypeVar("_T")
_NEWS_WAIT_S = 0.02
_ABORT_WAIT_S = 30.0
_HUNG_AFTER_S = 120.0
_RESTARTS = 2
_DRAIN_S = 30.0
_DEATH_WAIT_S = 1.0
"""A server that dies breaks its connections first."""
_SERVER_RESERVE = 2
"""Tokens of the context that the server keeps for itself."""


@final
class SglangRollout(RolloutEngine):
    """Requests go to the server at once, which decides what runs; its tokens stream in."""

    name = "sglang"
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
        self._source = model
        self._settings = settings
        self._queue: deque[Job] = deque()
        self._running: dict[str, Running] = {}
        self._ended: list[tuple[Job, Finish]] = []
        self._version = 0
        self._names = itertools.count()
        self._prefix = secrets.token_hex(8)
        self._aborting: set[str] = set()
        self._is_onloaded = False
        self._away: list[str] = []
        """What the server has been asked to give back of the device, in that order."""
        self._server: SglangServer | None = None
        self._client: SglangClient | None = None
        self._into: IntoServer | None = None
        self._routing: Routing | None = None
        self._guarded: GuardedPlace | None = None
        self._place: Path | None = None
        self._given: Path | None = None
        """The weights that the server has, or had before it gave them back."""
        self.num_restarts = 0
        """How often a lost server was started again."""
        if settings.options.get("deterministic_inference"):
            self.capabilities = replace(SglangRollout.capabilities, keyed_seeds=True)

    def start(self) -> None:
        options = self._settings.options
        check_names(options)
        self._codec = load_tokenizer(self._source)
        self._guarded = GuardedPlace("m2flow-sglang-", weights_place(options))
        self._place = self._guarded.open()
        self._held = self._directory()
        self._shapes: Shapes = shapes_in(self._held)
        model = load_config(self._held)
        self._routing = Routing.of(model) if options.get("routed_experts") else None
        self._hung_after_s = number(options, "hung_after_s", _HUNG_AFTER_S)
        self._restarts_left = int(number(options, "restarts", _RESTARTS))
        url = str(options.get("url", ""))
        if not url:
            url = self._serve()
        self._client = SglangClient(url)
        self._client.open()
        info = self._client.call("/server_info")
        self._into = self._way_into(info)
        if not self._server:
            self._change_weights(self._held, 0)  # Whatever it has held so far.
        if self._routing and not info.get("enable_return_routed_experts"):
            raise EngineError(f"the SGLang server at {url} does not return routed experts", now="Start it with that argument.")
        room = int(info.get("max_total_num_tokens") or 1 << 62)
        self._room = room if room < 1 << 62 else 0
        self._max_context = min(int(model.max_position_embeddings), room) - _SERVER_RESERVE
        self._vocab_size = int(model.vocab_size)
        self._heard_s = time.monotonic()
        self._is_onloaded = True

    def stop(self) -> None:
        self._queue.clear()
        self._running.clear()
        self._aborting.clear()
        self._ended.clear()
        if self._into is not None:
            self._into.close()
        if self._client is not None:
            if self._server is None and self._away:
                with contextlib.suppress(EngineError):  # It goes on for others, if it is still there.
                    self._resume()
            self._client.close()
        if self._server is not None:
            self._server.stop()
        if self._guarded is not None:
            self._guarded.close()
        self._guarded = None
        self._client = self._server = self._place = self._into = None

    def offload(self) -> None:
        """Give the device's memory back. What runs goes back to the queue with its tokens, and is read again later."""
        self._make_room("kv_cache", "weights")

    def rest(self) -> None:
        """The same with the cache's alone."""
        self._make_room("kv_cache")

    def _make_room(self, *away: str) -> None:
        self._queue.extendleft(reversed(self._surviving(lambda: self._take(list(self._running)))))
        self._surviving(lambda: self._release([tag for tag in away if tag not in self._away]))
        self._is_onloaded = False

    def onload(self) -> None:
        lacks_weights = "weights" in self._away or self._given != self._held
        if self._away:
            self._resume()
        if lacks_weights:
            self._change_weights(self._held, self._version)
        self._is_onloaded = True

    def add(self, requests: Sequence[Request]) -> None:
        self._started()
        known = {job.id for job in self._queue} | {one.job.id for one in self._running.values()}
        encoded: dict[str, np.ndarray] = {}
        jobs = []
        for request in requests:
            job = job_of(request, self._codec, encoded, vocab_size=self._vocab_size, max_context=self._max_context)
            if job.id in known:
                raise EngineError(f"sample {SampleId.unpack(job.id)} is already being generated")
            known.add(job.id)
            jobs.append(job)
        for job in jobs:
            finish = finish_of_prefix(job)
            if finish is None:
                self._queue.append(job)
            else:
                self._ended.append((job, finish))

    def step(self) -> list[Generated]:
        self._started()
        if not self._is_onloaded:
            raise EngineError("the engine is offloaded", now="Call `onload` before `step`.")
        self._surviving(self._go_on)
        finished, self._ended = self._ended, []
        return [self._leaving(job, finish) for job, finish in finished]

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        self._started()
        wanted = set(ids)
        taken = self._surviving(lambda: self._take([rid for rid, one in self._running.items() if one.job.id in wanted]))
        taken += [job for job, _ in self._ended if job.id in wanted] + [job for job in self._queue if job.id in wanted]
        self._ended = [(job, finish) for job, finish in self._ended if job.id not in wanted]
        self._queue = deque(job for job in self._queue if job.id not in wanted)
        return [self._leaving(job, Finish.ABORT) for job in taken]

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._started().url

    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        self._started()
        wanted = set(ids)
        waiting = [job for job in [*(job for job, _ in self._ended), *self._queue] if job.id in wanted]
        running = [self._so_far(one) for one in self._running.values() if one.job.id in wanted and not one.is_mixed]
        return [self._leaving(job, Finish.ABORT) for job in waiting + running]

    def progress(self) -> dict[int, int]:
        waiting = {job.id: len(job.tokens) for job in [*self._queue, *(job for job, _ in self._ended)]}
        return waiting | {one.job.id: len(one.job.tokens) + len(one.tokens) for one in self._running.values()}

    def occupancy(self) -> Occupancy:
        used = sum(len(one.job.prompt) + len(one.job.tokens) + len(one.tokens) for one in self._running.values())
        return Occupancy(len(self._running), len(self._queue), used, self._room)

    @property
    def num_unfinished(self) -> int:
        return len(self._queue) + len(self._running) + len(self._ended)

    @property
    def version(self) -> int:
        return self._version

    def load_weights(self, tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool = False) -> None:
        self._started()
        if self._running and not under_requests:
            raise EngineError(f"{len(self._running)} requests are running; weights can't change under them", now="Abort them first.")
        assert self._place is not None
        fresh = self._place / f"weights-{next(self._names)}"
        write_tensors(fresh, self._held, self._shapes, tensors, getattr(torch, self._source.rollout_dtype or self._source.dtype))
        before = self._held
        try:
            if self._is_onloaded:
                self._change_weights(fresh, version)
        except EngineError:
            if not self._restart(fresh, version):
                shutil.rmtree(fresh, ignore_errors=True)
                raise
        for one in self._running.values():
            one.is_mixed = True
        self._held, self._version = fresh, version
        if before.parent == self._place:
            shutil.rmtree(before, ignore_errors=True)

    def weights(self) -> Iterator[tuple[str, Any]]:
        self._started()
        return read_tensors(self._held)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """By the server itself, whose weights are not those of its files until it has read them."""
        if not self._is_onloaded:
            raise EngineError("the engine is offloaded", now="Call `onload` before `logprobs`.")
        said = []
        for sequence in sequences:
            body = {"input_ids": list(sequence), "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "return_logprob": True}
            body["extra_key"] = f"weights-{self._version}"
            found = self._call("/generate", {**body, "logprob_start_len": 0})["meta_info"]["input_token_logprobs"]
            if len(found) != len(sequence):
                raise EngineError(f"the SGLang server said {len(found)} log-probabilities of {len(sequence)} given tokens")
            said.append(np.array([value for value, *_ in found[1:]], np.float32))
        return said

    # The server

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

    def _serve(self) -> str:
        """Start a server with the weights that are held; its address."""
        assert self._place is not None
        self._given = self._held
        self._server = SglangServer(
            self._held,
            server_arguments(self._settings, self._source, self._version),
            server_options(self._settings.options),
            self._place / "server.log",
        )
        self._server.start()
        return self._server.url

    def _surviving(self, work: Callable[[], _T]) -> _T:
        """Do what needs the server; again, if it is lost meanwhile and can be started anew."""
        while True:
            try:
                return work()
            except EngineError as error:
                if not self._restart(self._held, self._version):
                    raise
                _LOG.warning("the SGLang server is started again: %s", error)

    def _restart(self, held: Path, version: int) -> bool:
        """Start a lost server anew with these weights; what ran is in the queue then. False: it is not lost, or has been too often."""
        server = self._server
        if server is None or not server.is_lost(_DEATH_WAIT_S) or self._restarts_left < 1:
            return False
        self._restarts_left -= 1
        self.num_restarts += 1
        server.stop()
        if self._into is not None:
            self._into.close()
        if self._client is not None:
            self._client.close()
        # Of one under which weights have changed it was not said yet which made which token: it begins anew.
        jobs = [one.job if one.is_mixed else self._so_far(one) for one in self._running.values()]
        self._running.clear()
        self._aborting.clear()
        for job in reversed(jobs):
            finish = finish_of_prefix(job)
            if finish is None:
                self._queue.appendleft(job)
            else:
                self._ended.append((job, finish))
        self._held, self._version = held, version
        self._client = SglangClient(self._serve())
        self._client.open()
        self._into = self._way_into(self._client.call("/server_info"))
        self._heard_s = time.monotonic()
        self._is_onloaded, self._away = True, []
        return True

    def _leaving(self, job: Job, finish: Finish) -> Generated:
        return generated_of(self._routing.completed(job) if self._routing else job, finish, self._codec)

    def _so_far(self, one: Running) -> Job:
        """A job with the tokens that have come, all of them by the weights that are held."""
        return grown(one, [Span(str(self._version), 0, len(one.tokens))] if one.tokens else [])

    def _change_weights(self, fresh: Path, version: int) -> None:
        """Have the server read weights; what runs waits meanwhile."""
        assert self._into is not None
        keeps = bool(self._settings.options.get("keep_kv"))
        is_paused = bool(self._running) or self._into.pauses
        if is_paused:
            self._call("/pause_generation", {"mode": "in_place" if keeps else "retract"})
        try:
            self._into.put(fresh, version, flush=not (keeps and self._running))
            self._given = fresh
        except EngineError:
            if self._server is not None:
                self._server.check()
            raise
        finally:
            if is_paused:
                self._call("/continue_generation", {})

    def _way_into(self, info: Mapping[str, Any]) -> IntoServer:
        assert self._client is not None
        way = way_of(self._settings.into_server, self._client.url, int(info.get("pp_size") or 1))
        return open_way(way, self._client, self._settings.device, int(info.get("tp_size") or 1))

    def _directory(self) -> Path:
        """A directory with the model's weights: its own, or one that is written from what the recipe draws."""
        if self._source.init == "pretrained":
            return model_directory(self._source)
        assert self._place is not None
        directory = self._place / f"weights-{next(self._names)}"
        load_model(self._source, device="cpu", attention="eager").save_pretrained(str(directory))
        self._codec.save(str(directory))
        return directory

    def _go_on(self) -> None:
        self._send_queued()
        if self._running:
            self._hear(0.0 if self._ended else _NEWS_WAIT_S)

    def _send_queued(self) -> None:
        client = self._started()
        while self._queue:
            job = self._queue.popleft()
            # The server may act on a name after its request has ended, so no name comes twice, whoever talks to it.
            rid = f"{self._prefix}-{next(self._names)}"
            self._running[rid] = Running(job)
            further = {"extra_key": f"weights-{self._version}", "return_routed_experts": self._routing is not None}
            client.generate(rid, {**request_body(job), **further})
            self._heard_s = time.monotonic()

    def _hear(self, timeout_s: float) -> None:
        """Take what the server has said."""
        news = self._started().heard(timeout_s)
        for heard in news:
            self._take_in(heard)
        now = time.monotonic()
        if news:
            self._heard_s = now
        elif self._server is not None:
            self._server.check()
        if now - self._heard_s > self._hung_after_s:
            try:
                self._call("/health_generate", timeout_s=self._hung_after_s)
            except EngineError as error:
                if self._server is not None:
                    self._server.end_hung()
                raise EngineError(f"the SGLang server has said nothing for {2 * self._hung_after_s:g} s: {error.what}") from error
            self._heard_s = time.monotonic()

    def _take_in(self, heard: Heard) -> None:
        one = self._running.get(heard.rid)
        if one is None:
            return
        if heard.error:
            if self._server is not None and self._server.is_lost(_DEATH_WAIT_S):
                self._server.check()
            raise EngineError(f"the SGLang server gave up sample {SampleId.unpack(one.job.id)}: {heard.error}")
        one.tokens += heard.tokens
        one.logprobs += heard.logprobs
        if heard.finish is None:
            return
        del self._running[heard.rid]
        finish = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}.get(heard.finish.type)
        if finish is None or (finish is Finish.ABORT and heard.rid not in self._aborting):
            raise EngineError(
                f"the SGLang server gave up sample {SampleId.unpack(one.job.id)}: {heard.finish.message or heard.finish.type}"
            )
        self._aborting.discard(heard.rid)
        job = grown(one, heard.spans, keeps=bool(self._settings.options.get("keep_kv")))
        if self._routing:
            job = replace(job, routed_experts=self._routing.read(heard.routed_experts, len(job.prompt) + len(job.tokens)))
        self._ended.append((job, finish))

    def _take(self, rids: list[str]) -> list[Job]:
        """Take these from the server, with their tokens so far."""
        if not rids:
            return []
        wanted = {self._running[rid].job.id for rid in rids}
        self._aborting.update(rids)
        self._started().abort(rids)
        deadline = time.monotonic() + _ABORT_WAIT_S
        while any(rid in self._running for rid in rids):
            self._hear(_NEWS_WAIT_S)
            if time.monotonic() > deadline:
                raise EngineError(f"the SGLang server did not abort {len(rids)} requests in {_ABORT_WAIT_S:g} s")
        taken = [job for job, _ in self._ended if job.id in wanted]
        self._ended = [(job, finish) for job, finish in self._ended if job.id not in wanted]
        return taken

    def _call(self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float = 60.0) -> Any:
        try:
            return self._started().call(path, body, timeout_s=timeout_s)
        except EngineError:
            if self._server is not None:
                self._server.check()
            raise

    def _started(self) -> SglangClient:
        if self._client is None:
            raise EngineError("the engine is not started", now="Call `start` first.")
        return self._client


def load_config(directory: Path) -> Any:
    """The language model's part of a directory's config.json."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False).get_text_config()
