"""Samples as requests to an SGLang server, and what it says of them as samples.

Job --request_body--> what /generate is told          experts of each token --Routing--> an array
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from m2flow.engines.jobs import Job
from m2flow.errors import EngineError


def request_body(job: Job) -> dict[str, object]:
    """What /generate is told. Log-probabilities are the server's: of softmax(logits / temperature), before top-p and top-k, after
    `min_new_tokens`."""
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
