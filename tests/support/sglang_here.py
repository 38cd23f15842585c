"""The SGLang of this machine for tests, and a server of it without a GPU: `make sglang-cpu` builds the interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("M2FLOW_SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
OPTIONS: dict[str, str | int | float | bool] = {
    "python": PYTHON,
    "args": "--attention-backend torch_native --sampling-backend pytorch --max-total-tokens 20000 --sleep-on-idle"
    " --mem-fraction-static 0.1",
    "env": f"PYTHONPATH={ROOT / 'tests' / 'sglang_cpu'} SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1",
    "deterministic_inference": True,
    "stream_interval": 1,
}
NEEDS_SGLANG = pytest.mark.skipif(not Path(PYTHON).exists(), reason="sglang: no interpreter has it; `make sglang-cpu` builds one")
