"""What every transport of the table keeps: weights arrive bit for bit, whole or as changes, and damage is found by name."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from device_files import file_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from pydantic import ValidationError

from m2flow.channels.codec import DTYPES
from m2flow.channels.process_groups import open_store, split_address
from m2flow.channels.weights import (
    TRANSPORTS,
    Manifest,
    Publisher,
    RawBits,
    SharedWeights,
    Subscriber,
    Tied,
    Transport,
    Weight,
    WeightOptions,
    device,
)
from m2flow.channels.weights import shared_segment as shared_memory
from m2flow.channels.weights.broadcast import BroadcastReceiver, BroadcastServer, Offer
from m2flow.channels.weights.device import CudaIpc
from m2flow.channels.weights.payload import Content, laid_out, padded
from m2flow.channels.weights.streams import StreamReceiver, StreamServer
from m2flow.channels.weights.tensors import bytes_of, checksum, from_wire, mark_tied, to_wire
from m2flow.channels.weights.weight_files import open_file, remove_files
from m2flow.channels.zeromq import Keys, new_keys
from m2flow.errors import BrokenChannel, ChannelClosed, ChannelError, DecodeError, InternalError, PlanError, SpecError
from m2flow.micro.lowering.passes import plan_syncs
from m2flow.micro.protocol.plan import EngineSlot, SyncTransport, WeightSyncPlan, WorkerPlan
from m2flow.spec import ClusterSpec, WeightsSpec

PATIENCE_S = 60.0

SENDING = sorted(name for name, transport in TRANSPORTS.items() if not transport.is_in_place)
"""Those that send what is staged, and so can send what changed."""
BF16 = np.dtype(np.uint16)

shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40)
arrays = st.sampled_from(sorted(DTYPES)).flatmap(lambda dtype: npst.arrays(dtype, shapes))
raw_bits = npst.arrays(np.uint16, shapes).map(lambda bits: RawBits(bits, "bfloat16"))
models = st.dictionaries(st.text(max_size=8), arrays | raw_bits, min_size=1, max_size=6).map(lambda found: list(found.items()))

Named = list[tuple[str, Weight | Tied]]


def plain(named: Named) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """By every name: type, shape and bytes."""
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, weight in named:
        if isinstance(weight, Tied):
            found[name] = found[weight.to]
        else:
            dtype, shape, raw = bytes_of(name, weight)
            found[name] = (dtype, shape, raw.tobytes())
    return found


def tensor_of(weight: Weight) -> torch.Tensor:
    ((_, tensor),) = from_wire([("", weight)], like=None)
    return tensor  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def files_for_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA IPC takes files for the memory of a GPU, in buffers so small that a model needs several."""
    (tmp_path / "gpu").mkdir()
    monkeypatch.setattr(device, "BUFFER_BYTES", 1 << 12)
    monkeypatch.setitem(TRANSPORTS, "cuda ipc", CudaIpc(file_memory(tmp_path / "gpu")))


class Pair:
    """A publisher, and subscribers by name, over one transport."""

    def __init__(self, transport: str, directory: Path, **options: object) -> None:
        self.transport, self.directory = transport, str(directory)
        self.bucket_bytes = int(options.pop("bucket_bytes", 4096))  # type: ignore[call-overload]
        chosen = WeightOptions(
            transports=(transport,),
            directory=self.directory,
            bucket_bytes=self.bucket_bytes,
            **options,  # type: ignore[arg-type]
        )
        self.name = f"m2flow-test-{secrets.token_hex(4)}"
        self.publisher = Publisher(f"{self.name}-policy", chosen)
        self.subscribers: dict[str, Subscriber] = {}

    def publish(self, model: Named, version: int) -> Manifest:
        """As an engine does: what stages on a device gets torch tensors."""
        if self.transport != "cuda ipc":
            return self.publisher.publish(model, version)
        return self.publisher.publish(((name, each if isinstance(each, Tied) else tensor_of(each)) for name, each in model), version)

    def subscriber(self, name: str = "rollout-0") -> Subscriber:
        if name not in self.subscribers:
            self.subscribers[name] = Subscriber(name, directory=self.directory, bucket_bytes=self.bucket_bytes)
        return self.subscribers[name]

    def received(self, manifest: Manifest, name: str = "rollout-0", **held: object) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        arriving = to_wire(self.subscriber(name).tensors(manifest, self.transport, **held))  # type: ignore[arg-type]
        return {each: (dtype, shape, raw.tobytes()) for each, weight in arriving for dtype, shape, raw in [bytes_of(each, weight)]}

    def close(self) -> None:
        for subscriber in self.subscribers.values():
            subscriber.close()
        self.publisher.close()
        assert shared_memory.remove_segments(self.name) == 0, "a segment was left behind"
        assert not os.path.isdir(self.directory) or not list(Path(self.directory).iterdir()), "a file was left behind"


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    with contextlib.ExitStack() as stack:

        def make(transport: str, **options: object) -> Pair:
            pair = Pair(transport, tmp_path / secrets.token_hex(4), **options)
            stack.callback(pair.close)
            return pair

        yield make


