"""How many tokens a process has generated, and how many each sample has that it has: kept where a kill can't take it.

    Meter.write after each decode step -> <segment>.meter -> read_meter -> what a killed process had

A memory-mapped file: writing costs no call to the system, and what was written survives the process (not the machine). There are two
halves, and the number that says which counts changes last; so a process that is killed in the middle of writing leaves the state before.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

_HEAD = 8  # int64: which half counts, samples a half has room for; then for each half how many samples it has, and the total
_ROOM = 512


@dataclass(frozen=True)
class Reading:
    """What a meter says."""

    num_generated: int = 0
    """Tokens that the process has generated in all."""
    running: Mapping[int, int] = field(default_factory=dict)
    """Sample -> its tokens, those included that it came with."""


@final
class TokenMeter:
    """Of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("x+b")
        self._map: mmap.mmap | None = None
        self._room = 0
        self._numbers: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._make_room(_ROOM)

    def write(self, num_generated: int, running: Mapping[int, int]) -> None:
        """Set all of it."""
        count = len(running)
        if count > self._room:
            self._make_room(2 * count)
        numbers = self._numbers
        half = 1 - int(numbers[0])
        start = _HEAD + 2 * half * self._room
        numbers[start : start + count] = np.fromiter(running.keys(), np.int64, count)
        numbers[start + self._room : start + self._room + count] = np.fromiter(running.values(), np.int64, count)
        numbers[2 + 2 * half] = count
        numbers[3 + 2 * half] = num_generated
        numbers[0] = half

    def close(self) -> None:
        self._numbers = np.zeros(0, np.int64)
        if self._map is not None:
            self._map.close()
            self._map = None
        self._file.close()

    def _make_room(self, room: int) -> None:
        """A larger file, with what this one says."""
        was = read_meter(self._path) if self._map is not None else Reading()
        self._numbers = np.zeros(0, np.int64)
        if self._map is not None:
            self._map.close()
        size = 8 * (_HEAD + 4 * room)
        # Not in place: a process that is killed here must leave one of the two.
        other = self._path.with_suffix(".tmp")
        fresh = np.zeros(size // 8, np.int64)
        fresh[1], fresh[2], fresh[3] = room, len(was.running), was.num_generated
        fresh[_HEAD : _HEAD + len(was.running)] = list(was.running)
        fresh[_HEAD + room : _HEAD + room + len(was.running)] = list(was.running.values())
        other.write_bytes(fresh.tobytes())
        other.replace(self._path)
        self._file.close()
        self._file = self._path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), size)
        self._numbers = np.frombuffer(self._map, np.int64)
        self._room = room


def read_meter(path: Path) -> Reading:
    """What a process had, also one that was killed. Of a file that is not there: nothing."""
    try:
        numbers = np.frombuffer(path.read_bytes(), np.int64)
    except OSError:
        return Reading()
    if len(numbers) < _HEAD:
        return Reading()
    half, room = int(numbers[0]), int(numbers[1])
    count, total = int(numbers[2 + 2 * half]), int(numbers[3 + 2 * half])
    start = _HEAD + 2 * half * room
    ids, tokens = numbers[start : start + count], numbers[start + room : start + room + count]
    return Reading(total, dict(zip(ids.tolist(), tokens.tolist(), strict=True)))
