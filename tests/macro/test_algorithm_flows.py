"""The flows of other algorithms than GRPO: each runs planned as eager, on fakes; what is learned is shown by `m2flow run`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from m2flow import Dataset, Policy, Reference, Reward, Sample, flow, load_flow, log, op, ppo_clip, steps
from m2flow.algorithms.shaping import adaptive_entropy_coef, adaptive_kl_coef
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.arithmetic import arithmetic
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager, run_planned

FLOWS = Path(__file__).parents[2] / "flows"
SMALL: dict[str, dict[str, object]] = {
    "ppo": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "distill": {"num_steps": 2, "warm_steps": 2, "batch": 3},
    "selfplay": {"num_steps": 2, "batch": 3, "n": 2},
    "sft_then_dpo": {"num_steps": 2, "warm_steps": 2, "batch": 3},
    "reward_model_then_ppo": {"num_steps": 2, "warm_steps": 2, "pair_steps": 2, "batch": 3, "n": 2},
    "judge": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "chat": {"model": "fake", "num_steps": 2, "batch": 3, "n": 2},
    "gspo": {"num_steps": 2, "warm_steps": 1, "batch": 4, "n": 2},
    "reinforce_pp": {"num_steps": 2, "warm_steps": 1, "batch": 4},
    "async_grpo": {"num_steps": 3, "warm_steps": 1, "batch": 3, "n": 2},
    "decoupled_ppo": {"num_steps": 3, "warm_steps": 1, "batch": 4, "n": 2},
    "best_of_n": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "external_agent": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "tool_use": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "search": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "unit_tests": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "tree_rollout": {"num_steps": 2, "warm_steps": 1, "batch": 2, "n": 2, "branches": 2},
    "nim": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "duel": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "curriculum": {"num_steps": 3, "warm_steps": 1, "pool": 8, "batch": 3, "n": 2},
    "moe_routing_replay": {"num_steps": 2, "warm_steps": 1, "batch": 4, "n": 2},
}
STALE = {"async_grpo", "decoupled_ppo"}
"""Flows where time decides which weights sampled: eager repeats a run from its record."""
TRAINED = {
    "ppo": {"policy", "critic", "reference"},
    "distill": {"teacher", "student"},
    "selfplay": {"first", "second"},
    "sft_then_dpo": {"policy", "reference"},
    "reward_model_then_ppo": {"policy", "reference", "reward_model"},
    "judge": {"policy", "judge"},
    "chat": {"policy"},
    "gspo": {"policy"},
    "reinforce_pp": {"policy", "reference"},
    "async_grpo": {"policy"},
    "decoupled_ppo": {"policy"},
    "best_of_n": {"policy"},
    "external_agent": {"policy"},
    "tool_use": {"policy"},
    "search": {"policy"},
    "unit_tests": {"policy"},
    "tree_rollout": {"policy"},
    "nim": {"policy"},
    "duel": {"policy", "rival"},
    "curriculum": {"policy"},
    "moe_routing_replay": {"policy"},
}


def spec(placement: str, workers: int, *, max_running: int, token_budget: int, chunk: int) -> ClusterSpec:
    return ClusterSpec(
        placement=placement,
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=workers, max_running=max_running),
        train=TrainSpec(engine="fake", token_budget=token_budget),
        functions=FunctionSpec(workers=workers, chunk=chunk),
    )


SPECS = [
    spec("time-shared", 1, max_running=64, token_budget=4096, chunk=64),
    spec("time-shared", 2, max_running=3, token_budget=40, chunk=2),
    spec("split", 2, max_running=5, token_budget=1, chunk=1),
]


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The flows with 32 prompts held out instead of hundreds: they are generated for at each evaluation, on one worker or on several."""
    folder = tmp_path_factory.mktemp("flows")
    (folder / "models").symlink_to(FLOWS / "models")
    for path in FLOWS.glob("*.py"):
        (folder / path.name).write_text(re.sub(r"heldout=True\), \d+", "heldout=True), 32", path.read_text()))
    return folder


@pytest.mark.parametrize("name", SMALL)
def test_a_flow_is_the_same_planned_and_eager(name, flows):
    flow = load_flow(str(flows / f"{name}.py"))
    eager = run_eager(flow, SMALL[name], SPECS[0])
    assert eager.error == ""
    assert set(eager.weights) == TRAINED[name]
    assert eager.samples
    for order_seed, cluster in enumerate(SPECS):
        planned = run_planned(flow, SMALL[name], cluster, order_seed=order_seed)
        expected = run_eager(flow, SMALL[name], cluster, decisions=planned.decisions)
        assert planned == expected
        assert expected == eager or name in STALE


