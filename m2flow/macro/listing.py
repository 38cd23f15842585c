"""The macro graph as `m2flow plan` prints it: the calls, under the conditions that decide on them, and where Python waits.

    Exploration --> nodes (calls, conditions, ends) --> lines

Paths that agree are one: a condition whose outcomes make the same calls is not shown, and what comes after both outcomes alike is
shown once, below them. A call's place in the listing is decided by what it is and on what it works, not by its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from m2flow.macro.exploring import Exploration, Look, Path
from m2flow.macro.graph import Call, aligned

_Row = tuple[str, str, str, str, str]
_INDENT = 4


@dataclass(frozen=True)
class _Line:
    """A call. Equal if it is the same call in the same place, whatever its number."""

    key: tuple[object, ...]
    row: _Row = field(compare=False)


@dataclass(frozen=True)
class _If:
    key: str
    question: str = field(compare=False)
    site: str
    yes: tuple[_Node, ...]
    no: tuple[_Node, ...]


@dataclass(frozen=True)
class _End:
    text: str


_Node = _Line | _If | _End


def calls_listing(exploration: Exploration) -> list[str]:
    """The calls of all paths, as lines."""
    return _lines(_branch(exploration.paths, 0, 0))


def barriers_listing(exploration: Exploration) -> list[str]:
    """Where Python waits: the line, for what, what that costs, and where its value came from here. Nothing where it waits for nothing."""
    lines: list[str] = []
    for (site, why, text), looks in _barriers(exploration).items():
        path, look = looks[0]
        call = path.graph.calls[look.observation.call]
        steps = sorted({path.graph.calls[look.observation.call].step for path, look in looks} - {-1})
        lines.append(f"  {site}  {text}")
        lines.append(f"    waits for %{path.graph.names()[call.ordinal]}, of {call.name} ({call.site}){_in_steps(steps)}: {why}")
        lines.append(f"    cost: {_cost(call, look, path.graph.staleness)}")
        sources = list(dict.fromkeys(_plain(source) for _, look in looks for source in look.sources))
        asked = any(fork.num_calls >= look.num_calls for path, look in looks for fork in path.forks)
        lines += [f"    value: {source}{_consequence(source, asked)}" for source in sources]
    return lines


def bounds_listing(exploration: Exploration) -> list[str]:
    """What was not followed, and why."""
    lines = []
    if any(path.end == "bound" for path in exploration.paths):
        lines.append("Some paths go on: a loop that asks until a value is right is followed for a few turns only.")
    if exploration.num_left:
        lines.append(f"{len(exploration.paths)} paths were followed; {exploration.num_left} more outcomes were not.")
    return lines


def _barriers(exploration: Exploration) -> dict[tuple[str, str, str], list[tuple[Path, Look]]]:
    """By line and reason. A dataset's rows are no barrier: they are there at once."""
    found: dict[tuple[str, str, str], list[tuple[Path, Look]]] = {}
    for path in exploration.paths:
        for look in path.looks:
            site = look.observation.site
            found.setdefault((str(site), look.observation.why, site.text), []).append((path, look))
    return found


def _in_steps(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    return f", in step {steps[0]}" if len(steps) == 1 else f", in steps {steps[0]} to {steps[-1]}"


def _cost(call: Call, look: Look, staleness: int) -> str:
    if look.observation.lag:
        return f"what {call.name} made {look.observation.lag} steps ago is most likely there"
    cost = f"nothing after this line is known before {call.name} ends"
    if call.step >= 0 and call.engine == "train":
        return f"{cost}, so the next step can't begin beside it; .lagged({max(staleness, 1)}) looks at an earlier step instead"
    return cost


def _plain(text: str) -> str:
    """Without the numbers that tell results of one name apart: `metrics['reward']`, not `metrics.9['reward']`."""
    return re.sub(r"(%?[A-Za-z_]\w*)\.\d+", r"\1", text)


def _consequence(source: str, asked: bool) -> str:
    if not source.endswith("is not known"):
        return ""
    return "; both outcomes of what is asked about it are followed above" if asked else "; 0.5 is taken for it, and no condition asks"


def _branch(paths: Sequence[Path], depth: int, start: int) -> tuple[_Node, ...]:
    """The nodes of paths that have agreed in their first `depth` outcomes, from a call on."""
    path = paths[0]
    if len(path.forks) == depth:
        return (*_calls(path, start, len(path.graph.calls)), *_end(path))
    fork = path.forks[depth]
    nodes = _calls(path, start, fork.num_calls)
    yes, no = (
        _branch(there, depth + 1, fork.num_calls) if there else (_End("not followed"),)
        for there in ([p for p in paths if p.forks[depth].outcome is outcome] for outcome in (True, False))
    )
    if yes == no:
        return (*nodes, *no)
    common = 0
    while common < min(len(yes), len(no)) and yes[-1 - common] == no[-1 - common]:
        common += 1
    cut = len(no) - common
    condition = _If(_plain(fork.question), fork.question, f"{fork.site}  {fork.site.text}", yes[: len(yes) - common], no[:cut])
    return (*nodes, condition, *no[cut:])


def _calls(path: Path, start: int, end: int) -> tuple[_Line, ...]:
    names = path.graph.names()
    return tuple(_Line(_key(path, call), path.graph.row(call, names)) for call in path.graph.calls[start:end])


def _key(path: Path, call: Call) -> tuple[object, ...]:
    """What a call is and what made its inputs, without numbers."""
    makers = (path.graph.calls[ref.call] for _, ref in call.inputs)
    inputs = tuple((maker.name, str(maker.site), maker.step) for maker in makers)
    return call.name, str(call.site), call.step, repr(sorted(call.shown.items())), inputs


def _end(path: Path) -> tuple[_End, ...]:
    match path.end:
        case "unknown rows":
            return (_End("the trace ends here: what comes next depends on rows that nobody has made"),)
        case "bound":
            return (_End("goes on; it is followed no further"),)
        case "error":
            return (_End(f"ends with {path.error}"),)
    return ()


def _lines(nodes: Sequence[_Node]) -> list[str]:
    flat = list(_flat(nodes, 0))
    rows = [(row, indent) for row, indent in flat if isinstance(row, tuple)]
    printed = iter(aligned([row for row, _ in rows], [indent for _, indent in rows]))
    return [next(printed) if isinstance(row, tuple) else f"{' ' * indent}{row}".replace("\n", f"\n{' ' * indent}") for row, indent in flat]


def _flat(nodes: Sequence[_Node], indent: int) -> Iterator[tuple[_Row | str, int]]:
    for node in nodes:
        match node:
            case _Line(row=row):
                yield row, indent
            case _End(text=text):
                yield f"... {text}", indent
            case _If(question=question, site=site, yes=yes, no=no):
                yield f"if {question}:    {site}", indent
                yield from _flat(yes, indent + _INDENT) if yes else ((("no call here"), indent + _INDENT),)
                if no:
                    yield "else:", indent
                    yield from _flat(no, indent + _INDENT)
