"""A group of commands, each imported from a file of its own when it is called: help and shell completion load none of them."""

from __future__ import annotations

import importlib

import click


class LazyGroup(click.Group):
    """Commands by name. A subclass says which there are, and where."""

    lines: dict[str, str]
    """Name -> what it does, in a line: said here too, so that listing the commands imports none."""
    module: str
    """The module of a command, with `{}` for its name; the command in it is called `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lines)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lines:
            return None
        found = importlib.import_module(self.module.format(cmd_name)).command
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.lines.items()))
