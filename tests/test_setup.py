"""What `make` and continuous integration stand on: pins, a clear word about the interpreter, an account of what did not run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("requirements.lock", "requirements-full.lock")

SKIPPING = """
import pytest

@pytest.mark.gpu
def test_gpu(): pytest.importorskip("not_there")

@pytest.mark.slow
def test_slow(): pass

def test_wants_an_extra(): pytest.importorskip("not_there")

def test_core(): pass
"""


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _pinned(lock: str) -> set[str]:
    return {_name(line) for line in (ROOT / lock).read_text().splitlines() if not line.startswith("#")}


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {_name(text) for text in project["dependencies"] + extras["dev"]} <= _pinned("requirements.lock")
    others = [text for name in extras if name not in ("sglang", "vllm", "all", "dev") for text in extras[name]]
    assert {_name(text) for text in others} <= set().union(*map(_pinned, (*LOCKS, "requirements-megatron-cpu.lock")))


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_one_exact_version_a_line_and_no_build_of_one_kind_of_machine(lock: str) -> None:
    lines = [line for line in (ROOT / lock).read_text().splitlines() if not line.startswith("#")]
    assert not [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert len({_name(line) for line in lines}) == len(lines)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("version", ["Python 3.9.2", "missing"])
def test_an_interpreter_that_is_too_old_or_missing_is_refused_in_words(tmp_path: Path, version: str) -> None:
    python = tmp_path / "python"
    if version != "missing":
        python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo {version}; exit; }}\nexit 1\n')
        python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    command = ["make", f"VENV={tmp_path}/venv", f"PYTHON={python}", "test"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"m2flow needs Python 3.11 or newer; {python} is {version}." in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("num_processes", ["0", "2"])
def test_what_was_skipped_is_named_with_its_reason_and_tried_again_in_the_rest(tmp_path: Path, num_processes: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n    slow\n")
    (tmp_path / "test_some.py").write_text(SKIPPING)
    (tmp_path / "test_whole_file.py").write_text('import pytest\npytest.importorskip("not_there")\ndef test_never(): pass\n')
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)

    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}

    def account(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", *options]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    core = account("-n", num_processes, "-m", "not slow and not gpu", "--write-skipped=core.tsv")
    assert "1 passed, 2 skipped" in core
    assert "did not run: slow (left to `make test-all`)" in core
    assert "did not run: some (could not import 'not_there'" in core

    rest = account("-n", num_processes, "--rest-of=core.tsv", "--write-skipped=rest.tsv")
    assert "1 passed" in rest
    lines = {line.partition(" (")[0] for line in (tmp_path / "rest.tsv").read_text().splitlines()}
    assert lines == {"did not run: gpu", "did not run: some", "did not run: whole_file"}

    late = account("-n", num_processes, "--rest-of=core.tsv", "--write-skipped=late.tsv", "--begin-until=1000000000")
    assert "passed" not in late
    assert "did not run: slow (the time for tests was over before it began)" in late
    assert len((tmp_path / "late.tsv").read_text().splitlines()) == len((tmp_path / "rest.tsv").read_text().splitlines()) + 1


def test_continuous_integration_runs_both_commands_in_one_make() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make .*\btest test-all$", script.read_text(), re.MULTILINE)
