"""Which sender is heard on which connection of an inbox, and which of them are gone.

    heard(descriptor, sender) ... ended(descriptors) ... next_gone() -> the sender

ZeroMQ names a connection by its file descriptor, both with a message and when it ends. A descriptor is used again: whoever is turned away
leaves one behind that the next friend may get, and word of its end may come after the friend's first message. So each is remembered
with its inode, which no other has as long as it is open, and a connection has ended when its socket is not there any more. One that is
there still is looked at again: ZeroMQ's thread may not have come to close it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from typing import final

_CLOSES_S = 0.05
"""ZeroMQ tells of an end, and closes the socket a moment later."""
_LOOK_S = 0.001


@final
class Connections:
    """Of one inbox. One thread."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[str, int]] = {}
        """File descriptor -> who was heard on it last, and the inode of its socket."""
        self._ended: deque[int] = deque()
        """Descriptors of connections that are said to have ended, and of which nothing was made yet."""
        self._doubted: set[int] = set()
        """Those whose socket was there all the same: ZeroMQ is slow to close it, or it is another's by now."""

    def sender_on(self, connection: int) -> str | None:
        """Who was heard there last."""
        found = self._heard.get(connection)
        return found[0] if found is not None else None

    def heard(self, connection: int, sender: str) -> None:
        self._heard[connection] = (sender, inode_of(connection))

    @property
    def are_doubted(self) -> bool:
        """Whether one may end of which nothing more will be said."""
        return bool(self._doubted)

    def ended(self, descriptors: Iterable[int]) -> None:
        """ZeroMQ says so; and those that it has closed since it said so."""
        self._ended.extend(descriptors)
        closed = [connection for connection in self._doubted if inode_of(connection) != self._heard[connection][1]]
        self._doubted.difference_update(closed)
        self._ended.extend(closed)

    def next_gone(self) -> str | None:
        """A sender whose connection has ended; each once. When there is nothing more to read: what came before an end counts."""
        while self._ended:
            connection = self._ended.popleft()
            found = self._heard.get(connection)
            if found is not None and _is_open(connection, found[1], _CLOSES_S):
                self._doubted.add(connection)
            elif found is not None:
                self._doubted.discard(connection)
                del self._heard[connection]
                return found[0]
        return None


def inode_of(descriptor: int) -> int:
    """Of the socket that is open under it; -1: none."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1


def _is_open(descriptor: int, inode: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while inode >= 0 and inode_of(descriptor) == inode:
        if time.monotonic() > deadline:
            return True
        time.sleep(_LOOK_S)
    return False
