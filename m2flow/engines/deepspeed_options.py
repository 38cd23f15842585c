"""What a cluster spec may ask of DeepSpeed, and the configuration that it becomes. The library itself is not needed for this.

    train.options --read--> Options --configuration--> what `deepspeed.initialize` is told

The plan sets the boundary of gradient accumulation, so the library is told that its caller does (`managed_gradient_accumulation: false`):
every `step` is one. Clipping, the rate and AdamW itself are the recipe's, in `m2flow.engines.recipe_adamw`.

Source: DeepSpeed's configuration reference, release 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from m2flow.errors import EngineError, did_you_mean
from m2flow.recipe import Model

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NVME = "nvme"
"""Offloaded to a drive, not to the host's memory."""
_OFFLOADS = ("offload_optimizer", "offload_parameters")
_OF_THE_PASSES = ("logprob_tokens", "share_prompts")
"""Options that the embedded trainer reads by itself."""

_TENSOR_PARALLEL = ("no option of that name", "Write tp: 2 for ranks that split layers among them (AutoTP).")
_SEQUENCE_PARALLEL = ("no option of that name", "Write sp: 2 for ranks that split sequences among them (Ulysses).")
_REFUSED = {
    **dict.fromkeys(("autotp_size", "tensor_parallel"), _TENSOR_PARALLEL),
    **dict.fromkeys(("ulysses", "sequence_parallel", "sequence_parallel_size"), _SEQUENCE_PARALLEL),
}
"""The library's words: what to write instead."""


@dataclass(frozen=True)
class Options:
    """The options of `train: {engine: deepspeed}`."""

    zero: int = 1
    """ZeRO stage. 0: nothing is spread. 1: the optimiser's state. 2: gradients too. 3: weights too."""
    tp: int = 1
    """Neighbouring ranks that split the layers among them (AutoTP)."""
    sp: int = 1
    """Neighbouring ranks that have a part of each sequence, and in the attention a part of the heads (Ulysses)."""
    compute_dtype: str = ""
    """Type of the passes; by default the model's own. Below float32, weights and moments are kept in float32 beside it."""
    offload_optimizer: bool | str = False
    """Moments and float32 weights live in the host's memory, and are stepped there. `nvme`: moments on a drive, in stage 3 those weights
    too."""
    offload_parameters: bool | str = False
    """Stage 3: the weights live in the host's memory, and come for their turn. `nvme`: on a drive."""
    nvme_path: str = ""
    """A directory on that drive."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer, and compute the rest again in the backward pass."""
    loss_scale: float = 0.0
    """float16: what a loss is multiplied by; 0 finds it by itself, from `initial_loss_scale`."""
    initial_loss_scale: float = 65536.0
    bucket_elements: int = 50_000_000
    """Numbers that are sent at a time."""


def read(given: Mapping[str, object], model_dtype: str) -> Options:
    """The options, with the precision filled in.

    Raises:
        EngineError: one that is none, or two that do not go together.
    """
    kinds = {field.name: type(field.default) for field in fields(Options)}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _OF_THE_PASSES:
            continue
        if (refused := _REFUSED.get(name)) is not None:
            raise EngineError(f"the train engine 'deepspeed' has {refused[0]}", now=refused[1])
        if name not in kinds:
            raise EngineError(f"the train engine 'deepspeed' has no option {name!r}", now=did_you_mean(name, kinds))
        fits = isinstance(value, (int, float)) if kinds[name] is float else type(value) is kinds[name]
        if not fits and not (name in _OFFLOADS and value == NVME):
            raise EngineError(f"the option {name} of the train engine 'deepspeed' is {value!r}, not a {kinds[name].__name__}")
        found[name] = value
    options = Options(**{"compute_dtype": model_dtype, **found})
    _check(options)
    return options


def _check(options: Options) -> None:
    if options.zero not in (0, 1, 2, 3):
        raise EngineError(f"there is no ZeRO stage {options.zero}", now="Write zero: 0, 1, 2 or 3.")
    if options.compute_dtype not in _PRECISIONS:
        raise EngineError(f"DeepSpeed has no passes in {options.compute_dtype!r}", now=f"Write {', '.join(_PRECISIONS)}.")
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


def check_ranks(options: Options, num_ranks: int) -> None:
    """Raises `EngineError`: so many ranks are no groups of that size."""
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


def check_adapters(options: Options, model: Model) -> None:
    """Raises `EngineError`: what is not trained would be rounded, and the checkpoint with it."""
    if model.lora is not None and options.tp > 1:
        raise EngineError("adapters are not split over tensor-parallel ranks", now="Leave tp out, and spread the base with zero: 3.")
    if model.lora is not None and options.compute_dtype != model.dtype:
        raise EngineError(
            f"DeepSpeed would round the weights beside the adapters from {model.dtype} to {options.compute_dtype}, and keep no others",
            now=f"Write Policy(..., dtype={options.compute_dtype!r}) in the flow, or leave compute_dtype out.",
        )


def configuration(
    options: Options, *, pin_memory: bool, largest: int = 0, tensor_parallel: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `deepspeed.initialize` is told.

    Args:
        pin_memory: what is in the host's memory is for a device that reads it there.
        largest: numbers of the model's largest weight.
        tensor_parallel: how layers are split.
    """
    zero: dict[str, Any] = {
        "stage": options.zero,
        "reduce_bucket_size": options.bucket_elements,
        "overlap_comm": False,  # The reduction of a micro-batch ends before the next one's sums are told.
    }
    if options.zero in (1, 2):
        zero["allgather_bucket_size"] = options.bucket_elements
    if options.zero == 3:
        # One group of all parts: the optimiser needs the whole gradient's norm when it steps on the first.
        zero["sub_group_size"] = 10**15
        zero["stage3_prefetch_bucket_size"] = options.bucket_elements
        # Otherwise torch's linear is replaced, for every engine of the process, and gradients come in another order than on other ranks.
        zero["memory_efficient_linear"] = False
    where = {"device": "cpu", "pin_memory": pin_memory}
    if options.offload_optimizer:
        zero["offload_optimizer"] = where
    if options.offload_parameters:
        zero["offload_param"] = where
    if options.offload_parameters == NVME:
        zero["offload_param"] = {**where, "device": NVME, "nvme_path": options.nvme_path, "buffer_size": largest, "max_in_cpu": 0}
    told: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**62,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if tensor_parallel is not None:
        told["tensor_parallel"] = dict(tensor_parallel)
    if options.compute_dtype == "bfloat16":
        told["bf16"] = {"enabled": True}
        told["data_types"] = {"grad_accum_dtype": "fp32"}
    if options.compute_dtype == "float16":
        power = max(0, round(options.initial_loss_scale).bit_length() - 1)
        told["fp16"] = {"enabled": True, "loss_scale": options.loss_scale, "initial_scale_power": power}
        told["data_types"] = {"grad_accum_dtype": "fp32"}
    return told
