"""Self-play of one policy: the two players of a game are two conversations of an episode, and neither sees what the other one does.

Nim with one pile: a player is told how many stones lie there (`7=`) and takes 1, 2 or 3 (`3`); who takes the last one wins, and who says
anything else loses. The winner's conversation is rewarded 1, the loser's -1. A warm start shows clumsy play, 2 moves in 10 meant to win.
Of the openings (5 to 7 stones), 44, 37 and 40 % leave 4 in steps 0 to 4 of seeds 0, 1 and 2, and 97, 92 and 98 % in the last five of 40.
"""

import random

from grpo import DIGITS

from m2flow import AdamW, Chat, Dataset, Policy, Sample, agent, by_conversation, flow, log, nll, ppo_clip, steps


def pile(rng: random.Random) -> dict[str, str]:
    return {"prompt": f"{rng.choice('567')}="}


def clumsy(rng: random.Random) -> dict[str, str]:
    *before, now = sorted(rng.sample(range(1, 8), rng.randrange(1, 4)), reverse=True)
    any_move = {stones: rng.randrange(1, min(stones, 3) + 1) for stones in (*before, now)}
    best = now % 4 if rng.random() < 0.2 else 0
    return {"prompt": "".join(f"{stones}={any_move[stones]}" for stones in before) + f"{now}=", "target": str(best or any_move[now])}


@agent
async def game(chat: Chat, row: Sample) -> dict[str, float]:
    player, other = chat.conversation("first"), chat.conversation("second")
    stones = int(row.prompt[0])
    while True:
        said = (await player.say(f"{stones}=", max_tokens=1)).text
        if said not in ("1", "2", "3") or int(said) > stones:
            return {player.name: -1.0, other.name: 1.0}
        stones -= int(said)
        if not stones:
            return {player.name: 1.0, other.name: -1.0}
        player, other = other, player


def opens_well(sample: Sample) -> bool:
    return [turn["text"] for turn in sample.episode["turns"]][:1] == [str(int(sample.prompt[0]) % 4)]


def first_wins(sample: Sample) -> bool:
    return bool(sample.episode["rewards"].get("first") == 1.0)


@flow
def nim(num_steps: int = 40, warm_steps: int = 100, batch: int = 12, n: int = 16, lr: float = 3e-4, entropy: float = 0.1) -> None:
    policy = Policy(DIGITS, init="random")
    piles = Dataset.generate(pile, num_steps * batch, seed=1, name="piles")
    moves = Dataset.generate(clumsy, warm_steps * 128, seed=3, name="moves")
    policy.update(moves.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=10))
    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for _ in steps(num_steps):
        games = policy.rollout(game, piles.take(batch), n=n, max_tokens=24, max_turns=8, max_conversations=2)
        policy.update(
            games, games.reward, advantages=by_conversation(), loss=ppo_clip(eps_high=0.28, entropy_coef=entropy), optimizer=tuning
        )
        log(opens_well=games.map(opens_well).mean(), first_wins=games.map(first_wins).mean())
