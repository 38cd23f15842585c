"""ZeroMQ sockets: where they may listen, who may talk to them, the control link on them, and a worker's heartbeats.

    LinkDialer (worker) --DEALER-->  ROUTER LinkListener (controller)

A place is written `ipc:DIRECTORY` (one that only its owner can enter), `ipc:` (a new one), `tcp` (a free port of loopback), `tcp:PORT`,
`tcp:ADDRESS` or `tcp:ADDRESS:PORT`, where the address is an IPv4 address of this host.

    m2flow keys FILE --write_keys--> FILE --read_keys--> Keys --> sockets

All hosts and processes of a cluster share one key pair: each proves by it that it belongs, as listener and as caller. The file is readable
by its owner alone, and must be copied to other hosts in a way that keeps it so (`scp -p`).

Parcels go over the same kind of sockets (`m2flow.channels.parcels`).

Sockets bind to the loopback interface or in a private directory. They bind to another interface only with a key: all traffic is then
encrypted, and a peer without the key is neither answered nor heard (CURVE). On loopback a run without a key has a secret of its own
(PLAIN): ZeroMQ reads a whole message, however many frames it has, before anybody can look at it, so who may send at all has to be settled
before. Without either, every user of the host can reach an inbox that listens on TCP.

An object belongs to one thread, and has a ZeroMQ context of its own, so closing it waits for no other.

Source:
    CurveZMQ, rfc.zeromq.org/spec/26: elliptic-curve keys, perfect forward secrecy. Keys are written in Z85 (spec 32).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from m2flow.channels.channel import Dropped
from m2flow.errors import BrokenChannel, ChannelClosed, ChannelError, PortInUse, SpecError

# ---- keys


_HEAD = "m2flow key 1"
_LENGTH = 40
_ALPHABET = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")


class Keys(msgspec.Struct, frozen=True):
    """A CURVE key pair, 40 characters of Z85 each; or, with `encrypts=False`, a shared secret that authenticates and encrypts nothing."""

    public: str
    secret: str
    encrypts: bool = True

    def __repr__(self) -> str:
        return f"Keys({self.public!r}, secret)"


def write_keys(path: Path, keys: Keys) -> None:
    """Write a key pair to a new file that only its owner can read.

    Raises:
        SpecError: there is one already, or it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{_HEAD}\npublic {keys.public}\nsecret {keys.secret}\n")
    except FileExistsError:
        raise SpecError(f"{path} exists already", now="Its holders could not talk to holders of a new key. Remove it first.") from None
    except OSError as error:
        raise SpecError(
            f"can't write the key {path}: {error.strerror}",
            now="Give the run a directory that you may write to (--runs-dir), or free space there.",
        ) from None


def read_keys(path: Path) -> Keys:
    """Read a key file that `write_keys` wrote.

    Raises:
        SpecError: it can't be read, others than its owner can read it, or it is no key.
    """
    now = f"Make one with `m2flow keys {path}`."
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid != os.getuid():
                raise SpecError(f"others than you can read the key {path}, or it is not yours", now=f"chmod 600 {path}")
            lines = file.read(4096).splitlines()
    except OSError as error:
        raise SpecError(f"can't read the key {path}: {error.strerror}", now=now) from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is no key of m2flow", now=now) from None
    found = dict(line.split(" ", 1) for line in lines[1:] if " " in line)
    parts = [found.get(name, "") for name in ("public", "secret")]
    if lines[:1] != [_HEAD] or any(len(part) != _LENGTH or not _ALPHABET.issuperset(part) for part in parts):
        raise SpecError(f"{path} is no key of m2flow", now=now)
    return Keys(parts[0], parts[1])


# ---- places to listen at

_LOOPBACK = "127.0.0.1"
MAX_IPC_PATH_BYTES = 106
"""`sun_path` holds 108 bytes on Linux with its final zero; libzmq and other systems leave a little less."""


