"""`m2flow simulate`: what would happen, on a virtual clock. Its commands are imported when they are called.

A first word that is no command's name is the target of `flow`, if there is such a command: `m2flow simulate flows/grpo.py`.
"""

from __future__ import annotations

import click

from m2flow.cli.lazy import LazyGroup

_COMMANDS = {
    "flow": "The steps of a flow, by the scheduler that would run them; the word may be left out.",
    "rollout": "Generation alone: how long the samples of a step take, by assignment or policy.",
}
"""Name -> a line; the command is `m2flow.cli.simulate_<name>.command`."""

_DEFAULT = "flow"


class Simulations(LazyGroup):
    """The commands of `simulate`, and one that needs no name."""

    lines = _COMMANDS
    module = "m2flow.cli.simulate_{}"

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and _DEFAULT in _COMMANDS:
            return _DEFAULT, self.get_command(ctx, _DEFAULT), args
        return super().resolve_command(ctx, args)


@click.command("simulate", cls=Simulations, context_settings={"ignore_unknown_options": True})
def command() -> None:
    """Say what would happen, on a virtual clock.

    \b
    Examples:
      m2flow simulate flows/grpo.py --cluster clusters/h100-8.yaml --shape policy=Qwen2.5-7B --max-new-tokens 4096 --steps 2
      m2flow simulate rollout --lengths dapo-qwen2.5-32b --instances 16 --known-lengths
    """
