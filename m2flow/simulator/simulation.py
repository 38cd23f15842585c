"""Simulate a run as discrete events on a virtual clock: the program, the controller's scheduler, virtual workers, and device accounting.

    Flow --follow_program--> Program: Made, Waits, Left, StepEnd, ...
    Program, Plan, Machines, Drawn --Simulation.run--> History

Program. The flow runs once, before the simulation, along one path, with the answers of `macro.exploring`: values that nobody has computed
are those that `m2flow plan` shows (assumed, from an earlier run, or each condition answered with no). Limit: it ends where the flow reads
rows.

Controller. It is the real one's core (`m2flow.micro.controller.controller_core`); its inputs come from virtual workers. All is a
function of the inputs: two runs of the same are equal to the last bit.

Idle causes. `causes_of` names the cause of idleness for devices that generate and for those that train; real traces use the same rule.
Devices with the same workers are one cell. A cell works, switches, loads weights, or is idle for a cause that holds for all idle devices of
its kind at that moment, so each cause is summed up once for all, and a cell's share is a difference of two sums.

    tail          (rollout) has no sample left, while others still generate; (train) waits for them
    rollout       (train) waits for samples while every instance generates
    staleness     (rollout) may not begin the next step before training is done
    reward        waits for rewards or ops
    barrier       waits for a program that waits for a value, or for other devices of its kind
    backpressure  the memory for samples of steps under way is used up
    switch, sync, unused, failed
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

import msgspec
import numpy as np

from m2flow.errors import InternalError, TraceError
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.number import exploring_floats
from m2flow.macro.replay import prints_muted
from m2flow.macro.tracing import MOST_ASKED, Explorer, KnownValues, TracingBackend, run_traced
from m2flow.micro.controller.controller import Lookahead
from m2flow.micro.controller.controller_core import (
    ControllerCore,
    Effect,
    Records,
    Rejected,
    Resolved,
    SendRows,
    Submitted,
    Unreported,
)
from m2flow.micro.lowering.passes import Lowering
from m2flow.micro.protocol import call_semantics
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import FunctionCost, ToolCost
from m2flow.micro.protocol.events import (
    CONTROLLER,
    LEDGER,
    Discarded,
    Dropped,
    Expired,
    FromWorker,
    Late,
    Released,
    Send,
    TakenOver,
    TimedOut,
    Wanted,
    WorkerLost,
)
from m2flow.micro.protocol.plan import PREFILL, Plan, Stage
from m2flow.micro.protocol.staleness import VersionSpan
from m2flow.micro.protocol.worker_state import ROLLOUT, kind_of, tag_of, worker_of
from m2flow.micro.scheduler.partial_rollouts import Deadlines
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.scheduler.state import Ablation
from m2flow.recipe import Model
from m2flow.rollout_scheduling.policies import report_every, reports_of
from m2flow.samples import Batch, SampleId
from m2flow.simulator.machines import Kind, Machine, Paces, RowTimes, Slowdown, kinds, undisturbed
from m2flow.simulator.sample_lengths import Drawn
from m2flow.simulator.virtual_worker import Clock, SampleRun, VirtualWorker
from m2flow.spec import ClusterSpec

# ---- the program


@dataclass(frozen=True)
class Made:
    """Event: the program makes a call."""

    call: Call


@dataclass(frozen=True)
class Waits:
    """Event: the program reads a call's result, and goes on when it is there."""

    call: int
    is_shown: bool
    """Whether the result has rows, which are sent to the program."""


@dataclass(frozen=True)
class Left:
    """Event: the program can't reach a call's result any more."""

    call: int


@dataclass(frozen=True)
class StepEnd:
    """Event: all calls of a step have been made."""

    step: int


Item = Made | Waits | Left | StepEnd


@dataclass(frozen=True)
class Program:
    """One path through a flow, as a sequence of events."""

    flow: str
    staleness: int
    items: tuple[Item, ...]
    models: Mapping[str, Model]
    num_steps: int
    """Steps of the whole flow; the program may have fewer."""
    graph: MacroGraph


