"""`kv="keep"`: weights may change between two tokens of a sample, which keeps its cache; each token says so, and eager repeats it."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import AdamW, Dataset, Muon, Policy, Reward, Sample, flow, log, steps
from m2flow.engines.contract import Capabilities
from m2flow.errors import InternalError, PlanError
from m2flow.macro.tracing import trace
from m2flow.micro.lowering import capabilities
from m2flow.micro.lowering.passes import lower
from m2flow.micro.scheduler import weights
from m2flow.micro.worker import eager_executor
from m2flow.micro.worker.engine_host import EngineHost
from m2flow.samples import SampleId
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 100000}=", "target": str(i)} for i in range(12)]
DIGITS = Path(__file__).parents[3] / "flows" / "models" / "digits"
Kv = Literal["recompute", "keep"]


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return round(sum(c.isdigit() for c in text) / (len(text) + 1), 6)


@flow(staleness="lag")
def keeps(lag: int = 2, num_steps: int = 5, batch: int = 3, n: int = 2, kv: Kv = "keep") -> None:
    """Long and short samples, beside evaluations that must not change their weights, a refill, and what is dropped."""
    policy, verifier = Policy("fake"), Reward(digit_share)
    prompts, heldout = Dataset(ROWS), Dataset(ROWS[:4], name="heldout")
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=40, min_new_tokens=10, kv=kv)
        policy.update(responses, verifier.score(responses))
        if step % 2:
            log(exact=verifier.score(policy.generate(heldout.all(), max_new_tokens=20, min_new_tokens=8, staleness=0)).mean())
            kept = policy.generate(prompts, n=n, max_new_tokens=20, count=2, score=verifier, kv=kv)
            policy.update(kept, verifier.score(kept))
        first = policy.generate(prompts.take(4), n=n, max_new_tokens=30, oversample=2, late="drop", kv=kv)
        policy.update(first, verifier.score(first))


SPLIT = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2, max_running=6),
    train=TrainSpec(engine="fake", token_budget=60),
)
OPTIONS: dict[str, object] = {"lag": 2, "num_steps": 4}
sizes = st.fixed_dictionaries(
    {"lag": st.integers(1, 3), "num_steps": st.integers(1, 4), "batch": st.integers(1, 4), "n": st.integers(2, 3)},
    optional={"kv": st.sampled_from(["keep", "recompute"])},
)
some = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def check(options: dict[str, object], answer: Answer) -> None:
    graph, _, _ = trace(keeps, options, steps=int(str(options["num_steps"])), assume=0.0)
    calls = {call.ordinal: call for call in graph.calls}
    for packed, decision in answer.decisions.items():
        call = calls[decision.call]
        assert decision.call == SampleId.unpack(packed).call
        used = [version for version in answer.samples[packed][1] if version >= 0]
        assert [version for version_span in decision.version_spans for version in [version_span.version] * version_span.num_tokens] == used
        assert call.reads[0].first <= min(used) <= max(used) <= call.reads[0].version
        assert [version_span.is_stale for version_span in decision.version_spans] == [False] + [True] * (len(decision.version_spans) - 1)
        assert len(decision.version_spans) == 1 or call.options["kv"] == "keep"


def num_stale(answer: Answer) -> int:
    return sum(version_span.is_stale for decision in answer.decisions.values() for version_span in decision.version_spans)


@some
@given(spec=clusters(), options=sizes, order_seed=st.integers(0, 2**30), by_identity=st.booleans())
def test_weights_change_under_samples_within_the_bound_and_eager_given_the_record_is_the_same(spec, options, order_seed, by_identity):
    planned = run_planned(keeps, options, spec, order_seed=order_seed, deterministic=by_identity)
    assert planned.error == ""
    check(options, planned)
    assert run_eager(keeps, options, spec, decisions=planned.decisions) == planned


def test_weights_do_change_under_samples_where_that_is_allowed():
    allowed = [run_planned(keeps, OPTIONS, SPLIT, order_seed=order_seed) for order_seed in range(3)]
    assert all(num_stale(answer) > 5 for answer in allowed)
    assert num_stale(run_planned(keeps, OPTIONS | {"kv": "recompute"}, SPLIT)) == 0


@flow(staleness=2)
def sorts_on(num_steps: int = 3) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(digit_share)
    prompts = Dataset(ROWS, shuffle=False)
    for _ in steps(num_steps):
        asked = prompts.take(3)
        responses = policy.generate(asked, n=3, max_new_tokens=26, min_new_tokens=18, oversample=1.5, late="carry", kv="keep")
        policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3), minibatch_size=2)


def test_the_embedded_engine_keeps_caches_and_gives_the_same_bits_again():
    spec = SPLIT.model_copy(update={"rollout": RolloutSpec(max_running=8), "train": TrainSpec(token_budget=60)})
    planned = run_planned(sorts_on, {}, spec, deterministic=True)
    assert num_stale(planned)
    assert run_eager(sorts_on, {}, spec, deterministic=True, decisions=planned.decisions) == planned


def test_an_engine_that_can_not_is_never_asked_and_the_plan_says_so(monkeypatch):
    graph, models, num_steps = trace(keeps, OPTIONS, steps=2, assume=0.0)
    said = "changes nothing here"
    assert not any(said in note for note in lower(graph, models, SPLIT, num_steps=num_steps).notes)
    time_shared = SPLIT.model_copy(update={"placement": "time-shared", "rollout": RolloutSpec(engine="fake")})
    assert any(said in note for note in lower(graph, models, time_shared, num_steps=num_steps).notes)
    monkeypatch.setattr(capabilities, "rollout_capabilities", lambda *_: Capabilities("rollout"))
    assert any(said in note for note in lower(graph, models, SPLIT, num_steps=num_steps).notes)
    assert num_stale(run_planned(keeps, OPTIONS, SPLIT)) == 0


def test_the_plan_says_that_what_is_carried_gets_other_random_numbers_without_keyed_seeds(monkeypatch):
    monkeypatch.setattr(capabilities, "rollout_capabilities", lambda *_: Capabilities("rollout", keyed_seeds=False))
    graph, models, num_steps = trace(sorts_on, {}, steps=1, assume=0.0)
    notes = lower(graph, models, SPLIT, num_steps=num_steps).notes
    assert any("other random numbers: fake" in note for note in notes)


def test_the_plan_knows_the_option_that_gives_an_engine_keyed_seeds() -> None:
    graph, models, num_steps = trace(sorts_on, {}, steps=1, assume=0.0)
    said = []
    for options in ({}, {"deterministic_inference": True}):
        spec = SPLIT.model_copy(update={"rollout": RolloutSpec(engine="sglang", options=options)})
        said.append(any("other random numbers: sglang" in note for note in lower(graph, models, spec, num_steps=num_steps).notes))
    assert said == [True, False]


# The property is worth something.


def the_cache_is_read_again_by_eager(patch: pytest.MonkeyPatch) -> None:
    """It stops the sample where weights changed under it."""
    patch.setattr(
        eager_executor,
        "_alone",
        lambda engine_host, take, call, one, version_spans: [_stopping(engine_host, take, call, one, version_spans)],
    )


def _stopping(engine_host: object, take: object, call: object, one: object, version_spans: object) -> object:
    plain = [version_span._replace(is_stale=False) for version_span in version_spans]
    return eager_executor.replay_generation(engine_host, take, call, [one], {one.ids[0]: plain})


def weights_change_under_what_must_not_use_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weights, "takes_under", lambda state, version, role="": True)


def a_stale_token_does_not_say_so(patch: pytest.MonkeyPatch) -> None:
    rows = EngineHost._rows

    def fresh(self: EngineHost, finished: list) -> object:
        return rows(self, [(replace(one, kv_stale=one.kv_stale & False), end) for one, end in finished])

    patch.setattr(EngineHost, "_rows", fresh)


@pytest.mark.parametrize(
    ("of_planned", "of_eager"),
    [
        (None, the_cache_is_read_again_by_eager),
        (weights_change_under_what_must_not_use_them, None),
        (a_stale_token_does_not_say_so, None),
    ],
    ids=["the cache is read again", "under what must not use them", "not said"],
)
def test_a_bug_is_found(of_planned, of_eager, monkeypatch):
    def is_red(order_seed: int) -> bool:
        try:
            with monkeypatch.context() as patch:
                if of_planned is not None:
                    of_planned(patch)
                planned = run_planned(keeps, OPTIONS, SPLIT, order_seed=order_seed)
            assert planned.error == ""
            check(OPTIONS, planned)
            with monkeypatch.context() as patch:
                if of_eager is not None:
                    of_eager(patch)
                assert run_eager(keeps, OPTIONS, SPLIT, decisions=planned.decisions) == planned
        except (AssertionError, InternalError):
            return True
        return False

    assert any(is_red(order_seed) for order_seed in range(4))


def test_biases_and_penalties_are_refused_for_an_engine_that_would_report_other_logprobs() -> None:
    @flow
    def biased() -> None:
        responses = Policy("fake").generate(Dataset(ROWS).take(2), max_new_tokens=4, logit_bias={5: 1.0}, repetition_penalty=1.2)
        log(share=Reward(digit_share).score(responses).mean())

    graph, models, _ = trace(biased, {}, steps=1)
    fake, sglang = (
        ClusterSpec(cores=2, device="cpu", rollout=RolloutSpec(engine=engine), train=TrainSpec(engine="fake"))
        for engine in ("fake", "sglang")
    )
    lower(graph, models, fake)
    with pytest.raises(PlanError, match="logit_bias, repetition_penalty, which the rollout engine 'sglang' can't honour") as caught:
        lower(graph, models, sglang)
    assert "embedded" in caught.value.now


def test_an_optimiser_that_the_train_engine_has_not_is_refused_when_the_plan_is_made() -> None:
    @flow
    def tuned() -> None:
        policy = Policy("fake", optimizer=Muon(1e-3))
        responses = policy.generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
        policy.update(responses, Reward(digit_share).score(responses))

    graph, models, _ = trace(tuned, {}, steps=1)
    fake, deepspeed = (
        ClusterSpec(cores=2, device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine=engine))
        for engine in ("fake", "deepspeed")
    )
    lower(graph, models, fake)
    with pytest.raises(PlanError, match="has the optimiser Muon, which the train engine 'deepspeed' has not") as caught:
        lower(graph, models, deepspeed)
    assert "embedded, fsdp" in caught.value.now
