"""The key of a cluster: its file, and channels that only its holders can use."""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import Callable, Iterator

import pytest
import zmq
from click.testing import CliRunner

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.channels.channel import Inbox, Outbox
from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.channels.zeromq import Keys, LinkDialer, LinkListener, address_of, is_private, new_keys, new_secret, read_keys, write_keys
from m2flow.cli.main import cli
from m2flow.errors import BrokenChannel, SpecError
from m2flow.runner.run import Run
from m2flow.spec import ChannelSpec, ClusterSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing.channel_suite import CHANNEL_CHECKS, Maker, assert_same_parcel, parcel_of, receive_all

KEYS = new_keys()
_TOKEN = "6f5902ac237024bd"


class KeyedMaker(Maker):
    def inbox(self, *, max_parcels: int) -> Inbox:
        return ZmqInbox("tcp", max_parcels=max_parcels, keys=KEYS)

    def outbox(self, *, max_parcels: int, timeout_s: float) -> Outbox:
        return ZmqOutbox("test", max_parcels=max_parcels, timeout_s=timeout_s, keys=KEYS)


@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_channel_with_a_key_is_a_channel(check: Callable[[Maker], None]) -> None:
    check(KeyedMaker())


SECRET = new_secret()


def test_a_secret_on_loopback_lets_its_holders_talk():
    inbox, outbox = ZmqInbox("tcp", keys=SECRET), ZmqOutbox("friend", keys=SECRET)
    listener, dialer = LinkListener(_TOKEN, "tcp", keys=SECRET), LinkDialer(keys=SECRET)
    try:
        outbox.send(inbox.open(), parcel_of(7))
        assert_same_parcel(receive_all(inbox, 1)[0], parcel_of(7))
        dialer.open(listener.open(), "rollout-0", _TOKEN)
        dialer.send(b"mine")
        assert listener.receive(30.0) == [("rollout-0", b"mine")]
    finally:
        for end in (outbox, inbox, dialer, listener):
            end.close()


def test_a_secret_is_no_key_for_other_hosts():
    with pytest.raises(SpecError, match=r"other hosts.* no key"):
        ZmqInbox("tcp:192.0.2.7", keys=SECRET).open()


@pytest.mark.parametrize("password", [None, b"guessed"])
def test_a_stranger_on_loopback_fills_no_memory_with_frames_of_a_message_that_never_ends(password):
    """ZeroMQ would take all of them in before the inbox saw the first."""
    inbox, outbox = ZmqInbox("tcp", keys=SECRET), ZmqOutbox("friend", keys=SECRET)
    address = inbox.open()
    try:
        with zmq.Context() as context, context.socket(zmq.PUSH) as other:
            other.linger, other.sndtimeo, other.immediate = 0, 100, 1
            if password is not None:
                other.plain_username, other.plain_password = b"m2flow", password
            other.connect(address)
            taken = 0
            with contextlib.suppress(zmq.Again):
                while taken < 400:
                    other.send(bytes(1 << 20), zmq.SNDMORE)
                    taken += 1
            assert taken == 0
            outbox.send(address, parcel_of(7))
            assert_same_parcel(receive_all(inbox, 1)[0], parcel_of(7))
    finally:
        outbox.close()
        inbox.close()


