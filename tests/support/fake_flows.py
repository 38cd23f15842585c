"""Flows on fake engines, whose answer under a plan is the eager one: a plain one, one with everything, two policies, PPO, and failures."""

from __future__ import annotations

from m2flow import (
    AdamW,
    Critic,
    Dataset,
    Policy,
    Reference,
    Reward,
    RewardModel,
    Sample,
    flow,
    gae,
    log,
    nll,
    op,
    ppo_clip,
    steps,
)

ROWS = [{"prompt": f"{i * 7919 % 100000}=", "target": str(i)} for i in range(12)]
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}], "target": row["target"]} for row in ROWS[:5]]


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return round(sum(c.isdigit() for c in text) / (len(text) + 1), 6)


def length_penalty(sample: Sample) -> float:
    return -sample.num_tokens / 100


@op(granularity="group")
def rank_in_group(samples: list[Sample]) -> list[int]:
    order = sorted(range(len(samples)), key=lambda i: (samples[i].num_tokens, i))
    return [order.index(i) for i in range(len(samples))]


@flow
def plain(num_steps: int = 2, batch: int = 3, n: int = 2, minibatch: int = 0, epochs: int = 1) -> None:
    policy, verifier = Policy("fake"), Reward(digit_share)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=12)
        rewards = verifier.score(responses)
        metrics = policy.update(responses, rewards, minibatch_size=minibatch or None, epochs=epochs)
        log(tokens=metrics["num_tokens"], reward=rewards.mean())


@flow
def everything(num_steps: int = 2, batch: int = 3, n: int = 2, minibatch: int = 0, epochs: int = 1) -> None:
    policy, verifier, short = Policy("fake"), Reward(digit_share), Reward(length_penalty)
    prompts, heldout, demos = Dataset(ROWS), Dataset(CHATS, name="heldout"), Dataset(ROWS, name="demos", shuffle=False)
    policy.update(demos.all(), loss=nll(), minibatch_size=5, optimizer=AdamW(1e-3))
    reference = Reference(policy)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=12)
        if step % 2 == 0:  # Nothing waits for these long samples: later calls come while they still run.
            log(accuracy=verifier.score(policy.generate(heldout.all(), n=2, max_new_tokens=90, min_new_tokens=30, stop=["7", "on"])).mean())
            log(greedy=verifier.score(policy.generate(heldout.all(), max_new_tokens=6, temperature=0)).mean())
        ranks = rank_in_group(responses)
        other = short.score(responses)
        rewards = verifier.score(responses)
        metrics = policy.update(
            responses, rewards, loss=ppo_clip(kl_coef=0.1), reference=reference, minibatch_size=minibatch or None, epochs=epochs
        )
        if float(metrics["num_tokens"]) > 1e9 or float(other.mean()) > 0:
            break
        log(ranks=float(sum(position * rank for position, rank in enumerate(ranks))))


@flow
def duet(num_steps: int = 2, batch: int = 3, n: int = 2, minibatch: int = 0, epochs: int = 1) -> None:
    """Two policies on the same workers, one trained on every step, the other on every second one."""
    left, right, verifier = Policy("fake", name="left"), Policy("fake", name="right"), Reward(digit_share)
    prompts = Dataset(ROWS)
    for step in steps(num_steps):
        asked = prompts.take(batch)
        for policy in (left, right) if step % 2 == 0 else (left,):
            responses = policy.generate(asked, n=n, max_new_tokens=12)
            policy.update(responses, verifier.score(responses), minibatch_size=minibatch or None, epochs=epochs)


@flow
def failing(num_steps: int = 2, batch: int = 3, n: int = 2, minibatch: int = 0, epochs: int = 1) -> None:
    def raises_on_some(sample: Sample) -> float:
        if "7" in str(sample.text):
            raise KeyError("seven")
        return 1.0

    policy, verifier = Policy("fake"), Reward(raises_on_some)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=12)
        policy.update(responses, verifier.score(responses))


NUMBERS = [{"prompt": f"{i * 7919 % 100000}="} for i in range(8)]


def length_share(sample: Sample) -> float:
    return sample.num_tokens / 16


@flow
def ppo(num_steps: int = 2, batch: int = 3, n: int = 2, minibatch: int = 0, epochs: int = 1) -> None:
    policy = Policy("fake")
    reference, critic, judge, rule = Reference(policy), Critic(policy), RewardModel("fake", name="judge"), Reward(length_share)
    prompts = Dataset(NUMBERS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=12)
        rewards, values = 0.5 * judge.score(responses) + rule.score(responses), critic.values(responses)
        kl = responses.logprobs - reference.logprobs(responses)
        estimate = gae(responses, rewards, values, kl=0.1 * kl, gamma=0.9, lam=0.8)
        passes = {"minibatch_size": minibatch or None, "epochs": epochs}
        metrics = policy.update(responses, rewards, advantages=estimate.advantages, **passes)
        critic.update(responses, returns=estimate.returns, old_values=values, **passes)
        log(reward=metrics["reward"], kl=kl.mean(), advantage=estimate.advantages.mean())
