"""`m2flow rescore`: the samples of a run are judged anew as a flow would judge them, and nothing is generated or changed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_clusters import FAKES

from m2flow import Chat, Dataset, Policy, Reward, Sample, agent, flow, open_run, steps
from m2flow.cli.main import cli
from m2flow.errors import FlowLoadError, OpError, OptionError
from m2flow.macro.flow import load_function
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.runner.run import Run
from m2flow.runs.opened import rescore, summed
from m2flow.spec import RunSettings

OWN = """
from dataclasses import dataclass

def half(sample):
    return {"reward": len(sample.text) / 2, "chars": len(sample.text)}

def right(sample):
    return float(sample.answer.endswith(sample.prompt_text))

def picky(sample):
    if len(sample.text) % 2:
        raise ValueError("odd")
    return 1.0

def unsure(sample):
    return float("nan")

class Strict:
    def __call__(self, sample):
        return 0.0

class Needs:
    def __init__(self, what):
        pass
"""


def length(sample: Sample) -> float:
    return float(len(sample.text))


@agent
async def wordy(chat: Chat, row: Sample) -> float:
    await chat.say(row.prompt, max_tokens=3)
    if int(row.prompt[0]) % 2:
        raise RuntimeError("a bug")
    await chat.say("and?", max_tokens=3)
    return 0.5


def num_turns(sample: Sample) -> float:
    return float(len(sample.episode["turns"]))


@flow
def small() -> None:
    policy, reward = Policy("fake"), Reward(length)
    prompts = Dataset([{"prompt": f"{i}=", "answer": f"is {i}="} for i in range(9)], shuffle=False)
    for _ in steps(2):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=6)
        policy.update(responses, reward.score(responses))
    policy.generate(prompts.take(1), n=2, max_new_tokens=6)
    episodes = policy.rollout(wordy, prompts.take(2), n=2, max_tokens=64, max_turns=3)
    policy.update(episodes, episodes.reward)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    return Path(Run(small, {}, FAKES, RunSettings(runs_dir=str(runs), eager=True)).execute().run_dir)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_each_sample_is_judged_by_what_the_run_knew_of_it(run_dir: Path, own: Path) -> None:
    found = list(rescore(run_dir, load_function(f"{own}:half"), where="call like '%generate'"))
    with SampleQuery(run_dir) as query:
        entries = [entry for entry in query.entries() if entry.call.endswith("generate")]
    assert [one.sample for one in found] == [entry.sample for entry in entries]
    assert [one.now for one in found] == [len(entry.response_text) / 2 for entry in entries]
    assert [one.before for one in found] == [entry.reward for entry in entries]
    assert [one.parts for one in found] == [{"chars": float(len(entry.response_text))} for entry in entries]
    assert all(one.now == 1.0 for one in rescore(run_dir, load_function(f"{own}:right"), where="call like '%generate'"))


def test_the_function_that_a_run_had_gives_what_the_run_recorded(run_dir: Path) -> None:
    found = list(rescore(run_dir, length, where="reward is not null and call like '%generate'"))
    assert len(found) == 12
    assert all(one.before == one.now for one in found)
    assert [one.sample for one in rescore(run_dir, length, limit=4)] == [one.sample for one in found[:4]]


def test_episodes_are_judged_by_their_turns_and_those_that_failed_are_not(run_dir: Path) -> None:
    found = list(rescore(run_dir, num_turns, where="call like '%rollout'"))
    assert [one.now for one in found] == [2.0, 2.0]
    assert [one.before for one in found] == [0.5, 0.5]


def test_what_fails_is_an_error_or_the_reward_that_is_asked_for(run_dir: Path, own: Path) -> None:
    with pytest.raises(OpError, match="picky raised ValueError"):
        list(rescore(run_dir, load_function(f"{own}:picky")))
    with pytest.raises(OpError, match="unsure"):
        list(rescore(run_dir, load_function(f"{own}:unsure")))
    found = list(rescore(run_dir, load_function(f"{own}:picky"), on_error=-1.0))
    assert {one.now for one in found} == {1.0, -1.0}
    assert all(one.parts == {"raised": 1.0} for one in found if one.now < 0)


def test_the_command_compares_and_writes(run_dir: Path, own: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".db-shm"}
    told = CliRunner().invoke(cli, ["rescore", str(run_dir), f"{own}:half", "--where", "call like '%generate'"])
    assert told.exit_code == 0, told.output
    assert "14 samples" in told.output
    assert "2 had no reward before" in told.output
    lower = sum(one.change < 0 for one in rescore(run_dir, load_function(f"{own}:half")) if one.sample[:2] != "8/")
    assert f"{lower} lower; the two correlate by 1.000" in told.output
    wrote = CliRunner().invoke(cli, ["rescore", str(run_dir), f"{own}:Strict", "--out", str(tmp_path / "judged.jsonl")])
    assert wrote.exit_code == 0, wrote.output
    lines = [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    assert {line["now"] for line in lines} == {0.0}
    asked = CliRunner().invoke(cli, ["rescore", str(run_dir), f"{own}:Strict", "--json", "--limit", "2"])
    assert [json.loads(line)["sample"] for line in asked.output.splitlines()] == [line["sample"] for line in lines[:2]]
    assert {path: path.stat().st_mtime_ns for path in before} == before, "the run is left as it is"


def test_what_can_not_be_judged_is_said(run_dir: Path, own: Path) -> None:
    none = CliRunner().invoke(cli, ["rescore", str(run_dir), f"{own}:half", "--where", "step = 99"])
    assert none.exit_code == 2
    assert "has no samples where step = 99" in none.output
    with pytest.raises(OptionError, match="condition"):
        list(rescore(run_dir, length, where="nothing = 1"))
    for target, message in {
        f"{own}:missing": "no function 'missing'; it has .*half, right",
        f"{own}:Needs": "can't be made without arguments",
        f"{own}": "names no function",
        f"{own.parent}/no.py:half": "there is no file",
        "no_such_module:half": "can't be imported",
    }.items():
        with pytest.raises(FlowLoadError, match=message):
            load_function(target)


def test_a_run_in_python_gives_a_table(run_dir: Path) -> None:
    pytest.importorskip("pandas")
    table = open_run(run_dir).rescore(length, where="call like '%generate'")
    assert list(table.columns) == ["sample", "step", "before", "now"]
    assert (table["before"].dropna() == table["now"][: len(table["before"].dropna())]).all()


def test_sums_without_a_reward_before_are_no_numbers() -> None:
    assert math.isnan(summed([]).before)
