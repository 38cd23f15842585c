"""What a run's trace holds: a span for every task, switch, sync and wait, each sample's life, and the counters."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_clusters import generate_call, prompts
from synced_run import PATIENCE_S, synced

from m2flow.engines.contract import EngineSettings, Occupancy
from m2flow.macro.session import Backend
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.worker.engine_host import EngineHost, Gauges
from m2flow.micro.worker.worker import IdleSpans
from m2flow.observe.spans import Recorder, Span, spans_of
from m2flow.observe.store import Trace, read_trace
from m2flow.recipe import Model
from m2flow.runner.run import Run
from m2flow.samples import make_ids
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing.fakes import FakeRollout

AHEAD_S = 7
"""Of the workers' wall clocks, in the run below."""


@contextlib.contextmanager
def bench_of(recorder: Recorder, **options: int) -> Iterator[EngineHost]:
    engine_host = EngineHost(
        [EngineSlot("policy", "rollout", "fake")],
        {"policy": Model("fake")},
        {"rollout": EngineSettings(max_running=4)},
        run_seed=0,
        recorder=recorder,
        shared_prefix="",
        **options,
    )
    engine_host.open()
    try:
        yield engine_host
    finally:
        engine_host.close()


def steps(engine_host: EngineHost, number: int) -> None:
    for _ in range(number):
        engine_host.step()
        engine_host.tokens()


def lives_in(recorder: Recorder) -> list[Span]:
    return [span for span in spans_of(recorder.drain()) if span.name == "sample"]


def test_a_life_says_how_long_its_sample_waited_and_how_it_ended() -> None:
    recorder = Recorder("rollout-0")
    ids = make_ids(1, 8).tolist()
    with bench_of(recorder) as engine_host:
        engine_host.generate(generate_call(1), ids, prompts(8), waited_us=1234)
        steps(engine_host, 200)
        lives = lives_in(recorder)
    assert sorted(int(str(life.attributes["sample"])) for life in lives) == ids
    for life in lives:
        assert life.attributes["finish"] in ("stop", "length")
        assert life.attributes["waited_us"] == 1234
        first_us = life.attributes["first_us"]
        assert isinstance(first_us, int)
        assert 0 <= first_us <= life.duration_s * 1e6


def test_a_sample_that_is_stopped_and_goes_on_has_a_life_for_each_stay() -> None:
    recorder = Recorder("rollout-0")
    ids = make_ids(1, 4).tolist()
    call = generate_call(1)
    with bench_of(recorder) as engine_host:
        engine_host.generate(call, ids, prompts(4))
        steps(engine_host, 3)
        _, stopped = engine_host.stop(1)
        first = lives_in(recorder)
        engine_host.resume(call, stopped, call)
        steps(engine_host, 200)
        second = lives_in(recorder)
    assert len(stopped) > 0
    aborted = {life.attributes["sample"]: life.attributes["num_tokens"] for life in first if life.attributes["finish"] == "abort"}
    assert sorted(aborted) == stopped.ids.tolist()
    assert {life.attributes["sample"]: life.attributes["had"] for life in second} == aborted
    assert all(life.attributes["finish"] in ("stop", "length") for life in second)


def test_a_sample_that_nobody_goes_on_with_has_a_life_too() -> None:
    recorder = Recorder("rollout-0")
    ids = make_ids(1, 8).tolist()
    with bench_of(recorder) as engine_host:
        engine_host.generate(generate_call(1), ids, prompts(8))
        steps(engine_host, 2)
        done = {int(str(life.attributes["sample"])) for life in lives_in(recorder)}
        engine_host.abort(1)
        lives = lives_in(recorder)
    assert sorted([*done, *(int(str(life.attributes["sample"])) for life in lives)]) == ids
    assert {life.attributes["finish"] for life in lives} == {"given_up"}


def test_an_engine_drains_from_the_first_sample_that_nobody_follows_until_the_switch() -> None:
    recorder = Recorder("rollout-0")
    with bench_of(recorder) as engine_host:
        for call in (1, 2):
            engine_host.generate(generate_call(call), make_ids(call, 8).tolist(), prompts(8))
            steps(engine_host, 200)
        engine_host.switch("train")
        spans = spans_of(recorder.drain())
        engine_host.switch("rollout")
        engine_host.switch("train")
        assert not [span for span in spans_of(recorder.drain()) if span.name == "switch.drain"]
    (drain,) = [span for span in spans if span.name == "switch.drain"]
    (switch,) = [span for span in spans if span.name == "switch"]
    lives = [span for span in spans if span.name == "sample" and span.attributes["call"] == 2]
    assert drain.end_ns <= switch.start_ns
    assert drain.start_ns in {life.end_ns for life in lives}
    assert drain.attributes["num_drained"] == sum(life.end_ns >= drain.start_ns for life in lives)
    assert 1 <= sum(life.end_ns > drain.start_ns for life in lives) < 4  # Four run at a time, so that many had begun and not ended.
    assert drain.attributes["num_aborted"] == 0


