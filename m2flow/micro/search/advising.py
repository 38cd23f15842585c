"""Why a plan is no faster: lower bounds, what decides, and what another plan loses by.

All numbers are those of the plans and of the bounds; the words only say which of them is the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from m2flow.micro.search.choice import Bound, Part
from m2flow.micro.search.leaves import instances
from m2flow.micro.search.limits import Limits
from m2flow.micro.search.problem import Problem
from m2flow.micro.search.trees import Node, leaves_of, parts_of

_MOSTLY = 0.75
"""A share from which on something is what decides."""


def bounds_of(problem: Problem) -> tuple[Bound, ...]:
    """Times that no plan of the options tried can beat.

        longest sample   (t0 + t1) L, and what must come after it        work            device-seconds / devices
        k-longest        the k longest answers, however they move        critical path   the longest chain of calls, each at its best

    With staleness an answer may take as many steps as there are under way: all but `work` are divided by staleness + 1.
    """
    limits = Limits(problem)
    steps = problem.workload.staleness + 1
    longest = k_longest = 0.0
    for i, call in enumerate(problem.graph.device_calls):
        if call.work == "generate" and call.engine is not None:
            batch = problem.batches[call.name]
            ways = instances(call.engine, problem.options.of[call.engine], problem.costs)
            around = limits.around_s(1 << i)
            longest = max(longest, around + float(batch.longest_s(ways).min()))
            k_longest = max(k_longest, around + float(batch.k_longest_s(ways).min()))
    found = [("longest sample", longest / steps), ("k-longest", k_longest / steps)] if longest else []
    found += [("work", limits.work_s()), ("critical path", limits.path_s() / steps)]
    return tuple(Bound(name, float(seconds)) for name, seconds in found)


def advice_of(problem: Problem, node: Node, parts: Sequence[Part], bounds: Sequence[Bound]) -> str:
    """What limits the step, and what would help, from the largest numbers."""
    step_s = sum(part.seconds for part in parts if part.on_critical_path)
    by_name = {bound.name: bound.seconds for bound in bounds}
    best = max(by_name.values(), default=0.0)
    longest, work = by_name.get("longest sample", 0.0), by_name.get("work", 0.0)
    generates = {call.name for call in problem.graph.device_calls if call.work == "generate"}
    generating = sum(part.seconds for part in parts if part.on_critical_path and generates & set(part.what.split(" / ")[0].split(", ")))
    if generating >= step_s / 2 and longest >= _MOSTLY * best and longest >= _MOSTLY * step_s:
        return (
            f"the longest sample is {longest / best:.0%} of the bound and {longest / step_s:.0%} of the step: more rollout devices are "
            f"waste; lower the cap, raise staleness, or raise TP{_tp_of(problem, node)}"
        )
    if work >= _MOSTLY * step_s:
        return f"the work itself is {work / step_s:.0%} of the step: the devices are busy, and only more or faster ones help"
    path = [part for part in parts if part.on_critical_path]
    largest = max(path, key=lambda part: part.seconds)
    text = f"{largest.what} takes {largest.seconds / step_s:.0%} of the step"
    moves = sum(part.seconds for part in path if part.what.startswith(("switch", "weight sync")))
    if moves > 0.1 * step_s:
        return (
            f"{text}; switches and weight syncs take {moves / step_s:.0%}: memory to keep engines resident, or staleness, would save them"
        )
    if generating >= step_s / 2 and longest >= step_s / 2:
        return f"{text}, and the longest sample alone is {longest / step_s:.0%}: lower the cap, raise staleness, or raise TP"
    if work and step_s > 2 * work:
        return f"{text}; all work together would take {work / step_s:.0%} of it if it were spread evenly: raise staleness, or batch more"
    return f"{text}; the bound is {best / step_s:.0%} of it"


def _tp_of(problem: Problem, node: Node) -> str:
    rollouts = [leaf.option.layout.tp for leaf in leaves_of(node) if leaf.engine.kind == "rollout"]
    return f" (now {max(rollouts)})" if rollouts else ""


def why_lost(best: Problem, winner: Node, problem: Problem, loser: Node) -> str:
    """The parts that differ most between two plans."""
    ours, theirs = _seconds(parts_of(best, winner)), _seconds(parts_of(problem, loser))
    more = {what: theirs.get(what, 0.0) - ours.get(what, 0.0) for what in {**ours, **theirs}}
    slower = sorted((what for what in more if more[what] > 0), key=lambda what: -more[what])[:2]
    faster = sorted((what for what in more if more[what] < 0), key=lambda what: more[what])[:1]
    said = [f"{what} {_change(ours.get(what, 0.0), theirs.get(what, 0.0))}" for what in slower]
    saved = [f"though {what} {_change(ours.get(what, 0.0), theirs.get(what, 0.0))}" for what in faster]
    return ", ".join(said + saved) or "no part differs"


def _change(ours: float, theirs: float) -> str:
    if not ours:
        return f"takes {theirs:.3g} s more of the critical path"
    return f"takes {theirs:.3g} s instead of {ours:.3g} s" if theirs else f"({ours:.3g} s) is off the critical path"


def _seconds(parts: Iterable[Part]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        if part.on_critical_path:
            found[part.what] = found.get(part.what, 0.0) + part.seconds
    return found
