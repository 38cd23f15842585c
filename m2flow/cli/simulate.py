"""Implement `m2flow simulate`: run a flow's steps (`flow`), or generation alone (`rollout`), on a virtual clock.

`flow` uses the scheduler that would run the flow. No engine is needed, and the cluster may have any number of devices.
The name `flow` may be left out: a first argument that is no command's name is the FLOW (`m2flow simulate flows/grpo.py`).
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.table import Table

from m2flow.cli.flow_options import SEED, flow_command
from m2flow.cli.plan import PlannedCommand, plan_inputs
from m2flow.macro.flow import Flow
from m2flow.macro.tracing import Assumption, KnownValues
from m2flow.runs.planning import causes as causes
from m2flow.runs.planning import make_simulation, prepared
from m2flow.runs.planning import table as table

if TYPE_CHECKING:
    from m2flow.rollout_scheduling.study import StepResult
    from m2flow.simulator.scenario import Scenario


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
    from m2flow.micro.records.plan_file import read_plan
    from m2flow.planner.planning import with_shapes
    from m2flow.planner.profiles import read_profile
    from m2flow.simulator.ablation import NUM_STEPS

    inputs = plan_inputs(ctx, cluster, seed, profile=profile, lengths=source, assume=assume)
    spec = with_shapes(inputs.spec, shapes).with_policy(policy).without_spare  # No worker joins a simulation.
    source, profile, seed = inputs.lengths, inputs.profile, inputs.seed
    if compare and ctx.get_parameter_source("steps") is not click.core.ParameterSource.COMMANDLINE:
        steps = NUM_STEPS
    known = KnownValues(tuple(Assumption.parse(text) for text in inputs.assume))
    for doubt in read_profile(profile).doubts(spec) if profile else ():
        click.echo(f"note: {doubt}", err=True)
    scenario = prepared(flow, options, spec, lengths=source, steps=steps, seed=seed, known=known, profile=profile)
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

        click.echo("\n".join(_ladder_table(ablate(scenario, simulation.plan))), err=as_json)


def _ladder_table(rungs: Sequence[tuple[str, float]]) -> list[str]:
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
    from m2flow.micro.protocol.plan import Mode
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
      round-robin, group-round-robin, least-loaded, lpt, longest-first, shortest-first, probe, repack, gather, split

    \b
    Examples:
      m2flow simulate rollout --lengths dapo-qwen2.5-32b --instances 16 --known-lengths
      m2flow simulate rollout --lengths dapo-qwen2.5-32b --instances 4 --policy all
      m2flow simulate rollout --lengths lognormal:median=4000,sigma=0.8,icc=0.9 --instances 4 --policy split --earlier 8 --json
    """
    from m2flow.rollout_scheduling.decode_model import DecodeModel
    from m2flow.rollout_scheduling.lengths import parse_lengths
    from m2flow.rollout_scheduling.study import steps_of, study_known

    if known_lengths == (policy is not None):
        raise click.UsageError("Say how samples are scheduled: either --known-lengths or --policy NAME.")
    model = DecodeModel(t0_s, t1_s, max_batch)
    lengths = parse_lengths(source)
    steps = list(steps_of(lengths, num_steps, num_groups=num_groups, n=n, seed=seed, num_earlier=num_earlier, num_levels=num_levels))
    known = study_known(steps, model, num_instances, may_pause=not whole)
    results = {_KNOWN: known}
    if policy is not None:
        from m2flow.rollout_scheduling.policies import POLICIES, make_policy, make_predictor
        from m2flow.rollout_scheduling.predictors import Oracle
        from m2flow.rollout_scheduling.study import study_policy

        for name in POLICIES if policy == "all" else [policy]:
            made = make_predictor(predictor)
            oracle = made if isinstance(made, Oracle) else None
            scheduler = make_policy(name, made)
            results[name] = study_policy(scheduler, steps, known, model, num_instances=num_instances, cap=lengths.cap, oracle=oracle)
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
