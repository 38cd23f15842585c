"""Express spans, counters and metrics in OpenTelemetry's data model, and propagate trace context into users' functions.

    a function on a sample --Trace.enter--> current context of OpenTelemetry's API --traceparent--> request header
    Span, key --OtelSpans.of--> ReadableSpan of the run, ReadableSpans of its samples
    Count, a line of metrics.jsonl --data_of--> MetricsData

A run is one trace: its root is the span `run`, and work on chunks is below that. Each sample is a trace of its own: its first span in a
rollout engine is the root, and what any process does with the sample later is below that. Work on a chunk links to its samples. Trace
and span identifiers are hashes of the run's name and the sample's identity: every process computes them without exchanging anything, and
a span that is sent twice has the same identifier both times.

A user's function that is called on one sample runs in that sample's trace; one that is called on several runs in the run's. m2flow
starts no SDK on workers: where a function's own spans go is for its module to set up, as in any other service.

Names follow OpenTelemetry's semantic conventions where they exist (`gen_ai.*`, `code.*`, `messaging.*`, `error.*`, `process.*`,
`hw.gpu.*`); the rest is `m2flow.*`.

Sources: W3C Trace Context (2021), traceparent, version 00. OpenTelemetry specification 1.50, trace API (SpanContext, links); semantic
conventions for generative AI, in development.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import importlib.metadata
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, final

from m2flow.observe.spans import IDLE, OF_EPISODES, Attribute, Count, Span, SpanName, sample_of, samples_of, shown_name

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, Status
    from opentelemetry.trace import Span as OtelSpan


class SpanId(NamedTuple):
    """A span's identifier, with that of its trace."""

    trace: int
    """128 bits."""
    span: int
    """64 bits, never 0."""


def run_span(run: str) -> SpanId:
    """The root span of a run's trace."""
    return _of(run)


def sample_span(run: str, sample: int) -> SpanId:
    """The root span of a sample's trace: its first stay in a rollout engine."""
    return _of(f"{run}/{sample}")


def span_id(name: str) -> int:
    """The identifier of a span within its trace; `name` is unique in the run."""
    return _of(name).span


def is_kept(of: SpanId, share: float) -> bool:
    """Whether a sample's trace is among the sampled share that is sent."""
    return share >= 1 or (of.trace & (1 << 64) - 1) < share * (1 << 64)


def share_of_samples(environment: Mapping[str, str]) -> float:
    """Read the share of samples' traces to send from OTEL_TRACES_SAMPLER. The run's own trace is always sent."""
    sampler = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower().removeprefix("parentbased_")
    if sampler == "always_off":
        return 0.0
    if sampler != "traceidratio":
        return 1.0
    try:
        return min(max(float(environment.get("OTEL_TRACES_SAMPLER_ARG", "1")), 0.0), 1.0)
    except ValueError:
        return 1.0


def traceparent_of(of: SpanId, *, is_sampled: bool) -> str:
    """Format a span's identifier as the header `traceparent` of W3C Trace Context.

    >>> traceparent_of(SpanId(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0xF067AA0BA902B7), is_sampled=True)
    '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'
    """
    return f"00-{of.trace:032x}-{of.span:016x}-{int(is_sampled):02x}"


