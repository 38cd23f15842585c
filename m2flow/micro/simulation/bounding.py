"""Lower bounds on a period of a simulated run, from the work that was done between its ends.

    longest_sample   (t0 + t1) L + its part of training + an optimiser step     a token follows the one before it
    work             device seconds of all tokens at the best rate and of all training, by all devices
    k_longest        of the rollout, with free migration    (`m2flow.micro.rollouts.bounds`)
    no_migration     of the rollout, each sample where it began
    critical_path    max_k (r_k + sum of the training of what is released from r_k on), r_k when a group may be done at the earliest

What a period does is cut at its ends: of a sample that began before it or goes on after it the tokens in between count, of a task the
share of its time. So the first four hold with any staleness; the last only where a step's samples are generated and trained in it.
Fixed costs of micro-batches, switches, syncs and hops are left out, so none of them is above what any schedule on these seats can reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from m2flow.micro import messages as m
from m2flow.micro.costs.terms import DecodeCost, TrainCost
from m2flow.micro.rollouts.bounds import rollout_bounds
from m2flow.micro.rollouts.decode import DecodeModel
from m2flow.micro.simulation.decoding import Life
from m2flow.micro.simulation.machines import Machine
from m2flow.micro.simulation.run import Did, History
from m2flow.samples import by_group

_ROUNDING = 1e-6
"""Of a token, by sums of turns."""


@dataclass(frozen=True)
class Span:
    """Between two moments: times, and each worker's count of decode turns there."""

    start_s: float
    end_s: float
    turns_before: Mapping[str, float]
    turns_after: Mapping[str, float]


def span_bounds(history: History, machines: Mapping[str, Machine], span: Span, *, is_self_contained: bool) -> dict[str, float]:
    """Seconds by the bound's name.

    Args:
        is_self_contained: what is trained in the span was generated in it, so that the order of both counts too.
    """
    pieces = {
        name: [(life, _whole(life, span.turns_before.get(name, 0.0), span.turns_after[name])) for life in lives]
        for name, lives in history.lives.items()
        if machines[name].decode
    }
    dids = [did for did in history.dids if did.end_s > span.start_s and did.start_s < span.end_s]
    found: dict[str, float] = {}
    device_s = _decode_device_s(pieces, machines, span) + _train_device_s(dids, history, machines, span)
    found["work"] = device_s / max(history.num_devices, 1)
    for role in {role for machine in machines.values() for role in machine.decode}:
        hosts = [name for name, machine in machines.items() if role in machine.decode]
        lengths = np.array([tokens for name in hosts for life, tokens in pieces[name] if life.role == role and tokens])
        if not len(lengths):
            continue
        bounds = rollout_bounds(lengths, _best(machines[name].decode[role] for name in hosts), len(hosts))
        for key, seconds in (
            ("longest_sample", bounds.longest_s),
            ("k_longest", bounds.k_longest_s),
            ("no_migration", bounds.no_migration_s),
        ):
            found[key] = max(found.get(key, 0.0), seconds)
    if is_self_contained:
        made = {life.id: (life, tokens) for found_here in pieces.values() for life, tokens in found_here if tokens}
        for update in _updates(dids, history, machines, span):
            parts = [[row] for row in update.ids] if history.without_groups else list(by_group(update.ids).values())
            _of_update(found, update, made, machines, parts)
    return found


@dataclass(frozen=True)
class _Update:
    """An update call that was done in a span."""

    cost: TrainCost
    ids: Sequence[int]
    num_tokens: Mapping[int, int]
    has_stepped: bool

    def seconds(self, ids: Iterable[int]) -> float:
        """Of training on these, without what a micro-batch takes by itself."""
        return self.cost.update.seconds([self.num_tokens[row] for row in ids], 0)

    @property
    def end_s(self) -> float:
        return self.cost.optimizer_s if self.has_stepped else 0.0


