"""Send parcels between processes over ZeroMQ, with large columns in shared memory or over torch.distributed where the plan says so.

    ZmqOutbox --PUSH--> PULL ZmqInbox

    a parcel    the frames of `m2flow.channels.codec`
    a loan      one frame that says where the large columns lie (`m2flow.channels.shared_memory`), then the parcel's head frame
    a transfer  one frame that says which pair of processes sends them (`m2flow.channels.process_groups`), then the head frame
    an end      one frame with the sender's name

An inbox takes all four from any sender; which transport a parcel uses is the sender's choice, per peer (`Outbox.prefer`). A message is
sent whole or not at all, and no send waits longer than its time-out. ZeroMQ reconnects to an address that somebody listens at again; here
a peer that was there and is gone counts as gone, since whoever listens there now can't be the same inbox.

Two workers that send to each other from the thread that also receives must keep less in flight than their queues hold, or they deadlock:
backpressure prevents that (`m2flow.micro.scheduler.backpressure`). What lay in the queues of a peer that dies is lost; finding it and
sending it again is the scheduler's part.

An inbox finds senders that died through ZeroMQ's monitor, which names a connection by its file descriptor. Descriptors are reused: one that
a refused peer leaves behind may be given to the next connection, and the event of its end may come after that connection's first message.
So `Connections` remembers each with its inode, which is unique as long as it is open, and counts a connection as ended when its socket is
no longer there. One that is still there is checked again later, since ZeroMQ's thread may not have closed it yet.
"""

from __future__ import annotations

import atexit
import importlib
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeVar, final

import msgspec
import zmq

from m2flow.channels.channel import Inbox, Outbox, Parcel, Statistics
from m2flow.channels.codec import FRAME_BYTES, MAX_FRAMES, MAX_HEAD_BYTES, cut, decode, encode, num_frame_bytes
from m2flow.channels.process_groups import PAIRS, Backend, PairReceiver, PairSender, PairTransfer
from m2flow.channels.shared_memory import Arena, Borrower, Loan
from m2flow.channels.zeromq import MAX_MESSAGES_AT_ONCE, NOBLOCK, Endpoint, Keys, Socket, connect, has_come, milliseconds, wait
from m2flow.errors import BrokenChannel, ChannelClosed, ChannelError, DecodeError, EndOfStream

_CLOSE_GRACE_S = 0.05
"""ZeroMQ reports an end, and closes the socket a moment later."""
_POLL_S = 0.001


@final
class Connections:
    """Track which sender is on which connection of one inbox, and which connections have ended. One thread."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[str, int]] = {}
        """File descriptor -> who was heard on it last, and the inode of its socket."""
        self._ended: deque[int] = deque()
        """Descriptors of connections whose end was reported and not handled yet."""
        self._suspect: set[int] = set()
        """Those whose socket is still open: ZeroMQ has not closed it yet, or the descriptor is another connection's by now."""

    def sender_on(self, connection: int) -> str | None:
        """The sender of the last parcel on a connection."""
        found = self._heard.get(connection)
        return found[0] if found is not None else None

    def heard(self, connection: int, sender: str) -> None:
        self._heard[connection] = (sender, inode_of(connection))

    @property
    def are_suspect(self) -> bool:
        """Whether a connection may end without another event from ZeroMQ."""
        return bool(self._suspect)

    def ended(self, descriptors: Iterable[int]) -> None:
        """Record ends that ZeroMQ reports, and those of suspect connections that have been closed since."""
        self._ended.extend(descriptors)
        closed = [connection for connection in self._suspect if inode_of(connection) != self._heard[connection][1]]
        self._suspect.difference_update(closed)
        self._ended.extend(closed)

    def next_gone(self) -> str | None:
        """A sender whose connection has ended; each once. Call it when nothing is left to read: what came before an end counts."""
        while self._ended:
            connection = self._ended.popleft()
            found = self._heard.get(connection)
            if found is not None and _is_open(connection, found[1], _CLOSE_GRACE_S):
                self._suspect.add(connection)
            elif found is not None:
                self._suspect.discard(connection)
                del self._heard[connection]
                return found[0]
        return None


