"""Write the reference, `docs/reference/*.md`, from docstrings, specs and the command line; and the site, all documents as HTML.

    python docs/write_reference.py [FOLDER]

    topics of m2flow.cli.help --> a page each        fields of `m2flow.spec` --> cluster-spec.md, run-settings.md
    errors                    --> errors.md          help of each command    --> commands.md
    engines and their options --> engines.md         m2flow.algorithms       --> algorithms.md
    rollout scheduling        --> policies.md        m2flow.observe.spans     --> spans.md, with the alerts
    messages and parcels      --> wire-format.md     m2flow.environments      --> environments.md
    docstrings of modules     --> modules.md

Docstrings are Markdown as they stand, but for their sections (`Args:`, `Raises:`), which become lists, and doctests, which become fences.
`docs/site_pages.py` makes FOLDER/site from these pages and the guides.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import peer_algorithms
import wire_format
from pydantic import BaseModel
from site_pages import write_site

import m2flow
from m2flow import spec
from m2flow.algorithms import advantages, gae, losses, shaping
from m2flow.cli.help import (
    ELSEWHERE,
    LATER,
    SINCE,
    TOPICS,
    Field,
    commands,
    docstring,
    documentation,
    fields,
    first_line,
    kinds_of_error,
    methods,
    public,
    signature,
    since,
    specs,
)
from m2flow.engines.distributed import DeepSpeedOptions, deepspeed, fsdp
from m2flow.engines.embedded import rollout_engine, trainer
from m2flow.engines.megatron import layout as megatron_layout
from m2flow.engines.megatron import trainer as megatron
from m2flow.engines.models import model_probe
from m2flow.engines.registry import capability_tables, engines
from m2flow.engines.servers import inference_server, sglang, vllm
from m2flow.macro import refill
from m2flow.macro.loss_declarations import LOSSES
from m2flow.observe import spans
from m2flow.rollout_scheduling.policies import POLICIES
from m2flow.viewer import health

NOTE = "<!-- Written by docs/write_reference.py. Do not edit. -->\n"

ENGINE_OPTIONS = {
    "rollout `embedded`": rollout_engine.OPTIONS,
    "rollout `sglang`": {**inference_server.OPTIONS, **sglang.OWN_OPTIONS},
    "rollout `vllm`": {**inference_server.OPTIONS, **vllm.OWN_OPTIONS},
    "train `embedded`": trainer.OPTIONS,
    "train `fsdp`": fsdp.OPTIONS,
}
ENVIRONMENTS = {importlib.import_module(module): names.split() for module, names in ELSEWHERE.items() if "algorithms" not in module}
_SECTIONS = ("Args", "Returns", "Raises", "Yields", "Source", "Attributes", "Limits")


def pages() -> dict[str, str]:
    """Each page of the reference: its file name and its text."""
    return {
        **{f"{topic}.md": _topic(topic) for topic in TOPICS},
        "errors.md": _errors(),
        "cluster-spec.md": _specs("The cluster spec", [one for one in specs().values() if one is not spec.RunSettings]),
        "run-settings.md": _specs("Run settings", [spec.RunSettings]),
        "engines.md": _engines(),
        "environments.md": _environments(),
        "algorithms.md": _algorithms(),
        "policies.md": _policies(),
        "spans.md": _spans(),
        "wire-format.md": wire_format.page(),
        "commands.md": _commands(),
        "modules.md": _modules(),
    }


def _topic(topic: str) -> str:
    """The page of a topic: a section for each of its names."""
    module = "m2flow.rewards" if topic == "rewards" else "m2flow"
    lines = [f"# {TOPICS[topic][0]}", "", f"From `{module}`.", ""]
    lines += ["| name | | since |", "|---|---|---|"]
    lines += [
        f"| [`{name}`](#{name.lower()}) | {_cell(first_line(value))} | {LATER.get(name, SINCE)} |" for name, value in public(topic).items()
    ]
    for name, value in public(topic).items():
        lines += ["", *_entry(name, value)]
    return "\n".join(lines)


def _entry(name: str, value: object) -> list[str]:
    """A section of one public class or function."""
    lines = [f"## {name}", "", *_signature(name, value), *markdown(docstring(value)), " ".join(since(name, value)), ""]
    if not inspect.isclass(value):
        return lines
    lines += _fields(value)
    for method, member in methods(value):
        called = [] if isinstance(member, property) else _signature(f"{name}.{method}", member)
        later = since(f"{name}.{method}", member)
        lines += [f"### {name}.{method}", "", *called, *markdown(inspect.getdoc(member) or ""), *([" ".join(later), ""] if later else [])]
    return lines


def _signature(name: str, value: object) -> list[str]:
    said = signature(name, value)
    return ["```python", said, "```", ""] if said else []


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def _fields(kind: type) -> list[str]:
    """A table of a dataclass's or a spec's fields, or a list of an enumeration's values."""
    found = fields(kind)
    if found and not found[0].type:
        return [*(f"- `{field.name}`" + (f": {field.meaning}" if field.meaning else "") for field in found), ""]
    return ["| field | type | default | meaning |", "|---|---|---|---|", *map(_row, found), ""] if found else []


