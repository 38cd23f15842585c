"""`m2flow export`: a trained model, for other tools."""

from __future__ import annotations

from pathlib import Path

import click

from m2flow.cli.rundirs import find_run


@click.command("export")
@click.argument("run", required=False)
@click.option(
    "--step", type=click.IntRange(min=1), metavar="N", help="Of the checkpoint after so many steps.  [default: the end's, or the newest]"
)
@click.option("--role", metavar="ROLE", help="Whose model, if several are trained.")
@click.option("--adapters", is_flag=True, help="The adapters of a policy with lora= alone, as peft reads them.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Where it goes.  [default: RUN/export/ROLE-STEP[-adapters]]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def command(run: str | None, step: int | None, role: str | None, adapters: bool, out: Path | None, runs_dir: Path) -> None:
    """Write the model of a run as a Hugging Face directory, which `transformers` loads; it is loaded and compared before it is there.

    RUN is a run directory or its name; the newest one by default. The run may still be going on.

    \b
    Example:
      m2flow export grpo-20260102-030405 --step 40 --out sorted-digits
      m2flow export grpo-20260102-030405 --adapters
    """
    from m2flow.micro.record.exporting import export_part, export_part_adapters, find_part

    run_dir = find_run(run, runs_dir)
    part = find_part(run_dir, step, role)
    target = out or run_dir / "export" / f"{part.role}-{part.which.replace(' ', '-')}{'-adapters' * adapters}"
    if adapters:
        base = export_part_adapters(part, target)
        click.echo(f"{target}: adapters of {part.role} at {part.which}, for {base}; loaded by peft, added and compared")
        return
    digest = export_part(part, target)
    click.echo(f"{target}: {part.role} at {part.which}, weights {digest[:12]}, loaded by transformers and compared")