def inode_of(descriptor: int) -> int:
    """Inode of the socket that is open under a descriptor; -1: none."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1


def _is_open(descriptor: int, inode: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while inode >= 0 and inode_of(descriptor) == inode:
        if time.monotonic() > deadline:
            return True
        time.sleep(_POLL_S)
    return False


# ---- one peer of an outbox

SEND_COPY_BELOW_BYTES = 128 * 1024
"""Below this, handing a frame to ZeroMQ without a copy costs more than the copy: another thread hears when it may be freed."""
RECEIVE_COPY_BELOW_BYTES = 64 * 1024
"""Below this, keeping a frame in ZeroMQ's buffer costs more than a copy."""
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""As a number: a member of an enumeration takes a microsecond each time."""
_LOOK_S = 0.01
"""Period of looking whether a peer is gone: well below the 100 ms after which ZeroMQ connects to its address again."""
END = b"m2e"
"""Begins the frame that says that a sender has ended; its name follows."""


class Peer(Endpoint):
    """An outbox's connection to one inbox."""

    _what = "the way to an inbox"

    def open(self, address: str, max_parcels: int) -> None:
        self.address = address
        self.senders: set[str] = set()
        self._has_taken = self._is_gone = self._has_ended = False
        self._looked_at = 0.0
        socket = self._create(zmq.PUSH, max_parcels)
        # Queue only for a peer that is there: what is queued for one that never comes would be lost without a word.
        socket.immediate = True
        self._watch()
        connect(socket, address)

    def send(self, frames: Sequence[bytes | memoryview], timeout_s: float, statistics: Statistics) -> None:
        """Send one message, all of its frames or none."""
        socket = self._opened()
        if self._has_ended:
            raise ChannelClosed(f"the channel to {self.address} was ended")
        deadline: float | None = None
        # Until something was taken, each time: an end before that does not count, and must have been heard by then.
        is_due = self._is_gone or not self._has_taken or time.monotonic() >= self._looked_at + _LOOK_S
        while True:
            if is_due:
                self.require_alive()
            if _send_now(socket, frames):
                self._has_taken = True
                return
            is_due = True
            start = time.monotonic()
            deadline = start + timeout_s if deadline is None else deadline
            if start >= deadline:
                raise self.took_nothing(timeout_s)
            self._wait_until_writable(deadline - start)
            statistics.wait_s += time.monotonic() - start

    def require_alive(self) -> None:
        """Raise BrokenChannel if the peer is gone. ZeroMQ would reconnect, to what can't be the same inbox any more."""
        self._looked_at = time.monotonic()
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
        """End the channel, waiting up to `timeout_s` for room in the queue."""
        if not self._has_ended:
            for sender in sorted(self.senders):
                self.send([END + sender.encode()], timeout_s, statistics)
            self._has_ended = True

    def end_now(self) -> None:
        """End the channel if the peer takes that without waiting."""
        if not self._has_ended and not self._is_gone:
            self._has_ended = all(_send_now(self._opened(), [END + sender.encode()]) for sender in sorted(self.senders))

    def close(self, drain_s: float) -> None:
        self._release(drain_s)

    def _wait_until_writable(self, timeout_s: float) -> None:
        """Wait until the socket takes a message, or the peer is gone."""
        poller = zmq.Poller()
        poller.register(self._opened(), zmq.POLLOUT)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)
        poller.poll(milliseconds(timeout_s))


def _send_now(socket: Socket, frames: Sequence[bytes | memoryview]) -> bool:
    """Send a message if that is possible without waiting; whether it was."""
    try:
        for frame in frames[:-1]:
            socket.send(frame, _MORE, copy=len(frame) < SEND_COPY_BELOW_BYTES)
        socket.send(frames[-1], NOBLOCK, copy=len(frames[-1]) < SEND_COPY_BELOW_BYTES)
    except zmq.Again:  # ZeroMQ has rolled back the frames that went before: the whole message goes again.
        return False
    return True


# ---- inbox and outbox

SHARED_MEMORY = "shared memory"

_LOAN, _PAIR_TRANSFER = b"m2l", b"m2p"
_SRCFD = int(zmq.SRCFD)
"""As a number: a member of an enumeration takes a microsecond each time."""
_UNKNOWN = -1
"""Connection of a message whose peer speaks ZMTP 1.0: ZeroMQ does not say where it came from."""
_INBOX_POLL_S = 0.002
"""Period of polling for what peers have taken, for which there is no event."""
_RECHECK_S = 0.05
"""Period of checking suspect connections again."""
_DEATH_GRACE_S = 5.0
"""A process that dies loses its sockets all at once, but not in one moment."""
_MANY = 4
"""Messages of one `receive` after which another one is probably here as well."""
_MAX_NAME_BYTES = 1024
_MAX_BYTES_AT_ONCE = 16 << 20
"""Returned by one `receive`: more would leave the processor's cache, and need memory that the system has to clear first."""
Note = TypeVar("Note", Loan, PairTransfer)
_encoder = msgspec.msgpack.Encoder()
_loan_decoder = msgspec.msgpack.Decoder(Loan)
_pair_transfer_decoder = msgspec.msgpack.Decoder(PairTransfer)


