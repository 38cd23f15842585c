"""Record what a run was, and say what differs between two runs' records.

    Flow, options, MacroGraph --resolved_of--> `resolved` in config.json --differences--> Difference ...

`resolved` has every option with its default; of each line's call its sampling, loss, optimiser, functions (by a digest of their code) and
rows (by a checksum); the versions of the packages; the source files of the flow and of the user's modules that it uses, as text and hash;
and the commit of the flow's directory. Configurations of runs that were made before have no `resolved`: what they hold is compared.

Limits: calls are those of the first steps, as the plan's; a dataset is known by the rows that these draw. Source files are those that
the flow's module reaches by its names.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.metadata
import json
import linecache
import os
import platform
import socket
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from m2flow.errors import SpecError
from m2flow.macro.capture import stable_text
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph, owner, shown_file
from m2flow.micro.records.rundir import option_text
from m2flow.samples import Batch

# ---- what a run was

_PACKAGES = (
    *("m2flow", "torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "pyzmq", "pydantic", "networkx", "accelerate"),
    *("peft", "deepspeed", "ray", "sglang", "vllm", "llguidance", "math-verify", "reasoning-gym"),
)
_MOST_FILES, _MOST_BYTES = 64, 256 << 10
_GIT_S = 5.0
_MOST_CHANGED = 20


def resolved_of(flow: Flow, options: Mapping[str, object], graph: MacroGraph) -> dict[str, Any]:
    """What a run comes to: `config.json` has it under `resolved`.

    Args:
        graph: of the flow's first steps.
    """
    sources = sources_of(flow)
    return {
        "flow": flow.name,
        "options": {one.name: option_text(options.get(one.name, one.default)) for one in flow.parameters},
        "staleness": flow.staleness_for(options),
        "calls": dict(_calls(graph.calls)),
        "versions": versions(),
        "machine": {"host": socket.gethostname(), "platform": platform.platform(), "processor": platform.machine()},
        "sources": sources,
        "git": _git(_directory(flow)),
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a run may depend on, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _calls(calls: Iterable[Call]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The options of the first call of each line, by its name; the second line of a name is `policy.generate 2`."""
    seen: set[tuple[str, str]] = set()
    numbers: Counter[str] = Counter()
    for call in calls:
        key = call.name, str(call.site)
        if key in seen:
            continue
        seen.add(key)
        numbers[call.name] += 1
        name = call.name if numbers[call.name] == 1 else f"{call.name} {numbers[call.name]}"
        options = {option: _plain(value) for option, value in call.options.items() if option not in ("cursor", "columns", "windows")}
        yield name, {"site": str(call.site), **options}


