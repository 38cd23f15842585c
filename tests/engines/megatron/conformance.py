"""The suite of train engines, for the trainer `megatron` in layouts of different numbers of ranks, whose processes serve all layouts of
their number. `test_megatron_conformance.py` runs it in an interpreter with megatron-core, with the layouts in the environment:
`M2FLOW_TEST_LAYOUT` is JSON, lists of layouts by the number of ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from followed import followed
from megatron_models import small
from megatron_on_cpu import Joined, MegatronOnCpu

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.recipe import Head, Model
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import PPO, ScalarHeadSuite, TrainEngineSuite, samples, started

Layout = dict[str, Any]
GIVEN: dict[str, list[Layout]] = json.loads(os.environ["M2FLOW_TEST_LAYOUT"])
CASES = [pytest.param((int(ranks), layout), id=f"{ranks}-{layout}") for ranks, layouts in GIVEN.items() for layout in layouts]


@pytest.fixture(scope="module")
def of_ranks() -> Iterator[Callable[[int], Followers]]:
    """The processes beside this one for so many ranks, which start when they are first asked for."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda count: stack.enter_context(followed(count - 1, ("forked_megatron_ranks",))))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[int, Layout]:
    found: tuple[int, Layout] = request.param
    return found


@pytest.fixture(scope="module")
def layout(case: tuple[int, Layout]) -> Layout:
    return case[1]


@pytest.fixture(scope="module")
def followers(case: tuple[int, Layout], of_ranks: Callable[[int], Followers]) -> Followers:
    return of_ranks(case[0])


class Beside:
    """What all trainers of a layout start beside: to make its groups takes as long as the rest of a start."""

    def __init__(self, make: Callable[[], TrainEngine]) -> None:
        self._make = make
        self._engine: TrainEngine | None = None

    def open(self) -> None:
        self._engine = self._make()
        self._engine.start()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        self._engine = None


@pytest.fixture(scope="module")
def joined(model: Model, layout: Layout, followers: Followers) -> Iterator[Beside]:
    found = Beside(lambda: Mirrored(Joined, model, EngineSettings(options=layout), followers))
    found.open()
    yield found
    found.close()


@pytest.fixture
def alone(joined: Beside) -> Iterator[None]:
    """Nothing to start beside: groups are made and left."""
    joined.close()
    yield
    joined.open()


@pytest.fixture(scope="module")
def model(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Two layers, or one for each part of the model: the suite compares a trainer with itself, and `layouts.py` has the numbers of four."""
    num_layers = max(2, layout.get("pp", 1) * layout.get("vpp", 1))
    return small("qwen3_moe" if "ep" in layout else "qwen2", tmp_path_factory.mktemp("model"), num_layers)


def spread(model: Model, layout: Layout, followers: Followers) -> TrainEngine:
    return Mirrored(MegatronOnCpu, model, EngineSettings(options=layout), followers)


class TestMegatron(TrainEngineSuite):
    @pytest.fixture(autouse=True)
    def _take(self, model: Model, layout: Layout, followers: Followers, joined: Beside) -> None:
        self.model, self.layout, self.followers = model, layout, followers

    def make(self) -> TrainEngine:
        return spread(self.model, self.layout, self.followers)

    @pytest.mark.usefixtures("alone")
    def test_stopping_twice_is_harmless(self) -> None:
        super().test_stopping_twice_is_harmless()

    @pytest.mark.usefixtures("alone")
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
    def _take(self, model: Model, layout: Layout, followers: Followers, joined: Beside) -> None:
        self.model, self.layout, self.followers = model, layout, followers

    def make(self, head: Head) -> TrainEngine:
        return spread(replace(self.model, head=head), self.layout, self.followers)
