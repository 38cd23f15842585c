"""Tail batching (`late="defer"`): collect prompts with late samples until there are enough for a long round of their own.

    policy.generate(dataset, n=8, count=32, oversample=1.25, late="defer")

A call of such a line is a short round or a long one, and gives `count` groups either way:

    short   40 prompts are drawn, the first 32 whole groups are the result, the other 8 prompts are deferred
    long    32 prompts are deferred: they are answered, from their first token, and every sample runs to its end; nothing is drawn

How many are deferred follows from the arguments, so which calls are long (every fifth, here) is known before the run. Only which prompts
are deferred depends on time. Nothing is left out for its length, unlike with `late="drop"`, and no token is of older weights than its
call's, unlike with `late="carry"`: so it needs no staleness. The price: the tokens that late samples had are made again, and the order
of prompts changes.

Each round is made of calls that exist without it: a generation that is cut, what it answered, the prompts without those, a union. So the
scheduler, the simulator, the record and eager know nothing of rounds. Prompts that are deferred when the loop ends are not answered.

Source:
    RollPacker, NSDI 2026: tail batching. There groups are over-sampled within themselves too, which leaves out the longest answers of
    each prompt for good (docs/guide/flows-algorithms.md), and each round has a layout of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from m2flow.errors import OptionError
from m2flow.macro.graph import Granularity, user_site
from m2flow.macro.handles import Rows, concat
from m2flow.recipe import is_count
from m2flow.samples import Batch, Column, SampleId, prompt_positions

if TYPE_CHECKING:
    from m2flow.macro.datasets import Dataset
    from m2flow.macro.roles import GenerateSettings, Policy


@dataclass(frozen=True)
class Answered:
    """List the positions of the prompts that these samples answer, as the keys of a table."""

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> dict[str, float]:
        return dict.fromkeys(map(str, np.unique(prompt_positions(rows.ids)).tolist()), 1.0)


@dataclass(frozen=True)
class Unanswered:
    """Mark the prompts of a `take` that are not in that table; a row's index in its call is its position."""

    table: str

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        answered = values[self.table]
        assert isinstance(answered, Mapping)
        return np.array([str(SampleId.unpack(packed).prompt) not in answered for packed in rows.ids.tolist()], np.bool_)


@dataclass
class DeferredPrompts:
    """The prompts of a line that are deferred to its next long round."""

    rows: Rows | None = None
    count: int = 0

    def join(self, rows: Rows, count: int) -> None:
        self.rows = rows if self.rows is None else concat([self.rows, rows])
        self.count += count

    def take(self, count: int) -> Rows:
        """Remove and return the first of them."""
        assert self.rows is not None
        assert self.count >= count
        found = self.rows if self.count == count else self.rows[:count]
        self.rows = None if self.count == count else self.rows[count:]
        self.count -= count
        return found


def generate_deferred(policy: Policy, source: Dataset, settings: GenerateSettings, count: int | None, *, is_filtered: bool) -> Rows:
    """Record the calls of one round of such a line; the rows are those of `count` groups. `is_filtered`: others are not to be kept."""
    if is_filtered:
        raise OptionError(
            "late='defer' keeps the groups that are whole first, whatever their rewards; score=, keep= and max_draws= are for late='wait'",
            now="Leave these out, and score and filter what it gives; or leave out late= and oversample=.",
        )
    if not is_count(count):
        raise OptionError(
            f"late='defer' got count={count!r}; it is a whole number, 1 or more: the groups that each turn gives",
            now="Say generate(dataset, n=8, count=32, oversample=1.25, late='defer').",
        )
    assert count is not None
    oversample, staleness, shown = settings.oversample, settings.staleness, {**settings.shown, "count": count}
    num_drawn = math.floor(count * oversample + 1e-9)
    if num_drawn == count:
        raise OptionError(
            f"count={count} with oversample={oversample} draws no prompt more than it needs, so nothing can be late",
            now=f"Say oversample={(count + 1) / count:.3g} or more.",
        )
    site = user_site()
    waiting = policy._session.deferred.setdefault((policy.name, source, site.file, site.line, site.path), DeferredPrompts())
    if waiting.count >= count:
        prompts, options = waiting.take(count), {**settings.common, "late": "wait", "oversample": 1.0, "is_long": True}
        return policy._generate(prompts.ref, {**shown, "round": "long"}, staleness=staleness, **options)
    prompts, options = source.take(num_drawn), {**settings.common, "late": "defer", "oversample": oversample}
    rows = policy._generate(prompts.ref, shown, staleness=staleness, **options)
    waiting.join(_unanswered(prompts, rows, num_drawn - count), num_drawn - count)
    return rows


def _unanswered(prompts: Rows, responses: Rows, count: int) -> Rows:
    """The prompts that a generation which was cut did not answer; `count` of them."""
    session = prompts.session
    common: dict[str, object] = {"timeout_s": None, "column": "value", "style": "columns"}
    table = session.record(
        role="answered",
        method="",
        engine="function",
        granularity=Granularity.BATCH,
        inputs={"samples": responses.ref},
        options={"function": Answered(), "gives": "column", **common},
        shown={},
        is_aligned=False,
    )
    late = session.record(
        role="late",
        method="",
        engine="function",
        granularity=Granularity.BATCH,
        inputs={"rows": prompts.ref, "answered": responses.metrics_of(table).ref},
        options={"function": Unanswered("answered"), "gives": "kept", "most_rows": count, **common},
        shown={},
    )
    return prompts.like(late)
