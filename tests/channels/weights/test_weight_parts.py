"""The parts of a weight sync by themselves: checksums, buckets, changes."""

from __future__ import annotations

import contextlib
import threading

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from m2flow.channels.weights import tensors as sums
from m2flow.channels.weights.payload import (
    Change,
    Changes,
    Content,
    TensorEntry,
    applied,
    laid_out,
    padded,
    receive_buckets,
    send_buckets,
    unpack_buckets,
)
from m2flow.channels.weights.tensors import checksum, checksum_on_device, copy_with_checksum
from m2flow.errors import BrokenChannel, DecodeError


def test_the_checksum_sees_each_bit_each_place_and_the_order() -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, 5 * sums.ROW_BYTES + 123, np.uint8)
    known = {checksum(raw)}
    for _ in range(200):
        changed = raw.copy()
        changed[rng.integers(len(raw))] ^= 1 << rng.integers(8)
        known.add(checksum(changed))
    swapped = raw.reshape(-1).copy()
    swapped[: sums.ROW_BYTES], swapped[sums.ROW_BYTES : 2 * sums.ROW_BYTES] = (
        raw[sums.ROW_BYTES : 2 * sums.ROW_BYTES],
        raw[: sums.ROW_BYTES],
    )
    known |= {checksum(swapped), checksum(raw[:-1]), checksum(np.append(raw, np.uint8(0))), checksum(np.zeros(64, np.uint8))}
    assert len(known) == 205


def test_the_checksum_sees_two_flipped_signs_in_a_row() -> None:
    """Modulo 2^64 two changes of a word's highest bit cancel in a sum with odd keys; so do rows with such words exchanged."""
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    known = {checksum(values.view(np.uint8))}
    for i in range(1, 400, 2):  # Signs of a word's upper half, two at a time.
        flipped = values.copy()
        flipped[i] *= -1
        flipped[i + 2] *= -1
        known.add(checksum(flipped.view(np.uint8)))
    assert len(known) == 201


@pytest.mark.parametrize("size", [0, 1, 7, sums.ROW_BYTES - 1, sums.ROW_BYTES, 40 * sums.ROW_BYTES + 5, 1100 * sums.ROW_BYTES + 64])
def test_copying_and_torch_give_the_same_checksum(size: int) -> None:
    raw = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    target = np.zeros(size, np.uint8)
    assert checksum(raw) == copy_with_checksum(raw, target) == checksum_on_device(torch.from_numpy(raw.copy()))
    assert np.array_equal(raw, target)
    assert checksum_on_device(torch.from_numpy(np.append(np.uint8(0), raw))[1:]) == checksum(raw)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_checksum() -> None:
    raw = torch.randint(0, 256, (9_000 * sums.ROW_BYTES + 77,), dtype=torch.uint8)
    assert checksum_on_device(raw.cuda()) == checksum(raw.numpy())


@given(
    st.lists(npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=50), min_size=1, max_size=6), st.integers(1, 4000), st.data()
)
@settings(max_examples=60, deadline=None)
def test_a_stream_of_buckets_gives_the_tensors_again(sizes: list[tuple[int, ...]], bucket_bytes: int, data: st.DataObject) -> None:
    entries = laid_out((f"w{i}", "float32", shape) for i, shape in enumerate(sizes))
    num_bytes = entries[-1].offset + padded(entries[-1].num_bytes)
    body = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    sent: list[bytes] = []
    cut = sorted(data.draw(st.lists(st.integers(0, num_bytes), max_size=4)))
    blocks = [body[a:b] for a, b in zip([0, *cut], [*cut, num_bytes], strict=True)]
    send_buckets(blocks, lambda bucket: sent.append(bucket.tobytes()), bucket_bytes)
    assert all(len(bucket) == bucket_bytes for bucket in sent[:-1])
    stream = iter(b"".join(sent))

    def receive(into: np.ndarray) -> None:
        into[:] = np.frombuffer(bytes(next(stream) for _ in range(len(into))), np.uint8)

    got = {
        entry.name: raw.tobytes() for entry, raw in unpack_buckets(receive_buckets(receive, num_bytes, bucket_bytes), entries, num_bytes)
    }
    assert got == {entry.name: body[entry.offset :][: entry.num_bytes].tobytes() for entry in entries}


def test_a_bucket_is_not_filled_again_while_it_is_looked_at() -> None:
    third = threading.Event()
    numbers = iter(range(1, 6))

    def receive(into: np.ndarray) -> None:
        number = next(numbers)
        into[:] = number
        if number == 3:
            third.set()

    for number, bucket in enumerate(receive_buckets(receive, 500, 100), 1):
        assert number > 1 or not third.wait(0.2)
        assert (bucket == number).all()


def test_errors_on_either_side_of_a_stream_are_raised_and_leave_no_thread() -> None:
    def refuse(bucket: np.ndarray) -> None:
        raise BrokenChannel("gone")

    with pytest.raises(BrokenChannel, match="gone"):
        send_buckets([np.zeros(10_000, np.uint8)], refuse, 100)
    with pytest.raises(BrokenChannel, match="gone"):
        list(receive_buckets(refuse, 1000, 100))
    left = receive_buckets(lambda into: None, 1000, 100)
    next(left)
    left.close()
    for thread in threading.enumerate():
        if thread.name.startswith("m2flow-bucket"):
            thread.join(240)
            assert not thread.is_alive()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_no_change_of_a_tensor_is_refused(data: st.DataObject) -> None:
    """Whatever a change says, it is refused or gives as many bytes as the tensor has."""
    body = np.frombuffer(data.draw(st.binary(min_size=0, max_size=400)), np.uint8)
    entry = TensorEntry("w", "float32", (data.draw(st.integers(0, 40)),), 0, 0)
    kind = data.draw(st.sampled_from(["mask", "offsets", "whole", "other"]))
    change = Change("w", kind, data.draw(st.integers(-2, 50)), data.draw(st.sampled_from([-64, 0, 3, 64, 1 << 40])))
    with contextlib.suppress(DecodeError):
        assert len(applied(entry, change, body, np.zeros(entry.num_bytes, np.uint8))) == entry.num_bytes


@pytest.mark.parametrize(("share", "kind"), [(0.001, "offsets"), (0.3, "mask"), (1.0, "whole")])
def test_changes_take_the_smallest_form_and_more_than_one_block(share: float, kind: str) -> None:
    before = np.random.default_rng(0).integers(0, 1 << 16, 200_000, np.uint16)
    now = before ^ (np.random.default_rng(1).random(len(before)) < share)
    changes = Changes(float("inf"), hopeless=1.0)
    changes.add("same", "bfloat16", before.view(np.uint8), before.view(np.uint8))
    changes.add("w", "bfloat16", before.view(np.uint8), now.astype(np.uint16).view(np.uint8))
    result = changes.result()
    assert result is not None
    found, body = result
    assert [(change.name, change.kind, change.num) for change in found] == [("w", kind, int((before != now).sum()))]
    entry = TensorEntry("w", "bfloat16", (200_000,), 0, 0)
    assert np.array_equal(applied(entry, found[0], body, before.view(np.uint8)).view(np.uint16), now)


def test_content_survives_the_wire() -> None:
    content = Content(3, 2, 10, (TensorEntry("w", "float32", (1,), 0, 1 << 63),), (("a", "w"),), (Change("w", "mask", 1, 0),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(content), type=Content) == content
