"""Share devices between engines: move their leases, give borrowed ones back when training is due, and onload trainers early.

`LeaseTurns`, for devices under a lease: an idle lease whose owner has nothing to do moves to the next turn that has work, and `Switch`
tells the workers that offload, then those that onload (`m2flow.micro.protocol.worker_state.Lease`).

`GpuBorrowing`, for engines with `lent_until` in the plan: a rollout engine on a trainer's devices works under their lease, while other
instances of its role have devices of their own. When the planned share of a generation's samples has ended, and a trainer of that lease
has a call to run, the engine gets no more of the generation; its samples are preempted and continue elsewhere from the tokens that they
have. Then nothing is in flight in rollout's turn, and the lease moves by itself. Where samples run changes no result, so neither does
this.

`EarlyOnload`, for engines with `onload_at` in the plan, whose search has seen to it that there is memory for both: when the planned share
of the samples has ended, all others run, and the trainer has a call to run, `ShrinkKVCache` goes to the rollout engines of the lease, and
`Switch` to the trainers as soon as these have answered. Nothing more begins on the lease before it moves, so nothing grows into the freed
memory; if the lease goes back to rollout, the trainers leave first (`Lease.move`). Limit: generations under a policy, and refills, are
never onloaded over early, since it is not known what they begin next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, final

from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.worker_state import ROLLOUT, Lease, WorkerState, kind_of

if TYPE_CHECKING:
    from m2flow.micro.scheduler.call_state import CallState
    from m2flow.micro.scheduler.state import SchedulerState


@final
class LeaseTurns:
    """Moves leases of devices from turn to turn."""

    def __init__(self, state: SchedulerState, has_work: Callable[[WorkerState, str], bool]) -> None:
        """
        Args:
            has_work: whether a worker would have a task in a turn of its lease.
        """
        self._state = state
        self._has_work = has_work

    def hand_over(self, lease: Lease) -> None:
        """Move an idle lease to the next turn that has work, if the owner has none."""
        to = self.next_turn(lease)
        if to:
            self._tell(lease.move(to), to)
            if not lease.is_moving:  # It is of one worker, or those that had to leave are lost, and nobody has to onload.
                self._wake(lease)
        elif lease.is_idle and not lease.is_moving:
            for name in lease.workers:
                self._state.ready_workers.passed_over(self._state.workers[name])

    def next_turn(self, lease: Lease) -> str:
        """Find the turn that an idle lease should move to; empty if it stays."""
        if not lease.is_idle or lease.is_moving:
            return ""
        workers = [self._state.workers[name] for name in lease.workers]
        return next((turn for turn in lease.next_turns if any(self._has_work(worker, turn) for worker in workers)), "")

    def switched(self, worker: WorkerState, to: str) -> None:
        """Take in that a worker has switched to a turn."""
        lease = worker.lease
        assert lease is not None
        if lease.is_switching(worker.name):
            self._tell(lease.switched(worker.name), to)
        if not lease.is_moving:
            self._wake(lease)

    def shrunk_cache(self, worker: WorkerState) -> None:
        """Take in that a worker has shrunk its KV cache for an early onload."""
        assert worker.lease is not None
        self._tell(worker.lease.shrunk_cache(worker.name), worker.lease.early_turn)

    def worker_lost(self, worker: WorkerState) -> None:
        """Remove a lost worker; a lease that waits for it to switch goes on without it."""
        lease = worker.lease
        if lease is not None:
            to = lease.moving_to
            self._tell(lease.worker_lost(worker.name), to)
            if to and not lease.is_moving:
                self._wake(lease)

    def worker_joined(self, worker: WorkerState) -> None:
        """Take in a restarted worker: its rollout engine holds the devices, as at the start, so it must switch if another turn has them."""
        lease = worker.lease
        if lease is not None and worker.name not in lease.workers:
            lease.join(worker.name, worker.turns)
            to = lease.moving_to or lease.owner
            if to != ROLLOUT:
                self._tell((worker.name,), to)

    def _wake(self, lease: Lease) -> None:
        for name in lease.workers:
            self._state.ready_workers.wake(self._state.workers[name])
            self._state.speaks_again(self._state.workers[name])

    def _tell(self, workers: Iterable[str], to: str) -> None:
        for name in workers:
            self._state.start(self._state.workers[name], "train", m.Switch(self._state.next_task(), -1, to))


@final
class GpuBorrowing:
    """Has rollout engines give borrowed devices back when their trainer is due."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def set_until(self, shares: Mapping[tuple[str, str], float]) -> None:
        """Change the shares, by (worker, role), at which engines give devices back; at 0 they get no sample."""
        for (worker, role), share in shares.items():
            self._state.lent_until.setdefault(role, {})[worker] = share

    def ended(self, call_state: CallState) -> None:
        """Note that rows of a call are done: perhaps devices are due."""
        if call_state.is_generation and call_state.call.role in self._state.lent_until:
            self._look(call_state)

    def trains(self) -> None:
        """Note that a trainer has a new call: devices whose share was reached are given back now."""
        for call_state in list(self._state.active.values()) if self._state.lent_until else ():
            self.ended(call_state)

    def _look(self, call_state: CallState) -> None:
        """Have every engine give its devices back for which it is time."""
        if call_state.is_over or not call_state.is_prepared:
            return
        num = len(call_state.ids) if call_state.refill is None else call_state.refill.num_allowed * call_state.num_per_prompt
        num_ended = len(call_state.done) + len(call_state.dropped)
        known = call_state.given_back
        for name, until in self._state.lent_until[call_state.call.role].items():
            if name not in known and num_ended >= until * num and self._is_due(name) and self._state.others_for(call_state):
                self._give_back(call_state, name)

    def _is_due(self, name: str) -> bool:
        """Whether a trainer of the worker's lease has an unfinished call."""
        lease = self._state.workers[name].lease
        if lease is None:
            return False
        roles = {
            role
            for other in lease.workers
            for turn, of_turn in self._state.workers[other].turns.items()
            if kind_of(turn) == "train"
            for role in of_turn
        }
        return any(call_state.call.engine == "train" and call_state.call.role in roles for call_state in self._state.active.values())

    def _give_back(self, call_state: CallState, name: str) -> None:
        state, call = self._state, call_state.call.ordinal
        call_state.given_back.add(name)
        state.engines_changed()
        tasks = [task for _, task in state.tasks.of(name) if task.message.call == call and isinstance(task.message, m.Generate)]
        rows = call_state.unfinished(row for task in tasks for row in task.rows)
        if rows:
            state.num_given_back += len(rows)
            state.send(name, m.Preempt(call, rows, waits=True))
        state.ready_workers.feed_all(call_state)
        state.ready_workers.rows_came(call_state)
        state.ready_workers.wake_role(call_state.call.role)


