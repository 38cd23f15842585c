"""Supervise worker processes: detect hung and dead ones by heartbeat and exit code, restart them, and scale their number.

    exit codes, heartbeats --check--> ControllerCore.died --LossSettled--> backoff --> a new process --Ready--> ControllerCore.came_up

A worker that has ended is noticed at once; one that hangs is killed first. If it held state that nobody else has (a trainer), the run
ends or goes back to a checkpoint (`StateLost`). Any other worker is restarted, after a wait that doubles each time, and messages and rows
of its former process no longer count. One that does not come up again is given up. The parts, in this order:

Clock offsets (`ClockOffset`). The clock of a worker on another host is not the controller's, so each heartbeat is answered by an `Echo`
with the controller's time, and spans that the worker recorded are moved by the estimated offset before they are stored
(`HeartbeatMetrics`).

Liveness (`LivenessWatch`). A process counts as hung in one of four ways:

    silent     no heartbeat, which a thread of its own sends: the process is stopped, or something keeps the interpreter's lock
    stopped    silent, and its host reports that a signal stopped it; since a process that waits for a processor is not
               reported so, less patience is enough
    idle       heartbeats, but its main loop makes no turn and no thread uses the processor: it waits for what never comes
    endless    heartbeats and uses the processor, but one turn lasts longer than the run settings allow

A large micro-batch uses the processor (a thread that waits for a GPU does too), and a slow reward is user code, whose time limit is the
flow's: neither is ever idle or endless.

`ClockOffset` and `LivenessWatch` are pure: they are told the time. The controller's thread alone uses this module.

The number of workers that generate is scaled on request from outside, or automatically by what the run has measured.

    m2flow cluster scale --ask--> RUN/control/<number>.ask --requests--> Controller --answered_by--> <number>.answer
    who is at work, now and then --Autoscaler.saw--> windows --decide--> Change --ScalingLoop--> Supervisor.scale

Requests are files: whoever may write to the run's directory may ask, and the controller looks about once a second.

The autoscaler measures over windows how long generation alone kept everybody else waiting. Generation is taken to share out over workers,
so with w of them that part of the time would be w0 / w of what it was with w0. One more joins if the run is then predicted to be shorter
by `_PAYS`, over several windows in a row, and if what that saves within `_HORIZON_S` is more than a worker took to start. One leaves if
without it the run is predicted to be hardly longer (`_IDLE`). Between these two, and for some windows after a change, nothing happens
(hysteresis).

`Autoscaler` is pure: it is told the time. Limits: only the number of workers that generate changes, and so which samples each of them
gets. Which workers train, on which devices, in which layout, with which chunks and over which transports stays as planned; a resume with
another cluster spec plans all of that anew.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, final

import msgspec

from m2flow.channels.channel import Outbox, Parcel
from m2flow.channels.zeromq import LinkListener
from m2flow.errors import BrokenChannel, DecodeError, M2FlowError, SpecError, StateLost, WorkerError
from m2flow.micro.controller.controller_core import ControllerCore, Effect
from m2flow.micro.controller.launcher import Launcher
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import CONTROLLER, WorkerLost
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.protocol.worker_state import rank_tag, split_rank, tag_of, worker_of
from m2flow.micro.records.journal import Journal
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.worker.worker import Peers
from m2flow.observe.spans import SpanBlock, now_ns, unix_anchor_ns
from m2flow.spec import ClusterSpec, RunSettings

# ---- clock offsets

_DRIFT = 15e-6
"""Assumed drift between two clocks, in seconds per second."""
_MOST = 64
"""Exchanges that are kept."""


class Exchange(NamedTuple):
    """One request and its answer, in Unix ns: the outer two times by the asker's clock, the inner two by the answerer's."""

    asked_ns: int
    heard_ns: int
    answered_ns: int
    back_ns: int

    @property
    def offset_ns(self) -> int:
        """Nanoseconds to add to the asker's clock to get the answerer's."""
        return (self.heard_ns - self.asked_ns + self.answered_ns - self.back_ns) // 2

    @property
    def delay_ns(self) -> int:
        """Round-trip time of the messages, without the answerer's own time."""
        return max(self.back_ns - self.asked_ns - (self.answered_ns - self.heard_ns), 0)


