"""Hostile bytes: whatever comes in, a decoder gives a value or a `DecodeError`, and takes no memory that the bytes do not fill.

Every decoder that a channel or a control link has: parcels, loans and ends of a data socket, batches of segment files, messages in both
directions. Some thousands of inputs here, a million with `--long`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow.channels import codec
from m2flow.channels.parcels import ZmqInbox, ZmqOutbox, _loan_of, _pair_transfer_of, _receive_frames
from m2flow.channels.process_groups import PairReceiver, PairTransfer
from m2flow.channels.shared_memory import Borrower, Loan
from m2flow.channels.zeromq import MAX_MESSAGE_BYTES, LinkDialer, LinkListener, new_keys, new_secret, wait
from m2flow.errors import BrokenChannel, ChannelError, DecodeError
from m2flow.micro.protocol import messages as m
from m2flow.micro.worker.rank_group import End, Here, RankGroup, RankGroupSettings, heard, say
from m2flow.testing.channel_suite import parcel_of, receive_all

NUM_INPUTS = 12_000
NUM_LONG = 1_000_000


def _borrow(data: bytes) -> object:
    return Borrower().borrow(_loan_of(data))


def _parcel(data: bytes) -> object:
    return codec.decode([data])


def _passage(data: bytes) -> object:
    return PairReceiver().receive(_pair_transfer_of(data))


_PAIR_TRANSFER = b"m2p" + msgspec.msgpack.encode(PairTransfer("127.0.0.2:5000", "pair-0123456789abcdef", "gloo", (70_000, 12)))
_LOAN = b"m2l" + msgspec.msgpack.encode(Loan("m2flow-hostile", 3, (70_000, 12)))
DECODERS: dict[str, tuple[Callable[[bytes], object], list[bytes]]] = {
    "parcel": (_parcel, [b"".join(codec.encode(parcel_of(i, num_samples=i % 4))) for i in range(8)]),
    "batch of a segment": (codec.decode_batch, [codec.encode_batch(parcel_of(i, num_bytes=3 * i).batch) for i in range(4)]),
    "loan": (_borrow, [_LOAN]),
    "transfer": (_passage, [_PAIR_TRANSFER]),
    "message to a worker": (
        m.decode_to_worker,
        [
            m.encode(message)
            for message in (m.Push(1, [1, 2, 3], "x"), m.Peers({"a": "tcp://b"}), m.Generate(1, 2, [3], [4], ["w"], 2), m.Stop())
        ],
    ),
    "message to the controller": (
        m.decode_to_controller,
        [m.encode(message) for message in (m.TaskDone(4, {"a": 1.5}), m.Goodbye(), m.Aborted(1, [2], [3], [4], [], ("f", 1, 2, 3)))],
    ),
}
EXPECTED = (DecodeError, BrokenChannel)
"""The latter of a loan whose lender is gone, or of a transfer to nobody."""

_NASTY = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
    b"\xc1",
    b"\x91" * 600,
]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to four things are wrong with it."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(found) + 1)
        how = rng.randrange(7)
        if how == 0 and place < len(found):
            found[place] = rng.randrange(256)
        elif how == 1 and place < len(found):
            found[place] ^= 1 << rng.randrange(8)
        elif how == 2:
            del found[place:]
        elif how == 3:
            found[place:place] = rng.randbytes(rng.randrange(1, 9))
        elif how == 4:
            del found[place : place + rng.randrange(1, 9)]
        elif how == 5:
            found[place : place + 4] = struct.pack("<I", rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, len(found)]))
        else:
            found[place:place] = rng.choice(_NASTY)
    return bytes(found)


def is_refused_cleanly(decode: Callable[[bytes], object], data: bytes) -> None:
    try:
        decode(data)
    except EXPECTED:
        pass
    except BaseException as error:  # The input is what one needs to see.
        pytest.fail(f"{error!r} for {data.hex()}")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", DECODERS)
def test_a_damaged_message_is_a_message_or_a_clean_error(name, request):
    decode, valid = DECODERS[name]
    rng = random.Random(name)
    for number in range((NUM_LONG if request.config.getoption("--long") else NUM_INPUTS) // len(DECODERS)):
        is_refused_cleanly(decode, mutated(valid[number % len(valid)], rng))


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
many = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", DECODERS)
@many
@given(st.binary(max_size=90) | _values.map(msgspec.msgpack.encode))
def test_what_was_never_a_message_is_a_clean_error(name, data):
    decode = DECODERS[name][0]
    for prefix in (b"", b"m2f\1" + struct.pack("<I", len(data)), b"m2l", b"m2p"):
        is_refused_cleanly(decode, prefix + data)


_sizes = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9) | st.sampled_from([2**31, 2**32 - 1, 2**62])


@many
@given(
    st.lists(
        st.tuples(
            st.text(max_size=3),
            st.sampled_from(["dense", "numbers", "text", "json"]),
            st.sampled_from(sorted(codec.DTYPES)),
            st.lists(_sizes, max_size=10),
        ),
        max_size=4,
    ),
    _sizes,
    _sizes,
    st.lists(st.binary(max_size=64), max_size=4),
)
def test_a_forged_header_is_a_clean_error(columns, num_rows, inline_bytes, frames):
    header = msgspec.msgpack.encode([1, "liar", num_rows, inline_bytes, columns])
    head = codec._PREFIX.pack(b"m2f", codec.FORMAT, len(header)) + header + bytes(-len(header) % 8)
    with contextlib.suppress(DecodeError):
        codec.decode([head + b"".join(frames[:1]), *frames[1:]])


_LIMITED = """
import resource, struct, sys
import msgspec
import numpy
from m2flow.channels import codec
from m2flow.channels.parcels import _loan_of
from m2flow.errors import DecodeError
from m2flow.micro.protocol import messages as m
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
try:
    bytearray(128 << 20)
    raise SystemExit("the limit does not hold")
