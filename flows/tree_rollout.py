"""Train on trees of episodes: each has branches from one of its turns, which are compared with each other (tree-GRPO).

An episode has five turns. In each the model sees two digits (`37=`) and has to say the larger one (`7=`). The reward is 1 if all five are
right, and nothing says which was not. The demonstrations are right in 6 of 10 turns, so few whole episodes are. A branch begins behind
turns that are known, and its siblings differ from that turn on: where the turns before are right, fewer have to be.
"""

import random
from pathlib import Path

from m2flow import AdamW, Chat, Dataset, Policy, Sample, agent, concat, flow, log, nll, ppo_clip, steps

DIGITS = Path(__file__).parent / "models" / "digits"
NUM_TURNS = 5


def pair(rng: random.Random) -> str:
    return "".join(rng.sample("0123456789", k=2))


def task(rng: random.Random) -> dict[str, str]:
    return {"prompt": "=".join(pair(rng) for _ in range(NUM_TURNS))}


def demonstration(rng: random.Random) -> dict[str, str]:
    pairs = [pair(rng) for _ in range(NUM_TURNS)]
    moves = [max(one) if rng.random() < 0.6 else rng.choice("0123456789") for one in pairs]
    said = "".join(f"{one}={move}=" for one, move in zip(pairs, moves, strict=True))
    return {"prompt": said[:3], "target": said[3:]}


@agent
async def climber(chat: Chat, row: Sample) -> float:
    turns = [(one, await chat.say(f"{one}=", max_tokens=4, stop="=")) for one in str(row.prompt).split("=")]
    return float(all(turn.text == max(one) for one, turn in turns))


@flow
def tree_rollout(num_steps: int = 20, warm_steps: int = 300, batch: int = 16, n: int = 2, branches: int = 4, lr: float = 6e-4) -> None:
    policy = Policy(DIGITS, init="random")
    ladders = Dataset.generate(task, num_steps * batch, seed=1, name="ladders")
    demos = Dataset.generate(demonstration, warm_steps * 64, seed=3, name="demos")
    policy.update(demos.all(), loss=nll(), minibatch_size=64, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))

    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for _ in steps(num_steps):
        first = policy.rollout(climber, ladders.take(batch), n=n, max_tokens=48)
        more = first.branch(n=branches)
        log(right=first.reward.mean(), right_of_branches=more.reward.mean())
        every = concat([first, more])
        policy.update(every, every.reward, loss=ppo_clip(eps_high=0.28), optimizer=tuning)
