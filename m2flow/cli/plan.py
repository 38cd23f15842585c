"""Implement `m2flow plan`, `diff`, `profile` and `simulate`: show a flow's calls and plan, what it would take, and what it costs.

A plan file (`m2flow plan --out`) records its origin: flow, options, cluster, lengths, profile, assumptions and seed. Commands take such a
file in place of a flow, or as the value of an option (`PlannedCommand`):

    m2flow simulate plan.json        m2flow plan --check plan.json        m2flow run --plan plan.json

Values given on the command line replace those of the file: other lengths, another cluster, an option. Where a FLOW is given too, its
options come from the command line alone.

`m2flow simulate` runs a flow's steps (`flow`), or generation alone (`rollout`), on a virtual clock. `flow` uses the scheduler that would
run the flow. No engine is needed, and the cluster may have any number of devices. The name `flow` may be left out: a first argument that
is no command's name is the FLOW (`m2flow simulate flows/grpo.py`).
"""

from __future__ import annotations

import contextlib
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

from m2flow.cli.flow_options import SEED, FlowCommand, find_target, flow_command, option_type
from m2flow.errors import OptionError
from m2flow.macro.flow import Flow
from m2flow.macro.graph import MacroGraph
from m2flow.macro.graph_display import as_dot, place, write_picture, write_with_graphviz
from m2flow.macro.replay import structure_of
from m2flow.macro.tracing import Assumption, Exploration, KnownValues, anticipate, copies_made, explore
from m2flow.macro.tracing import ExploredPath as FlowPath
from m2flow.micro.lowering.arithmetic import TRACED_STEPS
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.plan import Mode, Plan
from m2flow.micro.records.plan_file import KEY, Origin, origin_of, read_origin, read_plan, write_plan_file
from m2flow.planner.explaining import as_document, differences
from m2flow.planner.planning import Forecast, is_searched, question_of, with_shapes
from m2flow.runs.cluster_file import load_cluster
from m2flow.runs.planning import causes, known_values, make_plan, make_simulation, prepared, table
from m2flow.spec import LAPTOP, ClusterSpec, RunSettings

if TYPE_CHECKING:
    from m2flow.rollout_scheduling.study import Skill, StepResult
    from m2flow.simulator.scenario import Scenario


# ---- m2flow plan, diff and profile


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
    if file.suffix != suffix:
        raise OptionError(f"--{suffix[1:]} {file}: the file's name must end in {suffix}")
    try:
        if not write_with_graphviz(path.graph, file):
            write_picture(place(path.graph, [(look.num_calls, look.observation) for look in path.looks]), file)
    except OSError as error:
        raise OptionError(
            f"can't write {file}: {error.strerror}", now="Give another file, in a directory that you may write to."
        ) from error


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


# ---- m2flow simulate


# ---- simulate flow


