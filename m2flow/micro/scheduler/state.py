"""The scheduler's state: one data structure, the indices over it, and the small changes that keep these in step.

The deciders (`dispatch`, `leases`, `worker_failure` and the others that `m2flow.micro.scheduler.scheduler` composes) read it to decide and
change it through its methods. A decider has nothing else that changes, so whoever asks one makes one, from the state alone.

Commands: a decider appends what it has decided to `SchedulerState.commands`, and so does a change of the state from which commands follow.
They are not returned, since hosts carry them out in one order over all deciders, in which they were decided: rows are sent before the task
that needs them, a call is resolved before the calls that end because of it, and what depends on a failed call is rejected before it. One
decision is made in the middle of another (a call's end ends others, which abort tasks), so lists that are returned would have to be spliced
at the places from which they were asked for. `Scheduler.handle` returns the list. A change also notes the workers to ask again
(`m2flow.micro.scheduler.ready_queues`).

Parts with rules of their own are objects that the state has: weights (`Versions`, `EngineWeights`), room (`Credits`), tasks, queues, and
the scheduling policies (`policies`). Of these, each generation under a policy has a `PolicyDispatch`, with the policy's view of its samples
and a queue for each worker. It stays one object beside its call, not fields of `CallState`, since its fields mean something only
together and to the policy, which is a user's object too and outlives the call; and most runs have none.

A generation is open until all of its samples are handed out; a generation or a trainer's call has started once it waits for nothing.

`Ablation` gives the scheduler what no real run has: the length of a sample before it ends, or advantages that need no siblings. It is for
the rungs of `m2flow.simulator.ablation`.

    Scheduler(plan, ablation=Ablation(lengths=..., without_groups=True))
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from m2flow.errors import M2FlowError
from m2flow.macro.graph import Call
from m2flow.macro.refill import Refill
from m2flow.micro.lowering.capabilities import keeps_caches
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import CONTROLLER, LEDGER, Command, Moved, Recalled, Send
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.protocol.worker_state import Lease, TaskState, WorkerState, worker_of
from m2flow.micro.scheduler.backpressure import Credits
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.ready_queues import ReadyWorkers, StartQueue, Tasks
from m2flow.micro.scheduler.scheduling_policy_dispatch import Policies
from m2flow.micro.scheduler.weights import EngineWeights, Versions
from m2flow.samples import SampleId


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
        self._co_speakers: dict[str, set[str]] = {}
        """Role -> those with which it has spoken in episodes of one call, itself included."""

    def add(self, call_state: CallState) -> None:
        """Add a new generation, which may still have to wait."""
        roles = call_state.call.speakers
        for role in roles:
            self._open.setdefault(role, {})[call_state.call.ordinal] = call_state
            if len(roles) > 1:
                self._co_speakers.setdefault(role, set()).update(roles)
            self.forget_first(role)

    def reopen(self, call_state: CallState) -> None:
        """Add a call again that has samples to hand out again."""
        if call_state.call.engine == "rollout":
            for role in call_state.call.speakers:
                known = self._open.setdefault(role, {})
                known[call_state.call.ordinal] = call_state
                self._open[role] = dict(sorted(known.items()))
                self.forget_first(role)

    def start(self, call_state: CallState) -> bool:
        """Note that a call waits for nothing any more; False if that was known."""
        is_new = False
        for role in call_state.call.speakers:
            started = self._started.setdefault((call_state.call.engine, role), [])
            place = bisect.bisect_left(started, call_state.call.ordinal, key=_ordinal)
            if not (place < len(started) and started[place] is call_state):
                started.insert(place, call_state)
                is_new = True
        return is_new

    def close(self, call_state: CallState) -> bool:
        """Remove a call with nothing left to hand out; False if that was known."""
        was_open = False
        for role in call_state.call.speakers:
            started = self._started.get((call_state.call.engine, role), [])
            place = bisect.bisect_left(started, call_state.call.ordinal, key=_ordinal)
            if place < len(started) and started[place] is call_state:
                del started[place]
            if self._open.get(role, {}).pop(call_state.call.ordinal, None) is not None:
                self.forget_first(role)
                was_open = True
        return was_open

    def forget_first(self, role: str) -> None:
        """Forget which generation of a role is the first, and of those that speak with it: it may have changed."""
        for one in self._co_speakers.get(role, (role,)):
            self._first.pop(one, None)

    def co_speakers(self, role: str) -> Iterable[str]:
        """The roles with which one has spoken in episodes of one call."""
        return self._co_speakers.get(role, ())

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
class RowLocations:
    """Rows by call and place: a worker's name, the controller, or the ledger, which has every row that a worker reported."""

    def __init__(self) -> None:
        self._places: dict[int, dict[str, set[int]]] = {}
        self._owners: dict[int, dict[int, str]] = {}
        self._inherited: dict[int, set[int]] = {}
        """Rows whose owner did not make them: the worker that did was lost."""

    def made(self, call: int, rows: Iterable[int], owner: str, sent_to: Iterable[str]) -> None:
        """Record rows made at `owner` and sent from there to others."""
        owners = self._owners.get(call)
        if owners is None:
            owners = self._owners[call] = {}
        made = dict.fromkeys(rows, owner)
        owners.update(made)
        if call in self._inherited:
            self._inherited[call].difference_update(made)
        places = self._places_of(call)
        for place in (owner, *sent_to):
            if (there := places.get(place)) is None:
                places[place] = set(made)
            else:
                there.update(made)

    def introduce(self, call: int, *new: str) -> None:
        """Note that places know the call, and must be told when to forget it."""
        places = self._places_of(call)
        for place in new:
            if place not in places:
                places[place] = set()

    def send(self, call: int, rows: Collection[int], to: str) -> dict[str, list[int]]:
        """Plan the transfers that bring these rows to `to`: owner -> rows to send. They count as there from now on."""
        there = self._places_of(call).setdefault(to, set())
        if there.issuperset(rows):
            return {}
        missing = [row for row in rows if row not in there]
        owners = self._owners.get(call, {})
        by_owner: dict[str, list[int]] = {}
        for row in missing:
            by_owner.setdefault(owners[row], []).append(row)
        for sent in by_owner.values():
            there.update(sent)
        return by_owner

    def owners(self, call: int, rows: Iterable[int]) -> dict[str, list[int]]:
        """Group these rows by the place that owns them."""
        found: dict[str, list[int]] = {}
        for row in rows:
            found.setdefault(self._owners[call][row], []).append(row)
        return found

    def makers(self, call: int, rows: Iterable[int]) -> dict[str, list[int]]:
        """Group these rows by the place that made them, without those of lost workers."""
        inherited = self._inherited.get(call, set())
        return self.owners(call, (row for row in rows if row not in inherited))

    def lost(self, place: str) -> None:
        """Remove a lost place. Rows that it owned are taken from another place that has them, or else from the ledger."""
        for call, owners in self._owners.items():
            places = {name: rows for name, rows in self._places.get(call, {}).items() if name not in (place, CONTROLLER)}
            for row in [row for row, owner in owners.items() if owner == place]:
                owners[row] = next((name for name, rows in places.items() if row in rows), LEDGER)
                self._inherited.setdefault(call, set()).add(row)
        for known in self._places.values():
            known.pop(place, None)

    def replaced(self, call: int, rows: Iterable[int], owner: str) -> None:
        """Record newer versions of these rows, at `owner` and nowhere else."""
        rows = list(rows)
        for there in self._places.get(call, {}).values():
            there.difference_update(rows)
        self.made(call, rows, owner, ())

    def never_came(self, call: int, rows: Iterable[int], to: str) -> None:
        """Record that rows did not arrive where they were sent."""
        self._places.get(call, {}).get(to, set()).difference_update(rows)

    def sent_by(self, place: str) -> dict[str, dict[int, list[int]]]:
        """Find the rows owned by a place that were sent elsewhere: destination -> call -> rows."""
        found: dict[str, dict[int, list[int]]] = {}
        for call, owners in self._owners.items():
            made = {row for row, owner in owners.items() if owner == place}
            for other, rows in self._places.get(call, {}).items() if made else ():
                if other != place and (sent := made & rows):
                    found.setdefault(other, {})[call] = sorted(sent)
        return found

    def forget(self, call: int) -> list[str]:
        """Drop a call, and return the workers (and controller) that know it."""
        self._owners.pop(call, None)
        self._inherited.pop(call, None)
        return [place for place in self._places.pop(call, {}) if place != LEDGER]

    def _places_of(self, call: int) -> dict[str, set[int]]:
        places = self._places.get(call)
        if places is None:
            places = self._places[call] = {}
        return places


