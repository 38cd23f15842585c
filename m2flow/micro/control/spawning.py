"""A process of a worker, on the host where this is called: how it is started, how it ended, and how it is ended.

    WorkerSettings, secret --spawn--> m2flow.micro.work.process

It leads a group of its own, with the processes that users' functions start in it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import IO

import msgspec

from m2flow.errors import InternalError
from m2flow.micro.scheduling.roster import rank_tag
from m2flow.micro.work.process import TOKEN_VARIABLE
from m2flow.micro.work.settings import WorkerSettings


def spawn(
    settings: WorkerSettings, token: str, output: IO[bytes] | int, *, path: str, cwd: str | None = None, gpus: str = ""
) -> subprocess.Popen[bytes]:
    """Start a worker, or a rank of one.

    Args:
        output: what it prints goes there.
        path: where it finds modules, as in `PYTHONPATH`.
        gpus: those that it sees, as in `CUDA_VISIBLE_DEVICES`; by default those that this process sees.
    """
    environment = {
        **engine_environment(settings.threads, deterministic=settings.deterministic),
        **os.environ,
        TOKEN_VARIABLE: token,
        "OMP_NUM_THREADS": str(settings.threads),
        "MKL_NUM_THREADS": str(settings.threads),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
    }
    module = "m2flow.micro.work.rank" if settings.gang.rank else "m2flow.micro.work.process"
    process = subprocess.Popen(
        [sys.executable, "-m", module, rank_tag(settings.tag, settings.gang.rank)],  # The name is for people who look at `ps`.
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=cwd,
        start_new_session=True,
    )
    if process.stdin is None:
        raise InternalError("a worker has no standard input")
    with contextlib.suppress(BrokenPipeError):  # It died at once, as will be seen.
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
    return process


def how_ended(code: int) -> str:
    """A process's exit status in words.

    >>> how_ended(-9), how_ended(1)
    ('was killed by signal 9', 'ended with status 1')
    """
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def engine_environment(threads: int, *, deterministic: bool) -> dict[str, str]:
    """Environment variables of a process with engines. They must be set before torch is loaded."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Threads that wait spin for some microseconds, then sleep. A step was up to 1.2 times slower without, where cores are free; with
        # more, where they are shared with other work, 3 times slower and worse.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "1000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    # The matrix libraries' results must not depend on memory alignment or on what ran before.
    return environment | ({"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {})
