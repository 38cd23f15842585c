"""Test the scheduler against model workers that follow the protocol and check everything that it says and counts.

    model = Model(roles, spec, staleness=1, seed=7)
    samples = policy.generate(...)
    model.submit(); model.turn(3); model.deliver(3); model.drain()

    ControllerCore --messages--> FakeWorker.inbox; FakeWorker.turn(random) --> messages; parcels to other workers

A `FakeWorker` reads messages as the real worker does (`m2flow.micro.worker.task_queue`), and models what they lead to. It refuses
(AssertionError) what a worker could not do: rows that it does not have, a call that it was told to forget, weights of an unknown version,
an engine whose device the other kind has. What is under way on it, the model counts by what it was told and what it answered, not by that
queue: a task that is lost, started out of turn, or answered twice, is found.

Until `close`, a model is the running flow: calls are real ones, recorded by a session. What a worker says is delivered in its order, at
moments that the caller chooses, and sometimes twice. An AssertionError says which rule was broken: a sample in two places, weights outside
of a call's window, a device with two owners, rows trained on twice, counts that differ from a recount, calls that nobody works on. Workers
die, are detected as lost and restart; trainers do not, since only a checkpoint could restore them.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from m2flow.channels.weights import Manifest
from m2flow.errors import RewardError, StateLost
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph, Observation
from m2flow.macro.handles import Handle
from m2flow.macro.oversampling import is_cut, keeps_cache
from m2flow.macro.session import Backend, Session, recording
from m2flow.macro.tracing import trace
from m2flow.micro.controller.controller_core import (
    CallForgotten,
    ControllerCore,
    Delivered,
    Effect,
    LossSettled,
    Records,
    Rejected,
    Resolved,
    SendRows,
    Submitted,
)
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import CONTROLLER, LEDGER, Dropped, Event, Late, Released, Send, TakenOver, Wanted, WorkerLost
from m2flow.micro.protocol.plan import Stage, WorkerPlan
from m2flow.micro.protocol.staleness import VersionSpan, is_time_dependent, window
from m2flow.micro.protocol.worker_state import TaskState, stopped_at, tag_of, worker_of
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.ready_queues import MAX_QUEUED
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.scheduler.state import SchedulerState
from m2flow.micro.worker.task_queue import Answer, TaskQueue
from m2flow.samples import Batch, by_group, group_key
from m2flow.spec import ClusterSpec
from m2flow.testing.world import TOOK_US, RandomTimeouts

# ---- a worker

Row = tuple[int, int]
"""Call and sample."""
Said = m.Finished | m.Aborted | m.Preempted | m.TaskDone | m.TaskFailed | m.Missing


@dataclass(eq=False)
class _Sample:
    """A sample that a worker generates."""

    task: m.Generate
    version_spans: list[VersionSpan]

    @property
    def num_generated(self) -> int:
        return sum(version_span.num_tokens for version_span in self.version_spans)


@dataclass(frozen=True)
class Parcel:
    """Rows in flight to another worker."""

    to: str
    """The receiving process."""
    sender: str
    """The sending process."""
    rows: tuple[Row, ...]
    version_spans: Mapping[int, tuple[VersionSpan, ...]] = field(default_factory=dict)
    """Version spans of samples that were stopped."""


@final
class HeldRows:
    """The rows that a worker or the controller has, and their senders (`m2flow.micro.protocol.worker_state`)."""

    def __init__(self) -> None:
        self._senders: dict[Row, str] = {}
        self._forgotten: set[int] = set()
        self._dead: set[str] = set()

    def put(self, rows: Iterable[Row], sender: str) -> None:
        if sender not in self._dead:
            self._senders.update({row: sender for row in rows if row[0] not in self._forgotten})

    def has(self, call: int, rows: Iterable[int]) -> bool:
        return all((call, row) in self._senders for row in rows)

    def forget(self, *calls: int) -> None:
        self._forgotten.update(calls)
        self._senders = {row: sender for row, sender in self._senders.items() if row[0] not in calls}

    def drop_sender(self, sender: str, but: Mapping[int, Iterable[int]]) -> dict[int, list[int]]:
        """Drop the rows that a dead process has sent, except `but`; returns those of `but` that are not here."""
        self._dead.add(sender)
        kept = {(call, row) for call, rows in but.items() for row in rows}
        self._senders = {row: known for row, known in self._senders.items() if known != sender or row in kept}
        missing = {call: [row for row in rows if (call, row) not in self._senders] for call, rows in but.items()}
        return {call: rows for call, rows in missing.items() if rows}

    def rows(self) -> Iterable[Row]:
        return self._senders.keys()


@final
class FakeWorker:
    """A model of one worker without engines: the `Executor` of its task queue."""

    def __init__(self, plan: WorkerPlan, calls: Mapping[int, Call], incarnation: int = 0) -> None:
        self.name = plan.name
        self.plan = plan
        self.incarnation = incarnation
        """Number of its earlier processes."""
        self.tag = tag_of(plan.name, incarnation)
        self.is_dead = False
        self._calls = calls
        self._has_lease = bool(plan.lease)
        self.owner = "rollout"
        """The kind of engine that has the device, if several take turns."""
        self.held = {slot.role: 0 for slot in plan.engines if slot.kind == "rollout"}
        self.trained: dict[str, int | None] = {slot.role: 0 for slot in plan.engines if slot.kind == "train"}
        """Role -> the version of its weights; None in the middle of an update."""
        self.same: set[tuple[str, int]] = set()
        """(role, version) whose weights equal those of the version before, since there was nothing to train on."""
        self.published: dict[str, int] = {}
        self.inbox: deque[m.ToWorker] = deque()
        """Messages that it has not read."""
        self.coming: deque[Parcel] = deque()
        self.said: deque[Said] = deque()
        """Messages that the controller has not read."""
        self.parcels: list[Parcel] = []
        """Parcels that it has sent and that are not in flight yet."""
        self.fails: set[int] = set()
        """Tasks that will fail."""
        self.accumulated: list[tuple[int, int, int]] = []
        """(update, epoch, sample)."""
        self._rows_here = HeldRows()
        self._stopped: dict[int, tuple[VersionSpan, ...]] = {}
        self._tasks = TaskQueue(self)
        self._unanswered: dict[int, m.Task] = {}
        """Tasks that it has read and not answered, in the order in which they came."""
        self._inflight: dict[int, _Sample] = {}
        self._begun: set[int] = set()
        """Generate tasks that it has begun."""
        self._open_epoch: dict[int, tuple[int, int]] = {}

    @property
    def has_something(self) -> bool:
        """Test whether a turn could change anything."""
        if self.is_dead:
            return False
        return bool(self.inbox or self.coming or self._inflight or self._next_is_ready())

    def has_trained(self, role: str, version: int) -> bool:
        """Test whether the trainer's weights are of this version now."""
        trained = self.trained[role]
        return trained is not None and version <= trained and all((role, later) in self.same for later in range(version + 1, trained + 1))

    def waiting_tasks(self) -> list[int]:
        """Return the numbers of the tasks that it has not begun."""
        return [task.number for task in self.under_way() if task.number not in self._begun and task.call >= 0]

    def under_way(self) -> list[m.Task]:
        """Return the tasks that it was given and has not ended."""
        return [*self._unanswered.values(), *(message for message in self.inbox if isinstance(message, m.Task))]

    def generating(self) -> dict[int, int]:
        """Map samples that run or wait here to their tasks, including those of unread messages."""
        found = {packed: sample.task.number for packed, sample in self._inflight.items()}
        for task in self.under_way():
            if isinstance(task, m.Generate) and task.number not in self._begun:
                found |= dict.fromkeys(task.ids, task.number)
        return found

    def held_rows(self) -> Iterable[Row]:
        """Return the rows that are here."""
        return self._rows_here.rows()

    def turn(self, rng: random.Random) -> None:
        """Read messages and parcels, decode for a while, and do one task."""
        while self.coming:
            parcel = self.coming.popleft()
            self._rows_here.put(parcel.rows, parcel.sender)
            self._stopped.update(parcel.version_spans)
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, m.Task):
                self._unanswered[message.number] = message
            self._tasks.hear((message,))
            self._tasks.read()
        self._decode(rng)
        if self._next_is_ready():
            task = self._tasks.pop()
            self._check_start(task)
            self._do(task, rng)

    # ---- what the task queue has it do

    def call(self, ordinal: int) -> Call:
        return self._calls[ordinal]

    def say(self, message: Answer | m.Finished | m.TaskFailed) -> None:
        ends = not isinstance(message, m.Finished) or message.ends
        if isinstance(message, m.TaskDone | m.TaskFailed | m.Finished) and ends:
            task = self._unanswered.pop(message.task, None)
            assert task is not None, f"{self.name} ends task {message.task} twice"
            assert all(s.task is not task for s in self._inflight.values()), f"{self.name} ends task {message.task} under its samples"
            self._begun.discard(message.task)
        self.said.append(message)

    def define(self, message: m.Define) -> None:
        """Do nothing: the model knows all calls."""

    def forget(self, call: int) -> None:
        self._rows_here.forget(call, stopped_at(call))

    def connect(self, peers: m.Peers) -> None:
        """Do nothing: the model delivers parcels by name."""

    def disconnect(self, lost: m.PeerLost) -> Mapping[int, list[int]]:
        return self._rows_here.drop_sender(lost.peer, lost.rows)

    def push(self, call: int, ids: list[int], to: Sequence[str]) -> None:
        self._has(call, ids)
        stopped = {packed: self._stopped[packed] for packed in ids} if call < 0 else {}
        self.parcels += [Parcel(peer, self.tag, tuple((call, row) for row in ids), stopped) for peer in to if peer != self.tag and ids]

    def reassign(self, call: int, drawn: int, ids: list[int]) -> None:
        self._has(drawn, ids)
        self._rows_here.put([(call, row) for row in ids], self.tag)

    def is_running(self, packed: int, call: int, *, queued: bool = False) -> bool:
        return packed in self._inflight and self._inflight[packed].task.call == call

    def preempt(self, call: int, ids: list[int]) -> m.Aborted | None:
        kept = self._keep(call, [packed for packed in ids if self._inflight[packed].num_generated])
        for packed in ids:
            self._inflight.pop(packed, None)
        return kept

    def stop(self, call: int) -> m.Aborted | None:
        return self._keep(call, [packed for packed, s in self._inflight.items() if s.task.call == call and s.num_generated])

    def _keep(self, call: int, ids: Sequence[int]) -> m.Aborted | None:
        """Stop samples, of which others may go on from the tokens that they have."""
        if not ids:
            return None
        stopped = [self._inflight.pop(packed) for packed in ids]
        version_spans = [tuple(sample.version_spans) for sample in stopped]
        self._stopped.update(zip(ids, version_spans, strict=True))
        self._rows_here.put([(stopped_at(call), packed) for packed in ids], self.tag)
        numbers = [sample.num_generated for sample in stopped]
        return m.Aborted(call, list(ids), [9 + n for n in numbers], numbers, version_spans, ("x", 0, 0, 0))

    def give_up(self, call: int) -> None:
        self._inflight = {packed: s for packed, s in self._inflight.items() if s.task.call != call}

    def end(self) -> None:
        raise AssertionError(f"{self.name} is told to exit")

    # ---- checks

    def _has(self, call: int, rows: Iterable[int]) -> None:
        assert self._rows_here.has(call, rows), f"{self.name} lacks some of the rows {list(rows)} of call {call}"

    def _next_is_ready(self) -> bool:
        return self._tasks.first is not None and all(self._rows_here.has(call, ids) for call, ids, _ in self._tasks.rows_needed())

    def _check_start(self, task: m.Task) -> None:
        """Check that a task starts in its turn, with its rows here."""
        first = next((number for number in self._unanswered if number not in self._begun), None)
        assert task.number == first, f"{self.name} starts task {task.number} before task {first}"
        if isinstance(task, m.Generate | m.EmbedPrompts):
            if isinstance(task, m.Generate) and task.aborted_by >= 0:
                self._has(stopped_at(task.aborted_by), task.ids)
            else:
                ref = self._calls[task.drawn_by if isinstance(task, m.Generate) else task.call].input("prompts")
                assert ref is not None
                self._has(ref.call, task.prompts)
        elif isinstance(task, m.RunFunction | m.Accumulate):
            call = self._calls[task.call]
            values = task.values if isinstance(task, m.RunFunction) else {}
            if call.options.get("gives") != "concat":
                for name, ref in call.inputs:
                    self._has(ref.call, () if name in values else task.ids)
            elif isinstance(task, m.RunFunction):
                for source, rows in task.parts.items():
                    self._has(source, rows)

    # ---- working

    def _decode(self, rng: random.Random) -> None:
        """Decode some tokens of each sample; some samples finish."""
        done: list[int] = []
        for packed, sample in self._inflight.items():
            version = self.held[self._calls[sample.task.call].role]
            last = sample.version_spans[-1] if sample.version_spans else VersionSpan(0, version)
            count = rng.randrange(3)
            if last.version == version:
                sample.version_spans[-1:] = [last._replace(num_tokens=last.num_tokens + count)] if last.num_tokens + count else []
            elif count:
                sample.version_spans.append(VersionSpan(count, version, is_stale=True))
            if sample.num_generated and rng.random() < 0.3:
                done.append(packed)
        for task, positions, ends in self._tasks.finished(done):
            rows = [done[position] for position in positions]
            samples = [self._inflight.pop(packed) for packed in rows]
            assert all(sample.task is task for sample in samples), "samples are reported for another task"
            version_spans = [tuple(sample.version_spans) for sample in samples] if is_time_dependent(self._calls[task.call]) else []
            self._deliver(task.call, rows, task.forward_to)
            numbers = [sample.num_generated for sample in samples]
            self._finished(task.number, task.call, rows, [9 + n for n in numbers], version_spans=version_spans, ends=ends)

    def _do(self, task: m.Task, rng: random.Random) -> None:
        if task.number in self.fails:
            self.fails.discard(task.number)
            rows: Sequence[int] = getattr(task, "ids", [])
            row = rng.choice(rows) if rows else -1
            self.say(m.TaskFailed(task.number, task.call, RewardError(f"call {task.call} failed").to_record(), row))
            return
        manifest: Manifest | None = None
        match task:
            case m.Generate():
                self._generate(task)
                return
            case m.RunFunction(ids=ids, forward_to=forward_to):
                call = self._calls[task.call]
                self._owns("train" if call.engine == "train" else "", call.role)
                if call.is_aligned:
                    dropped = self._left_out(call, ids, rng)
                    kept = [row for row in ids if row not in dropped]
                    self._deliver(task.call, kept, forward_to)
                    self._finished(task.number, task.call, kept, [9] * len(kept), dropped=sorted(dropped), ends=True)
                    return
            case m.Accumulate(ids=ids, epoch=epoch, minibatch=minibatch):
                self._owns("train", self._calls[task.call].role)
                before = self._open_epoch.get(task.call, (0, 0))
                assert (epoch, minibatch) >= before, "an earlier mini-batch after a later one"
                self._open_epoch[task.call] = (epoch, minibatch)
                self.accumulated += [(task.call, epoch, row) for row in ids]
            case m.Apply(is_last=is_last, version=version):
                self._owns("train", self._calls[task.call].role)
                self.trained[self._calls[task.call].role] = version if is_last else None
            case m.CopyWeights():
                self._owns("train", self._calls[task.call].role)
                assert self.trained[str(self._calls[task.call].options["source"])] is not None, "half-trained weights are copied"
                self.trained[self._calls[task.call].role] = self._calls[task.call].writes[0].version
            case m.PublishWeights(role=role, version=version):
                self._owns("train", role)
                assert self.has_trained(role, version), f"version {version} is published, and {self.trained[role]} is there"
                self.published[role] = version
                manifest = Manifest(f"{role}-{version}", 1, ())
            case m.LoadWeights():
                self._load(task)
            case m.EmbedPrompts():
                self._owns("rollout", self._calls[task.call].role)
            case m.ShrinkKVCache():
                assert self.owner == "rollout", "room is made on devices that others have"
            case m.Switch(to=to):
                assert not self._inflight, "a device changes hands under running samples"
                self.owner = to
            case _:
                raise AssertionError(f"{self.name} was given {task}")
        self.say(m.TaskDone(task.number, 1.0, manifest, [[rng.random()] for _ in getattr(task, "prompts", ())]))

    def _load(self, task: m.LoadWeights) -> None:
        self._owns("rollout", task.role)
        if task.manifest is None:
            assert self.has_trained(task.role, task.version), "half-trained weights are loaded"
        else:
            assert task.manifest.segment == f"{task.role}-{task.version}"
        for call in {s.task.call: self._calls[s.task.call] for s in self._inflight.values()}.values():
            if call.role == task.role:
                oldest, newest = window(call)
                assert task.under_requests, "weights change under running samples"
                assert keeps_cache(call.options), "weights change under samples that may not keep their cache"
                assert oldest <= task.version <= newest, "weights change to some that what runs may not use"
        self.held[task.role] = task.version

    def _generate(self, task: m.Generate) -> None:
        call = self._calls[task.call]
        self._owns("rollout", call.role)
        oldest, newest = window(call)
        held = self.held[call.role]
        assert oldest <= held <= newest, f"call {task.call} may use versions {oldest} to {newest}, and {self.name} holds {held}"
        for packed in task.ids:
            assert packed not in self._inflight, "a sample is generated twice at once"
            before = list(self._stopped[packed]) if task.aborted_by >= 0 else []
            assert all(oldest <= version_span.version <= newest for version_span in before), "a sample goes on from tokens that are too old"
            self._inflight[packed] = _Sample(task, before)
        self._begun.add(task.number)
        self._tasks.began(task)

    def _owns(self, kind: str, role: str) -> None:
        if kind and self._has_lease:
            turn = next(slot.takes_turn for slot in self.plan.engines if (slot.kind, slot.role) == (kind, role))
            assert self.owner == turn, f"{kind} work for {role} on {self.name}, while {self.owner} has the device"

    def _left_out(self, call: Call, ids: Sequence[int], rng: random.Random) -> set[int]:
        if not call.drops:
            return set()
        if call.is_gated:
            groups = {group_key(row) for row in ids}
            gone = {group for group in groups if rng.random() < 0.3}
            return {row for row in ids if group_key(row) in gone}
        return {row for row in ids if rng.random() < 0.2}

    def _deliver(self, call: int, rows: Sequence[int], forward_to: Iterable[str]) -> None:
        made = tuple((call, row) for row in rows)
        self._rows_here.put(made, self.tag)
        for peer in forward_to:
            if peer != self.tag and rows:
                self.parcels.append(Parcel(peer, self.tag, made))

    def _finished(
        self,
        number: int,
        call: int,
        rows: Sequence[int],
        num_tokens: Sequence[int],
        *,
        version_spans: Sequence[tuple[VersionSpan, ...]] = (),
        dropped: Sequence[int] = (),
        ends: bool,
    ) -> None:
        finish, generated, took_us = [0] * len(rows), [tokens - 9 for tokens in num_tokens], TOOK_US[number % len(TOOK_US)]
        ends_with = [*dropped], [*version_spans], ends
        self.say(m.Finished(number, call, [*rows], [*num_tokens], generated, [], finish, [], None, *ends_with, took_us=took_us))


