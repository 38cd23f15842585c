"""The common part of rollout engines that delegate to an inference server over HTTP.

    add -> a request with token ids --tokens stream in--> step -> Generated
    load_weights -> files in memory -> the server pauses, reads them, goes on

    a server that was started here dies, or answers nothing for `hung_after_s` --restart--> the weights that it held, under their version

After a restart running requests resume from their tokens, as does a request whose connection alone broke. A kind of server adds its
`Launch`, its `Dialect` and the abstract methods of `ServedRollout`.

Limits: one weight set; the server must see this host's files.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import secrets
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from m2flow.engines.contract import EngineSettings, Generated, Occupancy, Request, RolloutEngine
from m2flow.engines.models.hf_model import load_model, num_experts
from m2flow.engines.models.model_files import TextCodec, load_tokenizer, model_directory
from m2flow.engines.models.requests import Job, finish_of_prefix, generated_of, jobs_of
from m2flow.engines.servers.inference_server import (
    Dialect,
    Heard,
    Launch,
    PrivateDirectory,
    Requests,
    Running,
    ServedRolloutOptions,
    ServerClient,
    ServerProcess,
    extended,
)
from m2flow.errors import EngineError
from m2flow.recipe import Model
from m2flow.samples import Finish, SampleId, compact_experts

_FILE_BYTES = 2 << 30
Shapes = Mapping[str, tuple[int, ...]]


def shapes_in(directory: Path) -> Shapes:
    """Read names and shapes of the tensors in a directory."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118  # It is no dict.
    return found


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a directory one by one, by name."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def write_tensors(directory: Path, like: Path, shapes: Shapes, tensors: Iterable[tuple[str, Any]], dtype: torch.dtype) -> None:
    """Write weights beside a copy of all other files of the directory `like`.

    Args:
        shapes: what must be there; nothing else may be. Tensors are written in `dtype`, if they are of floating point.
    Raises:
        EngineError: a tensor is missing, unknown, of another shape, or comes twice; nothing is left of the directory then.
    """
    directory.mkdir()
    try:
        where: dict[str, str] = {}
        part: dict[str, Tensor] = {}
        for name, given in tensors:
            tensor = torch.as_tensor(given).detach().to("cpu")
            if name not in shapes or tuple(tensor.shape) != shapes[name] or name in where:
                expected = f"{list(shapes[name])}" if name in shapes else "no such tensor"
                raise EngineError(
                    f"weights that do not fit: {name} is {list(tensor.shape)}, expected {expected}",
                    now="Serve the model that is trained: the same path, or the same shapes.",
                )
            where[name] = ""
            # A copy: what is given may be gone when the next is taken.
            part[name] = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
            if sum(t.nbytes for t in part.values()) >= _FILE_BYTES:
                _write(directory, part, where)
        if missing := sorted(set(shapes) - set(where)):
            raise EngineError(f"{len(missing)} weights are missing: {', '.join(missing[:4])}")
        _write(directory, part, where)
        for file in like.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                shutil.copy(file, directory / file.name)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _write(directory: Path, part: dict[str, Tensor], where: dict[str, str]) -> None:
    file = f"model-{len(set(where.values()) - {''}) + 1:05d}.safetensors"
    save_file(part, str(directory / file), metadata={"format": "pt"})
    where.update(dict.fromkeys(part, file))
    part.clear()


ROUTING_OPTION = {"routed_experts": "Record with each sample the experts of each token and layer (mixtures of experts)."}
"""The option of servers that can say which experts of a mixture tokens went to."""


def records_routing(options: ServedRolloutOptions, model: Model) -> bool:
    """Whether samples are to have the experts of each token: by `ROUTING_OPTION`, or because training replays them."""
    return options.is_set("routed_experts") or model.routing == "rollout"


@dataclass(frozen=True)
class Routing:
    """The experts of each token and layer that a server routed a mixture's tokens to."""

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
        return cls(int(config.num_hidden_layers), int(each), num_experts(config))

    def rows(self, said: npt.NDArray[Any], num_tokens: int) -> npt.NDArray[np.int16]:
        """The experts of `num_tokens` tokens, int16 [T, layers, experts of a token]; -1 where none were reported.

        Args:
            said: what the server reported of the first of them, in this order, of any shape.
        """
        found = np.full((num_tokens, self.num_layers, self.num_of_token), -1, np.int16)
        if said.size % found[:1].size or said.size > found.size:
            raise EngineError(f"the server said {said.size} experts of {num_tokens} tokens in {self.num_layers} layers")
        rows = said.reshape(-1, self.num_layers, self.num_of_token)
        found[: len(rows)] = rows
        return found

    def completed(self, job: Job) -> Job:
        """Complete a job that leaves: a row for each of its tokens, also where the server reported nothing, in the fewest bytes."""
        num_tokens = len(job.prompt) + len(job.tokens)
        is_whole = job.routed_experts is not None and len(job.routed_experts) == num_tokens
        experts = job.routed_experts if is_whole else self.rows(np.empty(0, np.int16), num_tokens)
        return replace(job, routed_experts=compact_experts(np.asarray(experts, np.int16), self.num_experts))


