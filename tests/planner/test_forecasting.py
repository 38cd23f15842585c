"""What a plan that nobody searched for should take: said before the run, and laid beside what happened."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from viewed import FAKES, hostile, length

from m2flow import Dataset, Policy, Reward, flow, steps
from m2flow.cli.main import cli
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.plan import Choice, TimeTerm
from m2flow.planner.planning import Forecast, forecast, question_of, read_forecast, write_forecast
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.viewer.analysis import Analysis, PathShare, StepAnalysis, _stages, analysis_of
from m2flow.viewer.run_trace import RunTrace, idle_of
from m2flow.viewer.run_view import RunView


@flow
def looking_first() -> None:
    policy, judge = Policy("fake"), Reward(length)
    prompts = Dataset([{"prompt": "1"}, {"prompt": "2"}])
    for _ in steps(1):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
        rewards = judge.score(responses)
        if float(rewards.mean()) > -1e9:
            policy.update(responses, rewards)


ROOT = Path(__file__).parents[2]
KNOWN = FAKES.model_copy(update={"shapes": {"policy": str(ROOT / "flows" / "models" / "digits")}})


def run_of(tmp_path: Path, spec: ClusterSpec) -> Path:
    run = Run(hostile, {"num_steps": 2}, spec, RunSettings(runs_dir=str(tmp_path)), foresees=True)
    return Path(run.execute().run_dir)


def analysed(run_dir: Path) -> Analysis:
    found = RunTrace(run_dir)
    assert found.refresh()
    return analysis_of(found, idle_of(found))


@pytest.mark.parametrize("placement", ["time-shared", "split"])
def test_a_run_by_rule_is_laid_beside_what_it_should_have_taken(tmp_path: Path, placement: str) -> None:
    run_dir = run_of(tmp_path, KNOWN.model_copy(update={"placement": placement}))
    foreseen = read_forecast(run_dir)
    assert foreseen is not None
    assert foreseen.choice is not None
    assert foreseen.choice.mode == placement
    analysis = analysed(run_dir)
    assert analysis.predicted_step_s == foreseen.choice.predicted_step_s > 0
    assert "by a model of the hardware" in analysis.prediction_note
    (update,) = (stage for stage in analysis.stages if stage.label == "policy.update")
    assert update.predicted_s is not None
    assert update.seconds > 0
    assert sum(stage.predicted_s or 0 for stage in analysis.stages) == pytest.approx(analysis.predicted_step_s)
    shown = RunView(run_dir, "run")
    while shown.loading(1.0) is not None:
        pass
    predicted = shown.summary().predicted
    assert predicted is not None, "the viewer draws its ghosts from it"
    workers = {part[0]: part[3] for part in predicted.parts}
    assert workers["policy.update"] == ["device-0" if placement == "time-shared" else "train-0"]


def test_where_nothing_says_how_large_a_model_is_the_reason_is_told(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, FAKES)
    foreseen = read_forecast(run_dir)
    assert foreseen is not None
    assert foreseen.choice is None
    analysis = analysed(run_dir)
    assert analysis.predicted_step_s is None
    assert analysis.prediction_note == foreseen.note != ""


def test_processes_that_share_cores_are_foreseen_as_if_they_did_not_and_it_is_said() -> None:
    spec = KNOWN.model_copy(update={"placement": "split", "rollout": RolloutSpec(engine="fake", workers=2, threads=2)})
    graph, models, _ = trace(hostile, {"num_steps": 1})

    def foreseen(cores: int) -> Forecast:
        plan = lower(graph, models, spec, num_steps=1)
        return forecast(plan, spec.model_copy(update={"cores": cores}), partial(question_of, graph, models))

    tight, roomy = foreseen(2), foreseen(5)
    assert "they use 5, and there are 2" in tight.note
    assert "as if" not in roomy.note
    for found in (tight, roomy):
        assert "by a model of the hardware" in found.note
        assert found.choice is not None
        placements = {placement.engine.kind: placement for placement in found.choice.placements}
        assert (placements["rollout"].layout.dp, placements["rollout"].layout.tp, placements["rollout"].num_devices) == (2, 2, 4)
        assert placements["train"].num_devices == 1


def test_ranks_have_the_devices_that_the_spec_gives_them() -> None:
    spec = KNOWN.model_copy(update={"placement": "split", "cores": 4, "train": TrainSpec(engine="fsdp", ranks=3, threads=1)})
    graph, models, _ = trace(hostile, {"num_steps": 1})
    choice = forecast(lower(graph, models, spec, num_steps=1), spec, partial(question_of, graph, models)).choice
    assert choice is not None
    (train,) = (placement for placement in choice.placements if placement.engine.kind == "train")
    assert (train.layout.dp, train.num_devices) == (3, 3)


def test_a_flow_that_looks_at_a_value_before_it_trains_is_foreseen_to_the_end_of_its_step(tmp_path: Path) -> None:
    run = Run(looking_first, {}, KNOWN, RunSettings(runs_dir=str(tmp_path)), foresees=True)
    found = read_forecast(Path(run.execute().run_dir))
    assert found is not None
    assert found.choice is not None
    assert {"policy.generate", "policy.update"} <= {part.what.partition("@")[0] for part in found.choice.parts}


def test_each_part_of_a_plan_meets_the_stages_that_it_is_about() -> None:
    def share(label: str, line: str, seconds: float) -> PathShare:
        return PathShare(label, line, seconds, 0.0)

    first = [
        share("policy.generate", "f.py:7", 1.0),
        share("policy.generate", "f.py:9", 3.0),
        share("policy.update", "f.py:8", 2.0),
        share("switch", "", 0.1),
        share("switch.onload", "", 0.2),
        share("weights.load", "", 0.3),
        share("nobody's work", "", 0.5),
    ]
    second = [share("policy.generate", "f.py:7", 2.0), share("policy.update", "f.py:8", 4.0)]

    def step(path: list[PathShare]) -> StepAnalysis:
        return StepAnalysis(0, 0, 1.0, {}, None, {}, 0.0, 0.0, path, 0, {})

    parts = (
        TimeTerm("policy.generate@7, policy.generate@9 / 2 steps under way", 5.0),
        TimeTerm("switch to train", 0.1),
        TimeTerm("policy.update", 3.0),
        TimeTerm("switch to rollout", 0.2),
        TimeTerm("weight sync of policy", 0.4),
        TimeTerm("judge.score", 9.0, on_critical_path=False),
    )
    choice = Choice("f", "c", "split", (), 8.7, parts, (), True, 0.0, "", (), 0.0, {}, {})
    path = [share("policy.generate", "f.py:7", 3.0), *first[1:]]
    found = {(one.label, one.line): (one.predicted_s, one.seconds) for one in _stages(choice, [step(first), step(second)], path)}
    assert found == {
        ("policy.generate", "f.py:7, f.py:9"): (5.0, 3.0),
        ("switch", ""): (pytest.approx(0.3), pytest.approx(0.3)),
        ("policy.update", "f.py:8"): (3.0, 3.0),
        ("weight sync of policy", ""): (0.4, 0.3),
        ("nobody's work", ""): (None, 0.5),
    }


def test_a_forecast_comes_back_from_its_file(tmp_path: Path) -> None:
    assert read_forecast(tmp_path) is None
    write_forecast(tmp_path, Forecast(None, "no"))
    assert read_forecast(tmp_path) == Forecast(None, "no")


def test_a_simulated_run_by_rule_has_its_prediction_too(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["simulate", str(ROOT / "flows" / "grpo.py"), "--cluster", str(ROOT / "clusters" / "laptop-split.yaml"), "--out", str(out)]
    done = CliRunner().invoke(cli, [*asked, "--warm-steps", "2"])
    assert done.exit_code == 0, done.output
    analysis = analysed(out)
    assert analysis.predicted_step_s is not None
    assert sum(stage.predicted_s or 0 for stage in analysis.stages) == pytest.approx(analysis.predicted_step_s)
