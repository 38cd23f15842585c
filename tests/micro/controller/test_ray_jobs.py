"""A Ray cluster reached by its own doors: `ray job submit`, and a client's address. The answers are those of a local run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import ray_start
from disturbing import PATIENCE_S, SCRIPT, run, same, undisturbed

from m2flow.engines.servers.inference_server import free_ports

SPEC = """
name: submitted
launcher: ray
ray: {address: auto, env: {SAID_BY_THE_SPEC: "1"}, patience_s: 400, silent_after_s: 400}
placement: split
device: cpu
cores: 4
rollout: {engine: fake, workers: 2, max_running: 8, threads: 1}
train: {engine: fake, token_budget: 200, threads: 1}
functions: {workers: 2, chunk: 4}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is missing; `make rest` installs it in .venv-full"),
]


class Head(NamedTuple):
    """A cluster of one node."""

    dashboard: str
    client: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    port, dashboard, agent, client = free_ports(4)
    with tempfile.TemporaryDirectory(prefix="m2ray", dir="/tmp", ignore_cleanup_errors=True) as directory:
        token = Path(directory, "token")
        token.write_text(secrets.token_hex(32))
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        environment |= {"PYTHONPATH": str(SCRIPT.parents[2]), "RAY_ADDRESS": ""}
        command = [sys.executable, str(ray_start.SCRIPT), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=8"]
        command += [f"--port={port}", f"--ray-client-server-port={client}", f"--dashboard-port={dashboard}", f"--temp-dir={directory}"]
        command += [f"--dashboard-agent-listen-port={agent}", "--node-ip-address=127.0.0.1"]
        said = Path(directory, "said.log")
        with said.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while b"Ray runtime started" not in said.read_bytes():
                assert process.poll() is None, said.read_text()
                assert time.monotonic() < deadline, said.read_text()
                time.sleep(0.1)
            yield Head(f"http://127.0.0.1:{dashboard}", f"ray://127.0.0.1:{client}", environment)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_a_submitted_job_gives_the_digests_of_a_local_run(head: Head, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(SCRIPT, work / "flow.py")
    (work / "ray.yaml").write_text(SPEC)
    entry = [
        sys.executable,
        "-m",
        "m2flow",
        "run",
        "flow.py:scored",
        "--cluster",
        "ray.yaml",
        "--runs-dir",
        str(tmp_path / "runs"),
        "--json",
        "--quiet",
    ]
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.dashboard, "--working-dir", str(work), "--"]
    done = subprocess.run([*submit, *entry], capture_output=True, text=True, env=head.environment, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    whole = undisturbed("fake")
    assert (said["samples_sha256"], said["weights_sha256"], said["samples"]) == (whole["samples"], whole["weights"], whole["count"])
    logs = {path.name for path in (tmp_path / "runs" / Path(said["run_dir"]).name / "logs").glob("*.log")}
    assert {"rollout-0.log", "rollout-1.log", "train-0.log", "functions-0.log", "functions-1.log"} <= logs


@pytest.mark.long
def test_a_client_of_a_cluster_gives_the_digests_of_a_local_run(head: Head, tmp_path: Path) -> None:
    ray = {"address": head.client, "patience_s": PATIENCE_S, "silent_after_s": PATIENCE_S}
    said = run(tmp_path, "fake", f"ray={json.dumps(ray)}", environment=head.environment)
    assert same(said, undisturbed("fake")), said
