"""Train with DeepSpeed: ZeRO's stages over any number of ranks, with states on the device, in the host's memory or on an NVMe drive.

    every rank:  the same micro-batch --shares--> its own samples --packed passes--> gradients --DeepSpeed--> parts, averaged
                 apply: parts * ranks / denominator --clip--> `RecipeAdamW` on the parts that this rank holds --DeepSpeed--> weights

    train.options --read_deepspeed--> DeepSpeedOptions --configuration--> what `deepspeed.initialize` is told

How a batch is shared out is in `m2flow.engines.distributed.ranks`. Only the public interface of an unpatched release is used. The plan sets
the boundary of gradient accumulation (`managed_gradient_accumulation: false`): every `step` is one. Clipping, rate and AdamW itself
are the recipe's (`m2flow.engines.models.optimizers`). A checkpoint is the embedded trainer's: any trainer goes on from it, over any
number of ranks and in any stage, so the library's own format, bound to both, is not needed. It has no optimiser but AdamW.

Where release 0.19.8 deviates from its documentation or from the other trainers (`tests/engines/distributed/test_deepspeed.py` tests each):

- It averages gradients over ranks and wants to know the last micro-batch in advance: sums are accumulated, and the plan ends a mini-batch.
- It fixes clipping and learning rate at the start: a recipe's AdamW is passed as a client optimiser that clips, with moments, rate and
  threshold per recipe, and reports one norm in every stage.
- Its wrappers take a first step with zeros, which counts in Adam's bias correction: the client optimiser moves only when a step is due.
- Stage 0 in half precision keeps float32 weights out of reach: refused.
- It rounds float32 weights and rotary tables to bfloat16 before it makes masters: both are restored.
- Stage 3 replaces `torch.nn.functional.linear` for the whole process: turned off, since ranks with and without it would add gradients in
  different orders in stage 2, unnoticed.
- `offload_states` loses the moments in stages 1 and 2 and needs its own Adam in stage 3: moments and partitions are moved here.
- Stage 3 compares numbers that each process counts, so a process that was a rank of another stage 3 hangs: the counters are aligned.
- An interrupted compilation leaves a lock that blocks every later start: locks of compilations that nobody runs any more are removed.
- AutoTP saves one rank's part of each layer, or gathers the whole model: each weight is assembled when it is sent or saved, one at a time.
- AutoTP pickles the first micro-batch to compare it among the ranks of a group: removed. A norm counts what is not split once.
- With a sequence group (`mpu`), stages 1 and 2 report a norm too large by the group's size: it is not told of the group, as gradients of
  data-parallel ranks are sums in any case.
- Its NVMe optimiser swapping knows only its own optimiser: the moments of every recipe are memory-mapped from files.

`NvmeOffload` maps optimiser states from files; the operating system moves pages as they are needed. A file gets its full size before it is
mapped, so a full drive is an error then and no signal later. It is unlinked once mapped: its space is free again when the tensor is gone or
the process has ended, in whatever way. No other process reads it; checkpoints are elsewhere.

Limits:
    start: every rank reads the whole model once, into the memory of its host. On a CPU the library compiles a part of itself when it is
        first used, for a minute, so a C++ compiler must be there.
    precision: stage 0 with `bfloat16` or `float16` is refused (take stage 1), as is `float16` on CPUs.
    tensor and sequence parallel: `tp` and `sp` divide the ranks, work with every stage, and exclude each other. `tp` has the limits of
        `fsdp`, and no adapters. `sp` is for sequences whose activations do not fit one device; it works with adapters, replayed routing and
        balance, and needs heads that divide.

Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO); Ren et al. 2021, arXiv:2101.06840 (ZeRO-Offload); Rajbhandari et al. 2021,
arXiv:2104.07857 (ZeRO-Infinity), which reads and writes by calls of its own; DeepSpeed's configuration reference, release 0.19.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines import installed
from m2flow.engines.contract import MOVED, EngineSettings
from m2flow.engines.distributed import (
    NVME,
    DeepSpeedOptions,
    check_groups,
    check_split_adapters,
    model_parallel,
    read_deepspeed,
    sequence_parallel,
)
from m2flow.engines.distributed.ranks import RankedTrain, Root, stopping_if_it_fails
from m2flow.engines.models import lora, packing, trainer_checkpoint
from m2flow.engines.models.hf_model import groups_of_weights, keep_freed_memory, layers, load_model, use_threads
from m2flow.engines.models.model_files import load_tokenizer
from m2flow.engines.models.optimizers import RecipeAdamW, packed_state, unpacked_state
from m2flow.engines.models.packing import Demonstrations
from m2flow.engines.models.routing import checked_routers
from m2flow.engines.registry import built_in
from m2flow.errors import EngineError, MissingExtra, ModelError
from m2flow.recipe import AdamW, Model, Optimizer
from m2flow.samples import Batch, Ragged, make_ids


class NvmeOffload:
    """Keeps tensors in files of a directory, mapped into memory."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def map_tensor(self, tensor: Tensor) -> Tensor:
        """Move a tensor's values to a file, and return them mapped into the host's address space.

        Raises:
            EngineError: the directory can't be written, or has no room.
        """
        size = tensor.numel() * tensor.element_size()
        if not size:
            return tensor.detach().cpu()
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._path, prefix="m2flow-") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                found: Tensor = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        except OSError as error:
            raise EngineError(
                f"{size} bytes of an optimiser can't be put on the drive {self._path}: {error}", now="Give nvme_path a drive with room."
            ) from error
        return found.view(tensor.shape).copy_(tensor.detach())


