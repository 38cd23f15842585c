"""Suggest what would make a run faster, and by how much, by simulating alternatives with the costs that the run itself measured.

    run directory, its flow, its Verdict --suggestions_of--> Suggestion ..., what leaves the mathematics alone first, then the fastest

The run's own constants and lengths (`m2flow.runner.probing.measured_run`) go into the simulator. Some steps are simulated as the run was
placed and with one thing changed, without evaluations, of which the first steps may have more than others: another placement, older
weights, more processes or more concurrency for functions, larger decode batches, rollout policies, more slots for tools or faster ones, and
steps that end without their last samples, with their price. What is tried goes by what the steps wait for
(`m2flow.viewer.analysis.verdict_of`): a function that waits gets more concurrency before more processes, and one that computes no more
processes than there are cores. Alternatives are compared with the simulation of the run as it was, not with its clock, so that an error
that both have cancels out. That error is measured by comparing the same simulation with what the run's steps took on average, all but the
first one, in which memory is allocated and code loaded: what the simulation does not explain of that is assumed to stay, and where it is
much, suggestions are marked as doubtful. On a CPU an engine on more cores than the run gave it is assumed to be no faster: whether its
operations are large enough to be shared, the run can't say. What the simulator has no cost for, the flow's own Python and a chosen weight
transport, is taken from the critical path, and says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import final

import msgspec

from m2flow.errors import M2FlowError, SpecError
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call
from m2flow.micro.protocol.cost_terms import Costs, DecodeCost, EngineId, EpisodeCosts, FunctionCost, Layout, ToolCost, TrainCost
from m2flow.micro.protocol.plan import Choice, Plan
from m2flow.micro.records.rundir import read_config
from m2flow.planner.planning import read_prediction
from m2flow.runner.probing import measured_run
from m2flow.simulator.ablation import AS_PLANNED, AblatedCosts, Row, compare
from m2flow.simulator.scenario import Outcome, Scenario, prepare, write_run
from m2flow.simulator.simulation import Item, Left, Made, Waits
from m2flow.simulator.simulation_report import StepReport
from m2flow.spec import ClusterSpec
from m2flow.viewer.analysis import Analysis, Verdict, analysis_of
from m2flow.viewer.run_trace import KnownCall, RunTrace, evaluation_calls, idle_of, read_plan_of

NUM_STEPS = 3
"""Number of steps that are simulated."""
DOUBTFUL = 0.2
"""The relative error of the simulation of the run as it was above which suggestions are called doubtful."""
_WORTH = 0.03
"""The least gain that is suggested, as a share of the step."""
_MORE_PROCESSES = (2, 4)
_MORE_AT_ONCE = (8, 32)
_LARGER = 4
_FEW = 4
"""Decode batches of at most so many samples are nearly all of one size, from which the cost of larger ones can't be fitted."""
_OVERSAMPLE = 1.25
_DOMINATES, _FASTER = 0.5, 0.5
"""The least share of all tools' time from which a tool is worth making faster, and the factor of its latency that is simulated."""
_POLICY = "longest-first+repack"


@final
class Suggestion(msgspec.Struct):
    """A change that would make the run faster."""

    what: str
    changes_mathematics: bool
    """Whether it changes what is trained: older weights, which the flow must allow, or steps without their last samples."""
    step_s: float
    """Seconds a step that are expected: those of the run, less the share that is saved."""
    gain: float
    """Share of the step that is saved: the seconds that the simulation saves, of those that the run took."""
    cluster: dict[str, dict[str, object] | str] = {}
    """What it sets in the cluster spec: `{"functions": {"concurrency": 8}}`, `{"placement": "time-shared"}`."""
    flow: str = ""
    """What it changes in the flow: `@flow(staleness=1)`."""
    is_simulated: bool = True
    """False: the gain is an upper limit: what the critical path holds, or what a cost that the run could not show may be at best."""


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
    """Simulated seconds a step of the run as it was placed, without evaluations."""
    measured_step_s: float | None
    """The same, measured: the mean of all its steps but the first; None where it has none."""
    error: float | None
    """Relative error of the simulation: at -0.3, its steps are 30% shorter than those of the run."""
    is_doubtful: bool
    """Whether the error is too large, or not known."""
    found: list[Suggestion]
    stages: list[SimulatedStage]
    """The stages of the run as it was, simulated."""