# ---- recounting the scheduler's state


def recount(scheduler: Scheduler, fakes: Mapping[str, FakeWorker], at_controller: Iterable[Row]) -> None:
    """Recount the scheduler's state and compare it with its counts.

    Raises:
        AssertionError: a count is not what it should be; it says which.
    """
    scheduler_state = scheduler._state
    tasks = scheduler_state.tasks._tasks
    _recount_tasks(scheduler_state, tasks)
    for state in scheduler_state.calls.values():
        _recount_call(scheduler_state, state, tasks)
    _recount_weights(scheduler, fakes)
    assert not scheduler_state.ready_workers.has_any, "somebody is awake after an event"
    active = [ordinal for ordinal, state in scheduler_state.calls.items() if not state.is_over]
    assert list(scheduler_state.active) == active, "active calls"
    idle = {
        w.name for w in scheduler_state.workers.values() if w.roles["function"] and w.num_tasks["function"] < MAX_QUEUED and not w.is_lost
    }
    for state in scheduler_state.active.values():
        if state.call.engine == "function" and state.has_function_work:
            assert not idle.intersection(state.stage.workers), f"{state.call.name} has work, and {idle} are free for it"
    if not any(fake.has_something or fake.said or fake.is_dead for fake in fakes.values()):
        _recount_rows(scheduler_state, fakes, set(at_controller))


