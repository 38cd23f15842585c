"""The task of flows/grpo.py with REINFORCE++: one answer a prompt, a KL penalty in the reward, advantages normalised over the batch.

There are no groups and no critic: the baseline is the mean over the whole batch, whatever its micro-batches and ranks. The method is Hu
et al. 2025, arXiv:2501.03262. The penalty is of the whole answer (the k1 estimate), with a reference that is the warm start.
"""

from functools import partial

from grpo import DIGITS, accuracy, demonstration, is_sorted, task

from m2flow import AdamW, Dataset, Policy, Reference, Reward, flow, log, nll, ppo_clip, steps


@flow
def reinforce_plus_plus(
    num_steps: int = 60,
    warm_steps: int = 350,
    batch: int = 256,
    beta: float = 0.01,
    max_new_tokens: int = 8,
    lr: float = 2e-4,
    eval_every: int = 10,
) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(is_sorted)
    prompts = Dataset.generate(task, num_steps * batch, seed=1, name="prompts")
    heldout = Dataset.generate(partial(task, heldout=True), 512, seed=2, name="heldout")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")

    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))
    reference = Reference(policy)

    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for step in steps(num_steps):
        if step % eval_every == 0:
            log(accuracy=accuracy(policy, verifier, heldout))
        responses = policy.generate(prompts.take(batch), max_new_tokens=max_new_tokens)
        kl = (responses.logprobs - reference.logprobs(responses)).sum(over="sample")
        rewards = verifier.score(responses) - beta * kl
        policy.update(responses, rewards, advantages="reinforce_pp", loss=ppo_clip(), optimizer=tuning)
        log(kl=kl.mean())
    log(accuracy=accuracy(policy, verifier, heldout))
