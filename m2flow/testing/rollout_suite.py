"""Check that a rollout engine conforms: functions to run against any engine.

    @pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__)
    def test_my_engine(check):
        check(lambda settings: MyEngine(model, settings))

A check takes a factory and makes as many engines as it needs. The model should have a context of at least 48 tokens, know the characters
`0123456789=`, and not yet be sure of anything (random weights are not). Checks of capabilities that an engine does not declare pass at
once. Engines that pace themselves get samples of hundreds of tokens, so that these still run when something happens to them: the model's
context must have room for them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from m2flow.engines.contract import EngineSettings, Generated, Request, RolloutEngine
from m2flow.errors import EngineError, PromptTooLong
from m2flow.recipe import Sampling
from m2flow.samples import Finish, SampleId, packed_masks, unpacked_masks

# ruff: noqa: PT017, PT018


Factory = Callable[[EngineSettings], RolloutEngine]

LOGPROB_TOLERANCE = 1e-4
PROMPTS = ("31=", "90210=", "5=", "31=")
GREEDY = Sampling(12, temperature=0.0, min_new_tokens=12)
SAMPLED = Sampling(12, min_new_tokens=6)


def assert_same_samples(expected: dict[int, Generated], got: dict[int, Generated], *, is_bitwise: bool = False) -> None:
    """Assert that samples are the same: bitwise, or as far as sums in another order allow.

    Then log-probabilities agree to 1e-4 up to the first token that differs, and at most one sample in sixteen has such a token
    (its random number fell on the edge between two)."""
    assert sorted(expected) == sorted(got)
    num_different = 0
    for i, a in expected.items():
        b = got[i]
        np.testing.assert_array_equal(a.prompt_tokens, b.prompt_tokens)
        if is_bitwise:
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.logprobs.view(np.int32), b.logprobs.view(np.int32))
            assert a.finish is b.finish and a.text == b.text
            continue
        length = min(len(a.tokens), len(b.tokens))
        unequal = np.flatnonzero(a.tokens[:length] != b.tokens[:length])
        same = int(unequal[0]) if len(unequal) else length
        num_different += same < max(len(a.tokens), len(b.tokens))
        np.testing.assert_allclose(a.logprobs[:same], b.logprobs[:same], atol=LOGPROB_TOLERANCE)
    assert num_different * 16 <= len(expected), f"{num_different} of {len(expected)} samples differ"


def repeatable(engine: RolloutEngine) -> Sampling:
    """Return sampling parameters that give the same samples when they are requested again.

    They are greedy where the engine's random numbers are not keyed by sample and position.
    """
    return SAMPLED if engine.capabilities.keyed_seeds else GREEDY


@contextlib.contextmanager
def started(factory: Factory, settings: EngineSettings | None = None) -> Iterator[RolloutEngine]:
    engine = factory(settings or EngineSettings())
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        engine.stop()


@contextlib.contextmanager
def raises(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def make_request(prompt: int, index: int, sampling: Sampling) -> Request:
    who = SampleId(0, prompt, index).pack()
    return Request(who, PROMPTS[prompt % len(PROMPTS)], (who * 0x9E3779B97F4A7C15 + 1) % 2**64, sampling)


def group_requests(sampling: Sampling, num_per_prompt: int = 1) -> list[Request]:
    return [make_request(prompt, index, sampling) for prompt in range(len(PROMPTS)) for index in range(num_per_prompt)]


def continued(request: Request, sample: Generated, num_tokens: int) -> Request:
    return Request(
        request.id,
        request.prompt,
        request.seed,
        request.sampling,
        tuple(sample.tokens[:num_tokens].tolist()),
        tuple(sample.logprobs[:num_tokens].tolist()),
        tuple(sample.versions[:num_tokens].tolist()),
        tuple(sample.kv_stale[:num_tokens].tolist()),
        prefix_masks=_first_masks(sample, num_tokens),
    )


def _first_masks(sample: Generated, num_tokens: int) -> tuple[int, ...]:
    if sample.sampling_mask is None:
        return ()
    return tuple(packed_masks(unpacked_masks(sample.sampling_mask, len(sample.tokens))[:num_tokens]).tolist())


def drain(engine: RolloutEngine) -> dict[int, Generated]:
    done = {}
    while engine.num_unfinished:
        done.update({sample.id: sample for sample in engine.step()})
    return done


def stepped(engine: RolloutEngine, num: int) -> dict[int, Generated]:
    """What leaves in so many steps; of an engine with a pace of its own that may be anything."""
    return {sample.id: sample for _ in range(num) for sample in engine.step()}


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> dict[int, Generated]:
    engine.add(requests)
    return drain(engine)


def each_alone(factory: Factory, requests: Sequence[Request], settings: EngineSettings | None = None) -> dict[int, Generated]:
    done = {}
    with started(factory, settings) as engine:
        for request in requests:
            done.update(generate(engine, [request]))
    return done


# ruff: noqa: PT018


def check_abort_returns_the_tokens_so_far(factory: Factory) -> None:
    requests = group_requests(GREEDY, num_per_prompt=2)
    with started(factory) as engine:
        if engine.capabilities.self_paced:
            return
        whole = generate(engine, requests)
        engine.add(requests)
        for _ in range(5):
            assert engine.step() == []
        gone = engine.abort([requests[1].id, requests[4].id, SampleId(9, 9, 9).pack()])
        assert sorted(sample.id for sample in gone) == sorted([requests[1].id, requests[4].id])
        for sample in gone:
            assert sample.finish is Finish.ABORT
            assert len(sample.tokens) == 5
            np.testing.assert_array_equal(sample.tokens, whole[sample.id].tokens[:5])
        rest = drain(engine)
        assert engine.abort([requests[1].id]) == []
    assert_same_samples({i: sample for i, sample in whole.items() if i in rest}, rest)
    assert len(rest) == len(requests) - 2


def check_a_snapshot_is_what_an_abort_would_give_and_disturbs_nothing(factory: Factory) -> None:
    """Also of a request that has not begun, of one that goes on from a prefix, and in the middle of being read again."""
    for settings in (EngineSettings(max_running=4), EngineSettings(deterministic=True)):
        requests = group_requests(SAMPLED, num_per_prompt=2)
        with started(factory, settings) as engine:
            can = engine.capabilities
            if can.self_paced or (settings.deterministic and not can.deterministic):
                continue
            whole = generate(engine, requests)
        goes_on = [continued(requests[0], whole[requests[0].id], 4), *requests[1:]]
        with started(factory, settings) as engine:
            undisturbed = generate(engine, goes_on)
        with started(factory, settings) as engine:
            assert engine.snapshot([requests[0].id]) == []
            engine.add(goes_on)
            done: dict[int, Generated] = {}
            while engine.num_unfinished:
                progress = engine.progress()
                seen = {sample.id: sample for sample in engine.snapshot([*progress, SampleId(9, 9, 9).pack()])}
                assert {packed: len(sample.tokens) for packed, sample in seen.items()} == dict(progress)
                assert all(sample.finish is Finish.ABORT for sample in seen.values())
                for packed, sample in seen.items():
                    length = len(sample.tokens)
                    assert len(sample.logprobs) == len(sample.versions) == len(sample.kv_stale) == length
                    np.testing.assert_array_equal(sample.tokens, undisturbed[packed].tokens[:length])
                    np.testing.assert_array_equal(sample.logprobs, undisturbed[packed].logprobs[:length])
                done |= {sample.id: sample for sample in engine.step()}
        assert_same_samples(undisturbed, done, is_bitwise=True)


def check_what_goes_on_from_a_snapshot_is_the_same_sample(factory: Factory) -> None:
    """Another engine continues from a snapshot of the first; bit by bit where results are a function of identity."""
    for settings in (EngineSettings(), EngineSettings(deterministic=True)):
        requests = group_requests(SAMPLED, num_per_prompt=3)
        with started(factory, settings) as engine:
            can = engine.capabilities
            if can.self_paced or (settings.deterministic and not can.deterministic):
                continue
            engine.add(requests)
            early = stepped(engine, 3)
            seen = {sample.id: sample for sample in engine.snapshot([request.id for request in requests])}
            whole = early | drain(engine)
        with started(factory, settings) as other:
            left = [request for request in requests if request.id in seen]
            done = early | generate(other, [continued(request, seen[request.id], len(seen[request.id].tokens)) for request in left[::-1]])
        assert seen
        assert_same_samples(whole, done, is_bitwise=settings.deterministic)


def check_a_queued_request_can_be_aborted(factory: Factory) -> None:
    with started(factory) as engine:
        if engine.capabilities.self_paced:
            return
        request = make_request(0, 0, GREEDY)
        engine.add([request])
        (gone,) = engine.abort([request.id])
        assert gone.finish is Finish.ABORT and len(gone.tokens) == 0
        assert engine.num_unfinished == 0 and engine.step() == []


def check_a_prefix_continues_as_if_it_had_not_stopped(factory: Factory) -> None:
    with started(factory) as engine:
        requests = group_requests(repeatable(engine), num_per_prompt=2)
        whole = generate(engine, requests)
    with started(factory) as engine:
        done = generate(engine, [continued(request, whole[request.id], 4) for request in requests])
    assert_same_samples(whole, done)


def check_a_finished_prefix_comes_back_as_it_is(factory: Factory) -> None:
    requests = group_requests(SAMPLED)
    with started(factory) as engine:
        whole = generate(engine, requests)
        done = generate(engine, [continued(request, whole[request.id], len(whole[request.id].tokens)) for request in requests])
    assert_same_samples(whole, done, is_bitwise=True)


def check_weights_travel_and_stamp_their_version(factory: Factory) -> None:
    requests = group_requests(GREEDY)
    with started(factory) as first, started(factory) as second:
        before = generate(first, requests)
        first.load_weights([(name, tensor * 2) for name, tensor in first.weights()], 7)
        assert first.version == 7 and second.version == 0
        after = generate(first, requests)
        assert all((sample.versions == 7).all() for sample in after.values())
        assert any(not np.array_equal(after[i].logprobs, before[i].logprobs) for i in before)
        second.load_weights(_in_one_buffer(first.weights()), 7)
        # Which requests share a pass of an engine that paces itself depends on time.
        assert_same_samples(after, generate(second, requests), is_bitwise=not first.capabilities.self_paced)


def check_weights_that_come_while_it_is_away_are_those_it_computes_with(factory: Factory) -> None:
    requests = group_requests(GREEDY)
    with started(factory) as engine:
        changed = [(name, tensor * 2) for name, tensor in engine.weights()]
        before = generate(engine, requests)
        engine.offload()
        engine.load_weights(changed, 1)
        engine.onload()
        after = generate(engine, requests)
    with started(factory) as engine:
        engine.load_weights(changed, 1)
        assert_same_samples(generate(engine, requests), after)
    assert all((sample.versions == 1).all() for sample in after.values())
    assert any(not np.array_equal(after[i].logprobs, before[i].logprobs) for i in before)


def _in_one_buffer(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield tensors in one reused buffer, as weight sync does: each is overwritten when the next is taken."""
    for name, tensor in tensors:
        passing = tensor * 1
        yield name, passing
        passing[...] = 0


