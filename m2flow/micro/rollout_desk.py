"""Rollout: which samples go to which worker, and when an engine takes new weights.

An engine has one set of weights. A generate call runs only where a version of its window is held (`m2flow.micro.staleness`: one
version alone, unless the flow allows older ones). An engine takes the newest version that the trainer has, when nothing runs on it and
the earliest call with samples left may use that one. Samples of a call are shared out evenly over its workers, whole groups
together where there is room, so that a prompt is prefilled once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from m2flow.channels.weights import Manifest
from m2flow.micro import messages as m
from m2flow.micro.board import Board
from m2flow.micro.roster import WorkerState
from m2flow.micro.staleness import window
from m2flow.micro.tracking import CallState
from m2flow.samples import group_key

Offer = Callable[[], None]
"""Something that could be done now; calling it does it."""


class RolloutDesk:
    """Hands out samples, and asks for weights."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._published: dict[str, tuple[int, Manifest]] = {}
        self._publishing: set[str] = set()
        self._num_loads: dict[str, int] = {}
        self._loading: set[tuple[str, str]] = set()
        """Worker and role whose engine is told to take weights."""

    def offer(self, worker: WorkerState) -> Offer | None:
        """The next thing that this worker's rollout engines could do."""
        for role in worker.roles["rollout"]:
            found = self._offer_role(worker, role)
            if found is not None:
                return found
        return None

    def needs_loading(self, reader: CallState) -> bool:
        """Whether some rollout engine of the role still has to take weights before it can run this call."""
        role, (oldest, _) = reader.call.role, window(reader.call)
        return any(worker.held.get(role, 0) < oldest for worker in self._board.workers.values() if role in worker.roles["rollout"])

    def publish_offer(self, worker: WorkerState) -> Offer | None:
        """What this worker's trainer could lay into shared memory for others that wait for it."""
        for role in worker.roles["train"]:
            version = self._awaited(role)
            is_current = role in self._published and self._published[role][0] == version
            others = [w for w in self._board.workers.values() if role in w.roles["rollout"] and w is not worker]
            if version is None or is_current or not others or role in self._publishing or self._num_loads.get(role):
                continue
            if all(w.held.get(role, 0) >= version for w in others):
                continue
            return lambda role=role, version=version: self._publish(worker, role, version)  # type: ignore[misc]
        return None

    def published(self, role: str, version: int, manifest: Manifest) -> None:
        self._publishing.discard(role)
        self._published[role] = (version, manifest)

    def loaded(self, worker: WorkerState, message: m.LoadWeights) -> None:
        worker.held[message.role] = message.version
        self._loading.discard((worker.name, message.role))
        if message.manifest is not None:
            self._num_loads[message.role] -= 1

    def _offer_role(self, worker: WorkerState, role: str) -> Offer | None:
        first = self._first(role)
        if first is None or (worker.name, role) in self._loading:
            return None
        held = worker.held.get(role, 0)
        newest = self._loadable(worker, role, first)
        if not _may_use(first, held) or (newest > held and not worker.num_tasks["rollout"]):
            is_sure = first.is_prepared and not first.waits_for
            return self._load_offer(worker, role, newest) if newest > held and is_sure else None
        for state in self._calls(role):
            if _may_use(state, held) and state.ready and not state.waits_for:
                quota = self._quota(worker, state)
                if quota > 0:
                    return lambda state=state, quota=quota: self._hand_out(worker, state, quota)  # type: ignore[misc]
        return None

    def _calls(self, role: str) -> list[CallState]:
        return [state for state in self._board.active["rollout"] if state.call.role == role]

    def _first(self, role: str) -> CallState | None:
        """The earliest call with samples left to hand out. One that no version is there for is passed over: what it waits for may be
        what later calls make."""
        for state in self._calls(role):
            if self._has_left(state) and window(state.call)[0] <= self._board.versions.newest(role):
                return state
        return None

    def _loadable(self, worker: WorkerState, role: str, first: CallState) -> int:
        """The newest version that this worker could take now and the call may use; the one that it holds if there is none."""
        held = worker.held.get(role, 0)
        if role in worker.roles["train"]:
            found = self._board.versions.trained(role)
        else:
            found = self._published[role][0] if role in self._published else None
        return found if found is not None and found > held and _may_use(first, found) else held

    def _load_offer(self, worker: WorkerState, role: str, version: int) -> Offer | None:
        if worker.num_tasks["rollout"]:
            return None
        manifest = None if role in worker.roles["train"] else self._published[role][1]
        return lambda: self._load(worker, role, version, manifest)

    def _load(self, worker: WorkerState, role: str, version: int, manifest: Manifest | None) -> None:
        if manifest is not None:
            self._num_loads[role] = self._num_loads.get(role, 0) + 1
        self._loading.add((worker.name, role))
        self._board.start(worker, "rollout", m.LoadWeights(self._board.next_task(), -1, role, version, manifest))

    def _publish(self, worker: WorkerState, role: str, version: int) -> None:
        self._publishing.add(role)
        self._published.pop(role, None)  # The new weights are written over the old ones.
        self._board.start(worker, "train", m.PublishWeights(self._board.next_task(), -1, role, version))

    def _awaited(self, role: str) -> int | None:
        """The trainer's version, if the earliest generate call with samples left may use it."""
        first, trained = self._first(role), self._board.versions.trained(role)
        if first is None or first.waits_for or not first.is_prepared:
            return None
        return trained if trained and _may_use(first, trained) else None

    def _has_left(self, state: CallState) -> bool:
        """Whether a call has, or may yet have, samples that no worker has."""
        if state.carry is not None and state.carry.previous is not None:
            return True
        return not state.is_prepared or state.refill is not None or len(state.done) + self._num_out(state) < len(state.ids)

    def _num_out(self, state: CallState) -> int:
        """Samples of a call that workers have."""
        return sum(t.rows_left for t in self._board.tasks.values() if t.message.call == state.call.ordinal)

    def _quota(self, worker: WorkerState, state: CallState) -> int:
        """How many samples of a call this worker may take now: its even share of what is left, if there is room."""
        workers = [self._board.workers[name] for name in state.stage.workers]
        n = state.call.options["n"]
        assert isinstance(n, int)
        allowed = len(state.ids) if state.refill is None else state.refill.num_allowed * n
        left = allowed - len(state.done)
        here = sum(t.rows_left for t in self._board.tasks.values() if t.worker == worker.name and t.message.call == state.call.ordinal)
        room = state.stage.chunk - worker.num_running
        not_begun = allowed - (len(state.ids) - len(state.ready))
        return min(room, not_begun, math.ceil(left / len(workers)) - here)

    def _hand_out(self, worker: WorkerState, state: CallState, quota: int) -> None:
        rows = state.ready[:quota]
        for row in state.ready[quota:]:
            if group_key(row) != group_key(rows[-1]) or len(rows) >= state.stage.chunk:
                break
            rows.append(row)
        del state.ready[: len(rows)]
        self._board.lines.handed_out(state, rows, worker.held.get(state.call.role, 0))
        for drawn, stopped_by, together in self._board.lines.batches(state, rows):
            self._start(worker, state, together, drawn, stopped_by)

    def _start(self, worker: WorkerState, state: CallState, rows: list[int], drawn: int, stopped_by: int) -> None:
        board, prompts = self._board, []
        if stopped_by >= 0:
            board.bring_stopped(stopped_by, rows, worker.name)
        else:
            drawing = board.calls[drawn]
            prompts = drawing.prompts_of(rows)
            board.bring(drawing.aligned_inputs[0], dict.fromkeys(prompts), worker.name)
        board.introduce(drawn, worker.name)
        task = m.Generate(board.next_task(), state.call.ordinal, rows, prompts, list(state.stage.forward_to), drawn, stopped_by)
        board.start(worker, "rollout", task, rows=len(rows))


def _may_use(state: CallState, version: int) -> bool:
    oldest, newest = window(state.call)
    return oldest <= version <= newest
