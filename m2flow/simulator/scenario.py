"""Prepare, run and record a simulation: a flow's program, the costs of its engines, the lengths of its samples, failures, and a plan.

    Flow, ClusterSpec, Lengths --prepare--> Scenario: Program, Costs --plan--> Plan --run--> Outcome
    Outcome --write_run--> a run directory: config.json, plan.txt, plan.json, report.json, trace/, trace.json.gz

A scenario is prepared once; it can then make plans for other clusters, modes or stalenesses, and simulate any number of runs. A simulated
run is written in the formats of real ones, so that the same tools show both; its virtual time begins at 0, which viewers show as
1 January 1970.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from m2flow.errors import OptionError, PlanError, SpecError
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, Effect, MacroGraph
from m2flow.macro.tracing import MOST_ASKED, Copies, KnownValues, copies_made, explore, follow
from m2flow.micro.lowering.arithmetic import TRACED_STEPS
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import Costs, EngineId
from m2flow.micro.protocol.plan import Choice, Mode, Plan, names_text
from m2flow.micro.records.plan_file import check_edited
from m2flow.micro.records.rundir import write_plan
from m2flow.observe.perfetto import write_trace
from m2flow.observe.spans import FOR_AGENTS, SpanBlock, SpanName, plain_attributes
from m2flow.observe.store import TraceStore
from m2flow.planner.planning import Question, is_searched, question_of
from m2flow.planner.problem import pin_of
from m2flow.recipe import Model
from m2flow.rollout_scheduling.lengths import Lengths
from m2flow.simulator.machines import Machine, machines_of
from m2flow.simulator.simulation import DoneTask, Failure, Made, Program, follow_program
from m2flow.simulator.simulation_report import Report, RunTotals, Simulated, report_of, simulate, totals_of
from m2flow.simulator.virtual_worker import SampleRun
from m2flow.spec import ClusterSpec, PinSpec


def failure_of(text: str, machines: Mapping[str, Machine], spec: ClusterSpec) -> Failure:
    """Parse a failure: `NODE@SECONDS`, `POOL:NODE@SECONDS` or `WORKER@SECONDS`, with `-SECONDS` appended if it comes back. With a node
    all workers fail that have a device there.

    Raises:
        OptionError: there is no such node or worker, or the text is none of these.
    """
    who, at, when = text.rpartition("@")
    from_text, is_back, until = when.partition("-")
    at_s, back_s = _seconds(from_text), _seconds(until) if is_back else math.inf
    if not at or math.isnan(at_s + back_s) or back_s < at_s or math.isinf(at_s):
        raise OptionError(
            f"--fail {text}: when?", now="Write --fail 3@120: node 3 after 120 seconds; --fail 3@120-150: it is back 30 seconds later."
        )
    back = None if math.isinf(back_s) else back_s
    if who in machines:
        return Failure(at_s, (who,), back)
    pool, _, node = who.rpartition(":")
    pool = pool or next(iter(spec.pools), "")
    if pool not in spec.pools or not node.isdigit() or int(node) >= spec.pools[pool].nodes:
        nodes = [f"{name}:0" + (f" to {name}:{found.nodes - 1}" if found.nodes > 1 else "") for name, found in spec.pools.items()]
        workers = names_text(machines)
        now = f"Nodes: {', '.join(nodes)}. Workers: {workers}." if nodes else f"There are {workers}."
        raise OptionError(f"--fail {text}: there is no node or worker {who!r}", now=now)
    first = int(node) * spec.pools[pool].devices_per_node
    stop = first + spec.pools[pool].devices_per_node
    found = [m.worker for m in machines.values() if m.place and m.pool == pool and m.place.first < stop and first < m.place.stop]
    return Failure(at_s, tuple(found), back)


def _seconds(text: str) -> float:
    """Parse seconds; NaN if it is no valid number."""
    try:
        found = float(text)
    except ValueError:
        return math.nan
    return found if found >= 0 else math.nan


@dataclass(frozen=True)
class Outcome:
    """A simulated run, its report and its totals."""

    plan: Plan
    machines: Mapping[str, Machine]
    simulated: Simulated
    report: Report
    totals: RunTotals


@dataclass(frozen=True)
class Scenario:
    """The first steps of a flow on a cluster, ready to be simulated."""

    program: Program
    """The program of the steps that are simulated."""
    graph: MacroGraph
    """The graph of as many steps as a plan is made from."""
    question: Question
    ask: Callable[[MacroGraph, ClusterSpec], Question]
    models: Mapping[str, Model]
    seed: int
    kept: Mapping[str, float]
    copies: Copies

    @property
    def spec(self) -> ClusterSpec:
        return self.question.spec

    @property
    def lengths(self) -> Lengths:
        return self.question.lengths

    @property
    def costs(self) -> Costs:
        return self.question.costs

    def plan(self) -> Plan:
        """The best plan of the search; for a spec without pools, the plan by rule.

        Raises:
            PlanError: there is none.
        """
        return self._lowered(self.spec, self.question.choose() if is_searched(self.spec, self.models) else None)

    def plans(self) -> dict[Mode, Plan]:
        """The best plan of each mode: that of a free search, that with all engines on all devices, and those with generating and training
        engines apart, by eighths of the devices. A missing mode fits nowhere.
        """
        if not self.spec.pools:
            specs = {mode: self.spec.model_copy(update={"placement": mode}) for mode in ("time-shared", "split")}
            return {mode: self._lowered(spec, None) for mode, spec in specs.items()}  # type: ignore[misc]
        best: dict[Mode, Choice] = {}
        for spec in (self.spec, *_placements(self.spec, self.question.workload.engines)):
            with contextlib.suppress(PlanError, SpecError):
                found = self.question.choose(spec, is_alone=True)
                if found.mode not in best or found.predicted_step_s < best[found.mode].predicted_step_s:
                    best[found.mode] = found
        return {mode: self._lowered(self.spec, choice) for mode, choice in sorted(best.items(), reverse=True)}

    def pinned(self, plan: Plan) -> Plan:
        """Check a plan from a file against this flow.

        Raises:
            PlanError: it is of another flow, or asks for what can't be.
        """
        fresh = lower(self.graph, self.models, self.spec, num_steps=self.program.num_steps, pinned=plan)
        check_edited(plan, fresh, self.spec)
        return fresh

    def failures(self, plan: Plan, texts: Sequence[str]) -> list[Failure]:
        """Parse failures as a command line gives them: `NODE@SECONDS`, `POOL:NODE@SECONDS` or `WORKER@SECONDS`.

        Raises:
            OptionError: there is no such node or worker, or a text is none of these.
        """
        machines = machines_of(plan, self.spec, self.costs)
        return [failure_of(text, machines, self.spec) for text in texts]

    def run(self, plan: Plan, costs: Costs | None = None, failures: Sequence[Failure] = (), *, without_groups: bool = False) -> Outcome:
        """Simulate a plan.

        Raises:
            M2FlowError: the run fails. InternalError: it is faster than a bound.
        """
        costs = costs or self.costs
        simulated = simulate(
            self.program,
            plan,
            self.spec,
            costs,
            self.lengths,
            seed=self.seed,
            kept=self.kept,
            failures=failures,
            without_groups=without_groups,
        )
        machines = machines_of(plan, self.spec, costs)
        overlaps = self.program.staleness > 0
        report = report_of(simulated, machines, overlaps=overlaps)
        return Outcome(plan, machines, simulated, report, totals_of(report, simulated.history, machines, overlaps=overlaps))

    def on(self, spec: ClusterSpec) -> Scenario:
        """The same scenario on another cluster."""
        return replace(self, question=self.ask(self.graph, spec))

    def with_staleness(self, staleness: int) -> Scenario:
        """The same scenario with another bound on staleness."""
        graph = replace(self.graph, calls=_loosened_calls(self.graph, staleness))
        return replace(self, program=_loosened(self.program, staleness), graph=graph, question=self.ask(graph, self.spec))

    def _lowered(self, spec: ClusterSpec, choice: Choice | None) -> Plan:
        return lower(self.graph, self.models, spec, num_steps=self.program.num_steps, choice=choice, copies=self.copies.sources)


def prepare(
    flow: Flow,
    options: Mapping[str, object],
    spec: ClusterSpec,
    *,
    lengths: str = "",
    steps: int = 1,
    seed: int = 0,
    known: KnownValues | None = None,
    profile: Path | None = None,
) -> Scenario:
    """Prepare a scenario of a flow's first steps.

    Args:
        lengths, profile: as `m2flow.planner.planning.question_of` takes them.
    Raises:
        FlowError: what the flow does wrong. SpecError, ModelError: what the cluster spec does not say.
    """
    exploration = explore(flow, options, steps=steps, seed=seed, known=known)
    outcomes = [fork.outcome for fork in exploration.longest.forks]
    program = follow_program(flow, options, steps=steps, seed=seed, known=known, outcomes=outcomes)
    whole = follow(flow, options, outcomes, steps=max(steps, TRACED_STEPS), seed=seed, known=known, max_forks=MOST_ASKED).path.graph
    kept = {assumption.name: assumption.value for assumption in (known.assumptions if known else ()) if assumption.name}

    copies = copies_made(flow, options, num_steps=exploration.num_steps, seed=seed, known=known, exploration=exploration)
    models = {**copies.models, **exploration.models}

    def ask(graph: MacroGraph, spec: ClusterSpec) -> Question:
        return question_of(graph, models, spec, lengths=lengths, profile=profile, copies=copies.sources)

    return Scenario(program, whole, ask(whole, spec), ask, models, seed, kept, copies)


def _placements(spec: ClusterSpec, engines: Sequence[EngineId]) -> Iterator[ClusterSpec]:
    """The cluster with pins that force each placement, unless the spec has pins of its own."""
    name, pool = max(spec.planned_pools.items(), key=lambda item: item[1].num_devices)
    whole = pool.num_devices

    def pinned(places: Mapping[str, tuple[int, int]]) -> ClusterSpec:
        free = [engine for engine in engines if pin_of(engine, spec) == PinSpec()]
        pins = {str(engine): PinSpec(pool=name, devices=places[engine.kind]) for engine in free}
        return spec.model_copy(update={"pin": {**pins, **spec.pin}})

    yield pinned({"rollout": (0, whole), "train": (0, whole)})
    for border in sorted({whole * eighths // 8 for eighths in range(1, 8)} - {0}):
        yield pinned({"rollout": (0, border), "train": (border, whole)})


def _loosened(program: Program, staleness: int) -> Program:
    """The program as if its `@flow` had another bound on staleness."""
    calls = {call.ordinal: call for call in _loosened_calls(program.graph, staleness)}
    items = tuple(Made(calls[item.call.ordinal]) if isinstance(item, Made) else item for item in program.items)
    graph = replace(program.graph, calls=tuple(calls.values()))
    return replace(program, staleness=staleness, items=items, graph=graph)


def _loosened_calls(graph: MacroGraph, staleness: int) -> tuple[Call, ...]:
    first: dict[str, int] = {}
    for call in graph.calls:
        if call.step < 0:
            first.update({effect.resource: effect.version for effect in call.writes})
    return tuple(_loosened_call(call, staleness, first) for call in graph.calls)


def _loosened_call(call: Call, staleness: int, first: Mapping[str, int]) -> Call:
    if call.engine != "rollout" or call.step < 0:
        return call
    reads = []
    for effect in call.reads:
        oldest = max(effect.version - staleness, first.get(effect.resource, 0))
        reads.append(Effect(effect.resource, effect.version, oldest if oldest < effect.version else None))
    return replace(call, reads=tuple(reads), options={**call.options, "staleness": staleness})


# ---- the run directory of a simulated run

_Span = tuple[str, int, int, dict[str, object]]


def write_run(directory: Path, scenario: Scenario, outcome: Outcome, *, flow_file: str, options: Mapping[str, object]) -> None:
    """Write a directory that `m2flow view`, `trace`, `analyze` and `compare` open.

    Raises:
        SpecError: it is there and not empty, or can't be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise SpecError(f"{directory} is not empty", now="Give --out a new directory.")
        _write(directory, scenario, outcome, flow_file, options)
    except OSError as error:
        raise SpecError(
            f"can't write the simulated run to {directory}: {error.strerror}", now="Give another directory, one that you may write to."
        ) from error


