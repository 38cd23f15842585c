"""Parcels and control messages between processes, over ZeroMQ. The only file that imports it.

    ZmqOutbox  --PUSH-->          PULL  ZmqInbox         parcels, worker to worker
    LinkDialer --DEALER-->      ROUTER  LinkListener     opaque messages, worker and controller

Sockets bind to the loopback interface or in a private directory (`m2flow.channels.places`); to another interface only with a key,
and then all that passes is encrypted, and a peer that has not the same key is told nothing and heard by nobody (CURVE). Without a key,
on TCP every user of the host can reach an inbox; the link takes a peer only with the run's token.

One thread uses one object; each has a context of its own, so closing one waits for nothing of another's. A peer that dies takes
with it what lay in its queues: finding that out and sending again is the scheduler's part.
"""

from __future__ import annotations

import atexit
import errno
import hmac
import importlib
import logging
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import zmq
from zmq.auth.thread import ThreadAuthenticator

from m2flow.channels.codec import decode, encode, num_frame_bytes
from m2flow.channels.contract import Inbox, Outbox, Parcel, Statistics
from m2flow.channels.keys import Keys
from m2flow.channels.places import address_of, is_private, private_directory
from m2flow.errors import BrokenChannel, ChannelClosed, ChannelError, DecodeError, PortInUse, SpecError

COPY_BELOW_BYTES = 64 * 1024
"""Below this, handing a frame to ZeroMQ without a copy costs more than the copy."""

MAX_FRAME_BYTES = 4 << 30
_MAX_MESSAGES_AT_ONCE = 1024
"""So that `receive` returns even if senders never pause."""
_HELLO = b"m2flow-hello-1"

_Socket: TypeAlias = "zmq.Socket[bytes]"


class _Endpoint:
    """A socket with its context and the files it needs: opened once, closed once."""

    _what: str

    def __init__(self, keys: Keys | None = None) -> None:
        self._context: zmq.Context[_Socket] | None = None
        self._socket: _Socket | None = None
        self._is_closed = False
        self._remove_directory: Callable[[], object] | None = None
        self._keys = keys
        self._guard: ThreadAuthenticator | None = None

    def _create(self, kind: int, max_messages: int, *, listens: bool = False) -> _Socket:
        if self._is_closed or self._socket is not None:
            raise ChannelClosed(f"{self._what} is opened once")
        self._context = zmq.Context()
        if self._keys is not None and listens:
            self._guard = ThreadAuthenticator(self._context, log=_silent())
            self._guard.start()
            self._guard.configure_curve_callback(credentials_provider=_Holders(self._keys))
        self._socket = self._context.socket(kind)
        if self._keys is not None:
            self._socket.curve_publickey = self._keys.public.encode()
            self._socket.curve_secretkey = self._keys.secret.encode()
            if listens:
                self._socket.curve_server = True
            else:
                self._socket.curve_serverkey = self._keys.public.encode()
        # Zero until `close` says otherwise, so that a process that fails never hangs at its exit.
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = max_messages
        self._socket.maxmsgsize = MAX_FRAME_BYTES
        return self._socket

    def _opened(self) -> _Socket:
        if self._socket is None or self._is_closed:
            raise ChannelClosed(f"{self._what} is {'closed' if self._is_closed else 'not open'}")
        return self._socket

    def _has_pending(self) -> bool:
        return False

    def _bind(self, kind: int, max_messages: int, place: str) -> str:
        if place == "ipc:":
            directory = private_directory()
            self._remove_directory = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
            place += directory
        address = address_of(place)
        if self._keys is None and not is_private(address):
            raise SpecError(
                f"{place} can be reached from other hosts, and there is no key",
                now="Make one with `m2flow keys FILE`, and name it in the cluster spec: channels: {keys: FILE}",
            )
        socket = self._create(kind, max_messages, listens=True)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._release(0.0)
            if error.errno == errno.EADDRINUSE:
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                raise PortInUse(
                    f"port {port} of {host} is taken by another program",
                    now=f"Find it with `ss -ltnp 'sport = :{port}'` and stop it, or give no port to get one that is free.",
                ) from None
            raise SpecError(f"can't listen at {address}: {error}") from None
        # Still with the NUL of the C string.
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def _release(self, drain_s: float) -> None:
        """Close the socket and wait until what was sent has left, or the time is over."""
        self._is_closed = True
        if self._socket is not None and self._context is not None:
            self._socket.close(linger=int(drain_s * 1000))
            if self._guard is not None:
                self._guard.stop()
            self._context.term()
            self._socket = self._context = None
        if self._remove_directory is not None:
            self._remove_directory()


