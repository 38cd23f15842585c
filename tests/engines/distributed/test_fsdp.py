"""The trainer of several ranks: the suites of train engines over two of them, and the embedded trainer's numbers."""

from __future__ import annotations

import errno
import gc
import importlib.util
import json
import os
import secrets
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from adapted_trainers import (
    adapted_model,
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer,
    check_references_compute_from_the_policys_weights,
    check_what_was_copied_of_a_policy_is_in_a_checkpoint,
)
from faulty import Fault, check_a_gradient_that_lacks_a_pass_is_not_applied, check_each_fault_is_an_error_on_all_and_all_go_on
from followed import num_group_threads
from hypothesis import given
from hypothesis import strategies as st
from megatron_models import small
from tiny_models import CONFIGS, SMALL, VOCABULARY, random_model, write_model
from trainer_layouts import check_parts_are_written_behind

from m2flow.channels.weights import SharedWeights
from m2flow.channels.weights.tensors import to_wire
from m2flow.engines.contract import EngineSettings, Objective, TrainEngine
from m2flow.engines.distributed import ranks
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.distributed.ranks import RankedTrain, ReplicatedTrain, shares, sum_gradients
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.model_export import export_model
from m2flow.errors import EngineError, ModelError
from m2flow.recipe import SGD, Loss, Model, Muon, Optimizer
from m2flow.testing.fakes import FakeRanks
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import (
    DPO,
    LINEAR,
    PPO,
    RECIPE,
    ScalarHeadSuite,
    TrainEngineSuite,
    copied,
    distance,
    metric_weights,
    samples,
    started,
)


class TestFsdp(TrainEngineSuite):
    @pytest.fixture(autouse=True)
    def _take(self, model: Model, followers: Followers) -> None:
        self.model, self.followers = model, followers

    def make(self) -> TrainEngine:
        return Mirrored(FsdpTrain, self.model, EngineSettings(), self.followers)


class TestReplicas(TrainEngineSuite):
    @pytest.fixture(autouse=True)
    def _take(self, model: Model, followers: Followers) -> None:
        self.model, self.followers = model, followers

    def make(self) -> TrainEngine:
        return Mirrored(ReplicatedTrain, self.model, EngineSettings(), self.followers)


class TestFakeRanks(TrainEngineSuite):
    """The stand-in for a trainer of several ranks keeps the same contract."""

    has_distributions = False

    @pytest.fixture(autouse=True)
    def _take(self, followers: Followers) -> None:
        self.followers = followers

    def make(self) -> TrainEngine:
        return Mirrored(FakeRanks, Model("fake"), EngineSettings(), self.followers)


class LooksAtWhatIsCollected(FakeRanks):
    """Fails where a collection would look at what was loaded: PyTorch and transformers are some 300,000 objects. And where there is none:
    while that was loaded it was off."""

    def rest(self) -> None:
        if not gc.isenabled():
            raise EngineError("no garbage is collected")
        if self._rank and (count := len(gc.get_objects())) > 60_000:  # Rank 0 is the process of the tests.
            raise EngineError(f"a collection looks at {count} objects")
        super().rest()


def test_collections_of_trainers_that_stop_do_not_look_at_what_their_ranks_had_loaded(followers: Followers) -> None:
    with started(Mirrored(LooksAtWhatIsCollected, Model("fake"), EngineSettings(), followers)) as engine:
        engine.rest()


class TestFsdpHeads(ScalarHeadSuite):
    @pytest.fixture(autouse=True)
    def _take(self, model: Model, followers: Followers) -> None:
        self.path, self.followers = Path(model.path), followers

    def make(self, head: str) -> TrainEngine:
        return Mirrored(FsdpTrain, random_model(self.path, head), EngineSettings(), self.followers)


