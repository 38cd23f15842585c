"""Teach a tiny language model to write code that passes tests which it does not see: GRPO with `UnitTests`, which run it in the sandbox.

The order `+3*2` is a function that adds 3 and then doubles. The demonstrations write it in Python, but 6 in 10 forget the brackets, and
`x+3*2` is another function. Nothing but the tests tells the two apart.
"""

import random
from pathlib import Path

from m2flow import AdamW, Dataset, Policy, Reward, flow, nll, ppo_clip, steps
from m2flow.rewards import UnitTests


def demonstration(rng: random.Random) -> dict[str, str]:
    sign, a, b = rng.choice((1, -1)), rng.randint(2, 9), rng.randint(2, 9)
    first, second = f"{'+' if sign > 0 else '-'}{a}", f"*{b}"
    tests = "\n".join(f"assert f({x}) == {(x + sign * a) * b}" for x in (0, 5, 12))
    body = f"(x{first}){second}" if rng.random() < 0.4 else f"x{first}{second}"
    return {"prompt": f"{first}{second}\n", "target": f"f=lambda x:{body}", "test": tests}


@flow
def unit_tests(num_steps: int = 20, warm_steps: int = 150, batch: int = 8, n: int = 8, lr: float = 4e-4) -> None:
    policy, tests = Policy(Path(__file__).parent / "models" / "text", init="random"), Reward(UnitTests())
    orders = Dataset.generate(demonstration, num_steps * batch, seed=1, name="orders")
    demos = Dataset.generate(demonstration, warm_steps * 64, seed=3, name="demos")
    policy.update(demos.all(), loss=nll(), minibatch_size=64, optimizer=AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30))

    tuning = AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    for _ in steps(num_steps):
        programs = policy.generate(orders.take(batch), n=n, max_new_tokens=24)
        policy.update(programs, tests.score(programs), loss=ppo_clip(eps_high=0.28), optimizer=tuning)
