"""The layers of docs/architecture.md, held against the imports of every file; and what no file of the repository may say."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from packages import BEGIN, END, file_graph, nodes_of, package_graph, picture, tree_of  # noqa: E402

PACKAGE = ROOT / "m2flow"

GROUND = {"errors", "samples", "recipe", "spec", "rewards", "sandbox"}
GROUND_MAY_KNOW = {
    "errors": set(),
    "samples": {"errors"},
    "recipe": {"errors"},
    "spec": {"errors"},
    "rewards": {"errors", "samples", "recipe", "sandbox"},
    "sandbox": {"errors"},
}
NEIGHBOURS = {
    "algorithms": set(),
    "observe": set(),
    "channels": set(),
    "macro": {"algorithms"},
    "engines": {"algorithms"},
    "agents": {"engines"},
    "environments": {"macro", "algorithms"},
    "rollout_scheduling": {"macro"},
    "micro": {"agents", "algorithms", "macro", "channels", "observe", "engines", "rollout_scheduling"},
    "planner": {"macro", "observe", "engines", "micro", "rollout_scheduling"},
    "simulator": {"macro", "channels", "observe", "engines", "micro", "rollout_scheduling", "planner"},
    "runner": {"agents", "macro", "observe", "engines", "micro", "rollout_scheduling", "planner", "simulator"},
    "viewer": {"macro", "observe", "engines", "micro", "rollout_scheduling", "planner", "simulator", "runner"},
    "testing": {"agents", "macro", "channels", "observe", "engines", "micro", "rollout_scheduling", "planner", "simulator", "runner"},
    "runs": {"agents", "macro", "observe", "engines", "micro", "rollout_scheduling", "planner", "simulator", "runner", "viewer"},
    "cli": {"agents", "macro", "observe", "engines", "micro", "rollout_scheduling", "planner", "simulator", "runner", "viewer", "runs"},
}
"""Layer -> the layers beside the ground that its files may import, besides itself."""

VENDORS = {
    "zmq": {"channels/zeromq.py", "channels/parcels.py"},
    "ray": {"micro/controller/ray_cluster.py"},
    "sglang": set(),
    "deepspeed": {"engines/distributed/deepspeed.py"},
    "megatron": {"engines/megatron/library.py"},
    "starlette": {"viewer/serving.py", "agents/endpoint.py", "agents/http_sessions.py"},
    "uvicorn": {"viewer/serving.py", "agents/endpoint.py", "agents/http_sessions.py"},
    "gymnasium": {"environments/env.py"},
    "websockets": {"environments/openenv.py"},
    "verifiers": {"agents/verifiers_envs.py"},
    "pydantic_monty": {"sandbox.py"},
}
"""Vendor -> the files that import it, or none."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
HEAVY = ("torch", "transformers", "ray", "sglang", "deepspeed", "megatron")


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def _imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, wherever in the file, by its absolute name."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            is_package = module in ("m2flow", "m2flow.micro.scheduler")
            yield from (f"{module}.{alias.name}" for alias in node.names) if is_package else (module,)


def _layer(module: str) -> str:
    return module.split(".")[1]


DECIDERS = {
    "dispatch",
    "leases",
    "partial_rollouts",
    "scheduling_policy_dispatch",
    "weights",
    "worker_failure",
}
"""Modules of the scheduler that decide, besides `call_lifecycle`, which asks some of them, and `scheduler`, which composes them."""

PARTS_OF_THE_STATE = {"Versions", "EngineWeights", "Policies"}
"""Classes of these modules that decide nothing, and that the state is made of."""


def test_the_schedulers_deciders_know_the_state_and_not_each_other():
    folder = PACKAGE / "micro" / "scheduler"
    for path in folder.glob("*.py"):
        known = {
            module
            for node in nodes_of(path)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("m2flow.micro.scheduler")
            for alias in node.names
            if alias.name not in PARTS_OF_THE_STATE and (module := _scheduler_module(node, alias))
        }
        allowed = {"scheduler": DECIDERS | {"call_lifecycle"}, "call_lifecycle": DECIDERS, "dispatch": {"weights"}}
        wrong = known & (DECIDERS | {"call_lifecycle"}) - allowed.get(path.stem, set())
        assert not wrong, f"{path.name} imports {sorted(wrong)}"


