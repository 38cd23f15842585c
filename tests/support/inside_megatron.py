"""Tests in processes of the interpreter that has Megatron (`make megatron-cpu`), where the CPU passes for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("M2FLOW_MEGATRON_PYTHON", str(ROOT / ".venv-megatron" / "bin" / "python"))
NEEDS_MEGATRON = pytest.mark.skipif(not Path(PYTHON).exists(), reason="megatron: needs .venv-megatron: make megatron-cpu")
PATIENT = pytest.mark.timeout(1200)
"""A file of tests is one test here."""


def inside(file: str, num_ranks: int, layout: object = None, only: str = "", report: Path | None = None, **changes: str) -> str:
    """Run a file of tests, or of these `only` some, with changes of the environment; returns what pytest said.

    Args:
        report: where it writes, as XML, what became of each test. Without one, all must pass.
    """
    given = {"M2FLOW_TEST_RANKS": str(num_ranks), "M2FLOW_TEST_LAYOUT": json.dumps(layout or {}), "OMP_NUM_THREADS": "1", **changes}
    path = ROOT / "tests" / "engines" / "megatron" / file
    arguments = ["-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-k", only, str(path)]
    arguments += [] if report is None else [f"--junitxml={report}"]
    done = subprocess.run(
        [PYTHON, *arguments], cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    said = done.stdout[-8000:] + done.stderr[-2000:]
    assert report is not None or done.returncode == 0, said
    return said
