"""The calls that a run has made so far: when in the program, at which line, from what.

    ledger.db, or spans that name their call --KnownCalls.refresh--> ordinal -> KnownCall

Read while the run goes on. A simulated run has no ledger; there the spans say all but what a call was given.
"""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec
import numpy as np

from m2flow.macro.recording import CallRecord
from m2flow.observe.schedule.columns import TraceColumns


@dataclass(frozen=True)
class KnownCall:
    """A call of the program."""

    ordinal: int
    step: int
    """-1: before the flow's loop."""
    name: str
    site: str
    """`flows/grpo.py:23`"""
    text: str = ""
    """The source line."""
    inputs: tuple[tuple[str, int], ...] = ()
    """Name of the parameter, and the call whose result it is."""
    effects: tuple[str, ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()


@final
class KnownCalls:
    """Follows the calls of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "ledger.db"
        self.by_ordinal: dict[int, KnownCall] = {}
        self.has_ledger = False

    def refresh(self, columns: TraceColumns) -> None:
        """Take in what is new, in the ledger or in spans."""
        if self._path.is_file():
            with contextlib.suppress(sqlite3.Error):  # It is being made.
                self._read()
                self.has_ledger = True
        if not self.has_ledger:
            self._take_from(columns)

    def _read(self) -> None:
        with contextlib.closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as db:
            newest = max(self.by_ordinal, default=-1)
            for ordinal, step, name, site in db.execute("SELECT ordinal, step, name, site FROM calls WHERE ordinal > ?", (newest,)):
                self.by_ordinal[ordinal] = KnownCall(ordinal, step, name, site)
            short = [ordinal for ordinal, call in self.by_ordinal.items() if not call.text]
            if short:
                rows = db.execute("SELECT position, body FROM record WHERE kind='call' AND position >= ?", (min(short),))
                for ordinal, body in rows:
                    if ordinal in self.by_ordinal:
                        told = msgspec.msgpack.decode(body, type=CallRecord)
                        self.by_ordinal[ordinal] = KnownCall(
                            ordinal, told.step, told.name, told.site, told.text or " ", told.inputs, told.effects, told.shown
                        )

    def _take_from(self, columns: TraceColumns) -> None:
        if not columns.num_spans:
            return
        ordinals, first = np.unique(columns["call"], return_index=True)
        for ordinal, at in zip(ordinals.tolist(), first.tolist(), strict=True):
            site, label = int(columns["site"][at]), int(columns["label"][at])
            if ordinal >= 0 and ordinal not in self.by_ordinal and site >= 0 and label >= 0:
                step = int(columns["step"][at])
                self.by_ordinal[ordinal] = KnownCall(ordinal, step, columns.labels.texts[label], columns.sites.texts[site])
