"""Plan a flow, and simulate its steps, from Python; the command line prints what these functions return.

    flow, options, ClusterSpec --make_plan--> Planned        flow, options, ClusterSpec --make_simulation--> Simulation

`plan` and `simulate` are the public forms, which take a flow and a cluster as `m2flow.run` does.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from m2flow.macro.flow import Flow
from m2flow.macro.graph_display import barriers_listing, bounds_listing, calls_listing
from m2flow.macro.tracing import Assumption, Exploration, KnownValues, anticipate, copies_made, explore
from m2flow.micro.lowering.arithmetic import TRACED_STEPS
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.plan import PREFILL, Plan
from m2flow.micro.records.flow_record import read_record
from m2flow.micro.records.plan_file import check_edited, origin_of, read_plan, write_plan_file
from m2flow.planner.explaining import explain, step_lines
from m2flow.planner.planning import Forecast, check_trainers, find_models, forecast, is_searched, question_of, with_shapes, write_forecast
from m2flow.planner.profiles import read_profile
from m2flow.recipe import Model, check_count
from m2flow.runs.entrance import ClusterLike, FlowLike, flow_of, options_of, spec_of, target_of
from m2flow.runs.opened import FrameKind, frame_of
from m2flow.simulator.machines import paced
from m2flow.spec import ClusterSpec

if TYPE_CHECKING:
    from m2flow.runs.opened import Run
    from m2flow.simulator.scenario import Outcome, Scenario


# ---- plan


@final
@dataclass(frozen=True)
class Planned:
    """A flow's calls and the plan that they are lowered to. Its text is what `m2flow plan` prints."""

    target: str
    """The flow's file."""
    options: Mapping[str, object]
    spec: ClusterSpec
    seed: int
    num_shown: int
    """Steps whose calls are shown."""
    exploration: Exploration
    plan: Plan
    foreseen: Forecast | None
    """What a step is predicted to take, where the plan was not chosen by that."""
    tried: tuple[str, ...]
    """What was found out about the first rows."""
    doubts: tuple[str, ...]
    """What the search for a placement had to assume."""

    def text(self, *, has_terms: bool = False, details: str | None = None, notes: Sequence[str] = ()) -> str:
        """The calls, the barriers and the plan.

        Args:
            has_terms: list the constants of the cost model.
            details: `why` compares the modes term by term, `full` adds memory and KV caches too.
            notes: lines for below the plan.
        """
        plan = self.plan
        placed = _foreseen(self.foreseen) if self.foreseen else []
        if plan.choice:
            placed = [explain(plan.choice, has_terms=has_terms, details=details), ""]
        elif has_terms or details:
            asked = "--terms" if has_terms else f"--{details}"
            placed += [f"{asked} shows nothing here: it is about a placement that was searched for, and the cluster spec says {plan.mode}"]
            placed += ["  (placement: auto searches, and so does a spec with pools)", ""]
        return "\n".join([*_calls_text(self.exploration, self.target, self.num_shown), "", *placed, str(plan), *notes, *self.tried])

    def save(self, file: str | Path) -> None:
        """Write the plan as a file, to edit, compare and pin: `m2flow.run(flow, plan=file)`."""
        write_plan_file(Path(file), self.plan, origin_of(self.target, dict(self.options), self.spec, seed=self.seed))

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre style='font-size:12px'>{html.escape(self.text())}</pre>"


def plan(
    flow: FlowLike,
    *,
    cluster: ClusterLike = None,
    seed: int = 0,
    steps: int = 1,
    lengths: str = "",
    profile: str | Path | None = None,
    shapes: Mapping[str, str] | None = None,
    policy: str = "",
    assume: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    **flow_options: object,
) -> Planned:
    """Show a flow's calls and how they would run, without running them: what `m2flow plan` does.

    Args:
        flow, cluster, seed, policy, options, flow_options: as of `m2flow.run`.
        steps: steps to show.
        lengths: of answers: a trace, a run, or `"lognormal:median=900,sigma=1"`.
        profile: a file of measured costs; None: they are modelled.
        shapes: plan as if a role's model were this one: `{"policy": "Qwen2.5-7B"}`.
        assume: what a number is that Python waits for: `["reward=0.5"]`.
    Raises:
        FlowError: what the flow does wrong. SpecError, PlanError: what the cluster can't do.

    >>> import m2flow
    >>> m2flow.plan("flows/grpo.py", batch=64).plan.mode  # doctest: +SKIP
    'time-shared'
    """
    taken = flow_of(flow)
    spec = with_shapes(spec_of(cluster), _pairs(shapes)).with_policy(policy)
    profile_file = None if profile is None else Path(profile)
    given = options_of(taken, options, flow_options)
    check_count("steps", steps)
    known = KnownValues(tuple(map(Assumption.parse, _several(assume))), None, "")
    return make_plan(
        taken, target_of(taken), given, spec, steps=steps, seed=seed, known=known, lengths=lengths, profile=profile_file, tries=True
    )


