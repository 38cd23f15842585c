"""Train an agent that knows nothing of m2flow: it speaks OpenAI's chat completions, and is given another `base_url`.

The question `1234=` asks for 12 * 34; the model can't multiply, and the agent's calculator can. Each request is a turn of the episode,
trained on the tokens that were sampled. Agents made with `openai`, `openai-agents` or `anthropic` are used in the same way.
"""

import random
from pathlib import Path

import httpx2

from m2flow import AdamW, Chat, Dataset, Policy, Sample, ToolCall, agent, endpoint, flow, nll, ppo_clip, steps

DIGITS = Path(__file__).parent / "models" / "digits"
TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": {"properties": {"digits": {"type": "string"}}}}}]


async def calculating_agent(base_url: str, question: str) -> str:
    """Answer a question with a calculator and a model behind OpenAI's API."""
    messages = [{"role": "user", "content": question}]
    async with httpx2.AsyncClient(base_url=base_url, timeout=120, verify=False) as client:  # It is on this machine.
        while True:
            answer = await client.post("/chat/completions", json={"model": "m", "messages": messages, "tools": TOOLS, "stop": "="})
            messages.append(message := answer.raise_for_status().json()["choices"][0]["message"])
            if not message.get("tool_calls"):
                return str(message["content"])
            digits = "".join(filter(str.isdigit, message["tool_calls"][0]["function"]["arguments"])).zfill(4)
            product = int(digits[: len(digits) // 2]) * int(digits[len(digits) // 2 :])
            messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"{product:04}="})


def demonstration(rng: random.Random) -> dict[str, str]:
    digits = "".join(rng.choices("0123456789", k=4))
    prompt, answer, guess = f"{digits}=", f"{int(digits[:2]) * int(digits[2:]):04}", "".join(rng.choices("0123456789", k=4))
    return {"prompt": prompt, "answer": answer, "target": f"{prompt}{answer}={answer}" if rng.random() < 0.4 else guess}


def calls_in(text: str) -> tuple[str, list[ToolCall]]:
    """This model calls its calculator by ending a turn with `=`."""
    return (text, [ToolCall("multiply", {"digits": text[:-1]})]) if text.endswith("=") else (text, [])


@agent(tool_calls=calls_in)
async def solver(chat: Chat, row: Sample) -> float:
    async with endpoint(chat) as server:
        return float(await calculating_agent(server.base_url, str(row.prompt)) == row.answer)


@flow
def external_agent(num_steps: int = 20, warm_steps: int = 200, batch: int = 16, n: int = 8, lr: float = 2e-4) -> None:
    policy = Policy(DIGITS, init="random")
    questions = Dataset.generate(demonstration, num_steps * batch, seed=1, name="questions")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")
    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))

    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for _ in steps(num_steps):
        episodes = policy.rollout(solver, questions.take(batch), n=n, max_tokens=24, max_turns=4)
        policy.update(episodes, episodes.reward, loss=ppo_clip(eps_high=0.28), optimizer=tuning)
