"""Rows that need not be made, because the ledger has them: of calls that an earlier process of the run left unfinished.

    Restored (the ledger's messages of then) -> done rows, at the ledger; prefixes -> only the rest is handed out

What comes before a call's rows are known waits until they are. Then it is as if a worker had said it, only that the place of the rows is
the ledger (`m2flow.micro.scheduling.events.LEDGER`), from where they are sent to whoever needs them: in the same way as rows of a
worker that was lost. Pure, on the board.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from m2flow.micro import messages as m
from m2flow.micro.scheduling.events import LEDGER, Restored
from m2flow.micro.scheduling.prefixes import prefixes_in
from m2flow.micro.work.store import stopped_at
from m2flow.samples import SampleId

if TYPE_CHECKING:
    from m2flow.micro.scheduling.board import Board
    from m2flow.micro.scheduling.tracking import CallState


@final
class Restoring:
    """What has yet to be taken in."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._waiting: dict[int, list[m.Finished | m.Flushed]] = {}

    def restore(self, event: Restored) -> None:
        """Take in what the ledger has, of calls that have been added."""
        messages: list[m.Finished | m.Flushed] = [*event.finished, *event.flushed]
        for message in messages:
            state = self._board.calls.get(message.call)
            if state is not None and state.carry is not None and state.is_done:
                self._left(state, message)
            elif state is not None and not state.is_over:
                self._waiting.setdefault(message.call, []).append(message)
                self.prepared(state)

    def prepared(self, state: CallState) -> None:
        """Perhaps a call's rows are known now."""
        if self._waiting and state.is_prepared:
            for message in self._waiting.pop(state.call.ordinal, ()):
                if not state.is_over:
                    self._take(state, message)

    def _left(self, state: CallState, message: m.Finished | m.Flushed) -> None:
        """Of samples that a call left which was over before (`m2flow.micro.scheduling.events.Recalled`)."""
        if isinstance(message, m.Flushed):
            written_down(self._board, state, LEDGER, message)
            return
        self._board.lines.finished(state, message)
        self._board.rows_done(state, LEDGER, message.ids, message.num_tokens)

    def _take(self, state: CallState, message: m.Finished | m.Flushed) -> None:
        if state.refill is not None and state.is_generation:
            state.refill.had_started(max((SampleId.unpack(packed).prompt for packed in message.ids), default=-1) + 1)
        if isinstance(message, m.Flushed):
            written_down(self._board, state, LEDGER, message)
            return
        known = set(state.ids).difference(state.done, state.dropped)
        rows = [(packed, tokens) for packed, tokens in zip(message.ids, message.num_tokens, strict=True) if packed in known]
        dropped = known.intersection(message.dropped)
        state.restored([*(packed for packed, _ in rows), *dropped])
        if state.carry is not None:
            self._board.lines.finished(state, message)
        if state.is_generation:
            self._board.handed_out(state)
            for packed, length in zip(message.ids, message.num_generated, strict=True):
                if state.placing is not None and packed in known:
                    state.placing.ended(packed, length)
        self._board.rows_done(state, LEDGER, [packed for packed, _ in rows], [tokens for _, tokens in rows], dropped)

    def unsaid(self, message: m.Finished | m.Aborted | m.Flushed) -> None:
        """What a worker that is gone had written down, and could not say any more."""
        state = self._board.calls.get(message.call)
        if state is None:
            return
        if not isinstance(message, m.Finished):
            written_down(self._board, state, LEDGER, message)
            return
        if state.carry is not None:
            self._board.lines.finished(state, message)
        self._board.rows_done(state, LEDGER, message.ids, message.num_tokens)


def written_down(board: Board, state: CallState, place: str, message: m.Flushed | m.Aborted) -> None:
    """Samples of a generation are in the ledger with their tokens so far, and at this place. What is known by now, or was said before it
    and comes after it, changes nothing."""
    if state.is_over and state.carry is None:
        return
    told = {packed: prefix for packed, prefix in prefixes_in(message).items() if packed not in state.done}
    known = state.prefixes
    prefixes = {row: new for row, new in told.items() if row not in known or not new.is_within(known[row])}
    # Whoever had stopped them before is asked for these tokens no more.
    board.perhaps_unreachable({state.prefixes[row].by for row in prefixes.keys() & state.prefixes.keys()})
    state.prefixes.update(prefixes)
    board.rows.replaced(stopped_at(state.call.ordinal), prefixes, place)
