"""Where the tensors of a checkpoint lie in Megatron's model, and how they get there and back.

    checkpoint's tensors --merged--> one of Megatron's parameters --its part--> a rank of the tensor group, on the stage that has the layer
                         <--split--                               <--gathered--                            <--sent to all by its owner

A DeepSeek model's latent attention has the checkpoint's own tensors, those down whole on every tensor rank and those up split by heads.
Biases of its routers are no parameters: they lie beside them, and have neither gradients nor moments.

`linear_qkv` has, for each group of keys and values, its queries, its key and its value; `linear_fc1` has the gate above the projection up,
each split by itself. A vocabulary that the ranks do not divide is filled up with rows of zeros, which nothing reads.

A parameter's gradient and moments go the same ways. Each rank finds what it has by name; who sends a parameter to all is the first rank
that has it, so nothing but tensors is exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines.megatron.layout import Options, has_bias, head_size, is_latent, num_dense, num_experts
from m2flow.engines.models import lora
from m2flow.engines.models.hf_model import EXPERTS, ExpertNames
from m2flow.errors import EngineError


@dataclass(frozen=True)
class Place:
    """One of Megatron's parameters: the checkpoint's tensors that it is made of, and how it is split."""

    names: tuple[str, ...]
    kind: Literal["whole", "qkv", "gate_up", "vocabulary"] = "whole"
    dim: int | None = None
    """What tensor-parallel ranks split it along; None: each has it whole."""
    is_expert: bool = False
    group: str = "rest"
    """The group of weights that it is reported with."""
    is_trained: bool = True
    """False: it has no gradient and no moments: a bias of a router, and all that adapters are beside."""
    is_exact: bool = False
    """float32 in a model of any type: a bias of a router."""


SCALAR_HEAD = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}
"""Names here of the parameters of a critic's or a reward model's head, by Megatron's. They are not those of a language model's head."""


ROUTER_BIAS = "mlp.router.expert_bias"
"""Megatron's name, in a layer, of what a router adds to its scores for the choice of experts alone."""


def key_of(name: str) -> str:
    """What a layer is called beside others of its matrix: `q_proj`, from the name of its weights."""
    return name.removesuffix(".weight").rpartition(".")[2]


def with_adapters(found: Mapping[str, Place], adapted: Collection[str]) -> dict[str, Place]:
    """Places of a model whose layers of these names (of their weights) have adapters, which alone are trained. None: as they are.

    Raises:
        EngineError: there is no layer of such a name.
    """
    if not adapted:
        return dict(found)
    places = {name: replace(place, is_trained=False) for name, place in found.items()}
    known: set[str] = set()
    for name, place in found.items():
        own = name.removesuffix(".weight")
        for one in place.names:
            if one in adapted and place.dim is not None and place.kind != "vocabulary":
                of_columns = place.dim == 0
                a, b = (lora.tensor_name(one, which) for which in "AB")
                places[f"{own}.adapters.a.{key_of(one)}"] = Place((a,), dim=None if of_columns else 1, group=place.group)
                places[f"{own}.adapters.b.{key_of(one)}"] = Place((b,), dim=0 if of_columns else None, group=place.group)
                known.add(one)
    if wrong := sorted(set(adapted) - known):
        raise EngineError(f"Megatron's model has no adapters on {wrong[0]}", now="Name other layers: Lora(targets=('q_proj', 'v_proj')).")
    return places


def places(config: Any, scalar: bool | None = None) -> dict[str, Place]:
    """All parameters of a model, by Megatron's names with the numbers that layers and experts have in the whole model, in their order.

    Args:
        scalar: its head gives one number a token: with a bias, or without. None: it is a language model's.
    """
    found = {"embedding.word_embeddings.weight": Place(("model.embed_tokens.weight",), "vocabulary", 0, group="embeddings")}
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        has_experts = num_experts(config) and number >= num_dense(config)
        of_layer = dict(_latent_attention(config, layer) if is_latent(config) else _attention(config, layer))
        of_layer |= dict(_experts(config, layer) if has_experts else _gated(f"{layer}.mlp", "mlp"))
        found |= {f"decoder.layers.{number}.{name}": replace(place, group=f"layers.{number}") for name, place in of_layer.items()}
    found["decoder.final_layernorm.weight"] = Place(("model.norm.weight",))
    if scalar is not None:
        found |= {name: Place((name,), group="head") for name in list(SCALAR_HEAD.values())[: 1 + scalar]}
    elif not config.tie_word_embeddings:
        found["output_layer.weight"] = Place(("lm_head.weight",), "vocabulary", 0, group="head")
    return found