class ZmqInbox(Endpoint, Inbox):
    """An inbox that listens at a place of this host. It holds `max_parcels` of each sender (0: no bound), beside the senders' own queues.
    Without `pairs` it takes nothing over torch.distributed and does not load torch."""

    _what = "the inbox"

    def __init__(
        self, place: str = "ipc:", *, max_parcels: int = 1000, keys: Keys | None = None, pairs: PairReceiver | None = None
    ) -> None:
        Endpoint.__init__(self, keys)
        Inbox.__init__(self)
        self._pairs = pairs
        self._place = place
        self._max_parcels = max_parcels
        self._pending: DecodeError | None = None
        self._borrower = Borrower()
        self._arenas: dict[str, set[str]] = {}
        """Sender -> the shared-memory arenas that it lent from."""
        self._groups: dict[str, set[str]] = {}
        """Sender -> its pairs with us."""
        self._connections = Connections()
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
            self._connections.ended(self._ended_connections())  # First, so that what came on them before is here too.
            self._take(socket, parcels)
            if parcels or self._pending is not None:
                return parcels
            self._raise_ends()
            start = time.monotonic()
            if start >= deadline:
                return parcels
            wait([self], min(deadline - start, _RECHECK_S) if self._connections.are_suspect else deadline - start)
            self.waited_s += time.monotonic() - start

    def _take(self, socket: Socket, parcels: list[Parcel]) -> None:
        """Append parcels that are here. There may be none though the socket is readable: a refused peer makes it so, too."""
        num_bytes = num_messages = 0
        while len(parcels) < MAX_MESSAGES_AT_ONCE and num_bytes < _MAX_BYTES_AT_ONCE:
            frames, connection = _receive_frames(socket, are_many=num_messages >= _MANY)
            num_messages += 1
            if not frames:
                return
            try:
                parcel, size = self._read(frames, connection)
            except DecodeError as error:
                if not parcels:
                    raise
                self._pending = error  # The good ones before it go first.
                return
            if parcel is not None:
                parcels.append(parcel)
                num_bytes += size

    def _read(self, frames: list[bytes | memoryview], connection: int) -> tuple[Parcel | None, int]:
        """Decode a message: its parcel (None if it carries none) and its size in bytes."""
        if len(frames) > MAX_FRAMES:
            raise DecodeError(f"a message of more than {MAX_FRAMES:,} frames")
        if connection == _UNKNOWN:
            raise DecodeError(f"a message of {num_frame_bytes(frames):,} bytes from a peer that speaks a protocol older than ZeroMQ 3")
        first = frames[0]
        kind = first[:3] if type(first) is bytes else bytes(first[:3])
        if kind == END:
            self._ended(frames)
            return None, 0
        num_bytes = len(first) if len(frames) == 1 else num_frame_bytes(frames)
        if kind == _LOAN:
            loan = _loan_of(frames[0])
            try:
                shared = self._borrower.borrow(loan)
            except BrokenChannel:
                return None, 0  # It died with this on its way; the end of its connection will tell.
            parcel = decode([*frames[1:], *shared])
            self._arenas.setdefault(parcel.sender, set()).add(loan.arena)
            num_aside = num_shared = sum(loan.sizes)
        elif kind == _PAIR_TRANSFER:
            found = self._receive_over_pair(frames, connection)
            if found is None:
                return None, 0
            parcel, num_aside, num_shared = *found, 0
        else:
            parcel, num_aside, num_shared = decode(frames), 0, 0
        statistics = self._counted(parcel.sender)
        statistics.add(len(parcel.batch), num_bytes + num_aside)
        statistics.num_shared_bytes += num_shared
        statistics.num_pair_bytes += num_aside - num_shared
        if self._connections.sender_on(connection) != parcel.sender or parcel.sender not in self._open_senders:
            self._connections.heard(connection, parcel.sender)
            self._open_senders.add(parcel.sender)
            self._ended_senders.discard(parcel.sender)
            self._gone_senders.discard(parcel.sender)
        return parcel, num_bytes + num_aside

    def _receive_over_pair(self, frames: Sequence[bytes | memoryview], connection: int) -> tuple[Parcel, int] | None:
        """Receive a parcel and the number of its bytes that came over the pair. None: its sender died, its connection's end is reported."""
        transfer, inode = _pair_transfer_of(frames[0]), inode_of(connection)
        if self._pairs is None:
            raise DecodeError("columns over torch.distributed, which this inbox does not take")
        try:
            parcel = decode([*frames[1:], *self._pairs.receive(transfer)])
        except BrokenChannel as error:
            deadline = time.monotonic() + _DEATH_GRACE_S
            while inode >= 0 and inode_of(connection) == inode:
                if time.monotonic() > deadline:
                    raise ChannelError(f"columns of a parcel did not arrive, and their sender is alive: {error.what}") from None
                time.sleep(_INBOX_POLL_S)
            return None
        self._groups.setdefault(parcel.sender, set()).add(transfer.group)
        return parcel, sum(transfer.sizes)

    def _ended(self, frames: Sequence[bytes | memoryview]) -> None:
        try:
            sender = bytes(frames[0][len(END) :]).decode()
        except UnicodeDecodeError:
            raise DecodeError("the end of a channel whose sender's name is no text") from None
        if len(frames) != 1 or len(sender) > _MAX_NAME_BYTES:
            raise DecodeError("what follows the end of a channel")
        if sender in self._open_senders:
            self._open_senders.discard(sender)
            self._ended_senders.add(sender)
            self._forget_sender(sender)

    def _raise_ends(self) -> None:
        """When nothing is left to return: raise for one sender that went away without ending its channel, or if all have ended."""
        while (sender := self._connections.next_gone()) is not None:
            if sender in self._open_senders:
                self._open_senders.discard(sender)
                self._gone_senders.add(sender)
                self._forget_sender(sender)
                raise BrokenChannel(
                    f"{sender} is gone, and had not ended its channel", now="Its worker has died, or was cut off; see its log."
                )
        if self._ended_senders and not self._open_senders and not self._gone_senders:
            raise EndOfStream("all that sent to this inbox have ended")

    def _forget_sender(self, sender: str) -> None:
        for arena in self._arenas.pop(sender, ()):
            self._borrower.forget(arena)
        for group in self._groups.pop(sender, ()):
            assert self._pairs is not None
            self._pairs.forget(group)

    def close(self) -> None:
        self._release(0.0)
        self._borrower.close()
        if self._pairs is not None:
            self._pairs.close()

    def _has_pending(self) -> bool:
        return self._pending is not None


