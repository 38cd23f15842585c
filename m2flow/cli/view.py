"""`m2flow view`: the timeline of a run as one page for the browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

import click

from m2flow.cli.rundirs import find_run
from m2flow.errors import SpecError


@click.command("view")
@click.argument("run", required=False)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Where the page goes.  [default: in RUN]")
@click.option("--open", "is_opened", is_flag=True, help="Open it in a browser.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def command(run: str | None, out: Path | None, is_opened: bool, runs_dir: Path) -> None:
    """Write the timeline of a run as a page for the browser, and print its path.

    RUN is a run directory or its name; the newest one by default. The run may still be going on. The page needs no server and no
    network.

    \b
    Example:
      m2flow view runs/grpo-20260102-030405 --open
    """
    from m2flow.observe.timeline import write_timeline

    run_dir = find_run(run, runs_dir)
    page = out or run_dir / "timeline.html"
    try:
        write_timeline(run_dir, page)
    except OSError as error:
        raise SpecError(f"can't write {page}: {error.strerror}", now="Give another place with --out.") from None
    click.echo(page)
    if is_opened:
        if _has_display():
            webbrowser.open(page.resolve().as_uri())
        else:
            click.echo("No display here: copy the file to where a browser is.", err=True)


def _has_display() -> bool:
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
