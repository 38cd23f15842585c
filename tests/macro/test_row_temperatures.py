"""`generate(temperature="column")`: each prompt has its own temperature, drawn by it and trained with it."""

from __future__ import annotations

from typing import Any

import pytest
from fake_clusters import SPLIT

from m2flow import Dataset, Policy, Reward, Sample, flow, log, steps
from m2flow.errors import TraceError
from m2flow.macro.flow import Flow
from m2flow.macro.tracing import trace
from m2flow.samples import SampleId
from m2flow.testing.world import run_eager, run_planned


def rows(*heats: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}=", "heat": heat} for i, heat in enumerate(heats)]


def as_said(sample: Sample) -> float:
    """1 where the sample's own temperature is that of its row; greedy ones count as 1."""
    return float(sample["temperature"] == (sample["heat"] or 1.0))


@flow(staleness="staleness")
def heated(num_steps: int = 2, late: str = "wait", staleness: int = 0) -> None:
    policy, verifier, prompts = Policy("fake"), Reward(as_said), Dataset(rows(0, 0.5, 1, 2.0), shuffle=False)
    options: dict[str, Any] = {"late": late, "oversample": 2.0 if late == "carry" else 1.0}
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=3, max_new_tokens=6, temperature="heat", **options)
        log(least=verifier.score(responses).min())
        policy.update(responses, responses.length)


def test_every_sample_has_the_temperature_of_its_row_planned_and_eager() -> None:
    eager = run_eager(heated, {}, SPLIT)
    assert eager.error == "", eager.error
    assert run_planned(heated, {}, SPLIT, order_seed=3) == eager
    assert [value for _, name, value in eager.logs if name == "least"] == [1.0, 1.0]
    texts: dict[tuple[int, int], set[object]] = {}
    for sample, (tokens, _) in eager.samples.items():
        who = SampleId.unpack(sample)
        texts.setdefault((who.call, who.prompt % 4), set()).add(tuple(tokens))
    assert {len(said) for (_, row), said in texts.items() if row == 0} == {1}, "greedy members of a group are alike"
    assert any(len(said) > 1 for (_, row), said in texts.items() if row)


def test_a_sample_that_is_carried_into_the_next_call_keeps_its_temperature() -> None:
    options = {"late": "carry", "staleness": 1, "num_steps": 3}
    planned = run_planned(heated, options, SPLIT, order_seed=3)
    assert planned.error == "", planned.error
    assert [value for _, name, value in planned.logs if name == "least"] == [1.0] * 3
    assert run_eager(heated, options, SPLIT, decisions=planned.decisions) == planned


def test_a_column_that_is_missing_or_holds_no_temperature_is_named() -> None:
    def generating(given: list[dict[str, Any]], column: str) -> Flow:
        return Flow(lambda: Policy("fake").generate(Dataset(given).take(1), max_new_tokens=4, temperature=column).batch())

    with pytest.raises(TraceError, match=r"from the column 'heats', which the prompts do not have\n  Did you mean 'heat'"):
        trace(generating(rows(1.0), "heats"), {})
    failed = run_eager(generating(rows("hot"), "heat"), {}, SPLIT)
    assert "takes temperatures from the column 'heat': temperature is 'hot'" in failed.error
