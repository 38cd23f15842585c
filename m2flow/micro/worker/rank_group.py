"""Drive a trainer of several ranks from rank 0: each engine call is made on all ranks, in the same order and with the same rows.

    worker's tasks --> RankGroupTrain, rank 0 --RankCommand, rows--> ranks 1, 2, ... (`m2flow.micro.worker.worker_process`)
                                              <--Answer-----------

The other ranks know no tasks: rank 0 does a task when its rows are here and passes on the engine calls, so order, backpressure and
endings are those of a worker of one process. A call ends when every rank has ended it. If ranks end it differently (one has raised, or
waits in a collective that another never enters), they are out of step: the call fails with the rank's number, and so does every later
one. A rank that is gone takes rank 0 with it: the launcher ends a rank group as a whole.

Weights that other processes load are not gathered where the engine knows each rank's pieces: all ranks write theirs at once to the memory
that rank 0 has laid out (`RankGroupTrain.spread`).

Commands are msgpack, rows are frames of `m2flow.channels.codec`, losses and optimisers are cloudpickle. They go over a Unix socket in
the run's private directory, which the run's secret opens. Limit: all ranks on one host.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge, wait
from typing import Literal, NoReturn, TypeVar, final

import cloudpickle
import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.codec import encode_batch
from m2flow.channels.weights import Manifest, PieceWriter, Spread, Written
from m2flow.engines.contract import EngineSettings, HeldCheckpoint, Memory, Objective, Sums, Tensor, TrainEngine
from m2flow.engines.registry import make_train, train_options
from m2flow.errors import EngineError, ErrorRecord, M2FlowError, MicroBatchTooLarge, error_from_record, is_out_of_memory
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.worker.out_of_memory import too_large
from m2flow.recipe import Loss, Model, Optimizer
from m2flow.samples import Batch

GRACE_S = 5.0
"""How long the other ranks get to end a call after one has failed at it."""
_BACKLOG = 16
"""Connections waiting to be accepted; large enough that strangers among them do not keep a rank out."""
_MOURNS_S = 30.0
"""How long rank 0 waits to be killed by the launcher after another rank is gone; then it exits by itself."""

_T = TypeVar("_T")

MakeTrain = Callable[[EngineSlot, Model, EngineSettings], TrainEngine]
Plain = Literal["start", "stop", "onload", "offload", "rest", "discard", "weights", "adapters", "base"]
Computed = Literal["logprobs", "top_logprobs", "values", "scores"]


def make_own_train(slot: EngineSlot, model: Model, settings: EngineSettings) -> TrainEngine:
    """Make the train engine of a single process."""
    options = train_options(slot.engine, settings.options, slot.planned)
    return make_train(slot.engine, model, replace(settings, options=options))


class RankGroupSettings(msgspec.Struct, frozen=True):
    """Which rank of its worker a process is, and where the ranks rendezvous."""

    rank: int = 0
    num_ranks: int = 1
    meeting: str = ""
    """The Unix socket at which rank 0 listens to the others."""
    rendezvous: str = ""
    """Where the engines' process group is initialised (`m2flow.engines.contract.EngineSettings.rendezvous`)."""
    parts: int = 1
    """Parts into which each micro-batch is cut (`m2flow.micro.worker.out_of_memory`)."""


class RankCommand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message between rank 0 and another rank."""


class Do(RankCommand, frozen=True):
    """Call a method of a role's engine that takes no arguments."""

    role: str
    method: Plain


class AccumulateCommand(RankCommand, frozen=True):
    """Add up the gradient of a micro-batch, which follows."""

    role: str
    loss: bytes
    """cloudpickle of a `Loss`; empty: the last one."""


class ApplyCommand(RankCommand, frozen=True):
    """One optimiser step."""

    role: str
    optimizer: bytes
    """cloudpickle of an `Optimizer`."""
    denominator: float


class Compute(RankCommand, frozen=True):
    """Compute log-probabilities, values or scores of the samples that follow."""

    role: str
    method: Computed
    top_k: int = 0
    """The `top_k` of `top_logprobs`."""


