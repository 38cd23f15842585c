"""Recover from lost workers, and restore rows of an earlier process: from the ledger, which has every row that a worker has reported.

    WorkerLost --Recovery--> rows of its tasks are ready again, samples continue from their prefixes; its rows are taken from elsewhere
    WorkerJoined --join--> it is offered work again, and rows are sent there again
    Restored (what the ledger recorded) -> done rows, at the ledger; prefixes -> only the rest is handed out

Samples and functions' rows are in segment files, rewards as numbers; so nothing that was reported is made again, also of a call that is
over.

What can't be recovered (`StateLost`): a trainer's weights, a role's state, and weights that a generation still needs. The run also ends
(`WorkerError`) when nobody is left to run a call, or will be restarted to, and when one worker after the other was lost with the same rows.

Restored rows are treated as if a worker had just reported them, except that their place is the ledger
(`m2flow.micro.protocol.events.LEDGER`), from which they are sent to whoever needs them. What is restored of a call before its rows are
known waits until they are. Rows that were lost in transfer are sent again, from another worker that has them or from the ledger. Until a
worker is lost all this costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import msgspec

from m2flow.errors import StateLost, WorkerError
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import CONTROLLER, LEDGER, Restored, WorkerLost
from m2flow.micro.protocol.plan import Stage
from m2flow.micro.protocol.worker_state import instance_of, stopped_at, worker_of
from m2flow.micro.scheduler.call_state import prefixes_in
from m2flow.samples import SampleId

if TYPE_CHECKING:
    from m2flow.micro.protocol.worker_state import TaskState, WorkerState
    from m2flow.micro.scheduler.call_state import CallState
    from m2flow.micro.scheduler.state import SchedulerState


class RowsReport(NamedTuple):
    """Rows of a call that count as done from now on (`CallLifecycle.rows_done`)."""

    call_state: CallState
    place: str
    ids: Sequence[int]
    num_tokens: Sequence[int]
    dropped: Iterable[int] = ()
    num_generated: Sequence[int] = ()
    """Generated tokens of each row, for the scheduling policy of its call."""


@final
class Recovery:
    """Takes in what the ledger has of calls, and says which rows are done by that; recovers from the loss of workers."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    # ---- what the ledger has

    def restore(self, event: Restored) -> Iterator[RowsReport]:
        """Take in what the ledger has of calls that have been added."""
        messages: list[m.Finished | m.Flushed] = [*event.finished, *event.flushed]
        for message in messages:
            call_state = self._state.calls.get(message.call)
            if call_state is not None and call_state.carry is not None and call_state.is_done:
                yield from self._take_late(call_state, message)
            elif call_state is not None and not call_state.is_over:
                self._state.recorded.setdefault(message.call, []).append(message)
                yield from self.prepared(call_state)

    def prepared(self, call_state: CallState) -> Iterator[RowsReport]:
        """Take in what waits for a call's rows, if they are known now; for rows to come it waits on."""
        recorded, ordinal = self._state.recorded, call_state.call.ordinal
        if recorded and call_state.is_prepared:
            for message in recorded.pop(ordinal, ()) if call_state.coming is None else recorded.get(ordinal, ()):
                if not call_state.is_over:
                    yield from self._take(call_state, message)

    def _take_late(self, call_state: CallState, message: m.Finished | m.Flushed) -> Iterator[RowsReport]:
        """Take in samples left by a call that was over before (`m2flow.micro.protocol.events.Recalled`)."""
        if isinstance(message, m.Flushed):
            record_prefixes(self._state, call_state, LEDGER, message)
            return
        assert call_state.carry is not None
        call_state.carry.finished(message)
        yield RowsReport(call_state, LEDGER, message.ids, message.num_tokens)

    def _take(self, call_state: CallState, message: m.Finished | m.Flushed) -> Iterator[RowsReport]:
        if call_state.refill is not None and call_state.is_generation:
            call_state.refill.resume_at(max((SampleId.unpack(packed).prompt for packed in message.ids), default=-1) + 1)
        if isinstance(message, m.Flushed):
            record_prefixes(self._state, call_state, LEDGER, message)
            return
        known = set(call_state.ids).difference(call_state.done, call_state.dropped)
        numbers = zip(message.ids, message.num_tokens, message.num_generated, strict=True)
        rows = [(packed, tokens, generated) for packed, tokens, generated in numbers if packed in known]
        ids, num_tokens, num_generated = ([row[column] for row in rows] for column in range(3))
        dropped = known.intersection(message.dropped)
        call_state.restored([*ids, *dropped])
        if call_state.carry is not None:
            call_state.carry.finished(message)
        if call_state.is_generation:
            self._state.handed_out(call_state)
        yield RowsReport(call_state, LEDGER, ids, num_tokens, dropped, num_generated)

    def unreported(self, message: m.Finished | m.Aborted | m.Flushed) -> Iterator[RowsReport]:
        """Take in what a lost worker had written to the ledger but not reported."""
        call_state = self._state.calls.get(message.call)
        if call_state is None:
            return
        if not isinstance(message, m.Finished):
            record_prefixes(self._state, call_state, LEDGER, message)
            return
        if call_state.carry is not None:
            call_state.carry.finished(message)
        yield RowsReport(call_state, LEDGER, message.ids, message.num_tokens)

    # ---- lost workers

    def lost(self, event: WorkerLost) -> bool:
        """Record that a worker is lost, and leave it out of the stages of calls; return whether that is news.

        Raises:
            StateLost: it had state that no other has.
            WorkerError: nobody else can run its calls.
        """
        state, name = self._state, event.worker
        worker = state.workers[name]
        was_lost, worker.returns = worker.is_lost, event.returns
        worker.is_lost = state.has_losses = True
        _check_recoverable(worker, event)
        for call_state in state.calls.values():
            if name in call_state.planned.workers or name in call_state.planned.forward_to:
                remove_lost_workers(state, call_state)
        _check_speakers(state, worker)
        if not was_lost:
            state.engines_changed()
        return not was_lost

    def requeue_tasks(self, event: WorkerLost) -> Iterator[m.Task]:
        """End the tasks of a lost worker, requeue their rows that are not done, and yield each.

        Raises:
            WorkerError: too many workers were lost with one of the rows.
        """
        state, name = self._state, event.worker
        for place, rows in event.missing.items():
            self.never_came(rows, place)
        state.rows.lost(name)  # Before tasks end: whoever takes them over must know where rows are.
        for task in _suspected_tasks(state, name):
            _count_losses(state, task, event, task.rows)
        for number, task in state.tasks.of(name):
            _requeue_task(state, number, task)
            yield task.message
        for number, task in state.tasks.spoken_by(name):
            self._silenced(number, task, event)

    def _silenced(self, number: int, task: TaskState, event: WorkerLost) -> None:
        """Have the samples of a task go on elsewhere in whose episodes a lost worker was to speak."""
        state, message = self._state, task.message
        assert isinstance(message, m.Generate)
        tag = state.workers[event.worker].tag
        heard = [tags for tags in message.speakers.values() if tag in tags]
        rows = [row for row in task.rows if any(instance_of(row, tags) == tag for tags in heard)]
        if rows:
            _count_losses(state, task, event, rows)
            state.send(task.worker, m.Preempt(message.call, rows, waits=True))
        state.tasks.speaker_lost(number, event.worker)

    def replace(self, event: WorkerLost) -> None:
        """Have others take over from a lost worker: its rows are sent again, and all are asked again.

        Raises:
            StateLost: it had weights that a generation still needs.
        """
        state, worker = self._state, self._state.workers[event.worker]
        state.engine_weights.lost(worker)
        for place, rows in event.missing.items():
            self.send_again(place, rows)
        for call_state in state.active.values():
            if call_state.is_generation and not call_state.is_all_begun and not state.engine_weights.has_version_for(call_state):
                raise StateLost(
                    f"{worker.name} is lost, and no other has the weights that {call_state.call.name} began with{_how(event)}",
                    where=call_state.call.site.describe(),
                    now=_GO_ON,
                )
        state.ready_workers.wake_all(other for other in state.workers.values() if not other.is_lost)

    def join(self, name: str, incarnation: int) -> None:
        """Take in a worker that was restarted."""
        state = self._state
        worker = state.workers[name]
        if not worker.is_lost:
            return
        worker.is_lost = worker.returns = False
        worker.incarnation = incarnation
        state.engine_weights.joined(worker)
        state.engines_changed()
        for call_state in state.calls.values():
            if name in call_state.planned.workers or name in call_state.planned.forward_to:
                call_state.stage = _without_lost_workers(state, call_state.planned)
                if call_state.is_generation and not call_state.is_over:
                    state.ready_workers.feed_all(call_state)
                    state.ready_workers.rows_came(call_state)
        state.functions.note(worker)
        state.ready_workers.wake_all(other for other in state.workers.values() if not other.is_lost)

    # ---- lost transfers

    def sent_to(self, task: m.Task) -> Iterable[str]:
        """Find the workers that have the rows a task forwarded: of the processes that it names, those still alive."""
        tags = m.forwarded_to(task)
        if not self._state.has_losses:
            return tags
        there = [self._state.workers[worker_of(tag)] for tag in tags]
        return [worker.name for worker, tag in zip(there, tags, strict=True) if worker.tag == tag and not worker.is_lost]

    def never_came(self, rows: Mapping[int, Sequence[int]], to: str) -> None:
        """Record that rows did not arrive where they were sent."""
        for ordinal, missing in rows.items():
            self._state.rows.never_came(ordinal, missing, to)

    def _needs(self, task: m.Task) -> list[tuple[int, int]]:
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
            needed = {need for _, task in state.tasks.of(place) for need in self._needs(task.message)}
            wanted = {ordinal: {row for row in rows if (ordinal, row) in needed} for ordinal, rows in wanted.items()}
        for ordinal, rows in wanted.items():
            if rows and max(ordinal, stopped_at(ordinal)) in state.calls:  # Otherwise it was forgotten meanwhile, and nobody waits.
                state.bring(ordinal, sorted(rows), place)


