"""Generalised advantage estimation, and V-trace: from rewards and a critic's values to an advantage and a return for every token.

    rewards [T], values [T], lengths [N] --> advantages [T], returns [T]

NumPy in float64, so that a process which only does this needs no torch. The sums run along each sample by itself, so a sample's numbers
do not depend on the batch that it is computed in.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from m2flow.errors import OpError, OptionError, ShapeError
from m2flow.samples import Batch, Column, Ragged, SampleId, check_one_reward, sequences_of

# Shapes: N samples, T tokens of all of them, sample after sample; L tokens of the longest.

Floats = npt.NDArray[np.float64]


def gae(
    rewards: Floats,
    values: Floats,
    lengths: npt.NDArray[np.int64],
    *,
    gamma: float = 1.0,
    lam: float | Floats = 0.95,
    critic_lam: float | None = None,
) -> tuple[Floats, Floats]:
    """Advantages and returns of tokens, each token being an action and each sample an episode that ends with its last one.

        delta[t] = r[t] + gamma * V[t + 1] - V[t]              with V = 0 after the last token
        A[t]     = delta[t] + gamma * lam * A[t + 1]
        R[t]     = A[t] + V[t]                         with critic_lam: of the A that this gives instead of lam

    Args:
        rewards: float64 [T], for each token; a reward of the whole response stands at its last token.
        values: float64 [T], what was expected before each token; unit of the reward.
        lengths: int64 [N], tokens of each sample; they add up to T.
        gamma: discount of a token. lam: 0 trusts the values alone, 1 the rewards alone; one number, or float64 [N], one a sample.
        critic_lam: the lam of the returns, where it is another (decoupled GAE); 1 makes them the sums of rewards.
    Returns:
        Advantages and returns, float64 [T] each, in the unit of the reward. A response that was cut off ends like any other.
    Raises:
        ShapeError: the lengths do not add up. OptionError: gamma or lam outside 0..1.
    Source:
        Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", arXiv:1506.02438, eq. 16;
        the returns are the targets of TD(lambda), as in the code of its authors. Decoupled: Yuan et al. 2025 (VC-PPO),
        arXiv:2503.01491.

    >>> advantages, returns = gae(np.array([0.0, 1.0]), np.array([0.5, 0.25]), np.array([2]), gamma=1.0, lam=0.5)
    >>> advantages.tolist(), returns.tolist()
    ([0.125, 0.75], [0.625, 1.0])
    """
    _check_lengths(rewards, values, lengths)
    of_samples = np.broadcast_to(np.asarray(lam, np.float64), lengths.shape)
    if not (0 <= gamma <= 1 and np.all((of_samples >= 0) & (of_samples <= 1)) and 0 <= (critic_lam or 0) <= 1):
        raise OptionError(f"gamma is {gamma}, lam {lam} and critic_lam {critic_lam}; they must lie in 0..1")
    deltas = rewards + gamma * _next(values, lengths) - values
    advantages = _sum_back(deltas, gamma * np.repeat(of_samples, lengths), lengths)
    if critic_lam is None:
        return advantages, advantages + values
    return advantages, _sum_back(deltas, np.full(len(values), gamma * critic_lam), lengths) + values


def length_adaptive_lam(lengths: npt.NDArray[np.int64], alpha: float = 0.05) -> Floats:
    """A `lam` for each sample, which lets rewards reach back through long responses, and values count in short ones.

        lam[n] = 1 - 1 / (alpha l[n])          0 where that is negative

    Args:
        lengths: int64 [N], tokens of each sample. alpha: above 0; the sum of lam's powers is about alpha l.
    Returns:
        float64 [N], from 0 to 1.
    Source:
        Yue et al. 2025 (VAPO), arXiv:2504.05118, which takes alpha = 0.05; for l < 1 / alpha it is negative there.

    >>> length_adaptive_lam(np.array([10, 40, 200])).tolist()
    [0.0, 0.5, 0.9]
    """
    if alpha <= 0:
        raise OptionError(f"alpha is {alpha}; it must be above 0")
    found: Floats = np.maximum(1 - 1 / (alpha * np.maximum(lengths, 1)), 0.0)
    return found


def vtrace(
    rewards: Floats,
    values: Floats,
    log_ratios: Floats,
    lengths: npt.NDArray[np.int64],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
) -> tuple[Floats, Floats]:
    """Advantages and returns of tokens that older weights sampled, corrected by truncated importance ratios.

        rho[t] = min(rho_max, exp(log_ratios[t])),  c[t] = lam min(c_max, exp(log_ratios[t]))
        D[t]   = rho[t] (r[t] + gamma V[t + 1] - V[t]) + gamma c[t] D[t + 1]          with V = D = 0 after the last token
        R[t]   = V[t] + D[t]
        A[t]   = r[t] + gamma R[t + 1] - V[t]

    Args:
        rewards, values, lengths, gamma: as `gae`. log_ratios: float64 [T], of the current weights to those that sampled.
        lam: as `gae`. rho_max, c_max: bounds of the ratios, above 0; rho_max moves what is estimated, c_max only how fast.
    Returns:
        Advantages and returns, float64 [T] each. The advantages lack the factor rho of the policy gradient: the loss has its ratio. On
        samples of the current weights they are those of `gae` with lam = 1.
    Raises:
        As `gae`; OptionError also for a bound that is not above 0.
    Source:
        Espeholt et al. 2018 (IMPALA), arXiv:1802.01561, eq. 1 and section 4.2; lam: remark 2 there.

    >>> advantages, returns = vtrace(np.array([0.0, 1.0]), np.array([0.5, 0.25]), np.log([0.5, 2.0]), np.array([2]))
    >>> advantages.tolist(), returns.tolist()
    ([0.5, 0.75], [0.75, 1.0])
    """
    _check_lengths(rewards, values, lengths)
    if not (0 <= gamma <= 1 and 0 <= lam <= 1 and rho_max > 0 and c_max > 0):
        raise OptionError(
            f"gamma is {gamma}, lam {lam}, rho_max {rho_max} and c_max {c_max}; the first two lie in 0..1, the others above 0"
        )
    rho, c = (np.exp(np.minimum(log_ratios, np.log(bound))) for bound in (rho_max, c_max))
    differences = _sum_back(rho * (rewards + gamma * _next(values, lengths) - values), gamma * lam * c, lengths)
    returns = values + differences
    advantages: Floats = rewards + gamma * _next(returns, lengths) - values
    return advantages, returns


def _check_lengths(rewards: Floats, values: Floats, lengths: npt.NDArray[np.int64]) -> None:
    if rewards.shape != values.shape or rewards.ndim != 1 or int(lengths.sum()) != len(values):
        raise ShapeError(f"rewards are {list(rewards.shape)} and values {list(values.shape)}, and the lengths add up to {lengths.sum()}")


def _next(values: Floats, lengths: npt.NDArray[np.int64]) -> Floats:
    """The value after each token; 0 after a sample's last."""
    after = np.append(values[1:], 0.0) if len(values) else values.copy()
    after[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    return after


def _sum_back(terms: Floats, factors: Floats, lengths: npt.NDArray[np.int64]) -> Floats:
    """S[t] = terms[t] + factors[t] * S[t + 1], along each sample by itself."""
    # One column a sample, its last token in the first row: the sum of all samples goes on by one token at a time.
    sample = np.repeat(np.arange(len(lengths)), lengths)
    back = np.repeat(np.cumsum(lengths), lengths) - 1 - np.arange(len(terms))
    summed, weights = (np.zeros((int(lengths.max(initial=0)), len(lengths))) for _ in range(2))
    summed[back, sample], weights[back, sample] = terms, factors
    for row in range(1, len(summed)):
        summed[row] += weights[row] * summed[row - 1]
    found: Floats = summed[back, sample]
    return found


def gae_rows(
    rows: Batch, whole: Mapping[str, object], *, gamma: float, lam: float, critic_lam: float | None = None, length_alpha: float = 0.0
) -> Batch:
    """`gae` on a batch: columns `advantages` and `returns`, ragged float64 aligned with `tokens`, 0 where no token was generated.

    Args:
        rows: samples with columns `rewards` (one number a sample, which its last generated token gets, or one a token), `values` and,
            if there is one, `penalties` (one number a token, taken off the rewards; of a sample one number, off its last token's).
    Raises:
        OpError: numbers that do not fit a sample's tokens.
    """
    check_one_reward(rows, "gae")
    ids = rows.ids
    mask = rows.ragged("loss_mask").values.astype(bool)
    offsets = rows.ragged("tokens").offsets
    rows = _by_sequence(rows)
    lengths = np.diff(np.concatenate(([0], np.cumsum(mask)))[rows.ragged("tokens").offsets])
    rewards = _of_tokens(rows, "rewards", mask, lengths)
    if "penalties" in rows:
        rewards = rewards - _of_tokens(rows, "penalties", mask, lengths)
    values = _of_tokens(rows, "values", mask, lengths)
    chosen = length_adaptive_lam(lengths, length_alpha) if length_alpha else lam
    advantages, returns = gae(rewards, values, lengths, gamma=gamma, lam=chosen, critic_lam=critic_lam)
    return Batch(ids, {name: _spread(numbers, mask, offsets) for name, numbers in (("advantages", advantages), ("returns", returns))})


_GIVEN = ("rewards", "penalties", "values")


def _by_sequence(rows: Batch) -> Batch:
    """The rows with each sequence of theirs as a row: an episode's reward is one at the end of each of its conversations.

    Raises:
        OpError: as `gae_rows`.
    """
    found = sequences_of(rows)
    if found is None:
        return rows
    offsets, row_of = found
    tokens, mask = rows.ragged("tokens"), rows.ragged("loss_mask")
    counts = np.concatenate(([0], np.cumsum(mask.values.astype(np.int64))))
    columns: dict[str, Column] = {"tokens": Ragged(tokens.values, offsets), "loss_mask": Ragged(mask.values, offsets)}
    for name in _GIVEN:
        if name in rows:
            column = _numbers(rows, name)
            if isinstance(column, Ragged):
                numbers = _of_tokens(rows, name, mask.values.astype(bool), np.diff(counts[tokens.offsets]))
                columns[name] = Ragged(numbers, counts[offsets])
            else:
                columns[name] = column[row_of]
    return Batch(rows.ids[row_of], columns)


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
