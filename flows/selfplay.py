"""Self-play: two policies, one zero-sum game, and neither is told how to play it.

Both are asked the same and answer at once with one character; the higher digit wins, and anything but a digit is lower than all. So each
has to outdo the other as it is now, until both say 9 and nobody wins any more. The second's samples are made from the first's moves,
which it does not see but its samples carry; `back_to` brings the outcomes back to the first.
"""

import random

from grpo import DIGITS

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, log, steps


def question(rng: random.Random) -> dict[str, str]:
    return {"prompt": "".join(rng.choices("0123456789", k=3)) + "="}


def height(move: object) -> int:
    return int(str(move)) if str(move).isdigit() else -1


def digit(sample: Sample) -> int:
    return height(sample.text)


def second_wins(sample: Sample) -> float:
    """1 if the second player wins, -1 if the first does, 0 for a draw."""
    first, second = height(sample["first"]), height(sample.text)
    return float(second > first) - float(second < first)


@flow
def selfplay(num_steps: int = 40, batch: int = 16, n: int = 4, max_new_tokens: int = 1, lr: float = 5e-4) -> None:
    first, second = (Policy(DIGITS, name=name, init="random") for name in ("first", "second"))
    referee = Reward(second_wins)
    questions = Dataset.generate(question, num_steps * batch, seed=1)
    rate = AdamW(lr, betas=(0.9, 0.99))
    for _ in steps(num_steps):
        moves = first.generate(questions.take(batch), n=n, max_new_tokens=max_new_tokens)
        replies = second.generate(moves.with_columns(first=moves.text), n=2, max_new_tokens=max_new_tokens)
        outcomes = referee.score(replies)
        second.update(replies, outcomes, optimizer=rate)
        first.update(moves, -outcomes.back_to(moves), optimizer=rate)
        log(second_wins=outcomes.mean(), first_digit=moves.map(digit).mean(), second_digit=replies.map(digit).mean())
