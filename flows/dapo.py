"""The task of flows/grpo.py with dynamic sampling: groups whose answers are all right or all wrong are replaced while others run.

Such groups have advantages of 0 and teach nothing. `generate` draws further prompts for them, so that each update has `batch`
groups to learn from. The method is DAPO's (Yu et al. 2025, arXiv:2503.14476): dynamic sampling, asymmetric clipping, and a loss
over tokens.
"""

from functools import partial

from grpo import DIGITS, accuracy, demonstration, is_sorted, task

from m2flow import AdamW, Dataset, Policy, Reward, flow, informative, log, nll, ppo_clip, steps


@flow
def dapo(
    num_steps: int = 40, warm_steps: int = 350, batch: int = 16, n: int = 8, max_new_tokens: int = 8, lr: float = 2e-4, eval_every: int = 10
) -> None:
    policy = Policy(DIGITS, init="random")
    verifier = Reward(is_sorted)
    prompts = Dataset.generate(task, 4 * num_steps * batch, seed=1, name="prompts")
    heldout = Dataset.generate(partial(task, heldout=True), 512, seed=2, name="heldout")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")

    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))

    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for step in steps(num_steps):
        if step % eval_every == 0:
            log(accuracy=accuracy(policy, verifier, heldout))
        responses = policy.generate(prompts, n=n, max_new_tokens=max_new_tokens, count=batch, score=verifier, keep=informative)
        rewards = verifier.score(responses)
        policy.update(responses, rewards, loss=ppo_clip(eps_high=0.28), optimizer=tuning)
    log(accuracy=accuracy(policy, verifier, heldout), prompts_drawn=prompts.cursor)
