"""Runs that are killed (SIGKILL) and go on with another trainer, or with the same one in another layout, until they are through."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from entry_points import write_entry_points
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests" / "support"
MEGATRON = os.environ.get("M2FLOW_MEGATRON_PYTHON", str(ROOT / ".venv-megatron" / "bin" / "python"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Trainer(NamedTuple):
    engine: str
    ranks: int
    options: dict[str, Any]


ALONE = Trainer("embedded", 1, {})


class Runs:
    """`m2flow run` of a flow of `moved_run` in a directory, by an interpreter."""

    def __init__(self, place: Path, python: str = sys.executable, flow: str = "moves") -> None:
        self._place, self._python, self._flow = place, python, flow
        (place / "site").mkdir(parents=True)
        write_entry_points(place / "site", "megatron_on_cpu", {"megatron-cpu": "megatron_on_cpu:INFO"})

    def go(
        self, trainer: Trainer, killed_in: int | None = None, *, hangs: bool = False, settings: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Begin the run with this trainer, or go on with it; it is killed in a step, or a rank hangs, if that is said."""
        train = {"engine": trainer.engine, "ranks": trainer.ranks, "threads": 1, "options": trainer.options, "token_budget": 400}
        cluster = {"placement": "split", "device": "cpu", "cores": 2, "rollout": {"threads": 1}, "train": train}
        (self._place / "cluster.yaml").write_text(yaml.safe_dump(cluster))
        path = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
        if self._python == MEGATRON:
            path.insert(0, str(self._place / "site"))
        given = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        if killed_in is not None:
            (self._place / "kills").write_text("")
            given |= {"KILLED_IN": str(killed_in), "M2FLOW_TEST_KILLS": str(self._place / "kills")}
        if hangs:
            (self._place / "kills").write_text("")
            given |= {"M2FLOW_TEST_RUNS": str(self._place / "runs"), "M2FLOW_TEST_KILLS": str(self._place / "kills")}
        how = [
            f"tests/support/moved_run.py:{self._flow}",
            "--deterministic",
            "--checkpoint-every",
            "1",
            "--runs-dir",
            str(self._place / "runs"),
        ]
        if (self._place / "runs").exists():
            how = ["--resume", str(self.run_dir)]
        command = [self._python, "-m", "m2flow", "run", *how, *settings, "--cluster", str(self._place / "cluster.yaml"), "--json"]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, timeout=280, check=False)

    @property
    def run_dir(self) -> Path:
        (found,) = (self._place / "runs").iterdir()
        return found

    def weights(self) -> dict[str, Any]:
        return load_file(self.run_dir / "checkpoints" / "final" / "policy" / "model.safetensors")


def check_killed_and_moved(trainers: Sequence[Trainer], place: Path, python: str = sys.executable) -> None:
    """Kill a run under each trainer but the last, in one step after the other: it ends as one that the embedded trainer makes alone."""
    moved, alone = Runs(place / "moved", python), Runs(place / "alone", python)
    for step, trainer in enumerate(trainers, 2):
        is_last = trainer is trainers[-1]
        done = moved.go(trainer, None if is_last else step)
        assert done.returncode == (0 if is_last else -9), done.stderr
        assert is_last or any((moved.run_dir / "checkpoints").glob("step-*"))
    found = json.loads(done.stdout.splitlines()[-1])
    undisturbed = alone.go(ALONE)
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = json.loads(undisturbed.stdout.splitlines()[-1])
    for name in ("steps", "samples", "tokens", "samples_sha256"):
        assert found[name] == expected[name], name
    weights, known = moved.weights(), alone.weights()
    assert set(weights) == set(known)
    assert max(float(np.abs(weights[name] - known[name]).max()) for name in known) < 1e-5


def test_a_run_killed_under_one_trainer_and_layout_goes_on_under_others(tmp_path: Path) -> None:
    check_killed_and_moved([Trainer("fsdp", 2, {"pp": 2}), ALONE, Trainer("fsdp", 2, {"tp": 2})], tmp_path)


def test_a_run_killed_under_stages_that_write_their_parts_goes_on_under_the_embedded_trainer(tmp_path: Path) -> None:
    check_killed_and_moved([Trainer("fsdp", 2, {"pp": 2, "spread_checkpoints": True}), ALONE], tmp_path)


@pytest.mark.skipif(not Path(MEGATRON).exists(), reason="megatron: needs .venv-megatron: make megatron-cpu")
def test_a_run_killed_under_a_layout_of_megatron_goes_on_under_another_and_under_fsdp(tmp_path: Path) -> None:
    trainers = [Trainer("megatron-cpu", 2, {"tp": 2}), Trainer("megatron-cpu", 2, {"pp": 2}), Trainer("fsdp", 2, {"pp": 2})]
    check_killed_and_moved(trainers, tmp_path, MEGATRON)


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        (
            {"collective_timeout_s": 6.0},
            [],
            r"rank 1 of this trainer hangs: accumulate, forward pass, \S+, for \d+ s, in hangs \(moved_run.py:\d+\); rank 0 waited for it",
        ),
        (
            {},
            ["--setting", "turn_limit_s=25"],
            r"was at one turn for \d+ s \(rank 0 is at accumulate, .*, where it waits for others; "
            r"rank 1 is at accumulate, forward pass, \S+, for \d+ s, in hangs \(moved_run.py:\d+\)\)",
        ),
    ],
    ids=["in a collective", "in a turn"],
)
def test_a_run_one_rank_of_whose_trainer_hangs_says_where_and_goes_on_to_the_same_end(
    options: dict[str, Any], settings: list[str], said: str, tmp_path: Path
) -> None:
    """Whichever is over first: how long ranks wait for each other, or how long a worker may be at one thing."""
    trainer = Trainer("fsdp", 2, options)
    found = []
    for name in ("hangs", "alone"):
        runs = Runs(tmp_path / name, flow="stays")
        done = runs.go(trainer, hangs=name == "hangs", settings=settings)
        assert done.returncode == 0, done.stderr
        found.append((json.loads(done.stdout.splitlines()[-1]), done.stderr))
    assert re.search(said, found[0][1]), found[0][1][-3000:]
    assert not re.search(said, found[1][1])
    for name in ("steps", "samples", "tokens", "samples_sha256", "weights_sha256"):
        assert found[0][0][name] == found[1][0][name], name
