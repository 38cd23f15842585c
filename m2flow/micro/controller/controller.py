"""Run a plan: the backend that a flow's calls go to, and the thread that feeds inputs to a `ControllerCore` and carries out its effects.

    flow thread --post--> Controller --inputs--> ControllerCore --effects--> Controller --messages, rows--> workers
                <-- CallFutures, where the flow's thread waits --

The controller owns the links, the journal and the clock; what an input means is decided by the core. Worker processes that die and come
back are `m2flow.micro.controller.supervisor`'s. When the run can't go on, every wait of the flow's thread is answered with the reason.

`PlannedBackend` lowers a flow's calls segment by segment. Calls gather until Python waits for a result or the step ends; then they are
lowered as one segment. Python may run some steps ahead of the workers (`Lookahead`), so that the next calls are known before they can
start: with staleness k the next k steps can generate while a step trains, and the calls of the step after those should be known by the
time it can start.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from m2flow.channels.channel import Parcel
from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.channels.zeromq import LinkDialer, LinkListener, wait
from m2flow.errors import BrokenChannel, M2FlowError, error_from_record, unexpected
from m2flow.macro.graph import Call, MacroGraph, Observation, user_site
from m2flow.macro.session import Backend
from m2flow.micro.controller.call_futures import CallFutures
from m2flow.micro.controller.checkpoint_coordinator import CheckpointCoordinator, failed_checkpoint
from m2flow.micro.controller.controller_core import (
    AllSaved,
    Announced,
    CallForgotten,
    ControllerCore,
    Delivered,
    Effect,
    LossSettled,
    Post,
    Rejected,
    Resolved,
    SaveAll,
    SendRows,
    Submitted,
    Watchdog,
)
from m2flow.micro.controller.journal_records import JournalRecords
from m2flow.micro.controller.launcher import Launcher
from m2flow.micro.controller.online_replanning import OnlineReplanning, SearchAnew
from m2flow.micro.controller.supervisor import ScalingLoop, Supervisor, requests
from m2flow.micro.lowering.passes import Lowering
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.call_semantics import call_body, num_tokens_of
from m2flow.micro.protocol.events import (
    CONTROLLER,
    CheckpointBegun,
    CheckpointDue,
    CheckpointFailed,
    CheckpointSaved,
    Released,
    Send,
    Stopping,
    Wanted,
)
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.protocol.update_semantics import UpdateSteps
from m2flow.micro.records.flow_record import FlowLog, Logged
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.rundir import naming_disk_errors
from m2flow.micro.scheduler.partial_rollouts import Deadlines
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.observe.spans import Recorder
from m2flow.recipe import Sampling, longest_response
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, RunSettings

# ---- the thread


_FLOW = "flow"
_STOP_BUSY_S, _STOP_IDLE_S = 3.0, 30.0
"""How long workers get at the end of a run to send their last spans: while some are busy; when all are idle, so that only a loaded machine
delays them."""
_SEND_TIMEOUT_S = 0.5
"""A worker that accepts no rows for so long is checked for having died."""


class Controller:
    """Run the workers of one plan. The flow's thread calls `open`, then `post`, and `close` at the end, whatever ended the run."""

    def __init__(
        self,
        plan: Plan,
        spec: ClusterSpec,
        settings: RunSettings,
        launcher: Launcher,
        journal: Journal,
        futures: CallFutures,
        coordinator: CheckpointCoordinator,
        restored: Mapping[str, int],
        warn: Callable[[str], None],
        search_anew: SearchAnew | None = None,
    ) -> None:
        """`search_anew`: searches for a placement again, with what the run has measured so far."""
        self._plan = plan
        self._settings = settings
        self._launcher = launcher
        self._journal = journal
        self._futures = futures
        self._coordinator = coordinator
        self._scheduler = Scheduler(plan, deterministic=settings.deterministic, restored=restored, max_attempts=settings.sample_attempts)
        place, keys = launcher.place, launcher.keys
        port = f":{spec.channels.port}" if spec.channels.port and spec.transport == "tcp" else ""
        self._listener = LinkListener(launcher.token, place + port, keys=keys)
        self._inbox = ZmqInbox(place, keys=keys)
        self._outbox = ZmqOutbox(CONTROLLER, timeout_s=_SEND_TIMEOUT_S, keys=keys)
        self._waker = LinkDialer(keys=keys)
        self._posts: queue.SimpleQueue[Post] = queue.SimpleQueue()
        self._records = JournalRecords(journal, launcher.run_dir)
        self._core = ControllerCore(plan, self._scheduler, self._records, Deadlines())
        self._supervisor = Supervisor(plan, settings, launcher, self._listener, self._outbox, self._core, journal, warn)
        self._scaling = ScalingLoop(spec, plan, self._supervisor, self._scheduler, journal)
        self._replanning = OnlineReplanning(plan, spec, launcher.run_dir, journal, search_anew)
        self._watchdog = Watchdog()
        self._warn = warn
        self._recorder = Recorder(CONTROLLER)
        self.program_s: dict[str, float] = {}
        """Seconds that the flow's own Python took, by what it did next. The flow's thread writes it, the controller's counts it."""
        self._looked_s = 0.0
        self._flow_log = FlowLog(futures, journal.logged)
        self._is_stopping = False
        self._address = ""
        self._thread = threading.Thread(target=self._run, name="m2flow-controller", daemon=True)

    # The flow's thread

    def open(self) -> None:
        """Start the workers and wait until all have loaded their engines.

        Raises:
            M2FlowError: a worker could not start; the message is its own. WorkerError: one died, or did not come up in time.
        """
        address = self._listener.open()
        self._waker.open(address, _FLOW, self._launcher.token)
        self._supervisor.set_own_address(self._inbox.open())
        self._address = address
        self._thread.start()
        self._futures.wait_ready(self._settings.start_timeout_s)

    def post(self, *posts: Post) -> None:
        """Hand posts to the controller's thread, in this order."""
        for post in posts:
            self._posts.put(post)
        self._waker.send(b"")

    def wind_down(self) -> None:
        """Finish the updates that have begun and wait for them; give up everything else. Nothing may be submitted afterwards."""
        if self._supervisor.is_ready and self._thread.is_alive():
            self.post(Stopping())
            self._futures.wait_wound_down()

    def holds(self, versions: Mapping[str, int]) -> bool:
        """Whether the trainers hold these weight versions. Valid only when no call is under way."""
        return self._scheduler.holds(versions)

    def save_last(self, due: CheckpointDue | None) -> None:
        """Wait for the checkpoint `due`, or for the one that was under way when the run was wound down."""
        if due is not None:
            self.post(due)
        self._futures.wait_until(lambda: not self._coordinator.is_gathering)

    def abandon(self) -> None:
        """Kill the workers at once, from any thread. The controller can't be used afterwards."""
        self._launcher.stop((), patience_s=0.0)

    def running(self) -> dict[str, str]:
        """Describe in words what each worker is doing now."""
        return dict(self._running)

    _running: Mapping[str, str] = {}

    @property
    def updating(self) -> UpdateSteps | None:
        """How far the running update is, if it takes several optimiser steps."""
        return self._updating

    _updating: UpdateSteps | None = None

    @property
    def unix_ns(self) -> int:
        """The time by the clock of the trace."""
        return self._supervisor.heartbeats.unix_ns

    @property
    def starting(self) -> Mapping[str, str]:
        """What each worker loads; empty once all are up."""
        return {} if self._supervisor.is_ready else self._starting

    _starting: Mapping[str, str] = {}

    def close(self) -> None:
        """Stop the workers, wait for them, and kill those that do not end."""
        self._is_stopping = True
        self._launcher.give_up()
        if self._thread.is_alive():
            self._waker.send(b"")
            self._thread.join()
        self._launcher.stop(self._supervisor.exiting)
        self._waker.close()
        self._listener.close()
        self._inbox.close()
        self._outbox.close()
        with contextlib.suppress(M2FlowError, OSError):  # What can't be written must not hide why the run failed.
            for worker in self._plan.workers:
                self._records.settle(worker.name, "the run ended")

    # The controller's thread

    def _run(self) -> None:
        try:
            with naming_disk_errors(self._launcher.run_dir):
                self._starting = self._supervisor.starting()  # It may take as long as loading a library.
                self._launcher.start(self._address)  # In this thread no Ctrl-C can come between a spawn and the record of it.
                while not self._is_stopping:
                    self._turn()
                self._report_dropped()
        except BrokenChannel as error:
            self._futures.end(self._supervisor.why(error))
        except M2FlowError as error:
            self._futures.end(error)
        except Exception as error:
            self._futures.end(unexpected("the controller failed", error))
        finally:
            self._stop_workers()

    def _turn(self) -> None:
        wait([self._listener, self._inbox], 0.25)
        self._process_inputs()

    def _process_inputs(self) -> None:
        """Process all posts, messages and rows that have arrived, and what time alone has brought about."""
        core = self._core
        while not self._posts.empty():
            core.now_s = time.monotonic()
            self._carry_out(core.post(self._posts.get()))
        self._carry_out(core.flush())
        for peer, body in self._listener.receive(0.0):
            heard = self._supervisor.heard(peer, body) if peer != _FLOW else None
            if heard is not None:
                self._received(*heard)
        for parcel in self._inbox.take():
            self._carry_out(core.rows_arrived(parcel.call, parcel.batch, parcel.sender))
        core.now_s = time.monotonic()
        self._carry_out(self._supervisor.check())
        self._carry_out(core.tick())
        self._running, self._updating = self._scheduler.running(), self._scheduler.updating()
        if not self._supervisor.is_ready:
            self._starting = self._supervisor.starting()
        self._coordinator.finish(self._futures.are_well, self._journal.make_durable)
        self._journal.commit_if_due()
        self._every_second(core.now_s)
        if core.is_wound_down:
            self._futures.wound_down()

    def _every_second(self, now_s: float) -> None:
        """Do what is due about once a second: scaling, replanning, the deadlock check, and counters of bounded channels for the trace.

        Raises:
            InternalError: the run is deadlocked.
        """
        if now_s - self._looked_s >= 1.0:
            self._looked_s = now_s
            self._report_dropped()
            if self._supervisor.is_ready:
                for request in requests(self._launcher.run_dir):
                    self._carry_out(request.answered_by(self._supervisor.scale))
            self._carry_out(self._scaling.look(now_s))
            for event in self._replanning.look(now_s):
                self._carry_out(self._core.handle(event))
            halted = self._watchdog.look(self._scheduler.waits(), now_s)
            if halted is not None:
                raise halted
            for channel in self._scheduler.channels():
                place = f"{channel.producer} to {channel.target}"
                self._recorder.count(f"channel samples, {place}", channel.used_samples)
                self._recorder.count(f"channel bytes, {place}", channel.used_bytes)
            for what, seconds in list(self.program_s.items()):
                self._recorder.count(f"program seconds, {what}", round(seconds, 6))
            if len(self._recorder):
                self._journal.spans(self._recorder.drain())

    def _report_dropped(self) -> None:
        """Report messages that were dropped because they did not belong to this run."""
        for dropped in (self._listener.dropped, self._inbox.dropped):
            if news := dropped.news():
                self._journal.incident("dropped", CONTROLLER, news)
                self._warn(f"the controller {news}")

    def _received(self, worker: str, message: m.ToController) -> None:
        self._core.now_s = time.monotonic()
        match message:
            case m.Ready():
                self._carry_out(self._supervisor.came_up(worker, message))
                if self._supervisor.is_ready:
                    self._futures.ready()
            case m.Spans(block=block):
                self._supervisor.heartbeats.recorded(worker, block)
            case m.Goodbye():
                self._carry_out(self._supervisor.said_goodbye(worker))
            case _:
                self._carry_out(self._core.heard(worker, message))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        """Carry out effects in order; messages to one worker that follow each other are sent together."""
        worker, messages = "", list[m.ToWorker]()
        for effect in effects:
            if type(effect) is Send:
                if effect.worker != worker and messages:
                    self._supervisor.tell(worker, *messages)
                    messages = []
                worker = effect.worker
                messages.append(effect.message)
                continue
            if messages:
                self._supervisor.tell(worker, *messages)
                messages = []
            self._act(effect)
        if messages:
            self._supervisor.tell(worker, *messages)

    def _act(self, effect: Effect) -> None:
        match effect:
            case SendRows(to, call, _, rows):
                self._supervisor.send(to, Parcel(call, rows, CONTROLLER))
            case Announced(addresses):
                self._supervisor.announce(addresses)
            case LossSettled(worker):
                self._supervisor.settled(worker)
            case Resolved(call, value):
                self._futures.resolve(call, value)
                self._flow_log.call_ended(call.ordinal)
                self._flow_log.write_due()
            case Rejected(call, error, root):
                self._futures.reject(call, error, root)
                if not effect.stays_open:  # The resumed run logs its numbers, before all that come after them.
                    self._flow_log.call_ended(call.ordinal)
                    self._flow_log.write_due()
            case Delivered(ordinal, rows):
                self._futures.deliver(ordinal, rows)
            case CallForgotten(call):
                self._futures.forget(call)
            case Logged():
                self._flow_log.add(effect)
            case AllSaved(digests):
                self._futures.saved(digests)
            case CheckpointBegun(_, versions):
                self._coordinator.begun(versions)
            case CheckpointSaved(step, role, digest):
                self._coordinator.saved(step, role, digest)
            case CheckpointFailed(step, role, error):
                if self._coordinator.failed(step):
                    self._warn(failed_checkpoint(step, role, error_from_record(error)))
            case _:  # What becomes of samples is in the records.
                pass

    def _stop_workers(self) -> None:
        """Ask all workers to stop, and keep receiving for a moment so that their last spans are stored."""
        self._supervisor.tell_all_to_stop()
        deadline = time.monotonic() + (_STOP_BUSY_S if self._scheduler.running() else _STOP_IDLE_S)
        try:
            while self._supervisor.are_leaving and time.monotonic() < deadline:
                wait([self._listener], 0.1)
                for peer, body in self._listener.receive(0.0):
                    heard = self._supervisor.heard(peer, body) if peer != _FLOW else None
                    if heard is not None and isinstance(heard[1], m.Spans):
                        self._supervisor.heartbeats.recorded(heard[0], heard[1].block)
                    elif heard is not None and isinstance(heard[1], m.Goodbye):
                        self._supervisor.has_left(heard[0])
            self._supervisor.heartbeats.close()
        except (M2FlowError, OSError):
            pass  # The run is over; what is lost here is the end of the trace.
        self._supervisor.tell_all_to_stop()


