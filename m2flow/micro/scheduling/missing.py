"""Rows that are not where they were thought to be: what a worker sends is lost with it while it is on its way.

    WorkerLost.missing --never_came--> who has what --send_again--> from another that has them, or from the ledger

Besides: how often a row was with a worker when that was lost. Pure, on the board; until a worker is lost it costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, final

from m2flow.micro import messages as m
from m2flow.micro.scheduling.events import CONTROLLER
from m2flow.micro.scheduling.roster import worker_of
from m2flow.micro.scheduling.whereabouts import Whereabouts
from m2flow.micro.work.store import stopped_at

if TYPE_CHECKING:
    from m2flow.micro.scheduling.board import Board


@final
class Missed:
    """Of one board."""

    def __init__(self, board: Board, rows: Whereabouts) -> None:
        self._board = board
        self._rows = rows
        self._num_losses: Counter[tuple[int, int]] = Counter()
        """(call, row) -> workers that were lost with it."""
        self.blamed: set[str] = set()
        """Names of calls on functions that were running when their worker was lost."""
        self.has_any = False
        """A worker was lost at some time."""

    def suspected(self, call: int, row: int) -> int:
        """A worker was lost with this row; how many have been by now."""
        self._num_losses[call, row] += 1
        return self._num_losses[call, row]

    def sent_to(self, number: int) -> Iterable[str]:
        """The workers that have what a task has sent on: of the processes that it names, those that are there still."""
        task = self._board.tasks.message(number)
        tags = task.forward_to if isinstance(task, m.Generate | m.Perform) else ()
        if not self.has_any:
            return tags
        there = [self._board.workers[worker_of(tag)] for tag in tags]
        return [worker.name for worker, tag in zip(there, tags, strict=True) if worker.tag == tag and not worker.is_lost]

    def sent_by(self, worker: str) -> dict[str, dict[int, list[int]]]:
        """The rows that a worker made which others have, as far as is known: by place and call."""
        return self._rows.sent_by(worker)

    def never_came(self, rows: Mapping[int, Sequence[int]], to: str) -> None:
        """These rows are not at a place to which they were sent."""
        for ordinal, missing in rows.items():
            self._rows.never_came(ordinal, missing, to)

    def needs(self, task: m.Task) -> list[tuple[int, int]]:
        """Call and row of all that a task takes from other calls; of a union more than there is."""
        if isinstance(task, m.Generate):
            if task.aborted_by >= 0:
                return [(stopped_at(task.aborted_by), row) for row in task.ids]
            source = self._board.calls[task.drawn_by].aligned_inputs[0]
            return [(source, row) for row in task.prompts]
        state = self._board.calls.get(task.call)
        if state is None or not isinstance(task, m.Perform | m.Accumulate):
            return []
        return [(source, row) for source in state.aligned_inputs for row in task.ids]

    def send_again(self, place: str, missing: Mapping[int, Sequence[int]]) -> None:
        """Rows that never came to a place: those that it waits for are sent again."""
        board = self._board
        wanted = {ordinal: set(rows) for ordinal, rows in missing.items()}
        if place != CONTROLLER:
            needed = {need for _, task in board.tasks.of(place) for need in self.needs(task.message)}
            wanted = {ordinal: {row for row in rows if (ordinal, row) in needed} for ordinal, rows in wanted.items()}
        for ordinal, rows in wanted.items():
            if rows and max(ordinal, stopped_at(ordinal)) in board.calls:  # Else it was forgotten meanwhile: nobody waits.
                board.bring(ordinal, sorted(rows), place)
