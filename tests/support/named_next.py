"""A function that runs until its worker has named the call that may follow on its thread."""

from __future__ import annotations

import threading

next_is_named = threading.Event()
"""To be set where that is done."""


def wait_until_next_is_named() -> None:
    """Wait for that, or a fifth of a second: after the last call of a chain nothing follows."""
    next_is_named.wait(0.2)
    next_is_named.clear()
