"""The task of `flows/grpo.py` with advantages, losses and corrections by name: what `algorithms.py` and `mismatch.py` compare."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "flows"))
from grpo import DIGITS, demonstration, is_sorted, task

import m2flow
from m2flow import AdamW, Correction, Critic, Dataset, Number, Policy, Reward, flow, gae, log, nll, pass_at_k, ppo_clip, steps

ALGORITHMS: dict[str, tuple[str, str, int]] = {
    "grpo": ("grpo", "ppo_clip", 4),
    "grpo_1_step": ("grpo", "ppo_clip", 1),
    "reinforce_1_step": ("grpo", "reinforce", 1),
    **{
        name: (name, "ppo_clip", 4)
        for name in ("dr_grpo", "rloo", "maxrl", "opo", "pass_at_k", "grpo_population", "reinforce_pp", "reinforce_pp_baseline", "gpg")
    },
    **{name: ("grpo", name, 4) for name in ("gspo", "gspo_token", "gmpo", "cispo", "importance_reinforce", "sapo", "topr", "dppo", "opmd")},
    **{name: ("grpo", name, 4) for name in ("decoupled_ppo", "clip_cov", "kl_cov")},
    **{name: (name, "ppo_clip", 4) for name in ("remax", "gae")},
}
"""Name -> advantages, loss, and optimiser steps a round."""


@flow
def warm(num_steps: int = 350) -> None:
    """The start of every run: a model that sorts upwards in about 4 of 10 cases."""
    policy = Policy(DIGITS, init="random")
    demos = Dataset.generate(demonstration, num_steps * 128, seed=3, name="demos")
    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))


@flow
def compared(model: str, names: str, num_steps: int = 24, batch: int = 32, n: int = 8) -> None:
    """Train that model by each of these algorithms (`grpo,gspo`) in turn, and log the accuracy that each reaches under its name."""
    verifier = Reward(is_sorted)
    heldout = Dataset.generate(partial(task, heldout=True), 512, seed=2, name="heldout")
    for i, name in enumerate(names.split(",")):
        policy = Policy(model, name=f"policy{i}")
        prompts = Dataset.generate(task, num_steps * batch, seed=1, name=f"prompts{i}")
        advantages, loss, num_minibatches = ALGORITHMS[name]
        if not i:
            log(before=accuracy(policy, verifier, heldout))
        optimizer = AdamW(2e-4, betas=(0.9, 0.99), warmup_steps=5)
        critic = Critic(policy, name=f"critic{i}") if advantages == "gae" else None
        for _ in steps(num_steps):
            asked = prompts.take(batch)
            if advantages == "remax":
                greedy = verifier.score(policy.generate(asked, max_new_tokens=8, temperature=0))
                asked = asked.with_columns(baseline=greedy.back_to(asked))
            responses = policy.generate(asked, n=n, max_new_tokens=8)
            rewards = verifier.score(responses)
            given: Any = pass_at_k(4) if advantages == "pass_at_k" else advantages
            if advantages == "remax":
                given = rewards - responses.baseline
            if critic is not None:
                values = critic.values(responses)
                estimate = gae(responses, rewards, values, lam=0.95)
                returns, rate = estimate.returns, AdamW(1e-3, betas=(0.9, 0.99))
                critic.update(responses, returns=returns, old_values=values, minibatch_size=batch // 4, optimizer=rate)
                given = estimate.advantages
            policy.update(
                responses,
                rewards,
                advantages=given,
                loss=getattr(m2flow, loss)(),
                columns={"proximal_logprobs": policy.logprobs(responses)} if loss == "decoupled_ppo" else {},
                minibatch_size=batch // num_minibatches,
                optimizer=optimizer,
            )
        log(**{name: accuracy(policy, verifier, heldout)})


CORRECTIONS: dict[str, Correction | None] = {
    "rollout as old": None,
    "none": Correction(lower=1.0, upper=1.0),
    "truncated": Correction(upper=2.0),
    "masked": Correction(mode="mask", lower=0.5, upper=2.0),
}
"""Name -> what is done about a rollout engine whose probabilities are not the trainer's. Weights from 1 to 1 are none: the loss then clips
around the trainer's own log-probabilities, and nothing counts who sampled."""


@flow
def matched(model: str, correction: str = "none", num_steps: int = 60, lr: float = 2e-4) -> None:
    train(model, correction, num_steps, lr)


@flow(staleness=4)
def stale(model: str, correction: str = "none", num_steps: int = 60, lr: float = 2e-4) -> None:
    train(model, correction, num_steps, lr)


def train(model: str, correction: str, num_steps: int, lr: float, batch: int = 32, n: int = 8) -> None:
    policy, verifier = Policy(model), Reward(is_sorted)
    prompts = Dataset.generate(task, num_steps * batch, seed=1, name="prompts")
    optimizer = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=8)
        rewards, corrected = verifier.score(responses), CORRECTIONS[correction]
        policy.update(
            responses, rewards, loss=ppo_clip(eps_high=0.28), correction=corrected, minibatch_size=batch // 2, optimizer=optimizer
        )


def accuracy(policy: Policy, verifier: Reward, heldout: Dataset) -> Number:
    return verifier.score(policy.generate(heldout.all(), max_new_tokens=8, temperature=0)).mean()
