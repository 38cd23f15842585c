"""The refills under way: which calls are part of each, and what they do when it is decided (`m2flow.micro.scheduling.refilling`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, final

from m2flow.errors import M2FlowError
from m2flow.micro import messages as m
from m2flow.micro.scheduling.events import Discarded
from m2flow.micro.scheduling.refilling import Refill, RefillEnd, ran_dry
from m2flow.samples import SampleId, by_group, group_key

if TYPE_CHECKING:
    from m2flow.micro.scheduling.board import Board
    from m2flow.micro.scheduling.tracking import CallState


@final
class Refills:
    """Bookkeeping on the board."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._members: dict[Refill, list[CallState]] = {}
        self._failed: dict[int, dict[int, M2FlowError]] = {}
        """Generate call -> its samples that can't be generated."""

    def join(self, state: CallState, num_candidates: int) -> Refill:
        """The refill that a call is part of: that of its input, or a new one."""
        refill = self._board.calls[state.bases[0]].refill
        count = state.call.options["refill"]
        assert isinstance(count, int)
        refill = refill or Refill(num_candidates, count)
        self._members.setdefault(refill, []).append(state)
        return refill

    def judge(self, state: CallState, rows: Iterable[int], verdict: bool | M2FlowError) -> None:
        """These candidates of a refill are kept or not, or judging them failed; end it if that decides it."""
        assert state.refill is not None
        generations = [member for member in self._members[state.refill] if member.call.engine == "rollout"]
        shares = [member.share for member in generations]
        for position in {SampleId.unpack(row).prompt for row in rows}:
            state.refill.judge(position, verdict)
        for member, share in zip(generations, shares, strict=True):
            if member.share > share or member.placing is not None:
                self._board.waking.feed_all(member)
            self._board.waking.rows_came(member)
        end = state.refill.end()
        if end is not None:
            self._end(self._members.pop(state.refill), end, state)

    def not_generated(self, state: CallState, task: m.Generate, row: int, error: M2FlowError) -> None:
        """A candidate can't be generated, which counts if it is needed. Of its task nothing was begun: those of other groups, and those
        before it, can still be."""
        if state.is_over:
            return
        row = row if row in task.ids else min(task.ids)
        self._board.give_back(state, [other for other in task.ids if group_key(other) != group_key(row) or other < row])
        self._failed.setdefault(state.call.ordinal, {})[row] = error
        self._judge_failed(state)

    def turned_out(self, state: CallState, kept: Iterable[int], dropped: Iterable[int]) -> None:
        """These rows of a call of a refill are done, or its call has dropped them."""
        self._judge_failed(state)
        for verdict, judged in ((True, kept), (False, dropped)):
            if state.call.drops and judged and not state.is_over:
                self.judge(state, judged, verdict)

    def _judge_failed(self, state: CallState) -> None:
        """Judge the groups in which a sample can't be generated and all before it have turned out: the earliest counts."""
        failed = self._failed.get(state.call.ordinal, {})
        for rows in by_group(sorted(failed)).values():
            first = rows[0]
            before = range(first - SampleId.unpack(first).index, first)
            if state.done.issuperset(before) and not state.is_over:
                self.judge(state, [first], failed[first])

    def _end(self, members: list[CallState], end: RefillEnd, judged: CallState) -> None:
        """Give up what still runs beyond what was needed, and let the calls of the refill end with what it gives."""
        self._board.commands.append(Discarded(members[0].call.ordinal, end.last))
        error = end.error
        if end.is_dry:
            judged, error = members[-1], ran_dry(members[-1].call, len(end.kept), end.last + 1)
        for member in members:
            self._failed.pop(member.call.ordinal, None)
            member.result = [row for row in member.ids if SampleId.unpack(row).prompt in end.kept]
            member.ready.clear()
            if member is judged and error is not None:
                self._board.fail(member, error)
            elif not member.is_over:
                self._board.abandon(member)
                self._board.complete(member, None)