def _scheduler_module(node: ast.ImportFrom, alias: ast.alias) -> str:
    """The module of the scheduler that `from ... import ...` names, without its package."""
    return alias.name if node.module == "m2flow.micro.scheduler" else (node.module or "").rpartition(".")[2]


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_lies_below_its_layer(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        allowed: set[str] = GROUND | set(NEIGHBOURS)  # Types alone: what is loaded, and when, is the next test's.
    else:
        allowed = GROUND_MAY_KNOW[own] if own in GROUND else GROUND | NEIGHBOURS[own] | {own}
    known = {_layer(module) for module in _imports(path) if module.startswith("m2flow.")}
    if own == "cli":
        known.discard("__version__")
    assert known <= allowed, f"{path.relative_to(ROOT)} imports {sorted(known - allowed)}"


def test_no_package_imports_itself_by_way_of_another() -> None:
    cycles = [sorted(each) for each in nx.strongly_connected_components(package_graph()) if len(each) > 1]
    assert not cycles


def test_the_layers_have_an_order_as_allowed_and_as_imported() -> None:
    allowed = nx.DiGraph((above, below) for above, known in NEIGHBOURS.items() for below in known)
    tops = ((above.partition(".")[0], below.partition(".")[0]) for above, below in package_graph().edges)
    for graph in (allowed, nx.DiGraph((above, below) for above, below in tops if above != below)):
        cycles = [sorted(each) for each in nx.strongly_connected_components(graph) if len(each) > 1]
        assert not cycles


def test_no_file_imports_itself_by_way_of_another_not_even_inside_a_function() -> None:
    cycles = [sorted(each) for each in nx.strongly_connected_components(file_graph()) if len(each) > 1]
    assert not cycles


MOST_FILES, MOST_LINES, MOST_LINES_OF_A_FUNCTION = 260, 1000, 80


def test_modules_are_few_and_functions_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in _modules()}
    assert len(lengths) <= MOST_FILES, "modules that are one concept belong together"
    assert not [str(path) for path, length in lengths.items() if length > MOST_LINES]
    functions = [(path, node) for path in lengths for node in nodes_of(path) if isinstance(node, FUNCTIONS)]
    long = [f"{path}:{node.lineno} {node.name}" for path, node in functions if node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION]
    assert not long


def test_the_picture_of_the_packages_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert f"{BEGIN}\n{picture()}{END}" in text, "python docs/packages.py writes it"


def test_importing_the_facade_loads_none_of_its_words() -> None:
    program = (
        "import sys, m2flow\n"
        "loaded = [name for name in sys.modules if name.startswith('m2flow.')]\n"
        "assert not loaded, loaded\n"
        "assert not [word for word in m2flow.__all__ if getattr(m2flow, word) is None]\n"
        "assert set(m2flow.__all__) <= set(dir(m2flow))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_files_that_import_a_vendor_are_few_and_named(vendor: str) -> None:
    importers = {str(path.relative_to(PACKAGE)) for path in _modules() if any(m.split(".")[0] == vendor for m in _imports(path))}
    assert importers == VENDORS[vendor]


def test_torch_is_imported_by_engines_and_algorithms_and_inside_functions_elsewhere() -> None:
    wrong = []
    for path in _modules():
        if path.relative_to(PACKAGE).parts[0] in ("engines", "algorithms"):
            continue
        for node in tree_of(path).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}" for name in names if name.split(".")[0] in HEAVY]
    assert not wrong


def test_neither_the_flow_language_nor_the_command_line_nor_a_plan_loads_a_heavy_package() -> None:
    above = [
        p
        for p in _modules()
        if p.relative_to(PACKAGE).parts[0] in (*sorted(set(NEIGHBOURS) - {"engines", "algorithms", "testing"}), *_ground_files())
    ]
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
    assert firsts <= {"__init__", "__main__"} | GROUND | set(NEIGHBOURS)


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
        lines = enumerate(text.splitlines(), 1) if pattern.search(text) else ()
        found += [f"{path.relative_to(ROOT)}:{i}: {line.strip()[:80]}" for i, line in lines if pattern.search(line)]
    assert not found


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    assert not [p for p in _repository_files() if p.stem in ("utils", "util", "helpers", "helper", "common", "misc")]


def test_no_test_module_is_imported_by_another() -> None:
    """What several of them use is in tests/support, or in a conftest.py: a test module can then be moved, split and renamed alone."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if "__pycache__" not in path.parts]
    modules = {path.stem for path in files if path.stem.startswith("test_")}
    files = [path for path in files if re.search(r"\b(import|from)\b.*\btest_", path.read_text())]  # Few are worth parsing.
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for node in nodes_of(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.rpartition(".")[2] in modules - {path.stem}
    ]
    assert not wrong


def _prepares_in_function(path: Path) -> Iterator[str]:
    """Places where a function has msgspec prepare a type: `decode(..., type=T)`, `Decoder(T)`, or `convert(..., T)` without a decoder."""
    if "msgspec" not in path.read_text():
        return
    calls = [node for node in nodes_of(path) if isinstance(node, ast.Call) and node.args]
    made = {ast.unparse(node.args[0]) for node in calls if ast.unparse(node.func).endswith(".Decoder")}
    for function in (node for node in nodes_of(path) if isinstance(node, FUNCTIONS)):
        for node in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = ast.unparse(node.func)
            kind = next((ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "type"), "")
            is_decode = name in ("msgspec.json.decode", "msgspec.msgpack.decode") and kind and "Raw" not in kind
            is_convert = name == "msgspec.convert" and ast.unparse(node.args[1]) not in made
            if is_decode or is_convert or name in ("msgspec.json.Decoder", "msgspec.msgpack.Decoder"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_types_of_records_are_prepared_on_import() -> None:
    """The first decoding of a type prepares it in msgspec 0.22; two threads that do so at once may end the process (SIGSEGV)."""
    assert not [place for path in _modules() for place in _prepares_in_function(path)]
