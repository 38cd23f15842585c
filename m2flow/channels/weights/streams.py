"""Stream weights over ZeroMQ to receivers that ask: between hosts without shared storage, encrypted with the cluster's key.

    receiver --ask: the version wanted, the version held--> server    receiver --ask: bytes from an offset on--> server
    receiver <--what will be sent------------------------- server    receiver <--a piece---------------------- server

The socket is the control link's kind (`m2flow.channels.zeromq`): a listener that admits peers with the token, which is in the manifest. It
listens at another interface than loopback only with a key, and then all traffic is encrypted. A receiver asks for a few pieces ahead, so
neither side holds more than these. The server sends from what its trainer has staged, in a thread of its own, so training goes on.

Limits: each receiver gets a stream of its own, so the trainer's network link carries the model once for each, and encryption runs on one
core of the trainer's host. A broadcast (`m2flow.channels.weights.broadcast`) carries the model once, on a trusted network.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, final

import msgspec
import numpy as np

from m2flow.channels.weights.payload import BUCKET_BYTES, Content, Manifest, receive_buckets
from m2flow.channels.weights.shared_segment import SharedWeights
from m2flow.channels.weights.transport import Bytes, Offer, Sender, ServerReceiver, Transport, WeightOptions
from m2flow.errors import BrokenChannel, ChannelError, DecodeError

if TYPE_CHECKING:
    from m2flow.channels.zeromq import Keys

_PIECE_BYTES = 1 << 20
_PIECES_AHEAD = 8
_POLL_S = 0.05
_ALL = -1


class _Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    base: int
    """What the receiver holds, or what the body that it reads is based on."""
    start: int = _ALL
    """Offset of a piece; `_ALL`: ask what there is."""


_read_ask = msgspec.msgpack.Decoder(_Ask).decode


class _Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    start: int
    content: Content | None = None
    """Answers the first ask; None: there is no such version."""
    size: int = -1
    """Bytes of the piece that follows; -1: there is no such version."""


_read_answer = msgspec.msgpack.Decoder(_Answer).decode


@final
class Streams(Transport):
    """Each receiver gets a stream of its own over the cluster's own connections."""

    stage_class = SharedWeights
    crosses_hosts = True

    def stage(self, name: str) -> SharedWeights:
        return SharedWeights(name)

    def sender(self, name: str, options: WeightOptions) -> StreamServer:
        return StreamServer(host=options.host, keys=options.keys)

    def receiver(self, worker: str, options: WeightOptions) -> ServerReceiver:
        receiver = StreamReceiver(worker, keys=options.keys, bucket_bytes=options.bucket_bytes)
        return ServerReceiver(lambda manifest, base: receiver.receive(manifest.stream, manifest.version, base), receiver.close)


