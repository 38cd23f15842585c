"""`m2flow engines`: what the registry knows, and what of it works here. Imports no engine."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from m2flow.engines.compiling import missing_tools
from m2flow.engines.registry import EngineInfo, engines
from m2flow.micro.costs.devices import BUILT_IN, device_list
from m2flow.micro.costs.layouts import PLANNED


@click.command("engines")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def command(as_json: bool) -> None:
    """List the engines, what they can do, and which work here.

    A cluster spec names them: `rollout: {engine: embedded}`. Others register theirs under the entry point group m2flow.engines.

    \b
    Example:
      m2flow engines
    """
    found = engines()
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
    console.print(f"Devices for `pools` in a cluster spec: {', '.join(device_list().names)}")
    console.print(f"They are in {BUILT_IN}; a list of yours in the same form (`devices: mine.yaml`) adds to it.", soft_wrap=True)


def usable(info: EngineInfo) -> str:
    """`yes`, or what is missing and how to get it."""
    if not info.missing:
        tools = missing_tools() if info.compiles else {}
        lacking = f"; not on a CPU: {', '.join(tools)} missing; {'; '.join(tools.values())}" if tools else ""
        return "yes" + f" ({info.version})" * bool(info.version) + lacking
    how = f"pip install 'm2flow[{info.extra}]'" if info.extra else f"pip install {' '.join(info.missing)}"
    return f"no: {', '.join(info.missing)} missing; {how}"


def _abilities(info: EngineInfo) -> list[str]:
    can = info.capabilities
    names = {
        "streaming": can.streaming,
        "abort": can.abort,
        "keyed seeds": can.keyed_seeds,
        "resume with prefix": can.resume_with_prefix,
        "weights under requests": can.weights_under_requests,
        "deterministic": can.deterministic,
    }
    if info.kind != "rollout":  # The others are about generation.
        names = {"deterministic": can.deterministic}
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
        "missing to compile on a CPU": list(missing_tools()) if info.compiles else [],
    }
