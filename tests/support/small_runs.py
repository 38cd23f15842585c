"""For tests of many small planned runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shared_pools import SharedPools

from m2flow.engines import functions
from m2flow.testing import world


@pytest.fixture(scope="session")
def child_pools() -> Iterator[SharedPools]:
    pools = SharedPools()
    yield pools
    pools.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, child_pools: SharedPools) -> Iterator[None]:
    """A deadlock is one after seconds, files of small runs need no disk, a dozen numbers no threads, and all runs one pool of children."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(world, "MAX_TURNS", 50_000)
    monkeypatch.setattr(functions, "ProcessPool", child_pools.pool)
    if Path("/dev/shm").is_dir():
        monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    yield
    torch.set_num_threads(num_threads)