@final
class ClockOffset:
    """Estimate how far one process's clock is behind the controller's.

        asker    asked_ns ----request---->  heard_ns       answerer
                  back_ns  <----answer---  answered_ns

    The offset is half of what the two clocks say of both directions. It errs by at most half of the round-trip time, however that was
    spread over the two, so the exchange with the shortest one counts; and since clocks drift apart, an older exchange counts for less.

    Source: Mills et al. 2010, RFC 5905 (NTP version 4), sections 8 (offset, delay) and 10 (the clock filter, the 15 ppm of drift).

    >>> clock = ClockOffset()
    >>> clock.add(Exchange(asked_ns=1_000, heard_ns=5_200, answered_ns=5_300, back_ns=1_500))
    >>> clock.offset_ns, clock.error_ns, clock.correction_ns
    (4000, 201, 4000)
    """

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=_MOST)
        self.offset_ns = 0
        """Nanoseconds to add to its times to get the controller's."""
        self.error_ns: int | None = None
        """Bound on the error of `offset_ns`; None before the first exchange."""

    def add(self, exchange: Exchange) -> None:
        """Take one more exchange into account."""
        self._exchanges.append(exchange)
        now_ns = exchange.back_ns
        best = min(self._exchanges, key=lambda one: _error_ns(one, now_ns))
        self.offset_ns, self.error_ns = best.offset_ns, _error_ns(best, now_ns)

    @property
    def correction_ns(self) -> int:
        """Nanoseconds to move its times by: 0 while the clocks may be the same, as those of processes on one host are."""
        return self.offset_ns if self.error_ns is not None and abs(self.offset_ns) > self.error_ns else 0


def _error_ns(exchange: Exchange, now_ns: int) -> int:
    return exchange.delay_ns // 2 + round(max(now_ns - exchange.back_ns, 0) * _DRIFT) + 1  # 1: rounding of the integer division


# ---- liveness

_IS_WORKING = 0.005
"""Share of one processor above which a process counts as working; heartbeats cost a tenth of this."""


@final
class LivenessWatch:
    """Decide from heartbeats and processor time whether one worker hangs. Made when the worker is up."""

    def __init__(self, now_s: float, *, hung_after_s: float, turn_limit_s: float | None, num_ranks: int = 1) -> None:
        self._hung_after_s = hung_after_s
        self._turn_limit_s = turn_limit_s
        self._seen_s = self._beat_s = self._turn_s = self._idle_s = now_s
        self._num_turns = -1
        self._cpu_s = 0.0
        self._ranks_seen_s = dict.fromkeys(range(1, num_ranks), now_s)
        self._ranks_cpu_s = dict.fromkeys(range(1, num_ranks), 0.0)
        self._places = dict.fromkeys(range(num_ranks), "")

    def seen(self, now_s: float) -> None:
        """Note that something was received from it."""
        self._seen_s = now_s

    def beat(self, now_s: float, num_turns: int, cpu_s: float, *, is_in_users_code: bool, place: str = "") -> None:
        """Note its heartbeat: turns of its main loop so far, processor time of all its threads, and where its trainer says it is."""
        self._seen_s = self._beat_s = now_s
        self._places[0] = place
        cpu_s += sum(self._ranks_cpu_s.values())  # A rank may wait for one that works.
        if num_turns != self._num_turns or is_in_users_code:
            self._num_turns, self._turn_s = num_turns, now_s
            self._idle_s, self._cpu_s = now_s, cpu_s
        elif cpu_s - self._cpu_s > _IS_WORKING * max(now_s - self._idle_s, 1.0):
            self._idle_s, self._cpu_s = now_s, cpu_s

    def rank_beat(self, now_s: float, rank: int, cpu_s: float, place: str = "") -> None:
        """Note the heartbeat of another rank of its trainer. That one has no turns: it waits for rank 0, and only its silence counts."""
        self._ranks_seen_s[rank], self._ranks_cpu_s[rank], self._places[rank] = now_s, cpu_s, place

    def excuse(self, seconds: float) -> None:
        """Do not count these seconds, in which the controller itself was not receiving."""
        self._seen_s += seconds
        self._beat_s += seconds
        self._turn_s += seconds
        self._idle_s += seconds
        for rank in self._ranks_seen_s:
            self._ranks_seen_s[rank] += seconds

    def silent_rank(self, now_s: float) -> int:
        """Return the rank above 0 that is silent; 0 if none is."""
        quietest = min(self._ranks_seen_s, key=self._ranks_seen_s.__getitem__, default=0)
        return quietest if quietest and now_s - self._ranks_seen_s[quietest] > self._hung_after_s else 0

    def silence_s(self, now_s: float, rank: int) -> float:
        """Return the seconds since something was received from a rank."""
        return now_s - (self._ranks_seen_s[rank] if rank else self._seen_s)

    def why_hung(self, now_s: float) -> str:
        """Describe how it hangs, and where the ranks of its trainer are; empty if it does not."""
        how = self._how_hung(now_s)
        places = [f"rank {rank} is at {place}" for rank, place in self._places.items() if place]
        return f"{how} ({'; '.join(places)})" if how and places else how

    def _how_hung(self, now_s: float) -> str:
        if rank := self.silent_rank(now_s):  # Checked first, since the other ranks wait for it.
            return f"has a rank {rank} that gave no sign of life for {now_s - self._ranks_seen_s[rank]:.0f} s"
        if now_s - self._seen_s > self._hung_after_s:
            return f"gave no sign of life for {now_s - self._seen_s:.0f} s"
        if self._beat_s - self._idle_s > self._hung_after_s:
            return f"made no turn for {self._beat_s - self._turn_s:.0f} s and did nothing"
        if self._turn_limit_s is not None and self._beat_s - self._turn_s > self._turn_limit_s:
            return f"was at one turn for {self._beat_s - self._turn_s:.0f} s"
        return ""


