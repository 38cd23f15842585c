"""Flows whose steps take longer than they must, and the same again with what helped: the cases of docs/guide/schedule.md.

A small model that was never trained answers with as many tokens as chance gives it: 13 on average, now and then as many as it may. It is
paid for short answers.
"""

import random
import time
from pathlib import Path

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, log, ppo_clip, steps

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"
BATCH, N = 16, 8
JUDGE_S = 0.02
REPORT_S = 0.3


def question(rng: random.Random) -> dict[str, str]:
    return {"prompt": "".join(rng.choices("0123456789", k=6)) + "="}


def questions(num_steps: int) -> Dataset:
    return Dataset.generate(question, num_steps * BATCH, seed=1)


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
    policy, judge, prompts = Policy(DIGITS, init="random"), Reward(brevity), questions(num_steps)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(BATCH), n=N, max_new_tokens=56)
        policy.update(responses, judge.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-5))


@flow(staleness=1)
def tail_covered(num_steps: int = 8) -> None:
    """The next step's samples begin while the longest of this one go on."""
    policy, judge, prompts = Policy(DIGITS, init="random"), Reward(brevity), questions(num_steps)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(BATCH), n=N, max_new_tokens=56)
        policy.update(responses, judge.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-5))


@flow(staleness=1)
def barrier(num_steps: int = 8) -> None:
    """The program looks at what each update reported before it makes the next step."""
    policy, judge, prompts = Policy(DIGITS, init="random"), Reward(brevity), questions(num_steps)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(BATCH), n=N, max_new_tokens=12)
        rewards = judge.score(responses)
        metrics = policy.update(responses, rewards, loss=ppo_clip(), optimizer=AdamW(1e-5))
        report(float(metrics["reward"]))


@flow(staleness=1)
def barrier_lagged(num_steps: int = 8) -> None:
    """It looks at the update before that one, which is over by then or soon."""
    policy, judge, prompts = Policy(DIGITS, init="random"), Reward(brevity), questions(num_steps)
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
    policy, judge, prompts = Policy(DIGITS, init="random"), Reward(slow_brevity), questions(num_steps)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(BATCH), n=N, max_new_tokens=12)
        rewards = judge.score(responses)
        log(reward=rewards.mean())
        policy.update(responses, rewards, loss=ppo_clip(), optimizer=AdamW(1e-5))
