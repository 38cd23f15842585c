"""An inbox and an outbox inside one process: for tests, and for endpoints that share a process.

Parcels are handed over by reference, as read-only views, so both sides see what ZeroMQ would have shown them. Addresses are
`memory://NAME`, known to this process only. Threads may share these objects.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque

from m2flow.channels.contract import Inbox, Outbox, Parcel, Statistics
from m2flow.errors import BrokenChannel, ChannelClosed, PortInUse

_open_inboxes: dict[str, MemoryInbox] = {}
_numbers = itertools.count()


class MemoryInbox(Inbox):
    """An inbox of this process, which holds up to `max_parcels`. Without a name it gets one."""

    def __init__(self, name: str = "", *, max_parcels: int = 1000) -> None:
        self.statistics = Statistics()
        self._address = f"memory://{name or next(_numbers)}"
        self._max_parcels = max_parcels
        self._parcels: deque[Parcel] = deque()
        self._changed = threading.Condition()
        self._is_open = False

    def open(self) -> str:
        if _open_inboxes.setdefault(self._address, self) is not self:
            raise PortInUse(f"{self._address} is taken by another inbox of this process", now="Close that one, or choose another name.")
        self._is_open = True
        return self._address

    def receive(self, timeout_s: float) -> list[Parcel]:
        if self._is_open and not self._parcels and timeout_s <= 0:
            return []
        with self._changed:
            start = time.monotonic()
            self._changed.wait_for(lambda: self._parcels or not self._is_open, max(timeout_s, 0.0))
            self.statistics.wait_s += time.monotonic() - start
            if not self._is_open:
                raise ChannelClosed(f"the inbox {self._address} is not open")
            parcels = list(self._parcels)
            self._parcels.clear()
            self._changed.notify_all()
        for parcel in parcels:
            _count(self.statistics, parcel)
        return parcels

    def close(self) -> None:
        if _open_inboxes.get(self._address) is self:
            del _open_inboxes[self._address]
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _put(self, parcel: Parcel, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._parcels) < self._max_parcels or not self._is_open, timeout_s):
                raise BrokenChannel(f"{self._address} took nothing for {timeout_s:g} s")
            if not self._is_open:
                raise BrokenChannel(f"{self._address} is closed")
            self._parcels.append(parcel)
            self._changed.notify_all()


class MemoryOutbox(Outbox):
    """Sends to inboxes of this process."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self.statistics = Statistics()
        self._timeout_s = timeout_s
        self._is_closed = False

    def send(self, address: str, parcel: Parcel) -> None:
        if self._is_closed:
            raise ChannelClosed("the outbox is closed")
        inbox = _open_inboxes.get(address)
        if inbox is None:
            raise BrokenChannel(f"no inbox of this process listens at {address}")
        start = time.monotonic()
        try:
            inbox._put(Parcel(parcel.call, parcel.batch.frozen(), parcel.sender), self._timeout_s)
        finally:
            self.statistics.wait_s += time.monotonic() - start
        _count(self.statistics, parcel)

    def close(self, *, drain_s: float = 0.0) -> None:
        self._is_closed = True


def _count(statistics: Statistics, parcel: Parcel) -> None:
    statistics.num_parcels += 1
    statistics.num_samples += len(parcel.batch)
    statistics.num_bytes += parcel.batch.num_bytes