def _of(name: str) -> SpanId:
    digest = hashlib.blake2b(name.encode(), digest_size=24).digest()
    return SpanId(int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big") or 1)


def traceparent() -> str:
    """Return the header `traceparent` of W3C Trace Context for a request that a user's function makes.

    It names the span that is open there: the function's own, or else the sample's; empty where there is none.

    >>> traceparent()
    ''
    """
    from opentelemetry import trace

    current = trace.get_current_span().get_span_context()
    return traceparent_of(SpanId(current.trace_id, current.span_id), is_sampled=current.trace_flags.sampled) if current.is_valid else ""


@final
class Trace:
    """Set the trace context in which a run's user functions are called."""

    def __init__(self, run: str, environment: Mapping[str, str] = os.environ) -> None:
        self._run = run
        self._share = share_of_samples(environment)
        self._span_of = functools.lru_cache(_MOST_SPANS)(self._made)
        """A sample is often worked on by several functions, one after the other."""

    def enter(self, sample: int | None) -> None:
        """Make this sample's root span current, or the run's for None (work on several samples). The caller ends the context."""
        context, trace = _api()
        context.attach(trace.set_span_in_context(self._span_of(sample)))

    def _made(self, sample: int | None) -> OtelSpan:
        _, trace = _api()
        of = run_span(self._run) if sample is None else sample_span(self._run, sample)
        is_sampled = sample is None or is_kept(of, self._share)
        around = trace.SpanContext(*of, is_remote=True, trace_flags=trace.TraceFlags(int(is_sampled)))
        span: OtelSpan = trace.NonRecordingSpan(around)
        return span


_MOST_SPANS = 1024
"""Samples whose spans are remembered."""


@functools.cache
def _api() -> tuple[ModuleType, ModuleType]:
    """OpenTelemetry's modules of contexts and of traces, which are loaded with the first function."""
    from opentelemetry import context, trace

    return context, trace


_OF_MANY = frozenset({"m2flow.samples", "m2flow.unit_us", "m2flow.rewards"})
"""Attributes with a value for each sample of the work, which none of the samples' own spans repeats."""
_MOST_LINKS = 128
"""OpenTelemetry's default limit for a span."""
_MOST_KNOWN = 1 << 20
"""Samples of which it is remembered that their trace has a root."""
_SITE = re.compile(r"(.+):(\d+)")
_PLAIN_NAMES = {"num_tokens": "gen_ai.usage.output_tokens", "num_prompt_tokens": "gen_ai.usage.input_tokens", "error": "error.type"}
"""Attribute of a `sample` span -> name by the semantic conventions."""
_VERSION_OF_SCHEMA = "https://opentelemetry.io/schemas/1.37.0"
"""Version of the semantic conventions whose names are used."""
_DURATION_BOUNDS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""Bounds of the buckets of durations, as the conventions for generative AI advise."""
_METRICS = {
    "memory bytes": ("process.memory.usage", "By", False),
    "cpu seconds": ("process.cpu.time", "s", True),
    "gpu memory bytes": ("hw.gpu.memory.usage", "By", False),
    "gpu use": ("hw.gpu.utilization", "1", False),
    "cpu cores": ("m2flow.cpu_cores", "{core}", False),
    "clock offset s": ("m2flow.clock_offset", "s", False),
    "clock error s": ("m2flow.clock_error", "s", False),
    "generated tokens": ("m2flow.generated_tokens", "{token}", True),
    "put back for want of memory": ("m2flow.put_back_for_want_of_memory", "{sample}", True),
    "tokens found in the cache": ("m2flow.tokens_found_in_the_cache", "{token}", True),
    "tokens shared in training": ("m2flow.tokens_shared_in_training", "{token}", True),
    "tokens/s": ("m2flow.tokens_per_s", "{token}/s", False),
    "kv tokens": ("m2flow.kv_tokens", "{token}", False),
    "kv capacity": ("m2flow.kv_capacity", "{token}", False),
    IDLE: ("m2flow.idle_time", "s", True),
    "running": ("m2flow.running", "{sample}", False),
    "waiting": ("m2flow.waiting", "{sample}", False),
    "silent episodes": ("m2flow.silent_episodes", "{episode}", False),
}
"""Counter, without its role -> metric, unit, whether it only grows."""
_SENT_UNITS = {"bytes": "By", "samples": "{sample}", "parcels": "{parcel}", "seconds blocked": "s"}
"""Units of what a channel has sent in all."""
_CHANNEL = re.compile(r"channel (?P<what>samples|bytes), (?P<peer>.+)|channel to (?P<to>.+): (?P<sent>[a-z ._]+)")


@final
class OtelSpans:
    """Convert one run's spans to OpenTelemetry's. A `Resource` is made once for each worker."""

    def __init__(self, run: str, *, has_samples: bool = True) -> None:
        """Without `has_samples`, samples get no traces of their own: their spans are below the run's root like everything else."""
        self.run = run
        self._has_samples = has_samples
        self._resources: dict[str, Resource] = {}
        self._rooted: set[int] = set()
        """Samples whose trace has a root already."""
        self._share = share_of_samples(os.environ)

    @property
    def root(self) -> SpanContext:
        """Context of the run's root span."""
        return _context(*run_span(self.run))

    def context_of(self, sample: int) -> SpanContext:
        """Context of the root span of a sample's trace."""
        return _context(*sample_span(self.run, sample))

    def run_span(self, start_ns: int, end_ns: int, attributes: Mapping[str, Attribute]) -> ReadableSpan:
        """The root span, which covers the whole run."""
        from opentelemetry.trace import Status, StatusCode

        return _readable("run", self.root, None, self._resource("controller"), attributes, start_ns, end_ns, Status(StatusCode.UNSET), [])

    def of(self, span: Span, key: str) -> Iterator[ReadableSpan]:
        """Convert a span: once for the run's trace, and once for the trace of each sample that it was on.

        Args:
            key: unique among the spans of the run, and the same when the run is sent again.
        """
        from opentelemetry.trace import Link, Status, StatusCode

        error = span.attributes.get("error")
        status = Status(StatusCode.ERROR, str(error)) if error else Status(StatusCode.UNSET)
        resource, attributes = self._resource(span.lane[0]), attributes_of(span)
        own = f"{self.run}#{key}"
        sample = sample_of(span)
        if self._has_samples and span.name == SpanName.SAMPLE and sample is not None:
            root = self.context_of(sample)
            if not self._is_kept(root):
                return
            is_root = not span.attributes.get("had") and sample not in self._rooted
            if is_root and len(self._rooted) < _MOST_KNOWN:
                self._rooted.add(sample)
            context = root if is_root else _context(root.trace_id, span_id(own))
            parent = None if is_root else root
            links = [Link(self.root)] if is_root else []
            yield _readable(span.name, context, parent, resource, attributes, span.start_ns, span.end_ns, status, links)
            yield from self._queued(span, root, own, resource)
            return
        if self._has_samples and span.name in OF_EPISODES and sample is not None:
            root = self.context_of(sample)
            if self._is_kept(root):
                context = _context(root.trace_id, span_id(own))
                yield _readable(shown_name(span), context, root, resource, attributes, span.start_ns, span.end_ns, status, [])
            return
        context = _context(self.root.trace_id, span_id(own))
        touched = samples_of(span) if self._has_samples else ()
        roots = [root for sample in touched if self._is_kept(root := self.context_of(sample))]
        links = [Link(root) for root in roots[:_MOST_LINKS]]
        yield _readable(span.name, context, self.root, resource, attributes, span.start_ns, span.end_ns, status, links)
        short = {name: value for name, value in attributes.items() if name not in _OF_MANY}
        rewards = self._rewards(span, touched)
        for root in roots:
            of_sample = _context(root.trace_id, span_id(f"{own}/{root.trace_id}"))
            about = short | rewards.get(root.trace_id, {}) if rewards else short
            yield _readable(span.name, of_sample, root, resource, about, span.start_ns, span.end_ns, status, [Link(context)])

    def _rewards(self, span: Span, touched: Sequence[int]) -> dict[int, dict[str, Attribute]]:
        """What a reward gave each of its samples, by the trace of the sample."""
        values = span.attributes.get("rewards")
        if not isinstance(values, list) or len(values) != len(touched):
            return {}
        name = str(span.attributes.get("label") or "reward").removesuffix(".score")
        return {
            sample_span(self.run, sample).trace: {
                "m2flow.reward": value,
                "gen_ai.evaluation.name": name,
                "gen_ai.evaluation.score.value": value,
            }
            for sample, value in zip(touched, values, strict=True)
            if isinstance(value, int | float)
        }

    def _queued(self, stay: Span, root: SpanContext, own: str, resource: Resource) -> Iterator[ReadableSpan]:
        """The span from when a sample could be generated to its first token there."""
        from opentelemetry.trace import Status, StatusCode

        waited, first = stay.attributes.get("waited_us"), stay.attributes.get("first_us")
        start_ns = stay.start_ns - (waited * 1000 if isinstance(waited, int) else 0)
        end_ns = stay.start_ns + (first * 1000 if isinstance(first, int) else 0)
        if end_ns > start_ns:
            context = _context(root.trace_id, span_id(f"{own}/queued"))
            about: dict[str, Attribute] = {"m2flow.track": stay.track}
            yield _readable("sample.queued", context, root, resource, about, start_ns, end_ns, Status(StatusCode.UNSET), [])

    def _is_kept(self, root: SpanContext) -> bool:
        return is_kept(SpanId(root.trace_id, root.span_id), self._share)

    def _resource(self, worker: str) -> Resource:
        found = self._resources.get(worker)
        if found is None:
            found = self._resources[worker] = resource_of(self.run, worker)
        return found


def resource_of(run: str, worker: str) -> Resource:
    """The resource of one worker, from OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and the worker's name."""
    from opentelemetry.sdk.resources import Resource

    own = {"service.instance.id": worker, "m2flow.run": run, "service.version": _version(), "host.name": socket.gethostname()}
    given = Resource.create({**own, **_given_attributes()}, _VERSION_OF_SCHEMA)
    is_named = not str(given.attributes.get("service.name", "")).startswith("unknown_service")
    return given if is_named else given.merge(Resource({"service.name": "m2flow"}))


def _given_attributes() -> dict[str, str]:
    """Attributes of OTEL_RESOURCE_ATTRIBUTES, which go before m2flow's own of the same name."""
    from opentelemetry.sdk.resources import OTELResourceDetector

    return {name: str(value) for name, value in OTELResourceDetector().detect().attributes.items()}


def attributes_of(span: Span) -> dict[str, Attribute]:
    """Name a span's attributes by the semantic conventions; those that are None are left out.

    >>> attributes_of(Span("rollout-0", "sample", 0, 1, {"num_tokens": 7, "finish": "stop", "flow_line": "flows/grpo.py:23"}))
    ... # doctest: +NORMALIZE_WHITESPACE
    {'m2flow.track': 'rollout-0', 'gen_ai.operation.name': 'text_completion', 'gen_ai.provider.name': 'm2flow',
     'gen_ai.output.type': 'text', 'gen_ai.usage.output_tokens': 7, 'gen_ai.response.finish_reasons': ['stop'],
     'code.file.path': 'flows/grpo.py', 'code.line.number': 23}
    """
    found: dict[str, Attribute] = {"m2flow.track": span.track}
    is_sample, is_sent = span.name == SpanName.SAMPLE, span.name == SpanName.SEND
    if is_sample:
        found |= {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "m2flow", "gen_ai.output.type": "text"}
    if span.name == SpanName.TURN:
        found |= {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "m2flow"}
    if span.name == SpanName.TOOL:
        found |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": span.attributes.get("label", "")}
    if is_sent:
        found |= {"messaging.system": "m2flow", "messaging.operation.type": "send"}
    for name, value in span.attributes.items():
        if value is None:
            continue
        site = _SITE.fullmatch(value) if name == "flow_line" and isinstance(value, str) else None
        if site:
            found |= {"code.file.path": site[1], "code.line.number": int(site[2])}
        elif (is_sample or span.name == SpanName.TURN) and name == "finish":
            found["gen_ai.response.finish_reasons"] = [value] if not isinstance(value, list) else value
        elif name == "error" or ((is_sample or span.name == SpanName.TURN) and name in _PLAIN_NAMES):
            found[_PLAIN_NAMES[name]] = value
        elif is_sent and name in _SENT:
            found[_SENT[name]] = value
        else:
            found[f"m2flow.{name}"] = value
    return found


_SENT = {"num_samples": "messaging.batch.message_count", "num_bytes": "messaging.message.body.size", "label": "messaging.destination.name"}


class Point(NamedTuple):
    """A metric's value at a point in time."""

    worker: str
    metric: str
    unit: str
    grows: bool
    attributes: Mapping[str, str]
    value: float
    at_ns: int


def point_of(count: Count) -> Point:
    """Convert a counter's value to a metric's.

    >>> point_of(Count("rollout-0", "running, policy", 12.0, 5))[:5]
    ('rollout-0', 'm2flow.running', '{sample}', False, {'m2flow.role': 'policy'})
    >>> point_of(Count("rollout-0", "idle seconds, tool", 2.5, 5))[1:5]
    ('m2flow.idle_time', 's', True, {'m2flow.cause': 'tool'})
    >>> point_of(Count("rollout-0", "channel to train-0: bytes", 12.0, 5))[:4]
    ('rollout-0', 'm2flow.channel.sent_bytes', 'By', True)
    """
    worker = count.track.partition("/")[0]
    channel = _CHANNEL.fullmatch(count.name)
    if channel:
        peer, what = channel["peer"] or channel["to"], channel["what"] or f"sent {channel['sent']}"
        unit, grows = _SENT_UNITS.get(channel["sent"] or channel["what"] or "", "1"), channel["sent"] in _SENT_UNITS
        return Point(worker, f"m2flow.channel.{_slug(what)}", unit, grows, {"m2flow.peer": peer}, count.value, count.at_ns)
    name, _, role = count.name.partition(", ")
    metric = _METRICS.get(name, (f"m2flow.{_slug(name)}", "1", False))
    of = "m2flow.cause" if name == IDLE else "m2flow.role"
    return Point(worker, *metric, {of: role} if role else {}, count.value, count.at_ns)


def points_of_step(step: int, at_ns: int, values: Mapping[str, float]) -> Iterator[Point]:
    """Convert a line of `metrics.jsonl`: one point for each value, and one for the step."""
    for name, value in {**values, "step": float(step)}.items():
        yield Point("controller", f"m2flow.train.{_slug(name, keep='/')}", "1", False, {}, value, at_ns)


@final
class Durations:
    """Histograms of the durations of spans, cumulative since the first span that this process saw.

    `m2flow.span.duration` by the span's name; of samples `gen_ai.server.request.duration`, and `gen_ai.server.time_to_first_token` from
    when it could be generated.
    """

    def __init__(self) -> None:
        self._start_ns = self._end_ns = 0
        self._found: dict[tuple[str, str, str, str], list[float]] = {}
        """Worker, metric, attribute and its value -> count of each bucket, then count, sum, least and most."""

    def add(self, span: Span) -> None:
        worker, took_s = span.lane[0], span.duration_s
        self._start_ns = min(self._start_ns or span.start_ns, span.start_ns)
        self._end_ns = max(self._end_ns, span.end_ns)
        if span.name != SpanName.SAMPLE:
            self._count(worker, "m2flow.span.duration", "m2flow.span.name", str(span.name), took_s)
            return
        waited, first = (span.attributes.get(name) for name in ("waited_us", "first_us"))
        waited_s = waited / 1e6 if isinstance(waited, int | float) else 0.0
        self._count(worker, "gen_ai.server.request.duration", "gen_ai.operation.name", "text_completion", took_s + waited_s)
        if isinstance(first, int | float):
            self._count(worker, "gen_ai.server.time_to_first_token", "gen_ai.operation.name", "text_completion", first / 1e6 + waited_s)

    def _count(self, worker: str, metric: str, key: str, value: str, seconds: float) -> None:
        num = len(_DURATION_BOUNDS_S) + 1
        found = self._found.setdefault((worker, metric, key, value), [0.0] * num + [0.0, 0.0, seconds, seconds])
        found[bisect.bisect_left(_DURATION_BOUNDS_S, seconds)] += 1
        found[num:] = [found[num] + 1, found[num + 1] + seconds, min(found[num + 2], seconds), max(found[num + 3], seconds)]

    def metrics(self) -> dict[str, list[Metric]]:
        """The histograms of each worker so far."""
        from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, HistogramDataPoint, Metric

        points: dict[str, dict[str, list[HistogramDataPoint]]] = {}
        for (worker, metric, key, value), found in self._found.items():
            *buckets, count, total, least, most = found
            attributes = {key: value, **({"gen_ai.provider.name": "m2flow"} if key.startswith("gen_ai") else {})}
            times = self._start_ns, self._end_ns
            point = HistogramDataPoint(
                attributes, *times, int(count), total, [int(one) for one in buckets], list(_DURATION_BOUNDS_S), least, most
            )
            points.setdefault(worker, {}).setdefault(metric, []).append(point)
        return {
            worker: [Metric(name, "", "s", Histogram(of, AggregationTemporality.CUMULATIVE)) for name, of in metrics.items()]
            for worker, metrics in points.items()
        }


def data_of(run: str, points: Iterable[Point], *, began_ns: int = 0, more: Mapping[str, list[Metric]] | None = None) -> MetricsData:
    """Pack points as the SDK hands them to an exporter.

    Args:
        began_ns: when counters that only grow began; 0: not known.
        more: further metrics of each worker.
    """
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Metric,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
        Sum,
    )

    by_worker: dict[str, dict[tuple[str, str, bool], list[NumberDataPoint]]] = {}
    for point in points:
        start_ns = began_ns if point.grows else point.at_ns
        found = NumberDataPoint(dict(point.attributes), start_ns, point.at_ns, point.value)
        by_worker.setdefault(point.worker, {}).setdefault((point.metric, point.unit, point.grows), []).append(found)
    scope, more = _scope(), more or {}
    for worker in more:
        by_worker.setdefault(worker, {})
    return MetricsData(
        [
            ResourceMetrics(
                resource_of(run, worker),
                [
                    ScopeMetrics(
                        scope,
                        [
                            *more.get(worker, []),
                            *(
                                Metric(
                                    name,
                                    "",
                                    unit,
                                    Sum(found, AggregationTemporality.CUMULATIVE, is_monotonic=True) if grows else Gauge(found),
                                )
                                for (name, unit, grows), found in metrics.items()
                            ),
                        ],
                        _VERSION_OF_SCHEMA,
                    )
                ],
                _VERSION_OF_SCHEMA,
            )
            for worker, metrics in by_worker.items()
        ]
    )


def _scope() -> InstrumentationScope:
    """The scope of all that m2flow records: its version, and the semantic conventions that its names follow."""
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope("m2flow", _version(), _VERSION_OF_SCHEMA)


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("m2flow")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _readable(
    name: str,
    context: SpanContext,
    parent: SpanContext | None,
    resource: Resource,
    attributes: Mapping[str, Attribute],
    start_ns: int,
    end_ns: int,
    status: Status,
    links: list[Link],
) -> ReadableSpan:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanKind

    return ReadableSpan(
        name,
        context,
        parent,
        resource,
        attributes,
        links=links,
        kind=SpanKind.PRODUCER if name == SpanName.SEND else SpanKind.INTERNAL,
        status=status,
        start_time=start_ns,
        end_time=end_ns,
        instrumentation_scope=_scope(),
    )


def _context(trace_id: int, span_id: int) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _slug(name: str, keep: str = "") -> str:
    """
    >>> _slug("tokens/s"), _slug("kv tokens"), _slug("setup/loss", keep="/")
    ('tokens_per_s', 'kv_tokens', 'setup/loss')
    """
    name = name if keep else name.replace("/", " per ")
    return re.sub(rf"[^A-Za-z0-9_.{re.escape(keep)}-]+", "_", name)
