"""The GPU kit at toy size on a CPU: each stage works, a failed one is told and run again, and what has a result is not run twice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "benchmarks" / "gpu"
STAGES = ["environment", "agreement", "decode", "training", "deepspeed", "switches", "weights", "sized_job", "plan_7b"]


def kit(into: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(KIT / "kit.py"), "--device", "cpu", "--into", str(into), *options]
    return subprocess.run(command, cwd=into, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


@pytest.mark.slow
def test_each_stage_of_the_kit_measures_at_toy_size_and_none_is_run_twice(tmp_path):
    done = kit(tmp_path, "--only", *STAGES)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "cpu" / "gpu.json").read_text())
    assert list(found) == STAGES
    assert found["decode"]["rows"][0]["tokens/s"] > 0
    assert found["decode"]["rows"][0]["step ms predicted"] > 0
    assert {row["transport"] for row in found["weights"]["rows"]} == {"shared memory", "file"}
    assert found["agreement"]["rows"][0]["value"] == 0
    assert {row["graphs"] for row in found["decode"]["rows"]} == {True, False}
    assert {"embedded", "fsdp"} <= {row["engine"] for row in found["training"]["rows"]}
    assert len(found["sized_job"]["facts"]["measured steps s"]) == 3
    assert "predicted" in found["sized_job"]["facts"]["predicted on h100"]
    page = (tmp_path / "cpu" / "gpu.md").read_text()
    assert all(f"## {stage.replace('_', ' ')} (" in page for stage in STAGES)
    again = kit(tmp_path, "--only", *STAGES)
    assert again.stdout.count("has a result") == len(STAGES)


@pytest.mark.slow
def test_a_stage_that_fails_is_told_and_run_again(tmp_path):
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "environment.json").write_text(json.dumps({"error": "exit status 1", "seconds": 1.0}))
    done = kit(tmp_path, "--only", "environment")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch" in json.loads((folder / "environment.json").read_text())["facts"]


@pytest.mark.slow
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so_and_the_kit_ends_with_an_error(tmp_path):
    done = subprocess.run(
        [sys.executable, str(KIT / "kit.py"), "--into", str(tmp_path), "--only", "environment"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "torch sees no GPU here" in done.stdout


def test_what_the_kit_needs_is_what_m2flow_and_its_tests_need():
    import tomllib

    told = {re.split(r"[>=]", line)[0] for line in (KIT / "requirements.txt").read_text().splitlines() if not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[>=\[ ]", text)[0] for text in project["dependencies"]} - {
        "torch",
        "transformers",
        "numpy",
        "safetensors",
        "tokenizers",
    }
    tested = {re.split(r"[>=\[ ]", text)[0] for text in project["optional-dependencies"]["dev"]}
    assert core <= told <= core | tested
