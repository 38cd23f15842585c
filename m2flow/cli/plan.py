"""Implement `m2flow plan`, `diff` and `profile`: show a flow's calls and its plan, compare two plans, and measure costs for the planner.

A plan file (`m2flow plan --out`) records its origin: flow, options, cluster, lengths, profile, assumptions and seed. Commands take such a
file in place of a flow, or as the value of an option (`PlannedCommand`):

    m2flow simulate plan.json        m2flow plan --check plan.json        m2flow run --plan plan.json

Values given on the command line replace those of the file: other lengths, another cluster, an option. Where a FLOW is given too, its
options come from the command line alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import click
import msgspec

from m2flow.cli.flow_options import SEED, FlowCommand, find_target, flow_command, option_type
from m2flow.errors import OptionError
from m2flow.macro.flow import Flow
from m2flow.macro.graph import MacroGraph
from m2flow.macro.graph_display import as_dot, place
from m2flow.macro.replay import structure_of
from m2flow.macro.tracing import Exploration, anticipate, copies_made, explore
from m2flow.macro.tracing import ExploredPath as FlowPath
from m2flow.micro.lowering.arithmetic import TRACED_STEPS
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.records.plan_file import KEY, Origin, origin_of, read_plan, write_plan_file
from m2flow.planner.explaining import as_document, differences
from m2flow.planner.planning import Forecast, is_searched, question_of, with_shapes
from m2flow.runs.cluster_file import load_cluster
from m2flow.runs.planning import known_values, make_plan
from m2flow.spec import LAPTOP, ClusterSpec, RunSettings

# ---- plan files on the command line

_ORIGIN = "m2flow.plan_origin"


class PlannedCommand(FlowCommand):
    """A command on a flow, or on a plan file that names its flow: in place of FLOW, or as the value of `plan_option`."""

    plan_option: ClassVar[str] = "--plan"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        target = find_target(args, self.params)
        if target is not None and target.partition(":")[0].endswith(".py"):
            return super().parse_args(ctx, args)
        named, positional = value_of(self.plan_option, args), self._plan_instead_of_flow(args, target)
        if named is not None and positional is not None:
            raise OptionError(f"{positional} is a plan, and {self.plan_option} gives another one", now="Say which of the two.")
        plan = positional if named is None else named
        if plan is None:
            return super().parse_args(ctx, args)
        from m2flow.micro.records.plan_file import read_origin

        name = ctx.command_path.partition(" ")[2].removesuffix(" flow")
        usage = f"m2flow {name} FLOW {self.plan_option} {plan}"
        origin = ctx.meta[_ORIGIN] = read_origin(Path(plan), usage)
        flow = origin.flow_target(plan, usage)
        if positional is None:
            return super().parse_args(ctx, [flow, *args])
        place = args.index(positional)
        return super().parse_args(ctx, [*args[:place], flow, *args[place + 1 :], f"{self.plan_option}={positional}"])

    def _plan_instead_of_flow(self, args: Sequence[str], target: str | None) -> str | None:
        """Return the plan file given in place of FLOW, or None. An argument after an unknown option is that option's value."""
        if target is None or not target.endswith(".json"):
            return None
        place = args.index(target)
        before = args[place - 1] if place else ""
        flags = {name for param in self.params if isinstance(param, click.Option) and param.is_flag for name in param.opts}
        return None if before.startswith("--") and "=" not in before and before not in flags else target

    def _given(self, ctx: click.Context) -> dict[str, object]:
        given = super()._given(ctx)
        origin: Origin | None = ctx.meta.get(_ORIGIN)
        return given if origin is None else {**recorded_options(self.flow_of(ctx), origin.options, "plan"), **given}


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of planning, merged from the command line and the plan file's origin."""

    spec: ClusterSpec
    lengths: str
    profile: Path | None
    assume: tuple[str, ...]
    seed: int


def plan_inputs(
    ctx: click.Context, cluster: Path | None, seed: int, *, profile: Path | None = None, lengths: str = "", assume: tuple[str, ...] = ()
) -> PlanInputs:
    """Merge the inputs: the command line's values, and the plan file's where the command line gives none."""
    origin: Origin | None = ctx.meta.get(_ORIGIN)
    if origin is None:
        return PlanInputs(load_cluster(cluster) if cluster else LAPTOP, lengths, profile, assume, seed)
    is_seed_given = ctx.get_parameter_source("seed") is click.core.ParameterSource.COMMANDLINE
    recorded = Path(origin.directory) / origin.profile if origin.profile else None
    return PlanInputs(
        load_cluster(cluster) if cluster else origin.cluster,
        lengths or _resolve_lengths(origin.directory, origin.lengths),
        profile or recorded,
        assume or origin.assume,
        seed if is_seed_given else origin.seed,
    )


