"""Implement `m2flow analyze`, `compare` and `view`: explain the time of a run, compare runs, and show them in the browser.

The analysis itself is in `m2flow.viewer.analysis` and `suggestions`, the comparison in `m2flow.viewer.comparison`, the page in
`m2flow.viewer.serving`; this module turns the first two into tables, or into JSON.
"""

from __future__ import annotations

import os
import secrets
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from m2flow.cli.main import find_run
from m2flow.cli.plan import recorded_options
from m2flow.engines.contract import size_of
from m2flow.errors import M2FlowError, SpecError
from m2flow.runs.planning import OTHER_WAITS, causes, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from m2flow.viewer.analysis import Analysis, StepAnalysis, WorkerMemory
    from m2flow.viewer.comparison import Comparison, Pair
    from m2flow.viewer.suggestions import Suggestions


# ---- m2flow analyze


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
    from m2flow.viewer.run_trace import RunTrace, idle_of

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
        if not config.flow_path.is_file():
            return None, config.why_no_flow()
        flow = load_flow(config.flow)
        return suggestions_of(run_dir, flow, recorded_options(flow, config.options), analysis), ""
    except M2FlowError as error:
        return None, str(error).partition("\n")[0]


def _text(analysis: Analysis, suggestions: Suggestions | None) -> list[str]:
    if not analysis.steps:
        return ["no step has been recorded"]
    whole = f"{len(analysis.steps)} steps in {analysis.makespan_s:,.2f} s"
    lines = [f"{whole}, {analysis.efficiency:.0%} of the bound" if analysis.efficiency is not None else whole]
    if analysis.predicted_step_s is not None:
        note = f" ({analysis.prediction_note})" if analysis.prediction_note else ""
        lines.append(f"{_verb(analysis)}: {analysis.predicted_step_s:,.2f} s a step; took {analysis.step_s:,.2f} s{note}")
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
    if any("barrier" in row[-1] for row in rows):
        lines.append(f"barrier: for Python where it waits for a value (m2flow plan lists these barriers), for {OTHER_WAITS}")
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
    if analysis.shared_in_training:
        lines.append(
            f"shared in training: {analysis.shared_in_training:.0%} of its tokens went through the model with a sample that begins alike"
        )
    if analysis.moved:
        lines.append(f"went on away from their context: {_moved(analysis.moved)}")
    return [*lines, f"decode step: {analysis.decode}"]


def _moved(moved: Mapping[str, int]) -> str:
    """How often samples were moved, by cause."""
    num = sum(moved.values())
    return f"{num:,} time{'s' * (num != 1)} ({', '.join(f'{cause} {count:,}' for cause, count in moved.items())})"


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
        instead = f" instead of {one.step_s / (1 - one.gain):,.3f}" if one.gain < 1 else ""
        lines.append(f"  {at}. {what}\n     {one.step_s:,.3f} s a step{instead}, {one.gain:.0%} less, {how}")
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
    took = f"; its steps took {suggestions.measured_step_s:,.3f} s on average without evaluations"
    return f"{took}, so the simulation is off by {suggestions.error:+.0%}"


# ---- m2flow compare


_MOST_METRICS = 16
_MOST_LINES = 24


@click.command("compare")
@click.argument("one")
@click.argument("other")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def compare_command(one: str, other: str, as_json: bool, runs_dir: Path) -> None:
    """Say what differs between two runs, ONE and OTHER, and why.

    Each is a run directory or a run's name; simulated ones will do. First comes what was asked for differently: code as a unified diff,
    options, losses, optimisers, sampling, models, settings, cluster, versions. Then the time of the steps that both have, taken apart
    along the critical path, by line of the flow, and over all devices, by cause of idle time. Then the learning. Several runs a side,
    separated by commas, are seeds of one: the learning then has 95% confidence intervals over them.

    \b
    Examples:
      m2flow compare runs/grpo-20260102-030405 runs/grpo-20260102-031500
      m2flow compare old-1,old-2,old-3 new-1,new-2,new-3
    """
    from m2flow.viewer.comparison import compare

    sides = [[find_run(name, runs_dir) for name in side.split(",") if name] for side in (one, other)]
    found = compare(sides[0], sides[1])
    comparison = found.time()
    if as_json:
        document = {**({} if comparison is None else msgspec.to_builtins(comparison)), "asked": found.asked, "learned": found.learned}
        click.echo(msgspec.json.format(msgspec.json.encode(document)).decode())
        return
    sections = found.asked_lines(), _comparison_text(comparison) if comparison else ["no step has been recorded"], found.learned_lines()
    click.echo("\n\n".join("\n".join(lines) for lines in sections))


