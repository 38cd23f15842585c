"""Split the rows of a pass over a few ranks: sequence parallelism (Ulysses, by all-to-all), and context parallelism (by all-gather).

How a model's weights are split over ranks is `m2flow.engines.distributed.model_parallel`'s.

Sequence parallelism (Ulysses, `SequenceParallel`):

    packed rows --shard--> this rank's rows --layers--> q, k, v of its rows, all heads --all-to-all--> of all rows, some heads
                 one number a token <--gather-- logits of its rows <--layers-- all heads of its rows <--all-to-all-- packed attention

Rows are dealt out in the order of ranks, whatever samples they belong to: what a row attends to is in the layout, which every rank has. So
micro-batches stay packed, and a prompt that a group shares still goes through the model once. What the loss needs of each token is then on
every rank, as on one; a gradient goes back to the rank that computed the row, and gradients of weights are a sum over ranks, as with other
samples. In Megatron's model the same is done by `RowShard`, `ToHeads` and
`ToRows`. To DeepSpeed these are data-parallel ranks: told of a sequence group (`mpu`), it reports a norm too large by that group's size in
stages 1 and 2. Limit: heads of one size, whose number the ranks divide.

Context parallelism (`ContextParallel`), for `fsdp`:

    packed rows --part_of--> this rank's rows --layers--> q of its rows; k, v --all-gather--> of all rows: packed attention
                     one number a token <--gather-- logits of its rows <--layers-- all heads of its rows <---'

A rank has two chunks of the rows, one from each end, so that one long sequence is as much work for each. Heads are not split, so any
number of ranks will do, and windows, soft caps, sinks, and keys and values of two sizes are as on one. On the way back gradients of keys
and values are summed, and each rank has those of its rows. An attention that fails on one rank makes both collectives all the same, with
zeros (`KeysAndValues`). Limits: a layer's gathered keys and values are kept for its backward pass; on a CPU, and with windows, attention
over a part of a sequence has a mask in memory.

Source: Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed-Ulysses), with the library's `UlyssesSPAttentionHF`; Grattafiori et al. 2024,
arXiv:2407.21783, section 3.3.2 (Llama 3), for context parallelism.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines.distributed import check_heads
from m2flow.engines.distributed.model_parallel import Block
from m2flow.engines.models.packing import AttentionLayout, Packed, choose_buckets, last_hidden, pack, packed_attention
from m2flow.errors import EngineError
from m2flow.samples import IdArray, Ragged

_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By release of torch."""

# ---- sequence parallelism: R rows of the packed sequence, T predicted tokens, t those that this rank's rows predict.


