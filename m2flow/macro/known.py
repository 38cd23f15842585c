"""What is known of values before anything has run: assumed on the command line, taken from an earlier run, or plain from the calls."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from m2flow.errors import OptionError
from m2flow.macro.graph import Call, Site
from m2flow.macro.recording import Record
from m2flow.samples import Batch


@dataclass(frozen=True)
class Assumption:
    """`--assume NUMBER`, `--assume NAME=NUMBER` or `--assume FILE:LINE=NUMBER`."""

    value: float
    name: str = ""
    line: str = ""

    @classmethod
    def parse(cls, text: str) -> Assumption:
        """Raises OptionError: the text is none."""
        target, _, number = text.rpartition("=")
        try:
            value = float({"true": "1", "false": "0"}.get(number.strip().lower(), number))
        except ValueError:
            raise OptionError(f"--assume {text}: {number!r} is no number", now="Write 0.5, reward=0.5 or flows/x.py:31=0.5.") from None
        is_line = target.rpartition(":")[2].isdigit()
        return cls(value, "" if is_line else target.strip(), target.strip() if is_line else "")

    def holds_for(self, names: Sequence[str], site: Site) -> bool:
        if self.line:
            return f"/{site}".endswith(f"/{self.line.removeprefix('./')}")
        return not self.name or self.name in names

    def __str__(self) -> str:
        target = self.name or self.line
        return f"--assume {target}={self.value:g}" if target else f"--assume {self.value:g}"


@dataclass(frozen=True)
class Known:
    """What is said of values beforehand."""

    assumptions: Sequence[Assumption] = ()
    record: Record | None = None
    record_name: str = "the earlier run"


class Earlier:
    """What calls at the same place of the program came to in an earlier run."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._places: dict[tuple[str, str, int], list[int]] = {}
        for call in record.calls:
            self._places.setdefault((call.name, call.text, call.step), []).append(call.ordinal)

    def value(self, call: Call, calls: Sequence[Call]) -> object:
        """None if it has none."""
        place = (call.name, call.site.text, call.step)
        count = sum((other.name, other.site.text, other.step) == place for other in calls[: call.ordinal])
        there = self._places.get(place, [])
        with contextlib.suppress(KeyError):
            return self._record.value(there[count]) if count < len(there) else None
        return None


def num_rows(call: Call, calls: Sequence[Call]) -> int | None:
    """Rows of a call's result, where that is known without running it."""
    rows = call.options.get("rows")
    if isinstance(rows, Batch):
        return len(rows)
    if not call.inputs or call.options.get("gives") in ("kept", "concat"):
        return None
    base, n = num_rows(calls[call.inputs[0][1].call], calls), call.options.get("n", 1)
    return base * n if base is not None and isinstance(n, int) and call.engine in ("rollout", "function", "train") else None
