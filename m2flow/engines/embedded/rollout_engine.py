"""The embedded rollout engine: continuous batching for Hugging Face causal language models, in the worker's process.

    add -> queue -> Decoder (continuous, or fixed rows if deterministic) -> Generated

Options from the cluster spec: `max_context` (tokens; below the model's own), `max_prefill_tokens` (a step's prompts, padded;
default 16384), `kv_budget_bytes` (default: half of a GPU's free memory, a quarter of a host's), `deterministic_rows` (default 8),
`cuda_graphs` (default true).

With `deterministic`, results are a function of weights, prompt, seed, index in the group and sampling, bit by bit, on one kind of
machine; torch then runs on one thread, so that the plan's number of threads does not matter either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from m2flow.engines.contract import EngineSettings, Generated, Memory, Occupancy, Request, RolloutEngine
from m2flow.engines.embedded.decoding import ContinuousDecoder, Decoder, FixedRowsDecoder
from m2flow.engines.embedded.slot_model import SlotModel
from m2flow.engines.models.hf_model import use_threads
from m2flow.engines.models.model_files import TextCodec, load_tokenizer
from m2flow.engines.models.requests import Job, generated_of, jobs_of, split_finished
from m2flow.engines.registry import built_in
from m2flow.errors import EngineError, OutOfMemory, is_out_of_memory
from m2flow.recipe import Model, Sampling
from m2flow.samples import Finish

_SMALL_STEP = 1 << 24
"""Multiplications of a decode step (rows times weights) below which further threads cost more than they do: a model of a million
weights breaks even between 8 and 32 rows on two idle cores, later on busy ones."""
OPTIONS = {
    "max_context": "Tokens of a prompt and its response together, by default as many as the model allows.",
    "max_prefill_tokens": "Prompt tokens that are prefilled together, by default 16384.",
    "kv_budget_bytes": "Size of the KV cache, by default a share of the free memory.",
    "fp32_head": "Compute logits in float32 whatever the type of the weights; by default false.",
    "cuda_graphs": "Decode by CUDA graphs, by default true; not with `--deterministic`, nor for mixtures of experts, nor on a CPU.",
    "deterministic_rows": "Rows of a decode pass with `--deterministic`, by default 8.",
}
"""The options of `rollout: {engine: embedded}`, each with its meaning."""


class EmbeddedRollout(RolloutEngine):
    """Generate with continuous batching. What prompts share is prefilled once, and what an episode has read is kept between its turns."""

    name = "embedded"
    capabilities = built_in("embedded", "rollout")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        self.capabilities = self.capabilities.configured(settings.options, settings.num_ranks)
        self._source = model
        self._settings = settings
        self._queue: deque[Job] = deque()
        self._ended: list[tuple[Job, Finish]] = []
        self._num_put_back = 0
        self._version = 0
        self._mixture = ""
        self._is_onloaded = False
        self._model: SlotModel | None = None
        self._codec: TextCodec | None = None
        self._decoder: Decoder | None = None

    def start(self) -> None:
        unknown = sorted(set(self._settings.options) - set(OPTIONS))
        if unknown:
            raise EngineError(f"the embedded rollout engine has no option {', '.join(unknown)}", now=f"It has {', '.join(OPTIONS)}.")
        self._use_threads()
        self._codec = load_tokenizer(self._source)
        options = _Options(self._settings.options)
        graphs = options.flag("cuda_graphs", True) and not self._settings.deterministic
        self._model = SlotModel.load(self._source, self._settings.device, options.get("max_context", 0) or None, graphs=graphs)
        if options.flag("fp32_head"):
            self._model.compute_exact_logits()
        if self._settings.deterministic:
            rows = options.get("deterministic_rows", 8)
            self._decoder = FixedRowsDecoder(self._model, num_rows=rows, max_running=self._settings.max_running)
        else:
            self._decoder = ContinuousDecoder(
                self._model,
                max_running=self._settings.max_running,
                max_prefill_tokens=options.get("max_prefill_tokens", 16384),
                kv_budget_bytes=options.get("kv_budget_bytes", 0) or _free_bytes(self._settings.device),
            )
        self._is_onloaded = True

    def stop(self) -> None:
        self._queue.clear()
        self._ended.clear()
        self._model = self._codec = self._decoder = None

    def onload(self) -> None:
        if not self._is_onloaded:
            self._started()[0].to(self._settings.device)
            self._is_onloaded = True

    def offload(self) -> None:
        """Free the device's memory. Running requests return to the queue with their tokens, and are prefilled again later."""
        self._make_room(keeps_weights=False)

    def rest(self) -> None:
        """Free the KV cache and keep the weights on the device. Running requests are prefilled again later, as after `offload`."""
        self._make_room(keeps_weights=True)

    def _make_room(self, *, keeps_weights: bool) -> None:
        model, _, decoder = self._started()
        self._queue.extendleft(reversed(decoder.take(decoder.running_ids(), self._version)))
        decoder.release()
        if self._settings.device != "cpu":
            model.drop_graphs()
            if not keeps_weights:
                model.to("cpu")
            torch.cuda.empty_cache()
        self._is_onloaded = False

    def shrink_kv_cache(self) -> None:
        self._started()[2].shrink_kv_cache()
        if self._settings.device != "cpu":
            self._started()[0].drop_graphs()
            torch.cuda.empty_cache()

    def memory(self) -> Memory:
        if self._model is None or self._decoder is None:
            return Memory()
        return Memory(weights=self._model.bytes_on(self._settings.device), kv=self._decoder.kv_bytes)

    def add(self, requests: Sequence[Request]) -> None:
        model, codec, decoder = self._started()
        known = [*(job.id for job in self._queue), *decoder.running_ids()]
        goes_on, whole = split_finished(jobs_of(requests, known, codec, vocab_size=model.vocab_size, max_context=model.max_context))
        self._queue += goes_on
        self._ended += whole

    def step(self) -> list[Generated]:
        model, _, decoder = self._started()
        if self._mixture:
            raise EngineError(f"the engine holds a mixture of weights: {self._mixture}", now="Load a whole set of weights.")
        if not self._is_onloaded:
            raise EngineError("the engine is offloaded", now="Call `onload` before `step`.")
        finished, self._ended = self._ended, []
        if self._queue or decoder.num_running:
            self._use_threads(is_small=not self._queue and decoder.num_running * model.num_weights < _SMALL_STEP)
            finished += self._decoded(decoder)
        return [self._generated(job, finish) for job, finish in finished]

    def _generated(self, job: Job, finish: Finish) -> Generated:
        model, codec, _ = self._started()
        num_tokens = len(job.prompt) + len(job.tokens)
        if model.records_routing and (job.routed_experts is None or len(job.routed_experts) != num_tokens):
            job = replace(job, routed_experts=model.unknown_routing(num_tokens))
        return generated_of(job, finish, codec)

    def _decoded(self, decoder: Decoder) -> list[tuple[Job, Finish]]:
        """Run a step of the decoder; if memory runs out, preempt some jobs."""
        try:
            return decoder.step(self._queue, self._version)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # Only now: the error's traceback held what was computed.
        num_put_back, finished = decoder.recover_from_oom(self._queue, self._version)
        self._num_put_back += num_put_back
        if self._settings.device != "cpu":
            torch.cuda.empty_cache()
        print(f"out of memory: {num_put_back} samples wait again, and fewer decode together from now on", flush=True)
        goes_on, whole = split_finished(self._queue)
        self._queue = deque(goes_on)
        return finished + whole

    def abort(self, ids: Iterable[int]) -> list[Generated]:
        decoder = self._started()[2]
        wanted = set(ids)
        taken = [job for job, _ in self._ended if job.id in wanted] + [job for job in self._queue if job.id in wanted]
        self._ended = [(job, finish) for job, finish in self._ended if job.id not in wanted]
        self._queue = deque(job for job in self._queue if job.id not in wanted)
        taken += decoder.take(wanted, self._version)
        return [self._generated(job, Finish.ABORT) for job in taken]

    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        decoder = self._started()[2]
        wanted = set(ids)
        waiting = [job for job in [*(job for job, _ in self._ended), *self._queue] if job.id in wanted]
        return [self._generated(job, Finish.ABORT) for job in waiting + decoder.peek(wanted, self._version)]

    def progress(self) -> dict[int, int]:
        waiting = {job.id: len(job.tokens) for job in [*self._queue, *(job for job, _ in self._ended)]}
        return waiting | self._started()[2].progress()

    def occupancy(self) -> Occupancy:
        decoder = self._started()[2]
        return Occupancy(decoder.num_running, len(self._queue), *decoder.kv_tokens, self._num_put_back, decoder.num_cached)

    @property
    def num_unfinished(self) -> int:
        return len(self._queue) + len(self._ended) + (self._decoder.num_running if self._decoder else 0)

    @property
    def version(self) -> int:
        return self._version

    def load_weights(self, tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool = False) -> None:
        self._take(self._started()[0].load_weights, tensors, version, under_requests=under_requests)

    def load_adapters(self, tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool = False) -> None:
        self._take(self._started()[0].added.add, tensors, version, under_requests=under_requests)

    def _take(
        self, load: Callable[[Iterable[tuple[str, Any]]], None], tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool
    ) -> None:
        """Load weights or adapters."""
        decoder = self._started()[2]
        if decoder.num_running and not under_requests:
            raise EngineError(f"{decoder.num_running} requests are running; weights can't change under them", now="Abort them first.")
        self._mixture = "loading was cut short"
        try:
            load(tensors)
        except EngineError as error:
            self._mixture = error.what
            raise
        self._mixture = ""
        decoder.keep_caches(self._version)
        self._version = version

    def weights(self) -> Iterator[tuple[str, Any]]:
        return self._started()[0].weights()

    def adapters(self) -> Iterator[tuple[str, Any]]:
        return self._started()[0].added.adapters()

    def base(self) -> Iterator[tuple[str, Any]]:
        return self._started()[0].added.base()

    def language(self) -> TextCodec:
        return load_tokenizer(self._source) if self._codec is None else self._codec

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        model = self._started()[0]
        if not self._is_onloaded:
            raise EngineError("the engine is offloaded", now="Call `onload` before `logprobs`.")
        self._use_threads()
        return model.logprobs(sequences)

    def embeddings(self, requests: Sequence[Request]) -> npt.NDArray[np.float32]:
        """Embed prompts (`embeddings_of`) in passes of their own, of which nothing stays; with `deterministic` each prompt by itself."""
        model, codec, _ = self._started()
        if self._mixture or not self._is_onloaded:
            raise EngineError("the engine is offloaded, or holds a mixture of weights", now="Call `onload`, or load a whole set, before.")
        self._use_threads()
        prompts = [replace(request, sampling=Sampling(1)) for request in requests]
        jobs = jobs_of(prompts, (), codec, vocab_size=model.vocab_size, max_context=model.max_context)
        most = 0 if self._settings.deterministic else _MOST_TOGETHER
        try:
            hidden = [model.last_hidden(part).cpu().numpy() for part in _parts([job.prompt for job in jobs], most)]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory("out of memory while prompts were embedded", now="Leave `difficulty: prefill` out.") from None
        return embeddings_of(np.concatenate(hidden))

    def _use_threads(self, *, is_small: bool = False) -> None:
        # Again at each step: another engine in this process may have set its own.
        threads = 1 if self._settings.deterministic or is_small else self._settings.threads
        if torch.get_num_threads() != threads or torch.are_deterministic_algorithms_enabled() != self._settings.deterministic:
            use_threads(threads, self._settings.deterministic)

    def _started(self) -> tuple[SlotModel, TextCodec, Decoder]:
        if self._model is None or self._codec is None or self._decoder is None:
            raise EngineError("the engine is not started", now="Call `start` first.")
        return self._model, self._codec, self._decoder


