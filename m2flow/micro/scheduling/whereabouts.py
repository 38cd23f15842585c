"""Where the rows of each call's result are: who made them, and who else was sent them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from m2flow.micro.scheduling.events import CONTROLLER, LEDGER


@final
class Whereabouts:
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
