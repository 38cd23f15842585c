"""The cost model against published runs, what a costs file says, and which side of a choice each calibrated number moves."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from modelled_problems import modelled

from m2flow.errors import SpecError
from m2flow.micro.protocol.cost_terms import EngineId, Layout
from m2flow.planner.cost_model import ModelledCosts
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.pools import Attained, Estimate, attained_by, legal_layouts, offered
from m2flow.planner.profiles import ProfiledCosts, read_profile
from m2flow.planner.search import find_plan
from m2flow.planner.workload import extents_of
from m2flow.runs.cluster_file import load_cluster

ROOT = Path(__file__).parents[2]
ROLLOUT, TRAIN = EngineId("policy", "rollout"), EngineId("policy", "train")


@pytest.fixture(scope="module")
def calibration() -> ModuleType:
    place = importlib.util.spec_from_file_location("calibration", ROOT / "benchmarks" / "calibration.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    with pytest.MonkeyPatch.context() as patched:  # A flow is called `search` too, and may have been loaded.
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        patched.delitem(sys.modules, "search", raising=False)
        patched.setitem(sys.modules, "calibration", module)
        place.loader.exec_module(module)
    return module


NOT_OFFERED = {
    "v0.7, 30B, 32 H100, 40k": "sequences are shared by 32 devices, over nodes; here inside a node",
    "Relax, 30B, 8 H800, TP 8": "sequences and heads are shared by 8 devices, and there are 4 heads of keys; here by their number",
}
"""Of `megatron`."""


def test_layouts_of_trainers_in_published_runs_are_offered(calibration: ModuleType) -> None:
    """By the engine that is named; those that others shard in another way are predicted, and can't be chosen."""
    rows = yaml.safe_load(calibration.ROWS.read_text())
    refused, num_offered = set(), 0
    for name, row in [*rows["steps"].items(), *rows["validation"].items(), *rows["training"].items()]:
        if row.get("engine") != "megatron":
            continue
        layout = Layout(**row["layout"])
        found = legal_layouts(shape_named(row["model"]), offered("megatron", "train"), "train", layout.num_devices, 8)
        num_offered += layout in found
        refused |= {name} if layout not in found else set()
    assert refused == set(NOT_OFFERED)
    assert num_offered > 30


def test_published_steps_are_met_within_a_fifth_and_none_is_far_off(calibration: ModuleType) -> None:
    found = calibration.compared(yaml.safe_load(calibration.ROWS.read_text()))
    summary = calibration.summary(found)
    assert summary["median_error_of_steps"] < 0.2
    assert summary["median_error_of_parts"] < 0.2
    assert max(abs(math.log(parts["step"])) for parts in found.values() if "step" in parts) < math.log(1.6)
    assert summary["worst_step"] in (ROOT / "docs" / "internals" / "planner.md").read_text()


def test_published_steps_that_nothing_is_fitted_to_are_met_too(calibration: ModuleType) -> None:
    rows = yaml.safe_load(calibration.ROWS.read_text())
    found = calibration.steps_compared(rows["validation"])
    summary, text = calibration.summary(found), (ROOT / "docs" / "internals" / "planner.md").read_text()
    assert summary["median_error_of_steps"] < 0.2
    far = {name for name, parts in found.items() if abs(math.log(parts["step"])) > math.log(1.6)}
    assert far == {"v0.7, V3, 512 H100, one off", "v0.7, V3, 256 GB200, one off"}  # Its weights arrive there in 10 s or less.
    assert f"Of {len(found)} to which nothing is fitted, of NeMo-RL and Relax, it is {summary['median_error_of_steps']:.0%}" in text


def test_of_runs_that_nothing_is_fitted_to_the_faster_mode_is_predicted_to_be_faster(calibration: ModuleType) -> None:
    rows = yaml.safe_load(calibration.ROWS.read_text())
    every = rows["validation"] | rows["steps"]
    found = calibration.steps_compared(every)
    num = 0
    for (name, ours), (other, theirs) in itertools.permutations(every.items(), 2):
        same = all(ours[key] == theirs[key] for key in ("source", "model", "device", "gpus", "prompts"))
        if not same or "async" in ours or "async" not in theirs:
            continue
        measured = ours["measured"]["step"] / theirs["measured"]["step"]
        predicted = measured * found[name]["step"] / found[other]["step"]
        if abs(math.log(measured)) > math.log(1.1):
            num += 1
            assert (measured > 1) == (predicted > 1), (name, other)
    assert num >= 10


def test_of_published_runs_in_two_modes_the_faster_one_is_predicted_to_be_faster(calibration: ModuleType) -> None:
    rows = yaml.safe_load(calibration.ROWS.read_text())
    text = (ROOT / "docs" / "internals" / "planner.md").read_text()
    for name, row in rows["rankings"].items():
        assert name in text
        if "samples" in row:
            continue  # Searched below.
        found = calibration.ranking_of(row, rows["steps"], None)
        if "predicted" in found:
            assert found["measured"] > 1.1
            assert found.get("with_its_switching", found["predicted"]) > 1
            assert f"{found['measured']:.2f} | {found['predicted']:.2f}" in text
        else:
            assert found["why"]


@pytest.mark.slow
def test_ppo_is_predicted_to_be_faster_in_a_split_where_it_was_measured_to_be(calibration: ModuleType) -> None:
    row = yaml.safe_load(calibration.ROWS.read_text())["rankings"]["PPO 7B, RLinf, 64 H100"]
    found = calibration.ranking_of(row, {}, None)
    assert min(found["measured"]) > 1.1
    assert min(found["predicted"]) > 1.1
    few, many = found["predicted"]
    assert f"| 1.18 to 1.45 | {few:.2f} to {many:.2f} |" in (ROOT / "docs" / "internals" / "planner.md").read_text()


