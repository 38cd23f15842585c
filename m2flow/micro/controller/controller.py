"""The controller: the thread that carries out what the scheduler decides.

flow thread --post--> Controller --events--> Scheduler --commands--> Controller --messages--> workers

It owns the links and the journal, and decides nothing. Results go into `Outcomes`, where the flow's thread waits for them. Workers that die
and come back are the crew's (`m2flow.micro.controller.supervisor`); when the run can't go on, every wait is answered with the reason.
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
from m2flow.micro.controller.autoscaler import Staffing, requests
from m2flow.micro.controller.call_futures import CallFutures
from m2flow.micro.controller.checkpoint_coordinator import Keeper
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
from m2flow.micro.records.rundir import naming_a_full_disk
from m2flow.micro.scheduler.deadlines import Deadlines
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.scheduler.waiting import Wait, describe_waits, find_deadlock
from m2flow.observe.spans import Recorder, now_ns
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, RunSettings

PATIENCE_S = 3.0
"""A ring that holds for so long, with nothing in it changed, is no moment between two messages."""


@final
class Watchdog:
    """Looks again and again."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._ring: list[Wait] = []
        self._since_s = 0.0

    def look(self, waits: Sequence[Wait], now_s: float) -> InternalError | None:
        """The ring of waits that has held for long enough, as an error; None if there is none."""
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
class Waiting:
    """Of one run."""

    def __init__(self) -> None:
        self._made_ns: dict[int, int] = {}
        """Generation -> when it was called."""

    def made(self, call: Call) -> None:
        """The program has made a call."""
        if call.engine == "rollout":
            self._made_ns[call.ordinal] = now_ns()

    def sent(self, task: m.Generate) -> m.Generate:
        """A task that is about to be sent, with how long its samples waited."""
        made_ns = self._made_ns.get(task.call)
        return task if made_ns is None else msgspec.structs.replace(task, waited_us=(now_ns() - made_ns) // 1000)

    def forget(self, call: int) -> None:
        self._made_ns.pop(call, None)


_FLOW = "flow"
_LEAVES_S, _LEAVES_IDLE_S = 3.0, 30.0
"""For who is to leave to say what it has recorded: in the middle of something; with nothing to do, when only a busy machine delays it."""
_ASKS_AFTER_S = 0.5
"""While a worker takes no rows for so long, it is looked whether it is dead."""


@dataclass(frozen=True)
class Submitted:
    """A call with its stage, and its body as the workers will get it."""

    call: Call
    stage: Stage
    body: bytes
    rows: Batch | None = None
    """The result of a generation of a line that was over before."""
    left: Sequence[int] = ()
    """Samples that it left."""


@dataclass(frozen=True)
class SaveAll:
    """Write every role's model under this directory; answered in `Outcomes.saved`."""

    path: Path


Post = Submitted | Logged | SaveAll | Wanted | Released | CheckpointDue | Stopping


class Controller:
    """Runs the workers of one plan. `open` from the flow's thread, then `post`; `close` at the end, however it came."""

    def __init__(
        self,
        plan: Plan,
        spec: ClusterSpec,
        settings: RunSettings,
        launcher: Launcher,
        journal: Journal,
        outcomes: CallFutures,
        keeper: Keeper,
        restored: Mapping[str, int],
        warn: Callable[[str], None],
        search_anew: SearchAnew | None = None,
    ) -> None:
        """`search_anew`: for a placement, with what the run has seen so far."""
        self._plan = plan
        self._settings = settings
        self._launcher = launcher
        self._journal = journal
        self._outcomes = outcomes
        self._keeper = keeper
        self._scheduler = Scheduler(plan, deterministic=settings.deterministic, restored=restored, max_attempts=settings.sample_attempts)
        place, keys = launcher.place, launcher.keys
        port = f":{spec.channels.port}" if spec.channels.port and spec.transport == "tcp" else ""
        self._listener = LinkListener(launcher.token, place + port, keys=keys)
        self._inbox = ZmqInbox(place, keys=keys)
        self._outbox = ZmqOutbox(CONTROLLER, timeout_s=_ASKS_AFTER_S, keys=keys)
        self._waker = LinkDialer(keys=keys)
        self._posts: queue.SimpleQueue[Post] = queue.SimpleQueue()
        self._gathered: list[Event] = []
        """Of the posts in hand, what the scheduler is to be told."""
        self._rows = RowStore()
        self._crew = Supervisor(plan, settings, launcher, self._listener, self._outbox, self._scheduler, journal, self._sever, warn)
        self._staffing = Staffing(spec, plan, self._crew, self._scheduler, journal)
        self._second_look = OnlineReplanning(plan, spec, launcher.run_dir, journal, search_anew)
        self._calls: dict[int, Call] = {}
        self._bodies: dict[int, bytes] = {}
        self._custody = SampleLifecycle(journal, launcher.run_dir, self._calls)
        self._deadlines, self._waiting = Deadlines(), Waiting()
        self._consuming: dict[int, m.Accumulate] = {}
        self._wanted: set[int] = set()
        """Calls whose rows the program waits for."""
        self._collected = RowStore()
        """What has come of those."""
        self._watchdog = Watchdog()
        self._warn = warn
        self._recorder = Recorder(CONTROLLER)
        self._looked_s = 0.0
        self._logbook = FlowLog(outcomes, journal.logged)
        self._saving: dict[int, tuple[str, m.Save]] = {}
        """Task -> who is to save what."""
        self._saved: dict[str, str] = {}
        self._is_stopping = False
        self._is_winding_down = False
        self._address = ""
        self._thread = threading.Thread(target=self._run, name="m2flow-controller", daemon=True)

    # The flow's thread

    def open(self) -> None:
        """Start the workers and wait until all have loaded their engines.

        Raises:
            M2FlowError: one can't; the message is its own. WorkerError: one died, or did not come up in time.
        """
        address = self._listener.open()
        self._waker.open(address, _FLOW, self._launcher.token)
        self._crew.set_own_address(self._inbox.open())
        self._address = address
        self._thread.start()
        self._outcomes.wait_ready(self._settings.start_timeout_s)

    def post(self, *posts: Post) -> None:
        """Hand these to the controller's thread, in this order."""
        for post in posts:
            self._posts.put(post)
        self._waker.send(b"")

    def wind_down(self) -> None:
        """Finish the updates that have begun, and wait for that; the rest is given up. Nothing may be submitted any more."""
        if self._crew.is_ready and self._thread.is_alive():
            self.post(Stopping())
            self._outcomes.wait_wound_down()

    def holds(self, versions: Mapping[str, int]) -> bool:
        """Whether the trainers have these weights; once nothing is under way."""
        return self._scheduler.holds(versions)

    def save_last(self, due: CheckpointDue | None) -> None:
        """Wait for the checkpoint that is begun now, or was under way when the run was wound down."""
        if due is not None:
            self.post(due)
        self._outcomes.wait_until(lambda: not self._keeper.is_gathering)

    def abandon(self) -> None:
        """End the workers now, whatever they do. From any thread; the controller is of no use afterwards."""
        self._launcher.stop((), patience_s=0.0)

    def running(self) -> dict[str, str]:
        """What each worker does now, in words."""
        return dict(self._running)

    _running: Mapping[str, str] = {}

    def close(self) -> None:
        """Stop the workers and wait for them; kill those that do not end."""
        self._is_stopping = True
        if self._thread.is_alive():
            self._waker.send(b"")
            self._thread.join()
        self._launcher.stop(self._crew.leaving)
        self._waker.close()
        self._listener.close()
        self._inbox.close()
        self._outbox.close()
        with contextlib.suppress(M2FlowError, OSError):  # What can't be written must not hide why the run failed.
            for worker in self._plan.workers:
                self._custody.settle(worker.name, "the run ended")

    # The controller's thread

    def _run(self) -> None:
        try:
            with naming_a_full_disk(self._launcher.run_dir):
                self._launcher.start(self._address)  # Here, where no Ctrl-C can come between a process and the note of it.
                while not self._is_stopping:
                    self._turn()
                self._tell_of_dropped()
        except BrokenChannel as error:
            self._outcomes.end(self._crew.why(error))
        except M2FlowError as error:
            self._outcomes.end(error)
        except Exception as error:
            self._outcomes.end(unexpected("the controller failed", error))
        finally:
            self._stop_workers()

    def _turn(self) -> None:
        wait([self._listener, self._inbox], 0.25)
        self._take_in()

    def _take_in(self) -> None:
        """All that has come by now."""
        while not self._posts.empty():
            self._posted(self._posts.get())
        self._handle_gathered()
        for peer, body in self._listener.receive(0.0):
            heard = self._crew.heard(peer, body) if peer != _FLOW else None
            if heard is not None:
                self._received(*heard)
        for parcel in self._inbox.take():
            self._collect(parcel)
        self._tell_of(self._crew.check())
        if late := self._deadlines.due(time.monotonic()):
            self._handle(*late)
        self._running = self._scheduler.running()
        self._keeper.finish(self._outcomes.are_well, self._journal.make_durable)
        self._journal.commit_if_due()
        self._look_for_a_halt(time.monotonic())
        if self._is_winding_down and not self._scheduler.has_calls:
            self._outcomes.wound_down()

    def _tell_of(self, events: Iterable[Event]) -> None:
        """Workers are lost, or here again."""
        for event in events:
            if isinstance(event, WorkerLost):
                event = msgspec.structs.replace(event, unreported=self._custody.settle(event.worker, f"{event.worker} was lost"))
            self._handle(event)
            if isinstance(event, WorkerJoined):
                for worker, message in self._saving.values():
                    if worker == event.worker:
                        self._crew.tell(worker, message)

    def _look_for_a_halt(self, now_s: float) -> None:
        """Raises InternalError: everybody waits for everybody. Room in limited channels goes into the trace."""
        if now_s - self._looked_s >= 1.0:
            self._looked_s = now_s
            self._tell_of_dropped()
            if self._crew.is_ready:
                for request in requests(self._launcher.run_dir):
                    self._tell_of(request.answered_by(self._crew.scale))
            self._tell_of(self._staffing.look(now_s))
            self._tell_of(self._second_look.look(now_s))
            halted = self._watchdog.look(self._scheduler.waits(), now_s)
            if halted is not None:
                raise halted
            for channel in self._scheduler.channels():
                place = f"{channel.producer} to {channel.target}"
                self._recorder.count(f"channel samples, {place}", channel.used_samples)
                self._recorder.count(f"channel bytes, {place}", channel.used_bytes)
            if len(self._recorder):
                self._journal.spans(self._recorder.drain())

    def _tell_of_dropped(self) -> None:
        """What came in on the controller's sockets and was none of the run's."""
        for dropped in (self._listener.dropped, self._inbox.dropped):
            if news := dropped.news():
                self._journal.incident("dropped", CONTROLLER, news)
                self._warn(f"the controller {news}")

    def _posted(self, post: Post) -> None:
        match post:
            case Submitted(call, stage, body, given, left):
                self._calls[call.ordinal] = call
                self._waiting.made(call)
                self._bodies[call.ordinal] = body
                self._journal.call_added(call)
                if given is not None:
                    self._rows.put(call.ordinal, given)
                    self._gathered.append(Recalled(call, stage, given.ids.tolist(), execute.num_tokens_of(given), list(left)))
                else:
                    self._gathered.append(CallAdded(call, stage))
                restored = self._journal.restored(call, stage)
                if restored is not None:
                    self._gathered.append(restored)
                if given is not None:
                    return
                rows = call.options.get("rows")
                if isinstance(rows, Batch):
                    self._rows.put(call.ordinal, rows)
                    self._gathered.append(Sourced(call.ordinal, rows.ids.tolist(), execute.num_tokens_of(rows)))
            case Logged():
                self._handle_gathered()
                self._logbook.add(post)
            case SaveAll(path):
                self._handle_gathered()
                self._save(path)
            case Wanted(ordinal):
                self._wanted.add(ordinal)
                self._gathered.append(post)
                self._handle_gathered()
                if not self._scheduler.num_rows(ordinal):
                    self._wanted.discard(ordinal)
                    self._outcomes.deliver(ordinal, Batch.concat([]))
            case Stopping():
                self._handle_gathered()
                self._is_winding_down = True
                self._handle(post)
            case Released() | CheckpointDue():
                self._gathered.append(post)

    def _handle_gathered(self) -> None:
        """The calls of a segment come together, and so do those that the program has let go of."""
        events, self._gathered = self._gathered, []
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
                self._ship(Parcel(push.call, self._custody.read_back(push), CONTROLLER), push.to)
            case Send(worker, message):
                if isinstance(message, m.Generate):
                    message = self._waiting.sent(message)
                    self._custody.begins(worker, message)
                    self._deadlines.began(message, self._calls[message.call], time.monotonic())
                if isinstance(message, m.Accumulate):
                    self._consuming[message.number] = message
                self._crew.tell(worker, message, self._bodies.__getitem__)
            case Resolve(ordinal, value, chosen):
                done = self._calls[ordinal]
                if chosen is not None:
                    self._journal.gave(done, chosen)
                self._journal.call_done(done, value)
                self._outcomes.resolve(done, value)
                self._logbook.call_ended(ordinal)
                self._logbook.write_due()
            case Reject(ordinal, error, root):
                # Its tasks that are given up end as done, but nothing was trained on.
                self._consuming = {number: task for number, task in self._consuming.items() if task.call != ordinal}
                if not isinstance(error, RunInterrupted):  # What was only given up is as it was, for a resume.
                    self._journal.call_failed(self._calls[ordinal], error)
                self._outcomes.reject(self._calls[ordinal], error, root)
                if not isinstance(error, RunInterrupted):  # Its numbers are logged by who goes on, before all that comes after them.
                    self._logbook.call_ended(ordinal)
                    self._logbook.write_due()
            case Discarded() | Dropped() | Late() | Given() | Expired():
                self._custody.decided(command)
            case CheckpointBegun():
                self._keeper.begun(command.versions)
            case CheckpointSaved():
                self._keeper.saved(command.step, command.role, command.digest)
            case Forgotten(ordinal):
                self._journal.forgotten(ordinal)
                self._outcomes.forget(self._calls.pop(ordinal))
                self._waiting.forget(ordinal)
                del self._bodies[ordinal]
                self._crew.forget_call(ordinal)

    def _received(self, worker: str, message: m.ToController) -> None:
        match message:
            case m.Ready():
                self._tell_of(self._crew.came_up(worker, message))
                if self._crew.is_ready:
                    self._outcomes.ready()
            case m.Missing():
                self._crew.answered(worker, message)
            case m.GivenUp():
                self._custody.told(message)
            case m.Finished() | m.Aborted() | m.Flushed():
                self._custody.told(message)
                self._handle(FromWorker(worker, message))
            case m.Load() | m.Preempted():
                self._handle(FromWorker(worker, message))
            case m.TaskDone() if message.task in self._saving:
                _, save = self._saving.pop(message.task)
                self._saved[save.role] = str(message.result)
                if not self._saving:
                    self._outcomes.saved(self._saved)
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
                self._crew.vitals.recorded(worker, block)
            case m.Fatal(error=error):
                raise error_from_record(error)
            case m.Goodbye():
                self._tell_of(self._crew.said_goodbye(worker))

    def _ship(self, parcel: Parcel, to: str) -> None:
        """Send rows to a worker, or to where the program waits for them."""
        if to == CONTROLLER:
            self._collect(parcel)
        else:
            self._crew.send(to, parcel)

    def _collect(self, parcel: Parcel) -> None:
        """Rows that the program waits for. They come for the second time if their first sender has died."""
        call = parcel.call
        if call not in self._wanted or not self._crew.counts(parcel):
            return
        self._collected.put(call, parcel.batch, parcel.sender)
        ids = self._collected.ids(call)
        if len(ids) >= self._scheduler.num_rows(call):
            self._outcomes.deliver(call, self._collected.get(call, ids))
            self._collected.forget(call)
            self._wanted.discard(call)

    def _sever(self, tag: str, sent: Mapping[int, Iterable[int]]) -> Mapping[int, list[int]]:
        """A process has died that sent rows which the program waits for; those that have not come."""
        return self._collected.sever(tag, {call: rows for call, rows in sent.items() if call in self._wanted})

    def _save(self, path: Path) -> None:
        """The trained model of each role; of a role that is only sampled from, the digest of its weights."""
        for worker in self._plan.workers:
            for slot in worker.engines:
                is_first = slot.role not in [save.role for _, save in self._saving.values()]
                if slot.kind == "train" or (slot.kind == "rollout" and is_first and not self._is_trained(slot.role)):
                    number = -1 - len(self._saving)
                    message = m.Save(number, -1, slot.role, str((path / slot.role).resolve()))
                    self._saving[number] = worker.name, message
                    self._crew.tell(worker.name, message)
        if not self._saving:
            self._outcomes.saved({})

    def _is_trained(self, role: str) -> bool:
        return any(slot.kind == "train" and slot.role == role for worker in self._plan.workers for slot in worker.engines)

    def _stop_workers(self) -> None:
        """Ask all to finish; take what they still say for a moment, so that their spans are kept. Then let them go."""
        self._crew.tell_all_to_stop()
        deadline = time.monotonic() + (_LEAVES_S if self._scheduler.running() else _LEAVES_IDLE_S)
        try:
            while self._crew.are_leaving and time.monotonic() < deadline:
                wait([self._listener], 0.1)
                for peer, body in self._listener.receive(0.0):
                    heard = self._crew.heard(peer, body) if peer != _FLOW else None
                    if heard is not None and isinstance(heard[1], m.Spans):
                        self._crew.vitals.recorded(heard[0], heard[1].block)
                    elif heard is not None and isinstance(heard[1], m.Goodbye):
                        self._crew.has_left(heard[0])
            self._crew.vitals.close()
        except (M2FlowError, OSError):
            pass  # The run is over; what is lost here is the end of the trace.
        self._crew.tell_all_to_stop()
