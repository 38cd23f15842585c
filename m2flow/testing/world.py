"""Run a whole cluster in one thread: the real scheduler and the real workers on in-memory channels, in an order that a seed decides.

    run_planned(flow, options, spec, order_seed=7) == run_eager(flow, options, spec)

Which worker takes its next turn, and when the controller reads what a worker sent, is drawn at random; each link keeps its own order, as
the real ones do. So every interleaving of processes can be produced, and reproduced.

    Send(Generate) --began--> RandomTimeouts --due--> TimedOut, now and then
    a worker dies -> a part of what it had sent arrives -> its loss is detected -> all others have answered -> it is restarted

Workers whose state no other has, trainers and those with a role's state, do not die.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import final

import msgspec
import numpy as np

from m2flow.channels.channel import MemoryInbox, MemoryOutbox, Parcel
from m2flow.errors import InternalError, M2FlowError
from m2flow.macro.eager import EagerBackend, number_of
from m2flow.macro.flow import Flow, randomness_kept
from m2flow.macro.graph import Call, MacroGraph, Observation, user_site
from m2flow.macro.oversampling import timeout_of
from m2flow.macro.session import Backend
from m2flow.macro.tracing import copies_made, trace
from m2flow.micro.controller.call_futures import FirstError
from m2flow.micro.controller.controller_core import (
    CallForgotten,
    Consumed,
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
from m2flow.micro.controller.journal_records import JournalRecords
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.call_semantics import call_body
from m2flow.micro.protocol.events import CONTROLLER, Discarded, Dropped, Late, Released, Send, TakenOver, TimedOut, Wanted, WorkerLost
from m2flow.micro.protocol.plan import Plan, WorkerPlan
from m2flow.micro.protocol.staleness import Decisions, given_by
from m2flow.micro.records.flow_record import FlowLog, Logged
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.segments import read_segment
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.worker.eager_executor import EagerExecutor
from m2flow.micro.worker.weight_sync import weight_settings
from m2flow.micro.worker.worker import Worker, WorkerSettings
from m2flow.recipe import Model
from m2flow.rollout_scheduling.policies import report_every, reports_of
from m2flow.samples import Batch, SampleId
from m2flow.spec import ClusterSpec, RunSettings
from m2flow.testing.programs import Answer, AnswerJournal

# ---- random time-outs and failures

_SHARE = 0.01
"""Share of the checks at which a sample is late."""


@final
class RandomTimeouts:
    """Draws at random which running samples time out (`controller_core.Timeouts`). Without such calls no random number is drawn."""

    def __init__(self, order: random.Random) -> None:
        self._order = order
        self._running: list[tuple[int, int]] = []
        """(call, sample), including those that have finished since."""

    def began(self, task: m.Generate, call: Call, now_s: float) -> None:
        if timeout_of(call.options) is not None:
            self._running += [(task.call, row) for row in task.ids if (task.call, row) not in self._running]

    def due(self, now_s: float) -> list[TimedOut]:
        if not self._running or self._order.random() >= _SHARE:
            return []
        call, row = self._running.pop(self._order.randrange(len(self._running)))
        return [TimedOut(call, [row])]


_ONCE_IN = 60
"""Mean number of turns between two failures, and of each stage of a failure."""


@final
class WorkerFailures:
    """Draws at random which workers die, and when their loss is detected and they are restarted."""

    def __init__(self, seed: int, num_deaths: int) -> None:
        self._random = random.Random(seed)
        self._num_left = num_deaths
        self.dying: list[str] = []
        """Dead, and not detected yet."""
        self.away: list[str] = []
        """Known to be lost, and not restarted yet."""

    @property
    def is_pending(self) -> bool:
        """Whether a worker is dead or lost, and will be restarted."""
        return bool(self.dying or self.away)

    @property
    def is_possible(self) -> bool:
        """Whether a worker is dead, lost, or will die."""
        return bool(self._num_left or self.dying or self.away)

    def _is_time(self) -> bool:
        return self._random.randrange(_ONCE_IN) == 0

    def next_dead(self, candidates: Sequence[str]) -> str | None:
        """Return the worker that dies now, or None."""
        if not self._num_left or not candidates or not self._is_time():
            return None
        self._num_left -= 1
        self.dying.append(self._random.choice(candidates))
        return self.dying[-1]

    def next_detected(self) -> str | None:
        """Return the worker whose loss is detected now, or None."""
        return self.dying.pop(0) if self.dying and self._is_time() else None

    def next_restarted(self) -> str | None:
        """Return the worker that is restarted now, or None."""
        return self.away.pop(0) if self.away and self._is_time() else None

    def num_delivered(self, count: int) -> int:
        """Draw how many of `count` messages or parcels are delivered."""
        return self._random.randint(0, count)


# ---- the cluster


class Link:
    """The messages between the controller and one worker, in both directions."""

    def __init__(self) -> None:
        self.to_worker: deque[bytes] = deque()
        self.to_controller: deque[bytes] = deque()

    def receive(self, timeout_s: float) -> list[bytes]:
        received = list(self.to_worker)
        self.to_worker.clear()
        return received

    def send(self, message: bytes) -> None:
        self.to_controller.append(message)


def _with_given_time(message: m.ToController) -> m.ToController:
    """Replace what a worker says of its time, by which a seed's run would differ from the next: its task's number says if it was quick."""
    if not isinstance(message, m.Finished) or not message.took_us:
        return message
    return msgspec.structs.replace(message, took_us=TOOK_US[message.task % len(TOOK_US)])


TOOK_US = (0, 10, 10, 5000)
"""Microseconds that tasks say that they took; 0: they do not say."""


class _LinkWithoutSpans(Link):
    """A link that drops spans: workers send them as time goes by, and the order of a world is to depend on its seed alone."""

    def send(self, message: bytes) -> None:
        if not isinstance(m.decode_to_controller(message), m.Spans):
            super().send(message)


def make_worker(
    plan: Plan,
    worker: WorkerPlan,
    models: Mapping[str, Model],
    spec: ClusterSpec,
    seed: int,
    directory: str,
    incarnation: int,
    *,
    deterministic: bool,
    flush_tokens: int,
) -> tuple[Worker, Link, MemoryInbox]:
    """Make a worker of a plan, which is not open; `incarnation` counts its earlier processes."""
    settings = _settings(worker, models, spec, seed, directory, incarnation, deterministic=deterministic)
    settings = msgspec.structs.replace(settings, flush_tokens=flush_tokens)
    weights = weight_settings(worker.name, plan.syncs, spec.weights, f"{directory}/weights")
    settings = msgspec.structs.replace(settings, weights=weights)
    link, inbox = _LinkWithoutSpans(), MemoryInbox()
    return Worker(settings, link, inbox, MemoryOutbox()), link, inbox


def _settings(
    worker: WorkerPlan, models: Mapping[str, Model], spec: ClusterSpec, seed: int, directory: str, incarnation: int, *, deterministic: bool
) -> WorkerSettings:
    return WorkerSettings(
        name=worker.name,
        controller="",
        keys=None,
        inbox="",
        engines=worker.engines,
        models=dict(models),
        device="cpu",
        threads=1,
        deterministic=deterministic,
        run_seed=seed,
        run_dir=directory,
        shared_prefix=f"m2flow-world-{os.getpid()}-{worker.name}",
        rollout_options=spec.rollout.options,
        train_options=spec.train.options,
        function_concurrency=spec.functions.concurrency,
        function_patience_s=spec.functions.patience_s,
        max_running=spec.rollout.max_running,
        report_every=report_every(spec.rollout.policy, spec.rollout.predictor, spec.rollout.workers or 1, turns=3),
        reports=reports_of(spec.rollout.policy),
        gather_s=0.0,
        flush_tokens=1,
        flush_s=1e9,
        heartbeat_s=1.0,
        parent=0,
        incarnation=incarnation,
        takes_turns=bool(worker.lease),
    )


MAX_TURNS = 2_000_000
"""Turns after which a run counts as a deadlock, even if workers are still active."""
_LOOKS_AFTER = 200
"""Turns between two checks whether any worker still has something to do."""


class World(Backend):
    """A backend that runs scheduler and workers itself whenever the flow waits for a value."""

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
        *,
        is_recorded: bool = False,
    ) -> None:
        self.answer = Answer()
        self._flow = flow
        self._lowering = lowering
        self._scheduler = scheduler
        self._plan = plan
        self._make = make
        self._workers = {worker.name: make(worker, 0) for worker in plan.workers}
        self._failures = WorkerFailures(order_seed, num_losses)
        self._dead_workers: list[Worker] = []
        self._end: M2FlowError | None = None
        self._order = random.Random(order_seed)
        self._outbox = MemoryOutbox()
        self._inbox = MemoryInbox()
        self._journal = Journal(run_dir) if num_losses or is_recorded else None
        self._records = Records() if self._journal is None else JournalRecords(self._journal, run_dir)
        self._core = ControllerCore(plan, scheduler, self._records, RandomTimeouts(self._order))
        self._calls: dict[int, Call] = {}
        self._bodies: dict[int, bytes] = {}
        self._segment: list[Call] = []
        self._values: dict[int, object] = {}
        self._delivered: dict[int, Batch] = {}
        self._first_error = FirstError()
        self._logbook = FlowLog(self, lambda step, name, number: self.answer.logs.append((step, name, number)))
        self._logged: list[tuple[int, int]] = []
        self._released: list[int] = []
        self._discarded: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._failed: set[int] = set()
        """Failed calls, and the calls of failed refills."""
        self._run_dir = run_dir

    def open(self) -> None:
        if self._journal is not None:
            self._journal.open()
        self._core.addresses[CONTROLLER] = self._inbox.open()
        for name in self._workers:
            self._open(name)
        self._carry_out(self._core.begin())

    def _open(self, name: str) -> None:
        worker, link, _ = self._workers[name]
        worker.open()
        ready = m.decode_to_controller(link.to_controller.popleft())
        assert isinstance(ready, m.Ready)
        self._carry_out(self._core.came_up(name, worker.settings.incarnation, ready.address))

    def close(self) -> None:
        for worker in [*self._dead_workers, *(worker for worker, _, _ in self._workers.values())]:
            worker.close()
        for name in self._workers:
            self._records.settle(name, "the run ended")
        if self._journal is not None:
            self._journal.close()
        self._outbox.close()
        self._inbox.close()

    def submit(self, call: Call) -> None:
        self._lowering.check(call)
        self._calls[call.ordinal] = call
        self._first_error.added(call)
        self._bodies[call.ordinal] = call_body(call)
        self._segment.append(call)

    def value(self, ordinal: int) -> object:
        self._flush()
        self._turn_until(lambda: ordinal in self._values or self._first_error.of(ordinal) is not None)
        error = self._first_error.of(ordinal)
        if error is not None:
            self._first_error.raised(ordinal)
            raise error
        if not self._calls[ordinal].is_aligned:
            return self._values[ordinal]
        self._input(self._core.post, Wanted(ordinal))
        self._turn_until(lambda: ordinal in self._delivered)
        return self._delivered[ordinal]

    def observed(self, observation: Observation) -> None:
        pass

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        before, num_calls, where = self._first_error.num_ended, self._first_error.num_added, user_site().describe()
        for name, source in values.items():
            self._logbook.add(Logged(step, name, source, before, num_calls, where))
            self._logged += [(source[0], before)] if not isinstance(source, float) else []
        self._logged += [(ordinal, before) for ordinal in self._first_error.open_effects]

    def release(self, ordinal: int) -> None:
        self._released.append(ordinal)

    def end_step(self, step: int) -> None:
        self._flush()
        with randomness_kept():
            for _ in range(self._order.randrange(20)):
                self._turn()
        self._first_error.step_ended()
        self._turn_until(lambda: not self._first_error.has_failed or self._first_error.first is not None)
        self._raise_first()

    def raise_due(self) -> None:
        self._flush()
        first_error = self._first_error
        self._turn_until(lambda: all(first_error.has_ended(call) or first_error.has_failed_before(before) for call, before in self._logged))
        self._turn_until(lambda: self._first_error.is_due_known)
        if self._first_error.due is not None:
            raise self._first_error.due

    def finish(self) -> None:
        self._flush()
        self._turn_until(lambda: self._scheduler.is_idle)
        self._raise_first()

    # What the log of the flow asks

    def is_resolved(self, ordinal: int) -> bool:
        return ordinal in self._values

    def has_failed(self, ordinal: int) -> bool:
        return self._first_error.has_failed_at(ordinal)

    def are_well(self, num_calls: int) -> bool:
        return self._first_error.are_well(num_calls)

    def are_effects_over(self, num_calls: int) -> bool:
        return self._first_error.are_effects_over(num_calls)

    def has_lost_effect(self, num_calls: int) -> bool:
        return self._first_error.has_lost_effect(num_calls)

    def number(self, ordinal: int, name: str | None) -> float:
        return number_of(self._values[ordinal], name)

    def forget_discarded(self) -> None:
        """Drop the samples that were discarded from the answer."""

        def counts(packed: int) -> bool:
            who = SampleId.unpack(packed)
            return packed not in self._dropped and who.prompt <= self._discarded.get(who.call, who.prompt)

        self.answer.samples = {packed: sample for packed, sample in self.answer.samples.items() if counts(packed)}
        self.answer.details = {packed: details for packed, details in self.answer.details.items() if counts(packed)}
        self.answer.decisions = {packed: version for packed, version in self.answer.decisions.items() if counts(packed)}
        self.answer.rewards = {key: value for key, value in self.answer.rewards.items() if counts(key[1])}
        self.answer.parts = {key: value for key, value in self.answer.parts.items() if counts(key[1])}
        self.answer.forget(self._failed)

    def _raise_first(self) -> None:
        if self._first_error.first is not None:
            raise self._first_error.first

    def _flush(self) -> None:
        calls, self._segment = self._segment, []
        stages = self._lowering.stages(MacroGraph(self._flow, tuple(calls))) if calls else ()
        for call, stage in zip(calls, stages, strict=True):
            self._input(self._core.post, Submitted(call, stage, self._bodies.pop(call.ordinal)))
        released, self._released = self._released, []
        for ordinal in released:
            self._input(self._core.post, Released(ordinal))
        self._input(self._core.flush)

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
        """Test for a deadlock: no message is in flight and no worker has anything to do."""
        if (
            self._failures.is_pending
            or self._core.is_recovering
            or any(link.to_worker or link.to_controller for _, link, _ in self._workers.values())
        ):
            return False
        for worker, _, _ in self._workers.values():
            worker.turn()  # It reads the rows that have arrived.
        return not any(worker.has_work or link.to_worker or link.to_controller for worker, link, _ in self._workers.values())

    def _turn(self) -> None:
        """Do one thing at random: a worker's turn, or reading a message of one."""
        name = self._order.choice(list(self._workers))
        worker, link, _ = self._workers[name]
        is_alive = worker.settings.tag in self._core.addresses and name not in self._failures.dying
        if self._order.random() < 0.5:
            if is_alive:
                worker.turn()
        elif link.to_controller:
            self._received(name, _with_given_time(m.decode_to_controller(link.to_controller.popleft())))
        for parcel in self._inbox.take():
            self._input(self._core.rows_arrived, parcel.call, parcel.batch, parcel.sender)
        self._input(self._core.tick)
        self._fail_and_restart()

    def _fail_and_restart(self) -> None:
        """Let workers die, have their loss detected, or restart them, as drawn."""
        failures = self._failures
        if not (failures.is_possible or self._core.is_recovering):
            return
        alive = [n for n, (w, _, _) in self._workers.items() if w.settings.tag in self._core.addresses and n not in failures.dying]
        if (dead := failures.next_dead([n for n in alive if not self._scheduler.is_vital(n)])) is not None:
            worker, link, _ = self._workers[dead]
            for inbox in [self._inbox, *(inbox for _, _, inbox in self._workers.values())]:
                inbox.drop(worker.settings.tag, failures.num_delivered(inbox.num_from(worker.settings.tag)))
            for message in list(link.to_controller)[failures.num_delivered(len(link.to_controller)) :]:
                link.to_controller.remove(message)
        if (detected := failures.next_detected()) is not None:
            self._workers[detected][1].to_controller.clear()
            self._input(self._core.died, WorkerLost(detected, returns=True))
        self._input(self._core.settle_losses)
        if (restarted := failures.next_restarted()) is not None:
            self._restart(restarted)

    def _restart(self, name: str) -> None:
        worker = self._workers[name][0]
        self._dead_workers.append(worker)
        self._workers[name] = self._make(self._plan.worker(name), worker.settings.incarnation + 1)
        self._open(name)

    def _received(self, worker: str, message: m.ToController) -> None:
        self._note(message)
        self._input(self._core.heard, worker, message)

    def _note(self, *messages: m.ToController) -> None:
        for message in [message for message in messages if isinstance(message, m.Finished)]:
            if message.segment is not None and self._calls[message.call].engine == "rollout":
                rows = read_segment(self._run_dir / "segments", message.segment).select(np.array(message.ids, np.int64))
                self.answer.generated(rows)
            if message.values:
                self.answer.rewarded(message.call, message.ids, message.values, message.parts)
            if message.version_spans:
                self.answer.decisions |= given_by(message.call, message.ids, message.version_spans)

    def _input(self, take: Callable[..., list[Effect]], *what: object) -> None:
        """Hand an input to the core, and carry out its effects."""
        try:
            effects = take(*what)
        except M2FlowError as ended:
            self._end = ended
            raise
        if effects:
            self._carry_out(effects)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(worker, message):
                    self._workers[worker][1].to_worker.append(m.encode(message))
                case SendRows(to, call, _, rows):
                    if to in self._core.addresses:
                        self._outbox.send(self._core.addresses[to], Parcel(call, rows, CONTROLLER))
                case LossSettled(worker, unreported):
                    self._failures.away.append(worker)
                    self._note(*unreported)
                case Consumed(update, epoch, ids):
                    self.answer.consumed += [(update.ordinal, epoch, packed) for packed in ids]
                case Discarded(call, last):
                    self._discarded[call] = last
                case Dropped(_, ids) | Late(_, ids):
                    self._dropped.update(ids)
                case TakenOver(call, ids):
                    self._dropped.difference_update(ids)
                    self.answer.decisions |= {packed: self.answer.decisions[packed]._replace(call=call) for packed in ids}
                case Resolved(done, value):
                    self._values[done.ordinal] = value
                    self._first_error.done(done.ordinal)
                    self._logbook.call_ended(done.ordinal)
                    self._logbook.write_due()
                case Rejected(failed, error, root):
                    self._first_error.failed(failed, root, error)
                    self._failed.update((*failed.under_refill, failed.ordinal))
                    self._logbook.call_ended(failed.ordinal)
                    self._logbook.write_due()
                case Delivered(call, rows):
                    self._delivered[call] = rows
                case CallForgotten(gone):
                    self._delivered.pop(gone.ordinal, None)