@flow_command("flow", PlannedCommand)
@click.option("--cluster", type=click.Path(path_type=Path), metavar="SPEC.yaml", help="The machines; by default one time-shared device.")
@click.option("--lengths", "source", default="", metavar="TRACE", help="JSON lines, a run directory, the name of a trace, or a formula.")
@click.option(
    "--steps", type=click.IntRange(min=1), default=1, help="Steps of the flow to simulate.  [default: 1; with --compare enough to overlap]"
)
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), metavar="FILE", help="Simulate this plan; by default the best that is found."
)
@click.option("--profile", type=click.Path(path_type=Path), metavar="FILE", help="Costs that `m2flow profile` has measured.")
@click.option(
    "--shape", "shapes", multiple=True, metavar="ROLE=MODEL", help="A role's model, for its costs: policy=Qwen2.5-7B. May be repeated."
)
@click.option(
    "--assume",
    multiple=True,
    metavar="[NAME=]NUMBER",
    help="What a number is that Python waits for; of a filter or refill (keep=0.6) the share that it keeps. May be repeated.",
)
@click.option("--policy", default="", metavar="NAME+...", help="Rollout policies, instead of the cluster's: longest-first+repack.")
@click.option(
    "--fail",
    multiple=True,
    metavar="NODE@SECONDS[-SECONDS]",
    help="A node (or a worker, by its name) fails at a time, and returns at another. May be repeated.",
)
@click.option("--compare", is_flag=True, help="Compare time-shared, split, hybrid and the plan, each with staleness 0, 1 and 2.")
@click.option("--ladder", is_flag=True, help="Show what each mechanism costs: simulate again with one after the other taken away.")
@click.option(
    "--sweep", metavar="gpus=8..4096", help="Simulate more and more devices of the cluster's kind; print a table and draw a picture."
)
@click.option(
    "--png",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where the picture of a sweep goes.  [default: sweep.png]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="RUN",
    help="Write a run's directory, with the trace, for `m2flow trace`.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="The seed of the run and of drawn lengths.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def simulate_flow_command(
    ctx: click.Context,
    target: str,
    flow: Flow,
    options: dict[str, object],
    cluster: Path | None,
    source: str,
    steps: int,
    plan_file: Path | None,
    profile: Path | None,
    shapes: tuple[str, ...],
    assume: tuple[str, ...],
    policy: str,
    fail: tuple[str, ...],
    compare: bool,
    ladder: bool,
    sweep: str | None,
    png: Path | None,
    out: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """How long a flow's steps would take, against the bounds, and why devices would be idle.

    The scheduler is the one that would run the flow; the workers are virtual and take as long as the costs say. A step lasts from the end
    of the one before to the end of its last call.

    \b
    Lengths:
      FILE.jsonl              {"step": 0, "prompt_tokens": 112, "response_tokens": [450, 453]} in each line
      dapo-qwen2.5-32b        a trace that comes with m2flow; also video-qwen2.5-vl-7b
      runs/grpo-20260102-0304 what a run generated
      lognormal:median=4000,sigma=0.8,cap=32768,icc=0.3
    A trace is replayed where its groups fit the flow's (as many, of the same size); else groups are drawn from it. Lengths beyond the
    flow's max_new_tokens are refused: raise that, or cut them (dapo-qwen2.5-32b,cap=4096). A formula without a cap is cut there. Without
    --lengths: what the profile has seen, or an assumption from that limit.

    \b
    Examples:
      m2flow simulate flows/grpo.py --batch 96 --max-new-tokens 10240 --cluster clusters/h100-8.yaml --shape policy=Qwen2.5-7B \
        --lengths dapo-qwen2.5-32b --steps 3
      m2flow simulate flows/grpo.py --lengths runs/grpo-20260102-030405 --compare
      m2flow simulate plan.json --lengths dapo-qwen2.5-32b,cap=8    what m2flow plan --out wrote: its flow, options and cluster
    """
    from m2flow.planner.planning import UNKNOWN_TOOLS
    from m2flow.planner.profiles import read_profile
    from m2flow.simulator.ablation import NUM_STEPS

    inputs = plan_inputs(ctx, cluster, seed, profile=profile, lengths=source, assume=assume)
    spec = with_shapes(inputs.spec, shapes).with_policy(policy).without_spare  # No worker joins a simulation.
    source, profile, seed = inputs.lengths, inputs.profile, inputs.seed
    if compare and ctx.get_parameter_source("steps") is not click.core.ParameterSource.COMMANDLINE:
        steps = NUM_STEPS
    known = KnownValues(tuple(Assumption.parse(text) for text in inputs.assume))
    for doubt in read_profile(profile).doubts(spec, flow.name) if profile else ():
        click.echo(f"note: {doubt}", err=True)
    scenario = prepared(flow, options, spec, lengths=source, steps=steps, seed=seed, known=known, profile=profile)
    if UNKNOWN_TOOLS in scenario.question.doubts:
        click.echo(f"note: {UNKNOWN_TOOLS}", err=True)
    if sweep is not None:
        show_sweep(scenario, sweep, png or Path("sweep.png"), as_json=as_json)
        return
    if compare:
        show_comparison(scenario, as_json=as_json)
        return
    simulation = make_simulation(scenario, target, options, None if plan_file is None else read_plan(plan_file), fail)
    if out is not None:
        simulation.save(out)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(simulation.outcome.report)).decode())
    else:
        click.echo(str(simulation))
    if ladder:
        from m2flow.simulator.ablation import ablate

        click.echo("\n".join(_ablation_table(ablate(scenario, simulation.plan))), err=as_json)


