"""What `config.json` says of a run, and that `m2flow compare` finds each of twenty planted differences, code as a diff."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from m2flow.cli.main import cli
from m2flow.macro.flow import load_flow
from m2flow.micro.records import provenance
from m2flow.micro.records.provenance import differences
from m2flow.micro.records.rundir import read_config
from m2flow.observe.metrics import MetricsWriter, parameters_of
from m2flow.runner.run import Run
from m2flow.spec import LAPTOP, ClusterSpec, RunSettings

FLOWS = Path(__file__).resolve().parents[3] / "flows"

FLOW = """
from pathlib import Path
from judging import shortened
from m2flow import AdamW, Dataset, Policy, Reward, SGD, Sample, flow, gspo, ppo_clip, steps

MODEL = Path(__file__).parent / "digits"


def right(sample: Sample) -> float:
    return float(shortened(sample.text) == "1")


@flow(staleness="staleness")
def sorting(num_steps: int = 2, lr: float = 1e-4, staleness: int = 0, unused: str = "plain") -> None:
    policy, verifier = Policy(MODEL, init="random"), Reward(right)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(10)], name="prompts")
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=4, temperature=1.0, top_p=1.0)
        rewards = verifier.score(responses)
        policy.update(
            responses, rewards, loss=ppo_clip(eps_high=0.28), optimizer=AdamW(lr, betas=(0.9, 0.99)), minibatch_size=2, epochs=1
        )
