"""Where the rows of each call's result are, and rows that were lost on their way.

WorkerLost.missing --never_came--> who has what --send_again--> from another that has them, or from the ledger

Besides: how often a row was with a worker when that was lost. Pure, on the scheduler; until a worker is lost it costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, final

from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import CONTROLLER, LEDGER
from m2flow.micro.protocol.row_store import stopped_at
from m2flow.micro.protocol.worker_state import worker_of

if TYPE_CHECKING:
    from m2flow.micro.scheduler.state import SchedulerState


@final
class RowLocations:
    """Rows by call and place. A place is a worker's name, the controller's, or the ledger's, which has every row that a worker made."""

    def __init__(self) -> None:
        self._places: dict[int, dict[str, set[int]]] = {}
        self._owners: dict[int, dict[int, str]] = {}

    def made(self, call: int, rows: Iterable[int], owner: str, sent_to: Iterable[str]) -> None:
        """These rows are at `owner`, and on their way to the others."""
        owners = self._owners.get(call)
        if owners is None:
            owners = self._owners[call] = {}
        made = dict.fromkeys(rows, owner)
        owners.update(made)
        for place in dict.fromkeys((owner, *sent_to)):
            self._at(call, place).update(made)

    def introduce(self, call: int, place: str) -> None:
        """A place learns what the call is, and must be told when to forget that."""
        self._at(call, place)

    def send(self, call: int, rows: Iterable[int], to: str) -> dict[str, list[int]]:
        """Who has to send which of these rows, so that all are at `to`. They count as there from now on."""
        there = self._at(call, to)
        missing = [row for row in rows if row not in there]
        if not missing:
            return {}
        owners = self._owners.get(call, {})
        by_owner: dict[str, list[int]] = {}
        for row in missing:
            by_owner.setdefault(owners[row], []).append(row)
        for sent in by_owner.values():
            there.update(sent)
        return by_owner

    def owners(self, call: int, rows: Iterable[int]) -> dict[str, list[int]]:
        """Who made which of these rows."""
        found: dict[str, list[int]] = {}
        for row in rows:
            found.setdefault(self._owners[call][row], []).append(row)
        return found

    def lost(self, place: str) -> None:
        """A place is gone. Rows that it made are taken from another that has them, or else from the ledger."""
        for call, owners in self._owners.items():
            places = {name: rows for name, rows in self._places.get(call, {}).items() if name not in (place, CONTROLLER)}
            for row in [row for row, owner in owners.items() if owner == place]:
                owners[row] = next((name for name, rows in places.items() if row in rows), LEDGER)
        for known in self._places.values():
            known.pop(place, None)

    def replaced(self, call: int, rows: Iterable[int], owner: str) -> None:
        """There are newer ones of these rows, at `owner` and nowhere else."""
        rows = list(rows)
        for there in self._places.get(call, {}).values():
            there.difference_update(rows)
        self.made(call, rows, owner, ())

    def never_came(self, call: int, rows: Iterable[int], to: str) -> None:
        """These rows are not at a place to which they were sent."""
        self._places.get(call, {}).get(to, set()).difference_update(rows)

    def sent_by(self, place: str) -> dict[str, dict[int, list[int]]]:
        """The rows that a place made which others have, as far as is known: by place and call."""
        found: dict[str, dict[int, list[int]]] = {}
        for call, owners in self._owners.items():
            made = {row for row, owner in owners.items() if owner == place}
            for other, rows in self._places.get(call, {}).items() if made else ():
                if other != place and (sent := made & rows):
                    found.setdefault(other, {})[call] = sorted(sent)
        return found

    def forget(self, call: int) -> list[str]:
        """Drop a call; the workers that know of it, and the controller if it does."""
        self._owners.pop(call, None)
        return [place for place in self._places.pop(call, {}) if place != LEDGER]

    def _at(self, call: int, place: str) -> set[int]:
        places = self._places.get(call)
        if places is None:
            places = self._places[call] = {}
        there = places.get(place)
        if there is None:
            there = places[place] = set()
        return there


@final
class LostTransfers:
    """Of one scheduler."""

    def __init__(self, scheduler: SchedulerState, rows: RowLocations) -> None:
        self._state = scheduler
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
        task = self._state.tasks.message(number)
        tags = task.forward_to if isinstance(task, m.Generate | m.RunFunction) else ()
        if not self.has_any:
            return tags
        there = [self._state.workers[worker_of(tag)] for tag in tags]
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
            source = self._state.calls[task.drawn_by].aligned_inputs[0]
            return [(source, row) for row in task.prompts]
        state = self._state.calls.get(task.call)
        if state is None or not isinstance(task, m.RunFunction | m.Accumulate):
            return []
        return [(source, row) for source in state.aligned_inputs for row in task.ids]

    def send_again(self, place: str, missing: Mapping[int, Sequence[int]]) -> None:
        """Rows that never came to a place: those that it waits for are sent again."""
        scheduler = self._state
        wanted = {ordinal: set(rows) for ordinal, rows in missing.items()}
        if place != CONTROLLER:
            needed = {need for _, task in scheduler.tasks.of(place) for need in self.needs(task.message)}
            wanted = {ordinal: {row for row in rows if (ordinal, row) in needed} for ordinal, rows in wanted.items()}
        for ordinal, rows in wanted.items():
            if rows and max(ordinal, stopped_at(ordinal)) in scheduler.calls:  # Else it was forgotten meanwhile: nobody waits.
                scheduler.bring(ordinal, sorted(rows), place)
