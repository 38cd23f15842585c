"""Calls whose rows are known only while a run is under way: filters, unions, and functions of several inputs.

The calls are recorded as the handles' algebra records them, below its surface, so that each form of `gives` and `style` is met.
"""

from collections.abc import Callable

import numpy as np
from fake_flows import ROWS, digit_share, length_penalty
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Policy, Reward, Sample, flow, log, op, steps
from m2flow.macro.graph import Granularity
from m2flow.macro.handles import Handle, Rows, Scores
from m2flow.macro.number import Number
from m2flow.macro.session import current_session
from m2flow.samples import Batch
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

few = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def record(
    function: Callable[..., object],
    kind: type[Handle],
    gives: str,
    inputs: dict[str, Handle],
    *,
    style: str = "columns",
    unit: str = "sample",
) -> Handle:
    session = current_session("a test's call")
    columns = {name: h.column for name, h in inputs.items() if isinstance(h, Rows) and h.column}
    call = session.record(
        role=function.__name__,
        method="",
        engine="function",
        granularity=Granularity(unit),
        inputs={name: handle.ref for name, handle in inputs.items()},
        options={
            "function": function,
            "timeout_s": None,
            "column": "reward" if kind is Scores else "value",
            "style": style,
            "gives": gives,
            "columns": columns,
        },
        shown={},
        is_aligned=gives != "value",
    )
    return kind(session, call)


def is_long(rows: Batch, values: dict[str, object]) -> object:
    return rows.ragged("tokens").lengths % 3 != 0


def is_odd(sample: Sample) -> bool:
    return sample.num_tokens % 2 == 1


def differ(samples: list[Sample]) -> list[bool]:
    return [len({s.num_tokens for s in samples}) > 1] * len(samples)


def nothing(rows: Batch, values: dict[str, object]) -> object:
    return np.zeros(len(rows), bool)


def centred(rows: Batch, values: dict[str, object]) -> object:
    return rows.dense("reward") - values["mean"] if len(rows) else np.zeros(0)


def weighted(rows: Batch, values: dict[str, object]) -> object:
    return rows.dense("rewards") + 0.5 * rows.dense("other")


def concat(*parts: Rows) -> Rows:
    def union() -> None: ...

    handle = record(union, Rows, "concat", {f"part_{i}": part for i, part in enumerate(parts)}, unit="batch")
    assert isinstance(handle, Rows)
    return handle


def prompts_again(rows: Batch, values: dict[str, object]) -> Batch:
    return rows.without(["target"])


@op(granularity="batch")
def count(samples: list[Sample]) -> int:
    return len(samples)


def filtered(how: str, responses: Rows) -> Rows:
    forms = {"columns": (is_long, "columns", "sample"), "samples": (is_odd, "unit", "sample"), "groups": (differ, "unit", "group")}
    function, style, unit = forms.get(how, (nothing, "columns", "sample"))
    kept = record(function, Rows, "kept", {"samples": responses}, style=style, unit=unit)
    assert isinstance(kept, Rows)
    return kept


@flow
def filtering(how: str, num_steps: int = 2, batch: int = 4, n: int = 3, minibatch: int = 0, look: bool = False) -> None:
    policy, verifier, short = Policy("fake"), Reward(digit_share), Reward(length_penalty)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=12)
        everything = verifier.score(responses)
        kept = filtered(how, responses)
        if look:
            log(seen=float(len(kept)))
        log(kept=Number(count(kept)))
        other = short.score(kept)
        rewards = record(weighted, Scores, "column", {"rewards": other, "other": everything})
        mean = rewards.mean()
        shaped = record(centred, Scores, "column", {"samples": rewards, "mean": mean.holder})
        metrics = policy.update(kept, shaped, minibatch_size=minibatch or None)
        log(sequences=metrics["num_sequences"])


@flow
def joining(how: str, num_steps: int = 2, batch: int = 4, n: int = 3, minibatch: int = 0, look: bool = False) -> None:
    """Two generations of one policy are trained on together; a second policy answers to what stays of the first one's answers."""
    policy, judge, verifier = Policy("fake"), Policy("fake", name="judge"), Reward(digit_share)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        left = policy.generate(prompts.take(batch), n=n, max_new_tokens=9)
        right = filtered(how, policy.generate(prompts.take(2), n=n, max_new_tokens=12))
        both = concat(left, right)
        if look:
            log(seen=float(len(both)))
        again = record(prompts_again, Rows, "rows", {"samples": right})
        verdicts = judge.generate(again, max_new_tokens=4)
        log(both=Number(count(both)), verdicts=verifier.score(verdicts).sum())
        policy.update(both, verifier.score(both), minibatch_size=minibatch or None)


sizes = st.fixed_dictionaries(
    {
        "how": st.sampled_from(["columns", "samples", "groups", "none"]),
        "num_steps": st.integers(1, 2),
        "batch": st.integers(1, 4),
        "n": st.integers(2, 3),
        "minibatch": st.integers(0, 2),
        "look": st.booleans(),
    }
)


@few
@given(clusters(), sizes, st.integers(0, 2**30))
def test_what_follows_a_filter_is_the_same_under_every_plan(spec, options, order_seed):
    eager = run_eager(filtering, options, spec)
    assert eager.error == ""
    assert run_planned(filtering, options, spec, order_seed=order_seed) == eager


@few
@given(clusters(), sizes, st.integers(0, 2**30))
def test_unions_and_prompts_made_of_responses_are_the_same_under_every_plan(spec, options, order_seed):
    eager = run_eager(joining, options, spec)
    assert eager.error == ""
    assert run_planned(joining, options, spec, order_seed=order_seed) == eager
