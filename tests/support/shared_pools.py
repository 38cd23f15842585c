"""Pools of child processes that outlive the engines of test worlds: their server takes longer to start than most programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from m2flow.engines.process_pool import ProcessPool


class SharedPools:
    """Gives engines, in place of `functions.ProcessPool`, pools that stay when an engine stops."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, ...], ProcessPool] = {}

    def pool(self, *, preload: Sequence[str] = ()) -> _Lent:
        key = (*preload, *sys.path)
        self._pools[key] = self._pools.get(key) or ProcessPool(preload=preload)
        return _Lent(self._pools[key])

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class _Lent:
    """A pool as an engine sees it."""

    def __init__(self, pool: ProcessPool) -> None:
        self.run = pool.run

    def close(self) -> None:
        """Leave the pool open for the next engine."""
