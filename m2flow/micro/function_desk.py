"""Functions: rewards and ops, on whatever is ready, as soon as a process is free.

A task takes what is ready up to the stage's chunk, and does not wait for more: while it runs, the next rows gather.
"""

from __future__ import annotations

from m2flow.micro import messages as m
from m2flow.micro.board import Board
from m2flow.micro.rollout_desk import Offer
from m2flow.micro.roster import WorkerState
from m2flow.micro.tracking import CallState

_MAX_QUEUED = 2
"""Tasks that a process has at a time: one in hand, and one to begin with at once."""


class FunctionDesk:
    """Feeds the processes that run users' functions."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def offer(self, worker: WorkerState) -> Offer | None:
        """The next task that this worker could have."""
        num_tasks = worker.num_tasks["function"]
        if num_tasks >= _MAX_QUEUED:
            return None

        def may_take(names: tuple[str, ...]) -> bool:
            return worker.name in names and num_tasks <= min(self._board.workers[name].num_tasks["function"] for name in names)

        state = self._board.functions.first(may_take)
        return None if state is None else lambda: self._start(worker, state)

    def _start(self, worker: WorkerState, state: CallState) -> None:
        rows = list(state.ready) if state.stage.is_barrier else self._next_rows(state)
        del state.ready[: len(rows)]
        self._board.bring_inputs(state, rows, worker.name)
        values = self._board.values_for(state)
        task = m.Perform(self._board.next_task(), state.call.ordinal, sorted(rows), list(state.stage.forward_to), values)  # type: ignore[arg-type]
        self._board.start(worker, "function", task)

    def _next_rows(self, state: CallState) -> list[int]:
        """Up to a chunk of ready rows, and the rest of the last one's unit."""
        chunk = 1 if state.refill is not None else state.stage.chunk  # Of a refill one group at a time, which may turn out not to count.
        rows = state.ready[:chunk]
        if state.stage.unit != "sample":
            rest = state.ready[chunk:]
            while rest and state.unit_of(rest[0]) == state.unit_of(rows[-1]):
                rows.append(rest.pop(0))
        return rows
