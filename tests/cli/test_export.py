"""`m2flow export`: the model of a run, as transformers loads it."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from tiny_models import byte_tokenizer, save_config

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.cli.main import cli
from m2flow.micro.records.rundir import origin
from m2flow.recipe import Model
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


def test_options_of_a_gguf_file_are_checked_and_a_model_that_can_not_be_one_leaves_nothing(run: Path, tmp_path: Path) -> None:
    assert "--format gguf and --adapters exclude each other" in export(run, "--format", "gguf", "--adapters").output
    assert "--format gguf and --shard-size exclude each other" in export(run, "--format", "gguf", "--shard-size", "5GB").output
    assert "--dtype float16 goes with --format gguf" in export(run, "--dtype", "float16").output
    said = export(run, "--format", "gguf", "--out", tmp_path / "digits")
    assert said.exit_code != 0
    has_package = importlib.util.find_spec("gguf") is not None
    assert ("the tokenizer is WordLevel" if has_package else "pip install 'm2flow[gguf]'") in said.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf: the extra gguf is not installed")
def test_a_gguf_file_has_the_weights_of_the_run_and_a_card_of_its_own(tmp_path: Path) -> None:
    import gguf

    byte_tokenizer(tmp_path / "model")
    described = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    described["pre_tokenizer"]["use_regex"] = True
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(described))
    run = trained(tmp_path / "runs", save_config("Qwen2", tmp_path / "model", tokenizer=False, vocab_size=258)).run_dir
    said = export(run, "--format", "gguf", "--dtype", "bfloat16", "--out", tmp_path / "out")
    assert said.exit_code == 0, said.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "policy-final.gguf"]
    assert card_data((tmp_path / "out" / "README.md").read_text())["library_name"] == "gguf"
    found = {str(tensor.name): tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "policy-final.gguf").tensors}
    (final,) = (Path(run) / "checkpoints" / "final" / "policy").glob("*.safetensors")
    held = load_file(final)["model.layers.1.mlp.up_proj.weight"].to(torch.bfloat16)
    assert found["blk.1.ffn_up.weight"].data.tobytes() == held.view(torch.uint8).numpy().tobytes()


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


def test_weights_may_be_written_in_files_of_a_size(run: Path, tmp_path: Path) -> None:
    assert export(run, "--out", tmp_path / "whole").exit_code == 0
    said = export(run, "--shard-size", "400KB", "--out", tmp_path / "shards")
    assert said.exit_code == 0, said.output
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 1
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    whole, shards = weights(tmp_path / "whole"), weights(tmp_path / "shards")
    assert whole.keys() == shards.keys()
    assert all(torch.equal(tensor, shards[name]) for name, tensor in whole.items())
    assert "is no size" in export(run, "--shard-size", "5", "--out", tmp_path / "none").output


def card_data(card: str) -> dict[str, object]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


def test_the_model_card_says_what_the_run_was_and_no_place_of_this_machine(run: Path, tmp_path: Path) -> None:
    assert export(run, "--step", 1, "--out", tmp_path / "one").exit_code == 0
    card = (tmp_path / "one" / "README.md").read_text()
    assert card_data(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["m2flow", "reinforcement-learning"],
    }
    assert "| base model | digits, its weights drawn at random |" in card
    assert "| flow | small |" in card
    assert "| after | step 1 |" in card
    assert "| seed | 0 |" in card
    assert "| reward | " in card
    assert str(run) not in card
    assert str(DIGITS) not in card


def test_the_model_card_names_the_base_model_of_the_hub_and_its_commit(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, commit = tmp_path / "hub" / "models--nobody--digits", "a" * 40
    shutil.copytree(run / "checkpoints" / "final" / "policy", home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = origin(Model("nobody/digits"))
    assert found == {"path": "nobody/digits", "init": "pretrained", "hub": "nobody/digits", "revision": commit}
    assert origin(Model(str(home / "snapshots" / commit))) | {"path": "nobody/digits"} == found
    again = Path(shutil.copytree(run, tmp_path / "run"))
    config = json.loads((again / "config.json").read_text())
    (again / "config.json").write_text(json.dumps(config | {"models": {"policy": found}}))
    assert export(again, "--out", tmp_path / "out").exit_code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| base model | nobody/digits, revision {commit} |" in card
    assert {"base_model": "nobody/digits", "base_model_relation": "finetune"}.items() <= card_data(card).items()


def test_a_line_of_metrics_that_is_being_written_does_not_stop_an_export(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step":1,"time_s":2.5,"val')
    said = export(tmp_path / "run", "--step", 1, "--out", tmp_path / "one")
    assert said.exit_code == 0, said.output
    assert "| reward | " in (tmp_path / "one" / "README.md").read_text()


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as an upload of small files needs."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer: dict[str, object] = {}
        if self.path == "/api/repos/create":
            answer = {"url": f"http://127.0.0.1/{json.loads(body)['organization']}/{json.loads(body)['name']}"}
        elif "/preupload/" in self.path:
            asked = [one["path"] for one in json.loads(body)["files"]]
            answer = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in asked]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"success": True, "commitUrl": "http://127.0.0.1/me/sorted/commit/abc", "commitOid": "abc"}
        self.answer(answer)

    def do_GET(self) -> None:
        self.answer({"id": "me/sorted", "sha": "abc", "siblings": []})

    def answer(self, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.slow
def test_a_push_uploads_what_was_exported(run: Path, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        command = [sys.executable, "-m", "m2flow", "export", str(run), "--out", str(tmp_path / "pushed"), "--push", "me/sorted"]
        address = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_of_a_test", "HF_HUB_OFFLINE": "0"}
        environment = {**os.environ, **address, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        hub.shutdown()
    assert done.returncode == 0, done.stderr
    assert "me/sorted/commit/abc" in done.stdout
    assert Hub.files == {path.name: path.read_bytes() for path in (tmp_path / "pushed").iterdir()}


@pytest.mark.slow
def test_a_hub_that_can_not_be_reached_leaves_the_model_here_and_says_so(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "m2flow", "export", str(run), "--out", str(tmp_path / "kept"), "--push", "me/sorted"]
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_of_a_test", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env={**environment, "HF_HUB_OFFLINE": "0"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "me/sorted can't be pushed" in done.stderr
    assert weights(tmp_path / "kept")