_MOST_PLAYED = 8
"""Rollouts whose places are remembered: what a cache holds of older ones has been overwritten, or is of older weights."""


@final
class PlayedAt:
    """Where the last episodes were played. The engine there may have their tokens in its cache, which their branches begin with."""

    def __init__(self) -> None:
        self._places: dict[int, dict[int, str]] = {}

    def made(self, call: int, rows: Iterable[int], worker: str) -> None:
        """Note where episodes of a call were played."""
        self._places.setdefault(call, {}).update(dict.fromkeys(rows, worker))
        if len(self._places) > _MOST_PLAYED:
            del self._places[next(iter(self._places))]

    def of(self, row: int) -> str:
        """The worker that played an episode; empty: it is not known any more."""
        return self._places.get(SampleId.unpack(row).call, {}).get(row, "")


@dataclass(frozen=True)
class PendingSave:
    """One role's part of a checkpoint that is yet to be saved."""

    step: int
    version: int
    """The version of the weights to save."""
    path: str
    behind: bool
    """Whether it may be written while training goes on."""


@final
class Saves:
    """The checkpoint parts that are yet to be saved, by role, the oldest first."""

    def __init__(self) -> None:
        self._due: dict[str, deque[PendingSave]] = {}
        """Role -> parts that have not begun."""
        self._running: dict[int, tuple[str, PendingSave]] = {}
        """Task -> role and the part that it saves."""

    def add(self, step: int, directory: str, versions: Mapping[str, int], *, behind: bool) -> None:
        """Add a checkpoint: these roles are to save these versions."""
        for role, version in versions.items():
            self._due.setdefault(role, deque()).append(PendingSave(step, version, f"{directory}/{role}", behind))

    def drop(self) -> None:
        """Drop what has not begun: the versions that it waits for will never come."""
        self._due.clear()

    def first(self, role: str) -> PendingSave | None:
        """Return what a role has to save next."""
        due = self._due.get(role)
        return due[0] if due else None

    def holds(self, call: Call) -> bool:
        """Whether a write of weights would replace what has yet to be saved."""
        due = self.first(call.role)
        return due is not None and any(effect.version > due.version for effect in call.writes)

    def begin(self, role: str, number: int) -> m.Save:
        """Create the task that saves the role's next part."""
        due = self._due[role].popleft()
        self._running[number] = role, due
        return m.Save(number, -1, role, due.path, seals=True, step=due.step if due.behind else -1)

    def done(self, number: int) -> tuple[str, PendingSave] | None:
        """Return the role and the part that a task has saved; None for any other task."""
        return self._running.pop(number, None)


