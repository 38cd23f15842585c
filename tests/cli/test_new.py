"""`m2flow new` and `m2flow demo`: a project that works as it stands; from a wheel: tests/test_packaging.py."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from m2flow.cli.main import cli
from m2flow.cli.run import _KINDS, _NICKNAMES, shipped_flows


def test_every_shipped_flow_may_begin_a_project() -> None:
    others = {"grpo_smollm", "gym_ppo", "gym_pipelined"}  # They need a data package, and Gymnasium.
    assert set(_KINDS) == {path.stem for path in shipped_flows().glob("*.py")} - others


@pytest.mark.parametrize("kind", ["grpo", "chat", "agent", "distill"])
def test_a_new_project_has_a_flow_a_spec_a_readme_and_a_test_that_passes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(cli, ["new", "mine", "--from", kind])
    assert made.exit_code == 0, made.output
    assert ("--model models/chat --init random" in made.output) == (kind == "chat")
    flow = _NICKNAMES.get(kind, kind)
    assert {f"{flow}.py", "cluster.yaml", "README.md", f"test_{flow}.py"} <= {path.name for path in Path("mine").iterdir()}
    runpy.run_path(f"mine/test_{flow}.py")["test_the_flow_is_the_same_planned_and_eager"]()
    if kind != "distill":
        model = ["--model", "mine/models/chat", "--init", "random"] if kind == "chat" else []
        planned = CliRunner().invoke(cli, ["plan", f"mine/{flow}.py", "--cluster", "mine/cluster.yaml", *model])
        assert planned.exit_code == 0, planned.output


USERS = """
from m2flow import Dataset, Policy, Reward, Sample, flow, gspo, loss, ppo_clip, sequence_mean, steps
from m2flow.rewards import Overlong
from torch import Tensor


def verdict(sample: Sample) -> float:
    return sample.text.count("0") / len(sample.answer)


@loss(needs=["logprobs", "advantages"])
def mine(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -logprobs * advantages


@flow
def train(num_steps: int = 2) -> None:
    policy, judge, short = Policy("fake"), Reward(verdict), Reward.sum({Overlong(8, buffer=4): 1.0}, name="short")
    prompts = Dataset.mix([Dataset.jsonl("rows.jsonl", stream=True).shard(0, 2), Dataset([{"prompt": "1="}])])
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=8, temperature=1.0)
        rewards = judge.score(responses) + 0.5 * short.score(responses)
        for chosen in (gspo(eps_low=0.1), ppo_clip(kl_coef=0.1), mine):
            metrics = policy.update(responses, rewards, loss=chosen)
        print(step, float(rewards.mean()), metrics["loss"], sequence_mean)
"""
WRONG = """
from m2flow import Polcy, Policy

Policy(3).generate([], max_new_tokens="8")
"""


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Projects of users, a folder each: new ones, a program of their own, and one with mistakes."""
    folder = tmp_path_factory.mktemp("users")
    for kind in ("grpo", "chat", "agent", "distill"):
        assert CliRunner().invoke(cli, ["new", str(folder / kind), "--from", kind]).exit_code == 0
    for name, program in (("own", USERS), ("wrong", WRONG)):
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(program)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "chat", "own", "wrong"])
def test_users_code_passes_mypy_which_knows_nothing_of_pydantic(kind: str, users: Path) -> None:
    pytest.importorskip("mypy")
    cache = ["--cache-dir", str(users / "cache")]
    files = sorted(path.name for path in (users / kind).glob("*.py"))
    check = [sys.executable, "-m", "mypy", "--strict", *cache, *files]
    done = subprocess.run(check, cwd=users / kind, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    if kind == "wrong":
        assert [line.split(":")[1] for line in found] == ["2", "4", "4", "4"], done.stdout
    else:
        assert not found, done.stdout
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_users_code_passes_pyright(users: Path) -> None:
    pytest.importorskip("pyright")
    quiet = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # It would ask the network whether it is the newest.
    roots = [{"root": name} for name in ("grpo", "chat", "agent", "distill", "own", "wrong")]
    (users / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", "executionEnvironments": roots}))
    check = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(check, cwd=users, env=quiet, capture_output=True, text=True, check=False)
    found = [
        (Path(one["file"]).parent.name, one["range"]["start"]["line"] + 1, one["message"])
        for one in json.loads(done.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    assert not [one for one in found if one[0] != "wrong"]
    assert {line for _, line, _ in found} == {2, 4}, found


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["new", str(tmp_path)])
    assert done.exit_code == 2
    assert "exists already" in done.output
    assert list(tmp_path.iterdir()) == []
