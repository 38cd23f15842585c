"""Track which samples a call's result has rows of, and with which columns, before anything runs.

    responses[rewards > 0.5]    rows of policy.generate, less those that this filter drops: one `Part`, with one filter

Two results may be joined if one certainly has the rows of the other: the same call made their samples, and the one went through all
filters of the other. What a filter really keeps is only known when it has run; so of two different filters of the same samples nothing
is certain, and joining them is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from m2flow.errors import TraceError
from m2flow.macro.graph import Call, Ref
from m2flow.samples import EPISODE, SAMPLING_MASK, TOKEN_COLUMNS, Batch

GENERATED = TOKEN_COLUMNS | {"seed", "finish", "temperature", "text"}
"""Columns that a generate call adds to those of its prompts, whatever its engine; some add others (`m2flow.samples`)."""

TWICE = "Its inputs must be different samples; to bring columns of the same samples together, join them."
"""What to do about a concatenation that has a sample twice."""


class Part(NamedTuple):
    """Samples that one call made, less those that filters dropped."""

    maker: int
    filters: tuple[int, ...] = ()
    """Calls, in program order."""

    def is_within(self, other: Part) -> bool:
        """Whether the other certainly has all rows of this."""
        return self.maker == other.maker and self.filters[: len(other.filters)] == other.filters


class ResultInfo(NamedTuple):
    """What is known of a call's result before it runs."""

    call: Call
    parts: tuple[Part, ...]
    fields: frozenset[str] | None
    """Names of its columns; None: unknown."""
    samplers: frozenset[str]
    """The roles that sampled its responses."""

    def is_within(self, other: ResultInfo) -> bool:
        return self.parts == other.parts or all(any(part.is_within(of) for of in other.parts) for part in self.parts)


