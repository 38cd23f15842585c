"""How many parameters adapters of low rank have beside a model's layers: what is trained in their place.

    ModelShape, Lora --adapted--> the same shape with `adapter_parameters`, and how many of them are the experts'

Each adapted layer of i inputs and o outputs has rank x (i + o) of them. Layers go by their Hugging Face names. Where there are experts,
peft (0.21) adapts them and their routers, and no other MLP; gate and up of an expert are one matrix there, of twice the rank. Names that a
recipe gives and no layer of this shape has are left out here; the engine refuses them.

Source:
    Hu et al. 2021, LoRA, arXiv:2106.09685. Counts were compared with peft's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from m2flow.micro.costs.shapes import ModelShape
from m2flow.recipe import Lora

_OF_EXPERTS = ("gate_up_proj", "down_proj")
"""Where there are experts, no other layer has these names."""


def adapted(shape: ModelShape, recipe: Lora | None) -> ModelShape:
    """The shape of a model that trains adapters alone."""
    if recipe is None:
        return shape
    widths = {
        name: num * (inputs + outputs)
        for name, (num, inputs, outputs) in _layers(shape).items()
        if not recipe.targets or name in recipe.targets
    }
    of_experts = sum(widths.get(name, 0) for name in _OF_EXPERTS) if shape.num_experts else 0
    return replace(shape, adapter_parameters=recipe.rank * sum(widths.values()), expert_adapter_parameters=recipe.rank * of_experts)


def _layers(shape: ModelShape) -> Mapping[str, tuple[int, int, int]]:
    """Name -> how many there are in the model, inputs, outputs."""
    h, num = shape.hidden, shape.num_layers
    found = _latent_attention(shape) if shape.latent else _attention(shape)
    found["o_proj"] = (num, shape.num_heads * shape.value_dim, h)
    if not shape.num_experts:
        width = shape.dense_width
        return found | {"gate_proj": (num, h, width), "up_proj": (num, h, width), "down_proj": (num, width, h)}
    sparse = num - shape.num_dense_layers
    each, width = sparse * shape.num_experts, shape.expert_width
    return found | {"gate": (sparse, h, shape.num_experts), "gate_up_proj": (2 * each, h, 2 * width), "down_proj": (each, width, h)}


def _attention(shape: ModelShape) -> dict[str, tuple[int, int, int]]:
    h, num = shape.hidden, shape.num_layers
    return {
        "q_proj": (num, h, shape.num_heads * shape.head_dim),
        "k_proj": (num, h, shape.num_kv_heads * shape.head_dim),
        "v_proj": (num, h, shape.num_kv_heads * shape.value_dim),
    }


def _latent_attention(shape: ModelShape) -> dict[str, tuple[int, int, int]]:
    """MLA's, by the names of DeepSeek's models."""
    h, num, heads = shape.hidden, shape.num_layers, shape.num_heads
    rank, nope = shape.latent - shape.rope_dim, shape.head_dim - shape.rope_dim
    found = {
        "kv_a_proj_with_mqa": (num, h, shape.latent),
        "kv_b_proj": (num, rank, heads * (nope + shape.value_dim)),
    }
    if shape.query_latent:
        return found | {"q_a_proj": (num, h, shape.query_latent), "q_b_proj": (num, shape.query_latent, heads * shape.head_dim)}
    return found | {"q_proj": (num, h, heads * shape.head_dim)}
