"""A host of its own, as far as one machine can have two: another network namespace at the end of a cable, and a Ray node in it."""

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
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_start
from disturbing import PATIENCE_S

from m2flow.engines.servers.inference_server import free_ports

HERE, THERE = (f"10.{100 + os.getpid() // 250 % 100}.{os.getpid() % 250 + 1}.{end}" for end in (1, 2))
_ALL_PROTOCOLS = 3
"""ETH_P_ALL: a packet socket gets what goes in either direction."""


def _why_not() -> str:
    if importlib.util.find_spec("ray") is None:
        return "the extra ray is missing; `make rest` installs it in .venv-full"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and `ip`"
    tried = f"m2flow-try-{os.getpid()}"  # Others may be trying at the same time.
    made = subprocess.run(["ip", "netns", "add", tried], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", tried], capture_output=True, check=False)
    return "" if made.returncode == 0 else "this machine makes no network namespaces"


def _why_not_slowed() -> str:
    """`netem`, which could hold packets back by the clock too, is a module that many kernels do not have; a token bucket they do."""
    if WHY_NOT or shutil.which("tc") is None:
        return WHY_NOT or "slowing a link needs `tc`"
    tried, other = f"m2t{os.getpid()}", f"m2y{os.getpid()}"
    ip("link", "add", tried, "type", "veth", "peer", "name", other)
    made = subprocess.run(["tc", "qdisc", "add", "dev", tried, "root", *_bucket("1mbit")], capture_output=True, check=False)
    ip("link", "del", tried)
    return "" if made.returncode == 0 else "this kernel has no token bucket (sch_tbf)"


def _bucket(rate: str) -> list[str]:
    """What passes at this rate, and what waits for up to two seconds."""
    return ["tbf", "rate", rate, "burst", "4kb", "latency", "2s"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


WHY_NOT = _why_not()
WHY_NOT_SLOWED = _why_not_slowed()


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
        port, agent = free_ports(2)
        token = Path(directory, "token")
        token.write_text(secrets.token_hex(32))
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        head = [*ray, "--head", f"--port={port}", f"--node-ip-address={HERE}", "--include-dashboard=false", f"--temp-dir={directory}"]
        head += [f"--dashboard-agent-listen-port={agent}"]
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


def until_started(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while b"Ray runtime started" not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def on_ray(address: str, **more: object) -> str:
    return f"ray={json.dumps({'address': address, 'patience_s': PATIENCE_S, 'silent_after_s': PATIENCE_S, **more})}"
