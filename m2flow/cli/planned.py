"""`m2flow simulate plan.json`: the flow, its options and the cluster come from the plan file instead of the command line.

What is given on the command line beside it counts instead of what the file says: other lengths, another cluster, an option.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from m2flow.cli.flow_options import FlowCommand, find_target
from m2flow.cli.resume import recorded_options
from m2flow.errors import OptionError
from m2flow.spec import LAPTOP, ClusterSpec, load_cluster

if TYPE_CHECKING:
    from m2flow.micro.plan_origin import Origin

_ORIGIN = "m2flow.plan_origin"


class PlannedCommand(FlowCommand):
    """A command on a flow, or on a plan file that says of which flow it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        target = find_target(args, self.params)
        if target is None or not target.endswith(".json"):
            return super().parse_args(ctx, args)
        if any(arg.partition("=")[0] == "--plan" for arg in args):
            raise OptionError(f"{target} is a plan, and --plan gives another one", now="Say which of the two.")
        from m2flow.micro.plan_origin import read_origin

        origin = ctx.meta[_ORIGIN] = read_origin(Path(target))
        place = args.index(target)
        return super().parse_args(ctx, [*args[:place], origin.flow_target(target), *args[place + 1 :], f"--plan={target}"])

    def _given(self, ctx: click.Context) -> dict[str, object]:
        given = super()._given(ctx)
        origin: Origin | None = ctx.meta.get(_ORIGIN)
        return given if origin is None else {**recorded_options(self.flow_of(ctx), origin.options), **given}


@dataclass(frozen=True)
class Asked:
    """What the command line and the plan file say together."""

    spec: ClusterSpec
    lengths: str
    profile: Path | None
    assume: tuple[str, ...]
    seed: int


def asked(ctx: click.Context, cluster: Path | None, lengths: str, profile: Path | None, assume: tuple[str, ...], seed: int) -> Asked:
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
