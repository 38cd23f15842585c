"""Trainers over several ranks, and what of a layout in stages or split experts can be known before a run, without loading torch.

model, train.options of `fsdp` --check_fsdp--> refused by name, or a layout
model, train.options of `deepspeed` --check_deepspeed--> likewise,  --read_deepspeed--> DeepSpeedOptions

rank r of tp * cp * dp * pp:   tp = r % tp,   cp = r / tp % cp,   dp = r / (tp cp) % dp,   pp = r / (tp cp dp);
                               which experts, of a mixture:   r % (tp ep)

Of a mixture `tp` splits attention and dense layers by their widths, and experts by number, as `ep` does: `tp * ep` neighbours have a
layer's experts, each some of them whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from m2flow.engines.registry import ONE_F_ONE_B, SPLIT, STACKED, STAGED, ZERO_BUBBLE
from m2flow.errors import EngineError, did_you_mean
from m2flow.recipe import Model, is_count

COLWISE, ROWWISE, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""A layer's weights split by output, by input; and weights that are whole on every rank, whose gradients are parts of a sum."""
_LATENT = {"q_proj": COLWISE, "q_b_proj": COLWISE, "kv_b_proj": COLWISE, "o_proj": ROWWISE}
"""How attention over latent vectors is split by heads, which the plan of `deepseek_v3` does not say."""
COLLECTIVE_TIMEOUT = "collective_timeout_s"
"""The option of trainers of several ranks that says how long they wait for each other."""


def timeout_s_of(options: Mapping[str, object]) -> float:
    """How many seconds ranks wait in a collective. Raises EngineError: the option is no such number."""
    given = options.get(COLLECTIVE_TIMEOUT, 600.0)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise EngineError(f"the option {COLLECTIVE_TIMEOUT} of the train engine is {given!r}", now="Write a number of seconds, above 0.")
    return float(given)


def check_fsdp(model: Model, options: Mapping[str, object], num_ranks: int) -> None:
    """Check what can be known of stages and experts before a run. Raises `EngineError`, or `ModelError` for a model that is not there."""
    timeout_s_of(options)
    if options.get("pp", 1) == 1 and options.get("vpp", 1) != 1:
        raise EngineError(
            f"the option vpp of the train engine 'fsdp' is {options['vpp']!r}, without pp", now="Write pp too, or leave vpp out."
        )
    check_schedule(options)
    check_context(options, num_ranks)
    if options.get("pp", 1) == options.get("ep", 1) == options.get("tp", 1) == 1:
        return
    from m2flow.engines.models.model_files import config_of  # It loads transformers.

    config = config_of(model)
    if options.get("tp", 1) != 1:
        check_split_layers(config, options, num_ranks)
    if options.get("ep", 1) != 1 or (options.get("tp", 1) != 1 and config.get_text_config().model_type in STACKED):
        check_experts(config, options, num_ranks)
    if options.get("pp", 1) != 1:
        check_stages(config, model, options, num_ranks)


def layers_of_stages(num_layers: int, count: int) -> list[range]:
    """Spread layers over stages; the first stages have one more where they do not divide.

    >>> layers_of_stages(5, 2)
    [range(0, 3), range(3, 5)]
    """
    each, more = divmod(num_layers, count)
    starts = [stage * each + min(stage, more) for stage in range(count + 1)]
    return [range(*bounds) for bounds in itertools.pairwise(starts)]


