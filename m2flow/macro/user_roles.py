"""The user's own roles: a class whose methods are calls, and whose state lives on a worker.

    class Judge(Role):
        def __init__(self, strictness: float) -> None:
            self.strictness, self.memory = strictness, []

        @call(granularity="sample", returns="reward", writes=["judge.memory"])
        def score(self, sample: Sample) -> float: ...

    judge = Judge(0.5)                      # in a flow: nothing is made yet, the arguments are a snapshot
    rewards = judge.score(responses)

The object that a flow holds stands for the role. The real one is made on the worker that runs its first call, from those arguments.
Calls that declare a resource run where the role's state is, on one worker, and are ordered by their effects as the program text is;
calls that declare none may run on several workers at once, each with an object of its own, which they can't change. Limit: state
is what one process holds, so it ends with the run.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from m2flow.errors import OpError, OptionError, TraceError
from m2flow.macro.arguments import UnitName, check_unit, gather, resources, signature_of
from m2flow.macro.graph import Granularity, Ref
from m2flow.macro.handles import Handle, Rows, Scores
from m2flow.macro.ops import OpRows, OpValue
from m2flow.macro.session import Session, current_session
from m2flow.macro.sites import user_site
from m2flow.recipe import check_choice, check_flag, check_names, check_seconds, check_text
from m2flow.samples import Batch, Column, Ragged

_MAY_WRITE = "_m2flow_may_write"
_names: weakref.WeakKeyDictionary[Session, set[str]] = weakref.WeakKeyDictionary()
"""Of the roles of each flow that runs."""


@final
@dataclass(frozen=True)
class CallMethod:
    """A method under `@call`. On the worker it is the plain method."""

    function: Callable[..., object]
    unit: Granularity
    size: int | None
    returns: Literal["value", "reward"] | tuple[str, ...]
    timeout_s: float | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_isolated: bool

    def __get__(self, instance: object, owner: type | None = None) -> object:
        return self if instance is None else self.function.__get__(instance, owner)


def call(
    *,
    granularity: UnitName = "sample",
    size: int | None = None,
    returns: Literal["value", "reward"] | Sequence[str] = "value",
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    timeout_s: float | None = None,
    isolated: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """Make a method of a `Role`, plain or async, a call of the graph.

    Units, arguments and `rng` are as for `m2flow.op`.

    Args:
        returns: `value`, any; `reward`, one finite number a sample, or one with its parts as `m2flow.Reward` has it; or the names of
            fields, of a mapping that it returns for each sample (or for the batch): each is then an attribute of the result.
        reads, writes: what the call reads and changes, by names such as `judge.memory`. A name that begins with the class's (in small
            letters) is the instance's own. A call that writes takes its units one after the other, in the order of identity.
        timeout_s: seconds that one unit may take.
        isolated: whether each unit runs in a process that can be killed alone, which makes a role's object of its own. Not for a call that
            reads or writes: its state is on the worker.
    """
    what = "@call"
    unit = check_unit(what, granularity, size)
    check_seconds("timeout_s", timeout_s)
    check_flag("isolated", isolated)
    read, written = resources(what, reads, "reads"), resources(what, writes, "writes")
    given: Literal["value", "reward"] | tuple[str, ...]
    if isinstance(returns, str):
        check_choice("returns", returns, ("value", "reward"), "or a list of the names of fields", of=what)
        given = "reward" if returns == "reward" else "value"
    else:
        given = check_names("returns", returns, example=("grade", "reason"), of=what)
        if not given or not all(name.isidentifier() for name in given):
            raise OptionError(f"@call(returns={returns!r}); known are 'value', 'reward', or a list of the names of fields")
    if given == "reward" and unit is Granularity.BATCH:
        raise OptionError("@call(returns='reward', granularity='batch'): a reward is one number for each sample")
    if isolated and (read or written):
        raise OptionError(
            "@call(isolated=True) declares what it reads or writes: the role's state is on a worker, and no other process sees it",
            now="Move what may hang or crash into a call that declares neither.",
        )

    def decorate(function: Callable[..., Any]) -> CallMethod:
        return CallMethod(function, unit, size, given, timeout_s, tuple(dict.fromkeys((*read, *written))), written, isolated)

    return decorate


class _RoleType(type):
    """Calling a role's class in a flow gives what stands for the role."""

    def __call__(cls, *args: object, name: str | None = None, **kwargs: object) -> Any:
        session = current_session(f"the role {cls.__name__}")
        known = _names.setdefault(session, set())
        name = cls.__name__.lower() if name is None else name
        check_text("name", name)
        if name in known or name in session.models:
            now = f"Name one of them: name='{name}_2'."
            raise TraceError(f"this flow has two roles named {name!r}", where=user_site().describe(), now=now)
        try:
            inspect.signature(inspect.getattr_static(cls, "__init__")).bind(None, *args, **kwargs)
        except TypeError as error:
            raise TraceError(f"{cls.__name__}(...) can't be made like this: {error}", where=user_site().describe()) from None
        known.add(name)
        return RoleInFlow(cls, session, name, functools.partial(_make, cls, *args, **kwargs))


