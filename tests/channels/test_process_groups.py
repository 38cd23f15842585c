"""Columns over torch.distributed, between processes: who dies in the middle disturbs nobody else, and what was forged is refused."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from m2flow.channels import zeromq
from m2flow.channels.codec import FRAME_BYTES, encode
from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.channels.process_groups import PairReceiver, PairSender, PairTransfer, open_store
from m2flow.errors import BrokenChannel, ChannelError, DecodeError
from m2flow.testing.channel_suite import assert_same_parcel, parcel_of, receive_all

_PEER = str(Path(__file__).parents[1] / "support" / "channel_peer.py")
PATIENCE_S = 240.0


@pytest.mark.slow
@pytest.mark.parametrize("num_whole", [0, 2], ids=["before it was met", "in the middle"])
def test_a_sender_that_dies_after_a_head_breaks_its_channel_alone(num_whole: int) -> None:
    inbox = ZmqInbox("ipc:", pairs=PairReceiver())
    address = inbox.open()
    with subprocess.Popen([sys.executable, _PEER, "pass", address, str(num_whole)], stdout=subprocess.PIPE, text=True) as sender:

        def kill_once_it_has_sent() -> None:
            assert sender.stdout is not None
            assert sender.stdout.readline() == "sent\n"
            sender.kill()

        killer = threading.Thread(target=kill_once_it_has_sent)
        killer.start()
        if not num_whole:
            killer.join()
            sender.wait()
        for i, parcel in enumerate(receive_all(inbox, num_whole)):
            assert_same_parcel(parcel, parcel_of(i, num_bytes=1 << 20))
        if num_whole:
            with pytest.raises(BrokenChannel, match="rollout-0 is gone"):
                inbox.receive(PATIENCE_S)
        killer.join()
        sender.wait()
        assert inbox.take() == []
    outbox = ZmqOutbox()
    outbox.send(address, parcel_of(7, sender="b"))
    assert [parcel.call for parcel in receive_all(inbox, 1)] == [7]
    outbox.close()
    inbox.close()


@pytest.mark.slow
def test_a_receiver_that_is_killed_breaks_the_channel() -> None:
    directory = zeromq.private_directory()
    with subprocess.Popen([sys.executable, _PEER, "receive", f"ipc:{directory}"], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        address = receiver.stdout.readline().strip()
        outbox = ZmqOutbox(max_parcels=20, timeout_s=240.0, pairs=PairSender())
        outbox.prefer(address, "torch gloo")
        outbox.send(address, parcel_of(0, num_bytes=1 << 20))
        assert receiver.stdout.readline() == "received\n"
        receiver.send_signal(signal.SIGKILL)
        receiver.wait()

    def send_until_it_breaks() -> None:
        for i in range(1, 100):
            outbox.send(address, parcel_of(i, num_bytes=1 << 20))

    with pytest.raises(BrokenChannel, match="is gone"):
        send_until_it_breaks()
    outbox.close()
    shutil.rmtree(directory)


def test_an_inbox_that_takes_no_columns_so_says_so_and_goes_on() -> None:
    inbox, outbox = ZmqInbox("ipc:"), ZmqOutbox(pairs=PairSender())
    address = inbox.open()
    outbox.prefer(address, "torch gloo")
    outbox.send(address, parcel_of(0, num_bytes=1 << 20))
    with pytest.raises(DecodeError, match="which this inbox does not take"):
        inbox.receive(PATIENCE_S)
    outbox.prefer(address, "zmq ipc")
    outbox.send(address, parcel_of(1, num_bytes=1 << 20))
    assert [parcel.call for parcel in receive_all(inbox, 1)] == [1]
    inbox.close()
    outbox.close()


@pytest.mark.parametrize(
    ("transfer", "match"),
    [
        (PairTransfer("192.0.2.7:5000", "pair-1", "gloo", (9,)), "by way of"),
        (PairTransfer("nowhere", "pair-1", "gloo", (9,)), "by way of"),
        (PairTransfer("127.0.0.1:5000", "", "gloo", (9,)), "by way of"),
        (PairTransfer("127.0.0.1:5000", "pair-1", "gloo", (FRAME_BYTES + 1,)), "frames of up to"),
        (PairTransfer("127.0.0.1:5000", "pair-1", "gloo", (-1,)), "frames of up to"),
        (PairTransfer("127.0.0.1:5000", "pair-1", "nccl", (9,)), "has no GPU"),
    ],
)
def test_a_forged_passage_is_refused_before_anybody_is_asked(transfer: PairTransfer, match: str) -> None:
    inbox = ZmqInbox("ipc:", pairs=PairReceiver())
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(inbox.open())
        stranger.send_multipart([b"m2p" + msgspec.msgpack.encode(transfer), encode(parcel_of(0))[0]])
        with pytest.raises(DecodeError, match=match):
            inbox.receive(PATIENCE_S)
    inbox.close()


def test_a_sender_that_lives_and_can_t_be_met_is_an_error_not_a_parcel_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.channels.process_groups._RENDEZVOUS_TIMEOUT_S", 0.2)
    monkeypatch.setattr("m2flow.channels.parcels._DEATH_GRACE_S", 0.2)
    inbox = ZmqInbox("ipc:", pairs=PairReceiver())
    with socket.socket() as silent, zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        silent.bind(("127.0.0.1", 0))  # Nobody else can listen there meanwhile.
        stranger.connect(inbox.open())
        transfer = PairTransfer(f"127.0.0.1:{silent.getsockname()[1]}", "pair-1", "gloo", (9,))
        stranger.send_multipart([b"m2p" + msgspec.msgpack.encode(transfer), encode(parcel_of(0))[0]])
        with pytest.raises(ChannelError, match="their sender is alive"):
            inbox.receive(PATIENCE_S)
    inbox.close()


def test_a_store_listens_where_it_is_told_to_and_nowhere_else() -> None:
    store = open_store("127.0.0.1", 0, is_server=True, timeout_s=5.0)
    own = psutil.Process().net_connections("tcp")  # Another process may have the same port at another address.
    listening = [found.laddr for found in own if found.status == psutil.CONN_LISTEN]
    assert [tuple(place) for place in listening if place.port == store.port] == [("127.0.0.1", store.port)]


@pytest.mark.gpu
def test_columns_go_from_gpu_to_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each end")
    inbox, outbox = ZmqInbox("ipc:", pairs=PairReceiver(device="cuda:1")), ZmqOutbox(pairs=PairSender(device="cuda:0"))
    address = inbox.open()
    outbox.prefer(address, "torch nccl")
    for i in range(5):
        outbox.send(address, parcel_of(i, num_bytes=10**i))
    for i, parcel in enumerate(receive_all(inbox, 5)):
        assert_same_parcel(parcel, parcel_of(i, num_bytes=10**i))
    outbox.close(drain_s=30.0)
    inbox.close()
