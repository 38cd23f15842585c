from __future__ import annotations

import sys
import threading
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed_run import record_run

from m2flow.observe.spans import Recorder, Span, SpanBlock, SpanName, busy_seconds, now_ns, overlap_seconds, sample_of, samples_of, spans_of
from m2flow.samples import Finish, SampleId, make_ids

S = 1_000_000_000


def test_a_block_survives_the_wire_whatever_numpy_put_into_it() -> None:
    recorder = Recorder("rollout-0")
    recorder.add(
        SpanName.FUNCTION_CALL,
        np.int64(5),
        np.int64(9),
        num_samples=np.int32(3),
        share=np.float32(0.5),
        finish=Finish.STOP,
        samples=make_ids(1, 2, 2),
        odd={"a": 1},
    )
    recorder.count("running", np.float32(2), 7)
    block = recorder.drain()
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(block), type=SpanBlock)
    assert again == block
    assert again.spans[0][3] == {
        "num_samples": 3,
        "share": 0.5,
        "finish": "stop",
        "samples": make_ids(1, 2, 2).tolist(),
        "odd": "{'a': 1}",
    }
    assert again.counts == [("running", 2.0, 7)]


def test_a_drain_hands_over_everything_once() -> None:
    recorder = Recorder("w")
    recorder.add("wait", 1, 2)
    assert len(recorder) == 1
    assert len(recorder.drain().spans) == 1
    assert not recorder.drain()


def test_no_span_is_lost_or_doubled_while_other_threads_record() -> None:
    recorder = Recorder("w")
    done = threading.Event()

    def record(first: int) -> None:
        for i in range(first, first + 20_000):
            recorder.add("function.call", i, i)

    def drain() -> None:
        while not done.is_set():
            seen.extend(start for _, start, _, _ in recorder.drain().spans)

    seen: list[int] = []
    threads = [threading.Thread(target=record, args=(20_000 * i,)) for i in range(3)]
    drainer = threading.Thread(target=drain)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in [drainer, *threads]:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        drainer.join()
    finally:
        sys.setswitchinterval(interval)
    seen += [start for _, start, _, _ in recorder.drain().spans]
    assert sorted(seen) == list(range(60_000))


def test_times_are_wall_clock_after_the_anchor() -> None:
    recorder = Recorder("w")
    before = time.time_ns()
    with recorder.span("train.apply"):
        pass
    after = time.time_ns()
    (span,) = spans_of(recorder.drain())
    assert before - S < span.start_ns <= span.end_ns < after + S


def test_a_body_that_raises_leaves_its_span_with_the_error() -> None:
    recorder = Recorder("w")
    with pytest.raises(ZeroDivisionError), recorder.span("function.call", call=2):
        raise ZeroDivisionError
    assert recorder.drain().spans[0][3] == {"call": 2, "error": "ZeroDivisionError"}


def test_a_span_that_ends_before_it_starts_becomes_a_point_and_says_so() -> None:
    recorder = Recorder("w")
    recorder.add("send", 10, 3, call=1)
    (span,) = spans_of(recorder.drain())
    assert span.duration_s == 0
    assert span.attributes == {"call": 1, "clamped": True}


def test_a_lane_comes_from_the_track_or_else_from_the_name() -> None:
    assert Span("w/rollout", "switch", 0, 1).lane == ("w", "rollout")
    assert Span("w", "rollout.step", 0, 1).lane == ("w", "rollout")
    assert Span("w", "weights.publish", 0, 1).lane == ("w", "train")
    assert Span("w", "weights.load", 0, 1).lane == ("w", "rollout")
    assert Span("w", "function.call", 0, 1).lane == ("w", "function")
    assert Span("w", "my own", 0, 1).lane == ("w", "worker")


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_a_sample_is_known_by_its_packed_identity_or_by_its_text_and_call(call: int, prompt: int, index: int) -> None:
    sample = SampleId(call, prompt, index)
    assert sample_of(Span("w", "sample", 0, 1, {"sample": sample.pack()})) == sample.pack()
    assert sample_of(Span("w", "sample", 0, 1, {"sample": str(sample), "call": call})) == sample.pack()


def test_what_is_not_a_sample_is_none() -> None:
    for attributes in ({}, {"sample": "p1/2"}, {"sample": "<b>", "call": 1}, {"sample": "p1/99999999", "call": 1}):
        assert sample_of(Span("w", "sample", 0, 1, attributes)) is None


def test_samples_may_be_a_list_or_a_range() -> None:
    recorder = Recorder("w")
    for samples in ([1, 2, 3], range(1, 4), np.arange(1, 4), "rubbish", None):
        recorder.add("function.call", 0, 1, samples=samples)
    assert [list(samples_of(span)) for span in spans_of(recorder.drain())] == [[1, 2, 3], [1, 2, 3], [1, 2, 3], [], []]


def test_busy_time_counts_nested_and_doubled_work_once_and_waiting_never() -> None:
    recorder = Recorder("w")
    recorder.add("train.accumulate", 0, 4 * S)
    recorder.add("train.apply", 1 * S, 2 * S)
    recorder.add("train.accumulate", 3 * S, 5 * S)
    recorder.add("wait", 5 * S, 9 * S)
    recorder.add("rollout.step", 8 * S, 9 * S)
    recorder.add("sample", 0, 9 * S)
    spans = spans_of(recorder.drain())
    assert busy_seconds(spans) == {"w": 6.0}
    start = min(span.start_ns for span in spans)
    assert busy_seconds(spans, (start + 4 * S, start + 20 * S)) == {"w": 2.0}


def test_a_track_that_only_waits_has_no_busy_time() -> None:
    assert busy_seconds([Span("w", "wait", 0, S)]) == {"w": 0}
    assert busy_seconds([]) == {}


spans_by_seconds = st.lists(
    st.builds(
        lambda track, start, length: Span(track, "train.apply", start * S, (start + length) * S),
        st.sampled_from("abc"),
        st.integers(0, 30),
        st.integers(0, 8),
    ),
    max_size=20,
)


@given(spans_by_seconds)
def test_unions_and_overlaps_agree_with_counting_second_by_second(spans: list[Span]) -> None:
    def runs(track: str, second: int) -> bool:
        return any(span.track == track and span.start_ns <= second * S < span.end_ns for span in spans)

    seconds = range(40)
    expected = {track: float(sum(runs(track, second) for second in seconds)) for track in {span.track for span in spans}}
    assert busy_seconds(spans) == expected
    both = sum(runs("a", second) and runs("b", second) for second in seconds)
    assert overlap_seconds(spans, lambda span: span.track == "a", lambda span: span.track == "b") == both


def test_in_a_split_run_scoring_and_training_overlap_generation() -> None:
    spans = [span for block in record_run(start_ns=now_ns()) for span in spans_of(block)]
    generating = [SpanName.ROLLOUT_STEP, SpanName.ROLLOUT_PREFILL]
    for name in (SpanName.FUNCTION_CALL, SpanName.TRAIN_ACCUMULATE):
        assert overlap_seconds(spans, lambda span: span.name in generating, lambda span, name=name: span.name == name) > 0.003