def _several(texts: Sequence[str]) -> Sequence[str]:
    """A text alone is one of them, not its letters."""
    return (texts,) if isinstance(texts, str) else texts


def make_plan(
    flow: Flow,
    target: str,
    options: Mapping[str, object],
    spec: ClusterSpec,
    *,
    steps: int,
    seed: int,
    known: KnownValues,
    lengths: str = "",
    profile: Path | None = None,
    pinned: Plan | None = None,
    tries: bool = True,
    note: Callable[[str], None] = lambda said: None,
) -> Planned:
    """Trace a flow's first steps and lower them to a plan.

    Args:
        known: values that Python waits for.
        pinned: a plan that is held against the flow, in place of a new one.
        tries: render the first rows and call the functions on a stub sample.
        note: is told what the search for a placement has to assume, before it begins.
    """
    exploration = explore(flow, options, steps=steps, seed=seed, known=known)
    graph = anticipate(flow, options, exploration, steps=max(steps, TRACED_STEPS), seed=seed, known=known)
    copies = copies_made(flow, options, num_steps=exploration.num_steps, seed=seed, known=known, exploration=exploration)
    models, choice = {**copies.models, **exploration.models}, None
    doubts: tuple[str, ...] = ()
    find_models(models, spec, with_weights=False)
    tried = _tried(exploration, models, spec, seed) if tries else []
    if is_searched(spec, models) and pinned is None:
        question = question_of(graph, models, spec, lengths=lengths, profile=profile, copies=copies.sources)
        doubts = tuple(question.doubts)
        for doubt in doubts:
            note(doubt)
        choice = question.choose()
    found = lower(graph, models, spec, num_steps=exploration.num_steps, choice=choice, pinned=pinned, copies=copies.sources)
    if pinned is not None:
        check_edited(pinned, found, spec)
    check_trainers(found, spec, {role: model for role, model in models.items() if _is_the_planned(model, models, spec)})
    found = paced(found, graph, models, spec, profile)
    foreseen = None
    if found.choice is None and profile is not None:
        measured = read_profile(profile)
        measured.check(models, spec)
        doubts = tuple(measured.doubts(spec, graph.flow))
        for doubt in doubts:
            note(doubt)
        foreseen = forecast(found, spec, lambda other: question_of(graph, models, other, lengths=lengths, profile=profile))
    return Planned(target, dict(options), spec, seed, steps, exploration, found, foreseen, tuple(tried), doubts)


def _is_the_planned(model: Model, models: Mapping[str, Model], spec: ClusterSpec) -> bool:
    """Whether what is planned for is a model in a directory here: not one that the spec names a shape for, nor one that is elsewhere."""
    others = {models[role].path for role in spec.shapes}
    return model.path not in others and (Path(model.path).expanduser() / "config.json").is_file()


def known_values(assume: Sequence[str], run_dir: Path | None) -> KnownValues:
    """Values that Python waits for: assumed ones, and those that a run has had."""
    return KnownValues(tuple(Assumption.parse(text) for text in assume), read_record(run_dir) if run_dir else None, str(run_dir))


def _tried(exploration: Exploration, models: Mapping[str, Model], spec: ClusterSpec, seed: int) -> list[str]:
    """Try the flow's first rows and functions on the path with the most calls; return lines of what was found."""
    from m2flow.runner.first_rows import try_first_rows

    found = try_first_rows(exploration.longest.graph, models, spec, seed=seed)
    return ["", "tried on the first rows:", *(f"  {line}" for line in found)] if found else []


def _foreseen(forecast: Forecast) -> list[str]:
    """Print the predicted time of a step for a plan made by rule."""
    if forecast.choice is None:
        return [f"step: nothing is predicted: {forecast.note}", ""]
    return [*step_lines(forecast.choice), *([f"note: {forecast.note}"] if forecast.note else []), ""]


