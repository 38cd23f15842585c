"""An eager run that repeats a planned run's decisions takes what recorded tools gave from its record, and asks the others again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
from one_thread import SteppedRun
from resumed_runs import fake_cluster

from m2flow import AdamW, Chat, Dataset, Policy, Sample, ToolCall, agent, flow, steps, tool
from m2flow.errors import OpError, SpecError
from m2flow.macro.flow import Flow
from m2flow.micro.records.ledger import read_decisions, read_samples
from m2flow.observe.metrics import read_metrics
from m2flow.runner.run import Run, Summary
from m2flow.samples import records_of
from m2flow.spec import RunSettings

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")

ROOT = Path(__file__).resolve().parents[2]
CALLED = "M2FLOW_TEST_CALLED"
"""Environment variable with the file that tools write to: what a function captures is a copy."""


def note(what: str) -> None:
    with open(os.environ[CALLED], "a") as file:
        file.write(f"{what}\n")


def called() -> list[str]:
    path = Path(os.environ[CALLED])
    return path.read_text().splitlines() if path.exists() else []


@tool
async def ticket(what: str) -> str:
    """Take a number that nobody had."""
    note(what)
    return uuid.uuid4().hex


@tool(replay="pure")
async def louder(what: str) -> str:
    """Say it louder."""
    note("louder")
    return what.upper()


@tool(replay="pure")
async def claims_to_be_pure(what: str) -> str:
    """Give something else each time."""
    return uuid.uuid4().hex


@agent
async def customer(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), tools=[ticket, louder], max_tokens=6)
    for number in range(2):
        calls = [ToolCall("ticket", {"what": f"{row.prompt} {chat.rng.random()} {at}"}) for at in range(2)]
        turn = await chat.reply([*calls, ToolCall("louder", {"what": f"{turn.text}{number}"})], max_tokens=6)
    return len(turn.text) / 10 + sum(map(ord, turn.text)) % 7


@agent
async def believer(chat: Chat, row: Sample) -> float:
    await chat.say(str(row.prompt), tools=[claims_to_be_pure], max_tokens=6)
    return float(len((await chat.reply([ToolCall("claims_to_be_pure", {"what": "a"})], max_tokens=6)).text))


def flow_of(agent: Callable[..., object], num_steps: int = 2, **options: Any) -> Flow:
    @flow
    def plays(prompt: str = "") -> None:
        policy, rows = Policy("fake", optimizer=AdamW(1e-3)), Dataset([{"prompt": f"{prompt}{at}?"} for at in range(16)], name="rows")
        for _ in steps(num_steps):
            episodes = policy.rollout(agent, rows.take(2), n=2, max_tokens=600, **options)
            policy.update(episodes, episodes.reward)

    return plays


@pytest.fixture(autouse=True)
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CALLED, str(tmp_path / "called"))


def planned(of: Flow, folder: Path) -> Summary:
    settings = RunSettings(runs_dir=str(folder / "planned"))
    return SteppedRun(of, {}, fake_cluster("split", workers=2), settings).execute()


def repeated(of: Flow, folder: Path, summary: Summary, **options: object) -> Summary:
    before = Path(summary.run_dir)
    settings = RunSettings(runs_dir=str(folder / "eager"), eager=True)
    return Run(of, options, fake_cluster("split"), settings, decisions=read_decisions(before), repeats=before).execute()


def tools_of(summary: Summary) -> list[dict[str, Any]]:
    return [records_of(row)[0]["tools"] for row, _ in read_samples(Path(summary.run_dir))]


def failures_of(summary: Summary) -> list[str]:
    return [str(row.ragged("failure").item(0)) for row, _ in read_samples(Path(summary.run_dir))]


def digests(summary: Summary) -> tuple[str, str]:
    return summary.samples_sha256, summary.weights_sha256


def test_a_recorded_tool_is_not_called_again_and_its_results_are_the_planned_runs(tmp_path):
    of = flow_of(customer)
    first = planned(of, tmp_path)
    before = called()
    tickets = [line for line in before if line != "louder"]
    assert len(tickets) == len(set(tickets)) == 2 * 2 * 2 * 4
    again = repeated(of, tmp_path, first)
    assert digests(again) == digests(first)
    assert tools_of(again) == tools_of(first)
    assert called()[len(before) :] == ["louder"] * (2 * 2 * 2 * 2), "pure tools are called anew, and no others"
    alone = Run(of, {}, fake_cluster("split"), RunSettings(runs_dir=str(tmp_path / "alone"), eager=True)).execute()
    assert alone.samples_sha256 != first.samples_sha256, "without the record other numbers are given"


def test_a_pure_tool_that_gives_something_else_ends_the_run_with_its_name_and_its_sample(tmp_path):
    of = flow_of(believer)
    first = planned(of, tmp_path)
    with pytest.raises(OpError, match=r"sample p\d/\d: the tool claims_to_be_pure gave '\w{32}', and '\w{32}' in the run") as raised:
        repeated(of, tmp_path, first)
    assert 'Declare it @tool(replay="recorded")' in raised.value.now


def test_a_record_of_another_flow_is_refused_where_a_tool_is_called_that_it_does_not_have(tmp_path):
    first = planned(flow_of(customer), tmp_path)
    with pytest.raises(SpecError, match=r"sample p\d/\d: the agent calls (\w+)\(.*, and in the record of decisions \1\("):
        repeated(flow_of(customer), tmp_path, first, prompt="x")
    with pytest.raises(SpecError, match=r"sample p\d/\d.*: the tool ticket is called, and the record of decisions has no such call"):
        repeated(flow_of(customer, num_steps=3), tmp_path, first)


@tool(on_error="fail")
async def breaks(what: str) -> str:
    """Fail every second time that it is called."""
    note(what)
    if len(called()) % 2:
        raise ValueError("out of order")
    return "well"


@agent
async def unlucky(chat: Chat, row: Sample) -> float:
    await chat.say(str(row.prompt), tools=[breaks], max_tokens=4)
    return float(len((await chat.reply([ToolCall("breaks", {"what": f"{chat.rng.random()}"})], max_tokens=4)).text))


@tool(replay="pure", timeout_s=1.0)
async def slow_at_first(what: str) -> str:
    """Take too long where it was never called before."""
    is_first = not called()
    note(what)
    if is_first:
        await asyncio.sleep(30)
    return "in time"


@agent
async def patient(chat: Chat, row: Sample) -> float:
    await chat.say(str(row.prompt), tools=[slow_at_first], max_tokens=4)
    return float(len((await chat.reply([ToolCall("slow_at_first", {"what": f"{chat.rng.random()}"})], max_tokens=4)).text))


def test_an_episode_that_failed_at_a_recorded_tool_fails_there_again_and_the_tool_is_not_called(tmp_path):
    of = flow_of(unlucky)
    first = planned(of, tmp_path)
    num_called = len(called())
    again = repeated(of, tmp_path, first)
    assert set(failures_of(first)) == {"", "tool_failed"}
    assert failures_of(again) == failures_of(first)
    assert digests(again) == digests(first)
    assert len(called()) == num_called
    logged = [read_metrics(Path(one.run_dir))["episodes/tool_failed"] for one in (first, again)]
    assert logged[0] == logged[1]


def test_that_a_pure_tool_took_too_long_was_decided_by_time_and_is_not_tried_again(tmp_path):
    of = flow_of(patient, num_steps=1)
    first = planned(of, tmp_path)
    assert sum(one["is_error"] for each in tools_of(first) for one in each.values()) == 1
    again = repeated(of, tmp_path, first)
    assert tools_of(again) == tools_of(first)
    assert digests(again) == digests(first)
    assert len(called()) == 4 + 3


class Box:
    """A resource that remembers what was put into it."""

    def __init__(self) -> None:
        self.held: list[str] = []

    async def __aenter__(self) -> Box:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@tool
async def put(what: str, box: Box) -> str:
    """Put something into the box."""
    note(what)
    box.held.append(what)
    return f"{len(box.held)} things"


@tool(replay="pure")
async def count(box: Box) -> str:
    """Count what is in the box."""
    return f"{len(box.held)} in all"


@agent
async def packer(chat: Chat, row: Sample) -> float:
    await chat.say(str(row.prompt), tools=[put, count], max_tokens=4)
    await chat.reply([ToolCall("put", {"what": f"{chat.rng.random()}"})], max_tokens=4)
    return float(len((await chat.reply([ToolCall("count", {})], max_tokens=4)).text))


@agent
async def looks_into_it(chat: Chat, row: Sample, box: Box) -> float:
    await packer.function(chat, row)  # type: ignore[misc]
    return float(sum(map(len, box.held)))


@pytest.mark.parametrize(("of", "times"), [(packer, 1), (looks_into_it, 2)])
def test_a_resource_is_filled_again_only_where_the_agent_is_given_it_too(tmp_path, of, times):
    whole = flow_of(of)
    first = planned(whole, tmp_path)
    lines = called()
    again = repeated(whole, tmp_path, first)
    assert failures_of(again) == [""] * 8
    assert digests(again) == digests(first)
    assert tools_of(again) == tools_of(first)
    assert len(called()) == times * len(lines)


@pytest.mark.slow
def test_a_planned_run_of_the_command_equals_the_eager_one_with_its_decisions(tmp_path):
    environment = {**os.environ, "M2FLOW_TEST_PAID": str(tmp_path / "paid"), "OMP_NUM_THREADS": "1", "M2FLOW_TEST_TICKETS": "1"}
    (tmp_path / "spec.yaml").write_text("rollout: {engine: fake, workers: 2}\ntrain: {engine: fake}\ndevice: cpu\ncores: 2\n")

    def run(*options: str) -> dict[str, Any]:
        flow = [str(ROOT / "tests" / "support" / "agent_run.py"), "--cluster", str(tmp_path / "spec.yaml"), "--effects"]
        words = [sys.executable, "-m", "m2flow", "run", *flow, "--json", "--quiet", "--runs-dir", str(tmp_path / "runs"), *options]
        done = programs.run(words, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    first = run()
    lines = (tmp_path / "paid").read_text()
    assert len(lines.splitlines()) > 100
    again = run("--eager", "--decisions", first["run_dir"])
    assert (again["samples_sha256"], again["weights_sha256"]) == (first["samples_sha256"], first["weights_sha256"])
    assert (tmp_path / "paid").read_text() == lines, "no tool was called a second time"
    assert run("--eager")["samples_sha256"] != first["samples_sha256"]