def test_what_is_stopped_while_an_engine_drains_is_counted() -> None:
    recorder = Recorder("rollout-0")
    with bench_of(recorder) as engine_host:
        engine_host.generate(generate_call(1), make_ids(1, 4).tolist(), prompts(4))
        steps(engine_host, 1)
        engine_host.stop(1)
        engine_host.switch("train")
    spans = spans_of(recorder.drain())
    (drain,) = [span for span in spans if span.name == "switch.drain"]
    finishes = Counter(span.attributes["finish"] == "abort" for span in spans if span.name == "sample")
    assert (drain.attributes["num_drained"], drain.attributes["num_aborted"]) == (finishes[False], finishes[True])
    assert finishes[True]


def test_a_thinned_recording_merges_steps_and_keeps_one_group_in_so_many() -> None:
    whole, thin = Recorder("rollout-0"), Recorder("rollout-0")
    for recorder, every in ((whole, 1), (thin, 4)):
        with bench_of(recorder, record_every=every) as engine_host:
            engine_host.generate(generate_call(1), make_ids(1, 8).tolist(), prompts(8))
            steps(engine_host, 200)
    all_spans, few = spans_of(whole.drain()), spans_of(thin.drain())
    num_steps = sum(span.name == "rollout.step" for span in all_spans)
    merged = [span for span in few if span.name == "rollout.step"]
    assert sum(int(str(span.attributes["num_steps"])) for span in merged) == num_steps
    assert len(merged) == math.ceil(num_steps / 4)
    assert sum(span.name == "sample" for span in all_spans) == 8
    assert sum(span.name == "sample" for span in few) == 2


def test_gauges_say_what_runs_what_waits_and_when_there_is_nothing_any_more() -> None:
    recorder = Recorder("rollout-0")
    with bench_of(recorder) as engine_host:
        gauges = Gauges(recorder, engine_host)
        engine_host.generate(generate_call(1), make_ids(1, 8).tolist(), prompts(8))
        steps(engine_host, 1)
        gauges.record({})
        steps(engine_host, 200)
        gauges.record({})
    values: dict[str, list[float]] = {}
    for name, value, _ in recorder.drain().counts:
        values.setdefault(name, []).append(value)
    assert values["running, policy"][-1] == 0
    assert values["running, policy"][0] + values.get("waiting, policy", [0])[0] > 0
    assert values["generated tokens"][-1] > values["generated tokens"][0]
    assert values["version, policy"] == [0]
    assert "tokens/s" in values


def test_what_an_engine_found_in_its_cache_and_put_back_is_counted_once_there_is_any() -> None:
    class Full(FakeRollout):
        def occupancy(self) -> Occupancy:
            return Occupancy(self.num_unfinished, num_put_back=self.num_unfinished // 4, num_cached=self.num_unfinished * 5)

    recorder = Recorder("rollout-0")
    with bench_of(recorder) as engine_host:
        engine_host._rollout["policy"] = full = Full(Model("fake"), EngineSettings(max_running=4))
        full.start()
        gauges = Gauges(recorder, engine_host)
        gauges.record({})
        engine_host.generate(generate_call(1), make_ids(1, 8).tolist(), prompts(8))
        gauges.record({})
    counted = {(name, value) for name, value, _ in recorder.drain().counts}
    assert {(name, value) for name, value in counted if "cache" in name or "put back" in name} == {
        ("tokens found in the cache, policy", 40),
        ("put back for want of memory, policy", 2),
    }


def test_waits_are_between_two_pieces_of_work_and_say_for_what() -> None:
    recorder = Recorder("functions-0")
    idling, call = IdleSpans(recorder), generate_call(3)
    idling.waits(None)
    idling.works()
    assert recorder.drain().spans == []
    idling.waits(None)
    idling.waits(call)
    time.sleep(0.002)
    idling.works()
    idling.works()
    idling.waits(None)
    time.sleep(0.002)
    idling.works()
    block = recorder.drain()
    first, second = spans_of(block)
    assert [(name, value) for name, value, _ in block.counts] == [
        ("idle seconds, rows", pytest.approx(first.duration_s, abs=1e-6)),
        ("idle seconds, task", pytest.approx(second.duration_s, abs=1e-6)),
    ]
    assert (first.name, first.attributes["call"], first.attributes["label"]) == ("wait", 3, call.name)
    assert second.attributes == {"label": "for a task"}
    assert first.end_ns <= second.start_ns
    assert not first.is_work


@dataclass(frozen=True)
class Recorded:
    trace: Trace
    run_dir: Path
    began_ns: int
    ended_ns: int
    received: object


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A real run, whose workers' clocks are ahead; to a collector too, if its exporter is installed."""
    place = tmp_path_factory.mktemp("recorded")
    (place / "sitecustomize.py").write_text(
        "import time\n"
        "wall, steady = time.time_ns, time.monotonic_ns\n"
        f"time.time_ns = lambda: wall() + {AHEAD_S} * 10**9\n"
        "time.monotonic_ns = lambda: steady() + 3 * 10**9\n"
    )
    spec = ClusterSpec(
        placement="split",
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", workers=2),
        train=TrainSpec(engine="fake", token_budget=64),
    )
    has_exporter = importlib.util.find_spec("opentelemetry.proto") is not None
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "path", [str(place), *sys.path])
        received = None
        settings = RunSettings(fork_workers=False, runs_dir=str(place / "runs"), heartbeat_s=0.05, drain_s=240.0)
        if has_exporter:
            from otlp_receiver import receiving

            received = stack.enter_context(receiving())
            settings = settings.model_copy(update={"otlp": received.url})
            patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "240")

        def once_clocks_are_known(backend: Backend) -> Backend:
            """The workers are up; a run that is over before their clocks are compared has their own times."""
            deadline = time.monotonic() + PATIENCE_S
            while len({count.track for count in read_trace(run.run_dir).counts if count.name == "clock offset s"}) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            return backend

        began_ns = time.time_ns()
        run = Run(synced, {"model": "fake"}, spec, settings, warn=pytest.fail, around=once_clocks_are_known)
        run.execute()
        yield Recorded(read_trace(run.run_dir), run.run_dir, began_ns, time.time_ns(), received)


