"""A worker's peers: rows go to who lives, nobody has those for the dead, and a name that was never said is an error."""

from __future__ import annotations

import pytest

from m2flow.channels.channel import MemoryInbox, MemoryOutbox
from m2flow.errors import InternalError
from m2flow.micro.worker.worker import Peers
from m2flow.testing.channel_suite import parcel_of


def nothing_heard() -> None:
    pass


@pytest.fixture
def inbox():
    made = MemoryInbox()
    yield made
    made.close()


def test_rows_go_to_who_lives_and_not_to_who_is_dead(inbox):
    peers = Peers(MemoryOutbox(), nothing_heard)
    peers.announce({"functions-0": inbox.open()}, {})
    assert peers.send("functions-0", parcel_of(1))
    peers.mark_dead("functions-0")
    assert not peers.send("functions-0", parcel_of(2))
    assert [parcel.call for parcel in inbox.take()] == [1]


def test_who_is_announced_no_more_is_dead_without_a_word(inbox):
    peers = Peers(MemoryOutbox(), nothing_heard)
    peers.announce({"functions-0": inbox.open()}, {})
    peers.announce({}, {})
    assert not peers.send("functions-0", parcel_of(1))


def test_a_name_that_nobody_ever_said_is_an_error(inbox):
    peers = Peers(MemoryOutbox(), nothing_heard)
    peers.announce({"functions-0": inbox.open()}, {})
    with pytest.raises(InternalError, match=r"call 1 are for 'functoins-0', .* told rollout-0"):
        peers.send("functoins-0", parcel_of(1))


def test_a_process_that_was_started_again_does_not_know_who_died_before_it():
    peers = Peers(MemoryOutbox(), nothing_heard, knows_all=False)
    assert not peers.send("functions-0", parcel_of(1))
