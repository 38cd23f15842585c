"""The trainer `fsdp` with sequences split over ranks: the suites of train engines, and the embedded trainer's numbers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from adapted_trainers import check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer
from faulty import Fault, check_a_gradient_that_lacks_a_pass_is_not_applied, check_each_fault_is_an_error_on_all_and_all_go_on
from tiny_models import SMALL, VOCABULARY, dense_config, mixture_config, write_model
from trainer_layouts import (
    STEP,
    LayoutHeadSuite,
    LayoutSuite,
    check_a_loss_that_raises,
    check_each_goes_on_from_the_one_before,
    check_it_goes_on_alone,
    check_numbers,
    check_pieces,
    train,
)

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.distributed import check_fsdp
from m2flow.engines.distributed.fsdp import FsdpTrain
from m2flow.engines.distributed.sequence_parallel import SequenceParallel, part_of
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models import packing
from m2flow.engines.models.model_probe import Reach
from m2flow.errors import EngineError
from m2flow.micro.protocol.cost_terms import Layout
from m2flow.planner.cost_model import train_cost, train_footprint
from m2flow.planner.model_shapes import ModelShape, shape_named
from m2flow.planner.pools import legal_layouts, offered, pools_of, thread_layouts
from m2flow.recipe import SGD, Balance, Lora, Model, Optimizer
from m2flow.samples import Ragged
from m2flow.spec import ClusterSpec, PoolSpec
from m2flow.testing.mirrored import Followers, Mirrored
from m2flow.testing.train_suite import copied, distance, samples, started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen2"), dense_config("qwen2"))


def made(name: str) -> Any:
    """A config; of `gemma2`, `gpt_oss` and `mistral` with a window that is shorter than the samples."""
    sizes: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "num_hidden_layers": 2}
    kinds: dict[str, Any] = {
        "gemma2": lambda: transformers.Gemma2Config(**sizes, head_dim=8, sliding_window=5),
        "mistral": lambda: transformers.MistralConfig(**sizes, head_dim=8, sliding_window=5),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **sizes,
            head_dim=8,
            sliding_window=5,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    }
    if name in kinds:
        return kinds[name]()
    return mixture_config(name) if name in ("qwen3_moe", "deepseek_v3") else dense_config(name)


def split(model: Model, followers: Followers, **options: Any) -> TrainEngine:
    return Mirrored(FsdpTrain, model, EngineSettings(options={"cp": 2, **options}), followers)


class TestSplitSequences(LayoutSuite):
    options: ClassVar = {"cp": 2}


@pytest.mark.slow
class TestHeadsOnSplitSequences(LayoutHeadSuite):
    options: ClassVar = {"cp": 2}


@pytest.mark.slow
class TestSplitSequencesAndLayers(LayoutSuite):
    others = "three"
    options: ClassVar = {"cp": 2, "tp": 2}


@pytest.mark.slow
class TestSplitSequencesOfShares(TestSplitSequencesAndLayers):
    options: ClassVar = {"cp": 2}


@pytest.mark.slow
class TestSplitSequencesOnStages(TestSplitSequencesAndLayers):
    options: ClassVar = {"cp": 2, "pp": 2}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("qwen2", {}, marks=pytest.mark.core),
        ("llama", {"share_prompts": False, "head_logits": 96, "reshard_after_forward": False}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"ep": 2}),
        ("mistral", {"cpu_offload": True}),
        pytest.param("gemma2", {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"ep": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_numbers_are_those_of_the_embedded_trainer(name: str, options: dict[str, Any], followers: Followers, tmp_path: Path) -> None:
    """Also with windows, soft caps and sinks, and with latent keys and values of two sizes."""
    check_numbers(write_model(tmp_path, made(name)), {"cp": 2, **options}, followers)


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "shares": ("qwen2", {"cp": 2}),
    "four": ("qwen3_moe", {"cp": 4, "ep": 4}),
    "layers": ("qwen3", {"cp": 2, "tp": 2}),
    "latent": ("deepseek_v3", {"cp": 2, "tp": 2}),
    "experts": ("qwen3_moe", {"cp": 2, "tp": 2, "ep": 2}),
    "stages": ("qwen2", {"cp": 2, "pp": 2, "micro_batches": 3}),
    "without bubble": ("qwen2", {"cp": 2, "pp": 2, "schedule": "zero-bubble"}),
    "mixture on stages": ("qwen3_moe", {"cp": 2, "pp": 2, "ep": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in ("shares", "stages") else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS])
def test_numbers_on_four_ranks_are_those_of_the_embedded_trainer(name: str, three: Followers, tmp_path: Path) -> None:
    kind, options = LAYOUTS[name]
    model = write_model(tmp_path / "model", made(kind))
    check_numbers(model, options, three)
    for is_spread in (False, True):
        check_it_goes_on_alone(model, {**options, "spread_checkpoints": is_spread}, three, tmp_path / f"{is_spread}")
    if "pp" in options:
        check_a_loss_that_raises(model, options, three, said="rank [23] of this trainer: ")


@pytest.mark.parametrize("recipe", [STEP, SGD(0.1, momentum=0.9)], ids=["adamw", "sgd"])
def test_a_checkpoint_goes_on_at_any_layout(recipe: Optimizer, model: Model, followers: Followers, tmp_path: Path) -> None:
    others = [
        split(model, followers),
        EmbeddedTrain(model, EngineSettings()),
        split(model, followers, spread_checkpoints=True),
        split(model, followers, cp=1, pp=2),
        split(model, followers),
        split(model, followers, cp=1, tp=2),
    ]
    check_each_goes_on_from_the_one_before(recipe, model, others, tmp_path)


def check_bits(model: Model, followers: Followers, **options: Any) -> None:
    for deterministic in (False, True):
        found = []
        for _ in range(2):
            settings = EngineSettings(deterministic=deterministic, options={"cp": 2, **options})
            with started(Mirrored(FsdpTrain, model, settings, followers)) as engine:
                train(engine, samples(VOCABULARY))
                found.append(copied(engine))
        assert distance(*found) == 0


def test_passes_in_half_precision_keep_weights_in_float32(model: Model, followers: Followers) -> None:
    found = []
    for engine in (EmbeddedTrain(model, EngineSettings()), split(model, followers, compute_dtype="bfloat16")):
        with started(engine):
            first = copied(engine)
            train(engine, samples(VOCABULARY), SGD(1.0))
            found.append({name: array - first[name] for name, array in copied(engine).items()})
    assert all(array.dtype == np.float32 for array in found[1].values())
    assert 0 < distance(found[1], found[0]) < 0.3


def test_one_layout_gives_the_same_bits_each_time(model: Model, followers: Followers) -> None:
    check_bits(model, followers)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp": 2}, {}, {"pp": 2, "schedule": "zero-bubble"}], ids=str)
def test_one_layout_of_four_ranks_gives_the_same_bits_each_time(options: dict[str, Any], model: Model, three: Followers) -> None:
    check_bits(model, three, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}, {"ep": 4}], ids=str)
def test_each_number_of_a_weight_is_sent_by_one_rank(options: dict[str, Any], three: Followers, tmp_path: Path) -> None:
    model = write_model(tmp_path, mixture_config())
    check_pieces(model, split(model, three, **options))


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
def test_adapters_are_those_of_the_embedded_trainer(model: Model, followers: Followers, tmp_path: Path) -> None:
    adapted = replace(model, lora=Lora(rank=4, alpha=8, targets=("q_proj", "v_proj")))
    check_adapters_are_trained_sent_and_saved_as_by_the_embedded_trainer(adapted, lambda: split(adapted, followers), tmp_path)


# ---- which rows a rank has


def _ragged(rng: np.random.Generator, num: int, longest: int) -> packing.Packed:
    """Samples of unequal lengths, some of which begin alike; the last tokens of each are predicted."""
    begin = rng.integers(0, 9, longest)
    lengths = rng.integers(2, longest + 1, num)
    tokens = [np.where(np.arange(n) < rng.integers(0, n), begin[:n], rng.integers(0, 9, n)) for n in lengths]
    masks = [np.arange(n) >= rng.integers(1, n) for n in lengths]
    return packing.pack(np.arange(num), Ragged.of(tokens, np.int32), Ragged.of(masks, np.bool_))


class _Window(torch.nn.Module):  # type: ignore[misc]
    """Called as a model's attention, with a window of three tokens or none."""

    def __init__(self, *, has_window: bool) -> None:
        super().__init__()
        self.m2flow_reach = Reach("window", 3) if has_window else None


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_ranks_have_together_what_one_has(count: int, has_window: bool) -> None:
    """Rows, predicted tokens, attention and gradients; also of fewer rows than chunks, and of sequences that others begin with."""
    rng, generator = np.random.default_rng(count), torch.Generator().manual_seed(count)
    module = _Window(has_window=has_window)
    for num, longest in ((1, 2), (1, 40), (2, 3), (12, 9), (7, 30)):
        packed = _ragged(rng, num, longest)
        parts = [part_of(packed, rank, count) for rank in range(count)]
        num_each = parts[0].num_rows
        place = _places(packed.num_rows, count, num_each)
        q, k, v = (
            torch.randn(1, heads, packed.num_rows, 4, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
        )
        expected = packing.packed_attention(module, q, k, v, None, packed_layout=packed.layout)[0][0]
        factor = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        wanted = torch.autograd.grad((expected * factor).sum(), (q, k, v))
        filled = [torch.zeros(1, one.shape[1], count * num_each, 4, dtype=torch.float64).index_copy(2, place, one) for one in (q, k, v)]
        outputs = [
            packing.packed_attention(module, own, *filled[1:], None, packed_layout=part.layout)[0][0]
            for own, part in zip(filled[0].split(num_each, 2), parts, strict=True)
        ]
        found = torch.cat(outputs)[place]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad((found * factor).sum(), (q, k, v)), wanted)
        ids, positions = (torch.cat([getattr(part, name)[0] for part in parts])[place] for name in ("input_ids", "position_ids"))
        assert torch.equal(ids, packed.input_ids[0])
        assert torch.equal(positions, packed.position_ids[0])
        assert torch.stack([part.which for part in parts if part.which is not None]).sum(0).eq(1).all()
        for rank, part in enumerate(parts):
            assert part.which is not None
            assert torch.equal(place[packed.predictors[part.which]], part.predictors + rank * num_each)
            assert torch.equal(packed.targets[part.which], part.targets)
            assert part.num_shared == packed.num_shared
            assert part.place is not None
            assert torch.equal(part.place, (place - rank * num_each).where(place // num_each == rank, -1))


def _places(num_rows: int, count: int, num_each: int) -> torch.Tensor:
    """Where each row is among the rows of all ranks: 0 1 2 2 1 0, in halves of `num_each`."""
    order = [chunk for rank in range(count) for chunk in (rank, 2 * count - 1 - rank)]
    half = num_each // 2
    return torch.tensor([order.index(row // half) * half + row % half for row in range(num_rows)])


def test_one_long_sequence_is_as_much_work_for_each_rank() -> None:
    tokens = Ragged.of([np.arange(4097) % 50], np.int32)
    packed = packing.pack(np.zeros(1, np.int64), tokens, Ragged(np.arange(4097) > 0, tokens.offsets))
    for count in (2, 4, 8):
        work = []
        for rank in range(count):
            layout = part_of(packed, rank, count).layout
            assert layout.queries is not None
            queries = layout.queries.buckets
            # Of Q queries, the last of L keys, the first sees L - Q + 1.
            work.append(sum(n * (q * (length - q) + q * (q + 1) / 2) for (n, length), (_, q) in zip(layout.buckets, queries, strict=True)))
        assert max(work) < 1.01 * min(work)
        assert sum(work) == 4096 * 4097 / 2


# ---- parts that fail

_DENSE = [
    Fault(1, "model.layers.0.self_attn.q_proj", said="model.layers.0.self_attn"),
    Fault(0, "model.layers.1.self_attn.o_proj", said="model.layers.1.self_attn"),
    Fault(1, "model.layers.1.self_attn.o_proj", "backward", said="model.layers.1.self_attn"),
    Fault(0, "model.layers.0.self_attn.k_proj", "backward", said="model.layers.0.self_attn"),
    Fault(1, "model.layers.1.post_attention_layernorm", said="model.layers.1"),
    Fault(0, "model.layers.1.mlp.down_proj", error=MemoryError, said="model.layers.1.mlp"),
    Fault(1, "model.layers.1.self_attn.o_proj", "shape", said="model.layers.1.self_attn"),
    Fault(1, "lm_head", said="the head"),
]


def test_a_part_of_a_layer_that_fails_on_one_rank_is_an_error_on_all_and_all_go_on(model: Model, followers: Followers) -> None:
    """Before keys and values are gathered and after that, on the way back too."""
    check_each_fault_is_an_error_on_all_and_all_go_on(model, {"cp": 2}, followers, _DENSE)
    check_each_fault_is_an_error_on_all_and_all_go_on(model, {"cp": 2, "compute_dtype": "bfloat16"}, followers, _DENSE[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "faults"),
    [
        (
            "qwen3_moe",
            {"tp": 2, "ep": 2},
            [
                Fault(3, "model.layers.0.self_attn.q_norm", said="model.layers.0.self_attn"),
                Fault(1, "model.layers.1.self_attn.o_proj", "backward", said="model.layers.1.self_attn"),
                Fault(2, "model.layers.0.mlp.gate", said="model.layers.0"),
                Fault(0, "model.layers.1.mlp.experts.act_fn", "backward", said="model.layers.1.mlp.experts"),
            ],
        ),
        (
            "qwen2",
            {"pp": 2, "schedule": "zero-bubble"},
            [
                Fault(3, "model.layers.2.self_attn.o_proj", "backward", said="model.layers.2.self_attn"),
                Fault(1, "model.layers.0.self_attn.v_proj", said="model.layers.0.self_attn"),
                Fault(0, "model.layers.0.self_attn.o_proj", "backward", said="model.layers.0.self_attn"),
                Fault(2, "lm_head", said="the head"),
                Fault(3, "lm_head", said="the head"),
            ],
        ),
        ("qwen2", {}, [Fault(3, "model.layers.0.self_attn.o_proj", said="model.layers.0.self_attn"), Fault(1, "lm_head", said="the head")]),
    ],
    ids=["experts", "stages", "shares"],
)
def test_a_part_of_four_ranks_that_fails_is_an_error_on_all_and_all_go_on(
    name: str, options: dict[str, Any], faults: list[Fault], three: Followers, tmp_path: Path
) -> None:
    check_each_fault_is_an_error_on_all_and_all_go_on(write_model(tmp_path, made(name)), {"cp": 2, **options}, three, faults)


def test_a_router_that_fails_on_one_rank_is_an_error_on_all_and_all_go_on(followers: Followers, tmp_path: Path) -> None:
    """Ranks know together of the experts that all rows were sent to; one that failed has some rows for none."""
    model = replace(write_model(tmp_path, mixture_config()), routing="rollout", balance=Balance(loss=0.5, z_loss=0.3))
    faults = [
        Fault(0, "model.layers.0.self_attn.o_proj", said="model.layers.0.self_attn"),
        Fault(1, "model.layers.1.mlp.gate", said="model.layers.1"),
        Fault(1, "model.layers.1.self_attn.o_proj", "backward", said="model.layers.1.self_attn"),
    ]
    check_each_fault_is_an_error_on_all_and_all_go_on(model, {"cp": 2}, followers, faults)


def test_a_gradient_that_lacks_a_pass_is_not_applied(model: Model, followers: Followers) -> None:
    fault = Fault(1, "model.layers.1.self_attn.v_proj", "backward", said="model.layers.1.self_attn")
    check_a_gradient_that_lacks_a_pass_is_not_applied(model, {"cp": 2}, followers, fault)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "num_ranks", "said"),
    [
        ({"cp": 2}, 3, "cp is 2, which does not divide 3 ranks"),
        ({"cp": "2"}, 4, "the option cp of the train engine 'fsdp' is '2'"),
        ({"cp": 0}, 4, "the option cp of the train engine 'fsdp' is 0"),
        ({"tp": 2, "cp": 2, "pp": 2}, 12, r"tp \* cp \* pp is 8, which does not divide 12 ranks"),
        ({"cp": 2, "ep": 3}, 6, "ep is 3, which does not divide the model's 8 experts"),
    ],
)
def test_what_can_t_be_split_is_refused_by_name_before_a_run(options: dict[str, Any], num_ranks: int, said: str, tmp_path: Path) -> None:
    mixture_config().save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=said):
        check_fsdp(Model(str(tmp_path), init="random"), options, num_ranks)


def test_sinks_are_refused_where_ranks_share_out_heads() -> None:
    """As DeepSpeed's do, each of which would have the sinks of all."""
    sequence, heads = SequenceParallel.__new__(SequenceParallel), torch.zeros(1, 2, 2, 4)
    with pytest.raises(EngineError, match="attention sinks are not shared out over ranks"):
        sequence._around(torch.nn.Module(), heads, heads, heads, s_aux=torch.zeros(2))


def test_the_planner_knows_split_sequences_on_gpus_and_never_takes_them_on_the_cores_of_a_host(model: Model) -> None:
    """Also over more ranks than there are heads of keys and values, which are gathered whole."""
    offers, shape = offered("fsdp", "train"), ModelShape.from_config(model.path)
    assert shape.num_kv_heads == 2
    layouts = legal_layouts(shape, offers, "train", 8, 8)
    assert {layout.sp for layout in layouts} == {1, 2, 4, 8}
    assert {layout.sp for layout in layouts if layout.tp == 2} == {1, 2, 4}
    assert {layout.sp for layout in layouts if layout.pp == 2} == {1, 2, 4}
    for num_ranks in (None, 2):
        assert {layout.sp for layout in thread_layouts("train", 4, 4, offers, num_ranks)} == {1}


def test_split_sequences_cost_what_gathers_their_keys_and_values_and_keep_them() -> None:
    shape, pool = shape_named("Qwen2.5-7B"), pools_of(ClusterSpec(pools={"main": PoolSpec(device="h100")}))["main"]
    costs, kept = {}, {}
    for sp in (1, 2, 4):
        layout = Layout(sp=sp, dp=8 // sp, zero=3)
        for gathers in (False, True):
            given: dict[str, Any] = {"is_trained": True, "recomputes": False, "gathers_keys": gathers}
            costs[sp, gathers] = train_cost(shape, pool, layout, microbatch_tokens=32768, **given)[0].forward.token_s
            kept[sp, gathers] = train_footprint(shape, layout, 32768, **given).activations
    width = shape.num_kv_heads * (shape.head_dim + shape.value_dim) * shape.bytes_each
    exposed = (1 - pool.device.hidden) * shape.num_layers * width / pool.between_bytes_s(4)
    # Each rank receives what the others have of a token's keys and values.
    assert costs[4, True] - costs[1, True] == pytest.approx(exposed * 3 / 8)
    assert costs[2, True] - costs[1, True] == pytest.approx(exposed * 1 / 8)
    # With as few heads of keys as this that is less than to exchange the heads of queries and the output.
    assert costs[2, True] < costs[2, False]
    assert kept[4, False] < kept[4, True] < kept[2, True] < kept[1, True] == kept[1, False]
    assert kept[4, True] - kept[4, False] == pytest.approx(shape.num_layers * 32768 / 4 * 3 * width, rel=0.05)
