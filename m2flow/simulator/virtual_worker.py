"""Simulate one worker: it takes the messages that a real worker takes, and sends the messages that a real one sends, when a real one would.

What messages mean and which task is next is the real worker's own logic (`m2flow.micro.worker.task_queue`); what is done, takes time.

Decoding. A turn decodes one token for each running sample; it takes `step_s + b sample_s` for each role with b samples, since the worker's
loop steps its engines one after the other; those that decode at the same time (`Machine.lanes`) have turns of their own. While no sample
joins or leaves, all turns are alike, so the clock advances from one change to the next. Prefill comes first and holds up decoding. Limits:
a sample joins and leaves in the middle of a turn, so a turn may be shared; the context does not grow; nothing is preempted for lack of
memory, since `max_running` is what fits at the mean length.

Speakers. A turn of another role in an episode (`EpisodeTurn.role`) is decoded by the worker that has that role's engine, this one or the
one that a real episode would ask, in its batch; meanwhile the episode is in none. Limit: an episode that is stopped has the tokens of its
own role alone, and those of the others are spoken again.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, final

from m2flow.channels.weights import Manifest
from m2flow.macro.graph import Call
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import DecodeCost, EpisodeTurn, FunctionCost, ToolCost, TrainCost
from m2flow.micro.protocol.staleness import VersionSpan, is_time_dependent
from m2flow.micro.protocol.worker_state import ROLLOUT, instance_of, stopped_at, worker_of
from m2flow.micro.worker.task_queue import Answer, TaskQueue
from m2flow.samples import group_key
from m2flow.simulator.machines import ROW_BYTES, TOKEN_BYTES, Kind, Machine, RowTimes
from m2flow.simulator.sample_lengths import Drawn
from m2flow.spec import RunSettings

Action = Callable[[], None]


@final
class Clock:
    """A virtual clock with a queue of actions. Starts at 0 seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Action]] = []

    def at(self, when_s: float, action: Action) -> None:
        """Schedule an action; at once if the time is past."""
        self.num_events += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self.num_events, action))

    @property
    def next_s(self) -> float | None:
        """Time of the next action; None: there is none."""
        return self._heap[0][0] if self._heap else None

    def turn(self) -> None:
        """Advance to the next action, and run it."""
        self.now_s, _, action = heapq.heappop(self._heap)
        action()


_NEAR = 1e-9
"""Turns within which two samples end together."""


