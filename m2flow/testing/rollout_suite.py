"""What any rollout engine must do: checks to run against yours.

    @pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__)
    def test_my_engine(check):
        check(lambda settings: MyEngine(model, settings))

A check gets a factory and makes as many engines as it needs. The model should have a context of at least 48 tokens, know the
characters `0123456789=`, and not yet be sure of anything (random weights do). Checks of what an engine says that it can't do pass at once.
"""

# ruff: noqa: PT017, PT018
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from m2flow.engines.contract import EngineSettings, Generated, Request, RolloutEngine
from m2flow.errors import EngineError, PromptTooLong
from m2flow.recipe import Sampling
from m2flow.samples import Finish, SampleId

Factory = Callable[[EngineSettings], RolloutEngine]

_LOGPROB_TOLERANCE = 1e-4
_PROMPTS = ("31=", "90210=", "5=", "31=")
_GREEDY = Sampling(12, temperature=0.0, min_new_tokens=12)
_SAMPLED = Sampling(12, min_new_tokens=6)


def check_every_request_comes_back_whole(factory: Factory) -> None:
    requests = _group_requests(_SAMPLED, num_per_prompt=3)
    with _started(factory) as engine:
        done = _generate(engine, requests)
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
    with _started(factory) as engine:
        assert engine.step() == []
        _generate(engine, _group_requests(_SAMPLED))
        assert engine.step() == []
        assert engine.num_unfinished == 0


def check_short_requests_leave_before_long_ones(factory: Factory) -> None:
    with _started(factory) as engine:
        if not engine.capabilities.streaming:
            return
        short, long = Sampling(2, min_new_tokens=2), Sampling(12, min_new_tokens=12)
        engine.add([_request(0, 0, long), _request(1, 0, short), _request(2, 0, long)])
        left: list[Generated] = []
        while not left:
            left = engine.step()
        assert [sample.id for sample in left] == [SampleId(0, 1, 0).pack()]
        assert engine.num_unfinished == 2


def check_requests_may_come_between_any_two_steps(factory: Factory) -> None:
    requests = _group_requests(_SAMPLED, num_per_prompt=2)
    alone = _each_alone(factory, requests)
    with _started(factory) as engine:
        done = {}
        for request in requests:
            engine.add([request])
            done.update({sample.id: sample for sample in engine.step()})
        done.update(_drain(engine))
    assert_same_samples(alone, done)


def check_more_requests_than_may_run_all_finish(factory: Factory) -> None:
    requests = _group_requests(_SAMPLED, num_per_prompt=4)
    with _started(factory, EngineSettings(max_running=3)) as engine:
        few = _generate(engine, requests)
    with _started(factory) as engine:
        assert_same_samples(few, _generate(engine, requests))


def check_a_sample_does_not_depend_on_its_company(factory: Factory) -> None:
    requests = _group_requests(_SAMPLED, num_per_prompt=3)
    alone = _each_alone(factory, requests)
    with _started(factory) as engine:
        if not engine.capabilities.keyed_seeds:
            return
        assert_same_samples(alone, _generate(engine, requests))
        assert_same_samples(alone, _generate(engine, requests[::-1]))


def check_different_seeds_give_different_samples(factory: Factory) -> None:
    with _started(factory) as engine:
        done = _generate(engine, [_request(0, index, Sampling(12, min_new_tokens=12)) for index in range(8)])
    assert len({sample.tokens.tobytes() for sample in done.values()}) == 8


def check_greedy_ignores_the_seed(factory: Factory) -> None:
    with _started(factory) as engine:
        done = _generate(engine, [_request(0, index, _GREEDY) for index in range(4)])
    assert len({sample.tokens.tobytes() for sample in done.values()}) == 1


def check_abort_returns_the_tokens_so_far(factory: Factory) -> None:
    requests = _group_requests(_GREEDY, num_per_prompt=2)
    with _started(factory) as engine:
        if not engine.capabilities.abort:
            return
        whole = _generate(engine, requests)
        engine.add(requests)
        for _ in range(5):
            assert engine.step() == []
        gone = engine.abort([requests[1].id, requests[4].id, SampleId(9, 9, 9).pack()])
        assert sorted(sample.id for sample in gone) == sorted([requests[1].id, requests[4].id])
        for sample in gone:
            assert sample.finish is Finish.ABORT
            assert len(sample.tokens) == 5
            np.testing.assert_array_equal(sample.tokens, whole[sample.id].tokens[:5])
        rest = _drain(engine)
        assert engine.abort([requests[1].id]) == []
    assert_same_samples({i: sample for i, sample in whole.items() if i in rest}, rest)
    assert len(rest) == len(requests) - 2


