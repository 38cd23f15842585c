"""Looks at something now and then while something else goes on, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final


@final
class Looking:
    """From entry to exit; the last look ends before the exit does."""

    def __init__(self, look: Callable[[], None], *, every_s: float) -> None:
        self._look = look
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="m2flow-looking", daemon=True)

    def __enter__(self) -> Looking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._look()