@pytest.mark.slow
def test_a_run_records_every_kind_of_work_on_the_worker_that_did_it(recorded: Recorded) -> None:
    seen = Counter((span.lane[0].partition("-")[0], span.name) for span in recorded.trace.spans)
    expected = [
        ("rollout", "rollout.step"), ("rollout", "sample"), ("rollout", "send"), ("rollout", "weights.load"),
        ("functions", "function.call"),
        ("functions", "send"), ("train", "train.accumulate"), ("train", "train.apply"), ("train", "weights.publish"), ("train", "wait"),
    ]  # fmt: skip
    assert [kind for kind in expected if not seen[kind]] == []
    lives = [span for span in recorded.trace.spans if span.name == "sample"]
    assert len(lives) == 3 * 4 * 2
    assert all({"waited_us", "finish", "version"} <= set(life.attributes) for life in lives)


@pytest.mark.slow
def test_a_run_records_its_counters(recorded: Recorded) -> None:
    seen = {(count.track.partition("-")[0], count.name) for count in recorded.trace.counts}
    for name in ("running, policy", "version, policy", "generated tokens", "tokens/s"):
        assert ("rollout", name) in seen
    for worker in ("rollout", "functions", "train"):
        assert {(worker, "cpu seconds"), (worker, "memory bytes"), (worker, "clock offset s"), (worker, "clock error s")} <= seen


@pytest.mark.slow
def test_a_worker_whose_clock_is_off_is_stored_in_the_controllers_time(recorded: Recorded) -> None:
    offsets = [count.value for count in recorded.trace.counts if count.name == "clock offset s"]
    errors = [count.value for count in recorded.trace.counts if count.name == "clock error s"]
    most_ns = round((max(errors) + 0.001) * 1e9)  # As far as it may be off by what was known of it first.
    began_ns, ended_ns = recorded.began_ns - most_ns, recorded.ended_ns + most_ns
    assert all(began_ns <= span.start_ns <= span.end_ns <= ended_ns for span in recorded.trace.spans)
    assert all(began_ns <= count.at_ns <= ended_ns for count in recorded.trace.counts)
    assert all(abs(offset + AHEAD_S) <= error + 0.001 for offset, error in zip(offsets, errors, strict=True))


@pytest.mark.slow
def test_a_collector_gets_the_run_and_each_samples_trace_through_its_processes(recorded: Recorded) -> None:
    if recorded.received is None:
        pytest.skip("needs the extra otlp")
    spans = recorded.received.spans  # type: ignore[attr-defined]
    roots = {span.trace_id: span.span_id for _, span in spans if span.name == "sample"}
    assert len(roots) == 3 * 4 * 2
    for trace, root in roots.items():
        mine = [(str(resource["service.instance.id"]).partition("-")[0], span) for resource, span in spans if span.trace_id == trace]
        assert {worker for worker, _ in mine} == {"rollout", "functions", "train"}
        assert {span.name for _, span in mine} >= {"sample", "sample.queued", "function.call", "train.accumulate"}
        assert {span.parent_span_id for _, span in mine if span.name != "sample"} == {root}
    names = {name for _, name, _ in recorded.received.points}  # type: ignore[attr-defined]
    assert {"process.cpu.time", "process.memory.usage", "m2flow.running", "m2flow.train.reward"} <= names
