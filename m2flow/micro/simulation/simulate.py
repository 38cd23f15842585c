"""A flow's simulated run, from what a user gives: flow, cluster, costs, lengths."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from m2flow.micro.costs.terms import Costs
from m2flow.micro.pace import with_paces
from m2flow.micro.plan import Plan
from m2flow.micro.rollouts.lengths import Lengths
from m2flow.micro.simulation.drawn import Drawn
from m2flow.micro.simulation.machines import machines_of
from m2flow.micro.simulation.program import Program
from m2flow.micro.simulation.run import Failure, History, Simulation
from m2flow.recipe import Sampling
from m2flow.spec import ClusterSpec


@dataclass(frozen=True)
class Simulated:
    """A run, and how long it took to simulate."""

    history: History
    wall_s: float


def simulate(
    program: Program,
    plan: Plan,
    spec: ClusterSpec,
    costs: Costs,
    lengths: Lengths,
    *,
    seed: int = 0,
    kept: Mapping[str, float] | None = None,
    failures: Iterable[Failure] = (),
    without_groups: bool = False,
) -> Simulated:
    """Run a program's steps on a virtual clock.

    Args:
        kept: share of units that a filter or a refill keeps, by role or call name; all by default.
        without_groups: samples do not wait for their siblings, which no run could do.
    Raises:
        M2FlowError: a call of it fails.
    """
    started = time.perf_counter()
    trained = frozenset(call.role for call in program.graph.calls if call.method == "update")
    plan = with_paces(plan, spec, costs)
    limits = [sampling.max_new_tokens for call in program.graph.calls if isinstance(sampling := call.options.get("sampling"), Sampling)]
    drawn = Drawn(lengths, seed, kept=kept, trained=trained, limit=max(limits, default=0))
    simulation = Simulation(
        program,
        plan,
        spec,
        machines_of(plan, spec, costs),
        drawn,
        function_cost=lambda call: costs.function(call.name),
        hop_s=costs.hop_s,
        message_s=costs.message_s(),
        failures=failures,
        without_groups=without_groups,
        slowdown=lambda kind, beside: 1.0 if kind == "function" else costs.slowdown(kind, beside),
    )
    history = simulation.run()
    return Simulated(history, time.perf_counter() - started)
