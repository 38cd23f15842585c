"""The same steps in each way that they could be placed, and with older weights allowed: what a hand-made choice would be made from."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from m2flow.errors import PlanError
from m2flow.micro.simulation.scenario import Outcome, Scenario

STALENESS = (0, 1, 2)
NUM_STEPS = max(STALENESS) + 2
"""That show what staleness does: with the most of it, the last of these waits for the first one's update."""
AS_PLANNED = "as planned"


class Row(msgspec.Struct, frozen=True):
    """One way to run the steps."""

    placement: str
    """`time-shared`, `split`, `hybrid`, `as planned`."""
    staleness: int
    mode: str
    """Of the plan that this is."""
    step_s: float
    """Mean makespan."""
    bound_s: float
    """Mean, as far as steps can be told apart."""
    efficiency: float
    busy_share: float
    idle_share: dict[str, float]
    """Of all device time, by cause."""
    peak_memory_gib: float
    trained_tokens: int
    wasted_tokens: int


def compare(scenario: Scenario, tell: Callable[[str], object] = lambda text: None) -> list[Row]:
    """Every placement that there is a plan of, with each staleness; what fits nowhere is left out.

    Args:
        tell: gets a line before each thing that takes time.
    Raises:
        PlanError: nothing fits at all.
    """
    rows = []
    for staleness in STALENESS:
        loosened = scenario.with_staleness(staleness)
        tell(f"staleness {staleness}: looking for plans of each placement")
        plans = loosened.plans()
        if not plans:
            raise PlanError(f"no plan of {scenario.program.flow} fits {scenario.spec.name}")
        outcomes = dict[str, Outcome]()
        for mode, plan in plans.items():
            tell(f"staleness {staleness}: simulating {mode}")
            outcomes[mode] = loosened.run(plan)
        rows += [_row(mode, staleness, outcome) for mode, outcome in outcomes.items()]
        tell(f"staleness {staleness}: the plan that would be taken")
        planned = loosened.plan()
        known = next((outcomes[mode] for mode, plan in plans.items() if plan.workers == planned.workers), None)
        rows.append(_row(AS_PLANNED, staleness, known or loosened.run(planned)))
    return rows


def _row(placement: str, staleness: int, outcome: Outcome) -> Row:
    totals, steps = outcome.totals, outcome.report.steps
    device_s = totals.makespan_s * outcome.simulated.history.num_devices or 1.0
    return Row(
        placement=placement,
        staleness=staleness,
        mode=outcome.plan.mode,
        step_s=totals.makespan_s / max(len(steps), 1),
        bound_s=totals.bound_s / max(len(steps), 1),
        efficiency=totals.efficiency,
        busy_share=totals.busy_share,
        idle_share={cause: seconds / device_s for cause, seconds in totals.idle_s.items()},
        peak_memory_gib=max((step.peak_memory_gib for step in steps), default=0.0),
        trained_tokens=sum(step.trained_tokens for step in steps),
        wasted_tokens=sum(step.wasted_tokens for step in steps),
    )
