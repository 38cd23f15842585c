"""Demonstrations: rows of `prompt` and `target` texts, as token columns with the loss mask on what the model is to learn.

    tokens = prompt + target + end of sequence;  loss_mask = False for the prompt, True for the rest

A text is tokenised once: the planner asks for lengths before it trains, and epochs come back. What is remembered goes by the
texts themselves, and is forgotten when it gets large.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from m2flow.errors import DatasetError
from m2flow.samples import Batch, Ragged, SampleId

if TYPE_CHECKING:
    from m2flow.engines.hf_model import TextCodec

_MAX_REMEMBERED_TOKENS = 1 << 24
"""64 MiB of ids."""


@dataclass
class Demonstrations:
    """Tokenises demonstrations with one tokenizer."""

    codec: TextCodec
    _known: dict[tuple[str, str], tuple[npt.NDArray[np.int32], int]] = field(default_factory=dict, init=False)
    _num_remembered: int = field(default=0, init=False)

    def tokenised(self, batch: Batch) -> Batch:
        """The batch with `tokens` (int32) and `loss_mask` columns; as it is if it has tokens already.

        Raises:
            DatasetError: neither tokens nor texts, or a prompt without a single token, after which nothing can be predicted.
        """
        if "tokens" in batch:
            return batch
        if "prompt" not in batch or "target" not in batch:
            raise DatasetError(
                f"a batch to train on needs `tokens`, or `prompt` and `target` texts; it has {', '.join(sorted(batch.columns))}",
                now="Train on the samples of a generate call, or give the dataset a column `target`.",
            )
        rows = [self._encode(*texts, i) for texts, i in zip(_texts(batch), batch.ids.tolist(), strict=True)]
        tokens = Ragged.of([ids for ids, _ in rows], np.int32)
        num_prompt = np.array([count for _, count in rows], np.int64)
        position = np.arange(len(tokens.values)) - np.repeat(tokens.offsets[:-1], tokens.lengths)
        mask = Ragged(position >= np.repeat(num_prompt, tokens.lengths), tokens.offsets)
        return batch.with_columns(tokens=tokens, loss_mask=mask)

    def _encode(self, prompt: str, target: str, sample: int) -> tuple[npt.NDArray[np.int32], int]:
        found = self._known.get((prompt, target))
        if found is None:
            prompt_ids = self.codec.encode_prompt(prompt)
            if not prompt_ids:
                raise DatasetError(f"the prompt of demonstration {SampleId.unpack(sample)} has no tokens: {prompt!r}")
            ids = [*prompt_ids, *self.codec.encode_target(target), self.codec.eos_id]
            found = (np.array(ids, np.int32), len(prompt_ids))
            if self._num_remembered + len(ids) > _MAX_REMEMBERED_TOKENS:
                self._known.clear()
                self._num_remembered = 0
            self._known[prompt, target] = found
            self._num_remembered += len(ids)
        return found


def _texts(batch: Batch) -> list[tuple[str, str]]:
    prompts, targets = batch.ragged("prompt"), batch.ragged("target")
    return [(str(prompts.item(i)), str(targets.item(i))) for i in range(len(batch))]