# ---- heartbeat metrics

_PERIOD_NS = 1_000_000_000
"""Between two values of a counter."""
_CLOCK_PERIOD_NS = 10_000_000_000
"""Between two values of the clock's counters, which change by drift alone."""
_MOST_HELD = 1000
"""Blocks of spans that are held back until the clock offset is known."""


@dataclass
class _Process:
    clock: ClockOffset = field(default_factory=ClockOffset)
    counted_ns: int = 0
    cpu_s: float = 0.0
    """Processor time at `counted_ns`."""
    clock_counted_ns: int = 0
    held: list[SpanBlock] = field(default_factory=list)
    """Spans that arrived before the clock offset was known."""


@final
class HeartbeatMetrics:
    """Store counters from heartbeats, and workers' spans in the controller's time. The controller's thread alone uses it.

    Heartbeat --heard--> Echo back to the worker, counters to the journal
    SpanBlock of the worker --recorded--> the same in the controller's time, to the journal
    """

    def __init__(self, store: Callable[[SpanBlock], None], answer: Callable[[str, bytes], None]) -> None:
        """
        Args:
            store: takes blocks of spans and counters for the trace.
            answer: sends a body to a peer of the control link. May raise BrokenChannel.
        """
        self._store = store
        self._answer = answer
        self._anchor_ns = unix_anchor_ns()
        self._processes: dict[str, _Process] = {}

    def heard(self, worker: str, peer: str, heartbeat: m.Heartbeat) -> None:
        """Answer a heartbeat from this peer of the link, and store its counters."""
        at_ns = self.unix_ns
        if heartbeat.sent_ns:
            with contextlib.suppress(BrokenChannel):  # It has just ended.
                self._answer(peer, m.encode(m.Echo(heartbeat.sent_ns, at_ns, self.unix_ns)))
        process = self._processes.setdefault(worker, _Process())
        if heartbeat.exchange is not None:
            process.clock.add(Exchange(*heartbeat.exchange))
            self._release(process)
        counts = self._counted(process, heartbeat, at_ns) + self._clock_counted(process, at_ns)
        if counts:
            self._store(SpanBlock(worker, 0, [], [(name, value, at_ns) for name, value in counts]))

    def recorded(self, worker: str, block: SpanBlock) -> None:
        """Store a worker's spans in the controller's time, as soon as its clock offset is known."""
        process = self._processes.setdefault(worker, _Process())
        process.held.append(block)
        if process.clock.error_ns is not None or len(process.held) > _MOST_HELD:
            self._release(process)

    def forget(self, worker: str) -> None:
        """Forget a worker whose process is gone; the next one may have another clock."""
        process = self._processes.pop(worker, None)
        if process is not None:
            self._release(process)

    def close(self) -> None:
        """Store all that is held back: nothing more will arrive."""
        for worker in list(self._processes):
            self.forget(worker)

    def _release(self, process: _Process) -> None:
        held, process.held = process.held, []
        for block in held:
            self._store(msgspec.structs.replace(block, anchor_ns=block.anchor_ns + process.clock.correction_ns))

    def _counted(self, process: _Process, heartbeat: m.Heartbeat, at_ns: int) -> list[tuple[str, float]]:
        passed_ns = at_ns - process.counted_ns
        if passed_ns < _PERIOD_NS:
            return []
        counts = [("cpu seconds", heartbeat.cpu_s)]
        if process.counted_ns:
            counts.append(("cpu cores", round(max(heartbeat.cpu_s - process.cpu_s, 0.0) / (passed_ns / 1e9), 3)))
        process.counted_ns, process.cpu_s = at_ns, heartbeat.cpu_s
        for name, value in (
            ("memory bytes", heartbeat.memory_bytes),
            ("gpu use", heartbeat.gpu_use),
            ("gpu memory bytes", heartbeat.gpu_memory_bytes),
        ):
            if value is not None:
                counts.append((name, value))
        return counts

    def _clock_counted(self, process: _Process, at_ns: int) -> list[tuple[str, float]]:
        clock = process.clock
        if clock.error_ns is None or at_ns - process.clock_counted_ns < _CLOCK_PERIOD_NS:
            return []
        process.clock_counted_ns = at_ns
        return [("clock offset s", clock.offset_ns / 1e9), ("clock error s", clock.error_ns / 1e9)]

    @property
    def unix_ns(self) -> int:
        """Nanoseconds since 1970 by the controller's clock: steps of the host's, after the controller was made, are not in it."""
        return now_ns() + self._anchor_ns


