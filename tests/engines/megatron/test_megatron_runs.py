"""Runs with the trainer `megatron` learn as those with the embedded trainer."""

from __future__ import annotations

import pytest
from inside_megatron import NEEDS_MEGATRON, PATIENT, inside


@NEEDS_MEGATRON
@PATIENT
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "layout"), [(4, {"tp": 2, "pp": 2}), (2, {"ep": 2})], ids=str)
def test_runs_learn_as_with_the_embedded_trainer(num_ranks: int, layout: dict[str, object]) -> None:
    inside("runs.py", num_ranks, layout)
