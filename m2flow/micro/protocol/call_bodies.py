"""Serialise a call for the workers, as a snapshot of what it was given when the program made it.

    Call --call_body--> bytes --(m.Define)--> call_of --> Call

What m2flow itself put into a call is plain and goes by pickle; only the user's objects take cloudpickle, which is ten times slower. What
the calls of one kind have in common is pickled once and copied into the body of each. A dataset's rows are sent as rows, and what is only
for the printed form is left out.
"""

from __future__ import annotations

import functools
import pickle
import types
from collections.abc import Mapping

import cloudpickle

from m2flow.errors import TraceError
from m2flow.macro.capture import Snapshot
from m2flow.macro.graph import Call, CallKind, Effect, Granularity, Ref, Site

_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})


def call_body(call: Call) -> bytes:
    """Serialise a call.

    Raises:
        TraceError: something in the call can't be sent to another process.
    """
    kind = call.kind
    if kind is None:
        kind = call.only_kind
        common = _common_body(kind, call)
    else:
        found = _commons.get(id(kind))
        if found is None:
            if len(_commons) >= _MOST_KINDS:
                _commons.clear()
            found = _commons[id(kind)] = kind, _common_body(kind, call)
        common = found[1]
    changing = None
    if len(call.options) != len(kind.options):
        changing = _options_body(call, {name: value for name, value in call.options.items() if name not in kind.options})
    return pickle.dumps(
        (
            common,
            call.ordinal,
            [ref.call for _, ref in call.inputs],
            changing,
            [(effect.version, effect.oldest) for effect in call.reads],
            [effect.version for effect in call.writes],
            call.step,
        ),
        pickle.HIGHEST_PROTOCOL,
    )


_MOST_KINDS = 4096
_commons: dict[int, tuple[CallKind, bytes]] = {}
"""id(kind) -> the kind, held so that its id is not reused, and what the bodies of its calls have in common."""


def _common_body(kind: CallKind, call: Call) -> bytes:
    site = kind.site
    return pickle.dumps(
        (
            (kind.role, kind.method, kind.engine, str(kind.granularity)),
            kind.inputs,
            _options_body(call, kind.options),
            kind.reads,
            kind.writes,
            (site.file, site.line, site.text, site.path),
            kind.is_aligned,
        ),
        pickle.HIGHEST_PROTOCOL,
    )


def _options_body(call: Call, options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, bytes]]:
    """Split options into plain values and pickled ones: the user's objects, and functions that many calls share."""
    plain: dict[str, object] = {}
    by_value: dict[str, bytes] = {}
    try:
        for name, value in options.items():
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
    return plain, by_value


@functools.lru_cache(maxsize=256)
def _body_of(function: Snapshot) -> bytes:
    return pickle.dumps(function, pickle.HIGHEST_PROTOCOL)


def call_of(body: bytes) -> Call:
    """Deserialise a call; its functions are new ones each time, with captures of their own."""
    common, ordinal, inputs, changing, reads, writes, step = pickle.loads(body)
    (role, method, engine, granularity), names, options, read, written, site, is_aligned = pickle.loads(common)
    return Call(
        ordinal=ordinal,
        role=role,
        method=method,
        engine=engine,
        granularity=Granularity(granularity),
        inputs=tuple([(name, Ref(made)) for name, made in zip(names, inputs, strict=True)]),
        options={**_options_of(options), **(_options_of(changing) if changing is not None else {})},
        reads=tuple([Effect(resource, *versions) for resource, versions in zip(read, reads, strict=True)]),
        writes=tuple([Effect(resource, version) for resource, version in zip(written, writes, strict=True)]),
        site=Site(*site),
        step=step,
        is_aligned=is_aligned,
    )


def _options_of(body: tuple[dict[str, object], dict[str, bytes]]) -> dict[str, object]:
    plain, by_value = body
    return plain | {name: pickle.loads(value) for name, value in by_value.items()}


def _is_plain(value: object) -> bool:
    """Whether plain pickle suffices: the value is made of atoms, containers, and instances and functions of m2flow."""
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
    """Whether a function or a class is m2flow's, and can be imported by its name."""
    return str(getattr(value, "__module__", "")).startswith("m2flow.") and "<" not in str(getattr(value, "__qualname__", "<"))