def _recount_tasks(scheduler_state: SchedulerState, tasks: Mapping[int, TaskState]) -> None:
    of: Counter[tuple[str, str]] = Counter((task.worker, task.engine) for task in tasks.values())
    running = Counter((task.worker, task.chunk) for task in tasks.values() for _ in range(task.rows_left))
    judging = Counter(task.worker for task in tasks.values() if task.engine == "function" for _ in task.rows)
    guests = Counter(name for task in tasks.values() for name in task.speakers)
    at = [scheduler_state.workers[name].lease for task in tasks.values() for name in (task.worker, *task.speakers)]
    of_lease = Counter(lease.name for lease in at if lease is not None)
    for worker in scheduler_state.workers.values():
        for engine, count in worker.num_tasks.items():
            assert count == of[worker.name, engine], f"{worker.name} has {of[worker.name, engine]} {engine} tasks, not {count}"
        held = Counter({chunk: count for (name, chunk), count in running.items() if name == worker.name})
        assert (worker.num_running, +Counter(worker.running_of)) == (held.total(), held), f"{worker.name} has {held}: {worker.running_of}"
        assert worker.num_guests == guests[worker.name], f"{worker.name} speaks in {guests[worker.name]} tasks, not {worker.num_guests}"
        assert worker.num_judging == judging[worker.name], f"{worker.name} judges {judging[worker.name]} rows, not {worker.num_judging}"
        assert sum(worker.doing.values()) == sum(worker.num_tasks.values()), f"what {worker.name} does"
    for lease in scheduler_state.leases.values():
        assert lease.num_tasks == of_lease[lease.name], f"the lease {lease.name} has {of_lease[lease.name]} tasks, not {lease.num_tasks}"


