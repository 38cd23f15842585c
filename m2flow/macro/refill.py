"""Refill (dynamic sampling): a generation that draws prompts until enough groups are kept, and the choice of which groups those are.

    dataset.upto -> policy.generate -> reward.score -> keep      one call each; `keep` gives the rows

The result is that of the plain loop which draws a prompt, answers it, scores the group and keeps it or not, until it has `count` of
them: the first kept groups in the order of the source, whoever finished first. Prompts beyond the last one that was needed are returned
to the source. Groups run side by side and are judged as they finish, so later ones may be judged first; what counts is the shortest
stretch of the source in which `count` groups were kept, which is what drawing one prompt at a time would have used. What follows need not
wait for that: a kept group is handed on once it is certain that the result has it (`Coming`).

`Refill` is pure: it gets verdicts and answers how many prompts may be started. How many groups run ahead changes nothing but time.
Limit: that number follows the share kept so far, and is no optimum.

Source:
    Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2 (dynamic sampling).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from m2flow.errors import DatasetError, M2FlowError, OptionError, TraceError
from m2flow.macro.graph import Call, Granularity
from m2flow.macro.handles import OnGroup, Rows, describe
from m2flow.recipe import check_count, check_number
from m2flow.samples import Sample

if TYPE_CHECKING:
    from m2flow.macro.datasets import Dataset
    from m2flow.macro.roles import GenerateSettings, Policy, Reward

Keep = Callable[[list[Sample]], bool | Awaitable[bool]]

_DRAWS_PER_GROUP = 16
"""Prompts that a refill may draw for each group it needs, unless the program says otherwise."""


def informative(group: list[Sample]) -> bool:
    """Whether the rewards of a group differ: where all are equal, every advantage is 0, and the group teaches nothing."""
    return len({sample["reward"] for sample in group}) > 1


def pass_rate_between(low: float, high: float, *, right: float = 0.5) -> Keep:
    """A `keep=` that takes the groups of which neither too few nor too many responses are right.

    Args:
        low, high: bounds of the share of right ones, both within: `pass_rate_between(0.1, 0.9)`. From 0 to 1.
        right: a response is right if its reward is more than this.

    >>> keep = pass_rate_between(0.25, 0.5)
    >>> [keep([{"reward": 1.0}] * right + [{"reward": 0.0}] * (4 - right)) for right in range(4)]
    [False, True, True, False]
    """
    check_number("low", low, low=0, high=1)
    check_number("high", high, low=0, high=1)
    check_number("right", right)
    if low > high:
        raise OptionError(f"low is {low} and high {high}; no group passes", now="Give low below high.")
    return _PassRate(low, high, right)


@dataclass(frozen=True)
class _PassRate:
    low: float
    high: float
    right: float

    def __call__(self, group: list[Sample]) -> bool:
        share: float = sum(sample["reward"] > self.right for sample in group) / len(group)
        return self.low <= share <= self.high


@dataclass(frozen=True)
class Draws:
    """Options of `policy.generate(dataset, ...)` that say how many prompts it draws, and which groups it keeps."""

    count: int | None = None
    score: Reward | None = None
    keep: Keep | None = None
    max_draws: int | None = None


def refill(policy: Policy, source: Dataset, settings: GenerateSettings, draws: Draws) -> Rows:
    """Record the calls of `policy.generate(source, count=..., score=..., keep=...)`; the rows have a column `reward`."""
    count, score, keep = draws.count, draws.score, informative if draws.keep is None else draws.keep
    if count is None or score is None:
        raise OptionError(
            f"{policy.name}.generate draws from a dataset itself with count= (groups to keep) and score= (a Reward)",
            now="Else draw the prompts: generate(dataset.take(32), ...).",
        )
    if not hasattr(score, "_score"):
        raise TraceError(f"score got {describe(score)}; it takes a Reward", now="Make one of a function: Reward(function).")
    check_count("count", count)
    if draws.max_draws is not None:
        check_count("max_draws", draws.max_draws)
    if not callable(keep):
        raise TraceError(f"keep needs a function of a group's samples, and got {describe(keep)}")
    session = policy._session
    prompts = source.upto(draws.max_draws or _DRAWS_PER_GROUP * count)
    shown = {**settings.shown, "count": count}
    responses = policy._generate(prompts.ref, shown, staleness=settings.staleness, refill=count, **settings.common)
    rewards = score._score(responses, refill=count)
    kept = session.record(
        role="keep",
        method="",
        engine="function",
        granularity=Granularity.GROUP,
        inputs={"samples": responses.ref, "reward": rewards.ref},
        options={
            "function": OnGroup(keep),
            "timeout_s": score.timeout_s,
            "column": "value",
            "gives": "kept",
            "columns": {"reward": "reward"},
            "refill": count,
        },
        shown={"keep": keep, "count": count},
    )
    rows = Rows(session, kept)
    rows.scored_by = score
    source.return_rest(rows)
    return rows


@dataclass(frozen=True)
class RefillEnd:
    """The final result of a refill: nothing still to come can change it."""

    last: int
    """Position of the last prompt that was needed."""
    kept: frozenset[int]
    """Positions of the groups that it gives; of no use with an error."""
    error: M2FlowError | None = None
    is_dry: bool = False
    """All candidates were judged, and too few kept."""


@final
class Refill:
    """The state of one refill: verdicts so far, and how many prompts may be started."""

    def __init__(self, num_candidates: int, count: int) -> None:
        self._num_candidates = num_candidates
        self._count = count
        self._verdicts: dict[int, bool | M2FlowError] = {}
        self._settled = 0
        """Every earlier position is judged, and none of them is an error."""
        self._kept: list[int] = []
        """Positions kept among those."""
        self._num_reached = 0
        """The last judged position, and 1."""
        self._num_judged_good = 0
        """Groups to keep among all that are judged."""
        self._num_allowed = min(count, num_candidates)
        self._num_certain = count
        """If all unjudged groups were kept, the last one that is needed would be among so many."""

    @property
    def num_allowed(self) -> int:
        """How many prompts, counted from the source's first, may be started by now."""
        return self._num_allowed

    @property
    def count(self) -> int:
        """Groups that the refill returns."""
        return self._count

    def is_certain(self, position: int) -> bool:
        """Whether a group has to be judged, whatever comes of those before it that are not judged yet (errors aside).

        >>> refill = Refill(num_candidates=9, count=2)
        >>> refill.judge(1, False)
        >>> [refill.is_certain(position) for position in range(4)]
        [True, True, True, False]
        """
        return position < self._num_certain

    @property
    def num_rejected(self) -> int:
        """Groups that were judged and rejected."""
        return sum(verdict is not True for verdict in self._verdicts.values())

    def resume_at(self, num_prompts: int) -> None:
        """Resume: an earlier process of the run had started so many prompts, counted from the source's first."""
        self._num_allowed = min(max(self._num_allowed, num_prompts), self._num_candidates)

    def judge(self, position: int, verdict: bool | M2FlowError) -> None:
        """Record that a group was kept or not, or that judging it failed. A repeated verdict changes nothing."""
        if position in self._verdicts:
            return
        self._verdicts[position] = verdict
        self._num_judged_good += verdict is True
        self._num_reached = max(self._num_reached, position + 1)
        if verdict is False and position < self._num_certain:
            self._num_certain += 1
            while self._verdicts.get(self._num_certain - 1) is False:
                self._num_certain += 1
        while isinstance(settled := self._verdicts.get(self._settled), bool) and len(self._kept) < self._count:
            if settled:
                self._kept.append(self._settled)
            self._settled += 1
        self._allow()

    def end(self) -> RefillEnd | None:
        """The result, if it is decided."""
        if len(self._kept) == self._count:
            return RefillEnd(self._kept[-1], frozenset(self._kept))
        verdict = self._verdicts.get(self._settled)
        if isinstance(verdict, M2FlowError):
            return RefillEnd(self._settled, frozenset(), error=verdict)
        if self._settled == self._num_candidates:
            return RefillEnd(self._num_candidates - 1, frozenset(self._kept), is_dry=True)
        return None

    def _allow(self) -> None:
        """Allow as many prompts as are needed if groups are kept as often as so far."""
        share = (self._num_judged_good + 1) / (len(self._verdicts) + 1)
        missing = self._count - self._num_judged_good
        if missing > 0:
            wanted = len(self._verdicts) + math.ceil(missing / share)
            self._num_allowed = min(max(self._num_allowed, wanted), self._num_candidates)


