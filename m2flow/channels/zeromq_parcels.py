"""Parcels between processes: over ZeroMQ alone, or with their large columns lent in shared memory and the rest over ZeroMQ.

    ZmqOutbox --PUSH--> PULL ZmqInbox

    a parcel    the frames of `m2flow.channels.codec`
    a loan      one frame that says where the large columns lie (`m2flow.channels.arena`), then the parcel's head frame
    an end      one frame with the sender's name

An inbox takes all three from whoever sends them; which way a parcel goes is the sender's choice (`Outbox.prefer`), per peer. It learns
from ZeroMQ when a connection has ended, and raises `BrokenChannel` for a sender that had not said so before. Two workers that send to
each other from the thread that also receives must keep less in flight than their queues hold, or they wait for each other: that is what
credits are for (`m2flow.micro.scheduling.credits`).

A peer that dies takes with it what lay in its queues: finding that out and sending again is the scheduler's part.
"""

from __future__ import annotations

import atexit
import importlib
import time
from collections.abc import Sequence

import msgspec
import zmq

from m2flow.channels.arena import Arena, Borrower, Loan
from m2flow.channels.codec import FRAME_BYTES, MAX_HEAD_BYTES, cut, decode, encode, num_frame_bytes
from m2flow.channels.contract import Inbox, Outbox, Parcel, Statistics
from m2flow.channels.keys import Keys
from m2flow.channels.zeromq import MAX_MESSAGES_AT_ONCE, Endpoint, Socket, connect, milliseconds, wait
from m2flow.errors import BrokenChannel, ChannelClosed, DecodeError, EndOfStream

COPY_BELOW_BYTES = 64 * 1024
"""Below this, handing a frame to ZeroMQ without a copy costs more than the copy."""

_LOAN, _END = b"m2l", b"m2e"
_LOOK_S = 0.002
"""Between two looks at the table of loans, which nobody rings a bell for."""
_MAX_NAME_BYTES = 1024
_loan_encoder = msgspec.msgpack.Encoder()
_loan_decoder = msgspec.msgpack.Decoder(Loan)


