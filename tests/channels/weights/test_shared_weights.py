"""Weights cross to another process bit for bit, verified, and leave no segment behind."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from m2flow.channels.codec import DTYPES
from m2flow.channels.weights import (
    Manifest,
    RawBits,
    SharedWeights,
    SharedWeightsReader,
    TensorEntry,
    Weight,
    digest,
    remove_segments,
    tensors,
)
from m2flow.channels.weights import shared_segment as shared_memory
from m2flow.errors import ChannelClosed, ChannelError, DecodeError, SpecError

_PEER = str(Path(__file__).parents[2] / "support" / "weights_peer.py")

tensor_dicts = st.dictionaries(
    st.text(max_size=10),
    st.sampled_from(sorted(DTYPES)).flatmap(
        lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    ),
    max_size=6,
)


@pytest.fixture
def prefix() -> Iterator[str]:
    prefix = f"m2flow-test-{secrets.token_hex(4)}"
    yield prefix
    assert remove_segments(prefix) == 0, "a segment was left behind"


@pytest.fixture
def shared(prefix: str) -> Iterator[SharedWeights]:
    with contextlib.closing(SharedWeights(f"{prefix}-policy")) as shared:
        yield shared


@pytest.fixture
def reader() -> Iterator[SharedWeightsReader]:
    with contextlib.closing(SharedWeightsReader()) as reader:
        yield reader


def model(seed: int, size: int = 64) -> list[tuple[str, Weight]]:
    rng = np.random.default_rng(seed)
    return [
        ("embed.weight", rng.standard_normal((size, 8)).astype(np.float32)),
        ("layer.0.weight", RawBits(rng.integers(0, 1 << 16, (8, 8), np.uint16), "bfloat16")),
        ("norm.weight", np.full((), seed, np.float32)),
    ]


def segment_path(manifest: Manifest) -> str:
    return shared_memory._path(manifest.segment)


def assert_same(read: Iterator[tuple[str, Weight]], written: list[tuple[str, Weight]]) -> None:
    for (name, weight), (expected_name, expected) in zip(read, written, strict=True):
        assert name == expected_name
        assert isinstance(weight, RawBits) == isinstance(expected, RawBits)
        if isinstance(weight, RawBits) and isinstance(expected, RawBits):
            assert weight.dtype == expected.dtype
            weight, expected = weight.bits, expected.bits
        assert isinstance(weight, np.ndarray)
        assert isinstance(expected, np.ndarray)
        assert (weight.dtype, weight.shape, weight.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@given(tensor_dicts)
def test_tensors_of_every_type_and_shape_come_out_as_they_went_in(tensors: dict[str, np.ndarray]) -> None:
    with contextlib.closing(SharedWeights(f"m2flow-test-{secrets.token_hex(4)}")) as shared:
        assert_same(SharedWeightsReader().read(shared.write(tensors.items())), list(tensors.items()))


def test_the_segment_is_written_over_and_read_again(shared: SharedWeights, reader: SharedWeightsReader) -> None:
    inodes = set()
    for step in range(3):
        manifest = shared.write(model(step))
        inodes.add(os.stat(segment_path(manifest)).st_ino)
        assert_same(reader.read(manifest), model(step))
    assert len(inodes) == 1


def test_the_segment_grows_with_the_model_and_a_reader_follows(shared: SharedWeights, reader: SharedWeightsReader) -> None:
    for size in (1, 10_000, 100, 40_000):
        assert_same(reader.read(shared.write(model(size, size))), model(size, size))


def test_tensors_are_taken_one_by_one(shared: SharedWeights, reader: SharedWeightsReader) -> None:
    scratch = np.zeros(2000)

    def reusing_one_buffer() -> Iterator[tuple[str, np.ndarray]]:
        for i in range(50):
            scratch[:] = i
            yield f"w{i}", scratch

    for i, (_, weight) in enumerate(reader.read(shared.write(reusing_one_buffer()))):
        assert isinstance(weight, np.ndarray)
        assert (weight == i).all()


def test_a_strided_tensor_is_read_as_its_values(shared: SharedWeights, reader: SharedWeightsReader) -> None:
    weight = np.arange(24, dtype=np.float32).reshape(4, 6)
    read = dict(reader.read(shared.write([("t", weight.T), ("s", weight[::2, ::3])])))
    np.testing.assert_array_equal(read["t"], weight.T)
    np.testing.assert_array_equal(read["s"], weight[::2, ::3])


def test_views_are_read_only_and_without_a_copy(shared: SharedWeights, reader: SharedWeightsReader) -> None:
    manifest = shared.write([("w", np.zeros(10))])
    ((_, first),) = reader.read(manifest)
    ((_, second),) = reader.read(manifest)
    assert isinstance(first, np.ndarray)
    assert isinstance(second, np.ndarray)
    assert np.shares_memory(first, second)
    assert not first.flags.writeable


def test_another_process_reads_the_same_weights_again_and_again(shared: SharedWeights) -> None:
    with subprocess.Popen([sys.executable, _PEER, "read"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for step, size in enumerate((64, 5000, 64)):
            manifest = shared.write(model(step, size))
            print(msgspec.msgpack.encode(manifest).hex(), file=process.stdin, flush=True)
            assert process.stdout.readline().strip() == digest(model(step, size))
        process.stdin.close()
        assert process.wait() == 0
    # A reader that ends must not take the segment with it, as resource trackers do.
    assert os.path.exists(segment_path(manifest))


def test_flipped_bits_are_found_and_the_tensors_named(shared: SharedWeights, reader: SharedWeightsReader) -> None:
    manifest = shared.write([(f"w{i}", np.ones(100, np.float32)) for i in range(8)])
    with open(segment_path(manifest), "r+b") as file, mmap.mmap(file.fileno(), 0) as segment:
        for i in (2, 5):
            segment[manifest.tensors[i].offset + 399] ^= 1
    with pytest.raises(ChannelError, match=r"2 of 8 tensors .* are not what was written: w2, w5"):
        reader.read(manifest)


def test_a_manifest_that_was_written_over_is_found(shared: SharedWeights, reader: SharedWeightsReader) -> None:
    old = shared.write(model(0))
    shared.write(model(1))
    with pytest.raises(ChannelError, match="are not what was written"):
        reader.read(old)


def test_swapped_equal_sized_tensors_and_swapped_blocks_are_found(shared: SharedWeights, reader: SharedWeightsReader) -> None:
    words = np.arange(tensors.ROW_BYTES * 64 // 2, dtype=np.float32)
    manifest = shared.write([("w", words)])
    half = words.nbytes // 2
    with open(segment_path(manifest), "r+b") as file, mmap.mmap(file.fileno(), 0) as segment:
        first = segment[:half]
        segment[:half] = segment[half : 2 * half]
        segment[half : 2 * half] = first
    with pytest.raises(ChannelError, match="not what was written: w"):
        reader.read(manifest)


def test_an_owner_that_is_killed_is_cleaned_up_after_by_its_prefix() -> None:
    prefix = f"m2flow-test-{secrets.token_hex(4)}"
    with subprocess.Popen([sys.executable, _PEER, "own", f"{prefix}-trainer-policy"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        manifest = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=Manifest)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert os.path.exists(segment_path(manifest))
    assert remove_segments(f"{prefix}-other") == 0
    assert remove_segments(prefix) == 1
    assert not os.path.exists(segment_path(manifest))
    with pytest.raises(ChannelError, match="are gone"):
        SharedWeightsReader().read(manifest)


def test_an_owner_replaces_what_a_killed_one_left_under_its_name(prefix: str, reader: SharedWeightsReader) -> None:
    dead, alive = SharedWeights(f"{prefix}-policy"), SharedWeights(f"{prefix}-policy")
    assert_same(reader.read(dead.write(model(0))), model(0))
    manifest = alive.write(model(1))
    assert_same(reader.read(manifest), model(1))
    dead.close()
    alive.close()


def test_closing_removes_the_segment_and_leaves_what_is_read(prefix: str, reader: SharedWeightsReader) -> None:
    shared = SharedWeights(f"{prefix}-policy")
    manifest = shared.write(model(0))
    read = list(reader.read(manifest))
    shared.close()
    shared.close()
    reader.close()
    assert not os.path.exists(segment_path(manifest))
    assert_same(iter(read), model(0))
    with pytest.raises(ChannelClosed):
        shared.write(model(1))


def test_only_this_user_can_open_a_segment(shared: SharedWeights) -> None:
    assert os.stat(segment_path(shared.write(model(0)))).st_mode & 0o777 == 0o600


def test_no_room_in_shared_memory_is_an_error_and_not_a_bus_error(shared: SharedWeights) -> None:
    too_much = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1 << 44,), (1,))
    with pytest.raises(ChannelError, match="has no room for weights of"):
        shared._at_least(too_much.nbytes)


@pytest.mark.parametrize("weight", [np.array([None]), np.zeros(1, "c16"), np.zeros(1, ">f4"), RawBits(np.zeros(1, np.float32), "bfloat16")])
def test_a_type_that_does_not_travel_is_refused_by_the_tensors_name(weight: Weight, shared: SharedWeights) -> None:
    with pytest.raises(ChannelError, match="tensor 'odd' of type"):
        shared.write([("odd", weight)])


def test_a_name_that_comes_twice_is_refused(shared: SharedWeights) -> None:
    with pytest.raises(ChannelError, match="'w' comes twice"):
        shared.write([("w", np.zeros(1)), ("w", np.ones(1))])


@pytest.mark.parametrize("name", ["", "short", "../../etc/passwd", "a/bcdefg", ".hidden-name", "x" * 200])
def test_a_name_that_could_leave_the_directory_or_match_too_much_is_refused(name: str) -> None:
    for action in (lambda: SharedWeights(name), lambda: remove_segments(name), lambda: SharedWeightsReader().read(Manifest(name, 8, ()))):
        with pytest.raises(SpecError, match="can't name shared weights"):
            action()


@pytest.mark.parametrize(
    ("num_bytes", "entry"),
    [
        (1 << 40, TensorEntry("w", "float32", (1,), 0, 0)),
        (-1, TensorEntry("w", "float32", (1,), 0, 0)),
        (64, TensorEntry("w", "float32", (17,), 0, 0)),
        (64, TensorEntry("w", "float32", (1,), 64, 0)),
        (64, TensorEntry("w", "float32", (1,), -64, 0)),
        (64, TensorEntry("w", "float32", (1,), 1, 0)),
        (64, TensorEntry("w", "float32", (-1,), 0, 0)),
        (64, TensorEntry("w", "float32", (0, 1 << 62), 0, 0)),
        (64, TensorEntry("w", "float32", (1,) * 40, 0, 0)),
        (64, TensorEntry("w", "object", (1,), 0, 0)),
    ],
)
def test_a_manifest_that_does_not_fit_its_segment_is_refused(
    num_bytes: int, entry: TensorEntry, shared: SharedWeights, reader: SharedWeightsReader
) -> None:
    segment = shared.write(model(0)).segment
    with pytest.raises(DecodeError):
        reader.read(Manifest(segment, num_bytes, (entry,)))


def test_a_link_in_the_place_of_a_segment_is_not_followed(prefix: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(64))
    manifest = Manifest(f"{prefix}-link", 64, ())
    os.symlink(target, segment_path(manifest))
    try:
        with pytest.raises(ChannelError, match="can't be read"):
            SharedWeightsReader().read(manifest)
        with contextlib.closing(SharedWeights(f"{prefix}-link")) as shared:
            shared.write(model(0))
        assert target.read_bytes() == bytes(64)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(segment_path(manifest))


def test_a_model_without_tensors_is_read_as_such(shared: SharedWeights, reader: SharedWeightsReader) -> None:
    assert list(reader.read(shared.write([]))) == []


def test_the_digest_depends_on_names_types_shapes_and_bytes_and_on_no_order() -> None:
    base: list[tuple[str, Weight]] = [("a", np.zeros((2, 2), np.float32)), ("b", np.ones(3, np.float32))]
    others: list[list[tuple[str, Weight]]] = [
        [("a", np.zeros((4,), np.float32)), base[1]],
        [("a", np.zeros((2, 2), np.int32)), base[1]],
        [("c", np.zeros((2, 2), np.float32)), base[1]],
        [("a", np.full((2, 2), -0.0, np.float32)), base[1]],
        [base[0]],
        [],
    ]
    assert digest(base) == digest(reversed(base))
    assert len({digest(one) for one in [base, *others]}) == 7
    assert digest([("a", np.asfortranarray(np.arange(6.0).reshape(2, 3)))]) == digest([("a", np.arange(6.0).reshape(2, 3))])
    assert digest([("w", RawBits(np.zeros(2, np.uint16), "bfloat16"))]) != digest([("w", np.zeros(2, np.uint16))])
