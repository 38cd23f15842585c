"""Garbage collection while a flow runs: seldom, and without what was there before.

Python looks through its young objects every 700 that it made more than it dropped, and each call of a flow leaves some dozens for as
long as it is under way: with a thousand calls a step these looks were a fifth of what a call costs, and all for nothing, since a
call's records hold no cycles. Limit: cycles in the program's own objects are found later, after some tens of thousands more.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_YOUNG = 50_000
"""Objects between two looks at the young ones: some megabytes."""


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """Leave what is there alone, and look at what comes seldom. Whoever has set other thresholds, or none, keeps them."""
    before = gc.get_threshold()
    changes = gc.isenabled() and 0 < before[0] < _YOUNG
    freezes = changes and gc.get_freeze_count() == 0
    if changes:
        gc.set_threshold(_YOUNG, *before[1:])
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if changes:
            gc.set_threshold(*before)