def suggestions_of(run_dir: Path, flow: Flow, options: Mapping[str, object], analysis: Analysis) -> Suggestions:
    """Simulate alternatives to a run, and return those that are faster.

    Args:
        options: the flow's options, as the run had them.
        analysis: the run's: what its steps took, and wait for.
    Raises:
        M2FlowError: the run has no trace of its engines, or its flow can't be simulated.
    """
    config, plan = read_config(run_dir), read_plan_of(run_dir)
    if plan is None:
        raise SpecError(f"{run_dir} has no plan", now="Give the directory of a run that was not eager.")
    num_steps, verdict, measured_s = min(NUM_STEPS, max(len(analysis.steps), 1)), analysis.verdict, analysis.step_s
    with tempfile.TemporaryDirectory() as place:
        profile = Path(place) / "profile.json"
        measured_run(run_dir, flow, options).save(profile)
        whole = prepare(flow, options, config.cluster, lengths=str(run_dir), steps=num_steps, seed=config.settings.seed, profile=profile)
        scenario = without_evaluations(whole)
        rows = [row for row in compare(scenario, costs=_cautious(scenario, plan)) if row.placement != AS_PLANNED]
        staleness = scenario.program.staleness
        now = next((row for row in rows if (row.placement, row.staleness) == (plan.mode, staleness)), None)
        if now is None:
            raise SpecError(
                f"the plan of {run_dir} is {plan.mode}, which can't be simulated on {config.cluster.name}",
                now="Simulate with the cluster spec that the run had.",
            )
        took = Took(now.step_s, measured_s or now.step_s)
        found = [_of_row(row, now, took) for row in rows if not any(_does_as_well(other, row, now) for other in rows) and (row is not now)]
        for change in (*_spec_changes(scenario, plan, verdict), *_tool_changes(scenario, verdict)):
            outcome = _outcome(change.scenario, plan, change.costs)
            if outcome is not None:
                found.append(change.suggested(took.gain(_step_s(outcome)), took))
        cuts = list(_flow_changes(scenario, verdict))
        as_it_was = _outcome(scenario, plan) if cuts else None
        for change in cuts:
            outcome = _outcome(change.scenario, plan)
            if outcome is not None and as_it_was is not None:
                priced = replace(change, what=f"{change.what}; {price_of(outcome.report.steps, as_it_was.report.steps)}")
                found.append(priced.suggested(took.gain(_step_s(outcome)), took))
        found += _accounted(scenario, verdict, took)
        stages = _stages(whole, plan, read_prediction(run_dir, plan), Path(place) / "simulated", config.flow, options)
    better = _ordered(found)
    if measured_s is None:
        return Suggestions(now.step_s, None, None, True, better, stages)
    error = now.step_s / measured_s - 1
    return Suggestions(now.step_s, measured_s, error, abs(error) > DOUBTFUL, better, stages)


def without_evaluations(scenario: Scenario) -> Scenario:
    """Leave out the calls of a scenario's steps that only evaluate."""
    program = scenario.program
    known = {call.ordinal: _known(call) for call in program.graph.calls}
    left_out = evaluation_calls(known)

    def stays(item: Item) -> bool:
        match item:
            case Made(call):
                return call.ordinal not in left_out
            case Waits(call) | Left(call):
                return call not in left_out
        return True

    graph = replace(program.graph, calls=tuple(call for call in program.graph.calls if call.ordinal not in left_out))
    return replace(scenario, program=replace(program, items=tuple(filter(stays, program.items)), graph=graph))


def _known(call: Call) -> KnownCall:
    inputs = tuple((name, ref.call) for name, ref in call.inputs)
    return KnownCall(
        call.ordinal, call.step, call.name, str(call.site), inputs=inputs, effects=tuple(f"writes {one}" for one in call.writes)
    )


def _stages(
    scenario: Scenario, plan: Plan, predicted: Choice | None, directory: Path, flow_file: str, options: Mapping[str, object]
) -> list[SimulatedStage]:
    """List the stages on the critical path of the run simulated as it was placed, in the same parts as the run's own analysis."""
    mine = scenario.plans()[plan.mode]
    write_run(directory, scenario, scenario.run(mine, _cautious(scenario, plan)), flow_file=flow_file, options=options)
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


@dataclass(frozen=True)
class Took:
    """What a step of the run as it was takes."""

    simulated_s: float
    measured_s: float

    def gain(self, step_s: float) -> float:
        """The share that is saved by what is simulated to take `step_s`: what the simulation does not explain of a step stays."""
        return (self.simulated_s - step_s) / max(self.simulated_s, self.measured_s)

    def less(self, gain: float) -> float:
        return self.measured_s * (1 - gain)


