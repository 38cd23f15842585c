"""What recording a span costs: a tuple of `m2flow.observe.Recorder`, against a span of the OpenTelemetry SDK, in one process.

    python benchmarks/recording.py [--num-spans 50000] [--repeats 7] [--run RUN_DIR]

Both record the same name and four attributes. The SDK's tracer has a processor that keeps ended spans in a list, the least that an
export needs. Rounds alternate, the best of each kind counts, and the last line is JSON. With a run's directory it also says what share of
that run's time its recording took: what each worker recorded, at these prices, and what the controller wrote.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from m2flow.observe.spans import Recorder, SpanBlock, now_ns
from m2flow.observe.store import TraceStore, read_trace, to_otel


class _Keep(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def record_added(num_spans: int) -> Recorder:
    recorder = Recorder("rollout-0/rollout")
    start_ns = now_ns()
    for _ in range(num_spans):
        recorder.add("rollout.step", start_ns, start_ns, call=4, step=1, num_tokens=64, version=1)
    return recorder


def record_with(num_spans: int) -> Recorder:
    recorder = Recorder("rollout-0/rollout")
    for _ in range(num_spans):
        with recorder.span("rollout.step", call=4, step=1, num_tokens=64, version=1):
            pass
    return recorder


def record_sdk(num_spans: int) -> _Keep:
    keep, provider = _Keep(), TracerProvider()
    provider.add_span_processor(keep)
    tracer = provider.get_tracer("benchmark")
    attributes = {"m2flow.call": 4, "m2flow.step": 1, "m2flow.num_tokens": 64, "m2flow.version": 1}
    for _ in range(num_spans):
        with tracer.start_as_current_span("rollout.step", attributes=attributes):
            pass
    return keep


def microseconds(work: Callable[[], object], num_spans: int) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / num_spans * 1e6


def share_of(run_dir: Path, best: dict[str, float]) -> dict[str, float]:
    """Of a run's time from its first span to its last, in its busiest worker and in the controller. Counters are counted as spans."""
    trace = read_trace(run_dir)
    wall_us = (max(span.end_ns for span in trace.spans) - min(span.start_ns for span in trace.spans)) / 1e3
    by_worker = Counter(record.track.partition("/")[0] for record in (*trace.spans, *trace.counts))
    return {
        "worker_share": max(by_worker.values()) * (best["with_us"] + best["drain_us"]) / wall_us,
        "controller_share": by_worker.total() * best["store_us"] / wall_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-spans", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--run", type=Path)
    options = parser.parse_args()
    num_spans = options.num_spans
    best: dict[str, float] = {}

    def measure(name: str, work: Callable[[], object]) -> None:
        best[name] = min(best.get(name, float("inf")), microseconds(work, num_spans))

    for _ in range(options.repeats):
        measure("add_us", lambda: record_added(num_spans))
        measure("with_us", lambda: record_with(num_spans))
        measure("sdk_us", lambda: record_sdk(num_spans))
        recorder = record_added(num_spans)
        blocks: list[SpanBlock] = []
        measure("drain_us", lambda: blocks.append(recorder.drain()))  # noqa: B023
        with tempfile.TemporaryDirectory() as run_dir:
            with TraceStore(run_dir) as store:
                measure("store_us", lambda: store.append(blocks[0]))  # noqa: B023
            measure("otel_us", lambda: to_otel(Path(run_dir), max_spans=num_spans))
    for name, meaning in (
        ("add_us", "Recorder.add, times known"),
        ("with_us", "with Recorder.span, times taken"),
        ("sdk_us", "with a span of the OpenTelemetry SDK"),
        ("drain_us", "drain to a block, later"),
        ("store_us", "write to the trace file, later, in the controller"),
        ("otel_us", "convert to otel.jsonl, once, after the run"),
    ):
        print(f"{best[name]:8.2f} us a span   {meaning}")
    shares = share_of(options.run, best) if options.run else {}
    for name, share in shares.items():
        print(f"{share:8.3%} of the run's time   {name.removesuffix('_share')}")
    result = {name: round(value, 3) for name, value in best.items()}
    print(
        json.dumps(
            {
                **result,
                **{name: round(share, 6) for name, share in shares.items()},
                "sdk_over_add": round(best["sdk_us"] / best["add_us"], 1),
                "sdk_over_with": round(best["sdk_us"] / best["with_us"], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
