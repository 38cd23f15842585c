"""What becomes of samples, written to the journal; and what a worker that is gone has left of them.

    messages of workers, commands of the scheduler --Custody--> journal
    a worker is lost --settle--> what it wrote down and could not say, for the scheduler; what it had otherwise is counted as lost
    rows that nobody else has --read_back--> from the segment files

So every token that was generated is in the ledger: as a sample's, with its ending, or as lost (`m2flow.micro.record.account`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

from m2flow.macro.graph import Call
from m2flow.micro import messages as m
from m2flow.micro.record.decisions import given_by
from m2flow.micro.record.journal import Journal
from m2flow.micro.record.left_behind import LeftBehind, Unsaid
from m2flow.micro.record.segments import start_of
from m2flow.micro.scheduling.events import Discarded, Dropped, Expired, Given, Late
from m2flow.micro.work.performing import gives_reward
from m2flow.samples import Batch

OfSamples = Discarded | Dropped | Late | Given | Expired
"""Commands that only say what becomes of samples."""


@final
class Custody:
    """Of one run. It looks calls up where its owner keeps them."""

    def __init__(self, journal: Journal, run_dir: Path, calls: Mapping[int, Call]) -> None:
        self._journal = journal
        self._run_dir = run_dir
        self._calls = calls
        self._left = LeftBehind(run_dir / "segments")

    def told(self, message: Unsaid) -> None:
        """A worker says how far samples are, or that rows are done."""
        call = self._calls.get(message.call)
        match message:
            case m.GivenUp():
                self._journal.samples_given_up(message.call, message.ids, message.num_generated)
            case m.Finished() if call is not None:
                self._finished(call, message)
            case m.Aborted() if call is not None:
                numbers = (message.num_tokens, message.num_generated, message.stretches, message.segment)
                self._journal.samples_stopped(call, message.ids, *numbers)
            case m.Flushed() if call is not None:
                numbers = (message.num_tokens, message.num_generated, message.stretches, message.segment)
                self._journal.samples_flushed(message.call, message.ids, *numbers)
            case _ if any(message.num_generated):  # Its call was given up and forgotten before this came.
                self._journal.samples_given_up(message.call, message.ids, message.num_generated)
            case _:
                pass
        if not isinstance(message, m.GivenUp) and message.segment is not None:
            self._left.reported(message.segment, message.ids)
            if call is None or call.engine == "rollout":
                self._journal.taken_in(message.segment[0], start_of(message.segment))

    def begins(self, worker: str, task: m.Generate) -> None:
        """A worker is given samples."""
        if task.had:
            self._journal.samples_went_on(task.call, task.ids, task.had, worker)

    def decided(self, command: OfSamples) -> None:
        """The scheduler says what becomes of samples."""
        call = self._calls[command.call]
        match command:
            case Discarded(_, last):
                self._journal.discarded(call, last)
            case Dropped(_, ids):
                self._journal.dropped(call, ids)
            case Late(_, ids):
                self._journal.late(call, ids)
            case Given(_, ids):
                self._journal.given(call, ids)
            case Expired(_, ids):
                self._journal.expired(call, ids)
                self._journal.make_certain()

    def settle(self, worker: str, reason: str) -> tuple[m.Finished | m.Aborted | m.Flushed, ...]:
        """A worker has ended by itself, or was killed: write down what it could not say any more, and count what is lost with it.

        To be called before the scheduler hears of the loss. Told again of the same processes, it does nothing.

        Returns:
            What the scheduler should be told with that.
        """
        left = self._left.of(worker, self._calls)
        for message in left.messages:
            self.told(message)
        self._journal.tokens_lost(left.running, worker, reason)
        for meter in left.meters:
            self._journal.taken_in(meter)
        self._journal.make_certain()  # What of it is made anew now must not be taken for what was there, by who finds both.
        return tuple(message for message in left.messages if not isinstance(message, m.GivenUp))

    def read_back(self, push: m.Push) -> Batch:
        """The rows that are to be sent, which nobody else has."""
        call = self._calls.get(push.call)
        return self._journal.read_back(self._run_dir, push.call, push.ids, is_reward=call is not None and gives_reward(call))

    def _finished(self, call: Call, message: m.Finished) -> None:
        if message.segment is not None and call.engine == "rollout":
            numbers = (message.num_tokens, message.num_generated, message.finish, message.segment, message.texts)
            self._journal.samples_done(call, message.ids, *numbers)
        elif message.segment is not None:
            self._journal.result(call, message.segment)
        if message.values:
            self._journal.rewarded(call, message.ids, message.values, message.parts)
        if message.dropped:
            self._journal.filtered(call, message.dropped)
        if message.stretches:
            self._journal.decided(call, given_by(call.ordinal, message.ids, message.stretches))
