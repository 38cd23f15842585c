"""The search against RLinf's published scheduling algorithm on equal costs: steps of both plans, played chunk by chunk.

    python benchmarks/vs_rlinf.py [--devices 8 16 64 256 1024] [--steps chain ppo] [--num 50] [--against alternating draining]

    random costs --best_plan--> our plan    --played--> seconds of the step
                 --published--> their plan  --played--> seconds of the step          ratio = ours / theirs

Costs. Each call has a random time by devices (work, loss by scale, a fixed time for each chunk), memory (weights, working memory) and time
to be moved to the host and back; all calls of a step have one model-parallel degree, and replicas beyond that are free. The tables are
the search's own: both read `call_times` and the options of `Problem`. Generation hands on its samples at an even pace, as theirs has it.

Theirs, from the paper (Yu et al., RLinf, arXiv:2509.15965, section on the scheduler), in our words:

    F(G, N) = E(G, N) of a single call, or the least over cuts of G into Gs before Gt, of
        temporal   F(Gs, N) + F(Gt, N), and moving both where the memory does not hold them
        spatial    T_critical + (M/m - 1) T_bottleneck on Ns + Nt = N devices, over all granularities m

T_critical is the time of the first chunk through both parts, T_bottleneck that of the slower part for each further chunk. Inside a spatial
part a temporal one alternates chunk by chunk (`alternating`), or may not (`draining`). The former needs an engine that stops generating in
the middle of a batch, which neither a lease here nor continuous batching does, and that moves to the host and back with each chunk. Where
the paper is silent, the better reading is taken: unlinked parts side by side take the longer time.

Played. Both plans are executed chunk by chunk by one event loop that knows no formula of either: a call's chunks in order, each when its
inputs are there and its devices are free; of those that could begin, the one whose call has done the least share. Parts in turns wait for
each other as their plan says; trainers that stay on their devices take turns chunk by chunk, as the scheduler lets them. Moves take their
time wherever a plan has one. `said` is what a search promised over what was played. The last line is JSON, with the worst cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from m2flow.errors import PlanError
from m2flow.micro.protocol.cost_terms import (
    Constant,
    Costs,
    DecodeCost,
    EngineId,
    Footprint,
    FunctionCost,
    Layout,
    PassCost,
    Switch,
    TrainCost,
)
from m2flow.planner.dynamic_program import SPLIT
from m2flow.planner.plan_tree import Leaf, Node
from m2flow.planner.problem import Cut, Option, Problem, call_times
from m2flow.planner.search import best_plan
from m2flow.planner.workload import BatchTimes, CallLoad, Instances, Workload, legal_chunks
from m2flow.spec import ClusterSpec, PoolSpec

FloatArray = npt.NDArray[np.float64]
DEVICES = (8, 16, 64, 256, 1024)
NUM_SAMPLES = 2048
ROOM = 80 << 30

# ---- steps and costs


def _load(name: str, work: str, role: str, *after: str) -> CallLoad:
    engine = EngineId(role, "rollout" if work == "generate" else "train")
    steps = int(work == "update")
    return CallLoad(name, work, engine, NUM_SAMPLES, 1, "sample", False, after, num_optimizer_steps=steps)  # type: ignore[arg-type]


STEPS = {
    "chain": (
        _load("generate", "generate", "rollout"),
        _load("logprobs", "forward", "reference", "generate"),
        _load("update", "update", "policy", "generate", "logprobs"),
    ),
    "ppo": (
        _load("generate", "generate", "rollout"),
        _load("logprobs", "forward", "reference", "generate"),
        _load("values", "forward", "critic", "generate"),
        _load("scores", "forward", "reward", "generate"),
        _load("update", "update", "policy", "generate", "logprobs", "values", "scores"),
        _load("fit", "update", "value", "generate", "logprobs", "values", "scores"),
    ),
}
_SHARES = {"generate": 0.5, "forward": 0.1, "update": 0.4}
"""Of the work of a step, in the middle; each call's is up to four times as much or as little."""