class ZmqOutbox(Outbox):
    """Send to inboxes by address.

    Each peer has a queue of `max_parcels` here, beside the inbox's own; when both are full, `send` waits up to `timeout_s`. With
    an arena, large columns go to the peers for which the plan says so (`prefer`) in shared memory; where the arena is full, they
    are sent like the rest, and counted. With pairs they go over torch.distributed where the plan says that.
    """

    def __init__(
        self,
        name: str = "",
        *,
        max_parcels: int = 1000,
        timeout_s: float = 60.0,
        keys: Keys | None = None,
        arena: Arena | None = None,
        pairs: PairSender | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        self._max_parcels = max_parcels
        self._timeout_s = timeout_s
        self._keys = keys
        self._arena = arena
        self._pairs = pairs
        self._peers: dict[str, Peer] = {}
        self._ways: dict[str, str] = {}
        """Address -> the transport of large columns to it beside the socket."""
        self._is_closed = False
        self._is_registered = False

    def prefer(self, address: str, transport: str) -> None:
        can = {SHARED_MEMORY: self._arena, **dict.fromkeys(PAIRS, self._pairs)}
        if can.get(transport) is not None:
            self._ways[address] = transport
        else:
            self._ways.pop(address, None)

    def send(self, address: str, parcel: Parcel) -> None:
        if self._is_closed:
            raise ChannelClosed(f"the outbox {self._name} is closed")
        frames = encode(parcel)
        peer = self._peers.get(address) or self._new_peer(address)
        statistics = self._counted(address)
        way = self._ways.get(address) if len(frames) > 1 else None
        if way in PAIRS:
            self._send_over_pair(frames, peer, PAIRS[way], statistics)
        elif way is None or not self._send_loan(frames, peer, statistics):
            peer.send(frames if len(frames) == 1 else cut(frames), self._timeout_s, statistics)
        peer.senders.add(parcel.sender)
        statistics.add(len(parcel.batch), num_frame_bytes(frames))

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
        if self._pairs is not None:
            self._pairs.forget(address)

    def close(self, *, drain_s: float = 0.0) -> None:
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close)
        deadline = time.monotonic() + drain_s
        for peer in self._peers.values():
            peer.end_now()
        if self._pairs is not None:
            self._pairs.close(deadline)
        for peer in self._peers.values():
            peer.close(max(deadline - time.monotonic(), 0.0))
        self._peers.clear()
        if self._arena is not None:
            self._wait_for_loans(deadline)
            self._arena.close()

    def _send_loan(self, frames: list[bytes | memoryview], peer: Peer, statistics: Statistics) -> bool:
        """Send a parcel with its large columns in shared memory. False: the arena is full, and nothing was sent."""
        arena = self._arena
        assert arena is not None
        self._wait_for_room(arena, peer, statistics)
        loan = arena.lend([memoryview(frame) for frame in frames[1:]], peer.address)
        if loan is None:
            statistics.num_unshared += 1
            return False
        try:
            peer.send([_LOAN + _encoder.encode(loan), frames[0]], self._timeout_s, statistics)
        except BaseException:
            arena.take_back(loan)
            raise
        statistics.num_shared_bytes += sum(loan.sizes)
        return True

    def _send_over_pair(self, frames: list[bytes | memoryview], peer: Peer, backend: Backend, statistics: Statistics) -> None:
        pairs = self._pairs
        assert pairs is not None
        self._wait_for_room(pairs, peer, statistics)
        if pairs.is_broken(peer.address):
            raise peer.is_gone()
        large = [memoryview(frame) for frame in cut(frames)[1:]]
        transfer = pairs.announce(large, peer.address, backend)
        peer.send([_PAIR_TRANSFER + _encoder.encode(transfer), frames[0]], self._timeout_s, statistics)
        pairs.send(large, peer.address)  # Not before: a head that could not leave is sent again, and what follows it must follow once.
        statistics.num_pair_bytes += sum(transfer.sizes)

    def _wait_for_room(self, carrier: Arena | PairSender, peer: Peer, statistics: Statistics) -> None:
        """Apply the queue's bound to columns in transit beside the socket, whose head frames are too small to fill a queue."""
        deadline = time.monotonic() + self._timeout_s
        while self._max_parcels and carrier.num_on_their_way(peer.address) >= self._max_parcels:
            start = time.monotonic()
            peer.require_alive()
            if start >= deadline:
                raise peer.took_nothing(self._timeout_s)
            time.sleep(_INBOX_POLL_S)
            statistics.wait_s += time.monotonic() - start

    def _wait_for_loans(self, deadline: float) -> None:
        """Wait until peers have received all loans: a buffer must exist when its loan arrives."""
        assert self._arena is not None
        while self._arena.num_on_their_way() and time.monotonic() < deadline:
            time.sleep(_INBOX_POLL_S)

    def _new_peer(self, address: str) -> Peer:
        if not self._is_registered:
            # Uncopied frames are Python's memory; pyzmq lets go of it at exit though ZeroMQ's thread may still be sending it, and the
            # process would die of that. What is registered last is called first, so pyzmq's own hook must be there already.
            importlib.import_module("zmq.utils.garbage")
            atexit.register(self.close)
            self._is_registered = True
        peer = self._peers[address] = Peer(self._keys)
        peer.open(address, self._max_parcels)
        return peer


