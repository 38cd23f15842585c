"""The task of flows/grpo.py by rejection sampling: answers that the verifier accepts become the next demonstrations.

Of n answers to a prompt, the right ones are imitated and the others dropped: no advantages, no ratio. It is the simplest
reinforcement learning on answers (RAFT: Dong et al. 2023, arXiv:2304.06767; STaR, ReST), and the baseline to beat.
"""

from functools import partial

from grpo import DIGITS, accuracy, demonstration, is_sorted, task

from m2flow import AdamW, Dataset, Policy, Reward, flow, log, nll, steps


@flow
def best_of_n(
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
        policy.update(responses[rewards == rewards.max(over="group")], loss=nll(), optimizer=tuning)
        log(reward=rewards.mean())
    log(accuracy=accuracy(policy, verifier, heldout))
