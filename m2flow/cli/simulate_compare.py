"""The table of `m2flow simulate FLOW --compare`."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING

import click
import msgspec

from m2flow.cli.simulate_flow import causes, table

if TYPE_CHECKING:
    from m2flow.micro.simulation.scenario import Scenario


def show_comparison(scenario: Scenario, *, as_json: bool) -> None:
    """Run and print it."""
    from m2flow.micro.search.choice import Mode
    from m2flow.micro.simulation.comparing import AS_PLANNED, compare

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
    lacking = [mode for mode in typing.get_args(Mode) if all(row.placement != mode for row in rows)]
    click.echo("\n".join([*table(lines), *(f"no plan that fits is {mode}" for mode in lacking)]))
