"""What a step of a flow asks of the machines: its calls with their sizes, as the search and the simulator see them.

    MacroGraph, lengths --workload_of--> Workload --> search

A call on handles alone (`rewards - beta * kl`) costs next to nothing and is not here; what depends on it depends on what it is made of.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from m2flow.micro.costs.terms import EngineId

Work = Literal["generate", "forward", "update", "function"]


class CallLoad(msgspec.Struct, frozen=True):
    """One call of the step."""

    name: str
    """Unique in the step: `policy.generate`, or `policy.generate@31` (the line) where there are several."""
    work: Work
    engine: EngineId | None
    """None for functions, which need no device."""
    num_prompts: int
    num_per_prompt: int
    unit: Literal["sample", "group", "minibatch", "batch"]
    """The smallest set that it may be run on; an update adds up groups."""
    is_barrier: bool
    """It starts when all of its input is there."""
    after: tuple[str, ...]
    """Calls whose result it needs, by data or effect, in this step."""
    num_epochs: int = 1
    num_optimizer_steps: int = 0
    """Of an update: mini-batches times epochs."""
    token_budget: int = 0
    """Tokens of a micro-batch."""

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.num_per_prompt


class Workload(msgspec.Struct, frozen=True):
    """A step: its calls in program order, which is a topological order."""

    flow: str
    calls: tuple[CallLoad, ...]
    staleness: int = 0

    def call(self, name: str) -> CallLoad:
        return next(call for call in self.calls if call.name == name)

    @property
    def engines(self) -> tuple[EngineId, ...]:
        """In the order of their first call."""
        return tuple(dict.fromkeys(call.engine for call in self.calls if call.engine is not None))
