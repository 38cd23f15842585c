"""Freeze what a call is given at the moment it is made: functions with all that they reach, containers as copies, values as fingerprints.

    limit, ANSWERS = 20, {...}
    lambda s: s.text in ANSWERS and s.length > limit   ->   ANSWERS (can change), limit (can't)

    function --Captures.take--> Snapshot (bytes) --called, here or on a worker--> a copy of the function
    Session.record --Kinds.of--> CallKind, options

Captures. What a function captures is read off its code object, so a name that is only an attribute is no global. Limit: what code
reaches by `globals()`, `eval` or `importlib` is not seen.

Snapshots. A value that changes after the call changes nothing, late binding in a loop gives what each iteration had, and what a function
changes in its own captures stays in its copy. A function that captures only what can't change has one copy in each process, and its
snapshot is made once; any other gets a copy for each unit that it is run on, so that no chunking shows in its results. Limits: above
`LARGE_BYTES` one copy serves a whole task; a module is no capture: each process has its own, shared by all calls.

Kinds. Two calls are of one kind if the same instruction of the program made them, on inputs of the same names, with options that a
snapshot would find the same: numbers of one type and value, the same functions, in whose captures nothing has changed. The options of
such a call are not taken again, and what others derive from a kind (its bytes for the workers, the number of its shape) is made once.
What is new with each call (a dataset's rows, versions) is `CHANGING`, and belongs to no kind.

Fingerprints (`stable_text`). Numbers of equal value give equal text, rows go by a checksum, functions by their bytecode: never by an
address, nor by the lines where they stand. Limits: what a function calls may change unseen, and so may an object's inside; of a function
with large captures only the name counts.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import dis
import enum
import functools
import hashlib
import io
import linecache
import pickle
import random
import re
import socket
import sys
import threading
import types
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, final

import cloudpickle
import numpy as np

from m2flow.errors import LostState, OpError, TraceError
from m2flow.macro.graph import CallKind, EngineKind, Granularity, Site, owner
from m2flow.samples import Batch, Ragged

# ---- what a function captures

EMPTY = object()
"""Stands for an empty cell."""


@final
class _Shape(str):
    """Stands among leaves for how those after it belong together: the same leaves may be of values that are put together otherwise."""

    __slots__ = ()


_ATOMS = frozenset({int, float, complex, str, bytes, bool, type(None), type(...), type(NotImplemented), range, re.Pattern})


@dataclass(frozen=True)
class Facts:
    """The outer names that a code object uses."""

    globals: tuple[str, ...]
    """Read, by it or by functions inside it."""
    rebinds: bool
    """It may change what it captures without a mutable object being there: a `global` or `nonlocal` that it sets, or an attribute."""


_MOST_KNOWN = 4096
_known: dict[int, tuple[types.CodeType, Facts]] = {}
"""By the id of a code object, which is held so that no id is given anew: its hash would be made of all its names and constants."""


def facts(code: types.CodeType) -> Facts:
    """Read which outer names a code object uses; cached."""
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[id(code)] = code, _facts(code)
    return known[1]


def _facts(code: types.CodeType) -> Facts:
    names: dict[str, None] = {}
    rebinds = False
    for one in _nested(code):
        for step in dis.get_instructions(one):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names[str(step.argval)] = None
            elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"):
                rebinds = True
            elif step.opname in ("STORE_DEREF", "DELETE_DEREF"):
                rebinds |= step.argval in code.co_freevars
    return Facts(tuple(names), rebinds)


def is_importable(value: types.FunctionType | type) -> bool:
    """Whether another process can import this by its name."""
    found: object = sys.modules.get(value.__module__) if value.__module__ != "__main__" else None
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def is_users(function: types.FunctionType) -> bool:
    """Whether a function is in the user's own code, and not in a library's."""
    return owner(function.__code__.co_filename) == "user"


def parts(value: object) -> Iterator[tuple[str, object]]:
    """The parts of a value, each with its name as the user would write it after the value's own."""
    match value:
        case types.FunctionType():
            yield from captures(value)
        case types.MethodType():
            yield "self", value.__self__
            yield from parts(value.__func__)
        case functools.partial():
            yield from parts(value.func)
            yield from ((f"[{i}]", item) for i, item in enumerate(value.args))
            yield from value.keywords.items()
        case functools._lru_cache_wrapper():
            yield from parts(value.__wrapped__)
        case dict():
            yield from ((f"[{key!r:.40}]", item) for key, item in value.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"[{i}]", item) for i, item in enumerate(value))
        case _:
            yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items() if not isinstance(value, type))