class _Following(TracingBackend):
    """A backend that records the events of the program in order."""

    def __init__(self, explorer: Explorer) -> None:
        super().__init__(explorer)
        self._explorer = explorer
        self.items: list[Item] = []

    def submit(self, call: Call) -> None:
        super().submit(call)
        self.items.append(Made(call))
        self._explorer.submitted(call)

    def value(self, ordinal: int) -> object:
        call = self.calls[ordinal]
        self.items.append(Waits(ordinal, is_shown=call.is_aligned))
        return super().value(ordinal)

    def release(self, ordinal: int) -> None:
        self.items.append(Left(ordinal))

    def end_step(self, step: int) -> None:
        self.items.append(StepEnd(step))


def follow_program(
    flow: Flow,
    options: Mapping[str, object],
    *,
    steps: int,
    seed: int = 0,
    known: KnownValues | None = None,
    outcomes: Sequence[bool] = (),
) -> Program:
    """Follow the first steps of a flow.

    Args:
        outcomes: of its first conditions on unknown values; no to all later ones.
    Raises:
        FlowError: what the flow does wrong. TraceError: it makes no call.
    """
    backend = _Following(Explorer(known or KnownValues(), outcomes, MOST_ASKED))
    with exploring_floats(flow.function.__globals__), prints_muted():
        session = run_traced(flow, options, backend, steps=steps, seed=seed)
    if not backend.calls:
        raise TraceError(f"the flow {flow.name} makes no call", now="Its body should generate, score or update something.")
    graph = backend.graph(flow)
    return Program(flow.name, flow.staleness_for(options), tuple(backend.items), dict(session.models), session.num_steps, graph)


Blocked = Literal["", "value", "steps", "memory"]
"""What the program waits for: nothing, a value that it reads, steps that it is too far ahead of, or memory for the steps under way."""


@final
class Driver:
    """Submits the program's calls to the controller's core, as `m2flow.micro.controller.controller` does."""

    def __init__(
        self, program: Program, lowering: Lowering, ahead: Lookahead, post: Callable[[Submitted | Wanted | Released], None]
    ) -> None:
        self._program = program
        self._lowering = lowering
        self._ahead = ahead
        self._post = post
        self._position = 0
        self._segment: list[Call] = []
        self._later: list[Released] = []
        self._open: dict[int, int] = {}
        """Step -> calls that are not done."""
        self._done: set[int] = set()
        self._wait: Callable[[], bool] | None = None
        self._step_of = {item.call.ordinal: item.call.step for item in program.items if isinstance(item, Made)}
        self.blocked: Blocked = ""

    @property
    def is_finished(self) -> bool:
        return self._position == len(self._program.items) and not self._open

    def resolved(self, ordinal: int) -> None:
        """Note that a call is done."""
        self._done.add(ordinal)
        step = self._step_of[ordinal]
        self._open[step] -= 1
        if not self._open[step]:
            del self._open[step]

    def advance(self) -> None:
        """Go on until the program waits."""
        items = self._program.items
        while self._position < len(items):
            if self._wait is not None:
                if not self._wait():
                    return
                self._wait, self.blocked = None, ""
            item = items[self._position]
            self._position += 1
            match item:
                case Made(call):
                    self._segment.append(call)
                    self._ahead.add(call)
                    self._open[call.step] = self._open.get(call.step, 0) + 1
                case Left(ordinal):
                    self._later.append(Released(ordinal))
                case Waits(ordinal, is_shown):
                    self._flush()
                    if is_shown:
                        self._post(Wanted(ordinal))
                    self._wait, self.blocked = (lambda ordinal=ordinal: ordinal in self._done), "value"
                case StepEnd(step):
                    self._flush()
                    self._wait_for_steps(step)
        if self._wait is not None and self._wait():
            self._wait, self.blocked = None, ""
        self._flush()

    def _wait_for_steps(self, step: int) -> None:
        due = self._ahead.due(step)
        self._wait = lambda: not any(open_step <= due for open_step in self._open)
        self.blocked = "steps" if due <= step - 1 - self._program.staleness else "memory"

    def _flush(self) -> None:
        calls, self._segment = self._segment, []
        stages: Sequence[Stage] = self._lowering.stages(MacroGraph(self._program.flow, tuple(calls))) if calls else ()
        for call, stage in zip(calls, stages, strict=True):
            self._post(Submitted(call, stage, b""))
        later, self._later = self._later, []
        for post in later:
            self._post(post)


# ---- idle causes and device time


