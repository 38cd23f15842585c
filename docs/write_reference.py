"""Write the reference, `docs/reference/*.md`, from docstrings, specs and the command line.

    python docs/write_reference.py [FOLDER]

    docstrings of `m2flow.__all__` --> python.md        fields of `m2flow.spec` --> cluster-spec.md, run-settings.md
    errors                         --> errors.md        help of each command    --> commands.md
    engine registry                --> engines.md               m2flow.algorithms     --> the table in docs/guide/flows-algorithms.md

Docstrings are Markdown as they stand, but for their sections (`Args:`, `Raises:`), which become lists, and doctests, which become fences.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path

import click
from pydantic import BaseModel

import m2flow
from m2flow import errors, spec
from m2flow.algorithms import advantages, gae, losses, shaping
from m2flow.cli.main import cli
from m2flow.engines.distributed.deepspeed import Options as DeepSpeedOptions
from m2flow.engines.registry import capability_tables, engines

NOTE = "<!-- Written by docs/write_reference.py. Do not edit. -->\n"

_SECTIONS = ("Args", "Returns", "Raises", "Yields", "Source", "Attributes", "Limits")
_OF_THE_TRACER = frozenset(
    [
        "call",
        "check",
        "holder",
        "like",
        "maker",
        "mask",
        "metrics_of",
        "observe",
        "operand",
        "operate",
        "reduce",
        "ref",
        "result_of",
        "samples_of",
        "session",
        "source",
        "within",
    ]
)
"""Methods of handles that other modules of m2flow call, and no flow."""


def pages() -> dict[str, str]:
    """Each page of the reference: its file name and its text."""
    return {
        "python.md": _python(),
        "errors.md": _errors(),
        "cluster-spec.md": _specs("The cluster spec", [one for one in _models() if one is not spec.RunSettings]),
        "run-settings.md": _specs("Run settings", [spec.RunSettings]),
        "engines.md": _engines(),
        "commands.md": _commands(),
    }


def _python() -> str:
    lines = ["# Python: what `from m2flow import ...` offers", ""]
    for name in sorted(m2flow.__all__, key=str.lower):
        lines += _entry(name, getattr(m2flow, name))
    return "\n".join(lines)


def _entry(name: str, value: object) -> list[str]:
    """A section of one public class or function."""
    lines = [f"## {name}", "", *_signature(name, value), *markdown(value.__doc__ or "")]
    if not inspect.isclass(value):
        return lines
    lines += _fields(value)
    for method, member in _methods(value):
        is_property = isinstance(member, property)
        lines += [
            f"### {name}.{method}",
            "",
            *([] if is_property else _signature(f"{name}.{method}", member)),
            *markdown(inspect.getdoc(member) or ""),
        ]
    return lines


def _signature(name: str, value: object) -> list[str]:
    if isinstance(value, EnumType):
        return []
    signature = str(inspect.signature(value))  # type: ignore[arg-type]
    return ["```python", f"{name}{_readable(signature)}", "```", ""]


def _readable(signature: str) -> str:
    """Without quotes, modules and addresses, which say nothing to a reader."""
    plain = re.sub(r"<(?:function|object) ?([\w.]*)[^>]*>", r"\1", signature.replace("'", ""))
    plain = re.sub(r"numpy\.ndarray\[tuple\[Any, \.\.\.\], numpy\.dtype\[numpy\.(\w+)\]\]", r"NDArray[\1]", plain)
    return re.sub(r"\b(?:m2flow|collections|typing|datetime)\.(?:\w+\.)*(?=\w)", "", plain)


def _methods(kind: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties that m2flow's own classes define."""
    for name in sorted(dir(kind)):
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        if name.startswith("_") or name in _OF_THE_TRACER or not owner.__module__.startswith("m2flow"):
            continue
        member = inspect.getattr_static(kind, name)
        if isinstance(member, property) or callable(getattr(kind, name)):
            yield name, member if isinstance(member, property) else getattr(kind, name)


def _fields(kind: type) -> list[str]:
    """A table of a dataclass's or a spec's fields, or of an enumeration's values, with what stands under each where it is declared."""
    said = documentation(kind)
    if isinstance(kind, EnumType):
        return [*(f"- `{member.name}`" + (f": {said[member.name]}" if member.name in said else "") for member in kind), ""]
    if issubclass(kind, BaseModel):
        found = [(name, field.annotation, _default_of_model(kind, name)) for name, field in kind.model_fields.items()]
    elif dataclasses.is_dataclass(kind):
        found = [(field.name, field.type, _default_of_field(field)) for field in dataclasses.fields(kind) if not field.name.startswith("_")]
    else:
        return []
    rows = [f"| `{name}` | `{_type(kind)}` | {default} | {said.get(name, '')} |".replace("\n", " ") for name, kind, default in found]
    return ["| field | type | default | meaning |", "|---|---|---|---|", *rows, ""] if rows else []


def _type(annotation: object) -> str:
    text = (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", "")
        if inspect.isclass(annotation)
        else str(annotation)
    )
    return _readable(text).replace("|", "or")


def _default_of_model(kind: type[BaseModel], name: str) -> str:
    field = kind.model_fields[name]
    return (
        "required"
        if field.is_required()
        else f"`{type(field.default).__name__}()`"
        if isinstance(field.default, BaseModel)
        else f"`{field.default!r}`"
    )


