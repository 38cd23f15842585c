"""Random numbers that belong to who they are for: a pure function of (seed, stream, step, group, member).

Drawing more groups, or more members, changes none of the earlier ones. Counter-based: splitmix64's finaliser over the words, one after
the other. Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", and Salmon et al. 2011 for the idea.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniforms(seed: int, stream: int, step: int, num_groups: int, num_members: int) -> FloatArray:
    """Numbers in the open interval (0, 1).

    Args:
        seed: of the run.
        stream: what they are for; two streams are independent.
    Returns:
        float64 [P, G].
    """
    state = _mixed(np.uint64(seed & (1 << 64) - 1), np.uint64(stream))
    state = _mixed(state, np.uint64(step))
    state = _mixed(state, np.arange(num_groups, dtype=np.uint64)[:, None])
    state = _mixed(state, np.arange(num_members, dtype=np.uint64)[None, :])
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) / float(1 << 53)


def normals(seed: int, stream: int, step: int, num_groups: int, num_members: int) -> FloatArray:
    """Standard normal numbers, float64 [P, G]; they take the streams `stream` and `stream + 1`.

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