def _recount_call(scheduler_state: SchedulerState, state: CallState, tasks: Mapping[int, TaskState]) -> None:
    name = f"call {state.call.ordinal}, {state.call.name}"
    own = [task for task in tasks.values() if task.message.call == state.call.ordinal]
    assert state.tasks_at == Counter(task.worker for task in own), f"{name}: the workers that have tasks of it"
    users = {
        other.call.ordinal
        for other in scheduler_state.active.values()
        if any(ref.call == state.call.ordinal for _, ref in other.call.inputs) and not other.is_over
    }
    assert state.users.keys() == users, f"{name}: its users are {sorted(users)}, not {sorted(state.users)}"
    ready, ids = list(state.ready), set(state.ids)
    assert len(ready) == len(set(ready)), f"{name}: a row is ready twice"
    assert ids.issuperset(ready), f"{name}: rows are ready that are not its own"
    assert not state.done.intersection(ready), f"{name}: rows are ready that are done"
    assert state.is_over == (state.is_done or state.is_failed), f"{name}: over or not"
    if state.is_over:
        return
    with_tasks = [row for task in own if isinstance(task.message, m.Generate | m.RunFunction) for row in task.rows]
    assert not set(with_tasks).intersection(ready), f"{name}: rows are ready that a task has"
    assert len(with_tasks) == len(set(with_tasks)), f"{name}: a row is in two tasks"
    if state.is_generation:
        _recount_generation(state, own)