def _plain(value: object) -> Any:
    """A value as JSON holds it: what has fields as a mapping, rows by a checksum, functions by their code."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Batch):
        return stable_text(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dataclass_fields__"):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.name != "at"}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return stable_text(value)


# ---- source files


def sources_of(flow: Flow) -> list[dict[str, str]]:
    """The source files of the flow and of the user's modules that it reaches by their names: `name`, `sha256` and `text`."""
    files: dict[str, None] = {flow.function.__code__.co_filename: None}
    waiting, met = [flow.function.__module__], set()
    while waiting and len(files) < _MOST_FILES:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in met or module is None:
            continue
        met.add(name)
        file = getattr(module, "__file__", None)
        if file and owner(file) != "user":
            continue
        if file:
            files[file] = None
        for value in list(vars(module).values()):
            function = value.function if isinstance(value, Flow) else value
            if isinstance(function, types.FunctionType) and owner(function.__code__.co_filename) == "user":
                files[function.__code__.co_filename] = None  # A notebook's cells are files of their own.
            waiting.append(value.__name__ if isinstance(value, types.ModuleType) else str(getattr(function, "__module__", "")))
    found = ((shown_file(file), "".join(linecache.getlines(file))) for file in files)
    return [
        {"name": name, "sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), "text": text[:_MOST_BYTES]}
        for name, text in found
        if text
    ]


def _directory(flow: Flow) -> Path:
    directory = Path(flow.function.__code__.co_filename).parent
    return directory if directory.is_dir() and owner(flow.function.__code__.co_filename) == "user" else Path.cwd()


def _git(directory: Path) -> dict[str, Any]:
    """The commit that a directory is at, and which of its files were changed since; empty where there is no repository."""

    def ask(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(directory), *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_S,
            check=True,
            env={"PATH": _path(), "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )
        return done.stdout

    try:
        commit = ask("rev-parse", "HEAD").strip()
        changed = [line[3:] for line in ask("status", "--porcelain", "--untracked-files=no").splitlines()]
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit, "is_dirty": bool(changed), "changed": changed[:_MOST_CHANGED]}


def _path() -> str:
    return os.environ.get("PATH", os.defpath)


# ---- what differs


Kind = Literal["code", "option", "call", "model", "setting", "cluster", "version", "machine"]


class Difference(msgspec.Struct):
    """One thing that was otherwise in another run."""

    kind: Kind
    name: str
    """`lr`, `policy.update.optimizer.lr`, `flows/grpo.py`."""
    one: str
    """The value in the first run; empty: it has none."""
    other: str
    lines: list[str] = []
    """Unified diff of a source file, by lines."""

    def __str__(self) -> str:
        place = dict(_SECTIONS).get(self.kind)
        return f"{place + '.' if place else ''}{self.name}: {self.one or 'none'} -> {self.other or 'none'}"


_SECTIONS: tuple[tuple[Kind, str], ...] = (
    ("option", "options"),
    ("call", "calls"),
    ("model", "models"),
    ("setting", "settings"),
    ("cluster", "cluster"),
    ("version", "versions"),
    ("machine", "machine"),
)
_OF_RESOLVED = ("calls", "versions", "machine")
_PLACES = ("run_dir", "runs_dir")
"""Settings that say where a run is, not what."""


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Say what differs between two configurations (`config.json`): code first, then options, calls, models, settings, cluster, versions.

    What only one of the two records (an earlier release recorded less) is left out, unless it is an option that was given.
    """
    found = [*_code(one, other)]
    for kind, section in _SECTIONS:
        sides = [_section(config, section) for config in (one, other)]
        if section in _OF_RESOLVED and not all("resolved" in config for config in (one, other)):
            continue
        flat = [dict(_flat("", side)) for side in sides]
        is_recorded_alike = ("resolved" in one) == ("resolved" in other)
        given = {**one.get("options", {}), **other.get("options", {})}
        for name in dict.fromkeys([*flat[0], *flat[1]]):
            if section == "options" and not is_recorded_alike and name not in given:
                continue
            values = [side.get(name, _MISSING) for side in flat]
            if values[0] != values[1] and not (section == "calls" and name.endswith(".site")) and name not in _PLACES:
                found.append(Difference(kind, name, _text(values[0]), _text(values[1])))
    return found


_MISSING = object()


def _section(config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    resolved = config.get("resolved") or {}
    if section == "options":
        more = {"staleness": resolved["staleness"]} if "staleness" in resolved else {}
        return {**config.get("options", {}), **resolved.get("options", {}), **more}
    if section == "settings":
        return {**config.get("settings", {}), **{f"simulated.{name}": value for name, value in config.get("simulated", {}).items()}}
    return dict((resolved if section in _OF_RESOLVED else config).get(section) or {})


def _code(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """The differences of code: the flow, its source files, the commit."""
    has_code = all("resolved" in config for config in (one, other))
    names = [str(config["resolved"]["flow"] if has_code else config.get("flow", "")) for config in (one, other)]
    if names[0] != names[1]:
        yield Difference("code", "flow", names[0], names[1])
    if not has_code:
        return
    sides = [{source["name"]: source for source in config["resolved"].get("sources", [])} for config in (one, other)]
    cells = [[name for name in side if name.startswith("In[")] for side in sides]
    for left, right in zip(*cells, strict=False):  # A cell has another number each time that it is run.
        sides[1][left] = sides[1].pop(right)
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        sources = [side.get(name) for side in sides]
        hashes = [source["sha256"][:12] if source else "" for source in sources]
        if hashes[0] != hashes[1]:
            texts = [source["text"].splitlines() if source else [] for source in sources]
            lines = list(difflib.unified_diff(texts[0], texts[1], f"A/{name}", f"B/{name}", lineterm="", n=2))
            yield Difference("code", name, hashes[0], hashes[1], lines)
    gits = [config["resolved"].get("git") or {} for config in (one, other)]
    commits = [f"{git['commit'][:12]}{' (changed)' if git.get('is_dirty') else ''}" if git else "" for git in gits]
    if commits[0] != commits[1]:
        yield Difference("code", "commit", commits[0], commits[1])


def _flat(place: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and (value or not place):
        for key, inner in value.items():
            yield from _flat(f"{place}.{key}" if place else str(key), inner)
    else:
        yield place, value


def _text(value: object) -> str:
    return "" if value is _MISSING else value if isinstance(value, str) else json.dumps(value, default=str)


def read_configuration(run_dir: Path) -> dict[str, Any]:
    """The whole `config.json` of a run, of any release.

    Raises:
        SpecError: there is none.
    """
    try:
        found = json.loads((run_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{run_dir / 'config.json'} does not say what the run was: {error}",
            now="The directory is not whole: copy the run anew, or take another run.",
        ) from None
    return dict(found)
