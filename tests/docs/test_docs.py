"""What the documents say exists: files, targets of the Makefile, commands and their options; and their Python is Python."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from m2flow.cli.main import cli
from m2flow.macro.flow import load_flow
from m2flow.macro.row_files import TAKEN

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BUILT = "docs/reference"
_PAGES = re.findall(r'"([\w-]+\.md)": [_w]', (ROOT / "docs" / "write_reference.py").read_text())
PAGES_BUILT = {BUILT, *(f"{BUILT}/{name}" for name in (*_PAGES, "site/index.html"))}
"""What `make docs` writes."""
WRITTEN = [
    page for folder in ("docs", "benchmarks/results") for page in sorted((ROOT / folder).rglob("*.md")) if ROOT / BUILT not in page.parents
]
DOCUMENTS = [README, ROOT / "CHANGELOG.md", *WRITTEN]

_FOLDERS = ("flows", "clusters", "m2flow", "tests", "benchmarks", "docs", "docker")
_PATH = re.compile(
    rf"(?<![\w./-])(?:{'|'.join(_FOLDERS)})/[\w./-]*\w|(?<![\w./])(?:Makefile|LICENSE|CHANGELOG\.md|README\.md|requirements[\w-]*\.lock)\b"
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def _read(document: Path) -> str:
    """The text without comments, which are notes to whoever writes the document."""
    return re.sub(r"<!--.*?-->", "", document.read_text(), flags=re.DOTALL)


def _blocks(document: Path, language: str) -> list[str]:
    return [body for found, body in _FENCE.findall(_read(document)) if found == language]


def _command_lines(document: Path) -> Iterator[list[str]]:
    """Everything written as code that starts with `m2flow` or `make`, as words."""
    text = _read(document)
    spans = re.findall(r"`((?:m2flow|make) [^`\n]+)`", _FENCE.sub("", text))
    lines = [line for block in _blocks(document, "sh") for line in block.splitlines()]
    for line in [*spans, *lines]:
        words = shlex.split(line, comments=True)
        if words and words[0] in ("m2flow", "make"):
            yield words


@documents
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    missing = [path for path in _PATH.findall(_read(document)) if not (ROOT / path).exists() and path not in PAGES_BUILT]
    assert not missing


def test_every_module_that_the_pages_about_the_inside_name_exists() -> None:
    pages = [ROOT / "docs" / "architecture.md", *(ROOT / "docs" / "internals").glob("*.md")]
    there = {path.name for path in (ROOT / "m2flow").rglob("*.py")} | {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    named = {(page.name, name) for page in pages for name in re.findall(r"`(\w+\.py)`", _read(page))}
    assert len(named) > 5
    assert [(page, name) for page, name in sorted(named) if name not in there] == []


def _anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _read(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


@documents
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _read(document)):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link


@documents
def test_python_in_a_document_compiles(document: Path) -> None:
    for number, block in enumerate(_blocks(document, "python")):
        compile(block, f"{document.name}, block {number}", "exec")


@documents
def test_a_column_of_a_row_in_an_example_is_one_that_rows_can_have(document: Path) -> None:
    read = {name for block in _blocks(document, "python") for name in re.findall(r"\brow\.(\w+)", block)}
    assert not read & TAKEN


def test_the_loop_in_the_readme_is_the_one_in_the_flow() -> None:
    (loop,) = _blocks(README, "python")
    assert loop in (ROOT / "flows" / "grpo.py").read_text()


@documents
def test_every_command_that_a_document_names_is_there_with_its_options(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    context = click.Context(cli)
    for tool, *words in _command_lines(document):
        if tool == "make":
            assert {word for word in words if "=" not in word} <= targets, words
            continue
        if words[0] == "--help":
            continue
        command = cli.get_command(context, words[0])
        if isinstance(command, click.Group) and words[1:]:
            command = command.resolve_command(context, words[1:])[1]
        assert command is not None, words
        known = {option for param in command.params for option in param.opts} | {"--help", *_options_of_the_flow(words)}
        assert {word for word in words if word.startswith("-")} <= known, words


def _options_of_the_flow(words: list[str]) -> set[str]:
    targets = [word for word in words if word.endswith(".py") and (ROOT / word).exists()]
    return {f"--{parameter.name.replace('_', '-')}" for target in targets for parameter in load_flow(str(ROOT / target)).parameters}


def test_the_two_commands_of_the_readme_come_before_all_others() -> None:
    first = _blocks(README, "sh")[0].splitlines()
    assert [line.partition("#")[0].strip() for line in first] == ["make run", "make test"]


def test_every_layer_has_a_line_in_the_tree_of_the_readme() -> None:
    tree = next(block for block in _blocks(README, "") if "clusters/" in block)
    packages = [path.parent.name for path in (ROOT / "m2flow").glob("*/__init__.py")]
    assert not [name for name in packages if f"\n  {name}/ " not in tree]


def test_every_flow_has_a_line_in_the_tree_of_the_readme() -> None:
    tree = next(block for block in _blocks(README, "") if "clusters/" in block)
    assert not [path.name for path in (ROOT / "flows").glob("*.py") if f"\n  {path.name} " not in tree]


def test_every_decision_has_its_number_a_choice_and_what_it_costs() -> None:
    for number, page in enumerate(sorted((ROOT / "docs" / "decisions").glob("*.md")), 1):
        text = page.read_text()
        assert page.name.startswith(f"{number:04}-")
        assert text.startswith(f"# {number}. ")
        assert all(f"**{part}**" in text or f"**{part}.**" in text for part in ("Context", "Choice", "What it costs"))


def test_every_recipe_is_short() -> None:
    recipes = _blocks(ROOT / "docs" / "guide" / "recipes.md", "python")
    assert len(recipes) > 12
    assert max(len(recipe.splitlines()) for recipe in recipes) < 40


def test_every_reward_off_the_shelf_is_short_beside_what_it_says() -> None:
    """At most 40 lines of code; its documentation and empty lines are not counted."""
    source = (ROOT / "m2flow" / "rewards.py").read_text()
    found = {}
    for kind in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        said = {
            line
            for node in ast.walk(kind)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        lines = source.splitlines()[kind.lineno - 1 : kind.end_lineno]
        found[kind.name] = sum(bool(line.strip()) and number not in said for number, line in enumerate(lines, kind.lineno))
    assert len(found) > 12
    assert max(found.values()) <= 40, found
