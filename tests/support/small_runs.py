"""For tests of many small planned runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from m2flow.testing import world


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A deadlock is one after seconds, files of small runs need no disk, and a dozen numbers no threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(world, "MAX_TURNS", 50_000)
    if Path("/dev/shm").is_dir():
        monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    yield
    torch.set_num_threads(num_threads)
