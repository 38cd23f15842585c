"""Trace a flow: record its calls without executing any, on one path or on both outcomes of each condition on an unknown value.

    flow --traced again for each path--> ExploredPath, ... --> Exploration

`trace` runs the flow for `steps` steps. What it sees where it looks at a value is for `Answers` to say; where they don't know, the trace
ends: what comes after might depend on the value, and the graph says at which line that is.

`explore` follows several paths. What the flow sees is, in this order: assumed (`--assume`), taken from an earlier run's record (`--from`),
or an `Unknown` number, whose comparisons fork the path. Paths are taken breadth first, up to a bound, so that what lies near the start is
explored on all sides; the first path answers every question with no.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

from m2flow.errors import FlowError, OptionError, TraceError, described
from m2flow.macro.flow import Flow, seed_everything
from m2flow.macro.graph import Call, MacroGraph, Observation, Site, assigned_name, user_site
from m2flow.macro.number import Decider, PathFacts, Unknown, exploring_floats
from m2flow.macro.replay import Record, prints_muted
from m2flow.macro.session import Backend, Session, recording
from m2flow.recipe import Model
from m2flow.samples import Batch, make_ids


class EndOfTrace(BaseException):
    """The trace ends here. Not an `Exception`, so that no flow catches it by accident."""


class Answers(ABC):
    """What a traced flow sees when it looks at a value."""

    is_cut = False
    """The trace was ended elsewhere than at a value."""

    @abstractmethod
    def value(self, call: Call, observation: Observation, calls: Sequence[Call]) -> object:
        """The value of a call among those so far. Raises `EndOfTrace` if it is not known."""


class TracingBackend(Backend):
    """Collect the calls of a trace."""

    is_rehearsal = True

    def __init__(self, answers: Answers | None = None) -> None:
        self.calls: list[Call] = []
        self.observations: list[Observation] = []
        self.is_cut = False
        """A value was needed that is not known."""
        self._answers = answers or _Assumed(None)

    def submit(self, call: Call) -> None:
        self.calls.append(call)

    def value(self, ordinal: int) -> object:
        call = self.calls[ordinal]
        if call.engine == "source":
            return call.options["rows"]
        if "expected" in call.options:
            return call.options["expected"]
        try:
            return self._answers.value(call, self.observations[-1], self.calls)
        except EndOfTrace:
            self.is_cut = True
            raise

    @property
    def has_ended(self) -> bool:
        return self.is_cut or self._answers.is_cut

    def graph(self, flow: Flow) -> MacroGraph:
        """The calls so far, checked."""
        return MacroGraph(flow.name, tuple(self.calls), tuple(self.observations), self.is_cut).verify()

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
    """Metrics whose names are not known yet: each value is what `ask` returns for its name."""

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
    """Answer every look with the same number; None: nothing is known."""

    def __init__(self, number: float | None) -> None:
        self._number = number

    def value(self, call: Call, observation: Observation, calls: Sequence[Call]) -> object:
        number = self._number
        if number is None or call.is_aligned or len(calls) > _MOST_ASSUMED:
            raise EndOfTrace
        return Numbers(lambda name: number) if call.has_names else number


def run_traced(flow: Flow, options: Mapping[str, object], backend: TracingBackend, *, steps: int, seed: int) -> Session:
    """Run a flow's first steps into a backend that may end it."""
    seed_everything(seed)
    session = Session(backend, flow=flow.name, seed=seed, max_steps=steps, staleness=flow.staleness_for(options))
    with recording(session), contextlib.suppress(EndOfTrace):
        try:
            flow.function(**options)
        except Exception:
            if not backend.has_ended:  # A library may turn the end of the trace into an error of its own, as torch.tensor(rewards) does.
                raise
        else:
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
    return backend.graph(flow), dict(session.models), session.num_steps


# ---- known values


@dataclass(frozen=True)
class Assumption:
    """`--assume NUMBER`, `--assume NAME=NUMBER` or `--assume FILE:LINE=NUMBER`."""

    value: float
    name: str = ""
    line: str = ""

    @classmethod
    def parse(cls, text: str) -> Assumption:
        """Raises OptionError: the text is none."""
        target, _, number = text.rpartition("=")
        try:
            value = float({"true": "1", "false": "0"}.get(number.strip().lower(), number))
        except ValueError:
            raise OptionError(f"--assume {text}: {number!r} is no number", now="Write 0.5, reward=0.5 or flows/x.py:31=0.5.") from None
        is_line = target.rpartition(":")[2].isdigit()
        return cls(value, "" if is_line else target.strip(), target.strip() if is_line else "")

    def holds_for(self, names: Sequence[str], site: Site) -> bool:
        if self.line:
            return f"/{site}".endswith(f"/{self.line.removeprefix('./')}")
        return not self.name or self.name in names

    def __str__(self) -> str:
        target = self.name or self.line
        return f"--assume {target}={self.value:g}" if target else f"--assume {self.value:g}"


