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

    def add(self, call_state: CallState) -> None:
        """Add a new call, which may still have to wait."""
        if call_state.call.engine == "rollout":
            self._open.setdefault(call_state.call.role, {})[call_state.call.ordinal] = call_state
            self.changed(call_state.call.role)

    def reopen(self, call_state: CallState) -> None:
        """Add a call again that has samples to hand out again."""
        if call_state.call.engine == "rollout":
            known = self._open.setdefault(call_state.call.role, {})
            known[call_state.call.ordinal] = call_state
            self._open[call_state.call.role] = dict(sorted(known.items()))
            self.changed(call_state.call.role)

    def start(self, call_state: CallState) -> bool:
        """Note that a call waits for nothing any more; False if that was known."""
        started = self._started.setdefault((call_state.call.engine, call_state.call.role), [])
        place = bisect.bisect_left(started, call_state.call.ordinal, key=_ordinal)
        if place < len(started) and started[place] is call_state:
            return False
        started.insert(place, call_state)
        return True

    def close(self, call_state: CallState) -> bool:
        """Remove a call with nothing left to hand out; False if that was known."""
        started = self._started.get((call_state.call.engine, call_state.call.role), [])
        place = bisect.bisect_left(started, call_state.call.ordinal, key=_ordinal)
        if place < len(started) and started[place] is call_state:
            del started[place]
        if self._open.get(call_state.call.role, {}).pop(call_state.call.ordinal, None) is None:
            return False
        self.changed(call_state.call.role)
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
        self._first[role] = next((call_state for call_state in self._open.get(role, {}).values() if can_run(call_state)), None)
        return self._first[role]


def _ordinal(call_state: CallState) -> int:
    return call_state.call.ordinal


