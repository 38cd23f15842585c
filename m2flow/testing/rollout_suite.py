"""What any rollout engine must do: checks to run against yours.

    @pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__)
    def test_my_engine(check):
        check(lambda settings: MyEngine(model, settings))

A check gets a factory and makes as many engines as it needs. The model should have a context of at least 48 tokens, know the
characters `0123456789=`, and not yet be sure of anything (random weights do). Checks of what an engine says that it can't do pass at once.
"""

# ruff: noqa: PT018
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from m2flow.engines.contract import EngineSettings, Generated, RolloutEngine
from m2flow.errors import EngineError, PromptTooLong
from m2flow.recipe import Sampling
from m2flow.samples import Finish, SampleId
from m2flow.testing.rollout_cases import (
    GREEDY,
    LOGPROB_TOLERANCE,
    SAMPLED,
    Factory,
    assert_same_samples,
    drain,
    each_alone,
    generate,
    group_requests,
    make_request,
    raises,
    repeatable,
    started,
)
from m2flow.testing.rollout_going_on import GOING_ON_CHECKS
from m2flow.testing.rollout_self_paced import SELF_PACED_CHECKS


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
        if engine.capabilities.self_paced or not engine.capabilities.streaming:
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
    """A server goes on by itself, and says so at the next step."""
    _check_that_what_was_asked_is_kept(factory, lambda engine: engine.offload(), after_s=1.0)


def check_an_engine_that_rests_keeps_what_was_asked(factory: Factory) -> None:
    _check_that_what_was_asked_is_kept(factory, lambda engine: engine.rest())


def _check_that_what_was_asked_is_kept(factory: Factory, make_room: Callable[[RolloutEngine], None], *, after_s: float = 0.0) -> None:
    requests = group_requests(GREEDY, num_per_prompt=2)
    with started(factory) as engine:
        whole = generate(engine, requests)
        engine.add(requests)
        done = {sample.id: sample for sample in engine.step()}
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
        for _ in range(2):
            engine.step()
        before = engine.memory().kv
        engine.condense()
        assert engine.memory().kv <= before
        assert_same_samples(whole, drain(engine))


def check_a_prompt_that_does_not_fit_queues_nothing(factory: Factory) -> None:
    with started(factory) as engine:
        with raises(PromptTooLong):
            engine.add([make_request(0, 0, SAMPLED), make_request(1, 0, Sampling(10**6))])
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
        # All as the checked ones but for their stops: with a minimum, the end token could not be drawn, and others would be.
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


def _token_inside(samples: dict[int, Generated]) -> int:
    """The fourth token of a sample that goes on after it; of shorter ones the last but one."""
    longest = max(samples.values(), key=lambda sample: len(sample.tokens))
    assert len(longest.tokens) > 1, "every sample ends at once; the model is sure of its end token"
    return int(longest.tokens[min(3, len(longest.tokens) - 2)])


def _stopped_at(sample: Generated, stop: int) -> Generated:
    """The same up to its first such token."""
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
        engine.step()
        between = engine.logprobs(sequences)
        assert_same_samples(alone, drain(engine))
        for row, again in zip(before, between, strict=True):
            np.testing.assert_allclose(row, again, atol=LOGPROB_TOLERANCE)


ROLLOUT_CHECKS: tuple[Callable[[Factory], None], ...] = (
    *(function for name, function in list(globals().items()) if name.startswith("check_")),
    *GOING_ON_CHECKS,
    *SELF_PACED_CHECKS,
)
"""Every check: those of this file in their order, then those of samples that stop and go on, and those of engines that pace themselves."""