def _recount_generation(state: CallState, own: Iterable[TaskState]) -> None:
    name = f"call {state.call.ordinal}, {state.call.name}"
    out: Counter[str] = Counter()
    for task in own:
        out[task.worker] += task.rows_left
        left = [row for row in task.rows if row not in state.done]
        is_right = state.failure is not None or len(left) == task.rows_left
        assert is_right, f"{name}: {len(left)} rows are with {task.worker}, not {task.rows_left}"
    assert {w: n for w, n in state.out_at.items() if n} == {w: n for w, n in out.items() if n}, f"{name}: the samples that workers have"
    if is_cut(state.call.options) and state.is_prepared:
        groups = by_group(state.ids)
        left_of = {key: len(rows) - len(state.done.intersection(rows)) for key, rows in groups.items()}
        assert state._left_of_group == left_of, f"{name}: what each group lacks"
        assert state.num_whole == sum(not left for left in left_of.values()), f"{name}: whole groups"


def _recount_weights(scheduler: Scheduler, fakes: Mapping[str, FakeWorker]) -> None:
    scheduler_state = scheduler._state
    for role, counted in scheduler_state.engine_weights._num_holding.items():
        held = Counter(worker.held.get(role, 0) for worker in scheduler_state.ready_workers.hosts("rollout", role))
        assert +counted == held, f"the weights of {role}: {dict(held)}, not {dict(counted)}"
    for worker in scheduler_state.workers.values():
        fake = fakes[worker.name]
        undelivered = [said for said in fake.said if isinstance(said, m.TaskDone)]
        for role, version in fake.held.items() if not worker.is_lost and not fake.is_dead and not undelivered else ():
            assert worker.held.get(role, 0) == version, f"{worker.name} holds version {version} of {role}, not {worker.held.get(role, 0)}"


def _recount_rows(scheduler_state: SchedulerState, fakes: Mapping[str, FakeWorker], at_controller: set[Row]) -> None:
    """When nothing is in flight, check that rows are where the scheduler takes them to be, and nowhere else."""
    for name in (*fakes, CONTROLLER):
        here = at_controller if name == CONTROLLER else set(fakes[name].held_rows())
        thought = {(call, row) for call, places in scheduler_state.rows._places.items() for row in places.get(name, ())}
        missing = thought - here
        assert not missing, f"{name} has not the rows {sorted(missing)[:3]}, which it is taken to have"
        unknown = {(call, row) for call, row in here - thought if call in scheduler_state.calls and not scheduler_state.calls[call].is_over}
        assert not unknown, f"{name} has the rows {sorted(unknown)[:3]}, which nobody knows of"
        # Rows that arrive after their call ended are in no result; they are dropped when the place is told to forget the call.
        untold = {
            call for call, _ in here - thought if call in scheduler_state.calls and name not in scheduler_state.rows._places.get(call, ())
        }
        assert not untold, f"{name} has rows of the calls {sorted(untold)}, and will never be told to forget them"


# ---- the scheduler and its workers


class _Ledger(Records):
    """Has all rows that are asked of it; what they are, the model knows."""

    def read_back(self, push: m.Push) -> Batch:
        return Batch(np.array(push.ids, np.int64))


_RECOUNTED_EVERY = 25
"""Number of events between two recounts."""