def _resolve_lengths(directory: str, lengths: str) -> str:
    """Resolve a file of lengths against the directory where the plan was made; keep the name of a trace or a formula."""
    place = Path(directory) / lengths
    return str(place) if lengths and place.exists() else lengths


def recorded_options(flow: Flow, written: dict[str, object], made: str = "run") -> dict[str, object]:
    """Convert the flow's options, as a config or plan file records them, to values.

    Raises:
        OptionError: the flow has no such parameter any more, or one that a file can't hold.
    """
    found: dict[str, object] = {}
    for name, value in written.items():
        parameter = next((parameter for parameter in flow.parameters if parameter.name == name), None)
        kind = None if parameter is None else option_type(parameter.type)
        if kind is None:
            what = "has no such parameter any more" if parameter is None else f"takes a {parameter.type}, which no file holds"
            raise OptionError(f"the {made} was made with {name}={value}, and the flow {flow.name} {what}", now=f"Begin a new {made}.")
        found[name] = kind.convert(value, None, None) if isinstance(value, str) else value
    return found


def value_of(option: str, args: Sequence[str]) -> str | None:
    """Return the value of an option on the command line, or None."""
    for position, arg in enumerate(args):
        if arg.startswith(f"{option}="):
            return arg.partition("=")[2]
        if arg == option:
            return args[position + 1] if position + 1 < len(args) else None
    return None


# ---- plan


class PlanCommand(PlannedCommand):
    """`m2flow plan`: plan a flow, or check the plan file given by `--check`."""

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
@click.option("--seed", type=SEED, default=0, show_default=True, help="The run's seed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the plan, to edit, compare and pin.")
@click.option(
    "--check",
    type=click.Path(path_type=Path),
    metavar="PLAN.json",
    help="Check an edited plan; without FLOW, of the one that it was made of.",
)
@click.option("--no-try", is_flag=True, help="Neither render the first rows nor call the functions on a stub sample.")
@click.option("--terms", "has_terms", is_flag=True, help="List the constants of the cost model, and where each is from.")
@click.option("--why", "details", flag_value="why", help="Compare the best plan of each mode (time-shared, split, hybrid) term by term.")
@click.option("--full", "details", flag_value="full", help="Add the memory of each engine, the KV caches, and what --why says.")
@click.option("--dot", "is_dot", is_flag=True, help="Print the graph of the calls in Graphviz's language.")
@click.option(
    "--svg",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw the graph of the calls, by Graphviz where it is installed.",
)
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw the same graph as a PNG.")
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
    no_try: bool,
    has_terms: bool,
    details: str | None,
    is_dot: bool,
    svg: Path | None,
    png: Path | None,
) -> None:
    """Show a flow's calls and how they would run, without running them.

    Before that it tries the first rows: renders them for their model, and calls each reward and op on one stub sample, in a process of
    its own that may neither connect nor write. So a missing column is an error here, and not after the first generation.

    \b
    Examples:
      m2flow plan flows/grpo.py --batch 64 --cluster clusters/laptop-split.yaml
      m2flow plan flows/grpo.py --steps 2 --svg grpo.svg
      m2flow plan flows/grpo.py --cluster clusters/h100-64.yaml --shape policy=Qwen2.5-7B --lengths dapo-qwen2.5-32b --max-new-tokens 10240
      m2flow plan flows/mine.py --assume reward=0.5 --from runs/mine-20260102-030405
      m2flow plan --check plan.json       what --out wrote, and somebody has edited
    """
    inputs = plan_inputs(ctx, cluster, seed, profile=profile, lengths=lengths, assume=assume)
    spec, lengths, profile = with_shapes(inputs.spec, shapes).with_policy(policy), inputs.lengths, inputs.profile
    assume, seed = inputs.assume, inputs.seed
    planned = make_plan(
        flow,
        target,
        options,
        spec,
        steps=steps,
        seed=seed,
        known=known_values(assume, run_dir),
        lengths=lengths,
        profile=profile,
        pinned=read_plan(check) if check else None,
        tries=not no_try,
        note=lambda said: click.echo(f"note: {said}", err=True),
    )
    exploration, plan = planned.exploration, planned.plan
    origin = origin_of(target, options, spec, lengths=lengths, profile=profile, assume=assume, seed=seed)
    if out is not None:
        write_plan_file(out, plan, origin)
    for path, suffix in ((svg, ".svg"), (png, ".png")):
        if path is not None:
            _draw(exploration.longest, path, suffix)
    if is_dot:
        click.echo(as_dot(exploration.longest.graph))
    elif as_json:
        click.echo(_as_json(exploration, plan, origin, planned.foreseen))
    else:
        is_run_here = check is None and not spec.pools
        has_extra_inputs = bool(assume or run_dir or lengths or steps > 1)  # `m2flow run` plans without these.
        notes = _differences_from_run(flow, options, seed, spec, plan, profile) if is_run_here and has_extra_inputs else []
        checked = [f"{check} is a plan of this flow on {spec.name}."] if check else []
        click.echo("\n".join([planned.text(has_terms=has_terms, details=details, notes=notes), *checked]))