@pytest.mark.parametrize("name", [pytest.param("qwen2", marks=pytest.mark.core), *(name for name in CONFIGS if name != "qwen2")])
@pytest.mark.parametrize(("num_ranks", "of"), [(1, FsdpTrain), (2, FsdpTrain), (2, ReplicatedTrain)])
def test_losses_gradients_and_logprobs_are_those_of_the_embedded_trainer(
    name: str, num_ranks: int, of: type[RankedTrain], followers: Followers, tmp_path: Path
) -> None:
    model, batch = write_model(tmp_path, CONFIGS[name]()), samples(VOCABULARY, num_prompts=5)
    engines = [EmbeddedTrain(model, EngineSettings()), spread(model, num_ranks, followers, of=of)]
    results = []
    for engine in engines:
        with started(engine):
            before = np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values)
            sums = [engine.accumulate(batch.take(np.arange(i, i + 5)), PPO) for i in range(0, 20, 5)]
            metrics = dict(engine.apply(replace(LINEAR, log_layers=True), 7.0))
            merged = {f"{i}/{key}": value for i, one in enumerate(sums) for key, value in metric_weights(one).items()}
            results.append(({"logprobs": before}, merged, {key: np.array([value]) for key, value in metrics.items()}, copied(engine)))
    for found, expected in zip(results[1], results[0], strict=True):
        assert distance(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("qwen2", {"tp": 2, "head_logits": 96}, marks=pytest.mark.core),
        ("qwen3", {"tp": 2}),
        ("qwen2", {"cpu_offload": True, "head_logits": 96}),
    ],
    ids=str,
)
def test_layers_split_over_ranks_and_states_in_the_hosts_memory_change_no_number(
    name: str, options: dict[str, object], followers: Followers, tmp_path: Path
) -> None:
    config = transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16) if name == "qwen3" else CONFIGS[name]()
    model, batch = write_model(tmp_path / "model", config), samples(VOCABULARY)
    made: dict[str, Callable[[], TrainEngine]] = {"alone": lambda: EmbeddedTrain(model, EngineSettings())}
    made["spread"] = lambda: Mirrored(FsdpTrain, model, EngineSettings(options=options), followers)
    results = []
    for which, make in made.items():
        with started(make()) as engine:
            logprobs = np.asarray(engine.logprobs(batch).ragged("reference_logprobs").values)
            sums = [engine.accumulate(batch.take(rows), PPO) for rows in (np.arange(7), np.arange(7, 12))]
            metrics = {
                key: np.array([value]) for key, value in engine.apply(replace(LINEAR, max_grad_norm=2.0, log_layers=True), 3.0).items()
            }
            whole = copied(engine)
            step(engine, batch, RECIPE)
            engine.save(str(tmp_path / which))
            merged = {f"{i}/{key}": value for i, one in enumerate(sums) for key, value in metric_weights(one).items()}
            results.append(({"logprobs": logprobs}, merged, metrics, whole))
    for found, expected in zip(results[1], results[0], strict=True):
        assert distance(found, expected) < 1e-5
    weights = []
    for which, other in (("alone", "spread"), ("spread", "alone")):
        with started(made[which]()) as engine:
            engine.load(str(tmp_path / other))
            step(engine, batch, RECIPE)
            weights.append(copied(engine))
    assert distance(weights[1], weights[0]) < 1e-3  # Adam takes a step as long for a gradient that is nothing but rounding.


