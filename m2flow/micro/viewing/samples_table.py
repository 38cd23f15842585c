"""All samples of a run as columns: what the ledger knows of each, and when the trace saw it.

    ledger.db, RunTrace --samples_table--> Columns [N]

No text is read, so a hundred thousand samples are a few megabytes, and a page can sort and filter them by itself. Of a run without a
ledger, a simulated one, there is what its trace says.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.micro.analysis.run_trace import FUNCTION, LIFE, TRAIN, RunTrace
from m2flow.micro.record.endings import ENDINGS
from m2flow.micro.record.sample_book import SampleBook
from m2flow.observe.spans import SpanName
from m2flow.samples import Finish, group_indices, prompt_positions

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MOST = 200_000
"""Samples that a page gets; of more, the newest."""
FINISHES = [finish.name.lower() for finish in sorted(Finish)]
_CALL_SHIFT = 42
_ASKED = ("step", "prompt_tokens", "response_tokens", "finish", "reward", "num_updates", "ending")


@final
class Columns(msgspec.Struct):
    """One entry a sample; None where nothing is known. Times in microseconds since the run's first span."""

    call: list[int]
    prompt: list[int]
    member: list[int]
    step: list[int]
    prompt_tokens: list[int]
    tokens: list[int]
    finish: list[int]
    """Positions in `finishes`."""
    reward: list[float | None]
    updates: list[int]
    ending: list[int]
    """Positions in `endings`."""
    start: list[int | None]
    end: list[int | None]
    scored: list[int | None]
    """When its first reward or op was done."""
    trained: list[int | None]
    """When the first micro-batch with it began."""
    wait: list[int | None]
    """Microseconds from its last token to that."""
    worker: list[int]
    """Positions in `workers`; -1: not known."""
    version: list[int]
    """Of the weights that it was admitted at; -1: not known."""
    staleness: list[int | None]
    """Versions that the first update that trained on it was ahead of that."""
    advantage: list[float | None]
    """(reward - mean of its group) / standard deviation of its group; of groups of two or more."""
    lives: dict[str, list[tuple[int, int, int, int]]]
    """Of samples that ran more than once, because they were aborted, moved or resumed: start, end, worker and version of each life, by the
    sample's position in the columns."""
    workers: list[str]
    finishes: list[str]
    endings: list[str]
    num_left_out: int