def _attention(config: Any, layer: str) -> Iterator[tuple[str, Place]]:
    """The norms and the attention of a layer."""
    own = f"{layer}.self_attn"
    yield "input_layernorm.weight", Place((f"{layer}.input_layernorm.weight",))
    yield "self_attention.linear_qkv.weight", Place(tuple(f"{own}.{one}_proj.weight" for one in "qkv"), "qkv", 0)
    if config.model_type == "qwen2":
        yield "self_attention.linear_qkv.bias", Place(tuple(f"{own}.{one}_proj.bias" for one in "qkv"), "qkv", 0)
    yield "self_attention.linear_proj.weight", Place((f"{own}.o_proj.weight",), dim=1)
    if config.model_type.startswith("qwen3"):
        yield "self_attention.q_layernorm.weight", Place((f"{own}.q_norm.weight",))
        yield "self_attention.k_layernorm.weight", Place((f"{own}.k_norm.weight",))
    yield "pre_mlp_layernorm.weight", Place((f"{layer}.post_attention_layernorm.weight",))


def _latent_attention(config: Any, layer: str) -> Iterator[tuple[str, Place]]:
    """The norms and the latent attention of a layer."""
    own = f"{layer}.self_attn"
    yield "input_layernorm.weight", Place((f"{layer}.input_layernorm.weight",))
    if config.q_lora_rank is None:
        yield "self_attention.linear_q_proj.weight", Place((f"{own}.q_proj.weight",), dim=0)
    else:
        yield "self_attention.linear_q_down_proj.weight", Place((f"{own}.q_a_proj.weight",))
        yield "self_attention.q_layernorm.weight", Place((f"{own}.q_a_layernorm.weight",))
        yield "self_attention.linear_q_up_proj.weight", Place((f"{own}.q_b_proj.weight",), dim=0)
    yield "self_attention.linear_kv_down_proj.weight", Place((f"{own}.kv_a_proj_with_mqa.weight",))
    yield "self_attention.kv_layernorm.weight", Place((f"{own}.kv_a_layernorm.weight",))
    yield "self_attention.linear_kv_up_proj.weight", Place((f"{own}.kv_b_proj.weight",), dim=0)
    yield "self_attention.linear_proj.weight", Place((f"{own}.o_proj.weight",), dim=1)
    yield "pre_mlp_layernorm.weight", Place((f"{layer}.post_attention_layernorm.weight",))


def _gated(block: str, own: str) -> Iterator[tuple[str, Place]]:
    """A gated pair of matrices: of a layer, or of the experts that all tokens go to."""
    yield f"{own}.linear_fc1.weight", Place((f"{block}.gate_proj.weight", f"{block}.up_proj.weight"), "gate_up", 0)
    yield f"{own}.linear_fc2.weight", Place((f"{block}.down_proj.weight",), dim=1)


def _experts(config: Any, layer: str) -> Iterator[tuple[str, Place]]:
    """The router and the experts of a layer."""
    named = EXPERTS.get(config.model_type, ExpertNames())
    block = f"{layer}.{named.block}"
    yield "mlp.router.weight", Place((f"{block}.gate.weight",))
    if has_bias(config):
        yield ROUTER_BIAS, Place((f"{block}.gate.e_score_correction_bias",), is_trained=False, is_exact=True)
    for expert in range(num_experts(config)):
        one, own = f"{block}.experts.{expert}", f"mlp.experts.local_experts.{expert}"
        up = (f"{one}.{named.gate}.weight", f"{one}.{named.up}.weight")
        yield f"{own}.linear_fc1.weight", Place(up, "gate_up", 0, is_expert=True)
        yield f"{own}.linear_fc2.weight", Place((f"{one}.{named.down}.weight",), dim=1, is_expert=True)
    if is_latent(config):
        yield from _gated(f"{block}.shared_experts", "mlp.shared_experts")


def check_names(config: Any, names: Sequence[str], scalar: bool | None = None) -> None:
    """Check that every tensor of a checkpoint has a place, and every place a tensor. Raises `EngineError`, with their names."""
    placed = {name for place in places(config, scalar).values() for name in place.names}
    for wrong, what in ((set(names) - placed, "has no place for"), (placed - set(names), "lacks")):
        if wrong:
            raise EngineError(
                f"Megatron's model of a {config.model_type!r} checkpoint {what} {len(wrong)} tensors: {', '.join(sorted(wrong)[:4])}",
                now="Use the train engine `fsdp` or `deepspeed`.",
            )


