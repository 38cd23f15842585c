"""A judge next to a rule: half of the reward is what another model says of the answer, half is checked by a function.

On the task of grpo.py. The judge is a policy that is only generated from once it has had its lessons: it reads an answer and says 1 if
the digits go upwards. Whether they are the right digits, it can't know; that is the rule's half.
"""

import random

from grpo import DIGITS, demonstration, is_sorted, task

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, log, nll, steps


def lesson(rng: random.Random) -> dict[str, str]:
    digits = rng.choices("0123456789", k=rng.randint(4, 6))
    shown = sorted(digits) if rng.random() < 0.5 else sorted(digits, reverse=True) if rng.random() < 0.5 else digits
    return {"prompt": "".join(shown) + "=", "target": str(int(shown == sorted(shown)))}


def as_case(sample: Sample) -> str:
    return f"{sample.text}="


def says_yes(sample: Sample) -> float:
    return float(sample.text == "1")


def has_the_digits(sample: Sample) -> float:
    return float(sorted(str(sample.text)) == list(str(sample.answer)))


@flow
def judged(num_steps: int = 25, warm_steps: int = 250, batch: int = 32, n: int = 8, max_new_tokens: int = 8, lr: float = 3e-4) -> None:
    policy, judge = Policy(DIGITS, init="random"), Policy(DIGITS, name="judge", init="random")
    verdict, rule, truth = Reward(says_yes), Reward(has_the_digits), Reward(is_sorted)
    prompts = Dataset.generate(task, num_steps * batch, seed=1, name="prompts")
    lessons = Dataset.generate(lesson, warm_steps * 128, seed=2, name="lessons")
    demos = Dataset.generate(demonstration, warm_steps * 128, seed=3, name="demos")

    warming, rate = AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30), AdamW(lr, betas=(0.9, 0.99))
    judge.update(lessons.all(), loss=nll(), minibatch_size=128, optimizer=warming)
    policy.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=warming)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=max_new_tokens)
        cases = responses.with_columns(prompt=responses.map(as_case))
        verdicts = judge.generate(cases, max_new_tokens=1, temperature=0)
        rewards = 0.5 * verdict.score(verdicts).back_to(responses) + 0.5 * rule.score(responses)
        policy.update(responses, rewards, optimizer=rate)
        log(sorted=truth.score(responses).mean())
