"""The trainer `megatron`: what needs no Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file

from m2flow.cli.main import cli
from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.trainer import logprobs_at
from m2flow.engines.embedded.trainer import most_likely as most_likely_of_logits
from m2flow.engines.megatron.layout import Options, check_before, check_model, check_ranks, read
from m2flow.engines.megatron.names import check_names, places, with_adapters
from m2flow.engines.megatron.trainer import MegatronTrain
from m2flow.engines.megatron.vocabulary import Vocabulary, most_likely, token_logprobs
from m2flow.engines.models.hf_model import checkpoint_tensors, load_model
from m2flow.engines.models.trainer_checkpoint import named_weights
from m2flow.engines.registry import engine_named
from m2flow.errors import EngineError
from m2flow.planner.model_shapes import ModelShape
from m2flow.planner.pools import legal_layouts, offered
from m2flow.recipe import Balance, Lora, Model

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", megatron_models.CONFIGS)
def test_every_tensor_of_a_checkpoint_has_a_place(name: str) -> None:
    config = megatron_models.CONFIGS[name]()
    check_model(config, Options())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {id(tensor): (own, tensor) for own, tensor in reversed(model.state_dict(keep_vars=True).items())}
    names = [part for own, tensor in tensors.values() for part, _ in checkpoint_tensors(model, own, tensor)]
    check_names(config, names)
    with pytest.raises(EngineError, match=r"lacks 1 tensors: model\.norm\.weight"):
        check_names(config, [one for one in names if one != "model.norm.weight"])
    with pytest.raises(EngineError, match=r"has no place for 1 tensors: model\.extra"):
        check_names(config, [*names, "model.extra"])


def test_adapters_have_places_on_matrices_of_layers_alone() -> None:
    config = megatron_models.CONFIGS["qwen2"]()
    found = with_adapters(places(config), {"model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"})
    assert {name: (place.names, place.dim) for name, place in found.items() if place.is_trained} == {
        "decoder.layers.0.mlp.linear_fc2.adapters.a.down_proj": (("model.layers.0.mlp.down_proj.lora_A.default.weight",), 1),
        "decoder.layers.0.mlp.linear_fc2.adapters.b.down_proj": (("model.layers.0.mlp.down_proj.lora_B.default.weight",), None),
        "decoder.layers.1.self_attention.linear_qkv.adapters.a.k_proj": (("model.layers.1.self_attn.k_proj.lora_A.default.weight",), None),
        "decoder.layers.1.self_attention.linear_qkv.adapters.b.k_proj": (("model.layers.1.self_attn.k_proj.lora_B.default.weight",), 0),
    }
    with pytest.raises(EngineError, match=r"no adapters on model\.embed_tokens\.weight"):
        with_adapters(places(config), {"model.embed_tokens.weight"})


def changed(name: str, **changes: Any) -> Any:
    config = megatron_models.CONFIGS[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    return config


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (lambda: transformers.GPT2Config(), {}, "no place for the weights of a 'gpt2' model"),
        (lambda: changed("llama", attention_bias=True), {}, "attention_bias"),
        (lambda: changed("llama", mlp_bias=True), {}, "mlp_bias"),
        (lambda: changed("llama", hidden_act="gelu"), {}, "hidden_act gelu"),
        (lambda: changed("mistral", sliding_window=5), {}, "sliding_window 5"),
        (lambda: changed("qwen3_moe", mlp_only_layers=[0]), {}, "layers without experts"),
        (lambda: changed("llama", rope_parameters={"rope_type": "yarn", "factor": 2.0}), {}, "rope_type yarn"),
        (lambda: megatron_models.CONFIGS["qwen2"](), {"tp": 3}, "tp is 3, which does not divide the model's num_attention_heads, 4"),
        (lambda: megatron_models.CONFIGS["qwen2"](), {"tp": 4}, "num_key_value_heads, 2"),
        (lambda: megatron_models.CONFIGS["qwen2"](), {"tp": 2, "cp": 2}, r"tp \* cp is 4"),
        (lambda: megatron_models.CONFIGS["qwen2"](), {"pp": 5}, "pp is 5, and the model has 4 layers"),
        (
            lambda: megatron_models.CONFIGS["qwen2"](),
            {"pp": 2, "vpp": 4, "micro_batches": 2},
            r"pp \* vpp is 8, and the model has 4 layers",
        ),
        (lambda: megatron_models.CONFIGS["qwen3_moe"](), {"ep": 3}, "ep is 3, which does not divide the model's number of experts, 4"),
        (lambda: megatron_models.CONFIGS["qwen3_moe"](), {"etp": 3}, "width of an expert, 16"),
        (lambda: megatron_models.CONFIGS["qwen2"](), {"ep": 2}, "has no experts"),
        (lambda: megatron_models.CONFIGS["mixtral"](), {"tp": 2, "sequence_parallel": False}, "experts are not computed on whole rows"),
        (
            lambda: changed("deepseek_v3", num_nextn_predict_layers=1),
            {},
            r"num_nextn_predict_layers 1 \(layers that predict further tokens",
        ),
        (lambda: changed("deepseek_v3", first_k_dense_replace=4), {}, "first_k_dense_replace 4, so that no layer has experts"),
        (lambda: changed("deepseek_v3", norm_topk_prob=False), {}, "gates that are not normalised"),
        (lambda: changed("deepseek_v3", num_experts_per_tok=1), {}, "one expert a token"),
        (lambda: changed("deepseek_v3", num_key_value_heads=2), {}, "num_key_value_heads 2, other than its heads"),
        (lambda: changed("deepseek_v3", attention_bias=True), {}, "attention_bias"),
        (lambda: changed("deepseek_v3", n_group=3), {}, "n_group 3, which does not divide its experts"),
        (lambda: changed("deepseek_v2", topk_method="noaux_tc"), {}, "topk_method noaux_tc"),
        (lambda: changed("deepseek_v2", n_shared_experts=0), {}, "n_shared_experts 0"),
        (lambda: changed("deepseek_v2", rope_parameters={"rope_type": "dynamic", "factor": 2.0}), {}, "rope_type dynamic"),
        (lambda: changed("deepseek_v2", intermediate_size=33), {"tp": 2}, "intermediate_size, 33"),
        (lambda: changed("deepseek_v2", moe_intermediate_size=15, n_shared_experts=1), {"tp": 2}, "width of the shared experts, 15"),
        (lambda: megatron_models.CONFIGS["deepseek_v2"](), {"tp": 2, "cp": 4}, r"tp \* cp is 8, .* num_attention_heads, 4"),
        (lambda: megatron_models.CONFIGS["deepseek_v3"](), {"tp": 2, "sequence_parallel": False}, "experts are not computed on whole rows"),
    ],
)
def test_what_megatron_can_t_compute_is_refused_by_name(config: Any, options: dict[str, object], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        check_model(config(), read(options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tpp": 2}, "no option 'tpp'"),
        ({"tp": "2"}, "tp of the train engine 'megatron' is '2', not a int"),
        ({"tp": 0}, "tp .* is 0"),
        ({"zero": 2}, "no ZeRO stage 2"),
        ({"vpp": 2}, "there is one stage"),
        ({"pp": 2, "vpp": 2, "micro_batches": 3}, "3 micro-batches are no multiple of 2 stages"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"transformer_impl": "te"}, r"transformer_impl is 'te'(.|\n)*Write auto, local or transformer_engine"),
        ({"offload_optimizer": "nvme"}, "offload_optimizer of the train engine 'megatron' is 'nvme', not a bool"),
    ],
)
def test_options_that_can_t_be_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        read(options)


def test_ranks_that_the_groups_do_not_divide_and_a_model_without_experts_to_replay_are_refused_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tp \* pp \* cp is 4, which does not divide 6 ranks"):
        check_ranks(read({"tp": 2, "pp": 2}), 6)
    with pytest.raises(EngineError, match=r"etp \* ep is 4, which does not divide the 2 ranks of a stage"):
        check_ranks(read({"pp": 2, "ep": 4}), 4)
    model = megatron_models.small("qwen2", tmp_path)
    assert engine_named("megatron", "train").refuses.endswith("layout:check_before")
    check_before(model, {"tp": 2, "pp": 2}, 4)
    with pytest.raises(EngineError, match="tp is 4"):
        check_before(model, {"tp": 4}, 4)
    with pytest.raises(EngineError, match="'qwen2' model is no mixture"):
        check_before(replace(model, routing="rollout"), {}, 1)
    mixture = megatron_models.small("qwen3_moe", tmp_path / "mixture")
    for wrong, options, said in (
        (mixture, {}, "no adapters on a mixture of experts"),
        (replace(model, head="value"), {}, "no adapters on a model with a value head"),
        (model, {"spread_checkpoints": True}, "no adapters with checkpoints that each rank writes its part of"),
    ):
        with pytest.raises(EngineError, match=said):
            check_before(replace(wrong, lora=Lora()), options, 1)
    check_before(replace(model, lora=Lora()), {"tp": 2}, 2)
    with pytest.raises(EngineError, match="routers of a 'qwen3_moe' model have no bias"):
        check_before(replace(mixture, balance=Balance(bias_step=0.1)), {}, 1)
    check_before(replace(megatron_models.small("deepseek_v3", tmp_path / "biased"), balance=Balance(bias_step=0.1)), {"ep": 2}, 2)


def test_a_device_type_or_dtype_that_it_has_not_is_refused() -> None:
    with pytest.raises(EngineError, match="has no device cpu"):
        MegatronTrain(Model("somewhere"), EngineSettings())
    with pytest.raises(EngineError, match="no passes in float16"):
        MegatronTrain(Model("somewhere", dtype="float16"), EngineSettings(device="cuda:0"))


def test_data_parallel_ranks_see_shares_and_the_last_stage_reports() -> None:
    options = read({"tp": 2, "pp": 2})
    assert [options.share_of(rank, 8) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert options.reporters(8) == [4, 6]


@pytest.fixture
def alone() -> Iterator[Any]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("num_logits", [1, 50, 10_000])
@pytest.mark.parametrize("has_temperature", [False, True])
def test_log_probabilities_and_gradients_of_the_head_are_those_of_the_embedded_trainer(
    num_logits: int, has_temperature: bool, alone: Any
) -> None:
    torch.manual_seed(0)
    vocabulary = Vocabulary(11, alone, num_logits)
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(12, 5, requires_grad=True)  # A row of no token at the end.
    targets, temperature = torch.randint(0, 11, (7,)), torch.rand(7) + 0.5 if has_temperature else None
    logits = hidden @ weight[:11].T
    top_ids, _ = most_likely_of_logits(logits, temperature, 3)
    assert torch.equal(most_likely(hidden, weight, temperature, 3, vocabulary).sort(1).values, top_ids.sort(1).values)
    found, expected = (
        token_logprobs(hidden, weight, targets, temperature, top_ids, vocabulary),
        logprobs_at(logits, targets, temperature, top_ids),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    factors = [torch.randn_like(one) for one in expected]
    for which in ([0], [1], [2], [0, 1, 2]):
        gradients = [
            torch.autograd.grad(sum((outputs[i] * factors[i]).sum() for i in which), (hidden, weight), retain_graph=True)
            for outputs in (found, expected)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_planner_lays_megatron_out_so_that_heads_and_experts_divide_and_stages_have_layers() -> None:
    shape = replace(ModelShape.from_config(megatron_models.CONFIGS["qwen3_moe"]().to_dict()), num_layers=6)
    layouts = legal_layouts(shape, offered("megatron", "train"), "train", 8, 8)
    assert {layout.tp * layout.sp for layout in layouts} == {1, 2}
    assert {layout.pp for layout in layouts} == {1, 2, 4}
    assert {layout.ep for layout in layouts} == {1, 2, 4}
    assert {layout.zero for layout in layouts} == {0, 1}


def test_gpt_oss_is_refused_by_name_before_a_run(tmp_path: Path) -> None:
    """Sinks, windows in every other layer and clamped experts with biases have no place in Megatron's model here; `fsdp` has them."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.GptOssConfig(**sizes, head_dim=8, num_local_experts=4, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"no place for the weights of a 'gpt_oss' model.*(.|\n)*Use the train engine `fsdp`"):
        check_before(Model(str(tmp_path), init="random"), {}, 2)


