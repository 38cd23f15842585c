"""Dispatch tasks to engines: samples to rollout engines, rows to functions, micro-batches and what else trains to trainers.

Samples (`RolloutDispatch`) go to rollout engines where a version of the weights is held, or being loaded, that their call may use, and
where the call's scheduling policy says (`m2flow.micro.scheduler.scheduling_policy_dispatch`). Without one they are shared out evenly over
the call's workers, whole groups together where there is room, so that a prompt is prefilled once. Of branches of episodes a worker takes
first those whose parents it has played, since its engine may have their tokens in its cache.

Where several roles speak in the episodes of a call, these go where the engines of all of them hold versions that the call may use. Roles
whose engines the worker lacks speak from others (`Generate.speakers`): while the task is in flight these load no weights, and keep their
turn, as if they had it themselves.

Before it gets other work, an engine loads weights and a trainer publishes them, if `WeightSyncDispatch` (`m2flow.micro.scheduler.weights`)
has an offer.

Rewards and ops (`FunctionDispatch`) are executed on whatever rows are ready, as soon as a process is free. A task takes what is ready up
to the stage's chunk and does not wait for more: while it runs, the next rows gather. Of several workers none takes more than its share, so
that rows which come all at once are not one worker's alone; unless they take less time than a second task costs, by what workers report.

Of a role with workers of its own, none takes more than half of its share of a call's rows: so it works on one half while another role has
the other, as an actor does that infers for some environments while a simulator steps the others.

Rows that a role's earlier call made go to the worker that made them, also if that is busy: its object of the role may have kept what the
next call on such a row needs, as simulators keep their environments. A worker gets no more of them than its share, and those of a lost
worker go to any.

Chained calls: a call whose input rows a worker is about to make may be sent there early, and waits for them in the worker's queue, so
that a chain of calls on the same rows needs no round trip to the controller between one and the next. That is done only where nothing is
lost by it: both calls are one task each, nobody else could begin any of the second one's rows before, and no other call waits for the
same input. After a worker was lost it is not done any more.

Training (`TrainDispatch`) is micro-batches as groups come in, optimiser steps, log-probabilities, and checkpoints. One worker trains a
role. Its updates go in program order, each from the weights that the one before it left. A step that would replace weights waits until
every earlier reader of them has had them: the rollout engines have loaded them, or hold older ones that suffice, and log-probabilities
and copies are done.

A checkpoint has each role at one point in program order, though trainers reach it at different times:

    CheckpointDue -> Save to the trainer of each role, when it holds the role's version at that point of the program -> CheckpointSaved

A role's trainer saves after the last write before the point and before the next one; nothing else waits. A part that is written while
training goes on is reported by the worker itself (`PartWritten`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

from m2flow.macro.graph import Call, Granularity
from m2flow.macro.oversampling import keeps_cache
from m2flow.macro.refill import Refill
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.update_semantics import UpdateTally
from m2flow.micro.protocol.worker_state import WorkerState, instance_of, stopped_at
from m2flow.micro.scheduler.call_state import CallState, MicroBatch, MinibatchEnd, SampleBatch, task_batches
from m2flow.micro.scheduler.ready_queues import MAX_QUEUED, Ended, Offer
from m2flow.micro.scheduler.state import SchedulerState
from m2flow.micro.scheduler.weights import WeightSyncDispatch, may_use
from m2flow.samples import SampleId, group_key

# ---- samples


_MOST_SEEN = 512
"""Ready branches among which a worker finds those whose parents it has played."""


class RolloutDispatch:
    """Dispatches samples to rollout engines, which load weights first where they have to."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._weights = WeightSyncDispatch(state)

    def offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find the next task for this worker's rollout engines of these roles."""
        for role in roles:
            found = self._offer_role(worker, role)
            if found is not None:
                return found
        return None

    def _offer_role(self, worker: WorkerState, role: str) -> Offer | None:
        first = self._state.first_generation(role)
        under = self._weights.load_under_offer(worker, role, first)
        if under is not None or first is None:
            return under
        if self._state.has_given_back(worker, first):
            return None
        if self._weights.is_to_load(worker, role, first):
            return self._weights.load_offer(worker, role, first)
        if first.call.role in worker.roles["rollout"] and not self._state.engine_weights.holds_for(worker, first):
            return None  # Another role that speaks in it is to load first, when nothing runs here.
        for call_state in self._state.open.started("rollout", role):
            if not call_state.ready or not self._state.engine_weights.holds_for(worker, call_state):
                continue
            if self._state.has_given_back(worker, call_state):
                continue
            if call_state.is_under_policy:
                embeddings = self._state.policies.of_call[call_state.call.ordinal].embeddings
                if embeddings is not None and not embeddings.are_known:
                    if embeddings.has_some_for(worker.name):
                        return lambda call_state=call_state: self._embed(worker, call_state)  # type: ignore[misc]
                    continue
                room = min(worker.room_for(call_state.stage.chunk), call_state.num_may_begin)
                if room > 0 and self._has_samples_for(worker, call_state):
                    return lambda call_state=call_state, room=room: self._give_by_policy(worker, call_state, room)  # type: ignore[misc]
            else:
                quota = self._quota(worker, call_state)
                if quota > 0:
                    return lambda call_state=call_state, quota=quota: self._give_in_order(worker, call_state, quota)  # type: ignore[misc]
        return None

    def is_awaited(self, worker: WorkerState, roles: Sequence[str]) -> bool:
        """Whether samples of another worker wait until these roles may speak from this one."""
        return any(
            call_state.ready and call_state.call.role not in worker.roles["rollout"] and may_use(call_state, worker.held.get(role, 0), role)
            for role in roles
            for call_state in self._state.open.started("rollout", role)
        )

    def _quota(self, worker: WorkerState, call_state: CallState) -> int:
        """Count the samples of a call that this worker may take now: its even share of what is left, if there is room."""
        room = worker.room_for(call_state.stage.chunk)
        quota = min(room, call_state.num_may_begin, call_state.share - call_state.out_at.get(worker.name, 0))
        return self._state.credits.num_may_begin(call_state, worker.name, quota)

    def _has_samples_for(self, worker: WorkerState, call_state: CallState) -> bool:
        """Ask a generation's policy for samples for this worker. Other workers that it assigned some to are woken."""
        dispatch = self._state.policies.of_call[call_state.call.ordinal]
        found = dispatch.has_samples_for(worker)
        self._state.ready_workers.wake_all(other for other in dispatch.dealt_to() if other is not worker)
        return found

    def _embed(self, worker: WorkerState, call_state: CallState) -> None:
        """Have a worker embed some prompts of a generation, none of whose samples has begun."""
        embeddings = self._state.policies.of_call[call_state.call.ordinal].embeddings
        assert embeddings is not None
        samples, prompts = embeddings.take(worker.name)
        self._state.bring(call_state.aligned_inputs[0], prompts, worker.name)
        self._state.start(worker, "rollout", m.EmbedPrompts(self._state.next_task(), call_state.call.ordinal, samples, prompts))

    def _give_by_policy(self, worker: WorkerState, call_state: CallState, room: int) -> None:
        rows = self._state.policies.of_call[call_state.call.ordinal].take(worker, room)
        call_state.num_begun += len(rows)
        self._state.handed_out(call_state)
        self._begin(worker, call_state, rows)

    def _give_in_order(self, worker: WorkerState, call_state: CallState, quota: int) -> None:
        if call_state.call.options.get("branches") and (near := self._near(worker, call_state, quota)):
            rows = call_state.take_these(near)
            self._state.handed_out(call_state)
            self._begin(worker, call_state, rows)
            return
        ready = itertools.islice(call_state.ready, quota - 1, None)
        group = group_key(next(ready))
        more = sum(1 for _ in itertools.takewhile(lambda row: group_key(row) == group, ready))
        self._begin(worker, call_state, self._state.hand_out(call_state, min(quota + more, max(quota, call_state.stage.chunk))))

    def begin_at(self, worker: WorkerState, call_state: CallState, rows: list[int]) -> None:
        """Begin ready rows on a worker, as many as it can have now, unless a channel's room decides which ones may begin."""
        if self._state.credits.is_limited(call_state) or not (self._state.can_begin(worker, call_state) and call_state.has_rows_to_begin):
            return
        if (num := min(len(rows), worker.room_for(call_state.stage.chunk), call_state.num_may_begin)) > 0:
            taken = call_state.take_these(rows[:num])
            self._state.handed_out(call_state)
            self._begin(worker, call_state, taken)

    def _near(self, worker: WorkerState, call_state: CallState, quota: int) -> list[int]:
        """Find branches, of whole groups, whose parents were played on this worker; none: it takes others' rather than wait."""
        rows: list[int] = []
        for row in itertools.islice(call_state.ready, _MOST_SEEN):
            if len(rows) >= quota and group_key(row) != group_key(rows[-1]):
                break
            if self._state.played_at.of(call_state.prompt_of(row)) == worker.name:
                rows.append(row)
        return rows[: max(quota, call_state.stage.chunk)]

    def _begin(self, worker: WorkerState, call_state: CallState, rows: list[int]) -> None:
        self._state.credits.reserve(call_state, rows, worker.name)
        if call_state.carry is not None:
            call_state.carry.begun(rows, self._state.engine_weights.next_held(worker, call_state.call.role))
        for batch in task_batches(call_state.call.ordinal, call_state.prefixes, rows, carries=call_state.carry is not None):
            self._start(worker, call_state, batch)

    def _start(self, worker: WorkerState, call_state: CallState, batch: SampleBatch) -> None:
        drawn, stopped_by, rows, had = batch
        state, prompts = self._state, []
        if stopped_by >= 0:
            state.bring(stopped_at(stopped_by), rows, worker.name)
        else:
            drawing = state.calls[drawn]
            prompts = drawing.prompts_of(rows)
            state.bring(drawing.aligned_inputs[0], dict.fromkeys(prompts), worker.name)
            self._state.credits.taken(drawn, prompts)
        state.rows.introduce(drawn, worker.name)
        forward_to, spills = list(call_state.stage.forward_to), call_state.stage.spills
        elsewhere = [role for role in call_state.call.speakers if role not in worker.roles["rollout"]]
        speakers = {role: [other.tag for other in state.engine_weights.speakers(call_state, role)] for role in elsewhere}
        task = m.Generate(
            state.next_task(), call_state.call.ordinal, rows, prompts, forward_to, drawn, stopped_by, had, spills, speakers=speakers
        )
        if call_state.waits_us:
            task.waits_us.extend(call_state.waits_us.pop(row, 0) for row in rows)
        state.placed(call_state, rows, call_state.call.role, lambda _: worker.tag)
        for role, tags in speakers.items():
            state.placed(call_state, rows, role, lambda row, tags=tags: instance_of(row, tags))  # type: ignore[misc]
        state.start(worker, "rollout", task, rows=len(rows))
        if keeps_cache(call_state.call.options):
            state.ready_workers.wake_trainers(call_state.call.role)  # Its samples may take newer weights while they run.


