"""Lanes of environments in real workers: played side by side, where they were played before, and elsewhere after a loss or a resume."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
from lane_flow import on_lanes

from m2flow.micro.records.ledger import read_incidents
from m2flow.spec import ClusterSpec, FunctionSpec
from m2flow.testing.world import run_eager

ROOT = Path(__file__).resolve().parents[2]
NUM_LANES, NUM_ENVS = 4, 8


class Lanes:
    """Runs of the flow in a directory, and what its environments noted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.notes = directory / "notes"
        self.notes.mkdir(parents=True)
        self._runs: list[subprocess.Popen[bytes]] = []

    def start(self, num_workers: int, *more: str, functions: str = "") -> subprocess.Popen[bytes]:
        """`functions`: of the cluster spec, where it is not only so many workers; so many have environments."""
        cluster = self.directory / f"{num_workers}.yaml"
        cluster.write_text(f"functions: {{{functions or f'workers: {num_workers}'}}}\n")
        flow = [] if "--resume" in more else [str(ROOT / "tests" / "support" / "lane_flow.py")]
        command = [sys.executable, "-m", "m2flow", "run", *flow, "--cluster", str(cluster), *more]
        command += [] if "--resume" in more else ["--runs-dir", str(self.directory / "runs")]
        environment = {**os.environ, "NOTES": str(self.notes), "TOGETHER": str(num_workers)}
        with (self.directory / "output").open("ab") as output:
            run = programs.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True)
        self._runs.append(run)
        return run

    def run(self, num_workers: int, *more: str) -> None:
        assert self.start(num_workers, *more).wait(280) == 0, (self.directory / "output").read_text()

    def end(self) -> None:
        for run in self._runs:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()

    @property
    def run_dir(self) -> Path:
        return next((self.directory / "runs").iterdir())

    def returns(self) -> list[float | None]:
        found = {}
        for path in self.directory.glob("runs/*/metrics.jsonl"):
            for one in [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]:
                if "episode_return" in one["values"]:
                    found[one["step"]] = one["values"]["episode_return"]
        return [found[step] for step in sorted(found)]

    def until_step(self, number: int) -> None:
        deadline = time.monotonic() + 200
        while len(self.returns()) < number:
            assert time.monotonic() < deadline, (self.directory / "output").read_text()
            time.sleep(0.05)

    def until_back(self) -> None:
        """Wait until a worker has been started again."""
        deadline = time.monotonic() + 100
        while "started again" not in [incident.kind for incident in read_incidents(self.run_dir)]:
            assert time.monotonic() < deadline, (self.directory / "output").read_text()
            time.sleep(0.1)

    def noted(self) -> dict[int, list[str]]:
        """What each process with environments has noted."""
        return {int(path.name): path.read_text().splitlines() for path in self.notes.iterdir() if path.name.isdigit()}

    def players(self) -> set[int]:
        """The processes that have begun episodes."""
        return {pid for pid, lines in self.noted().items() if any(line.startswith("began") for line in lines)}

    def begun(self) -> Counter[str]:
        """How often each episode was begun."""
        return Counter(line for lines in self.noted().values() for line in lines if line.startswith("began"))


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[Lanes]:
    found = Lanes(tmp_path)
    yield found
    found.end()


@pytest.fixture(scope="module")
def returns(tmp_path_factory: pytest.TempPathFactory) -> list[float | None]:
    """The returns of the program run call by call; None: no episode has ended yet."""
    directory = tmp_path_factory.mktemp("eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTES", str(directory))
        patch.setenv("TOGETHER", "1")
        answer = run_eager(on_lanes, {}, ClusterSpec(functions=FunctionSpec()))
    assert answer.error == "", answer.error
    found = [value for _, name, value in answer.logs if name == "episode_return"]
    assert len(set(map(str, found))) > 3, "they tell the steps apart"
    return [None if math.isnan(value) else value for value in found]


def test_two_workers_play_lanes_side_by_side_each_its_own_with_the_same_result(lanes: Lanes, returns: list[float | None]) -> None:
    lanes.run(2)
    assert lanes.returns() == returns
    assert len(lanes.players()) == 2
    assert set(lanes.begun().values()) == {1}, "nobody acted an episode again, since each lane stayed where its environments are"
    for pid in lanes.players():
        assert sum(line.startswith("made") for line in lanes.noted()[pid]) >= NUM_ENVS // 2


def test_lanes_of_a_worker_that_is_killed_are_acted_again_elsewhere(lanes: Lanes, returns: list[float | None]) -> None:
    (lanes.notes / "held").write_text("3")
    run = lanes.start(2)
    lanes.until_step(3)
    before, killed = lanes.begun(), min(lanes.players())
    os.kill(killed, signal.SIGKILL)
    lanes.until_back()
    (lanes.notes / "held").unlink()
    assert run.wait(280) == 0, (lanes.directory / "output").read_text()
    assert lanes.returns() == returns
    again = [line for line, times in lanes.begun().items() if times > 1]
    assert len(again) == 2 * NUM_ENVS // 2, "of its lanes, the running episodes, and the first ones, with which environments are made"
    own = {line for line in lanes.noted()[killed] if line.startswith("began")}
    assert own.issuperset(again)
    assert set(before.values()) == {1}


def test_a_run_resumes_with_another_number_of_workers_to_the_same_result(lanes: Lanes, returns: list[float | None]) -> None:
    (lanes.notes / "held").write_text("3")
    run = lanes.start(2)
    lanes.until_step(3)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    (lanes.notes / "held").unlink()
    lanes.run(3, "--resume", str(lanes.run_dir))
    assert lanes.returns() == returns
    again = [line for line, times in lanes.begun().items() if times > 1]
    assert len(again) == 2 * NUM_ENVS, "every running episode, and the first ones, with which environments are made"
    assert set(lanes.begun().values()) <= {1, 2}


def test_lanes_of_a_simulator_beside_an_actor_are_stepped_again_elsewhere_and_resumed(lanes: Lanes, returns: list[float | None]) -> None:
    """Three roles with processes of their own: one with environments is killed in the middle of pieces, and later the whole run."""
    (lanes.notes / "held").write_text("4")
    run = lanes.start(2, "--by-roles", functions="workers: 1, roles: {actor: 1, simulator: 2}")
    lanes.until_step(2)
    assert len(lanes.players()) == 2, "those of the simulator alone"
    os.kill(min(lanes.players()), signal.SIGKILL)
    lanes.until_back()
    lanes.until_step(4)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    (lanes.notes / "held").unlink()
    lanes.run(1, "--resume", str(lanes.run_dir))
    assert lanes.returns() == returns
