"""Trainers that come back to devices they share while the last samples of the generation before them still run there.

    plan: an engine with `comes_at` --Ahead--> the rollout engines give back cache that they do not use, then the trainers come

That is for plans that say so: their search has seen to it that there is room for both. When so large a share of the samples has ended as
the plan says, all others run, and the trainer has something to do or will have, `Condense` goes to the rollout engines of the lease, and
`Switch` to the trainers as soon as these have answered. Nothing more begins on the lease before it moves, so that nothing grows into the
room; if it is rollout's again, the trainers leave first (`Lease.move`). Pure, on the board.

Limit: generations that a policy deals out, and refills, are not looked at: what they begin next is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, final

from m2flow.micro.scheduling.leases import ROLLOUT, Lease, kind_of

if TYPE_CHECKING:
    from m2flow.micro.plan import Plan
    from m2flow.micro.scheduling.board import Board
    from m2flow.micro.scheduling.tracking import CallState


@final
class Ahead:
    """Of one run."""

    def __init__(self, board: Board, plan: Plan) -> None:
        self._board = board
        self._shares = {
            worker.lease: (slot.takes_turn, slot.comes_at) for worker in plan.workers for slot in worker.engines if slot.comes_at
        }

    @property
    def is_used(self) -> bool:
        return bool(self._shares)

    def look(self, tell: Callable[[Iterable[str]], None]) -> None:
        """Have those come for whom it is time; `tell` those that make room for them."""
        for name, (turn, share) in self._shares.items():
            lease = self._board.leases[name]
            if self._is_time(lease, turn, share):
                tell(lease.come_ahead(turn))

    def _is_time(self, lease: Lease, turn: str, share: float) -> bool:
        if lease.turn != ROLLOUT or lease.is_idle:
            return False
        workers = [self._board.workers[name] for name in lease.workers]
        if any(worker.is_lost for worker in workers):
            return False
        roles = {role for worker in workers for role in worker.turns.get(turn, ())}
        states = list(self._board.active.values())
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
    if state.refill is not None or state.placing is not None or not state.is_prepared or state.ready:
        return False
    return len(state.done) + len(state.dropped) >= share * len(state.ids)