def check_a_resumed_sample_has_the_versions_that_made_it(factory: Factory) -> None:
    request = make_request(0, 0, GREEDY)
    with started(factory) as engine:
        if engine.capabilities.self_paced:
            return
        engine.add([request])
        for _ in range(4):
            engine.step()
        (gone,) = engine.abort([request.id])
        engine.load_weights([(name, tensor * 2) for name, tensor in engine.weights()], 1)
        done = generate(engine, [continued(request, gone, 4)])[request.id]
    assert done.versions.tolist() == [0] * 4 + [1] * 8
    np.testing.assert_array_equal(done.tokens[:4], gone.tokens)
    np.testing.assert_array_equal(done.logprobs[:4], gone.logprobs)


def check_what_goes_on_with_new_weights_reads_its_prefix_by_them(factory: Factory) -> None:
    """A sample that is stopped and resumed after a weight sync equals that of an engine which only ever had the new weights."""
    settings = EngineSettings(deterministic=True)
    requests = group_requests(SAMPLED, num_per_prompt=3)
    with started(factory, settings) as engine:
        if not engine.capabilities.deterministic:
            return
        changed = [(name, tensor * 2) for name, tensor in engine.weights()]
        engine.add(requests)
        for _ in range(5):
            assert engine.step() == []
        stopped = {sample.id: sample for sample in engine.abort([request.id for request in requests])}
        engine.load_weights(changed, 1)
        goes_on = [continued(request, stopped[request.id], 5) for request in requests]
        done = generate(engine, goes_on)
    with started(factory, settings) as engine:
        engine.load_weights(changed, 1)
        assert_same_samples(generate(engine, goes_on[::-1]), done, is_bitwise=True)
    for request in requests:
        before, after = stopped[request.id], done[request.id]
        assert len(after.tokens) > 5
        assert after.versions.tolist() == [0] * 5 + [1] * (len(after.tokens) - 5)
        assert not after.kv_stale.any()
        np.testing.assert_array_equal(after.logprobs[:5], before.logprobs)