@final
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
        self.workers = _workers_of(plan, self.leases)
        self.tasks = Tasks(self.workers)
        self.may_keep = False
        """Some generation lets weights change under its running samples (`kv="keep"`)."""
        self.ready_workers = ReadyWorkers(self.workers)
        self.commands: list[Command] = []
        """Commands of the current event, in the order in which they were decided."""
        self.num_commands_credited = 0
        """Commands of the current event that `credits` has been told of."""
        self.versions = Versions(restored)
        self.engine_weights = EngineWeights(self.versions, self.ready_workers)
        self.rows = RowLocations()
        self.played_at = PlayedAt()
        self.credits = Credits(self.calls)
        self.lent_until = _lent_until(plan)
        """Role -> worker -> share of a generation's samples that have ended when it gives borrowed devices back."""
        self.onload_at = {w.lease: (slot.takes_turn, slot.onload_at) for w in plan.workers for slot in w.engines if slot.onload_at}
        """Lease -> turn of a trainer that onloads early, and share of the samples that have ended then."""
        self.num_given_back = 0
        """Samples that were preempted on borrowed devices to continue elsewhere."""
        self.errors: dict[int, tuple[int, M2FlowError]] = {}
        """Failed call -> the call that caused it, and its error."""
        self.wanted: set[int] = set()
        """Unfinished calls whose rows the program waits for."""
        self.shown: set[int] = set()
        """Dataset calls whose rows the program has observed."""
        self.waiting_for: dict[int, list[CallState]] = {}
        """Call -> calls that wait until it is done."""
        self.followers: dict[int, list[CallState]] = {}
        """Call -> calls that wait until it is over, done or failed."""
        self.perhaps_unreachable: set[int] = set()
        """Calls to check: something that kept them from being forgotten is over."""
        self.refill_members: dict[Refill, list[CallState]] = {}
        """Unfinished refill -> its calls."""
        self.refill_failures: dict[int, dict[int, M2FlowError]] = {}
        """Generate call of a refill -> its samples that can't be generated."""
        self.taken_over_by: dict[int, CallState] = {}
        """Call with partial rollouts -> the call that takes over from it."""
        self.partial_rollouts: list[CallState] = []
        """Calls with partial rollouts that are unfinished, or whose late samples nobody has taken over."""
        self.recalled: dict[int, Recalled] = {}
        """Calls with partial rollouts, about to be added, that were over before the run was resumed."""
        self.recorded: dict[int, list[m.Finished | m.Flushed]] = {}
        """Unfinished call -> what the ledger has of it, until its rows are known."""
        self.has_losses = False
        """Whether any worker was ever lost."""
        self.num_losses: Counter[tuple[int, int]] = Counter()
        """(call, row) -> number of workers that were lost with it."""
        self.blamed: set[str] = set()
        """Names of calls on functions that were running when their worker was lost."""
        self.functions = StartQueue(self.workers)
        self.last_function_calls: dict[str, CallState] = {}
        """Worker -> call of its last task on a function."""
        self.empty_calls: deque[CallState] = deque()
        """Calls without rows that are about to end, in order."""
        self.saves = Saves()
        self.policies = Policies(plan)
        self.num_changes = 0
        """Incremented whenever the set of workers that can run a generation may have changed."""

    # ---- calls

    def is_done(self, ordinal: int) -> bool:
        """Whether a call is done, or was and is forgotten."""
        return ordinal not in self.errors and (ordinal not in self.calls or self.calls[ordinal].is_done)

    def opened(self, call_state: CallState) -> None:
        """Note that the rows of a call are known and that it waits for nothing."""
        if call_state.call.engine == "rollout":
            if self.open.start(call_state):
                self.ready_workers.feed_all(call_state)
            self.ready_workers.wake_role(*call_state.call.speakers)
        elif call_state.call.engine == "train":
            self.open.start(call_state)

    def rows_came(self, call_state: CallState) -> None:
        """Note that rows of a call may be handed out."""
        if call_state.call.engine == "function":
            self.functions.may_start(call_state)
        elif call_state.call.engine == "train":
            self.ready_workers.wake_trainers(call_state.call.role)
        elif call_state.call.engine == "rollout":
            self.ready_workers.rows_came(call_state)
            for role in call_state.call.speakers[1:]:  # Their devices may be another turn's.
                self.ready_workers.wake_all(worker for worker in self.ready_workers.hosts("rollout", role) if worker.lease is not None)

    def hand_out(self, call_state: CallState, count: int) -> list[int]:
        """Take the next rows of a call for a task."""
        rows = call_state.take(count)
        self.handed_out(call_state)
        return rows

    def handed_out(self, call_state: CallState) -> None:
        """Close a generation whose last rows are handed out."""
        if call_state.call.engine == "rollout" and call_state.is_all_begun and self.open.close(call_state):
            self.ready_workers.wake_role(*call_state.call.speakers)

    def speaks_again(self, worker: WorkerState) -> None:
        """Ask the workers again in whose episodes a worker's engines speak: these have their turn, or other weights."""
        for role in worker.roles["rollout"]:
            self.ready_workers.wake_role(*self.open.co_speakers(role))

    def engines_changed(self) -> None:
        """Note that the set of workers that can run a generation may have changed."""
        self.num_changes += 1

    def is_away(self, worker: WorkerState, call_state: CallState) -> bool:
        """Whether a worker can't be given samples of a generation: it is lost, has given back its devices, or can't get the weights."""
        return worker.is_lost or self.has_given_back(worker, call_state) or not self.engine_weights.can_have(worker, call_state)

    def can_begin(self, worker: WorkerState, call_state: CallState) -> bool:
        """Whether a worker could begin samples of a generation at once."""
        is_here = not self.is_away(worker, call_state) and worker.has_turn(call_state.call.role)
        return is_here and self.engine_weights.holds_for(worker, call_state)

    def placed(self, call_state: CallState, rows: Iterable[int], role: str, place: Callable[[int], str]) -> None:
        """Note where samples run, or go on; of one that has tokens already, whether that is away from its context.

        Args:
            role: whose engine there has the context; of an episode also another that speaks.
            place: the process of each sample.
        """
        moved: dict[tuple[str, str], list[int]] = {}
        near = self.played_at if call_state.call.options.get("branches") and role == call_state.call.role else None
        for row in rows:
            before, now = call_state.at.get((row, role), ""), place(row)
            call_state.at[row, role] = now
            has_context = row in call_state.prefixes
            if near is not None and not has_context and not before:
                before = near.of(call_state.prompt_of(row))
                has_context = bool(before)
            if has_context and before != now:
                moved.setdefault((worker_of(now), self._why_moved(call_state, before)), []).append(row)
        for (worker, cause), ids in moved.items():
            self.commands.append(Moved(call_state.call.ordinal, tuple(ids), worker, cause))

    def _why_moved(self, call_state: CallState, before: str) -> str:
        """Why samples do not go on in the process that they were in before: one of `CAUSES_OF_MOVES`; empty: in an earlier attempt's."""
        worker = self.workers.get(worker_of(before))
        if worker is None or worker.is_lost or worker.tag != before:
            return "gone"
        if self.has_given_back(worker, call_state):
            return "devices"
        return "load" if self.engine_weights.can_have(worker, call_state) else "weights"

    def has_given_back(self, worker: WorkerState, call_state: CallState) -> bool:
        """Whether a worker gets no more of a generation, since it has given its devices back and others can run it."""
        return worker.name in call_state.given_back and bool(self.others_for(call_state))

    def others_for(self, call_state: CallState) -> list[str]:
        """Find the workers with devices of their own, not borrowed ones, that can run a generation."""
        lent = self.lent_until[call_state.call.role]
        own = [self.workers[name] for name in call_state.stage.workers if name not in lent]
        return [worker.name for worker in own if self.engine_weights.can_have(worker, call_state)]

    # ---- weights

    def first_generation(self, role: str) -> CallState | None:
        """Find the earliest call with samples left whose oldest version exists.

        One without is passed over: the version that it waits for may depend on later calls.
        """
        known, first = self.open.first(role)
        return first if known else self.open.set_first(role, self.versions.has_oldest_for)

    def running(self, role: str, worker: str | None = None) -> list[CallState]:
        """List the role's generations with tasks in flight, on any worker or on this one."""
        calls = [found for found in self.active.values() if found.call.engine == "rollout" and role in found.call.speakers]
        if worker is None:
            return [found for found in calls if found.tasks_at]
        heard = {task.message.call for _, task in self.tasks.spoken_by(worker)} if self.workers[worker].num_guests else ()
        return [found for found in calls if worker in found.tasks_at or found.call.ordinal in heard]

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
            # Also those that it is sent to, if the call fails before that is reported.
            self.rows.introduce(task.call, worker.name, *map(worker_of, m.forwarded_to(task)))
        self.send(worker.name, task)  # type: ignore[arg-type]

    def samples_ended(self, number: int, num_rows: int) -> None:
        """Note that samples of a generation do not run any more."""
        worker = self.tasks.samples_ended(number, num_rows)
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
            self.ready_workers.wake_all(self.workers[name] for name in task.speakers)
        return task

    @property
    def known_lengths(self) -> Callable[[int], int] | None:
        """Row -> tokens that it will generate; None in a real run."""
        return self.ablation.lengths

    # ---- requeueing, and moving rows

    def requeue(self, call_state: CallState, rows: list[int], *, has_more: bool = False) -> None:
        """Put rows of a task back, to be handed out again."""
        if rows or has_more:
            call_state.requeue(rows)
            self.open.reopen(call_state)
            if call_state.is_prepared and not call_state.waits_for and not call_state.is_over:
                self.opened(call_state)
            self.rows_came(call_state)

    def bring(self, call: int, ids: Collection[int], to: str) -> None:
        """Have these rows of a call's result sent to a worker that does not have them yet."""
        for owner, rows in self.rows.send(call, ids, to).items():
            self.send(owner, m.Push(call, rows, self.workers[to].tag if to in self.workers else to))

    def bring_inputs(self, call_state: CallState, rows: Collection[int], to: str) -> None:
        """Have these rows of every aligned input of a call sent to a worker; inputs that are still to be made are made there."""
        for needed in call_state.aligned_inputs:
            if call_state.early is not None and not self.calls[needed].is_done:
                continue
            self.bring(needed, [row for row in rows if call_state.part_of[row] == needed] if call_state.is_union else rows, to)

    def values_for(self, call_state: CallState) -> dict[str, object]:
        """Return the inputs of a call that are whole values, by name."""
        return {name: self.calls[ref.call].value for name, ref in call_state.call.inputs if ref.call not in call_state.aligned_inputs}


def _workers_of(plan: Plan, leases: Mapping[str, Lease]) -> dict[str, WorkerState]:
    """Create the workers of a plan, and have those that share devices join their leases."""
    workers: dict[str, WorkerState] = {}
    for place, w in enumerate(plan.workers):
        roles = {kind: tuple(s.role for s in w.engines if s.kind == kind) for kind in ("rollout", "train", "function")}
        turns: dict[str, tuple[str, ...]] = {}
        for s in w.engines if w.lease else ():
            if s.kind != "function":
                turns[s.takes_turn] = (*turns.get(s.takes_turn, ()), s.role)
        workers[w.name] = WorkerState(w.name, leases.get(w.lease), roles, turns, keeps_caches(w), place)
        if w.lease:
            leases[w.lease].join(w.name, turns)
    return workers


def _lent_until(plan: Plan) -> dict[str, dict[str, float]]:
    lent: dict[str, dict[str, float]] = {}
    for worker in plan.workers:
        for slot in worker.engines:
            if slot.lent_until:
                lent.setdefault(slot.role, {})[worker.name] = slot.lent_until
    return lent
