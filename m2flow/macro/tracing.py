"""Record a flow's calls without doing any: what `m2flow plan` and the start of a run look at.

The flow runs for `steps` steps. Where it observes a value, the trace ends there, unless the value is assumed: what comes after
might depend on it, and the graph says at which line that is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from m2flow.errors import TraceError
from m2flow.macro.flow import Flow, seed_everything
from m2flow.macro.graph import Call, MacroGraph, Observation
from m2flow.macro.session import Backend, Session, recording
from m2flow.recipe import Model


class _Observed(BaseException):
    """The flow looked at a value that nobody has computed."""


class TracingBackend(Backend):
    """Keeps the calls."""

    def __init__(self, assumed: float | None = None) -> None:
        self.calls: list[Call] = []
        self.observations: list[Observation] = []
        self.num_steps = 0
        self._assumed = assumed

    def submit(self, call: Call) -> None:
        self.calls.append(call)

    def value(self, ordinal: int) -> object:
        call = next(call for call in self.calls if call.ordinal == ordinal)
        if call.engine == "source":
            return call.options["rows"]
        if "expected" in call.options:
            return call.options["expected"]
        if self._assumed is None or call.is_aligned:
            raise _Observed
        return _Assumed(self._assumed) if call.engine == "train" else self._assumed

    def observed(self, observation: Observation) -> None:
        self.observations.append(observation)

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        pass

    def release(self, ordinal: int) -> None:
        pass

    def end_step(self, step: int) -> None:
        self.num_steps += 1

    def finish(self) -> None:
        pass


class _Assumed(dict[str, float]):
    """Metrics of which each has the assumed value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> float:
        return self._value


def trace(
    flow: Flow, options: Mapping[str, object], *, steps: int = 1, seed: int = 0, assume: float | None = None
) -> tuple[MacroGraph, dict[str, Model], int]:
    """The graph of a flow's first steps, the models of its roles, and how many steps it would have in all.

    Raises:
        FlowError: what the flow itself does wrong. An observation is no error: the graph ends there.
    """

    backend = TracingBackend(assume)
    seed_everything(seed)
    session = Session(backend, flow=flow.name, seed=seed, max_steps=steps, staleness=flow.staleness_for(options))
    with recording(session), contextlib.suppress(_Observed):
        flow.function(**options)
        session.finish()
    if not backend.calls:
        raise TraceError(f"the flow {flow.name} makes no call", now="Its body should generate, score or update something.")
    return MacroGraph(flow.name, tuple(backend.calls), tuple(backend.observations)).verify(), dict(session.models), session.num_steps
