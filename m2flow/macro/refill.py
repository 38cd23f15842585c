"""Refill: a generation that goes on drawing prompts until enough groups are kept (dynamic sampling).

    dataset.upto -> policy.generate -> reward.score -> keep      one call each; `keep` gives the rows

The result is that of the plain loop which draws a prompt, answers it, scores the group and keeps it or not, until it has `count`
of them: the first kept groups in the order of the source, whoever finished first. Prompts beyond the last one that was needed go back
to the source. How many groups run ahead is the scheduler's choice (`m2flow.micro.scheduling.refilling`), and changes nothing but time.

Source:
    Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2 (dynamic sampling).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from m2flow.errors import OptionError, TraceError
from m2flow.macro.graph import Granularity
from m2flow.macro.handles import Rows, describe
from m2flow.recipe import Sampling, check_count
from m2flow.samples import Sample

if TYPE_CHECKING:
    from m2flow.macro.datasets import Dataset
    from m2flow.macro.roles import Policy, Reward

Keep = Callable[[list[Sample]], bool]

_DRAWS_PER_GROUP = 16
"""Prompts that a refill may draw for each group it needs, unless the program says otherwise."""


def informative(group: list[Sample]) -> bool:
    """Whether the rewards of a group differ: where all are equal, every advantage is 0, and the group teaches nothing."""
    return len({sample["reward"] for sample in group}) > 1


def refill(
    policy: Policy,
    source: Dataset,
    *,
    n: int,
    sampling: Sampling,
    count: int | None,
    score: Reward | None,
    keep: Keep | None,
    max_draws: int | None,
    staleness: int,
    kv: str,
    shown: Mapping[str, object],
) -> Rows:
    """Record the calls of `policy.generate(source, count=..., score=..., keep=...)`; the rows have a column `reward`."""
    if count is None or score is None:
        raise OptionError(
            f"{policy.name}.generate draws from a dataset itself with count= (groups to keep) and score= (a Reward)",
            now="Else draw the prompts: generate(dataset.take(32), ...).",
        )
    if not hasattr(score, "_score"):
        raise TraceError(f"score got {describe(score)}; it takes a Reward", now="Make one of a function: Reward(function).")
    check_count("count", count)
    if max_draws is not None:
        check_count("max_draws", max_draws)
    keep = informative if keep is None else keep
    if not callable(keep):
        raise TraceError(f"keep needs a function of a group's samples, and got {describe(keep)}")
    session = policy._session
    limit = max_draws or _DRAWS_PER_GROUP * count
    prompts = source.upto(limit)
    responses = policy._generate(prompts.ref, {**shown, "count": count}, n=n, sampling=sampling, staleness=staleness, kv=kv, refill=count)
    rewards = score._score(responses, refill=count)
    kept = session.record(
        role="keep",
        method="",
        engine="function",
        granularity=Granularity.GROUP,
        inputs={"samples": responses.ref, "reward": rewards.ref},
        options={
            "function": _Keep(keep),
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


class _Keep:
    """The user's function, as one that says the same for each sample of the group."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self.__name__ = getattr(keep, "__name__", "keep")
        self.__qualname__ = getattr(keep, "__qualname__", self.__name__)

    def __call__(self, group: list[Sample]) -> list[object]:
        return [self.keep(group)] * len(group)
