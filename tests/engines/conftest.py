"""Fixtures of trainers of several ranks: a small model, and the processes of the other ranks, which serve all tests of a file.

What they need is loaded when they are used: a process whose tests change torch collects this too.
"""

from __future__ import annotations

from collections.abc import Iterator
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
