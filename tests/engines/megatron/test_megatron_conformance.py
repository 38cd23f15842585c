"""The conformance suite of train engines, for the trainer `megatron` in each layout."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from inside_megatron import NEEDS_MEGATRON, PATIENT, inside

CONFORMING: dict[int, list[dict[str, object]]] = {
    1: [{}],
    2: [{"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}, {"zero": 1}, {"ep": 2}],
    8: [{"tp": 2, "pp": 2, "ep": 2, "etp": 1}],
}
LAYOUTS = [f"{num_ranks}-{layout}" for num_ranks, layouts in CONFORMING.items() for layout in layouts]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """What pytest said of all layouts, which go through one process: to start it takes as long as a layout of one rank. Cases by name."""
    report = tmp_path_factory.mktemp("conformance") / "report.xml"
    said = inside("conformance.py", 0, CONFORMING, report=report)
    return said, outcomes(report)


def outcomes(report: Path) -> dict[str, str]:
    """By the names of cases, "passed", "skipped", "failure" or "error"."""
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}": next((child.tag for child in case), "passed") for case in cases}


@NEEDS_MEGATRON
@PATIENT
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_conformance_suite_of_every_layout(layout: str, found: tuple[str, dict[str, str]]) -> None:
    said, cases = found
    own = {name: outcome for name, outcome in cases.items() if f"[{layout}" in name}
    assert set(own.values()) <= {"passed", "skipped"}, said
    assert list(own.values()).count("passed") >= 44, said


def test_what_a_report_says_of_cases_is_read(tmp_path: Path) -> None:
    names = ["", "<skipped/>", "<failure/>", "<error/>"]
    cases = "".join(f'<testcase classname="c" name="{i}">{inner}</testcase>' for i, inner in enumerate(names))
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert outcomes(tmp_path / "report.xml") == {"c::0": "passed", "c::1": "skipped", "c::2": "failure", "c::3": "error"}
