"""The processes of a trainer's further ranks, for the tests of a file."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

from m2flow.testing.mirrored import Followers


@contextlib.contextmanager
def followed(count: int, loaded: Sequence[str] = ("forked_ranks",)) -> Iterator[Followers]:
    """So many ranks beside this process. Full collections, which some trainers make when they stop, pass over what is there by now."""
    gc.collect()
    gc.freeze()
    found = Followers(count, loaded)
    yield found
    found.close()
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # As it was: what lives is passed over.


def num_group_threads(part: str = "gloo") -> int:
    """Threads of this process that are those of process groups, by a part of their names, of which the kernel has 15 characters."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(part in name for name in names)
