"""How a call passes on what the user gave to an op or a role's method: handles become inputs, everything else a constant.

    near(responses, rewards, 0.5, rng)  ->  inputs {responses, rewards}, arguments saying what each parameter gets

Handles with rows must be of the same samples, and are joined by identity; of filtered ones, that which went through all filters says
which samples the call works on. Of rows with one value a sample (rewards, an op's results) the function gets that value, of whole
samples a `Sample`; of a group, a mini-batch or a batch it gets lists of them. A call's single value arrives as it is.
"""

from __future__ import annotations

import functools
import inspect
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

from m2flow.errors import OptionError, TraceError
from m2flow.macro.graph import Granularity, Ref
from m2flow.macro.handles import Handle, Number, Rows, describe
from m2flow.macro.session import Session
from m2flow.recipe import check_choice, check_names, is_count

RNG = "rng"
"""A parameter of this name gets a generator of random numbers, unless the call gives it something."""

UnitName = Literal["sample", "group", "minibatch", "batch"]


_Kind = Literal["rows", "column", "value", "constant", "random", "numpy"]


@dataclass(frozen=True)
class Argument:
    """What one parameter of the user's function gets."""

    parameter: str
    kind: _Kind
    """The last two are generators of random numbers."""
    is_keyword: bool
    field: str | None = None
    """Of a whole value: the one number of it that counts."""


@final
class Arguments(tuple[Argument, ...]):
    """In the order of the signature. A type of its own, since what a call's options hold in plain tuples is looked through for captures."""


_Passed = tuple[str, _Kind, bool, str | None]
"""What an `Argument` is made of."""


@functools.lru_cache(maxsize=4096)
def _arguments(passed: tuple[_Passed, ...]) -> Arguments:
    """A line passes its arguments on in the same way each time."""
    return Arguments(Argument(*one) for one in passed)


@dataclass(frozen=True)
class Given:
    """A call's arguments, sorted."""

    inputs: dict[str, Ref]
    arguments: Arguments
    columns: dict[str, str]
    """Input -> the column of its rows that counts."""
    constants: dict[str, object]
    base: Rows | None
    """A handle with rows, if there is one."""

    def options(self, session: Session, name: str) -> dict[str, object]:
        """What the call's options say of them, for `m2flow.micro.work.arguments`."""
        wants_random = any(argument.kind in ("random", "numpy") for argument in self.arguments)
        repeat = session.next_ordinal
        if wants_random and self.base is not None:
            repeat = session.count_generation(f"op {name}", self.base.ref.call)
        return {
            "arguments": self.arguments,
            "columns": self.columns,
            "constants": self.constants,
            **({"repeat": repeat} if wants_random else {}),
        }


def check_unit(what: str, granularity: str, size: int | None) -> Granularity:
    """The granularity that a decorator was given.

    Raises:
        OptionError: there is no such; or `size`, the prompts in a mini-batch, is missing, no count, or given for another one.
    """
    check_choice("granularity", granularity, UnitName, of=what)
    if (granularity == "minibatch") != (size is not None) or not (size is None or is_count(size)):
        raise OptionError(
            f"{what}(granularity={granularity!r}, size={size!r}): size is the number of prompts in a mini-batch, 1 or more",
            now="Give it for granularity='minibatch', and only there.",
        )
    return Granularity(granularity)


def resources(what: str, names: Sequence[str], kind: str) -> tuple[str, ...]:
    """The resources that a decorator names.

    Raises:
        OptionError: a name is none, or belongs to m2flow: weights and cursors have writers of their own.
    """
    for name in check_names(kind, names, example=("judge.memory",), of=what):
        if not all(part.isidentifier() for part in name.split(".")):
            raise OptionError(f"{what}({kind}=[{name!r}]): a resource has a name such as 'judge.memory'")
        if kind == "writes" and name.endswith((".weights", ".cursor")):
            raise OptionError(f"{what}(writes=[{name!r}]): only m2flow's own roles and datasets write that")
    return tuple(dict.fromkeys(names))


def signature_of(function: Callable[..., object], *, is_method: bool = False) -> inspect.Signature:
    """What the function is called with; of a method, without the object. Read once."""
    found = _signatures.get(function)
    if found is None:
        found = inspect.signature(function)
        if is_method:
            found = found.replace(parameters=list(found.parameters.values())[1:])
        _signatures[function] = found
    return found


_signatures: weakref.WeakKeyDictionary[Callable[..., object], inspect.Signature] = weakref.WeakKeyDictionary()


