from __future__ import annotations

import gzip
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observed_run import MS, record_run, store_run

from m2flow.observe.metrics import MetricsWriter, write_curve
from m2flow.observe.perfetto import write_trace
from m2flow.observe.spans import Recorder
from m2flow.runs.display import curve
from m2flow.samples import SampleId


def _trace(run_dir: Path) -> dict[str, Any]:
    write_trace(run_dir, run_dir / "trace.json")
    return json.loads((run_dir / "trace.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def _check(events: list[dict[str, Any]]) -> None:
    """The rules of the Trace Event Format that viewers rely on."""
    stacks: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    opened: dict[tuple[str, str], float] = {}
    arrows: dict[int, float] = {}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        assert all(event[key] == round(event[key] * 1000) / 1000 for key in ("ts", "dur") if key in event), (
            "nanoseconds, not what floats add"
        )
        kind = event["ph"]
        if kind == "X":
            assert isinstance(event["tid"], int)
            assert event["dur"] >= 0
            stacks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif kind == "b":
            assert (event["cat"], event["id"]) not in opened
            opened[event["cat"], event["id"]] = event["ts"]
        elif kind == "e":
            assert opened.pop((event["cat"], event["id"])) <= event["ts"]
        elif kind == "s":
            assert event["id"] not in arrows
            arrows[event["id"]] = event["ts"]
        elif kind in "tf":
            assert event["bp"] == "e"
            assert arrows[event["id"]] <= event["ts"]
            arrows[event["id"]] = event["ts"] if kind == "t" else math.inf
        elif kind == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        elif kind == "i":
            assert event["s"] in "gpt"
        else:
            assert kind == "M", kind
    assert not opened
    assert Counter(event["ph"] for event in events)["s"] == len(arrows) == Counter(event["ph"] for event in events)["f"]
    for slices in stacks.values():
        open_until: list[float] = []
        for start, end in sorted(slices, key=lambda piece: (piece[0], -piece[1])):
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, "slices of a thread must nest"
            open_until.append(end)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(stacks) == named


def test_a_trace_obeys_the_format_and_holds_every_span(tmp_path: Path) -> None:
    blocks = record_run()
    events = _trace(store_run(tmp_path, blocks))["traceEvents"]
    _check(events)
    spans = Counter(name for block in blocks for name, *_ in block.spans)
    drawn = Counter(event["name"] for event in events if event["ph"] in "Xb")
    assert {name: drawn[name] for name in spans} == spans
    assert [name for name in drawn if name not in spans] == ["step 0", "step 1", "step 2"]


def test_workers_are_processes_and_engines_are_threads(tmp_path: Path) -> None:
    recorder = Recorder("laptop-0")
    for name in ("rollout.step", "function.call", "train.apply"):
        recorder.add(name, 5, 6)
    events = _trace(store_run(tmp_path, [recorder.drain()]))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["laptop-0"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == ["rollout", "function", "train"]


def test_arrows_lead_from_the_step_a_sample_ended_in_to_what_scored_it_trained_on_it_and_applied_it(tmp_path: Path) -> None:
    rollout, reward, trainer = Recorder("rollout-0"), Recorder("reward-0"), Recorder("trainer-0")
    rollout.anchor_ns = reward.anchor_ns = trainer.anchor_ns = 0
    sample = SampleId(0, 3, 1)
    rollout.add("rollout.step", 0, 10 * MS)
    rollout.add("rollout.step", 10 * MS, 20 * MS)
    rollout.add("rollout.step", 20 * MS, 30 * MS)
    rollout.add("sample", 1 * MS, 20 * MS, sample=str(sample), call=0)
    reward.add("function.call", 22 * MS, 23 * MS, samples=range(sample.pack(), sample.pack() + 1))
    trainer.add("train.accumulate", 25 * MS, 26 * MS, samples=[sample.pack()], call=2)
    trainer.add("train.accumulate", 27 * MS, 28 * MS, samples=[SampleId(0, 9, 9).pack()], call=2)
    trainer.add("train.apply", 28 * MS, 29 * MS, call=1)
    trainer.add("train.apply", 30 * MS, 31 * MS, call=2)
    trace = _trace(store_run(tmp_path, [rollout.drain(), reward.drain(), trainer.drain()]))
    events = trace["traceEvents"]
    _check(events)
    starts, stations, ends = ([event["ts"] for event in events if event["ph"] == kind] for kind in "stf")
    assert stations == [22_000.001, 25_000.001]
    assert ends == [30_000.001]  # The update of its own call.
    assert all(10_000 < at < 20_000 for at in starts)
    assert (trace["otherData"]["arrows"], trace["otherData"]["arrows_left_out"]) == (3, 1)


def test_every_sample_of_a_run_has_arrows_to_its_reward_its_micro_batch_and_its_update(tmp_path: Path) -> None:
    trace = _trace(store_run(tmp_path, record_run(num_steps=2, num_prompts=3, n=4)))
    assert trace["otherData"]["arrows"] == 3 * 2 * 3 * 4
    assert trace["otherData"]["arrows_left_out"] == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["w", "w/train", "v"]),
            st.sampled_from(["sample", "wait", "rollout.step", "odd"]),
            st.integers(0, 50),
            st.integers(0, 20),
        ),
        max_size=30,
    )
)
def test_whatever_overlaps_the_slices_of_each_thread_nest(tmp_path: Path, spans: list[tuple[str, str, int, int]]) -> None:
    recorders = {track: Recorder(track) for track, *_ in spans}
    for track, name, start, length in spans:
        recorders[track].anchor_ns = 0
        recorders[track].add(name, start * MS, (start + length) * MS, step=start % 3)
    (tmp_path / "trace" / "spans.msgpack").unlink(missing_ok=True)
    _check(_trace(store_run(tmp_path, [recorder.drain() for recorder in recorders.values()]))["traceEvents"])


