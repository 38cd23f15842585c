"""Who has what of a dead worker's rows: what it had sent may have been lost on its way.

    begin --Severed--> everybody else --Missing--> answered --> done: the worker, and the rows that never came where they were sent

From its `Severed` on, a process takes nothing in of the dead one, so its answer stays true. Only when all have answered the scheduler
hears of the loss (`WorkerLost.missing`); until then it may still count on the dead, and what it tells it to send never comes either.
Limit: a process answers between two tasks, so a long one delays what waits for the lost worker. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from m2flow.micro import messages as m
from m2flow.micro.scheduling.roster import worker_of

Sent = Mapping[str, Mapping[int, Iterable[int]]]
"""Place -> call -> rows."""


@dataclass
class _Dead:
    tag: str
    waits_for: set[str]
    missing: dict[str, dict[int, list[int]]] = field(default_factory=dict)

    def add(self, place: str, call: int, rows: Iterable[int]) -> None:
        self.missing.setdefault(place, {}).setdefault(call, []).extend(rows)


@final
class Census:
    """Of all workers that are dead and not known to be lost yet."""

    def __init__(self) -> None:
        self._dead: dict[str, _Dead] = {}

    def begin(self, worker: str, tag: str, sent: Sent, others: Iterable[str]) -> dict[str, m.Severed]:
        """A worker is dead; what to tell each of the others. Those to which nothing is known to be sent need not answer."""
        asked = {name: m.Severed(tag, {call: list(rows) for call, rows in sent.get(name, {}).items()}) for name in others}
        self._dead[worker] = _Dead(tag, {name for name, message in asked.items() if message.rows})
        for dead in self._dead.values():
            dead.waits_for.discard(worker)
        return asked

    @property
    def is_open(self) -> bool:
        """Whether some answer is waited for."""
        return bool(self._dead)

    def not_sent(self, worker: str, to: str, call: int, rows: Iterable[int]) -> None:
        """A dead worker was told to send these rows."""
        self._dead[worker].add(to, call, rows)

    def told(self, worker: str, message: m.ToWorker) -> None:
        """What the scheduler tells a worker that it does not know to be dead: what that would send comes from nobody."""
        if worker in self._dead and isinstance(message, m.Push | m.Adopt):
            for tag in (message.to,) if isinstance(message, m.Push) else message.forward_to:
                self.not_sent(worker, worker_of(tag), message.call, message.ids)

    def answered(self, place: str, message: m.Missing) -> None:
        for dead in self._dead.values():
            if dead.tag == message.peer:
                dead.waits_for.discard(place)
                for call, rows in message.rows.items():
                    dead.add(place, call, rows)

    def done(self) -> Iterator[tuple[str, dict[str, dict[int, list[int]]]]]:
        """The workers of which all is known now, each once. What the scheduler says of one, before the next is asked for, may still
        count on the next: that is among what never came then."""
        while (worker := next((name for name, dead in self._dead.items() if not dead.waits_for), None)) is not None:
            yield worker, self._dead.pop(worker).missing
