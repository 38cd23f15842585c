"""Numbers of the trainer `megatron` in each layout are those of the embedded trainer."""

from __future__ import annotations

import pytest
from inside_megatron import NEEDS_MEGATRON, PATIENT, inside


@NEEDS_MEGATRON
@PATIENT
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_numbers_of_every_layout_are_those_of_the_embedded_trainer(num_ranks: int) -> None:
    inside("layouts.py", num_ranks)
