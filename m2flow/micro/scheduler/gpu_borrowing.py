"""Devices of a trainer that rollout borrows: lent and given back when training is due, and trainers that come back early.

plan: an engine with `lent_until` --Lending--> it takes no more of a call, and what it still has goes on elsewhere

A rollout engine on a trainer's devices works under their lease; other instances of its role have devices of their own. When so large a
share of a generation's samples have ended as the plan says, and a trainer of that lease has something to do or will have, the engine's
samples are stopped and go on at the others from the tokens that they have. Then nothing is under way in rollout's turn any more, and the
lease moves by itself. Which samples run where changes no answer, so neither does this. Pure, on the scheduler.

plan: an engine with `comes_at` --Ahead--> the rollout engines give back cache that they do not use, then the trainers come

That is for plans that say so: their search has seen to it that there is room for both. When so large a share of the samples has ended as
the plan says, all others run, and the trainer has something to do or will have, `Condense` goes to the rollout engines of the lease, and
`Switch` to the trainers as soon as these have answered. Nothing more begins on the lease before it moves, so that nothing grows into the
room; if it is rollout's again, the trainers leave first (`Lease.move`). Pure, on the scheduler.

Limit: generations that a policy deals out, and refills, are not looked at: what they begin next is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, final

from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.worker_state import ROLLOUT, Lease, kind_of

if TYPE_CHECKING:
    from m2flow.micro.protocol.plan import Plan
    from m2flow.micro.protocol.worker_state import WorkerState
    from m2flow.micro.scheduler.call_state import CallState
    from m2flow.micro.scheduler.state import SchedulerState


@final
class GpuBorrowing:
    """Of one run."""

    def __init__(self, scheduler: SchedulerState, plan: Plan) -> None:
        self._state = scheduler
        self._until: dict[str, dict[str, float]] = {}
        """Role -> worker -> the share of a generation that has ended when it gives back its devices."""
        for worker in plan.workers:
            for slot in worker.engines:
                if slot.lent_until:
                    self._until.setdefault(slot.role, {})[worker.name] = slot.lent_until
        self._given_back: dict[int, set[str]] = {}
        """Generation -> workers that have given back their devices, as far as it goes."""
        self.num_moved = 0
        """Samples that were stopped to go on elsewhere."""

    @property
    def is_used(self) -> bool:
        return bool(self._until)

    def set_until(self, shares: Mapping[tuple[str, str], float]) -> None:
        """From now on engines, (worker, role), give back their devices at these shares; at 0 they get no sample."""
        for (worker, role), share in shares.items():
            self._until.setdefault(role, {})[worker] = share

    def passes(self, worker: WorkerState, state: CallState) -> bool:
        """Whether a worker gets no samples of a generation, since its devices are not lent for it any more."""
        return worker.name in self._given_back.get(state.call.ordinal, ()) and bool(self._others(state))

    def ended(self, state: CallState) -> None:
        """Rows of a call are done: perhaps samples of a generation."""
        if state.is_generation and state.call.role in self._until:
            self._look(state)

    def trains(self) -> None:
        """A trainer has a new call: what waited for one to give back its devices does so."""
        for state in list(self._state.active.values()):
            self.ended(state)

    def over(self, call: int) -> None:
        self._given_back.pop(call, None)

    def _look(self, state: CallState) -> None:
        """Have those give back their devices for whom it is time."""
        if state.is_over or not state.is_prepared:
            return
        num = len(state.ids) if state.refill is None else state.refill.num_allowed * state.num_per_prompt
        num_ended = len(state.done) + len(state.dropped)
        known = self._given_back.get(state.call.ordinal, ())
        for name, until in self._until[state.call.role].items():
            if name not in known and num_ended >= until * num and self._is_due(name) and self._others(state):
                self._give_back(state, name)

    def _is_due(self, name: str) -> bool:
        """Whether a trainer of the worker's lease has a call that is not over."""
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
        return any(state.call.engine == "train" and state.call.role in roles for state in self._state.active.values())

    def _others(self, state: CallState) -> list[str]:
        """Workers that are there, whose devices are nobody else's, and that can have the weights for it."""
        scheduler = self._state
        own = [scheduler.workers[name] for name in state.stage.workers if name not in self._until[state.call.role]]
        return [worker.name for worker in own if scheduler.can_have_weights(worker, state)]

    def _give_back(self, state: CallState, name: str) -> None:
        scheduler, call = self._state, state.call.ordinal
        self._given_back.setdefault(call, set()).add(name)
        state.num_passing = len(self._given_back[call])
        scheduler.changed()
        tasks = [task for _, task in scheduler.tasks.of(name) if task.message.call == call and isinstance(task.message, m.Generate)]
        rows = [row for task in tasks for row in task.rows if row not in state.done and row not in state.dropped]
        if rows:
            self.num_moved += len(rows)
            scheduler.send(name, m.Preempt(call, rows))
        scheduler.ready_workers.feed_all(state)
        scheduler.ready_workers.rows_came(state)
        scheduler.ready_workers.wake_role(state.call.role)


@final
class EarlyOnload:
    """Of one run."""

    def __init__(self, scheduler: SchedulerState, plan: Plan) -> None:
        self._state = scheduler
        self._shares = {
            worker.lease: (slot.takes_turn, slot.comes_at) for worker in plan.workers for slot in worker.engines if slot.comes_at
        }

    @property
    def is_used(self) -> bool:
        return bool(self._shares)

    def look(self, tell: Callable[[Iterable[str]], None]) -> None:
        """Have those come for whom it is time; `tell` those that make room for them."""
        for name, (turn, share) in self._shares.items():
            lease = self._state.leases[name]
            if self._is_time(lease, turn, share):
                tell(lease.onload_early(turn))

    def _is_time(self, lease: Lease, turn: str, share: float) -> bool:
        if lease.turn != ROLLOUT or lease.is_idle:
            return False
        workers = [self._state.workers[name] for name in lease.workers]
        if any(worker.is_lost for worker in workers):
            return False
        roles = {role for worker in workers for role in worker.turns.get(turn, ())}
        states = list(self._state.active.values())
        if not any(kind_of(turn) == state.call.engine == "train" and state.call.role in roles for state in states):
            return False
        here = [
            state
            for state in states
            if state.is_generation and not state.waits_for and not set(state.stage.workers).isdisjoint(lease.workers)
        ]
        return bool(here) and all(_is_ending(state, share) for state in here)


def _is_ending(state: CallState, share: float) -> bool:
    """Whether all samples of a generation that have not ended run, and so many have ended."""
    if state.refill is not None or state.policy_dispatch is not None or not state.is_prepared or state.ready:
        return False
    return len(state.done) + len(state.dropped) >= share * len(state.ids)