def some_model(seed: int = 0, num: int = 5) -> Named:
    rng = np.random.default_rng(seed)
    model: Named = [(f"layers.{i}.weight", RawBits(rng.integers(0, 1 << 16, (7 * i + 1, 33), np.uint16), "bfloat16")) for i in range(num)]
    return [*model, ("norm", rng.standard_normal(11).astype(np.float32)), ("empty", np.zeros((0, 4), np.float32))]


def moved(model: Named, share: float, seed: int = 1) -> Named:
    """The same model with a share of its values changed."""
    rng = np.random.default_rng(seed)
    found: Named = []
    for name, weight in model:
        assert not isinstance(weight, Tied)
        bits = (weight.bits if isinstance(weight, RawBits) else weight).copy()
        flat = bits.reshape(-1).view(f"u{bits.itemsize}")
        at = rng.random(len(flat)) < share
        flat[at] ^= 1
        found.append((name, RawBits(bits, weight.dtype) if isinstance(weight, RawBits) else bits))
    return found


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_model_arrives_bit_for_bit_in_buckets_of_any_size(transport: str, data: st.DataObject, tmp_path: Path) -> None:
    model: Named = [*data.draw(models)]
    names = [name for name, _ in model]
    for number, to in enumerate(data.draw(st.lists(st.sampled_from(names), max_size=2))):
        model.append((f"tied.{number}", Tied(to)))
    pair = Pair(transport, tmp_path / secrets.token_hex(4), bucket_bytes=data.draw(st.sampled_from([64, 100, 1000, 1 << 16])))
    with contextlib.closing(pair):
        for version in (1, 2):
            manifest = pair.publish(model, version)
            again = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
            assert pair.received(again) == plain(model)
            if not data.draw(st.booleans()):
                break
            model = [*data.draw(models)]


@pytest.mark.parametrize("transport", SENDING)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_changes_since_any_version_give_the_whole(transport: str, data: st.DataObject, tmp_path: Path) -> None:
    """Receivers that hold the version before, an older one, or none: all end with the same."""
    pair = Pair(transport, tmp_path / secrets.token_hex(4), changes="always", bucket_bytes=1000)
    with contextlib.closing(pair):
        model: Named = [*data.draw(models)]
        versions: dict[int, Named] = {}
        for version in range(data.draw(st.integers(2, 4))):
            versions[version] = model
            manifest = pair.publisher.publish(model, version)
            base = data.draw(st.sampled_from([-1, *versions]))
            held = versions.get(base, [])
            got = pair.received(manifest, held_version=base, held=(lambda held=held: iter(held)) if base >= 0 else None)
            assert got == plain(model)
            model = moved(model, data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])), seed=version)


@pytest.mark.parametrize("transport", SENDING)
def test_who_holds_the_version_before_gets_what_changed_and_others_the_whole(transport: str, pairs: Callable[..., Pair]) -> None:
    pair = pairs(transport, changes="always")
    rng = np.random.default_rng(0)
    before: Named = [("w", RawBits(rng.integers(0, 1 << 16, 500_000, np.uint16), "bfloat16"))]
    now = moved(before, 0.01)
    pair.publisher.publish(before, 1)
    manifest = pair.publisher.publish(now, 2)
    assert pair.publisher.last.share_changed == pytest.approx(0.01, rel=0.2)
    assert pair.received(manifest, held_version=1, held=lambda: iter(before)) == plain(now)  # type: ignore[arg-type]
    assert pair.subscriber().num_bytes < 50_000
    assert pair.received(manifest, held_version=0, held=lambda: iter(before)) == plain(now)  # type: ignore[arg-type]
    assert pair.subscriber().num_bytes >= 1_000_000
    assert pair.received(manifest, "rollout-new") == plain(now)


