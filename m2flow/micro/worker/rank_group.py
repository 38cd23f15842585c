"""Rank 0 of a trainer of several ranks: what is asked of its engines is asked of all ranks, in the same order, with the same rows.

    worker's tasks --> GangTrain, rank 0 --words, rows--> ranks 1, 2, ... (`m2flow.micro.worker.rank_process`)
                                         <--answers-----

The other ranks know no tasks: rank 0 does a task when its rows are here, and passes on what that asks of the engine, so order, credits and
endings are those of a worker of one process. A call ends when every rank has ended it. Ranks that end it differently (one has raised, or
is in a collective that another does not come to) are not at the same place any more: the call fails with the rank's number, and so
does all that comes after it. A rank that is gone takes rank 0 with it: the launcher ends a gang as a whole.

Words are msgpack, rows are frames of `m2flow.channels.codec`, a loss is cloudpickle: they go over a Unix socket in the run's private
directory, which the run's secret opens. Limit: all ranks on one host.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge, wait
from typing import Literal, NoReturn, TypeVar, final

import cloudpickle
import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.codec import encode_batch
from m2flow.engines.contract import EngineSettings, Memory, Objective, Sums, Tensor, TrainEngine
from m2flow.engines.registry import make_train
from m2flow.errors import EngineError, ErrorRecord, M2FlowError, MicroBatchTooLarge, error_from_record, is_out_of_memory
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.worker.out_of_memory import too_large
from m2flow.recipe import AdamW, Loss, Model
from m2flow.samples import Batch

GRACE_S = 5.0
"""When a rank has failed at a call, the others have so long to come to its end."""
_BACKLOG = 16
"""Of connections that nobody has taken yet: strangers among them must not keep a rank out."""
_MOURNS_S = 30.0
"""Rank 0 waits so long to be ended after another rank is gone, then it ends itself."""

_T = TypeVar("_T")

MakeTrain = Callable[[EngineSlot, Model, EngineSettings], TrainEngine]
Plain = Literal["start", "stop", "onload", "offload", "rest", "discard", "weights", "adapters", "base"]
Computed = Literal["logprobs", "values", "scores"]


def make_own_train(slot: EngineSlot, model: Model, settings: EngineSettings) -> TrainEngine:
    """The train engine of one process."""
    return make_train(slot.engine, model, settings)


class RankGroupSettings(msgspec.Struct, frozen=True):
    """Which rank of its worker a process is, and where it meets the others."""

    rank: int = 0
    num_ranks: int = 1
    meeting: str = ""
    """The Unix socket at which rank 0 listens to the others."""
    rendezvous: str = ""
    """Where their engines meet (`m2flow.engines.contract.EngineSettings.rendezvous`)."""
    parts: int = 1
    """Into how many each micro-batch is cut (`m2flow.micro.worker.out_of_memory`)."""


class RankCommand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What rank 0 says to the others, and they to it."""


class Do(RankCommand, frozen=True):
    """Call this method of a role's engine, which takes nothing."""

    role: str
    method: Plain


class Accumulate(RankCommand, frozen=True):
    """Add up the gradient of a micro-batch, which follows."""

    role: str
    loss: bytes
    """cloudpickle of a `Loss`; empty: the last one."""


class Apply(RankCommand, frozen=True):
    """One optimiser step."""

    role: str
    optimizer: AdamW
    denominator: float


class Compute(RankCommand, frozen=True):
    """Numbers of the samples that follow."""

    role: str
    method: Computed


class CopyFrom(RankCommand, frozen=True):
    """Take the weights that another role's engine has."""

    role: str
    source: str


class File(RankCommand, frozen=True):
    """Write a checkpoint, or read one."""

    role: str
    method: Literal["save", "load"]
    path: str


class Heard(RankCommand, frozen=True):
    """Rank 0 knows that a rank has failed."""


class End(RankCommand, frozen=True):
    """Finish."""


class Here(RankCommand, frozen=True):
    """A rank has come."""

    rank: int


class Answer(RankCommand, frozen=True):
    """A rank has done what it was told to, or could not."""

    error: ErrorRecord | None = None