@dataclass(frozen=True)
class _Change:
    """One thing to be simulated otherwise."""

    what: str
    scenario: Scenario
    cluster: dict[str, dict[str, object] | str] = field(default_factory=dict)
    costs: Callable[[Costs], Costs] = lambda costs: costs
    """What it does to the costs of its scenario."""
    flow: str = ""
    changes_mathematics: bool = False
    is_known: bool = True
    """Whether the run's own costs say what it takes."""

    def suggested(self, gain: float, took: Took) -> Suggestion:
        return Suggestion(self.what, self.changes_mathematics, took.less(gain), gain, self.cluster, self.flow, self.is_known)


class MoreCores(AblatedCosts):
    """Costs in which an engine on more cores than it had is as fast as on those: small operations are not shared."""

    def __init__(self, costs: Costs, threads: Mapping[EngineId, int]) -> None:
        super().__init__(costs)
        self._threads = threads

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        return super().decode(engine, pool, self._as_it_was(engine, layout))

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        return super().train(engine, pool, self._as_it_was(engine, layout))

    def _as_it_was(self, engine: EngineId, layout: Layout) -> Layout:
        return msgspec.structs.replace(layout, tp=min(layout.tp, self._threads.get(engine, layout.tp)))


def _cautious(scenario: Scenario, plan: Plan) -> Costs:
    """The costs that the run as it was and all alternatives are simulated with."""
    if scenario.spec.pools or any(worker.device != "cpu" for worker in plan.workers):
        return scenario.costs
    threads = {
        EngineId(slot.role, slot.kind): worker.threads for worker in plan.workers for slot in worker.engines if slot.kind != "function"
    }
    return MoreCores(scenario.costs, threads)


class _FreeBatches(AblatedCosts):
    """Costs in which a larger batch decodes in the time of the batch that was measured: where the run had that one alone, it can't say."""

    def __init__(self, costs: Costs, batch: int) -> None:
        super().__init__(costs)
        self._batch = batch

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        cost = super().decode(engine, pool, layout)
        return msgspec.structs.replace(cost, step_s=cost.step_s + cost.sample_s * self._batch, sample_s=0.0)


class _OtherTools(AblatedCosts):
    """Costs in which a tool is faster, or some have more slots."""

    def __init__(self, costs: Costs, tools: Mapping[str, ToolCost]) -> None:
        super().__init__(costs)
        self._tools = tools

    def episodes(self) -> EpisodeCosts:
        known = super().episodes()
        return msgspec.structs.replace(known, tools=tuple(self._tools.get(one.name, one) for one in known.tools))


class _MoreAtOnce(AblatedCosts):
    """Costs in which each process of functions works on more units at once."""

    def __init__(self, costs: Costs, concurrency: int) -> None:
        super().__init__(costs)
        self._concurrency = concurrency

    def function(self, call: str) -> FunctionCost:
        return msgspec.structs.replace(super().function(call), concurrency=self._concurrency)


def _spec_changes(scenario: Scenario, plan: Plan, verdict: Verdict) -> Iterator[_Change]:
    """List variants of the spec with the same placement: those that help against what the steps wait for."""
    spec = scenario.spec
    waits_for = {cause.name for cause in verdict.causes}
    if any(stage.engine == "function" for stage in plan.stages) and waits_for & {"reward", "waiting reward", "slow reward"}:
        computes = "slow reward" in waits_for
        if not computes:
            for times in _MORE_AT_ONCE:
                number = spec.functions.concurrency * times
                where = "" if "waiting reward" in waits_for else ", if the functions wait rather than compute"
                what = f"call functions on {number} samples at once in a process{where}: functions: {{concurrency: {number}}}"
                yield _Change(what, scenario, {"functions": {"concurrency": number}}, partial(_MoreAtOnce, concurrency=number))
        now = sum(any(slot.kind == "function" for slot in worker.engines) for worker in plan.workers)
        for times in _MORE_PROCESSES:
            workers = now * times
            if computes and workers > spec.num_cores:
                continue
            where = "" if computes else ", if the machine has the cores or the functions wait"
            what = f"judge in {workers} processes instead of {now}{where}: functions: {{workers: {workers}}}"
            yield _Change(what, scenario.on(_with(spec, "functions", workers=workers)), {"functions": {"workers": workers}})
    if any(slot.kind == "rollout" for worker in plan.workers for slot in worker.engines):
        if waits_for & {"generation", "tail", "tool"}:
            most = spec.rollout.max_running * _LARGER
            what = f"decode up to {most} samples at once in an instance instead of {spec.rollout.max_running}"
            larger = scenario.on(_with(spec, "rollout", max_running=most))
            is_known = spec.rollout.max_running > _FEW
            set_to: dict[str, dict[str, object] | str] = {"rollout": {"max_running": most}}
            change = _Change(f"{what}: rollout: {{max_running: {most}}}", larger, set_to, is_known=is_known)
            yield change if is_known else replace(change, costs=partial(_FreeBatches, batch=spec.rollout.max_running))
        if not spec.rollout.policy and "tail" in waits_for:
            names = _POLICY.split("+")
            what = f"other rollout policies: rollout: {{policy: [{', '.join(names)}]}}"
            yield _Change(what, scenario.on(spec.with_policy(_POLICY)), {"rollout": {"policy": names}})