@final
class EarlyOnload:
    """Has trainers onload while the last samples still run on the same devices."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def look(self) -> None:
        """Begin the early onload on each lease for which it is time: its rollout workers shrink their KV caches first."""
        for name, (turn, share) in self._state.onload_at.items():
            lease = self._state.leases[name]
            if self._is_time(lease, turn, share):
                for worker in lease.onload_early(turn):
                    self._state.start(self._state.workers[worker], "rollout", m.ShrinkKVCache(self._state.next_task(), -1))

    def _is_time(self, lease: Lease, turn: str, share: float) -> bool:
        if lease.turn != ROLLOUT or lease.is_idle:
            return False
        workers = [self._state.workers[name] for name in lease.workers]
        if any(worker.is_lost for worker in workers):
            return False
        roles = {role for worker in workers for role in worker.turns.get(turn, ())}
        states = list(self._state.active.values())
        if not any(kind_of(turn) == call_state.call.engine == "train" and call_state.call.role in roles for call_state in states):
            return False
        here = [
            call_state
            for call_state in states
            if call_state.is_generation and not call_state.waits_for and not set(call_state.stage.workers).isdisjoint(lease.workers)
        ]
        return bool(here) and all(_is_ending(call_state, share) for call_state in here)


def _is_ending(call_state: CallState, share: float) -> bool:
    """Whether the share of a generation's samples has ended, and all others run."""
    if call_state.refill is not None or call_state.is_under_policy or not call_state.is_prepared or call_state.ready:
        return False
    return len(call_state.done) + len(call_state.dropped) >= share * len(call_state.ids)