# ---- functions


class FunctionDispatch:
    """Dispatches calls on functions to the processes that run them."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find the next task for this worker."""
        call_state = self._state.functions.first(worker)
        return None if call_state is None else lambda: self._start(worker, call_state)

    def hand_out(self) -> None:
        """Start the earliest calls with work on the workers that may take them, the least busy first."""
        functions = self._state.functions
        while functions.has_changed:
            for worker in functions.noted():
                self._hand_on(worker)
            if (found := functions.next()) is not None:
                self._start(*found)

    def _hand_on(self, worker: WorkerState) -> None:
        """Give a worker whose tasks have changed the next call of its chain, unless an earlier call has work for it."""
        while (following := self._following(worker)) is not None:
            earliest = self._state.functions.first(worker)
            if earliest is not None and earliest.call.ordinal < following.call.ordinal:
                break
            self._give(worker, following, following.take_early())

    def _following(self, worker: WorkerState) -> CallState | None:
        """Find the next call after the worker's last task's that may wait in its queue."""
        last = self._state.last_function_calls.get(worker.name)
        if last is None or not last.users or worker.num_tasks["function"] >= MAX_QUEUED or self._state.has_losses:
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
        if not stage.is_barrier and len(call_state.ids) > self._chunk(call_state):
            return False
        sources = [self._state.calls[ordinal] for ordinal in call_state.aligned_inputs]
        coming = [source for source in sources if not source.is_done]
        if not all(source.whole_at == worker.name and source.tasks_at and not source.done for source in coming):
            return False
        return len(stage.workers) == 1 or all(_comes_at_once(source) and (len(source.users) == 1 or _is_ours(call)) for source in coming)

    def _start(self, worker: WorkerState, call_state: CallState) -> None:
        if call_state.stage.state and call_state.call.writes:
            worker.states.add(call_state.stage.state)
        if kept := self._kept(call_state):
            for home, rows in kept.items():
                call_state.num_kept[home] = call_state.num_kept.get(home, 0) + len(rows)
                chunk = self._chunk(call_state)
                for start in range(0, len(rows), chunk):
                    part = rows[start : start + chunk]
                    self._give(self._state.workers[home], call_state, call_state.take_these(part))
            return
        self._give(
            worker,
            call_state,
            self._state.hand_out(call_state, len(call_state.ready) if call_state.stage.is_barrier else self._num_next(worker, call_state)),
        )

    def _kept(self, call_state: CallState) -> dict[str, list[int]]:
        """Find ready rows of a role's call that an earlier call of the role made on a worker that may run this one: worker -> rows."""
        role, workers = call_state.call.options.get("instance"), call_state.stage.workers
        if role is None or len(workers) == 1 or call_state.stage.unit != "sample" or call_state.suspects or call_state.is_union:
            return {}
        found: dict[str, list[int]] = {}
        for source in call_state.aligned_inputs:
            if self._state.calls[source].call.options.get("instance") == role:
                makers = self._state.rows.makers(source, call_state.ready)
                found = {name: rows for name, rows in makers.items() if name in workers and not self._state.workers[name].is_lost}
        share = -(-len(call_state.ids) // sum(not self._state.workers[name].is_lost for name in workers)) if found else 0
        kept = {name: rows[: max(share - call_state.num_kept.get(name, 0), 0)] for name, rows in found.items()}
        return {name: rows for name, rows in kept.items() if rows}

    def _give(self, worker: WorkerState, call_state: CallState, rows: list[int]) -> None:
        is_partial = call_state.drops or call_state.refill or call_state.coming or call_state.has_restored
        is_whole = len(rows) == len(call_state.ids) and not is_partial
        call_state.whole_at = worker.name if is_whole else ""
        self._state.last_function_calls[worker.name] = call_state
        self._state.bring_inputs(call_state, rows, worker.name)
        values, parts = self._state.values_for(call_state), {}
        if call_state.is_union:
            parts = {
                base: found for base in call_state.bases if (found := [row for row in sorted(rows) if call_state.part_of[row] == base])
            }
        is_suspect = call_state.name in self._state.blamed
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

    def _chunk(self, call_state: CallState) -> int:
        """Count the rows of a task at most."""
        workers, chunk = call_state.stage.workers, call_state.stage.chunk
        if "*" in self._state.workers[workers[0]].roles["function"]:
            return chunk
        return max(min(chunk, -(-len(call_state.ids) // (2 * len(workers)))), 1)

    def _num_next(self, worker: WorkerState, call_state: CallState) -> int:
        """Count the rows of the next task: a chunk of ready rows, or a fair share of them, and the rest of the last one's unit."""
        chunk = self._chunk(call_state)
        if len(call_state.stage.workers) > 1 and not _is_ours(call_state.call):
            chunk = min(chunk, self._state.functions.share_of(worker, call_state))
        if call_state.refill is not None:
            chunk = self._num_needed(call_state, call_state.refill, chunk)
        if call_state.suspects and next(iter(call_state.ready)) in call_state.suspects:
            chunk = 1  # Alone, so that a row that ends its worker is identified.
        if call_state.stage.unit == "sample" or chunk >= len(call_state.ready):
            return min(chunk, len(call_state.ready))
        rows = itertools.islice(call_state.ready, chunk - 1, None)
        last = call_state.unit_of(next(rows))
        return chunk + sum(1 for _ in itertools.takewhile(lambda row: call_state.unit_of(row) == last, rows))

    def _num_needed(self, call_state: CallState, refill: Refill, chunk: int) -> int:
        """Count the rows of a refill's next task. It goes group by group, since later ones may not be needed, and since a group that fails
        fails its task; but quick functions get all that is needed for certain."""
        rows = itertools.islice(call_state.ready, min(chunk, self._state.functions.num_quick(call_state)))
        return max(sum(1 for _ in itertools.takewhile(lambda row: refill.is_certain(SampleId.unpack(row).prompt), rows)), 1)


def _is_ours(call: Call) -> bool:
    """Whether a call is built-in arithmetic on columns, which takes next to no time."""
    return call.options.get("style") == "columns"


def _comes_at_once(call_state: CallState) -> bool:
    """Whether a task of this call reports all rows at its end; a slow function on samples reports some before."""
    return _is_ours(call_state.call) or call_state.call.granularity is not Granularity.SAMPLE or len(call_state.ids) == 1


# ---- training


_MAX_QUEUED = 2
"""Tasks that a trainer has at a time: one running, and one queued to begin at once."""


class TrainDispatch:
    """Dispatches training tasks to the trainers."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._weights = WeightSyncDispatch(state)

    def offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find the next task for this worker's train engines of these roles."""
        if worker.num_tasks["train"] >= _MAX_QUEUED:
            return None
        publish = self._weights.publish_offer(worker, roles)
        if publish is not None:
            return publish
        save = self._save_offer(worker, roles)
        if save is not None:
            return save
        for call_state in self._started(roles):
            found = self._offer_call(worker, call_state)
            if found is not None:
                return found
        return None

    def _save_offer(self, worker: WorkerState, roles: Sequence[str]) -> Offer | None:
        """Find a checkpoint part of a version that this worker holds now."""
        for role in roles:
            due = self._state.saves.first(role)
            if due is not None and self._state.versions.trained(role) == due.version:
                return lambda role=role: self._save(worker, role)  # type: ignore[misc]
        return None

    def _save(self, worker: WorkerState, role: str) -> None:
        self._state.start(worker, "train", self._state.saves.begin(role, self._state.next_task()))

    def _started(self, roles: Sequence[str]) -> Iterable[CallState]:
        """Iterate over the calls of these roles that wait for nothing, in program order."""
        lists = [self._state.open.started("train", role) for role in roles]
        return lists[0] if len(lists) == 1 else heapq.merge(*lists, key=lambda call_state: call_state.call.ordinal)

    def _offer_call(self, worker: WorkerState, call_state: CallState) -> Offer | None:
        if call_state.update is not None:
            return self._update_offer(worker, call_state)
        if call_state.call.method == "copy_of":
            return None if call_state.tasks_at or not self._may_copy_into(call_state) else lambda: self._copy(worker, call_state)
        return (lambda: self._logprobs(worker, call_state)) if call_state.ready else None

    def _update_offer(self, worker: WorkerState, call_state: CallState) -> Offer | None:
        assert call_state.update is not None
        if not call_state.ids and call_state.coming is None:
            # No rows to train on: the weights of the new version equal the old.
            return (lambda: Ended(call_state, UpdateTally().metrics())) if self._may_step(call_state) else None
        step = call_state.update.next(is_idle=worker.num_tasks["train"] == 0)
        if step is None or (isinstance(step, MinibatchEnd) and not self._may_step(call_state)):
            return None
        return lambda: self._update(worker, call_state, step)

    def _may_step(self, call_state: CallState) -> bool:
        """Whether every earlier reader of the weights that the update replaces has had them, and so has a due checkpoint."""
        if self._state.saves.holds(call_state.call):
            return False
        for reader in self._state.versions.reads_before(call_state.call):
            if reader.call.engine != "rollout" or self._state.engine_weights.needs_loading(reader, call_state.call.role):
                return False
        return True

    def _may_copy_into(self, call_state: CallState) -> bool:
        """Whether nothing needs the weights that a copy replaces any more: log-probabilities by an older reference, a checkpoint."""
        return not self._state.saves.holds(call_state.call) and next(self._state.versions.reads_before(call_state.call), None) is None

    def _update(self, worker: WorkerState, call_state: CallState, step: MicroBatch | MinibatchEnd) -> None:
        assert call_state.update is not None
        call_state.update.take(step)
        number, call = self._state.next_task(), call_state.call
        if isinstance(step, MicroBatch):
            self._state.bring_inputs(call_state, step.ids, worker.name)
            self._state.start(worker, "train", m.Accumulate(number, call.ordinal, list(step.ids), step.epoch, step.minibatch))
        else:
            self._state.versions.step_dispatched(call.role)
            self._state.engines_changed()
            self._state.start(worker, "train", m.Apply(number, call.ordinal, step.is_last, call.writes[0].version))

    def _copy(self, worker: WorkerState, call_state: CallState) -> None:
        self._state.start(worker, "train", m.CopyWeights(self._state.next_task(), call_state.call.ordinal))

    def _logprobs(self, worker: WorkerState, call_state: CallState) -> None:
        count, filled = 0, 0
        for row in call_state.ready:
            filled += call_state.num_tokens[row]
            if count and filled > call_state.stage.token_budget:
                break
            count += 1
        rows = self._state.hand_out(call_state, count)
        self._state.bring_inputs(call_state, rows, worker.name)
        task = m.RunFunction(self._state.next_task(), call_state.call.ordinal, rows, list(call_state.stage.forward_to))
        self._state.start(worker, "train", task)