def check_what_a_prefix_was_made_with_is_remembered(factory: Factory) -> None:
    request = make_request(0, 0, GREEDY)
    with started(factory) as engine:
        whole = generate(engine, [request])[request.id]
        stale = (False, True, True)
        done = generate(engine, [replace(continued(request, whole, 3), prefix_kv_stale=stale)])[request.id]
    assert done.kv_stale.tolist() == [*stale, *[False] * (len(done.tokens) - 3)]


def check_what_tokens_were_drawn_from_is_recorded(factory: Factory) -> None:
    sampling = Sampling(12, top_k=3, top_p=0.9, sampling_mask=True)
    requests = group_requests(sampling, num_per_prompt=2)
    with started(factory) as engine:
        if "sampling_mask" in engine.capabilities.refused_sampling:
            return
        assert all(sample.sampling_mask is None for sample in generate(engine, group_requests(SAMPLED)).values())
        whole = generate(engine, requests)
        cut = [continued(request, whole[request.id], min(5, len(whole[request.id].tokens) - 1)) for request in requests]
        again = generate(engine, cut)
        engine.add(requests)
        for _ in range(0 if engine.capabilities.self_paced else 4):
            engine.step()
        stopped = {sample.id: sample for sample in engine.abort([request.id for request in requests])}
        after = generate(engine, [continued(one, stopped[one.id], len(stopped[one.id].tokens)) for one in requests if one.id in stopped])
    for sample in whole.values():
        assert sample.sampling_mask is not None
        masks = unpacked_masks(sample.sampling_mask, len(sample.tokens))
        for token, logprob, mask in zip(sample.tokens.tolist(), sample.logprobs.tolist(), masks, strict=True):
            assert token in mask.tolist() and len(mask) <= 3 and logprob <= 1e-6
            assert len(mask) > 1 or abs(logprob) < 1e-6 or not engine.capabilities.keyed_seeds
    for sample in [*again.values(), *(after[one] for one in after if engine.capabilities.keyed_seeds)]:
        if engine.capabilities.keyed_seeds:
            np.testing.assert_array_equal(sample.sampling_mask, whole[sample.id].sampling_mask)