# ---- running flows


def _same_backend(backend: Backend) -> Backend:
    return backend


def _same_plan(plan: Plan) -> Plan:
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
    around: Callable[[Backend], Backend] = _same_backend,
    placed: Callable[[Plan], Plan] = _same_plan,
    num_losses: int = 0,
    flush_tokens: int = 3,
    run_dir: Path | None = None,
    is_recorded: bool = False,
) -> Answer:
    """Run a flow by the plan of a spec, with the interleaving of `order_seed`.

    Trained models are saved under `save_to`. The flow calls the backend that `around` makes of the world: a recorder, a replay. `placed`
    may change the plan's placement. `num_losses` workers are lost during the run and restarted; then running samples are recorded every
    `flush_tokens`, and ledger and segments are in `run_dir`. `is_recorded` also makes a ledger where none is lost; so do agents, whose
    turns and tool calls are written down.
    """
    graph, models, num_steps = trace(flow, options, seed=seed, assume=0.0)
    copies = copies_made(flow, options, num_steps=num_steps, seed=seed)
    models = {**copies.models, **models}
    plan = placed(lower(graph, models, spec, deterministic=deterministic, copies=copies.sources))
    with tempfile.TemporaryDirectory() as directory:
        place = str(run_dir or directory)

        def make(planned: WorkerPlan, incarnation: int) -> tuple[Worker, Link, MemoryInbox]:
            every = flush_tokens if num_losses else 2**31
            return make_worker(plan, planned, models, spec, seed, place, incarnation, deterministic=deterministic, flush_tokens=every)

        is_recorded |= any("agent" in call.options for call in graph.calls)
        scheduler = Scheduler(plan, deterministic=deterministic, max_attempts=num_losses + 1)
        world = World(flow.name, Lowering(plan, spec), scheduler, plan, make, order_seed, num_losses, Path(place), is_recorded=is_recorded)
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
                    role: world._workers[planned.name][0].engine_host.save(role, f"{save_to or directory}/{role}") for role in trained
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
    around: Callable[[Backend], Backend] = _same_backend,
    decisions: Decisions | None = None,
) -> Answer:
    """Run a flow call by call: the reference that every plan must agree with. `save_to` and `around` as in `run_planned`.

    Where the flow makes time part of the meaning, a planned run's `Answer.decisions` say what time decided there.
    """
    graph, models, num_steps = trace(flow, options, seed=seed, assume=0.0)
    copies = copies_made(flow, options, num_steps=num_steps, seed=seed)
    models = {**copies.models, **models}
    plan = lower(graph, models, spec, deterministic=deterministic, copies=copies.sources)
    with tempfile.TemporaryDirectory() as directory:
        journal = AnswerJournal(Path(directory))
        settings = RunSettings(seed=seed, deterministic=deterministic)
        executor = EagerExecutor(plan, spec, settings, models, Path(directory), journal, decisions)
        executor.open()
        try:
            flow.run(around(EagerBackend(executor, journal)), options, seed=seed)
        except M2FlowError as error:
            journal.answer.error, journal.answer.where = f"{type(error).__name__}: {error.what}", error.where
        journal.answer.forget(journal.failed)
        trained = {slot.role for worker in plan.workers for slot in worker.engines if slot.kind == "train"}
        digests = executor.save(save_to or Path(directory))
        journal.answer.weights = {role: digests[role] for role in trained}
        executor.close()
    journal.answer.consumed.sort()
    return journal.answer
