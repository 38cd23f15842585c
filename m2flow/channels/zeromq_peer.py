"""The way from an outbox to one inbox: a socket, what it knows of the other end, and how it ends.

A message goes whole or not at all, and waits for nobody longer than it may. ZeroMQ connects anew to an address that somebody listens at
again; what has been there and is gone counts as gone here, since it can't be the same inbox.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from m2flow.channels.contract import Statistics
from m2flow.channels.zeromq import NOBLOCK, Endpoint, Socket, connect, milliseconds
from m2flow.errors import BrokenChannel, ChannelClosed

COPY_BELOW_BYTES = 64 * 1024
"""Below this, handing a frame to ZeroMQ without a copy costs more than the copy."""
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""As a number: a member of an enumeration takes a microsecond each time."""
END = b"m2e"
"""Begins the frame that says that a sender has ended; its name follows."""


class Peer(Endpoint):
    """The way to one inbox."""

    _what = "the way to an inbox"

    def open(self, address: str, max_parcels: int) -> None:
        self.address = address
        self.senders: set[str] = set()
        self._has_taken = self._is_gone = self._has_ended = False
        socket = self._create(zmq.PUSH, max_parcels)
        # Queue only for a peer that is there: what is queued for one that never comes would be lost without a word.
        socket.immediate = True
        self._watch()
        connect(socket, address)

    def send(self, frames: Sequence[bytes | memoryview], timeout_s: float, statistics: Statistics) -> None:
        """Hand one message over, all of its frames or none."""
        socket = self._opened()
        if self._has_ended:
            raise ChannelClosed(f"the channel to {self.address} was ended")
        deadline: float | None = None
        while True:
            self.require_alive()
            if _send_now(socket, frames):
                self._has_taken = True
                return
            start = time.monotonic()
            deadline = start + timeout_s if deadline is None else deadline
            if start >= deadline:
                raise self.took_nothing(timeout_s)
            self._wait_until_writable(deadline - start)
            statistics.wait_s += time.monotonic() - start

    def require_alive(self) -> None:
        """Raises BrokenChannel: the peer is gone. ZeroMQ would connect anew, to what can't be the same inbox any more."""
        has_ended = bool(self._ended_connections())  # Before anything was taken it may have been turned away, or not be there yet.
        self._is_gone = self._is_gone or (has_ended and self._has_taken)
        if self._is_gone:
            raise self.is_gone()

    def is_gone(self) -> BrokenChannel:
        return BrokenChannel(f"{self.address} is gone", now="Its worker has died, or was cut off; see its log.")

    def took_nothing(self, timeout_s: float) -> BrokenChannel:
        return BrokenChannel(
            f"{self.address} took nothing for {timeout_s:g} s", now="Its worker is gone, or too slow for what it is sent; see its log."
        )

    def end(self, timeout_s: float, statistics: Statistics) -> None:
        """Say that this was all."""
        if not self._has_ended:
            for sender in sorted(self.senders):
                self.send([END + sender.encode()], timeout_s, statistics)
            self._has_ended = True

    def end_now(self) -> None:
        """The same, if the peer takes it without waiting."""
        if not self._has_ended and not self._is_gone:
            self._has_ended = all(_send_now(self._opened(), [END + sender.encode()]) for sender in sorted(self.senders))

    def close(self, drain_s: float) -> None:
        self._release(drain_s)

    def _wait_until_writable(self, timeout_s: float) -> None:
        """Or until the peer is gone."""
        poller = zmq.Poller()
        poller.register(self._opened(), zmq.POLLOUT)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)
        poller.poll(milliseconds(timeout_s))


def _send_now(socket: Socket, frames: Sequence[bytes | memoryview]) -> bool:
    """Whether the message could go without waiting."""
    try:
        for frame in frames[:-1]:
            socket.send(frame, _MORE, copy=len(frame) < COPY_BELOW_BYTES)
        socket.send(frames[-1], NOBLOCK, copy=len(frames[-1]) < COPY_BELOW_BYTES)
    except zmq.Again:  # ZeroMQ has rolled back the frames that went before: the whole message goes again.
        return False
    return True