def check_progress_counts_the_tokens_of_each_request(factory: Factory) -> None:
    requests = group_requests(GREEDY, num_per_prompt=2)
    with started(factory, EngineSettings(max_running=2)) as engine:
        if engine.capabilities.self_paced:
            return
        assert engine.progress() == {}
        engine.add(requests)
        assert engine.progress() == {request.id: 0 for request in requests}
        seen: dict[int, int] = {}
        while engine.num_unfinished:
            done = {sample.id for sample in engine.step()}
            progress = engine.progress()
            assert not done & set(progress)
            assert all(seen.get(i, 0) <= count <= seen.get(i, 0) + 1 for i, count in progress.items())
            seen |= progress
        engine.add(requests[:1])
        engine.step()
        (stopped,) = engine.abort([requests[0].id])
        engine.add([continued(requests[0], stopped, len(stopped.tokens))])
        assert engine.progress() == {requests[0].id: len(stopped.tokens)}


def check_weights_that_do_not_fit_are_refused(factory: Factory) -> None:
    with started(factory) as engine:
        held = list(engine.weights())
        for wrong in (held[:-1], [*held, ("no.such.weight", held[0][1])], [(held[0][0], held[0][1][:-1]), *held[1:]]):
            with raises(EngineError):
                engine.load_weights(wrong, 1)
            assert engine.version == 0
        engine.load_weights(held, 1)
        assert generate(engine, [make_request(0, 0, GREEDY)])


def check_weights_do_not_change_under_a_running_request(factory: Factory) -> None:
    with started(factory) as engine:
        if engine.capabilities.self_paced:
            return
        engine.add([make_request(0, 0, GREEDY)])
        engine.step()
        with raises(EngineError):
            engine.load_weights(list(engine.weights()), 1)
        assert engine.version == 0
        assert len(drain(engine)) == 1


def check_weights_may_change_under_running_requests_that_allow_it(factory: Factory) -> None:
    """Running samples continue; samples not yet begun use the new weights only; nothing is prefilled again unless the engine says so."""
    requests = group_requests(GREEDY)
    with started(factory) as engine:
        if engine.capabilities.self_paced or not engine.capabilities.weights_under_requests:
            return
        whole = generate(engine, requests)
    with started(factory) as engine:
        changed = [(name, tensor * 2) for name, tensor in engine.weights()]
        engine.add(requests[:-1])
        for _ in range(4):
            engine.step()
        engine.load_weights(changed, 1, under_requests=True)
        assert engine.version == 1
        engine.add(requests[-1:])
        done = drain(engine)
        after = generate(engine, requests)
    for request in requests[:-1]:
        sample = done[request.id]
        assert sample.versions.tolist() == [0] * 4 + [1] * 8
        assert sample.kv_stale.tolist() in ([False] * 4 + [True] * 8, [False] * 12)
        np.testing.assert_array_equal(sample.tokens[:4], whole[request.id].tokens[:4])
        np.testing.assert_allclose(sample.logprobs[:4], whole[request.id].logprobs[:4], atol=LOGPROB_TOLERANCE)
    begun_after = done[requests[-1].id]
    assert (begun_after.versions == 1).all() and not begun_after.kv_stale.any()
    assert not any(sample.kv_stale.any() for sample in after.values())
    assert_same_samples({begun_after.id: begun_after}, {begun_after.id: after[begun_after.id]})


def check_weights_change_under_running_requests_only_where_that_is_declared(factory: Factory) -> None:
    """An engine that does not declare `weights_under_requests` refuses them, and its requests go on with the weights that they have."""
    with started(factory) as engine:
        if engine.capabilities.weights_under_requests:
            return
        requests = group_requests(LONG if engine.capabilities.self_paced else GREEDY)
        held = list(engine.weights())
        engine.add(requests)
        engine.step()
        with raises(EngineError):
            engine.load_weights(held, 1, under_requests=True)
        assert engine.version == 0
        done = drain(engine)
    assert len(done) == len(requests) and all((sample.versions == 0).all() for sample in done.values())


def check_what_goes_on_from_a_stale_cache_reads_it_again(factory: Factory) -> None:
    request = make_request(0, 0, GREEDY)
    with started(factory) as engine:
        can = engine.capabilities
        if can.self_paced or not can.weights_under_requests:
            return
        changed = [(name, tensor * 2) for name, tensor in engine.weights()]
        engine.add([request])
        for _ in range(3):
            engine.step()
        engine.load_weights(changed, 1, under_requests=True)
        for _ in range(2):
            engine.step()
        (stopped,) = engine.abort([request.id])
        done = generate(engine, [continued(request, stopped, 5)])[request.id]
    assert done.versions.tolist() == [0] * 3 + [1] * 9
    np.testing.assert_array_equal(done.kv_stale, [*stopped.kv_stale, *[False] * 7])
    with started(factory) as engine:
        engine.load_weights(changed, 1)
        fresh = generate(engine, [continued(request, stopped, 5)])[request.id]
    assert_same_samples({fresh.id: fresh}, {done.id: done})


