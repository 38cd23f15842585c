"""`m2flow cluster`: cluster specs, from nothing to one that is known to work. Its commands are imported when they are called."""

from __future__ import annotations

import click

from m2flow.cli.lazy import LazyGroup

_COMMANDS = {
    "init": "Write a spec for this machine, or for a Ray cluster.",
    "check": "Say what is missing on which node, before a run.",
    "scale": "Have rollout workers join a run that goes on, or leave it.",
    "schema": "Print the JSON Schema of specs, for editors.",
}
"""Name -> a line; the command is `m2flow.cli.cluster_<name>.command`."""


class Clusters(LazyGroup):
    """The commands of `cluster`."""

    lines = _COMMANDS
    module = "m2flow.cli.cluster_{}"


@click.command("cluster", cls=Clusters)
def command() -> None:
    """Write and check cluster specs: the machines, and what runs on them.

    \b
    Examples:
      m2flow cluster init mine.yaml
      m2flow cluster check mine.yaml
    """
