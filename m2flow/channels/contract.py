"""What a channel is: bounded, addressed, and without pickle.

The data plane of a worker is one `Inbox`, which many senders reach by its address, and an `Outbox`, which reaches the
inboxes of others. What travels is a `Parcel`: some samples' columns, and the call that they are the result of. The control
link (`Link`) carries opaque messages between the controller and its workers; its meaning is `m2flow.micro.messages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from m2flow.samples import Batch


@dataclass(frozen=True, eq=False)
class Parcel:
    """Some samples of one call's result, on their way."""

    call: int
    batch: Batch
    sender: str
    """The worker's name."""


@dataclass
class Statistics:
    """Counts of one inbox or outbox since it was opened."""

    num_parcels: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    wait_s: float = 0.0
    """Time spent blocked: on a full peer (outbox), on nothing to receive (inbox)."""


class Inbox(ABC):
    """Receives parcels. Opened by `open`, which gives the address that senders need."""

    statistics: Statistics

    @abstractmethod
    def open(self) -> str:
        """Start to listen; returns the address. Raises `PortInUse`."""

    @abstractmethod
    def receive(self, timeout_s: float) -> list[Parcel]:
        """Every parcel that is here, or, if there is none, the first to come in `timeout_s` (0: do not wait). Each sender's
        parcels come in the order in which it sent them. Raises `DecodeError` for bytes that are not a parcel (they are
        consumed), `ChannelClosed` after `close`."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening and free the address. May be called twice."""


class Outbox(ABC):
    """Sends parcels to inboxes by address."""

    statistics: Statistics

    @abstractmethod
    def send(self, address: str, parcel: Parcel) -> None:
        """Hand a parcel over. Blocks while the peer's bound is reached; raises `BrokenChannel` if that lasts too long, or the
        peer is known to be gone; `ChannelClosed` after `close`."""

    @abstractmethod
    def close(self, *, drain_s: float = 0.0) -> None:
        """Close, waiting up to `drain_s` for what was sent to leave. May be called twice."""
