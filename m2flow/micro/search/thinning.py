"""Options that no plan needs: another place for the engine is no worse for any of its calls, in any chunk, beside anything else.

An option may go if another one of the same engine and pool takes no more devices, memory and time. If the model is both sampled and
trained, their counts must be equal, and no sync may cost more: with any option of the other end where these are few; where they are many
with some of them, and then a better plan may be lost by what syncs differ.
"""

from __future__ import annotations

import msgspec
import numpy as np

from m2flow.micro.costs.terms import EngineId
from m2flow.micro.search.fronts import FloatArray, unbeaten
from m2flow.micro.search.memory import memory_slack
from m2flow.micro.search.options import Option
from m2flow.micro.search.problem import Problem

_MOST_PAIRS = 4000
"""Pairs of options up to which all syncs are compared."""
_FEW = 1


def thin(problem: Problem, slack_s: float = 0.0) -> bool:
    """Take away from the options of a problem those that no plan needs, or that others miss by no more than `slack_s`.

    Returns:
        Whether nothing can have been lost but for the slack.
    """
    is_exact = True
    kept = {}
    for engine, options in problem.options.of.items():
        syncs, is_all = _syncs(problem, engine)
        is_exact &= is_all
        kept[engine] = _needed(problem, engine, options, syncs, slack_s) if len(options) > 1 else list(range(len(options)))
    problem.keep(kept)
    return is_exact


def _needed(problem: Problem, engine: EngineId, options: list[Option], syncs: FloatArray, slack_s: float) -> list[int]:
    calls = [problem.graph.bits[call.name] for call in problem.graph.members(problem.calls_of(engine))]
    times = [problem.leaf(call).times.reshape(len(options), -1) for call in calls]
    nums = np.array([[option.num_devices] for option in options], np.float64)
    bytes_ = np.array([[o.kept_bytes, o.device_bytes, o.host_bytes] for o in options], np.float64)
    values = np.concatenate([nums, bytes_, *times, syncs], axis=1)
    slack = np.full(values.shape[1], slack_s)
    slack[0] = 0
    slack[1:4] = memory_slack(problem, slack_s).max(axis=1)
    pools = np.array([problem.pools.index(option.pool) for option in options])
    codes = pools * (1 + int(nums.max())) + nums[:, 0].astype(np.int64)
    alike = [np.flatnonzero(codes == code) for code in np.unique(codes)]
    rows = np.concatenate([same[unbeaten(values[same], codes[same], slack)] if len(same) > 1 else same for same in alike])
    if not syncs.size:
        rows = rows[unbeaten(values[rows], pools[rows], slack)]
    return [int(i) for i in rows]


def _syncs(problem: Problem, engine: EngineId) -> tuple[FloatArray, bool]:
    """[options, others]: seconds of the syncs of each option with those of the other end; and whether that is all of them."""
    options = problem.options.of[engine]
    sync = next((sync for sync in problem.syncs if engine in (sync.source, sync.target)), None)
    if sync is None:
        return np.zeros((len(options), 0)), True
    others = problem.options.of[sync.target if engine == sync.source else sync.source]
    places = {(option.pool, msgspec.structs.astuple(option.layout)): option for option in others}
    is_all = len(options) * len(places) <= _MOST_PAIRS
    some = list(places.values()) if is_all else list(places.values())[:: -(-len(places) // _FEW)]
    mine = {(option.pool, msgspec.structs.astuple(option.layout)): option for option in options}  # Swapped or not, it syncs alike.
    rows = {place: row for row, place in enumerate(mine)}
    found = np.empty((len(mine), 2 * len(some)))
    for i, option in enumerate(mine.values()):
        for j, other in enumerate(some):
            ends = (option, other) if engine == sync.source else (other, option)
            for is_turns in (False, True):
                found[i, 2 * j + is_turns] = problem.sync_s(sync, *ends, is_turns=is_turns)
    return found[[rows[option.pool, msgspec.structs.astuple(option.layout)] for option in options]], is_all
