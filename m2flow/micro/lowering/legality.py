"""First pass: on what unit may each call be run, and which calls are barriers?

    MacroGraph --legality--> Stages without a place

A call may be chunked down to its declared granularity and no further. An update adds up gradients group by group (advantages
need whole groups) and steps at the end of its mini-batch, so it is no barrier although it is declared on a batch. A function
on a batch is one, and so is one that writes a resource: it takes its units in the order of identity.

A schedule gives the sequential answer because of these rules (kept by the files in brackets):

- a task of a call has whole units of its granularity, never a part of one (`function_desk`, `tracking`);
- an update, whose advantages compare siblings, adds up whole groups (`tracking`, `updating`);
- what is declared on a batch starts when all of its rows are there (`tracking`);
- which rows are a mini-batch goes by identity, and is fixed before the first is there (`updating`, `tracking`);
- a read of a resource waits for the write of the version that it reads (`board.add_call`);
- a write waits for the earlier reads of what it replaces (`board.reads_before`, `train_desk`), and for the write before it;
- a call ends after all that it waits for, also one that turns out to have no rows: who waits for it waits for those (`board._may_go`);
- a rollout engine samples for a call only with a version that the call may use (`rollout_desk`);
- a trainer replaces weights only after every engine that must sample from them has taken them (`rollout_desk.needs_loading`);
- rows are forgotten when neither the program nor a call can ask for them (`board.forget_unreachable`);
- a refill judges whole groups, in which the earliest failing sample counts (`refilling`).

`tests/test_legality.py` breaks each of them, and sees a wrong answer.
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