def check_deterministic_samples_depend_on_when_their_weights_changed_alone(factory: Factory) -> None:
    """They do not depend on what else runs: in the group, alone, or after a change of weights during their second prefill."""
    settings = EngineSettings(deterministic=True)
    requests = group_requests(SAMPLED, num_per_prompt=3)
    with started(factory, settings) as engine:
        can = engine.capabilities
        if not (can.weights_under_requests and can.deterministic):
            return
        weights = [[(name, tensor * factor) for name, tensor in engine.weights()] for factor in (2, 3)]

    def with_changes(requests: Sequence[Request]) -> dict[int, Generated]:
        with started(factory, settings) as engine:
            engine.add(requests)
            for version, tensors in enumerate(weights, 1):
                for _ in range(2):
                    assert engine.step() == []
                engine.load_weights(tensors, version, under_requests=True)
            return drain(engine)

    together = with_changes(requests)
    assert all(sample.versions[:5].tolist() == [0, 0, 1, 1, 2] for sample in together.values())
    assert_same_samples(together, with_changes(requests[::-1]), is_bitwise=True)
    for request in requests[::2]:
        alone = with_changes([request])
        assert_same_samples({request.id: together[request.id]}, alone, is_bitwise=True)
        np.testing.assert_array_equal(together[request.id].kv_stale, alone[request.id].kv_stale)


def check_deterministic_samples_survive_abort_and_resume_bitwise(factory: Factory) -> None:
    settings = EngineSettings(deterministic=True)
    requests = group_requests(SAMPLED, num_per_prompt=3)
    with started(factory, settings) as engine:
        if not engine.capabilities.deterministic:
            return
        whole = generate(engine, requests)
        engine.add(requests)
        for _ in range(5):
            assert engine.step() == []
        moved = {sample.id: sample for sample in engine.abort([request.id for request in requests[::2]])}
        done = drain(engine)
    with started(factory, settings) as engine:
        engine.add([continued(request, moved[request.id], 5) for request in requests[::2]])
        for _ in range(2):
            done.update({sample.id: sample for sample in engine.step()})
        again = {sample.id: sample for sample in engine.abort([request.id for request in requests[::4]])}
        assert all(len(sample.tokens) >= 5 for sample in again.values())
        engine.add([continued(request, again[request.id], len(again[request.id].tokens)) for request in requests if request.id in again])
        done.update(drain(engine))
    assert_same_samples(whole, done, is_bitwise=True)


GOING_ON_CHECKS: tuple[Callable[[Factory], None], ...] = tuple(
    function for name, function in list(globals().items()) if name.startswith("check_")
)
"""Every check, in the order of this file."""


# ruff: noqa: PT018


LONG = Sampling(1000, temperature=0.0, min_new_tokens=1000)
_PATIENCE_S = 60.0


def check_what_runs_can_be_aborted_and_goes_on(factory: Factory) -> None:
    requests = [make_request(prompt, 0, LONG) for prompt in range(3)]
    with started(factory) as engine:
        if not engine.capabilities.self_paced:
            return
        for _ in in_the_middle(engine, requests, 4):
            stopped = {sample.id: sample for sample in engine.abort([request.id for request in requests])}
            assert engine.num_unfinished == 0
            assert sorted(stopped) == sorted(request.id for request in requests)
            if all(len(sample.tokens) < 1000 for sample in stopped.values()):
                break
        for sample in stopped.values():
            assert sample.finish is Finish.ABORT and len(sample.tokens) >= 4
            assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions)
        done = generate(engine, [continued(request, stopped[request.id], len(stopped[request.id].tokens)) for request in requests])
    for request in requests:
        before, after = stopped[request.id], done[request.id]
        assert len(after.tokens) == 1000 and after.finish is Finish.LENGTH
        np.testing.assert_array_equal(after.tokens[: len(before.tokens)], before.tokens)
        np.testing.assert_array_equal(after.logprobs[: len(before.logprobs)], before.logprobs)


def check_what_is_queued_can_be_aborted(factory: Factory) -> None:
    request = make_request(0, 0, LONG)
    with started(factory) as engine:
        if not engine.capabilities.self_paced:
            return
        for _ in in_the_middle(engine, [request], 0):
            (gone,) = engine.abort([request.id])
            assert gone.finish is Finish.ABORT
            if len(gone.tokens) < 1000:
                break
        assert engine.num_unfinished == 0 and engine.step() == [] and engine.abort([request.id]) == []


def check_progress_grows(factory: Factory) -> None:
    request = make_request(0, 0, LONG)
    with started(factory) as engine:
        if not engine.capabilities.self_paced:
            return
        assert engine.progress() == {}
        engine.add([request])
        assert engine.progress() == {request.id: 0}
        seen = [0]
        while engine.num_unfinished:
            engine.step()
            seen += engine.progress().values()
        assert seen == sorted(seen) and len(set(seen)) > 2


def check_weights_stay_under_what_runs(factory: Factory) -> None:
    request = make_request(0, 0, LONG)
    with started(factory) as engine:
        if not engine.capabilities.self_paced:
            return
        held = list(engine.weights())
        next(in_the_middle(engine, [request], 1))
        with raises(EngineError):
            engine.load_weights(held, 1)
        assert engine.version == 0
        assert (drain(engine)[request.id].versions == 0).all()


