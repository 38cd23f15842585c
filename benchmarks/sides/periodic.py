"""Call a function periodically in a thread of its own, while a `with` block lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final


@final
class Periodically:
    """Call `look` every `every_s` seconds from entry to exit; the last call ends before the exit does."""

    def __init__(self, look: Callable[[], None], *, every_s: float) -> None:
        self._look = look
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._call_periodically, name="m2flow-periodically", daemon=True)

    def __enter__(self) -> Periodically:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _call_periodically(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._look()
