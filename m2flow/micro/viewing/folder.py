"""The runs that a viewer shows: one, or those of a folder, by their names.

    folder --Folder.listed--> names and states; Folder.find(name) --> RunView

A name is looked up among the directories that are there. What a link in the folder points to outside of it is not shown.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import final

import msgspec

from m2flow.errors import SpecError
from m2flow.micro.viewing.health import State, state_of
from m2flow.micro.viewing.run_view import RunView

_MARK = "config.json"
_MOST_KEPT = 8
"""Runs whose traces are kept in memory."""


@final
class Listed(msgspec.Struct):
    """A run in the list."""

    name: str
    flow: str
    state: State
    num_bytes: int
    """Of its trace."""


@final
class Folder:
    """Several threads may ask."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: a run's directory, or one with several in it.
        Raises:
            SpecError: there is no such directory.
        """
        if not path.is_dir():
            raise SpecError(f"there is no directory {path}", now="Give a run's directory, or the one with all runs: m2flow view runs")
        self._path = path.resolve()
        self.is_one_run = (self._path / _MARK).is_file()
        self._views: dict[str, RunView] = {}
        self._lock = threading.Lock()

    def listed(self) -> list[Listed]:
        """The newest first."""
        found = []
        for name, path in self._runs().items():
            with contextlib.suppress(OSError):
                trace = path / "trace" / "spans.msgpack"
                found.append(Listed(name, _flow_of(path), state_of(path), trace.stat().st_size if trace.is_file() else 0))
        return sorted(found, key=lambda run: (run.state.began_s, run.name), reverse=True)

    def find(self, name: str) -> RunView | None:
        """A run by the name that `listed` gives."""
        path = self._runs().get(name)
        if path is None:
            return None
        with self._lock:
            view = self._views.pop(name, None) or RunView(path, name)
            self._views[name] = view
            while len(self._views) > _MOST_KEPT:
                self._views.pop(next(iter(self._views)))
        return view

    def _runs(self) -> dict[str, Path]:
        if self.is_one_run:
            return {self._path.name: self._path}
        found = {}
        for mark in self._path.glob(f"*/{_MARK}"):
            path = mark.parent.resolve()
            if path.is_relative_to(self._path):
                found[mark.parent.name] = path
        return found


def _flow_of(path: Path) -> str:
    try:
        found = msgspec.json.decode((path / _MARK).read_bytes())
        return str(found.get("flow", ""))
    except (OSError, msgspec.DecodeError, AttributeError):
        return ""
