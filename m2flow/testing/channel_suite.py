"""Check that a channel conforms: functions to run against any inbox and outbox.

    @pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
    def test_my_channel(check):
        check(MyChannel())

A check takes a `Maker`, and makes as many endpoints as it needs.
"""

# ruff: noqa: PT017
from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from m2flow.channels.channel import Inbox, Outbox, Parcel, Statistics
from m2flow.errors import BrokenChannel, ChannelClosed, ChannelError, EndOfStream
from m2flow.samples import Batch, Column, Ragged, make_ids

End = TypeVar("End", Inbox, Outbox)

_PATIENCE_S = 240.0
"""Time-out for parcels that must come; a check that passes never waits so long."""


class Maker(ABC):
    """Makes the two ends of the channel under test."""

    @abstractmethod
    def inbox(self, *, max_parcels: int) -> Inbox:
        """Make an inbox that is not open yet."""

    @abstractmethod
    def outbox(self, *, max_parcels: int, timeout_s: float) -> Outbox: ...


def parcel_of(call: int, *, sender: str = "rollout-0", num_samples: int = 2, num_bytes: int = 64) -> Parcel:
    """Make a parcel whose content is a function of its call; `payload` has `num_bytes` a sample."""
    rng = np.random.default_rng(call)
    rows = [rng.integers(0, 50_000, 3 + i) for i in range(num_samples)]
    columns: dict[str, Column] = {
        "tokens": Ragged.of(rows, np.int32),
        "loss_mask": Ragged.of([row % 2 == 0 for row in rows], bool),
        "reward": rng.random(num_samples),
        "text": Ragged.texts([f"answer {call}.{i} \N{CHECK MARK}" for i in range(num_samples)]),
        "payload": rng.integers(0, 256, (num_samples, num_bytes), np.uint8),
    }
    return Parcel(call, Batch(make_ids(call, num_samples), columns), sender)


def assert_same_parcel(received: Parcel, sent: Parcel) -> None:
    """Assert that two parcels are equal bit for bit, types included."""
    assert (received.call, received.sender) == (sent.call, sent.sender)
    assert list(received.batch.columns) == list(sent.batch.columns)
    _assert_same(received.batch.ids, sent.batch.ids)
    for name, column in sent.batch.columns.items():
        _assert_same(received.batch[name], column)


def receive_all(inbox: Inbox, num_parcels: int) -> list[Parcel]:
    """Wait for so many parcels, and no more."""
    parcels: list[Parcel] = []
    while len(parcels) < num_parcels:
        some = inbox.receive(_PATIENCE_S)
        assert some, f"only {len(parcels)} of {num_parcels} parcels came"
        parcels += some
    assert len(parcels) == num_parcels
    return parcels


def check_parcels_of_every_size_arrive_as_they_were(maker: Maker) -> None:
    sent = [parcel_of(i, num_samples=i % 3, num_bytes=10 ** (i % 7)) for i in range(14)]
    with _pair(maker) as (inbox, address, outbox):
        for parcel in sent:
            outbox.send(address, parcel)
        for received, parcel in zip(receive_all(inbox, len(sent)), sent, strict=True):
            assert_same_parcel(received, parcel)


def check_each_sender_s_parcels_keep_their_order(maker: Maker) -> None:
    with _pair(maker) as (inbox, address, first), _closing(maker.outbox(max_parcels=100, timeout_s=_PATIENCE_S)) as second:
        for i in range(50):
            first.send(address, parcel_of(i, sender="a", num_bytes=10 ** (i % 6)))
            second.send(address, parcel_of(i, sender="b", num_bytes=10 ** (5 - i % 6)))
        received = receive_all(inbox, 100)
    for sender in "ab":
        assert [parcel.call for parcel in received if parcel.sender == sender] == list(range(50))


def check_one_outbox_reaches_many_inboxes(maker: Maker) -> None:
    with _pair(maker) as (one, one_address, outbox), _closing(maker.inbox(max_parcels=10)) as other:
        other_address = other.open()
        assert one_address != other_address
        outbox.send(one_address, parcel_of(1))
        outbox.send(other_address, parcel_of(2))
        assert receive_all(one, 1)[0].call == 1
        assert receive_all(other, 1)[0].call == 2


def check_nothing_to_receive_is_an_empty_list(maker: Maker) -> None:
    with _pair(maker) as (inbox, _, _):
        assert inbox.receive(0.0) == []
        assert inbox.receive(0.01) == []


def check_receive_waits_for_the_first_parcel(maker: Maker) -> None:
    with _pair(maker) as (inbox, address, outbox):
        thread = threading.Thread(target=outbox.send, args=(address, parcel_of(3)))
        thread.start()
        assert [parcel.call for parcel in inbox.receive(_PATIENCE_S)] == [3]
        thread.join()
        assert inbox.receive(0.0) == []


