"""The task of flows/grpo.py from few prompts, drawn by what they still teach.

A prompt that is always or never solved has advantages of 0. `observe` remembers each prompt's mean rewards; of the prompts that are
left, `take` draws those nearest to one answer in two first, and a prompt that was solved by all its answers twice is left out. The
draw waits for these rewards, so every schedule draws the same prompts.
"""

from collections.abc import Mapping
from functools import partial

from grpo import DIGITS, accuracy, demonstration, is_sorted, task

from m2flow import AdamW, Dataset, Policy, Reward, flow, log, nll, ppo_clip, steps


def worth_learning(row: Mapping[str, object], seen: tuple[float, ...]) -> float | None:
    """New prompts first, then those nearest to one right answer in two; `None`: not any more."""
    if seen[-2:] == (1.0, 1.0):
        return None
    return abs(seen[-1] - 0.5) if seen else 0.0


@flow
def curriculum(
    num_steps: int = 60,
    warm_steps: int = 350,
    pool: int = 512,
    batch: int = 32,
    n: int = 8,
    max_new_tokens: int = 8,
    lr: float = 2e-4,
    eval_every: int = 10,
) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(is_sorted)
    prompts = Dataset.generate(task, pool, seed=1, name="prompts", curriculum=worth_learning)
    heldout = Dataset.generate(partial(task, heldout=True), 512, seed=2, name="heldout")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")

    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))

    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for step in steps(num_steps):
        if step % eval_every == 0:
            log(accuracy=accuracy(policy, verifier, heldout))
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=max_new_tokens)
        rewards = verifier.score(responses)
        prompts.observe(responses, rewards)
        policy.update(responses, rewards, loss=ppo_clip(eps_high=0.28), optimizer=tuning)
    log(accuracy=accuracy(policy, verifier, heldout))
