"""The wire format of parcels: what goes in comes out, without a copy where promised, and hostile bytes are refused."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from m2flow.channels import codec
from m2flow.channels.channel import Parcel
from m2flow.errors import ChannelError, DecodeError
from m2flow.samples import Batch, Column, Ragged, make_ids

_dtypes = st.sampled_from(sorted(codec.DTYPES)).map(np.dtype)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num_rows = draw(st.integers(0, 5))
    columns: dict[str, Column] = {}
    for name in draw(st.lists(st.text(max_size=6), max_size=4, unique=True)):
        kind = draw(st.sampled_from(["dense", "numbers", "text", "json"]))
        if kind == "dense":
            rest = draw(st.lists(st.integers(0, 3), max_size=2))
            columns[name] = draw(npst.arrays(draw(_dtypes), (num_rows, *rest)))
        elif kind == "numbers":
            dtype = draw(_dtypes)
            lengths = draw(st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows))
            columns[name] = Ragged.of([draw(npst.arrays(dtype, length)) for length in lengths], dtype)
        elif kind == "text":
            columns[name] = Ragged.texts(draw(st.lists(st.text(max_size=5), min_size=num_rows, max_size=num_rows)))
        else:
            columns[name] = Ragged.json([{"row": i} for i in range(num_rows)])
    return Batch(np.array(draw(st.lists(st.integers(0, 2**62), min_size=num_rows, max_size=num_rows)), np.int64), columns)


def assert_same(one: Column, other: Column) -> None:
    assert isinstance(one, Ragged) == isinstance(other, Ragged)
    if isinstance(one, Ragged) and isinstance(other, Ragged):
        assert one.kind == other.kind
        np.testing.assert_array_equal(one.offsets, other.offsets)
        assert_same(one.values, other.values)
    else:
        assert isinstance(one, np.ndarray)
        assert isinstance(other, np.ndarray)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def assert_same_batch(one: Batch, other: Batch) -> None:
    assert_same(one.ids, other.ids)
    assert list(one.columns) == list(other.columns)
    for name in one.columns:
        assert_same(one[name], other[name])


def rollout_parcel(num_samples: int = 3) -> Parcel:
    rows = [np.arange(5 + i) for i in range(num_samples)]
    columns: dict[str, Column] = {
        "tokens": Ragged.of(rows, np.int32),
        "loss_mask": Ragged.of([row > 2 for row in rows], bool),
        "logprobs": Ragged.of([-row / 7 for row in rows], np.float32),
        "seed": np.arange(num_samples, dtype=np.uint64),
        "text": Ragged.texts(["déjà vu"] * num_samples),
    }
    return Parcel(2, Batch(make_ids(2, num_samples), columns), "rollout-0")


def forged(header: object, body: bytes = b"") -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return codec._PREFIX.pack(b"m2f", codec.FORMAT, len(encoded)) + encoded + bytes(-len(encoded) % 8) + body


@given(batches(), st.integers(-(2**40), 2**40), st.text(max_size=8))
def test_a_parcel_comes_back_as_it_was(batch: Batch, call: int, sender: str) -> None:
    parcel = codec.decode(codec.encode(Parcel(call, batch, sender)))
    assert (parcel.call, parcel.sender) == (call, sender)
    assert_same_batch(parcel.batch, batch)


@given(batches())
def test_a_batch_comes_back_from_one_contiguous_piece(batch: Batch) -> None:
    assert_same_batch(codec.decode_batch(codec.encode_batch(batch)), batch)


def test_a_batch_of_large_columns_is_still_one_piece_for_a_file() -> None:
    batch = Batch(make_ids(0, 2), {"hidden": np.ones((2, codec.INLINE_BYTES), np.uint8)})
    assert_same_batch(codec.decode_batch(codec.encode_batch(batch)), batch)


def test_small_columns_share_one_frame() -> None:
    assert len(codec.encode(rollout_parcel())) == 1


def test_a_large_column_is_a_frame_of_its_own_and_is_not_copied_on_either_side() -> None:
    hidden = np.arange(codec.INLINE_BYTES, dtype=np.float32).reshape(2, -1)
    frames = codec.encode(Parcel(0, Batch(make_ids(0, 2), {"hidden": hidden, "reward": np.zeros(2)}), "w"))
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), hidden)
    received = codec.decode(frames).batch
    assert np.shares_memory(received.dense("hidden"), hidden)
    assert_same(received["hidden"], hidden)


def test_decoded_arrays_are_read_only_views_of_the_received_frame() -> None:
    frame = bytearray(codec.encode(rollout_parcel())[0])
    received = codec.decode([frame]).batch
    tokens = received.ragged("tokens").values
    assert np.shares_memory(tokens, np.frombuffer(frame, np.uint8))
    arrays = [received.ids, received.dense("seed"), tokens, received.ragged("tokens").offsets]
    assert not any(array.flags.writeable for array in arrays)


def test_every_array_is_aligned_even_if_the_frame_is_not() -> None:
    data = codec.encode_batch(rollout_parcel().batch)
    for shift in range(8):
        received = codec.decode_batch(memoryview(bytes(shift) + data)[shift:])
        assert_same_batch(received, rollout_parcel().batch)
        assert received.ragged("logprobs").values.flags.aligned
        assert received.ids.flags.aligned


def test_a_strided_column_travels_as_its_values() -> None:
    column = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    assert_same(codec.decode_batch(codec.encode_batch(Batch(make_ids(0, 3), {"c": column})))["c"], np.ascontiguousarray(column))


@pytest.mark.parametrize("column", [np.array([object()]), np.array(["text"]), np.zeros(1, ">i4"), np.zeros(1, "M8[s]"), np.zeros(1, "c8")])
def test_a_type_off_the_list_is_refused_by_the_column_s_name(column: Column) -> None:
    with pytest.raises(ChannelError, match="column 'odd' is of type"):
        codec.encode(Parcel(0, Batch(make_ids(0, 1), {"odd": column}), "w"))


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_columns_of_about_the_size_that_makes_a_frame_of_their_own_come_back(more: int) -> None:
    batch = Batch(make_ids(0, 1), {"hidden": np.arange(codec.INLINE_BYTES + more, dtype=np.uint8).reshape(1, -1)})
    frames = codec.encode(Parcel(0, batch, "w"))
    assert len(frames) == (2 if more > 0 else 1)
    assert_same_batch(codec.decode(frames).batch, batch)


@pytest.mark.parametrize("version", [codec.FORMAT - 1, codec.FORMAT + 1])
def test_another_format_older_or_newer_is_refused_with_both_numbers(version: int) -> None:
    frame = bytearray(codec.encode(rollout_parcel())[0])
    frame[3] = version
    with pytest.raises(DecodeError, match=rf"wire format {version}; .* {codec.FORMAT}\b"):
        codec.decode([frame])


@pytest.mark.parametrize("num_rows", [3, 100])
def test_rows_without_values_come_back(num_rows: int) -> None:
    texts = ["" if row % 2 else str(row) for row in range(num_rows)]
    batch = codec.decode_batch(codec.encode_batch(Batch(make_ids(0, num_rows), {"text": Ragged.texts(texts)})))
    assert [batch.ragged("text").item(row) for row in range(num_rows)] == texts


@pytest.mark.parametrize("change", [b"more", b"", None], ids=["too long", "too short", "one more"])
def test_frames_of_a_large_column_that_are_not_its_bytes_are_refused(change: bytes | None) -> None:
    head, large = map(bytes, codec.encode(Parcel(0, Batch(make_ids(0, 2), {"hidden": np.ones((2, codec.INLINE_BYTES), np.uint8)}), "w")))
    pieces = [large, b"more"] if change is None else [large + change] if change else [large[:-1]]
    with pytest.raises(DecodeError, match=r"column 'hidden'|left over"):
        codec.decode([head, *pieces])
    assert len(codec.decode([head, large[:1000], large[1000:]]).batch) == 2


@given(st.lists(st.binary(max_size=80), max_size=3))
def test_random_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        codec.decode(frames)


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_random_bytes_behind_a_good_prefix_are_refused(header: bytes, body: bytes) -> None:
    with pytest.raises(DecodeError):
        codec.decode([codec._PREFIX.pack(b"m2f", codec.FORMAT, len(header)) + header + body])


def test_every_truncation_and_every_extension_of_a_message_is_refused() -> None:
    frame = bytes(codec.encode(rollout_parcel())[0])
    for length in range(len(frame)):
        with pytest.raises(DecodeError):
            codec.decode([frame[:length]])
    for frames in ([frame + bytes(8)], [frame, b""], [frame, bytes(8)]):
        with pytest.raises(DecodeError, match="left over"):
            codec.decode(frames)


@settings(max_examples=500)
@given(batches(), st.data())
def test_flipped_bits_are_refused_or_give_a_batch_that_holds_together(batch: Batch, data: st.DataObject) -> None:
    frame = bytearray(codec.encode_batch(batch))
    for position in data.draw(st.lists(st.integers(0, 8 * len(frame) - 1), min_size=1, max_size=4)):
        frame[position // 8] ^= 1 << position % 8
    try:
        received = codec.decode_batch(frame)
    except DecodeError:
        return
    for column in received.columns.values():
        assert len(column) == len(received)
        if isinstance(column, Ragged):
            assert sum(len(column.row(i)) for i in range(len(received))) == len(column.values)


def test_a_shape_larger_than_the_message_is_refused_before_anything_is_allocated() -> None:
    columns = [["c", "dense", "float64", [0, 1 << 40, 1 << 40]], ["c", "dense", "int8", [0, -1]], ["c", "dense", "int8", []]]
    for column in columns:
        with pytest.raises(DecodeError, match="shape"):
            codec.decode([forged([0, "w", 0, 1 << 62, [column]])])
    for num_rows in (1 << 40, -1):
        with pytest.raises(DecodeError):
            codec.decode([forged([0, "w", num_rows, 1 << 62, []])])
        with pytest.raises(DecodeError):
            codec.decode([forged([0, "w", num_rows, 0, []]), bytes(64)])


def test_a_header_that_announces_four_billion_columns_is_refused() -> None:
    header = msgspec.msgpack.encode([0, "w", 0, 0])
    header = b"\x95" + header[1:] + b"\xdd\xff\xff\xff\xff"
    with pytest.raises(DecodeError, match="header"):
        codec.decode([codec._PREFIX.pack(b"m2f", codec.FORMAT, len(header)) + header])


@pytest.mark.parametrize("more_rows", [0, 20], ids=["few rows", "many rows"])
@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [1, 2, 3, 4], [0, 1, 2, 5], [0, -1, 2, 4], [0, 1, 2, 3]])
def test_ragged_offsets_that_do_not_rise_over_the_values_are_refused(offsets: list[int], more_rows: int) -> None:
    offsets = offsets + offsets[-1:] * more_rows
    num_rows = len(offsets) - 1
    body = np.zeros(num_rows, np.int64).tobytes() + np.array(offsets, np.int64).tobytes() + np.zeros(4, np.int64).tobytes()
    with pytest.raises(DecodeError, match="column 'c': offsets"):
        codec.decode([forged([0, "w", num_rows, 1 << 20, [["c", "numbers", "int64", [4]]]], body)])


@pytest.mark.parametrize("num_values", [8, 1 << 15])
def test_bytes_that_are_not_booleans_are_refused(num_values: int) -> None:
    values = bytes(num_values - 1) + b"\x02"
    with pytest.raises(DecodeError, match="not booleans"):
        codec.decode([forged([0, "w", 1, 1 << 20, [["c", "dense", "bool", [1, num_values]]]], bytes(8) + values)])


def test_a_column_that_comes_twice_is_refused() -> None:
    column = ["c", "dense", "int64", [0]]
    with pytest.raises(DecodeError, match="twice"):
        codec.decode([forged([0, "w", 0, 1 << 20, [column, column]])])


def test_text_of_a_type_other_than_bytes_is_refused() -> None:
    body = np.zeros(1, np.int64).tobytes() + np.array([0, 1], np.int64).tobytes() + bytes(8)
    with pytest.raises(DecodeError, match="text of type int64"):
        codec.decode([forged([0, "w", 1, 1 << 20, [["c", "text", "int64", [1]]]], body)])


def test_another_format_version_is_refused_with_advice() -> None:
    frame = bytearray(codec.encode(rollout_parcel())[0])
    frame[3] += 1
    with pytest.raises(DecodeError, match="the same version of m2flow"):
        codec.decode([frame])


def test_the_header_is_read_by_another_implementation_of_messagepack() -> None:
    msgpack = pytest.importorskip("msgpack")
    batch = Batch(make_ids(5, 2), {"reward": np.array([0.5, 1.0]), "text": Ragged.texts(["é", "b"])})
    head = bytes(codec.encode(Parcel(5, batch, "worker-0"))[0])
    magic, version, size = struct.unpack_from("<3sBI", head)
    assert (magic, version) == (b"m2f", codec.FORMAT)
    call, sender, num_rows, inline_bytes, columns = msgpack.unpackb(head[8 : 8 + size])
    assert (call, sender, num_rows, inline_bytes) == (5, "worker-0", 2, codec.INLINE_BYTES)
    assert columns == [["reward", "dense", "float64", [2]], ["text", "text", "uint8", [3]]]
