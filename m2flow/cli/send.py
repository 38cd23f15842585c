"""`m2flow send`: the records of a run to a collector or a tracker, as far as they are not there yet."""

from __future__ import annotations

from pathlib import Path

import click

from m2flow.cli.record_options import to_option
from m2flow.cli.rundirs import find_run
from m2flow.errors import OptionError, SpecError

_A_DAY_S = 86_400.0


@click.command("send")
@click.argument("run", required=False)
@click.option("--otlp", default="", metavar="URL", help="An OpenTelemetry collector.  [default: what the environment names]")
@to_option
@click.option("--again", is_flag=True, help="All of it, also what arrived before.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def command(run: str | None, otlp: str, metrics_to: tuple[str, ...] | None, again: bool, runs_dir: Path) -> None:
    """Send the spans and metrics of a run to an OpenTelemetry collector, Weights & Biases or MLflow.

    RUN is a run directory or its name; the newest one by default. A run does this while it goes on, if it is told to
    (`m2flow run --otlp URL`); this is for runs that were not, and for what could not be delivered then.

    \b
    Example:
      m2flow send runs/grpo-20260102-030405 --otlp http://localhost:4318
    """
    import threading

    from m2flow.observe.forwarding import carry, destinations
    from m2flow.spec import RunSettings

    run_dir = find_run(run, runs_dir)
    settings = RunSettings.model_validate({"otlp": otlp, "metrics_to": metrics_to})
    wanted = destinations(settings, run_dir, run_dir.name.rpartition("-")[0].rpartition("-")[0], lambda said: click.echo(said, err=True))
    if not wanted:
        raise OptionError("nobody is named to send to", now="Say --otlp http://HOST:4318, --metrics-to wandb or --metrics-to mlflow.")
    ends = threading.Event()
    ends.set()
    sinks = wanted.sinks()
    for sink in sinks if again else ():
        sink.begin_again()
    failed = []
    for report in carry(sinks, ends, _A_DAY_S):
        click.echo(f"{report.where}: {report.num_spans:,} spans, {report.num_points:,} numbers")
        if report.error or report.num_left_bytes:
            failed.append(f"{report.where} did not take everything, {report.num_left_bytes:,} bytes are left: {report.error}")
    if failed:
        raise SpecError("; ".join(failed), now="What did arrive is not sent a second time.")
