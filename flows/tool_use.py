"""Teach a tiny language model to use a calculator and Python: a warm start on careless habits, then GRPO on episodes of several turns.

The question `12*34?` asks for a product, which the calculator knows: `12*34=`. The question `12^34?` asks for the rest of a power over 97,
which takes a line of Python: `print(12**34%97)`. Of the demonstrations 4 in 10 call the right tool and answer what it says, 3 call the
other one, and 3 guess. The model can't calculate, so only the right calls are paid for. Python runs in the sandbox.
"""

import random
from pathlib import Path

from m2flow import AdamW, Chat, Dataset, Policy, Sample, Sandbox, ToolCall, agent, flow, nll, ppo_clip, steps, tool

TEXT = Path(__file__).parent / "models" / "text"


def demonstration(rng: random.Random) -> dict[str, str]:
    a, b, is_power = rng.randrange(10, 100), rng.randrange(10, 100), rng.random() < 0.5
    product, power = f"{a}*{b}={a * b}\n{a * b}", f"print({a}**{b}%97)\n{a**b % 97}\n{a**b % 97}"
    right, wrong = (power, product) if is_power else (product, power)
    said = rng.choices((right, wrong, str(rng.randrange(5000))), (4, 3, 3))[0]
    return {"prompt": f"{a}{'^' if is_power else '*'}{b}?", "answer": right.split("\n")[-1], "target": said}


def calls_in(text: str) -> tuple[str, list[ToolCall]]:
    """This model calls its calculator by ending a turn with `=`, and Python by ending one with its line."""
    called = {"=": ToolCall("multiply", {"product": text[:-1]}), "\n": ToolCall("python", {"code": text})}.get(text[-1:])
    return text, [called] if called else []


@tool(replay="pure")
def multiply(product: str) -> str:
    """Multiply two whole numbers, given as `12*34`."""
    a, b = product.split("*")
    return f"{int(a) * int(b)}\n"


@tool(replay="pure", timeout_s=20)
async def python(code: str, box: Sandbox) -> str:
    """Run Python in the sandbox, and read what it prints."""
    return (await box.run(code)).text


@agent(tool_calls=calls_in)
async def solver(chat: Chat, row: Sample) -> float:
    turn = await chat.say(str(row.prompt), tools=[multiply, python], stop=["=", "\n"])
    while turn.calls:
        turn = await chat.reply(turn.calls)
    return float(turn.text == row.answer)


@flow
def tool_use(num_steps: int = 20, warm_steps: int = 200, batch: int = 16, n: int = 8, lr: float = 3e-4) -> None:
    policy = Policy(TEXT, init="random")
    questions = Dataset.generate(demonstration, num_steps * batch, seed=1, name="questions")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")
    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))
    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for _ in steps(num_steps):
        episodes = policy.rollout(solver, questions.take(batch), n=n, max_tokens=48, max_turns=4)
        policy.update(episodes, episodes.reward, loss=ppo_clip(eps_high=0.28), optimizer=tuning)
