"""Agents, which start workers on other hosts, here without the cluster that carries their calls; and what a run says that has no Ray."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from click.testing import CliRunner

from m2flow.channels.zeromq import Keys, LinkListener, write_keys
from m2flow.cli.main import cli
from m2flow.engines.servers.inference_server import free_ports
from m2flow.errors import SpecError
from m2flow.micro.controller.launcher import Agent, AgentReport, Job, LocalLauncher, StartWorker
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import EngineSlot, Plan, WorkerPlan
from m2flow.micro.worker import worker_process
from m2flow.micro.worker.rank_group import RankGroupSettings
from m2flow.micro.worker.worker import WorkerSettings
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec, RunSettings

ROOT = Path(__file__).resolve().parents[3]
FUNCTIONS = WorkerPlan("functions-0", "cpu", 1, (EngineSlot("*", "function", "python"),))


def settings(tmp_path: Path, models: dict[str, Model] | None = None, **changes: object) -> WorkerSettings:
    plan = Plan("f", "c", "split", "", (FUNCTIONS,), (), (), (), (), ())
    (tmp_path / "logs").mkdir(exist_ok=True)
    launcher = LocalLauncher(Job(plan, ClusterSpec(), RunSettings(), models or {}, tmp_path))
    found = launcher.settings_for(FUNCTIONS, "tcp://127.0.0.1:1")
    launcher.stop(())
    return msgspec.structs.replace(found, **changes)


def request(sent: WorkerSettings, *, keys_file: str = "", flow_directory: str = "") -> bytes:
    return msgspec.json.encode(StartWorker(sent, "secret", keys_file, flow_directory, os.getcwd(), "cpu"))


def end(agent: Agent, *, when: Callable[[dict[int, str]], object] = lambda printed: False) -> tuple[dict[int, str], str]:
    """All that the worker printed, by rank, and how it ended; or what it has printed by then."""
    printed: dict[int, str] = {}
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        report = agent.follow(1.0)
        for rank, block in report.printed.items():
            printed[rank] = printed.get(rank, "") + block.decode()
        if report.how or when(printed):
            return printed, report.how
    return printed, ""


def test_an_agent_starts_a_worker_and_ends_it_with_what_it_leaves(tmp_path: Path) -> None:
    agent = Agent(lambda: "127.0.0.1")
    started = agent.start(request(settings(tmp_path)))
    assert (started.address, psutil.Process(started.pid).ppid()) == ("127.0.0.1", os.getpid())
    assert agent.follow(0.01) == AgentReport()
    assert agent._claim is not None
    claim = Path(agent._claim.path)
    assert claim.exists()
    agent.kill()
    assert end(agent) == ({}, "was killed by signal 9")
    assert not psutil.pid_exists(started.pid)
    assert not claim.exists()


def assert_told_of_one_that_failed(tmp_path: Path) -> None:
    """How a worker ended whose directory can't be, and its traceback."""
    agent = Agent(lambda: "127.0.0.1")
    agent.start(request(settings(tmp_path, run_dir=str(tmp_path / "logs" / "\0"))))
    printed, how = end(agent)
    agent.kill()
    assert how == "ended with status 1"
    assert "Traceback" in printed[0]


def test_an_agent_tells_what_a_worker_printed_that_failed(tmp_path: Path) -> None:
    assert_told_of_one_that_failed(tmp_path)


def test_an_agent_that_is_slow_to_read_tells_all_that_a_worker_printed_before_it_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Agent._read

    def late(agent: Agent, rank: int, pipe: int) -> None:
        assert agent._processes is not None
        while psutil.pid_exists(agent._processes.pid):
            time.sleep(0.01)
        time.sleep(0.5)
        read(agent, rank, pipe)

    monkeypatch.setattr(Agent, "_read", late)
    monkeypatch.setattr("m2flow.micro.controller.launcher._HELD_S", 0.02)
    assert_told_of_one_that_failed(tmp_path)


def test_an_agent_tells_what_each_rank_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # Every process of Python then has something to say.
    agent = Agent(lambda: "127.0.0.1")
    agent.start(request(settings(tmp_path, rank_group=RankGroupSettings(num_ranks=2))))
    printed, _ = end(agent, when=lambda printed: len(printed) == 2)
    agent.kill()
    assert all(said.startswith("import time:") for said in printed.values())
    assert set(printed) == {0, 1}


def test_why_a_worker_can_not_start_reaches_a_controller_that_is_slow_to_hear_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_DRAIN_S", 0.1)
    (port,) = free_ports(1)
    sent = settings(tmp_path, controller=f"tcp://127.0.0.1:{port}")  # The directory of its inbox is not there any more.
    worker = threading.Thread(target=worker_process.serve, args=(sent, "secret"))
    worker.start()
    worker.join(2.0)
    listener = LinkListener("secret", f"tcp:{port}")
    listener.open()
    heard: list[m.ToController] = []
    while worker.is_alive() or not heard:
        heard += [m.decode_to_controller(body) for peer, body in listener.receive(0.1) if peer == "functions-0"]
    listener.close()
    assert any(isinstance(message, m.Fatal) and "can't listen in" in message.error.what for message in heard)


def test_an_agent_tells_whether_a_signal_has_stopped_the_worker(tmp_path: Path) -> None:
    agent = Agent(lambda: "127.0.0.1")
    worker = psutil.Process(agent.start(request(settings(tmp_path))).pid)
    worker.suspend()
    while not (report := agent.follow(0.01)).stopped:  # The signal comes when the system gets to it.
        assert not report.how
    worker.resume()
    is_stopped = agent.follow(0.01).stopped
    agent.kill()
    assert (report.stopped, is_stopped) == ((0,), ())


def test_an_agent_without_the_cluster_s_key_says_so_and_starts_nothing(tmp_path: Path) -> None:
    agent = Agent(lambda: "127.0.0.1")
    with pytest.raises(SpecError, match=r"can't read the key .*nowhere\.key"):
        agent.start(request(settings(tmp_path), keys_file=str(tmp_path / "nowhere.key")))
    agent.kill()


def test_settings_of_a_worker_are_those_of_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, copy = tmp_path / "flows", tmp_path / "copy"
    (copy / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(copy)
    write_keys(tmp_path / "key", Keys("a" * 40, "b" * 40))
    sent = settings(tmp_path, {"policy": Model(str(elsewhere / "models" / "tiny")), "judge": Model("/nowhere/else")})
    agent = Agent(lambda: "10.0.0.7")
    body = request(sent, keys_file=str(tmp_path / "key"), flow_directory=str(elsewhere))
    here = agent._here(msgspec.json.decode(body, type=StartWorker))
    agent.kill()
    assert (here.inbox, here.weights.host, here.keys) == ("tcp:10.0.0.7", "10.0.0.7", Keys("a" * 40, "b" * 40))
    assert here.shared_prefix != sent.shared_prefix
    assert here.shared_prefix.startswith(os.path.basename(here.claim).removesuffix(".owner"))
    assert here.models == {"policy": Model(str(copy / "models" / "tiny")), "judge": Model("/nowhere/else")}


def test_a_run_on_ray_without_ray_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    spec = tmp_path / "ray.yaml"
    spec.write_text("launcher: ray\nrollout: {engine: fake}\ntrain: {engine: fake}\n")
    said = CliRunner().invoke(cli, ["run", str(ROOT / "flows" / "grpo.py"), "--cluster", str(spec), "--runs-dir", str(tmp_path)])
    assert said.exit_code != 0
    assert "Ray is not installed here" in said.output
    assert "pip install 'm2flow[ray]'" in said.output
