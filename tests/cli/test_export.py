"""`m2flow export`: the model of a run, as transformers loads it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner, Result

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.cli.main import cli
from m2flow.runner.run import Run, Summary
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec

DIGITS = Path(__file__).resolve().parents[2] / "flows" / "models" / "digits"


def length(sample: Sample) -> float:
    return float(len(sample.tokens))


@flow
def small(model: str = "fake") -> None:
    policy, judge = Policy(model) if model == "fake" else Policy(model, init="random"), Reward(length)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(8)])
    for _ in steps(2):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=4)
        policy.update(responses, judge.score(responses))


def trained(runs_dir: Path, model: str) -> Summary:
    engine = "fake" if model == "fake" else "embedded"
    spec = ClusterSpec(device="cpu", rollout=RolloutSpec(engine=engine), train=TrainSpec(engine=engine))
    return Run(small, {"model": model}, spec, RunSettings(runs_dir=str(runs_dir), checkpoint_steps=1, eager=True)).execute()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(trained(tmp_path_factory.mktemp("runs"), str(DIGITS)).run_dir)


def export(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


def weights(directory: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert transformers.AutoTokenizer.from_pretrained(directory).encode("12=")
    return dict(model.state_dict())


def test_the_models_of_a_step_and_of_the_end_load_and_differ(run: Path, tmp_path: Path) -> None:
    assert export(run, "--step", 1, "--out", tmp_path / "one").exit_code == 0
    said = export(run)
    assert said.exit_code == 0, said.output
    assert str(run / "export" / "policy-final") in said.output
    one, last = weights(tmp_path / "one"), weights(run / "export" / "policy-final")
    assert one.keys() == last.keys()
    assert any(not torch.equal(one[name], last[name]) for name in one)
    assert not [file.name for file in (tmp_path / "one").iterdir() if file.name.startswith("m2flow")]
    assert export(run, "--step", 2, "--out", tmp_path / "two").exit_code == 0
    assert all(torch.equal(tensor, last[name]) for name, tensor in weights(tmp_path / "two").items())


def test_a_step_without_a_checkpoint_is_answered_with_those_that_have_one(run: Path) -> None:
    said = export(run, "--step", 7)
    assert said.exit_code == 2
    assert "has no checkpoint of step 7" in said.output
    assert "--step 1, --step 2, final" in said.output


def test_of_several_models_the_only_one_that_was_trained_is_exported_unasked(run: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.copytree(copied / "checkpoints" / "final" / "policy", copied / "checkpoints" / "final" / "a_reference")
    said = export(copied, "--out", tmp_path / "model")
    assert said.exit_code == 0, said.output
    assert "policy at final" in said.output


def test_an_unknown_role_is_answered_with_those_there_are(run: Path) -> None:
    assert "--role policy" in export(run, "--role", "critic").output


def test_a_directory_that_is_there_is_left_alone(run: Path, tmp_path: Path) -> None:
    said = export(run, "--out", tmp_path)
    assert said.exit_code != 0
    assert "exists already" in said.output


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    file = run / "checkpoints" / "step-000001" / "policy" / "model.safetensors"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        said = export(run, "--step", 1, "--out", tmp_path / "one")
    finally:
        file.write_bytes(whole)
    assert said.exit_code != 0
    assert "is not what was written" in said.output
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_keeps_no_model_has_none_to_export(tmp_path: Path) -> None:
    said = export(trained(tmp_path, "fake").run_dir)
    assert said.exit_code != 0
    assert "has no Hugging Face model" in said.output
