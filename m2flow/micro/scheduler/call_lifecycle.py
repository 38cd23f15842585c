"""When a call starts and ends: what it waits for, which rows it has, what its end or failure means for others; and which wait in a ring.

    CallAdded --add_call--> rows are known --> started --rows_done--> complete (Resolve), cut or fail (Reject) --> forgotten (Forgotten)

One call's end may start or end others, at once and in program order; so this is the one decider that asks others, which know nothing of
it: `PolicyDispatches` when a generation begins and is over, `Refills` and `PartialRollouts` whether a generation is to end early, and
`Recovery` for what the ledger has of a call. They answer what is to end now.

The rows of a call are known when those of its inputs are. A call on what a refill gives gets its rows as verdicts make them certain
(`Coming`), and is begun by then.

A call that has enough is cut: its other samples are aborted, or carried to the next call of its line. A failed call fails what depends on
it by data or by effect, with the error of the earliest call that caused it. When the run is asked to stop (`wind_down`), updates that have
begun are finished, since they have consumed samples and changed the trainer's gradient; all other calls fail, and their running samples
are stopped and written to the ledger, so that a resumed run continues them.

Deadlocks are found as rings in the wait graph of unfinished calls, without asking for the time.

    SchedulerState --waits_of--> [Wait] --find_deadlock--> a ring that nobody in it can leave, or nothing

A call with a task in flight waits for nobody here: its worker continues, or the supervisor finds that it hangs. A call needs all that it
waits for; of those that could free room in a channel, or give up a lease, one is enough. So a ring counts only among those of which none
can continue.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple, final

from m2flow.errors import M2FlowError, OpError, RunInterrupted
from m2flow.macro.graph import TWICE, Call
from m2flow.macro.oversampling import carries, keeps_cache, num_wanted
from m2flow.macro.refill import Coming, Refill, RefillEnd, source_exhausted
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import CONTROLLER, Discarded, Dropped, Forgotten, Reject, Resolve
from m2flow.micro.protocol.plan import Stage
from m2flow.micro.protocol.worker_state import Lease, kind_of, stopped_at
from m2flow.micro.scheduler.backpressure import Credits
from m2flow.micro.scheduler.call_state import CallState, Group, progress_of
from m2flow.micro.scheduler.partial_rollouts import PartialRollouts
from m2flow.micro.scheduler.scheduling_policy_dispatch import PolicyDispatches
from m2flow.micro.scheduler.state import SchedulerState
from m2flow.micro.scheduler.worker_failure import Recovery, RowsReport, remove_lost_workers
from m2flow.samples import SampleId, by_group, group_key, make_ids

# ---- starts and ends of calls


class _EndedRefill(NamedTuple):
    """A refill that has enough, or can't have."""

    members: list[CallState]
    end: RefillEnd
    judged: CallState
    """The call whose verdict decided it."""