@dataclass(eq=False)
class SampleRun:
    """A sample on a simulated worker, until it ends or leaves.

    `begun` and `ended` are in turns, not seconds: they give the number of tokens of any part of it. Of an episode that was away `begun` is
    later by as many turns, so that they give it from there on.
    """

    id: int
    role: str
    call: int
    task: int
    num_tokens: int
    """Tokens to generate here."""
    prefill_tokens: int
    added_s: float
    begun: float = -1.0
    begun_s: float = 0.0
    ended: float = -1.0
    """-1 while it runs."""
    ended_s: float = -1.0
    is_wasted: bool = False
    """Whether its tokens are wasted."""
    num_kept: int = 0
    """Tokens of a wasted sample that another one goes on from all the same."""
    version: int = 0
    """Version of the weights that generate it."""
    before: tuple[VersionSpan, ...] = ()
    """Its tokens from earlier workers or turns, which it goes on from."""
    is_over: bool = False
    """Whether it has ended or been given up."""
    episode: deque[EpisodeTurn] = field(default_factory=deque)
    """Turns of an episode, from the one on that it is in."""
    is_away: bool = False
    """Whether it waits for tools or its agent, and is in no batch."""
    since: float = 0.0
    """The count of turns since when it is away."""
    is_decoding: bool = False
    stays: list[tuple[float, float]] = field(default_factory=list)
    """When an episode came into the batch and left it, in seconds."""
    spoken: list[int] = field(default_factory=list)
    """Tokens of each of these turns, if nothing stops it."""
    called: list[tuple[str, float, float]] = field(default_factory=list)
    """The tools that it called, each with its start and end in seconds."""
    speakers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Role that speaks in an episode from other processes -> these."""
    heard: Action | None = None
    """Is called when it has ended; of a turn in another role's episode."""
    listens_to: tuple[VirtualWorker, SampleRun] | None = None
    """The turn of another role that an episode waits for, and where it is spoken."""

    @property
    def ahead(self) -> int:
        """Tokens of the turn that it is in."""
        return self.episode[0].num_tokens if self.episode else self.num_tokens

    def version_spans(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        """The version spans of all its tokens, if `num_tokens` of these were made here."""
        *earlier, last = self.before or (VersionSpan(0, self.version),)
        if last.version == self.version:
            return *earlier, VersionSpan(last.num_tokens + num_tokens, self.version)
        return *self.before, VersionSpan(num_tokens, self.version)

    def tokens_until(self, turn: float) -> float:
        """Tokens that it had at this count of turns."""
        if self.begun < 0:
            return 0.0
        last = turn if self.ended < 0 else min(turn, self.ended)
        last = last if self.is_decoding or not self.stays else min(last, self.since)
        return min(max(last - self.begun, 0.0), float(self.num_tokens))


def report_of(role: str, runs: Sequence[SampleRun], turns: float, kv_capacity: int) -> m.Load:
    """The load report of an engine at this count of turns."""
    tokens = [int(run.tokens_until(turns)) + sum(version_span.num_tokens for version_span in run.before) for run in runs]
    running = [run.begun >= 0 for run in runs]
    held = sum(run.prefill_tokens + count for run, count, is_running in zip(runs, tokens, running, strict=True) if is_running)
    return m.Load(role, sum(running), len(runs) - sum(running), held, kv_capacity, [run.id for run in runs], tokens)


def queue_of(role: str, runs: Sequence[SampleRun], turns: float, kv_capacity: int, num_slots: int, turn_tokens: float) -> m.Queued:
    """The report of the episodes that wait for an engine at this count of turns: those that have not begun first."""
    had = [int(run.tokens_until(turns)) + sum(version_span.num_tokens for version_span in run.before) for run in runs]
    found = [(run.begun >= 0, -place, run, run.prefill_tokens + count) for place, (run, count) in enumerate(zip(runs, had, strict=True))]
    found.sort(key=lambda one: one[:2])
    contexts = [context for *_, context in found]
    cached = [context * has_begun for has_begun, _, _, context in found]
    return m.Queued(role, num_slots, turn_tokens, kv_capacity, [run.id for _, _, run, _ in found], contexts, cached, [0] * len(found))


@final
class Decoding:
    """Decodes the samples of one worker's engines that step one after the other, turn by turn."""

    def __init__(self, costs: Mapping[str, DecodeCost]) -> None:
        self._costs = costs
        self.turns = 0.0
        """Count of turns at the last change."""
        self._last_s = 0.0
        self._held_s = 0.0
        """Seconds of prefill and other work of the process that come before the next turn."""
        self._running: dict[str, list[tuple[float, int, SampleRun]]] = {role: [] for role in costs}
        self._num_running = dict.fromkeys(costs, 0)
        self._waiting: dict[str, deque[SampleRun]] = {role: deque() for role in costs}
        self.turn_s = 0.0
        """Seconds of a turn now; 0 if nothing decodes."""
        self._pace = 1.0
        self._num_added = 0
        self.num_away = 0
        """Episodes that wait for tools or their agents."""

    @property
    def has_some(self) -> bool:
        """Whether a sample decodes, or waits to."""
        return self.num_running > 0 or any(self._waiting.values())

    @property
    def num_running(self) -> int:
        return sum(self._num_running.values())

    def add(self, runs: Iterable[SampleRun], now_s: float) -> None:
        """Add samples; those that there is room for begin."""
        self.advance(now_s)
        for run in runs:
            self._waiting[run.role].append(run)
        self._admit(now_s)

    def leave(self, run: SampleRun) -> None:
        """Note that an episode waits for tools, or its agent."""
        run.is_away, run.since = True, self.turns
        self.num_away += 1

    def come_back(self, run: SampleRun, now_s: float) -> bool:
        """Have an episode go on with its next turn, or end it if there is none; returns whether it ended."""
        self.advance(now_s)
        run.is_away = False
        self.num_away -= 1
        if run.episode:
            self._waiting[run.role].append(run)
        else:
            run.ended, run.ended_s, run.is_over = run.since, now_s, True
        self._admit(now_s)
        return run.is_over

    def hold(self, seconds: float, now_s: float) -> None:
        """Delay decoding by other work of the process."""
        if self.num_running:
            self.advance(now_s)
            self._held_s += seconds

    def set_pace(self, factor: float, now_s: float) -> None:
        """Set the factor by which turns take longer from now on, because of concurrent work."""
        if factor != self._pace:
            self.advance(now_s)
            self.turn_s *= factor / self._pace
            self._pace = factor

    def turns_at(self, now_s: float) -> float:
        """The count of turns now."""
        self.advance(now_s)
        return self.turns

    def next_s(self) -> float | None:
        """Time at which the next sample ends, if nothing changes."""
        nearest = min((heap[0][0] for heap in self._live_heaps()), default=None)
        return None if nearest is None else self._last_s + self._held_s + max(nearest - self.turns, 0.0) * self.turn_s

    def finished(self, now_s: float) -> list[SampleRun]:
        """Remove and return the samples that end now, at the time of `next_s`, and the episodes whose turn does, which are away then."""
        nearest = min(heap[0][0] for heap in self._live_heaps())
        self._last_s, self._held_s, self.turns = now_s, 0.0, max(nearest, self.turns)
        ended: list[tuple[int, SampleRun]] = []
        for heap in self._running.values():
            while heap and (heap[0][2].is_over or heap[0][0] <= self.turns + _NEAR):
                _, number, run = heapq.heappop(heap)
                if not run.is_over:
                    if run.episode:
                        self._end_turn(run, now_s)
                    else:
                        self._end(run, now_s)
                    ended.append((number, run))
        self._admit(now_s)
        return [run for _, run in sorted(ended, key=lambda pair: pair[0])]

    def give_up(self, runs: Iterable[SampleRun], now_s: float) -> None:
        """Abort samples; `ended` keeps the tokens that they have."""
        self.advance(now_s)
        for run in runs:
            if run.is_decoding:
                self._end(run, now_s)
            elif run.begun >= 0:
                run.ended, run.ended_s, run.is_over = run.since, now_s, True
            run.is_over = True
            self.num_away -= run.is_away
            run.is_away = False
        for role, waiting in self._waiting.items():
            self._waiting[role] = deque(run for run in waiting if not run.is_over)
        self._admit(now_s)

    def advance(self, now_s: float) -> None:
        """Count the turns up to now."""
        passed = now_s - self._last_s
        self._last_s = now_s
        held = min(self._held_s, passed)
        self._held_s -= held
        if self.turn_s > 0:
            self.turns += (passed - held) / self.turn_s

    def _end(self, run: SampleRun, now_s: float) -> None:
        run.ended, run.ended_s, run.is_over = self.turns, now_s, True
        self._out_of_batch(run, now_s)

    def _end_turn(self, run: SampleRun, now_s: float) -> None:
        self._out_of_batch(run, now_s)
        self.leave(run)

    def _out_of_batch(self, run: SampleRun, now_s: float) -> None:
        run.is_decoding, run.since = False, self.turns
        self._num_running[run.role] -= 1
        if run.stays:
            run.stays[-1] = run.stays[-1][0], now_s

    def _admit(self, now_s: float) -> None:
        for role, waiting in self._waiting.items():
            cost = self._costs[role]
            while waiting and self._num_running[role] < cost.max_running:
                run = waiting.popleft()
                if run.begun < 0:
                    run.begun, run.begun_s, prefill = self.turns, now_s, run.prefill_tokens
                else:
                    run.begun, prefill = run.begun + self.turns - run.since, run.episode[0].prefill_tokens
                run.is_decoding = True
                if run.episode:
                    run.stays.append((now_s, now_s))
                    run.spoken.append(run.ahead)
                self._held_s += cost.enter_s + prefill * cost.prefill_token_s
                self._num_added += 1
                self._num_running[role] += 1
                heapq.heappush(self._running[role], (self.turns + run.ahead, self._num_added, run))
        self.turn_s = self._pace * sum(self._costs[role].seconds(count) for role, count in self._num_running.items() if count)
        if not self.turn_s:
            self._held_s = 0.0  # Prefill of samples that were all given up.

    def _live_heaps(self) -> list[list[tuple[float, int, SampleRun]]]:
        for heap in self._running.values():
            while heap and heap[0][2].is_over:
                heapq.heappop(heap)
        return [heap for heap in self._running.values() if heap]


class Surroundings(Protocol):
    """What a virtual worker needs from the simulation."""

    clock: Clock
    rows: RowTimes
    drawn: Drawn

    def call(self, ordinal: int) -> Call: ...

    def num_tokens(self, packed: int) -> int:
        """Tokens of an available row: a sample's prompt and response, or a dataset's texts."""

    def function_cost(self, call: Call) -> FunctionCost | None:
        """The cost of a function; None if it takes no time that counts."""

    def say(self, worker: str, message: m.WorkerReport) -> None:
        """Send a message to the controller, after what the worker does now."""

    def started(self, worker: str, task: m.Task, seconds: float) -> None:
        """Note that a task other than a generation begins, and how long it takes."""

    def ended(self, worker: str, task: m.Task) -> None: ...

    def stopped(self, packed: int) -> tuple[VersionSpan, ...]:
        """The tokens of a sample at the time when it was stopped."""

    def is_lost(self, process: str) -> bool:
        """Whether this process of a worker is gone; another one may have taken its place."""

    def keep(self, ids: Iterable[int], version_spans: Iterable[tuple[VersionSpan, ...]]) -> None:
        """Note samples that were stopped and may go on."""

    @property
    def tools(self) -> Mapping[str, ToolCost]: ...

    def worker(self, process: str) -> VirtualWorker | None:
        """A process of a worker; None: it is gone."""

    def rests(self, worker: str, is_resting: bool) -> None:
        """Note that a worker that has samples has none to decode now, since all are episodes that wait; or has some again."""

    def generating(self, worker: str, num_runs: int) -> None:
        """Add to the number of samples that the worker has, waiting ones included."""

    def pace(self, worker: str, kind: Kind) -> float:
        """Factor by which this kind of work takes longer there now than alone."""


@final
class VirtualWorker:
    """One worker of the plan, simulated: the `Executor` of its task queue."""

    def __init__(
        self, machine: Machine, around: Surroundings, *, report_every: int = 0, reports: Literal["loads", "queues"] = "loads"
    ) -> None:
        """
        Args:
            report_every: turns of decoding after which it says how full its engines are, or which episodes wait; 0: never.
        """
        self.machine = machine
        self._report_every, self._reports = report_every, reports
        self._is_reporting = False
        self.name = machine.worker
        self._lanes = [Decoding({role: machine.decode[role] for role in roles}) for roles in machine.lanes]
        self._lane = {role: lane for roles, lane in zip(machine.lanes, self._lanes, strict=True) for role in roles}
        self.sample_runs: list[SampleRun] = []
        """All samples that it ever had, for the report."""
        self.is_lost = False
        self._around = around
        self._tasks = TaskQueue(self)
        self._current: m.Task | None = None
        self._left_to_do_s = 0.0
        """Seconds left of the current task at full speed, as of `_since_s`, when its pace last changed."""
        self._since_s = 0.0
        self._pace = 1.0
        self._begun_s = 0.0
        """When the current task began."""
        self._num_begun = 0
        self._running: dict[int, SampleRun] = {}
        """Samples that it has and that have not been reported as finished."""
        self._alarm = 0
        self._turn = ROLLOUT
        """The turn of its lease that has the devices here."""
        self._held: dict[str, int] = {}
        self._finished: list[SampleRun] = []
        """Finished samples that wait for others, to be reported together."""
        self.rested: list[list[float]] = []
        """When it had episodes and nothing to decode: starts and ends in seconds."""
        self._spoken: list[SampleRun] = []
        """Turns in other workers' episodes, or in other roles' here."""
        self._is_resting = False
        self._slots: dict[str, list[float]] = {}
        """Slots of a tool, or those that several share (empty name): when each is free, a heap."""
        self._left_s = float("-inf")
        self._handlers: Mapping[type, Callable[[m.Task], float]] = {
            m.RunFunction: self._perform_s,
            m.Accumulate: self._accumulate_s,
            m.Apply: lambda task: self._trainer(task).optimizer_s,
            m.CopyWeights: lambda task: machine.copy_s(str(around.call(task.call).options["source"]), self._turn),
            m.PublishWeights: lambda task: 0.0,
            m.LoadWeights: lambda task: machine.sync_s.get(task.role, 0.0),  # type: ignore[attr-defined]
            m.Save: lambda task: 0.0,
            m.ShrinkKVCache: lambda task: 0.0,
            m.Switch: lambda task: machine.switch_s(self._turn, task.to),  # type: ignore[attr-defined]
        }

    def receive(self, message: m.ToWorker) -> None:
        """Receive a message of the controller."""
        if self.is_lost:
            return
        self._tasks.hear((message,))
        self._tasks.read()
        if isinstance(message, m.Task | m.Abort):
            self._wake()

    def flushed(self, every_tokens: int = RunSettings().flush_tokens) -> list[m.Flushed]:
        """What it has written of its samples in flight, each after every so many tokens."""
        had, found = self._tokens(self._running.values()), dict[int, list[tuple[int, tuple[VersionSpan, ...]]]]()
        for run in self._running.values():
            run.num_kept = int(had[run.id]) // every_tokens * every_tokens
            if run.num_kept:
                found.setdefault(run.call, []).append((run.id, run.version_spans(run.num_kept)))
        return [m.Flushed(call, *self._kept(call, samples), ("", 0, 0, 0)) for call, samples in found.items()]

    def lose(self) -> None:
        """Fail: nothing that it does is heard of any more."""
        self.is_lost = True
        self._tasks = TaskQueue(self)
        runs = list(self._running.values())
        for run in runs:
            run.is_wasted = True
        self._give_up(runs)
        for spoken in list(self._spoken):
            self.fall_silent(spoken)
        self._note_rest()
        self._around.generating(self.name, -len(runs))
        self._running.clear()
        self._alarm += 1
        if self._current is not None:
            task, self._current = self._current, None
            self._around.ended(self.name, task)

    def come_back(self) -> None:
        """Restart as a new process, which has nothing."""
        self.is_lost = False
        self._turn = ROLLOUT
        self._held.clear()
        self._finished.clear()

    # ---- tasks

    def _wake(self) -> None:
        """Begin the tasks that can begin."""
        around, clock = self._around, self._around.clock
        while self._tasks.first is not None and self._current is None and not self.is_lost:
            ready_s = max((around.rows.ready_s(call, ids, self.name) for call, ids, _ in self._tasks.rows_needed()), default=0.0)
            if ready_s > clock.now_s:
                clock.at(ready_s, self._wake)
                return
            task = self._tasks.pop()
            if isinstance(task, m.Generate):
                self._generate(task)
                self._tasks.read()  # Some may have been preempted while they waited.
                continue
            seconds = self._handlers[type(task)](task)
            self._current = task
            around.started(self.name, task, seconds)
            self._hold(seconds)
            self._set_alarm()
            self._begun_s = clock.now_s
            self._left_to_do_s, self._since_s, self._pace = seconds, clock.now_s, around.pace(self.name, self._kind(task))
            self._set_end()

    def paced(self) -> None:
        """Adjust to what others do, which may have changed the pace of this worker."""
        around, now_s = self._around, self._around.clock.now_s
        if self.machine.decode:
            for lane in self._lanes:
                lane.set_pace(around.pace(self.name, "rollout"), now_s)
            self._set_alarm()
        if self._current is not None and (pace := around.pace(self.name, self._kind(self._current))) != self._pace:
            self._left_to_do_s = max(self._left_to_do_s - (now_s - self._since_s) / self._pace, 0.0)
            self._since_s, self._pace = now_s, pace
            self._set_end()

    def _kind(self, task: m.Task) -> Kind:
        if task.call >= 0 and self._around.call(task.call).engine == "function":
            return "function"
        return "rollout" if isinstance(task, m.LoadWeights) else "train"

    def _set_end(self) -> None:
        self._num_begun += 1
        number = self._num_begun
        self._around.clock.at(self._since_s + self._left_to_do_s * self._pace, lambda: self._done(number))

    def _done(self, number: int) -> None:
        task = self._current
        if self.is_lost or task is None or number != self._num_begun:
            return
        around = self._around
        result: dict[str, float] | float | None = None
        manifest = None
        if isinstance(task, m.RunFunction):
            result = self._deliver(task)
        if isinstance(task, m.Apply) and task.is_last:
            result = {}
        if isinstance(task, m.LoadWeights):
            self._held[task.role] = task.version
        if isinstance(task, m.Switch):
            self._turn = task.to
        if isinstance(task, m.PublishWeights):
            manifest = Manifest(f"{task.role}-{task.version}", 0, ())
        around.ended(self.name, task)
        around.say(self.name, m.TaskDone(task.number, result, manifest))
        self._current = None
        self._wake()

    def _trainer(self, task: m.Task) -> TrainCost:
        return self.machine.train[self._around.call(task.call).role]

    def _lengths(self, ids: Iterable[int]) -> list[int]:
        return [self._around.num_tokens(row) for row in ids]

    def _accumulate_s(self, task: m.Task) -> float:
        assert isinstance(task, m.Accumulate)
        return self._trainer(task).update.seconds(self._lengths(task.ids))

    def _perform_s(self, task: m.Task) -> float:
        """Seconds of a forward pass, or of the units of a function over as many concurrent slots as the process has."""
        assert isinstance(task, m.RunFunction)
        call = self._around.call(task.call)
        if call.engine == "train":
            return self._trainer(task).forward.seconds(self._lengths(task.ids))
        cost = self._around.function_cost(call)
        if cost is None:
            return 0.0
        hands = [cost.task_s] * (1 if call.writes else cost.concurrency)
        for unit in self._units(call, task.ids):
            took_s = cost.at(self._around.drawn.uniform("latency", call.role, call.method, min(unit, default=0)))
            heapq.heapreplace(hands, hands[0] + took_s)
        return max(hands)

    def _units(self, call: Call, ids: Sequence[int]) -> list[tuple[int, ...]]:
        if call.granularity.value == "sample":
            return [(row,) for row in ids]
        if call.granularity.value == "group":
            groups: dict[int, list[int]] = {}
            for row in ids:
                groups.setdefault(group_key(row), []).append(row)
            return [tuple(rows) for rows in groups.values()]
        return [tuple(ids)]

    def _deliver(self, task: m.RunFunction) -> float | None:
        """Make a call's rows, or its single value."""
        around = self._around
        call = around.call(task.call)
        if not call.is_aligned:
            around.drawn.came_to(call, task.ids)
            return 0.0
        ids = around.drawn.left(call, self._units(call, task.ids)) if call.drops else task.ids
        dropped = sorted(set(task.ids) - set(ids))
        has_tokens = call.options.get("gives") in ("rows", "kept", "concat")
        num_tokens = [around.num_tokens(row) if has_tokens else 1 for row in ids]
        took_us = 0
        if call.engine == "function" and around.function_cost(call) is not None:
            took_us = max(1, round((around.clock.now_s - self._begun_s) * 1e6))  # 0 would say that it is not known.
        self._report(task.number, task.call, ids, task.forward_to, num_tokens, dropped, took_us=took_us)
        return None

    def _report(
        self,
        number: int,
        call: int,
        ids: list[int],
        forward_to: Iterable[str],
        num_tokens: list[int],
        dropped: Sequence[int] = (),
        version_spans: Sequence[tuple[VersionSpan, ...]] = (),
        num_generated: Sequence[int] = (),
        took_us: int = 0,
    ) -> None:
        around = self._around
        now_s = around.clock.now_s
        around.rows.made(call, ids, self.name, now_s)
        has_tokens = dict(zip(ids, num_tokens, strict=True))
        for place in forward_to:
            if not around.is_lost(place):
                around.rows.send(call, ids, self.name, worker_of(place), now_s, lambda row: has_tokens[row])
        blank = [0] * len(ids)
        generated = list(num_generated) or blank
        spans = list(version_spans)
        around.say(
            self.name, m.Finished(number, call, ids, num_tokens, generated, [], blank, [], None, list(dropped), spans, took_us=took_us)
        )

    # ---- generation

    def _generate(self, task: m.Generate) -> None:
        around = self._around
        role = around.call(task.call).role
        runs: dict[int, SampleRun] = {}
        last_group = -1
        for row in task.ids:
            prefill = around.drawn.prompt_tokens(row) if group_key(row) != last_group else 0  # Siblings share the KV cache of their prompt.
            last_group = group_key(row)
            before = around.stopped(row) if task.aborted_by >= 0 else ()
            had = sum(version_span.num_tokens for version_span in before)
            left = max(around.drawn.response_tokens(row) - had, 1)
            run = SampleRun(row, role, task.call, task.number, left, prefill + had, around.clock.now_s, speakers=task.speakers)
            run.version, run.before = self._held.get(role, 0), before
            if "agent" in around.call(task.call).options:
                run.episode.extend(around.drawn.turns(row, had))
            runs[row] = run
        self.sample_runs += runs.values()
        self._running.update(runs)
        self._tasks.began(task)
        self._report_later()
        around.generating(self.name, len(runs))
        away = [run for run in runs.values() if run.episode and (self._is_others(run) or not run.episode[0].num_tokens)]
        self._lane[role].add((run for run in runs.values() if run not in away), around.clock.now_s)
        for run in away:  # Their agents do something else before their first turn.
            self._lane[role].leave(run)
            if self._is_others(run):
                self._have_spoken(run)
            else:
                self._wait_for_tools(run)
        self._note_rest()
        self._set_alarm()

    def _is_others(self, run: SampleRun) -> bool:
        """Whether the next turn of an episode is another role's, of whose engine it is known where it is."""
        role = run.episode[0].role if run.episode else ""
        return bool(role) and role != run.role and (role in self.machine.decode or role in run.speakers)

    def _have_spoken(self, run: SampleRun) -> None:
        """Have another role speak in an episode, which is away meanwhile."""
        around, turn = self._around, run.episode[0]
        speaker = self if turn.role in self.machine.decode else around.worker(instance_of(run.id, run.speakers[turn.role]))
        if speaker is None:
            return  # It is lost: the scheduler stops the episode.
        takes_s = around.rows.hop_s(ROW_BYTES + TOKEN_BYTES * turn.num_tokens, self.name, speaker.name)

        def answered() -> None:
            around.clock.at(around.clock.now_s + takes_s, heard)

        def heard() -> None:
            if run.listens_to is not None and run.listens_to[1] is spoken and not run.is_over and not self.is_lost:
                run.listens_to = None
                self._wait_for_tools(run)

        prefill = turn.prefill_tokens
        spoken = SampleRun(run.id, turn.role, run.call, run.task, turn.num_tokens, prefill, around.clock.now_s, heard=answered)
        run.listens_to = speaker, spoken
        around.clock.at(around.clock.now_s + takes_s, lambda: speaker.speak(spoken))

    def speak(self, spoken: SampleRun) -> None:
        """Decode a turn of another worker's episode, or of another role's here."""
        if spoken.is_over or self.is_lost:
            return
        self._spoken.append(spoken)
        self._around.generating(self.name, 1)
        self._lane[spoken.role].add([spoken], self._around.clock.now_s)
        self._note_rest()
        self._set_alarm()

    def fall_silent(self, spoken: SampleRun) -> None:
        """Give up such a turn."""
        was_here = spoken in self._spoken
        self._lane[spoken.role].give_up([spoken], self._around.clock.now_s)
        if was_here:
            self._no_longer_spoken(spoken)
        self._note_rest()
        self._set_alarm()

    def _no_longer_spoken(self, spoken: SampleRun) -> None:
        self._spoken.remove(spoken)
        self._around.generating(self.name, -1)

    def _give_up(self, runs: Iterable[SampleRun]) -> None:
        """Stop decoding samples, and the turns of others that they wait for."""
        runs = list(runs)
        for lane in self._lanes:
            lane.give_up([run for run in runs if self._lane[run.role] is lane], self._around.clock.now_s)
        for run in runs:
            if run.listens_to is not None:
                (speaker, spoken), run.listens_to = run.listens_to, None
                speaker.fall_silent(spoken)

    def _wait_for_tools(self, run: SampleRun) -> None:
        """Have an episode come back when what its agent waits for after its turn is over."""
        turn, when_s = run.episode.popleft(), self._around.clock.now_s
        for at_once in turn.calls:
            when_s = max([when_s, *[self._called(run, name, seconds, when_s) for name, seconds in at_once]])
        self._around.clock.at(when_s + turn.rest_s, lambda: self._come_back(run))

    def _called(self, run: SampleRun, name: str, seconds: float, now_s: float) -> float:
        """When a tool call is over, which may wait for a slot."""
        tool, start_s = self._around.tools.get(name), now_s
        seconds *= tool.factor if tool is not None else 1.0
        if tool is not None and tool.slots:
            slots = self._slots.setdefault("" if tool.shares_slots else name, [0.0] * tool.slots)
            start_s = max(now_s, slots[0])
            heapq.heapreplace(slots, start_s + seconds)
        run.called.append((name, start_s, start_s + seconds))
        return start_s + seconds

    def _come_back(self, run: SampleRun) -> None:
        if run.is_over or self.is_lost:
            return
        clock = self._around.clock
        if self._is_others(run):
            self._have_spoken(run)
            return
        if self._lane[run.role].come_back(run, clock.now_s):
            self._finished.append(run)
            self._gather()
        self._note_rest()
        self._set_alarm()

    def _note_rest(self) -> None:
        rests = any(lane.num_away for lane in self._lanes) and not any(lane.has_some for lane in self._lanes)
        if rests != self._is_resting:
            self._is_resting, now_s = not self._is_resting, self._around.clock.now_s
            if self._is_resting:
                self.rested.append([now_s, now_s])
            else:
                self.rested[-1][1] = now_s
            self._around.rests(self.name, self._is_resting)

    def _report_later(self) -> None:
        """Schedule a load report after so many turns, if there will be anything to say in one."""
        if self._reports != "loads" and not self._around.drawn.has_episodes:
            return
        turn_s = max((sum(self.machine.decode[role].seconds(1) for role in roles) for roles in self.machine.lanes), default=0.0)
        if self._report_every and not self._is_reporting and self._running and turn_s:
            self._is_reporting = True
            clock = self._around.clock
            clock.at(clock.now_s + self._report_every * max([turn_s, *[lane.turn_s for lane in self._lanes]]), self._report_load)

    def _report_load(self) -> None:
        self._is_reporting = False
        if self.is_lost:
            return
        turns = self.turns()
        for role, cost in self.machine.decode.items():
            runs = [run for run in self._running.values() if run.role == role]
            capacity = int(cost.max_running * self._around.drawn.mean_tokens)
            if runs and self._reports == "loads":
                self._around.say(self.name, report_of(role, runs, turns[role], capacity))
            elif waiting := [run for run in runs if run.episode and self._is_queued(run)]:
                self._around.say(self.name, queue_of(role, waiting, turns[role], capacity, cost.max_running, self._turn_tokens(role)))
        self._report_later()

    def _is_queued(self, run: SampleRun) -> bool:
        return not (run.is_decoding or run.is_away or run.is_over)

    def _turn_tokens(self, role: str) -> float:
        """Mean number of tokens of the turns of its episodes."""
        spoken = [count for run in self._running.values() if run.role == role for count in run.spoken]
        return sum(spoken) / max(len(spoken), 1)

    def _set_alarm(self) -> None:
        """Schedule an action for when the next sample ends; any change before then replaces it."""
        self._alarm += 1
        number, ends = self._alarm, [(when_s, lane) for lane in self._lanes if (when_s := lane.next_s()) is not None]
        if ends:
            when_s, lane = min(ends, key=lambda end: end[0])
            self._around.clock.at(when_s, lambda: self._finish(number, lane))

    def _finish(self, alarm: int, lane: Decoding) -> None:
        if alarm != self._alarm:
            return
        ended = lane.finished(self._around.clock.now_s)
        self._finished += [run for run in ended if run.is_over and run.heard is None]
        for run in ended:
            if run.heard is not None:
                self._no_longer_spoken(run)
                run.heard()
            elif not run.is_over:
                self._wait_for_tools(run)
        self._gather()
        self._note_rest()
        self._set_alarm()

    def _gather(self) -> None:
        """Report finished samples, now or with others."""
        clock = self._around.clock
        gather_s = max((self.machine.decode[run.role].gather_s for run in self._finished), default=0.0)
        if not any(lane.has_some or lane.num_away for lane in self._lanes) or clock.now_s - self._left_s >= gather_s:
            self._hand_over()
        else:
            clock.at(self._left_s + gather_s, self._hand_over)

    def _hand_over(self) -> None:
        """Report finished samples, which takes the process some time."""
        finished, self._finished = [run for run in self._finished if self._has(run)], []
        if not finished or self.is_lost:
            return
        clock, costs = self._around.clock, [self.machine.decode[run.role] for run in finished]
        self._left_s = clock.now_s
        takes_s = max(cost.handover_s for cost in costs) + sum(cost.leave_s for cost in costs)
        if not takes_s:
            self._leave(finished)
            return
        self._hold(takes_s)
        self._set_alarm()
        clock.at(clock.now_s + takes_s, lambda: self._leave(finished))

    def _leave(self, finished: Iterable[SampleRun]) -> None:
        around = self._around
        runs = [run for run in finished if self._has(run)]  # Others were given up in the meantime.
        for task, positions, ends in self._tasks.finished(run.id for run in runs):
            part = [runs[position] for position in positions]
            ids = [run.id for run in part]
            for row in ids:
                del self._running[row]
            around.generating(self.name, -len(ids))
            version_spans = [run.version_spans(run.num_tokens) for run in part] if is_time_dependent(around.call(task.call)) else []
            num_tokens, generated = [around.num_tokens(row) for row in ids], [around.drawn.response_tokens(row) for row in ids]
            self._report(task.number, task.call, ids, task.forward_to, num_tokens, version_spans=version_spans, num_generated=generated)
            if ends:
                around.say(self.name, m.TaskDone(task.number))

    def _hold(self, seconds: float) -> None:
        """Delay decoding by other work of the process."""
        for lane in self._lanes:
            lane.hold(seconds, self._around.clock.now_s)

    def turns(self) -> dict[str, float]:
        """Role -> the count of its engine's turns now."""
        return {role: lane.turns_at(self._around.clock.now_s) for role, lane in self._lane.items()}

    def _tokens(self, runs: Iterable[SampleRun]) -> dict[int, float]:
        """Identity -> the tokens that each of these samples has now."""
        turns = self.turns()
        return {run.id: run.tokens_until(turns[run.role]) for run in runs}

    def _has(self, run: SampleRun) -> bool:
        """Whether a sample has not been given up."""
        return self._running.get(run.id) is run

    # ---- what the task queue has it do

    def call(self, ordinal: int) -> Call:
        return self._around.call(ordinal)

    def say(self, message: Answer) -> None:
        assert not isinstance(message, m.Missing)
        self._around.say(self.name, message)

    def define(self, message: m.Define) -> None:
        """Do nothing: the simulation knows all calls."""

    def forget(self, call: int) -> None:
        self._around.rows.forget(call, self.name)
        self._around.rows.forget(stopped_at(call), self.name)

    def connect(self, peers: m.Peers) -> None:
        """Do nothing: workers have no addresses."""

    def disconnect(self, lost: m.PeerLost) -> Mapping[int, list[int]]:
        """Nothing is missing: rows of a lost worker that were sent arrive."""
        return {}

    def push(self, call: int, ids: list[int], to: Sequence[str]) -> None:
        around = self._around
        for place in to:
            around.rows.send(call, ids, self.name, worker_of(place), around.clock.now_s, around.num_tokens)

    def reassign(self, call: int, drawn: int, ids: list[int]) -> None:
        self._around.rows.adopted(call, drawn, ids, self.name)

    def is_running(self, packed: int, call: int, *, queued: bool = False) -> bool:
        run = self._running.get(packed)
        return run is not None and run.call == call and not run.is_over and (not queued or self._is_queued(run))

    def preempt(self, call: int, ids: list[int]) -> m.Aborted | None:
        runs = [self._running.pop(row) for row in ids]
        had = self._tokens(runs)
        found = [(run.id, run.version_spans(int(had[run.id]))) for run in runs if had[run.id] >= 1 or run.before]
        self._give_up(runs)
        self._note_rest()
        self._around.generating(self.name, -len(runs))
        self._set_alarm()
        return m.Aborted(call, *self._kept(call, found), ("", 0, 0, 0)) if found else None

    def stop(self, call: int) -> m.Aborted | None:
        """Stop the samples of a call; what has tokens is kept and reported, and so is what has finished by now."""
        done, self._finished = [f for f in self._finished if f.call == call], [f for f in self._finished if f.call != call]
        if done:
            self._leave(done)
        had, found = self._tokens(self._running.values()), list[tuple[int, tuple[VersionSpan, ...]]]()
        for runs in self._by_task(call):
            kept = [run for run in runs if had[run.id] >= 1 or run.before]
            for run in kept:
                del self._running[run.id]
                found.append((run.id, run.version_spans(int(had[run.id]))))
            self._give_up(kept)
            self._note_rest()
            self._around.generating(self.name, -len(kept))
        return m.Aborted(call, *self._kept(call, found), ("", 0, 0, 0)) if found else None

    def give_up(self, call: int) -> None:
        for runs in self._by_task(call):
            for run in runs:
                run.is_wasted = True
                del self._running[run.id]
            self._give_up(runs)
            self._note_rest()
            self._around.generating(self.name, -len(runs))
        self._set_alarm()

    def _by_task(self, call: int) -> list[list[SampleRun]]:
        """The samples of a call by generate task."""
        found: dict[int, list[SampleRun]] = {}
        for run in self._running.values():
            if run.call == call:
                found.setdefault(run.task, []).append(run)
        return list(found.values())

    def end(self) -> None:
        """Do nothing: the simulation ends with its program."""

    def _kept(
        self, call: int, samples: Sequence[tuple[int, tuple[VersionSpan, ...]]]
    ) -> tuple[list[int], list[int], list[int], list[tuple[VersionSpan, ...]]]:
        """Keep stopped samples that may go on: identities, all tokens, generated tokens, and version spans."""
        around = self._around
        ids, version_spans = [row for row, _ in samples], [of for _, of in samples]
        around.keep(ids, version_spans)
        around.rows.made(stopped_at(call), ids, self.name, around.clock.now_s)
        generated = [sum(version_span.num_tokens for version_span in of) for of in version_spans]
        return ids, [around.drawn.prompt_tokens(row) + count for row, count in zip(ids, generated, strict=True)], generated, version_spans