def _tool_changes(scenario: Scenario, verdict: Verdict) -> Iterator[_Change]:
    """List what helps episodes that wait for tools: more slots, and a faster tool where one takes most of the time."""
    tools = scenario.costs.episodes().tools
    if not tools or not any(cause.name == "tool" for cause in verdict.causes):
        return
    for tool in (one for one in tools if one.slots and not one.shares_slots):
        more = msgspec.structs.replace(tool, slots=tool.slots * _LARGER)
        what = f"let {more.slots} calls of the tool {tool.name} run at once in a process instead of {tool.slots}, if what it asks can"
        yield _Change(
            f"{what}: @tool(slots={more.slots})", scenario, {}, partial(_OtherTools, tools={tool.name: more}), f"@tool {tool.name}"
        )
    shared = {one.name: msgspec.structs.replace(one, slots=0) for one in tools if one.slots and one.shares_slots}
    if shared:
        num = next(one.slots for one in tools if one.name in shared)
        what = f"make {', '.join(shared)} async functions, which need none of the {num} threads"
        yield _Change(what, scenario, {}, partial(_OtherTools, tools=shared), f"async def {next(iter(shared))}")
    taken = {one.name: FunctionCost(one.quantiles_s).mean_s * one.num for one in tools}
    most = max(tools, key=lambda one: taken[one.name])
    if taken[most.name] >= _DOMINATES * sum(taken.values()):
        mean_s = FunctionCost(most.quantiles_s).mean_s
        faster = partial(_OtherTools, tools={most.name: msgspec.structs.replace(most, factor=_FASTER)})
        what = f"make the tool {most.name} faster, which takes {mean_s:.3g} s a call: this is what {mean_s * _FASTER:.3g} s would give"
        yield _Change(what, scenario, {}, faster, f"@tool {most.name}")


def _flow_changes(scenario: Scenario, verdict: Verdict) -> Iterator[_Change]:
    """List the ways to end a step without its last samples, which change what is trained."""
    if not any(cause.name == "tail" for cause in verdict.causes):
        return
    for late, said in (("drop", "drop the others"), ("carry", "let the others go on in the next step (partial rollouts)")):
        if late == "carry" and not scenario.program.staleness:
            continue
        flow = f'policy.generate(..., oversample={_OVERSAMPLE}, late="{late}")'
        what = f"end a step's generation with the first {1 / _OVERSAMPLE:.0%} of its groups, and {said}: {flow}"
        yield _Change(what, _ending_early(scenario, late), flow=flow, changes_mathematics=True)


def _ending_early(scenario: Scenario, late: str) -> Scenario:
    """Let the generate calls of the loop end before their last groups."""

    def early(call: Call) -> Call:
        if call.engine != "rollout" or call.step < 0 or "oversample" in call.options:
            return call
        return replace(call, options={**call.options, "oversample": _OVERSAMPLE, "late": late})

    program = scenario.program
    calls = {call.ordinal: early(call) for call in program.graph.calls}
    items = tuple(replace(item, call=calls[item.call.ordinal]) if isinstance(item, Made) else item for item in program.items)
    graph = replace(program.graph, calls=tuple(calls.values()))
    return replace(scenario, program=replace(program, items=items, graph=graph))


def _accounted(scenario: Scenario, verdict: Verdict, took: Took) -> Iterator[Suggestion]:
    """List what the simulator has no cost for; the gain is what the critical path holds of it, at most."""
    for cause in verdict.causes:
        step_s = took.less(cause.share)
        if cause.name == "program":
            what = f"make the rows before the run, or beside it in a thread: the flow's own Python takes {cause.seconds:,.2f} s a step"
            what = f"{what} before {cause.line}" if cause.line else what
            yield Suggestion(what, False, step_s, cause.share, flow=f"the code before {cause.line}", is_simulated=False)
        if cause.name == "tool":
            what = "draw twice as many episodes a step, a larger batch or n: more of them then wait for tools at once"
            yield Suggestion(
                what, True, took.less(cause.share / 2), cause.share / 2, flow="the batch, or n of policy.rollout", is_simulated=False
            )
        weights = scenario.spec.weights
        if cause.name == "sync" and weights.transport != "auto":
            what = f"send weights as the plan finds cheapest, not over {weights.transport}: weights: {{transport: auto}}"
            yield Suggestion(what, False, step_s, cause.share, {"weights": {"transport": "auto"}}, is_simulated=False)
        if cause.name == "sync" and weights.probe == "always":
            what = "verify weights at the first sync alone: weights: {probe: first}"
            yield Suggestion(what, False, step_s, cause.share, {"weights": {"probe": "first"}}, is_simulated=False)
        if cause.name == "sync" and weights.adapters == "added" and any(model.lora for model in scenario.models.values()):
            what = "send adapters alone, which rollout engines add to weights that they keep: weights: {adapters: alone}"
            yield Suggestion(what, False, step_s, cause.share, {"weights": {"adapters": "alone"}}, is_simulated=False)


