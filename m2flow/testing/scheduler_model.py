"""The scheduler among hands, with a judge of everything that it says and counts: for tests of it and of its policies.

Hand.told(message); Hand.turn(random) -> what it says; parcels to other hands

The rules are those of `m2flow.micro.worker.worker`: tasks in their order, generation beside them, an abort between two tokens, a task only
when its rows are here. A hand refuses (AssertionError) what a worker could not do: rows that it has not, a call that it was told to forget,
weights that are no version, an engine whose device the other kind has.

model = Model(roles, spec, staleness=1, seed=7)
    samples = policy.generate(...)
    model.submit(); model.turn(3); model.hear(3); model.drain()

From when it is made until `close`, a model is the running flow: calls are real ones, recorded by a session. What a hand says is heard in
its order, but when is for the caller, and so is what comes twice. An AssertionError says which rule was broken: a sample in two places,
weights out of a call's window, a device of two owners, rows trained on twice, counts that are not what one gets by counting, calls that
nobody does. Workers die, are missed and come back; trainers do not, since only a checkpoint could help.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from m2flow.channels.weights import Manifest
from m2flow.errors import RewardError, StateLost
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph, Observation
from m2flow.macro.handles import Handle
from m2flow.macro.oversampling import is_cut, keeps_cache
from m2flow.macro.session import Backend, Session, recording
from m2flow.macro.tracing import trace
from m2flow.micro.controller.supervisor import InflightRecovery
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import (
    CONTROLLER,
    LEDGER,
    CallAdded,
    Dropped,
    Event,
    Forgotten,
    FromWorker,
    Given,
    Late,
    Reject,
    Released,
    Resolve,
    Send,
    Sourced,
    Wanted,
    WorkerJoined,
    WorkerLost,
)
from m2flow.micro.protocol.plan import Stage, WorkerPlan
from m2flow.micro.protocol.row_store import stopped_at
from m2flow.micro.protocol.staleness import VersionSpan, is_time_dependent, window
from m2flow.micro.protocol.worker_state import TaskState, tag_of, worker_of
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.scheduler.state import SchedulerState
from m2flow.micro.scheduler.task_queues import MAX_QUEUED
from m2flow.samples import Batch, by_group, group_key
from m2flow.spec import ClusterSpec
from m2flow.testing.world import Impatience

Row = tuple[int, int]
"""Call and sample."""
Said = m.Finished | m.Aborted | m.Preempted | m.TaskDone | m.TaskFailed | m.Missing


@dataclass(eq=False)
class _Sample:
    """One that generates here."""

    task: m.Generate
    stretches: list[VersionSpan]

    @property
    def num_generated(self) -> int:
        return sum(stretch.num_tokens for stretch in self.stretches)


@dataclass(frozen=True)
class Parcel:
    """Rows on their way to another hand."""

    to: str
    """Its process."""
    sender: str
    """The process that it is from."""
    rows: tuple[Row, ...]
    stretches: Mapping[int, tuple[VersionSpan, ...]] = field(default_factory=dict)
    """Of samples that were stopped."""


@final
class Shelf:
    """The rows that somebody has, and who sent them (`m2flow.micro.protocol.row_store`)."""

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

    def sever(self, sender: str, but: Mapping[int, Iterable[int]]) -> dict[int, list[int]]:
        """Drop what a dead process has sent but these rows; those of these that are not here."""
        self._dead.add(sender)
        kept = {(call, row) for call, rows in but.items() for row in rows}
        self._senders = {row: known for row, known in self._senders.items() if known != sender or row in kept}
        missing = {call: [row for row in rows if (call, row) not in self._senders] for call, rows in but.items()}
        return {call: rows for call, rows in missing.items() if rows}

    def rows(self) -> Iterable[Row]:
        return self._senders.keys()


@final
class Hand:
    """One worker."""

    def __init__(self, plan: WorkerPlan, calls: Mapping[int, Call], incarnation: int = 0) -> None:
        self.name = plan.name
        self.plan = plan
        self.incarnation = incarnation
        """How many processes it was before."""
        self.tag = tag_of(plan.name, incarnation)
        self.is_dead = False
        self._calls = calls
        self._has_lease = bool(plan.lease)
        self.owner = "rollout"
        """The turn that has the device, if several take turns."""
        self.held = {slot.role: 0 for slot in plan.engines if slot.kind == "rollout"}
        self.trained: dict[str, int | None] = {slot.role: 0 for slot in plan.engines if slot.kind == "train"}
        """Role -> the version of its weights; None in the middle of an update."""
        self.same: set[tuple[str, int]] = set()
        """Role and version, of versions whose weights are those of the one before: there was nothing to train on."""
        self.published: dict[str, int] = {}
        self.inbox: deque[m.ToWorker] = deque()
        """What it was told and has not read."""
        self.coming: deque[Parcel] = deque()
        self.said: deque[Said] = deque()
        """What the controller has not heard."""
        self.parcels: list[Parcel] = []
        """What it has sent and nobody has put on its way."""
        self.fails: set[int] = set()
        """Tasks that will fail."""
        self.accumulated: list[tuple[int, int, int]] = []
        """(update, epoch, sample)."""
        self._shelf = Shelf()
        self._stopped: dict[int, tuple[VersionSpan, ...]] = {}
        self._queue: deque[m.Task] = deque()
        self._growing: dict[int, _Sample] = {}
        self._generations: dict[int, m.Generate] = {}
        """Those that it has begun, by number."""
        self._left: dict[int, int] = {}
        """Of each, samples that have not finished."""
        self._open_epoch: dict[int, tuple[int, int]] = {}

    @property
    def has_something(self) -> bool:
        """Whether a turn could change anything."""
        if self.is_dead:
            return False
        return bool(self.inbox or self.coming or self._growing or (self._queue and self._is_ready(self._queue[0])))

    def has_trained(self, role: str, version: int) -> bool:
        """Whether the trainer's weights are those of this version now."""
        trained = self.trained[role]
        return trained is not None and version <= trained and all((role, later) in self.same for later in range(version + 1, trained + 1))

    def waiting_tasks(self) -> list[int]:
        """Numbers of the tasks on calls that it has not begun."""
        return [task.number for task in (*self._queue, *self.inbox) if isinstance(task, m.Task) and task.call >= 0]

    def under_way(self) -> list[m.Task]:
        """The tasks that it was given and has not ended."""
        return [task for task in (*self.inbox, *self._queue, *self._generations.values()) if isinstance(task, m.Task)]

    def generating(self) -> dict[int, int]:
        """Sample -> task, of those that run or wait here, read or not."""
        found = {packed: sample.task.number for packed, sample in self._growing.items()}
        for task in (*self._queue, *self.inbox):
            if isinstance(task, m.Generate):
                found |= dict.fromkeys(task.ids, task.number)
        return found

    def held_rows(self) -> Iterable[Row]:
        """The rows that are here."""
        return self._shelf.rows()

    def turn(self, rng: random.Random) -> None:
        """Take in what has come, decode for a while, do one task."""
        while self.coming:
            parcel = self.coming.popleft()
            self._shelf.put(parcel.rows, parcel.sender)
            self._stopped.update(parcel.stretches)
        while self.inbox:
            self._read(self.inbox.popleft())
        self._decode(rng)
        if self._queue and self._is_ready(self._queue[0]):
            self._do(self._queue.popleft(), rng)

    # Reading

    def _read(self, message: m.ToWorker) -> None:
        match message:
            case m.Push(call=call, ids=ids, to=to):
                self._has(call, ids)
                stopped = {packed: self._stopped[packed] for packed in ids} if call < 0 else {}
                if to != self.tag:
                    self.parcels.append(Parcel(to, self.tag, tuple((call, row) for row in ids), stopped))
            case m.PeerLost(peer=peer, rows=rows):
                self.said.append(m.Missing(peer, self._shelf.sever(peer, rows)))
            case m.Abort(call=call, keeps=keeps):
                if keeps:
                    self._stop(call)
                self._abort(call)
            case m.Preempt(call=call, ids=ids):
                self._yield(call, ids)
            case m.Reassign(call=call, drawn=drawn, ids=ids, forward_to=forward_to):
                self._has(drawn, ids)
                self._deliver(call, ids, forward_to)
            case m.Forget(call=call):
                self._shelf.forget(call, stopped_at(call))
            case m.Task():
                self._queue.append(message)

    def _has(self, call: int, rows: Iterable[int]) -> None:
        assert self._shelf.has(call, rows), f"{self.name} lacks some of the rows {list(rows)} of call {call}"

    def _is_ready(self, task: m.Task) -> bool:
        if isinstance(task, m.Generate):
            if task.aborted_by >= 0:
                return self._shelf.has(stopped_at(task.aborted_by), task.ids)
            ref = self._calls[task.drawn_by].input("prompts")
            assert ref is not None
            return self._shelf.has(ref.call, task.prompts)
        if isinstance(task, m.RunFunction | m.Accumulate):
            call = self._calls[task.call]
            values = task.values if isinstance(task, m.RunFunction) else {}
            if isinstance(task, m.RunFunction) and call.options.get("gives") == "concat":
                return all(self._shelf.has(source, rows) for source, rows in task.parts.items())
            return all(self._shelf.has(ref.call, task.ids) for name, ref in call.inputs if name not in values)
        return True

    def _stop(self, call: int) -> None:
        self._give_back(call, {packed: s for packed, s in self._growing.items() if s.task.call == call and s.num_generated})

    def _give_back(self, call: int, stopped: Mapping[int, _Sample]) -> None:
        if stopped:
            for packed, sample in stopped.items():
                self._stopped[packed] = tuple(sample.stretches)
                self._shelf.put([(stopped_at(call), packed)], self.tag)
                del self._growing[packed]
            numbers = [sample.num_generated for sample in stopped.values()]
            stretches = [tuple(sample.stretches) for sample in stopped.values()]
            self.said.append(m.Aborted(call, list(stopped), [9 + n for n in numbers], numbers, stretches, ("x", 0, 0, 0)))

    def _yield(self, call: int, ids: Iterable[int]) -> None:
        """Samples that run here are given back, with their tokens so far."""
        here = {packed: s for packed, s in self._growing.items() if s.task.call == call and packed in ids}
        self._give_back(call, {packed: s for packed, s in here.items() if s.num_generated})
        for packed in here:
            self._growing.pop(packed, None)
        if here:
            self.said.append(m.Preempted(call, list(here), [s.task.number for s in here.values()]))
        for sample in here.values():
            self._left[sample.task.number] -= 1
            if not self._left[sample.task.number]:
                del self._left[sample.task.number], self._generations[sample.task.number]
                self.said.append(m.TaskDone(sample.task.number))

    def _abort(self, call: int) -> None:
        given_up = {s.task.number: s.task for s in self._growing.values() if s.task.call == call}
        given_up |= {number: self._generations[number] for number in self._left if self._generations[number].call == call}
        self._growing = {packed: s for packed, s in self._growing.items() if s.task.call != call}
        for number in given_up:
            del self._left[number], self._generations[number]
            self.said.append(m.TaskDone(number))
        for task in [task for task in self._queue if task.call == call]:
            self._queue.remove(task)
            self.said.append(m.TaskDone(task.number))

    # Working

    def _decode(self, rng: random.Random) -> None:
        """Some tokens of each sample; some finish."""
        done: dict[int, list[int]] = {}
        for packed, sample in self._growing.items():
            version = self.held[self._calls[sample.task.call].role]
            last = sample.stretches[-1] if sample.stretches else VersionSpan(0, version)
            count = rng.randrange(3)
            if last.version == version:
                sample.stretches[-1:] = [last._replace(num_tokens=last.num_tokens + count)] if last.num_tokens + count else []
            elif count:
                sample.stretches.append(VersionSpan(count, version, is_stale=True))
            if sample.num_generated and rng.random() < 0.3:
                done.setdefault(sample.task.number, []).append(packed)
        for number, rows in done.items():
            task = self._generations[number]
            samples = [self._growing.pop(packed) for packed in rows]
            self._left[number] -= len(rows)
            call = self._calls[task.call]
            stretches = [tuple(sample.stretches) for sample in samples] if is_time_dependent(call) else []
            self._deliver(task.call, rows, task.forward_to)
            ends = self._left[number] == 0
            if ends:
                del self._left[number], self._generations[number]
            numbers = [sample.num_generated for sample in samples]
            self._finished(number, task.call, rows, [9 + n for n in numbers], stretches=stretches, ends=ends)

    def _do(self, task: m.Task, rng: random.Random) -> None:
        if task.number in self.fails:
            self.fails.discard(task.number)
            rows: Sequence[int] = getattr(task, "ids", [])
            row = rng.choice(rows) if rows else -1
            self.said.append(m.TaskFailed(task.number, task.call, RewardError(f"call {task.call} failed").to_record(), row))
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
            case m.ShrinkKVCache():
                assert self.owner == "rollout", "room is made on devices that others have"
            case m.Switch(to=to):
                assert not self._growing, "a device changes hands under running samples"
                self.owner = to
            case _:
                raise AssertionError(f"{self.name} was given {task}")
        self.said.append(m.TaskDone(task.number, 1.0, manifest))

    def _load(self, task: m.LoadWeights) -> None:
        self._owns("rollout", task.role)
        if task.manifest is None:
            assert self.has_trained(task.role, task.version), "half-trained weights are loaded"
        else:
            assert task.manifest.segment == f"{task.role}-{task.version}"
        for call in {s.task.call: self._calls[s.task.call] for s in self._growing.values()}.values():
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
            assert packed not in self._growing, "a sample is generated twice at once"
            before = list(self._stopped[packed]) if task.aborted_by >= 0 else []
            assert all(oldest <= stretch.version <= newest for stretch in before), "a sample goes on from tokens that are too old"
            self._growing[packed] = _Sample(task, before)
        self._left[task.number] = len(task.ids)
        self._generations[task.number] = task

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
        self._shelf.put(made, self.tag)
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
        stretches: Sequence[tuple[VersionSpan, ...]] = (),
        dropped: Sequence[int] = (),
        ends: bool,
    ) -> None:
        finish, generated = [0] * len(rows), [tokens - 9 for tokens in num_tokens]
        said = m.Finished(number, call, list(rows), list(num_tokens), generated, [], finish, [], None, list(dropped), list(stretches), ends)
        self.said.append(said)


