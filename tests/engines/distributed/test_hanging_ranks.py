"""A rank that stays somewhere ends the call of the others in the time that the trainer's option says, with its place in the error."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from followed import followed
from hanging import Call, Stay, check_a_call_is_named_that_hangs, check_who_hangs_is_named, of_hanging_calls
from tiny_models import VOCABULARY, dense_config, write_model

from m2flow.engines.contract import EngineSettings
from m2flow.engines.distributed import check_deepspeed, check_fsdp
from m2flow.engines.distributed.deepspeed import DeepSpeedTrain
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.distributed.guard import Course
from m2flow.engines.distributed.ranks import RankedTrain, ReplicatedTrain
from m2flow.engines.megatron.layout import check_before
from m2flow.errors import EngineError
from m2flow.recipe import Model
from m2flow.testing.mirrored import Followers
from m2flow.testing.train_suite import samples

NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen2"), dense_config("qwen2"))


@pytest.fixture
def followers() -> Iterator[Followers]:
    with followed(1) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "options", "stay"),
    [
        (ReplicatedTrain, {}, Stay("model.layers.1")),
        (FsdpTrain, {}, Stay("model.layers.1", "backward")),
        (FsdpTrain, {"pp": 2}, Stay("model.layers.2")),
        (FsdpTrain, {"pp": 2, "schedule": "zero-bubble"}, Stay("model.layers.2", "backward")),
        (FsdpTrain, {"tp": 2}, Stay("model.layers.0.mlp", says="model.layers.0")),
        pytest.param(DeepSpeedTrain, {"zero": 2}, Stay("model.layers.1", "backward"), marks=NEEDS_DEEPSPEED),
        pytest.param(DeepSpeedTrain, {"zero": 3}, Stay("model.layers.1"), marks=NEEDS_DEEPSPEED),
    ],
    ids=["replicas", "sharded", "stages", "without bubble", "split layers", "deepspeed", "deepspeed, sharded"],
)
def test_a_rank_that_stays_in_a_layer_ends_the_step_with_its_place(
    of: type[RankedTrain], options: dict[str, Any], stay: Stay, model: Model, followers: Followers
) -> None:
    check_who_hangs_is_named(of, stay, model, options, followers, samples(VOCABULARY))


@pytest.mark.slow
@of_hanging_calls
def test_a_rank_that_stays_in_a_call_without_passes_ends_it_with_its_place(
    call: Call, options: dict[str, Any], said: str, model: Model, followers: Followers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_a_call_is_named_that_hangs(FsdpTrain, call, said, model, options, followers, tmp_path, monkeypatch)


@pytest.mark.parametrize("given", [0, -1.0, True, "10", float("inf")])
def test_a_time_that_is_none_is_refused(given: object, model: Model) -> None:
    with pytest.raises(EngineError, match="the option collective_timeout_s of the train engine is"):
        FsdpTrain(model, EngineSettings(options={"collective_timeout_s": given}))
    for check in (check_fsdp, check_before, check_deepspeed):
        with pytest.raises(EngineError, match="collective_timeout_s of the train engine"):
            check(model, {"collective_timeout_s": given}, 2)


def test_the_place_of_a_rank_is_its_call_pass_layer_and_line_of_python() -> None:
    course, layers = Course(3), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    course.follow(layers, set(layers))
    seen = []

    def look(*_: object) -> None:
        seen.append(course.place())

    layers[1].register_forward_pre_hook(look)
    layers[0].register_forward_hook(lambda _, __, output: output.register_hook(look) and None)
    assert course.place() is None
    with course.during("accumulate"):
        layers(torch.ones(1, 2)).sum().backward()
        course.at("gradient reduction")
        look()
    assert course.place() is None
    assert [place.work for place in seen if place is not None] == [
        "accumulate, forward pass, 1",
        "accumulate, backward pass, 0",
        "accumulate, gradient reduction",
    ]
    # Asked by the thread itself, it is there.
    assert all(place is not None and place.at.startswith("place (guard.py:") and not place.waits for place in seen)
