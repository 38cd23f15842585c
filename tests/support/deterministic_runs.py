"""Flows on the embedded engines with `deterministic=True`, whose bits no plan changes."""

from __future__ import annotations

from tiny_models import DIGITS

from m2flow import AdamW, Critic, Dataset, Policy, Reference, Reward, RewardModel, Sample, distill, flow, gae, ppo_clip, steps
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec

PROMPTS = [{"prompt": f"{i * 7919 % 10000}="} for i in range(6)]


def digits_seen(sample: Sample) -> float:
    """Differs between the samples of a group, and not by a rounding."""
    return len(set(str(sample.text))) / 8


@flow
def sorts(temperature: float = 1.0) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(digits_seen)
    prompts = Dataset(PROMPTS, shuffle=False)
    for _ in steps(2):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=8, temperature=temperature)
        policy.update(responses, verifier.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-3), minibatch_size=2)


def embedded_cluster(placement: str, workers: int = 1, *, max_running: int = 64, token_budget: int = 30, chunk: int = 64) -> ClusterSpec:
    return ClusterSpec(
        placement=placement,
        device="cpu",
        cores=2,
        rollout=RolloutSpec(workers=workers, max_running=max_running),
        train=TrainSpec(token_budget=token_budget),
        functions=FunctionSpec(chunk=chunk),
    )


@flow
def ppo() -> None:
    policy = Policy(DIGITS, init="random", optimizer=AdamW(1e-3))
    reference, critic, judge = Reference(policy), Critic(policy, optimizer=AdamW(1e-2)), RewardModel(DIGITS, init="random")
    prompts = Dataset(PROMPTS, shuffle=False)
    for _ in steps(2):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=6)
        rewards, values = judge.score(responses), critic.values(responses)
        estimate = gae(responses, rewards, values, kl=reference.logprobs(responses), gamma=0.9)
        policy.update(responses, rewards, advantages=estimate.advantages, epochs=2, minibatch_size=2)
        critic.update(responses, returns=estimate.returns, old_values=values, epochs=2, minibatch_size=2)
        policy.update(responses, loss=distill(), columns={"teacher_logprobs": reference.logprobs(responses)})
