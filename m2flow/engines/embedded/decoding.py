"""Continuous batching: which sequences run in which slots, and how each token is drawn.

    queue of Jobs --admit--> slots 0..B-1 --one token a step--> finished Jobs

All bookkeeping of a step is array work over the B rows; Python touches a row only when it is added or removed. After a removal the last
rows fill its place, so that the rows in use stay contiguous. Jobs with the same tokens are prefilled once. What a job begins with that
another has read, which runs or left its KV behind (`Request.keeps_kv`), is copied, and only the rest prefilled (`PrefixCache`).

    logits [B, V], SamplingColumns, uniforms(seeds, positions) --draw--> tokens [B], logprobs [B]

The log-probability of a token is that of softmax(logits / temperature) over the whole vocabulary, before biases, penalties, top-k, top-p,
min-p and `min_new_tokens`; for temperature 0 that of softmax(logits). A trainer that divides its logits by the same temperature computes
the same, so their ratio is 1 on equal weights. With `sampling_mask` it is that among the tokens that were left, which are recorded, so
that the trainer can leave out the others, too.

Legend: B rows, V vocabulary.

With --deterministic (`FixedRowsDecoder`) a sample's bits depend on its identity, and on nothing else that runs.

Floating-point sums depend on the shapes that they are computed in. So every shape here is a function of identity: the prompt is
prefilled alone, and sample i of a group decodes in row i % R of a batch of exactly R rows, all at the same position of their
responses. Unused rows are filled with token 0; what they hold reaches no other row. A sample that is admitted later gets
such a batch for itself, and one that resumes replays its tokens through the same shapes.

This costs speed: each group's batch is a forward pass of its own. Mixtures of experts are refused, because the shapes in their experts
depend on what the other rows contain.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2flow.engines.embedded.slot_model import Prefix, SlotCache, SlotModel, rounded_rows
from m2flow.engines.models.requests import Job, forbidden_by
from m2flow.errors import EngineError, OutOfMemory
from m2flow.recipe import Sampling
from m2flow.samples import Finish, Masks, SampleId

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Hash (seed, position of the token in the response) to a number in [0, 1), float64 [B]; nothing else affects it.

    Source:
        SplitMix64: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195; here keyed by a mixed seed, so that neighbouring seeds
        do not share a sequence.

    >>> uniforms(np.array([7, 7, 8], np.uint64), np.array([0, 1, 0])).round(4).tolist()
    [0.5243, 0.3021, 0.9262]
    """
    with np.errstate(over="ignore"):
        key = _mix(seeds.astype(np.uint64))
        bits = _mix(key + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return bits ^ bits >> np.uint64(31)


@dataclass(frozen=True)
class SamplingColumns:
    """Sampling parameters of each row, arrays [B]."""

    temperature: npt.NDArray[np.float32]
    """0 is greedy."""
    top_k: npt.NDArray[np.int64]
    """0 is off."""
    top_p: npt.NDArray[np.float64]
    """1 is off."""
    min_p: npt.NDArray[np.float64]
    """0 is off."""


def draw(
    logits: Tensor,
    columns: SamplingColumns,
    uniform: npt.NDArray[np.float64],
    forbidden: Tensor | None,
    shifted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens by inverting the cumulative distribution in order of token id; rows are independent.

    Top-k comes before top-p, which looks at what top-k left, renormalised, and min-p last, as in transformers. Of equal logits at top-k's
    edge the lower id stays.

    Args:
        logits: [B, V], on any device.
        uniform: float64 [B], from `uniforms`.
        forbidden: bool [B, V], tokens that can't be drawn; or None.
        shifted: the logits with biases and penalties (`shifted_logits`), from which tokens are drawn; None: there are none.
    Returns:
        int64 [B] and float32 [B], on the logits' device.
    """
    tokens, logprobs, _ = draw_recorded(logits, columns, uniform, forbidden, shifted, [])
    return tokens, logprobs


def draw_recorded(
    logits: Tensor,
    columns: SamplingColumns,
    uniform: npt.NDArray[np.float64],
    forbidden: Tensor | None,
    shifted: Tensor | None,
    recorded: Sequence[int],
) -> tuple[Tensor, Tensor, Masks]:
    """Draw as `draw` does, and return the tokens that each `recorded` row was drawn from, among which its log-probability is.

    A greedy row, and one that could have become any token, have none. Nor has one with more than `_MOST_LEFT` tokens left: it counts as
    drawn from all of them, for the trainer too.
    """
    is_greedy = columns.temperature == 0
    logprobs = _tempered(logits, columns).log_softmax(-1)
    allowed = logprobs if shifted is None else _tempered(shifted, columns).log_softmax(-1)
    allowed = allowed if forbidden is None else allowed.masked_fill(forbidden, float("-inf"))
    if is_greedy.all():
        tokens, left = allowed.argmax(-1), allowed
    else:
        left = _truncated(allowed, columns)
        tokens = _invert(left, torch.from_numpy(uniform).to(logits.device))
        if is_greedy.any():
            tokens = torch.where(torch.from_numpy(is_greedy).to(logits.device), allowed.argmax(-1), tokens)
    found = logprobs.gather(1, tokens[:, None]).squeeze(1)
    masks: Masks = [np.zeros(0, np.int32) for _ in recorded]
    for i, row in enumerate(recorded):
        if is_greedy[row]:
            continue
        is_left = left[row].isfinite()
        if int(is_left.sum()) <= min(_MOST_LEFT, len(is_left) - 1):
            masks[i] = is_left.nonzero()[:, 0].cpu().numpy().astype(np.int32)
            found[row] -= logprobs[row].masked_fill(~is_left, float("-inf")).logsumexp(0)
    return tokens, found, masks


def _tempered(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """The logits divided by each row's temperature; of greedy rows as they are."""
    if not (columns.temperature != 1).any():
        return logits.float()
    divisor = np.where(columns.temperature == 0, np.float32(1), columns.temperature)
    return logits.float() / torch.from_numpy(divisor).to(logits.device)[:, None]


def shifts(sampling: Sampling) -> bool:
    """Whether a sample is drawn from other logits than the model's own."""
    return bool(sampling.logit_bias) or sampling.repetition_penalty != 1


def shifted_logits(logits: Tensor, rows: Iterable[tuple[int, Sampling, npt.NDArray[np.int32]]]) -> Tensor | None:
    """Add biases to logits, then divide those of tokens that a row has already by its penalty, or multiply them if negative.

    Args:
        logits: [B, V], which stay as they are.
        rows: row, its parameters, and its tokens, prompt included; those alone that `shifts`.
    Returns:
        float32 [B, V]; None if there are no such rows.
    Source:
        Keskar et al. 2019, CTRL, arXiv:1909.05858, with the negative logits of transformers' RepetitionPenaltyLogitsProcessor.
    """
    shifted: Tensor | None = None
    for row, sampling, tokens in rows:
        shifted = logits.float().clone() if shifted is None else shifted
        if sampling.logit_bias:
            ids = torch.tensor([token for token, _ in sampling.logit_bias], device=logits.device)
            shifted[row, ids] += torch.tensor([added for _, added in sampling.logit_bias], device=logits.device)
        if sampling.repetition_penalty != 1:
            ids = torch.from_numpy(np.unique(tokens).astype(np.int64)).to(logits.device)
            seen = shifted[row, ids]
            shifted[row, ids] = torch.where(seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
    return shifted


_MOST_LEFT = 1024
"""Ids that are recorded of a token: 4 KB."""
_UNLIKELY = -50.0
"""A log-probability, far above that of float32's smallest number."""


def _invert(logprobs: Tensor, uniform: Tensor) -> Tensor:
    # What is left may be so unlikely that float32 has no number for it.
    peak = logprobs.amax(-1, keepdim=True)
    cumulated = _cumulated((logprobs - torch.where(peak < _UNLIKELY, peak, 0.0)).exp())
    total = cumulated[:, -1]
    # The product may round up to the total, which no token exceeds.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulated, target[:, None], right=True)
    if logprobs.is_cuda:  # Its sums go by blocks, so that they may round up where a token adds nothing.
        tokens = tokens.clamp(max=logprobs.shape[1] - 1)
        tokens = torch.where(logprobs.gather(1, tokens).isfinite(), tokens, logprobs.argmax(-1, keepdim=True))
    return tokens.squeeze(1)


_BLOCK = 256


def _cumulated(values: Tensor) -> Tensor:
    """Add up the values [B, V] along each row, in float64. On a GPU torch has no deterministic sum; there products with triangles do it."""
    if not (values.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return values.cumsum(-1, dtype=torch.float64)
    return cumulated_by_products(values)


def cumulated_by_products(values: Tensor) -> Tensor:
    """Add up the values [B, V] along each row, in float64: in each block of 256, then over the blocks before."""
    num_values = values.shape[1]
    blocks = torch.nn.functional.pad(values.double(), (0, -num_values % _BLOCK)).unflatten(1, (-1, _BLOCK))
    within = blocks @ torch.ones(_BLOCK, _BLOCK, dtype=torch.float64, device=values.device).triu()
    num_blocks = blocks.shape[1]
    before = within[:, :, -1] @ torch.ones(num_blocks, num_blocks, dtype=torch.float64, device=values.device).triu(1)
    return (within + before[:, :, None]).flatten(1)[:, :num_values].contiguous()


def _truncated(logprobs: Tensor, columns: SamplingColumns) -> Tensor:
    num_tokens = logprobs.shape[1]
    top_k = np.where((columns.top_k > 0) & (columns.top_k < num_tokens), columns.top_k, num_tokens)
    has_k, has_p = bool((top_k < num_tokens).any()), bool((columns.top_p < 1).any())
    if not has_k and not has_p:
        return _without_unlikely(logprobs, columns)
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    if has_k:
        rank = torch.arange(num_tokens, device=logprobs.device)
        ordered = ordered.masked_fill(rank >= torch.from_numpy(top_k).to(logprobs.device)[:, None], float("-inf"))
    if has_p:
        probabilities = ordered.softmax(-1, dtype=torch.float64)
        before = _cumulated(probabilities) - probabilities
        limit = torch.from_numpy(np.where(columns.top_p < 1, columns.top_p, 2.0)).to(logprobs.device)[:, None]
        ordered = ordered.masked_fill(before >= limit, float("-inf"))
    return _without_unlikely(torch.empty_like(ordered).scatter_(1, ids, ordered), columns)


def _without_unlikely(logprobs: Tensor, columns: SamplingColumns) -> Tensor:
    """Drop tokens whose probability is below the likeliest one's times `min_p`, which renormalising does not change."""
    if not (columns.min_p > 0).any():
        return logprobs
    with np.errstate(divide="ignore"):
        share = torch.from_numpy(np.log(columns.min_p)).to(logprobs.device)
    return logprobs.masked_fill(logprobs < logprobs.amax(-1, keepdim=True) + share[:, None], float("-inf"))


# ---- decoders


class Decoder(Protocol):
    """Advances jobs token by token."""

    @property
    def num_running(self) -> int: ...

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens of KV cache that running jobs take, and the limit; 0: not limited."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes that KV caches take."""
        ...

    @property
    def num_cached(self) -> int:
        """Since its start: tokens of prompts and resumed prefixes whose KV was there already."""
        ...

    def step(self, queue: deque[Job], version: int) -> list[tuple[Job, Finish]]:
        """Take jobs from the queue's front while there is room, add a token to each that runs, and return what finished."""
        ...

    def recover_from_oom(self, queue: deque[Job], version: int) -> tuple[int, list[tuple[Job, Finish]]]:
        """After a step ran out of memory: preempt jobs, which return to the queue's front with their tokens, and let half as many run from
        now on. Returns how many were preempted, and what had finished in that step.

        Raises:
            OutOfMemory: a single job was running.
        """
        ...

    def take(self, ids: Collection[int], version: int) -> list[Job]:
        """Remove jobs, and return them with their tokens so far."""
        ...

    def peek(self, ids: Collection[int], version: int) -> list[Job]:
        """Return what `take` would, and change nothing."""
        ...

    def keep_caches(self, version: int) -> None:
        """Go on after the weights of this version were replaced: running jobs keep their KV cache."""
        ...

    def running_ids(self) -> list[int]: ...

    def progress(self) -> dict[int, int]:
        """Number of tokens so far of each running job."""
        ...

    def shrink_kv_cache(self) -> None:
        """Free KV cache that running jobs do not need now."""
        ...

    def release(self) -> None:
        """Free the KV cache. Nothing may be running."""
        ...


_ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("length", np.int64),  # tokens in the slot's cache
        ("count", np.int64),  # tokens generated
        ("last", np.int64),  # the newest token, not yet in the cache
        ("max_new", np.int64),
        ("min_new", np.int64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
    ]
)


@dataclass(frozen=True, eq=False)
class Known:
    """Tokens whose KV is there."""

    tokens: npt.NDArray[np.int32]
    job: int
    """That runs with them, or has left them."""
    kv: Prefix | None = None
    """None: the job runs, and has it in its slot."""
    routed: npt.NDArray[Any] | None = None
    """Of what is left of a job, the experts of its tokens, where routing is recorded."""


@final
class PrefixCache:
    """Known tokens, by the longest beginning that others share with them.

    In lexicographic order the sequence that shares most with another is next to it, so one bisection finds it. Memory of tokens that were
    left is bounded by whom it belongs to (`limit`); those that were least recently used or added go first.
    """

    def __init__(self) -> None:
        self._ordered: list[tuple[bytes, int]] = []
        """Tokens, so written that bytes are ordered as they are, and the number of the entry."""
        self._entries: dict[int, Known] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        """The entries that were left, the most recently used last."""
        self._running: dict[int, int] = {}
        """Job -> its entry."""
        self._next = 0
        self.num_tokens = 0
        """Of those that were left."""

    def find(self, tokens: npt.NDArray[np.int32]) -> tuple[int, Known | None]:
        """The most first tokens that are known, and where from. At least one is left to be read, since its logits are what is wanted."""
        key = _in_order(tokens)
        at = bisect.bisect(self._ordered, (key, self._next))
        best, found = _LEAST_FOUND - 1, None
        for _, number in self._ordered[max(at - 1, 0) : at + 1]:
            known = self._entries[number]
            common = min(_num_common(known.tokens, tokens), len(tokens) - 1)
            if common > best:
                best, found = common, number
        if found is None:
            return 0, None
        if found in self._kept:
            self._kept.move_to_end(found)
        return best, self._entries[found]

    def add(self, known: Known) -> None:
        """Add tokens of a job that runs now, or that has left. These replace the part of them that is next to them."""
        number, key = self._next, _in_order(known.tokens)
        at = bisect.bisect(self._ordered, (key, number))
        if known.kv is None:
            self._running[known.job] = number
        else:
            if at and self._ordered[at - 1][1] in self._kept and key.startswith(self._ordered[at - 1][0]):
                self._remove(self._ordered[at - 1][1])
                at -= 1
            self._kept[number] = None
            self.num_tokens += len(known.tokens)
        self._ordered.insert(at, (key, number))
        self._entries[number] = known
        self._next += 1

    def end(self, job: int) -> None:
        """A job does not run any longer."""
        if job in self._running:
            self._remove(self._running.pop(job))

    def limit(self, num_tokens: int) -> None:
        """Forget what was left until it is at most so many tokens."""
        while self._kept and self.num_tokens > num_tokens:
            self._remove(next(iter(self._kept)))

    def clear(self) -> None:
        self._ordered.clear()
        self._entries.clear()
        self._kept.clear()
        self._running.clear()
        self.num_tokens = 0

    def _remove(self, number: int) -> None:
        known = self._entries.pop(number)
        del self._ordered[bisect.bisect_left(self._ordered, (_in_order(known.tokens), number))]
        if number in self._kept:
            del self._kept[number]
            self.num_tokens -= len(known.tokens)


_LEAST_FOUND = 16
"""Tokens below which a pass behind a cache costs more than it saves."""
_MOST_SEEN = 1 << 24
"""Elements of the mask of a pass behind a cache, queries times keys of all its sequences: 16 MB, and 64 MB in float32."""


def _in_order(tokens: npt.NDArray[np.int32]) -> bytes:
    """Write tokens so that the bytes of two sequences have the order of their ids."""
    return tokens.astype(">u4").tobytes()


def _num_common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Tokens that two sequences begin with alike."""
    num = min(len(one), len(other))
    differ = one[:num] != other[:num]
    return int(differ.argmax()) if differ.any() else num


@final
class ContinuousDecoder:
    """Decode all running jobs together, whatever their lengths."""

    def __init__(self, model: SlotModel, *, max_running: int, max_prefill_tokens: int, kv_budget_bytes: int) -> None:
        self._model = model
        self._cache = SlotCache(is_fine=model.is_on_cpu)
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._budget_tokens = kv_budget_bytes // max(model.kv_bytes_per_token, 1)
        self._jobs: list[Job] = []
        self._coming: list[Job] = []
        """Taken from the queue, without a row yet."""
        self._rows = np.zeros(0, _ROW)
        self._tokens = np.zeros((0, 0), np.int32)
        self._logprobs = np.zeros((0, 0), np.float32)
        self._stops = np.zeros((0, 0), np.int64)  # -1 where a row has fewer
        self._routed: list[list[npt.NDArray[Any]]] = []
        """By row: the experts of the tokens that were read, where routing is recorded."""
        self._masks: dict[int, Masks] = {}
        """By job, of those that record what their tokens are drawn from."""
        self._prefixes = PrefixCache()
        self._found: dict[int, Known] = {}
        """By job that was taken from the queue and has no row yet: what it begins with, as far as its `num_cached` says."""
        self._lacked_room = False
        """Whether KV could not be kept since the cache was last resized."""
        self.num_cached = 0

    @property
    def num_running(self) -> int:
        return len(self._jobs)

    def running_ids(self) -> list[int]:
        return [job.id for job in self._jobs]

    @property
    def kv_tokens(self) -> tuple[int, int]:
        num_rows = len(self._jobs)
        longest = int(self._rows["length"][:num_rows].max()) + 1 if num_rows else 0
        return longest * num_rows, self._budget_tokens

    @property
    def kv_bytes(self) -> int:
        return self._cache.num_bytes + self._prefixes.num_tokens * self._model.kv_bytes_per_token

    def progress(self) -> dict[int, int]:
        return dict(zip(self.running_ids(), self._rows["count"][: len(self._jobs)].tolist(), strict=True))

    def step(self, queue: deque[Job], version: int) -> list[tuple[Job, Finish]]:
        num_old = len(self._jobs)
        admitted = self._coming = self._admissible(queue)
        self._make_room(admitted)
        logits = []
        if num_old:
            old = self._rows[:num_old]
            self._reserve(num_old, int(old["length"].max()) + 1)
            logits.append(self._model.decode(self._cache, old["last"].copy(), old["length"].copy()))
            old["length"] += 1
            if self._model.records_routing:
                for of_row, experts in zip(self._routed, self._model.routed(), strict=True):
                    of_row.append(experts[None])
        if admitted:
            logits.append(self._prefill(admitted))
        if not logits:
            return []
        self._sample(logits[0] if len(logits) == 1 else torch.cat(logits))
        return self._finished(version)

    def recover_from_oom(self, queue: deque[Job], version: int) -> tuple[int, list[tuple[Job, Finish]]]:
        num_tried = len(self._jobs) + len(self._coming)
        if num_tried < 2 and not self._prefixes.num_tokens:
            raise OutOfMemory(
                "out of memory with one sample alone; it does not fit", now="Lower max_new_tokens, or give the engine more memory."
            )
        # All of them: the cache is one block, and only without it is there room for a smaller one.
        back = [*self.take(self.running_ids(), version), *self._coming]
        queue.extendleft(reversed(back))
        self._coming = []
        self.release()
        self._model.drop_graphs()  # What they hold is room for what comes next, which is a prefill, and looks at none of them.
        self._rows, self._tokens, self._logprobs = self._rows[:0], self._tokens[:0, :0], self._logprobs[:0, :0]
        self._stops = self._stops[:0, :0]
        self._max_running = max(num_tried // 2, 1)
        return num_tried, []

    def take(self, ids: Collection[int], version: int) -> list[Job]:
        wanted = set(ids)
        rows = [row for row, job in enumerate(self._jobs) if job.id in wanted]
        jobs = [replace(self._job(row, version), has_old_cache=False) for row in rows]
        self._leave(np.array(rows, np.int64))
        return jobs

    def peek(self, ids: Collection[int], version: int) -> list[Job]:
        return [self._job(row, version) for row, job in enumerate(self._jobs) if job.id in ids]

    def keep_caches(self, version: int) -> None:
        self._prefixes.clear()
        self._jobs = [replace(self._job(row, version), has_old_cache=True) for row in range(len(self._jobs))]

    def shrink_kv_cache(self) -> None:
        self._prefixes.limit(0)
        self._shrink_slots()

    def _shrink_slots(self) -> None:
        num_rows = len(self._jobs)
        if num_rows:
            self._cache.shrink_kv_cache(num_rows, int(self._rows["length"][:num_rows].max()) + 1)
        else:
            self._cache.clear()

    def release(self) -> None:
        assert not self._jobs
        self._prefixes.clear()
        self._found.clear()
        self._cache.clear()

    def _admissible(self, queue: deque[Job]) -> list[Job]:
        """Take from the queue what fits, those first of which nothing is known."""
        admitted: list[Job] = []
        longest = max((job.reserved_length for job in self._jobs), default=0)
        sequences: set[bytes] = set()
        num_new, longest_new = [0, 0], [0, 0]  # Of passes from the start, and of those behind a cache.
        while queue and len(self._jobs) + len(admitted) < self._max_running:
            job = queue[0]
            longest = max(longest, self._cache.rounded(job.reserved_length))
            is_first = not self._jobs and not admitted
            # A job alone is always let in: what can't fit even then is the allocator's to say.
            if not is_first and longest * (len(self._jobs) + len(admitted) + 1) > self._budget_tokens:
                break
            tokens = np.concatenate([job.prompt, job.tokens])
            key = tokens.tobytes()
            num_known, known = self._prefixes.find(tokens)
            kind, num_more = int(known is not None), int(key not in sequences)
            longest_of_kind = max(longest_new[kind], len(tokens) - num_known)
            num_padded = (num_new[kind] + num_more) * longest_of_kind + num_new[1 - kind] * longest_new[1 - kind]
            if admitted and num_padded > self._max_prefill_tokens:
                break
            sequences.add(key)
            num_new[kind] += num_more
            longest_new[kind] = longest_of_kind
            queue.popleft()
            admitted.append(replace(job, num_cached=num_known))
            if known is not None:
                self._found[job.id] = known
        return sorted(admitted, key=lambda job: job.num_cached > 0)

    def _make_room(self, admitted: list[Job]) -> None:
        if not admitted:
            return
        num_rows = len(self._jobs) + len(admitted)
        capacity = min(max(num_rows, 2 * len(self._rows)), self._max_running) if num_rows > len(self._rows) else len(self._rows)
        width = max(self._tokens.shape[1], *(job.sampling.max_new_tokens for job in admitted))
        num_stops = max(self._stops.shape[1], *(len(job.stop_ids) for job in admitted))
        self._rows = _resized(self._rows, (capacity,))
        self._tokens = _resized(self._tokens, (capacity, width))
        self._logprobs = _resized(self._logprobs, (capacity, width))
        self._stops = _resized(self._stops, (capacity, num_stops), fill=-1)

    def _reserve(self, num_rows: int, length: int) -> None:
        """Let the cache have so many rows of this length; where graphs read it, room for all that was admitted, lest it moves.

        Slots that are left of many short rows do not grow with a few long ones: a cache that would outgrow the budget loses them first.
        """
        length = max(length, int(self._rows["length"][: len(self._jobs)].max()) + 1)
        if self._model.has_graphs:
            length = max(length, *(job.reserved_length for job in self._jobs))
            num_rows = max(num_rows, min(rounded_rows(num_rows), self._max_running, self._budget_tokens // length))
        slots, tokens = max(num_rows, self._cache.num_slots), max(length, self._cache.length)
        if (slots, tokens) != (self._cache.num_slots, self._cache.length) and slots * tokens > self._budget_tokens:
            self._cache.shrink_kv_cache(num_rows, length)
        slots, tokens = max(num_rows, self._cache.num_slots), self._cache.rounded(max(length, self._cache.length))
        if (slots, tokens) != (self._cache.num_slots, self._cache.length):
            self._lacked_room = False
            self._prefixes.limit(self._budget_tokens - slots * tokens)
        self._cache.reserve(num_rows, length)

    def _prefill(self, admitted: list[Job]) -> torch.Tensor:
        first = len(self._jobs)
        for row, job in enumerate(admitted, first):
            count, s = len(job.tokens), job.sampling
            length = len(job.prompt) + count
            self._rows[row] = (job.seed, length, count, 0, s.max_new_tokens, s.min_new_tokens, s.temperature, s.top_k, s.top_p, s.min_p)
            self._tokens[row, :count] = job.tokens
            self._logprobs[row, :count] = job.logprobs
            if job.masks is not None:
                self._masks[job.id] = list(job.masks)
            self._stops[row] = -1
            self._stops[row, : len(job.stop_ids)] = job.stop_ids
        self._jobs += admitted
        self._coming = []
        self._reserve(len(self._jobs), max(len(job.prompt) + len(job.tokens) for job in admitted) + 1)
        logits = [self._read(rows) for rows in self._passes(first)]
        for row, job in enumerate(admitted, first):
            self._prefixes.add(Known(self._tokens_read(row), job.id))
            self.num_cached += job.num_cached
        self._found.clear()
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _passes(self, first: int) -> Iterator[range]:
        """The rows from `first` on as they are read together: those of which nothing is known, then others, as many as a mask allows."""
        num_fresh = sum(not job.num_cached for job in self._jobs[first:])
        if num_fresh:
            yield range(first, first + num_fresh)
        begin = at = first + num_fresh
        longest = longest_new = 0
        while at < len(self._jobs):
            length = int(self._rows["length"][at])
            longest, longest_new = max(longest, length), max(longest_new, length - self._jobs[at].num_cached)
            if at > begin and (at + 1 - begin) * longest * longest_new > _MOST_SEEN:
                yield range(begin, at)
                begin, longest, longest_new = at, 0, 0
                continue
            at += 1
        if at > begin:
            yield range(begin, at)

    def _read(self, rows: range) -> torch.Tensor:
        """Read the tokens of new rows, all from their start or all behind what is known; the logits after each, [rows, V]."""
        sequences: dict[bytes, int] = {}
        unique: list[npt.NDArray[np.int32]] = []
        starts: list[int] = []
        sequence_of_slot = []
        row_of = {job.id: row for row, job in enumerate(self._jobs)}
        before: list[list[npt.NDArray[Any]]] = []
        for row in rows:
            job, tokens = self._jobs[row], self._tokens_read(row)
            known = self._found.get(job.id)
            before.append([])
            if known is not None:
                kv = self._cache.prefix(row_of[known.job], job.num_cached) if known.kv is None else known.kv
                self._cache.write(row, kv, job.num_cached)
                if self._model.records_routing:
                    experts = np.concatenate(self._routed[row_of[known.job]]) if known.routed is None else known.routed
                    before[-1].append(experts[: job.num_cached])
            if (key := tokens.tobytes()) not in sequences:
                sequences[key] = len(unique)
                unique.append(tokens[job.num_cached :])
                starts.append(job.num_cached)
            sequence_of_slot.append(sequences[key])
        logits = self._model.prefill(self._cache, unique, rows.start, sequence_of_slot, starts if max(starts) else None)
        if self._model.records_routing:
            by_sequence = np.split(self._model.routed(), np.cumsum([len(sequence) for sequence in unique])[:-1])
            self._routed += [[*known, by_sequence[sequence]] for known, sequence in zip(before, sequence_of_slot, strict=True)]
        return logits.index_select(0, torch.tensor(sequence_of_slot, device=logits.device))

    def _tokens_read(self, row: int) -> npt.NDArray[np.int32]:
        """The tokens in a row's slot."""
        prompt = self._jobs[row].prompt
        return np.concatenate([prompt, self._tokens[row, : self._rows["length"][row] - len(prompt)]])

    def _sample(self, logits: torch.Tensor) -> None:
        num_rows = len(self._jobs)
        rows = self._rows[:num_rows]
        columns = SamplingColumns(*(rows[name].copy() for name in ("temperature", "top_k", "top_p", "min_p")))
        forbidden = forbidden_stops(rows["count"] < rows["min_new"], self._stops[:num_rows], logits)
        forbidden = forbidden_by(
            ((row, job.constraint, self._tokens[row, : rows["count"][row]]) for row, job in enumerate(self._jobs)), forbidden, logits
        )
        shifted = shifted_logits(
            logits,
            (
                (row, job.sampling, np.concatenate([job.prompt, self._tokens[row, : rows["count"][row]]]))
                for row, job in enumerate(self._jobs)
                if shifts(job.sampling)
            ),
        )
        recorded = [row for row, job in enumerate(self._jobs) if job.id in self._masks] if self._masks else []
        uniform = uniforms(rows["seed"], rows["count"])
        tokens, logprobs, masks = draw_recorded(logits, columns, uniform, forbidden, shifted, recorded)
        for row, mask in zip(recorded, masks, strict=True):
            self._masks[self._jobs[row].id].append(mask)
        # One transfer; float64 holds any token id and any float32 exactly.
        drawn = torch.stack([tokens.double(), logprobs.double()]).cpu().numpy()
        index = np.arange(num_rows)
        self._tokens[index, rows["count"]] = rows["last"] = drawn[0]
        self._logprobs[index, rows["count"]] = drawn[1]
        rows["count"] += 1

    def _finished(self, version: int) -> list[tuple[Job, Finish]]:
        num_rows = len(self._jobs)
        rows = self._rows[:num_rows]
        is_stop = (rows["last"][:, None] == self._stops[:num_rows]).any(1)
        for row, job in enumerate(self._jobs):
            if job.stop_texts is not None:
                is_stop[row] |= job.is_stopped_by(self._tokens[row, : rows["count"][row]])
        done = np.flatnonzero(is_stop | (rows["count"] >= rows["max_new"]))
        finished = [(self._job(row, version), Finish.STOP if is_stop[row] else Finish.LENGTH) for row in done.tolist()]
        for row in done.tolist():
            if self._jobs[row].keeps_kv and not self._jobs[row].has_old_cache:
                self._keep(row)
        self._leave(done)
        if self._lacked_room and not self._model.has_graphs and 2 * len(self._jobs) <= self._cache.num_slots:
            self._lacked_room = False
            self._shrink_slots()
        return finished

    def _keep(self, row: int) -> None:
        """Keep the KV of a row that leaves, as far as running ones leave room for it."""
        tokens = self._tokens_read(row)
        room = self._budget_tokens - self._cache.num_slots * self._cache.length - len(tokens)
        self._lacked_room |= self._prefixes.num_tokens > room
        if room < 0:
            return
        self._prefixes.limit(room)
        kv = {layer: (key.clone(), value.clone()) for layer, (key, value) in self._cache.prefix(row, len(tokens)).items()}
        routed = np.concatenate(self._routed[row]) if self._model.records_routing else None
        self._prefixes.add(Known(tokens, self._jobs[row].id, kv, routed))

    def _job(self, row: int, version: int) -> Job:
        count = self._rows["count"][row]
        masks = self._masks.get(self._jobs[row].id)
        job = self._jobs[row].extended(self._tokens[row, :count], self._logprobs[row, :count], version, masks)
        if not self._model.records_routing or row >= len(self._routed):  # Or its prefill ran out of memory.
            return job
        return replace(job, routed_experts=np.concatenate([*self._routed[row], self._model.unknown_routing(1)]))

    def _leave(self, gone: npt.NDArray[np.int64]) -> None:
        num_left = len(self._jobs) - len(gone)
        for row in gone.tolist():
            self._masks.pop(self._jobs[row].id, None)
            self._prefixes.end(self._jobs[row].id)
        holes = gone[gone < num_left]
        if len(holes):
            movers = np.setdiff1d(np.arange(num_left, len(self._jobs)), gone)
            for array in (self._rows, self._tokens, self._logprobs, self._stops):
                array[holes] = array[movers]
            for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
                self._jobs[hole] = self._jobs[mover]
                if self._routed:
                    self._routed[hole] = self._routed[mover]
            self._cache.move(holes.tolist(), movers.tolist(), int(self._rows["length"][:num_left].max()))
        del self._jobs[num_left:], self._routed[num_left:]


def forbidden_stops(is_early: npt.NDArray[np.bool_], stops: npt.NDArray[np.int64], like: torch.Tensor) -> torch.Tensor | None:
    """Stop tokens that rows below `min_new_tokens` must not draw: bool [B, V] like the logits, or None if there are none."""
    if not is_early.any() or not stops.shape[1]:
        return None
    row, column = np.nonzero(is_early[:, None] & (stops >= 0))
    forbidden = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    forbidden[torch.from_numpy(row).to(like.device), torch.from_numpy(stops[row, column]).to(like.device)] = True
    return forbidden


def _resized(array: npt.NDArray[Any], shape: tuple[int, ...], fill: int = 0) -> npt.NDArray[Any]:
    if array.shape == shape:
        return array
    resized = np.full(shape, fill, array.dtype) if fill else np.zeros(shape, array.dtype)
    resized[tuple(slice(size) for size in array.shape)] = array
    return resized


# ---- deterministic, R rows


@final
class FixedRowsDecoder:
    """Decode in batches of R rows, each for the members of one group that were admitted together."""

    def __init__(self, model: SlotModel, *, num_rows: int, max_running: int) -> None:
        if model.is_mixture:
            raise EngineError(
                "a mixture of experts can't decode deterministically: the shapes in its experts depend on the other samples",
                now="Run without --deterministic.",
            )
        self.num_cached = 0
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