def test_specs_and_plans_name_the_transports_of_the_table() -> None:
    named = set(get_args(WeightsSpec.model_fields["transport"].annotation))
    assert named == {*TRANSPORTS, "auto"}
    assert set(get_args(SyncTransport)) == {*TRANSPORTS, "same process"}


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_a_transport_says_of_itself_what_its_ends_do(transport: str, tmp_path: Path) -> None:
    kind = TRANSPORTS[transport]
    with closing(kind.stage("m2flow-test-policy")) as stage:
        assert type(stage) is kind.stage_class
        assert stage.takes_pieces is kind.takes_pieces
    sender = kind.sender("m2flow-test-policy", WeightOptions(transports=(transport,), directory=str(tmp_path)))
    assert (sender is not None) is kind.sends_changes is not kind.is_in_place
    if sender is not None:
        sender.close()


def test_a_spec_for_several_hosts_is_refused_where_shared_memory_is_named_and_offered_what_crosses_hosts() -> None:
    crossing = [name for name, kind in TRANSPORTS.items() if kind.crosses_hosts]
    with pytest.raises(ValidationError) as refused:
        ClusterSpec(launcher="ray", weights=WeightsSpec(transport="shared memory"))
    assert all(f"'{name}'" in str(refused.value) for name in crossing)
    assert [ClusterSpec(launcher="ray", weights=WeightsSpec(transport=name)).weights.transport for name in crossing] == crossing


@dataclass
class Lacking(Transport):
    """A transport that plans know nothing of but what it says."""

    needs_gpu: bool = False
    takes_adapters: bool = True
    crosses_hosts: bool = True
    is_in_place: bool = False
    stage_class = SharedWeights

    def stage(self, name: str) -> SharedWeights:
        raise NotImplementedError

    sender = receiver = stage  # type: ignore[assignment]


class Whole(SharedWeights):  # type: ignore[misc]
    takes_pieces = False


def planned(kind: Transport, monkeypatch: pytest.MonkeyPatch, changes: str = "auto", **how: Any) -> WeightSyncPlan:
    """The sync that is planned where `file` is this transport."""
    monkeypatch.setitem(TRANSPORTS, "file", kind)
    train = WorkerPlan("train-0", "cpu", 1, (EngineSlot("policy", "train", "fsdp"),), ranks=2)
    rollout = WorkerPlan("rollout-0", "cpu", 1, (EngineSlot("policy", "rollout", "embedded"),))
    (sync,) = plan_syncs((train, rollout), WeightsSpec.model_validate({"transport": "file", "changes": changes}), **how)
    return sync


