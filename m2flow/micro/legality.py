"""First pass: on what unit may each call be run, and which calls are barriers?

    MacroGraph --legality--> Stages without a place

A call may be chunked down to its declared granularity and no further. An update adds up gradients group by group (advantages
need whole groups) and steps at the end of its mini-batch, so it is no barrier although it is declared on a batch. A function
on a batch is one, and so is one that writes a resource: it takes its units in the order of identity.
"""

from __future__ import annotations

from typing import Literal

from m2flow.errors import PlanError
from m2flow.macro.graph import Call, Granularity, MacroGraph
from m2flow.micro.plan import Stage


def legal_stages(graph: MacroGraph) -> tuple[Stage, ...]:
    """One stage a call, in program order."""
    return tuple(_stage(call) for call in graph.calls)


def _stage(call: Call) -> Stage:
    unit = call.granularity
    name: Literal["sample", "group", "minibatch", "batch"] = unit.value
    if call.is_gated and call.engine == "function":
        name = "group"  # A refill keeps or rejects whole groups, and an error in one that was not needed must not count.
    if call.engine == "train" and call.method == "update":
        if not call.writes:
            raise PlanError(f"{call.name} declares no write, so nothing would order what comes after it", where=call.site.describe())
        return Stage(call.name, call.engine, name, is_barrier=False)
    if unit is Granularity.MINIBATCH and not call.options.get("minibatch_size"):
        raise PlanError(f"{call.name} runs on mini-batches and does not say of how many prompts", where=call.site.describe())
    is_barrier = unit is Granularity.BATCH or (call.engine == "function" and bool(call.writes))
    return Stage(call.name, call.engine, name, is_barrier=is_barrier, state=str(call.options.get("state", "")))


def accumulation_unit(call: Call) -> Granularity:
    """The unit on which an update may add up gradients: groups where advantages compare siblings, else samples."""
    return Granularity.GROUP if call.options.get("advantages") else Granularity.SAMPLE