class ZmqInbox(_Endpoint, Inbox):
    """An inbox at a place of this host. `max_parcels` of each sender wait in it, 0: as many as come; the senders' queues come on top."""

    _what = "the inbox"

    def __init__(self, place: str = "ipc:", *, max_parcels: int = 1000, keys: Keys | None = None) -> None:
        super().__init__(keys)
        self.statistics = Statistics()
        self._place = place
        self._max_parcels = max_parcels
        self._pending: DecodeError | None = None

    def open(self) -> str:
        return self._bind(zmq.PULL, self._max_parcels, self._place)

    def receive(self, timeout_s: float) -> list[Parcel]:
        socket = self._opened()
        if self._pending is not None:
            error, self._pending = self._pending, None
            raise error
        parcels: list[Parcel] = []
        deadline = time.monotonic() + timeout_s
        while not parcels and self._pending is None and _is_readable(socket, max(deadline - time.monotonic(), 0.0), self.statistics):
            self._take(socket, parcels)
        return parcels

    def _take(self, socket: _Socket, parcels: list[Parcel]) -> None:
        """Add what is here. That may be nothing though the socket is readable: a peer that is turned away makes it so."""
        while len(parcels) < _MAX_MESSAGES_AT_ONCE and (frames := _receive_parcel_frames(socket)):
            try:
                parcels.append(decode(frames))
            except DecodeError as error:
                if not parcels:
                    raise
                self._pending = error  # The good ones before it go first.
                break
            self.statistics.num_parcels += 1
            self.statistics.num_samples += len(parcels[-1].batch)
            self.statistics.num_bytes += num_frame_bytes(frames)

    def close(self) -> None:
        self._release(0.0)

    def _has_pending(self) -> bool:
        return self._pending is not None


class ZmqOutbox(Outbox):
    """Sends to inboxes by address.

    Each peer has a queue of `max_parcels` here, beside the inbox's own; when both are full, `send` waits up to `timeout_s`. Two
    workers that send to each other from the thread that also receives must keep less in flight, or they wait for each other.
    """

    def __init__(self, name: str = "", *, max_parcels: int = 1000, timeout_s: float = 60.0, keys: Keys | None = None) -> None:
        self.statistics = Statistics()
        self._name = name
        self._max_parcels = max_parcels
        self._timeout_s = timeout_s
        self._keys = keys
        self._peers: dict[str, _Peer] = {}
        self._is_closed = False

    def send(self, address: str, parcel: Parcel) -> None:
        if self._is_closed:
            raise ChannelClosed(f"the outbox {self._name} is closed")
        frames = encode(parcel)
        if any(len(frame) > MAX_FRAME_BYTES for frame in frames):
            raise ChannelError(f"a column of call {parcel.call} has more than {MAX_FRAME_BYTES >> 30} GiB", now="Use smaller chunks.")
        peer = self._peers.get(address)
        if peer is None:
            if not self._peers:
                # Uncopied frames are Python's memory; pyzmq lets go of it at exit though ZeroMQ's thread may still be sending it, and the
                # process would die of that. What is registered last is called first, so pyzmq's own hook must be there already.
                importlib.import_module("zmq.utils.garbage")
                atexit.register(self.close)
            peer = self._peers[address] = _Peer(self._keys)
            peer.open(address, self._max_parcels)
        peer.send(frames, self._timeout_s, self.statistics)
        self.statistics.num_parcels += 1
        self.statistics.num_samples += len(parcel.batch)
        self.statistics.num_bytes += num_frame_bytes(frames)

    def close(self, *, drain_s: float = 0.0) -> None:
        self._is_closed = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + drain_s
        for peer in self._peers.values():
            peer.close(max(deadline - time.monotonic(), 0.0))
        self._peers.clear()


