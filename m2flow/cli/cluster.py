"""Implement `m2flow cluster` (init, schema, scale, check) and `m2flow keys`: write and check cluster specs, and scale running runs.

`init` writes a spec for this machine or for a Ray cluster; `check` asks every node of the cluster what a run with a spec would lack
there; `scale` asks the autoscaler of a running run for more or fewer rollout workers. The JSON Schema takes its descriptions from the
strings under the fields in `m2flow/spec.py`. `keys` writes the key by which the channels of a cluster authenticate.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import platform
import re
import secrets
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import psutil

from m2flow import __version__, spec
from m2flow.cli.doctor import Finding, examine
from m2flow.cli.main import find_run
from m2flow.engines.contract import EngineKind
from m2flow.errors import M2FlowError, MissingExtra, OptionError, SpecError
from m2flow.micro.controller.launcher import make_keys
from m2flow.recipe import is_of_hub
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import ClusterSpec, RaySpec, RolloutSpec, TrainSpec

# ---- init

_HEAD = """\
# {what}. Written by `m2flow cluster init`; `m2flow cluster schema` has every field.
#
#     m2flow cluster check {file}
#     m2flow run flows/grpo.py --cluster {file}

name: {name}
"""
_LOCAL = """\
device: {device:<15} # {gpus}
cores: {cores:<16} # of {all_cores}; {memory} GiB of memory

placement: {placement:<12} # {why}

rollout:
  engine: embedded      # `m2flow engines` lists those that work here
  workers: 1

train:
  engine: embedded
  token_budget: 8192    # tokens of a micro-batch; lower it if training runs out of memory

functions:
  workers: 1            # processes for rewards and ops
"""
_RAY = """\
launcher: ray
ray:
  address: {address}

# The cluster has now:
{nodes}
placement: split
cores: {cores:<16} # of the cluster's {all_cores}, to share out among engines, each's from one node; function workers take one more each
device: {device}

rollout:
  engine: embedded
  workers: {workers:<12} # one a node, but for the trainer's

train:
  engine: embedded

functions:
  workers: 1

# channels:
#   keys: ~/.m2flow/cluster.key   # the same file on every node (`m2flow keys`); without it each run makes a key and sends it through Ray
"""


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("cluster.yaml"))
@click.option("--ray", "address", metavar="ADDRESS", help="Describe a Ray cluster: HOST:PORT, ray://HOST:10001 or auto.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init_command(file: Path, address: str | None, *, force: bool) -> None:
    """Write a cluster spec to FILE (cluster.yaml), for this machine or for a Ray cluster.

    \b
    Examples:
      m2flow cluster init mine.yaml
      m2flow cluster init mine.yaml --ray auto
    """
    if file.exists() and not force:
        raise SpecError(f"{file} exists already", now="Name another file, or give --force to write over it.")
    name = re.sub(r"[^A-Za-z0-9-]+", "-", file.stem).strip("-") or "cluster"
    what, body = _describe_ray_cluster(address) if address else _describe_this_machine()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_HEAD.format(what=what, name=name, file=file) + body)
    load_cluster(file)
    click.echo(f"{file}: {what}\nNext: m2flow cluster check {shlex.quote(str(file))}")


def _describe_this_machine() -> tuple[str, str]:
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    cores, all_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, os.cpu_count() or 1
    memory = psutil.virtual_memory().total >> 30
    found = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}" if gpus else "no GPU"
    body = _LOCAL.format(
        device="cuda:0" if gpus else "cpu",
        gpus=f"{found}; workers here share the first" if len(gpus) > 1 else found,
        cores=cores,
        all_cores=all_cores,
        memory=memory,
        placement="time-shared" if gpus or cores < 4 else "split",
        why="rollout and training take turns"
        if gpus or cores < 4
        else "rollout and training work side by side, each on its share of the cores",
    )
    return f"{socket.gethostname()}: {cores} cores, {found}, {memory} GiB", body


def _describe_ray_cluster(address: str) -> tuple[str, str]:
    from m2flow.micro.controller.ray_cluster import RayCluster

    cluster = RayCluster(RaySpec(address=address))
    cluster.open()
    try:
        nodes = [(int(node.resources.get("CPU", 0)), int(node.resources.get("GPU", 0))) for node in cluster.nodes()]
    finally:
        cluster.close()
    kinds = Counter(node for node in nodes if any(node))
    listed = [f"#   {count} x {cores} cores, {gpus} GPUs" for (cores, gpus), count in sorted(kinds.items(), reverse=True)]
    all_cores, all_gpus = (sum(node[i] for node in nodes) for i in (0, 1))
    body = _RAY.format(
        address=address,
        nodes="\n".join(listed) + "\n",
        cores=max(1, all_cores - 1),
        all_cores=all_cores,
        device="cuda:0                # in each worker: Ray gives it a GPU of its own" if all_gpus else "cpu",
        workers=max(1, (all_gpus or sum(kinds.values())) - 1),
    )
    return f"Ray cluster of {len(nodes)} node{'s' * (len(nodes) != 1)}: {all_cores} cores, {all_gpus} GPUs", body


# ---- schema


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of cluster specs.

    An editor that knows it completes and checks a spec while it is written: name it in the spec's first line, as the examples do.

    \b
    Example:
      m2flow cluster schema > schema.json
      and in a spec:   # yaml-language-server: $schema=schema.json
    """
    click.echo(as_text(), nl=False)


