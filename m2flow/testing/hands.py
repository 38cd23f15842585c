"""What a worker does with what it is told, as far as a scheduler can tell: no engines, no threads, no sockets.

    Hand.told(message); Hand.turn(random) -> what it says; parcels to other hands

The rules are those of `m2flow.micro.work.worker`: tasks in their order, generation beside them, an abort between two tokens, a task only
when its rows are here. A hand refuses (AssertionError) what a worker could not do: rows that it has not, a call that it was told to forget,
weights that are no version, an engine whose device the other kind has.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from m2flow.channels.weights import Manifest
from m2flow.errors import RewardError
from m2flow.macro.graph import Call
from m2flow.macro.late import keeps_cache
from m2flow.micro import messages as m
from m2flow.micro.plan import WorkerPlan
from m2flow.micro.record.decisions import Stretch
from m2flow.micro.scheduling.roster import tag_of
from m2flow.micro.scheduling.staleness import is_time_dependent, window
from m2flow.micro.work.store import stopped_at
from m2flow.samples import group_key

Row = tuple[int, int]
"""Call and sample."""
Said = m.Finished | m.Aborted | m.Yielded | m.TaskDone | m.TaskFailed | m.Missing


@dataclass(eq=False)
class _Sample:
    """One that generates here."""

    task: m.Generate
    stretches: list[Stretch]

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
    stretches: Mapping[int, tuple[Stretch, ...]] = field(default_factory=dict)
    """Of samples that were stopped."""


@final
class Shelf:
    """The rows that somebody has, and who sent them (`m2flow.micro.work.store`)."""

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
        self._stopped: dict[int, tuple[Stretch, ...]] = {}
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
            case m.Severed(peer=peer, rows=rows):
                self.said.append(m.Missing(peer, self._shelf.sever(peer, rows)))
            case m.Abort(call=call, keeps=keeps):
                if keeps:
                    self._stop(call)
                self._abort(call)
            case m.Yield(call=call, ids=ids):
                self._yield(call, ids)
            case m.Adopt(call=call, drawn=drawn, ids=ids, forward_to=forward_to):
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
        if isinstance(task, m.Perform | m.Accumulate):
            call = self._calls[task.call]
            values = task.values if isinstance(task, m.Perform) else {}
            if isinstance(task, m.Perform) and call.options.get("gives") == "concat":
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
            self.said.append(m.Yielded(call, list(here), [s.task.number for s in here.values()]))
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
            last = sample.stretches[-1] if sample.stretches else Stretch(0, version)
            count = rng.randrange(3)
            if last.version == version:
                sample.stretches[-1:] = [last._replace(num_tokens=last.num_tokens + count)] if last.num_tokens + count else []
            elif count:
                sample.stretches.append(Stretch(count, version, is_stale=True))
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
            case m.Perform(ids=ids, forward_to=forward_to):
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
            case m.Condense():
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
        stretches: Sequence[tuple[Stretch, ...]] = (),
        dropped: Sequence[int] = (),
        ends: bool,
    ) -> None:
        finish, generated = [0] * len(rows), [tokens - 9 for tokens in num_tokens]
        said = m.Finished(number, call, list(rows), list(num_tokens), generated, [], finish, [], None, list(dropped), list(stretches), ends)
        self.said.append(said)
