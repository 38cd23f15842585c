"""Make tables of columns as Arrow, and hand them on as pandas, polars or Arrow itself, whichever is asked for and installed.

    name -> column --frame_of--> pyarrow.Table --> pandas.DataFrame | polars.DataFrame

None of the three is a dependency of m2flow; the extra `frames` brings Arrow and pandas.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from m2flow.errors import MissingExtra, did_you_mean
from m2flow.errors import OptionError as WrongOption

FrameKind = Literal["pandas", "polars", "arrow"]


def frame_of(columns: Mapping[str, Sequence[object]], kind: FrameKind | None = None) -> Any:
    """Make a table of columns of the same length. None in a column is a null.

    Args:
        kind: `pandas`, `polars`, or `arrow` (a `pyarrow.Table`); None: pandas if it is installed, else polars.
    Raises:
        OptionError: there is no such kind. MissingExtra: a package is not installed; the error says how to install it.
    """
    known = get_args(FrameKind)
    if kind is not None and kind not in known:
        raise WrongOption(f"frame={kind!r:.40} is no kind of table", now=did_you_mean(str(kind), known))
    chosen = kind or next((name for name in ("pandas", "polars") if importlib.util.find_spec(name)), None)
    if chosen is None:
        raise MissingExtra("a table needs pandas or polars, and neither is installed", now="pip install 'm2flow[frames]'")
    arrow, package = _package("pyarrow"), _package(chosen) if chosen != "arrow" else None
    table = arrow.table({name: _array(arrow, values) for name, values in columns.items()})
    if chosen == "pandas":
        return table.to_pandas()
    return table if package is None else package.from_arrow(table)


def _package(name: str) -> Any:
    """Import a package of the extra `frames`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        extra = "pip install polars pyarrow" if name == "polars" else "pip install 'm2flow[frames]'"
        raise MissingExtra(f"a table needs the package {name}, which is not installed", now=extra) from None


def _array(arrow: Any, values: Sequence[object]) -> Any:
    """A column; one of mixed numbers is of floats, and whatever Arrow has no type for is text."""
    try:
        return arrow.array(values)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError):
        if all(value is None or isinstance(value, bool | int | float) for value in values):
            return arrow.array([None if value is None else float(value) for value in values])  # type: ignore[arg-type]
        return arrow.array([None if value is None else str(value) for value in values])
