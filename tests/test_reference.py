"""The reference that `make docs` writes has every public name, field of a spec, command and option."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pytest

import m2flow
from m2flow import errors, spec
from m2flow.algorithms.losses import LOSSES
from m2flow.cli.main import cli
from m2flow.engines.distributed.deepspeed import Options
from m2flow.engines.servers.server_process import ServedRolloutOptions
from m2flow.engines.servers.sglang import OWN_OPTIONS
from m2flow.recipe import AdvantageName

ROOT = Path(__file__).resolve().parent.parent
WRITER = runpy.run_path(str(ROOT / "docs" / "write_reference.py"), run_name="write_reference")
PAGES: dict[str, str] = WRITER["pages"]()
documentation: Callable[[type], dict[str, str]] = WRITER["documentation"]
markdown: Callable[[str], list[str]] = WRITER["markdown"]


def _section(page: str, title: str) -> str:
    return f"\n{PAGES[page]}\n".partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", m2flow.__all__)
def test_every_public_name_has_a_section_that_says_what_it_is(name: str) -> None:
    first = (getattr(m2flow, name).__doc__ or "").strip().splitlines()[0]
    assert first in _section("python.md", name)


@pytest.mark.parametrize(("page", "root"), [("cluster-spec.md", spec.ClusterSpec), ("run-settings.md", spec.RunSettings)])
def test_every_field_of_a_spec_is_there_with_its_meaning(page: str, root: type[Any]) -> None:
    missing = []
    models = [model for model in vars(spec).values() if isinstance(model, type) and issubclass(model, root.__mro__[1])]
    for model in models if root is spec.ClusterSpec else [root]:
        if model.__name__.startswith("_") or (model is spec.RunSettings and root is not model):
            continue
        rows = [line for line in _section(page, model.__name__).splitlines() if line.startswith("| `")]
        assert len(rows) == len(model.model_fields)
        missing += [name for name in model.model_fields if not documentation(model).get(name)]
        missing += [name for name, row in zip(model.model_fields, rows, strict=True) if not row.startswith(f"| `{name}` |")]
    assert not missing


def _commands(words: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _commands(f"{words} {name}", found)


def test_every_command_is_there_with_all_of_its_options() -> None:
    for words, command in _commands("m2flow", cli):
        said = _section("commands.md", words)
        options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
        assert "Usage: m2flow" in said, words
        assert not [name for option in options for name in option.opts if name not in said], words


def test_the_table_of_algorithms_is_that_of_the_functions() -> None:
    table = WRITER["algorithms"]()
    assert f"{WRITER['BEGIN']}\n{table}{WRITER['END']}" in WRITER["GUIDE"].read_text(), "python docs/write_reference.py writes it"
    for name in (*get_args(AdvantageName), *LOSSES):
        assert f"[`{name}`]" in table


def test_every_error_is_in_the_tree() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.M2FlowError)]
    assert not [kind.__name__ for kind in kinds if f"- `{kind.__name__}`: " not in PAGES["errors.md"]]


def test_a_docstring_becomes_markdown() -> None:
    docstring = """Add.

    Args:
        a: a number,
            of any size.

    >>> 1 + 1
    2
    """
    assert markdown(docstring) == [
        "Add.",
        "",
        "**Args**",
        "",
        "- `a`: a number,",
        "  of any size.",
        "",
        "",
        "```python",
        ">>> 1 + 1",
        "2",
        "```",
        "",
    ]


def test_the_options_of_every_engine_are_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guide" / "engines.md").read_text()
    names = [*Options.__dataclass_fields__, *OWN_OPTIONS, "tempered_logprobs"]
    with pytest.raises(errors.EngineError) as refused:
        ServedRolloutOptions("sglang", {"no_such_option": 1}, ()).check()
    names += refused.value.now.removeprefix("It has ").removesuffix(".").split(", ")
    assert not [name for name in names if f"`{name}" not in guide]
