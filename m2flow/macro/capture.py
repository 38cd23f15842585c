"""What a call takes is taken as it is then: functions are snapshot with all that they capture, containers are copied.

    function --Captures.take--> Snapshot (bytes) --called, here or on a worker--> a copy of the function

So a value that changes after the call changes nothing, late binding in a loop gives what each turn had, and what a function changes
in its own captures stays in its copy. A function that captures only what can't change has one copy a process, and its snapshot is
made once; any other gets a copy for each unit that it is run on, so that no chunking shows in what it gives. Limits: above
`LARGE_BYTES` one copy serves a whole task; a module is no capture: each process has its own, and what is there is shared by all calls.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

import cloudpickle
import numpy as np

from m2flow.errors import LostState, OpError, TraceError
from m2flow.macro.closures import fixed_leaves, is_importable, is_same, is_users, kept_state, parts
from m2flow.macro.graph import Site

LARGE_BYTES = 65_536
"""Size of a snapshot above which a copy for each unit would cost more than most units do: some 300 microseconds at this size."""
_PLAIN = frozenset({str, int, float, bool, type(None)})
_NUM_KEPT = 256
_DEEPEST = 12

_LOCKS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.Barrier,
)
_Files = io.TextIOWrapper | io.BufferedReader | io.BufferedWriter | io.BufferedRandom | io.FileIO


@final
class Snapshot:
    """A function as it was when a call took it. Calling it calls a copy."""

    def __init__(self, name: str, qualname: str, body: bytes, is_fixed: bool) -> None:  # positional, as it is pickled
        self.__name__ = name
        self.__qualname__ = qualname
        self.body = body
        self.is_fixed = is_fixed
        self._copy: Callable[..., object] | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.fresh()(*args, **kwargs)

    def fresh(self) -> Callable[..., object]:
        """The function, in the state of the snapshot."""
        if self.is_fixed:
            return _loaded(self.body)
        if len(self.body) <= LARGE_BYTES:
            return _load(self.body)
        self._copy = self._copy or _load(self.body)
        return self._copy

    def __reduce__(self) -> tuple[object, ...]:
        return Snapshot, (self.__name__, self.__qualname__, self.body, self.is_fixed)

    def __repr__(self) -> str:
        return f"<{self.__qualname__} as it was when the call took it>"


class Captures:
    """Takes what the calls of one session are given."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[object], Snapshot]] = {}
        """By the ids of the code in it: the last snapshot that can be used again, and what was captured."""
        self._inert: set[type] = set()
        """Classes whose instances are neither functions nor containers."""
        self._looked_at: set[types.CodeType | type] = set()
        """Of functions whose captures can change."""
        self._lost: list[tuple[str, dict[str, str], Site]] = []
        """Functions that keep something in their captures, and nobody was told so yet."""

    def options(self, options: Mapping[str, object], site: Site) -> dict[str, object]:
        """The options of a call, so that nothing that is done to them later reaches it.

        Raises:
            TraceError: a function captures something that can't be snapshot; it is named.
        """
        taken = {name: value if type(value) in _PLAIN else self.take(value, site) for name, value in options.items()}
        function = taken.get("function")
        if isinstance(function, Snapshot) and not function.is_fixed and "instance" not in options:
            self._look_at(options["function"], site)
        return taken

    def _look_at(self, function: object, site: Site) -> None:
        """Note what a function keeps in its captures; once."""
        inner = getattr(function, "__func__", function)
        what = inner.__code__ if isinstance(inner, types.FunctionType) else type(function)
        if what not in self._looked_at:
            self._looked_at.add(what)
            if kept := kept_state(function):
                self._lost.append((_names(function)[1], kept, site))

    def warn(self) -> None:
        """Name what functions keep where it is lost."""
        lost, self._lost = self._lost, []
        for name, kept, site in lost:
            for what, by in kept.items():
                who = f"`{name}`" if by == name else f"`{by}`, which `{name}` calls,"
                said = (
                    f"{who} changes `{what}`, which is a copy: a call takes what its function captures as it is then, and what the "
                    "function puts there is gone afterwards. Keep state in a Role, whose object lives as long as the run"
                )
                warnings.warn_explicit(said, LostState, site.file, site.line)

    def take(self, value: object, site: Site) -> object:
        """One option: functions in it as snapshots, containers copied, all else as it is."""
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value, site)  # type: ignore[arg-type]
        if kind in self._inert:
            return value
        match value:
            case Snapshot() | type() | str() | int() | float() | None:
                return value
            case dict() if type(value) is dict:
                return {key: item if type(item) in _PLAIN else self.take(item, site) for key, item in value.items()}
            case list() | tuple() if type(value) in (list, tuple):
                return type(value)([item if type(item) in _PLAIN else self.take(item, site) for item in value])
            case set() | bytearray() | np.ndarray():
                return copy.deepcopy(value)
        names = fields_of(kind)  # type: ignore[arg-type]  # mypy takes the hash of a class for that of its instances
        if names is not None:
            held = ((name, getattr(value, name)) for name in names)
            changed = {name: taken for name, item in held if callable(item) and (taken := self.take(item, site)) is not item}
            return dataclasses.replace(value, **changed) if changed else value  # type: ignore[type-var]
        if callable(value):
            return self._function(value, site)
        self._inert.add(kind)
        return value

    def _function(self, function: Callable[..., object], site: Site) -> Callable[..., object]:
        if isinstance(function, types.FunctionType | types.BuiltinFunctionType) and _is_librarys(function):
            return function
        leaves = fixed_leaves(function)
        if leaves is None:
            return Snapshot(*_names(function), _dumped(function, site), is_fixed=False)
        code = tuple([id(leaf) for leaf in leaves if isinstance(leaf, types.CodeType | type)])
        known = self._known.get(code)
        if known is not None and is_same(known[0], leaves):
            return known[1]
        taken = Snapshot(*_names(function), _dumped(function, site), is_fixed=True)
        self._known.pop(code, None)
        self._known[code] = (leaves, taken)
        if len(self._known) > _NUM_KEPT:
            del self._known[next(iter(self._known))]
        return taken