def record_prefixes(state: SchedulerState, call_state: CallState, place: str, message: m.Flushed | m.Aborted) -> None:
    """Record the prefixes of samples: their tokens so far are in the ledger, and at this place.

    What is known already, or arrives after a newer report, changes nothing.
    """
    if call_state.is_over and call_state.carry is None:
        return
    told = {packed: prefix for packed, prefix in prefixes_in(message).items() if packed not in call_state.done}
    known = call_state.prefixes
    prefixes = {row: new for row, new in told.items() if row not in known or not new.is_within(known[row])}
    # The calls whose prefixes these replace may be forgotten now.
    state.perhaps_unreachable.update({call_state.prefixes[row].by for row in prefixes.keys() & call_state.prefixes.keys()})
    call_state.prefixes.update(prefixes)
    state.rows.replaced(stopped_at(call_state.call.ordinal), prefixes, place)


_GO_ON = "What no other has can't be made again from where the run is. `m2flow run --resume` goes on from its last checkpoint."


def _check_recoverable(worker: WorkerState, event: WorkerLost) -> None:
    """Raise `StateLost` if the worker had trained weights or a role's state."""
    trained = ", ".join(worker.roles["train"])
    if not trained and not worker.states:
        return  # The same condition as `Scheduler.is_vital`.
    gone = f"the weights that {trained} trained" if trained else f"the state of {', '.join(sorted(worker.states))}"
    raise StateLost(f"the worker {worker.name} is lost, and with it {gone}{_how(event)}", now=_GO_ON, remote=event.last_words)


