"""Lengths as they were: of a trace, or of an earlier run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from m2flow.errors import SpecError
from m2flow.micro.record.ledger import read_lengths
from m2flow.micro.rollouts.correlation import icc
from m2flow.micro.rollouts.identity import uniforms
from m2flow.micro.rollouts.lengths import MOST_TOKENS, Correlation, IntArray, Lengths, StepLengths
from m2flow.micro.rollouts.survival import kaplan_meier

_WHICH_GROUP, _WHICH_MEMBER = 1, 2
_KEYS = {"step", "prompt_tokens", "response_tokens"}


class Measured(Lengths):
    """Recorded groups. `step` gives a recorded step as it was; `draw` picks recorded groups, so it keeps how alike their members are.

    A group of more than n members gives n of them without repetition. Smaller ones are of other calls (an evaluation asks once): only
    where there are no others are they drawn, and some of their members come again.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[int],
        prompts: Sequence[int],
        groups: Sequence[IntArray],
        *,
        cut: Sequence[np.typing.NDArray[np.bool_]],
        cap: int | None,
    ) -> None:
        self.name = name
        self.cap = cap
        self._prompts = np.asarray(prompts, np.int64)
        self._groups = list(groups)
        self._steps: dict[int, list[int]] = {}
        for position, step in enumerate(steps):
            self._steps.setdefault(step, []).append(position)
        self._order = sorted(self._steps)
        self._sizes = np.array([len(group) for group in self._groups], np.int64)
        self._all = np.sort(np.concatenate(self._groups))
        self._curve = kaplan_meier(np.concatenate(self._groups), np.concatenate(list(cut)))
        self._cut = list(cut)
        self._num_cut = int(sum(int(flags.sum()) for flags in cut))

    def cut_at(self, tokens: int) -> Measured:
        steps = {position: step for step, positions in self._steps.items() for position in positions}
        cut = [flags | (group >= tokens) for group, flags in zip(self._groups, self._cut, strict=True)]
        groups = [np.minimum(group, tokens) for group in self._groups]
        cap = tokens if self.cap is None else min(tokens, self.cap)
        return Measured(
            f"{self.name} cut at {tokens}", [steps[i] for i in range(len(groups))], self._prompts.tolist(), groups, cut=cut, cap=cap
        )

    @property
    def longest(self) -> int:
        return int(self._all[-1])

    @property
    def longest_prompt(self) -> int:
        return int(self._prompts.max())

    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> IntArray:
        drawn = np.empty((num_groups, n), np.int64)
        keys = uniforms(seed, _WHICH_MEMBER, step, num_groups, n)
        for position, which in enumerate(self._which(num_groups, n, seed, step)):
            left = self._groups[which].tolist()
            for index in range(n):
                drawn[position, index] = left.pop(int(keys[position, index] * len(left)))
                left = left or self._groups[which].tolist()
        return drawn

    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> IntArray:
        return self._prompts[self._which(num_groups, n, seed, step)]

    def mean(self) -> float:
        return float(self._all.mean())

    def survival(self, tokens: float) -> float:
        return self._curve.survival(tokens)

    def beyond(self, tokens: float) -> float:
        return self._curve.beyond(tokens)

    def quantile(self, q: float) -> float:
        return float(np.quantile(self._all, q, method="inverted_cdf"))

    def correlation(self) -> Correlation:
        """Of the steps together, each step's mean taken off, so that a policy whose answers grow does not look like groups."""
        rows = []
        for positions in self._steps.values():
            logs = [np.log(self._groups[position]) for position in positions]
            centre = float(np.concatenate(logs).mean())
            rows += [log - centre for log in logs]
        return icc(rows)

    def num_steps(self) -> int:
        return len(self._order)

    @property
    def num_cut(self) -> int:
        """How many answers were cut."""
        return self._num_cut

    def step(self, index: int, *, num_groups: int = 0, n: int = 0, seed: int = 0) -> StepLengths:
        """The recorded step at this position, from 0.

        Raises:
            SpecError: there are fewer.
        """
        if not 0 <= index < len(self._order):
            raise SpecError(f"{self.name} has {len(self._order)} steps, not {index + 1}", now="Ask for fewer with --steps.")
        step = self._order[index]
        positions = self._steps[step]
        return StepLengths.of(self._prompts[positions], [self._groups[position] for position in positions], step=step)

    def _which(self, num_groups: int, n: int, seed: int, step: int) -> IntArray:
        large = np.flatnonzero(self._sizes >= n)
        known = large if len(large) else np.arange(len(self._sizes))
        return known[(uniforms(seed, _WHICH_GROUP, step, num_groups, 1)[:, 0] * len(known)).astype(np.int64)]


