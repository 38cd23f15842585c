"""The task of flows/grpo.py with GSPO: the ratio that is clipped is that of a whole answer, not of each token.

Each rollout is passed over in four mini-batches, so that three of four optimiser steps train weights that did not sample. The method is
GSPO (Zheng et al. 2025, arXiv:2507.18071); its bounds are narrow, since the ratio is a geometric mean over the answer's tokens.
"""

from functools import partial

from grpo import DIGITS, accuracy, demonstration, is_sorted, task

from m2flow import AdamW, Dataset, Policy, Reward, flow, gspo, log, nll, steps


@flow
def by_sequence(
    num_steps: int = 40, warm_steps: int = 350, batch: int = 32, n: int = 8, max_new_tokens: int = 8, lr: float = 2e-4, eval_every: int = 10
) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(is_sorted)
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
        policy.update(responses, rewards, loss=gspo(eps_low=0.03, eps_high=0.04), minibatch_size=max(1, batch // 4), optimizer=tuning)
    log(accuracy=accuracy(policy, verifier, heldout))
