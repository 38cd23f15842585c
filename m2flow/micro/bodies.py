"""A call as the workers get it: bytes, made when the program makes the call, so that they are a snapshot of what it was given.

    Call --call_body--> bytes --(m.Define)--> call_of --> Call

What m2flow itself put into a call is plain and is pickled as such; only what is the user's takes cloudpickle, which is ten times
slower. A dataset's rows travel as rows, and what is only for the printed form does not travel.
"""

from __future__ import annotations

import functools
import pickle
import types

import cloudpickle

from m2flow.errors import TraceError
from m2flow.macro.capture import Snapshot
from m2flow.macro.graph import Call, Effect, Granularity, Ref, Site

_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})


def call_body(call: Call) -> bytes:
    """
    Raises:
        TraceError: something in the call can't be sent to another process.
    """
    plain: dict[str, object] = {}
    by_value: dict[str, bytes] = {}
    """What is the user's, and functions that are the same for call after call."""
    try:
        for name, value in call.options.items():
            if type(value) in _ATOMS:
                plain[name] = value
            elif isinstance(value, Snapshot) and value.is_fixed:
                by_value[name] = _body_of(value)
            elif name == "rows":
                pass
            elif _is_plain(value):
                plain[name] = value
            else:
                by_value[name] = cloudpickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{call.name} can't be sent to a worker: {error}",
            where=call.site.describe(),
            now="Its function captures a lock, a file, a generator or the like. Make that inside the function.",
        ) from None
    return pickle.dumps(
        (
            (call.ordinal, call.role, call.method, call.engine, str(call.granularity)),
            [(name, ref.call) for name, ref in call.inputs],
            plain,
            by_value,
            [(effect.resource, effect.version, effect.oldest) for effect in call.reads],
            [(effect.resource, effect.version) for effect in call.writes],
            _site_body(call.site),
            call.step,
            call.is_aligned,
        ),
        pickle.HIGHEST_PROTOCOL,
    )


def _site_body(site: Site) -> bytes:
    """A line makes call after call, all with one site."""
    known = _sites.get(id(site))
    if known is None:
        if len(_sites) >= _MOST_SITES:
            _sites.clear()
        known = _sites[id(site)] = site, pickle.dumps((site.file, site.line, site.text, site.path), pickle.HIGHEST_PROTOCOL)
    return known[1]


_MOST_SITES = 4096
_sites: dict[int, tuple[Site, bytes]] = {}
"""By the id of a site, which is held so that no id is given anew: its hash would be made of all its texts."""


@functools.lru_cache(maxsize=256)
def _body_of(function: Snapshot) -> bytes:
    return pickle.dumps(function, pickle.HIGHEST_PROTOCOL)


def call_of(body: bytes) -> Call:
    """The call that `call_body` wrote; its functions are new ones each time, with captures of their own."""
    (ordinal, role, method, engine, granularity), inputs, plain, by_value, reads, writes, site, step, is_aligned = pickle.loads(body)
    return Call(
        ordinal=ordinal,
        role=role,
        method=method,
        engine=engine,
        granularity=Granularity(granularity),
        inputs=tuple((name, Ref(made)) for name, made in inputs),
        options=plain | {name: pickle.loads(value) for name, value in by_value.items()},
        reads=tuple(Effect(*effect) for effect in reads),
        writes=tuple(Effect(*effect) for effect in writes),
        site=Site(*pickle.loads(site)),
        step=step,
        is_aligned=is_aligned,
    )


def _is_plain(value: object) -> bool:
    """Whether a worker has all that the value is made of: atoms, containers, and instances and functions of m2flow's own."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if kind is dict:
        return _ATOMS.issuperset(map(type, value)) and all(map(_is_plain, value.values()))  # type: ignore[call-overload, attr-defined]
    if kind is types.FunctionType:
        return _is_ours(value)
    if not _is_ours(kind):  # type: ignore[arg-type]  # mypy takes the hash of a class for that of its instances
        return False
    return hasattr(value, "__dict__") and all(map(_is_plain, vars(value).values()))


@functools.lru_cache(maxsize=1024)
def _is_ours(value: object) -> bool:
    """Whether a function or a class is of m2flow's own, and found there by its name."""
    return str(getattr(value, "__module__", "")).startswith("m2flow.") and "<" not in str(getattr(value, "__qualname__", "<"))