def recompute_layers(model: Any) -> None:
    """Enable activation recomputation: every layer is computed again in the backward pass.

    Raises:
        ModelError: the architecture can't, or has dropout, which would differ the second time.
    """
    config = model.config.get_text_config()
    dropout = [name for name in dir(config) if ("dropout" in name or "pdrop" in name) and isinstance(getattr(config, name), float)]
    if any(getattr(config, name) for name in dropout):
        raise ModelError(
            f"activation checkpointing needs a model without dropout, and this one has {', '.join(dropout)}",
            now="Set these to 0 in the model's config.json, or write activation_checkpointing: false in train.options.",
        )
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"a {config.model_type!r} model has no activation checkpointing",
            now="Write activation_checkpointing: false in train.options.",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Transformers 6 will have another name for it.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True  # Of this module alone: its layers ask it before they keep less.


# ---- what the library is told


def configuration(
    options: DeepSpeedOptions, *, pin_memory: bool, largest: int = 0, tensor_parallel: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Build the configuration for `deepspeed.initialize`.

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


# ---- the trainer

_LOG = logging.getLogger("m2flow.engines.distributed.deepspeed")


class DeepSpeedTrain(RankedTrain):
    """Run the embedded trainer's passes on a model that DeepSpeed holds."""

    name = "deepspeed"
    capabilities = built_in("deepspeed", "train")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._options = read_deepspeed(settings.options, model.dtype)
        check_groups(self._options, settings.num_ranks)
        check_split_adapters(self._options, model)
        if model.balance is not None and self._options.compute_dtype == "float16":
            raise EngineError("experts are not balanced where a loss is scaled (float16)", now="Take bfloat16, or leave balance out.")
        self._engine: Any = None
        self._num_pending = 0
        """Backward passes since the last step."""
        self._is_away = False
        self._split: model_parallel.AutoTP | None = None
        self._sequence: sequence_parallel.SequenceParallel | None = None

    @property
    def _num_alike(self) -> int:
        return self._options.tp * self._options.sp

    @stopping_if_it_fails
    def start(self) -> None:
        with installed.watching_locks():
            self._start()

    def _start(self) -> None:
        if torch.device(self._settings.device).type == "cpu":
            installed.check_compiler(self.name)
        library = _library(self._settings.device)
        self._check_device(library)
        use_threads(self._settings.threads, self._settings.deterministic)
        keep_freed_memory()
        self._ranks.open(leave=lambda: (library.comm if library.comm.is_initialized() else dist).destroy_process_group())
        self._codec = load_tokenizer(self._source)
        self._model = load_model(self._source, device=self._settings.device, attention="eager")
        self._longest, self._rope = packing.check_model(self._model, self._source.head)
        self._routers = checked_routers(self._model, self._settings.device, self._source)
        if self._routers is not None:
            self._routers.gradient_scale = float(self._gradient_scale)
        if self._source.lora is not None:
            lora.adapt(self._model, self._source.lora, self._source.seed)
        self._head = self._replaced_head()
        self._demonstrations = Demonstrations(self._codec)
        if self._options.tp > 1:
            self._split = self._together(lambda: model_parallel.AutoTP(self._model, self._options.tp))
        if self._options.sp > 1:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            group = self._ranks.neighbours(self._options.sp)
            self._sequence = self._together(lambda: sequence_parallel.SequenceParallel(self._model, group, UlyssesSPAttentionHF))
            if self._routers is not None:
                self._routers.group = group
        if self._options.activation_checkpointing:
            recompute_layers(self._model)
        self._root = Root(self._model, self._source.head)
        self._ranks.course.follow(self._model, layers(self._model))
        self._tensors = _by_name(self._model)
        self._shapes = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        self._client = RecipeAdamW(parameter for parameter in self._root.parameters() if parameter.requires_grad)
        self._library = library
        self._initialize()

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
            if self._options.zero == 3:
                self._let_go()
        self._engine = self._root = self._model = None
        self._tensors, self._num_pending = {}, 0
        self._client = RecipeAdamW([torch.nn.Parameter(torch.empty(0))])
        is_on_gpu = torch.device(self._settings.device).type == "cuda"
        if is_on_gpu or self._options.zero == 3:
            gc.collect()
        if is_on_gpu:
            torch.cuda.empty_cache()
        self._ranks.close()

    def _let_go(self) -> None:
        """Take this trainer's modules out of what the library keeps of ZeRO stage 3 for the life of a process: the list of roots that are
        in a forward pass, and a cache of what to release after a module."""
        offload = self._library.runtime.zero.parameter_offload
        offload.FWD_MODULE_STACK[:] = [one for one in offload.FWD_MODULE_STACK if one is not self._root]
        for method in vars(offload.PartitionedParameterCoordinator).values():
            for cell in getattr(method, "__closure__", None) or ():
                if hasattr(cell.cell_contents, "cache_clear"):
                    cell.cell_contents.cache_clear()

    def onload(self) -> None:
        if self._is_away:
            self.onload_states()

    def offload(self) -> None:
        if torch.device(self._settings.device).type != "cpu":
            self.offload_states()

    def rest(self) -> None:
        if self._pins:
            torch.cuda.empty_cache()

    def _optimizer_tensors(self) -> Iterable[Tensor]:
        """Moments, and the float32 parts that they belong to. Gradients are in buffers of the library's, which are not counted, as is
        what is on a drive."""
        if self._options.offload_optimizer == NVME:
            return []
        moments = [moment for of_parts in self._client.moments.values() for both in of_parts.values() for moment in both]
        return [*moments, *(part for group in self._client.param_groups for part in group["params"] if self._options.zero)]

    def offload_states(self) -> None:
        """Move everything but gradients to the host's memory, whatever the device is."""
        self._is_away = True
        if self._options.zero == 0:
            self._root.to("cpu")
        elif not self._options.offload_parameters:
            kinds = self._library.runtime.zero.offload_config.OffloadStateTypeEnum
            self._engine.offload_states(include=[kinds.lp_params, kinds.lp_grads, kinds.contiguous_grad_buffer], pin_memory=self._pins)
        if not self._options.offload_optimizer:
            self._client.to("cpu", with_parts=self._options.zero > 0)
        gc.collect()
        if self._pins:
            torch.cuda.empty_cache()

    def onload_states(self) -> None:
        """Undo `offload_states`."""
        device = self._settings.device
        if not self._options.offload_optimizer:
            # Before the library's own: it makes its views of the parts anew.
            self._client.to(device, with_parts=self._options.zero > 0)
        if self._options.zero == 0:
            self._root.to(device)
        elif not self._options.offload_parameters:
            self._engine.reload_states()
        self._is_away = False

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        return {**self._applied(optimizer, denominator), **self._expert_loads()}

    def _applied(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        if not isinstance(optimizer, AdamW) or optimizer.groups:
            self.discard()
            raise EngineError(f"the train engine {self.name!r} has no {optimizer}", now="Use AdamW, without groups of weights.")
        if not self._num_pending:
            raise EngineError("there is no gradient to apply", now="accumulate() a micro-batch with masked tokens first.")
        if not (math.isfinite(denominator) and denominator > 0):
            self.discard()
            raise EngineError(f"the denominator of a mini-batch must be a positive number, got {denominator}")
        rate = optimizer.rate(self._client.num_steps.get(optimizer.state_key, 0))
        if optimizer.log_layers and not self._client.places:
            self._find_places()
        self._client.due(optimizer, denominator)
        before = {tensor: self._held(tensor).clone() for tensor in self._rounded()}
        self._step()
        norm = self._client.taken()
        if self._options.compute_dtype == "float16":
            scale = {"loss_scale": float(self._engine.optimizer.loss_scale)}
            # A gradient beyond float16's range: the library has lowered the scale, and the next one may fit.
            return (
                {"grad_norm": math.inf, "lr": 0.0, "skipped": 1.0, **scale}
                if norm is None
                else {"grad_norm": norm, "lr": rate, "skipped": 0.0, **scale, **self._client.by_group, **self._moved(before)}
            )
        if norm is None or not math.isfinite(norm):
            raise EngineError(
                f"the gradient is not finite (its norm is {norm}); the weights were left as they were",
                now="Look for infinite losses or advantages, and for a learning rate that is too high.",
            )
        return {"grad_norm": norm, "lr": rate, **self._client.by_group, **self._moved(before)}

    def _find_places(self) -> None:
        """Tell the optimiser where in its flat parts the groups of weights lie: each weight is set to the number of its group for once."""
        of_tensors = groups_of_weights(self._model)
        named = {tensor: of_tensors[id(tensor)] for tensor in self._trained}
        self._client.groups = groups = tuple(dict.fromkeys(named.values()))
        if self._options.zero == 0:
            self._client.places = {tensor: [(group, 0, tensor.numel())] for tensor, group in named.items()}
            return
        parts = self._client.parts
        with self._in_place_of_weights({part: torch.zeros_like(part) for part in parts}), _quiet():
            for tensor, group in named.items():
                number = torch.full(getattr(tensor, "ds_shape", tensor.shape), groups.index(group) + 1.0, device=self._settings.device)
                self._library.utils.safe_set_full_fp32_param(tensor, number)
            found = {}
            for part in parts:
                numbers, lengths = part.detach().flatten().cpu().unique_consecutive(return_counts=True)
                runs = zip(numbers.long().tolist(), lengths.cumsum(0).tolist(), lengths.tolist(), strict=True)
                found[part] = [(groups[number - 1], end - length, end) for number, end, length in runs if number]
            self._client.places = found

    def _rounded(self) -> list[Tensor]:
        """Trained tensors in half precision, as engines that sample get them; none of those that are away on a drive."""
        if self._has_masters or self._options.offload_parameters == NVME:
            return []
        return [tensor for tensor in self._trained if tensor.dtype != torch.float32]

    def _held(self, tensor: Tensor) -> Tensor:
        """What this rank holds of a tensor."""
        held: Tensor = tensor.ds_tensor if self._is_spread(tensor) else tensor
        return held.detach()

    def _moved(self, before: Mapping[Tensor, Tensor]) -> dict[str, float]:
        total = sum(held.numel() for held in before.values())
        moved = [(self._held(tensor) != held).sum() for tensor, held in before.items()]
        return {MOVED: float(torch.stack(moved).sum()) / total} if total else {}

    def discard(self) -> None:
        if self._num_pending:
            self._step()  # With nothing due, it only clears.
        if self._routers is not None:
            self._routers.loads.taken()

    def save(self, path: str) -> None:
        """Save in the embedded trainer's format; any number of ranks can go on from it, in any stage."""
        is_first = self._ranks.rank == 0

        def kept(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
            return {name: tensor.cpu().clone() if is_first else tensor.new_empty(0) for name, tensor in tensors}

        weights, adapter = kept(lora.whole_state(self._model, self._whole)), kept(lora.adapter_state(self._model, self._whole))
        steps = {} if self._is_lent else self._client.num_steps
        saved = [packed_state(recipe, count, self._whole_moments(recipe)) for recipe, count in steps.items()]
        rounds = self._options.compute_dtype != "float32" and not self._has_masters and not self._is_lent
        masters = [self._whole_master(tensor).cpu().clone() for tensor in self._trained] if rounds else []
        state = {"optimizers": saved, "masters": masters}
        self._together(lambda: trainer_checkpoint.save(path, self._model, self._codec, state, weights, adapter) if is_first else None)

    def load(self, path: str) -> None:
        def read() -> tuple[dict[str, Tensor], dict[str, Any]]:
            return trainer_checkpoint.read_weights(path, self._source, self._shapes), trainer_checkpoint.read_state(path, "cpu")

        weights, state = self._together(read)
        self.discard()
        self._client.moments, self._client.num_steps = {}, {}
        for saved in state["optimizers"]:
            recipe, count, moments = unpacked_state(saved, len(self._trained))
            self._client.num_steps[recipe] = count
            self._set_moments(recipe, moments)
        for name, tensor in self._tensors.items():  # Of adapters alone, if it has some; a tied tensor is there once.
            if name in weights:
                self._set(tensor, weights[name])
        if self._options.compute_dtype != "float32":
            for tensor, master in zip(self._trained, state.get("masters", []), strict=False):
                if master is not None:
                    self._set_master(tensor, master)

    # Passes

    def _pack(self, batch: Batch) -> packing.Packed:
        packed = super()._pack(batch)
        return packed if self._sequence is None else self._sequence.shard(packed)

    def _model_outputs(self, packed: packing.Packed, temperature: Tensor | None, top: Tensor | int = 0) -> dict[str, Tensor]:
        if self._sequence is None:
            return super()._model_outputs(packed, temperature, top)
        own = self._sequence.shard(packed) if packed.which is None else packed
        which = own.which
        assert which is not None
        own_top = top[which] if isinstance(top, Tensor) else top
        found = super()._model_outputs(own, None if temperature is None else temperature[which], own_top)
        return {name: self._sequence.gather(values, which) for name, values in found.items()}

    def _forward(self, packed: packing.Packed) -> Tensor:
        # Passes without gradient go past the library, which counts what it is called for.
        with _quiet():
            output: Tensor = (self._engine if torch.is_grad_enabled() else self._root)(packed)
        return output[0] if self._source.head == "lm" else output[:, 0].float()

    def _backward(self, loss: Tensor) -> None:
        self._num_pending += 1
        with _quiet():
            self._engine.backward(loss * self._gradient_scale)

    @property
    def _gradient_scale(self) -> int:
        """The library takes the mean over those ranks that see other samples, or other parts of them."""
        return self._ranks.count // self._options.tp

    def _step(self) -> None:
        self._num_pending = 0
        with _quiet():
            self._engine.step()

    # Weights and moments

    @property
    def _trained(self) -> list[Tensor]:
        return [tensor for tensor in self._tensors.values() if tensor.requires_grad]

    @property
    def _pins(self) -> bool:
        return str(torch.device(self._settings.device).type) == "cuda"

    @property
    def _has_masters(self) -> bool:
        """Whether forward passes use a rounded copy of float32 master weights."""
        return bool(self._options.compute_dtype != self._source.dtype)

    @contextlib.contextmanager
    def _whole(self, tensor: Tensor) -> Iterator[Tensor]:
        """One of the model's tensors as a whole, in the model's type."""
        if tensor.requires_grad and self._has_masters:
            yield self._whole_master(tensor)
        elif not self._is_spread(tensor):
            yield self._put_together(tensor, tensor.detach())
        else:
            with contextlib.ExitStack() as held:
                with _quiet():
                    held.enter_context(self._library.zero.GatheredParameters([tensor]))
                yield self._put_together(tensor, tensor.detach())

    def _put_together(self, tensor: Tensor, part: Tensor) -> Tensor:
        """Gather a whole tensor from the parts of tensor-parallel layers."""
        return part if self._split is None else self._split.whole(tensor, part)

    def _part(self, tensor: Tensor, whole: Tensor) -> Tensor:
        """This rank's tensor-parallel part of a whole tensor."""
        return whole if self._split is None else self._split.part(tensor, whole)

    def _is_spread(self, tensor: Tensor) -> bool:
        """Whether stage 3 partitions a tensor: all parameters, trained or not; buffers stay whole."""
        return self._options.zero == 3 and isinstance(tensor, torch.nn.Parameter)

    def _whole_master(self, tensor: Tensor) -> Tensor:
        with _quiet():
            found: Tensor = self._library.utils.safe_get_full_fp32_param(tensor)
        return self._put_together(tensor, found)

    def _set_master(self, tensor: Tensor, value: Tensor) -> None:
        with _quiet():
            part = self._part(tensor, value).to(self._settings.device, torch.float32).contiguous()
            self._library.utils.safe_set_full_fp32_param(tensor, part)

    def _own_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self._tensors.items()

    def _set(self, tensor: Tensor, value: Tensor) -> None:
        self._fill(tensor, value)
        if self._options.zero and tensor.requires_grad:
            self._set_master(tensor, value)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _fill(self, tensor: Tensor, value: Tensor) -> None:
        """Set a tensor's value without touching the optimiser's state."""
        if self._is_spread(tensor):
            with _quiet(), self._library.zero.GatheredParameters([tensor], modifier_rank=0):
                tensor.copy_(self._part(tensor, value))
        else:
            tensor.copy_(self._part(tensor, value))

    def _whole_moments(self, recipe: AdamW) -> list[tuple[Tensor, Tensor]]:
        """Gather a recipe's moments by parameter, in the host's memory; on other ranks than the first, empty tensors."""
        moments = self._client.moments[recipe]
        zeros = (torch.zeros(()), torch.zeros(()))
        if self._options.zero == 0:
            both = ((tensor, moments.get(tensor)) for tensor in self._trained)
            return [zeros if of is None else (self._put_together(t, of[0]), self._put_together(t, of[1])) for t, of in both]
        found: list[list[Tensor]] = []
        for which in (0, 1):
            # The library gathers weights, and knows no moments but those of its own optimisers: they take the weights' place.
            with self._in_place_of_weights({part: both[which] for part, both in moments.items()}):
                whole = []
                for tensor in self._trained:
                    full = self._whole_master(tensor)
                    whole.append(full.cpu().clone() if self._ranks.rank == 0 else zeros[0])
            found.append(whole)
        return list(zip(*found, strict=True))

    def _set_moments(self, recipe: AdamW, moments: list[tuple[Tensor, Tensor] | None]) -> None:
        if self._options.zero == 0:
            device = self._settings.device
            given = ((t, both) for t, both in zip(self._trained, moments, strict=True) if both is not None)
            parts = {t: [self._part(t, moment).to(device, copy=True) for moment in both] for t, both in given}
            self._client.moments[recipe] = {t: (both[0], both[1]) for t, both in parts.items()}
            return
        flat = self._client.parts
        found: dict[Tensor, list[Tensor]] = {part: [] for part in flat}
        for which in (0, 1):
            with self._in_place_of_weights({part: torch.zeros_like(part) for part in flat}):
                for tensor, both in zip(self._trained, moments, strict=True):
                    if both is not None:
                        self._set_master(tensor, both[which])
                for part in flat:
                    found[part].append(self._client.kept(part.detach().clone()))
        self._client.moments[recipe] = {part: (both[0], both[1]) for part, both in found.items()}

    @contextlib.contextmanager
    def _in_place_of_weights(self, values: Mapping[Tensor, Tensor]) -> Iterator[None]:
        kept = {part: part.detach().clone() for part in values}
        for part, value in values.items():
            part.detach().copy_(value)
        try:
            yield
        finally:
            for part, value in kept.items():
                part.detach().copy_(value)

    # The library

    def _initialize(self) -> None:
        """Give the model to DeepSpeed, and restore what it rounds: master weights, and tables that are computed at loading."""
        masters = {name: tensor.detach().clone() for name, tensor in self._tensors.items()} if self._has_masters else {}
        tables = {module: _tables(module) for module in self._model.modules()}
        largest = max(parameter.numel() for parameter in self._root.parameters())
        told = None if self._split is None else self._split.deepspeed_config()
        config = configuration(self._options, pin_memory=self._pins, largest=largest, tensor_parallel=told)
        if self._options.zero == 3:
            self._align_numbers()
        with _quiet():
            self._engine, *_ = self._library.initialize(model=self._root, optimizer=self._client, config=config)
        if (split := self._split) is not None:
            self._engine.first_dataloader_check.remove()  # It would send the first micro-batch to the other ranks, pickled.
            self._together(lambda: split.attach_group(self._library.utils.groups.get_tensor_model_parallel_group()))
            self._client.norm_over, self._client.square = split.total, split.square
        if self._options.zero:
            self._client.norm_over = self._total
        for module, of_one in tables.items():
            for name, table in of_one.items():
                setattr(module, name, table)
        for name, value in masters.items():
            self._set(self._tensors[name], value)
        if not self._client.parts:
            self._show_parts()
        if self._options.offload_optimizer == NVME:
            self._use(NvmeOffload(self._options.nvme_path))
        if self._split is not None and self._options.zero:
            self._mark_repeated(self._split)

    def _align_numbers(self) -> None:
        """Let stage 3 number parameters and modules from the same number on all ranks.

        It numbers them by counters of the process and compares the numbers between ranks; a process that had such a trainer before has
        counted further than the others.
        """
        zero = self._library.runtime.zero
        parameters = zero.partition_parameters.Init
        parameters.param_id = self._ranks.most(parameters.param_id)
        (modules,) = zero.parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
        modules[0] = self._ranks.most(modules[0])

    def _use(self, drive: NvmeOffload) -> None:
        """Keep optimiser states in files. In stages 1 and 2 DeepSpeed has views of its float32 weights, which stay in the host's memory."""
        self._client.kept = drive.map_tensor
        for part in self._client.parts if self._options.zero == 3 else []:
            part.data = self._together(functools.partial(drive.map_tensor, part))

    def _mark_repeated(self, split: model_parallel.AutoTP) -> None:
        """Mark where flat parts hold values that every rank of a tensor group has."""
        with self._in_place_of_weights({part: torch.zeros_like(part) for part in self._client.parts}):
            for tensor in self._trained:
                if not split.is_split(tensor):
                    self._set_master(tensor, torch.ones(getattr(tensor, "ds_shape", tensor.shape)))
            split.mark(self._client.parts)

    def _show_parts(self) -> None:
        """Run a pass and a step without effect: stage 3 shows its parts to an optimiser only in a step."""
        tokens, mask = Ragged.of([[0, 0]], np.int32), Ragged.of([[False, True]], np.bool_)
        packed = packing.pack(make_ids(0, 1), tokens, mask, device=self._settings.device)
        self._backward(sum(values.float().sum() for values in self._model_outputs(packed, None).values()) * 0.0)
        self.discard()

    def _total(self, square: Tensor) -> Tensor:
        square = square.to(self._settings.device)
        dist.all_reduce(square, group=self._ranks.group)
        return square

    def _check_device(self, library: Any) -> None:
        if self._options.compute_dtype == "float16" and not library.accelerator.get_accelerator().is_fp16_supported():
            raise EngineError(f"the device {self._settings.device} has no float16 that DeepSpeed can use", now="Write bfloat16 or float32.")
        if self._options.offload_parameters == NVME and not library.ops.op_builder.AsyncIOBuilder().is_compatible():
            raise EngineError(
                "DeepSpeed can't build async_io here, by which it has weights on a drive",
                now="Install libaio with its headers (Debian: apt-get install libaio-dev), or write offload_parameters: true.",
            )


def _library(device: str) -> Any:
    """DeepSpeed, loaded without its greetings.

    Raises:
        MissingExtra: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", torch.device(device).type)
    os.environ.setdefault("LOCAL_RANK", str(torch.device(device).index or 0))
    try:
        with _quiet():
            import deepspeed
            import deepspeed.ops.op_builder
            import deepspeed.runtime.zero.offload_config
            import deepspeed.utils
    except ImportError as error:
        raise MissingExtra(f"the train engine 'deepspeed' can't be loaded: {error}", now="pip install 'm2flow[deepspeed]'") from error
    logger = deepspeed.utils.logger
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.parent = _LOG
    logger.propagate = True
    return deepspeed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect printed text to the log: the terminal belongs to the progress display."""
    said = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(said):
            warnings.simplefilter("ignore")
            yield
    finally:
        for line in said.getvalue().splitlines():
            _LOG.info("%s", line)


def _by_name(model: Any) -> dict[str, Tensor]:
    """The model's tensors by Hugging Face name; tied ones once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _tables(module: Any) -> dict[str, Tensor]:
    """Float32 buffers, which DeepSpeed would round to the type of the passes."""
    return {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False) if buffer.dtype == torch.float32}
