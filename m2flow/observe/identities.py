"""Which trace a run and each of its samples are, in OpenTelemetry's terms: functions of the run's name and the sample's identity.

So every process knows them without a further byte on the way, and what is sent a second time has the same ones.

Source: W3C Trace Context (2021), traceparent, version 00.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple


class SpanId(NamedTuple):
    """A span, and the trace that it is in."""

    trace: int
    """128 bits."""
    span: int
    """64 bits, never 0."""


def run_span(run: str) -> SpanId:
    """The root of a run's trace."""
    return _of(run)


def sample_span(run: str, sample: int) -> SpanId:
    """The root of a sample's trace: its first life in a rollout engine."""
    return _of(f"{run}/{sample}")


def span_id(name: str) -> int:
    """Of a span within a trace; the name tells it from every other one of the run."""
    return _of(name).span


def is_kept(of: SpanId, share: float) -> bool:
    """Whether a sample's trace is among the share that is sent."""
    return share >= 1 or (of.trace & (1 << 64) - 1) < share * (1 << 64)


def share_of_samples(environment: Mapping[str, str]) -> float:
    """The share of the samples' traces that is sent, by OTEL_TRACES_SAMPLER. The run's own trace always is."""
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
    """
    >>> traceparent_of(SpanId(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0xF067AA0BA902B7), is_sampled=True)
    '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'
    """
    return f"00-{of.trace:032x}-{of.span:016x}-{int(is_sampled):02x}"


def _of(name: str) -> SpanId:
    digest = hashlib.blake2b(name.encode(), digest_size=24).digest()
    return SpanId(int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big") or 1)
