"""The processes of one worker on the host where this is called: one, or the ranks of its trainer, which end as a whole.

WorkerSettings --start--> rank 0: m2flow.micro.work.process; 1, 2, ...: m2flow.micro.work.rank
a rank is killed or fails --how_ended--> the others are killed too; the words name the rank
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, final

import msgspec
import psutil

from m2flow.engines.gpus import gpus_from
from m2flow.micro.control.spawning import how_ended, spawn
from m2flow.micro.work.process import kill_group
from m2flow.micro.work.settings import WorkerSettings

_LOOKS_S = 0.05


def start(
    settings: WorkerSettings,
    token: str,
    outputs: Sequence[IO[bytes] | int],
    directory: str,
    *,
    path: str,
    cwd: str | None = None,
    gpus: str = "",
) -> Processes:
    """Start a worker, with all its ranks.

    Args:
        outputs: what each rank prints goes there.
        directory: only this user can enter it; ranks meet there, at another place each time that the worker is started.
        gpus: those that it sees, as in `CUDA_VISIBLE_DEVICES`; by default those that this process sees.
    Raises:
        EngineError: there are fewer GPUs than ranks.
    """
    count = settings.gang.num_ranks
    if count == 1:
        return Processes([spawn(settings, token, outputs[0], path=path, cwd=cwd, gpus=gpus)])
    place = Path(directory) / settings.tag
    device, seen = gpus_of_ranks(settings.name, settings.device, count, gpus or os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    gang = msgspec.structs.replace(settings.gang, meeting=f"{place}.gang", rendezvous=f"file://{place}.meeting")
    ranks = [msgspec.structs.replace(settings, device=device, gang=msgspec.structs.replace(gang, rank=rank)) for rank in range(count)]
    pairs = zip(ranks, outputs, seen, strict=True)
    return Processes([spawn(its, token, output, path=path, cwd=cwd, gpus=own) for its, output, own in pairs])


def gpus_of_ranks(worker: str, device: str, count: int, seen: str) -> tuple[str, list[str]]:
    """What each rank calls its device, and the GPU that it is shown: those from the worker's own on, one after the other.

    Args:
        seen: GPUs that there are, as in `CUDA_VISIBLE_DEVICES`; empty: all of the machine.
    Raises:
        EngineError: there are not so many.

    >>> gpus_of_ranks("train-0", "cuda:1", 2, "4,5,7")
    ('cuda:0', ['5', '7'])
    """
    if not device.startswith("cuda"):
        return device, [""] * count
    return "cuda:0", gpus_from(device, count, seen, whose=f"{worker} has {count} ranks")


@final
class Processes:
    """Of one worker, by rank."""

    def __init__(self, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        self._ranks = tuple(ranks)
        self._how = ""
        self.rank = 0
        """Whose end, or silence, is spoken of."""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks]

    @property
    def pid(self) -> int:
        """Of the rank that is spoken of."""
        return self._ranks[self.rank].pid

    @property
    def stopped(self) -> tuple[int, ...]:
        """Ranks that a signal has stopped, as SIGSTOP does. A debugger's are others, and who only waits for a processor is not stopped."""
        return tuple(rank for rank, pid in enumerate(self.pids) if _is_stopped(pid))

    def how_ended(self) -> str:
        """In words; empty while it runs. Ranks after the first end in order when the first has let them go."""
        if self._how:
            return self._how
        codes = {rank: process.returncode for rank, process in enumerate(self._ranks) if _has_ended(process)}
        faults = {rank: code for rank, code in codes.items() if code}
        if 0 not in codes and not faults:
            return ""
        self.rank = min(faults, key=lambda rank: (faults[rank] >= 0, rank)) if faults else 0  # Who fails because another is gone says so.
        how = how_ended(codes[self.rank])
        how = f"lost its rank {self.rank}, which {how}" if self.rank else how
        self.kill()
        self._how = how
        return how

    def kill(self) -> None:
        """End all of them, whatever they are doing."""
        for process in self._ranks:
            if not _has_ended(process):
                kill_group(process.pid)
                process.wait()
        self._how = self._how or "was ended"

    def wait(self) -> str:
        """Until it has ended; how."""
        if len(self._ranks) == 1:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        while not (how := self.how_ended()):
            time.sleep(_LOOKS_S)
        return how


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # It has ended.
        return False


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has; what it has started is then ended as well."""
    if process.returncode is None and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        kill_group(process.pid)  # As long as nobody has waited for it, the group's number can't be another's.
        process.wait()
    return process.returncode is not None
