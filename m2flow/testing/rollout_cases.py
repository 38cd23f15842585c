"""Requests for the checks of rollout engines, engines that are started for them, and what the same samples are."""

# ruff: noqa: PT017, PT018
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from m2flow.engines.contract import EngineSettings, Generated, Request, RolloutEngine
from m2flow.recipe import Sampling
from m2flow.samples import SampleId

Factory = Callable[[EngineSettings], RolloutEngine]

LOGPROB_TOLERANCE = 1e-4
PROMPTS = ("31=", "90210=", "5=", "31=")
GREEDY = Sampling(12, temperature=0.0, min_new_tokens=12)
SAMPLED = Sampling(12, min_new_tokens=6)


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
        np.testing.assert_allclose(a.logprobs[:same], b.logprobs[:same], atol=LOGPROB_TOLERANCE)
    assert num_different * 16 <= len(expected), f"{num_different} of {len(expected)} samples differ"


def repeatable(engine: RolloutEngine) -> Sampling:
    """What gives the same samples when it is asked for again: random numbers that are not a sample's and a position's begin anew."""
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
    )


def drain(engine: RolloutEngine) -> dict[int, Generated]:
    done = {}
    while engine.num_unfinished:
        done.update({sample.id: sample for sample in engine.step()})
    return done


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> dict[int, Generated]:
    engine.add(requests)
    return drain(engine)


def each_alone(factory: Factory, requests: Sequence[Request], settings: EngineSettings | None = None) -> dict[int, Generated]:
    done = {}
    with started(factory, settings) as engine:
        for request in requests:
            done.update(generate(engine, [request]))
    return done
