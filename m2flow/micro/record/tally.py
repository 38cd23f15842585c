"""Counts of a run for people: what the display and the summary show."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Apart:
    """Updates in which trainer and rollout judged tokens too differently."""

    num_updates: int
    step: int
    """Of the worst one."""
    mean: float
    """Its mean absolute difference of log-probabilities, in nats."""


@dataclass
class Tally:
    """Counts of the run so far. Written by one thread, read by others."""

    num_steps: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    """Generated tokens."""
    steps_before: int = 0
    """Of these, those that were there when the run was taken up again, as are `samples_before` and `tokens_before`."""
    samples_before: int = 0
    tokens_before: int = 0
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each update, in order."""
    logs: dict[str, float] = field(default_factory=dict)
    """The last value of each logged name."""
    example: tuple[str, str] = ("", "")
    """A recent prompt and its response."""
    apart: Apart | None = None
    """None: there was no such update."""