_LOOKS = 256
"""Of the groups that were judged behind the first verdict that is missing, one in so many is news that is worth a look."""


@final
class Coming:
    """The groups of a refill, as it becomes certain that its result has them, and in which stretch of it.

    Between the first verdict that is missing and a kept group any number may still be kept: that is what its place in the result, and so
    its stretch, hangs on.

    Args:
        part: groups in a stretch, as in a mini-batch; None: all are one.
        in_order: give no group before an earlier one, so only those before the first missing verdict.

    >>> refill = Refill(num_candidates=9, count=4)
    >>> for position in (0, 2, 3, 4): refill.judge(position, True)
    >>> [Coming(refill, part, in_order=in_order).more() for part, in_order in ((2, True), (2, False), (None, False))]
    [[(0, 0)], [(0, 0), (3, 1)], [(0, 0), (2, 0), (3, 0)]]
    """

    def __init__(self, refill: Refill, part: int | None = None, *, in_order: bool = False) -> None:
        self._refill = refill
        self._part = part or refill.count
        self._in_order = in_order
        self._start = self._num_judged = 0
        self._given: set[int] = set()

    def rows_of(self, position: int, candidates: list[int]) -> list[int]:
        """The rows of a group among those of all prompts that the refill may draw."""
        n = len(candidates) // self._refill._num_candidates
        return candidates[position * n : position * n + n]

    def more(self, *, is_all: bool = False) -> list[tuple[int, int]]:
        """Find what has become certain since this was last asked: (position, number of the stretch), in order.

        To look costs as much as groups were judged behind the first verdict that is missing. Where these are many, what is certain is found
        some verdicts later, so that a refill of thousands is looked through some hundreds of times.

        Args:
            is_all: the refill has ended.
        """
        num_judged = len(self._refill._verdicts)
        if not is_all and num_judged - self._num_judged < (num_judged - self._refill._settled) // _LOOKS:
            return []
        self._num_judged = num_judged
        found = [(position, stretch) for position, stretch in self._sure() if position not in self._given]
        self._given.update(position for position, _ in found)
        self._start = self._refill._settled
        return found

    def _sure(self) -> Iterator[tuple[int, int]]:
        """Look through what was judged from the last start on for groups that are certain, given before or not."""
        refill = self._refill
        least = most = bisect.bisect_left(refill._kept, self._start)
        for position in range(self._start, refill._num_reached):
            if most >= refill._count:
                return
            verdict = refill._verdicts.get(position)
            is_placed = least == most if self._in_order else least // self._part == most // self._part
            if verdict is True and is_placed:
                yield position, least // self._part
            least += verdict is True
            most += verdict is not False


def source_exhausted(call: Call, num_kept: int, num_candidates: int) -> DatasetError:
    """Make the error of a refill whose source ended before enough groups were kept."""
    return DatasetError(
        f"only {num_kept} of the {call.options['refill']} groups that generate(count=...) needs were kept among {num_candidates} prompts",
        where=call.site.describe(),
        now="Is `keep` too strict, or the task too easy or too hard by now? max_draws=... raises the number of prompts to try.",
    )
