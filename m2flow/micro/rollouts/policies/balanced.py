"""Token- and cache-aware balance: an instance takes samples until it has its part of the tokens that are still to come.

    mine + E[sample] / 2 <= (all that is left) / instances,     prompts + tokens so far + E[next ones] <= (1 - headroom) cache

So instances end up with equal work rather than equal numbers of samples, and none is given what its cache can't hold. Where lengths can't
be told apart it is an even share by number. Who has the least takes what is left.

Source: Llumnix and Seer place by the load that an engine reports; the share in expected tokens is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.micro.rollouts.policies.predicted import Predicted
from m2flow.micro.rollouts.policy import Seen
from m2flow.micro.rollouts.predictors import Predictor


class Balanced(Predicted):
    name = "balanced"
    needs_reports = True

    def __init__(self, predictor: Predictor, headroom: float = 0.1) -> None:
        super().__init__(predictor)
        self._headroom = headroom

    def begin(self, seen: Seen) -> None:
        super().begin(seen)
        self._work = [0.0] * seen.num_instances
        self._at: dict[int, tuple[int, float]] = {}
        self._all = 0.0
        """Expected tokens of what runs and of what waits."""
        for sample, instance in seen.place.items():
            self._take(sample, instance)
        self.added(list(seen.waiting))

    def added(self, samples: Sequence[int]) -> None:
        for sample in samples:
            self._leave(sample)
            self._all += float(self._expected[sample])

    def allows(self, sample: int, instance: int) -> bool:
        seen, length = self.seen, float(self._expected[sample])
        share = self._all / max(seen.num_alive, 1)
        mine = self._work[instance]
        if mine + length / 2 > share and any(work < mine for j, work in enumerate(self._work) if j not in seen.lost):
            return False
        report = seen.reports.get(instance)
        if report is not None and report.kv_capacity and seen.loads[instance]:
            needs = seen.prompts[seen.groups[sample]] + length
            if report.kv_used + needs > (1 - self._headroom) * report.kv_capacity:
                return False
        return True

    def started(self, sample: int, instance: int) -> None:
        self._all -= float(self._expected[sample])
        self._take(sample, instance)

    def ended(self, sample: int, length: int) -> None:
        self._leave(sample)

    def _take(self, sample: int, instance: int) -> None:
        length = float(self._expected[sample])
        self._at[sample] = (instance, length)
        self._work[instance] += length
        self._all += length

    def _leave(self, sample: int) -> None:
        instance, length = self._at.pop(sample, (0, 0.0))
        self._work[instance] -= length
        self._all -= length
