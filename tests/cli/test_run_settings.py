"""`--setting NAME=VALUE` of `m2flow run`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from m2flow.cli.main import OWNS_PROCESS, cli
from m2flow.cli.run import SETTINGS, apply_settings
from m2flow.errors import OptionError
from m2flow.micro.worker.fork_server import engine_environment
from m2flow.spec import RunSettings

ROOT = Path(__file__).parents[2]
SPEC = "rollout: {engine: fake}\ntrain: {engine: fake}\ndevice: cpu\n"


def test_settings_are_taken_as_text_and_the_others_stay() -> None:
    before = RunSettings(seed=3, turn_limit_s=5.0, metrics_to=())
    found = apply_settings(before, ("stopped_after_s=4", "turn_limit_s=none", "flush_tokens=64"))
    assert found == before.model_copy(update={"stopped_after_s": 4.0, "turn_limit_s": None, "flush_tokens": 64})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("stopped_after=4", "there is no run setting 'stopped_after'\n  Did you mean 'stopped_after_s'?"),
        ("stopped_after_s", "no value"),
        ("seed=3", "seed has an option of its own\n  Give --seed."),
        ("flush_tokens=0", "flush_tokens: Input should be greater than or equal to 1"),
        ("hung_after_s=soon", "hung_after_s: Input should be a valid number"),
        ("hung_after_s=0.6", "hung_after_s: 0.6 is less than two beats of heartbeat_s, 0.5"),
    ],
)
def test_what_can_not_be_is_refused_by_name(given: str, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        apply_settings(RunSettings(), (given,))


def test_a_run_has_the_settings_that_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "fake.yaml").write_text(SPEC)
    command = [
        sys.executable,
        "-m",
        "m2flow",
        "run",
        "tests/support/resume_flow.py:dies",
        "--eager",
        "--cluster",
        str(tmp_path / "fake.yaml"),
    ]
    given = ["--setting", "flush_tokens=64", "--setting", "attempts=1", "--metrics-to", "none", "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (config,) = (tmp_path / "runs").glob("*/config.json")
    settings = json.loads(config.read_text())["settings"]
    assert (settings["flush_tokens"], settings["attempts"], settings["restarts"]) == (64, 1, 5)


@pytest.mark.parametrize("owner", [None, OWNS_PROCESS], ids=["another-program", "own-process"])
def test_a_process_with_torch_in_it_is_restarted_if_it_runs_nothing_but_the_command(
    owner: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch reads the number of threads when it is loaded, and a flow's imports may have loaded it by then."""
    (tmp_path / "fake.yaml").write_text(SPEC)
    restarted: list[str] = []
    for name, value in engine_environment(1, deterministic=True).items():
        monkeypatch.setenv(name, value)  # Set back at the end.
    monkeypatch.setenv("M2FLOW_RESTARTED", "")
    monkeypatch.delenv("M2FLOW_RESTARTED")
    assert torch.__name__ in sys.modules
    monkeypatch.setattr(os, "execv", lambda program, arguments: restarted.append(program))
    command = ["run", "tests/support/resume_flow.py:dies", "--eager", "--quiet", "--metrics-to", "none"]
    where = ["--cluster", str(tmp_path / "fake.yaml"), "--runs-dir", str(tmp_path / "runs")]
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(cli, [*command, *where], obj=owner)
    assert done.exit_code == 0, done.output
    assert restarted == ([] if owner is None else [sys.executable])


def test_a_run_whose_parent_ignores_that_children_end_waits_for_its_own(tmp_path: Path) -> None:
    (tmp_path / "fake.yaml").write_text(SPEC)
    command = [sys.executable, "-m", "m2flow", "run", "tests/support/resume_flow.py:dies", "--quiet", "--metrics-to", "none"]
    where = ["--cluster", str(tmp_path / "fake.yaml"), "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(
        [*command, *where],
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_help_of_run_names_every_setting() -> None:
    said = CliRunner().invoke(cli, ["run", "--help"], prog_name="m2flow", terminal_width=120).output
    assert not [name for name in SETTINGS if name not in said]
