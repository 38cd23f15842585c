"""What `make` and continuous integration stand on: pins, a clear word about the interpreter, an account of what did not run."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import programs
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
    done = _make(f"VENV={tmp_path}/venv", f"PYTHON={python}", "test")
    assert done.returncode != 0
    assert f"m2flow needs Python 3.11 or newer; {python} is {version}." in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_what_make_starts_keeps_the_modules_that_it_compiled(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("include Makefile\nprobe:\n\t@$(PYTHON) -c 'import sys; print(sys.dont_write_bytecode)'\n")
    done = _make("-f", str(tmp_path / "probe"), f"PYTHON={sys.executable}", "probe", PYTHONDONTWRITEBYTECODE="1")
    assert (done.stdout, done.returncode) == ("False\n", 0)


def _make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell, not from the make that runs these tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("num_processes", ["0", "2"])
def test_what_was_skipped_is_named_with_its_reason_and_tried_again_in_the_rest(tmp_path: Path, num_processes: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n    slow\n")
    (tmp_path / "test_some.py").write_text(SKIPPING)
    (tmp_path / "test_whole_file.py").write_text('import pytest\npytest.importorskip("not_there")\ndef test_never(): pass\n')
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)

    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTEST_DEBUG_TEMPROOT"] = str(tmp_path)  # It looks through directories of others, ours among them, for old ones.

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


SPENDING = """
import subprocess, sys, time

SPEND = "import time\\nwhile time.process_time() < 0.4: pass"

def test_spends():
    until = time.process_time() + 0.4
    while time.process_time() < until: pass

def test_starts_one_that_spends(): subprocess.run([sys.executable, "-c", SPEND], check=True)

def test_sleeps(): time.sleep(0.5)
"""


@pytest.mark.parametrize("num_processes", ["0", "2"])
def test_the_cpu_time_of_each_test_is_written_with_that_of_its_children(tmp_path: Path, num_processes: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(SPENDING)
    for name in ("conftest.py", "support/cpu_times.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", "-n", num_processes, "--cpu-times=times.tsv"]
    environment = {**os.environ, "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert re.search(r"\d s of CPU time; most by\n", said)
    lines = [line.split("\t") for line in (tmp_path / "times.tsv").read_text().splitlines()]
    assert len([line for line in lines if line[2] == "collection"]) == max(1, int(num_processes))
    assert len(lines) == 3 * len(("setup", "call", "teardown")) + max(1, int(num_processes))
    calls = {node.partition("::test_")[2]: float(cpu) for cpu, _, phase, node in lines if phase == "call"}
    assert calls["spends"] >= 0.39
    assert calls["starts_one_that_spends"] >= 0.35
    assert calls["sleeps"] < 0.3


PROGRAM = """
import atexit, os, signal, sys, threading, time

print(sys.argv, sys.path[0], __name__, os.getcwd(), os.environ.get("OF_TESTS"), os.getsid(0) == os.getpid(), sys.stdout.isatty())
print([line.strip() for line in sys.stdin], os.getppid() == int(os.environ["ASKED_BY"]))
atexit.register(lambda: print("at exit", flush=True))
threading.Thread(target=lambda: (time.sleep(0.05), print("last thread"))).start()
how = sys.argv[1]
if how == "raises":
    raise LookupError("of the program")
if how == "killed":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
if how == "interrupted":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # What a shell starts in the background ignores it.
    signal.raise_signal(signal.SIGINT)  # Taken by this thread, before the next line.
sys.exit({"ends": None, "status": 3, "says": "said at the end"}[how])
"""


@pytest.mark.parametrize("how", ["ends", "status", "says", "raises", "killed", "interrupted"])
def test_a_program_that_is_forked_does_what_one_does_that_is_started(tmp_path: Path, how: str) -> None:
    """Tests that start m2flow by `programs` say the same of it as those that start an interpreter."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "OF_TESTS": how, "ASKED_BY": str(os.getpid())}
    said = []
    for popen in (programs.Popen, subprocess.Popen):
        with popen(
            [sys.executable, str(tmp_path / "program.py"), how, "more"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
            start_new_session=True,
        ) as process:
            out, err = process.communicate("one\ntwo\n", timeout=240)
        said.append((process.returncode, out, err.splitlines()[-1:]))
    assert said[0] == said[1]
    assert said[0][1]


def test_files_that_begin_first_are_there() -> None:
    tree = ast.parse((ROOT / "tests" / "conftest.py").read_text())
    found = next(node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BEGIN_FIRST")
    for name in ast.literal_eval(found.value):
        assert len(list((ROOT / "tests").rglob(name))) == 1, name