def _how(event: WorkerLost) -> str:
    return f": {event.how}" if event.how else ""


def remove_lost_workers(state: SchedulerState, call_state: CallState) -> None:
    """Reduce a call's stage to workers that are not lost, as places to run and to forward to.

    Raises:
        WorkerError: nobody can run it, now or after a restart.
    """
    call_state.stage = _without_lost_workers(state, call_state.planned)
    planned = call_state.planned.workers
    if call_state.is_over or not planned or call_state.stage.workers or any(state.workers[name].returns for name in planned):
        return
    lost = ", ".join(planned)
    raise WorkerError(
        f"the worker {lost} is lost, and no other can run {call_state.call.name}",
        where=call_state.call.site.describe(),
        now="`m2flow run --resume` goes on from the last checkpoint; its log (logs/) says why it ended.",
    )


def _check_speakers(state: SchedulerState, worker: WorkerState) -> None:
    """Raise `WorkerError` if a role of a lost worker speaks in episodes of others, and nobody is left to host it."""
    for role in worker.roles["rollout"]:
        if any(other.returns or not other.is_lost for other in state.ready_workers.hosts("rollout", role)):
            continue
        for call_state in state.active.values():
            if call_state.is_generation and role in call_state.call.speakers[1:] and not call_state.is_over:
                raise WorkerError(
                    f"the worker {worker.name} is lost, and no other can speak as {role} in the episodes of {call_state.call.name}",
                    where=call_state.call.site.describe(),
                    now="`m2flow run --resume` goes on from the last checkpoint; its log (logs/) says why it ended.",
                )


