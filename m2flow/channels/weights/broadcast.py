"""Broadcast weights from one process to many over torch.distributed, when they ask for them.

    receiver --ask: its name, the version wanted, the version held--> store of the server
    server   --answer: the group, its rank in it, what will be sent-> receiver
    server   ==buckets, broadcast to all who asked together========> receivers

The server sends from what its trainer has staged, in a thread of its own, so training goes on. Receivers that ask within `gather_s` of each
other share a broadcast, and so a group. Members are named by their worker and by a number drawn when they started: a group is reused as
long as the same members ask, and made anew after one has joined, left or been restarted. A receiver whose broadcast breaks off asks again.

Limits: torch's store and Gloo neither encrypt nor authenticate, so this is for a trusted network; only the checksums tell what came.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any, final

import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.process_groups import Group, open_store, own_address, split_address
from m2flow.channels.weights.payload import BUCKET_BYTES, Content, Manifest, receive_buckets, send_buckets
from m2flow.channels.weights.shared_segment import SharedWeights
from m2flow.channels.weights.transport import Offer, Sender, ServerReceiver, Transport, WeightOptions
from m2flow.errors import BrokenChannel, ChannelError, DecodeError

Bytes = npt.NDArray[np.uint8]
_ATTEMPTS = 3
_POLL_S = 0.005
"""Period of polling the store; one poll takes some 30 microseconds."""
_MOST_DRAWN = 4096
"""Bounds the request numbers that are waited for at once: more than there are receivers."""


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    member: str
    version: int
    base: int


_read_ask = msgspec.msgpack.Decoder(_Ask).decode


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    group: str
    rank: int
    size: int
    content: Content | None
    """None: there is no such version."""


_read_answer = msgspec.msgpack.Decoder(_Answer).decode


@final
class Broadcast(Transport):
    """Receivers that ask together get one broadcast."""

    stage_class = SharedWeights
    crosses_hosts = True

    def stage(self, name: str) -> SharedWeights:
        return SharedWeights(name)

    def sender(self, name: str, options: WeightOptions) -> BroadcastServer:
        return BroadcastServer(
            host=options.host, device=options.device, num_expected=options.num_receivers, bucket_bytes=options.bucket_bytes
        )

    def receiver(self, worker: str, options: WeightOptions) -> ServerReceiver:
        receiver = BroadcastReceiver(worker, device=options.device, bucket_bytes=options.bucket_bytes)
        return ServerReceiver(lambda manifest, base: receiver.receive(manifest.address, manifest.version, base), receiver.close)


@final
class BroadcastServer(Sender):
    """Serve the staged weights to receivers. `offer` and `close` are called from one thread.

    Args:
        host: the IPv4 address to listen at.
        num_expected: receivers that may ask together; until as many have asked, the server waits `gather_s` for more.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        device: str = "cpu",
        num_expected: int = 1,
        gather_s: float = 0.1,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        self._host = host
        self._device = device
        self._num_expected = num_expected
        self._gather_s = gather_s
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._store: Any = None
        self._offer: Offer | None = None
        self._lock = threading.Lock()
        """Held while bytes are sent, and while they are overwritten."""
        self._groups: dict[tuple[str, ...], tuple[str, Group]] = {}
        self._num_drawn = 0
        self._drawn: dict[int, float] = {}
        """Request numbers that were drawn and whose request has not come yet -> when that was first seen."""
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="m2flow-weights", daemon=True)
        self.num_rounds = 0
        """Broadcasts begun: counted before a byte is sent, so that a receiver of one finds it counted."""

    def open(self) -> str:
        """Listen, and return the address for manifests."""
        self._store = open_store(self._host, 0, is_server=True, timeout_s=self._timeout_s)
        self._thread.start()
        return self._address()

    def found_at(self, manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(manifest, address=self._address())

    def withdraw(self) -> None:
        """Stop offering, since the staged bytes are about to be overwritten. Waits for a broadcast in progress."""
        with self._lock:
            self._offer = None

    def offer(self, offer: Offer) -> None:
        """Send this version to receivers that ask from now on."""
        with self._lock:
            self._offer = offer

    def close(self) -> None:
        """Stop the server. May be called twice."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(self._timeout_s)
        self._groups.clear()
        self._store = None

    def _address(self) -> str:
        return f"{self._host}:{self._store.port}"

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            if asks := self._collect_requests():
                with self._lock:
                    self._answer(asks)

    def _collect_requests(self) -> dict[int, _Ask]:
        """Collect requests that belong together, by their number."""
        found: dict[int, _Ask] = {}
        silent_s = 0.0
        while not self._is_closing.is_set() and len(found) < self._num_expected and not (found and silent_s > self._gather_s):
            if heard := self._new_requests():
                found |= heard
                silent_s = 0.0
                continue
            # Not the store's `wait`, which would print a warning at each time-out.
            self._is_closing.wait(_POLL_S)
            silent_s += _POLL_S
        return found

    def _new_requests(self) -> dict[int, _Ask]:
        """Requests that have come since. A receiver draws a number and writes its request a moment later, on a busy machine a long moment,
        and never if it died: nobody waits for it, and it is answered when it comes."""
        now_s = time.monotonic()
        num_drawn = int(self._store.add("num_asks", 0))
        self._drawn |= dict.fromkeys(range(max(self._num_drawn, num_drawn - _MOST_DRAWN), num_drawn), now_s)
        self._num_drawn = num_drawn
        found = {}
        for number, drawn_s in list(self._drawn.items()):
            key = f"ask/{number}"
            if self._store.check([key]):
                with contextlib.suppress(msgspec.MsgspecError):
                    found[number] = _read_ask(self._store.get(key))
                self._store.delete_key(key)
                del self._drawn[number]
            elif now_s - drawn_s > self._timeout_s:
                del self._drawn[number]
        return found

    def _answer(self, asks: dict[int, _Ask]) -> None:
        offer = self._offer
        rounds: dict[bool, dict[int, _Ask]] = {}
        for number, ask in asks.items():
            if offer is None or ask.version != offer.whole[0].version:
                self._reply(number, _Answer("", 0, 0, None))
            else:
                takes_changes = offer.changes is not None and ask.base == offer.changes[0].base
                rounds.setdefault(takes_changes, {})[number] = ask
        for takes_changes, together in rounds.items():
            assert offer is not None
            content, body = offer.changes if takes_changes and offer.changes is not None else offer.whole
            self._broadcast(together, content, body)

    def _broadcast(self, asks: dict[int, _Ask], content: Content, body: Bytes) -> None:
        members = tuple(sorted(ask.member for ask in asks.values()))
        known = self._groups.get(members)
        name = known[0] if known else secrets.token_hex(8)
        for number, ask in asks.items():
            self._reply(number, _Answer(name, members.index(ask.member) + 1, len(members) + 1, content))
        try:
            if known is None:
                store = open_store(self._host, self._store.port, is_server=False, timeout_s=self._timeout_s)
                group = Group(store, name, 0, len(members) + 1, host=self._host, device=self._device, timeout_s=self._timeout_s)
                # Groups that share a member with this one are over: the member asks in this one now.
                self._groups = {key: held for key, held in self._groups.items() if not set(key) & set(members)}
                self._groups[members] = (name, group)
            else:
                group = known[1]
            self.num_rounds += 1
            start = time.monotonic()
            self._send(body, group)
            if content.base < 0 and len(body):
                self.bytes_per_s = len(body) / max(time.monotonic() - start, 1e-9)
        except BrokenChannel:
            self._groups.pop(members, None)  # Members that are alive ask again.

    def _send(self, body: Bytes, group: Group) -> None:
        if self._device != "cpu":
            send_buckets([body], group.broadcast, self._bucket_bytes)
            return
        for start in range(0, len(body), self._bucket_bytes):
            group.broadcast(body[start : start + self._bucket_bytes])

    def _reply(self, number: int, answer: _Answer) -> None:
        self._store.set(f"answer/{number}", msgspec.msgpack.encode(answer))


@final
class BroadcastReceiver:
    """Receive weights from a `BroadcastServer`; keeps its groups from one version to the next. One thread.

    Args:
        name: of the worker.
    """

    def __init__(self, name: str, *, device: str = "cpu", bucket_bytes: int = BUCKET_BYTES, timeout_s: float = 60.0) -> None:
        self._member = f"{name}/{secrets.token_hex(8)}"
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._stores: dict[str, Any] = {}
        self._groups: dict[str, Group] = {}

    def receive(self, address: str, version: int, base: int) -> tuple[Content, Iterator[Bytes]]:
        """Ask for a version while holding another (`base`). Returns what will come, and its buckets, each valid until the next is taken.

        Raises:
            ChannelError: the version is not offered any more. BrokenChannel: the server is gone, now or while the buckets come.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return self._ask(address, version, base)
            except BrokenChannel:
                self._stores.pop(address, None)
                if attempt + 1 == _ATTEMPTS:
                    raise
        raise AssertionError

    def close(self) -> None:
        """Leave the groups. May be called twice."""
        self._groups.clear()
        self._stores.clear()

    def _ask(self, address: str, version: int, base: int) -> tuple[Content, Iterator[Bytes]]:
        host, port = split_address(address)
        store = self._stores.get(address)
        if store is None:
            store = self._stores[address] = open_store(host, port, is_server=False, timeout_s=self._timeout_s)
        try:
            number = int(store.add("num_asks", 1)) - 1
            store.set(f"ask/{number}", msgspec.msgpack.encode(_Ask(self._member, version, base)))
            store.wait([f"answer/{number}"], datetime.timedelta(seconds=self._timeout_s))
            raw = store.get(f"answer/{number}")
            store.delete_key(f"answer/{number}")
        except RuntimeError as error:
            raise BrokenChannel(f"{address} gave no answer about weights: {str(error).splitlines()[0][:200]}") from None
        try:
            answer = _read_answer(raw)
        except msgspec.MsgspecError as error:
            raise DecodeError(f"{len(raw)} bytes from {address} are no answer about weights: {error}") from None
        if answer.content is None:
            raise ChannelError(f"version {version} of the weights is not offered at {address}", now="A newer one has taken its place.")
        group = self._groups.get(answer.group)
        if group is None:
            group = Group(
                store,
                answer.group,
                answer.rank,
                answer.size,
                host=own_address(host),
                device=self._device,
                timeout_s=self._timeout_s,
            )
            self._groups = {answer.group: group}
        return answer.content, self._buckets(answer.group, group, answer.content.num_bytes)

    def _buckets(self, name: str, group: Group, num_bytes: int) -> Iterator[Bytes]:
        is_whole = False
        try:
            yield from receive_buckets(group.broadcast, num_bytes, self._bucket_bytes)
            is_whole = True
        finally:
            if not is_whole:
                self._groups.pop(name, None)
