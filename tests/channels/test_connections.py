"""Who is gone of those that were heard on connections, which ZeroMQ names by descriptors that are used again."""

from __future__ import annotations

import socket

from m2flow.channels.parcels import Connections


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
