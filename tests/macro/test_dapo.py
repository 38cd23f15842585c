"""flows/dapo.py: what it is traced to, and that it is the same planned and eager."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2flow import load_flow
from m2flow.macro.tracing import trace
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager, run_planned

DAPO = load_flow(str(Path(__file__).parents[2] / "flows" / "dapo.py"))
SMALL: dict[str, object] = {"num_steps": 1, "warm_steps": 1, "batch": 2, "n": 3}


def test_a_step_is_one_generation_that_draws_its_own_prompts_and_nothing_waits():
    graph, *_ = trace(DAPO, {**SMALL, "batch": 16, "n": 8})
    step = [call for call in graph.calls if call.step == 0]
    assert [call.name for call in step][-6:] == [
        "prompts.take",
        "policy.generate",
        "is_sorted.score",
        "keep",
        "rewards",
        "policy.update",
    ]
    generate = next(call for call in step if call.method == "generate" and "count" in call.shown)
    assert dict(generate.shown) == {"n": 8, "max_new_tokens": 8, "count": 16}
    assert all(seen.why.startswith("the cursor of prompts") for seen in graph.observations), "only the last line asks how many it drew"


def test_on_engines_that_never_sort_it_runs_dry_with_the_same_words_planned_and_eager():
    fakes = {"rollout": RolloutSpec(engine="fake", workers=2), "train": TrainSpec(engine="fake")}
    cluster = ClusterSpec(placement="split", device="cpu", cores=2, functions=FunctionSpec(chunk=2), **fakes)
    eager = run_eager(DAPO, SMALL, cluster)
    assert "were kept among 32 prompts" in eager.error
    planned = run_planned(DAPO, SMALL, cluster, order_seed=1)
    assert planned.error == eager.error
    assert planned.samples == eager.samples


@pytest.mark.slow
def test_after_a_warm_start_it_replaces_groups_and_gives_the_same_bits_planned_and_eager():
    options = {"num_steps": 2, "warm_steps": 80, "batch": 2, "n": 4}
    cluster = ClusterSpec(placement="split", device="cpu", cores=2, functions=FunctionSpec(chunk=5))
    eager = run_eager(DAPO, options, cluster, deterministic=True)
    assert eager.error == ""
    assert run_planned(DAPO, options, cluster, deterministic=True) == eager
    drawn = next(value for _, name, value in eager.logs if name == "prompts_drawn")
    assert drawn > 2 * 2