def address_of(place: str) -> str:
    """Return the ZeroMQ address to bind for a place; an `ipc` address is new each time. Raises `SpecError`.

    >>> address_of("tcp"), address_of("tcp:5555"), address_of("tcp:10.0.0.7")
    ('tcp://127.0.0.1:*', 'tcp://127.0.0.1:5555', 'tcp://10.0.0.7:*')
    """
    transport, _, rest = place.partition(":")
    if transport == "tcp":
        host, _, port = rest.rpartition(":")
        if "." in port:
            host, port = port, ""
        if _is_address(host or _LOOPBACK) and (not port or (port.isdecimal() and int(port) < 65536)):
            return f"tcp://{host or _LOOPBACK}:{port or '*'}"
    if transport != "ipc" or not rest:
        raise SpecError(f"{place!r} is no place to listen at", now="Write ipc:DIRECTORY, tcp, tcp:PORT, tcp:ADDRESS or tcp:ADDRESS:PORT.")
    path = os.path.join(rest, secrets.token_hex(6))
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise SpecError(
            f"the socket path {path} is longer than {MAX_IPC_PATH_BYTES} bytes, which the system can't bind",
            now="Name a directory with a shorter path, or use tcp.",
        )
    _require_private(rest)
    return f"ipc://{path}"


def is_private(address: str) -> bool:
    """Whether only this host can reach a ZeroMQ address."""
    if address.startswith("ipc://"):
        return True
    return ipaddress.IPv4Address(address.removeprefix("tcp://").rpartition(":")[0]).is_loopback


def _is_address(host: str) -> bool:
    """Whether it is an address to connect to: not a host name, which may mean several, and not the wildcard."""
    try:
        return not ipaddress.IPv4Address(host).is_unspecified
    except ValueError:
        return False


def private_directory() -> str:
    """Create a directory that only this user can enter, its path short enough for sockets. The caller removes it."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="m2flow-", dir=parent if len(os.fsencode(parent)) <= MAX_IPC_PATH_BYTES - 32 else "/tmp")


def _require_private(directory: str) -> None:
    try:
        status = os.lstat(directory)
    except OSError as error:
        # It is not made here: a directory of a run that is over would come back, and nobody would remove it.
        raise SpecError(f"can't listen in {directory}: {error.strerror}", now="Make it with `mkdir -m 700`, or name another.") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SpecError(
            f"{directory} is not a directory that only you can enter, so others could reach the sockets in it",
            now=f"Run `chmod 700 {directory}`, or name another.",
        )


# ---- sockets


MAX_MESSAGE_BYTES = 1 << 30
"""Bytes of a message of the control link. A peer that announces a longer one is disconnected before memory is allocated for it."""
MAX_MESSAGES_AT_ONCE = 1024
"""Bounds `receive`, which must return even if senders never pause."""
_HELLO = b"m2flow-hello-1"
_HOLDER = "m2flow"
"""The user name of ZeroMQ's PLAIN mechanism, which goes with a secret that does not encrypt."""
_HELLO_FRAMES = 4
"""Frames of a hello, the route included."""
_EVENTS, _POLLIN, _RCVMORE, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE), int(zmq.NOBLOCK)
"""As numbers: a member of an enumeration takes a microsecond each time."""

Socket: TypeAlias = "zmq.Socket[bytes]"


