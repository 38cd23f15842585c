"""What policies with a predictor share: it begins, learns and ends with them, and is asked anew now and then."""

from __future__ import annotations

from collections.abc import Iterable

from m2flow.micro.rollouts.decode import FloatArray
from m2flow.micro.rollouts.policy import Policy, Seen
from m2flow.micro.rollouts.predictors import Predictor

_SHARE = 0.05


class Predicted(Policy):
    """Ranks nothing by itself."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        self._predictor.begin(seen)
        self._asked_at = 0
        self._expected = self._predictor.expected()
        self._turn = _turns(seen)

    def end(self) -> None:
        self._predictor.end()

    def expected(self) -> tuple[FloatArray, bool]:
        """E[length] of each sample, and whether it is new: after each twentieth of the samples, and of those left."""
        seen = self.seen
        passed, left = len(seen.finished) - self._asked_at, len(seen.groups) - len(seen.finished)
        if passed <= _SHARE * min(len(seen.groups), 2 * left):
            return self._expected, False
        self._asked_at = len(seen.finished)
        self._expected = self._predictor.expected()
        return self._expected, True

    def waiting_if_new(self) -> Iterable[int]:
        """All that wait, if expectations are new; for `reranked`."""
        return self.seen.waiting if self.expected()[1] else ()


def _turns(seen: Seen) -> list[int]:
    """[N], the order among samples of equal expectation: the first of each group, then the second of each, and so on.

    So each prompt is heard of early. Each round begins one group later, or all of a group would meet on one instance.
    """
    turns = [0] * len(seen.groups)
    num_groups = len(seen.members)
    for group, members in enumerate(seen.members):
        for index, sample in enumerate(members):
            turns[sample] = index * num_groups + (group + index) % num_groups
    return turns