@final
class Refills:
    """Tracks unfinished refills: which candidates are kept, which failed, and when each refill has enough (`m2flow.macro.refill`)."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def join(self, call_state: CallState, num_candidates: int) -> Refill:
        """Add a call to the refill of its input, or to a new one."""
        refill = self._state.calls[call_state.bases[0]].refill
        count = call_state.call.options["refill"]
        assert isinstance(count, int)
        refill = refill or Refill(num_candidates, count)
        self._state.refill_members.setdefault(refill, []).append(call_state)
        return refill

    def generations(self, refill: Refill) -> list[CallState]:
        """Find the calls that generate the candidates of an unfinished refill."""
        return [member for member in self._state.refill_members[refill] if member.is_generation]

    def judge(self, call_state: CallState, rows: Iterable[int], verdict: bool | M2FlowError) -> _EndedRefill | None:
        """Record whether candidates are kept, dropped or failed to be judged; return the refill if that ends it."""
        assert call_state.refill is not None
        generations = self.generations(call_state.refill)
        shares = [member.share for member in generations]
        for position in {SampleId.unpack(row).prompt for row in rows}:
            call_state.refill.judge(position, verdict)
        for member, share in zip(generations, shares, strict=True):
            if member.share > share:
                self._state.ready_workers.feed_all(member)
            self._state.ready_workers.rows_came(member)
        end = call_state.refill.end()
        return None if end is None else _EndedRefill(self._state.refill_members.pop(call_state.refill), end, call_state)

    def not_judged(self, call_state: CallState, task: m.RunFunction, error: M2FlowError) -> _EndedRefill | None:
        """Record that a function has failed on candidates: on one, or on several, which are then judged one by one."""
        if len({group_key(row) for row in task.ids}) == 1:
            return self.judge(call_state, task.ids, error)
        left = call_state.unfinished(task.ids)
        call_state.suspects.update(left)
        self._state.requeue(call_state, left)
        return None

    def not_generated(self, call_state: CallState, task: m.Generate, row: int, error: M2FlowError) -> _EndedRefill | None:
        """Record that a candidate can't be generated, which is an error only if the refill needs it.

        Its task began nothing, so the task's samples of other groups, and those before it, are requeued.
        """
        if call_state.is_over:
            return None
        row = row if row in task.ids else min(task.ids)
        self._state.requeue(call_state, [other for other in task.ids if group_key(other) != group_key(row) or other < row])
        self._state.refill_failures.setdefault(call_state.call.ordinal, {})[row] = error
        return self._judge_failed(call_state)

    def turned_out(self, call_state: CallState, kept: Iterable[int], dropped: Iterable[int]) -> _EndedRefill | None:
        """Record rows that a call of a refill has finished, or dropped."""
        ended = self._judge_failed(call_state)
        for verdict, judged in ((True, kept), (False, dropped)):
            if ended is None and call_state.call.drops and judged and not call_state.is_over:
                ended = self.judge(call_state, judged, verdict)
        return ended

    def _judge_failed(self, call_state: CallState) -> _EndedRefill | None:
        """Judge each group in which a sample can't be generated and all samples before it are done: the earliest failure counts."""
        failed = self._state.refill_failures.get(call_state.call.ordinal, {})
        for rows in by_group(sorted(failed)).values():
            first = rows[0]
            before = range(first - SampleId.unpack(first).index, first)
            if call_state.done.issuperset(before) and not call_state.is_over:
                ended = self.judge(call_state, [first], failed[first])
                if ended is not None:
                    return ended
        return None


