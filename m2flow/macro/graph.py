"""The macro graph: the calls of a flow, their inputs, their effects on versioned resources, where they were made, and which rows they have.

    flow --(run under a recording session)--> MacroGraph --(m2flow.micro)--> Plan

A call is a node; edges are data (one call's result is another's input) or effects (a write of a versioned resource must follow or
precede another call on it). The graph is frozen data with a checker (`verify`) and a printed form; executing it is done elsewhere.

Sizes of results (`n`) and what kind of result a function gives are structure (`STRUCTURAL`). Functions, their captured values,
temperatures, token limits and versions are values: a flow that changes only those is planned once.

The site of a call is the user's line that made it, and the user's functions that led there, found on the stack. Every recorded call asks,
so what was found out about a place in running code is cached: a place is the code objects and instructions on the stack, which are
compared by number and not read again. Paths are relative to the directory that the session began in.

The lineage of a result says of which samples it has rows, and with which columns, before anything runs.

    responses[rewards > 0.5]    rows of policy.generate, less those that this filter drops: one `Part`, with one filter

Two results may be joined if one certainly has the rows of the other: the same call made their samples, and the one went through all
filters of the other. What a filter really keeps is only known when it has run; so of two different filters of the same samples nothing
is certain, and joining them is an error.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import itertools
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from m2flow.errors import TraceError, engine_that_raised, is_compiled
from m2flow.recipe import Episodes
from m2flow.samples import EPISODE, SAMPLING_MASK, TOKEN_COLUMNS, Batch

if TYPE_CHECKING:
    import networkx as nx


# ---- the graph


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
    """Oldest version that a read that may be stale will do with; any from here to `version` may be read."""

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
        """The roles that a call on rollout engines samples from. Its own is the first; others may speak in its episodes."""
        return tuple(dict.fromkeys(self.speaking.values())) if "episodes" in self.options else (self.role,)

    @property
    def speaking(self) -> Mapping[str, str]:
        """The role of each who may speak in its episodes, by the name in the rollout's `speakers`; its own is that of the empty name."""
        bounds = self.options.get("episodes")
        return {"": self.role, **dict(bounds.speakers)} if isinstance(bounds, Episodes) else {"": self.role}

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
        """The calls that made the candidates of a call that keeps a refill's groups. Their results count only if this call succeeds."""
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
        import networkx as nx  # a tenth of a second, which no command needs

        graph = nx.DiGraph()
        calls = {call.ordinal: call for call in self.calls}
        for ordinal in (links := self.links()):
            graph.add_node(ordinal, **({"call": calls[ordinal]} if ordinal in calls else {}))
        graph.add_edges_from(
            (start, end, {"kind": kind, "label": label}) for start, ends in links.items() for end, (kind, label) in ends.items()
        )
        return graph

    def links(self) -> dict[int, dict[int, tuple[Literal["data", "effect"], str]]]:
        """The edges of `digraph`: ordinal -> ordinal that needs it -> kind and label. A later ordinal needs an earlier one."""
        links: dict[int, dict[int, tuple[Literal["data", "effect"], str]]] = {}
        readers: dict[Effect, list[int]] = {}
        writers: dict[Effect, int] = {}

        def link(start: int, end: int, kind: Literal["data", "effect"], label: str) -> None:
            links.setdefault(start, {})[end] = kind, label

        for call in self.calls:
            links.setdefault(call.ordinal, {})
            for effect in call.reads:
                needed = Effect(effect.resource, effect.first)
                if needed in writers:
                    link(writers[needed], call.ordinal, "effect", str(effect))
                readers.setdefault(effect, []).append(call.ordinal)
            for effect in call.writes:
                before = Effect(effect.resource, effect.version - 1)
                for reader in readers.get(before, []):
                    if reader != call.ordinal:
                        link(reader, call.ordinal, "effect", str(before))
                if before in writers:
                    link(writers[before], call.ordinal, "effect", str(before))
                writers[effect] = call.ordinal
            for name, ref in call.inputs:
                link(ref.call, call.ordinal, "data", name)
            if call.carries_from is not None and call.carries_from in links:
                link(call.carries_from, call.ordinal, "data", "late")
        return links

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


