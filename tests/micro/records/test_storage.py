"""Runs whose record is on storage that outlives the controller's host."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import programs
import pytest
from resumed_runs import SPLIT_YAML

from m2flow.errors import EngineError, SpecError
from m2flow.micro.records.audit import audit
from m2flow.micro.records.ledger import Ledger
from m2flow.micro.records.rundir import StorageCopier, fetch_run_dir, share, shared_dir

ROOT = Path(__file__).parents[3]
SAME = ("steps", "samples", "tokens", "reward_first", "reward_last", "samples_sha256", "weights_sha256")


def m2flow(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"M2FLOW_TEST_KILLS": str(tmp_path / "kills"), "M2FLOW_TEST_RUNS": str(tmp_path / "here")}
    command = [sys.executable, "-m", "m2flow", "run", *arguments, "--json"]
    return programs.run(command, cwd=ROOT, env=environment, timeout=240)


def begun(tmp_path: Path, killed_in: str, storage: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "cluster.yaml").write_text(SPLIT_YAML + storage)
    options = ["--cluster", str(tmp_path / "cluster.yaml"), "--checkpoint-every", "1", "--runs-dir", str(tmp_path / "here")]
    return m2flow(tmp_path, "tests/support/resume_flow.py:dies", "--killed-in", killed_in, *options)


def summary(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout.splitlines()[-1]))


@functools.cache
def undisturbed() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return summary(begun(Path(folder), "", ""))


@pytest.mark.slow
def test_a_run_outlives_the_disk_of_its_controller(tmp_path: Path) -> None:
    (tmp_path / "kills").write_text("")
    killed = begun(tmp_path, "apply", f"storage: {{directory: {tmp_path / 'storage'}, every_s: 0.2}}")
    assert killed.returncode == -9, killed.stderr
    shutil.rmtree(tmp_path / "here")
    (there,) = (tmp_path / "storage").iterdir()
    resumed = summary(m2flow(tmp_path, "--resume", str(there), "--runs-dir", str(tmp_path / "elsewhere")))
    assert {name: resumed[name] for name in SAME} == {name: undisturbed()[name] for name in SAME}
    assert Path(resumed["run_dir"]) == tmp_path / "elsewhere" / there.name
    for directory in (there, Path(resumed["run_dir"])):
        assert audit(directory).is_sound, str(audit(directory))
    assert (there / "trace.json.gz").exists(), "what is written at the end is there, too"
    assert (there / "checkpoints" / "final").is_dir()
    again = m2flow(tmp_path, "--resume", str(there))
    assert "there is nothing to resume" in again.stderr


def made(tmp_path: Path, every_s: float = 0.05) -> tuple[Path, Path]:
    """A run's directory and what it has on the storage."""
    run_dir = tmp_path / "runs" / "mine"
    for name in ("segments", "logs", "checkpoints", "trace"):
        (run_dir / name).mkdir(parents=True)
    (run_dir / "config.json").write_text("{}")
    share(run_dir, str(tmp_path / "storage"), every_s)
    return run_dir, tmp_path / "storage" / "mine"


def copying(run_dir: Path) -> StorageCopier:
    found = StorageCopier.of(run_dir)
    assert found is not None
    return found


def test_what_was_committed_is_there_and_what_was_not_is_not(tmp_path: Path) -> None:
    run_dir, there = made(tmp_path, every_s=3600.0)
    ledger = Ledger(run_dir / "ledger.db")
    ledger.open()
    one = copying(run_dir)
    ledger.incident("lost", "a", "committed")
    ledger.commit()
    ledger.incident("lost", "b", "not yet")
    (run_dir / "logs" / "a.log").write_text("one\n")
    one.copy()
    with sqlite3.connect(there / "ledger.db") as db:
        assert db.execute("SELECT worker FROM incidents").fetchall() == [("a",)]
    with (run_dir / "logs" / "a.log").open("a") as log:
        log.write("two\n")
    ledger.close()
    one.copy()
    with sqlite3.connect(there / "ledger.db") as db:
        assert db.execute("SELECT worker FROM incidents").fetchall() == [("a",), ("b",)]
    assert (there / "logs" / "a.log").read_text() == "one\ntwo\n"
    assert shared_dir(run_dir) == there
    one.close()


def test_who_was_cut_off_while_the_run_went_on_elsewhere_writes_no_more(tmp_path: Path) -> None:
    run_dir, there = made(tmp_path)
    before = copying(run_dir)
    before.copy()
    home = fetch_run_dir(there, str(tmp_path / "other"))
    assert home == tmp_path / "other" / "mine"
    assert (home / "config.json").read_text() == "{}"
    with pytest.raises(SpecError, match=f"was taken over by {home}"):
        before.copy()
    with pytest.raises(SpecError, match="was taken over"):
        fetch_run_dir(run_dir, str(tmp_path / "runs"))
    copying(home).copy()
    assert fetch_run_dir(there, str(tmp_path / "other")) == home  # Who wrote last goes on where it was.


def test_a_run_that_still_goes_on_is_not_taken_over(tmp_path: Path) -> None:
    run_dir, there = made(tmp_path, every_s=600.0)
    one, is_over = copying(run_dir), threading.Event()

    def write() -> None:
        while not is_over.is_set():
            one.copy()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with pytest.raises(SpecError, match=f"the run goes on in {run_dir}"):
            fetch_run_dir(there, str(tmp_path / "other"))
    finally:
        is_over.set()
        thread.join()
        one.close()
    assert fetch_run_dir(there, str(tmp_path / "other")) == tmp_path / "other" / "mine"


def test_a_storage_that_is_away_for_a_while_is_said_and_caught_up_with(tmp_path: Path) -> None:
    def heard(one: StorageCopier, kind: str) -> None:
        while kind not in [found for found, _ in one.news()]:
            pass

    run_dir, there = made(tmp_path, every_s=0.02)
    one = copying(run_dir)
    one.open()
    try:
        there.rename(tmp_path / "away")
        with pytest.raises(EngineError, match="Is the storage there"):
            one.copy()
        heard(one, "storage lost")
        (run_dir / "config.json").write_text('{"more": 1}')
        (tmp_path / "away").rename(there)
        heard(one, "storage back")
    finally:
        one.close()
    assert (there / "config.json").read_text() == '{"more": 1}'
