"""The embedded trainer: one Hugging Face model, one process, packed micro-batches in PyTorch.

    accumulate: micro-batch --packing--> logits --token_logprobs--> loss terms --backward--> gradients add up
    apply:      gradients / denominator --clip--> AdamW, Muon or SGD

Log-probabilities are those of softmax(logits / temperature), with the batch's `temperature` column (0 and no column: 1), as the rollout
engine records them: before top-k and top-p, or with the column `sampling_mask` among the tokens that these left. They are computed in
float32, some rows at a time (`token_logprobs`): forward keeps the logits alone, backward computes their gradient from them. Plain autograd
would keep a log-softmax beside the logits, and two such gradients. Where logits would be many, they are computed some rows at a time too,
again in the backward pass, and never kept (`Head`). A critic's head takes the place of the logits (`m2flow.engines.models.packing`).

Weights below float32 have float32 master weights (`m2flow.engines.models.optimizers`), which the option `masters: false` leaves out.

`AdapterReference` is a frozen model that computes from a policy's base weights, without adapters or with others: training never changes the
weights below the adapters, so a reference on the policy's path is the policy without them, and a reference that was copied from the policy
is the base with the adapters of that time, which are all that is kept of it. Nothing is copied when the policy is offloaded or onloaded;
with several ranks, each computes from its parts, so all ranks call it together, as they do the policy.

Limits: one rank; models that `packing.check_model` accepts. Dropout is off, since log-probabilities are compared.

Source: Hu et al. 2021, LoRA, arXiv:2106.09685, section 4.2, for models that share one base.
"""

from __future__ import annotations

import importlib
import math
import traceback
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
    NUM_SHARED,
    PER_GROUP,
    Agreement,
    EngineSettings,
    HeldCheckpoint,
    Memory,
    Objective,
    Sums,
    TrainEngine,
    agreement_of,
    blended,
    bucket_sums,
    bytes_on,
    ratio_counts,
)
from m2flow.engines.embedded.decoding import uniforms
from m2flow.engines.models import lora, packing, trainer_checkpoint
from m2flow.engines.models.hf_model import (
    checkpoint_tensors,
    empty_cache,
    groups_of_weights,
    keep_freed_memory,
    load_model,
    matrices_of_layers,
    use_threads,
)
from m2flow.engines.models.model_files import load_tokenizer
from m2flow.engines.models.optimizers import Optimizers
from m2flow.engines.models.packing import Demonstrations
from m2flow.engines.models.requests import SamplingMask
from m2flow.engines.models.routing import OF_TOKENS, Mixture, Routers, beside_experts, checked_routers, column_of, experts_of
from m2flow.engines.models.trainer_checkpoint import spread_like
from m2flow.engines.registry import LOGPROB_TOKENS, built_in
from m2flow.errors import EngineError, OpError, described, is_out_of_memory
from m2flow.recipe import (
    HEAD_OUTPUTS,
    PROXIMAL,
    REFERENCE_TOP_IDS,
    REFERENCE_TOP_LOGPROBS,
    TOP_LOGPROBS,
    VERSION_AGES,
    Correction,
    Loss,
    Model,
    Optimizer,
    is_count,
)
from m2flow.samples import ROUTED_EXPERTS, Batch, Ragged, SampleId, group_keys

# Shapes: T predicted tokens, V vocabulary.

_CHUNK_ELEMENTS = 1 << 20
"""Logits worked on at a time: on a CPU 4 MiB of float32, which a last-level cache holds; on a GPU 64 times as many, which keep it busy."""


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
    logprobs, entropy, _ = _TokenLogprobs.apply(logits, targets, temperature, None)
    return logprobs, entropy


