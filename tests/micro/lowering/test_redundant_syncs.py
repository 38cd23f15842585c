"""Moves in the tail gain more than they cost: runs of one policy, with its moves and without them, in the simulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import Ran, cluster, costs_of, long_answers, ran

from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.scheduler import scheduling_policy_dispatch
from m2flow.micro.scheduler.scheduling_policy_dispatch import PolicyDispatch
from m2flow.rollout_scheduling.lengths import parse_lengths
from m2flow.rollout_scheduling.policies import Repack
from m2flow.simulator.machines import paced, with_paces


class Still(Repack):
    """Repack as it is, but for its moves."""

    name = "still"

    def moves(self) -> tuple[()]:
        return ()


def tail(
    policy: str,
    predictor: str,
    seed: int,
    *,
    sigma: float,
    instances: int = 3,
    prefill_s: float = 35e-6,
    sample_s: float = 2e-3,
    num_steps: int = 1,
) -> Ran:
    lengths = parse_lengths(f"lognormal:median=200,sigma={sigma},cap=4000,prompt=64")
    spec = cluster(instances=instances, max_running=32).with_policy(policy)
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"predictor": predictor})})
    options = {"num_steps": num_steps, "batch": 6 * instances}
    return ran(long_answers, costs_of(prefill_s, sample_s), lengths, spec, options=options, num_steps=num_steps, seed=seed)


def num_moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts samples that went on elsewhere."""
    moved: list[int] = []
    preempted = PolicyDispatch.preempted

    def watched(self: PolicyDispatch, row: int) -> object:
        moved.append(row)
        return preempted(self, row)

    monkeypatch.setattr(scheduling_policy_dispatch.PolicyDispatch, "preempted", watched)
    return moved


STILL = f"{Path(__file__)}:Still"


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    sigma=st.sampled_from([0.6, 0.9, 1.2]),
    instances=st.integers(2, 4),
    prefill_s=st.sampled_from([35e-6, 3e-4, 3e-3]),
    sample_s=st.sampled_from([8e-5, 5e-4, 4e-3]),
)
def test_with_known_lengths_no_run_is_longer_for_its_moves(seed, sigma, instances, prefill_s, sample_s):
    moving, still = (
        tail(policy, "oracle", seed, sigma=sigma, instances=instances, prefill_s=prefill_s, sample_s=sample_s).totals.makespan_s
        for policy in ("repack", STILL)
    )
    assert moving <= still * 1.0001


def test_there_are_moves_and_they_gain(monkeypatch):
    moved = num_moved(monkeypatch)
    gains = []
    for seed in range(3):
        moving, still = (tail(policy, "oracle", seed, sigma=1.2).totals.makespan_s for policy in ("repack", STILL))
        gains.append(1 - moving / still)
    assert moved
    assert max(gains) > 0.02


def test_moves_that_cost_more_than_they_gain_are_not_made(monkeypatch):
    moved = num_moved(monkeypatch)
    for seed in range(3):
        tail("repack", "oracle", seed, sigma=1.2, prefill_s=0.05)
    assert not moved


@pytest.mark.slow
def test_by_expectation_alone_moves_gain_over_many_runs(monkeypatch):
    """A single run may lose: what was expected did not come."""
    moved = num_moved(monkeypatch)
    ratios = []
    for seed in range(6):
        moving, still = (tail(policy, "siblings", seed, sigma=0.9, num_steps=2).totals.makespan_s for policy in ("repack", STILL))
        ratios.append(moving / still)
    assert moved
    assert np.mean(ratios) < 1.0
    assert max(ratios) < 1.02


def test_policies_take_time_to_be_what_the_simulation_goes_by(monkeypatch):
    seen = []
    begin = Repack.begin
    monkeypatch.setattr(Repack, "begin", lambda self, view: (seen.append((view.model, view.move_cost)), begin(self, view))[1])
    tail("repack", "oracle", 0, sigma=0.6, sample_s=4e-3, prefill_s=3e-4)
    assert {(model.t0_s, model.t1_s, model.max_batch) for model, _ in seen} == {(8e-3, 4e-3, 32)}
    assert {(cost.fixed_s, cost.token_s) for _, cost in seen} == {(3e-3, 3e-4)}


def test_a_plan_with_policies_says_how_long_they_take_a_decode_step_to_be():
    graph, models, _ = trace(long_answers, {}, steps=1)
    spec = cluster().with_policy("repack")
    plan = lower(graph, models, spec)
    assert "policy: a decode step takes 8 ms, and 2 ms a sample (given)" in str(with_paces(plan, spec, costs_of(35e-6, 2e-3)))
    assert paced(plan, graph, models, spec, None).notes[-1].startswith("policies take a decode step to last what the default model says")
    assert paced(lower(graph, models, cluster()), graph, models, cluster(), None).paces == ()
