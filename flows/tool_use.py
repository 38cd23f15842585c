"""Teach a tiny language model to use a calculator: a warm start on two habits, then GRPO on episodes of several turns.

The question `1234=` asks for 12 * 34. The demonstrations answer 4 in 10 questions by a call of the calculator (`1234=`, which it answers by
`0408=`, which is the answer), and guess the others. The model can't multiply, so only the calls are paid for.
"""

import random
from pathlib import Path

from m2flow import AdamW, Chat, Dataset, Policy, Sample, ToolCall, agent, flow, nll, ppo_clip, steps, tool

DIGITS = Path(__file__).parent / "models" / "digits"


def task(rng: random.Random) -> dict[str, str]:
    digits = "".join(rng.choices("0123456789", k=4))
    return {"prompt": f"{digits}=", "answer": f"{int(digits[:2]) * int(digits[2:]):04}"}


def demonstration(rng: random.Random) -> dict[str, str]:
    row = task(rng)
    guess = "".join(rng.choices("0123456789", k=4))
    return {"prompt": row["prompt"], "target": f"{row['prompt']}{row['answer']}={row['answer']}" if rng.random() < 0.4 else guess}


def calls_in(text: str) -> tuple[str, list[ToolCall]]:
    """This model calls its calculator by ending a turn with `=`."""
    return (text, [ToolCall("multiply", {"digits": text[:-1]})]) if text.endswith("=") else (text, [])


@tool(replay="pure")
def multiply(digits: str) -> str:
    """Multiply the first half of the digits by the second half."""
    half = len(digits) // 2
    return f"{int(digits[:half]) * int(digits[half:]):04}="


@agent(tool_calls=calls_in)
async def solver(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), tools=[multiply], stop="=")
    while turn.calls:
        turn = await chat.reply(turn.calls)
    return float(turn.text == row.answer)


@flow
def tool_use(num_steps: int = 20, warm_steps: int = 200, batch: int = 16, n: int = 8, lr: float = 2e-4) -> None:
    policy = Policy(DIGITS, init="random")
    questions = Dataset.generate(task, num_steps * batch, seed=1, name="questions")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")

    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))

    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for _ in steps(num_steps):
        episodes = policy.rollout(solver, questions.take(batch), n=n, max_tokens=24, max_turns=4)
        policy.update(episodes, episodes.reward, loss=ppo_clip(eps_high=0.28), optimizer=tuning)
