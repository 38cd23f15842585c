"""The trace in Perfetto's own packets: every slice, counter and arrow of a run, as Perfetto's protocol buffers read them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from large_trace import make_large
from observed_run import MS, record_run, store_run
from perfetto.protos.perfetto.trace import perfetto_trace_pb2

from m2flow.cli.main import cli
from m2flow.observe.perfetto import write_trace
from m2flow.observe.spans import Recorder
from m2flow.samples import SampleId

proto: Any = perfetto_trace_pb2


def unpacked(content: bytes) -> Any:
    """A trace with its compressed packets unpacked, and with texts in place of their numbers, as Perfetto's importer reads it."""
    trace, found = proto.Trace.FromString(content), proto.Trace()
    for packet in trace.packet:
        inner = proto.Trace.FromString(zlib.decompress(packet.compressed_packets)) if packet.HasField("compressed_packets") else None
        found.packet.extend([packet] if inner is None else inner.packet)
    texts: dict[tuple[str, int], str] = {}
    for packet in found.packet:
        for kind, told in packet.interned_data.ListFields():
            texts.update({(kind.name, one.iid): one.str.decode() if kind.name.endswith("values") else one.name for one in told})
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        if event.name_iid:
            assert packet.sequence_flags & 2
            event.name = texts["event_names", event.name_iid]
        event.categories.extend(texts["event_categories", number] for number in event.category_iids)
        for one in event.debug_annotations:
            one.name = texts["debug_annotation_names", one.name_iid]
            if one.HasField("string_value_iid"):
                one.string_value = texts["debug_annotation_string_values", one.string_value_iid]
    assert [packet.sequence_flags & 1 for packet in found.packet if packet.HasField("track_event")][:2] in ([], [1], [1, 0])
    return found


class Read:
    """A trace as Perfetto's importer takes it: descriptors first, events of a track in the order of their times, begins and ends paired."""

    def __init__(self, content: bytes) -> None:
        trace = unpacked(content)
        self.tracks = {
            packet.track_descriptor.uuid: packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")
        }
        self.slices: list[tuple[int, str, int, int, tuple[int, ...]]] = []
        """Track, name, start, end, arrows."""
        self.counts: dict[str, list[float]] = defaultdict(list)
        self.instants: list[str] = []
        open_: dict[int, list[tuple[str, int, tuple[int, ...]]]] = defaultdict(list)
        seen: set[int] = set()
        for packet in trace.packet:
            if packet.HasField("track_event"):
                assert packet.track_event.track_uuid in seen, "a track is described before its events"
            elif packet.HasField("track_descriptor"):
                seen.add(packet.track_descriptor.uuid)
                assert packet.track_descriptor.parent_uuid in {0, *seen}
        events = [packet for packet in trace.packet if packet.HasField("track_event")]
        assert all(packet.trusted_packet_sequence_id for packet in events)
        for packet in sorted(events, key=lambda packet: packet.timestamp):  # Stable, as in the importer.
            event = packet.track_event
            if event.type == event.TYPE_SLICE_BEGIN:
                open_[event.track_uuid].append((event.name, packet.timestamp, (*event.flow_ids, *event.terminating_flow_ids)))
            elif event.type == event.TYPE_SLICE_END:
                name, start, arrows = open_[event.track_uuid].pop()
                self.slices.append((event.track_uuid, name, start, packet.timestamp, arrows))
            elif event.type == event.TYPE_COUNTER:
                track = self.tracks[event.track_uuid]
                assert track.HasField("counter")
                self.counts[f"{self.tracks[track.parent_uuid].name}: {track.name}"].append(event.double_counter_value)
            else:
                assert event.type == event.TYPE_INSTANT
                self.instants.append(event.name)
        assert not any(open_.values()), "every slice ends"

    def way(self, arrow: int) -> list[str]:
        """The slices that an arrow joins, in the order of their starts."""
        return [name for _, name, _, _, arrows in sorted(self.slices, key=lambda one: one[2]) if arrow in arrows]


def read(run_dir: Path) -> Read:
    write_trace(run_dir, run_dir / "trace.pftrace")
    return Read((run_dir / "trace.pftrace").read_bytes())


def test_every_span_is_a_slice_on_a_track_of_its_engine_under_its_worker(tmp_path: Path) -> None:
    blocks = record_run()
    found = read(store_run(tmp_path, blocks))
    spans = Counter(name for block in blocks for name, *_ in block.spans)
    drawn = Counter(name for _, name, *_ in found.slices)
    assert {name: drawn[name] for name in spans} == spans
    assert [name for name in drawn if name not in spans] == ["step 0", "step 1", "step 2"]
    assert {track.name for track in found.tracks.values() if not track.parent_uuid} == {
        "flow",
        "reward-0",
        "rollout-0",
        "rollout-1",
        "trainer-0",
    }
    (train,) = (track for track in found.tracks.values() if track.name == "train")
    assert found.tracks[train.parent_uuid].name == "trainer-0"
    assert {name for track, name, *_ in found.slices if track == train.uuid} == {"train.accumulate", "train.apply", "weights.publish"}
    assert found.instants == ["weights v1", "weights v2", "weights v3"]


