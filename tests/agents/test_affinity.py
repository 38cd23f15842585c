"""Samples that go on elsewhere than where an engine's prefix cache has their context are counted, by cause."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from one_thread import Images, SteppedRun, resumed
from played_episodes import shout
from resumed_runs import fake_cluster

from m2flow import Chat, Dataset, Policy, Sample, ToolCall, agent, flow, steps
from m2flow.agents.episodes import Episodes, EpisodeStart
from m2flow.cli.main import cli
from m2flow.micro.protocol.events import Command, Event, Moved, Send
from m2flow.micro.protocol.messages import Generate
from m2flow.micro.records.accounting import moves
from m2flow.micro.records.rundir import open_ledger
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.observe.metrics import TensorBoardWriter, metrics_path
from m2flow.recipe import AdamW
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings
from m2flow.testing import fakes
from m2flow.testing.random_programs import scheduled
from m2flow.testing.world import run_planned
from m2flow.viewer.sample_pages import sample_pages

pytest_plugins = ["small_runs"]
pytestmark = pytest.mark.usefixtures("quick")


@agent
async def caller(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), tools=[shout], max_tokens=30)
    for number in range(2):
        turn = await chat.reply([ToolCall("shout", {"text": f"{number}", "wait": 0.002})], max_tokens=30)
    return float(len(turn.text))


@flow
def calling(num_steps: int = 2) -> None:
    policy = Policy("fake", optimizer=AdamW(1e-3))
    rows = Dataset([{"prompt": f"{i * 7919}?"} for i in range(32)], name="rows")
    for _ in steps(num_steps):
        episodes = policy.rollout(caller, rows.take(4), n=2, max_tokens=400)
        policy.update(episodes, episodes.reward)


def moving(spec: ClusterSpec) -> ClusterSpec:
    return scheduled(spec, (f"{Path(fakes.__file__)}:Adversary:seed=1",))


def moves_on_disk(run_dir: Path) -> Counter[tuple[str, str]]:
    with closing(open_ledger(run_dir)) as db:
        return Counter(moves(db))


@pytest.fixture
def went_elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples that went on from tokens at another engine than before, as the engines' sides see it."""
    at: dict[int, Episodes] = {}
    found: list[int] = []
    begin = Episodes.begin

    def noted(self: Episodes, starts: Iterator[EpisodeStart]) -> None:
        starts = list(starts)
        for start in starts:
            packed = start.request.id
            if start.stopped is not None and at.get(packed) is not self:
                found.append(packed)
            at[packed] = self
        begin(self, starts)

    monkeypatch.setattr(Episodes, "begin", noted)
    return found


def test_episodes_that_a_policy_moves_are_counted_wherever_one_looks(tmp_path, monkeypatch, went_elsewhere):
    shown: list[float] = []
    add = TensorBoardWriter.add

    def noted(self: TensorBoardWriter, name: str, value: float, *when: float) -> None:
        shown.extend([value] * (name == "moved/load"))
        add(self, name, value, *when)  # type: ignore[arg-type]

    monkeypatch.setattr(TensorBoardWriter, "add", noted)
    run = SteppedRun(calling, {}, moving(fake_cluster("split", workers=3)), RunSettings(runs_dir=str(tmp_path)))
    run.execute()
    assert len(went_elsewhere) > 3
    found = moves_on_disk(run.run_dir)
    assert (found.total(), {cause for _, cause in found}) == (len(went_elsewhere), {"load"})
    assert {worker for worker, _ in found} <= {"rollout-0", "rollout-1", "rollout-2"}

    lines = [json.loads(line) for line in metrics_path(run.run_dir).read_text().splitlines()]
    assert sum(line.get("moved", {}).get("load", 0) for line in lines) == len(went_elsewhere)
    assert sum(shown) == len(went_elsewhere), "in TensorBoard"

    said = CliRunner().invoke(cli, ["analyze", str(run.run_dir)]).output
    assert f"went on away from their context: {len(went_elsewhere)} times (load {len(went_elsewhere)})" in said
    one, count = Counter(went_elsewhere).most_common(1)[0]
    (page,) = sample_pages(run.run_dir, [one])
    assert page.moved == ["load"] * count
    assert sum("away from its context (load)" in event for event in page.life) == count


WITH_ROOM = fake_cluster("split").model_copy(update={"rollout": RolloutSpec(engine="fake", workers=3, max_running=64)})
"""No turn waits for a slot, of which some would be had elsewhere."""


def test_what_stays_where_it_is_moves_nowhere(tmp_path, went_elsewhere):
    run = SteppedRun(calling, {}, WITH_ROOM, RunSettings(runs_dir=str(tmp_path)))
    run.execute()
    assert (moves_on_disk(run.run_dir), went_elsewhere) == (Counter(), [])
    assert "away from" not in CliRunner().invoke(cli, ["analyze", str(run.run_dir)]).output
    assert all("moved" not in json.loads(line) for line in metrics_path(run.run_dir).read_text().splitlines())


def test_episodes_of_a_process_that_is_gone_are_counted_as_such(tmp_path, monkeypatch, went_elsewhere):
    told: list[Moved] = []
    going_on: list[int] = []
    handle = Scheduler.handle

    def noted(self: Scheduler, *events: Event) -> list[Command]:
        commands = handle(self, *events)
        told.extend(command for command in commands if isinstance(command, Moved))
        sent = [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, Generate)]
        going_on.extend(row for task in sent if task.aborted_by >= 0 for row in task.ids)
        return commands

    monkeypatch.setattr(Scheduler, "handle", noted)
    answers = [run_planned(calling, {}, WITH_ROOM, order_seed=seed, num_losses=2) for seed in range(8)]
    assert not any(answer.error for answer in answers)
    assert {one.cause for one in told} == {"gone"}
    assert Counter(row for one in told for row in one.ids) == Counter(going_on), "they were stopped by nothing else"
    assert Counter(went_elsewhere) <= Counter(going_on), "a process may die before it has begun"
    assert len(went_elsewhere) > 3


def test_what_an_earlier_attempt_at_the_run_had_begun_is_counted_as_gone(tmp_path):
    spec, settings = fake_cluster("split", workers=2), RunSettings(runs_dir=str(tmp_path / "runs"))
    images = Images(tmp_path / "images")
    images.run = SteppedRun(calling, {}, spec, settings, hook=images.take)
    images.run.execute()
    found = Counter[str]()
    for image in images.paths[:: max(len(images.paths) // 8, 1)]:
        resumed(calling, {}, spec, settings, image)
        found.update(cause for _, cause in moves_on_disk(image))
    # An instance that has none yet when another is given several may get one of those that wait there, which time decides.
    assert "gone" in found
    assert set(found) <= {"gone", "load"}
