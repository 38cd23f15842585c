"""When samples with a `timeout_s` are late, where there is no clock: a random number decides, sample by sample.

Send(Generate) --began--> Impatience --due--> TimedOut, now and then
"""

from __future__ import annotations

import random
from typing import final

from m2flow.macro.graph import Call
from m2flow.macro.late import timeout_of
from m2flow.micro import messages as m
from m2flow.micro.scheduling.events import TimedOut

_SHARE = 0.01
"""Of the moments at which somebody looks, those at which a sample is late."""


@final
class Impatience:
    """Of one run. Without a time-out no number is drawn."""

    def __init__(self, order: random.Random) -> None:
        self._order = order
        self._running: list[tuple[int, int]] = []
        """(call, sample), with those that are done by now."""

    def began(self, message: m.ToWorker, call: Call | None) -> None:
        if isinstance(message, m.Generate) and call is not None and timeout_of(call.options) is not None:
            self._running += [(message.call, row) for row in message.ids if (message.call, row) not in self._running]

    def due(self) -> TimedOut | None:
        if not self._running or self._order.random() >= _SHARE:
            return None
        call, row = self._running.pop(self._order.randrange(len(self._running)))
        return TimedOut(call, [row])
