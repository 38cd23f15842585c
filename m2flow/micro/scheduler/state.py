"""The scheduler's state: unfinished calls, workers and their tasks, weight versions, and where each row is.

`SchedulerState` is what the dispatches (`rollout_dispatch`, `train_dispatch`, `function_dispatch`) read to decide, and change only
through its methods. A change appends the commands that follow from it to `SchedulerState.commands` and notes the workers to ask again
(`m2flow.micro.scheduler.task_queues`).

A generation is open until all of its samples are handed out; a generation or a trainer's call has started once it waits for nothing.

`Ablation` gives the scheduler what no real run has: the length of a sample before it ends, or advantages that need no siblings. It is for
the rungs of `m2flow.simulator.ablation`.

    Scheduler(plan, ablation=Ablation(lengths=..., without_groups=True))
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from m2flow.errors import M2FlowError, OpError, RunInterrupted
from m2flow.macro.graph import Call
from m2flow.macro.lineage import TWICE
from m2flow.macro.oversampling import carries, is_cut, keeps_cache, num_wanted
from m2flow.macro.refill import Refill, RefillEnd, source_exhausted
from m2flow.micro.lowering.capabilities import keeps_caches
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import CONTROLLER, Command, Discarded, Dropped, Forgotten, Reject, Resolve, Send
from m2flow.micro.protocol.plan import Plan, Stage
from m2flow.micro.protocol.row_store import stopped_at
from m2flow.micro.protocol.worker_state import Lease, TaskState, WorkerState, worker_of
from m2flow.micro.scheduler.call_state import CallState, progress_of
from m2flow.micro.scheduler.gpu_borrowing import EarlyOnload, GpuBorrowing
from m2flow.micro.scheduler.partial_rollouts import PartialRollouts
from m2flow.micro.scheduler.policy_dispatch import PolicyDispatches
from m2flow.micro.scheduler.row_locations import LostTransfers, RowLocations
from m2flow.micro.scheduler.task_queues import ReadyWorkers, StartQueue, Tasks
from m2flow.micro.scheduler.weights import EngineWeights, Versions
from m2flow.micro.scheduler.worker_failure import Restoring, remove_lost_workers
from m2flow.samples import SampleId, by_group, group_key, make_ids


@dataclass(frozen=True)
class Ablation:
    """Knowledge and freedom that no real run has; by default none."""

    lengths: Callable[[int], int] | None = None
    """Row -> tokens that it will generate, for the predictor `oracle`."""
    without_groups: bool = False
    """Groups are taken apart: a sample is trained on, and worked on by a function, without waiting for its siblings."""


NOTHING = Ablation()


@final
class OpenCalls:
    """Indexes, by role, generations with samples left to hand out and calls that wait for nothing: a dispatch sees no others."""

    def __init__(self) -> None:
        self._open: dict[str, dict[int, CallState]] = {}
        self._started: dict[tuple[str, str], list[CallState]] = {}
        self._first: dict[str, CallState | None] = {}

    def add(self, state: CallState) -> None:
        """Add a new call, which may still have to wait."""
        if state.call.engine == "rollout":
            self._open.setdefault(state.call.role, {})[state.call.ordinal] = state
            self.changed(state.call.role)

    def reopen(self, state: CallState) -> None:
        """Add a call again that has samples to hand out again."""
        if state.call.engine == "rollout":
            known = self._open.setdefault(state.call.role, {})
            known[state.call.ordinal] = state
            self._open[state.call.role] = dict(sorted(known.items()))
            self.changed(state.call.role)

    def start(self, state: CallState) -> bool:
        """Note that a call waits for nothing any more; False if that was known."""
        started = self._started.setdefault((state.call.engine, state.call.role), [])
        place = bisect.bisect_left(started, state.call.ordinal, key=_ordinal)
        if place < len(started) and started[place] is state:
            return False
        started.insert(place, state)
        return True

    def close(self, state: CallState) -> bool:
        """Remove a call with nothing left to hand out; False if that was known."""
        started = self._started.get((state.call.engine, state.call.role), [])
        place = bisect.bisect_left(started, state.call.ordinal, key=_ordinal)
        if place < len(started) and started[place] is state:
            del started[place]
        if self._open.get(state.call.role, {}).pop(state.call.ordinal, None) is None:
            return False
        self.changed(state.call.role)
        return True

    def changed(self, role: str) -> None:
        """Forget which generation of a role is the first: it may have changed."""
        self._first.pop(role, None)

    def started(self, kind: str, role: str) -> Sequence[CallState]:
        """Return a role's calls of one kind of engine that wait for nothing, in program order."""
        return self._started.get((kind, role), ())

    def first(self, role: str) -> tuple[bool, CallState | None]:
        """Return whether the first is known since the last change, and the earliest open generation that can run."""
        return role in self._first, self._first.get(role)

    def set_first(self, role: str, can_run: Callable[[CallState], bool]) -> CallState | None:
        """Find and remember the earliest open generation that can run."""
        self._first[role] = next((state for state in self._open.get(role, {}).values() if can_run(state)), None)
        return self._first[role]


