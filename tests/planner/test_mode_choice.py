"""Which side of the choice between turns and a split each term moves, and that no plan is worse than one that was rejected."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from every_plan import Oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from modelled_problems import TRAINER, modelled
from random_steps import random_problem

from m2flow.errors import PlanError
from m2flow.micro.protocol.cost_terms import EngineId, Layout
from m2flow.planner.cost_model import ModelledCosts, train_cost
from m2flow.planner.dynamic_program import SPLIT, TURNS, Solver, memory_price, prune_options
from m2flow.planner.explaining import explain, why_lines
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.plan_tree import floors_s, leaves_of, ways_in
from m2flow.planner.pools import Pool, pools_of
from m2flow.planner.problem import CallGraph, Options, Problem
from m2flow.planner.search import Found, best_plan, best_plans, find_plan
from m2flow.planner.workload import CallLoad, Workload, extents_of
from m2flow.rollout_scheduling.lengths import lognormal
from m2flow.spec import ClusterSpec, PoolSpec, RolloutSpec, TrainSpec

OWN = "attained: {{{kind}: {{{engine}: {{{name}: {{value: {value}, low: 0, high: 1000, source: a test}}}}}}}}\n"


def step_s(problem: Problem, how: int) -> float:
    """The best plan that only takes turns, or only splits; a search of few rows, the same for both sides of a comparison."""
    return best_plan(problem, (how,)).step_s


def with_attained(tmp_path: Path, kind: str, name: str, value: float, num_devices: int = 16, **more: object) -> Problem:
    file = tmp_path / f"{name}-{value}.yaml"
    file.write_text(OWN.format(kind=kind, engine="sglang" if kind == "rollout" else "deepspeed", name=name, value=value))
    return modelled(num_devices, costs=str(file), **more)  # type: ignore[arg-type]


def moved(tmp_path: Path, kind: str, name: str, low: float, high: float, **more: object) -> tuple[float, float]:
    """By which factor turns and splits are slower with the higher value."""
    few, many = (with_attained(tmp_path, kind, name, value, **more) for value in (low, high))
    turns, split = (step_s(many, how) / step_s(few, how) for how in (TURNS, SPLIT))
    return turns, split


def test_a_server_that_wakes_slowly_makes_turns_slower_and_not_a_split(tmp_path: Path) -> None:
    turns, split = moved(tmp_path, "rollout", "wake_s", 0, 20)
    assert turns > 1.01
    assert split == pytest.approx(1)


def test_in_turns_a_sync_to_other_than_all_of_the_devices_is_no_cheaper_than_in_place(tmp_path: Path) -> None:
    """So no device is left idle to make a sync one between devices, whose packing overlaps with sending."""
    problem = with_attained(tmp_path, "train", "sync_gb_s", 40)
    (sync,) = problem.syncs
    targets = problem.options.of[sync.target]
    target = max(targets, key=lambda option: option.num_devices)
    sources = [one for one in problem.options.of[sync.source] if one.layout.zero == 1 and one.layout.num_replica_devices == 1]
    seconds = {one.num_devices: problem.sync_s(sync, one, target, is_turns=True) for one in sources}
    assert len(seconds) > 1
    assert min(seconds.values()) == seconds[target.num_devices]


def test_slow_copies_to_the_host_make_engines_that_take_turns_dearer_and_not_those_that_stay(tmp_path: Path) -> None:
    fast, slow = (with_attained(tmp_path, "train", "swap", value).options.of[TRAINER] for value in (1.0, 0.1))
    moved_s = [(a.leave_s + a.come_s, b.leave_s + b.come_s) for a, b in zip(fast, slow, strict=True)]
    away = [pair for option, pair in zip(fast, moved_s, strict=True) if option.is_swapped]
    assert away
    assert all(b > 5 * a - 2 for a, b in away)
    assert all(pair == (0, 0) for option, pair in zip(fast, moved_s, strict=True) if not option.is_swapped)


def test_a_server_keeps_all_of_its_devices_or_wakes_up_and_leaves_a_context(tmp_path: Path) -> None:
    problem = with_attained(tmp_path, "rollout", "kept_gib", 3.0)
    room = problem.costs.device_bytes("main")
    options = problem.options.of[problem.workload.engines[0]]
    assert {option.kept_bytes for option in options} == {room, 3 * 2**30}
    assert all((option.come_s == 0) == (option.kept_bytes == room) for option in options)
    plan = best_plan(problem, (TURNS,))
    (leaf,) = (leaf for leaf in leaves_of(plan.node) if leaf.engine.kind == "rollout")
    assert leaf.option.come_s > 0  # In turns it wakes up; in a split it need not.
    split = best_plan(problem, (SPLIT,))
    assert all(leaf.option.come_s == 0 for leaf in leaves_of(split.node))


def test_an_update_that_accumulates_over_the_whole_batch_streams_and_one_of_many_mini_batches_waits() -> None:
    def with_steps(num: int) -> Problem:
        problem = modelled(16)
        calls = tuple(
            msgspec.structs.replace(call, num_optimizer_steps=num) if call.work == "update" else call for call in problem.workload.calls
        )
        return Problem(msgspec.structs.replace(problem.workload, calls=calls), problem.lengths, problem.costs, problem.spec)

    one, many = with_steps(1), with_steps(8)
    assert step_s(many, SPLIT) / step_s(one, SPLIT) > 1.1 * step_s(many, TURNS) / step_s(one, TURNS)


def update_s(problem: Problem, num_steps: int) -> dict[int, float]:
    """Replicas -> least seconds of the update with so many optimiser steps."""
    calls = tuple(
        msgspec.structs.replace(call, num_optimizer_steps=num_steps) if call.work == "update" else call for call in problem.workload.calls
    )
    problem = Problem(msgspec.structs.replace(problem.workload, calls=calls), problem.lengths, problem.costs, problem.spec)
    found = dict[int, float]()
    for option, times in zip(problem.options.of[TRAINER], problem.leaf(problem.graph.bits["policy.update"]).times, strict=True):
        if not option.is_swapped and option.layout.num_replica_devices == 1 and not option.layout.offload:
            found[option.layout.dp] = min(found.get(option.layout.dp, np.inf), float(times[:, 1].min()))
    return found


def test_replicas_beyond_a_mini_batch_do_not_make_an_update_faster() -> None:
    """In turns a trainer has all devices, and small mini-batches leave some of them without a sample; a split gives it fewer."""
    one, many = (update_s(modelled(64, num_prompts=16), num_steps) for num_steps in (1, 8))  # 128 samples; 16 in a mini-batch
    assert one[64] < 0.7 * one[16]
    assert many[64] > 0.9 * many[16]


def test_no_pass_is_shorter_than_its_longest_sample_on_one_replica() -> None:
    problem = modelled(64, num_prompts=16)
    longest = max(float((draw.responses + draw.prompts[:, None]).max()) for draw in problem.batches["policy.update"].draws)
    for option in problem.options.of[TRAINER]:
        cost = problem.costs.train(TRAINER, option.pool, option.layout).update
        alone_s = option.layout.dp * (cost.token_s * longest + cost.token2_s * longest**2)
        seconds = problem.leaf(problem.graph.bits["policy.update"]).times[problem.options.of[TRAINER].index(option), -1, 1]
        assert seconds >= 0.95 * alone_s  # The quantile of 128 samples is a little below the longest of all draws.


def test_experts_of_a_stage_are_neighbours_whatever_the_number_of_stages() -> None:
    """So a trainer on half of the devices with a pipeline is no slower for it: its experts' tokens stay inside a node."""
    spec = modelled(16).spec
    near, far = (
        next(iter(pools_of(spec.model_copy(update={"pools": {"main": pool.model_copy(update={"network_gb_s": rate})}})).values()))
        for pool in spec.pools.values()
        for rate in (400.0, 4.0)
    )

    def token_s(pool: Pool, layout: Layout) -> float:
        shape = shape_named("Qwen3-30B-A3B")
        return train_cost(shape, pool, layout, microbatch_tokens=4096, is_trained=True, recomputes=False)[0].update.token_s

    inside, across = Layout(pp=2, dp=8, ep=8, zero=1), Layout(dp=16, ep=16, zero=1)
    assert token_s(far, inside) == token_s(near, inside)
    assert token_s(far, across) > 2 * token_s(near, across)


