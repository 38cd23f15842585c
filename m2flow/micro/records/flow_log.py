"""Order the logs of a flow as sequential execution would write them, and write none after a step that failed.

    log(loss=metrics["loss"]) --add--> FlowLog --write_due--> the journal

The program may run steps ahead of the work. A log is written when its number is known, all logs before it are written or will never have a
number, every call of the steps that had ended before it has ended well, and so has every call before it that has an effect. So a failed
run leaves the logs that sequential execution leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

from m2flow.errors import M2FlowError


@dataclass(frozen=True)
class Logged:
    """A `log` of the flow: a field of a call's result, or a number."""

    step: int
    name: str
    source: tuple[int, str | None] | float
    num_before: int
    """Calls of the steps that had ended before it."""
    num_calls: int = 0
    """Calls before it."""
    where: str = ""
    """The line of the flow."""


class Results(Protocol):
    """The states and results of calls."""

    def is_resolved(self, ordinal: int) -> bool:
        """Whether the call has its value."""

    def has_failed(self, ordinal: int) -> bool: ...

    def are_well(self, num_calls: int) -> bool:
        """Whether the first `num_calls` calls of the program have all ended well."""

    def are_effects_over(self, num_calls: int) -> bool:
        """Whether those of the first `num_calls` calls that have an effect are over."""

    def has_lost_effect(self, num_calls: int) -> bool:
        """Whether one of the first `num_calls` calls has failed that has an effect."""

    def number(self, ordinal: int, name: str | None) -> float:
        """Raises TraceError: there is no such number."""


@dataclass(eq=False)
class _Entry:
    log: Logged
    number: float | None = None
    error: M2FlowError | None = None
    has_none: bool = False
    """Its call failed, so it will never have a number."""

    @property
    def is_settled(self) -> bool:
        return self.has_none or self.number is not None or self.error is not None


@final
class FlowLog:
    """Logs of one run in program order, written as soon as they are due."""

    def __init__(self, results: Results, write: Callable[[int, str, float], None]) -> None:
        self._results = results
        self._write = write
        self._entries: deque[_Entry] = deque()
        self._waiting: dict[int, list[_Entry]] = {}
        """Call -> the logs that wait for its result."""

    def add(self, log: Logged) -> None:
        entry = _Entry(log)
        self._entries.append(entry)
        if isinstance(log.source, float):
            entry.number = log.source
        else:
            self._waiting.setdefault(log.source[0], []).append(entry)
            self.call_ended(log.source[0])
        self.write_due()

    def call_ended(self, ordinal: int) -> None:
        """Settle the logs of a call that may have ended, well or not; its value must still be readable."""
        if ordinal not in self._waiting or not (self._results.is_resolved(ordinal) or self._results.has_failed(ordinal)):
            return
        for entry in self._waiting.pop(ordinal):
            if self._results.has_failed(ordinal):
                entry.has_none = True
                continue
            assert not isinstance(entry.log.source, float)
            try:
                entry.number = self._results.number(*entry.log.source)
            except M2FlowError as error:
                entry.error = error.located(entry.log.where)

    def write_due(self) -> None:
        """Write the logs that are due.

        Raises:
            TraceError: a log names a number that its call does not have.
        """
        while self._entries and self._is_due(self._entries[0]):
            entry = self._entries.popleft()
            if self._results.has_lost_effect(entry.log.num_calls):
                continue
            if entry.error is not None:
                raise entry.error
            if entry.number is not None:
                self._write(entry.log.step, entry.log.name, entry.number)

    def _is_due(self, entry: _Entry) -> bool:
        results, log = self._results, entry.log
        return entry.is_settled and results.are_well(log.num_before) and results.are_effects_over(log.num_calls)
