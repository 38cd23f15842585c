"""Implement `m2flow view`: serve runs as a page in the browser, or write one run as one HTML file."""

from __future__ import annotations

import os
import secrets
import sys
import webbrowser
from pathlib import Path

import click

from m2flow.cli.main import find_run
from m2flow.errors import SpecError


@click.command("view")
@click.argument("run", required=False)
@click.option("--html", "out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write one file instead: no server.")
@click.option("--open", "is_opened", is_flag=True, help="Open it in a browser.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to answer on; any but loopback asks for a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8265, show_default=True, help="0: any that is free.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def command(run: str | None, out: Path | None, is_opened: bool, host: str, port: int, runs_dir: Path) -> None:
    """Show a run in the browser: its schedule, samples, graph, training and health. Live while it goes on.

    RUN is a run directory or its name, or a directory with several runs, which can then be compared; by default all of --runs-dir, the
    newest first. Where there is no run yet, the page waits for the first one. The page is served on this machine's loopback until Ctrl-C.
    With --html the newest run, or RUN, is written as one file that opens without a server or a network.

    \b
    Examples:
      m2flow view
      m2flow view runs/grpo-20260102-030405 --open
      m2flow view runs/grpo-20260102-030405 --html grpo.html
    """
    if out is not None:
        _export(find_run(run, runs_dir), out, is_opened=is_opened)
        return
    from m2flow.viewer.serving import LOOPBACK, Folder, open_socket, serve

    folder = Folder(_place(run, runs_dir), is_awaited=run is None)
    if run is None and not folder.listed():
        click.echo(f"There is no run in {runs_dir} yet: the page waits for the first one.")
    token = "" if host in LOOPBACK else secrets.token_urlsafe(24)
    with open_socket(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
        click.echo(f"{address}  (Ctrl-C ends it)")
        if is_opened:
            _open(address)
        serve(folder, listener, token=token)


def _place(run: str | None, runs_dir: Path) -> Path:
    """Resolve the argument to a run directory, or to a directory of runs."""
    if run is not None and Path(run).is_dir() and not (Path(run) / "config.json").is_file() and any(Path(run).glob("*/config.json")):
        return Path(run)
    if run is None:
        return runs_dir
    return find_run(run, runs_dir)


def _export(run_dir: Path, out: Path, *, is_opened: bool) -> None:
    from m2flow.viewer.serving import write_page

    try:
        write_page(run_dir, out)
    except OSError as error:
        raise SpecError(f"can't write {out}: {error.strerror}", now="Give another place with --html.") from None
    click.echo(out)
    if is_opened:
        _open(out.resolve().as_uri())


def _open(address: str) -> None:
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)
    else:
        click.echo("No display here: open it where a browser is.", err=True)