except MemoryError:
    pass
huge = [b"\\xdd\\x7f\\xff\\xff\\xff", b"\\xdf\\x7f\\xff\\xff\\xff", b"\\xc6\\x7f\\xff\\xff\\xff", b"\\xdb\\x7f\\xff\\xff\\xff"]
inputs = []
for kind in ("dense", "numbers", "text", "json"):
    for shape in ([1 << 40], [1 << 31, 1 << 31], [0, 1 << 62], [1 << 61, 1 << 61, 0]):
        for rows in (0, 1, 1 << 40):
            header = msgspec.msgpack.encode([1, "liar", rows, 1 << 62, [["a", kind, "uint8", shape]]])
            inputs.append((codec.decode_batch, codec._PREFIX.pack(b"m2f", codec.FORMAT, len(header)) + header + bytes(256)))
inputs.append((codec.decode_batch, codec._PREFIX.pack(b"m2f", codec.FORMAT, (1 << 32) - 1) + bytes(64)))
inputs += [(codec.decode_batch, codec._PREFIX.pack(b"m2f", codec.FORMAT, 9) + b"\\x95\\x01\\xa1x" + claim) for claim in huge]
for claim in huge:
    inputs += [(_loan_of, b"m2l\\x93\\xa6abcdef\\x01" + claim), (m.decode_to_worker, b"\\x94\\xa4Push\\x01" + claim + b"\\xa1a")]
    inputs += [(m.decode_to_controller, b"\\x93\\xa8Finished\\x01" + claim), (m.decode_to_worker, b"\\x92\\xa5Peers" + claim)]
for decode, data in inputs:
    try:
        decode(data)
        raise SystemExit(f"{decode.__name__} took {data[:40]!r}")
    except DecodeError:
        pass
