"""Train with FSDP2 a model that one device can't hold: every parameter, gradient and optimiser state is sharded over all ranks.

    every rank:  the same micro-batch --shares--> its own samples --packed passes of the embedded trainer--> gradients
                 gradients --reduce-scatter, summed--> each rank's shard --optimiser--> its shard of the weights

How a batch is shared out is in `m2flow.engines.distributed.ranks`; this module shards the model and gathers its weights. Sums go over
ranks in their order, so one layout always gives the same bits.

Limits:
    start: every rank reads the whole model once, in the memory of its host.
    tensor parallel: `tp` splits attention and MLP by the architecture's `base_model_tp_plan`; embeddings and the head stay whole. Heads
        that do not divide, other plans and adapters are refused.

Source: PyTorch FSDP2 (torch.distributed.fsdp.fully_shard); ZeRO stage 3 (Rajbhandari et al., 2020).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from m2flow.engines.contract import EngineSettings
from m2flow.engines.distributed import tensor_parallel
from m2flow.engines.distributed.ranks import RankedTrain, Root
from m2flow.engines.models import lora, trainer_checkpoint
from m2flow.engines.models.hf_model import layers
from m2flow.engines.models.trainer_checkpoint import spread_like, whole
from m2flow.engines.registry import built_in
from m2flow.errors import EngineError
from m2flow.recipe import Model

OPTIONS = {
    "compute_dtype": "Type of the passes: `bfloat16` over float32 weights; by default float32.",
    "masters": "As of the embedded trainer: float32 copies of weights below float32; by default true.",
    "cpu_offload": "Weights, gradients and optimiser in the host's memory; by default false.",
    "reshard_after_forward": "Release gathered weights after the forward pass; by default true.",
    "tp": "Neighbouring ranks that split the layers among them (DTensor), by default 1.",
    "spread_checkpoints": "Every rank writes its part of a checkpoint (`m2flow_parts/`, of PyTorch's distributed checkpoints), which every "
    "trainer loads and `m2flow export` merges; by default false. Policies with adapters are saved whole.",
}
"""The options of `train: {engine: fsdp}`, each with its meaning."""


class FsdpTrain(RankedTrain):
    """The embedded trainer on a model that is sharded over ranks."""

    name = "fsdp"
    capabilities = built_in("fsdp", "train")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._mesh: DeviceMesh | None = None
        """With tensor parallelism: data ranks x tensor ranks."""
        self._summed: list[torch.nn.Module] = []

    def start(self) -> None:
        tp = self._num_alike
        tensor_parallel.check(self._ranks.count, tp, has_adapters=self._source.lora is not None)
        how = _options(self._settings.options, self._settings.device)
        self._ranks.open()
        super().start()
        self._root = Root(self._model, self._source.head)
        if tp > 1:
            self._mesh = tensor_parallel.grid(self._settings.device, self._ranks.count, tp)
            self._summed = self._together(lambda: tensor_parallel.split(self._model, self._mesh))
            how["mesh"] = self._mesh["data"]
        else:
            how["mesh"] = DeviceMesh.from_group(self._ranks.group, torch.device(self._settings.device).type)
        for layer in _layers(self._model):
            fully_shard(layer, **how)
        fully_shard(self._root, **how)
        for module in self._root.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)  # Gradients are sums; the caller's denominator divides them.
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no other.
        self._optimizers = self._optimizers_of(self._model)

    @property
    def _num_alike(self) -> int:
        return int(str(self._settings.options.get("tp", 1)))

    def stop(self) -> None:
        self._root = None
        super().stop()
        self._mesh = None  # Its groups end with the last trainer's: one of them may be that of all ranks.
        self._ranks.close()

    def _sum_gradients(self) -> None:
        if self._mesh is not None:
            tensor_parallel.add_up(self._summed, self._mesh)

    def _whole(self, tensor: Tensor) -> AbstractContextManager[Tensor]:
        return contextlib.nullcontext(whole(tensor).detach())

    def _set(self, tensor: Tensor, value: Tensor) -> None:
        tensor.detach().copy_(spread_like(value, tensor))

    def save(self, path: str) -> None:
        """Save in the embedded trainer's format; any number of ranks can go on from it. Rank 0 keeps what is gathered."""
        if self._settings.options.get("spread_checkpoints") and self._source.lora is None:
            self._save_parts(Path(path))
            return
        is_writer = self._ranks.rank == 0
        state = _whole_state(self._state(), keeps=is_writer)
        weights = {name: _kept(tensor, keeps=is_writer) for name, tensor in lora.whole_state(self._model, self._whole)}
        adapter = {name: _kept(tensor, keeps=is_writer) for name, tensor in lora.adapter_state(self._model, self._whole)}
        self._together(lambda: trainer_checkpoint.save(path, self._model, self._codec, state, weights, adapter) if is_writer else None)

    def _save_parts(self, path: Path) -> None:
        """Have each rank write its shards."""
        tensors, state = trainer_checkpoint.marked(dict(self._own_tensors()), self._state())
        self._write_together(path, tensors, state)

    def put_adapters(self, values: Sequence[Tensor]) -> None:
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # What is gathered still has the values before.
        super().put_adapters(values)


def _options(options: Mapping[str, object], device: str) -> dict[str, Any]:
    """Arguments of `fully_shard`."""
    name = str(options.get("compute_dtype", "float32"))
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"compute_dtype is no dtype of torch: {name!r}", now="Write bfloat16 or float32.")
    return {
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32) if "compute_dtype" in options else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.device(device).type == "cuda")
        if options.get("cpu_offload")
        else OffloadPolicy(),
        "reshard_after_forward": bool(options.get("reshard_after_forward", True)),
    }


def _layers(model: Any) -> list[torch.nn.Module]:
    """Find the blocks whose weights are gathered together: those that the architecture says must not be split."""
    found = layers(model)
    if not found:
        raise EngineError(f"a {model.config.model_type!r} model does not say what its layers are", now="Use the train engine `embedded`.")
    return found


def _whole_state(saved: Any, *, keeps: bool) -> Any:
    """Gather optimiser states whole in the host's memory, on ranks that keep them. Collective."""
    if isinstance(saved, dict):
        return {key: _whole_state(value, keeps=keeps) for key, value in saved.items()}
    if isinstance(saved, list):
        return [_whole_state(value, keeps=keeps) for value in saved]
    return _kept(whole(saved).detach(), keeps=keeps) if isinstance(saved, Tensor) else saved


def _kept(tensor: Tensor, *, keeps: bool) -> Tensor:
    """Copy a tensor to the host's memory on ranks that keep it; elsewhere an empty one."""
    return tensor.cpu() if keeps else tensor.new_empty(0)
