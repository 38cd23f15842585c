"""Who is gone of those that were heard on connections, which ZeroMQ names by descriptors that are used again."""

from __future__ import annotations

import socket
import threading
import time

from m2flow.channels.channel import Parcel
from m2flow.channels.parcels import Connections, ZmqInbox, ZmqOutbox
from m2flow.samples import Batch, make_ids


def test_who_is_said_to_be_gone_before_the_socket_is_closed_is_gone_when_it_is() -> None:
    connections = Connections()
    ours, theirs = socket.socketpair()
    with theirs:
        connections.heard(ours.fileno(), "rollout-0")
        connections.ended([ours.fileno()])
        assert connections.next_gone() is None, "its socket is there"
        assert connections.are_suspect
        ours.close()
        assert connections.next_gone() is None, "what came before the end is read first"
        connections.ended([])
        assert connections.next_gone() == "rollout-0"
        assert connections.next_gone() is None
        assert not connections.are_suspect


def test_who_has_the_descriptor_of_one_that_is_gone_stays_and_goes_once() -> None:
    connections = Connections()
    ours, theirs = socket.socketpair()
    with theirs:
        connections.heard(ours.fileno(), "friend")
        connections.ended([ours.fileno()])  # Of a stranger who had it before.
        connections.ended([])
        assert connections.next_gone() is None
        descriptor = ours.fileno()
        ours.close()
        connections.ended([descriptor])
        assert connections.next_gone() == "friend"
        assert connections.next_gone() is None
        connections.ended([])
        assert connections.next_gone() is None


def test_a_connection_that_ended_before_anything_was_taken_does_not_count_against_the_inbox_that_came_after_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        outbox = ZmqOutbox("sender")
        sent = threading.Thread(target=lambda: outbox.send(f"tcp://127.0.0.1:{port}", Parcel(1, Batch(make_ids(0, 1)), "sender")))
        sent.start()
        stranger.accept()[0].close()
    inbox = ZmqInbox(f"tcp:{port}")
    inbox.open()
    try:
        sent.join(60)
        assert len(inbox.receive(60.0)) == 1
        time.sleep(0.03)  # By now it looks again whether the peer is gone.
        outbox.send(f"tcp://127.0.0.1:{port}", Parcel(2, Batch(make_ids(0, 1)), "sender"))
        assert [parcel.call for parcel in inbox.receive(60.0)] == [2]
    finally:
        outbox.close()
        inbox.close()
