"""What `m2flow run --resume RUN` takes from the run's directory instead of the command line, and what it refuses.

    m2flow run --resume runs/grpo-20260101-120000       flow, its options, seed, cluster: config.json; who runs where: plan.json

A run that goes on is the run that it was. An option given beside `--resume` that says something else is refused by name; those
that change neither the mathematics nor the placement (`--json`, `--quiet`, `--checkpoint-every`) may be given; and `--runs-dir`, for what a
run has on a storage, which then goes on in a directory of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

from m2flow.cli.flow_options import find_target
from m2flow.cli.planned import PlannedCommand, recorded_options, value_of
from m2flow.cli.rundirs import find_run
from m2flow.errors import OptionError, SpecError
from m2flow.spec import ClusterSpec, RunSettings

_OPTION = "--resume"
_CONFIG = "m2flow.resumed"
_ONLY_NEW = {
    "pin_plan": "--pin-plan",
    "pin_to": "--pin-to",
    "plan_file": "--plan",
    "profile": "--profile",
    "decisions": "--decisions",
    "runs_dir": "--runs-dir",
}
"""Of no use for a run that has begun."""


class RunCommand(PlannedCommand):
    """`m2flow run`: the flow comes from the command line, with `--plan` from the plan, or with `--resume` from a run's directory."""

    plan_option = "--plan"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        run = value_of(_OPTION, args)
        if run is None:
            return super().parse_args(ctx, args)
        from m2flow.micro.record.rundir import read_config

        config = ctx.meta[_CONFIG] = read_config(find_run(run, Path("runs")))
        target = find_target(args, self.params)
        if target is None or not target.partition(":")[0].endswith(".py"):  # What else stands alone is the value of a flow's option.
            args = [config.flow, *args]
        elif target != config.flow:
            raise OptionError(f"{target} is not the flow of {run}, which is {config.flow}", now=f"Say only: m2flow run {_OPTION} {run}")
        if not Path(config.flow.partition(":")[0]).is_file():
            raise SpecError(f"the flow of {run} is {config.flow}, and there is no such file here", now=f"Begin in {config.directory}.")
        return super().parse_args(ctx, args)

    def _given(self, ctx: click.Context) -> dict[str, object]:
        given = super()._given(ctx)
        if _CONFIG not in ctx.meta:
            return given
        recorded = recorded_options(self.flow_of(ctx), ctx.meta[_CONFIG].options)
        for name, value in given.items():
            if value != recorded.get(name, next(p.default for p in self.flow_of(ctx).parameters if p.name == name)):
                raise _refused(f"--{name.replace('_', '-')} {value}", f"with {name}={recorded.get(name, 'its default')}")
        return recorded


class Before(NamedTuple):
    """A run that goes on."""

    run_dir: Path
    spec: ClusterSpec
    settings: RunSettings
    is_moved: bool
    """The spec is not what it was begun with, so that it needs a new plan."""


def resumed(ctx: click.Context) -> Before | None:
    """The run that goes on, on which cluster and how; None if a new one begins.

    Raises:
        OptionError: an option says something else than the run does.
    """
    if _CONFIG not in ctx.meta:
        return None
    from m2flow.micro.record.storage import is_on_storage

    config = ctx.meta[_CONFIG]
    settings = config.settings
    comes_home = is_on_storage(config.run_dir)
    if comes_home and _is_given(ctx, "runs_dir"):
        settings = settings.model_copy(update={"runs_dir": str(ctx.params["runs_dir"])})
    for name, option in _ONLY_NEW.items():
        if name == "runs_dir" and comes_home:
            continue
        if _is_given(ctx, name):
            raise OptionError(f"{option} is for a new run, and {_OPTION} goes on with one", now=f"Leave {option} out.")
    for name in ("seed", "deterministic", "eager"):
        before = getattr(config.settings, name)
        if _is_given(ctx, name) and ctx.params[name] != before:
            raise _refused(f"--{name} {ctx.params[name]}", f"with {name} {before}")
    spec = config.cluster
    if _is_given(ctx, "cluster"):
        from m2flow.cli.cluster_file import load_cluster

        spec = load_cluster(ctx.params["cluster"])
    if config.repeats_decisions:
        raise SpecError("an eager run that repeats the decisions of another one can't be resumed", now="Begin it anew.")
    return Before(config.run_dir, spec, settings, spec != config.cluster)


def _refused(given: str, recorded: str) -> OptionError:
    return OptionError(f"{given}: the run was begun {recorded}, and goes on as it began", now="Leave it out, or begin a new run.")


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
