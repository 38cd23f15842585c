"""A planted bottleneck is named by the verdict, and what is suggested first can be applied. `benchmarks/verdicts.py` times it."""

from __future__ import annotations

import re
from pathlib import Path

import planted
import pytest
from planted import CASES, Planted


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_planted_bottleneck_is_named_and_what_is_suggested_first_can_be_applied(case: Planted, tmp_path: Path) -> None:
    run_dir, before = planted.ran(planted.planted, dict(case.options), case.cluster, tmp_path)
    assert before.verdict.causes[0].name in case.causes, before.verdict
    assert before.verdict.causes[0].says in before.verdict.sentence
    first = planted.first_suggestion(case, run_dir, before)
    assert re.search(case.suggested, first.what), first
    after = planted.applied(case, dict(case.options), first, tmp_path)
    assert len(after.steps) == len(before.steps)
