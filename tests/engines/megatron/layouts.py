"""The trainer `megatron` against the embedded one, in layouts of as many ranks as `M2FLOW_TEST_RANKS` says.
`test_megatron_numbers.py` runs it in an interpreter with megatron-core."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatrons_latent
import numpy as np
import pytest
import torch
from adapted_trainers import (
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer,
    check_references_compute_from_the_policys_weights,
)
from followed import followed
from hanging import Call, Stay, check_a_call_is_named_that_hangs, check_who_hangs_is_named, of_hanging_calls
from megatron_models import small, with_head
from megatron_on_cpu import BatchedSends, CountsEverywhere, MegatronOnCpu, SteppedOnHost, WritesAsMegatron, WritesEachLayer
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from sent_weights import check_what_ranks_send_arrives_exactly
from trainer_layouts import check_parts_are_written_behind
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from m2flow.engines.contract import MOVED, EngineSettings, Objective, TrainEngine
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.megatron.conversion import convert
from m2flow.engines.models import trainer_checkpoint
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.models.model_export import export_model
from m2flow.errors import EngineError, M2FlowError, MissingExtra, ModelError
from m2flow.recipe import AdamW, Balance, Dtype, Lora, Loss, Model, Routing
from m2flow.samples import ROUTED_EXPERTS, Batch, Ragged, compact_experts, expanded_experts, make_ids
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import DISTILL, LINEAR, PPO, VALUE, copied, in_memory, samples, started

RANKS = int(os.environ["M2FLOW_TEST_RANKS"])
IMPL = os.environ.get("M2FLOW_TEST_IMPL", "auto")
"""What layers are made of, where a test does not say: `transformer_engine`, where a stand-in for that package is on the path."""
VOCABULARY = 32
STEP = AdamW(lr=1e-3, eps=1e-3)

Layout = dict[str, Any]
LAYOUTS: dict[int, list[tuple[str, Layout]]] = {
    1: [
        (name, {})
        for name in (
            "qwen2",
            "llama",
            "mistral",
            "llama3",
            "qwen3",
            "qwen3_moe",
            "unnormalised",
            "mixtral",
            "deepseek_v2_groups",
            "deepseek_v3_halves",
        )
    ],
    2: [
        ("qwen2", {"tp": 2}),
        ("qwen3", {"tp": 2, "sequence_parallel": False, "head_logits": 96}),
        ("qwen2", {"pp": 2}),
        ("qwen2", {"pp": 2, "vpp": 2, "micro_batches": 4, "recompute": "full"}),
        ("qwen3", {"cp": 2, "recompute": "selective"}),
        ("qwen2", {}),
        ("llama3", {"zero": 0}),
        ("qwen3_moe", {"ep": 2}),
        ("mixtral", {"tp": 2, "ep": 2, "etp": 1}),
        ("deepseek_v2", {"tp": 2}),
        ("deepseek_v2_groups", {"cp": 2, "recompute": "selective"}),
        ("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}),
        ("deepseek_v3", {"pp": 2, "vpp": 2, "micro_batches": 4, "recompute": "full"}),
        ("qwen2+1", {"pp": 2}),
        ("deepseek_v3+2", {"pp": 2, "vpp": 2}),
    ],
    4: [("qwen3_moe", {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1}), ("qwen3_moe", {"tp": 2, "ep": 2})],
    8: [("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2, "etp": 1})],
}


def num_layers_of(name: str) -> int:
    """Of a model of `small`, those with experts or not."""
    return 4 + int(name.partition("+")[2] or 0)


MINE = [pytest.param(name, layout, id=f"{name}-{'-'.join(f'{k}={v}' for k, v in layout.items())}") for name, layout in LAYOUTS[RANKS]]


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with followed(RANKS - 1, ("forked_megatron_ranks",)) as found:
        yield found


def spread(model: Model, layout: Layout, followers: Followers, kind: Any = MegatronOnCpu, **settings: Any) -> TrainEngine:
    return Mirrored(kind, model, EngineSettings(options={"transformer_impl": IMPL, **layout}, **settings), followers)


def batch_of(model: Model) -> Batch:
    """Some of the tokens are the padding token, whose embedding learns nothing from being read."""
    found = samples(VOCABULARY, num_prompts=5)
    tokens = found.ragged("tokens")
    return found.with_columns(tokens=Ragged(np.where(tokens.values % 7 == 3, 0, tokens.values).astype(np.int32), tokens.offsets))


def train(engine: TrainEngine, batch: Batch, recipe: AdamW = STEP) -> Mapping[str, float]:
    for first in range(0, len(batch), 7):
        engine.accumulate(batch.take(np.arange(first, min(first + 7, len(batch)))), PPO)
    return engine.apply(recipe, float(len(batch)))


def apart(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference; a NaN is one."""
    assert set(found) == set(expected)
    differences = [np.abs(found[name].astype(np.float64) - expected[name]) for name in expected]
    assert all(np.isfinite(one).all() for one in differences)
    return max(float(one.max()) for one in differences)


def history(engine: TrainEngine, batch: Batch) -> dict[str, Any]:
    """What an engine says of a batch, and what becomes of its weights."""
    with started(engine):
        first = copied(engine)
        logprobs = np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values)
        top = engine.top_logprobs(batch, 3)
        likeliest = np.asarray(top.ragged("reference_top_logprobs").values)
        sums = [engine.accumulate(batch.take(rows), PPO) for rows in (np.arange(9), np.arange(9, len(batch)))]
        metrics = engine.apply(replace(LINEAR, log_layers=True), 7.0)
        moved = copied(engine)
        changed = batch.join(top)
        engine.accumulate(changed, DISTILL)
        engine.discard()
        for _ in range(2):
            train(engine, batch)
        last = copied(engine)
    gradients = {name: first[name] - moved[name] for name in first}
    return {
        "first": first,
        "logprobs": {"": logprobs},
        "top": {"": likeliest},
        "sums": {f"{i}/{name}": np.array(value) for i, one in enumerate(sums) for name, value in one.metrics.items()},
        "metrics": {name: np.array(value) for name, value in metrics.items()},
        "gradients": gradients,
        "steps": {name: last[name] - moved[name] for name in first},
        "last": last,
    }