@final
class CallLifecycle:
    """Adds, starts, ends, fails and forgets calls."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._policies = PolicyDispatches(state)
        self._recovery = Recovery(state)
        self._partial_rollouts = PartialRollouts(state)
        self._refills = Refills(state)

    # ---- beginning

    def add_call(self, call: Call, stage: Stage) -> CallState:
        """Add a call: find what it waits for, and count the input rows that are there already."""
        state, calls = self._state, self._state.calls
        inputs = list(dict.fromkeys([ref.call for _, ref in call.inputs]))
        needed_writers, newer_writers = state.versions.written_for(call) if call.reads else ([], [])
        needs = {*inputs, *needed_writers}
        others = set(newer_writers) - needs if newer_writers else set()
        is_generation = call.engine == "rollout"
        if is_generation and call.carries_from is not None:
            others.add(call.carries_from)
        aligned = tuple([c for c in inputs if calls[c].call.is_aligned])
        waits_for = {c for c in needs.difference(aligned) if not state.is_done(c)}
        call_state = CallState(call, stage, [], waits_for, aligned, frozenset(others), is_ungrouped=state.ablation.without_groups)
        if state.has_losses:
            remove_lost_workers(state, call_state)
        calls[call.ordinal] = state.active[call.ordinal] = call_state
        for needed in inputs:
            calls[needed].users[call.ordinal] = call_state
        for needed in waits_for:
            state.waiting_for.setdefault(needed, []).append(call_state)
        if call.writes and call.engine == "function":
            call_state.follows = frozenset(reader.call.ordinal for reader in state.versions.reads_before(call))
            for followed in call_state.follows:
                state.followers.setdefault(followed, []).append(call_state)
        if call.reads or call.writes:
            state.versions.add(call_state, state.is_done)
        if is_generation:
            state.open.add(call_state)
            state.may_keep = state.may_keep or keeps_cache(call.options)
            if carries(call.options):
                self._cut_if_active(self._partial_rollouts.added(call_state))
        failed = [state.errors[c] for c in needs | others if c in state.errors] if state.errors else []
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
        calls, rows_of = self._state.calls, list[int]()
        if call_state.coming is not None and calls[call_state.bases[0]].result is not None and not call_state.is_over:
            self._all_came(call_state)
        if call_state.is_prepared or call_state.is_over or self._begin_early(call_state):
            return
        for base in call_state.bases:
            rows = self._rows_for(call_state, calls[base])
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
            call_state.refill = self._refills.join(call_state, len(rows_of))
        if call_state.is_generation:
            call_state.prepare(make_ids(call_state.call.ordinal, len(rows_of), call_state.num_per_prompt).tolist(), rows_of)
            self._policies.begin(call_state)
        else:
            call_state.prepare(rows_of, rows_of)
        if call_state.is_update:
            is_ungrouped = self._state.ablation.without_groups
            call_state.update = progress_of(
                call_state.call, call_state.stage, call_state.ids, by_identity=self._state.deterministic, is_ungrouped=is_ungrouped
            )
        for needed in call_state.aligned_inputs:
            source = calls[needed]
            if source.done:
                call_state.arrived(needed, sorted(source.done), source.num_tokens)
            elif source.whole_at:
                self._state.functions.note(self._state.workers[source.whole_at])
        if not call_state.ids:
            self._await_inputs(call_state)
        self._start_if_ready(call_state)
        if call_state.carry is not None:
            if self._partial_rollouts.prepared(call_state, len(rows_of)):
                self.complete(call_state, None)
            else:
                self._cut_if_active(call_state)
        elif call_state.users and (call_state.result is not None or call_state.gives_refill) and not call_state.is_over:
            self._prepare_consumers(call_state)
        self._take_recorded(call_state)

    def _begin_early(self, call_state: CallState) -> bool:
        """Prepare a call on what an unfinished refill gives, which takes groups as it becomes certain that they are given.

        Others wait for the refill's end: those that take all rows at once, and those on the devices of all of the refill's engines, which
        would have to leave these for each other.
        """
        if not self._state.refill_members or not call_state.bases:
            return False
        base = self._state.calls[call_state.bases[0]]
        if base.refill is None or base.result is not None or not (base.gives_refill and call_state.takes_groups):
            return False
        draw_on = {lease for call in self._refills.generations(base.refill) for lease in self._leases_of(call)}
        if None not in draw_on and draw_on <= self._leases_of(call_state):
            return False
        call, in_order = call_state.call, call_state.is_update and self._state.deterministic
        part = call.options["minibatch_size"] if call_state.is_update else None
        assert part is None or isinstance(part, int)
        call_state.coming = Coming(base.refill, part, in_order=in_order)
        call_state.prepare([], [])
        if call_state.is_update:
            call_state.update = progress_of(call, call_state.stage, (), by_identity=in_order, num_to_come=base.refill.count)
        self._start_if_ready(call_state)
        self._grow(call_state)
        return True

    def _leases_of(self, call_state: CallState) -> set[Lease | None]:
        """The leases under which a call's workers run; None for those that share their devices with nobody."""
        return {self._state.workers[name].lease for name in call_state.stage.workers}

    def _grow(self, call_state: CallState, *, is_all: bool = False) -> None:
        """Give a call on a refill what has become certain, all of it if the refill has ended, and of that what is done."""
        coming = call_state.coming
        assert coming is not None
        candidates, found = self._state.calls[call_state.bases[0]].ids, coming.more(is_all=is_all)
        for position, minibatch in found:
            rows = coming.rows_of(position, candidates)
            call_state.grow(rows)
            if call_state.update is not None:
                call_state.update.grow(Group(group_key(rows[0]), tuple(rows)), minibatch)
            for needed in call_state.aligned_inputs:
                source = self._state.calls[needed]
                if came := [row for row in rows if row in source.done]:
                    call_state.arrived(needed, came, source.num_tokens)
        if found:
            self._state.rows_came(call_state)
            self._take_recorded(call_state)

    def _take_recorded(self, call_state: CallState) -> None:
        """Take in what the ledger has of a call's rows."""
        if self._state.recorded:
            for report in self._recovery.prepared(call_state):
                self.restored(report)

    def _all_came(self, call_state: CallState) -> None:
        """Take in that the refill of a call's rows has ended with a result."""
        self._grow(call_state, is_all=True)
        call_state.close()
        if call_state.users and call_state.result is not None:
            self._prepare_consumers(call_state)
        if call_state.failure is not None and call_state.is_update:
            self.accumulated(call_state)
        elif call_state.failure is not None and call_state.has_settled:
            self.fail(call_state, call_state.failure[1])
        elif call_state.has_all_rows:
            self.complete(call_state, None)
        self._take_recorded(call_state)

    def _await_inputs(self, call_state: CallState) -> None:
        """Have a call without rows wait for its inputs: no row of theirs holds it back, and it must not end before them."""
        for needed in call_state.aligned_inputs:
            if not self._state.is_done(needed):
                call_state.waits_for.add(needed)
                self._state.waiting_for.setdefault(needed, []).append(call_state)
        self._state.handed_out(call_state)

    def _rows_for(self, call_state: CallState, base: CallState) -> list[int] | None:
        """Find the rows that a call has from one of its inputs, if they are known. Calls of one refill hand on every candidate."""
        if base.refill is not None and call_state.call.is_gated:
            return base.ids if base.is_prepared else None
        return base.result

    def abandon(self, call_state: CallState, *, keeps: bool = False) -> None:
        """Tell workers to abort what they have of a call; with `keeps`, to keep the tokens of stopped samples, which will be continued."""
        for worker in call_state.tasks_at:
            self._state.send(worker, m.Abort(call_state.call.ordinal, keeps))
            self._state.ready_workers.wake(self._state.workers[worker])  # What else runs there may take newer weights now.

    def _prepare_consumers(self, call_state: CallState) -> None:
        for user in list(call_state.users.values()):
            self._prepare(user)

    # ---- rows

    def restored(self, report: RowsReport) -> None:
        """Record rows that are done by what the ledger has."""
        if report.num_generated:
            self._policies.ended(report.call_state, report.ids, report.num_generated)
        self.rows_done(report.call_state, report.place, report.ids, report.num_tokens, report.dropped)

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
            return self._partial_rollouts.finished_late(call_state, worker, ids, num_tokens, sent_to)
        if call_state.is_over:
            return 0
        fresh = dict(zip(ids, num_tokens, strict=True))
        for known in call_state.done.intersection(fresh):
            del fresh[known]
        gone = set(dropped) - call_state.dropped if dropped else set()
        if not (fresh or gone):
            return 0
        rows = list(fresh)
        call_state.turned_out(rows, gone)
        call_state.num_tokens.update(fresh)
        self._state.rows.made(call_state.call.ordinal, rows, worker, sent_to)
        if call_state.is_generation and "agent" in call_state.call.options:
            self._state.played_at.made(call_state.call.ordinal, rows, worker)
        for user in call_state.users.values():
            if user.arrived(call_state.call.ordinal, rows, call_state.num_tokens):
                self._state.rows_came(user)
        if call_state.refill is not None:
            self._end_refill(self._refills.turned_out(call_state, rows, gone))
            for user in list(call_state.users.values()) if call_state.gives_refill and not call_state.is_over else ():
                if user.coming is not None and not user.is_over:
                    self._grow(user)
        elif call_state.is_cut and call_state.failure is None:
            self.cut(call_state)
        elif call_state.has_all_rows:
            self.complete(call_state, None)
        elif call_state.failure is not None and call_state.has_settled:
            self.fail(call_state, call_state.failure[1])
        return len(rows)

    def cut(self, call_state: CallState) -> None:
        """End a generation that has enough whole groups; abort the other samples, or carry them to the next call of its line."""
        if call_state.carry is not None:
            call_state.result = self._partial_rollouts.cut(call_state)
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
        self._state.commands.append(Dropped(call_state.call.ordinal, tuple(sorted(set(call_state.ids).difference(call_state.result)))))
        self.abandon(call_state)
        self.complete(call_state, None)

    # ---- the end

    def complete(self, call_state: CallState, value: object) -> None:
        """End a call with its result."""
        state, call = self._state, call_state.call
        call_state.is_done = call_state.is_over = True
        call_state.value = value
        if call.engine == "train":
            state.versions.done(call)
            if call.writes:
                state.engines_changed()
            if call_state.is_update:
                state.open.forget_first(call.role)
                self._policies.trained(call.role)
        if call_state.result is None:
            call_state.result = sorted(call_state.done)
        state.commands.append(Resolve(call.ordinal, value, call_state.chosen))  # Before the commands of calls that end because of this.
        self._leave(call_state)
        for other in state.waiting_for.pop(call.ordinal, ()):
            other.waits_for.discard(call.ordinal)
            self._start_if_ready(other)
            if other.carry is not None:
                self._cut_if_active(other)
        if call_state.carry is not None:
            self._cut_if_active(self._partial_rollouts.ended(call_state))
        if call_state.users:
            self._prepare_consumers(call_state)
        if call.ordinal in state.wanted:
            state.wanted.discard(call.ordinal)
            self.want(call_state)

    def task_failed(self, call_state: CallState, task: m.Task, row: int, error: M2FlowError) -> None:
        """Record that a task failed, at this row if that is known.

        A call fails with its earliest failing sample, whichever was reported first; of a refill, the candidate fails, not the call.
        """
        if call_state.refill is not None and isinstance(task, m.RunFunction):
            if not call_state.is_over:
                self._end_refill(self._refills.not_judged(call_state, task, error))
            return
        if call_state.refill is not None and isinstance(task, m.Generate):
            self._end_refill(self._refills.not_generated(call_state, task, row, error))
            return
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
            self._state.rows_came(call_state)

    def accumulated(self, call_state: CallState) -> None:
        """Fail an update with a failed micro-batch, once no group before its earliest failure is in flight."""
        if call_state.failure is not None and call_state.update is not None and call_state.update.has_tried_all and not call_state.tasks_at:
            self.fail(call_state, call_state.failure[1])

    def fail(self, call_state: CallState, error: M2FlowError, *, root: int | None = None) -> None:
        """Fail a call, and whatever depends on it by data or by effect.

        `root` is the call that caused the failure. A call that has failed already fails anew if this root is earlier than the known one.
        """
        ordinal = call_state.call.ordinal
        root, known = ordinal if root is None else root, self._state.errors.get(ordinal)
        if call_state.is_done or (known is not None and known[0] <= root):
            return
        self._state.errors[ordinal] = (root, error)
        if known is None:
            call_state.is_failed = call_state.is_over = True
            self._leave(call_state)
            self.abandon(call_state, keeps=call_state.is_generation and isinstance(error, RunInterrupted))
            self._state.waiting_for.pop(ordinal, None)
            if call_state.carry is not None:
                self._cut_if_active(self._partial_rollouts.ended(call_state))
        for other in list(self._state.calls.values()):
            if ordinal in (*other.waits_for, *other.aligned_inputs, *other.fails_with):
                self.fail(other, error, root=root)
        # After what depends on it: who waits for that must not see this call rejected while a later call's error is still recorded there.
        self._state.commands.append(Reject(ordinal, error, root))

    # ---- results

    def want(self, call_state: CallState) -> None:
        """Send a call's rows to the controller, as soon as it is done."""
        ordinal = call_state.call.ordinal
        if not call_state.is_done:
            self._state.wanted.add(ordinal)
        elif call_state.call.engine != "source":
            self._state.bring(ordinal, call_state.result or (), CONTROLLER)
        elif ordinal not in self._state.shown:
            # Its rows are at the controller already, but not yet in the store that the program reads from.
            self._state.shown.add(ordinal)
            self._state.send(CONTROLLER, m.Push(ordinal, list(call_state.result or ()), CONTROLLER))

    def release(self, ordinal: int) -> None:
        """Note that the program can't reach a call's result any more."""
        call_state = self._state.calls.get(ordinal)
        if call_state is not None:
            call_state.is_released = True
            if not call_state.users:
                self._state.perhaps_unreachable.add(ordinal)

    def forget_unreachable(self) -> None:
        """Forget calls whose rows neither the program nor another call can ask for."""
        if not self._state.perhaps_unreachable:
            return
        checked, self._state.perhaps_unreachable = self._state.perhaps_unreachable, set()
        needed = self._partial_rollouts.needed() if checked else checked
        for ordinal in sorted(checked):
            call_state = self._state.calls.get(ordinal)
            # A failed call is kept: an earlier failure may still reach what depends on it.
            if call_state is not None and call_state.is_released and call_state.is_done and not call_state.users and ordinal not in needed:
                self._forget(call_state)

    def _forget(self, call_state: CallState) -> None:
        ordinal = call_state.call.ordinal
        places = self._state.rows.forget(ordinal)
        if call_state.is_generation:
            places = list(dict.fromkeys([*places, *self._state.rows.forget(stopped_at(ordinal))]))
        for place in places:
            self._state.send(place, m.Forget(ordinal))
        self._state.commands.append(Forgotten(ordinal))
        self._state.shown.discard(ordinal)
        del self._state.calls[ordinal]

    def _leave(self, call_state: CallState) -> None:
        state, call, ordinal = self._state, call_state.call, call_state.call.ordinal
        del state.active[ordinal]
        if call_state.is_generation:
            self._policies.over(call_state)
        if call.engine != "function" and state.open.close(call_state):
            state.ready_workers.wake_role(*call.speakers)
        if call.reads:
            state.versions.over(call_state)
            state.ready_workers.wake_trainers()
        for follower in state.followers.pop(ordinal, ()):
            follower.follows -= {ordinal}
            self._start_if_ready(follower)
        for _, ref in call.inputs:
            used = state.calls.get(ref.call)
            if used is not None and used.users.pop(ordinal, None) is not None and used.is_released and not used.users:
                state.perhaps_unreachable.add(ref.call)
        if call_state.is_released:
            state.perhaps_unreachable.add(ordinal)

    def _start_if_ready(self, call_state: CallState) -> None:
        """Start a call if its rows are known and it waits for nothing; called whenever one of these may have changed."""
        if call_state.is_prepared and not call_state.waits_for and not call_state.is_over:
            self._state.opened(call_state)
            if call_state.call.is_aligned and not (call_state.ids or call_state.follows or call_state.carry or call_state.coming):
                self._end_empty(call_state)
        self._state.rows_came(call_state)

    def _end_empty(self, call_state: CallState) -> None:
        """End a call without rows that waits for nothing. One may let the next one end; a queue keeps a chain of them from recursing."""
        empty = self._state.empty_calls
        empty.append(call_state)
        if len(empty) > 1:
            return
        while empty:
            if not empty[0].is_over:
                self.complete(empty[0], None)
            empty.popleft()

    # ---- ends that others decide

    def task_ended(self, ordinal: int) -> None:
        """Note that a generate task of a call has ended: the next call of its line may take over what it left."""
        self._cut_if_active(self._partial_rollouts.task_ended(ordinal))

    def gave_up(self, call_state: CallState) -> None:
        """Note that late samples of a generation were dropped."""
        if call_state.failure is None:
            self.cut(call_state)
        elif call_state.has_settled:
            self.fail(call_state, call_state.failure[1])

    def wind_down(self) -> None:
        """Fail every call that no update that has begun depends on."""
        active, needed = self._state.active, set[int]()
        todo = [call_state for call_state in active.values() if call_state.update is not None and call_state.update.has_begun]
        while todo:
            call_state = todo.pop()
            if call_state.call.ordinal not in needed:
                needed.add(call_state.call.ordinal)
                inputs = {ref.call for _, ref in call_state.call.inputs}
                before = inputs | call_state.waits_for | set(call_state.aligned_inputs)
                todo += [active[ordinal] for ordinal in before if ordinal in active]
        for call_state in list(active.values()):
            if call_state.call.ordinal not in needed and not call_state.is_over:
                self.fail(call_state, RunInterrupted("the run was asked to stop", where=call_state.call.site.describe()))

    def _cut_if_active(self, call_state: CallState | None) -> None:
        """End an unfinished call with partial rollouts, if it has enough."""
        if call_state is not None and not call_state.is_over:
            self.cut(call_state)

    def _end_refill(self, ended: _EndedRefill | None) -> None:
        """Abort what still runs beyond what was needed, and end the calls of the refill with the rows that it keeps."""
        if ended is None:
            return
        members, end, judged = ended
        self._state.commands.append(Discarded(members[0].call.ordinal, end.last))
        error = end.error
        if end.is_dry:
            judged, error = members[-1], source_exhausted(members[-1].call, len(end.kept), end.last + 1)
        for member in members:
            self._state.refill_failures.pop(member.call.ordinal, None)
            member.result = [row for row in member.ids if SampleId.unpack(row).prompt in end.kept]
            member.ready.clear()
            if member is judged and error is not None:
                self.fail(member, error)
            elif not member.is_over:
                self.abandon(member)
                self.complete(member, None)


