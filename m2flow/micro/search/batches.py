"""What the length distribution means for a call: when the groups of a rollout are done, and how many tokens the others work on.

    Lengths --draw--> Batch --(DecodeCost, instances)--> time of the rollout and its release of groups

A rollout of W tokens whose longest answer has L on n instances with B slots each takes

    T = max( t0 max(L, W/(n B)) + t1 W/n,  k-longest bound ) + prefill/n + coming and going

work spread evenly, the longest sample anywhere. Groups are released when their last member is done. The search adds up times in
straight lines, so a release is given by the line from (first chunk, l) to (last chunk, T) that no chunk is later than: what a plan
promises it can keep, and for a convex release (a long tail, all samples running from the start) nothing is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from m2flow.micro.search.workload import CallLoad

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_ENOUGH_SAMPLES = 512
"""A smaller batch is drawn more often, since its longest sample is a matter of luck."""
_MOST_DRAWS = 8
_MOST_POINTS = 96
"""Of a release, and of the k of the k-longest bound."""


class Draws(Protocol):
    """What a batch asks of `m2flow.micro.rollouts.lengths.Lengths`."""

    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> npt.NDArray[np.int64]: ...

    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True, eq=False)
class Instances:
    """Ways to run a rollout; arrays of one length, an entry a way."""

    step_s: FloatArray
    sample_s: FloatArray
    prefill_token_s: FloatArray
    max_running: FloatArray
    num: FloatArray
    """Instances."""
    enter_leave_s: FloatArray
    """Of a sample's coming and going."""
    handover_s: FloatArray
    gather_s: FloatArray

    @property
    def slots(self) -> FloatArray:
        return self.num * self.max_running


@dataclass(frozen=True, eq=False)
class Draw:
    """The lengths of one step."""

    responses: IntArray
    """[P, G]."""
    prompts: IntArray
    """[P]."""

    _known: dict[int, tuple[Instances, FloatArray]] = field(default_factory=dict, repr=False)
    """By the id of ways, which are held: `seconds`, which is asked for by itself and for the releases."""

    @cached_property
    def _ascending(self) -> IntArray:
        return np.sort(self.responses.ravel())

    @cached_property
    def _longest_tokens(self) -> FloatArray:
        """Of the longest sample, of the two longest, and so on."""
        return np.cumsum(self._ascending[::-1], dtype=np.float64)

    def longest_alone_s(self, ways: Instances) -> FloatArray:
        """A token of a sample follows the one before it: (t0 + t1) L."""
        return (ways.step_s + ways.sample_s) * int(self.responses.max(initial=0))

    def k_longest_s(self, ways: Instances) -> FloatArray:
        """max_k (L1 + ... + Lk) / R_k: the k longest at the best rate that k samples can have; samples may move freely.

        Source: as in `m2flow.micro.rollouts.bounds.k_longest_s`, at some of the k.
        """
        k = _spread(len(self._ascending))
        tokens = self._longest_tokens[k]
        active = np.minimum(k[None, :] + 1.0, ways.slots[:, None])
        whole = np.floor(active / ways.num[:, None])
        rest = active - whole * ways.num[:, None]
        t0, t1 = ways.step_s[:, None], ways.sample_s[:, None]
        rates = rest * (whole + 1) / (t0 + t1 * (whole + 1)) + (ways.num[:, None] - rest) * whole / (t0 + t1 * whole)
        return np.asarray((tokens[None, :] / rates).max(axis=1))

    def seconds(self, ways: Instances) -> FloatArray:
        """The time of the rollout, each way."""
        if id(ways) in self._known:
            return self._known[id(ways)][1]
        tokens, longest = float(self.responses.sum()), float(self.responses.max(initial=0))
        even = ways.step_s * np.maximum(longest, tokens / ways.slots) + ways.sample_s * tokens / ways.num
        decode = np.maximum(even, self.k_longest_s(ways))
        each = self.responses.size / ways.num
        handovers = np.minimum(each, np.divide(decode, ways.gather_s, out=np.full_like(decode, np.inf), where=ways.gather_s > 0))
        seconds = np.asarray(decode + self.prefill_s(ways) + each * ways.enter_leave_s + handovers * ways.handover_s)
        self._known.clear()
        self._known[id(ways)] = ways, seconds
        return seconds

    def prefill_s(self, ways: Instances) -> FloatArray:
        """A group's prompt is read once."""
        return np.asarray(float(self.prompts.sum()) / ways.num * ways.prefill_token_s)

    def releases_s(self, ways: Instances) -> FloatArray:
        """[ways, P]: when the first, second, ... group is done, ascending; the last at `seconds`."""
        groups, lengths = self.responses.max(axis=1).astype(np.float64), self._ascending.astype(np.float64)
        tokens, num = float(lengths.sum()), len(lengths)
        queued = np.maximum(0.0, np.arange(len(groups))[None, :] / len(groups) - ways.slots[:, None] / num)
        ends = queued * tokens / ways.slots[:, None] + groups[None, :]
        below = np.searchsorted(lengths, groups, side="right")
        done_together = np.concatenate([[0.0], np.cumsum(lengths)])[below] + groups * (num - below)
        done_in_waves = np.minimum(ends * ways.slots[:, None], tokens)
        done = np.where((ways.slots >= num)[:, None], done_together[None, :], done_in_waves)
        seconds = np.sort(ways.step_s[:, None] * ends + ways.sample_s[:, None] * done / ways.num[:, None], axis=1)
        return np.asarray(seconds * (self.seconds(ways) / seconds[:, -1])[:, None])


