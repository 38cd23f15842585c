"""Encode what changed in a model since another version as positions and values, for when few values change; and apply it.

    Changes.add(name, dtype, old, new), ...  ->  (Change, ...) and a body        applied(entry, change, body, held) -> the new tensor

Values are compared as bits. Each changed tensor takes the smallest of three forms: `offsets`: for blocks of 65,536 values how many of each
changed (uint32) and where in it (uint16), then the values; `mask`: one bit a value, then the values; `whole`. A bfloat16 tensor takes the
first with up to 1/16 of its values changed, the second with up to 15/16, and else the third. The result is checked against the checksum of
the whole tensor.

Source: most bfloat16 weights do not move in a step of RL, since at its learning rates a change is below half a unit in the last place:
SparseRL-Sync, arXiv:2605.07330, which sends positions and values. Theirs are 32-bit indices; blocks and masks are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from m2flow.channels.weights.manifest import Change, Content, TensorEntry, padded
from m2flow.channels.weights.tensors import storage
from m2flow.errors import DecodeError

Bytes = npt.NDArray[np.uint8]
_BLOCK = 1 << 16
_SAMPLED_STRIDE = 64
_SAMPLED_BYTES = 4096


@final
class Changes:
    """Collect the differences while a version is written over another.

    Args:
        most_bytes: gives up where the differences take more than this.
        hopeless: gives up where more than this share of values changed, in a sample of one page in 64.
    """

    def __init__(self, most_bytes: float, *, hopeless: float = 0.5) -> None:
        self._most_bytes = most_bytes
        self._hopeless = hopeless
        self._changes: list[Change] = []
        self._parts: list[Bytes] = []
        self.num_bytes = 0
        self.num_values = 0
        self.num_changed = 0
        self.is_given_up = False

    def add(self, name: str, dtype: str, old: Bytes, new: Bytes) -> None:
        """Compare the bytes of a tensor, before and now."""
        if self.is_given_up or not len(new):
            return
        words = np.dtype(f"u{storage(dtype).itemsize}")
        before, now = old.view(words), new.view(words)
        if self._is_hopeless(before, now):
            self.give_up()
            return
        differs = before != now
        num = int(np.count_nonzero(differs))
        self.num_values += len(now)
        self.num_changed += num
        if not num:
            return
        kind, pieces = _encoded(now, differs, num)
        self._changes.append(Change(name, kind, num, self.num_bytes))
        for piece in pieces:
            self._parts.append(piece)
            self.num_bytes += padded(len(piece))
        if self.num_bytes > self._most_bytes:
            self.give_up()

    def give_up(self) -> None:
        """Stop collecting: there is nothing to compare with, or too much changed."""
        self.is_given_up = True
        self._changes, self._parts = [], []

    def result(self) -> tuple[tuple[Change, ...], Bytes] | None:
        """The changes and the body that they refer to; None after `give_up`."""
        if self.is_given_up:
            return None
        body, offset = np.zeros(self.num_bytes, np.uint8), 0
        for piece in self._parts:
            body[offset : offset + len(piece)] = piece
            offset += padded(len(piece))
        return tuple(self._changes), body

    def _is_hopeless(self, before: npt.NDArray[np.generic], now: npt.NDArray[np.generic]) -> bool:
        size = _SAMPLED_BYTES // now.itemsize
        whole = len(now) // (size * _SAMPLED_STRIDE) * size * _SAMPLED_STRIDE
        if not whole:
            return False
        first, second = (words[:whole].reshape(-1, size)[::_SAMPLED_STRIDE] for words in (before, now))
        return bool((first != second).mean() > self._hopeless)


def applied(entry: TensorEntry, change: Change, body: Bytes, held: Bytes) -> Bytes:
    """Apply a change to a tensor's bytes in the base version; returns the new bytes. Raises `DecodeError`: the change does not fit."""
    words = np.dtype(f"u{storage(entry.dtype).itemsize}")
    num_values = entry.num_bytes // words.itemsize
    if len(held) != entry.num_bytes or not 0 < change.num <= num_values or not 0 <= change.offset <= len(body):
        raise DecodeError(f"a change of {change.num:,} values of {change.name!r}, which has {num_values:,}")
    parts = _Parts(change.name, body, change.offset)
    if change.kind == "whole":
        return parts.take(entry.num_bytes).copy()
    new = held.copy()
    values = new.view(words)
    if change.kind == "mask":
        is_new = np.unpackbits(parts.take((num_values + 7) // 8), count=num_values).view(np.bool_)
        if int(np.count_nonzero(is_new)) != change.num:
            raise DecodeError(f"a mask of {change.name!r} that does not mark {change.num:,} values")
        values[is_new] = parts.take(change.num * words.itemsize).view(words)
        return new
    if change.kind != "offsets":
        raise DecodeError(f"a change of kind {change.kind!r} of {change.name!r}")
    num_blocks = -(-num_values // _BLOCK)
    counts = parts.take(4 * num_blocks).view(np.uint32).astype(np.int64)
    if int(counts.sum()) != change.num:
        raise DecodeError(f"blocks of {change.name!r} that do not have {change.num:,} values")
    positions = np.repeat(np.arange(num_blocks, dtype=np.int64) * _BLOCK, counts)
    positions += parts.take(2 * change.num).view(np.uint16)
    if int(positions.max()) >= num_values:
        raise DecodeError(f"a change of {change.name!r} at {int(positions.max()):,} of {num_values:,}")
    values[positions] = parts.take(change.num * words.itemsize).view(words)
    return new


def changes_by_name(content: Content) -> dict[str, Change]:
    return {change.name: change for change in content.changes}


def updated(
    parts: Iterable[tuple[TensorEntry, Bytes]], updates: Sequence[tuple[dict[str, Change], Bytes]]
) -> Iterator[tuple[TensorEntry, Bytes]]:
    """Apply deltas to tensors as they pass: each is its changes by name, and its body; the oldest first."""
    for entry, raw in parts:
        for changes, body in updates:
            change = changes.get(entry.name)
            if change is not None:
                raw = applied(entry, change, body, raw)
        yield entry, raw


def _encoded(now: npt.NDArray[np.generic], differs: npt.NDArray[np.bool_], num: int) -> tuple[str, Sequence[Bytes]]:
    """Encode the changed values in the smallest form; returns its kind and its parts."""
    size, num_blocks = now.itemsize, -(-len(now) // _BLOCK)
    costs = {"offsets": 4 * num_blocks + num * (2 + size), "mask": (len(now) + 7) // 8 + num * size, "whole": len(now) * size}
    kind = min(costs, key=lambda name: costs[name])
    if kind == "whole":
        return kind, [now.view(np.uint8).copy()]
    if kind == "mask":
        return kind, [np.packbits(differs), now[differs].view(np.uint8)]
    positions = np.flatnonzero(differs)
    counts = np.bincount(positions // _BLOCK, minlength=num_blocks).astype(np.uint32)
    return kind, [counts.view(np.uint8), (positions % _BLOCK).astype(np.uint16).view(np.uint8), now[positions].view(np.uint8)]


class _Parts:
    """Read the parts of a change from a body, one after the other."""

    def __init__(self, name: str, body: Bytes, offset: int) -> None:
        self._name = name
        self._body = body
        self._offset = offset

    def take(self, num_bytes: int) -> Bytes:
        end = self._offset + num_bytes
        if self._offset % 64 or end > len(self._body):
            raise DecodeError(f"a change of {self._name!r} ends at {end:,} of {len(self._body):,} bytes")
        part = self._body[self._offset : end]
        self._offset += padded(num_bytes)
        return part
