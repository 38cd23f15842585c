"""Functions: rewards and ops, on whatever is ready, as soon as a process is free.

A task takes what is ready up to the stage's chunk, and does not wait for more: while it runs, the next rows gather.
"""

from __future__ import annotations

import itertools

from m2flow.micro import messages as m
from m2flow.micro.scheduling.board import Board
from m2flow.micro.scheduling.rollout_desk import Offer
from m2flow.micro.scheduling.roster import WorkerState
from m2flow.micro.scheduling.tracking import CallState


class FunctionDesk:
    """Feeds the processes that run users' functions."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def offer(self, worker: WorkerState) -> Offer | None:
        """The next task that this worker could have."""
        state = self._board.functions.first(worker)
        return None if state is None else lambda: self._start(worker, state)

    def hand_out(self) -> None:
        """Give the earliest calls with work to whoever may take it, the least busy first."""
        while (found := self._board.functions.next()) is not None:
            self._start(*found)

    def _start(self, worker: WorkerState, state: CallState) -> None:
        if state.stage.state and state.call.writes:
            worker.states.add(state.stage.state)
        rows = self._board.hand_out(state, len(state.ready) if state.stage.is_barrier else self._num_next(state))
        self._board.bring_inputs(state, rows, worker.name)
        values, parts = self._board.values_for(state), {}
        if state.is_union:
            parts = {base: found for base in state.bases if (found := [row for row in sorted(rows) if state.part_of[row] == base])}
        task = m.Perform(self._board.next_task(), state.call.ordinal, sorted(rows), list(state.stage.forward_to), values, parts)  # type: ignore[arg-type]
        self._board.start(worker, "function", task)

    def _num_next(self, state: CallState) -> int:
        """Up to a chunk of ready rows, and the rest of the last one's unit."""
        chunk = 1 if state.refill is not None else state.stage.chunk  # Of a refill one group at a time, which may turn out not to count.
        if state.suspects and next(iter(state.ready)) in state.suspects:
            chunk = 1  # By itself, so that if it is at fault it is known.
        if state.stage.unit == "sample" or chunk >= len(state.ready):
            return min(chunk, len(state.ready))
        rows = itertools.islice(state.ready, chunk - 1, None)
        last = state.unit_of(next(rows))
        return chunk + sum(1 for _ in itertools.takewhile(lambda row: state.unit_of(row) == last, rows))
