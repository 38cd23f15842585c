"""The embedded trainer: one Hugging Face model, one process, packed micro-batches in PyTorch.

    accumulate: micro-batch --packing--> logits --token_logprobs--> loss terms --backward--> gradients add up
    apply:      gradients / denominator --clip--> AdamW

Log-probabilities are those of softmax(logits / temperature), with the batch's `temperature` column (0 and no column: 1), as the rollout
engine records them: before top-k and top-p. They are computed in float32, some rows at a time (`token_logprobs`): forward keeps the logits
alone, backward computes their gradient from them. Plain autograd would keep a log-softmax beside the logits, and two such gradients.
The head of a critic or a reward model takes the place of the logits (`m2flow.engines.models.packing`).

Weights below float32 have float32 master weights (`m2flow.engines.models.adamw`), which the option `masters: false` leaves out.

`AdapterReference` is a frozen model that computes from a policy's base weights, without adapters or with others: training never changes the
weights below the adapters, so a reference on the policy's path is the policy without them, and a reference that was copied from the policy
is the base with the adapters of that time, which are all that is kept of it. Nothing is copied when the policy is offloaded or onloaded;
with several ranks, each computes from its parts, so all ranks call it together, as they do the policy.

`keep_freed_memory` raises glibc's thresholds: a step frees and allocates the same few megabytes again and again, and glibc returns large
freed blocks at once, whose pages the kernel then maps and clears anew. A forward and backward pass of 256 sequences in one micro-batch took
14 % (skewed lengths) to 27 % (full length) longer without this, on two cores; in eight micro-batches, nothing.

Limits: one rank; models that `packing.check_model` accepts. Dropout is off, since log-probabilities are compared.

Source: Hu et al. 2021, LoRA, arXiv:2106.09685, section 4.2, for models that share one base.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2flow.algorithms.losses import MOST_LOG_RATIO, correction_weights
from m2flow.engines.contract import (
    NO_AGREEMENT,
    PER_GROUP,
    Agreement,
    EngineSettings,
    Memory,
    Objective,
    Sums,
    TrainEngine,
    agreement_of,
    bytes_on,
)
from m2flow.engines.models import lora, packing, trainer_checkpoint
from m2flow.engines.models.adamw import Optimizers
from m2flow.engines.models.hf_model import checkpoint_tensors, load_model, load_tokenizer, use_threads
from m2flow.engines.models.packing import Demonstrations
from m2flow.engines.models.trainer_checkpoint import spread_like
from m2flow.engines.registry import built_in
from m2flow.errors import EngineError, OpError, is_out_of_memory
from m2flow.recipe import HEAD_OUTPUTS, PROXIMAL, AdamW, Correction, Loss, Model, is_count
from m2flow.samples import Batch, Ragged, SampleId, group_keys

# Shapes: T predicted tokens, V vocabulary.

_CHUNK_ELEMENTS = 1 << 20
"""Logits worked on at a time: 4 MiB of float32, which a last-level cache holds."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of the targets, and entropies, of softmax(logits / temperature).

    Args:
        logits: float [T, V]. targets: int64 [T]. temperature: float32 [T], positive; None is 1 everywhere.
    Returns:
        Two float32 [T], in nats, differentiable in the logits.

    >>> logprobs, entropy = token_logprobs(torch.zeros(1, 4), torch.tensor([2]))
    >>> round(logprobs.item(), 4), round(entropy.item(), 4)
    (-1.3863, 1.3863)
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, temperature)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(logits.shape[0], device=logits.device)
        log_normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(logits):
            scaled = _scaled(logits[rows], temperature, rows)
            log_normaliser[rows] = scaled.logsumexp(1)
            logprobs[rows] = scaled.gather(1, targets[rows, None])[:, 0] - log_normaliser[rows]
            probabilities = (scaled - log_normaliser[rows, None]).exp_()
            entropy[rows] = log_normaliser[rows] - probabilities.mul_(scaled).sum(1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, temperature, log_normaliser, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, None, None]:
        logits, targets, temperature, log_normaliser, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            logp = _scaled(logits[rows], temperature, rows) - log_normaliser[rows, None]
            weight = torch.zeros_like(log_normaliser[rows, None])
            if grad_logprobs is not None:
                weight = weight - grad_logprobs[rows, None]
            # d logprob / d logit = [is target] - p;  d entropy / d logit = -p (log p + entropy).
            if grad_entropy is None:
                grad = logp.exp_().mul_(weight)
            else:
                grad = logp.exp() * (weight - grad_entropy[rows, None] * (logp + entropy[rows, None]))
            if grad_logprobs is not None:
                grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            if temperature is not None:
                grad.div_(temperature[rows, None])
            grad_logits[rows] = grad
        return grad_logits, None, None