def test_a_plan_goes_by_what_a_transport_says_of_itself_and_not_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(Lacking(), monkeypatch, alone=["policy"]).sends == "adapters"
    assert planned(Lacking(takes_adapters=False), monkeypatch, alone=["policy"]).sends == "weights"
    assert planned(Lacking(), monkeypatch).why.endswith("each of 2 ranks sends what it holds")
    monkeypatch.setattr(Lacking, "stage_class", Whole)
    assert planned(Lacking(), monkeypatch).why.endswith("gathered from 2 ranks")
    monkeypatch.undo()
    assert planned(Lacking(), monkeypatch, changes="always").why.endswith("gathered from 2 ranks, to compare with the version before")
    assert planned(Lacking(is_in_place=True), monkeypatch, changes="always").why.endswith("each of 2 ranks sends what it holds")
    assert "one host" not in planned(Lacking(), monkeypatch, is_one_host=False).why
    assert "needs both on one host" in planned(Lacking(crosses_hosts=False), monkeypatch, is_one_host=False).why
    with pytest.raises(PlanError, match="by file, and train-0 has no GPU"):
        planned(Lacking(needs_gpu=True), monkeypatch)


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_floats_arrive_in_the_type_that_the_receiver_holds(transport: str, pairs: Callable[..., Pair]) -> None:
    made = torch.Generator().manual_seed(0)
    model = [("w", torch.randn(300, 7, generator=made)), ("half", torch.randn(5, generator=made).half()), ("steps", torch.arange(4))]
    pair = pairs(transport)
    got = pair.received(pair.publisher.publish(model, 1, "bfloat16"))
    assert got == plain([*to_wire(model, "bfloat16")])


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_a_receiver_that_comes_late_or_again_takes_the_current_version(transport: str, pairs: Callable[..., Pair]) -> None:
    pair = pairs(transport)
    model = some_model()
    for version in (1, 2, 3):
        model = moved(model, 0.1, seed=version)
        manifest = pair.publish(model, version)
        for name in ("rollout-0", f"late-{version}", f"late-{version}"):
            assert pair.received(manifest, name) == plain(model)
            assert pair.subscriber(name).num_bytes >= manifest.num_bytes
        pair.subscribers.pop("rollout-0").close()


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_what_is_closed_closes_again_and_publishes_no_more(transport: str, pairs: Callable[..., Pair]) -> None:
    pair = pairs(transport)
    assert pair.received(pair.publish(some_model(), 1)) == plain(some_model())
    pair.close()
    pair.close()
    with pytest.raises(ChannelClosed):
        pair.publish(some_model(), 2)


def test_transports_that_stage_in_different_memory_are_not_published_at_once(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="file and cuda ipc"):
        Publisher("m2flow-test-policy", WeightOptions(transports=("file", "cuda ipc"), directory=str(tmp_path)))
    with pytest.raises(InternalError, match="'pigeon'"):
        Publisher("m2flow-test-policy", WeightOptions(transports=("pigeon",)))


@pytest.mark.parametrize("transport", SENDING)
def test_a_model_of_which_all_changed_comes_whole_and_says_so(transport: str, pairs: Callable[..., Pair]) -> None:
    pair = pairs(transport)
    model: Named = [("w", np.random.default_rng(0).standard_normal(400_000).astype(np.float32))]
    pair.publisher.publish(model, 1)
    model = moved(model, 1.0)
    assert pair.received(pair.publisher.publish(model, 2), held_version=1, held=lambda: iter([])) == plain(model)
    assert pair.publisher.last.why.startswith("whole")


def test_a_changed_layout_is_published_whole(pairs: Callable[..., Pair]) -> None:
    pair = pairs("file", changes="always")
    for model in ([("a", np.zeros(9)), ("b", np.ones(3))], [("a", np.zeros(9)), ("c", np.ones(3))], [("a", np.zeros(9))]):
        assert pair.received(pair.publisher.publish(model, 1)) == plain(model)  # type: ignore[arg-type]
        assert pair.publisher.last.share_changed < 0


def test_several_receivers_share_a_broadcast_and_their_group(pairs: Callable[..., Pair]) -> None:
    pair = pairs("broadcast", num_receivers=3)
    model = some_model()
    server = None
    for version in (1, 2):
        manifest = pair.publisher.publish(model, version)
        names = ["rollout-0", "rollout-1", "rollout-2"]
        server = pair.publisher._senders["broadcast"]
        assert isinstance(server, BroadcastServer)
        server._gather_s = PATIENCE_S  # However late a thread is, it is waited for.
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(functools.partial(pair.received, manifest), names)) == [plain(model)] * 3
        assert server.num_rounds == version
        assert len(server._groups) == 1
        model = moved(model, 0.5)
    # One of them is started anew: a group of its own, since its process knows nothing of the old one.
    assert server is not None
    server._gather_s = 0.1
    pair.subscribers.pop("rollout-1").close()
    assert pair.received(manifest, "rollout-1") == plain(moved(some_model(), 0.5))
    assert server.num_rounds == 3