def recount(scheduler: Scheduler, hands: Mapping[str, Hand], at_controller: Iterable[Row]) -> None:
    """Count everything anew.

    Raises:
        AssertionError: a count is not what it should be; it says which.
    """
    scheduler_state = scheduler._state
    tasks = scheduler_state.tasks._tasks
    _recount_tasks(scheduler_state, tasks)
    for state in scheduler_state.calls.values():
        _recount_call(scheduler_state, state, tasks)
    _recount_weights(scheduler, hands)
    assert not scheduler_state.ready_workers.has_any, "somebody is awake after an event"
    assert list(scheduler_state.active) == [ordinal for ordinal, state in scheduler_state.calls.items() if not state.is_over], (
        "active calls"
    )
    idle = {
        w.name for w in scheduler_state.workers.values() if w.roles["function"] and w.num_tasks["function"] < MAX_QUEUED and not w.is_lost
    }
    for state in scheduler_state.active.values():
        if state.call.engine == "function" and state.has_function_work:
            assert not idle.intersection(state.stage.workers), f"{state.call.name} has work, and {idle} are free for it"
    if not any(hand.has_something or hand.said or hand.is_dead for hand in hands.values()):
        _recount_rows(scheduler_state, hands, set(at_controller))


def _recount_tasks(scheduler_state: SchedulerState, tasks: Mapping[int, TaskState]) -> None:
    of: Counter[tuple[str, str]] = Counter((task.worker, task.engine) for task in tasks.values())
    running: Counter[str] = Counter()
    of_lease: Counter[str] = Counter()
    for task in tasks.values():
        running[task.worker] += task.rows_left
        lease = scheduler_state.workers[task.worker].lease
        of_lease[lease.name if lease is not None else ""] += 1
    for worker in scheduler_state.workers.values():
        for engine, count in worker.num_tasks.items():
            assert count == of[worker.name, engine], f"{worker.name} has {of[worker.name, engine]} {engine} tasks, not {count}"
        assert worker.num_running == running[worker.name], f"{running[worker.name]} samples run on {worker.name}, not {worker.num_running}"
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


