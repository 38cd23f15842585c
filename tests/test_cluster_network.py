"""Workers on a host of its own, as far as one machine can have two: a Ray node in another network namespace, at the end of a cable."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray_start
from disturbing import PATIENCE_S, run, same, started, undisturbed

HERE, THERE = (f"10.77.{os.getpid() % 250 + 1}.{end}" for end in (1, 2))
_ALL_PROTOCOLS = 3
"""ETH_P_ALL: a packet socket gets what goes in either direction."""


def _why_not() -> str:
    if importlib.util.find_spec("ray") is None:
        return "the extra ray is missing; `make rest` installs it in .venv-full"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and `ip`"
    made = subprocess.run(["ip", "netns", "add", "m2flow-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "m2flow-try"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "this machine makes no network namespaces"


def _why_not_slowed() -> str:
    """`netem`, which could hold packets back by the clock too, is a module that many kernels do not have; a token bucket they do."""
    if WHY_NOT or shutil.which("tc") is None:
        return WHY_NOT or "slowing a link needs `tc`"
    ip("link", "add", "m2try", "type", "veth", "peer", "name", "m2yrt")
    made = subprocess.run(["tc", "qdisc", "add", "dev", "m2try", "root", *_bucket("1mbit")], capture_output=True, check=False)
    ip("link", "del", "m2try")
    return "" if made.returncode == 0 else "this kernel has no token bucket (sch_tbf)"


def _bucket(rate: str) -> list[str]:
    """What passes at this rate, and what waits for up to two seconds."""
    return ["tbf", "rate", rate, "burst", "4kb", "latency", "2s"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


WHY_NOT = _why_not()
WHY_NOT_SLOWED = _why_not_slowed()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


class Cable:
    """Between this network and one more."""

    def __init__(self) -> None:
        number = os.getpid()
        self.host, self._near, self._far = f"m2flow-{number}", f"m2n{number}", f"m2f{number}"

    def lay(self) -> None:
        ip("netns", "add", self.host)
        ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.host)
        ip("addr", "add", f"{HERE}/24", "dev", self._near)
        ip("link", "set", self._near, "up")
        for arguments in (("addr", "add", f"{THERE}/24", "dev", self._far), ("link", "set", self._far, "up"), ("link", "set", "lo", "up")):
            ip("-n", self.host, *arguments)

    def cut(self) -> None:
        """In both directions."""
        ip("link", "set", self._near, "down")

    def silence(self) -> None:
        """In one: what is sent there arrives, and nothing that is sent from there."""
        ip("-n", self.host, "route", "replace", "blackhole", f"{HERE}/32")

    def slow(self, rate: str) -> None:
        """In both: no more than this a second, in tc's words (`1mbit`)."""
        subprocess.run(["tc", "qdisc", "replace", "dev", self._near, "root", *_bucket(rate)], check=True)
        subprocess.run(["tc", "-n", self.host, "qdisc", "replace", "dev", self._far, "root", *_bucket(rate)], check=True)

    def num_held_back(self) -> int:
        """Times that the bucket was empty, at either end."""
        count = 0
        for on, end in ([], self._near), (["-n", self.host], self._far):
            shown = subprocess.run(["tc", *on, "-s", "qdisc", "show", "dev", end], check=True, capture_output=True, text=True).stdout
            count += sum(int(found) for found in re.findall(r"overlimits (\d+)", shown))
        return count

    def take_away(self) -> None:
        for arguments in (("link", "del", self._near), ("netns", "del", self.host)):
            subprocess.run(["ip", *arguments], capture_output=True, check=False)

    @contextlib.contextmanager
    def tapped(self) -> Iterator[bytearray]:
        """All that passes."""
        heard, is_over = bytearray(), threading.Event()
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap:
            tap.bind((self._near, 0))
            tap.settimeout(0.2)

            def listen() -> None:
                while not is_over.is_set():
                    with contextlib.suppress(TimeoutError, OSError):
                        heard.extend(tap.recv(1 << 16))

            thread = threading.Thread(target=listen)
            thread.start()
            try:
                yield heard
            finally:
                is_over.set()
                thread.join()


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable()
    try:
        cable.lay()
        yield cable
    finally:
        cable.take_away()


