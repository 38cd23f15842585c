"""The layers of docs/architecture.md, held against the imports of every file; and what no file of the repository may say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "m2flow"

GROUND = {"errors", "samples", "recipe", "spec"}
MAY_KNOW = {
    "algorithms": GROUND,
    "macro": GROUND,
    "channels": GROUND,
    "observe": GROUND,
    "engines": GROUND | {"algorithms"},
    "micro": GROUND | {"algorithms", "macro", "channels", "observe", "engines"},
    "testing": GROUND | {"macro", "channels", "observe", "engines", "micro"},
    "cli": GROUND | {"macro", "observe", "engines", "micro"},
}
"""Layer -> the layers that its files may import, besides itself."""

GROUND_MAY_KNOW = {"errors": set(), "samples": {"errors"}, "recipe": {"errors"}, "spec": {"errors"}}
FACADE = {"macro", "observe", "recipe", "samples"}
"""What `import m2flow` brings: the words of a flow."""

VENDORS = {
    "zmq": {"channels/zeromq.py", "channels/zeromq_parcels.py", "channels/zeromq_peer.py"},
    "ray": {"micro/control/ray_cluster.py"},
    "sglang": set(),
    "deepspeed": {"engines/deepspeed.py"},
    "starlette": {"micro/viewing/serving.py"},
    "uvicorn": {"micro/viewing/serving.py"},
}
"""Vendor -> the one file that imports it, or none yet."""

HEAVY = ("torch", "transformers", "ray", "sglang", "deepspeed")


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file, by its absolute name."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"m2flow.{alias.name}" for alias in node.names) if module == "m2flow" else (module,)


def _layer(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_lies_below_its_layer(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        allowed = FACADE
    elif own == "__main__":
        allowed = {"cli"}
    else:
        allowed = GROUND_MAY_KNOW[own] if own in GROUND else MAY_KNOW[own] | {own}
    known = {_layer(module) for module in _imports(path) if module.startswith("m2flow.")}
    if own == "cli":
        known.discard("__version__")
    assert known <= allowed, f"{path.relative_to(ROOT)} imports {sorted(known - allowed)}"


@pytest.mark.parametrize("vendor", VENDORS)
def test_one_file_alone_imports_a_vendor(vendor: str) -> None:
    importers = {str(path.relative_to(PACKAGE)) for path in _modules() if any(m.split(".")[0] == vendor for m in _imports(path))}
    assert importers == VENDORS[vendor]


def test_torch_is_imported_by_engines_and_algorithms_and_inside_functions_elsewhere() -> None:
    wrong = []
    for path in _modules():
        if path.relative_to(PACKAGE).parts[0] in ("engines", "algorithms"):
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}" for name in names if name.split(".")[0] in HEAVY]
    assert not wrong


def test_neither_the_flow_language_nor_the_command_line_nor_a_plan_loads_a_heavy_package() -> None:
    above = [p for p in _modules() if p.relative_to(PACKAGE).parts[0] in ("macro", "micro", "cli", "channels", "observe", *_ground_files())]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in above]
    assert "m2flow.cli.main" in modules
    program = (
        "import importlib, sys\n"
        f"for name in {['m2flow', 'm2flow.engines.contract', 'm2flow.engines.registry', *modules]!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr


def _ground_files() -> list[str]:
    return [f"{name}.py" for name in GROUND]


def test_every_file_of_the_package_belongs_to_a_layer() -> None:
    firsts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in _modules()}
    assert firsts <= {"__init__", "__main__"} | GROUND | set(MAY_KNOW)


def _repository_files() -> list[Path]:
    """Files that git tracks or would track; without git, what lies outside hidden and built directories."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        files = [p for p in ROOT.rglob("*") if not {"build", "dist", "runs", ".venv", "__pycache__"} & set(p.relative_to(ROOT).parts)]
    return sorted(path for path in files if path.is_file() and path != Path(__file__).resolve())


FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(work|root|home/\w+|Users/\w+)/",
    "a registry's host": r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs|conda\.anaconda\.org|(?<!\w)hf\.co/|ghcr\.io",
    "how the text came about": r"(?i)co-authored-by|coding agent|helper agent|sub-?agent|agent session|as an ai\b|ai-generated",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_of_the_repository_mentions(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = []
    for path in _repository_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{i}: {line.strip()[:80]}" for i, line in enumerate(text.splitlines(), 1) if pattern.search(line)
        ]
    assert not found


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    assert not [p for p in _repository_files() if p.stem in ("utils", "util", "helpers", "helper", "common", "misc")]