def _write(directory: Path, scenario: Scenario, outcome: Outcome, flow_file: str, options: Mapping[str, object]) -> None:
    config = {
        "flow": flow_file,
        "options": {name: value if isinstance(value, int | float | str | bool | None) else repr(value) for name, value in options.items()},
        "simulated": {"lengths": scenario.lengths.name, "seed": scenario.seed, "staleness": scenario.program.staleness},
        "cluster": scenario.spec.model_dump(),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_plan(directory, outcome.plan)
    (directory / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcome.report)) + b"\n")
    with TraceStore(directory) as store:
        for block in blocks_of(outcome):
            store.append(block)
    write_trace(directory, directory / "trace.json.gz", devices=outcome.plan.device_names)


def blocks_of(outcome: Outcome) -> Iterable[SpanBlock]:
    """The spans that each worker would have recorded."""
    history = outcome.simulated.history
    tasks: dict[str, list[_Span]] = {}
    for done in history.done_tasks:
        found = _of_task(done)
        if found is not None:
            tasks.setdefault(done.worker, []).append(found)
    for worker, runs in history.sample_runs.items():
        spans = [*tasks.get(worker, []), *_turns(runs), *(_span_of(run, history.calls[run.call]) for run in runs if run.begun >= 0)]
        spans += [span for run in runs for span in _parts_of(run)]
        spans += [(SpanName.WAIT, _ns(start), _ns(end), {"label": FOR_AGENTS}) for start, end in history.rested.get(worker, [])]
        if spans:
            yield SpanBlock(worker, 0, [(name, start, end, plain_attributes(about)) for name, start, end, about in spans], [])


