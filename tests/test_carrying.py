"""`late="carry"`: what is late in one turn of a line goes on in the next, and eager, given the run's record, does the same.

Real scheduler, real workers, fake engines in exact integers; the interleaving is drawn by a seed.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Flow, Policy, Reward, Sample, flow, log, nll, steps
from m2flow.macro.handles import Metrics
from m2flow.macro.tracing import trace
from m2flow.samples import SampleId, group_key
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec
from m2flow.testing.answers import Answer
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 100000}=", "target": str(i)} for i in range(12)]
Options = dict[str, int | float]


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return round(sum(c.isdigit() for c in text) / (len(text) + 1), 6)


def observe(metrics: Metrics, look: int) -> None:
    """Look at an update: not at all, at once, or at the one before."""
    if look == 1:
        float(metrics["loss"])
    elif look == 2:
        metrics.lagged(1)


def one_line(lag: int = 1, num_steps: int = 4, batch: int = 3, n: int = 2, over: float = 1.5, look: int = 0, times: int = 1) -> None:
    policy, verifier = Policy("fake"), Reward(digit_share)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=40, oversample=over, late="carry")
        rewards = verifier.score(responses)
        for _ in range(times):
            metrics = policy.update(responses, rewards)
        log(tokens=metrics["num_tokens"], reward=rewards.mean())
        observe(metrics, look)


def everything(lag: int = 1, num_steps: int = 4, batch: int = 3, n: int = 2, over: float = 1.5, look: int = 0, times: int = 1) -> None:
    """A warm start, two roles on one line, a line with several turns in a step, options and numbers of prompts that change, mini-batches
    and epochs, evaluations, what others make of carried samples."""
    policy, other, verifier = Policy("fake"), Policy("fake", name="other"), Reward(digit_share)
    prompts, heldout, demos = Dataset(ROWS), Dataset(ROWS[:5], name="heldout"), Dataset(ROWS, name="demos", shuffle=False)
    policy.update(demos.all(), loss=nll(), minibatch_size=5)
    for step in steps(num_steps):
        asked = prompts.take(batch).filter(lambda row: "7" not in str(row.prompt)) if step % 2 else prompts.take(batch)
        for model in (policy, other):
            responses = model.generate(asked, n=n, max_new_tokens=20 + 5 * step, temperature=0.5 + step, oversample=over, late="carry")
            metrics = model.update(responses, verifier.score(responses), minibatch_size=2, epochs=2)
        for _ in range(times):
            more = policy.generate(heldout.take(3), n=2, max_new_tokens=30, oversample=1.4, late="carry")
            log(later=verifier.score(policy.generate(more, max_new_tokens=4)).mean())
        metrics = policy.update(more, verifier.score(more))
        log(exact=verifier.score(policy.generate(heldout.all(), max_new_tokens=12, staleness=0)).mean())
        observe(metrics, look)


LINE, EVERYTHING = (flow(staleness="lag")(program) for program in (one_line, everything))
sizes = st.fixed_dictionaries(
    {
        "lag": st.integers(1, 3),
        "num_steps": st.integers(1, 5),
        "batch": st.integers(1, 6),
        "n": st.integers(2, 3),
        "over": st.sampled_from([1.25, 1.5, 2.0, 4.0]),
        "look": st.integers(0, 2),
        "times": st.integers(1, 2),
    }
)
some = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
SPLIT = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2, max_running=6),
    train=TrainSpec(engine="fake", token_budget=60),
)
TIME_SHARED = SPLIT.model_copy(update={"placement": "time-shared"})
SYNCHRONOUS: Options = {"lag": 2, "num_steps": 5, "batch": 6, "look": 1}
"""The next turn begins with new weights, so that what goes on has tokens of several."""


def check(program: Flow, options: Options, answer: Answer) -> None:
    """Each sample is given once, with its whole group, of versions in the window of the call that gives it; few enough are left."""
    graph, _, _ = trace(program, options, steps=int(options["num_steps"]), assume=0.0)
    calls = {call.ordinal: call for call in graph.calls}
    assert set(answer.samples) >= set(answer.decisions)
    given_by: dict[int, set[int]] = {}
    for packed, decision in answer.decisions.items():
        drawn, giver = calls[SampleId.unpack(packed).call], calls[decision.call]
        assert (giver.role, giver.site) == (drawn.role, drawn.site)
        assert giver.ordinal >= drawn.ordinal
        _, versions = answer.samples[packed]
        used = [version for version in versions if version >= 0]
        assert sum(stretch.num_tokens for stretch in decision.stretches) == len(used)
        assert giver.reads[0].first <= min(used) <= max(used) <= giver.reads[0].version
        assert giver.reads[0].version - min(used) <= options["lag"]
        given_by.setdefault(group_key(packed), set()).add(decision.call)
    assert all(len(givers) == 1 for givers in given_by.values())
    assert len(answer.consumed) == len(set(answer.consumed))
    trained = {(call.input("samples").call, call.ordinal): call.options["epochs"] for call in graph.calls if call.method == "update"}
    expected = [
        (update, epoch, packed)
        for (made, update), epochs in trained.items()
        if calls[made].engine == "rollout"
        for epoch in range(epochs)
        for packed, decision in answer.decisions.items()
        if decision.call == made
    ]
    assert sorted(expected) == [row for row in answer.consumed if calls[row[2] >> 42].engine == "rollout"]


def num_given(answer: Answer, n: int = 2) -> list[int]:
    """Groups that each call gives."""
    return [count // n for _, count in sorted(Counter(decision.call for decision in answer.decisions.values()).items())]


@pytest.mark.parametrize("program", [LINE, EVERYTHING], ids=["one line", "everything"])
@some
@given(spec=clusters(), options=sizes, order_seed=st.integers(0, 2**30), by_identity=st.booleans())
def test_carried_samples_stay_in_their_bound_and_eager_given_the_record_is_the_same(program, spec, options, order_seed, by_identity):
    planned = run_planned(program, options, spec, order_seed=order_seed, deterministic=by_identity)
    assert planned.error == ""
    check(program, options, planned)
    assert run_eager(program, options, spec, decisions=planned.decisions) == planned