# ---- deadlocks


class Wait(NamedTuple):
    """One edge of the wait graph."""

    who: str
    on: str
    what: str
    """What it needs from there, for the message."""
    is_one_of: bool = False
    """Whether any one of the waits of `who` suffices."""


def waits_of(state: SchedulerState) -> list[Wait]:
    """List the waits of every unfinished call, and of the channels and leases that they wait for."""
    waits: list[Wait] = []
    for call_state in state.active.values():
        if call_state.tasks_at:
            continue
        who = name_of(call_state)
        for ordinal in sorted(call_state.waits_for):
            if ordinal in state.calls:
                waits.append(Wait(who, name_of(state.calls[ordinal]), "its result"))
        for ordinal in call_state.aligned_inputs:
            source = state.calls[ordinal]
            if not source.is_over:
                waits.append(Wait(who, name_of(source), f"rows, of which {len(source.done)} of {len(source.ids)} are done"))
        waits += _of_room(who, call_state, state.credits)
        waits += _of_leases(who, call_state, state)
    return waits


def find_deadlock(waits: Iterable[Wait]) -> list[Wait]:
    """Find the first ring that nobody outside it can break, starting at its first member; empty if there is none."""
    on: dict[str, list[Wait]] = {}
    for wait in waits:
        on.setdefault(wait.who, []).append(wait)
    free = _not_blocked(on)
    on = {who: [wait for wait in found if wait.on not in free] for who, found in on.items() if who not in free}
    done: set[str] = set()
    for start in on:
        ring = _walk(start, on, done)
        if ring:
            return ring
    return []