class ZmqInbox(Endpoint, Inbox):
    """An inbox at a place of this host. `max_parcels` of each sender wait in it, 0: as many as come; the senders' queues come on top."""

    _what = "the inbox"

    def __init__(self, place: str = "ipc:", *, max_parcels: int = 1000, keys: Keys | None = None) -> None:
        Endpoint.__init__(self, keys)
        Inbox.__init__(self)
        self._place = place
        self._max_parcels = max_parcels
        self._pending: DecodeError | None = None
        self._borrower = Borrower()
        self._arenas: dict[str, set[str]] = {}
        """Sender -> the arenas that it lent from."""
        self._connections: dict[int, str] = {}
        """File descriptor -> the sender that was heard on it last."""
        self._ended_here: list[int] = []
        """Connections that have ended, and of which no word was said yet."""
        self._open_senders: set[str] = set()
        self._ended_senders: set[str] = set()
        self._gone_senders: set[str] = set()

    def open(self) -> str:
        address = self._bind(zmq.PULL, self._max_parcels, self._place, max(FRAME_BYTES, MAX_HEAD_BYTES))
        self._watch()
        return address

    def receive(self, timeout_s: float) -> list[Parcel]:
        socket = self._opened()
        if self._pending is not None:
            error, self._pending = self._pending, None
            raise error
        parcels: list[Parcel] = []
        deadline = time.monotonic() + timeout_s
        while True:
            self._ended_here += self._ended_connections()  # First, so that what came on them before is here too.
            self._take(socket, parcels)
            if parcels or self._pending is not None:
                return parcels
            self._raise_ends()
            start = time.monotonic()
            if start >= deadline:
                return parcels
            wait([self], deadline - start)
            self.waited_s += time.monotonic() - start

    def _take(self, socket: Socket, parcels: list[Parcel]) -> None:
        """Add what is here. That may be nothing though the socket is readable: a peer that is turned away makes it so."""
        while len(parcels) < MAX_MESSAGES_AT_ONCE:
            frames, connection = _receive_frames(socket)
            if not frames:
                return
            try:
                parcel = self._read(frames, connection)
            except DecodeError as error:
                if not parcels:
                    raise
                self._pending = error  # The good ones before it go first.
                return
            if parcel is not None:
                parcels.append(parcel)

    def _read(self, frames: list[bytes | memoryview], connection: int) -> Parcel | None:
        """The parcel of a message; None for one that has none."""
        kind = bytes(frames[0][:3])
        if kind == _END:
            self._ended(frames)
            return None
        num_bytes = num_frame_bytes(frames)
        if kind == _LOAN:
            loan = _loan_of(frames[0])
            try:
                shared = self._borrower.borrow(loan)
            except BrokenChannel:
                return None  # It died with this on its way; the end of its connection will tell.
            parcel = decode([*frames[1:], *shared])
            self._arenas.setdefault(parcel.sender, set()).add(loan.arena)
        else:
            loan = None
            parcel = decode(frames)
        statistics = self._counted(parcel.sender)
        statistics.add(len(parcel.batch), num_bytes + sum(loan.sizes if loan else ()))
        statistics.num_shared_bytes += sum(loan.sizes if loan else ())
        if self._connections.get(connection) != parcel.sender or parcel.sender not in self._open_senders:
            self._connections[connection] = parcel.sender
            self._open_senders.add(parcel.sender)
            self._ended_senders.discard(parcel.sender)
            self._gone_senders.discard(parcel.sender)
        return parcel

    def _ended(self, frames: Sequence[bytes | memoryview]) -> None:
        try:
            sender = bytes(frames[0][len(_END) :]).decode()
        except UnicodeDecodeError:
            raise DecodeError("the end of a channel whose sender's name is no text") from None
        if len(frames) != 1 or len(sender) > _MAX_NAME_BYTES:
            raise DecodeError("what follows the end of a channel")
        if sender in self._open_senders:
            self._open_senders.discard(sender)
            self._ended_senders.add(sender)
            self._let_go(sender)

    def _raise_ends(self) -> None:
        """Nothing is left to give. Connections may have ended: of senders that had not, one is told at a time."""
        while self._ended_here:
            sender = self._connections.pop(self._ended_here.pop(0), None)
            if sender in self._open_senders:
                self._open_senders.discard(sender)
                self._gone_senders.add(sender)
                self._let_go(sender)
                raise BrokenChannel(
                    f"{sender} is gone, and had not ended its channel", now="Its worker has died, or was cut off; see its log."
                )
        if self._ended_senders and not self._open_senders and not self._gone_senders:
            raise EndOfStream("all that sent to this inbox have ended")

    def _let_go(self, sender: str) -> None:
        for arena in self._arenas.pop(sender, ()):
            self._borrower.forget(arena)

    def close(self) -> None:
        self._release(0.0)
        self._borrower.close()

    def _has_pending(self) -> bool:
        return self._pending is not None