@dataclass(frozen=True)
class KnownValues:
    """Values that are known before a flow is explored: assumptions, and an earlier run's record."""

    assumptions: Sequence[Assumption] = ()
    record: Record | None = None
    record_name: str = "the earlier run"


class Earlier:
    """Results of calls at the same place of the program in an earlier run."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._places: dict[tuple[str, str, int], list[int]] = {}
        for call in record.calls:
            self._places.setdefault((call.name, call.text, call.step), []).append(call.ordinal)

    def value(self, call: Call, calls: Sequence[Call]) -> object:
        """None if it has none."""
        place = (call.name, call.site.text, call.step)
        count = sum((other.name, other.site.text, other.step) == place for other in calls[: call.ordinal])
        there = self._places.get(place, [])
        with contextlib.suppress(KeyError):
            return self._record.value(there[count]) if count < len(there) else None
        return None


def num_rows(call: Call, calls: Sequence[Call]) -> int | None:
    """Rows of a call's result, where that is known without running it."""
    rows = call.options.get("rows")
    if isinstance(rows, Batch):
        return len(rows)
    if not call.inputs or call.options.get("gives") in ("kept", "concat"):
        return None
    base, n = num_rows(calls[call.inputs[0][1].call], calls), call.options.get("n", 1)
    return base * n if base is not None and isinstance(n, int) and call.engine in ("rollout", "function", "train") else None


# ---- exploring several paths

MAX_PATHS = 16
MAX_FORKS = 8
"""Questions on one path."""
MAX_TURNS = 3
"""Questions at one line in one step: a loop that goes on until a value is right is followed for so many iterations."""
MAX_CALLS = 20_000
MOST_ASKED = 1_000
"""Conditions that are answered along the path that a plan is made for."""
_NOMINAL = 0.5
"""What an unknown number is where Python needs a plain one."""


@dataclass(frozen=True)
class Look:
    """A look at a value on a path, and where that value came from."""

    observation: Observation
    num_calls: int
    """Calls made before it."""
    sources: list[str] = field(default_factory=list)
    """`explored`, `0.5 by --assume reward=0.5`, `0.53 from runs/x`; grows as the program reads fields of the value."""


@dataclass(frozen=True)
class Fork:
    """A condition on an unknown value, and its outcome on one path."""

    question: str
    site: Site
    num_calls: int
    outcome: bool


@dataclass(frozen=True)
class ExploredPath:
    """One way through the flow."""

    graph: MacroGraph
    forks: tuple[Fork, ...]
    looks: tuple[Look, ...]
    end: Literal["end", "unknown rows", "bound", "error"]
    error: str = ""


@dataclass(frozen=True)
class Exploration:
    """The paths that were taken; the first answers every question with no."""

    paths: tuple[ExploredPath, ...]
    models: Mapping[str, Model]
    num_steps: int
    num_left: int
    """Outcomes that were not followed, for the bound."""

    @property
    def longest(self) -> ExploredPath:
        """The path with the most calls: what the plan is made for."""
        return max(self.paths, key=lambda path: len(path.graph.calls))