class Endpoint:
    """A socket with its context and its directory: opened once, closed once."""

    _what: str

    def __init__(self, keys: Keys | None = None) -> None:
        self._context: zmq.Context[Socket] | None = None
        self._socket: Socket | None = None
        self._is_closed = False
        self._remove_directory: Callable[[], object] | None = None
        self._keys = keys
        self._guard: ThreadAuthenticator | None = None
        self._monitor: Socket | None = None

    @property
    def is_open(self) -> bool:
        return self._socket is not None and not self._is_closed

    def _create(self, kind: int, max_messages: int, *, listens: bool = False, most_bytes: int = MAX_MESSAGE_BYTES) -> Socket:
        if self._is_closed or self._socket is not None:
            raise ChannelClosed(f"{self._what} is opened once")
        self._context = zmq.Context()
        if self._keys is not None and listens:
            self._guard = ThreadAuthenticator(self._context, log=_silenced_logger())
            self._guard.start()
            if self._keys.encrypts:
                self._guard.configure_curve_callback(credentials_provider=_KeyHolders(self._keys))
            else:
                self._guard.configure_plain(passwords={_HOLDER: self._keys.secret})
        self._socket = self._context.socket(kind)
        if self._keys is not None and not self._keys.encrypts:
            if listens:
                self._socket.plain_server = True
            else:
                self._socket.plain_username, self._socket.plain_password = _HOLDER.encode(), self._keys.secret.encode()
        elif self._keys is not None:
            self._socket.curve_publickey = self._keys.public.encode()
            self._socket.curve_secretkey = self._keys.secret.encode()
            if listens:
                self._socket.curve_server = True
            else:
                self._socket.curve_serverkey = self._keys.public.encode()
        # Zero until `close` says otherwise, so that a process that fails never hangs at its exit.
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = max_messages
        self._socket.maxmsgsize = most_bytes
        return self._socket

    def _opened(self) -> Socket:
        if self._socket is None or self._is_closed:
            raise ChannelClosed(f"{self._what} is {'closed' if self._is_closed else 'not open'}")
        return self._socket

    def _has_pending(self) -> bool:
        return False

    def _watch(self) -> None:
        """Start the monitor that reports which connections have ended (`_ended_connections`)."""
        self._monitor = self._opened().get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def _ended_connections(self) -> list[int]:
        """The file descriptors of connections that have ended since the last call. They may be in use again by now."""
        ended = []
        while self._monitor is not None and has_come(self._monitor):
            ended.append(int(parse_monitor_message(self._monitor.recv_multipart())["value"]))
        return ended

    def _bind(self, kind: int, max_messages: int, place: str, most_bytes: int = MAX_MESSAGE_BYTES) -> str:
        if place == "ipc:":
            directory = private_directory()
            self._remove_directory = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
            place += directory
        address = address_of(place)
        if (self._keys is None or not self._keys.encrypts) and not is_private(address):
            raise SpecError(
                f"{place} can be reached from other hosts, and there is no key",
                now="Make one with `m2flow keys FILE`, and name it in the cluster spec: channels: {keys: FILE}",
            )
        socket = self._create(kind, max_messages, listens=True, most_bytes=most_bytes)
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
            is_elsewhere = error.errno == errno.EADDRNOTAVAIL
            raise SpecError(
                f"can't listen at {address}: {zmq.strerror(error.errno or 0)}",
                now="It must be an address of this host (`ip addr` lists them): channels: {host: ...}." if is_elsewhere else "",
            ) from None
        # Still with the NUL of the C string.
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def _release(self, drain_s: float) -> None:
        """Close the socket and wait until what was sent has left, or the time is over."""
        self._is_closed = True
        if self._socket is not None and self._context is not None:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
                self._monitor = None
            self._socket.close(linger=int(drain_s * 1000))
            if self._guard is not None:
                self._guard.stop()
            self._context.term()
            self._socket = self._context = None
        if self._remove_directory is not None:
            self._remove_directory()


# ---- control link