# ---- the supervisor

BEAT = ".beat"
_SETTLES_S = 30.0
"""A dying worker's link breaks first; that its process has ended is known a moment later, which may be long on a busy machine, and on
another host only when its agent reports it, or has been silent for long."""
_LONGEST_WAIT_S = 30.0
_IS_WELL_S = 60.0
"""A process that was up for so long resets the count of deaths in a row."""
_LONGEST_TURN_S = 2.0
"""Turn of the controller's thread: workers are not blamed for their silence during a longer one."""


@dataclass(frozen=True)
class _End:
    """How a process ended, and whether the worker is restarted."""

    how: str
    returns: bool


@dataclass(frozen=True)
class Rollouts:
    """The number of workers that do nothing but generate."""

    num_up: int
    num_away: int
    """Spare workers that may join."""
    start_s: float
    """Longest time that a worker took to come up."""


@final
class Supervisor:
    """Supervise the workers of one plan. `heard` is given what arrives on the control link; `check`, called regularly, returns effects.

    Which workers are up, and what others are told of it, is the core's; how their processes are, and when they restart, is decided here.
    """

    def __init__(
        self,
        plan: Plan,
        settings: RunSettings,
        launcher: Launcher,
        listener: LinkListener,
        outbox: Outbox,
        core: ControllerCore,
        journal: Journal,
        warn: Callable[[str], None],
    ) -> None:
        """`warn`: shows the user a warning."""
        self._warn = warn
        self._settings = settings
        self._launcher = launcher
        self._listener = listener
        self._core = core
        self._scheduler = core.scheduler
        self._journal = journal
        self._num_started = dict.fromkeys([worker.name for worker in plan.workers], 0)
        self._num_ranks = {worker.name: worker.ranks for worker in plan.workers}
        self._peers = Peers(outbox, self._note_dead)
        self._watches: dict[str, LivenessWatch] = {}
        self._up_s: dict[str, float] = {}
        self._ends: dict[str, _End] = {}
        """Dead worker -> how it ended; until it is up again."""
        self._due_s: dict[str, float] = {}
        """Lost worker -> when it is to be restarted."""
        self._starting_s: dict[str, float] = {}
        self._num_deaths: Counter[str] = Counter()
        """Deaths in a row, none of them after `_IS_WELL_S`."""
        self._gone: set[str] = set()
        self._away = {worker.name for worker in plan.workers if worker.is_spare}
        """Spare workers: they may join, and run no process."""
        self._leaving: set[str] = set()
        """Workers that were told to leave, and whose loss the scheduler has not been told yet."""
        self._rollouts = [worker.name for worker in plan.workers if {slot.kind for slot in worker.engines} == {"rollout"}]
        self._samples_elsewhere = any(
            slot.kind == "rollout" for worker in plan.workers if worker.name not in self._rollouts for slot in worker.engines
        )
        self._loads = {worker.name: worker.loads for worker in plan.workers if not worker.is_spare}
        self._loading: dict[str, str] = {}
        """Worker -> how far the model that it loads is, in words."""
        self._was_ready = False
        self._began_s = time.monotonic()
        self._start_s = 0.0
        self._checked_s = time.monotonic()
        self.heartbeats = HeartbeatMetrics(journal.spans, listener.send)

    # The link

    def set_own_address(self, address: str) -> None:
        """Set the address of the controller's inbox."""
        self._core.addresses[CONTROLLER] = address

    def heard(self, peer: str, body: bytes) -> tuple[str, m.ToController] | None:
        """Decode what has arrived; return the worker and its message, or None if it is a heartbeat or of a former process.

        What can't be decoded, or comes from no worker of the plan, is dropped and counted.
        """
        try:
            return self._heard(peer, body)
        except DecodeError as error:
            self._listener.dropped.add(f"from {peer[:100]!r}: {error.what}")
            return None

    def _heard(self, peer: str, body: bytes) -> tuple[str, m.ToController] | None:
        try:
            tag, rank = split_rank(peer.removesuffix(BEAT))
        except ValueError:
            raise DecodeError("no worker has such a name") from None
        worker = worker_of(tag)
        if worker not in self._num_started:
            raise DecodeError("no worker has that name")
        if tag != self._tag(worker) or (worker in self._ends and worker not in self._starting_s):
            return None
        now_s, watch = time.monotonic(), self._watches.get(worker)
        if watch is not None and not rank:
            watch.seen(now_s)
        if not body:
            return None
        message = m.decode_to_controller(body)
        if not isinstance(message, m.Heartbeat):
            return worker, message
        self.heartbeats.heard(worker, peer, message)
        if not rank:
            self._loading[worker] = message.loading
        if watch is not None and rank:
            watch.rank_beat(now_s, rank, message.cpu_s, message.place)
        elif watch is not None:
            in_users_code = message.is_in_users_code
            watch.beat(now_s, message.num_turns, message.cpu_s, is_in_users_code=in_users_code, place=message.place)
        return None

    def tell(self, worker: str, *messages: m.ToWorker) -> None:
        """Send messages to a worker together. What is said to a dead worker is void.

        Raises:
            BrokenChannel: the worker is alive and accepts nothing.
        """
        if not self._core.is_up(worker):
            return
        try:
            self._listener.send(self._tag(worker), *map(m.encode, messages))
        except BrokenChannel:
            deadline = time.monotonic() + _SETTLES_S
            while worker not in self._launcher.ended():
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def send(self, tag: str, parcel: Parcel) -> None:
        """Send rows from the controller to a process."""
        self._peers.send(tag, parcel)

    def announce(self, addresses: Mapping[str, str]) -> None:
        """Note which processes take rows now."""
        self._peers.announce(addresses, {})

    def _note_dead(self) -> None:
        for worker in self._launcher.ended():
            self._peers.mark_dead(self._tag(worker))

    # Up and down

    def came_up(self, worker: str, ready: m.Ready) -> list[Effect]:
        """Note that a worker's engines have loaded. The run begins once all are up."""
        self._up_s[worker] = now_s = time.monotonic()
        self._start_s = max(self._start_s, now_s - self._starting_s.get(worker, self._began_s))
        limits = self._settings
        self._watches[worker] = LivenessWatch(
            now_s, hung_after_s=limits.hung_after_s, turn_limit_s=limits.turn_limit_s, num_ranks=self._num_ranks[worker]
        )
        effects = self._core.came_up(worker, self._num_started[worker], ready.address)
        if not self._was_ready:
            self._was_ready = set(self._core.up) == self._num_started.keys() - self._away
            return self._core.begin(sorted(self._away)) if self._was_ready else []
        joins = not self._num_deaths[worker]
        del self._ends[worker], self._starting_s[worker]
        kind = "joined" if joins else "started again"
        self._journal.incident(kind, worker, f"process {self._num_started[worker] + 1}, pid {ready.pid}")
        return effects

    def starting(self) -> dict[str, str]:
        """Describe what each worker loads, or that it is ready."""
        return {name: "ready" if self._core.is_up(name) else self._start_of(name, what) for name, what in self._loads.items()}

    def _start_of(self, worker: str, loads: str) -> str:
        loading = self._loading.get(worker, "")
        return f"{loads}: {loading}" if loading else loads

    @property
    def is_ready(self) -> bool:
        """Whether all workers have come up once."""
        return self._was_ready

    def check(self) -> list[Effect]:
        """Look for dead and hung workers, restart those that are due, and return what follows from it.

        Raises:
            WorkerError: one died before the run began.
        """
        now_s = time.monotonic()
        pause_s, self._checked_s = now_s - self._checked_s - _LONGEST_TURN_S, now_s
        effects: list[Effect] = []
        for watch in self._watches.values() if pause_s > 0 else ():
            watch.excuse(pause_s)
        for worker, how in self._launcher.ended().items():
            if worker not in self._gone and (worker not in self._ends or worker in self._starting_s):
                effects += self._died(worker, how)
        for worker, watch in list(self._watches.items()):
            how = watch.why_hung(now_s)
            if how:
                self._launcher.blame(worker, watch.silent_rank(now_s))
                effects += self._died(worker, how, is_hung=True)
            elif stopped := self._stopped(worker, watch, now_s):
                rank, silent_s = stopped
                self._launcher.blame(worker, rank)
                whose = f"has a rank {rank} that was stopped by a signal" if rank else "was stopped by a signal"
                effects += self._died(worker, f"{whose} and gave no sign of life for {silent_s:.0f} s", is_hung=True)
        for worker, since_s in list(self._starting_s.items()):
            if now_s - since_s > self._settings.start_timeout_s:
                effects += self._died(worker, f"did not come up in {self._settings.start_timeout_s:.0f} s", is_hung=True)
        effects += self._core.settle_losses()
        for worker in [worker for worker, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[worker]
            self._num_started[worker] += 1
            self._starting_s[worker] = now_s
            self._launcher.restart(worker, self._num_started[worker])
        return effects

    def _stopped(self, worker: str, watch: LivenessWatch, now_s: float) -> tuple[int, float] | None:
        """Return a rank of a worker that a signal has stopped, and for how long it has been silent."""
        limit_s = self._settings.stopped_after_s
        silent = [rank for rank in range(self._num_ranks[worker]) if watch.silence_s(now_s, rank) > limit_s]
        found = [rank for rank in self._launcher.stopped(worker) if rank in silent] if silent else []
        return (found[0], watch.silence_s(now_s, found[0])) if found else None

    def settled(self, worker: str) -> None:
        """Plan the restart of a lost worker, or end it for good, now that nothing that it had sent is in doubt."""
        if worker in self._ends:
            self._plan_restart(worker, time.monotonic())
        if worker in self._leaving:
            self._leaving.discard(worker)
            self._away.add(worker)

    def said_goodbye(self, worker: str) -> list[Effect]:
        """Handle a worker that leaves without having been told to: it failed, and could not report why."""
        return self._died(worker, "ended", is_hung=True)

    @property
    def rollouts(self) -> Rollouts:
        """How many workers generate, and how many more could."""
        return Rollouts(sum(map(self._core.is_up, self._rollouts)), len(self._away), self._start_s)

    def scale(self, change: int) -> tuple[list[Effect], str]:
        """Have `change` rollout workers join, or leave if negative; return what follows, and an answer for who asked.

        Raises:
            SpecError: fewer workers than that can join or leave.
        """
        if change >= 0:
            joining = sorted(self._away)[:change]
            if len(joining) < change:
                raise SpecError(
                    f"{len(joining)} more rollout workers can join this run, not {change}",
                    now=f"How many may is in its cluster spec: rollout: {{spare: {change}}}",
                )
            now_s = time.monotonic()
            for worker in joining:
                self._away.discard(worker)
                self._ends[worker], self._num_deaths[worker], self._due_s[worker] = _End("has not joined", returns=True), 0, now_s
            return [], f"{', '.join(joining)} will join" if joining else "nothing is to change"
        there = [worker for worker in self._rollouts if self._core.is_up(worker) and not self._scheduler.is_vital(worker)]
        most = len(there) if self._samples_elsewhere else max(0, len(there) - 1)
        if -change > most:
            raise SpecError(f"{most} rollout workers can leave this run, not {-change}", now="Somebody must be left to generate.")
        removed = there[change:]
        effects: list[Effect] = []
        for worker in removed:
            self._leaving.add(worker)
            effects += self._died(worker, "was told to leave", is_hung=True, may_return=False)
            self._launcher.give_back(worker)
        return effects, f"{', '.join(removed)} left; what they were at goes on elsewhere"

    def why(self, error: M2FlowError) -> M2FlowError:
        """Explain a broken link: the error of the worker that has died, if one has, else the error itself."""
        ended = [worker for worker in self._launcher.ended() if worker not in self._ends]
        return self._error(ended[0], "ended") if ended else error

    def _died(self, worker: str, how: str, *, is_hung: bool = False, may_return: bool = True) -> list[Effect]:
        tag, was_up = self._tag(worker), self._core.is_up(worker)
        named = f"{how} (pid {self._launcher.pid(worker)})"
        doing = self._scheduler.running().get(worker)
        if doing and was_up:
            named += f", in the middle of {doing}"
        if is_hung:
            self._launcher.kill(worker)
        self._journal.incident("lost", worker, named)
        if not self._was_ready:
            raise self._error(worker, how)
        self._num_deaths[worker] = 1 + (0 if self._lived_long(worker) else self._num_deaths[worker])
        end = _End(named, returns=may_return and self._num_deaths[worker] <= self._settings.restarts)
        self._ends[worker] = end
        for name in (rank_tag(tag, rank) for rank in range(self._num_ranks[worker])):
            for peer in (name, name + BEAT):
                self._listener.forget(peer)
        self._peers.mark_dead(tag)
        if may_return and not self._scheduler.is_vital(worker):
            self._warn(f"the worker {worker} {named}; " + ("it is started again" if end.returns else "it is given up"))
        self._watches.pop(worker, None)
        self._starting_s.pop(worker, None)
        self.heartbeats.forget(worker)
        loss = WorkerLost(worker, end.returns, how=named, last_words=self._launcher.log_tail(worker))
        if was_up:
            return self._core.died(loss)
        if end.returns:
            self._plan_restart(worker, time.monotonic())
            return []
        return self._core.lost(loss)

    def _plan_restart(self, worker: str, now_s: float) -> None:
        if self._ends[worker].returns:
            wait_s = self._settings.restart_wait_s * 2.0 ** (self._num_deaths[worker] - 1)
            self._due_s[worker] = now_s + min(wait_s, _LONGEST_WAIT_S)

    def _lived_long(self, worker: str) -> bool:
        return self._core.is_up(worker) and time.monotonic() - self._up_s[worker] > _IS_WELL_S

    def _tag(self, worker: str) -> str:
        return tag_of(worker, self._num_started.get(worker, 0))

    def _error(self, worker: str, how: str) -> WorkerError:
        log = self._launcher.log_path(worker)
        return (StateLost if self._was_ready and self._launcher.has_trainer(worker) else WorkerError)(
            f"the worker {worker} (pid {self._launcher.pid(worker)}) {how}",
            now=f"Samples and rewards up to here are in {log.parent.parent}. Its last words are in {log}.",
            remote=self._launcher.log_tail(worker),
        )

    # Stopping

    def tell_all_to_stop(self) -> None:
        for worker in self._core.up:
            with contextlib.suppress(M2FlowError):  # It may be dead already.
                self._listener.send(self._tag(worker), m.encode(m.Stop()))

    def has_left(self, worker: str) -> None:
        """Note that a worker has said goodbye after it was told to stop."""
        self._gone.add(worker)

    @property
    def are_leaving(self) -> bool:
        """Whether a worker that is up has neither said goodbye nor ended."""
        return bool(set(self._core.up) - self._gone - self._launcher.ended().keys())

    @property
    def exiting(self) -> set[str]:
        """Workers that have said goodbye and end by themselves; the others are to be killed."""
        return self._gone


# ---- requests from outside

_DIRECTORY, _ASK, _ANSWER = "control", ".ask", ".answer"
_LOOKS_S = 0.1


class _Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rollout: int
    """Change of the number of rollout workers."""


_read_ask = msgspec.json.Decoder(_Ask).decode


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    now: str = ""
    is_done: bool = True


_read_answer = msgspec.json.Decoder(_Answer).decode


@final
class Request:
    """A scaling request that is not answered yet."""

    def __init__(self, path: Path, change: int) -> None:
        self._path = path
        self._change = change

    def answered_by(self, scale: Callable[[int], tuple[list[Effect], str]]) -> list[Effect]:
        """Carry out the request with `scale`, write the answer, and return what follows."""
        try:
            effects, what = scale(self._change)
            answer = _Answer(what)
        except SpecError as error:
            effects, answer = [], _Answer(error.what, error.now, is_done=False)
        _write(self._path.with_suffix(_ANSWER), msgspec.json.encode(answer))
        return effects


def requests(run_dir: Path) -> Iterator[Request]:
    """Yield the requests that have arrived, each once. Files that can't be read are passed over."""
    for path in sorted((run_dir / _DIRECTORY).glob(f"*{_ASK}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            change = _read_ask(path.read_bytes()).rollout
            path.unlink()
            yield Request(path, change)


def ask(run_dir: Path, change: int, *, patience_s: float) -> str:
    """Ask a run for `change` more rollout workers, or fewer if negative; wait for its answer and return that.

    Raises:
        SpecError: the request was refused, or nobody has answered: the run is over, or was killed.
    """
    directory = run_dir / _DIRECTORY
    directory.mkdir(exist_ok=True)
    path = directory / f"{time.time_ns()}-{secrets.token_hex(4)}{_ASK}"
    answer = path.with_suffix(_ANSWER)
    _write(path, msgspec.json.encode(_Ask(change)))
    deadline = time.monotonic() + patience_s
    while not answer.exists() and time.monotonic() < deadline:
        time.sleep(_LOOKS_S)
    if not answer.exists():
        path.unlink(missing_ok=True)
        raise SpecError(
            f"{run_dir} has not answered in {patience_s:.0f} s", now="Is it still running? `m2flow doctor RUN` says how it stands."
        )
    said = _read_answer(answer.read_bytes())
    answer.unlink()
    if not said.is_done:
        raise SpecError(said.what, now=said.now)
    return said.what


def _write(path: Path, body: bytes) -> None:
    """Write a file atomically."""
    made = path.with_name(f".{path.name}")
    made.write_bytes(body)
    os.replace(made, path)


# ---- automatic scaling

_PAYS = 0.05
"""Predicted saving, as a share of the run's time, from which a worker is added."""
_IDLE = 0.01
"""Predicted loss, as a share of the run's time, up to which a worker is removed."""
_IN_A_ROW = 3
"""Windows in a row that must agree."""
_HORIZON_S = 600.0
"""Time within which an added worker must have saved its start-up time."""


@dataclass(frozen=True)
class Change:
    """A change of the number of rollout workers, and the reason in words."""

    by: int
    why: str


@final
class Autoscaler:
    """Decide when one run should have one rollout worker more or fewer. Pure.

    Args:
        window_s: length of a window of measurement, in seconds.
    """

    def __init__(self, *, window_s: float = 20.0) -> None:
        self._window_s = window_s
        self._began_s: float | None = None
        self._seen_s = 0.0
        self._alone_s = 0.0
        self._num_up = self._num_down = 0

    def saw(self, now_s: float, *, generates: bool, trains: bool) -> None:
        """Note whether anybody has been generating since the last call, and whether anybody has been training."""
        if self._began_s is None:
            self._began_s = self._seen_s = now_s
        if generates and not trains:
            self._alone_s += now_s - self._seen_s
        self._seen_s = now_s

    def decide(self, now_s: float, *, num_workers: int, num_spare: int, start_s: float) -> Change | None:
        """Return the change to make at the end of a window; None for none, or within a window.

        Args:
            num_workers: workers that generate now. num_spare: workers that could join.
            start_s: seconds that a worker takes to come up.
        """
        if self._began_s is None or now_s - self._began_s < self._window_s:
            return None
        share = self._alone_s / (now_s - self._began_s)
        self._began_s, self._seen_s, self._alone_s = now_s, now_s, 0.0
        shorter = share * (1 - num_workers / (num_workers + 1))
        longer = share * (num_workers / (num_workers - 1) - 1) if num_workers > 1 else 1.0
        self._num_up = self._num_up + 1 if num_spare and shorter >= _PAYS else 0
        self._num_down = self._num_down + 1 if longer <= _IDLE else 0
        seen = f"generation alone took {share:.0%} of the last {self._window_s:.0f} s"
        if self._num_up >= _IN_A_ROW and shorter * _HORIZON_S > start_s:
            self._num_up = self._num_down = 0
            return Change(1, f"{seen}; with {num_workers + 1} rollout workers the run is predicted to take {shorter:.0%} less time")
        if self._num_down >= _IN_A_ROW:
            self._num_up = self._num_down = 0
            return Change(-1, f"{seen}; with {num_workers - 1} rollout workers the run is predicted to take {longer:.1%} more time")
        return None


@final
class ScalingLoop:
    """Have the supervisor carry out what `Autoscaler` decides. The controller's thread calls `look` about once a second."""

    def __init__(self, spec: ClusterSpec, plan: Plan, supervisor: Supervisor, scheduler: Scheduler, journal: Journal) -> None:
        self._autoscaler = Autoscaler(window_s=spec.rollout.replan_s) if spec.rollout.scale == "auto" else None
        kinds = {worker.name: {slot.kind for slot in worker.engines} for worker in plan.workers}
        self._rollouts = {name for name, found in kinds.items() if found == {"rollout"}}
        self._trainers = {name for name, found in kinds.items() if "train" in found}
        self._supervisor = supervisor
        self._scheduler = scheduler
        self._journal = journal

    def look(self, now_s: float) -> list[Effect]:
        """Measure, scale if it is time, and return what follows from workers that leave; those that join report when they are up."""
        if self._autoscaler is None or not self._supervisor.is_ready:
            return []
        busy = self._scheduler.running().keys()
        self._autoscaler.saw(now_s, generates=not busy.isdisjoint(self._rollouts), trains=not busy.isdisjoint(self._trainers))
        there = self._supervisor.rollouts
        change = self._autoscaler.decide(now_s, num_workers=there.num_up, num_spare=there.num_away, start_s=there.start_s)
        if change is None:
            return []
        try:
            effects, what = self._supervisor.scale(change.by)
        except SpecError:  # A worker has left in this moment.
            return []
        self._journal.incident("re-planned", "controller", f"{change.why}: {what}")
        return effects