def check_received_arrays_are_read_only(maker: Maker) -> None:
    with _pair(maker) as (inbox, address, outbox):
        outbox.send(address, parcel_of(1, num_bytes=1 << 20))
        batch = receive_all(inbox, 1)[0].batch
        tokens = batch.ragged("tokens")
        for array in (batch.ids, tokens.values, tokens.offsets, batch.dense("reward"), batch.dense("payload")):
            assert not array.flags.writeable


def check_received_arrays_outlive_the_channel(maker: Maker) -> None:
    sent = parcel_of(1, num_bytes=1 << 20)
    with _pair(maker) as (inbox, address, outbox):
        outbox.send(address, sent)
        received = receive_all(inbox, 1)[0]
    assert_same_parcel(received, sent)


def check_a_full_channel_stops_its_sender_and_loses_nothing(maker: Maker) -> None:
    with _impatient_pair(maker, max_parcels=2) as (inbox, address, outbox, timeout_s):
        num_sent = 0
        try:
            while num_sent < 100:
                outbox.send(address, parcel_of(num_sent, num_bytes=1 << 20))
                num_sent += 1
        except BrokenChannel as error:
            assert address in str(error)
            assert f"{timeout_s:g} s" in str(error)
        assert 2 <= num_sent < 100, "the channel has no bound"
        assert outbox.statistics()[address].wait_s > timeout_s / 2
        assert [parcel.call for parcel in receive_all(inbox, num_sent)] == list(range(num_sent))


def check_a_waiting_sender_goes_on_when_there_is_room(maker: Maker) -> None:
    with _pair(maker, max_parcels=2) as (inbox, address, outbox):

        def send() -> None:
            for i in range(60):
                outbox.send(address, parcel_of(i, num_bytes=1 << 18))

        thread = threading.Thread(target=send)
        thread.start()
        assert [parcel.call for parcel in receive_all(inbox, 60)] == list(range(60))
        thread.join()


def check_what_was_sent_before_closing_arrives(maker: Maker) -> None:
    with _pair(maker) as (inbox, address, outbox):
        for i in range(30):
            outbox.send(address, parcel_of(i, num_bytes=1 << 16))
        closing = threading.Thread(target=lambda: outbox.close(drain_s=_PATIENCE_S))
        closing.start()
        assert [parcel.call for parcel in receive_all(inbox, 30)] == list(range(30))
        closing.join()


def check_sending_to_nobody_is_a_broken_channel_that_names_the_address(maker: Maker) -> None:
    with _pair(maker, timeout_s=0.1) as (inbox, address, outbox):
        inbox.close()
        error = _raised(lambda: outbox.send(address, parcel_of(0)))
        assert isinstance(error, BrokenChannel)
        assert address in str(error)


def check_a_closed_end_says_so_and_closes_twice(maker: Maker) -> None:
    with _pair(maker) as (inbox, address, outbox):
        for _ in range(2):
            inbox.close()
            outbox.close()
        assert isinstance(_raised(lambda: inbox.receive(0.0)), ChannelClosed)
        assert isinstance(_raised(lambda: outbox.send(address, parcel_of(0))), ChannelClosed)


def check_an_end_that_was_never_opened_closes_without_a_word(maker: Maker) -> None:
    inbox = maker.inbox(max_parcels=1)
    assert isinstance(_raised(lambda: inbox.receive(0.0)), ChannelClosed)
    inbox.close()
    maker.outbox(max_parcels=1, timeout_s=1.0).close(drain_s=1.0)


def check_both_ends_count_the_same_parcels(maker: Maker) -> None:
    with _pair(maker) as (inbox, address, outbox):
        for i in range(5):
            outbox.send(address, parcel_of(i, num_samples=i))
        receive_all(inbox, 5)
        received, sent = inbox.statistics()["rollout-0"], outbox.statistics()[address]
        for statistics in (received, sent):
            assert (statistics.num_parcels, statistics.num_samples) == (5, 10)
        assert received.num_bytes == sent.num_bytes > 0
        assert Statistics.sum([received, sent]).num_samples == 20


def check_an_ended_channel_gives_everything_and_then_says_that_it_is_over(maker: Maker) -> None:
    with _pair(maker) as (inbox, address, outbox):
        for i in range(10):
            outbox.send(address, parcel_of(i, num_bytes=10 ** (i % 7)))
        outbox.end(address)
        assert [parcel.call for parcel in receive_all(inbox, 10)] == list(range(10))
        for _ in range(2):
            assert isinstance(_raised(lambda: inbox.receive(_PATIENCE_S)), EndOfStream)
        assert inbox.take() == []
        assert isinstance(_raised(lambda: outbox.send(address, parcel_of(0))), ChannelClosed)


def check_closing_an_outbox_ends_its_channels_in_order(maker: Maker) -> None:
    with _pair(maker) as (inbox, address, outbox):
        outbox.send(address, parcel_of(1, num_bytes=1 << 20))
        closing = threading.Thread(target=lambda: outbox.close(drain_s=_PATIENCE_S))
        closing.start()
        assert [parcel.call for parcel in receive_all(inbox, 1)] == [1]
        assert isinstance(_raised(lambda: inbox.receive(_PATIENCE_S)), EndOfStream)
        closing.join()


