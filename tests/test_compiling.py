"""What an engine that compiles needs is looked for before a run starts, and said."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from m2flow.engines import compiling
from m2flow.errors import EngineError, MissingExtra


def test_a_compiler_that_is_not_there_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingExtra, match=r"a C\+\+ compiler \(no-such-compiler\)") as caught:
        compiling.check_compiler("mine")
    assert "g++" in caught.value.now


def test_a_lock_that_a_killed_compilation_left_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "missing_tools", dict)
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    compiling.check_compiler("mine")
    long_ago = time.time() - 7200
    os.utime(lock, (long_ago, long_ago))
    with pytest.raises(EngineError, match="never ended") as caught:
        compiling.check_compiler("mine")
    assert str(lock) in caught.value.now
