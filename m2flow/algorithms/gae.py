"""Generalised advantage estimation: from rewards and a critic's values to an advantage and a return for every token.

    rewards [T], values [T], lengths [N] --> advantages [T], returns [T]

NumPy in float64, so that a process which only does this needs no torch. The sums run along each sample by itself, so a sample's numbers
do not depend on the batch that it is computed in.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from m2flow.errors import OpError, OptionError, ShapeError
from m2flow.samples import Batch, Column, Ragged, SampleId

# Shapes: N samples, T tokens of all of them, sample after sample; L tokens of the longest.

Floats = npt.NDArray[np.float64]


def gae(rewards: Floats, values: Floats, lengths: npt.NDArray[np.int64], *, gamma: float = 1.0, lam: float = 0.95) -> tuple[Floats, Floats]:
    """Advantages and returns of tokens, each token being an action and each sample an episode that ends with its last one.

        delta[t] = r[t] + gamma * V[t + 1] - V[t]              with V = 0 after the last token
        A[t]     = delta[t] + gamma * lam * A[t + 1]
        R[t]     = A[t] + V[t]

    Args:
        rewards: float64 [T], for each token; a reward of the whole response stands at its last token.
        values: float64 [T], what was expected before each token; unit of the reward.
        lengths: int64 [N], tokens of each sample; they add up to T.
        gamma: discount of a token. lam: 0 trusts the values alone, 1 the rewards alone.
    Returns:
        Advantages and returns, float64 [T] each, in the unit of the reward. A response that was cut off ends like any other.
    Raises:
        ShapeError: the lengths do not add up. OptionError: gamma or lam outside 0..1.
    Source:
        Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", arXiv:1506.02438, eq. 16;
        the returns are the targets of TD(lambda), as in the code of its authors.

    >>> advantages, returns = gae(np.array([0.0, 1.0]), np.array([0.5, 0.25]), np.array([2]), gamma=1.0, lam=0.5)
    >>> advantages.tolist(), returns.tolist()
    ([0.125, 0.75], [0.625, 1.0])
    """
    if rewards.shape != values.shape or rewards.ndim != 1 or int(lengths.sum()) != len(values):
        raise ShapeError(f"rewards are {list(rewards.shape)} and values {list(values.shape)}, and the lengths add up to {lengths.sum()}")
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise OptionError(f"gamma is {gamma} and lam {lam}; both must lie in 0..1")
    after = np.append(values[1:], 0.0)
    after[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    deltas = rewards + gamma * after - values
    # One column a sample, its last token in the first row: the sum of all samples goes on by one token at a time.
    sample = np.repeat(np.arange(len(lengths)), lengths)
    back = np.repeat(np.cumsum(lengths), lengths) - 1 - np.arange(len(values))
    padded = np.zeros((int(lengths.max(initial=0)), len(lengths)))
    padded[back, sample] = deltas
    for row in range(1, len(padded)):
        padded[row] += gamma * lam * padded[row - 1]
    advantages: Floats = padded[back, sample]
    return advantages, advantages + values


def gae_rows(rows: Batch, whole: Mapping[str, object], *, gamma: float, lam: float) -> Batch:
    """`gae` on a batch: columns `advantages` and `returns`, ragged float64 aligned with `tokens`, 0 where no token was generated.

    Args:
        rows: samples with columns `rewards` (one number a sample, which its last generated token gets, or one a token), `values` and,
            if there is one, `penalties` (one number a token, taken off the rewards; of a sample one number, off its last token's).
    Raises:
        OpError: numbers that do not fit a sample's tokens.
    """
    mask = rows.ragged("loss_mask").values.astype(bool)
    offsets = rows.ragged("tokens").offsets
    lengths = np.diff(np.concatenate(([0], np.cumsum(mask)))[offsets])
    rewards = _of_tokens(rows, "rewards", mask, lengths)
    if "penalties" in rows:
        rewards = rewards - _of_tokens(rows, "penalties", mask, lengths)
    advantages, returns = gae(rewards, _of_tokens(rows, "values", mask, lengths), lengths, gamma=gamma, lam=lam)
    return Batch(rows.ids, {name: _spread(numbers, mask, offsets) for name, numbers in (("advantages", advantages), ("returns", returns))})


def _of_tokens(rows: Batch, name: str, mask: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]) -> Floats:
    """Expand a column to one number for each generated token [T]."""
    column = _numbers(rows, name)
    if not isinstance(column, Ragged):
        flat = np.zeros(int(lengths.sum()))
        flat[np.cumsum(lengths)[lengths > 0] - 1] = np.asarray(column, np.float64)[lengths > 0]
        return flat
    if np.array_equal(column.offsets, rows.ragged("tokens").offsets):
        return column.values[mask].astype(np.float64)
    if np.array_equal(column.lengths, lengths):
        return column.values.astype(np.float64)
    wrong = int(np.argmax(column.lengths != lengths))
    raise OpError(
        f"gae got {name} with {column.lengths[wrong]} numbers for sample {SampleId.unpack(int(rows.ids[wrong]))}, "
        f"which has {lengths[wrong]} generated tokens",
        now="It must be one number for every sample, or for every sample one for each generated token, or one for each token.",
    )


def _numbers(rows: Batch, name: str) -> Column:
    """Read a column of numbers; values that a user's function returned are stored as JSON."""
    column = rows[name]
    if not isinstance(column, Ragged) or column.kind == "numbers":
        return column
    found = [column.item(i) for i in range(len(column))]
    try:
        return Ragged.of(found, np.float64) if any(isinstance(row, list) for row in found) else np.array(found, np.float64)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise OpError(f"gae got {name} that are no numbers: {error}") from None


def _spread(numbers: Floats, mask: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int64]) -> Ragged:
    values = np.zeros(len(mask))
    values[mask] = numbers
    return Ragged(values, offsets)
