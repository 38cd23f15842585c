"""The run is asked to stop: the updates that have begun are finished, with what they need, and everything else is given up.

An update that has begun has consumed samples and changed the trainer's gradient; what has not begun is found by a resume as it was, and
samples that run are stopped and written down, so that they go on from there.
Pure, on the board.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from m2flow.errors import RunInterrupted

if TYPE_CHECKING:
    from m2flow.micro.scheduling.board import Board
    from m2flow.micro.scheduling.tracking import CallState


def wind_down(board: Board) -> None:
    """Give up what no update that has begun needs."""
    needed: set[int] = set()
    todo = [state for state in board.active.values() if state.update is not None and state.update.has_begun]
    while todo:
        state = todo.pop()
        if state.call.ordinal not in needed:
            needed.add(state.call.ordinal)
            todo += _needs(board, state)
    for state in list(board.active.values()):
        if state.call.ordinal not in needed and not state.is_over:
            board.fail(state, RunInterrupted("the run was asked to stop", where=state.call.site.describe()))


def _needs(board: Board, state: CallState) -> list[CallState]:
    """The calls, not over, that a call waits for."""
    inputs = {ref.call for _, ref in state.call.inputs}
    return [board.active[ordinal] for ordinal in inputs | state.waits_for | set(state.aligned_inputs) if ordinal in board.active]
