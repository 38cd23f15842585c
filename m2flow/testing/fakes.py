"""A rollout engine without a model: every token is a hash, in exact integers, so that schedules can be compared bit by bit.

A token is a function of (weights, prompt, seed, position), and of nothing else: not of what else runs, nor of when; where weights changed
under it, also of which weights its earlier tokens were read by. The weights are one int64 array, `FAKE_WEIGHT`, which
`m2flow.testing.fake_train.FakeTrain` changes. Text is its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import numpy.typing as npt

from m2flow.engines.contract import Capabilities, EngineSettings, Generated, Occupancy, Request, RolloutEngine
from m2flow.errors import EngineError, PromptTooLong
from m2flow.recipe import Model
from m2flow.samples import Finish, SampleId

FAKE_WEIGHT = "fake.weight"
FAKE_EOS = 1
FAKE_CONTEXT = 4096

_FIRST_BYTE = 3  # ids below are <pad>, <eos>, <unk>
_MASK = (1 << 64) - 1
_PRINTABLE = (32, 95)  # the first, and how many
_STOP_PERIODS = (4, 16, 64)  # mean lengths of the three kinds of sample: most short, some long


def fake_hash(*parts: int) -> int:
    """64 bits that depend on every bit of every part, and on their order.

    Source:
        The finaliser of SplitMix64: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195.

    >>> fake_hash(1, 2) == fake_hash(2, 1)
    False
    """
    state = len(parts)
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def initial_fake_weights(model: Model) -> npt.NDArray[np.int64]:
    """The weights that both fakes start from: int64 [8], by `model.seed`."""
    return np.array([fake_hash(model.seed, i) >> 33 for i in range(8)], np.int64)


def fake_numbers(weights: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """A number between 0 and 1 for each token, which both fakes give it: a multiple of 1/1024."""
    seed = fake_hash(*(value & _MASK for value in weights.tolist())) & 0xFFFF
    return (((tokens * 2654435761 + position * 40503 + seed * 97) % 1021) / 1024).astype(np.float32)


def encode_fake(text: str) -> list[int]:
    """The ids of a text: its bytes, after the special ids."""
    return [byte + _FIRST_BYTE for byte in text.encode("utf-8", "surrogatepass")]


def decode_fake(ids: Iterable[int]) -> str:
    """The text of these ids, without special ones."""
    return bytes(i - _FIRST_BYTE for i in ids if _FIRST_BYTE <= i < _FIRST_BYTE + 256).decode("utf-8", "replace")


@dataclass(eq=False)
class _Sequence:
    request: Request
    prompt: list[int]
    stops: frozenset[int]
    prompt_hash: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_stale: list[bool] = field(default_factory=list)
    old_cache: int = 0
    """What older weights have read of it; 0: nothing."""
    num_read: int = 0
    """Tokens by then."""

    @property
    def finish(self) -> Finish | None:
        if self.tokens and self.tokens[-1] in self.stops:
            return Finish.STOP
        return Finish.LENGTH if len(self.tokens) >= self.request.sampling.max_new_tokens else None


@final
class FakeRollout(RolloutEngine):
    """Requests come and go as in a real one; temperature 0 ignores the seed, other temperatures change nothing."""

    name = "fake"
    capabilities = Capabilities(kind="rollout", weights_under_requests=True, rests=True, condenses=True, probes=True)

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        self._model = model
        self._settings = settings
        self._weights: npt.NDArray[np.int64] | None = None
        self._digest = 0
        self._version = 0
        self._is_away = False
        self._queue: list[_Sequence] = []
        self._running: list[_Sequence] = []

    def start(self) -> None:
        self._take_weights(initial_fake_weights(self._model))

    def stop(self) -> None:
        self._weights = None
        self._queue.clear()
        self._running.clear()

    def onload(self) -> None:
        self._is_away = False

    def offload(self) -> None:
        self._is_away = True

    def rest(self) -> None:
        self._is_away = True

    def add(self, requests: Sequence[Request]) -> None:
        known = {sequence.request.id for sequence in self._queue + self._running}
        new = []
        for request in requests:
            who = SampleId.unpack(request.id)
            prompt = encode_fake(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
            if len(prompt) + request.sampling.max_new_tokens > FAKE_CONTEXT:
                raise PromptTooLong(
                    f"sample {who}: a prompt of {len(prompt)} tokens and max_new_tokens={request.sampling.max_new_tokens} "
                    f"do not fit the context of {FAKE_CONTEXT}",
                    now="Shorten the prompt or lower max_new_tokens.",
                )
            if request.id in known:
                raise EngineError(f"sample {who} is already being generated")
            known.add(request.id)
            stops = frozenset({FAKE_EOS, *request.sampling.stop_token_ids})
            stale = list(request.prefix_kv_stale) or [False] * len(request.prefix)
            given = list(request.prefix), list(request.prefix_logprobs), list(request.prefix_versions), stale
            new.append(_Sequence(request, prompt, stops, fake_hash(*prompt), *given))
        self._queue += new

    def step(self) -> list[Generated]:
        if self._weights is None:
            raise EngineError("the engine is not started", now="Call `start` first.")
        if self._is_away and self.num_unfinished:
            raise EngineError("the engine is off its device", now="Call `onload` first.")
        num_free = self._settings.max_running - len(self._running)
        self._running += self._queue[:num_free]
        del self._queue[:num_free]
        for sequence in self._running:
            if sequence.finish is None:
                self._extend(sequence)
        done = [sequence for sequence in self._running if sequence.finish is not None]
        self._running = [sequence for sequence in self._running if sequence.finish is None]
        return [_generated(sequence, sequence.finish) for sequence in done]

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        wanted = set(ids)
        taken = [sequence for sequence in self._queue + self._running if sequence.request.id in wanted]
        self._queue = [sequence for sequence in self._queue if sequence.request.id not in wanted]
        self._running = [sequence for sequence in self._running if sequence.request.id not in wanted]
        return [_generated(sequence, Finish.ABORT) for sequence in taken]

    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        wanted = set(ids)
        return [_generated(sequence, Finish.ABORT) for sequence in self._queue + self._running if sequence.request.id in wanted]

    def progress(self) -> dict[int, int]:
        return {sequence.request.id: len(sequence.tokens) for sequence in self._queue + self._running}

    def occupancy(self) -> Occupancy:
        """The cache is as large as `options["kv_capacity"]` says."""
        used = sum(len(sequence.prompt) + len(sequence.tokens) for sequence in self._running)
        return Occupancy(len(self._running), len(self._queue), used, int(str(self._settings.options.get("kv_capacity", 0))))

    @property
    def num_unfinished(self) -> int:
        return len(self._queue) + len(self._running)

    @property
    def version(self) -> int:
        return self._version

    def load_weights(self, tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool = False) -> None:
        if self._running and not under_requests:
            raise EngineError(f"{len(self._running)} requests are running; weights can't change under them", now="Abort them first.")
        given = {name: np.array(tensor) for name, tensor in tensors}
        held = initial_fake_weights(self._model)
        if set(given) != {FAKE_WEIGHT} or given[FAKE_WEIGHT].shape != held.shape or given[FAKE_WEIGHT].dtype != held.dtype:
            described = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in given.items()) or "nothing"
            raise EngineError(f"the fake's weights are {FAKE_WEIGHT} {held.dtype}{list(held.shape)}, not {described}")
        for sequence in self._running:
            if len(sequence.tokens) > sequence.num_read:
                sequence.num_read = len(sequence.tokens)
                sequence.old_cache = fake_hash(sequence.old_cache, self._digest, sequence.num_read)
        self._take_weights(given[FAKE_WEIGHT])
        self._version = version

    def weights(self) -> Iterator[tuple[str, Any]]:
        assert self._weights is not None
        yield FAKE_WEIGHT, self._weights

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        if self._is_away or self._weights is None:
            raise EngineError("the engine is off its device", now="Call `onload` first.")
        return [-fake_numbers(self._weights, np.array(sequence, np.int64), np.arange(len(sequence)))[1:] for sequence in sequences]

    def _take_weights(self, weights: npt.NDArray[np.int64]) -> None:
        self._weights = weights
        self._digest = fake_hash(*(value & _MASK for value in weights.tolist()))

    def _extend(self, sequence: _Sequence) -> None:
        sampling, position = sequence.request.sampling, len(sequence.tokens)
        seed = sequence.request.seed if sampling.temperature > 0 else 0
        bits = fake_hash(self._digest, seed, position, sequence.prompt_hash, *([sequence.old_cache] if sequence.old_cache else []))
        period = _STOP_PERIODS[fake_hash(seed, 0) % len(_STOP_PERIODS)]
        if position >= sampling.min_new_tokens and bits % period == 0:
            token = FAKE_EOS
        else:
            first, count = _PRINTABLE
            barred = sequence.stops if position < sampling.min_new_tokens else frozenset()
            printable = [i for i in range(first + _FIRST_BYTE, first + _FIRST_BYTE + count) if i not in barred]
            token = printable[(bits >> 16) % len(printable)]
        sequence.tokens.append(token)
        sequence.logprobs.append(-((bits >> 8) % 1024) / 1024)
        sequence.versions.append(self._version)
        sequence.kv_stale.append(sequence.old_cache != 0)


def _generated(sequence: _Sequence, finish: Finish | None) -> Generated:
    assert finish is not None
    return Generated(
        id=sequence.request.id,
        prompt_tokens=np.array(sequence.prompt, np.int32),
        tokens=np.array(sequence.tokens, np.int32),
        logprobs=np.array(sequence.logprobs, np.float32),
        versions=np.array(sequence.versions, np.int32),
        kv_stale=np.array(sequence.kv_stale, np.bool_),
        finish=finish,
        text=decode_fake(sequence.tokens),
    )