Said = Do | Accumulate | Apply | Compute | CopyFrom | File | Heard | End
_encode = msgspec.msgpack.Encoder().encode
_said: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_here: msgspec.msgpack.Decoder[Here] = msgspec.msgpack.Decoder(Here)


def say(link: Connection, word: RankCommand) -> None:
    link.send_bytes(_encode(word))


def heard(link: Connection) -> Said:
    return _said.decode(link.recv_bytes())


@final
class RankGroup:
    """The other ranks, as rank 0 has them. `open` waits until all are there; its launcher ends it if one can't come."""

    def __init__(self, settings: RankGroupSettings, secret: str) -> None:
        self._settings = settings
        self._secret = secret
        self._links: dict[int, Connection] = {}
        self._broken: M2FlowError | None = None

    def open(self) -> None:
        if self._settings.num_ranks == 1:
            return
        arrived: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        with Listener(self._settings.meeting, "AF_UNIX", max(self._settings.num_ranks, _BACKLOG)) as listener:
            threading.Thread(target=_welcome, args=(listener, self._secret.encode(), arrived), daemon=True, name="m2flow-gang").start()
            while len(self._links) < self._settings.num_ranks - 1:
                rank, link = arrived.get()
                if 0 < rank < self._settings.num_ranks and rank not in self._links:
                    self._links[rank] = link
                else:
                    link.close()

    def close(self) -> None:
        """Let the others go. May be called twice."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # It is gone already.
                say(link, End())
            link.close()
        self._links = {}

    def make_train(self, slot: EngineSlot, model: Model, settings: EngineSettings) -> TrainEngine:
        """A train engine on every rank; of one rank, the engine itself."""
        own = make_own_train(slot, model, settings)
        return RankGroupTrain(slot.role, own, self) if self._links else own

    @property
    def is_broken(self) -> bool:
        """Whether the ranks are not at the same place any more."""
        return self._broken is not None

    def together(self, word: Said, work: Callable[[], _T], rows: Batch | None = None) -> _T:
        """Do some work here, and what is the same on all others.

        Raises:
            EngineError: it failed on another rank, but not here; or the ranks are not at the same place any more.
        """
        self.tell(word, rows)
        try:
            result = work()
        except Exception as error:
            self.failed(error)
        self.succeeded()
        return result

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
        """It went well here: hear how it went elsewhere."""
        failures = self._answers(None)
        if not failures:
            return
        rank, record = min(failures.items())
        error = error_from_record(record)
        self._broken = type(error)(f"rank {rank}: {error.what}", now=error.now)
        raise type(error)(f"rank {rank} of this trainer: {error.what}", where=error.where, now=error.now, remote=error.remote)

    def failed(self, error: Exception) -> NoReturn:
        """It failed here. Where it failed everywhere, the ranks are together still."""
        failures = self._answers(GRACE_S)
        if len(failures) < len(self._links):
            known = error if isinstance(error, M2FlowError) else EngineError(repr(error))
            self._broken = type(known)(f"rank 0: {known.what}", now=known.now)
        raise error

    def _answers(self, limit_s: float | None) -> dict[int, ErrorRecord]:
        """Which ranks failed, when all have answered, or some seconds after the first has failed."""
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
                if answer.error is not None:
                    failures[rank] = answer.error
                    say(link, Heard())
                    deadline = deadline if deadline is not None else time.monotonic() + GRACE_S
        return failures


def _welcome(listener: Listener, secret: bytes, arrived: queue.SimpleQueue[tuple[int, Connection]]) -> None:
    """Hand on who comes and has the secret, until the listener is closed. Each is heard in a thread of its own: who says nothing must
    not keep the others waiting."""

    def hear(link: Connection) -> None:
        try:
            deliver_challenge(link, secret)
            answer_challenge(link, secret)
            arrived.put((_here.decode(link.recv_bytes()).rank, link))
        except Exception as error:  # Whatever a stranger says: it is no fault of the run's.
            print(f"turned away who is no rank of this trainer: {error!r:.300}", file=sys.stderr, flush=True)
            link.close()

    with contextlib.suppress(OSError):  # It is closed.
        while True:
            threading.Thread(target=hear, args=(listener.accept(),), daemon=True, name="m2flow-gang-hello").start()


def accumulate_share(engine: TrainEngine, batch: Batch, objective: Objective) -> Sums:
    """What one rank does of a micro-batch.

    Raises:
        MicroBatchTooLarge: it has no room for it, and the micro-batch could be smaller.
    """
    try:
        return engine.accumulate(batch, objective)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise too_large(len(batch), may_cut=True) from error


def _mourn(rank: int) -> NoReturn:
    """Another rank is gone. The launcher, who knows how it ended, ends this one too."""
    print(f"rank {rank} of this trainer is gone", file=sys.stderr, flush=True)
    time.sleep(_MOURNS_S)
    os._exit(1)


@final
class RankGroupTrain(TrainEngine):
    """An engine whose calls all ranks make. What it gives is what it gives on rank 0."""

    def __init__(self, role: str, own: TrainEngine, gang: RankGroup) -> None:
        self.name, self.capabilities = own.name, own.capabilities
        self._role = role
        self._own = own
        self._gang = gang
        self._last_loss: Loss | None = None

    def start(self) -> None:
        self._gang.together(Do(self._role, "start"), self._own.start)

    def stop(self) -> None:
        if self._gang.is_broken:
            self._own.stop()
        else:
            self._gang.together(Do(self._role, "stop"), self._own.stop)

    def onload(self) -> None:
        self._gang.together(Do(self._role, "onload"), self._own.onload)

    def offload(self) -> None:
        self._gang.together(Do(self._role, "offload"), self._own.offload)

    def rest(self) -> None:
        self._gang.together(Do(self._role, "rest"), self._own.rest)

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        is_new = objective.loss is not self._last_loss
        body = cloudpickle.dumps(objective.loss) if is_new else b""
        self._last_loss = objective.loss
        return self._gang.together(Accumulate(self._role, body), lambda: accumulate_share(self._own, batch, objective), batch)

    def apply(self, optimizer: AdamW, denominator: float) -> Mapping[str, float]:
        return self._gang.together(Apply(self._role, optimizer, denominator), lambda: self._own.apply(optimizer, denominator))

    def discard(self) -> None:
        self._gang.together(Do(self._role, "discard"), self._own.discard)

    def logprobs(self, batch: Batch) -> Batch:
        return self._gang.together(Compute(self._role, "logprobs"), lambda: self._own.logprobs(batch), batch)

    def values(self, batch: Batch) -> Batch:
        return self._gang.together(Compute(self._role, "values"), lambda: self._own.values(batch), batch)

    def scores(self, batch: Batch) -> Batch:
        return self._gang.together(Compute(self._role, "scores"), lambda: self._own.scores(batch), batch)

    def memory(self) -> Memory:
        return self._own.memory()

    def num_training_tokens(self, batch: Batch) -> npt.NDArray[np.int64]:
        return self._own.num_training_tokens(batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """One after the other, gathered on all ranks. Whoever stops in the middle leaves the rest to be gathered."""
        return self._gathered("weights", self._own.weights)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        return self._gathered("adapters", self._own.adapters)

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return self._gathered("base", self._own.base)

    def _gathered(self, method: Literal["weights", "adapters", "base"], of_own: Callable[[], Iterator[_T]]) -> Iterator[_T]:
        self._gang.tell(Do(self._role, method))
        own = iter(of_own())
        try:
            while (found := next(own, None)) is not None:
                yield found
        except GeneratorExit:
            for _ in own:
                pass
            self._gang.succeeded()
            raise
        except Exception as error:
            self._gang.failed(error)
        self._gang.succeeded()

    def copy_from(self, source: TrainEngine) -> None:
        assert isinstance(source, RankGroupTrain)
        self._gang.together(CopyFrom(self._role, source._role), lambda: self._own.copy_from(source._own))

    def adapter_reference(self, role: str, model: Model) -> TrainEngine | None:
        own = self._own.adapter_reference(role, model)  # The other ranks make theirs when they begin.
        return None if own is None else RankGroupTrain(role, own, self._gang)

    def save(self, path: str) -> None:
        self._gang.together(File(self._role, "save", path), lambda: self._own.save(path))

    def load(self, path: str) -> None:
        self._gang.together(File(self._role, "load", path), lambda: self._own.load(path))
