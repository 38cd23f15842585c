"""The conformance suite of train engines, for the trainer `megatron` in each layout."""

from __future__ import annotations

import pytest
from inside_megatron import NEEDS_MEGATRON, PATIENT, inside

CONFORMING: dict[int, list[dict[str, object]]] = {
    1: [{}],
    2: [{"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}, {"zero": 1}, {"ep": 2}],
    8: [{"tp": 2, "pp": 2, "ep": 2, "etp": 1}],
}


@NEEDS_MEGATRON
@PATIENT
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", CONFORMING)
def test_the_conformance_suite_of_every_layout(num_ranks: int) -> None:
    inside("conformance.py", num_ranks, CONFORMING[num_ranks])