@final
class Refills:
    """Tracks unfinished refills: which candidates are kept, which failed, and when each refill has enough (`m2flow.macro.refill`)."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._members: dict[Refill, list[CallState]] = {}
        self._failed: dict[int, dict[int, M2FlowError]] = {}
        """Generate call -> its samples that can't be generated."""

    def join(self, call_state: CallState, num_candidates: int) -> Refill:
        """Add a call to the refill of its input, or to a new one."""
        refill = self._state.calls[call_state.bases[0]].refill
        count = call_state.call.options["refill"]
        assert isinstance(count, int)
        refill = refill or Refill(num_candidates, count)
        self._members.setdefault(refill, []).append(call_state)
        return refill

    def judge(self, call_state: CallState, rows: Iterable[int], verdict: bool | M2FlowError) -> None:
        """Record whether candidates are kept, dropped or failed to be judged, and end the refill if that decides it."""
        assert call_state.refill is not None
        generations = [member for member in self._members[call_state.refill] if member.call.engine == "rollout"]
        shares = [member.share for member in generations]
        for position in {SampleId.unpack(row).prompt for row in rows}:
            call_state.refill.judge(position, verdict)
        for member, share in zip(generations, shares, strict=True):
            if member.share > share or member.policy_dispatch is not None:
                self._state.ready_workers.feed_all(member)
            self._state.ready_workers.rows_came(member)
        end = call_state.refill.end()
        if end is not None:
            self._end(self._members.pop(call_state.refill), end, call_state)

    def not_generated(self, call_state: CallState, task: m.Generate, row: int, error: M2FlowError) -> None:
        """Record that a candidate can't be generated, which is an error only if the refill needs it.

        Its task began nothing, so the task's samples of other groups, and those before it, are requeued.
        """
        if call_state.is_over:
            return
        row = row if row in task.ids else min(task.ids)
        self._state.requeue(call_state, [other for other in task.ids if group_key(other) != group_key(row) or other < row])
        self._failed.setdefault(call_state.call.ordinal, {})[row] = error
        self._judge_failed(call_state)

    def turned_out(self, call_state: CallState, kept: Iterable[int], dropped: Iterable[int]) -> None:
        """Record rows that a call of a refill has finished, or dropped."""
        self._judge_failed(call_state)
        for verdict, judged in ((True, kept), (False, dropped)):
            if call_state.call.drops and judged and not call_state.is_over:
                self.judge(call_state, judged, verdict)

    def _judge_failed(self, call_state: CallState) -> None:
        """Judge each group in which a sample can't be generated and all samples before it are done: the earliest failure counts."""
        failed = self._failed.get(call_state.call.ordinal, {})
        for rows in by_group(sorted(failed)).values():
            first = rows[0]
            before = range(first - SampleId.unpack(first).index, first)
            if call_state.done.issuperset(before) and not call_state.is_over:
                self.judge(call_state, [first], failed[first])

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
        call_state = CallState(call, stage, [], waits_for, aligned, frozenset(others), is_ungrouped=self.ablation.without_groups)
        if self.lost_transfers.has_any:
            remove_lost_workers(self, call_state)
        calls[call.ordinal] = call_state
        self.active[call.ordinal] = call_state
        self.open.add(call_state)
        for needed in inputs:
            calls[needed].users[call.ordinal] = call_state
        for needed in waits_for:
            self._waiting_for.setdefault(needed, []).append(call_state)
        if call.writes and call.engine == "function":
            call_state.follows = frozenset(reader.call.ordinal for reader in self.versions.reads_before(call))
            for followed in call_state.follows:
                self._followers.setdefault(followed, []).append(call_state)
        self.versions.add(call_state, self._is_done)
        if is_generation:
            self.may_keep = self.may_keep or keeps_cache(call.options)
            if carries(call.options):
                self.partial_rollouts.added(call_state)
        failed = [self._errors[c] for c in needs | others if c in self._errors] if self._errors else []
        if failed:
            root, error = min(failed, key=lambda found: found[0])
            self.fail(call_state, error, root=root)
        elif call.engine != "source":
            self._prepare(call_state)
        return call_state

    def sourced(self, call_state: CallState, ids: list[int], num_tokens: Iterable[int]) -> None:
        """Record the rows of a dataset call, which the controller has read."""
        call_state.prepare(ids, ids)
        self._prepare_consumers(call_state)
        self.rows_done(call_state, CONTROLLER, ids, num_tokens)

    def _prepare(self, call_state: CallState) -> None:
        """Fix the rows of a call once those of its inputs are known, and then those of its consumers."""
        if call_state.is_prepared or call_state.is_over:
            return
        rows_of: list[int] = []
        for base in call_state.bases:
            rows = self._rows_for(call_state, self.calls[base])
            if rows is None:
                return
            rows_of = sorted([*rows_of, *rows]) if rows_of else rows
            if call_state.is_union:
                call_state.part_of.update(dict.fromkeys(rows, base))
        if call_state.is_union and len(set(rows_of)) < len(rows_of):
            twice = next(a for a, b in itertools.pairwise(rows_of) if a == b)
            where = call_state.call.site.describe()
            self.fail(call_state, OpError(f"{call_state.call.name} got sample {SampleId.unpack(twice)} twice", where=where, now=TWICE))
            return
        if call_state.call.is_gated:
            call_state.refill = self.refills.join(call_state, len(rows_of))
        is_rollout = call_state.call.engine == "rollout"
        call_state.prepare(
            make_ids(call_state.call.ordinal, len(rows_of), call_state.num_per_prompt).tolist() if is_rollout else rows_of, rows_of
        )
        if is_rollout:
            self.policy_dispatches.begin(call_state)
        if call_state.is_update:
            is_ungrouped = self.ablation.without_groups
            call_state.update = progress_of(
                call_state.call, call_state.stage, call_state.ids, by_identity=self.deterministic, is_ungrouped=is_ungrouped
            )
        for needed in call_state.aligned_inputs:
            source = self.calls[needed]
            if source.done:
                call_state.arrived(needed, sorted(source.done), source.num_tokens)
            elif source.whole_at:
                self.functions.note(self.workers[source.whole_at])
        if not call_state.ids:
            self._await_inputs(call_state)
        self._start_if_ready(call_state)
        if call_state.carry is not None:
            self.partial_rollouts.prepared(call_state, len(rows_of))
        elif call_state.result is not None and not call_state.is_over:
            self._prepare_consumers(call_state)
        self.restoring.prepared(call_state)

    def _await_inputs(self, call_state: CallState) -> None:
        """Have a call without rows wait for its inputs: no row of theirs holds it back, and it must not end before them."""
        for needed in call_state.aligned_inputs:
            if not self._is_done(needed):
                call_state.waits_for.add(needed)
                self._waiting_for.setdefault(needed, []).append(call_state)
        self.handed_out(call_state)

    def _rows_for(self, call_state: CallState, base: CallState) -> list[int] | None:
        """Find the rows that a call has from one of its inputs, if they are known. Calls of one refill hand on every candidate."""
        if call_state.call.is_gated and base.refill is not None:
            return base.ids if base.is_prepared else None
        return base.result

    def abandon(self, call_state: CallState, *, keeps: bool = False) -> None:
        """Tell workers to abort what they have of a call; with `keeps`, to keep the tokens of stopped samples, which will be continued."""
        for worker in call_state.tasks_at:
            self.send(worker, m.Abort(call_state.call.ordinal, keeps))
            self.ready_workers.wake(self.workers[worker])  # What else runs there may take newer weights now.

    def _prepare_consumers(self, call_state: CallState) -> None:
        for user in list(call_state.users.values()):
            self._prepare(user)

    def rows_done(
        self,
        call_state: CallState,
        worker: str,
        ids: Iterable[int],
        num_tokens: Iterable[int],
        dropped: Iterable[int] = (),
        sent_to: Iterable[str] = (),
    ) -> int:
        """Record finished rows of a call's result, at `worker` and at those that it sent them to; return how many are new."""
        if call_state.carry is not None and call_state.is_done:
            return self.partial_rollouts.finished_late(call_state, worker, ids, num_tokens, sent_to)
        if call_state.is_over:
            return 0
        fresh = {row: tokens for row, tokens in zip(ids, num_tokens, strict=True) if row not in call_state.done}
        gone = set(dropped) - call_state.dropped if dropped else set()
        if not (fresh or gone):
            return 0
        rows = list(fresh)
        call_state.turned_out(rows, gone)
        call_state.num_tokens.update(fresh)
        self.rows.made(call_state.call.ordinal, rows, worker, sent_to)
        for user in list(call_state.users.values()):
            if user.arrived(call_state.call.ordinal, rows, call_state.num_tokens):
                self._rows_came(user)
        if call_state.refill is not None:
            self.refills.turned_out(call_state, rows, gone)
        elif call_state.is_generation and call_state.failure is None and is_cut(call_state.call.options):
            self.cut(call_state)
        elif call_state.call.is_aligned and len(call_state.done) + len(call_state.dropped) == len(call_state.ids):
            self.complete(call_state, None)
        elif call_state.failure is not None and call_state.has_settled:
            self.fail(call_state, call_state.failure[1])
        return len(rows)

    def cut(self, call_state: CallState) -> None:
        """End a generation that has enough whole groups; abort the other samples, or carry them to the next call of its line."""
        if call_state.carry is not None:
            call_state.result = self.partial_rollouts.cut(call_state)
            if call_state.result is not None:
                call_state.ready.clear()
                self.abandon(call_state, keeps=True)
                self.complete(call_state, None)
            return
        late = {group_key(row) for row in call_state.dropped}
        wanted = min(num_wanted(call_state.call.options, call_state.num_groups), call_state.num_groups - len(late))
        if call_state.num_whole < wanted:
            return
        whole = [rows for key, rows in by_group(call_state.ids).items() if key not in late and call_state.done.issuperset(rows)]
        if len(whole) < wanted:
            return
        call_state.result = [row for rows in whole[:wanted] for row in rows]
        call_state.ready.clear()
        self.commands.append(Dropped(call_state.call.ordinal, tuple(sorted(set(call_state.ids).difference(call_state.result)))))
        self.abandon(call_state)
        self.complete(call_state, None)

    def complete(self, call_state: CallState, value: object) -> None:
        """End a call with its result."""
        call_state.is_done = call_state.is_over = True
        call_state.value = value
        self.versions.done(call_state.call)
        if call_state.call.engine == "train" and call_state.call.writes:
            self.changed()
        if call_state.is_update:
            self.open.changed(call_state.call.role)
            self.policy_dispatches.trained(call_state.call.role)
        if call_state.result is None:
            call_state.result = sorted(call_state.done)
        self.commands.append(
            Resolve(call_state.call.ordinal, value, call_state.chosen)
        )  # Before the commands of calls that end because of this.
        self._leave(call_state)
        for other in self._waiting_for.pop(call_state.call.ordinal, []):
            other.waits_for.discard(call_state.call.ordinal)
            self._start_if_ready(other)
            if other.carry is not None:
                self.partial_rollouts.cut_if_done(other)
        if call_state.carry is not None:
            self.partial_rollouts.ended(call_state)
        self._prepare_consumers(call_state)
        if call_state.call.ordinal in self._wanted:
            self._wanted.discard(call_state.call.ordinal)
            self.want(call_state)

    def task_failed(self, call_state: CallState, task: m.Task, row: int, error: M2FlowError) -> None:
        """Record that a task failed, at this row if that is known.

        The call fails with its earliest failing sample, whichever was reported first.
        """
        rows = getattr(task, "ids", [])
        if isinstance(task, m.Apply) and call_state.failure is not None:
            self.accumulated(call_state)  # It was dispatched before its micro-batch failed, whose error is recorded.
            return
        if isinstance(task, m.Accumulate) and call_state.update is not None and not call_state.is_over:
            row = row if row in rows else min(rows)
            call_state.failed_at(row, error, ())
            call_state.update.fail_at(row)
            self.accumulated(call_state)
            return
        if not rows or not call_state.call.is_aligned:
            self.fail(call_state, error)
            return
        call_state.failed_at(row if row in rows else min(rows), error, [before for before in rows if before < row])
        if call_state.has_settled:
            assert call_state.failure is not None
            self.fail(call_state, call_state.failure[1])
        else:
            self._rows_came(call_state)

    def accumulated(self, call_state: CallState) -> None:
        """Fail an update with a failed micro-batch, once no group before its earliest failure is in flight."""
        if call_state.failure is not None and call_state.update is not None and call_state.update.has_tried_all and not call_state.tasks_at:
            self.fail(call_state, call_state.failure[1])

    def fail(self, call_state: CallState, error: M2FlowError, *, root: int | None = None) -> None:
        """Fail a call, and whatever depends on it by data or by effect.

        `root` is the call that caused the failure. A call that has failed already fails anew if this root is earlier than the known one.
        """
        ordinal = call_state.call.ordinal
        root, known = ordinal if root is None else root, self._errors.get(ordinal)
        if call_state.is_done or (known is not None and known[0] <= root):
            return
        self._errors[ordinal] = (root, error)
        if known is None:
            call_state.is_failed = call_state.is_over = True
            self._leave(call_state)
            self.abandon(call_state, keeps=call_state.is_generation and isinstance(error, RunInterrupted))
            self._waiting_for.pop(ordinal, None)
            if call_state.carry is not None:
                self.partial_rollouts.ended(call_state)
        for other in list(self.calls.values()):
            if ordinal in (*other.waits_for, *other.aligned_inputs, *other.fails_with):
                self.fail(other, error, root=root)
        # After what depends on it: who waits for that must not see this call rejected while a later call's error is still recorded there.
        self.commands.append(Reject(ordinal, error, root))

    def want(self, call_state: CallState) -> None:
        """Send a call's rows to the controller, as soon as it is done."""
        ordinal = call_state.call.ordinal
        if not call_state.is_done:
            self._wanted.add(ordinal)
        elif call_state.call.engine != "source":
            self.bring(ordinal, call_state.result or (), CONTROLLER)
        elif ordinal not in self._shown:
            # Its rows are at the controller already, but not yet in the store that the program reads from.
            self._shown.add(ordinal)
            self.send(CONTROLLER, m.Push(ordinal, list(call_state.result or ()), CONTROLLER))

    def release(self, ordinal: int) -> None:
        """Note that the program can't reach a call's result any more."""
        call_state = self.calls.get(ordinal)
        if call_state is not None:
            call_state.is_released = True
            if not call_state.users:
                self._perhaps_unreachable.add(ordinal)

    def forget_unreachable(self) -> None:
        """Forget calls whose rows neither the program nor another call can ask for."""
        if not self._perhaps_unreachable:
            return
        checked, self._perhaps_unreachable = self._perhaps_unreachable, set()
        needed = self.partial_rollouts.needed() if checked else checked
        for ordinal in sorted(checked):
            call_state = self.calls.get(ordinal)
            # A failed call is kept: an earlier failure may still reach what depends on it.
            if call_state is not None and call_state.is_released and call_state.is_done and not call_state.users and ordinal not in needed:
                self._forget(call_state)

    def _forget(self, call_state: CallState) -> None:
        ordinal = call_state.call.ordinal
        places = self.rows.forget(ordinal)
        if call_state.is_generation:
            places = list(dict.fromkeys([*places, *self.rows.forget(stopped_at(ordinal))]))
        for place in places:
            self.send(place, m.Forget(ordinal))
        self.commands.append(Forgotten(ordinal))
        self._shown.discard(ordinal)
        del self.calls[ordinal]

    def _is_done(self, ordinal: int) -> bool:
        return ordinal not in self._errors and (ordinal not in self.calls or self.calls[ordinal].is_done)

    def _leave(self, call_state: CallState) -> None:
        del self.active[call_state.call.ordinal]
        self.versions.over(call_state)
        if call_state.policy_dispatch is not None:
            self.policy_dispatches.over(call_state)
        if self.borrowing.is_used:
            self.borrowing.over(call_state.call.ordinal)
        if self.open.close(call_state):
            self.ready_workers.wake_role(call_state.call.role)
        if call_state.call.reads:
            self.ready_workers.wake_trainers()
        for follower in self._followers.pop(call_state.call.ordinal, []):
            follower.follows -= {call_state.call.ordinal}
            self._start_if_ready(follower)
        for _, ref in call_state.call.inputs:
            used = self.calls.get(ref.call)
            if used is not None and used.users.pop(call_state.call.ordinal, None) is not None and used.is_released and not used.users:
                self._perhaps_unreachable.add(ref.call)
        if call_state.is_released:
            self._perhaps_unreachable.add(call_state.call.ordinal)

    def _start_if_ready(self, call_state: CallState) -> None:
        """Start a call if its rows are known and it waits for nothing; called whenever one of these may have changed."""
        if call_state.is_prepared and not call_state.waits_for and not call_state.is_over:
            if call_state.call.engine == "rollout":
                if self.open.start(call_state):
                    self.ready_workers.feed_all(call_state)
                self.ready_workers.wake_role(call_state.call.role)
            elif call_state.call.engine == "train":
                self.open.start(call_state)
            if call_state.call.is_aligned and not (call_state.ids or call_state.follows or call_state.carry):
                self._end_empty(call_state)
        self._rows_came(call_state)

    def _end_empty(self, call_state: CallState) -> None:
        """End a call without rows that waits for nothing. One may let the next one end; a queue keeps a chain of them from recursing."""
        self._empty.append(call_state)
        if len(self._empty) > 1:
            return
        while self._empty:
            if not self._empty[0].is_over:
                self.complete(self._empty[0], None)
            self._empty.popleft()

    def _rows_came(self, call_state: CallState) -> None:
        """Note that rows of a call may be handed out."""
        if call_state.call.engine == "function":
            self.functions.may_start(call_state)
        elif call_state.call.engine == "train":
            self.ready_workers.wake_trainers(call_state.call.role)
        elif call_state.call.engine == "rollout":
            self.ready_workers.rows_came(call_state)

    def hand_out(self, call_state: CallState, count: int) -> list[int]:
        """Take the next rows of a call for a task."""
        rows = call_state.take(count)
        self.handed_out(call_state)
        return rows

    def handed_out(self, call_state: CallState) -> None:
        """Close a generation whose last rows are handed out."""
        if call_state.call.engine == "rollout" and call_state.is_all_begun and self.open.close(call_state):
            self.ready_workers.wake_role(call_state.call.role)

    def changed(self) -> None:
        """Note that the set of workers that can run a generation may have changed."""
        self.num_changes += 1

    def is_away(self, worker: WorkerState, call_state: CallState) -> bool:
        """Whether a worker can't be given samples of a generation: it is lost, has given back its devices, or can't get the weights."""
        is_lent = self.borrowing.is_used and self.borrowing.passes(worker, call_state)
        return worker.is_lost or is_lent or not self.engine_weights.can_have(worker, call_state)

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

    def requeue(self, call_state: CallState, rows: list[int], *, has_more: bool = False) -> None:
        """Put rows of a task back, to be handed out again."""
        if rows or has_more:
            call_state.requeue(rows)
            self.open.reopen(call_state)
            self._start_if_ready(call_state)

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

    def bring_inputs(self, call_state: CallState, ids: Iterable[int], to: str) -> None:
        """Have these rows of every aligned input of a call sent to a worker; inputs that are still to be made are made there."""
        rows = list(ids)
        for needed in call_state.aligned_inputs:
            if call_state.early is not None and not self.calls[needed].is_done:
                continue
            self.bring(needed, [row for row in rows if call_state.part_of[row] == needed] if call_state.is_union else rows, to)

    def values_for(self, call_state: CallState) -> dict[str, object]:
        """Return the inputs of a call that are whole values, by name."""
        return {name: self.calls[ref.call].value for name, ref in call_state.call.inputs if ref.call not in call_state.aligned_inputs}