def check_weights_change_under_what_runs_if_it_is_allowed(factory: Factory) -> None:
    requests = [make_request(prompt, 0, LONG) for prompt in range(2)]
    with started(factory) as engine:
        if not (engine.capabilities.self_paced and engine.capabilities.weights_under_requests):
            return
        changed = [(name, tensor * 2) for name, tensor in engine.weights()]
        held = list(engine.weights())
        whole = generate(engine, requests)
        for attempt, _ in enumerate(in_the_middle(engine, requests[:1], 4)):
            engine.load_weights(changed, 2 * attempt + 1, under_requests=True)
            engine.add(requests[1:])
            done = drain(engine)
            if done[requests[0].id].versions[-1] == engine.version:
                break
            engine.load_weights(held, 2 * attempt + 2)
        after = generate(engine, requests)
        new = engine.version
    sample, begun_after = done[requests[0].id], done[requests[1].id]
    changes = np.flatnonzero(np.diff(sample.versions))
    assert len(changes) == 1 and sample.versions[0] == new - 1 and sample.versions[-1] == new
    first = int(changes[0]) + 1
    assert not sample.kv_stale[:first].any() and len(set(sample.kv_stale[first:].tolist())) == 1
    np.testing.assert_array_equal(sample.tokens[:first], whole[sample.id].tokens[:first])
    np.testing.assert_allclose(sample.logprobs[:first], whole[sample.id].logprobs[:first], atol=LOGPROB_TOLERANCE)
    assert (begun_after.versions == new).all() and not begun_after.kv_stale.any()
    same = int(np.argmin(np.append(begun_after.tokens == after[begun_after.id].tokens, False)))
    assert same > 4
    np.testing.assert_allclose(begun_after.logprobs[:same], after[begun_after.id].logprobs[:same], atol=LOGPROB_TOLERANCE)


def in_the_middle(engine: RolloutEngine, requests: Sequence[Request], num_tokens: int) -> Iterator[None]:
    """Add `requests` and run until each has `num_tokens` tokens and none has ended.

    An engine with a pace of its own goes on while its client is held up, as on a busy machine, and may be done before the client acts.
    That is no fault of the engine, so there is another attempt; the caller leaves the loop when its act came in the middle.

    Yields:
        Nothing, at each attempt, when the requests are in the middle. The engine has none of them before the next.

    Raises:
        AssertionError: an engine that generates nothing, or one that was always done before.
    """
    for _ in range(5):
        engine.add(requests)
        if run_until(engine, [request.id for request in requests], num_tokens):
            yield
        drain(engine)
    raise AssertionError("the engine was always done before its client could act")


def run_until(engine: RolloutEngine, ids: Iterable[int], num_tokens: int) -> bool:
    """Run until each of these requests has `num_tokens` tokens, or one has ended; return whether none has."""
    deadline = time.monotonic() + _PATIENCE_S
    while min(engine.progress()[i] for i in ids) < num_tokens:
        if engine.step():
            return False
        assert time.monotonic() < deadline, "the engine generates nothing"
    return True


SELF_PACED_CHECKS: tuple[Callable[[Factory], None], ...] = tuple(
    function for name, function in list(globals().items()) if name.startswith("check_")
)
"""Every check, in the order of this file."""


# ruff: noqa: PT018


def check_every_request_comes_back_whole(factory: Factory) -> None:
    requests = group_requests(SAMPLED, num_per_prompt=3)
    with started(factory) as engine:
        done = generate(engine, requests)
    assert sorted(done) == sorted(request.id for request in requests)
    for sample in done.values():
        assert 6 <= len(sample.tokens) <= 12
        assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions) == len(sample.kv_stale)
        assert sample.finish in (Finish.STOP, Finish.LENGTH)
        assert sample.finish is Finish.STOP or len(sample.tokens) == 12
        assert np.isfinite(sample.logprobs).all() and (sample.logprobs <= 0).all()
        assert (sample.versions == 0).all() and not sample.kv_stale.any()
        assert isinstance(sample.text, str) and len(sample.prompt_tokens) > 0


def check_a_step_with_nothing_to_do_returns_nothing(factory: Factory) -> None:
    with started(factory) as engine:
        assert engine.step() == []
        generate(engine, group_requests(SAMPLED))
        assert engine.step() == []
        assert engine.num_unfinished == 0


def check_short_requests_leave_before_long_ones(factory: Factory) -> None:
    with started(factory) as engine:
        if engine.capabilities.self_paced:
            return
        short, long = Sampling(2, min_new_tokens=2), Sampling(12, min_new_tokens=12)
        engine.add([make_request(0, 0, long), make_request(1, 0, short), make_request(2, 0, long)])
        left: list[Generated] = []
        while not left:
            left = engine.step()
        assert [sample.id for sample in left] == [SampleId(0, 1, 0).pack()]
        assert engine.num_unfinished == 2


def check_requests_may_come_between_any_two_steps(factory: Factory) -> None:
    requests = group_requests(SAMPLED, num_per_prompt=2)
    alone = each_alone(factory, requests)
    with started(factory) as engine:
        done = {}
        for request in requests:
            engine.add([request])
            done.update({sample.id: sample for sample in engine.step()})
        done.update(drain(engine))
    assert_same_samples(alone, done)


def check_more_requests_than_may_run_all_finish(factory: Factory) -> None:
    requests = group_requests(SAMPLED, num_per_prompt=4)
    with started(factory, EngineSettings(max_running=3)) as engine:
        few = generate(engine, requests)
    with started(factory) as engine:
        assert_same_samples(few, generate(engine, requests))


