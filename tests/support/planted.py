"""A flow with one bottleneck at a time, planted by its options or by the cluster, for tests of what `m2flow analyze` says of it."""

from __future__ import annotations

import random
import time
from pathlib import Path

from m2flow import SGD, Dataset, Policy, Reward, Sample, concat, flow, ppo_clip, steps

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"


def question(rng: random.Random) -> dict[str, str]:
    return {"prompt": "".join(rng.choices("0123456789", k=6)) + "="}


def quick(sample: Sample) -> float:
    return 1.0 - len(sample.tokens) / 64


def waiting(sample: Sample) -> float:
    """A judge that waits for a service."""
    time.sleep(0.05)
    return quick(sample)


def computing(sample: Sample) -> float:
    """A judge that computes for about as long."""
    until = time.thread_time() + 0.04
    while time.thread_time() < until:
        pass
    return quick(sample)


JUDGES = {"quick": quick, "waiting": waiting, "computing": computing}


def _train(judge: str, num_steps: int, batch: int, n: int, tokens: int, fetch_s: float, longest: int) -> None:
    policy, reward = Policy(DIGITS, init="random"), Reward(JUDGES[judge])
    prompts = Dataset.generate(question, num_steps * (batch + 1), seed=1)
    for _ in steps(num_steps):
        time.sleep(fetch_s)  # What a program does that reads its rows from far away.
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=tokens)
        if longest:
            last = policy.generate(prompts.take(1), n=2, min_new_tokens=longest, max_new_tokens=longest)
            responses = concat([responses, last])
        policy.update(responses, reward.score(responses), loss=ppo_clip(), optimizer=SGD(1e-6))


@flow
def planted(
    judge: str = "quick",
    num_steps: int = 4,
    batch: int = 8,
    n: int = 4,
    tokens: int = 6,
    fetch_s: float = 0.0,
    longest: int = 0,
) -> None:
    _train(judge, num_steps, batch, n, tokens, fetch_s, longest)


@flow(staleness=1)
def loosened(
    judge: str = "quick",
    num_steps: int = 4,
    batch: int = 8,
    n: int = 4,
    tokens: int = 6,
    fetch_s: float = 0.0,
    longest: int = 0,
) -> None:
    _train(judge, num_steps, batch, n, tokens, fetch_s, longest)
