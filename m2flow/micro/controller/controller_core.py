"""Interpret the scheduler's commands: inputs of a run in, effects out; a pure state machine without sockets, threads, clock or files.

    posts of the program, messages and rows of workers, time, lost and restarted processes
        --ControllerCore--> Scheduler --commands--> ControllerCore --effects-->
    messages and rows to send, values and errors for the program

The scheduler decides; the core keeps what its commands refer to: the calls with their bodies, which worker was introduced to which call,
the rows that the controller itself reads or collects, micro-batches under way, deadlines, and the recovery of rows that a lost worker had
sent. Whoever owns a core hands it inputs and carries out the effects in order:

    m2flow.micro.controller.controller   sockets, processes and the real clock
    m2flow.simulator.simulation          virtual workers on a virtual clock
    m2flow.testing.world                 real workers over memory channels, in a random order
    m2flow.testing.scheduler_model       model workers that check each message

What a run writes down goes through `Records`, before the effects that follow from it.

Recovery of in-flight rows (`InflightRecovery`). On `PeerLost` every peer answers which rows of the dead worker never arrived; it accepts
nothing from that process afterwards, so its answer stays true. The scheduler hears of the loss (`WorkerLost.missing`) only when all have
answered; until then it may still count on the dead worker, and what it tells that one to send is missing too. Limit: a process answers
between two tasks, so a long task delays all who wait for the lost worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, final

import msgspec

from m2flow.errors import ErrorRecord, InternalError, M2FlowError, RunInterrupted, error_from_record
from m2flow.macro.graph import Call
from m2flow.micro.protocol import call_semantics
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import (
    CONTROLLER,
    LEDGER,
    CallAdded,
    CheckpointBegun,
    CheckpointDue,
    CheckpointFailed,
    CheckpointSaved,
    Command,
    Discarded,
    Dropped,
    Event,
    Expired,
    Forgotten,
    FromWorker,
    Late,
    Moved,
    Recalled,
    Reject,
    Released,
    Resolve,
    Restored,
    Send,
    Sourced,
    Stopping,
    TakenOver,
    TimedOut,
    Wanted,
    WorkerJoined,
    WorkerLost,
)
from m2flow.micro.protocol.plan import Plan, Stage
from m2flow.micro.protocol.worker_state import RowStore, tag_of, worker_of
from m2flow.micro.records.flow_record import Logged
from m2flow.micro.scheduler.call_lifecycle import Wait, describe_waits, find_deadlock
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.samples import Batch

# ---- in-flight rows of dead workers

Sent = Mapping[str, Mapping[int, Iterable[int]]]
"""Receiver -> call -> rows that a worker was told to send there."""


@dataclass
class _Dead:
    tag: str
    waits_for: set[str]
    missing: dict[str, dict[int, list[int]]] = field(default_factory=dict)

    def add(self, place: str, call: int, rows: Iterable[int]) -> None:
        self.missing.setdefault(place, {}).setdefault(call, []).extend(rows)


@final
class InflightRecovery:
    """Find in-flight rows of dead workers by asking their peers which of them never arrived.

    begin --PeerLost--> all others --Missing--> answered --> done: the worker, and the rows that never arrived
    """

    def __init__(self) -> None:
        self._dead: dict[str, _Dead] = {}

    def begin(self, worker: str, tag: str, sent: Sent, others: Iterable[str]) -> dict[str, m.PeerLost]:
        """Begin for a dead worker; return what to tell each of the others. Those that were sent nothing need not answer."""
        asked = {name: m.PeerLost(tag, {call: list(rows) for call, rows in sent.get(name, {}).items()}) for name in others}
        self._dead[worker] = _Dead(tag, {name for name, message in asked.items() if message.rows})
        for dead in self._dead.values():
            dead.waits_for.discard(worker)
        return asked

    @property
    def is_open(self) -> bool:
        """Whether some dead worker is not settled yet."""
        return bool(self._dead)

    def not_sent(self, worker: str, to: str, call: int, rows: Iterable[int]) -> None:
        """Note rows that a dead worker was told to send and never will."""
        self._dead[worker].add(to, call, rows)

    def note_sent(self, worker: str, message: m.ToWorker) -> None:
        """Note what the scheduler tells a worker that it does not know to be dead: rows that this one should send are missing."""
        if worker in self._dead and isinstance(message, m.Push | m.Reassign):
            for tag in (message.to,) if isinstance(message, m.Push) else message.forward_to:
                self.not_sent(worker, worker_of(tag), message.call, message.ids)

    def answered(self, place: str, message: m.Missing) -> None:
        for dead in self._dead.values():
            if dead.tag == message.peer:
                dead.waits_for.discard(place)
                for call, rows in message.rows.items():
                    dead.add(place, call, rows)

    def done(self) -> Iterator[tuple[str, dict[str, dict[int, list[int]]]]]:
        """Yield the workers for which all have answered, each once, with their missing rows. While the scheduler handles one, it may still
        count on the next; what it tells that one to send is then among its missing rows."""
        while (worker := next((name for name, dead in self._dead.items() if not dead.waits_for), None)) is not None:
            yield worker, self._dead.pop(worker).missing


# ---- deadlocks

PATIENCE_S = 3.0
"""A ring of waits that has not changed for so long is a deadlock, and no transient state between two messages."""


@final
class Watchdog:
    """Detect a deadlock: a ring of waits (`m2flow.micro.scheduler.call_lifecycle`) that stays the same for longer than `patience_s`."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._ring: list[Wait] = []
        self._since_s = 0.0

    def look(self, waits: Sequence[Wait], now_s: float) -> InternalError | None:
        """Check the waits of this moment; return the error if the same ring has held for long enough, else None."""
        ring = find_deadlock(waits)
        if ring != self._ring:
            self._ring, self._since_s = ring, now_s
        if not ring or now_s - self._since_s < self._patience_s:
            return None
        return InternalError(
            f"the run has come to a halt, for {now_s - self._since_s:.0f} s now: {describe_waits(ring)}",
            now="Give the channels of the spec more room (`channels: max_samples, max_bytes`), and please report this plan.",
        )