def _row(field: Field) -> str:
    default = field.default if field.default in ("", "required") else f"`{_cell(field.default)}`"
    return f"| `{field.name}` | `{field.type.replace('|', 'or')}` | {default} | {_cell(field.meaning)} |"


def _specs(title: str, models: list[type[BaseModel]]) -> str:
    lines = [f"# {title}", ""]
    for model in models:
        lines += [f"## {model.__name__}", "", *markdown(model.__doc__ or ""), *_fields(model)]
    return "\n".join(lines)


def _errors() -> str:
    """Every error that m2flow raises on purpose, as a tree."""
    lines = ["# Errors", "", "All are in `m2flow.errors`.", ""]
    for depth, kind in kinds_of_error():
        lines.append(f"{'  ' * depth}- `{kind.__name__}`: {(inspect.getdoc(kind) or '').split(chr(10) * 2)[0].replace(chr(10), ' ')}")
    return "\n".join([*lines, ""])


def _engines() -> str:
    """What each engine can do, and its options."""
    lines = ["# Engines", "", "## Capabilities", "", capability_tables([info for info in engines() if info.factory.startswith("m2flow.")])]
    for title, options in ENGINE_OPTIONS.items():
        lines += [f"## Options of {title}", "", *([f"- `{name}`: {said}" for name, said in options.items()]), ""]
    lines += ["## Options of train `deepspeed`", "", *_fields(DeepSpeedOptions)]
    lines += ["", "## Options of train `megatron`", "", *_fields(megatron_layout.Options)]
    limited = {
        "models on `embedded`, `fsdp` and `deepspeed`": model_probe,
        "rollout `sglang`": sglang,
        "rollout `vllm`": vllm,
        "train `fsdp`": fsdp,
        "train `deepspeed`": deepspeed,
    }
    for title, module in {**limited, "train `megatron`": megatron}.items():
        limits = (module.__doc__ or "").partition("\nLimits:\n")[2].partition("\n\n")[0]
        lines += [
            "",
            f"## Limits of {title}",
            "",
            *(re.sub(r"^(\w[\w -]*):", r"- **\1**:", line) for line in textwrap.dedent(limits).splitlines()),
        ]
    return "\n".join(lines)


def _environments() -> str:
    """The modules of environments, each with what it is and its names."""
    lines = ["# Environments", "", "A section for each module, and then for its names."]
    for module, names in ENVIRONMENTS.items():
        lines += ["", f"## {module.__name__}", "", inspect.cleandoc(module.__doc__ or ""), ""]
        for name in names:
            value = getattr(module, name)
            lines += [f"### {name}", "", *_signature(name, value), *markdown(docstring(value))]
            for method, member in methods(value) if inspect.isclass(value) else []:
                called = [f"`{name}.{method}`", ""] if isinstance(member, property) else _signature(f"{name}.{method}", member)
                lines += [*called, *markdown(inspect.getdoc(member) or "")]
    return "\n".join(lines)


_BEGINS_WITH = re.compile(r'r?"""(?:[^\\]|\\.)*?"""', re.DOTALL)
"""The docstring of a module, in its source."""


