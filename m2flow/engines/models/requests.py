"""Requests as rollout engines work on them: validated, tokenised, with the tokens generated so far.

Request --job_of--> Job --an engine--> Job --generated_of--> Generated
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from m2flow.engines.contract import Generated, Request, StopTexts
from m2flow.engines.models.constraints import Constraint
from m2flow.engines.models.model_files import TextCodec
from m2flow.errors import DatasetError, EngineError, PromptTooLong
from m2flow.recipe import Sampling
from m2flow.samples import Finish, Masks, Prompt, SampleId, packed_masks, unpacked_masks


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
        masks = None if masks is None else list(masks)
        return replace(self, tokens=tokens.copy(), logprobs=logprobs.copy(), versions=versions, kv_stale=stale, masks=masks)


Encoded = dict[str, tuple[npt.NDArray[np.int32], str | None]]
"""Prompt as JSON -> its tokens, and its text as the chat template made it."""


def job_of(request: Request, codec: TextCodec, encoded: Encoded, *, vocab_size: int, max_context: int) -> Job:
    """Validate and tokenise a request; its response ends where the context does. `encoded` caches the prompts of a call.

    Raises:
        PromptTooLong: the prompt alone fills the context. EngineError: no prompt, tokens that the model does
            not have, or a prefix that is not whole.
    """
    who = SampleId.unpack(request.id)
    prompt_text = request.prompt_text
    if isinstance(request.prompt, str) or (request.prompt and not isinstance(request.prompt[0], int)):
        given = cast(Prompt, request.prompt)
        key = json.dumps(given)
        if key not in encoded:
            try:
                encoded[key] = np.array(codec.encode_prompt(given), np.int32), codec.prompt_text(given)
            except DatasetError as error:
                raise DatasetError(f"sample {who}: {error.what}", now=error.now) from None
        prompt, prompt_text = encoded[key]
    else:
        prompt = np.array(request.prompt, np.int32)
    prefix = np.array(request.prefix, np.int32)
    if not len(prompt):
        raise EngineError(f"sample {who}: the prompt has no tokens", now="Give it a text, or the tokenizer's first token.")
    for ids in (prompt, prefix):
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise EngineError(f"sample {who} has token ids outside of 0..{vocab_size - 1}", now="Do tokenizer and model belong together?")
    if len(prompt) >= max_context:
        raise PromptTooLong(
            f"sample {who}: a prompt of {len(prompt)} tokens leaves no room for a response in the context of {max_context}",
            now='Shorten the prompt: Dataset(..., policy=policy, max_prompt_tokens=..., too_long="truncate-left", or "drop").',
        )
    num_new = min(request.sampling.max_new_tokens, max_context - len(prompt))
    sampling = replace(request.sampling, max_new_tokens=num_new, min_new_tokens=min(request.sampling.min_new_tokens, num_new))
    if not len(prefix) == len(request.prefix_logprobs) == len(request.prefix_versions) or len(prefix) > num_new:
        raise EngineError(
            f"sample {who}: a prefix of {len(prefix)} tokens with {len(request.prefix_logprobs)} log-probabilities and "
            f"{len(request.prefix_versions)} versions, for max_new_tokens={num_new}"
        )
    if sampling.logit_bias and max(token for token, _ in sampling.logit_bias) >= vocab_size:
        raise EngineError(
            f"sample {who}: logit_bias has a token outside of 0..{vocab_size - 1}",
            now="Give logit_bias token ids of this model's vocabulary.",
        )
    stops = sorted(
        (frozenset() if sampling.ignore_eos else codec.eos_ids) | set(sampling.stop_token_ids) | codec.special_among(sampling.stop)
    )
    return Job(
        id=request.id,
        seed=request.seed,
        sampling=sampling,
        prompt=prompt,
        stop_ids=np.array([token for token in stops if token < vocab_size], np.int64),
        tokens=prefix,
        logprobs=np.array(request.prefix_logprobs, np.float32),
        versions=np.array(request.prefix_versions, np.int32),
        kv_stale=np.array(request.prefix_kv_stale or [False] * len(prefix), np.bool_),
        stop_texts=StopTexts.of(sampling, codec.decode, codec.special_ids),
        prompt_text=prompt_text,
        constraint=Constraint.of(sampling, codec, vocab_size),
        masks=unpacked_masks(np.array(request.prefix_masks, np.int32), len(prefix)) if sampling.sampling_mask else None,
    )


def jobs_of(requests: Sequence[Request], known: Iterable[int], codec: TextCodec, *, vocab_size: int, max_context: int) -> list[Job]:
    """Run `job_of` for a whole call, of which all are queued or none.

    Args:
        known: what the engine has.
    Raises:
        EngineError: one of them is known, or comes twice. And as `job_of`.
    """
    seen = set(known)
    encoded: Encoded = {}
    jobs = []
    for request in requests:
        jobs.append(job_of(request, codec, encoded, vocab_size=vocab_size, max_context=max_context))
        if request.id in seen:
            raise EngineError(f"sample {SampleId.unpack(request.id)} is already being generated")
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
    )
