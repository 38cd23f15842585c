"""The task of flows/grpo.py from preferences: supervised fine-tuning on careless demonstrations, then DPO on pairs of answers.

The demonstrations sort upwards in 4 of 10 cases; of each pair the chosen answer is sorted upwards, and the rejected one downwards. No
reward is computed and nothing is sampled while training. Held-out accuracy before and after says what the preferences taught.
"""

import random
from functools import partial

from grpo import DIGITS, accuracy, demonstration, is_sorted, task

from m2flow import AdamW, Dataset, Policy, Reference, Reward, dpo, flow, log, nll, steps


def preference(rng: random.Random) -> dict[str, str]:
    row = task(rng)
    return {"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"][::-1]}


@flow
def sft_then_dpo(num_steps: int = 150, warm_steps: int = 350, batch: int = 64, beta: float = 0.02, lr: float = 2e-4) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(is_sorted)
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")
    pairs = Dataset.generate(preference, num_steps * batch, seed=1, name="pairs").pairs()
    heldout = Dataset.generate(partial(task, heldout=True), 512, seed=2, name="heldout")

    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))
    reference = Reference(policy)

    log(sorted=accuracy(policy, verifier, heldout))
    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for _ in steps(num_steps):
        metrics = policy.update(pairs.take(batch), loss=dpo(beta=beta), reference=reference, optimizer=tuning)
        log(loss=metrics["loss"])
    log(sorted=accuracy(policy, verifier, heldout))
