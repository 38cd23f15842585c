"""What no schedule of a step could have beaten, by what the run itself measured.

    RunTrace --measured_decode--> t0 + t1 b of its decode steps;  step_bounds --> seconds by the bound's name

The bounds are those of the simulator (`m2flow.micro.rollouts.bounds`), with constants fitted to this run's own spans instead of a cost
model, and with the work that was really done. Measured times scatter, so such a bound is as good as the fit; a step may come out a
little faster. Only tokens of samples whose lives lie in the step count. Prefill, switches and syncs are left out.

    longest_sample   (t0 + t1) L of the longest sample
    work             device seconds of all tokens at the best rate and of all training, by all devices
    k_longest, no_migration     of the rollout
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2flow.micro.analysis.idle import Device
from m2flow.micro.analysis.run_trace import LIFE, TRAIN, RunTrace, Step
from m2flow.micro.costs.fitting import fit
from m2flow.micro.rollouts.bounds import rollout_bounds
from m2flow.micro.rollouts.decode import DecodeModel
from m2flow.observe.spans import SpanName

IntArray = npt.NDArray[np.int64]
_LEAST_STEPS = 8
"""Decode steps that a fit needs."""


@dataclass(frozen=True)
class MeasuredDecode:
    """The decode steps of a run."""

    model: DecodeModel
    num_steps: int
    r2: float
    error: float
    """Median of |fitted - measured| / measured."""


def measured_decode(trace: RunTrace) -> MeasuredDecode | None:
    """The fit over all instances; None where too few steps were recorded one by one."""
    columns = trace.columns
    if SpanName.ROLLOUT_STEP not in columns.names.texts:
        return None
    mine = np.flatnonzero((columns["name"] == columns.names.texts.index(SpanName.ROLLOUT_STEP)) & (columns["num_samples"] > 0))
    seconds = (columns["end"][mine] - columns["start"][mine]) / 1e9
    batch = columns["num_samples"][mine]
    known = seconds > 0
    seconds, batch = seconds[known], batch[known]
    if len(seconds) < _LEAST_STEPS:
        return None
    constants, quality = fit(np.stack([np.ones(len(batch)), batch], axis=1), seconds)
    t0, t1 = float(constants[0]), float(constants[1])
    model = DecodeModel(max(t0, 1e-9), max(t1, 0.0), max_batch=int(batch.max()))
    return MeasuredDecode(model, len(seconds), quality.r2, quality.error)


def step_bounds(trace: RunTrace, step: Step, devices: list[Device], decode: MeasuredDecode | None) -> dict[str, float]:
    """Seconds by name; empty where nothing can be said."""
    columns = trace.columns
    found: dict[str, float] = {}
    inside = np.minimum(columns["end"], step.end) - np.maximum(columns["start"], step.start)
    names = columns.workers.texts
    size = np.array([next((device.num_devices for device in devices if name in device.workers), 1) for name in names] + [1], np.int64)
    weighed = np.maximum(inside, 0) * size[columns["worker"]]
    train_s = float(weighed[trace.group == TRAIN].sum() / 1e9)
    lives = np.flatnonzero((trace.group == LIFE) & (columns["start"] >= step.start) & (columns["end"] <= step.end))
    lengths = columns["num_tokens"][lives]
    lengths = lengths[lengths > 0]
    decode_s = 0.0
    if decode is not None and len(lengths):
        num_instances = max(len(np.unique(columns["worker"][trace.group == LIFE])), 1)
        bounds = rollout_bounds(lengths, decode.model, num_instances)
        whole = lives[columns["num_tokens"][lives] > 0]
        decode_s = decode.model.best_token_s * int((lengths * size[columns["worker"][whole]]).sum())
        found |= {"longest_sample": bounds.longest_s, "k_longest": bounds.k_longest_s, "no_migration": bounds.no_migration_s}
    if devices and (train_s or decode_s):
        found["work"] = (train_s + decode_s) / sum(device.num_devices for device in devices)
    return found
