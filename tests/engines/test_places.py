"""Where another thread is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

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
    names = [line.function for line in lines_of(threading.get_ident())]
    assert names[:2] == ["lines_of", "test_a_thread_may_ask_of_itself"]


def test_nothing_follows_the_frames_of_other_threads() -> None:
    """CPython 3.11 may end the process then."""
    package = Path(m2flow.__file__).parent
    assert [path for path in package.rglob("*.py") if "_current_frames(" in path.read_text()] == []