"""
JUDGING = "def shortened(text: str) -> str:\n    return text[:1]\n"


@dataclass(frozen=True)
class World:
    """What a run is made of."""

    flow: str = FLOW
    judging: str = JUDGING
    options: dict[str, object] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    cluster: ClusterSpec = LAPTOP
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    commits: bool = False
    model: str = "digits"

    def edited(self, before: str, after: str) -> World:
        assert before in self.flow
        return replace(self, flow=self.flow.replace(before, after))


def planted(kind: str, name: str, one: str, other: str) -> Callable[[Any], bool]:
    """A difference of this kind, whose name and values contain these."""
    return lambda found: found.kind == kind and name in found.name and one in found.one and other in found.other


def in_code(text: str) -> Callable[[Any], bool]:
    return lambda found: found.kind == "code" and any(text in line for line in found.lines)


BASE = World()
PLANTED: dict[str, tuple[World, Callable[[Any], bool]]] = {
    "a learning rate thirty times as high": (
        replace(BASE, options={"lr": 3e-3}),
        planted("call", "update.optimizer.lr", "0.0001", "0.003"),
    ),
    "the option that says so": (replace(BASE, options={"lr": 3e-3}), planted("option", "lr", "0.0001", "0.003")),
    "another default of an option": (
        BASE.edited('unused: str = "plain"', 'unused: str = "fancy"'),
        planted("option", "unused", "plain", "fancy"),
    ),
    "the temperature": (BASE.edited("temperature=1.0", "temperature=0.7"), planted("call", "generate.sampling.temperature", "1.0", "0.7")),
    "top_p": (BASE.edited("top_p=1.0", "top_p=0.9"), planted("call", "sampling.top_p", "1.0", "0.9")),
    "the length limit": (BASE.edited("max_new_tokens=4", "max_new_tokens=6"), planted("call", "sampling.max_new_tokens", "4", "6")),
    "the size of a group": (BASE.edited("n=2", "n=4"), planted("call", "policy.generate.n", "2", "4")),
    "the mini-batch": (BASE.edited("minibatch_size=2", "minibatch_size=4"), planted("call", "update.minibatch_size", "2", "4")),
    "epochs": (BASE.edited("epochs=1", "epochs=2"), planted("call", "update.epochs", "1", "2")),
    "the loss": (BASE.edited("loss=ppo_clip(eps_high=0.28)", "loss=gspo()"), planted("call", "update.loss.name", "ppo_clip", "gspo")),
    "a bound of the loss": (BASE.edited("eps_high=0.28", "eps_high=0.2"), planted("call", "update.loss.options", "0.28", "0.2")),
    "the optimiser": (BASE.edited("AdamW(lr, betas=(0.9, 0.99))", "SGD(lr)"), planted("call", "optimizer.kind", "AdamW", "SGD")),
    "a beta of the optimiser": (BASE.edited("0.99", "0.95"), planted("call", "optimizer.betas", "0.99", "0.95")),
    "the reward's code": (BASE.edited('== "1"', '== "2"'), in_code('-    return float(shortened(sample.text) == "1")')),
    "the reward itself": (BASE.edited('== "1"', '== "2"'), planted("call", "score.function", "right", "right")),
    "code of a module beside the flow": (replace(BASE, judging=JUDGING.replace("[:1]", "[:2]")), in_code("+    return text[:2]")),
    "the data": (BASE.edited("range(10)", "range(5, 15)"), planted("call", "prompts.take.rows", "checksum", "checksum")),
    "the model": (replace(BASE, model="smollm2"), planted("model", "policy.path", "digits", "smollm2")),
    "staleness": (replace(BASE, options={"staleness": 1}), planted("option", "staleness", "0", "1")),
    "the seed": (replace(BASE, settings={"seed": 7}), planted("setting", "seed", "0", "7")),
    "determinism": (replace(BASE, settings={"deterministic": True}), planted("setting", "deterministic", "false", "true")),
    "how often checkpoints are written": (
        replace(BASE, settings={"checkpoint_steps": 5}),
        planted("setting", "checkpoint_steps", "null", "5"),
    ),
    "the placement": (
        replace(BASE, cluster=LAPTOP.model_copy(update={"placement": "split"})),
        planted("cluster", "placement", "time-shared", "split"),
    ),
    "a package's version": (replace(BASE, versions={"torch": "1.0"}), planted("version", "torch", ".", "1.0")),
    "the commit": (replace(BASE, commits=True), planted("code", "commit", "", "")),
}


def git(directory: Path, *words: str) -> None:
    who = ("-c", "user.name=tester", "-c", "user.email=tester@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=directory, check=True, capture_output=True)


def recorded(world: World, program: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files of a run's program, prepare the run, and write what it is."""
    program.mkdir(exist_ok=True)
    run_dir.mkdir()
    flow = world.flow.replace('/ "digits"', f'/ "{world.model}"')
    (program / "sorting.py").write_text(flow)
    (program / "judging.py").write_text(world.judging)
    if not (program / world.model).is_dir():
        shutil.copytree(FLOWS / "models" / "digits", program / world.model)
    if not (program / ".git").is_dir():
        git(program, "init", "-q")
        git(program, "add", ".")
        git(program, "commit", "-qm", "first")
    if world.commits:
        git(program, "commit", "-q", "--allow-empty", "-m", "second")
    monkeypatch.chdir(program)
    for name in ("judging", "m2flow_flow_sorting"):
        sys.modules.pop(name, None)
    for path in [one for one in sys.path if one.startswith(str(program.parent))]:
        sys.path.remove(path)
    import linecache

    linecache.clearcache()
    shutil.rmtree(program / "__pycache__", ignore_errors=True)
    real = provenance.versions()
    monkeypatch.setattr(provenance, "versions", lambda: {**real, **world.versions})
    run = Run(load_flow("sorting.py"), world.options, world.cluster, RunSettings.model_validate(world.settings), flow_file="sorting.py")
    run.prepare()
    run.write_config(run_dir)
    monkeypatch.setattr(provenance, "versions", lambda: real)
    return run_dir


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program"


