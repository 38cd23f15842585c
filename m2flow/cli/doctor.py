"""Implement `m2flow doctor` and `m2flow engines`: check this machine and the record of a run, and list the engines that work here.

A `Finding` is one line of a check: its name, its state, the value found and what to do. `m2flow cluster check` makes the same findings
on every node. Nothing is imported from engines to find out whether they are installed: versions come from package metadata, and those of
an inference server from the interpreter that the spec names.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
import psutil
from rich.console import Console
from rich.table import Table

from m2flow.cli.main import find_run
from m2flow.engines.installed import LIBRARY, find_gpu, installed, interpreter_of, missing_tools, overlaid_packages
from m2flow.engines.registry import EngineInfo, capability_tables, check_engine, engines, find_engine, server_of, version_of
from m2flow.errors import M2FlowError
from m2flow.planner.pools import BUILT_IN, device_list
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec

# ---- doctor

State = Literal["ok", "missing", "optional"]
_SHARED = Path("/dev/shm")
_LEAST_SHARED_BYTES = 256 << 20
_LEAST_DISK_BYTES = 1 << 30
_LEAST_MEMORY_BYTES = 2 << 30
_DEVICES = ("dev/nvidia[0-9]*", "dev/kfd", "dev/dri/renderD*", "dev/accel/accel*")


@dataclass(frozen=True)
class Finding:
    """One line of a check: its name, the value found, and what to do if that is not enough."""

    name: str
    state: State
    """`missing`: the default run needs it. `optional`: only other engines or specs need it."""
    value: str
    now: str = ""


@click.command("doctor")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where a run is looked for.")
@click.option(
    "--cluster", type=click.Path(path_type=Path), metavar="SPEC.yaml", help="Look into the interpreters that this spec names, too."
)
def command(run: str | None, as_json: bool, runs_dir: Path, cluster: Path | None) -> None:
    """Check what this machine has and what is missing; or, with a RUN, whether the record of that run is sound.

    RUN is a run directory or its name: one that ended well, failed, was killed, or still goes on. Ends with status 1 if something is
    missing that `m2flow run flows/grpo.py` needs, or if the record is broken.

    \b
    Examples:
      m2flow doctor
      m2flow doctor grpo-20260102-030405
    """
    if run is not None:
        _examine_run(find_run(run, runs_dir), as_json=as_json)
        return
    findings = [*examine(), *([_engine_of(load_cluster(cluster))] if cluster is not None else [])]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            hint = f"  {finding.now}" if finding.now else ""
            click.echo(f"{finding.state:8}  {finding.name:{width}}  {finding.value}{hint}")
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if missing:
        click.echo(f"missing for the default run: {', '.join(missing)}", err=True)
        sys.exit(1)
    if not as_json:
        click.echo("Nothing is missing for the default run: m2flow run flows/grpo.py")


def _examine_run(run_dir: Path, *, as_json: bool) -> None:
    from m2flow.micro.records.audit import audit

    found = audit(run_dir)
    click.echo(json.dumps(asdict(found) | {"is_sound": found.is_sound}, indent=2) if as_json else f"{run_dir}\n{found}")
    if not found.is_sound:
        click.echo("The record is broken. Please report it, with the run's directory.", err=True)
        sys.exit(1)


def examine(runs: Path | None = None) -> Iterator[Finding]:
    """Yield all findings about this machine, the requirements of a run first.

    `runs`: the directory for runs, which need not exist yet; by default the current directory.
    """
    yield Finding("python", "ok" if sys.version_info >= (3, 11) else "missing", platform.python_version(), _python_hint())
    yield Finding("m2flow", "ok", version_of("m2flow") or "not installed, used from its folder")
    for requirement in _requirements(""):
        yield _package(requirement, "missing", f"pip install '{requirement}'")
    yield Finding("cpu cores", "ok", f"{_num_cores()} of {os.cpu_count()} for this process")
    memory = psutil.virtual_memory()
    yield _amount("memory", memory.available, _LEAST_MEMORY_BYTES, f"free of {_size(memory.total)}", "Close something.")
    yield _shared_memory()
    wanted = runs or Path.cwd()
    place = next(place for place in (wanted, *wanted.parents) if place.exists())
    yield _amount("disk", shutil.disk_usage(place).free, _LEAST_DISK_BYTES, f"free in {place}", "Use --runs-dir elsewhere.")
    sockets = Path(tempfile.gettempdir())
    yield Finding(
        "sockets",
        "ok" if os.access(sockets, os.W_OK) else "missing",
        f"in {sockets}",
        "" if os.access(sockets, os.W_OK) else "Set TMPDIR to a folder that can be written.",
    )
    yield _gpus()
    yield _gpu_use()
    for extra in _extras():
        yield _extra(extra)


def _package(requirement: str, if_missing: State, how: str) -> Finding:
    name, least = _parts(requirement)
    version = version_of(name)
    if not version:
        return Finding(name, if_missing, "not installed", how)
    if _numbers(version) < _numbers(least):
        return Finding(name, if_missing, f"{version}, too old: {requirement}", how)
    return Finding(name, "ok", version)


def _extra(extra: str) -> Finding:
    found = [_package(requirement, "optional", "") for requirement in _requirements(extra)]
    lacking = [f.name for f in found if f.state != "ok"]
    if lacking:
        return Finding(f"extra {extra}", "optional", f"lacks {', '.join(lacking)}", f"pip install 'm2flow[{extra}]'")
    tools = missing_tools() if any(info.extra == extra and info.compiles for info in engines()) else {}
    if tools:
        return Finding(f"extra {extra}", "optional", f"lacks {', '.join(tools)} to run on a CPU", "; ".join(tools.values()))
    return Finding(f"extra {extra}", "ok", ", ".join(f"{f.name} {f.value}" for f in found))


def _engine_of(spec: ClusterSpec) -> Finding:
    """Check a spec's rollout engine in the interpreter that it runs in."""
    name = spec.rollout.engine
    try:
        check_engine(name, "rollout", spec.device, spec.rollout.options)
    except M2FlowError as error:
        return Finding(f"engine {name}", "missing", error.what, error.now)
    return Finding(f"engine {name}", "ok", other_interpreter(spec))


