"""Two policies play Nim against each other in one episode, and each is trained on what it said itself.

The first player is `policy`; the second is another speaker of the rollout, `rival`, with weights and an optimiser of its own. Rules and
warm start are those of `nim.py`: 2 moves in 10 of either are meant to win. In steps 0 to 4 of seeds 0, 1 and 2 the first player opens with
the move that wins in 46, 39 and 43 %, in the last five of 40 in 97, 85 and 97 %; the second finds it, where it has a chance, in 49, 38 and
47 % and then in 100, 84 and 100 %.
"""

from grpo import DIGITS
from nim import clumsy, pile

from m2flow import AdamW, Chat, Dataset, Policy, Sample, agent, by_conversation, flow, log, nll, ppo_clip, steps


@agent
async def match(chat: Chat, row: Sample) -> dict[str, float]:
    player, other = chat, chat.conversation("second", by="rival")
    stones = int(row.prompt[0])
    while True:
        said = (await player.say(f"{stones}=", max_tokens=1)).text
        if said not in ("1", "2", "3") or int(said) > stones:
            return {player.name: -1.0, other.name: 1.0}
        stones -= int(said)
        if not stones:
            return {player.name: 1.0, other.name: -1.0}
        player, other = other, player


def can_win(sample: Sample) -> float:
    return float(int(sample.prompt_text[0]) % 4 != 0)


def begins_well(sample: Sample) -> float:
    return float(sample.episode["turns"][0]["text"] == str(int(sample.prompt_text[0]) % 4))


@flow
def duel(num_steps: int = 40, warm_steps: int = 100, batch: int = 12, n: int = 16, lr: float = 3e-4, entropy: float = 0.1) -> None:
    policy, rival = Policy(DIGITS, init="random"), Policy(DIGITS, init="random", name="rival")
    piles = Dataset.generate(pile, num_steps * batch, seed=1, name="piles")
    moves = Dataset.generate(clumsy, warm_steps * 128, seed=3, name="moves").all()
    for player in (policy, rival):
        player.update(moves, loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=10))
    tuning, loss = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5), ppo_clip(eps_high=0.28, entropy_coef=entropy)
    for _ in steps(num_steps):
        games = policy.rollout(match, piles.take(batch), n=n, max_tokens=24, max_turns=8, speakers={"rival": rival})
        replies = games.of("rival")
        policy.update(games, games.reward, advantages=by_conversation(), loss=loss, optimizer=tuning)
        rival.update(replies, replies.reward, advantages=by_conversation(), loss=loss, optimizer=tuning)
        log(opens_well=games.map(begins_well).mean(), chances=replies.map(can_win).sum(), answers_well=replies.map(begins_well).sum())