def check_a_stream_is_over_when_every_sender_has_ended(maker: Maker) -> None:
    with _pair(maker) as (inbox, address, first), _closing(maker.outbox(max_parcels=100, timeout_s=_PATIENCE_S)) as second:
        first.send(address, parcel_of(1, sender="a"))
        second.send(address, parcel_of(2, sender="b"))
        receive_all(inbox, 2)
        first.end(address)
        assert inbox.receive(0.05) == []
        second.send(address, parcel_of(3, sender="b"))
        assert [parcel.call for parcel in receive_all(inbox, 1)] == [3]
        second.end(address)
        assert isinstance(_raised(lambda: inbox.receive(_PATIENCE_S)), EndOfStream)


def check_who_comes_after_the_end_is_heard(maker: Maker) -> None:
    with _pair(maker) as (inbox, address, first), _closing(maker.outbox(max_parcels=100, timeout_s=_PATIENCE_S)) as second:
        first.send(address, parcel_of(1, sender="a"))
        first.end(address)
        receive_all(inbox, 1)
        assert isinstance(_raised(lambda: inbox.receive(_PATIENCE_S)), EndOfStream)
        second.send(address, parcel_of(2, sender="b"))
        while not (parcels := inbox.take()):
            pass
        assert [parcel.call for parcel in parcels] == [2]


def check_a_peer_that_is_forgotten_can_be_sent_to_no_more_than_it_is_there(maker: Maker) -> None:
    with _impatient_pair(maker) as (inbox, address, outbox, _):
        outbox.send(address, parcel_of(1, num_bytes=1 << 20))
        receive_all(inbox, 1)
        outbox.forget(address)
        outbox.forget(address)
        inbox.close()
        assert isinstance(_raised(lambda: outbox.send(address, parcel_of(2))), BrokenChannel)


CHANNEL_CHECKS: tuple[Callable[[Maker], None], ...] = (
    check_parcels_of_every_size_arrive_as_they_were,
    check_each_sender_s_parcels_keep_their_order,
    check_one_outbox_reaches_many_inboxes,
    check_nothing_to_receive_is_an_empty_list,
    check_receive_waits_for_the_first_parcel,
    check_received_arrays_are_read_only,
    check_received_arrays_outlive_the_channel,
    check_a_full_channel_stops_its_sender_and_loses_nothing,
    check_a_waiting_sender_goes_on_when_there_is_room,
    check_what_was_sent_before_closing_arrives,
    check_sending_to_nobody_is_a_broken_channel_that_names_the_address,
    check_a_closed_end_says_so_and_closes_twice,
    check_an_end_that_was_never_opened_closes_without_a_word,
    check_both_ends_count_the_same_parcels,
    check_an_ended_channel_gives_everything_and_then_says_that_it_is_over,
    check_closing_an_outbox_ends_its_channels_in_order,
    check_a_stream_is_over_when_every_sender_has_ended,
    check_who_comes_after_the_end_is_heard,
    check_a_peer_that_is_forgotten_can_be_sent_to_no_more_than_it_is_there,
)


@contextmanager
def _pair(maker: Maker, *, max_parcels: int = 100, timeout_s: float = _PATIENCE_S) -> Iterator[tuple[Inbox, str, Outbox]]:
    inbox = maker.inbox(max_parcels=max_parcels)
    outbox = maker.outbox(max_parcels=max_parcels, timeout_s=timeout_s)
    with _closing(inbox), _closing(outbox):
        yield inbox, inbox.open(), outbox


@contextmanager
def _impatient_pair(maker: Maker, *, max_parcels: int = 100) -> Iterator[tuple[Inbox, str, Outbox, float]]:
    """Open a pair with a short time-out for its sender, which has passed one parcel on; longer if connecting took longer."""
    for timeout_s in (0.2, 2.0, 20.0, _PATIENCE_S):
        with _pair(maker, max_parcels=max_parcels, timeout_s=timeout_s) as (inbox, address, outbox):
            try:
                outbox.send(address, parcel_of(0))
            except BrokenChannel:
                continue
            receive_all(inbox, 1)
            yield inbox, address, outbox, timeout_s
            return
    raise AssertionError("the channel does not come up")


@contextmanager
def _closing(end: End) -> Iterator[End]:
    try:
        yield end
    finally:
        end.close()


def _raised(action: Callable[[], object]) -> ChannelError | None:
    try:
        action()
    except ChannelError as error:
        return error
    return None


def _assert_same(received: Column, sent: Column) -> None:
    if isinstance(sent, Ragged):
        assert isinstance(received, Ragged)
        assert received.kind == sent.kind
        _assert_same(received.offsets, sent.offsets)
        _assert_same(received.values, sent.values)
    else:
        assert not isinstance(received, Ragged)
        assert (received.dtype, received.shape, received.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())
