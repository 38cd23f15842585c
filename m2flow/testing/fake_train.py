"""A train engine without a model: gradients are sums of hashes, in exact integers, so that schedules can be compared bit by bit.

    accumulate: gradient += hash(weights, sample, what the loss reads of it)   mod 2^61 - 1, for each sample
    apply:      weights[i] = hash(weights[i], gradient, denominator, recipe, number of the step)

A sum does not show its order: any cutting, any order of micro-batches gives the same weights. A sample that is lost, counted
twice, given other rewards, or trained in another mini-batch gives others. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m2flow.engines.contract import Capabilities, EngineSettings, Objective, Sums, TrainEngine
from m2flow.errors import EngineError, ModelError
from m2flow.recipe import HEAD_OUTPUTS, AdamW, Model
from m2flow.samples import Batch, Ragged
from m2flow.testing.fakes import FAKE_EOS, FAKE_WEIGHT, encode_fake, fake_hash, fake_numbers, initial_fake_weights

PRIME = (1 << 61) - 1
_MASK = (1 << 64) - 1
_STATE = "fake_train.json"
_COMPUTED = {"sequence_lengths"}.union(*HEAD_OUTPUTS.values())


class FakeTrain(TrainEngine):
    """Everything that a train engine does, in integers. Log-probabilities, values and scores are multiples of 1/1024."""

    name = "fake"
    capabilities = Capabilities(kind="train", heads=("lm", "value", "score"), gives_away=True)

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        self._model = model
        self._settings = settings
        self._weights = np.zeros(0, np.int64)
        self._gradient = 0
        self._num_accumulated = 0
        self._num_steps: dict[str, int] = {}
        self._is_away = False

    def start(self) -> None:
        self._weights = initial_fake_weights(self._model)
        self.discard()
        self._num_steps = {}

    def stop(self) -> None:
        self._weights = np.zeros(0, np.int64)

    def onload(self) -> None:
        self._is_away = False

    def offload(self) -> None:
        self._is_away = True

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        self._check_place()
        foreign = HEAD_OUTPUTS["lm" if self._model.head == "value" else "value"]
        for name in foreign.intersection(objective.loss.needs):
            raise EngineError(f"the loss {objective.loss.name} needs {name}, which a model with a {self._model.head} head does not give")
        batch = _tokenised(batch)
        names = ["behaviour_logprobs" if name == "logprobs" else name for name in sorted(batch.columns) if name == "logprobs"]
        names = sorted({*names, *objective.loss.needs} - _COMPUTED)
        columns = {name: "logprobs" if name == "behaviour_logprobs" else name for name in names}
        missing = [name for name, column in columns.items() if column not in batch]
        if missing:
            raise EngineError(f"the loss {objective.loss.name} needs {missing[0]}, and the batch has {', '.join(sorted(batch.columns))}")
        recipe = repr((objective.loss.name, objective.loss.needs, objective.loss.options)).encode()
        tokens, mask = batch.ragged("tokens"), batch.ragged("loss_mask")
        loss = 0
        for row, sample in enumerate(batch.ids.tolist()):
            parts = [_row_bytes(batch, column, row) for column in ("tokens", "loss_mask", *columns.values())]
            value = _digest(self._weights.tobytes(), struct.pack("<q", sample), recipe, *parts)
            self._gradient = (self._gradient + value) % PRIME
            # Small enough for sums of them to be exact in float64.
            loss += value % (1 << 20)
        num_tokens = int(np.count_nonzero(mask.values))
        self._num_accumulated += num_tokens
        return Sums(len(batch), num_tokens, len(tokens.values), {"loss": float(loss)})

    def apply(self, optimizer: AdamW, denominator: float) -> Mapping[str, float]:
        self._check_place()
        gradient, num_accumulated = self._gradient, self._num_accumulated
        self.discard()
        if not num_accumulated:
            raise EngineError("there is no gradient to apply", now="accumulate() a micro-batch with masked tokens first.")
        if not 0 < denominator < float("inf"):
            raise EngineError(f"the denominator of a mini-batch must be a positive number, got {denominator}")
        key = repr(optimizer)
        step = self._num_steps[key] = self._num_steps.get(key, 0) + 1
        change = _digest(struct.pack("<Qdq", gradient, denominator, step), key.encode())
        self._weights = np.array([fake_hash(value & _MASK, change) >> 33 for value in self._weights.tolist()], np.int64)
        return {"grad_norm": float(gradient % (1 << 20)) / denominator, "lr": optimizer.lr}

    def discard(self) -> None:
        self._gradient = 0
        self._num_accumulated = 0

    def logprobs(self, batch: Batch) -> Batch:
        return self._of_tokens(batch, "lm", "reference_logprobs", -1)

    def values(self, batch: Batch) -> Batch:
        return self._of_tokens(batch, "value", "values", 1)

    def scores(self, batch: Batch) -> Batch:
        self._check_place("score")
        prompts, texts = batch.ragged("prompt"), batch.ragged("text")
        said = [f"{prompts.item(i)}\0{texts.item(i)}".encode("utf-8", "surrogatepass") for i in range(len(batch))]
        return Batch(batch.ids, {"reward": np.array([_digest(self._weights.tobytes(), text) % 1021 / 1024 for text in said], np.float64)})

    def _of_tokens(self, batch: Batch, head: str, column: str, sign: int) -> Batch:
        """For each token under the mask a number between 0 and the sign, 0 for the others."""
        self._check_place(head)
        batch = _tokenised(batch)
        tokens, mask = batch.ragged("tokens"), batch.ragged("loss_mask").values.astype(bool)
        values = np.zeros(len(tokens.values), np.float32)
        position = np.arange(len(values)) - np.repeat(tokens.offsets[:-1], tokens.lengths)
        values[mask] = sign * fake_numbers(self._weights, tokens.values.astype(np.int64), position)[mask]
        return Batch(batch.ids, {column: Ragged(values, tokens.offsets)})

    def num_training_tokens(self, batch: Batch) -> npt.NDArray[np.int64]:
        return _tokenised(batch).ragged("tokens").lengths

    def weights(self) -> Iterator[tuple[str, Any]]:
        yield FAKE_WEIGHT, self._weights

    def save(self, path: str) -> None:
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        fresh = directory / f".{_STATE}.{os.getpid()}"
        fresh.write_text(json.dumps({"weights": self._weights.tolist(), "num_steps": self._num_steps}))
        fresh.rename(directory / _STATE)

    def _check_place(self, head: str | None = None) -> None:
        if self._is_away:
            raise EngineError("the engine is off its device", now="Call `onload` first.")
        if head is not None and head != self._model.head:
            raise EngineError(f"this needs a model with a {head} head, and this one has a {self._model.head} head")

    def load(self, path: str) -> None:
        try:
            saved = json.loads((Path(path) / _STATE).read_text())
            self._weights = np.array(saved["weights"], np.int64)
            self._num_steps = dict(saved["num_steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"the checkpoint {path} can't be read: {error}", now="Use an earlier checkpoint.") from error
        self.discard()


def _tokenised(batch: Batch) -> Batch:
    if "tokens" in batch:
        return batch
    texts = [[encode_fake(str(batch.ragged(name).item(row))) for name in ("prompt", "target")] for row in range(len(batch))]
    tokens = Ragged.of([[*prompt, *target, FAKE_EOS] for prompt, target in texts], np.int32)
    mask = Ragged.of([np.arange(len(prompt) + len(target) + 1) >= len(prompt) for prompt, target in texts], np.bool_)
    return batch.with_columns(tokens=tokens, loss_mask=mask)


def _row_bytes(batch: Batch, name: str, row: int) -> bytes:
    column = batch[name]
    values = column.row(row) if isinstance(column, Ragged) else column[row]
    return np.ascontiguousarray(values).tobytes()


def _digest(*parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest(), "little") % PRIME
