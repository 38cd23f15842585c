"""`ray start` on a machine of any speed: python ray_start.py start ...

Ray gives a node 30 seconds to come up, and has no setting for that; here it has a clock that is slower. A node ends, too, that has
waited 15 seconds for one of its own agents, and who waits for the node does not see it: it is given up after a while, and started again.
"""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from unittest import mock

import psutil

SCRIPT = Path(__file__)
_SLOWER = 4
_ATTEMPTS = 5
T = TypeVar("T")


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Nodes that are started inside may take that long."""
    slow = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() / _SLOWER})
    longer = {"RAY_raylet_start_wait_time_s": str(30 * _SLOWER)}
    with mock.patch("ray._private.node.time", slow), mock.patch.dict(os.environ, longer):
        yield


def persistently(start: Callable[[], T]) -> T:
    """Start a node, a few times if need be; of one that did not come up nothing is left."""
    this = psutil.Process()
    for left in reversed(range(_ATTEMPTS)):
        before = set(this.children(recursive=True))
        try:
            with _patient():
                return start()
        except Exception:
            if not left:
                raise
            for process in set(this.children(recursive=True)) - before:
                with contextlib.suppress(psutil.Error):
                    process.kill()
    raise AssertionError


if __name__ == "__main__":
    from ray.scripts.scripts import main

    persistently(main)