def check_a_queued_request_can_be_aborted(factory: Factory) -> None:
    with _started(factory) as engine:
        if not engine.capabilities.abort:
            return
        request = _request(0, 0, _GREEDY)
        engine.add([request])
        (gone,) = engine.abort([request.id])
        assert gone.finish is Finish.ABORT and len(gone.tokens) == 0
        assert engine.num_unfinished == 0 and engine.step() == []


def check_a_prefix_continues_as_if_it_had_not_stopped(factory: Factory) -> None:
    requests = _group_requests(_SAMPLED, num_per_prompt=2)
    with _started(factory) as engine:
        if not engine.capabilities.resume_with_prefix:
            return
        whole = _generate(engine, requests)
    with _started(factory) as engine:
        done = _generate(engine, [_continued(request, whole[request.id], 4) for request in requests])
    assert_same_samples(whole, done)


def check_a_finished_prefix_comes_back_as_it_is(factory: Factory) -> None:
    requests = _group_requests(_SAMPLED)
    with _started(factory) as engine:
        if not engine.capabilities.resume_with_prefix:
            return
        whole = _generate(engine, requests)
        done = _generate(engine, [_continued(request, whole[request.id], len(whole[request.id].tokens)) for request in requests])
    assert_same_samples(whole, done, is_bitwise=True)


def check_offload_keeps_what_was_asked(factory: Factory) -> None:
    requests = _group_requests(_GREEDY, num_per_prompt=2)
    with _started(factory) as engine:
        whole = _generate(engine, requests)
        engine.add(requests)
        engine.step()
        engine.offload()
        assert engine.num_unfinished == len(requests)
        engine.onload()
        assert_same_samples(whole, _drain(engine))


def check_weights_travel_and_stamp_their_version(factory: Factory) -> None:
    requests = _group_requests(_GREEDY)
    with _started(factory) as first, _started(factory) as second:
        before = _generate(first, requests)
        first.load_weights([(name, tensor * 2) for name, tensor in first.weights()], 7)
        assert first.version == 7 and second.version == 0
        after = _generate(first, requests)
        assert all((sample.versions == 7).all() for sample in after.values())
        assert any(not np.array_equal(after[i].logprobs, before[i].logprobs) for i in before)
        second.load_weights(first.weights(), 7)
        assert_same_samples(after, _generate(second, requests), is_bitwise=True)


def check_a_resumed_sample_has_the_versions_that_made_it(factory: Factory) -> None:
    request = _request(0, 0, _GREEDY)
    with _started(factory) as engine:
        if not (engine.capabilities.abort and engine.capabilities.resume_with_prefix):
            return
        engine.add([request])
        for _ in range(4):
            engine.step()
        (gone,) = engine.abort([request.id])
        engine.load_weights([(name, tensor * 2) for name, tensor in engine.weights()], 1)
        done = _generate(engine, [_continued(request, gone, 4)])[request.id]
    assert done.versions.tolist() == [0] * 4 + [1] * 8
    np.testing.assert_array_equal(done.tokens[:4], gone.tokens)
    np.testing.assert_array_equal(done.logprobs[:4], gone.logprobs)


