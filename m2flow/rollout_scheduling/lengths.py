"""Describe lengths of prompts and responses in groups: parametric distributions, recorded traces, and statistics of both.

    TRACE.jsonl | RUN_DIR | lognormal:... | mixture:...  --parse_lengths-->  Lengths  --draw-->  int64 [P, G]

A draw is a pure function of (seed, step, position of the group, index in the group), so drawing more groups or more members changes none
of the others. The generator is counter-based: splitmix64's finaliser over these words, one after the other. Sources: Steele, Lea, Flood
2014, "Fast splittable pseudorandom number generators"; Salmon et al. 2011 for the idea.

Responses are truncated at `cap`. A truncated length is right-censored, a lower limit of what the model would have generated, and `survival`
treats it so: counting it as an end would bias every estimate short, and dropping it even more.

Members of a group are correlated through a Gaussian copula: log L is a rising function of z = sqrt(icc) z_group + sqrt(1 - icc) z_sample.
For one lognormal `icc` is the intraclass correlation of log length before truncation; for a mixture about that.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from m2flow.errors import SpecError, did_you_mean

FloatArray = npt.NDArray[np.float64]

# ---- random numbers by counter

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniforms(seed: int, stream: int, step: int, num_groups: int, num_members: int) -> FloatArray:
    """Draw uniform numbers in the open interval (0, 1).

    Args:
        seed: the run's seed.
        stream: the purpose; streams are independent of each other.
    Returns:
        float64 [P, G].
    """
    state = _mixed(np.uint64(seed & (1 << 64) - 1), np.uint64(stream))
    state = _mixed(state, np.uint64(step))
    state = _mixed(state, np.arange(num_groups, dtype=np.uint64)[:, None])
    state = _mixed(state, np.arange(num_members, dtype=np.uint64)[None, :])
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) / float(1 << 53)


def normals(seed: int, stream: int, step: int, num_groups: int, num_members: int) -> FloatArray:
    """Draw standard normal numbers, float64 [P, G]; uses the streams `stream` and `stream + 1`.

    Source: Box and Muller 1958.
    """
    radius = np.sqrt(-2.0 * np.log(uniforms(seed, stream, step, num_groups, num_members)))
    return np.asarray(radius * np.cos(2.0 * np.pi * uniforms(seed, stream + 1, step, num_groups, num_members)), np.float64)


def _mixed(state: np.uint64 | npt.NDArray[np.uint64], word: np.uint64 | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        bits = np.asarray((state ^ word) + _GOLDEN * (word + np.uint64(1)), np.uint64)
        bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
        bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
        return np.asarray(bits ^ (bits >> np.uint64(31)), np.uint64)


# ---- survival curves and correlation


@dataclass(frozen=True, eq=False)
class SurvivalCurve:
    """S(x) = P(L > x), a falling step function; constant beyond the last length seen, of which nothing is known."""

    times: FloatArray
    """[K], ascending: the lengths at which responses ended, and the longest seen."""
    values: FloatArray
    """[K], S at and after each time."""

    def survival(self, tokens: float) -> float:
        at = int(np.searchsorted(self.times, tokens, side="right")) - 1
        return 1.0 if at < 0 else float(self.values[at])

    def beyond(self, tokens: float) -> float:
        """E[min(L, longest seen) | L > tokens] = tokens + (integral of S from tokens on) / S(tokens).

        Truncated lengths count as the longest seen, so this is the least that the data allow. `tokens` itself where S is 0.
        """
        left = self.survival(tokens)
        if left <= 0 or tokens >= self.times[-1]:
            return float(tokens)
        at = int(np.searchsorted(self.times, tokens, side="right"))
        edges = np.concatenate([[tokens], self.times[at:]])
        heights = np.concatenate([[left], self.values[at:-1]])
        return float(tokens + (np.diff(edges) * heights).sum() / left)


def kaplan_meier(lengths: npt.ArrayLike, is_cut: npt.ArrayLike) -> SurvivalCurve:
    """Estimate a survival curve from censored lengths (product-limit estimate).

        S(x) = product over t <= x of (1 - ended at t / still there at t)

    Args:
        lengths: [N], at which each response ended or was truncated.
        is_cut: bool [N], whether it was truncated.
    Source:
        Kaplan and Meier 1958; a cut at t counts as after the ends at t.

    >>> kaplan_meier([1, 2, 2, 3], [False, False, True, False]).values.round(3).tolist()
    [0.75, 0.5, 0.0]
    """
    tokens = np.asarray(lengths, np.float64)
    cut = np.asarray(is_cut, bool)
    times, where = np.unique(tokens, return_inverse=True)
    ended = np.bincount(where, weights=~cut, minlength=len(times))
    all_at = np.bincount(where, minlength=len(times))
    there = all_at[::-1].cumsum()[::-1]
    return SurvivalCurve(times, np.cumprod(1.0 - ended / there))


_Z95 = 1.959964


def log_length_icc(groups: Sequence[npt.ArrayLike]) -> Correlation:
    """Estimate the intraclass correlation of log length in groups of lengths (see `icc`).

    Truncated lengths enter as they are, which hides differences beyond the cap.

    >>> log_length_icc([[10, 10, 10], [100, 100, 100], [1000, 1000, 1000]]).icc
    1.0
    """
    return icc([np.log(np.maximum(np.asarray(group, np.float64), 1.0)) for group in groups])


def icc(groups: Sequence[npt.ArrayLike]) -> Correlation:
    """Estimate the intraclass correlation by one-way analysis of variance.

        icc = (MSB - MSW) / (MSB + (k - 1) MSW),   k = (N - sum n_i^2 / N) / (P - 1)

    MSB and MSW are the mean squares between and within groups. Groups of one say nothing of it and are left out. With fewer than
    three groups: 0, between -1 and 1.

    The interval is Fisher's: z = ln((1 + (k - 1) icc) / (1 - icc)) / 2 is about normal with variance k / (2 (k - 1)(P - 2)). It
    assumes normal log lengths; heavy tails make the truth wider.

    Source:
        Donner and Koval 1980 for unequal groups; Fisher 1925, section 39, for the interval.
    """
    rows = [np.asarray(group, np.float64) for group in groups if np.size(group) > 1]
    num_groups = len(rows)
    if num_groups < 3:
        return Correlation(0.0, -1.0, 1.0, num_groups)
    sizes = np.array([len(row) for row in rows], np.float64)
    means = np.array([row.mean() for row in rows])
    num = sizes.sum()
    between = float((sizes * (means - (sizes * means).sum() / num) ** 2).sum()) / (num_groups - 1)
    within = float(sum(((row - mean) ** 2).sum() for row, mean in zip(rows, means, strict=True))) / (num - num_groups)
    k = float((num - (sizes**2).sum() / num) / (num_groups - 1))
    whole = between + (k - 1) * within
    found = (between - within) / whole if whole > 0 else 0.0
    if found >= 1.0:
        return Correlation(1.0, 1.0, 1.0, num_groups)
    z = 0.5 * math.log(max(1.0 + (k - 1) * found, 1e-12) / (1.0 - found))
    spread = _Z95 * math.sqrt(k / (2.0 * (k - 1) * (num_groups - 2)))
    low, high = (_icc_of(z + sign * spread, k) for sign in (-1, 1))
    return Correlation(found, low, high, num_groups)


def _icc_of(z: float, k: float) -> float:
    grown = math.exp(2.0 * z)
    return (grown - 1.0) / (grown + k - 1.0)


# ---- lengths of steps, and where they come from

IntArray = npt.NDArray[np.int64]

TRACES = Path(__file__).parent / "traces"
"""Lengths of two public runs. Source: PolyTrace, github.com/Zhou-jiecheng/PolyTrace at 4246156, arXiv 2509.25279."""

MOST_TOKENS = 2**31 - 1
"""The most tokens of a prompt or a response."""
_PROMPTS_STREAM = 11


@dataclass(frozen=True)
class Correlation:
    """The intraclass correlation of log length of the responses to one prompt, with its 95% interval."""

    icc: float
    low: float
    high: float
    num_groups: int


@dataclass(frozen=True, eq=False)
class StepLengths:
    """Lengths of the samples of one step. Groups may differ in size."""

    prompts: IntArray
    """[P], tokens."""
    responses: IntArray
    """[N], tokens, group after group."""
    groups: IntArray
    """[N], the position of each sample's prompt, ascending."""
    step: int = 0
    """The step's number in the run."""

    @classmethod
    def of(cls, prompts: npt.ArrayLike, responses: Sequence[npt.ArrayLike] | npt.ArrayLike, *, step: int = 0) -> StepLengths:
        """Make a step from a row of lengths for each prompt.

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
    """A description in one line."""
    cap: int | None
    """Tokens at which responses are truncated; None if no such limit is known."""

    @abstractmethod
    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> IntArray:
        """Draw lengths of responses, int64 [P, G], each at least 1."""

    @abstractmethod
    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> IntArray:
        """Draw lengths of the prompts of the same groups, int64 [P]; n as for `draw`."""

    @abstractmethod
    def mean(self) -> float:
        """Mean length of a response, truncated ones as they are."""

    @abstractmethod
    def survival(self, tokens: float) -> float:
        """The probability that a response is longer than this; truncated ones count as censored at the cap."""

    @abstractmethod
    def beyond(self, tokens: float) -> float:
        """E[L | L > tokens], the expected length of a response with this many tokens so far; `tokens` where none is longer."""

    @abstractmethod
    def quantile(self, q: float) -> float:
        """The least length that a share q of the responses does not exceed, truncated ones as they are."""

    @abstractmethod
    def correlation(self) -> Correlation:
        """The correlation of log length within a group: measured on recorded groups, otherwise as declared."""

    @abstractmethod
    def cut_at(self, tokens: int) -> Lengths:
        """The same lengths, truncated at this many tokens."""

    @property
    def longest(self) -> int | None:
        """The longest possible response in tokens; None if unbounded."""
        return self.cap

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest known prompt."""
        return 0

    def num_steps(self) -> int | None:
        """The number of recorded steps; None if any number can be drawn."""
        return None

    def step(self, index: int, *, num_groups: int, n: int, seed: int) -> StepLengths:
        """The lengths of a step: the recorded step if there is a record, otherwise a draw of `num_groups` x `n`."""
        return StepLengths.of(self.draw_prompts(num_groups, seed, step=index, n=n), self.draw(num_groups, n, seed, step=index), step=index)


