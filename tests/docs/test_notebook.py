"""The notebook of the documentation runs from top to bottom in a kernel of its own, and shows what it says."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("nbclient", "nbformat", "ipykernel", "pandas")),
        reason="needs the extras frames and notebook-tests",
    ),
    pytest.mark.filterwarnings("ignore"),  # Of the kernel's client.
]


def _client(notebook: Any, directory: Path) -> Any:
    from jupyter_client import KernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient import NotebookClient

    class ThisPython(KernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python")

    return NotebookClient(
        notebook, timeout=400, kernel_manager_class=ThisPython, resources={"metadata": {"path": str(directory)}}, allow_errors=False
    )


def _shown(cell: Any, kind: str = "text/html") -> str:
    return "\n".join(output["data"].get(kind, "") for output in cell.outputs if "data" in output)


def test_the_notebook_of_the_docs_runs_and_shows_its_run(tmp_path: Path) -> None:
    import nbformat

    (tmp_path / "docs").mkdir()
    (tmp_path / "flows").symlink_to(ROOT / "flows")
    shutil.copy(ROOT / "docs" / "notebook.ipynb", tmp_path / "docs")
    notebook = nbformat.read(tmp_path / "docs" / "notebook.ipynb", as_version=4)
    _client(notebook, tmp_path / "docs").execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    planned, simulated, run, samples, metrics, spans, model, compared = code[1:]
    assert "plan of repeating" in _shown(planned)
    assert "makespan_s" in _shown(simulated)
    assert "done, 8 steps" in _shown(run)
    assert "<svg" in _shown(run)
    assert "probability" in _shown(run)  # Tokens have their colours.
    assert "step 8 of 8" in _shown(run)  # The live display's last state.
    assert "response_text" in _shown(samples)
    assert "entropy" in _shown(metrics)
    assert "rollout.step" in _shown(spans, "text/plain")
    assert "7=" in _shown(model, "text/plain")
    assert "lr: 0.0002 -&gt; 0.006" in _shown(compared)
    config = next((tmp_path / "docs" / "runs").glob("*/config.json")).read_text()
    assert "def repeats(sample: Sample)" in config  # The cell's text is the run's source.


STOPPED = """
import m2flow
try:
    m2flow.run(repeating, num_steps=4000, runs_dir="runs", quiet=True)
except m2flow.errors.RunInterrupted as error:
    print(error, error.__notes__)
"""


def test_the_stop_button_loses_nothing_and_the_run_goes_on_in_another_kernel(tmp_path: Path) -> None:
    import nbformat

    (tmp_path / "docs").mkdir()
    (tmp_path / "flows").symlink_to(ROOT / "flows")
    source = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    flow = next(cell.source for cell in source.cells if cell.cell_type == "code")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (flow, STOPPED, "print('alive')")])
    client = _client(notebook, tmp_path / "docs")

    def stop() -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until and not any((tmp_path / "docs" / "runs").glob("*/metrics.jsonl")):
            time.sleep(0.2)
        while time.monotonic() < until:
            if any(b'"reward"' in path.read_bytes() for path in (tmp_path / "docs" / "runs").glob("*/metrics.jsonl")):
                os.kill(client.km.provisioner.pid, signal.SIGINT)
                return
            time.sleep(0.2)

    thread = threading.Thread(target=stop)
    thread.start()
    client.execute()
    thread.join()
    said = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert "stopped by Ctrl-C in step" in said
    assert "m2flow.run(repeating, resume=" in said
    assert notebook.cells[2].outputs[0].text == "alive\n"
    resumed = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell("1 + 1"),  # So that the flow's cell has another number than it had.
            nbformat.v4.new_code_cell(flow),
            nbformat.v4.new_code_cell(
                "run = m2flow.open_run()\n"
                "before = len(run.samples())\n"
                "import os, signal, threading\n"
                "def enough():\n"
                "    import time\n"
                "    while len(run.samples()) < before + 64: time.sleep(0.5)\n"
                "    os.kill(os.getpid(), signal.SIGINT)\n"
                "threading.Thread(target=enough).start()\n"
                "try:\n"
                "    m2flow.run(repeating, resume=run, quiet=True)\n"
                "except m2flow.errors.RunInterrupted as error:\n"
                "    print(len(run.samples()) >= before + 64, before > 0)\n"
            ),
        ]
    )
    _client(resumed, tmp_path / "docs").execute()
    assert resumed.cells[2].outputs[-1].text == "True True\n", resumed.cells[2].outputs
