"""Failures as a command line names them: a node of a pool, or a worker, and when."""

from __future__ import annotations

import math
from collections.abc import Mapping

from m2flow.errors import OptionError
from m2flow.micro.plan_text import names_text
from m2flow.micro.simulation.machines import Machine
from m2flow.micro.simulation.run import Failure
from m2flow.spec import ClusterSpec


def failure_of(text: str, machines: Mapping[str, Machine], spec: ClusterSpec) -> Failure:
    """`NODE@SECONDS`, `POOL:NODE@SECONDS` or `WORKER@SECONDS`, and `...-SECONDS` if it comes back; a node takes all workers with it that
    have a device there.

    Raises:
        OptionError: there is no such node or worker, or the text is none of these.
    """
    who, at, when = text.rpartition("@")
    from_text, is_back, until = when.partition("-")
    at_s, back_s = _seconds(from_text), _seconds(until) if is_back else math.inf
    if not at or math.isnan(at_s + back_s) or back_s < at_s or math.isinf(at_s):
        raise OptionError(
            f"--fail {text}: when?", now="Write --fail 3@120: node 3 after 120 seconds; --fail 3@120-150: it is back 30 seconds later."
        )
    back = None if math.isinf(back_s) else back_s
    if who in machines:
        return Failure(at_s, (who,), back)
    pool, _, node = who.rpartition(":")
    pool = pool or next(iter(spec.pools), "")
    if pool not in spec.pools or not node.isdigit() or int(node) >= spec.pools[pool].nodes:
        nodes = [f"{name}:0" + (f" to {name}:{found.nodes - 1}" if found.nodes > 1 else "") for name, found in spec.pools.items()]
        workers = names_text(machines)
        now = f"Nodes: {', '.join(nodes)}. Workers: {workers}." if nodes else f"There are {workers}."
        raise OptionError(f"--fail {text}: there is no node or worker {who!r}", now=now)
    first = int(node) * spec.pools[pool].devices_per_node
    stop = first + spec.pools[pool].devices_per_node
    found = [m.worker for m in machines.values() if m.place and m.pool == pool and m.place.first < stop and first < m.place.stop]
    return Failure(at_s, tuple(found), back)


def _seconds(text: str) -> float:
    """NaN: no number that could be one."""
    try:
        found = float(text)
    except ValueError:
        return math.nan
    return found if found >= 0 else math.nan
