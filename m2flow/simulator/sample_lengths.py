"""Determine the length of every sample of a simulated run, as a pure function of the seed and its identity, never of when or where it runs.

The simulator computes no values, so functions that say which samples were late are followed by their inputs: the samples of a short round's
result, the prompts without those, slices and unions of such prompts. It is assumed that a prompt's responses are as long when it is asked
again, since that is why prompts are deferred at all.

With recorded lengths, the first generation of the program's k-th step whose groups fit the k-th recorded step (as many, of the same size)
has the lengths of that one; all other groups, as of an evaluation, are drawn from the distribution. A sample has at least its call's
`min_new_tokens`. Each call truncates at its own `max_new_tokens`; but if lengths exceed the limit of every call (they were not made to
agree with the flow), only calls of models that are not trained (a judge) truncate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import msgspec
import numpy as np

from m2flow.macro.columns import Positions
from m2flow.macro.graph import Call
from m2flow.macro.tail_batching import Answered, Unanswered
from m2flow.micro.protocol.cost_terms import EpisodeCosts, EpisodeTurn
from m2flow.recipe import Sampling
from m2flow.rollout_scheduling.lengths import IntArray, Lengths
from m2flow.samples import SampleId, keyed_bits


@final
class Rounds:
    """Follows deferred prompts: which were answered in a short round, and which wait for a long one."""

    def __init__(self) -> None:
        self._short: dict[int, int] = {}
        """Call that drew the prompts -> the short round that they were drawn for."""
        self._prompts: dict[int, int] = {}
        """Long round -> the call that gives its prompts."""
        self._parts: dict[int, tuple[int, ...]] = {}
        """Union -> its inputs."""
        self._left: dict[int, tuple[int, ...]] = {}
        """Call that decides which rows stay -> these rows."""
        self._answered: dict[int, frozenset[int]] = {}
        self._asked: dict[int, list[int]] = {}
        """Long round -> the rows of its prompts, in its order."""

    def made(self, call: Call) -> None:
        """Note a call of the program."""
        asked = call.input("prompts")
        if call.options.get("late") == "defer" and asked is not None:
            self._short[asked.call] = call.ordinal
        elif call.options.get("is_long") and asked is not None:
            self._prompts[call.ordinal] = asked.call
        elif call.options.get("gives") == "concat":
            self._parts[call.ordinal] = tuple(ref.call for _, ref in call.inputs)

    def came_to(self, call: Call, ids: Sequence[int]) -> None:
        """Note the samples that a call with a single value has seen."""
        if isinstance(call.options.get("function"), Answered):
            self._answered[call.ordinal] = frozenset(SampleId.unpack(row).prompt for row in ids)

    def left(self, call: Call, ids: Sequence[int]) -> list[int] | None:
        """The rows that stay; None if their identities don't determine that."""
        function, table = call.options.get("function"), call.input("answered")
        if isinstance(function, Positions):
            found = sorted(ids)[slice(function.start, function.stop, function.step)]
        elif isinstance(function, Unanswered) and table is not None:
            found = [row for row in ids if SampleId.unpack(row).prompt not in self._answered[table.call]]
        else:
            return None
        self._left[call.ordinal] = tuple(found)
        return found

    def origin(self, packed: int) -> SampleId:
        """The sample of a short round whose length this sample has; itself, if it is in no long round."""
        who = SampleId.unpack(packed)
        if who.call not in self._prompts:
            return who
        if who.call not in self._asked:
            self._asked[who.call] = sorted(self._rows(self._prompts[who.call]))
        asked = SampleId.unpack(self._asked[who.call][who.prompt])
        return SampleId(self._short[asked.call], asked.prompt, who.index)

    def _rows(self, call: int) -> Sequence[int]:
        if call in self._parts:
            return [row for part in self._parts[call] for row in self._rows(part)]
        return self._left[call]


