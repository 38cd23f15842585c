"""The same answer from outside: digests that `m2flow run --json` prints, over real processes and real engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--num-steps", "3", "--warm-steps", "8", "--batch", "6", "--n", "4", "--eval-every", "5", "--seed", "7"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Those of a run with the placement that is taken by itself."""
    return digests(tmp_path_factory.mktemp("plain"), "--deterministic")


def digests(tmp_path: Path, *arguments: str) -> tuple[str, str]:
    """The samples' and the weights' digest of one run of the main flow."""
    command = [
        sys.executable,
        "-m",
        "m2flow",
        "run",
        str(ROOT / "flows" / "grpo.py"),
        "--json",
        "--quiet",
        "--runs-dir",
        str(tmp_path),
        *SMALL,
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    return summary["samples_sha256"], summary["weights_sha256"]


def spec(tmp_path: Path, text: str) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return str(path)


def test_deterministic_runs_agree_bit_by_bit_whatever_the_plan(tmp_path, plain):
    eager = digests(tmp_path, "--deterministic", "--eager")
    assert plain == eager
    split = spec(tmp_path, "placement: split\nrollout: {workers: 3, max_running: 7}\nfunctions: {workers: 2, chunk: 3}\n")
    assert digests(tmp_path, "--deterministic", "--cluster", split) == eager
    over_tcp = spec(tmp_path, "placement: time-shared\nrollout: {max_running: 1}\nchannels: {transport: tcp}\n")
    assert digests(tmp_path, "--deterministic", "--cluster", over_tcp) == eager


def test_workers_that_are_forked_and_workers_that_are_interpreters_of_their_own_give_the_same(tmp_path, plain):
    assert digests(tmp_path, "--deterministic", "--setting", "fork_workers=false") == plain
    (config,) = tmp_path.glob("*/config.json")
    assert json.loads(config.read_text())["settings"]["fork_workers"] is False


def test_another_seed_gives_another_answer(tmp_path, plain):
    assert plain != digests(tmp_path, "--deterministic", "--seed", "8")
