"""A plan file says what it is of: it can be simulated by itself, and says so when its flow is gone or another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from m2flow.cli.main import cli

SOURCE = """
from m2flow import Dataset, Policy, Reward, flow, steps

def judged(sample):
    return float(sample.num_tokens)

@flow
def tiny(batch: int = 3, data: str = ""):
    policy, judge, prompts = Policy("fake"), Reward(judged), Dataset([{"prompt": str(i)} for i in range(99)])
    for step in steps(2):
        responses = policy.generate(prompts.take(batch), n=2, max_new_tokens=2048)
        policy.update(responses, judge.score(responses))
"""
CLUSTER = """
name: two
pools: {main: {device: h100, devices_per_node: 2}}
rollout: {engine: sglang}
train: {engine: deepspeed}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a plan was made: for a batch of 12, on a cluster of two GPUs, with lengths of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(SOURCE)
    (tmp_path / "two.yaml").write_text(CLUSTER)
    said = ["plan", "tiny.py", "--batch", "12", "--cluster", "two.yaml", "--shape", "policy=Qwen2.5-0.5B", "--out", "plan.json"]
    ok(*said, "--lengths", "lognormal:median=900,sigma=0.1")
    (tmp_path / "two.yaml").unlink()
    return tmp_path


def ok(*args: str) -> str:
    done = CliRunner().invoke(cli, list(args))
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def refused(*args: str) -> str:
    done = CliRunner().invoke(cli, list(args))
    assert done.exit_code in (1, 2)
    return str(done.output)


def makespan_s(*args: str) -> float:
    (step,) = json.loads(ok("simulate", *args, "--json"))["steps"]
    return float(step["makespan_s"])


def test_a_plan_is_simulated_where_it_was_made_with_all_that_it_was_made_of(place, monkeypatch):
    said = ok("simulate", "plan.json")
    assert "tiny on two" in said
    assert "2 devices" in said
    assert "median 900" in said
    assert makespan_s("plan.json") == makespan_s("tiny.py", "--plan", "plan.json", "--batch", "12", *on_cluster(place), *_LENGTHS)
    (elsewhere := place / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    said = refused("simulate", "../plan.json")
    assert f"is of the flow tiny.py in {place}, and there is no such file here" in said
    assert f"cd {place}" in said


_LENGTHS = ("--lengths", "lognormal:median=900,sigma=0.1")


def on_cluster(place: Path) -> tuple[str, ...]:
    (place / "again.yaml").write_text(CLUSTER)
    return "--cluster", "again.yaml", "--shape", "policy=Qwen2.5-0.5B"


def test_what_the_command_line_says_counts_instead(place):
    assert "median 50" in ok("simulate", "plan.json", "--lengths", "lognormal:median=50,sigma=0.1")
    assert makespan_s("plan.json", "--batch", "48") > 1.5 * makespan_s("plan.json")


def test_a_flow_that_is_gone_or_changed_is_said_with_what_to_do(place):
    changed = SOURCE.replace("max_new_tokens=2048", "max_new_tokens=2047")
    (place / "tiny.py").write_text(changed)
    said = refused("simulate", "plan.json")
    assert "tiny.py has changed since the plan plan.json" in said
    assert "m2flow plan tiny.py --out plan.json" in said
    (place / "tiny.py").unlink()
    said = refused("simulate", "plan.json")
    assert "plan.json is of the flow tiny.py, and there is no such file" in said
    assert "m2flow simulate FLOW --plan plan.json" in said


def test_a_file_that_does_not_say_what_it_is_of_is_refused(place):
    document = json.loads((place / "plan.json").read_text())
    origin = document.pop("of")
    (place / "bare.json").write_text(json.dumps(document))
    assert "does not say which flow it is of" in refused("simulate", "bare.json")
    (place / "half.json").write_text(json.dumps({**document, "of": {**origin, "cluster": {"nam": "x"}}}))
    assert "nam" in refused("simulate", "half.json")
    assert "can't be read" in refused("simulate", "none.json")
    assert "--plan gives another one" in refused("simulate", "plan.json", "--plan", "bare.json")
    assert "tiny on two" in ok("simulate", "tiny.py", "--plan", "bare.json", "--batch", "12", *on_cluster(place))


def test_the_plan_in_a_runs_directory_is_of_what_the_run_was_of(place):
    (place / "fake.yaml").write_text(
        "cores: 2\ndevice: cpu\nrollout: {engine: fake}\ntrain: {engine: fake}\nshapes: {policy: Qwen2.5-0.5B}\n"
    )
    ok("run", "tiny.py", "--batch", "4", "--cluster", "fake.yaml", "--quiet")
    (plan_file,) = Path("runs").glob("*/plan.json")
    assert "tiny on" in ok("simulate", str(plan_file), *_LENGTHS)


def test_a_plan_is_checked_by_itself_with_the_cluster_that_it_was_made_for(place):
    assert "plan.json is a plan of this flow on two." in ok("plan", "--check", "plan.json")
    assert ok("plan", "plan.json") == ok("plan", "--check=plan.json")
    document = json.loads((place / "plan.json").read_text())
    (update,) = (stage for stage in document["stages"] if stage["call"] == "policy.update")
    update["unit"] = "sample"
    (place / "edited.json").write_text(json.dumps(document))
    assert "policy.update: unit is 'sample' in the plan" in refused("plan", "--check", "edited.json")
    (place / "tiny.py").write_text(SOURCE.replace("max_new_tokens=2048", "max_new_tokens=2047"))
    assert "m2flow plan tiny.py --check plan.json" in refused("plan", "--check", "plan.json")
    assert "plan.json is a plan of this flow on again" in ok("plan", "tiny.py", "--check", "plan.json", "--batch", "12", *again(place))


def again(place: Path) -> tuple[str, ...]:
    (place / "again.yaml").write_text(CLUSTER.replace("name: two", "name: again"))
    return "--cluster", "again.yaml", "--shape", "policy=Qwen2.5-0.5B"


def test_a_plan_is_run_by_itself_with_the_options_and_the_seed_that_it_was_made_with(place):
    (place / "fake.yaml").write_text("name: fakes\ncores: 2\ndevice: cpu\nrollout: {engine: fake}\ntrain: {engine: fake}\n")
    ok("plan", "tiny.py", "--batch", "4", "--seed", "7", "--cluster", "fake.yaml", "--out", "mine.json")
    document = json.loads((place / "mine.json").read_text())
    (scoring,) = (stage for stage in document["stages"] if stage["call"] == "judged.score")
    scoring["chunk"] = 3
    (place / "mine.json").write_text(json.dumps(document))
    (place / "fake.yaml").unlink()
    by_plan = json.loads(ok("run", "--plan", "mine.json", "--quiet", "--json").splitlines()[-1])
    (place / "fake.yaml").write_text("name: fakes\ncores: 2\ndevice: cpu\nrollout: {engine: fake}\ntrain: {engine: fake}\n")
    by_flow = json.loads(
        ok("run", "tiny.py", "--batch", "4", "--seed", "7", "--cluster", "fake.yaml", "--quiet", "--json").splitlines()[-1]
    )
    assert by_plan["samples_sha256"] == by_flow["samples_sha256"]
    ran = json.loads((Path(by_plan["run_dir"]) / "plan.json").read_text())
    assert next(stage["chunk"] for stage in ran["stages"] if stage["call"] == "judged.score") == 3


def test_the_value_of_a_flows_option_is_not_taken_for_a_plan(place):
    assert "plan.json is a plan of this flow" in ok("plan", "--check", "plan.json", "--data", "other.json")
