"""Calls that may have work to hand out, earliest in the program first, and the workers that may take it, least busy first.

Whoever makes work possible (rows that came in, a call that was waited for) says `may_start`; whoever hands work out asks for the
first that really has some. Asking costs nothing while that one has more, and does not go by the number of calls or workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import final

from m2flow.micro.scheduling.roster import WorkerState
from m2flow.micro.scheduling.tracking import CallState

MAX_QUEUED = 2
"""Tasks that a process has at a time: one in hand, and one to begin with at once."""


@final
class _Pool:
    """The workers that may run some calls, and the calls."""

    def __init__(self, workers: Iterable[WorkerState]) -> None:
        self.calls: list[tuple[int, CallState]] = []
        self._workers = {worker.place: worker for worker in workers}
        self._levels: list[list[int]] = [[] for _ in range(MAX_QUEUED)]
        """By number of tasks, places of the workers that have so many: heaps, in which some may not be there any more."""
        self._listed: list[set[int]] = [set() for _ in range(MAX_QUEUED)]
        for worker in self._workers.values():
            self.note(worker)

    def note(self, worker: WorkerState) -> None:
        """A worker has more tasks than before, or fewer."""
        level = worker.num_tasks["function"]
        if level < MAX_QUEUED and worker.place not in self._listed[level]:
            self._listed[level].add(worker.place)
            heapq.heappush(self._levels[level], worker.place)

    def least_busy(self) -> WorkerState | None:
        """Who has the fewest tasks; None if all have as many as they may."""
        for level, heap in enumerate(self._levels):
            while heap:
                worker = self._workers[heap[0]]
                if worker.num_tasks["function"] == level and not worker.is_lost:
                    return worker
                self._listed[level].discard(heapq.heappop(heap))
        return None


@final
class StartQueue:
    """The calls on functions, by the workers that may run them."""

    def __init__(self, workers: Mapping[str, WorkerState]) -> None:
        self._workers = workers
        self._pools: dict[tuple[str, ...], _Pool] = {}
        self._pools_of: dict[str, list[_Pool]] = {}
        self._queued: set[int] = set()
        self._noted: dict[str, WorkerState] = {}
        self._has_changed = False

    def may_start(self, state: CallState) -> None:
        """A call may have work now."""
        ordinal = state.call.ordinal
        self._has_changed = True
        if ordinal not in self._queued:
            self._queued.add(ordinal)
            heapq.heappush(self._pool(state.planned.workers).calls, (ordinal, state))

    def note(self, worker: WorkerState) -> None:
        """A worker has more tasks than before, or fewer; or another call takes what it makes."""
        self._has_changed = True
        self._noted[worker.name] = worker
        for pool in self._pools_of.get(worker.name, ()):
            pool.note(worker)

    def noted(self) -> WorkerState | None:
        """A worker of which something was noted, each once."""
        return self._noted.pop(next(iter(self._noted))) if self._noted else None

    def next(self) -> tuple[WorkerState, CallState] | None:
        """The earliest call with work that somebody is free for, and the least busy of those."""
        if not self._has_changed:
            return None
        found: tuple[WorkerState, CallState] | None = None
        for pool in self._pools.values():
            first = self._first(pool)
            if first is not None and (found is None or first.call.ordinal < found[1].call.ordinal):
                worker = pool.least_busy()
                found = found if worker is None else (worker, first)
        self._has_changed = found is not None
        return found

    def first(self, worker: WorkerState) -> CallState | None:
        """The earliest call with work that this worker may take; none of those for which another one is less busy."""
        found: CallState | None = None
        for pool in self._pools_of.get(worker.name, ()):
            least = pool.least_busy()
            if least is None or worker.num_tasks["function"] > least.num_tasks["function"]:
                continue
            first = self._first(pool)
            if first is not None and (found is None or first.call.ordinal < found.call.ordinal):
                found = first
        return found

    def _first(self, pool: _Pool) -> CallState | None:
        while pool.calls and (pool.calls[0][1].is_over or not pool.calls[0][1].has_function_work):
            self._queued.discard(heapq.heappop(pool.calls)[0])
        return pool.calls[0][1] if pool.calls else None

    def _pool(self, names: tuple[str, ...]) -> _Pool:
        pool = self._pools.get(names)
        if pool is None:
            workers = [self._workers[name] for name in names]
            pool = self._pools[names] = _Pool(workers)
            for name in names:
                self._pools_of.setdefault(name, []).append(pool)
        return pool
