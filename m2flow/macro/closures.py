"""What a function reaches: its closure's cells, the globals that it reads, its defaults; by name, and whether any of it can change.

    limit, ANSWERS = 20, {...}
    lambda s: s.text in ANSWERS and s.length > limit   ->   ANSWERS (can change), limit (can't)

Read off the code object, so a name that is only an attribute is no global. Limit: what code reaches by `globals()`, `eval` or
`importlib` is not seen.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import enum
import functools
import linecache
import random
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from m2flow.macro.sites import owner

EMPTY = object()
"""Stands for a cell that nothing is in yet."""

_ATOMS = frozenset({int, float, complex, str, bytes, bool, type(None), type(...), type(NotImplemented), range, re.Pattern})


@dataclass(frozen=True)
class Facts:
    """What a code object does with names from outside."""

    globals: tuple[str, ...]
    """Read, by it or by functions inside it."""
    rebinds: bool
    """It may change what it captures without a mutable object being there: a `global` or `nonlocal` that it sets, or an attribute."""


_MOST_KNOWN = 4096
_known: dict[int, tuple[types.CodeType, Facts]] = {}
"""By the id of a code object, which is held so that no id is given anew: its hash would be made of all its names and constants."""


def facts(code: types.CodeType) -> Facts:
    """What a code object does with names from outside; read once."""
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
    """Whether another process finds this under its name."""
    found: object = sys.modules.get(value.__module__) if value.__module__ != "__main__" else None
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def is_users(function: types.FunctionType) -> bool:
    """Whether it stands in the user's own code, and not in a library's."""
    return owner(function.__code__.co_filename) == "user"


def parts(value: object) -> Iterator[tuple[str, object]]:
    """What a value is made of, each with its name as the user would write it after the value's own."""
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
    """Cells, globals that are read, and defaults, by name."""
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
    """All that a function captures, if nothing of it can change; None if something can.

    Two functions of one code with the same leaves do the same. A function that is cached (`functools.cache`) counts as pure.
    """
    leaves: list[object] = []
    return leaves if _gather(function, leaves, set()) else None


def is_same(leaves: list[object], others: list[object]) -> bool:
    if len(leaves) != len(others):
        return False
    for a, b in zip(leaves, others, strict=True):
        if a is not b and not (type(a) is type(b) and type(a) in (int, str, bytes) and a == b):
            return False
    return True


class Watch:
    """Where the parts of a function are that could be exchanged, none of which can change in itself."""

    __slots__ = ("_cells", "_functions", "_globals")

    def __init__(self) -> None:
        self._functions: list[tuple[types.FunctionType, types.CodeType, tuple[object, ...] | None]] = []
        self._globals: list[tuple[dict[str, object], str, object]] = []
        self._cells: list[tuple[types.CellType, object]] = []

    def holds(self) -> bool:
        """Whether each is what it was."""
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


def watch(function: types.FunctionType) -> Watch | None:
    """A watch on a function that captures nothing which can change; None if it does, or that is not certain."""
    found = Watch()
    return found if fixed_leaves(function) is not None and found.add(function) else None


def _gather(value: object, leaves: list[object], seen: set[int]) -> bool:
    """Add the leaves of a value; False as soon as one can change."""
    if type(value) in _ATOMS or value is EMPTY:
        leaves.append(value)
        return True
    if id(value) in seen:
        return True
    match value:
        case types.FunctionType():
            return _gather_function(value, leaves, seen)
        case tuple() | frozenset() if type(value) in (tuple, frozenset):
            leaves.append(len(value))
            return _all(value, leaves, seen)
        case functools._lru_cache_wrapper():
            leaves.append(value)
            return _gather(value.__wrapped__, leaves, seen)
        case functools.partial():
            leaves.append(tuple(value.keywords))
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
        return _all(vars(value).values(), leaves, seen) if hasattr(value, "__dict__") else False
    return False


def _gather_function(function: types.FunctionType, leaves: list[object], seen: set[int]) -> bool:
    leaves.append(function.__code__)
    if not is_users(function) and is_importable(function):
        return True
    seen.add(id(function))
    if (function.__dict__ and function.__dict__.keys() != {"__wrapped__"}) or facts(function.__code__).rebinds:
        return False
    return _all((part for _, part in captures(function)), leaves, seen)


def _all(values: Iterable[object], leaves: list[object], seen: set[int]) -> bool:
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
    """What a function keeps in its captures, as far as its source shows it: name -> the function that changes it, which it may call.

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
    """Whether a class of the user's made it."""
    module = sys.modules.get(type(value).__module__)
    return not isinstance(value, type) and (module is None or owner(getattr(module, "__file__", None) or "<string>") == "user")


def _changed(function: types.FunctionType, captured: dict[str, object]) -> Iterator[str]:
    """The names of what a function of the user's changes that it has captured."""
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
    """What a function was compiled from; None where that is not to be had."""
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
