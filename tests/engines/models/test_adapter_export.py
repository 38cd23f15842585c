"""`m2flow export --adapters`: what peft loads onto the base that it names, and computes what was trained."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from adapted_trainers import adapted_model
from click.testing import CliRunner, Result
from lora_models import RECIPE

from m2flow import Dataset, Flow, Lora, Policy, Reward, Sample, flow, steps
from m2flow.cli.main import cli
from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.models.model_export import export_adapters
from m2flow.errors import ModelError
from m2flow.recipe import Model
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RunSettings

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
of_peft = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """With weights on the disk."""
    drawn = adapted_model(tmp_path / "model")
    load_model(replace(drawn, lora=None), device="cpu", attention="eager").save_pretrained(drawn.path)
    return replace(drawn, init="pretrained")


def learning(path: str, lora: Lora | None) -> Flow:
    def judged(sample: Sample) -> float:
        return len(str(sample.text)) % 3 / 3

    @flow
    def adapters() -> None:
        policy = Policy(path, lora=lora)
        prompts = Dataset([{"prompt": f"{i}+{i}="} for i in range(6)])
        for _ in steps(2):
            responses = policy.generate(prompts.take(3), n=2, max_new_tokens=5)
            policy.update(responses, Reward(judged).score(responses), optimizer=RECIPE)

    return adapters


def trained(model: Model, runs_dir: Path) -> Path:
    settings = RunSettings(runs_dir=str(runs_dir), checkpoint_steps=1, eager=True)
    return Path(Run(learning(model.path, model.lora), {}, ClusterSpec(device="cpu"), settings).execute().run_dir)


def export(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


@needs_peft
@of_peft
def test_peft_loads_what_is_exported_onto_the_base_and_computes_what_the_whole_model_does(model: Model, tmp_path: Path) -> None:
    import peft

    in_cache = shutil.copytree(model.path, tmp_path / "hub" / "models--nobody--tiny" / "snapshots" / "abc")
    model = replace(model, path=str(in_cache))
    run = trained(model, tmp_path / "runs")
    said = export(run, "--adapters")
    assert said.exit_code == 0, said.output
    out = run / "export" / "policy-final-adapters"
    assert str(out) in said.output
    assert "for nobody/tiny;" in said.output
    named = json.loads((out / "adapter_config.json").read_text())
    assert (named["base_model_name_or_path"], named["revision"]) == ("nobody/tiny", "abc")
    assert "base_model: nobody/tiny\n" in (out / "README.md").read_text()
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    assert not list(out.glob("m2flow*"))
    assert export(run, "--step", 1, "--adapters", "--out", tmp_path / "first").exit_code == 0
    assert export(run, "--out", tmp_path / "whole").exit_code == 0
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(tokens).logits
        last, first = (
            peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(model.path), str(each))(tokens).logits
            for each in (out, tmp_path / "first")
        )
        base = transformers.AutoModelForCausalLM.from_pretrained(model.path)(tokens).logits
    torch.testing.assert_close(last, whole, atol=1e-5, rtol=0)
    assert float((last - base).abs().max()) > 1e-4
    assert float((last - first).abs().max()) > 1e-4


@needs_peft
@of_peft
def test_adapters_whose_base_is_another_one_now_or_nowhere_are_not_exported(model: Model, tmp_path: Path) -> None:
    engine = EmbeddedTrain(model, EngineSettings())
    engine.start()
    engine.save(str(tmp_path / "saved"))
    assert export_adapters(tmp_path / "saved", tmp_path / "good") == Path(model.path)
    other = load_model(replace(model, lora=None, init="random", seed=9), device="cpu", attention="eager")
    other.save_pretrained(model.path)
    with pytest.raises(ModelError, match=r"is not the model that was trained.*embed_tokens"):
        export_adapters(tmp_path / "saved", tmp_path / "changed")
    next(Path(model.path).glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"without the model.*has no \*\.safetensors"):
        export_adapters(tmp_path / "saved", tmp_path / "gone")
    shutil.rmtree(tmp_path / "saved" / "adapter")
    with pytest.raises(ModelError, match="has no adapters"):
        export_adapters(tmp_path / "saved", tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "model", "saved"]


@needs_peft
def test_a_run_without_adapters_is_answered_so(model: Model, tmp_path: Path) -> None:
    said = export(trained(replace(model, lora=None), tmp_path / "runs"), "--adapters")
    assert said.exit_code != 0
    assert "has no adapters" in said.output
