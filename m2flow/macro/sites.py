"""Where in the user's program something is: the lines that a call came from, and whose code a file is."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import Literal

from m2flow.macro.graph import Site

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = (*{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen", "<string>")


def user_site() -> Site:
    """Where the user's code is now: the innermost frame outside m2flow, and the user's frames that led there."""
    frame: FrameType | None = sys._getframe(1)
    frames: list[tuple[str, int, str]] = []
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_PACKAGE):
            frames.append((filename, frame.f_lineno, frame.f_code.co_name))
        elif frames:
            break
        frame = frame.f_back
    return _site(frames) if frames else Site("<unknown>", 0, "")


def raised_at(error: BaseException) -> Site | None:
    """Where the user's code was when it raised an error, or called what did."""
    raised = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in raised if owner(frame.filename) == "user"]
    return _site(frames[::-1]) if frames else None


def is_of_user(error: BaseException) -> bool:
    """Whether the user's code is nearer to an error than ours is; libraries between count for who called them."""
    owners = [owner(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return next((owner for owner in reversed(owners) if owner != "library"), "") == "user"


def owner(filename: str) -> Literal["m2flow", "library", "user"]:
    if filename.startswith(_PACKAGE):
        return "m2flow"
    return "library" if filename.startswith(_LIBRARIES) else "user"


def _site(frames: list[tuple[str, int, str]]) -> Site:
    """From (file, line, function), innermost first."""
    (filename, line, _), *outer = frames
    path = tuple(f"{_shorten(f)}:{n} in {name}" for f, n, name in reversed(outer) if name != "<module>")
    return Site(_shorten(filename), line, linecache.getline(filename, line).strip(), path)


def _shorten(filename: str) -> str:
    path = Path(filename)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
