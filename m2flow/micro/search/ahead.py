"""When a trainer can come back to devices on which the last samples still run.

    at share p: weights + activations + cache of the samples that are left + what the trainer keeps <= 0.95 memory

Of the samples that are left each is counted as long as the longest of all, and each instance has its part of them, rounded up. So the
trainer's return costs no time of the step, if the rest takes that long; the search itself does not count on it.

Limits: of a lease with one rollout engine of several instances and one trainer, and none of it lent; engines that can give back cache
meanwhile. One instance on the trainer's own devices is in its process, which does one thing at a time.
"""

from __future__ import annotations

import math

import msgspec

from m2flow.micro.lowering.abilities import can_condense
from m2flow.micro.lowering.seating import share_a_process
from m2flow.micro.search.choice import Seat
from m2flow.micro.search.problem import Problem

_SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995)
_FULL = 0.95


def coming_ahead(problem: Problem, seats: tuple[Seat, ...]) -> tuple[Seat, ...]:
    """The seats, of which trainers say when they come."""
    if not can_condense(problem.spec.rollout.engine):
        return seats
    found = []
    for seat in seats:
        others = [other for other in seats if other.lease == seat.lease and other is not seat]
        if seat.lease and seat.engine.kind == "train" and seat.is_swapped and [other.engine.kind for other in others] == ["rollout"]:
            (rollout,) = others
            has_one_process = rollout.layout.dp == 1 and rollout.devices == seat.devices
            if not rollout.lent_until and not has_one_process and not share_a_process(rollout, seat, problem.spec):
                seat = msgspec.structs.replace(seat, comes_at=_share(problem, rollout, seat))
        found.append(seat)
    return tuple(found)


def _share(problem: Problem, rollout: Seat, trainer: Seat) -> float:
    """0: there is no room before the end."""
    generations = [call for call in problem.workload.calls if call.work == "generate" and call.engine == rollout.engine]
    room = _FULL * problem.costs.device_bytes(rollout.pool) - trainer.footprint.kept_bytes
    room -= rollout.footprint.kept_bytes + rollout.footprint.activations
    cost = problem.costs.decode(rollout.engine, rollout.pool, rollout.layout)
    shares = []
    for call in generations:
        draws = problem.batches[call.name].draws
        longest = max(float(draw.responses.max(initial=1)) + float(draw.prompts.max(initial=0)) for draw in draws)
        mean = max(sum(float(draw.responses.mean() + draw.prompts.mean()) for draw in draws) / len(draws), 1.0)
        sample_bytes = rollout.footprint.kv / max(cost.max_running, 1) * longest / mean
        num = max(draw.responses.size for draw in draws)
        fits = [p for p in _SHARES if math.ceil(num * (1 - p) / rollout.layout.dp) * sample_bytes <= room]
        shares.append(fits[0] if fits else 0.0)
    return 0.0 if not shares or 0.0 in shares else max(shares)