@pytest.mark.parametrize("what", PLANTED)
def test_compare_finds(what: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, is_it = PLANTED[what]
    one = recorded(BASE, program, tmp_path / "one", monkeypatch)
    other = recorded(world, program, tmp_path / "other", monkeypatch)
    configs = [json.loads((run / "config.json").read_text()) for run in (one, other)]
    found = differences(*configs)
    assert [one for one in found if is_it(one)], [str(one) for one in found]
    assert len(found) <= 9, [str(one) for one in found]  # It is not lost among others.
    done = CliRunner().invoke(cli, ["compare", str(one), str(other)])
    assert done.exit_code == 0, done.output
    first, said = done.output.splitlines()[0], done.output
    assert first == "asked for differently"
    assert all(str(one) in said for one in found)


def test_two_runs_of_the_same_program_differ_in_nothing(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [recorded(BASE, program, tmp_path / name, monkeypatch) for name in ("one", "other")]
    assert differences(*(json.loads((run / "config.json").read_text()) for run in runs)) == []
    done = CliRunner().invoke(cli, ["compare", *map(str, runs)])
    assert done.output.startswith("asked for the same"), done.output


def test_the_configuration_holds_what_the_run_came_to(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(replace(BASE, options={"lr": 0.5}), program, tmp_path / "one", monkeypatch)
    config = json.loads((run / "config.json").read_text())
    resolved = config["resolved"]
    assert config["options"] == {"lr": 0.5}  # What was given; and what it came to:
    assert resolved["options"] == {"num_steps": 2, "lr": 0.5, "staleness": 0, "unused": "plain"}
    assert (
        resolved["calls"]["policy.update"]["optimizer"] | {"lr": 0.5, "weight_decay": 0.0}
        == resolved["calls"]["policy.update"]["optimizer"]
    )
    assert {source["name"]: source["text"] for source in resolved["sources"]} == {"sorting.py": FLOW, "judging.py": JUDGING}
    assert resolved["git"]["is_dirty"] is False
    assert resolved["versions"]["torch"]
    assert read_config(run).options == {"lr": 0.5}
    given = parameters_of(run)
    assert given["lr"] == 0.5
    assert given["unused"] == "plain"
    assert given["calls.policy.generate.sampling.temperature"] == 1.0


def test_runs_made_before_are_compared_by_what_they_hold(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (recorded(BASE, program, tmp_path / name, monkeypatch) for name in ("old", "new"))
    config = json.loads((old / "config.json").read_text())
    del config["resolved"], config["name"]
    config["settings"]["seed"] = 3
    (old / "config.json").write_text(json.dumps(config))
    found = differences(config, json.loads((new / "config.json").read_text()))
    assert "settings.seed: 3 -> 0" in [str(one) for one in found]
    assert all(one.kind in ("setting", "option", "code") for one in found)
    assert parameters_of(old)["seed"] == 3


def _learnt(run_dir: Path, seed: int, level: float) -> Path:
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"flow": "f.py", "options": {}, "settings": {"seed": seed}, "cluster": {}}))
    with MetricsWriter(run_dir, tensorboard=False) as writer:
        for step in range(20):
            writer.write(step, {"reward": level + 0.01 * seed, "entropy": 1.0 + 0.1 * seed, "loss": 0.0})
    return run_dir


def test_the_learning_has_confidence_over_seeds(tmp_path: Path) -> None:
    ones = [_learnt(tmp_path / f"a{seed}", seed, 0.5) for seed in range(3)]
    others = [_learnt(tmp_path / f"b{seed}", seed, 0.8) for seed in range(3)]
    done = CliRunner().invoke(cli, ["compare", ",".join(map(str, ones)), ",".join(map(str, others))])
    assert done.exit_code == 0, done.output
    assert "asked for the same" in done.output  # Seeds of a side are not what differs between the sides.
    assert "reward: 0.51 \u00b1 0.025 -> 0.81 \u00b1 0.025  (+0.3 \u00b1 0.023)" in done.output
    assert "entropy: 1.1 \u00b1 0.25 -> 1.1 \u00b1 0.25" in done.output
    assert "within what seeds differ by" in done.output
    assert "loss" not in done.output.partition("learned")[2]
    single = CliRunner().invoke(cli, ["compare", str(ones[0]), str(others[0])])
    assert "How far seeds differ is not known" in single.output