def test_a_teachers_likeliest_tokens_reach_the_student_the_same_planned_and_eager(flows):
    flow, weights = load_flow(str(flows / "distill.py")), []
    for top_k in (0, 4):
        options = {**SMALL["distill"], "top_k": top_k}
        eager = run_eager(flow, options, SPECS[0])
        assert eager.error == ""
        for order_seed, cluster in enumerate(SPECS):
            assert run_planned(flow, options, cluster, order_seed=order_seed) == eager
        weights.append(eager.weights["student"])
    assert weights[0] != weights[1]


def test_the_plan_shows_the_pass_before_an_update_and_its_cost():
    graph = trace(load_flow(str(FLOWS / "decoupled_ppo.py")), SMALL["decoupled_ppo"], steps=2)[0]
    lines = {line.name: line for line in arithmetic(graph, num_steps=3, token_budget=64) if line.name.startswith("pass before")}
    assert [line.value for line in lines.values()] == ["at most 128 tokens"]
    assert [line.formula for line in lines.values()] == [
        "log-probabilities of its samples without gradient, 1/3 of the operations of training"
    ]


def test_experts_of_rollout_and_of_the_trainers_own_pass_reach_an_update_the_same_planned_and_eager(flows):
    flow, weights = load_flow(str(flows / "moe_routing_replay.py")), {}
    for replay in ("none", "rollout", "trainer"):
        options = {**SMALL["moe_routing_replay"], "replay": replay}
        eager = run_eager(flow, options, SPECS[1])
        assert eager.error == ""
        assert run_planned(flow, options, SPECS[2], order_seed=3) == run_eager(flow, options, SPECS[2])
        weights[replay] = str(eager.weights["policy"])
    assert len(set(weights.values())) == 3


@pytest.mark.parametrize("name", SMALL)
def test_a_flow_is_short_and_says_what_it_is(name):
    path = FLOWS / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    assert load_flow(str(path)).doc


def test_ppo_passes_over_each_rollout_several_times_in_mini_batches():
    graph, *_ = trace(load_flow(str(FLOWS / "ppo.py")), {"num_steps": 1, "warm_steps": 1})
    updates = [call for call in graph.calls if call.method == "update"]
    assert [(call.role, call.options["epochs"], call.options["minibatch_size"]) for call in updates] == [
        ("policy", 1, 128),
        ("policy", 2, 32),
        ("critic", 2, 32),
    ]


def num_tokens(sample: Sample) -> float:
    return sample.num_tokens / 8


@op(granularity="batch")
def next_coef(coef: float, kl: float) -> float:
    return adaptive_kl_coef(coef, abs(kl), target=1e-6)


@flow
def with_adaptive_penalty(num_steps: int = 3) -> None:
    policy, rule = Policy("fake", init="random"), Reward(num_tokens)
    reference, prompts, beta = Reference(policy), Dataset([{"prompt": f"{i}="} for i in range(9)]), 0.5
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=6)
        kl = (responses.logprobs - reference.logprobs(responses)).sum(over="sample")
        policy.update(responses, rule.score(responses) - beta * kl)
        beta = next_coef(beta, kl.mean())
        log(beta=beta)


@flow
def with_adaptive_bonus(num_steps: int = 4) -> None:
    policy, rule, coef = Policy("fake", init="random"), Reward(num_tokens), 0.01
    prompts = Dataset([{"prompt": f"{i}="} for i in range(12)])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=6)
        metrics = policy.update(responses, rule.score(responses), loss=ppo_clip(entropy_coef=coef))
        known = metrics.lagged(1)
        if known is not None:
            coef = adaptive_entropy_coef(coef, known["loss"], target=1e12)
        log(coef=coef)


def test_a_bonus_that_follows_the_metrics_of_the_step_before_is_the_same_planned_and_eager():
    eager = run_eager(with_adaptive_bonus, {}, SPECS[0])
    assert eager.error == ""
    assert [value for *_, value in eager.logs] == pytest.approx([0.01, 0.015, 0.02, 0.025])
    for order_seed, cluster in enumerate(SPECS):
        assert run_planned(with_adaptive_bonus, {}, cluster, order_seed=order_seed) == eager


def test_a_coefficient_that_follows_the_divergence_is_the_same_planned_and_eager():
    eager = run_eager(with_adaptive_penalty, {}, SPECS[0])
    assert eager.error == ""
    assert [value for *_, value in eager.logs] == pytest.approx([0.5 * 1.02**i for i in (1, 2, 3)])
    for order_seed, cluster in enumerate(SPECS):
        assert run_planned(with_adaptive_penalty, {}, cluster, order_seed=order_seed) == eager
