"""The numbers and the picture of `m2flow simulate FLOW --sweep gpus=8..4096`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from m2flow.cli.simulate_flow import causes, table

if TYPE_CHECKING:
    from m2flow.micro.simulation.scenario import Scenario


def show_sweep(scenario: Scenario, text: str, png: Path, *, as_json: bool) -> None:
    """Run, print and draw it."""
    from m2flow.micro.simulation.sweeping import draw, parse_sweep, sweep

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
