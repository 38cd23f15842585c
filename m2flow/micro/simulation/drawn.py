"""How long each sample of a simulated run is: a pure function of the seed and of who it is, never of when or where it runs.

The first generation of the program's k-th step whose groups fit the k-th step of the record (as many, of the same size) has the lengths of
that one; groups of others, as of an evaluation before it, are drawn from the distribution. Each call stops at its own
`max_new_tokens`; of lengths beyond every call's, which were not made to agree with the flow, only a model that is not trained (a judge).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from m2flow.macro.graph import Call
from m2flow.micro.rollouts.lengths import IntArray, Lengths
from m2flow.micro.simulation.rounds import Rounds
from m2flow.recipe import Sampling
from m2flow.samples import SampleId, keyed_bits


@final
class Drawn:
    """Answers for every sample of a run."""

    def __init__(
        self,
        lengths: Lengths,
        seed: int,
        *,
        kept: Mapping[str, float] | None = None,
        trained: frozenset[str] = frozenset(),
        limit: int = 0,
    ) -> None:
        """`trained`: roles. `limit`: the largest `max_new_tokens` of all calls."""
        self._lengths = lengths
        self._trained = trained
        self._stops = not trained or (lengths.longest is not None and lengths.longest <= limit)
        self._seed = seed
        self._kept = kept or {}
        self._rounds = Rounds()
        self._by_call: dict[int, tuple[IntArray, IntArray]] = {}
        self._num_of_step: dict[int, int] = {}
        self._replayed: set[int] = set()
        self.num_drawn = 0

    def made(self, call: Call, calls: Mapping[int, Call]) -> None:
        """A call of the program, in program order."""
        self._rounds.made(call)
        asked = call.input("prompts") if call.engine == "rollout" else None
        if asked is not None:
            self.add(call, calls[asked.call].most_rows)

    def add(self, call: Call, num_prompts: int) -> None:
        """A generate call of the program, in program order."""
        n = call.options["n"]
        assert isinstance(n, int)
        number = self._num_of_step[call.step] = self._num_of_step.get(call.step, -1) + 1
        prompts, responses = self._draw(call.step, number, num_prompts, n)
        sampling = call.options.get("sampling")
        if isinstance(sampling, Sampling) and (self._stops or call.role not in self._trained):
            responses = np.minimum(responses, sampling.max_new_tokens)
        self._by_call[call.ordinal] = prompts, responses

    def response_tokens(self, packed: int) -> int:
        """Tokens that a sample generates in all."""
        who = self._rounds.origin(packed)
        return int(self._by_call[who.call][1][who.prompt, who.index])

    def prompt_tokens(self, packed: int) -> int:
        who = self._rounds.origin(packed)
        return int(self._by_call[who.call][0][who.prompt])

    @property
    def num_replayed(self) -> int:
        """Steps that have a generation with the lengths of a recorded step."""
        return len(self._replayed)

    @property
    def mean_tokens(self) -> float:
        """Of a sample, its prompt included, over the generate calls so far."""
        means = [float(prompts.mean() + responses.mean()) for prompts, responses in self._by_call.values() if responses.size]
        return sum(means) / max(len(means), 1)

    def is_drawn(self, packed: int) -> bool:
        """Whether this is a sample, and no row of a dataset."""
        return SampleId.unpack(packed).call in self._by_call

    def uniform(self, *words: object) -> float:
        """A number in [0, 1) that belongs to these words."""
        return keyed_bits(self._seed, *words) / 2**64

    def came_to(self, call: Call, ids: Sequence[int]) -> None:
        """A call that gives one value has seen these samples."""
        self._rounds.came_to(call, ids)

    def left(self, call: Call, units: Sequence[Sequence[int]]) -> list[int]:
        """The rows that a call leaves, of these: by who they are, where that decides; else by the share that was assumed."""
        known = self._rounds.left(call, [row for unit in units for row in unit])
        return [row for unit in units if self.is_kept(call, unit) for row in unit] if known is None else known

    def is_kept(self, call: Call, unit: Sequence[int]) -> bool:
        """Whether a filter or a refill keeps this unit: the share that was assumed for it, by default all."""
        share = self._kept.get(call.role, self._kept.get(call.name, 1.0))
        return self.uniform("kept", call.role, min(unit, default=0)) < share

    def forget(self, call: int) -> None:
        self._by_call.pop(call, None)

    def _draw(self, step: int, number: int, num_prompts: int, n: int) -> tuple[IntArray, IntArray]:
        recorded = self._lengths.num_steps()
        if recorded and step >= 0 and step not in self._replayed:
            found = self._lengths.step(step % recorded, num_groups=num_prompts, n=n, seed=self._seed)
            if len(found.prompts) == num_prompts and len(found) == num_prompts * n and (np.bincount(found.groups) == n).all():
                self._replayed.add(step)
                return found.prompts, found.responses.reshape(num_prompts, n)
        self.num_drawn += 1
        step, number = (step, number) if step >= 0 else (0, number + 1)  # What comes before the first step.
        seed = self._seed if number == 0 else keyed_bits(self._seed, number) >> 1
        return self._lengths.draw_prompts(num_prompts, seed, step=step, n=n), self._lengths.draw(num_prompts, n, seed, step=step)
