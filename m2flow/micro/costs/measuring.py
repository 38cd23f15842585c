"""From what was observed of runs to a profile: each constant fitted, with how well it says the times again.

    Observed of one or more runs (each with its plan) --profile_of--> Profile

A run measures the layouts of its own plan; the others of a profile come from further runs. What an engine takes while others work
beside it is a factor of its own: fitted in turn with the constants, from steps that overlap more and less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from m2flow.micro.costs.fitting import FloatArray, Quality, fit, robust_mean
from m2flow.micro.costs.observing import DecodeSteps, Observed, Passes
from m2flow.micro.costs.profile import (
    Beside,
    Machine,
    MeasuredDecode,
    MeasuredEngine,
    MeasuredFunction,
    MeasuredPass,
    MeasuredSync,
    Profile,
    now_text,
    told_model,
)
from m2flow.micro.plan import Plan, WorkerPlan
from m2flow.micro.rollouts.correlation import log_length_icc
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec

_NUM_QUANTILES = 21
_LEAST_BESIDE_S = 0.05
"""Seconds of work beside another engine below which they say nothing about how it slows down."""
_MOST_SLOWDOWN = 8.0
_MOST_GROUPS = 2000
_TURNS = 4
_LAST_BYTES = 4 << 20
"""Of a trace: some ten thousand spans, which are read in about a second."""


@dataclass(frozen=True)
class Measurement:
    """A run that was measured."""

    plan: Plan
    spec: ClusterSpec
    observed: Observed
    startup_s: float = 0.0


def profile_of(flow: str, models: Mapping[str, Model], runs: Sequence[Measurement], *, gather_s: float, load: float) -> Profile:
    """The profile that these runs give. Of an engine that several runs have on equally many devices the first one counts.

    Args:
        gather_s: how long the plan's workers let finished samples wait for others.
        load: of the machine, when the first run began.
    """
    engines: dict[tuple[object, ...], MeasuredEngine] = {}
    syncs: dict[tuple[str, str], MeasuredSync] = {}
    functions: dict[str, MeasuredFunction] = {}
    hop_s = _hop_s(runs)
    for run in runs:
        for worker in run.plan.workers:
            for found in _engines(run, worker, hop_s):
                engines.setdefault(found.place, found)
        for sync in _syncs(run):
            syncs.setdefault((sync.role, sync.transport), sync)
        for call, units in run.observed.functions.items():
            own = np.maximum((units.task_s - units.num_units * units.seconds.mean()), 0.0)
            (task_s, unit_s), _ = fit(np.stack([np.ones(len(own)), units.num_units], 1), np.maximum(own, 1e-7))
            quantiles = np.quantile(units.seconds, np.linspace(0, 1, _NUM_QUANTILES)) + unit_s
            shown = tuple(float(value) for value in quantiles)
            concurrency = run.spec.functions.concurrency
            functions.setdefault(call, MeasuredFunction(call, shown, concurrency, float(task_s), len(units.seconds)))
    num_bytes = np.concatenate([run.observed.sends[0] for run in runs])
    send_s = np.concatenate([run.observed.sends[1] for run in runs])
    (_, byte_s), _ = fit(np.stack([np.ones(len(num_bytes)), num_bytes], 1), send_s)
    # Of the first run that has any: what comes before the loop may be cut short in others, and their answers are another policy's.
    groups = next((run.observed.groups for run in runs if run.observed.groups), [])[:_MOST_GROUPS]
    return Profile(
        flow=flow,
        made=now_text(),
        machine=Machine.here(runs[0].plan.workers[0].device),
        models={role: told_model(model) for role, model in models.items()},
        engines=tuple(engines.values()),
        functions=tuple(functions.values()),
        syncs=tuple(syncs.values()),
        hop_s=hop_s,
        byte_s=float(byte_s),
        turn_s=max(robust_mean(np.concatenate([run.observed.turns for run in runs])) - hop_s, 0.0),
        gather_s=gather_s,
        startup_s=max((run.startup_s for run in runs), default=0.0),
        prompts=tuple(prompt for prompt, _ in groups),
        responses=tuple(tuple(answers) for _, answers in groups),
        icc=float(log_length_icc([answers for _, answers in groups]).icc),
        load=round(load, 2),
    )


def measured_so_far(
    flow: str, models: Mapping[str, Model], plan: Plan, spec: ClusterSpec, run_dir: Path, *, gather_s: float
) -> Profile | None:
    """The profile of a run that goes on, by what it recorded last, in the pools that its engines are in. None: they have hardly begun."""
    observed = Observed.of_run(run_dir, last_bytes=_LAST_BYTES)
    if not observed.decode or not observed.update:
        return None
    return profile_of(flow, models, [Measurement(plan, spec, observed)], gather_s=gather_s, load=0.0)


def _engines(run: Measurement, worker: WorkerPlan, hop_s: float) -> list[MeasuredEngine]:
    seen, found = run.observed, []
    pools = {(seat.engine.role, seat.engine.kind): seat.pool for seat in run.plan.choice.seats} if run.plan.choice else {}
    for slot in worker.engines:
        if slot.kind == "function":
            continue
        num_devices = worker.threads if worker.device == "cpu" else slot.tp * slot.pp
        key = (slot.role, worker.name)
        come_s = robust_mean(seen.switches.get((slot.takes_turn, worker.name), []))
        slowdown: dict[Beside, float] = {}
        decode = update = forward = None
        if slot.kind == "rollout":
            steps = seen.decode.get(key) or seen.decode.get(("", worker.name))
            if steps is None:
                continue
            decode, slowdown = _decode(steps, seen, worker.name, hop_s)
        else:
            if key not in seen.update and key not in seen.forward:
                continue
            if key in seen.update:
                update, slowdown = _pass(seen.update[key], seen, worker.name, hop_s)
            if key in seen.forward:
                forward, also = _pass(seen.forward[key], seen, worker.name, hop_s)
                slowdown = slowdown or also
        optimizer_s = robust_mean(seen.optimizer.get(key, [])) if slot.kind == "train" else 0.0
        ranks = worker.ranks if slot.kind == "train" else 1
        found.append(
            MeasuredEngine(
                slot.role,
                slot.kind,
                slot.engine,
                worker.device,
                num_devices * ranks,
                decode,
                update,
                forward,
                optimizer_s,
                come_s,
                slowdown,
                ranks,
                pools.get((slot.role, slot.kind), ""),
            )
        )
    return found


def _decode(steps: DecodeSteps, seen: Observed, worker: str, hop_s: float) -> tuple[MeasuredDecode, dict[Beside, float]]:
    running = steps.decoding + steps.entered
    sizes = np.stack([np.ones(len(running)), running, steps.context, steps.prefill, steps.entered], 1).astype(np.float64)
    found = _fit_beside(sizes, steps.seconds, steps.beside, "rollout")
    step_s, sample_s, context_s, prefill_s, enter_s = found.constants
    leave_s = handover_s = 0.0
    if worker in seen.leaving and len(seen.leaving[worker].seconds):
        left = seen.leaving[worker]
        step_s += left.between_s
        handover_s, leave_s = fit(np.stack([np.ones(len(left.num_samples)), left.num_samples], 1), np.maximum(left.seconds, 1e-6))[0]
    num, seconds = seen.entering.get(worker, (np.zeros(0, np.int64), np.zeros(0)))
    is_new = num > 0
    asking = np.maximum(seconds[is_new] - hop_s, 0.0) / num[is_new]
    is_decode = steps.decoding > 0
    total = float(steps.decoding[is_decode].sum())
    return (
        MeasuredDecode(
            step_s=float(step_s),
            sample_s=float(sample_s),
            context_s=float(context_s),
            prefill_token_s=float(prefill_s),
            enter_s=float(enter_s) + (float(np.median(asking)) if len(asking) else 0.0),
            leave_s=float(leave_s),
            handover_s=float(handover_s),
            most_running=int(running.max()),
            context=float(steps.context[is_decode].sum()) / total if total else 0.0,
            quality=found.quality,
        ),
        found.slowdown,
    )


def _pass(passes: Passes, seen: Observed, worker: str, hop_s: float) -> tuple[MeasuredPass, dict[Beside, float]]:
    # Whether prompts are shared in a group is the engine's affair: what explains the times better is what it does.
    tried = []
    for tokens in (passes.tokens - passes.shared, passes.tokens):
        sizes = np.stack([np.ones(len(passes.seconds)), tokens, passes.squares], 1).astype(np.float64)
        tried.append(_fit_beside(sizes, passes.seconds, passes.beside, "train"))
    is_shared = tried[0].quality.r2 >= tried[1].quality.r2
    found = tried[0 if is_shared else 1]
    fixed_s, token_s, token2_s = found.constants
    sample_s = -token_s * passes.shared.sum() / passes.num_samples.sum() if is_shared else 0.0
    queued, queued_s = seen.preparing.get(worker, (np.zeros(0, np.int64), np.zeros(0)))
    waited, waited_s = seen.starting.get(worker, (np.zeros(0, np.int64), np.zeros(0)))
    num, seconds = np.concatenate([queued, waited]), np.concatenate([queued_s, waited_s - hop_s])
    before_s = each_s = 0.0
    if len(num):
        before_s, each_s = fit(np.stack([np.ones(len(num)), num], 1), np.maximum(seconds, 1e-6))[0]
    longest = float(np.sqrt((passes.squares / passes.num_samples).max()))
    measured = MeasuredPass(
        float(fixed_s) + float(before_s), float(sample_s) + float(each_s), float(token_s), float(token2_s), longest, found.quality
    )
    return measured, found.slowdown


@dataclass(frozen=True)
class _Fit:
    constants: FloatArray
    quality: Quality
    slowdown: dict[Beside, float]


def _fit_beside(sizes: FloatArray, seconds: FloatArray, beside: Mapping[str, FloatArray], kind: str) -> _Fit:
    """Constants of undisturbed work, and how many times as long it takes beside each other kind of engine, in turn.

    Args:
        sizes: the third column is doubted, as the first is: contexts, and squares of lengths, grow with what the second counts.
    """
    factors = np.ones(len(seconds))
    slowdown: dict[Beside, float] = {}
    shares = {other: beside[other] for other in get_args(Beside) if other != kind}
    told = {other: share for other, share in shares.items() if float((share * seconds).sum()) >= _LEAST_BESIDE_S}
    constants, quality = fit(sizes, seconds, doubted=(0, 2))
    for _ in range(_TURNS if told else 0):
        alone = np.maximum(sizes @ constants, 1e-9)
        # seconds = alone * (1 + sum of share * (slowdown - 1)), so what is beyond `alone` is a sum of terms as well.
        extra, _ = fit(np.stack([alone, *(alone * share for share in told.values())], 1), seconds)
        added = extra[1:] / max(float(extra[0]), 1e-9)
        slowdown = {other: float(np.clip(1 + more, 1.0, _MOST_SLOWDOWN)) for other, more in zip(told, added, strict=True)}
        factors = np.ones(len(seconds))
        for other, share in told.items():
            factors = factors + (slowdown[other] - 1) * share
        constants, quality = fit(sizes, seconds / factors, doubted=(0, 2))
    return _Fit(constants, quality, slowdown)


def _syncs(run: Measurement) -> list[MeasuredSync]:
    seen, found = run.observed, []
    for sync in run.plan.syncs:
        loads = seen.loads.get((sync.role, sync.target), np.zeros(0))
        if len(loads):
            publish_s = robust_mean(seen.publishes.get((sync.role, sync.source), []))
            num_bytes = seen.weight_bytes.get(sync.role, 0)
            found.append(MeasuredSync(sync.role, sync.transport, num_bytes, publish_s, robust_mean(loads), len(loads)))
    return found


def _hop_s(runs: Sequence[Measurement]) -> float:
    hops = np.concatenate([run.observed.hops for run in runs]) if runs else np.zeros(0)
    return float(np.median(hops)) if len(hops) else 0.0
