"""A node is lost or cut off in the middle of the job of `flows/grpo.py`: its weights are those of a local job that was left alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cabled import WHY_NOT, Cable, cable, on_ray, ray_over
from held_job import Job, check, ended, wait_until

from m2flow.micro.records.ledger import read_incidents

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
__all__ = ["cable"]


def lose(cable: Cable) -> None:
    """The node ends with all that runs there, and nothing that is sent to it comes back."""
    cable.cut()
    listed = subprocess.run(["ip", "netns", "pids", cable.host], capture_output=True, text=True, check=True).stdout.split()
    for pid in map(int, listed):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("befalls", [lose, Cable.cut, Cable.silence], ids=["lost", "cut off", "cut off one way"])
def test_a_node_that_is(cable: Cable, tmp_path: Path, befalls: Callable[[Cable], None]) -> None:
    with ray_over(cable, cpus_here=3, cpus_there=1) as (address, environment):
        resources, held_by = {"train": "near", "functions": "near"}, {"HELD_BY": str(tmp_path / "held")}
        job = Job(tmp_path, on_ray(address, silent_after_s=12.0, resources=resources, env=held_by), environment=environment)

        def lost() -> set[str]:
            return {one.worker for run_dir in tmp_path.glob("runs/*") for one in read_incidents(run_dir) if one.kind == "lost"}

        with job.held() as process:
            befalls(cable)
            wait_until(lambda: any(worker.startswith("rollout") for worker in lost()), process)
        said = ended(process)
    check(said)