class SequenceParallel:
    """Splits sequences over a group of ranks (Ulysses), for one model.

    Args:
        group: of torch.distributed, the ranks that have parts of the same sequences.
        exchange: the library's class, `UlyssesSPAttentionHF`.
    Raises:
        EngineError: the model's heads can't be shared out.
    """

    def __init__(self, model: Any, group: Any, exchange: Callable[..., Any]) -> None:
        config = model.config.get_text_config()
        self._group, self._count, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        check_heads(config, self._count)
        self._config = config
        self._make_exchange = exchange
        self._exchange: Any = None

    def shard(self, packed: Packed) -> Packed:
        """This rank's rows of a pass. Padding rows of the last rank attend to themselves."""
        num_more = -packed.num_rows % self._count
        num_rows = (packed.num_rows + num_more) // self._count
        start = self._rank * num_rows
        which = (packed.predictors >= start) & (packed.predictors < start + num_rows)
        place = torch.arange(packed.num_rows, device=packed.input_ids.device) - start

        def own(rows: Tensor, filled: int = 0) -> Tensor:
            more = rows.new_full((1, num_more, *rows.shape[2:]), filled)
            return torch.cat((rows, more), 1)[:, start : start + num_rows]

        return replace(
            packed,
            input_ids=own(packed.input_ids),
            position_ids=own(packed.position_ids),
            layout=replace(with_rows(packed.layout, packed.num_rows, num_more), exchange=self._around),
            predictors=packed.predictors[which] - start,
            targets=packed.targets[which],
            experts=None if packed.experts is None else own(packed.experts[None], -1)[0],
            which=which,
            place=place.where((place >= 0) & (place < num_rows), -1),
        )

    def gather(self, values: Tensor, which: Tensor) -> Tensor:
        """Gather what each of the T tokens has from the ranks that computed it, [t, ...] to [T, ...]. Collective."""
        found: Tensor = Gathered.apply(values, which, self._group)
        return found

    def _around(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **features: Any) -> tuple[Tensor, None]:
        """Run attention between two all-to-all exchanges: query [1, H, R / ranks, D] to [1, R / ranks, H D]."""
        if features.get("s_aux") is not None:
            raise EngineError("attention sinks are not shared out over ranks", now="Leave sp out.")
        if self._exchange is None:
            self._exchange = self._make_exchange(
                packed_attention,
                batch_size=1,
                attn_head_count=self._config.num_attention_heads,
                attn_head_size=query.shape[-1],
                kv_head_count=self._config.num_key_value_heads,
                num_hidden_layers=self._config.num_hidden_layers,
                process_group=self._group,
                seq_length_is_variable=True,
            )
        # It gathers positions for attentions that ask for them; the layout has them here.
        features["position_ids"] = torch.zeros((1, 1), dtype=torch.int64, device=query.device)
        output: Tensor = self._exchange(module, query, key, value, None, **features)[0]
        return output.unflatten(-1, (query.shape[1], -1)), None


def with_rows(layout: AttentionLayout, num_rows: int, num_more: int) -> AttentionLayout:
    """Add padding rows to a layout, as a sequence of their own."""
    if not num_more:
        return layout
    slots, more = len(layout.row_of_slot), torch.arange(num_more, device=layout.row_of_slot.device)
    return replace(
        layout,
        buckets=(*layout.buckets, (1, num_more)),
        row_of_slot=torch.cat((layout.row_of_slot, more + num_rows)),
        slot_of_row=torch.cat((layout.slot_of_row, more + slots)),
    )


class Gathered(torch.autograd.Function):  # type: ignore[misc]
    """All-gather whose backward takes a rank's own gradient: all ranks compute the same from the result, so a sum would count it again."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, which: Tensor, group: Any) -> Tensor:
        ctx.which = which
        whole = values.new_zeros(len(which), *values.shape[1:])
        whole[which] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.which], None, None


# ---- the same in Megatron's model, whose core attention is exchanged: n ranks, H heads, D size of a head


@dataclass(frozen=True, eq=False)
class RowShard:
    """A context-parallel rank's part of a packed micro-batch, in Megatron's model, whose layers have tensor ranks too."""

    start: int
    """First row, of all rows."""
    input_ids: Tensor
    """int64 [1, R / cp]"""
    positions: Tensor
    """int64 [R / cp]"""
    layout: AttentionLayout
    """Layout of all rows."""
    which: Tensor
    """bool [T]: the tokens that its rows predict."""
    predictors: Tensor
    """int64: by which of its rows each of them is predicted."""

    @classmethod
    def of(cls, packed: Packed, group: Any, tp: int) -> RowShard:
        """The part of this rank of the group. Rows are filled up so that context and tensor parallel ranks divide them."""
        count, rank = dist.get_world_size(group), dist.get_rank(group)
        num_more = -packed.num_rows % (count * tp)
        num_rows = (packed.num_rows + num_more) // count
        start = rank * num_rows

        def own(rows: Tensor) -> Tensor:
            return torch.nn.functional.pad(rows, (0, num_more))[:, start : start + num_rows]

        which = (packed.predictors >= start) & (packed.predictors < start + num_rows)
        layout = with_rows(packed.layout, packed.num_rows, num_more)
        return cls(start, own(packed.input_ids), own(packed.position_ids)[0], layout, which, packed.predictors[which] - start)


def gathered(values: Tensor, shard: RowShard, group: Any) -> Tensor:
    """Gather what each of the T tokens has from the rank that computed it. Collective; the gradient is this rank's part."""
    if dist.get_world_size(group) == 1:
        return values
    found: Tensor = Gathered.apply(values, shard.which, group)
    return found


