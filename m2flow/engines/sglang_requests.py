"""Samples as requests to an SGLang server, and what it says of them as samples.

Job --request_body--> what /generate is told          tokens, log-probabilities, spans of versions --grown--> Job
                                                      experts of each token                        --Routing--> an array
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from m2flow.engines.jobs import Job
from m2flow.engines.sglang_client import Span
from m2flow.errors import EngineError
from m2flow.samples import SampleId


@dataclass
class Running:
    """A request that the server has."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_mixed: bool = False
    """Weights have changed under it: which made which token is said at its end."""


def request_body(job: Job) -> dict[str, object]:
    """What /generate is told. Log-probabilities are the server's: of softmax(logits / temperature), before top-p and top-k."""
    sampling = job.sampling
    parameters = {
        "max_new_tokens": sampling.max_new_tokens - len(job.tokens),
        "min_new_tokens": max(0, sampling.min_new_tokens - len(job.tokens)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": job.stop_ids.tolist(),
        "skip_special_tokens": False,
        "sampling_seed": job.seed % (1 << 63),
    }
    return {"input_ids": [*job.prompt.tolist(), *job.tokens.tolist()], "sampling_params": parameters, "return_logprob": True}


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


@dataclass(frozen=True)
class Routing:
    """What a server says of a mixture's tokens: for each layer, the experts that it went to."""

    num_layers: int
    num_of_token: int

    @classmethod
    def of(cls, config: Any) -> Routing:
        """Of a language model's configuration. Raises `EngineError`: it is no mixture of experts."""
        each = getattr(config, "num_experts_per_tok", None)
        if not each:
            raise EngineError(
                f"the option routed_experts is for mixtures of experts, and a {config.model_type} model is none",
                now="Leave it out of rollout.options.",
            )
        return cls(int(config.num_hidden_layers), int(each))

    def read(self, said: str, num_tokens: int) -> npt.NDArray[np.int16]:
        """The experts of so many tokens, int16 [T, layers, experts of a token]; -1 where nothing was said."""
        found = np.full((num_tokens, self.num_layers, self.num_of_token), -1, np.int16)
        values = np.frombuffer(base64.b64decode(said), np.int32)
        if len(values) % found[:1].size or len(values) > found.size:
            raise EngineError(f"the SGLang server said {len(values)} experts of {num_tokens} tokens in {self.num_layers} layers")
        rows = values.reshape(-1, self.num_layers, self.num_of_token)
        found[: len(rows)] = rows
        return found

    def completed(self, job: Job) -> Job:
        """A job that leaves: with a row for each of its tokens, also where the server said nothing since."""
        num_tokens = len(job.prompt) + len(job.tokens)
        if job.routed_experts is not None and len(job.routed_experts) == num_tokens:
            return job
        return replace(job, routed_experts=self.read("", num_tokens))