_MOST_TOGETHER = 4096
"""Prompt tokens that are embedded together, padded: enough to fill a device, and keys and values of so many are small beside a cache."""
NUM_NUMBERS = 32
"""Numbers of an embedding. The regression has some hundreds of prompts, of as many coefficients: with 16 numbers it took away half as much
of the error between prompts as with 32, with 64 and 128 a tenth more than that (`benchmarks/prefill_lengths.py`, hidden states of 128)."""


def embeddings_of(hidden_PD: npt.NDArray[np.float32], num: int = NUM_NUMBERS) -> npt.NDArray[np.float32]:
    """Reduce last hidden states to the embeddings that lengths are predicted from: their direction, by one fixed projection.

        e = G h / |h|,   G normal(0, 1) [num, width]

    Returns:
        float32 [P, num], or as many as the states have, which then stay as they are but for their norm.
    """
    directions = hidden_PD / np.maximum(np.linalg.norm(hidden_PD, axis=1, keepdims=True), 1e-12)
    width = hidden_PD.shape[1]
    if width <= num:
        return np.asarray(directions, np.float32)
    return np.asarray(directions @ np.random.default_rng(0).standard_normal((width, num)), np.float32)


def _parts(prompts: Sequence[npt.NDArray[np.int32]], most: int) -> Iterator[list[npt.NDArray[np.int32]]]:
    """Split prompts, in their order, into parts of so many padded tokens at most; one that has more is a part of its own."""
    part: list[npt.NDArray[np.int32]] = []
    for prompt in prompts:
        if part and max(len(prompt), *map(len, part)) * (len(part) + 1) > most:
            yield part
            part = []
        part.append(prompt)
    if part:
        yield part


class _Options:
    def __init__(self, given: Mapping[str, object]) -> None:
        self._given = given

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._given.get(name, default)
        if not isinstance(value, bool):
            raise EngineError(f"option {name} of the embedded rollout engine is {value!r}", now="Write true or false.")
        return value

    def get(self, name: str, default: int) -> int:
        value = self._given.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and default):
            raise EngineError(f"option {name} of the embedded rollout engine is {value!r}; it must be a positive number")
        return value


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return int(psutil.virtual_memory().available) // 4
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) // 2