def test_who_loses_a_broadcast_because_another_receiver_was_killed_gets_it_all_the_same() -> None:
    arrays = [(f"w{i}", np.random.default_rng(i).standard_normal(1000)) for i in range(200)]
    entries = laid_out((name, "float64", array.shape) for name, array in arrays)
    body = np.zeros(entries[-1].offset + padded(8000), np.uint8)
    tensors = []
    for entry, (_, array) in zip(entries, arrays, strict=True):
        body[entry.offset : entry.offset + 8000] = array.view(np.uint8)
        tensors.append(msgspec.structs.replace(entry, checksum=checksum(array.view(np.uint8))))
    whole = Content(5, -1, len(body), tuple(tensors))
    server = BroadcastServer(num_expected=2, gather_s=PATIENCE_S, bucket_bytes=1000, timeout_s=30.0)
    address = server.open()
    server.offer(Offer((whole, body), None))
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "weights_peer.py"), "ask", address, "5"]
    with contextlib.closing(Subscriber("alive", bucket_bytes=1000)) as subscriber, contextlib.closing(server):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as dying:
            assert dying.stdin is not None
            assert dying.stdout is not None
            assert dying.stdout.readline() == "ready\n"
            dying.stdin.write("go\n")
            dying.stdin.flush()
            arriving = subscriber.tensors(Manifest("", len(body), tuple(tensors), 5, (), (), address), "broadcast")

            def hasten() -> None:
                dying.wait()
                server._gather_s = 0.1  # Who asks again is alone.

            hastening = threading.Thread(target=hasten)
            hastening.start()
            got = [(name, np.array(weight)) for name, weight in arriving]
            hastening.join()
        assert dying.returncode == -signal.SIGKILL
        assert [name for name, _ in got] == [name for name, _ in arrays]
        assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(got, arrays, strict=True))
        assert server.num_rounds == 2, "the first broke, and the second came to its end"


