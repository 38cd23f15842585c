"""Off-policy by an argument: with `staleness=k` a planned run may use older weights, within the bound and recorded; eager repeats it.

Real scheduler, real workers, fake engines in exact integers; the interleaving is drawn by a seed.
"""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from message_parts import lacks

from m2flow import Dataset, Flow, Policy, Reference, Reward, Sample, flow, log, nll, op, ppo_clip, steps
from m2flow.errors import RewardError
from m2flow.macro.tracing import trace
from m2flow.micro.protocol import update_semantics
from m2flow.micro.protocol.staleness import ANY_VERSION, Decision, VersionSpan
from m2flow.micro.scheduler import weights
from m2flow.micro.scheduler.dispatch import TrainDispatch
from m2flow.micro.scheduler.weights import Versions
from m2flow.micro.worker import engine_host
from m2flow.samples import SampleId
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec
from m2flow.testing import world
from m2flow.testing.programs import Answer
from m2flow.testing.random_programs import clusters
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 100000}=", "target": str(i)} for i in range(12)]


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return round(sum(c.isdigit() for c in text) / (len(text) + 1), 6)


@op(granularity="group")
def rank_in_group(samples: list[Sample]) -> list[int]:
    order = sorted(range(len(samples)), key=lambda i: (samples[i].num_tokens, i))
    return [order.index(i) for i in range(len(samples))]


def one_update(lag: int = 1, num_steps: int = 4, batch: int = 3, n: int = 2, minibatch: int = 0, epochs: int = 1) -> None:
    policy, verifier = Policy("fake"), Reward(digit_share)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=12)
        rewards = verifier.score(responses)
        metrics = policy.update(responses, rewards, minibatch_size=minibatch or None, epochs=epochs)
        log(tokens=metrics["num_tokens"], reward=rewards.mean())


def everything(lag: int = 1, num_steps: int = 4, batch: int = 3, n: int = 2, minibatch: int = 0, epochs: int = 1) -> None:
    """A warm start, a reference, exact and stale evaluations of which later calls do not wait, two policies, and `lagged`."""
    policy, other, verifier = Policy("fake"), Policy("fake", name="other"), Reward(digit_share)
    prompts, heldout, demos = Dataset(ROWS), Dataset(ROWS[:5], name="heldout"), Dataset(ROWS, name="demos", shuffle=False)
    policy.update(demos.all(), loss=nll(), minibatch_size=5)
    reference = Reference(policy)
    for step in steps(num_steps):
        asked = prompts.take(batch)
        responses = policy.generate(asked, n=n, max_new_tokens=12)
        if step % 2 == 0:
            log(exact=verifier.score(policy.generate(heldout.all(), max_new_tokens=60, min_new_tokens=20, staleness=0)).mean())
            log(stale=verifier.score(policy.generate(heldout.all(), max_new_tokens=6, temperature=0)).mean())
            theirs = other.generate(asked, n=2, max_new_tokens=9)
            other.update(theirs, verifier.score(theirs))
        rank_in_group(responses)
        metrics = policy.update(
            responses,
            verifier.score(responses),
            loss=ppo_clip(kl_coef=0.1),
            reference=reference,
            minibatch_size=minibatch or None,
            epochs=epochs,
        )
        before = metrics.lagged(max(lag, 1))
        if before is not None and before["num_tokens"] > 1e9:
            break
    verifier.score(policy.generate(heldout.all(), max_new_tokens=6))


def draws(lag: int = 1, num_steps: int = 4, batch: int = 3, n: int = 2, minibatch: int = 0, epochs: int = 1) -> None:
    """Prompts drawn until enough groups are kept, and more prompts than are needed."""
    policy, verifier = Policy("fake"), Reward(digit_share)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        kept = policy.generate(prompts, n=n, max_new_tokens=12, count=batch, score=verifier)
        policy.update(kept, verifier.score(kept))
        first = policy.generate(prompts.take(2 * batch), n=n, max_new_tokens=20, oversample=1.5, late="drop")
        policy.update(first, verifier.score(first), minibatch_size=minibatch or None, epochs=epochs)
        log(reward=verifier.score(policy.generate(first, max_new_tokens=3)).mean())


PLAIN, EVERYTHING, DRAWS = (flow(staleness="lag")(program) for program in (one_update, everything, draws))


SPLIT = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=2, max_running=4),
    train=TrainSpec(engine="fake", token_budget=60),
)
sizes = st.fixed_dictionaries(
    {
        "lag": st.integers(0, 3),
        "num_steps": st.integers(1, 5),
        "batch": st.integers(1, 4),
        "n": st.integers(2, 3),
        "minibatch": st.integers(0, 2),
        "epochs": st.integers(1, 2),
    }
)
some = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def check(program: Flow, options: dict[str, int], answer: Answer) -> None:
    """Every call's samples are there once, of a version in the call's window, and were trained on once an epoch."""
    graph, _, _ = trace(program, options, steps=options["num_steps"], assume=0.0)
    calls = {call.ordinal: call for call in graph.calls}
    generated = [call for call in graph.calls if call.method == "generate"]
    for call in generated:
        num_samples = sum(SampleId.unpack(packed).call == call.ordinal for packed in answer.samples)
        assert num_samples >= call.most_rows if call.is_gated else num_samples == call.most_rows
    for packed, (_, versions) in answer.samples.items():
        read = calls[SampleId.unpack(packed).call].reads[0]
        used = {version for version in versions if version >= 0}
        assert len(used) == 1
        assert max(read.version - options["lag"], 0) <= read.first <= used.pop() <= read.version
    assert len(answer.consumed) == len(set(answer.consumed))
    trained = [call for call in graph.calls if call.method == "update"]
    assert len(answer.consumed) == sum(call.most_rows * call.options["epochs"] for call in trained)


