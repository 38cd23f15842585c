"""Who may have something new to do after an event, so that nobody else is asked.

    the board says what changed --Waking--> the workers to ask, in the order of the plan

A worker is asked when something of its own changed (a row or a task of it ended, it took weights), when a role that it hosts did
(a generation may begin or is all handed out, there is a new version), or when rows came that it may take. Rows that come one by one
are offered to workers that still want some, and not again to those that wanted none: such a worker is sated of that call until
something of its own changes. So what an event costs does not go by the number of workers, calls or rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import final

from m2flow.micro.scheduling.roster import WorkerState
from m2flow.micro.scheduling.tracking import CallState


@final
class Waking:
    """The workers that are to be asked."""

    def __init__(self, workers: Mapping[str, WorkerState]) -> None:
        self._workers = list(workers.values())
        self._hosts: dict[tuple[str, str], list[WorkerState]] = {}
        """(kind, role) -> who has such an engine."""
        for worker in self._workers:
            for kind, roles in worker.roles.items():
                for role in roles:
                    self._hosts.setdefault((kind, role), []).append(worker)
        self._trainers = [worker for worker in self._workers if worker.roles["train"]]
        self._awake: list[int] = []
        self._is_awake = [False] * len(self._workers)
        self._came: dict[int, CallState] = {}
        """Generations whose rows may be handed out now."""
        self._offered: tuple[CallState, WorkerState] | None = None

    def hosts(self, kind: str, role: str) -> list[WorkerState]:
        """The workers that have a role's engine of this kind."""
        return self._hosts.get((kind, role), [])

    def has_others(self, kind: str, role: str, than: WorkerState) -> bool:
        """Whether another worker has such an engine too."""
        hosts = self._hosts.get((kind, role), [])
        return len(hosts) > 1 or (len(hosts) == 1 and hosts[0] is not than)

    def wake(self, worker: WorkerState) -> None:
        """Something of this worker's own changed."""
        if not self._is_awake[worker.place]:
            self._is_awake[worker.place] = True
            heapq.heappush(self._awake, worker.place)
        if worker.sated_of:
            for state in worker.sated_of:
                if worker.place in state.sated:
                    state.sated.discard(worker.place)
                    heapq.heappush(state.hungry, worker.place)
            worker.sated_of.clear()

    def passed_over(self, worker: WorkerState) -> None:
        """A worker whose turn it was not was asked, and others took what there was: it is asked again when there is more."""
        left = [state for state in worker.sated_of if worker.place in state.sated]
        worker.sated_of = [state for state in left if state.has_rows_to_begin]
        for state in left:
            if not state.has_rows_to_begin and worker.place in state.sated:
                state.sated.discard(worker.place)
                heapq.heappush(state.hungry, worker.place)

    def wake_all(self, workers: Iterable[WorkerState]) -> None:
        for worker in workers:
            self.wake(worker)

    def wake_role(self, role: str) -> None:
        """Another version of the role's weights is there, or another of its generations is the earliest to begin."""
        self.wake_all(self.hosts("rollout", role))
        self.wake_all(self.hosts("train", role))

    def wake_trainers(self, role: str | None = None) -> None:
        """Those of a role, or all."""
        self.wake_all(self._trainers if role is None else self.hosts("train", role))

    def rows_came(self, state: CallState) -> None:
        """Rows of a generation may be handed out."""
        self._came[state.call.ordinal] = state

    def feed_all(self, state: CallState) -> None:
        """Everybody may want rows of this generation."""
        state.hungry = [worker.place for worker in self.hosts("rollout", state.call.role)]
        state.sated.clear()

    @property
    def has_any(self) -> bool:
        """Whether somebody may have to be asked."""
        return bool(self._awake or self._came)

    def next(self) -> WorkerState | None:
        """Who is to be asked now; what it was given is in the states when this is called again."""
        if self._offered is not None:
            state, worker = self._offered
            self._offered = None
            if state.has_rows_to_begin:
                state.sated.add(worker.place)
                worker.sated_of.append(state)
            else:
                heapq.heappush(state.hungry, worker.place)
        if self._awake:
            place = heapq.heappop(self._awake)
            self._is_awake[place] = False
            return self._workers[place]
        while self._came:
            ordinal, state = next(iter(self._came.items()))
            if state.hungry and state.has_rows_to_begin:
                self._offered = state, self._workers[heapq.heappop(state.hungry)]
                return self._offered[1]
            del self._came[ordinal]
        return None