class Explorer(Answers, Decider):
    """Answer on one path: the given outcomes first, then the outcome of the step before at the same place, then no."""

    def __init__(self, known: KnownValues, outcomes: Sequence[bool], max_forks: int) -> None:
        self.forks: list[Fork] = []
        self.looks: list[Look] = []
        self.is_cut = False
        self._assumptions = known.assumptions
        self._earlier = Earlier(known.record) if known.record is not None else None
        self._record_name = known.record_name
        self._outcomes = outcomes
        self._max_forks = max_forks
        self._facts = PathFacts(self)
        self._by_text: dict[str, Unknown] = {}
        self._num_calls = 0
        self._step = -1
        self._names: dict[int, str] = {}
        self._turns: dict[tuple[Site, int], int] = {}
        self._said: dict[tuple[Site, int], bool] = {}

    def value(self, call: Call, observation: Observation, calls: Sequence[Call]) -> object:
        look = Look(observation, len(calls))
        self.looks.append(look)
        self._num_calls = len(calls)
        name = self._name(call)
        found = self._earlier.value(call, calls) if self._earlier is not None else None
        if call.is_aligned:
            return self._rows(call, observation, calls, look, found)
        if call.has_names:
            known = found if isinstance(found, dict) else {}
            return Numbers(lambda field: self._number(look, f"{name}[{field!r}]", [field, call.role, name], known.get(field)))
        return self._number(look, name, [call.role, name], found)

    def _number(self, look: Look, text: str, names: Sequence[str], found: object) -> float:
        assumed = next((a for a in reversed(self._assumptions) if a.holds_for(names, look.observation.site)), None)
        if assumed is not None:
            _note(look, f"{text} is {assumed.value:g}, by {assumed}")
            return assumed.value
        if isinstance(found, int | float):
            _note(look, f"{text} was {found:.4g} in {self._record_name}")
            return found
        if isinstance(found, str):
            _note(look, f"{text} was {found!r:.40} in {self._record_name}")
            return found  # type: ignore[return-value]
        _note(look, f"{text} is not known")
        text = f"%{text}"
        if text not in self._by_text:
            self._by_text[text] = Unknown(_NOMINAL, text, self._facts)
        return self._by_text[text]

    def _name(self, call: Call) -> str:
        """The variable that a call is assigned to; made unique, since what is known of a number goes by its name."""
        if call.ordinal not in self._names:
            name = assigned_name(call.site.text) or call.role
            self._names[call.ordinal] = name if name not in self._names.values() else f"{name}.{call.ordinal}"
        return self._names[call.ordinal]

    def _rows(self, call: Call, observation: Observation, calls: Sequence[Call], look: Look, found: object) -> Batch:
        if isinstance(found, Batch):
            _note(look, f"its {len(found)} rows are those of {self._record_name}")
            return found
        count = num_rows(call, calls) if observation.why == "len()" else None
        if count is None:
            _note(look, "its rows are not known, and a path can't be tried for each: the trace ends here")
            raise EndOfTrace
        _note(look, f"it has {count} rows, whatever they are")
        return Batch(make_ids(call.ordinal, count))

    def decide(self, question: str) -> bool:
        position, site = len(self.forks), user_site()
        turn = self._turns[site, self._step] = self._turns.get((site, self._step), 0) + 1
        if position >= self._max_forks or turn > min(MAX_TURNS, self._max_forks):
            self._cut()
        outcome = self._outcomes[position] if position < len(self._outcomes) else self._said.get((site, turn), False)
        self._said[site, turn] = outcome
        self.forks.append(Fork(question, site, self._num_calls, outcome))
        return outcome

    def submitted(self, call: Call) -> None:
        """Note that the path has one more call."""
        self._num_calls, self._step = call.ordinal + 1, call.step
        if self._num_calls > MAX_CALLS:
            self._cut()

    def _cut(self) -> NoReturn:
        self.is_cut = True
        raise EndOfTrace


class _Counting(TracingBackend):
    """A tracing backend that tells the explorer how far the path is."""

    def __init__(self, explorer: Explorer) -> None:
        super().__init__(explorer)
        self._explorer = explorer

    def submit(self, call: Call) -> None:
        super().submit(call)
        self._explorer.submitted(call)


@dataclass(frozen=True)
class FollowedPath:
    """A path that was followed, with the flow's models and steps on it."""

    path: ExploredPath
    models: Mapping[str, Model]
    num_steps: int
    error: FlowError | None


def follow(
    flow: Flow,
    options: Mapping[str, object],
    outcomes: Sequence[bool],
    *,
    steps: int = 1,
    seed: int = 0,
    known: KnownValues | None = None,
    max_forks: int = MAX_FORKS,
) -> FollowedPath:
    """Follow one path: these outcomes of its first conditions; later ones as in the step before, or no."""
    explorer = Explorer(known or KnownValues(), outcomes, max_forks)
    backend = _Counting(explorer)
    session: Session | None = None
    error: FlowError | None = None
    try:
        with exploring_floats(flow.function.__globals__), prints_muted():
            session = run_traced(flow, options, backend, steps=steps, seed=seed)
    except FlowError as raised:
        error = raised
    graph = backend.graph(flow)
    path = _path(graph, explorer, error)
    return FollowedPath(path, dict(session.models) if session else {}, session.num_steps if session else 0, error)


def explore(
    flow: Flow,
    options: Mapping[str, object],
    *,
    steps: int = 1,
    seed: int = 0,
    known: KnownValues | None = None,
    max_paths: int = MAX_PATHS,
    max_forks: int = MAX_FORKS,
) -> Exploration:
    """Explore every path through a flow's first steps that conditions on unknown values leave open. Runs no engine.

    Raises:
        FlowError: what the flow does wrong on every path. On one of several it is reported as that path's end.
    """
    followed: list[FollowedPath] = []
    todo: deque[tuple[bool, ...]] = deque([()])
    while todo and len(followed) < max_paths:
        outcomes = todo.popleft()
        followed.append(follow(flow, options, outcomes, steps=steps, seed=seed, known=known, max_forks=max_forks))
        taken = [fork.outcome for fork in followed[-1].path.forks]
        todo += [(*taken[:position], not taken[position]) for position in range(len(outcomes), len(taken))]
    good = [one for one in followed if one.error is None]
    if not good and followed[0].error is not None:
        raise followed[0].error
    if not any(one.path.graph.calls for one in good):
        raise TraceError(f"the flow {flow.name} makes no call", now="Its body should generate, score or update something.")
    most = max(one.num_steps for one in good)
    models = {role: model for one in reversed(good) for role, model in one.models.items()}
    return Exploration(tuple(one.path for one in followed), models, most, len(todo))


