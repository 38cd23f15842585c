"""`m2flow cluster scale`: more or fewer rollout workers, while a run goes on."""

from __future__ import annotations

import re
from pathlib import Path

import click

from m2flow.cli.rundirs import find_run
from m2flow.errors import OptionError, SpecError


@click.command("scale")
@click.argument("run")
@click.argument("change", metavar="rollout=+N|-N")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
@click.option("--patience", "patience_s", type=float, default=15.0, show_default=True, metavar="S", help="Seconds to wait for its answer.")
def command(run: str, change: str, runs_dir: Path, patience_s: float) -> None:
    """Have N rollout workers join a RUN that goes on, or leave it. The samples are the same; only the time changes.

    As many may join as its cluster spec has spare: `rollout: {workers: 2, spare: 4}`. Who leaves is killed: what it was at goes on
    elsewhere from what was last written down. A run that is resumed begins with its spec's workers again.

    \b
    Example:
      m2flow cluster scale grpo-20260102-030405 rollout=+2
    """
    from m2flow.micro.control.scaling import ask
    from m2flow.micro.viewing.health import is_held, state_of

    found = re.fullmatch(r"rollout=([+-]\d+)", change)
    if found is None:
        raise OptionError(f"{change}: only rollout workers join and leave, by a number with its sign", now="Example: rollout=+2")
    run_dir = find_run(run, runs_dir)
    state = state_of(run_dir)
    if state.ended_s is not None and not is_held(run_dir):  # Else somebody takes it up again at this moment.
        if state.name == "done":
            raise SpecError(f"the run in {run_dir} is over")
        now = f"`m2flow run --resume {run_dir}` takes it up again, with its spec's workers."
        raise SpecError(f"the run in {run_dir} has stopped: {state.reason}", now=now)
    if state.name == "simulated":
        raise SpecError(
            f"the run in {run_dir} is simulated: it has no workers", now="Change `rollout: {workers: ...}` and simulate it anew."
        )
    click.echo(ask(run_dir, int(found[1]), patience_s=patience_s))
