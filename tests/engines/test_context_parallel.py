"""The trainer `fsdp` with sequences split over ranks: the suites of train engines, and the embedded trainer's numbers on up to eight ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from adapted_trainers import check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer
from faulty import Fault, check_a_gradient_that_lacks_a_pass_is_not_applied, check_each_fault_is_an_error_on_all_and_all_go_on
from followed import followed
from test_expert_balance import BALANCE
from test_expert_parallel import config as mixture
from test_pipelines import STEP, check_a_loss_that_raises, check_each_goes_on_from_the_one_before, check_it_goes_on_alone, check_numbers, train
from test_pipelines import config as dense
from test_scalar_heads import random_model
from test_tensor_parallel import check_pieces
from test_train_engines import SMALL, VOCABULARY, write_model

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed import check_fsdp
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.errors import EngineError
from m2flow.recipe import SGD, Lora, Model, Optimizer
from m2flow.samples import Batch
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import ScalarHeadSuite, TrainEngineSuite, copied, distance, samples, started


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with followed(1) as found:
        yield found


@pytest.fixture(scope="module")
def three() -> Iterator[Followers]:
    with followed(3) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen2"), dense("qwen2"))


def made(name: str) -> Any:
    """A config; of `gemma2`, `gpt_oss` and `mistral` with a window that is shorter than the samples."""
    sizes: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "num_hidden_layers": 2}
    kinds: dict[str, Any] = {
        "gemma2": lambda: transformers.Gemma2Config(**sizes, head_dim=8, sliding_window=5),
        "mistral": lambda: transformers.MistralConfig(**sizes, head_dim=8, sliding_window=5),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **sizes, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
        ),
    }
    if name in kinds:
        return kinds[name]()
    return mixture(name) if name in ("qwen3_moe", "deepseek_v3") else dense(name)


def split(model: Model, followers: Followers, **options: Any) -> TrainEngine:
    return Mirrored(FsdpTrain, model, EngineSettings(options={"cp": 2, **options}), followers)


class TestSplitSequences(TrainEngineSuite):
    @pytest.fixture(autouse=True)
    def _take(self, model: Model, followers: Followers) -> None:
        self.model, self.followers = model, followers

    def make(self) -> TrainEngine:
        return split(self.model, self.followers)


@pytest.mark.slow
class TestHeadsOnSplitSequences(ScalarHeadSuite):
    @pytest.fixture(autouse=True)
    def _take(self, model: Model, followers: Followers) -> None:
        self.path, self.followers = Path(model.path), followers

    def make(self, head: str) -> TrainEngine:
        return split(random_model(self.path, head), self.followers)


@pytest.mark.slow
class TestSplitSequencesAndLayers(TrainEngineSuite):
    @pytest.fixture(autouse=True)
    def _take(self, model: Model, three: Followers) -> None:
        self.model, self.followers = model, three

    def make(self) -> TrainEngine:
        return split(self.model, self.followers, tp=2)


@pytest.mark.slow
class TestSplitSequencesOnStages(TestSplitSequencesAndLayers):
    def make(self) -> TrainEngine:
        return split(self.model, self.followers, pp=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2", {}),
        ("llama", {"share_prompts": False, "head_logits": 96, "reshard_after_forward": False}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"ep": 2}),
        ("mistral", {}),
        pytest.param("gemma2", {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"ep": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_numbers_are_those_of_the_embedded_trainer(name: str, options: dict[str, Any], followers: Followers, tmp_path: Path) -> None:
    """Also with windows, soft caps and sinks, with heads of keys that ranks do not divide, and with latent keys and values of two sizes."""
    check_numbers(write_model(tmp_path, made(name)), {"cp": 2, **options}, followers)
