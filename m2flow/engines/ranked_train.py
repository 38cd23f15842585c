"""What every trainer of several ranks does with a batch, whatever spreads its model: FSDP2 here, DeepSpeed there.

    every rank:  the same micro-batch --shares--> its own samples --packed passes of the embedded trainer--> gradients, numbers
                 numbers --gathered--> the whole batch's, on every rank

The passes that need the model are as many on every rank: one that has nothing left does a pass whose result counts nothing. An error of
one rank is an error of all, at the same place. How gradients add up over ranks, and who steps, is the engine's (`_backward`, `apply`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2flow.engines import lora, packing, scalar_head
from m2flow.engines.agreement import NO_AGREEMENT, Agreement
from m2flow.engines.contract import EngineSettings, Objective, Sums, TrainEngine
from m2flow.engines.embedded_train import EmbeddedTrain
from m2flow.engines.hf_names import checkpoint_tensors
from m2flow.engines.ranks import Ranks, shares
from m2flow.errors import EngineError, M2FlowError
from m2flow.recipe import Model
from m2flow.samples import Batch, Ragged, group_keys

# Shapes: N samples, T tokens under the loss mask.

_T = TypeVar("_T")


class RankedTrain(EmbeddedTrain):
    """The embedded trainer's passes, shared out over ranks. The model is called through `_root`, which `start` makes."""

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._ranks = Ranks(settings)
        self._root: Any = None

    @property
    def _num_alike(self) -> int:
        """Neighbouring ranks that hold parts of the same layers, or parts of the same sequences, and so see the same samples. The first of
        them says what they found."""
        return 1

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Add this rank's gradients to those of the others, as a sum."""

    @abstractmethod
    def _own_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The model's tensors, of which this rank may have parts, by name."""

    @abstractmethod
    def _set(self, tensor: Tensor, value: Tensor) -> None:
        """Give one of the model's tensors another value, which every rank has whole."""

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        batch = self._tokenised(batch).in_order()
        num_masked = packing.num_masked(batch.ragged("loss_mask"))
        metrics, agreement = dict[str, float](), NO_AGREEMENT
        if num_masked.any():
            own, weight = self._share(batch, num_masked)
            terms, metrics, of_own = self._together(lambda: self._terms(own, objective.loss))
            self._backward(terms.sum() * weight)
            counted = weight if self._ranks.rank % self._num_alike == 0 else 0.0
            metrics = self._ranks.total({name: value * counted for name, value in metrics.items()})
            if "same_weights" in batch:
                agreement = self._agreed(of_own if counted else NO_AGREEMENT)
        return Sums(len(batch), int(num_masked.sum()), len(batch.ragged("tokens").values), metrics, agreement)

    def _agreed(self, own: Agreement) -> Agreement:
        """The agreement of all ranks' samples, in the order of ranks."""
        parts = self._ranks.gather(np.array([own.num_tokens, own.total, own.largest, own.total_k3], np.float64))
        return Agreement.of_all([Agreement(int(count), *map(float, numbers)) for count, *numbers in parts])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole on every rank, one after the other; where ranks hold parts, all go through them together."""
        for name, tensor in lora.whole_state(self._model, self._whole):
            yield from checkpoint_tensors(self._model, name, tensor)

    def copy_from(self, source: TrainEngine) -> None:
        if self._took_adapters(source):
            return
        given, waiting = iter(source.weights()), dict[str, Tensor]()
        for name, tensor in self._own_tensors():
            if not (name := lora.plain_name(name)):  # Adapters add nothing yet: what they are beside is all that the other has.
                continue
            with self._whole(tensor) as held:
                full = held.clone()
            for part, view in checkpoint_tensors(self._model, name, full):
                while part not in waiting and (found := next(given, None)) is not None:
                    waiting[found[0]] = found[1].clone()  # It may be whole only until the next one.
                if part in waiting:
                    view.copy_(waiting.pop(part))
            self._set(tensor, full)
        for _ in given:  # All ranks go to the end.
            pass

    def read_adapters(self, path: str) -> list[Tensor]:
        return self._together(lambda: super(RankedTrain, self).read_adapters(path))

    def scores(self, batch: Batch) -> Batch:
        self._check_head("score", "scores")
        ordered = batch.in_order()
        tokens, mask = self._together(lambda: scalar_head.scored_tokens(self._codec, ordered, self._longest))

        def score(rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
            packed = packing.pack(ordered.ids[rows], tokens.take(rows), mask.take(rows), device=self._settings.device, share_prompts=False)
            found: npt.NDArray[Any] = self._said(packed, None)["values"].double().cpu().numpy()
            return found

        scores = self._spread(ordered, tokens, mask, score)
        if not np.isfinite(scores).all():
            raise EngineError(f"the reward model {self._source.path} gave a score that is not finite")
        return Batch(ordered.ids, {"reward": scores}).select(batch.ids)

    def _forward(self, packed: packing.Packed) -> Tensor:
        output: Tensor = self._root(packed)
        return output[0] if self._source.head == "lm" else output[:, 0].float()

    def _of_tokens(self, batch: Batch, column: str, output: str) -> Batch:
        ordered = self._tokenised(batch).in_order()
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
        num_shares = self._ranks.count // self._num_alike
        of_ranks = shares(batch.ragged("tokens").lengths[rows].tolist(), group_keys(batch.ids[rows]).tolist(), num_shares)
        own = rows[of_ranks[self._ranks.rank // self._num_alike]]
        return (batch.take(own), 1.0) if len(own) else (batch.take(rows[:1]), 0.0)

    def _spread(
        self, batch: Batch, tokens: Ragged, mask: Ragged, compute: Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]
    ) -> npt.NDArray[np.float64]:
        """One number for each masked token of the batch, float64 [T], in order, each computed by one rank, known to all."""
        num_masked = packing.num_masked(mask)
        rows = np.flatnonzero(num_masked)
        if not len(rows):
            return np.zeros(0)
        num_shares = self._ranks.count // self._num_alike
        of_ranks = [rows[share] for share in shares(tokens.lengths[rows].tolist(), group_keys(batch.ids[rows]).tolist(), num_shares)]
        own = of_ranks[self._ranks.rank // self._num_alike]
        runs = [own[run] for run in self._runs(tokens.take(own))] if len(own) else []
        parts: list[npt.NDArray[Any]] = []
        with torch.no_grad():
            for turn in range(self._ranks.most(len(runs))):
                found = compute(runs[turn] if turn < len(runs) else rows[:1])
                if turn < len(runs):
                    parts.append(found)
        gathered = self._ranks.gather(np.concatenate([*parts, np.zeros(0)]))[:: self._num_alike]
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


class Root(torch.nn.Module):  # type: ignore[misc]
    """The module around the model: its forward is what gathers the weights outside the layers. The model's own class stays as it is.

    Its output must be no view: the gathering of the backward pass hangs on it."""

    def __init__(self, model: Any, head: str) -> None:
        super().__init__()
        self.model = model
        self._compute = packing.batched_logits if head == "lm" else scalar_head.column_scalars

    def forward(self, packed: packing.Packed) -> Tensor:
        return self._compute(self.model, packed)