@contextlib.contextmanager
def ray_over(cable: Cable, *, cpus_here: int, cpus_there: int) -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray cluster of this network and that at the other end, with a token of its own; its address, and the environment of who uses it."""
    with tempfile.TemporaryDirectory(prefix="m2ray", dir="/tmp", ignore_cleanup_errors=True) as directory:
        ray = [sys.executable, str(ray_start.SCRIPT), "start", "--block", "--disable-usage-stats"]
        port = _free_port()
        token = Path(directory, "token")
        token.write_text(secrets.token_hex(32))
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        head = [*ray, "--head", f"--port={port}", f"--node-ip-address={HERE}", "--include-dashboard=false", f"--temp-dir={directory}"]
        head += ["--resources", json.dumps({"near": 1})]
        node = ["ip", "netns", "exec", cable.host, *ray, f"--address={HERE}:{port}", f"--node-ip-address={THERE}"]
        processes = []
        try:
            for command, num_cpus in ((head, cpus_here), (node, cpus_there)):
                with (Path(directory) / f"{len(processes)}.log").open("wb") as log:
                    started = [*command, f"--num-cpus={num_cpus}"]
                    processes.append(subprocess.Popen(started, stdout=log, stderr=log, env=environment, start_new_session=True))
                until_started(processes[-1], Path(log.name))
            yield f"{HERE}:{port}", environment
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


def until_started(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while b"Ray runtime started" not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def on_ray(address: str, **more: object) -> str:
    return f"ray={json.dumps({'address': address, 'patience_s': PATIENCE_S, 'silent_after_s': PATIENCE_S, **more})}"


def test_what_crosses_the_network_gives_the_local_digests_and_can_not_be_read(cable: Cable, tmp_path: Path) -> None:
    with ray_over(cable, cpus_here=0, cpus_there=8) as (address, environment), cable.tapped() as heard:
        said = run(tmp_path, "fake", on_ray(address), environment=environment)
    assert same(said, undisturbed("fake")), said
    # As a frame of ZMTP: the word alone is in m2flow's source, which Ray ships. What was heard is too long to be shown by an assertion.
    says_curve, says_hello = b"CURVE" in heard, b"\x01\x0em2flow-hello-1" in heard
    assert says_curve, "no connection of ours has said in its greeting that it is encrypted"
    assert not says_hello, "a worker's hello to its controller can be read"


@pytest.mark.parametrize("cut", [Cable.cut, pytest.param(Cable.silence, marks=pytest.mark.long)], ids=["both ways", "one way"])
def test_a_cable_that_is_cut_is_noticed_and_the_run_goes_on_with_the_workers_on_this_side(
    cable: Cable, tmp_path: Path, cut: Callable[[Cable], None]
) -> None:
    with contextlib.ExitStack() as stack:
        address, environment = stack.enter_context(ray_over(cable, cpus_here=4, cpus_there=1))
        ray = on_ray(address, silent_after_s=12.0, resources={"train": "near", "functions": "near"})
        running = stack.enter_context(started(tmp_path / "runs", "fake", ray, held_at=3, environment=environment))
        running.until_generated()
        cut(cable)
        running.until(lambda: [one for one in running.incidents("lost") if "gave no answer" in one.what], "a worker was missed")
        said = running.ended()
    assert same(said, undisturbed("fake")), said
    assert "rollout" in {worker.partition("-")[0] for _, kind, worker, _ in said["incidents"] if kind == "lost"}


class Pauses:
    """All processes of a node stand still four fifths of the time, as on a machine that is far too small for what else runs there."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._pause)
        self.num_stopped = 0

    def __enter__(self) -> Pauses:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _pause(self) -> None:
        while not self._is_over.is_set():
            self.num_stopped += self._signal(signal.SIGSTOP)
            self._is_over.wait(0.4)
            self._signal(signal.SIGCONT)
            self._is_over.wait(0.1)

    def _signal(self, number: int) -> int:
        listed = subprocess.run(["ip", "netns", "pids", self._host], capture_output=True, text=True, check=True).stdout.split()
        for pid in map(int, listed):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(listed)


@pytest.mark.long
@pytest.mark.parametrize(
    "what", ["link", "node"] if not WHY_NOT_SLOWED else [pytest.param("link", marks=pytest.mark.skip(reason=WHY_NOT_SLOWED)), "node"]
)
def test_a_link_or_a_node_that_becomes_slow_changes_no_sample_and_nobody_is_taken_for_lost(cable: Cable, tmp_path: Path, what: str) -> None:
    with contextlib.ExitStack() as stack:
        address, environment = stack.enter_context(ray_over(cable, cpus_here=4, cpus_there=1))
        ray = on_ray(address, resources={"train": "near", "functions": "near"})
        running = stack.enter_context(started(tmp_path / "runs", "fake", ray, held_at=1, environment=environment))
        running.until_generated()
        if what == "link":
            cable.slow("256kbit")
            said = running.ended()
            assert cable.num_held_back() > 0
        else:
            with Pauses(cable.host) as pauses:
                said = running.ended()
            assert pauses.num_stopped > 0
    assert same(said, undisturbed("fake")), said
    assert said["incidents"] == []


@pytest.mark.long
def test_a_run_whose_controller_s_node_is_lost_goes_on_from_the_storage_on_another_node(cable: Cable, tmp_path: Path) -> None:
    """Its directory is gone with the node; only what is on the storage is left."""
    storage, lost = tmp_path / "storage", tmp_path / "there"
    near = dict.fromkeys(("train", "functions", "rollout"), "near")

    def has_a_checkpoint() -> bool:
        return any(storage.glob("*/checkpoints/step-*")) and any(path.stat().st_size for path in storage.glob("*/segments/*.seg"))

    with ray_over(cable, cpus_here=6, cpus_there=0) as (address, environment):
        given = [on_ray(address, silent_after_s=12.0, resources=near)]
        given += [f'storage={{"directory": "{storage}", "every_s": 0.5}}', "checkpoint_steps=1", "num_steps=8"]
        given += [f'host="{THERE}"']  # Ray itself takes the driver for one of this end: both share a file system.
        inside = ["ip", "netns", "exec", cable.host]
        with started(lost, "fake", *given, held_at=7, environment=environment, before=inside) as driver:
            driver.until(has_a_checkpoint, "there is a checkpoint")
            cable.cut()
        shutil.rmtree(lost)
        (there,) = storage.iterdir()
        spec = json.loads((there / "config.json").read_text())["cluster"]
        (tmp_path / "here.yaml").write_text(json.dumps(spec | {"channels": {}}))
        resume = [sys.executable, "-m", "m2flow", "run", "--resume", str(there), "--cluster", str(tmp_path / "here.yaml")]
        resume += ["--runs-dir", str(tmp_path / "here"), "--json", "--quiet"]
        done = subprocess.run(resume, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    said, whole = json.loads(done.stdout.splitlines()[-1]), undisturbed("fake", "num_steps=8")
    assert (said["samples_sha256"], said["weights_sha256"], said["samples"]) == (whole["samples"], whole["weights"], whole["count"])
