"""Trainers over several ranks, and what of a layout in stages or split experts can be known before a run, without loading torch.

model, train.options of `fsdp` --check_fsdp--> refused by name, or a layout

rank r of tp * cp * dp * pp:   tp = r % tp,   cp = r / tp % cp,   dp = r / (tp cp) % dp,   pp = r / (tp cp dp);
                               which experts, of a mixture:   r % (tp ep)

Of a mixture `tp` splits attention and dense layers by their widths, and experts by number, as `ep` does: `tp * ep` neighbours have a
layer's experts, each some of them whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from m2flow.engines.contract import ONE_F_ONE_B, ZERO_BUBBLE
from m2flow.errors import EngineError
from m2flow.recipe import Model, is_count

STACKED = ("deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Values of `model_type` whose experts `fsdp` can split over ranks."""
STAGED = ("llama", "qwen2", "qwen3", *STACKED)
"""Values of `model_type` whose layers `fsdp` can spread over stages."""
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
    if not plan or unknown:
        what = f"wants {', '.join(unknown)}" if unknown else "has none"
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