def describe_waits(ring: Iterable[Wait]) -> str:
    """Describe a ring of waits in one line."""
    return "; ".join(f"{wait.who} waits for {wait.on} ({wait.what})" for wait in ring)


def name_of(call_state: CallState) -> str:
    """Name a call uniquely: one line of a loop within a step makes many calls."""
    step = f" in step {call_state.call.step}" if call_state.call.step >= 0 else ""
    return f"{call_state.call.name} of {call_state.call.site}{step} (call {call_state.call.ordinal})"


def _of_room(who: str, call_state: CallState, credits: Credits) -> list[Wait]:
    if call_state.call.ordinal not in credits.blocked:
        return []
    waits = []
    for channel in credits.channels_of(call_state):
        place = f"the channel from {channel.producer} to {channel.target}"
        held = f"{channel.used_samples} of {channel.samples} samples and {channel.used_bytes:,} of {channel.num_bytes:,} bytes are taken"
        waits.append(Wait(who, place, f"room: {held}"))
        waits += [Wait(place, name_of(taker), f"to take {count} samples", True) for taker, count in credits.takers_of(channel)]
    return waits


def _of_leases(who: str, call_state: CallState, state: SchedulerState) -> list[Wait]:
    if call_state.call.engine not in ("rollout", "train"):
        return []
    waits = []
    for name in call_state.stage.workers:
        worker = state.workers[name]
        lease = worker.lease
        if lease is not None and call_state.call.role not in worker.roles_at(lease.turn, call_state.call.engine):
            place = f"the lease {lease.name}"
            waits.append(Wait(who, place, f"which {lease.owner} has"))
            owners = [
                other
                for other in state.active.values()
                if other.call.engine == kind_of(lease.owner) and set(other.tasks_at) & set(lease.workers)
            ]
            waits += [Wait(place, name_of(owner), "to end its tasks there", True) for owner in owners]
    return waits