class CopyFrom(RankCommand, frozen=True):
    """Copy the weights of another role's engine."""

    role: str
    source: str
    share: float


class File(RankCommand, frozen=True):
    """Write a checkpoint, hold one to be written, or read one."""

    role: str
    method: Literal["save", "held_checkpoint", "load"]
    path: str


class WritePieces(RankCommand, frozen=True):
    """Write this rank's pieces of the weights to the segment of a manifest."""

    role: str
    manifest: Manifest
    bucket_bytes: int


class Acknowledge(RankCommand, frozen=True):
    """Acknowledge an answer with an error."""


class End(RankCommand, frozen=True):
    """Leave and exit."""


class Here(RankCommand, frozen=True):
    """Announce a rank that has connected."""

    rank: int


class RankAnswer(RankCommand, frozen=True):
    """Answer a command: done, or the error."""

    error: ErrorRecord | None = None
    written: Written | None = None
    """What `WritePieces` wrote."""


Said = Do | AccumulateCommand | ApplyCommand | Compute | CopyFrom | File | WritePieces | Acknowledge | End
_encode = msgspec.msgpack.Encoder().encode
_said: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
_answer: msgspec.msgpack.Decoder[RankAnswer] = msgspec.msgpack.Decoder(RankAnswer)
_here: msgspec.msgpack.Decoder[Here] = msgspec.msgpack.Decoder(Here)


def say(link: Connection, word: RankCommand) -> None:
    link.send_bytes(_encode(word))


def heard(link: Connection) -> Said:
    return _said.decode(link.recv_bytes())


@final
class RankGroup:
    """Rank 0's links to the other ranks. `open` waits until all have connected; the launcher kills this process if one can't."""

    def __init__(self, settings: RankGroupSettings, secret: str) -> None:
        self._settings = settings
        self._secret = secret
        self._links: dict[int, Connection] = {}
        self._broken: M2FlowError | None = None
        self._written: dict[int, Written] = {}
        """By rank, of the last `WritePieces`."""

    def open(self) -> None:
        if self._settings.num_ranks == 1:
            return
        arrived: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        with Listener(self._settings.meeting, "AF_UNIX", max(self._settings.num_ranks, _BACKLOG)) as listener:
            threading.Thread(
                target=_welcome, args=(listener, self._secret.encode(), arrived), daemon=True, name="m2flow-rank-group"
            ).start()
            while len(self._links) < self._settings.num_ranks - 1:
                rank, link = arrived.get()
                if 0 < rank < self._settings.num_ranks and rank not in self._links:
                    self._links[rank] = link
                else:
                    link.close()

    def close(self) -> None:
        """Tell the other ranks to exit. May be called twice."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # It is gone already.
                say(link, End())
            link.close()
        self._links = {}

    def make_train(self, slot: EngineSlot, model: Model, settings: EngineSettings) -> TrainEngine:
        """Make a train engine on every rank; with one rank, the plain engine."""
        own = make_own_train(slot, model, settings)
        return RankGroupTrain(slot.role, own, self) if self._links else own

    @property
    def is_broken(self) -> bool:
        """Whether the ranks are out of step."""
        return self._broken is not None

    def together(self, word: Said, work: Callable[[], _T], rows: Batch | None = None) -> _T:
        """Do some work here while all other ranks carry out the command `word`.

        Raises:
            EngineError: it failed on another rank, but not here; or the ranks are out of step.
        """
        self.tell(word, rows)
        try:
            result = work()
        except Exception as error:
            self.failed(error)
        self.succeeded()
        return result

    def written(self, word: WritePieces, work: Callable[[], Written]) -> list[Written]:
        """Have all ranks write their pieces of the weights at once; returns what each has written, by rank."""
        self._written = {}
        own = self.together(word, work)
        return [own, *(self._written.pop(rank) for rank in sorted(self._links))]

    def tell(self, word: Said, rows: Batch | None = None) -> None:
        if self._broken is not None:
            kind = MicroBatchTooLarge if isinstance(self._broken, MicroBatchTooLarge) else EngineError
            raise kind(f"the ranks of this trainer are not at the same place any more: {self._broken.what}", now=self._broken.now)
        body = encode_batch(rows) if rows is not None else None
        for rank, link in self._links.items():
            try:
                say(link, word)
                if body is not None:
                    link.send_bytes(body)
            except OSError:
                _mourn(rank)

    def succeeded(self) -> None:
        """Wait for the other ranks' answers after success here."""
        failures = self._answers(None)
        if not failures:
            return
        rank, record = min(failures.items())
        error = error_from_record(record)
        self._broken = type(error)(f"rank {rank}: {error.what}", now=error.now)
        raise type(error)(f"rank {rank} of this trainer: {error.what}", where=error.where, now=error.now, remote=error.remote)

    def failed(self, error: Exception) -> NoReturn:
        """Wait for the other ranks' answers after a failure here. If it failed on all of them, the ranks are still in step."""
        failures = self._answers(GRACE_S)
        if len(failures) < len(self._links):
            known = error if isinstance(error, M2FlowError) else EngineError(repr(error))
            self._broken = type(known)(f"rank 0: {known.what}", now=known.now)
        raise error

    def _answers(self, limit_s: float | None) -> dict[int, ErrorRecord]:
        """Collect the ranks that failed, until all have answered or `GRACE_S` after the first failure."""
        waited = dict(self._links)
        failures: dict[int, ErrorRecord] = {}
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while waited:
            ready = wait(list(waited.values()), None if deadline is None else deadline - time.monotonic())
            if not ready:
                break
            for rank, link in list(waited.items()):
                if link not in ready:
                    continue
                try:
                    answer = _answer.decode(link.recv_bytes())
                except (EOFError, OSError):
                    _mourn(rank)
                del waited[rank]
                if answer.written is not None:
                    self._written[rank] = answer.written
                if answer.error is not None:
                    failures[rank] = answer.error
                    say(link, Acknowledge())
                    deadline = deadline if deadline is not None else time.monotonic() + GRACE_S
        return failures


