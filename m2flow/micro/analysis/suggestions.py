"""What would make a run faster, and by how much: each answer is a simulation with what the run itself measured.

    run directory, its flow --suggestions_of--> Suggestion ..., the fastest first

The run's own constants and lengths (`m2flow.micro.costs.probing.measured_run`) go into the simulator; its first steps are simulated as the
run was placed, in every other placement, and with older weights allowed. What comes out is compared with the simulation of the run as it
was, not with its clock, so that an error of the model that is common to both drops out. Nothing is suggested from a rule of thumb.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import final

import msgspec

from m2flow.errors import SpecError
from m2flow.macro.flow import Flow
from m2flow.micro.analysis.run_trace import read_plan_of
from m2flow.micro.costs.probing import measured_run
from m2flow.micro.record.rundir import read_config
from m2flow.micro.simulation.comparing import AS_PLANNED, Row, compare
from m2flow.micro.simulation.scenario import prepare

_WORTH = 0.03
"""A gain that is said, as a share of the step."""


@final
class Suggestion(msgspec.Struct):
    """Something that could be changed."""

    what: str
    changes_mathematics: bool
    """Older weights train otherwise: a matter of the flow."""
    step_s: float
    """Simulated."""
    gain: float
    """Share of the step, against the simulation of the run as it was."""


@final
class Suggestions(msgspec.Struct):
    """Of one run."""

    simulated_step_s: float
    """As the run was placed."""
    found: list[Suggestion]


def suggestions_of(run_dir: Path, flow: Flow, options: Mapping[str, object], *, num_steps: int = 3) -> Suggestions:
    """
    Args:
        options: the flow's, as the run had them.
    Raises:
        M2FlowError: the run has no trace of its engines, or its flow can't be simulated.
    """
    config, plan = read_config(run_dir), read_plan_of(run_dir)
    if plan is None:
        raise SpecError(f"{run_dir} has no plan", now="Give the directory of a run that was not eager.")
    with tempfile.TemporaryDirectory() as place:
        profile = Path(place) / "profile.json"
        measured_run(run_dir, flow, options).save(profile)
        scenario = prepare(flow, options, config.cluster, lengths=str(run_dir), steps=num_steps, seed=config.settings.seed, profile=profile)
        rows = [row for row in compare(scenario) if row.placement != AS_PLANNED]
    staleness = scenario.program.staleness
    now = next((row for row in rows if (row.placement, row.staleness) == (plan.mode, staleness)), None)
    if now is None:
        raise SpecError(f"the plan of {run_dir} is {plan.mode}, which can't be simulated on {config.cluster.name}")
    better = [row for row in rows if row.step_s < now.step_s * (1 - _WORTH)]
    return Suggestions(now.step_s, [_said(row, now) for row in sorted(better, key=lambda row: row.step_s)])


def _said(row: Row, now: Row) -> Suggestion:
    parts = []
    if row.placement != now.placement:
        parts.append(f"place it {row.placement} instead of {now.placement}")
    if row.staleness != now.staleness:
        parts.append(f"allow weights that are {row.staleness} behind: @flow(staleness={row.staleness})")
    return Suggestion(", and ".join(parts), row.staleness != now.staleness, row.step_s, 1 - row.step_s / now.step_s)