def _calls_text(exploration: Exploration, target: str, steps: int) -> list[str]:
    num_steps = exploration.num_steps
    traced = f"the first {steps} of {num_steps} steps" if steps > 1 else f"the first of {num_steps} steps"
    flow = exploration.paths[0].graph.flow
    lines = [f"calls of {flow} ({target}), " + (traced if num_steps else "which is one step"), *calls_listing(exploration), ""]
    barriers = barriers_listing(exploration)
    if not barriers:
        return [
            *lines,
            "barriers: none. Python waits for no value in these steps.",
            f"  (idle for `barrier`, in m2flow analyze: for {OTHER_WAITS})",
        ]
    lines += ["barriers: here Python waits for a value, and what follows can't start before; log() does not wait", *barriers]
    lines += [f"  {line}" for line in bounds_listing(exploration)]
    sources = [source for path in exploration.paths for look in path.looks for source in look.sources]
    if any("not known" in source for source in sources):
        lines += ["  --assume NAME=NUMBER follows the outcomes of one value; --from RUN takes the values that a run has had."]
    if len(exploration.paths) > 1:
        lines += ["  The plan below is made for the outcomes with the most calls."]
    return lines


# ---- simulate


@final
@dataclass(frozen=True)
class Simulation:
    """Simulated steps of a flow. Its text is what `m2flow simulate` prints."""

    target: str
    options: Mapping[str, object]
    scenario: Scenario
    plan: Plan
    outcome: Outcome

    @property
    def makespan_s(self) -> float:
        """Seconds of all steps."""
        return self.outcome.totals.makespan_s

    @property
    def efficiency(self) -> float:
        """The bound of all steps over the time that they take, at most 1."""
        return self.outcome.totals.efficiency

    def steps(self, *, frame: FrameKind | None = None) -> Any:
        """The steps as a table: makespan and bound, tokens, memory, and idle device seconds by cause.

        Args:
            frame: `pandas`, `polars` or `arrow`.
        """
        steps = self.outcome.report.steps
        names = list(dict.fromkeys(cause for step in steps for cause in step.idle_s))
        columns: dict[str, list[object]] = {
            "step": list(range(len(steps))),
            "makespan_s": [step.makespan_s for step in steps],
            "bound_s": [max(step.lower_bounds_s.values(), default=None) for step in steps],
            "efficiency": [step.efficiency for step in steps],
            "trained_tokens": [step.trained_tokens for step in steps],
            "wasted_tokens": [step.wasted_tokens for step in steps],
            "peak_memory_gib": [step.peak_memory_gib for step in steps],
        }
        return frame_of(columns | {f"idle_s/{cause}": [step.idle_s.get(cause, 0.0) for step in steps] for cause in names}, frame)

    def save(self, directory: str | Path) -> Run:
        """Write the directory of a simulated run, with the plan's forecast if the plan was not chosen by one, and open it.

        Raises:
            SpecError: it is there and not empty, or can't be written.
        """
        from m2flow.runs.opened import Run
        from m2flow.simulator.scenario import write_run

        out, scenario = Path(directory), self.scenario
        write_run(out, scenario, self.outcome, flow_file=self.target, options=self.options)
        if self.plan.choice is None:
            write_forecast(out, forecast(self.plan, scenario.spec, partial(scenario.ask, scenario.graph)))
        return Run(out)

    def __str__(self) -> str:
        return "\n".join(_simulation_text(self.scenario, self.outcome, self.plan))

    def _repr_html_(self) -> str:
        return f"<pre style='font-size:12px'>{html.escape(str(self))}</pre>"


def simulate(
    flow: FlowLike,
    *,
    cluster: ClusterLike = None,
    seed: int = 0,
    steps: int = 1,
    lengths: str = "",
    plan: str | Path | Planned | None = None,
    profile: str | Path | None = None,
    shapes: Mapping[str, str] | None = None,
    policy: str = "",
    assume: Sequence[str] = (),
    fail: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    **flow_options: object,
) -> Simulation:
    """Say how long a flow's steps would take on a cluster, by the scheduler that would run them: what `m2flow simulate` does.

    Args:
        flow, cluster, seed, policy, options, flow_options: as of `m2flow.run`.
        steps: steps of the flow to simulate.
        lengths, profile, shapes, assume: as of `m2flow.plan`.
        plan: simulate this plan or plan file; None: the best that is found.
        fail: nodes that fail at a time, and may return at another: `["3@120-150"]`.
    Raises:
        FlowError: what the flow does wrong. SpecError, PlanError, ModelError: what the cluster can't do, or its spec does not say.

    >>> import m2flow
    >>> m2flow.simulate("flows/grpo.py", steps=3, lengths="lognormal:median=5,sigma=0.5").makespan_s  # doctest: +SKIP
    2.41
    """
    taken = flow_of(flow)
    spec = with_shapes(spec_of(cluster), _pairs(shapes)).with_policy(policy).without_spare
    given, profile_file = options_of(taken, options, flow_options), None if profile is None else Path(profile)
    check_count("steps", steps)
    known = KnownValues(tuple(map(Assumption.parse, _several(assume))))
    scenario = prepared(taken, given, spec, lengths=lengths, steps=steps, seed=seed, known=known, profile=profile_file)
    wanted = plan.plan if isinstance(plan, Planned) else None if plan is None else read_plan(Path(plan))
    return make_simulation(scenario, target_of(taken), given, wanted, _several(fail))