class _Peer(_Endpoint):
    """The way to one inbox."""

    _what = "the way to an inbox"

    def open(self, address: str, max_parcels: int) -> None:
        self._address = address
        socket = self._create(zmq.PUSH, max_parcels)
        # Queue only for a peer that is there: what is queued for one that never comes would be lost without a word.
        socket.immediate = True
        _connect(socket, address)

    def send(self, frames: Sequence[bytes | memoryview], timeout_s: float, statistics: Statistics) -> None:
        socket = self._opened()
        deadline: float | None = None
        while True:
            try:
                for frame in frames[:-1]:
                    socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE, copy=len(frame) < COPY_BELOW_BYTES)
                socket.send(frames[-1], zmq.NOBLOCK, copy=len(frames[-1]) < COPY_BELOW_BYTES)
                return
            except zmq.Again:  # ZeroMQ has rolled back the frames that went before: the whole message goes again.
                start = time.monotonic()
                deadline = start + timeout_s if deadline is None else deadline
                is_writable = socket.poll(_milliseconds(deadline - start), zmq.POLLOUT)
                statistics.wait_s += time.monotonic() - start
                if not is_writable:
                    raise BrokenChannel(
                        f"{self._address} took nothing for {timeout_s:g} s",
                        now="Its worker is gone, or too slow for what it is sent; see its log.",
                    ) from None

    def close(self, drain_s: float) -> None:
        self._release(drain_s)


class LinkListener(_Endpoint):
    """The controller's side of the control link.

    A peer is taken in once it has said hello with the token; its name is then its own until `forget`. Whatever else comes is
    dropped and counted in `num_dropped`. The address of a peer on the socket is a random number that the peer chose, so another
    one can't take its place.
    """

    _what = "the control link"

    def __init__(
        self, token: str, place: str = "ipc:", *, max_messages: int = 100_000, timeout_s: float = 10.0, keys: Keys | None = None
    ) -> None:
        super().__init__(keys)
        self.num_dropped = 0
        self._token = token.encode()
        self._place = place
        self._max_messages = max_messages
        self._timeout_s = timeout_s
        self._names: dict[bytes, str] = {}
        self._routes: dict[str, bytes] = {}

    def open(self) -> str:
        """Start to listen; returns the address for `LinkDialer.open`. Raises `PortInUse`."""
        if not self._token:
            raise ChannelError("a control link needs a token")
        address = self._bind(zmq.ROUTER, self._max_messages, self._place)
        socket = self._opened()
        socket.router_handover = False
        socket.router_mandatory = True
        socket.sndtimeo = _milliseconds(self._timeout_s)
        return address

    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """What has come, as (peer, message), or, if there is nothing, what comes first in `timeout_s`. In each peer's order."""
        socket = self._opened()
        deadline = time.monotonic() + timeout_s
        messages: list[tuple[str, bytes]] = []
        while not messages and _is_readable(socket, max(deadline - time.monotonic(), 0.0)):
            for _ in range(_MAX_MESSAGES_AT_ONCE):
                try:
                    route, *frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if route in self._names and len(frames) == 1:
                    messages.append((self._names[route], frames[0]))
                elif not self._takes_in(route, frames):
                    self.num_dropped += 1
        return messages

    def send(self, peer: str, message: bytes) -> None:
        """Raises `BrokenChannel`: no such peer, it is gone, or it took nothing for `timeout_s`."""
        socket = self._opened()
        if peer not in self._routes:
            raise BrokenChannel(f"no peer {peer!r} is on the control link; there are {', '.join(sorted(self._routes)) or 'none'}")
        try:
            socket.send_multipart([self._routes[peer], message])
        except zmq.Again:
            raise BrokenChannel(f"{peer} took nothing from the control link for {self._timeout_s:g} s") from None
        except zmq.ZMQError as error:
            raise BrokenChannel(f"{peer} is gone from the control link ({error})") from None

    def forget(self, peer: str) -> None:
        """Give a peer's name free, for the process that replaces it."""
        self._names.pop(self._routes.pop(peer, b""), None)

    def close(self, *, drain_s: float = 0.0) -> None:
        """Close, waiting up to `drain_s` for what was sent to leave. May be called twice."""
        self._release(drain_s)

    def _takes_in(self, route: bytes, frames: list[bytes]) -> bool:
        if len(frames) != 3 or frames[0] != _HELLO or not hmac.compare_digest(frames[2], self._token):
            return False
        name = frames[1].decode("utf-8", "replace")
        if name in self._routes or route in self._names:
            return False
        self._names[route] = name
        self._routes[name] = route
        return True


