"""PPO with a critic and a KL penalty, on the task of grpo.py: a value for every token instead of a comparison within a group.

Both models start from the policy after its warm start: the reference stays what it is, the critic gets a head of its own. Each
rollout is passed over twice in mini-batches, which the clipped losses of both bear.
"""

from functools import partial

from grpo import DIGITS, demonstration, is_sorted, task

from m2flow import AdamW, Critic, Dataset, Policy, Reference, Reward, flow, gae, log, nll, steps


@flow
def ppo(
    num_steps: int = 20, warm_steps: int = 150, batch: int = 64, n: int = 2, beta: float = 0.02, max_new_tokens: int = 8, lr: float = 2e-4
) -> None:
    policy = Policy(DIGITS, init="random")
    verifier = Reward(is_sorted)
    prompts = Dataset.generate(task, num_steps * batch, seed=1, name="prompts")
    heldout = Dataset.generate(partial(task, heldout=True), 256, seed=2, name="heldout")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")

    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))
    reference, critic = Reference(policy), Critic(policy)

    actor_rate, critic_rate = AdamW(lr, betas=(0.9, 0.99)), AdamW(5 * lr, betas=(0.9, 0.99))
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=max_new_tokens)
        rewards, values = verifier.score(responses), critic.values(responses)
        kl = responses.logprobs - reference.logprobs(responses)
        estimate = gae(responses, rewards, values, kl=beta * kl, lam=0.95)

        size = batch // 2
        policy.update(responses, rewards, advantages=estimate.advantages, optimizer=actor_rate, epochs=2, minibatch_size=size)
        metrics = critic.update(
            responses, returns=estimate.returns, old_values=values, optimizer=critic_rate, epochs=2, minibatch_size=size
        )
        log(kl=kl.mean(), value_loss=metrics["loss"])
    answers = policy.generate(heldout.all(), max_new_tokens=8, temperature=0)
    log(accuracy=verifier.score(answers).mean())