# ---- inputs


@dataclass(frozen=True)
class Submitted:
    """A call with its stage, and its body as workers receive it."""

    call: Call
    stage: Stage
    body: bytes
    """Empty where workers need no introduction to calls."""
    rows: Batch | None = None
    """Result of a generate call that an earlier attempt at the run had completed."""
    left: Sequence[int] = ()
    """Samples that it left to a later call (partial rollouts)."""


@dataclass(frozen=True)
class SaveAll:
    """Write every role's model under this directory; answered by `AllSaved`."""

    path: Path


Post = Submitted | Logged | SaveAll | Wanted | Released | CheckpointDue | Stopping
"""What the program hands to the core."""


# ---- effects


class SendRows(msgspec.Struct, frozen=True):
    """Send rows that the controller has, or has read back from the ledger, to a process. Void if that one is gone."""

    to: str
    """Tag of the process."""
    call: int
    ids: list[int]
    rows: Batch
    source: str
    """`CONTROLLER` or `LEDGER`."""


class Announced(msgspec.Struct, frozen=True):
    """From now on these are the processes that take rows: tag -> address."""

    addresses: dict[str, str]


class Resolved(msgspec.Struct, frozen=True):
    """A call is done; `value` is None for a call with rows."""

    call: Call
    value: object


class Rejected(msgspec.Struct, frozen=True):
    """A call failed because of the call `root`. This may be repeated with an earlier root."""

    call: Call
    error: M2FlowError
    root: int

    @property
    def stays_open(self) -> bool:
        """Whether the run was interrupted: the call stays open in the ledger, for a resume."""
        return isinstance(self.error, RunInterrupted)


class Delivered(msgspec.Struct, frozen=True):
    """The rows that the program waits for are here."""

    call: int
    rows: Batch


class CallForgotten(msgspec.Struct, frozen=True):
    """Neither the program nor another call can ask for this call any more."""

    call: Call


class AllSaved(msgspec.Struct, frozen=True):
    """Every role's model is written: role -> digest of its weights."""

    digests: dict[str, str]


class LossSettled(msgspec.Struct, frozen=True):
    """Nothing that a lost worker has sent is in doubt any more, and the scheduler knows of its loss; a new process may replace it."""

    worker: str
    unreported: tuple[m.Finished | m.Aborted | m.Flushed, ...]
    """What it had written and could not report."""


class Consumed(msgspec.Struct, frozen=True):
    """An update has accumulated the gradients of a micro-batch."""

    call: Call
    epoch: int
    ids: list[int]


