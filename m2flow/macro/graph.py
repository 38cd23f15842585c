"""The macro graph: the calls of a flow, their inputs, and their effects on versioned resources.

    flow --(run under a recording session)--> MacroGraph --(m2flow.micro)--> Plan

A call is a node; edges are data (one call's result is another's input) or effects (a write of a versioned resource must follow or
precede another call on it). The graph is frozen data with a checker (`verify`) and a printed form; executing it is done elsewhere.

Sizes of results (`n`) and what kind of result a function gives are structure (`STRUCTURAL`). Functions, their captured values,
temperatures, token limits and versions are values: a flow that changes only those is planned once.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import msgspec

from m2flow.errors import TraceError
from m2flow.recipe import Episodes

if TYPE_CHECKING:
    import networkx as nx

STRUCTURAL = frozenset({"advantages", "by_group", "column", "epochs", "gives", "minibatch_size", "n", "refill", "source", "state", "style"})
"""The options that a lowering pass may read. Passes get calls without the others, so that none can be left out here by mistake."""

_IN_ORDER = tuple(sorted(STRUCTURAL))

Shape = tuple[object, ...]


def shape_of(call: Call) -> Shape:
    """The structure of a call by itself: equal shapes with equal consumers are lowered to equal stages."""
    options = call.options
    return (
        call.role,
        call.method,
        call.engine,
        call.granularity,
        call.is_aligned,
        tuple([name for name, _ in call.inputs]),
        tuple([effect.resource for effect in call.reads]),
        tuple([effect.resource for effect in call.writes]),
        tuple([(name, options[name]) for name in _IN_ORDER if name in options]),
    )


def wiring_of(call: Call, first: int) -> tuple[int, ...]:
    """The calls that a call's inputs come from, counted from the segment's first call; -1 for earlier segments."""
    return tuple([max(ref.call - first, -1) for _, ref in call.inputs])


def structure_hash(calls: Sequence[Call]) -> str:
    """Hash the structure of calls: the same in every process for calls of the same shapes, wiring and lines."""
    first = calls[0].ordinal if calls else 0
    text = "\n".join(f"{shape_of(call)!r} {wiring_of(call, first)} {stable_site(str(call.site))}" for call in calls)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def stable_site(site: str) -> str:
    """A site without the number of a notebook's cell, which is another one each time that the cell is run.

    >>> stable_site("In[3]:12"), stable_site("flows/grpo.py:12")
    ('In[]:12', 'flows/grpo.py:12')
    """
    file, _, line = site.rpartition(":")
    return f"In[]:{line}" if file.startswith("In[") and file.endswith("]") else site


class Granularity(StrEnum):
    """The smallest unit that a call may be run on."""

    SAMPLE = "sample"
    GROUP = "group"
    MINIBATCH = "minibatch"
    BATCH = "batch"


EngineKind = Literal["source", "rollout", "train", "function"]
"""What kind of engine performs a call; a `source` is a dataset, which the controller reads itself."""


@dataclass(frozen=True)
class Site:
    """The place in the user's program where a call was made."""

    file: str
    line: int
    text: str
    """The source line, stripped."""
    path: tuple[str, ...] = ()
    """The user's functions on the way there, outermost first: `flows/grpo.py:31 in evaluate`."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def describe(self) -> str:
        """Place and line, for an error's first line."""
        return f"{self}  {self.text}" + "".join(f"\n  called from {step}" for step in reversed(self.path))


class Ref(msgspec.Struct, frozen=True):
    """An input of a call: another call's result."""

    call: int


class Effect(msgspec.Struct, frozen=True, eq=False):
    """A resource at a version: read there, or written to it. Effects are equal if these are, whatever older versions would do."""

    resource: str
    version: int
    """The one that sequential execution has there."""
    oldest: int | None = None
    """Of a read that may be stale: the oldest version that will do; any from here to `version` may be read."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Effect) and (self.resource, self.version) == (other.resource, other.version)

    def __hash__(self) -> int:
        return hash((self.resource, self.version))

    @property
    def first(self) -> int:
        """The oldest version that will do."""
        return self.version if self.oldest is None else self.oldest

    def __str__(self) -> str:
        return f"{self.resource}@{self.version}" if self.first == self.version else f"{self.resource}@{self.first}..{self.version}"


@dataclass(frozen=True, eq=False)
class CallKind:
    """The common part of the calls that one place of the program makes (`m2flow.macro.capture`). Kinds compare by identity."""

    role: str
    method: str
    engine: EngineKind
    granularity: Granularity
    inputs: tuple[str, ...]
    options: Mapping[str, object]
    """Without those that change from call to call."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    site: Site
    is_aligned: bool


