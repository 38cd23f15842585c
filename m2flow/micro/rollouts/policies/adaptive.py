"""All that was found to pay, each behind its gate: classes and longest first if samples can be told apart, moves in the tail.

Without information it is least-loaded; with it, `split`, the first samples of all prompts first, and the queues are put in order anew
as siblings end. Once nothing waits, samples move where expectations say that it pays.

Source: `split`, `longest-first` and `repack` together, and theirs; the gates are ours, by the study in docs/guide/rollout-scheduling.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.micro.rollouts.policies.split import Split
from m2flow.micro.rollouts.policy import Move
from m2flow.micro.rollouts.relieving import relieving_moves


class Adaptive(Split):
    name = "adaptive"
    needs_reports = True

    def next_sample(self, instance: int) -> int | None:
        if self._predictor.is_informed:
            expected, is_new = self.expected()
            if is_new:
                for queue in self._queues:
                    queue.sort(key=lambda sample: (round(float(expected[sample]), 6), -self._turn[sample]))
        return super().next_sample(instance)

    def moves(self) -> Sequence[Move]:
        if self.seen.waiting or self._predictor.is_blind:
            return ()
        expected, is_new = self.expected()
        return relieving_moves(self.seen, expected) if is_new else ()