def check_what_goes_on_with_new_weights_reads_its_prefix_by_them(factory: Factory) -> None:
    """What is stopped, and goes on after a change of weights, is what an engine gives that never had other weights."""
    settings = EngineSettings(deterministic=True)
    requests = _group_requests(_SAMPLED, num_per_prompt=3)
    with _started(factory, settings) as engine:
        can = engine.capabilities
        if not (can.abort and can.resume_with_prefix and can.deterministic):
            return
        changed = [(name, tensor * 2) for name, tensor in engine.weights()]
        engine.add(requests)
        for _ in range(5):
            assert engine.step() == []
        stopped = {sample.id: sample for sample in engine.abort([request.id for request in requests])}
        engine.load_weights(changed, 1)
        goes_on = [_continued(request, stopped[request.id], 5) for request in requests]
        done = _generate(engine, goes_on)
    with _started(factory, settings) as engine:
        engine.load_weights(changed, 1)
        assert_same_samples(_generate(engine, goes_on[::-1]), done, is_bitwise=True)
    for request in requests:
        before, after = stopped[request.id], done[request.id]
        assert len(after.tokens) > 5
        assert after.versions.tolist() == [0] * 5 + [1] * (len(after.tokens) - 5)
        assert not after.kv_stale.any()
        np.testing.assert_array_equal(after.logprobs[:5], before.logprobs)


def check_what_a_prefix_was_made_with_is_remembered(factory: Factory) -> None:
    request = _request(0, 0, _GREEDY)
    with _started(factory) as engine:
        if not engine.capabilities.resume_with_prefix:
            return
        whole = _generate(engine, [request])[request.id]
        stale = (False, True, True)
        done = _generate(engine, [replace(_continued(request, whole, 3), prefix_kv_stale=stale)])[request.id]
    assert done.kv_stale.tolist() == [*stale, *[False] * (len(done.tokens) - 3)]


def check_progress_counts_the_tokens_of_each_request(factory: Factory) -> None:
    requests = _group_requests(_GREEDY, num_per_prompt=2)
    with _started(factory, EngineSettings(max_running=2)) as engine:
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
        if engine.capabilities.resume_with_prefix:
            engine.add([_continued(requests[0], stopped, len(stopped.tokens))])
            assert engine.progress() == {requests[0].id: len(stopped.tokens)}


def check_weights_that_do_not_fit_are_refused(factory: Factory) -> None:
    with _started(factory) as engine:
        held = list(engine.weights())
        for wrong in (held[:-1], [*held, ("no.such.weight", held[0][1])], [(held[0][0], held[0][1][:-1]), *held[1:]]):
            with _raises(EngineError):
                engine.load_weights(wrong, 1)
            assert engine.version == 0
        engine.load_weights(held, 1)
        assert _generate(engine, [_request(0, 0, _GREEDY)])


def check_weights_do_not_change_under_a_running_request(factory: Factory) -> None:
    with _started(factory) as engine:
        engine.add([_request(0, 0, _GREEDY)])
        engine.step()
        with _raises(EngineError):
            engine.load_weights(list(engine.weights()), 1)
        assert engine.version == 0
        assert len(_drain(engine)) == 1


def check_weights_may_change_under_running_requests_that_allow_it(factory: Factory) -> None:
    """What runs goes on; what had not begun is wholly of the new weights; nothing is read again unless the engine says so."""
    requests = _group_requests(_GREEDY)
    with _started(factory) as engine:
        if not engine.capabilities.weights_under_requests:
            return
        whole = _generate(engine, requests)
    with _started(factory) as engine:
        changed = [(name, tensor * 2) for name, tensor in engine.weights()]
        engine.add(requests[:-1])
        for _ in range(4):
            engine.step()
        engine.load_weights(changed, 1, under_requests=True)
        assert engine.version == 1
        engine.add(requests[-1:])
        done = _drain(engine)
        after = _generate(engine, requests)
    for request in requests[:-1]:
        sample = done[request.id]
        assert sample.versions.tolist() == [0] * 4 + [1] * 8
        assert sample.kv_stale.tolist() in ([False] * 4 + [True] * 8, [False] * 12)
        np.testing.assert_array_equal(sample.tokens[:4], whole[request.id].tokens[:4])
        np.testing.assert_allclose(sample.logprobs[:4], whole[request.id].logprobs[:4], atol=_LOGPROB_TOLERANCE)
    begun_after = done[requests[-1].id]
    assert (begun_after.versions == 1).all() and not begun_after.kv_stale.any()
    assert not any(sample.kv_stale.any() for sample in after.values())
    assert_same_samples({begun_after.id: begun_after}, {begun_after.id: after[begun_after.id]})