def as_text() -> str:
    """Return the JSON Schema as text, as it is published in `clusters/schema.json`."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, object]:
    """Return the JSON Schema of `ClusterSpec`, with each field's description."""
    found = spec.ClusterSpec.model_json_schema()
    documented = documentation()
    for name, model in {**found["$defs"], "ClusterSpec": found}.items():
        for field, shape in model["properties"].items():
            shape["description"] = documented[name, field]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def documentation() -> dict[tuple[str, str], str]:
    """Map (section, field) of the spec to the string under the field in its source; fields without one are left out."""
    found = {}
    for part in ast.parse(inspect.getsource(spec)).body:
        if isinstance(part, ast.ClassDef):
            for field, below in zip(part.body, part.body[1:], strict=False):
                text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                    found[part.name, field.target.id] = " ".join(text.split())
    return found


# ---- scale


@click.command("scale")
@click.argument("run")
@click.argument("change", metavar="rollout=+N|-N")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
@click.option(
    "--patience", "patience_s", type=float, default=15.0, show_default=True, metavar="S", help="Seconds to wait for the run's answer."
)
def scale_command(run: str, change: str, runs_dir: Path, patience_s: float) -> None:
    """Add N rollout workers to a RUN that goes on, or remove them. The samples are the same; only the time changes.

    At most the spare workers of its cluster spec can join: `rollout: {workers: 2, spare: 4}`. A worker that leaves is killed; other
    workers resume its in-flight samples from their last recorded tokens. A run that is resumed begins with its spec's workers again.

    \b
    Example:
      m2flow cluster scale grpo-20260102-030405 rollout=+2
    """
    from m2flow.micro.controller.supervisor import ask
    from m2flow.viewer.health import is_held, state_of

    found = re.fullmatch(r"rollout=([+-]\d+)", change)
    if found is None:
        raise OptionError(f"{change}: only rollout workers join and leave, by a number with its sign", now="Example: rollout=+2")
    run_dir = find_run(run, runs_dir)
    state = state_of(run_dir)
    if state.ended_s is not None and not is_held(run_dir):  # If the lock is held, the run is being resumed at this moment.
        if state.name == "done":
            raise SpecError(
                f"the run in {run_dir} is over", now="Only a run that goes on can change its workers: begin another one with m2flow run."
            )
        now = f"`m2flow run --resume {shlex.quote(str(run_dir))}` takes it up again, with its spec's workers."
        raise SpecError(f"the run in {run_dir} has stopped: {state.reason}", now=now)
    if state.name == "simulated":
        raise SpecError(
            f"the run in {run_dir} is simulated: it has no workers", now="Change `rollout: {workers: ...}` and simulate it anew."
        )
    click.echo(ask(run_dir, int(found[1]), patience_s=patience_s))


# ---- check