@pytest.mark.parametrize("program", [PLAIN, EVERYTHING, DRAWS], ids=["plain", "everything", "draws"])
@some
@given(spec=clusters(), options=sizes, order_seed=st.integers(0, 2**30), by_identity=st.booleans())
def test_stale_samples_stay_in_their_bound_and_eager_given_the_record_is_the_same(program, spec, options, order_seed, by_identity):
    planned = run_planned(program, options, spec, order_seed=order_seed, deterministic=by_identity)
    assert planned.error == ""
    check(program, options, planned)
    assert run_eager(program, options, spec, decisions=planned.decisions) == planned


@some
@given(spec=clusters(), options=sizes, order_seed=st.integers(0, 2**30))
def test_without_staleness_nothing_depends_on_time_and_nothing_is_recorded(spec, options, order_seed):
    options = options | {"lag": 0}
    planned = run_planned(EVERYTHING, options, spec, order_seed=order_seed)
    assert planned.decisions == {}
    assert planned == run_eager(EVERYTHING, options, spec)


@pytest.mark.parametrize("placement", ["split", "time-shared"])
@pytest.mark.parametrize("lag", [1, 2])
def test_the_next_steps_generate_before_an_update_is_done(lag, placement):
    """Its samples are of the weights before it: they started without it. As far back as the bound allows, in some order."""
    spec = SPLIT.model_copy(update={"placement": placement})
    behind = set()
    for order_seed in range(6):
        answer = run_planned(PLAIN, {"lag": lag}, spec, order_seed=order_seed)
        graph, _, _ = trace(PLAIN, {"lag": lag}, steps=4)
        newest = {call.ordinal: call.reads[0].version for call in graph.calls if call.method == "generate"}
        behind |= {newest[decision.call] - decision.oldest for decision in answer.decisions.values()}
    assert max(behind) == lag


def test_the_order_of_events_decides_and_eager_alone_does_not_know_it():
    options = {"lag": 2, "batch": 4, "num_steps": 5}
    answers = [run_planned(PLAIN, options, SPLIT, order_seed=order_seed) for order_seed in range(8)]
    assert len({tuple(sorted(answer.decisions.items())) for answer in answers}) > 1
    eager = run_eager(PLAIN, options, SPLIT)
    assert eager not in answers
    assert run_eager(PLAIN, options, SPLIT, decisions=eager.decisions) == eager


def test_of_an_over_sampled_generation_the_groups_that_are_whole_first_are_kept_and_none_else():
    @flow
    def drops() -> None:
        policy, verifier = Policy("fake"), Reward(digit_share)
        prompts = Dataset(ROWS)
        for _ in steps(2):
            responses = policy.generate(prompts.take(6), n=2, max_new_tokens=30, oversample=1.5, late="drop")
            policy.update(responses, verifier.score(responses))

    kept = set()
    for order_seed in range(8):
        answer = run_planned(drops, {}, SPLIT, order_seed=order_seed)
        assert len(answer.samples) == len(answer.rewards) == len(answer.consumed) == 2 * 4 * 2
        assert set(answer.decisions) == set(answer.samples)
        assert run_eager(drops, {}, SPLIT, decisions=answer.decisions) == answer
        kept.add(tuple(sorted(answer.samples)))
    assert len(kept) > 1
    alone = run_eager(drops, {}, SPLIT)
    assert run_eager(drops, {}, SPLIT, decisions=alone.decisions) == alone
    few = dict(sorted(answer.decisions.items())[:4])
    assert "has 2 groups of policy.generate, which gives 4 of 6" in run_eager(drops, {}, SPLIT, decisions=few).error


def any_version_will_do(patch: pytest.MonkeyPatch) -> None:
    """The scheduler dispatches at whatever version an engine holds."""
    patch.setattr(weights, "window", lambda call, role="": (0, call.reads[0].version))


def runs(lag: int = 1) -> list[Answer]:
    return [
        run_planned(EVERYTHING, {"lag": lag, "batch": 4, "epochs": 2, "minibatch": 2}, spec, order_seed=order_seed)
        for order_seed in range(4)
        for spec in (SPLIT, SPLIT.model_copy(update={"placement": "time-shared"}))
    ]


def test_a_sample_of_weights_beyond_the_bound_is_not_admitted(monkeypatch):
    any_version_will_do(monkeypatch)
    assert any("may use versions" in answer.error for answer in runs())


