"""Runs for `test_resume_layouts`: `moves` is killed while it samples, in the step that KILLED_IN says, and of `stays` one rank of the
trainer hangs in a loss. Unless M2FLOW_TEST_KILLS is there, neither befalls them."""

import os
import time
from pathlib import Path

import torch.distributed as dist
from resume_flow import WHOLE, arm, disarmed, has_file, kill_run, until_whole

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, log, loss, steps

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"
CALLS_A_STEP = 5


def small_digits(sample: Sample) -> float:
    if (step := os.environ.get("KILLED_IN")) and sample.id.call // CALLS_A_STEP == int(step):
        kill_run("here", "here")
    return sum(digit in "01234" for digit in str(sample.text)) / 8


@flow
def moves(num_steps: int = 5) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(small_digits)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(4 * num_steps)], shuffle=False)
    for step in steps(num_steps):
        if step == 0:
            arm()
        responses = policy.generate(prompts.take(4), n=4, max_new_tokens=6)
        rewards = verifier.score(responses)
        policy.update(responses, rewards, optimizer=AdamW(1e-2, eps=1e-3))
        log(reward=rewards.mean())


def has_checkpoint() -> bool:
    """Whether there is something to go back to, and nobody has hung yet."""
    return has_file(WHOLE) and disarmed()


@loss(needs=["logprobs", "behaviour_logprobs", "advantages"])
def hangs(logprobs, behaviour_logprobs, advantages):  # type: ignore[no-untyped-def]
    if dist.is_initialized() and dist.get_rank() == 1 and has_checkpoint():
        time.sleep(300)
    return -(logprobs - behaviour_logprobs).exp() * advantages


@flow
def stays(num_steps: int = 5) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(small_digits)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(4 * num_steps)], shuffle=False)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=4, max_new_tokens=6)
        rewards = verifier.score(responses)
        log(reward=float(rewards.mean()))
        metrics = policy.update(responses, rewards, loss=hangs, optimizer=AdamW(1e-2, eps=1e-3))
        if step == 1 and "M2FLOW_TEST_RUNS" in os.environ:
            float(metrics["loss"])
            until_whole()
