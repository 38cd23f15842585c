"""The task of flows/grpo.py with a mixture of experts whose training follows the experts that sampling chose: routing replay.

The engine that samples holds bfloat16 weights and the trainer float32 ones. For tokens where two experts are almost equal they choose
different ones, and the log-probabilities of the two sides jump apart. With `replay="rollout"` each sample brings its experts (R3: Ma et al.
2025, arXiv:2510.11370); with `"trainer"` an update replays those of the trainer's pass before it (R2), so that its second mini-batch still
computes with the experts of the first; with `"none"` every pass chooses for itself. The metric `rollout_diff/mean` is what is left of the
difference, in nats a token.
"""

from functools import partial
from pathlib import Path
from typing import Literal

from grpo import accuracy, demonstration, is_sorted, task

from m2flow import AdamW, Correction, Dataset, Policy, Reward, flow, log, nll, ppo_clip, steps

MIXTURE = Path(__file__).parent / "models" / "mixture"


@flow
def moe_routing_replay(
    replay: Literal["none", "rollout", "trainer"] = "rollout",
    num_steps: int = 40,
    warm_steps: int = 350,
    batch: int = 32,
    n: int = 8,
    lr: float = 2e-4,
    eval_every: int = 10,
) -> None:
    policy = Policy(MIXTURE, init="random", rollout_dtype="bfloat16", replay_routing=None if replay == "none" else replay)
    verifier = Reward(is_sorted)
    prompts = Dataset.generate(task, num_steps * batch, seed=1, name="prompts")
    heldout = Dataset.generate(partial(task, heldout=True), 512, seed=2, name="heldout")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")

    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))

    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for step in steps(num_steps):
        if step % eval_every == 0:
            log(accuracy=accuracy(policy, verifier, heldout))
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=8)
        rewards, half = verifier.score(responses), max(1, batch // 2)
        policy.update(
            responses, rewards, loss=ppo_clip(eps_high=0.28), correction=Correction(upper=2.0), minibatch_size=half, optimizer=tuning
        )
    log(accuracy=accuracy(policy, verifier, heldout))