def _of_task(done: DoneTask) -> _Span | None:
    about: dict[str, object] = _about(done.call) if done.call else {}
    match done.task:
        case m.RunFunction(ids=ids):
            name = SpanName.FUNCTION_CALL if done.call and done.call.engine == "function" else SpanName.TRAIN_LOGPROBS
            about |= {"num_samples": len(ids), "samples": ids}
        case m.Accumulate(ids=ids):
            name = SpanName.TRAIN_ACCUMULATE
            about |= {"num_samples": len(ids), "samples": ids}
        case m.Apply(version=version):
            name = SpanName.TRAIN_APPLY
            about |= {"version": version}
        case m.PublishWeights(role=role, version=version):
            name, about = SpanName.WEIGHTS_PUBLISH, {"version": version, "label": role}
        case m.LoadWeights(role=role, version=version):
            name, about = SpanName.WEIGHTS_LOAD, {"version": version, "label": role}
        case m.Switch(to=to):
            name, about = SpanName.SWITCH, {"label": f"to {to}"}
        case _:
            return None
    return name, _ns(done.start_s), _ns(done.end_s), about


def _turns(runs: Sequence[SampleRun]) -> Iterable[_Span]:
    """A span for each stretch of time in which the number of decoding samples is constant."""
    changes: Counter[int] = Counter()
    for run in runs:
        for begun_s, ended_s in run.stays or [(run.begun_s, run.ended_s)] * (run.begun >= 0):
            changes[_ns(begun_s)] += 1
            changes[_ns(ended_s)] -= 1
    running = 0
    for start, end in itertools.pairwise(sorted(changes)):
        running += changes[start]
        if running > 0:
            yield SpanName.ROLLOUT_STEP, start, end, {"num_samples": running}


def _parts_of(run: SampleRun) -> Iterator[_Span]:
    """The turns and tool calls of an episode."""
    about = {"call": run.call, "sample": run.id}
    for at, (begun_s, ended_s) in enumerate(run.stays, 1):
        yield SpanName.TURN, _ns(begun_s), _ns(ended_s), {**about, "turn": at, "num_tokens": run.spoken[at - 1]}
    for name, begun_s, ended_s in run.called:
        yield SpanName.TOOL, _ns(begun_s), _ns(ended_s), {**about, "label": name, "outcome": "ok"}


def _span_of(run: SampleRun, call: Call) -> _Span:
    tokens = round(run.tokens_until(run.ended))
    about = {**_about(call), "sample": run.id, "num_tokens": tokens, "version": run.version}
    return SpanName.SAMPLE, _ns(run.begun_s), _ns(run.ended_s), about


def _about(call: Call) -> dict[str, object]:
    return {"call": call.ordinal, "step": call.step, "flow_line": str(call.site), "label": call.name}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
