"""Weights that several processes hold pieces of: each writes its own to one segment, which is bit for bit what one process would write."""

from __future__ import annotations

import contextlib
import secrets
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.channels.weights import Manifest, PieceWriter, Publisher, SharedWeights, Spread, Subscriber, WeightOptions, Written
from m2flow.channels.weights.tensors import ROW_BYTES, add_row_hashes, checksum, finish
from m2flow.errors import ChannelError
from m2flow.micro.lowering.passes import plan_syncs
from m2flow.micro.protocol.plan import EngineSlot, WorkerPlan
from m2flow.spec import WeightsSpec

Piece = tuple[str, tuple[int, ...], torch.Tensor]
MIB = 1 << 20


def forms(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()]


def cut(tensors: dict[str, torch.Tensor], count: int, dim_of: Callable[[str], int]) -> list[list[Piece]]:
    """Cut each tensor along one of its dimensions into a piece for each of so many processes."""
    found: list[list[Piece]] = [[] for _ in range(count)]
    for name, tensor in tensors.items():
        if not tensor.ndim:
            found[len(tensors) % count].append((name, (), tensor))
            continue
        dim, first = dim_of(name) % tensor.ndim, 0
        for own, piece in zip(found, tensor.tensor_split(count, dim), strict=True):
            own.append((name, tuple(first if i == dim else 0 for i in range(tensor.ndim)), piece))
            first += piece.shape[dim]
    return found


def spread_of(tensors: dict[str, torch.Tensor], of_processes: Sequence[Sequence[Piece]], bucket_bytes: int = MIB) -> Spread:
    def write(manifest: Manifest) -> list[Written]:
        with contextlib.ExitStack() as stack:
            return [stack.enter_context(contextlib.closing(PieceWriter())).write(own, manifest, bucket_bytes) for own in of_processes]

    return Spread(forms(tensors), write)


@pytest.fixture
def prefix() -> str:
    return f"m2flow-test-{secrets.token_hex(4)}"


@contextlib.contextmanager
def stage(prefix: str) -> Iterator[SharedWeights]:
    with contextlib.closing(SharedWeights(prefix)) as found:
        yield found


_shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
_types = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(_shapes, _types, st.integers(0, 2)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([None, "bfloat16", "float32"]),
    st.sampled_from([16, 200, 1 << 16]),
    st.booleans(),
)
def test_pieces_of_any_cut_are_what_one_process_would_have_written(
    given_tensors: list[tuple[tuple[int, ...], torch.dtype, int]], count: int, dtype: str | None, bucket_bytes: int, is_large: bool
) -> None:
    torch.manual_seed(0)
    tensors, dims = {}, {}
    for number, (shape, kind, dim) in enumerate(given_tensors):
        wide = (*shape[:-1], shape[-1] * 701) if shape and is_large else shape
        tensors[f"t{number}"], dims[f"t{number}"] = (torch.randn(wide) * 100).to(kind), dim
    prefix = f"m2flow-test-{secrets.token_hex(4)}"
    with stage(f"{prefix}-one") as one, stage(f"{prefix}-many") as many:
        expected = one.write(tensors.items(), version=3, dtype=dtype)
        spread = spread_of(tensors, cut(tensors, count, dims.__getitem__), bucket_bytes)
        found = many.write_spread(spread, version=3, dtype=dtype)
        assert found.tensors == expected.tensors
        assert (found.num_bytes, found.version, found.tied) == (expected.num_bytes, 3, ())
        for entry in expected.tensors:
            place = slice(entry.offset, entry.offset + entry.num_bytes)
            assert bytes(one.body(one_size := expected.num_bytes)[place]) == bytes(many.body(one_size)[place])


def test_row_hashes_of_overlapping_bytes_are_not_those_of_the_tensor() -> None:
    raw = np.random.default_rng(0).integers(0, 256, 3 * ROW_BYTES, np.uint8)
    for middle, is_right in ((5000, True), (4999, False), (5001, False)):
        rows = np.zeros((2, 3), np.uint64)
        add_row_hashes(raw[:5000], 0, rows)
        add_row_hashes(raw[middle:], middle, rows)
        assert (finish(rows, raw[:0]) == checksum(raw)) is is_right


