"""Functions in processes that can be killed alone: what holds the interpreter's lock, crashes or sets signal handlers harms nothing."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import psutil
import pytest
from message_parts import lacks

from m2flow import Dataset, Policy, Reward, Role, Sample, call, flow, nll, op, steps
from m2flow.engines.process_pool import ChildDied, ChildTimedOut, ProcessPool, Task
from m2flow.errors import OptionError
from m2flow.macro.tracing import trace
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.world import run_eager, run_planned

Value = TypeVar("Value")
LOCK_HELD_S = 1000
FAKES = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake"),
    train=TrainSpec(engine="fake"),
    functions=FunctionSpec(workers=1, chunk=8),
)
ROWS = [{"prompt": f"{i}="} for i in range(6)]
MODES = pytest.mark.parametrize("run", [run_eager, run_planned], ids=["eager", "planned"])


# The pool


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    made = ProcessPool()
    yield made
    made.close()


def task(function: Callable[[bytes], bytes]) -> Task:
    import cloudpickle

    return Task(cloudpickle.dumps(function))


def test_a_function_runs_in_another_process_on_its_main_thread(pool: ProcessPool) -> None:
    def where(argument: bytes) -> bytes:
        is_main = threading.current_thread() is threading.main_thread()
        return json.dumps([argument.decode(), os.getpid(), is_main]).encode()

    argument, pid, is_main = json.loads(pool.run(task(where), b"a"))
    assert (argument, is_main) == ("a", True)
    assert pid != os.getpid()


def test_one_child_serves_call_after_call(pool: ProcessPool) -> None:
    pids = task(lambda argument: str(os.getpid()).encode())
    assert len({pool.run(pids, b"") for _ in range(5)}) == 1


def test_what_holds_the_lock_is_killed_with_all_that_it_has_started(pool: ProcessPool) -> None:
    def hang(argument: bytes) -> bytes:
        subprocess.Popen(["sleep", str(LOCK_HELD_S)])
        ctypes.PyDLL(None).sleep(LOCK_HELD_S)  # PyDLL keeps the interpreter's lock.
        return b""

    with pytest.raises(ChildTimedOut):
        pool.run(task(hang), b"", timeout_s=0.5)
    started, deadline = ["sleep", str(LOCK_HELD_S)], time.monotonic() + 30.0
    while left := [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == started]:
        assert time.monotonic() < deadline, left  # A killed process is seen until the kernel has taken it down.
        time.sleep(0.01)
    assert pool.run(task(bytes), b"well") == b"well"


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda argument: os._exit(3), "ended with status 3"),
        (lambda argument: ctypes.string_at(0), "was killed by SIGSEGV"),
        (lambda argument: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    ],
    ids=["exit", "segfault", "kill"],
)
def test_how_a_child_ended_is_said(pool: ProcessPool, end: Callable[[bytes], bytes], how: str) -> None:
    with pytest.raises(ChildDied, match=how):
        pool.run(task(end), b"")


def test_a_child_that_died_between_two_calls_harms_neither(pool: ProcessPool) -> None:
    pid = int(pool.run(task(lambda argument: str(os.getpid()).encode()), b""))
    child = psutil.Process(pid)
    child.kill()
    while child.status() != psutil.STATUS_ZOMBIE:  # Nobody waits for it before it is missed.
        time.sleep(0.01)
    assert pool.run(task(bytes), b"well") == b"well"


def test_a_function_that_can_not_be_unpickled_is_said(pool: ProcessPool) -> None:
    with pytest.raises(ChildDied, match="can't load the function: ModuleNotFoundError"):
        pool.run(Task(pickle.dumps(task).replace(__name__.encode(), b"x" * len(__name__))), b"")


def test_an_alarm_that_a_function_leaves_behind_does_not_go_off_in_the_next(pool: ProcessPool) -> None:
    def leave(argument: bytes) -> bytes:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return str(os.getpid()).encode()

    def wait(argument: bytes) -> bytes:
        signal.sigtimedwait([signal.SIGUSR1], 0.2)
        return str(os.getpid()).encode()

    assert pool.run(task(leave), b"") == pool.run(task(wait), b"")


def test_children_end_with_the_process_that_they_belong_to_however_that_ends() -> None:
    program = """
import os, signal, threading, pickle, functools, time
from m2flow.engines.process_pool import ProcessPool, Task
def tell(argument):
    print(os.getpid(), os.getppid(), flush=True)
    import ctypes
    ctypes.PyDLL(None).sleep(1000)