def test_a_policy_and_a_critic_that_both_compute_before_they_are_updated_can_be_split() -> None:
    def load(name: str, work: str, engine: EngineId, *after: str, **more: int) -> CallLoad:
        return CallLoad(name, work, engine, 64, 8, "group", False, after, token_budget=16_384, **more)  # type: ignore[arg-type]

    critic, made = EngineId("critic", "train"), ("policy.generate", "policy.logprobs", "critic.values")
    base = modelled(16)
    calls = (
        base.workload.calls[0],
        load("policy.logprobs", "forward", TRAINER, "policy.generate"),
        load("critic.values", "forward", critic, "policy.generate"),
        load("policy.update", "update", TRAINER, *made, num_optimizer_steps=1),
        load("critic.update", "update", critic, *made, num_optimizer_steps=1),
    )
    workload, shapes = Workload("ppo", calls), dict.fromkeys(("policy", "critic"), shape_named("Qwen2.5-1.5B"))
    costs = ModelledCosts(base.spec, workload, shapes, extents_of(workload, shapes, base.lengths))  # type: ignore[arg-type]
    found = best_plan(Problem(workload, base.lengths, costs, base.spec), (SPLIT,))
    assert found.mode == "split"


def test_a_reference_s_passes_are_on_the_path_of_turns_and_beside_that_of_a_split() -> None:
    def without_reference(problem: Problem) -> Problem:
        calls = tuple(
            msgspec.structs.replace(call, after=tuple(name for name in call.after if name != "reference.logprobs"))
            for call in problem.workload.calls
            if call.name != "reference.logprobs"
        )
        return Problem(msgspec.structs.replace(problem.workload, calls=calls), problem.lengths, problem.costs, problem.spec)

    whole, less = modelled(64), without_reference(modelled(64))
    turns, split = (step_s(whole, how) - step_s(less, how) for how in (TURNS, SPLIT))
    assert turns > 0
    assert split >= 0


