"""Provide engines and rollout policies for tests: tokens and gradients are exact hashes, so that schedules can be compared bit by bit.

    FakeRollout   tokens = hash(weights, prompt, seed, position)
    FakeTrain     accumulate: gradient += hash(weights, sample, what the loss reads of it)   mod 2^61 - 1, for each sample
                  apply:      weights[i] = hash(weights[i], gradient, denominator, recipe, number of the step)
    FakeRanks     rank 1, 2, ... --own sums--> rank 0 --the whole--> every rank    at each accumulate, apply, save, load, list of weights

The weights are one int64 array, `FAKE_WEIGHT`; a text is its bytes. A token does not depend on what else runs, nor on time; where weights
changed under a running sample, it also depends on the weights by which its earlier tokens were read. A sum does not show its order: any
cutting and any order of micro-batches give the same weights, while a sample that is lost, counted twice, given other rewards or trained in
another mini-batch gives others.

Weights and results of `FakeRanks` are bitwise those of `FakeTrain`, on any number of ranks. Like a real engine it waits forever for a rank
that does not come, and fails when one is gone. Options: `fails: "1@3"`: rank 1 raises at its third micro-batch, and the others do not;
`dies: "1@3"`: it is killed there; `all_fail: 3`: every rank raises; `room: "1@8"`: rank 1 has no memory for micro-batches of more than 8
samples. None of them imports torch.

`Adversary` and `Shuffled` are rollout policies that decide at random, to test that no policy changes the result.

    rollout: {policy: "m2flow/testing/fakes.py:Adversary:seed=3"}
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from m2flow.engines.contract import (
    EngineSettings,
    Generated,
    HeldCheckpoint,
    Objective,
    Occupancy,
    Request,
    RolloutEngine,
    StopTexts,
    Sums,
    TrainEngine,
)
from m2flow.engines.registry import built_in
from m2flow.errors import EngineError, ModelError, PromptTooLong
from m2flow.recipe import HEAD_OUTPUTS, REFERENCE_TOP_IDS, REFERENCE_TOP_LOGPROBS, TOP_LOGPROBS, Model, Optimizer
from m2flow.rollout_scheduling.policy import Move, SchedulingPolicy, Seen
from m2flow.samples import (
    ROUTED_EXPERTS,
    SAMPLING_MASK,
    Batch,
    Finish,
    Masks,
    Message,
    Prompt,
    Ragged,
    SampleId,
    packed_masks,
    sequences_of,
)

# ---- hashes, weights and texts

FAKE_WEIGHT = "fake.weight"
FAKE_EOS = 1
FAKE_CONTEXT = 4096

_EOS_TEXT = "<eos>"
_FIRST_BYTE = 3  # The ids below it are <pad>, <eos>, <unk>.
_MASK = (1 << 64) - 1
_PRINTABLE = (32, 95)  # The first id, and their number.
_STOP_PERIODS = (4, 16, 64)  # Mean lengths of the three kinds of sample: most short, some long.


def fake_hash(*parts: int) -> int:
    """Hash integers to 64 bits, which depend on every bit of every part and on their order.

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
    """Return the weights that all fakes start from: int64 [8], by `model.seed`."""
    return np.array([fake_hash(model.seed, i) >> 33 for i in range(8)], np.int64)