def _default_of_field(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "" if field.default_factory is not dataclasses.MISSING else "required"


def documentation(kind: type) -> dict[str, str]:
    """What stands under each field of a class."""
    (body,) = (part.body for part in ast.parse(textwrap.dedent(inspect.getsource(kind))).body if isinstance(part, ast.ClassDef))
    found = {}
    for field, below in itertools.pairwise(body):
        names = [field.target] if isinstance(field, ast.AnnAssign) else field.targets if isinstance(field, ast.Assign) else []
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found |= {name.id: " ".join(below.value.value.split()).replace("|", r"\|") for name in names if isinstance(name, ast.Name)}
    return found


def _models() -> list[type[BaseModel]]:
    """The sections of a spec, the whole first."""
    found = [one for one in vars(spec).values() if inspect.isclass(one) and issubclass(one, BaseModel) and one.__module__ == spec.__name__]
    public = [one for one in found if not one.__name__.startswith("_")]
    return sorted(public, key=lambda one: one is not spec.ClusterSpec)


def _specs(title: str, models: list[type[BaseModel]]) -> str:
    lines = [f"# {title}", ""]
    for model in models:
        lines += [f"## {model.__name__}", "", *markdown(model.__doc__ or ""), *_fields(model)]
    return "\n".join(lines)


def _errors() -> str:
    """Every error that m2flow raises on purpose, as a tree."""
    lines = ["# Errors", "", "All are in `m2flow.errors`.", ""]

    def add(kind: type, depth: int) -> None:
        lines.append(f"{'  ' * depth}- `{kind.__name__}`: {(inspect.getdoc(kind) or '').split(chr(10) * 2)[0].replace(chr(10), ' ')}")
        for below in sorted(kind.__subclasses__(), key=lambda one: one.__name__):
            if below.__module__ == errors.__name__:
                add(below, depth + 1)

    add(errors.M2FlowError, 0)
    return "\n".join([*lines, ""])


def _engines() -> str:
    lines = ["# Engines", "", "## Capabilities", "", capability_tables([info for info in engines() if info.factory.startswith("m2flow.")])]
    lines += ["## Options of `deepspeed`", "", *_fields(DeepSpeedOptions), "`docs/guide/engines.md` has the options of all engines.", ""]
    return "\n".join(lines)


def commands() -> Iterator[click.Context]:
    """Every command as it is when it is called, those of groups after their group."""

    def below(name: str, command: click.Command, parent: click.Context | None) -> Iterator[click.Context]:
        settings = {**command.context_settings, "terminal_width": 120, "max_content_width": 120}
        context = click.Context(command, info_name=name, parent=parent, **settings)
        yield context
        if isinstance(command, click.Group):
            for each in command.list_commands(context):
                found = command.get_command(context, each)
                assert found is not None
                yield from below(each, found, context)

    return below("m2flow", cli, None)


def _commands() -> str:
    lines = ["# Commands", ""]
    for context in commands():
        lines += [f"## {context.command_path}", "", "```text", context.command.get_help(context), "```", ""]
    return "\n".join(lines)


def markdown(docstring: str) -> list[str]:
    """A docstring as lines of Markdown."""
    lines = inspect.cleandoc(docstring).splitlines()
    found: list[str] = []
    section = ""
    in_doctest = False
    for line in lines:
        is_doctest = line.startswith(">>>") or (in_doctest and bool(line))
        if is_doctest != in_doctest:
            found += ["", "```python"] if is_doctest else ["```"]
            in_doctest = is_doctest
        head = line.rstrip().removesuffix(":")
        if line.rstrip().endswith(":") and head in _SECTIONS:
            section = head
            found += [f"**{section}**", ""]
            continue
        if section and line and not line.startswith(" "):
            section = ""
        if section and (entry := re.fullmatch(r" {4}([\w*, ]+): (.*)", line)) and section != "Source":
            found.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            found.append(f"  {line.strip()}" if section and line else line)
    return [*found, *(["```"] if in_doctest else []), ""]


GUIDE = Path(__file__).parent / "guide" / "flows-algorithms.md"
BEGIN, END = "<!-- algorithms:begin -->", "<!-- algorithms:end -->"


def algorithms() -> str:
    """A table of the functions of `m2flow.algorithms`, each with its file and its first paper."""
    kinds = {
        "advantages, of a group": [*advantages.OF_GROUPS.values(), advantages.remax],
        "advantages, of the batch": [*advantages.OF_BATCHES.values()],
        "advantages, of tokens": [gae.gae, gae.length_adaptive_lam, gae.vtrace],
        "rewards": [shaping.overlong_penalty, shaping.length_reward, shaping.Moments],
        "losses": [*losses.LOSSES.values()],
    }
    lines = ["| kind | function | source |", "|---|---|---|"]
    for kind, functions in kinds.items():
        for function in functions:
            place = "../../" + "/".join(function.__module__.split(".")) + ".py"
            paper = re.search(r"arXiv:\d{4}\.\d{5}", function.__doc__ or "")
            lines.append(f"| {kind} | [`{function.__name__}`]({place}) | {paper[0] if paper else ''} |")
    return "\n".join([*lines, ""])


def main() -> None:
    text = GUIDE.read_text()
    GUIDE.write_text(f"{text[: text.index(BEGIN)]}{BEGIN}\n{algorithms()}{text[text.index(END) :]}")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(NOTE + "\n" + text.rstrip() + "\n")


if __name__ == "__main__":
    main()
