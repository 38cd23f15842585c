"""The other process of the channel tests.

python channel_peer.py send ADDRESS NUM | lend ADDRESS ARENA NUM | pass ADDRESS NUM | receive PLACE | hold PLACE | talk ADDRESS NAME TOKEN
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.channels.process_groups import PairReceiver, PairSender
from m2flow.channels.shared_memory import Arena
from m2flow.channels.zeromq import LinkDialer
from m2flow.testing.channel_suite import parcel_of, receive_all


def send(address: str, num_parcels: str) -> None:
    outbox = ZmqOutbox()
    for i in range(int(num_parcels)):
        outbox.send(address, parcel_of(i, num_bytes=10 ** (i % 7)))
    outbox.close(drain_s=30.0)


def receive(place: str) -> None:
    """Take one parcel, and then nothing."""
    inbox = ZmqInbox(place, max_parcels=2, pairs=PairReceiver())
    print(inbox.open(), flush=True)
    while not inbox.receive(30.0):
        pass
    print("received", flush=True)
    signal.pause()


def lend(address: str, arena: str, num_parcels: str) -> None:
    """Send in shared memory, and then do not end."""
    outbox = ZmqOutbox(arena=Arena(arena))
    outbox.prefer(address, "shared memory")
    for i in range(int(num_parcels)):
        outbox.send(address, parcel_of(i, num_bytes=1 << 20))
    print("sent", flush=True)
    signal.pause()


class HeadsOnly(PairSender):
    """What dies before frames have left."""

    def send(self, frames: Sequence[memoryview], to: str) -> None:
        pass


def pass_on(address: str, num_parcels: str) -> None:
    """Send over Gloo, so many parcels and a head that nothing follows, and do not end."""
    pairs = PairSender()
    outbox = ZmqOutbox(pairs=pairs)
    outbox.prefer(address, "torch gloo")
    for i in range(int(num_parcels)):
        outbox.send(address, parcel_of(i, num_bytes=1 << 20))
    while pairs.num_on_their_way():
        time.sleep(0.01)
    pairs.__class__ = HeadsOnly
    outbox.send(address, parcel_of(999, num_bytes=1 << 20))
    print("sent", flush=True)
    signal.pause()


def hold(place: str) -> None:
    """Take three parcels, and keep them."""
    inbox = ZmqInbox(place)
    print(inbox.open(), flush=True)
    held = receive_all(inbox, 3)
    print(f"holds {len(held)}", flush=True)
    signal.pause()


def talk(address: str, name: str, token: str) -> None:
    """Answer each message until `stop`."""
    link = LinkDialer()
    link.open(address, name, token)
    while True:
        for message in link.receive(30.0):
            if message == b"stop":
                link.send(b"bye")
                link.close(drain_s=30.0)
                return
            link.send(message[::-1])


if __name__ == "__main__":
    {"send": send, "lend": lend, "pass": pass_on, "receive": receive, "hold": hold, "talk": talk}[sys.argv[1]](*sys.argv[2:])
