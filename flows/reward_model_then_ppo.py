"""The task of grpo.py with a reward that is learned: a reward model of preferences, then PPO against what it says.

The reward model begins as the policy after its warm start, with a head of its own. Of each pair the chosen answer is sorted; the
rejected one is sorted downwards or not at all, has a wrong digit, one too many or too few, or answers another prompt: what PPO would find
otherwise. The verifier only measures: no update sees what it says. A penalty for leaving the policy of the beginning keeps PPO from answers
that the reward model was never taught to judge.
"""

import random
from functools import partial

from grpo import DIGITS, accuracy, demonstration, is_sorted, task

from m2flow import AdamW, Critic, Dataset, Policy, Reference, Reward, bradley_terry, flow, log, nll, ppo_clip, steps


def preference(rng: random.Random, *, heldout: bool = False) -> dict[str, str]:
    row = task(rng, heldout=heldout)
    answer, place = row["answer"], rng.randrange(len(row["answer"]))
    wrong = answer[:place] + rng.choice("0123456789".replace(answer[place], "")) + answer[place + 1 :]
    shuffled, other = "".join(rng.sample(answer, len(answer))), task(rng, heldout=heldout)["answer"]
    rejected = rng.choice(
        [wrong, answer[::-1], shuffled, other, answer[:place] + answer[place + 1 :], answer[:place] + answer[place] + answer[place:]]
    )
    return {"prompt": row["prompt"], "chosen": answer, "rejected": wrong if rejected == answer else rejected}


@flow
def reward_model_then_ppo(
    num_steps: int = 40, warm_steps: int = 350, pair_steps: int = 300, batch: int = 32, n: int = 8, beta: float = 0.05, lr: float = 2e-4
) -> None:
    policy, verifier = Policy(DIGITS, init="random"), Reward(is_sorted)
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")
    pairs = Dataset.generate(preference, pair_steps * 64, seed=4, name="pairs").pairs()
    unseen = Dataset.generate(partial(preference, heldout=True), 256, seed=5, name="unseen").pairs()
    prompts = Dataset.generate(task, num_steps * batch, seed=1, name="prompts")
    heldout = Dataset.generate(partial(task, heldout=True), 512, seed=2, name="heldout")

    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))
    reference, judge = Reference(policy), Critic(policy, name="reward_model")
    judge.update(pairs.all(), loss=bradley_terry(center=0.01), minibatch_size=64, optimizer=AdamW(1e-3, betas=(0.9, 0.98)))
    rows = unseen.all()
    margin = judge.score(rows) * (2 * rows.chosen - 1)
    log(preferred=(margin.sum(over="group") > 0).mean(), accuracy=accuracy(policy, verifier, heldout))

    tuning, loss = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5), ppo_clip(kl_coef=beta)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=8)
        rewards = judge.score(responses)
        policy.update(responses, rewards, loss=loss, reference=reference, optimizer=tuning)
        log(judged=rewards.mean(), right=verifier.score(responses).mean())
    log(accuracy=accuracy(policy, verifier, heldout))
