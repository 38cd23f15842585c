"""What the calls of one place in the program have in common, found once: a loop makes call after call with the same options.

    Session.record --Kinds.of--> CallKind, options

Two calls are of one kind if the same instruction of the program made them, on inputs of the same names, with options that a snapshot
would find the same: numbers of one type and value, the same functions, in whose captures nothing has changed. What such a call is
given is then not taken anew, and what others make of a kind (its bytes for the workers, the number of its shape) is made once. What
is new with each call (a dataset's rows, versions) is `CHANGING`, and belongs to no kind.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from typing import final

from m2flow.macro.capture import Captures, fields_of
from m2flow.macro.closures import Watch, watch
from m2flow.macro.graph import CallKind, EngineKind, Granularity, Site

CHANGING = frozenset({"rows", "cursor", "repeat", "windows", "carries_from", "num_carried", "updates_since", "loop_step"})
"""Options that say something of one call alone."""

_MOST_KNOWN = 4096
_ATOMS = frozenset({str, int, bool, bytes, type(None)})


@final
class _Known:
    """The last call of a place: what it was given, and what was made of that."""

    __slots__ = ("given", "kind", "site", "watches")

    def __init__(self, kind: CallKind, site: Site, given: dict[str, object], watches: dict[str, Watch]) -> None:
        self.kind = kind
        self.site = site
        """Held, so that its id is not given anew."""
        self.given = given
        """The options as they came, without the changing ones."""
        self.watches = watches
        """For the functions among them."""

    def is_given(self, options: Mapping[str, object]) -> bool:
        """Whether a call with these options is of the kind."""
        given, taken = self.given, self.kind.options
        num_changing = 0
        for name, value in options.items():
            if name in given:
                if type(value) is types.FunctionType:
                    if value is not given[name] or not (name in self.watches and self.watches[name].holds()):
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
    """The kinds of one session's calls, by place."""

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
        """The kind of a call that is about to be made, and its options as they are now.

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
        watches = {name: found for name, value in functions.items() if (found := watch(value)) is not None}
        self._known[key] = _Known(kind, site, given, watches)
        return kind, taken


def _is_alike(value: object, taken: object) -> bool:
    """Whether a snapshot of a value would be what was taken before. It may say no where it is."""
    if value is taken:  # What can change is copied when it is taken.
        return True
    kind = type(value)
    if kind is not type(taken):
        return False
    if kind in _ATOMS:
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
    return names is not None and all(_is_alike(getattr(value, name), getattr(taken, name)) for name in names)


def _are_alike(values: Collection[object], taken: Collection[object]) -> bool:
    return len(values) == len(taken) and all(_is_alike(one, other) for one, other in zip(values, taken, strict=True))