def _modules() -> str:
    """What every module of the package hides: its docstring, as it stands there."""
    package = Path(m2flow.__file__).parent
    lines = ["# Modules", "", "What each module of `m2flow` hides, for those who change it: the docstrings."]
    for path in sorted(package.rglob("*.py")):
        begin = _BEGINS_WITH.match(path.read_text())
        said = begin and ast.get_docstring(ast.parse(begin[0]))  # To parse all of each file takes a second.
        if said:
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            lines += ["", f"## {name}", "", "```text", said, "```"]
    return "\n".join(lines)


def _policies() -> str:
    lines = ["# Policies of rollout scheduling", ""]
    for name, policy in POLICIES.items():
        lines += [f"## {name}", "", *markdown(policy.__doc__ or "")]
    return "\n".join(lines)


def _spans() -> str:
    """The names of spans, the attributes that viewers understand, the counters, and the alerts."""
    said = documentation(spans.SpanName)
    about = spans.__doc__ or ""
    lines = ["# Spans, counters and alerts", "", *(f"- `{name.value}`: {said[name.name]}" for name in spans.SpanName), ""]
    for heading in ("Attributes that viewers understand", "Counters, by worker"):
        listed = about.partition(f"{heading}:\n\n")[2].partition("\n\n")[0]
        lines += [f"## {heading}", "", "```text", textwrap.dedent(listed), "```", ""]
    lines += ["## Alerts", "", "| alert | level | holds when |", "|---|---|---|"]
    lines += [f"| {rule.title} | {rule.level} | {rule.threshold} |" for rule in health.RULES.values()]
    return "\n".join([*lines, ""])


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
        if section and (entry := re.fullmatch(r" {4}([\w*][\w*, ]*): (.*)", line)) and section != "Source":
            found.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            found.append(f"  {line.strip()}" if section and line else line)
    return [*found, *(["```"] if in_doctest else []), ""]


def _algorithms() -> str:
    """A table of the functions of `m2flow.algorithms`, each with its module, what it is and its first paper; and who else has them."""
    lines = [
        "# Algorithms",
        "",
        "Functions on tensors and arrays; a flow uses the words of the same names (`m2flow help algorithms`).",
        "",
        "| kind | function | what it is | source |",
        "|---|---|---|---|",
    ]
    for kind, functions in algorithms().items():
        for function in functions:
            paper = re.search(r"arXiv:\d{4}\.\d{5}", function.__doc__ or "")
            lines.append(f"| {kind} | {_link(function)} | {_cell(first_line(function))} | {paper[0] if paper else ''} |")
    every = [one for functions in algorithms().values() for one in functions]
    sections = [line for one in every for line in (f"## {_named(one)}", "", *_signature(_named(one), one), *markdown(docstring(one)))]
    linked = {one.__name__: _link(one) for one in every}
    versions = ", ".join(f"{name} {version}" for name, version in peer_algorithms.VERSIONS.items())
    said = (
        f"Read in the source of {versions}. An empty cell: not found there. A plain `@loss` or `@op` of a flow adds what is missing here."
    )
    return "\n".join([*lines, "", "## Ours against other systems", "", said, "", *peer_algorithms.table(linked), "", *sections])


def algorithms() -> dict[str, list[Any]]:
    """The registry: kind of algorithm -> functions."""
    return {
        "advantages, of a group": [*advantages.OF_GROUPS.values(), advantages.gigpo, advantages.remax],
        "advantages, of the batch": [*advantages.OF_BATCHES.values()],
        "advantages, of tokens": [gae.gae, gae.length_adaptive_lam, gae.vtrace],
        "rewards": [shaping.overlong_penalty, shaping.length_reward, shaping.Moments],
        "coefficients": [shaping.adaptive_kl_coef, shaping.adaptive_entropy_coef],
        "filters of groups": [refill.informative, refill.pass_rate_between],
        "losses": [*LOSSES.values()],
        "divergences": [losses.kl_estimate, losses.top_k_divergence],
        "corrections": [losses.correction_weights],
    }


def _link(function: Any) -> str:
    """Its name, linked to its section."""
    return f"[`{_named(function)}`](#{_named(function).replace('.', '').lower()})"


def _named(function: Any) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(NOTE + "\n" + text.rstrip() + "\n")
    write_site(folder, folder / "site")


if __name__ == "__main__":
    main()
