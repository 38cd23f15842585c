"""How far another process's clock is from ours, from messages that went there and back.

    worker       asked_ns ----ask---->  heard_ns       controller
                 back_ns  <--answer---  answered_ns

Half of what the two clocks say of both ways is how far the asker's clock is behind; it errs by at most half of the time that the messages
were on their way, however that time was spread over the two. So the exchange with the least of it counts, and since clocks drift apart, an
older one counts for less.

Source: Mills et al. 2010, RFC 5905 (NTP version 4), sections 8 (offset, delay) and 10 (the clock filter, the 15 ppm of drift).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, final

_DRIFT = 15e-6
"""Seconds a second that two clocks may drift apart."""
_MOST = 64
"""Exchanges that are kept."""


class Exchange(NamedTuple):
    """Unix ns: the outer two by the asker's clock, the inner two by that of who answered."""

    asked_ns: int
    heard_ns: int
    answered_ns: int
    back_ns: int

    @property
    def offset_ns(self) -> int:
        """What has to be added to the asker's clock to have the other's."""
        return (self.heard_ns - self.asked_ns + self.answered_ns - self.back_ns) // 2

    @property
    def delay_ns(self) -> int:
        """On the way, there and back."""
        return max(self.back_ns - self.asked_ns - (self.answered_ns - self.heard_ns), 0)


@final
class ClockOffset:
    """Of one process's clock.

    >>> clock = ClockOffset()
    >>> clock.add(Exchange(asked_ns=1_000, heard_ns=5_200, answered_ns=5_300, back_ns=1_500))
    >>> clock.offset_ns, clock.error_ns, clock.correction_ns
    (4000, 201, 4000)
    """

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=_MOST)
        self.offset_ns = 0
        """What has to be added to its times to have ours."""
        self.error_ns: int | None = None
        """How far off that may be; None: nothing is known."""

    def add(self, exchange: Exchange) -> None:
        """Take one more into account."""
        self._exchanges.append(exchange)
        now_ns = exchange.back_ns
        best = min(self._exchanges, key=lambda one: _error_ns(one, now_ns))
        self.offset_ns, self.error_ns = best.offset_ns, _error_ns(best, now_ns)

    @property
    def correction_ns(self) -> int:
        """What its times are to be moved by: nothing while the clocks may be the same, as those of one host's processes are."""
        return self.offset_ns if self.error_ns is not None and abs(self.offset_ns) > self.error_ns else 0


def _error_ns(exchange: Exchange, now_ns: int) -> int:
    return exchange.delay_ns // 2 + round(max(now_ns - exchange.back_ns, 0) * _DRIFT) + 1  # 1: of the division