def _not_blocked(on: Mapping[str, list[Wait]]) -> set[str]:
    """Find everything that waits for nothing, or only for what can continue."""
    waiting_for: dict[str, list[str]] = {}
    for who, waits in on.items():
        for wait in waits:
            waiting_for.setdefault(wait.on, []).append(who)
    num_needed = {who: 1 if waits[0].is_one_of else len({wait.on for wait in waits}) for who, waits in on.items()}
    free: set[str] = set()
    found = [place for place in waiting_for if place not in on]
    while found:
        place = found.pop()
        if place not in free:
            free.add(place)
            for who in set(waiting_for.get(place, ())):
                num_needed[who] -= 1
                if num_needed[who] == 0:
                    found.append(who)
    return free


def _walk(start: str, on: Mapping[str, list[Wait]], done: set[str]) -> list[Wait]:
    """Search for a ring depth first, without recursion: a program may have thousands of calls."""
    path: list[Wait] = []
    places = {start: 0}
    stack = [iter(on.get(start, ()))]
    while stack:
        wait = next(stack[-1], None)
        if wait is None:
            stack.pop()
            if path:
                done.add(path[-1].on)
                places.pop(path.pop().on)
            continue
        if wait.on in places:
            return [*path[places[wait.on] :], wait]
        if wait.on not in done:
            path.append(wait)
            places[wait.on] = len(path)
            stack.append(iter(on.get(wait.on, ())))
    done.add(start)
    return []