@pytest.mark.parametrize(
    ("recipe", "of", "options"),
    [
        (Muon(0.1), FsdpTrain, {}),
        (SGD(1.0, momentum=0.9), FsdpTrain, {}),
        (Muon(0.1), FsdpTrain, {"tp": 2}),
        (Muon(0.1), ReplicatedTrain, {}),
    ],
    ids=["muon", "sgd", "muon-tp", "muon-replicas"],
)
def test_other_optimisers_step_over_ranks_as_on_one(
    recipe: Optimizer, of: type[RankedTrain], options: dict[str, object], followers: Followers, tmp_path: Path
) -> None:
    model, batch = write_model(tmp_path / "model", CONFIGS["qwen2"]()), samples(VOCABULARY)
    made: dict[str, Callable[[], TrainEngine]] = {"alone": lambda: EmbeddedTrain(model, EngineSettings())}
    made["spread"] = lambda: Mirrored(of, model, EngineSettings(options=options), followers)
    weights = []
    for which, make in made.items():
        with started(make()) as engine:
            step(engine, batch, recipe)
            step(engine, batch, recipe)
            engine.save(str(tmp_path / which))
            weights.append(copied(engine))
    for which, other in (("alone", "spread"), ("spread", "alone")):
        with started(made[which]()) as engine:
            engine.load(str(tmp_path / other))
            step(engine, batch, recipe)
            weights.append(copied(engine))
    assert distance(weights[1], weights[0]) < 1e-3  # Muon's iterations raise the rounding of small singular values.
    assert distance(weights[3], weights[2]) < 1e-3


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
def test_adapters_are_those_of_the_embedded_trainer(followers: Followers, tmp_path: Path) -> None:
    model = adapted_model(tmp_path / "model")
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(model, lambda: spread(model, 2, followers), tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
@pytest.mark.parametrize(
    ("of", "options"), [(FsdpTrain, {}), (FsdpTrain, {"reshard_after_forward": False}), (ReplicatedTrain, {})], ids=str
)
def test_references_compute_from_an_adapted_policys_weights(
    of: type[RankedTrain], options: dict[str, object], followers: Followers, tmp_path: Path
) -> None:
    model = adapted_model(tmp_path / "model")
    policy = Mirrored(of, model, EngineSettings(options=options), followers)
    check_references_compute_from_the_policys_weights(model, policy, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
def test_a_reference_that_has_weights_of_its_own_saves_what_it_took_of_an_adapted_policy(followers: Followers, tmp_path: Path) -> None:
    model = adapted_model(tmp_path / "model")
    check_what_was_copied_of_a_policy_is_in_a_checkpoint(model, lambda: spread(model, 1, followers), tmp_path)


@pytest.mark.parametrize("of", [FsdpTrain, ReplicatedTrain])
def test_ranks_send_what_they_hold_of_experts_that_modules_stack_under_the_names_of_a_checkpoint(
    of: type[RankedTrain], followers: Followers, tmp_path: Path
) -> None:
    with started(spread(small("qwen3_moe", tmp_path), 2, followers, of=of)) as engine:
        assert isinstance(engine, Mirrored)
        pieces = engine.spread(1 << 12)
        assert pieces is not None
        gathered = list(to_wire(engine.weights()))
        with closing(SharedWeights(f"m2flow-test-{secrets.token_hex(4)}")) as stage:
            found = stage.write_spread(pieces).tensors
            assert found == stage.write(gathered).tensors
        assert "model.layers.3.mlp.experts.3.up_proj.weight" in [entry.name for entry in found]


@pytest.mark.parametrize("recomputes", [False, True])
def test_layers_that_are_computed_again_keep_nothing_else_and_give_the_same_numbers(
    recomputes: bool, model: Model, followers: Followers
) -> None:
    batch, found, passes = samples(VOCABULARY), [], list[bool]()
    with started(Mirrored(FsdpTrain, model, EngineSettings(options={"recompute": recomputes}), followers)) as engine:
        layer = engine._own._model.base_model.layers[1].mlp  # type: ignore[attr-defined]
        layer.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
        for _ in range(2):
            step(engine, batch, LINEAR)
        found.append(copied(engine))
    assert passes == ([False, True] if recomputes else [True]) * 2
    with started(EmbeddedTrain(model, EngineSettings())) as alone:
        for _ in range(2):
            step(alone, batch, LINEAR)
        assert distance(found[0], copied(alone)) < 1e-5


def test_an_option_recompute_that_is_no_answer_is_refused(model: Model, followers: Followers) -> None:
    with pytest.raises(EngineError, match="the option recompute of the train engine 'fsdp' is 'full'"):
        Mirrored(FsdpTrain, model, EngineSettings(options={"recompute": "full"}), followers).start()


def test_trainers_that_have_stopped_leave_no_threads_of_their_groups(model: Model, followers: Followers) -> None:
    gc.collect()
    left, before = [], num_group_threads()  # A trainer of an earlier test may still be referred to.
    for _ in range(3):
        engine = Mirrored(FsdpTrain, model, EngineSettings(options={"tp": 2}), followers)
        engine.start()
        step(engine, samples(VOCABULARY))
        assert num_group_threads() > before
        engine.stop()
        left.append(num_group_threads())
    assert max(left) <= before


def test_a_number_of_tensor_ranks_that_can_t_be_is_refused(model: Model, followers: Followers) -> None:
    engine = Mirrored(FsdpTrain, model, EngineSettings(options={"tp": 3}), followers)
    with pytest.raises(EngineError, match="tp is 3, which does not divide 2 ranks"):
        engine.start()


@pytest.mark.core
def test_a_checkpoint_goes_on_with_any_number_of_ranks(model: Model, followers: Followers, tmp_path: Path) -> None:
    batch = samples(VOCABULARY)
    with started(spread(model, 2, followers)) as engine:
        step(engine, batch, LINEAR)
        engine.save(str(tmp_path / "there"))
        step(engine, batch, LINEAR)
        whole = copied(engine)
    others = [EmbeddedTrain(model, EngineSettings()), *(spread(model, count, followers) for count in (1, 2))]
    for other in (*others, spread(model, 2, followers, of=ReplicatedTrain)):
        with started(other):
            other.load(str(tmp_path / "there"))
            step(other, batch, LINEAR)
            assert distance(copied(other), whole) < 1e-5
    with started(EmbeddedTrain(replace(model, path=str(tmp_path / "there"), init="pretrained"), EngineSettings())) as engine:
        assert distance(copied(engine), whole) > 1e-5


def test_a_checkpoint_that_each_rank_writes_its_part_of_goes_on_anywhere_and_is_exported_whole(
    model: Model, followers: Followers, tmp_path: Path
) -> None:
    batch, there = samples(VOCABULARY), tmp_path / "there"
    with started(Mirrored(FsdpTrain, model, EngineSettings(options={"spread_checkpoints": True}), followers)) as engine:
        step(engine, batch, LINEAR)
        engine.save(str(tmp_path / "there"))  # Another is there already.
        step(engine, batch, LINEAR)
        engine.save(str(tmp_path / "there"))
        saved = copied(engine)
        step(engine, batch, LINEAR)
        whole = copied(engine)
    assert not list(there.glob("*.safetensors"))
    assert len(list((there / "m2flow_parts").glob("*.distcp"))) == 2
    for other in (EmbeddedTrain(model, EngineSettings()), spread(model, 1, followers), spread(model, 2, followers)):
        with started(other):
            other.load(str(there))
            assert distance(copied(other), saved) == 0
            step(other, batch, LINEAR)
            assert distance(copied(other), whole) < 1e-5
    exported = export_model(there, tmp_path / "out")
    assert distance({name: tensor.numpy() for name, tensor in exported.items()}, saved) == 0
    part = next((there / "m2flow_parts").glob("__1*.distcp"))
    part.write_bytes(part.read_bytes()[:-9])
    with started(spread(model, 1, followers)) as engine, pytest.raises(ModelError, match="its size or checksum differs"):
        engine.load(str(there))


def test_parts_of_a_checkpoint_are_written_while_training_goes_on(model: Model, followers: Followers, tmp_path: Path) -> None:
    with started(Mirrored(FsdpTrain, model, EngineSettings(options={"spread_checkpoints": True}), followers)) as engine:
        step(engine, samples(VOCABULARY), LINEAR)
        check_parts_are_written_behind(engine, samples(VOCABULARY), tmp_path)


def test_a_trainer_that_starts_again_writes_parts_behind_again(model: Model, followers: Followers, tmp_path: Path) -> None:
    engine = Mirrored(FsdpTrain, model, EngineSettings(options={"spread_checkpoints": True}), followers)
    with started(engine):
        held = engine.held_checkpoint(str(tmp_path / "before"))
        assert held is not None  # Nobody writes it.
    engine._place.mkdir()  # Where its ranks meet goes with a stop.
    with started(engine):
        check_parts_are_written_behind(engine, samples(VOCABULARY), tmp_path)


def test_a_rank_that_can_not_write_its_part_behind_is_an_error_of_the_checkpoint_alone(
    model: Model, followers: Followers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with started(Mirrored(FsdpTrain, model, EngineSettings(options={"spread_checkpoints": True}), followers)) as engine:
        for number in range(2):  # Ranks whose parts nobody asks for any more hold up nothing.
            held = engine.held_checkpoint(str(tmp_path / str(number)))
            assert held is not None
            with monkeypatch.context() as patched:
                patched.setattr(dcp.FileSystemWriter, "write_data", refuses)
                with pytest.raises(EngineError, match=r"rank 0: .*can't be written.*No space left"):
                    held.write()
        step(engine, samples(VOCABULARY), LINEAR)
        check_parts_are_written_behind(engine, samples(VOCABULARY), tmp_path)


def test_an_export_of_parts_has_the_weights_type(model: Model, followers: Followers, tmp_path: Path) -> None:
    half = replace(model, dtype="bfloat16")
    with started(Mirrored(FsdpTrain, half, EngineSettings(options={"spread_checkpoints": True}), followers)) as engine:
        engine.save(str(tmp_path / "there"))
        saved = {name: tensor.clone() for name, tensor in engine.weights()}
    exported = export_model(tmp_path / "there", tmp_path / "out")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.core
def test_an_error_on_one_rank_is_an_error_on_all_and_all_go_on(model: Model, followers: Followers) -> None:
    batch = samples(VOCABULARY)

    def bad(logprobs, weight):  # type: ignore[no-untyped-def]
        return logprobs / weight

    lost = np.ones(len(batch), np.float32)
    rank = next(rank for rank, rows in enumerate(of_two(batch)) if rank == 1 and len(rows))
    lost[of_two(batch)[rank][0]] = 0
    objective = Objective(Loss("bad", bad, ("logprobs", "weight")))
    with started(spread(model, 2, followers)) as engine:
        with pytest.raises(EngineError, match=r"rank 1 .*: the loss bad .*finite"):
            engine.accumulate(batch.with_columns(weight=lost), objective)
        step(engine, batch)
        found = copied(engine)
    with started(spread(model, 2, followers)) as engine:
        step(engine, batch)
        assert distance(copied(engine), found) == 0


@pytest.mark.parametrize("name", ["qwen2", "softcap"])
def test_a_part_of_a_replica_that_fails_on_one_rank_is_an_error_on_all_and_all_go_on(
    name: str, followers: Followers, tmp_path: Path
) -> None:
    """Of any architecture: replicas wait for each other between passes alone."""
    faults = [
        Fault(1, "model.layers.1.mlp", said="model.layers.1"),
        Fault(0, "model.layers.0.self_attn.o_proj", "backward", said="model.layers.0"),
        Fault(1, "model.layers.0.self_attn", error=MemoryError, said="model.layers.0"),
        Fault(0, "model.embed_tokens"),
        Fault(1, "lm_head", "backward"),
        Fault(1, "model.layers.1.self_attn.o_proj", "shape", said="model.layers.1"),
    ]
    model = write_model(tmp_path, CONFIGS[name]())
    check_each_fault_is_an_error_on_all_and_all_go_on(model, {}, followers, faults, of=ReplicatedTrain)
    check_a_gradient_that_lacks_a_pass_is_not_applied(model, {}, followers, faults[1], of=ReplicatedTrain)


@pytest.mark.core
def test_a_rank_without_samples_takes_part(model: Model, followers: Followers) -> None:
    one = samples(VOCABULARY).take([3])
    results = []
    for engine in (EmbeddedTrain(model, EngineSettings()), spread(model, 2, followers)):
        with started(engine):
            sums = engine.accumulate(one, PPO)
            engine.apply(LINEAR, 1.0)
            results.append((metric_weights(sums), copied(engine)))
    for found, expected in zip(results[1], results[0], strict=True):
        assert distance(found, expected) < 1e-5


def test_passes_in_another_precision_keep_weights_in_float32(model: Model, followers: Followers) -> None:
    batch = samples(VOCABULARY)
    settings = EngineSettings(options={"compute_dtype": "bfloat16"})
    with started(EmbeddedTrain(model, EngineSettings())) as engine:
        first = copied(engine)
        step(engine, batch, LINEAR)
        exact = copied(engine)
    with started(Mirrored(FsdpTrain, model, settings, followers)) as engine:
        step(engine, batch, LINEAR)
        found = copied(engine)
    assert all(array.dtype == np.float32 for array in found.values())
    moved = {name: array - first[name] for name, array in exact.items()}
    assert 0 < distance({name: array - first[name] for name, array in found.items()}, moved) < 0.3


def test_gradients_of_replicas_are_summed_whoever_used_a_parameter_and_in_buckets_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def parameter(gradient: float | None, size: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
        made = torch.nn.Parameter(torch.zeros(size, 2, dtype=dtype))
        made.grad = None if gradient is None else torch.full_like(made, gradient)
        return made

    here = [
        parameter(1.0, 3),
        parameter(None, 2),
        parameter(None, 5),
        parameter(2.0, 4),
        parameter(3.0, 2, torch.bfloat16),
        parameter(4.0, 1),
    ]
    sent: list[torch.Tensor] = []

    def add_those_of_the_other_rank(tensor: torch.Tensor, how: Any = None, group: Any = None) -> None:
        """It used the second parameter, and none of the others: what it adds to these are zeros."""
        sent.append(tensor.clone())
        if len(sent) == 1:
            tensor[1] = 1
        elif len(sent) == 2:
            tensor[6:10] += 7.0

    monkeypatch.setattr(ranks, "_BUCKET_BYTES", 40)
    monkeypatch.setattr(ranks.dist, "all_reduce", add_those_of_the_other_rank)
    sum_gradients(here, None)
    assert sent[0].tolist() == [1, 0, 0, 1, 1, 1]
    assert [(len(one), one.dtype) for one in sent[1:]] == [(10, torch.float32), (8, torch.float32), (4, torch.bfloat16), (2, torch.float32)]
    assert [None if one.grad is None else set(one.grad.flatten().tolist()) for one in here] == [{1.0}, {7.0}, None, {2.0}, {3.0}, {4.0}]


def test_replicas_give_the_same_bits_each_time_and_go_on_from_a_checkpoint(followers: Followers, tmp_path: Path) -> None:
    model = write_model(tmp_path, CONFIGS["qwen2"]())
    with started(spread(model, 2, followers, of=ReplicatedTrain)) as engine:
        step(engine, samples(VOCABULARY))
        one = copied(engine)
        step(engine, samples(VOCABULARY).take([0]))  # The other rank has no sample of its own.
        two = copied(engine)
        engine.save(str(tmp_path / "saved"))
    with started(spread(model, 2, followers, of=ReplicatedTrain)) as engine:
        step(engine, samples(VOCABULARY))
        assert distance(copied(engine), one) == 0
        engine.load(str(tmp_path / "saved"))
        assert distance(copied(engine), two) == 0


def test_an_option_that_is_none_is_named(model: Model, followers: Followers) -> None:
    engine = Mirrored(FsdpTrain, model, EngineSettings(options={"compute_dtype": "fp8"}), followers)
    with pytest.raises(EngineError, match="compute_dtype is no dtype of torch: 'fp8'"):
        engine.start()
    engine.stop()


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), max_size=20), st.integers(1, 5))
def test_shares_are_a_partition_that_no_rank_dominates(rows: list[tuple[int, int]], count: int) -> None:
    sizes, groups = [size for size, _ in rows], [group for _, group in rows]
    found = shares(sizes, groups, count)
    assert sorted(row for share in found for row in share) == list(range(len(rows)))
    loads = [sum(sizes[row] for row in share) for share in found]
    # What is given out last was given to whoever had least, and no piece is larger than an even share or one sample.
    assert max(loads) <= min(loads) + max([sum(sizes) / count, *sizes], default=0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), max_size=20), st.integers(1, 5))
