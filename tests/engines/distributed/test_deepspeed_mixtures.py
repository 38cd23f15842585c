"""DeepSpeed with sequences split over ranks (`sp`): a mixture's experts are replayed, recorded and balanced as on one rank."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mixture_routing import (
    balance_history,
    check_routing_against_embedded,
    grouped_batch,
    other_experts,
    routed_rows,
    routed_samples,
    routed_trainer,
)
from tiny_models import mixture_config, write_model

from m2flow.engines.contract import EngineSettings
from m2flow.engines.distributed.deepspeed import DeepSpeedTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.errors import EngineError
from m2flow.recipe import AdamW, Balance, Model
from m2flow.testing.mirrored import Followers, Mirrored

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"),
]
CPU = EngineSettings()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return replace(write_model(tmp_path_factory.mktemp("qwen3_moe"), mixture_config()), seed=0)


@pytest.mark.parametrize(("zero", "recomputes"), [(1, False), (3, True)])
def test_ranks_that_split_sequences_replay_and_record_as_one(zero: int, recomputes: bool, model: Model, followers: Followers) -> None:
    batch = other_experts(routed_rows(routed_samples(model.path, routed_trainer(model.path))))
    source = replace(model, routing="trainer" if recomputes else "rollout")
    settings = EngineSettings(options={"zero": zero, "sp": 2, "activation_checkpointing": recomputes})
    check_routing_against_embedded(Mirrored(DeepSpeedTrain, source, settings, followers), source, batch)


@pytest.mark.parametrize(("zero", "routing"), [(1, None), (3, "trainer")])
def test_ranks_that_split_sequences_balance_as_one(zero: int, routing: Any, model: Model, followers: Followers) -> None:
    source, batch = replace(model, balance=Balance(loss=0.5, z_loss=0.3), routing=routing), grouped_batch(5, 2)
    spread = Mirrored(DeepSpeedTrain, source, EngineSettings(options={"zero": zero, "sp": 2}), followers)
    found = [balance_history(engine, batch, optimizer=AdamW(1e-3, eps=1e-3)) for engine in (EmbeddedTrain(source, CPU), spread)]
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=2e-6, err_msg=name)


def test_balance_is_refused_by_name_where_a_loss_is_scaled(model: Model) -> None:
    with pytest.raises(EngineError, match="experts are not balanced where a loss is scaled"):
        DeepSpeedTrain(replace(model, balance=Balance(loss=0.5)), EngineSettings(options={"compute_dtype": "float16"}))