def _scaled(logits: Tensor, temperature: Tensor | None, rows: slice) -> Tensor:
    logits = logits.float()
    return logits if temperature is None else logits / temperature[rows, None]


def _chunks(logits: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""What glibc allows on 64-bit systems (HEAP_MAX_SIZE / 2); larger blocks still come from mmap and go back when freed."""


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process, whose heap then stays at its peak. False where the C library is another.

    Source: mallopt(3).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        [
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1),
            mallopt(_M_TOP_PAD, 64 << 20),
        ]
    )


# Shapes: N samples, T tokens under the loss mask.

_LOGPROB_TOKENS = 16384
"""Tokens of a forward pass without gradient. The option `logprob_tokens` overrides it."""
OPTIONS = {
    "logprob_tokens": "Tokens of a forward pass without gradient, by default 16384.",
    "share_prompts": "Compute a prompt that several samples share once; by default true.",
    "masters": "Step weights below float32 on float32 copies of them (4 bytes a weight), which checkpoints keep; by default true.",
}
"""The options of `train: {engine: embedded}`, each with its meaning."""


class EmbeddedTrain(TrainEngine):
    """Run packed forward and backward passes over a model that this process holds."""

    name = "embedded"
    capabilities = built_in("embedded", "train")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        self._source = model
        self._settings = settings
        self._model: Any = None
        self._is_lent = False

    def start(self) -> None:
        use_threads(self._settings.threads, self._settings.deterministic)
        keep_freed_memory()
        self._codec = load_tokenizer(self._source)
        self._model = load_model(self._source, device=self._settings.device, attention="eager")
        self._longest, self._rope = packing.check_model(self._model, self._source.head)
        if self._source.lora is not None:
            lora.adapt(self._model, self._source.lora, self._source.seed)
        self._shapes = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        self._optimizers = Optimizers(self._model.parameters(), has_masters=self._keeps_masters)
        self._demonstrations = Demonstrations(self._codec)

    @property
    def _keeps_masters(self) -> bool:
        return self._flag("masters", default=True)

    def _flag(self, name: str, *, default: bool) -> bool:
        given = self._settings.options.get(name, default)
        if not isinstance(given, bool):
            raise EngineError(f"the option {name} of the train engine {self.name!r} is {given!r}", now="Write true or false.")
        return given

    @property
    def _logprob_tokens(self) -> int:
        """Tokens of a pass without gradient."""
        given = self._settings.options.get("logprob_tokens", _LOGPROB_TOKENS)
        if not is_count(given):
            raise EngineError(
                f"the option logprob_tokens of the train engine {self.name!r} is {given!r}", now="Write a whole number of tokens."
            )
        return int(str(given))

    def stop(self) -> None:
        self._model = None
        self._optimizers = Optimizers([])
        _empty_device_cache(self._settings.device)

    def onload(self) -> None:
        self._move(self._settings.device)

    def offload(self) -> None:
        if torch.device(self._settings.device).type != "cpu":
            self._move("cpu")
            _empty_device_cache(self._settings.device)

    def memory(self) -> Memory:
        if self._model is None:
            return Memory()
        device, parameters = self._settings.device, list(self._model.parameters())
        return Memory(
            weights=bytes_on(device, [*parameters, *self._model.buffers()]),
            gradients=bytes_on(device, (parameter.grad for parameter in parameters)),
            optimizer=bytes_on(device, self._optimizer_tensors()),
        )

    def _optimizer_tensors(self) -> Iterable[Tensor]:
        return self._optimizers.tensors()

    def rest(self) -> None:
        _empty_device_cache(self._settings.device)

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        batch = self._to_train(batch, objective.loss)
        metrics, agreement = dict[str, float](), NO_AGREEMENT
        if num_tokens := int(packing.num_masked(batch.ragged("loss_mask")).sum()):
            terms, metrics, agreement = self._terms(batch, objective.loss)
            terms.sum().backward()
        return Sums(len(batch), num_tokens, len(batch.ragged("tokens").values), metrics, agreement)

    def apply(self, optimizer: AdamW, denominator: float) -> Mapping[str, float]:
        return self._optimizers.step(optimizer, denominator)

    def discard(self) -> None:
        self._optimizers.clear_gradients()

    def logprobs(self, batch: Batch) -> Batch:
        self._check_head("lm", "log-probabilities")
        return self._of_tokens(batch, "reference_logprobs", "logprobs")

    def values(self, batch: Batch) -> Batch:
        self._check_head("value", "values")
        return self._of_tokens(batch, "values", "values")

    def scores(self, batch: Batch) -> Batch:
        self._check_head("score", "scores")
        ordered = batch.in_order()
        tokens, mask = packing.scored_tokens(self._codec, ordered, self._longest)
        scores = np.zeros(len(ordered), np.float64)
        for rows in self._runs(tokens):
            packed = packing.pack(ordered.ids[rows], tokens.take(rows), mask.take(rows), device=self._settings.device, share_prompts=False)
            with torch.no_grad():
                scores[rows] = self._forward(packed).double().cpu().numpy()
        if not np.isfinite(scores).all():
            raise EngineError(f"the reward model {self._source.path} gave a score that is not finite")
        return Batch(ordered.ids, {"reward": scores}).select(batch.ids)

    def _of_tokens(self, batch: Batch, column: str, output: str) -> Batch:
        """Compute one of the model's outputs for each masked token, 0 for the others, as a ragged column."""
        batch = self._tokenised(batch)
        ordered = batch.in_order()
        parts = [Batch(ordered.ids[:0], {column: Ragged.of([], np.float32)})]
        for rows in self._runs(ordered.ragged("tokens")):
            part = ordered.take(rows)
            mask = part.ragged("loss_mask")
            values = np.zeros(len(mask.values), np.float32)
            packed = self._pack(part)
            if len(packed.targets):
                with torch.no_grad():
                    values[mask.values.astype(bool)] = self._outputs(part, packed)[output].cpu().numpy()
            parts.append(Batch(part.ids, {column: Ragged(values, mask.offsets)}))
        return Batch.concat(parts).select(batch.ids)

    def _runs(self, tokens: Ragged) -> Iterator[npt.NDArray[np.int64]]:
        """Rows that go through the model together; each alone with `deterministic`, so that no result depends on its neighbours."""
        return _token_budget(tokens.lengths, 0 if self._settings.deterministic else self._logprob_tokens)

    def _tokenised(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask`. Raises `EngineError` for a sample whose result would depend on its neighbours."""
        batch = self._demonstrations.tokenised(batch)
        lengths = batch.ragged("tokens").lengths
        if self._rope and len(batch) and lengths.max() > self._longest:
            raise EngineError(
                f"sample {SampleId.unpack(batch.ids[int(lengths.argmax())])} has {lengths.max()} tokens, and beyond {self._longest} the "
                f"model's {self._rope} rotary embeddings change with the longest sequence of a batch",
                now="Generate with a smaller max_new_tokens.",
            )
        return batch

    def _to_train(self, batch: Batch, loss: Loss) -> Batch:
        """Order a micro-batch and add what the loss's terms need of whole groups, before it is shared out over ranks."""
        batch = self._tokenised(batch).in_order()
        if loss.denominator != "groups":
            return batch
        num_masked = packing.num_masked(batch.ragged("loss_mask"))
        lengths = [num_masked[start:end].sum().repeat(end - start) for start, end in batch.group_bounds()]
        return batch.with_columns(group_lengths=np.concatenate([*lengths, np.zeros(0)]).astype(np.float32))

    def num_training_tokens(self, batch: Batch) -> npt.NDArray[np.int64]:
        return self._demonstrations.tokenised(batch).ragged("tokens").lengths

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return trainer_checkpoint.named_weights(self._model)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in lora.adapter_state(self._model, self._whole):
            yield lora.file_name(name), tensor.detach()

    def base(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in lora.whole_state(self._model, self._whole, adds=False):
            yield from checkpoint_tensors(self._model, name, tensor.detach())

    def _copy_adapters_only(self, source: TrainEngine) -> bool:
        """Copy the other's adapters, if the base weights are the same. (No checkpoint of an adapted model has those.)"""
        if not isinstance(source, EmbeddedTrain) or source._source.lora is None or self._source.lora != source._source.lora:
            return False
        if (self._source.path, self._source.head) != (source._source.path, source._source.head):
            return False
        self.put_adapters(source.adapter_values())
        return True

    def _whole(self, tensor: Tensor) -> AbstractContextManager[Tensor]:
        """One of the model's tensors as a whole; collective where ranks hold parts."""
        return nullcontext(tensor)

    def copy_from(self, source: TrainEngine) -> None:
        if lora.is_adapted(self._model) and isinstance(source, EmbeddedTrain) and lora.is_adapted(source._model):
            lora.share_base(self._model, source._model)
            return
        target = {
            part: view
            for name, tensor in self._model.state_dict().items()
            if (plain := lora.plain_name(name))
            for part, view in checkpoint_tensors(self._model, plain, tensor)
        }
        for name, tensor in source.weights():
            if name in target:
                target[name].copy_(tensor)

    def save(self, path: str) -> None:
        trainer_checkpoint.save(path, self._model, self._codec, self._state())

    def _state(self) -> dict[str, Any]:
        """What a checkpoint has beside the weights."""
        if self._is_lent:
            return {"optimizers": [], "masters": []}
        return {"optimizers": self._optimizers.state(), "masters": self._optimizers.masters()}

    def load(self, path: str) -> None:
        state = trainer_checkpoint.load(path, self._model, self._source)
        self._optimizers.load_masters(state.get("masters", []))
        self._optimizers.load_state(state["optimizers"])

    # What others compute from these weights

    @property
    def device(self) -> str:
        return self._settings.device

    def adapter_reference(self, role: str, model: Model) -> TrainEngine | None:
        return AdapterReference(self, model) if self._source.lora is not None else None

    @contextmanager
    def with_adapters(self, adapters: Sequence[Tensor] | None) -> Iterator[None]:
        """Replace the adapters inside the context, or leave them out (None). Collective, as is everything inside."""
        own = None if adapters is None else self.adapter_values()
        self._is_lent = True
        try:
            if adapters is not None:
                self.put_adapters(adapters)
            with nullcontext() if own is not None else lora.left_out(self._model):
                yield
        finally:
            self._is_lent = False
            if own is not None:
                self.put_adapters(own)

    def adapter_values(self) -> list[Tensor]:
        """Copy the adapters' tensors, whole."""
        return [tensor.detach().clone() for _, tensor in lora.adapter_state(self._model, self._whole)]

    def read_adapters(self, path: str) -> list[Tensor]:
        """Read the adapters' tensors from a checkpoint, in the host's memory."""
        found = trainer_checkpoint.read_weights(path, self._source, self._shapes)
        return [found[name] for name, _ in lora.adapter_state(self._model)]

    def put_adapters(self, values: Sequence[Tensor]) -> None:
        """Set the adapters' values, which every rank has whole. Optimiser states do not change."""
        for (_, tensor), value in zip(lora.adapter_state(self._model), values, strict=True):
            self._fill(tensor, value)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _fill(self, tensor: Tensor, value: Tensor) -> None:
        tensor.copy_(spread_like(value, tensor))

    def _terms(self, batch: Batch, loss: Loss) -> tuple[Tensor, dict[str, float], Agreement]:
        """Compute the loss's terms [T], with gradient; the sums of all metrics; and the agreement with the rollout engine."""
        packed = self._pack(batch)
        outputs = self._outputs(batch, packed)
        terms, reported = _evaluate(loss, self._inputs(batch, loss, outputs))
        num_tokens = len(packed.targets)
        _check_terms(loss, terms, num_tokens)
        if loss.denominator == "groups":
            lengths = self._column(batch, "group_lengths", "a mean over groups needs them")
            terms = terms / lengths
            if "group_ids" in loss.needs:
                reported = {PER_GROUP + name: _per_token(loss, name, value, num_tokens) / lengths for name, value in reported.items()}
        if loss.correction is not None:
            weights, found = self._correction(batch, loss.correction)
            terms, reported = terms * weights, {**found, **reported}
        reported = {"loss": terms, **self._monitored(batch, outputs), **reported}
        sums = torch.stack([_per_token(loss, name, value, num_tokens).detach().double().sum() for name, value in reported.items()])
        return terms, dict(zip(reported, sums.tolist(), strict=True)), _agreement(batch, outputs)

    def _pack(self, batch: Batch) -> packing.Packed:
        share = self._flag("share_prompts", default=True)
        tokens, mask = batch.ragged("tokens"), batch.ragged("loss_mask")
        return packing.pack(batch.ids, tokens, mask, device=self._settings.device, share_prompts=share)

    def _temperature(self, batch: Batch) -> Tensor | None:
        """float32 [T]; None if it is 1 everywhere."""
        if "temperature" not in batch:
            return None
        temperature = np.asarray(batch.dense("temperature"), np.float32)
        temperature = np.where(temperature == 0, np.float32(1), temperature)
        return None if bool((temperature == 1).all()) else self._put(np.repeat(temperature, packing.num_masked(batch.ragged("loss_mask"))))

    def _check_head(self, head: str, what: str) -> None:
        if self._source.head != head:
            raise EngineError(f"a model with a {self._source.head} head has no {what}")

    def _outputs(self, batch: Batch, packed: packing.Packed) -> dict[str, Tensor]:
        """Compute the model's outputs for each masked token, each [T]."""
        return self._model_outputs(packed, self._temperature(batch) if self._source.head == "lm" else None)

    def _model_outputs(self, packed: packing.Packed, temperature: Tensor | None) -> dict[str, Tensor]:
        if self._source.head != "lm":
            return {"values": self._forward(packed)}
        logprobs, entropy = token_logprobs(self._forward(packed), packed.targets, temperature)
        return {"logprobs": logprobs, "entropy": entropy}

    def _forward(self, packed: packing.Packed) -> Tensor:
        """Compute the head's output: logits [T, V], or one number a token [T]."""
        if self._source.head == "lm":
            return packing.forward_logits(self._model, packed)
        return packing.forward_scalars(self._model, packed)

    def _inputs(self, batch: Batch, loss: Loss, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collect the loss's inputs, each [T]."""
        inputs = {}
        for name in loss.needs:
            if name in outputs:
                inputs[name] = outputs[name]
            elif any(name in given for given in HEAD_OUTPUTS.values()):
                raise EngineError(f"the loss {loss.name} needs {name}, which a model with a {self._source.head} head does not give")
            elif name == "sequence_lengths":
                counts = packing.num_masked(batch.ragged("loss_mask"))
                inputs[name] = self._put(np.repeat(counts.astype(np.float32), counts))
            elif name == "sequence_ids":
                inputs[name] = self._sequence_ids(batch)
            elif name == "group_ids":
                _, group_of_sample = np.unique(group_keys(batch.ids), return_inverse=True)
                inputs[name] = self._put(np.repeat(group_of_sample, packing.num_masked(batch.ragged("loss_mask"))))
            else:
                behaviour = "logprobs" if loss.correction is None else PROXIMAL
                column = behaviour if name == "behaviour_logprobs" else name
                inputs[name] = self._column(batch, column, f"the loss {loss.name} needs {name}")
        return inputs

    def _correction(self, batch: Batch, correction: Correction) -> tuple[Tensor, dict[str, Tensor]]:
        """The weights of a correction, and its metrics, each [T]."""
        proximal, rollout = (self._column(batch, name, "a correction needs it") for name in (PROXIMAL, "logprobs"))
        return correction_weights(proximal, rollout, self._sequence_ids(batch), correction)

    def _sequence_ids(self, batch: Batch) -> Tensor:
        counts = packing.num_masked(batch.ragged("loss_mask"))
        return self._put(np.repeat(np.arange(len(counts)), counts))

    def _column(self, batch: Batch, name: str, reason: str) -> Tensor:
        """A per-token or per-sample column of numbers, as [T]."""
        if name not in batch:
            raise EngineError(f"{reason}, and the batch has no column {name!r}; it has {', '.join(sorted(batch.columns))}")
        column = batch[name]
        if not isinstance(column, Ragged):
            return self._put(np.repeat(column, packing.num_masked(batch.ragged("loss_mask"))))
        if column.kind != "numbers" or not np.array_equal(column.offsets, batch.ragged("tokens").offsets):
            raise EngineError(f"{reason}, and column {name!r} has not one number for each token")
        return self._put(column.values[batch.ragged("loss_mask").values.astype(bool)])

    def _monitored(self, batch: Batch, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Metrics of any loss: entropy, and how far the weights are from those that sampled the tokens."""
        if "logprobs" not in outputs or "logprobs" not in batch:
            return {name: outputs[name] for name in ("entropy",) if name in outputs}
        difference = outputs["logprobs"].detach() - self._column(batch, "logprobs", "the drift")
        ratio = difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
        return {"entropy": outputs["entropy"], "logprob_diff_abs": difference.abs(), "ratio": ratio}

    def _put(self, values: npt.NDArray[Any]) -> Tensor:
        if values.dtype == np.float64:
            values = values.astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._settings.device)

    def _move(self, device: str) -> None:
        self._model.to(device)
        self._optimizers.to(device)


def _agreement(batch: Batch, outputs: Mapping[str, Tensor]) -> Agreement:
    """Compute the agreement with the rollout engine, over tokens that the current weights sampled."""
    if "logprobs" not in outputs or "logprobs" not in batch or "same_weights" not in batch:
        return NO_AGREEMENT
    mask = batch.ragged("loss_mask").values.astype(bool)
    same = batch.ragged("same_weights").values[mask].astype(bool)
    if not same.any():
        return NO_AGREEMENT
    return agreement_of(outputs["logprobs"].detach().float().cpu().numpy()[same], batch.ragged("logprobs").values[mask][same])


def _evaluate(loss: Loss, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
    function = _function(loss)
    try:
        result = function(**inputs, **dict(loss.options))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise OpError(f"the loss {loss.name} raised {type(error).__name__}: {error}") from error
    terms, reported = result if isinstance(result, tuple) else (result, {})
    return terms, reported


def _function(loss: Loss) -> Callable[..., Any]:
    if not isinstance(loss.function, str):
        assert callable(loss.function)
        return loss.function
    module, _, name = loss.function.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EngineError(f"the loss {loss.name} can't be imported from {loss.function!r}: {error}") from error
    return function


def _check_terms(loss: Loss, terms: Any, num_tokens: int) -> None:
    terms = _per_token(loss, "its terms", terms, num_tokens)
    if not terms.requires_grad:
        raise OpError(
            f"the terms of the loss {loss.name} have no gradient",
            now="Compute them from `logprobs` or `entropy`, for a critic from `values`, undetached.",
        )
    if not math.isfinite(float(terms.detach().sum())):
        num_bad = int((~terms.detach().isfinite()).sum())
        raise EngineError(f"the loss {loss.name} is not finite for {num_bad} of {len(terms)} tokens")


def _per_token(loss: Loss, name: str, value: Any, num_tokens: int) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != (num_tokens,):
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise OpError(f"the loss {loss.name} must return one number a token, [{num_tokens}]; {name} is {shape}")
    return value


def _token_budget(lengths: npt.NDArray[np.int64], budget: int) -> Iterator[npt.NDArray[np.int64]]:
    """Split rows into runs of at most `budget` tokens, or of one sample."""
    start, total = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > start and total + length > budget:
            yield np.arange(start, row)
            start, total = row, 0
        total += length
    if start < len(lengths):
        yield np.arange(start, len(lengths))


def _empty_device_cache(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


class AdapterReference(TrainEngine):
    """A frozen model that is the lender's without adapters, or with a copy of earlier ones."""

    def __init__(self, lender: EmbeddedTrain, model: Model) -> None:
        self.name, self.capabilities = lender.name, lender.capabilities
        self._lender = lender
        self._has_own = model.lora is not None
        self._adapters: list[Tensor] | None = None
        """Whole, on every rank. None: no adapters, or such as add nothing yet."""

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
        with self._lender.with_adapters(self._adapters):
            return self._lender.logprobs(batch)

    def num_training_tokens(self, batch: Batch) -> npt.NDArray[np.int64]:
        return self._lender.num_training_tokens(batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        with self._lender.with_adapters(self._adapters):
            yield from self._lender.weights()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        with self._lender.with_adapters(self._values()):
            yield from self._lender.adapters()

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return self._lender.base()

    def copy_from(self, source: TrainEngine) -> None:
        """Copy the current adapters of a policy whose base is the lender's."""
        if isinstance(source, AdapterReference):
            self._adapters = source._values()
        elif type(source) is type(self._lender):
            self._adapters = source.adapter_values()
        else:
            raise EngineError(f"a model beside the adapters of a trainer {self.name!r} can't take the weights of {source.name!r}")

    def save(self, path: str) -> None:
        with self._lender.with_adapters(self._values()):
            self._lender.save(path)

    def load(self, path: str) -> None:
        if self._has_own:
            self._adapters = self._lender.read_adapters(path)

    def _values(self) -> list[Tensor]:
        """The adapters' values; zeros where they add nothing."""
        if self._adapters is not None:
            return [values.clone() for values in self._adapters]
        return [torch.zeros_like(values) for values in self._lender.adapter_values()]

    def _refuse(self) -> NoReturn:
        raise EngineError("a model that computes from a policy's weights can't be trained")