def parse_lengths(text: str, read_run: Callable[[Path], Lengths] | None = None) -> Lengths:
    """Parse the `--lengths` option.

        FILE.jsonl                      a trace: {"step": 0, "prompt_tokens": 112, "response_tokens": [450, 453]} in each line
        dapo-qwen2.5-32b                a trace that comes with m2flow, by name
        runs/grpo-20260102-030405       the lengths of an earlier run
        lognormal:median=4000,sigma=0.8,cap=32768,icc=0.3,prompt=512      (mean= in the place of median=)
        mixture:weights=0.7/0.3,median=400/6000,sigma=0.5/0.6,cap=32768

    `,cap=8192` behind a trace or a run truncates it there.

    Args:
        read_run: reads the lengths of a run directory (`m2flow.micro.records.ledger.lengths_of_run`); None: no runs are taken.
    Raises:
        SpecError: there is nothing of that name, or it is wrong; with the line.
    """

    kind, colon, options = text.partition(":")
    if colon and kind in KINDS:
        return parse(kind, options)
    found = _recorded(text, read_run)
    if found is not None:
        return found
    base, _, cap = text.rpartition(",cap=")
    found = _recorded(base, read_run) if base and cap.isdecimal() and int(cap) else None
    if found is not None:
        return found.cut_at(int(cap))
    kinds, shipped = ", ".join(f"{kind}:..." for kind in KINDS), ", ".join(sorted(path.stem for path in TRACES.glob("*.jsonl")))
    raise SpecError(
        f"no lengths {text!r}: neither a file, {'nor a run, ' * (read_run is not None)}nor a distribution",
        now=f"Give a trace (JSON lines), {'a run directory, ' * (read_run is not None)}{kinds}, or one of {shipped}.",
    )


