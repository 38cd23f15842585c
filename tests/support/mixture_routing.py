"""Mixtures of experts: replayed routing, losses and biases of routers, held against the embedded trainer."""

from __future__ import annotations

from typing import Any

import numpy as np

from m2flow.engines.contract import EngineSettings, Objective, TrainEngine
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.routing import BALANCE_LOSS, Z_LOSS
from m2flow.recipe import SGD, AdamW, Balance, Loss, Model, Optimizer
from m2flow.samples import ROUTED_EXPERTS, Batch
from m2flow.testing.train_suite import copied, started

MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
    "DeepseekV3": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}
NLL = Loss("nll", "m2flow.algorithms.losses:nll", ("logprobs",))
CPU = EngineSettings()


def check_routing_against_embedded(engine: TrainEngine, model: Model, batch: Batch, least: float = 0.9) -> None:
    """Compare log-probabilities, recorded experts, sums and the norm of the gradient with those of the embedded trainer.

    Args:
        least: the share of tokens' layers that are sent to other experts than their own, at least.
    """
    found: list[tuple[Any, ...]] = []
    for one in (EmbeddedTrain(model, CPU), engine):
        with started(one):
            before = one.logprobs(batch)
            sums = [one.accumulate(batch.take(np.array(rows)), Objective(NLL)) for rows in ((0, 1), (2, 3))]
            applied = one.apply(AdamW(lr=1e-3), 10.0)
            numbers = [applied[name] for name in ("grad_norm", "expert_load/max", "expert_load/min", "expert_load/idle")]
            experts = before.ragged(ROUTED_EXPERTS).values if ROUTED_EXPERTS in before else np.zeros(0)
            loss, rerouted = (sum(each.metrics[name] for each in sums) for name in ("loss", "rerouted"))
            assert rerouted > least * sum(each.num_tokens for each in sums), "other_experts gives almost each token others than its own"
            found.append((before.ragged("reference_logprobs").values, loss, rerouted, numbers, experts))
    for expected, seen in zip(*found, strict=True):
        np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-4)


BALANCE = Balance(loss=0.5, z_loss=0.3)
PLAIN = SGD(lr=0.5)


def balance_history(engine: TrainEngine, batch: Batch, optimizer: Optimizer = PLAIN) -> dict[str, Any]:
    """Metrics of a step of two micro-batches, one of which is a sample alone, and the weights after it."""
    with started(engine):
        sums = [engine.accumulate(batch.take(rows), Objective(NLL)) for rows in (np.arange(1), np.arange(1, len(batch)))]
        applied = engine.apply(optimizer, float(sum(one.num_tokens for one in sums)))
        weights = copied(engine)
    metrics = {name: sum(one.metrics[name] for one in sums) for name in ("loss", BALANCE_LOSS, Z_LOSS)}
    return {**metrics, **applied, **weights}


def biases_of(engine: TrainEngine) -> dict[str, Any]:
    return {name: value for name, value in copied(engine).items() if name.endswith("e_score_correction_bias")}