class Role(metaclass=_RoleType):
    """What a user's role inherits."""

    def __init_subclass__(cls) -> None:
        """Raises `OptionError` for a resource of its own that is read and that nothing writes: most likely it is misspelt."""
        super().__init_subclass__()
        methods = _methods(cls)
        written = {name for method in methods.values() for name in method.writes}
        for name, method in methods.items():
            for resource in method.reads:
                if resource.startswith(f"{cls.__name__.lower()}.") and resource not in written:
                    has = f"they write {', '.join(sorted(written))}" if written else "they write nothing"
                    raise OptionError(f"{cls.__name__}.{name} reads {resource!r}, which no call of {cls.__name__} writes; {has}")

    def __setattr__(self, name: str, value: object) -> None:
        if not vars(self).get(_MAY_WRITE, True):
            raise OpError(
                f"{type(self).__name__} sets {name!r} in a call that declares no write",
                now=f"Declare it: @call(writes=['{type(self).__name__.lower()}.{name}']).",
            )
        super().__setattr__(name, value)


@final
class RoleInFlow:
    """Stands for a role in its flow: its methods under `@call` record calls."""

    _kind: type
    _session: Session
    _name: str
    _make: object

    def __init__(self, kind: type, session: Session, name: str, make: Callable[[], object]) -> None:
        site = user_site()
        vars(self).update(_kind=kind, _session=session, _name=name, _make=session.snapshot(make, site))

    def __repr__(self) -> str:
        return f"<the role {self._name}: a {self._kind.__name__}>"

    def __setattr__(self, name: str, value: object) -> None:
        raise TraceError(
            f"{name!r} of the role {self._name} was set in the flow, and its state is on a worker",
            where=user_site().describe(),
            now="Pass what it needs to its constructor, or to a call that sets it.",
        )

    def __getattr__(self, name: str) -> Callable[..., Handle]:
        kind = vars(self)["_kind"]
        found = inspect.getattr_static(kind, name, None)
        if isinstance(found, CallMethod):
            return functools.partial(self._record, name, found)
        if name.startswith("_"):
            raise AttributeError(name)
        calls = ", ".join(sorted(_methods(kind))) or "none"
        what = f"{kind.__name__}.{name} is no call" if found is not None else f"{kind.__name__} has no {name!r}"
        now = "Put @call(...) on it, or call it from a method that has it: the object itself is on a worker."
        raise TraceError(f"{what}; its calls are {calls}", where=user_site().describe(), now=now)

    def _record(self, name: str, method: CallMethod, /, *args: object, **kwargs: object) -> Handle:
        full = f"{self._name}.{name}"
        given = gather(self._session, full, signature_of(method.function, is_method=True), method.unit, args, kwargs)
        is_aligned = method.unit is not Granularity.BATCH
        fields = method.returns if isinstance(method.returns, tuple) else ()
        recorded = self._session.record(
            role=full,
            method="",
            engine="function",
            granularity=method.unit,
            inputs=given.inputs,
            options={
                "function": self._make,
                "instance": self._name,
                "method": name,
                "timeout_s": method.timeout_s,
                "column": "reward" if method.returns == "reward" else "value",
                **given.options(self._session, full),
                **({"fields": fields} if fields else {}),
                **({"state": self._name} if method.reads else {}),
                **({"isolated": True} if method.is_isolated else {}),
                **({"minibatch_size": method.size} if method.size is not None else {}),
            },
            shown=given.constants,
            reads=tuple(map(self._own, method.reads)),
            writes=tuple(map(self._own, method.writes)),
            is_aligned=is_aligned,
        )
        if method.returns == "reward":
            return Scores(self._session, recorded)
        if fields:
            return FieldRows(self._session, recorded) if is_aligned else OpValue(self._session, recorded)
        return OpRows(self._session, recorded) if is_aligned else OpValue(self._session, recorded)

    def _own(self, resource: str) -> str:
        """A resource of the class as that of this instance."""
        default = self._kind.__name__.lower()
        return f"{self._name}.{resource.removeprefix(f'{default}.')}" if resource.startswith(f"{default}.") else resource


@final
class FieldRows(OpRows):
    """A mapping for each sample, whose fields are attributes: rows of their own."""

    def __getattr__(self, name: str) -> Rows:
        fields = self._call.options["fields"] if "_call" in vars(self) else ()
        assert isinstance(fields, tuple)
        if name not in fields:
            raise AttributeError(f"{self!r} has the fields {', '.join(fields)}, and no {name!r}")
        recorded = self._session.record(
            role=f"{self._call.role}.{name}",
            method="",
            engine="function",
            granularity=Granularity.SAMPLE,
            inputs={"rows": Ref(self._call.ordinal)},
            options={"function": FieldOf(name), "timeout_s": None, "style": "columns", "column": "value", "columns": {}},
            shown={},
        )
        return OpRows(self._session, recorded)


@final
class FieldOf:
    """One field of each row's mapping, as a function on columns."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.name = name

    def __call__(self, rows: Batch, values: dict[str, object]) -> Column:
        column = rows.columns["value"]
        assert isinstance(column, Ragged)
        return Ragged.json([dict(column.item(row))[self.name] for row in range(len(rows))])  # type: ignore[call-overload]


def may_write(instance: object, is_allowed: bool) -> None:
    """Let a role's attributes be set, or not, by the call that comes next."""
    vars(instance)[_MAY_WRITE] = is_allowed


def _make(kind: type, /, *args: object, **kwargs: object) -> object:
    """The real object, on a worker."""
    return type.__call__(kind, *args, **kwargs)


def _methods(kind: type) -> dict[str, CallMethod]:
    return {name: member for name in dir(kind) if isinstance(member := inspect.getattr_static(kind, name), CallMethod)}
