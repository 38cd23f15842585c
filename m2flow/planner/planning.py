"""Plan a flow: set up the question from its graph, lengths and costs, choose the placement, and forecast the step time of any plan.

    MacroGraph, models, ClusterSpec, lengths, profile --question_of--> Question --choose--> Choice --(m2flow.micro.lowering.passes)--> Plan
    Plan, ClusterSpec, Question --forecast--> Forecast        shown by `m2flow view` and `analyze` next to what happened
        Forecast <--read, write--> RUN/forecast.json

`m2flow plan`, `m2flow run` and `m2flow simulate` share this. Placement is searched for where the spec leaves it open: it has pools, or
says `placement: auto`. Otherwise the rule of `m2flow.micro.lowering.placement` applies.

With `functions: {workers: auto}` the search also chooses the number of processes for functions, simulators among them: the fewest within 1%
of the fastest; with `roles: {simulator: auto}` those of a role's own, too. A flow without models is planned by this alone, and by which
roles have processes of their own: each candidate's step is simulated (`_Schedule`), row by row, as the scheduler would hand the rows out.
So a simulator that steps some lanes while an actor infers for others is predicted to take the longer of both, not their sum. Limits: lanes
that stay with their process drift from step to step, so that processes which all share may be some percent slower or faster in the run;
what functions and engines take from each other on one machine's cores is in no prediction; and the steps of a flow whose calls use results
of the step before (`--behind`) may overlap more.

A plan by rule (`split`, `time-shared`) or from a file runs as it is; `forecast` only predicts its time, with the costs of a profile or of
the hardware model. Limits: chunk sizes are the search's, and contention of processes without a lease on each other's devices is unknown.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import msgspec
import numpy as np

from m2flow.engines.registry import check_trainer, train_options
from m2flow.errors import EngineError, M2FlowError, PlanError, SpecError
from m2flow.macro.graph import MacroGraph
from m2flow.micro.lowering.passes import lower
from m2flow.micro.lowering.placement import check_pins
from m2flow.micro.protocol.cost_terms import DRAWS_PER_GROUP, Costs, EpisodeCosts, EpisodeTurn, FunctionCost
from m2flow.micro.protocol.plan import Bound, Choice, Loser, Plan, TimeTerm, WorkerPlan
from m2flow.micro.records.ledger import lengths_of_run
from m2flow.planner.cost_model import ModelledCosts, shapes_of
from m2flow.planner.model_shapes import ModelShape
from m2flow.planner.pools import offered, refused_in_all
from m2flow.planner.problem import options_of
from m2flow.planner.profiles import Profile, ProfiledCosts, read_profile
from m2flow.planner.search import find_plan
from m2flow.planner.workload import Away, CallLoad, Workload, extents_of, function_times, num_units, workload_of
from m2flow.recipe import Model, hub_directory, is_of_hub
from m2flow.rollout_scheduling.lengths import Lengths, Mixture, parse_lengths
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, base_of

_ASSUMED_SHARE, _ASSUMED_SIGMA = 0.25, 0.8
"""Assumed lengths: the median as a share of the limit, and sigma of the log length, typical of many kinds of runs."""

_FEW = 5e-4
"""The share of responses that may be truncated without a note."""


@dataclass(frozen=True)
class Question:
    """A planning problem: one flow on one cluster, with its workload, lengths and costs."""

    workload: Workload
    lengths: Lengths
    lengths_are_known: bool
    """Whether lengths were given or measured; otherwise they are assumed from the limit of the generate calls."""
    costs: Costs
    spec: ClusterSpec
    doubts: tuple[str, ...] = ()
    """Reasons why the profile may not apply to this cluster."""
    check: Callable[[Choice], object] | None = None
    """Lowers a choice; raises PlanError if it can't be run."""

    def choose(self, spec: ClusterSpec | None = None, *, is_alone: bool = False) -> Choice:
        """Find the fastest plan of the cost model that can be run.

        Args:
            spec: the same cluster with other pins; None: the question's own.
            is_alone: leave out the comparison with other plans.
        Raises:
            PlanError: nothing fits, with what is short and what would help.
        """
        spec = spec or self.spec
        if not spec.functions.is_searched:
            return find_plan(self.workload, self.lengths, self.costs, spec, is_alone=is_alone, check=self.check)
        if not self.workload.engines:
            return choose_processes(self.workload, self.costs, spec, is_alone=is_alone)
        started, (found, is_exact) = time.perf_counter(), self._by_processes(spec)
        best_s = min(choice.predicted_step_s for choice in found.values())
        layout = min(
            [one for one, choice in found.items() if choice.predicted_step_s <= best_s * _AS_FAST],
            key=lambda one: (sum(num for _, num in one), found[one].predicted_step_s),
        )
        if is_alone:
            return msgspec.structs.replace(found[layout], search_s=time.perf_counter() - started, is_exact=is_exact)
        whole = self._with_processes(dict(layout), spec, is_alone=False)
        if spec.functions.roles:
            ends = (min(found, key=lambda one: sum(num for _, num in one)), max(found, key=lambda one: sum(num for _, num in one)))
            why = ("they are too few", "more gain nothing")
            others = [
                Loser(_in_words(dict(end)), found[end].predicted_step_s, reason, found[end].parts)
                for end, reason in zip(ends, why, strict=True)
                if end != layout
            ]
        else:
            others = _others({dict(one)["*"]: choice for one, choice in found.items()}, dict(layout)["*"])
        return msgspec.structs.replace(
            whole, losers=(*whole.losers, *others), search_s=time.perf_counter() - started, is_exact=whole.is_exact and is_exact
        )

    def _by_processes(self, spec: ClusterSpec) -> tuple[dict[tuple[tuple[str, int], ...], Choice], bool]:
        """The fastest plan for each tried number of processes by role (`*`: those that all others share); and whether none may be faster.

        One number alone is tried up to a process for each core. Of several, one after the other is set to what is fastest with the others
        as they are, until none gains.
        """
        given: dict[str, int | str] = {"*": spec.functions.workers, **spec.functions.roles}
        numbers = {name: [num] if isinstance(num, int) else _numbers_up_to(spec.num_cores) for name, num in given.items()}
        searched = [name for name, num in given.items() if num == "auto"]
        layout = {name: nums[0] for name, nums in numbers.items()}
        most = max(spec.num_cores, sum(layout.values()))
        found: dict[tuple[tuple[str, int], ...], Choice] = {}
        is_better = True
        while is_better:
            before = dict(layout)
            for name in searched:
                tried = [one for num in numbers[name] if sum((one := layout | {name: num}).values()) <= most]
                for one in tried:
                    if (key := tuple(one.items())) not in found:
                        found[key] = self._with_processes(one, spec, is_alone=True)
                best_s = min(found[tuple(one.items())].predicted_step_s for one in tried)
                layout = next(one for one in tried if found[tuple(one.items())].predicted_step_s <= best_s * _AS_FAST)
            is_better = layout != before and len(searched) > 1
        return found, len(searched) == 1 and len(numbers[searched[0]]) == numbers[searched[0]][-1]

    def _with_processes(self, layout: Mapping[str, int], spec: ClusterSpec, *, is_alone: bool) -> Choice:
        """The fastest plan with so many processes for functions, by role."""
        own = {role: num for role, num in layout.items() if role != "*"}
        fixed = spec.model_copy(update={"functions": spec.functions.model_copy(update={"workers": layout["*"], "roles": own})})
        choice = find_plan(self.workload, self.lengths, self.costs, fixed, is_alone=is_alone, check=self.check)
        return msgspec.structs.replace(choice, num_function_workers=layout["*"], num_own_workers=own or None)


