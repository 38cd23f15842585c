"""m2flow: RL post-training of language models as a plain Python loop, traced, planned and scheduled sample by sample.

from m2flow import Dataset, Policy, Reward, flow, steps

@flow
def grpo(num_steps: int = 80):
    policy, verifier = Policy("model"), Reward(is_right)
    prompts = Dataset(rows)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(32), n=8, max_new_tokens=64)
        rewards = verifier.score(responses)
        policy.update(responses, rewards)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m2flow.algorithms.losses import sequence_mean, sequence_sum
    from m2flow.macro.critic import Critic, gae
    from m2flow.macro.datasets import Dataset
    from m2flow.macro.evaluation import Best, evaluate
    from m2flow.macro.flow import Flow, flow, load_flow
    from m2flow.macro.handles import Metrics, Rows, Scores, concat, join, where
    from m2flow.macro.loss_declarations import (
        cispo,
        clipped_value,
        decoupled_ppo,
        distill,
        dpo,
        dppo,
        gmpo,
        gspo,
        gspo_token,
        importance_reinforce,
        ipo,
        kto,
        loss,
        nll,
        opmd,
        ppo_clip,
        reinforce,
        sapo,
        simpo,
        topr,
    )
    from m2flow.macro.number import Number
    from m2flow.macro.ops import Role, call, log, op, steps
    from m2flow.macro.refill import informative, pass_rate_between
    from m2flow.macro.roles import Policy, Reference, Reward, RewardModel, best_and_worst
    from m2flow.observe.otel import traceparent
    from m2flow.recipe import AdamW, Correction, Counts, Lora, Loss, PerSequence, Sampling, pass_at_k
    from m2flow.samples import Batch, Finish, Sample, SampleId

__version__ = "0.1.0"

_WORDS = {
    "m2flow.algorithms.losses": "sequence_mean sequence_sum",
    "m2flow.macro.critic": "Critic gae",
    "m2flow.macro.datasets": "Dataset",
    "m2flow.macro.evaluation": "Best evaluate",
    "m2flow.macro.flow": "Flow flow load_flow",
    "m2flow.macro.handles": "Metrics Rows Scores concat join where",
    "m2flow.macro.loss_declarations": "cispo clipped_value decoupled_ppo distill dpo dppo gmpo gspo gspo_token "
    "importance_reinforce ipo kto loss nll opmd ppo_clip reinforce sapo simpo topr",
    "m2flow.macro.number": "Number",
    "m2flow.macro.ops": "Role call log op steps",
    "m2flow.macro.refill": "informative pass_rate_between",
    "m2flow.macro.roles": "Policy Reference Reward RewardModel best_and_worst",
    "m2flow.observe.otel": "traceparent",
    "m2flow.recipe": "AdamW Correction Counts Lora Loss PerSequence Sampling pass_at_k",
    "m2flow.samples": "Batch Finish Sample SampleId",
}
"""Module -> the words of a flow that it holds. They are loaded when they are first used: the package itself stands below every module
of it.
"""

_MODULE_OF = {word: module for module, words in _WORDS.items() for word in words.split()}

__all__ = [
    "AdamW",
    "Batch",
    "Best",
    "Correction",
    "Counts",
    "Critic",
    "Dataset",
    "Finish",
    "Flow",
    "Lora",
    "Loss",
    "Metrics",
    "Number",
    "PerSequence",
    "Policy",
    "Reference",
    "Reward",
    "RewardModel",
    "Role",
    "Rows",
    "Sample",
    "SampleId",
    "Sampling",
    "Scores",
    "best_and_worst",
    "call",
    "cispo",
    "clipped_value",
    "concat",
    "decoupled_ppo",
    "distill",
    "dpo",
    "dppo",
    "evaluate",
    "flow",
    "gae",
    "gmpo",
    "gspo",
    "gspo_token",
    "importance_reinforce",
    "informative",
    "ipo",
    "join",
    "kto",
    "load_flow",
    "log",
    "loss",
    "nll",
    "op",
    "opmd",
    "pass_at_k",
    "pass_rate_between",
    "ppo_clip",
    "reinforce",
    "sapo",
    "sequence_mean",
    "sequence_sum",
    "simpo",
    "steps",
    "topr",
    "traceparent",
    "where",
]


def __getattr__(name: str) -> object:
    """Load a word of a flow (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