def read_trace(path: Path, cap: int | None = None) -> Measured:
    """A file of JSON lines, a prompt group in each: `{"step": int, "prompt_tokens": int, "response_tokens": [int, ...]}`.

    Args:
        cap: the run's limit; lengths at it were cut. By default the longest length, if more than one answer has it.
    Raises:
        SpecError: a line that is not such a group, by its number; or no line at all.
    """
    steps, prompts, groups = [], [], []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"can't read the trace: {error}", where=str(path), now="Give a file of JSON lines.") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            step, prompt, responses = _group_of(line, f"{path}:{number}")
            steps.append(step)
            prompts.append(prompt)
            groups.append(np.array(responses, np.int64))
    if not groups:
        raise SpecError("the trace has no line", where=str(path), now="Give a file with a group in each line.")
    if cap is None:
        longest, times = max(Counter(np.concatenate(groups).tolist()).items())
        cap = longest if times > 1 else None
    cut = [group >= cap if cap is not None else np.zeros(len(group), bool) for group in groups]
    return Measured(path.stem, steps, prompts, groups, cut=cut, cap=cap)


def from_run(run_dir: Path) -> Measured:
    """All that a run generated, filtered and over-sampled answers too; what was aborted or hit the limit counts as cut.

    Raises:
        SpecError: it has no ledger, or no sample.
    """
    rows: dict[tuple[int, int], list[tuple[int, int, int, bool]]] = {}
    for call, prompt, step, num_prompt, num_generated, is_cut in read_lengths(run_dir):
        rows.setdefault((call, prompt), []).append((step, num_prompt, max(num_generated, 1), is_cut))
    if not rows:
        raise SpecError(f"the run {run_dir} generated nothing", now="Give a run that has made at least one step.")
    groups = [np.array([row[2] for row in group], np.int64) for group in rows.values()]
    cut = [np.array([row[3] for row in group], bool) for group in rows.values()]
    caps = [int(group[flags].max()) for group, flags in zip(groups, cut, strict=True) if flags.any()]
    return Measured(
        run_dir.name,
        [group[0][0] for group in rows.values()],
        [group[0][1] for group in rows.values()],
        groups,
        cut=cut,
        cap=max(caps, default=None),
    )


def _group_of(line: str, where: str) -> tuple[int, int, list[int]]:
    now = 'Each line is {"step": 0, "prompt_tokens": 112, "response_tokens": [450, 453]}.'
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecError(f"not JSON: {error.msg} at column {error.colno}", where=where, now=now) from None
    except (ValueError, RecursionError) as error:  # A number of thousands of digits; lists in lists in lists.
        raise SpecError(f"not a prompt group: {error}", where=where, now=now) from None
    if not isinstance(record, dict) or set(record) != _KEYS:
        wrong = sorted(set(record) ^ _KEYS) if isinstance(record, dict) else [type(record).__name__]
        raise SpecError(f"not a prompt group: {', '.join(wrong)} missing or unknown", where=where, now=now)
    step, prompt, responses = record["step"], record["prompt_tokens"], record["response_tokens"]
    if type(step) is not int or step < 0:
        raise SpecError(f"step is {step!r}, not a number from 0", where=where, now=now)
    if type(prompt) is not int or not 0 <= prompt <= MOST_TOKENS:
        raise SpecError(f"prompt_tokens is {prompt!r}, not a number of tokens", where=where, now=now)
    is_list = isinstance(responses, list) and bool(responses)
    if not is_list or not all(type(tokens) is int and 0 < tokens <= MOST_TOKENS for tokens in responses):
        raise SpecError("response_tokens is not a list of one or more positive whole numbers", where=where, now=now)
    return step, prompt, responses