class LinkListener(Endpoint):
    """The controller's side of the control link.

    A peer is admitted once it has said hello with the token; its name is then its own until `forget`. What it had sent before, and comes
    later, is void. Anything else that comes is dropped and counted in `dropped`. The address of a peer on the socket is a random number
    that the peer chose, so another one can't take its place.
    """

    _what = "the control link"

    def __init__(
        self, token: str, place: str = "ipc:", *, max_messages: int = 100_000, timeout_s: float = 10.0, keys: Keys | None = None
    ) -> None:
        super().__init__(keys)
        self.dropped = Dropped()
        self._token = token.encode()
        self._place = place
        self._max_messages = max_messages
        self._timeout_s = timeout_s
        self._names: dict[bytes, str] = {}
        self._routes: dict[str, bytes] = {}
        self._forgotten: set[bytes] = set()

    def open(self) -> str:
        """Start to listen; returns the address for `LinkDialer.open`. Raises `PortInUse`."""
        if not self._token:
            raise ChannelError("a control link needs a token")
        address = self._bind(zmq.ROUTER, self._max_messages, self._place)
        socket = self._opened()
        socket.router_handover = False
        socket.router_mandatory = True
        socket.sndtimeo = milliseconds(self._timeout_s)
        return address

    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """Return (peer, message) pairs that have come, in each peer's order; waits up to `timeout_s` for the first."""
        socket = self._opened()
        deadline = time.monotonic() + timeout_s
        messages: list[tuple[str, bytes]] = []
        while True:
            for _ in range(MAX_MESSAGES_AT_ONCE):
                if not has_come(socket):
                    break
                try:
                    route, *frames = _first_frames(socket)
                except zmq.Again:
                    break
                if route in self._names and len(frames) == 1:
                    messages.append((self._names[route], frames[0]))
                elif route not in self._forgotten and not self._admit(route, frames):
                    who = f"{self._names[route]}, which has said hello" if route in self._names else "a peer that has not said hello"
                    self.dropped.add(f"{len(frames)} frames on the control link from {who}")
            left_s = deadline - time.monotonic()
            if messages or left_s <= 0 or not _is_readable(socket, left_s):
                return messages

    def send(self, peer: str, *messages: bytes) -> None:
        """Send messages together. Raises `BrokenChannel`: there is no such peer, it is gone, or it took nothing for `timeout_s`."""
        socket = self._opened()
        if peer not in self._routes:
            raise BrokenChannel(f"no peer {peer!r} is on the control link; there are {', '.join(sorted(self._routes)) or 'none'}")
        try:
            socket.send_multipart([self._routes[peer], *messages])
        except zmq.Again:
            raise BrokenChannel(f"{peer} took nothing from the control link for {self._timeout_s:g} s") from None
        except zmq.ZMQError as error:
            raise BrokenChannel(f"{peer} is gone from the control link ({error})") from None

    def forget(self, peer: str) -> None:
        """Free a peer's name for the process that replaces it."""
        if (route := self._routes.pop(peer, None)) is not None:
            del self._names[route]
            self._forgotten.add(route)

    def close(self, *, drain_s: float = 0.0) -> None:
        """Close, waiting up to `drain_s` for what was sent to leave. May be called twice."""
        self._release(drain_s)

    def _admit(self, route: bytes, frames: list[bytes]) -> bool:
        if len(frames) != 3 or frames[0] != _HELLO or not hmac.compare_digest(frames[2], self._token):
            return False
        name = frames[1].decode("utf-8", "replace")
        if name in self._routes or route in self._names:
            return False
        self._names[route] = name
        self._routes[name] = route
        return True


class LinkDialer(Endpoint):
    """A worker's side of the control link."""

    _what = "the control link"

    def __init__(self, *, max_messages: int = 100_000, timeout_s: float = 10.0, keys: Keys | None = None) -> None:
        super().__init__(keys)
        self._max_messages = max_messages
        self._timeout_s = timeout_s

    def open(self, address: str, name: str, token: str) -> None:
        """Connect and say hello. Does not wait for an answer: a wrong token meets silence, so nobody can probe for the right one."""
        socket = self._create(zmq.DEALER, self._max_messages)
        self._address = address
        socket.routing_id = b"\1" + secrets.token_bytes(15)
        socket.sndtimeo = milliseconds(self._timeout_s)
        connect(socket, address)
        socket.send_multipart([_HELLO, name.encode(), token.encode()])

    def receive(self, timeout_s: float) -> list[bytes]:
        """Return the messages that have come, in order; waits up to `timeout_s` for the first."""
        socket = self._opened()
        messages: list[bytes] = []
        deadline = time.monotonic() + timeout_s
        while True:
            while len(messages) < MAX_MESSAGES_AT_ONCE and has_come(socket):
                try:
                    messages += socket.recv_multipart(NOBLOCK)
                except zmq.Again:
                    break
            left_s = deadline - time.monotonic()
            if messages or left_s <= 0 or not _is_readable(socket, left_s):
                return messages

    def send(self, message: bytes) -> None:
        """Send a message. Raises `BrokenChannel`: the controller took nothing for `timeout_s`."""
        try:
            self._opened().send(message)
        except zmq.Again:
            raise BrokenChannel(f"the controller at {self._address} took nothing for {self._timeout_s:g} s") from None

    def close(self, *, drain_s: float = 0.0) -> None:
        """Close, waiting up to `drain_s` for what was sent to leave. May be called twice."""
        self._release(drain_s)