@functools.lru_cache(maxsize=1024)
def fields_of(kind: type) -> tuple[str, ...] | None:
    """What an instance of m2flow's own dataclass is made of; None for all other classes."""
    if not dataclasses.is_dataclass(kind) or not kind.__module__.startswith("m2flow."):
        return None
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """As cloudpickle does it, but for the user's functions, which go by value with what they read; caches, which go empty; and open
    files, which it would read to their end."""

    def __init__(self, file: io.BytesIO, *, by_value: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._by_value = by_value

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Files) and obj not in (sys.stdout, sys.stderr):
            raise pickle.PicklingError("an open file")
        if isinstance(obj, functools._lru_cache_wrapper):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if self._by_value and isinstance(obj, types.FunctionType) and is_users(obj):
            return self._dynamic_function_reduce(obj)
        return super().reducer_override(obj)


def _cached(function: Callable[..., object], parameters: Mapping[str, Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _pickled(value: object, *, by_value: bool) -> bytes:
    file = io.BytesIO()
    _Pickler(file, by_value=by_value).dump(value)
    return file.getvalue()


def _dumped(function: Callable[..., object], site: Site) -> bytes:
    """The bytes of a function. One that workers can import goes by its name if its module's globals can't be snapshot."""
    error: Exception | None = None
    for by_value in (True, False):
        try:
            return _pickled(function, by_value=by_value)
        except Exception as raised:  # Any class may raise what it likes when it is pickled.
            error = raised
    path, part = _culprit(function)
    what, now = _kind(part) or (f"a {type(part).__name__}, which can't be pickled: {error}", "")
    name = _names(function)[1]
    raise TraceError(
        f"`{name}` captures `{path}`, {what}" if path else f"`{name}` is {what}",
        where=site.describe(),
        now=now or "Make it inside the function, or in a module of its own that the function imports.",
    ) from error


def _culprit(value: object, path: str = "", depth: int = 0) -> tuple[str, object]:
    """The innermost part that can't be snapshot, and how to get there."""
    if depth < _DEEPEST and _kind(value) is None:
        for name, part in parts(value):
            if not _can_be_taken(part):
                start = f"self{name}" if not path and name.startswith(".") else f"{path}{name}"
                if path and not name.startswith((".", "[")):
                    start = name  # A function's own capture: its name says enough.
                return _culprit(part, start, depth + 1)
    return path, value


def _can_be_taken(value: object) -> bool:
    try:
        _pickled(value, by_value=False)
    except Exception:
        return False
    return True


def _kind(value: object) -> tuple[str, str] | None:
    """What it is in words, and what to do about it, of the things that people capture by accident."""
    inside = "Make it inside the function, or in a module of its own that the function imports."
    if type(value).__module__.startswith("m2flow.macro.") and any(hasattr(value, held) for held in ("_session", "_of", "backend")):
        return (
            f"a {type(value).__name__} of the flow",
            "Pass a handle to the call as an input, or look at it first: float(number), list(rows).",
        )
    kinds: list[tuple[type | types.UnionType | tuple[type, ...], str, str]] = [
        (types.GeneratorType, "a generator", "Pass a list of what it gives."),
        (types.AsyncGeneratorType | types.CoroutineType, "a coroutine", "Await it inside the function."),
        (_Files, "an open file", "Open it inside the function; or read it before the call and capture what was in it."),
        (socket.socket, "a socket", "Connect inside the function."),
        (threading.Thread, "a thread", inside),
        (_LOCKS, "a lock", inside),
    ]
    return next(((what, now) for kind, what, now in kinds if isinstance(value, kind)), None)


def _is_librarys(function: types.FunctionType | types.BuiltinFunctionType) -> bool:
    """Whether every process has the same function under its name, and nothing of the user's is in it."""
    if isinstance(function, types.BuiltinFunctionType):
        return isinstance(function.__self__, types.ModuleType)
    return not is_users(function) and is_importable(function)


def _names(function: object) -> tuple[str, str]:
    """Its name and its qualified name, without what only Python's own errors need."""
    name = getattr(function, "__name__", None) or type(function).__name__
    qualname = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name), str(qualname).replace("<locals>.", "")


def _load(body: bytes) -> Callable[..., object]:
    try:
        function: Callable[..., object] = pickle.loads(body)
    except Exception as error:
        raise OpError(
            f"a function can't be rebuilt from its snapshot: {error!r}", now="A class of the user's pickles itself wrongly."
        ) from error
    return function


_loaded = functools.lru_cache(maxsize=64)(_load)


def forget_copies() -> None:
    """Have the next run in this process begin with copies of its own: what a function has cached belongs to the run that is over."""
    _loaded.cache_clear()
