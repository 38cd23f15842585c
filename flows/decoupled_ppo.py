"""The task of flows/grpo.py with decoupled PPO: answers of older weights, clipped around the weights just before the update.

Plain PPO clips around the weights that sampled, which holds back an update on answers that are two versions old. The decoupled
objective (Hilton et al. 2022, arXiv:2110.00641; for language models AReaL, Fu et al. 2025, arXiv:2505.24298) clips around a proximal
policy, here the trainer's weights before the update, and corrects for who sampled by a weight. It takes a call in the flow: `logprobs`.
"""

from functools import partial

from async_grpo import accuracy
from grpo import DIGITS, demonstration, is_sorted, task

from m2flow import AdamW, Dataset, Policy, Reward, decoupled_ppo, flow, log, nll, steps


@flow(staleness=2)
def decoupled(
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
        rewards, proximal = verifier.score(responses), policy.logprobs(responses)
        policy.update(
            responses,
            rewards,
            loss=decoupled_ppo(eps_high=0.28),
            columns={"proximal_logprobs": proximal},
            minibatch_size=max(1, batch // 2),
            optimizer=tuning,
        )
    log(accuracy=accuracy(policy, verifier, heldout))
