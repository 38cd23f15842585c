"""Train with FSDP2 a model that one device can't hold: every parameter, gradient and optimiser state is sharded over all ranks.

    every rank:  the same micro-batch --shares--> its own samples --packed passes of the embedded trainer--> gradients
                 gradients --reduce-scatter, summed--> each rank's shard --optimiser--> its shard of the weights

How a batch is shared out is in `m2flow.engines.distributed.ranks`; this module shards the model and gathers its weights. Sums go over
ranks in their order, so one layout always gives the same bits.

With `tp` neighbouring ranks see the same samples, and split attention and MLPs among them by heads and widths
(`m2flow.engines.distributed.model_parallel`). With `cp` each has a part of the rows, and in the attention the keys and values of all
(`m2flow.engines.distributed.sequence_parallel`); parameters are sharded over these ranks as over others, with `tp` each `tp`-th is one of
them. With `ep` (also in `model_parallel`) the experts of a mixture are split over neighbouring ranks first (of a stage, with `pp` too; with
`tp`, over `tp * ep` of them), and each rank's are sharded over those that hold the same. Rows go to the ranks that have their experts, and
back; all else is as without `ep`.

With `pp` the layers are spread over stages first (`m2flow.engines.distributed.pipeline`), and each stage is sharded over its own ranks.
With `vpp` too, each rank has so many chunks of layers, and passes go round the ranks as often (interleaved 1F1B): the wait for the first
pass and the last is that of a chunk, for more sends and more passes in flight.

    vpp 2:  stage 0, first chunk --> stage 1, first chunk --> stage 0, second chunk --> stage 1, second chunk: norm, head, loss

With `schedule: zero-bubble` the way back through a chunk is in two parts: the gradient of its hidden states (B), which the stage before
waits for, and those of the weights of its linear layers (W), which nobody does. A stage puts a W off by as many ways back as there are
stages before it (ZB-H1), so that Ws fill the wait at the end, and inputs and output gradients of so many passes are kept longer:

    1F1B, the last of 4 stages:     F1 BW1 F2 BW2 F3 BW3 F4 BW4                    a wait of (stages - 1) (F + B + W) in all
    zero-bubble:                    F1 B1 F2 B2 F3 B3 F4 B4 W1 W2 W3 W4            (stages - 1) (F + B - W): a third

Every rank packs the same samples as those of its line, so it knows the shape of what comes: passes may have any lengths. Tied embeddings
are on the first stage and the last, which add up both gradients.

Of a mixture each stage replays the experts of its own layers, and what their routers chose is recorded by pass and gathered over stages.
Losses of routers weigh what their tokens weigh in the loss, which every stage knows, and join the gradient that comes back through it; the
last stage has those of its layers alone. Each stage moves the biases of its own routers, by the loads of all ranks. Adapters are on the
layers of each stage, and are sent and saved as one.

With `recompute` a layer keeps what comes in alone, and is computed again on the way back, where ranks do together what they did before
(`m2flow.engines.distributed.guard.Recomputed`); rows of a mixture go where they went.

A loss or a part of the model that raises on one rank is heard by all when the passes are over: the others wait until then for what it is
to send, and for its part in gathering the weights of layers. It goes on with zeros (`m2flow.engines.distributed.guard.Guard`), and the
error names the rank, the layer and the pass, forward or backward. What was added up is then a part of what it should be: `discard` it, and
the engine goes on. Guarded are the embeddings, layers and head of `llama`, `qwen2` and `qwen3`, with `tp` too, and of mixtures norms,
attentions and the experts of `ep` and `tp` in both directions, routers in the forward pass. Elsewhere a rank that raises ends the process;
a run then ends the others after 5 s (`m2flow.micro.worker.rank_group`). A rank that does not come to a collective at all is given up after
10 minutes.

Limits:
    start: every rank reads the whole model once, in the memory of its host.
    tensor parallel: `tp` splits attention and MLP by the architecture's `base_model_tp_plan`; embeddings and the head stay whole. Heads
        that do not divide and other plans are refused.
    sequences: `cp` is for any model that is computed here, with adapters, stages, `tp`, `ep`, routing replay and balance.
    experts: `ep`, and `tp` of mixtures, are for those whose experts transformers stacks. Others are refused before the run; with `tp`,
        `olmoe` too, whose norms inside an attention are over all heads.
    stages: `llama`, `qwen2`, `qwen3` and those mixtures without windows, with any head. Layers that `pp` does not divide are spread
        unevenly, the first stages having one more. Others are refused before the run.
    adapters: of what is not a stack of experts.

Source: PyTorch FSDP2 (torch.distributed.fsdp.fully_shard); ZeRO stage 3 (Rajbhandari et al., 2020); of the others, see those modules.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from m2flow.engines.contract import (
    NO_AGREEMENT,
    NUM_SHARED,
    Agreement,
    EngineSettings,
    HeldCheckpoint,
    Objective,
    Sums,
    TrainEngine,
    WeightForm,
    blended,
)
from m2flow.engines.distributed import COLLECTIVE_TIMEOUT, check_fsdp, layers_of_stages, model_parallel, sequence_parallel
from m2flow.engines.distributed.guard import Exchange, Guard, Recomputed, weights_of_pass
from m2flow.engines.distributed.pipeline import Line, PutOff
from m2flow.engines.distributed.ranks import MEANING, Box, RankedTrain, Root, stopping_if_it_fails
from m2flow.engines.models import lora, packing, trainer_checkpoint
from m2flow.engines.models.hf_model import checkpoint_tensors, empty_cache, groups_of_weights, layers, matrices_of_layers
from m2flow.engines.models.optimizers import Elsewhere, Optimizers
from m2flow.engines.models.routing import BALANCE_LOSS, REROUTED, Z_LOSS, Mixture, beside_experts
from m2flow.engines.models.trainer_checkpoint import local, spread_like, whole
from m2flow.engines.registry import STACKED, STAGED, ZERO_BUBBLE, built_in
from m2flow.errors import EngineError, InternalError, M2FlowError, unexpected
from m2flow.recipe import REFERENCE_TOP_IDS, REFERENCE_TOP_LOGPROBS, TOP_LOGPROBS, Loss, Model, Optimizer
from m2flow.samples import Batch

OPTIONS = {
    "compute_dtype": "Type of the passes: `bfloat16` over float32 weights; by default float32.",
    "masters": "As of the embedded trainer: float32 copies of weights below float32; by default true.",
    "cpu_offload": "Weights, gradients and optimiser in the host's memory; by default false.",
    "reshard_after_forward": "Release gathered weights after the forward pass; by default true.",
    "recompute": "Keep what comes into layers alone, and compute them again on the way back: a third more work, less memory; by default "
    "false.",
    "tp": "Neighbouring ranks that split the layers among them (DTensor), by default 1.",
    "cp": "Neighbouring ranks, or groups of `tp`, that split each sequence among them and gather its keys and values, by default 1.",
    "ep": "Neighbouring ranks, or groups of `tp`, that split the experts of each layer among them, by default 1.",
    "pp": "Stages that the layers are spread over, by default 1. What `tp` and `pp` leave of the ranks shards each stage.",
    "vpp": "With `pp`, chunks of layers that each stage has, in turns (interleaved 1F1B), by default 1.",
    "schedule": "With `pp`: `1f1b`, the default, or `zero-bubble`, which computes the gradients of weights where a stage would wait.",
    "micro_batches": "With `pp`, parts in which a micro-batch passes through the stages, by default as many as stages; with `vpp` a "
    "multiple of them.",
    "spread_checkpoints": "Every rank writes its part of a checkpoint (`m2flow_parts/`, of PyTorch's distributed checkpoints), which every "
    "trainer loads and `m2flow export` merges; by default false. Policies with adapters are saved whole.",
    COLLECTIVE_TIMEOUT: MEANING,
}
"""The options of `train: {engine: fsdp}`, each with its meaning."""


class FsdpTrain(RankedTrain):
    """The embedded trainer on a model that is sharded over ranks; with the option `pp` it is a `PipelinedTrain`."""

    name = "fsdp"
    capabilities = built_in("fsdp", "train")
    _has_boxes = True

    def __new__(cls, model: Model, settings: EngineSettings) -> FsdpTrain:
        return super().__new__(PipelinedTrain if cls is FsdpTrain and settings.options.get("pp", 1) != 1 else cls)

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._mesh: DeviceMesh | None = None
        """With tensor parallelism or stages: stages x data ranks x tensor ranks."""
        self._summed: model_parallel.Summed = []
        self._exchanges: dict[torch.nn.Module, Exchange] = {}
        """What ranks do together within layers, by the module that does it: sums over tensor ranks, and rows sent to experts."""
        self._guard = Guard(settings.rank)
        self._context: sequence_parallel.ContextParallel | None = None
        self._near = self._ranks
        """With `cp`, those that have parts of the same sequences."""

    @stopping_if_it_fails
    def start(self) -> None:
        self._check_layout()
        how, recomputes = _options(self._settings.options, self._settings.device), self._flag("recompute", default=False)
        self._ranks.open()
        super().start()
        widths = sequence_parallel.widths_of(self._model, self._loading_device, self._tp) if self._cp > 1 else {}
        self._root = self._placed()
        blocks: dict[torch.nn.Module, model_parallel.Block] = {}
        if self._tp > 1:
            self._summed, blocks = self._together(lambda: model_parallel.split(self._model, self._mesh))
        if self._cp > 1:
            self._near = self._ranks.strided(self._cp, self._tp)
            if self._routers is not None:
                self._routers.group = self._near.group
            own = set(self._model.modules())
            self._context = sequence_parallel.ContextParallel(self._near.group, {one: width for one, width in widths.items() if one in own})
            if self._is_guarded:
                blocks.update(self._context.join(blocks))
        self._exchanges.update(blocks)
        if self._mesh is not None:
            how["mesh"] = self._mesh["data"]
        else:
            how["mesh"] = DeviceMesh.from_group(self._ranks.group, torch.device(self._settings.device).type)
        if self._tp * self._ep > 1 and self._model.config.get_text_config().model_type in STACKED:
            self._shard_experts(how)
        for layer in _layers(self._model):
            fully_shard(layer, **how)
        fully_shard(self._root, **how)
        for module in self._root.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)  # Gradients are sums; the caller's denominator divides them.
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no other.
        self._optimizers = self._optimizers_of(self._model)
        self._guard_parts()
        if recomputes:
            for layer in _layers(self._model):
                layer.forward = functools.wraps(layer.forward, updated=())(Recomputed(layer.forward, self._remember_routing))
        self._ranks.course.follow(self._model, set(_layers(self._model)))

    def _remember_routing(self) -> Callable[[], AbstractContextManager[None]]:
        return contextlib.nullcontext if self._routers is None else self._routers.remember()

    def _guard_parts(self) -> None:
        """Keep the ranks together where a part of the model fails on one of them."""
        model, guard = self._model, self._guard
        names = {module: name for name, module in model.named_modules()}
        kind, found = model.config.get_text_config().model_type, _layers(model)
        if not self._is_guarded:
            return
        embeddings = model.get_input_embeddings()
        if isinstance(embeddings, torch.nn.Embedding):  # Of a stage that has them.
            guard.over(embeddings, names[embeddings], width=model.config.hidden_size)
        guard.over(model.base_model.norm, names[model.base_model.norm], is_last=True)
        of_pass = functools.partial(weights_of_pass, are_put_off=self._is_without_bubble)
        for layer in found:
            own = {module: self._exchanges[module] for module in layer.modules() if module in self._exchanges}
            if kind not in STACKED and not own:
                guard.over(layer, names[layer], functools.partial(of_pass, layer))
                continue
            for part in layer.children():
                if not any(module in own or type(module).__name__.endswith("Experts") for module in part.modules()):
                    guard.over(part, names[part], functools.partial(of_pass, part), is_pair=names[part].endswith("attn"))
            for module, exchange in own.items():
                exchange.guard(guard, names[module], functools.partial(of_pass, module))
            guard.around(layer, names[layer], functools.partial(of_pass, layer, list(own)), list(own.values()))

    @property
    def _is_guarded(self) -> bool:
        return self._model.config.get_text_config().model_type in (*STAGED, *STACKED)

    def _check_layout(self) -> None:
        check_fsdp(self._source, self._settings.options, self._ranks.count)

    def _placed(self) -> Root:
        """Set the mesh, and make the module around what this rank's stage has of the model."""
        if self._tp > 1:
            self._mesh = model_parallel.grid(self._settings.device, self._ranks.count, self._tp)
            self._ranks.limit(*self._mesh.get_all_groups())
        return Root(self._model, self._source.head, guard=self._guard)

    def _shard_experts(self, how: Mapping[str, Any]) -> None:
        """Split experts over the ranks of expert groups, and shard what each has over those that have the same."""
        mesh = model_parallel.expert_grid(self._settings.device, self._ranks.count, self._ep * self._tp, self._pp)
        self._ranks.limit(*mesh.get_all_groups())
        alike = self._mesh["tensor"].get_group() if self._mesh is not None and self._tp > 1 else None
        experts = self._together(lambda: model_parallel.split_experts(self._model, mesh, alike))
        self._exchanges.update(experts)
        how = {**how, "mesh": mesh["replica"]}
        how["mp_policy"] = dataclasses.replace(how["mp_policy"], cast_forward_inputs=False)  # Gates keep the router's type.
        how["shard_placement_fn"] = lambda _: Shard(1)  # An expert's rows: a rank may have fewer experts than there are replicas.
        for module in experts:
            fully_shard(module, **how)

    @property
    def _tp(self) -> int:
        return int(str(self._settings.options.get("tp", 1)))

    @property
    def _ep(self) -> int:
        return int(str(self._settings.options.get("ep", 1)))

    @property
    def _pp(self) -> int:
        return int(str(self._settings.options.get("pp", 1)))

    @property
    def _is_without_bubble(self) -> bool:
        return self._settings.options.get("schedule") == ZERO_BUBBLE

    @property
    def _cp(self) -> int:
        return int(str(self._settings.options.get("cp", 1)))

    @property
    def _num_alike(self) -> int:
        return self._tp * self._cp

    def stop(self) -> None:
        self._root = self._context = None
        self._near = self._ranks
        self._exchanges, self._summed, self._is_partial = {}, [], False
        super().stop()
        self._mesh = None  # Its groups end with the last trainer's: one of them may be that of all ranks.
        model_parallel.forget_meshes()
        self._ranks.close()

    def _forward(self, packed: packing.Packed) -> Tensor:
        output = super()._forward(packed)
        self._guard.check()
        return output

    def _pack(self, batch: Batch) -> packing.Packed:
        packed = super()._pack(batch)
        return packed if self._context is None else self._context.shard(packed)

    def _model_outputs(self, packed: packing.Packed, temperature: Tensor | None, top: Tensor | int = 0) -> dict[str, Tensor]:
        if self._context is None:
            return super()._model_outputs(packed, temperature, top)
        own = self._context.shard(packed) if packed.which is None else packed
        which = own.which
        assert which is not None
        own_top, own_temperature = top[which] if isinstance(top, Tensor) else top, None if temperature is None else temperature[which]
        found = self._together(lambda: super(FsdpTrain, self)._model_outputs(own, own_temperature, own_top), self._near)
        return {name: self._context.gather(values, which) for name, values in found.items()}

    def _backward(self, loss: Tensor) -> None:
        try:
            super()._backward(loss)
            self._together(self._guard.check)
        except Exception:
            self._is_partial = True
            raise

    def _sum_gradients(self) -> None:
        if self._mesh is not None and self._summed:
            model_parallel.add_up(self._summed, self._mesh)

    def _whole(self, tensor: Tensor) -> AbstractContextManager[Tensor]:
        return contextlib.nullcontext(whole(tensor).detach())

    def _set(self, tensor: Tensor, value: Tensor) -> None:
        tensor.detach().copy_(spread_like(value, tensor))

    def _box(self, tensor: Tensor) -> Box:
        """Its shard. What tensor ranks do not split, all of a tensor group hold; what is not sharded, all ranks of a stage."""
        if not hasattr(tensor, "full_tensor"):
            size = self._ranks.count // self._pp
            return Box(tensor, (0,) * tensor.ndim, self._ranks.rank % size, size)
        names = tensor.device_mesh.mesh_dim_names or ()
        is_split = "expert" in names or ("tensor" in names and tensor.placements[names.index("tensor")].is_shard())
        # As PyTorch's distributed checkpoints ask where a shard lies; an empty one is nowhere.
        chunks = tensor.__create_chunk_list__()
        start = tuple(chunks[0].offsets) if chunks else (0,) * tensor.ndim
        if len(chunks) > 1 or (chunks and tuple(chunks[0].sizes) != tuple(local(tensor).shape)):
            raise InternalError(f"a shard of {list(tensor.shape)} is no box: {tensor.placements}")
        return Box(local(tensor), start, *((0, 1) if is_split else (self._ranks.rank % self._tp, self._tp)))

    def save(self, path: str) -> None:
        """Save in the embedded trainer's format; any number of ranks can go on from it. Rank 0 keeps what is gathered."""
        if self._saves_parts:
            self._write_together(Path(path), *self._in_parts())
            return
        held = self.held_checkpoint(path)
        self._together(lambda: held.write() if held is not None else None)

    @property
    def _saves_parts(self) -> bool:
        return bool(self._settings.options.get("spread_checkpoints")) and self._source.lora is None

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        """Rank 0 holds what is gathered, or each its part."""
        if self._saves_parts:
            return self._held_together(Path(path), *self._in_parts(), self._model)
        is_writer = self._ranks.rank == 0
        state = _whole_state(self._state(), keeps=is_writer)
        weights = {name: _kept(tensor, keeps=is_writer) for name, tensor in lora.whole_state(self._model, self._whole)}
        adapter = {name: _kept(tensor, keeps=is_writer) for name, tensor in lora.adapter_state(self._model, self._whole)}
        return trainer_checkpoint.held(path, self._model, self._codec, state, weights, adapter) if is_writer else None

    def _in_parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What this rank writes of a checkpoint in parts, and the rest of its state with marks in their place. Collective on stages."""
        return trainer_checkpoint.marked(dict(self._own_tensors()), self._state())

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
    return tensor.to("cpu", copy=True) if keeps else tensor.new_empty(0)


# ---- stages


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(eq=False)
class _Pass:
    """A part of a micro-batch, on its way through the stages."""

    batch: Batch
    packed: packing.Packed
    top: Tensor | int = 0
    """As of `EmbeddedTrain._outputs`."""
    loss: Loss | None = None
    """None: nothing is trained."""
    weight: float = 0.0
    """0: it only keeps the ranks together."""
    numbers: npt.NDArray[np.float64] | None = None
    """What the last stage found, [T, any]; of a pass that trains nothing."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    agreement: Agreement = NO_AGREEMENT
    chosen: Tensor | None = None
    """Where the experts of rows are recorded, int64 [R, L, k]: those of the routers of this stage, and zeros."""
    rerouted: Tensor | float = 0.0
    """The sum of `REROUTED` over tokens, as far as the routers of this stage are in it."""