# ---- places in the user's code


_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_FLOWS = _PACKAGE + "flows" + os.sep
"""Flows that come with an installed m2flow (`m2flow demo`): programs as users write them."""
_DATA = _PACKAGE + "samples.py"
"""What is in the user's hands, as a list is: an attribute that a sample has not is the fault of who asked for it."""
_LIBRARIES = (*{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen", "<string>")
_LIBRARY_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of any environment: one may stand on another (a `.pth` file, `--system-site-packages`), whose folders are none of its own."""
_MOST_KNOWN = 20_000
"""Places that are remembered at most: a recursion without end has as many as it has calls."""

_known: dict[tuple[int, ...], tuple[Site, list[CodeType]]] = {}
"""(id of a code object, instruction, ...), innermost first -> the site. The code objects are held, so that no id is given anew."""
_is_ours: dict[str, bool] = {}


def user_site() -> Site:
    """Return the current place in the user's code: the innermost frame outside m2flow, and the user's frames that led there."""
    frame: FrameType | None = sys._getframe(1)
    place: list[int] = []
    first: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        is_ours = _is_ours.get(code.co_filename)
        if is_ours is None:
            is_ours = _is_ours[code.co_filename] = owner(code.co_filename) == "m2flow"
        if not is_ours:
            first = first or frame
            place += (id(code), frame.f_lasti)
        elif first is not None:
            break
        frame = frame.f_back
    if first is None:
        return Site("<unknown>", 0, "")
    key = tuple(place)
    found = _known.get(key)
    if found is None:
        found = _read(first, len(key) // 2)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = found
    return found[0]


def forget_sites() -> None:
    """Clear the cache: the working directory or a source file may have changed."""
    _known.clear()
    _shorten.cache_clear()  # A cell that was run again has another number.


def raised_at(error: BaseException) -> Site | None:
    """Find the place in the user's code that raised an error, or called what did."""
    raised = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in raised if owner(frame.filename) == "user"]
    return site_of(frames[::-1]) if frames else None


def is_of_user(error: BaseException) -> bool:
    """Whether an error came from the user's code rather than m2flow's or an engine's; a library counts as whoever called it."""
    if engine_that_raised(error):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    owners = ["library" if frame.filename == _DATA else owner(frame.filename) for frame in frames]
    return next((whose for whose in reversed(owners) if whose != "library"), "") == "user"


@functools.lru_cache(maxsize=4096)
def owner(filename: str) -> Literal["m2flow", "library", "user"]:
    """Whose code a file contains: the user's, m2flow's or a library's."""
    if filename.startswith(_PACKAGE):
        return "user" if filename.startswith(_FLOWS) else "m2flow"
    is_librarys = filename.startswith(_LIBRARIES) or any(folder in filename for folder in _LIBRARY_FOLDERS)
    return "library" if is_librarys or is_compiled(filename) else "user"


def _read(innermost: FrameType, count: int) -> tuple[Site, list[CodeType]]:
    frames: list[tuple[str, int, str]] = []
    codes: list[CodeType] = []
    frame: FrameType | None = innermost
    for _ in range(count):
        assert frame is not None
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        codes.append(frame.f_code)
        frame = frame.f_back
    return site_of(frames), codes


def site_of(frames: list[tuple[str, int, str]]) -> Site:
    """Make a site from (file, line, function) frames, innermost first."""
    (filename, line, _), *outer = frames
    here = os.getcwd()
    path = tuple(f"{_shorten(f, here)}:{n} in {name}" for f, n, name in reversed(outer) if name != "<module>")
    return Site(_shorten(filename, here), line, linecache.getline(filename, line).strip(), path)


def shown_file(filename: str) -> str:
    """A file's name as sites show it: relative to the working directory if it is below that, or `In[3]` for a notebook's cell."""
    return _shorten(filename, os.getcwd())


def _cell_of(filename: str) -> str:
    """The name of the notebook's cell that IPython compiled under this file name; empty if it is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(filename)
    return "" if number is None else f"In[{number}]"


@functools.lru_cache(maxsize=4096)
def _shorten(filename: str, here: str) -> str:
    cell = _cell_of(filename)
    if cell:
        return cell
    path = Path(filename)
    try:
        return str(path.resolve().relative_to(here))
    except ValueError:
        return str(path)


# ---- which rows a call has


GENERATED = TOKEN_COLUMNS | {"seed", "finish", "temperature", "text"}
"""Columns that a generate call adds to those of its prompts, whatever its engine; some add others (`m2flow.samples`)."""

TWICE = "Its inputs must be different samples; to bring columns of the same samples together, join them."
"""What to do about a concatenation that has a sample twice."""


class Part(NamedTuple):
    """Samples that one call made, less those that filters dropped."""

    maker: int
    filters: tuple[int, ...] = ()
    """Calls, in program order."""

    def is_within(self, other: Part) -> bool:
        """Whether the other certainly has all rows of this."""
        return self.maker == other.maker and self.filters[: len(other.filters)] == other.filters


class ResultInfo(NamedTuple):
    """What is known of a call's result before it runs."""

    call: Call
    parts: tuple[Part, ...]
    fields: frozenset[str] | None
    """Names of its columns; None: unknown."""
    samplers: frozenset[str]
    """The roles that sampled its responses."""

    def is_within(self, other: ResultInfo) -> bool:
        return self.parts == other.parts or all(any(part.is_within(of) for of in other.parts) for part in self.parts)


class Lineage:
    """What is known of each call's result in a session."""

    def __init__(self) -> None:
        self._known: dict[int, ResultInfo] = {}
        self._makers: dict[int, Call] = {}

    def add(self, call: Call) -> None:
        """Take a new call in.

        Raises:
            TraceError: its inputs are not about the same samples, or are filtered in different ways.
        """
        known = self._known
        inputs = [(name, ref) for name, ref in call.inputs if known[ref.call].call.is_aligned]
        is_maker = not inputs or call.engine == "source" or call.engine == "rollout"
        parts = (Part(call.ordinal),) if is_maker else self._parts(call, inputs)
        if is_maker:
            self._makers[call.ordinal] = call
        known[call.ordinal] = ResultInfo(call, parts, self._fields(call, inputs), self._samplers(call, inputs))

    def known(self, ordinal: int) -> ResultInfo:
        return self._known[ordinal]

    def makers(self, ordinal: int) -> list[Call]:
        """The calls that made the samples of a result: one, unless it is a concatenation."""
        return [self._makers[maker] for maker in dict.fromkeys(part.maker for part in self._known[ordinal].parts)]

    def samplers(self, ordinal: int) -> frozenset[str]:
        """The roles that sampled the responses of a result; none: these are of a dataset, or there are none."""
        return self._known[ordinal].samplers

    def _samplers(self, call: Call, inputs: list[tuple[str, Ref]]) -> frozenset[str]:
        if call.engine == "rollout":
            return frozenset({call.role})
        if isinstance(named := call.options.get("sampled_by"), str):
            return frozenset({named})
        if call.options.get("gives") == "concat":
            return frozenset(role for _, ref in inputs for role in self._known[ref.call].samplers)
        return self._known[inputs[0][1].call].samplers if inputs else frozenset()

    def keep(self, needed: Iterable[int]) -> None:
        """Forget all calls but these and those that made their samples."""
        known = {ordinal: self._known[ordinal] for ordinal in needed if ordinal in self._known}
        parts = [part for one in known.values() for part in one.parts]
        self._makers = {part.maker: self._makers[part.maker] for part in parts}
        further = [ordinal for part in parts for ordinal in part.filters]
        further += [ref.call for maker in self._makers.values() for _, ref in maker.inputs]
        self._known = known | {ordinal: self._known[ordinal] for ordinal in (*self._makers, *further) if ordinal in self._known}

    def __len__(self) -> int:
        return len(self._known)

    def has(self, ordinal: int) -> bool:
        return ordinal in self._known

    def makes(self, ordinal: int) -> bool:
        """Whether a call that is kept has samples that this one made."""
        return ordinal in self._makers

    def narrowest(self, refs: Iterable[Ref]) -> Ref | None:
        """The input whose rows all others certainly have."""
        found = list(refs)
        return next((ref for ref in found if all(self._known[ref.call].is_within(self._known[o.call]) for o in found)), None)

    def mismatch(self, what: str, inputs: Sequence[tuple[str, Ref]]) -> TraceError:
        """Describe inputs that do not go together: two of them, what they are, and where they are from."""
        (name, ref), (other, by) = next(pair for pair in itertools.combinations(inputs, 2) if self.narrowest(of for _, of in pair) is None)
        mine, others = self.makers(ref.call), self.makers(by.call)
        if {call.ordinal for call in mine} != {call.ordinal for call in others}:
            text = f"{what} got {name} that {_made(mine)}, and {other} of others, which {_made(others)}"
            return TraceError(text, now=f"The {other} must be those of the very samples that they go with.")
        text = f"{what} got {name} {self._filtered(ref)} and {other} {self._filtered(by)}, which are different rows of the same samples"
        return TraceError(text, now="Filter once and go on with what is left, or filter both by one condition: a & b.")

    def _filtered(self, ref: Ref) -> str:
        filters = [self._known[ordinal].call for part in self._known[ref.call].parts for ordinal in part.filters]
        return "filtered at " + ", ".join(dict.fromkeys(str(call.site) for call in filters)) if filters else "of all samples"

    def _parts(self, call: Call, inputs: list[tuple[str, Ref]]) -> tuple[Part, ...]:
        if call.options.get("gives") == "concat":
            return self._union(call, inputs)
        base, *others = inputs
        parts = self._known[base[1].call].parts
        for other in others:
            if self.narrowest([base[1], other[1]]) is None:
                raise self.mismatch(call.name, [base, other]).located(call.site.describe())
            if not self._known[base[1].call].is_within(self._known[other[1].call]):
                raise TraceError(
                    f"{call.name} got {base[0]} of more samples than {other[0]}, which are {self._filtered(other[1])}",
                    where=call.site.describe(),
                    now=f"Filter the {base[0]} in the same way.",
                )
        if call.options.get("gives") == "kept":
            return tuple(Part(part.maker, (*part.filters, call.ordinal)) for part in parts)
        return parts

    def _union(self, call: Call, inputs: Sequence[tuple[str, Ref]]) -> tuple[Part, ...]:
        parts: list[Part] = []
        for _, ref in inputs:
            for part in self._known[ref.call].parts:
                if any(part.is_within(other) or other.is_within(part) for other in parts):
                    raise TraceError(
                        f"{call.name} got samples twice that {_made([self._makers[part.maker]])}",
                        where=call.site.describe(),
                        now=TWICE,
                    )
                parts.append(part)
        return tuple(sorted(parts))

    def _fields(self, call: Call, inputs: list[tuple[str, Ref]]) -> frozenset[str] | None:
        options = call.options
        if call.engine == "source":
            rows = options.get("rows")
            return frozenset(rows.columns) if isinstance(rows, Batch) else None
        if isinstance(named := options.get("fields"), tuple | frozenset):
            return frozenset(named)
        if not call.is_aligned or not inputs:
            return None
        found = [self._known[ref.call].fields for _, ref in inputs]
        if None in found:
            return None
        gives = options.get("gives", "column")
        if gives == "column" and call.engine != "rollout":
            return frozenset((str(options["column"]),)) if "column" in options else None
        fields = [of for of in found if of is not None]
        if call.engine == "rollout":
            masks = {SAMPLING_MASK} if getattr(options.get("sampling"), "sampling_mask", False) else frozenset()
            return (fields[0] - {SAMPLING_MASK}) | GENERATED | masks | (EPISODE if "agent" in options else frozenset())
        if gives == "concat":
            return frozenset.intersection(*fields)
        if gives == "kept":  # With a function of the user's, a column that was joined for it stays.
            joined = options.get("columns")
            return fields[0] | frozenset(joined if isinstance(joined, dict) and options.get("style") != "columns" else ())
        return None


def _made(makers: Sequence[Call]) -> str:
    return ", ".join(f"{maker.name} made at {maker.site}" for maker in makers)
