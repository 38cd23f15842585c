"""Rows of text in columns of equal width, as plans print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def in_columns(rows: Iterable[Sequence[object]]) -> list[str]:
    """A line a row, indented.

    >>> in_columns([("a", 1), ("bcd", 22)])
    ['  a    1', '  bcd  22']
    """
    cells = [tuple(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