@final
class StreamServer(Sender):
    """Serve the staged weights as streams. `offer`, `withdraw` and `close` are called from one thread.

    Args:
        host: the IPv4 address to listen at.
    """

    def __init__(self, *, host: str = "127.0.0.1", keys: Keys | None = None) -> None:
        from m2flow.channels.zeromq import LinkListener  # Plans read the table of transports, and need no ZeroMQ.

        self._token = secrets.token_hex(16)
        self._listener = LinkListener(self._token, f"tcp:{host}", keys=keys)
        self._offer: Offer | None = None
        self._lock = threading.Lock()
        """Held while bytes are read, and while they are overwritten."""
        self._began_s: dict[str, float] = {}
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="m2flow-weights", daemon=True)
        self._address = ""

    def open(self) -> str:
        """Listen, and return the address for manifests, token included.

        Raises:
            SpecError: others can reach it, and there is no key.
        """
        self._address = f"{self._listener.open()} {self._token}"
        self._thread.start()
        return self._address

    def found_at(self, manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(manifest, stream=self._address)

    def offer(self, offer: Offer) -> None:
        with self._lock:
            self._offer = offer

    def withdraw(self) -> None:
        """Stop offering, since the staged bytes are about to be overwritten. Waits for a piece that is being read."""
        with self._lock:
            self._offer = None

    def close(self) -> None:
        """May be called twice."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            for peer, body in self._listener.receive(_POLL_S):
                try:
                    self._listener.send(peer, *self._answer(peer, _read_ask(body)))
                except (BrokenChannel, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    # It has died, or does not speak the protocol: ignore it from now on.
                    self._listener.forget(peer)

    def _answer(self, peer: str, ask: _Ask) -> list[bytes]:
        with self._lock:
            offer = self._offer
            if offer is None or ask.version != offer.whole[0].version:
                return [msgspec.msgpack.encode(_Answer(ask.version, ask.start))]
            of_changes = offer.changes is not None and ask.base == offer.changes[0].base
            content, body = offer.changes if of_changes and offer.changes is not None else offer.whole
            if ask.start == _ALL:
                self._began_s[peer] = time.monotonic()
                return [msgspec.msgpack.encode(_Answer(ask.version, _ALL, content))]
            piece = body[max(ask.start, 0) : max(ask.start, 0) + _PIECE_BYTES].tobytes()
        if content.base < 0 and ask.start + len(piece) == len(body):
            self.bytes_per_s = len(body) / max(time.monotonic() - self._began_s.pop(peer, 0.0), 1e-9)
        return [msgspec.msgpack.encode(_Answer(ask.version, ask.start, size=len(piece))), piece]


@final
class StreamReceiver:
    """Receive streams; keeps its connections from one version to the next. One thread, and the one of `receive_buckets`.

    Args:
        name: of the worker.
    """

    def __init__(self, name: str, *, keys: Keys | None = None, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = 60.0) -> None:
        self._name = name
        self._keys = keys
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._connections: dict[str, _Connection] = {}

    def receive(self, address: str, version: int, base: int) -> tuple[Content, Iterator[Bytes]]:
        """Ask for a version while holding another (`base`). Returns what will come, and its buckets, each valid until the next is taken.

        Raises:
            ChannelError: the version is not offered any more. BrokenChannel: the server is gone, now or while the buckets come.
        """
        connection = self._connections.get(address)
        if connection is None or connection.is_broken:
            if connection is not None:
                connection.close()
            connection = self._connections[address] = _Connection(address, self._name, self._keys, self._timeout_s)
        content = connection.content(version, base)
        return content, receive_buckets(connection.reader(content), content.num_bytes, self._bucket_bytes)

    def close(self) -> None:
        """May be called twice."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


class _Connection:
    """A receiver's connection to one server."""

    def __init__(self, address: str, name: str, keys: Keys | None, timeout_s: float) -> None:
        self._address, _, token = address.partition(" ")
        if not self._address.startswith("tcp://") or not token:
            raise DecodeError(f"weights from {address[:100]!r}")
        from m2flow.channels.zeromq import LinkDialer

        self._timeout_s = timeout_s
        self._link = LinkDialer(timeout_s=timeout_s, keys=keys)
        self._link.open(self._address, f"{name}/{secrets.token_hex(8)}", token)
        self._received: list[bytes] = []
        self.is_broken = False
        """An answer is outstanding, so the connection can't be used for another version."""

    def content(self, version: int, base: int) -> Content:
        self.is_broken = True
        self._ask(_Ask(version, base))
        answer = self._next_answer(version, _ALL)
        self.is_broken = False
        if answer.content is None:
            raise _gone(version, self._address)
        return answer.content

    def reader(self, content: Content) -> Callable[[Bytes], None]:
        """Return a function that fills a buffer with the next bytes of the body."""
        asked = done = 0
        left = np.empty(0, np.uint8)

        def read(into: Bytes) -> None:
            nonlocal asked, done, left
            filled = 0
            while filled < len(into):
                if not len(left):
                    self.is_broken = True
                    while asked < content.num_bytes and asked < done + _PIECES_AHEAD * _PIECE_BYTES:
                        self._ask(_Ask(content.version, content.base, asked))
                        asked += _PIECE_BYTES
                    left = self._piece(content, done)
                    done += len(left)
                    self.is_broken = done < content.num_bytes
                taken = min(len(left), len(into) - filled)
                into[filled : filled + taken] = left[:taken]
                left, filled = left[taken:], filled + taken

        return read

    def close(self) -> None:
        self._link.close()

    def _piece(self, content: Content, start: int) -> Bytes:
        answer = self._next_answer(content.version, start)
        if answer.size < 0:
            raise _gone(content.version, self._address)
        piece = np.frombuffer(self._next(), np.uint8)
        if len(piece) != answer.size or len(piece) != min(_PIECE_BYTES, content.num_bytes - start):
            raise DecodeError(f"a piece of weights from {self._address} has {len(piece):,} bytes")
        return piece

    def _ask(self, ask: _Ask) -> None:
        self._link.send(msgspec.msgpack.encode(ask))

    def _next_answer(self, version: int, start: int) -> _Answer:
        raw = self._next()
        try:
            answer = _read_answer(raw)
        except msgspec.MsgspecError as error:
            raise DecodeError(f"{len(raw)} bytes from {self._address} are no answer about weights: {error}") from None
        if (answer.version, answer.start) != (version, start):
            raise DecodeError(f"{self._address} answered about version {answer.version} of the weights, and {version} was asked for")
        return answer

    def _next(self) -> bytes:
        if not self._received:
            self._received = self._link.receive(self._timeout_s)[::-1]
        if not self._received:
            raise BrokenChannel(
                f"{self._address} gave no answer about weights for {self._timeout_s:g} s", now="Its trainer is gone, or hangs."
            )
        return self._received.pop()


def _gone(version: int, address: str) -> ChannelError:
    return ChannelError(f"version {version} of the weights is not offered at {address}", now="A newer one has taken its place.")