def _welcome(listener: Listener, secret: bytes, arrived: queue.SimpleQueue[tuple[int, Connection]]) -> None:
    """Accept ranks that know the secret until the listener is closed. Each connection has a thread of its own, so that a silent one does
    not keep the others waiting."""

    def hear(link: Connection) -> None:
        try:
            deliver_challenge(link, secret)
            answer_challenge(link, secret)
            arrived.put((_here.decode(link.recv_bytes()).rank, link))
        except Exception as error:  # A stranger's bytes must not fail the run.
            print(f"turned away who is no rank of this trainer: {error!r:.300}", file=sys.stderr, flush=True)
            link.close()

    with contextlib.suppress(OSError):  # It is closed.
        while True:
            threading.Thread(target=hear, args=(listener.accept(),), daemon=True, name="m2flow-rank-hello").start()


def accumulate_share(engine: TrainEngine, batch: Batch, objective: Objective) -> Sums:
    """Accumulate one rank's share of a micro-batch.

    Raises:
        MicroBatchTooLarge: out of memory, and the micro-batch could be smaller.
    """
    try:
        return engine.accumulate(batch, objective)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise too_large(batch, objective, may_cut=True) from error


def _mourn(rank: int) -> NoReturn:
    """Wait to be killed because another rank is gone: the launcher knows how that one ended, and kills this one too."""
    print(f"rank {rank} of this trainer is gone", file=sys.stderr, flush=True)
    time.sleep(_MOURNS_S)
    os._exit(1)


