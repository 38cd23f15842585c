"""A step of GRPO as the planner sees it: 64 prompts of 8 samples, and their lengths."""

from m2flow.micro.protocol.cost_terms import EngineId
from m2flow.planner.workload import CallLoad, Workload
from m2flow.rollout_scheduling.lengths import parse_lengths

ROLLOUT, TRAIN = EngineId("policy", "rollout"), EngineId("policy", "train")
STEP = Workload(
    "grpo",
    (
        CallLoad("policy.generate", "generate", ROLLOUT, 64, 8, "sample", False, ()),
        CallLoad("policy.update", "update", TRAIN, 64, 8, "group", False, ("policy.generate",), num_optimizer_steps=1),
    ),
)
LENGTHS = parse_lengths("lognormal:median=1000,sigma=0.5,cap=8000")
