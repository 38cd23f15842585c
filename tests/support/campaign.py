"""Run random programs continuously, with new seeds: `make fuzz MINUTES=30`.

    python tests/support/campaign.py [--minutes 30] [--jobs 2] [--seed SEED] [--only NUMBER]

Seed and number determine a case (`m2flow.testing.random_programs`): a program of some kind, tight or ample channels, rollout policies,
shared or separate devices, and workers that die. A case whose planned run differs from the eager one is shrunk and printed as text that
recreates it, to be pasted into a test; `--only` runs one case. Every minute the number of cases and their rate are printed. The exit status
is 1 if there was a difference.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import queue
import secrets
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from types import FrameType

from shared_pools import SharedPools

from m2flow.engines.process_pool import ProcessPool
from m2flow.errors import UnusedResult
from m2flow.testing.random_programs import KINDS, Case, Dice, drawn_case, shrunk

_PRINTED_EVERY_S = 60.0
_LONGEST_S = 120.0
"""Processor time that a case may take."""
_LONGEST_WAIT_S = 3600
"""Wall-clock time that a case may take, on however busy a machine."""
_COLLECTED_EVERY = 200
"""Cases between two collections of cyclic garbage, which would otherwise take a tenth of the time."""
_MAX_TURNS = 50_000
"""Turns of a run after which it counts as a deadlock."""


def numbered_case(seed: str, number: int) -> Case:
    """Draw the case that a number stands for."""
    dice = Dice(f"{seed}, {number}")
    return drawn_case(dice, KINDS[number % len(KINDS)], is_tight=dice.choice((False, True)), loses=dice.integer(0, 9) == 9)


@contextlib.contextmanager
def fast_process() -> Iterator[None]:
    """Speed up small runs in this process: one thread for torch, run files in shared memory, no automatic garbage collection, and one pool
    of child processes for isolated functions, whose server takes longer to start than most programs."""
    import torch

    from m2flow.engines import functions
    from m2flow.testing import world

    torch.set_num_threads(1)
    world.MAX_TURNS = _MAX_TURNS
    pools = SharedPools()
    functions.ProcessPool = pools.pool  # type: ignore[assignment,misc]
    before, collects = tempfile.tempdir, gc.isenabled()
    if Path("/dev/shm").is_dir():
        tempfile.tempdir = "/dev/shm"
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", UnusedResult)
            yield
    finally:
        functions.ProcessPool = ProcessPool  # type: ignore[misc]
        pools.close()
        tempfile.tempdir = before
        if collects:
            gc.enable()


def check(case: Case) -> str | None:
    """Run a case under time limits; returns its difference, or None."""
    for sent in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(sent, _too_long)
    signal.setitimer(signal.ITIMER_PROF, _LONGEST_S)
    signal.alarm(_LONGEST_WAIT_S)
    try:
        return case.difference()
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the case has not come to its end in {_LONGEST_S:.0f} s of a processor, or in {_LONGEST_WAIT_S} s")


def _work(seed: str, first: int, stride: int, until: float, said: Queue[tuple[int, str]]) -> None:
    """Run every `stride`th case from `first` on; put its number and its difference (or an empty text) into the queue."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent process handles Ctrl-C.
    with fast_process():
        number = first
        while time.monotonic() < until:
            case = numbered_case(seed, number)
            found = check(case)
            text = ""
            if found is not None:
                smaller = shrunk(case)
                text = f"DIFFERENCE (SEED={seed}, number {number})\n{smaller.difference()}\n{smaller}\n"
                text += "" if smaller == case else f"as it was drawn: {found}\n{case}\n"
            said.put((number, text))
            number += stride
            if number // stride % _COLLECTED_EVERY == 0:
                gc.collect()


def campaign(seed: str, minutes: float, jobs: int) -> int:
    """Run cases for some minutes in several processes; returns the number of differences."""
    print(f"SEED={seed}", flush=True)
    context = multiprocessing.get_context("spawn")
    said: Queue[tuple[int, str]] = context.Queue()
    begun = time.monotonic()
    until = begun + 60 * minutes
    workers = [context.Process(target=_work, args=(seed, i, jobs, until, said), daemon=True) for i in range(jobs)]
    for worker in workers:
        worker.start()
    count = differences = 0
    told = begun
    try:
        while any(worker.is_alive() for worker in workers) or not said.empty():
            with contextlib.suppress(queue.Empty):
                _, text = said.get(timeout=1.0)
                count += 1
                differences += bool(text)
                print(text, end="", flush=bool(text))
            now = time.monotonic()
            if now - told >= _PRINTED_EVERY_S:
                told = now
                print(_progress_line(count, differences, now - begun), flush=True)
    except KeyboardInterrupt:
        pass
    for worker in workers:
        worker.terminate()
        worker.join()
    print(_progress_line(count, differences, time.monotonic() - begun) + f"; SEED={seed}", flush=True)
    broken = [worker.exitcode for worker in workers if worker.exitcode not in (0, -signal.SIGTERM)]
    if broken:
        print(f"a process has ended with status {broken[0]}")
    return differences + len(broken)


def _progress_line(count: int, differences: int, took_s: float) -> str:
    return f"{count:,} programs, {differences} differences, {count / took_s:.1f} a second, {took_s / 60:.0f} minutes"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python tests/support/campaign.py", description="Run random programs planned and eager.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", default="", help="any text; a new one if it is not given")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run the case of this number alone")
    given = parser.parse_args(arguments)
    seed = given.seed or secrets.token_hex(4)
    if given.only is None:
        return 1 if campaign(seed, given.minutes, given.jobs) else 0
    case = numbered_case(seed, given.only)
    print(case)
    with fast_process():
        found = check(case)
    print(found or "no difference")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