def split(config: Any, place: Place, merged: Tensor) -> list[Tensor]:
    """The checkpoint's tensors that a parameter, or a part of it with whole heads, is made of."""
    if place.kind == "qkv":
        size, num_queries = head_size(config), config.num_attention_heads // config.num_key_value_heads
        grouped = merged.unflatten(0, (-1, (num_queries + 2) * size))
        return [part.flatten(0, 1) for part in grouped.split((num_queries * size, size, size), 1)]
    if place.kind == "gate_up":
        return list(merged.chunk(2))
    return [merged[: config.vocab_size]] if place.kind == "vocabulary" else [merged]


@dataclass
class Weights:
    """The parameters of one rank. All ranks make it, and call it, together."""

    config: Any
    options: Options
    own: Mapping[str, Tensor]
    """By the names of `places`, biases of routers among them."""
    shapes: Mapping[str, torch.Size]
    """Shapes of the checkpoint's tensors, by their names."""
    tensor_group: Any
    expert_group: Any
    all_ranks: Any
    scalar: bool | None = None
    """As of `places`."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """What adapters are multiplied by, by the names of their layers' weights."""
    places: dict[str, Place] = field(init=False)
    _owners: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.places = with_adapters(places(self.config, self.scalar), self.scales)
        device = next(iter(self.own.values())).device
        has = torch.tensor([name in self.own for name in self.places], device=device).to(torch.int64)
        of_ranks = [torch.empty_like(has) for _ in range(dist.get_world_size(self.all_ranks))]
        dist.all_gather(of_ranks, has, group=self.all_ranks)
        # argmax finds the first rank.
        self._owners = dict(zip(self.places, torch.stack(of_ranks).argmax(0).tolist(), strict=True))

    @property
    def trained(self) -> dict[str, Tensor]:
        """The tensors of `own` that have gradients."""
        return {name: parameter for name, parameter in self.own.items() if self.places[name].is_trained}

    def local(self, tensors: Mapping[str, Tensor], *, is_all: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each parameter, by name, from whole tensors by the checkpoint's names.

        Args:
            is_all: also of those that are not trained.
        """
        for name, parameter in (self.own if is_all else self.trained).items():
            place = self.places[name]
            merged = self._merged(place, [tensors[one] for one in place.names])
            yield name, self._part(place, merged, parameter.shape)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load(self, tensors: Mapping[str, Tensor], *, is_all: bool = True) -> None:
        """Set the weights, or those that are trained, from whole tensors by the checkpoint's names."""
        for name, part in self.local(tensors, is_all=is_all):
            self.own[name].copy_(part)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def merged(self, *, adds: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield what `whole` does, of the weights without adapters or, with `adds`, with what these add to them."""
        beside = {name: tensor.clone() for name, tensor in self.whole(is_trained=True)} if self.scales and adds else {}
        for name, tensor in self.whole(is_trained=False if self.scales else None):
            if name in self.scales and adds:
                a, b = (beside[lora.tensor_name(name, which)] for which in "AB")
                tensor = tensor + lora.addend(b, a, self.scales[name], is_transposed=False)
            yield name, tensor

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def whole(self, of: Callable[[str, Tensor], Tensor] | None = None, *, is_trained: bool | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors by the checkpoint's names, on every rank. Collective.

        Args:
            of: name and parameter -> what is gathered for it, of its shape: its gradient, a moment; of one type on all ranks; for those
                that are trained. None: themselves, of all.
            is_trained: leave out those that are not, or that are.
        """
        rank = dist.get_rank(self.all_ranks)
        name, parameter = next(iter(self.trained.items()))
        like = parameter.detach() if of is None else of(name, parameter)
        for name, place in self.places.items():
            if (of is not None and not place.is_trained) or is_trained not in (None, place.is_trained):
                continue
            tensors: list[Tensor] = []
            if name in self.own:
                own = self.own[name].detach() if of is None else of(name, self.own[name])
                tensors = self._split(place, self._gathered(place, own))
            dtype = torch.float32 if place.is_exact else like.dtype
            for i, one in enumerate(place.names):
                found = tensors[i].contiguous() if rank == self._owners[name] else like.new_empty(self.shapes[one], dtype=dtype)
                dist.broadcast(found, self._owners[name], group=self.all_ranks)
                yield one, found

    def pieces(self, name: str, part: Tensor) -> Iterator[tuple[str, list[int], Tensor]]:
        """Yield what this rank's part of a parameter is of the checkpoint's tensors: name, where it begins there, the piece."""
        place = self.places[name]
        for one, piece in zip(place.names, self._split(place, part), strict=True):
            start = [0] * piece.ndim
            if place.dim is not None:
                start[place.dim] = dist.get_rank(self._group(place)) * piece.shape[place.dim]
            piece = piece[: max(self.shapes[one][0] - start[0], 0)]  # A vocabulary may be filled up.
            if piece.numel():
                yield one, start, piece

    def forms(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        """Yield name, type and shape of what `whole` yields."""
        dtype = next(iter(self.trained.values())).dtype
        for place in self.places.values():
            for one in place.names:
                yield one, torch.float32 if place.is_exact else dtype, self.shapes[one]

    def views(self, name: str, part: Tensor) -> Iterator[tuple[str, list[int], Tensor]]:
        """Yield the same as `pieces` without a copy, so in more pieces where queries, keys and values alternate."""
        if self.places[name].kind != "qkv":
            yield from self.pieces(name, part)
            return
        place, num_queries = self.places[name], self.config.num_attention_heads // self.config.num_key_value_heads
        of_groups = part.split((num_queries + 2) * head_size(self.config))
        number = dist.get_rank(self._group(place)) * len(of_groups)
        for group, of_group in enumerate(of_groups, number):
            for one, piece in zip(place.names, self._split(place, of_group), strict=True):
                yield one, [group * len(piece), *[0] * (piece.ndim - 1)], piece

    def joined(self, name: str, pieces: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """This rank's part of a parameter from its `pieces`."""
        place = self.places[name]
        if place.kind == "qkv":
            size, num_queries = head_size(self.config), self.config.num_attention_heads // self.config.num_key_value_heads
            grouped = [piece.unflatten(0, (-1, rows)) for piece, rows in zip(pieces, (num_queries * size, size, size), strict=True)]
            return torch.cat(grouped, 1).flatten(0, 1)
        found = torch.cat(tuple(pieces)) if pieces else torch.zeros(0, *shape[1:])
        return torch.cat((found, found.new_zeros(shape[0] - len(found), *shape[1:])))  # A vocabulary may be filled up.

    def _group(self, place: Place) -> Any:
        return self.expert_group if place.is_expert else self.tensor_group

    def _merged(self, place: Place, tensors: Sequence[Tensor]) -> Tensor:
        if place.kind == "qkv":
            groups = self.config.num_key_value_heads
            return torch.cat([tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors], 1).flatten(0, 1)
        return torch.cat(tuple(tensors)) if place.kind == "gate_up" else tensors[0]

    def _split(self, place: Place, merged: Tensor) -> list[Tensor]:
        return split(self.config, place, merged)

    def _part(self, place: Place, merged: Tensor, shape: torch.Size) -> Tensor:
        """This rank's part of a parameter."""
        if place.dim is None:
            return merged
        size, rank = dist.get_world_size(self._group(place)), dist.get_rank(self._group(place))
        if place.kind == "gate_up":
            return torch.cat([half.chunk(size)[rank] for half in merged.chunk(2)])
        if place.kind == "vocabulary":
            merged = torch.cat((merged, merged.new_zeros(size * shape[0] - len(merged), *merged.shape[1:])))
        return merged.chunk(size, place.dim)[rank]

    def _gathered(self, place: Place, part: Tensor) -> Tensor:
        """A parameter, merged, from the parts of its tensor group. Collective in it."""
        if place.dim is None or dist.get_world_size(group := self._group(place)) == 1:
            return part
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        if place.kind == "gate_up":
            return torch.cat([torch.cat([one.chunk(2)[half] for one in parts]) for half in (0, 1)])
        return torch.cat(parts, place.dim)


LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
"""An expert's matrix in Transformer Engine's module of all experts."""


def layer_of(name: str) -> int:
    """The number of the layer that a parameter is in, by its name in the whole model. Raises ValueError: it is in none."""
    found = LAYER.fullmatch(name)
    if found is None:
        raise ValueError(name)
    return int(found[1])


def numbered(name: str, first_layer: int, first_expert: int) -> str:
    """A parameter's name with the numbers of the whole model, from its name in a part whose first layer and expert have these.

    >>> numbered("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", 4, 2)
    'decoder.layers.4.mlp.experts.local_experts.3.linear_fc2.weight'
    >>> numbered("decoder.layers.0.mlp.experts.linear_fc2.weight1", 4, 2)
    'decoder.layers.4.mlp.experts.local_experts.3.linear_fc2.weight'
    """
    found = LAYER.fullmatch(name)
    if found is None:
        return name
    rest = _GROUPED.sub(r"mlp.experts.local_experts.\2.\1.weight", found[2])
    if expert := EXPERT.fullmatch(rest):
        rest = f"mlp.experts.local_experts.{int(expert[1]) + first_expert}.{expert[2]}"
    return f"decoder.layers.{int(found[1]) + first_layer}.{rest}"
