"""Dispatch rewards and ops on functions: on whatever rows are ready, as soon as a process is free.

A task takes what is ready up to the stage's chunk and does not wait for more: while it runs, the next rows gather. Of several workers
none takes more than its share, so that rows which come all at once are not one worker's alone.

Chained calls: a call whose input rows a worker is about to make may be sent there early, and waits for them in the worker's queue, so
that a chain of calls on the same rows needs no round trip to the controller between one and the next. That is done only where nothing is
lost by it: both calls are one task each, nobody else could begin any of the second one's rows before, and no other call waits for the
same input. After a worker was lost it is not done any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from m2flow.macro.graph import Call, Granularity
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.worker_state import WorkerState
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.state import SchedulerState
from m2flow.micro.scheduler.task_queues import MAX_QUEUED, Offer


class FunctionDispatch:
    """Dispatches calls on functions to the processes that run them."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._last: dict[str, CallState] = {}
        """Worker -> call of its last task."""

    def offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find the next task for this worker."""
        call_state = self._state.functions.first(worker)
        return None if call_state is None else lambda: self._start(worker, call_state)

    def hand_out(self) -> None:
        """Start the earliest calls with work on the workers that may take them, the least busy first."""
        self._hand_on()
        while (found := self._state.functions.next()) is not None:
            self._start(*found)
            self._hand_on()

    def _hand_on(self) -> None:
        """Give each worker whose tasks have changed the next call of its chain, unless an earlier call has work for it."""
        functions = self._state.functions
        while (worker := functions.noted()) is not None:
            while (following := self._following(worker)) is not None:
                earliest = functions.first(worker)
                if earliest is not None and earliest.call.ordinal < following.call.ordinal:
                    break
                self._give(worker, following, following.take_early())

    def _following(self, worker: WorkerState) -> CallState | None:
        """Find the next call after the worker's last task's that may wait in its queue."""
        last = self._last.get(worker.name)
        if last is None or worker.num_tasks["function"] >= MAX_QUEUED or self._state.has_losses:
            return None
        return next((user for user in last.users.values() if self._may_wait(user, worker)), None)

    def _may_wait(self, call_state: CallState, worker: WorkerState) -> bool:
        """Whether a worker may get all of a call while some of its inputs are still to be made there."""
        call, stage = call_state.call, call_state.stage
        is_plain = call.engine == "function" and not (
            call.reads or call.writes or call_state.is_union or call_state.refill or call_state.has_restored
        )
        if not is_plain or worker.name not in stage.workers or not call_state.has_all_but_rows:
            return False
        if not stage.is_barrier and len(call_state.ids) > stage.chunk:
            return False
        sources = [self._state.calls[ordinal] for ordinal in call_state.aligned_inputs]
        coming = [source for source in sources if not source.is_done]
        if not all(source.whole_at == worker.name and source.tasks_at and not source.done for source in coming):
            return False
        return len(stage.workers) == 1 or all(_comes_at_once(source) and (len(source.users) == 1 or _is_ours(call)) for source in coming)

    def _start(self, worker: WorkerState, call_state: CallState) -> None:
        if call_state.stage.state and call_state.call.writes:
            worker.states.add(call_state.stage.state)
        self._give(
            worker,
            call_state,
            self._state.hand_out(call_state, len(call_state.ready) if call_state.stage.is_barrier else self._num_next(worker, call_state)),
        )

    def _give(self, worker: WorkerState, call_state: CallState, rows: list[int]) -> None:
        is_whole = len(rows) == len(call_state.ids) and not (call_state.call.drops or call_state.refill or call_state.has_restored)
        call_state.whole_at = worker.name if is_whole else ""
        self._last[worker.name] = call_state
        self._state.bring_inputs(call_state, rows, worker.name)
        values, parts = self._state.values_for(call_state), {}
        if call_state.is_union:
            parts = {
                base: found for base in call_state.bases if (found := [row for row in sorted(rows) if call_state.part_of[row] == base])
            }
        is_suspect = call_state.call.name in self._state.blamed
        task = m.RunFunction(
            self._state.next_task(),
            call_state.call.ordinal,
            sorted(rows),
            list(call_state.stage.forward_to),
            values,  # type: ignore[arg-type]
            parts,
            is_suspect,
        )
        self._state.start(worker, "function", task)

    def _num_next(self, worker: WorkerState, call_state: CallState) -> int:
        """Count the rows of the next task: a chunk of ready rows, or a fair share of them, and the rest of the last one's unit."""
        chunk = call_state.stage.chunk
        if len(call_state.stage.workers) > 1 and not _is_ours(call_state.call):
            chunk = min(chunk, self._state.functions.share_of(worker, call_state))
        if call_state.refill is not None:
            chunk = 1  # A refill goes group by group: later ones may not be needed.
        if call_state.suspects and next(iter(call_state.ready)) in call_state.suspects:
            chunk = 1  # Alone, so that a row that ends its worker is identified.
        if call_state.stage.unit == "sample" or chunk >= len(call_state.ready):
            return min(chunk, len(call_state.ready))
        rows = itertools.islice(call_state.ready, chunk - 1, None)
        last = call_state.unit_of(next(rows))
        return chunk + sum(1 for _ in itertools.takewhile(lambda row: call_state.unit_of(row) == last, rows))


def _is_ours(call: Call) -> bool:
    """Whether a call is built-in arithmetic on columns, which takes next to no time."""
    return call.options.get("style") == "columns"


def _comes_at_once(call_state: CallState) -> bool:
    """Whether a task of this call reports all rows at its end; a slow function on samples reports some before."""
    return _is_ours(call_state.call) or call_state.call.granularity is not Granularity.SAMPLE or len(call_state.ids) == 1
