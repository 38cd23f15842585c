"""`m2flow trace`: the schedule of a run as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

from pathlib import Path

import click

from m2flow.cli.rundirs import find_run
from m2flow.errors import SpecError


@click.command("trace")
@click.argument("run", required=False)
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Where it goes.  [default: in RUN]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def command(run: str | None, out: Path | None, runs_dir: Path) -> None:
    """Write the schedule of a run as a file for Perfetto, and print its path.

    RUN is a run directory or its name; the newest one by default. Open the file at https://ui.perfetto.dev, which keeps it in your
    browser. A name that ends in .pftrace is written in Perfetto's own format; any other as JSON, which chrome://tracing opens too. With a
    further .gz it is compressed.

    \b
    Examples:
      m2flow trace runs/grpo-20260102-030405 -o trace.pftrace
      m2flow trace runs/grpo-20260102-030405 -o trace.json.gz
    """
    from m2flow.micro.analysis.run_trace import read_plan_of
    from m2flow.observe.perfetto import write_trace
    from m2flow.observe.store import spans_path

    run_dir = find_run(run, runs_dir)
    if not spans_path(run_dir).is_file() or not spans_path(run_dir).stat().st_size:
        raise SpecError(f"the run in {run_dir} has recorded nothing", now="Wait for its first call to begin, or name another run.")
    file = out or run_dir / "trace.json.gz"
    try:
        plan = read_plan_of(run_dir)
        write_trace(run_dir, file, devices=plan.device_names if plan else None)
    except OSError as error:
        raise SpecError(f"can't write {file}: {error.strerror}", now="Give another place with -o.") from None
    click.echo(file)
