"""What a way of scheduling comes to on given lengths: per step the makespan, the bound, and what knowing the lengths would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from m2flow.errors import InternalError, SpecError
from m2flow.micro.rollouts.assignment import assign
from m2flow.micro.rollouts.bounds import rollout_bounds
from m2flow.micro.rollouts.cluster import play
from m2flow.micro.rollouts.decode import DecodeModel
from m2flow.micro.rollouts.lengths import Lengths, StepLengths
from m2flow.micro.rollouts.policy import Policy
from m2flow.micro.rollouts.predictors import Oracle

_NUM_ASIDE = 8
"""Answers that the level of a prompt is taken from."""


@dataclass(frozen=True, eq=False)
class Given:
    """The samples of a step, and what is known of their prompts."""

    samples: StepLengths
    earlier: Sequence[Sequence[int]] | None = None
    """[P], lengths of answers that the prompts had in an earlier epoch."""
    difficulties: Sequence[str] = ()
    """[P], how hard the prompts are said to be; empty: nobody says."""


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
    """Times that a sample stops for a while on its instance; only the assignment does that."""
    num_moves: int = 0
    """Times that a running sample went on elsewhere; only policies do that."""

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
        num_moves=sum(result.num_moves for result in results),
    )


def study_known(steps: Sequence[Given], model: DecodeModel, num_instances: int, *, may_pause: bool = True) -> list[StepResult]:
    """The assignment with known lengths."""
    results = []
    for given in steps:
        plan = assign(given.samples.responses, model, num_instances, may_pause=may_pause)
        _check(plan.makespan_s, plan.bound_s, "the assignment")
        size = (len(given.samples), int(given.samples.responses.sum()))
        results.append(StepResult(given.samples.step, plan.makespan_s, plan.bound_s, plan.makespan_s, *size, num_pauses=plan.num_pauses))
    return results


def study_policy(
    policy: Policy,
    steps: Sequence[Given],
    known: Sequence[StepResult],
    model: DecodeModel,
    *,
    num_instances: int,
    cap: int | None,
    oracle: Oracle | None = None,
) -> list[StepResult]:
    """A policy, which may learn from step to step.

    Args:
        known: of the same steps, from `study_known`.
        oracle: is told the lengths of each step, if the policy has one.
    """
    results = []
    for given, best in zip(steps, known, strict=True):
        if oracle is not None:
            oracle.know(given.samples.responses)
        played = play(given.samples, policy, model, num_instances, cap=cap, earlier=given.earlier, difficulties=given.difficulties)
        bounds = rollout_bounds(given.samples.responses, model, num_instances)
        _check(played.makespan_s, bounds.with_migration_s if played.num_moves else bounds.no_migration_s, policy.name)
        results.append(replace(best, makespan_s=played.makespan_s, num_pauses=0, num_moves=played.num_moves))
    return results


def _check(makespan_s: float, bound_s: float, who: str) -> None:
    if makespan_s < bound_s:
        raise InternalError(f"{who} takes {makespan_s} s, less than the lower bound of {bound_s} s")


def steps_of(
    lengths: Lengths, num_steps: int | None, *, num_groups: int, n: int, seed: int, num_earlier: int = 0, num_levels: int = 0
) -> Iterator[Given]:
    """The recorded steps, all or the first ones; of a distribution that many draws, by default one.

    Args:
        num_earlier: answers to each prompt from an earlier epoch, for a distribution.
        num_levels: levels of difficulty into which somebody has sorted the prompts, by eight other answers to each; for a distribution.
    Raises:
        SpecError: more steps than were recorded; or earlier answers, or levels, of a record, which does not say them.
    """
    recorded = lengths.num_steps()
    for asked, option, what in ((num_earlier, "--earlier", "which prompts came before"), (num_levels, "--levels", "how hard prompts are")):
        if asked and recorded is not None:
            raise SpecError(f"{lengths.name} does not say {what}", now=f"Leave {option} out, or give a formula such as lognormal:...")
    edges: npt.NDArray[np.float64] | None = None
    for k in range(num_steps if num_steps is not None else recorded if recorded is not None else 1):
        samples = lengths.step(k, num_groups=num_groups, n=n, seed=seed)
        earlier = lengths.draw(num_groups, n + num_earlier, seed, step=k)[:, n:].tolist() if num_earlier else None
        difficulties: list[str] = []
        if num_levels:
            others = np.log(lengths.draw(num_groups, n + num_earlier + _NUM_ASIDE, seed, step=k)[:, n + num_earlier :]).mean(axis=1)
            edges = np.quantile(others, np.linspace(0, 1, num_levels + 1)[1:-1]) if edges is None else edges
            difficulties = [str(level) for level in np.searchsorted(edges, others)]
        yield Given(samples, earlier, difficulties)
