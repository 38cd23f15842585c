"""Trainers over several ranks, and what of a layout in stages or split experts can be known before a run, without loading torch.

model, train.options of `fsdp` --check_fsdp--> refused by name, or a layout

rank r of tp * dp * pp:   tp = r % tp,   dp = r / tp % dp,   pp = r / (tp dp);   with ep (tp is 1):   ep = r % ep
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m2flow.engines.contract import ONE_F_ONE_B, ZERO_BUBBLE
from m2flow.errors import EngineError
from m2flow.recipe import Model, is_count

STACKED = ("deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Values of `model_type` whose experts `fsdp` can split over ranks."""
STAGED = ("llama", "qwen2", "qwen3", *STACKED)
"""Values of `model_type` whose layers `fsdp` can spread over stages."""


def check_fsdp(model: Model, options: Mapping[str, object], num_ranks: int) -> None:
    """Check what can be known of stages and experts before a run. Raises `EngineError`, or `ModelError` for a model that is not there."""
    if options.get("pp", 1) == 1 and options.get("vpp", 1) != 1:
        raise EngineError(
            f"the option vpp of the train engine 'fsdp' is {options['vpp']!r}, without pp", now="Write pp too, or leave vpp out."
        )
    check_schedule(options)
    if options.get("pp", 1) == options.get("ep", 1) == 1:
        return
    from m2flow.engines.models.model_files import config_of  # It loads transformers.

    config = config_of(model)
    if options.get("ep", 1) != 1:
        check_experts(config, options, num_ranks)
    if options.get("pp", 1) != 1:
        check_stages(config, model, options, num_ranks)


def check_schedule(options: Mapping[str, object]) -> None:
    """Check the order in which stages are to compute. Raises `EngineError`."""
    schedule = options.get("schedule", ONE_F_ONE_B)
    said = f"the option schedule of the train engine 'fsdp' is {schedule!r}"
    if schedule not in (ONE_F_ONE_B, ZERO_BUBBLE):
        raise EngineError(said, now=f"Write {ONE_F_ONE_B} or {ZERO_BUBBLE}.")
    if schedule == ZERO_BUBBLE and options.get("pp", 1) == 1:
        raise EngineError(f"{said}, without pp", now="Write pp too, or leave schedule out.")
    if schedule == ZERO_BUBBLE and options.get("tp", 1) != 1:
        raise EngineError(f"{said}, with tp: gradients of split weights are not put off", now="Leave tp or schedule out.")


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

    ep = int(str(options["ep"]))
    pp = int(str(options.get("pp", 1)))
    if options.get("tp", 1) != 1:
        raise EngineError(
            "experts are not split over ranks together with tp", now="Leave ep or tp out, or take the train engine `megatron`."
        )
    if num_ranks % (ep * pp):
        product, what = ("ep", "train.options.ep") if pp == 1 else ("ep * pp", "both")
        raise EngineError(f"{product} is {ep * pp}, which does not divide {num_ranks} ranks", now=f"Give train.ranks a multiple of {what}.")
    config = config.get_text_config()
    if config.model_type not in STACKED:
        raise EngineError(
            f"experts of a {config.model_type!r} model can't be split over ranks here; those of {', '.join(STACKED)} can",
            now="Leave ep out.",
        )
    count = num_experts(config)
    if count % ep:
        raise EngineError(f"ep is {ep}, which does not divide the model's {count} experts", now="Take an ep that does.")
    width, replicas = int(getattr(config, "moe_intermediate_size", config.intermediate_size)), num_ranks // (ep * pp)
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
    if model.routing is not None or model.balance is not None:
        if not num_experts(config):
            raise not_a_mixture(config.model_type)
        what = f"routing of a {config.model_type!r} model is neither replayed nor balanced over stages"
        raise EngineError(what, now="Leave replay_routing and balance out, or pp, or take the train engine `megatron`.")
    if model.lora is not None:
        raise EngineError("adapters are not spread over stages", now="Leave pp out: each rank holds a part of the base anyway.")
