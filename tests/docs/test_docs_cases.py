"""The flows of docs/guide/schedule.md: each can be run as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2flow.macro.flow import load_flow
from m2flow.macro.tracing import trace
from m2flow.runs.cluster_file import load_cluster

CASES = Path(__file__).parents[2] / "docs" / "cases"


@pytest.mark.parametrize("name", ["tail", "tail_covered", "barrier", "barrier_lagged", "slow_reward"])
def test_each_case_is_a_flow_of_a_generation_a_reward_and_an_update_a_step(name: str) -> None:
    graph, _, _ = trace(load_flow(f"{CASES / 'cases.py'}:{name}"), {}, seed=0)
    assert {"policy.generate", "policy.update"} <= {call.name for call in graph.calls if call.step == 0}
    assert any(call.name.endswith("brevity.score") for call in graph.calls)
    assert f"docs/cases/cases.py:{name}" in (CASES.parent / "guide" / "schedule.md").read_text()


def test_the_clusters_of_the_cases_differ_in_how_many_samples_are_judged_at_a_time() -> None:
    one, other = (load_cluster(CASES / f"{name}.yaml") for name in ("split", "split-judging-8"))
    assert (one.functions.concurrency, other.functions.concurrency) == (1, 8)
    assert one.rollout == other.rollout