def _to_heads(rows: Tensor, group: Any) -> Tensor:
    """[R / n, H, D] to [R, H / n, D]."""
    parts = rows.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found.flatten(0, 1)


def _to_rows(heads: Tensor, group: Any) -> Tensor:
    """[R, H / n, D] to [R / n, H, D]."""
    parts = heads.unflatten(0, (dist.get_world_size(group), -1)).contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found.transpose(0, 1).flatten(1, 2)


class ToHeads(torch.autograd.Function):  # type: ignore[misc]
    """All-to-all from some rows of all heads, [R / n, H, D], to all rows of some heads, [R, H / n, D]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _to_heads(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_rows(grad, ctx.group), None


class ToRows(torch.autograd.Function):  # type: ignore[misc]
    """All-to-all from all rows of some heads, [R, H / n, D], to some rows of all heads, [R / n, H, D]."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _to_rows(heads, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad, ctx.group), None


# ---- context parallelism: R rows of a pass, r of them here; C numbers of a row, its keys and values


class ContextParallel:
    """Splits the rows of passes over context ranks, for one model.

    Args:
        group: of torch.distributed, the ranks that have parts of the same sequences.
        widths: numbers that the keys and values of a row have, by attention.
    """

    def __init__(self, group: Any, widths: Mapping[torch.nn.Module, int]) -> None:
        self._group, self._count, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._joints = {module: KeysAndValues(group, width) for module, width in widths.items()}

    def shard(self, packed: Packed) -> Packed:
        """This rank's rows of a pass, whose attention is that of all ranks."""
        own = part_of(packed, self._rank, self._count)
        return replace(own, layout=replace(own.layout, exchange=self._around))

    def gather(self, values: Tensor, which: Tensor) -> Tensor:
        """Gather what each of the T tokens has from the ranks that computed it, [t, ...] to [T, ...]. Collective."""
        found: Tensor = Gathered.apply(values, which, self._group)
        return found

    def join(self, blocks: Mapping[torch.nn.Module, Block]) -> dict[torch.nn.Module, Block]:
        """Make blocks of attentions, or take those that they are, which then know what happens within them."""
        found = {module: blocks.get(module) or Block(module, None) for module in self._joints}
        for module, block in found.items():
            block.midway = self._joints[module]
        return found

    def _around(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **features: Any) -> tuple[Tensor, None]:
        """Run the attention of this rank's queries [1, H, r, D] over the keys and values of all ranks' rows; [1, r, H, D]."""
        rows = torch.cat([heads[0].transpose(0, 1).flatten(1) for heads in (key, value)], 1)
        width = key.shape[1] * key.shape[3]
        gathered = self._joints[module].gathered(rows).split([width, rows.shape[1] - width], 1)
        all_keys, all_values = (
            of_rows.unflatten(1, (heads.shape[1], -1)).transpose(0, 1)[None] for of_rows, heads in zip(gathered, (key, value), strict=True)
        )
        return packed_attention(module, query, all_keys, all_values, None, **features)


