"""Activation checkpointing of a model of transformers: of each layer only its input is kept; the rest is computed again for gradients."""

from __future__ import annotations

import warnings
from typing import Any

from m2flow.errors import ModelError


def recompute_layers(model: Any) -> None:
    """Have every layer computed again in the backward pass.

    Raises:
        ModelError: the architecture can't, or has dropout, which would differ the second time.
    """
    config = model.config.get_text_config()
    dropout = [name for name in dir(config) if ("dropout" in name or "pdrop" in name) and isinstance(getattr(config, name), float)]
    if any(getattr(config, name) for name in dropout):
        raise ModelError(f"activation checkpointing needs a model without dropout, and this one has {', '.join(dropout)}")
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(f"a {config.model_type!r} model has no activation checkpointing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Transformers 6 will have another name for it.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True  # Of this module alone: its layers ask it before they keep less.
