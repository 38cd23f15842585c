"""The engines of one process: when finished samples leave, and what an abort takes along."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from fake_clusters import generate_call, prompts

from m2flow.engines.contract import EngineSettings
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.worker.engine_host import EngineHost
from m2flow.observe.spans import Recorder
from m2flow.recipe import Model
from m2flow.samples import make_ids


@pytest.fixture
def gathering() -> Iterator[EngineHost]:
    engine_host = EngineHost(
        [EngineSlot("policy", "rollout", "fake")],
        {"policy": Model("fake")},
        {"rollout": EngineSettings()},
        run_seed=0,
        recorder=Recorder("engine_host"),
        shared_prefix="",
        gather_s=math.inf,
    )
    engine_host.open()
    yield engine_host
    engine_host.close()


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
