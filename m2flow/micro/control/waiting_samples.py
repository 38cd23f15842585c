"""How long samples waited in the controller before an engine got them: for an update, for room, for their turn."""

from __future__ import annotations

from typing import final

import msgspec

from m2flow.macro.graph import Call
from m2flow.micro import messages as m
from m2flow.observe.recorder import now_ns


@final
class Waiting:
    """Of one run."""

    def __init__(self) -> None:
        self._made_ns: dict[int, int] = {}
        """Generation -> when it was called."""

    def made(self, call: Call) -> None:
        """The program has made a call."""
        if call.engine == "rollout":
            self._made_ns[call.ordinal] = now_ns()

    def sent(self, task: m.Generate) -> m.Generate:
        """A task that is about to be sent, with how long its samples waited."""
        made_ns = self._made_ns.get(task.call)
        return task if made_ns is None else msgspec.structs.replace(task, waited_us=(now_ns() - made_ns) // 1000)

    def forget(self, call: int) -> None:
        self._made_ns.pop(call, None)
