"""The main job teaches what it says: held-out greedy accuracy rises from below 0.45 to above 0.85, whatever the seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from m2flow.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_the_main_flow_learns_to_sort(seed, tmp_path):
    command = [
        sys.executable,
        "-m",
        "m2flow",
        "run",
        "flows/grpo.py",
        "--json",
        "--quiet",
        "--seed",
        str(seed),
        "--runs-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    accuracy = dict(read_metrics(summary["run_dir"])["accuracy"])
    assert accuracy[0] < 0.45
    assert accuracy[80] > 0.85
    assert summary["reward_last"] > summary["reward_first"] + 0.3