def _of_update(
    found: dict[str, float],
    update: _Update,
    made: Mapping[int, tuple[Life, int]],
    machines: Mapping[str, Machine],
    parts: Sequence[Sequence[int]],
) -> None:
    """Raise the bounds by what training adds: a sample is trained on when it is done, and a part (a group) when all of it is."""
    alone: dict[str, float] = {}
    for machine in machines.values():
        for role, cost in machine.decode.items():
            alone[role] = min(alone.get(role, float("inf")), cost.step_s + cost.sample_s)
    released_s = {row: tokens * alone[life.role] for row, (life, tokens) in made.items()}
    for row in update.ids:
        if row in made:
            whole_s = released_s[row] + update.seconds([row]) + update.end_s
            found["longest_sample"] = max(found.get("longest_sample", 0.0), whole_s)
    groups = [(max(released_s.get(row, 0.0) for row in rows), rows) for rows in parts]
    left_s = 0.0
    for release_s, rows in sorted(groups, key=lambda pair: pair[0], reverse=True):
        left_s += update.seconds(rows)
        found["critical_path"] = max(found.get("critical_path", 0.0), release_s + left_s + update.end_s)


def _updates(dids: Sequence[Did], history: History, machines: Mapping[str, Machine], span: Span) -> list[_Update]:
    """The updates whose work lies in a span, one epoch of each."""
    rows: dict[int, list[int]] = {}
    costs: dict[int, TrainCost] = {}
    stepped: set[int] = set()
    for did in dids:
        if did.call is None or did.call.method != "update" or did.start_s < span.start_s or did.end_s > span.end_s:
            continue
        costs[did.call.ordinal] = machines[did.worker].train[did.call.role]
        if isinstance(did.task, m.Accumulate) and did.task.epoch == 0:
            rows.setdefault(did.call.ordinal, []).extend(did.task.ids)
        if isinstance(did.task, m.Apply) and did.task.is_last:
            stepped.add(did.call.ordinal)
    return [
        _Update(costs[ordinal], ids, {row: history.num_tokens(row) for row in ids}, ordinal in stepped) for ordinal, ids in rows.items()
    ]


def _whole(life: Life, before: float, after: float) -> int:
    """Whole tokens between two counts of turns."""
    return int(life.tokens_until(after) - life.tokens_until(before) + _ROUNDING)


def _decode_device_s(pieces: Mapping[str, Sequence[tuple[Life, int]]], machines: Mapping[str, Machine], span: Span) -> float:
    """Device seconds of tokens at the best rate, and of prefill that began in the span."""
    total = 0.0
    for name, found in pieces.items():
        machine = machines[name]
        for life, tokens in found:
            cost = machine.decode[life.role]
            total += tokens * (cost.step_s / cost.max_running + cost.sample_s) * machine.num_devices
    return total


def _train_device_s(dids: Sequence[Did], history: History, machines: Mapping[str, Machine], span: Span) -> float:
    total = 0.0
    for did in dids:
        if did.call is None or did.call.engine != "train":
            continue
        cost = machines[did.worker].train[did.call.role]
        lengths = [history.num_tokens(row) for row in getattr(did.task, "ids", ())]
        match did.task:
            case m.Accumulate():
                needed_s = cost.update.seconds(lengths, 0)
            case m.Perform():
                needed_s = cost.forward.seconds(lengths, 0)
            case m.Apply():
                needed_s = cost.optimizer_s
            case _:
                continue
        inside_s = min(did.end_s, span.end_s) - max(did.start_s, span.start_s)
        took_s = did.end_s - did.start_s
        total += needed_s * (inside_s / took_s if took_s > 0 else 1.0) * machines[did.worker].num_devices
    return total


def _best(costs: Iterable[DecodeCost]) -> DecodeModel:
    """An instance that is as good as the best of several, in each respect."""
    known = list(costs)
    return DecodeModel(
        min(cost.step_s for cost in known), min(cost.sample_s for cost in known), max_batch=max(cost.max_running for cost in known)
    )
