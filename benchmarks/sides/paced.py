"""A rollout engine whose time is given: so many requests at once, so long for a step, so long for a token of a prompt that is not cached.

It computes nothing, so that what a run takes beyond the engine's time is the runtime's. A turn has as many tokens as it asks for. The last
context of each sample stays cached, up to `cache` tokens in all, the oldest ones go first. When it stops, it writes what it did to the
file `told`. `registered` writes the entry point by which m2flow finds it.
"""

from __future__ import annotations

import heapq
import json
import os
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


class PacedRollout(RolloutEngine):  # type: ignore[misc]
    """Options: `slots`, `step_ms`, `prefill_us` a token, `cache` in tokens, `told`."""

    name = "paced"
    capabilities = Capabilities("rollout")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        options = settings.options
        self._slots = int(str(options["slots"]))
        self._step_s, self._prefill_s = float(str(options["step_ms"])) / 1e3, float(str(options["prefill_us"])) / 1e6
        self._room, self._told = int(str(options["cache"])), str(options.get("told", ""))
        self._queue: OrderedDict[int, Request] = OrderedDict()
        self._running: dict[int, tuple[Request, int]] = {}
        """Request, and the step that it began with."""
        self._ends: list[tuple[int, int]] = []
        self._cache: OrderedDict[int, np.ndarray[Any, Any]] = OrderedDict()
        self._num_kept = 0
        self._num_steps = self._num_tokens = self._num_prompt = self.num_cached = 0
        self._busy_s, self._free_at = 0.0, 0.0
        self._used = 0.0, 0.0
        """Processor seconds of the process, and of the thread that steps, from the first request to the last step."""
        self._cpu_s = self._thread_s = self._late_s = 0.0
        """By which the last sleep ended late, as on a busy machine: no engine would, so the next step begins so much earlier."""

    def start(self) -> None:
        """Nothing is loaded."""

    def stop(self) -> None:
        if self._told and self._num_steps:
            Path(self._told).write_text(json.dumps(self.told()))

    def told(self) -> dict[str, float]:
        return {
            "num_tokens": self._num_tokens,
            "num_steps": self._num_steps,
            "busy_s": round(self._busy_s, 3),
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
        if not self._num_steps and not self._queue:
            self._cpu_s, self._thread_s = time.process_time(), time.thread_time()
        for request in requests:
            self._queue[request.id] = request

    def step(self) -> list[Generated]:
        """Sleep for as long as the step takes; the time since the last step was over is idle, and lost."""
        num_new = 0
        while self._queue and len(self._running) < self._slots:
            packed, request = self._queue.popitem(last=False)
            self._running[packed] = request, self._num_steps
            heapq.heappush(self._ends, (self._num_steps + request.sampling.max_new_tokens, packed))
            num_new += self._prefilled(request)
        if not self._running:
            return []
        takes_s = self._step_s + num_new * self._prefill_s
        now = time.perf_counter()
        self._free_at = max(self._free_at, now - self._late_s) + takes_s
        time.sleep(max(self._free_at - now, 0.0))
        self._late_s = max(time.perf_counter() - self._free_at, 0.0)
        self._busy_s += takes_s
        self._num_steps += 1
        self._num_tokens += len(self._running)
        self._used = time.process_time() - self._cpu_s, time.thread_time() - self._thread_s
        done = []
        while self._ends and self._ends[0][0] <= self._num_steps:
            packed = heapq.heappop(self._ends)[1]
            if packed in self._running and self._length(packed) >= self._running[packed][0].sampling.max_new_tokens:
                done.append(self._made(packed, Finish.LENGTH))
        return done

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
        self._num_kept += len(context)
        while self._num_kept > self._room:
            self._num_kept -= len(self._cache.popitem(last=False)[1])
        logprobs, none = np.full(count, -1.0, np.float32), np.zeros(count, np.int32)
        return Generated(packed, prompt, tokens, logprobs, none, np.zeros(count, np.bool_), finish, decode_fake(tokens.tolist()))

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        for packed in (wanted := set(ids)):
            if (request := self._queue.pop(packed, None)) is not None:
                self._running[packed] = request, self._num_steps
        return [self._made(packed, Finish.ABORT) for packed in wanted if packed in self._running]

    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        return []

    def progress(self) -> Mapping[int, int]:
        return {packed: self._num_steps - begun for packed, (_, begun) in self._running.items()} | dict.fromkeys(self._queue, 0)

    def occupancy(self) -> Occupancy:
        return Occupancy(len(self._running), len(self._queue), self._num_kept, self._room, 0, self.num_cached)

    @property
    def num_unfinished(self) -> int:
        return len(self._running) + len(self._queue)

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
