"""Find the user's code on the stack: the line that made a call, and the user's functions that led there.

Every recorded call asks, so what was found out about a place in running code is cached: a place is the code objects and instructions
on the stack, which are compared by number and not read again. Paths are relative to the directory that the session began in.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal

from m2flow.macro.graph import Site

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_FLOWS = _PACKAGE + "flows" + os.sep
"""Flows that come with an installed m2flow (`m2flow demo`): programs as users write them."""
_DATA = _PACKAGE + "samples.py"
"""What is in the user's hands, as a list is: an attribute that a sample has not is the fault of who asked for it."""
_LIBRARIES = (*{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen", "<string>")
_LIBRARY_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Of any environment: one may stand on another (a `.pth` file, `--system-site-packages`), whose folders are none of its own."""
_MOST_KNOWN = 20_000
"""Places that are remembered at most: a recursion without end has as many as it has calls."""

_known: dict[tuple[int, ...], tuple[Site, list[CodeType]]] = {}
"""(id of a code object, instruction, ...), innermost first -> the site. The code objects are held, so that no id is given anew."""
_is_ours: dict[str, bool] = {}


def user_site() -> Site:
    """Return the current place in the user's code: the innermost frame outside m2flow, and the user's frames that led there."""
    frame: FrameType | None = sys._getframe(1)
    place: list[int] = []
    first: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        is_ours = _is_ours.get(code.co_filename)
        if is_ours is None:
            is_ours = _is_ours[code.co_filename] = owner(code.co_filename) == "m2flow"
        if not is_ours:
            first = first or frame
            place += (id(code), frame.f_lasti)
        elif first is not None:
            break
        frame = frame.f_back
    if first is None:
        return Site("<unknown>", 0, "")
    key = tuple(place)
    found = _known.get(key)
    if found is None:
        found = _read(first, len(key) // 2)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = found
    return found[0]


def forget_sites() -> None:
    """Clear the cache: the working directory or a source file may have changed."""
    _known.clear()
    _shorten.cache_clear()  # A cell that was run again has another number.


def raised_at(error: BaseException) -> Site | None:
    """Find the place in the user's code that raised an error, or called what did."""
    raised = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in raised if owner(frame.filename) == "user"]
    return site_of(frames[::-1]) if frames else None


def is_of_user(error: BaseException) -> bool:
    """Whether an error came from the user's code rather than m2flow's; a library counts as whoever called it."""
    frames = traceback.extract_tb(error.__traceback__)
    owners = ["library" if frame.filename == _DATA else owner(frame.filename) for frame in frames]
    return next((whose for whose in reversed(owners) if whose != "library"), "") == "user"


@functools.lru_cache(maxsize=4096)
def owner(filename: str) -> Literal["m2flow", "library", "user"]:
    """Whose code a file contains: the user's, m2flow's or a library's."""
    if filename.startswith(_PACKAGE):
        return "user" if filename.startswith(_FLOWS) else "m2flow"
    is_librarys = filename.startswith(_LIBRARIES) or any(folder in filename for folder in _LIBRARY_FOLDERS)
    return "library" if is_librarys else "user"


def _read(innermost: FrameType, count: int) -> tuple[Site, list[CodeType]]:
    frames: list[tuple[str, int, str]] = []
    codes: list[CodeType] = []
    frame: FrameType | None = innermost
    for _ in range(count):
        assert frame is not None
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        codes.append(frame.f_code)
        frame = frame.f_back
    return site_of(frames), codes


def site_of(frames: list[tuple[str, int, str]]) -> Site:
    """Make a site from (file, line, function) frames, innermost first."""
    (filename, line, _), *outer = frames
    here = os.getcwd()
    path = tuple(f"{_shorten(f, here)}:{n} in {name}" for f, n, name in reversed(outer) if name != "<module>")
    return Site(_shorten(filename, here), line, linecache.getline(filename, line).strip(), path)


def shown_file(filename: str) -> str:
    """A file's name as sites show it: relative to the working directory if it is below that, or `In[3]` for a notebook's cell."""
    return _shorten(filename, os.getcwd())


def _cell_of(filename: str) -> str:
    """The name of the notebook's cell that IPython compiled under this file name; empty if it is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(filename)
    return "" if number is None else f"In[{number}]"


@functools.lru_cache(maxsize=4096)
def _shorten(filename: str, here: str) -> str:
    cell = _cell_of(filename)
    if cell:
        return cell
    path = Path(filename)
    try:
        return str(path.resolve().relative_to(here))
    except ValueError:
        return str(path)