import cloudpickle
pool = ProcessPool()
threading.Thread(target=pool.run, args=(Task(cloudpickle.dumps(tell)), b""), daemon=True).start()
time.sleep(1000)
"""
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    left = [psutil.Process(pid) for pid in pids]
    worker.kill()
    worker.communicate()
    _, alive = psutil.wait_procs(left, timeout=240)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


# Flows


def in_order(of_samples: Mapping[tuple[int, int], Value]) -> list[Value]:
    return [of_samples[key] for key in sorted(of_samples)]


def fails_in_many_ways(sample: Sample) -> dict[str, float]:
    match sample.id.prompt:
        case 1:
            ctypes.PyDLL(None).sleep(LOCK_HELD_S)
        case 2:
            os._exit(3)
        case 3:
            raise ValueError("no judge at home")
        case 4:
            return {"reward": float("nan")}
    return {"reward": 1.0, "length": float(sample.num_tokens)}


@flow
def counted() -> None:
    policy, verifier = Policy("fake"), Reward(fails_in_many_ways, timeout_s=1.0, on_error=-1.0)
    for _ in steps(1):
        responses = policy.generate(Dataset(ROWS).take(6), n=1, max_new_tokens=6)
        verifier.score(responses)
        policy.update(responses, loss=nll())


@MODES
def test_a_sample_that_can_not_be_judged_counts_as_the_flow_says_and_the_run_goes_on(run: Callable[..., Answer]) -> None:
    answer = run(counted, {}, FAKES)
    assert answer.error == ""
    assert in_order(answer.rewards) == [1.0, -1.0, -1.0, -1.0, -1.0, 1.0]
    failed = [of for of in in_order(answer.parts) if "length" not in of]
    assert failed == [{"timed_out": 1.0}, {"died": 1.0}, {"raised": 1.0}, {"invalid": 1.0}]


@flow
def not_counted() -> None:
    policy, verifier = Policy("fake"), Reward(fails_in_many_ways, timeout_s=1.0)
    verifier.score(policy.generate(Dataset(ROWS).take(6), n=1, max_new_tokens=6))


@MODES
def test_without_a_reward_to_count_the_earliest_sample_is_an_error(run: Callable[..., Answer]) -> None:
    answer = run(not_counted, {}, FAKES)
    assert not lacks(answer.error, "RewardError: ", "fails_in_many_ways", "longer than 1 s", "sample p1/0")


class Strict(Role):
    def __init__(self, least: int) -> None:
        self.least = least

    @call(returns="reward", isolated=True)
    def score(self, sample: Sample) -> dict[str, float]:
        return {"reward": float(sample.num_tokens >= self.least), "length": float(sample.num_tokens)}


def _drawn(sample: Sample, reward: float, scale: float, rng: random.Random) -> list[object]:
    return [reward * scale, rng.random(), sample.text, sample.id.pack(), sample.tokens.tolist()]


async def _ranked(samples: list[Sample], rewards: list[float]) -> list[int]:
    return sorted(range(len(samples)), key=lambda i: (rewards[i], samples[i].num_tokens))


def _longest(samples: list[Sample]) -> int:
    return max(sample.num_tokens for sample in samples)


@flow
def computed(isolated: bool = True) -> None:
    policy = Policy("fake")
    drawn, ranked = op(isolated=isolated)(_drawn), op(granularity="group", isolated=isolated)(_ranked)
    longest = op(granularity="batch", isolated=isolated)(_longest)
    judge = Strict(4)
    plain = Reward(lambda sample: sample.num_tokens / 7, name="plain", isolated=isolated)
    for _ in steps(2):
        responses = policy.generate(Dataset(ROWS).take(3), n=2, max_new_tokens=6)
        rewards = judge.score(responses) + plain.score(responses)
        found = [list(drawn(responses, rewards, 0.3)), list(ranked(responses, rewards)), float(longest(responses))]
        found.append(list(responses.map(lambda sample: [sample.text, None, 1e300], isolated=isolated)))
        print(json.dumps(found))
        policy.update(responses, rewards)


@MODES
def test_results_are_the_same_in_and_out_of_process(run: Callable[..., Answer], capsys: pytest.CaptureFixture[str]) -> None:
    answers, printed = [], []
    for isolated in (True, False):
        answers.append(run(computed, {"isolated": isolated}, FAKES))
        printed.append(capsys.readouterr().out)
    inside, outside = answers
    assert inside.error == ""
    assert printed[0]
    assert printed[0] == printed[1]
    assert (inside.rewards, inside.parts, inside.weights) == (outside.rewards, outside.parts, outside.weights)


class TookTooLong(Exception):
    pass


def with_an_alarm(sample: Sample) -> float:
    """As math-verify bounds its time, whose `parse` and `verify` set a handler for SIGALRM."""

    def handle(number: int, frame: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.05 if sample.id.prompt == 1 else 60)
    try:
        while sample.id.prompt == 1:
            signal.pause()
        return 1.0
    except TookTooLong:
        return 0.5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@flow
def alarmed() -> None:
    policy, verifier = Policy("fake"), Reward(with_an_alarm)
    for _ in steps(2):
        responses = policy.generate(Dataset(ROWS).take(3), n=1, max_new_tokens=6)
        verifier.score(responses)
        policy.update(responses, loss=nll())


@MODES
def test_a_reward_that_sets_signal_handlers_gets_a_main_thread(run: Callable[..., Answer]) -> None:
    answer = run(alarmed, {}, FAKES)
    assert answer.error == ""
    assert in_order(answer.rewards) == [1.0, 0.5, 1.0] * 2


def test_what_runs_alone_by_default_is_what_is_plain_and_has_a_time_limit() -> None:
    def plain(sample: Sample) -> float:
        return 0.0

    async def later(sample: Sample) -> float:
        return 0.0

    def isolated(*rewards: Callable[[], Reward]) -> list[bool]:
        found: list[bool] = []

        @flow
        def asked() -> None:
            found.extend(make().is_isolated for make in rewards)
            Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=1)

        trace(asked, {})
        return found

    assert isolated(
        lambda: Reward(plain),
        lambda: Reward(plain, timeout_s=5),
        lambda: Reward(plain, isolated=True),
        lambda: Reward(plain, timeout_s=5, isolated=False),
        lambda: Reward(later, timeout_s=5),
        lambda: Reward(later, isolated=True),
    ) == [False, True, True, False, False, True]


def test_a_role_s_state_can_not_be_elsewhere() -> None:
    with pytest.raises(OptionError, match="isolated=True"):
        call(isolated=True, writes=["judge.memory"])


@pytest.mark.parametrize("on_error", [float("nan"), "drop", True])
def test_a_failed_sample_counts_as_a_number(on_error: object) -> None:
    @flow
    def wrong() -> None:
        Reward(len, on_error=on_error)  # type: ignore[arg-type]

    with pytest.raises(OptionError, match="on_error"):
        trace(wrong, {})
