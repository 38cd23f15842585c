"""Chat: sums asked as conversations under a system message, and answered up to the end of a line.

The model is any with a chat template: a name of the Hugging Face hub, a directory or a .gguf file. To try the flow without a network,
take the tiny model that comes along, with random weights: --model models/chat --init random.
"""

import random
from typing import Literal

from m2flow import AdamW, Dataset, Policy, Reward, flow, log, steps
from m2flow.rewards import RegexMatch

EXAMPLE = [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "3"}]


def question(rng: random.Random) -> dict[str, object]:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return {"prompt": [*EXAMPLE, {"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}


@flow
def chat(
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct",
    init: Literal["pretrained", "random"] = "pretrained",
    num_steps: int = 6,
    batch: int = 4,
    n: int = 4,
    max_new_tokens: int = 24,
    lr: float = 1e-5,
) -> None:
    policy = Policy(model, init=init, system="Answer with one number.", optimizer=AdamW(lr))
    verifier = Reward(RegexMatch(r"-?\d+"))  # The last number of the response is compared with the row's answer.
    questions = Dataset.generate(question, num_steps * batch, seed=1)

    for _ in steps(num_steps):
        responses = policy.generate(questions.take(batch), n=n, max_new_tokens=max_new_tokens, stop=["\n"])
        rewards = verifier.score(responses)
        policy.update(responses, rewards)
        log(reward=rewards.mean())
