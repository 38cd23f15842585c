"""Heartbeats: the pulse of a worker that is busy computing, from a thread and on a link of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from m2flow.channels.keys import Keys
from m2flow.channels.zeromq import LinkDialer
from m2flow.errors import BrokenChannel

_ANSWER_S = 0.1
"""What comes later is taken with the next beat; so long may `close` take."""


class Beacon:
    """Beats from a thread of its own.

    Every `period_s` it sends `payload()` as the peer `<name>.beat`, and hands what is answered to `hear`. It beats as long as other threads
    get the interpreter: a C extension that holds its lock for seconds silences it. A beat that can't leave is skipped.
    """

    def __init__(
        self,
        address: str,
        name: str,
        token: str,
        *,
        period_s: float = 1.0,
        payload: Callable[[], bytes] = lambda: b"",
        hear: Callable[[bytes], None] = lambda answer: None,
        keys: Keys | None = None,
    ) -> None:
        self._address = address
        self._name = f"{name}.beat"
        self._token = token
        self._period_s = period_s
        self._payload = payload
        self._hear = hear
        self._keys = keys
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start to beat; the first beat leaves at once."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. May be called twice."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        dialer = LinkDialer(max_messages=16, timeout_s=0.0, keys=self._keys)
        try:
            dialer.open(self._address, self._name, self._token)
            while True:
                # The controller is slow or gone; the next beat, or its absence, says the same.
                with contextlib.suppress(BrokenChannel):
                    dialer.send(self._payload())
                for answer in dialer.receive(min(self._period_s, _ANSWER_S)):
                    self._hear(answer)
                if self._stopping.wait(self._period_s):
                    return
        finally:
            dialer.close()
