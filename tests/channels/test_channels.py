"""Every kind of channel keeps the contract; and what only one between processes can show."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from m2flow.channels import zeromq
from m2flow.channels.channel import Inbox, MemoryInbox, MemoryOutbox, Outbox, Parcel
from m2flow.channels.codec import encode
from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.channels.process_groups import PairReceiver, PairSender
from m2flow.channels.shared_memory import Arena
from m2flow.channels.zeromq import wait
from m2flow.engines.servers.inference_server import free_ports
from m2flow.errors import BrokenChannel, ChannelClosed, DecodeError, PortInUse, SpecError
from m2flow.testing.channel_suite import CHANNEL_CHECKS, Maker, assert_same_parcel, parcel_of, receive_all

_PEER = str(Path(__file__).parents[1] / "support" / "channel_peer.py")


class MemoryMaker(Maker):
    def inbox(self, *, max_parcels: int) -> Inbox:
        return MemoryInbox(max_parcels=max_parcels)

    def outbox(self, *, max_parcels: int, timeout_s: float) -> Outbox:
        return MemoryOutbox(timeout_s=timeout_s)


class ZmqMaker(Maker):
    def __init__(self, place: str) -> None:
        self._place = place

    def inbox(self, *, max_parcels: int) -> Inbox:
        return ZmqInbox(self._place, max_parcels=max_parcels)

    def outbox(self, *, max_parcels: int, timeout_s: float) -> Outbox:
        return ZmqOutbox("test", max_parcels=max_parcels, timeout_s=timeout_s)


class SharedMaker(ZmqMaker):
    """Large columns in shared memory."""

    def outbox(self, *, max_parcels: int, timeout_s: float) -> Outbox:
        arena = Arena(f"m2flow-test-{os.getpid()}-{secrets.token_hex(4)}", max_bytes=1 << 30)
        return _LendingOutbox("test", max_parcels=max_parcels, timeout_s=timeout_s, arena=arena)


class PairMaker(ZmqMaker):
    """Large columns over Gloo."""

    def inbox(self, *, max_parcels: int) -> Inbox:
        return ZmqInbox(self._place, max_parcels=max_parcels, pairs=PairReceiver())

    def outbox(self, *, max_parcels: int, timeout_s: float) -> Outbox:
        return _PairOutbox("test", max_parcels=max_parcels, timeout_s=timeout_s, pairs=PairSender())


class _PairOutbox(ZmqOutbox):
    def send(self, address: str, parcel: Parcel) -> None:
        self.prefer(address, "torch gloo")
        super().send(address, parcel)


class _LendingOutbox(ZmqOutbox):
    def send(self, address: str, parcel: Parcel) -> None:
        self.prefer(address, "shared memory")
        super().send(address, parcel)


MAKERS = {
    "memory": MemoryMaker(),
    "ipc": ZmqMaker("ipc:"),
    "tcp": ZmqMaker("tcp"),
    "shared memory": SharedMaker("ipc:"),
    "gloo": PairMaker("ipc:"),
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_channel(check: Callable[[Maker], None], maker: Maker) -> None:
    check(maker)


@pytest.mark.parametrize("place", ["ipc:", "tcp"])
def test_parcels_of_another_process_arrive_though_it_ends_at_once(place: str) -> None:
    inbox = ZmqInbox(place)
    with subprocess.Popen([sys.executable, _PEER, "send", inbox.open(), "40"]) as sender:
        for i, parcel in enumerate(receive_all(inbox, 40)):
            assert_same_parcel(parcel, parcel_of(i, num_bytes=10 ** (i % 7)))
        assert sender.wait() == 0
    inbox.close()


@pytest.mark.parametrize("place", ["ipc:", "tcp"])
def test_a_receiver_that_is_killed_breaks_the_channel(place: str) -> None:
    directory = zeromq.private_directory()
    place += directory if place == "ipc:" else ""
    with subprocess.Popen([sys.executable, _PEER, "receive", place], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        address = receiver.stdout.readline().strip()
        outbox = ZmqOutbox(max_parcels=20, timeout_s=240.0)
        outbox.send(address, parcel_of(0))
        assert receiver.stdout.readline() == "received\n"
        receiver.send_signal(signal.SIGKILL)
        receiver.wait()

    def send_until_it_breaks() -> None:
        for i in range(1, 100):  # Some may still leave, up to what has room in a queue: the system tells of the death a little later.
            outbox.send(address, parcel_of(i))

    with pytest.raises(BrokenChannel, match="is gone") as caught:
        send_until_it_breaks()
    assert address in str(caught.value)
    outbox.close(drain_s=0.0)
    shutil.rmtree(directory)


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        inbox = ZmqInbox(f"tcp:{port}")
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 is taken") as caught:
            inbox.open()
        assert "ss -ltnp" in caught.value.now
        inbox.close()


def test_a_closed_inbox_frees_its_port() -> None:
    (port,) = free_ports(1)  # Of those that are given to whoever asks for any, somebody could be given it meanwhile.
    first = ZmqInbox(f"tcp:{port}")
    address = first.open()
    first.close()
    second = ZmqInbox(f"tcp:{port}")
    assert second.open() == address
    second.close()


def test_an_inbox_on_tcp_listens_on_the_loopback_interface_only() -> None:
    inbox = ZmqInbox("tcp")
    assert inbox.open().startswith("tcp://127.0.0.1:")
    inbox.close()


def test_sockets_lie_in_a_directory_that_only_we_can_enter_and_leave_with_it() -> None:
    inbox = ZmqInbox("ipc:")
    path = Path(inbox.open().removeprefix("ipc://"))
    assert path.is_socket()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    inbox.close()
    assert not path.parent.exists()


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "s"
    shared.mkdir(mode=0o755)
    os.chmod(shared, 0o755)
    with pytest.raises(SpecError, match="only you can enter"):
        ZmqInbox(f"ipc:{shared}").open()


def test_a_directory_that_is_missing_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"can't listen in .*/gone: No such file"):
        ZmqInbox(f"ipc:{tmp_path}/gone").open()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_path_that_the_system_cannot_bind_is_refused_before_it_is_tried(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="longer than 106 bytes"):
        ZmqInbox(f"ipc:{tmp_path}/{'d' * 100}").open()
    assert list(tmp_path.iterdir()) == []


def test_socket_paths_stay_short_where_the_temporary_directory_is_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    inbox = ZmqInbox("ipc:")
    assert len(inbox.open().removeprefix("ipc://")) < 107
    inbox.close()


@pytest.mark.parametrize("place", ["", "udp", "tcp:http", "tcp:0.0.0.0:5555", "tcp:70000", "ipc"])
def test_what_is_no_place_is_refused(place: str) -> None:
    with pytest.raises(SpecError, match="no place to listen at"):
        ZmqInbox(place).open()


def test_bytes_that_are_no_parcel_cost_no_parcel_around_them() -> None:
    inbox = ZmqInbox("tcp")
    address = inbox.open()
    outbox = ZmqOutbox()
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(address)
        outbox.send(address, parcel_of(1))
        assert [p.call for p in receive_all(inbox, 1)] == [1]
        stranger.send_multipart([b"no", b"parcel"])
        with pytest.raises(DecodeError):
            inbox.receive(30.0)
        outbox.send(address, parcel_of(2))
        assert [p.call for p in receive_all(inbox, 1)] == [2]
    outbox.close()
    inbox.close()


def test_parcels_before_a_broken_one_are_given_before_the_error_and_waiting_does_not_miss_it() -> None:
    inbox = ZmqInbox("tcp")
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.connect(inbox.open())
        for i in range(2):
            sender.send_multipart(encode(parcel_of(i)))
        sender.send(b"broken")
        calls: list[int] = []
        has_failed = False
        while not has_failed:
            wait([inbox], 3600.0)
            try:
                calls += [parcel.call for parcel in inbox.receive(0.0)]
            except DecodeError:
                has_failed = True
        assert calls == [0, 1]
        sender.send_multipart(encode(parcel_of(2)))
        assert [parcel.call for parcel in receive_all(inbox, 1)] == [2]
    inbox.close()


def test_wait_returns_when_any_of_its_inboxes_has_a_parcel() -> None:
    inboxes = [ZmqInbox("ipc:"), ZmqInbox("tcp")]
    addresses = [inbox.open() for inbox in inboxes]
    outbox = ZmqOutbox()
    for inbox, address in zip(inboxes, addresses, strict=True):
        thread = threading.Thread(target=outbox.send, args=(address, parcel_of(7)))
        thread.start()
        wait(inboxes, 30.0)
        assert [parcel.call for parcel in inbox.receive(0.0)] == [7]
        thread.join()
    outbox.close()
    for inbox in inboxes:
        inbox.close()
    with pytest.raises(ChannelClosed):
        wait(inboxes, 0.0)


def test_two_inboxes_of_a_process_cannot_have_one_name() -> None:
    first, second = MemoryInbox("trainer"), MemoryInbox("trainer")
    assert first.open() == "memory://trainer"
    with pytest.raises(PortInUse):
        second.open()
    second.close()
    outbox = MemoryOutbox()
    outbox.send("memory://trainer", parcel_of(1))
    assert len(first.receive(0.0)) == 1
    first.close()


@pytest.mark.parametrize("place", ["ipc:", "tcp"])
def test_a_process_that_fails_with_parcels_unsent_ends_with_its_own_error(place: str) -> None:
    # Uncopied frames that were freed under ZeroMQ's thread would end it with SIGABRT or SIGSEGV, though only now and then;
    # so the order of the hooks is looked at too (they are called in reverse).
    code = f"""
