"""A task that generates, the samples that a rollout engine of this process has for it, and their rows when they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from m2flow.engines.contract import Generated
from m2flow.macro.graph import Call
from m2flow.micro import messages as m
from m2flow.micro.work import performing
from m2flow.samples import Batch


@dataclass
class Generation:
    """A generate task under way."""

    task: m.Generate
    num_left: int


@dataclass(frozen=True)
class Growing:
    """A sample that an engine has."""

    call: Call
    """The one that it is generated for."""
    drawn: Call
    """The one whose sample it is."""
    prompts: Batch
    row: int
    """Of its prompt in `prompts`."""
    seed: int
    start_ns: int
    had: int
    """Tokens that it came with."""
    waited_us: int
    """Before it came."""


def rows_of(generated: Sequence[Generated], growing: Sequence[Growing]) -> Batch:
    """The rows of samples, finished or not."""
    prompts = Batch.concat([g.prompts.take([g.row]) for g in growing])
    seeds = {g.id: s.seed for g, s in zip(generated, growing, strict=True)}
    return performing.responses([g.drawn for g in growing], generated, prompts, seeds)