@final
class RankGroupTrain(TrainEngine):
    """A train engine whose calls are made on all ranks. Results are rank 0's."""

    def __init__(self, role: str, own: TrainEngine, group: RankGroup) -> None:
        self.name, self.capabilities = own.name, own.capabilities
        self._role = role
        self._own = own
        self._group = group
        self._last_loss: Loss | None = None
        self._writer = PieceWriter()

    def start(self) -> None:
        self._group.together(Do(self._role, "start"), self._own.start)

    def stop(self) -> None:
        self._writer.close()
        if self._group.is_broken:
            self._own.stop()
        else:
            self._group.together(Do(self._role, "stop"), self._own.stop)

    def onload(self) -> None:
        self._group.together(Do(self._role, "onload"), self._own.onload)

    def offload(self) -> None:
        self._group.together(Do(self._role, "offload"), self._own.offload)

    def rest(self) -> None:
        self._group.together(Do(self._role, "rest"), self._own.rest)

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        is_new = objective.loss is not self._last_loss
        body = cloudpickle.dumps(objective.loss) if is_new else b""
        self._last_loss = objective.loss
        return self._group.together(AccumulateCommand(self._role, body), lambda: accumulate_share(self._own, batch, objective), batch)

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        body = cloudpickle.dumps(optimizer)
        return self._group.together(ApplyCommand(self._role, body, denominator), lambda: self._own.apply(optimizer, denominator))

    def discard(self) -> None:
        self._group.together(Do(self._role, "discard"), self._own.discard)

    def logprobs(self, batch: Batch) -> Batch:
        return self._group.together(Compute(self._role, "logprobs"), lambda: self._own.logprobs(batch), batch)

    def top_logprobs(self, batch: Batch, top_k: int) -> Batch:
        command = Compute(self._role, "top_logprobs", top_k)
        return self._group.together(command, lambda: self._own.top_logprobs(batch, top_k), batch)

    def values(self, batch: Batch) -> Batch:
        return self._group.together(Compute(self._role, "values"), lambda: self._own.values(batch), batch)

    def scores(self, batch: Batch) -> Batch:
        return self._group.together(Compute(self._role, "scores"), lambda: self._own.scores(batch), batch)

    def memory(self) -> Memory:
        return self._own.memory()

    def num_training_tokens(self, batch: Batch) -> npt.NDArray[np.int64]:
        return self._own.num_training_tokens(batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """One after the other, gathered on all ranks. Whoever stops in the middle leaves the rest to be gathered."""
        return self._gathered("weights", self._own.weights)

    def spread(self, bucket_bytes: int) -> Spread | None:
        """The same weights as the ranks hold them, each of which writes its pieces; None: they have to be gathered."""
        forms = self._own.weight_forms()
        if forms is None:
            return None

        def write(manifest: Manifest) -> list[Written]:
            word = WritePieces(self._role, manifest, bucket_bytes)
            return self._group.written(word, lambda: self._writer.write(self._own.weight_pieces(), manifest, bucket_bytes))

        return Spread(forms, write)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        return self._gathered("adapters", self._own.adapters)

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return self._gathered("base", self._own.base)

    def _gathered(self, method: Literal["weights", "adapters", "base"], of_own: Callable[[], Iterator[_T]]) -> Iterator[_T]:
        self._group.tell(Do(self._role, method))
        own = iter(of_own())
        try:
            while (found := next(own, None)) is not None:
                yield found
        except GeneratorExit:
            for _ in own:
                pass
            self._group.succeeded()
            raise
        except Exception as error:
            self._group.failed(error)
        self._group.succeeded()

    def copy_from(self, source: TrainEngine, share: float = 1.0) -> None:
        assert isinstance(source, RankGroupTrain)
        self._group.together(CopyFrom(self._role, source._role, share), lambda: self._own.copy_from(source._own, share))

    def adapter_reference(self, role: str, model: Model) -> TrainEngine | None:
        own = self._own.adapter_reference(role, model)  # The other ranks make theirs when they begin.
        return None if own is None else RankGroupTrain(role, own, self._group)

    def save(self, path: str) -> None:
        self._group.together(File(self._role, "save", path), lambda: self._own.save(path))

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        return self._group.together(File(self._role, "held_checkpoint", path), lambda: self._own.held_checkpoint(path))

    def load(self, path: str) -> None:
        self._group.together(File(self._role, "load", path), lambda: self._own.load(path))
