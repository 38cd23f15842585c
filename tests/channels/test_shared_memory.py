"""Buffers in shared memory: lent without a copy on the reader's side, given back when it lets go or dies, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.channels.shared_memory import MAX_BUFFERS, Arena, Borrower, Loan, remove_arenas
from m2flow.errors import BrokenChannel, DecodeError, EndOfStream, SpecError
from m2flow.testing.channel_suite import assert_same_parcel, parcel_of, receive_all

_PEER = str(Path(__file__).parents[1] / "support" / "channel_peer.py")


@pytest.fixture
def name() -> Iterator[str]:
    prefix = f"m2flow-test-{os.getpid()}-{secrets.token_hex(4)}"
    yield prefix
    assert remove_arenas(prefix) == 0, "files are left in shared memory"


def filled(size: int, value: int) -> memoryview:
    return memoryview(np.full(size, value, np.uint8))


def test_a_borrower_sees_what_was_lent_and_can_t_write_it(name):
    arena, borrower = Arena(name), Borrower()
    loan = arena.lend([filled(100_000, 1), filled(7, 2), filled(0, 0)], "b")
    one, two, none = borrower.borrow(loan)
    assert (bytes(one), bytes(two), bytes(none)) == (b"\1" * 100_000, b"\2" * 7, b"")
    assert one.readonly
    with pytest.raises(TypeError):
        one[0] = 3
    arena.close()
    assert bytes(two) == b"\2" * 7


def test_a_buffer_comes_back_with_the_last_view_of_it_and_is_used_again(name):
    arena, borrower = Arena(name), Borrower()
    loan = arena.lend([filled(100_000, 1)], "b")
    (view,) = borrower.borrow(loan)
    part = np.frombuffer(view, np.uint8)[10:20]
    del view
    other = arena.lend([filled(100_000, 2)], "b")
    assert other.buffer != loan.buffer
    assert part.tolist() == [1] * 10
    del part
    gc.collect()
    again = arena.lend([filled(100_000, 3)], "b")
    assert again.buffer == loan.buffer
    assert bytes(borrower.borrow(again)[0]) == b"\3" * 100_000
    arena.close()


def test_a_full_pool_lends_nothing_until_something_comes_back(name):
    arena, borrower = Arena(name, max_bytes=300_000), Borrower()
    loans = [arena.lend([filled(100_000, i)], "b") for i in range(3)]
    assert [loan is None for loan in loans] == [False, False, True]
    views = borrower.borrow(loans[0])
    assert arena.lend([filled(100_000, 9)], "b") is None
    del views
    gc.collect()
    assert arena.lend([filled(100_000, 9)], "b") is not None
    arena.close()


def test_free_buffers_make_room_for_a_larger_one(name):
    arena, borrower = Arena(name, max_bytes=1_000_000), Borrower()
    for _ in range(3):
        loans = [arena.lend([filled(100_000, i)], "b") for i in range(5)]
        for loan in loans:
            borrower.borrow(loan)
    gc.collect()
    assert arena.lend([filled(900_000, 1)], "b") is not None
    assert arena.num_bytes <= 1_000_000
    arena.close()


def test_what_was_on_its_way_to_a_peer_that_is_gone_is_free_again_and_what_a_living_one_reads_is_not(name):
    arena, borrower = Arena(name), Borrower()
    lost, read, other = (arena.lend([filled(100_000, 1)], to) for to in ("gone", "gone", "other"))
    (view,) = borrower.borrow(read)
    assert arena.forget("gone") == 1
    assert arena.num_lent() == 2
    assert arena.lend([filled(100_000, 2)], "x").buffer == lost.buffer
    assert bytes(view) == b"\1" * 100_000
    assert bytes(borrower.borrow(other)[0]) == b"\1" * 100_000
    arena.close()


def test_the_buffers_of_a_reader_that_is_killed_come_back(name):
    outbox = ZmqOutbox(arena=(arena := Arena(name)))
    with subprocess.Popen([sys.executable, _PEER, "hold", "ipc:"], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        address = reader.stdout.readline().strip()
        outbox.prefer(address, "shared memory")
        for i in range(3):
            outbox.send(address, parcel_of(i, num_bytes=1 << 20))
        assert reader.stdout.readline() == "holds 3\n"
        assert arena.num_lent() == 3
        reader.send_signal(signal.SIGKILL)
        reader.wait()
    assert arena.num_lent() == 0
    outbox.close()


def test_a_sender_that_is_killed_breaks_its_channel_after_what_it_had_sent(name):
    inbox = ZmqInbox("ipc:")
    with subprocess.Popen([sys.executable, _PEER, "lend", inbox.open(), name, "5"], stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == "sent\n"
        received = receive_all(inbox, 5)
        sender.send_signal(signal.SIGKILL)
        sender.wait()
    with pytest.raises(BrokenChannel, match="rollout-0 is gone, and had not ended"):
        inbox.receive(30.0)
    assert inbox.receive(0.0) == []
    for i, parcel in enumerate(received):
        assert_same_parcel(parcel, parcel_of(i, num_bytes=1 << 20))
    assert remove_arenas(name) == 6
    inbox.close()


def test_a_parcel_lent_by_a_sender_that_is_gone_with_its_files_is_no_error_but_a_broken_channel(name):
    inbox, outbox = ZmqInbox("ipc:"), ZmqOutbox(arena=Arena(name))
    address = inbox.open()
    outbox.prefer(address, "shared memory")
    outbox.send(address, parcel_of(1))
    receive_all(inbox, 1)
    outbox.send(address, parcel_of(2, num_bytes=1 << 20))
    remove_arenas(name)
    outbox.close()
    with pytest.raises((BrokenChannel, EndOfStream)):
        inbox.receive(30.0)
    inbox.close()


def test_large_columns_are_lent_and_small_ones_sent_and_a_full_pool_is_counted(name):
    inbox, outbox = ZmqInbox("ipc:"), ZmqOutbox(arena=Arena(name, max_bytes=3 << 20))
    address = inbox.open()
    outbox.prefer(address, "shared memory")
    sent = [parcel_of(0), *(parcel_of(i, num_bytes=1 << 20) for i in range(1, 4))]
    received = []
    for parcel in sent:
        outbox.send(address, parcel)
        received += receive_all(inbox, 1)
    for one, other in zip(received, sent, strict=True):
        assert_same_parcel(one, other)
    statistics = outbox.statistics()[address]
    assert (statistics.num_shared_bytes, statistics.num_unshared) == (2 << 20, 2)
    assert inbox.statistics()["rollout-0"].num_shared_bytes == 2 << 20
    outbox.close()
    inbox.close()


def test_a_view_may_be_let_go_of_in_another_thread(name):
    arena, borrower = Arena(name), Borrower()
    held = [borrower.borrow(arena.lend([filled(100_000, i)], "b")) for i in range(8)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert arena.num_lent() == 0
    arena.close()


@pytest.mark.parametrize(
    "forged",
    [
        lambda loan: Loan("../etc/passwd", loan.buffer, loan.sizes),
        lambda loan: Loan(loan.arena, MAX_BUFFERS, loan.sizes),
        lambda loan: Loan(loan.arena, -1, loan.sizes),
        lambda loan: Loan(loan.arena, loan.buffer, (1 << 40,)),
        lambda loan: Loan(loan.arena, loan.buffer, (100, -50)),
    ],
)
def test_a_forged_loan_is_refused(name, forged):
    arena = Arena(name)
    loan = arena.lend([filled(100_000, 1)], "b")
    with pytest.raises(DecodeError):
        Borrower().borrow(forged(loan))
    arena.close()


def test_a_file_of_somebody_else_is_not_borrowed(name):
    arena, borrower = Arena(name), Borrower()
    loan = arena.lend([filled(100_000, 1)], "b")
    path = Path("/dev/shm") / f"{name}.{loan.buffer}.rows"
    target = path.with_name(f"{name}.real.rows")
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(DecodeError, match="can't be borrowed"):
        borrower.borrow(loan)
    target.unlink()
    arena.close()


def test_an_arena_needs_a_name_that_is_a_file_s():
    with pytest.raises(SpecError, match="can't name an arena"):
        Arena("../x")