def _recorded(text: str, read_run: Callable[[Path], Lengths] | None) -> Lengths | None:
    """Read a run, a file or a built-in trace; None if there is none of that name."""

    path = Path(text)
    if read_run is not None and (path / "ledger.db").is_file():
        return read_run(path)
    if path.is_file():
        return read_trace(path)
    shipped = {found.stem: found for found in sorted(TRACES.glob("*.jsonl"))}
    return read_trace(shipped[text]) if text in shipped else None


# ---- parametric distributions

KINDS = ("lognormal", "mixture")

_NORMAL = NormalDist()
_GROUP, _SAMPLE = 3, 5
_GRID = np.linspace(-8.0, 8.0, 4001)
"""Standard normal scores at which the mixture's quantile function is tabulated."""
_BISECTIONS = 80
_MOST_SIGMA = 20.0
"""The largest sigma: lengths one sigma apart differ by a factor of about 10^8."""


class Mixture(Lengths):
    """A lognormal mixture: log L is normal(mu_k, sigma_k) with probability w_k; rounded up to whole tokens, truncated at `cap`."""

    def __init__(
        self,
        weights: Sequence[float],
        medians: Sequence[float],
        sigmas: Sequence[float],
        *,
        cap: int | None = None,
        icc: float = 0.0,
        prompt_tokens: int = 256,
    ) -> None:
        _check(weights, medians, sigmas, cap, icc, prompt_tokens)
        self.cap = cap
        self._weights = [weight / sum(weights) for weight in weights]
        self._mus = [math.log(median) for median in medians]
        self._sigmas = list(sigmas)
        self._icc = icc
        self._prompt_tokens = prompt_tokens
        parts = ", ".join(f"{w:.3g} of median {m:g} sigma {s:g}" for w, m, s in zip(self._weights, medians, sigmas, strict=True))
        self.name = f"lognormal mixture ({parts})" if len(weights) > 1 else f"lognormal (median {medians[0]:g}, sigma {sigmas[0]:g})"
        if cap is not None:
            self.name += f" cut at {cap}"
        self._logs = _GRID * sigmas[0] + self._mus[0] if len(weights) == 1 else np.array([self._log_at(z) for z in _GRID])

    def cut_at(self, tokens: int) -> Mixture:
        cap = tokens if self.cap is None else min(tokens, self.cap)
        medians = [math.exp(mu) for mu in self._mus]
        return Mixture(self._weights, medians, self._sigmas, cap=cap, icc=self._icc, prompt_tokens=self._prompt_tokens)

    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> IntArray:
        shared = normals(seed, _GROUP, step, num_groups, 1)
        scores = math.sqrt(self._icc) * shared + math.sqrt(1.0 - self._icc) * normals(seed, _SAMPLE, step, num_groups, n)
        tokens = np.ceil(np.exp(np.interp(scores, _GRID, self._logs)))
        return np.asarray(np.clip(tokens, 1, self.cap if self.cap is not None else 1 << 62), np.int64)

    def draw_prompts(self, num_groups: int, seed: int, *, step: int = 0, n: int = 1) -> IntArray:
        """All prompts have the same length."""
        return np.full(num_groups, self._prompt_tokens, np.int64)

    def mean(self) -> float:
        """The mean before rounding up.

        E[min(L, c)] = sum_k w_k (exp(mu + sigma^2/2) F((ln c - mu)/sigma - sigma) + c (1 - F((ln c - mu)/sigma)))
        """
        total = 0.0
        for weight, mu, sigma in zip(self._weights, self._mus, self._sigmas, strict=True):
            whole = math.exp(mu + sigma * sigma / 2)
            if self.cap is None:
                total += weight * whole
                continue
            z = (math.log(self.cap) - mu) / sigma
            total += weight * (whole * _NORMAL.cdf(z - sigma) + self.cap * _NORMAL.cdf(-z))
        return total

    def survival(self, tokens: float) -> float:
        return self._above(math.log(tokens)) if tokens > 0 else 1.0

    def beyond(self, tokens: float) -> float:
        """E[min(L, cap) | L > tokens]."""
        if tokens <= 0:
            return self.mean()
        left = self.survival(tokens)
        if left < 1e-300 or (self.cap is not None and tokens >= self.cap):
            return float(tokens)
        capped = math.inf if self.cap is None else float(self.cap)
        total = 0.0
        for weight, mu, sigma in zip(self._weights, self._mus, self._sigmas, strict=True):
            low = (math.log(tokens) - mu) / sigma
            high = (math.log(capped) - mu) / sigma if self.cap is not None else math.inf
            above = _NORMAL.cdf(-high) if self.cap is not None else 0.0
            total += weight * math.exp(mu + sigma * sigma / 2) * (_NORMAL.cdf(sigma - low) - _NORMAL.cdf(sigma - high))
            total += weight * capped * above if above else 0.0
        return max(float(tokens), total / left)

    def quantile(self, q: float) -> float:
        tokens = math.ceil(math.exp(self._log_at(_NORMAL.inv_cdf(min(max(q, 1e-12), 1 - 1e-12)))))
        return float(max(1, tokens if self.cap is None else min(tokens, self.cap)))

    def correlation(self) -> Correlation:
        return Correlation(self._icc, self._icc, self._icc, 0)

    def _above(self, log: float) -> float:
        parts = zip(self._weights, self._mus, self._sigmas, strict=True)
        return sum(weight * _NORMAL.cdf((mu - log) / sigma) for weight, mu, sigma in parts)

    def _log_at(self, z: float) -> float:
        """The log length whose probability of being exceeded is that of the score z."""
        wanted = _NORMAL.cdf(-z)
        low = min(mu + z * sigma for mu, sigma in zip(self._mus, self._sigmas, strict=True))
        high = max(mu + z * sigma for mu, sigma in zip(self._mus, self._sigmas, strict=True))
        if high - low < 1e-12:
            return low
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._above(middle) > wanted else (low, middle)
        return (low + high) / 2