class PipelinedTrain(FsdpTrain):
    """`FsdpTrain` on stages, each of which has some of the layers and is sharded over its own ranks."""

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._loading_device = "cpu"  # A stage goes to its device layer by layer, when it is sharded: the whole may not fit there.
        self._line: Line[_Pass]
        self._num_pending = 0
        """Micro-batches since the last step."""
        self._hidden: Tensor | None = None
        """What came in for the pass that is being computed."""
        self._output: Tensor | None = None
        """What the last stage's model made of it."""
        self._is_begun = False
        """Whether the last stage's model was run in this pass."""
        self._put_off: PutOff | None = None
        """With `schedule: zero-bubble`."""

    @property
    def _vpp(self) -> int:
        return int(str(self._settings.options.get("vpp", 1)))

    @property
    def _num_alike(self) -> int:
        return super()._num_alike * self._pp

    @property
    def _share_number(self) -> int:
        return self._ranks.rank // super()._num_alike % (self._ranks.count // self._num_alike)

    @property
    def _reporters(self) -> Sequence[int]:
        """The first rank of each share on the last stage."""
        return range(self._ranks.count // self._pp * (self._pp - 1), self._ranks.count, super()._num_alike)

    def _placed(self) -> Root:
        device, count = self._settings.device, self._ranks.count
        self._mesh = model_parallel.grid(device, count, self._tp, self._pp)
        self._ranks.limit(*self._mesh.get_all_groups())
        self._line = Line(self._ranks, self._mesh["stage"].get_group(), device, chunks=self._vpp, spreads=count > self._pp)
        self._layers = layers_of_stages(self._model.config.num_hidden_layers, self._pp * self._vpp)
        # The whole model without memory: names, shapes and order, as checkpoints have them.
        held = [*self._model.parameters(), *self._model.buffers()]
        self._frame = copy.deepcopy(self._model, {id(one): _without_memory(one) for one in held})
        groups = groups_of_weights(self._frame)
        self._groups = {name: groups.get(id(one), "rest") for name, one in self._frame.named_parameters()}
        self._plan = super()._optimizers_of(self._frame)
        self._cut()
        self._together(self._check_trained)
        own = self._layers[self._line.stage :: self._pp]
        chunks = [list(map(str, chunk)) for chunk in own]
        return Root(self._model, self._source.head, has_head=self._line.has_last, chunks=chunks, guard=self._guard)

    def _cut(self) -> None:
        """Take out of the model what other stages have, under the names that it has."""
        model, line = self._model, self._line
        base, head_name = model.base_model, "lm_head" if self._source.head == "lm" else "score"
        head = getattr(model, head_name)
        self._is_tied = head.weight is base.embed_tokens.weight
        for i in range(len(base.layers)):
            if not any(i in chunk for chunk in self._layers[line.stage :: self._pp]):
                del base.layers._modules[str(i)]  # Those that stay keep their numbers.
        if not (line.has_first or (line.has_last and self._is_tied)):
            base.embed_tokens = torch.nn.Identity()
        if not line.has_last:
            base.norm = torch.nn.Identity()
        if not (line.has_last or (line.has_first and self._is_tied)):
            setattr(model, head_name, torch.nn.Identity())
            self._head = None
        if self._routers is not None:
            self._routers.keep(model)
        empty_cache(self._settings.device)

    def _check_trained(self) -> None:
        if not any(parameter.requires_grad for parameter in self._model.parameters()):
            what = f"no adapter is on a layer of stage {self._line.stage + 1} of {self._pp}, which would train nothing"
            raise EngineError(what, now="Name layers of each stage in Lora(targets=...), or take fewer stages.")

    def _guard_parts(self) -> None:
        super()._guard_parts()
        if self._is_without_bubble and self._mesh is not None:
            reduced = torch.float32 if "compute_dtype" in self._settings.options else None
            own = [[self._model.base_model.layers._modules[str(i)] for i in chunk] for chunk in self._layers[self._line.stage :: self._pp]]
            self._put_off = PutOff(own, self._mesh["data"], self._guard, self._settings.device, reduced)

    def _stage_of(self, name: str) -> int:
        """The stage that has a weight; of tied ones, the first that has."""
        if (found := _LAYER.search(name)) is not None:
            return next(number for number, own in enumerate(self._layers) if int(found[1]) in own) % self._pp
        return 0 if ".embed_tokens." in name else self._pp - 1

    def _optimizers_of(self, model: Any) -> Optimizers:
        if self._mesh is None:  # The whole model, before it is spread.
            return super()._optimizers_of(model)
        named = dict(model.named_parameters())
        repeated = frozenset(name for name in named if self._stage_of(name) != self._line.stage)
        return Optimizers(
            named.values(),
            matrices=matrices_of_layers(model),
            groups={id(one): self._groups[name] for name, one in named.items()},
            names={id(one): name for name, one in named.items()},
            has_masters=self._keeps_masters,
            elsewhere=Elsewhere(list(self._groups), repeated, self._over_stages),
        )

    def _over_stages(self, norms: Mapping[str, float]) -> dict[str, float]:
        """Norms by group over all stages, from those of each stage's own weights. Summed in the order of stages."""
        of_stages: list[dict[str, float]] = [json.loads(words) for words in self._line.words_of_stages(json.dumps(norms))]
        names = dict.fromkeys(name for of_one in of_stages for name in of_one)
        return {name: math.sqrt(sum(of_one.get(name, 0.0) ** 2 for of_one in of_stages)) for name in names}

    def stop(self) -> None:
        super().stop()
        self._hidden = self._output = self._put_off = None
        self._num_pending = 0
        for name in ("_line", "_frame", "_plan"):
            self.__dict__.pop(name, None)

    # Training

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        batch, loss = self._to_train(batch, objective.loss), objective.loss
        num_masked = packing.num_masked(batch.ragged("loss_mask"))
        metrics, agreement = dict[str, float](), NO_AGREEMENT
        if num_masked.any():
            is_whole = "group_ids" in loss.needs
            own, weight = self._share(batch, num_masked, is_whole=is_whole)
            count = self._count("micro_batches", self._pp)
            parts = self._cut_into(count, own, weight, is_whole=is_whole)
            passes = self._together(lambda: [self._pass(part, loss, counts) for part, counts in parts])
            self._num_pending += 1
            self._run(passes, self._trained, trains=True)
            metrics = self._ranks.total(self._sums_of_stages(passes))
            if "same_weights" in batch:
                reports = self._ranks.rank in self._reporters
                agreement = self._agreed(Agreement.of_all([one.agreement for one in passes if one.weight and reports]))
        return Sums.of_passes(batch, int(num_masked.sum()), metrics, agreement)

    def _pass(self, batch: Batch, loss: Loss, weight: float) -> _Pass:
        top, packed = self._top_ids(batch, loss) if TOP_LOGPROBS in loss.needs else 0, self._pack(batch)
        if self._routers is not None:
            packed = self._routers.balanced(packed, batch, loss.denominator if weight else None, self._source.balance)
        return _Pass(batch, packed, top, loss, weight)

    def _pack(self, batch: Batch) -> packing.Packed:
        packed = super()._pack(batch)
        if packed.experts is None or self._routers is None:
            return packed
        return dataclasses.replace(packed, experts=self._routers.of_routers(packed.experts))

    def _sums_of_stages(self, passes: Sequence[_Pass]) -> dict[str, float]:
        """Sum metrics over passes. Those of the loss are on the last stage; of what routers did, each stage has a part."""
        sums, packed = self._sums_of([(one.metrics, one.weight) for one in passes]), passes[0].packed
        counted = [one for one in passes if one.weight and self._ranks.rank % self._tp == 0]  # Tensor ranks see the same.
        if packed.experts is not None:
            sums[REROUTED] = math.fsum(float(one.rerouted) * one.weight for one in counted)
        if packed.balanced is not None:
            losses = [(one.packed.balanced.sums(), one.weight) for one in counted if one.packed.balanced is not None]
            sums |= {name: math.fsum(of_one[name] * weight for of_one, weight in losses) for name in (BALANCE_LOSS, Z_LOSS)}
        return sums

    def _run(self, passes: Sequence[_Pass], compute: Callable[[_Pass, Tensor | None], Tensor | None], *, trains: bool) -> None:
        """Send passes through the stages. Raises on every rank what one of them raised on one."""
        dtype = getattr(torch, str(self._settings.options.get("compute_dtype", self._source.dtype)))
        width = self._model.config.hidden_size
        try:
            put_off = self._put_off if trains else None
            self._line.run(
                passes,
                compute,
                lambda one: torch.empty(1, one.packed.num_rows, width, dtype=dtype, device="meta"),
                trains=trains,
                left=None if put_off is None else lambda: put_off.taken(self._line.chunk),
            )
            self._together(self._raise_failure)
        except Exception:
            self._is_partial = self._is_partial or trains
            raise
        finally:
            self._hidden = self._output = None
            if self._put_off is not None:
                self._put_off.forget()

    def _raise_failure(self) -> None:
        error = self._line.failure
        self._guard.check()
        if error is not None:
            raise error if isinstance(error, M2FlowError) else unexpected("a pass through the stages", error)

    def _trained(self, one: _Pass, hidden: Tensor | None) -> Tensor:
        self._take(one, hidden)
        assert one.loss is not None
        if not self._line.is_last:
            found: Tensor = self._root(one.packed, hidden, self._line.chunk)
            self._note_routing(one)
            return found
        try:
            outputs = self._outputs(one.batch, one.packed, one.top)
            self._note_routing(one)
            terms, one.metrics, one.agreement = self._terms_of(one.batch, one.loss, outputs)
            one.metrics[NUM_SHARED] = float(one.packed.num_shared)
            return terms.sum() * one.weight
        except Exception as error:
            return (
                self._failed_beside(error, one).float().sum() * 0.0
            )  # The other stages wait for a gradient, and the ranks of this one for its passes.

    def _failed_beside(self, error: Exception, one: _Pass) -> Tensor:
        """Note what failed before or after the model on the last stage; the model's output, for which the stage's ranks need each other."""
        if self._output is None:
            if self._is_begun:
                raise error
            self._output = self._root(one.packed, self._hidden, self._line.chunk)
        self._line.failure = self._line.failure or error
        return self._output

    def _take(self, one: _Pass, hidden: Tensor | None) -> None:
        self._hidden, self._output, self._is_begun = hidden, None, False
        if self._routers is not None:
            self._routers.use(one.packed.experts, one.packed.balanced)

    def _note_routing(self, one: _Pass) -> None:
        """Keep what the routers of the chunk that was computed have chosen in this pass."""
        if self._routers is None:
            return
        if one.chosen is not None:
            self._routers.put_chosen(one.chosen)
        if one.loss is not None:
            routed = self._routers.counted(one.packed, counts=one.weight > 0)
            one.rerouted = one.rerouted + routed[REROUTED].double().sum() if REROUTED in routed else 0.0

    def _forward(self, packed: packing.Packed) -> Tensor:
        self._is_begun = True
        self._output = output = self._root(packed, self._hidden, self._line.chunk)
        if self._guard.error is not None:
            raise self._guard.error
        return output[0] if self._source.head == "lm" else output[:, 0].float()

    def _backward(self, loss: Tensor) -> None:
        raise NotImplementedError  # The line does it.

    def _sum_gradients(self) -> None:
        super()._sum_gradients()
        line = self._line
        if self._is_tied and self._num_pending and (line.has_first or line.has_last):
            shared = self._model.get_input_embeddings().weight
            if not shared.requires_grad:  # Beside adapters.
                return
            if shared.grad is None:
                shared.grad = torch.zeros_like(shared)
            line.summed_with(self._pp - 1 if line.has_first else 0, local(shared.grad))

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        try:
            return super().apply(optimizer, denominator)
        finally:
            self.discard()

    def discard(self) -> None:
        super().discard()
        self._num_pending = 0

    # Passes without gradient

    def _scored(self, exchanges: Sequence[Batch]) -> list[npt.NDArray[Any]]:
        return self._of_runs(exchanges, "values", 0)

    def _of_runs(self, runs: Sequence[Batch], output: str, top_k: int) -> list[npt.NDArray[Any]]:
        """The numbers of each run on the last stage, with the experts that are recorded beside them; elsewhere nothing."""
        mixture = self._recorded(output, top_k)
        passes = self._together(lambda: [self._read_pass(rows, top_k, mixture) for rows in runs])
        self._run(passes, functools.partial(self._read, output), trains=False)
        for one in passes:
            if one.chosen is not None and mixture is not None and self._routers is not None:
                self._line.total(one.chosen)
                chosen = self._routers.of_all_rows(one.chosen, one.packed)
                if one.numbers is not None:
                    one.numbers = beside_experts(one.numbers, one.batch.ragged("loss_mask"), (one.packed, chosen), mixture)
        return [np.zeros(0) if one.numbers is None else one.numbers for one in passes]

    def _read_pass(self, rows: Batch, top_k: int, mixture: Mixture | None) -> _Pass:
        one = _Pass(rows, self._pack(rows), top_k)
        if mixture is not None:
            one.chosen = one.packed.targets.new_zeros(one.packed.num_rows, mixture.num, mixture.num_of_token)
        return one

    def _read(self, output: str, one: _Pass, hidden: Tensor | None) -> Tensor | None:
        self._take(one, hidden)
        if not self._line.is_last:
            found: Tensor = self._root(one.packed, hidden, self._line.chunk)
            self._note_routing(one)
            return found
        try:
            outputs = self._outputs(one.batch, one.packed, one.top)
            self._note_routing(one)
        except Exception as error:
            self._failed_beside(error, one)
            return None
        names = [output, *((REFERENCE_TOP_IDS, REFERENCE_TOP_LOGPROBS) if one.top else ())]
        one.numbers = np.concatenate([outputs[name].double().cpu().numpy().reshape(len(outputs[output]), -1) for name in names], 1)
        return None

    # Weights and states

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor whole on every rank, one after the other. Collective."""
        for name, tensor in self._of_stages(lora.whole_state):
            yield from checkpoint_tensors(self._frame, name, tensor)

    def base(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._of_stages(functools.partial(lora.whole_state, adds=False)):
            yield from checkpoint_tensors(self._frame, name, tensor)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._of_stages(lora.adapter_state):
            yield lora.file_name(name), tensor

    def _of_stages(self, state: Callable[..., Iterator[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what `state` yields of the whole model, each tensor whole on every rank, from the stage that has it. Collective.

        Args:
            state: `lora.whole_state` or `lora.adapter_state`.
        """
        own = state(self._model, self._whole)
        for name, like in state(self._frame):
            stage, found = self._stage_of(name), None
            if stage == self._line.stage:  # In the same order; what other stages have too is passed over.
                found = next(tensor.detach() for of_own, tensor in own if of_own == name)
            yield name, self._line.of_stage(stage, found, like)

    def adapter_values(self) -> list[Tensor]:
        return [tensor.clone() for _, tensor in self._of_stages(lora.adapter_state)]

    def read_adapters(self, path: str) -> list[Tensor]:
        found = self._together(lambda: trainer_checkpoint.read_weights(path, self._source, self._shapes))
        return [found[name] for name, _ in lora.adapter_state(self._frame)]

    def put_adapters(self, values: Sequence[Tensor]) -> None:
        given = dict(zip((name for name, _ in lora.adapter_state(self._frame)), values, strict=True))
        super().put_adapters([given[name] for name, _ in lora.adapter_state(self._model)])

    def weight_forms(self) -> Sequence[WeightForm] | None:
        if lora.is_adapted(self._frame):  # As of `RankedTrain`.
            return None
        named = trainer_checkpoint.named_weights(self._frame)
        return [WeightForm(name, str(like.dtype).removeprefix("torch."), tuple(like.shape)) for name, like in named]

    def _held_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self._own_tensors() if self._stage_of(name) == self._line.stage)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def copy_from(self, source: TrainEngine, share: float = 1.0) -> None:
        if share == 1 and self._copy_adapters_only(source):
            return
        # Adapters add nothing yet: what they are beside is all that the other has.
        own = {plain: tensor for name, tensor in self._own_tensors() if (plain := lora.plain_name(name))}
        given, waiting = iter(source.weights()), dict[str, Tensor]()
        for name, like in lora.whole_state(self._frame, adds=False):
            full = whole(own[name]).detach().clone() if name in own else None
            for part, view in checkpoint_tensors(self._frame, name, like if full is None else full):
                while part not in waiting and (found := next(given, None)) is not None:
                    waiting[found[0]] = found[1].clone()  # It may be whole only until the next one.
                if part in waiting and full is not None:
                    view.copy_(blended(view, waiting[part], share))
                waiting.pop(part, None)
            if full is not None:
                self._set(own[name], full)
        for _ in given:  # All ranks go to the end.
            pass

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        if self._saves_parts:
            return self._held_together(Path(path), *self._in_parts(), self._frame)
        keeps = self._ranks.rank == 0
        weights = {name: _kept(tensor, keeps=keeps) for name, tensor in self._of_stages(lora.whole_state)}
        adapter = {name: _kept(tensor, keeps=keeps) for name, tensor in self._of_stages(lora.adapter_state)}
        state = self._states(None)
        return trainer_checkpoint.held(path, self._frame, self._codec, state, weights, adapter) if keeps else None

    def _in_parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        parts = {trainer_checkpoint.WEIGHT + name: tensor.detach() for name, tensor in self._held_tensors()}
        return parts, self._states(parts)

    def _states(self, parts: dict[str, Tensor] | None) -> dict[str, Any]:
        """What a checkpoint has beside the weights, whole on the first rank.

        Args:
            parts: where sharded tensors of this rank's stage are put, and marks in their place; None: nowhere.
        """
        if self._is_lent:
            return self._state()
        optimizers = []
        for number, entry in enumerate(self._optimizers.state()):
            of_parameters = self._of_all_stages(self._optimizers.by_name(entry), f"state.{number}", parts)
            optimizers.append(self._plan.renumbered(entry, of_parameters))
        masters = dict(zip(self._optimizers.names, self._optimizers.masters(), strict=True))
        of_all = self._of_all_stages({name: {"": master} for name, master in masters.items()}, "masters", parts)
        return {"optimizers": optimizers, "masters": [of_all[name][""] for name in self._plan.names]}

    def _of_all_stages(
        self, own: Mapping[str, Mapping[str, Any]], prefix: str, parts: dict[str, Tensor] | None
    ) -> dict[str, dict[str, Any]]:
        """Tensors, or nothing, by the name of their weight and their own, from the stage that has the weight. `parts` as of `_states`."""

        def told(value: Tensor | None) -> list[Any] | None:
            is_part = parts is not None and hasattr(value, "full_tensor")
            return None if value is None else [is_part, list(value.shape), str(value.dtype).removeprefix("torch.")]

        own_words = json.dumps({name: {key: told(value) for key, value in held.items()} for name, held in own.items()})
        of_stages = [json.loads(words) for words in self._line.words_of_stages(own_words)]
        found: dict[str, dict[str, Any]] = {}
        for name in self._plan.names:
            stage = self._stage_of(name)
            for key, about in of_stages[stage].get(name, {}).items():
                of_one, value = found.setdefault(name, {}), own[name][key] if stage == self._line.stage else None
                if about is None:
                    of_one[key] = None
                elif parts is not None and about[0]:
                    of_one[key] = trainer_checkpoint.mark(where := f"{prefix}.{name}.{key}")
                    if value is not None:
                        parts[where] = value.detach()
                else:
                    like = torch.empty(about[1], dtype=getattr(torch, about[2]), device="meta")
                    full = self._line.of_stage(stage, None if value is None else whole(value).detach(), like)
                    of_one[key] = _kept(full, keeps=self._ranks.rank == 0)
        return found

    def load(self, path: str) -> None:
        weights, state = self._together(
            lambda: (trainer_checkpoint.read_weights(path, self._source, self._shapes), trainer_checkpoint.read_state(path, "cpu"))
        )
        self.discard()
        with torch.no_grad():
            for name, tensor in self._own_tensors():
                if name in weights:  # Of a model with adapters, these alone.
                    self._set(tensor, weights[name])
        masters = dict(zip(self._plan.names, state.get("masters") or [None] * len(self._plan.names), strict=True))
        self._optimizers.load_masters([masters[name] for name in self._optimizers.names])
        entries = [self._optimizers.renumbered(entry, self._plan.by_name(entry)) for entry in state["optimizers"]]
        self._optimizers.load_state(entries)


def _without_memory(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