@dataclass(frozen=True)
class Call:
    """One invocation of a role's method or of an op."""

    ordinal: int
    """Position in program order, over the whole run."""
    role: str
    method: str
    engine: EngineKind
    granularity: Granularity
    inputs: tuple[tuple[str, Ref], ...]
    options: Mapping[str, object]
    """What the call was given besides handles: sampling, loss, optimiser, function, rows.

    Of a call on a function: `style` is `unit` (the user's, on a sample, a group or all) or `columns` (ours, on a `Batch` and the
    whole values among the inputs); `gives` is `column` (a value a row, under `column`), `rows` (a batch of the same samples), `kept`
    (which rows stay), `concat` (the rows of all inputs) or `table` (one value: a number by key); `columns` names for each input the
    column that is joined under its name.
    """
    reads: tuple[Effect, ...]
    writes: tuple[Effect, ...]
    site: Site
    step: int
    """-1 outside the flow's outermost iterator."""
    is_aligned: bool
    """The result has a row for each sample; otherwise it is one value."""
    shown: Mapping[str, object] = field(default_factory=dict)
    """The options as the user wrote them, for the printed form."""
    most_rows: int = 0
    """Rows that it gives, or has worked on if it gives one value; at most: a filter on the way leaves fewer."""
    most_candidates: int = 0
    """Rows that it begins, at most: more than it gives, of a refill and of an over-sampled generation."""
    kind: CallKind | None = field(default=None, init=False, repr=False, compare=False)
    """If a session recorded it: what it has in common with other calls of its place."""

    @classmethod
    def of(
        cls,
        kind: CallKind,
        ordinal: int,
        inputs: tuple[tuple[str, Ref], ...],
        options: Mapping[str, object],
        reads: tuple[Effect, ...],
        writes: tuple[Effect, ...],
        step: int,
        shown: Mapping[str, object],
        most_rows: int,
        most_candidates: int,
    ) -> Call:
        """A call of a kind. Written at once, since setting the fields of a frozen object one by one takes longer than all else."""
        call = cls.__new__(cls)
        call.__dict__.update(
            ordinal=ordinal,
            role=kind.role,
            method=kind.method,
            engine=kind.engine,
            granularity=kind.granularity,
            inputs=inputs,
            options=options,
            reads=reads,
            writes=writes,
            site=kind.site,
            step=step,
            is_aligned=kind.is_aligned,
            shown=shown,
            most_rows=most_rows,
            most_candidates=most_candidates,
            kind=kind,
        )
        return call

    @property
    def name(self) -> str:
        return f"{self.role}.{self.method}" if self.method else self.role

    @property
    def only_kind(self) -> CallKind:
        """Make a kind for a single call."""
        names = tuple(name for name, _ in self.inputs)
        reads, writes = tuple(e.resource for e in self.reads), tuple(e.resource for e in self.writes)
        return CallKind(
            self.role, self.method, self.engine, self.granularity, names, self.options, reads, writes, self.site, self.is_aligned
        )

    @property
    def speakers(self) -> tuple[str, ...]:
        """Of a call on rollout engines: the roles that it samples from. Its own is the first; others may speak in its episodes."""
        bounds = self.options.get("episodes")
        return (self.role, *dict.fromkeys(role for _, role in bounds.speakers)) if isinstance(bounds, Episodes) else (self.role,)

    def weights_of(self, role: str) -> Effect | None:
        """The versions of a role's weights that it reads; None: it reads none of them."""
        if len(self.reads) < 2 and role == self.role:
            return self.reads[0] if self.reads else None
        return next((effect for effect in self.reads if effect.resource == f"{role}.weights"), None)

    @property
    def drops(self) -> bool:
        """Whether the call itself decides which of its rows stay."""
        return self.options.get("gives") == "kept"

    @property
    def is_gated(self) -> bool:
        """Whether it is part of a refill (`m2flow.macro.refill`): it works on candidates, as many as are needed."""
        return "refill" in self.options

    @property
    def under_refill(self) -> tuple[int, ...]:
        """Of the call that keeps a refill's groups: the calls that made its candidates. Their results count only if this call succeeds."""
        return tuple([ref.call for _, ref in self.inputs]) if self.is_gated and self.drops else ()

    @property
    def carries_from(self) -> int | None:
        """The call whose late samples it takes over (`m2flow.macro.oversampling`): the previous one of its line."""
        found = self.options.get("carries_from")
        return found if isinstance(found, int) else None

    @property
    def has_names(self) -> bool:
        """Its one value is numbers by name: the metrics of an update, the numbers of keys."""
        return self.engine == "train" or self.options.get("gives") == "table"

    def input(self, name: str) -> Ref | None:
        return next((ref for key, ref in self.inputs if key == name), None)


