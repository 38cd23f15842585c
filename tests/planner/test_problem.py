"""Which plans of a front stay: those that no other of their kind dominates, however many there are."""

from __future__ import annotations

import numpy as np
import pytest

from m2flow.planner.problem import undominated


@pytest.mark.parametrize("num_rows", [2, 100, 160, 161, 300, 700])
@pytest.mark.parametrize("num_levels", [3, 1_000])
@pytest.mark.parametrize("slack", [0.0, 2.0])
def test_what_stays_is_not_dominated_and_what_goes_is_dominated_by_what_stays(num_rows: int, num_levels: int, slack: float) -> None:
    rng = np.random.default_rng(num_rows * num_levels)
    values = rng.integers(0, num_levels, (num_rows, 4)).astype(np.float64)
    kinds = rng.integers(0, 3, num_rows)
    kept = undominated(values.T.copy(), kinds, slack).tolist()
    assert kept == sorted(set(kept))

    def dominates(row: int, other: int, room: float) -> bool:
        return bool(kinds[row] == kinds[other] and (values[row] <= values[other] + room).all())

    gone = sorted(set(range(num_rows)) - set(kept))
    assert [row for row in gone if not any(dominates(one, row, slack) for one in kept)] == []
    assert [(one, two) for one in kept for two in kept if one != two and dominates(one, two, 0.0)] == []
