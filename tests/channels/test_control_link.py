"""The control link takes in only those who know the token, and keeps its peers apart."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.channels.zeromq import HeartbeatSender, LinkDialer, LinkListener, wait
from m2flow.errors import BrokenChannel, ChannelClosed, ChannelError, PortInUse
from m2flow.testing.channel_suite import parcel_of

_TOKEN = "6f5902ac237024bd"
_PEER = str(Path(__file__).parents[1] / "support" / "channel_peer.py")


@pytest.fixture(params=["ipc:", "tcp"])
def listener(request: pytest.FixtureRequest) -> Iterator[tuple[LinkListener, str]]:
    listener = LinkListener(_TOKEN, request.param, timeout_s=0.3)
    yield listener, listener.open()
    listener.close()


def dial(address: str, name: str, token: str = _TOKEN) -> contextlib.closing[LinkDialer]:
    dialer = LinkDialer()
    dialer.open(address, name, token)
    return contextlib.closing(dialer)


def hear(listener: LinkListener, num_messages: int = 1) -> list[tuple[str, bytes]]:
    heard: list[tuple[str, bytes]] = []
    while len(heard) < num_messages:
        some = listener.receive(240.0)
        assert some, f"only {heard} came"
        heard += some
    return heard


@contextlib.contextmanager
def stranger(address: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        yield dealer


def test_messages_go_both_ways_under_the_peers_names(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with dial(address, "rollout-0") as one, dial(address, "trainer-0") as other:
        one.send(b"ready")
        other.send(b"")
        assert sorted(hear(link, 2)) == [("rollout-0", b"ready"), ("trainer-0", b"")]
        link.send("trainer-0", b"train")
        link.send("rollout-0", b"generate" * 100_000)
        assert one.receive(30.0) == [b"generate" * 100_000]
        assert other.receive(30.0) == [b"train"]
        assert link.dropped.num == 0


def test_messages_keep_their_order_in_both_directions(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    expected = [b"%d" % i for i in range(3000)]
    with dial(address, "w") as dialer:
        for message in expected:
            dialer.send(message)
        assert [message for _, message in hear(link, 3000)] == expected
        for message in expected:
            link.send("w", message)
        received: list[bytes] = []
        while len(received) < 3000:
            received += dialer.receive(30.0)
        assert received == expected


def test_a_wrong_token_is_dropped_and_counted_and_hears_nothing(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with dial(address, "thief", "wrong") as thief, dial(address, "worker") as worker:
        thief.send(b"let me in")
        while link.dropped.num < 2:  # Its hello and its message.
            assert link.receive(0.05) == []
        worker.send(b"hello")
        assert hear(link) == [("worker", b"hello")]
        with pytest.raises(BrokenChannel, match="no peer 'thief'"):
            link.send("thief", b"secret")
        assert thief.receive(0.0) == []


@pytest.mark.parametrize(
    "frames", [[b""], [b"m2flow-hello-1", b"x"], [b"m2flow-hello-1", b"x", b""], [b"m2flow-hello-0", b"x", _TOKEN.encode()]]
)
def test_what_is_no_hello_is_dropped_and_counted(frames: list[bytes], listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with stranger(address) as dealer:
        dealer.send_multipart(frames)
        while link.dropped.num < 1:
            assert link.receive(0.05) == []


def test_a_message_of_several_frames_is_dropped_and_counted_even_from_a_peer(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with stranger(address) as dealer:
        dealer.send_multipart([b"m2flow-hello-1", b"odd", _TOKEN.encode()])
        dealer.send_multipart([b"two", b"frames"])
        dealer.send_multipart([b"of"] + [b"very"] * 10_000 + [b"many"])
        dealer.send_multipart([b"m2flow-hello-1", b"again", _TOKEN.encode(), *[b"more"] * 100])
        dealer.send(b"one")
        assert hear(link) == [("odd", b"one")]
        assert link.dropped.num == 3


def test_a_name_stays_with_who_had_it_first_until_it_is_given_free(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with dial(address, "worker") as first:
        first.send(b"first")
        assert hear(link) == [("worker", b"first")]
        with dial(address, "worker") as second:
            second.send(b"second")
            while link.dropped.num < 2:
                assert link.receive(0.05) == []
            link.send("worker", b"for the first")
            assert first.receive(30.0) == [b"for the first"]
            assert second.receive(0.0) == []
    link.forget("worker")
    link.forget("nobody")
    with dial(address, "worker") as third:
        third.send(b"third")
        assert hear(link) == [("worker", b"third")]


def test_what_a_peer_sent_before_it_was_forgotten_is_void_and_not_a_strangers(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with dial(address, "worker") as first, dial(address, "other") as other:
        first.send(b"first")
        assert hear(link) == [("worker", b"first")]
        link.forget("worker")
        for _ in range(20):
            first.send(b"late")
            other.send(b"")
            assert hear(link) == [("other", b"")]
        assert link.dropped.num == 0


def test_a_peer_cannot_take_the_place_of_another_by_its_routing_id(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with dial(address, "worker") as worker:
        worker.send(b"mine")
        assert hear(link) == [("worker", b"mine")]
        with zmq.Context() as context, context.socket(zmq.DEALER) as thief:
            thief.linger = 0
            thief.routing_id = worker._opened().routing_id  # type: ignore[assignment]
            thief.connect(address)
            thief.send(b"stolen")
            worker.send(b"still mine")
            assert hear(link) == [("worker", b"still mine")]
            link.send("worker", b"for the worker")
            assert worker.receive(30.0) == [b"for the worker"]


def test_bytes_that_are_not_zeromq_leave_the_link_alone() -> None:
    link = LinkListener(_TOKEN, "tcp")
    address = link.open()
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw, dial(address, "worker") as worker:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
        worker.send(b"hello")
        assert hear(link) == [("worker", b"hello")]
    link.close()


def test_a_peer_that_is_gone_is_named(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with dial(address, "worker") as worker:
        worker.send(b"hello")
        hear(link)

    def send_until_it_breaks() -> None:
        for _ in range(100_000):
            link.send("worker", bytes(1000))
            link.receive(0.001)

    with pytest.raises(BrokenChannel, match="worker is gone"):
        send_until_it_breaks()


def test_a_worker_process_answers_and_its_last_word_arrives(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with subprocess.Popen([sys.executable, _PEER, "talk", address, "worker", _TOKEN]) as process:
        while True:  # Until it has said hello.
            link.receive(0.02)
            with contextlib.suppress(BrokenChannel):
                link.send("worker", b"abc")
                break
        assert hear(link) == [("worker", b"cba")]
        link.send("worker", b"stop")
        assert hear(link) == [("worker", b"bye")]
        assert process.wait() == 0


def test_a_killed_worker_leaves_the_others_link_working(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with subprocess.Popen([sys.executable, _PEER, "talk", address, "victim", _TOKEN]) as process, dial(address, "other") as other:
        while True:
            link.receive(0.02)
            with contextlib.suppress(BrokenChannel):
                link.send("victim", b"abc")
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        other.send(b"here")
        heard = []
        while ("other", b"here") not in heard:
            heard = hear(link)


def test_a_beacon_beats_while_the_worker_says_nothing(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    count = itertools.count()
    beacon = HeartbeatSender(address, "worker", _TOKEN, period_s=0.01, payload=lambda: b"%d" % next(count))
    beacon.open()
    assert hear(link, 3)[:3] == [("worker.beat", b"0"), ("worker.beat", b"1"), ("worker.beat", b"2")]
    beacon.close()
    beacon.close()
    assert "worker.beat" not in [thread.name for thread in threading.enumerate()]


def test_a_beacon_without_a_controller_stops_when_it_is_told_to() -> None:
    link = LinkListener(_TOKEN, "tcp")
    address = link.open()
    link.close()
    count = itertools.count()
    beaten = threading.Event()

    def payload() -> bytes:
        if next(count) == 100:  # More than its queue holds.
            beaten.set()
        return b""

    beacon = HeartbeatSender(address, "worker", _TOKEN, period_s=0.0001, payload=payload)
    beacon.open()
    assert beaten.wait(240.0)
    beacon.close()


def test_one_thread_waits_for_its_link_and_its_inbox_together(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    inbox, outbox = ZmqInbox("ipc:"), ZmqOutbox()
    inbox_address = inbox.open()
    with dial(address, "worker") as worker:
        worker.send(b"hello")
        hear(link)
        wait([worker, inbox], 0.01)
        assert (worker.receive(0.0), inbox.receive(0.0)) == ([], [])
        link.send("worker", b"do")
        wait([worker, inbox], 30.0)
        assert worker.receive(0.0) == [b"do"]
        outbox.send(inbox_address, parcel_of(5))
        wait([worker, inbox], 30.0)
        assert [parcel.call for parcel in inbox.receive(0.0)] == [5]
    outbox.close()
    inbox.close()


def test_a_link_without_a_token_is_refused() -> None:
    with pytest.raises(ChannelError, match="needs a token"):
        LinkListener("").open()


def test_a_port_in_use_is_named() -> None:
    first = LinkListener(_TOKEN, "tcp")
    port = first.open().rpartition(":")[2]
    with pytest.raises(PortInUse, match=f"port {port} of"):
        LinkListener(_TOKEN, f"tcp:{port}").open()
    first.close()


def test_closed_ends_say_so_and_close_twice(listener: tuple[LinkListener, str]) -> None:
    link, address = listener
    with dial(address, "worker") as worker:
        for _ in range(2):
            worker.close()
            link.close()
        for action in (lambda: worker.send(b""), lambda: worker.receive(0.0), lambda: link.receive(0.0), lambda: link.send("worker", b"")):
            with pytest.raises(ChannelClosed):
                action()


def test_a_controller_that_is_gone_does_not_hold_up_a_worker_s_end() -> None:
    link = LinkListener(_TOKEN, "tcp")
    worker = LinkDialer(max_messages=2, timeout_s=0.05)
    worker.open(link.open(), "worker", _TOKEN)
    link.close()

    def send_until_it_breaks() -> None:
        for _ in range(100_000):
            worker.send(bytes(1000))

    with pytest.raises(BrokenChannel, match=r"took nothing for 0\.05 s"):
        send_until_it_breaks()
    worker.close(drain_s=0.05)
