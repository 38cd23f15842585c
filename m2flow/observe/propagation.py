"""The trace that a user's function is called in, so that what it does elsewhere can be told as a part of it.

    a unit of a task --Trace.enter--> the current context of OpenTelemetry's API --traceparent--> a header

A function that is called on one sample is in that sample's trace, below its first life in a rollout engine; one that is called on
several is in the run's. m2flow's own spans are there too, so a collector shows them together. m2flow starts no SDK on workers: where a
function's own spans go is for its module to set up, as in any other service.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

from m2flow.observe.identities import SpanId, is_kept, run_span, sample_span, share_of_samples, traceparent_of


def traceparent() -> str:
    """The header `traceparent` of W3C Trace Context for a request that a user's function makes.

    It names the span that is open there: the function's own, or else the sample's; empty where there is none.

    >>> traceparent()
    ''
    """
    from opentelemetry import trace

    current = trace.get_current_span().get_span_context()
    return traceparent_of(SpanId(current.trace_id, current.span_id), is_sampled=current.trace_flags.sampled) if current.is_valid else ""


@final
class Trace:
    """Of one run."""

    def __init__(self, run: str, environment: Mapping[str, str] = os.environ) -> None:
        self._run = run
        self._share = share_of_samples(environment)

    def enter(self, sample: int | None) -> None:
        """From here on, in this context, work is done on this sample; None: on several. The context is the caller's to end."""
        from opentelemetry import context, trace

        of = run_span(self._run) if sample is None else sample_span(self._run, sample)
        is_sampled = sample is None or is_kept(of, self._share)
        around = trace.SpanContext(*of, is_remote=True, trace_flags=trace.TraceFlags(int(is_sampled)))
        context.attach(trace.set_span_in_context(trace.NonRecordingSpan(around)))
