"""An inbox and an outbox inside one process: for endpoints that share a process, and the plain form of the contract.

Parcels are handed over by reference, as read-only views, so both sides see what ZeroMQ would have shown them. Addresses are
`memory://NAME`, known to this process only. Threads may share these objects. Nobody can die alone in a process, so a channel breaks
only where an inbox is closed while others still send to it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque

from m2flow.channels.contract import Inbox, Outbox, Parcel
from m2flow.errors import BrokenChannel, ChannelClosed, EndOfStream, PortInUse

_open_inboxes: dict[str, MemoryInbox] = {}
_numbers = itertools.count()


class MemoryInbox(Inbox):
    """An inbox of this process, which holds up to `max_parcels`. Without a name it gets one."""

    def __init__(self, name: str = "", *, max_parcels: int = 1000) -> None:
        super().__init__()
        self._address = f"memory://{name or next(_numbers)}"
        self._max_parcels = max_parcels
        self._parcels: deque[Parcel] = deque()
        self._changed = threading.Condition()
        self._is_open = False
        self._senders: dict[MemoryOutbox, bool] = {}
        """Those that have sent something, and whether they have ended."""

    def open(self) -> str:
        if _open_inboxes.setdefault(self._address, self) is not self:
            raise PortInUse(f"{self._address} is taken by another inbox of this process", now="Close that one, or choose another name.")
        self._is_open = True
        return self._address

    def receive(self, timeout_s: float) -> list[Parcel]:
        if self._is_open and not self._parcels and timeout_s <= 0 and not self._senders:
            return []
        with self._changed:
            start = time.monotonic()
            self._changed.wait_for(lambda: self._parcels or not self._is_open or self._is_at_end, max(timeout_s, 0.0))
            self.waited_s += time.monotonic() - start
            if not self._is_open:
                raise ChannelClosed(f"the inbox {self._address} is not open")
            if not self._parcels and self._is_at_end:
                raise EndOfStream(f"all that sent to {self._address} have ended")
            parcels = list(self._parcels)
            self._parcels.clear()
            self._changed.notify_all()
        for parcel in parcels:
            self._counted(parcel.sender).add(len(parcel.batch), parcel.batch.num_bytes)
        return parcels

    def drop(self, sender: str, num_left: int) -> None:
        """A sender died: of what it sent and nobody has taken, only the first parcels arrive."""
        with self._changed:
            of_it = [parcel for parcel in self._parcels if parcel.sender == sender]
            gone = {id(parcel) for parcel in of_it[num_left:]}
            kept = [parcel for parcel in self._parcels if id(parcel) not in gone]
            self._parcels.clear()
            self._parcels.extend(kept)

    def num_from(self, sender: str) -> int:
        """Parcels of a sender that nobody has taken."""
        with self._changed:
            return sum(parcel.sender == sender for parcel in self._parcels)

    def close(self) -> None:
        if _open_inboxes.get(self._address) is self:
            del _open_inboxes[self._address]
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    @property
    def _is_at_end(self) -> bool:
        return bool(self._senders) and all(self._senders.values())

    def _put(self, sender: MemoryOutbox, parcel: Parcel, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._parcels) < self._max_parcels or not self._is_open, timeout_s):
                raise BrokenChannel(f"{self._address} took nothing for {timeout_s:g} s")
            if not self._is_open:
                raise BrokenChannel(f"{self._address} is closed")
            self._senders[sender] = False
            self._parcels.append(parcel)
            self._changed.notify_all()

    def _end(self, sender: MemoryOutbox) -> None:
        with self._changed:
            self._senders[sender] = True
            self._changed.notify_all()


class MemoryOutbox(Outbox):
    """Sends to inboxes of this process."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._is_closed = False
        self._reached: dict[str, MemoryInbox] = {}
        self._ended: set[str] = set()

    def send(self, address: str, parcel: Parcel) -> None:
        if self._is_closed:
            raise ChannelClosed("the outbox is closed")
        if address in self._ended:
            raise ChannelClosed(f"the channel to {address} was ended")
        inbox = _open_inboxes.get(address)
        if inbox is None:
            raise BrokenChannel(f"no inbox of this process listens at {address}")
        statistics = self._counted(address)
        start = time.monotonic()
        try:
            inbox._put(self, Parcel(parcel.call, parcel.batch.frozen(), parcel.sender), self._timeout_s)
        finally:
            statistics.wait_s += time.monotonic() - start
        self._reached[address] = inbox
        statistics.add(len(parcel.batch), parcel.batch.num_bytes)

    def end(self, address: str) -> None:
        if self._is_closed:
            raise ChannelClosed("the outbox is closed")
        self._ended.add(address)
        inbox = self._reached.pop(address, None)
        if inbox is not None:
            inbox._end(self)

    def forget(self, address: str) -> None:
        self._reached.pop(address, None)
        self._ended.discard(address)

    def close(self, *, drain_s: float = 0.0) -> None:
        self._is_closed = True
        for inbox in self._reached.values():
            inbox._end(self)
        self._reached.clear()
