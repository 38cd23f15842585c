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
    from m2flow.agents.chat import Chat, Turn, agent
    from m2flow.agents.http_sessions import endpoint
    from m2flow.agents.mcp_tools import mcp_tools
    from m2flow.agents.tools import EpisodeFailed, ToolCall, tool
    from m2flow.algorithms.losses import sequence_mean, sequence_sum
    from m2flow.macro.critics import Critic, RewardModel, best_and_worst, gae
    from m2flow.macro.datasets import Dataset
    from m2flow.macro.evaluation import Best, evaluate
    from m2flow.macro.flow import Flow, flow, load_flow
    from m2flow.macro.handles import Metrics, Rows, Scores, concat, join, where
    from m2flow.macro.loss_declarations import (
        bradley_terry,
        cispo,
        clip_cov,
        clipped_value,
        decoupled_ppo,
        distill,
        distill_top_k,
        dpo,
        dppo,
        gmpo,
        gspo,
        gspo_token,
        importance_reinforce,
        ipo,
        kl_cov,
        kto,
        loss,
        nll,
        opmd,
        ppo_clip,
        process_reward,
        reinforce,
        sapo,
        simpo,
        topr,
    )
    from m2flow.macro.number import Number
    from m2flow.macro.ops import EpisodeRows, Role, call, log, op, steps
    from m2flow.macro.refill import informative, pass_rate_between
    from m2flow.macro.roles import Policy, Reference, Reward
    from m2flow.observe.otel import traceparent
    from m2flow.recipe import (
        SGD,
        AdamW,
        AdamW8bit,
        Balance,
        Correction,
        Counts,
        Lora,
        Loss,
        Muon,
        PerSequence,
        Sampling,
        WeightGroup,
        by_conversation,
        gigpo,
        pass_at_k,
    )
    from m2flow.runs.entrance import open_run, run
    from m2flow.runs.opened import Run
    from m2flow.runs.planning import plan, simulate
    from m2flow.samples import Batch, Finish, Sample, SampleId
    from m2flow.sandbox import Sandbox

__version__ = "0.1.0"

_WORDS = {
    "m2flow.agents.chat": "Chat Turn agent",
    "m2flow.agents.http_sessions": "endpoint",
    "m2flow.agents.mcp_tools": "mcp_tools",
    "m2flow.agents.tools": "EpisodeFailed ToolCall tool",
    "m2flow.algorithms.losses": "sequence_mean sequence_sum",
    "m2flow.macro.critics": "Critic RewardModel best_and_worst gae",
    "m2flow.macro.datasets": "Dataset",
    "m2flow.macro.evaluation": "Best evaluate",
    "m2flow.macro.flow": "Flow flow load_flow",
    "m2flow.macro.handles": "Metrics Rows Scores concat join where",
    "m2flow.macro.loss_declarations": "bradley_terry cispo clip_cov clipped_value decoupled_ppo distill distill_top_k dpo dppo gmpo "
    "gspo gspo_token importance_reinforce ipo kl_cov kto loss nll opmd ppo_clip process_reward reinforce sapo simpo topr",
    "m2flow.macro.number": "Number",
    "m2flow.macro.ops": "EpisodeRows Role call log op steps",
    "m2flow.macro.refill": "informative pass_rate_between",
    "m2flow.macro.roles": "Policy Reference Reward",
    "m2flow.observe.otel": "traceparent",
    "m2flow.recipe": "AdamW AdamW8bit Balance Correction Counts Lora Loss Muon PerSequence SGD Sampling WeightGroup "
    "by_conversation gigpo pass_at_k",
    "m2flow.runs.entrance": "open_run run",
    "m2flow.runs.opened": "Run",
    "m2flow.runs.planning": "plan simulate",
    "m2flow.samples": "Batch Finish Sample SampleId",
    "m2flow.sandbox": "Sandbox",
}
"""Module -> the public words that it holds: those of a flow, and the entrance from Python. They are loaded when they are first used: the
package itself stands below every module of it.
"""

_MODULE_OF = {word: module for module, words in _WORDS.items() for word in words.split()}

__all__ = [
    "SGD",
    "AdamW",
    "AdamW8bit",
    "Balance",
    "Batch",
    "Best",
    "Chat",
    "Correction",
    "Counts",
    "Critic",
    "Dataset",
    "EpisodeFailed",
    "EpisodeRows",
    "Finish",
    "Flow",
    "Lora",
    "Loss",
    "Metrics",
    "Muon",
    "Number",
    "PerSequence",
    "Policy",
    "Reference",
    "Reward",
    "RewardModel",
    "Role",
    "Rows",
    "Run",
    "Sample",
    "SampleId",
    "Sampling",
    "Sandbox",
    "Scores",
    "ToolCall",
    "Turn",
    "WeightGroup",
    "agent",
    "best_and_worst",
    "bradley_terry",
    "by_conversation",
    "call",
    "cispo",
    "clip_cov",
    "clipped_value",
    "concat",
    "decoupled_ppo",
    "distill",
    "distill_top_k",
    "dpo",
    "dppo",
    "endpoint",
    "evaluate",
    "flow",
    "gae",
    "gigpo",
    "gmpo",
    "gspo",
    "gspo_token",
    "importance_reinforce",
    "informative",
    "ipo",
    "join",
    "kl_cov",
    "kto",
    "load_flow",
    "log",
    "loss",
    "mcp_tools",
    "nll",
    "op",
    "open_run",
    "opmd",
    "pass_at_k",
    "pass_rate_between",
    "plan",
    "ppo_clip",
    "process_reward",
    "reinforce",
    "sapo",
    "run",
    "sequence_mean",
    "sequence_sum",
    "simpo",
    "simulate",
    "steps",
    "tool",
    "topr",
    "traceparent",
    "where",
]


if not TYPE_CHECKING:  # They would take any name for there.

    def __getattr__(name: str) -> object:
        """Load a word of a flow (PEP 562)."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
