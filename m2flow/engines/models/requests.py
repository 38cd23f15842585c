"""Requests as rollout engines work on them: validated, tokenised, with the tokens generated so far; and which tokens may come next.

    Request --RequestReader.job--> Job --an engine--> Job --generated_of--> Generated
    Sampling.regex | json_schema | grammar --Constraint.of--> Constraint --allowed(tokens so far)--> bool [V]
    the column `sampling_mask` --SamplingMask.of--> what each token was drawn from --among_left--> log-probabilities and entropies

What may come next depends on the constraint and the sample's tokens alone, so a sample that is aborted and resumed, or decoded beside
others, goes on as it would alone. The package llguidance does the matching, byte by byte over the tokenizer's vocabulary.

Legend: V vocabulary, T tokens under the loss mask, K most tokens that one of them was drawn from.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast, final

import numpy as np
import numpy.typing as npt
import torch

from m2flow.engines.contract import Generated, Request, StopTexts
from m2flow.engines.models.model_files import TextCodec
from m2flow.engines.models.packing import num_masked
from m2flow.errors import DatasetError, EngineError, MissingExtra, PromptTooLong
from m2flow.recipe import TOP_LOGPROBS, Sampling
from m2flow.samples import SAMPLING_MASK, Batch, Finish, Masks, Prompt, SampleId, packed_masks, unpacked_masks

# ---- which tokens may come next


@final
class Constraint:
    """The constraint of one sample; it remembers how far the sample's tokens are matched."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._matched: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    @classmethod
    def of(cls, sampling: Sampling, codec: TextCodec, vocab_size: int) -> Constraint | None:
        """The constraint of these parameters; None if they have none.

        Raises:
            EngineError: it can't be read, or the tokenizer has no end-of-sequence token. MissingExtra: llguidance is not installed.
        """
        if not sampling.is_constrained:
            return None
        if not codec.eos_ids:
            raise EngineError(
                "a constraint ends a response by an end-of-sequence token, and the tokenizer has none",
                now="Set eos_token in the tokenizer, or leave the constraint out.",
            )
        try:
            from llguidance import LLMatcher
        except ImportError:
            now = "Run: pip install 'm2flow[grammar]'."
            raise MissingExtra("regex=, json_schema= and grammar= need the package llguidance, which is not installed", now=now) from None
        try:
            matcher = LLMatcher(_tokenizer_of(codec, vocab_size), _grammar(sampling), log_level=0)
            problem = matcher.get_error() if matcher.is_error() else ""
        except Exception as error:  # Of the package's own kinds, bare `Exception` included.
            problem = str(error)
        if problem:
            option = next(name for name in ("regex", "json_schema", "grammar") if getattr(sampling, name))
            raise EngineError(
                f"{option}={getattr(sampling, option)!r:.80} can't be read: {problem.strip().splitlines()[0]}",
                now="Mend the schema, grammar or pattern where it says.",
            )
        return cls(matcher, vocab_size)

    def allowed(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which tokens may follow these, all of the sample's so far: bool [V].

        Raises:
            EngineError: the tokens do not match, or nothing may follow them.
        """
        num_matched = len(self._matched)
        if num_matched > len(tokens) or not np.array_equal(self._matched, tokens[:num_matched]):
            self._matcher.reset()
            num_matched = 0
        if not self._matcher.consume_tokens(tokens[num_matched:].tolist()):
            raise EngineError(f"a sample does not match its constraint: {self._matcher.get_error()}")
        self._matched = tokens.copy()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        if not mask.any():
            raise EngineError(f"no token may follow in a constrained sample: {self._matcher.get_error() or 'its text is at an end'}")
        return mask


def _grammar(sampling: Sampling) -> str:
    """The constraint in llguidance's own form."""
    from llguidance import LLMatcher, gbnf_to_lark

    if sampling.regex:
        return str(LLMatcher.grammar_from_regex(sampling.regex))
    if sampling.json_schema:
        return str(LLMatcher.grammar_from_json_schema(sampling.json_schema))
    return str(LLMatcher.grammar_from_lark(gbnf_to_lark.any_to_lark(sampling.grammar)))


def forbidden_by(
    rows: Iterable[tuple[int, Constraint | None, npt.NDArray[np.int32]]], forbidden: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    """Add what constraints do not allow to the forbidden tokens: bool [B, V] like the logits, or None if nothing is forbidden.

    Args:
        rows: row, its constraint if it has one, and its tokens so far.
    """
    for row, constraint, tokens in rows:
        if constraint is not None:
            forbidden = torch.zeros(like.shape, dtype=torch.bool, device=like.device) if forbidden is None else forbidden
            forbidden[row] |= torch.from_numpy(~constraint.allowed(tokens)).to(like.device)
    return forbidden


# ---- in the trainer


class SamplingMask(NamedTuple):
    """What the tokens of a batch were drawn from, where top-k, top-p, min-p, a constraint or a ban on early ends left some out.

    Log-probabilities and entropies among what is left are those of the distribution that was sampled, so that a trainer's ratio is 1 on
    equal weights, and no gradient goes to tokens that could not have come.

    Source:
        DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "Keep Sampling Mask".
    """

    ids: torch.Tensor
    """int64 [T, K], filled up with 0."""
    is_left: torch.Tensor
    """bool [T, K], False where `ids` is filled up. A row without True: the token was drawn from the whole vocabulary."""

    @classmethod
    def of(cls, batch: Batch, device: str) -> SamplingMask | None:
        """The masks of a batch's masked tokens. None: there are none."""
        if SAMPLING_MASK not in batch:
            return None
        counts = num_masked(batch.ragged("loss_mask")).tolist()
        column = batch.ragged(SAMPLING_MASK)
        masks = [mask for row, count in enumerate(counts) for mask in unpacked_masks(column.row(row).astype(np.int32), count)]
        lengths = np.array([len(mask) for mask in masks], np.int64)
        if not lengths.any():
            return None
        is_left = np.arange(lengths.max()) < lengths[:, None]
        ids = np.zeros(is_left.shape, np.int64)
        ids[is_left] = np.concatenate(masks)
        return cls(torch.from_numpy(ids).to(device), torch.from_numpy(is_left).to(device))

    def among_left(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Condition outputs over the whole vocabulary on the token being one that was left.

        Args:
            outputs: `logprobs` and `entropy` [T], and `top_logprobs` [T, K + 1], the log-probabilities of `ids` and of all others.
        Returns:
            `logprobs` and `entropy`, differentiable.

        >>> mask = SamplingMask(torch.tensor([[0, 2]]), torch.tensor([[True, True]]))
        >>> p = torch.tensor([0.2, 0.5, 0.3]).log()
        >>> found = mask.among_left({"logprobs": p[2:], "entropy": p[:1], "top_logprobs": p[None, [0, 2, 1]]})
        >>> {name: round(values.item(), 4) for name, values in found.items()}
        {'logprobs': -0.5108, 'entropy': 0.673}
        """
        left = torch.where(self.is_left, outputs[TOP_LOGPROBS][:, :-1], _NEVER)
        total = left.logsumexp(1, keepdim=True)
        among = left - total
        is_cut = self.is_left.any(1)
        entropy = -(among.exp() * torch.where(self.is_left, among, 0.0)).sum(1)
        return {
            "logprobs": torch.where(is_cut, outputs["logprobs"] - total[:, 0], outputs["logprobs"]),
            "entropy": torch.where(is_cut, entropy, outputs["entropy"]),
        }


_NEVER = -1e30
"""A log-probability whose exponential is 0. (Infinity would make gradients that are none.)"""


# ---- tokenizers


@functools.lru_cache(maxsize=4)
def _tokenizer_of(codec: TextCodec, vocab_size: int) -> Any:
    """Prepare a tokenizer for matching, which takes about a second for 150,000 tokens."""
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(codec.fast, n_vocab=vocab_size, eos_token=sorted(codec.eos_ids))
    except ValueError as error:
        raise EngineError(
            f"constraints need a fast tokenizer that llguidance reads: {error}",
            now="Take a model with a tokenizer.json, or leave the constraint out.",
        ) from None


# ---- requests


@dataclass(frozen=True, eq=False)
class Job:
    """A request as a decoder sees it: its prompt in tokens, and what has been generated."""

    id: int
    seed: int
    sampling: Sampling
    prompt: npt.NDArray[np.int32]
    stop_ids: npt.NDArray[np.int64]
    """End-of-sequence tokens included."""
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    kv_stale: npt.NDArray[np.bool_]
    routed_experts: npt.NDArray[np.int16] | npt.NDArray[np.uint8] | None = None
    """As `m2flow.engines.contract.Generated` has them."""
    has_old_cache: bool = False
    """Weights have changed since its tokens were read: those that come now see older keys."""
    stop_texts: StopTexts | None = None
    prompt_text: str | None = None
    """As `m2flow.engines.contract.Generated` has it."""
    constraint: Constraint | None = None
    masks: Masks | None = None
    """What each of its tokens was drawn from; None: nobody asks."""
    num_cached: int = 0
    """As `m2flow.engines.contract.Generated` has it."""
    keeps_kv: bool = False
    """As `m2flow.engines.contract.Request` has it."""

    @property
    def reserved_length(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens

    def is_stopped_by(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Whether the last of these tokens, all of the sample, completes a stop text."""
        return self.stop_texts is not None and self.stop_texts.are_completed(tokens)

    def extended(self, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], version: int, masks: Masks | None = None) -> Job:
        """Return the job with all its tokens; those beyond the ones it had were made by this version."""
        versions = np.full(len(tokens), version, np.int32)
        versions[: len(self.versions)] = self.versions
        stale = np.full(len(tokens), self.has_old_cache)
        stale[: len(self.kv_stale)] = self.kv_stale
        made = copy(self)  # `replace` would take as long as all else here.
        masks = None if masks is None else list(masks)
        vars(made).update(tokens=tokens.copy(), logprobs=logprobs.copy(), versions=versions, kv_stale=stale, masks=masks)
        return made


@final
class RequestReader:
    """Validate and tokenise the requests of one call. What they share, a prompt or sampling parameters, is worked out once."""

    def __init__(self, codec: TextCodec, *, vocab_size: int, max_context: int) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._prompts: dict[Hashable, tuple[npt.NDArray[np.int32], str | None]] = {}
        self._limits: dict[tuple[int, int], tuple[Sampling, Sampling, npt.NDArray[np.int64]]] = {}
        """Identity of sampling parameters, and the room for a response -> these, what holds for that room, and the stop tokens."""

    def job(self, request: Request) -> Job:
        """Make the job of a request; its response ends where the context does.

        Raises:
            PromptTooLong: the prompt alone fills the context. EngineError: no prompt, tokens that the model does
                not have, or a prefix that is not whole.
        """
        prompt, prompt_text = self._prompt(request)
        sampling, stop_ids = self._limited(request, self._max_context - len(prompt))
        num_new = sampling.max_new_tokens
        prefix = np.array(request.prefix, np.int32)
        if len(prefix):
            self._check_tokens(request, prefix)
        if not len(prefix) == len(request.prefix_logprobs) == len(request.prefix_versions) or len(prefix) > num_new:
            raise EngineError(
                f"sample {_who(request)}: a prefix of {len(prefix)} tokens with {len(request.prefix_logprobs)} log-probabilities and "
                f"{len(request.prefix_versions)} versions, for max_new_tokens={num_new}"
            )
        return Job(
            id=request.id,
            seed=request.seed,
            sampling=sampling,
            prompt=prompt,
            stop_ids=stop_ids,
            tokens=prefix,
            logprobs=np.array(request.prefix_logprobs, np.float32),
            versions=np.array(request.prefix_versions, np.int32),
            kv_stale=np.array(request.prefix_kv_stale or [False] * len(prefix), np.bool_),
            stop_texts=StopTexts.of(sampling, self._codec.decode, self._codec.special_ids),
            prompt_text=prompt_text,
            constraint=Constraint.of(sampling, self._codec, self._vocab_size),
            masks=unpacked_masks(np.array(request.prefix_masks, np.int32), len(prefix)) if sampling.sampling_mask else None,
            keeps_kv=request.keeps_kv,
        )

    def _prompt(self, request: Request) -> tuple[npt.NDArray[np.int32], str | None]:
        """The tokens of a prompt, and its text as the chat template made it."""
        given = request.prompt
        is_text = isinstance(given, str) or bool(given and not isinstance(given[0], int))
        key: Hashable = given if isinstance(given, str) else ("messages", json.dumps(given)) if is_text else (request.prompt_text, given)
        found = self._prompts.get(key)
        if found is None:
            if is_text:
                prompt = cast(Prompt, given)
                try:
                    found = np.array(self._codec.encode_prompt(prompt), np.int32), self._codec.prompt_text(prompt)
                except DatasetError as error:
                    raise DatasetError(f"sample {_who(request)}: {error.what}", now=error.now) from None
            else:
                found = np.array(given, np.int32), request.prompt_text
            self._check_prompt(request, found[0])
            self._prompts[key] = found
        return found

    def _check_prompt(self, request: Request, prompt: npt.NDArray[np.int32]) -> None:
        if not len(prompt):
            raise EngineError(f"sample {_who(request)}: the prompt has no tokens", now="Give it a text, or the tokenizer's first token.")
        self._check_tokens(request, prompt)
        if len(prompt) >= self._max_context:
            raise PromptTooLong(
                f"sample {_who(request)}: a prompt of {len(prompt)} tokens leaves no room for a response in the context of "
                f"{self._max_context}",
                now='Shorten the prompt: Dataset(..., policy=policy, max_prompt_tokens=..., too_long="truncate-left", or "drop").',
            )

    def _check_tokens(self, request: Request, ids: npt.NDArray[np.int32]) -> None:
        if not 0 <= ids.min() <= ids.max() < self._vocab_size:
            what = f"sample {_who(request)} has token ids outside of 0..{self._vocab_size - 1}"
            raise EngineError(what, now="Do tokenizer and model belong together?")

    def _limited(self, request: Request, room: int) -> tuple[Sampling, npt.NDArray[np.int64]]:
        """The sampling parameters of a request that has room for so many new tokens, and its stop tokens."""
        given = request.sampling
        num_new = min(given.max_new_tokens, room)
        known = self._limits.get((id(given), num_new))
        if known is None:
            if given.logit_bias and max(token for token, _ in given.logit_bias) >= self._vocab_size:
                raise EngineError(
                    f"sample {_who(request)}: logit_bias has a token outside of 0..{self._vocab_size - 1}",
                    now="Give logit_bias token ids of this model's vocabulary.",
                )
            eos_ids: frozenset[int] = frozenset() if given.ignore_eos else self._codec.eos_ids
            stops = sorted(eos_ids | set(given.stop_token_ids) | self._codec.special_among(given.stop))
            sampling = replace(given, max_new_tokens=num_new, min_new_tokens=min(given.min_new_tokens, num_new))
            known = given, sampling, np.array([token for token in stops if token < self._vocab_size], np.int64)
            self._limits[id(given), num_new] = known
        return known[1:]


def _who(request: Request) -> SampleId:
    return SampleId.unpack(request.id)


def jobs_of(requests: Sequence[Request], known: Iterable[int], codec: TextCodec, *, vocab_size: int, max_context: int) -> list[Job]:
    """Make the jobs of a whole call, of which all are queued or none.

    Args:
        known: what the engine has.
    Raises:
        EngineError: one of them is known, or comes twice. And as `RequestReader.job`.
    """
    seen = set(known)
    reader = RequestReader(codec, vocab_size=vocab_size, max_context=max_context)
    jobs = []
    for request in requests:
        jobs.append(reader.job(request))
        if request.id in seen:
            raise EngineError(f"sample {_who(request)} is already being generated")
        seen.add(request.id)
    return jobs


def finish_of_prefix(job: Job) -> Finish | None:
    """The finish reason of a request whose prefix is already a whole sample; None if it is not."""
    if len(job.tokens) and (bool((job.stop_ids == job.tokens[-1]).any()) or job.is_stopped_by(job.tokens)):
        return Finish.STOP
    return Finish.LENGTH if len(job.tokens) == job.sampling.max_new_tokens else None


def split_finished(jobs: Iterable[Job]) -> tuple[list[Job], list[tuple[Job, Finish]]]:
    """Split jobs into those that go on, and those that are whole samples already, with their finish reasons."""
    goes_on: list[Job] = []
    whole: list[tuple[Job, Finish]] = []
    for job in jobs:
        finish = finish_of_prefix(job)
        if finish is None:
            goes_on.append(job)
        else:
            whole.append((job, finish))
    return goes_on, whole


def generated_of(job: Job, finish: Finish, codec: TextCodec) -> Generated:
    """Turn a job that leaves its engine into the sample that the engine returns."""
    stops = job.stop_texts if finish is Finish.STOP else None
    return Generated(
        id=job.id,
        prompt_tokens=job.prompt,
        tokens=job.tokens,
        logprobs=job.logprobs,
        versions=job.versions,
        kv_stale=job.kv_stale,
        finish=finish,
        text=stops.shorten(job.tokens) if stops else codec.decode(job.tokens.tolist()),
        routed_experts=job.routed_experts,
        prompt_text=job.prompt_text,
        sampling_mask=None if job.masks is None else packed_masks(job.masks),
        num_cached=job.num_cached,
    )