_AS_FAST = 1.01
"""A plan is as fast as another if it takes at most so many times as long."""
_MOST_TRIED = 16
"""Numbers of processes that are all tried where each needs a search of placements; of more, some."""


def _numbers_up_to(most: int) -> list[int]:
    found = [1]
    while found[-1] < most:
        found.append(min(most, found[-1] + (1 if found[-1] < _MOST_TRIED else found[-1] // 4)))
    return found


def _others(found: Mapping[int, Choice], best: int) -> list[Loser]:
    """Plans with fewer and with more processes that all share."""
    last = max(found)
    why = {num: "they are too few" if num < best else "more gain nothing" for num in (1, best // 2, best + 1, last)}
    return [
        Loser(f"{num} process{'es' if num > 1 else ''} for functions", found[num].predicted_step_s, why[num], found[num].parts)
        for num in why
        if num in found and num != best
    ]


# ---- flows that have functions alone

_MOST_SIMULATED, _FEW_SIMULATED = 60_000, 40
"""Rows of calls in all simulated steps of a kind of layout, and layouts that are simulated in any case; of more, some are left out."""
_LITTLE = 0.05
"""A share of a step's work for which no role gets processes of its own unasked."""


def choose_processes(workload: Workload, costs: Costs, spec: ClusterSpec, *, is_alone: bool = False) -> Choice:
    """Choose how many processes all functions share and how many are a role's own, for a flow without models: the fewest within 1% of the
    fastest, and with `workers: auto` alone also whether any are a role's own.
    """
    started, given = time.perf_counter(), spec.functions
    own: dict[str, int | str] = dict(given.roles)
    layouts, is_exact = _layouts(workload, own, given.workers, spec.num_cores)
    if not own and (streaming := _streaming(workload, costs)):
        more, are_all = _layouts(workload, dict.fromkeys(streaming, "auto"), given.workers, spec.num_cores)
        layouts, is_exact = layouts + more, is_exact and are_all
    made = [(layout, _placed(workload, costs, spec, layout)) for layout in layouts]
    best_s = min(choice.predicted_step_s for _, choice in made) * _AS_FAST
    # Of two that are as fast, processes that all share: where the costs are estimated wrongly, none is idle.
    layout, found = min(
        [one for one in made if one[1].predicted_step_s <= best_s],
        key=lambda one: (len(one[0]), sum(one[0].values()), one[1].predicted_step_s),
    )
    losers = _others({one["*"]: choice for one, choice in made if len(one) == 1}, layout["*"]) if len(layout) == 1 else []
    others = [one for one in made if len(one[0]) != len(layout)]
    if others:
        other, choice = min(others, key=lambda one: (one[1].predicted_step_s, sum(one[0].values())))
        why = "roles wait for each other" if len(other) == 1 else "a role is idle while another is busy"
        why = why if choice.predicted_step_s > best_s else "processes of their own gain nothing"
        losers.append(Loser(_in_words(other), choice.predicted_step_s, why, choice.parts))
    return msgspec.structs.replace(
        found, losers=() if is_alone else tuple(losers), search_s=time.perf_counter() - started, is_exact=is_exact
    )


def _in_words(layout: Mapping[str, int]) -> str:
    own = ", ".join(f"{num} of {role}" for role, num in layout.items() if role != "*")
    return f"{layout['*']} process{'es' if layout['*'] > 1 else ''} for functions" + f" beside {own}" * bool(own)


def _streaming(workload: Workload, costs: Costs) -> list[str]:
    """Roles whose calls are on single rows, and take a good part of the step."""
    work: dict[str, float] = {}
    for call in workload.calls:
        work.setdefault(base_of(call.name), 0.0)
        work[base_of(call.name)] += costs.function(call.name).mean_s * num_units(call)
    least = _LITTLE * sum(work.values())
    found = dict.fromkeys(base_of(call.name) for call in workload.calls if call.unit == "sample" and num_units(call) > 1)
    return [role for role in found if work[role] > least]


def _layouts(workload: Workload, own: Mapping[str, int | str], shared: int | str, most: int) -> tuple[list[dict[str, int]], bool]:
    """Numbers of processes to try, by role, and whether they are all that may be fastest; `*`: those that all others share."""
    given = {"*": shared, **own}
    units = dict.fromkeys(given, 1)
    for call in workload.calls:
        role = base_of(call.name) if base_of(call.name) in own else "*"
        units[role] = max(units[role], num_units(call))
    enough = max(_FEW_SIMULATED, _MOST_SIMULATED // sum(map(num_units, workload.calls)))
    is_exact = bool(own) or most <= enough
    tried: dict[str, list[int]] = {}
    for role, num in given.items():
        # Of a role's own, more help only where the busiest one then has a row fewer.
        few = {-(-units[role] // each) for each in range(1, units[role] + 1)}
        every = few if own or not is_exact else range(1, most + 1)
        tried[role] = [num] if isinstance(num, int) else sorted({1, *(one for one in every if one <= most)})
    is_exact = is_exact and math.prod(map(len, tried.values())) <= enough
    while math.prod(map(len, tried.values())) > enough:
        role = max(tried, key=lambda role: len(tried[role]))
        tried[role] = [*tried[role][:-1:2], tried[role][-1]]
    least = sum(min(nums) for nums in tried.values())
    found = [dict(zip(tried, nums, strict=True)) for nums in itertools.product(*tried.values())]
    return [one for one in found if sum(one.values()) <= max(most, least)], is_exact


def _placed(workload: Workload, costs: Costs, spec: ClusterSpec, layout: Mapping[str, int]) -> Choice:
    """Predict a step of a flow that has functions alone, in these processes."""
    step = _Schedule(workload.calls, [costs.function(call.name) for call in workload.calls], layout, spec.functions.chunk).run()
    alone: dict[str, float] = {}
    work_s = 0.0
    for call in workload.calls:
        cost, units = costs.function(call.name), num_units(call)
        alone[call.name] = max((alone[before] for before in call.after), default=0.0) + function_times(call, cost, max(units, 1), 1).first
        work_s += units * cost.mean_s / max(1, min(cost.concurrency, units))
    return Choice(
        flow=workload.flow,
        cluster=spec.name,
        mode="split" if len(layout) > 1 else "time-shared",
        placements=(),
        predicted_step_s=step.seconds,
        parts=tuple(TimeTerm(name, seconds, name in step.on_path_s) for name, seconds in {**step.busiest_s, **step.on_path_s}.items()),
        bounds=(Bound("critical path", max(alone.values())), Bound("work", work_s / spec.num_cores)),
        is_exact=True,
        gap_s=0.0,
        advice=max(step.busiest_s, key=lambda name: step.busiest_s[name]),
        losers=(),
        search_s=0.0,
        constraints_cost_s={},
        constants=costs.constants(),
        num_function_workers=layout["*"],
        num_own_workers={role: num for role, num in layout.items() if role != "*"},
    )


@dataclass(frozen=True)
class FunctionStep:
    """A simulated step of calls on functions; by the calls' names without lines."""

    seconds: float
    on_path_s: dict[str, float]
    """Of the chain of tasks, each begun when the one before it ended, that ends last; its sum is the step."""
    busiest_s: dict[str, float]
    """Seconds of the process that works the longest on it."""


class _Task(NamedTuple):
    """A task of a simulated step that has begun."""

    call: int
    units: list[int]
    process: int
    begin_s: float
    end_s: float
    before: int
    """The task at whose end it began; -1: none."""


_MOST_QUEUED, _QUICK_S = 2, 1e-3
"""Tasks of a process at most, and what is too short to be shared out: as `m2flow.micro.scheduler.ready_queues` has them."""


@final
class _Schedule:
    """Hands out rows as `m2flow.micro.scheduler.dispatch.FunctionDispatch` does: the earliest call's, to its least busy process."""

    def __init__(self, calls: Sequence[CallLoad], costs: Sequence[FunctionCost], processes: Mapping[str, int], chunk: int) -> None:
        self._calls, self._costs, self._most = calls, costs, chunk
        self._role = [base_of(call.name) if base_of(call.name) in processes else "*" for call in calls]
        firsts = itertools.accumulate(processes.values(), initial=0)
        self._pools = {role: range(first, first + num) for (role, num), first in zip(processes.items(), firsts, strict=False)}
        self._queues: list[list[tuple[int, list[int]]]] = [[] for _ in range(sum(processes.values()))]
        """Process -> its tasks, the first of which has begun."""
        self._tasks: list[_Task] = []
        self._ends: list[tuple[float, int]] = []
        self._units = [num_units(call) for call in calls]
        self._left = list(self._units)
        self._ready: list[list[int]] = [[] for _ in calls]
        self._waiting: dict[str, list[int]] = {role: [] for role in processes}
        """Role with processes -> calls with ready units, a heap."""
        place = {call.name: i for i, call in enumerate(calls)}
        self._users: list[list[int]] = [[] for _ in calls]
        for i, call in enumerate(calls):
            for before in call.after:
                self._users[place[before]].append(i)
        self._missing = [[len(call.after)] * units for call, units in zip(calls, self._units, strict=True)]
        """Call -> for each unit, the inputs that are still to come."""
        self._keeps = [any(base_of(call.name) == base_of(before) for before in call.after) for call in calls]
        """Whether rows of a call go to the process that made them in an earlier call of its role."""
        self._home: dict[tuple[str, int], int] = {}
        """(role, unit) -> the process that had it last; at first as rows are shared out that come all at once."""
        for i in [i for i, keeps in enumerate(self._keeps) if keeps]:
            pool, units = self._pools[self._role[i]], self._units[i]
            own = -(-units // len(pool))
            self._home.update({(base_of(calls[i].name), unit): pool[unit // own] for unit in range(units)})

    def run(self) -> FunctionStep:
        for i, call in enumerate(self._calls):
            if not call.after:
                self._comes(i, range(self._units[i]), num=0)
        self._hand_out(0.0, -1)
        while self._ends:
            now_s, number = heapq.heappop(self._ends)
            task = self._tasks[number]
            self._queues[task.process].pop(0)
            self._left[task.call] -= len(task.units)
            for user in self._users[task.call]:
                if self._goes_row_by_row(task.call, user):
                    self._comes(user, task.units)
                elif not self._left[task.call]:
                    self._comes(user, range(self._units[user]))
            if self._queues[task.process]:
                self._begin(task.process, now_s, number)
            self._hand_out(now_s, number)
        return self._step()

    def _goes_row_by_row(self, source: int, user: int) -> bool:
        one, other = self._calls[source], self._calls[user]
        return one.unit == other.unit and self._units[source] == self._units[user] and not other.is_barrier

    def _comes(self, call: int, units: Iterable[int], num: int = 1) -> None:
        """Note that units of a call have an input more."""
        had = bool(self._ready[call])
        for unit in units:
            self._missing[call][unit] -= num
            if not self._missing[call][unit]:
                self._ready[call].append(unit)
        if self._ready[call] and not had:
            heapq.heappush(self._waiting[self._role[call]], call)

    def _hand_out(self, now_s: float, number: int) -> None:
        while True:
            free = {
                calls[0]: process
                for role, calls in self._waiting.items()
                if calls and len(self._queues[process := min(self._pools[role], key=lambda at: len(self._queues[at]))]) < _MOST_QUEUED
            }
            if not free:
                return
            call = min(free)
            for process, units in self._shares(call, free[call]):
                self._ready[call] = [unit for unit in self._ready[call] if unit not in units]
                self._queues[process].append((call, units))
                self._home.update({(base_of(self._calls[call].name), unit): process for unit in units})
                if len(self._queues[process]) == 1:
                    self._begin(process, now_s, number)
            if not self._ready[call]:
                heapq.heappop(self._waiting[self._role[call]])

    def _shares(self, call: int, process: int) -> list[tuple[int, list[int]]]:
        """The next tasks of a call: what processes kept, or what the least busy one takes."""
        ready, role, pool = self._ready[call], base_of(self._calls[call].name), self._pools[self._role[call]]
        most = min(self._most, -(-self._units[call] // (2 * len(pool)))) if self._role[call] != "*" else self._most
        if self._keeps[call] and len(pool) > 1:
            kept: dict[int, list[int]] = {}
            for unit in ready:
                if self._home.get((role, unit)) in pool:
                    kept.setdefault(self._home[role, unit], []).append(unit)
            if kept:
                return [(at, units[first : first + most]) for at, units in kept.items() for first in range(0, len(units), most)]
        if len(pool) > 1 and len(ready) * self._costs[call].mean_s >= _QUICK_S:
            has = [sum(len(units) for _, units in self._queues[at]) for at in pool]
            most = min(most, max(-(-(len(ready) + sum(has)) // len(pool)) - has[process - pool.start], 1))
        return [(process, ready[: max(most, 1)])]

    def _begin(self, process: int, now_s: float, number: int) -> None:
        call, units = self._queues[process][0]
        cost = self._costs[call]
        seconds = cost.task_s + len(units) * cost.mean_s / max(1, min(cost.concurrency, len(units)))
        heapq.heappush(self._ends, (now_s + seconds, len(self._tasks)))
        self._tasks.append(_Task(call, units, process, now_s, now_s + seconds, number))

    def _step(self) -> FunctionStep:
        busy: dict[str, dict[int, float]] = {}
        for task in self._tasks:
            own = busy.setdefault(self._calls[task.call].name.partition("@")[0], {})
            own[task.process] = own.get(task.process, 0.0) + task.end_s - task.begin_s
        at = max(range(len(self._tasks)), key=lambda number: self._tasks[number].end_s)
        on_path, seconds = dict.fromkeys(busy, 0.0), self._tasks[at].end_s
        while at >= 0:
            task = self._tasks[at]
            on_path[self._calls[task.call].name.partition("@")[0]] += task.end_s - task.begin_s
            at = task.before
        return FunctionStep(
            seconds, {name: on for name, on in on_path.items() if on}, {name: max(own.values()) for name, own in busy.items()}
        )


UNKNOWN_TOOLS = "what the agents' tools take is not known, so each episode counts as one turn; a profile of a run that played some knows it"
"""A doubt about simulated and predicted times of flows with agents."""


UNKNOWN_TURNS = (
    "how long the turns of {} are is not known, so what episodes wait for them is left out of the step; "
    "a profile of a run that played some knows it"
)
"""A doubt about the predicted times of flows in whose episodes others speak from devices of their own."""


def is_searched(spec: ClusterSpec, models: Mapping[str, Model]) -> bool:
    """Whether the search chooses the placement. A flow without models has nothing to place but functions, whose number may be chosen."""
    return (bool(models) or spec.functions.is_searched) and (bool(spec.pools) or spec.placement == "auto")


def with_shapes(spec: ClusterSpec, texts: tuple[str, ...]) -> ClusterSpec:
    """Add shapes given as `policy=Qwen2.5-7B` to the spec.

    Raises:
        SpecError: a text is not of that form.
    """
    shapes = dict(spec.shapes)
    for text in texts:
        role, equals, name = text.partition("=")
        if not (role and equals and name):
            raise SpecError(f"--shape {text}: it must be ROLE=MODEL", now="Example: --shape policy=Qwen2.5-7B")
        shapes[role] = name
    return spec.model_copy(update={"shapes": shapes})


def find_models(models: Mapping[str, Model], spec: ClusterSpec, *, with_weights: bool) -> None:
    """Find the hub's models that this machine needs, or download them: for a plan their config and tokenizer, for a run the weights.

    Raises:
        ModelError: files are missing that can't be had.
    """
    is_elsewhere = bool(spec.pools) and not with_weights
    for role, model in models.items():
        is_fake = {spec.rollout.engine, spec.train.engine} == {"fake"}
        if is_of_hub(model.path) and not is_fake and not is_elsewhere and (with_weights or role not in spec.shapes):
            hub_directory(model, with_weights=with_weights)


def question_of(
    graph: MacroGraph,
    models: Mapping[str, Model],
    spec: ClusterSpec,
    *,
    lengths: str | Lengths = "",
    profile: Path | Profile | None = None,
    copies: Mapping[str, str] | None = None,
) -> Question:
    """Set up planning for a traced flow.

    Args:
        graph: some steps of the flow, with the calls before and after them.
        lengths: of responses, as `m2flow.rollout_scheduling.lengths.parse_lengths` takes them; by default those that the profile
            observed, and without a profile an assumption from the limit of the generate calls. Text that these limits contradict is
            refused, observed lengths are truncated.
        profile: written by `m2flow profile`, or measured by a run so far; without one all costs are modelled.
        copies: role -> the role whose weights it takes, as `m2flow.micro.lowering.passes.lower` takes them.
    Raises:
        SpecError: lengths or a profile that can't be used. ModelError: nothing says how large a model is.
    """
    check_pins(graph, models, spec)
    measured = read_profile(profile) if isinstance(profile, Path) else profile
    if spec.costs:  # What the cluster's own file says holds where nothing else was measured.
        given = read_profile(Path(spec.costs))
        measured = given.updated(measured) if measured else given
    if measured is not None:
        measured.check(models, spec)
    draws = measured.draws_per_group if measured else 0.0
    workload = workload_of(graph, spec, draws_per_group=draws or DRAWS_PER_GROUP)
    observed = measured.lengths() if measured and measured.responses else None
    known = parse_lengths(lengths, lengths_of_run) if isinstance(lengths, str) and lengths else lengths or observed
    shapes = shapes_of(models, spec)
    _check_shapes(workload, shapes, spec)
    found, cuts = _within_limits(known or _assumed(workload), workload, shapes, given=lengths if isinstance(lengths, str) else "")
    modelled = ModelledCosts(spec, workload, shapes, extents_of(workload, shapes, found))
    costs = ProfiledCosts(measured, modelled) if measured else modelled
    has_agents = any("agent" in call.options for call in graph.calls)
    blind = (UNKNOWN_TOOLS,) if has_agents and not costs.episodes().episodes else ()
    workload, deaf = with_waits(workload, costs, spec)
    doubts = (*cuts, *(measured.doubts(spec, graph.flow) if measured else ()), *blind, *deaf)
    return Question(workload, found, known is not None, costs, spec, doubts, partial(_lowered, graph, models, spec, copies))


def with_waits(workload: Workload, costs: Costs, spec: ClusterSpec) -> tuple[Workload, tuple[str, ...]]:
    """The workload, with what episodes wait for tools and for those who speak in them from devices of their own, as recorded episodes say;
    and a doubt about those speakers of whom none says anything.

    A turn takes what it takes in the fastest layout that may be chosen, in a batch of the share of all episodes that the turns' share of
    the tokens gives.
    """
    played = costs.episodes().episodes
    num_tokens = sum(turn.num_tokens for one in played for turn in one)
    of_tools = _waits_for_tools(costs.episodes())
    found = {call.name: msgspec.structs.replace(call, away=of_tools) if call.is_played else call for call in workload.calls}
    unknown = []
    for call in [call for call in workload.calls if call.beside and call.engine is not None]:
        assert call.engine is not None
        turns = [turn for one in played for turn in one if turn.role == call.engine.role]
        options = options_of([call.engine], costs, spec).of[call.engine]
        if not turns or not options:
            unknown.append(call.engine.role)
            continue
        share = sum(turn.num_tokens for turn in turns) / num_tokens
        waits = []
        for option in options:
            cost = costs.decode(call.engine, option.pool, option.layout)
            at_once = min(max(1.0, call.num_samples * share / option.layout.dp), cost.max_running)
            read_s = sum(turn.prefill_tokens for turn in turns) * cost.prefill_token_s
            way_s = 2 * len(turns) * costs.hop_s(0, option.pool, option.pool)
            waits.append((share * cost.seconds(at_once), (read_s * at_once + way_s) / len(played)))
        token_s, episode_s = min(waits, key=lambda wait: wait[0] * num_tokens / len(played) + wait[1])
        before = found[call.beside].away
        away = Away(before.share + share, before.token_s + token_s, before.episode_s + episode_s)
        found[call.beside] = msgspec.structs.replace(found[call.beside], away=away)
        found[call.name] = msgspec.structs.replace(call, away=Away(1.0 - share))
    doubts = (UNKNOWN_TURNS.format(", ".join(dict.fromkeys(unknown))),) if unknown else ()
    return msgspec.structs.replace(workload, calls=tuple(found.values())), doubts


def _waits_for_tools(known: EpisodeCosts) -> Away:
    """What episodes wait for tools and for their agents: the line of least squares by the tokens of an episode, where it rises."""
    if not known.episodes:
        return Away()

    def seconds(turn: EpisodeTurn) -> float:
        factors = [[s * (1.0 if (tool := known.tool(name)) is None else tool.factor) for name, s in group] for group in turn.calls]
        return sum(max(group, default=0.0) for group in factors) + turn.rest_s

    tokens = np.array([sum(turn.num_tokens for turn in one) for one in known.episodes], np.float64)
    waits_s = np.array([sum(map(seconds, one)) for one in known.episodes], np.float64)
    spread = tokens - tokens.mean()
    slope = float(spread @ waits_s / max(spread @ spread, 1.0))
    most = float(waits_s.mean() / max(tokens.mean(), 1.0))  # A steeper line would have short episodes wait less than not at all.
    token_s = min(max(slope, 0.0), most)
    return Away(0.0, token_s, float(waits_s.mean()) - token_s * float(tokens.mean()))


def _check_shapes(workload: Workload, shapes: Mapping[str, ModelShape], spec: ClusterSpec) -> None:
    """Check that the trainer can have the models of its roles in some layout. Raises `EngineError`."""
    offers = offered(spec.train.engine, "train")
    for engine in workload.engines:
        why = refused_in_all(shapes[engine.role], offers) if engine.kind == "train" and engine.role in shapes else ""
        if why:
            raise EngineError(
                f"the train engine {spec.train.engine!r} can't have the model of {engine.role}: {why}",
                now="Take another train engine: `m2flow engines` lists them.",
            )


def check_trainers(plan: Plan, spec: ClusterSpec, models: Mapping[str, Model]) -> None:
    """Check that a plan's trainers can have the models of their roles, in its layouts.

    Raises:
        EngineError: one can't. ModelError: a model is not there.
    """
    for worker in plan.workers:
        for slot in worker.engines:
            if slot.kind == "train" and slot.role in models:
                given = train_options(slot.engine, spec.train.options, slot.planned)
                check_trainer(slot.engine, models[slot.role], given, worker.ranks)


def _lowered(graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, copies: Mapping[str, str] | None, choice: Choice) -> Plan:
    return lower(graph, models, spec, choice=choice, copies=copies)


def _within_limits(
    lengths: Lengths, workload: Workload, shapes: Mapping[str, ModelShape], *, given: str
) -> tuple[Lengths, tuple[str, ...]]:
    """Truncate lengths to what `max_new_tokens` and the models' contexts allow; also returns notes on what was truncated.

    A formula without a cap says how long answers would be if nothing stopped them: it is cut at the limit. Others say what was.

    Raises:
        SpecError: text asks for answers that no call allows, or a call for more than a context holds.
    """
    calls = [call for call in workload.calls if call.work == "generate" and call.max_new_tokens]
    if not calls:
        return lengths, ()
    call = max(calls, key=lambda call: call.max_new_tokens)
    limit, longest = call.max_new_tokens, lengths.longest
    for one in calls:
        assert one.engine is not None
        context = shapes[one.engine.role].max_context if one.engine.role in shapes else 0
        if context and lengths.longest_prompt + one.max_new_tokens > context:
            prompts = f"prompts of up to {lengths.longest_prompt:,} tokens and " if lengths.longest_prompt else ""
            raise SpecError(
                f"{one.name}: {prompts}answers of up to {one.max_new_tokens:,} tokens (max_new_tokens) do not fit the context of "
                f"{one.engine.role}'s model, {context:,} tokens",
                now="Lower max_new_tokens in the flow, or plan for a model with a longer context (--shape ROLE=MODEL).",
            )
    if longest is not None and longest <= limit:
        return lengths, ()
    share = lengths.survival(limit)
    if given and (longest is not None or share > 0.5):
        reach = (
            f"answers of up to {longest:,} tokens"
            if longest is not None
            else f"answers of which {share:.0%} are longer than {limit:,} tokens"
        )
        cap = "" if "cap=" in given else f", or cut the lengths there: --lengths {given},cap={limit}"
        raise SpecError(
            f"--lengths {given}: {reach}, and {call.name} stops at {limit:,} (max_new_tokens)",
            now=f"Raise max_new_tokens in the flow{f' to {longest}' if longest else ''} (of a flow that takes it: --max-new-tokens){cap}.",
        )
    if share < _FEW:
        return lengths.cut_at(limit), ()
    return lengths.cut_at(limit), (
        f"{share:.1%} of the answers of {lengths.name} are cut at {limit:,} tokens, max_new_tokens of {call.name}",
    )


def _assumed(workload: Workload) -> Lengths:
    limits = [call.max_new_tokens for call in workload.calls if call.work == "generate"]
    cap = max(limits, default=1)
    prompts = [call.prompt_bytes / 4 for call in workload.calls if call.work == "generate" and call.prompt_bytes]
    median = max(1.0, cap * _ASSUMED_SHARE)
    return Mixture([1.0], [median], [_ASSUMED_SIGMA], cap=cap, prompt_tokens=max(1, round(max(prompts, default=1.0))))


_FILE = "forecast.json"
_AMPLE_GIB = 2.0**20


@final
class Forecast(msgspec.Struct, frozen=True):
    """The predicted step of a run's plan."""

    choice: Choice | None
    note: str = ""
    """Why there is no prediction, or what it leaves out."""


_read_forecast = msgspec.json.Decoder(Forecast).decode


def forecast(plan: Plan, spec: ClusterSpec, ask: Callable[[ClusterSpec], Question]) -> Forecast:
    """Predict the step time of a plan, part by part. Problems become a note in the forecast; a run never fails for them.

    Args:
        ask: makes the question for a cluster, with the workload, costs and lengths to use.
    """
    try:
        pins, used = _pins(plan, spec)
        (pool,) = spec.planned_pools.values()
        notes, there = [], pool.num_devices
        if used > there and spec.launcher == "local":
            what = "cores" if pool.device == "cpu" else "devices"
            notes.append(f"as if each process had {what} of its own: they use {used}, and there are {there}")
        question = ask(_with_room(spec, pins, used))
        notes += [doubt for doubt in question.doubts if doubt.startswith(UNKNOWN_TURNS.partition("{}")[0])]
        choice = _choice(question)
    except M2FlowError as error:
        return Forecast(None, str(error).partition("\n")[0])
    if not any(constant.source.startswith("measured") for constant in choice.constants.values()):
        notes.append("by a model of the hardware; `m2flow profile` measures this one")
    return Forecast(choice, "; ".join(notes))


def write_forecast(run_dir: Path, found: Forecast) -> None:
    (run_dir / _FILE).write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def read_forecast(run_dir: Path) -> Forecast | None:
    """Read the forecast of a run; None if there is none."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return _read_forecast((run_dir / _FILE).read_bytes())
    return None


def read_prediction(run_dir: Path, plan: Plan | None) -> Choice | None:
    """The predicted step of a run: of the search, or of its forecast."""
    if plan is not None and plan.choice is not None:
        return plan.choice
    foreseen = read_forecast(run_dir)
    return foreseen.choice if foreseen else None


def _choice(question: Question) -> Choice:
    missing = [str(engine) for engine in question.workload.engines if str(engine) not in question.spec.pin]
    if missing:
        raise PlanError(
            f"the plan has no process for {', '.join(missing)}",
            now="Say `placement: auto` in the cluster spec, or pin these engines, and plan again.",
        )
    return find_plan(question.workload, question.lengths, question.costs, question.spec, is_alone=True)


def _with_room(spec: ClusterSpec, pins: Mapping[str, PinSpec], used: int) -> ClusterSpec:
    """The spec with every engine pinned where it is, and enough devices and memory, since fit is not the question here."""
    ((name, pool),) = spec.planned_pools.items()
    each = math.lcm(*(pin.devices[1] - pin.devices[0] for pin in pins.values() if pin.devices))
    size = max(used, pool.num_devices)
    room = pool.model_copy(update={"devices_per_node": -(-size // each) * each})  # Engines may have parts that come out even.
    if pool.device == "cpu":
        room = room.model_copy(update={"memory_gib": _AMPLE_GIB})
    return spec.model_copy(update={"placement": "auto", "pin": {**pins, **spec.pin}, "pools": {name: room}})


def _pins(plan: Plan, spec: ClusterSpec) -> tuple[dict[str, PinSpec], int]:
    """Pin each engine to the devices of its workers, placed next to each other; also returns their number."""
    if spec.pools:
        raise PlanError(
            "the plan's cluster has pools, and nobody searched for a place in them",
            now="Say `placement: auto` in the cluster spec and plan again: in pools, places are searched for.",
        )
    ((name, pool),) = spec.planned_pools.items()
    at, places = 0, dict[str, list[tuple[WorkerPlan, int, int]]]()
    for worker in plan.workers:
        slots = [slot for slot in worker.engines if slot.kind in ("rollout", "train")]
        if not slots or worker.is_spare:
            continue
        each, ranks = worker.threads if pool.device == "cpu" else 1, max(worker.ranks, 1)
        for slot in slots:
            end = at + each * (ranks if slot.kind == "train" else 1)
            places.setdefault(f"{slot.role}.{slot.kind}", []).append((worker, at, end))
        at += each * ranks
    found = {}
    for engine, mine in places.items():
        first, last = mine[0][1], mine[-1][2]
        num_processes = max(mine[0][0].ranks, 1) if engine.endswith(".train") else len(mine)
        # What a trainer's ranks make of its GPUs is the spec's to say; nobody chose an order of stages for it.
        is_open = engine.endswith(".train") and pool.device != "cpu"
        layout = LayoutSpec(vpp=1, schedule="1f1b") if is_open else LayoutSpec(dp=num_processes, tp=(last - first) // num_processes)
        found[engine] = PinSpec(pool=name, devices=(first, last), layout=layout)
    return found, at
