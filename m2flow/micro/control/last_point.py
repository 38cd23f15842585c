"""Where a run that is stopped can be saved: the last point of the program up to which all is over, and from which it can go on.

    calls, as the program makes them --SoFar--> at(number of calls that are over) -> Stand (step, versions), or None

A checkpoint that is due anyway is of the end of a step (`m2flow.micro.control.keeping`). This one may be of any place, so it must not
replace weights whose values something after it still needs: what a trainer computed with older weights (log-probabilities, a critic's
values) is in no record. Pure bookkeeping, on the flow's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, final

from m2flow.macro.graph import Call
from m2flow.micro.work.performing import gives_reward


class Stand(NamedTuple):
    """The program so far."""

    step: int
    """Of the last call that trained."""
    versions: dict[str, int]
    """Of each role's weights."""


@dataclass
class _Unrecorded:
    """Rows that a resume could only compute again with the weights of then."""

    read: list[tuple[str, int]]
    """Roles and versions."""
    is_released: bool = False
    users: list[int] = field(default_factory=list)


@final
class SoFar:
    """The program's calls, as far as they matter here."""

    def __init__(self) -> None:
        self._writes: list[tuple[int, int, str, int]] = []
        """Call, step, role and version, in program order; of what is long over, the last of each role."""
        self._unrecorded: dict[int, _Unrecorded] = {}

    def added(self, call: Call) -> None:
        for effect in call.writes if call.engine == "train" else ():
            self._writes.append((call.ordinal, call.step, call.role, effect.version))
        read = [(call.role, effect.version) for effect in call.reads] if call.engine == "train" else []
        for _, ref in call.inputs:
            if ref.call in self._unrecorded:
                self._unrecorded[ref.call].users.append(call.ordinal)
                read += self._unrecorded[ref.call].read if call.engine == "function" else []
        if call.is_aligned and not call.writes and read and not gives_reward(call):
            self._unrecorded[call.ordinal] = _Unrecorded(read)

    def released(self, ordinal: int) -> None:
        """The program can't reach a call's result any more."""
        if ordinal in self._unrecorded:
            self._unrecorded[ordinal].is_released = True

    def at(self, num_calls: int) -> Stand | None:
        """After the first so many calls; None if a run could not go on from there."""
        step, versions = self._stand(num_calls)
        for ordinal, rows in self._unrecorded.items():
            is_needed = ordinal < num_calls and self._is_needed(rows, num_calls)
            if is_needed and any(version < versions.get(role, 0) for role, version in rows.read):
                return None
        return Stand(step, versions)

    def over(self, num_calls: int) -> None:
        """The first so many calls are over; earlier points will not be asked for."""
        latest = {role: entry for entry in self._writes if entry[0] < num_calls for role in [entry[2]]}
        self._writes = sorted([*latest.values(), *(entry for entry in self._writes if entry[0] >= num_calls)])
        self._unrecorded = {
            ordinal: rows for ordinal, rows in self._unrecorded.items() if ordinal >= num_calls or self._is_needed(rows, num_calls)
        }

    def _stand(self, num_calls: int) -> tuple[int, dict[str, int]]:
        step, versions = -1, {}
        for ordinal, at_step, role, version in self._writes:
            if ordinal < num_calls:
                step, versions[role] = max(step, at_step), version
        return step, versions

    def _is_needed(self, rows: _Unrecorded, num_calls: int) -> bool:
        return not rows.is_released or any(user >= num_calls for user in rows.users)
