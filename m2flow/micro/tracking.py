"""What a call still waits for: which of its units have all their inputs, and which of its rows are done.

A unit is the smallest set of rows that a task of the call may have: a sample, a group, or everything. It is ready when each of its
rows has come in from each aligned input. Pure bookkeeping; the decisions are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from m2flow.macro.graph import Call
from m2flow.micro.plan import Stage
from m2flow.micro.updating import UpdateProgress
from m2flow.samples import group_key

_EVERYTHING = -1


@dataclass(eq=False)
class CallState:
    """One call under way."""

    call: Call
    stage: Stage
    ids: list[int]
    """Every row that it works on, in the order of identity."""
    waits_for: set[int]
    """Calls that must be done before it may start: whole values, and effects."""
    aligned_inputs: tuple[int, ...]
    """Calls whose rows it takes as they come."""
    update: UpdateProgress | None = None
    units: dict[int, tuple[int, ...]] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    """Unit -> rows of inputs still to come."""
    ready: list[int] = field(default_factory=list)
    """Rows of complete units that no task has yet, in the order in which they came."""
    done: set[int] = field(default_factory=set)
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of each row, of this call's result or, for a call without tokens, of its input's."""
    is_done: bool = False
    is_failed: bool = False
    is_released: bool = False
    _by_prompt: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _prompt_of: dict[int, int] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.is_done or self.is_failed

    def arrived(self, ids: Iterable[int], num_tokens: Mapping[int, int]) -> None:
        """These rows of one aligned input are there."""
        for row in ids:
            if self.call.engine == "rollout":
                self.ready.extend(self._by_prompt[row])
                continue
            self.num_tokens[row] = max(num_tokens.get(row, 0), self.num_tokens.get(row, 0))
            unit = self._unit_of(row)
            self.missing[unit] -= 1
            if self.missing[unit] == 0:
                self._complete(unit)

    def _complete(self, unit: int) -> None:
        rows = self.units[unit]
        if self.update is not None:
            self.update.add(unit, sum(self.num_tokens[row] for row in rows))
        else:
            self.ready.extend(rows)

    def _unit_of(self, row: int) -> int:
        if self.update is not None or self.stage.unit == "group":
            return group_key(row)
        return row if self.stage.unit == "sample" else _EVERYTHING

    def prepare(self, prompts: Sequence[int]) -> None:
        """Set up the units, and for a generation which rows come from which prompt."""
        if self.call.engine == "rollout":
            n = len(self.ids) // max(len(prompts), 1)
            self._by_prompt = {p: tuple(self.ids[k * n : k * n + n]) for k, p in enumerate(prompts)}
            self._prompt_of = {row: p for p, rows in self._by_prompt.items() for row in rows}
            return
        units: dict[int, list[int]] = {}
        for row in self.ids:
            units.setdefault(self._unit_of(row), []).append(row)
        self.units = {unit: tuple(rows) for unit, rows in units.items()}
        self.missing = {unit: len(rows) * len(self.aligned_inputs) for unit, rows in self.units.items()}

    def prompts_of(self, rows: Iterable[int]) -> list[int]:
        return [self._prompt_of[row] for row in rows]