def _recount_weights(scheduler: Scheduler, hands: Mapping[str, Hand]) -> None:
    scheduler_state, dispatch = scheduler._state, scheduler._rollout
    for role, counted in dispatch._num_holding.items():
        held = Counter(worker.held.get(role, 0) for worker in scheduler_state.ready_workers.hosts("rollout", role))
        assert +counted == held, f"the weights of {role}: {dict(held)}, not {dict(counted)}"
    for worker in scheduler_state.workers.values():
        hand = hands[worker.name]
        unheard = [said for said in hand.said if isinstance(said, m.TaskDone)]
        for role, version in hand.held.items() if not worker.is_lost and not hand.is_dead and not unheard else ():
            assert worker.held.get(role, 0) == version, f"{worker.name} holds version {version} of {role}, not {worker.held.get(role, 0)}"


def _recount_rows(scheduler_state: SchedulerState, hands: Mapping[str, Hand], at_controller: set[Row]) -> None:
    """When nothing is on its way, rows are where the scheduler takes them to be, and nowhere else."""
    for name in (*hands, CONTROLLER):
        here = at_controller if name == CONTROLLER else set(hands[name].held_rows())
        thought = {(call, row) for call, places in scheduler_state.rows._places.items() for row in places.get(name, ())}
        missing = thought - here
        assert not missing, f"{name} has not the rows {sorted(missing)[:3]}, which it is taken to have"
        unknown = {(call, row) for call, row in here - thought if call in scheduler_state.calls and not scheduler_state.calls[call].is_over}
        assert not unknown, f"{name} has the rows {sorted(unknown)[:3]}, which nobody knows of"
        # What comes when its call is over is in no result, and goes when the call is forgotten: if the place is told.
        untold = {
            call for call, _ in here - thought if call in scheduler_state.calls and name not in scheduler_state.rows._places.get(call, ())
        }
        assert not untold, f"{name} has rows of the calls {sorted(untold)}, and will never be told to forget them"