@pytest.mark.parametrize("kind", ["rollout", "train"])
def test_every_number_lies_in_its_interval_and_has_a_source(kind: str) -> None:
    for engine in ("vllm", "sglang", "embedded") if kind == "rollout" else ("deepspeed", "fsdp", "megatron", "embedded"):
        found = attained_by(engine if kind == "rollout" else "vllm", engine if kind == "train" else "fsdp").constants()
        for name, constant in found.items():
            assert constant.source, name
    assert attained_by("fake", "fake") == Attained()
    assert attained_by("embedded", "embedded").rollout.wake_s == Attained().rollout.wake_s  # No server's.
    with pytest.raises(ValueError, match="outside of its interval"):
        Estimate(3.0, 0.0, 1.0, "nowhere")


def test_a_choice_says_between_what_it_believes_a_step_to_lie() -> None:
    problem = modelled(8)
    choice = find_plan(problem.workload, problem.lengths, problem.costs, problem.spec, is_alone=True)
    low, high = choice.interval_s
    assert low < choice.predicted_step_s < high
    assert high < 2 * choice.predicted_step_s


COSTS = """
engines:
  - {role: policy, kind: rollout, pool: main, degrees: {tp: 2}, decode: {step_s: 0.02, sample_s: 0.0001}}
  - {role: policy, kind: train, pool: main, degrees: {dp: 8, zero: 1}, update: {token_s: 1.0e-5}, optimizer_s: 0.5}
syncs: [{role: policy, pools: [main, main], load_s: 9}]
attained: {rollout: {sglang: {wake_s: {value: 1, low: 1, high: 1, source: mine}}}}
"""


def test_a_cluster_s_costs_file_says_what_its_layouts_take(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(COSTS)
    (tmp_path / "cluster.yaml").write_text(
        "costs: mine.yaml\npools: {main: {device: h100}}\nrollout: {engine: sglang}\ntrain: {engine: deepspeed}\n"
    )
    spec = load_cluster(tmp_path / "cluster.yaml")
    problem = modelled(8)
    shapes = dict.fromkeys(("policy", "reference"), shape_named("Qwen2.5-7B"))
    inner = ModelledCosts(spec, problem.workload, shapes, extents_of(problem.workload, shapes))
    assert spec.costs is not None
    costs = ProfiledCosts(read_profile(Path(spec.costs)), inner)
    found = costs.decode(ROLLOUT, "main", Layout(tp=2, dp=4))
    assert (found.step_s, found.sample_s) == (0.02, 0.0001)
    assert found.prefill_token_s == inner.decode(ROLLOUT, "main", Layout(tp=2, dp=4)).prefill_token_s
    trained = costs.train(TRAIN, "main", Layout(dp=8, zero=1))
    assert (trained.update.token_s, trained.optimizer_s) == (1e-5, 0.5)
    assert costs.sync_s("policy", ("main", Layout(dp=8)), ("main", Layout(dp=8)), is_same_devices=True) == 9
    assert inner.pool("main").attained.rollout.wake_s.value == 1
    other = costs.train(TRAIN, "main", Layout(dp=4, zero=1)).update.token_s
    assert other == pytest.approx(2e-5, rel=0.05)  # Another layout is modelled, with the model's error of the one that is known.


@pytest.mark.parametrize("layout", ["degrees: {tp: 4, dp: 2}", "num_devices: 8, ranks: 2"])
def test_times_of_several_instances_are_those_of_one_and_correct_other_layouts(layout: str, tmp_path: Path) -> None:
    times = "decode: {step_s: 0.02, sample_s: 0.0001}"
    (tmp_path / "mine.yaml").write_text(f"engines: [{{role: policy, kind: rollout, pool: main, {layout}, {times}}}]")
    inner = modelled(8).costs
    assert isinstance(inner, ModelledCosts)
    costs, known, other = ProfiledCosts(read_profile(tmp_path / "mine.yaml"), inner), Layout(tp=4, dp=2), Layout(tp=2, dp=4)
    wrong = 0.02 / inner.decode(ROLLOUT, "main", known).step_s
    assert costs.decode(ROLLOUT, "main", known).step_s == pytest.approx(0.02)
    assert costs.decode(ROLLOUT, "main", other).step_s == pytest.approx(wrong * inner.decode(ROLLOUT, "main", other).step_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines: [{role: policy, kind: rollout, decode: {steps_s: 1}}]", r"engines\[0\].decode.steps_s: no such field"),
        ("engines: [{role: policy, kind: rollout, decode: {step_s: 1, sample_s: 0}}]", "the times of policy.rollout are of no layout"),
        ("engines: [{role: policy, kind: train, degrees: {tp: 0}, update: {token_s: 1}}]", "the times of policy.train are of no layout"),
        ("engines: [{kind: rollout}]", "role"),
        ("attained: {rollout: {sglang: {wakes_s: {value: 1, low: 1, high: 1, source: x}}}}", "wakes_s: no such number"),
        ("attained: {rollout: {sglang: {wake_s: {value: 5, low: 1, high: 1, source: x}}}}", "outside of its interval"),
    ],
)
def test_a_mistake_in_a_costs_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "cluster.yaml").write_text("costs: mine.yaml\npools: {main: {device: h100}}\nrollout: {engine: sglang}\n")

    def used() -> ModelledCosts:
        return ModelledCosts(load_cluster(tmp_path / "cluster.yaml"), modelled(8).workload, {}, {})

    with pytest.raises(SpecError, match=message):
        used()
