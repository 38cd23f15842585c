"""The trainer for models that one device can't hold: FSDP2, every parameter, gradient and optimiser state spread over all ranks.

    every rank:  the same micro-batch --shares--> its own samples --packed passes of the embedded trainer--> gradients
                 gradients --reduce-scatter, summed--> each rank's part --AdamW--> its part of the weights

What a rank computes is the embedded trainer's code; this file spreads the model, gives each rank its share of a batch, and puts
results together again. Sums go over ranks in their order, so one layout always gives the same bits. The passes that need the model are
as many on every rank: one that has nothing left does a pass whose result counts nothing.

Options: `compute_dtype` (`bfloat16`: passes in it, float32 weights), `cpu_offload`, `reshard_after_forward`.

Limits: every rank reads the whole model once, at its start, in the memory of its host; tensor parallelism is not offered.
Source: PyTorch FSDP2 (torch.distributed.fsdp.fully_shard); ZeRO stage 3 (Rajbhandari et al., 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from m2flow.engines import checkpoint, packing, scalar_head
from m2flow.engines.adamw import Optimizers
from m2flow.engines.contract import Capabilities, EngineSettings, Objective, ParallelLayouts, Sums
from m2flow.engines.embedded_train import EmbeddedTrain
from m2flow.engines.hf_names import checkpoint_tensors
from m2flow.engines.ranks import Ranks, shares
from m2flow.engines.spread import whole
from m2flow.errors import EngineError, M2FlowError
from m2flow.recipe import AdamW, Model
from m2flow.samples import Batch, Ragged, group_keys

# Shapes: N samples, T tokens under the loss mask.

_T = TypeVar("_T")


class FsdpTrain(EmbeddedTrain):
    """The embedded trainer on a model that is spread over ranks."""

    name = "fsdp"
    capabilities = Capabilities(
        "train", heads=tuple(scalar_head.HEADS), devices=("cpu", "cuda"), parallel_layouts=ParallelLayouts(dp=None, zero=(3,))
    )

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._ranks = Ranks(settings)
        self._root: Any = None

    def start(self) -> None:
        self._ranks.open()
        super().start()
        self._root = _Root(self._model, packing.batched_logits if self._source.head == "lm" else scalar_head.column_scalars)
        mesh = DeviceMesh.from_group(self._ranks.group, torch.device(self._settings.device).type)
        how = {"mesh": mesh, **_options(self._settings.options)}
        for layer in _layers(self._model):
            fully_shard(layer, **how)
        fully_shard(self._root, **how)
        for module in self._root.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)  # Gradients are sums; the caller's denominator divides them.
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no other.
        self._optimizers = Optimizers(self._root.parameters())

    def stop(self) -> None:
        self._root = None
        super().stop()
        self._ranks.close()

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        batch = self._demonstrations.tokenised(batch).in_order()
        num_masked = packing.num_masked(batch.ragged("loss_mask"))
        metrics: dict[str, float] = {}
        if num_masked.any():
            own, weight = self._share(batch, num_masked)
            terms, metrics = self._together(lambda: self._terms(own, objective.loss))
            (terms.sum() * weight).backward()
            metrics = self._ranks.total({name: value * weight for name, value in metrics.items()})
        return Sums(len(batch), int(num_masked.sum()), len(batch.ragged("tokens").values), metrics)

    def apply(self, optimizer: AdamW, denominator: float) -> Mapping[str, float]:
        return self._together(lambda: super(FsdpTrain, self).apply(optimizer, denominator))

    def scores(self, batch: Batch) -> Batch:
        self._check_head("score", "scores")
        ordered = batch.in_order()
        tokens, mask = self._together(
            lambda: scalar_head.scored_tokens(self._codec, ordered, self._model.config.get_text_config().max_position_embeddings)
        )

        def score(rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
            packed = packing.pack(ordered.ids[rows], tokens.take(rows), mask.take(rows), device=self._settings.device, share_prompts=False)
            found: npt.NDArray[Any] = self._forward(packed).double().cpu().numpy()
            return found

        scores = self._spread(ordered, tokens, mask, score)
        if not np.isfinite(scores).all():
            raise EngineError(f"the reward model {self._source.path} gave a score that is not finite")
        return Batch(ordered.ids, {"reward": scores}).select(batch.ids)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole on every rank, one after the other; all ranks go through them together."""
        for name, tensor in _named_weights(self._model):
            yield from checkpoint_tensors(self._model, name, whole(tensor).detach())

    def save(self, path: str) -> None:
        """In the format of the embedded trainer, which can go on from it, as can any number of ranks."""
        state = {"optimizers": _whole_state(self._optimizers.state())}
        weights = {name: whole(tensor).detach().cpu() for name, tensor in _named_weights(self._model)}
        self._together(lambda: checkpoint.save(path, self._model, self._codec, state, weights) if self._ranks.rank == 0 else None)

    def load(self, path: str) -> None:
        self._together(lambda: super(FsdpTrain, self).load(path))

    def _forward(self, packed: packing.Packed) -> Tensor:
        output: Tensor = self._root(packed)
        return output[0] if self._source.head == "lm" else output[:, 0].float()

    def _of_tokens(self, batch: Batch, column: str, output: str) -> Batch:
        ordered = self._demonstrations.tokenised(batch).in_order()
        tokens, mask = ordered.ragged("tokens"), ordered.ragged("loss_mask")

        def compute(rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
            part = ordered.take(rows)
            found: npt.NDArray[Any] = self._outputs(part, self._pack(part))[output].double().cpu().numpy()
            return found

        values = np.zeros(len(mask.values), np.float32)
        values[mask.values.astype(bool)] = self._spread(ordered, tokens, mask, compute)
        return Batch(ordered.ids, {column: Ragged(values, mask.offsets)}).select(batch.ids)

    # What each rank does of a batch

    def _share(self, batch: Batch, num_masked: npt.NDArray[np.int64]) -> tuple[Batch, float]:
        """This rank's samples, and what they count: one that has none does the first of the batch, for nothing."""
        rows = np.flatnonzero(num_masked)
        of_ranks = shares(batch.ragged("tokens").lengths[rows].tolist(), group_keys(batch.ids[rows]).tolist(), self._ranks.count)
        own = rows[of_ranks[self._ranks.rank]]
        return (batch.take(own), 1.0) if len(own) else (batch.take(rows[:1]), 0.0)

    def _spread(
        self, batch: Batch, tokens: Ragged, mask: Ragged, compute: Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]
    ) -> npt.NDArray[np.float64]:
        """One number for each masked token of the batch, float64 [T], in order, each computed by one rank, known to all."""
        num_masked = packing.num_masked(mask)
        rows = np.flatnonzero(num_masked)
        if not len(rows):
            return np.zeros(0)
        of_ranks = [rows[share] for share in shares(tokens.lengths[rows].tolist(), group_keys(batch.ids[rows]).tolist(), self._ranks.count)]
        own = of_ranks[self._ranks.rank]
        runs = [own[run] for run in self._runs(tokens.take(own))] if len(own) else []
        parts: list[npt.NDArray[Any]] = []
        with torch.no_grad():
            for turn in range(self._ranks.most(len(runs))):
                found = compute(runs[turn] if turn < len(runs) else rows[:1])
                if turn < len(runs):
                    parts.append(found)
        gathered = self._ranks.gather(np.concatenate([*parts, np.zeros(0)]))
        starts = np.concatenate(([0], np.cumsum(num_masked)))
        result = np.zeros(int(starts[-1]))
        for share, values in zip(of_ranks, gathered, strict=True):
            where = [np.arange(starts[row], starts[row + 1]) for row in share.tolist()]
            if where:
                result[np.concatenate(where)] = values
        return result

    def _together(self, work: Callable[[], _T]) -> _T:
        """Do what may fail, and fail on every rank if it does on one."""
        try:
            result = work()
        except M2FlowError as error:
            self._ranks.agree(error)
            raise
        self._ranks.agree(None)
        return result


