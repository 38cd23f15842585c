"""The options of the train engine `megatron`, and what of them a number of ranks and a model allow.

    train.options --read--> Options --check_ranks, check_model--> refused by name, or a layout

    rank r of tp * cp * dp * pp:   tp = r % tp,   cp = r / tp % cp,   dp = r / (tp cp) % dp,   pp = r / (tp cp dp)

Tensor-parallel ranks are neighbours, stages are farthest apart: what is sent most goes the shortest way. Experts lie over the ranks of a
stage, in groups of `ep`, each of them split over `etp`.

Refused are models of other families than `MAPPED`, and what of a family's config changes what it computes in a way that is not
mapped: windows, biases, other activations, other positions, layers without experts among those with them (but DeepSeek's first).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from m2flow.engines.distributed import layers_of_stages, timeout_s_of
from m2flow.engines.registry import MAPPED
from m2flow.errors import EngineError, did_you_mean
from m2flow.recipe import Model

if TYPE_CHECKING:
    from m2flow.engines.models.routing import Mixture

LATENT = ("deepseek_v2", "deepseek_v3")
"""Those of `MAPPED` with latent attention, shared experts and, in their first layers, none."""
_ROPES = ("default", "linear", "llama3")
"""Kinds of rotary embeddings whose frequencies depend on nothing but the config. With latent attention there is YaRN, too."""
_OF_THE_PASSES = ("logprob_tokens", "share_prompts", "fp32_head", "head_logits")
"""Options that the embedded trainer reads by itself."""
_RECOMPUTED = ("", "selective", "full")
_IMPLS = ("auto", "local", "transformer_engine")


@dataclass(frozen=True)
class Options:
    """The options of `train: {engine: megatron}`."""

    tp: int = 1
    """Neighbouring ranks that split the matrices of each layer and the vocabulary."""
    sequence_parallel: bool = True
    """With `tp`, what lies between those matrices is split by rows."""
    pp: int = 1
    """Stages: each has a part of the layers, and micro-batches pass from one to the next (1F1B). Of layers that the stages do not divide
    the first stages have one more."""
    vpp: int = 1
    """Parts of the layers that each stage has, taken in turn (interleaved 1F1B): shorter bubbles, more messages."""
    micro_batches: int = 0
    """Parts in which a micro-batch passes through the stages; by default as many as stages. With `vpp` a multiple of the stages."""
    cp: int = 1
    """Ranks that share the rows of each sequence, and in the attention its heads (Ulysses)."""
    ep: int = 1
    """Ranks that the experts of a layer are spread over."""
    etp: int = 0
    """Ranks that split the matrices of an expert; by default as many as `tp`."""
    zero: int = 1
    """1: moments and float32 weights are spread over data-parallel ranks. 0: each has them whole."""
    offload_optimizer: bool = False
    """Moments and float32 weights are kept in the host's memory and stepped there, 16 bytes a weight with the gradients that come to it."""
    recompute: str = ""
    """`selective`: the attention is computed again in the backward pass. `full`: all of each layer."""
    transformer_impl: str = "auto"
    """`transformer_engine`: matrices, norms and grouped experts of layers are modules of that package. `local`: Megatron's own. `auto`: of
    the package, if Megatron finds it and the device is a GPU."""
    spread_checkpoints: bool = False
    """Every rank writes its part of a checkpoint, as of the train engine `fsdp`: nothing is gathered on the first. Of such a checkpoint, by
    whichever trainer, a rank reads what it holds."""
    collective_timeout_s: float = 600.0
    """Seconds that a rank waits in a collective, as of the train engine `fsdp`."""

    @property
    def num_alike(self) -> int:
        """Ranks that see the same samples."""
        return self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    @property
    def splits_rows(self) -> bool:
        """Whether tensor-parallel ranks split rows between their matrices."""
        return self.sequence_parallel and self.tp > 1

    @property
    def num_passes(self) -> int:
        """Parts of a micro-batch."""
        return self.micro_batches or self.pp

    def share_of(self, rank: int, num_ranks: int) -> int:
        """The data-parallel rank: which share of a batch this rank sees."""
        return rank // (self.tp * self.cp) % (num_ranks // self.num_alike)

    def reporters(self, num_ranks: int) -> list[int]:
        """By share, the rank that reports its results: the first of the last stage."""
        last = num_ranks // self.pp * (self.pp - 1)
        return [last + share * self.tp * self.cp for share in range(num_ranks // self.num_alike)]


def read(given: Mapping[str, object]) -> Options:
    """Read the options.

    Raises:
        EngineError: one that is none, or has no such value.

    >>> read({"tp": 2, "pp": 2}).num_alike
    4
    """
    kinds = {field.name: type(field.default) for field in fields(Options)}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _OF_THE_PASSES:
            continue
        if name not in kinds:
            raise EngineError(f"the train engine 'megatron' has no option {name!r}", now=did_you_mean(name, kinds))
        if type(value) is not kinds[name] and not (kinds[name] is float and type(value) is int):
            raise EngineError(f"the option {name} of the train engine 'megatron' is {value!r}, not a {kinds[name].__name__}")
        found[name] = value
    options = Options(**found)
    timeout_s_of(given)
    for name in ("tp", "pp", "vpp", "cp", "ep"):
        if getattr(options, name) < 1:
            raise EngineError(f"the option {name} of the train engine 'megatron' is {getattr(options, name)}", now="Write 1 or more.")
    for name, value in (("etp", options.etp), ("micro_batches", options.micro_batches)):
        if value < 0:
            raise EngineError(f"the option {name} of the train engine 'megatron' is {value}", now="Write 1 or more, or leave it out.")
    if options.zero not in (0, 1):
        raise EngineError(f"the train engine 'megatron' has no ZeRO stage {options.zero}", now="Write zero: 0 or 1.")
    if options.recompute not in _RECOMPUTED:
        raise EngineError(f"recompute is {options.recompute!r}", now="Write selective or full, or leave it out.")
    if options.transformer_impl not in _IMPLS:
        raise EngineError(f"transformer_impl is {options.transformer_impl!r}", now=f"Write {', '.join(_IMPLS[:-1])} or {_IMPLS[-1]}.")
    if options.vpp > 1 and (options.pp == 1 or options.num_passes % options.pp):
        what = "there is one stage" if options.pp == 1 else f"{options.num_passes} micro-batches are no multiple of {options.pp} stages"
        raise EngineError(f"vpp is {options.vpp}, and {what}", now="Leave vpp out, or give pp and a multiple of it as micro_batches.")
    return options


def held_by(given: Mapping[str, object], num_ranks: int, num_layers: int, num_experts: int) -> list[tuple[list[range], range]]:
    """The layers of each rank, in spans, and the experts of each of them, of which it has the part that `etp` says.

    Source:
        `TransformerLayer._get_layer_offset` and `parallel_state.initialize_model_parallel` of Megatron-core: stages are the outermost
        groups of ranks, chunk c of stage s is part c * pp + s of the layers, and the ranks of an expert are neighbours.

    >>> held_by({"pp": 2, "vpp": 2, "ep": 2}, 4, 9, 4)[2]
    ([range(3, 5), range(7, 9)], range(0, 2))
    """
    options = read(given)
    parts, size, experts = layers_of_stages(num_layers, options.pp * options.vpp), num_ranks // options.pp, num_experts // options.ep
    found = []
    for rank in range(num_ranks):
        stage, place = rank // size, rank % size // options.expert_tp % options.ep
        found.append((parts[stage :: options.pp], range(place * experts, (place + 1) * experts)))
    return found


def check_before(model: Model, given: Mapping[str, object], num_ranks: int) -> None:
    """Check all that can be known before a run. Raises `EngineError`, or `ModelError` for a model that is not there."""
    from m2flow.engines.models.model_files import config_of  # It loads transformers.

    options = read(given)
    check_ranks(options, num_ranks)
    config = config_of(model)
    check_model(config, options)
    mixture_of(model, config)
    check_adapters(model, config, options)


def check_adapters(model: Model, config: Any, options: Options) -> None:
    """Check that a model can have adapters, if it shall. Raises `EngineError`."""
    if model.lora is None:
        return
    found = {
        "on a mixture of experts": bool(num_experts(config)),
        f"on a model with a {model.head} head": model.head != "lm",
        "with checkpoints that each rank writes its part of (spread_checkpoints)": options.spread_checkpoints,
    }
    wrong = next((what for what, is_there in found.items() if is_there), "")
    if wrong:
        raise EngineError(f"the train engine 'megatron' has no adapters {wrong}", now="Leave lora= out, or use the train engine `fsdp`.")


def check_ranks(options: Options, num_ranks: int) -> None:
    """Check that the groups divide the number of ranks. Raises `EngineError`."""
    if num_ranks % options.num_alike:
        raise EngineError(
            f"tp * pp * cp is {options.num_alike}, which does not divide {num_ranks} ranks", now="Give train.ranks a multiple of it."
        )
    of_stage, of_experts = num_ranks // options.pp, options.expert_tp * options.ep
    if options.ep > 1 and of_stage % of_experts:
        raise EngineError(
            f"etp * ep is {of_experts}, which does not divide the {of_stage} ranks of a stage", now="Take a smaller ep, or etp: 1."
        )


def check_model(config: Any, options: Options) -> None:
    """Check that Megatron's model can be this one, in this layout.

    Args:
        config: of transformers.
    Raises:
        EngineError: it can't; with the field of the config that is in the way.
    """
    name = str(config.model_type)
    if name not in MAPPED:
        raise EngineError(
            f"the train engine 'megatron' has no place for the weights of a {name!r} model; it has for {', '.join(MAPPED)}",
            now="Use the train engine `fsdp` or `deepspeed`.",
        )
    wrong = next(_strange(config), "")
    if wrong:
        raise EngineError(f"a {name!r} model with {wrong} is not one that Megatron computes here", now="Use the train engine `fsdp`.")
    for option, degree, field, count in _divided(config, options):
        if count % degree:
            raise EngineError(
                f"{option} is {degree}, which does not divide the model's {field}, {count}", now=f"Take {option} so that it does."
            )
    stages, num_layers = options.pp * options.vpp, int(config.num_hidden_layers)
    if stages > num_layers:
        option = "pp * vpp" if options.vpp > 1 else "pp"
        raise EngineError(f"{option} is {stages}, and the model has {num_layers} layers", now=f"Take {option} so that each has a layer.")


def _strange(config: Any) -> Iterator[str]:
    """What of a config is not mapped."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    experts = num_experts(config)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    found = {
        f"hidden_act {config.hidden_act}": config.hidden_act != "silu",
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        f"sliding_window {window}": window is not None,
        f"layers of {', '.join(sorted(kinds))}": bool(kinds),
        f"rope_type {rope.get('rope_type')}": rope.get("rope_type", "default") not in (*_ROPES, *(("yarn",) if is_latent(config) else ())),
        "a partial_rotary_factor": float(rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1) != 1,
        "pretraining_tp": int(getattr(config, "pretraining_tp", 1)) != 1,
        "layers without experts": bool(experts)
        and (int(getattr(config, "decoder_sparse_step", 1)) != 1 or bool(getattr(config, "mlp_only_layers", None))),
        "router_jitter_noise": bool(experts) and bool(getattr(config, "router_jitter_noise", 0.0)),
    }
    yield from (what for what, is_there in found.items() if is_there)
    if is_latent(config):
        yield from _strange_latent(config)


def _strange_latent(config: Any) -> Iterator[str]:
    """What is not mapped of a config with latent attention."""
    predicting = int(getattr(config, "num_nextn_predict_layers", None) or 0)
    is_v3, dense, groups = config.model_type == "deepseek_v3", num_dense(config), int(getattr(config, "n_group", None) or 1)
    method = getattr(config, "topk_method", None)
    found = {
        # transformers leaves them out where it reads a checkpoint: they would be lost. The field says that this is meant.
        f"num_nextn_predict_layers {predicting} (layers that predict further tokens, which are neither trained nor saved: write 0 into its "
        "config.json to do without)": predicting > 0,
        f"first_k_dense_replace {dense}, so that no layer has experts,": dense >= int(config.num_hidden_layers),
        f"n_shared_experts {config.n_shared_experts}": not config.n_shared_experts,
        f"num_key_value_heads {config.num_key_value_heads}, other than its heads,": config.num_key_value_heads
        != config.num_attention_heads,
        "gates that are not normalised": is_v3 and not config.norm_topk_prob,
        "one expert a token": is_v3 and int(config.num_experts_per_tok) == 1,
        f"topk_method {method}": not is_v3 and method not in ("greedy", "group_limited_greedy"),
        f"n_group {groups}, which does not divide its experts,": bool(num_experts(config) % groups),
    }
    yield from (what for what, is_there in found.items() if is_there)


def _divided(config: Any, options: Options) -> Iterator[tuple[str, int, str, int]]:
    """Option, degree, what of the config it divides, and how much that is."""
    experts, kv_heads = num_experts(config), int(config.num_key_value_heads)
    for field, heads in (("num_attention_heads", int(config.num_attention_heads)), ("num_key_value_heads", kv_heads)):
        yield "tp", options.tp, field, heads
        if options.cp > 1:
            yield "tp * cp", options.tp * options.cp, field, heads
    if is_latent(config):
        yield "tp", options.tp, "width of the shared experts", shared_width(config)
        if num_dense(config):
            yield "tp", options.tp, "intermediate_size", int(config.intermediate_size)
    if experts:
        if options.tp > 1 and not options.sequence_parallel:
            raise EngineError(
                "Megatron's experts are not computed on whole rows by several tensor ranks", now="Leave sequence_parallel out."
            )
        yield "ep", options.ep, "number of experts", experts
        yield "etp" if options.etp else "tp", options.expert_tp, "width of an expert", expert_width(config)
    else:
        yield "tp", options.tp, "intermediate_size", int(config.intermediate_size)
        if options.ep > 1:
            raise EngineError(f"ep is {options.ep}, and a {config.model_type!r} model has no experts", now="Leave ep out.")


def mixture_of(model: Model, config: Any) -> Mixture | None:
    """The experts of a model. Raises `EngineError`: its routing should be replayed or balanced, and it has none, or no bias."""
    from m2flow.engines.models.routing import Mixture, not_a_mixture, without_bias  # It loads torch.

    count = num_experts(config)
    if (model.routing is not None or model.balance is not None) and not count:
        raise not_a_mixture(config.model_type)
    if model.balance is not None and model.balance.bias_step and not has_bias(config):
        raise without_bias(config.model_type)
    num_routers = int(config.num_hidden_layers) - num_dense(config)
    return Mixture(num_routers, int(config.num_experts_per_tok), count) if count else None


def num_experts(config: Any) -> int:
    """Experts of a layer; 0: it has none."""
    if config.model_type not in ("qwen3_moe", "mixtral", *LATENT):
        return 0
    return int(getattr(config, "num_experts", None) or config.num_local_experts)


def num_dense(config: Any) -> int:
    """Layers without experts, of a model with some: its first ones."""
    return int(config.first_k_dense_replace or 0) if is_latent(config) else 0


def is_latent(config: Any) -> bool:
    """Whether keys and values come from a latent that heads share."""
    return config.model_type in LATENT


def has_bias(config: Any) -> bool:
    """Whether routers add a bias to their scores, for the choice of experts alone."""
    return bool(config.model_type == "deepseek_v3")


def shared_width(config: Any) -> int:
    """The width of the shared experts, to which every token goes, together."""
    return int(config.moe_intermediate_size) * int(config.n_shared_experts)


def expert_width(config: Any) -> int:
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
