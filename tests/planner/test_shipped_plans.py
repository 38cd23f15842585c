"""Every flow that comes with m2flow on every spec of pools that does: the plan can be run, and none that it lists is faster."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest

from m2flow import load_flow
from m2flow.errors import DoesNotFit
from m2flow.macro.graph import MacroGraph
from m2flow.macro.tracing import Exploration, anticipate, explore
from m2flow.micro.lowering.arithmetic import TRACED_STEPS
from m2flow.micro.lowering.passes import lower
from m2flow.planner.planning import question_of
from m2flow.runs.cluster_file import load_cluster

ROOT = Path(__file__).resolve().parents[2]
FLOWS = ("grpo", "ppo", "dapo", "distill", "judge", "selfplay")
SPECS = tuple(sorted(path.stem for path in (ROOT / "clusters").glob("*.yaml") if load_cluster(path).pools))
SHAPES = ("Llama-3.1-8B", "Qwen2.5-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B")
LENGTHS = {
    "short": "lognormal:median=300,sigma=0.8,cap=1024",
    "12k": "lognormal:median=3000,sigma=0.8,cap=12288",
    "28k": "lognormal:median=8000,sigma=0.8,cap=28672",
}
ONCE_WRONG = (
    ("distill", "h100-2x8", "Llama-3.1-8B", "12k"),  # A plan that was listed was faster,
    ("distill", "h100-64", "Qwen3-30B-A3B", "short"),
    ("judge", "h100-1024", "Qwen2.5-32B", "12k"),
    ("ppo", "h100-256", "Qwen3-235B-A22B", "short"),
    ("judge", "h100-64", "Llama-3.1-8B", "short"),  # since it was charged a switch to an engine of other steps,
    ("distill", "h100-1024", "Llama-3.1-8B", "short"),  # or devices were lent that nobody could stand in for.
    ("distill", "h100-256", "Qwen3-235B-A22B", "short"),
)
FIXED = (
    ("grpo", "h100-8", "Llama-3.1-8B", "28k"),
    ("dapo", "h20-h100", "Qwen3-30B-A3B", "12k"),
    ("ppo", "h100-8-split", "Llama-3.1-8B", "short"),
    ("ppo", "h100-8-split", "Qwen2.5-32B", "short"),  # Nothing fits together, which took an exact search minutes to find out.
)


@cache
def explored(flow: str) -> tuple[Exploration, MacroGraph]:
    found, options = load_flow(str(ROOT / "flows" / f"{flow}.py")), {"batch": 64, "max_new_tokens": 28_672}
    exploration = explore(found, options)
    return exploration, anticipate(found, options, exploration, steps=TRACED_STEPS)


def wrong(flow: str, spec: str, shape: str, lengths: str) -> str:
    """What is wrong with the plan; nothing if it is sound, or if the models do not fit the cluster."""
    exploration, graph = explored(flow)
    cluster = load_cluster(ROOT / "clusters" / f"{spec}.yaml").model_copy(update={"shapes": dict.fromkeys(exploration.models, shape)})
    try:
        choice = question_of(graph, exploration.models, cluster, lengths=LENGTHS[lengths]).choose()
    except DoesNotFit:
        return ""
    lower(graph, exploration.models, cluster, choice=choice)
    beaten = [loser.what for loser in choice.losers if loser.predicted_step_s < choice.predicted_step_s]
    return f"{choice.mode} is beaten by {beaten}" if beaten else ""


@pytest.mark.parametrize("cell", [*ONCE_WRONG, *FIXED], ids="-".join)
def test_a_plan_of_a_shipped_flow_can_be_run_and_no_other_that_it_lists_is_faster(cell: tuple[str, str, str, str]) -> None:
    assert not wrong(*cell)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flow", FLOWS)
def test_so_is_every_plan_of_every_shipped_flow_on_every_shipped_cluster(flow: str) -> None:
    cells = itertools.product((flow,), SPECS, SHAPES, LENGTHS)
    assert not {cell: what for cell in cells if (what := wrong(*cell))}
