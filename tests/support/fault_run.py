"""A run with fake engines in a process of its own, for `test_runtime_faults`: fault_run.py RUNS_DIR REWARD [FILE_BYTES]."""

import contextlib
import os
import resource
import socket
import sys
import time
from collections.abc import Callable

import psutil

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.channels.zeromq import LinkDialer
from m2flow.errors import M2FlowError
from m2flow.macro.session import Backend
from m2flow.micro.records.ledger import read_samples
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec


def one(sample: Sample) -> float:
    return 1.0


def dies(sample: Sample) -> float:
    os._exit(3)


def speaks_no_utf8(sample: Sample) -> float:
    raise ValueError("half a pair: \ud800")


def prints_a_lot(sample: Sample) -> float:
    print("x" * 3_000_000)
    return 1.0


def forks(sample: Sample) -> float:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return 1.0


def leaves(sample: Sample) -> float:
    raise SystemExit(4)


REWARDS: dict[str, Callable[[Sample], float]] = {f.__name__: f for f in (one, dies, speaks_no_utf8, prints_a_lot, forks, leaves)}


running: list[Run] = []
"""The one whose workers are up."""


def wait_until_recorded() -> None:
    """The ledger is committed every second; a fast machine would fill the disk before."""
    deadline = time.monotonic() + 240
    while running and not any(read_samples(running[0].run_dir)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def say_what_is_none_everywhere() -> None:
    """Five bytes and others, to every Unix socket that the run's processes listen at."""
    processes = [psutil.Process(), *psutil.Process().children()]
    places = {str(found.laddr) for process in processes for found in process.net_connections("unix") if str(found.laddr).startswith("/")}
    assert len(places) > 3, places
    for place in places:
        for said in (b"\x01\x00\x02\x00A", b"\x01\x00\x05\x00m2f!", b"\xff" * 64, b""):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(place)
                stranger.sendall(said)
    controller = running[0]._controller
    assert controller is not None
    for name in ("nobody", "rollout-0#x", "rollout-0.other"):  # These know the secret.
        dialer = LinkDialer()
        dialer.open(controller._address, name, controller._launcher.token)
        dialer.send(b"\xc1")
        dialer.close(drain_s=10.0)


@flow
def faulty(reward: str = "one", num_steps: int = 2) -> None:
    name, _, is_counted = reward.partition("_and_")
    policy, judge = Policy("fake"), Reward(REWARDS[name], on_error=-1.0 if is_counted else "raise")
    prompts = Dataset([{"prompt": f"{i}="} for i in range(12)])
    for step in steps(num_steps):
        if step == 2:
            wait_until_recorded()
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=6)
        policy.update(responses, judge.score(responses))


def main(runs_dir: str, reward: str, file_bytes: str = "0") -> None:
    if reward == "forever":
        options: dict[str, object] = {"num_steps": 1_000_000}
    else:
        options = {"reward": "one" if reward == "besieged" else reward, "num_steps": 400 if int(file_bytes) else 2}
    if int(file_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(file_bytes), int(file_bytes)))
    spec = ClusterSpec(
        placement="split", device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake", token_budget=100)
    )

    def up(backend: Backend) -> Backend:
        running.append(run)
        if reward == "besieged":
            say_what_is_none_everywhere()
        return backend

    run = Run(faulty, options, spec, RunSettings(runs_dir=runs_dir), around=up)
    start = time.monotonic()
    try:
        summary = run.execute()
        print(f"ended well: {summary.samples} samples")
    except M2FlowError as error:
        print(f"{type(error).__name__}: {error}")
    print(f"after {time.monotonic() - start:.1f} s in {run.run_dir}")


if __name__ == "__main__":
    main(*sys.argv[1:])
