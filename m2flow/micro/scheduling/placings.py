"""Which policy each generation goes by, and what is learned from one to the next.

    plan.policies --Placings--> a Placing for each generate call, or none: first come, first served, whole groups together

A policy object serves one call at a time. One that is free serves the next call of its role, with what it has learned; calls of a role
that overlap have one each. Lengths of earlier answers are kept by the prompt's text, for the epochs to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from m2flow.micro import messages as m
from m2flow.micro.rollouts.policies import FIRST_COME, make_policies
from m2flow.micro.rollouts.policy import Load, Policy
from m2flow.micro.scheduling.placing import Placing
from m2flow.micro.scheduling.ready import Ready
from m2flow.samples import Batch, Ragged, SampleId

if TYPE_CHECKING:
    from m2flow.micro.plan import Plan
    from m2flow.micro.scheduling.board import Board
    from m2flow.micro.scheduling.tracking import CallState

_ANSWERS_KEPT = 16
"""Of each prompt, for later epochs."""


@final
class Placings:
    """All of a run."""

    def __init__(self, board: Board, plan: Plan) -> None:
        """
        Raises:
            SpecError: there is no such policy or predictor.
        """
        self._board = board
        self._names = () if plan.policies in ((), (FIRST_COME,)) else plan.policies
        self._predictor = plan.predictor
        self._difficulty = plan.difficulty
        self._paces = {pace.role: pace for pace in plan.paces}
        self._free: dict[str, list[Policy]] = {}
        self._placings: dict[int, Placing] = {}
        self._earlier: dict[tuple[str, str], list[int]] = {}
        """Role and prompt -> lengths of its answers."""
        if self._names:
            make_policies(self._names, plan.predictor)  # What is wrong with them is said at the start.

    def begin(self, state: CallState) -> None:
        """A generation's rows are known."""
        if not self._names:
            return
        role = state.call.role
        free = self._free.setdefault(role, [])
        policy = free.pop() if free else make_policies(self._names, self._predictor)
        state.ready = Ready()
        board, prompts = self._board, state.call.input("prompts")
        assert prompts is not None
        texts = self._said(state, "prompt") if self._earlier else {}
        earlier = {row: self._earlier.get((role, text), ()) for row, text in texts.items()}
        workers = [board.workers[name] for name in state.planned.workers]
        state.placing = Placing(
            state,
            policy,
            workers,
            board.calls[prompts.call].num_tokens,
            earlier,
            lambda: board.versions.behind(state.call),
            lambda worker: board.is_away(worker, state),
            lambda: board.num_changes,
            board.relaxed.lengths,
            self._paces.get(role),
            self._said(state, self._difficulty) if self._difficulty else {},
        )
        self._placings[state.call.ordinal] = state.placing

    def over(self, state: CallState) -> None:
        """A generation has ended, one way or the other."""
        placing = self._placings.pop(state.call.ordinal, None)
        if placing is None:
            return
        placing.over()
        self._free[state.call.role].append(placing.policy)
        texts = self._said(state, "prompt")
        for row, length in placing.lengths.items():
            text = texts.get(state.prompt_of(row))
            if text is not None:
                known = self._earlier.setdefault((state.call.role, text), [])
                known.append(length)
                del known[:-_ANSWERS_KEPT]

    def reported(self, worker: str, message: m.Load) -> None:
        """An engine says how full it is."""
        load = Load(message.num_running, message.num_queued, message.kv_used, message.kv_capacity)
        for placing in self._placings.values():
            if placing.state.call.role == message.role:
                placing.reported(worker, load, zip(message.ids, message.num_tokens, strict=True))
                for name, rows in placing.moves().items():
                    self._board.send(name, m.Yield(placing.state.call.ordinal, rows))

    def yielded(self, message: m.Yielded) -> None:
        """Samples that were to move have stopped. They are handed out again, where their policy wanted them if that is still there."""
        board = self._board
        state = board.calls.get(message.call)
        for row, number in zip(message.ids, message.tasks, strict=True):
            if not board.tasks.yielded(number, row):
                continue
            board.generated(number, 1)
            if state is None or state.is_over or row in state.done or row in state.dropped:
                continue
            board.lines.taken_back(state, [row])
            to = state.placing.yielded(row) if state.placing is not None else None
            if to is None:
                board.give_back(state, [row])
            else:
                state.num_begun -= 1
                board.give_back(state, [], has_more=True)
                board.waking.wake(to)

    def lost(self, worker: str) -> None:
        for placing in self._placings.values():
            placing.lost(worker)

    def trained(self, role: str) -> None:
        """There is a new version of the role's weights; a policy may have waited for it."""
        if self._names:
            self._board.waking.wake_role(role)

    def deal(self, state: CallState) -> None:
        """Samples of a generation have ended."""
        if state.placing is not None and state.has_rows_to_begin:
            self._board.waking.wake_all(state.placing.deal())

    def force(self) -> bool:
        """Nothing is under way: overrule a policy that holds back; whether one does."""
        held = [p for p in self._placings.values() if p.state.has_rows_to_begin and p.force()]
        for placing in held:
            self._board.waking.wake_role(placing.state.call.role)
        return bool(held)

    def _said(self, state: CallState, column: str) -> dict[int, str]:
        """Row of the prompts -> what a dataset has there in this column, as text."""
        found: dict[int, str] = {}
        batches: dict[int, Batch | None] = {}
        for row in state.prompt_rows:
            source = SampleId.unpack(row)
            if source.call not in batches:
                drawn = self._board.calls.get(source.call)
                rows = drawn.call.options.get("rows") if drawn is not None else None
                batches[source.call] = rows if isinstance(rows, Batch) and column in rows else None
            batch = batches[source.call]
            if batch is not None and source.prompt < len(batch):
                found[row] = _item(batch, column, source.prompt)
        return found


def _item(batch: Batch, name: str, row: int) -> str:
    column = batch.columns[name]
    return str(column.item(row) if isinstance(column, Ragged) else column[row])
