"""Agents under every plan: an episode is a sample, and planned equals eager for it too."""

from __future__ import annotations

import random

import pytest
from played_episodes import SPEC, wanderer

from m2flow import Dataset, Policy, flow, gigpo, steps
from m2flow.errors import StateLost
from m2flow.recipe import AdamW
from m2flow.testing.random_programs import Dice, difference_of, make_cluster, make_policies, scheduled
from m2flow.testing.world import run_eager, run_planned

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")


def task(rng: random.Random) -> dict[str, str]:
    return {"prompt": f"{rng.randrange(1000)}?", "answer": "7"}


@flow(staleness="staleness")
def learning(num_steps: int = 2, batch: int = 3, n: int = 3, failed: str = "mask", staleness: int = 0, by_turn: bool = False) -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset.generate(task, 1000, seed=1, name="rows")
    for _ in steps(num_steps):
        episodes = policy.rollout(wanderer, rows.take(batch), n=n, max_tokens=80, max_turns=6, failed=failed)
        policy.update(episodes, episodes.reward, advantages=gigpo() if by_turn else "grpo")


def test_an_eager_run_of_an_agent_trains_on_what_the_model_said():
    answer = run_eager(learning, {}, SPEC)
    assert not answer.error, answer.error
    assert run_eager(learning, {"by_turn": True}, SPEC).weights != answer.weights
    assert len(answer.samples) == 18
    assert answer.consumed
    assert answer.rewards
    assert any(-1 in versions[versions.index(0) :] for _, versions in answer.samples.values() if 0 in versions), "tokens between two turns"
    assert sum(value for _, name, value in answer.logs if name == "episodes/failed") >= 1


@pytest.mark.timeout(0)
def test_a_planned_run_of_an_agent_equals_the_eager_one_under_random_plans_and_orders(request):
    check(request, 15, loses=0)


@pytest.mark.timeout(0)
def test_an_agents_run_whose_workers_die_and_come_back_gives_the_same(request):
    check(request, 15, loses=2)


def check(request: pytest.FixtureRequest, num_cases: int, *, loses: int) -> None:
    for number in range(num_cases * (10 if request.config.getoption("--long") else 1)):
        dice = Dice(f"agents, {loses}, {number}")
        spec = make_cluster(dice)
        if number % 3 == 2:
            spec = scheduled(spec, make_policies(dice))
        options = {"failed": dice.choice(("mask", "zero")), "staleness": dice.choice((0, 0, 1)), "by_turn": dice.choice((False, True))}
        planned = run_planned(learning, options, spec, seed=number, order_seed=dice.integer(0, 2**30), num_losses=dice.integer(0, loses))
        if planned.error.startswith(StateLost.__name__):
            continue
        eager = run_eager(learning, options, spec, seed=number, decisions=planned.decisions or None)
        assert not eager.error
        assert difference_of(planned, eager) is None, f"case {number}: {options} {spec}"
