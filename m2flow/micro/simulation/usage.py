"""What each device does when, and why it does nothing.

Devices that the same workers have are one cell. A cell works, switches, takes weights, or is idle for a cause that holds for all idle
devices of its kind at that moment, so causes are summed up once for all, and a cell's share is a difference of two sums.

    tail        (rollout) has no sample left, while others still generate; (train) waits for them
    rollout     (train) waits for samples while every instance generates
    staleness   (rollout) may not begin the next step before training is done
    reward      waits for rewards or ops
    barrier     waits for a program that waits for a value, or for other devices of its kind
    credits     the memory for samples of steps under way is used up
    switch, sync, unused, failed
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, final

from m2flow.micro.simulation.machines import Machine, kinds

State = Literal["work", "switch", "sync"]
STATES: tuple[State, ...] = ("work", "switch", "sync")
CAUSES = ("tail", "rollout", "staleness", "reward", "barrier", "credits", "switch", "sync", "unused", "failed")


@dataclass(eq=False)
class Cell:
    """Devices that the same workers have."""

    pool: str
    first: int
    num_devices: int
    workers: tuple[str, ...]
    kind: str
    """Of its engines, or of those that have the lease now: whose causes count while it is idle."""
    active: dict[State, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    """Workers that are in each state."""
    since_s: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    """Of the causes, when it became idle."""
    is_lost: bool = False

    @property
    def state(self) -> str:
        return next((state for state in STATES if self.active[state]), "idle")


@final
class Usage:
    """Sums device seconds by what devices do and why they do not."""

    def __init__(self, machines: Mapping[str, Machine], num_devices: Mapping[str, int]) -> None:
        """
        Args:
            num_devices: of each pool, those that nobody has included.
        """
        self.cells = _cells(machines, num_devices)
        self._of_worker: dict[str, list[Cell]] = {name: [] for name in machines}
        for cell in self.cells:
            for worker in cell.workers:
                self._of_worker[worker].append(cell)
        self._sums: dict[str, dict[str, float]] = {"rollout": dict.fromkeys(CAUSES, 0.0), "train": dict.fromkeys(CAUSES, 0.0)}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._now_s = 0.0

    @property
    def num_devices(self) -> int:
        return sum(cell.num_devices for cell in self.cells)

    def passed(self, now_s: float, causes: Mapping[str, str]) -> None:
        """Until now, idle devices of each kind were idle for this cause."""
        for kind, cause in causes.items():
            self._sums[kind][cause] += now_s - self._now_s
        self._now_s = now_s

    def begin(self, worker: str, state: State) -> None:
        self._change(worker, state, 1)

    def end(self, worker: str, state: State) -> None:
        self._change(worker, state, -1)

    def lost(self, worker: str) -> None:
        """The devices of a worker have failed."""
        for cell in self._of_worker[worker]:
            self._close(cell)
            cell.is_lost = True

    def came_back(self, worker: str) -> None:
        """The devices of a worker are there again."""
        for cell in self._of_worker[worker]:
            self._close(cell)
            cell.is_lost, cell.sums = False, dict(self._sums[cell.kind])

    def owned(self, worker: str, kind: str) -> None:
        """The devices of a worker belong to this kind of engine now."""
        for cell in self._of_worker[worker]:
            self._close(cell)
            cell.kind, cell.sums = kind, dict(self._sums[kind])

    def take(self) -> dict[str, float]:
        """Device seconds since the last time: `work`, and by cause."""
        for cell in self.cells:
            self._close(cell)
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)

    def _change(self, worker: str, state: State, by: int) -> None:
        for cell in self._of_worker[worker]:
            before = cell.state
            after_count = cell.active[state] + by
            if before == "idle" or after_count == 0 or STATES.index(state) < STATES.index(before):
                self._close(cell)
            cell.active[state] = after_count

    def _close(self, cell: Cell) -> None:
        """Count what a cell has done up to now, and begin anew."""
        state, passed_s = cell.state, self._now_s - cell.since_s
        cell.since_s = self._now_s
        if cell.is_lost or not cell.workers:
            self._seconds["failed" if cell.is_lost else "unused"] += passed_s * cell.num_devices
            return
        sums = self._sums[cell.kind]
        if state != "idle":
            self._seconds[state] += passed_s * cell.num_devices
        elif passed_s > 0:
            for cause, total in sums.items():
                if total > cell.sums.get(cause, 0.0):
                    self._seconds[cause] += (total - cell.sums.get(cause, 0.0)) * cell.num_devices
        cell.sums = dict(sums)


def _cells(machines: Mapping[str, Machine], num_devices: Mapping[str, int]) -> tuple[Cell, ...]:
    cells = []
    for pool in {**dict.fromkeys(num_devices), **{m.pool: None for m in machines.values() if m.place}}:
        places = [(m.place, m) for m in machines.values() if m.place is not None and m.pool == pool]
        total = max([num_devices.get(pool, 0), *[place.stop for place, _ in places]])
        edges = sorted({0, total, *[edge for place, _ in places for edge in (place.first, place.stop)]})
        spans: dict[int, list[Machine]] = {first: [] for first in edges[:-1]}
        for place, machine in places:
            for first in edges[edges.index(place.first) : edges.index(place.stop)]:
                spans[first].append(machine)
        for first, stop in itertools.pairwise(edges):
            cells.append(Cell(pool, first, stop - first, tuple(m.worker for m in spans[first]), _first_kind(spans[first])))
    return tuple(cells)


def _first_kind(machines: Iterable[Machine]) -> str:
    found = {kind for machine in machines for kind in kinds(machine)}
    return "rollout" if "rollout" in found or not found else "train"
