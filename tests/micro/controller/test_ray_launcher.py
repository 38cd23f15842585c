"""Runs on a Ray cluster of several nodes on this machine: the answers of a local run, also when workers and nodes are lost."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray_start
import yaml
from disturbing import PATIENCE_S, run, same, started, undisturbed

from m2flow.engines.servers.inference_server import free_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is missing; `make rest` installs it in .venv-full"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head without room for workers, and three nodes. All of them say that they are this machine, by its address on the network."""
    from ray.cluster_utils import Cluster

    cluster, (agent,) = Cluster(), free_ports(1)
    try:
        start = partial(cluster.add_node, wait=False, num_cpus=0, include_dashboard=False, dashboard_agent_listen_port=agent)
        ray_start.persistently(start)
        ray_start.persistently(partial(cluster.add_node, wait=False, num_cpus=4, resources={"trains": 1}))
        for _ in range(2):
            ray_start.persistently(partial(cluster.add_node, wait=False, num_cpus=1, resources={"samples": 1}))
        cluster.wait_for_nodes(PATIENCE_S)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def cluster(nodes: Any) -> Any:
    """Without a worker of the run before."""
    until_gone(nodes)
    return nodes


def on_ray(cluster: Any, **more: object) -> str:
    resources = {"train": "trains", "rollout": "samples", "functions": "trains"}
    patient = {"patience_s": PATIENCE_S, "silent_after_s": PATIENCE_S}
    return f"ray={json.dumps({'address': cluster.address, 'resources': resources, **patient, **more})}"


def workers(cluster: Any) -> dict[str, psutil.Process]:
    """Worker processes that Ray's nodes have, by name; whoever is their parent now."""
    session = os.path.realpath(cluster.head_node.get_session_dir_path())
    found = {}
    for process in psutil.process_iter():
        try:
            command = process.cmdline()  # Once: it is empty as soon as the process has ended.
            if "m2flow.micro.worker.worker_process" in command and session in process.environ().get("PYTHONPATH", ""):
                found[command[-1]] = process
        except psutil.Error:
            pass
    return found


def until_gone(cluster: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := workers(cluster):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_run_on_ray_gives_the_digests_of_a_local_one_brings_every_log_and_leaves_nobody(cluster: Any, tmp_path: Path) -> None:
    said = run(tmp_path, "fake", on_ray(cluster))
    assert same(said, undisturbed("fake")), said
    assert said["incidents"] == []
    logs = {path.name for path in (tmp_path / Path(said["run_dir"]).name / "logs").glob("*.log")}
    assert logs == {f"{name}.log" for name in ("rollout-0", "rollout-1", "train-0", "functions-0", "functions-1")}
    printed = [(tmp_path / Path(said["run_dir"]).name / "logs" / f"functions-{i}.log").read_text().split() for i in range(2)]
    assert sorted(printed[0] + printed[1]) == ["judged"] * 128
    until_gone(cluster)


def test_embedded_engines_give_the_same_weights_on_ray(cluster: Any, tmp_path: Path) -> None:
    digits = str(Path(__file__).parents[3] / "flows" / "models" / "digits")
    said = run(tmp_path, digits, "num_steps=2", on_ray(cluster))
    assert same(said, undisturbed(digits, "num_steps=2")), said


def test_a_killed_worker_is_started_again_with_another_actor(cluster: Any, tmp_path: Path) -> None:
    with started(tmp_path / "runs", "fake", on_ray(cluster), held_at=3) as running:
        running.until_generated()
        workers(cluster)["rollout-1"].kill()
        running.until_happened("started again", "rollout-1")
        said = running.ended()
    assert same(said, undisturbed("fake")), said
    assert [incident[1:3] for incident in said["incidents"]] == [["lost", "rollout-1"], ["started again", "rollout-1"]]


def test_a_run_whose_head_node_is_lost_ends_with_the_reason_before_ray_ends_its_process(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    alone, (agent,) = Cluster(), free_ports(1)
    try:
        ray_start.persistently(partial(alone.add_node, num_cpus=5, include_dashboard=False, dashboard_agent_listen_port=agent))
        address = alone.address
        ray = f"ray={json.dumps({'address': address, 'patience_s': PATIENCE_S})}"
        with started(tmp_path / "runs", "fake", ray, held_at=3) as running:
            running.until_generated()
            alone.head_node.kill_gcs_server()
            there = workers(alone)
            for name in ("rollout-0", "rollout-1"):
                there[name].kill()
            said = running.ended()
        assert f"the head node of the Ray cluster at {address} answers no more" in said["error"]
    finally:
        alone.shutdown()


def test_workers_end_when_their_driver_is_killed(cluster: Any, tmp_path: Path) -> None:
    with started(tmp_path / "runs", "fake", on_ray(cluster), held_at=3) as running:
        running.until_generated()
        assert workers(cluster)
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.communicate()
    until_gone(cluster)


def test_a_plan_that_no_node_can_hold_is_refused_with_what_is_short(cluster: Any, tmp_path: Path) -> None:
    resources = {"train": "trains", "rollout": "nowhere"}
    said = run(tmp_path, "fake", f"ray={json.dumps({'address': cluster.address, 'resources': resources})}")
    assert "no node has 1 CPU, nowhere, which rollout-0 needs" in said["error"]


def test_init_and_check_ask_the_nodes(cluster: Any, tmp_path: Path) -> None:
    def m2flow(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "m2flow", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    spec = tmp_path / "ray.yaml"
    assert m2flow("cluster", "init", spec, "--ray", cluster.address).returncode == 0
    assert "1 x 4 cores, 0 GPUs" in spec.read_text()
    given = yaml.safe_load(spec.read_text())
    given["ray"]["patience_s"] = PATIENCE_S
    spec.write_text(yaml.safe_dump(given))
    checked = m2flow("cluster", "check", spec, "--json", "--runs-dir", tmp_path)
    assert checked.returncode == 0, checked.stderr
    found = json.loads(checked.stdout)
    assert len(found) == 5
    assert all("runs directory" in [one["name"] for one in findings] for node, findings in found.items() if node.startswith("node"))
    spec.write_text(yaml.safe_dump({**given, "channels": {"keys": "nowhere.key"}}))
    assert "missing: key (node 4" in m2flow("cluster", "check", spec, "--runs-dir", tmp_path).stderr


def test_the_ranks_of_a_trainer_are_on_one_node_and_give_what_one_process_gives(cluster: Any, tmp_path: Path) -> None:
    said = run(tmp_path, "fake", on_ray(cluster), "ranks=2")
    assert same(said, undisturbed("fake")), said
    assert {"train-0.log", "train-0.1.log"} <= {path.name for path in (tmp_path / Path(said["run_dir"]).name / "logs").iterdir()}


def test_a_node_that_hangs_is_lost_before_ray_says_so_and_the_run_goes_on_without_it(cluster: Any, tmp_path: Path) -> None:
    """The last of these tests: Ray may say so after a while, and then the node is gone."""
    stopped: list[psutil.Process] = []
    with started(tmp_path / "runs", "fake", on_ray(cluster, silent_after_s=12.0), held_at=3) as running:
        running.until_generated()
        agent = workers(cluster)["rollout-1"].parent()
        assert agent is not None
        raylet = agent.parent()
        assert raylet is not None
        stopped = [raylet, *raylet.children(recursive=True)]
        try:
            for one in stopped:
                one.suspend()
            lost = running.until_happened("lost", "rollout-1")
            said = running.ended()
        finally:
            for one in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.resume()
    assert same(said, undisturbed("fake")), said
    assert "gave no answer for" in lost.what
    until_gone(cluster)
