"""How engines on one machine slow each other down: while one works, another takes longer.

    begin, end --Paces--> how many times as long a kind of work takes on a worker now

Of this machine alone (`ClusterSpec.pools` empty): devices of a pool have memory and caches of their own. Without such factors nothing is
done here. Several engines of a kind slow others down as one does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, final, get_args

Kind = Literal["rollout", "train", "function"]
Slowdown = Callable[[Kind, Kind], float]


def undisturbed(kind: Kind, beside: Kind) -> float:
    """Nobody slows anybody down."""
    return 1.0


@final
class Paces:
    """Who works, and what that does to the others."""

    def __init__(self, slowdown: Slowdown, workers: Iterable[str]) -> None:
        kinds: tuple[Kind, ...] = get_args(Kind)
        self._factors = {(kind, beside): max(slowdown(kind, beside), 1.0) for kind in kinds if kind != "function" for beside in kinds}
        self.has_any = any(factor > 1.0 for (kind, beside), factor in self._factors.items() if kind != beside)
        self._busy: dict[str, Counter[Kind]] = {worker: Counter() for worker in workers}

    def change(self, worker: str, kind: Kind, by: int) -> bool:
        """So many more pieces of this kind of work are under way on a worker. Whether others may have another pace now."""
        before = self._busy[worker][kind]
        self._busy[worker][kind] += by
        return self.has_any and bool(before) != bool(before + by)

    def of(self, worker: str, kind: Kind) -> float:
        """How many times as long as alone this kind of work takes on a worker now."""
        if not self.has_any or kind == "function":
            return 1.0
        others = {beside for name, busy in self._busy.items() if name != worker for beside, count in busy.items() if count > 0}
        slower = [self._factors[kind, beside] - 1.0 for beside in others if beside != kind]
        return 1.0 + sum(slower)
