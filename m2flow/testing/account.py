"""What a random program counts for itself while it runs, to hold against what the runtime made of it.

    Interpreter --generated, updated, lagged--> Account --wrong--> nothing, or what is not as the program says

The session stamps calls with versions and finds the calls of earlier steps; if it counted wrongly, it would do so in eager and planned
runs alike, and they would agree. So a program counts again, with nothing but its own text: the updates of each policy, by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from m2flow.samples import SampleId
from m2flow.testing.answers import Answer


@dataclass
class Account:
    """One run of a program; the next run begins anew."""

    windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Generate call -> the oldest and the newest version that it may use."""
    lags: list[tuple[int | None, object]] = field(default_factory=list)
    """Looks at an earlier step's metrics, in program order: the update whose they should be (None: none), and what they were."""
    _updates: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """(policy, step) -> its updates there."""
    _place_of: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """Update -> policy, step, how many of that policy came before it in the step."""
    _num_updates: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)
    _lines: dict[int, str] = field(default_factory=dict)
    """Generate call that carries what is late -> the policy, whose next one goes on with it."""

    def begin(self) -> None:
        """A run of the program begins."""
        for kept in (self.windows, self.lags, self._updates, self._place_of, self._num_updates, self._before, self._lines):
            kept.clear()

    def loop_begins(self) -> None:
        """What was trained before the loop is no older version of anything."""
        self._before = dict(self._num_updates)

    def generated(self, policy: str, call: int, staleness: int, *, carries: bool = False) -> None:
        if carries:
            self._lines[call] = policy
        newest = self._num_updates.get(policy, 0)
        self.windows[call] = max(newest - staleness, min(self._before.get(policy, 0), newest)), newest

    def updated(self, policy: str, call: int, step: int) -> None:
        self._num_updates[policy] = self._num_updates.get(policy, 0) + 1
        there = self._updates.setdefault((policy, step), [])
        self._place_of[call] = policy, step, len(there)
        there.append(call)

    def lagged(self, call: int, steps: int, seen: object) -> None:
        """The program looked at the metrics of as many steps before this update."""
        policy, step, place = self._place_of[call]
        there = self._updates.get((policy, step - steps), []) if step >= steps else []
        self.lags.append((there[place] if step >= 0 and place < len(there) else None, seen))

    def wrong(self, answer: Answer, value: Callable[[int], object] | None = None) -> str | None:
        """What of an answer is not as the program says, in words. With `value`, what each call came to, lagged ones too."""
        for packed, (_, versions) in answer.samples.items():
            decision = answer.decisions.get(packed)
            drawn = SampleId.unpack(packed).call
            giver = drawn if decision is None else decision.call
            if giver != drawn and (giver < drawn or self._lines.get(giver) is None or self._lines.get(giver) != self._lines.get(drawn)):
                return f"a sample of call {drawn} was given by call {giver}, which does not carry its line on"
            oldest, newest = self.windows[giver]
            used = {version for version in versions if version >= 0}
            if used and not (oldest <= min(used) and max(used) <= newest):
                return f"a sample of call {giver} has tokens of versions {used}, and may have {oldest} to {newest}"
        for expected, seen in self.lags:
            if (expected is None) != (seen is None) or (value is not None and expected is not None and seen != value(expected)):
                return f"lagged gave {seen}, which is not what call {expected} came to"
        return None
