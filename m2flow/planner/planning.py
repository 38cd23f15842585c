"""Plan a flow: set up the question from its graph, lengths and costs, choose the placement, and forecast the step time of any plan.

    MacroGraph, models, ClusterSpec, lengths, profile --question_of--> Question --choose--> Choice --(m2flow.micro.lowering.passes)--> Plan
    Plan, ClusterSpec, Question --forecast--> Forecast        shown by `m2flow view` and `analyze` next to what happened
        Forecast <--read, write--> RUN/forecast.json

`m2flow plan`, `m2flow run` and `m2flow simulate` share this. Placement is searched for where the spec leaves it open: it has pools, or
says `placement: auto`. Otherwise the rule of `m2flow.micro.lowering.placement` applies.

With `functions: {workers: auto}` the search also chooses the number of processes for functions, simulators among them: the fewest within 1%
of the fastest. Of n processes, the busiest has ceil(units/n) of a call's units, and

    step >= the longest chain of calls, work / n

A flow without models is planned by these two alone. Limit: what functions and engines take from each other on one machine's cores is in no
prediction, and the steps of a flow whose calls use results of the step before (`--behind`) may overlap more than is predicted.

A plan by rule (`split`, `time-shared`) or from a file runs as it is; `forecast` only predicts its time, with the costs of a profile or of
the hardware model. Limits: chunk sizes are the search's, and contention of processes without a lease on each other's devices is unknown.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import msgspec
import numpy as np

from m2flow.engines.registry import check_trainer, train_options
from m2flow.errors import EngineError, M2FlowError, PlanError, SpecError
from m2flow.macro.graph import MacroGraph
from m2flow.micro.lowering.passes import lower
from m2flow.micro.lowering.placement import check_pins
from m2flow.micro.protocol.cost_terms import DRAWS_PER_GROUP, Costs, EpisodeCosts, EpisodeTurn
from m2flow.micro.protocol.plan import Bound, Choice, Loser, Plan, TimeTerm, WorkerPlan
from m2flow.micro.records.ledger import lengths_of_run
from m2flow.planner.cost_model import ModelledCosts, shapes_of
from m2flow.planner.model_shapes import ModelShape
from m2flow.planner.pools import offered, refused_in_all
from m2flow.planner.problem import options_of
from m2flow.planner.profiles import Profile, ProfiledCosts, read_profile
from m2flow.planner.search import find_plan
from m2flow.planner.workload import Away, Workload, busiest_s, extents_of, num_units, workload_of
from m2flow.recipe import Model, hub_directory, is_of_hub
from m2flow.rollout_scheduling.lengths import Lengths, Mixture, parse_lengths
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec

_ASSUMED_SHARE, _ASSUMED_SIGMA = 0.25, 0.8
"""Assumed lengths: the median as a share of the limit, and sigma of the log length, typical of many kinds of runs."""

_FEW = 5e-4
"""The share of responses that may be truncated without a note."""


@dataclass(frozen=True)
class Question:
    """A planning problem: one flow on one cluster, with its workload, lengths and costs."""

    workload: Workload
    lengths: Lengths
    lengths_are_known: bool
    """Whether lengths were given or measured; otherwise they are assumed from the limit of the generate calls."""
    costs: Costs
    spec: ClusterSpec
    doubts: tuple[str, ...] = ()
    """Reasons why the profile may not apply to this cluster."""
    check: Callable[[Choice], object] | None = None
    """Lowers a choice; raises PlanError if it can't be run."""

    def choose(self, spec: ClusterSpec | None = None, *, is_alone: bool = False) -> Choice:
        """Find the fastest plan of the cost model that can be run.

        Args:
            spec: the same cluster with other pins; None: the question's own.
            is_alone: leave out the comparison with other plans.
        Raises:
            PlanError: nothing fits, with what is short and what would help.
        """
        spec = spec or self.spec
        if spec.functions.workers != "auto":
            return find_plan(self.workload, self.lengths, self.costs, spec, is_alone=is_alone, check=self.check)
        started = time.perf_counter()
        tried = _numbers_up_to(spec.num_cores, is_quick=not self.workload.engines)
        found = {num: self._with_processes(num, spec, is_alone=True) for num in tried}
        best_s = min(choice.predicted_step_s for choice in found.values())
        best = next(num for num, choice in found.items() if choice.predicted_step_s <= best_s * _AS_FAST)
        whole = found[best] if is_alone or not self.workload.engines else self._with_processes(best, spec, is_alone=False)
        why = {num: "they are too few" if num < best else "more gain nothing" for num in (1, best // 2, best + 1, tried[-1])}
        losers = [
            Loser(f"{num} process{'es' if num > 1 else ''} for functions", found[num].predicted_step_s, why[num], found[num].parts)
            for num in why
            if num in found and num != best
        ]
        return msgspec.structs.replace(
            whole,
            losers=() if is_alone else (*whole.losers, *losers),
            search_s=time.perf_counter() - started,
            is_exact=whole.is_exact and len(tried) == tried[-1],
        )

    def _with_processes(self, num: int, spec: ClusterSpec, *, is_alone: bool) -> Choice:
        """The fastest plan with so many processes for functions."""
        fixed = spec.model_copy(update={"functions": spec.functions.model_copy(update={"workers": num})})
        if self.workload.engines:
            choice = find_plan(self.workload, self.lengths, self.costs, fixed, is_alone=is_alone, check=self.check)
        else:
            choice = choice_for_functions(self.workload, self.costs, fixed)
        return msgspec.structs.replace(choice, num_function_workers=num)


_AS_FAST = 1.01
"""A plan is as fast as another if it takes at most so many times as long."""
_MOST_TRIED = 16
"""Numbers of processes that are all tried where each needs a search of placements; of more, some."""


def _numbers_up_to(most: int, *, is_quick: bool) -> list[int]:
    found = [1]
    while found[-1] < most:
        found.append(min(most, found[-1] + (1 if is_quick or found[-1] < _MOST_TRIED else found[-1] // 4)))
    return found


def choice_for_functions(workload: Workload, costs: Costs, spec: ClusterSpec) -> Choice:
    """Predict a step of a flow that has functions alone, in as many processes as the spec says."""
    num, chunk = spec.functions.num_workers, spec.functions.chunk
    ends: dict[str, float] = {}
    alone: dict[str, float] = {}
    parts, work_s = [], 0.0
    for call in workload.calls:
        cost, units = costs.function(call.name), num_units(call)
        seconds = busiest_s(cost, units, num, chunk)
        ends[call.name] = max((ends[before] for before in call.after), default=0.0) + seconds
        alone[call.name] = max((alone[before] for before in call.after), default=0.0) + busiest_s(cost, units, max(units, 1), 1)
        work_s += busiest_s(cost, units, 1, chunk)
        parts.append((call, seconds))
    last = max(ends, key=lambda name: ends[name])
    on_path, path_s = {last}, ends[last]
    for call in reversed(workload.calls):
        if call.name in on_path and call.after:
            on_path.add(max(call.after, key=lambda name: ends[name]))
    step_s = max(path_s, work_s / num)
    longest = max(parts, key=lambda part: part[1])[0].name
    return Choice(
        flow=workload.flow,
        cluster=spec.name,
        mode="time-shared",
        placements=(),
        predicted_step_s=step_s,
        parts=(
            *(TimeTerm(call.name, seconds, call.name in on_path) for call, seconds in parts),
            *([TimeTerm("calls that wait for a process", step_s - path_s)] if step_s > path_s else []),
        ),
        bounds=(Bound("critical path", max(alone.values())), Bound("work", work_s / spec.num_cores)),
        is_exact=True,
        gap_s=0.0,
        advice=longest,
        losers=(),
        search_s=0.0,
        constraints_cost_s={},
        constants=costs.constants(),
    )


UNKNOWN_TOOLS = "what the agents' tools take is not known, so each episode counts as one turn; a profile of a run that played some knows it"
"""A doubt about simulated and predicted times of flows with agents."""


UNKNOWN_TURNS = (
    "how long the turns of {} are is not known, so what episodes wait for them is left out of the step; "
    "a profile of a run that played some knows it"
)
"""A doubt about the predicted times of flows in whose episodes others speak from devices of their own."""


def is_searched(spec: ClusterSpec, models: Mapping[str, Model]) -> bool:
    """Whether the search chooses the placement. A flow without models has nothing to place but functions, whose number may be chosen."""
    return (bool(models) or spec.functions.workers == "auto") and (bool(spec.pools) or spec.placement == "auto")


def with_shapes(spec: ClusterSpec, texts: tuple[str, ...]) -> ClusterSpec:
    """Add shapes given as `policy=Qwen2.5-7B` to the spec.

    Raises:
        SpecError: a text is not of that form.
    """
    shapes = dict(spec.shapes)
    for text in texts:
        role, equals, name = text.partition("=")
        if not (role and equals and name):
            raise SpecError(f"--shape {text}: it must be ROLE=MODEL", now="Example: --shape policy=Qwen2.5-7B")
        shapes[role] = name
    return spec.model_copy(update={"shapes": shapes})


def find_models(models: Mapping[str, Model], spec: ClusterSpec, *, with_weights: bool) -> None:
    """Find the hub's models that this machine needs, or download them: for a plan their config and tokenizer, for a run the weights.

    Raises:
        ModelError: files are missing that can't be had.
    """
    is_elsewhere = bool(spec.pools) and not with_weights
    for role, model in models.items():
        is_fake = {spec.rollout.engine, spec.train.engine} == {"fake"}
        if is_of_hub(model.path) and not is_fake and not is_elsewhere and (with_weights or role not in spec.shapes):
            hub_directory(model, with_weights=with_weights)


def question_of(
    graph: MacroGraph,
    models: Mapping[str, Model],
    spec: ClusterSpec,
    *,
    lengths: str | Lengths = "",
    profile: Path | Profile | None = None,
    copies: Mapping[str, str] | None = None,
) -> Question:
    """Set up planning for a traced flow.

    Args:
        graph: some steps of the flow, with the calls before and after them.
        lengths: of responses, as `m2flow.rollout_scheduling.lengths.parse_lengths` takes them; by default those that the profile
            observed, and without a profile an assumption from the limit of the generate calls. Text that these limits contradict is
            refused, observed lengths are truncated.
        profile: written by `m2flow profile`, or measured by a run so far; without one all costs are modelled.
        copies: role -> the role whose weights it takes, as `m2flow.micro.lowering.passes.lower` takes them.
    Raises:
        SpecError: lengths or a profile that can't be used. ModelError: nothing says how large a model is.
    """
    check_pins(graph, models, spec)
    measured = read_profile(profile) if isinstance(profile, Path) else profile
    if spec.costs:  # What the cluster's own file says holds where nothing else was measured.
        given = read_profile(Path(spec.costs))
        measured = given.updated(measured) if measured else given
    if measured is not None:
        measured.check(models, spec)
    draws = measured.draws_per_group if measured else 0.0
    workload = workload_of(graph, spec, draws_per_group=draws or DRAWS_PER_GROUP)
    observed = measured.lengths() if measured and measured.responses else None
    known = parse_lengths(lengths, lengths_of_run) if isinstance(lengths, str) and lengths else lengths or observed
    shapes = shapes_of(models, spec)
    _check_shapes(workload, shapes, spec)
    found, cuts = _within_limits(known or _assumed(workload), workload, shapes, given=lengths if isinstance(lengths, str) else "")
    modelled = ModelledCosts(spec, workload, shapes, extents_of(workload, shapes, found))
    costs = ProfiledCosts(measured, modelled) if measured else modelled
    has_agents = any("agent" in call.options for call in graph.calls)
    blind = (UNKNOWN_TOOLS,) if has_agents and not costs.episodes().episodes else ()
    workload, deaf = with_waits(workload, costs, spec)
    doubts = (*cuts, *(measured.doubts(spec) if measured else ()), *blind, *deaf)
    return Question(workload, found, known is not None, costs, spec, doubts, partial(_lowered, graph, models, spec, copies))


def with_waits(workload: Workload, costs: Costs, spec: ClusterSpec) -> tuple[Workload, tuple[str, ...]]:
    """The workload, with what episodes wait for tools and for those who speak in them from devices of their own, as recorded episodes say;
    and a doubt about those speakers of whom none says anything.

    A turn takes what it takes in the fastest layout that may be chosen, in a batch of the share of all episodes that the turns' share of
    the tokens gives.
    """
    played = costs.episodes().episodes
    num_tokens = sum(turn.num_tokens for one in played for turn in one)
    of_tools = _waits_for_tools(costs.episodes())
    found = {call.name: msgspec.structs.replace(call, away=of_tools) if call.is_played else call for call in workload.calls}
    unknown = []
    for call in [call for call in workload.calls if call.beside and call.engine is not None]:
        assert call.engine is not None
        turns = [turn for one in played for turn in one if turn.role == call.engine.role]
        options = options_of([call.engine], costs, spec).of[call.engine]
        if not turns or not options:
            unknown.append(call.engine.role)
            continue
        share = sum(turn.num_tokens for turn in turns) / num_tokens
        waits = []
        for option in options:
            cost = costs.decode(call.engine, option.pool, option.layout)
            at_once = min(max(1.0, call.num_samples * share / option.layout.dp), cost.max_running)
            read_s = sum(turn.prefill_tokens for turn in turns) * cost.prefill_token_s
            way_s = 2 * len(turns) * costs.hop_s(0, option.pool, option.pool)
            waits.append((share * cost.seconds(at_once), (read_s * at_once + way_s) / len(played)))
        token_s, episode_s = min(waits, key=lambda wait: wait[0] * num_tokens / len(played) + wait[1])
        before = found[call.beside].away
        away = Away(before.share + share, before.token_s + token_s, before.episode_s + episode_s)
        found[call.beside] = msgspec.structs.replace(found[call.beside], away=away)
        found[call.name] = msgspec.structs.replace(call, away=Away(1.0 - share))
    doubts = (UNKNOWN_TURNS.format(", ".join(dict.fromkeys(unknown))),) if unknown else ()
    return msgspec.structs.replace(workload, calls=tuple(found.values())), doubts


def _waits_for_tools(known: EpisodeCosts) -> Away:
    """What episodes wait for tools and for their agents: the line of least squares by the tokens of an episode, where it rises."""
    if not known.episodes:
        return Away()

    def seconds(turn: EpisodeTurn) -> float:
        factors = [[s * (1.0 if (tool := known.tool(name)) is None else tool.factor) for name, s in group] for group in turn.calls]
        return sum(max(group, default=0.0) for group in factors) + turn.rest_s

    tokens = np.array([sum(turn.num_tokens for turn in one) for one in known.episodes], np.float64)
    waits_s = np.array([sum(map(seconds, one)) for one in known.episodes], np.float64)
    spread = tokens - tokens.mean()
    slope = float(spread @ waits_s / max(spread @ spread, 1.0))
    most = float(waits_s.mean() / max(tokens.mean(), 1.0))  # A steeper line would have short episodes wait less than not at all.
    token_s = min(max(slope, 0.0), most)
    return Away(0.0, token_s, float(waits_s.mean()) - token_s * float(tokens.mean()))


def _check_shapes(workload: Workload, shapes: Mapping[str, ModelShape], spec: ClusterSpec) -> None:
    """Check that the trainer can have the models of its roles in some layout. Raises `EngineError`."""
    offers = offered(spec.train.engine, "train")
    for engine in workload.engines:
        why = refused_in_all(shapes[engine.role], offers) if engine.kind == "train" and engine.role in shapes else ""
        if why:
            raise EngineError(
                f"the train engine {spec.train.engine!r} can't have the model of {engine.role}: {why}",
                now="Take another train engine: `m2flow engines` lists them.",
            )


def check_trainers(plan: Plan, spec: ClusterSpec, models: Mapping[str, Model]) -> None:
    """Check that a plan's trainers can have the models of their roles, in its layouts.

    Raises:
        EngineError: one can't. ModelError: a model is not there.
    """
    for worker in plan.workers:
        for slot in worker.engines:
            if slot.kind == "train" and slot.role in models:
                given = train_options(slot.engine, spec.train.options, slot.planned)
                check_trainer(slot.engine, models[slot.role], given, worker.ranks)


def _lowered(graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, copies: Mapping[str, str] | None, choice: Choice) -> Plan:
    return lower(graph, models, spec, choice=choice, copies=copies)


def _within_limits(
    lengths: Lengths, workload: Workload, shapes: Mapping[str, ModelShape], *, given: str
) -> tuple[Lengths, tuple[str, ...]]:
    """Truncate lengths to what `max_new_tokens` and the models' contexts allow; also returns notes on what was truncated.

    A formula without a cap says how long answers would be if nothing stopped them: it is cut at the limit. Others say what was.

    Raises:
        SpecError: text asks for answers that no call allows, or a call for more than a context holds.
    """
    calls = [call for call in workload.calls if call.work == "generate" and call.max_new_tokens]
    if not calls:
        return lengths, ()
    call = max(calls, key=lambda call: call.max_new_tokens)
    limit, longest = call.max_new_tokens, lengths.longest
    for one in calls:
        assert one.engine is not None
        context = shapes[one.engine.role].max_context if one.engine.role in shapes else 0
        if context and lengths.longest_prompt + one.max_new_tokens > context:
            prompts = f"prompts of up to {lengths.longest_prompt:,} tokens and " if lengths.longest_prompt else ""
            raise SpecError(
                f"{one.name}: {prompts}answers of up to {one.max_new_tokens:,} tokens (max_new_tokens) do not fit the context of "
                f"{one.engine.role}'s model, {context:,} tokens",
                now="Lower max_new_tokens in the flow, or plan for a model with a longer context (--shape ROLE=MODEL).",
            )
    if longest is not None and longest <= limit:
        return lengths, ()
    share = lengths.survival(limit)
    if given and (longest is not None or share > 0.5):
        reach = (
            f"answers of up to {longest:,} tokens"
            if longest is not None
            else f"answers of which {share:.0%} are longer than {limit:,} tokens"
        )
        cap = "" if "cap=" in given else f", or cut the lengths there: --lengths {given},cap={limit}"
        raise SpecError(
            f"--lengths {given}: {reach}, and {call.name} stops at {limit:,} (max_new_tokens)",
            now=f"Raise max_new_tokens in the flow{f' to {longest}' if longest else ''} (of a flow that takes it: --max-new-tokens){cap}.",
        )
    if share < _FEW:
        return lengths.cut_at(limit), ()
    return lengths.cut_at(limit), (
        f"{share:.1%} of the answers of {lengths.name} are cut at {limit:,} tokens, max_new_tokens of {call.name}",
    )


def _assumed(workload: Workload) -> Lengths:
    limits = [call.max_new_tokens for call in workload.calls if call.work == "generate"]
    cap = max(limits, default=1)
    prompts = [call.prompt_bytes / 4 for call in workload.calls if call.work == "generate" and call.prompt_bytes]
    median = max(1.0, cap * _ASSUMED_SHARE)
    return Mixture([1.0], [median], [_ASSUMED_SIGMA], cap=cap, prompt_tokens=max(1, round(max(prompts, default=1.0))))


_FILE = "forecast.json"
_AMPLE_GIB = 2.0**20


@final
class Forecast(msgspec.Struct, frozen=True):
    """The predicted step of a run's plan."""

    choice: Choice | None
    note: str = ""
    """Why there is no prediction, or what it leaves out."""


_read_forecast = msgspec.json.Decoder(Forecast).decode


def forecast(plan: Plan, spec: ClusterSpec, ask: Callable[[ClusterSpec], Question]) -> Forecast:
    """Predict the step time of a plan, part by part. Problems become a note in the forecast; a run never fails for them.

    Args:
        ask: makes the question for a cluster, with the workload, costs and lengths to use.
    """
    try:
        pins, used = _pins(plan, spec)
        (pool,) = spec.planned_pools.values()
        notes, there = [], pool.num_devices
        if used > there and spec.launcher == "local":
            what = "cores" if pool.device == "cpu" else "devices"
            notes.append(f"as if each process had {what} of its own: they use {used}, and there are {there}")
        question = ask(_with_room(spec, pins, used))
        notes += [doubt for doubt in question.doubts if doubt.startswith(UNKNOWN_TURNS.partition("{}")[0])]
        choice = _choice(question)
    except M2FlowError as error:
        return Forecast(None, str(error).partition("\n")[0])
    if not any(constant.source.startswith("measured") for constant in choice.constants.values()):
        notes.append("by a model of the hardware; `m2flow profile` measures this one")
    return Forecast(choice, "; ".join(notes))


def write_forecast(run_dir: Path, found: Forecast) -> None:
    (run_dir / _FILE).write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def read_forecast(run_dir: Path) -> Forecast | None:
    """Read the forecast of a run; None if there is none."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return _read_forecast((run_dir / _FILE).read_bytes())
    return None


def read_prediction(run_dir: Path, plan: Plan | None) -> Choice | None:
    """The predicted step of a run: of the search, or of its forecast."""
    if plan is not None and plan.choice is not None:
        return plan.choice
    foreseen = read_forecast(run_dir)
    return foreseen.choice if foreseen else None


def _choice(question: Question) -> Choice:
    missing = [str(engine) for engine in question.workload.engines if str(engine) not in question.spec.pin]
    if missing:
        raise PlanError(
            f"the plan has no process for {', '.join(missing)}",
            now="Say `placement: auto` in the cluster spec, or pin these engines, and plan again.",
        )
    return find_plan(question.workload, question.lengths, question.costs, question.spec, is_alone=True)


def _with_room(spec: ClusterSpec, pins: Mapping[str, PinSpec], used: int) -> ClusterSpec:
    """The spec with every engine pinned where it is, and enough devices and memory, since fit is not the question here."""
    ((name, pool),) = spec.planned_pools.items()
    each = math.lcm(*(pin.devices[1] - pin.devices[0] for pin in pins.values() if pin.devices))
    size = max(used, pool.num_devices)
    room = pool.model_copy(update={"devices_per_node": -(-size // each) * each})  # Engines may have parts that come out even.
    if pool.device == "cpu":
        room = room.model_copy(update={"memory_gib": _AMPLE_GIB})
    return spec.model_copy(update={"placement": "auto", "pin": {**pins, **spec.pin}, "pools": {name: room}})


def _pins(plan: Plan, spec: ClusterSpec) -> tuple[dict[str, PinSpec], int]:
    """Pin each engine to the devices of its workers, placed next to each other; also returns their number."""
    if spec.pools:
        raise PlanError(
            "the plan's cluster has pools, and nobody searched for a place in them",
            now="Say `placement: auto` in the cluster spec and plan again: in pools, places are searched for.",
        )
    ((name, pool),) = spec.planned_pools.items()
    at, places = 0, dict[str, list[tuple[WorkerPlan, int, int]]]()
    for worker in plan.workers:
        slots = [slot for slot in worker.engines if slot.kind in ("rollout", "train")]
        if not slots or worker.is_spare:
            continue
        each, ranks = worker.threads if pool.device == "cpu" else 1, max(worker.ranks, 1)
        for slot in slots:
            end = at + each * (ranks if slot.kind == "train" else 1)
            places.setdefault(f"{slot.role}.{slot.kind}", []).append((worker, at, end))
        at += each * ranks
    found = {}
    for engine, mine in places.items():
        first, last = mine[0][1], mine[-1][2]
        num_processes = max(mine[0][0].ranks, 1) if engine.endswith(".train") else len(mine)
        # What a trainer's ranks make of its GPUs is the spec's to say; nobody chose an order of stages for it.
        is_open = engine.endswith(".train") and pool.device != "cpu"
        layout = LayoutSpec(vpp=1, schedule="1f1b") if is_open else LayoutSpec(dp=num_processes, tp=(last - first) // num_processes)
        found[engine] = PinSpec(pool=name, devices=(first, last), layout=layout)
    return found, at
