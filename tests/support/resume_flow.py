"""A flow that has its own run killed, once, at a moment that `killed_in` names; for `test_resume_processes`."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, log, loss, steps
from m2flow.recipe import Counts


def kill_run(here: str, now: str) -> None:
    """SIGKILL to the controller, if this is the moment and it has not come before."""
    file = Path(os.environ.get("M2FLOW_TEST_KILLS", "/nowhere"))
    if here != now or not file.exists():
        return
    try:
        pid = int(file.read_text())
        file.unlink()
    except (FileNotFoundError, ValueError):
        return
    os.kill(pid, signal.SIGKILL)


def arm() -> None:
    """Say whom to kill; only the first attempt at the run does."""
    file = Path(os.environ.get("M2FLOW_TEST_KILLS", "/nowhere"))
    if file.exists() and not file.read_text():
        file.write_text(str(os.getpid()))


def disarmed() -> bool:
    """Whether this process is the first to say so."""
    try:
        Path(os.environ["M2FLOW_TEST_KILLS"]).unlink()
    except FileNotFoundError:
        return False
    return True


def has_file(pattern: str) -> bool:
    """Whether the directory of runs has a file of this pattern."""
    return any(Path(os.environ.get("M2FLOW_TEST_RUNS", "/nowhere")).glob(pattern))


WHOLE = "*/checkpoints/step-*"
"""A whole checkpoint."""


def watch(now: str, *patterns: str, last: tuple[str, str]) -> None:
    """Kill as soon as the run's directory has a file of each pattern.

    Args:
        last: what this process does at the latest while they are all there, an event of `sys.audit`, and a part of the path that it is
            about: the thread that looks for the files may be late.
    """

    def are_there() -> bool:
        return all(map(has_file, patterns))

    def look() -> None:
        while Path(os.environ["M2FLOW_TEST_KILLS"]).exists():
            if are_there():
                kill_run(now, now)

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == last[0] and last[1] in str(arguments[0]) and are_there():
            kill_run(now, now)

    threading.Thread(target=look, daemon=True).start()
    sys.addaudithook(hear)


def until_whole() -> None:
    """Wait for the run's first checkpoint: one that is written behind steps may still be under way when they are over."""
    deadline = time.monotonic() + 120
    while not has_file(WHOLE):
        assert time.monotonic() < deadline, "there is no checkpoint"
        time.sleep(0.01)


@flow
def dies(killed_in: str = "", num_steps: int = 4) -> None:
    def judged(sample: Sample) -> float:
        if sample.id.call > 12:
            kill_run("generation", killed_in)
        return len(str(sample.text)) % 7 / 7

    def counted(counts: Counts) -> float:
        if killed_in == "trainers" or (killed_in == "trainer" and counts.num_tokens > 20 and disarmed()):
            os.kill(os.getpid(), signal.SIGKILL)
        if counts.num_tokens % 3 == 0 or counts.num_tokens > 20:
            kill_run("apply", killed_in)
        return float(counts.num_tokens)

    @loss(needs=["logprobs", "behaviour_logprobs", "advantages"], denominator=counted)
    def plain(logprobs, behaviour_logprobs, advantages):  # type: ignore[no-untyped-def]
        return -(logprobs - behaviour_logprobs).exp() * advantages

    policy, judge = Policy("fake"), Reward(judged)
    prompts = Dataset([{"prompt": f"{i * i}="} for i in range(12)])
    if killed_in == "checkpoint":
        # One is whole, the next is being written.
        watch("checkpoint", WHOLE, "*/checkpoints/.step-*", last=("os.rename", "/.step-"))
    if killed_in == "final":
        watch("final", "*/checkpoints/final*", last=("os.remove", ".owner"))
    for step in steps(num_steps):
        if step == 0:
            arm()
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=6)
        metrics = policy.update(responses, judge.score(responses), loss=plain, optimizer=AdamW(1e-3))
        log(tokens=metrics["num_tokens"])
        if step == 1 and killed_in == "checkpoint":
            float(metrics["num_tokens"])
            until_whole()
        if step == 2 and killed_in == "after":
            float(metrics["num_tokens"])
            kill_run("after", killed_in)
        print(f"step {step}")


def least_rewarded(row: dict[str, object], seen: tuple[float, ...]) -> float | None:
    """New rows first, then those with the lowest rewards; none that were rewarded well twice."""
    return -1.0 if not seen else None if len(seen) > 1 and min(seen[-2:]) > 0.6 else seen[-1]


@flow
def climbs(killed_in: str = "", num_steps: int = 8) -> None:
    def judged(sample: Sample) -> float:
        if sample.id.call > 24:
            kill_run("generation", killed_in)
        return len(str(sample.text)) % 7 / 6

    policy, judge = Policy("fake"), Reward(judged)
    prompts = Dataset([{"prompt": f"{i * i}="} for i in range(9)], curriculum=least_rewarded)
    for step in steps(num_steps):
        if step == 0:
            arm()
        asked = prompts.take(3)
        first, second, third = (sample.row for sample in asked)
        log(drawn=100 * first + 10 * second + third)
        responses = policy.generate(asked, n=2, max_new_tokens=6)
        rewards = judge.score(responses)
        prompts.observe(responses, rewards)
        metrics = policy.update(responses, rewards, optimizer=AdamW(1e-3))
        log(tokens=metrics["num_tokens"])
        if step == 5 and killed_in == "after":
            float(metrics["num_tokens"])
            kill_run("after", killed_in)
