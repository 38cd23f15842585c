"""Draw the packages of m2flow and which of them knows which, from the imports of the code, into docs/architecture.md.

    python docs/packages.py

Imports for types alone do not count, imports inside functions do. An arrow leads from a package to one that it imports; arrows that
follow from others are left out.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- packages:begin -->", "<!-- packages:end -->"


@functools.cache
def file_graph() -> nx.DiGraph:
    """A node for each file, by the name of its module, with its path. An edge leads to a file that is imported."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in _files()}
    graph = nx.DiGraph()
    graph.add_nodes_from((name, {"path": path}) for name, path in files.items())
    for name, path in files.items():
        for module in _imported(path):
            target = module if module in files else module.rpartition(".")[0]
            if target in files and target != name:
                graph.add_edge(name, target)
    return graph


@functools.cache
def package_graph() -> nx.DiGraph:
    """A node for each package, by dotted name without `m2flow.`; the ground is `ground`. An edge leads to a package that is imported."""
    files = file_graph()
    package = {name: _package(path) for name, path in files.nodes(data="path")}
    graph = nx.DiGraph()
    graph.add_nodes_from(package.values())
    graph.add_edges_from((package[name], package[target]) for name, target in files.edges if package[name] != package[target])
    return graph


def picture() -> str:
    """The graph in Mermaid, without edges that follow from others and without those to the ground, which everybody knows."""
    reduced = nx.transitive_reduction(package_graph())
    lines = ["```mermaid", "flowchart TD"]
    for above, below in sorted(reduced.edges):
        if below != "ground":
            lines.append(f"    {_key(above)}[{above}] --> {_key(below)}[{below}]")
    return "\n".join([*lines, "```", ""])


def _files() -> list[Path]:
    return sorted(path for path in (ROOT / "m2flow").rglob("*.py"))


def _package(path: Path) -> str:
    return ".".join(path.parent.relative_to(ROOT / "m2flow").parts) or "ground"


def _key(package: str) -> str:
    return package.replace(".", "_")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """What a file says, parsed."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """The imports, functions, calls and conditions of a file, wherever in it."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.Call, ast.If)
    return tuple(node for node in ast.walk(tree_of(path)) if isinstance(node, kinds))


def _imported(path: Path) -> Iterator[str]:
    """Modules that a file imports when it runs, with the names taken from them: `package.module` and `package.module.name` alike."""
    nodes = nodes_of(path)
    typing = {
        id(each)
        for node in nodes
        if isinstance(node, ast.If) and any("TYPE_CHECKING" in _name(part) for part in ast.walk(node.test))
        for child in node.body
        for each in ast.walk(child)
    }
    for node in nodes:
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _name(node: ast.AST) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def main() -> None:
    page = ROOT / "docs" / "architecture.md"
    text = page.read_text()
    page.write_text(f"{text[: text.index(BEGIN)]}{BEGIN}\n{picture()}{text[text.index(END) :]}")


if __name__ == "__main__":
    main()