def wait(readables: Sequence[Endpoint], timeout_s: float) -> None:
    """Wait until one of these has something to receive, or the time is over."""
    poller = zmq.Poller()
    for readable in readables:
        poller.register(readable._opened(), zmq.POLLIN)
        if readable._monitor is not None:
            poller.register(readable._monitor, zmq.POLLIN)
    poller.poll(0 if any(readable._has_pending() for readable in readables) else milliseconds(timeout_s))


def new_keys() -> Keys:
    """Generate a key pair for encrypted sockets."""
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


def new_secret() -> Keys:
    """Generate a secret for sockets on loopback: it keeps the host's other users out, and costs nothing once a peer is connected."""
    return Keys("", secrets.token_hex(20), encrypts=False)


class _KeyHolders:
    """Accept peers that hold the cluster's key; ZeroMQ's authenticator calls it."""

    def __init__(self, keys: Keys) -> None:
        self._public = keys.public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


def _silenced_logger() -> logging.Logger:
    """A logger that drops the authenticator's messages: refused strangers must not be able to fill a log."""
    log = logging.getLogger("m2flow.channels.guard")
    log.setLevel(logging.CRITICAL)
    return log


def connect(socket: Socket, address: str) -> None:
    """Connect a socket. Raises BrokenChannel: that is no address."""
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise BrokenChannel(f"{address!r} is no address to connect to: {error}") from None


def _first_frames(socket: Socket) -> list[bytes]:
    """Receive the next message, at most one frame more than a hello has; further frames are dropped. Raises `zmq.Again`: there is none."""
    frames = [socket.recv(NOBLOCK)]
    while socket.getsockopt(_RCVMORE):
        frame = socket.recv(NOBLOCK)  # A message is here as a whole, or not at all.
        if len(frames) <= _HELLO_FRAMES:
            frames.append(frame)
    return frames


def has_come(socket: Socket) -> bool:
    """Whether there is something to receive. Costs a third of receiving nothing, which raises."""
    return bool(socket.getsockopt(_EVENTS) & _POLLIN)  # type: ignore[operator]


def _is_readable(socket: Socket, timeout_s: float) -> bool:
    return bool(socket.poll(milliseconds(timeout_s)))


def milliseconds(duration_s: float) -> int:
    """A duration in milliseconds, rounded up: a wait of half a millisecond must not become a spin."""
    return max(int(duration_s * 1000 + 0.999), 0)


# ---- heartbeats

_ANSWER_TIMEOUT_S = 0.1
"""An answer that comes later is read with the next heartbeat; `close` may take as long."""


class HeartbeatSender:
    """Send heartbeats from a thread of its own.

    Every `period_s` it sends `payload()` as the peer `<name>.beat`, and passes answers to `hear`. It goes on as long as other threads
    release the interpreter's lock: a C extension that holds it for seconds silences it. A heartbeat that can't be sent is skipped.
    """

    def __init__(
        self,
        address: str,
        name: str,
        token: str,
        *,
        period_s: float = 1.0,
        payload: Callable[[], bytes] = lambda: b"",
        hear: Callable[[bytes], None] = lambda answer: None,
        keys: Keys | None = None,
    ) -> None:
        self._address = address
        self._name = f"{name}.beat"
        self._token = token
        self._period_s = period_s
        self._payload = payload
        self._hear = hear
        self._keys = keys
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the thread; the first heartbeat is sent at once."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        dialer = LinkDialer(max_messages=16, timeout_s=0.0, keys=self._keys)
        try:
            dialer.open(self._address, self._name, self._token)
            while True:
                # The controller is slow or gone; the next beat, or its absence, says the same.
                with contextlib.suppress(BrokenChannel):
                    dialer.send(self._payload())
                for answer in dialer.receive(min(self._period_s, _ANSWER_TIMEOUT_S)):
                    self._hear(answer)
                if self._stopping.wait(self._period_s):
                    return
        finally:
            dialer.close()
