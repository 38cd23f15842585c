"""A Ray cluster that grows with what a run asks for, and shrinks when the run gives it back."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import ray_start
from click.testing import CliRunner
from disturbing import PATIENCE_S, same, started, undisturbed

from m2flow.cli.main import cli
from m2flow.engines.servers.inference_server import free_ports

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is missing; `make rest` installs it in .venv-full"),
]


class Growing(NamedTuple):
    """A cluster of a head without room, whose autoscaler adds nodes of one core."""

    address: str
    directory: str
    environment: dict[str, str]

    @property
    def num_nodes(self) -> int:
        """Besides the head."""
        return max(0, len(self.nodes()) - 1)

    def nodes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "raylet" and any(self.directory in word for word in process.cmdline()):
                    found.append(process)
        return found


@pytest.fixture
def growing() -> Iterator[Growing]:
    import ray_nodes

    port, agent = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="m2ray", dir="/tmp", ignore_cleanup_errors=True) as directory:
        token, config, said = (Path(directory, name) for name in ("token", "nodes.yaml", "said.log"))
        token.write_text(secrets.token_hex(32))
        address = f"127.0.0.1:{port}"
        config.write_text(json.dumps(ray_nodes.config(address, cpus=1, most=6, idle_s=5.0)))
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_FAKE_CLUSTER": "1"}
        environment |= {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "3600", "RAY_ADDRESS": ""}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2] / "support"), str(Path(__file__).parents[3])])
        command = [sys.executable, str(ray_start.SCRIPT), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=0"]
        command += [f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={directory}"]
        command += [f"--autoscaling-config={config}", f"--dashboard-agent-listen-port={agent}"]
        with said.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        cluster = Growing(address, directory, environment)
        try:
            until(lambda: b"Ray runtime started" in said.read_bytes(), said.read_text)
            yield cluster
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            for one in [process, *cluster.nodes()]:
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    one.kill()
            process.wait()


def until(is_so: Callable[[], object], why_not: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, why_not()
        time.sleep(0.1)


def scale(run_dir: Path, change: str) -> str:
    said = CliRunner().invoke(cli, ["cluster", "scale", str(run_dir), f"rollout={change}", "--patience", str(PATIENCE_S)])
    assert said.exit_code == 0, said.output
    return said.output


def test_nodes_come_for_the_plan_and_for_who_joins_and_go_with_who_leaves_and_with_the_run(growing: Growing, tmp_path: Path) -> None:
    ray = {"address": growing.address, "autoscales": True, "patience_s": PATIENCE_S, "silent_after_s": PATIENCE_S}
    given = ["rollouts=1", "spare=1", f"ray={json.dumps(ray)}"]
    with started(tmp_path / "runs", "fake", *given, held_at=2, environment=growing.environment) as running:

        def until_there_are(num_nodes: int) -> None:  # The autoscaler may bring some too many, which go again.
            running.until(lambda: growing.num_nodes == num_nodes, f"there were {num_nodes} nodes")

        running.until_generated()
        until_there_are(4)  # One for each worker.
        assert "rollout-1 will join" in scale(running.run_dir(), "+1")
        running.until_happened("joined", "rollout-1")
        until_there_are(5)
        assert "rollout-1 left" in scale(running.run_dir(), "-1")
        until_there_are(4)
        assert "rollout-1 will join" in scale(running.run_dir(), "+1")
        running.until(lambda: len(running.incidents("joined")) == 2, "it joined again")
        said = running.ended()
    assert same(said, undisturbed("fake", "rollouts=1")), said
    until(lambda: growing.num_nodes == 0, growing.nodes)
