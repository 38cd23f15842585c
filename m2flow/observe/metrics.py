"""Metrics by step: `metrics.jsonl` for programs, `tensorboard/` for people.

A line is {"step": 3, "time_s": <Unix seconds>, "values": {"reward": 0.5, "kl": null}, "non_finite": {"kl": "nan"}}. JSON has no
NaN, so a value that is not finite is null, with what it was beside it; TensorBoard does not get it, and the writer counts it.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO, final

import msgspec

from m2flow.errors import InternalError
from m2flow.observe.board import Board


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    step: int
    time_s: float
    values: dict[str, float | None]
    non_finite: dict[str, str] = {}


@final
class MetricsWriter:
    """Appends a run's metrics. A context manager; one writer a run. A resumed run appends."""

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True) -> None:
        self._run_dir = Path(run_dir)
        self._has_tensorboard = tensorboard
        self._file: TextIO | None = None
        self._board: Board | None = None
        self.non_finite: Counter[str] = Counter()
        """How often each metric was not finite."""

    def open(self, goes_on_at: int | None = None) -> MetricsWriter:
        """`goes_on_at`: the size that the file had when the run's other records were last certain; what came after will come again."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        path = metrics_path(self._run_dir)
        if goes_on_at is not None and path.exists() and path.stat().st_size > goes_on_at:
            os.truncate(path, goes_on_at)
            self._rewrite_board()
        is_torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if is_torn:
            self._file.write("\n")
        return self

    def write(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Record the values of a step; it may be called several times a step. Returns the names of those that are not finite."""
        if self._file is None:
            raise InternalError("the metrics writer is not open")
        numbers = {name: float(value) for name, value in values.items()}
        bad = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
        self.non_finite.update(bad.keys())
        line = Line(step, time.time(), {name: None if name in bad else value for name, value in numbers.items()}, bad)
        self._file.write(msgspec.json.encode(line).decode() + "\n")
        self._file.flush()
        if self._has_tensorboard:
            board = self._open_board()
            for name, value in numbers.items():
                if name not in bad:
                    board.add(name, value, step, line.time_s)
        return list(bad)

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size

    def _rewrite_board(self) -> None:
        """TensorBoard's files, which can't be cut, from what is left."""
        if not self._has_tensorboard:
            return
        shutil.rmtree(self._run_dir / "tensorboard", ignore_errors=True)
        for line in _lines(self._run_dir):
            for name, value in line.values.items():
                if value is not None:
                    self._open_board().add(name, value, line.step, line.time_s)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        board, self._board = self._board, None
        if board is not None:
            board.close()

    def _open_board(self) -> Board:
        if self._board is None:
            self._board = Board(self._run_dir / "tensorboard")
        return self._board

    def __enter__(self) -> MetricsWriter:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Each metric's (step, value), in order of step; NaN or an infinity where it was that.

    Where a step was written twice (a resumed run repeats steps), the later value counts. A torn line is passed over.
    """
    found: dict[str, dict[int, float]] = {}
    for line in _lines(run_dir):
        for name, value in line.values.items():
            found.setdefault(name, {})[line.step] = float(line.non_finite.get(name, "nan")) if value is None else value
    return {name: sorted(points.items()) for name, points in found.items()}


def _lines(run_dir: str | Path) -> Iterator[Line]:
    path = metrics_path(run_dir)
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(msgspec.DecodeError):
            yield msgspec.json.decode(text, type=Line)


def metrics_path(run_dir: str | Path) -> Path:
    return Path(run_dir) / "metrics.jsonl"
