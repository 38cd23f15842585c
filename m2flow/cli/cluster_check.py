"""`m2flow cluster check`: what a spec needs and which node lacks it, asked on every node before a run finds out."""

from __future__ import annotations

import json
import platform
import secrets
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from m2flow import __version__
from m2flow.cli.cluster_file import load_cluster
from m2flow.cli.doctor import Finding, examine
from m2flow.engines.contract import EngineKind
from m2flow.errors import M2FlowError, MissingExtra, SpecError
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec

_HERE = "this machine"
_NO_ANSWER = (
    "It hangs, it is going, or it still prepares itself (ray: {patience_s: ...} waits for longer): see `ray status` and its Ray logs."
)


@dataclass(frozen=True)
class Question:
    """What each node is asked. It goes there as it is."""

    spec: ClusterSpec
    is_driver: bool
    """It is asked where `m2flow run` would be."""
    python: str
    version: str
    runs: str
    """The directory for runs, or the storage that every node must see."""
    mark: str
    """A file there that every node must see; empty if only one must."""
    models: tuple[str, ...]
    """Files or directories that must be there."""


@click.command("check")
@click.argument("file", metavar="SPEC.yaml", type=click.Path(path_type=Path))
@click.option("--flow", "flow", metavar="FLOW.py", help="Also look for the models of this flow.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs would go.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(file: Path, flow: str | None, runs_dir: Path, *, as_json: bool) -> None:
    """Say what is missing for runs with SPEC.yaml, and on which node.

    Looks at versions, engines, GPUs, ports, disk, shared memory, model files, keys and, on several nodes, whether all see the directory for
    runs. Ends with status 1 if something is missing.

    \b
    Examples:
      m2flow cluster check clusters/laptop.yaml
      m2flow cluster check mine.yaml --flow flows/grpo.py
    """
    spec = load_cluster(file)
    found = check(spec, runs_dir=runs_dir, models=models_of(flow) if flow else ())
    missing = [(node, finding.name) for node, findings in found.items() for finding in findings if finding.state == "missing"]
    if as_json:
        click.echo(json.dumps({node: [asdict(finding) for finding in findings] for node, findings in found.items()}, indent=2))
    else:
        for node, findings in found.items():
            click.echo(node)
            width = max(len(finding.name) for finding in findings)
            for finding in findings:
                click.echo(f"  {finding.state:8}  {finding.name:{width}}  {finding.value}{f'  {finding.now}' if finding.now else ''}")
    for node, name in missing:
        click.echo(f"missing: {name} ({node})", err=True)
    if missing:
        sys.exit(1)
    if not as_json:
        verb = "plan" if _is_a_thought(spec) else "run"
        click.echo(f"Nothing is missing: m2flow {verb} {flow or 'flows/grpo.py'} --cluster {file}")


def _is_a_thought(spec: ClusterSpec) -> bool:
    """It is of devices that nobody has said where to find: `m2flow run` would refuse it."""
    return bool(spec.pools) and spec.launcher == "local"


def models_of(flow: str) -> tuple[str, ...]:
    """The paths of a flow's models."""
    from m2flow.macro.flow import load_flow
    from m2flow.macro.tracing import trace

    _, models, _ = trace(load_flow(flow), {}, steps=1, assume=0.5)
    return tuple(dict.fromkeys(model.path for model in models.values()))


def check(spec: ClusterSpec, *, runs_dir: Path, models: tuple[str, ...] = ()) -> dict[str, list[Finding]]:
    """Node -> what was found there."""
    asked = Question(spec, True, platform.python_version(), __version__, str(runs_dir.expanduser().resolve()), "", models)
    here = [*answer(asked), *_devices(spec)]
    if _is_a_thought(spec):
        here.append(Finding("pools", "optional", "to plan and simulate with: the local launcher runs on this machine alone"))
    if spec.launcher == "local":
        return {_HERE: here}
    return {_HERE: here, **_on_ray(spec, asked, runs_dir)}


def _on_ray(spec: ClusterSpec, asked: Question, runs_dir: Path) -> dict[str, list[Finding]]:
    from m2flow.micro.control.ray_cluster import RayCluster

    cluster = RayCluster(spec.ray)
    try:
        cluster.open()
    except SpecError as error:
        return {"ray": [Finding("cluster", "missing", error.what, error.now)]}
    mark = Path(spec.storage.directory or runs_dir).expanduser().resolve() / f".m2flow-check-{secrets.token_hex(4)}"
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        question = replace(asked, is_driver=False, runs=str(mark.parent), mark=str(mark))
        answers = cluster.on_each_node(_Asking(question), timeout_s=spec.ray.patience_s)
    finally:
        mark.unlink(missing_ok=True)
        cluster.close()
    found = {}
    for number, (node, findings) in enumerate(answers):
        has = ", ".join(f"{amount:g} {name}" for name, amount in node.resources.items() if name in ("CPU", "GPU") or not _is_rays_own(name))
        name = f"node {number + 1} ({node.address}, {has or 'nothing for workers'})"
        found[name] = findings if isinstance(findings, list) else [Finding("answer", "missing", findings, _NO_ANSWER)]
    return found


def _is_rays_own(resource: str) -> bool:
    return resource in ("memory", "object_store_memory") or resource.startswith("node:")


@dataclass(frozen=True)
class _Asking:
    """`answer` as a function without arguments, by which it goes to a node."""

    question: Question

    def __call__(self) -> list[Finding]:
        return list(answer(self.question))


def answer(asked: Question) -> Iterator[Finding]:
    """What one node has and lacks."""
    spec = asked.spec
    python = platform.python_version()
    if python.rpartition(".")[0] != asked.python.rpartition(".")[0]:
        yield Finding(
            "same python", "missing", f"{python}; {asked.python} where the run is started", "What is sent between them would not fit."
        )
    if __version__ != asked.version:
        yield Finding("same m2flow", "missing", f"{__version__}; {asked.version} where the run is started", "Install the same.")
    wanted = "extra ray" if spec.launcher == "ray" else ""
    for finding in examine(Path(asked.runs)):
        if finding.name.startswith("extra "):
            if finding.name == wanted:
                yield finding if finding.state == "ok" else Finding(finding.name, "missing", finding.value, finding.now)
        elif finding.name == "gpu devices" and spec.device.startswith("cuda") and finding.state != "ok":
            yield Finding(finding.name, "missing", f"none, and the spec says device: {spec.device}", "Say device: auto.")
        else:
            yield finding
    yield from _engines(spec, run_here=spec.launcher == "local" or not asked.is_driver)
    yield from _keys(spec)
    if asked.is_driver and spec.channels.port is not None:
        yield _port(spec.channels.host, spec.channels.port)
    for path in asked.models:
        is_there = Path(path).exists()
        yield Finding(
            "model", "ok" if is_there else "missing", path, "" if is_there else "Copy it there, or name a path that all nodes see."
        )
    if asked.mark:
        is_seen = Path(asked.mark).exists()
        directory = str(Path(asked.mark).parent)
        now = "" if is_seen else "Workers write samples there: give --runs-dir on storage that all nodes mount."
        yield Finding("runs directory", "ok" if is_seen else "missing", directory if is_seen else f"{directory} is not seen here", now)


def _engines(spec: ClusterSpec, *, run_here: bool) -> Iterator[Finding]:
    """What engines need, with the interpreter that a server of theirs is to have. `run_here`: this is a machine that they would run on."""
    from m2flow.engines.registry import check_engine

    device = "cpu" if spec.device == "auto" and not Path("/dev/nvidia0").exists() else spec.device
    kinds: tuple[tuple[EngineKind, RolloutSpec | TrainSpec], ...] = (("rollout", spec.rollout), ("train", spec.train))
    for kind, wanted in kinds:
        try:
            check_engine(wanted.engine, kind, device, wanted.options if run_here else None)
        except M2FlowError as error:
            is_needed = not (_is_a_thought(spec) and isinstance(error, MissingExtra))  # A plan is made without it.
            yield Finding(f"{kind} engine", "missing" if is_needed else "optional", error.what, error.now)
        else:
            yield Finding(f"{kind} engine", "ok", wanted.engine)


def _devices(spec: ClusterSpec) -> Iterator[Finding]:
    """Whether the device list has what the pools are of."""
    if spec.pools:
        from m2flow.micro.costs.pools import pools_of

        try:
            pools = pools_of(spec)
        except SpecError as error:
            yield Finding("devices", "missing", f"{error.where}: {error.what}" if error.where else error.what, error.now)
        else:
            yield Finding("devices", "ok", ", ".join(f"{pool.num_devices} {spec.pools[name].device}" for name, pool in pools.items()))


def _keys(spec: ClusterSpec) -> Iterator[Finding]:
    if spec.channels.keys:
        from m2flow.micro.control.launcher import keys_of

        try:
            keys_of(spec)
            yield Finding("key", "ok", spec.channels.keys)
        except SpecError as error:
            yield Finding("key", "missing", error.what, error.now)


def _port(host: str, port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Finding("port", "missing", f"{host}:{port}: {error.strerror}", f"Find who has it with `ss -ltnp 'sport = :{port}'`.")
    return Finding("port", "ok", f"{host}:{port} is free")