SampleDecision = Discarded | Dropped | Late | TakenOver | Expired | Moved
"""Commands that only say what becomes of samples."""
Effect = (
    Send
    | SendRows
    | Announced
    | Resolved
    | Rejected
    | Delivered
    | CallForgotten
    | AllSaved
    | LossSettled
    | Consumed
    | Logged
    | SampleDecision
    | CheckpointBegun
    | CheckpointSaved
    | CheckpointFailed
)


# ---- what a core is given

Unreported = tuple[m.Finished | m.Aborted | m.Flushed, ...]


class Records:
    """Write down what becomes of calls and samples. This base class keeps nothing."""

    def __init__(self, calls: dict[int, Call] | None = None) -> None:
        self.calls: dict[int, Call] = {} if calls is None else calls
        """The calls that can still be asked for; the core adds and removes them."""

    def call_added(self, call: Call) -> None:
        """The program has made a call."""

    def restored(self, call: Call, stage: Stage) -> Restored | None:
        """Find rows of a new call that an earlier attempt at the run has made."""
        return None

    def call_done(self, call: Call, value: object, chosen: tuple[int, ...] | None) -> None:
        """A call is done (`Resolve`)."""

    def call_failed(self, call: Call, error: M2FlowError) -> None:
        """A call has failed, other than by an interruption."""

    def forgotten(self, ordinal: int) -> None:
        """Nobody can ask for a call any more."""

    def reported(self, message: m.Finished | m.Aborted | m.Flushed | m.GivenUp) -> None:
        """A worker has reported samples or rows."""

    def dispatched(self, worker: str, task: m.Generate) -> None:
        """A worker is given samples."""

    def decided(self, decision: SampleDecision) -> None:
        """The scheduler has decided about samples."""

    def consumed(self, call: Call, epoch: int, ids: Sequence[int]) -> None:
        """A micro-batch has been trained on."""

    def sample_failed(self, call: Call, row: int, error: ErrorRecord) -> None:
        """A task has failed because of a sample."""

    def settle(self, worker: str, reason: str = "") -> Unreported:
        """Settle the samples of a worker that was lost, or has ended for another reason; return what it wrote and could not report."""
        return ()

    def read_back(self, push: m.Push) -> Batch:
        """Read rows that no worker has any more."""
        raise InternalError(f"rows of call {push.call} are asked for, and nothing was written down")


class ControllerRows(Protocol):
    """The rows of datasets and of recalled calls that the controller itself has (`RowStore`)."""

    def put(self, call: int, batch: Batch, sender: str = "") -> None: ...

    def get(self, call: int, ids: Sequence[int]) -> Batch: ...

    def forget(self, call: int) -> None: ...


class Timeouts(Protocol):
    """When running samples are late (`m2flow.micro.scheduler.partial_rollouts.Deadlines`)."""

    def began(self, task: m.Generate, call: Call, now_s: float) -> object: ...

    def due(self, now_s: float) -> list[TimedOut]: ...


# ---- the core

_OWN_PLACES = frozenset({CONTROLLER, LEDGER})


