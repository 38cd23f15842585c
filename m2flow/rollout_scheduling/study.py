"""Measure scheduling policies on given lengths: simulate rollout instances in virtual time and compare with the lower bounds.

    lengths (hidden), SchedulingPolicy --play--> Played: makespan, when each sample ended, migrations and what they cost
    StudyStep of each step --study_known, study_policy--> StepResult: makespan, bounds, regret
    StudyStep of each step --skill_of--> Skill: how far a predictor tells lengths apart, each step predicted from those before it

The simulation advances from one event to the next and counts the tokens between. A decision in the middle of an instance's decode step
takes effect at the end of that step. An instance takes t(b) = t0 + t1 b a step (`decode_model`); prefill costs time only on a migration.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from m2flow.errors import InternalError, SpecError
from m2flow.rollout_scheduling.decode_model import DecodeModel, FloatArray, assign, rollout_bounds, unknown_lengths_s
from m2flow.rollout_scheduling.lengths import Lengths, StepLengths
from m2flow.rollout_scheduling.policy import Move, MoveCost, SchedulingPolicy, Seen, composed
from m2flow.rollout_scheduling.predictors import NUM_STEPS_KEPT, Oracle, Predictor

_EPSILON = 1e-9


@dataclass(frozen=True)
class Played:
    """The outcome of a simulated rollout."""

    finish_s: FloatArray
    """[N]."""
    num_moves: int
    moved_tokens: int
    """Tokens prefilled again because of migrations, prompts included."""

    @property
    def makespan_s(self) -> float:
        return float(self.finish_s.max(initial=0.0))


def play(
    step: StepLengths,
    policy: SchedulingPolicy,
    model: DecodeModel,
    num_instances: int,
    *,
    cap: int | None = None,
    earlier: Sequence[Sequence[int]] | None = None,
    difficulties: Sequence[str] = (),
    cost: MoveCost | None = None,
) -> Played:
    """Simulate the rollout of one step under a policy.

    Args:
        cap: tokens at which responses are truncated, if known.
        earlier: [P], lengths of earlier responses to the same prompts.
        difficulties: [P], their labels; empty if there are none.
    Raises:
        InternalError: the policy starts a sample that does not wait, or never starts one.
    """
    seen = _seen_of(StudyStep(step, earlier, difficulties), model, num_instances, cap, cost or MoveCost())
    return _Play(seen, step.responses.tolist(), composed([policy])).run()


def _seen_of(given: StudyStep, model: DecodeModel, num_instances: int, cap: int | None, cost: MoveCost) -> Seen:
    """What a policy sees before the first sample of a step."""
    step, groups = given.samples, given.samples.groups.tolist()
    members: list[list[int]] = [[] for _ in step.prompts]
    for sample, group in enumerate(groups):
        members[group].append(sample)
    before = given.earlier if given.earlier is not None else [()] * len(members)
    return Seen(model, num_instances, step.prompts.tolist(), groups, members, cap, before, cost, given.difficulties)


class _Instance:
    """A simulated instance: its running samples, and the next time at which its batch changes."""

    def __init__(self, model: DecodeModel, lengths: Sequence[int]) -> None:
        self._model = model
        self._lengths = lengths
        self.samples: dict[int, int] = {}
        """Sample -> the step of this instance before its first token there, minus the tokens it had then."""
        self._ends: list[tuple[int, int]] = []
        self._clock_s = 0.0
        self._step = 0
        self._arriving: list[tuple[float, int, int, float]] = []
        """Heap of (arrival time, sample, its tokens so far, seconds for which its prefill stalls the instance)."""
        self._departing: set[int] = set()
        self.version = 0

    def arrive(self, ready_s: float, sample: int, tokens: int, stall_s: float) -> None:
        heapq.heappush(self._arriving, (ready_s, sample, tokens, stall_s))

    def depart(self, sample: int) -> None:
        self._departing.add(sample)

    def tokens_so_far(self, sample: int, now_s: float) -> int:
        if sample not in self.samples:
            return next((tokens for _, other, tokens, _ in self._arriving if other == sample), 0)
        step = self._step + max(0, math.floor((now_s - self._clock_s) / self._step_s + _EPSILON))
        return min(step - self.samples[sample], self._lengths[sample] - 1)

    def next_s(self, now_s: float) -> float:
        """The time at which the batch changes next; infinite if nothing runs or arrives."""
        soonest = math.inf
        while self._ends and self._is_stale(self._ends[0]):
            heapq.heappop(self._ends)
        if self._ends:
            soonest = self._clock_s + (self._ends[0][0] - self._step) * self._step_s
            if self._departing:
                soonest = min(soonest, self._boundary_s(now_s))
        if self._arriving:
            ready_s = self._arriving[0][0]
            soonest = min(soonest, self._boundary_s(ready_s) if self.samples else max(ready_s, self._clock_s))
        return soonest

    def advance(self, to_s: float) -> tuple[list[int], list[tuple[int, int]]]:
        """Advance to a time at which the batch changes; returns samples that end, and those that leave with their tokens so far."""
        if self.samples:
            self._step += round((to_s - self._clock_s) / self._step_s)
        self._clock_s = max(self._clock_s, to_s)
        ended = []
        while self._ends and (self._ends[0][0] <= self._step or self._is_stale(self._ends[0])):
            entry = heapq.heappop(self._ends)
            if not self._is_stale(entry):
                ended.append(entry[1])
                del self.samples[entry[1]]
        left = [(sample, self._step - self.samples.pop(sample)) for sample in sorted(self._departing) if sample in self.samples]
        self._departing.clear()
        stalled_s = 0.0
        while self._arriving and self._arriving[0][0] <= self._clock_s + _EPSILON:
            _, sample, tokens, stall_s = heapq.heappop(self._arriving)
            self.samples[sample] = self._step - tokens
            heapq.heappush(self._ends, (self._step - tokens + self._lengths[sample], sample))
            stalled_s += stall_s
        self._clock_s += stalled_s
        return ended, left

    @property
    def _step_s(self) -> float:
        return self._model.step_s(len(self.samples))

    def _boundary_s(self, at_s: float) -> float:
        """The end of the decode step in progress at this time."""
        return self._clock_s + max(0, math.ceil((at_s - self._clock_s) / self._step_s - _EPSILON)) * self._step_s

    def _is_stale(self, entry: tuple[int, int]) -> bool:
        end, sample = entry
        return sample not in self.samples or self.samples[sample] + self._lengths[sample] != end


class _Play:
    """The event loop of a simulated rollout."""

    def __init__(self, seen: Seen, lengths: Sequence[int], policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._model = seen.model
        self._lengths = lengths
        self._instances = [_Instance(seen.model, lengths) for _ in range(seen.num_instances)]
        self._seen = seen
        self._now_s = 0.0
        seen.waiting = OrderedDict.fromkeys(range(len(lengths)))
        seen.loads = [0] * seen.num_instances
        seen.num_wanted = len(seen.members)
        seen.tokens_so_far = lambda sample: self._instances[seen.place[sample]].tokens_so_far(sample, self._now_s)
        self._finish_s = np.zeros(len(lengths))
        self._heap: list[tuple[float, int, int]] = []
        self._to: dict[int, int] = {}
        """Migrating sample -> its target."""
        self._num_moves = self._moved_tokens = 0

    def run(self) -> Played:
        seen = self._seen
        self._policy.begin(seen)
        self._start(range(seen.num_instances))
        while self._heap:
            self._now_s, j, version = heapq.heappop(self._heap)
            instance = self._instances[j]
            if version != instance.version:
                continue
            ended, left = instance.advance(self._now_s)
            for sample in ended:
                self._end(sample, j)
            for sample, tokens in left:
                self._forward(sample, tokens)
            if ended or left:
                free = [k for k in range(seen.num_instances) if seen.loads[k] < self._model.max_batch] if seen.waiting else []
                self._start(free)
            for move in self._policy.moves() if ended else ():
                self._move(move)
            self._schedule(j)
        if seen.waiting:
            raise InternalError(f"the policy {self._policy.name} left {len(seen.waiting)} samples waiting")
        self._policy.end()
        return Played(self._finish_s, self._num_moves, self._moved_tokens)

    def _start(self, instances: Sequence[int]) -> None:
        """Fill free slots, the instance with the fewest samples first."""
        seen = self._seen
        asked = [(seen.loads[j], j) for j in instances]
        heapq.heapify(asked)
        started = set()
        while asked and seen.waiting:
            load, j = heapq.heappop(asked)
            if load >= self._model.max_batch or (sample := self._policy.next_sample(j)) is None:
                continue
            if sample not in seen.waiting:
                raise InternalError(f"the policy {self._policy.name} starts sample {sample}, which does not wait")
            del seen.waiting[sample]
            seen.place[sample] = j
            seen.loads[j] += 1
            self._instances[j].arrive(self._now_s, sample, 0, 0.0)
            self._policy.started(sample, j)
            started.add(j)
            heapq.heappush(asked, (load + 1, j))
        for j in started:
            self._schedule(j)

    def _end(self, sample: int, j: int) -> None:
        seen = self._seen
        self._finish_s[sample] = self._now_s
        seen.finished[sample] = self._lengths[sample]
        seen.loads[j] -= 1
        del seen.place[sample]
        if (to := self._to.pop(sample, None)) is not None:
            seen.loads[to] -= 1
        self._policy.ended(sample, self._lengths[sample])

    def _move(self, move: Move) -> None:
        """Begin a migration: the sample leaves at the end of the step unless it ends there; its slot at the target is reserved now."""
        here = self._seen.place.get(move.sample)
        if here is None or here == move.to or move.sample in self._to or move.sample not in self._instances[here].samples:
            return
        if self._seen.loads[move.to] >= self._model.max_batch:
            return
        self._seen.loads[move.to] += 1
        self._to[move.sample] = move.to
        self._instances[here].depart(move.sample)
        self._schedule(here)

    def _forward(self, sample: int, tokens: int) -> None:
        """Send a sample that has left its instance to its target."""
        seen, to, cost = self._seen, self._to.pop(sample), self._seen.move_cost
        seen.loads[seen.place[sample]] -= 1
        seen.place[sample] = to
        again = tokens + seen.prompts[seen.groups[sample]]
        self._num_moves += 1
        self._moved_tokens += again
        self._instances[to].arrive(self._now_s + cost.fixed_s, sample, tokens, again * cost.token_s)
        self._schedule(to)

    def _schedule(self, j: int) -> None:
        instance = self._instances[j]
        instance.version += 1
        at_s = instance.next_s(self._now_s)
        if at_s < math.inf:
            heapq.heappush(self._heap, (at_s, j, instance.version))


# ---- the study: policies over the steps of a trace

_NUM_ASIDE = 8
"""Extra responses to each prompt, from which its level of difficulty is taken."""


@dataclass(frozen=True, eq=False)
class StudyStep:
    """The samples of a step, and what policies may know of their prompts."""

    samples: StepLengths
    earlier: Sequence[Sequence[int]] | None = None
    """[P], lengths of the responses to the prompts in an earlier epoch."""
    difficulties: Sequence[str] = ()
    """[P], what is said of the prompts, as in `Seen`; empty if nothing is."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step."""

    step: int
    makespan_s: float
    bound_s: float
    """max(fractional bound, (t0 + t1) x longest sample): no schedule without migration is faster."""
    known_s: float
    """The makespan of the assignment with known lengths."""
    num_samples: int
    num_tokens: int
    num_pauses: int = 0
    """Pauses of samples on their instance; only the assignment makes them."""
    num_moves: int = 0
    """Migrations of running samples; only policies make them."""
    unknown_s: float = 0.0
    """No policy that can't tell samples apart is expected to be faster (`unknown_lengths_s`)."""

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s

    @property
    def regret(self) -> float:
        """The makespan over that of the assignment with known lengths."""
        return self.makespan_s / self.known_s


