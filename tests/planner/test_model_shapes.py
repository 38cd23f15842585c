"""Sizes of models from their config.json, held against what is published of them."""

import json
from pathlib import Path

import pytest

from m2flow.errors import ModelError
from m2flow.planner.model_shapes import ModelShape, shape_named, zoo

ROOT = Path(__file__).parents[2]

PUBLISHED = {
    "Qwen2.5-0.5B": (0.494, 0.494),
    "Qwen2.5-1.5B": (1.544, 1.544),
    "Qwen2.5-3B": (3.086, 3.086),
    "Qwen2.5-7B": (7.616, 7.616),
    "Qwen2.5-14B": (14.77, 14.77),
    "Qwen2.5-32B": (32.76, 32.76),
    "Qwen2.5-72B": (72.71, 72.71),
    "Qwen3-0.6B": (0.596, 0.596),
    "Qwen3-1.7B": (1.72, 1.72),
    "Qwen3-4B": (4.02, 4.02),
    "Qwen3-8B": (8.19, 8.19),
    "Qwen3-14B": (14.77, 14.77),
    "Qwen3-32B": (32.76, 32.76),
    "Qwen3-30B-A3B": (30.53, 3.35),
    "Qwen3-235B-A22B": (235.1, 22.2),
    "Llama-3.2-1B": (1.236, 1.236),
    "Llama-3.2-3B": (3.213, 3.213),
    "Llama-3.1-8B": (8.030, 8.030),
    "Llama-3.1-70B": (70.55, 70.55),
    "Llama-3.1-405B": (405.9, 405.9),
    "DeepSeek-V3": (671.03, 37.55),
}
"""10^9 parameters: in all, and those that one token meets. Of model cards; DeepSeek's 36.6 active leave out the embedding table's 0.93."""


def test_every_shape_of_the_zoo_is_held_against_a_published_count() -> None:
    assert set(PUBLISHED) == set(zoo())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str) -> None:
    shape = shape_named(name)
    total, active = PUBLISHED[name]
    assert shape.num_parameters / 1e9 == pytest.approx(total, rel=1e-3)
    assert shape.num_active / 1e9 == pytest.approx(active, rel=2e-3)


def test_a_transformers_model_has_as_many_parameters_as_its_shape_says() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in zoo():
        fields = json.loads((ROOT / "m2flow" / "planner" / "models" / f"{name}.json").read_text())
        config = AutoConfig.for_model(**fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == shape_named(name).num_parameters, name


def test_the_cache_of_grouped_heads_and_of_a_latent() -> None:
    assert shape_named("Qwen2.5-7B").kv_bytes == 28 * 2 * 4 * 128 * 2
    assert shape_named("DeepSeek-V3").kv_bytes == 61 * (512 + 64) * 2
    assert shape_named("DeepSeek-V3").max_kv_shards == 1


def test_operations_are_two_a_parameter_and_attention_half_of_a_square() -> None:
    shape = shape_named("Qwen2.5-7B")
    assert shape.token_flops == 2 * (shape.num_parameters - 152064 * 3584)
    assert shape.attention_flops == 28 * 28 * 2 * 128
    tied = shape_named("Qwen2.5-0.5B")
    assert tied.token_flops == 2 * tied.num_parameters


def test_heads_decide_which_tensor_parallel_degrees_are_legal() -> None:
    seven = shape_named("Qwen2.5-7B")
    assert [tp for tp in range(1, 17) if seven.is_tp_legal(tp)] == [1, 2, 4]
    assert [tp for tp in (1, 2, 4, 8, 16, 3, 5) if shape_named("Llama-3.1-8B").is_tp_legal(tp)] == [1, 2, 4, 8, 16]
    assert [ep for ep in (1, 2, 3, 128) if shape_named("Qwen3-30B-A3B").is_ep_legal(ep)] == [1, 2, 128]
    assert not seven.is_ep_legal(2)


def test_the_flow_s_own_tiny_model_is_read_from_its_directory() -> None:
    shape = ModelShape.from_config(ROOT / "flows" / "models" / "digits")
    assert (shape.name, shape.dtype, shape.is_tied, shape.num_layers, shape.max_context) == ("digits", "float32", True, 2, 64)
    assert shape.weight_bytes == 4 * shape.num_parameters
    assert shape.with_dtype("bfloat16").weight_bytes == 2 * shape.num_parameters


def test_a_gguf_file_s_header_is_enough(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(128)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_tensor("token_embd.weight", np.zeros((3, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = ModelShape.from_config(file)
    assert (shape.name, shape.num_layers, shape.hidden, shape.num_kv_heads, shape.vocab, shape.is_tied) == ("tiny", 2, 64, 2, 3, True)
    assert (shape.dtype, shape.num_biases, shape.max_context) == ("float32", 0, 128)
    for broken in (b"GGUF" + b"\xff" * 40, b"GGUX" + bytes(40), b"GG"):
        file.write_bytes(broken)
        with pytest.raises(ModelError, match=r"can't be read as a \.gguf file"):
            ModelShape.from_config(file)


def test_a_name_is_found_whatever_its_case_and_owner() -> None:
    assert shape_named("qwen2.5-7b") is shape_named("Qwen/Qwen2.5-7B")


def test_a_wrong_name_is_told_the_nearest_ones() -> None:
    with pytest.raises(ModelError, match=r"no model shape named 'Qwen2\.5-7'(.|\n)*Did you mean Qwen2\.5-7B"):
        shape_named("Qwen2.5-7")
    with pytest.raises(ModelError, match=r"There are DeepSeek-V3, Llama"):
        shape_named("zzz")


def test_a_config_that_describes_no_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no num_hidden_layers"):
        ModelShape.from_config({"hidden_size": 8})
    with pytest.raises(ModelError, match="hidden_size is '8'"):
        ModelShape.from_config({"num_hidden_layers": 1, "hidden_size": "8"})
    with pytest.raises(ModelError, match="can't be read"):
        ModelShape.from_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        ModelShape.from_config(tmp_path)