def _ordinal(state: CallState) -> int:
    return state.call.ordinal


@final
class Refills:
    """Tracks unfinished refills: which candidates are kept, which failed, and when each refill has enough (`m2flow.macro.refill`)."""

    def __init__(self, scheduler: SchedulerState) -> None:
        self._state = scheduler
        self._members: dict[Refill, list[CallState]] = {}
        self._failed: dict[int, dict[int, M2FlowError]] = {}
        """Generate call -> its samples that can't be generated."""

    def join(self, state: CallState, num_candidates: int) -> Refill:
        """Add a call to the refill of its input, or to a new one."""
        refill = self._state.calls[state.bases[0]].refill
        count = state.call.options["refill"]
        assert isinstance(count, int)
        refill = refill or Refill(num_candidates, count)
        self._members.setdefault(refill, []).append(state)
        return refill

    def judge(self, state: CallState, rows: Iterable[int], verdict: bool | M2FlowError) -> None:
        """Record whether candidates are kept, dropped or failed to be judged, and end the refill if that decides it."""
        assert state.refill is not None
        generations = [member for member in self._members[state.refill] if member.call.engine == "rollout"]
        shares = [member.share for member in generations]
        for position in {SampleId.unpack(row).prompt for row in rows}:
            state.refill.judge(position, verdict)
        for member, share in zip(generations, shares, strict=True):
            if member.share > share or member.policy_dispatch is not None:
                self._state.ready_workers.feed_all(member)
            self._state.ready_workers.rows_came(member)
        end = state.refill.end()
        if end is not None:
            self._end(self._members.pop(state.refill), end, state)

    def not_generated(self, state: CallState, task: m.Generate, row: int, error: M2FlowError) -> None:
        """Record that a candidate can't be generated, which is an error only if the refill needs it.

        Its task began nothing, so the task's samples of other groups, and those before it, are requeued.
        """
        if state.is_over:
            return
        row = row if row in task.ids else min(task.ids)
        self._state.requeue(state, [other for other in task.ids if group_key(other) != group_key(row) or other < row])
        self._failed.setdefault(state.call.ordinal, {})[row] = error
        self._judge_failed(state)

    def turned_out(self, state: CallState, kept: Iterable[int], dropped: Iterable[int]) -> None:
        """Record rows that a call of a refill has finished, or dropped."""
        self._judge_failed(state)
        for verdict, judged in ((True, kept), (False, dropped)):
            if state.call.drops and judged and not state.is_over:
                self.judge(state, judged, verdict)

    def _judge_failed(self, state: CallState) -> None:
        """Judge each group in which a sample can't be generated and all samples before it are done: the earliest failure counts."""
        failed = self._failed.get(state.call.ordinal, {})
        for rows in by_group(sorted(failed)).values():
            first = rows[0]
            before = range(first - SampleId.unpack(first).index, first)
            if state.done.issuperset(before) and not state.is_over:
                self.judge(state, [first], failed[first])

    def _end(self, members: list[CallState], end: RefillEnd, judged: CallState) -> None:
        """Abort what still runs beyond what was needed, and end the calls of the refill with the rows that it keeps."""
        self._state.commands.append(Discarded(members[0].call.ordinal, end.last))
        error = end.error
        if end.is_dry:
            judged, error = members[-1], source_exhausted(members[-1].call, len(end.kept), end.last + 1)
        for member in members:
            self._failed.pop(member.call.ordinal, None)
            member.result = [row for row in member.ids if SampleId.unpack(row).prompt in end.kept]
            member.ready.clear()
            if member is judged and error is not None:
                self._state.fail(member, error)
            elif not member.is_over:
                self._state.abandon(member)
                self._state.complete(member, None)