def _options(options: Mapping[str, object]) -> dict[str, Any]:
    """What `fully_shard` is told."""
    name = str(options.get("compute_dtype", "float32"))
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"compute_dtype is no dtype of torch: {name!r}", now="Write bfloat16 or float32.")
    return {
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32) if "compute_dtype" in options else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if options.get("cpu_offload") else OffloadPolicy(),
        "reshard_after_forward": bool(options.get("reshard_after_forward", True)),
    }


class _Root(torch.nn.Module):  # type: ignore[misc]
    """The module around the model: its forward is what gathers the weights outside the layers. The model's own class stays as it is.

    Its output must be no view: the gathering of the backward pass hangs on it."""

    def __init__(self, model: Any, forward: Callable[[Any, packing.Packed], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._compute = forward

    def forward(self, packed: packing.Packed) -> Tensor:
        return self._compute(self.model, packed)


def _layers(model: Any) -> list[torch.nn.Module]:
    """The blocks whose weights are gathered together: what the architecture says must not be split."""
    kinds = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    if not found:
        raise EngineError(f"a {model.config.model_type!r} model does not say what its layers are", now="Use the train engine `embedded`.")
    return found


def _named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """By Hugging Face name; a tied one comes once. By object: parts of tensors may be empty, and share an address."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _whole_state(saved: Any) -> Any:
    """Optimisers' state with every tensor whole, in the host's memory. Collective."""
    if isinstance(saved, dict):
        return {key: _whole_state(value) for key, value in saved.items()}
    if isinstance(saved, list):
        return [_whole_state(value) for value in saved]
    return whole(saved).cpu() if isinstance(saved, Tensor) else saved