def test_half_of_the_cache_is_tried_where_the_cache_fills_the_device() -> None:
    costs = modelled(8, model="Qwen2.5-32B").costs
    assert isinstance(costs, ModelledCosts)
    engine = next(one for one in costs._workload.engines if one.kind == "rollout")
    layout = next(one for one in costs.layouts(engine, "main", 8) if one.tp == 2)
    ((smaller, running),) = costs.smaller_caches(engine, "main", layout)
    full = costs.footprint(engine, "main", layout)
    assert smaller.kv < full.kv
    assert smaller.weights == full.weights
    assert running == costs.decode(engine, "main", layout).max_running // 2


def test_why_compares_the_modes_term_by_term_and_names_every_term() -> None:
    problem = modelled(16)
    choice = find_plan(problem.workload, problem.lengths, problem.costs, problem.spec)
    lines = why_lines(choice)
    head, whole = lines[0], lines[-1]
    assert {choice.mode, *(loser.what for loser in choice.losers)} <= set(head.split())
    assert "whole step" in whole
    for loser in choice.losers:
        assert sum(part.seconds for part in loser.parts if part.on_critical_path) == pytest.approx(loser.predicted_step_s)
        assert "e-" not in loser.why
    text = explain(choice, details="full")
    assert "device-hours a step" in text
    assert "KV cache of policy.generate" in text
    assert "GiB on a device" in text
    by_call = {work.call: work for work in choice.works}
    assert 0 < by_call["policy.update"].mfu < 0.45
    assert 0 < by_call["policy.generate"].bandwidth < 0.7
    assert all(work.exposed_s <= work.seconds * (1 + 1e-9) for work in choice.works)
    assert max(map(len, explain(choice).splitlines()[:30])) <= 260


@given(st.integers(0, 100_000), st.integers(2, 3))
@settings(max_examples=15, deadline=None)
def test_no_plan_at_all_is_better_than_one_that_is_called_exact(seed: int, num_calls: int) -> None:
    problem = random_problem(seed, num_calls=num_calls, num_ways=2)
    best = Oracle(random_problem(seed, num_calls=num_calls, num_ways=2)).best_s()
    try:
        plans = best_plans(problem)
    except PlanError:
        assert best == float("inf")
        return
    assert plans[0].step_s == min(plan.step_s for plan in plans)
    if plans[0].is_exact:
        assert plans[0].step_s == pytest.approx(best, rel=1e-9)


def better_neighbours(problem: Problem, found: Found) -> dict[str, float]:
    """Engine -> the time of a plan in which it alone is elsewhere, or one pair of parts is combined the other way, if that is less."""
    mine = {leaf.engine: leaf.option for leaf in leaves_of(found.node)}
    prune_options(problem, 1e-3 * found.step_s)
    ways, better = ways_in(found.node), dict[str, float]()
    changes = {str(engine): (ways, {**{e: [o] for e, o in mine.items()}, engine: problem.options.of[engine]}) for engine in mine}
    for calls, (cut, how) in ways.items():
        if not problem.graph.engines(cut.first) & problem.graph.engines(cut.second):
            changes[f"{calls} the other way"] = {**ways, calls: (cut, TURNS + SPLIT - how)}, {e: [o] for e, o in mine.items()}
    for what, (within, options) in changes.items():
        tables = Solver(problem.with_options(Options(options)), found.step_s, within=within).solve()
        if len(tables.steps_s) and tables.steps_s.min() < found.step_s * (1 - 2e-3):
            better[what] = float(tables.steps_s.min())
    return better


@pytest.mark.parametrize(("num_devices", "num_prompts"), [(64, 128)])
def test_no_single_change_of_a_large_plan_is_better(num_devices: int, num_prompts: int) -> None:
    problem = modelled(num_devices, num_prompts=num_prompts, lend="never")
    found = best_plans(problem)[0]
    assert not better_neighbours(modelled(num_devices, num_prompts=num_prompts, lend="never"), found)