def check_what_goes_on_from_a_stale_cache_reads_it_again(factory: Factory) -> None:
    request = _request(0, 0, _GREEDY)
    with _started(factory) as engine:
        can = engine.capabilities
        if not (can.weights_under_requests and can.abort and can.resume_with_prefix):
            return
        changed = [(name, tensor * 2) for name, tensor in engine.weights()]
        engine.add([request])
        for _ in range(3):
            engine.step()
        engine.load_weights(changed, 1, under_requests=True)
        for _ in range(2):
            engine.step()
        (stopped,) = engine.abort([request.id])
        done = _generate(engine, [_continued(request, stopped, 5)])[request.id]
    assert done.versions.tolist() == [0] * 3 + [1] * 9
    np.testing.assert_array_equal(done.kv_stale, [*stopped.kv_stale, *[False] * 7])
    with _started(factory) as engine:
        engine.load_weights(changed, 1)
        fresh = _generate(engine, [_continued(request, stopped, 5)])[request.id]
    assert_same_samples({fresh.id: fresh}, {done.id: done})


def check_deterministic_samples_depend_on_when_their_weights_changed_alone(factory: Factory) -> None:
    """Not on what else runs while they do: in the group, alone, or after a change that came while they were read again."""
    settings = EngineSettings(deterministic=True)
    requests = _group_requests(_SAMPLED, num_per_prompt=3)
    with _started(factory, settings) as engine:
        can = engine.capabilities
        if not (can.weights_under_requests and can.deterministic):
            return
        weights = [[(name, tensor * factor) for name, tensor in engine.weights()] for factor in (2, 3)]

    def generate(requests: Sequence[Request]) -> dict[int, Generated]:
        with _started(factory, settings) as engine:
            engine.add(requests)
            for version, tensors in enumerate(weights, 1):
                for _ in range(2):
                    assert engine.step() == []
                engine.load_weights(tensors, version, under_requests=True)
            return _drain(engine)

    together = generate(requests)
    assert all(sample.versions[:5].tolist() == [0, 0, 1, 1, 2] for sample in together.values())
    assert_same_samples(together, generate(requests[::-1]), is_bitwise=True)
    for request in requests[::2]:
        alone = generate([request])
        assert_same_samples({request.id: together[request.id]}, alone, is_bitwise=True)
        np.testing.assert_array_equal(together[request.id].kv_stale, alone[request.id].kv_stale)


def check_a_prompt_that_does_not_fit_queues_nothing(factory: Factory) -> None:
    with _started(factory) as engine:
        with _raises(PromptTooLong):
            engine.add([_request(0, 0, _SAMPLED), _request(1, 0, Sampling(10**6))])
        assert engine.num_unfinished == 0


def check_a_sample_can_be_asked_for_once_at_a_time(factory: Factory) -> None:
    request = _request(0, 0, _SAMPLED)
    with _started(factory) as engine:
        engine.add([request])
        with _raises(EngineError):
            engine.add([request])
        assert engine.num_unfinished == 1


def check_stop_tokens_end_a_sample_but_not_before_its_minimum(factory: Factory) -> None:
    with _started(factory) as engine:
        free = _generate(engine, [_request(0, index, Sampling(12, min_new_tokens=12)) for index in range(8)])
        stop = int(free[SampleId(0, 0, 0).pack()].tokens[3])
        done = _generate(engine, [_request(0, index, Sampling(12, stop_token_ids=(stop,))) for index in range(8)])
        stopped = done[SampleId(0, 0, 0).pack()]
        assert stopped.finish is Finish.STOP and len(stopped.tokens) <= 4
        assert all(stop not in sample.tokens[:-1] for sample in done.values())
        late = _generate(engine, [_request(0, index, Sampling(12, min_new_tokens=8, stop_token_ids=(stop,))) for index in range(8)])
        assert all(stop not in sample.tokens[:8] and len(sample.tokens) >= 8 for sample in late.values())