_LOG = logging.getLogger("m2flow.engines.servers.served_rollout")
_T = TypeVar("_T")
_NEWS_WAIT_S = 0.02
_ABORT_WAIT_S = 30.0
_ABORT_AGAIN_S = 1.0
_HEALTH_WAIT_S = 25.0
"""SGLang's own limit is 20: it has a token generated."""
_WELL_FOR_S = 2.0
"""One answer is for all requests whose connections broke together."""
_MAX_BROKEN = 3
"""Connections of one request, in a row."""
_DEATH_WAIT_S = 15.0
"""A server that dies breaks its connections first, and on a busy machine takes its time."""


class ServedRollout(RolloutEngine):
    """Pass requests on to a server at once, which decides what runs; tokens stream in."""

    dialect: Dialect
    own_options: Mapping[str, str] = {}
    """Options beyond those that all served engines have, each with its meaning."""

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        self.capabilities = self.capabilities.configured(settings.options, settings.num_ranks)
        self._source = model
        self._settings = settings
        self._options = ServedRolloutOptions(self.name, settings.options, self.own_options)
        self._requests = Requests()
        self._version = 0
        self._names = itertools.count()
        self._prefix = secrets.token_hex(8)
        self._is_onloaded = False
        self._away: list[str] = []
        """Parts of the device's memory that the server has released, in that order."""
        self._given: Path | None = None
        """The weights that the server has, or had before it released them."""
        self._server: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._guarded: PrivateDirectory | None = None
        self._place: Path | None = None
        self._routing: Routing | None = None
        """Of servers that are to say which experts tokens went to."""
        self._num_put_back = self._num_cached = 0
        self._well_s = -math.inf
        """When it last reported to be healthy."""
        self.num_restarts = 0
        """How often a lost server was started again."""

    @property
    def product(self) -> str:
        """The server's name in messages."""
        return self.dialect.product

    # What each kind does in its own way

    @abstractmethod
    def _launch(self, directory: Path) -> Launch:
        """The command that starts a server with the weights of a directory."""

    @abstractmethod
    def _cache_size_and_context(self, longest: int) -> tuple[int, int]:
        """Tokens that the server's KV cache holds (0: not known), and that a sample may have; `longest` is the model's own limit."""

    @abstractmethod
    def _body(self, job: Job) -> Mapping[str, object]:
        """The body of a generate request, for the weights that are held."""

    @abstractmethod
    def _read_weights(self, directory: Path, version: int, *, flush: bool = True) -> None:
        """Have the server read weights while nothing runs, or running requests are paused.

        Args:
            flush: forget all caches.
        """

    @abstractmethod
    def _pause(self, *, keeps: bool) -> None:
        """Pause running requests between two tokens; without `keeps` their KV caches are computed anew afterwards."""

    @abstractmethod
    def _unpause(self) -> None:
        """Resume paused requests."""

    @abstractmethod
    def _generate_one_token(self, timeout_s: float) -> None:
        """Have the server generate a token. Raises `EngineError` if none comes."""

    @abstractmethod
    def _release(self, tags: list[str]) -> None:
        """Have the server release parts of the device's memory (`weights`, `kv_cache`), which are then in `_away`. Nothing runs."""

    @abstractmethod
    def _resume(self) -> None:
        """Have the server allocate again what is `_away`; weights are read afterwards, unless `_given` says that they have been."""

    @abstractmethod
    def _logprobs_of(self, tokens: list[int]) -> list[float]:
        """Have the server compute the log-probabilities of given tokens but the first, with the weights that it has."""

    def _check(self, job: Job) -> None:
        """Check a job. Raises `EngineError`: this server can't generate it."""

    def _on_server_started(self) -> None:
        """Prepare a server that was just started, or found running."""

    def _on_server_left(self) -> None:
        """Free what is kept for a server that is about to be stopped, or is gone already."""

    @property
    def _must_pause_to_read(self) -> bool:
        """Whether the server must be paused to read weights even if nothing runs."""
        return False

    def _extended(self, one: Running, heard: Heard) -> Job:
        """A finished job with what the server's last message reports of it."""
        job = extended(one, heard.spans, keeps=self._options.keeps_caches)
        if self._routing is None:
            return job
        num_tokens = len(job.prompt) + len(job.tokens)
        rows = self._routing.rows(self.dialect.experts(heard.routed_experts), num_tokens + one.num_dropped)
        return replace(job, routed_experts=rows[:num_tokens])

    def _leaving(self, job: Job, finish: Finish) -> Generated:
        """Turn a job into the sample that the engine returns."""
        return generated_of(self._routing.completed(job) if self._routing else job, finish, self._codec)

    # Samples

    def start(self) -> None:
        self._options.check()
        self._guarded = PrivateDirectory(f"m2flow-{self.name}-", self._options.weights_place)
        self._place = self._guarded.open()
        self._held = self._directory()
        self._shapes: Shapes = shapes_in(self._held)
        model = load_config(self._held)
        self._routing = Routing.of(model) if records_routing(self._options, self._source) else None
        self._hung_after_s = self._options.hung_after_s
        self._restarts_left = self._options.restarts
        self._client = ServerClient(self._options.url or self._serve(), self.dialect)
        self._client.open()
        self._on_server_started()
        if not self._server:
            self._unpause()  # Who had it before may have been killed between the two.
            self._change_weights(self._held, 0)  # Whatever it has held so far.
        self._room, self._max_context = self._cache_size_and_context(int(model.max_position_embeddings))
        self._vocab_size = int(model.vocab_size)
        self._heard_s = time.monotonic()
        self._is_onloaded = True

    def stop(self) -> None:
        self._requests.clear()
        if self._client is not None:
            self._on_server_left()
            if self._server is None and self._away:
                with contextlib.suppress(EngineError):  # It goes on for others, if it is still there.
                    self._resume()
            self._client.close()
        if self._server is not None:
            self._server.stop()
        if self._guarded is not None:
            self._guarded.close()
        self._guarded = None
        self._client = self._server = self._place = None

    def offload(self) -> None:
        """Free the device's memory. Running requests return to the queue with their tokens, and are prefilled again later."""
        self._make_room("kv_cache", "weights")

    def onload(self) -> None:
        self._with_restart(self._resume_and_reload)
        self._is_onloaded = True

    def add(self, requests: Sequence[Request]) -> None:
        self._started()
        jobs = jobs_of(requests, self._requests.progress(), self._codec, vocab_size=self._vocab_size, max_context=self._max_context)
        for job in jobs:
            self._check(job)
        self._requests.add(jobs)

    def step(self) -> list[Generated]:
        self._started()
        if not self._is_onloaded:
            raise EngineError("the engine is offloaded", now="Call `onload` before `step`.")
        self._with_restart(self._go_on)
        return [self._leaving(job, finish) for job, finish in self._requests.take_ended()]

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        self._started()
        wanted = set(ids)
        self._with_restart(lambda: self._end([rid for rid, one in self._requests.running.items() if one.job.id in wanted]))
        return [self._leaving(job, Finish.ABORT) for job in self._requests.take(wanted)]

    @property
    def url(self) -> str:
        """The server's address."""
        return self._started().url

    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        self._started()
        wanted = set(ids)
        running = [one for one in self._requests.running.values() if one.job.id in wanted and not one.is_mixed]
        jobs = [job for job in self._requests.resting if job.id in wanted] + [one.so_far(self._version) for one in running]
        return [self._leaving(job, Finish.ABORT) for job in jobs]

    def progress(self) -> dict[int, int]:
        return self._requests.progress()

    def occupancy(self) -> Occupancy:
        running, num_waiting = self._requests.running.values(), len(self._requests.waiting)
        used = sum(len(one.job.prompt) + one.num_tokens for one in running)
        return Occupancy(len(running), num_waiting, used, self._room, self._num_put_back, self._num_cached)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def version(self) -> int:
        return self._version

    def load_weights(self, tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool = False) -> None:
        self._started()
        if (num_running := len(self._requests.running)) and not under_requests:
            raise EngineError(f"{num_running} requests are running; weights can't change under them", now="Abort them first.")
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
        for one in self._requests.running.values():
            one.is_mixed = True
        self._held, self._version = fresh, version
        if before.parent == self._place:
            shutil.rmtree(before, ignore_errors=True)

    def weights(self) -> Iterator[tuple[str, Any]]:
        self._started()
        return read_tensors(self._held)

    def language(self) -> TextCodec:
        return self._codec

    @functools.cached_property
    def _codec(self) -> TextCodec:
        return load_tokenizer(self._source)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Compute them by the server itself, whose weights are not those of its files until it has read them."""
        if not self._is_onloaded:
            raise EngineError("the engine is offloaded", now="Call `onload` before `logprobs`.")
        said = []
        for sequence in sequences:
            found = self._logprobs_of(list(sequence))
            if len(found) != len(sequence) - 1:
                raise EngineError(f"the {self.product} server said {len(found)} log-probabilities of {len(sequence)} given tokens")
            said.append(np.array(found, np.float32))
        return said

    # The server

    def _make_room(self, *tags: str) -> None:
        """Have the server release parts of the device's memory; running requests return to the queue with their tokens."""
        ids = {one.job.id for one in self._requests.running.values()}
        self._with_restart(lambda: self._end(list(self._requests.running)))
        self._requests.put_back(self._requests.take(ids))
        self._with_restart(lambda: self._release([tag for tag in tags if tag not in self._away]))
        self._is_onloaded = False

    def _resume_and_reload(self) -> None:
        """Have the server allocate again what it released, and read the weights that it lacks."""
        if "weights" in self._away:
            self._given = None
        if self._away:
            self._resume()
            self._away = []
        if self._given != self._held:
            self._change_weights(self._held, self._version)

    def _serve(self) -> str:
        """Start a server with the weights that are held; returns its address."""
        assert self._place is not None
        self._given = self._held
        self._server = ServerProcess(self._launch(self._held), self._options.server, self._place / "server.log")
        self._server.start()
        return self._server.url

    def _with_restart(self, work: Callable[[], _T]) -> _T:
        """Run something that needs the server; again, if the server is lost meanwhile and can be restarted."""
        while True:
            try:
                return work()
            except EngineError as error:
                if not self._restart(self._held, self._version):
                    raise
                _LOG.warning("the %s server is started again: %s", self.product, error)

    def _restart(self, held: Path, version: int) -> bool:
        """Restart a lost server with these weights, and queue what ran. False: it is not lost, or was lost too often."""
        server = self._server
        if server is None or not server.is_lost(_DEATH_WAIT_S) or self._restarts_left < 1:
            return False
        self._restarts_left -= 1
        self.num_restarts += 1
        server.stop()
        if self._client is not None:
            self._on_server_left()
            self._client.close()
        self._requests.put_back_running(self._version)
        self._held, self._version = held, version
        self._client = ServerClient(self._serve(), self.dialect)
        self._client.open()
        self._on_server_started()
        self._heard_s = time.monotonic()
        self._is_onloaded, self._away = True, []
        return True

    def _change_weights(self, fresh: Path, version: int) -> None:
        """Have the server read weights while running requests are paused."""
        keeps = self._options.keeps_caches
        is_paused = bool(self._requests.running) or self._must_pause_to_read
        if is_paused:
            self._pause(keeps=keeps)
        try:
            self._read_weights(fresh, version, flush=not (keeps and self._requests.running))
            self._given = fresh
        except EngineError:
            if self._server is not None:
                self._server.check()
            raise
        finally:
            if is_paused:
                self._unpause()

    def _directory(self) -> Path:
        """A directory with the model's weights: its own, or one with the recipe's random weights."""
        if self._source.init == "pretrained":
            return model_directory(self._source)
        assert self._place is not None
        directory = self._place / f"weights-{next(self._names)}"
        load_model(self._source, device="cpu", attention="eager").save_pretrained(str(directory))
        self._codec.save(str(directory))
        return directory

    def _go_on(self) -> None:
        while self._requests.waiting:
            self._send(self._requests.waiting.popleft())
        if self._requests.running:
            self._receive_news(0.0 if self._requests.ended else _NEWS_WAIT_S)

    def _send(self, job: Job, *, num_broken: int = 0) -> None:
        # The server may act on a name after its request has ended, so no name comes twice, whoever talks to it.
        # Nor begins one with another: SGLang ends all requests whose names begin with the one that it is told.
        rid = f"{self._prefix}-{next(self._names):012}"
        self._requests.running[rid] = Running(job, num_broken=num_broken)
        self._started().generate(rid, self._body(job))
        self._heard_s = time.monotonic()

    def _receive_news(self, timeout_s: float) -> None:
        """Process the messages of running requests."""
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
                self._generate_one_token(self._hung_after_s)
            except EngineError as error:
                if self._server is not None:
                    self._server.end_hung()
                raise EngineError(
                    f"the {self.product} server has said nothing for {2 * self._hung_after_s:g} s: {error.what}",
                    now="The server's log in the run's logs/ says what it does.",
                ) from error
            self._heard_s = time.monotonic()

    def _take_in(self, heard: Heard) -> None:
        one = self._requests.running.get(heard.rid)
        if one is None:
            return
        if heard.error:
            if heard.is_broken and one.num_broken + 1 < _MAX_BROKEN and self._is_healthy():
                return self._send_again(heard.rid, heard.error)
            if self._server is not None and self._server.is_lost(_DEATH_WAIT_S):
                self._server.check()
            raise self._gave_up(one.job, heard.error)
        one.take_in(heard.tokens, heard.logprobs)
        if heard.finish is None:
            return self._stop(heard.rid, one) if one.is_stopped else None
        self._num_cached += heard.num_cached
        self._num_put_back += 0 if one.is_mixed else heard.num_put_back  # A change of weights makes it wait too.
        finish = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}.get(heard.finish.type)
        finish = Finish.STOP if one.is_stopped else finish
        if finish is None or (finish is Finish.ABORT and heard.rid not in self._requests.aborting):
            raise self._gave_up(one.job, heard.finish.message or heard.finish.type)
        self._requests.end(heard.rid, replace(self._extended(one, heard), num_cached=heard.num_cached), finish)

    def _stop(self, rid: str, one: Running) -> None:
        """End a request whose last token has completed a stop text, which the server need not know."""
        if rid not in self._requests.aborting:
            self._requests.aborting.add(rid)
            self._started().begin_abort([rid])
        # Otherwise the server's last message says what else is to be known of its tokens: their experts too.
        if not one.is_mixed and self._routing is None:
            self._requests.end(rid, one.so_far(self._version), Finish.STOP)

    def _is_healthy(self) -> bool:
        """Whether the server reports to be healthy."""
        if time.monotonic() - self._well_s > _WELL_FOR_S:
            try:
                self._call("/health", timeout_s=_HEALTH_WAIT_S)
            except EngineError:
                return False
            self._well_s = time.monotonic()
        return True

    def _send_again(self, rid: str, why: str) -> None:
        """Resume a request whose connection broke while its server lives; one that was to be aborted ends."""
        one = self._requests.running[rid]
        who = SampleId.unpack(one.job.id)
        _LOG.warning("the connection of sample %s to the %s server broke, and it is sent again: %s", who, self.product, why)
        with contextlib.suppress(EngineError):  # It will be noticed soon if the server is not there any more.
            self._started().abort([rid])  # It may not have noticed.
        job = one.kept(self._version)
        finish = Finish.ABORT if rid in self._requests.aborting else finish_of_prefix(job)
        if finish is not None:
            self._requests.end(rid, job, finish)
        else:
            del self._requests.running[rid]
            self._send(job, num_broken=0 if one.tokens else one.num_broken + 1)

    def _gave_up(self, job: Job, why: str) -> EngineError:
        said = self._server.last_words() if self._server is not None else ""
        return EngineError(f"the {self.product} server gave up sample {SampleId.unpack(job.id)}: {why}", remote=said)

    def _end(self, rids: list[str]) -> None:
        """Have the server abort requests, and wait until they have ended, with their tokens so far."""
        self._requests.aborting.update(rids)
        deadline, again_s = time.monotonic() + _ABORT_WAIT_S, 0.0
        while left := [rid for rid in rids if rid in self._requests.running]:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the {self.product} server did not abort {len(left)} requests in {_ABORT_WAIT_S:g} s",
                    now="The server's log in the run's logs/ says what it does.",
                )
            if time.monotonic() >= again_s:  # A request may come to the server after the word that ends it.
                self._started().abort(left)
                again_s = time.monotonic() + _ABORT_AGAIN_S
            self._receive_news(_NEWS_WAIT_S)

    def _call(self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float = 60.0) -> Any:
        try:
            return self._started().call(path, body, timeout_s=timeout_s)
        except EngineError:
            if self._server is not None:
                self._server.check()
            raise

    def _started(self) -> ServerClient:
        if self._client is None:
            raise EngineError("the engine is not started", now="Call `start` first.")
        return self._client


def load_config(directory: Path) -> Any:
    """The language model's part of a directory's config.json."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False).get_text_config()