def _receive_frames(socket: Socket, *, are_many: bool = False) -> tuple[list[bytes | memoryview], int]:
    """The frames of the next message, or none, and its connection. Small frames are copied, since in ZeroMQ's own buffer they
    may lie at any address. Of a message with too many, one frame beyond the bound is kept. `are_many`: it does not ask first whether one
    has come, which takes a call of the system."""
    if not are_many and not has_come(socket):
        return [], _UNKNOWN
    try:
        received = socket.recv(NOBLOCK, copy=False)
    except zmq.Again:  # Whoever is turned away makes a socket readable, too.
        return [], _UNKNOWN
    connection = _connection_of(received)
    frames = [received.bytes if len(received) < RECEIVE_COPY_BELOW_BYTES else received.buffer]
    while received.more:
        received = socket.recv(NOBLOCK, copy=False)  # A message is here as a whole, or not at all.
        if len(frames) <= MAX_FRAMES:
            frames.append(received.bytes if len(received) < RECEIVE_COPY_BELOW_BYTES else received.buffer)
    return frames, connection


def _connection_of(received: zmq.Frame) -> int:
    try:
        connection = received.get(_SRCFD)
    except zmq.ZMQError:
        return _UNKNOWN
    return connection if isinstance(connection, int) else _UNKNOWN


def _loan_of(frame: bytes | memoryview) -> Loan:
    return _note_of(frame, _loan_decoder)


def _pair_transfer_of(frame: bytes | memoryview) -> PairTransfer:
    return _note_of(frame, _pair_transfer_decoder)


def _note_of(frame: bytes | memoryview, decoder: msgspec.msgpack.Decoder[Note]) -> Note:
    try:
        return decoder.decode(frame[len(_LOAN) :])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"a message that should say where its columns lie is broken: {error}") from None