_HERE = "this machine"
_NO_ANSWER = (
    "It hangs, it is going, or it still prepares itself (ray: {patience_s: ...} waits for longer): see `ray status` and its Ray logs."
)


@dataclass(frozen=True)
class NodeQuery:
    """The query that `check` sends to each node: the spec, and what the node must agree with and must see."""

    spec: ClusterSpec
    is_driver: bool
    """Whether the query is answered on the machine where `m2flow run` would be started."""
    python: str
    version: str
    runs: str
    """The directory for runs, or the shared storage that every node must see."""
    mark: str
    """A file in `runs` that every node must see; empty where there is only one node."""
    models: tuple[str, ...]
    """Paths of models that must exist on the node."""


@click.command("check")
@click.argument("file", metavar="SPEC.yaml", type=click.Path(path_type=Path))
@click.option("--flow", "flow", metavar="FLOW.py", help="Also check that the models of this flow are there.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs would go.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_command(file: Path, flow: str | None, runs_dir: Path, *, as_json: bool) -> None:
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
        verb = "plan" if _is_only_planned(spec) else "run"
        click.echo(f"Nothing is missing: m2flow {verb} {flow or 'flows/grpo.py'} --cluster {file}")


def _is_only_planned(spec: ClusterSpec) -> bool:
    """Whether the spec has pools but no launcher that reaches other hosts: it can be planned and simulated, and `m2flow run` refuses it."""
    return bool(spec.pools) and spec.launcher == "local"


def models_of(flow: str) -> tuple[str, ...]:
    """Return the paths of the models that a flow uses, found by tracing its first step."""
    from m2flow.macro.flow import load_flow
    from m2flow.macro.tracing import trace

    _, models, _ = trace(load_flow(flow), {}, steps=1, assume=0.5)
    return tuple(dict.fromkeys(model.path for model in models.values()))


def check(spec: ClusterSpec, *, runs_dir: Path, models: tuple[str, ...] = ()) -> dict[str, list[Finding]]:
    """Examine this machine, and the nodes of the Ray cluster if the spec has one; returns node -> findings."""
    query = NodeQuery(spec, True, platform.python_version(), __version__, str(runs_dir.expanduser().resolve()), "", models)
    here = [*findings_of(query), *_devices(spec)]
    if _is_only_planned(spec):
        here.append(Finding("pools", "optional", "to plan and simulate with: the local launcher runs on this machine alone"))
    if spec.launcher == "local":
        return {_HERE: here}
    return {_HERE: here, **_check_ray_nodes(spec, query, runs_dir)}


def _check_ray_nodes(spec: ClusterSpec, query: NodeQuery, runs_dir: Path) -> dict[str, list[Finding]]:
    from m2flow.micro.controller.ray_cluster import RayCluster

    cluster = RayCluster(spec.ray)
    try:
        cluster.open()
    except SpecError as error:
        return {"ray": [Finding("cluster", "missing", error.what, error.now)]}
    mark = Path(spec.storage.directory or runs_dir).expanduser().resolve() / f".m2flow-check-{secrets.token_hex(4)}"
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        node_query = replace(query, is_driver=False, runs=str(mark.parent), mark=str(mark))
        answers = cluster.on_each_node(_RemoteCheck(node_query), timeout_s=spec.ray.patience_s)
    finally:
        mark.unlink(missing_ok=True)
        cluster.close()
    found = {}
    for number, (node, findings) in enumerate(answers):
        has = ", ".join(
            f"{amount:g} {name}" for name, amount in node.resources.items() if name in ("CPU", "GPU") or not _is_internal_resource(name)
        )
        name = f"node {number + 1} ({node.address}, {has or 'nothing for workers'})"
        found[name] = findings if isinstance(findings, list) else [Finding("answer", "missing", findings, _NO_ANSWER)]
    return found


def _is_internal_resource(resource: str) -> bool:
    return resource in ("memory", "object_store_memory") or resource.startswith("node:")


@dataclass(frozen=True)
class _RemoteCheck:
    """`findings_of` as a function without arguments, which Ray can pickle and call on a node."""

    query: NodeQuery

    def __call__(self) -> list[Finding]:
        return list(findings_of(self.query))


def findings_of(query: NodeQuery) -> Iterator[Finding]:
    """Yield what the node that this runs on has and lacks."""
    spec = query.spec
    python = platform.python_version()
    if python.rpartition(".")[0] != query.python.rpartition(".")[0]:
        yield Finding(
            "same python", "missing", f"{python}; {query.python} where the run is started", "What is sent between them would not fit."
        )
    if __version__ != query.version:
        yield Finding("same m2flow", "missing", f"{__version__}; {query.version} where the run is started", "Install the same.")
    wanted = "extra ray" if spec.launcher == "ray" else ""
    for finding in examine(Path(query.runs)):
        if finding.name.startswith("extra "):
            if finding.name == wanted:
                yield finding if finding.state == "ok" else Finding(finding.name, "missing", finding.value, finding.now)
        elif finding.name == "gpu devices" and spec.device.startswith("cuda") and finding.state != "ok":
            yield Finding(finding.name, "missing", f"none, and the spec says device: {spec.device}", "Say device: auto.")
        else:
            yield finding
    yield from _engines(spec, run_here=spec.launcher == "local" or not query.is_driver)
    yield from _keys(spec)
    if query.is_driver and spec.channels.port is not None:
        yield _port(spec.channels.host, spec.channels.port)
    for path in query.models:
        is_there = Path(path).exists() or is_of_hub(path)  # Each node finds a model of the hub by its own cache.
        yield Finding(
            "model", "ok" if is_there else "missing", path, "" if is_there else "Copy it there, or name a path that all nodes see."
        )
    if query.mark:
        is_seen = Path(query.mark).exists()
        directory = str(Path(query.mark).parent)
        now = "" if is_seen else "Workers write samples there: give --runs-dir on storage that all nodes mount."
        yield Finding("runs directory", "ok" if is_seen else "missing", directory if is_seen else f"{directory} is not seen here", now)


def _engines(spec: ClusterSpec, *, run_here: bool) -> Iterator[Finding]:
    """Check that the spec's engines are usable, in the interpreter that their server would run in.

    `run_here`: engines would run on this machine, so that their options are checked too.
    """
    from m2flow.engines.registry import check_engine

    device = "cpu" if spec.device == "auto" and not Path("/dev/nvidia0").exists() else spec.device
    kinds: tuple[tuple[EngineKind, RolloutSpec | TrainSpec], ...] = (("rollout", spec.rollout), ("train", spec.train))
    for kind, wanted in kinds:
        try:
            check_engine(wanted.engine, kind, device, wanted.options if run_here else None)
        except M2FlowError as error:
            is_needed = not (_is_only_planned(spec) and isinstance(error, MissingExtra))  # A plan is made without it.
            yield Finding(f"{kind} engine", "missing" if is_needed else "optional", error.what, error.now)
        else:
            yield Finding(f"{kind} engine", "ok", wanted.engine)


def _devices(spec: ClusterSpec) -> Iterator[Finding]:
    """Check that the device list has the devices of the spec's pools."""
    if spec.pools:
        from m2flow.planner.pools import pools_of

        try:
            pools = pools_of(spec)
        except SpecError as error:
            yield Finding("devices", "missing", f"{error.where}: {error.what}" if error.where else error.what, error.now)
        else:
            yield Finding("devices", "ok", ", ".join(f"{pool.num_devices} {spec.pools[name].device}" for name, pool in pools.items()))


def _keys(spec: ClusterSpec) -> Iterator[Finding]:
    if spec.channels.keys:
        from m2flow.micro.controller.launcher import keys_of

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


# ---- keys


@click.command("keys")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def keys_command(file: Path) -> None:
    """Make a key for the channels of a cluster, in a FILE that only you can read.

    Every host of the cluster needs the same file. Copy it privately, for example with `scp -p`: whoever has the key can read and send
    every message.

    \b
    Example:
      m2flow keys ~/.m2flow/cluster.key
      and in the cluster spec:   channels: {transport: tcp, host: 10.0.0.7, keys: ~/.m2flow/cluster.key}
    """
    make_keys(file)
    click.echo(f"{file}: name it in the cluster spec, channels: {{keys: {file}}}")
