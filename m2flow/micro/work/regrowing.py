"""Generate samples as a record says: so many tokens of each by one version of the weights, so many by the next.

    stretches (4, v3) (2, v4)    ->    load v3, begin; after 4 tokens stop; load v4, go on

What a planned run did because of time, the eager interpreter does here because of the record, with the same engines. A sample of one
stretch just runs to its end. Where the cache is older than the weights, these are loaded under the sample, which is then made alone: others
have changes of weights elsewhere. Limit: a sample with several stretches costs a stop, and a load of weights, for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from m2flow.macro.graph import Call
from m2flow.micro.record.decisions import Stretch
from m2flow.micro.work.workbench import Workbench
from m2flow.samples import Batch


@dataclass(frozen=True, eq=False)
class Asked:
    """Some samples that one call drew."""

    drawn: Call
    ids: Sequence[int]
    prompts: Batch
    """Row i is the prompt of sample i."""


class Take(Protocol):
    """Has the engine hold a version of the weights, perhaps from here on for what runs."""

    def __call__(self, version: int, *, under_requests: bool = False) -> None: ...


def regrow(bench: Workbench, take: Take, call: Call, asked: Sequence[Asked], stretches: Mapping[int, Sequence[Stretch]]) -> Batch:
    """The rows of these samples, in the order of identity.

    Args:
        call: the one that gives them.
        stretches: of each sample. The last goes on to the sample's end.
    """
    todo = {packed: list(stretches[packed]) for part in asked for packed in part.ids}
    parts: list[Batch] = []
    for part in asked:
        for row, packed in enumerate(part.ids):
            if any(stretch.is_stale for stretch in todo[packed]):
                parts += _alone(bench, take, call, Asked(part.drawn, [packed], part.prompts.take([row])), todo.pop(packed))
    stopped: dict[int, Batch] = {}
    while todo:
        version = min(of[0].version for of in todo.values())
        now = {packed: of for packed, of in todo.items() if of[0].version == version}
        take(version)
        for part in asked:
            _begin(bench, call, part, now, stopped)
        ends = {packed: of[0].num_tokens + _length(stopped.get(packed)) for packed, of in now.items() if len(of) > 1}
        todo = {packed: of for packed, of in todo.items() if packed not in now}
        while bench.num_unfinished:
            parts += [rows for _, rows in bench.step()]
            progress = bench.progress() if ends else {}
            reached = [packed for packed, end in ends.items() if progress.get(packed, 0) >= end]
            for packed in reached:
                del ends[packed]
                stopped[packed] = bench.interrupt([packed])
                todo[packed] = now[packed][1:]
    return Batch.concat(parts).in_order()


def _alone(bench: Workbench, take: Take, call: Call, one: Asked, stretches: Sequence[Stretch]) -> list[Batch]:
    """A sample whose cache was older than its weights: these change under it where they did."""
    (packed,) = one.ids
    parts: list[Batch] = []
    stopped: dict[int, Batch] = {}
    end = 0
    for number, stretch in enumerate(stretches):
        is_last = number == len(stretches) - 1
        if number and not bench.num_unfinished:
            break  # Another machine's last bits: it has ended earlier than in the record.
        if stretch.is_stale:
            take(stretch.version, under_requests=True)
        else:
            if number:
                stopped[packed] = bench.interrupt([packed])
            take(stretch.version)
            _begin(bench, call, one, {packed: stretch}, stopped)
        end += stretch.num_tokens
        while bench.num_unfinished and (is_last or bench.progress().get(packed, 0) < end):
            parts += [rows for _, rows in bench.step()]
    return parts


def _begin(bench: Workbench, call: Call, part: Asked, now: Mapping[int, object], stopped: Mapping[int, Batch]) -> None:
    fresh = [row for row, packed in enumerate(part.ids) if packed in now and packed not in stopped]
    if fresh:
        bench.generate(call, [part.ids[row] for row in fresh], part.prompts.take(fresh), part.drawn)
    goes_on = [stopped[packed] for packed in part.ids if packed in now and packed in stopped]
    if goes_on:
        bench.resume(call, Batch.concat(goes_on), part.drawn)


def _length(stopped: Batch | None) -> int:
    """Generated tokens of a sample so far."""
    return 0 if stopped is None else int(stopped.ragged("segment_lengths").row(0)[1])
