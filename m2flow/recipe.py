"""What a flow says about sampling, optimisation and losses: values, understood by macro code and engines alike.

They are part of the program (they change the mathematics), so they live in the flow and never in a cluster spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from m2flow.errors import OptionError


def is_count(value: object) -> bool:
    """Whether a value is a whole number, 1 or more. `True` is none, nor is 2.0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class Lora:
    """Train adapters of low rank beside linear layers, instead of their weights: W + alpha / rank * B A.

    Source:
        Hu et al. 2021, arXiv:2106.09685.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    """The last part of the names of layers (`q_proj`); none: every linear layer but the head."""

    def __post_init__(self) -> None:
        if not is_count(self.rank):
            raise OptionError(f"the rank of adapters is {self.rank!r:.60}; it must be a whole number, 1 or more")
        if not isinstance(self.alpha, int | float) or not self.alpha > 0:
            raise OptionError(f"the alpha of adapters is {self.alpha!r:.60}; it must be a number above 0")
        targets: object = self.targets
        object.__setattr__(self, "targets", (targets,) if isinstance(targets, str) else tuple(self.targets))


@dataclass(frozen=True)
class Model:
    """Where a model comes from."""

    path: str
    """A Hugging Face model directory (config.json, tokenizer.json, *.safetensors), or a .gguf file, which is dequantised."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` needs only config.json and the tokenizer; the weights are drawn from `seed`."""
    seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    chat: bool = False
    """Put each prompt through the tokenizer's chat template, as a user's message."""
    head: Literal["lm", "value", "score"] = "lm"
    """What the model gives: the next token, a value of each token (a critic), or a score of the whole (a reward model)."""
    is_policy: bool = True
    """Whether the flow can generate from it. From a reference, a critic or a reward model it can't."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """What engines that sample hold the weights in, rounded from `dtype`; None: the same."""
    lora: Lora | None = None
    """Train these adapters; None: train all weights."""
    is_frozen: bool = False
    """Nothing in the flow ever changes its weights."""


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_new_tokens: int = 0
    """The end-of-sequence token can't be drawn before."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the tokenizer's end-of-sequence token."""

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if not isinstance(value, int | float):
                raise OptionError(f"{name} is {value!r:.60}; it must be a number")
        for name, value in (("top_k", self.top_k), ("min_new_tokens", self.min_new_tokens)):
            if not isinstance(value, int):
                raise OptionError(f"{name} is {value!r:.60}; it must be a whole number")
        if not is_count(self.max_new_tokens):
            raise OptionError(f"max_new_tokens is {self.max_new_tokens!r:.60}; it must be a whole number, 1 or more")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise OptionError(f"min_new_tokens is {self.min_new_tokens}; it must lie in 0..max_new_tokens ({self.max_new_tokens})")
        if self.temperature < 0:
            raise OptionError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.top_k < 0:
            raise OptionError(f"top_k is {self.top_k}; it must be 0 (off) or more")


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, a warm-up, and a schedule. Each distinct value that a flow uses has state of its own.

    Source:
        Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """The gradient's global 2-norm is scaled down to this. 0 is off."""
    warmup_steps: int = 0
    """Optimiser steps over which the rate rises linearly to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; `linear` and `cosine` fall to zero at `total_steps`."""
    total_steps: int = 0

    def __post_init__(self) -> None:
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise OptionError(
                f"schedule={self.schedule!r} needs total_steps above warmup_steps, got {self.total_steps} and {self.warmup_steps}"
            )


@dataclass(frozen=True)
class Counts:
    """What a mini-batch holds, all of it, however it was cut: what a loss's sum may be divided by."""

    num_tokens: int
    """Under the loss mask."""
    num_sequences: int
    num_groups: int
    """Prompts that the sequences answer."""


HEAD_OUTPUTS = {"lm": frozenset({"logprobs", "entropy"}), "value": frozenset({"values"})}
"""Head of a model that is trained -> what it gives a loss, with gradient."""

COMPUTED = frozenset({"sequence_lengths", "behaviour_logprobs"}).union(*HEAD_OUTPUTS.values())
"""What a loss may need and an engine has by itself, on samples with behaviour log-probabilities; anything else is a column."""


@dataclass(frozen=True)
class Loss:
    """A loss, as declared: what it needs, and what its sum is divided by.

    The function gets each of `needs` as a keyword: a flat tensor [T] over the tokens that the loss mask selects, samples one
    after the other in a micro-batch, and returns per-token terms [T], or those and a dict of per-token metrics [T]. Sums over
    tokens are gradients' sums; the division by the denominator of the whole mini-batch comes at its end.
    """

    name: str
    function: str | object
    """`module:name`, or a callable."""
    needs: tuple[str, ...]
    """Of `logprobs` (with gradient), `entropy` (with gradient), `values` (of a critic, with gradient), `behaviour_logprobs`,
    `reference_logprobs`, `advantages`, `sequence_lengths` (of the sample that the token belongs to), and the names of per-token or
    per-sample columns."""
    denominator: Literal["tokens", "sequences"] | Callable[[Counts], float] = "tokens"
    """What the sum over a mini-batch is divided by: a count, or a function of the counts of the whole mini-batch."""
    options: tuple[tuple[str, float | int | str | bool], ...] = field(default=())
    """Further keywords."""