@pytest.mark.parametrize(("name", "layout"), MINE)
def test_numbers_are_those_of_the_embedded_trainer(name: str, layout: Layout, followers: Followers, tmp_path: Path) -> None:
    model = small(name, tmp_path / "model")
    batch = batch_of(model)
    expected = history(EmbeddedTrain(model, EngineSettings()), batch)
    found = history(spread(model, layout, followers), batch)
    assert apart(found["first"], expected["first"]) == 0
    assert apart(found["logprobs"], expected["logprobs"]) < 1e-5
    assert apart(found["top"], expected["top"]) < 1e-5
    for key, value in expected["sums"].items():
        assert found["sums"][key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    # Its eps is far above the gradient: a step is nearly proportional to it.
    largest = max(float(np.abs(one).max()) for one in expected["gradients"].values())
    assert apart(found["gradients"], expected["gradients"]) < 1e-5 * largest
    for key, value in expected["metrics"].items():
        assert found["metrics"][key] == pytest.approx(value, rel=1e-5), key
    assert apart(found["steps"], expected["steps"]) < 1e-6
    assert apart(found["last"], expected["last"]) < 5e-6 * largest, "what the first step rounds away stays"
    with started(spread(model, layout, followers)) as engine:
        train(engine, batch)
        once = copied(engine)
    with started(spread(model, layout, followers)) as engine:
        train(engine, batch)
        assert apart(copied(engine), once) == 0, "the same layout gives the same bits"


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_layers_are_made_of_what_the_option_says(name: str, followers: Followers, tmp_path: Path) -> None:
    """`auto` on a CPU is `local`, be the package there or not."""
    model, has_engine = small(name, tmp_path / "model"), IMPL == "transformer_engine"
    for impl in ("auto", "local", *(["transformer_engine"] if has_engine else [])):
        with started(spread(model, {"tp": 2, "ep": 2, "etp": 1, "transformer_impl": impl}, followers)) as engine:
            assert isinstance(engine, Mirrored)
            found = {type(one).__name__ for chunk in engine._own._built.chunks for one in chunk.module.decoder.modules()}
        fused, local = {"RMSNorm", "TEColumnParallelLinear", "TERowParallelLinear", "TEGroupedMLP"}, {"RowNorm", "ColumnParallelLinear"}
        is_fused = impl == "transformer_engine"
        assert found >= (fused if is_fused else local)
        assert not found & (local if is_fused else fused)
        assert "PackedCoreAttention" in found
    if not has_engine:
        with pytest.raises(MissingExtra, match=r"transformer_impl .* is transformer_engine, and that package can't be loaded"):
            spread(model, {"transformer_impl": "transformer_engine"}, followers).start()


def of_tokens(batch: Batch) -> Batch:
    """With what a critic's loss needs."""
    mask, rng = batch.ragged("loss_mask"), np.random.default_rng(3)
    columns = {name: rng.normal(size=len(mask.values)).astype(np.float32) for name in ("returns", "old_values")}
    return batch.with_columns(**{name: Ragged(np.where(mask.values, values, 0), mask.offsets) for name, values in columns.items()})


def critics_history(engine: TrainEngine, batch: Batch) -> dict[str, Any]:
    with started(engine):
        first = copied(engine)
        values = np.asarray(engine.values(batch).ragged("values").values)
        sums = [engine.accumulate(batch.take(rows), VALUE) for rows in (np.arange(9), np.arange(9, len(batch)))]
        metrics = engine.apply(replace(LINEAR, log_layers=True), 7.0)
        moved = copied(engine)
        for _ in range(2):
            for rows in (np.arange(9), np.arange(9, len(batch))):
                engine.accumulate(batch.take(rows), VALUE)
            engine.apply(STEP, float(len(batch)))
        last = copied(engine)
    return {
        "values": {"": values},
        "loss": sum(one.metrics["loss"] for one in sums),
        "metrics": metrics,
        "gradients": {name: first[name] - moved[name] for name in first},
        "steps": {name: last[name] - moved[name] for name in first},
    }


CRITICS = [(name, layout) for name, layout in LAYOUTS[RANKS] if name in ("qwen2", "qwen3", "qwen3_moe", "llama3", "deepseek_v3")]


@pytest.mark.parametrize(("name", "layout"), CRITICS, ids=[f"{name}-{layout}" for name, layout in CRITICS])
def test_a_critics_numbers_are_those_of_the_embedded_trainer(name: str, layout: Layout, followers: Followers, tmp_path: Path) -> None:
    """Of weights none of which is zero: the gradient of the head's bias, its weights and all below counts."""
    model = with_head(name, tmp_path / "critic", "value")
    batch = of_tokens(batch_of(model))
    expected = critics_history(EmbeddedTrain(model, EngineSettings()), batch)
    found = critics_history(spread(model, layout, followers), batch)
    assert {"score.weight", "score.bias"} <= set(found["gradients"])
    assert apart(found["values"], expected["values"]) < 1e-5
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    largest = max(float(np.abs(one).max()) for one in expected["gradients"].values())
    assert apart(found["gradients"], expected["gradients"]) < 1e-5 * largest
    for key in expected["metrics"]:
        assert found["metrics"][key] == pytest.approx(expected["metrics"][key], rel=1e-5), key
    assert apart(found["steps"], expected["steps"]) < 1e-6


@pytest.mark.parametrize(("name", "layout"), CRITICS[-5:], ids=[f"{name}-{layout}" for name, layout in CRITICS[-5:]])
def test_scores_are_those_of_the_embedded_trainer(name: str, layout: Layout, followers: Followers, tmp_path: Path) -> None:
    model = with_head(name, tmp_path / "judge", "score")
    # More exchanges in a group than ranks, alike ones among them.
    texts = ["1", "22", "22", "", "5", "66", "12345678", "8"]
    batch = Batch(make_ids(0, 2, 4), {"prompt": Ragged.texts(["1+1="] * 4 + ["2+20="] * 4), "text": Ragged.texts(texts)})
    found = []
    for engine in (EmbeddedTrain(model, EngineSettings()), spread(model, layout, followers)):
        with started(engine):
            found.append(np.asarray(engine.scores(batch).dense("reward"), np.float64))
    assert np.ptp(found[0]) > 1e-2
    assert np.abs(found[1] - found[0]).max() < 1e-5


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
def test_a_critics_states_move_between_layouts_and_to_the_embedded_trainer_and_transformers_reads_them(
    followers: Followers, tmp_path: Path
) -> None:
    model = with_head("qwen2", tmp_path / "critic", "value")
    batch = of_tokens(batch_of(model))

    def step(engine: TrainEngine) -> dict[str, Any]:
        engine.accumulate(batch, VALUE)
        engine.apply(STEP, float(len(batch)))
        return copied(engine)

    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        weights = [step(engine) for _ in range(4)]
    for turn, layout in enumerate(({"tp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2})):
        with started(spread(model, layout, followers)) as engine:
            if turn:
                engine.load(str(tmp_path / f"{turn - 1}"))
            assert apart(step(engine), weights[turn]) < 1e-6
            engine.save(str(tmp_path / f"{turn}"))
            values = np.asarray(engine.values(batch).ragged("values").values)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        engine.load(str(tmp_path / "2"))
        assert np.abs(engine.values(batch).ragged("values").values - values).max() < 1e-5
        assert apart(step(engine), weights[3]) < 1e-6
    export_model(tmp_path / "2", tmp_path / "exported")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "exported").eval()
    tokens, mask = batch.ragged("tokens"), batch.ragged("loss_mask")
    row = np.flatnonzero(mask.row(0))
    own = plain(input_ids=torch.from_numpy(tokens.row(0).astype(np.int64))[None]).logits[0, row - 1, 0].detach().numpy()
    assert np.abs(values[: len(tokens.row(0))][row] - own).max() < 1e-5


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@pytest.mark.parametrize(("name", "layout"), [("qwen2", {"pp": 2}), ("llama", {"tp": 2})])
def test_a_critic_takes_the_policys_weights_and_keeps_its_head(name: str, layout: Layout, followers: Followers, tmp_path: Path) -> None:
    """A policy's head is of another shape, or tied to its embeddings."""
    policy_model, critic_model = small(name, tmp_path / "policy"), with_head(name, tmp_path / "critic", "value")
    policy, critic = (spread(one, layout, followers) for one in (policy_model, critic_model))
    with started(policy), started(critic):
        train(policy, batch_of(policy_model))
        before = copied(critic)
        critic.copy_from(policy)
        taken, given = copied(critic), copied(policy)
    assert apart({key: one for key, one in taken.items() if key in given}, {key: given[key] for key in taken if key in given}) == 0
    assert set(taken) - set(given) == {"score.weight", "score.bias"}
    assert all((taken[key] == before[key]).all() for key in ("score.weight", "score.bias"))


MIXTURES: dict[int, list[tuple[str, Layout]]] = {
    1: [("qwen3_moe", {}), ("unnormalised", {"recompute": "full"}), ("mixtral", {}), ("deepseek_v2_groups", {})],
    2: [
        ("qwen3_moe", {"ep": 2}),
        ("mixtral", {"tp": 2, "ep": 2, "etp": 1}),
        ("deepseek_v3", {"tp": 2}),
        ("unnormalised", {"pp": 2, "vpp": 2, "micro_batches": 4, "recompute": "full"}),
        ("unnormalised+1", {"pp": 2, "vpp": 2}),
        ("qwen3_moe", {"cp": 2, "recompute": "selective"}),
    ],
    4: [("qwen3_moe", {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1, "recompute": "full"})],
    8: [("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2, "etp": 1})],
}
REPLAYED = [pytest.param(name, layout, id=f"{name}-{layout}") for name, layout in MIXTURES[RANKS]]


def sent_elsewhere(batch: Batch, num_layers: int = 4, num_experts: int = 4) -> Batch:
    """Each token's experts drawn, which are seldom those that the weights would choose; some tokens, and all of two samples, without."""
    rng, tokens = np.random.default_rng(7), batch.ragged("tokens")
    drawn = rng.permuted(np.tile(np.arange(num_experts), (len(tokens.values), num_layers, 1)), axis=-1)[..., :2].astype(np.int16)
    drawn[rng.random(len(drawn)) < 0.1] = -1
    for row in (0, 5):
        drawn[tokens.offsets[row] : tokens.offsets[row + 1]] = -1
    return batch.with_columns(**{ROUTED_EXPERTS: Ragged(compact_experts(drawn, num_experts), tokens.offsets)})


def replay_history(engine: TrainEngine, batch: Batch) -> dict[str, Any]:
    with started(engine):
        first = copied(engine)
        read = engine.logprobs(batch)
        sums = [engine.accumulate(batch.take(rows), PPO) for rows in (np.arange(9), np.arange(9, len(batch)))]
        applied = engine.apply(LINEAR, 7.0)
        moved = copied(engine)
        for _ in range(2):
            train(engine, batch)
        last = copied(engine)
    return {
        "logprobs": {"": np.asarray(read.ragged("reference_logprobs").values)},
        "experts": read.ragged(ROUTED_EXPERTS) if ROUTED_EXPERTS in read else None,
        "sums": {name: sum(one.metrics[name] for one in sums) for name in sums[0].metrics},
        "share": sum(one.metrics.get("rerouted", 0.0) for one in sums) / sum(one.num_tokens for one in sums),
        "applied": dict(applied),
        "gradients": {name: first[name] - moved[name] for name in first},
        "steps": {name: last[name] - moved[name] for name in first},
    }


@pytest.mark.parametrize("routing", ["rollout", "trainer"])
@pytest.mark.parametrize(("name", "layout"), REPLAYED)
def test_experts_are_replayed_and_recorded_as_by_the_embedded_trainer(
    name: str, layout: Layout, routing: Routing, followers: Followers, tmp_path: Path
) -> None:
    """Experts of a record, from a rollout or from the pass before the update; with most tokens other ones than the weights would choose."""
    model = replace(small(name, tmp_path / "model"), routing=routing)
    batch = sent_elsewhere(batch_of(model), num_layers_of(name))
    expected = replay_history(EmbeddedTrain(model, EngineSettings()), batch)
    found = replay_history(spread(model, layout, followers), batch)
    assert 0.5 < found["share"] < 0.95
    assert apart(found["logprobs"], expected["logprobs"]) < 1e-5
    assert set(expected["sums"]) == set(found["sums"])
    for key, value in expected["sums"].items():
        assert found["sums"][key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    largest = max(float(np.abs(one).max()) for one in expected["gradients"].values())
    assert apart(found["gradients"], expected["gradients"]) < 1e-5 * largest
    assert {"expert_load/max", "expert_load/min", "expert_load/idle"} <= set(found["applied"])
    assert found["applied"] == pytest.approx(expected["applied"], rel=1e-5)
    assert apart(found["steps"], expected["steps"]) < 1e-6
    assert (routing == "trainer") == (found["experts"] is not None)
    if found["experts"] is not None:
        recorded, known = (expanded_experts(one["experts"].values) for one in (found, expected))
        assert (np.sort(recorded, -1) == np.sort(known, -1)).all()
    plain = replay_history(EmbeddedTrain(replace(model, routing=None), EngineSettings()), batch)
    assert apart(plain["gradients"], expected["gradients"]) > 1e-2 * largest, "without replay the gradient is another"


@pytest.mark.parametrize(("name", "layout"), REPLAYED)
def test_experts_are_balanced_as_by_the_embedded_trainer(name: str, layout: Layout, followers: Followers, tmp_path: Path) -> None:
    """Loads are of whole sequences, whose rows tensor and context ranks split, and whose layers stages have; replayed or not."""
    routing: Routing | None = None if "ep" in layout else "rollout"
    model = replace(small(name, tmp_path / "model"), balance=Balance(loss=3.0, z_loss=2.0), routing=routing)
    batch = sent_elsewhere(batch_of(model), num_layers_of(name))
    expected, found = (replay_history(one, batch) for one in (EmbeddedTrain(model, EngineSettings()), spread(model, layout, followers)))
    assert {"balance_loss", "z_loss"} <= set(expected["sums"])
    assert set(expected["sums"]) == set(found["sums"])
    for key, value in expected["sums"].items():
        assert found["sums"][key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    largest = max(float(np.abs(one).max()) for one in expected["gradients"].values())
    assert apart(found["gradients"], expected["gradients"]) < 1e-5 * largest
    assert apart(found["steps"], expected["steps"]) < 1e-6
    without = replay_history(EmbeddedTrain(replace(model, balance=None), EngineSettings()), batch)
    assert apart(without["gradients"], expected["gradients"]) > 1e-2 * largest


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"ep": 2}], ids=str)
def test_biases_of_routers_move_as_with_the_embedded_trainer_and_are_saved(layout: Layout, followers: Followers, tmp_path: Path) -> None:
    model = replace(small("deepseek_v3", tmp_path / "model"), balance=Balance(bias_step=0.25))
    batch = batch_of(model)
    found = []
    for engine in (EmbeddedTrain(model, EngineSettings()), spread(model, {**layout, "spread_checkpoints": True}, followers)):
        with started(engine):
            for _ in range(2):
                train(engine, batch)
            found.append({name: tensor for name, tensor in copied(engine).items() if name.endswith("bias")})
            engine.save(str(tmp_path / engine.name))
    assert len(found[0]) == 3
    assert apart(found[1], found[0]) < 1e-6
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        before = copied(engine)
        assert min(np.abs(found[1][name] - before[name]).max() for name in found[1]) > 0.2
        engine.load(str(tmp_path / "megatron-cpu"))
        after = copied(engine)
    assert apart({name: after[name] for name in found[1]}, found[1]) == 0


@pytest.mark.parametrize(("name", "layout"), REPLAYED[-2:])
def test_the_pass_before_an_update_records_what_the_update_replays(name: str, layout: Layout, followers: Followers, tmp_path: Path) -> None:
    """Also of samples that no token is predicted of, and for weights that have changed since."""
    model = replace(small(name, tmp_path / "model"), routing="trainer")
    batch = batch_of(model)
    mask = batch.ragged("loss_mask")
    values = mask.values.copy()
    values[mask.offsets[3] : mask.offsets[4]] = False
    batch = batch.with_columns(loss_mask=Ragged(values, mask.offsets))
    found = []
    for engine in (EmbeddedTrain(model, EngineSettings(deterministic=True)), spread(model, layout, followers, deterministic=True)):
        with started(engine):
            read = engine.logprobs(batch)
            with_experts = batch.join(read.only((ROUTED_EXPERTS,)))
            nothing = engine.accumulate(with_experts, PPO).metrics["rerouted"]
            engine.apply(AdamW(lr=0.05), 7.0)
            something = engine.accumulate(with_experts, PPO).metrics["rerouted"]
            norm = engine.apply(STEP, 7.0)["grad_norm"]
            found.append((np.asarray(read.ragged("reference_logprobs").values), nothing, something, norm))
            experts = expanded_experts(read.ragged(ROUTED_EXPERTS).values)
            assert (experts[mask.offsets[3] : mask.offsets[4]] == -1).all()
    assert found[0][1] == found[1][1] == 0 < found[1][2]
    assert np.abs(found[1][0] - found[0][0]).max() < 1e-5
    assert found[1][2:] == pytest.approx(found[0][2:], rel=1e-3)


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
def test_experts_of_another_model_are_refused_on_every_rank(followers: Followers, tmp_path: Path) -> None:
    model = replace(small("qwen3_moe", tmp_path / "model"), routing="rollout")
    batch = batch_of(model)
    with started(spread(model, {"pp": 2}, followers)) as engine:
        with pytest.raises(EngineError, match="2 experts in 3 layers came for a model with 2 at 4 routers"):
            engine.accumulate(sent_elsewhere(batch, num_layers=3), PPO)
        assert engine.accumulate(sent_elsewhere(batch), PPO).metrics["rerouted"] > 0


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_states_move_between_layouts_and_to_the_embedded_trainer(name: str, followers: Followers, tmp_path: Path) -> None:
    model = small(name, tmp_path / "model")
    batch = batch_of(model)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        weights = []
        for _ in range(5):
            train(engine, batch)
            weights.append(copied(engine))
    layouts: list[Layout] = [{"tp": 2}, {"pp": 2, "vpp": 2}, {"ep": 2}, {"zero": 0}]
    for turn, layout in enumerate(layouts):
        with started(spread(model, layout, followers)) as engine:
            if turn:
                engine.load(str(tmp_path / f"{turn - 1}"))
            train(engine, batch)
            assert apart(copied(engine), weights[turn]) < 1e-6
            engine.save(str(tmp_path / f"{turn}"))
            saved = copied(engine)
    assert set(load_file(tmp_path / "3" / "model.safetensors")) == set(saved)
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        engine.load(str(tmp_path / "3"))
        train(engine, batch)
        assert apart(copied(engine), weights[4]) < 1e-6


SPREAD: dict[int, list[tuple[str, Layout]]] = {
    1: [("qwen3", {})],
    # Embeddings that are the head, with rows of no token; experts, which modules stack; moments in ranges of weights.
    2: [
        ("qwen2", {"tp": 2}),
        ("qwen2", {"pp": 2, "vpp": 2}),
        ("qwen3_moe", {"ep": 2}),
        ("mixtral", {"tp": 2}),
        ("llama", {"zero": 0}),
        ("deepseek_v3", {"pp": 2}),
        ("qwen2+1", {"pp": 2, "vpp": 2}),
    ],
    4: [("mixtral", {"tp": 2, "pp": 2, "ep": 2, "etp": 1})],
    8: [],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "layout"), SPREAD[RANKS], ids=[f"{name}-{layout}" for name, layout in SPREAD[RANKS]])
def test_a_checkpoint_that_each_rank_writes_its_part_of_is_the_gathered_one(
    name: str, layout: Layout, dtype: Dtype, followers: Followers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(small(name, tmp_path / "model"), dtype=dtype)
    batch = batch_of(model)
    with started(spread(model, layout, followers)) as engine:
        train(engine, batch, replace(STEP, betas=(0.8, 0.99)))
        train(engine, batch)
        engine.save(str(tmp_path / "gathered"))
    with started(spread(model, {**layout, "spread_checkpoints": True}, followers)) as engine:
        engine.save(str(tmp_path / "there"))  # An older one.
        engine.load(str(tmp_path / "gathered"))
        engine.save(str(tmp_path / "there"))
        check_parts_are_written_behind(engine, batch, tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(trainer_checkpoint, "save", refuses)
            with pytest.raises(EngineError, match="the disk is full"):
                engine.save(str(tmp_path / "there"))  # What was there stays whole.
    parts = [file.stat().st_size for file in (tmp_path / "there" / "m2flow_parts").glob("*.distcp")]
    assert len(parts) == RANKS
    assert RANKS == 1 or max(parts) < 0.8 * sum(parts)
    assert not list((tmp_path / "there").glob("*.safetensors"))
    exported = export_model(tmp_path / "there", tmp_path / "out")
    whole = load_torch_file(tmp_path / "gathered" / "model.safetensors")
    assert set(exported) == set(whole)
    assert all(torch.equal(exported[key], tensor) for key, tensor in whole.items())
    assert_same_states(tmp_path / "there", tmp_path / "gathered")
    found = []
    for engine in (EmbeddedTrain(model, EngineSettings()), spread(model, {}, followers)):
        with started(engine), monkeypatch.context() as patched:
            if engine.name != "embedded":
                patched.setattr(trainer_checkpoint, "read_parts", refuses)  # Nobody needs tensors whole.
            engine.load(str(tmp_path / "there"))
            patched.undo()
            engine.save(str(tmp_path / "again"))
            assert_same_states(tmp_path / "again", tmp_path / "gathered")
            again = load_torch_file(tmp_path / "again" / "model.safetensors")
            assert all(torch.equal(again[key], tensor) for key, tensor in whole.items())
            found.append(train(engine, batch)["grad_norm"])
    assert found[1] == pytest.approx(found[0], rel=1e-5 if dtype == "float32" else 0.05)


def assert_same_states(found: Path, expected: Path) -> None:
    """Compare, bit by bit, what checkpoints have beside weights."""
    leaves = [dict(leaves_of(trainer_checkpoint.read_state(str(one), "cpu"))) for one in (found, expected)]
    assert set(leaves[0]) == set(leaves[1])
    assert sum(isinstance(value, torch.Tensor) and value.numel() > 1 for value in leaves[1].values()) > 20
    for key, value in leaves[1].items():
        assert torch.equal(leaves[0][key], value) if isinstance(value, torch.Tensor) else leaves[0][key] == value, key


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@pytest.mark.parametrize(("name", "layout"), [("qwen2", {"pp": 2}), ("qwen3_moe", {"ep": 2})])
def test_parts_that_another_trainer_wrote_are_read_by_those_that_hold_them(
    name: str, layout: Layout, followers: Followers, tmp_path: Path
) -> None:
    model = small(name, tmp_path / "model")
    batch = batch_of(model)
    with started(Mirrored(FsdpTrain, model, EngineSettings(options={"spread_checkpoints": True}), followers)) as engine:
        train(engine, batch)
        engine.save(str(tmp_path / "there"))
        train(engine, batch)
        expected = copied(engine)
    with started(spread(model, layout, followers)) as engine:
        engine.load(str(tmp_path / "there"))
        train(engine, batch)
        assert apart(copied(engine), expected) < 1e-6
    other = small("llama", tmp_path / "other")
    with started(spread(other, {}, followers)) as engine, pytest.raises(ModelError, match="of another model"):
        engine.load(str(tmp_path / "there"))


def refuses(*_: object, **__: object) -> None:
    raise EngineError("the disk is full")


def leaves_of(state: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves_of(value, f"{where}.{key}")
    elif state is not None:
        yield where, state


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_weights_are_those_of_the_checkpoint_bit_by_bit(name: str, followers: Followers, tmp_path: Path) -> None:
    drawn = small(name, tmp_path / "model")
    load_model(drawn, device="cpu", attention="eager").save_pretrained(tmp_path / "model")
    model = replace(drawn, init="pretrained", dtype="bfloat16")
    expected = load_file(tmp_path / "model" / "model.safetensors")
    with started(spread(model, {"tp": 2}, followers)) as engine:
        found = {name: tensor.clone() for name, tensor in engine.weights()}
        metrics = train(engine, batch_of(model))
        engine.save(str(tmp_path / "saved"))
        next_one = train(engine, batch_of(model))["grad_norm"]
    rounded = dict(trainer_checkpoint.named_weights(load_model(model, device="cpu", attention="eager")))
    assert set(found) == set(expected)
    assert all(tensor.dtype == rounded[name].dtype and bool((rounded[name] == tensor).all()) for name, tensor in found.items())
    # Biases of routers stay as exact as their steps are small.
    assert {name for name, tensor in found.items() if tensor.dtype != torch.bfloat16} == {
        one for one in found if one.endswith("correction_bias")
    }
    assert 0 < metrics[MOVED] < 1
    with started(spread(model, {"pp": 2}, followers)) as engine:
        engine.load(str(tmp_path / "saved"))
        assert train(engine, batch_of(model))["grad_norm"] == pytest.approx(next_one, rel=0.05)


SENT: dict[int, list[tuple[str, Layout]]] = {
    1: [],
    2: [("qwen3_moe", {"ep": 2})],
    4: [("qwen2", {"tp": 2, "pp": 2}), ("mixtral", {"tp": 2, "pp": 2, "ep": 2, "etp": 1})],
    8: [],
}


@pytest.mark.parametrize(("name", "layout"), SENT[RANKS], ids=[f"{name}-{layout}" for name, layout in SENT[RANKS]])
def test_weights_arrive_in_a_rollout_engine_as_the_trainer_exports_them(
    name: str, layout: Layout, followers: Followers, tmp_path: Path
) -> None:
    model = small(name, tmp_path / "model")
    engine = spread(model, layout, followers)
    assert isinstance(engine, Mirrored)
    check_what_ranks_send_arrives_exactly(model, engine, batch_of(model), train, tmp_path)


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
def test_a_norm_that_counts_what_is_not_split_on_every_rank_is_another(followers: Followers, tmp_path: Path) -> None:
    """On tensors the norms and the router are what is not split, in the pipeline the embeddings that are the head, too."""
    for name, layout in (("qwen3_moe", {"tp": 2}), ("qwen2", {"pp": 2})):
        model = small(name, tmp_path / name)
        norms = []
        for kind in (MegatronOnCpu, CountsEverywhere):
            with started(spread(model, layout, followers, kind)) as engine:
                norms.append(train(engine, batch_of(model))["grad_norm"])
        assert norms[1] / norms[0] - 1 > 5e-5, name


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
def test_interleaved_stages_that_send_in_batches_compute_something_else(followers: Followers, tmp_path: Path) -> None:
    """Of passes of one size: with others the stages would wait for each other."""
    model = small("qwen2", tmp_path / "model")
    rng = np.random.default_rng(0)
    tokens = [rng.integers(2, VOCABULARY, 12) for _ in range(4)]
    masks = Ragged.of([np.arange(12) >= 4] * 4, bool)
    behaviour, advantages = Ragged(np.full(48, -2.0, np.float32), masks.offsets), rng.normal(size=4).astype(np.float32)
    columns = {"tokens": Ragged.of(tokens, np.int32), "loss_mask": masks, "logprobs": behaviour, "advantages": advantages}
    batch = Batch(make_ids(0, 4, 1), columns)
    found = []
    for kind in (EmbeddedTrain, MegatronOnCpu, BatchedSends):
        layout = {"pp": 2, "vpp": 2, "micro_batches": 4}
        with started(kind(model, EngineSettings()) if kind is EmbeddedTrain else spread(model, layout, followers, kind)) as engine:
            engine.accumulate(batch, PPO)
            engine.apply(LINEAR, 4.0)
            found.append(copied(engine))
    assert apart(found[1], found[0]) < 1e-6
    assert not max(np.abs(found[2][name] - found[0][name]).max() for name in found[0]) < 1e-4


def raises_on_the_last_stage(logprobs: Any) -> Any:
    raise ZeroDivisionError("a loss that can't be")


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "vpp": 2}], ids=str)
def test_a_loss_that_raises_ends_every_rank_and_leaves_the_engine_usable(layout: Layout, followers: Followers, tmp_path: Path) -> None:
    model = small("qwen2", tmp_path / "model")
    batch = batch_of(model)
    with started(spread(model, layout, followers)) as engine:
        begin = time.monotonic()
        with pytest.raises(M2FlowError, match="a loss that can't be"):
            engine.accumulate(batch, Objective(Loss("wrong", raises_on_the_last_stage, ("logprobs",))))
        assert time.monotonic() - begin < 30
        engine.discard()
        norm = train(engine, batch)["grad_norm"]
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        assert norm == pytest.approx(train(engine, batch)["grad_norm"], rel=1e-5)


def layer_of(engine: Any, name: str) -> torch.nn.Module:
    return dict(engine._built.named_layers())[name]


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@pytest.mark.parametrize(
    ("layout", "stay"), [({"tp": 2}, Stay("decoder.layers.1", "backward")), ({"pp": 2}, Stay("decoder.layers.3"))], ids=["tp", "pp"]
)
def test_a_rank_that_stays_in_a_layer_ends_the_step_with_its_place(layout: Layout, stay: Stay, tmp_path: Path) -> None:
    model = small("qwen2", tmp_path / "model")
    with followed(1) as others:
        check_who_hangs_is_named(MegatronOnCpu, stay, model, layout, others, batch_of(model), layer_of)


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@of_hanging_calls
def test_a_rank_that_stays_in_a_call_without_passes_ends_it_with_its_place(
    call: Call, options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("qwen2", tmp_path / "model")
    with followed(1) as others:
        check_a_call_is_named_that_hangs(MegatronOnCpu, call, said, model, {"tp": 2, **options}, others, tmp_path, monkeypatch)


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
def test_states_that_left_the_device_come_back(followers: Followers, tmp_path: Path) -> None:
    model = small("qwen2", tmp_path / "model")
    batch = batch_of(model)
    weights = []
    for goes_away in (False, True):
        engine = spread(model, {"tp": 2}, followers)
        assert isinstance(engine, Mirrored)
        with started(engine):
            train(engine, batch)
            engine.accumulate(batch, PPO)
            if goes_away:
                held = engine.memory()
                engine._on_all_ranks("offload_states")
                assert engine.memory().total == 0 < held.optimizer
                engine._on_all_ranks("onload_states")
                assert engine.memory() == held
            engine.apply(STEP, 3.0)
            weights.append(copied(engine))
    assert apart(weights[1], weights[0]) == 0


OFFLOADED: list[tuple[str, Layout, Dtype]] = [
    ("qwen2", {"tp": 2}, "float32"),
    ("qwen2", {"pp": 2, "vpp": 2}, "bfloat16"),
    ("llama", {}, "bfloat16"),
    ("deepseek_v3", {"ep": 2, "zero": 0}, "float32"),
]


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@pytest.mark.parametrize(("name", "layout", "dtype"), OFFLOADED, ids=[f"{name}-{layout}-{dtype}" for name, layout, dtype in OFFLOADED])
def test_an_optimiser_in_the_hosts_memory_makes_the_same_steps_from_the_same_checkpoints(
    name: str, layout: Layout, dtype: Dtype, followers: Followers, tmp_path: Path
) -> None:
    """Bit by bit, where the device is the host too; also after another's checkpoint, and after weights that somebody else set."""
    model = replace(small(name, tmp_path / "model"), dtype=dtype)
    batch = batch_of(model)
    found = []
    for turn, options in enumerate((layout, {**layout, "offload_optimizer": True})):
        engine = spread(model, options, followers, SteppedOnHost if turn else MegatronOnCpu)
        assert isinstance(engine, Mirrored)
        with started(engine):
            metrics = [train(engine, batch, replace(STEP, log_layers=True)) for _ in range(2)]
            engine._on_all_ranks("offload_states")
            engine._on_all_ranks("onload_states")
            metrics += [train(engine, batch)]
            engine.save(str(tmp_path / f"{turn}"))
            weights = [in_memory((one, tensor.float()) for one, tensor in engine.weights())]
            engine.load(str(tmp_path / "0"))  # Of the trainer whose states are on the device.
            metrics += [train(engine, batch)]
            weights += [in_memory((one, tensor.float()) for one, tensor in engine.weights())]
            found.append([*metrics, *weights])
    assert_same_states(tmp_path / "1", tmp_path / "0")
    for one, other in zip(*found, strict=True):
        assert apart({key: np.asarray(value) for key, value in one.items()}, {key: np.asarray(value) for key, value in other.items()}) == 0
    assert (MOVED in found[1][0]) == (dtype == "bfloat16")


NEEDS_PEFT = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
ADAPTED: dict[int, list[tuple[str, Layout, tuple[str, ...]]]] = {
    1: [("qwen3", {}, ())],
    2: [
        ("qwen2", {"tp": 2}, ()),
        ("qwen3", {"tp": 2, "sequence_parallel": False}, ("q_proj", "v_proj", "up_proj", "down_proj")),
        ("llama", {"pp": 2, "vpp": 2, "micro_batches": 4, "recompute": "full"}, ()),
        ("qwen2", {"cp": 2, "recompute": "selective", "offload_optimizer": True}, ("o_proj", "k_proj")),
    ],
    4: [("llama", {"tp": 2, "pp": 2, "zero": 0}, ())],
    8: [],
}


@NEEDS_PEFT
@pytest.mark.parametrize(
    ("name", "layout", "targets"), ADAPTED[RANKS][::2], ids=[f"{name}-{layout}" for name, layout, _ in ADAPTED[RANKS][::2]]
)
def test_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(
    name: str, layout: Layout, targets: tuple[str, ...], followers: Followers, tmp_path: Path
) -> None:
    model = replace(small(name, tmp_path / "model"), lora=Lora(rank=4, alpha=8, targets=targets))
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(model, lambda: spread(model, layout, followers), tmp_path)


@NEEDS_PEFT
@pytest.mark.parametrize(("name", "layout", "targets"), ADAPTED[RANKS], ids=[f"{name}-{layout}" for name, layout, _ in ADAPTED[RANKS]])
def test_gradients_of_adapters_are_those_of_the_embedded_trainer(
    name: str, layout: Layout, targets: tuple[str, ...], followers: Followers, tmp_path: Path
) -> None:
    """After a step, without which B is zero and A has no gradient."""
    model = replace(small(name, tmp_path / "model"), lora=Lora(rank=4, alpha=8, targets=targets))
    batch = batch_of(model)
    found = []
    for engine in (EmbeddedTrain(model, EngineSettings()), spread(model, layout, followers)):
        with started(engine):
            norms = [train(engine, batch, replace(STEP, lr=0.1))]
            first, logprobs = in_memory(engine.adapters()), np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values)
            engine.accumulate(batch, PPO)
            norms += [engine.apply(replace(LINEAR, log_layers=True), 7.0)]
            last = in_memory(engine.adapters())
        found.append((norms, {"": logprobs}, {key: first[key] - last[key] for key in last}))
    assert apart(found[1][1], found[0][1]) < 1e-5
    assert min(float(np.abs(one).max()) for one in found[0][2].values()) > 1e-6
    largest = max(float(np.abs(one).max()) for one in found[0][2].values())
    assert apart(found[1][2], found[0][2]) < 1e-5 * largest
    for one, other in zip(found[1][0], found[0][0], strict=True):
        assert dict(one) == pytest.approx(dict(other), rel=1e-4)


@NEEDS_PEFT
@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
def test_adapters_below_float32_are_stepped_exactly_and_go_on_in_the_embedded_trainer(followers: Followers, tmp_path: Path) -> None:
    model = replace(small("qwen2", tmp_path / "model"), lora=Lora(rank=4, alpha=8), dtype="bfloat16")
    batch = batch_of(model)
    with started(spread(model, {"tp": 2}, followers)) as engine:
        for _ in range(2):
            train(engine, batch)
        engine.save(str(tmp_path / "saved"))
        expected = train(engine, batch)["grad_norm"]
    state = trainer_checkpoint.read_state(str(tmp_path / "saved"), "cpu")
    assert {master.dtype for master in state["masters"]} == {torch.float32}
    for engine in (EmbeddedTrain(model, EngineSettings()), spread(model, {"pp": 2}, followers)):
        with started(engine):
            engine.load(str(tmp_path / "saved"))
            engine.save(str(tmp_path / "again"))
            assert_same_states(tmp_path / "again", tmp_path / "saved")
            assert train(engine, batch)["grad_norm"] == pytest.approx(expected, rel=0.05)


@NEEDS_PEFT
@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_references_compute_from_an_adapted_policys_weights(layout: Layout, followers: Followers, tmp_path: Path) -> None:
    model = replace(small("qwen2", tmp_path / "model"), lora=Lora(rank=4, alpha=8))
    check_references_compute_from_the_policys_weights(model, spread(model, layout, followers), tmp_path)
    policy, own, plain = (spread(one, layout, followers) for one in (model, model, replace(model, lora=None)))
    with started(policy), started(own), started(plain):
        train(policy, batch_of(model))
        own.copy_from(policy)
        assert apart(copied(own), copied(policy)) == 0
        assert isinstance(policy, Mirrored)
        for wrong, share in ((plain, 1.0), (own, 0.5)):  # On this rank: it is refused before ranks send anything.
            assert isinstance(wrong, Mirrored)
            with pytest.raises(EngineError, match="can't take weights that adapters are added to"):
                wrong._own.copy_from(policy._own, share)


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
def test_trainers_of_a_process_have_one_layout(followers: Followers, tmp_path: Path) -> None:
    model = small("qwen2", tmp_path / "model")
    with started(spread(model, {"tp": 2}, followers)), pytest.raises(EngineError, match="another layout"):
        spread(model, {"pp": 2}, followers).start()


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
def test_a_trainer_whose_start_fails_has_left_its_ranks_and_others_start(followers: Followers, tmp_path: Path) -> None:
    model = small("qwen2", tmp_path / "model")
    tokenizer = Path(model.path, "tokenizer.json")
    tokenizer.rename(away := tokenizer.with_suffix(".away"))
    with pytest.raises(M2FlowError, match="tokenizer"):
        spread(model, {"tp": 2}, followers).start()
    assert not torch.distributed.is_initialized()
    away.rename(tokenizer)
    with started(spread(model, {"pp": 2}, followers)) as engine:
        assert engine.accumulate(batch_of(model), PPO).num_tokens
    assert not torch.distributed.is_initialized()


CONVERTED: dict[int, list[tuple[str, Layout]]] = {
    2: [
        ("qwen2", {"tp": 2}),
        ("qwen2", {"pp": 2, "vpp": 2, "micro_batches": 4}),
        ("qwen2+1", {"pp": 2}),
        ("qwen3", {"zero": 0}),
        ("qwen3_moe", {"ep": 2}),
        ("mixtral", {"tp": 2, "ep": 2, "etp": 1}),
    ]
}


@pytest.mark.skipif(RANKS not in CONVERTED, reason="of two ranks")
@pytest.mark.parametrize("kind", [WritesAsMegatron, WritesEachLayer])
@pytest.mark.parametrize(("name", "layout"), CONVERTED.get(RANKS, []), ids=str)
def test_what_megatron_saved_itself_is_converted_bit_by_bit(
    name: str, layout: Layout, kind: Any, followers: Followers, tmp_path: Path
) -> None:
    model = small(name, tmp_path / "model")
    with started(spread(model, layout, followers, kind)) as engine:
        train(engine, batch_of(model))
        engine.save(str(tmp_path / "iter_0000012"))
        expected = copied(engine)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    convert(tmp_path, model, tmp_path / "converted", shard_size="40KB")
    files = sorted((tmp_path / "converted").glob("*.safetensors"))
    assert len(files) > 1
    found = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert apart(found, expected) == 0
    with started(EmbeddedTrain(replace(model, path=str(tmp_path / "converted"), init="pretrained"), EngineSettings())) as engine:
        assert apart(copied(engine), expected) == 0


def with_changes(model: Model, changes: Mapping[str, Any]) -> Model:
    """A model with other values in its config.json."""
    file = Path(model.path, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return model


def converted_from_megatrons_own(
    name: str, layout: dict[str, int], changes: Mapping[str, Any], folder: Path
) -> tuple[float, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """How far logits in transformers are from Megatron's, as a part of the largest; the converted tensors; and what each rank had."""
    model = with_changes(small(name, folder / "model"), changes)
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    expected, saved = megatrons_latent.written(folder / "own", model.path, layout, tokens)
    convert(saved, model, folder / "converted", shard_size="40KB")
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder / "converted", attn_implementation="eager").eval()(tokens).logits
    tensors = {key: one for file in (folder / "converted").glob("*.safetensors") for key, one in load_torch_file(file).items()}
    ranks = [load_torch_file(file) for file in sorted((folder / "own").glob("rank-*.safetensors"))]
    return float((found - expected).abs().max() / expected.abs().max()), tensors, ranks


@pytest.mark.skipif(RANKS != 1, reason="it starts ranks of its own")
@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [
        ("deepseek_v2_groups", {"pp": 2}, {"first_k_dense_replace": 0}),  # Its layers are alike: the checkpoint has them in one tensor.
        ("deepseek_v2", {"tp": 2}, {}),
        ("deepseek_v3_halves", {}, {}),
    ],
    ids=str,
)
def test_logits_are_megatrons_own_after_a_conversion_with_latent_attention(
    name: str, layout: dict[str, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    difference, _, _ = converted_from_megatrons_own(name, layout, changes, tmp_path)
    assert difference < 1e-5


@pytest.mark.skipif(RANKS != 1, reason="it starts ranks of its own")
def test_what_megatrons_own_latent_attention_saved_is_converted_bit_by_bit(tmp_path: Path) -> None:
    """Of the second stage, whose first layer is the third one, and whose second tensor rank has the other half of the experts."""
    layout = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
    # As many experts a token that Megatron, too, takes the best two of a group.
    difference, tensors, ranks = converted_from_megatrons_own("deepseek_v3", layout, {"num_experts_per_tok": 4}, tmp_path)
    assert difference < 1e-5
    one, other = ({key.removeprefix("decoder.layers.0."): value for key, value in rank.items()} for rank in ranks[2:])
    found = {key.removeprefix("model.layers.2."): value for key, value in tensors.items()}
    for name, own, dim in (
        ("self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight", 0),
        ("self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", 0),
        ("self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight", 0),
        ("self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight", 0),
        ("self_attn.o_proj.weight", "self_attention.linear_proj.weight", 1),
        ("mlp.shared_experts.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", 1),
    ):
        assert torch.equal(found[name], torch.cat((one[own], other[own]), dim)), name
    for name, own, rank in (
        ("self_attn.q_a_layernorm.weight", "self_attention.q_layernorm.weight", one),
        ("self_attn.kv_a_layernorm.weight", "self_attention.kv_layernorm.weight", other),
        ("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias", one),
        ("mlp.experts.1.down_proj.weight", "mlp.experts.local_experts.1.linear_fc2.weight", one),
        ("mlp.experts.5.down_proj.weight", "mlp.experts.local_experts.1.linear_fc2.weight", other),
    ):
        assert torch.equal(found[name], rank[own]), name


@pytest.mark.skipif(RANKS != 2 or IMPL != "transformer_engine", reason="with Transformer Engine's stand-in, once")
@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}, {"num_experts_per_tok": 4}), ("deepseek_v2", {"pp": 2}, {})],
    ids=str,
)
def test_logits_are_megatrons_own_after_a_conversion_from_transformer_engines_names(
    name: str, layout: dict[str, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    difference, _, ranks = converted_from_megatrons_own(name, layout, changes, tmp_path)
    names = {key for rank in ranks for key in rank}
    assert {f"decoder.layers.0.self_attention.linear_kv_up_proj.{one}" for one in ("weight", "layer_norm_weight")} < names
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight1" in names
    assert difference < 1e-5


@pytest.mark.skipif(RANKS != 2, reason="of two ranks")
def test_a_checkpoint_of_megatrons_that_is_of_another_model_is_refused_by_name(followers: Followers, tmp_path: Path) -> None:
    model, other = small("qwen2", tmp_path / "model"), small("llama", tmp_path / "other")
    with started(spread(model, {"tp": 2}, followers, WritesAsMegatron)) as engine:
        engine.save(str(tmp_path / "saved"))
    with pytest.raises(ModelError, match=r"has no output_layer\.weight"):
        convert(tmp_path / "saved", other, tmp_path / "converted")
    config = Path(other.path, "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"no place for: .*self_attention\.linear_qkv\.bias"):
        convert(tmp_path / "saved", other, tmp_path / "converted")
    with pytest.raises(ModelError, match=r"has no decoder\.layers\.0\.self_attention\.q_layernorm\.weight"):
        convert(tmp_path / "saved", small("qwen3", tmp_path / "third"), tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