def test_shares_of_whole_groups_divide_none(rows: list[tuple[int, int]], count: int) -> None:
    groups = [group for _, group in rows]
    found = shares([size for size, _ in rows], groups, count, is_whole=True)
    assert sorted(row for share in found for row in share) == list(range(len(rows)))
    assert all(
        len({groups[row] for row in share} & {groups[row] for row in other}) == 0
        for share in found
        for other in found
        if share is not other
    )


def test_two_ranks_train_on_pairs_as_the_embedded_trainer_does(model: Model, followers: Followers) -> None:
    for num_prompts in (1, 3):
        batch = samples(VOCABULARY, num_prompts=num_prompts, n=2)
        batch = batch.with_columns(chosen=np.tile(np.array([1.0, 0.0]), num_prompts), reference_logprobs=batch.ragged("logprobs"))
        answers = []
        for engine in (EmbeddedTrain(model, EngineSettings()), Mirrored(FsdpTrain, model, EngineSettings(), followers)):
            with started(engine):
                sums = engine.accumulate(batch, DPO)
                engine.apply(LINEAR, float(num_prompts))
                answers.append((sums.metrics["loss"], copied(engine)))
        assert answers[0][0] == pytest.approx(answers[1][0], rel=1e-5)
        assert distance(answers[0][1], answers[1][1]) < 1e-5


