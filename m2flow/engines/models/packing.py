"""Run a micro-batch as one packed forward pass: no padding, each shared beginning once, demonstrations tokenised.

    samples --pack--> Packed --forward_logits--> logits of the positions that predict a masked token
                             --forward_scalars-> a critic's values there; a reward model's score at the last token of each exchange

The tokens of all samples lie one after the other in a single sequence [1, R] with explicit positions. Samples that begin with the
same tokens share their rows as far as that goes: a prompt, a system message, what an episode and its branches and forks have in
common. Whether a token is under the mask does not matter there, since a row predicts for each sample its own next token. Padding
exists only inside attention: its rows are copied out to [S, L, H, D], right-padded, in a few buckets of similar length, where
`is_causal` is the only mask needed.
The modelling code stays Hugging Face's; the attention function is registered with transformers' AttentionInterface.

A window or a chunk is a mask [L, L] that a bucket's sequences share, where they are longer; soft caps and sinks have their scores in
memory, [S, H, L, L], as with transformers' own eager attention. What else a model may ask of its attention is refused by `check_model`.

`Demonstrations` tokenises each text once, since the planner asks for lengths before it trains, and epochs repeat:
tokens = prompt + target + end of sequence;  loss_mask = False for the prompt, True for the rest. The cache is keyed by the texts,
and cleared when it gets large.

Limit: attention over what is shared is computed for each sample; only linear layers are saved there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from m2flow.engines.models.model_probe import NUM_JUDGED, ModelProbe, Reach, Scoring, explicit_attention, longest_sequence, scoring_of
from m2flow.errors import DatasetError, EngineError
from m2flow.samples import Batch, IdArray, Prompt, Ragged, SampleId, sequences_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from m2flow.engines.models.model_files import TextCodec
    from m2flow.engines.models.routing import Balanced

_MAX_REMEMBERED_TOKENS = 1 << 24
"""64 MiB of ids."""


@dataclass
class Demonstrations:
    """Tokenise demonstrations with one tokenizer, each text once."""

    codec: TextCodec
    _known: dict[tuple[str, str], tuple[npt.NDArray[np.int32], int]] = field(default_factory=dict, init=False)
    _num_remembered: int = field(default=0, init=False)

    def tokenised(self, batch: Batch) -> Batch:
        """Add `tokens` (int32) and `loss_mask` columns to a batch, unless it has tokens already.

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

    def _encode(self, prompt: Prompt, target: str, sample: int) -> tuple[npt.NDArray[np.int32], int]:
        key = json.dumps(prompt), target
        found = self._known.get(key)
        if found is None:
            prompt_ids = self.codec.encode_prompt(prompt)
            if not prompt_ids:
                raise DatasetError(
                    f"the prompt of demonstration {SampleId.unpack(sample)} has no tokens: {prompt!r}",
                    now="Leave such rows out of the dataset.",
                )
            ids = [*prompt_ids, *self.codec.encode_target(target), self.codec.eos_id]
            found = (np.array(ids, np.int32), len(prompt_ids))
            if self._num_remembered + len(ids) > _MAX_REMEMBERED_TOKENS:
                self._known.clear()
                self._num_remembered = 0
            self._known[key] = found
            self._num_remembered += len(ids)
        return found


def _texts(batch: Batch) -> list[tuple[Prompt, str]]:
    prompts, targets = batch.ragged("prompt"), batch.ragged("target")
    return [(cast(Prompt, prompts.item(i)), str(targets.item(i))) for i in range(len(batch))]


# Shapes: S sequences of a bucket, L their padded length, R rows of the packed sequence, T predicted tokens,
# H heads (K of keys and values), D size of a head, V vocabulary.

# ---- packing

ATTENTION = "m2flow_packed"
"""The name under which the attention function is registered with transformers."""