def check_deterministic_samples_are_bitwise_a_function_of_identity(factory: Factory) -> None:
    settings = EngineSettings(deterministic=True)
    requests = _group_requests(_SAMPLED, num_per_prompt=5)
    with _started(factory, settings) as engine:
        if not engine.capabilities.deterministic:
            return
        together = _generate(engine, requests)
        backwards = _generate(engine, requests[::-1])
    assert_same_samples(together, backwards, is_bitwise=True)
    assert_same_samples(together, _each_alone(factory, requests, settings), is_bitwise=True)
    with _started(factory, settings) as left, _started(factory, EngineSettings(deterministic=True, threads=2)) as right:
        split = {**_generate(left, requests[::2]), **_generate(right, requests[1::2])}
    assert_same_samples(together, split, is_bitwise=True)
    with _started(factory, settings) as engine:
        trickled = {}
        for request in requests:
            engine.add([request])
            trickled.update({sample.id: sample for sample in engine.step()})
        trickled.update(_drain(engine))
    assert_same_samples(together, trickled, is_bitwise=True)


def check_deterministic_samples_survive_abort_and_resume_bitwise(factory: Factory) -> None:
    settings = EngineSettings(deterministic=True)
    requests = _group_requests(_SAMPLED, num_per_prompt=3)
    with _started(factory, settings) as engine:
        if not (engine.capabilities.deterministic and engine.capabilities.abort and engine.capabilities.resume_with_prefix):
            return
        whole = _generate(engine, requests)
        engine.add(requests)
        for _ in range(5):
            assert engine.step() == []
        moved = {sample.id: sample for sample in engine.abort([request.id for request in requests[::2]])}
        done = _drain(engine)
    with _started(factory, settings) as engine:
        engine.add([_continued(request, moved[request.id], 5) for request in requests[::2]])
        for _ in range(2):
            done.update({sample.id: sample for sample in engine.step()})
        again = {sample.id: sample for sample in engine.abort([request.id for request in requests[::4]])}
        assert all(len(sample.tokens) >= 5 for sample in again.values())
        engine.add([_continued(request, again[request.id], len(again[request.id].tokens)) for request in requests if request.id in again])
        done.update(_drain(engine))
    assert_same_samples(whole, done, is_bitwise=True)


ROLLOUT_CHECKS: tuple[Callable[[Factory], None], ...] = tuple(
    function for name, function in list(globals().items()) if name.startswith("check_")
)
"""Every check, in the order of this file."""


def assert_same_samples(expected: dict[int, Generated], got: dict[int, Generated], *, is_bitwise: bool = False) -> None:
    """The same samples: bitwise, or as far as sums in another order allow.

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
        np.testing.assert_allclose(a.logprobs[:same], b.logprobs[:same], atol=_LOGPROB_TOLERANCE)
    assert num_different * 16 <= len(expected), f"{num_different} of {len(expected)} samples differ"


@contextlib.contextmanager
def _started(factory: Factory, settings: EngineSettings | None = None) -> Iterator[RolloutEngine]:
    engine = factory(settings or EngineSettings())
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        engine.stop()


@contextlib.contextmanager
def _raises(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def _request(prompt: int, index: int, sampling: Sampling) -> Request:
    who = SampleId(0, prompt, index).pack()
    return Request(who, _PROMPTS[prompt % len(_PROMPTS)], (who * 0x9E3779B97F4A7C15 + 1) % 2**64, sampling)


def _group_requests(sampling: Sampling, num_per_prompt: int = 1) -> list[Request]:
    return [_request(prompt, index, sampling) for prompt in range(len(_PROMPTS)) for index in range(num_per_prompt)]


def _continued(request: Request, sample: Generated, num_tokens: int) -> Request:
    return Request(
        request.id,
        request.prompt,
        request.seed,
        request.sampling,
        tuple(sample.tokens[:num_tokens].tolist()),
        tuple(sample.logprobs[:num_tokens].tolist()),
        tuple(sample.versions[:num_tokens].tolist()),
        tuple(sample.kv_stale[:num_tokens].tolist()),
    )


def _drain(engine: RolloutEngine) -> dict[int, Generated]:
    done = {}
    while engine.num_unfinished:
        done.update({sample.id: sample for sample in engine.step()})
    return done


def _generate(engine: RolloutEngine, requests: Sequence[Request]) -> dict[int, Generated]:
    engine.add(requests)
    return _drain(engine)


def _each_alone(factory: Factory, requests: Sequence[Request], settings: EngineSettings | None = None) -> dict[int, Generated]:
    done = {}
    with _started(factory, settings) as engine:
        for request in requests:
            done.update(_generate(engine, [request]))
    return done
