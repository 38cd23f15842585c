"""Workers on a host of its own, as far as one machine can have two: a Ray node in another network namespace, at the end of a cable."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("recovery_run.py")
HERE, THERE = (f"10.77.{os.getpid() % 250 + 1}.{end}" for end in (1, 2))
_ALL_PROTOCOLS = 3
"""ETH_P_ALL: a packet socket gets what goes in either direction."""
Said = Mapping[str, Any]


def _why_not() -> str:
    if importlib.util.find_spec("ray") is None:
        return "the extra ray is missing; `make rest` installs it in .venv-full"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and `ip`"
    made = subprocess.run(["ip", "netns", "add", "m2flow-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "m2flow-try"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "this machine makes no network namespaces"


WHY_NOT = _why_not()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


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
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        port = _free_port()
        token = Path(directory, "token")
        token.write_text(secrets.token_hex(32))
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_raylet_start_wait_time_s": "150"}
        head = [*ray, "--head", f"--port={port}", f"--node-ip-address={HERE}", "--include-dashboard=false", f"--temp-dir={directory}"]
        head += ["--resources", json.dumps({"near": 1})]
        node = ["ip", "netns", "exec", cable.host, *ray, f"--address={HERE}:{port}", f"--node-ip-address={THERE}"]
        processes = []
        try:
            for command, num_cpus in ((head, cpus_here), (node, cpus_there)):
                with (Path(directory) / f"{len(processes)}.log").open("wb") as log:
                    started = [*command, f"--num-cpus={num_cpus}"]
                    processes.append(subprocess.Popen(started, stdout=log, stderr=log, env=environment, start_new_session=True))
                until(lambda log=log: b"Ray runtime started" in Path(log.name).read_bytes(), Path(log.name).read_text)  # type: ignore[misc]
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


def until(is_so: Callable[[], object], why_not: Callable[[], str]) -> None:
    deadline = time.monotonic() + 200
    while not is_so():
        assert time.monotonic() < deadline, why_not()
        time.sleep(0.02)


def start(runs_dir: Path, cluster: tuple[str, dict[str, str]], **more: object) -> subprocess.Popen[str]:
    ray = json.dumps({"address": cluster[0], **more})
    command = [sys.executable, str(SCRIPT), str(runs_dir), "fake", f"ray={ray}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cluster[1], start_new_session=True)


def ended(process: subprocess.Popen[str]) -> Said:
    try:
        said, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return dict(json.loads(said.splitlines()[-1]))


@functools.cache
def local(*more: str) -> Said:
    with tempfile.TemporaryDirectory() as runs_dir:
        command = [sys.executable, str(SCRIPT), runs_dir, "fake", *more]
        return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout.splitlines()[-1]))


def same(one: Said, other: Said) -> bool:
    return [one.get(name) for name in ("samples", "weights", "count")] == [other[name] for name in ("samples", "weights", "count")]


def test_what_crosses_the_network_gives_the_local_digests_and_can_not_be_read(cable: Cable, tmp_path: Path) -> None:
    with ray_over(cable, cpus_here=0, cpus_there=8) as cluster, cable.tapped() as heard:
        said = ended(start(tmp_path, cluster))
    assert same(said, local()), said
    # As a frame of ZMTP: the word alone is in m2flow's source, which Ray ships. What was heard is too long to be shown by an assertion.
    says_curve, says_hello = b"CURVE" in heard, b"\x01\x0em2flow-hello-1" in heard
    assert says_curve, "no connection of ours has said in its greeting that it is encrypted"
    assert not says_hello, "a worker's hello to its controller can be read"


@pytest.mark.parametrize("cut", [Cable.cut, pytest.param(Cable.silence, marks=pytest.mark.long)], ids=["both ways", "one way"])
def test_a_cable_that_is_cut_is_noticed_and_the_run_goes_on_with_the_workers_on_this_side(
    cable: Cable, tmp_path: Path, cut: Callable[[Cable], None]
) -> None:
    def have_both_begun() -> bool:
        sizes = [path.stat().st_size for path in tmp_path.glob("*/segments/rollout-?.seg")]
        return len(sizes) == 2 and all(sizes)

    with ray_over(cable, cpus_here=4, cpus_there=1) as cluster:
        process = start(tmp_path, cluster, silent_after_s=3.0, resources={"train": "near", "functions": "near"})
        try:
            until(lambda: have_both_begun() or process.poll() is not None, lambda: "it has not begun")
            cut(cable)
            said = ended(process)
        finally:
            process.kill()
    assert same(said, local()), said
    assert ["gave no answer" in what for _, kind, _, what in said["incidents"] if kind == "lost"] == [True]


@pytest.mark.long
def test_a_run_whose_controller_s_node_is_lost_goes_on_from_the_storage_on_another_node(cable: Cable, tmp_path: Path) -> None:
    """Its directory is gone with the node; only what is on the storage is left."""
    storage, lost = tmp_path / "storage", tmp_path / "there"
    near = dict.fromkeys(("train", "functions", "rollout"), "near")

    def has_a_checkpoint() -> bool:
        return any(storage.glob("*/checkpoints/step-*")) and any(path.stat().st_size for path in storage.glob("*/segments/*.seg"))

    with ray_over(cable, cpus_here=6, cpus_there=0) as cluster:
        ray = json.dumps({"address": cluster[0], "silent_after_s": 3.0, "patience_s": 180.0, "resources": near})
        given = [f"ray={ray}", f'storage={{"directory": "{storage}", "every_s": 0.5}}', "checkpoint_steps=1", "num_steps=8"]
        given += [f'host="{THERE}"']  # Ray itself takes the driver for one of this end: both share a file system.
        command = ["ip", "netns", "exec", cable.host, sys.executable, str(SCRIPT), str(lost), "fake", *given]
        driver = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cluster[1], start_new_session=True
        )
        try:
            until(lambda: has_a_checkpoint() or driver.poll() is not None, lambda: "there is no checkpoint")
            assert driver.poll() is None, driver.communicate()
            cable.cut()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.communicate()
        shutil.rmtree(lost)
        (there,) = storage.iterdir()
        spec = json.loads((there / "config.json").read_text())["cluster"]
        (tmp_path / "here.yaml").write_text(json.dumps(spec | {"channels": {}}))
        resume = [sys.executable, "-m", "m2flow", "run", "--resume", str(there), "--cluster", str(tmp_path / "here.yaml")]
        resume += ["--runs-dir", str(tmp_path / "here"), "--json", "--quiet"]
        done = subprocess.run(resume, capture_output=True, text=True, env=cluster[1], timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    said, whole = json.loads(done.stdout.splitlines()[-1]), local("num_steps=8")
    assert (said["samples_sha256"], said["weights_sha256"], said["samples"]) == (whole["samples"], whole["weights"], whole["count"])
