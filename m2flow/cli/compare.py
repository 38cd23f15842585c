"""Implement `m2flow compare`: print what differs between runs: what was asked for, then the time, then the learning.

The comparison itself is in `m2flow.runs.comparing` and `m2flow.viewer.comparison`; this module turns it into tables, or into JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from m2flow.cli.main import find_run
from m2flow.runs.planning import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from m2flow.viewer.comparison import Comparison, Pair

_MOST_METRICS = 16
_MOST_LINES = 24


@click.command("compare")
@click.argument("one")
@click.argument("other")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def command(one: str, other: str, as_json: bool, runs_dir: Path) -> None:
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
    from m2flow.runs.comparing import compare

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
