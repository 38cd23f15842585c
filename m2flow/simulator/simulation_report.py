"""Report a simulated run step by step: makespan, efficiency against lower bounds, idle time by cause, staleness, memory.

    History --report_of--> Report

Bounds of a period:

    longest_sample   (t0 + t1) L + its part of training + an optimiser step     a token follows the one before it
    work             device seconds of all tokens at the best rate and of all training, by all devices
    k_longest        of the rollout, with free migration    (`m2flow.rollout_scheduling.decode_model`)
    no_migration     of the rollout, each sample where it began
    critical_path    max_k (r_k + sum of the training of what is released from r_k on), r_k when a group may be done at the earliest

A period counts what lies within its ends: the tokens in between of a sample that began earlier or goes on later, and the share of the time
of a task. So the first four hold with any staleness; the last only if a step's samples are generated and trained in it. Fixed costs of
micro-batches, switches, syncs and hops are left out, so no bound is above what some schedule on these placements can reach.

A step lasts from the end of the step before it to the end of its last call. With staleness, or with carried samples, steps overlap: the
numbers of a step are then those of the work done between these ends, and the names of its bounds say so (`..._between_releases`). A
makespan below a bound of its period, or of the whole run, is an internal error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from m2flow.errors import InternalError
from m2flow.macro.graph import Call
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import Costs, DecodeCost, TrainCost
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.protocol.staleness import window
from m2flow.recipe import Sampling
from m2flow.rollout_scheduling.decode_model import DecodeModel, rollout_bounds
from m2flow.rollout_scheduling.lengths import Lengths
from m2flow.samples import SampleId, by_group
from m2flow.simulator.machines import Machine, machines_of, with_paces
from m2flow.simulator.sample_lengths import Drawn
from m2flow.simulator.simulation import DoneTask, Failure, History, Period, Program, Simulation
from m2flow.simulator.virtual_worker import SampleRun
from m2flow.spec import ClusterSpec


@dataclass(frozen=True)
class Simulated:
    """A simulated run, and the time that simulating it took."""

    history: History
    wall_s: float


def simulate(
    program: Program,
    plan: Plan,
    spec: ClusterSpec,
    costs: Costs,
    lengths: Lengths,
    *,
    seed: int = 0,
    kept: Mapping[str, float] | None = None,
    failures: Iterable[Failure] = (),
    without_groups: bool = False,
) -> Simulated:
    """Run a program's steps on a virtual clock.

    Args:
        kept: share of units that a filter or a refill keeps, by role or call name; by default a filter keeps all, and a refill as many as
            the costs say.
        without_groups: samples do not wait for their siblings, which no run could do.
    Raises:
        M2FlowError: a call of it fails.
    """
    started = time.perf_counter()
    trained = frozenset(call.role for call in program.graph.calls if call.method == "update")
    plan = with_paces(plan, spec, costs)
    limits = [sampling.max_new_tokens for call in program.graph.calls if isinstance(sampling := call.options.get("sampling"), Sampling)]
    drawn = Drawn(
        lengths,
        seed,
        kept=kept,
        draws_per_group=costs.draws_per_group(),
        trained=trained,
        limit=max(limits, default=0),
        episodes=costs.episodes(),
    )
    simulation = Simulation(
        program,
        plan,
        spec,
        machines_of(plan, spec, costs),
        drawn,
        function_cost=lambda call: costs.function(call.name),
        hop_s=costs.hop_s,
        message_s=costs.message_s(),
        tools=costs.episodes().tools,
        failures=failures,
        without_groups=without_groups,
        slowdown=lambda kind, beside: 1.0 if kind == "function" else costs.slowdown(kind, beside),
    )
    history = simulation.run()
    return Simulated(history, time.perf_counter() - started)


# ---- lower bounds

_ROUNDING = 1e-6
"""Tolerance in tokens for rounding in sums of turns."""


@dataclass(frozen=True)
class TimeWindow:
    """A stretch of virtual time, with the count of decode turns at both ends, by worker and role of the engine."""

    start_s: float
    end_s: float
    turns_before: Mapping[tuple[str, str], float]
    turns_after: Mapping[tuple[str, str], float]


def span_bounds(history: History, machines: Mapping[str, Machine], span: TimeWindow, *, is_self_contained: bool) -> dict[str, float]:
    """The lower bounds of a span in seconds, by name.

    Args:
        is_self_contained: what is trained in the span was generated in it, so that the order of both counts too.
    """
    pieces = {
        name: [(run, _whole(run, span.turns_before.get((name, run.role), 0.0), span.turns_after[name, run.role])) for run in runs]
        for name, runs in history.sample_runs.items()
        if machines[name].decode
    }
    done_tasks = [done for done in history.done_tasks if done.end_s > span.start_s and done.start_s < span.end_s]
    found: dict[str, float] = {}
    device_s = _decode_device_s(pieces, machines, span) + _train_device_s(done_tasks, history, machines, span)
    found["work"] = device_s / max(history.num_devices, 1)
    for role in {role for machine in machines.values() for role in machine.decode}:
        hosts = [name for name, machine in machines.items() if role in machine.decode]
        lengths = np.array([tokens for name in hosts for run, tokens in pieces[name] if run.role == role and tokens])
        if not len(lengths):
            continue
        bounds = rollout_bounds(lengths, _best(machines[name].decode[role] for name in hosts), len(hosts))
        for key, seconds in (
            ("longest_sample", bounds.longest_s),
            ("k_longest", bounds.k_longest_s),
            ("no_migration", bounds.no_migration_s),
        ):
            found[key] = max(found.get(key, 0.0), seconds)
    found |= _episode_bounds(history, machines, span)
    if is_self_contained:
        made = {run.id: (run, tokens) for found_here in pieces.values() for run, tokens in found_here if tokens}
        for update in _updates(done_tasks, history, machines, span):
            parts = [[row] for row in update.ids] if history.without_groups else list(by_group(update.ids).values())
            _of_update(found, update, made, machines, parts)
    return found


def _episode_bounds(history: History, machines: Mapping[str, Machine], span: TimeWindow) -> dict[str, float]:
    """The longest of the episodes that were played within a span, alone and with its tools; and the tools by their slots."""
    hosts = {name: runs for name, runs in history.sample_runs.items() if machines[name].decode}
    longest_s, called_s = 0.0, dict[str, float]()
    for runs in hosts.values():
        for run in runs:
            if not run.stays or run.is_wasted or run.begun_s < span.start_s or not 0 <= run.ended_s <= span.end_s:
                continue
            alone_s = _best(machines[name].decode[run.role] for name in hosts if run.role in machines[name].decode).alone_token_s
            reach_s = waited_s = 0.0
            for name, start_s, end_s in sorted(run.called, key=lambda call: call[1]):
                waited_s += max(end_s - max(start_s, reach_s), 0.0)
                reach_s = max(reach_s, end_s)
                tool = history.tools.get(name)
                if tool is not None and tool.slots:
                    pool = "" if tool.shares_slots else name
                    called_s[pool] = called_s.get(pool, 0.0) + (end_s - start_s) / (tool.slots * len(hosts))
            longest_s = max(longest_s, alone_s * run.tokens_until(run.ended) + waited_s)
    told = {"longest_chain": longest_s, "tool_slots": max(called_s.values(), default=0.0)}
    return {name: seconds for name, seconds in told.items() if seconds > 0}


@dataclass(frozen=True)
class _Update:
    """An update call whose work lies in a span."""

    cost: TrainCost
    ids: Sequence[int]
    num_tokens: Mapping[int, int]
    has_stepped: bool

    def seconds(self, ids: Iterable[int]) -> float:
        """Seconds of training on these samples, without the fixed cost of micro-batches."""
        return self.cost.update.seconds([self.num_tokens[row] for row in ids], 0)

    @property
    def end_s(self) -> float:
        return self.cost.optimizer_s if self.has_stepped else 0.0


def _of_update(
    found: dict[str, float],
    update: _Update,
    made: Mapping[int, tuple[SampleRun, int]],
    machines: Mapping[str, Machine],
    parts: Sequence[Sequence[int]],
) -> None:
    """Raise the bounds by the training: a sample is trained on when it is done, and a part (a group) when all of it is."""
    alone: dict[str, float] = {}
    for machine in machines.values():
        for role, cost in machine.decode.items():
            alone[role] = min(alone.get(role, float("inf")), cost.step_s + cost.sample_s)
    released_s = {row: tokens * alone[run.role] for row, (run, tokens) in made.items()}
    for row in update.ids:
        if row in made:
            whole_s = released_s[row] + update.seconds([row]) + update.end_s
            found["longest_sample"] = max(found.get("longest_sample", 0.0), whole_s)
    groups = [(max(released_s.get(row, 0.0) for row in rows), rows) for rows in parts]
    left_s = 0.0
    for release_s, rows in sorted(groups, key=lambda pair: pair[0], reverse=True):
        left_s += update.seconds(rows)
        found["critical_path"] = max(found.get("critical_path", 0.0), release_s + left_s + update.end_s)


def _updates(done_tasks: Sequence[DoneTask], history: History, machines: Mapping[str, Machine], span: TimeWindow) -> list[_Update]:
    """The updates whose work lies in a span, each for one epoch."""
    rows: dict[int, list[int]] = {}
    costs: dict[int, TrainCost] = {}
    stepped: set[int] = set()
    for done in done_tasks:
        if done.call is None or done.call.method != "update" or done.start_s < span.start_s or done.end_s > span.end_s:
            continue
        costs[done.call.ordinal] = machines[done.worker].train[done.call.role]
        if isinstance(done.task, m.Accumulate) and done.task.epoch == 0:
            rows.setdefault(done.call.ordinal, []).extend(done.task.ids)
        if isinstance(done.task, m.Apply) and done.task.is_last:
            stepped.add(done.call.ordinal)
    return [
        _Update(costs[ordinal], ids, {row: history.num_tokens(row) for row in ids}, ordinal in stepped) for ordinal, ids in rows.items()
    ]


def _whole(run: SampleRun, before: float, after: float) -> int:
    """Whole tokens of a sample between two counts of turns."""
    return int(run.tokens_until(after) - run.tokens_until(before) + _ROUNDING)


def _decode_device_s(pieces: Mapping[str, Sequence[tuple[SampleRun, int]]], machines: Mapping[str, Machine], span: TimeWindow) -> float:
    """Device seconds of decoding at the best rate; of engines that decode at the same time, those of the busiest."""
    total = 0.0
    for name, found in pieces.items():
        machine = machines[name]
        seconds = dict.fromkeys(machine.decode, 0.0)
        for run, tokens in found:
            cost = machine.decode[run.role]
            seconds[run.role] += tokens * (cost.step_s / cost.max_running + cost.sample_s)
        total += max((sum(seconds[role] for role in roles) for roles in machine.lanes), default=0.0) * machine.num_devices
    return total


def _train_device_s(done_tasks: Sequence[DoneTask], history: History, machines: Mapping[str, Machine], span: TimeWindow) -> float:
    total = 0.0
    for done in done_tasks:
        if done.call is None or done.call.engine != "train":
            continue
        cost = machines[done.worker].train[done.call.role]
        lengths = [history.num_tokens(row) for row in getattr(done.task, "ids", ())]
        match done.task:
            case m.Accumulate():
                needed_s = cost.update.seconds(lengths, 0)
            case m.RunFunction():
                needed_s = cost.forward.seconds(lengths, 0)
            case m.Apply():
                needed_s = cost.optimizer_s
            case _:
                continue
        inside_s = min(done.end_s, span.end_s) - max(done.start_s, span.start_s)
        took_s = done.end_s - done.start_s
        total += needed_s * (inside_s / took_s if took_s > 0 else 1.0) * machines[done.worker].num_devices
    return total


def _best(costs: Iterable[DecodeCost]) -> DecodeModel:
    """A decode cost as good as the best of several in each respect."""
    known = list(costs)
    return DecodeModel(  # Batches that were all of one size are fitted without a time of any step.
        max(min(cost.step_s for cost in known), 1e-9),
        min(cost.sample_s for cost in known),
        max_batch=max(cost.max_running for cost in known),
    )


# ---- report

_TOLERANCE = 1e-7
"""Relative tolerance, since the sums are taken in another order."""
_GIB = 2**30
BETWEEN = "_between_releases"


class StepReport(msgspec.Struct, frozen=True):
    """The report of one step. Device seconds are summed over all devices."""

    makespan_s: float
    lower_bounds_s: dict[str, float]
    efficiency: float
    """Highest bound divided by the makespan."""
    idle_s: dict[str, float]
    """Idle device seconds by cause (`m2flow.simulator.simulation`)."""
    staleness: dict[str, int]
    """Versions behind -> samples trained on in this step."""
    trained_tokens: int
    """Generated tokens of samples that were trained on, counted once whatever the epochs."""
    wasted_tokens: int
    """Tokens generated for samples that are in no result."""
    peak_memory_gib: float
    """Memory of the fullest device."""


class Report(msgspec.Struct, frozen=True):
    """The report of a whole run."""

    steps: list[StepReport]
    num_events: int
    wall_s: float
    """Seconds that simulating it took."""


class RunTotals(msgspec.Struct, frozen=True):
    """Totals over the steps of a run."""

    makespan_s: float
    bound_s: float
    """Bound of all steps: the sum of their highest bounds; if they overlap, the highest of the whole run."""
    efficiency: float
    idle_s: dict[str, float]
    busy_share: float
    """Share of all device seconds that is work."""


def report_of(simulated: Simulated, machines: Mapping[str, Machine], *, overlaps: bool) -> Report:
    """Make the report of every step.

    Args:
        overlaps: steps may overlap: there is staleness.
    Raises:
        InternalError: a makespan is below a bound: the simulator, a cost or a bound is wrong.
    """
    history = simulated.history
    before: Period | None = None
    steps = []
    for period in history.periods:
        if period.step >= 0 or (period.makespan_s and not any(s.step >= 0 for s in history.periods)):
            steps.append(_step(history, machines, period, before, overlaps=overlaps))
        before = period
    return Report(steps, history.num_events, simulated.wall_s)


def totals_of(report: Report, history: History, machines: Mapping[str, Machine], *, overlaps: bool) -> RunTotals:
    """Add up the steps of the loop; of a flow without a loop, all periods.

    Raises:
        InternalError: the whole run is below a bound.
    """
    periods = history.periods
    inside = [at for at, period in enumerate(periods) if period.step >= 0] or list(range(len(periods)))
    first, last = periods[inside[0]], periods[inside[-1]]
    before = periods[inside[0] - 1].turns if inside[0] else {}
    span = TimeWindow(first.start_s, last.end_s, before, last.turns)
    bounds = span_bounds(history, machines, span, is_self_contained=not overlaps and len(inside) == 1)
    makespan_s = span.end_s - span.start_s
    _check("the run", makespan_s, bounds)
    bound_s = max(bounds.values(), default=0.0)
    if not overlaps:
        bound_s = max(bound_s, sum(max(step.lower_bounds_s.values(), default=0.0) for step in report.steps))
    causes = {cause for at in inside for cause in periods[at].seconds}
    seconds = {cause: sum(periods[at].seconds.get(cause, 0.0) for at in inside) for cause in causes}
    whole = sum(seconds.values())
    idle = {cause: value for cause, value in sorted(seconds.items()) if cause != "work" and value > 0}
    return RunTotals(
        makespan_s, bound_s, bound_s / makespan_s if makespan_s else 1.0, idle, seconds.get("work", 0.0) / whole if whole else 0.0
    )


def _step(history: History, machines: Mapping[str, Machine], period: Period, before: Period | None, *, overlaps: bool) -> StepReport:
    span = TimeWindow(period.start_s, period.end_s, before.turns if before else {}, period.turns)
    bounds = span_bounds(history, machines, span, is_self_contained=not overlaps)
    _check(f"step {period.step}", period.makespan_s, bounds)
    staleness: Counter[int] = Counter()
    trained = 0
    for row in _consumed(history, period.step):
        if history.drawn.is_drawn(row) and row in history.versions:
            giver = history.given.get(row, SampleId.unpack(row).call)
            staleness[_staleness_of(history.calls[giver], history.versions[row])] += 1
            trained += history.drawn.response_tokens(row)
    return StepReport(
        makespan_s=period.makespan_s,
        lower_bounds_s={name + BETWEEN * overlaps: seconds for name, seconds in sorted(bounds.items())},
        efficiency=_efficiency(period.makespan_s, bounds),
        idle_s={cause: value for cause, value in sorted(period.seconds.items()) if cause != "work" and value > 0},
        staleness={str(behind): count for behind, count in sorted(staleness.items())},
        trained_tokens=trained,
        wasted_tokens=_wasted(history, period.step),
        peak_memory_gib=period.peak_bytes / _GIB,
    )


def _consumed(history: History, step: int) -> set[int]:
    return {
        row
        for done in history.done_tasks
        if isinstance(done.task, m.Accumulate) and done.call is not None and done.call.step == step
        for row in done.task.ids
    }


def _wasted(history: History, step: int) -> int:
    total = 0.0
    for runs in history.sample_runs.values():
        for run in runs:
            if (run.is_wasted or run.id in history.wasted) and history.calls[run.call].step == step:
                total += run.tokens_until(run.ended) - (0 if run.id in history.wasted else run.num_kept)
    return round(total)


def _efficiency(makespan_s: float, bounds: Mapping[str, float]) -> float:
    return max(bounds.values(), default=0.0) / makespan_s if makespan_s > 0 else 1.0


def _check(what: str, makespan_s: float, bounds: Mapping[str, float]) -> None:
    for name, seconds in bounds.items():
        if makespan_s < seconds * (1 - _TOLERANCE):
            raise InternalError(
                f"{what} took {makespan_s!r} s in the simulation, and no schedule takes less than {seconds!r} s ({name})",
                now="The simulator, the costs or the bound is wrong. Please report this, with the command.",
            )


def _staleness_of(call: Call, version: int) -> int:
    """The number of versions that a sample is behind what sequential execution would have used."""
    return max(window(call)[1] - version, 0) if call.reads else 0
