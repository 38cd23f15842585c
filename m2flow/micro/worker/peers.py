"""Track a worker's peers, their addresses and which are dead, and send rows to them.

    Peers.send --outbox--> another process        nothing is sent to a dead peer, and nothing of it is accepted

A process is named by its tag, which is new for each restart of a worker (`m2flow.micro.protocol.worker_state.tag_of`): rows meant for a
process that is gone do not reach its successor. Limit: a peer that lives and accepts nothing blocks its senders for five minutes, then it
is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

from m2flow.channels.channel import Outbox, Parcel, Statistics
from m2flow.errors import BrokenChannel, InternalError
from m2flow.micro.protocol.worker_state import worker_of

_MOST_S = 300.0


@final
class Peers:
    """Send rows to the processes that are alive. Used by workers and by the controller."""

    def __init__(self, outbox: Outbox, hear: Callable[[], None], *, knows_all: bool = True) -> None:
        """
        Args:
            hear: receives the controller's messages about peers; called while a peer accepts nothing.
            knows_all: whether this process was there when the run began and so was told of every peer. A restarted one does not know
                which peers died before.
        """
        self._outbox = outbox
        self._hear = hear
        self._knows_all = knows_all
        self._addresses: dict[str, str] = {}
        self._known: set[str] = set()
        """All tags that were ever announced."""
        self._dead: set[str] = set()

    def announce(self, addresses: Mapping[str, str], transports: Mapping[str, str]) -> None:
        """Replace the live peers by these. `transports`: worker -> the transport that the plan has chosen."""
        for tag in self._addresses.keys() - addresses.keys():
            self._drop(tag)
        self._known |= addresses.keys()
        self._addresses = {tag: address for tag, address in addresses.items() if tag not in self._dead}
        for tag, address in self._addresses.items():
            if worker_of(tag) in transports:
                self._outbox.prefer(address, transports[worker_of(tag)])

    def sever(self, tag: str) -> None:
        """Mark a peer as dead."""
        self._dead.add(tag)
        if tag in self._addresses:
            self._drop(tag)

    def counts(self, parcel: Parcel) -> bool:
        """Whether a parcel that has arrived is to be accepted."""
        return parcel.sender not in self._dead

    def send(self, tag: str, parcel: Parcel) -> bool:
        """Send rows to a peer; False if it is dead and the rows are dropped.

        Raises:
            BrokenChannel: it lives, and accepted nothing for five minutes. InternalError: there was never such a peer.
        """
        if self._knows_all and tag not in self._known:
            raise InternalError(f"rows of call {parcel.call} are for {tag!r}, and nobody has told {parcel.sender} of such a process")
        start_s = time.monotonic()
        while (address := self._addresses.get(tag)) is not None:
            try:
                self._outbox.send(address, parcel)
            except BrokenChannel:
                self._hear()
                if tag in self._addresses and time.monotonic() - start_s > _MOST_S:
                    raise
            else:
                return True
        return False

    def statistics(self) -> dict[str, Statistics]:
        """Return tag -> statistics of what was sent there."""
        counted = self._outbox.statistics()
        return {tag: counted[address] for tag, address in self._addresses.items() if address in counted}

    def _drop(self, tag: str) -> None:
        self._outbox.forget(self._addresses.pop(tag))