class SchedulerState:
    """All state of a scheduler, and the commands that the current event has led to so far."""

    def __init__(
        self, plan: Plan, *, deterministic: bool, restored: Mapping[str, int], max_attempts: int = 3, ablation: Ablation = NOTHING
    ) -> None:
        self.deterministic = deterministic
        self.ablation = ablation
        self.max_attempts = max_attempts
        """Workers that may be lost with a row before the run fails because of it."""
        self.calls: dict[int, CallState] = {}
        self.active: dict[int, CallState] = {}
        """Unfinished calls, in program order."""
        self.open = OpenCalls()
        """Calls of rollout and train engines."""
        self.leases = {w.lease: Lease(w.lease) for w in plan.workers if w.lease}
        self.workers: dict[str, WorkerState] = {}
        for place, w in enumerate(plan.workers):
            roles = {kind: tuple(s.role for s in w.engines if s.kind == kind) for kind in ("rollout", "train", "function")}
            turns: dict[str, tuple[str, ...]] = {}
            for s in w.engines if w.lease else ():
                if s.kind != "function":
                    turns[s.takes_turn] = (*turns.get(s.takes_turn, ()), s.role)
            self.workers[w.name] = WorkerState(w.name, self.leases.get(w.lease), roles, turns, keeps_caches(w), place)
            if w.lease:
                self.leases[w.lease].join(w.name, turns)
        self.tasks = Tasks(self.workers)
        self.may_keep = False
        """Some generation lets weights change under its running samples (`kv="keep"`)."""
        self.ready_workers = ReadyWorkers(self.workers)
        self.commands: list[Command] = []
        self.versions = Versions(restored)
        self.engine_weights = EngineWeights(self.versions, self.ready_workers)
        self.rows = RowLocations()
        self.lost_transfers = LostTransfers(self, self.rows)
        self._errors: dict[int, tuple[int, M2FlowError]] = {}
        """Failed call -> the call that caused it, and its error."""
        self._wanted: set[int] = set()
        self._shown: set[int] = set()
        """Dataset calls whose rows the program has observed."""
        self._waiting_for: dict[int, list[CallState]] = {}
        """Call -> calls that wait until it is done."""
        self._followers: dict[int, list[CallState]] = {}
        self._perhaps_unreachable: set[int] = set()
        self._empty: deque[CallState] = deque()
        """Calls without rows that are about to end."""
        self.partial_rollouts = PartialRollouts(self)
        self.refills = Refills(self)
        self.policy_dispatches = PolicyDispatches(self, plan)
        self.borrowing = GpuBorrowing(self, plan)
        self.early_onload = EarlyOnload(self, plan)
        self.restoring = Restoring(self)
        self.functions = StartQueue(self.workers)
        self.num_changes = 0
        """Incremented whenever the set of workers that can run a generation may have changed."""

    # ---- calls

    def add_call(self, call: Call, stage: Stage) -> CallState:
        """Add a call: find what it waits for, and count the input rows that are there already."""
        calls = self.calls
        inputs = list(dict.fromkeys([ref.call for _, ref in call.inputs]))
        needed_writers, newer_writers = self.versions.written_for(call) if call.reads else ([], [])
        needs = {*inputs, *needed_writers}
        others = set(newer_writers) - needs if newer_writers else set()
        is_generation = call.engine == "rollout"
        if is_generation and call.carries_from is not None:
            others.add(call.carries_from)
        aligned = tuple([c for c in inputs if calls[c].call.is_aligned])
        waits_for = {c for c in needs if c not in aligned and not self._is_done(c)}
        state = CallState(call, stage, [], waits_for, aligned, frozenset(others), is_ungrouped=self.ablation.without_groups)
        if self.lost_transfers.has_any:
            remove_lost_workers(self, state)
        calls[call.ordinal] = state
        self.active[call.ordinal] = state
        self.open.add(state)
        for needed in inputs:
            calls[needed].users[call.ordinal] = state
        for needed in waits_for:
            self._waiting_for.setdefault(needed, []).append(state)
        if call.writes and call.engine == "function":
            state.follows = frozenset(reader.call.ordinal for reader in self.versions.reads_before(call))
            for followed in state.follows:
                self._followers.setdefault(followed, []).append(state)
        self.versions.add(state, self._is_done)
        if is_generation:
            self.may_keep = self.may_keep or keeps_cache(call.options)
            if carries(call.options):
                self.partial_rollouts.added(state)
        failed = [self._errors[c] for c in needs | others if c in self._errors] if self._errors else []
        if failed:
            root, error = min(failed, key=lambda found: found[0])
            self.fail(state, error, root=root)
        elif call.engine != "source":
            self._prepare(state)
        return state

    def sourced(self, state: CallState, ids: list[int], num_tokens: Iterable[int]) -> None:
        """Record the rows of a dataset call, which the controller has read."""
        state.prepare(ids, ids)
        self._prepare_consumers(state)
        self.rows_done(state, CONTROLLER, ids, num_tokens)

    def _prepare(self, state: CallState) -> None:
        """Fix the rows of a call once those of its inputs are known, and then those of its consumers."""
        if state.is_prepared or state.is_over:
            return
        rows_of: list[int] = []
        for base in state.bases:
            rows = self._rows_for(state, self.calls[base])
            if rows is None:
                return
            rows_of = sorted([*rows_of, *rows]) if rows_of else rows
            if state.is_union:
                state.part_of.update(dict.fromkeys(rows, base))
        if state.is_union and len(set(rows_of)) < len(rows_of):
            twice = next(a for a, b in itertools.pairwise(rows_of) if a == b)
            where = state.call.site.describe()
            self.fail(state, OpError(f"{state.call.name} got sample {SampleId.unpack(twice)} twice", where=where, now=TWICE))
            return
        if state.call.is_gated:
            state.refill = self.refills.join(state, len(rows_of))
        is_rollout = state.call.engine == "rollout"
        state.prepare(make_ids(state.call.ordinal, len(rows_of), state.num_per_prompt).tolist() if is_rollout else rows_of, rows_of)
        if is_rollout:
            self.policy_dispatches.begin(state)
        if state.is_update:
            is_ungrouped = self.ablation.without_groups
            state.update = progress_of(state.call, state.stage, state.ids, by_identity=self.deterministic, is_ungrouped=is_ungrouped)
        for needed in state.aligned_inputs:
            source = self.calls[needed]
            if source.done:
                state.arrived(needed, sorted(source.done), source.num_tokens)
            elif source.whole_at:
                self.functions.note(self.workers[source.whole_at])
        if not state.ids:
            self._await_inputs(state)
        self._start_if_ready(state)
        if state.carry is not None:
            self.partial_rollouts.prepared(state, len(rows_of))
        elif state.result is not None and not state.is_over:
            self._prepare_consumers(state)
        self.restoring.prepared(state)

    def _await_inputs(self, state: CallState) -> None:
        """Have a call without rows wait for its inputs: no row of theirs holds it back, and it must not end before them."""
        for needed in state.aligned_inputs:
            if not self._is_done(needed):
                state.waits_for.add(needed)
                self._waiting_for.setdefault(needed, []).append(state)
        self.handed_out(state)

    def _rows_for(self, state: CallState, base: CallState) -> list[int] | None:
        """Find the rows that a call has from one of its inputs, if they are known. Calls of one refill hand on every candidate."""
        if state.call.is_gated and base.refill is not None:
            return base.ids if base.is_prepared else None
        return base.result

    def abandon(self, state: CallState, *, keeps: bool = False) -> None:
        """Tell workers to abort what they have of a call; with `keeps`, to keep the tokens of stopped samples, which will be continued."""
        for worker in state.tasks_at:
            self.send(worker, m.Abort(state.call.ordinal, keeps))
            self.ready_workers.wake(self.workers[worker])  # What else runs there may take newer weights now.

    def _prepare_consumers(self, state: CallState) -> None:
        for user in list(state.users.values()):
            self._prepare(user)

    def rows_done(
        self,
        state: CallState,
        worker: str,
        ids: Iterable[int],
        num_tokens: Iterable[int],
        dropped: Iterable[int] = (),
        sent_to: Iterable[str] = (),
    ) -> int:
        """Record finished rows of a call's result, at `worker` and at those that it sent them to; return how many are new."""
        if state.carry is not None and state.is_done:
            return self.partial_rollouts.finished_late(state, worker, ids, num_tokens, sent_to)
        if state.is_over:
            return 0
        fresh = {row: tokens for row, tokens in zip(ids, num_tokens, strict=True) if row not in state.done}
        gone = set(dropped) - state.dropped if dropped else set()
        if not (fresh or gone):
            return 0
        rows = list(fresh)
        state.turned_out(rows, gone)
        state.num_tokens.update(fresh)
        self.rows.made(state.call.ordinal, rows, worker, sent_to)
        for user in list(state.users.values()):
            if user.arrived(state.call.ordinal, rows, state.num_tokens):
                self._rows_came(user)
        if state.refill is not None:
            self.refills.turned_out(state, rows, gone)
        elif state.is_generation and state.failure is None and is_cut(state.call.options):
            self.cut(state)
        elif state.call.is_aligned and len(state.done) + len(state.dropped) == len(state.ids):
            self.complete(state, None)
        elif state.failure is not None and state.has_settled:
            self.fail(state, state.failure[1])
        return len(rows)

    def cut(self, state: CallState) -> None:
        """End a generation that has enough whole groups; abort the other samples, or carry them to the next call of its line."""
        if state.carry is not None:
            state.result = self.partial_rollouts.cut(state)
            if state.result is not None:
                state.ready.clear()
                self.abandon(state, keeps=True)
                self.complete(state, None)
            return
        late = {group_key(row) for row in state.dropped}
        wanted = min(num_wanted(state.call.options, state.num_groups), state.num_groups - len(late))
        if state.num_whole < wanted:
            return
        whole = [rows for key, rows in by_group(state.ids).items() if key not in late and state.done.issuperset(rows)]
        if len(whole) < wanted:
            return
        state.result = [row for rows in whole[:wanted] for row in rows]
        state.ready.clear()
        self.commands.append(Dropped(state.call.ordinal, tuple(sorted(set(state.ids).difference(state.result)))))
        self.abandon(state)
        self.complete(state, None)

    def complete(self, state: CallState, value: object) -> None:
        """End a call with its result."""
        state.is_done = state.is_over = True
        state.value = value
        self.versions.done(state.call)
        if state.call.engine == "train" and state.call.writes:
            self.changed()
        if state.is_update:
            self.open.changed(state.call.role)
            self.policy_dispatches.trained(state.call.role)
        if state.result is None:
            state.result = sorted(state.done)
        self.commands.append(Resolve(state.call.ordinal, value, state.chosen))  # Before the commands of calls that end because of this.
        self._leave(state)
        for other in self._waiting_for.pop(state.call.ordinal, []):
            other.waits_for.discard(state.call.ordinal)
            self._start_if_ready(other)
            if other.carry is not None:
                self.partial_rollouts.cut_if_done(other)
        if state.carry is not None:
            self.partial_rollouts.ended(state)
        self._prepare_consumers(state)
        if state.call.ordinal in self._wanted:
            self._wanted.discard(state.call.ordinal)
            self.want(state)

    def task_failed(self, state: CallState, task: m.Task, row: int, error: M2FlowError) -> None:
        """Record that a task failed, at this row if that is known.

        The call fails with its earliest failing sample, whichever was reported first.
        """
        rows = getattr(task, "ids", [])
        if isinstance(task, m.Apply) and state.failure is not None:
            self.accumulated(state)  # It was dispatched before its micro-batch failed, whose error is recorded.
            return
        if isinstance(task, m.Accumulate) and state.update is not None and not state.is_over:
            row = row if row in rows else min(rows)
            state.failed_at(row, error, ())
            state.update.fail_at(row)
            self.accumulated(state)
            return
        if not rows or not state.call.is_aligned:
            self.fail(state, error)
            return
        state.failed_at(row if row in rows else min(rows), error, [before for before in rows if before < row])
        if state.has_settled:
            assert state.failure is not None
            self.fail(state, state.failure[1])
        else:
            self._rows_came(state)

    def accumulated(self, state: CallState) -> None:
        """Fail an update with a failed micro-batch, once no group before its earliest failure is in flight."""
        if state.failure is not None and state.update is not None and state.update.has_tried_all and not state.tasks_at:
            self.fail(state, state.failure[1])

    def fail(self, state: CallState, error: M2FlowError, *, root: int | None = None) -> None:
        """Fail a call, and whatever depends on it by data or by effect.

        `root` is the call that caused the failure. A call that has failed already fails anew if this root is earlier than the known one.
        """
        ordinal = state.call.ordinal
        root, known = ordinal if root is None else root, self._errors.get(ordinal)
        if state.is_done or (known is not None and known[0] <= root):
            return
        self._errors[ordinal] = (root, error)
        if known is None:
            state.is_failed = state.is_over = True
            self._leave(state)
            self.abandon(state, keeps=state.is_generation and isinstance(error, RunInterrupted))
            self._waiting_for.pop(ordinal, None)
            if state.carry is not None:
                self.partial_rollouts.ended(state)
        for other in list(self.calls.values()):
            if ordinal in (*other.waits_for, *other.aligned_inputs, *other.fails_with):
                self.fail(other, error, root=root)
        # After what depends on it: who waits for that must not see this call rejected while a later call's error is still recorded there.
        self.commands.append(Reject(ordinal, error, root))

    def want(self, state: CallState) -> None:
        """Send a call's rows to the controller, as soon as it is done."""
        ordinal = state.call.ordinal
        if not state.is_done:
            self._wanted.add(ordinal)
        elif state.call.engine != "source":
            self.bring(ordinal, state.result or (), CONTROLLER)
        elif ordinal not in self._shown:
            # Its rows are at the controller already, but not yet in the store that the program reads from.
            self._shown.add(ordinal)
            self.send(CONTROLLER, m.Push(ordinal, list(state.result or ()), CONTROLLER))

    def release(self, ordinal: int) -> None:
        """Note that the program can't reach a call's result any more."""
        state = self.calls.get(ordinal)
        if state is not None:
            state.is_released = True
            if not state.users:
                self._perhaps_unreachable.add(ordinal)

    def forget_unreachable(self) -> None:
        """Forget calls whose rows neither the program nor another call can ask for."""
        if not self._perhaps_unreachable:
            return
        checked, self._perhaps_unreachable = self._perhaps_unreachable, set()
        needed = self.partial_rollouts.needed() if checked else checked
        for ordinal in sorted(checked):
            state = self.calls.get(ordinal)
            # A failed call is kept: an earlier failure may still reach what depends on it.
            if state is not None and state.is_released and state.is_done and not state.users and ordinal not in needed:
                self._forget(state)

    def _forget(self, state: CallState) -> None:
        ordinal = state.call.ordinal
        places = self.rows.forget(ordinal)
        if state.is_generation:
            places = list(dict.fromkeys([*places, *self.rows.forget(stopped_at(ordinal))]))
        for place in places:
            self.send(place, m.Forget(ordinal))
        self.commands.append(Forgotten(ordinal))
        self._shown.discard(ordinal)
        del self.calls[ordinal]

    def _is_done(self, ordinal: int) -> bool:
        return ordinal not in self._errors and (ordinal not in self.calls or self.calls[ordinal].is_done)

    def _leave(self, state: CallState) -> None:
        del self.active[state.call.ordinal]
        self.versions.over(state)
        if state.policy_dispatch is not None:
            self.policy_dispatches.over(state)
        if self.borrowing.is_used:
            self.borrowing.over(state.call.ordinal)
        if self.open.close(state):
            self.ready_workers.wake_role(state.call.role)
        if state.call.reads:
            self.ready_workers.wake_trainers()
        for follower in self._followers.pop(state.call.ordinal, []):
            follower.follows -= {state.call.ordinal}
            self._start_if_ready(follower)
        for _, ref in state.call.inputs:
            used = self.calls.get(ref.call)
            if used is not None and used.users.pop(state.call.ordinal, None) is not None and used.is_released and not used.users:
                self._perhaps_unreachable.add(ref.call)
        if state.is_released:
            self._perhaps_unreachable.add(state.call.ordinal)

    def _start_if_ready(self, state: CallState) -> None:
        """Start a call if its rows are known and it waits for nothing; called whenever one of these may have changed."""
        if state.is_prepared and not state.waits_for and not state.is_over:
            if state.call.engine == "rollout":
                if self.open.start(state):
                    self.ready_workers.feed_all(state)
                self.ready_workers.wake_role(state.call.role)
            elif state.call.engine == "train":
                self.open.start(state)
            if state.call.is_aligned and not (state.ids or state.follows or state.carry):
                self._end_empty(state)
        self._rows_came(state)

    def _end_empty(self, state: CallState) -> None:
        """End a call without rows that waits for nothing. One may let the next one end; a queue keeps a chain of them from recursing."""
        self._empty.append(state)
        if len(self._empty) > 1:
            return
        while self._empty:
            if not self._empty[0].is_over:
                self.complete(self._empty[0], None)
            self._empty.popleft()

    def _rows_came(self, state: CallState) -> None:
        """Note that rows of a call may be handed out."""
        if state.call.engine == "function":
            self.functions.may_start(state)
        elif state.call.engine == "train":
            self.ready_workers.wake_trainers(state.call.role)
        elif state.call.engine == "rollout":
            self.ready_workers.rows_came(state)

    def hand_out(self, state: CallState, count: int) -> list[int]:
        """Take the next rows of a call for a task."""
        rows = state.take(count)
        self.handed_out(state)
        return rows

    def handed_out(self, state: CallState) -> None:
        """Close a generation whose last rows are handed out."""
        if state.call.engine == "rollout" and state.is_all_begun and self.open.close(state):
            self.ready_workers.wake_role(state.call.role)

    def changed(self) -> None:
        """Note that the set of workers that can run a generation may have changed."""
        self.num_changes += 1

    def is_away(self, worker: WorkerState, state: CallState) -> bool:
        """Whether a worker can't be given samples of a generation: it is lost, has given back its devices, or can't get the weights."""
        is_lent = self.borrowing.is_used and self.borrowing.passes(worker, state)
        return worker.is_lost or is_lent or not self.engine_weights.can_have(worker, state)

    # ---- tasks and rows

    def send(self, worker: str, message: m.ToWorker) -> None:
        self.commands.append(Send(worker, message))

    def next_task(self) -> int:
        return self.tasks.next_number()

    def start(self, worker: WorkerState, engine: str, task: m.Task, rows: int = 0) -> None:
        """Give a worker a task."""
        self.tasks.start(worker, engine, task, rows, self.calls[task.call] if task.call >= 0 else None)
        if engine == "function":
            self.functions.note(worker)
        if task.call >= 0:
            for place in (worker.name, *map(worker_of, task.forward_to if isinstance(task, m.Generate | m.RunFunction) else ())):
                self.rows.introduce(task.call, place)  # Also if the call fails before it is reported what was sent there.
        self.send(worker.name, task)  # type: ignore[arg-type]

    def generated(self, number: int, num_rows: int) -> None:
        """Note that samples of a generation do not run any more."""
        worker = self.tasks.generated(number, num_rows)
        if worker is not None:
            self.ready_workers.wake(worker)

    def end_task(self, number: int) -> TaskState | None:
        """Remove an ended task from its worker, with the samples that an aborted generation had left; None if it had ended before."""
        task = self.tasks.end(number)
        if task is not None:
            worker = self.workers[task.worker]
            if task.engine == "function":
                self.functions.note(worker)
            if task.engine != "function" or worker.lease is not None:
                self.ready_workers.wake(worker)
        return task

    # ---- requeueing, and moving rows

    def requeue(self, state: CallState, rows: list[int], *, has_more: bool = False) -> None:
        """Put rows of a task back, to be handed out again."""
        if rows or has_more:
            state.requeue(rows)
            self.open.reopen(state)
            self._start_if_ready(state)

    def perhaps_unreachable(self, calls: Iterable[int]) -> None:
        """Check these calls again: something that kept them from being forgotten is over."""
        self._perhaps_unreachable.update(calls)

    def introduce(self, call: int, worker: str) -> None:
        """Note that a worker learns what a call is, and must be told when to forget it."""
        self.rows.introduce(call, worker)

    def bring(self, call: int, ids: Iterable[int], to: str) -> None:
        """Have these rows of a call's result sent to a worker that does not have them yet."""
        for owner, rows in self.rows.send(call, ids, to).items():
            self.send(owner, m.Push(call, rows, self.workers[to].tag if to in self.workers else to))

    def bring_inputs(self, state: CallState, ids: Iterable[int], to: str) -> None:
        """Have these rows of every aligned input of a call sent to a worker; inputs that are still to be made are made there."""
        rows = list(ids)
        for needed in state.aligned_inputs:
            if state.early is not None and not self.calls[needed].is_done:
                continue
            self.bring(needed, [row for row in rows if state.part_of[row] == needed] if state.is_union else rows, to)

    def values_for(self, state: CallState) -> dict[str, object]:
        """Return the inputs of a call that are whole values, by name."""
        return {name: self.calls[ref.call].value for name, ref in state.call.inputs if ref.call not in state.aligned_inputs}
