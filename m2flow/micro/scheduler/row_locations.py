"""Track which worker has which rows of each call's result, and send rows again that were lost in transfer.

    WorkerLost.missing --never_came--> RowLocations --send_again--> from another worker that has the rows, or from the ledger

`LostTransfers` also counts how many workers were lost with a row. Until a worker is lost it costs nothing.
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
    """Rows by call and place: a worker's name, the controller, or the ledger, which has every row that a worker reported."""

    def __init__(self) -> None:
        self._places: dict[int, dict[str, set[int]]] = {}
        self._owners: dict[int, dict[int, str]] = {}

    def made(self, call: int, rows: Iterable[int], owner: str, sent_to: Iterable[str]) -> None:
        """Record rows made at `owner` and sent from there to others."""
        owners = self._owners.get(call)
        if owners is None:
            owners = self._owners[call] = {}
        made = dict.fromkeys(rows, owner)
        owners.update(made)
        for place in dict.fromkeys((owner, *sent_to)):
            self._at(call, place).update(made)

    def introduce(self, call: int, place: str) -> None:
        """Note that a place knows the call, and must be told when to forget it."""
        self._at(call, place)

    def send(self, call: int, rows: Iterable[int], to: str) -> dict[str, list[int]]:
        """Plan the transfers that bring these rows to `to`: owner -> rows to send. They count as there from now on."""
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
        """Group these rows by the place that owns them."""
        found: dict[str, list[int]] = {}
        for row in rows:
            found.setdefault(self._owners[call][row], []).append(row)
        return found

    def lost(self, place: str) -> None:
        """Remove a lost place. Rows that it owned are taken from another place that has them, or else from the ledger."""
        for call, owners in self._owners.items():
            places = {name: rows for name, rows in self._places.get(call, {}).items() if name not in (place, CONTROLLER)}
            for row in [row for row, owner in owners.items() if owner == place]:
                owners[row] = next((name for name, rows in places.items() if row in rows), LEDGER)
        for known in self._places.values():
            known.pop(place, None)

    def replaced(self, call: int, rows: Iterable[int], owner: str) -> None:
        """Record newer versions of these rows, at `owner` and nowhere else."""
        rows = list(rows)
        for there in self._places.get(call, {}).values():
            there.difference_update(rows)
        self.made(call, rows, owner, ())

    def never_came(self, call: int, rows: Iterable[int], to: str) -> None:
        """Record that rows did not arrive where they were sent."""
        self._places.get(call, {}).get(to, set()).difference_update(rows)

    def sent_by(self, place: str) -> dict[str, dict[int, list[int]]]:
        """Find the rows owned by a place that were sent elsewhere: destination -> call -> rows."""
        found: dict[str, dict[int, list[int]]] = {}
        for call, owners in self._owners.items():
            made = {row for row, owner in owners.items() if owner == place}
            for other, rows in self._places.get(call, {}).items() if made else ():
                if other != place and (sent := made & rows):
                    found.setdefault(other, {})[call] = sorted(sent)
        return found

    def forget(self, call: int) -> list[str]:
        """Drop a call, and return the workers (and controller) that know it."""
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
    """Sends rows again that never arrived because their sender was lost, and counts the workers lost with each row."""

    def __init__(self, state: SchedulerState, rows: RowLocations) -> None:
        self._state = state
        self._rows = rows
        self._num_losses: Counter[tuple[int, int]] = Counter()
        """(call, row) -> number of workers that were lost with it."""
        self.blamed: set[str] = set()
        """Names of calls on functions that were running when their worker was lost."""
        self.has_any = False
        """Whether any worker was ever lost."""

    def suspected(self, call: int, row: int) -> int:
        """Count one more worker lost with this row, and return how many there were."""
        self._num_losses[call, row] += 1
        return self._num_losses[call, row]

    def sent_to(self, number: int) -> Iterable[str]:
        """Find the workers that have the rows a task forwarded: of the processes that it names, those still alive."""
        task = self._state.tasks.message(number)
        tags = task.forward_to if isinstance(task, m.Generate | m.RunFunction) else ()
        if not self.has_any:
            return tags
        there = [self._state.workers[worker_of(tag)] for tag in tags]
        return [worker.name for worker, tag in zip(there, tags, strict=True) if worker.tag == tag and not worker.is_lost]

    def sent_by(self, worker: str) -> dict[str, dict[int, list[int]]]:
        """Find the rows made by a worker that were sent elsewhere, as far as is known: destination -> call -> rows."""
        return self._rows.sent_by(worker)

    def never_came(self, rows: Mapping[int, Sequence[int]], to: str) -> None:
        """Record that rows did not arrive where they were sent."""
        for ordinal, missing in rows.items():
            self._rows.never_came(ordinal, missing, to)

    def needs(self, task: m.Task) -> list[tuple[int, int]]:
        """List (call, row) of all input rows of a task; for a union also rows that are in another of its inputs."""
        if isinstance(task, m.Generate):
            if task.aborted_by >= 0:
                return [(stopped_at(task.aborted_by), row) for row in task.ids]
            source = self._state.calls[task.drawn_by].aligned_inputs[0]
            return [(source, row) for row in task.prompts]
        call_state = self._state.calls.get(task.call)
        if call_state is None or not isinstance(task, m.RunFunction | m.Accumulate):
            return []
        return [(source, row) for source in call_state.aligned_inputs for row in task.ids]

    def send_again(self, place: str, missing: Mapping[int, Sequence[int]]) -> None:
        """Send rows again that never came to a place and that its tasks wait for."""
        state = self._state
        wanted = {ordinal: set(rows) for ordinal, rows in missing.items()}
        if place != CONTROLLER:
            needed = {need for _, task in state.tasks.of(place) for need in self.needs(task.message)}
            wanted = {ordinal: {row for row in rows if (ordinal, row) in needed} for ordinal, rows in wanted.items()}
        for ordinal, rows in wanted.items():
            if rows and max(ordinal, stopped_at(ordinal)) in state.calls:  # Otherwise it was forgotten meanwhile, and nobody waits.
                state.bring(ordinal, sorted(rows), place)