def _draw(path: FlowPath, file: Path, suffix: str) -> None:
    from m2flow.macro.graph_display import write_picture, write_with_graphviz

    if file.suffix != suffix:
        raise OptionError(f"--{suffix[1:]} {file}: the file's name must end in {suffix}")
    try:
        if not write_with_graphviz(path.graph, file):
            write_picture(place(path.graph, [(look.num_calls, look.observation) for look in path.looks]), file)
    except OSError as error:
        raise OptionError(f"can't write {file}: {error.strerror}") from error


def _differences_from_run(
    flow: Flow, options: dict[str, object], seed: int, spec: ClusterSpec, plan: Plan, profile: Path | None
) -> list[str]:
    """Explain how the workers of `m2flow run` would differ from this plan's: it plans without assumed values and lengths.

    Empty if they would not differ.
    """
    exploration = explore(flow, options, seed=seed)
    graph = anticipate(flow, options, exploration, steps=TRACED_STEPS, seed=seed)
    copies = copies_made(flow, options, num_steps=exploration.num_steps, seed=seed, exploration=exploration)
    models = {**copies.models, **exploration.models}
    choice = question_of(graph, models, spec, profile=profile, copies=copies.sources).choose() if is_searched(spec, models) else None
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


# ---- diff


@click.command("diff")
@click.argument("one", type=click.Path(path_type=Path), metavar="PLAN")
@click.argument("other", type=click.Path(path_type=Path), metavar="PLAN")
def diff_command(one: Path, other: Path) -> None:
    """Show what differs between two plans: files of `m2flow plan --out` or --json, run directories, or a run's plan.json.

    \b
    Examples:
      m2flow diff before.json after.json
      m2flow diff runs/grpo-20260102-030405 plan.json
    """
    plans = [read_plan(path / "plan.json" if path.is_dir() else path) for path in (one, other)]
    lines = differences(plans[0], plans[1])
    click.echo("\n".join(lines) if lines else "no difference: the plans would run alike")


# ---- profile


@flow_command("profile")
@click.option("--cluster", type=click.Path(path_type=Path), metavar="SPEC.yaml", help="The machines; by default one time-shared device.")
@click.option(
    "--from", "run_dir", type=click.Path(path_type=Path), metavar="RUN", help="Measure nothing: fit what an earlier run recorded."
)
@click.option("--seconds", type=click.FloatRange(min=0), default=15.0, show_default=True, help="About how long to measure a placement.")
@click.option("--only-this-placement", is_flag=True, help="Leave out the placement that the spec does not name.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the profile here too.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="The run's seed.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where the run directories go.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON; all else goes to stderr.")
def profile_command(
    target: str,
    flow: Flow,
    options: dict[str, object],
    cluster: Path | None,
    run_dir: Path | None,
    seconds: float,
    only_this_placement: bool,
    out: Path | None,
    seed: int,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Measure what a flow's work takes, and write it down for the planner.

    Runs the first steps in several sizes on the workers of the plan, time-shared and split, on CPU cores also with replicas that have
    fewer threads each, and fits the constants of the cost model to what they took. The profile is beside the first of these runs.
    Measure on a machine that does nothing else.

    \b
    Examples:
      m2flow profile flows/grpo.py --out grpo.profile.json
      m2flow profile flows/grpo.py --from runs/grpo-20260102-030405
      m2flow plan flows/grpo.py --profile grpo.profile.json
    """
    from m2flow.runner.probing import measure, measured_run

    spec = load_cluster(cluster) if cluster else LAPTOP
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        if run_dir is not None:
            profile = measured_run(run_dir, flow, options)
            path = run_dir / "profile.json"
        else:
            settings = RunSettings(seed=seed, runs_dir=str(runs_dir))
            profile, path = measure(flow, options, spec, settings, budget_s=seconds, only=only_this_placement)
    profile.save(out or path)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(profile)).decode())
        return
    found = profile.constants()
    wide = max(map(len, found), default=0)
    click.echo(f"profile of {flow.name} on {profile.machine.processor}, {profile.machine.cores} cores, {profile.machine.device}")
    for name, constant in found.items():
        click.echo(f"  {name:{wide}}  {constant.value:<10.4g} {constant.unit:10}  {constant.source}")
    num_answers = sum(map(len, profile.responses))
    click.echo(f"  lengths of {num_answers:,} answers to {len(profile.prompts):,} prompts; within-group correlation {profile.icc:.2f}")
    if profile.load > 1:
        click.echo(f"  The machine did other things before (load {profile.load:.1f}): measure again when it does not.")
    click.echo(str(out or path))
