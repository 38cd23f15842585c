"""What is expected of lengths that are not known yet: from nothing but earlier steps, up to siblings and earlier answers.

    Seen, samples that ended  --Predictor-->  E[length | known so far], and scenarios: whole rollouts that may happen

A predictor is worth what a policy makes of it: it is judged by regret (`study`), not by its error. Cut lengths count as longer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2flow.micro.rollouts.decode import FloatArray
from m2flow.micro.rollouts.policy import Seen
from m2flow.micro.rollouts.survival import SurvivalCurve, kaplan_meier

NUM_STEPS_KEPT = 4
"""Earlier steps that are learned from: a policy's answers change in length as it trains."""

_NUM_BUCKETS = 8


class Past(NamedTuple):
    """The samples of a step that is over, as far as they came."""

    lengths: FloatArray
    """[M]."""
    prompts: FloatArray
    """[M], tokens of their prompts."""
    groups: npt.NDArray[np.int64]
    """[M]."""
    is_cut: npt.NDArray[np.bool_]
    """[M]: longer than that, by an unknown amount."""

    def cut_at(self, cap: int | None) -> npt.NDArray[np.bool_]:
        """[M], those at the cap too."""
        return np.asarray(self.is_cut | (self.lengths >= (cap if cap is not None else np.inf)), np.bool_)


def past_of(seen: Seen) -> Past:
    """What is known of a step's samples now."""
    lengths, is_cut = np.zeros(len(seen.groups)), np.zeros(len(seen.groups), bool)
    for sample in seen.place:
        lengths[sample], is_cut[sample] = seen.tokens_so_far(sample), True
    for sample, length in seen.finished.items():
        lengths[sample], is_cut[sample] = length, False
    known = np.flatnonzero(lengths > 0)
    groups = np.asarray(seen.groups, np.int64)[known]
    return Past(lengths[known], np.asarray(seen.prompts, np.float64)[groups], groups, is_cut[known])


class Predictor(ABC):
    """Learns from steps that are over; within a step it sees what ends and how far the others are."""

    name: str

    def __init__(self) -> None:
        self.earlier_steps: list[Past] = []
        """The last one last."""
        self.cap: int | None = None

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self.cap = seen.cap
        self._is_over = False

    def end(self) -> None:
        """A step is over. Samples that were given up count as longer than they are, if they have tokens; told twice, it is told once."""
        if not self._is_over:
            self._is_over = True
            past = past_of(self.seen)
            if len(past.lengths):
                self.learn(past)

    def learn(self, past: Past) -> None:
        """From a step that is over."""
        self.earlier_steps = [*self.earlier_steps, past][-NUM_STEPS_KEPT:]

    @property
    def is_blind(self) -> bool:
        """Whether it has seen no length yet."""
        return not self.earlier_steps

    @property
    @abstractmethod
    def is_informed(self) -> bool:
        """Whether it can tell samples apart."""

    @abstractmethod
    def expected(self) -> FloatArray:
        """[N], E[length | known so far], at least what is generated."""

    @abstractmethod
    def scenarios(self, num: int) -> FloatArray:
        """[num, N], lengths as they may turn out, given what was known when the step began; the same each time."""


class EarlierSteps(Predictor):
    """All samples alike: the survival curve of earlier steps. A running one that has grown is expected to grow on."""

    name = "earlier-steps"

    @property
    def is_informed(self) -> bool:
        return False

    def expected(self) -> FloatArray:
        curve = self._curve()
        fresh = curve.beyond(0.0) if curve else 1.0
        found = np.full(len(self.seen.groups), fresh)
        for sample in self.seen.place:
            tokens = self.seen.tokens_so_far(sample)
            found[sample] = max(tokens + 1.0, curve.beyond(tokens) if curve else 1.0)
        return found

    def scenarios(self, num: int) -> FloatArray:
        if not self.earlier_steps:
            return np.ones((num, len(self.seen.groups)))
        pool = np.concatenate([past.lengths for past in self.earlier_steps])
        return np.asarray(np.random.default_rng(0).choice(pool, (num, len(self.seen.groups))), np.float64)

    def _curve(self) -> SurvivalCurve | None:
        if not self.earlier_steps:
            return None
        pool = np.concatenate([past.lengths for past in self.earlier_steps])
        return kaplan_meier(pool, np.concatenate([past.cut_at(self.cap) for past in self.earlier_steps]))


class PromptBuckets(EarlierSteps):
    """Prompts of about equal length are alike; what stands for difficulty where nothing else is known."""

    name = "prompt-buckets"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._pools: list[FloatArray] = []
        """Lengths of answers to prompts of each bucket, from the shortest prompts on."""
        if self.earlier_steps:
            lengths = np.concatenate([past.lengths for past in self.earlier_steps])
            prompts = np.concatenate([past.prompts for past in self.earlier_steps])
            edges = np.unique(np.quantile(prompts, np.linspace(0, 1, _NUM_BUCKETS + 1)[1:-1]))
            of = np.searchsorted(edges, prompts)
            self._pools = [lengths[of == bucket] if (of == bucket).any() else lengths for bucket in range(len(edges) + 1)]
            self._buckets = np.searchsorted(edges, np.asarray(seen.prompts))[np.asarray(seen.groups, np.int64)].tolist()

    @property
    def is_informed(self) -> bool:
        return bool(self._pools)

    def expected(self) -> FloatArray:
        found = super().expected()
        means = [pool.mean() for pool in self._pools]
        for sample in self.seen.waiting if means else ():
            found[sample] = means[self._buckets[sample]]
        return found

    def scenarios(self, num: int) -> FloatArray:
        if not self._pools:
            return super().scenarios(num)
        dice = np.random.default_rng(0)
        return np.asarray(np.stack([dice.choice(self._pools[bucket], num) for bucket in self._buckets], axis=1), np.float64)


class Oracle(Predictor):
    """Knows the lengths. What a policy does with it is what better prediction could give at most."""

    name = "oracle"

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        if seen.known is not None:
            self.know(seen.known)

    @property
    def is_blind(self) -> bool:
        return False

    def know(self, lengths: npt.ArrayLike) -> None:
        """The lengths of the samples of the next step."""
        self._lengths = np.asarray(lengths, np.float64)

    @property
    def is_informed(self) -> bool:
        return True

    def expected(self) -> FloatArray:
        return self._lengths

    def scenarios(self, num: int) -> FloatArray:
        return self._lengths[None, :]
