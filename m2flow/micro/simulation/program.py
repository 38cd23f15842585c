"""A flow's calls as a run would meet them: in program order, with the places where Python waits, and where it lets go of a result.

    Flow --(run with the answers of `macro.exploring`)--> Program: Made, Waits, Left, StepEnd, ...

The flow runs once, before the simulation, along one path: what it sees of values that nobody has computed is what `m2flow plan`
shows (assumed, from an earlier run, or each condition answered with no). Limit: it ends where the flow looks at rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m2flow.errors import TraceError
from m2flow.macro.exploring import MOST_ASKED, Explorer
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.known import Known
from m2flow.macro.replay import prints_muted
from m2flow.macro.tracing import TracingBackend, run_traced
from m2flow.macro.unknown import floats_found
from m2flow.recipe import Model


@dataclass(frozen=True)
class Made:
    """The program makes a call."""

    call: Call


@dataclass(frozen=True)
class Waits:
    """The program looks at a call's result, and goes on when it is there."""

    call: int
    is_shown: bool
    """It has rows, which come to the program."""


@dataclass(frozen=True)
class Left:
    """The program can't reach a call's result any more."""

    call: int


@dataclass(frozen=True)
class StepEnd:
    """The calls of a step are all made."""

    step: int


Item = Made | Waits | Left | StepEnd


@dataclass(frozen=True)
class Program:
    """One path through a flow."""

    flow: str
    staleness: int
    items: tuple[Item, ...]
    models: Mapping[str, Model]
    num_steps: int
    """Of the flow; fewer may have been followed."""
    graph: MacroGraph


class _Following(TracingBackend):
    """Keeps what the program does, in its order."""

    def __init__(self, explorer: Explorer) -> None:
        super().__init__(explorer)
        self._explorer = explorer
        self.items: list[Item] = []

    def submit(self, call: Call) -> None:
        super().submit(call)
        self.items.append(Made(call))
        self._explorer.submitted(call)

    def value(self, ordinal: int) -> object:
        call = self.calls[ordinal]
        self.items.append(Waits(ordinal, is_shown=call.is_aligned))
        return super().value(ordinal)

    def release(self, ordinal: int) -> None:
        self.items.append(Left(ordinal))

    def end_step(self, step: int) -> None:
        self.items.append(StepEnd(step))


def follow_program(
    flow: Flow,
    options: Mapping[str, object],
    *,
    steps: int,
    seed: int = 0,
    known: Known | None = None,
    outcomes: Sequence[bool] = (),
) -> Program:
    """The first steps of a flow.

    Args:
        outcomes: of its first conditions on unknown values; no to all later ones.
    Raises:
        FlowError: what the flow does wrong. TraceError: it makes no call.
    """
    backend = _Following(Explorer(known or Known(), outcomes, MOST_ASKED))
    with floats_found(flow.function.__globals__), prints_muted():
        session = run_traced(flow, options, backend, steps=steps, seed=seed)
    if not backend.calls:
        raise TraceError(f"the flow {flow.name} makes no call", now="Its body should generate, score or update something.")
    graph = MacroGraph(flow.name, tuple(backend.calls), tuple(backend.observations)).verify()
    return Program(flow.name, flow.staleness_for(options), tuple(backend.items), dict(session.models), session.num_steps, graph)