def logprobs_at(logits: Tensor, targets: Tensor, temperature: Tensor | None, top_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `token_logprobs`, the log-probabilities of further tokens, and that of all the rest together.

    Args:
        top_ids: int64 [T, K], different tokens of a row, fewer than the vocabulary.
    Returns:
        float32 [T], [T] and [T, K + 1], the last column of the others; one pass over the logits computes the gradient of all three.
    Raises:
        EngineError: an id is none of the model's.

    >>> [round(p, 2) for p in logprobs_at(torch.zeros(1, 4), torch.tensor([2]), None, torch.tensor([[0]]))[2].exp()[0].tolist()]
    [0.25, 0.75]
    """
    if len(top_ids) and int(top_ids.max()) >= logits.shape[1]:
        said = f"the reference found token {int(top_ids.max())} likely, and this model has {logits.shape[1]} tokens"
        raise EngineError(said, now="Take a reference with the same tokenizer.")
    logprobs, entropy, top = _TokenLogprobs.apply(logits, targets, temperature, top_ids)
    return logprobs, entropy, top


def most_likely(logits: Tensor, temperature: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    """Find the likeliest tokens of softmax(logits / temperature): int64 [T, K], and their log-probabilities as `logprobs_at` gives them.

    Raises:
        EngineError: the vocabulary has no more than `top_k` tokens.
    """
    if top_k >= logits.shape[1]:
        raise EngineError(f"top_k is {top_k}, and the model has {logits.shape[1]} tokens", now="Take fewer than it has.")
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int64, device=logits.device)
    top = torch.empty(logits.shape[0], top_k + 1, device=logits.device)
    for rows in _chunks(logits):
        scaled = _scaled(logits[rows], temperature, rows)
        ids[rows] = scaled.topk(top_k, 1).indices
        top[rows] = _with_rest(scaled, ids[rows]) - scaled.logsumexp(1, keepdim=True)
    return ids, top


class _TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor | None, top_ids: Tensor | None) -> tuple[Tensor, ...]:
        logprobs = torch.empty(logits.shape[0], device=logits.device)
        log_normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        top = logprobs.new_empty(logits.shape[0], 0 if top_ids is None else top_ids.shape[1] + 1)
        for rows in _chunks(logits):
            scaled = _scaled(logits[rows], temperature, rows)
            log_normaliser[rows] = scaled.logsumexp(1)
            logprobs[rows] = scaled.gather(1, targets[rows, None])[:, 0] - log_normaliser[rows]
            if top_ids is not None:
                top[rows] = _with_rest(scaled, top_ids[rows]) - log_normaliser[rows, None]
            probabilities = (scaled - log_normaliser[rows, None]).exp_()
            entropy[rows] = log_normaliser[rows] - probabilities.mul_(scaled).sum(1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, temperature, log_normaliser, entropy, top_ids, top)
        return logprobs, entropy, top

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_top: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, temperature, log_normaliser, entropy, top_ids, top = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            logp = _scaled(logits[rows], temperature, rows) - log_normaliser[rows, None]
            weight = torch.zeros_like(log_normaliser[rows, None])
            if grad_logprobs is not None:
                weight = weight - grad_logprobs[rows, None]
            if grad_top is not None:
                weight = weight - grad_top[rows].sum(1, keepdim=True)
                # Of the others' log-probability: p / (their sum) for each of them.
                others = logp.scatter(1, top_ids[rows], -math.inf).sub_(top[rows, -1:]).exp_().mul_(grad_top[rows, -1:])
            # d logprob / d logit = [is target] - p;  d entropy / d logit = -p (log p + entropy).
            if grad_entropy is None:
                grad = logp.exp_().mul_(weight)
            else:
                grad = logp.exp() * (weight - grad_entropy[rows, None] * (logp + entropy[rows, None]))
            if grad_logprobs is not None:
                grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            if grad_top is not None:
                grad.add_(others).scatter_add_(1, top_ids[rows], grad_top[rows, :-1])
            if temperature is not None:
                grad.div_(temperature[rows, None])
            grad_logits[rows] = grad
        return grad_logits, None, None, None


def _with_rest(scaled: Tensor, ids: Tensor) -> Tensor:
    """Logits of these tokens, and the log of the others' summed exponentials: [t, V] and [t, K] to [t, K + 1]."""
    rest = scaled.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat((scaled.gather(1, ids), rest), 1)


def _scaled(logits: Tensor, temperature: Tensor | None, rows: slice) -> Tensor:
    logits = logits.float()
    return logits if temperature is None else logits / temperature[rows, None]


def _chunks(logits: Tensor) -> list[slice]:
    size = max(1, (_CHUNK_ELEMENTS << (6 if logits.is_cuda else 0)) // max(1, logits.shape[1]))
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]


# Shapes: R rows of hidden states, H their width.

_HEAD_LOGITS = 1 << 26
"""Logits that exist at a time: 256 MiB of float32. With a vocabulary of 150,000 they are of 447 tokens, enough to keep a GPU busy."""


class Head:
    """The head of a language model, which computes log-probabilities for some tokens at a time: its logits [T, V] never exist as a whole.

    The model's own code calls it as it calls the layer, in whose place it is; between `asked` and its end it answers with [1, T, 2], the
    log-probability and the entropy of each target, in place of [1, T, V]. The backward pass computes logits again, chunk by chunk. A model
    that changes its logits after the head (a soft cap, a scale) is not asked, and has them whole.

    Args:
        num_logits: how many may exist at a time.
        is_exact: compute logits in float32 from hidden states and weights of any type, for training and sampling alike.
    """

    def __init__(self, model: Any, layer: torch.nn.Linear, num_logits: int, *, is_exact: bool) -> None:
        self._layer, self._is_exact = layer, is_exact
        self._num_tokens = max(1, num_logits // layer.out_features)
        self._asked: tuple[Tensor, Tensor | None, Tensor | None] | None = None
        layer.forward = self  # The layer's hooks and names stay as they are.
        self.is_last = self._is_last(model)
        """Whether its logits are the model's."""

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._asked is None:
            return _linear(hidden, self._layer.weight, self._layer.bias, is_exact=self._is_exact)
        found: Tensor = _HeadLogprobs.apply(hidden[0], self._layer.weight, self._layer.bias, *self._asked, self._num_tokens, self._is_exact)
        return found

    def is_worth(self, num_tokens: int) -> bool:
        """Whether a pass has more logits than may exist at a time."""
        return self.is_last and num_tokens > self._num_tokens

    @contextmanager
    def asked(self, targets: Tensor, temperature: Tensor | None, top_ids: Tensor | None = None) -> Iterator[None]:
        """For the passes in this block, answer for these targets, int64 [T]; and for further tokens, int64 [T, K], with K + 1 numbers."""
        self._asked = targets, temperature, top_ids
        try:
            yield
        finally:
            self._asked = None

    def _is_last(self, model: Any) -> bool:
        """Find out whether the model gives as logits, for one token, what the head answers, whatever that is."""
        tokens, mask = Ragged.of([[0, 0]], np.int32), Ragged.of([[False, True]], np.bool_)
        packed = packing.pack(np.zeros(1, np.int64), tokens, mask, device=str(self._layer.weight.device))
        answers: list[Tensor] = []

        def answer(layer: Any, given: Any, output: Tensor) -> Tensor:
            answers.append(torch.linspace(-99.0, 99.0, output.numel(), device=output.device).to(output.dtype).view_as(output))
            return answers[-1]

        answering = self._layer.register_forward_hook(answer)
        try:
            with torch.no_grad():
                logits = packing.batched_logits(model, packed)
        finally:
            answering.remove()
        return len(answers) == 1 and torch.equal(answers[0], logits)


def head_of(model: Any, num_logits: int, *, is_exact: bool) -> Head | None:
    """Put a `Head` in the place of a model's own. None: that is no plain layer, or has adapters, and stays as it is.

    Raises:
        EngineError: it should be exact, and can't be.
    """
    layer = model.get_output_embeddings()
    if type(layer) is torch.nn.Linear:
        return Head(model, layer, num_logits, is_exact=is_exact)
    if is_exact:
        raise EngineError(f"the head of a {model.config.model_type!r} model is a {type(layer).__name__}", now=packing.LEAVE_OUT)
    return None


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, is_exact: bool) -> Tensor:
    return packing.exact_linear(hidden, weight, bias) if is_exact else torch.nn.functional.linear(hidden, weight, bias)


class _HeadLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """Hidden states [T, H], weights [V, H], targets to log-probabilities and entropies, [1, T, 2], or with further tokens [1, T, K + 3]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        top_ids: Tensor | None,
        num_tokens: int,
        is_exact: bool,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, top_ids)
        ctx.num_tokens, ctx.is_exact = num_tokens, is_exact
        found = hidden.new_empty(1, len(targets), 2 if top_ids is None else 3 + top_ids.shape[1], dtype=torch.float32)
        used = (weight, bias) if not is_exact else (weight.float(), bias)
        for rows in _rows(len(targets), num_tokens):
            logits = _linear(hidden[rows], *used, is_exact=is_exact)
            found[0, rows] = torch.cat(_numbers_of(logits, rows, targets, temperature, top_ids), 1)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, top_ids = ctx.saved_tensors
        used = weight.float() if ctx.is_exact else weight
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for rows in _rows(len(targets), ctx.num_tokens):
            own = hidden[rows].to(used.dtype)
            with torch.enable_grad():
                logits = _linear(own, used, bias, is_exact=ctx.is_exact).detach().requires_grad_()
                found = _numbers_of(logits, rows, targets, temperature, top_ids)
            (grad_logits,) = torch.autograd.grad(found, logits, grad[0, rows].split([one.shape[1] for one in found], 1))
            grad_hidden[rows] = (grad_logits @ used).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad_logits.T @ own
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        of_weights = (None if one is None else one.to(weight.dtype) for one in (grad_weight, grad_bias))
        return (grad_hidden, *of_weights, None, None, None, None, None)


def _numbers_of(logits: Tensor, rows: slice, targets: Tensor, temperature: Tensor | None, top_ids: Tensor | None) -> list[Tensor]:
    """What a head answers for some tokens: log-probability and entropy, each [t, 1], and of further tokens [t, K + 1]."""
    given = logits, targets[rows], None if temperature is None else temperature[rows]
    if top_ids is None:
        return [one[:, None] for one in token_logprobs(*given)]
    logprobs, entropy, top = logprobs_at(*given, top_ids[rows])
    return [logprobs[:, None], entropy[:, None], top]


def _rows(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


# Shapes: N samples, T tokens under the loss mask.

OPTIONS = {
    "logprob_tokens": f"Tokens of a forward pass without gradient, by default {LOGPROB_TOKENS}.",
    "share_prompts": "Compute what several samples begin with, such as their prompt, once; by default true.",
    "fp32_head": "Compute logits in float32 whatever the type of the weights, as the rollout engine's option does; by default false.",
    "head_logits": "Most logits (tokens times vocabulary) that exist at a time, by default 67108864; fewer take less memory.",
    "masters": "Step weights below float32 on float32 copies of them (4 bytes a weight), which checkpoints keep; by default true.",
}
"""The options of `train: {engine: embedded}`, each with its meaning."""


class EmbeddedTrain(TrainEngine):
    """Run packed forward and backward passes over a model that this process holds."""

    name = "embedded"
    capabilities = built_in("embedded", "train")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        self.capabilities = self.capabilities.configured(settings.options, settings.num_ranks)
        self._source = model
        self._settings = settings
        self._loading_device = settings.device
        self._model: Any = None
        self._routers: Routers | None = None
        """Routers of a model whose routing is replayed or balanced."""
        self._is_lent = False

    def start(self) -> None:
        use_threads(self._settings.threads, self._settings.deterministic)
        keep_freed_memory()
        self._codec = load_tokenizer(self._source)
        self._model = load_model(self._source, device=self._loading_device, attention="eager")
        self._longest, self._rope = packing.check_model(self._model, self._source.head)
        self._routers = checked_routers(self._model, self._loading_device, self._source)
        if self._source.lora is not None:
            lora.adapt(self._model, self._source.lora, self._source.seed)
        self._head = self._replaced_head()
        self._shapes = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        self._optimizers = self._optimizers_of(self._model)
        self._demonstrations = Demonstrations(self._codec)

    def _optimizers_of(self, model: Any) -> Optimizers:
        named: dict[str, Any] = {"groups": groups_of_weights(model), "names": {id(held): name for name, held in model.named_parameters()}}
        return Optimizers(model.parameters(), matrices=matrices_of_layers(model), has_masters=self._keeps_masters, **named)

    @property
    def _keeps_masters(self) -> bool:
        return self._flag("masters", default=True)

    def _flag(self, name: str, *, default: bool) -> bool:
        given = self._settings.options.get(name, default)
        if not isinstance(given, bool):
            raise EngineError(f"the option {name} of the train engine {self.name!r} is {given!r}", now="Write true or false.")
        return given

    def _count(self, name: str, default: int) -> int:
        given = self._settings.options.get(name, default)
        if not is_count(given):
            raise EngineError(f"the option {name} of the train engine {self.name!r} is {given!r}", now="Write a whole number.")
        return int(str(given))

    def _replaced_head(self) -> Head | None:
        if self._source.head != "lm":
            return None
        return head_of(self._model, self._count("head_logits", _HEAD_LOGITS), is_exact=self._flag("fp32_head", default=False))

    def stop(self) -> None:
        self._model = self._head = None
        self._optimizers = Optimizers([])
        empty_cache(self._settings.device)

    def onload(self) -> None:
        self._move(self._settings.device)

    def offload(self) -> None:
        if torch.device(self._settings.device).type != "cpu":
            self._move("cpu")
            empty_cache(self._settings.device)

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
        empty_cache(self._settings.device)

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        batch = self._to_train(batch, objective.loss)
        metrics, agreement = dict[str, float](), NO_AGREEMENT
        if num_tokens := int(packing.num_masked(batch.ragged("loss_mask")).sum()):
            terms, metrics, agreement = self._terms(batch, objective.loss)
            terms.sum().backward()
        return Sums.of_passes(batch, num_tokens, metrics, agreement)

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        return {**self._optimizers.step(optimizer, denominator), **self._expert_loads()}

    def _expert_loads(self) -> dict[str, float]:
        """What routers did since the last step. Collective where there are ranks."""
        return {} if self._routers is None else self._routers.settled(self._total(self._routers.loads.taken()), self._source.balance)

    def _total(self, counts: Tensor) -> Tensor:
        """The sum over ranks."""
        return counts

    def discard(self) -> None:
        self._optimizers.clear_gradients()
        if self._routers is not None:
            self._routers.loads.taken()

    def logprobs(self, batch: Batch) -> Batch:
        self._check_head("lm", "log-probabilities")
        return self._of_tokens(batch, "reference_logprobs", "logprobs")

    def top_logprobs(self, batch: Batch, top_k: int) -> Batch:
        self._check_head("lm", "log-probabilities")
        return self._of_tokens(batch, "reference_logprobs", "logprobs", top_k)

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
            raise EngineError(f"the reward model {self._source.path} gave a score that is not finite", now="Take a wider dtype.")
        return Batch(ordered.ids, {"reward": scores}).select(batch.ids)

    def _of_tokens(self, batch: Batch, column: str, output: str, top_k: int = 0) -> Batch:
        """Compute one of the model's outputs for each masked token, 0 for others, as a ragged column; with `top_k` the likeliest too."""
        ordered = self._tokenised(batch).in_order()
        mask = ordered.ragged("loss_mask")
        found = self._numbers(ordered, output, top_k)
        if (mixture := self._recorded(output, top_k)) is not None:
            numbers, experts = Ragged(found[:, 0].astype(np.float32), mask.offsets), column_of(found, mask.offsets, mixture)
            return Batch(ordered.ids, {column: numbers, ROUTED_EXPERTS: experts}).select(batch.ids)
        values = np.zeros(len(mask.values), np.float32)
        values[mask.values.astype(bool)] = found[:, 0]
        columns = {column: Ragged(values, mask.offsets)}
        if top_k:
            offsets = np.concatenate(([0], np.cumsum(packing.num_masked(mask)))).astype(np.int64)
            columns[REFERENCE_TOP_IDS] = Ragged(found[:, 1 : top_k + 1].astype(np.int32), offsets)
            columns[REFERENCE_TOP_LOGPROBS] = Ragged(found[:, top_k + 1 :].astype(np.float32), offsets)
        return Batch(ordered.ids, columns).select(batch.ids)

    def _numbers(self, ordered: Batch, output: str, top_k: int) -> npt.NDArray[np.float64]:
        """Compute an output of all masked tokens, as `_of_rows`; where routing is recorded of all tokens."""
        parts = [np.zeros((0, self._width(output, top_k)))]
        for rows in self._runs(ordered.ragged("tokens")):
            if packing.num_masked(ordered.ragged("loss_mask").take(rows)).any() or self._recorded(output, top_k):
                with torch.no_grad():
                    parts.append(self._of_rows(ordered.take(rows), output, top_k))
        return np.concatenate(parts)

    def _of_rows(self, part: Batch, output: str, top_k: int) -> npt.NDArray[np.float64]:
        """Run a forward pass: float64 [T, 1] of the output, and with `top_k` [T, 2 K + 2], ids and log-probabilities after it."""
        packed = self._pack(part)
        if (mixture := self._recorded(output, top_k)) is not None and self._routers is not None:
            mask = part.ragged("loss_mask")
            if not mask.values.any():
                return beside_experts(np.zeros((0, 1)), mask, None, mixture)
            numbers = self._outputs(part, packed, 0)[output].double().cpu().numpy()[:, None]
            return beside_experts(numbers, mask, (packed, self._routers.chosen(packed)), mixture)
        outputs = self._outputs(part, packed, top_k)
        names = [output, *((REFERENCE_TOP_IDS, REFERENCE_TOP_LOGPROBS) if top_k else ())]
        return np.concatenate([outputs[name].double().cpu().numpy().reshape(len(outputs[output]), -1) for name in names], 1)

    @property
    def _mixture(self) -> Mixture | None:
        """The mixture of a model whose routing is replayed; None: it is not."""
        return None if self._routers is None or self._source.routing is None else self._routers.mixture

    def _recorded(self, output: str, top_k: int) -> Mixture | None:
        """The mixture whose experts of all tokens come with this output: with the policy's own log-probabilities, for its update."""
        return self._mixture if self._source.routing == "trainer" and output == "logprobs" and not top_k and not self._is_lent else None

    def _width(self, output: str, top_k: int) -> int:
        """Numbers for each token: an output, and with `top_k` ids, log-probabilities, and that of the rest; or with it the experts."""
        if (mixture := self._recorded(output, top_k)) is not None:
            return 1 + mixture.num * mixture.num_of_token
        return 2 * top_k + 2 if top_k else 1

    def _runs(self, tokens: Ragged) -> Iterator[npt.NDArray[np.int64]]:
        """Rows that go through the model together; each alone with `deterministic`, so that no result depends on its neighbours."""
        budget = 0 if self._settings.deterministic else self._count("logprob_tokens", LOGPROB_TOKENS)
        return packing.runs_within(tokens.lengths, budget)

    def _tokenised(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask`. Raises `EngineError` for a sample whose result would depend on its neighbours."""
        batch = self._demonstrations.tokenised(batch)
        lengths = packing.sequence_lengths(batch)
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

    def copy_from(self, source: TrainEngine, share: float = 1.0) -> None:
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
                target[name].copy_(blended(target[name], tensor, share))

    def save(self, path: str) -> None:
        trainer_checkpoint.save(path, self._model, self._codec, self._state())

    def _state(self) -> dict[str, Any]:
        """What a checkpoint has beside the weights."""
        if self._is_lent:
            return {"optimizers": [], "masters": []}
        return {"optimizers": self._optimizers.state(), "masters": self._optimizers.masters()}

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        return trainer_checkpoint.held(path, self._model, self._codec, self._state())

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

    def _terms(self, batch: Batch, loss: Loss, *, counts: bool = True) -> tuple[Tensor, dict[str, float], Agreement]:
        """Compute the loss's terms [T], with gradient; the sums of all metrics; and the agreement with the rollout engine."""
        packed = self._pack(batch)
        if self._routers is not None:
            packed = self._routers.balanced(packed, batch, loss.denominator if counts else None, self._source.balance)
        outputs = self._outputs(batch, packed, self._top_ids(batch, loss) if TOP_LOGPROBS in loss.needs else 0)
        routed = {} if self._routers is None else self._routers.routed(packed, counts=counts)
        terms, sums, agreement = self._terms_of(batch, loss, {**outputs, **routed})
        return terms, {**sums, NUM_SHARED: float(packed.num_shared)}, agreement

    def _terms_of(self, batch: Batch, loss: Loss, outputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float], Agreement]:
        """Compute the loss terms of a micro-batch from outputs that are there."""
        terms, reported = _evaluate(loss, self._inputs(batch, loss, outputs))
        _check_terms(loss, terms, num_tokens := int(packing.num_masked(batch.ragged("loss_mask")).sum()))
        if loss.denominator == "groups":
            lengths = self._column(batch, "group_lengths", "a mean over groups needs them")
            terms = terms / lengths
            if "group_ids" in loss.needs:
                reported = {PER_GROUP + name: _per_token(loss, name, value, num_tokens) / lengths for name, value in reported.items()}
        counts = dict[str, float]()
        if loss.correction is not None:
            weights, found = self._correction(batch, loss.correction)
            terms, reported = terms * weights, {**found, **reported}
            counts = {**self._ratio_counts(batch), **self._bucket_sums(batch, found)}
        reported = {"loss": terms, **self._monitored(batch, outputs), **reported}
        sums = torch.stack([_per_token(loss, name, value, num_tokens).detach().double().sum() for name, value in reported.items()])
        return terms, {**dict(zip(reported, sums.tolist(), strict=True)), **counts}, _agreement(batch, outputs)

    def _pack(self, batch: Batch) -> packing.Packed:
        share = self._flag("share_prompts", default=True)
        experts = experts_of(batch) if self._mixture is not None and not self._is_lent else None
        return packing.pack_rows(batch, device=self._settings.device, share_prompts=share, experts=experts)

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

    def _outputs(self, batch: Batch, packed: packing.Packed, top: Tensor | int = 0) -> dict[str, Tensor]:
        """Compute the model's outputs for each masked token, each [T]. `top` as of `_model_outputs`."""
        if self._source.head != "lm":
            return self._model_outputs(packed, None, top)
        mask = self._sampling_mask(batch, top)
        if mask is None:
            return self._model_outputs(packed, self._temperature(batch), top)
        return mask.among_left(self._model_outputs(packed, self._temperature(batch), mask.ids))

    def _sampling_mask(self, batch: Batch, top: Tensor | int) -> SamplingMask | None:
        """What the masked tokens were drawn from; None: from the whole vocabulary, or nobody knows. Raises `EngineError`."""
        mask = SamplingMask.of(batch, self._settings.device)
        if mask is not None and (isinstance(top, Tensor) or top):
            what = "these samples have a sampling mask, and the likeliest tokens of two models are compared over the whole vocabulary"
            raise EngineError(what, now='Leave sampling_mask= out, or take kl="k3" or distill().')
        return mask

    def _model_outputs(self, packed: packing.Packed, temperature: Tensor | None, top: Tensor | int = 0) -> dict[str, Tensor]:
        """Run the model and its head.

        Args:
            top: tokens whose log-probabilities are computed, int64 [T, K], or how many of the likeliest to find; 0: none.
        """
        if self._routers is not None:
            self._routers.use(packed.experts, packed.balanced)
        if self._source.head != "lm":
            return {"values": self._forward(packed)}
        at_ids = top if isinstance(top, Tensor) else None
        if self._head is not None and (at_ids is not None or not top) and self._head.is_worth(len(packed.targets)):
            with self._head.asked(packed.targets, temperature, at_ids):
                found = self._forward(packed)
            return {"logprobs": found[:, 0], "entropy": found[:, 1], **({} if at_ids is None else {TOP_LOGPROBS: found[:, 2:]})}
        if at_ids is not None:
            logprobs, entropy, at_top = logprobs_at(self._forward(packed), packed.targets, temperature, at_ids)
            return {"logprobs": logprobs, "entropy": entropy, TOP_LOGPROBS: at_top}
        output = self._forward(packed)
        logprobs, entropy = token_logprobs(output, packed.targets, temperature)
        likely = zip((REFERENCE_TOP_IDS, REFERENCE_TOP_LOGPROBS), most_likely(output, temperature, int(top)), strict=True) if top else ()
        return {"logprobs": logprobs, "entropy": entropy, **dict(likely)}

    def _forward(self, packed: packing.Packed) -> Tensor:
        """Compute the head's output: logits [T, V] or what `Head` answers in their place, or one number a token [T]."""
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
            elif name == "random_numbers":
                inputs[name] = self._random_numbers(batch)
            else:
                behaviour = "logprobs" if loss.correction is None else PROXIMAL
                column = behaviour if name == "behaviour_logprobs" else name
                inputs[name] = self._column(batch, column, f"the loss {loss.name} needs {name}")
        return inputs

    def _top_ids(self, batch: Batch, loss: Loss) -> Tensor | int:
        """The reference's likeliest tokens, int64 [T, K]; of a critic 0, which then lacks what the loss needs."""
        if self._source.head != "lm":
            return 0
        return self._column(batch, REFERENCE_TOP_IDS, f"the loss {loss.name} needs {TOP_LOGPROBS}").long()

    def _correction(self, batch: Batch, correction: Correction) -> tuple[Tensor, dict[str, Tensor]]:
        """The weights of a correction, and its metrics, each [T]."""
        proximal, rollout, *ages = (self._column(batch, name, "a correction needs it") for name in correction.needs)
        return correction_weights(proximal, rollout, self._sequence_ids(batch), correction, *ages)

    def _ratio_counts(self, batch: Batch) -> dict[str, float]:
        """Count tokens by how much likelier the trainer holds them than the rollout engine did."""
        proximal, rollout = (self._column(batch, name, "a correction needs it").cpu().numpy() for name in (PROXIMAL, "logprobs"))
        return ratio_counts(proximal, rollout)

    def _bucket_sums(self, batch: Batch, found: Mapping[str, Tensor]) -> dict[str, float]:
        """Sum a correction's metrics by version age and by place in the response."""
        mask = batch.ragged("loss_mask")
        counts = packing.num_masked(mask)
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        ages = batch.ragged(VERSION_AGES).values[mask.values.astype(bool)] if VERSION_AGES in batch else None
        return bucket_sums({name: values.double().cpu().numpy() for name, values in found.items()}, ages, places)

    def _sequence_ids(self, batch: Batch) -> Tensor:
        counts = packing.num_masked(batch.ragged("loss_mask"))
        return self._put(np.repeat(np.arange(len(counts)), counts))

    def _random_numbers(self, batch: Batch) -> Tensor:
        """A number in [0, 1) for each masked token, by its sample's identity and its place in that alone."""
        tokens = batch.ragged("tokens")
        places = np.arange(len(tokens.values)) - np.repeat(tokens.offsets[:-1], tokens.lengths)
        drawn = uniforms(np.repeat(batch.ids.astype(np.uint64), tokens.lengths), places)
        return self._put(drawn[batch.ragged("loss_mask").values.astype(bool)])

    def _column(self, batch: Batch, name: str, reason: str) -> Tensor:
        """A per-token or per-sample column of numbers, as [T]; of the likeliest tokens, [T, K]."""
        if name not in batch:
            raise EngineError(f"{reason}, and the batch has no column {name!r}; it has {', '.join(sorted(batch.columns))}")
        column = batch[name]
        if not isinstance(column, Ragged):
            return self._put(np.repeat(column, packing.num_masked(batch.ragged("loss_mask"))))
        mask = batch.ragged("loss_mask")
        if column.kind == "numbers" and np.array_equal(column.offsets, mask.offsets) and column.values.ndim == 1:
            return self._put(column.values[mask.values.astype(bool)])
        if column.kind == "numbers" and column.values.ndim == 2 and np.array_equal(column.lengths, packing.num_masked(mask)):
            return self._put(column.values)
        raise EngineError(f"{reason}, and column {name!r} has not one number a token", now="Draw dataset.pairs()." * (name == "chosen"))

    def _monitored(self, batch: Batch, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Metrics of any loss: entropy, and how far the weights are from those that sampled the tokens."""
        found = {name: outputs[name] for name in ("entropy", *OF_TOKENS) if name in outputs}
        if "logprobs" not in outputs or "logprobs" not in batch:
            return found
        difference = outputs["logprobs"].detach() - self._column(batch, "logprobs", "the drift")
        ratio = difference.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
        return {**found, "logprob_diff_abs": difference.abs(), "ratio": ratio}

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
        own = traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        raise OpError(f"the loss {loss.name} raised {described(error)}", remote="".join(own)) from error
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
        raise OpError(f"the loss {loss.name} must return one number a token, [{num_tokens}], not their sum or mean; {name} is {shape}")
    return value


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

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        self._refuse()

    def discard(self) -> None:
        return

    def logprobs(self, batch: Batch) -> Batch:
        with self._lender.with_adapters(self._adapters):
            return self._lender.logprobs(batch)

    def top_logprobs(self, batch: Batch, top_k: int) -> Batch:
        with self._lender.with_adapters(self._adapters):
            return self._lender.top_logprobs(batch, top_k)

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

    def copy_from(self, source: TrainEngine, share: float = 1.0) -> None:
        """Copy the current adapters of a policy whose base is the lender's."""
        if share != 1:
            raise EngineError("an average of adapters is not that of the weights they make", now="Copy them whole: Reference(policy).")
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
