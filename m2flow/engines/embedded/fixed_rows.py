"""Decode deterministically: a sample's bits depend on its identity, and on nothing else that runs.

Floating-point sums depend on the shapes that they are computed in. So every shape here is a function of identity: the prompt is
prefilled alone, and sample i of a group decodes in row i % R of a batch of exactly R rows, all at the same position of their
responses. Unused rows are filled with token 0; what they hold reaches no other row. A sample that is admitted later gets
such a batch for itself, and one that resumes replays its tokens through the same shapes.

This costs speed: each group's batch is a forward pass of its own. Mixtures of experts are refused, because the shapes in their experts
depend on what the other rows contain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import final

import numpy as np
import torch

from m2flow.engines.embedded.decoding import SamplingColumns, draw_recorded, forbidden_stops, shifted_logits, shifts, uniforms
from m2flow.engines.embedded.kv_slots import SlotCache
from m2flow.engines.embedded.slot_model import SlotModel
from m2flow.engines.models.constraints import forbidden_by
from m2flow.engines.models.requests import Job
from m2flow.errors import EngineError, OutOfMemory
from m2flow.samples import Finish, Masks, SampleId


@final
class FixedRowsDecoder:
    """Decode in batches of R rows, each for the members of one group that were admitted together."""

    def __init__(self, model: SlotModel, *, num_rows: int, max_running: int) -> None:
        if model.is_mixture:
            raise EngineError(
                "a mixture of experts can't decode deterministically: the shapes in its experts depend on the other samples",
                now="Run without --deterministic.",
            )
        self._model = model
        self._num_rows = num_rows
        self._max_batches = max(1, max_running // num_rows)
        self._batches: list[_FixedBatch] = []
        self._finished: list[tuple[Job, Finish]] = []
        """In the step that is under way."""

    @property
    def num_running(self) -> int:
        return sum(len(batch.jobs) for batch in self._batches)

    def running_ids(self) -> list[int]:
        return [job.id for batch in self._batches for job in batch.jobs.values()]

    @property
    def kv_tokens(self) -> tuple[int, int]:
        return 0, 0

    @property
    def kv_bytes(self) -> int:
        return sum(batch.kv_bytes for batch in self._batches)

    def progress(self) -> dict[int, int]:
        return {job.id: batch.count_of(job) for batch in self._batches for job in batch.jobs.values()}

    def step(self, queue: deque[Job], version: int) -> list[tuple[Job, Finish]]:
        self._admit(queue)
        for batch in self._batches:
            self._finished += batch.step(version)
        return self._stepped()

    def _stepped(self) -> list[tuple[Job, Finish]]:
        self._batches = [batch for batch in self._batches if batch.jobs]
        finished, self._finished = self._finished, []
        return finished

    def recover_from_oom(self, queue: deque[Job], version: int) -> tuple[int, list[tuple[Job, Finish]]]:
        if len(self._batches) < 2:
            raise OutOfMemory(
                f"out of memory with {self._num_rows} rows, the fewest that decode together",
                now="Lower option deterministic_rows of the engine (results change with it), or max_new_tokens.",
            )
        self._max_batches = len(self._batches) // 2
        kept, put_back = self._batches[: self._max_batches], self._batches[self._max_batches :]
        back = [batch.take(row, version) for batch in put_back for row in list(batch.jobs)]
        queue.extendleft(reversed(back))
        self._batches = kept
        return len(back), self._stepped()

    def take(self, ids: Collection[int], version: int) -> list[Job]:
        wanted = set(ids)
        jobs = []
        for batch in self._batches:
            for row in [row for row, job in batch.jobs.items() if job.id in wanted]:
                jobs.append(batch.take(row, version))
        self._batches = [batch for batch in self._batches if batch.jobs]
        return jobs

    def peek(self, ids: Collection[int], version: int) -> list[Job]:
        return [batch.peek(row, version) for batch in self._batches for row, job in batch.jobs.items() if job.id in ids]

    def keep_caches(self, version: int) -> None:
        for batch in self._batches:
            batch.keep_cache(version)

    def shrink_kv_cache(self) -> None:
        """Do nothing: a batch keeps what it needs to its end."""

    def release(self) -> None:
        assert not self._batches

    def _admit(self, queue: deque[Job]) -> None:
        starting: dict[tuple[object, ...], _FixedBatch] = {}
        while queue:
            job = queue[0]
            who = SampleId.unpack(job.id)
            block, row = divmod(who.index, self._num_rows)
            # Members of a group with different prompts or lengths would not have the same shapes.
            key = (who.call, who.prompt, block, job.prompt.tobytes(), job.sampling.max_new_tokens)
            batch = starting.get(key)
            if batch is None or row in batch.jobs:
                if len(self._batches) >= self._max_batches:
                    return
                batch = starting[key] = _FixedBatch(self._model, self._num_rows, len(job.prompt), job.sampling.max_new_tokens)
                self._batches.append(batch)
            batch.jobs[row] = queue.popleft()


@final
class _FixedBatch:
    """R rows at the same position."""

    def __init__(self, model: SlotModel, num_rows: int, prompt_length: int, max_new_tokens: int) -> None:
        self.jobs: dict[int, Job] = {}
        self._model = model
        self._num_rows = num_rows
        self._prompt_length = prompt_length
        self._count = 0
        self._cache = SlotCache()
        self._cache.reserve(num_rows, prompt_length + max_new_tokens)
        self._tokens = np.zeros((num_rows, max_new_tokens), np.int32)
        self._logprobs = np.zeros((num_rows, max_new_tokens), np.float32)
        self._masks: dict[int, Masks] = {}
        """By row, of those that record what their tokens are drawn from."""

    def step(self, version: int) -> list[tuple[Job, Finish]]:
        if self._count == 0:
            prompt = next(iter(self.jobs.values())).prompt
            logits = self._model.prefill(self._cache, [prompt], 0, [0] * self._num_rows).expand(self._num_rows, -1)
        else:
            positions = np.full(self._num_rows, self._prompt_length + self._count - 1)
            logits = self._model.decode(self._cache, self._tokens[:, self._count - 1].astype(np.int64), positions)
        self._draw(logits.cpu())  # some of what sampling does has no deterministic kernel on a GPU
        return self._finished(version)

    @property
    def kv_bytes(self) -> int:
        return self._cache.num_bytes

    def count_of(self, job: Job) -> int:
        """Number of tokens of a job: those of its prefix, until all are replayed."""
        return max(self._count, len(job.tokens))

    def peek(self, row: int, version: int) -> Job:
        """A row's job as it is now. A job that is being replayed has all tokens of its prefix."""
        job = self.jobs[row]
        if self._count <= len(job.tokens):
            return job
        return job.extended(self._tokens[row, : self._count], self._logprobs[row, : self._count], version, self._masks.get(row))

    def take(self, row: int, version: int) -> Job:
        job = self._extended(row, version)
        del self.jobs[row]
        self._masks.pop(row, None)
        self._tokens[row] = 0
        return replace(job, has_old_cache=False)

    def keep_cache(self, version: int) -> None:
        """Go on with new weights. If a row is being replayed, all are prefilled again, since the cache would be of mixed versions."""
        is_replaying = any(self._count < len(job.tokens) for job in self.jobs.values())
        self.jobs = {row: replace(self._extended(row, version), has_old_cache=not is_replaying) for row in self.jobs}
        self._count = 0 if is_replaying else self._count

    def _extended(self, row: int, version: int) -> Job:
        job = self.jobs[row]
        count = self.count_of(job)
        self._replay(job, row, count)
        return job.extended(self._tokens[row, :count], self._logprobs[row, :count], version, self._masks.get(row))

    def _draw(self, logits: torch.Tensor) -> None:
        for row in range(self._num_rows):
            job = self.jobs.get(row)
            if job is None:
                continue
            if self._count < len(job.tokens):
                self._replay(job, row, self._count + 1)
                continue
            s = job.sampling
            columns = SamplingColumns(np.array([s.temperature], np.float32), np.array([s.top_k]), np.array([s.top_p]), np.array([s.min_p]))
            alone = logits[row : row + 1]
            early = np.array([self._count < s.min_new_tokens])
            uniform = uniforms(np.array([job.seed], np.uint64), np.array([self._count]))
            said = np.concatenate([job.prompt, self._tokens[row, : self._count]])
            shifted = shifted_logits(alone, [(0, s, said)] if shifts(s) else [])
            stops = forbidden_stops(early, job.stop_ids[None], alone)
            forbidden = forbidden_by([(0, job.constraint, self._tokens[row, : self._count])], stops, alone)
            recorded = [0] if job.masks is not None else []
            token, logprob, masks = draw_recorded(alone, columns, uniform, forbidden, shifted, recorded)
            self._tokens[row, self._count], self._logprobs[row, self._count] = int(token), float(logprob)
            if masks:
                self._masks.setdefault(row, []).extend(masks)
        self._count += 1

    def _replay(self, job: Job, row: int, count: int) -> None:
        known = job.tokens[:count]
        self._tokens[row, : len(known)] = known
        self._logprobs[row, : len(known)] = job.logprobs[:count]
        if job.masks is not None:
            self._masks.setdefault(row, [])[: len(known)] = job.masks[:count]

    def _finished(self, version: int) -> list[tuple[Job, Finish]]:
        finished = []
        for row, job in list(self.jobs.items()):
            if self._count <= len(job.tokens):
                continue
            is_stop = bool((job.stop_ids == self._tokens[row, self._count - 1]).any()) or job.is_stopped_by(
                self._tokens[row, : self._count]
            )
            if is_stop or self._count >= job.sampling.max_new_tokens:
                finished.append((self.take(row, version), Finish.STOP if is_stop else Finish.LENGTH))
        return finished