def spread(model: Model, num_ranks: int, followers: Followers, *, of: type[RankedTrain] = FsdpTrain) -> TrainEngine:
    return of(model, EngineSettings()) if num_ranks == 1 else Mirrored(of, model, EngineSettings(), followers)


def step(engine: TrainEngine, batch, recipe: Optimizer = RECIPE) -> None:  # type: ignore[no-untyped-def]
    engine.accumulate(batch, PPO)
    engine.apply(recipe, 3.0)


def of_two(batch):  # type: ignore[no-untyped-def]
    from m2flow.samples import group_keys

    return shares(batch.ragged("tokens").lengths.tolist(), group_keys(batch.ids).tolist(), 2)


def test_ranks_are_forked_from_one_process_and_have_todays_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for day in ("monday", "tuesday"):
        monkeypatch.setenv("M2FLOW_TEST_DAY", day)
        monkeypatch.chdir(tmp_path)
        ranks = Followers(2)

        def write(model: Model, settings: EngineSettings, day: str = day) -> None:
            (tmp_path / f"{day} {settings.rank}").write_text(f"{os.getppid()} {os.environ['M2FLOW_TEST_DAY']} {os.getcwd()}")

        ranks.tell(0, "make", write, Model("fake"), EngineSettings())
        assert ranks.wait() == ["", ""]
        ranks.close()
        found += [(tmp_path / f"{day} {rank}").read_text().split() for rank in (1, 2)]
    assert [(day, place) for _, day, place in found] == [(day, str(tmp_path)) for day in ("monday", "monday", "tuesday", "tuesday")]
    (parent,) = {int(parent) for parent, _, _ in found}
    assert parent != os.getpid()
