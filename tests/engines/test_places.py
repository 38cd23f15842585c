"""Where another thread is."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

import m2flow
from m2flow.engines import Line, lines_of


def test_the_lines_of_a_thread_are_those_of_its_functions_from_the_innermost_one() -> None:
    go_on = threading.Event()

    def stays() -> None:
        go_on.wait()

    def stays_für_immer() -> None:
        stays()

    def other() -> None:
        go_on.wait()

    threads = [threading.Thread(target=target) for target in (other, stays_für_immer)]
    for thread in threads:
        thread.start()
    number = threads[1].ident or 0
    deadline = time.monotonic() + 60
    while not (lines := lines_of(number)) or lines[0].function != "wait":
        assert time.monotonic() < deadline, lines
    go_on.set()
    for thread in threads:
        thread.join()
    assert [line for line in lines if line.file == __file__] == [
        Line(__file__, stays.__code__.co_firstlineno + 1, "stays"),
        Line(__file__, stays_für_immer.__code__.co_firstlineno + 1, "stays_für_immer"),
    ]
    assert lines_of(number) == []


def test_a_thread_may_ask_of_itself() -> None:
    assert lines_of(threading.get_ident())[0].function == "test_a_thread_may_ask_of_itself"


def test_who_can_have_no_file_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    assert lines_of(threading.get_ident()) == []


def test_nothing_follows_the_frames_of_other_threads() -> None:
    """CPython 3.11 may end the process then."""
    package = Path(m2flow.__file__).parent
    assert [path for path in package.rglob("*.py") if "_current_frames(" in path.read_text()] == []
