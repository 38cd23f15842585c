"""A whole cluster in one thread: the real scheduler and the real workers, on in-memory channels, in an order that a seed decides.

    run_planned(flow, options, spec, order_seed=7) == run_eager(flow, options, spec)

Which worker takes its next turn, and when the controller hears what a worker said, is drawn at random; each link keeps its own
order, as the real ones do. So every interleaving that processes could show can be produced, and produced again.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from m2flow.channels.contract import Parcel
from m2flow.channels.memory import MemoryInbox, MemoryOutbox
from m2flow.errors import InternalError, M2FlowError, error_from_record
from m2flow.macro.eager import EagerBackend, number_of
from m2flow.macro.exploring import copies_made
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph, Observation
from m2flow.macro.randomness import randomness_kept
from m2flow.macro.session import Backend
from m2flow.macro.sites import user_site
from m2flow.macro.tracing import trace
from m2flow.micro import messages as m
from m2flow.micro.bodies import call_body
from m2flow.micro.control.census import Census
from m2flow.micro.control.settling import Settling
from m2flow.micro.lowering.lower import Lowering, lower
from m2flow.micro.plan import Plan, WorkerPlan
from m2flow.micro.record.decisions import Decisions, given_by
from m2flow.micro.record.logbook import Logbook, Logged
from m2flow.micro.record.segments import read_segment
from m2flow.micro.scheduling.events import (
    CONTROLLER,
    LEDGER,
    CallAdded,
    Discarded,
    Dropped,
    Event,
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
from m2flow.micro.scheduling.scheduler import Scheduler
from m2flow.micro.work import performing
from m2flow.micro.work.inprocess import InProcess
from m2flow.micro.work.store import RowStore
from m2flow.micro.work.worker import Worker
from m2flow.samples import Batch, SampleId
from m2flow.spec import ClusterSpec, RunSettings
from m2flow.testing.answers import Answer, Notes, samples_of
from m2flow.testing.impatience import Impatience
from m2flow.testing.made_workers import Link, made_worker
from m2flow.testing.mortality import Mortality
from m2flow.testing.writing_down import NotWritten, Written

MAX_TURNS = 2_000_000
"""Turns without an end that count as a deadlock, though somebody still moves."""
_LOOKS_AFTER = 200
"""Turns after which it is asked whether anybody still has something to do."""


class World(Backend):
    """A backend that turns the wheels itself whenever the flow waits."""

    def __init__(
        self,
        flow: str,
        lowering: Lowering,
        scheduler: Scheduler,
        plan: Plan,
        make: Callable[[WorkerPlan, int], tuple[Worker, Link, MemoryInbox]],
        order_seed: int,
        num_losses: int,
        run_dir: Path,
    ) -> None:
        self.answer = Answer()
        self._flow = flow
        self._lowering = lowering
        self._scheduler = scheduler
        self._plan = plan
        self._make = make
        self._workers = {worker.name: make(worker, 0) for worker in plan.workers}
        self._mortality = Mortality(order_seed, num_losses)
        self._census = Census()
        self._buried: list[Worker] = []
        self._dead: set[str] = set()
        self._end: M2FlowError | None = None
        self._order = random.Random(order_seed)
        self._impatience = Impatience(self._order)
        self._outbox = MemoryOutbox()
        self._inbox = MemoryInbox()
        self._addresses: dict[str, str] = {}
        self._rows = RowStore()
        self._calls: dict[int, Call] = {}
        self._bodies: dict[int, bytes] = {}
        self._defined: dict[str, set[int]] = {name: set() for name in self._workers}
        self._segment: list[Call] = []
        self._values: dict[int, object] = {}
        self._settling = Settling()
        self._collected = RowStore()
        self._consuming: dict[int, m.Accumulate] = {}
        self._logbook = Logbook(self, lambda step, name, number: self.answer.logs.append((step, name, number)))
        self._logged: list[tuple[int, int]] = []
        self._released: list[int] = []
        self._discarded: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._failed: set[int] = set()
        """Calls, and those under a refill that is one of them."""
        self._run_dir = run_dir
        self._written = Written(run_dir, self._calls) if num_losses else NotWritten()

    def open(self) -> None:
        self._written.open()
        self._addresses[CONTROLLER] = self._inbox.open()
        for name in self._workers:
            self._open(name)
        self._announce()

    def _open(self, name: str) -> None:
        worker, link, _ = self._workers[name]
        worker.open()
        ready = m.decode_to_controller(link.to_controller.popleft())
        assert isinstance(ready, m.Ready)
        self._addresses[worker.settings.tag] = ready.address

    def _announce(self) -> None:
        for _, link, _ in self._workers.values():
            link.to_worker.append(m.encode(m.Peers(self._addresses)))

    def close(self) -> None:
        for worker in [*self._buried, *(worker for worker, _, _ in self._workers.values())]:
            worker.close()
        self._written.close(self._workers)
        self._outbox.close()
        self._inbox.close()

    def submit(self, call: Call) -> None:
        self._lowering.check(call)
        self._calls[call.ordinal] = call
        self._settling.added(call.ordinal)
        self._bodies[call.ordinal] = call_body(call)
        self._segment.append(call)

    def value(self, ordinal: int) -> object:
        self._flush()
        self._turn_until(lambda: ordinal in self._values or self._settling.of(ordinal) is not None)
        error = self._settling.of(ordinal)
        if error is not None:
            self._settling.raised(ordinal)
            raise error
        if not self._calls[ordinal].is_aligned:
            return self._values[ordinal]
        self._handle(Wanted(ordinal))
        num_rows = self._scheduler.num_rows(ordinal)
        self._turn_until(lambda: len(self._collected.ids(ordinal)) >= num_rows)
        return self._collected.get(ordinal, self._collected.ids(ordinal))

    def observed(self, observation: Observation) -> None:
        pass

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        before, where = self._settling.num_ended, user_site().describe()
        for name, source in values.items():
            self._logbook.add(Logged(step, name, source, before, where))
            self._logged += [(source[0], before)] if not isinstance(source, float) else []

    def release(self, ordinal: int) -> None:
        self._released.append(ordinal)

    def end_step(self, step: int) -> None:
        self._flush()
        with randomness_kept():
            for _ in range(self._order.randrange(20)):
                self._turn()
        self._settling.step_ended()
        self._turn_until(lambda: not self._settling.has_failed or self._settling.first is not None)
        self._raise_first()

    def raise_due(self) -> None:
        self._flush()
        settling = self._settling
        self._turn_until(lambda: all(settling.has_ended(call) or settling.has_failed_before(before) for call, before in self._logged))
        self._turn_until(lambda: self._settling.is_due_known)
        if self._settling.due is not None:
            raise self._settling.due

    def finish(self) -> None:
        self._flush()
        self._turn_until(lambda: self._scheduler.is_idle)
        self._raise_first()

    # What the logbook asks

    def is_resolved(self, ordinal: int) -> bool:
        return ordinal in self._values

    def has_failed(self, ordinal: int) -> bool:
        return self._settling.has_failed_at(ordinal)

    def are_well(self, num_calls: int) -> bool:
        return self._settling.are_well(num_calls)

    def number(self, ordinal: int, name: str | None) -> float:
        return number_of(self._values[ordinal], name)

    def forget_discarded(self) -> None:
        """Drop from the answer what was generated for nothing."""

        def counts(packed: int) -> bool:
            who = SampleId.unpack(packed)
            return packed not in self._dropped and who.prompt <= self._discarded.get(who.call, who.prompt)

        self.answer.samples = {packed: sample for packed, sample in self.answer.samples.items() if counts(packed)}
        self.answer.decisions = {packed: version for packed, version in self.answer.decisions.items() if counts(packed)}
        self.answer.rewards = {key: value for key, value in self.answer.rewards.items() if counts(key[1])}
        self.answer.parts = {key: value for key, value in self.answer.parts.items() if counts(key[1])}
        self.answer.forget(self._failed)

    def _raise_first(self) -> None:
        if self._settling.first is not None:
            raise self._settling.first

    def _flush(self) -> None:
        calls, self._segment = self._segment, []
        stages = self._lowering.stages(MacroGraph(self._flow, tuple(calls))) if calls else ()
        for call, stage in zip(calls, stages, strict=True):
            self._written.call_added(call)
            self._handle(CallAdded(call, stage))
            rows = call.options.get("rows")
            if isinstance(rows, Batch):
                self._rows.put(call.ordinal, rows)
                self._handle(Sourced(call.ordinal, rows.ids.tolist(), performing.num_tokens_of(rows)))
        released, self._released = self._released, []
        for ordinal in released:
            self._handle(Released(ordinal))

    def _turn_until(self, is_met) -> None:  # type: ignore[no-untyped-def]
        with randomness_kept():
            for number in range(MAX_TURNS):
                if self._end is not None:
                    raise self._end
                if is_met():
                    return
                if number % _LOOKS_AFTER == _LOOKS_AFTER - 1 and self._is_stuck():
                    break
                self._turn()
        raise InternalError("nothing moves any more: " + "; ".join(self._scheduler.waiting()))

    def _is_stuck(self) -> bool:
        """Whether nobody has anything to do, nor ever will."""
        if (
            self._mortality.is_at_work
            or self._census.is_open
            or any(link.to_worker or link.to_controller for _, link, _ in self._workers.values())
        ):
            return False
        for worker, _, _ in self._workers.values():
            worker.turn()  # It takes in the rows that have come.
        return not any(worker.has_work or link.to_worker or link.to_controller for worker, link, _ in self._workers.values())

    def _turn(self) -> None:
        """One thing happens somewhere."""
        name = self._order.choice(list(self._workers))
        worker, link, _ = self._workers[name]
        is_alive = worker.settings.tag in self._addresses and name not in self._mortality.dying
        if self._order.random() < 0.5:
            if is_alive:
                worker.turn()
        elif link.to_controller:
            self._received(name, m.decode_to_controller(link.to_controller.popleft()))
        for parcel in self._inbox.take():
            if parcel.sender not in self._dead:
                self._collected.put(parcel.call, parcel.batch, parcel.sender)
        if (late := self._impatience.due()) is not None:
            self._handle(late)
        self._live_and_die()

    def _live_and_die(self) -> None:
        """Somebody dies, is missed, or is back."""
        mortality = self._mortality
        if not (mortality.is_used or self._census.is_open):
            return
        alive = [n for n, (w, _, _) in self._workers.items() if w.settings.tag in self._addresses and n not in mortality.dying]
        if (dies := mortality.dies([n for n in alive if not self._scheduler.is_vital(n)])) is not None:
            worker, link, _ = self._workers[dies]
            for inbox in [self._inbox, *(inbox for _, _, inbox in self._workers.values())]:
                inbox.drop(worker.settings.tag, mortality.part_of(inbox.num_from(worker.settings.tag)))
            for message in list(link.to_controller)[mortality.part_of(len(link.to_controller)) :]:
                link.to_controller.remove(message)
        if (missed := mortality.is_missed()) is not None:
            self._sever(missed)
        for name, missing in self._census.done():
            mortality.away.append(name)
            unsaid = self._written.settle(name)
            self._note(*unsaid)
            self._handle(WorkerLost(name, returns=True, missing=missing, unsaid=unsaid))
        if (back := mortality.returns()) is not None:
            self._come_back(back)

    def _sever(self, name: str) -> None:
        worker, link, _ = self._workers[name]
        link.to_controller.clear()
        tag, sent = worker.settings.tag, self._scheduler.sent_by(name)
        self._dead.add(tag)
        del self._addresses[tag]
        missing = self._collected.sever(tag, sent.get(CONTROLLER, {}))
        others = [n for n, (w, _, _) in self._workers.items() if w.settings.tag in self._addresses]
        for other, message in self._census.begin(name, tag, sent, others).items():
            self._workers[other][1].to_worker.append(m.encode(message))
        for call, rows in missing.items():
            self._census.not_sent(name, CONTROLLER, call, rows)

    def _come_back(self, name: str) -> None:
        worker = self._workers[name][0]
        self._buried.append(worker)
        self._workers[name] = self._make(self._plan.worker(name), worker.settings.incarnation + 1)
        self._defined[name] = set()
        self._open(name)
        self._announce()
        self._handle(WorkerJoined(name, worker.settings.incarnation + 1))

    def _received(self, worker: str, message: m.ToController) -> None:
        if isinstance(message, m.Missing):
            self._census.answered(worker, message)
        if isinstance(message, m.Fatal):
            raise error_from_record(message.error)
        self._note(message)
        self._written.told(message)
        if isinstance(message, m.TaskDone):
            task = self._consuming.pop(message.task, None)
            self.answer.consumed += [(task.call, task.epoch, packed) for packed in task.ids] if task else []
            if task:
                self._written.consumed(task)
        if isinstance(message, m.Heard):
            self._handle(FromWorker(worker, message))

    def _note(self, *messages: m.ToController) -> None:
        for message in [message for message in messages if isinstance(message, m.Finished)]:
            if message.segment is not None and self._calls[message.call].engine == "rollout":
                rows = read_segment(self._run_dir / "segments", message.segment).select(np.array(message.ids, np.int64))
                self.answer.samples.update(samples_of(rows))
            if message.values:
                self.answer.rewarded(message.call, message.ids, message.values, message.parts)
            if message.stretches:
                self.answer.decisions |= given_by(message.call, message.ids, message.stretches)

    def _handle(self, event: Event) -> None:
        try:
            commands = self._scheduler.handle(event)
        except M2FlowError as ended:
            self._end = ended
            raise
        for command in commands:
            self._written.commanded(command)
            match command:
                case Send(worker, m.Push(call=call, ids=ids, to=to)) if worker == CONTROLLER:
                    if to in self._addresses:
                        self._outbox.send(self._addresses[to], Parcel(call, self._rows.get(call, ids), CONTROLLER))
                case Send(worker, m.Forget(call=call)) if worker == CONTROLLER:
                    self._rows.forget(call)
                case Send(worker, m.Push(to=to) as push) if worker == LEDGER:
                    rows = self._written.read_back(push)
                    if to == CONTROLLER:
                        self._collected.put(push.call, rows, CONTROLLER)
                    elif to in self._addresses:
                        self._outbox.send(self._addresses[to], Parcel(push.call, rows, CONTROLLER))
                case Send(worker, message):
                    self._census.told(worker, message)
                    self._impatience.began(message, self._calls.get(getattr(message, "call", -1)))
                    self._tell(worker, message)
                case Discarded(call, last):
                    self._discarded[call] = last
                case Dropped(_, ids) | Late(_, ids):
                    self._dropped.update(ids)
                case Given(call, ids):
                    self._dropped.difference_update(ids)
                    self.answer.decisions |= {packed: self.answer.decisions[packed]._replace(call=call) for packed in ids}
                case Resolve(call, value):
                    self._values[call] = value
                    self._settling.done(call)
                    self._logbook.call_ended(call)
                    self._logbook.write_due()
                case Reject(call, error, root):
                    self._consuming = {number: task for number, task in self._consuming.items() if task.call != call}
                    self._settling.failed(self._calls[call], root, error)
                    self._failed.update((*self._calls[call].under_refill, call))
                    self._logbook.call_ended(call)
                    self._logbook.write_due()

    def _tell(self, worker: str, message: m.ToWorker) -> None:
        link = self._workers[worker][1]
        for call in m.calls_of(message) if isinstance(message, m.Task) else ():
            if call not in self._defined[worker]:
                self._defined[worker].add(call)
                link.to_worker.append(m.encode(m.Define(call, self._bodies[call])))
        if isinstance(message, m.Accumulate):
            self._consuming[message.number] = message
        link.to_worker.append(m.encode(message))


def _itself(backend: Backend) -> Backend:
    return backend


def _as_it_is(plan: Plan) -> Plan:
    return plan


def run_planned(
    flow: Flow,
    options: Mapping[str, object],
    spec: ClusterSpec,
    *,
    seed: int = 0,
    order_seed: int = 0,
    deterministic: bool = False,
    save_to: Path | None = None,
    around: Callable[[Backend], Backend] = _itself,
    seated: Callable[[Plan], Plan] = _as_it_is,
    num_losses: int = 0,
    flush_tokens: int = 3,
    run_dir: Path | None = None,
) -> Answer:
    """Run a flow by the plan of a spec, with the interleaving of `order_seed`. Trained models are kept under `save_to`; the flow's
    calls go to what `around` makes of the backend: a recorder, a replay. `seated` may change who runs where. `num_losses` workers are lost
    on the way, and come back; running samples are written down every `flush_tokens`, and ledger and segments are in `run_dir` then.
    """
    graph, models, num_steps = trace(flow, options, seed=seed, assume=0.0)
    copies = copies_made(flow, options, num_steps=num_steps, seed=seed)
    models = {**copies.models, **models}
    plan = seated(lower(graph, models, spec, deterministic=deterministic, copies=copies.sources))
    with tempfile.TemporaryDirectory() as directory:
        place = str(run_dir or directory)

        def make(planned: WorkerPlan, incarnation: int) -> tuple[Worker, Link, MemoryInbox]:
            every = flush_tokens if num_losses else 2**31
            return made_worker(plan, planned, models, spec, seed, place, incarnation, deterministic=deterministic, flush_tokens=every)

        scheduler = Scheduler(plan, deterministic=deterministic, max_attempts=num_losses + 1)
        world = World(flow.name, Lowering(plan, spec), scheduler, plan, make, order_seed, num_losses, Path(place))
        try:
            world.open()
            try:
                flow.run(around(world), options, seed=seed)
            except M2FlowError as error:
                world.answer.error, world.answer.where = f"{type(error).__name__}: {error.what.split(' (worker')[0]}", error.where
            world.forget_discarded()
            for planned in plan.workers:
                trained = [slot.role for slot in planned.engines if slot.kind == "train"]
                world.answer.weights |= {
                    role: world._workers[planned.name][0].bench.save(role, f"{save_to or directory}/{role}") for role in trained
                }
        finally:
            world.close()
    world.answer.consumed.sort()
    return world.answer


def run_eager(
    flow: Flow,
    options: Mapping[str, object],
    spec: ClusterSpec,
    *,
    seed: int = 0,
    deterministic: bool = False,
    save_to: Path | None = None,
    around: Callable[[Backend], Backend] = _itself,
    decisions: Decisions | None = None,
) -> Answer:
    """Run a flow call by call: what every plan must agree with. `save_to` and `around` as in `run_planned`.

    Where the flow makes time part of the meaning, a planned run's `Answer.decisions` say what time decided there.
    """
    graph, models, num_steps = trace(flow, options, seed=seed, assume=0.0)
    copies = copies_made(flow, options, num_steps=num_steps, seed=seed)
    models = {**copies.models, **models}
    plan = lower(graph, models, spec, deterministic=deterministic, copies=copies.sources)
    with tempfile.TemporaryDirectory() as directory:
        notes = Notes(Path(directory))
        settings = RunSettings(seed=seed, deterministic=deterministic)
        performer = InProcess(plan, spec, settings, models, Path(directory), notes, decisions)
        performer.open()
        try:
            flow.run(around(EagerBackend(performer, notes)), options, seed=seed)
        except M2FlowError as error:
            notes.answer.error, notes.answer.where = f"{type(error).__name__}: {error.what}", error.where
        notes.answer.forget(notes.failed)
        trained = {slot.role for worker in plan.workers for slot in worker.engines if slot.kind == "train"}
        digests = performer.save(save_to or Path(directory))
        notes.answer.weights = {role: digests[role] for role in trained}
        performer.close()
    notes.answer.consumed.sort()
    return notes.answer
