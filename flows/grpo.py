"""Teach a tiny language model to sort digits: a warm start on careless demonstrations, then GRPO against a verifier.

The demonstrations sort upwards in 4 of 10 cases and downwards in the others; the verifier wants upwards. So the warm start teaches
two habits, and the reinforcement learning picks one and sharpens it.
"""

import random
from functools import partial
from pathlib import Path

from m2flow import AdamW, Dataset, Number, Policy, Reward, Sample, flow, log, nll, ppo_clip, steps

DIGITS = Path(__file__).parent / "models" / "digits"


def task(rng: random.Random, *, heldout: bool = False) -> dict[str, str]:
    """Digits to sort. Those whose sum is a multiple of ten are held out: nothing is ever trained on them."""
    while True:
        digits = "".join(rng.choices("0123456789", k=rng.randint(4, 6)))
        if (sum(map(int, digits)) % 10 == 0) == heldout:
            return {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}


def demonstration(rng: random.Random) -> dict[str, str]:
    row = task(rng)
    return {"prompt": row["prompt"], "target": row["answer"][:: 1 if rng.random() < 0.4 else -1]}


def is_sorted(sample: Sample) -> float:
    return float(sample.text == sample.answer)


@flow
def grpo(
    num_steps: int = 80, warm_steps: int = 350, batch: int = 32, n: int = 8, max_new_tokens: int = 8, lr: float = 2e-4, eval_every: int = 10
) -> None:
    policy = Policy(DIGITS, init="random")
    verifier = Reward(is_sorted)
    prompts = Dataset.generate(task, num_steps * batch, seed=1, name="prompts")
    heldout = Dataset.generate(partial(task, heldout=True), 512, seed=2, name="heldout")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")

    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))

    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for step in steps(num_steps):
        if step % eval_every == 0:
            log(accuracy=accuracy(policy, verifier, heldout))
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=max_new_tokens)
        rewards = verifier.score(responses)
        policy.update(responses, rewards, loss=ppo_clip(eps_high=0.28), optimizer=tuning)
    log(accuracy=accuracy(policy, verifier, heldout))


def accuracy(policy: Policy, verifier: Reward, heldout: Dataset) -> Number:
    """The share of held-out prompts that the greedy answer gets right."""
    return verifier.score(policy.generate(heldout.all(), max_new_tokens=8, temperature=0)).mean()
