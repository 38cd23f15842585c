"""The trainer `fsdp` on stages: the suites of train engines on two of them, and the embedded trainer's numbers on up to four ranks."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any, ClassVar

import pytest
import torch
import transformers
from adapted_trainers import (
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer,
    check_references_compute_from_the_policys_weights,
    check_what_was_copied_of_a_policy_is_in_a_checkpoint,
)
from faulty import Fault, check_each_fault_is_an_error_on_all_and_all_go_on
from followed import followed
from safetensors.numpy import load_file
from sent_weights import check_what_ranks_send_arrives_exactly
from tiny_models import DENSE, VOCABULARY, dense_config, random_model, write_model
from trainer_layouts import (
    STEP,
    LayoutHeadSuite,
    LayoutSuite,
    apart,
    check_a_loss_that_raises,
    check_each_goes_on_from_the_one_before,
    check_it_goes_on_alone,
    check_numbers,
    check_parts_are_written_behind,
    train,
)
from transformers import PreTrainedModel

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed import check_fsdp
from m2flow.engines.distributed.fsdp import FsdpTrain, PipelinedTrain
from m2flow.engines.distributed.guard import Guard
from m2flow.engines.distributed.pipeline import Line
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.models.model_export import export_model
from m2flow.engines.registry import engine_named
from m2flow.errors import EngineError, InternalError
from m2flow.planner.model_shapes import ModelShape
from m2flow.planner.pools import legal_layouts, offered, thread_layouts
from m2flow.recipe import SGD, AdamW, Dtype, Lora, Model, Muon, Optimizer, WeightGroup
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import PPO, copied, distance, samples, started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A head that is the embeddings, on the other stage; three layers, which two stages do not divide."""
    return write_model(tmp_path_factory.mktemp("qwen2"), dense_config("qwen2"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("deep"), dense_config("qwen2", 5))


def staged(model: Model, followers: Followers, **options: Any) -> TrainEngine:
    return Mirrored(FsdpTrain, model, EngineSettings(options={"pp": 2, **options}), followers)


class TestStages(LayoutSuite):
    options: ClassVar = {"pp": 2}


@pytest.mark.slow
class TestShardedStages(TestStages):
    """Each stage is sharded over two ranks."""

    others = "three"


@pytest.mark.slow
class TestChunks(LayoutSuite):
    """Each stage has two chunks of a layer or two, and passes go round twice."""

    options: ClassVar = {"pp": 2, "vpp": 2}

    @pytest.fixture(autouse=True)
    def _take_five_layers(self, _take: None, deep: Model) -> None:
        self.model = deep


@pytest.mark.slow
class TestWithoutBubble(TestStages):
    options: ClassVar = {"pp": 2, "schedule": "zero-bubble"}


class TestHeadsOnStages(LayoutHeadSuite):
    options: ClassVar = {"pp": 2}


@pytest.mark.parametrize(
    ("name", "num_layers", "options"),
    [
        pytest.param("qwen2", 3, {"pp": 2}, marks=pytest.mark.core),
        ("llama", 3, {"pp": 2, "micro_batches": 5, "head_logits": 96}),
        ("qwen3", 3, {"pp": 2, "micro_batches": 1}),
        ("llama", 7, {"pp": 2, "vpp": 3, "micro_batches": 4}),
        pytest.param("qwen2", 3, {"pp": 2, "schedule": "zero-bubble", "micro_batches": 5}, marks=pytest.mark.core),
        pytest.param("llama", 5, {"pp": 2, "vpp": 2, "schedule": "zero-bubble", "recompute": True}, marks=pytest.mark.core),
    ],
    ids=str,
)
def test_numbers_on_two_stages_are_those_of_the_embedded_trainer(
    name: str, num_layers: int, options: dict[str, Any], followers: Followers, tmp_path: Path
) -> None:
    check_numbers(write_model(tmp_path, dense_config(name, num_layers)), options, followers)


_SHARDED: list[tuple[str, int, dict[str, Any]]] = [("qwen2", 3, {"pp": 2})]
_OTHERS: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 3, {"pp": 2, "micro_batches": 3, "reshard_after_forward": False}),
    ("qwen2", 2, {"pp": 2, "tp": 2}),
    ("qwen3", 5, {"pp": 4, "micro_batches": 2}),
    ("qwen2", 4, {"pp": 4, "micro_batches": 6}),
    ("qwen2", 5, {"pp": 2, "vpp": 2}),
    ("qwen2", 4, {"pp": 2, "vpp": 2, "tp": 2, "reshard_after_forward": False}),
    ("qwen3", 9, {"pp": 4, "vpp": 2, "micro_batches": 8}),
    ("qwen3", 9, {"pp": 4, "vpp": 2, "micro_batches": 8, "schedule": "zero-bubble"}),
    ("llama", 4, {"pp": 4, "micro_batches": 6, "schedule": "zero-bubble"}),
    ("qwen2", 4, {"pp": 2, "vpp": 2, "schedule": "zero-bubble", "reshard_after_forward": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [_SHARDED, pytest.param(_OTHERS, marks=pytest.mark.long)], ids=["sharded", "others"])
def test_numbers_on_four_ranks_are_those_of_the_embedded_trainer(layouts: list[tuple[str, int, dict[str, Any]]], tmp_path: Path) -> None:
    """Stages that are sharded over ranks, or split over them; more stages than passes, and fewer."""
    with followed(3) as followers:
        for i, (name, num_layers, options) in enumerate(layouts):
            model = write_model(tmp_path / f"{i}", dense_config(name, num_layers))
            check_numbers(model, options, followers)
            for is_spread in (False, True):
                check_it_goes_on_alone(model, {**options, "spread_checkpoints": is_spread}, followers, tmp_path / f"{i} {is_spread}")
            check_a_loss_that_raises(model, options, followers, said="rank [123] of this trainer: ")


@pytest.mark.slow
def test_numbers_without_a_bubble_on_sharded_stages_are_those_of_the_embedded_trainer(model: Model) -> None:
    """Gradients of weights are then summed over the ranks of a stage by the engine, those of norms and biases by FSDP2."""
    with followed(3) as followers:
        check_numbers(model, {"pp": 2, "schedule": "zero-bubble"}, followers)


@pytest.mark.parametrize("options", [{"compute_dtype": "bfloat16"}, {"cpu_offload": True}], ids=str)
def test_gradients_that_are_put_off_are_those_that_are_not(options: dict[str, Any], model: Model, followers: Followers) -> None:
    """Of each type of passes and wherever weights are: the same sums in the same order."""
    batch, found = samples(VOCABULARY), []
    for schedule in ("1f1b", "zero-bubble"):
        with started(staged(model, followers, schedule=schedule, **options)) as engine:
            train(engine, batch)
            train(engine, batch)
            found.append(copied(engine))
    assert apart(*found) < 1e-6


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_layout_gives_the_same_bits_each_time(deterministic: bool, model: Model, followers: Followers) -> None:
    found = []
    for _ in range(2):
        settings = EngineSettings(deterministic=deterministic, options={"pp": 2, "micro_batches": 3})
        with started(Mirrored(FsdpTrain, model, settings, followers)) as engine:
            train(engine, samples(VOCABULARY))
            found.append(copied(engine))
    assert distance(*found) == 0


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_weights_are_those_of_the_checkpoint_that_was_loaded(name: str, followers: Followers, tmp_path: Path) -> None:
    drawn = write_model(tmp_path, dense_config(name))
    load_model(drawn, device="cpu", attention="eager").save_pretrained(tmp_path)
    with started(staged(replace(drawn, init="pretrained"), followers)) as engine:
        found = copied(engine)
    expected = load_file(tmp_path / "model.safetensors")
    assert list(found) == [key for key, _ in load_model(drawn, device="cpu", attention="eager").named_parameters()]
    assert ("lm_head.weight" in found) == (name == "llama")
    assert distance(found, expected) == 0


GROUPED = AdamW(lr=1e-3, eps=1e-3, groups=(WeightGroup("*embed_tokens*", lr_scale=0.5), WeightGroup("model.norm*", weight_decay=0.1)))
"""Each of its groups is of one stage alone."""


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "options"), [(2, {"pp": 2}), (4, {"pp": 2}), (4, {"pp": 2, "tp": 2})], ids=str)
def test_weights_of_stages_arrive_in_a_rollout_engine_as_the_trainer_exports_them(
    num_ranks: int, options: dict[str, Any], model: Model, tmp_path: Path
) -> None:
    with followed(num_ranks - 1) as others:
        engine = Mirrored(FsdpTrain, model, EngineSettings(options=options), others)
        check_what_ranks_send_arrives_exactly(model, engine, samples(VOCABULARY), train, tmp_path)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(STEP, marks=pytest.mark.core), SGD(0.1, momentum=0.9), Muon(0.1), GROUPED],
    ids=["adamw", "sgd", "muon", "groups"],
)
def test_a_checkpoint_goes_on_at_any_layout(recipe: Optimizer, model: Model, followers: Followers, tmp_path: Path) -> None:
    spread = Mirrored(FsdpTrain, model, EngineSettings(), followers)
    others = [staged(model, followers), EmbeddedTrain(model, EngineSettings()), staged(model, followers), spread]
    check_each_goes_on_from_the_one_before(recipe, model, others, tmp_path)


