"""The flows of other algorithms than GRPO: each runs planned as eager, on fakes; what is learned is shown by `m2flow run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2flow import load_flow
from m2flow.macro.tracing import trace
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager, run_planned

FLOWS = Path(__file__).parents[2] / "flows"
SMALL: dict[str, dict[str, object]] = {
    "ppo": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "distill": {"num_steps": 2, "warm_steps": 2, "batch": 3},
    "selfplay": {"num_steps": 2, "batch": 3, "n": 2},
    "sft_then_dpo": {"num_steps": 2, "warm_steps": 2, "batch": 3},
    "judge": {"num_steps": 2, "warm_steps": 1, "batch": 3, "n": 2},
    "chat": {"model": "fake", "num_steps": 2, "batch": 3, "n": 2},
}
TRAINED = {
    "ppo": {"policy", "critic", "reference"},
    "distill": {"teacher", "student"},
    "selfplay": {"first", "second"},
    "sft_then_dpo": {"policy", "reference"},
    "judge": {"policy", "judge"},
    "chat": {"policy"},
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


@pytest.mark.parametrize("name", SMALL)
def test_a_flow_is_the_same_planned_and_eager(name):
    flow = load_flow(str(FLOWS / f"{name}.py"))
    eager = run_eager(flow, SMALL[name], SPECS[0])
    assert eager.error == ""
    assert set(eager.weights) == TRAINED[name]
    assert eager.samples
    for order_seed, cluster in enumerate(SPECS):
        expected = run_eager(flow, SMALL[name], cluster)
        assert run_planned(flow, SMALL[name], cluster, order_seed=order_seed) == expected
        assert expected == eager


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
