"""docs/engines.md says of engines what the planner goes by."""

from __future__ import annotations

from pathlib import Path

from m2flow.cli.engines import other_interpreter
from m2flow.engines.registry import engines
from m2flow.engines.table import capability_tables
from m2flow.spec import ClusterSpec, RolloutSpec

PAGE = Path(__file__).parent.parent / "docs" / "engines.md"


def test_the_tables_of_the_page_are_those_of_the_registry() -> None:
    ours = [info for info in engines() if info.factory.startswith("m2flow.")]
    tables = PAGE.read_text().partition("<!-- capabilities -->\n")[2].partition("<!-- /capabilities -->")[0]
    assert tables == capability_tables(ours), "m2flow engines --markdown"


def test_every_engine_but_those_for_tests_has_a_column() -> None:
    head = [line for line in capability_tables(engines()).splitlines() if line.startswith(("| rollout |", "| train |"))]
    named = {(cell.split()[0].strip("`")) for line in head for cell in line.strip("| ").split(" | ")[1:]}
    real = {info.name for info in engines() if info.kind != "function" and not info.factory.startswith("m2flow.testing.")}
    assert named == real


def test_a_spec_without_an_interpreter_of_its_own_is_said_to_have_none(tmp_path: Path) -> None:
    assert "no interpreter of its own" in other_interpreter(ClusterSpec())
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho \'{"version": "0.5.99", "words": ["/generate", "sampling_seed"], "saver": false}\'\n')
    fake.chmod(0o755)
    said = other_interpreter(ClusterSpec(rollout=RolloutSpec(engine="sglang", options={"python": str(fake)})))
    assert said.startswith(f"{fake} has sglang 0.5.99: generation by token ids, seeds by token; it lacks streaming of new tokens alone")
