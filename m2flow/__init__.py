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

from m2flow.macro.combining import concat, join, where
from m2flow.macro.critics import Critic, RewardModel, gae
from m2flow.macro.datasets import Dataset
from m2flow.macro.flow import Flow, flow, load_flow
from m2flow.macro.handles import Metrics, Number, Rows, Scores
from m2flow.macro.losses import clipped_value, distill, loss, nll, ppo_clip, reinforce
from m2flow.macro.ops import log, op, steps
from m2flow.macro.refill import informative
from m2flow.macro.roles import Policy, Reference, Reward
from m2flow.macro.user_roles import Role, call
from m2flow.observe.propagation import traceparent
from m2flow.recipe import AdamW, Counts, Lora, Loss, Sampling
from m2flow.samples import Batch, Finish, Sample, SampleId

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "Batch",
    "Counts",
    "Critic",
    "Dataset",
    "Finish",
    "Flow",
    "Lora",
    "Loss",
    "Metrics",
    "Number",
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
    "call",
    "clipped_value",
    "concat",
    "distill",
    "flow",
    "gae",
    "informative",
    "join",
    "load_flow",
    "log",
    "loss",
    "nll",
    "op",
    "ppo_clip",
    "reinforce",
    "steps",
    "traceparent",
    "where",
]
