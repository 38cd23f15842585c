"""Commands on a plan file: the flow, its options and the cluster come from the file instead of the command line.

    m2flow simulate plan.json        m2flow plan --check plan.json        m2flow run --plan plan.json

What is given on the command line beside it counts instead of what the file says: other lengths, another cluster, an option; with a FLOW
all of it is the command line's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from m2flow.cli.cluster_file import load_cluster
from m2flow.cli.flow_options import FlowCommand, find_target, option_type
from m2flow.errors import OptionError
from m2flow.macro.flow import Flow
from m2flow.spec import LAPTOP, ClusterSpec

if TYPE_CHECKING:
    from m2flow.micro.plan_origin import Origin

_ORIGIN = "m2flow.plan_origin"


class PlannedCommand(FlowCommand):
    """A command on a flow, or on a plan file that says of which flow it is: in the flow's place, or as the value of an option."""

    plan_option: ClassVar[str] = "--plan"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        target = find_target(args, self.params)
        if target is not None and target.partition(":")[0].endswith(".py"):
            return super().parse_args(ctx, args)
        named, alone = value_of(self.plan_option, args), self._alone(args, target)
        if named is not None and alone is not None:
            raise OptionError(f"{alone} is a plan, and {self.plan_option} gives another one", now="Say which of the two.")
        plan = alone if named is None else named
        if plan is None:
            return super().parse_args(ctx, args)
        from m2flow.micro.plan_origin import read_origin

        name = ctx.command_path.partition(" ")[2].removesuffix(" flow")
        usage = f"m2flow {name} FLOW {self.plan_option} {plan}"
        origin = ctx.meta[_ORIGIN] = read_origin(Path(plan), usage)
        flow = origin.flow_target(plan, usage)
        if alone is None:
            return super().parse_args(ctx, [flow, *args])
        place = args.index(alone)
        return super().parse_args(ctx, [*args[:place], flow, *args[place + 1 :], f"{self.plan_option}={alone}"])

    def _alone(self, args: Sequence[str], target: str | None) -> str | None:
        """A plan file in the flow's place; what follows an option that may be the flow's is that one's value."""
        if target is None or not target.endswith(".json"):
            return None
        place = args.index(target)
        before = args[place - 1] if place else ""
        flags = {name for param in self.params if isinstance(param, click.Option) and param.is_flag for name in param.opts}
        return None if before.startswith("--") and "=" not in before and before not in flags else target

    def _given(self, ctx: click.Context) -> dict[str, object]:
        given = super()._given(ctx)
        origin: Origin | None = ctx.meta.get(_ORIGIN)
        return given if origin is None else {**recorded_options(self.flow_of(ctx), origin.options, "plan"), **given}


@dataclass(frozen=True)
class Asked:
    """What the command line and the plan file say together."""

    spec: ClusterSpec
    lengths: str
    profile: Path | None
    assume: tuple[str, ...]
    seed: int


def asked(
    ctx: click.Context, cluster: Path | None, seed: int, *, profile: Path | None = None, lengths: str = "", assume: tuple[str, ...] = ()
) -> Asked:
    """The command line's values; where it gives none, the plan file's."""
    origin: Origin | None = ctx.meta.get(_ORIGIN)
    if origin is None:
        return Asked(load_cluster(cluster) if cluster else LAPTOP, lengths, profile, assume, seed)
    is_seed_given = ctx.get_parameter_source("seed") is click.core.ParameterSource.COMMANDLINE
    recorded = Path(origin.directory) / origin.profile if origin.profile else None
    return Asked(
        load_cluster(cluster) if cluster else origin.cluster,
        lengths or _from(origin.directory, origin.lengths),
        profile or recorded,
        assume or origin.assume,
        seed if is_seed_given else origin.seed,
    )


def _from(directory: str, lengths: str) -> str:
    """A file of lengths is from where the plan was made; a trace's name or a formula is from nowhere."""
    place = Path(directory) / lengths
    return str(place) if lengths and place.exists() else lengths


def recorded_options(flow: Flow, written: dict[str, object], made: str = "run") -> dict[str, object]:
    """The flow's options as values, from what a file has of them.

    Raises:
        OptionError: the flow has no such parameter any more, or one that a file can't hold.
    """
    found: dict[str, object] = {}
    for name, value in written.items():
        parameter = next((parameter for parameter in flow.parameters if parameter.name == name), None)
        kind = None if parameter is None else option_type(parameter.type)
        if kind is None:
            what = "has no such parameter any more" if parameter is None else f"takes a {parameter.type}, which no file holds"
            raise OptionError(f"the {made} was made with {name}={value}, and the flow {flow.name} {what}", now=f"Begin a new {made}.")
        found[name] = kind.convert(value, None, None) if isinstance(value, str) else value
    return found


def value_of(option: str, args: Sequence[str]) -> str | None:
    """What follows an option on the command line."""
    for position, arg in enumerate(args):
        if arg.startswith(f"{option}="):
            return arg.partition("=")[2]
        if arg == option:
            return args[position + 1] if position + 1 < len(args) else None
    return None
