"""How long prompts and answers are: one distribution of groups, whatever it was made of.

    TRACE.jsonl | RUN_DIR | lognormal:... | mixture:...  --parse_lengths-->  Lengths  --draw-->  int64 [P, G]

A draw is a pure function of (seed, step, position of the group, index in the group): asking for more groups or members changes none.
Answers are cut at `cap`; such a length is a lower limit of what the model would have said, and `survival` treats it as one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError

IntArray = npt.NDArray[np.int64]

TRACES = Path(__file__).parent / "traces"
"""Lengths of two public runs. Source: PolyTrace, github.com/Zhou-jiecheng/PolyTrace at 4246156, arXiv 2509.25279."""

MOST_TOKENS = 2**31 - 1
"""Of a prompt or an answer."""
_PROMPTS_STREAM = 11


@dataclass(frozen=True)
class Correlation:
    """How alike the answers to one prompt are: the intraclass correlation of log length, with its 95% interval."""

    icc: float
    low: float
    high: float
    num_groups: int


@dataclass(frozen=True, eq=False)
class StepLengths:
    """The samples of one step. Groups may differ in size."""

    prompts: IntArray
    """[P], tokens."""
    responses: IntArray
    """[N], tokens, group after group."""
    groups: IntArray
    """[N], the position of each sample's prompt, ascending."""
    step: int = 0
    """Which step of the run it is."""

    @classmethod
    def of(cls, prompts: npt.ArrayLike, responses: Sequence[npt.ArrayLike] | npt.ArrayLike, *, step: int = 0) -> StepLengths:
        """From a row of lengths for each prompt.

        >>> StepLengths.of([5, 7], [[10, 20], [30]]).groups.tolist()
        [0, 0, 1]
        """
        rows = [np.asarray(row, np.int64) for row in responses]  # type: ignore[union-attr]  # an array of rows is one, too
        flat = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        return cls(np.asarray(prompts, np.int64), flat, np.repeat(np.arange(len(rows)), [len(row) for row in rows]), step)

    def __len__(self) -> int:
        return len(self.responses)


class Lengths(ABC):
    """A distribution of lengths in groups."""

    name: str
    """What it was made of, in a line."""
    cap: int | None
    """Tokens at which an answer is cut; None: not known to be."""

    @abstractmethod
    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> IntArray:
        """Lengths of answers, int64 [P, G], each at least 1."""

    @abstractmethod
    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> IntArray:
        """Lengths of the prompts of the same groups, int64 [P]; n as it was for `draw`."""

    @abstractmethod
    def mean(self) -> float:
        """Tokens of an answer, cut ones as they are."""

    @abstractmethod
    def survival(self, tokens: float) -> float:
        """The probability that an answer is longer than this; what is cut counts as longer than the cap is known."""

    @abstractmethod
    def beyond(self, tokens: float) -> float:
        """E[L | L > tokens], the expected length of an answer that has grown so far; `tokens` itself where nothing is longer."""

    @abstractmethod
    def quantile(self, q: float) -> float:
        """The least length that a share q of the answers does not exceed, cut ones as they are."""

    @abstractmethod
    def correlation(self) -> Correlation:
        """Of log length in a group: measured if there are groups to measure, as declared otherwise."""

    @abstractmethod
    def cut_at(self, tokens: int) -> Lengths:
        """The same, of which no answer is longer than this."""

    @property
    def longest(self) -> int | None:
        """Tokens that no answer exceeds; None: it may have any number."""
        return self.cap

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that is known of."""
        return 0

    def num_steps(self) -> int | None:
        """How many steps were recorded; None: any number can be drawn."""
        return None

    def step(self, index: int, *, num_groups: int, n: int, seed: int) -> StepLengths:
        """The samples of a step: the recorded one where there is a record, otherwise a draw of `num_groups` x `n`."""
        return StepLengths.of(self.draw_prompts(num_groups, seed, step=index, n=n), self.draw(num_groups, n, seed, step=index), step=index)


def parse_lengths(text: str) -> Lengths:
    """From what a command line says.

        FILE.jsonl                      a trace: {"step": 0, "prompt_tokens": 112, "response_tokens": [450, 453]} in each line
        dapo-qwen2.5-32b                a trace that comes with m2flow, by name
        runs/grpo-20260102-030405       what an earlier run generated
        lognormal:median=4000,sigma=0.8,cap=32768,icc=0.3,prompt=512      (mean= in the place of median=)
        mixture:weights=0.7/0.3,median=400/6000,sigma=0.5/0.6,cap=32768

    A trace or a run with `,cap=8192` behind it is cut there.

    Raises:
        SpecError: there is nothing of that name, or it is wrong; with the line.
    """
    from m2flow.micro.rollouts import parametric

    kind, colon, options = text.partition(":")
    if colon and kind in parametric.KINDS:
        return parametric.parse(kind, options)
    found = _recorded(text)
    if found is not None:
        return found
    base, _, cap = text.rpartition(",cap=")
    found = _recorded(base) if base and cap.isdecimal() and int(cap) else None
    if found is not None:
        return found.cut_at(int(cap))
    kinds, shipped = ", ".join(f"{kind}:..." for kind in parametric.KINDS), ", ".join(sorted(path.stem for path in TRACES.glob("*.jsonl")))
    raise SpecError(
        f"no lengths {text!r}: neither a file, nor a run, nor a distribution",
        now=f"Give a trace (JSON lines), a run directory, {kinds}, or one of {shipped}.",
    )


def _recorded(text: str) -> Lengths | None:
    """Of a run, a file or a trace that comes with m2flow."""
    from m2flow.micro.rollouts import measured

    path = Path(text)
    if (path / "ledger.db").is_file():
        return measured.from_run(path)
    if path.is_file():
        return measured.read_trace(path)
    shipped = {found.stem: found for found in sorted(TRACES.glob("*.jsonl"))}
    return measured.read_trace(shipped[text]) if text in shipped else None
