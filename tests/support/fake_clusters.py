"""Clusters of fake engines, for tests whose subject is another one, and a call for such an engine."""

from __future__ import annotations

import numpy as np

from m2flow.macro.graph import Call, Granularity, Site
from m2flow.recipe import Sampling
from m2flow.samples import Batch, Ragged, make_ids
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


def generate_call(ordinal: int) -> Call:
    return Call(
        ordinal=ordinal,
        role="policy",
        method="generate",
        engine="rollout",
        granularity=Granularity.SAMPLE,
        inputs=(),
        options={"sampling": Sampling(max_new_tokens=40), "repeat": ordinal, "n": 1},
        reads=(),
        writes=(),
        site=Site("flow.py", ordinal, ""),
        step=0,
        is_aligned=True,
    )


def prompts(num: int) -> Batch:
    return Batch(make_ids(0, num), {"prompt": Ragged.texts([f"prompt {i}" for i in range(num)]), "seed": np.arange(num, dtype=np.uint64)})
