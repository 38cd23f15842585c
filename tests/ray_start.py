"""`ray start` on a machine of any speed: python ray_start.py start ...

Ray gives a node 30 seconds to come up, and has no setting for that; here it has a clock that is twenty times slower. The node gives its
own agents as long as an environment variable says.
"""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

SCRIPT = Path(__file__)
_SLOWER = 20


@contextlib.contextmanager
def patient(slower: int = _SLOWER) -> Iterator[None]:
    """Nodes that are started inside may take that many times as long."""
    slow = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() / slower})
    longer = {"RAY_raylet_start_wait_time_s": str(30 * slower)}
    with mock.patch("ray._private.node.time", slow), mock.patch.dict(os.environ, longer):
        yield


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with patient():
        main()