class Late:
    """A store in which whoever asks is held up between drawing his number and asking."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.has_drawn, self.may_ask = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: bytes) -> None:
        self.has_drawn.set()
        assert self.may_ask.wait(PATIENCE_S)
        self._store.set(key, value)


def test_who_asks_late_is_heard_and_holds_nobody_up() -> None:
    content, nothing = Content(5, -1, 0, ()), np.zeros(0, np.uint8)
    server = BroadcastServer(gather_s=0.01, timeout_s=PATIENCE_S)
    address = server.open()
    server.offer(Offer((content, nothing), None))
    host, port = split_address(address)
    late, quick = (BroadcastReceiver(name, timeout_s=PATIENCE_S) for name in ("late", "quick"))
    store = late._stores[address] = Late(open_store(host, port, is_server=False, timeout_s=PATIENCE_S))
    with contextlib.closing(server), ThreadPoolExecutor(1) as pool:
        refused = pool.submit(late.receive, address, 4, -1)
        assert store.has_drawn.wait(PATIENCE_S)
        with pytest.raises(ChannelError, match="version 3 of the weights is not offered"):
            quick.receive(address, 3, -1)
        store.may_ask.set()
        with pytest.raises(ChannelError, match="version 4 of the weights is not offered"):
            refused.result(PATIENCE_S)


def test_a_broadcast_of_a_version_that_is_gone_is_refused(pairs: Callable[..., Pair]) -> None:
    pair = pairs("broadcast")
    old = pair.publisher.publish(some_model(), 1)
    pair.publisher.publish(some_model(), 2)
    with pytest.raises(ChannelError, match="version 1 of the weights is not offered"):
        pair.received(old)


def test_who_asks_nobody_is_told_so() -> None:
    receiver = BroadcastReceiver("rollout-0", timeout_s=0.5)
    with pytest.raises(BrokenChannel, match="nobody to meet at"):
        receiver.receive("127.0.0.1:9", 1, -1)


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_a_damaged_byte_is_found_and_its_tensor_named(transport: str, pairs: Callable[..., Pair]) -> None:
    pair = pairs(transport)
    manifest = pair.publish(some_model(), 1)
    entry = manifest.tensors[3]
    if transport == "file":
        path = Path(pair.directory) / manifest.files[-1]
        place = path.stat().st_size - manifest.num_bytes
    elif manifest.lent is not None:
        number, start = manifest.lent.places[3]
        path, place = Path(manifest.lent.buffers[number].handle.decode()), start - entry.offset
    else:  # A broadcast sends from the segment.
        path, place = Path(shared_memory._path(manifest.segment)), 0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[place + entry.offset + 17] ^= 4
    with pytest.raises(ChannelError, match=rf"1 of 7 tensors.* are not what was (written|published): {entry.name}(\n|$)"):
        pair.received(manifest)


def test_a_damaged_change_is_found_and_its_tensor_named(pairs: Callable[..., Pair]) -> None:
    pair = pairs("file", changes="always")
    model = some_model()
    pair.publisher.publish(model, 1)
    manifest = pair.publisher.publish(moved(model, 0.2), 2)
    path = Path(pair.directory) / manifest.files[-1]
    with contextlib.closing(open_file(pair.directory, manifest.files[-1])) as opened:
        change = next(change for change in opened.content.changes if change.name == "layers.4.weight")
        start = path.stat().st_size - opened.content.num_bytes
    raw = bytearray(path.read_bytes())
    raw[start + change.offset + padded((29 * 33 + 7) // 8) + 3] ^= 1  # A value, after the mask.
    path.write_bytes(raw)
    with pytest.raises(ChannelError, match=r"are not what was published: layers.4.weight"):
        pair.received(manifest, held_version=1, held=lambda: iter(model))  # type: ignore[arg-type]


def test_only_a_whole_file_is_ever_seen_and_short_or_foreign_ones_are_refused(pairs: Callable[..., Pair]) -> None:
    pair = pairs("file")
    manifest = pair.publisher.publish(some_model(), 1)
    path = Path(pair.directory) / manifest.files[0]
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600
    whole = path.read_bytes()
    for wrong in (b"", b"m2w1", b"m2w1" + b"\xff" * 64, whole[:-1], whole + b"x", b"safetensors", whole[:9] + bytes(32) + whole[41:]):
        path.write_bytes(wrong)
        with pytest.raises(DecodeError):
            pair.received(manifest)
    path.unlink()
    with pytest.raises(ChannelError, match="can't be read from"):
        pair.received(manifest)
    for name in ("../../etc/passwd", ".hidden-name", "a/bcdefgh"):
        with pytest.raises(DecodeError, match="names no file"):
            open_file(pair.directory, name)


def test_what_a_killed_owner_left_is_removed_by_its_prefix(tmp_path: Path) -> None:
    pair = Pair("file", tmp_path / "weights")
    pair.publisher.publish(some_model(), 1)
    (tmp_path / "weights" / "other.txt").write_text("")
    assert remove_files(pair.directory, f"{pair.name}-policy") == 1
    assert [each.name for each in (tmp_path / "weights").iterdir()] == ["other.txt"]
    (tmp_path / "weights" / "other.txt").unlink()
    pair.close()


def test_a_directory_that_can_not_be_written_is_an_error(pairs: Callable[..., Pair], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    publisher = Publisher(f"m2flow-test-{secrets.token_hex(4)}", WeightOptions(transports=("file",), directory=str(tmp_path / "file")))
    with contextlib.closing(publisher), pytest.raises(ChannelError, match="weights can't be written to") as caught:
        publisher.publish(some_model(), 1)
    assert "weights: {directory: ...}" in caught.value.now


def test_tied_weights_are_sent_once_and_named_twice(pairs: Callable[..., Pair]) -> None:
    embedding, other = torch.randn(50, 8), torch.randn(50, 8)
    transposed = embedding.t()
    model = [("embed", embedding), ("head", embedding), ("other", other), ("transposed", transposed), ("view", embedding.view(50, 8))]
    found = list(mark_tied(model))
    assert [name for name, weight in found if isinstance(weight, Tied)] == ["head", "view"]
    pair = pairs("file")
    manifest = pair.publisher.publish(to_wire(mark_tied(model), "bfloat16"), 1)
    assert manifest.num_bytes == 3 * padded(50 * 8 * 2)
    got = pair.received(manifest)
    assert got["head"] == got["embed"] == ("bfloat16", (50, 8), embedding.bfloat16().view(torch.uint16).numpy().tobytes())
    assert got["transposed"][2] == embedding.bfloat16().t().contiguous().view(torch.uint16).numpy().tobytes()


def test_memory_that_is_freed_and_taken_again_ties_nothing() -> None:
    def temporaries() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(50):
            yield f"w{i}", torch.full((1000,), float(i))

    assert not [name for name, weight in mark_tied(temporaries()) if isinstance(weight, Tied)]


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32"])
def test_types_are_converted_on_the_way_as_torch_rounds(dtype: str | None) -> None:
    tensors = [
        ("a", torch.randn(100, 3)),
        ("b", torch.randn(7).bfloat16()),
        ("steps", torch.arange(4)),
        ("n", np.random.default_rng(0).standard_normal(9)),
        ("scalar", torch.tensor(0.1)),
    ]
    like = tensors[0][1]
    for (name, tensor), (_, sent) in zip(tensors, from_wire(to_wire(tensors, dtype), like), strict=True):  # type: ignore[arg-type]
        expected = torch.as_tensor(tensor)
        expected = expected.to(getattr(torch, dtype)) if dtype and expected.is_floating_point() else expected
        assert sent.dtype == expected.dtype, name
        assert torch.equal(sent, expected), name


def test_a_new_version_is_not_written_over_one_that_is_being_sent(pairs: Callable[..., Pair]) -> None:
    pair = pairs("broadcast", bucket_bytes=1 << 20)
    first, second = ([("w", np.full(1 << 23, value))] for value in (1.0, 2.0))
    manifest = pair.publisher.publish(first, 1)
    receiver = BroadcastReceiver("slow", bucket_bytes=1 << 20)
    _, buckets = receiver.receive(manifest.address, 1, -1)
    next(buckets)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(pair.publisher.publish, second, 2)
        with pytest.raises(TimeoutError):
            publishing.result(0.3)
        assert all((bucket.view(np.float64) == 1.0).all() for bucket in buckets)
        assert publishing.result(PATIENCE_S).version == 2
    receiver.close()
    assert pair.received(publishing.result()) == plain(second)  # type: ignore[arg-type]


def streams(model: Named, keys: Keys | None) -> tuple[Publisher, Manifest]:
    publisher = Publisher(f"m2flow-test-{secrets.token_hex(4)}-policy", WeightOptions(transports=("tcp",), keys=keys))
    return publisher, publisher.publish(model, 1)


def test_a_stream_is_for_holders_of_the_key_who_know_the_token() -> None:
    keys, model = new_keys(), some_model()
    publisher, manifest = streams(model, keys)
    with contextlib.closing(publisher):
        address, _, token = manifest.stream.partition(" ")
        for of, where in ((new_keys(), manifest.stream), (None, manifest.stream), (keys, f"{address} {token[::-1]}x")):
            stranger = StreamReceiver("stranger", keys=of, timeout_s=0.3)
            with contextlib.closing(stranger), pytest.raises(BrokenChannel, match="gave no answer about weights"):
                stranger.receive(where, 1, -1)
        member = Subscriber("rollout-0", keys=keys)
        with contextlib.closing(member):
            assert plain(list(member.tensors(manifest, "tcp"))) == plain(model)


def test_a_stream_is_offered_to_other_hosts_with_a_key_alone() -> None:
    server = StreamServer(host="192.0.2.1")
    with pytest.raises(SpecError, match="there is no key"):
        server.open()
    server.close()


def test_a_stream_of_a_version_that_is_gone_ends_with_the_reason_and_the_next_goes_on() -> None:
    model = [("w", np.arange(40 << 20, dtype=np.uint8))]
    publisher, manifest = streams(model, None)
    receiver = StreamReceiver("rollout-0", bucket_bytes=1 << 20)
    with contextlib.closing(publisher), contextlib.closing(receiver):
        _, buckets = receiver.receive(manifest.stream, 1, -1)
        next(buckets)
        later = publisher.publish(model, 2)
        with pytest.raises(ChannelError, match="version 1 of the weights is not offered"):
            for _ in buckets:
                pass
        content, buckets = receiver.receive(later.stream, 2, -1)
        assert b"".join(bucket.tobytes() for bucket in buckets)[: 40 << 20] == model[0][1].tobytes()
        assert content.version == 2
