"""How fast rollout engines are, as policies take it: the costs that the plan was made with, or those that its simulation goes by.

    plan, spec, Costs --with_paces--> the plan, with a Pace for each role that is sampled from --> the scheduler's policies

A run and its simulation so ask a policy with the same numbers. Limit: one pace for a role, that of its slowest instance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from m2flow.errors import M2FlowError
from m2flow.macro.graph import MacroGraph
from m2flow.micro.plan import Pace, Plan
from m2flow.micro.planning import question_of
from m2flow.micro.simulation.machines import machines_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from m2flow.micro.costs.terms import Costs, DecodeCost
    from m2flow.recipe import Model
    from m2flow.spec import ClusterSpec


def with_paces(plan: Plan, spec: ClusterSpec, costs: Costs) -> Plan:
    """The plan, whose policies go by these costs."""
    found: dict[str, list[DecodeCost]] = {}
    for machine in machines_of(plan, spec, costs).values():
        for role, cost in machine.decode.items():
            found.setdefault(role, []).append(cost)
    slowest = {role: max(of, key=lambda cost: cost.seconds(cost.max_running)) for role, of in found.items()}
    sources = {name: constant.source.partition(":")[0] for name, constant in costs.constants().items()}
    paces = [
        Pace(
            role,
            cost.step_s,
            cost.sample_s,
            cost.prefill_token_s,
            cost.enter_s + cost.leave_s + cost.handover_s,
            sources.get(f"{role}.rollout.step_s", "given"),
        )
        for role, cost in sorted(slowest.items())
    ]
    return msgspec.structs.replace(plan, paces=tuple(paces))


def paced(plan: Plan, graph: MacroGraph, models: Mapping[str, Model], spec: ClusterSpec, profile: Path | None) -> Plan:
    """The plan of a flow, whose policies, if it has any, go by the profile's costs, or by modelled ones.

    Where nothing says how large a model is, they go by those of the default model, and the plan says so.

    Raises:
        SpecError: a profile that can't be used.
    """
    if not plan.policies:
        return plan
    try:
        return with_paces(plan, spec, question_of(graph, models, spec, profile=profile).costs)
    except M2FlowError as error:
        if profile is not None:
            raise
        note = f"policies take a decode step to last what the default model says: {str(error).splitlines()[0]}"
        return msgspec.structs.replace(plan, notes=(*plan.notes, note))