# ---- the flow's side


_BYTES_PER_TOKEN = 16
"""Bytes of a sample's columns per token: id, log-probability and version 4 each, two masks, and about 2 of text."""

_BETWEEN = "between calls"
"""What the program's time counts for that came before no call: before it waited for a value, or at the end of a step."""


class Lookahead:
    """Limit how many steps Python may run ahead, by staleness and by the memory of samples under way.

    Samples are counted at their longest, since their lengths are not known yet. Above staleness 0 their bytes are kept below
    `budget_bytes`.
    """

    def __init__(self, staleness: int, budget_bytes: int) -> None:
        self._num_ahead = staleness + 1
        self._budget = budget_bytes if staleness else None
        self._bytes: dict[int, int] = {}
        self._longest: dict[int, dict[int, int]] = {}
        """Step -> call -> tokens of its longest row."""

    def add(self, call: Call) -> None:
        """Count a call of the program."""
        rows, sampling = call.options.get("rows"), call.options.get("sampling")
        known = self._longest.setdefault(call.step, {})
        if isinstance(rows, Batch):
            known[call.ordinal] = max(num_tokens_of(rows), default=0)
            return
        known[call.ordinal] = max((step.get(ref.call, 0) for _, ref in call.inputs for step in self._longest.values()), default=0)
        if isinstance(sampling, Sampling):
            known[call.ordinal] += longest_response(call.options)
            size = call.most_rows * known[call.ordinal] * _BYTES_PER_TOKEN
            self._bytes[call.step] = self._bytes.get(call.step, 0) + size

    def due(self, step: int) -> int:
        """Return the step that must be over, with all before it, before Python goes on after submitting `step`; below 0: none."""
        due = step - self._num_ahead
        while self._budget is not None and due < step and sum(self._bytes.get(s, 0) for s in range(due + 1, step + 1)) > self._budget:
            due += 1
        self._bytes = {s: size for s, size in self._bytes.items() if s > due}
        self._longest = {s: known for s, known in self._longest.items() if s > due or s < 0}
        return due


