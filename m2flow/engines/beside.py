"""A frozen model that computes from the weights of a policy with adapters, in the same memory: it has no weights of its own.

    policy's trainer --beside--> Beside: log-probabilities by the policy's model, its adapters left out, or others in their place meanwhile

Training never changes what is beside adapters, so a reference on the policy's path is the policy without them, and a reference that was
made of the policy is the policy with the adapters that it had then, which are all that is kept of it. Nothing is copied when the policy
leaves its devices or comes back; with several ranks, each computes from its parts, so all of them call it together, as they do the policy.

Source: Hu et al. 2021, LoRA, arXiv:2106.09685, section 4.2, for models that share one base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2flow.engines.accounting import Memory, bytes_on
from m2flow.engines.contract import Objective, Sums, TrainEngine
from m2flow.errors import EngineError
from m2flow.recipe import AdamW, Model
from m2flow.samples import Batch

if TYPE_CHECKING:
    from m2flow.engines.embedded_train import EmbeddedTrain


class Beside(TrainEngine):
    """Of a model that is the lender's without adapters, or with some that the lender's may once have been."""

    def __init__(self, lender: EmbeddedTrain, model: Model) -> None:
        self.name, self.capabilities = lender.name, lender.capabilities
        self._lender = lender
        self._has_own = model.lora is not None
        self._adapters: list[Tensor] | None = None
        """Whole, on every rank. None: none, or such as add nothing yet."""

    def start(self) -> None:
        return

    def stop(self) -> None:
        self._adapters = None

    def onload(self) -> None:
        return

    def offload(self) -> None:
        if self._adapters is not None:
            self._adapters = [values.cpu() for values in self._adapters]

    def memory(self) -> Memory:
        return Memory(weights=bytes_on(self._lender.device, self._adapters or []))

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        self._refuse()

    def apply(self, optimizer: AdamW, denominator: float) -> Mapping[str, float]:
        self._refuse()

    def discard(self) -> None:
        return

    def logprobs(self, batch: Batch) -> Batch:
        with self._lender.lent(self._adapters):
            return self._lender.logprobs(batch)

    def num_training_tokens(self, batch: Batch) -> npt.NDArray[np.int64]:
        return self._lender.num_training_tokens(batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        with self._lender.lent(self._adapters):
            yield from self._lender.weights()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        with self._lender.lent(self._values()):
            yield from self._lender.adapters()

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return self._lender.base()

    def copy_from(self, source: TrainEngine) -> None:
        """Keep the adapters that a policy has now, whose weights beside them are the lender's."""
        if isinstance(source, Beside):
            self._adapters = source._values()
        elif type(source) is type(self._lender):
            self._adapters = source.adapter_values()
        else:
            raise EngineError(f"a model beside the adapters of a trainer {self.name!r} can't take the weights of {source.name!r}")

    def save(self, path: str) -> None:
        with self._lender.lent(self._values()):
            self._lender.save(path)

    def load(self, path: str) -> None:
        if self._has_own:
            self._adapters = self._lender.read_adapters(path)

    def _values(self) -> list[Tensor]:
        """Those that it has; where they add nothing, zeros."""
        if self._adapters is not None:
            return [values.clone() for values in self._adapters]
        return [torch.zeros_like(values) for values in self._lender.adapter_values()]

    def _refuse(self) -> NoReturn:
        raise EngineError("a model that computes from a policy's weights can't be trained")
