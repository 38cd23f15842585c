"""Embedded rollout engines of tiny models, and what they generate of requests that come one after another."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from tiny_models import save_config

from m2flow.engines.contract import EngineSettings, Request, RolloutEngine
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.recipe import Model, Sampling
from m2flow.samples import make_ids


@functools.cache
def model_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def embedded(settings: EngineSettings) -> RolloutEngine:
    return EmbeddedRollout(Model(save_config("Qwen2", Path(model_folder().name)), init="random"), settings)


KINDS: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"initializer_range": 0.1, "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "GptOss": {"sliding_window": 8, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def generated(engine: EmbeddedRollout) -> dict[int, Any]:
    """Samples of unequal lengths, of which some come while others run."""
    ids = make_ids(0, 12, 1)
    requests = [Request(int(i), (2 + k % 9, 3, 4 + k % 5), k, Sampling(5 + 3 * (k % 7), temperature=1.0)) for k, i in enumerate(ids)]
    engine.add(requests[:7])
    found = [sample for _ in range(4) for sample in engine.step()]
    engine.add(requests[7:])
    while engine.num_unfinished:
        found += engine.step()
    return {sample.id: sample for sample in found}
