"""A rollout engine that runs out of memory goes on with fewer samples at once, to the same tokens, and says how many had to wait."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cramped import Room
from tiny_models import save_config

from m2flow.engines.contract import EngineSettings, Generated, Request
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.errors import OutOfMemory
from m2flow.recipe import Model, Sampling
from m2flow.samples import Finish, make_ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(save_config("Llama", tmp_path_factory.mktemp("tiny")), "random")


def started(model: Model, *, deterministic: bool) -> EmbeddedRollout:
    engine = EmbeddedRollout(
        model, EngineSettings(deterministic=deterministic, max_running=16, options={"deterministic_rows": 4} if deterministic else {})
    )
    engine.start()
    return engine


def requests(num_groups: int) -> list[Request]:
    ids = make_ids(0, num_groups, 4).tolist()
    return [Request(packed, (3, 4, 5 + row // 4), 100 + row, Sampling(50, top_k=5)) for row, packed in enumerate(ids)]


def generated(engine: EmbeddedRollout, num_groups: int) -> list[Generated]:
    engine.add(requests(num_groups))
    done = []
    while engine.num_unfinished:
        done += engine.step()
    return sorted(done, key=lambda sample: sample.id)


@pytest.mark.parametrize("deterministic", [True, False])
def test_samples_that_do_not_fit_together_are_generated_a_few_at_a_time_to_the_same_tokens(model: Model, deterministic: bool) -> None:
    free, narrow = started(model, deterministic=deterministic), started(model, deterministic=deterministic)
    expected, num_bytes = generated(free, 4), free.memory().kv
    if deterministic:  # Its caches go with their samples.
        free.add(requests(4))
        free.step()
        num_bytes = free.memory().kv
    assert num_bytes > 0
    with Room(num_bytes * 5 // 8, lambda: narrow.memory().kv) as room:
        found = generated(narrow, 4)
    assert room.num_refused > 0
    assert narrow.occupancy().num_put_back > 0
    assert len(found) == len(expected) == 16
    assert {sample.finish for sample in found} <= {Finish.STOP, Finish.LENGTH}
    for one, other in zip(found, expected, strict=True):
        assert one.id == other.id
        np.testing.assert_array_equal(one.tokens, other.tokens)
        if deterministic:
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
        else:
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-5)
    free.stop()
    narrow.stop()


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_does_not_fit_alone_is_said(model: Model, deterministic: bool) -> None:
    engine = started(model, deterministic=deterministic)
    with Room(1000, lambda: engine.memory().kv), pytest.raises(OutOfMemory, match="out of memory with"):
        generated(engine, 2)
    engine.stop()


def test_samples_of_a_mixture_that_do_not_fit_together_are_generated_with_their_routing(tmp_path: Path) -> None:
    path = save_config("Qwen3Moe", tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    mixture = Model(path, "random", routing="rollout")
    free, narrow = started(mixture, deterministic=False), started(mixture, deterministic=False)
    generated(free, 4)
    with Room(free.memory().kv * 5 // 8, lambda: narrow.memory().kv) as room:
        found = generated(narrow, 4)
    assert room.num_refused > 0
    assert len(found) == 16
    for sample in found:
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == 3 + len(sample.tokens)
    free.stop()
    narrow.stop()