def _comparison_text(found: Comparison) -> list[str]:
    one, other = found.one, found.other
    lines = table([("A", one.name, _placed(one.mode, one.cluster)), ("B", other.name, _placed(other.mode, other.cluster))])
    lines += ["", _steps(found.steps) if found.steps else "", *(f"  {said}" if at else said for at, said in enumerate(found.explained))]
    if found.steps:
        heads = [("", "A", "B", "B - A")]
        heads.append(("seconds a step", f"{one.step_s:,.3f}", f"{other.step_s:,.3f}", f"{other.step_s - one.step_s:+,.3f}"))
        if one.efficiency is not None and other.efficiency is not None:
            heads.append(("of the bound", f"{one.efficiency:.0%}", f"{other.efficiency:.0%}", f"{other.efficiency - one.efficiency:+.0%}"))
        heads.append(
            ("tokens a second", f"{one.tokens_per_s:,.0f}", f"{other.tokens_per_s:,.0f}", f"{other.tokens_per_s - one.tokens_per_s:+,.0f}")
        )
        heads.append(("devices", str(one.num_devices), str(other.num_devices), ""))
        lines += ["", *table(heads)]
    lines += _section("critical path, s a step", found.path, 3, least=0.0005)
    lines += _section("device seconds a step", found.idle, 3, least=0.0005)
    lines += _section("tokens of a response", found.lengths, 1)
    lines += _section("versions behind, share", found.staleness, 3)
    lines += _section("tokens", found.tokens, 0)
    if found.metrics:
        rows: list[tuple[str, ...]] = [("metric, mean", "A", "B", "last A", "last B", "steps")]
        for metric in found.metrics[:_MOST_METRICS]:
            means, last = (metric.one, metric.other), (metric.one_last, metric.other_last)
            rows.append((metric.name, *(f"{value:,.4g}" for value in (*means, *last)), str(metric.num_steps)))
        lines += ["", *table(rows), *_left_out(len(found.metrics) - _MOST_METRICS)]
    said = found.plans
    if said:
        lines += ["", "planned differently", *(f"  {line}" for line in said[:_MOST_LINES]), *_left_out(len(said) - _MOST_LINES)]
    return lines


def _section(title: str, pairs: Sequence[Pair], digits: int, *, least: float = 0.0) -> list[str]:
    rows = [(title, "", "A", "B", "B - A")]
    for pair in pairs:
        if max(pair.one or 0.0, pair.other or 0.0) >= least:
            one, other = ("" if value is None else f"{value:,.{digits}f}" for value in (pair.one, pair.other))
            rows.append((pair.what, pair.line, one, other, f"{pair.more:+,.{digits}f}"))
    return ["", *table(rows)] if len(rows) > 1 else []


def _placed(mode: str, cluster: str) -> str:
    return f"{mode} on {cluster}" if mode else "no plan"


def _steps(steps: Sequence[int]) -> str:
    return f"{len(steps)} steps that both have, {steps[0]} to {steps[-1]}"


def _left_out(number: int) -> list[str]:
    return [f"  (and {number} more; --json has all)"] if number > 0 else []


# ---- m2flow view


@click.command("view")
@click.argument("run", required=False)
@click.option("--html", "out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write one file instead: no server.")
@click.option("--open", "is_opened", is_flag=True, help="Open it in a browser.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to answer on; any but loopback asks for a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8265, show_default=True, help="0: any that is free.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def view_command(run: str | None, out: Path | None, is_opened: bool, host: str, port: int, runs_dir: Path) -> None:
    """Show a run in the browser: its schedule, samples, graph, training and health. Live while it goes on.

    RUN is a run directory or its name, or a directory with several runs, which can then be compared; by default all of --runs-dir, the
    newest first. Where there is no run yet, the page waits for the first one. The page is served on this machine's loopback until Ctrl-C.
    With --html the newest run, or RUN, is written as one file that opens without a server or a network.

    \b
    Examples:
      m2flow view
      m2flow view runs/grpo-20260102-030405 --open
      m2flow view runs/grpo-20260102-030405 --html grpo.html
    """
    if out is not None:
        _export(find_run(run, runs_dir), out, is_opened=is_opened)
        return
    from m2flow.viewer.serving import LOOPBACK, Folder, open_socket, serve

    folder = Folder(_place(run, runs_dir), is_awaited=run is None)
    if run is None and not folder.listed():
        click.echo(f"There is no run in {runs_dir} yet: the page waits for the first one.")
    token = "" if host in LOOPBACK else secrets.token_urlsafe(24)
    with open_socket(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
        click.echo(f"{address}  (Ctrl-C ends it)")
        if is_opened:
            _open(address)
        serve(folder, listener, token=token)


def _place(run: str | None, runs_dir: Path) -> Path:
    """Resolve the argument to a run directory, or to a directory of runs."""
    if run is not None and Path(run).is_dir() and not (Path(run) / "config.json").is_file() and any(Path(run).glob("*/config.json")):
        return Path(run)
    if run is None:
        return runs_dir
    return find_run(run, runs_dir)


def _export(run_dir: Path, out: Path, *, is_opened: bool) -> None:
    from m2flow.viewer.serving import write_page

    try:
        write_page(run_dir, out)
    except OSError as error:
        raise SpecError(f"can't write {out}: {error.strerror}", now="Give another place with --html.") from None
    click.echo(out)
    if is_opened:
        _open(out.resolve().as_uri())


def _open(address: str) -> None:
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)
    else:
        click.echo("No display here: open it where a browser is.", err=True)
