"""The first promise: a planned run has the eager one's samples, rewards, updates and weights, under every plan and order of events.

Real scheduler, real workers, real lowering, fake engines in exact integers; the interleaving is drawn by a seed.
"""

import dataclasses
import math

from fake_flows import ROWS, digit_share, duet, everything, failing, plain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Policy, Reward, flow, log, steps
from m2flow.micro.protocol.events import Command, Event
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.worker import worker
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

sizes = st.fixed_dictionaries(
    {
        "num_steps": st.integers(1, 3),
        "batch": st.integers(1, 5),
        "n": st.integers(2, 4),
        "minibatch": st.integers(0, 3),
        "epochs": st.integers(1, 2),
    }
)
many = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
fewer = settings(many, max_examples=20)


@many
@given(clusters(), sizes, st.integers(0, 3), st.integers(0, 2**30), st.booleans())
def test_a_planned_grpo_run_equals_the_eager_one(spec, options, seed, order_seed, by_identity):
    eager = run_eager(plain, options, spec, seed=seed)
    assert eager.error == ""
    assert run_planned(plain, options, spec, seed=seed, order_seed=order_seed, deterministic=by_identity) == eager


@fewer
@given(clusters(), sizes, st.integers(0, 2**30))
def test_a_planned_run_with_reference_evaluation_ops_and_observations_equals_the_eager_one(spec, options, order_seed):
    eager = run_eager(everything, options, spec)
    assert eager.error == ""
    assert run_planned(everything, options, spec, order_seed=order_seed) == eager


@fewer
@given(clusters(), sizes, st.integers(0, 2**30))
def test_a_planned_run_of_two_policies_equals_the_eager_one(spec, options, order_seed):
    eager = run_eager(duet, options, spec)
    assert eager.error == ""
    assert set(eager.weights) == {"left", "right"}
    assert run_planned(duet, options, spec, order_seed=order_seed) == eager


def test_every_sample_is_trained_on_once_an_epoch():
    answer = run_eager(
        plain,
        {"num_steps": 2, "batch": 3, "n": 2, "epochs": 2},
        ClusterSpec(rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake")),
    )
    assert len(answer.consumed) == len(set(answer.consumed)) == 2 * 3 * 2 * 2


@many
@given(clusters(), sizes, st.integers(0, 2**30))
def test_a_reward_that_raises_gives_the_same_error_in_both_modes(spec, options, order_seed):
    eager = run_eager(failing, options, spec)
    planned = run_planned(failing, options, spec, order_seed=order_seed)
    assert (planned.error, planned.where) == (eager.error, eager.where)


def test_an_update_over_no_rows_is_a_version_without_a_step_whose_means_are_nan():
    looks: list[tuple[float, float, float | None, float]] = []

    @flow
    def emptied(minibatch: int = 0) -> None:
        policy, verifier, prompts = Policy("fake"), Reward(digit_share), Dataset(ROWS)
        for step in steps(4):
            responses = policy.generate(prompts.take(3), n=2, max_new_tokens=8)
            rewards = verifier.score(responses)
            kept = responses[rewards > 99.0] if step in (1, 2) else responses
            metrics = policy.update(kept, rewards, minibatch_size=minibatch or None)
            log(loss=metrics["loss"], twice=2 * metrics["grad_norm"], reward=metrics["reward"], mean=kept.length.mean())
            before = metrics.lagged(1)
            looks.append((metrics.items()["kl"] if step in (1, 2) else 0.0, float(metrics["loss"]), before and before["reward"], step))

    spec = ClusterSpec(cores=2, device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    for minibatch in (0, 1):
        eager = run_eager(emptied, {"minibatch": minibatch}, spec)
        assert eager.error == ""
        empty = {(step, name) for step, name, value in eager.logs if math.isnan(value)}
        assert empty == {(step, name) for step in (1, 2) for name in ("loss", "twice", "reward", "mean")}
        seen = repr(looks)
        for order_seed in range(4):
            looks.clear()
            planned = run_planned(emptied, {"minibatch": minibatch}, spec, order_seed=order_seed)
            assert repr(planned.logs) == repr(eager.logs)  # NaN equals nothing.
            assert dataclasses.replace(planned, logs=[]) == dataclasses.replace(eager, logs=[])
            assert repr(looks) == seen
        looks.clear()


def test_the_order_of_a_world_is_that_of_its_seed_however_often_workers_send_what_they_have_recorded(monkeypatch):
    told: list[str] = []
    handle = Scheduler.handle

    def noted(self: Scheduler, *events: Event) -> list[Command]:
        commands = handle(self, *events)
        told.extend(repr(command) for command in commands)
        return commands

    monkeypatch.setattr(Scheduler, "handle", noted)
    orders = []
    for period_ns in (0, 1 << 62):
        monkeypatch.setattr(worker, "_FLUSH_SPANS_NS", period_ns)
        run_planned(plain, {}, ClusterSpec(rollout=RolloutSpec(engine="fake", workers=2), train=TrainSpec(engine="fake")), order_seed=5)
        orders.append(list(told))
        told.clear()
    assert orders[0] == orders[1]
