"""Suggest what would make a run faster, and by how much, by simulating alternatives with the costs that the run itself measured.

    run directory, its flow --suggestions_of--> Suggestion ..., the fastest first

The run's own constants and lengths (`m2flow.runner.probing.measured_run`) go into the simulator. Its first steps are simulated as the run
was placed, in every other placement, with older weights allowed, with more function workers, and with the rollout policies that shorten a
tail. Alternatives are compared with the simulation of the run as it was, not with its clock, so that an error that both have cancels out.
That error is measured by comparing the same simulation with the time that those steps really took: where the model does not reproduce the
run, its suggestions are marked as doubtful. Nothing is suggested by a rule of thumb.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

import msgspec

from m2flow.errors import PlanError, SpecError
from m2flow.macro.flow import Flow
from m2flow.micro.protocol.plan import Choice, Plan
from m2flow.micro.records.rundir import read_config
from m2flow.planner.planning import read_prediction
from m2flow.runner.probing import measured_run
from m2flow.simulator.ablation import AS_PLANNED, Row, compare
from m2flow.simulator.scenario import Scenario, prepare, write_run
from m2flow.spec import ClusterSpec
from m2flow.viewer.analysis import analysis_of
from m2flow.viewer.idle import idle_of
from m2flow.viewer.run_trace import RunTrace, read_plan_of

NUM_STEPS = 3
"""Number of steps that are simulated."""
DOUBTFUL = 0.2
"""The relative error of the simulation of the run as it was above which suggestions are called doubtful."""
_WORTH = 0.03
"""The least gain that is suggested, as a share of the step."""
_MORE_PROCESSES = (2, 4)
_POLICY = "longest-first+repack"


@final
class Suggestion(msgspec.Struct):
    """A change that would make the run faster."""

    what: str
    changes_mathematics: bool
    """Whether it changes what is trained: older weights, which the flow must allow."""
    step_s: float
    """Simulated seconds a step."""
    gain: float
    """Share of the step that is saved, against the simulation of the run as it was."""


@final
class SimulatedStage(msgspec.Struct):
    """A call or machinery on the critical path of the run as it was, simulated."""

    label: str
    line: str
    seconds: float
    """Mean over the simulated steps in which it is on the critical path."""


@final
class Suggestions(msgspec.Struct):
    """The suggestions for one run, and how well its simulation fits."""

    simulated_step_s: float
    """Simulated seconds a step of the run as it was placed."""
    measured_step_s: float | None
    """Measured seconds of the same steps; None where the run has not finished them."""
    error: float | None
    """Relative error of the simulation: at -0.3, its steps are 30% shorter than those of the run."""
    is_doubtful: bool
    """Whether the error is too large, or not known."""
    found: list[Suggestion]
    stages: list[SimulatedStage]
    """The stages of the run as it was, simulated."""


def suggestions_of(run_dir: Path, flow: Flow, options: Mapping[str, object], makespans_s: Sequence[float]) -> Suggestions:
    """Simulate alternatives to a run, and return those that are faster.

    Args:
        options: the flow's options, as the run had them.
        makespans_s: what the run's steps took, from the first on.
    Raises:
        M2FlowError: the run has no trace of its engines, or its flow can't be simulated.
    """
    config, plan = read_config(run_dir), read_plan_of(run_dir)
    if plan is None:
        raise SpecError(f"{run_dir} has no plan", now="Give the directory of a run that was not eager.")
    num_steps = min(NUM_STEPS, max(len(makespans_s), 1))
    with tempfile.TemporaryDirectory() as place:
        profile = Path(place) / "profile.json"
        measured_run(run_dir, flow, options).save(profile)
        scenario = prepare(flow, options, config.cluster, lengths=str(run_dir), steps=num_steps, seed=config.settings.seed, profile=profile)
        rows = [row for row in compare(scenario) if row.placement != AS_PLANNED]
        staleness = scenario.program.staleness
        now = next((row for row in rows if (row.placement, row.staleness) == (plan.mode, staleness)), None)
        if now is None:
            raise SpecError(f"the plan of {run_dir} is {plan.mode}, which can't be simulated on {config.cluster.name}")
        found = [
            Suggestion(_describe_change(row, now), row.staleness != now.staleness, row.step_s, 1 - row.step_s / now.step_s)
            for row in rows
            if not any(_does_as_well(other, row, now) for other in rows)
        ]
        for what, spec in _other_specs(scenario, plan):
            step_s = _step_s(scenario.on(spec), plan)
            if step_s is not None:
                found.append(Suggestion(what, False, step_s, 1 - step_s / now.step_s))
        stages = _stages(scenario, plan, read_prediction(run_dir, plan), Path(place) / "simulated", config.flow, options)
    better = sorted((one for one in found if one.gain > _WORTH), key=lambda one: one.step_s)
    if not makespans_s:
        return Suggestions(now.step_s, None, None, True, better, stages)
    measured_s = sum(makespans_s[:num_steps]) / num_steps
    error = now.step_s / measured_s - 1
    return Suggestions(now.step_s, measured_s, error, abs(error) > DOUBTFUL, better, stages)


def _stages(
    scenario: Scenario, plan: Plan, predicted: Choice | None, directory: Path, flow_file: str, options: Mapping[str, object]
) -> list[SimulatedStage]:
    """List the stages on the critical path of the run simulated as it was placed, in the same parts as the run's own analysis."""
    mine = scenario.plans()[plan.mode]
    write_run(directory, scenario, scenario.run(mine), flow_file=flow_file, options=options)
    trace = RunTrace(directory)
    trace.refresh()
    trace.predicted = predicted
    stages = analysis_of(trace, idle_of(trace)).stages
    return [SimulatedStage(stage.label, stage.line, stage.seconds) for stage in stages]


