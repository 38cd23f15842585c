from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observed_run import LABELS, LINES, MS, record_run, store_run

from m2flow.observe.recorder import Recorder
from m2flow.observe.spans import SpanBlock
from m2flow.observe.timeline import write_timeline

HOSTILE = "</script><script>alert(1)</script><!--<b>&\u2028'\""


class _Page(html.parser.HTMLParser):
    """What a browser would take for elements and for the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.data = ""
        self.words = ""
        self._in_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]
        self._in_data = ("id", "data") in attributes

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    def handle_data(self, text: str) -> None:
        if self._in_data:
            self.data += text
        else:
            self.words += text


def _page(run_dir: Path, blocks: list[SpanBlock], **options: int) -> tuple[_Page, dict[str, Any]]:
    (run_dir / "trace" / "spans.msgpack").unlink(missing_ok=True)
    store_run(run_dir, blocks)
    write_timeline(run_dir, run_dir / "timeline.html", **options)
    page = _Page((run_dir / "timeline.html").read_text(encoding="utf-8"))
    return page, json.loads(page.data) if page.data else {}


def test_the_page_holds_every_span_once_in_lanes_of_workers_and_engines(tmp_path: Path) -> None:
    blocks = record_run()
    _, data = _page(tmp_path, blocks)
    names = sorted(name for block in blocks for name, *_ in block.spans)
    assert sorted(data["names"][name] for name in data["columns"]["name"]) == names
    assert [(lane["worker"], lane["engine"], lane["kind"]) for lane in data["lanes"]] == [
        ("rollout-0", "rollout", "work"),
        ("rollout-1", "rollout", "work"),
        ("reward-0", "function", "work"),
        ("trainer-0", "train", "work"),
        ("rollout-0", "rollout", "samples"),
        ("rollout-1", "rollout", "samples"),
    ]
    assert all(0 < lane["busy"] < 1 for lane in data["lanes"] if lane["kind"] == "work")


def test_a_line_of_the_flow_is_one_site_in_every_step_and_machinery_is_apart(tmp_path: Path) -> None:
    _, data = _page(tmp_path, record_run(num_steps=3))
    sites = [(site["label"], site["line"], site["kind"]) for site in data["sites"]]
    assert sites == [
        *((LABELS[i], LINES[i], "call") for i in range(3)),
        ("weights.publish", "", "machinery"),
        ("weights.load", "", "machinery"),
        ("wait", "", "idle"),
    ]


def test_spans_without_a_line_are_grouped_by_engine(tmp_path: Path) -> None:
    recorder = Recorder("laptop-0")
    for name in ("rollout.step", "rollout.prefill", "sample", "train.apply", "function.call"):
        recorder.add(name, 5, 6)
    _, data = _page(tmp_path, [recorder.drain()])
    assert sorted(site["label"] for site in data["sites"]) == ["function", "rollout", "train"]


def test_steps_and_versions_are_marked_where_they_begin(tmp_path: Path) -> None:
    recorder = Recorder("w")
    recorder.add("wait", 0, 2 * MS, step=1)
    recorder.add("train.apply", 0, 1 * MS, step=0)
    recorder.add("train.apply", 3 * MS, 4 * MS, step=1)
    recorder.add("weights.load", 2 * MS, 5 * MS, version=1)
    recorder.add("weights.publish", 4 * MS, 6 * MS, version=1)
    recorder.add("weights.load", 6 * MS, 7 * MS, version=2)
    _, data = _page(tmp_path, [recorder.drain()])
    assert data["steps"] == [[0, 0], [1, 3000]]
    assert data["versions"] == [[1, 6000], [2, 7000]]


def test_the_header_sums_the_run_up(tmp_path: Path) -> None:
    a, b = Recorder("a/train"), Recorder("b/rollout")
    a.anchor_ns = b.anchor_ns = 10**18
    a.add("train.apply", 0, 1000 * MS, step=0)
    b.add("rollout.step", 500 * MS, 2000 * MS, step=1)
    b.add("sample", 500 * MS, 1500 * MS, length=1234)
    page, _ = _page(tmp_path, [a.drain(), b.drain()])
    words = re.sub(r"\s+", " ", page.words)
    for text in (
        "Steps2",
        "Wall time2 s",
        "Samples1",
        "Tokens1,234",
        "Overlap25%",
        "a train50%",
        "b rollout75%",
        "2001-09-09 01:46:40 UTC",
    ):
        assert text.replace(" ", "") in words.replace(" ", ""), text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["w", "w/train", "v"]), st.sampled_from(["sample", "wait", "odd"]), st.integers(0, 50), st.integers(0, 9)
        ),
        max_size=30,
    )
)
def test_the_spans_of_a_row_are_in_order_and_disjoint(tmp_path: Path, spans: list[tuple[str, str, int, int]]) -> None:
    recorders = {track: Recorder(track) for track, *_ in spans}
    for track, name, start, length in spans:
        recorders[track].anchor_ns = 0
        recorders[track].add(name, start * MS, (start + length) * MS)
    _, data = _page(tmp_path, [recorder.drain() for recorder in recorders.values()])
    if not spans:
        assert data == {}
        return
    starts, durations = data["columns"]["start"], data["columns"]["duration"]
    rows = [range(first, last) for lane in data["lanes"] for first, last in lane["rows"]]
    assert sorted(i for row in rows for i in row) == list(range(len(spans)))
    for row in rows:
        assert all(starts[i] + durations[i] <= starts[i + 1] for i in row[:-1])


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    clean, _ = _page(tmp_path, record_run(num_steps=1, num_prompts=1, n=1))
    run_dir = tmp_path / "<img src=x onerror=alert(1)>"
    recorder = Recorder(f"{HOSTILE.replace('/', '')}/rollout")
    recorder.add("rollout.step", 0, MS, flow_line=HOSTILE, label=HOSTILE, prompt=HOSTILE)
    recorder.add(HOSTILE, MS, 2 * MS, finish=HOSTILE)
    recorder.add("sample", 0, MS, sample=HOSTILE, call=0)
    page, data = _page(run_dir, [recorder.drain()])
    assert page.tags.count("script") == clean.tags.count("script") == 2
    assert "img" not in page.tags
    assert "b" not in page.tags
    assert HOSTILE in [site["line"] for site in data["sites"]]
    assert {"prompt": HOSTILE} in data["columns"]["more"]


def test_the_page_asks_for_nothing_from_a_network(tmp_path: Path) -> None:
    page, _ = _page(tmp_path, record_run(num_steps=1))
    assert all(link.startswith("data:") for link in page.links)
    text = (tmp_path / "timeline.html").read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|fetch\(|XMLHttpRequest|innerHTML", text)


def test_a_run_without_spans_has_a_page_that_says_so(tmp_path: Path) -> None:
    page, data = _page(tmp_path, [])
    assert data == {}
    assert "No spans yet" in page.words
    assert "canvas" not in page.tags


def test_a_run_of_one_moment_has_a_page(tmp_path: Path) -> None:
    recorder = Recorder("w")
    recorder.add("train.apply", 5, 5)
    _, data = _page(tmp_path, [recorder.drain()])
    assert data["total"] == 0
    assert data["lanes"][0]["busy"] == 0


def test_a_point_shares_the_row_of_the_span_that_it_begins(tmp_path: Path) -> None:
    recorder = Recorder("w/train")
    recorder.add("train.apply", 5 * MS, 9 * MS)
    recorder.add("wait", 5 * MS, 5 * MS)
    _, data = _page(tmp_path, [recorder.drain()])
    assert data["lanes"][0]["rows"] == [[0, 2]]


def test_a_torn_trace_is_told(tmp_path: Path) -> None:
    store_run(tmp_path, record_run(num_steps=1))
    path = tmp_path / "trace" / "spans.msgpack"
    path.write_bytes(path.read_bytes()[:-3])
    write_timeline(tmp_path, tmp_path / "timeline.html")
    assert "could not be read" in (tmp_path / "timeline.html").read_text()


def test_a_huge_run_is_merged_and_thinned_and_the_page_says_how_much(tmp_path: Path) -> None:
    blocks = record_run(num_steps=10)
    spans = [span for block in blocks for span in block.spans]
    page, data = _page(tmp_path, blocks, max_spans=len(spans) // 2)
    drawn = [data["names"][name] for name in data["columns"]["name"]]
    for name in {name for name, *_ in spans} - {"sample", "rollout.step"}:
        assert drawn.count(name) == sum(other == name for other, *_ in spans)
    assert drawn.count("rollout.step") == 10 * 2
    assert len(drawn) <= len(spans) // 2
    merged = sum(name == "rollout.step" for name, *_ in spans) - 20
    assert f"{merged:,} decode steps were merged" in page.words
    assert "samples are not drawn" in page.words


def test_merged_decode_steps_keep_their_time_and_tokens(tmp_path: Path) -> None:
    blocks = record_run(num_steps=1)

    def decoded(data: dict[str, Any]) -> tuple[int, int]:
        columns = data["columns"]
        rows = [i for i, name in enumerate(columns["name"]) if data["names"][name] == "rollout.step"]
        return sum(columns["duration"][i] for i in rows), sum(columns["num_tokens"][i] for i in rows)

    assert decoded(_page(tmp_path, blocks, max_spans=30)[1]) == decoded(_page(tmp_path, blocks)[1])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_runs_the_page_without_an_error(tmp_path: Path) -> None:
    _page(tmp_path, record_run())
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    finished = subprocess.run(
        ["chromium", *flags.split(), "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
         "--virtual-time-budget=1000", "--dump-dom", (tmp_path / "timeline.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in finished.stderr
    assert finished.stdout.count("<button") == 6
    assert "Whole run" in finished.stdout
