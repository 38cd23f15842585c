"""`m2flow engines`: what the registry knows, and what of it works here. Imports no engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from m2flow.cli.cluster_file import load_cluster
from m2flow.engines.compiling import missing_tools
from m2flow.engines.registry import EngineInfo, engines, find_engine, server_of, version_of
from m2flow.engines.server_installed import installed, interpreter_of, stand_ins
from m2flow.engines.table import capability_tables
from m2flow.micro.costs.devices import BUILT_IN, device_list
from m2flow.micro.costs.layouts import PLANNED
from m2flow.spec import ClusterSpec


@click.command("engines")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--markdown", is_flag=True, help="Print what they can do as tables: those of docs/guide/engines.md.")
@click.option(
    "--cluster", type=click.Path(path_type=Path), metavar="SPEC.yaml", help="Look into the interpreters that this spec names, too."
)
def command(as_json: bool, markdown: bool, cluster: Path | None) -> None:
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
    here = {(info.name, info.kind): set(info.capabilities.parallel_layouts.names()) for info in found}
    beyond = {key: [name for name in layouts.names() if name not in here.get(key, ())] for key, layouts in PLANNED.items()}
    planned = "; ".join(f"{name} ({kind}) with {', '.join(names)}" for (name, kind), names in beyond.items() if names)
    if planned:
        console.print(f"\nTo plan and simulate with, but not to run here: {planned}")
    if cluster is not None:
        console.print(f"\nOf {cluster}: {other_interpreter(load_cluster(cluster))}", soft_wrap=True)
    console.print(f"Devices for `pools` in a cluster spec: {', '.join(device_list().names)}")
    console.print(f"They are in {BUILT_IN}; a list of yours in the same form (`devices: mine.yaml`) adds to it.", soft_wrap=True)


def usable(info: EngineInfo) -> str:
    """`yes`, or what is missing and how to get it; of an inference server, whether this interpreter has it, for others may."""
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
    """What the interpreter has that a spec names for its rollout engine, in words."""
    given = spec.rollout.options
    product = server_of(find_engine(spec.rollout.engine, "rollout"))
    if product is None or given.get("url"):
        return f"its rollout engine {spec.rollout.engine} has no interpreter of its own"
    python = interpreter_of(given)
    has = installed(product, python)
    if not has.version:
        return f"{python or sys.executable} has no {product.engine}"
    lacking = f"; it lacks {', '.join(has.lacking)}, which {product.oldest} has" if has.lacking else ""
    laid_over = "".join(f"; its PYTHONPATH has {one}" for one in stand_ins(given))
    return f"{python or sys.executable} has {product.engine} {has.version}: {', '.join(has.abilities)}{lacking}{laid_over}"


def _abilities(info: EngineInfo) -> list[str]:
    can = info.capabilities
    names = {
        "streaming": can.streaming,
        "abort": can.abort,
        "keyed seeds": can.keyed_seeds,
        "resume with prefix": can.resume_with_prefix,
        "weights under requests": can.weights_under_requests,
        "probes": can.probes,
        "deterministic": can.deterministic,
    }
    if info.kind != "rollout":  # The others are about generation.
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