@final
class Drawn:
    """The lengths of all samples of a run, and all other values that it draws."""

    def __init__(
        self,
        lengths: Lengths,
        seed: int,
        *,
        kept: Mapping[str, float] | None = None,
        draws_per_group: float = 1.0,
        trained: frozenset[str] = frozenset(),
        limit: int = 0,
        episodes: EpisodeCosts = EpisodeCosts(),  # noqa: B008
    ) -> None:
        """
        Args:
            episodes: those that samples of agents are like.
            kept: share of units that a filter or a refill keeps, by role or call name; by default a filter keeps all.
            draws_per_group: how many groups a refill judges for each that it keeps, where `kept` says nothing.
            trained: roles that the program trains.
            limit: the largest `max_new_tokens` of all calls.
        """
        self._lengths = lengths
        self._trained = trained
        self._stops = not trained or (lengths.longest is not None and lengths.longest <= limit)
        self._seed = seed
        self._kept = kept or {}
        self._share_of_refills = 1.0 / draws_per_group
        self._episodes = episodes.episodes
        self._totals = np.array([sum(turn.num_tokens for turn in one) for one in episodes.episodes], np.int64)
        self._rounds = Rounds()
        self._by_call: dict[int, tuple[IntArray, IntArray]] = {}
        self._mean_tokens: dict[int, float] = {}
        """By call; 0 of one without samples."""
        self._num_of_step: dict[int, int] = {}
        self._replayed: set[int] = set()
        self.num_drawn = 0

    def made(self, call: Call, calls: Mapping[int, Call]) -> None:
        """Note a call of the program, in program order."""
        self._rounds.made(call)
        asked = call.input("prompts") if call.engine == "rollout" else None
        if asked is not None:
            self.add(call, calls[asked.call].most_rows)

    def add(self, call: Call, num_prompts: int) -> None:
        """Draw the lengths of a generate call, in program order."""
        n = call.options["n"]
        assert isinstance(n, int)
        number = self._num_of_step[call.step] = self._num_of_step.get(call.step, -1) + 1
        prompts, responses = self._draw(call.step, number, num_prompts, n)
        sampling = call.options.get("sampling")
        if isinstance(sampling, Sampling):
            responses = np.maximum(responses, sampling.max_new_tokens if sampling.ignore_eos else sampling.min_new_tokens)
            if self._stops or call.role not in self._trained:
                responses = np.minimum(responses, sampling.max_new_tokens)
        self._by_call[call.ordinal] = prompts, responses
        self._mean_tokens[call.ordinal] = float(prompts.mean() + responses.mean()) if responses.size else 0.0

    def response_tokens(self, packed: int) -> int:
        """Tokens that a sample generates in all."""
        who = self._rounds.origin(packed)
        return int(self._by_call[who.call][1][who.prompt, who.index])

    def turns(self, packed: int, had: int) -> tuple[EpisodeTurn, ...]:
        """The turns of an episode that has so many tokens already: those of a recorded one of about as many, stretched to as many."""
        if not self._episodes:
            return ()
        num_tokens = self.response_tokens(packed)
        apart = np.abs(self._totals - num_tokens)
        alike = np.flatnonzero(apart == apart.min())
        found = self._episodes[int(alike[int(self.uniform("episode", packed) * len(alike))])]
        left, gone, turns = num_tokens, had, list[EpisodeTurn]()
        last = max((at for at, turn in enumerate(found) if turn.num_tokens), default=len(found) - 1)
        for at, turn in enumerate(found):
            own = left if at == last else min(turn.num_tokens, left)
            left -= own
            if gone < own or (gone == own and not had):
                turns.append(msgspec.structs.replace(turn, num_tokens=own - gone, prefill_tokens=turn.prefill_tokens + gone))
            gone = max(gone - own, 0)
        return tuple(turns)

    def prompt_tokens(self, packed: int) -> int:
        who = self._rounds.origin(packed)
        return int(self._by_call[who.call][0][who.prompt])

    @property
    def num_replayed(self) -> int:
        """Steps that have a generation with recorded lengths."""
        return len(self._replayed)

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a sample, its prompt included, over the generate calls so far."""
        means = [mean for mean in self._mean_tokens.values() if mean]
        return sum(means) / max(len(means), 1)

    def is_drawn(self, packed: int) -> bool:
        """Whether this is a sample, and no row of a dataset."""
        return SampleId.unpack(packed).call in self._by_call

    def uniform(self, *words: object) -> float:
        """A uniform number in [0, 1), a hash of the seed and these words."""
        return keyed_bits(self._seed, *words) / 2**64

    def came_to(self, call: Call, ids: Sequence[int]) -> None:
        """Note the samples that a call with a single value has seen."""
        self._rounds.came_to(call, ids)

    def left(self, call: Call, units: Sequence[Sequence[int]]) -> list[int]:
        """The rows that a call keeps: by their identities, where these determine it; else by the assumed share."""
        known = self._rounds.left(call, [row for unit in units for row in unit])
        return [row for unit in units if self.is_kept(call, unit) for row in unit] if known is None else known

    def is_kept(self, call: Call, unit: Sequence[int]) -> bool:
        """Whether a filter or a refill keeps this unit, by the assumed share."""
        share = self._kept.get(call.role, self._kept.get(call.name, self._share_of_refills if call.is_gated else 1.0))
        return self.uniform("kept", call.role, min(unit, default=0)) < share

    def forget(self, call: int) -> None:
        self._by_call.pop(call, None)
        self._mean_tokens.pop(call, None)

    @property
    def has_episodes(self) -> bool:
        """Whether samples of agents are drawn as episodes of several turns."""
        return bool(self._episodes)

    def _draw(self, step: int, number: int, num_prompts: int, n: int) -> tuple[IntArray, IntArray]:
        recorded = self._lengths.num_steps()
        if recorded and step >= 0 and step not in self._replayed:
            found = self._lengths.step(step % recorded, num_groups=num_prompts, n=n, seed=self._seed)
            if len(found.prompts) == num_prompts and len(found) == num_prompts * n and (np.bincount(found.groups) == n).all():
                self._replayed.add(step)
                return found.prompts, found.responses.reshape(num_prompts, n)
        self.num_drawn += 1
        step, number = (step, number) if step >= 0 else (0, number + 1)  # Generations before the first step.
        seed = self._seed if number == 0 else keyed_bits(self._seed, number) >> 1
        return self._lengths.draw_prompts(num_prompts, seed, step=step, n=n), self._lengths.draw(num_prompts, n, seed, step=step)
