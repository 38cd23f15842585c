"""Part samples and instances into classes, so that those which may become long run with few others.

    scenarios, longest expected first --split--> for each class which stretch of the order, and how many of the instances

A class of W tokens on m instances, which share its queue, takes about t0 Z + t1 max(W/m, longest); Z are the steps of its queue on
B m slots. A split is made if it makes the mean makespan over the scenarios smaller. So where lengths can't be told apart there is one
class, and that single expectations are wrong is in the calculation.

Source: StreamRL (arXiv 2504.15930) parts long from short by predicted rank and percentiles; scenarios and recursion are ours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from m2flow.micro.rollouts.decode import DecodeModel, FloatArray, num_steps

MIN_GAIN = 0.01
"""Relative; a split that promises less is not made."""

_MAX_CLASSES = 8
_NUM_CUTS, _NUM_SHARES = 40, 16
_NUM_TRIED = 4
"""Of the splits that look best by a formula for Z, the ones whose queues are worked."""


class Class(NamedTuple):
    """A stretch of the order, and how many instances work on it."""

    first: int
    end: int
    num_instances: int


class _Parting(NamedTuple):
    """One class parted in two, and the mean makespan that this promises."""

    mean_s: float
    which: int
    parts: tuple[Class, Class]


def split(scenarios: FloatArray, model: DecodeModel, num_instances: int) -> list[Class]:
    """Greedily: part one of the classes in two, as long as that helps.

    Args:
        scenarios: [S, N], lengths that may turn out, samples in the order of falling expectation.
    """
    classes = [Class(0, scenarios.shape[1], num_instances)]
    times = [_queued_s(scenarios, classes[0], model)]
    while len(classes) < _MAX_CLASSES:
        promising = sorted(_partings(scenarios, classes, times, model))[:_NUM_TRIED]
        best: tuple[float, _Parting, list[FloatArray]] | None = None
        for parting in promising:
            both = [_queued_s(scenarios, part, model) for part in parting.parts]
            mean_s = float(np.max([*_without(times, parting.which), *both], axis=0).mean())
            if best is None or mean_s < best[0]:
                best = (mean_s, parting, both)
        if best is None or best[0] > float(np.max(times, axis=0).mean()) * (1 - MIN_GAIN):
            break
        _, (_, k, parts), both = best
        classes[k : k + 1], times[k : k + 1] = parts, both
    return classes


def _partings(scenarios: FloatArray, classes: list[Class], times: list[FloatArray], model: DecodeModel) -> list[_Parting]:
    found = []
    for k, parted in enumerate(classes):
        others_s = np.max([*_without(times, k), np.zeros(len(scenarios))], axis=0)
        for cut in _spread(parted.first + 1, parted.end - 1, _NUM_CUTS):
            for share in _spread(1, parted.num_instances - 1, _NUM_SHARES):
                parts = Class(parted.first, cut, share), Class(cut, parted.end, parted.num_instances - share)
                both_s = np.maximum(*(_estimated_s(scenarios, part, model) for part in parts))
                found.append(_Parting(float(np.maximum(others_s, both_s).mean()), k, parts))
    return found


def _estimated_s(scenarios: FloatArray, part: Class, model: DecodeModel) -> FloatArray:
    """[S], with Z = max(longest, work before the last B m samples / (B m) + longest of those)."""
    slots = model.max_batch * part.num_instances
    mine = scenarios[:, part.first : part.end]
    before = mine[:, : max(0, mine.shape[1] - slots)]
    last = mine[:, before.shape[1] :].max(axis=1, initial=0.0)
    longest, work = mine.max(axis=1, initial=0.0), mine.sum(axis=1)
    steps = np.maximum(np.maximum(longest, before.sum(axis=1) / slots + last), work / slots)
    return np.asarray(model.t0_s * steps + model.t1_s * np.maximum(work / part.num_instances, longest), np.float64)


def _queued_s(scenarios: FloatArray, part: Class, model: DecodeModel) -> FloatArray:
    """[S], with Z from working the queue."""
    mine = np.ceil(scenarios[:, part.first : part.end]).astype(np.int64)
    slots = model.max_batch * part.num_instances
    steps = np.array([num_steps(row, slots) for row in mine], np.float64)
    tokens = np.maximum(mine.sum(axis=1) / part.num_instances, mine.max(axis=1, initial=0))
    return np.asarray(model.t0_s * steps + model.t1_s * tokens, np.float64)


def _without(times: list[FloatArray], which: int) -> list[FloatArray]:
    return [time for k, time in enumerate(times) if k != which]


def _spread(low: int, high: int, num: int) -> list[int]:
    """Whole numbers from `low` to `high`, dense at the low end."""
    if high < low:
        return []
    return sorted({low - 1 + round(float(value)) for value in np.geomspace(1, high - low + 1, num)})
