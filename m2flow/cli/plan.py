"""`m2flow plan`: the macro graph of a flow, where Python waits, and the plan. Runs no engine, and loads none."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
import msgspec

from m2flow.cli.flow_options import flow_command
from m2flow.cli.planned import PlannedCommand, asked
from m2flow.errors import OptionError
from m2flow.macro.drawing import as_dot, place
from m2flow.macro.exploring import Exploration, anticipate, copies_made, explore
from m2flow.macro.exploring import Path as FlowPath
from m2flow.macro.flow import Flow
from m2flow.macro.graph import MacroGraph
from m2flow.macro.known import Assumption, Known
from m2flow.macro.listing import barriers_listing, bounds_listing, calls_listing
from m2flow.macro.pinning import structure_of
from m2flow.micro.costs.profile import read_profile
from m2flow.micro.forecasting import Forecast, forecast
from m2flow.micro.lowering.arithmetic import TRACED_STEPS
from m2flow.micro.lowering.lower import lower
from m2flow.micro.pace import paced
from m2flow.micro.plan import Plan
from m2flow.micro.plan_file import check_edited, read_plan, write_plan_file
from m2flow.micro.plan_origin import KEY, Origin, origin_of
from m2flow.micro.planning import is_searched, question_of, with_shapes
from m2flow.micro.record.flow_record import read_record
from m2flow.micro.search.explaining import as_document, explain, step_lines
from m2flow.spec import ClusterSpec


class PlanCommand(PlannedCommand):
    """`m2flow plan`: of a flow, or the plan that `--check` gives."""

    plan_option = "--check"


@flow_command("plan", PlanCommand)
@click.option("--cluster", type=click.Path(path_type=Path), metavar="SPEC.yaml", help="The machines; by default one time-shared device.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps to show.")
@click.option(
    "--assume",
    multiple=True,
    metavar="[NAME=]NUMBER",
    help="What a number is that Python waits for: each, those of a name (reward=0.5), or at a line (flows/x.py:31=0.5). May be repeated.",
)
@click.option("--from", "run_dir", type=click.Path(path_type=Path), metavar="RUN", help="Take the values that Python waits for from a run.")
@click.option("--lengths", default="", metavar="LENGTHS", help="Lengths of answers: a trace, a run, or like lognormal:median=900,sigma=1.")
@click.option(
    "--profile", type=click.Path(path_type=Path), metavar="FILE", help="Measured costs, of m2flow profile; else they are modelled."
)
@click.option("--shape", "shapes", multiple=True, metavar="ROLE=MODEL", help="Plan as if a role's model were this one: policy=Qwen2.5-7B.")
@click.option("--policy", default="", metavar="NAME+...", help="Rollout policies, instead of the cluster's: longest-first+repack.")
@click.option("--seed", type=int, default=0, show_default=True, help="The run's seed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the plan, to edit, compare and pin.")
@click.option(
    "--check",
    type=click.Path(path_type=Path),
    metavar="PLAN.json",
    help="Check an edited plan; without FLOW, of the one that it was made of.",
)
@click.option("--terms", "has_terms", is_flag=True, help="List the constants of the cost model, and where each is from.")
@click.option("--dot", "is_dot", is_flag=True, help="Print the graph of the calls in Graphviz's language.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw the graph of the calls.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="The same, as pixels.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    flow: Flow,
    options: dict[str, object],
    cluster: Path | None,
    steps: int,
    assume: tuple[str, ...],
    run_dir: Path | None,
    lengths: str,
    profile: Path | None,
    shapes: tuple[str, ...],
    policy: str,
    seed: int,
    as_json: bool,
    out: Path | None,
    check: Path | None,
    has_terms: bool,
    is_dot: bool,
    svg: Path | None,
    png: Path | None,
) -> None:
    """Show a flow's calls and how they would run, without running them.

    \b
    Examples:
      m2flow plan flows/grpo.py --batch 64 --cluster clusters/laptop-split.yaml
      m2flow plan flows/grpo.py --steps 2 --svg grpo.svg
      m2flow plan flows/grpo.py --cluster clusters/h100-64.yaml --shape policy=Qwen2.5-7B --lengths dapo-qwen2.5-32b --max-new-tokens 10240
      m2flow plan flows/mine.py --assume reward=0.5 --from runs/mine-20260102-030405
      m2flow plan --check plan.json       what --out wrote, and somebody has edited
    """
    wanted = asked(ctx, cluster, seed, profile=profile, lengths=lengths, assume=assume)
    spec, lengths, profile = with_shapes(wanted.spec, shapes).with_policy(policy), wanted.lengths, wanted.profile
    assume, seed = wanted.assume, wanted.seed
    record = read_record(run_dir) if run_dir else None
    known = Known(tuple(Assumption.parse(text) for text in assume), record, str(run_dir))
    exploration = explore(flow, options, steps=steps, seed=seed, known=known)
    graph = anticipate(flow, options, exploration, steps=max(steps, TRACED_STEPS), seed=seed, known=known)
    pinned = read_plan(check) if check else None
    copies = copies_made(flow, options, num_steps=exploration.num_steps, seed=seed, known=known, exploration=exploration)
    models, choice = {**copies.models, **exploration.models}, None
    if is_searched(spec) and pinned is None:
        question = question_of(graph, models, spec, lengths=lengths, profile=profile, copies=copies.sources)
        for doubt in question.doubts:
            click.echo(f"note: {doubt}", err=True)
        choice = question.choose()
    plan = lower(graph, models, spec, num_steps=exploration.num_steps, choice=choice, pinned=pinned, copies=copies.sources)
    if pinned is not None:
        check_edited(pinned, plan, spec)
    plan = paced(plan, graph, models, spec, profile)
    foreseen = None
    if plan.choice is None and profile is not None:
        read_profile(profile).check(models, spec)
        foreseen = forecast(plan, spec, lambda other: question_of(graph, models, other, lengths=lengths, profile=profile))
    origin = origin_of(target, options, spec, lengths=lengths, profile=profile, assume=assume, seed=seed)
    if out is not None:
        write_plan_file(out, plan, origin)
    for path, suffix in ((svg, ".svg"), (png, ".png")):
        if path is not None:
            _draw(exploration.longest, path, suffix)
    if is_dot:
        click.echo(as_dot(exploration.longest.graph))
    elif as_json:
        click.echo(_as_json(exploration, plan, origin, foreseen))
    else:
        placed = [explain(plan.choice, has_terms=has_terms), ""] if plan.choice else _foreseen(foreseen) if foreseen else []
        is_run_here = pinned is None and not spec.pools
        is_told_more = bool(assume or run_dir or lengths or steps > 1)  # Than a run is, which is planned from the rest alone.
        otherwise = _run_otherwise(flow, options, seed, spec, plan, profile) if is_run_here and is_told_more else []
        checked = [f"{check} is a plan of this flow on {spec.name}."] if check else []
        click.echo("\n".join([*_as_text(exploration, target, steps), "", *placed, str(plan), *otherwise, *checked]))


def _foreseen(forecast: Forecast) -> list[str]:
    """What a step of a plan that nobody searched for takes."""
    if forecast.choice is None:
        return [f"step: nothing is predicted: {forecast.note}", ""]
    return [*step_lines(forecast.choice), *([f"note: {forecast.note}"] if forecast.note else []), ""]


def _draw(path: FlowPath, file: Path, suffix: str) -> None:
    from m2flow.macro.picture import write_picture

    if file.suffix != suffix:
        raise OptionError(f"--{suffix[1:]} {file}: the file's name must end in {suffix}")
    try:
        write_picture(place(path.graph, [(look.num_calls, look.observation) for look in path.looks]), file)
    except OSError as error:
        raise OptionError(f"can't write {file}: {error.strerror}") from error


def _as_text(exploration: Exploration, target: str, steps: int) -> list[str]:
    num_steps = exploration.num_steps
    traced = f"the first {steps} of {num_steps} steps" if steps > 1 else f"the first of {num_steps} steps"
    flow = exploration.paths[0].graph.flow
    lines = [f"calls of {flow} ({target}), " + (traced if num_steps else "which is one step"), *calls_listing(exploration), ""]
    barriers = barriers_listing(exploration)
    if not barriers:
        return [*lines, "barriers: none. Python waits for no value in these steps."]
    lines += ["barriers: here Python waits for a value, and what follows can't start before; log() does not wait", *barriers]
    lines += [f"  {line}" for line in bounds_listing(exploration)]
    sources = [source for path in exploration.paths for look in path.looks for source in look.sources]
    if any("not known" in source for source in sources):
        lines += ["  --assume NAME=NUMBER follows the outcomes of one value; --from RUN takes the values that a run has had."]
    if len(exploration.paths) > 1:
        lines += ["  The plan below is made for the outcomes with the most calls."]
    return lines


def _run_otherwise(flow: Flow, options: dict[str, object], seed: int, spec: ClusterSpec, plan: Plan, profile: Path | None) -> list[str]:
    """Why `m2flow run` would have other workers than this plan, if it would: nobody tells it what values will be, or lengths."""
    exploration = explore(flow, options, seed=seed)
    graph = anticipate(flow, options, exploration, steps=TRACED_STEPS, seed=seed)
    copies = copies_made(flow, options, num_steps=exploration.num_steps, seed=seed, exploration=exploration)
    models = {**copies.models, **exploration.models}
    choice = question_of(graph, models, spec, profile=profile, copies=copies.sources).choose() if is_searched(spec) else None
    workers = lower(graph, models, spec, num_steps=exploration.num_steps, choice=choice, copies=copies.sources).workers
    if workers == plan.workers:
        return []
    engines = ", ".join(f"{w.name} ({' + '.join(f'{slot.kind} of {slot.role}' for slot in w.engines)})" for w in workers)
    return ["note: m2flow run, which is told no values (--assume, --from) and no lengths, would begin with", f"  {engines}"]


def _as_json(exploration: Exploration, plan: Plan, origin: Origin, foreseen: Forecast | None) -> str:
    choice = plan.choice or (foreseen.choice if foreseen else None)
    graph = exploration.longest.graph
    document = {
        "flow": graph.flow,
        "calls": _calls(graph),
        "structure": [asdict(call) for call in structure_of(graph)],
        "barriers": [{"call": seen.call, "site": str(seen.site), "why": seen.why} for seen in graph.observations],
        "paths": [_path(path) for path in exploration.paths],
        "outcomes_not_followed": exploration.num_left,
        "plan": msgspec.to_builtins(plan),
        KEY: origin.as_document(),
        **(as_document(choice) if choice else {}),
    }
    return msgspec.json.format(msgspec.json.encode(document)).decode()


def _path(path: FlowPath) -> dict[str, object]:
    return {
        "outcomes": [{"question": fork.question, "site": str(fork.site), "outcome": fork.outcome} for fork in path.forks],
        "values": [{"site": str(look.observation.site), "call": look.observation.call, "sources": look.sources} for look in path.looks],
        "calls": _calls(path.graph),
        "end": path.error or path.end,
    }


def _calls(graph: MacroGraph) -> list[dict[str, object]]:
    names = graph.names()
    return [
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
    ]
