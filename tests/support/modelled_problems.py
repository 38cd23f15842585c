"""Planning problems with modelled costs: GRPO of a known model on known devices."""

from __future__ import annotations

import msgspec

from m2flow.micro.protocol.cost_terms import EngineId
from m2flow.micro.protocol.plan import Choice
from m2flow.planner.cost_model import ModelledCosts
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.problem import Problem
from m2flow.planner.search import find_plan
from m2flow.planner.workload import CallLoad, Workload, extents_of
from m2flow.rollout_scheduling.lengths import lognormal
from m2flow.spec import ClusterSpec, PoolSpec, RolloutSpec, TrainSpec

POLICY, TRAINER, REFERENCE = EngineId("policy", "rollout"), EngineId("policy", "train"), EngineId("reference", "train")


def grpo(staleness: int = 0, num_prompts: int = 64) -> Workload:
    def load(name: str, work: str, engine: EngineId | None, *after: str, **more: int) -> CallLoad:
        return CallLoad(name, work, engine, num_prompts, 8, "group", False, after, token_budget=16_384, **more)  # type: ignore[arg-type]

    return Workload(
        "grpo",
        (
            load("policy.generate", "generate", POLICY, max_new_tokens=16_384),
            load("rule.score", "function", None, "policy.generate"),
            load("reference.logprobs", "forward", REFERENCE, "policy.generate"),
            load("policy.update", "update", TRAINER, "policy.generate", "rule.score", "reference.logprobs", num_optimizer_steps=1),
        ),
        staleness,
    )


def modelled(
    num_devices: int = 8,
    *,
    staleness: int = 0,
    num_prompts: int = 64,
    median: int = 3000,
    device: str = "h100",
    model: str = "Qwen2.5-7B",
    **spec: object,
) -> Problem:
    nodes = max(1, num_devices // 8)
    pools = {"main": PoolSpec(device=device, nodes=nodes, devices_per_node=num_devices // nodes)}
    engines = {"rollout": RolloutSpec(engine="sglang"), "train": TrainSpec(engine="deepspeed", token_budget=16_384)}
    cluster = ClusterSpec(name="cluster", pools=pools, **engines, **spec)  # type: ignore[arg-type]
    shapes = dict.fromkeys(("policy", "reference"), shape_named(model))
    lengths, workload = lognormal(median=median, sigma=0.9, cap=16_384, prompt_tokens=300), grpo(staleness, num_prompts)
    return Problem(workload, lengths, ModelledCosts(cluster, workload, shapes, extents_of(workload, shapes, lengths)), cluster)


def choice_of(problem: Problem) -> Choice:
    return find_plan(problem.workload, problem.lengths, problem.costs, problem.spec)


def simple(lend: str = "auto", *, staleness: int = 0) -> Choice:
    """Generate, score and update on eight GPUs, with answers of which some are very long."""
    problem = modelled(8, staleness=staleness, median=600, lend=lend)
    calls = tuple(
        msgspec.structs.replace(call, after=tuple(name for name in call.after if name != "reference.logprobs"))
        for call in problem.workload.calls
        if call.name != "reference.logprobs"
    )
    workload = msgspec.structs.replace(problem.workload, calls=calls)
    return find_plan(workload, lognormal(median=600, sigma=1.2, cap=16_384, prompt_tokens=300), problem.costs, problem.spec)