def check_a_sample_does_not_depend_on_its_company(factory: Factory) -> None:
    requests = group_requests(SAMPLED, num_per_prompt=3)
    alone = each_alone(factory, requests)
    with started(factory) as engine:
        if not engine.capabilities.keyed_seeds:
            return
        assert_same_samples(alone, generate(engine, requests))
        assert_same_samples(alone, generate(engine, requests[::-1]))


def check_different_seeds_give_different_samples(factory: Factory) -> None:
    with started(factory) as engine:
        done = generate(engine, [make_request(0, index, Sampling(12, min_new_tokens=12)) for index in range(8)])
    assert len({sample.tokens.tobytes() for sample in done.values()}) == 8


def check_greedy_ignores_the_seed(factory: Factory) -> None:
    with started(factory) as engine:
        done = generate(engine, [make_request(0, index, GREEDY) for index in range(4)])
    assert len({sample.tokens.tobytes() for sample in done.values()}) == 1


def check_offload_keeps_what_was_asked(factory: Factory) -> None:
    _check_that_what_was_asked_is_kept(factory, lambda engine: engine.offload())


def check_a_sample_that_is_whole_when_its_engine_makes_room_is_not_gone_on_with(factory: Factory) -> None:
    """A server continues by itself, and returns the sample at the next step."""
    _check_that_what_was_asked_is_kept(factory, lambda engine: engine.offload(), after_s=1.0)


def check_an_engine_that_rests_keeps_what_was_asked(factory: Factory) -> None:
    _check_that_what_was_asked_is_kept(factory, lambda engine: engine.rest())


def _check_that_what_was_asked_is_kept(factory: Factory, make_room: Callable[[RolloutEngine], None], *, after_s: float = 0.0) -> None:
    requests = group_requests(GREEDY, num_per_prompt=2)
    with started(factory) as engine:
        whole = generate(engine, requests)
        engine.add(requests)
        done = stepped(engine, 1)
        time.sleep(after_s)
        make_room(engine)
        assert engine.num_unfinished == len(requests) - len(done)
        engine.onload()
        assert_same_samples(whole, done | drain(engine))


def check_what_runs_goes_on_when_the_cache_is_condensed(factory: Factory) -> None:
    with started(factory) as engine:
        requests = group_requests(repeatable(engine), num_per_prompt=2)
        whole = generate(engine, requests)
        engine.add(requests)
        early = stepped(engine, 2)
        before = engine.memory().kv
        engine.shrink_kv_cache()
        assert engine.memory().kv <= before
        assert_same_samples(whole, early | drain(engine))


def check_a_prompt_that_does_not_fit_queues_nothing(factory: Factory) -> None:
    with started(factory) as engine:
        with raises(PromptTooLong):
            engine.add([make_request(0, 0, SAMPLED), replace(make_request(1, 0, SAMPLED), prompt="31=" * 10**4)])
        assert engine.num_unfinished == 0


def check_a_sample_can_be_asked_for_once_at_a_time(factory: Factory) -> None:
    request = make_request(0, 0, SAMPLED)
    with started(factory) as engine:
        engine.add([request])
        with raises(EngineError):
            engine.add([request])
        assert engine.num_unfinished == 1


def check_stop_tokens_end_a_sample_but_not_before_its_minimum(factory: Factory) -> None:
    with started(factory) as engine:
        # As in the checked ones but for their stops: with a minimum the end token can't be drawn, so that other tokens would be.
        free = generate(engine, [make_request(0, index, Sampling(12)) for index in range(16)])
        stop = _token_inside(free)
        done = generate(engine, [make_request(0, index, Sampling(12, stop_token_ids=(stop,))) for index in range(16)])
        for sample in done.values():
            assert stop not in sample.tokens[:-1]
            assert sample.finish is Finish.STOP or (len(sample.tokens) == 12 and sample.tokens[-1] != stop)
        if engine.capabilities.keyed_seeds:
            assert_same_samples({i: _stopped_at(sample, stop) for i, sample in free.items()}, done)
        late = generate(engine, [make_request(0, index, Sampling(12, min_new_tokens=8, stop_token_ids=(stop,))) for index in range(16)])
        assert all(stop not in sample.tokens[:8] and len(sample.tokens) >= 8 for sample in late.values())


def check_a_stop_text_ends_a_sample_with_the_token_that_completes_it(factory: Factory) -> None:
    """Also where the sample is stopped within the text and resumed, since the check is a function of its own tokens."""
    with started(factory) as engine:
        sampling = replace(repeatable(engine), min_new_tokens=0, ignore_eos=True)
        free = generate(engine, [make_request(0, index, sampling) for index in range(8)])
        whole = next(sample for sample in free.values() if len(sample.text) > 4)
        stop = whole.text[2:4]
        texts = {i: sample.text for i, sample in free.items()}
        requests = [make_request(0, index, replace(sampling, stop=(stop, "no such text"))) for index in range(8)]
        done = generate(engine, requests)
        assert any(sample.finish is Finish.STOP for sample in done.values())
        for i, sample in done.items():
            ends = stop in texts[i]
            assert sample.text == texts[i].partition(stop)[0]
            assert sample.finish is (Finish.STOP if ends else Finish.LENGTH)
            np.testing.assert_array_equal(sample.tokens, free[i].tokens[: len(sample.tokens)])
            assert ends or len(sample.tokens) == len(free[i].tokens)
        begun = [continued(request, done[request.id], max(len(done[request.id].tokens) - 1, 0)) for request in requests]
        assert_same_samples(done, generate(engine, begun))
        included = generate(engine, [replace(one, sampling=replace(one.sampling, include_stop=True)) for one in requests])
        for i, sample in included.items():
            assert sample.text == texts[i].partition(stop)[0] + stop * (stop in texts[i])


