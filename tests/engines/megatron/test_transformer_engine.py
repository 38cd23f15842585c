"""Megatron's layers made of Transformer Engine's modules, by a stand-in for that package."""

from __future__ import annotations

import os

import pytest
from inside_megatron import NEEDS_MEGATRON, PATIENT, ROOT, inside

STAND_INS = ROOT / "tests" / "support" / "stand_ins"
"""Has a `transformer_engine` in plain torch."""


@NEEDS_MEGATRON
@PATIENT
@pytest.mark.slow
def test_numbers_with_transformer_engines_modules_are_those_of_the_embedded_trainer() -> None:
    """The package needs a GPU: names, shapes, marks and what ranks send are the package's, kernels are not."""
    path = os.pathsep.join(filter(None, (str(STAND_INS), os.environ.get("PYTHONPATH", ""))))
    only = "test_numbers or made_of or test_experts_are_replayed or gradients_of_adapters or states_move or engines_names"
    inside("layouts.py", 2, only=only, M2FLOW_TEST_IMPL="transformer_engine", PYTHONPATH=path)
