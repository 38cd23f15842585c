"""The other workers' processes, as one worker sees them: where they listen, and which are dead.

    Peers.send --outbox--> another process        nothing is sent to one that is dead, and nothing of it is taken in

A process goes by its tag, which is new for each that a worker is (`m2flow.micro.protocol.worker_state.tag_of`): what was meant for one that
is gone does not reach the next, whose rows the controller knows of by another name. Limit: a peer that lives and takes nothing holds
its senders up for five minutes, then it is an error.
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
    """Sends rows to them."""

    def __init__(self, outbox: Outbox, hear: Callable[[], None], *, knows_all: bool = True) -> None:
        """
        Args:
            hear: takes what the controller says of peers meanwhile: it is called while one takes nothing.
            knows_all: this process was there when the run began, so it was told of every peer while that lived. One that was started
                again does not know who died before.
        """
        self._outbox = outbox
        self._hear = hear
        self._knows_all = knows_all
        self._addresses: dict[str, str] = {}
        self._known: set[str] = set()
        """All that were ever announced."""
        self._dead: set[str] = set()

    def announce(self, addresses: Mapping[str, str], transports: Mapping[str, str]) -> None:
        """These are there now, and no others; by worker, the way to it that the plan has chosen."""
        for tag in self._addresses.keys() - addresses.keys():
            self._drop(tag)
        self._known |= addresses.keys()
        self._addresses = {tag: address for tag, address in addresses.items() if tag not in self._dead}
        for tag, address in self._addresses.items():
            if worker_of(tag) in transports:
                self._outbox.prefer(address, transports[worker_of(tag)])

    def sever(self, tag: str) -> None:
        """This one is dead."""
        self._dead.add(tag)
        if tag in self._addresses:
            self._drop(tag)

    def counts(self, parcel: Parcel) -> bool:
        """Whether what has come is to be taken in."""
        return parcel.sender not in self._dead

    def send(self, tag: str, parcel: Parcel) -> bool:
        """Hand rows over; False if the peer is dead, and nobody is to have them.

        Raises:
            BrokenChannel: it lives, and took nothing for five minutes. InternalError: there was never such a peer.
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
        """By tag: what was sent there."""
        counted = self._outbox.statistics()
        return {tag: counted[address] for tag, address in self._addresses.items() if address in counted}

    def _drop(self, tag: str) -> None:
        self._outbox.forget(self._addresses.pop(tag))