@pytest.mark.parametrize("transport", ["shared memory", "tcp", "file", "broadcast"])
def test_receivers_get_what_processes_hold_together_over_every_transport_that_stages_in_shared_memory(
    transport: str, prefix: str, tmp_path: Any
) -> None:
    torch.manual_seed(1)
    tensors = {"a": torch.randn(301, 64), "b": torch.randn(64, 300), "norm": torch.randn(7)}
    options = WeightOptions((transport,), str(tmp_path), changes="never")
    with (
        contextlib.closing(Publisher(prefix, options)) as publisher,
        contextlib.closing(Subscriber("worker", directory=str(tmp_path))) as subscriber,
    ):
        for version in range(2):
            tensors = {name: tensor + version for name, tensor in tensors.items()}
            spread = spread_of(tensors, cut(tensors, 3, {"a": 0, "b": 1, "norm": 0}.__getitem__))
            manifest = publisher.publish(iter(()), version, spread=spread)
            held = {name: np.array(weight) for name, weight in subscriber.tensors(manifest, transport)}
            assert {name: tensor.numpy().tobytes() for name, tensor in tensors.items()} == {n: w.tobytes() for n, w in held.items()}
            assert len(publisher.last.written) == 3
            assert sum(publisher.last.written) == sum(tensor.nbytes for tensor in tensors.values())


def test_a_version_that_is_compared_with_the_one_before_is_written_by_one_process(prefix: str, tmp_path: Any) -> None:
    tensors = {"a": torch.zeros(3000, 8)}
    with contextlib.closing(Publisher(prefix, WeightOptions(("file",), str(tmp_path), changes="always"))) as publisher:
        publisher.publish(iter(()), 0, spread=spread_of(tensors, cut(tensors, 2, lambda _: 0)))
        assert publisher.last.written
        tensors["a"][17, 3] = 1.0
        publisher.publish(tensors.items(), 1, spread=spread_of(tensors, cut(tensors, 2, lambda _: 0)))
        assert not publisher.last.written
        assert publisher.last.share_changed == 1 / 24_000


def test_a_piece_that_is_missing_comes_twice_or_fits_no_tensor_is_an_error_with_its_name(prefix: str) -> None:
    tensors = {"a": torch.zeros(40, 8), "b": torch.zeros(8)}
    first, second = cut(tensors, 2, lambda _: 0)
    for wrong, said in (
        ([first, second[1:]], "have written 640 bytes of 'a', which has 1,280"),
        ([first, second, first[1:]], "have written 48 bytes of 'b', which has 32"),
        ([[("c", (0,), torch.zeros(2))]], "'c' came, which is no tensor"),
        ([[("b", (7,), torch.zeros(2))]], r"'b' from \[7\] to \[9\] is not within \[8\]"),
        ([[("b", (0,), torch.zeros(8, dtype=torch.int64))]], "'b' is int64"),
    ):
        with stage(prefix) as shared, pytest.raises(ChannelError, match=said):
            shared.write_spread(spread_of(tensors, wrong))


def peak_bytes(work: Callable[[], object]) -> int:
    """Most that NumPy held at once: the buffer that pieces go through is its memory."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 0), ("bfloat16", 0), ("float32", 1), ("bfloat16", 1)])
def test_a_process_holds_one_bucket_beside_its_pieces(prefix: str, dtype: str, dim: int) -> None:
    """Half of 32 MiB of weights go through buckets of 4 MiB. What hashing needs is small: its blocks, and the sums."""
    tensors = {str(number): torch.ones(1024, 1024) for number in range(8)}
    own = cut(tensors, 2, lambda _: dim)[0]
    peaks = []

    def write(manifest: Manifest) -> list[Written]:
        writer = PieceWriter()
        peaks.append(peak_bytes(lambda: writer.write(own, manifest, 4 * MIB)))
        return []

    with stage(prefix) as shared, pytest.raises(ChannelError, match="have written 0 bytes"):
        shared.write_spread(Spread(forms(tensors), write), dtype=dtype)
    has_bucket = dtype != "float32" or dim != 0
    small = 2 * MIB
    assert 4 * MIB * has_bucket <= peaks[0] < 4 * MIB * has_bucket + small


@pytest.mark.parametrize(
    ("engine", "transport", "adapted", "said"),
    [
        ("fsdp", "auto", (), "each of 2 ranks sends what it holds"),
        ("fsdp", "auto", ("policy",), "gathered from 2 ranks"),
        ("fsdp", "tcp", (), "each of 2 ranks sends what it holds"),
        ("fsdp", "cuda ipc", (), "gathered from 2 ranks"),
        ("deepspeed", "auto", (), "gathered from 2 ranks"),
    ],
)
def test_a_plan_says_whether_weights_are_gathered(engine: str, transport: str, adapted: tuple[str, ...], said: str) -> None:
    train = WorkerPlan("train-0", "cuda:0", 1, (EngineSlot("policy", "train", engine),), ranks=2)
    rollout = WorkerPlan("rollout-0", "cuda:1", 1, (EngineSlot("policy", "rollout", "embedded"),))
    (sync,) = plan_syncs((train, rollout), WeightsSpec.model_validate({"transport": transport}), adapted=adapted)
    assert sync.why.endswith(f"; {said}")