class LinkDialer(_Endpoint):
    """A worker's side of the control link."""

    _what = "the control link"

    def __init__(self, *, max_messages: int = 100_000, timeout_s: float = 10.0, keys: Keys | None = None) -> None:
        super().__init__(keys)
        self._max_messages = max_messages
        self._timeout_s = timeout_s

    def open(self, address: str, name: str, token: str) -> None:
        """Say hello to the listener. Does not wait for it: a wrong token shows as silence, so nobody can probe for the right one."""
        socket = self._create(zmq.DEALER, self._max_messages)
        self._address = address
        socket.routing_id = b"\1" + secrets.token_bytes(15)
        socket.sndtimeo = _milliseconds(self._timeout_s)
        _connect(socket, address)
        socket.send_multipart([_HELLO, name.encode(), token.encode()])

    def receive(self, timeout_s: float) -> list[bytes]:
        """The messages that have come, in order, or, if there are none, what comes first in `timeout_s`."""
        socket = self._opened()
        messages: list[bytes] = []
        deadline = time.monotonic() + timeout_s
        while not messages and _is_readable(socket, max(deadline - time.monotonic(), 0.0)):
            while len(messages) < _MAX_MESSAGES_AT_ONCE:
                try:
                    messages.append(b"".join(socket.recv_multipart(zmq.NOBLOCK)))
                except zmq.Again:
                    break
        return messages

    def send(self, message: bytes) -> None:
        """Raises `BrokenChannel`: the controller took nothing for `timeout_s`."""
        try:
            self._opened().send(message)
        except zmq.Again:
            raise BrokenChannel(f"the controller at {self._address} took nothing for {self._timeout_s:g} s") from None

    def close(self, *, drain_s: float = 0.0) -> None:
        """Close, waiting up to `drain_s` for what was sent to leave. May be called twice."""
        self._release(drain_s)


def wait(readables: Sequence[ZmqInbox | LinkDialer | LinkListener], timeout_s: float) -> None:
    """Until one of these has something to receive, or the time is over."""
    poller = zmq.Poller()
    for readable in readables:
        poller.register(readable._opened(), zmq.POLLIN)
    poller.poll(0 if any(readable._has_pending() for readable in readables) else _milliseconds(timeout_s))


def new_keys() -> Keys:
    """A key that nobody has yet."""
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


class _Holders:
    """Takes in those who hold the cluster's key."""

    def __init__(self, keys: Keys) -> None:
        self._public = keys.public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


def _silent() -> logging.Logger:
    """Who is turned away is nobody's error: strangers must not be able to fill a log."""
    log = logging.getLogger("m2flow.channels.guard")
    log.setLevel(logging.CRITICAL)
    return log


def _connect(socket: _Socket, address: str) -> None:
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise BrokenChannel(f"{address!r} is no address to connect to: {error}") from None


def _is_readable(socket: _Socket, timeout_s: float, statistics: Statistics | None = None) -> bool:
    if timeout_s <= 0 or socket.poll(0):
        return bool(socket.poll(0))
    start = time.monotonic()
    is_readable = bool(socket.poll(_milliseconds(timeout_s)))
    if statistics is not None:
        statistics.wait_s += time.monotonic() - start
    return is_readable


def _receive_parcel_frames(socket: _Socket) -> list[bytes | memoryview]:
    """The frames of the next message, or none. Small ones are copied: in ZeroMQ's own buffer they lie at any address."""
    frames: list[bytes | memoryview] = []
    try:
        for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False):
            frames.append(frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer)
    except zmq.Again:
        pass
    return frames


def _milliseconds(duration_s: float) -> int:
    # Rounded up: a wait of half a millisecond must not become a spin.
    return max(int(duration_s * 1000 + 0.999), 0)
