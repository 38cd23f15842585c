"""Flows whose steps take longer than they must, and the same again with what helped: the cases of docs/viewer.md.

A small model learns to answer at once, but for questions that begin with 9: those it answers at length. One question of a step is of that
kind.
"""

import random
import time
from pathlib import Path

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, log, nll, ppo_clip, steps

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"
BATCH, N = 16, 8
JUDGE_S = 0.02
REPORT_S = 1.0


def question(rng: random.Random, number: int) -> dict[str, str]:
    first = "9" if number % BATCH == 0 else rng.choice("012345678")
    return {"prompt": first + "".join(rng.choices("0123456789", k=5)) + "="}


def answered(rng: random.Random) -> dict[str, str]:
    row = question(rng, rng.randrange(2) * BATCH // 2)
    return {**row, "target": "9" * 48 if row["prompt"].startswith("9") else "123"}


def taught() -> Policy:
    policy = Policy(DIGITS, init="random")
    lessons = Dataset.generate(answered, 40 * 64, seed=3, name="lessons")
    policy.update(lessons.all(), loss=nll(), minibatch_size=64, optimizer=AdamW(1e-3, warmup_steps=5))
    return policy


def questions(num_steps: int) -> Dataset:
    rng = random.Random(1)
    return Dataset([question(rng, number) for number in range(num_steps * BATCH)], name="questions", shuffle=False)


def brevity(sample: Sample) -> float:
    return 1.0 - len(sample.tokens) / 64


def slow_brevity(sample: Sample) -> float:
    """A judge that waits for somebody else: a service, a sandbox."""
    time.sleep(JUDGE_S)
    return brevity(sample)


def report(reward: float) -> None:
    """What a program does between two steps by itself: writes a table, asks a dashboard."""
    time.sleep(REPORT_S)


@flow
def tail(num_steps: int = 8) -> None:
    """Each step waits for its longest sample."""
    policy, judge, prompts = taught(), Reward(brevity), questions(num_steps)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(BATCH), n=N, max_new_tokens=56)
        policy.update(responses, judge.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-5))


@flow(staleness=1)
def tail_covered(num_steps: int = 8) -> None:
    """The next step's samples begin while the longest of this one go on."""
    policy, judge, prompts = taught(), Reward(brevity), questions(num_steps)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(BATCH), n=N, max_new_tokens=56)
        policy.update(responses, judge.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-5))


@flow(staleness=1)
def barrier(num_steps: int = 8) -> None:
    """The program looks at each step's reward before it makes the next."""
    policy, judge, prompts = taught(), Reward(brevity), questions(num_steps)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(BATCH), n=N, max_new_tokens=12)
        rewards = judge.score(responses)
        policy.update(responses, rewards, loss=ppo_clip(), optimizer=AdamW(1e-5))
        report(float(rewards.mean()))


@flow(staleness=1)
def barrier_lagged(num_steps: int = 8) -> None:
    """It looks at the reward of the step before, which is known by then."""
    policy, judge, prompts = taught(), Reward(brevity), questions(num_steps)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(BATCH), n=N, max_new_tokens=12)
        rewards = judge.score(responses)
        metrics = policy.update(responses, rewards, loss=ppo_clip(), optimizer=AdamW(1e-5))
        before = metrics.lagged(1)
        if before is not None:
            report(before["reward"])


@flow
def slow_reward(num_steps: int = 8) -> None:
    """One process judges one sample after the other."""
    policy, judge, prompts = taught(), Reward(slow_brevity), questions(num_steps)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(BATCH), n=N, max_new_tokens=12)
        rewards = judge.score(responses)
        log(reward=rewards.mean())
        policy.update(responses, rewards, loss=ppo_clip(), optimizer=AdamW(1e-5))
