"""`m2flow profile`: what a flow's work takes on the real engines, measured; for `m2flow plan` and `m2flow simulate`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click
import msgspec

from m2flow.cli.cluster_file import load_cluster
from m2flow.cli.flow_options import flow_command
from m2flow.macro.flow import Flow
from m2flow.spec import LAPTOP, RunSettings


@flow_command("profile")
@click.option("--cluster", type=click.Path(path_type=Path), metavar="SPEC.yaml", help="The machines; by default one time-shared device.")
@click.option(
    "--from", "run_dir", type=click.Path(path_type=Path), metavar="RUN", help="Measure nothing: fit what an earlier run recorded."
)
@click.option("--seconds", type=click.FloatRange(min=0), default=15.0, show_default=True, help="About how long to measure a placement.")
@click.option("--only-this-placement", is_flag=True, help="Leave out the placement that the spec does not name.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the profile here too.")
@click.option("--seed", type=int, default=0, show_default=True, help="The run's seed.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where the run directories go.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON; all else goes to stderr.")
def command(
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

    Runs the flow's first steps in several sizes on the workers of its plan, time-shared and split, and fits the constants of the cost
    model to what they took. The profile is beside the first of these runs. Measure on a machine that does nothing else.

    \b
    Examples:
      m2flow profile flows/grpo.py --out grpo.profile.json
      m2flow profile flows/grpo.py --from runs/grpo-20260102-030405
      m2flow plan flows/grpo.py --profile grpo.profile.json
    """
    from m2flow.micro.costs.probing import measure, measured_run

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
