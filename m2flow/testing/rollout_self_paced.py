"""What a rollout engine that decodes by itself must do where others are driven step by step: part of `ROLLOUT_CHECKS`.

Its samples are hundreds of tokens long, so that they still run when something happens to them: the model's context must have room.
"""

# ruff: noqa: PT018
from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from m2flow.engines.contract import RolloutEngine
from m2flow.errors import EngineError
from m2flow.recipe import Sampling
from m2flow.samples import Finish
from m2flow.testing.rollout_cases import (
    LOGPROB_TOLERANCE,
    Factory,
    continued,
    drain,
    generate,
    make_request,
    raises,
    started,
)

LONG = Sampling(1000, temperature=0.0, min_new_tokens=1000)
_PATIENCE_S = 60.0


def check_what_runs_can_be_aborted_and_goes_on(factory: Factory) -> None:
    requests = [make_request(prompt, 0, LONG) for prompt in range(3)]
    with started(factory) as engine:
        if not engine.capabilities.self_paced:
            return
        engine.add(requests)
        run_until(engine, [request.id for request in requests], 4)
        stopped = {sample.id: sample for sample in engine.abort([request.id for request in requests])}
        assert engine.num_unfinished == 0
        assert sorted(stopped) == sorted(request.id for request in requests)
        for sample in stopped.values():
            assert sample.finish is Finish.ABORT and 4 <= len(sample.tokens) < 1000
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
        engine.add([request])
        (gone,) = engine.abort([request.id])
        assert gone.finish is Finish.ABORT and len(gone.tokens) < 1000
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
        engine.add([request])
        run_until(engine, [request.id], 1)
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
        whole = generate(engine, requests)
        engine.add(requests[:1])
        run_until(engine, [requests[0].id], 4)
        engine.load_weights(changed, 1, under_requests=True)
        engine.add(requests[1:])
        done = drain(engine)
        after = generate(engine, requests)
    sample, begun_after = done[requests[0].id], done[requests[1].id]
    changes = np.flatnonzero(np.diff(sample.versions))
    assert len(changes) == 1 and sample.versions[0] == 0 and sample.versions[-1] == 1
    first = int(changes[0]) + 1
    assert not sample.kv_stale[:first].any() and len(set(sample.kv_stale[first:].tolist())) == 1
    np.testing.assert_array_equal(sample.tokens[:first], whole[sample.id].tokens[:first])
    np.testing.assert_allclose(sample.logprobs[:first], whole[sample.id].logprobs[:first], atol=LOGPROB_TOLERANCE)
    assert (begun_after.versions == 1).all() and not begun_after.kv_stale.any()
    same = int(np.argmin(np.append(begun_after.tokens == after[begun_after.id].tokens, False)))
    assert same > 4
    np.testing.assert_allclose(begun_after.logprobs[:same], after[begun_after.id].logprobs[:same], atol=LOGPROB_TOLERANCE)


def run_until(engine: RolloutEngine, ids: Iterable[int], num_tokens: int) -> None:
    """Until each of these has so many tokens, and none has ended."""
    deadline = time.monotonic() + _PATIENCE_S
    while min(engine.progress()[i] for i in ids) < num_tokens:
        assert engine.step() == []
        assert time.monotonic() < deadline, "the engine generates nothing"


SELF_PACED_CHECKS: tuple[Callable[[Factory], None], ...] = tuple(
    function for name, function in list(globals().items()) if name.startswith("check_")
)
"""Every check, in the order of this file."""
