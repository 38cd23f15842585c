"""`m2flow keys`: make the key of a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from m2flow.micro.control.launcher import make_keys


@click.command("keys")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def command(file: Path) -> None:
    """Make a key for the channels of a cluster, in a FILE that only you can read.

    Every host of the cluster needs the same file. Copy it by a way that keeps it private, like `scp -p`; who has it can read and
    send everything.

    \b
    Example:
      m2flow keys ~/.m2flow/cluster.key
      and in the cluster spec:   channels: {transport: tcp, host: 10.0.0.7, keys: ~/.m2flow/cluster.key}
    """
    make_keys(file)
    click.echo(f"{file}: name it in the cluster spec, channels: {{keys: {file}}}")