def as_transformer_engine_has_them(model: Model) -> dict[str, torch.Tensor]:
    """A qwen2's weights as a training script of Megatron's saves them from modules of Transformer Engine: layers in one tensor, norms with
    the matrices after them, a vocabulary that is filled up; and what else such a checkpoint has.
    """
    hf = dict(named_weights(load_model(model, device="cpu", attention="eager")))
    config = load_model(model, device="cpu", attention="eager").config
    groups, layers = config.num_key_value_heads, config.num_hidden_layers

    def stacked(*names: str) -> torch.Tensor:
        return torch.stack([torch.cat([hf[f"model.layers.{n}.{one}"] for one in names]) for n in range(layers)])

    def interleaved(what: str) -> torch.Tensor:
        of_layers = []
        for n in range(layers):
            q, k, v = (hf[f"model.layers.{n}.self_attn.{one}_proj.{what}"].chunk(groups) for one in "qkv")
            of_layers.append(torch.cat([part for group in zip(q, k, v, strict=True) for part in group]))
        return torch.stack(of_layers)

    embeddings = hf["model.embed_tokens.weight"]
    layer = "decoder.layers"
    return {
        "embedding.word_embeddings.weight": torch.cat((embeddings, torch.zeros(7, embeddings.shape[1]))),
        f"{layer}.self_attention.linear_qkv.layer_norm_weight": stacked("input_layernorm.weight"),
        f"{layer}.self_attention.linear_qkv.weight": interleaved("weight"),
        f"{layer}.self_attention.linear_qkv.bias": interleaved("bias"),
        f"{layer}.self_attention.linear_proj.weight": stacked("self_attn.o_proj.weight"),
        f"{layer}.mlp.linear_fc1.layer_norm_weight": stacked("post_attention_layernorm.weight"),
        f"{layer}.mlp.linear_fc1.weight": stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        f"{layer}.mlp.linear_fc1._extra_state/shard_0_2": torch.zeros(3),
        f"{layer}.mlp.linear_fc2.weight": stacked("mlp.down_proj.weight"),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(4),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_with_transformer_engines_names_is_converted_by_the_command(tmp_path: Path) -> None:
    model = megatron_models.small("qwen2", tmp_path / "model")
    expected = dict(named_weights(load_model(model, device="cpu", attention="eager")))
    torch.distributed.checkpoint.save(as_transformer_engine_has_them(model), checkpoint_id=tmp_path / "saved", no_dist=True)
    told = CliRunner().invoke(cli, ["export", str(tmp_path / "saved"), "--like", model.path, "--out", str(tmp_path / "converted")])
    assert told.exit_code == 0, told.output
    found = load_file(tmp_path / "converted" / "model.safetensors")
    assert found.keys() == {name for name in expected if name != "lm_head.weight"}
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("made", "arguments", "said"),
    [
        ("mp_rank_00", ["--out", "converted"], "older format"),
        ("", ["--out", "converted"], "no .metadata"),
        ("", [], "goes with a checkpoint and --out"),
        ("", ["--out", "converted", "--adapters"], "--like and --adapters exclude each other"),
    ],
)
def test_what_is_no_checkpoint_of_megatrons_is_refused_with_what_to_do(made: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    model = megatron_models.small("qwen2", tmp_path / "model")
    (tmp_path / "saved" / made).mkdir(parents=True)
    told = CliRunner().invoke(cli, ["export", str(tmp_path / "saved"), "--like", model.path, *arguments])
    assert told.exit_code != 0
    assert said in f"{told.output}{told.exception}"
