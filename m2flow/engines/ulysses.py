"""DeepSpeed's sequence parallelism (Ulysses): each of a few ranks has some rows of a packed micro-batch, and in the attention some heads.

    packed rows --share--> this rank's rows --layers--> q, k, v of its rows, all heads --all-to-all--> of all rows, some heads
                 one number a token <--gather-- logits of its rows <--layers-- all heads of its rows <--all-to-all-- packed attention

Rows are dealt out in the order of ranks, whatever samples they are of: what a row attends to is the layout's, which every rank has. So
micro-batches stay packed, and a prompt that a group shares still goes through the model once. What the loss needs of each token is then on
every rank, as on one; a gradient goes back to the rank whose row said it, and gradients of weights are a sum over ranks, as with other
samples. To the library these are data-parallel ranks: told of a sequence group (`mpu`), it reports a norm too large by that group's size
in stages 1 and 2.

Limit: heads of one size, whose number the ranks divide.
Source: Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed-Ulysses), with the library's `UlyssesSPAttentionHF`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines.packing import AttentionLayout, Packed, packed_attention
from m2flow.errors import EngineError

# Shapes: R rows of the packed sequence, T predicted tokens, t those that this rank's rows predict.


class Sequence:
    """The ranks that share sequences, for one model.

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

    def share(self, packed: Packed) -> tuple[Packed, Tensor]:
        """This rank's rows, and which of the T tokens they predict, bool [T]. Rows that fill up the last share attend to themselves."""
        num_more = -packed.num_rows % self._count
        num_rows = (packed.num_rows + num_more) // self._count
        start = self._rank * num_rows
        which = (packed.predictors >= start) & (packed.predictors < start + num_rows)

        def own(rows: Tensor) -> Tensor:
            return torch.nn.functional.pad(rows, (0, num_more))[:, start : start + num_rows]

        layout = replace(_with_rows(packed.layout, packed.num_rows, num_more), exchange=self._around)
        return Packed(
            own(packed.input_ids), own(packed.position_ids), layout, packed.predictors[which] - start, packed.targets[which]
        ), which

    def gather(self, values: Tensor, which: Tensor) -> Tensor:
        """One number for each of the T tokens, from the ranks whose rows said them, [t] to [T]. Collective."""
        found: Tensor = _Gathered.apply(values, which, self._group)
        return found

    def _around(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **features: Any) -> tuple[Tensor, None]:
        """The attention between two exchanges: query [1, H, R / ranks, D] to [1, R / ranks, H D]."""
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


def check_heads(config: Any, sp: int) -> None:
    """Raises `EngineError`: a model's heads can't be shared out among so many ranks."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := int(getattr(config, name))) % sp:
            raise EngineError(f"sp is {sp}, which does not divide the model's {name}, {heads}", now="Take an sp that does.")
    if getattr(config, "v_head_dim", None):
        raise EngineError(f"a {config.model_type!r} model has keys and values of two sizes, which Ulysses has not", now="Leave sp out.")


def _with_rows(layout: AttentionLayout, num_rows: int, num_more: int) -> AttentionLayout:
    """The layout with a few more rows after the last, a sequence of their own."""
    if not num_more:
        return layout
    slots, more = len(layout.row_of_slot), torch.arange(num_more, device=layout.row_of_slot.device)
    return replace(
        layout,
        buckets=(*layout.buckets, (1, num_more)),
        row_of_slot=torch.cat((layout.row_of_slot, more + num_rows)),
        slot_of_row=torch.cat((layout.slot_of_row, more + slots)),
    )


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    """Every rank computes the same from what is gathered, so each takes its own values' gradient as it is: a sum would count it again."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, which: Tensor, group: Any) -> Tensor:
        ctx.which = which
        whole = values.new_zeros(len(which))
        whole[which] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.which], None, None