def fake_numbers(weights: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return a number in 0 to 1 for each token, a multiple of 1/1024; rollout and train engines agree on it."""
    seed = fake_hash(*(value & _MASK for value in weights.tolist())) & 0xFFFF
    return (((tokens * 2654435761 + position * 40503 + seed * 97) % 1021) / 1024).astype(np.float32)


def encode_fake(text: str) -> list[int]:
    """Encode a text: its bytes, shifted by the special ids."""
    return [byte + _FIRST_BYTE for byte in text.encode("utf-8", "surrogatepass")]


def decode_fake(ids: Iterable[int]) -> str:
    """Decode ids to text, without special ones."""
    return bytes(i - _FIRST_BYTE for i in ids if _FIRST_BYTE <= i < _FIRST_BYTE + 256).decode("utf-8", "replace")


_TEXT_OF = {token: decode_fake([token]) for token in range(_FIRST_BYTE, _FIRST_BYTE + 256)}
"""Text of each token by itself."""
_WHOLE_TEXT_OF = {**_TEXT_OF, FAKE_EOS: _EOS_TEXT}


@final
class FakeLanguage:
    """The language of the fakes: a text is its bytes, and messages are written `<role>content`, each ended as the model ends its turns."""

    template = "<role>content"
    special_texts = (_EOS_TEXT,)

    def __init__(self) -> None:
        self.eos_ids = frozenset({FAKE_EOS})

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        text = self.prompt_text(prompt)
        return encode_fake(prompt) if isinstance(prompt, str) else self.encode_target(text or "")

    def prompt_text(self, prompt: Prompt) -> str | None:
        return None if isinstance(prompt, str) else self.conversation(prompt, ())

    def encode_target(self, text: str) -> list[int]:
        """Encode a text, in which `<eos>` stands for the end of a turn."""
        parts = [encode_fake(part) for part in text.split(_EOS_TEXT)]
        return [token for number, part in enumerate(parts) for token in ([FAKE_EOS] if number else []) + part]

    def decode(self, ids: list[int]) -> str:
        return decode_fake(ids)

    def decode_all(self, ids: list[int]) -> str:
        return "".join([_WHOLE_TEXT_OF.get(token, "") for token in ids])

    def conversation(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> str:
        shown = "".join(f"<tool {tool['function']['name']}>" for tool in tools)  # type: ignore[index]
        return shown + "".join(f"<{one['role']}>{one.get('content')}{_EOS_TEXT}" for one in messages) + "<assistant>"


# ---- rollout engine


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
    """Hash of what older weights have read of it; 0: nothing."""
    num_read: int = 0
    """Tokens read by older weights."""
    stop_texts: StopTexts | None = None
    prompt_text: str | None = None

    @property
    def finish(self) -> Finish | None:
        if self.tokens and (self.tokens[-1] in self.stops or self._is_stopped_by_text):
            return Finish.STOP
        most = min(self.request.sampling.max_new_tokens, FAKE_CONTEXT - len(self.prompt))
        return Finish.LENGTH if len(self.tokens) >= most else None

    @property
    def _is_stopped_by_text(self) -> bool:
        return self.stop_texts is not None and self.stop_texts.are_completed(np.array(self.tokens, np.int32))


@final
class FakeRollout(RolloutEngine):
    """A rollout engine that admits and finishes requests as a real one does.

    Temperature 0 ignores the seed; other temperatures change nothing, nor do biases, penalties and truncations. Option `step_ms`: a decode
    step sleeps so many milliseconds, as one that takes so long on a device.
    """

    name = "fake"
    has_own_ids = True
    capabilities = built_in("fake", "rollout")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        self.capabilities = self.capabilities.configured(settings.options, settings.num_ranks)
        self._model = model
        self._settings = settings
        self._weights: npt.NDArray[np.int64] | None = None
        self._digest = 0
        self._version = 0
        self._is_away = False
        self._step_s = float(str(settings.options.get("step_ms", 0))) / 1000
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
            prompt, prompt_text = _encoded(request)
            if len(prompt) >= FAKE_CONTEXT:
                raise PromptTooLong(
                    f"sample {who}: a prompt of {len(prompt)} tokens leaves no room for a response in the context of {FAKE_CONTEXT}",
                    now="Shorten the prompt.",
                )
            if request.id in known:
                raise EngineError(f"sample {who} is already being generated")
            known.add(request.id)
            stops = frozenset(request.sampling.stop_token_ids) | (frozenset() if request.sampling.ignore_eos else {FAKE_EOS})
            stale = list(request.prefix_kv_stale) or [False] * len(request.prefix)
            given = list(request.prefix), list(request.prefix_logprobs), list(request.prefix_versions), stale
            texts = StopTexts.of(request.sampling, decode_fake, frozenset(range(_FIRST_BYTE)))
            new.append(_Sequence(request, prompt, stops, fake_hash(*prompt), *given, stop_texts=texts, prompt_text=prompt_text))
        self._queue += new

    def step(self) -> list[Generated]:
        if self._weights is None:
            raise EngineError("the engine is not started", now="Call `start` first.")
        if self._is_away and self.num_unfinished:
            raise EngineError("the engine is off its device", now="Call `onload` first.")
        num_free = self._settings.max_running - len(self._running)
        self._running += self._queue[:num_free]
        del self._queue[:num_free]
        if self._running and self._step_s:
            time.sleep(self._step_s)
        for sequence in self._running:
            if sequence.finish is None:
                self._extend(sequence)
        done = [sequence for sequence in self._running if sequence.finish is not None]
        self._running = [sequence for sequence in self._running if sequence.finish is None]
        return [_generated(sequence, sequence.finish, self._model) for sequence in done]

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        wanted = set(ids)
        taken = [sequence for sequence in self._queue + self._running if sequence.request.id in wanted]
        self._queue = [sequence for sequence in self._queue if sequence.request.id not in wanted]
        self._running = [sequence for sequence in self._running if sequence.request.id not in wanted]
        return [_generated(sequence, Finish.ABORT, self._model) for sequence in taken]

    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        wanted = set(ids)
        return [
            _generated(sequence, Finish.ABORT, self._model) for sequence in self._queue + self._running if sequence.request.id in wanted
        ]

    def progress(self) -> dict[int, int]:
        return {sequence.request.id: len(sequence.tokens) for sequence in self._queue + self._running}

    def occupancy(self) -> Occupancy:
        """Return the use of the KV cache, whose size is `options["kv_capacity"]`."""
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

    def language(self) -> FakeLanguage:
        return FakeLanguage()

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        if self._is_away or self._weights is None:
            raise EngineError("the engine is off its device", now="Call `onload` first.")
        return [-fake_numbers(self._weights, np.array(sequence, np.int64), np.arange(len(sequence)))[1:] for sequence in sequences]

    def embeddings(self, requests: Sequence[Request]) -> npt.NDArray[np.float32]:
        """Two numbers a prompt: how many tokens it has, and a hash of them and of the weights, from 0 to 1."""
        if self._is_away or self._weights is None:
            raise EngineError("the engine is off its device", now="Call `onload` first.")
        prompts = [_encoded(request)[0] for request in requests]
        return np.array([[len(prompt), fake_hash(self._digest, *prompt) / 2**64] for prompt in prompts], np.float32).reshape(-1, 2)

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


def _encoded(request: Request) -> tuple[list[int], str | None]:
    """The tokens of a prompt, and its text if it is of messages."""
    if isinstance(request.prompt, str):
        return encode_fake(request.prompt), None
    if request.prompt and isinstance(request.prompt[0], Mapping):
        text = "".join(f"<{message['role']}>{message.get('content')}" for message in request.prompt if isinstance(message, Mapping))
        return encode_fake(text), text
    return [token for token in request.prompt if isinstance(token, int)], request.prompt_text


def _generated(sequence: _Sequence, finish: Finish | None, model: Model) -> Generated:
    assert finish is not None
    stops, sampling = sequence.stop_texts if finish is Finish.STOP else None, sequence.request.sampling
    return Generated(
        id=sequence.request.id,
        prompt_tokens=np.array(sequence.prompt, np.int32),
        tokens=np.array(sequence.tokens, np.int32),
        logprobs=np.array(sequence.logprobs, np.float32),
        versions=np.array(sequence.versions, np.int32),
        kv_stale=np.array(sequence.kv_stale, np.bool_),
        finish=finish,
        text=stops.shorten(np.array(sequence.tokens, np.int32)) if stops else decode_fake(sequence.tokens),
        routed_experts=fake_experts([*sequence.prompt, *sequence.tokens], len(sequence.prompt)) if model.routing == "rollout" else None,
        prompt_text=sequence.prompt_text,
        sampling_mask=packed_masks(_masks(sequence.tokens)) if sampling.sampling_mask else None,
    )


def _masks(tokens: Sequence[int]) -> Masks:
    """Return masks as if each token had been drawn from itself and the next one."""
    return [np.array([token, token + 1], np.int32) for token in tokens]


def fake_experts(tokens: Sequence[int], salt: int) -> npt.NDArray[np.uint8]:
    """Two experts of eight for each token in one layer, as if they were chosen."""
    first = (np.array(tokens, np.int64) + salt) % 8
    return np.stack([first, (first + 1 + first % 7) % 8], 1)[:, None].astype(np.uint8)


# ---- train engine

PRIME = (1 << 61) - 1
_STATE = "fake_train.json"
_COMPUTED = {"sequence_lengths", "sequence_ids", "group_ids", "random_numbers"}.union(*HEAD_OUTPUTS.values())


class FakeTrain(TrainEngine):
    """A train engine in exact integers. Log-probabilities, values and scores are multiples of 1/1024."""

    name = "fake"
    capabilities = built_in("fake", "train")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        self.capabilities = self.capabilities.configured(settings.options, settings.num_ranks)
        self._model = model
        self._settings = settings
        self._weights = np.zeros(0, np.int64)
        self._gradient = 0
        self._num_accumulated = 0
        self._num_steps: dict[str, int] = {}
        self._is_away = False

    def start(self) -> None:
        self._weights = initial_fake_weights(self._model)
        self.discard()
        self._num_steps = {}

    def stop(self) -> None:
        self._weights = np.zeros(0, np.int64)

    def onload(self) -> None:
        self._is_away = False

    def offload(self) -> None:
        self._is_away = True

    def copy_from(self, source: TrainEngine, share: float = 1.0) -> None:
        """Copy weights; a share of integers is a combination that tells own, other and share apart."""
        if share == 1:
            super().copy_from(source)
            return
        assert isinstance(source, FakeTrain)
        self._weights = (3 * self._weights + (5 + int(share * 2**20)) * source._weights) % 2**31

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        self._check_place()
        foreign = HEAD_OUTPUTS["lm" if self._model.head == "value" else "value"]
        for name in foreign.intersection(objective.loss.needs):
            raise EngineError(f"the loss {objective.loss.name} needs {name}, which a model with a {self._model.head} head does not give")
        batch = _tokenised(batch)
        names = ["behaviour_logprobs" if name == "logprobs" else name for name in sorted(batch.columns) if name == "logprobs"]
        corrected = [objective.loss.correction] if objective.loss.correction is not None else []
        top = [REFERENCE_TOP_IDS] if TOP_LOGPROBS in objective.loss.needs else []
        routed = [ROUTED_EXPERTS] if self._model.routing is not None and ROUTED_EXPERTS in batch else []
        weighed = {need for one in corrected for need in one.needs} - {"logprobs"}
        masked = [SAMPLING_MASK] if SAMPLING_MASK in batch else []
        names = sorted({*names, *routed, *masked, *objective.loss.needs, *top, *weighed} - _COMPUTED)
        columns = {name: "logprobs" if name == "behaviour_logprobs" else name for name in names}
        missing = [name for name, column in columns.items() if column not in batch]
        if missing:
            raise EngineError(f"the loss {objective.loss.name} needs {missing[0]}, and the batch has {', '.join(sorted(batch.columns))}")
        recipe = repr((objective.loss.name, objective.loss.needs, objective.loss.options, *corrected)).encode()
        tokens, mask = batch.ragged("tokens"), batch.ragged("loss_mask")
        loss = 0
        for row, sample in enumerate(batch.ids.tolist()):
            parts = [_row_bytes(batch, column, row) for column in ("tokens", "loss_mask", *columns.values())]
            value = _digest(self._weights.tobytes(), struct.pack("<q", sample), recipe, *parts)
            self._gradient = (self._gradient + value) % PRIME
            # Small enough that their sums are exact in float64.
            loss += value % (1 << 20)
        num_tokens = int(np.count_nonzero(mask.values))
        self._num_accumulated += num_tokens
        return Sums(len(batch), num_tokens, len(tokens.values), {"loss": float(loss)})

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        self._check_place()
        gradient, num_accumulated = self._gradient, self._num_accumulated
        self.discard()
        if not num_accumulated:
            raise EngineError("there is no gradient to apply", now="accumulate() a micro-batch with masked tokens first.")
        if not 0 < denominator < float("inf"):
            raise EngineError(f"the denominator of a mini-batch must be a positive number, got {denominator}")
        key = repr(optimizer.state_key)
        step = self._num_steps[key] = self._num_steps.get(key, 0) + 1
        change = _digest(struct.pack("<Qdq", gradient, denominator, step), repr(optimizer).encode())
        self._weights = np.array([fake_hash(value & _MASK, change) >> 33 for value in self._weights.tolist()], np.int64)
        return {"grad_norm": float(gradient % (1 << 20)) / denominator, "lr": optimizer.lr}

    def discard(self) -> None:
        self._gradient = 0
        self._num_accumulated = 0

    def logprobs(self, batch: Batch) -> Batch:
        found = self._of_tokens(batch, "lm", "reference_logprobs", -1)
        if self._model.routing != "trainer":
            return found
        tokens = _tokenised(batch).ragged("tokens")
        return found.with_columns(**{ROUTED_EXPERTS: Ragged(fake_experts(tokens.values.tolist(), int(self._weights[0])), tokens.offsets)})

    def top_logprobs(self, batch: Batch, top_k: int) -> Batch:
        """Return the ids after a token's own as the likeliest; the distribution of these and the rest is made of its `logprobs`."""
        if SAMPLING_MASK in batch:
            raise EngineError("these samples have a sampling mask, which a fake does not compare by")
        found = self.logprobs(batch)
        tokens, mask = _tokenised(batch).ragged("tokens"), _tokenised(batch).ragged("loss_mask")
        offsets = np.concatenate(([0], np.cumsum(mask.values)))[mask.offsets].astype(np.int64)
        own = [column.values[mask.values.astype(bool)] for column in (tokens, found.ragged("reference_logprobs"))]
        ids = (own[0][:, None] + np.arange(1, top_k + 1)).astype(np.int32)
        top = own[1][:, None].astype(np.float64) * np.arange(1, top_k + 2)
        top = (top - np.logaddexp.reduce(top, axis=1, keepdims=True)).astype(np.float32)
        return found.with_columns(**{REFERENCE_TOP_IDS: Ragged(ids, offsets), REFERENCE_TOP_LOGPROBS: Ragged(top, offsets)})

    def values(self, batch: Batch) -> Batch:
        return self._of_tokens(batch, "value", "values", 1)

    def scores(self, batch: Batch) -> Batch:
        self._check_place("score")
        prompts, texts = batch.ragged("prompt"), batch.ragged("text")
        said = [f"{prompts.item(i)}\0{texts.item(i)}".encode("utf-8", "surrogatepass") for i in range(len(batch))]
        return Batch(batch.ids, {"reward": np.array([_digest(self._weights.tobytes(), text) % 1021 / 1024 for text in said], np.float64)})

    def _of_tokens(self, batch: Batch, head: str, column: str, sign: int) -> Batch:
        """Return a number between 0 and the sign for each token under the mask, 0 for the others."""
        self._check_place(head)
        batch = _tokenised(batch)
        tokens, mask = batch.ragged("tokens"), batch.ragged("loss_mask").values.astype(bool)
        values = np.zeros(len(tokens.values), np.float32)
        found = sequences_of(batch)
        offsets = tokens.offsets if found is None else found[0]
        position = np.arange(len(values)) - np.repeat(offsets[:-1], np.diff(offsets))
        values[mask] = sign * fake_numbers(self._weights, tokens.values.astype(np.int64), position)[mask]
        return Batch(batch.ids, {column: Ragged(values, tokens.offsets)})

    def num_training_tokens(self, batch: Batch) -> npt.NDArray[np.int64]:
        return _tokenised(batch).ragged("tokens").lengths

    def weights(self) -> Iterator[tuple[str, Any]]:
        yield FAKE_WEIGHT, self._weights

    def save(self, path: str) -> None:
        self._held(path).write()

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        return self._held(path)

    def _held(self, path: str) -> HeldCheckpoint:
        state, weights = json.dumps({"weights": self._weights.tolist(), "num_steps": self._num_steps}), self._weights.copy()

        def write() -> None:
            directory = Path(path)
            directory.mkdir(parents=True, exist_ok=True)
            fresh = directory / f".{_STATE}.{os.getpid()}"
            fresh.write_text(state)
            fresh.rename(directory / _STATE)

        return HeldCheckpoint(write, lambda: iter([(FAKE_WEIGHT, weights)]))

    def _check_place(self, head: str | None = None) -> None:
        if self._is_away:
            raise EngineError("the engine is off its device", now="Call `onload` first.")
        if head is not None and head != self._model.head:
            raise EngineError(f"this needs a model with a {head} head, and this one has a {self._model.head} head")

    def load(self, path: str) -> None:
        try:
            saved = json.loads((Path(path) / _STATE).read_text())
            self._weights = np.array(saved["weights"], np.int64)
            self._num_steps = dict(saved["num_steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"the checkpoint {path} can't be read: {error}", now="Use an earlier checkpoint.") from error
        self.discard()


def _tokenised(batch: Batch) -> Batch:
    if "tokens" in batch:
        return batch
    texts = [[encode_fake(str(batch.ragged(name).item(row))) for name in ("prompt", "target")] for row in range(len(batch))]
    tokens = Ragged.of([[*prompt, *target, FAKE_EOS] for prompt, target in texts], np.int32)
    mask = Ragged.of([np.arange(len(prompt) + len(target) + 1) >= len(prompt) for prompt, target in texts], np.bool_)
    return batch.with_columns(tokens=tokens, loss_mask=mask)


def _row_bytes(batch: Batch, name: str, row: int) -> bytes:
    column = batch[name]
    values = column.row(row) if isinstance(column, Ragged) else column[row]
    return np.ascontiguousarray(values).tobytes()


def _digest(*parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest(), "little") % PRIME


# ---- train engine of several ranks

_POLL_S = 0.01


@final
class FakeRanks(FakeTrain):
    """One rank of a fake train engine."""

    name = "fake-ranks"
    capabilities = built_in("fake-ranks", "train")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._rank, self._num_ranks = settings.rank, settings.num_ranks
        self._links: list[Connection] = []
        """Connections: of rank 0 to each other rank; of another rank to rank 0."""
        self._num_micro_batches = 0

    def start(self) -> None:
        super().start()
        if self._num_ranks > 1:
            self._meet(f"{self._settings.rendezvous.removeprefix('file://')}.{self._model.seed}")
        self._all_reduce()

    def stop(self) -> None:
        super().stop()
        for link in self._links:
            link.close()
        self._links = []

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        self._num_micro_batches += 1
        if self._settings.options.get("fails") == f"{self._rank}@{self._num_micro_batches}":
            raise EngineError(f"this rank was told to fail at micro-batch {self._num_micro_batches}")
        if self._settings.options.get("dies") == f"{self._rank}@{self._num_micro_batches}":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._settings.options.get("all_fail") == self._num_micro_batches:
            raise EngineError(f"every rank was told to fail at micro-batch {self._num_micro_batches}")
        rank, _, room = str(self._settings.options.get("room", "")).partition("@")
        if rank == str(self._rank) and len(batch) > int(room):
            raise MemoryError
        gradient, num_accumulated = self._gradient, self._num_accumulated
        own = super().accumulate(batch.take(range(self._rank, len(batch), self._num_ranks)), objective)
        grown, loss, num_sequences, num_tokens, num_context_tokens = self._all_reduce(
            (self._gradient - gradient) % PRIME, int(own.metrics["loss"]), own.num_sequences, own.num_tokens, own.num_context_tokens
        )
        self._gradient, self._num_accumulated = (gradient + grown) % PRIME, num_accumulated + num_tokens
        return Sums(num_sequences, num_tokens, num_context_tokens, {"loss": float(loss)})

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        self._all_reduce()
        return super().apply(optimizer, denominator)

    def weights(self) -> Iterator[tuple[str, Any]]:
        self._all_reduce()
        yield from super().weights()

    def save(self, path: str) -> None:
        if self._rank == 0:
            super().save(path)
        self._all_reduce()

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        return None

    def load(self, path: str) -> None:
        super().load(path)
        self._all_reduce()

    def _all_reduce(self, *own: int) -> Sequence[int]:
        """All-reduce numbers below 2^61: each is summed over all ranks, which wait for each other."""
        try:
            if self._rank:
                self._links[0].send_bytes(struct.pack(f"<{len(own)}Q", *own))
                return struct.unpack(f"<{len(own)}Q", self._links[0].recv_bytes())
            parts = [own, *(struct.unpack(f"<{len(own)}Q", link.recv_bytes()) for link in self._links)]
            whole = [sum(column) % PRIME for column in zip(*parts, strict=True)]
            for link in self._links:
                link.send_bytes(struct.pack(f"<{len(own)}Q", *whole))
            return whole
        except (EOFError, OSError, struct.error) as error:
            raise EngineError(f"a rank is gone, or is somewhere else: {error!r}") from error

    def _meet(self, place: str) -> None:
        if self._rank == 0:
            with Listener(place, "AF_UNIX", self._num_ranks) as listener:
                self._links = [listener.accept() for _ in range(1, self._num_ranks)]
            return
        while not self._links:
            try:
                self._links = [Client(place, "AF_UNIX")]
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(_POLL_S)


class Adversary(SchedulingPolicy):
    """A policy that orders, places, holds back and moves samples at random, by its seed, and asserts what it is told."""

    name = "adversary"
    needs_reports = True

    def __init__(self, seed: float = 0) -> None:
        self._dice = random.Random(int(seed))
        self._kind = self._dice.randrange(3)
        """0 and 1: hands out waiting samples at random; 2: also holds them back most of the time."""

    def begin(self, seen: Seen) -> None:
        self.seen = seen
        for sample in range(len(seen.groups)):
            assert seen.members[seen.groups[sample]].count(sample) == 1
        assert not seen.place.keys() & seen.finished.keys()
        assert not seen.waiting.keys() & (seen.place.keys() | seen.finished.keys())

    def added(self, samples: Sequence[int]) -> None:
        assert set(samples) <= self.seen.waiting.keys()

    def next_sample(self, instance: int) -> int | None:
        waiting = list(self.seen.waiting)
        if not waiting or (self._kind == 2 and self._dice.random() < 0.7):
            return None
        return self._dice.choice(waiting)

    def started(self, sample: int, instance: int) -> None:
        assert self.seen.place[sample] == instance
        assert instance not in self.seen.lost

    def ended(self, sample: int, length: int) -> None:
        assert self.seen.finished[sample] == length
        assert sample not in self.seen.place

    def moves(self) -> Sequence[Move]:
        running = sorted(self.seen.place)
        self._dice.shuffle(running)
        return [Move(sample, self._dice.randrange(self.seen.num_instances)) for sample in running[: self._dice.randrange(3)]]


class Shuffled(SchedulingPolicy):
    """A policy that ranks at random, differently each time; to be combined with others in a composed queue."""

    name = "shuffled"

    def __init__(self, seed: float = 0) -> None:
        self._dice = random.Random(int(seed))

    def rank(self, sample: int) -> float:
        return self._dice.random()

    def reranked(self) -> Iterable[int]:
        waiting = list(self.seen.waiting)
        return self._dice.sample(waiting, self._dice.randrange(min(len(waiting), 3) + 1))

    def allows(self, sample: int, instance: int) -> bool:
        return self._dice.random() < 0.6