@dataclass(frozen=True)
class Observation:
    """A point where Python waits for a value."""

    call: int
    site: Site
    why: str
    """What the program did with the handle: `float()`, `len()`, a loop."""
    step: int = -1
    """The step that Python was in."""
    lag: int = 0
    """Steps ago that the value is from: `lagged(2)` waits for what is most likely done."""


@dataclass(frozen=True)
class MacroGraph:
    """Calls in program order, and the observations among them."""

    flow: str
    calls: tuple[Call, ...]
    observations: tuple[Observation, ...] = ()
    is_cut: bool = False
    """It ends where a value is needed that is not known; the flow makes more calls."""

    def verify(self) -> MacroGraph:
        """The graph itself, checked: inputs exist and come earlier, versions of a resource grow one by one."""
        seen: set[int] = set()
        written: dict[str, int] = {}
        for call in self.calls:
            for name, ref in call.inputs:
                if ref.call not in seen:
                    raise TraceError(
                        f"{call.name} uses call {ref.call} as {name!r}, which this graph does not have before it",
                        where=call.site.describe(),
                        now="Most likely the handle comes from another flow or an earlier run.",
                    )
            for effect in call.writes:
                if effect.resource in written and effect.version != written[effect.resource] + 1:
                    raise TraceError(f"{call.name} writes {effect} after {written[effect.resource]}", where=call.site.describe())
                written[effect.resource] = effect.version
            seen.add(call.ordinal)
        return self

    def digraph(self) -> nx.DiGraph:
        """Nodes are ordinals; each edge has `kind`, `data` or `effect`, and a `label`."""
        import networkx as nx  # a quarter of the time that `m2flow --help` would take

        graph = nx.DiGraph()
        readers: dict[Effect, list[int]] = {}
        writers: dict[Effect, int] = {}
        for call in self.calls:
            graph.add_node(call.ordinal, call=call)
            for effect in call.reads:
                needed = Effect(effect.resource, effect.first)
                if needed in writers:
                    graph.add_edge(writers[needed], call.ordinal, kind="effect", label=str(effect))
                readers.setdefault(effect, []).append(call.ordinal)
            for effect in call.writes:
                before = Effect(effect.resource, effect.version - 1)
                for reader in readers.get(before, []):
                    if reader != call.ordinal:
                        graph.add_edge(reader, call.ordinal, kind="effect", label=str(before))
                if before in writers:
                    graph.add_edge(writers[before], call.ordinal, kind="effect", label=str(before))
                writers[effect] = call.ordinal
            for name, ref in call.inputs:
                graph.add_edge(ref.call, call.ordinal, kind="data", label=name)
            if call.carries_from is not None and call.carries_from in graph:
                graph.add_edge(call.carries_from, call.ordinal, kind="data", label="late")
        return graph

    def first_steps(self, count: int) -> MacroGraph:
        """The calls of the first steps and those outside the loop, as far as they do not need a later step's."""
        kept: list[Call] = []
        known: set[int] = set()
        for call in self.calls:
            if call.step < count and all(ref.call in known for _, ref in call.inputs):
                kept.append(call)
                known.add(call.ordinal)
        return MacroGraph(self.flow, tuple(kept), tuple(seen for seen in self.observations if seen.call in known))

    def consumers(self, ordinal: int) -> Sequence[Call]:
        """The calls that take this one's result, in program order."""
        return self._consumers.get(ordinal, ())

    @cached_property
    def _consumers(self) -> dict[int, list[Call]]:
        found: dict[int, list[Call]] = {}
        for call in self.calls:
            for ordinal in dict.fromkeys(ref.call for _, ref in call.inputs):
                found.setdefault(ordinal, []).append(call)
        return found

    @property
    def staleness(self) -> int:
        """Versions that a generate call of this graph may be behind, at most."""
        declared = (call.options.get("staleness", 0) for call in self.calls)
        return max((versions for versions in declared if isinstance(versions, int)), default=0)

    def structure_hash(self) -> str:
        """Equal for segments that may share a lowering: the calls' shape and relative wiring, not their values or versions."""
        return structure_hash(self.calls)

    def __str__(self) -> str:
        names = self.names()
        rows = [self.row(call, names) for call in self.calls]
        lines = aligned(rows)
        for seen in self.observations:
            lines.append(f"-- Python waits for %{names.get(seen.call, seen.call)}: {seen.why}  {seen.site}")
        return "\n".join(lines)

    def row(self, call: Call, names: Mapping[int, str]) -> tuple[str, str, str, str, str]:
        """A call in the printed form: its result, what it is, granularity, line, effects."""
        columns = [name for name, _ in call.inputs if call.method == "update" and name not in ("samples", "rewards", "reference")]
        inputs = [(f"{name}=" if name in columns else "", ref.call) for name, ref in call.inputs]
        arguments = [f"{said}%{names.get(ordinal, ordinal)}" for said, ordinal in inputs]
        arguments += [f"{key}={_brief(value)}" for key, value in call.shown.items()]
        arguments += [f"carried=%{names.get(call.carries_from, call.carries_from)}"] if call.carries_from is not None else []
        granularity = "" if call.engine == "source" else f"@{call.granularity}"
        effects = [f"reads {e}" for e in call.reads] + [f"writes {e}" for e in call.writes]
        return f"%{names[call.ordinal]}", f"{call.name}({', '.join(arguments)})", granularity, str(call.site), "  ".join(effects)

    def names(self) -> dict[int, str]:
        """A name for each call: the variable that the program assigns it to, or its ordinal; made unique."""
        names: dict[int, str] = {}
        used: set[str] = set()
        line_of = {call.ordinal: (call.step, str(call.site)) for call in self.calls}
        # A line may make others beside it, which nobody else asks for.
        read = {ref.call for call in self.calls for _, ref in call.inputs if line_of.get(ref.call) != line_of[call.ordinal]}
        last_of_line = {line_of[call.ordinal]: call.ordinal for call in self.calls}
        last_of_line |= {line_of[call.ordinal]: call.ordinal for call in self.calls if call.ordinal in read}
        for call in self.calls:
            is_last = last_of_line[call.step, str(call.site)] == call.ordinal
            name = (assigned_name(call.site.text) if is_last else None) or str(call.ordinal)
            if name in used:
                name = f"{name}.{call.ordinal}"
            used.add(name)
            names[call.ordinal] = name
        return names


def aligned(rows: Sequence[tuple[str, str, str, str, str]], indents: Sequence[int] | None = None) -> list[str]:
    """Rows of the printed form as lines, column under column."""
    indents = indents or [0] * len(rows)
    rows = [(" " * indent + row[0], *row[1:]) for indent, row in zip(indents, rows, strict=True)]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return [f"{a:{widths[0]}} = {b:{widths[1]}}  {c:{widths[2]}}  {d:{widths[3]}}  {e}".rstrip() for a, b, c, d, e in rows]


@functools.lru_cache(maxsize=4096)
def assigned_name(line: str) -> str | None:
    """The variable that a line assigns a call to; the call may go on in the next lines."""
    first = None
    for text in (line, line + ")"):
        with contextlib.suppress(SyntaxError):
            first = next(iter(ast.parse(text).body), None)
    if isinstance(first, ast.Assign) and isinstance(first.targets[0], ast.Name) and isinstance(first.value, ast.Call):
        return first.targets[0].id
    return None


def _brief(value: object) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