def _does_as_well(other: Row, row: Row, now: Row) -> bool:
    """Test whether another suggestion changes less and gains about as much."""
    is_less = other.staleness <= row.staleness and other.placement in (row.placement, now.placement)
    is_other = (other.placement, other.staleness) != (row.placement, row.staleness)
    return is_less and is_other and other.step_s < row.step_s + _WORTH * now.step_s


def _other_specs(scenario: Scenario, plan: Plan) -> Iterator[tuple[str, ClusterSpec]]:
    """List variants of a spec with the same placement."""
    spec = scenario.spec
    if any(stage.engine == "function" for stage in plan.stages):
        for times in _MORE_PROCESSES:
            workers = spec.functions.workers * times
            what = f"judge in {workers} processes instead of {spec.functions.workers}, if the machine has the cores or the functions wait"
            yield f"{what}: functions: {{workers: {workers}}}", _with_functions(spec, workers)
    if not spec.rollout.policy and any(slot.kind == "rollout" for worker in plan.workers for slot in worker.engines):
        yield f"other rollout policies: rollout: {{policy: [{_POLICY.replace('+', ', ')}]}}", spec.with_policy(_POLICY)


def _with_functions(spec: ClusterSpec, workers: int) -> ClusterSpec:
    return spec.model_copy(update={"functions": spec.functions.model_copy(update={"workers": workers})})


def _step_s(scenario: Scenario, plan: Plan) -> float | None:
    """Simulate in the run's own mode; None where no such plan fits."""
    try:
        mine = scenario.plans().get(plan.mode)
    except (PlanError, SpecError):
        return None
    if mine is None:
        return None
    outcome = scenario.run(mine)
    return outcome.totals.makespan_s / max(len(outcome.report.steps), 1)


def _describe_change(row: Row, now: Row) -> str:
    parts = []
    if row.placement != now.placement:
        parts.append(f"place it {row.placement} instead of {now.placement}")
    if row.staleness != now.staleness:
        parts.append(f"allow weights that are {row.staleness} behind: @flow(staleness={row.staleness})")
    return ", and ".join(parts)
