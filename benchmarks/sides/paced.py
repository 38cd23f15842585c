"""A rollout engine whose time is given: so many requests at once, so long for a step, so long for a token of a prompt that is not cached.

It computes nothing, so that what a run takes beyond the engine's time is the runtime's. It decodes as an inference server does, on a thread
of its own that waits for nobody: a request joins the batch at the next step after it came, and `step` waits until the step that runs is
over. A turn has as many tokens as it asks for. Its cache has `cache` tokens: the contexts of what runs, and the last ones of other samples,
of which the oldest go first. When it stops, it writes what it did to the file `told`. `registered` writes the entry point by which m2flow
finds it.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m2flow.engines.contract import Capabilities, EngineSettings, Generated, Occupancy, Request, RolloutEngine
from m2flow.engines.registry import EngineInfo
from m2flow.recipe import Model
from m2flow.samples import Finish
from m2flow.testing.fakes import FakeLanguage, decode_fake, encode_fake

_ALPHABET = np.array(encode_fake("abcdefghijklmnopqrstuvwxyz "), np.int32)


_BETWEEN_STEPS_S = 0.001
"""An engine that has had nothing to decode for longer was idle."""


class PacedRollout(RolloutEngine):  # type: ignore[misc]
    """Decodes `max_running` at once. Options: `step_ms`, `prefill_us` a token, `cache` in tokens, `told`."""

    name = "paced"
    capabilities = Capabilities("rollout", self_paced=True)

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        options = settings.options
        self._slots = settings.max_running
        self._step_s, self._prefill_s = float(str(options["step_ms"])) / 1e3, float(str(options["prefill_us"])) / 1e6
        self._room, self._told = int(str(options["cache"])), str(options.get("told", ""))
        self._queue: OrderedDict[int, Request] = OrderedDict()
        self._running: dict[int, tuple[Request, int]] = {}
        """Request, and the step that it began with."""
        self._ends: list[tuple[int, int]] = []
        self._done: list[Generated] = []
        self._cache: OrderedDict[int, np.ndarray[Any, Any]] = OrderedDict()
        self._num_kept = 0
        """Tokens in the cache, with those of what runs."""
        self._num_steps = self._num_tokens = self._num_prompt = self.num_cached = 0
        self._busy_s = self._idle_s = 0.0
        self._used = 0.0, 0.0
        """Processor seconds of the process, and of the thread that calls `step`, from the first request to the last step."""
        self._cpu_s = self._thread_s = 0.0
        self._changes = threading.Condition()
        """Guards all of the above; notified when a request came and when a step is over."""
        self._server: threading.Thread | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Nothing is loaded."""

    def stop(self) -> None:
        with self._changes:
            self._is_stopping = True
            self._changes.notify_all()
        if self._server is not None:
            self._server.join()
        if self._told and self._num_steps:
            Path(self._told).write_text(json.dumps(self.told()))

    def told(self) -> dict[str, float]:
        return {
            "num_tokens": self._num_tokens,
            "num_steps": self._num_steps,
            "busy_s": round(self._busy_s, 3),
            "idle_s": round(self._idle_s, 3),
            "process_cpu_s": round(self._used[0], 2),
            "thread_cpu_s": round(self._used[1], 2),
            "mean_batch": round(self._num_tokens / max(self._num_steps, 1), 1),
            "num_prompt_tokens": self._num_prompt,
            "cached_share": round(self.num_cached / max(self._num_prompt, 1), 4),
        }

    def onload(self) -> None:
        """It is always there."""

    def offload(self) -> None:
        """It is always there."""

    def add(self, requests: Sequence[Request]) -> None:
        with self._changes:
            if self._server is None:
                self._cpu_s, self._thread_s = time.process_time(), time.thread_time()
                self._server = threading.Thread(target=self._serve, name="paced", daemon=True)
                self._server.start()
            for request in requests:
                self._queue[request.id] = request
            self._changes.notify_all()

    def step(self) -> list[Generated]:
        """Wait for the end of the step that runs, unless samples have ended already."""
        with self._changes:
            at = self._num_steps
            while not self._done and self._num_steps == at and (self._running or self._queue):
                self._changes.wait()
            done, self._done = self._done, []
            self._used = time.process_time() - self._cpu_s, time.thread_time() - self._thread_s
            return done

    def _serve(self) -> None:
        """Decode step after step while there is something to decode."""
        free_at = 0.0
        while True:
            with self._changes:
                idle_from = time.perf_counter()
                while not (self._running or self._queue or self._is_stopping):
                    self._changes.wait()
                if self._is_stopping:
                    return
                now = time.perf_counter()
                if now - idle_from > _BETWEEN_STEPS_S and self._num_steps:
                    self._idle_s += now - idle_from
                    free_at = now
                num_new = self._admitted()
            takes_s = self._step_s + num_new * self._prefill_s
            # A sleep that ends late, as on a busy machine, is made up for: no engine would have waited.
            free_at = max(free_at, now - self._step_s) + takes_s
            time.sleep(max(free_at - time.perf_counter(), 0.0))
            with self._changes:
                self._busy_s += takes_s
                self._num_steps += 1
                self._num_tokens += len(self._running)
                self._end()
                self._changes.notify_all()

    def _admitted(self) -> int:
        """Take requests into the batch while it has slots; return the tokens to prefill."""
        num_new = 0
        while self._queue and len(self._running) < self._slots:
            packed, request = self._queue.popitem(last=False)
            self._running[packed] = request, self._num_steps
            heapq.heappush(self._ends, (self._num_steps + request.sampling.max_new_tokens, packed))
            num_new += self._prefilled(request)
        return num_new

    def _end(self) -> None:
        """Take the samples that are done out of the batch."""
        while self._ends and self._ends[0][0] <= self._num_steps:
            packed = heapq.heappop(self._ends)[1]
            if packed in self._running and self._length(packed) >= self._running[packed][0].sampling.max_new_tokens:
                self._done.append(self._made(packed, Finish.LENGTH))

    def _length(self, packed: int) -> int:
        return self._num_steps - self._running[packed][1]

    def _prefilled(self, request: Request) -> int:
        """The tokens of a context that are not in the cache."""
        context = np.asarray(request.prompt, np.int32)
        kept = self._cache.pop(request.id, None)
        num_same = 0
        if kept is not None:
            self._num_kept -= len(kept)
            shorter = min(len(kept), len(context))
            differs = np.flatnonzero(kept[:shorter] != context[:shorter])
            num_same = int(differs[0]) if len(differs) else shorter
        self._num_kept += len(context)
        self._evict()
        self._num_prompt += len(context)
        self.num_cached += num_same
        return len(context) - num_same

    def _made(self, packed: int, finish: Finish) -> Generated:
        request, count = self._running[packed][0], self._length(packed)
        del self._running[packed]
        tokens = _ALPHABET[np.random.Generator(np.random.PCG64(request.seed & (1 << 63) - 1)).integers(0, len(_ALPHABET), count)]
        prompt = np.asarray(request.prompt, np.int32)
        context = np.concatenate([prompt, tokens])
        self._cache[packed] = context
        self._num_kept += len(tokens)
        self._evict()
        logprobs, none = np.full(count, -1.0, np.float32), np.zeros(count, np.int32)
        return Generated(packed, prompt, tokens, logprobs, none, np.zeros(count, np.bool_), finish, decode_fake(tokens.tolist()))

    def _evict(self) -> None:
        while self._num_kept > self._room and self._cache:
            self._num_kept -= len(self._cache.popitem(last=False)[1])

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        with self._changes:
            for packed in (wanted := set(ids)):
                if (request := self._queue.pop(packed, None)) is not None:
                    self._running[packed] = request, self._num_steps
                    self._num_kept += len(request.prompt)
            gone = [self._made(packed, Finish.ABORT) for packed in wanted if packed in self._running]
            ended, self._done = [made for made in self._done if made.id in wanted], [made for made in self._done if made.id not in wanted]
            return gone + ended

    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        return []

    def progress(self) -> Mapping[int, int]:
        with self._changes:
            counts = {packed: self._num_steps - begun for packed, (_, begun) in self._running.items()} | dict.fromkeys(self._queue, 0)
            return counts | {made.id: len(made.tokens) for made in self._done}

    def occupancy(self) -> Occupancy:
        with self._changes:
            return Occupancy(len(self._running), len(self._queue), self._num_kept, self._room, 0, self.num_cached)

    @property
    def num_unfinished(self) -> int:
        with self._changes:
            return len(self._running) + len(self._queue) + len(self._done)

    @property
    def version(self) -> int:
        return 0

    def load_weights(self, tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool = False) -> None:
        raise NotImplementedError  # Nothing trains it.

    def weights(self) -> Iterator[tuple[str, Any]]:
        return iter(())

    def language(self) -> FakeLanguage:
        return FakeLanguage()


INFO = EngineInfo("paced", "paced:PacedRollout", PacedRollout.capabilities, "Takes as long as it is told.")


def registered(directory: Path) -> dict[str, str]:
    """The environment of a process that knows the engine."""
    metadata = directory / "paced-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: paced\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[m2flow.engines]\npaced = paced:INFO\n")
    path = [str(directory), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