def gather(
    session: Session, name: str, signature: inspect.Signature, unit: Granularity, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Given:
    """Sort what a call was given by the function's signature.

    Raises:
        TraceError: the arguments do not fit it, or there are no rows to work on.
    """
    bound, has_free_rng = _bind(name, signature, args, kwargs)
    inputs: dict[str, Ref] = {}
    arguments: list[_Passed] = []
    columns: dict[str, str] = {}
    constants: dict[str, object] = {}
    base: Rows | None = None
    for parameter, is_keyword, value in bound:
        if isinstance(value, Number):
            ordinal, field = value.source(session, name)
            inputs[parameter] = Ref(ordinal)
            arguments.append((parameter, "value", is_keyword, field))
        elif isinstance(value, Handle):
            inputs[parameter] = value.check(session, name)
            column = value.column if isinstance(value, Rows) else None
            kind: Literal["rows", "column", "value"] = "column" if column else "rows" if isinstance(value, Rows) else "value"
            arguments.append((parameter, kind, is_keyword, None))
            columns |= {parameter: column} if column else {}
            base = value if base is None and isinstance(value, Rows) else base
        else:
            _refuse_hidden(name, parameter, value)
            constants[parameter] = value
            arguments.append((parameter, "constant", is_keyword, None))
    if has_free_rng:
        arguments.append((RNG, _generator_kind(signature), True, None))
    if base is None and unit is not Granularity.BATCH:
        got = ", ".join(describe(value) for _, _, value in bound) or "nothing"
        raise TraceError(
            f"{name} runs on each {unit.value}, and got {got}; it needs rows: a dataset's, responses, rewards",
            now="Pass a handle with rows, or declare granularity='batch'.",
        )
    passed = _arguments(tuple(arguments))
    return Given(_narrowest_first(session, inputs, passed), passed, columns, constants, base)


def _narrowest_first(session: Session, inputs: dict[str, Ref], arguments: Sequence[Argument]) -> dict[str, Ref]:
    """The inputs, that whose rows all others have before them: it says which samples the call works on."""
    if len(inputs) < 2:
        return inputs
    aligned = {a.parameter: inputs[a.parameter] for a in arguments if a.kind in ("rows", "column")}
    if len(aligned) < 2:
        return {**aligned, **inputs}
    base = session.lineage.narrowest(aligned.values())
    first = {name: ref for name, ref in aligned.items() if ref == base}
    return {**first, **inputs}


def _bind(
    name: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[list[tuple[str, bool, object]], bool]:
    """(parameter, whether by keyword, value) for each argument, each under a name of its own; and whether `rng` is left to us."""
    names = _in_order(signature)
    if names is not None and len(args) == len(names) and not kwargs:
        return [(parameter, False, value) for parameter, value in zip(names, args, strict=True)], False
    wants_rng = RNG in signature.parameters and RNG not in kwargs
    free = {RNG: None} if wants_rng and signature.parameters[RNG].kind is not inspect.Parameter.POSITIONAL_ONLY else {}
    try:
        bound = signature.bind(*args, **kwargs, **free)
    except TypeError as error:
        try:
            bound, free = signature.bind(*args, **kwargs), {}  # `rng` was given by position.
        except TypeError:
            shown = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
            raise TraceError(f"{name}{inspect.Signature(shown)} can't be called like this: {error}") from None
    found: list[tuple[str, bool, object]] = []
    for parameter, value in bound.arguments.items():
        kind = signature.parameters[parameter].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found += [(f"{parameter}_{i}", False, item) for i, item in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found += [(key, True, item) for key, item in value.items()]
        elif not (parameter == RNG and free):
            found.append((parameter, kind is inspect.Parameter.KEYWORD_ONLY, value))
    return found, bool(free)


def _in_order(signature: inspect.Signature) -> tuple[str, ...] | None:
    """The parameters of a function that takes each by position, none of them a generator of ours; None if there are others."""
    known = _names_in_order.get(id(signature))
    if known is None:
        if len(_names_in_order) >= _MOST_KNOWN:
            _names_in_order.clear()
        parameters = signature.parameters
        is_plain = RNG not in parameters and all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())
        known = _names_in_order[id(signature)] = signature, tuple(parameters) if is_plain else None
    return known[1]


_MOST_KNOWN = 4096
_names_in_order: dict[int, tuple[inspect.Signature, tuple[str, ...] | None]] = {}
"""By the id of a signature, which is held so that no id is given anew: its hash would be made of all its parameters."""


def _refuse_hidden(name: str, parameter: str, value: object) -> None:
    """A handle inside a container is no input: nobody would wait for it."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    for item in items:
        if isinstance(item, Handle | Number):
            raise TraceError(
                f"{name} got {describe(item)} inside a {type(value).__name__}, for {parameter}",
                now="Pass each handle as an argument of its own, with *args in the function's signature if there are many.",
            )
        _refuse_hidden(name, parameter, item)


def _generator_kind(signature: inspect.Signature) -> Literal["random", "numpy"]:
    """What the annotation of `rng` asks for: NumPy's `Generator`, or Python's `random.Random`."""
    annotation = signature.parameters[RNG].annotation
    if annotation in (inspect.Parameter.empty, random.Random):
        return "random"
    return "numpy" if "Generator" in str(getattr(annotation, "__name__", annotation)) else "random"