import atexit
register, hooks = atexit.register, []
def watch(hook, *rest):
    hooks.append(hook.__qualname__)
    return register(hook, *rest)
atexit.register = watch
from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.testing.channel_suite import parcel_of
inbox, outbox = ZmqInbox("{place}"), ZmqOutbox()
address = inbox.open()
for i in range(60):
    outbox.send(address, parcel_of(i, num_bytes=1 << 20))
print(*[hook for hook in hooks if hook in ("GarbageCollector._atexit", "ZmqOutbox.close")])
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=240, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.split()) == (3, "", ["GarbageCollector._atexit", "ZmqOutbox.close"])


def test_a_process_that_closes_nothing_leaves_no_directory_behind(tmp_path: Path) -> None:
    code = "from m2flow.channels.parcels import ZmqInbox; inbox = ZmqInbox('ipc:'); print(inbox.open()); raise SystemExit(3)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], timeout=240, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 3
    assert not Path(done.stdout.strip().removeprefix("ipc://")).parent.exists()


def test_a_process_that_drops_its_link_with_messages_unsent_still_ends() -> None:
    code = """
from m2flow.channels.zeromq import LinkDialer
link = LinkDialer()
link.open("tcp://127.0.0.1:1", "worker", "token")
link.send(b"to nobody")
del link
"""
    subprocess.run([sys.executable, "-c", code], timeout=240, check=True)