class PlannedBackend(Backend):
    """Execute a program's calls on the workers of a plan. The flow's thread alone uses it."""

    def __init__(
        self, flow: str, lowering: Lowering, controller: Controller, futures: CallFutures, journal: Journal, ahead: Lookahead
    ) -> None:
        self._flow = flow
        self._lowering = lowering
        self._controller = controller
        self._futures = futures
        self._journal = journal
        self._ahead = ahead
        self._segment: list[Call] = []
        self._bodies: dict[int, bytes] = {}
        self._recalled: dict[int, tuple[Batch, Sequence[int]]] = {}
        """Generate calls that an earlier attempt completed: their results, and samples left to later calls (partial rollouts)."""
        self._lost: dict[int | str, tuple[int, M2FlowError]] = {}
        """Calls that failed in an earlier attempt, calls that need them, and resources that they should have written -> the call that
        failed by itself, and its error. The scheduler never hears of these calls."""
        self._later: list[Post] = []
        self._aligned: set[int] = set()
        """Calls with rows that the program can still reach."""
        self._num_steps = 0
        """Steps whose calls are all submitted."""
        self._ends: list[tuple[int, int]] = []
        """Steps that may be under way, with the number of calls that the program had made at the end of each."""
        self._logged: list[tuple[int, int]] = []
        """Calls whose numbers are logged, and calls with an effect before a log, with the number of calls of the steps that had ended
        before."""
        self._resumed_s: float | None = None
        """When the program last went on: it had been given a value, or had made a call. None: it has made no call yet."""

    def submit(self, call: Call) -> None:
        self._count_program(f"{call.name} {call.site}")
        self._lowering.check(call)
        lost = self._inherited(call) if self._lost else None
        if lost is not None:
            self.fail(call, *lost)
            self._journal.call_added(call)
            self._journal.call_failed(call, lost[1])
            return
        self._futures.submitted(call)
        self._bodies[call.ordinal] = call_body(call)
        if call.is_aligned:
            self._aligned.add(call.ordinal)
        self._segment.append(call)
        self._ahead.add(call)

    def _count_program(self, what: str) -> None:
        """Count the time since the program went on as its own."""
        now_s = time.monotonic()
        seconds = self._controller.program_s
        if self._resumed_s is not None:
            seconds[what] = seconds.get(what, 0.0) + now_s - self._resumed_s
        self._resumed_s = now_s

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """The program waits in the block; what it did before that counts as its own time."""
        self._count_program(_BETWEEN)
        try:
            yield
        finally:
            self._resumed_s = time.monotonic()

    def recall(self, call: Call, rows: Batch, left: Sequence[int]) -> None:
        self._recalled[call.ordinal] = rows, left
        self.submit(call)

    def fail(self, call: Call, root: int, error: M2FlowError) -> None:
        lost_with: list[int | str] = [call.ordinal, *(effect.resource for effect in call.writes)]
        for lost in lost_with:
            self._lost[lost] = root, error
        self._futures.submitted(call)
        self._futures.reject(call, error, root)

    def _inherited(self, call: Call) -> tuple[int, M2FlowError] | None:
        """Return the error of an input or resource of this call that an earlier attempt lost; of several the earliest."""
        needed = [*(ref.call for _, ref in call.inputs), *(effect.resource for effect in call.reads)]
        return min((self._lost[one] for one in needed if one in self._lost), key=lambda found: found[0], default=None)

    def begin_checkpoint(self, due: CheckpointDue) -> None:
        """Begin a checkpoint after the calls so far."""
        self._flush()
        self._controller.post(due)

    def value(self, ordinal: int) -> object:
        self._flush()
        with self._waiting():
            value = self._futures.wait_value(ordinal)
            if ordinal not in self._aligned:
                return value
            self._controller.post(Wanted(ordinal))
            return self._futures.wait_rows(ordinal)

    def observed(self, observation: Observation) -> None:
        pass

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        before, num_calls, where = self._futures.num_ended, self._futures.num_added, user_site().describe()
        self._later += [Logged(step, name, source, before, num_calls, where) for name, source in values.items()]
        awaited = [*(source[0] for source in values.values() if not isinstance(source, float)), *self._futures.open_effects]
        self._logged += [(ordinal, before) for ordinal in awaited if (ordinal, before) not in self._logged]

    def release(self, ordinal: int) -> None:
        self._aligned.discard(ordinal)
        self._later.append(Released(ordinal))

    def end_step(self, step: int) -> None:
        self._flush()
        self._futures.step_ended()
        self._ends.append((step, self._futures.num_ended))
        self._logged = [(ordinal, before) for ordinal, before in self._logged if not self._futures.has_ended(ordinal)]
        due = self._ahead.due(step)
        with self._waiting():
            self._futures.wait_step(due)
        self._num_steps = step + 1
        self._journal.tally.steps_done(due + 1)
        self._ends = [(ended, num_calls) for ended, num_calls in self._ends if ended > due]

    def raise_due(self) -> None:
        if any(isinstance(post, Logged) for post in self._later):
            self._flush()
        with self._waiting():
            self._futures.wait_ended(self._logged)  # Sequential execution has written them by now.
        for step, num_calls in self._ends:
            if self._futures.are_well(num_calls):
                self._journal.tally.steps_done(step + 1)
        self._futures.wait_due()

    def finish(self) -> None:
        self._flush()
        with self._waiting():
            self._futures.wait_all()
        self._journal.tally.steps_done(self._num_steps)

    def save(self, path: Path) -> Mapping[str, str]:
        """Write every role's model; return role -> digest of its weights."""
        self._controller.post(SaveAll(path))
        return self._futures.wait_saved()

    def _flush(self) -> None:
        """Lower the gathered calls and post them to the controller, followed by what may only come after them."""
        calls, self._segment = self._segment, []
        posts: list[Post] = []
        if calls:
            stages = self._lowering.stages(MacroGraph(self._flow, tuple(calls)))
            for call, stage in zip(calls, stages, strict=True):
                posts.append(Submitted(call, stage, self._bodies.pop(call.ordinal), *self._recalled.pop(call.ordinal, (None, ()))))
        later, self._later = self._later, []
        self._controller.post(*posts, *later)
