"""On-policy distillation: a student writes, a teacher says how likely it would have written each token, and the student follows.

On the task of grpo.py. The teacher was shown only right answers; the student, like the policy there, also learned to sort downwards.
No reward is computed: the teacher's log-probabilities are the whole signal, one number for every token; with `top_k`, also of so many
tokens that might have come in its place.
"""

import random
from functools import partial

from grpo import DIGITS, demonstration, is_sorted, task

from m2flow import AdamW, Dataset, Number, Policy, Reward, distill, distill_top_k, flow, log, nll, steps


def right_answer(rng: random.Random) -> dict[str, str]:
    row = task(rng)
    return {"prompt": row["prompt"], "target": row["answer"]}


@flow
def distillation(
    num_steps: int = 40, warm_steps: int = 200, batch: int = 64, max_new_tokens: int = 8, lr: float = 3e-4, top_k: int = 0
) -> None:
    teacher, student = (Policy(DIGITS, name=name, init="random") for name in ("teacher", "student"))
    verifier = Reward(is_sorted)
    prompts = Dataset.generate(task, num_steps * batch, seed=1, name="prompts")
    heldout = Dataset.generate(partial(task, heldout=True), 256, seed=2, name="heldout")
    lessons = Dataset.generate(right_answer, warm_steps * 128, seed=3, name="lessons")
    demos = Dataset.generate(demonstration, warm_steps * 64, seed=4, name="demos")

    warming, following = AdamW(1e-3, betas=(0.9, 0.98), warmup_steps=30), AdamW(lr, betas=(0.9, 0.99), warmup_steps=5)
    teacher.update(lessons.all(), loss=nll(), minibatch_size=128, optimizer=warming)
    student.update(demos.all(), loss=nll(), minibatch_size=128, optimizer=warming)

    log(teacher=accuracy(teacher, verifier, heldout), student=accuracy(student, verifier, heldout))
    for _ in steps(num_steps):
        responses = student.generate(prompts.take(batch), n=2, max_new_tokens=max_new_tokens)
        teacher_logprobs = teacher.logprobs(responses, top_k=top_k or None)
        if top_k:
            student.update(responses, loss=distill_top_k(), reference=teacher_logprobs, optimizer=following)
        else:
            student.update(responses, loss=distill(), columns={"teacher_logprobs": teacher_logprobs}, optimizer=following)
        log(kl=(responses.logprobs - teacher_logprobs).mean())
    log(student=accuracy(student, verifier, heldout))


def accuracy(policy: Policy, verifier: Reward, heldout: Dataset) -> Number:
    """The share of held-out prompts that the greedy answer gets right."""
    return verifier.score(policy.generate(heldout.all(), max_new_tokens=8, temperature=0)).mean()
