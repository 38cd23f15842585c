"""Mixtures of experts: replayed routing, losses and biases of routers, held against the embedded trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from m2flow.engines.contract import EngineSettings, Generated, Objective, Request, TrainEngine
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.routing import BALANCE_LOSS, Z_LOSS
from m2flow.recipe import SGD, AdamW, Balance, Loss, Model, Optimizer, Sampling
from m2flow.samples import ROUTED_EXPERTS, Batch, Ragged, SampleId, compact_experts, expanded_experts
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


def grouped_batch(num_groups: int = 3, num_samples: int = 3) -> Batch:
    """Groups with a prompt in common, responses of unequal lengths, and tokens after the last predicted one."""
    rng = np.random.default_rng(5)
    tokens, masks, ids = list[list[int]](), list[list[bool]](), list[int]()
    for group in range(num_groups):
        prompt = rng.integers(2, 14, 3 + 2 * group).tolist()
        for index in range(num_samples):
            response = rng.integers(2, 14, int(rng.integers(1, 9))).tolist()
            tokens.append([*prompt, *response, 3])
            masks.append([False] * len(prompt) + [True] * len(response) + [False])
            ids.append(SampleId(0, group, index).pack())
    return Batch(np.array(ids, np.int64), {"tokens": Ragged.of(tokens, np.int32), "loss_mask": Ragged.of(masks, np.bool_)})


def routed_trainer(path: str, **changes: Any) -> EmbeddedTrain:
    engine = EmbeddedTrain(Model(path, "random", routing="rollout", **changes), CPU)
    engine.start()
    with torch.no_grad():
        for name, buffer in engine._model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
    return engine


def routed_samples(path: str, weights: EmbeddedTrain, dtype: Any = None, lengths: tuple[int, ...] = (9, 20, 4, 30)) -> list[Generated]:
    engine = EmbeddedRollout(Model(path, "random", rollout_dtype=dtype, routing="rollout"), CPU)
    engine.start()
    engine.load_weights(weights.weights(), 1)
    prompts = ([2, 3, 4, 5], [2, 3, 4, 5], [7, 8, 9], [10, 11, 12, 13, 2, 3])
    engine.add(
        [
            Request(SampleId(0, i // 2, i % 2).pack(), tuple(prompt), 7 + i, Sampling(max_new_tokens=length, ignore_eos=True))
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
    )
    found: list[Generated] = []
    while engine.num_unfinished:
        found += engine.step()
    engine.stop()
    return sorted(found, key=lambda one: one.id)


def routed_rows(generated: list[Generated], *, with_experts: bool = True) -> Batch:
    tokens = Ragged.of([np.concatenate([one.prompt_tokens, one.tokens]) for one in generated], np.int32)
    starts = [len(one.prompt_tokens) for one in generated]
    mask = Ragged.of([np.arange(length) >= start for length, start in zip(tokens.lengths, starts, strict=True)], np.bool_)
    columns = {"tokens": tokens, "loss_mask": mask}
    columns["logprobs"] = Ragged.of(
        [np.concatenate([np.zeros(start), one.logprobs]) for start, one in zip(starts, generated, strict=True)], np.float32
    )
    if with_experts:
        experts = [one.routed_experts for one in generated if one.routed_experts is not None]
        columns[ROUTED_EXPERTS] = Ragged.of(experts, experts[0].dtype)
    return Batch(np.array([one.id for one in generated]), columns)


def other_experts(batch: Batch, num_experts: int = 8) -> Batch:
    """The batch with each token sent to the next expert."""
    known = expanded_experts(batch.ragged(ROUTED_EXPERTS).values)
    moved = np.where(known >= 0, (known + 1) % num_experts, -1).astype(np.int16)
    return batch.with_columns(**{ROUTED_EXPERTS: Ragged(compact_experts(moved, num_experts), batch.ragged("tokens").offsets)})
