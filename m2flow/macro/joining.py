"""Rows from rows of the same samples: with more columns, or without those that another handle has lost to a filter.

joined, narrowed      the call gives rows; its function puts the columns in their place
brought_back          what was said of samples that were generated from other samples, as numbers of those
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from m2flow.errors import OpError, TraceError
from m2flow.macro.algebra import Inputs, as_operand
from m2flow.macro.columns import Elementwise, Operand, numbers, value_of
from m2flow.macro.graph import Granularity
from m2flow.macro.late import carries
from m2flow.macro.reducible import Reducible
from m2flow.macro.results import Handle, describe
from m2flow.samples import Batch, Column, Ragged, SampleId, prompt_positions

if TYPE_CHECKING:
    from m2flow.macro.handles import Rows


@dataclass(frozen=True)
class Placed:
    """The rows with operands as columns of these names, and without the columns that were joined under an input's name."""

    columns: tuple[tuple[str, Operand | Elementwise], ...]
    joined: tuple[str, ...]

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Batch:
        found = {name: _column(name, operand, rows, values) for name, operand in self.columns}
        return rows.without(self.joined).with_columns(**found)


@dataclass(frozen=True)
class Without:
    """The rows without these columns."""

    names: tuple[str, ...]

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Batch:
        return rows.without(self.names)


@dataclass(frozen=True)
class MeanByPrompt:
    """For each prompt's position in the generate call the mean over its samples."""

    column: str

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> dict[str, float]:
        if not len(rows):
            return {}
        column = numbers(rows[self.column], "back_to", rows)
        if isinstance(column, Ragged):
            raise OpError("back_to got several numbers a sample", now="Reduce them first: .mean(over='sample').")
        positions = prompt_positions(rows.ids)
        return {str(at): float(np.mean(column[positions == at].astype(np.float64))) for at in np.unique(positions).tolist()}


@dataclass(frozen=True)
class ByPosition:
    """Each row's number, by its position among all."""

    name: str

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        found = values[self.name]
        assert isinstance(found, Mapping)
        for at, packed in enumerate(rows.ids.tolist()):
            if str(at) not in found:
                now = "A filter dropped all that was generated from it; filter the prompts in the same way, or keep one of each."
                raise OpError(f"back_to found nothing that was generated from sample {SampleId.unpack(packed)}", now=now)
        return np.array([found[str(at)] for at in range(len(rows))], np.float64)


def joined(what: str, rows: Sequence[Rows], columns: Mapping[str, object]) -> Rows:
    """The first rows with all columns of the further ones (a single column goes by its name), and with these columns by name.

    Of columns of one name the last wins.
    """
    first = rows[0]
    given = _labelled(rows, columns)
    filtered = Inputs(first.session, what)  # Only to find which of them has been filtered most.
    for label, handle in given:
        filtered.rows(handle.check(first.session, what), None, label)
    narrowest = next(handle for _, handle in given if handle.ref == filtered.base)
    first = first.within(narrowest)
    inputs = Inputs(first.session, what)
    inputs.rows(first.ref, None, "rows")
    fields: list[frozenset[str] | None] = [first.fields]
    placed: list[tuple[str, Operand | Elementwise]] = []
    for handle in rows[1:]:
        if handle.column is None:
            inputs.rows(handle.check(first.session, what), None, "rows")
            fields.append(handle.fields)
        elif handle.column in dict(placed) or handle.column in columns:
            now = f"Name them: {what}(responses, first=..., second=...)."
            raise TraceError(f"{what} got two columns named {handle.column!r}", now=now)
        else:
            placed.append((handle.column, handle.operand(inputs, f"{handle.column}=")))
    for name, value in columns.items():
        operand = as_operand(value, inputs, f"{name}=")
        if operand is None:
            raise TraceError(f"{what}({name}=...) got a {type(value).__name__}; it takes a handle, a number or a text")
        placed.append((name, operand))
    known = None if None in fields else frozenset().union(*(of for of in fields if of), (name for name, _ in placed))
    call = inputs.record(what, Placed(tuple(placed), inputs.single), gives="rows", fields=known, shown={"columns": [n for n, _ in placed]})
    return first.samples_of(call)


def narrowed(rows: Rows, to: Rows) -> Rows:
    """The rows that a more filtered handle of the same samples has."""
    inputs = Inputs(rows.session, "join")
    inputs.rows(to.ref, None, "filtered")
    inputs.rows(rows.ref, None, "rows")
    surplus = (to.fields or frozenset()) - rows.fields if rows.fields is not None else frozenset()
    call = inputs.record("join", Without(tuple(sorted(surplus))), gives="rows", fields=rows.fields, shown={"only": "rows"})
    return rows.like(call)


def brought_back(grades: Rows, prompts: Rows) -> Rows:
    """For each of the prompts' rows the mean of what was said of the samples generated from it."""
    if not isinstance(prompts, Handle):
        raise TraceError(f"back_to got {describe(prompts)}; it takes the rows that these were generated from")
    session = grades.session
    makers = session.lineage.makers(grades.ref.call)
    asked = makers[0].input("prompts") if len(makers) == 1 else None
    prompts.check(session, "back_to")
    if asked is None or session.lineage.known(asked.call).parts != session.lineage.known(prompts.ref.call).parts:
        raise TraceError(
            f"back_to got rows of {prompts.call.name} ({prompts.call.site}), and these samples were not generated from them",
            now="Pass the rows that the generate call was given, or rows of the same samples.",
        )
    if carries(makers[0].options):
        raise TraceError(
            "back_to got samples of which some were carried over, and those are of earlier prompts",
            now="Leave out late='carry' where samples are brought back to their prompts.",
        )
    inputs = Inputs(session, "back_to")
    column = grades.operand(inputs, "grades").name
    table = inputs.record("mean_by_prompt", MeanByPrompt(column), granularity=Granularity.BATCH, is_aligned=False)
    holder = grades.metrics_of(table)
    inputs = Inputs(session, "back_to")
    inputs.rows(prompts.ref, None, "rows")
    found = inputs.whole(holder.ref, None, "grades")
    return prompts.result_of(inputs.record("back_to", ByPosition(found.name), granularity=Granularity.BATCH))


def _labelled(rows: Sequence[Rows], columns: Mapping[str, object]) -> list[tuple[str, Rows]]:
    """All handles with rows among them, by what an error calls them."""
    named = [(f"{name}=", cast("Rows", value)) for name, value in columns.items() if isinstance(value, Reducible)]
    return [("rows", handle) for handle in rows] + named


def _column(name: str, operand: Operand | Elementwise, rows: Batch, values: Mapping[str, object]) -> Column:
    found = value_of(operand, rows, values)
    if isinstance(found, str):
        found = Ragged.texts([found] * len(rows))
    elif isinstance(found, bool | int | float):
        found = np.full(len(rows), found)
    if name != "prompt" or (isinstance(found, Ragged) and found.kind == "text"):
        return found
    texts = [found.item(i) for i in range(len(found))] if isinstance(found, Ragged) else list(found.tolist())
    for packed, text in zip(rows.ids.tolist(), texts, strict=True):
        if not isinstance(text, str):
            raise OpError(f"the prompt of sample {SampleId.unpack(packed)} is {text!r:.60}; it must be a text")
    return Ragged.texts([str(text) for text in texts])