_MAX_BUCKETS = 8
_BUCKET_COST = 100
"""What one more bucket costs, in padded slots. On two CPU cores, forward and backward, four heads of 32: about 0.15 ms a bucket
and 1.5 us a slot. On geometric lengths one bucket takes 1.9 times, two 1.3 times as long a step as four; eight gain 2 % more."""


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """Where the rows of the packed sequence lie inside attention. A slot is one position of the padded buckets."""

    buckets: tuple[tuple[int, int], ...]
    """(S, L) of each bucket; their slots follow each other."""
    row_of_slot: Tensor
    """int64 [slots]; a padding slot reads row 0, and nothing reads the padding slot."""
    slot_of_row: Tensor
    """int64 [R]: the slot whose output is the row's. For a shared row, that of the first sample."""
    further_slots: Tensor
    """int64 [E]: the other slots of shared rows."""
    further_rows: Tensor
    """int64 [E]: the rows that those slots read."""
    unread: Tensor | None = None
    """int64: rows that no slot reads, where ranks have some of the queries each. None: all are read."""
    queries: AttentionLayout | None = None
    """There, where this rank's own rows lie, in as many buckets; of each sequence the last slots. None: all rows have queries."""
    exchange: Callable[..., tuple[Tensor, None]] | None = None
    """Where ranks have some of the rows each: what is called in the place of the attention, and calls it with all rows of some heads, or
    with the keys and values of all rows."""
    masks: dict[tuple[Reach, int], Tensor] = field(default_factory=dict)
    """What is seen within a sequence, bool [L, L], made when a layer first needs it."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch, ready for the model."""

    input_ids: Tensor
    """int64 [1, R]"""
    position_ids: Tensor
    """int64 [1, R]"""
    layout: AttentionLayout
    predictors: Tensor
    """int64 [T]: the row that predicts each masked token."""
    targets: Tensor
    """int64 [T]: the masked tokens, sample after sample."""
    experts: Tensor | None = None
    """int64 [R, layers, k]: of a mixture, the experts of each row that are replayed; -1 where unknown. None: the model's own."""
    row_of_token: IdArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [tokens of all samples]: the row of each token, -1 for those that no row has."""
    sequence_of_token: IdArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [tokens of all samples]: which of the sequences each belongs to, from 0."""
    balanced: Balanced | None = None
    """Losses of a mixture's routers in this pass."""
    which: Tensor | None = None
    """Where ranks have some of the rows each, bool [T of all ranks]: the tokens that this rank's rows predict. None: all."""
    place: Tensor | None = None
    """There, int64 [R of all ranks]: where each row is among this rank's, -1 where it is another's. None: all are here."""

    @property
    def num_rows(self) -> int:
        return int(self.input_ids.shape[1])

    @property
    def num_shared(self) -> int:
        """Tokens that need no row of their own, since another sequence begins with the same."""
        return int((self.row_of_token >= 0).sum()) - int(self.row_of_token.max(initial=-1)) - 1