class ZmqOutbox(Outbox):
    """Sends to inboxes by address.

    Each peer has a queue of `max_parcels` here, beside the inbox's own; when both are full, `send` waits up to `timeout_s`. With
    an arena, large columns go to the peers for which the plan says so (`prefer`) in shared memory; where the arena is full, they
    are sent like the rest, and counted.
    """

    def __init__(
        self, name: str = "", *, max_parcels: int = 1000, timeout_s: float = 60.0, keys: Keys | None = None, arena: Arena | None = None
    ) -> None:
        super().__init__()
        self._name = name
        self._max_parcels = max_parcels
        self._timeout_s = timeout_s
        self._keys = keys
        self._arena = arena
        self._peers: dict[str, _Peer] = {}
        self._lends_to: set[str] = set()
        self._is_closed = False
        self._is_registered = False

    def prefer(self, address: str, transport: str) -> None:
        (self._lends_to.add if transport == "shared memory" and self._arena is not None else self._lends_to.discard)(address)

    def send(self, address: str, parcel: Parcel) -> None:
        if self._is_closed:
            raise ChannelClosed(f"the outbox {self._name} is closed")
        frames = encode(parcel)
        peer = self._peers.get(address) or self._new_peer(address)
        statistics = self._counted(address)
        num_bytes = num_frame_bytes(frames)
        loan = self._lent(frames, peer, statistics) if len(frames) > 1 and address in self._lends_to else None
        try:
            peer.send(cut(frames) if loan is None else [_LOAN + _loan_encoder.encode(loan), frames[0]], self._timeout_s, statistics)
        except BaseException:
            if loan is not None and self._arena is not None:
                self._arena.take_back(loan)
            raise
        peer.senders.add(parcel.sender)
        statistics.add(len(parcel.batch), num_bytes)

    def end(self, address: str) -> None:
        if self._is_closed:
            raise ChannelClosed(f"the outbox {self._name} is closed")
        peer = self._peers.get(address)
        if peer is not None:
            peer.end(self._timeout_s, self._counted(address))

    def forget(self, address: str) -> None:
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.close(0.0)
        if self._arena is not None:
            self._arena.forget(address)

    def close(self, *, drain_s: float = 0.0) -> None:
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close)
        deadline = time.monotonic() + drain_s
        for peer in self._peers.values():
            peer.end_now()
        for peer in self._peers.values():
            peer.close(max(deadline - time.monotonic(), 0.0))
        self._peers.clear()
        if self._arena is not None:
            self._wait_for_loans(deadline)
            self._arena.close()

    def _lent(self, frames: list[bytes | memoryview], peer: _Peer, statistics: Statistics) -> Loan | None:
        """Loans on their way have the bound that a queue has: their heads are too small to fill one. None: the pool is full."""
        arena = self._arena
        assert arena is not None
        deadline = time.monotonic() + self._timeout_s
        while self._max_parcels and arena.num_on_their_way(peer.address) >= self._max_parcels:
            start = time.monotonic()
            peer.require_alive()
            if start >= deadline:
                raise peer.took_nothing(self._timeout_s)
            time.sleep(_LOOK_S)
            statistics.wait_s += time.monotonic() - start
        loan = arena.lend([memoryview(frame) for frame in frames[1:]], peer.address)
        statistics.num_unshared += loan is None
        statistics.num_shared_bytes += sum(loan.sizes) if loan else 0
        return loan

    def _wait_for_loans(self, deadline: float) -> None:
        """A buffer whose loan is still on its way must be there when it comes."""
        assert self._arena is not None
        while self._arena.num_on_their_way() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _new_peer(self, address: str) -> _Peer:
        if not self._is_registered:
            # Uncopied frames are Python's memory; pyzmq lets go of it at exit though ZeroMQ's thread may still be sending it, and the
            # process would die of that. What is registered last is called first, so pyzmq's own hook must be there already.
            importlib.import_module("zmq.utils.garbage")
            atexit.register(self.close)
            self._is_registered = True
        peer = self._peers[address] = _Peer(self._keys)
        peer.open(address, self._max_parcels)
        return peer


class _Peer(Endpoint):
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
            raise BrokenChannel(f"{self.address} is gone", now="Its worker has died, or was cut off; see its log.")

    def took_nothing(self, timeout_s: float) -> BrokenChannel:
        return BrokenChannel(
            f"{self.address} took nothing for {timeout_s:g} s", now="Its worker is gone, or too slow for what it is sent; see its log."
        )

    def end(self, timeout_s: float, statistics: Statistics) -> None:
        """Say that this was all."""
        if not self._has_ended:
            for sender in sorted(self.senders):
                self.send([_END + sender.encode()], timeout_s, statistics)
            self._has_ended = True

    def end_now(self) -> None:
        """The same, if the peer takes it without waiting."""
        if not self._has_ended and not self._is_gone:
            self._has_ended = all(_send_now(self._opened(), [_END + sender.encode()]) for sender in sorted(self.senders))

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
            socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE, copy=len(frame) < COPY_BELOW_BYTES)
        socket.send(frames[-1], zmq.NOBLOCK, copy=len(frames[-1]) < COPY_BELOW_BYTES)
    except zmq.Again:  # ZeroMQ has rolled back the frames that went before: the whole message goes again.
        return False
    return True


def _receive_frames(socket: Socket) -> tuple[list[bytes | memoryview], int]:
    """The frames of the next message, or none, and the connection that they came on. Small ones are copied: in ZeroMQ's own buffer they
    lie at any address."""
    try:
        received = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return [], -1
    connection = received[0].get(zmq.SRCFD)
    assert isinstance(connection, int)
    return [frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer for frame in received], connection


def _loan_of(frame: bytes | memoryview) -> Loan:
    try:
        return _loan_decoder.decode(frame[len(_LOAN) :])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"a message that should say where its columns lie is broken: {error}") from None