_RECOUNTED_EVERY = 25
"""Events."""


class _Calls(Backend):
    """Keeps what the session records."""

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
        """How far a refill has moved a dataset's cursor: Python waits for that, and is told what a rehearsal would be."""
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
    """One scheduler with its workers."""

    def __init__(self, roles: Flow, spec: ClusterSpec, *, staleness: int = 0, seed: int = 0, deterministic: bool = False) -> None:
        graph, models, _ = trace(roles, {}, steps=1)
        plan = lower(graph, models, spec, deterministic=deterministic)
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(plan, deterministic=deterministic, max_attempts=1 << 30)
        self.calls: dict[int, Call] = {}
        self.stages: dict[int, Stage] = {}
        self.hands = {worker.name: Hand(worker, self.calls) for worker in plan.workers}
        self.resolved: set[int] = set()
        self.rejected: dict[int, int] = {}
        """Failed call -> the one that failed by itself."""
        self.forgotten: set[int] = set()
        self.released: set[int] = set()
        self.num_events = 0
        self._roles = roles.name
        self._leases = {worker.name: worker.lease for worker in plan.workers if worker.lease}
        self._come_ahead = {worker.name for worker in plan.workers for slot in worker.engines if slot.comes_at}
        self._lowering = Lowering(plan, spec)
        self._backend = _Calls(self._wait)
        self._open = contextlib.ExitStack()
        self._session = Session(self._backend, flow=roles.name, staleness=staleness)
        self._open.enter_context(recording(self._session))
        self._steps = self._session.iterate(1 << 30)
        self._impatience = Impatience(random.Random(seed))
        self._shelf = Shelf()
        """What the controller has."""
        self._recovery = InflightRecovery()
        self._dead: set[str] = set()
        """Processes."""
        self._dying: list[str] = []
        """Dead, and not missed yet."""
        self._away: list[str] = []
        """Known to be lost, and not back yet."""
        self.is_ended = False
        """What a worker took with it nobody can make again: the run would go on from a checkpoint."""
        self._said: deque[FromWorker] = deque(maxlen=200)
        self._stopped: dict[int, tuple[VersionSpan, ...]] = {}
        """The tokens of samples that were stopped, as the ledger has them."""
        self._left_out: set[int] = set()
        """Samples that are in no result."""

    def close(self) -> None:
        """End the session."""
        self._steps.close()  # type: ignore[attr-defined]
        self._open.close()

    # What the program does

    def next_step(self) -> None:
        """The program's loop begins, or goes on."""
        self.submit()
        next(self._steps)

    def submit(self) -> None:
        """What the program has made since the last time is lowered as one segment and handed over; then what it let go."""
        calls, self._backend.made[:] = list(self._backend.made), []
        for call, stage in zip(calls, self._lowering.stages(MacroGraph(self._roles, tuple(calls))) if calls else (), strict=True):
            self.calls[call.ordinal], self.stages[call.ordinal] = call, stage
            self.tell(CallAdded(call, stage))
            rows = call.options.get("rows")
            if isinstance(rows, Batch):
                ids = rows.ids.tolist()
                self._shelf.put([(call.ordinal, row) for row in ids], CONTROLLER)
                self.tell(Sourced(call.ordinal, ids, [9] * len(ids)))
        released, self._backend.released[:] = list(self._backend.released), []
        self.released.update(released)
        for ordinal in released:
            self.tell(Released(ordinal))

    def look(self, handle: Handle) -> bool:
        """The program waits for a call's rows, which are done; False if they are not."""
        ordinal = handle.ref.call
        is_there = ordinal in self.resolved and self.calls[ordinal].is_aligned
        if is_there:
            self.tell(Wanted(ordinal))
        return is_there

    # What happens elsewhere

    def turn(self, pick: int) -> None:
        """A worker that could do something takes a turn."""
        able = [hand for hand in self.hands.values() if hand.has_something]
        if able:
            hand = able[pick % len(able)]
            hand.turn(self.rng)
            self._put_on_their_way(hand)

    def hear(self, pick: int) -> None:
        """The controller hears what a worker said, the earliest first."""
        speaking = [hand for hand in self.hands.values() if hand.said]
        if speaking:
            hand = speaking[pick % len(speaking)]
            said = hand.said.popleft()
            if isinstance(said, m.Missing):
                self._recovery.answered(hand.name, said)
                self._lose_those_known()
            else:
                if isinstance(said, m.Aborted):
                    self._stopped.update(zip(said.ids, said.stretches, strict=True))
                self._said.append(FromWorker(hand.name, said))
                self.tell(self._said[-1])

    def die(self, pick: int) -> None:
        """A worker that others can stand in for dies: of what it has said and sent some is lost."""
        able = [hand for hand in self.hands.values() if not hand.is_dead and not self.scheduler.is_vital(hand.name)]
        if not able or self.is_ended:
            return
        hand = able[pick % len(able)]
        hand.is_dead = True
        self._dying.append(hand.name)
        while hand.said and self.rng.random() < 0.5:
            hand.said.pop()
        for other in self.hands.values():
            sent = [parcel for parcel in other.coming if parcel.sender == hand.tag]
            for parcel in sent[self.rng.randint(0, len(sent)) :]:
                other.coming.remove(parcel)

    def miss(self) -> None:
        """The controller misses one that has died."""
        if self._dying and not self.is_ended:
            name = self._dying.pop(0)
            hand, sent = self.hands[name], self.scheduler.sent_by(name)
            hand.said.clear()
            said = [event for event in self._said if event.worker != name]  # What a dead process says does not come, and not again.
            self._said.clear()
            self._said.extend(said)
            self._dead.add(hand.tag)
            missing = self._shelf.sever(hand.tag, sent.get(CONTROLLER, {}))
            others = [other.name for other in self.hands.values() if other.tag not in self._dead]
            for other, message in self._recovery.begin(name, hand.tag, sent, others).items():
                self.hands[other].inbox.append(message)
            for call, rows in missing.items():
                self._recovery.not_sent(name, CONTROLLER, call, rows)
            self._lose_those_known()

    def come_back(self) -> None:
        """One that was lost is there again, as a new process."""
        if self._away and not self.is_ended:
            hand = self.hands[self._away.pop(0)]
            incarnation = hand.incarnation + self.rng.choice([1, 1, 2])  # One that died on its way up nobody has known.
            self.hands[hand.name] = Hand(hand.plan, self.calls, incarnation)
            self.tell(WorkerJoined(hand.name, incarnation))

    def _lose_those_known(self) -> None:
        for name, missing in self._recovery.done():
            self._away.append(name)
            self.tell(WorkerLost(name, returns=True, missing=missing))

    def hear_again(self, pick: int) -> None:
        """Something that was heard is heard once more."""
        if self._said:
            self.tell(self._said[pick % len(self._said)])

    def fail(self, pick: int) -> None:
        """A task on a call that some worker has will fail."""
        tasks = [(hand, number) for hand in self.hands.values() for number in hand.waiting_tasks()]
        if tasks:
            hand, number = tasks[pick % len(tasks)]
            hand.fails.add(number)

    def run(self, num_moves: int) -> None:
        """Turns and hearing, in an order that the seed decides."""
        for _ in range(num_moves):
            if self.is_ended:
                return
            if (late := self._impatience.due()) is not None:
                self.tell(late)
            which = self.rng.random()
            if which < 0.05:
                self.hear_again(self.rng.randrange(1 << 16))
            elif which < 0.1:
                self.come_back() if which < 0.07 else self.miss()
            elif which < 0.5:
                self.turn(self.rng.randrange(1 << 16))
            else:
                self.hear(self.rng.randrange(1 << 16))

    def _wait(self, ordinal: int) -> None:
        self.submit()
        while ordinal not in self.resolved and ordinal not in self.rejected and not self.is_ended:
            assert self._is_moving, f"Python waits for call {ordinal}, and nothing moves any more: " + "; ".join(self.scheduler.waiting())
            self.run(1)

    @property
    def _is_moving(self) -> bool:
        return any(hand.has_something or hand.said for hand in self.hands.values()) or bool(self._dying or self._away)

    def drain(self) -> None:
        """Until nothing moves any more: then nothing may be left to do."""
        self.submit()
        while self._is_moving and not self.is_ended:
            self.run(8)
        if self.is_ended:
            return
        assert self.scheduler.is_idle, "nothing moves any more: " + "; ".join(self.scheduler.waiting())
        left = self.calls.keys() - self.resolved - self.rejected.keys()
        assert not left, f"the calls {sorted(left)} are neither done nor failed, and the scheduler has nothing to do"
        self._check_training()
        recount(self.scheduler, self.hands, self._shelf.rows())

    def end(self) -> None:
        """The program is over and holds nothing that it made: nothing may be kept."""
        self.drain()
        if self.is_ended:
            return
        kept = (
            (self.released & self.resolved) - self.forgotten - self.scheduler._state.partial_rollouts.needed()
        )  # A later call might take those over.
        assert not kept or self.rejected, f"the calls {sorted(kept)} can't be asked for, and are kept"  # A failure may reach those.
        for hand in self.hands.values():
            rows = {call for call, _ in hand.held_rows()} - self.calls.keys() | {c for c, _ in hand.held_rows() if c in self.forgotten}
            assert not {call for call in rows if call >= 0}, f"{hand.name} keeps rows of {rows}, which nobody can ask for"

    # What the scheduler says

    def tell(self, event: Event) -> None:
        """Have the scheduler handle an event, and carry out what it says."""
        if self.is_ended:
            return
        self.num_events += 1
        try:
            commands = self.scheduler.handle(event)
        except StateLost:
            self.is_ended = True
            return
        for command in commands:
            match command:
                case Send(worker, m.Push(call=call, ids=ids, to=to)) if worker == CONTROLLER:
                    assert self._shelf.has(call, ids), "the controller has not these rows"
                    self._send(Parcel(to, CONTROLLER, tuple((call, row) for row in ids)))
                case Send(worker, m.Forget(call=call)) if worker == CONTROLLER:
                    self._shelf.forget(call)
                case Send(worker, m.Push(call=call, ids=ids, to=to)) if worker == LEDGER:
                    stopped = {packed: self._stopped[packed] for packed in ids} if call < 0 else {}
                    self._send(Parcel(to, CONTROLLER, tuple((call, row) for row in ids), stopped))
                case Send(worker, message):
                    self._recovery.told(worker, message)
                    self._impatience.began(message, self.calls.get(getattr(message, "call", -1)))
                    self._told(worker, message)
                case Resolve(call, _):
                    assert call not in self.resolved, f"call {call} is done twice"
                    assert call not in self.rejected, f"call {call} is done after it failed"
                    self.resolved.add(call)
                    self._note_empty_update(self.calls[call])
                case Reject(call, _, root):
                    assert call not in self.resolved, f"call {call} failed after it was done"
                    assert root < self.rejected.get(call, call + 1), f"call {call} fails again, with no earlier reason"
                    self.rejected[call] = root
                case Forgotten(call):
                    assert call not in self.forgotten, f"call {call} is forgotten twice"
                    assert call in self.resolved, f"call {call} is forgotten before it is done"
                    self.forgotten.add(call)
                case Dropped(_, ids) | Late(_, ids):
                    self._left_out.update(ids)
                case Given(_, ids):
                    self._left_out.difference_update(ids)
                case _:
                    pass
        self._check_that_all_were_asked()
        if self.num_events % _RECOUNTED_EVERY == 0:
            recount(self.scheduler, self.hands, self._shelf.rows())

    def _note_empty_update(self, call: Call) -> None:
        """Where there was nothing to train on, the weights are those of the new version without any task."""
        for hand in self.hands.values() if call.engine == "train" and call.writes else ():
            if hand.trained.get(call.role) == call.writes[0].version - 1:
                hand.trained[call.role] = call.writes[0].version
                hand.same.add((call.role, call.writes[0].version))

    def _told(self, name: str, message: m.ToWorker) -> None:
        hand = self.hands[name]
        assert not self.scheduler._state.workers[name].is_lost, f"{name} is lost, and is told {message}"
        if isinstance(message, m.Task):
            if message.call >= 0:
                assert message.call not in self.forgotten, f"a task on call {message.call}, which is forgotten"
                assert message.call not in self.rejected, f"a task on call {message.call}, which failed"
                assert message.call not in self.resolved, f"a task on call {message.call}, which is done"
                assert name in self.stages[message.call].workers, f"call {message.call} has no place on {name}"
            self._check_lease(name, message)
        if isinstance(message, m.Generate):
            self._check_generation(hand, message)
        hand.inbox.append(message)

    def _check_generation(self, hand: Hand, task: m.Generate) -> None:
        assert task.ids, "a task without samples"
        late = self.scheduler._state.calls[task.call].dropped.intersection(task.ids)
        assert not late, f"samples {late} are late, and handed out again"
        for other in (other for other in self.hands.values() if not other.is_dead):
            twice = other.generating().keys() & set(task.ids)
            assert not twice, f"samples {twice} are on {other.name} and go to {hand.name}"
        call = self.calls[task.call]
        n = call.options["n"]
        assert isinstance(n, int)
        most = self.stages[task.call].chunk + n - 1  # The rest of a group goes with its first.
        after = len(hand.generating()) + len(task.ids)
        assert after <= most, f"{hand.name} has {after} samples, and may have {most}"
        oldest, newest = window(call)
        held = next((msg.version for msg in reversed(hand.inbox) if isinstance(msg, m.LoadWeights) and msg.role == call.role), None)
        held = hand.held[call.role] if held is None else held
        assert oldest <= held <= newest, f"call {task.call} may use versions {oldest} to {newest}, and {hand.name} has {held}"

    def _check_lease(self, name: str, task: m.Task) -> None:
        """Of the workers that share devices only one kind works; a switch finds nobody at work."""
        lease = self._leases.get(name)
        if lease is None or (isinstance(task, m.RunFunction) and self.calls[task.call].engine == "function"):
            return
        kind = "switch" if isinstance(task, m.Switch) else self._kind(task)
        for other in (hand for hand in self.hands.values() if self._leases.get(hand.name) == lease and not hand.is_dead):
            for under_way in other.under_way():
                at_work = "switch" if isinstance(under_way, m.Switch) else self._kind(under_way)
                if {kind, at_work} == {"switch", "rollout"} and self._come_ahead & {name, other.name}:
                    continue  # A trainer that comes ahead, beside samples that were there before.
                assert at_work == kind, f"{kind} work for {name} while {other.name} has {at_work} work"

    def _kind(self, task: m.Task) -> str:
        if isinstance(task, m.Generate | m.LoadWeights | m.ShrinkKVCache):
            return "rollout"
        return "function" if task.call >= 0 and self.calls[task.call].engine == "function" else "train"

    def _check_that_all_were_asked(self) -> None:
        """Only those are asked who may have something new to do; nobody else has."""
        for worker in self.scheduler._state.workers.values():
            assert self.scheduler._offer(worker) is None, f"{worker.name} was not asked"
        for lease in self.scheduler._state.leases.values():
            assert not self.scheduler._next_turn(lease), f"{lease.name} was not asked for"

    def _check_training(self) -> None:
        """Updates that are done have trained on each of their rows once an epoch, in no other epoch, and on nothing else."""
        trained = Counter(row for hand in self.hands.values() for row in hand.accumulated)
        twice = [row for row, count in trained.items() if count > 1]
        assert not twice, f"trained on twice in an epoch: {twice[:3]}"
        by_call: dict[int, dict[int, set[int]]] = {}
        for call, epoch, row in trained:
            by_call.setdefault(call, {}).setdefault(epoch, set()).add(row)
        for call, epochs in by_call.items():
            wanted = self.calls[call].options["epochs"]
            assert all(row not in self._left_out for rows in epochs.values() for row in rows), (
                f"call {call} trained on what is in no result"
            )
            if call in self.resolved:
                assert sorted(epochs) == list(range(int(str(wanted)))), f"call {call} trained in the epochs {sorted(epochs)} of {wanted}"
                assert all(rows == epochs[0] for rows in epochs.values()), f"call {call} trained on other rows in another epoch"

    # Rows

    def _put_on_their_way(self, hand: Hand) -> None:
        parcels, hand.parcels[:] = list(hand.parcels), []
        for parcel in parcels:
            self._send(parcel)

    def _send(self, parcel: Parcel) -> None:
        if parcel.to == CONTROLLER:
            self._shelf.put(parcel.rows, parcel.sender)
        elif self.hands[worker_of(parcel.to)].tag == parcel.to:
            self.hands[worker_of(parcel.to)].coming.append(parcel)