def test_rows_that_keep_little_are_kept_where_memory_is_short() -> None:
    """All engines of a step on eight devices: rows chosen by their times alone keep so much that later parts have no room."""
    problem = modelled(8, model="Qwen2.5-7B", num_prompts=256)
    prune_options(problem, 1e-3)
    price = memory_price(problem)
    assert price > 0
    free, priced = (
        Solver(problem, slack_s=0.01, most_rows=4, hows=(TURNS,), price=each).solve().steps_s.min(initial=np.inf) for each in (0.0, price)
    )
    assert priced < free


@pytest.mark.parametrize("how", [TURNS, SPLIT])
def test_what_a_moved_engine_takes_at_least_is_never_more_than_what_it_takes(how: int) -> None:
    problem = modelled(16)
    found = best_plan(problem, (how,))
    mine = {leaf.engine: leaf.option for leaf in leaves_of(found.node)}
    prune_options(problem, 1e-3)
    for engine in mine:
        options = problem.options.of[engine][::7]
        near = problem.with_options(Options({**{e: [o] for e, o in mine.items()}, engine: options}))
        for option, floor_s in zip(options, floors_s(near, found.node), strict=True):
            alone = problem.with_options(Options({**{e: [o] for e, o in mine.items()}, engine: [option]}))
            assert floor_s <= Solver(alone, within=ways_in(found.node)).solve().steps_s.min(initial=np.inf) * (1 + 1e-9)


def test_a_search_stays_within_its_pairs_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every search but the exact one keeps at most so many rows of a part, so its pairs grow with the cuts alone."""
    most = dict[int, int]()
    joined = Solver._joined

    def counting(self: Solver, calls: int, some):  # type: ignore[no-untyped-def]
        for _, cut, _ in some:
            most[self._most_rows] = max(most.get(self._most_rows, 0), len(self._fronts[cut.first]), len(self._fronts[cut.second]))
        return joined(self, calls, some)

    monkeypatch.setattr(Solver, "_joined", counting)
    best_plan(modelled(64))
    assert most
    assert all(num <= rows for rows, num in most.items() if rows)


def test_tensor_parallelism_over_nodes_is_there_where_a_pin_asks_for_it() -> None:
    pin = {"policy.rollout": {"layout": {"tp": 16}}}
    spec = ClusterSpec.model_validate({"pin": pin}).pin
    problem = modelled(32, model="Llama-3.1-405B", pin=spec)
    engine = problem.workload.engines[0]
    assert {layout.tp for layout in problem.costs.layouts(engine, "main", 32)} >= {16}
    assert problem.costs.unit(engine, "main") == 16
    assert not any(layout.tp > 8 for layout in modelled(32, model="Llama-3.1-405B").costs.layouts(engine, "main", 32))


def ppo(num_steps: int = 1) -> Workload:
    """A step of 1,024 samples whose critic gives values and is trained, on devices of its own in a split."""

    def load(role: str, method: str, work: str, *after: str) -> CallLoad:
        engine, steps = EngineId(role, "rollout" if work == "generate" else "train"), num_steps * (work == "update")
        unit, most = ("group" if steps else "sample"), 12_288 * (work == "generate")
        name = f"{role}.{method}"
        return CallLoad(
            name, work, engine, 1024, 1, unit, False, after, num_optimizer_steps=steps, token_budget=16_384, max_new_tokens=most
        )  # type: ignore[arg-type]

    made, before = "policy.generate", ("policy.generate", "reference.logprobs", "critic.values")
    return Workload(
        "ppo",
        (
            load("policy", "generate", "generate"),
            load("reference", "logprobs", "forward", made),
            load("critic", "values", "forward", made),
            load("policy", "update", "update", *before),
            load("critic", "update", "update", *before),
        ),
    )


def test_a_policy_s_update_begins_on_a_critic_s_values_before_the_critic_s_own_update_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns all samples have their values before any update anyway; in a split the policy's update would wait for the critic's."""

    def problem() -> Problem:
        pools = {"main": PoolSpec(device="h100", nodes=8, devices_per_node=8)}
        engines = {"rollout": RolloutSpec(engine="sglang"), "train": TrainSpec(engine="deepspeed", token_budget=16_384)}
        spec, workload = ClusterSpec(name="cluster", pools=pools, **engines), ppo()  # type: ignore[arg-type]
        shapes = dict.fromkeys((engine.role for engine in workload.engines), shape_named("Qwen2.5-7B"))
        lengths = lognormal(median=2000, sigma=0.9, cap=12_288, prompt_tokens=300)
        return Problem(workload, lengths, ModelledCosts(spec, workload, shapes, extents_of(workload, shapes, lengths)), spec)

    turns_s, split_s = step_s(problem(), TURNS), step_s(problem(), SPLIT)
    assert turns_s > 1.1 * split_s
    monkeypatch.setattr(CallGraph, "shown", lambda self, calls: -1)  # The critic's leaf hands on its last call's output alone.
    assert step_s(problem(), SPLIT) > 1.1 * split_s
