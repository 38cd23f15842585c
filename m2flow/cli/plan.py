"""`m2flow plan`: the macro graph of a flow, where Python waits, and the plan. Runs no engine, and loads none."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click
import msgspec

from m2flow.cli.flow_options import flow_command
from m2flow.macro.flow import Flow
from m2flow.macro.graph import MacroGraph
from m2flow.macro.pinning import structure_of
from m2flow.macro.tracing import trace
from m2flow.micro.arithmetic import TRACED_STEPS
from m2flow.micro.lowering import lower
from m2flow.micro.plan import Plan
from m2flow.spec import LAPTOP, load_cluster


@flow_command("plan")
@click.option("--cluster", type=click.Path(path_type=Path), metavar="SPEC.yaml", help="The machines; by default one time-shared device.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps to show.")
@click.option("--assume", type=float, metavar="NUMBER", help="What every number has that Python waits for; without, the trace ends there.")
@click.option("--seed", type=int, default=0, show_default=True, help="The run's seed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    target: str, flow: Flow, options: dict[str, object], cluster: Path | None, steps: int, assume: float | None, seed: int, as_json: bool
) -> None:
    """Show a flow's calls and how they would run, without running them.

    \b
    Example:
      m2flow plan flows/grpo.py --batch 64 --cluster clusters/laptop-split.yaml
    """
    spec = load_cluster(cluster) if cluster else LAPTOP
    graph, models, num_steps = trace(flow, options, steps=max(steps, TRACED_STEPS), seed=seed, assume=assume)
    plan = lower(graph, models, spec, num_steps=num_steps)
    graph = graph.first_steps(steps)
    click.echo(_as_json(graph, plan) if as_json else _as_text(graph, plan, target, steps, num_steps, assume))


def _as_text(graph: MacroGraph, plan: Plan, target: str, steps: int, num_steps: int, assume: float | None) -> str:
    traced = f"the first {steps} of {num_steps} steps" if steps > 1 else f"the first of {num_steps} steps"
    lines = [
        f"calls of {graph.flow} ({target}), " + (traced if num_steps else "which is one step"),
        str(replace(graph, observations=())),
        "",
    ]
    names = graph.names()
    barriers = [f"  %{names.get(seen.call, seen.call)}  {seen.why}  {seen.site}" for seen in graph.observations]
    if barriers:
        lines += ["barriers: here Python waits for a value, and what follows can't start before; log() does not wait", *barriers]
        lines += ["  The trace ends there. --assume NUMBER goes on as if the value were that."] if assume is None else []
    else:
        lines += ["barriers: none. Python waits for no value in these steps."]
    return "\n".join([*lines, "", str(plan)])


def _as_json(graph: MacroGraph, plan: Plan) -> str:
    names = graph.names()
    document = {
        "flow": graph.flow,
        "calls": [
            {
                "ordinal": call.ordinal,
                "result": names[call.ordinal],
                "call": call.name,
                "inputs": {name: ref.call for name, ref in call.inputs},
                "granularity": str(call.granularity),
                "step": call.step,
                "site": str(call.site),
                "reads": [str(effect) for effect in call.reads],
                "writes": [str(effect) for effect in call.writes],
            }
            for call in graph.calls
        ],
        "structure": [asdict(call) for call in structure_of(graph)],
        "barriers": [{"call": seen.call, "site": str(seen.site), "why": seen.why} for seen in graph.observations],
        "plan": msgspec.to_builtins(plan),
    }
    return msgspec.json.format(msgspec.json.encode(document)).decode()