def _token_inside(samples: dict[int, Generated]) -> int:
    """Return the fourth token of a sample that continues after it; of shorter ones the last but one."""
    longest = max(samples.values(), key=lambda sample: len(sample.tokens))
    assert len(longest.tokens) > 1, "every sample ends at once; the model is sure of its end token"
    return int(longest.tokens[min(3, len(longest.tokens) - 2)])


def _stopped_at(sample: Generated, stop: int) -> Generated:
    """Cut a sample after its first stop token."""
    found = np.flatnonzero(sample.tokens == stop)
    length = int(found[0]) + 1 if len(found) else len(sample.tokens)
    return replace(sample, tokens=sample.tokens[:length], logprobs=sample.logprobs[:length])


def check_deterministic_samples_are_bitwise_a_function_of_identity(factory: Factory) -> None:
    settings = EngineSettings(deterministic=True)
    requests = group_requests(SAMPLED, num_per_prompt=5)
    with started(factory, settings) as engine:
        if not engine.capabilities.deterministic:
            return
        together = generate(engine, requests)
        backwards = generate(engine, requests[::-1])
    assert_same_samples(together, backwards, is_bitwise=True)
    assert_same_samples(together, each_alone(factory, requests, settings), is_bitwise=True)
    with started(factory, settings) as left, started(factory, EngineSettings(deterministic=True, threads=2)) as right:
        split = {**generate(left, requests[::2]), **generate(right, requests[1::2])}
    assert_same_samples(together, split, is_bitwise=True)
    with started(factory, settings) as engine:
        trickled = {}
        for request in requests:
            engine.add([request])
            trickled.update({sample.id: sample for sample in engine.step()})
        trickled.update(drain(engine))
    assert_same_samples(together, trickled, is_bitwise=True)


def check_its_language_is_known_before_it_starts(factory: Factory) -> None:
    """A process that plays episodes has no engine of a model that speaks in them from another one."""
    engine = factory(EngineSettings())
    text = engine.language().decode(engine.language().encode_prompt(PROMPTS[1]))
    with started(factory) as running:
        assert running.language().decode(running.language().encode_prompt(PROMPTS[1])) == text


def check_given_tokens_are_judged_without_a_trace(factory: Factory) -> None:
    sequences = [[3, 4, 5, 6, 7, 8, 9], [5, 3], [4, 4, 4, 4, 4, 4, 4, 4, 4]]
    with started(factory) as engine:
        requests = group_requests(repeatable(engine))
        if not engine.capabilities.probes:
            with raises(EngineError):
                engine.logprobs(sequences)
            return
        before = engine.logprobs(sequences)
        assert [len(row) for row in before] == [6, 1, 8]
        assert all(np.isfinite(row).all() and (row <= 0).all() for row in before)
        alone = generate(engine, requests)
        engine.add(requests)
        early = stepped(engine, 1)
        between = engine.logprobs(sequences)
        assert_same_samples(alone, early | drain(engine))
        for row, again in zip(before, between, strict=True):
            np.testing.assert_allclose(row, again, atol=LOGPROB_TOLERANCE)


def check_prompts_are_embedded_without_a_trace_and_whatever_is_beside_them(factory: Factory) -> None:
    for settings in (EngineSettings(), EngineSettings(deterministic=True)):
        with started(factory, settings) as engine:
            if settings.deterministic and not engine.capabilities.deterministic:
                continue
            requests = group_requests(repeatable(engine))
            if not engine.capabilities.embeds:
                with raises(EngineError):
                    engine.embeddings(requests)
                return
            together = engine.embeddings(requests)
            assert together.shape == (len(requests), together.shape[1]) and together.dtype == np.float32
            np.testing.assert_array_equal(together[0], together[3])  # Their prompts are the same.
            assert not np.allclose(together[0], together[1], atol=LOGPROB_TOLERANCE)
            tolerance = 0.0 if settings.deterministic else LOGPROB_TOLERANCE
            for row, request in zip(together, requests, strict=True):
                np.testing.assert_allclose(engine.embeddings([request])[0], row, rtol=0, atol=tolerance)
            alone = generate(engine, requests)
            engine.add(requests)
            early = stepped(engine, 1)
            np.testing.assert_allclose(engine.embeddings(requests), together, rtol=0, atol=tolerance)
            assert_same_samples(alone, early | drain(engine), is_bitwise=settings.deterministic)


ROLLOUT_CHECKS: tuple[Callable[[Factory], None], ...] = (
    *(function for name, function in list(globals().items()) if name.startswith("check_")),
    *GOING_ON_CHECKS,
    *SELF_PACED_CHECKS,
)
"""All checks: those of every engine, then those of samples that stop and resume, and those of engines that pace themselves."""