def _ablation_table(rungs: Sequence[tuple[str, float]]) -> list[str]:
    lines = ["", "what each mechanism costs (seconds of all steps, with all above it taken away)"]
    before = rungs[0][1]
    rows = [("", "seconds", "less")]
    for name, seconds in rungs:
        rows.append((name, f"{seconds:,.1f}", f"{before - seconds:,.1f}" if seconds != rungs[0][1] or name != rungs[0][0] else ""))
        before = seconds
    return [*lines, *table(rows)]


# ---- simulate flow: --compare and --sweep


def show_comparison(scenario: Scenario, *, as_json: bool) -> None:
    """Simulate the placements beside each other and print a row for each."""
    from m2flow.simulator.ablation import AS_PLANNED, compare

    rows = compare(scenario, lambda text: click.echo(f"{text} ...", err=True))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    best = min(rows, key=lambda row: row.step_s)
    lines = [("placement", "staleness", "s a step", "bound", "efficiency", "busy", "GiB", "wasted", "idle for")]
    for row in rows:
        name = f"{row.placement} ({row.mode})" if row.placement == AS_PLANNED else row.placement
        lines.append(
            (
                name + (" *" if row.step_s == best.step_s else ""),
                str(row.staleness),
                f"{row.step_s:,.1f}",
                f"{row.bound_s:,.1f}",
                f"{row.efficiency:.0%}",
                f"{row.busy_share:.0%}",
                f"{row.peak_memory_gib:.1f}",
                f"{row.wasted_tokens:,}",
                causes(row.idle_share, 1.0),
            )
        )
    click.echo(f"{scenario.program.flow} on {scenario.spec.name}, lengths: {scenario.lengths.name}; * is the fastest\n")
    unfit = [mode for mode in typing.get_args(Mode) if all(row.placement != mode for row in rows)]
    click.echo("\n".join([*table(lines), *(f"no plan that fits is {mode}" for mode in unfit)]))


def show_sweep(scenario: Scenario, text: str, png: Path, *, as_json: bool) -> None:
    """Simulate on more and more devices; print the numbers and draw them."""
    from m2flow.simulator.ablation import draw, parse_sweep, sweep

    points = []
    for point in sweep(scenario, *parse_sweep(text)):
        points.append(point)
        click.echo(f"{point.gpus:,} GPUs: {f'{point.step_s:,.1f} s a step' if point.mode else point.why}", err=True)
    draw(points, f"{scenario.program.flow}, {scenario.lengths.name}", png)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(points)).decode())
        return
    lines = [("GPUs", "plan", "s a step", "bound", "efficiency", "busy", "speed-up", "idle for")]
    first = next((point for point in points if point.mode), None)
    for point in points:
        if not point.mode:
            lines.append((f"{point.gpus:,}", "none", "", "", "", "", "", point.why))
            continue
        gain = f"{first.step_s / point.step_s:.2f}x" if first else ""
        numbers = (f"{point.step_s:,.1f}", f"{point.bound_s:,.1f}", f"{point.efficiency:.0%}", f"{point.busy_share:.0%}")
        lines.append((f"{point.gpus:,}", point.mode, *numbers, gain, causes(point.idle_share, 1.0)))
    click.echo(f"{scenario.program.flow}, lengths: {scenario.lengths.name}\n")
    click.echo("\n".join(table(lines)))
    click.echo(str(png))


# ---- simulate rollout

_KNOWN = "known lengths"


