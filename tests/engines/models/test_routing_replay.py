"""Routing replay on tiny random mixtures: a Qwen3-MoE, and a DeepSeek-V3 with groups of experts and a bias for the choice alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixture_routing import (
    CPU,
    MIXTURES,
    check_routing_against_embedded,
    other_experts,
    routed_rows,
    routed_samples,
    routed_trainer,
)
from tiny_models import save_config

from m2flow.engines.contract import EngineSettings, Objective
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.distributed.ranks import ReplicatedTrain
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.errors import EngineError
from m2flow.recipe import AdamW, Loss, Model
from m2flow.samples import ROUTED_EXPERTS, Batch, Ragged, expanded_experts
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import started

LIKELIHOOD = Loss("likelihood", lambda *, logprobs: -logprobs, ("logprobs",))


@pytest.fixture(scope="module", params=MIXTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_config(request.param, tmp_path_factory.mktemp(request.param), **MIXTURES[request.param])


def mismatch(engine: EmbeddedTrain, batch: Batch) -> tuple[float, float]:
    """Mean and largest difference of log-probabilities, in nats a token."""
    mask = batch.ragged("loss_mask").values
    apart = np.abs(engine.logprobs(batch).ragged("reference_logprobs").values - batch.ragged("logprobs").values)[mask]
    return float(apart.mean()), float(apart.max())


def test_the_rollout_records_the_experts_that_the_trainer_chooses_with_the_same_weights(path: str) -> None:
    engine = routed_trainer(path)
    generated = routed_samples(path, engine)
    for one in generated:
        assert one.routed_experts is not None
        assert one.routed_experts.dtype == np.uint8
        assert len(one.routed_experts) == len(one.prompt_tokens) + len(one.tokens)
        assert (expanded_experts(one.routed_experts)[-1] == -1).all()
        assert (expanded_experts(one.routed_experts)[:-1] >= 0).all()
    batch = routed_rows(generated)
    own = replace(engine._source, routing="trainer")
    engine._source = own
    found = engine.logprobs(batch.without(ROUTED_EXPERTS) if hasattr(batch, "without") else routed_rows(generated, with_experts=False))
    recorded, chosen = (expanded_experts(rows.ragged(ROUTED_EXPERTS).values) for rows in (batch, found))
    same = (np.sort(recorded, -1) == np.sort(chosen, -1)).all((1, 2))
    assert same.mean() > 0.97  # Two experts that are equal to the last bit.
    np.testing.assert_allclose(
        found.ragged("reference_logprobs").values[batch.ragged("loss_mask").values],
        batch.ragged("logprobs").values[batch.ragged("loss_mask").values],
        atol=1e-2 if same.mean() < 1 else 1e-4,
    )


def test_replay_shrinks_the_mismatch_with_a_rollout_in_bfloat16(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = routed_trainer(path)
    generated = routed_samples(path, engine, "bfloat16", (50, 55, 40, 50))
    without, replayed = (mismatch(engine, routed_rows(generated, with_experts=with_experts)) for with_experts in (False, True))
    with capsys.disabled():
        print(f"\n{Path(path).name}: mean and largest difference in nats {without} without replay, {replayed} with it")
    assert replayed[0] < 0.7 * without[0]


def gradients(engine: EmbeddedTrain, batches: list[Batch]) -> dict[str, torch.Tensor]:
    for batch in batches:
        engine.accumulate(batch, Objective(LIKELIHOOD))
    found = {name: one.grad.clone() for name, one in engine._model.named_parameters() if one.grad is not None}
    engine.discard()
    return found


def test_gates_of_given_experts_are_of_the_current_logits_so_routers_learn_and_gradients_are_finite_differences(path: str) -> None:
    engine = routed_trainer(path)
    batch = other_experts(routed_rows(routed_samples(path, engine)))
    found = gradients(engine, [batch])
    routers = [name for name in found if name.endswith("gate.weight")]
    assert routers
    mask = batch.ragged("loss_mask").values
    rng = torch.Generator().manual_seed(3)
    for name in [*routers, "model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.o_proj.weight"]:
        weight = dict(engine._model.named_parameters())[name]
        direction = torch.randn(weight.shape, generator=rng)
        direction /= direction.norm()
        sums = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(direction, alpha=sign * 1e-3)
            sums.append(-float(engine.logprobs(batch).ragged("reference_logprobs").values[mask].astype(np.float64).sum()))
            with torch.no_grad():
                weight.add_(direction, alpha=-sign * 1e-3)
        assert (sums[0] - sums[1]) / 2e-3 == pytest.approx(float((found[name] * direction).sum()), rel=0.03, abs=0.03)


def test_replay_does_not_depend_on_micro_batches_shared_prompts_or_order(path: str) -> None:
    engine = routed_trainer(path)
    batch = other_experts(routed_rows(routed_samples(path, engine)))
    # Two samples of a group whose prompts were routed differently do not share it.
    experts = batch.ragged(ROUTED_EXPERTS)
    changed = experts.values.copy()
    changed[experts.offsets[1] + 1] = changed[experts.offsets[1] + 1][..., ::-1] * 0 + np.array([3, 6], changed.dtype)
    batch = batch.with_columns(**{ROUTED_EXPERTS: Ragged(changed, experts.offsets)})
    assert "rerouted" not in engine.accumulate(batch.without([ROUTED_EXPERTS]), Objective(LIKELIHOOD)).metrics
    engine.discard()
    whole = gradients(engine, [batch])
    cut = gradients(engine, [batch.take(np.array([i])) for i in (3, 1, 0, 2)])
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, cut[name], atol=2e-4, rtol=2e-3)


def test_the_trainers_own_old_routing_is_replayed_after_its_weights_changed(path: str) -> None:
    engine = routed_trainer(path)
    batch = routed_rows(routed_samples(path, engine), with_experts=False)
    engine._source = replace(engine._source, routing="trainer")
    before = engine.logprobs(batch)
    engine.accumulate(batch, Objective(LIKELIHOOD))
    engine.apply(AdamW(lr=0.05), 1.0)
    chosen = expanded_experts(engine.logprobs(batch).ragged(ROUTED_EXPERTS).values)
    old = expanded_experts(before.ragged(ROUTED_EXPERTS).values)
    assert (np.sort(chosen, -1) != np.sort(old, -1)).any()
    engine._numbers(batch.with_columns(**{ROUTED_EXPERTS: before.ragged(ROUTED_EXPERTS)}).in_order(), "logprobs", 0)
    assert engine._routers is not None
    replayed = np.sort(engine._routers.chosen().flatten(0, 1).numpy(), -1)
    known = old[(old >= 0).all((1, 2))]
    assert {tuple(map(tuple, one)) for one in np.sort(known, -1).tolist()} >= {
        tuple(map(tuple, one)) for one in replayed.reshape(-1, *known.shape[1:]).tolist()
    }


@pytest.mark.parametrize(
    ("kind", "routing", "ep"),
    [
        (FsdpTrain, "rollout", 1),
        (FsdpTrain, "trainer", 1),
        (FsdpTrain, "rollout", 2),
        (FsdpTrain, "trainer", 2),
        (ReplicatedTrain, "trainer", 1),
    ],
)
def test_ranks_of_shards_or_replicas_replay_and_record_as_one(kind: Any, routing: Any, ep: int, path: str, followers: Followers) -> None:
    batch = other_experts(routed_rows(routed_samples(path, routed_trainer(path))))
    model, settings = Model(path, "random", routing=routing), replace(CPU, options={"ep": ep} if ep > 1 else {})
    check_routing_against_embedded(Mirrored(kind, model, settings, followers), model, batch)


def test_a_rank_whose_samples_have_no_masked_tokens_does_as_the_others(path: str, followers: Followers) -> None:
    """The groups are shared out over ranks: no token of the second is trained on."""
    generated = routed_rows(routed_samples(path, routed_trainer(path)), with_experts=False)
    mask = generated.ragged("loss_mask")
    batch = generated.with_columns(loss_mask=Ragged(np.where(np.repeat([1, 1, 0, 0], mask.lengths), mask.values, False), mask.offsets))
    model, found = Model(path, "random", routing="trainer"), []
    for engine in (EmbeddedTrain(model, CPU), Mirrored(FsdpTrain, model, CPU, followers)):
        with started(engine):
            found.append(engine.logprobs(batch))
    np.testing.assert_allclose(*(one.ragged("reference_logprobs").values for one in found), atol=1e-4)
    experts = [expanded_experts(one.ragged(ROUTED_EXPERTS).values) for one in found]
    np.testing.assert_array_equal(*experts)
    assert (experts[0][mask.offsets[2] :] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "recomputes"), [(1, False), (3, True)])
def test_ranks_of_deepspeed_replay_and_record_as_one(zero: int, recomputes: bool, path: str, followers: Followers) -> None:
    pytest.importorskip("deepspeed")
    from m2flow.engines.distributed.deepspeed import DeepSpeedTrain

    batch = other_experts(routed_rows(routed_samples(path, routed_trainer(path))))
    model = Model(path, "random", routing="trainer" if recomputes else "rollout")
    settings = EngineSettings(options={"zero": zero, "activation_checkpointing": recomputes})
    check_routing_against_embedded(Mirrored(DeepSpeedTrain, model, settings, followers), model, batch)


def test_a_model_without_routers_is_refused_by_name(tmp_path: Path) -> None:
    path = save_config("Qwen2", tmp_path)
    for engine in (
        EmbeddedTrain(Model(path, "random", routing="rollout"), CPU),
        EmbeddedRollout(Model(path, "random", routing="rollout"), CPU),
    ):
        with pytest.raises(EngineError, match="'qwen2' model is no mixture"):
            engine.start()
