"""Which samples were in which decode step, from spans that only say when steps and samples ended.

    rollout.step and sample spans, lengths --batches_of--> samples, contexts and prompts of each step

A sample of L tokens that ended with step e got one in each of the steps e - L + 1 to e; the first of these read its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2flow.observe.spans import Span, sample_of
from m2flow.samples import group_key

IntArray = npt.NDArray[np.int64]


def batches_of(
    steps: Sequence[Span], lives: Sequence[Span], counts: Mapping[int, tuple[int, int, int]]
) -> tuple[tuple[IntArray, IntArray, IntArray, IntArray], IntArray]:
    """Of each step of one engine: samples that were decoded, tokens in their caches, samples that came in, tokens of their prompts (each
    prompt once). And the positions of the steps of which this is known.

    Args:
        lives: of the samples of the engine's worker.
        counts: of each sample the step of the flow, tokens of its prompt, and tokens generated.
    """
    ends = np.array([span.end_ns for span in steps])
    first, last, prompts, groups = [], [], [], []
    for life in lives:
        packed = sample_of(life)
        position = int(np.searchsorted(ends, life.end_ns))
        if packed is not None and packed in counts and position < len(ends) and ends[position] == life.end_ns:
            first.append(position - number(life, "num_tokens") + 1)
            last.append(position)
            prompts.append(counts[packed][1])
            groups.append(group_key(packed))
    rows = _Rows(np.array(first, np.int64), np.array(last, np.int64), np.array(prompts, np.int64), np.array(groups, np.int64))
    running, entered, prefill, context = rows.by_step(len(steps))
    asked = np.array([number(span, "num_samples") for span in steps], np.int64)
    # Beyond the engine's limit samples queue; below it, a batch that does not add up had samples that never ended.
    is_known = (running > 0) & ((running == asked) | ((running < asked) & (running == running.max(initial=0))))
    return (running - entered, context, entered, prefill), np.flatnonzero(is_known)


class Cover:
    """How much of a stretch of time was covered by spans."""

    def __init__(self, spans: Sequence[Span]) -> None:
        times, done = [0], [0]
        for span in sorted(spans, key=lambda s: s.start_ns):
            start = max(span.start_ns, times[-1])
            if span.end_ns > start:
                times += [start, span.end_ns]
                done += [done[-1], done[-1] + span.end_ns - start]
        self._origin = times[1] if len(times) > 1 else 0
        self._times = np.array(times[1:] or [0]) - self._origin
        self._done = np.array(done[1:] or [0])

    def covered_ns(self, start_ns: int, end_ns: int) -> float:
        at = np.interp([start_ns - self._origin, end_ns - self._origin], self._times, self._done)
        return float(at[1] - at[0])


def number(span: Span, name: str, default: int = 0) -> int:
    """An attribute of a span that is a number."""
    value = span.attributes.get(name)
    return int(value) if isinstance(value, int | float) else default


@dataclass(frozen=True, eq=False)
class _Rows:
    """Samples of one engine, [N] each: the steps in which they got their first and their last token, prompts' tokens, their groups."""

    first: IntArray
    last: IntArray
    prompts: IntArray
    groups: IntArray

    def by_step(self, num_steps: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Of each step: samples that run, those that enter, tokens of the latters' prompts, tokens in the caches of the others."""
        first = np.clip(self.first, 0, None)

        def total(weights: IntArray) -> IntArray:
            change = np.zeros(num_steps + 1, np.int64)
            np.add.at(change, first, weights)
            np.add.at(change, self.last + 1, -weights)
            return np.cumsum(change)[:num_steps]

        running = total(np.ones(len(first), np.int64))
        entered, prefill, unread = (np.zeros(num_steps, np.int64) for _ in range(3))
        np.add.at(entered, first, 1)
        np.add.at(unread, first, self.prompts)
        _, once = np.unique(np.stack([first, self.groups]), axis=1, return_index=True)
        np.add.at(prefill, first[once], self.prompts[once])
        # A sample that entered at step f has its prompt and k - f tokens in the cache at step k; at f itself it is read, not decoded.
        context = total(self.prompts) + np.arange(num_steps) * running - total(first) - unread
        return running, entered, prefill, context
