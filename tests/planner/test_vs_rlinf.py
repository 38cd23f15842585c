"""Against RLinf's published algorithm on equal costs, and plans executed chunk by chunk against what the search promised."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from random_steps import random_problem

from m2flow.planner.breakdown import step_s
from m2flow.planner.dynamic_program import SPLIT, Limits, Solver, memory_price, prune_options
from m2flow.planner.plan_tree import NEVER, Book, Climb, leaves_of, side_by_side_s, tree_of, ways_in
from m2flow.planner.problem import Problem
from m2flow.planner.search import _Search, best_plan
from m2flow.planner.workload import DRAINS, FREE, MOVES, Times, in_turns, legal_chunks, side_by_side

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from search import problem as ppo_on
from vs_rlinf import Both, Stage, compared, played, problem_of

CASES = [("chain", num, seed) for num in (8, 16, 64) for seed in range(6)] + [
    ("ppo", 8, 10),
    ("ppo", 16, 2),
    ("ppo", 64, 42),
    ("ppo", 1024, 25),
]


@pytest.mark.parametrize(("step", "num_devices", "seed"), CASES)
def test_a_plan_is_no_slower_than_the_published_algorithm_s_and_takes_what_was_promised(step: str, num_devices: int, seed: int) -> None:
    found = compared(step, num_devices, seed, "draining")
    assert found is not None
    assert found["ratio"] <= 1.005
    assert 0.999 <= found["ours_said"] <= 1.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "seed"),
    [(64, seed) for seed in (5, 29, 32, 46)]
    + [(256, seed) for seed in (6, 10)]
    + [(1024, seed) for seed in (4, 5, 11, 15, 26, 28, 33, 35, 39)],
)
def test_many_devices_are_divided_as_finely_as_in_the_published_algorithm(num_devices: int, seed: int) -> None:
    found = compared("ppo", num_devices, seed, "draining")
    assert found is not None
    assert found["ratio"] <= 1.005


@pytest.mark.parametrize("num_devices", [64, 1024])
def test_no_small_change_of_the_plan_is_faster(num_devices: int) -> None:
    problem = problem_of("chain", num_devices, 3)
    found = best_plan(problem)
    again = _Search.of(problem).climbed(found)
    assert again.step_s >= found.step_s * (1 - 1e-5)


def test_plans_priced_together_cost_what_each_tree_says() -> None:
    problem = problem_of("ppo", 64, 46)
    for found in _Search.of(problem).seeded():
        assert found.step_s == pytest.approx(step_s(found.problem, found.node))
        assert {leaf.engine for leaf in leaves_of(found.node)} == set(problem.workload.engines)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_a_change_of_a_plan_costs_what_its_tree_says_and_fits_where_a_search_of_it_finds_it(seed: int) -> None:
    problem = random_problem(
        seed, num_calls=3 + seed % 2, num_ways=2, num_pools=1 + seed % 5 // 4, staleness=seed % 3 if seed % 4 == 0 else 0
    )
    tables = Solver(problem).solve() if all(problem.options.of.values()) else None
    if tables is None or not len(tables.steps_s):
        return
    node = tree_of(tables, int(tables.steps_s.argmin()))
    ways, leaves = ways_in(node), leaves_of(node)
    climb = Climb(Book(problem), ways, {leaf.engine: leaf.option for leaf in leaves})
    bits = problem.graph.bits
    chunks = {sum(bits[name] for name in leaf.names): leaf.chunk for leaf in leaves}
    start = climb.start({leaf.engine: (leaf.option, leaf.option.num_devices) for leaf in leaves}, chunks)
    assert start is not None
    for state in [start, *climb._changes(start, dict.fromkeys(problem.pools, 1))]:
        priced = climb.priced([state])
        if not len(climb._possible(np.array([state]).T)[0]):
            assert priced is None
            continue
        near, tree = climb.plan(state)
        fits = len(Solver(near, within=ways).solve().steps_s) > 0
        assert (priced is not None) == fits
        assert priced is None or priced[0] == pytest.approx(step_s(near, tree))


def times(total: float, grain: float, rigid: float = MOVES, first: float = 0.0) -> Times:
    return Times(*(np.asarray(value) for value in (first, total, 0.0, 0.0, grain, rigid)))


@pytest.mark.parametrize(("coarse", "fine"), [(16, 256), (256, 16), (64, 64)])
def test_a_stage_waits_for_the_coarser_chunk_of_both(coarse: int, fine: int) -> None:
    """Two stages side by side, of which the chunks of one are 16 times the other's."""
    problem: Problem = problem_of("chain", 64, 0)
    generate, forward, _ = problem.graph.device_calls
    num = generate.num_samples
    stages = [Stage(call, 8, chunk, total * chunk / num) for call, chunk, total in ((generate, coarse, 30.0), (forward, fine, 20.0))]
    a, b = times(30.0, coarse / num), times(20.0, fine / num)
    assert float(side_by_side(a, a, b, is_linked=True, waits=False).total) == pytest.approx(played(Both("split", *stages)))


