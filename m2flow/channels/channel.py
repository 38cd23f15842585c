"""The channel contract (bounded, addressed, without pickle), and its in-memory implementation.

The data plane of a worker is one `Inbox`, which any number of senders reach by its address, and one `Outbox`, which reaches the inboxes of
others. What travels is a `Parcel`: some samples' columns, and the call that they are the result of. The control link carries opaque
messages between the controller and its workers; their meaning is in `m2flow.micro.protocol.messages`.

A channel ends in one of three ways, each an error of its own (the distinction is trio's):

    ChannelClosed   this end was closed, and used afterwards
    EndOfStream     the other end said that this was all, and everything has been received
    BrokenChannel   the other end went away without ending the channel, or takes nothing; parcels may be lost

`MemoryInbox` and `MemoryOutbox` connect threads of one process (`memory://NAME`). Parcels are handed over by reference, as read-only
views, so both sides see what ZeroMQ would have shown them. A peer can't die alone inside a process, so such a channel breaks only where an
inbox is closed while others still send to it.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Protocol

import msgspec

from m2flow.errors import BrokenChannel, ChannelClosed, DecodeError, EndOfStream, PortInUse
from m2flow.samples import Batch


class ControlLink(Protocol):
    """A worker's end of the link to its controller."""

    def receive(self, timeout_s: float) -> list[bytes]: ...

    def send(self, message: bytes) -> None: ...


class Parcel(msgspec.Struct, frozen=True, eq=False):
    """Some samples of one call's result, in transit."""

    call: int
    batch: Batch
    sender: str
    """The worker's name."""


@dataclass
class Statistics:
    """Counts of what went over one channel since its end here was opened."""

    num_parcels: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    """In frames and buffers, headers included."""
    num_shared_bytes: int = 0
    """The part of them that is lent in shared memory."""
    num_pair_bytes: int = 0
    """The part of them that goes over torch.distributed."""
    num_unshared: int = 0
    """Parcels that were to be lent, and were sent as they are, because the pool was full."""
    wait_s: float = 0.0
    """Time that an outbox was blocked on this peer."""

    def add(self, num_samples: int, num_bytes: int) -> None:
        """Count one parcel."""
        self.num_parcels += 1
        self.num_samples += num_samples
        self.num_bytes += num_bytes

    @staticmethod
    def sum(parts: Iterable[Statistics]) -> Statistics:
        """Add up the counts of all channels of one end."""
        whole = Statistics()
        for part in parts:
            for field in fields(Statistics):
                setattr(whole, field.name, getattr(whole, field.name) + getattr(part, field.name))
        return whole


@dataclass
class Dropped:
    """Count received messages that do not belong to the run, and keep what was wrong with the last one."""

    num: int = 0
    last: str = ""
    """What was wrong with the last one."""
    _num_told: int = 0

    def add(self, what: str) -> None:
        self.num += 1
        self.last = what

    def news(self) -> str:
        """Text for the log; empty until the count has doubled since the last text, so that a stranger can't fill a log."""
        if not self.num or self.num < 2 * self._num_told:
            return ""
        self._num_told = self.num
        messages = "a message that is" if self.num == 1 else f"{self.num:,} messages that are"
        return f"dropped {messages} none of this run's{', the last one' if self.num > 1 else ''}: {self.last}"


_MOST_DROPPED_AT_ONCE = 1000
"""Bounds `take`, which must return even if a stranger sends without a pause."""


class Inbox(ABC):
    """Receive parcels. `open` starts to listen and returns the address that senders need."""

    def __init__(self) -> None:
        self.dropped = Dropped()
        """By `take`."""
        self._statistics: dict[str, Statistics] = {}
        self.waited_s = 0.0
        """Time blocked with nothing to receive."""

    def statistics(self) -> dict[str, Statistics]:
        """By sender: what has come from it."""
        return self._statistics

    @abstractmethod
    def open(self) -> str:
        """Start to listen; returns the address. Raises `PortInUse`."""

    @abstractmethod
    def receive(self, timeout_s: float) -> list[Parcel]:
        """Every parcel that is here, or, if there is none, the first to come in `timeout_s` (0: do not wait). Each sender's
        parcels come in the order in which it sent them.

        Raises:
            DecodeError: bytes that are not a parcel (they are consumed).
            BrokenChannel: a sender is gone without having said that it ended. Once for each, after all that came from it; the
                others' parcels can be received as before.
            EndOfStream: every sender that was heard has ended. Again at each call, until a new one is heard.
            ChannelClosed: after `close`.
        """

    def take(self) -> list[Parcel]:
        """Return what is here now, for a caller that learns of lost senders elsewhere. Messages that are no parcels go to `dropped`."""
        for _ in range(_MOST_DROPPED_AT_ONCE):
            try:
                return self.receive(0.0)
            except DecodeError as error:
                self.dropped.add(error.what)
            except (BrokenChannel, EndOfStream):
                return []
        return []

    @abstractmethod
    def close(self) -> None:
        """Stop listening and free the address. May be called twice."""

    def _counted(self, sender: str) -> Statistics:
        found = self._statistics.get(sender)
        if found is None:
            found = self._statistics[sender] = Statistics()
        return found


class Outbox(ABC):
    """Send parcels to inboxes by address."""

    def __init__(self) -> None:
        self._statistics: dict[str, Statistics] = {}

    def statistics(self) -> dict[str, Statistics]:
        """By address: what was sent there."""
        return self._statistics

    @abstractmethod
    def send(self, address: str, parcel: Parcel) -> None:
        """Send a parcel. Blocks while the peer's bound is reached; raises `BrokenChannel` if that lasts too long, or the
        peer is known to be gone; `ChannelClosed` after `close`."""

    @abstractmethod
    def end(self, address: str) -> None:
        """End the channel to a peer: it gets `EndOfStream` after everything that was sent, and nothing more can be sent to it."""

    def prefer(self, address: str, transport: str) -> None:
        """Use the plan's transport to this peer (`m2flow.micro.protocol.plan.Route.transport`), where the outbox has more than one."""

    def forget(self, address: str) -> None:
        """Free what is kept for a peer that is gone for good. What it has not received is lost."""

    @abstractmethod
    def close(self, *, drain_s: float = 0.0) -> None:
        """Close, waiting up to `drain_s` for what was sent to leave. Channels that have drained by then end in order; a peer that was not
        sent everything finds its channel broken. May be called twice."""

    def _counted(self, address: str) -> Statistics:
        found = self._statistics.get(address)
        if found is None:
            found = self._statistics[address] = Statistics()
        return found


# ---- in memory

_open_inboxes: dict[str, MemoryInbox] = {}
_numbers = itertools.count()


class MemoryInbox(Inbox):
    """An inbox inside this process that holds up to `max_parcels`. Without a name it gets a number."""

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
        """Simulate a sender's death: of its parcels that nobody has received, keep only the first `num_left`."""
        with self._changed:
            of_it = [parcel for parcel in self._parcels if parcel.sender == sender]
            gone = {id(parcel) for parcel in of_it[num_left:]}
            kept = [parcel for parcel in self._parcels if id(parcel) not in gone]
            self._parcels.clear()
            self._parcels.extend(kept)

    def num_from(self, sender: str) -> int:
        """Count a sender's parcels that nobody has received."""
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
    """Send to inboxes of this process."""

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