def _ordered(found: Sequence[Suggestion]) -> list[Suggestion]:
    """Sort what is worth it: what leaves the mathematics alone first, then by gain; of one setting, only the value that gains most."""
    best: dict[tuple[object, ...], Suggestion] = {}
    for one in sorted(found, key=lambda one: (one.changes_mathematics, -one.gain)):
        key = tuple((part, name) for part, of in one.cluster.items() if isinstance(of, dict) for name in of) or (one.what,)
        if one.gain <= _WORTH:
            continue
        held = best.get(key)
        if held is None:
            best[key] = one
        elif one.step_s < held.step_s * (1 + _WORTH) and _size_of(one) < _size_of(held):
            best[key] = one  # Nearly as good, and the smaller change.
    return sorted(best.values(), key=lambda one: (one.changes_mathematics, -one.gain))


def _size_of(one: Suggestion) -> float:
    """Return the size of the numbers that it sets."""
    parts = [of for of in one.cluster.values() if isinstance(of, dict)]
    return sum(value for of in parts for value in of.values() if isinstance(value, int | float))


def _with(spec: ClusterSpec, part: str, **values: object) -> ClusterSpec:
    return spec.model_copy(update={part: getattr(spec, part).model_copy(update=values)})


def price_of(steps: Sequence[StepReport], as_it_was: Sequence[StepReport]) -> str:
    """What ending steps early costs: tokens generated for nothing, and what is trained: shorter responses, by older weights."""
    trained, wasted = (sum(getattr(step, what) for step in steps) for what in ("trained_tokens", "wasted_tokens"))
    means = [sum(step.trained_tokens for step in of) / max(sum(sum(s.staleness.values()) for s in of), 1) for of in (steps, as_it_was)]
    num = sum(sum(step.staleness.values()) for step in steps)
    num_older = sum(count for step in steps for behind, count in step.staleness.items() if int(behind) > 0)
    parts = [f"{wasted / (trained + wasted):.0%} of the generated tokens are thrown away"] if wasted else []
    parts += [f"trained responses are {1 - means[0] / means[1]:.0%} shorter, since the longest end last"] if means[0] < means[1] else []
    parts += [f"{num_older / num:.0%} of the trained samples are of older weights"] if num_older else []
    return f"the price: {', '.join(parts) or 'nothing in the simulated steps'}"


def _outcome(scenario: Scenario, plan: Plan, changed: Callable[[Costs], Costs] = lambda costs: costs) -> Outcome | None:
    """Simulate in the run's own mode, with the costs that the run as it was is simulated with, or those changed; None where no such plan
    fits, or the flow can't be run so."""
    try:
        mine = scenario.plans().get(plan.mode)
        return None if mine is None else scenario.run(mine, changed(_cautious(scenario, plan)))
    except M2FlowError:
        return None


def _step_s(outcome: Outcome) -> float:
    return outcome.totals.makespan_s / max(len(outcome.report.steps), 1)


def _of_row(row: Row, now: Row, took: Took) -> Suggestion:
    flow = f"@flow(staleness={row.staleness})" if row.staleness != now.staleness else ""
    what = _describe_change(row, now)
    cluster: dict[str, dict[str, object] | str] = {"placement": row.placement} if row.placement != now.placement else {}
    gain = took.gain(row.step_s)
    return Suggestion(what, row.staleness != now.staleness, took.less(gain), gain, cluster, flow)


def _describe_change(row: Row, now: Row) -> str:
    parts = []
    if row.placement != now.placement:
        parts.append(f"place it {row.placement} instead of {now.placement}: placement: {row.placement}")
    if row.staleness != now.staleness:
        parts.append(f"allow weights that are {row.staleness} behind: @flow(staleness={row.staleness})")
    return ", and ".join(parts)