def held_by_fsdp(options: Mapping[str, object], num_ranks: int, num_layers: int, num_experts: int) -> list[tuple[list[range], range]]:
    """The layers of each rank, in spans, and the experts of each of them.

    >>> held_by_fsdp({"pp": 2, "ep": 2}, 4, 5, 8)[1]
    ([range(0, 3)], range(4, 8))
    """
    tp, pp, ep, vpp = (int(str(n)) if is_count(n := options.get(name, 1)) else 1 for name in ("tp", "pp", "ep", "vpp"))
    spans, size, ways = layers_of_stages(num_layers, pp * vpp), num_ranks // pp, tp * ep
    each = num_experts // ways
    places = [rank % ways for rank in range(num_ranks)]
    return [(spans[rank // size :: pp], range(place * each, (place + 1) * each)) for rank, place in enumerate(places)]


def check_context(options: Mapping[str, object], num_ranks: int) -> None:
    """Check that sequences can be split over ranks as the options say. Raises `EngineError`."""
    if options.get("cp", 1) == 1:
        return
    degrees = {name: options.get(name, 1) for name in ("tp", "cp", "pp")}
    for name, degree in degrees.items():
        if not is_count(degree):
            raise EngineError(f"the option {name} of the train engine 'fsdp' is {degree!r}", now="Write a whole number.")
    where, product = " * ".join(name for name, one in degrees.items() if one != 1), math.prod(int(str(one)) for one in degrees.values())
    if num_ranks % product:
        raise EngineError(f"{where} is {product}, which does not divide {num_ranks} ranks", now="Give train.ranks a multiple of it.")


def check_schedule(options: Mapping[str, object]) -> None:
    """Check the order in which stages are to compute. Raises `EngineError`."""
    schedule = options.get("schedule", ONE_F_ONE_B)
    said = f"the option schedule of the train engine 'fsdp' is {schedule!r}"
    if schedule not in (ONE_F_ONE_B, ZERO_BUBBLE):
        raise EngineError(said, now=f"Write {ONE_F_ONE_B} or {ZERO_BUBBLE}.")
    if schedule == ZERO_BUBBLE and options.get("pp", 1) == 1:
        raise EngineError(f"{said}, without pp", now="Write pp too, or leave schedule out.")


def plan_of(config: Any, tp: int, *, with_experts: bool = False) -> dict[str, str]:
    """Read how an architecture's layers are split: COLWISE, ROWWISE or SUMMED, by pattern of names below `base_model`.

    Args:
        config: of transformers.
        with_experts: whether experts are split in another way, so that nothing need be said of them.
    Raises:
        EngineError: it has no plan for it, another one, or heads that do not divide.
    """
    config = config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if with_experts and config.model_type in STACKED:
        plan = {pattern: style for pattern, style in plan.items() if ".experts" not in pattern}
        if getattr(config, "kv_lora_rank", None):
            attention = {f"layers.*.self_attn.{name}": style for name, style in _LATENT.items()}
            plan = {pattern: style for pattern, style in plan.items() if ".self_attn." not in pattern} | attention
    unknown = sorted(set(plan.values()) - {COLWISE, ROWWISE, SUMMED})
    if not plan or unknown or config.model_type not in SPLIT:
        what = "has none" if not plan else f"wants {', '.join(unknown)}" if unknown else "is not known"
        raise EngineError(
            f"a {config.model_type!r} model can't be split over ranks here: its tensor-parallel plan {what}", now="Leave tp out."
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (count := int(getattr(config, name))) % tp:
            raise EngineError(f"tp is {tp}, which does not divide the model's {name}, {count}", now="Take a tp that does.")
    return plan


def check_split_layers(config: Any, options: Mapping[str, object], num_ranks: int) -> None:
    """Check that a model's layers can be split over tensor ranks as the options say.

    Args:
        config: of transformers.
    Raises:
        EngineError: they can't; with the option, or the field of the config, that is in the way.
    """
    if not is_count(options["tp"]):
        raise EngineError(f"the option tp of the train engine 'fsdp' is {options['tp']!r}", now="Write a whole number.")
    tp = int(str(options["tp"]))
    if num_ranks % tp:
        raise EngineError(f"tp is {tp}, which does not divide {num_ranks} ranks", now="Give train.ranks a multiple of train.options.tp.")
    plan_of(config, tp, with_experts=True)


def check_experts(config: Any, options: Mapping[str, object], num_ranks: int) -> None:
    """Check that a model's experts can be split over ranks as the options say.

    Args:
        config: of transformers.
    Raises:
        EngineError: they can't; with the option, or the field of the config, that is in the way.
    """
    for name in ("ep", "pp", "tp"):
        if not is_count(options.get(name, 1)):
            raise EngineError(f"the option {name} of the train engine 'fsdp' is {options[name]!r}", now="Write a whole number.")
    from m2flow.engines.models.hf_model import num_experts

    degrees = {name: int(str(options.get(name, 1))) for name in ("tp", "ep", "pp")}
    written = [name for name, degree in degrees.items() if degree > 1]
    where, product = " * ".join(written), math.prod(degrees.values())
    if num_ranks % product:
        raise EngineError(f"{where} is {product}, which does not divide {num_ranks} ranks", now="Give train.ranks a multiple of it.")
    config = config.get_text_config()
    if config.model_type not in STACKED:
        raise EngineError(
            f"experts of a {config.model_type!r} model can't be split over ranks here; those of {', '.join(STACKED)} can",
            now="Leave ep out.",
        )
    count, ways = num_experts(config), degrees["tp"] * degrees["ep"]
    if count % ways:
        named = " * ".join(name for name in written if name != "pp")
        raise EngineError(f"{named} is {ways}, which does not divide the model's {count} experts", now="Take degrees that do.")
    width, replicas = int(getattr(config, "moe_intermediate_size", config.intermediate_size)), num_ranks // product
    if 2 * width % replicas or config.hidden_size % replicas:
        what = f"{replicas} ranks that hold the same experts can't share out experts of {config.hidden_size} times {width}"
        raise EngineError(what, now="Take a larger ep, or another number of ranks.")


def check_stages(config: Any, model: Model, options: Mapping[str, object], num_ranks: int) -> None:
    """Check that a model's layers can be spread over stages as the options say.

    Args:
        config: of transformers.
    Raises:
        EngineError: they can't; with the option, or the field of the config, that is in the way.
    """
    from m2flow.engines.models.hf_model import num_experts
    from m2flow.engines.models.routing import not_a_mixture

    for name in ("pp", "tp", "vpp", "micro_batches"):
        if not is_count(options.get(name, 1)):
            raise EngineError(f"the option {name} of the train engine 'fsdp' is {options[name]!r}", now="Write a whole number.")
    pp, tp = (int(str(options.get(name, 1))) for name in ("pp", "tp"))
    if num_ranks % (pp * tp):
        raise EngineError(f"tp * pp is {tp * pp}, which does not divide {num_ranks} ranks", now="Give train.ranks a multiple of it.")
    if config.model_type not in STAGED:
        raise EngineError(
            f"the layers of a {config.model_type!r} model can't be spread over stages here; those of {', '.join(STAGED)} can",
            now="Leave pp out, or take the train engine `megatron`.",
        )
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}):
        raise EngineError(
            f"a {config.model_type!r} model with layers of {', '.join(other)} can't be spread over stages", now="Leave pp out."
        )
    vpp, count = int(str(options.get("vpp", 1))), int(config.num_hidden_layers)
    if count < pp * vpp:
        what = f"pp is {pp}" if vpp == 1 else f"pp * vpp is {pp * vpp}"
        raise EngineError(f"{what}, and the model has {count} layers", now="Take fewer stages.")
    if vpp > 1 and (passes := int(str(options.get("micro_batches", pp)))) % pp:
        raise EngineError(
            f"micro_batches is {passes}, which is no multiple of pp, {pp}, as vpp needs", now="Take a multiple, or leave vpp out."
        )
    if (model.routing is not None or model.balance is not None) and not num_experts(config):
        raise not_a_mixture(config.model_type)


# ---- options of `deepspeed`

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NVME = "nvme"
"""Offloaded to a drive, not to the host's memory."""
_OFFLOADS = ("offload_optimizer", "offload_parameters")
_OF_THE_PASSES = ("logprob_tokens", "share_prompts", "fp32_head", "head_logits")
"""Options that the embedded trainer reads by itself."""

_TENSOR_PARALLEL = ("no option of that name", "Write tp: 2 for ranks that split layers among them (AutoTP).")
_SEQUENCE_PARALLEL = ("no option of that name", "Write sp: 2 for ranks that split sequences among them (Ulysses).")
_REFUSED = {
    **dict.fromkeys(("autotp_size", "tensor_parallel"), _TENSOR_PARALLEL),
    **dict.fromkeys(("ulysses", "sequence_parallel", "sequence_parallel_size"), _SEQUENCE_PARALLEL),
}
"""Options of DeepSpeed's own configuration -> what to write instead."""


@dataclass(frozen=True)
class DeepSpeedOptions:
    """The options of `train: {engine: deepspeed}`."""

    zero: int = 1
    """ZeRO stage. 0: nothing is sharded. 1: the optimiser's state. 2: gradients too. 3: weights too. Take the lowest that fits."""
    tp: int = 1
    """Neighbouring ranks that split the layers among them (AutoTP)."""
    sp: int = 1
    """Neighbouring ranks that share each sequence, and in the attention the heads (Ulysses)."""
    compute_dtype: str = ""
    """Type of the passes; by default the model's own. Below float32, weights and moments are kept in float32 beside it."""
    offload_optimizer: bool | str = False
    """Moments and float32 weights are kept in the host's memory and stepped there (`zero` 1 to 3). `nvme`: moments on a drive, in stage 3
    those weights too."""
    offload_parameters: bool | str = False
    """Weights are kept in the host's memory (`zero: 3`). `nvme`: on a drive, which needs libaio."""
    nvme_path: str = ""
    """A directory on that drive."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer, and recompute the rest in the backward pass."""
    loss_scale: float = 0.0
    """float16: what a loss is multiplied by; 0 searches for a scale, from `initial_loss_scale` on."""
    initial_loss_scale: float = 65536.0
    """float16: where the search for a scale starts."""
    bucket_elements: int = 50_000_000
    """Numbers sent at a time."""
    collective_timeout_s: float = 600.0
    """Seconds that a rank waits in a collective: longer than any pass, step or checkpoint takes another one. Then the step ends, with the
    rank that hangs and its call, pass and layer in the error, and the run goes on from its last checkpoint."""


def read_deepspeed(given: Mapping[str, object], model_dtype: str) -> DeepSpeedOptions:
    """Read the options, and fill in the precision.

    Raises:
        EngineError: one that is none, or two that do not go together.
    """
    kinds = {field.name: type(field.default) for field in fields(DeepSpeedOptions)}
    timeout_s_of(given)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _OF_THE_PASSES:
            continue
        if (refused := _REFUSED.get(name)) is not None:
            raise EngineError(f"the train engine 'deepspeed' has {refused[0]}", now=refused[1])
        if name not in kinds:
            raise EngineError(f"the train engine 'deepspeed' has no option {name!r}", now=did_you_mean(name, kinds))
        fits = type(value) in (int, float) if kinds[name] is float else type(value) is kinds[name]
        if not fits and not (name in _OFFLOADS and value == NVME):
            raise EngineError(f"the option {name} of the train engine 'deepspeed' is {value!r}, not a {kinds[name].__name__}")
        found[name] = value
    options = DeepSpeedOptions(**{"compute_dtype": model_dtype, **found})
    _check_stage(options)
    return options


def _check_stage(options: DeepSpeedOptions) -> None:
    if options.zero not in (0, 1, 2, 3):
        raise EngineError(f"there is no ZeRO stage {options.zero}", now="Write zero: 0, 1, 2 or 3.")
    if options.compute_dtype not in PRECISIONS:
        raise EngineError(f"DeepSpeed has no passes in {options.compute_dtype!r}", now=f"Write {', '.join(PRECISIONS)}.")
    if options.compute_dtype != "float32" and options.zero == 0:
        # Its wrapper keeps masters that nothing public can read, so no checkpoint could be written.
        raise EngineError(
            f"ZeRO stage 0 keeps its float32 weights out of reach in {options.compute_dtype}",
            now="Write zero: 1, which spreads nothing on one rank.",
        )
    if options.offload_optimizer and options.zero == 0:
        raise EngineError("ZeRO stage 0 can't keep its optimiser in the host's memory", now="Write zero: 1.")
    if options.offload_parameters and options.zero != 3:
        raise EngineError(f"ZeRO stage {options.zero} can't keep its weights in the host's memory", now="Write zero: 3.")
    on_drive = [name for name in _OFFLOADS if getattr(options, name) == NVME]
    if on_drive and not options.nvme_path:
        raise EngineError(f"{on_drive[0]} is {NVME}, and no drive is named", now="Write nvme_path: a directory on it.")
    if options.nvme_path and not on_drive:
        raise EngineError("nvme_path names a drive, and nothing is kept there", now="Write offload_optimizer: nvme.")


def check_groups(options: DeepSpeedOptions, num_ranks: int) -> None:
    """Check that groups divide the number of ranks. Raises `EngineError`."""
    for name in ("tp", "sp"):
        degree = getattr(options, name)
        if degree < 1 or num_ranks % degree:
            raise EngineError(
                f"{name} is {degree}, which does not divide {num_ranks} ranks", now=f"Give train.ranks a multiple of train.options.{name}."
            )
    if options.tp > 1 and options.sp > 1:
        raise EngineError(
            "layers are not split over some ranks and sequences over others at once", now="Leave tp or sp out; zero: 3 spreads weights too."
        )


def check_split_adapters(options: DeepSpeedOptions, model: Model) -> None:
    """Refuse adapters in half precision: the base would be rounded, and the checkpoint with it. Raises `EngineError`."""
    if model.lora is not None and options.tp > 1:
        raise EngineError("adapters are not split over tensor-parallel ranks", now="Leave tp out, and spread the base with zero: 3.")
    if model.lora is not None and options.compute_dtype != model.dtype:
        raise EngineError(
            f"DeepSpeed would round the weights beside the adapters from {model.dtype} to {options.compute_dtype}, and keep no others",
            now=f"Write Policy(..., dtype={options.compute_dtype!r}) in the flow, or leave compute_dtype out.",
        )


def check_deepspeed(model: Model, given: Mapping[str, object], num_ranks: int) -> None:
    """Check all that can be known before a run. Raises `EngineError`, or `ModelError` for a model that is not there."""
    options = read_deepspeed(given, model.dtype)
    check_groups(options, num_ranks)
    check_split_adapters(options, model)
    if options.tp == options.sp == 1:
        return
    from m2flow.engines.models.model_files import config_of  # It loads transformers.

    config = config_of(model)
    if options.tp > 1:
        plan_of(config, options.tp)
    else:
        check_heads(config.get_text_config(), options.sp)


def check_heads(config: Any, sp: int) -> None:
    """Check that the ranks divide a model's heads. Raises `EngineError`."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := int(getattr(config, name))) % sp:
            raise EngineError(f"sp is {sp}, which does not divide the model's {name}, {heads}", now="Take an sp that does.")
    if getattr(config, "v_head_dim", None):
        raise EngineError(
            f"a {config.model_type!r} model has keys and values of two sizes, which `sp` does not support", now="Leave sp out."
        )