print(len(inputs))
"""


def test_sizes_that_are_only_claimed_cost_no_memory():
    done = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr or done.stdout
    assert int(done.stdout) > 60


def test_a_frame_beyond_the_bound_cuts_its_sender_off_and_disturbs_nobody():
    inbox, outbox = ZmqInbox("tcp"), ZmqOutbox()
    address = inbox.open()
    outbox.send(address, parcel_of(1))
    assert [parcel.call for parcel in receive_all(inbox, 1)] == [1]
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.linger = 0
        stranger.connect(address)
        stranger.send(np.zeros(codec.MAX_HEAD_BYTES + 1, np.uint8), copy=False)
        assert inbox.receive(0.3) == []
        outbox.send(address, parcel_of(2))
        assert [parcel.call for parcel in receive_all(inbox, 1)] == [2]
    outbox.close()
    inbox.close()
    assert codec.FRAME_BYTES <= codec.MAX_HEAD_BYTES < MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "frames",
    [[b"m2l"], [_LOAN], [_LOAN, b"m2f"], [b"m2e\xff\xfe"], [b"m2e" + b"n" * 5000], [b"m2ewho", b"more"], [b""], [b"m2f", b"", b""]],
)
def test_what_no_outbox_sends_is_a_clean_error_and_the_next_parcel_comes(frames):
    inbox, outbox = ZmqInbox("ipc:"), ZmqOutbox()
    address = inbox.open()
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(address)
        stranger.send_multipart(frames)
        is_loan_of_nobody = frames[0] == _LOAN
        if is_loan_of_nobody:
            assert inbox.receive(0.2) == []
        else:
            with pytest.raises(DecodeError):
                inbox.receive(30.0)
        outbox.send(address, parcel_of(3))
        assert [parcel.call for parcel in receive_all(inbox, 1)] == [3]
    outbox.close()
    inbox.close()


def test_a_message_of_too_many_frames_is_a_clean_error_and_the_next_parcel_comes():
    inbox, outbox = ZmqInbox("ipc:"), ZmqOutbox()
    address = inbox.open()
    with zmq.Context() as context, context.socket(zmq.PUSH) as worker:
        worker.connect(address)
        for _ in range(2):
            for frame in codec.encode(parcel_of(1)) + [b"x"] * (codec.MAX_FRAMES + 10):
                worker.send(frame, zmq.SNDMORE)
            worker.send(b"x")
        wait([inbox], 30.0)
        assert len(_receive_frames(inbox._opened())[0]) == codec.MAX_FRAMES + 1
        with pytest.raises(DecodeError, match="more than 65,536 frames"):
            inbox.receive(30.0)
        outbox.send(address, parcel_of(2))
        assert [parcel.call for parcel in receive_all(inbox, 1)] == [2]
    outbox.close()
    inbox.close()


def test_columns_that_make_too_many_frames_are_refused_where_they_are_sent(monkeypatch):
    monkeypatch.setattr(codec, "MAX_FRAMES", 2)
    head, large = b"head", memoryview(bytes(2 * codec.FRAME_BYTES))
    assert len(codec.cut([head, large[: codec.FRAME_BYTES]])) == 2
    with pytest.raises(ChannelError, match="3 frames; at most 2"):
        codec.cut([head, large])


_UNVERSIONED = b"\x01\x00"
"""What a peer of ZMTP 1.0 says first: an empty identity."""
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""What a peer of ZMTP 3.0 says first."""
_PLAIN = _GREETING.replace(b"NULL" + bytes(1), b"PLAIN")
_RAW = [
    _UNVERSIONED + b"\x02\x00A",
    _UNVERSIONED + b"\x02\x01A\x02\x00B",
    _UNVERSIONED + b"\x04\x00m2f",
    _UNVERSIONED + b"\x04\x00m2e",
    _UNVERSIONED + b"\x01\x00" * 40,
    _UNVERSIONED + b"\xff" + b"\xff" * 8 + b"\x00A",
    b"\xff" * 64,
    _GREETING,
    _GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH" + b"\x00\x01A",
    _GREETING + b"\x04\x05\x05READ\xff",
    _PLAIN + b"\x04\x0a\x05HELLO\x02\xff\xfe\x01\xff",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x00",
    b"",
]


