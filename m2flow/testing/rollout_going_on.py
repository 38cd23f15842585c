"""What any rollout engine must do when a sample stops and goes on, and when weights change: part of `ROLLOUT_CHECKS`."""

# ruff: noqa: PT018
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from m2flow.engines.contract import EngineSettings, Generated, Request
from m2flow.errors import EngineError
from m2flow.samples import Finish, SampleId
from m2flow.testing.rollout_cases import (
    GREEDY,
    LOGPROB_TOLERANCE,
    SAMPLED,
    Factory,
    assert_same_samples,
    continued,
    drain,
    generate,
    group_requests,
    make_request,
    raises,
    repeatable,
    started,
)


def check_abort_returns_the_tokens_so_far(factory: Factory) -> None:
    requests = group_requests(GREEDY, num_per_prompt=2)
    with started(factory) as engine:
        if engine.capabilities.self_paced or not engine.capabilities.abort:
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
            if can.self_paced or not (can.abort and can.resume_with_prefix and (can.deterministic or not settings.deterministic)):
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
    """Another engine goes on where the first was seen last; bit by bit where results are a function of identity."""
    for settings in (EngineSettings(), EngineSettings(deterministic=True)):
        requests = group_requests(SAMPLED, num_per_prompt=3)
        with started(factory, settings) as engine:
            can = engine.capabilities
            if can.self_paced or not (can.abort and can.resume_with_prefix and (can.deterministic or not settings.deterministic)):
                continue
            engine.add(requests)
            early = {sample.id: sample for _ in range(3) for sample in engine.step()}
            seen = {sample.id: sample for sample in engine.snapshot([request.id for request in requests])}
            whole = early | drain(engine)
        with started(factory, settings) as other:
            left = [request for request in requests if request.id in seen]
            done = early | generate(other, [continued(request, seen[request.id], len(seen[request.id].tokens)) for request in left[::-1]])
        assert seen
        assert_same_samples(whole, done, is_bitwise=settings.deterministic)


def check_a_queued_request_can_be_aborted(factory: Factory) -> None:
    with started(factory) as engine:
        if engine.capabilities.self_paced or not engine.capabilities.abort:
            return
        request = make_request(0, 0, GREEDY)
        engine.add([request])
        (gone,) = engine.abort([request.id])
        assert gone.finish is Finish.ABORT and len(gone.tokens) == 0
        assert engine.num_unfinished == 0 and engine.step() == []


def check_a_prefix_continues_as_if_it_had_not_stopped(factory: Factory) -> None:
    with started(factory) as engine:
        if not engine.capabilities.resume_with_prefix:
            return
        requests = group_requests(repeatable(engine), num_per_prompt=2)
        whole = generate(engine, requests)
    with started(factory) as engine:
        done = generate(engine, [continued(request, whole[request.id], 4) for request in requests])
    assert_same_samples(whole, done)


def check_a_finished_prefix_comes_back_as_it_is(factory: Factory) -> None:
    requests = group_requests(SAMPLED)
    with started(factory) as engine:
        if not engine.capabilities.resume_with_prefix:
            return
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
        # Which requests share a pass of an engine that paces itself is a matter of time.
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
    """As they come in buckets: each is gone when the next is asked for."""
    for name, tensor in tensors:
        passing = tensor * 1
        yield name, passing
        passing[...] = 0


def check_a_resumed_sample_has_the_versions_that_made_it(factory: Factory) -> None:
    request = make_request(0, 0, GREEDY)
    with started(factory) as engine:
        if engine.capabilities.self_paced or not (engine.capabilities.abort and engine.capabilities.resume_with_prefix):
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
    """What is stopped, and goes on after a change of weights, is what an engine gives that never had other weights."""
    settings = EngineSettings(deterministic=True)
    requests = group_requests(SAMPLED, num_per_prompt=3)
    with started(factory, settings) as engine:
        can = engine.capabilities
        if not (can.abort and can.resume_with_prefix and can.deterministic):
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
        if not engine.capabilities.resume_with_prefix:
            return
        whole = generate(engine, [request])[request.id]
        stale = (False, True, True)
        done = generate(engine, [replace(continued(request, whole, 3), prefix_kv_stale=stale)])[request.id]
    assert done.kv_stale.tolist() == [*stale, *[False] * (len(done.tokens) - 3)]


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
        if engine.capabilities.resume_with_prefix:
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
    """What runs goes on; what had not begun is wholly of the new weights; nothing is read again unless the engine says so."""
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


def check_what_goes_on_from_a_stale_cache_reads_it_again(factory: Factory) -> None:
    request = make_request(0, 0, GREEDY)
    with started(factory) as engine:
        can = engine.capabilities
        if can.self_paced or not (can.weights_under_requests and can.abort and can.resume_with_prefix):
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
    """Not on what else runs while they do: in the group, alone, or after a change that came while they were read again."""
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
        if not (engine.capabilities.deterministic and engine.capabilities.abort and engine.capabilities.resume_with_prefix):
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