def test_an_arrow_leads_from_each_samples_life_to_its_reward_its_micro_batch_and_its_update(tmp_path: Path) -> None:
    found = read(store_run(tmp_path, record_run(num_steps=2, num_prompts=3, n=4)))
    arrows = {arrow for *_, of_slice in found.slices for arrow in of_slice}
    assert len(arrows) == 2 * 3 * 4
    for arrow in arrows:
        assert found.way(arrow) == ["sample", "function.call", "train.accumulate", "train.apply"]


def test_counters_are_tracks_of_their_worker(tmp_path: Path) -> None:
    recorder, other = Recorder("w/rollout"), Recorder("v")
    for at, value in enumerate((1, 2.5, float("nan"), 3)):
        recorder.count("running", value, at * MS)
    other.count("running", 7, MS)
    found = read(store_run(tmp_path, [recorder.drain(), other.drain()]))
    assert found.counts == {"w: running": [1, 2.5, 3], "v: running": [7]}


def test_lives_that_overlap_are_on_rows_of_one_name(tmp_path: Path) -> None:
    recorder = Recorder("w/rollout")
    for index, (start, end) in enumerate([(0, 9), (1, 3), (2, 4), (3, 8), (5, 6)]):
        recorder.add("sample", start * MS, end * MS, sample=SampleId(0, 0, index).pack(), odd="é", share=0.5, whole=-3, yes=True)
    found = read(store_run(tmp_path, [recorder.drain()]))
    rows = Counter(found.tracks[track].name for track, *_ in found.slices)
    assert rows == {"samples": 5}
    assert len({track for track, *_ in found.slices}) == 3
    trace = unpacked((tmp_path / "trace.pftrace").read_bytes())
    begun = next(packet.track_event for packet in trace.packet if packet.track_event.type == 1)
    told = {one.name: getattr(one, one.WhichOneof("value")) for one in begun.debug_annotations}
    assert told == {"odd": "é", "share": 0.5, "whole": -3, "yes": True, "sample": "p0/0"}


def test_a_million_spans_take_less_than_40_megabytes(tmp_path: Path) -> None:
    spans, samples = 20_000, 2_000
    write_trace(make_large(tmp_path / "run", num_spans=spans, num_samples=samples, num_steps=5), tmp_path / "trace.pftrace")
    size = (tmp_path / "trace.pftrace").stat().st_size
    assert size * (1_000_000 / spans) < 40e6
    assert len(Read((tmp_path / "trace.pftrace").read_bytes()).slices) > spans


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["w", "w/train", "v"]),
            st.sampled_from(["sample", "wait", "rollout.step"]),
            st.integers(0, 50),
            st.integers(0, 20),
        ),
        max_size=30,
    )
)
def test_whatever_overlaps_each_slice_ends_where_its_span_did(tmp_path: Path, spans: list[tuple[str, str, int, int]]) -> None:
    recorders = {track: Recorder(track) for track, *_ in spans}
    for track, name, start, length in spans:
        recorders[track].anchor_ns = 0
        recorders[track].add(name, start * MS, (start + length) * MS)
    (tmp_path / "trace" / "spans.msgpack").unlink(missing_ok=True)
    found = read(store_run(tmp_path, [recorder.drain() for recorder in recorders.values()]))
    first = min((start for _, _, start, _ in spans), default=0)
    wanted = Counter((name, (start - first) * MS, (start + length - first) * MS) for _, name, start, length in spans)
    assert Counter((name, start, end) for _, name, start, end, _ in found.slices) == wanted


def test_the_command_takes_the_format_from_the_name_and_names_devices(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    asked = "--shape policy=Qwen2.5-7B --lengths lognormal:median=40,sigma=0.5,cap=90,icc=0.3 --batch 4 --n 2 --warm-steps 1"
    asked += " --max-new-tokens 90"
    root = Path(__file__).parents[2]
    simulated = ["simulate", str(root / "flows" / "grpo.py"), "--cluster", str(root / "clusters" / "h100-8.yaml"), *asked.split()]
    done = CliRunner().invoke(cli, [*simulated, "--out", str(run)])
    assert done.exit_code == 0, done.output
    for name in ("a.pftrace", "b.pftrace.gz", "c.json", "d.json.gz"):
        written = CliRunner().invoke(cli, ["trace", str(run), "-o", str(tmp_path / name)])
        assert written.exit_code == 0, written.output
    packets = (tmp_path / "a.pftrace").read_bytes()
    assert gzip.decompress((tmp_path / "b.pftrace.gz").read_bytes()) == packets
    found, told = Read(packets), json.loads((tmp_path / "c.json").read_text())
    assert any("[" in track.name for track in found.tracks.values() if not track.parent_uuid)
    events = told["traceEvents"]
    assert sum(event["ph"] in "Xb" for event in events) == len(found.slices)
    num_arrows = sum(len(found.way(arrow)) - 1 for arrow in {arrow for *_, of_slice in found.slices for arrow in of_slice})
    assert num_arrows == told["otherData"]["arrows"] > 0
