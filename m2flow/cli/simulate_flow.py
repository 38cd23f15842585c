"""`m2flow simulate FLOW`: a flow's steps on a virtual clock, by the scheduler that would run them; no engine, any number of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from m2flow.cli.flow_options import flow_command
from m2flow.cli.planned import PlannedCommand, asked
from m2flow.macro.flow import Flow
from m2flow.macro.known import Assumption, Known

if TYPE_CHECKING:
    from m2flow.micro.plan import Plan
    from m2flow.micro.simulation.scenario import Outcome, Scenario


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
    help="A node (or a worker, by its name) fails then; and is back. May be repeated.",
)
@click.option("--compare", is_flag=True, help="Time-shared, split, hybrid and as planned, each with staleness 0, 1 and 2.")
@click.option("--ladder", is_flag=True, help="What each mechanism costs: runs again with one after the other taken away.")
@click.option("--sweep", metavar="gpus=8..4096", help="On more and more devices of the cluster's kind: the numbers, and a picture.")
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
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draws, and the run's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(
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
    from m2flow.micro.costs.profile import read_profile
    from m2flow.micro.plan_file import read_plan
    from m2flow.micro.planning import with_shapes
    from m2flow.micro.simulation.comparing import NUM_STEPS
    from m2flow.micro.simulation.scenario import prepare

    wanted = asked(ctx, cluster, seed, profile=profile, lengths=source, assume=assume)
    spec = with_shapes(wanted.spec, shapes).with_policy(policy).without_spare  # Nobody joins a simulation.
    source, profile, seed = wanted.lengths, wanted.profile, wanted.seed
    if compare and ctx.get_parameter_source("steps") is not click.core.ParameterSource.COMMANDLINE:
        steps = NUM_STEPS
    known = Known(tuple(Assumption.parse(text) for text in wanted.assume))
    for doubt in read_profile(profile).doubts(spec) if profile else ():
        click.echo(f"note: {doubt}", err=True)
    scenario = prepare(flow, options, spec, lengths=source, steps=steps, seed=seed, known=known, profile=profile)
    if sweep is not None:
        from m2flow.cli.simulate_sweep import show_sweep

        show_sweep(scenario, sweep, png or Path("sweep.png"), as_json=as_json)
        return
    if compare:
        from m2flow.cli.simulate_compare import show_comparison

        show_comparison(scenario, as_json=as_json)
        return
    plan = scenario.plan() if plan_file is None else scenario.pinned(read_plan(plan_file))
    outcome = scenario.run(plan, failures=scenario.failures(plan, fail))
    if out is not None:
        from m2flow.micro.forecasting import forecast, write_forecast
        from m2flow.micro.simulation.tracing import write_run

        write_run(out, scenario, outcome, flow_file=target, options=options)
        if plan.choice is None:
            write_forecast(out, forecast(plan, scenario.spec, partial(scenario.ask, scenario.graph)))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(outcome.report)).decode())
    else:
        click.echo("\n".join(_as_text(scenario, outcome, plan)))
    if ladder:
        from m2flow.micro.simulation.ladder import climb

        click.echo("\n".join(_rungs(climb(scenario, plan))), err=as_json)


def _as_text(scenario: Scenario, outcome: Outcome, plan: Plan) -> list[str]:
    report, totals, drawn = outcome.report, outcome.totals, outcome.simulated.history.drawn
    num_instances = sum(any(slot.kind == "rollout" for slot in worker.engines) for worker in plan.workers)
    replayed = f"{drawn.num_replayed} steps of it replayed" if drawn.num_replayed else "drawn from it"
    lines = [
        f"{plan.flow} on {plan.cluster}: {plan.mode}, {outcome.simulated.history.num_devices} devices, {num_instances} rollout instances, "
        f"staleness {scenario.program.staleness}",
        f"lengths: {scenario.lengths.name}, {replayed}",
        "",
    ]
    head = ("step", "seconds", "bound", "of", "efficiency", "trained", "wasted", "staleness", "GiB", "idle for")
    rows = [head]
    for number, step in enumerate(report.steps):
        best = max(step.lower_bounds_s, key=lambda name: step.lower_bounds_s[name], default="")
        rows.append(
            (
                str(number),
                f"{step.makespan_s:,.1f}",
                f"{step.lower_bounds_s.get(best, 0.0):,.1f}",
                best.replace("_between_releases", "").replace("_", " "),
                f"{step.efficiency:.0%}",
                f"{step.trained_tokens:,}",
                f"{step.wasted_tokens:,}",
                " ".join(f"{behind}:{count}" for behind, count in step.staleness.items()),
                f"{step.peak_memory_gib:.1f}",
                causes(step.idle_s, step.makespan_s * outcome.simulated.history.num_devices),
            )
        )
    lines += table(rows)
    whole_s = totals.makespan_s * outcome.simulated.history.num_devices
    lines += [
        "",
        f"all steps: {totals.makespan_s:,.1f} s, {totals.efficiency:.0%} of the bound; devices work {totals.busy_share:.0%} of the time, "
        f"idle for {causes(totals.idle_s, whole_s) or 'nothing'}",
        f"simulated in {report.wall_s:.2f} s, {report.num_events:,} events",
    ]
    return lines


def causes(idle_s: dict[str, float], whole_s: float) -> str:
    """The shares of all device time, the largest first; what is below a thousandth is left out."""
    shares = sorted(((seconds / whole_s if whole_s else 0.0, cause) for cause, seconds in idle_s.items()), reverse=True)
    return ", ".join(f"{cause} {share:.1%}" for share, cause in shares if share >= 0.001)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under their heads; numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def align(text: str, column: int) -> Callable[[int], str]:
        is_number = all(row[column][:1].isdigit() for row in rows[1:] if row[column])
        return text.rjust if is_number else text.ljust

    return ["  ".join(align(text, i)(widths[i]) for i, text in enumerate(row)).rstrip() for row in rows]


def _rungs(rungs: Sequence[tuple[str, float]]) -> list[str]:
    lines = ["", "what each mechanism costs (seconds of all steps, with all above it taken away)"]
    before = rungs[0][1]
    rows = [("", "seconds", "less")]
    for name, seconds in rungs:
        rows.append((name, f"{seconds:,.1f}", f"{before - seconds:,.1f}" if seconds != rungs[0][1] or name != rungs[0][0] else ""))
        before = seconds
    return [*lines, *table(rows)]