def test_a_sample_of_weights_beyond_the_bound_is_not_taken_from_its_engine(monkeypatch):
    any_version_will_do(monkeypatch)
    monkeypatch.setattr(engine_host, "check_admission", lambda call, version, role="": None)
    assert any("of the weights, and may have those of" in answer.error for answer in runs())


def any_version_is_generated(patch: pytest.MonkeyPatch) -> None:
    """Engines generate with whatever version they hold."""
    any_version_will_do(patch)
    patch.setattr(engine_host, "check_admission", lambda call, version, role="": None)
    patch.setattr(engine_host.EngineHost, "_window_of", lambda self, role, packed: (0, ANY_VERSION))


def test_a_sample_of_weights_beyond_the_bound_is_not_trained_on(monkeypatch):
    any_version_is_generated(monkeypatch)
    assert any("may train on" in answer.error for answer in runs())


def test_without_these_checks_samples_beyond_the_bound_are_trained_on(monkeypatch):
    """So the property above rests on the scheduler's window."""
    any_version_is_generated(monkeypatch)
    monkeypatch.setattr(update_semantics, "check_consumption", lambda call, samples: None)
    (program, options) = (EVERYTHING, {"lag": 1, "num_steps": 4, "batch": 4, "epochs": 2, "minibatch": 2})
    reds = 0
    for answer in runs():
        assert answer.error == ""
        try:
            check(program, options, answer)
        except AssertionError:
            reds += 1
    assert reds


def test_an_update_that_does_not_wait_for_readers_of_older_weights_leaves_them_none(monkeypatch):
    monkeypatch.setattr(world, "MAX_TURNS", 20_000)
    monkeypatch.setattr(TrainDispatch, "_may_step", lambda self, state: True)
    spec = SPLIT.model_copy(update={"placement": "time-shared"})
    options = {"lag": 3, "batch": 2, "num_steps": 8}
    answers = (run_planned(EVERYTHING, options, spec, order_seed=order_seed) for order_seed in range(8))
    assert any("nothing moves any more: policy.generate" in answer.error for answer in answers)


def test_weights_are_not_published_in_the_middle_of_an_update(monkeypatch):
    """An update of several optimiser steps passes through weights that are no version."""
    options = {"lag": 2, "num_steps": 5, "batch": 4, "minibatch": 1}
    spec = SPLIT.model_copy(update={"rollout": RolloutSpec(engine="fake", workers=3, max_running=2)})
    monkeypatch.setattr(Versions, "step_dispatched", lambda self, role: None)
    planned = (run_planned(PLAIN, options, spec, order_seed=order_seed) for order_seed in range(20))
    assert any(run_eager(PLAIN, options, spec, decisions=answer.decisions) != answer for answer in planned)


def test_a_record_of_another_run_is_refused_by_sample():
    record = run_planned(PLAIN, {"lag": 2}, SPLIT).decisions
    later = run_eager(PLAIN, {"lag": 2, "num_steps": 5}, SPLIT, decisions=record)
    assert not lacks(later.error, "SpecError: ", "sample p0/0 of policy.generate", "record of decisions has no version")
    far = {packed: Decision(decision.call, (VersionSpan(12, 0),)) for packed, decision in record.items()}
    assert "says version 0, where it may be 1 to 3" in run_eager(PLAIN, {"lag": 2}, SPLIT, decisions=far).error


def test_an_error_in_an_update_reaches_the_generation_that_could_have_done_without_it():
    @flow(staleness=2)
    def failing() -> None:
        def raises_on_some(sample: Sample) -> float:
            if "7" in str(sample.text):
                raise KeyError("seven")
            return 1.0

        policy, verifier = Policy("fake"), Reward(raises_on_some)
        prompts = Dataset(ROWS)
        for _ in steps(4):
            responses = policy.generate(prompts.take(4), n=2, max_new_tokens=12)
            policy.update(responses, verifier.score(responses))

    for order_seed in range(10):
        error = run_planned(failing, {}, SPLIT, order_seed=order_seed).error
        assert error.startswith("RewardError: ")
        assert "'seven'" in error


def test_a_generation_after_an_update_that_is_known_to_have_failed_fails_with_it_though_older_weights_would_do():
    seen = []

    @flow(staleness=1)
    def failing() -> None:
        def raises(sample: Sample) -> float:
            raise KeyError("seven")

        policy, verifier, broken, prompts = Policy("fake"), Reward(digit_share), Reward(raises, name="broken"), Dataset(ROWS)
        for _ in steps(1):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
            metrics = policy.update(responses, broken.score(responses))
            with contextlib.suppress(RewardError):
                metrics.items()
            later = verifier.score(policy.generate(prompts.take(2), n=2, max_new_tokens=3)).mean()
            try:
                float(later)
            except RewardError as error:
                seen.append(error.what)

    run_eager(failing, {}, SPLIT)
    run_planned(failing, {}, SPLIT)
    eager, planned = seen
    assert planned.startswith(eager)  # And then says on which worker.
