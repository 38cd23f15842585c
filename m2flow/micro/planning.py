"""Planning a flow: from its graph and what is known of its lengths and costs to where everything runs.

    MacroGraph, models, ClusterSpec, lengths, profile --question_of--> Question --choose--> Choice --(m2flow.micro.lowering.lower)--> Plan

What `m2flow plan`, `m2flow run` and `m2flow simulate` share. Placement is searched for where the spec leaves it open: it has pools, or
says `placement: auto`. Otherwise the rule of `m2flow.micro.lowering.placement` holds, and nothing here is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from m2flow.errors import SpecError
from m2flow.macro.graph import MacroGraph
from m2flow.micro.costs.extents import extents_of
from m2flow.micro.costs.modelled import ModelledCosts, shapes_of
from m2flow.micro.costs.profile import Profile, read_profile
from m2flow.micro.costs.profiled import ProfiledCosts
from m2flow.micro.costs.shapes import ModelShape
from m2flow.micro.costs.terms import Costs
from m2flow.micro.lowering.lower import lower
from m2flow.micro.lowering.placement import check_pins
from m2flow.micro.plan import Plan
from m2flow.micro.rollouts.lengths import Lengths, parse_lengths
from m2flow.micro.rollouts.parametric import Mixture
from m2flow.micro.search.choice import Choice
from m2flow.micro.search.finding import find_plan
from m2flow.micro.search.workload import Workload, workload_of
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec

_ASSUMED_SHARE, _ASSUMED_SIGMA = 0.25, 0.8
"""Of lengths that nobody knows: the median as a share of the limit, and the spread of their logarithm, as runs of many kinds have it."""

_FEW = 5e-4
"""Of answers: a share that is cut without a word."""


@dataclass(frozen=True)
class Question:
    """All that the search and the simulator ask about one flow on one cluster."""

    workload: Workload
    lengths: Lengths
    lengths_are_known: bool
    """Given, or observed by the profile; else they are assumed from the limit of the generate calls."""
    costs: Costs
    spec: ClusterSpec
    doubts: tuple[str, ...] = ()
    """Why the profile may say little about this cluster."""
    check: Callable[[Choice], object] | None = None
    """Lowers a choice: raises PlanError for one that can't be run."""

    def choose(self, spec: ClusterSpec | None = None, *, is_alone: bool = False) -> Choice:
        """The best plan of the cost model that can be run.

        Args:
            spec: the same cluster with other pins; None: the question's own.
            is_alone: leave out what other plans would take.
        Raises:
            PlanError: nothing fits; what is short, and what would help.
        """
        return find_plan(self.workload, self.lengths, self.costs, spec or self.spec, is_alone=is_alone, check=self.check)


def is_searched(spec: ClusterSpec) -> bool:
    """Whether placement is the search's to choose."""
    return bool(spec.pools) or spec.placement == "auto"


def with_shapes(spec: ClusterSpec, texts: tuple[str, ...]) -> ClusterSpec:
    """The spec with shapes that were given as `policy=Qwen2.5-7B`.

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
        graph: some steps of it; with what comes before and after them.
        lengths: of answers, as `m2flow.micro.rollouts.lengths.parse_lengths` takes them; by default those that the profile observed, and
            without a profile an assumption from the limit of the generate calls. Text that these limits contradict is refused, what was
            observed is cut.
        profile: what `m2flow profile` wrote, or what a run has measured so far; without one all is modelled.
        copies: of roles that take the weights of another: whose, as `m2flow.micro.lowering.lower.lower` takes them.
    Raises:
        SpecError: lengths or a profile that can't be used. ModelError: nothing says how large a model is.
    """
    check_pins(graph, models, spec)
    workload = workload_of(graph, spec)
    measured = read_profile(profile) if isinstance(profile, Path) else profile
    if measured is not None:
        measured.check(models, spec)
    observed = measured.lengths() if measured and measured.responses else None
    known = parse_lengths(lengths) if isinstance(lengths, str) and lengths else lengths or observed
    shapes = shapes_of(models, spec)
    found, cuts = _within_limits(known or _assumed(workload), workload, shapes, given=lengths if isinstance(lengths, str) else "")
    modelled = ModelledCosts(spec, workload, shapes, extents_of(workload, shapes, found))
    costs = ProfiledCosts(measured, modelled) if measured else modelled
    doubts = (*cuts, *(measured.doubts(spec) if measured else ()))
    return Question(workload, found, known is not None, costs, spec, doubts, partial(_lowered, graph, models, spec, copies))


def _lowered(graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, copies: Mapping[str, str] | None, choice: Choice) -> Plan:
    return lower(graph, models, spec, choice=choice, copies=copies)


def _within_limits(
    lengths: Lengths, workload: Workload, shapes: Mapping[str, ModelShape], *, given: str
) -> tuple[Lengths, tuple[str, ...]]:
    """Lengths that the calls' `max_new_tokens` and the models' contexts allow, and what was cut.

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
