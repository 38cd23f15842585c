"""Engines execute the calls of roles: the contract, the registry, and a package for each family of engines."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
from collections.abc import Callable
from typing import IO, NamedTuple

PLACES: list[Callable[[], str]] = []
"""What engines of this process have to say of where they are in a call, in words; empty: in none. Heartbeats carry it. For any thread."""


def place() -> str:
    """Describe where the engines of this process are, in words; empty: in no call."""
    return "; ".join(filter(None, (words() for words in PLACES)))


class Line(NamedTuple):
    """A line of Python that a thread is in."""

    file: str
    number: int
    function: str


_THREAD = re.compile(r"hread 0x([0-9a-f]+).*\n((?: .*\n)*)")  # "Thread", or "Current thread".
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def lines_of(thread: int) -> list[Line]:
    """Where a thread is, the innermost of its functions first, at most a hundred. The caller's own is at the call.

    Empty: it has ended, or it is not known, where the host has no file left or a hundred threads have begun since.

    The interpreter writes them down in one call, in which no other thread goes on. To follow the frames of `sys._current_frames` from
    here can end the process with SIGSEGV, since the thread leaves them meanwhile (CPython 3.11, its issues 99110 and 111363).

    Args:
        thread: as `threading.get_ident` gives it there.
    """
    try:
        with _unnamed_file() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            written = file.read().decode(errors="replace")
    except OSError:  # No file can be had. Who asks is a heartbeat, or already says what is wrong.
        return []
    lines = next((one[2] for one in _THREAD.finditer(written) if int(one[1], 16) == thread), "")
    found = [Line(_unescaped(one[1]), int(one[2]), _unescaped(one[3])) for one in _LINE.finditer(lines)]
    return found[1:] if thread == threading.get_ident() else found


def _unnamed_file() -> IO[bytes]:
    """In memory where the host has that: a full disk is no reason to know less."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("m2flow-threads"), "w+b")
    return tempfile.TemporaryFile()


def _unescaped(name: str) -> str:
    """A name whose letters beyond ASCII were written by their numbers."""
    return name.encode().decode("unicode_escape", errors="replace") if "\\" in name else name
