"""Samples while an inference server has them, and what has come of them so far.

waiting --sent--> running --heard--> ended
tokens, log-probabilities, spans of versions --grown--> Job
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from m2flow.engines.jobs import Job, parted
from m2flow.engines.server_client import Span
from m2flow.errors import EngineError
from m2flow.samples import Finish, SampleId


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

    @property
    def num_tokens(self) -> int:
        """That the sample has, without its prompt."""
        return len(self.job.tokens) + len(self.tokens)

    def so_far(self, version: int) -> Job:
        """The job with the tokens that have come, all of them by the weights of this version."""
        return grown(self, [Span(str(version), 0, len(self.tokens))] if self.tokens else [])

    def kept(self, version: int) -> Job:
        """What stays of it if the server does not end it. It begins anew if weights have changed under it: which of them made which token
        was not said yet."""
        return self.job if self.is_mixed else self.so_far(version)


@final
class Requests:
    """All that an engine has."""

    def __init__(self) -> None:
        self.waiting: deque[Job] = deque()
        self.running: dict[str, Running] = {}
        """By the names that the server knows."""
        self.aborting: set[str] = set()
        """Those of them that it was asked to end."""
        self.ended: list[tuple[Job, Finish]] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.ended)

    def clear(self) -> None:
        for all_of_a_kind in (self.waiting, self.running, self.aborting, self.ended):
            all_of_a_kind.clear()

    def add(self, jobs: Iterable[Job]) -> None:
        """They wait; what is whole has ended."""
        goes_on, whole = parted(jobs)
        self.waiting += goes_on
        self.ended += whole

    def put_back(self, jobs: Iterable[Job]) -> None:
        """They wait before all others. What is whole has ended: its last token came before the word that ends it."""
        goes_on, whole = parted(jobs)
        self.waiting.extendleft(reversed(goes_on))
        self.ended += whole

    def put_back_running(self, version: int) -> None:
        """The server is lost, which had weights of this version."""
        kept = [one.kept(version) for one in self.running.values()]
        self.running.clear()
        self.aborting.clear()
        self.put_back(kept)

    def end(self, rid: str, job: Job, finish: Finish) -> None:
        """The server is done with what it knows by this name, and this is what came of it."""
        del self.running[rid]
        self.aborting.discard(rid)
        self.ended.append((job, finish))

    @property
    def resting(self) -> list[Job]:
        """Those that the server does not have."""
        return [*(job for job, _ in self.ended), *self.waiting]

    def take(self, ids: Collection[int]) -> list[Job]:
        """Those of them that the server does not have; they leave."""
        taken = [job for job in self.resting if job.id in ids]
        self.ended = [(job, finish) for job, finish in self.ended if job.id not in ids]
        self.waiting = deque(job for job in self.waiting if job.id not in ids)
        return taken

    def take_ended(self) -> list[tuple[Job, Finish]]:
        ended, self.ended = self.ended, []
        return ended

    def progress(self) -> dict[int, int]:
        """Tokens of each sample."""
        return {job.id: len(job.tokens) for job in self.resting} | {one.job.id: one.num_tokens for one in self.running.values()}


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