def total(results: Sequence[StepResult]) -> StepResult:
    """Sum the results of several steps."""
    return StepResult(
        step=len(results),
        makespan_s=sum(result.makespan_s for result in results),
        bound_s=sum(result.bound_s for result in results),
        known_s=sum(result.known_s for result in results),
        num_samples=sum(result.num_samples for result in results),
        num_tokens=sum(result.num_tokens for result in results),
        num_pauses=sum(result.num_pauses for result in results),
        num_moves=sum(result.num_moves for result in results),
        unknown_s=sum(result.unknown_s for result in results),
    )


def study_known(steps: Sequence[StudyStep], model: DecodeModel, num_instances: int, *, may_pause: bool = True) -> list[StepResult]:
    """Study the assignment with known lengths."""
    results = []
    for given in steps:
        plan = assign(given.samples.responses, model, num_instances, may_pause=may_pause)
        _check(plan.makespan_s, plan.bound_s, "the assignment")
        size = (len(given.samples), int(given.samples.responses.sum()))
        unknown_s = unknown_lengths_s(given.samples.responses, model, num_instances)
        known = StepResult(given.samples.step, plan.makespan_s, plan.bound_s, plan.makespan_s, *size, plan.num_pauses, unknown_s=unknown_s)
        results.append(known)
    return results