class _Calls(Backend):
    """A backend that keeps the calls that the session records."""

    is_rehearsal = True

    def __init__(self, wait: Callable[[int], None]) -> None:
        self.made: list[Call] = []
        self.released: list[int] = []
        self.calls: dict[int, Call] = {}
        self.wait = wait

    def submit(self, call: Call) -> None:
        self.made.append(call)
        self.calls[call.ordinal] = call

    def release(self, ordinal: int) -> None:
        self.released.append(ordinal)

    def value(self, ordinal: int) -> object:
        """Return the dataset cursor after a refill, for which Python waits: the value that it has while a flow is traced."""
        call = self.calls[ordinal]
        if call.engine == "source":
            return call.options["rows"]
        self.wait(ordinal)
        return call.options["expected"]

    def observed(self, observation: Observation) -> None:
        pass

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        pass

    def end_step(self, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


@final
class Model:
    """The controller's core with its scheduler and model workers, driven step by step."""

    def __init__(self, roles: Flow, spec: ClusterSpec, *, staleness: int = 0, seed: int = 0, deterministic: bool = False) -> None:
        graph, models, _ = trace(roles, {}, steps=1)
        plan = lower(graph, models, spec, deterministic=deterministic)
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(plan, deterministic=deterministic, max_attempts=1 << 30)
        self.core = ControllerCore(plan, self.scheduler, _Ledger(), RandomTimeouts(random.Random(seed)))
        self.calls: dict[int, Call] = {}
        self.stages: dict[int, Stage] = {}
        self.fakes = {worker.name: FakeWorker(worker, self.calls) for worker in plan.workers}
        self.resolved: set[int] = set()
        self.rejected: dict[int, int] = {}
        """Failed call -> the call whose failure caused it."""
        self.forgotten: set[int] = set()
        self.released: set[int] = set()
        self.num_events = 0
        self._roles = roles.name
        self._leases = {worker.name: worker.lease for worker in plan.workers if worker.lease}
        self._come_ahead = {worker.name for worker in plan.workers for slot in worker.engines if slot.onload_at}
        self._lowering = Lowering(plan, spec)
        self._backend = _Calls(self._wait)
        self._open = contextlib.ExitStack()
        self._session = Session(self._backend, flow=roles.name, staleness=staleness)
        self._open.enter_context(recording(self._session))
        self._steps = self._session.iterate(1 << 30)
        self._rows_here: dict[int, set[int]] = {}
        """Rows of datasets and of looks that the controller has."""
        self._dying: list[str] = []
        """Dead, and not detected yet."""
        self._away: list[str] = []
        """Known to be lost, and not restarted yet."""
        self.is_ended = False
        """Whether state was lost that can't be made again; a real run would resume from a checkpoint."""
        self._said: deque[tuple[str, Said]] = deque(maxlen=200)
        self._stopped: dict[int, tuple[VersionSpan, ...]] = {}
        """Version spans of stopped samples, as the ledger has them."""
        self._introduced: dict[str, set[int]] = {}
        """Process -> calls that were defined there."""
        for name in self.fakes:
            self.core.came_up(name)
        self._carry_out(self.core.begin())
        self._left_out: set[int] = set()
        """Samples that are in no result."""

    def close(self) -> None:
        """End the session."""
        self._steps.close()  # type: ignore[attr-defined]
        self._open.close()

    # ---- what the program does

    def next_step(self) -> None:
        """Begin the program's loop, or its next step."""
        self.submit()
        next(self._steps)

    def submit(self) -> None:
        """Lower the calls made since the last time as one segment and submit it; then release what the program dropped."""
        calls, self._backend.made[:] = list(self._backend.made), []
        for call, stage in zip(calls, self._lowering.stages(MacroGraph(self._roles, tuple(calls))) if calls else (), strict=True):
            self.calls[call.ordinal], self.stages[call.ordinal] = call, stage
            rows = call.options.get("rows")
            if isinstance(rows, Batch):
                self._rows_here[call.ordinal] = set(rows.ids.tolist())
            self._input(self.core.post, Submitted(call, stage, b"the call"))
        released, self._backend.released[:] = list(self._backend.released), []
        self.released.update(released)
        for ordinal in released:
            self._input(self.core.post, Released(ordinal))
        if calls or released:
            self._input(self.core.flush)

    def look(self, handle: Handle) -> bool:
        """Let the program wait for a call's rows; returns False if they are not done."""
        ordinal = handle.ref.call
        is_there = ordinal in self.resolved and self.calls[ordinal].is_aligned
        if is_there:
            self._input(self.core.post, Wanted(ordinal))
        return is_there

    # ---- what workers and links do

    def turn(self, pick: int) -> None:
        """Let a worker that has something to do take a turn."""
        able = [fake for fake in self.fakes.values() if fake.has_something]
        if able:
            fake = able[pick % len(able)]
            fake.turn(self.rng)
            self._send_parcels(fake)

    def deliver(self, pick: int) -> None:
        """Deliver the oldest message of a worker to the controller."""
        speaking = [fake for fake in self.fakes.values() if fake.said]
        if speaking:
            fake = speaking[pick % len(speaking)]
            said = fake.said.popleft()
            if isinstance(said, m.Aborted):
                self._stopped.update(zip(said.ids, said.version_spans, strict=True))
            if not isinstance(said, m.Missing):
                self._said.append((fake.name, said))
            self._input(self.core.heard, fake.name, said)
            self._input(self.core.settle_losses)

    def kill(self, pick: int) -> None:
        """Kill a worker that others can replace; some of its messages and parcels are lost."""
        able = [fake for fake in self.fakes.values() if not fake.is_dead and not self.scheduler.is_vital(fake.name)]
        if not able or self.is_ended:
            return
        fake = able[pick % len(able)]
        fake.is_dead = True
        self._dying.append(fake.name)
        while fake.said and self.rng.random() < 0.5:
            fake.said.pop()
        for other in self.fakes.values():
            sent = [parcel for parcel in other.coming if parcel.sender == fake.tag]
            for parcel in sent[self.rng.randint(0, len(sent)) :]:
                other.coming.remove(parcel)

    def detect_loss(self) -> None:
        """Let the controller detect the loss of a dead worker."""
        if self._dying and not self.is_ended:
            name = self._dying.pop(0)
            self.fakes[name].said.clear()
            # Messages of a dead process are not delivered any more, nor again.
            said = [(worker, message) for worker, message in self._said if worker != name]
            self._said.clear()
            self._said.extend(said)
            self._input(self.core.died, WorkerLost(name, returns=True))
            self._input(self.core.settle_losses)

    def restart(self) -> None:
        """Restart a lost worker as a new process."""
        if self._away and not self.is_ended:
            fake = self.fakes[self._away.pop(0)]
            incarnation = fake.incarnation + self.rng.choice([1, 1, 2])  # A process that died while starting was never known.
            self.fakes[fake.name] = FakeWorker(fake.plan, self.calls, incarnation)
            self._input(self.core.came_up, fake.name, incarnation)

    def deliver_again(self, pick: int) -> None:
        """Deliver a message to the controller that was delivered before."""
        if self._said:
            self._input(self.core.heard, *self._said[pick % len(self._said)])

    def fail(self, pick: int) -> None:
        """Let a task of some worker fail."""
        tasks = [(fake, number) for fake in self.fakes.values() for number in fake.waiting_tasks()]
        if tasks:
            fake, number = tasks[pick % len(tasks)]
            fake.fails.add(number)

    def run(self, num_moves: int) -> None:
        """Take turns and deliver messages in an order that the seed decides."""
        for _ in range(num_moves):
            if self.is_ended:
                return
            self._input(self.core.tick)
            which = self.rng.random()
            if which < 0.05:
                self.deliver_again(self.rng.randrange(1 << 16))
            elif which < 0.1:
                self.restart() if which < 0.07 else self.detect_loss()
            elif which < 0.5:
                self.turn(self.rng.randrange(1 << 16))
            else:
                self.deliver(self.rng.randrange(1 << 16))

    def _wait(self, ordinal: int) -> None:
        self.submit()
        while ordinal not in self.resolved and ordinal not in self.rejected and not self.is_ended:
            assert self._is_moving, f"Python waits for call {ordinal}, and nothing moves any more: " + "; ".join(self.scheduler.waiting())
            self.run(1)

    @property
    def _is_moving(self) -> bool:
        return any(fake.has_something or fake.said for fake in self.fakes.values()) or bool(self._dying or self._away)

    def drain(self) -> None:
        """Run until nothing moves any more, and check that nothing is left to do."""
        self.submit()
        while self._is_moving and not self.is_ended:
            self.run(8)
        if self.is_ended:
            return
        assert self.scheduler.is_idle, "nothing moves any more: " + "; ".join(self.scheduler.waiting())
        left = self.calls.keys() - self.resolved - self.rejected.keys()
        assert not left, f"the calls {sorted(left)} are neither done nor failed, and the scheduler has nothing to do"
        unanswered = {name: fake.under_way() for name, fake in self.fakes.items() if fake.under_way()}
        assert not unanswered, f"nobody waits for {unanswered} any more, which are not answered"
        self._check_training()
        recount(self.scheduler, self.fakes, self._at_controller())

    def end(self) -> None:
        """End the program, which then holds no results, and check that nothing is kept."""
        self.drain()
        if self.is_ended:
            return
        kept = (
            (self.released & self.resolved) - self.forgotten - self.scheduler._calls._partial_rollouts.needed()
        )  # A later call might take these over.
        assert not kept or self.rejected, f"the calls {sorted(kept)} can't be asked for, and are kept"  # A failure may reach these.
        for fake in self.fakes.values():
            rows = {call for call, _ in fake.held_rows()} - self.calls.keys() | {c for c, _ in fake.held_rows() if c in self.forgotten}
            assert not {call for call in rows if call >= 0}, f"{fake.name} keeps rows of {rows}, which nobody can ask for"

    # ---- what the scheduler says

    def tell(self, event: Event) -> None:
        """Have the scheduler handle an event."""
        self._input(self.core.handle, event)

    def _input(self, take: Callable[..., list[Effect]], *what: object) -> None:
        """Hand an input to the controller's core, or ask it for what is due; carry out what follows, and check the scheduler's state."""
        if self.is_ended:
            return
        try:
            effects = take(*what)
        except StateLost:
            self.is_ended = True
            return
        if what or effects:
            self._done(effects)

    def _done(self, effects: Iterable[Effect]) -> None:
        self._carry_out(effects)
        self.num_events += 1
        self._check_that_all_were_asked()
        if self.num_events % _RECOUNTED_EVERY == 0:
            recount(self.scheduler, self.fakes, self._at_controller())

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(worker, message):
                    self._told(worker, message)
                case SendRows(to, call, ids, _, source):
                    here = self._rows_here.get(call, set())
                    assert source == LEDGER or here.issuperset(ids), "the controller has not these rows"
                    stopped = {packed: self._stopped[packed] for packed in ids} if call < 0 else {}
                    self._send(Parcel(to, CONTROLLER, tuple((call, row) for row in ids), stopped))
                case Delivered(call, rows):
                    self._rows_here.setdefault(call, set()).update(rows.ids.tolist())
                case LossSettled(worker):
                    self._away.append(worker)
                case Resolved(done, _):
                    call = done.ordinal
                    assert call not in self.resolved, f"call {call} is done twice"
                    assert call not in self.rejected, f"call {call} is done after it failed"
                    self.resolved.add(call)
                    self._note_empty_update(done)
                case Rejected(failed, _, root):
                    call = failed.ordinal
                    assert call not in self.resolved, f"call {call} failed after it was done"
                    assert root < self.rejected.get(call, call + 1), f"call {call} fails again, with no earlier reason"
                    self.rejected[call] = root
                case CallForgotten(gone):
                    call = gone.ordinal
                    assert call not in self.forgotten, f"call {call} is forgotten twice"
                    assert call in self.resolved, f"call {call} is forgotten before it is done"
                    self.forgotten.add(call)
                    self._rows_here.pop(call, None)
                case Dropped(_, ids) | Late(_, ids):
                    self._left_out.update(ids)
                case TakenOver(_, ids):
                    self._left_out.difference_update(ids)
                case _:
                    pass

    def _at_controller(self) -> set[Row]:
        return {(call, row) for call, rows in self._rows_here.items() for row in rows}

    def _note_empty_update(self, call: Call) -> None:
        """Give the weights the new version, without any task, where an update had nothing to train on."""
        for fake in self.fakes.values() if call.engine == "train" and call.writes else ():
            if fake.trained.get(call.role) == call.writes[0].version - 1:
                fake.trained[call.role] = call.writes[0].version
                fake.same.add((call.role, call.writes[0].version))

    def _told(self, name: str, message: m.ToWorker) -> None:
        fake = self.fakes[name]
        if isinstance(message, m.Define):
            self._introduced.setdefault(fake.tag, set()).add(message.call)
        if isinstance(message, m.Define | m.Peers):
            return
        assert not self.scheduler._state.workers[name].is_lost, f"{name} is lost, and is told {message}"
        if isinstance(message, m.Task):
            unknown = set(m.calls_of(message)) - self._introduced.get(fake.tag, set())
            assert not unknown, f"{name} was not told what the calls {unknown} are"
            if message.call >= 0:
                assert message.call not in self.forgotten, f"a task on call {message.call}, which is forgotten"
                assert message.call not in self.rejected, f"a task on call {message.call}, which failed"
                assert message.call not in self.resolved, f"a task on call {message.call}, which is done"
                assert name in self.stages[message.call].workers, f"call {message.call} has no place on {name}"
            self._check_lease(name, message)
        if isinstance(message, m.Generate):
            self._check_generation(fake, message)
        fake.inbox.append(message)

    def _check_generation(self, fake: FakeWorker, task: m.Generate) -> None:
        assert task.ids, "a task without samples"
        late = self.scheduler._state.calls[task.call].dropped.intersection(task.ids)
        assert not late, f"samples {late} are late, and handed out again"
        for other in (other for other in self.fakes.values() if not other.is_dead):
            twice = other.generating().keys() & set(task.ids)
            assert not twice, f"samples {twice} are on {other.name} and go to {fake.name}"
        call = self.calls[task.call]
        n = call.options["n"]
        assert isinstance(n, int)
        most = self.stages[task.call].chunk + n - 1  # The rest of a group follows its first sample.
        after = len(fake.generating()) + len(task.ids)
        assert after <= most, f"{fake.name} has {after} samples, and may have {most}"
        oldest, newest = window(call)
        loads = [one.version for one in fake.under_way() if isinstance(one, m.LoadWeights) and one.role == call.role]
        held = loads[-1] if loads else fake.held[call.role]
        assert oldest <= held <= newest, f"call {task.call} may use versions {oldest} to {newest}, and {fake.name} has {held}"

    def _check_lease(self, name: str, task: m.Task) -> None:
        """Check that only one kind of the workers that share devices works, and that a switch finds none at work. One that shares them with
        none may have tasks behind its switch."""
        lease = self._leases.get(name)
        if lease is None or (isinstance(task, m.RunFunction) and self.calls[task.call].engine == "function"):
            return
        kind = "switch" if isinstance(task, m.Switch) else self._kind(task)
        for other in (fake for fake in self.fakes.values() if self._leases.get(fake.name) == lease and not fake.is_dead):
            tasks = other.under_way()
            if list(self._leases.values()).count(lease) == 1:
                tasks = tasks[max((at for at, one in enumerate(tasks, 1) if isinstance(one, m.Switch)), default=0) :]
            for under_way in tasks:
                at_work = "switch" if isinstance(under_way, m.Switch) else self._kind(under_way)
                if {kind, at_work} == {"switch", "rollout"} and self._come_ahead & {name, other.name}:
                    continue  # An early onload: the trainer comes beside running samples.
                assert at_work == kind, f"{kind} work for {name} while {other.name} has {at_work} work"

    def _kind(self, task: m.Task) -> str:
        if isinstance(task, m.Generate | m.EmbedPrompts | m.LoadWeights | m.ShrinkKVCache):
            return "rollout"
        return "function" if task.call >= 0 and self.calls[task.call].engine == "function" else "train"

    def _check_that_all_were_asked(self) -> None:
        """Check that no worker has something new to do except those that the scheduler asked."""
        for worker in self.scheduler._state.workers.values():
            assert self.scheduler._offer(worker) is None, f"{worker.name} was not asked"
        for lease in self.scheduler._state.leases.values():
            assert not self.scheduler._turns.next_turn(lease), f"{lease.name} was not asked for"

    def _check_training(self) -> None:
        """Check that finished updates have trained on each of their rows once an epoch, and on nothing else."""
        trained = Counter(row for fake in self.fakes.values() for row in fake.accumulated)
        twice = [row for row, count in trained.items() if count > 1]
        assert not twice, f"trained on twice in an epoch: {twice[:3]}"
        by_call: dict[int, dict[int, set[int]]] = {}
        for call, epoch, row in trained:
            by_call.setdefault(call, {}).setdefault(epoch, set()).add(row)
        for call, epochs in by_call.items():
            wanted = self.calls[call].options["epochs"]
            assert all(row not in self._left_out for rows in epochs.values() for row in rows), f"call {call} trained on what is left out"
            if call in self.resolved:
                assert sorted(epochs) == list(range(int(str(wanted)))), f"call {call} trained in the epochs {sorted(epochs)} of {wanted}"
                assert all(rows == epochs[0] for rows in epochs.values()), f"call {call} trained on other rows in another epoch"

    # ---- rows

    def _send_parcels(self, fake: FakeWorker) -> None:
        parcels, fake.parcels[:] = list(fake.parcels), []
        for parcel in parcels:
            self._send(parcel)

    def _send(self, parcel: Parcel) -> None:
        if parcel.to == CONTROLLER:
            for call, rows in itertools.groupby(parcel.rows, key=lambda row: row[0]):
                batch = Batch(np.array([row for _, row in rows], np.int64))
                self._input(self.core.rows_arrived, call, batch, parcel.sender)
        elif self.fakes[worker_of(parcel.to)].tag == parcel.to:
            self.fakes[worker_of(parcel.to)].coming.append(parcel)
