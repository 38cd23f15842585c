"""Trainers over several ranks, and what of a layout in stages can be known before a run, without loading torch.

model, train.options of `fsdp` --check_fsdp--> refused by name, or a layout

rank r of tp * dp * pp:   tp = r % tp,   dp = r / tp % dp,   pp = r / (tp dp)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m2flow.errors import EngineError
from m2flow.recipe import Model, is_count

STAGED = ("llama", "qwen2", "qwen3")
"""Values of `model_type` whose layers `fsdp` can spread over stages."""


def check_fsdp(model: Model, options: Mapping[str, object], num_ranks: int) -> None:
    """Check what can be known of stages before a run. Raises `EngineError`, or `ModelError` for a model that is not there."""
    if options.get("pp", 1) == 1:
        return
    from m2flow.engines.models.hf_model import config_of  # It loads transformers.

    check_stages(config_of(model), model, options, num_ranks)


def check_stages(config: Any, model: Model, options: Mapping[str, object], num_ranks: int) -> None:
    """Check that a model's layers can be spread over stages as the options say.

    Args:
        config: of transformers.
    Raises:
        EngineError: they can't; with the option, or the field of the config, that is in the way.
    """
    for name in ("pp", "tp", "micro_batches"):
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
    if (count := int(config.num_hidden_layers)) < pp:
        raise EngineError(f"pp is {pp}, and the model has {count} layers", now="Take fewer stages.")
    if model.routing is not None or model.balance is not None:
        what = f"a {config.model_type!r} model is no mixture of experts whose routing can be replayed or balanced"
        raise EngineError(what, now="Leave replay_routing and balance out.")
    if model.lora is not None:
        raise EngineError("adapters are not spread over stages", now="Leave pp out: each rank holds a part of the base anyway.")