class Doing(NamedTuple):
    """The activities at one moment anywhere in a run, which idle causes depend on."""

    num_generating: int
    """Rollout instances that have a sample."""
    num_instances: int
    syncs: bool
    """Weights are being synced."""
    trains: bool
    judges: bool
    """A reward or an op is being computed."""
    switches: bool
    """A device switches between engines."""
    lacks_memory: bool = False
    """The program may make no further step before there is memory for its samples."""


def causes_of(doing: Doing) -> dict[str, str]:
    """The cause of idleness by kind of engine, `rollout` and `train`."""
    if doing.syncs:
        return {"rollout": "sync", "train": "sync"}
    if doing.num_generating:
        return {"rollout": "tail", "train": "rollout" if doing.num_generating == doing.num_instances else "tail"}
    if doing.trains:
        return {"rollout": "staleness", "train": "barrier"}
    if doing.judges:
        return {"rollout": "reward", "train": "reward"}
    if doing.switches:
        return {"rollout": "switch", "train": "switch"}
    waits = "backpressure" if doing.lacks_memory else "barrier"
    return {"rollout": waits, "train": waits}


State = Literal["work", "switch", "sync", "tool"]
STATES: tuple[State, ...] = ("work", "switch", "sync", "tool")
"""`tool`: all samples of a rollout device are episodes that wait for tools or agents."""
CAUSES = ("tail", "rollout", "staleness", "reward", "barrier", "backpressure", "switch", "sync", "tool", "unused", "failed")