@contextlib.contextmanager
def stranger(address: str, kind: int, server: str = "", own: Keys | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A socket without a key, or with one of its own and what it takes for the listener's."""
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger = 0
        if own is not None:
            made.curve_serverkey = server.encode()
            made.curve_publickey, made.curve_secretkey = own.public.encode(), own.secret.encode()
        made.connect(address)
        yield made


OTHER = new_keys()
STRANGERS = {
    "without a key": ("", None),
    "with another key": (OTHER.public, OTHER),
    "who knows the public half": (KEYS.public, OTHER),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_not_heard_by_an_inbox_and_disturbs_nobody(who):
    inbox, outbox = ZmqInbox("tcp", keys=KEYS), ZmqOutbox("friend", keys=KEYS)
    address = inbox.open()
    try:
        with stranger(address, zmq.PUSH, *STRANGERS[who]) as other:
            for _ in range(20):
                with contextlib.suppress(zmq.Again):
                    other.send(b"let me in", zmq.NOBLOCK)
            outbox.send(address, parcel_of(7))
            (parcel,) = receive_all(inbox, 1)
            assert_same_parcel(parcel, parcel_of(7))
            assert inbox.receive(0.3) == []
            assert inbox.statistics()["rollout-0"].num_parcels == 1
    finally:
        outbox.close()
        inbox.close()


def test_a_friend_who_gets_the_descriptor_of_a_stranger_that_was_turned_away_is_not_taken_for_gone():
    inbox, outboxes = ZmqInbox("tcp", keys=KEYS), [ZmqOutbox(f"friend-{i}", keys=KEYS) for i in range(8)]
    address = inbox.open()
    host, _, port = address.removeprefix("tcp://").partition(":")
    try:
        with contextlib.ExitStack() as strangers:
            for _ in range(40):
                raw = strangers.enter_context(socket.create_connection((host, int(port))))
                raw.sendall(b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(52, b"\0"))
                while raw.recv(1000):  # Until it is turned away.
                    pass
        for i, outbox in enumerate(outboxes):
            outbox.send(address, parcel_of(i, sender=f"friend-{i}"))
        assert {parcel.call for parcel in receive_all(inbox, len(outboxes))} == set(range(8))
        assert inbox.receive(0.2) == []
    finally:
        for outbox in outboxes:
            outbox.close()
        inbox.close()


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_learns_nothing_from_the_control_link_even_with_the_token(who):
    listener, friend = LinkListener(_TOKEN, "tcp", keys=KEYS), LinkDialer(keys=KEYS)
    address = listener.open()
    try:
        with stranger(address, zmq.DEALER, *STRANGERS[who]) as other:
            with contextlib.suppress(zmq.Again):
                other.send_multipart([b"m2flow-hello-1", b"rollout-0", _TOKEN.encode()], zmq.NOBLOCK)
            friend.open(address, "rollout-0", _TOKEN)
            friend.send(b"mine")
            assert listener.receive(30.0) == [("rollout-0", b"mine")]
            listener.send("rollout-0", b"secret")
            assert friend.receive(30.0) == [b"secret"]
            assert not other.poll(300)
            assert listener.dropped.num == 0
    finally:
        friend.close()
        listener.close()


def test_an_outbox_without_the_key_says_that_its_peer_takes_nothing():
    inbox, outbox = ZmqInbox("tcp", keys=KEYS), ZmqOutbox("poor", timeout_s=0.3)
    try:
        with pytest.raises(BrokenChannel, match="took nothing"):
            outbox.send(inbox.open(), parcel_of(1))
    finally:
        outbox.close()
        inbox.close()


def test_a_place_that_others_can_reach_needs_a_key():
    with pytest.raises(SpecError, match=r"tcp:192\.0\.2\.7 .*no key\n.*m2flow keys"):
        ZmqInbox("tcp:192.0.2.7").open()


@pytest.mark.parametrize(
    ("place", "address"),
    [("tcp:127.0.0.1:5555", "tcp://127.0.0.1:5555"), ("tcp:10.1.2.3", "tcp://10.1.2.3:*"), ("tcp:80", "tcp://127.0.0.1:80")],
)
def test_places_name_an_address_and_a_port(place, address):
    assert address_of(place) == address
    assert is_private(address) == address.startswith("tcp://127.")


@pytest.mark.parametrize("place", ["tcp:0.0.0.0", "tcp:somewhere.org", "tcp:10.0.0.1:99999", "tcp:*", "tcp:1.2.3"])
def test_wildcards_and_names_are_no_places(place):
    with pytest.raises(SpecError, match="is no place to listen at"):
        address_of(place)


def test_an_address_of_another_host_is_refused_with_where_to_say_it():
    with pytest.raises(SpecError, match=r"can't listen at tcp://192\.0\.2\.77") as caught:
        ZmqInbox("tcp:192.0.2.77", keys=KEYS).open()
    assert "channels: {host: ...}" in caught.value.now


def test_a_key_is_written_for_its_owner_alone_and_reads_back(tmp_path):
    path = tmp_path / "new" / "cluster.key"
    assert CliRunner().invoke(cli, ["keys", str(path)]).exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = read_keys(path)
    assert keys.secret not in repr(keys)
    again = CliRunner().invoke(cli, ["keys", str(path)])
    assert again.exit_code == 2
    assert "exists already" in again.output
    assert read_keys(path) == keys


def test_a_key_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "cluster.key"
    write_keys(path, KEYS)
    path.chmod(0o640)
    with pytest.raises(SpecError, match=r"others than you can read the key .*\n.*chmod 600"):
        read_keys(path)


@pytest.mark.parametrize("body", [b"", b"m2flow key 1\npublic abc\nsecret def\n", b"\xff" * 50, b"public x\n" * 9])
def test_what_is_no_key_is_refused(tmp_path, body):
    path = tmp_path / "cluster.key"
    path.touch(mode=0o600)
    path.write_bytes(body)
    with pytest.raises(SpecError, match="is no key of m2flow"):
        read_keys(path)
    with pytest.raises(SpecError, match=r"can't read the key .*No such file"):
        read_keys(tmp_path / "none.key")


def judged(sample: Sample) -> float:
    return float(sample.num_tokens)


@flow
def loop() -> None:
    policy, judge, prompts = Policy("fake"), Reward(judged), Dataset([{"prompt": str(i)} for i in range(9)])
    for _ in steps(2):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=5)
        policy.update(responses, judge.score(responses))


def test_a_run_over_channels_with_a_key_gives_the_same_answer(tmp_path):
    write_keys(tmp_path / "cluster.key", KEYS)
    runs = RunSettings(runs_dir=str(tmp_path / "runs"))
    digests = set()
    for channels in (ChannelSpec(transport="tcp"), ChannelSpec(transport="tcp", keys=str(tmp_path / "cluster.key"))):
        spec = ClusterSpec(
            device="cpu", placement="split", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"), channels=channels
        )
        summary = Run(loop, {}, spec, runs).execute()
        digests.add((summary.samples_sha256, summary.weights_sha256))
    assert len(digests) == 1
