"""The search against an oracle that writes down every plan, and against what must hold of any best plan."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from every_plan import Oracle
from random_steps import best_s, problem_of, random_problem, solved

from m2flow.micro.protocol.cost_terms import EngineId
from m2flow.planner import plan_tree, search
from m2flow.planner.breakdown import step_s
from m2flow.planner.dynamic_program import Memory, Solver
from m2flow.planner.plan_tree import Leaf, leaves_of
from m2flow.planner.problem import CallGraph, Problem
from m2flow.planner.search import best_of, find_plan
from m2flow.planner.workload import CallLoad, Workload


def debate(num_devices: int) -> Problem:
    """The step of twelve calls of the benchmark of the search."""
    place = importlib.util.spec_from_file_location("search_benchmark", Path(__file__).resolve().parents[2] / "benchmarks" / "search.py")
    assert place is not None
    assert place.loader is not None
    benchmark = importlib.util.module_from_spec(place)
    place.loader.exec_module(benchmark)
    found = benchmark.problem(num_devices, "debate")
    assert isinstance(found, Problem)
    return found


@cache
def oracle_s(seed: int, num_calls: int) -> float:
    return Oracle(problem_of(seed, num_calls)).best_s()


def differing(seeds: Iterable[int], num_calls: int) -> list[int]:
    """Seeds for which the search and the oracle disagree."""
    return [seed for seed in seeds if best_s(problem_of(seed, num_calls)) != pytest.approx(oracle_s(seed, num_calls), rel=1e-9)]


@pytest.mark.parametrize(("num_calls", "num_seeds"), [(2, 150), (3, 40), (4, 5)])
def test_the_best_plan_is_the_best_of_all_plans(num_calls: int, num_seeds: int) -> None:
    assert not differing(range(num_seeds), num_calls)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("num_calls", "num_seeds"),
    [
        (1, 500),
        (2, 2500),
        (3, 300),
        (4, 50),
        pytest.param(3, 1000, marks=pytest.mark.long),
        pytest.param(4, 150, marks=pytest.mark.long),
    ],
)
def test_the_best_plan_is_the_best_of_all_plans_thousands_of_times(num_calls: int, num_seeds: int) -> None:
    assert not differing(range(10_000, 10_000 + num_seeds), num_calls)


def test_a_search_that_cuts_only_prefixes_of_one_order_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    every = CallGraph.cuts
    monkeypatch.setattr(CallGraph, "cuts", lambda self, calls: (c for c in every(self, calls) if c.first < c.second & -c.second))
    assert differing(range(40), 3)


def test_a_search_that_never_leaves_one_device_to_a_side_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    need = Solver._need

    def coarse(self: Solver, a, b, num_turns):  # type: ignore[no-untyped-def]
        found = need(self, a, b, num_turns)
        lonely = (a[0] == 1) | (b[0] == 1)
        found[0, num_turns:][lonely[num_turns:]] = np.inf
        return found

    monkeypatch.setattr(Solver, "_need", coarse)
    assert differing(range(40), 3)


def test_a_search_that_forgets_the_memory_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "fits", lambda self, calls, rows: np.ones(rows.shape[-1], np.bool_))
    assert differing(range(40), 3)


def test_a_search_that_drops_plans_that_nothing_beats_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.planner.problem.codes", lambda ties: np.zeros(ties.shape[1], np.int64))
    assert differing([285, 445], 3)


@pytest.mark.parametrize("seed", range(60))
def test_the_tree_of_the_best_row_costs_what_the_search_says(seed: int) -> None:
    problem = problem_of(seed, 2 + seed % 3)
    tables = solved(problem)
    if tables is None or not len(tables.steps_s):
        return
    node, places, _ = best_of(tables)
    assert step_s(problem, node) == pytest.approx(tables.steps_s.min(), rel=1e-9)
    assert places.keys() == set(problem.workload.engines)


@pytest.mark.parametrize("seed", range(60))
def test_an_engine_has_one_place_and_never_two_sides_of_a_split(seed: int) -> None:
    problem = problem_of(seed, 3)
    tables = solved(problem)
    if tables is None or not len(tables.steps_s):
        return
    node, places, _ = best_of(tables)
    options: dict[object, object] = {}
    for leaf in leaves_of(node):
        assert options.setdefault(leaf.engine, leaf.option) == leaf.option
        assert 0 <= places[leaf.engine] <= problem.spec.pools[leaf.option.pool].num_devices - leaf.option.num_devices
    _no_overlap_in_splits(node, places)


def _no_overlap_in_splits(node: object, places: dict) -> None:  # type: ignore[type-arg]
    if isinstance(node, Leaf):
        return
    devices = [
        {
            (leaf.option.pool, device)
            for leaf in leaves_of(side)
            for device in range(places[leaf.engine], places[leaf.engine] + leaf.option.num_devices)
        }
        for side in (node.first, node.second)  # type: ignore[attr-defined]
    ]
    assert node.is_turns or not devices[0] & devices[1]  # type: ignore[attr-defined]
    for side in (node.first, node.second):  # type: ignore[attr-defined]
        _no_overlap_in_splits(side, places)


@pytest.mark.parametrize("seed", range(40))
def test_one_more_device_is_never_slower(seed: int) -> None:
    problem = problem_of(seed, 3)
    before = best_s(problem)
    more = {name: pool.model_copy(update={"devices_per_node": pool.devices_per_node + 1}) for name, pool in problem.spec.pools.items()}
    wider = Problem(problem.workload, problem.lengths, problem.costs, problem.spec.model_copy(update={"pools": more}))
    assert best_s(wider) <= before * (1 + 1e-12)


@pytest.mark.parametrize("num_judges", [8, 40])
def test_a_step_of_many_calls_is_cut_in_few_ways_and_the_plan_says_so(num_judges: int) -> None:
    def load(name: str, work: str, engine: EngineId, *after: str) -> CallLoad:
        return CallLoad(name, work, engine, 4, 2, "sample", False, after)  # type: ignore[arg-type]

    judges = [load(f"judge{i}.logprobs", "forward", EngineId(f"judge{i}", "train"), "policy.generate") for i in range(num_judges)]
    ends = load("policy.generate", "generate", EngineId("policy", "rollout")), load("policy.update", "update", EngineId("policy", "train"))
    update = msgspec.structs.replace(ends[1], after=("policy.generate", *(judge.name for judge in judges)))
    graph = CallGraph(Workload("many", (ends[0], *judges, update)))
    cuts = {calls: list(graph.cuts(calls)) for calls in graph.convex_sets}
    assert sum(map(len, cuts.values())) <= 3000
    assert graph.not_tried
    assert set(cuts) >= {graph.everything, *(1 << i for i in range(num_judges + 2))}
    assert all(cuts[calls] for calls in cuts if calls.bit_count() > 1)
    assert all({cut.first, cut.second} <= cuts.keys() for some in cuts.values() for cut in some)


def test_of_a_step_of_few_calls_every_cut_is_tried() -> None:
    graph = problem_of(3, 4).graph
    assert not graph.not_tried
    assert len(graph.down_sets) == sum(
        all(graph.before[i] & ~done == 0 for i in range(4) if done >> i & 1) for done in range(graph.everything + 1)
    )


def test_a_search_that_has_spent_its_budget_says_so_and_gives_the_same_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step = random_problem(1, num_calls=4, num_ways=2)
    whole = find_plan(step.workload, step.lengths, step.costs, step.spec)
    assert not any("budget" in line for line in whole.not_tried)
    monkeypatch.setattr(search, "_BUDGET", 1)
    first, again = (find_plan(step.workload, step.lengths, step.costs, step.spec) for _ in range(2))
    assert "more changes: the search has spent its budget of 1 evaluations" in first.not_tried
    assert (first.placements, first.predicted_step_s) == (again.placements, again.predicted_step_s)
    assert first.predicted_step_s >= whole.predicted_step_s * (1 - 1e-9)


@pytest.mark.parametrize("num_devices", [32, 64])
def test_twelve_calls_of_six_models_keep_to_the_budget(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[int] = []
    spend = plan_tree.Budget.spend
    monkeypatch.setattr(plan_tree.Budget, "spend", lambda self, num: (spent.append(num), spend(self, num))[1])
    found = search.best_plan(debate(num_devices))
    assert sum(spent) <= search._BUDGET + max(spent), "what begins within the budget may end beyond it"
    assert found.is_cut