def test_a_checkpoint_goes_on_with_any_number_of_chunks(deep: Model, followers: Followers, tmp_path: Path) -> None:
    parts = staged(deep, followers, vpp=2, spread_checkpoints=True)
    others = [staged(deep, followers, vpp=2), staged(deep, followers), parts, EmbeddedTrain(deep, EngineSettings())]
    check_each_goes_on_from_the_one_before(STEP, deep, others, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_stages_are_written_while_training_goes_on(dtype: Dtype, model: Model, followers: Followers, tmp_path: Path) -> None:
    with started(staged(replace(model, dtype=dtype), followers, spread_checkpoints=True)) as engine:
        train(engine, samples(VOCABULARY))
        check_parts_are_written_behind(engine, samples(VOCABULARY), tmp_path)


def test_masters_and_moments_of_all_stages_are_in_a_checkpoint(model: Model, followers: Followers, tmp_path: Path) -> None:
    half = replace(model, dtype="bfloat16")
    with started(staged(half, followers)) as engine:
        train(engine, samples(VOCABULARY))
        engine.save(str(tmp_path / "0"))
    with started(staged(half, followers)) as engine:
        engine.load(str(tmp_path / "0"))
        engine.save(str(tmp_path / "1"))
    with started(EmbeddedTrain(half, EngineSettings())) as engine:
        engine.load(str(tmp_path / "1"))
        engine.save(str(tmp_path / "2"))
    first, *others = (torch.load(tmp_path / str(turn) / "m2flow_state.pt", weights_only=True) for turn in range(3))
    for other in others:
        assert len(first["masters"]) == len(other["masters"])
        assert all(map(torch.equal, first["masters"], other["masters"]))
        states, found = (one["optimizers"][0]["state"]["state"] for one in (first, other))
        assert states.keys() == found.keys() == set(range(len(first["masters"])))
        assert all(torch.equal(held, found[i][key]) for i, of_one in states.items() for key, held in of_one.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_that_each_stage_writes_its_part_of_goes_on_anywhere_and_is_exported_whole(
    dtype: Dtype, model: Model, followers: Followers, tmp_path: Path
) -> None:
    batch, there, typed = samples(VOCABULARY), tmp_path / "there", replace(model, dtype=dtype)
    with started(staged(typed, followers, spread_checkpoints=True)) as engine:
        train(engine, batch)
        engine.save(str(there))
        saved = {name: tensor.clone() for name, tensor in engine.weights()}
        train(engine, batch)
        trained = {name: tensor.float().numpy() for name, tensor in engine.weights()}
    assert not list(there.glob("*.safetensors"))
    assert len(list((there / "m2flow_parts").glob("*.distcp"))) == 2
    for other in (
        EmbeddedTrain(typed, EngineSettings()),
        staged(typed, followers),
        Mirrored(FsdpTrain, typed, EngineSettings(), followers),
    ):
        with started(other):
            other.load(str(there))
            assert all(torch.equal(saved[name], tensor) for name, tensor in other.weights())
            train(other, batch)
            assert apart({name: tensor.float().numpy() for name, tensor in other.weights()}, trained) < (
                1e-6 if dtype == "float32" else 1e-3
            )
    exported = export_model(there, tmp_path / "out")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


def test_the_whole_model_is_in_the_memory_of_the_host_before_it_is_spread(model: Model) -> None:
    """Where a device could hold a stage alone."""
    engine = FsdpTrain(model, EngineSettings(device="cuda:0", options={"pp": 2}))
    EmbeddedTrain.start(engine)
    assert {str(held.device) for held in engine._model.parameters()} == {"cpu"}


def test_a_loss_that_raises_on_the_last_stage_is_an_error_on_all_and_all_go_on(model: Model, followers: Followers) -> None:
    check_a_loss_that_raises(model, {"pp": 2}, followers, said="rank 1 of this trainer: ")


@pytest.mark.core
def test_a_stage_that_fails_is_an_error_on_all_and_all_go_on(model: Model, followers: Followers) -> None:
    """Where a stage is one rank: the others then go on with zeros."""
    batch = samples(VOCABULARY)
    with started(staged(model, followers)) as engine:
        own = engine._own  # type: ignore[attr-defined]
        assert isinstance(own, PipelinedTrain)
        layer, passes = own._model.base_model.layers[1], []

        def fail_once(*_: object) -> None:
            passes.append(0)
            if len(passes) == 1:
                raise IndexError("no such row")

        hook = layer.register_forward_pre_hook(fail_once)
        with pytest.raises(InternalError, match=r"a pass through the stages: .*no such row"):
            engine.accumulate(batch, PPO)
        assert len(passes) == 2
        hook.remove()
        engine.discard()
        train(engine, batch)
        found = copied(engine)
    with started(staged(model, followers)) as engine:
        train(engine, batch)
        assert distance(copied(engine), found) == 0


_FAULTS = [
    Fault(1, "model.layers.0.mlp", said="model.layers.0"),
    Fault(3, "model.layers.2.self_attn", "backward", said="model.layers.2"),
    Fault(2, "lm_head", said="the head"),
    Fault(2, "model.layers.2.mlp", error=MemoryError, said="model.layers.2"),
    Fault(1, "model.layers.1.self_attn.o_proj", "shape", said="model.layers.1"),
]


def test_a_part_that_gives_hidden_states_of_another_shape_gives_zeros_and_is_an_error_by_name() -> None:
    """Another stage would wait for more of them, or take less for all."""
    guard, part = Guard(3), torch.nn.Linear(4, 3)
    guard.over(part, "layers.7")
    hidden = torch.ones(1, 5, 4, requires_grad=True)
    output = part(hidden)
    assert (output.shape, output.count_nonzero()) == (hidden.shape, 0)
    output.sum().backward()
    assert part.weight.grad is not None
    assert not part.weight.grad.any()
    said = r"rank 3 of this trainer: layers.7, forward pass: a part returned hidden states of shape \[1, 5, 3\], not \[1, 5, 4\]"
    with pytest.raises(EngineError, match=said):
        guard.check()
    guard.check()


def test_no_collective_of_stages_waits_longer_than_the_trainers_own(model: Model, followers: Followers) -> None:
    with started(staged(model, followers)) as engine:
        own = engine._own  # type: ignore[attr-defined]
        groups = [own._ranks.group, *own._mesh.get_all_groups()]
        assert {group._get_backend(torch.device("cpu")).options._timeout for group in groups} == {timedelta(minutes=10)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "faults"),
    [({}, _FAULTS), ({"schedule": "zero-bubble"}, _FAULTS[:2]), ({"recompute": True}, _FAULTS)],
    ids=["1f1b", "zero-bubble", "recompute"],
)
def test_a_part_of_a_sharded_stage_that_fails_is_an_error_on_all_and_all_go_on(
    options: dict[str, Any], faults: Sequence[Fault], model: Model
) -> None:
    """The ranks of a stage wait for each other in every layer, the stages for each other between them."""
    with followed(3) as followers:
        check_each_fault_is_an_error_on_all_and_all_go_on(model, {"pp": 2, **options}, followers, faults)


@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_critic_on_stages_takes_the_policys_weights_and_keeps_its_head(
    is_mixture: bool, model: Model, followers: Followers, tmp_path: Path
) -> None:
    if is_mixture:
        routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        model = write_model(tmp_path, transformers.Qwen3MoeConfig(**DENSE, **routed, head_dim=16))
    critic_model = random_model(Path(model.path), "value")
    policy, critic = staged(model, followers), staged(critic_model, followers)
    with started(policy), started(critic):
        train(policy, samples(VOCABULARY))
        before = copied(critic)
        critic.copy_from(policy)
        taken, given = copied(critic), copied(policy)
    alike = taken.keys() & given.keys()
    assert set(taken) - alike == {name for name in before if name.startswith("score.")}
    assert distance({name: taken[name] for name in alike}, {name: given[name] for name in alike}) == 0
    assert all((taken[name] == before[name]).all() for name in taken.keys() - alike)


class Alone(Line[int]):
    """A stage without neighbours, which writes down what it does."""

    def __init__(self, stage: int, count: int, chunks: int = 1) -> None:
        self.stage, self.count, self.chunks, self.failure = stage, count, chunks, None
        self._down, self._up, self._device, self._spreads = "down", "up", "cpu", True
        self._down_again, self._up_again = "down again", "up again"
        self._sent = {}
        self.done: list[str] = []

    def _receive(self, group: Any, stage: int, like: torch.Tensor) -> torch.Tensor:
        self.done.append(f"{group} from {stage}")
        return torch.ones_like(like, device="cpu")

    def _send(self, group: Any, stage: int, tensor: torch.Tensor) -> None:
        self.done.append(f"{group} to {stage}")

    def most_in_flight(self, passes: int) -> int:
        in_flight: list[int] = []

        def compute(one: int, hidden: torch.Tensor | None) -> torch.Tensor:
            in_flight.append(one)
            sizes.append(len(in_flight))
            output = torch.ones(1, requires_grad=True) if hidden is None else hidden * 2
            output.register_hook(lambda _: in_flight.remove(one))
            return output.sum() if self.is_last else output

        sizes: list[int] = []
        self.run(range(passes), compute, lambda one: torch.empty(1, device="meta"), trains=True)
        assert not in_flight
        return max(sizes)


@pytest.mark.parametrize(("stage", "passes", "most"), [(0, 8, 4), (1, 8, 3), (2, 8, 2), (3, 8, 1), (0, 2, 2), (3, 1, 1)])
def test_a_stage_has_as_many_passes_in_flight_as_there_are_stages_from_it_on(stage: int, passes: int, most: int) -> None:
    line = Alone(stage, 4)
    assert line.most_in_flight(passes) == most
    down, up = (["down from", "up to"], ["down to", "up from"])
    wanted = {f"{words} {stage - 1}": passes for words in down if stage} | {f"{words} {stage + 1}": passes for words in up if stage < 3}
    assert {words: line.done.count(words) for words in line.done} == wanted


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_puts_the_gradients_of_weights_off_by_as_many_passes_as_there_are_stages_before_it(stage: int) -> None:
    line, done = Alone(stage, 4), list[str]()
    gone, weighed = iter("abcdef"), iter("ABCDEF")

    def left() -> Callable[[], None]:
        done.append(next(gone))
        return lambda: done.append(next(weighed))

    def compute(one: int, hidden: torch.Tensor | None) -> torch.Tensor:
        return torch.ones(1, requires_grad=True) if hidden is None else (hidden * 2).sum() if line.is_last else hidden * 2

    line.run(range(6), compute, lambda one: torch.empty(1, device="meta"), trains=True, left=left)
    assert "".join(done) == ["aAbBcCdDeEfF", "abAcBdCeDfEF", "abcAdBeCfDEF", "abcdAeBfCDEF"][stage]


class Linked(Line[int]):
    """A stage beside others in threads, whose tensors go through queues: by group and direction in the order in which they were sent."""

    def __init__(self, stage: int, count: int, chunks: int, ways: Mapping[tuple[str, int, int], Queue[torch.Tensor]]) -> None:
        self.stage, self.count, self.chunks, self.failure = stage, count, chunks, None
        self._down, self._up, self._down_again, self._up_again = "down", "up", "down again", "up again"
        self._device, self._spreads, self._sent, self._ways = "cpu", True, {}, ways
        self.most_in_flight = 0
        self._in_flight: list[tuple[int, int]] = []

    def _receive(self, group: Any, stage: int, like: torch.Tensor) -> torch.Tensor:
        return self._ways[group, stage, self.stage].get(timeout=60)

    def _send(self, group: Any, stage: int, tensor: torch.Tensor) -> None:
        self._ways[group, self.stage, stage].put(tensor.clone())

    def train(self, passes: int, *, trains: bool) -> int:
        """Each chunk doubles what comes in; returns how often one computed."""
        total, num_computed = self.count * self.chunks, 0

        def compute(one: int, hidden: torch.Tensor | None) -> torch.Tensor:
            nonlocal num_computed
            num_computed += 1
            place = self.chunk * self.count + self.stage
            assert (hidden is None) == (place == 0)
            assert hidden is None or hidden.item() == one * 2.0**place
            output = torch.full((1,), float(one), requires_grad=trains) * 2 if hidden is None else hidden * 2
            if trains:
                which = one, self.chunk
                self._in_flight.append(which)
                self.most_in_flight = max(self.most_in_flight, len(self._in_flight))

                def back(gradient: torch.Tensor) -> None:
                    self._in_flight.remove(which)
                    assert gradient.item() == one * 2.0 ** (total - 1 - place)

                output.register_hook(back)
            return (output * one).sum() if self.is_last else output

        self.run(range(1, passes + 1), compute, lambda one: torch.empty(1, device="meta"), trains=trains)
        assert not self._in_flight
        return num_computed


@pytest.mark.parametrize(
    ("count", "chunks", "passes", "trains"),
    [(2, 2, 2, True), (2, 3, 8, True), (3, 2, 6, True), (4, 3, 8, True), (4, 1, 6, True), (4, 3, 5, False), (2, 2, 1, False)],
)
def test_passes_go_round_the_stages_once_for_each_chunk(count: int, chunks: int, passes: int, trains: bool) -> None:
    ways: dict[tuple[str, int, int], Queue[torch.Tensor]] = defaultdict(Queue)
    lines = [Linked(stage, count, chunks, ways) for stage in range(count)]
    with ThreadPoolExecutor(count) as threads:
        computed = list(threads.map(lambda line: line.train(passes, trains=trains), lines))
    assert computed == [passes * chunks] * count
    assert all(way.empty() for way in ways.values())
    # Interleaved, a stage begins to go back when the first pass has gone all the way round.
    first = [count - 1 - stage if chunks == 1 else 2 * (count - 1 - stage) + (chunks - 1) * count for stage in range(count)]
    assert [line.most_in_flight for line in lines] == [min(one + 1, passes * chunks) if trains else 0 for one in first]


@pytest.mark.parametrize(
    ("name", "options", "num_ranks", "said"),
    [
        ("qwen2", {"pp": 3}, 4, "pp is 3, which does not divide 4 ranks"),
        ("qwen2", {"pp": 2, "tp": 2}, 6, r"tp \* pp is 4, which does not divide 6 ranks"),
        ("qwen2", {"pp": 4}, 4, "pp is 4, and the model has 3 layers"),
        ("qwen2", {"pp": "2"}, 4, "the option pp of the train engine 'fsdp' is '2'"),
        ("qwen2", {"pp": 0}, 4, "the option pp of the train engine 'fsdp' is 0"),
        ("qwen2", {"pp": 2, "micro_batches": 0}, 4, "the option micro_batches of the train engine 'fsdp' is 0"),
        ("qwen2", {"pp": 2, "vpp": 2}, 4, r"pp \* vpp is 4, and the model has 3 layers"),
        ("qwen2", {"pp": 2, "vpp": "2"}, 4, "the option vpp of the train engine 'fsdp' is '2'"),
        ("qwen2", {"vpp": 2}, 4, "the option vpp of the train engine 'fsdp' is 2, without pp"),
        ("qwen2", {"schedule": "zero-bubble"}, 4, "the option schedule of the train engine 'fsdp' is 'zero-bubble', without pp"),
        ("qwen2", {"pp": 2, "schedule": "zb"}, 4, "the option schedule of the train engine 'fsdp' is 'zb'"),
        ("deep", {"pp": 2, "vpp": 2, "micro_batches": 3}, 4, "micro_batches is 3, which is no multiple of pp, 2, as vpp needs"),
        ("gpt2", {"pp": 2}, 4, "the layers of a 'gpt2' model can't be spread over stages here; those of llama, qwen2, qwen3, .* can"),
        ("window", {"pp": 2}, 4, "layers of sliding_attention"),
    ],
)
def test_what_can_t_be_spread_over_stages_is_refused_by_name_before_a_run(
    name: str, options: dict[str, Any], num_ranks: int, said: str, tmp_path: Path
) -> None:
    made = dense_config("qwen2", 4 if name == "deep" else 3)
    if name == "gpt2":
        made = transformers.GPT2Config()
    elif name == "window":
        made = transformers.Qwen2Config(**DENSE, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    made.save_pretrained(tmp_path)
    model = Model(str(tmp_path), init="random")
    assert engine_named("fsdp", "train").refuses.endswith(check_fsdp.__name__)
    with pytest.raises(EngineError, match=said):
        check_fsdp(model, options, num_ranks)
    check_fsdp(Model("nowhere"), {}, 4)


def test_the_planner_knows_stages_on_gpus_and_never_takes_them_on_the_cores_of_a_host(model: Model) -> None:
    offers, shape = offered("fsdp", "train"), ModelShape.from_config(model.path)
    found = {layout.pp for layout in legal_layouts(shape, offers, "train", 8, 8)}
    assert 2 in found
    assert max(found) <= shape.num_layers
    for num_ranks in (None, 2):
        assert {layout.pp for layout in thread_layouts("train", 4, 4, offers, num_ranks)} == {1}


needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
ADAPTERS = Lora(rank=4, alpha=8)


@needs_peft
@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        pytest.param({"micro_batches": 3}, ADAPTERS, marks=pytest.mark.slow),
        ({"vpp": 2, "schedule": "zero-bubble"}, ADAPTERS),
        pytest.param({"schedule": "zero-bubble"}, Lora(rank=4, alpha=8, targets=("q_proj", "lm_head")), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_on_stages_are_those_of_the_embedded_trainer(
    options: dict[str, Any], recipe: Lora, followers: Followers, tmp_path: Path
) -> None:
    adapted = replace(write_model(tmp_path / "model", dense_config("llama", 4)), lora=recipe)
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(adapted, lambda: staged(adapted, followers, **options), tmp_path)


@needs_peft
@pytest.mark.parametrize("options", [{}, pytest.param({"vpp": 2, "schedule": "zero-bubble"}, marks=pytest.mark.slow)], ids=str)
def test_references_compute_from_the_weights_of_an_adapted_policy_on_stages(
    options: dict[str, Any], deep: Model, followers: Followers, tmp_path: Path
) -> None:
    adapted = replace(deep, lora=ADAPTERS)
    check_references_compute_from_the_policys_weights(adapted, staged(adapted, followers, **options), tmp_path)
    make = functools.partial(staged, adapted, followers, **options)
    check_what_was_copied_of_a_policy_is_in_a_checkpoint(adapted, make, tmp_path / "copied", make())


@needs_peft
@pytest.mark.slow
def test_adapters_on_sharded_stages_are_those_of_the_embedded_trainer(deep: Model, tmp_path: Path) -> None:
    adapted = replace(deep, lora=ADAPTERS)
    with followed(3) as three:
        for i, options in enumerate(({}, {"vpp": 2, "schedule": "zero-bubble", "spread_checkpoints": True})):
            made = functools.partial(staged, adapted, three, **options)
            check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(adapted, made, tmp_path / f"{i}")


@needs_peft
def test_numbers_of_adapters_on_stages_are_those_of_the_embedded_trainer(model: Model, followers: Followers) -> None:
    check_numbers(replace(model, lora=ADAPTERS), {"pp": 2, "recompute": True}, followers)


@needs_peft
def test_no_gradient_of_a_frozen_weight_is_put_off(model: Model, followers: Followers) -> None:
    with started(staged(replace(model, lora=ADAPTERS), followers, schedule="zero-bubble")) as engine:
        engine.accumulate(samples(VOCABULARY), PPO)
        own = engine._own  # type: ignore[attr-defined]
        assert {one.requires_grad for one in own._model.parameters() if one.grad is not None} == {True}
        engine.apply(STEP, 1.0)
        assert all(one.grad is None for one in own._model.parameters())


@needs_peft
def test_a_stage_without_adapters_is_refused_by_name(followers: Followers, tmp_path: Path) -> None:
    adapted = replace(write_model(tmp_path, dense_config("llama")), lora=Lora(targets=("lm_head",)))
    engine = staged(adapted, followers)
    with pytest.raises(EngineError, match=r"no adapter .* stage 1 of 2"):
        engine.start()
    engine.stop()  # Its ranks have met.


@pytest.mark.parametrize("lora", [None, pytest.param(ADAPTERS, marks=needs_peft)], ids=["weights", "adapters"])
def test_a_checkpoint_of_stages_is_written_in_the_background_and_who_is_killed_leaves_the_one_before(
    lora: Lora | None, model: Model, followers: Followers, tmp_path: Path
) -> None:
    batch, source = samples(VOCABULARY), replace(model, lora=lora)
    with started(staged(source, followers)) as engine:
        engine.save(str(tmp_path / "there"))
        first = copied(engine)
        train(engine, batch)
        held, saved = engine.held_checkpoint(str(tmp_path / "there")), copied(engine)
        assert held is not None
        train(engine, batch)
        for number in range(3):  # Before any file is there, between files, before the manifest is written.
            assert killed_at(number, held.write) == -signal.SIGKILL
            engine.load(str(tmp_path / "there"))
            assert distance(copied(engine), first) == 0
        held.write()
        engine.load(str(tmp_path / "there"))
        assert distance(copied(engine), saved) == 0
    with started(EmbeddedTrain(source, EngineSettings())) as alone:
        alone.load(str(tmp_path / "there"))
        assert distance(copied(alone), saved) == 0


def killed_at(number: int, write: Callable[[], None]) -> int:
    """Write in a process that ends as if killed at one of these calls; how it ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # There are threads, none of which it needs.
        child = os.fork()
    if not child:
        module, name = [(PreTrainedModel, "save_pretrained"), (torch, "save"), (json, "dumps")][number]
        setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            write()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