@click.command("rollout")
@click.option("--lengths", "source", required=True, metavar="TRACE", help="JSON lines, a run directory, the name of a trace, or a formula.")
@click.option("--instances", "num_instances", type=click.IntRange(min=1), required=True, help="Rollout instances.")
@click.option("--t0", "t0_s", type=float, default=0.008, show_default=True, help="Seconds of a decode step.")
@click.option("--t1", "t1_s", type=float, default=0.00008, show_default=True, help="Seconds that each sample adds to it.")
@click.option("--max-batch", type=click.IntRange(min=1), default=128, show_default=True, help="Most samples at once on an instance.")
@click.option("--known-lengths", is_flag=True, help="Assign samples knowing how long they become.")
@click.option("--policy", metavar="NAME", help="Schedule by a policy that does not know lengths: a name, `all`, or FILE.py:CLASS.")
@click.option(
    "--predictor", default="siblings", show_default=True, metavar="NAME", help="Predictor of lengths for a policy; `oracle` knows them."
)
@click.option("--levels", "num_levels", type=click.IntRange(min=0), default=0, help="Levels of difficulty of prompts, for a formula.")
@click.option("--earlier", "num_earlier", type=click.IntRange(min=0), default=0, help="Answers of an earlier epoch, for a formula.")
@click.option("--whole", is_flag=True, help="The assignment with known lengths never pauses a sample.")
@click.option("--steps", "num_steps", type=click.IntRange(min=1), help="The first steps of a trace, or draws.  [default: all; 1 draw]")
@click.option("--groups", "num_groups", type=click.IntRange(min=1), default=64, show_default=True, help="Prompts of a step, for a formula.")
@click.option("--samples", "n", type=click.IntRange(min=1), default=8, show_default=True, help="Samples of a prompt, for a formula.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="The seed of drawn lengths.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def simulate_rollout_command(
    source: str,
    num_instances: int,
    t0_s: float,
    t1_s: float,
    max_batch: int,
    known_lengths: bool,
    policy: str | None,
    predictor: str,
    num_levels: int,
    num_earlier: int,
    whole: bool,
    num_steps: int | None,
    num_groups: int,
    n: int,
    seed: int,
    as_json: bool,
) -> None:
    """How long generation takes, per step and in total, beside the bound that no schedule without migration beats.

    A decode step of b samples takes t0 + t1 b seconds. The bound is max(fractional bound, (t0 + t1) x longest sample). Regret is the
    makespan over that of the assignment with known lengths. docs/guide/rollout-scheduling.md explains the policies and predictors.

    \b
    Lengths:
      FILE.jsonl              {"step": 0, "prompt_tokens": 112, "response_tokens": [450, 453]} in each line
      dapo-qwen2.5-32b        a trace that comes with m2flow; also video-qwen2.5-vl-7b
      runs/grpo-20260102-0304 what a run generated
      lognormal:median=4000,sigma=0.8,cap=32768,icc=0.3,prompt=512    (or mean=)
      mixture:weights=0.7/0.3,median=400/6000,sigma=0.5/0.6,cap=32768

    \b
    Policies:
      round-robin, group-round-robin, least-loaded, lpt, longest-first, shortest-first, probe, repack, gather, split,
      auto

    \b
    Examples:
      m2flow simulate rollout --lengths dapo-qwen2.5-32b --instances 16 --known-lengths
      m2flow simulate rollout --lengths dapo-qwen2.5-32b --instances 4 --policy all
      m2flow simulate rollout --lengths lognormal:median=4000,sigma=0.8,icc=0.9 --instances 4 --policy split --earlier 8 --json
    """
    from m2flow.micro.records.ledger import lengths_of_run
    from m2flow.rollout_scheduling.decode_model import DecodeModel
    from m2flow.rollout_scheduling.lengths import parse_lengths
    from m2flow.rollout_scheduling.study import steps_of, study_known, total

    if known_lengths == (policy is not None):
        raise click.UsageError("Say how samples are scheduled: either --known-lengths or --policy NAME.")
    model = DecodeModel(t0_s, t1_s, max_batch)
    lengths = parse_lengths(source, lengths_of_run)
    steps = list(steps_of(lengths, num_steps, num_groups=num_groups, n=n, seed=seed, num_earlier=num_earlier, num_levels=num_levels))
    known = study_known(steps, model, num_instances, may_pause=not whole)
    results = {_KNOWN: known}
    if policy is not None:
        from m2flow.rollout_scheduling.policies import POLICIES, make_policy, make_predictor
        from m2flow.rollout_scheduling.predictors import Oracle
        from m2flow.rollout_scheduling.study import skill_of, study_policy

        for name in POLICIES if policy == "all" else [policy]:
            made = make_predictor(predictor)
            oracle = made if isinstance(made, Oracle) else None
            scheduler = make_policy(name, made)
            results[name] = study_policy(scheduler, steps, known, model, num_instances=num_instances, cap=lengths.cap, oracle=oracle)
    skill = skill_of(make_predictor(predictor), steps, cap=lengths.cap) if policy is not None and predictor != "oracle" else None
    given = {"lengths": lengths.name, "instances": num_instances, "t0_s": t0_s, "t1_s": t1_s, "max_batch": max_batch}
    if as_json and policy == "all":
        click.echo(json.dumps({**given, "policies": {name: _document(of) for name, of in results.items()}}, indent=2))
    elif as_json:
        click.echo(json.dumps({**given, **_document(results[policy or _KNOWN])}, indent=2))
    else:
        click.echo(
            f"{lengths.name} on {num_instances} instances, a step of b samples takes {t0_s:g} + {t1_s:g} b seconds, b <= {max_batch}\n"
        )
        _print(_policy_rows(results) if policy == "all" else _step_rows(results[policy or _KNOWN], is_known=known_lengths))
        if skill is not None:
            click.echo("\n" + _told(predictor, skill, total(known)))


def _told(predictor: str, skill: Skill, known: StepResult) -> str:
    """What the lengths before a step say of those in it, and what can be expected without that."""
    from m2flow.rollout_scheduling.study import LEAST_SKILL, QUANTILES

    least = f"regret {known.unknown_s / known.known_s:.3f}" if known.unknown_s > known.known_s else "the regret of known lengths"
    bound = f"Who can't tell the samples apart is expected to need {known.unknown_s:.3f} s at least ({least})."
    if not skill.num_steps:
        return f"There is nothing to learn lengths from before the step. {bound}"
    shares = ", ".join(f"{share:.0%} of the lengths below the {q:.0%} quantile" for q, share in zip(QUANTILES, skill.covered, strict=True))
    told = f"{predictor} tells lengths apart before a step: {skill.gain:.1%} less loss than one prediction for all"
    if skill.gain < LEAST_SKILL:
        told = f"Nothing tells lengths apart before a step, as far as {predictor} can learn ({skill.gain:+.1%} of the loss saved)"
    return f"{told}; {shares}; {skill.num_steps} steps, each held out. {bound}"


def _document(results: Sequence[StepResult]) -> dict[str, object]:
    from m2flow.rollout_scheduling.study import total

    return {"steps": [{"step": result.step, **_numbers(result)} for result in results], "total": _numbers(total(results))}


def _numbers(result: StepResult) -> dict[str, float]:
    return {
        "makespan_s": result.makespan_s,
        "bound_s": result.bound_s,
        "ratio": result.ratio,
        "known_s": result.known_s,
        "regret": result.regret,
        "unknown_s": result.unknown_s,
        "num_pauses": result.num_pauses,
        "num_moves": result.num_moves,
    }


def _step_rows(results: Sequence[StepResult], *, is_known: bool) -> list[list[str]]:
    from m2flow.rollout_scheduling.study import total

    rows = [["step", "samples", "tokens", "makespan s", "bound s", "ratio", *(["pauses"] if is_known else ["regret", "moves"])]]
    for name, result in [*((str(result.step), result) for result in results), ("total", total(results))]:
        last = [str(result.num_pauses)] if is_known else [f"{result.regret:.4f}", str(result.num_moves)]
        numbers = [f"{result.makespan_s:.3f}", f"{result.bound_s:.3f}", f"{result.ratio:.4f}"]
        rows.append([name, str(result.num_samples), str(result.num_tokens), *numbers, *last])
    return rows


def _policy_rows(results: Mapping[str, Sequence[StepResult]]) -> list[list[str]]:
    """Return a row for each policy: its totals and its largest regret of a step."""
    from m2flow.rollout_scheduling.study import total

    rows = [["policy", "makespan s", "bound s", "ratio", "regret", "worst step", "moves"]]
    for name, of in results.items():
        whole = total(of)
        worst = max(result.regret for result in of)
        numbers = [f"{whole.makespan_s:.3f}", f"{whole.bound_s:.3f}", f"{whole.ratio:.4f}", f"{whole.regret:.4f}", f"{worst:.4f}"]
        rows.append([name, *numbers, str(whole.num_moves)])
    return rows


def _print(rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in rows[1:]:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table)
