"""`m2flow diff`: what differs between two plans."""

from __future__ import annotations

from pathlib import Path

import click

from m2flow.micro.plan_file import read_plan
from m2flow.micro.search.differing import differences


@click.command("diff")
@click.argument("one", type=click.Path(path_type=Path), metavar="PLAN")
@click.argument("other", type=click.Path(path_type=Path), metavar="PLAN")
def command(one: Path, other: Path) -> None:
    """Show what differs between two plans: files of `m2flow plan --out` or --json, run directories, or a run's plan.json.

    \b
    Examples:
      m2flow diff before.json after.json
      m2flow diff runs/grpo-20260102-030405 plan.json
    """
    plans = [read_plan(path / "plan.json" if path.is_dir() else path) for path in (one, other)]
    lines = differences(plans[0], plans[1])
    click.echo("\n".join(lines) if lines else "no difference: the plans would run alike")