def part_of(packed: Packed, rank: int, count: int) -> Packed:
    """The rows of a pass that one of several ranks has: two chunks of them, so that all have as much attention to compute.

    Chunks are numbered from both ends: with 3 ranks 0 1 2 2 1 0. Rows that fill them up attend to themselves. Keys and values are those of
    all ranks' rows, in the order of ranks.
    """
    num_each = -(-packed.num_rows // (2 * count))
    chunks = rank, 2 * count - 1 - rank
    num_more = 2 * count * num_each - packed.num_rows

    def own(rows: Tensor, filled: int = 0) -> Tensor:
        more = rows.new_full((1, num_more, *rows.shape[2:]), filled)
        cut = torch.cat((rows, more), 1).split(num_each, 1)
        return torch.cat([cut[chunk] for chunk in chunks], 1)

    row = torch.arange(packed.num_rows, device=packed.input_ids.device)
    chunk, place = row // num_each, row % num_each
    place = place.where(chunk == chunks[0], (place + num_each).where(chunk == chunks[1], -1))
    predictors = place[packed.predictors]
    which = predictors >= 0
    return replace(
        packed,
        input_ids=own(packed.input_ids),
        position_ids=own(packed.position_ids),
        layout=_layout_of(packed, chunks, num_each, count),
        predictors=predictors[which],
        targets=packed.targets[which],
        experts=None if packed.experts is None else own(packed.experts[None], -1)[0],
        which=which,
        place=place,
    )


class KeysAndValues:
    """Gathers the keys and values of an attention from context ranks. A `guard.Midway`."""

    def __init__(self, group: Any, width: int) -> None:
        self._group, self._width = group, width
        self._call: _Gathering | None = None

    def begin(self) -> _Gathering:
        self._call = _Gathering(self._group, self._width)
        return self._call

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows [r, C] of all ranks, [R, C], in the order of ranks. Collective, and on the way back too, where gradients are summed."""
        call = self._call or self.begin()
        self._call = None
        found: Tensor = _AllRows.apply(rows, call)
        return found


class _Gathering:
    """One call's. A `guard.Owed`."""

    def __init__(self, group: Any, width: int) -> None:
        self.group, self._width = group, width
        self.is_made = self.is_made_back = False
        self._like: tuple[Tensor, int]
        """Hidden states of the call, without any, and their number."""

    def forth(self, rows: Tensor) -> Tensor:
        self.is_made = True
        found = rows.new_empty(len(rows) * dist.get_world_size(self.group), rows.shape[1])
        _all_gather(found, rows.contiguous(), group=self.group)
        return found

    def back(self, grad: Tensor) -> Tensor:
        self.is_made_back = True
        found = grad.new_empty(len(grad) // dist.get_world_size(self.group), grad.shape[1])
        reduce_scatter(found, grad.contiguous(), group=self.group)
        return found

    def settle(self, hidden: Tensor) -> None:
        if not self.is_made:
            self.forth(hidden.new_zeros(hidden.shape[1], self._width))
        self._like = hidden.new_empty(0), hidden.shape[1]

    def settle_back(self) -> None:
        if not self.is_made_back:
            like, num_rows = self._like
            self.back(like.new_zeros(num_rows * dist.get_world_size(self.group), self._width))


class _AllRows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, call: _Gathering) -> Tensor:
        ctx.call = call
        return call.forth(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.call.back(grad), None


@dataclass(frozen=True, eq=False)
class _Run:
    """Neighbouring rows of this rank that belong to one sequence."""

    start: int
    """First of this rank's rows."""
    first: int
    """Its position in the sequence."""
    keys: IdArray
    """Keys of all rows: those of the sequence up to the run's last."""
    is_cut: bool
    """Whether rows before it that are the sequence's own are elsewhere."""

    @property
    def length(self) -> int:
        """The length of the sequence, as far as it is seen."""
        return len(self.keys)


def _layout_of(packed: Packed, chunks: tuple[int, int], num_each: int, count: int) -> AttentionLayout:
    """Where a rank's queries, and the keys that they see, lie inside attention. Sequences of a bucket begin their queries at one position.

    Args:
        chunks: which `num_each` rows of the pass the rank has, of twice as many chunks as there are ranks, `count`.
    """
    buckets = _bucketed(list(_runs_of(packed, chunks, num_each)))
    sizes = [(len(runs), max(run.length for run in runs), min(run.first for run in runs)) for runs in buckets]
    row_of_slot = np.full(sum(number * length for number, length, _ in sizes), -1, np.int64)
    row_of_query = np.zeros(sum(number * (length - first) for number, length, first in sizes), np.int64)
    query_of_row = np.zeros(2 * num_each, np.int64)
    # All ranks' rows in their order: of each rank its first chunk, and its last.
    chunk, place = np.divmod(np.arange(2 * count * num_each), num_each)
    place += num_each * (2 * np.minimum(chunk, 2 * count - 1 - chunk) + (chunk >= count))
    slot = query = 0
    for runs, (_, length, first) in zip(buckets, sizes, strict=True):
        for run in runs:
            row_of_slot[slot : slot + run.length] = place[run.keys]
            own = np.arange(run.start, run.start + run.length - run.first)
            slots = np.arange(run.first, run.length) + query - first
            row_of_query[slots], query_of_row[own] = own, slots
            slot, query = slot + length, query + length - first

    def put(values: IdArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(packed.input_ids.device)

    none = put(np.zeros(0, np.int64))
    of_queries = tuple((number, length - first) for number, length, first in sizes)
    queries = AttentionLayout(of_queries, put(row_of_query), put(query_of_row), none, none)
    real = np.flatnonzero(row_of_slot >= 0)
    slot_of_row = np.full(len(place), -1, np.int64)
    slot_of_row[row_of_slot[real[::-1]]] = real[::-1]  # Of several slots NumPy keeps the last, which is the first one.
    unread, further = np.flatnonzero(slot_of_row < 0), real[slot_of_row[row_of_slot[real]] != real]
    return AttentionLayout(
        buckets=tuple((number, length) for number, length, _ in sizes),
        row_of_slot=put(np.maximum(row_of_slot, 0)),
        slot_of_row=put(np.maximum(slot_of_row, 0)),
        further_slots=put(further),
        further_rows=put(row_of_slot[further]),
        unread=put(unread) if len(unread) else None,
        queries=queries,
    )


def _bucketed(runs: list[_Run]) -> list[list[_Run]]:
    """Put together runs of similar length; those that have parts of their sequences alone, and those that begin within one apart."""
    kinds = [[run for run in runs if not run.is_cut and (run.first > 0) == is_part] for is_part in (False, True)]
    found = [[run] for run in runs if run.is_cut]
    for kind in kinds:
        kind.sort(key=lambda run: run.length)
        for number, _ in choose_buckets(np.array([run.length for run in kind], np.int64)):
            found.append(kind[:number])
            del kind[:number]
    return found


def _runs_of(packed: Packed, chunks: tuple[int, int], num_each: int) -> Iterator[_Run]:
    token = np.flatnonzero(packed.row_of_token >= 0)
    rows, sequences = packed.row_of_token[token], packed.sequence_of_token[token]
    # A row that several sequences share is the own one of the first.
    home = np.unique(rows, return_index=True)[1]
    begins = np.searchsorted(sequences, sequences[home])
    edges = np.flatnonzero(np.diff(begins)) + 1
    for i, chunk in enumerate(chunks):
        start, own = chunk * num_each, (i - chunk) * num_each
        end = start + num_each
        last = min(end, len(home))
        inner = edges[(edges > start) & (edges < last)].tolist()
        for low, high in itertools.pairwise([start, *inner, last] if start < last else []):
            is_cut = low > 0 and begins[low] == begins[low - 1]
            yield _Run(low + own, int(home[low] - begins[low]), rows[begins[low] : home[high - 1] + 1], bool(is_cut))
        if (more := max(start, len(home))) < end:
            yield _Run(more + own, 0, np.arange(more, end), is_cut=False)


def widths_of(model: Any, device: str, tp: int) -> dict[torch.nn.Module, int]:
    """Find a model's attentions, and the numbers that keys and values of a row have on one of so many tensor ranks."""
    found: dict[torch.nn.Module, int] = {}

    def seen(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **features: Any) -> tuple[Tensor, None]:
        found[module] = sum(heads.shape[1] * heads.shape[3] for heads in (key, value)) // tp
        return packed_attention(module, query, key, value, None, **features)

    tokens = Ragged.of([[0, 0]], np.int32)
    packed = pack(np.zeros(1, np.int64), tokens, Ragged.of([[False, True]], np.bool_), device=device)
    with torch.no_grad():
        last_hidden(model, replace(packed, layout=replace(packed.layout, exchange=seen)))
    return found
