"""How many parameters adapters of low rank have beside a model's layers: what is trained in their place.

    ModelShape, Lora --adapted--> the same shape with `adapter_parameters`

Each adapted layer of i inputs and o outputs has rank x (i + o) of them. Layers go by their Hugging Face names. Routed experts have none:
their weights are one tensor for all, and no layers. Names that a recipe gives and no layer of this shape has are left out here; the engine
refuses them.

Source:
    Hu et al. 2021, LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from m2flow.micro.costs.shapes import ModelShape
from m2flow.recipe import Lora


def adapted(shape: ModelShape, recipe: Lora | None) -> ModelShape:
    """The shape of a model that trains adapters alone."""
    if recipe is None:
        return shape
    widths = sum(
        num * (inputs + outputs) for name, (num, inputs, outputs) in _layers(shape).items() if not recipe.targets or name in recipe.targets
    )
    return replace(shape, adapter_parameters=recipe.rank * widths)


def _layers(shape: ModelShape) -> Mapping[str, tuple[int, int, int]]:
    """Name -> how many there are in the model, inputs, outputs."""
    h, num, heads = shape.hidden, shape.num_layers, shape.num_heads
    sparse = num - shape.num_dense_layers
    found = _latent_attention(shape) if shape.latent else _attention(shape)
    found["o_proj"] = num, heads * shape.value_dim, h
    # Dense layers and shared experts, each of their own width, count as so many of the mean one: what is added up is the same.
    num_mlps = shape.num_dense_layers + (sparse if shape.shared_width else 0)
    width = (shape.num_dense_layers * shape.dense_width + sparse * shape.shared_width) // max(num_mlps, 1)
    found |= {"gate_proj": (num_mlps, h, width), "up_proj": (num_mlps, h, width), "down_proj": (num_mlps, width, h)}
    return found


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
        found |= {"q_a_proj": (num, h, shape.query_latent), "q_b_proj": (num, shape.query_latent, heads * shape.head_dim)}
    else:
        found["q_proj"] = num, h, heads * shape.head_dim
    return found