class Batch:
    """The samples that a call works on."""

    def __init__(self, call: CallLoad, lengths: Draws, *, limit: int = 0, seed: int = 0) -> None:
        """`limit`: tokens at which an answer is cut; 0: none but that of the lengths."""
        num_draws = max(1, min(_MOST_DRAWS, _ENOUGH_SAMPLES // max(1, call.num_samples)))
        shape = call.num_prompts, call.num_per_prompt

        def draw(step: int) -> Draw:
            responses = _cut(lengths.draw(*shape, seed, step=step), limit)
            return Draw(responses, lengths.draw_prompts(call.num_prompts, seed, step=step, n=shape[1]))

        self._draw = draw
        self.draws = tuple(draw(step) for step in range(num_draws))
        self.num_samples = call.num_samples
        whole = np.concatenate([(draw.responses + draw.prompts[:, None]).ravel() for draw in self.draws]).astype(np.float64)
        self.mean_tokens = float(whole.mean()) if len(whole) else 0.0
        """Of a sample with its prompt."""
        self.mean_square = float((whole * whole).mean()) if len(whole) else 0.0

    def several(self, num: int) -> tuple[Draw, ...]:
        """At least so many draws, the batch's own first: for what must suit steps that differ."""
        return self.draws + tuple(self._draw(step) for step in range(len(self.draws), num))

    def rollout_s(self, ways: Instances) -> FloatArray:
        return np.asarray(np.mean([draw.seconds(ways) for draw in self.draws], axis=0))

    def longest_s(self, ways: Instances) -> FloatArray:
        return np.asarray(np.mean([draw.longest_alone_s(ways) for draw in self.draws], axis=0))

    def k_longest_s(self, ways: Instances) -> FloatArray:
        return np.asarray(np.mean([draw.k_longest_s(ways) for draw in self.draws], axis=0))

    def last_sample_s(self, ways: Instances) -> FloatArray:
        """The longest answer in a full batch: how long after its prompt the last one is done."""
        share = np.minimum(ways.max_running, np.ceil(self.draws[0].responses.size / ways.num))
        longest = float(np.mean([draw.responses.max(initial=0) for draw in self.draws]))
        return np.asarray((ways.step_s + ways.sample_s * share) * longest)

    def first_chunks_s(self, ways: Instances, groups_in_chunk: Sequence[int]) -> FloatArray:
        """[ways, chunks]: when the straight release begins that is nowhere earlier than the true one, in chunks of whole groups."""
        found = []
        for draw in self.draws:
            releases_s = draw.releases_s(ways)
            found.append(np.stack([_chord(releases_s, groups) for groups in groups_in_chunk], axis=1))
        return np.asarray(np.mean(found, axis=0))


def _cut(responses: IntArray, limit: int) -> IntArray:
    return np.minimum(responses, limit) if limit else responses


def _chord(releases_s: FloatArray, step: int) -> FloatArray:
    """The least l with l + (T - l) k/(K-1) >= r_k for all chunks k = 0 .. K-1."""
    num = releases_s.shape[1]
    last = releases_s[:, -1]
    if step >= num:
        return last
    at = np.append(np.arange(step - 1, num - 1, step), num - 1)
    at = at[_spread(len(at))]
    share = np.arange(len(at)) / (len(at) - 1) if len(at) == -(-num // step) else (at - at[0]) / (num - 1 - at[0])
    early = releases_s[:, at[:-1]]
    return np.asarray(((early - last[:, None] * share[None, :-1]) / (1 - share[None, :-1])).max(axis=1).clip(early[:, 0], last))


@functools.lru_cache(maxsize=256)
def _spread(num: int) -> IntArray:
    """Indices from the first to the last, all of them or enough: dense where they are few."""
    if num <= _MOST_POINTS:
        return np.arange(num)
    few = np.unique(np.geomspace(1, num, _MOST_POINTS // 2).astype(np.int64) - 1)
    even = np.linspace(0, num - 1, _MOST_POINTS // 2).astype(np.int64)
    return np.union1d(few, even)
