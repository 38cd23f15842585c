"""What the search answers: the best plan with its bounds, what others lose by, what pins cost, and whether it may be beaten."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from modelled_problems import POLICY, TRAINER, choice_of, modelled
from random_steps import best_s, problem_of, random_problem

from m2flow.errors import PlanError
from m2flow.micro.protocol.plan import Bound, Choice, TimeTerm
from m2flow.planner import search
from m2flow.planner.breakdown import step_s
from m2flow.planner.dynamic_program import TURNS, WORTH
from m2flow.planner.explaining import explain
from m2flow.planner.plan_tree import leaves_of, num_left, restructured, scaled_up, ways_in
from m2flow.planner.problem import Problem
from m2flow.planner.search import advice_of, best_plan, find_plan, grid_of
from m2flow.planner.workload import Draw, Instances, LentRollout
from m2flow.rollout_scheduling.decode_model import DecodeModel, k_longest_s
from m2flow.rollout_scheduling.lengths import lognormal
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, PoolSpec, RolloutSpec, TrainSpec


def without_lending(problem: Problem) -> Problem:
    spec = problem.spec.model_copy(update={"lend": "never"})
    return Problem(problem.workload, problem.lengths, problem.costs, spec)


@cache
def at(num_devices: int) -> Choice:
    return choice_of(modelled(num_devices))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_called_exact_is_the_best_and_no_bound_is_above_it(seed: int) -> None:
    problem = problem_of(seed, 3)
    best = best_s(problem)
    if not np.isfinite(best):
        with pytest.raises(PlanError):
            best_plan(problem)
        return
    choice = choice_of(problem)
    if any(placement.lent_until for placement in choice.placements):  # Of plans that lend devices the best is not sure to be found.
        assert not choice.is_exact
        assert choice.predicted_step_s <= best * (1 - WORTH)
        choice = choice_of(without_lending(problem))
        assert choice.constraints_cost_s["lend: never"] > 0
    assert choice.is_exact
    assert choice.gap_s == 0
    assert choice.predicted_step_s == pytest.approx(best, rel=1e-9)
    assert choice.lower_bound_s <= best * (1 + 1e-9)
    assert sum(part.seconds for part in choice.parts if part.on_critical_path) == pytest.approx(best, rel=1e-9)
    assert all(loser.predicted_step_s >= best * (1 - 1e-9) for loser in choice.losers)


@pytest.mark.parametrize("seed", [1, 3, 4, 5, 7, 8, 9])
def test_every_summand_of_a_step_has_a_name_and_none_is_rounding(seed: int) -> None:
    problem = random_problem(seed, num_calls=2 + seed % 4, num_ways=2)
    choice = choice_of(problem)
    assert all(part.what and part.seconds > 1e-12 * choice.predicted_step_s for part in choice.parts)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_a_larger_step_is_below_a_bound(seed: int) -> None:
    problem = random_problem(seed, num_calls=5, num_ways=3, staleness=seed % 3)
    try:
        choice = choice_of(problem)
    except PlanError:
        return
    assert choice.lower_bound_s <= choice.predicted_step_s * (1 + 1e-9)
    assert choice.gap_s <= choice.predicted_step_s - choice.lower_bound_s + 1e-9


@pytest.mark.parametrize("num_devices", [8, 256])
def test_a_choice_says_who_runs_where_and_what_limits_it(num_devices: int) -> None:
    choice = at(num_devices)
    assert {call for placement in choice.placements for call in placement.calls} == {
        "policy.generate",
        "reference.logprobs",
        "policy.update",
    }
    assert all(placement.first_device >= 0 and placement.devices[-1] < num_devices for placement in choice.placements)
    assert choice.advice
    assert {loser.what for loser in choice.losers} == {"time-shared", "split", "hybrid"} - {choice.mode}
    assert all(loser.why for loser in choice.losers)
    assert choice.is_exact or choice.gap_s == pytest.approx(choice.predicted_step_s - choice.lower_bound_s)


def test_where_the_longest_sample_decides_the_advice_says_so() -> None:
    assert "the longest sample is" in at(256).advice
    assert "more rollout devices are waste" in at(256).advice


def test_where_training_decides_no_advice_is_about_samples() -> None:
    found = best_plan(modelled(16))
    parts = TimeTerm("policy.generate", 2.0), TimeTerm("policy.update", 8.0)
    bounds = (Bound("longest sample", 9.0),)  # With what must come after it.
    assert advice_of(found.problem, found.node, parts, bounds).startswith("policy.update takes 80% of the step")
    assert "waste" in advice_of(found.problem, found.node, (TimeTerm("policy.generate", 9.5), TimeTerm("policy.update", 0.5)), bounds)


def test_longer_samples_never_make_a_bound_smaller() -> None:
    short, long = (choice_of(modelled(16, median=median)) for median in (2000, 4000))
    assert all(a.seconds <= b.seconds for a, b in zip(short.bounds, long.bounds, strict=True))


def test_a_faster_device_is_not_slower() -> None:
    assert choice_of(modelled(16, device="h200")).predicted_step_s <= at(16).predicted_step_s


def test_a_pin_holds_and_its_cost_is_shown() -> None:
    pin = {"policy.rollout": PinSpec(num_devices=2, layout=LayoutSpec(tp=2)), "reference": PinSpec(devices=(4, 8))}
    choice = choice_of(modelled(8, pin=pin))
    placements = {str(placement.engine): placement for placement in choice.placements}
    assert (placements["policy.rollout"].num_devices, placements["policy.rollout"].layout.tp) == (2, 2)
    assert (placements["reference.train"].first_device, placements["reference.train"].num_devices) == (4, 4)
    assert choice.constraints_cost_s.keys() == {"pin policy.rollout", "pin reference"}
    assert choice.constraints_cost_s["pin policy.rollout"] > 0
    assert choice.predicted_step_s >= at(8).predicted_step_s


def test_engines_that_may_not_leave_keep_their_memory() -> None:
    choice = choice_of(modelled(8, may_offload=False))
    assert not any(part.what.startswith("switch") for part in choice.parts)
    assert choice.constraints_cost_s["may_offload: false"] >= 0


def test_what_does_not_fit_is_refused_with_what_is_short() -> None:
    with pytest.raises(PlanError, match="GiB"):
        choice_of(modelled(1, model="Qwen2.5-72B"))


def test_steps_that_overlap_take_no_longer() -> None:
    assert choice_of(modelled(16, staleness=1)).predicted_step_s <= at(16).predicted_step_s


@pytest.mark.parametrize(("num_devices", "num_prompts", "staleness"), [(64, 512, 0), (64, 512, 1), (128, 1024, 1), (1024, 8192, 1)])
def test_between_the_counts_of_the_grid_there_are_faster_plans(num_devices: int, num_prompts: int, staleness: int) -> None:
    found = best_plan(modelled(num_devices, staleness=staleness, num_prompts=num_prompts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search._Search, "climbed", lambda self, quick: quick)
        patch.setattr(search._Search, "restructured", lambda self, quick: quick)
        patch.setattr(search._Search, "seeded", lambda self, known_s=0.0: iter(()))
        on_grid = best_plan(modelled(num_devices, staleness=staleness, num_prompts=num_prompts))
    assert found.step_s <= on_grid.step_s
    assert step_s(found.problem, found.node) == pytest.approx(found.step_s)
    assert found.step_s >= max(bound.seconds for bound in found.bounds) * (1 - 1e-9)
    if staleness:
        assert found.step_s < 0.95 * on_grid.step_s
        used = {leaf.option.num_devices for leaf in leaves_of(found.node)}
        assert not used <= set(grid_of(found.problem)["main"])


def test_what_is_pinned_stays_so_between_the_counts_of_the_grid() -> None:
    found = choice_of(modelled(64, staleness=1, pin={"policy.train": PinSpec(num_devices=16)}))
    assert [placement.num_devices for placement in found.placements if placement.engine == TRAINER] == [16]


def test_the_k_longest_bound_is_that_of_the_rollout_study() -> None:
    lengths = lognormal(median=500, sigma=1.0, cap=4000).draw(8, 4, 1)
    ways = Instances(*(np.array([value]) for value in (0.01, 0.0005, 0.0, 4.0, 3.0, 0.0, 0.0, 0.0)))
    mine = Draw(lengths, np.zeros(8, np.int64)).k_longest_s(ways)[0]
    assert mine == pytest.approx(k_longest_s(lengths.ravel(), DecodeModel(0.01, 0.0005, 4), 3))


def test_a_rollout_of_few_samples_is_released_as_its_groups_end() -> None:
    draw = Draw(np.array([[10, 20], [40, 30]]), np.array([5, 5]))
    ways = Instances(*(np.array([value]) for value in (1.0, 0.1, 0.0, 8.0, 1.0, 0.0, 0.0, 0.0)))
    assert draw.releases_s(ways)[0].tolist() == pytest.approx([20 + 0.1 * (10 + 20 + 20 + 20), 40 + 0.1 * 100])


def test_a_pin_off_the_grid_of_device_counts_is_a_point_of_it() -> None:
    choice = choice_of(modelled(64, pin={"policy.rollout": PinSpec(num_devices=24), "policy.train": PinSpec(devices=(3, 43))}))
    placements = {str(placement.engine): placement for placement in choice.placements}
    assert placements["policy.rollout"].num_devices == 24
    assert (placements["policy.train"].first_device, placements["policy.train"].num_devices) == (3, 40)


@pytest.mark.parametrize(("model", "few", "more"), [("Qwen2.5-7B", 6, 7), ("Qwen3-30B-A3B", 4, 7)])
def test_one_more_device_in_a_node_makes_no_plan_slower(model: str, few: int, more: int) -> None:
    """Tensor groups of two lie inside a node of seven too, on six of them; and what fits on four fits there."""
    train = TrainSpec(engine="megatron", token_budget=16_384)
    found = []
    for num in (few, more):
        pools = {"main": PoolSpec(device="h100", devices_per_node=num, host_memory_gib=2048)}
        spec = ClusterSpec(pools=pools, rollout=RolloutSpec(engine="sglang"), train=train)
        problem = modelled(num, model=model)
        costs = problem.costs.for_spec(spec)
        assert costs is not None
        found.append(find_plan(problem.workload, problem.lengths, costs, spec, is_alone=True).predicted_step_s)
    assert found[1] <= found[0]


def test_a_pin_of_any_number_of_devices_on_which_an_engine_fits_is_planned() -> None:
    """Eleven are no multiple of the four that the trainer needs."""
    pin = {"policy.rollout": PinSpec(num_devices=5), "policy.train": PinSpec(num_devices=11), "reference": PinSpec(devices=(0, 11))}
    problem = modelled(16, model="Qwen2.5-32B", pin=pin)
    assert problem.costs.unit(TRAINER, "main") == 4
    choice = choice_of(problem)
    assert {str(one.engine): one.layout.num_devices for one in choice.placements} == {
        "policy.rollout": 5,
        "policy.train": 11,
        "reference.train": 11,
    }


def test_a_pinned_layout_off_the_grid_is_a_point_of_it() -> None:
    choice = choice_of(modelled(64, pin={"policy.rollout": PinSpec(layout=LayoutSpec(dp=3, tp=2))}))
    (placement,) = (placement for placement in choice.placements if placement.engine == POLICY)
    assert (placement.layout.dp, placement.layout.tp) == (3, 2)


def test_a_pin_of_a_kind_is_of_every_engine_of_it_and_a_narrower_one_comes_first() -> None:
    choice = choice_of(modelled(8, pin={"train": PinSpec(devices=(4, 8)), "reference": PinSpec(devices=(6, 8))}))
    placements = {str(placement.engine): list(placement.devices) for placement in choice.placements}
    assert placements["policy.train"] == [4, 5, 6, 7]
    assert placements["reference.train"] == [6, 7]


def test_a_plan_that_can_not_be_run_is_passed_over_and_named() -> None:
    problem, refused = modelled(16), set[str]()

    def check(choice: Choice) -> None:
        if not refused or choice.mode in refused:
            refused.add(choice.mode)
            raise PlanError("nobody can run it")

    found = find_plan(problem.workload, problem.lengths, problem.costs, problem.spec, check=check)
    assert found.mode not in refused
    assert any("which can't be run: nobody can run it" in text for text in found.not_tried)
    assert "not tried: " in explain(found)
    assert not refused & {loser.what for loser in found.losers}


def test_a_structure_is_changed_where_that_is_faster() -> None:
    problem = modelled(64, num_prompts=512)
    graph = problem.graph
    found = best_plan(problem)
    ways = ways_in(found.node)
    near = list(restructured(problem, ways))
    assert len(near) == len({frozenset((calls, cut.first, how) for calls, (cut, how) in one.items()) for one in near}) > 0
    for one in near:
        assert one != ways
        assert graph.everything in one
        for calls, (cut, how) in one.items():
            assert cut.first | cut.second == calls
            assert not cut.first & cut.second
            assert how == TURNS or not graph.engines(cut.first) & graph.engines(cut.second)
    counts = {leaf.engine: leaf.option.num_devices for leaf in leaves_of(found.node)}
    for engine, num in counts.items():
        left = num_left(problem, ways, counts, engine, 64)
        assert left >= num
        assert num_left(problem, ways, {**counts, engine: left}, engine, 64) == left


def test_the_smallest_engines_of_a_structure_grow_together_until_its_devices_are_used() -> None:
    problem = modelled(64, num_prompts=512)
    ways = ways_in(best_plan(problem).node)
    counts = {engine: 2 * (1 + at) for at, engine in enumerate(problem.workload.engines)}
    units = dict.fromkeys(counts, 2)
    grown = scaled_up(problem, ways, counts, units, 64)
    assert len(grown) == len(counts) - 1
    for num, one in enumerate(grown, 2):
        smallest = sorted(counts, key=counts.__getitem__)[:num]
        assert {engine for engine in counts if one[engine] != counts[engine]} <= set(smallest)
        assert all(0 <= num_left(problem, ways, one, engine, 64) - one[engine] <= 64 - counts[engine] for engine in counts)
        assert any(one[engine] > counts[engine] for engine in smallest)


def test_what_is_lent_is_priced_once_for_each_number_of_instances() -> None:
    draw = Draw(np.array([[10, 20], [40, 30]]), np.array([5, 5]))
    rollout = LentRollout.of(draw, Instances(*(np.array([value]) for value in (1.0, 0.1, 0.0, 8.0, 4.0, 0.0, 0.0, 0.0))))
    assert rollout.lending(1) is rollout.lending(1)
    assert (rollout.lending(3)[1] >= rollout.lending(1)[1]).all()
