"""Clusters of fake engines, for tests whose subject is another one."""

from __future__ import annotations

from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec

FAKES = ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))

SPLIT = ClusterSpec(
    placement="split",
    device="cpu",
    cores=2,
    rollout=RolloutSpec(engine="fake", workers=2, max_running=3),
    train=TrainSpec(engine="fake", token_budget=40),
    functions=FunctionSpec(workers=2, chunk=2),
)
"""Several samples, chunks and micro-batches are in flight at a time."""
