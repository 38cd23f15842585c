"""How long samples are, as far as mean costs need to know it: a few numbers of a distribution of lengths.

    Workload, Lengths or sampling limits --extents_of--> Extent a role --> decode cost at the mean context, bytes of a sample's cache

Lengths that are given are those of the models that the step trains; other models (a judge) are taken to use what they are allowed to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m2flow.micro.costs.shapes import ModelShape
from m2flow.micro.rollouts.lengths import Lengths
from m2flow.micro.search.workload import CallLoad, Workload

_BYTES_PER_TOKEN = 4.0
"""Of a text, for vocabularies of ten thousands of tokens: what byte-pair encodings come to on English."""
_SMALL_VOCABULARY = 1000
"""Below it, a token is a byte."""
_NUM_DRAWN = 4096
"""Samples that a distribution's means are taken of, at least."""


@dataclass(frozen=True)
class Extent:
    """Tokens of the samples of a role."""

    prompt: float
    """Mean."""
    response: float
    """Mean."""
    position: float
    """Mean over generated tokens of how many the response had before: half of the mean length where all are equally long, and more
    where they are not, since long responses have more of the tokens."""
    longest: int
    """Of prompt and response together, at most."""

    @property
    def context(self) -> float:
        """Tokens in the cache of a sample, when one more is generated: mean over the generated tokens."""
        return self.prompt + self.position

    @property
    def sample(self) -> float:
        """Tokens of a whole sample: mean."""
        return self.prompt + self.response

    @classmethod
    def of(cls, responses: Sequence[int] | npt.NDArray[np.int64], *, prompt: float = 0.0, longest: int = 0) -> Extent:
        """Of responses that were seen.

        >>> Extent.of([1, 3])
        Extent(prompt=0.0, response=2.0, position=0.75, longest=3)
        """
        lengths = np.asarray(responses, dtype=np.float64)
        total = float(lengths.sum())
        position = float((lengths * (lengths - 1) / 2).sum()) / total if total else 0.0
        return cls(prompt, total / max(len(lengths), 1), position, max(longest, int(prompt + lengths.max(initial=0.0))))

    @classmethod
    def up_to(cls, max_new_tokens: int, *, prompt: float = 0.0) -> Extent:
        """Nothing is known but the limit: half of it on average, and the squares of lengths uniform up to it."""
        return cls(prompt, max_new_tokens / 2, max_new_tokens / 3, int(prompt) + max_new_tokens)


def extents_of(workload: Workload, shapes: Mapping[str, ModelShape], lengths: Lengths | None = None, *, seed: int = 0) -> dict[str, Extent]:
    """The lengths of each role's samples: of those that it generates, else of those that it is asked about.

    Args:
        lengths: of the responses of models that the step trains; None: uniform up to each call's limit.
    """
    trained = {call.engine.role for call in workload.calls if call.work == "update" and call.engine is not None}
    by_call: dict[str, Extent] = {}
    of_role: dict[str, Extent] = {}
    for call in workload.calls:
        if call.engine is None:
            continue
        role = call.engine.role
        if call.work == "generate":
            has_lengths = lengths is not None and (role in trained or not trained)
            found = _drawn(call, lengths, seed) if has_lengths and lengths is not None else _allowed(call, shapes.get(role))
            by_call[call.name] = found
            if role not in of_role or of_role[role].longest < found.longest:
                of_role[role] = found
        elif role not in of_role:
            origin = _origin(call, workload, by_call)
            if origin is not None:
                of_role[role] = origin
    longest = max(of_role.values(), key=lambda extent: extent.longest, default=Extent.up_to(1))
    return {"": longest, **of_role}


def _allowed(call: CallLoad, shape: ModelShape | None) -> Extent:
    each = 1.0 if shape is not None and shape.vocab < _SMALL_VOCABULARY else _BYTES_PER_TOKEN
    return Extent.up_to(call.max_new_tokens, prompt=call.prompt_bytes / each)


def _drawn(call: CallLoad, lengths: Lengths, seed: int) -> Extent:
    groups = max(call.num_prompts, -(-_NUM_DRAWN // call.num_per_prompt))
    limit = call.max_new_tokens or np.iinfo(np.int64).max
    responses = np.minimum(lengths.draw(groups, call.num_per_prompt, seed).ravel(), limit)
    prompts = lengths.draw_prompts(groups, seed, n=call.num_per_prompt)
    longest = int(prompts.max(initial=0)) + min(lengths.cap or int(responses.max(initial=1)), limit)
    return Extent.of(responses, prompt=float(prompts.mean()), longest=longest)


def _origin(call: CallLoad, workload: Workload, by_call: Mapping[str, Extent]) -> Extent | None:
    """Of the longest samples that it needs, directly or through others."""
    todo, seen = list(call.after), set(call.after)
    found: list[Extent] = []
    while todo:
        name = todo.pop()
        if name in by_call:
            found.append(by_call[name])
            continue
        further = [one for one in workload.call(name).after if one not in seen]
        seen.update(further)
        todo += further
    return max(found, key=lambda extent: extent.longest, default=None)
