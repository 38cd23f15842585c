"""Workers on a host of its own: a Ray node in another network namespace, at the end of a cable that is tapped, cut and slowed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cabled import THERE, WHY_NOT, WHY_NOT_SLOWED, Cable, cable, on_ray, ray_over
from disturbing import PATIENCE_S, run, same, started, undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
__all__ = ["cable"]


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