# ---- copies of roles, and planning ahead


@dataclass(frozen=True)
class Copies:
    """Roles that take the weights of another, wherever the flow makes them: `Reference(policy)`, `Critic(policy)`."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Role -> whose weights it takes."""
    models: Mapping[str, Model] = field(default_factory=dict)


def copies_made(
    flow: Flow,
    options: Mapping[str, object],
    *,
    num_steps: int,
    seed: int = 0,
    known: KnownValues | None = None,
    exploration: Exploration | None = None,
) -> Copies:
    """Find the copies that a flow makes in a later step or in a branch, where a trace of its first steps does not come: all steps are
    followed, up to `MAX_CALLS`, and both outcomes of the first one's conditions. Flows whose text has none there are not followed.

    Limits: what is made only where an unknown value decides so in a later step, or after a look at rows, is not found; the run then
    refuses it at its line.
    """
    if not makes_copies_inside(flow.function):
        return Copies()
    with contextlib.suppress(FlowError):
        exploration = exploration or explore(flow, options, seed=seed, known=known)
        outcomes = [fork.outcome for fork in exploration.longest.forks]
        whole = follow(flow, options, outcomes, steps=num_steps, seed=seed, known=known, max_forks=MOST_ASKED)
        made = [call for path in (*exploration.paths, whole.path) for call in path.graph.calls if call.method == "copy_of"]
        sources = {call.role: str(call.options["source"]) for call in made}
        models = {**exploration.models, **whole.models}
        return Copies(sources, {role: models[role] for role in sources if role in models})
    return Copies()


_COPIES = frozenset({"Reference", "Critic"})
_INSIDE = (
    ast.For,
    ast.While,
    ast.If,
    ast.IfExp,
    ast.Try,
    ast.With,
    ast.ListComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.FunctionDef,
    ast.Lambda,
)


def makes_copies_inside(function: Callable[..., object]) -> bool:
    """Whether a flow's source makes a `Reference` or a `Critic` elsewhere than at the beginning of the function's own lines: in a loop, a
    branch, a helper. Where the text can't be had, whether it names one."""
    plain = inspect.unwrap(function)
    if not isinstance(plain, types.FunctionType):
        return True
    names = plain.__globals__
    helpers = [names[name] for name in _names_in(plain.__code__) if isinstance(names.get(name), types.FunctionType)]
    if any(_names_copy(helper.__code__, helper.__globals__) for helper in helpers):
        return True
    if not _names_copy(plain.__code__, names):
        return False
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(plain))).body
    except (OSError, SyntaxError, ValueError):
        return True
    inner = [node for node in ast.walk(tree) if isinstance(node, _INSIDE) and node is not tree]
    called = [call.func for node in inner for call in ast.walk(node) if isinstance(call, ast.Call)]
    return any(_is_copy(names, each.id) for each in called if isinstance(each, ast.Name)) or any(
        each.attr in _COPIES for each in called if isinstance(each, ast.Attribute)
    )


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)


def _names_copy(code: types.CodeType, names: Mapping[str, object]) -> bool:
    return any(_is_copy(names, name) for name in _names_in(code))


def _is_copy(names: Mapping[str, object], name: str) -> bool:
    return getattr(names.get(name), "__name__", name) in _COPIES


def anticipate(
    flow: Flow, options: Mapping[str, object], exploration: Exploration, *, steps: int, seed: int = 0, known: KnownValues | None = None
) -> MacroGraph:
    """The calls of so many steps that a plan should have room for: those of the path with the most. A line that waits is reported once."""
    outcomes = [fork.outcome for fork in exploration.longest.forks]
    whole = follow(flow, options, outcomes, steps=steps, seed=seed, known=known, max_forks=MOST_ASKED).path.graph
    once = {(seen.site, seen.why): seen for seen in reversed(whole.observations)}  # At its first iteration.
    return replace(whole, observations=tuple(reversed(once.values())))


def _path(graph: MacroGraph, explorer: Explorer, error: FlowError | None) -> ExploredPath:
    end: Literal["end", "unknown rows", "bound", "error"] = "end"
    if error is not None:
        end = "error"
    elif explorer.is_cut:
        end = "bound"
    elif explorer.looks and any("the trace ends here" in source for source in explorer.looks[-1].sources):
        end = "unknown rows"
    return ExploredPath(graph, tuple(explorer.forks), tuple(explorer.looks), end, described(error) if error else "")


def _note(look: Look, source: str) -> None:
    if source not in look.sources:
        look.sources.append(source)