def _shared_memory() -> Finding:
    """Check the free shared memory: weight sync goes through it, and a container often has only 64 MiB."""
    if not _SHARED.is_dir() or not os.access(_SHARED, os.W_OK):
        return Finding("shared memory", "missing", f"{_SHARED} can't be written", "Mount a tmpfs there.")
    how = "In a container: --shm-size=1g."
    return _amount("shared memory", shutil.disk_usage(_SHARED).free, _LEAST_SHARED_BYTES, f"free in {_SHARED}", how)


def _gpus() -> Finding:
    found = [f"/{path.relative_to('/')}" for pattern in _DEVICES for path in sorted(Path("/").glob(pattern))]
    return Finding("gpu devices", "ok", ", ".join(found)) if found else Finding("gpu devices", "optional", "none; runs use the CPU")


def _gpu_use() -> Finding:
    """Check whether runs can record the utilisation of an NVIDIA GPU."""
    gpu = find_gpu("cuda")
    use, taken = gpu.read() if gpu is not None else (None, None)
    told = [*([f"{use:.0%} busy"] if use is not None else []), *([f"{_size(taken)} taken"] if taken is not None else [])]
    if told:
        return Finding("gpu use", "ok", f"recorded; cuda:0 is {', '.join(told)}")
    now = "In a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility." if any(Path("/dev").glob("nvidia[0-9]*")) else ""
    return Finding("gpu use", "optional", f"not recorded: {LIBRARY} of NVIDIA's driver says nothing of cuda:0", now)


def _amount(name: str, num_bytes: int, least: int, what: str, how: str) -> Finding:
    is_enough = num_bytes >= least
    now = "" if is_enough else f"A run needs about {_size(least)}. {how}"
    return Finding(name, "ok" if is_enough else "missing", f"{_size(num_bytes)} {what}", now)


def _extras() -> list[str]:
    """List the extras that bring engines or models: without `all`, their sum, and `dev`, for working on m2flow."""
    try:
        names = importlib.metadata.metadata("m2flow").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [name for name in names if name not in ("all", "dev")]


def _requirements(extra: str) -> list[str]:
    """List the requirements of m2flow, or those that an extra adds, such as `torch>=2.6`."""
    try:
        lines = importlib.metadata.requires("m2flow") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    wanted = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        named = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        if (named[1] if named else "") == extra:
            wanted.append(requirement.strip())
    return wanted


def _parts(requirement: str) -> tuple[str, str]:
    found = re.match(r"([A-Za-z0-9._-]+)[^>]*(?:>=\s*([0-9.]+))?", requirement)
    assert found is not None
    return found[1], found[2] or "0"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _python_hint() -> str:
    return "" if sys.version_info >= (3, 11) else "m2flow needs Python 3.11 or newer."


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes >> 20} MiB"


