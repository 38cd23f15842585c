"""`ray start` on a machine of any speed: python ray_start.py start ...

Ray gives a node 30 seconds to come up, and has no setting for that; here it has a clock that is twenty times slower.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

SCRIPT = Path(__file__)
_SLOWER = 20


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Nodes that are started inside may take that long."""
    slow = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() / _SLOWER})
    with mock.patch("ray._private.node.time", slow):
        yield


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with patient():
        main()