def pack(
    ids: IdArray, tokens: Ragged, loss_mask: Ragged, *, device: str = "cpu", share_prompts: bool = True, experts: Ragged | None = None
) -> Packed:
    """Lay out N samples for one forward pass.

    Tokens after a sample's last masked one are left out, since nothing that the loss sees depends on them.

    Args:
        ids: int64 [N], packed identities, by which errors name a sample.
        tokens: int, ragged over N. loss_mask: bool, of the same lengths.
        experts: int [tokens, layers, k], of the same lengths, -1 where unknown. Rows are shared where their experts are the same, too.
        share_prompts: whether samples share the rows of what they begin with.
    Returns:
        The packed micro-batch; T is the number of masked tokens, and may be 0.
    Raises:
        EngineError: a mask selects the first token of a sample, which nothing predicts.
    """
    flat_mask = loss_mask.values.astype(bool)
    flat_tokens = tokens.values.astype(np.int64)
    sample_of_masked = np.repeat(np.arange(len(ids)), tokens.lengths)[flat_mask]
    position_of_masked = np.flatnonzero(flat_mask) - tokens.offsets[sample_of_masked]
    if len(position_of_masked) and position_of_masked.min() == 0:
        sample = SampleId.unpack(ids[sample_of_masked[np.argmin(position_of_masked)]])
        raise EngineError(
            f"the loss mask of sample {sample} selects its first token, which nothing predicts", now="Begin the mask with a 0."
        )
    length = np.zeros(len(ids), np.int64)
    length[sample_of_masked] = position_of_masked  # They ascend inside a sample: the last one is the length of the input.

    offsets = np.concatenate(([0], np.cumsum(length)))
    sample_of_input = np.repeat(np.arange(len(ids)), length)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], length)
    row, num_rows = _assign_rows(tokens, length, experts) if share_prompts else (np.arange(offsets[-1]), int(offsets[-1]))

    input_ids, position_ids = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    token_of_input = tokens.offsets[sample_of_input] + position
    input_ids[row] = flat_tokens[token_of_input]
    position_ids[row] = position
    row_of_token = np.full(len(flat_tokens), -1, np.int64)
    row_of_token[token_of_input] = row

    def put(array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    chosen = None
    if experts is not None:
        chosen = np.full((num_rows, *experts.values.shape[1:]), -1, np.int64)
        chosen[row] = experts.values[token_of_input]
    return Packed(
        input_ids=put(input_ids)[None],
        position_ids=put(position_ids)[None],
        layout=_lay_out(row, sample_of_input, position, length, num_rows, put),
        predictors=put(row[offsets[sample_of_masked] + position_of_masked - 1]),
        targets=put(flat_tokens[flat_mask]),
        experts=None if chosen is None else put(chosen),
        row_of_token=row_of_token,
        sequence_of_token=np.repeat(np.arange(len(ids)), tokens.lengths),
    )


def pack_rows(batch: Batch, *, device: str, share_prompts: bool, experts: Ragged | None = None) -> Packed:
    """`pack` the rows of a batch; what has several sequences (`m2flow.samples.sequences_of`) as so many samples of its group.

    The sequences of a row lie one after the other, so the masked tokens T are those of the rows, in the same order.
    """
    tokens, mask, ids = batch.ragged("tokens"), batch.ragged("loss_mask"), batch.ids
    if (found := sequences_of(batch)) is not None:
        offsets, row = found
        ids, tokens, mask = ids[row], Ragged(tokens.values, offsets), Ragged(mask.values, offsets)
        experts = None if experts is None else Ragged(experts.values, offsets)
    return pack(ids, tokens, mask, device=device, share_prompts=share_prompts, experts=experts)


def sequence_lengths(batch: Batch) -> IdArray:
    """Tokens of the longest sequence of each row, int64 [N]."""
    found, lengths = sequences_of(batch), batch.ragged("tokens").lengths
    if found is None:
        return lengths
    longest = np.zeros(len(batch), np.int64)
    np.maximum.at(longest, found[1], np.diff(found[0]))
    return longest


def forward_logits(model: PreTrainedModel, packed: Packed) -> Tensor:
    """Compute logits [T, V] of the masked tokens. The model was loaded with `attention=ATTENTION` and passed `check_model`."""
    return batched_logits(model, packed)[0]


def batched_logits(model: PreTrainedModel, packed: Packed, hidden: Tensor | None = None) -> Tensor:
    """Compute logits of the masked tokens as the model returns them, [1, T, V]. `hidden` as of `last_hidden`."""
    logits: Tensor = model(**_inputs(packed, hidden), logits_to_keep=packed.predictors).logits
    if logits.shape[1] != len(packed.predictors):
        raise EngineError(f"{type(model).__name__} gives {logits.shape[1]} rows of logits where {len(packed.predictors)} were asked for")
    return logits


def _inputs(packed: Packed, hidden: Tensor | None) -> dict[str, Any]:
    rows = {"input_ids": packed.input_ids} if hidden is None else {"inputs_embeds": hidden}
    return {**rows, "position_ids": packed.position_ids, "use_cache": False, "packed_layout": packed.layout}


def num_masked(loss_mask: Ragged) -> IdArray:
    """Count the tokens under the mask of each sample, int64 [N]."""
    counts = np.concatenate(([0], np.cumsum(loss_mask.values.astype(np.int64))))
    found: IdArray = counts[loss_mask.offsets[1:]] - counts[loss_mask.offsets[:-1]]
    return found


def runs_within(lengths: IdArray, budget: int) -> Iterator[IdArray]:
    """Split samples, by their places, into runs of at most `budget` tokens, or of one sample."""
    start, total = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > start and total + length > budget:
            yield np.arange(start, row)
            start, total = row, 0
        total += length
    if start < len(lengths):
        yield np.arange(start, len(lengths))


def check_model(model: PreTrainedModel, head: str = "lm") -> tuple[int, str]:
    """Make a model that was loaded with attention `eager` ready for `forward_logits`, or a head's forward pass of one number, after the
    probe of every engine (`m2flow.engines.models.model_probe`): several samples packed must give what transformers gives for each alone.

    Returns:
        The model's `longest_sequence`.
    Raises:
        EngineError: the model can't be computed here, with the reason.
    """

    def plain(tokens: Tensor) -> Tensor:
        if head == "lm":
            return cast("Tensor", model(input_ids=tokens, use_cache=False).logits)
        return cast("Tensor", model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)

    longest, rope = longest_sequence(model.config)
    if not longest:
        raise EngineError(f"{type(model).__name__} has {rope} rotary embeddings, which change with the longest sequence of a batch")
    probe = ModelProbe(model, "the embedded trainer", longest, plain, head)
    with probe.explained():
        model.set_attn_implementation(ATTENTION)
    if probe.is_known:
        return longest, rope
    # A token more of each, which nothing reads: what would predict it is judged too.
    tokens = Ragged.of([[*row.tolist(), 0] for row in probe.sequences], np.int32)
    mask = Ragged.of([np.arange(len(row) + 1) > len(row) - NUM_JUDGED for row in probe.sequences], np.bool_)
    ids = np.array([SampleId(0, max(0, i - 1), i).pack() for i in range(len(probe.sequences))], np.int64)
    with probe.explained(), torch.no_grad():
        packed = pack(ids, tokens, mask, device=str(next(model.parameters()).device))
        computed = batched_logits(model, packed)[0] if head == "lm" else hidden_states(model, packed)
        probe.judge(computed.split(NUM_JUDGED))
    probe.remember()
    return longest, rope


def _assign_rows(tokens: Ragged, length: IdArray, experts: Ragged | None) -> tuple[IdArray, int]:
    """Assign a row to each input, sequence after sequence, and return how many there are.

    A sequence has the rows of an earlier one as far as both begin alike: the one with which it has most in common, which is a neighbour of
    its own in alphabetical order.
    """
    offsets, number = np.concatenate(([0], np.cumsum(length))), len(length)
    letters = _letters(tokens, experts)
    words = [letters[start : start + count] for start, count in zip(tokens.offsets[:-1].tolist(), length.tolist(), strict=True)]
    order = sorted(range(number), key=lambda i: words[i].tobytes())
    row, num_rows = np.zeros(offsets[-1], np.int64), 0
    alike, of = _alike_earlier(words, order)
    for i, (count, other) in enumerate(zip(alike, of, strict=True)):
        start, num_own = int(offsets[i]), int(length[i]) - count
        row[start : start + count] = row[offsets[other] : offsets[other] + count]
        row[start + count : offsets[i + 1]] = np.arange(num_rows, num_rows + num_own)
        num_rows += num_own
    return row, num_rows


def _letters(tokens: Ragged, experts: Ragged | None) -> npt.NDArray[np.void]:
    """What must be the same of two inputs at each position: the token, and the experts that are replayed; as opaque bytes."""
    parts = [np.ascontiguousarray(tokens.values.astype(np.int32)).view(np.uint8).reshape(-1, 4)]
    if experts is not None:
        flat = np.ascontiguousarray(experts.values.reshape(len(tokens.values), -1))
        parts.append(flat.view(np.uint8).reshape(len(flat), -1))
    joined = np.ascontiguousarray(np.concatenate(parts, axis=1))
    return joined.view(np.dtype((np.void, joined.shape[1]))).reshape(-1)


def _alike_earlier(words: list[npt.NDArray[np.void]], order: list[int]) -> tuple[list[int], list[int]]:
    """How many letters each word has in common with an earlier one, at most, and which that is; `order` sorts the words."""
    alike, of = [0] * len(words), [0] * len(words)
    below, above = [at - 1 for at in range(len(order))], [at + 1 for at in range(len(order))]
    place = {i: at for at, i in enumerate(order)}
    for i in reversed(range(len(words))):  # The later ones leave, so that the neighbours of each are earlier than it.
        at = place[i]
        for near in (below[at], above[at]):
            if 0 <= near < len(order) and (count := _num_alike(words[i], words[order[near]])) > alike[i]:
                alike[i], of[i] = count, order[near]
        if below[at] >= 0:
            above[below[at]] = above[at]
        if above[at] < len(order):
            below[above[at]] = below[at]
    return alike, of


def _num_alike(one: npt.NDArray[np.void], other: npt.NDArray[np.void]) -> int:
    """How many letters two words begin with alike."""
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most


def _lay_out(row: IdArray, sample_of_input: IdArray, position: IdArray, length: IdArray, num_rows: int, put: Any) -> AttentionLayout:
    order = np.argsort(length, kind="stable")
    order = order[length[order] > 0]
    buckets = choose_buckets(length[order])
    slot_start = np.zeros(len(length), np.int64)
    first, base = 0, 0
    for num_sequences, padded in buckets:
        slot_start[order[first : first + num_sequences]] = base + np.arange(num_sequences) * padded
        first, base = first + num_sequences, base + num_sequences * padded
    slot = slot_start[sample_of_input] + position
    row_of_slot, slot_of_row = np.zeros(base, np.int64), np.zeros(num_rows, np.int64)
    row_of_slot[slot] = row
    # NumPy keeps the last of several assignments; reversed, that is the first sample's.
    slot_of_row[row[::-1]] = slot[::-1]
    further = slot_of_row[row] != slot
    return AttentionLayout(tuple(buckets), put(row_of_slot), put(slot_of_row), put(slot[further]), put(row[further]))


def choose_buckets(lengths: IdArray) -> list[tuple[int, int]]:
    """Split ascending lengths into at most eight runs, each padded to its longest, so that padding and the runs' own cost are least.

    Returns:
        (number of sequences, padded length) of each run.

    >>> choose_buckets(np.array([2] * 500 + [100] * 500))
    [(500, 2), (500, 100)]
    """
    if not len(lengths):
        return []
    # A run ends at the last sequence of some length. ends[j]: sequences up to there; best[j]: least cost of covering them.
    ends = np.concatenate(([0], np.flatnonzero(np.diff(lengths)) + 1, [len(lengths)]))
    longest = lengths[ends[1:] - 1]
    best = np.full(len(ends), np.inf)
    best[0] = 0.0
    choices: list[IdArray] = []
    costs: list[float] = []
    for _ in range(min(_MAX_BUCKETS, len(longest))):
        run_cost = (ends[None, 1:] - ends[:, None]) * longest[None, :] + _BUCKET_COST
        total = np.where(ends[None, 1:] > ends[:, None], best[:, None] + run_cost, np.inf)
        choices.append(np.argmin(total, axis=0))
        best = np.concatenate(([np.inf], np.min(total, axis=0)))
        costs.append(float(best[-1]))
    buckets = []
    end = len(ends) - 1
    for choice in reversed(choices[: int(np.argmin(costs)) + 1]):
        start = int(choice[end - 1])
        buckets.append((int(ends[end] - ends[start]), int(longest[end - 1])))
        end = start
    return buckets[::-1]


class _Spread(torch.autograd.Function):  # type: ignore[misc]
    """Copy rows [R, C] to slots [slots, C]. The gradient of a row is the sum over its slots; that of a padding slot is zero by itself."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layout: AttentionLayout, sum_slots: bool) -> Tensor:
        ctx.layout, ctx.sum_slots = layout, sum_slots
        return rows.index_select(0, layout.row_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layout: AttentionLayout = ctx.layout
        rows = grad.index_select(0, layout.slot_of_row)
        if ctx.sum_slots and len(layout.further_slots):
            rows.index_add_(0, layout.further_rows, grad.index_select(0, layout.further_slots))
        if layout.unread is not None:
            rows.index_fill_(0, layout.unread, 0.0)
        return rows, None, None


class _Collect(torch.autograd.Function):  # type: ignore[misc]
    """Copy slots [slots, C] to rows [R, C], each from one slot."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, layout: AttentionLayout) -> Tensor:
        ctx.layout, ctx.num_slots = layout, slots.shape[0]
        return slots.index_select(0, layout.slot_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        slots = grad.new_zeros(ctx.num_slots, grad.shape[1])
        return slots.index_copy_(0, ctx.layout.slot_of_row, grad), None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: AttentionLayout | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """Attention function that the model calls: query [1, H, R, D], key and value [1, K, R, D] to [1, R, H, D]."""
    if packed_layout is None:
        raise EngineError("the model was called without a packed layout; use m2flow.engines.models.packing.forward_logits")
    scoring = scoring_of(module, query, attention_mask, scaling, {"dropout": dropout, **features})
    if packed_layout.exchange is not None:
        return packed_layout.exchange(
            module, query, key, value, scaling=scaling, packed_layout=replace(packed_layout, exchange=None), **features
        )
    of_queries = packed_layout.queries or packed_layout
    # A further slot's query makes no output, so its gradient is zero.
    spread = [_Spread.apply(query[0].transpose(0, 1).flatten(1), of_queries, False)]
    spread += [_Spread.apply(heads[0].transpose(0, 1).flatten(1), packed_layout, True) for heads in (key, value)]
    sizes = [[count * length for count, length in layout.buckets] for layout in (of_queries, packed_layout, packed_layout)]
    slots = [flat.split(size) for flat, size in zip(spread, sizes, strict=True)]
    outputs = []
    for (num_sequences, length), (_, num_queries), *of_bucket in zip(packed_layout.buckets, of_queries.buckets, *slots, strict=True):
        q, k, v = (
            one.view(num_sequences, size, -1, width).transpose(1, 2)
            for one, size, width in zip(of_bucket, (num_queries, length, length), (*[query.shape[-1]] * 2, value.shape[-1]), strict=True)
        )
        if scoring.is_plain:
            out = _plain_attention(packed_layout, scoring, q, k, v)
        else:
            visible = _visible(packed_layout, scoring.reach or Reach("window", length), length, q)
            out = explicit_attention(q, k, v, visible, scoring)
        outputs.append(out.transpose(1, 2).reshape(num_sequences * num_queries, -1))
    slots_out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    rows = _Collect.apply(slots_out, of_queries)
    return rows.view(1, rows.shape[0], query.shape[1], value.shape[-1]), None


def _plain_attention(layout: AttentionLayout, scoring: Scoring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a bucket without soft caps and sinks: queries [S, H, Q, D] are the last Q of keys and values [S, K, L, D]."""
    length = k.shape[2]
    reach, is_part = scoring.reach_within(length), q.shape[2] < length
    if reach is None and is_part and q.is_cuda:
        visible = causal_lower_right(q.shape[2], length)  # Kernels that have no mask in memory know it.
    else:
        visible = _visible(layout, Reach("window", length) if reach is None and is_part else reach, length, q)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=scoring.scaling, enable_gqa=k.shape[1] != q.shape[1]
    )


def _visible(layout: AttentionLayout, reach: Reach | None, length: int, like: Tensor) -> Tensor | None:
    """Which of so many keys each of the last queries of a sequence sees, bool [queries, length]; None: all up to its own.

    Args:
        like: the queries, [S, H, queries, D].
    """
    if reach is None:
        return None
    if (reach, length) not in layout.masks:
        layout.masks[reach, length] = reach.visible(length, like.device)
    return layout.masks[reach, length][length - like.shape[2] :]


# No mask function is registered beside it, and for such a name transformers builds no mask.
AttentionInterface.register(ATTENTION, packed_attention)


# ---- scalar heads: a critic's value of each token, a reward model's score of an exchange


def forward_scalars(model: Any, packed: Packed) -> Tensor:
    """Compute the head's output where a masked token is predicted: float32 [T], with gradient."""
    return column_scalars(model, packed)[:, 0].float()


def column_scalars(model: Any, packed: Packed, hidden: Tensor | None = None) -> Tensor:
    """Compute the head's output as the head returns it, [T, 1], in the model's dtype. `hidden` as of `last_hidden`."""
    scalars: Tensor = model.score(hidden_states(model, packed, hidden))
    return scalars


def hidden_states(model: Any, packed: Packed, hidden: Tensor | None = None) -> Tensor:
    """Compute the hidden states where a masked token is predicted, [T, width]. `hidden` as of `last_hidden`."""
    return last_hidden(model, packed, hidden)[0][packed.predictors]


def last_hidden(model: Any, packed: Packed, hidden: Tensor | None = None) -> Tensor:
    """Compute the hidden states of all rows after the last layer, [1, R, width].

    Args:
        hidden: of a model that lacks its first layers, the hidden states after those, [1, R, width]. None: it has all of them.
    """
    output: Tensor = model.base_model(**_inputs(packed, hidden)).last_hidden_state
    return output


LEAVE_OUT = "Leave the option fp32_head out."


def exact_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a layer in float32, whatever its type: the product of two bfloat16 numbers is exact there, their sums are rounded once."""
    return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def scored_tokens(codec: TextCodec, batch: Batch, max_tokens: int) -> tuple[Ragged, Ragged]:
    """Tokenise prompts and responses by the scoring model's own tokenizer, as tokens and loss mask for `pack`.

    Each sample has one more token at its end, alone under the mask: what "predicts" it is the last token of the exchange.

    Raises:
        EngineError: a batch without texts, or an exchange that exceeds the model's context.
    """
    for name in ("prompt", "text"):
        if name not in batch:
            raise EngineError(
                f"a reward model scores `prompt` and `text`, and the batch has {', '.join(sorted(batch.columns))}",
                now="Score what policy.generate gave, with its prompts.",
            )
    prompts, texts = batch.ragged("prompt"), batch.ragged("text")
    rows = [codec.encode_exchange(cast(Prompt, prompts.item(i)), str(texts.item(i))) for i in range(len(batch))]
    for packed, row in zip(batch.ids.tolist(), rows, strict=True):
        if len(row) > max_tokens:
            raise EngineError(
                f"sample {SampleId.unpack(packed)} has {len(row)} tokens for the reward model, whose context is {max_tokens}",
                now="Generate with a smaller max_new_tokens, or use a reward model with a longer context.",
            )
    tokens = Ragged.of([[*row, 0] for row in rows], np.int32)
    mask = np.zeros(len(tokens.values), np.bool_)
    mask[tokens.offsets[1:] - 1] = True
    return tokens, Ragged(mask, tokens.offsets)