def _say_raw(address: str, raw: bytes) -> socket.socket:
    """Connect past ZeroMQ and say this; a socket that is bound and does not listen yet is waited for."""
    kind, _, place = address.partition("://")
    if kind == "ipc":
        peer = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + 30.0
        while (refused := peer.connect_ex(place)) == errno.ECONNREFUSED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not refused, os.strerror(refused)
    else:
        host, _, port = place.rpartition(":")
        peer = socket.create_connection((host, int(port)))
    with contextlib.suppress(OSError):  # It has turned us away by now.
        peer.sendall(raw)
    return peer


@pytest.mark.parametrize("keys", [None, new_secret(), new_keys()], ids=["open", "secret", "encrypted"])
@pytest.mark.parametrize("place", ["ipc:", "tcp"])
def test_whatever_bytes_a_stranger_says_an_inbox_takes_the_next_parcel(place, keys):
    inbox, outbox = ZmqInbox(place, keys=keys), ZmqOutbox("friend", keys=keys)
    address = inbox.open()
    strangers = [_say_raw(address, raw) for raw in _RAW]
    outbox.send(address, parcel_of(3))
    deadline, taken = time.monotonic() + 30.0, []
    while time.monotonic() < deadline and not taken:
        wait([inbox], 1.0)
        taken += inbox.take()
    assert [parcel.call for parcel in taken] == [3]
    while keys is None and inbox.dropped.num < 5 and time.monotonic() < deadline:
        wait([inbox], 1.0)
        assert inbox.take() == []
    assert (inbox.dropped.num >= 5) == (keys is None)
    assert ("a protocol older than ZeroMQ 3" in inbox.dropped.news()) == (keys is None)
    for stranger in strangers:
        stranger.close()
    outbox.close()
    inbox.close()


@pytest.mark.parametrize("place", ["ipc:", "tcp"])
def test_whatever_bytes_a_stranger_says_a_control_link_takes_the_next_message(place):
    listener, dialer = LinkListener("secret", place), LinkDialer()
    address = listener.open()
    strangers = [_say_raw(address, raw) for raw in _RAW]
    dialer.open(address, "worker-0", "secret")
    dialer.send(b"work")
    came: list[tuple[str, bytes]] = []
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline and not (came and listener.dropped.num):
        came += listener.receive(1.0)
    assert came == [("worker-0", b"work")]
    assert "from a peer that has not said hello" in listener.dropped.news()
    for stranger in strangers:
        stranger.close()
    dialer.close()
    listener.close()


def test_whatever_bytes_a_stranger_says_the_ranks_of_a_trainer_meet(tmp_path):
    meeting = str(tmp_path / "rank_group")
    rank_group = RankGroup(RankGroupSettings(num_ranks=2, meeting=meeting), "secret")
    opening = threading.Thread(target=rank_group.open)
    opening.start()
    while not Path(meeting).exists():
        time.sleep(0.01)
    said = [
        b"",
        b"\0",
        b"\xff" * 50,
        struct.pack("!i", 5) + b"hello",
        struct.pack("!i", 20) + b"#CHALLENGE#" + bytes(9),
        struct.pack("!i", -1),
    ]
    strangers = [_say_raw(f"ipc://{meeting}", raw) for raw in said]
    with Client(meeting, "AF_UNIX", authkey=b"secret") as broken:
        broken.send_bytes(b"\xc1 no word")
        with Client(meeting, "AF_UNIX", authkey=b"secret") as absent:
            say(absent, Here(7))
            with Client(meeting, "AF_UNIX", authkey=b"secret") as link:
                say(link, Here(1))
                opening.join(30.0)
                assert not opening.is_alive()
                rank_group.close()
                assert isinstance(heard(link), End)
    for stranger in strangers:
        stranger.close()