def samples_table(run_dir: Path, trace: RunTrace) -> Columns:
    """
    Raises:
        SpecError: the ledger can't be read.
    """
    rows = _from_ledger(run_dir) if trace.calls.has_ledger else _from_trace(trace)
    num_left_out = max(len(rows) - MOST, 0)
    rows = rows[num_left_out:]
    ids = np.array([row[0] for row in rows], np.int64)
    life, scored, trained = _life_of(trace, ids), _touched(trace, ids, FUNCTION), _touched(trace, ids, TRAIN)
    start, end = trace.columns["start"], trace.columns["end"]
    has_life, has_trained = life >= 0, trained >= 0
    origin = trace.start

    def micros(times: IntArray, spans: IntArray) -> list[int | None]:
        return [None if span < 0 else int(times[span] - origin) // 1000 for span in spans.tolist()]

    if trace.columns.num_spans:
        version = np.where(has_life, trace.columns["version"][life], -1)
        worker = np.where(has_life, trace.columns["worker"][life], -1)
        update = np.where(has_trained, trace.call[trained], -1)
    else:
        version = worker = update = life
    written = _written_by(trace)
    behind = [
        max(written[call] - 1 - at, 0) if call in written and at >= 0 else None
        for call, at in zip(update.tolist(), version.tolist(), strict=True)
    ]
    reward = [row[5] for row in rows]
    return Columns(
        call=(ids >> _CALL_SHIFT).tolist(),
        prompt=prompt_positions(ids).tolist(),
        member=group_indices(ids).tolist(),
        step=[row[1] for row in rows],
        prompt_tokens=[row[2] for row in rows],
        tokens=[row[3] for row in rows],
        finish=[FINISHES.index(row[4]) if row[4] in FINISHES else -1 for row in rows],
        reward=reward,
        updates=[row[6] for row in rows],
        ending=[ENDINGS.index(row[7]) if row[7] in ENDINGS else -1 for row in rows],
        start=micros(start, life),
        end=micros(end, life),
        scored=micros(end, scored),
        trained=micros(start, trained),
        wait=[
            max(int(start[last] - end[first]) // 1000, 0) if first >= 0 and last >= 0 else None
            for first, last in zip(life.tolist(), trained.tolist(), strict=True)
        ],
        worker=worker.tolist(),
        version=version.tolist(),
        staleness=behind,
        advantage=_advantages(ids, reward),
        lives=_several(trace, ids),
        workers=list(trace.columns.workers.texts),
        finishes=FINISHES,
        endings=list(ENDINGS),
        num_left_out=num_left_out,
    )


def _from_ledger(run_dir: Path) -> list[tuple]:  # type: ignore[type-arg]
    with SampleBook(run_dir) as book:
        return book.table(_ASKED)


def _from_trace(trace: RunTrace) -> list[tuple]:  # type: ignore[type-arg]
    columns = trace.columns
    lives = np.flatnonzero((trace.group == LIFE) & (columns["sample"] >= 0)) if columns.num_spans else np.zeros(0, np.int64)
    lives = lives[np.lexsort((columns["end"][lives], columns["sample"][lives]))]
    lives = lives[np.append(np.diff(columns["sample"][lives]) != 0, True)] if len(lives) else lives  # The last life has all tokens.
    used = (
        set(trace.columns.touches[trace.group[trace.columns.touches[:, 1]] == TRAIN, 0].tolist()) if len(trace.columns.touches) else set()
    )
    return [
        (sample, step, 0, tokens, "stop", None, int(sample in used), "consumed" if sample in used else "unused")
        for sample, step, tokens in zip(
            columns["sample"][lives].tolist(), trace.step[lives].tolist(), columns["num_tokens"][lives].tolist(), strict=True
        )
    ]


def _life_of(trace: RunTrace, ids: IntArray) -> IntArray:
    """The last life of each sample, as a span's position; -1: none."""
    if not trace.columns.num_spans or not len(ids):
        return np.full(len(ids), -1, np.int64)
    lives = np.flatnonzero((trace.group == LIFE) & (trace.columns["sample"] >= 0))
    lives = lives[np.lexsort((trace.columns["end"][lives], trace.columns["sample"][lives]))]
    return _last_of(trace.columns["sample"][lives], lives, ids)


def _several(trace: RunTrace, ids: IntArray) -> dict[str, list[tuple[int, int, int, int]]]:
    if not trace.columns.num_spans or not len(ids):
        return {}
    columns = trace.columns
    lives = np.flatnonzero((trace.group == LIFE) & (columns["sample"] >= 0))
    who, number = np.unique(columns["sample"][lives], return_counts=True)
    lives = lives[np.isin(columns["sample"][lives], who[number > 1])]
    place = {sample: at for at, sample in enumerate(ids.tolist())} if len(lives) else {}
    found: dict[str, list[tuple[int, int, int, int]]] = {}
    for span in lives[np.argsort(columns["start"][lives], kind="stable")].tolist():
        at = place.get(int(columns["sample"][span]))
        if at is not None:
            start, end = ((int(columns[edge][span]) - trace.start) // 1000 for edge in ("start", "end"))
            found.setdefault(str(at), []).append((start, end, int(columns["worker"][span]), int(columns["version"][span])))
    return found


def _touched(trace: RunTrace, ids: IntArray, group: int) -> IntArray:
    """The first task of a group that was done on each sample, as a span's position; -1: none."""
    touches = trace.columns.touches
    if not len(touches) or not len(ids):
        return np.full(len(ids), -1, np.int64)
    mine = touches[trace.group[touches[:, 1]] == group]
    order = np.lexsort((-trace.columns["start"][mine[:, 1]], mine[:, 0]))
    return _last_of(mine[order, 0], mine[order, 1], ids)


def _last_of(keys: IntArray, values: IntArray, wanted: IntArray) -> IntArray:
    """For each wanted key the last value among sorted keys; -1: there is none."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    at = np.searchsorted(keys, wanted, side="right") - 1
    return np.where((at >= 0) & (keys[np.maximum(at, 0)] == wanted), values[np.maximum(at, 0)], -1)


def _written_by(trace: RunTrace) -> dict[int, int]:
    """Update call -> the version that it writes."""
    columns = trace.columns
    if SpanName.TRAIN_APPLY not in columns.names.texts:
        return {}
    mine = np.flatnonzero((columns["name"] == columns.names.texts.index(SpanName.TRAIN_APPLY)) & (columns["version"] >= 0))
    return dict(zip(columns["call"][mine].tolist(), columns["version"][mine].tolist(), strict=True))


def _advantages(ids: IntArray, rewards: list[float | None]) -> list[float | None]:
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    if not len(values):
        return []
    _, group = np.unique(ids >> 12, return_inverse=True)
    known = ~np.isnan(values)
    number = np.bincount(group, weights=known)
    clean = np.where(known, values, 0.0)
    mean = np.bincount(group, weights=clean) / np.maximum(number, 1)
    spread = np.sqrt(np.bincount(group, weights=np.where(known, (clean - mean[group]) ** 2, 0.0)) / np.maximum(number, 1))
    advantage = (clean - mean[group]) / (spread[group] + 1e-6)
    is_told = known & (number[group] >= 2)
    return [round(value, 4) if told else None for value, told in zip(advantage.tolist(), is_told.tolist(), strict=True)]
