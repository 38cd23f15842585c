"""The suite of train engines, for the trainer `megatron` in layouts of as many ranks, whose processes serve all of them.
`test_megatron_conformance.py` runs it in an interpreter with megatron-core, with the layouts in the environment: `M2FLOW_TEST_RANKS`, and
`M2FLOW_TEST_LAYOUT` as JSON, of one layout or of several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from followed import followed
from megatron_models import small
from megatron_on_cpu import MegatronOnCpu

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.recipe import Head, Model
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import PPO, ScalarHeadSuite, TrainEngineSuite, samples, started

GIVEN = json.loads(os.environ["M2FLOW_TEST_LAYOUT"])
Layout = dict[str, Any]


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with followed(int(os.environ["M2FLOW_TEST_RANKS"]) - 1, ("forked_megatron_ranks",)) as found:
        yield found


@pytest.fixture(scope="module", params=GIVEN if isinstance(GIVEN, list) else [GIVEN], ids=str)
def layout(request: pytest.FixtureRequest) -> Layout:
    found: Layout = request.param
    return found


@pytest.fixture(scope="module")
def model(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return small("qwen3_moe" if "ep" in layout else "qwen2", tmp_path_factory.mktemp("model"))


def spread(model: Model, layout: Layout, followers: Followers) -> TrainEngine:
    return Mirrored(MegatronOnCpu, model, EngineSettings(options=layout), followers)


class TestMegatron(TrainEngineSuite):
    @pytest.fixture(autouse=True)
    def _take(self, model: Model, layout: Layout, followers: Followers) -> None:
        self.model, self.layout, self.followers = model, layout, followers

    def make(self) -> TrainEngine:
        return spread(self.model, self.layout, self.followers)

    def test_a_stopped_trainer_leaves_no_threads(self) -> None:
        """Gloo's threads live as long as a model that holds their group, and wake a hundred times a second."""
        numbers = []
        for _ in range(2):  # The first one starts torch's own.
            with started(self.make()) as engine:
                engine.accumulate(samples(self.vocabulary), PPO)
            numbers.append(len(os.listdir("/proc/self/task")))
        assert numbers[1] <= numbers[0]


class TestMegatronHeads(ScalarHeadSuite):
    @pytest.fixture(autouse=True)
    def _take(self, model: Model, layout: Layout, followers: Followers) -> None:
        self.model, self.layout, self.followers = model, layout, followers

    def make(self, head: Head) -> TrainEngine:
        return spread(replace(self.model, head=head), self.layout, self.followers)
