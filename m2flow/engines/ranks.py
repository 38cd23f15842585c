"""The ranks of one trainer: processes that hold parts of one model, and do the same tasks in the same order.

    every rank:  the same batch --share--> its own rows --forward, backward--> gradients and sums, added up over all ranks

What a rank has to tell the others goes through collectives of plain tensors; an error of one rank becomes an error of all, at the same
place, before any of them waits in a collective for one that will not come.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from m2flow.engines.contract import EngineSettings
from m2flow.engines.loopback import keep_gloo_here
from m2flow.errors import EngineError, M2FlowError

_WAIT = datetime.timedelta(minutes=10)
"""A collective that takes longer ends its process: a rank is gone, or the ranks are not doing the same."""


class Ranks:
    """This process among the ranks of its trainer. `open` and `close` are collective, and so is everything else."""

    _open: ClassVar[list[Ranks]] = []
    """Of this process; torch has one set of ranks for all of them."""
    _hooks: ClassVar[list[Callable[..., object]]] = []
    """What `sys.excepthook` was: torch puts its own around it, and never takes it away."""
    _leaving: ClassVar[list[Callable[[], object]]] = []
    """What libraries that keep groups of their own want done in place of `destroy_process_group`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.rank = settings.rank
        self.count = settings.num_ranks
        self._device = torch.device(settings.device)
        self._rendezvous = settings.rendezvous

    def open(self, leave: Callable[[], object] | None = None) -> None:
        """Meet the other ranks. The trainers of one worker have the same ranks; they meet once, and each has a group of its own.

        Args:
            leave: how a library that has groups of these ranks too takes its leave, when the last trainer closes.
        Raises:
            EngineError: they did not all come.
        """
        if not dist.is_initialized():
            self._meet()
        self.group = dist.new_group(list(range(self.count)), timeout=_WAIT)
        self._open.append(self)
        if leave is not None:
            self._leaving.append(leave)

    def _meet(self) -> None:
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(self._device)
        self._hooks.append(sys.excepthook)
        if not self._rendezvous.startswith("tcp:"):  # All are on this host.
            keep_gloo_here(os.environ)
        where: dict[str, Any] = {"init_method": self._rendezvous}
        if self.count == 1 and not self._rendezvous:
            where = {"store": dist.HashStore()}
        try:
            dist.init_process_group(backend, rank=self.rank, world_size=self.count, timeout=_WAIT, **where)
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(f"rank {self.rank} of {self.count} did not meet the others at {self._rendezvous}: {error}") from error

    def close(self) -> None:
        if self not in self._open:
            return
        dist.destroy_process_group(self.group)
        self._open.remove(self)
        if not self._open:
            (self._leaving or [dist.destroy_process_group])[0]()
            self._leaving.clear()
            sys.excepthook = self._hooks.pop()

    def neighbours(self, count: int) -> Any:
        """A group of this rank and those beside it: ranks 0 to count - 1, the next, and so on. It ends with the process's last trainer."""
        groups = [dist.new_group(list(range(first, first + count)), timeout=_WAIT) for first in range(0, self.count, count)]
        return groups[self.rank // count]

    def agree(self, error: M2FlowError | None) -> None:
        """Go on if no rank has an error.

        Raises:
            M2FlowError: its own on a rank that has one; on the others, the error of the first rank that has one.
        """
        failed = torch.tensor([self.count if error is None else self.rank], device=self._device)
        dist.all_reduce(failed, dist.ReduceOp.MIN, group=self.group)
        first = int(failed)
        if first == self.count:
            return
        words = self._words_of(first, "" if error is None else error.what)
        if error is not None:
            raise error
        raise EngineError(f"rank {first} of this trainer: {words}")

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Each number added up over the ranks, in the order of ranks. All give the same names."""
        values = torch.tensor(list(sums.values()), dtype=torch.float64, device=self._device)
        parts = [torch.empty_like(values) for _ in range(self.count)]
        dist.all_gather(parts, values, group=self.group)
        return dict(zip(sums, torch.stack(parts).sum(0).tolist(), strict=True))

    def gather(self, values: npt.NDArray[np.float64]) -> list[npt.NDArray[np.float64]]:
        """What each rank gives, float64 [any], on every rank."""
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(values)], device=self._device), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.float64, device=self._device)
        padded[: len(values)] = torch.from_numpy(np.ascontiguousarray(values))
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(parts, padded, group=self.group)
        return [part[: int(size)].cpu().numpy() for part, size in zip(parts, sizes, strict=True)]

    def most(self, count: int) -> int:
        """The largest of what the ranks give."""
        value = torch.tensor([count], device=self._device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return int(value)

    def wait(self) -> None:
        """Until every rank is here."""
        self.most(0)

    def _words_of(self, rank: int, words: str) -> str:
        text = words.encode()[:4096]
        size = torch.tensor([len(text)], device=self._device)
        dist.broadcast(size, rank, group=self.group)
        body = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        if rank == self.rank:
            body.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(body, rank, group=self.group)
        return bytes(body.cpu().numpy()).decode(errors="replace")


def shares(num_tokens: Sequence[int], groups: Sequence[int], count: int) -> list[list[int]]:
    """Rows for each of `count` ranks: whole groups, whose prompts go through the model once, the largest first to whoever has least.

    A group with more tokens than an even share is split. A function of the batch alone: every rank comes to the same.

    >>> shares([5, 5, 1, 1, 1], [0, 0, 1, 1, 2], 2)
    [[0, 2, 3], [1, 4]]
    """
    fair = sum(num_tokens) / count
    pieces: dict[tuple[int, int], list[int]] = {}
    totals: dict[int, float] = {}
    for row, group in enumerate(groups):
        totals[group] = totals.get(group, 0.0) + num_tokens[row]
    for row, group in enumerate(groups):
        pieces.setdefault((group, row if totals[group] > fair else -1), []).append(row)
    sizes = {key: sum(num_tokens[row] for row in rows) for key, rows in pieces.items()}
    found: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for key in sorted(pieces, key=lambda key: (-sizes[key], pieces[key][0])):
        least = loads.index(min(loads))
        found[least] += pieces[key]
        loads[least] += sizes[key]
    return [sorted(rows) for rows in found]
