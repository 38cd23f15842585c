"""The ledger of a cluster in one thread (`m2flow.testing.world`): what the controller would write, and what it would read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

from m2flow.errors import InternalError
from m2flow.macro.graph import Call
from m2flow.micro import messages as m
from m2flow.micro.control.custody import Custody
from m2flow.micro.record.journal import Journal
from m2flow.micro.scheduling.events import Command, Discarded, Dropped, Expired, Forgotten, Given, Late, Reject, Resolve, Send
from m2flow.samples import Batch

Unsaid = tuple[m.Finished | m.Aborted | m.Flushed, ...]


class NotWritten:
    """None is kept: nobody will be lost."""

    def open(self) -> None:
        pass

    def close(self, workers: Iterable[str]) -> None:
        """The run is over, and these have ended."""

    def call_added(self, call: Call) -> None:
        pass

    def told(self, message: m.ToController) -> None:
        """A worker said something."""

    def consumed(self, task: m.Accumulate) -> None:
        """A micro-batch is done."""

    def commanded(self, command: Command) -> None:
        """The scheduler says something."""

    def settle(self, worker: str) -> Unsaid:
        """A worker is lost; what it could not say."""
        return ()

    def read_back(self, push: m.Push) -> Batch:
        raise InternalError("nothing was written down")


@final
class Written(NotWritten):
    """Of one run."""

    def __init__(self, run_dir: Path, calls: Mapping[int, Call]) -> None:
        self._calls = calls
        self._journal = Journal(run_dir)
        self._custody = Custody(self._journal, run_dir, calls)

    def open(self) -> None:
        self._journal.open()

    def close(self, workers: Iterable[str]) -> None:
        for name in workers:
            self._custody.settle(name, "the run ended")
        self._journal.close()

    def call_added(self, call: Call) -> None:
        self._journal.call_added(call)

    def told(self, message: m.ToController) -> None:
        if isinstance(message, m.Finished | m.Aborted | m.Flushed | m.GivenUp):
            self._custody.told(message)

    def consumed(self, task: m.Accumulate) -> None:
        self._journal.consumed(self._calls[task.call], task.epoch, task.ids)

    def commanded(self, command: Command) -> None:
        match command:
            case Send(worker, m.Generate() as task):
                self._custody.begins(worker, task)
            case Discarded() | Dropped() | Late() | Given() | Expired():
                self._custody.decided(command)
            case Resolve(ordinal, value):
                self._journal.call_done(self._calls[ordinal], value)
            case Reject(ordinal, error, _):
                self._journal.call_failed(self._calls[ordinal], error)
            case Forgotten(ordinal):
                self._journal.forgotten(ordinal)
            case _:
                pass

    def settle(self, worker: str) -> Unsaid:
        return self._custody.settle(worker, f"{worker} was lost")

    def read_back(self, push: m.Push) -> Batch:
        return self._custody.read_back(push)
