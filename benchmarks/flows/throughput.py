"""GRPO on prompts from a file, with a reward that costs nothing or a little time: what the benchmarks time."""

import time
from pathlib import Path

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, steps


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return sum(c.isdigit() for c in text) / (len(text) + 1)


def slow_digit_share(sample: Sample) -> float:
    """The same after 3 ms of Python, as a parser or a checker might take."""
    end = time.thread_time() + 0.003
    while time.thread_time() < end:
        pass
    return digit_share(sample)


@flow
def throughput(
    model: str,
    prompts: str,
    num_steps: int = 8,
    batch: int = 32,
    n: int = 8,
    max_new: int = 64,
    full: bool = False,
    slow_reward: bool = False,
    call_by_call: bool = False,
) -> None:
    policy = Policy(model)
    reward = Reward(slow_digit_share if slow_reward else digit_share)
    dataset = Dataset([{"prompt": line} for line in Path(prompts).read_text().splitlines()], name="prompts", shuffle=False)
    optimizer = AdamW(lr=1e-6)
    for _ in steps(num_steps):
        responses = policy.generate(dataset.take(batch), n=n, max_new_tokens=max_new, min_new_tokens=max_new if full else 0)
        if call_by_call:
            list(responses)
        rewards = reward.score(responses)
        if call_by_call:
            list(rewards)
        metrics = policy.update(responses, rewards, optimizer=optimizer)
        if call_by_call:
            float(metrics["reward"])
