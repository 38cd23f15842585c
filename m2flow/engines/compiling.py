"""What must be there for a library that compiles parts of itself when it is first used.

    check_compiler("deepspeed") --> ninja is on this process's path; or an error that says what to install

A virtual environment need not be activated for its interpreter to be used, and then its `ninja` is not on the path: it is put there.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

from m2flow.errors import EngineError, MissingExtra

_LONGEST_S = 3600.0


def missing_tools() -> dict[str, str]:
    """What is missing for compiling a C++ extension of torch, and how to get it."""
    missing = {}
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        missing[f"a C++ compiler ({compiler})"] = "apt-get install g++"
    if _ninja() is None:
        missing["ninja"] = "pip install ninja"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing["Python's headers"] = "apt-get install python3-dev"
    return missing


def check_compiler(engine: str) -> None:
    """
    Raises:
        MissingExtra: there is nothing to compile with. EngineError: a compilation that was killed left its lock.
    """
    missing = missing_tools()
    if missing:
        raise MissingExtra(
            f"the train engine {engine!r} compiles a part of itself, and {' and '.join(missing)} can't be found",
            now="; ".join(missing.values()),
        )
    _check_locks(engine)
    ninja = _ninja()
    if ninja is not None and shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([str(ninja.parent), os.environ.get("PATH", os.defpath)])


def _check_locks(engine: str) -> None:
    # Torch waits for whoever compiles, and can't tell that it was killed.
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    for lock in cache.glob("**/lock"):
        if time.time() - lock.stat().st_mtime > _LONGEST_S:
            raise EngineError(f"the train engine {engine!r} would wait for a compilation that never ended", now=f"Delete {lock}.")


def _ninja() -> Path | None:
    found = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    return Path(found) if found else None
