"""Fixtures of trainers of several ranks: a small model, and the processes of the other ranks, which serve all tests of a file.

A test of several ranks is slow, unless it is marked `core`. One quick case for each kind of layout is: replicas, shards, split layers,
stages, chunks of stages, stages without a bubble, split sequences, split experts, split experts on stages.

What they need is loaded when they are used: a process whose tests change torch collects this too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from m2flow.recipe import Model

if TYPE_CHECKING:
    from m2flow.testing.mirrored import Followers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A Qwen2 of two layers whose head is its embeddings."""
    from tiny_models import CONFIGS, write_model

    return write_model(tmp_path_factory.mktemp("qwen2"), CONFIGS["qwen2"]())


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    """The second of two ranks."""
    from followed import followed

    with followed(1) as found:
        yield found


@pytest.fixture(scope="module")
def three() -> Iterator[Followers]:
    """The ranks of four after the first."""
    from followed import followed

    with followed(3) as found:
        yield found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of several ranks as slow, before the marks are selected by."""
    for item in items:
        has_ranks = {"followers", "three"} & set(getattr(item, "fixturenames", ()))
        if has_ranks and Path(__file__).parent in item.path.parents and not item.get_closest_marker("core"):
            item.add_marker(pytest.mark.slow)