def test_counters_leave_out_what_json_can_not_say(tmp_path: Path) -> None:
    recorder = Recorder("w/rollout")
    for value in (1, math.nan, 3):
        recorder.count("running", value, 5)
    events = _trace(store_run(tmp_path, [recorder.drain()]))["traceEvents"]
    _check(events)
    assert [event["args"]["value"] for event in events if event["ph"] == "C"] == [1, 3]


def test_an_effect_long_before_its_cause_gets_no_arrow(tmp_path: Path) -> None:
    recorder = Recorder("w")
    recorder.add("rollout.step", 0, 20 * MS)
    recorder.add("sample", 0, 20 * MS, sample=7)
    recorder.add("function.call", 10 * MS, 11 * MS, samples=[7])
    assert _trace(store_run(tmp_path, [recorder.drain()]))["otherData"]["arrows_left_out"] == 1


def test_a_compressed_trace_says_the_same(tmp_path: Path) -> None:
    store_run(tmp_path, record_run())
    write_trace(tmp_path, tmp_path / "trace.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())) == _trace(tmp_path)


def test_an_empty_run_gives_an_empty_trace(tmp_path: Path) -> None:
    assert _trace(tmp_path)["traceEvents"] == []


def _write_metrics(run_dir: Path, num_steps: int, at_seven: dict[str, float] | None = None) -> None:
    with MetricsWriter(run_dir, tensorboard=False) as writer:
        for step in range(num_steps):
            writer.write(step, {"reward": 1 - 0.9**step} if step != 7 else at_seven or {})
            if step % 10 == 0:
                writer.write(step, {"eval/accuracy": 1 - 0.85**step})


def test_the_curve_is_titled_with_the_flow_and_names_what_it_draws(tmp_path: Path) -> None:
    run_dir = tmp_path / "grpo-20260102-030405"
    _write_metrics(run_dir, 60)
    write_curve(run_dir, tmp_path / "curve.svg")
    texts = (tmp_path / "curve.svg").read_text()
    drawn = [element.text or "" for element in ET.fromstring(texts).iter() if element.tag.endswith("}text")]
    for text in ("grpo", "step", "held-out accuracy", "reward of samples"):
        assert any(one.startswith(text) for one in drawn)
    write_curve(run_dir, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "curve.svg").read_bytes()


def test_the_rewards_of_all_roles_are_drawn_each_in_a_colour_of_its_own(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(3):
            writer.write(step, {"verifier/reward": 0.5 + step, "solver/reward": 1.0 * step, "eval/reward": 0.1, "setup/reward": 9.0})
    write_curve(tmp_path, tmp_path / "curve.svg")
    root = ET.fromstring((tmp_path / "curve.svg").read_text())
    drawn = [element.text or "" for element in root.iter() if element.tag.endswith("}text")]
    assert [text for text in drawn if text.endswith("of samples")] == ["solver/reward of samples", "verifier/reward of samples"]
    lines = {found for element in root.iter() if (found := re.search(r"stroke: (#0072b2|#56b4e9)", element.get("style", "")))}
    assert {line[1] for line in lines} == {"#0072b2", "#56b4e9"}
    page = curve({"solver/reward": [(0, 0.0), (1, 1.0)], "verifier/reward": [(0, 0.5), (1, 1.5)]})
    assert len(set(re.findall(r"<polyline[^>]*stroke='(#\w+)'", page))) == 2


def test_what_is_not_finite_is_not_drawn(tmp_path: Path) -> None:
    for name, at_seven in {"none": {}, "nan": {"reward": math.nan}, "inf": {"reward": math.inf, "eval/odd": math.nan}}.items():
        _write_metrics(tmp_path / name, 30, at_seven)
        write_curve(tmp_path / name, tmp_path / f"{name}.svg", title="same")
    assert (tmp_path / "none.svg").read_bytes() == (tmp_path / "nan.svg").read_bytes() == (tmp_path / "inf.svg").read_bytes()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_short_run_has_a_curve_too(tmp_path: Path, num_steps: int) -> None:
    _write_metrics(tmp_path, num_steps)
    write_curve(tmp_path, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_s_numbers_are_written_down_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from m2flow.observe.metrics import MetricsWriter\n"
        "with MetricsWriter(sys.argv[1]) as writer:\n"
        "    writer.write(0, {'reward': 0.5})\n"
        "assert 'tensorboardX.summary' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "assert not [finder for finder in sys.meta_path if 'm2flow' in type(finder).__module__]\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"reward" in events.read_bytes()


def test_an_evaluation_on_another_scale_gets_a_panel_of_its_own(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"reward": 0.5, "eval/$\\frac$": 120.0})
    write_curve(tmp_path, tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text().count('<g id="axes_') == 2
