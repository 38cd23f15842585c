"""Record a flow's calls without doing any: what `m2flow plan` and the start of a run look at.

The flow runs for `steps` steps. What it sees where it looks at a value is for `Answers` to say; where they don't know, the trace
ends: what comes after might depend on it, and the graph says at which line that is.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from m2flow.errors import TraceError
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph, Observation
from m2flow.macro.randomness import seed_everything
from m2flow.macro.session import Backend, Session, recording
from m2flow.recipe import Model


class EndOfTrace(BaseException):
    """The trace goes no further. Not an `Exception`, so that no flow catches it by accident."""


class Answers(ABC):
    """What a flow sees when it looks at a value that nobody has computed."""

    @abstractmethod
    def value(self, call: Call, observation: Observation, calls: Sequence[Call]) -> object:
        """Of a call among those so far; `EndOfTrace` if it can't be said."""


class TracingBackend(Backend):
    """Keeps the calls."""

    is_rehearsal = True

    def __init__(self, answers: Answers | None = None) -> None:
        self.calls: list[Call] = []
        self.observations: list[Observation] = []
        self._answers = answers or _Assumed(None)

    def submit(self, call: Call) -> None:
        self.calls.append(call)

    def value(self, ordinal: int) -> object:
        call = self.calls[ordinal]
        if call.engine == "source":
            return call.options["rows"]
        if "expected" in call.options:
            return call.options["expected"]
        return self._answers.value(call, self.observations[-1], self.calls)

    def observed(self, observation: Observation) -> None:
        self.observations.append(observation)

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        pass

    def release(self, ordinal: int) -> None:
        pass

    def end_step(self, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


class Numbers(dict[str, float]):
    """Metrics whose names nobody knows yet: each is what `ask` says of its name."""

    def __init__(self, ask: Callable[[str], float]) -> None:
        super().__init__()
        self._ask = ask

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> float:
        return self._ask(name)

    def get(self, name: str, default: object = None) -> float:
        return self._ask(name)


_MOST_ASSUMED = 5_000
"""Calls after which nothing is assumed any more: `while score < 0.5` on an assumed 0 would go on for ever."""


class _Assumed(Answers):
    """Every number is the same; None: nothing is known."""

    def __init__(self, number: float | None) -> None:
        self._number = number

    def value(self, call: Call, observation: Observation, calls: Sequence[Call]) -> object:
        number = self._number
        if number is None or call.is_aligned or len(calls) > _MOST_ASSUMED:
            raise EndOfTrace
        return Numbers(lambda name: number) if call.has_names else number


def run_traced(flow: Flow, options: Mapping[str, object], backend: Backend, *, steps: int, seed: int) -> Session:
    """Run a flow's first steps into a backend that may end it."""
    seed_everything(seed)
    session = Session(backend, flow=flow.name, seed=seed, max_steps=steps, staleness=flow.staleness_for(options))
    with recording(session), contextlib.suppress(EndOfTrace):
        flow.function(**options)
        session.finish()
    return session


def trace(
    flow: Flow, options: Mapping[str, object], *, steps: int = 1, seed: int = 0, assume: float | Answers | None = None
) -> tuple[MacroGraph, dict[str, Model], int]:
    """The graph of a flow's first steps, the models of its roles, and how many steps it would have in all.

    Args:
        assume: what every number is that the flow looks at, or what knows them better.
    Raises:
        FlowError: what the flow itself does wrong. An observation is no error: the graph ends there.
    """

    backend = TracingBackend(assume if isinstance(assume, Answers) else _Assumed(assume))
    session = run_traced(flow, options, backend, steps=steps, seed=seed)
    if not backend.calls:
        raise TraceError(f"the flow {flow.name} makes no call", now="Its body should generate, score or update something.")
    return MacroGraph(flow.name, tuple(backend.calls), tuple(backend.observations)).verify(), dict(session.models), session.num_steps