# ---- engines


@click.command("engines")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--markdown", is_flag=True, help="Print what they can do as tables: those of docs/reference/engines.md.")
@click.option(
    "--cluster", type=click.Path(path_type=Path), metavar="SPEC.yaml", help="Look into the interpreters that this spec names, too."
)
def engines_command(as_json: bool, markdown: bool, cluster: Path | None) -> None:
    """List the engines, what they can do, and which work here.

    A cluster spec names them: `rollout: {engine: embedded}`. Others register theirs under the entry point group m2flow.engines.

    \b
    Examples:
      m2flow engines
      m2flow engines --cluster clusters/sglang-cpu.yaml
    """
    found = engines()
    if markdown:
        click.echo(capability_tables(found), nl=False)
        return
    if as_json:
        click.echo(json.dumps([_record(info) for info in found], indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("kind", "name", "devices", "can", "here", "what it is"):
        table.add_column(heading, no_wrap=heading in ("kind", "name"), overflow="fold")
    for info in found:
        table.add_row(info.kind, info.name, ", ".join(info.capabilities.devices), ", ".join(_abilities(info)), usable(info), info.summary)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    if cluster is not None:
        console.print(f"\nOf {cluster}: {other_interpreter(load_cluster(cluster))}", soft_wrap=True)
    console.print(f"Devices for `pools` in a cluster spec: {', '.join(device_list().names)}")
    console.print(f"They are in {BUILT_IN}; a list of yours in the same form (`devices: mine.yaml`) adds to it.", soft_wrap=True)


def usable(info: EngineInfo) -> str:
    """Return `yes`, or what is missing and how to install it.

    For an inference server the answer is about this interpreter only; another interpreter may have it.
    """
    if not info.missing:
        untested = f"; untested on {info.untested}" * bool(info.untested)
        product = server_of(info)
        if product is not None:
            has = next((version for name in product.distributions or (product.engine,) if (version := version_of(name))), "")
            return (
                f"yes ({product.engine} {has})" if has else f"where an interpreter has {product.name}: --cluster looks there"
            ) + untested
        tools = missing_tools() if info.compiles else {}
        lacking = f"; not on a CPU: {', '.join(tools)} missing; {'; '.join(tools.values())}" if tools else ""
        return "yes" + f" ({info.version})" * bool(info.version) + lacking + untested
    how = f"pip install 'm2flow[{info.extra}]'" if info.extra else f"pip install {' '.join(info.missing)}"
    return f"no: {', '.join(info.missing)} missing; {how}"


def other_interpreter(spec: ClusterSpec) -> str:
    """Describe the interpreter that a spec names for its rollout engine: version, abilities and what it lacks."""
    given = spec.rollout.options
    product = server_of(find_engine(spec.rollout.engine, "rollout"))
    if product is None or given.get("url"):
        return f"its rollout engine {spec.rollout.engine} has no interpreter of its own"
    python = interpreter_of(given)
    has = installed(product, python)
    if not has.version:
        return f"{python or sys.executable} has no {product.engine}"
    lacking = f"; it lacks {', '.join(has.lacking)}, which {product.oldest} has" if has.lacking else ""
    laid_over = "".join(f"; its PYTHONPATH has {one}" for one in overlaid_packages(given))
    return f"{python or sys.executable} has {product.engine} {has.version}: {', '.join(has.abilities)}{lacking}{laid_over}"


def _abilities(info: EngineInfo) -> list[str]:
    can = info.capabilities
    names = {
        "keyed seeds": can.keyed_seeds,
        "weights under requests": can.weights_under_requests,
        "probes": can.probes,
        "deterministic": can.deterministic,
    }
    if info.kind != "rollout":  # The other capabilities are about generation.
        names = {"deterministic": can.deterministic, "adapters": can.lora}
    return [name for name, has in names.items() if has] + can.parallel_layouts.names()


def _record(info: EngineInfo) -> dict[str, object]:
    return {
        "kind": info.kind,
        "name": info.name,
        "summary": info.summary,
        "devices": list(info.capabilities.devices),
        "can": _abilities(info),
        "missing": list(info.missing),
        "usable": not info.missing,
        "version": info.version,
        "untested": info.untested,
        "missing to compile on a CPU": list(missing_tools()) if info.compiles else [],
    }
