"""Implement `m2flow analyze`: print why a run's steps took the time they took.

The analysis itself is in `m2flow.viewer.analysis` and `suggestions`; this module turns it into tables, or into JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from m2flow.cli.main import find_run
from m2flow.cli.plan import recorded_options
from m2flow.cli.simulate import causes, table
from m2flow.engines.contract import size_of
from m2flow.errors import M2FlowError

if TYPE_CHECKING:
    from m2flow.viewer.analysis import Analysis, StepAnalysis, WorkerMemory
    from m2flow.viewer.suggestions import Suggestions

# ---- analyze

_MOST_STEPS = 20
MOST_SUGGESTED = 3


@click.command("analyze")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--suggest/--no-suggest", default=True, help="Simulate what would be faster, with what the run measured.  [default: suggest]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def command(run: str | None, as_json: bool, suggest: bool, runs_dir: Path) -> None:
    """Say why a run's steps took what they took.

    RUN is a run directory or its name; the newest one by default. The run may still be going on. Each step is held against the bound that
    no schedule of it can beat; each second in which a device was idle has a cause; the critical path names the lines of the flow that the
    step waited for. What is suggested was simulated with the costs and lengths that the run itself measured.

    \b
    Example:
      m2flow analyze runs/grpo-20260102-030405
    """
    from m2flow.viewer.analysis import analysis_of
    from m2flow.viewer.health import alerts_of
    from m2flow.viewer.idle import idle_of
    from m2flow.viewer.run_trace import RunTrace

    run_dir = find_run(run, runs_dir)
    trace = RunTrace(run_dir)
    trace.refresh()
    analysis = analysis_of(trace, idle_of(trace))
    suggestions, why_not = _suggested(run_dir, analysis) if suggest and analysis.steps else (None, "")
    alerts = alerts_of(run_dir, trace)
    if as_json:
        document = {"analysis": analysis, "suggestions": suggestions, "alerts": alerts, "why_not": why_not}
        click.echo(msgspec.json.format(msgspec.json.encode(document)).decode())
        return
    mode = f"{trace.plan.mode} on {trace.plan.cluster}" if trace.plan else "no plan"
    click.echo("\n".join([f"{run_dir}: {mode}", analysis.verdict.sentence, *(_suggestions(suggestions) if suggestions else [])]))
    for alert in alerts:
        click.echo(f"alert: {alert.title}: {alert.says} (rule: {alert.threshold}; {alert.page})")
    if why_not:
        click.echo(f"nothing is suggested: {why_not}", err=True)
    click.echo("\n".join(["", *_text(analysis, suggestions)]))


def _suggested(run_dir: Path, analysis: Analysis) -> tuple[Suggestions | None, str]:
    """Return the suggestions, or None and the reason why there are none."""
    from m2flow.macro.flow import load_flow
    from m2flow.micro.records.rundir import read_config
    from m2flow.viewer.suggestions import suggestions_of

    if (run_dir / "report.json").is_file():
        return None, "it is a simulation, which measured nothing; `m2flow simulate FLOW --compare` simulates it placed otherwise"
    try:
        config = read_config(run_dir)
        if not Path(config.flow.partition(":")[0]).is_file():
            return None, f"its flow is {config.flow} in {config.directory}, which is not here"
        flow = load_flow(config.flow)
        makespans_s = [step.makespan_s for step in analysis.steps]
        return suggestions_of(run_dir, flow, recorded_options(flow, config.options), makespans_s, analysis.verdict), ""
    except M2FlowError as error:
        return None, str(error).partition("\n")[0]


def _text(analysis: Analysis, suggestions: Suggestions | None) -> list[str]:
    if not analysis.steps:
        return ["no step has been recorded"]
    whole = f"{len(analysis.steps)} steps in {analysis.makespan_s:,.2f} s"
    lines = [f"{whole}, {analysis.efficiency:.0%} of the bound" if analysis.efficiency is not None else whole]
    if analysis.predicted_step_s is not None:
        note = f" ({analysis.prediction_note})" if analysis.prediction_note else ""
        lines.append(
            f"{_verb(analysis)}: {analysis.predicted_step_s:,.2f} s a step; took {analysis.makespan_s / len(analysis.steps):,.2f} s{note}"
        )
    else:
        lines.append(f"what a step should take was not said: {analysis.prediction_note}")
    apart = [f"{analysis.setup_s:,.1f} s before the first step ({_setup(analysis)})"] * (analysis.setup_s > 0.05)
    apart += [f"{analysis.evaluation_s:,.1f} s of evaluation"] * (analysis.evaluation_s > 0.005)
    lines += [f"accounted apart: {', '.join(apart)}"] * bool(apart)
    num_devices = sum(device.num_devices for device in analysis.devices)
    lines += [
        "",
        *table([("step", "seconds", "bound", "of", "efficiency", "tokens", "staleness", "idle for"), *_rows(analysis, num_devices)]),
    ]
    left = len(analysis.steps) - _MOST_STEPS
    lines += [f"(the last {_MOST_STEPS}; --json has all {len(analysis.steps)})"] * (left > 0)
    rows = [("device", "", "busy", "idle for")]
    for device in analysis.devices:
        whole_s = device.busy_s + sum(device.idle_s.values())
        rows.append((device.name, device.kinds, f"{device.busy_s / whole_s:.0%}" if whole_s else "", causes(device.idle_s, whole_s)))
    lines += ["", *table(rows)]
    path = [("critical path", "", "share", "s a step")]
    for share in analysis.path:
        path.append((share.label, share.line, f"{share.share:.1%}", f"{share.seconds / len(analysis.steps):,.3f}"))
    lines += [
        "",
        *table(path),
        *(
            f"{one.label}, {one.line}, is on the critical path for {one.share:.0%} of the steps"
            for one in [share for share in analysis.path if share.line][:1]
        ),
        "",
        *table(_stages(analysis, suggestions)),
    ]
    if analysis.memory:
        lines += ["", *table([("memory", "of", "planned", "at most", "after the first step"), *map(_memory, analysis.memory)])]
    if analysis.length_bias:
        classes = [("samples", "number", "mean tokens", "mean reward")]
        for one in analysis.length_bias:
            length, reward = ("" if value is None else f"{value:,.3f}" for value in (one.length, one.reward))
            classes.append((one.name, f"{one.num:,}", length, reward))
        lines += ["", *table(classes)]
    others = ", ".join(f"{tokens:,} {ending}" for ending, tokens in analysis.other_tokens.items())
    lines += ["", f"tokens trained on: {analysis.trained_tokens:,}" + (f"; of other samples: {others}" if others else "")]
    return [*lines, f"decode step: {analysis.decode}"]


def _setup(analysis: Analysis) -> str:
    parts = [f"{one.label} {one.share:.0%}" for one in analysis.setup if one.share >= 0.05]
    return ", ".join(parts) or "loading"


def _verb(analysis: Analysis) -> str:
    return "predicted" if analysis.prediction_note else "planned"


def _stages(analysis: Analysis, suggestions: Suggestions | None) -> list[tuple[str, ...]]:
    """Return a row for each stage: planned seconds, seconds simulated with the run's own costs, and measured seconds.

    A measured time is the mean over the steps in which the stage is on the critical path. Columns without values are left out.
    """
    simulated = {(stage.label, stage.line): f"{stage.seconds:,.3f}" for stage in suggestions.stages} if suggestions else {}
    rows: list[tuple[str, ...]] = [("stage", "", _verb(analysis), "simulated", "measured")]
    for stage in analysis.stages:
        planned = "" if stage.predicted_s is None else f"{stage.predicted_s:,.3f}"
        measured = f"{stage.seconds:,.3f}" if stage.seconds else ""
        rows.append((stage.label, stage.line, planned, simulated.get((stage.label, stage.line), ""), measured))
    said = [column for column in zip(*rows, strict=True) if column[0] in ("stage", "") or any(column[1:])]
    return list(zip(*said, strict=True))


def _memory(one: WorkerMemory) -> tuple[str, ...]:
    planned = "" if one.predicted is None else size_of(one.predicted)
    first = next((peak for peak in one.steps if peak is not None), None)
    return one.worker, one.of, planned, size_of(one.peak), "" if first is None else size_of(first)


def _rows(analysis: Analysis, num_devices: int) -> list[tuple[str, ...]]:
    def row(step: StepAnalysis) -> tuple[str, ...]:
        best = max(step.bounds_s, key=lambda name: step.bounds_s[name], default="")
        return (
            str(step.step),
            f"{step.makespan_s:,.3f}",
            f"{step.bounds_s[best]:,.3f}" if best else "",
            best.replace("_between_releases", "").replace("_", " "),
            "" if step.efficiency is None else f"{step.efficiency:.0%}",
            f"{step.tokens:,}",
            " ".join(f"{behind}:{count}" for behind, count in step.staleness.items()),
            causes(step.idle_s, step.makespan_s * num_devices),
        )

    return [row(step) for step in analysis.steps[-_MOST_STEPS:]]


def _suggestions(suggestions: Suggestions) -> list[str]:
    """Format at most three suggestions, and how well the simulation fits."""
    lines = []
    for at, one in enumerate(suggestions.found[:MOST_SUGGESTED], 1):
        what = f"{one.what}{' (this changes what is trained)' if one.changes_mathematics else ''}"
        how = "simulated" if one.is_simulated else "at most"
        lines.append(f"  {at}. {what}\n     {one.step_s:,.3f} s a step, {one.gain:.0%} less, {how}")
    if not suggestions.found:
        lines.append("  no other placement, policy or number of processes, and no older weights, would be faster by 3% or more")
    if suggestions.is_doubtful:
        lines.append(
            "  warning: the model does not reproduce this run well, so what it says of others is doubtful; try before you trust it"
        )
    return [
        *lines,
        f"simulated with what it measured: {suggestions.simulated_step_s:,.3f} s a step as it was{_calibration_note(suggestions)}",
    ]


def _calibration_note(suggestions: Suggestions) -> str:
    if suggestions.error is None:
        return "; how well that fits is not known, for none of its steps is whole"
    return f"; these steps took {suggestions.measured_step_s:,.3f} s, so the simulation is off by {suggestions.error:+.0%}"
