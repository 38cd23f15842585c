"""The other process of the channel tests.

python channel_peer.py send ADDRESS NUM | receive PLACE | talk ADDRESS NAME TOKEN
"""

from __future__ import annotations

import signal
import sys

from m2flow.channels.zeromq import LinkDialer, ZmqInbox, ZmqOutbox
from m2flow.testing.channel_suite import parcel_of


def send(address: str, num_parcels: str) -> None:
    outbox = ZmqOutbox()
    for i in range(int(num_parcels)):
        outbox.send(address, parcel_of(i, num_bytes=10 ** (i % 7)))
    outbox.close(drain_s=30.0)


def receive(place: str) -> None:
    """Take one parcel, and then nothing."""
    inbox = ZmqInbox(place, max_parcels=2)
    print(inbox.open(), flush=True)
    while not inbox.receive(30.0):
        pass
    print("received", flush=True)
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
    {"send": send, "receive": receive, "talk": talk}[sys.argv[1]](*sys.argv[2:])
