"""The task of flows/grpo.py off policy: rollout runs up to two updates ahead, and each token is weighted by a truncated ratio.

`@flow(staleness=2)` lets the next answers be generated while an update runs. The trainer computes the log-probabilities of each answer
before its update; the loss clips around these, and a token counts by their ratio to the rollout's, at most 2 (truncated importance
sampling: Yao et al. 2025). Evaluations ask for the newest weights. On a spec that splits the machine, rollout and training overlap.
"""

from functools import partial

from grpo import DIGITS, demonstration, is_sorted, task

from m2flow import AdamW, Correction, Dataset, Number, Policy, Reward, flow, log, nll, ppo_clip, steps


@flow(staleness=2)
def async_grpo(
    num_steps: int = 60, warm_steps: int = 350, batch: int = 32, n: int = 8, max_new_tokens: int = 8, lr: float = 2e-4, eval_every: int = 10
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
        policy.update(responses, rewards, loss=ppo_clip(eps_high=0.28), correction=Correction(upper=2.0), optimizer=tuning)
    log(accuracy=accuracy(policy, verifier, heldout))


def accuracy(policy: Policy, verifier: Reward, heldout: Dataset) -> Number:
    """The share of held-out prompts that the newest weights' greedy answer gets right."""
    return verifier.score(policy.generate(heldout.all(), max_new_tokens=8, temperature=0, staleness=0)).mean()
