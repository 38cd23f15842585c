"""The engines of one process: when finished samples leave, and what an abort takes along."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_clusters import generate_call, prompts
from played_episodes import begun, wanderer

from m2flow.engines.contract import EngineSettings, Generated, Occupancy
from m2flow.engines.registry import StepCheck, vocabulary_of
from m2flow.errors import EngineError
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.worker.engine_host import EngineHost
from m2flow.observe.spans import Recorder
from m2flow.recipe import Model
from m2flow.samples import Finish, make_ids
from m2flow.testing.fakes import FakeRollout


@contextlib.contextmanager
def opened(settings: EngineSettings | None = None, *, turn: str = "", **more: Any) -> Iterator[EngineHost]:
    """A host of one fake rollout engine."""
    slots, models = [EngineSlot("policy", "rollout", "fake", turn)], {"policy": Model("fake")}
    own = {"run_seed": 0, "recorder": Recorder("engine_host"), "shared_prefix": "", **more}
    engine_host = EngineHost(slots, models, {"rollout": settings or EngineSettings()}, **own)
    engine_host.open()
    try:
        yield engine_host
    finally:
        engine_host.close()


@pytest.fixture
def gathering() -> Iterator[EngineHost]:
    with opened(gather_s=math.inf) as engine_host:
        yield engine_host


def left_after(engine_host: EngineHost, num_steps: int) -> list[tuple[int, list[int]]]:
    return [(call.ordinal, rows.ids.tolist()) for _ in range(num_steps) for call, rows in engine_host.step()]


def test_samples_that_gather_leave_together_with_the_last_one(gathering: EngineHost) -> None:
    ids = make_ids(1, 20).tolist()
    gathering.generate(generate_call(1), ids, prompts(20))

    # 40 steps end every sample: the last leave in the step that ends the longest.
    assert [(call, sorted(left)) for call, left in left_after(gathering, 40)] == [(1, ids)]
    assert gathering.num_unfinished == 0


def test_an_abort_takes_along_what_has_finished_but_not_left(gathering: EngineHost) -> None:
    kept, aborted = make_ids(1, 20).tolist(), make_ids(2, 20).tolist()
    gathering.generate(generate_call(1), kept, prompts(20))
    gathering.generate(generate_call(2), aborted, prompts(20))
    assert left_after(gathering, 10) == []

    gathering.abort(2)

    assert gathering.num_unfinished == 20
    assert [(call, sorted(left)) for call, left in left_after(gathering, 40)] == [(1, kept)]


def test_episodes_that_wait_before_their_engine_are_said_to_wait_and_it_does_not_drain_before_they_have_begun() -> None:
    with opened(EngineSettings(max_running=1, options={"kv_capacity": 1})) as engine_host:
        episodes = engine_host._speaking("policy")
        starts = [begun(index, wanderer) for index in range(4)]
        episodes.begin([replace(start, request=replace(start.request, prompt="a prompt")) for start in starts])
        ((_, occupancy, _),) = engine_host.gauges()
        assert (occupancy.num_running, occupancy.num_queued) == (0, 3)
        for start in starts:
            assert len(engine_host._stopped([start.request.id])) == 1
            assert ("policy" in engine_host._draining._open) == (start is starts[-1])
            episodes.step()


def test_an_engine_that_gets_other_weights_or_gives_its_cache_back_has_no_contexts_any_more() -> None:
    with opened(EngineSettings(max_running=2, options={"kv_capacity": 10**6}), turn="rollout", takes_turns=True) as engine_host:
        queue = engine_host._speaking("policy")._queue
        kept = list(engine_host._rollout["policy"].weights())
        for lose in (engine_host.shrink_kv_cache, lambda: engine_host.load_kept("policy", 1, kept), lambda: engine_host.switch("train")):
            queue.look(lambda: Occupancy(0, kv_capacity=10**6))
            for happens in (queue.asked, queue.given, queue.answered):
                happens(1, 50)
            assert queue._cached
            lose()
            assert not queue._cached
            assert queue._num_held == 0


def _without_a_logprob(one: Generated) -> list[Generated]:
    return [replace(one, logprobs=one.logprobs[:-1])]


def _without_numbers(one: Generated) -> list[Generated]:
    return [replace(one, logprobs=np.full_like(one.logprobs, np.nan))]


def _beyond_its_bound(one: Generated) -> list[Generated]:
    arrays = {name: np.tile(getattr(one, name), 100) for name in ("tokens", "logprobs", "versions", "kv_stale")}
    return [replace(one, **arrays)]


def _outside_its_vocabulary(one: Generated) -> list[Generated]:
    return [replace(one, tokens=one.tokens - 1000)]


def _of_other_weights(one: Generated) -> list[Generated]:
    return [replace(one, versions=one.versions - 1)]


@pytest.mark.parametrize(
    ("made_of", "said"),
    [
        (_without_a_logprob, "'fake' of policy with 9 tokens, 8 logprobs, 9 versions, 9 kv_stale"),
        (_outside_its_vocabulary, "'fake' of policy with tokens of -.* to -.*, and its model has the ids 0 up"),
        (_of_other_weights, "'fake' of policy with tokens of versions -1 to -1 of the weights, and may have those of 0 to"),
        (lambda one: [replace(one, finish=Finish.ABORT)], "'fake' of policy with the finish <Finish.ABORT: 2>"),
        (lambda one: [replace(one, text=None)], "'fake' of policy with the text None, which is no str"),
        (lambda one: [replace(one, tokens=one.tokens.tolist())], "'fake' of policy with tokens that are no one-dimensional array"),
        (_without_numbers, "with log-probabilities that are not finite"),
        (_beyond_its_bound, "with 900 tokens, and max_new_tokens is 40"),
        (lambda one: [one, one], "which did not have it or had returned it before"),
        (lambda one: [replace(one, id=make_ids(9, 1).tolist()[0])], "which did not have it or had returned it before"),
        (lambda one: [], "was lost by the rollout engine 'fake' of policy: it has nothing left to do and has not returned it"),
    ],
    ids=["short", "vocabulary", "versions", "aborted", "text", "list", "nan", "long", "twice", "unknown", "lost"],
)
def test_a_sample_that_breaks_the_contract_of_rollout_engines_is_named(monkeypatch, made_of, said) -> None:
    step = FakeRollout.step
    monkeypatch.setattr(FakeRollout, "step", lambda engine: [made for one in step(engine) for made in made_of(one)])
    with opened() as engine_host:
        engine_host.generate(generate_call(1), make_ids(1, 1).tolist(), prompts(1))
        with pytest.raises(EngineError, match=rf"sample p\d+/0 .*{said}"):
            left_after(engine_host, 40)


@pytest.mark.parametrize(
    ("made_of", "said"),
    [
        (lambda one: [one, one], "which did not have it or had returned it before"),
        (lambda one: [], "was lost by the rollout engine 'fake' of policy: it has nothing left to do and has not returned it"),
        (_without_a_logprob, "'fake' of policy with .* tokens, .* logprobs"),
        (_beyond_its_bound, "tokens, and max_new_tokens is"),
    ],
    ids=["twice", "lost", "short", "long"],
)
def test_a_turn_of_an_episode_that_breaks_the_contract_of_rollout_engines_is_named(gathering, monkeypatch, made_of, said) -> None:
    step = FakeRollout.step
    monkeypatch.setattr(FakeRollout, "step", lambda engine: [made for one in step(engine) for made in made_of(one)])
    episodes = gathering._speaking("policy")
    episodes.begin([begun(0, wanderer)])
    with pytest.raises(EngineError, match=rf"sample p\d+/0 .*{said}"):
        deque((episodes.step() for _ in range(1000)), maxlen=0)


def test_a_token_beyond_the_vocabulary_that_the_models_config_names_is_no_token(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 32}}')
    engine = FakeRollout(Model("fake"), EngineSettings())
    assert vocabulary_of(engine, Model(str(tmp_path))) is None
    monkeypatch.setattr(FakeRollout, "has_own_ids", False)
    check = StepCheck(engine, "policy", vocabulary_of(engine, Model(str(tmp_path))), lambda packed: (0, 0))
    one = np.zeros(1, np.int32)
    made = Generated(make_ids(1, 1).tolist()[0], one, one + 31, np.zeros(1, np.float32), one, one > 0, Finish.STOP, "")
    check.made([made], lambda packed: 1)
    with pytest.raises(EngineError, match=r"sample p0/0 .* with tokens of 32 to 32, and its model has the ids 0 to 31"):
        check.made([replace(made, tokens=one + 32)], lambda packed: 1)
    with pytest.raises(EngineError, match=r"sample p0/0 .* with 1 tokens, and max_new_tokens is 0"):
        check.made([made], lambda packed: 0)
    with pytest.raises(EngineError, match=r"the rollout engine 'fake' of policy returned None from step\(\)"):
        check.made(None, lambda packed: 1)
    assert vocabulary_of(engine, Model("fake")) is None