def captures(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """A function's captures by name: cells, globals that it reads, and defaults."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            yield name, EMPTY
    yield from ((name, function.__globals__[name]) for name in facts(code).globals if name in function.__globals__)
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def fixed_leaves(function: object) -> list[object] | None:
    """Collect all that a function captures, if it is immutable; None if any of it can change.

    Two functions of one code with the same leaves do the same. A function that is cached (`functools.cache`) counts as pure.
    """
    leaves: list[object] = []
    return leaves if _gather(function, leaves, {}) else None


def is_same(leaves: list[object], others: list[object]) -> bool:
    if len(leaves) != len(others):
        return False
    for a, b in zip(leaves, others, strict=True):
        if a is not b and not (type(a) is type(b) and type(a) in _BY_VALUE and a == b):
            return False
    return True


_BY_VALUE = frozenset({int, str, bytes, _Shape})


_PURE_MODULES = frozenset({"math", "string", "itertools", "functools", "operator", "re", "json", "fractions"})
"""What these compute goes by their arguments alone. (`decimal` goes by a context, which holds a precision.)"""
_REACHING_OUT = frozenset(
    {"open", "input", "print", "exec", "eval", "compile", "globals", "vars", "setattr", "delattr", "__import__", "breakpoint"}
)
"""Built-in functions of which the same cannot be said."""


def pure_leaves(function: object) -> list[object] | None:
    """Collect all that a function captures, if what it returns can depend on that and its arguments alone; None where that is not certain.

    It calls the user's functions, built-in ones that read and write nothing, and methods of what it is given: no other library, and no
    class of the user's.
    """
    leaves = fixed_leaves(function)
    return leaves if leaves is not None and all(map(_is_pure, leaves)) else None


def _is_pure(leaf: object) -> bool:
    match leaf:
        case types.CodeType():
            is_known = _REACHING_OUT.isdisjoint(facts(leaf).globals) and owner(leaf.co_filename) == "user"
            return is_known and not any(_reaches_out(step) for code in _nested(leaf) for step in dis.get_instructions(code))
        case types.ModuleType():
            return leaf.__name__ in _PURE_MODULES
        case types.BuiltinFunctionType():
            return _is_of_pure(leaf.__module__) and leaf.__name__ not in _REACHING_OUT
        case type():
            return _is_of_pure(leaf.__module__)
    return type(leaf) in _ATOMS or type(leaf) is _Shape or leaf is EMPTY


def _is_of_pure(module: str | None) -> bool:
    return module == "builtins" or module in _PURE_MODULES


def _reaches_out(step: dis.Instruction) -> bool:
    """Whether an instruction imports, or reads an attribute that leads to another module (`json.codecs`) or to what an object is made of:
    `rng.__dict__` outlasts a row.
    """
    name = step.argval if isinstance(step.argval, str) else ""
    if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return (name.startswith("__") and name.endswith("__")) or name in _modules_of_pure_ones()
    return step.opname == "IMPORT_NAME"


@functools.cache
def _modules_of_pure_ones() -> frozenset[str]:
    """Names by which pure modules have others, which need not be pure."""
    modules = (sys.modules[name] for name in _PURE_MODULES if name in sys.modules)
    return frozenset(name for module in modules for name, value in vars(module).items() if isinstance(value, types.ModuleType))


def are_alike(leaves: list[object], others: list[object]) -> bool:
    """Whether two functions of these leaves do the same, though one may be of a file that was loaded again: code counts by its text."""
    if len(leaves) != len(others):
        return False
    by_value = _BY_VALUE | {types.CodeType}
    return all(a is b or (type(a) is type(b) and type(a) in by_value and a == b) for a, b in zip(leaves, others, strict=True))


class CaptureGuards:
    """Detect that a captured part of a function was rebound; the parts themselves are immutable."""

    __slots__ = ("_cells", "_functions", "_globals")

    def __init__(self) -> None:
        self._functions: list[tuple[types.FunctionType, types.CodeType, tuple[object, ...] | None]] = []
        self._globals: list[tuple[dict[str, object], str, object]] = []
        self._cells: list[tuple[types.CellType, object]] = []

    def holds(self) -> bool:
        """Whether every part is still the same object."""
        for function, code, defaults in self._functions:
            if function.__code__ is not code or function.__defaults__ is not defaults or function.__kwdefaults__ or function.__dict__:
                return False
        for scope, name, value in self._globals:
            if scope.get(name, EMPTY) is not value:
                return False
        for cell, value in self._cells:  # noqa: SIM110  # each call of the program comes by here
            if cell.cell_contents is not value:
                return False
        return True

    def add(self, value: object) -> bool:
        """Watch a value and what it reaches; False if that is not possible, or some of it can change."""
        kind = type(value)
        if kind in _ATOMS or isinstance(value, enum.Enum | np.generic | types.ModuleType):
            return True
        if kind in (tuple, frozenset):
            return all(map(self.add, value))  # type: ignore[call-overload]
        if isinstance(value, types.BuiltinFunctionType):
            return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
        if isinstance(value, type):
            return is_importable(value)
        if not isinstance(value, types.FunctionType) or any(function is value for function, _, _ in self._functions):
            return isinstance(value, types.FunctionType)
        if value.__kwdefaults__ or value.__dict__:
            return False
        self._functions.append((value, value.__code__, value.__defaults__))
        if not is_users(value) and is_importable(value):
            return True
        try:
            self._cells += [(cell, cell.cell_contents) for cell in value.__closure__ or ()]
        except ValueError:  # Nothing is in it yet.
            return False
        names = facts(value.__code__).globals
        self._globals += [(value.__globals__, name, value.__globals__.get(name, EMPTY)) for name in names]
        return not facts(value.__code__).rebinds and all(self.add(part) for _, part in captures(value))


def capture_guards(function: types.FunctionType) -> CaptureGuards | None:
    """Make the guards of a function that captures nothing which can change; None if it does, or that is not certain."""
    found = CaptureGuards()
    return found if fixed_leaves(function) is not None and found.add(function) else None


def _gather(value: object, leaves: list[object], seen: dict[int, int]) -> bool:
    """Add the leaves of a value; False as soon as one can change. `seen` are functions, in the order in which they were met."""
    if type(value) in _ATOMS or value is EMPTY:
        leaves.append(value)
        return True
    if id(value) in seen:
        leaves.append(_Shape(f"function {seen[id(value)]}"))
        return True
    match value:
        case types.FunctionType():
            return _gather_function(value, leaves, seen)
        case tuple() | frozenset() if type(value) in (tuple, frozenset):
            leaves.append(_Shape(f"{type(value).__name__} of {len(value)}"))
            return _all(value, leaves, seen)
        case functools._lru_cache_wrapper():
            leaves.append(value)
            return _gather(value.__wrapped__, leaves, seen)
        case functools.partial():
            leaves.append(_Shape(f"partial of {len(value.args)} {','.join(value.keywords)}"))
            return not value.__dict__ and _all((value.func, *value.args, *value.keywords.values()), leaves, seen)
        case types.BuiltinFunctionType():
            leaves.append(value)
            return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
        case types.ModuleType():
            leaves.append(value)
            return sys.modules.get(value.__name__) is value
        case type():
            leaves.append(value)
            return is_importable(value)
        case enum.Enum():
            leaves.append(value)
            return is_importable(type(value))
        case np.generic():
            leaves.append(value)
            return True
    if type(value).__module__.startswith("m2flow.") and is_importable(type(value)):
        leaves.append(type(value))
        if not hasattr(value, "__dict__"):
            return False
        leaves.append(_Shape(",".join(vars(value))))
        return _all(vars(value).values(), leaves, seen)
    return False


def _gather_function(function: types.FunctionType, leaves: list[object], seen: dict[int, int]) -> bool:
    leaves.append(function.__code__)
    if not is_users(function) and is_importable(function):
        return True
    seen[id(function)] = len(seen)
    if (function.__dict__ and function.__dict__.keys() != {"__wrapped__"}) or facts(function.__code__).rebinds:
        return False
    found = list(captures(function))
    leaves.append(_Shape(",".join([name for name, _ in found])))
    return _all((part for _, part in found), leaves, seen)


def _all(values: Iterable[object], leaves: list[object], seen: dict[int, int]) -> bool:
    for value in values:  # A loop, since every call of the program comes by here.
        if type(value) in _ATOMS:
            leaves.append(value)
        elif not _gather(value, leaves, seen):
            return False
    return True


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


_MUTATORS = frozenset(
    {
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "extendleft",
        "insert",
        "move_to_end",
        "pop",
        "popitem",
        "popleft",
        "put",
        "remove",
        "setdefault",
        "subtract",
        "update",
    }
)
"""Methods of containers that change them."""
_STATEFUL = (random.Random, np.random.Generator, np.random.RandomState)
"""What changes with each of its methods that is called."""


def kept_state(function: object) -> dict[str, str]:
    """Find state that a function stores in its captures, as far as its source shows it: name -> the function that changes it.

    Sees a name that is set (`global`, `nonlocal`), an item or an attribute that is, and methods that change a container, a generator
    of random numbers, or an object of the user's that sets attributes in them. Limit: not what happens under another name.
    """
    found: dict[str, str] = {}
    _add_kept(function, found, set())
    return found


def _add_kept(value: object, found: dict[str, str], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        if is_users(value):
            captured = dict(captures(value))
            found.update(dict.fromkeys(_changed(value, captured), value.__qualname__.replace("<locals>.", "")))
            for part in captured.values():
                if isinstance(part, types.FunctionType | functools.partial | types.MethodType):
                    _add_kept(part, found, seen)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _add_kept(part, found, seen)
    elif isinstance(value, types.MethodType) or _is_users_object(value):
        called = value.__func__ if isinstance(value, types.MethodType) else getattr(type(value), "__call__", None)  # noqa: B004
        if isinstance(called, types.FunctionType) and is_users(called):
            me = called.__code__.co_varnames[0] if called.__code__.co_argcount else ""
            by = called.__qualname__.replace("<locals>.", "")
            found.update({f"{name}'s object": by for name in _changed(called, {me: value})})
            _add_kept(called, found, seen)
        for _, part in parts(value):
            if isinstance(part, types.FunctionType):
                _add_kept(part, found, seen)


def _is_users_object(value: object) -> bool:
    """Whether a value is an instance of a user's class."""
    module = sys.modules.get(type(value).__module__)
    return not isinstance(value, type) and (module is None or owner(getattr(module, "__file__", None) or "<string>") == "user")


def _changed(function: types.FunctionType, captured: dict[str, object]) -> Iterator[str]:
    """The names of captures that a user's function changes."""
    node = _source(function.__code__)
    if node is None:
        return
    outer = {name for one in ast.walk(node) if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    outer -= set(function.__code__.co_cellvars)  # A function inside sets what is this one's own.
    for one in ast.walk(node):
        match one:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if name in outer:
                yield name
            case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
                name = _root(one)
                if name in captured and not isinstance(captured[name], types.ModuleType | type):
                    yield name
            case ast.Call(func=ast.Attribute(value=held, attr=method)):
                name = _root(held)
                if name in captured and _changes(captured[name], method, is_direct=isinstance(held, ast.Name)):
                    yield name
            case ast.Call(func=ast.Name(id="next"), args=[ast.Name(id=name), *_]) if name in captured:
                yield name


def _changes(value: object, method: str, *, is_direct: bool) -> bool:
    """Whether a method that is called on a value, or on a part of it, changes it."""
    if isinstance(value, types.ModuleType | type):
        return False
    if isinstance(value, _STATEFUL):
        return True
    called = getattr(type(value), method, None)
    if is_direct and isinstance(called, types.FunctionType) and is_users(called):
        return facts(called.__code__).rebinds
    return method in _MUTATORS and not isinstance(value, str | bytes | frozenset | types.FunctionType)


def _root(node: ast.expr) -> str:
    """The name that an expression of items and attributes begins with; empty where it begins with none."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _source(code: types.CodeType) -> ast.AST | None:
    """The syntax tree of a code object; None if its source is not available."""
    return _functions_of(code.co_filename).get((code.co_name, code.co_firstlineno))


@functools.lru_cache(maxsize=64)
def _functions_of(filename: str) -> dict[tuple[str, int], ast.AST]:
    """The functions of a file, by name and first line; of several lambdas on a line the first."""
    found: dict[tuple[str, int], ast.AST] = {}
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse("".join(linecache.getlines(filename)))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])] = node
            elif isinstance(node, ast.Lambda):
                found.setdefault(("<lambda>", node.lineno), node)
    return found


# ---- snapshots

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
    """Snapshot the options of one session's calls."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[object], Snapshot]] = {}
        """Ids of the code in a function -> the last reusable snapshot, and what it captured."""
        self._inert: set[type] = set()
        """Classes whose instances are neither functions nor containers."""
        self._looked_at: set[types.CodeType | type] = set()
        """Code and classes already checked for stored state; only functions whose captures can change are checked."""
        self._lost: list[tuple[str, dict[str, str], Site]] = []
        """Functions that store state in their captures, and that no warning has named yet."""

    def options(self, options: Mapping[str, object], site: Site) -> dict[str, object]:
        """The options of a call, so that nothing that is done to them later reaches it.

        Raises:
            TraceError: a function captures something that can't be snapshot; it is named.
        """
        taken = {name: value if type(value) in _PLAIN else self.take(value, site) for name, value in options.items()}
        function = _inner(taken.get("function"))
        if isinstance(function, Snapshot) and not function.is_fixed and "instance" not in options:
            self._look_at(_inner(options["function"]), site)
        return taken

    def _look_at(self, function: object, site: Site) -> None:
        """Note once what state a function stores in its captures."""
        inner = getattr(function, "__func__", function)
        what = inner.__code__ if isinstance(inner, types.FunctionType) else type(function)
        if what not in self._looked_at:
            self._looked_at.add(what)
            if kept := kept_state(function):
                self._lost.append((_names(function)[1], kept, site))

    def warn(self) -> None:
        """Warn of state that functions store where it is lost."""
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
    """The fields of one of m2flow's own dataclasses; None for all other classes."""
    if not dataclasses.is_dataclass(kind) or not kind.__module__.startswith("m2flow."):
        return None
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def _inner(function: object) -> object:
    """The user's function in one of m2flow's own that calls it on a column or a group; any other as it is."""
    kind: type = type(function)
    return _inner(function.function) if "function" in (fields_of(kind) or ()) else function  # type: ignore[attr-defined]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickle as cloudpickle does, except for the user's functions, which go by value with what they read; caches, which go empty; and open
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
    """Find the innermost part that can't be snapshot, and the path to it."""
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
    """Describe a thing that people capture by accident, and say what to do about it."""
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
    """Drop copies of functions, so that the next run in this process makes its own: what they cached belongs to the run that is over."""
    _loaded.cache_clear()


# ---- kinds of calls

CHANGING = frozenset({"rows", "cursor", "repeat", "windows", "carries_from", "num_carried", "updates_since", "loop_step"})
"""Options that are new with each call, and so belong to no kind."""

_CONSTANTS = frozenset({str, int, bool, bytes, type(None)})


@final
class _Known:
    """The last call made at a place of the program: its options as given, and the kind made of them."""

    __slots__ = ("given", "guards", "kind", "site")

    def __init__(self, kind: CallKind, site: Site, given: dict[str, object], guards: dict[str, CaptureGuards]) -> None:
        self.kind = kind
        self.site = site
        """Kept alive, so that its id is not reused."""
        self.given = given
        """The options as they came, without the changing ones."""
        self.guards = guards
        """Watches on the functions among the options."""

    def is_given(self, options: Mapping[str, object]) -> bool:
        """Whether a call with these options is of the kind."""
        given, taken = self.given, self.kind.options
        num_changing = 0
        for name, value in options.items():
            if name in given:
                if type(value) is types.FunctionType:
                    if value is not given[name] or not (name in self.guards and self.guards[name].holds()):
                        return False
                elif value is not taken[name] and not _is_alike(value, taken[name]):
                    return False
            elif name in CHANGING:
                num_changing += 1
            else:
                return False
        return len(options) - num_changing == len(given)


@final
class Kinds:
    """Find the kind of each call of a session, by its place in the program."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._known: dict[tuple[int, str, str], _Known] = {}

    def of(
        self,
        site: Site,
        role: str,
        method: str,
        engine: EngineKind,
        granularity: Granularity,
        inputs: tuple[str, ...],
        options: Mapping[str, object],
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        is_aligned: bool,
    ) -> tuple[CallKind, Mapping[str, object]]:
        """Return the kind of a call that is about to be made, and the snapshot of its options.

        Raises:
            TraceError: a function captures something that can't be snapshot; it is named.
        """
        key = id(site), role, method
        known = self._known.get(key)
        if known is not None:
            kind = known.kind
            is_same = kind.granularity is granularity and kind.inputs == inputs and kind.reads == reads and kind.writes == writes
            if not is_same or kind.engine != engine or kind.is_aligned is not is_aligned:
                known = None
            elif known.is_given(options):
                if len(kind.options) == len(options):
                    return kind, kind.options
                return kind, {**kind.options, **{name: value for name, value in options.items() if name in CHANGING}}
        taken = self._captures.options(options, site)
        fixed = taken if CHANGING.isdisjoint(taken) else {name: value for name, value in taken.items() if name not in CHANGING}
        if known is not None and _is_alike(fixed, known.kind.options):  # A lambda is a new function each time.
            kind = known.kind
        else:
            kind = CallKind(role, method, engine, granularity, inputs, fixed, reads, writes, site, is_aligned)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        given = {name: value for name, value in options.items() if name in fixed}
        functions = {name: value for name, value in given.items() if type(value) is types.FunctionType}
        guards = {name: found for name, value in functions.items() if (found := capture_guards(value)) is not None}
        self._known[key] = _Known(kind, site, given, guards)
        return kind, taken


def _is_alike(value: object, taken: object) -> bool:
    """Whether a snapshot of a value would equal the one taken before. May return False where it would."""
    if value is taken:  # What can change is copied when it is taken.
        return True
    kind = type(value)
    if kind is not type(taken):
        return False
    if kind in _CONSTANTS:
        return value == taken
    if kind is float:
        return value == taken and (value != 0.0 or str(value) == str(taken))
    if kind is dict and not value and not taken:
        return True
    if isinstance(value, tuple | list):
        return _are_alike(value, taken)  # type: ignore[arg-type]
    if isinstance(value, dict):
        return _are_alike(value, taken) and _are_alike(value.values(), taken.values())  # type: ignore[arg-type, attr-defined]
    names = fields_of(kind)  # type: ignore[arg-type]  # mypy takes the hash of a class for that of its instances
    return names is not None and _are_alike([getattr(value, name) for name in names], [getattr(taken, name) for name in names])


def _are_alike(values: Collection[object], taken: Collection[object]) -> bool:
    if len(values) != len(taken):
        return False
    for one, other in zip(values, taken, strict=True):  # noqa: SIM110  # Not a generator: this is asked for each call that a flow makes.
        if one is not other and not _is_alike(one, other):
            return False
    return True


# ---- fingerprints


def stable_text(value: object) -> str:
    """Describe a value in text that is the same in every process: no addresses, functions by their code, rows by a checksum."""
    if isinstance(value, str | bytes | None):
        return repr(value)
    if isinstance(value, bool | int | float | np.generic):
        return format(value, ".17g") if not isinstance(value, int) or abs(value) < 1 << 53 else str(value)
    if isinstance(value, Batch):
        return f"{len(value)} rows, checksum {_checksum(value):08x}"
    if isinstance(value, type):
        return value.__qualname__
    try:
        return _text_of_hashable(value)
    except TypeError:
        return _text_of_compound(value)


@functools.lru_cache(maxsize=256)
def _text_of_hashable(value: object) -> str:
    return _text_of_compound(value)


def _text_of_compound(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{stable_text(key)}: {stable_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        items = [stable_text(item) for item in value]
        return f"[{', '.join(items if isinstance(value, list | tuple) else sorted(items))}]"
    if is_dataclass(value):
        # What an earlier release did not have is left out at its default, so that its runs can be resumed.
        known = [f for f in fields(value) if "later" not in f.metadata or getattr(value, f.name) != f.default]
        return f"{type(value).__name__}({', '.join(f'{f.name}={stable_text(getattr(value, f.name))}' for f in known)})"
    if isinstance(value, functools.partial):
        return f"partial({stable_text(value.func)}, {stable_text(value.args)}, {stable_text(value.keywords)})"
    if isinstance(value, Snapshot):
        return stable_text(value.fresh()) if len(value.body) <= LARGE_BYTES else value.__qualname__
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{getattr(value, '__name__', 'function')} (code {_code_digest(code)})"
    call = getattr(type(value).__call__, "__code__", None) if callable(value) else None
    return type(value).__qualname__ + (f" (code {_code_digest(call)})" if isinstance(call, types.CodeType) else "")


@functools.lru_cache(maxsize=1024)
def _code_digest(code: types.CodeType) -> str:
    """Digest of what a function does, without its file and lines."""
    total = hashlib.sha256(code.co_code)
    total.update(repr((code.co_names, code.co_varnames, code.co_argcount)).encode())
    for constant in code.co_consts:
        total.update((_code_digest(constant) if isinstance(constant, types.CodeType) else stable_text(constant)).encode())
    return total.hexdigest()[:12]


def _checksum(batch: Batch) -> int:
    """CRC-32 over identities and columns."""
    total = zlib.crc32(np.ascontiguousarray(batch.ids).data)
    for name, column in batch.columns.items():
        total = zlib.crc32(name.encode(), total)
        for array in (column.offsets, column.values) if isinstance(column, Ragged) else (column,):
            total = zlib.crc32(np.ascontiguousarray(array).data.cast("B") if array.size else b"", total)
    return total
