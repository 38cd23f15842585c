"""A sample while an inference server has it, and what has come of it so far.

tokens, log-probabilities, spans of versions --grown--> Job
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from m2flow.engines.jobs import Job
from m2flow.engines.server_client import Span
from m2flow.errors import EngineError
from m2flow.samples import SampleId


@dataclass
class Running:
    """A request that the server has."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_mixed: bool = False
    """Weights have changed under it: which made which token is said at its end."""
    num_broken: int = 0
    """Connections that broke under it before this one."""


def grown(one: Running, spans: Sequence[Span], *, keeps: bool = False) -> Job:
    """A job with all its tokens, each with the version of the weights that made it.

    Args:
        keeps: caches stay when weights change, so what comes after the first weights is of an older cache.
    """
    job, count = one.job, len(one.tokens)
    if len(one.logprobs) != count or (count and (not spans or spans[-1].end != count)):
        raise EngineError(
            f"the server said {len(one.logprobs)} log-probabilities and versions {spans} of {count} tokens "
            f"of sample {SampleId.unpack(job.id)}"
        )
    versions = np.zeros(count, np.int32)
    kv_stale = np.zeros(count, np.bool_)
    for span in spans:
        versions[span.start : span.end] = int(span.version)
        kv_stale[span.start : span.end] = keeps and span.version != spans[0].version
    return replace(
        job,
        tokens=np.concatenate([job.tokens, np.array(one.tokens, np.int32)]),
        logprobs=np.concatenate([job.logprobs, np.array(one.logprobs, np.float32)]),
        versions=np.concatenate([job.versions, versions]),
        kv_stale=np.concatenate([job.kv_stale, kv_stale]),
    )
