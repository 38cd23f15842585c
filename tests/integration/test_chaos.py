"""Runs that are harassed by `chaos_run`, and a soak: each minutes long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_run import disturbed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("flow_name", ["scored", "refilled", "carried"])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_harassed_comes_to_its_end_and_is_sound(tmp_path, flow_name, seed):
    outcome = disturbed(flow_name, "fake", seed, 8, tmp_path)
    assert not outcome.wrong, f"{outcome.wrong}\nThe run is in {tmp_path}."
    assert outcome.done.total() == 8


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_harassed_run_of_a_real_model_has_the_samples_and_weights_of_one_that_was_left_alone(tmp_path):
    outcome = disturbed("scored", "flows/models/digits", 1, 8, tmp_path)
    assert not outcome.wrong, f"{outcome.wrong}\nThe run is in {tmp_path}."


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("more", [[], ["--carry"]], ids=["plain", "carried"])
def test_memory_files_and_threads_stay_where_they_are_over_many_samples(more):
    command = [sys.executable, "benchmarks/soak.py", "--samples", "60000", "--json", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["samples"] >= 50_000
    assert said["is_constant"]