def _without_lost_workers(state: SchedulerState, stage: Stage) -> Stage:
    """Copy a stage without lost workers; rows are forwarded to the current processes of the others."""
    there = [state.workers[name] for name in stage.forward_to if not state.workers[name].is_lost]
    return msgspec.structs.replace(
        stage,
        workers=tuple(name for name in stage.workers if not state.workers[name].is_lost),
        forward_to=tuple(worker.tag for worker in there),
    )


def _suspected_tasks(state: SchedulerState, name: str) -> list[TaskState]:
    """Find the tasks that may have ended the worker: all generations, which run at the same time, and the first function task."""
    tasks = [(number, task) for number, task in state.tasks.of(name) if isinstance(task.message, m.Generate | m.RunFunction)]
    first = next((number for number, task in tasks if isinstance(task.message, m.RunFunction)), None)
    return [task for number, task in tasks if isinstance(task.message, m.Generate) or number == first]


def _count_losses(state: SchedulerState, task: TaskState, event: WorkerLost, lost: Iterable[int]) -> None:
    """Count one more worker lost with each of these rows of a task.

    Raises:
        WorkerError: there were too many for a row.
    """
    call_state = state.calls.get(task.message.call)
    if call_state is None or call_state.is_over:
        return
    assert isinstance(task.message, m.Generate | m.RunFunction)
    rows = call_state.unfinished(lost)
    call_state.suspects.update(rows)
    if call_state.call.engine == "function":
        state.blamed.add(call_state.call.name)
    state.num_losses.update((call_state.call.ordinal, row) for row in rows)
    worst = [row for row in rows if state.num_losses[call_state.call.ordinal, row] >= state.max_attempts]
    if worst:
        named = ", ".join(str(SampleId.unpack(row)) for row in worst[:5]) + (f" and {len(worst) - 5} more" if len(worst) > 5 else "")
        raise WorkerError(
            f"{state.max_attempts} workers in turn were lost with {named} of {call_state.call.name}, "
            f"the last one {event.worker}{_how(event)}",
            where=call_state.call.site.describe(),
            now="What they do to a process is in its last words and its log. How often to try is `max_attempts` of the run settings.",
            remote=event.last_words,
        )


def _requeue_task(state: SchedulerState, number: int, task: TaskState) -> None:
    """End a task that will not be done, and requeue its rows that are not done."""
    state.end_task(number)
    call_state = state.calls.get(task.message.call)
    if isinstance(task.message, m.LoadWeights):
        state.engine_weights.unloaded(task.message)
    if call_state is not None and not call_state.is_over and isinstance(task.message, m.Generate | m.RunFunction):
        left = call_state.have_come(call_state.unfinished(task.rows))
        if call_state.carry is not None:
            call_state.carry.requeued(left, call_state.prefixes)
        state.requeue(call_state, left)
        if not call_state.ids and not call_state.call.is_aligned:
            state.functions.may_start(call_state)  # A call on no rows is run once.