@dataclass(eq=False)
class Cell:
    """Devices that have the same workers."""

    pool: str
    first: int
    num_devices: int
    workers: tuple[str, ...]
    kind: str
    """Kind of its engines, or of those that hold the lease now; while it is idle, causes of this kind count."""
    active: dict[State, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    """State -> workers that are in it."""
    since_s: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the causes when it became idle."""
    is_lost: bool = False

    @property
    def state(self) -> str:
        return next((state for state in STATES if self.active[state]), "idle")


@final
class Usage:
    """Adds up device seconds by what devices do, and by why they are idle."""

    def __init__(self, machines: Mapping[str, Machine], num_devices: Mapping[str, int]) -> None:
        """
        Args:
            num_devices: of each pool, those that nobody has included.
        """
        self.cells = _cells(machines, num_devices)
        self._of_worker: dict[str, list[Cell]] = {name: [] for name in machines}
        for cell in self.cells:
            for worker in cell.workers:
                self._of_worker[worker].append(cell)
        self._sums: dict[str, dict[str, float]] = {"rollout": dict.fromkeys(CAUSES, 0.0), "train": dict.fromkeys(CAUSES, 0.0)}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._now_s = 0.0

    @property
    def num_devices(self) -> int:
        return sum(cell.num_devices for cell in self.cells)

    def passed(self, now_s: float, causes: Mapping[str, str]) -> None:
        """Count the time up to now for idle devices of each kind under this cause."""
        for kind, cause in causes.items():
            self._sums[kind][cause] += now_s - self._now_s
        self._now_s = now_s

    def begin(self, worker: str, state: State) -> None:
        self._change(worker, state, 1)

    def end(self, worker: str, state: State) -> None:
        self._change(worker, state, -1)

    def lost(self, worker: str) -> None:
        """Note that the devices of a worker have failed."""
        for cell in self._of_worker[worker]:
            self._close(cell)
            cell.is_lost = True

    def came_back(self, worker: str) -> None:
        """Note that the devices of a worker are back."""
        for cell in self._of_worker[worker]:
            self._close(cell)
            cell.is_lost, cell.sums = False, dict(self._sums[cell.kind])

    def owned(self, worker: str, kind: str) -> None:
        """Note that the devices of a worker now belong to this kind of engine."""
        for cell in self._of_worker[worker]:
            self._close(cell)
            cell.kind, cell.sums = kind, dict(self._sums[kind])

    def take(self) -> dict[str, float]:
        """Return the device seconds since the last call: `work`, and idle seconds by cause."""
        for cell in self.cells:
            self._close(cell)
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)

    def _change(self, worker: str, state: State, by: int) -> None:
        for cell in self._of_worker[worker]:
            before = cell.state
            after_count = cell.active[state] + by
            if before == "idle" or after_count == 0 or STATES.index(state) < STATES.index(before):
                self._close(cell)
            cell.active[state] = after_count

    def _close(self, cell: Cell) -> None:
        """Count a cell's time up to now, and begin a new interval."""
        state, passed_s = cell.state, self._now_s - cell.since_s
        cell.since_s = self._now_s
        if cell.is_lost or not cell.workers:
            self._seconds["failed" if cell.is_lost else "unused"] += passed_s * cell.num_devices
            return
        sums = self._sums[cell.kind]
        if state != "idle":
            self._seconds[state] += passed_s * cell.num_devices
        elif passed_s > 0:
            for cause, total in sums.items():
                if total > cell.sums.get(cause, 0.0):
                    self._seconds[cause] += (total - cell.sums.get(cause, 0.0)) * cell.num_devices
        cell.sums = dict(sums)


def _cells(machines: Mapping[str, Machine], num_devices: Mapping[str, int]) -> tuple[Cell, ...]:
    cells = []
    for pool in {**dict.fromkeys(num_devices), **{machine.pool: None for machine in machines.values() if machine.place}}:
        places = [(machine.place, machine) for machine in machines.values() if machine.place is not None and machine.pool == pool]
        total = max([num_devices.get(pool, 0), *[place.stop for place, _ in places]])
        edges = sorted({0, total, *[edge for place, _ in places for edge in (place.first, place.stop)]})
        spans: dict[int, list[Machine]] = {first: [] for first in edges[:-1]}
        for place, machine in places:
            for first in edges[edges.index(place.first) : edges.index(place.stop)]:
                spans[first].append(machine)
        for first, stop in itertools.pairwise(edges):
            cells.append(Cell(pool, first, stop - first, tuple(m.worker for m in spans[first]), _first_kind(spans[first])))
    return tuple(cells)


def _first_kind(machines: Iterable[Machine]) -> str:
    found = {kind for machine in machines for kind in kinds(machine)}
    return "rollout" if "rollout" in found or not found else "train"


# ---- the simulation


class _Records(Records):
    """What workers have written down when they fail."""

    def __init__(self) -> None:
        super().__init__()
        self.unreported: dict[str, list[m.Flushed]] = {}

    def settle(self, worker: str, reason: str = "") -> Unreported:
        return tuple(self.unreported.pop(worker, ()))

    def read_back(self, push: m.Push) -> Batch:
        return _NO_ROWS


_NO_ROWS = Batch(np.zeros(0, np.int64))
"""Rows without contents: where they are and since when is `RowTimes`'."""


@final
class _RowsHere:
    """The rows of datasets, by time and place (`RowTimes`)."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def put(self, call: int, batch: Batch, sender: str = "") -> None:
        self._simulation.sourced(call, batch)

    def get(self, call: int, ids: Sequence[int]) -> Batch:
        return _NO_ROWS

    def forget(self, call: int) -> None:
        self._simulation.rows.forget(call, CONTROLLER)


@final
class _Alarms:
    """The deadlines of running samples, each with an action of the clock."""

    def __init__(self, clock: Clock, late: Callable[[list[TimedOut]], None]) -> None:
        self._deadlines = Deadlines()
        self._clock = clock
        self._late = late

    def began(self, task: m.Generate, call: Call, now_s: float) -> None:
        due_s = self._deadlines.began(task, call, self._clock.now_s)
        if due_s is not None:
            self._clock.at(due_s, lambda: self._late(self.due(self._clock.now_s)))

    def due(self, now_s: float) -> list[TimedOut]:
        return self._deadlines.due(now_s)


@dataclass(frozen=True)
class Failure:
    """A failure of workers, for good or until a given time."""

    at_s: float
    workers: tuple[str, ...]
    back_s: float | None = None


@dataclass(frozen=True)
class DoneTask:
    """A task that a worker did, other than generation."""

    worker: str
    task: m.Task
    call: Call | None
    start_s: float
    end_s: float


@dataclass
class Period:
    """A step of the program, from the end of the step before to the end of its last call; or the time before or after the loop."""

    step: int
    """Number of the step; -1 outside the loop."""
    start_s: float = 0.0
    end_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Device seconds: `work`, and idle by cause."""
    turns: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Worker, and role of an engine there -> its count of decode turns at the end."""
    peak_bytes: int = 0
    """Bytes on the fullest device."""

    @property
    def makespan_s(self) -> float:
        return self.end_s - self.start_s


@dataclass
class History:
    """All that happened in a simulated run."""

    periods: list[Period]
    sample_runs: Mapping[str, list[SampleRun]]
    """Worker -> the samples that it had."""
    done_tasks: list[DoneTask]
    calls: Mapping[int, Call]
    versions: Mapping[int, int]
    """Sample -> the version of the weights that generated it; the oldest of several."""
    given: Mapping[int, int]
    """Carried sample -> the call whose result it is in."""
    wasted: set[int]
    """Samples that are in no result."""
    drawn: Drawn
    num_tokens: Callable[[int], int]
    num_events: int
    num_devices: int
    without_groups: bool = False
    """Whether samples were trained on without waiting for their siblings."""
    rested: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Worker -> when it had episodes and nothing to decode, since all waited for tools or agents; in seconds."""
    tools: Mapping[str, ToolCost] = field(default_factory=dict)


@final
class Simulation:
    """One simulated run. Implements `Surroundings` for its workers."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        spec: ClusterSpec,
        machines: Mapping[str, Machine],
        drawn: Drawn,
        *,
        function_cost: Callable[[Call], FunctionCost | None],
        hop_s: Callable[[float, str, str], float],
        message_s: float = 0.0,
        tools: Iterable[ToolCost] = (),
        slowdown: Slowdown = undisturbed,
        failures: Iterable[Failure] = (),
        without_groups: bool = False,
    ) -> None:
        self._without_groups = without_groups
        self.clock = Clock()
        self.drawn = drawn
        self.tools = {one.name: one for one in tools}
        pools = {name: machine.pool for name, machine in machines.items()}
        self.rows = RowTimes(lambda num_bytes, source, target: hop_s(num_bytes, pools.get(source, ""), pools.get(target, "")))
        self._program = program
        self._machines = machines
        self._function_cost = function_cost
        if plan.difficulty == PREFILL:  # A simulated prompt has no embedding.
            plan = msgspec.structs.replace(plan, difficulty="")
        self._scheduler = Scheduler(plan, ablation=Ablation(drawn.response_tokens, without_groups))
        every, reports = report_every(plan.policies, plan.predictor, plan.num_instances), reports_of(plan.policies)
        self._workers = {name: VirtualWorker(machine, self, report_every=every, reports=reports) for name, machine in machines.items()}
        ahead = Lookahead(program.staleness, spec.run_ahead_bytes)
        self._records = _Records()
        alarms = _Alarms(self.clock, lambda late: self._said.extend(late))
        self._core = ControllerCore(plan, self._scheduler, self._records, alarms, _RowsHere(self))
        for name in machines:
            self._core.came_up(name)
        self._core.begin()
        self._driver = Driver(program, Lowering(plan, spec), ahead, self._post)
        self._usage = Usage(machines, {name: pool.num_devices for name, pool in spec.pools.items()})
        for failure in failures:
            self.clock.at(failure.at_s, lambda failure=failure: self._fail(failure))  # type: ignore[misc]
        self._message_s = message_s
        self._incarnations: Counter[str] = Counter()
        self._paces = Paces(undisturbed if spec.pools else slowdown, machines)
        self._said: deque[FromWorker | TimedOut] = deque()
        self._calls: dict[int, Call] = {}
        self._texts: dict[int, int] = {}
        """Row of a dataset -> tokens, as predicted from its texts."""
        self._held: dict[tuple[str, str], int] = {}
        self._versions: dict[int, int] = {}
        self._wasted: set[int] = set()
        self._given: dict[int, int] = {}
        self._kept: dict[int, tuple[VersionSpan, ...]] = {}
        """Stopped sample -> its tokens then."""
        self._done_tasks: list[DoneTask] = []
        self._starts: dict[int, float] = {}
        self._num_sample_runs: Counter[str] = Counter()
        self._num_generating = 0
        self._num_instances = sum("rollout" in kinds(machine) for machine in machines.values())
        self._num_busy: Counter[str] = Counter()
        """Tasks under way by kind: `train`, `function`, `sync`."""
        self._switching: Counter[str] = Counter()
        self._ahead: set[int] = set()  # Onloads that begin while samples still run.
        self._periods, self._period_of, self._open = _periods(program)
        self._at = 0
        self._owners = {machine.lease: ROLLOUT for machine in machines.values() if machine.lease}

    def run(self) -> History:
        """Run to the end of the program.

        Raises:
            M2FlowError: a call failed (a refill that ran dry). InternalError: nothing moves any more.
        """
        self._note_memory()
        self._settle()
        while not self._driver.is_finished:
            if self.clock.next_s is None:
                raise InternalError("nothing moves any more: " + "; ".join(self._scheduler.waiting()))
            self._usage.passed(self.clock.next_s, self._causes())
            self.clock.turn()
            self._settle()
        self._end_periods()
        runs = {name: worker.sample_runs for name, worker in self._workers.items()}
        return History(
            self._periods,
            runs,
            self._done_tasks,
            self._calls,
            self._versions,
            self._given,
            self._wasted,
            self.drawn,
            self.num_tokens,
            self.clock.num_events,
            self._usage.num_devices,
            self._without_groups,
            {name: [(start_s, end_s) for start_s, end_s in worker.rested] for name, worker in self._workers.items()},
            self.tools,
        )

    # ---- what workers see of the run (`Surroundings`)

    def call(self, ordinal: int) -> Call:
        return self._calls[ordinal]

    def num_tokens(self, packed: int) -> int:
        if self.drawn.is_drawn(packed):
            return self.drawn.prompt_tokens(packed) + self.drawn.response_tokens(packed)
        return self._texts.get(packed, 1)

    def function_cost(self, call: Call) -> FunctionCost | None:
        return None if call.options.get("style") == "columns" else self._function_cost(call)

    def stopped(self, packed: int) -> tuple[VersionSpan, ...]:
        return self._kept[packed]

    def is_lost(self, process: str) -> bool:
        worker = worker_of(process)
        return self._workers[worker].is_lost or tag_of(worker, self._incarnations[worker]) != process

    def worker(self, process: str) -> VirtualWorker | None:
        return None if self.is_lost(process) else self._workers[worker_of(process)]

    def keep(self, ids: Iterable[int], version_spans: Iterable[tuple[VersionSpan, ...]]) -> None:
        self._kept.update(zip(ids, version_spans, strict=True))

    def say(self, worker: str, message: m.WorkerReport) -> None:
        if self._message_s:
            count = self._incarnations[worker]
            self.clock.at(self.clock.now_s + self._message_s, lambda: self._heard(worker, count, message))
        else:
            self._said.append(FromWorker(worker, message))

    def pace(self, worker: str, kind: Kind) -> float:
        return self._paces.of(worker, kind)

    def started(self, worker: str, task: m.Task, seconds: float) -> None:
        self._starts[task.number] = self.clock.now_s
        if isinstance(task, m.Switch):
            lease = self._machines[worker].lease
            if any(self._num_sample_runs[name] for name, machine in self._machines.items() if machine.lease == lease):
                self._ahead.add(task.number)
                self._note_memory(worker, self._machines[worker].kept_bytes(task.to))
                return
            self._switching[lease] += 1
            if self._switching[lease] == 1:
                self._change_lease(lease, self._usage.begin)
            return
        if isinstance(task, m.CopyWeights):
            machine = self._machines[worker]
            self._note_memory(
                worker, machine.copy_bytes(str(self._calls[task.call].options["source"]), self._owners.get(machine.lease, ""))
            )
        self._num_busy[_what(task, self._kind_of(task))] += 1
        self._usage.begin(worker, _state(task))
        self._works(worker, task, 1)

    def ended(self, worker: str, task: m.Task) -> None:
        call = self._calls.get(task.call)
        self._done_tasks.append(DoneTask(worker, task, call, self._starts.pop(task.number), self.clock.now_s))
        if task.number in self._ahead:
            return
        if isinstance(task, m.Switch):
            lease = self._machines[worker].lease
            self._switching[lease] -= 1
            self._owners[lease] = task.to
            if not self._switching[lease]:
                self._change_lease(lease, self._usage.end)
                for name, machine in self._machines.items():
                    if machine.lease == lease:
                        self._usage.owned(name, kind_of(task.to))
                self._note_memory()
            return
        self._num_busy[_what(task, self._kind_of(task))] -= 1
        self._usage.end(worker, _state(task))
        self._works(worker, task, -1)

    def generating(self, worker: str, num_runs: int) -> None:
        before = self._num_sample_runs[worker]
        self._num_sample_runs[worker] += num_runs
        self._num_generating += bool(self._num_sample_runs[worker]) - bool(before)
        if not before and num_runs > 0:
            self._usage.begin(worker, "work")
            self._changes_pace(worker, "rollout", 1)
        elif before and not self._num_sample_runs[worker]:
            self._usage.end(worker, "work")
            self._changes_pace(worker, "rollout", -1)

    def rests(self, worker: str, is_resting: bool) -> None:
        old: State
        new: State
        old, new = ("work", "tool") if is_resting else ("tool", "work")
        self._usage.begin(worker, new)
        self._usage.end(worker, old)
        self._changes_pace(worker, "rollout", -1 if is_resting else 1)

    def _works(self, worker: str, task: m.Task, by: int) -> None:
        if not isinstance(task, m.LoadWeights | m.PublishWeights):
            self._changes_pace(worker, "function" if self._kind_of(task) == "function" else "train", by)

    def _changes_pace(self, worker: str, kind: Kind, by: int) -> None:
        if self._paces.change(worker, kind, by):
            for name, other in self._workers.items():
                if name != worker:
                    other.paced()

    # ---- the controller's part

    def _settle(self) -> None:
        """Give the scheduler what was said, and let the program go on, until nothing is left to do at this moment."""
        while True:
            while self._said:
                said = self._said.popleft()
                if isinstance(said, FromWorker):
                    self._carry_out(self._core.heard(said.worker, said.message))
                else:
                    self._carry_out(self._core.handle(said))
            self._driver.advance()
            if not self._said:
                return

    def _post(self, post: Submitted | Wanted | Released) -> None:
        if isinstance(post, Submitted):
            self._calls[post.call.ordinal] = post.call
        self._carry_out(self._core.post(post))
        if isinstance(post, Submitted):
            self.drawn.made(post.call, self._calls)
        self._carry_out(self._core.flush())

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if type(effect) is Send:
                self._tell(effect.worker, effect.message)
            else:
                self._act(effect)

    def _tell(self, worker: str, message: m.ToWorker) -> None:
        if isinstance(message, m.Generate):
            self._began(worker, message)
        elif isinstance(message, m.LoadWeights):  # What is sent behind it runs with it.
            self._held[worker, message.role] = message.version
        if self._message_s:
            count = self._incarnations[worker]
            self.clock.at(self.clock.now_s + self._message_s, lambda: self._told(worker, count, message))
        else:
            self._workers[worker].receive(message)

    def _act(self, effect: Effect) -> None:
        match effect:
            case SendRows(to, call, ids, _, source):
                self.rows.send(call, ids, source, worker_of(to), self.clock.now_s, self.num_tokens)
            case Resolved(call, _):
                self._driver.resolved(call.ordinal)
                self._resolved(call.ordinal)
            case Rejected(_, error, _):
                raise error
            case Discarded(ordinal, last):
                self._wasted.update(row for row in self._versions if _is_beyond(row, ordinal, last))
            case Dropped(_, ids) | Late(_, ids):
                self._wasted.update(ids)
            case TakenOver(ordinal, ids):
                self._wasted.difference_update(ids)
                self._given.update(dict.fromkeys(ids, ordinal))
            case Expired(_, ids):
                for run in [run for w in self._workers.values() for run in w.sample_runs if run.id in ids]:
                    run.is_wasted, run.num_kept = True, 0
            case _:
                pass

    def _began(self, worker: str, task: m.Generate) -> None:
        """Note the weight version of dispatched samples; of samples that go on, the oldest."""
        held = self._held.get((worker, self._calls[task.call].role), 0)
        for row in task.ids:
            self._versions[row] = min(held, self._versions.get(row, held)) if task.aborted_by >= 0 else held

    def sourced(self, ordinal: int, rows: Batch) -> None:
        """Note that a dataset's rows are read."""
        ids = rows.ids.tolist()
        self._texts.update(zip(ids, call_semantics.num_tokens_of(rows), strict=True))
        self.rows.made(ordinal, ids, CONTROLLER, self.clock.now_s)

    def _resolved(self, ordinal: int) -> None:
        """End the periods whose calls are all done."""
        self._open[self._period_of[ordinal]] -= 1
        while self._at < len(self._periods) and not self._open[self._at]:
            self._end_period()

    def _end_period(self) -> None:
        period = self._periods[self._at]
        period.end_s = self.clock.now_s
        period.seconds = self._usage.take()
        period.turns = {(name, role): turns for name, worker in self._workers.items() for role, turns in worker.turns().items()}
        self._at += 1
        if self._at < len(self._periods):
            self._periods[self._at].start_s = self.clock.now_s
            self._note_memory()

    def _end_periods(self) -> None:
        while self._at < len(self._periods):
            self._end_period()

    def _fail(self, failure: Failure) -> None:
        """Fail workers: only what they had written down is left; tell the scheduler."""
        for name in failure.workers:
            if not self._workers[name].is_lost:
                self._records.unreported[name] = self._workers[name].flushed()
                self.rows.written_down(name, LEDGER, self.clock.now_s)
                self._workers[name].lose()
                self.rows.lost(name)
                self._usage.lost(name)
        for name in failure.workers:
            self._carry_out(self._core.lost(WorkerLost(name, returns=failure.back_s is not None)))
        if failure.back_s is not None:
            self.clock.at(max(failure.back_s, self.clock.now_s), lambda: self._come_back(failure.workers))

    def _come_back(self, workers: Iterable[str]) -> None:
        """Restart workers on the same devices; tell the scheduler."""
        for name in workers:
            if self._workers[name].is_lost:
                self._incarnations[name] += 1
                for role in [role for worker, role in self._held if worker == name]:
                    del self._held[name, role]
                self._workers[name].come_back()
                self._usage.came_back(name)
                self._carry_out(self._core.came_up(name, self._incarnations[name]))

    def _told(self, worker: str, incarnation: int, message: m.ToWorker) -> None:
        if incarnation == self._incarnations[worker]:
            self._workers[worker].receive(message)

    def _heard(self, worker: str, incarnation: int, message: m.WorkerReport) -> None:
        """Deliver a worker's message; messages of a process that is gone are discarded."""
        if incarnation == self._incarnations[worker]:
            self._said.append(FromWorker(worker, message))

    # ---- why devices are idle

    def _causes(self) -> dict[str, str]:
        busy = self._num_busy
        return causes_of(
            Doing(
                num_generating=self._num_generating,
                num_instances=self._num_instances,
                syncs=busy["sync"] > 0,
                trains=busy["train"] > 0,
                judges=busy["function"] > 0,
                switches=any(self._switching.values()),
                lacks_memory=self._driver.blocked == "memory",
            )
        )

    def _kind_of(self, task: m.Task) -> str:
        return self._calls[task.call].engine if task.call >= 0 else "train"

    def _change_lease(self, lease: str, change: Callable[[str, State], None]) -> None:
        for name, machine in self._machines.items():
            if machine.lease == lease:
                change(name, "switch")

    def _note_memory(self, at: str = "", more_bytes: int = 0) -> None:
        """Note the memory of the fullest device; a worker may have more on its devices for a moment."""
        if self._at >= len(self._periods):
            return
        fullest = 0
        for cell in self._usage.cells:
            machines = [self._machines[name] for name in cell.workers]
            held = sum(m.resident_bytes(self._owners[m.lease]) if m.lease else m.all_bytes for m in machines)
            fullest = max(fullest, held + more_bytes * (at in cell.workers))
        self._periods[self._at].peak_bytes = max(self._periods[self._at].peak_bytes, fullest)


def _what(task: m.Task, engine: str) -> str:
    if isinstance(task, m.LoadWeights | m.PublishWeights):
        return "sync"
    return "function" if engine == "function" else "train"


def _state(task: m.Task) -> State:
    return "sync" if isinstance(task, m.LoadWeights | m.PublishWeights) else "work"


def _is_beyond(row: int, ordinal: int, last: int) -> bool:
    who = SampleId.unpack(row)
    return who.call == ordinal and who.prompt > last


def _periods(program: Program) -> tuple[list[Period], dict[int, int], list[int]]:
    """The periods of a program, the period of each call, and the number of calls in each."""
    calls = [item.call for item in program.items if isinstance(item, Made)]
    last = max((call.step for call in calls), default=-1)
    first_call = next((call.ordinal for call in calls if call.step >= 0), len(calls))
    periods = [Period(-1), *[Period(step) for step in range(last + 1)], Period(-1)]
    place = {call.ordinal: call.step + 1 if call.step >= 0 else 0 if call.ordinal < first_call else last + 2 for call in calls}
    num_open = [0] * len(periods)
    for at in place.values():
        num_open[at] += 1
    return periods, place, num_open
