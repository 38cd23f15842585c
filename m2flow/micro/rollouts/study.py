"""What a way of scheduling comes to on given lengths: per step the makespan, the bound, and what knowing the lengths would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from m2flow.errors import SpecError
from m2flow.micro.rollouts.assignment import assign
from m2flow.micro.rollouts.decode import DecodeModel
from m2flow.micro.rollouts.lengths import Lengths, StepLengths


@dataclass(frozen=True)
class StepResult:
    """One step, in seconds."""

    step: int
    makespan_s: float
    bound_s: float
    """max(fractional bound, (t0 + t1) x longest sample): no schedule without migration is faster."""
    known_s: float
    """What the assignment with known lengths takes."""
    num_samples: int
    num_tokens: int
    num_pauses: int = 0

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s

    @property
    def regret(self) -> float:
        """What not knowing the lengths costs: the makespan over that of the assignment which does."""
        return self.makespan_s / self.known_s


def total(results: Sequence[StepResult]) -> StepResult:
    """The steps one after the other."""
    return StepResult(
        step=len(results),
        makespan_s=sum(result.makespan_s for result in results),
        bound_s=sum(result.bound_s for result in results),
        known_s=sum(result.known_s for result in results),
        num_samples=sum(result.num_samples for result in results),
        num_tokens=sum(result.num_tokens for result in results),
        num_pauses=sum(result.num_pauses for result in results),
    )


def study_known(steps: Sequence[StepLengths], model: DecodeModel, num_instances: int, *, may_pause: bool = True) -> list[StepResult]:
    """The assignment with known lengths."""
    results = []
    for step in steps:
        plan = assign(step.responses, model, num_instances, may_pause=may_pause)
        size = (len(step), int(step.responses.sum()))
        results.append(StepResult(step.step, plan.makespan_s, plan.bound_s, plan.makespan_s, *size, num_pauses=plan.num_pauses))
    return results


def steps_of(lengths: Lengths, num_steps: int | None, *, num_groups: int, n: int, seed: int) -> Iterator[StepLengths]:
    """The recorded steps, all or the first ones; of a distribution that many draws, by default one.

    Raises:
        SpecError: more steps than were recorded.
    """
    recorded = lengths.num_steps()
    if num_steps is not None and num_steps < 1:
        raise SpecError(f"{num_steps} steps are nothing to study", now="Give one step or more.")
    for k in range(num_steps if num_steps is not None else recorded if recorded is not None else 1):
        yield lengths.step(k, num_groups=num_groups, n=n, seed=seed)
