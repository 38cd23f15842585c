"""Run a plan: a thread that feeds events to the scheduler and carries out the commands that it answers.

    flow thread --post--> Controller --events--> Scheduler --commands--> Controller --messages--> workers
                <-- CallFutures, where the flow's thread waits --

The controller owns the links, the journal and the rows that the program itself supplies or waits for, and takes no scheduling decisions.
Worker processes that die and come back are `m2flow.micro.controller.supervisor`'s. When the run can't go on, every wait of the flow's
thread is answered with the reason.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec

from m2flow.channels.channel import Parcel
from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.channels.zeromq import LinkDialer, LinkListener, wait
from m2flow.errors import BrokenChannel, InternalError, M2FlowError, RunInterrupted, error_from_record, unexpected
from m2flow.macro.graph import Call
from m2flow.micro.controller.autoscaler import ScalingLoop, requests
from m2flow.micro.controller.call_futures import CallFutures
from m2flow.micro.controller.checkpoint_coordinator import CheckpointCoordinator
from m2flow.micro.controller.launcher import Launcher
from m2flow.micro.controller.online_replanning import OnlineReplanning, SearchAnew
from m2flow.micro.controller.sample_lifecycle import SampleLifecycle
from m2flow.micro.controller.supervisor import Supervisor
from m2flow.micro.protocol import execute
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import (
    CONTROLLER,
    LEDGER,
    CallAdded,
    CheckpointBegun,
    CheckpointDue,
    CheckpointSaved,
    Command,
    Discarded,
    Dropped,
    Event,
    Expired,
    Forgotten,
    FromWorker,
    Given,
    Late,
    Recalled,
    Reject,
    Released,
    Resolve,
    Send,
    Sourced,
    Stopping,
    Wanted,
    WorkerJoined,
    WorkerLost,
)
from m2flow.micro.protocol.plan import Plan, Stage
from m2flow.micro.protocol.row_store import RowStore
from m2flow.micro.records.flow_log import FlowLog, Logged
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.rundir import naming_disk_errors
from m2flow.micro.scheduler.deadlines import Deadlines
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.scheduler.waiting import Wait, describe_waits, find_deadlock
from m2flow.observe.spans import Recorder, now_ns
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, RunSettings

PATIENCE_S = 3.0
"""A ring of waits that has not changed for so long is a deadlock, and no transient state between two messages."""


@final
class Watchdog:
    """Detect a deadlock: a ring of waits (`m2flow.micro.scheduler.waiting`) that stays the same for longer than `patience_s`."""

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


@final
class QueueLatency:
    """Measure how long samples wait between their call and the task that generates them."""

    def __init__(self) -> None:
        self._made_ns: dict[int, int] = {}
        """Ordinal of a generate call -> when the program made it."""

    def made(self, call: Call) -> None:
        """Record that the program has made a call."""
        if call.engine == "rollout":
            self._made_ns[call.ordinal] = now_ns()

    def sent(self, task: m.Generate) -> m.Generate:
        """Return the task that is about to be sent with its samples' queueing time filled in."""
        made_ns = self._made_ns.get(task.call)
        return task if made_ns is None else msgspec.structs.replace(task, waited_us=(now_ns() - made_ns) // 1000)

    def forget(self, call: int) -> None:
        self._made_ns.pop(call, None)


_FLOW = "flow"
_STOP_BUSY_S, _STOP_IDLE_S = 3.0, 30.0
"""How long workers get at the end of a run to send their last spans: while some are busy; when all are idle, so that only a loaded machine
delays them."""
_SEND_TIMEOUT_S = 0.5
"""A worker that accepts no rows for so long is checked for having died."""


@dataclass(frozen=True)
class Submitted:
    """A call with its stage, and its body as workers receive it."""

    call: Call
    stage: Stage
    body: bytes
    rows: Batch | None = None
    """Result of a generate call that an earlier attempt at the run had completed."""
    left: Sequence[int] = ()
    """Samples that it left to a later call (partial rollouts)."""


@dataclass(frozen=True)
class SaveAll:
    """Write every role's model under this directory; answered by `CallFutures.saved`."""

    path: Path


Post = Submitted | Logged | SaveAll | Wanted | Released | CheckpointDue | Stopping


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
        self._pending_events: list[Event] = []
        """Events of the posts taken from the queue that the scheduler has not been given yet."""
        self._rows = RowStore()
        self._supervisor = Supervisor(plan, settings, launcher, self._listener, self._outbox, self._scheduler, journal, self._sever, warn)
        self._scaling = ScalingLoop(spec, plan, self._supervisor, self._scheduler, journal)
        self._replanning = OnlineReplanning(plan, spec, launcher.run_dir, journal, search_anew)
        self._calls: dict[int, Call] = {}
        self._bodies: dict[int, bytes] = {}
        self._lifecycle = SampleLifecycle(journal, launcher.run_dir, self._calls)
        self._deadlines, self._queue_latency = Deadlines(), QueueLatency()
        self._consuming: dict[int, m.Accumulate] = {}
        self._wanted: set[int] = set()
        """Calls whose rows the flow's thread waits for."""
        self._collected = RowStore()
        """Rows of `_wanted` calls that have arrived."""
        self._watchdog = Watchdog()
        self._warn = warn
        self._recorder = Recorder(CONTROLLER)
        self._looked_s = 0.0
        self._flow_log = FlowLog(futures, journal.logged)
        self._saving: dict[int, tuple[str, m.Save]] = {}
        """Task number -> the worker that saves, and the message that asks it to."""
        self._saved: dict[str, str] = {}
        self._is_stopping = False
        self._is_winding_down = False
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

    def close(self) -> None:
        """Stop the workers, wait for them, and kill those that do not end."""
        self._is_stopping = True
        if self._thread.is_alive():
            self._waker.send(b"")
            self._thread.join()
        self._launcher.stop(self._supervisor.leaving)
        self._waker.close()
        self._listener.close()
        self._inbox.close()
        self._outbox.close()
        with contextlib.suppress(M2FlowError, OSError):  # What can't be written must not hide why the run failed.
            for worker in self._plan.workers:
                self._lifecycle.settle(worker.name, "the run ended")

    # The controller's thread

    def _run(self) -> None:
        try:
            with naming_disk_errors(self._launcher.run_dir):
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
        while not self._posts.empty():
            self._posted(self._posts.get())
        self._handle_pending()
        for peer, body in self._listener.receive(0.0):
            heard = self._supervisor.heard(peer, body) if peer != _FLOW else None
            if heard is not None:
                self._received(*heard)
        for parcel in self._inbox.take():
            self._collect(parcel)
        self._apply(self._supervisor.check())
        if late := self._deadlines.due(time.monotonic()):
            self._handle(*late)
        self._running = self._scheduler.running()
        self._coordinator.finish(self._futures.are_well, self._journal.make_durable)
        self._journal.commit_if_due()
        self._every_second(time.monotonic())
        if self._is_winding_down and not self._scheduler.has_calls:
            self._futures.wound_down()

    def _apply(self, events: Iterable[Event]) -> None:
        """Tell the scheduler of workers that were lost or have joined; settle the samples of a lost one first."""
        for event in events:
            if isinstance(event, WorkerLost):
                event = msgspec.structs.replace(event, unreported=self._lifecycle.settle(event.worker, f"{event.worker} was lost"))
            self._handle(event)
            if isinstance(event, WorkerJoined):
                for worker, message in self._saving.values():
                    if worker == event.worker:
                        self._supervisor.tell(worker, message)

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
                    self._apply(request.answered_by(self._supervisor.scale))
            self._apply(self._scaling.look(now_s))
            self._apply(self._replanning.look(now_s))
            halted = self._watchdog.look(self._scheduler.waits(), now_s)
            if halted is not None:
                raise halted
            for channel in self._scheduler.channels():
                place = f"{channel.producer} to {channel.target}"
                self._recorder.count(f"channel samples, {place}", channel.used_samples)
                self._recorder.count(f"channel bytes, {place}", channel.used_bytes)
            if len(self._recorder):
                self._journal.spans(self._recorder.drain())

    def _report_dropped(self) -> None:
        """Report messages that were dropped because they did not belong to this run."""
        for dropped in (self._listener.dropped, self._inbox.dropped):
            if news := dropped.news():
                self._journal.incident("dropped", CONTROLLER, news)
                self._warn(f"the controller {news}")

    def _posted(self, post: Post) -> None:
        match post:
            case Submitted(call, stage, body, given, left):
                self._calls[call.ordinal] = call
                self._queue_latency.made(call)
                self._bodies[call.ordinal] = body
                self._journal.call_added(call)
                if given is not None:
                    self._rows.put(call.ordinal, given)
                    self._pending_events.append(Recalled(call, stage, given.ids.tolist(), execute.num_tokens_of(given), list(left)))
                else:
                    self._pending_events.append(CallAdded(call, stage))
                restored = self._journal.restored(call, stage)
                if restored is not None:
                    self._pending_events.append(restored)
                if given is not None:
                    return
                rows = call.options.get("rows")
                if isinstance(rows, Batch):
                    self._rows.put(call.ordinal, rows)
                    self._pending_events.append(Sourced(call.ordinal, rows.ids.tolist(), execute.num_tokens_of(rows)))
            case Logged():
                self._handle_pending()
                self._flow_log.add(post)
            case SaveAll(path):
                self._handle_pending()
                self._save(path)
            case Wanted(ordinal):
                self._wanted.add(ordinal)
                self._pending_events.append(post)
                self._handle_pending()
                if not self._scheduler.num_rows(ordinal):
                    self._wanted.discard(ordinal)
                    self._futures.deliver(ordinal, Batch.concat([]))
            case Stopping():
                self._handle_pending()
                self._is_winding_down = True
                self._handle(post)
            case Released() | CheckpointDue():
                self._pending_events.append(post)

    def _handle_pending(self) -> None:
        """Give the scheduler the pending events in one batch: the calls of a segment, and those that the program has released."""
        events, self._pending_events = self._pending_events, []
        if events:
            self._handle(*events)

    def _handle(self, *events: Event) -> None:
        for command in self._scheduler.handle(*events):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Send(worker, m.Push(call=call, ids=ids, to=to)) if worker == CONTROLLER:
                self._ship(Parcel(call, self._rows.get(call, ids), CONTROLLER), to)
            case Send(worker, m.Forget(call=call)) if worker == CONTROLLER:
                self._rows.forget(call)
            case Send(worker, m.Push() as push) if worker == LEDGER:
                self._ship(Parcel(push.call, self._lifecycle.read_back(push), CONTROLLER), push.to)
            case Send(worker, message):
                if isinstance(message, m.Generate):
                    message = self._queue_latency.sent(message)
                    self._lifecycle.begins(worker, message)
                    self._deadlines.began(message, self._calls[message.call], time.monotonic())
                if isinstance(message, m.Accumulate):
                    self._consuming[message.number] = message
                self._supervisor.tell(worker, message, self._bodies.__getitem__)
            case Resolve(ordinal, value, chosen):
                done = self._calls[ordinal]
                if chosen is not None:
                    self._journal.gave(done, chosen)
                self._journal.call_done(done, value)
                self._futures.resolve(done, value)
                self._flow_log.call_ended(ordinal)
                self._flow_log.write_due()
            case Reject(ordinal, error, root):
                # Cancelled tasks of this call still answer TaskDone, although nothing was trained on their rows.
                self._consuming = {number: task for number, task in self._consuming.items() if task.call != ordinal}
                if not isinstance(error, RunInterrupted):  # An interrupted call stays open in the ledger, for a resume.
                    self._journal.call_failed(self._calls[ordinal], error)
                self._futures.reject(self._calls[ordinal], error, root)
                if not isinstance(error, RunInterrupted):  # The resumed run logs its numbers, before all that come after them.
                    self._flow_log.call_ended(ordinal)
                    self._flow_log.write_due()
            case Discarded() | Dropped() | Late() | Given() | Expired():
                self._lifecycle.decided(command)
            case CheckpointBegun():
                self._coordinator.begun(command.versions)
            case CheckpointSaved():
                self._coordinator.saved(command.step, command.role, command.digest)
            case Forgotten(ordinal):
                self._journal.forgotten(ordinal)
                self._futures.forget(self._calls.pop(ordinal))
                self._queue_latency.forget(ordinal)
                del self._bodies[ordinal]
                self._supervisor.forget_call(ordinal)

    def _received(self, worker: str, message: m.ToController) -> None:
        match message:
            case m.Ready():
                self._apply(self._supervisor.came_up(worker, message))
                if self._supervisor.is_ready:
                    self._futures.ready()
            case m.Missing():
                self._supervisor.answered(worker, message)
            case m.GivenUp():
                self._lifecycle.told(message)
            case m.Finished() | m.Aborted() | m.Flushed():
                self._lifecycle.told(message)
                self._handle(FromWorker(worker, message))
            case m.Load() | m.Preempted():
                self._handle(FromWorker(worker, message))
            case m.TaskDone() if message.task in self._saving:
                _, save = self._saving.pop(message.task)
                self._saved[save.role] = str(message.result)
                if not self._saving:
                    self._futures.saved(self._saved)
            case m.TaskFailed() if message.task in self._saving:
                raise error_from_record(message.error)
            case m.TaskDone() | m.TaskFailed():
                task = self._consuming.pop(message.task, None)
                if task is not None and isinstance(message, m.TaskDone):
                    self._journal.consumed(self._calls[task.call], task.epoch, task.ids)
                if isinstance(message, m.TaskFailed) and message.row >= 0 and message.call in self._calls:
                    self._journal.sample_failed(self._calls[message.call], message.row, message.error.what)
                self._handle(FromWorker(worker, message))
            case m.Spans(block=block):
                self._supervisor.heartbeats.recorded(worker, block)
            case m.Fatal(error=error):
                raise error_from_record(error)
            case m.Goodbye():
                self._apply(self._supervisor.said_goodbye(worker))

    def _ship(self, parcel: Parcel, to: str) -> None:
        """Send rows to a worker, or deliver them here where the flow's thread waits for them."""
        if to == CONTROLLER:
            self._collect(parcel)
        else:
            self._supervisor.send(to, parcel)

    def _collect(self, parcel: Parcel) -> None:
        """Store rows that the flow's thread waits for. Rows may arrive twice: their first sender may have died after sending some."""
        call = parcel.call
        if call not in self._wanted or not self._supervisor.counts(parcel):
            return
        self._collected.put(call, parcel.batch, parcel.sender)
        ids = self._collected.ids(call)
        if len(ids) >= self._scheduler.num_rows(call):
            self._futures.deliver(call, self._collected.get(call, ids))
            self._collected.forget(call)
            self._wanted.discard(call)

    def _sever(self, tag: str, sent: Mapping[int, Iterable[int]]) -> Mapping[int, list[int]]:
        """Take nothing more from a dead process; return the rows sent by it that the program waits for and that have not arrived."""
        return self._collected.drop_sent_by(tag, {call: rows for call, rows in sent.items() if call in self._wanted})

    def _save(self, path: Path) -> None:
        """Have each trainer write its role's model; of a role that is only sampled from, ask for the digest of its weights."""
        for worker in self._plan.workers:
            for slot in worker.engines:
                is_first = slot.role not in [save.role for _, save in self._saving.values()]
                if slot.kind == "train" or (slot.kind == "rollout" and is_first and not self._is_trained(slot.role)):
                    number = -1 - len(self._saving)
                    message = m.Save(number, -1, slot.role, str((path / slot.role).resolve()))
                    self._saving[number] = worker.name, message
                    self._supervisor.tell(worker.name, message)
        if not self._saving:
            self._futures.saved({})

    def _is_trained(self, role: str) -> bool:
        return any(slot.kind == "train" and slot.role == role for worker in self._plan.workers for slot in worker.engines)

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