class Lineage:
    """What is known of each call's result in a session."""

    def __init__(self) -> None:
        self._known: dict[int, ResultInfo] = {}
        self._makers: dict[int, Call] = {}

    def add(self, call: Call) -> None:
        """Take a new call in.

        Raises:
            TraceError: its inputs are not about the same samples, or are filtered in different ways.
        """
        known = self._known
        inputs = [(name, ref) for name, ref in call.inputs if known[ref.call].call.is_aligned]
        is_maker = not inputs or call.engine == "source" or call.engine == "rollout"
        parts = (Part(call.ordinal),) if is_maker else self._parts(call, inputs)
        if is_maker:
            self._makers[call.ordinal] = call
        known[call.ordinal] = ResultInfo(call, parts, self._fields(call, inputs), self._samplers(call, inputs))

    def known(self, ordinal: int) -> ResultInfo:
        return self._known[ordinal]

    def makers(self, ordinal: int) -> list[Call]:
        """The calls that made the samples of a result: one, unless it is a concatenation."""
        return [self._makers[maker] for maker in dict.fromkeys(part.maker for part in self._known[ordinal].parts)]

    def samplers(self, ordinal: int) -> frozenset[str]:
        """The roles that sampled the responses of a result; none: these are of a dataset, or there are none."""
        return self._known[ordinal].samplers

    def _samplers(self, call: Call, inputs: list[tuple[str, Ref]]) -> frozenset[str]:
        if call.engine == "rollout":
            return frozenset({call.role})
        if isinstance(named := call.options.get("sampled_by"), str):
            return frozenset({named})
        rows = inputs if call.options.get("gives") == "concat" else inputs[:1]
        return frozenset(role for _, ref in rows for role in self._known[ref.call].samplers)

    def keep(self, needed: Iterable[int]) -> None:
        """Forget all calls but these and those that made their samples."""
        known = {ordinal: self._known[ordinal] for ordinal in needed if ordinal in self._known}
        parts = [part for one in known.values() for part in one.parts]
        self._makers = {part.maker: self._makers[part.maker] for part in parts}
        further = [ordinal for part in parts for ordinal in part.filters]
        further += [ref.call for maker in self._makers.values() for _, ref in maker.inputs]
        self._known = known | {ordinal: self._known[ordinal] for ordinal in (*self._makers, *further) if ordinal in self._known}

    def __len__(self) -> int:
        return len(self._known)

    def has(self, ordinal: int) -> bool:
        return ordinal in self._known

    def makes(self, ordinal: int) -> bool:
        """Whether a call that is kept has samples that this one made."""
        return ordinal in self._makers

    def narrowest(self, refs: Iterable[Ref]) -> Ref | None:
        """The input whose rows all others certainly have."""
        found = list(refs)
        return next((ref for ref in found if all(self._known[ref.call].is_within(self._known[o.call]) for o in found)), None)

    def mismatch(self, what: str, inputs: Sequence[tuple[str, Ref]]) -> TraceError:
        """Describe inputs that do not go together: two of them, what they are, and where they are from."""
        (name, ref), (other, by) = next(pair for pair in itertools.combinations(inputs, 2) if self.narrowest(of for _, of in pair) is None)
        mine, others = self.makers(ref.call), self.makers(by.call)
        if {call.ordinal for call in mine} != {call.ordinal for call in others}:
            text = f"{what} got {name} that {_made(mine)}, and {other} of others, which {_made(others)}"
            return TraceError(text, now=f"The {other} must be those of the very samples that they go with.")
        text = f"{what} got {name} {self._filtered(ref)} and {other} {self._filtered(by)}, which are different rows of the same samples"
        return TraceError(text, now="Filter once and go on with what is left, or filter both by one condition: a & b.")

    def _filtered(self, ref: Ref) -> str:
        filters = [self._known[ordinal].call for part in self._known[ref.call].parts for ordinal in part.filters]
        return "filtered at " + ", ".join(dict.fromkeys(str(call.site) for call in filters)) if filters else "of all samples"

    def _parts(self, call: Call, inputs: list[tuple[str, Ref]]) -> tuple[Part, ...]:
        if call.options.get("gives") == "concat":
            return self._union(call, inputs)
        base, *others = inputs
        parts = self._known[base[1].call].parts
        for other in others:
            if self.narrowest([base[1], other[1]]) is None:
                raise self.mismatch(call.name, [base, other]).located(call.site.describe())
            if not self._known[base[1].call].is_within(self._known[other[1].call]):
                raise TraceError(
                    f"{call.name} got {base[0]} of more samples than {other[0]}, which are {self._filtered(other[1])}",
                    where=call.site.describe(),
                    now=f"Filter the {base[0]} in the same way.",
                )
        if call.options.get("gives") == "kept":
            return tuple(Part(part.maker, (*part.filters, call.ordinal)) for part in parts)
        return parts

    def _union(self, call: Call, inputs: Sequence[tuple[str, Ref]]) -> tuple[Part, ...]:
        parts: list[Part] = []
        for _, ref in inputs:
            for part in self._known[ref.call].parts:
                if any(part.is_within(other) or other.is_within(part) for other in parts):
                    raise TraceError(
                        f"{call.name} got samples twice that {_made([self._makers[part.maker]])}",
                        where=call.site.describe(),
                        now=TWICE,
                    )
                parts.append(part)
        return tuple(sorted(parts))

    def _fields(self, call: Call, inputs: list[tuple[str, Ref]]) -> frozenset[str] | None:
        options = call.options
        if call.engine == "source":
            rows = options.get("rows")
            return frozenset(rows.columns) if isinstance(rows, Batch) else None
        if isinstance(named := options.get("fields"), tuple | frozenset):
            return frozenset(named)
        if not call.is_aligned or not inputs:
            return None
        found = [self._known[ref.call].fields for _, ref in inputs]
        if None in found:
            return None
        gives = options.get("gives", "column")
        if gives == "column" and call.engine != "rollout":
            return frozenset((str(options["column"]),)) if "column" in options else None
        fields = [of for of in found if of is not None]
        if call.engine == "rollout":
            masks = {SAMPLING_MASK} if getattr(options.get("sampling"), "sampling_mask", False) else frozenset()
            return (fields[0] - {SAMPLING_MASK}) | GENERATED | masks | (EPISODE if "agent" in options else frozenset())
        if gives == "concat":
            return frozenset.intersection(*fields)
        if gives == "kept":  # With a function of the user's, a column that was joined for it stays.
            joined = options.get("columns")
            return fields[0] | frozenset(joined if isinstance(joined, dict) and options.get("style") != "columns" else ())
        return None


def _made(makers: Sequence[Call]) -> str:
    return ", ".join(f"{maker.name} made at {maker.site}" for maker in makers)