@pytest.mark.parametrize("totals", [(30.0, 20.0, 25.0), (20.0, 30.0, 25.0), (20.0, 25.0, 30.0)])
@pytest.mark.parametrize("chunk", [64, 256, 1024, 2048])
def test_three_stages_take_what_is_played_however_they_are_joined(chunk: int, totals: tuple[float, float, float]) -> None:
    calls = problem_of("chain", 64, 0).graph.device_calls
    num = calls[0].num_samples
    stages = [Stage(call, 8, chunk, total * chunk / num) for call, total in zip(calls, totals, strict=True)]
    a, b, c = (times(total, chunk / num) for total in totals)

    def joined(first: Times, second: Times) -> Times:
        return side_by_side(first, first, second, is_linked=True, waits=False)

    expected = played(Both("split", stages[0], Both("split", *stages[1:])))
    assert float(joined(joined(a, b), c).total) == pytest.approx(expected)
    assert float(joined(a, joined(b, c)).total) == pytest.approx(expected)


def test_trainers_that_stay_alternate_and_so_only_a_chunk_of_each_is_left_after_the_last_sample() -> None:
    made, grain = times(100.0, 1 / 64), 1 / 64
    free, moved = ([times(total, grain, rigid) for total in (30.0, 40.0)] for rigid in (FREE, MOVES))
    alternate, drained = (in_turns(a, a, b, is_linked=True, waits=False) for a, b in (free, moved))
    assert (float(alternate.rigid), float(drained.rigid)) == (FREE, DRAINS)
    assert float(alternate.total) == float(drained.total) == 70.0
    ends = [float(side_by_side(made, made, part, is_linked=True, waits=False).total) for part in (alternate, drained)]
    assert ends[0] == pytest.approx(100 + 70 / 64)
    assert ends[1] > 140


def test_what_is_played_knows_all_of_the_plan() -> None:
    problem = problem_of("chain", 8, 1)
    generate, forward, update = problem.graph.device_calls
    chunk = legal_chunks(generate)[-3]
    a, b, c = (Stage(call, 4, chunk, 1.0, (2.0, 3.0)) for call in (generate, forward, update))
    assert played(Both("turns", Both("turns", a, b), c)) == 3 * (4 + 5)
    assert played(Both("turns", Both("split", a, b), c)) == (2 + 4 + 3) + (1 + 3) + 9  # The last chunk of `a` is there when it has left.


def test_a_search_of_splits_keeps_what_leaves_devices_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ppo_on(32, "ppo").on_grid(None, 4)
    prune_options(problem, 0.2)

    def least_s() -> float:
        tables = Solver(problem, slack_s=0.2, most_rows=16, hows=(SPLIT,), price=memory_price(problem)).solve()
        return float(tables.steps_s.min(initial=np.inf))

    knowing = least_s()
    made = Limits.__init__
    monkeypatch.setattr(
        Limits, "__init__", lambda self, problem, *, counts_work=True, is_split=False: made(self, problem, counts_work=counts_work)
    )
    assert knowing < least_s()


@pytest.mark.parametrize("seed", range(20))
def test_parts_side_by_side_end_at_the_least_time_of_all_divisions_of_the_devices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [-np.sort(-rng.integers(1, 9, 7).astype(np.float64)) for _ in range(2 + seed % 2)]  # Ties are common.
    parts[0][0] = NEVER
    found = side_by_side_s(parts)
    for num in range(1, 8):
        divisions = (one for one in itertools.product(range(1, num + 1), repeat=len(parts)) if sum(one) <= num)
        least = min((max(part[n - 1] for part, n in zip(parts, one, strict=True)) for one in divisions), default=NEVER)
        assert found[num - 1] == least


@pytest.mark.parametrize("seed", [5, 42])
def test_moves_by_smaller_steps_cost_together_what_each_costs_alone(seed: int) -> None:
    problem = problem_of("ppo", 64, seed)
    found = best_plan(problem)
    leaves, bits = leaves_of(found.node), problem.graph.bits
    climb = Climb(Book(problem), ways_in(found.node), {leaf.engine: leaf.option for leaf in leaves})
    chunks = {sum(bits[name] for name in leaf.names): leaf.chunk for leaf in leaves}
    start = climb.start({leaf.engine: (leaf.option, leaf.option.num_devices) for leaf in leaves}, chunks)
    assert start is not None
    levels = climb._finer((1e9, start), {"main": 8})
    steps = [level[0]["main"] for level in levels]
    assert steps == sorted(set(steps), reverse=True)
    assert len(steps) > 1
    assert steps[-1] == 0
    for _, states, steps_s in levels:
        assert len(states) == len(steps_s) > 0
        for state, found_s in zip(states, steps_s.tolist(), strict=True):
            alone = climb.priced([state])
            assert found_s == pytest.approx(alone[0] if alone else np.inf)
    assert min(float(level[2].min()) for level in levels) >= found.step_s * (1 - 1e-5)