@dataclass(frozen=True)
class Call:
    """The costs of one call."""

    sample_s: float
    """Of a sample on one replica."""
    loss: float
    """The exponent by which replicas lose: n replicas do the work of n ** (1 - loss)."""
    chunk_s: float
    """Of each chunk, beside its samples."""
    weights: float
    """Bytes of all devices together."""
    working: float
    """Bytes of each device while it works."""
    bytes_s: float
    """Rate of moving to the host or back."""


class Drawn(Costs):
    """Random costs of a step whose engines all have replicas of `degree` devices."""

    def __init__(self, calls: Sequence[CallLoad], seed: int) -> None:
        rng = random.Random(seed)
        self.degree = rng.choice([1, 2, 4, 8])
        self.of = {call.engine: self._call(rng, call.work) for call in calls}

    def _call(self, rng: random.Random, work: str) -> Call:
        sample_s = _SHARES[work] * 4 ** rng.uniform(-1, 1)
        return Call(
            sample_s=sample_s,
            loss=rng.choice([0.0, rng.uniform(0.0, 0.2)]),
            chunk_s=sample_s * 10 ** rng.uniform(-2, 1),
            weights=self.degree * ROOM * rng.uniform(0.05, 0.5),
            working=ROOM * rng.uniform(0.05, 0.4),
            bytes_s=10 ** rng.uniform(9.3, 11),
        )

    def unit(self, engine: EngineId, pool: str) -> int:
        return self.degree

    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        return (Layout(tp=self.degree, dp=num_devices // self.degree),) if num_devices % self.degree == 0 else ()

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        of = self.of[engine]
        return DecodeCost(of.sample_s * layout.dp**of.loss, 0.0, 0.0, 1)  # One sample of one token at a time: an even pace.

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        of = self.of[engine]
        cost = PassCost(of.chunk_s / layout.dp, 0.0, 0.0, of.sample_s * layout.dp**of.loss / layout.dp)
        return TrainCost(cost, cost, 0.0)

    def footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        of = self.of[engine]
        return Footprint(weights=int(of.weights / self.degree), activations=int(of.working))

    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        seconds = footprint.kept_bytes / self.of[engine].bytes_s
        return Switch(seconds, seconds)

    def device_bytes(self, pool: str) -> int:
        return ROOM

    def host_bytes(self, pool: str) -> int:
        return 1 << 60

    def function(self, call: str) -> FunctionCost:
        return FunctionCost((0.0,))

    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        return 0.0

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        return 0.0

    def constants(self) -> dict[str, Constant]:
        return {}


class OneToken:
    """Samples of one token."""

    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> npt.NDArray[np.int64]:
        return np.ones((num_groups, n), np.int64)

    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> npt.NDArray[np.int64]:
        return np.zeros(num_groups, np.int64)


class EvenPace(BatchTimes):
    """A generation that hands on as many samples in each second, whatever the number of its replicas."""

    def first_chunks_s(self, ways: Instances, groups_in_chunk: Sequence[int]) -> FloatArray:
        return np.zeros((len(ways.num), len(groups_in_chunk)))


def problem_of(step: str, num_devices: int, seed: int) -> Problem:
    calls = STEPS[step]
    pools = {"main": PoolSpec(device="any", nodes=max(1, num_devices // 8), devices_per_node=8)}
    found = Problem(Workload(step, calls), OneToken(), Drawn(calls, seed), ClusterSpec(pools=pools))
    found.batches = dict.fromkeys(found.calls, EvenPace(calls[0], OneToken()))
    return found


# ---- plans as both searches make them, and their execution


@dataclass(frozen=True, eq=False)
class Stage:
    """A call on `num` devices in chunks."""

    call: CallLoad
    num: int
    chunk: int
    chunk_s: float
    """Of each chunk."""
    move_s: tuple[float, float] = (0.0, 0.0)
    """To come to the devices and to leave them."""
    moves_often: bool = False
    """Whether it moves with each chunk."""


@dataclass(frozen=True, eq=False)
class Both:
    """Two parts: `split`; in `turns`, the second after all of the first; or `alternate`, on the same devices."""

    how: str
    first: Plan
    second: Plan


Plan = Stage | Both


def stages_of(plan: Plan) -> list[Stage]:
    return [plan] if isinstance(plan, Stage) else stages_of(plan.first) + stages_of(plan.second)


def need(plan: Plan) -> int:
    if isinstance(plan, Stage):
        return plan.num
    a, b = need(plan.first), need(plan.second)
    return a + b if plan.how == "split" else max(a, b)


def _placed(plan: Plan, at: int) -> Iterator[tuple[Stage, int]]:
    if isinstance(plan, Stage):
        yield plan, at
    else:
        yield from _placed(plan.first, at)
        yield from _placed(plan.second, at + need(plan.first) * (plan.how == "split"))


def _drains(plan: Plan) -> Iterator[tuple[str, str]]:
    """(a, b): b begins after all of a."""
    if isinstance(plan, Both):
        if plan.how == "turns":
            yield from ((a.call.name, b.call.name) for a in stages_of(plan.first) for b in stages_of(plan.second))
        yield from _drains(plan.first)
        yield from _drains(plan.second)


@dataclass
class Progress:
    """How far a stage is."""

    stage: Stage
    low: int
    begun: int = 0
    done: int = 0
    after: list[Progress] = field(default_factory=list)
    drained: list[Progress] = field(default_factory=list)

    @property
    def num_chunks(self) -> int:
        return -(-self.stage.call.num_samples // self.stage.chunk)

    @property
    def output(self) -> int:
        """Samples that it has handed on; an update hands on none before its end."""
        if self.stage.call.work == "update":
            return self.stage.call.num_samples * (self.done == self.num_chunks)
        return min(self.done * self.stage.chunk, self.stage.call.num_samples)

    def may_begin(self) -> bool:
        wanted = min((self.begun + 1) * self.stage.chunk, self.stage.call.num_samples)
        return (
            self.begun == self.done < self.num_chunks
            and all(one.output >= wanted for one in self.after)
            and all(one.done == one.num_chunks for one in self.drained)
        )

    def chunk_s(self) -> float:
        come, leave = self.stage.move_s
        often = self.stage.moves_often
        return self.stage.chunk_s + come * (often or not self.begun) + leave * (often or self.begun == self.num_chunks - 1)

    def overlaps(self, other: Progress) -> bool:
        return self.low < other.low + other.stage.num and other.low < self.low + self.stage.num


def played(plan: Plan) -> float:
    """Seconds of a step, chunk by chunk."""
    every = {stage.call.name: Progress(stage, low) for stage, low in _placed(plan, 0)}
    for progress in every.values():
        progress.after = [every[name] for name in progress.stage.call.after]
    for a, b in _drains(plan):
        every[b].drained.append(every[a])
    now, running, count = 0.0, list[tuple[float, int, Progress]](), itertools.count()
    while True:
        for one in sorted(every.values(), key=lambda p: p.begun * p.stage.chunk):
            if one.may_begin() and not any(one.overlaps(other) for _, _, other in running):
                heapq.heappush(running, (now + one.chunk_s(), next(count), one))
                one.begun += 1
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] <= now:
            heapq.heappop(running)[2].done += 1
    assert all(one.done == one.num_chunks for one in every.values()), "the plan halts"
    return now


# ---- ours


def our_plan(problem: Problem, node: Node) -> Plan:
    if isinstance(node, Leaf):
        (name,) = node.names
        call, option = problem.calls[name], node.option
        whole_s = float(call_times(call, node.engine, [option], (node.chunk,), problem.costs, problem.batches[name])[0, 0, 1])
        chunks = -(-call.num_samples // node.chunk)
        return Stage(call, option.num_devices, node.chunk, whole_s / chunks, (option.come_s, option.leave_s))
    first, second = our_plan(problem, node.first), our_plan(problem, node.second)
    if node.how == SPLIT:
        return Both("split", first, second)
    stays = all(stage.call.work != "generate" and not any(stage.move_s) for stage in [*stages_of(first), *stages_of(second)])
    return Both("alternate" if stays else "turns", first, second)


# ---- theirs


@dataclass(eq=False)
class Table:
    """Plans of a set of calls on 0 to N replicas; a column for each number."""

    latency: FloatArray
    """Of the first chunk (of everything, in tables of whole batches)."""
    period: FloatArray
    kept: FloatArray
    most: FloatArray
    move: FloatArray
    """Seconds of bringing all to the devices and away."""
    cut: npt.NDArray[np.int64]
    """(-1 of a single call)."""
    how: npt.NDArray[np.int64]
    left: npt.NDArray[np.int64]
    """Replicas of the first part of a spatial one."""
    swaps: npt.NDArray[np.bool_]
    chunk: npt.NDArray[np.int64]
    """Of a table of whole batches: the granularity of the pipeline that is best, 0 where the parts take turns as wholes."""


NEVER = 1e18
"""Seconds on no device."""
ALONE, TEMPORAL, SPATIAL, PIPELINE = 0, 1, 2, 3


class Published:
    """The published recurrence, for all numbers of replicas at once."""

    def __init__(self, problem: Problem, *, alternates: bool) -> None:
        self.problem, self.alternates = problem, alternates
        costs = problem.costs
        assert isinstance(costs, Drawn)
        self.degree = costs.degree
        self.most = problem.num_devices[0] // self.degree
        self.graph = problem.graph
        self.chunks = legal_chunks(problem.graph.device_calls[0])
        self.times, self.options = dict[str, FloatArray](), dict[str, list[Option]]()
        for call in self.graph.device_calls:
            assert call.engine is not None
            options = [
                Option.of("main", layout, costs.footprint(call.engine, "main", layout))
                for num in range(1, self.most + 1)
                for layout in costs.layouts(call.engine, "main", num * self.degree)
            ]
            each = call_times(call, call.engine, options, self.chunks, costs, problem.batches[call.name])[..., 1]
            num_chunks = np.array([-(-call.num_samples // chunk) for chunk in self.chunks])
            self.times[call.name], self.options[call.name] = each / num_chunks, options
        self.streams: dict[int, dict[int, Table]] = {}
        self.whole: dict[int, Table] = {}

    def solve(self) -> tuple[Plan, float]:
        for i in range(len(self.chunks)):
            tables: dict[int, Table] = {}
            for calls in self.graph.convex_sets:
                self._fill(tables, calls, i)
            self.streams[i] = tables
        for calls in self.graph.convex_sets:
            self._fill_whole(calls)
        everything = self.graph.everything
        best = int(np.argmin(self.whole[everything].latency))
        return self._whole_plan(everything, best), float(self.whole[everything].latency[best])

    def _num_chunks(self, i: int) -> int:
        return -(-NUM_SAMPLES // self.chunks[i])

    def _alone(self, call: CallLoad, i: int) -> Table:
        assert call.engine is not None
        one = self.options[call.name][0].footprint
        switch = self.problem.costs.switch(call.engine, "main", one)
        times = np.concatenate([[NEVER], self.times[call.name][:, i]])
        like = np.ones(self.most + 1)
        none = np.zeros(self.most + 1, np.int64)
        return Table(
            times, times.copy(), like * one.kept_bytes, like * one.device_bytes, like * (switch.leave_s + switch.come_s),
            none - 1, none + ALONE, none, none.astype(np.bool_), none,
        )  # fmt: skip

    def _fill(self, tables: dict[int, Table], calls: int, i: int) -> None:
        members = self.graph.members(calls)
        if len(members) == 1:
            tables[calls] = self._alone(members[0], i)
            return
        more = self._num_chunks(i) - 1
        best: Table | None = None
        for index, cut in enumerate(self.graph.cuts(calls)):
            a, b = tables[cut.first], tables[cut.second]
            every = [self._spatial(cut, index, a, b, more)]
            if self.alternates:
                every.append(self._temporal(index, a, b))
            for one in every:
                best = one if best is None else _better(best, one, more)
        assert best is not None
        tables[calls] = best

    def _temporal(self, index: int, a: Table, b: Table) -> Table:
        """The second part after the first; where the memory does not hold both, all or one of them is moved, whichever suffices."""
        like = np.ones(self.most + 1, np.int64)
        fits = np.maximum(a.most + b.kept, b.most + a.kept) <= ROOM
        moves = np.where(fits, 0.0, a.move + b.move)
        kept = np.where(fits, a.kept + b.kept, 0.0)
        most = np.where(fits, np.maximum(a.most + b.kept, b.most + a.kept), np.maximum(a.most, b.most))
        return Table(
            a.latency + b.latency + moves, a.period + b.period + moves, kept, most, np.where(fits, a.move + b.move, 0.0),
            like * index, like * TEMPORAL, like * 0, ~fits, like * 0,
        )  # fmt: skip

    def _spatial(self, cut: Cut, index: int, a: Table, b: Table, more: int, *, is_whole: bool = False) -> Table:
        num = self.most + 1
        grid = np.arange(num)
        right = grid[:, None] - grid[None, :]  # [N, Ns]
        is_legal = right >= 0
        right = np.maximum(right, 0)
        latency = a.latency[None, :] + b.latency[right] if cut.is_linked else np.maximum(a.latency[None, :], b.latency[right])
        period = np.maximum(a.period[None, :], b.period[right])
        merit = np.where(is_legal, latency if is_whole else latency + more * period, NEVER)
        left = merit.argmin(axis=1)
        rest = right[grid, left]
        like = np.ones(num, np.int64)
        return Table(
            latency[grid, left], period[grid, left],
            np.maximum(a.kept[left], b.kept[rest]), np.maximum(a.most[left], b.most[rest]), np.maximum(a.move[left], b.move[rest]),
            like * index, like * SPATIAL, left, np.zeros(num, np.bool_), like * 0,
        )  # fmt: skip

    def _fill_whole(self, calls: int) -> None:
        members = self.graph.members(calls)
        best: Table | None = None
        for i in range(len(self.chunks)):
            stream = self.streams[i][calls]
            whole_s = stream.latency + (self._num_chunks(i) - 1) * stream.period
            like = np.full(self.most + 1, i)
            one = dataclasses.replace(stream, latency=whole_s, period=whole_s, how=np.full(self.most + 1, PIPELINE), chunk=like)
            best = one if best is None else _better(best, one, 0)
        assert best is not None
        for index, cut in enumerate(self.graph.cuts(calls)) if len(members) > 1 else ():
            a, b = self.whole[cut.first], self.whole[cut.second]
            best = _better(best, self._temporal(index, a, b), 0)
            best = _better(best, self._spatial(cut, index, a, b, 0, is_whole=True), 0)
        self.whole[calls] = best

    def _whole_plan(self, calls: int, num: int, *, swaps: bool = False) -> Plan:
        table = self.whole[calls]
        if table.how[num] == PIPELINE:
            return self._stream_plan(int(table.chunk[num]), calls, num, swaps=swaps, often=False)
        cut = list(self.graph.cuts(calls))[int(table.cut[num])]
        if table.how[num] == TEMPORAL:
            swaps |= bool(table.swaps[num])
            return Both("turns", self._whole_plan(cut.first, num, swaps=swaps), self._whole_plan(cut.second, num, swaps=swaps))
        left = int(table.left[num])
        how = "split"
        return Both(how, self._whole_plan(cut.first, left, swaps=swaps), self._whole_plan(cut.second, num - left, swaps=swaps))

    def _stream_plan(self, i: int, calls: int, num: int, *, swaps: bool, often: bool) -> Plan:
        table, members = self.streams[i][calls], self.graph.members(calls)
        if len(members) == 1:
            (call,) = members
            assert call.engine is not None
            option = self.options[call.name][num - 1]
            switch = self.problem.costs.switch(call.engine, "main", option.footprint)
            moves = (switch.come_s, switch.leave_s) if swaps else (0.0, 0.0)
            return Stage(call, option.num_devices, self.chunks[i], float(self.times[call.name][num - 1, i]), moves, often)
        cut = list(self.graph.cuts(calls))[int(table.cut[num])]
        if table.how[num] == TEMPORAL:
            here = bool(table.swaps[num])
            parts = (self._stream_plan(i, side, num, swaps=swaps or here, often=often or here) for side in (cut.first, cut.second))
            return Both("alternate", *parts)
        left = int(table.left[num])
        first = self._stream_plan(i, cut.first, left, swaps=swaps, often=often)
        return Both("split", first, self._stream_plan(i, cut.second, num - left, swaps=swaps, often=often))


def _better(one: Table, other: Table, more: int) -> Table:
    """The better of two plans for each number of replicas."""
    takes = other.latency + more * other.period < one.latency + more * one.period
    return Table(*(np.where(takes, getattr(other, f.name), getattr(one, f.name)) for f in dataclasses.fields(Table)))


# ---- the comparison


def said(plan: Plan) -> str:
    if isinstance(plan, Stage):
        return f"{plan.call.name}@{plan.num}/{plan.chunk}" + "~" * any(plan.move_s)
    return f"{plan.how}({said(plan.first)}, {said(plan.second)})"


def compared(step: str, num_devices: int, seed: int, against: str) -> dict[str, Any] | None:
    problem = problem_of(step, num_devices, seed)
    began = time.process_time()
    try:
        found = best_plan(problem)
    except PlanError:
        return None
    ours_cpu_s = time.process_time() - began
    began = time.process_time()
    theirs, theirs_said_s = Published(problem_of(step, num_devices, seed), alternates=against == "alternating").solve()
    theirs_cpu_s = time.process_time() - began
    ours = our_plan(problem, found.node)
    assert need(ours) <= num_devices >= need(theirs)
    ours_s, theirs_s = played(ours), played(theirs)
    return {
        "step": step, "devices": num_devices, "seed": seed, "against": against, "ratio": ours_s / theirs_s,
        "ours_s": ours_s, "theirs_s": theirs_s, "ours_said": found.step_s / ours_s, "theirs_said": theirs_said_s / theirs_s,
        "ours_cpu_s": ours_cpu_s, "theirs_cpu_s": theirs_cpu_s, "ours": said(ours), "theirs": said(theirs),
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["ratio"] for row in rows]
    return {
        "cases": len(rows),
        "worse_by_half_a_percent": sum(ratio > 1.005 for ratio in ratios),
        "worst": max(ratios),
        "median": statistics.median(ratios),
        "best": min(ratios),
        "ours_cpu_s": statistics.median(row["ours_cpu_s"] for row in rows),
        "theirs_cpu_s": statistics.median(row["theirs_cpu_s"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=tuple(STEPS))
    parser.add_argument("--num", type=int, default=50, help="random costs for each number of devices")
    parser.add_argument("--against", nargs="+", choices=("alternating", "draining"), default=("alternating", "draining"))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--show", type=int, default=5, help="worst cases to print")
    arguments = parser.parse_args()
    compared("chain", 8, 0, "draining")  # What is imported late is no search's.
    every, found = list[dict[str, Any]](), dict[str, Any]()
    for step, against, num in itertools.product(arguments.steps, arguments.against, arguments.devices):
        seeds = range(arguments.first, arguments.first + arguments.num)
        rows = [row for seed in seeds if (row := compared(step, num, seed, against))]
        every += rows
        found[f"{step}, {against}, {num}"] = one = summary(rows)
        print(f"{step:6} {against:12} {num:5} devices  " + "  ".join(f"{name} {value:.4g}" for name, value in one.items()), flush=True)
    worst = sorted(every, key=lambda row: -row["ratio"])[: arguments.show]
    print(json.dumps({"summary": found, "worst": worst}))


if __name__ == "__main__":
    main()
