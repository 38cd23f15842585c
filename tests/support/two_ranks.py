"""What tests of trainers of several ranks share: a small model, and the process of a second rank, which serves all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from followed import followed
from test_train_engines import CONFIGS, write_model

from m2flow.recipe import Model
from m2flow.testing.mirrored import Followers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen2"), CONFIGS["qwen2"]())


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with followed(1) as found:
        yield found