class ControllerCore:
    """Own a scheduler and all that its commands refer to; take inputs and return effects, to be carried out in order.

    Every input may raise an `M2FlowError`: the run can't go on.
    """

    def __init__(self, plan: Plan, scheduler: Scheduler, records: Records, timeouts: Timeouts, rows: ControllerRows | None = None) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        """Time of the inputs, by any clock. The owner sets it."""
        self.calls = records.calls
        self.addresses: dict[str, str] = {}
        """Tag of a live process, or `CONTROLLER` -> address of its inbox."""
        self._plan = plan
        self._records = records
        self._timeouts = timeouts
        self._rows: ControllerRows = RowStore() if rows is None else rows
        self._pending: list[Event] = []
        """Events of posts that the scheduler has not been given yet."""
        self._bodies: dict[int, bytes] = {}
        self._introduced: dict[str, set[int]] = {}
        """Worker that is up -> calls that were defined there."""
        self._incarnations: dict[str, int] = {}
        self._has_begun = False
        self._is_winding_down = False
        self._made_s: dict[int, float] = {}
        """Generate call -> when the program made it."""
        self._consuming: dict[int, m.Accumulate] = {}
        """Micro-batches under way, by task."""
        self._wanted: set[int] = set()
        """Calls whose rows the program waits for."""
        self._collected = RowStore()
        """Rows of `_wanted` calls that have arrived."""
        self._delivered: set[int] = set()
        """Calls whose rows the program has."""
        self._saving: dict[int, tuple[str, m.Save]] = {}
        """Task number -> the worker that saves, and the message that asks it to."""
        self._saved: dict[str, str] = {}
        self._recovery = InflightRecovery()
        self._losses: dict[str, WorkerLost] = {}
        """Dead worker -> what the scheduler will be told when its in-flight rows are settled."""
        self._dead: set[str] = set()
        """Tags of dead processes."""

    # The program

    def post(self, post: Post) -> list[Effect]:
        """Take a post of the program. Calls and releases only gather until `flush`, or until a post that must come after them."""
        match post:
            case Submitted():
                self._submit(post)
            case Released() | CheckpointDue():
                self._pending.append(post)
            case Logged():
                return [*self.flush(), post]
            case SaveAll(path):
                return [*self.flush(), *self._save(path)]
            case Wanted():
                return self._want(post)
            case Stopping():
                effects = self.flush()
                self._is_winding_down = True
                return [*effects, *self.handle(post)]
        return []

    def flush(self) -> list[Effect]:
        """Give the scheduler the pending events in one batch: the calls of a segment, and those that the program has released."""
        events, self._pending = self._pending, []
        return self.handle(*events) if events else []

    @property
    def is_wound_down(self) -> bool:
        """Whether the run was asked to stop, and no call is under way any more."""
        return self._is_winding_down and not self.scheduler.has_calls

    def _want(self, post: Wanted) -> list[Effect]:
        ordinal, is_first = post.call, post.call not in self._delivered
        self._pending.append(post)
        if is_first:
            self._wanted.add(ordinal)
        effects = self.flush()
        if is_first and not self.scheduler.num_rows(ordinal):
            effects += self._deliver(ordinal, Batch.concat([]))
        return effects

    def _deliver(self, ordinal: int, rows: Batch) -> list[Effect]:
        self._wanted.discard(ordinal)
        self._delivered.add(ordinal)
        return [Delivered(ordinal, rows)]

    def _submit(self, post: Submitted) -> None:
        call, given = post.call, post.rows
        self.calls[call.ordinal] = call
        if call.engine == "rollout":
            self._made_s[call.ordinal] = self.now_s
        if post.body:
            self._bodies[call.ordinal] = post.body
        self._records.call_added(call)
        if given is not None:
            self._rows.put(call.ordinal, given)
            self._pending.append(Recalled(call, post.stage, given.ids.tolist(), call_semantics.num_tokens_of(given), list(post.left)))
        else:
            self._pending.append(CallAdded(call, post.stage))
        restored = self._records.restored(call, post.stage)
        if restored is not None:
            self._pending.append(restored)
        rows = call.options.get("rows")
        if given is None and isinstance(rows, Batch):
            self._rows.put(call.ordinal, rows)
            self._pending.append(Sourced(call.ordinal, rows.ids.tolist(), call_semantics.num_tokens_of(rows)))

    # Workers

    def heard(self, worker: str, message: m.ToController) -> list[Effect]:
        """Take a worker's message. Duplicate and late ones change nothing.

        Raises:
            M2FlowError: the worker can't go on (`Fatal`), or could not save a model.
        """
        match message:
            case m.Finished() | m.Aborted() | m.Flushed():
                self._records.reported(message)
                return self.handle(FromWorker(worker, message))
            case m.TaskDone() | m.TaskFailed():
                return self._ended(worker, message)
            case m.Load() | m.Queued() | m.Preempted():
                return self.handle(FromWorker(worker, message))
            case m.GivenUp():
                self._records.reported(message)
            case m.PartWritten(step, role, digest, error):
                return [CheckpointSaved(step, role, digest) if error is None else CheckpointFailed(step, role, error)]
            case m.Missing():
                self._recovery.answered(worker, message)
            case m.Fatal(error=error):
                raise error_from_record(error)
            case _:  # What is about the process: its owner's.
                pass
        return []

    def _ended(self, worker: str, message: m.TaskDone | m.TaskFailed) -> list[Effect]:
        if message.task in self._saving:
            if isinstance(message, m.TaskFailed):
                raise error_from_record(message.error)
            _, save = self._saving.pop(message.task)
            self._saved[save.role] = str(message.result)
            return [] if self._saving else [AllSaved(self._saved)]
        task = self._consuming.pop(message.task, None)
        if isinstance(message, m.TaskFailed):
            if message.row >= 0 and message.call in self.calls:
                self._records.sample_failed(self.calls[message.call], message.row, message.error)
        elif task is not None:
            call = self.calls[task.call]
            self._records.consumed(call, task.epoch, task.ids)  # Once: `m2flow.micro.records.ledger.Ledger.consumed` has a key for it.
            return [Consumed(call, task.epoch, task.ids), *self.handle(FromWorker(worker, message))]
        return self.handle(FromWorker(worker, message))

    def rows_arrived(self, call: int, rows: Batch, sender: str) -> list[Effect]:
        """Take rows that the program waits for. They may arrive twice: their first sender may have died after sending some."""
        if call not in self._wanted or sender in self._dead:
            return []
        self._collected.put(call, rows, sender)
        ids = self._collected.ids(call)
        if len(ids) < self.scheduler.num_rows(call):
            return []
        found = self._collected.get(call, ids)
        self._collected.forget(call)
        return self._deliver(call, found)

    def tick(self) -> list[Effect]:
        """Time out the samples that are late by now."""
        late = self._timeouts.due(self.now_s)
        return self.handle(*late) if late else []

    # Processes

    @property
    def up(self) -> Iterable[str]:
        """The workers that are up, as far as is known."""
        return self._introduced.keys()

    def is_up(self, worker: str) -> bool:
        return worker in self._introduced

    def came_up(self, worker: str, incarnation: int = 0, address: str = "") -> list[Effect]:
        """Note that a worker's process is up, and where it takes rows. After `begin`, the scheduler learns that the worker has joined."""
        tag = tag_of(worker, incarnation)
        self._introduced[worker] = set()
        self._incarnations[worker] = incarnation
        if address:
            self.addresses[tag] = address
        if not self._has_begun:
            return []
        again: list[Effect] = [Send(worker, message) for name, message in self._saving.values() if name == worker]
        return [*self._announcement(), *self.handle(WorkerJoined(worker, incarnation)), *again]

    def begin(self, away: Iterable[str] = ()) -> list[Effect]:
        """Begin the run with the workers that are up; those that are `away` may join later."""
        self._has_begun = True
        effects = self._announcement()
        for worker in away:
            effects += self.lost(WorkerLost(worker, how="has not joined"))
        return effects

    def died(self, loss: WorkerLost) -> list[Effect]:
        """Begin the recovery of what a dead worker had sent; if no other can replace it, tell the scheduler at once.

        Args:
            loss: what to tell the scheduler, without missing rows and unreported results.
        """
        worker = loss.worker
        tag = tag_of(worker, self._incarnations[worker])
        self._introduced.pop(worker, None)
        self.addresses.pop(tag, None)
        self._dead.add(tag)
        if self.scheduler.is_vital(worker):
            return self.lost(msgspec.structs.replace(loss, returns=False))
        self._losses[worker] = loss
        sent = self.scheduler.sent_by(worker)
        missing = self._collected.drop_sent_by(tag, {c: rows for c, rows in sent.get(CONTROLLER, {}).items() if c in self._wanted})
        asked = self._recovery.begin(worker, tag, sent, list(self._introduced))
        for call, rows in missing.items():
            self._recovery.not_sent(worker, CONTROLLER, call, rows)
        return [*[Send(other, message) for other, message in asked.items()], *self._announcement()]

    @property
    def is_recovering(self) -> bool:
        """Whether the in-flight rows of some dead worker are still in doubt."""
        return self._recovery.is_open

    def settle_losses(self) -> list[Effect]:
        """Tell the scheduler of the dead workers whose in-flight rows are settled by now."""
        effects: list[Effect] = []
        for worker, missing in self._recovery.done():
            effects += self.lost(msgspec.structs.replace(self._losses.pop(worker), missing=missing))
        return effects

    def lost(self, loss: WorkerLost) -> list[Effect]:
        """Tell the scheduler of a lost worker, after settling its samples."""
        unreported = self._records.settle(loss.worker)
        return [LossSettled(loss.worker, unreported), *self.handle(msgspec.structs.replace(loss, unreported=unreported))]

    def _announcement(self) -> list[Effect]:
        if not self.addresses:
            return []
        peers = m.Peers(dict(self.addresses))
        return [Announced(peers.addresses), *[Send(worker, peers) for worker in self._introduced]]

    # The scheduler's commands

    def handle(self, *events: Event) -> list[Effect]:
        """Have the scheduler handle events that arrived together, and return the effects of its commands."""
        effects: list[Effect] = []
        for command in self.scheduler.handle(*events):
            if type(command) is Send:
                self._send(command, effects)
            else:
                self._carry_out(command, effects)
        return effects

    def _send(self, command: Send, effects: list[Effect]) -> None:
        worker, message = command.worker, command.message
        if worker in _OWN_PLACES:
            self._send_own(worker, message, effects)
            return
        kind = type(message)
        if kind is m.Generate:
            message = self._with_waited(message)  # type: ignore[arg-type]
            self._records.dispatched(worker, message)
            self._timeouts.began(message, self.calls[message.call], self.now_s)
        elif kind is m.Accumulate:
            self._consuming[message.number] = message  # type: ignore[union-attr, assignment]
        if self._recovery.is_open:
            self._recovery.note_sent(worker, message)
        known = self._introduced.get(worker)
        if known is None:
            return  # It is dead.
        if self._bodies and isinstance(message, m.Task):
            for call in m.calls_of(message):
                if call not in known:
                    known.add(call)
                    effects.append(Send(worker, m.Define(call, self._bodies[call])))
        effects.append(command if message is command.message else Send(worker, message))

    def _send_own(self, place: str, message: m.ToWorker, effects: list[Effect]) -> None:
        """Send rows that the controller has or reads back, or forget them."""
        if isinstance(message, m.Push):
            rows = self._rows.get(message.call, message.ids) if place == CONTROLLER else self._records.read_back(message)
            if message.to == CONTROLLER:
                effects += self.rows_arrived(message.call, rows, CONTROLLER)
            else:
                effects.append(SendRows(message.to, message.call, message.ids, rows, place))
        elif place == CONTROLLER and isinstance(message, m.Forget):
            self._rows.forget(message.call)

    def _with_waited(self, task: m.Generate) -> m.Generate:
        """Fill in how long the samples of a task have waited since their call."""
        waited_us = int((self.now_s - self._made_s.get(task.call, self.now_s)) * 1e6)
        return msgspec.structs.replace(task, waited_us=waited_us) if waited_us > 0 else task

    def _carry_out(self, command: Command, effects: list[Effect]) -> None:
        match command:
            case Resolve(ordinal, value, chosen):
                call = self.calls[ordinal]
                self._records.call_done(call, value, chosen)
                effects.append(Resolved(call, value))
            case Reject(ordinal, error, root):
                # Cancelled tasks of this call still answer TaskDone, although nothing was trained on their rows.
                self._consuming = {number: task for number, task in self._consuming.items() if task.call != ordinal}
                rejected = Rejected(self.calls[ordinal], error, root)
                if not rejected.stays_open:
                    self._records.call_failed(rejected.call, error)
                effects.append(rejected)
            case Discarded() | Dropped() | Late() | TakenOver() | Expired() | Moved():
                self._records.decided(command)
                effects.append(command)
            case CheckpointBegun() | CheckpointSaved():
                effects.append(command)
            case Forgotten(ordinal):
                self._records.forgotten(ordinal)
                effects.append(CallForgotten(self.calls.pop(ordinal)))
                self._made_s.pop(ordinal, None)
                self._wanted.discard(ordinal)
                self._collected.forget(ordinal)
                self._delivered.discard(ordinal)
                if self._bodies.pop(ordinal, None) is not None:
                    for known in self._introduced.values():
                        known.discard(ordinal)

    # Saving

    def _save(self, path: Path) -> list[Effect]:
        """Have each trainer write its role's model; of a role that is only sampled from, ask for the digest of its weights."""
        effects: list[Effect] = []
        for worker in self._plan.workers:
            for slot in worker.engines:
                is_first = slot.role not in [save.role for _, save in self._saving.values()]
                if slot.kind == "train" or (slot.kind == "rollout" and is_first and not self._is_trained(slot.role)):
                    number = -1 - len(self._saving)
                    message = m.Save(number, -1, slot.role, str((path / slot.role).resolve()))
                    self._saving[number] = worker.name, message
                    effects.append(Send(worker.name, message))
        return effects if self._saving else [AllSaved({})]

    def _is_trained(self, role: str) -> bool:
        return any(slot.kind == "train" and slot.role == role for worker in self._plan.workers for slot in worker.engines)
