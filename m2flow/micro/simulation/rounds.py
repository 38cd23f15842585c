"""Which prompts a simulated long round answers (`m2flow.macro.deferring`), and so how long its samples are: as long as they were.

Nothing computes here, so the functions that say who was late are followed by what they are told: the samples of a short round's result,
the prompts without those, slices and unions of such prompts. That a prompt's answers are as long when it is asked again is an
assumption: the reason why prompts are deferred at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from m2flow.macro.deferring import Answered, Unanswered
from m2flow.macro.graph import Call
from m2flow.macro.reductions import Positions
from m2flow.samples import SampleId


@final
class Rounds:
    """Of the lines that defer: who was answered, and who waits."""

    def __init__(self) -> None:
        self._short: dict[int, int] = {}
        """Call that drew the prompts -> the short round that they were drawn for."""
        self._prompts: dict[int, int] = {}
        """Long round -> the call that gives its prompts."""
        self._parts: dict[int, tuple[int, ...]] = {}
        """Union -> its inputs."""
        self._left: dict[int, tuple[int, ...]] = {}
        """Call that decides which rows stay -> those."""
        self._answered: dict[int, frozenset[int]] = {}
        self._asked: dict[int, list[int]] = {}
        """Long round -> its prompts' rows, in its order."""

    def made(self, call: Call) -> None:
        """The program makes a call."""
        asked = call.input("prompts")
        if call.options.get("late") == "defer" and asked is not None:
            self._short[asked.call] = call.ordinal
        elif call.options.get("is_long") and asked is not None:
            self._prompts[call.ordinal] = asked.call
        elif call.options.get("gives") == "concat":
            self._parts[call.ordinal] = tuple(ref.call for _, ref in call.inputs)

    def came_to(self, call: Call, ids: Sequence[int]) -> None:
        """A call of one value has seen these samples."""
        if isinstance(call.options.get("function"), Answered):
            self._answered[call.ordinal] = frozenset(SampleId.unpack(row).prompt for row in ids)

    def left(self, call: Call, ids: Sequence[int]) -> list[int] | None:
        """Which of these rows stay; None: that is not known from who they are."""
        function, table = call.options.get("function"), call.input("answered")
        if isinstance(function, Positions):
            found = sorted(ids)[slice(function.start, function.stop, function.step)]
        elif isinstance(function, Unanswered) and table is not None:
            found = [row for row in ids if SampleId.unpack(row).prompt not in self._answered[table.call]]
        else:
            return None
        self._left[call.ordinal] = tuple(found)
        return found

    def origin(self, packed: int) -> SampleId:
        """The sample of a short round whose length a sample has; itself, outside of long rounds."""
        who = SampleId.unpack(packed)
        if who.call not in self._prompts:
            return who
        if who.call not in self._asked:
            self._asked[who.call] = sorted(self._rows(self._prompts[who.call]))
        asked = SampleId.unpack(self._asked[who.call][who.prompt])
        return SampleId(self._short[asked.call], asked.prompt, who.index)

    def _rows(self, call: int) -> Sequence[int]:
        if call in self._parts:
            return [row for part in self._parts[call] for row in self._rows(part)]
        return self._left[call]