def study_policy(
    policy: SchedulingPolicy,
    steps: Sequence[StudyStep],
    known: Sequence[StepResult],
    model: DecodeModel,
    *,
    num_instances: int,
    cap: int | None,
    oracle: Oracle | None = None,
) -> list[StepResult]:
    """Study a policy, which may learn from step to step.

    Args:
        known: the results of `study_known` for the same steps.
        oracle: the policy's predictor if it is an oracle; it is told the lengths of each step.
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


QUANTILES = (0.1, 0.5, 0.9)
"""The quantiles by which predictors are judged."""
LEAST_SKILL = 0.01
"""The skill below which lengths can't be told apart."""


@dataclass(frozen=True)
class Skill:
    """How far a predictor tells lengths apart."""

    gain: float
    """1 - loss / loss of one prediction for all samples: the quantiles of the earlier lengths. Pinball loss, summed over `QUANTILES`."""
    covered: tuple[float, ...]
    """The share of the lengths that do not exceed each of the quantiles; well calibrated if about the same as `QUANTILES`."""
    num_steps: int
    """Steps that were predicted; 0 if there is nothing to learn from, and then the gain is 0."""


def skill_of(predictor: Predictor, steps: Sequence[StudyStep], *, cap: int | None) -> Skill:
    """Judge the quantiles that a predictor expects before each step by the step's lengths, which it learns only afterwards.

    Source: Koenker and Bassett 1978 for the pinball loss, of which the quantile has the least expectation.
    """
    shares, before = np.array(QUANTILES)[:, None], list[FloatArray]()
    losses, covered = [], []
    for given in steps:
        lengths = given.samples.responses.astype(np.float64)
        earlier = np.array([length for answers in given.earlier or () for length in answers], np.float64)
        predictor.begin(_seen_of(given, DecodeModel(), 1, cap, MoveCost()))
        known = np.concatenate([*before[-NUM_STEPS_KEPT:], earlier])
        if len(known):
            alike = np.broadcast_to(np.quantile(known, QUANTILES)[:, None], (len(QUANTILES), len(lengths)))
            said = predictor.quantiles(QUANTILES) if not predictor.is_blind or len(earlier) else alike
            losses.append([float(np.maximum(shares * (lengths - one), (shares - 1) * (lengths - one)).sum()) for one in (said, alike)])
            covered.append((lengths <= said).mean(axis=1))
        predictor.seen.finished.update(enumerate(given.samples.responses.tolist()))
        predictor.end()
        before.append(lengths)
    if not losses:
        return Skill(0.0, QUANTILES, 0)
    mine, of_alike = np.sum(losses, axis=0)
    return Skill(1.0 - float(mine / of_alike), tuple(np.mean(covered, axis=0).tolist()), len(losses))


def steps_of(
    lengths: Lengths, num_steps: int | None, *, num_groups: int, n: int, seed: int, num_earlier: int = 0, num_levels: int = 0
) -> Iterator[StudyStep]:
    """Yield the recorded steps, all or the first ones; from a distribution so many draws, by default one.

    Args:
        num_earlier: responses to each prompt from an earlier epoch; for a distribution only.
        num_levels: levels of difficulty, by the mean of eight other responses to each prompt; for a distribution only.
    Raises:
        SpecError: more steps than were recorded; or earlier responses or levels of a record, which has none.
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
        yield StudyStep(samples, earlier, difficulties)