def lognormal(
    *,
    median: float | None = None,
    mean: float | None = None,
    sigma: float,
    cap: int | None = None,
    icc: float = 0.0,
    prompt_tokens: int = 256,
) -> Mixture:
    """Make a lognormal distribution, whose mean before truncation is median exp(sigma^2 / 2).

    >>> lognormal(median=4000, sigma=0.8).quantile(0.5)
    4000.0
    """
    if (median is None) == (mean is None):
        raise SpecError("a lognormal takes either median= or mean=", now="For example lognormal:median=4000,sigma=0.8,cap=32768.")
    centre = median if median is not None else float(mean or 0) * math.exp(-sigma * sigma / 2)
    return Mixture([1.0], [centre], [sigma], cap=cap, icc=icc, prompt_tokens=prompt_tokens)


def parse(kind: str, options: str) -> Mixture:
    """Parse what follows the colon of `lognormal:...` or `mixture:...`.

    Raises:
        SpecError: an unknown option, or an invalid value.
    """
    known = (
        ("median", "mean", "sigma", "cap", "icc", "prompt")
        if kind == "lognormal"
        else ("weights", "median", "sigma", "cap", "icc", "prompt")
    )
    values: dict[str, str] = {}
    for part in filter(None, options.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise SpecError(f"{kind} has no option {name!r}", now=did_you_mean(name, known))
        values[name] = value
    icc, prompt = _number(values, "icc", 0.0), int(_number(values, "prompt", 256))
    cap = int(_number(values, "cap", 0)) if "cap" in values else None
    if kind == "lognormal":
        median, mean = ((_number(values, name) if name in values else None) for name in ("median", "mean"))
        return lognormal(median=median, mean=mean, sigma=_number(values, "sigma"), cap=cap, icc=icc, prompt_tokens=prompt)
    weights, medians, sigmas = (_numbers(values, name) for name in ("weights", "median", "sigma"))
    return Mixture(weights, medians, sigmas, cap=cap, icc=icc, prompt_tokens=prompt)


def _number(values: Mapping[str, str], name: str, default: float | None = None) -> float:
    if name not in values and default is not None:
        return default
    (number,) = _numbers(values, name)[:1]
    return number


def _numbers(values: Mapping[str, str], name: str) -> list[float]:
    try:
        numbers = [float(part) for part in values[name].split("/")]
    except KeyError:
        raise SpecError(f"{name}= is missing", now="For example lognormal:median=4000,sigma=0.8,cap=32768.") from None
    except ValueError:
        raise SpecError(f"{name}={values[name]} is not a number", now="Several numbers are parted by a slash: sigma=0.5/0.6.") from None
    if not all(math.isfinite(number) for number in numbers):
        raise SpecError(f"{name}={values[name]} is not finite")
    return numbers


def _check(
    weights: npt.ArrayLike, medians: Sequence[float], sigmas: Sequence[float], cap: int | None, icc: float, prompt_tokens: int
) -> None:
    shares = np.asarray(weights, np.float64)
    if not len(shares) == len(medians) == len(sigmas) or not len(shares):
        raise SpecError(
            f"{len(shares)} weights, {len(medians)} medians and {len(sigmas)} sigmas do not fit together", now="Give as many of each."
        )
    if (shares < 0).any() or shares.sum() <= 0 or min(medians) <= 0 or min(sigmas) <= 0:
        raise SpecError("weights can't be negative, medians and sigmas are above 0")
    if max(medians) > MOST_TOKENS or max(sigmas) > _MOST_SIGMA:
        raise SpecError(f"medians above {MOST_TOKENS:,} tokens, or sigmas above {_MOST_SIGMA:g}, are no lengths of answers")
    if cap is not None and cap > MOST_TOKENS:
        raise SpecError(f"cap={cap} is more than {MOST_TOKENS:,} tokens", now="Leave it out, or give the limit of the answers.")
    if cap is not None and cap < 1:
        raise SpecError(f"cap={cap} leaves no answer", now="Give a cap of 1 token or more.")
    if not 0 <= icc <= 1:
        raise SpecError(f"icc={icc} is no correlation within groups", now="Give 0 (members differ as any two) to 1 (all the same).")
    if not 0 <= prompt_tokens <= MOST_TOKENS:
        raise SpecError(f"prompt={prompt_tokens} is no number of tokens")


# ---- recorded lengths

_WHICH_GROUP, _WHICH_MEMBER = 1, 2
_KEYS = {"step", "prompt_tokens", "response_tokens"}


class Measured(Lengths):
    """Recorded groups: `step` returns a recorded step, `draw` resamples recorded groups and so keeps the correlation of their members.

    A group of more than n members gives n of them without repetition. Smaller groups belong to other calls (an evaluation samples once):
    they are drawn only where there are no others, with some of their members repeated.
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
        """The correlation over all steps, with each step's mean removed: responses that grow over training would look like groups."""
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
        """The number of truncated responses."""
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
    """Read a file of JSON lines, one prompt group in each: `{"step": int, "prompt_tokens": int, "response_tokens": [int, ...]}`.

    Args:
        cap: the run's token limit; lengths at it were truncated. By default the longest length, if more than one response has it.
    Raises:
        SpecError: a line is not such a group (with its number), or there is none.
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
