"""Speakers in processes of their own: their turns are asked for over channels, and nothing that is said depends on where they are."""

from __future__ import annotations

import pytest
from test_speakers import SPEC, contest

from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.spec import ClusterSpec, PinSpec
from m2flow.testing.random_programs import difference_of
from m2flow.testing.world import run_eager, run_planned

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")

JUDGE_APART = {"judge.rollout": PinSpec(num_devices=1)}
BOTH_APART = {**JUDGE_APART, "rival.rollout": PinSpec(num_devices=2)}


def apart(spec: ClusterSpec = SPEC, *, placement: str = "split", pins: dict[str, PinSpec] = BOTH_APART) -> ClusterSpec:
    return spec.model_copy(update={"placement": placement, "pin": pins})


@pytest.mark.parametrize("placement", ["split", "time-shared"])
@pytest.mark.parametrize("pins", [JUDGE_APART, BOTH_APART])
def test_a_planned_run_with_speakers_in_processes_of_their_own_equals_the_eager_one(placement, pins):
    spec = apart(placement=placement, pins=pins)
    graph, models, _ = trace(contest, {})
    hosts = [{slot.role for slot in worker.engines if slot.kind == "rollout"} for worker in lower(graph, models, spec).workers]
    assert {"judge"} in hosts
    assert not any({"policy", "judge"} <= roles for roles in hosts)
    planned, eager = run_planned(contest, {}, spec), run_eager(contest, {}, spec)
    assert not planned.error, planned.error
    assert not eager.error, eager.error
    assert difference_of(planned, eager) is None