def prepared(
    flow: Flow,
    options: Mapping[str, object],
    spec: ClusterSpec,
    *,
    lengths: str,
    steps: int,
    seed: int,
    known: KnownValues,
    profile: Path | None,
) -> Scenario:
    """Prepare what is simulated."""
    from m2flow.simulator.scenario import prepare

    return prepare(flow, options, spec, lengths=lengths, steps=steps, seed=seed, known=known, profile=profile)


def make_simulation(
    scenario: Scenario, target: str, options: Mapping[str, object], pinned: Plan | None, fail: Sequence[str] = ()
) -> Simulation:
    """Simulate a scenario under a plan, or under the best that is found."""
    chosen = scenario.plan() if pinned is None else scenario.pinned(pinned)
    return Simulation(target, dict(options), scenario, chosen, scenario.run(chosen, failures=scenario.failures(chosen, tuple(fail))))


def _pairs(shapes: Mapping[str, str] | None) -> tuple[str, ...]:
    return tuple(f"{role}={model}" for role, model in (shapes or {}).items())


_NOT_EMBEDDED = f"rollout.difficulty, {PREFILL!r}, changes nothing here: simulated prompts are not embedded"


def _simulation_text(scenario: Scenario, outcome: Outcome, plan: Plan) -> list[str]:
    report, totals, drawn = outcome.report, outcome.totals, outcome.simulated.history.drawn
    num_instances = sum(any(slot.kind == "rollout" for slot in worker.engines) for worker in plan.workers)
    replayed = f"{drawn.num_replayed} steps of it replayed" if drawn.num_replayed else "drawn from it"
    lines = [
        f"{plan.flow} on {plan.cluster}: {plan.mode}, {outcome.simulated.history.num_devices} devices, {num_instances} rollout instances, "
        f"staleness {scenario.program.staleness}",
        f"lengths: {scenario.lengths.name}, {replayed}",
        *([_NOT_EMBEDDED] if plan.difficulty == PREFILL else []),
        "",
    ]
    head = ("step", "seconds", "bound", "of", "efficiency", "trained", "wasted", "staleness", "GiB", "idle for")
    rows = [head]
    for number, step in enumerate(report.steps):
        best = max(step.lower_bounds_s, key=lambda name: step.lower_bounds_s[name], default="")
        rows.append(
            (
                str(number),
                f"{step.makespan_s:,.1f}",
                f"{step.lower_bounds_s.get(best, 0.0):,.1f}",
                best.replace("_between_releases", "").replace("_", " "),
                f"{step.efficiency:.0%}",
                f"{step.trained_tokens:,}",
                f"{step.wasted_tokens:,}",
                " ".join(f"{behind}:{count}" for behind, count in step.staleness.items()),
                f"{step.peak_memory_gib:.1f}",
                causes(step.idle_s, step.makespan_s * outcome.simulated.history.num_devices),
            )
        )
    lines += table(rows)
    whole_s = totals.makespan_s * outcome.simulated.history.num_devices
    lines += [
        "",
        f"all steps: {totals.makespan_s:,.1f} s, {totals.efficiency:.0%} of the bound; devices work {totals.busy_share:.0%} of the time, "
        f"idle for {causes(totals.idle_s, whole_s) or 'nothing'}",
        f"simulated in {report.wall_s:.2f} s, {report.num_events:,} events",
    ]
    return lines


OTHER_WAITS = "Python's own work between two calls, or for others of its kind"
"""What a device that is idle for `barrier` waits for where Python waits for no value."""


def causes(idle_s: dict[str, float], whole_s: float) -> str:
    """Format idle time by cause as shares of all device time, the largest first; shares below 0.1% are left out."""
    shares = sorted(((seconds / whole_s if whole_s else 0.0, cause) for cause, seconds in idle_s.items()), reverse=True)
    return ", ".join(f"{cause} {share:.1%}" for share, cause in shares if share >= 0.001)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows in columns under the first row; columns of numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def align(text: str, column: int) -> Callable[[int], str]:
        is_number = all(row[column][:1].isdigit() for row in rows[1:] if row[column])
        return text.rjust if is_number else text.ljust

    return ["  ".join(align(text, i)(widths[i]) for i, text in enumerate(row)).rstrip() for row in rows]
