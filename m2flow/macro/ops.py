"""Users' own functions and roles as calls of the graph: `@op`, `@call` on the methods of a `Role`, and `log`.

    near(responses, rewards, 0.5, rng)  ->  inputs {responses, rewards}, `Arguments` saying what each parameter gets

Handles with rows must be of the same samples, and are joined by identity; of filtered ones, the one that went through all filters
decides which samples the call works on. For rows with one value per sample (rewards, an op's results) the function gets that value, for
whole samples a `Sample`; on a group, a mini-batch or a batch it gets lists of them. A call's single value is passed as it is.

    class Judge(Role):
        def __init__(self, strictness: float) -> None:
            self.strictness, self.memory = strictness, []

        @call(granularity="sample", returns="reward", writes=["judge.memory"])
        def score(self, sample: Sample) -> float: ...

    judge = Judge(0.5)                      # in a flow: no Judge is made yet, the arguments are a snapshot
    rewards = judge.score(responses)

In a flow, `Judge(...)` makes a `RoleInFlow`. The real object is made on the worker that runs its first call, from those arguments.
Calls that declare a resource run where the role's state is, on one worker, and are ordered by their effects as the program text is;
calls that declare none may run on several workers at once, each with an object of its own, which they can't change. Limit: state is
held by one process, so it ends with the run.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsFloat, final, get_args

import numpy as np

from m2flow.errors import OpError, OptionError, TraceError, did_you_mean, lone_surrogate
from m2flow.macro.columns import OF_SPEAKERS, BranchTurn, EpisodeReward, FieldOf, Only, Said, Spoke
from m2flow.macro.graph import Call, Granularity, Ref, user_site
from m2flow.macro.handles import Handle, Metrics, OpValue, Rows, Scores, Without, describe, is_isolated
from m2flow.macro.number import Inputs, Number
from m2flow.macro.session import Session, current_session, once_each
from m2flow.recipe import (
    MOST_COUNTED,
    EpisodeFailure,
    Episodes,
    Sampling,
    as_texts,
    check_choice,
    check_flag,
    check_names,
    check_seconds,
    check_text,
    is_count,
)
from m2flow.samples import BRANCH_TURN, MAX_GROUP, Batch, Column, SampleId

RNG = "rng"
"""A parameter of this name gets a generator of random numbers, unless the call gives it something."""

UnitName = Literal["sample", "group", "minibatch", "batch"]


_Kind = Literal["rows", "column", "value", "constant", "random", "numpy"]


@dataclass(frozen=True)
class Argument:
    """What one parameter of the user's function is passed."""

    parameter: str
    kind: _Kind
    """The last two are generators of random numbers."""
    is_keyword: bool
    field: str | None = None
    """The field of a whole value that is passed."""


@final
class Arguments(tuple[Argument, ...]):
    """Arguments in the order of the signature. Not a plain tuple, since plain tuples in a call's options are searched for captures."""


_Passed = tuple[str, _Kind, bool, str | None]
"""The fields of an `Argument`."""


@functools.lru_cache(maxsize=4096)
def _arguments(passed: tuple[_Passed, ...]) -> Arguments:
    """Make `Arguments`; cached, since a line passes its arguments in the same way each time."""
    return Arguments(Argument(*one) for one in passed)


@dataclass(frozen=True)
class BoundArguments:
    """A call's arguments, sorted into inputs and constants."""

    inputs: dict[str, Ref]
    arguments: Arguments
    columns: dict[str, str]
    """Input -> the column of its rows that counts."""
    constants: dict[str, object]
    base: Rows | None
    """A handle with rows, if there is one."""

    def options(self, session: Session, name: str) -> dict[str, object]:
        """The call's options for these arguments, read by `m2flow.micro.worker.function_tasks`."""
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
    """Check the granularity that a decorator was given.

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
    """Check the resources that a decorator names.

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
    """The signature of a function; of a method, without the object. Cached."""
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
) -> BoundArguments:
    """Sort a call's arguments by the function's signature.

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
        if isinstance(value, Handle):
            inputs[parameter] = value.check(session, name)
            kind: Literal["rows", "column", "value"] = "value"
            if isinstance(value, Rows):
                kind = "column" if value.column else "rows"
                if value.column:
                    columns[parameter] = value.column
                base = value if base is None else base
            arguments.append((parameter, kind, is_keyword, None))
        elif isinstance(value, Number):
            ordinal, field = value.source(session, name)
            inputs[parameter] = Ref(ordinal)
            arguments.append((parameter, "value", is_keyword, field))
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
    return BoundArguments(_narrowest_first(session, inputs, passed), passed, columns, constants, base)


def _narrowest_first(session: Session, inputs: dict[str, Ref], arguments: Sequence[Argument]) -> dict[str, Ref]:
    """Put the input whose rows all others have first: it decides which samples the call works on."""
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
            raise TraceError(
                f"{name}{inspect.Signature(shown)} can't be called like this: {error}",
                now="Pass its arguments as its signature above says.",
            ) from None
    found: list[tuple[str, bool, object]] = []
    is_beyond_rng = False
    for parameter, value in bound.arguments.items():
        kind = signature.parameters[parameter].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found += [(f"{parameter}_{i}", False, item) for i, item in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found += [(key, True, item) for key, item in value.items()]
        elif parameter == RNG and free:
            is_beyond_rng = True  # It is passed by keyword, so the parameters after it are, too.
        else:
            found.append((parameter, is_beyond_rng or kind is inspect.Parameter.KEYWORD_ONLY, value))
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
    """Refuse a handle inside a container: it is no input, so nothing would wait for it."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    for item in items:
        if isinstance(item, Handle | Number):
            raise TraceError(
                f"{name} got {describe(item)} inside a {type(value).__name__}, for {parameter}",
                now="Pass each handle as an argument of its own, with *args in the function's signature if there are many.",
            )
        _refuse_hidden(name, parameter, item)


def _generator_kind(signature: inspect.Signature) -> Literal["random", "numpy"]:
    """The kind of generator that the annotation of `rng` asks for: NumPy's `Generator`, or Python's `random.Random`."""
    annotation = signature.parameters[RNG].annotation
    if annotation in (inspect.Parameter.empty, random.Random):
        return "random"
    return "numpy" if "Generator" in str(getattr(annotation, "__name__", annotation)) else "random"


class OpRows(Rows):
    """The result of an op on samples: one value for each sample."""

    column = "value"


def op(
    *,
    granularity: UnitName = "sample",
    size: int | None = None,
    per_sample: bool = False,
    timeout_s: float | None = None,
    isolated: bool | None = None,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
) -> Callable[[Callable[..., object]], Callable[..., Handle]]:
    """Decorator: make a function, plain or async, a call of the graph, run on a worker, on units of this size.

    A function on a `sample` returns one value; on a `group` (the samples of one prompt) or a `minibatch` (those of `size` prompts, in
    the order of identity) a list of as many values, or an array; on a `batch` one value for all, or with `per_sample` such a list.

    What it is called with may be handles and constants: see `m2flow.macro.ops`. A parameter `rng` that the call leaves out gets a
    `random.Random`, or a `numpy.random.Generator` if it is annotated so, which depends on the run's seed, the op and the unit alone.

    Args:
        granularity: `sample`, `group`, `minibatch` or `batch`.
        size: prompts in a mini-batch.
        per_sample: whether a function on a `batch` returns one value for each sample, in the order of identity: advantages, say.
        timeout_s: seconds that one unit may take.
        isolated: whether each unit runs in a process that can be killed alone, as for `m2flow.Reward`.
        reads, writes: resources outside, such as a file or a service, by names that you choose. Calls that touch the same one, at least
            one of them writing, run in the order of the program; others may run at the same time.
    """

    what = "@op"
    unit = check_unit(what, granularity, size)
    check_flag("per_sample", per_sample)
    if per_sample and unit is not Granularity.BATCH:
        raise OptionError(
            f"@op(granularity={granularity!r}, per_sample=True): it goes with 'batch'; the others return a value for each sample"
        )
    is_aligned = per_sample or unit is not Granularity.BATCH
    check_seconds("timeout_s", timeout_s)
    if isolated is not None:
        check_flag("isolated", isolated)
    read, written = resources(what, reads, "reads"), resources(what, writes, "writes")

    def decorate(function: Callable[..., object]) -> Callable[..., Handle]:
        name = str(getattr(function, "__name__", "op"))

        @functools.wraps(function)
        def call_it(*args: object, **kwargs: object) -> Handle:
            session = current_session(f"the op {name}")
            given = gather(session, name, signature_of(function), unit, args, kwargs)
            if per_sample and given.base is None:
                raise TraceError(
                    f"{name} returns a value for each sample, and got no rows", now="Pass responses, rewards, or their columns."
                )
            call = session.record(
                role=name,
                method="",
                engine="function",
                granularity=unit,
                inputs=given.inputs,
                options={
                    "function": function,
                    "timeout_s": timeout_s,
                    "column": "value",
                    **({"isolated": True} if is_isolated(function, isolated, timeout_s) else {}),
                    **given.options(session, name),
                    **({"minibatch_size": size} if size is not None else {}),
                },
                shown=given.constants,
                reads=tuple(dict.fromkeys((*read, *written))),
                writes=written,
                is_aligned=is_aligned,
            )
            return OpRows(session, call) if call.is_aligned else OpValue(session, call)

        return call_it

    return decorate


def check_of_one_sample(function: Callable[..., object]) -> None:
    """Check that a reward's function can be called with a sample alone. Raises `TraceError`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Of some built-in functions nothing is known.
        return
    of_place = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in variadic]
    if len(needed) > 1 or not any(one.kind in of_place for one in parameters):
        raise TraceError(
            f"a reward is a function of one sample, and {getattr(function, '__name__', 'this one')} takes {', '.join(needed) or 'nothing'}",
            now="Write def right(sample: Sample) -> float. It reads sample.text, and columns of the row: sample.answer.",
        )


def log(**values: Number | Handle | float) -> None:
    """Record numbers under these names in the run's metrics, when known. Does not wait. Of one name in a step, tables have the last."""
    session = current_session("log()")
    sources: dict[str, tuple[int, str | None] | float] = {}
    for name, value in values.items():
        if lone_surrogate(name) >= 0:
            raise TraceError(f"log: the name {name!r:.60} has half of a surrogate pair; no file takes it", now="Give it another name.")
        if isinstance(value, Number):
            sources[name] = value.source(session, "log()")
        elif isinstance(value, Rows | Metrics) and not isinstance(value, OpValue):
            now = f"log({name}=rewards.mean())" if isinstance(value, Rows) else f"log({name}=metrics['reward'])"
            raise TraceError(f"log({name}=...) got {describe(value)}, which is more than one number", now=f"Say which: {now}.")
        elif isinstance(value, Handle):
            sources[name] = (value.check(session, "log()").call, None)
        elif isinstance(value, SupportsFloat):
            sources[name] = float(value)
        else:
            raise TraceError(f"log({name}=...) got {value!r:.60}, which is not a number", now="Numbers are logged; print() shows the rest.")
    for source in sources.values():
        if not isinstance(source, float):
            session.unused.used(source[0])
    session.backend.log(session.log_step, sources)


def steps(count: int) -> Iterator[int]:
    """Count the steps of a loop: `for step in steps(80)`. The outermost of them are the steps of the run."""
    return current_session("steps()").iterate(count)


# ---- episodes of agents

Failed = Literal["mask", "raise", "zero"]


@final
class EpisodeRows(Rows):
    """Episodes: a row each, with its tokens and `reward`, what the agent returned. Where others speak in them, what the policy said."""

    failed: Failed = "mask"
    speakers: tuple[tuple[str, str], ...] = ()
    _reward: Scores | None = None
    _whole: EpisodeRows | None = None
    """What all speakers said; held, so that it is not dropped before `of` or `branch` takes it."""
    _of: dict[str, EpisodeRows] | None = None

    def of(self, speaker: str) -> EpisodeRows:
        """What another speaker said in these episodes, for its own `update`: a row for each of them in which it had a turn.

        A row has the tokens of this speaker's conversations, with the log-probabilities and versions of its weights, and its `reward`: that
        of its conversations, by the mapping that the agent returned, or the number that it returned for all.

        Args:
            speaker: a name of the rollout's `speakers`.
        """
        names = [name for name, _ in self.speakers]
        if self._whole is None or self._of is None or speaker not in names:
            known = f"the speakers are {', '.join(names)}" if names else "these have no speakers; take `of` of what rollout returned"
            now = did_you_mean(str(speaker), names, "Name them: policy.rollout(..., speakers={'opponent': rival}).")
            raise OptionError(f"{describe(self)}.of({speaker!r:.60}): {known}", now=now)
        if speaker not in self._of:
            self._of[speaker] = _said_by(self._whole, speaker)
        return self._of[speaker]

    @property
    def reward(self) -> Scores:
        """The reward of each episode, one finite number."""
        if self._reward is None:
            self._reward = _rewards_of(self)
        return self._reward

    def branch(self, *, n: int, at: Literal["random"] | int | Rows = "random") -> EpisodeRows:
        """Play `n` other ends of each of these episodes: each goes on from one turn, with the weights as they are at this line.

        What was said before that turn, and what tools gave before it, are the episode's: nothing of it is sampled, tokenised or run again.
        From the turn on, a branch has random numbers of its own, which depend on its parent's, the turn and its number; `chat.rng` goes on
        as in the parent. Agent, speakers, bounds, sampling and staleness are the rollout's.

        Branches of one parent are a group: `update(more, more.reward)` compares siblings, as a baseline of each step does, and
        `more.reward.back_to(episodes)` is, for each parent, what its position at that turn is worth. A loss sees what a branch generated
        itself; what it shares is trained where it was generated, with the parent. To train both: `concat([episodes, more])`. Branches have
        branches, too.

        Args:
            n: branches of each episode.
            at: the first turn that is taken anew, whoever's, as they were taken: `random`, any of the episode's, each as
                likely; a number from 1, or from the end, as -1; or a handle with the number for each episode, such as a column of
                theirs. With `random` an episode in which the model never spoke is played again from its beginning, and the number of
                those is logged (`episodes/silent_parents`).
        Returns:
            as `rollout`, and `branch_turn`, the turn.
        Raises:
            TraceError: they are of several rollouts, or have a column `branch_turn` already.
            OpError (at the first look): an episode does not have the turn, turns of it were taken at the same time, or a tool that is not
            pure has worked on a resource before it, which so can't be brought to where it was.
        Source:
            Hou et al. 2025 (TreeRL), arXiv:2506.11902, and Ji et al. 2025 (Tree-GRPO), arXiv:2509.21240, where the tokens of trees of
            episodes are counted; the value of a position by its branches is that of Kazemnejad et al. 2024 (VinePPO), arXiv:2410.01679.
        """
        return _branched(self, n, at)

    def like(self, call: Call, *, tokens_of: Rows | None = None) -> EpisodeRows:
        """Episodes of a call that gives such rows as these, or some of them."""
        found = EpisodeRows(self._session, call)
        found.failed, found._whole = self.failed, self._whole
        return found

    def samples_of(self, call: Call) -> EpisodeRows:
        return self.like(call)


def speakers_of(
    session: Session, role: str, given: Mapping[str, object] | None, sampling: Sampling
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, Sampling], ...]]:
    """Who speaks in the episodes of a role beside itself: by name the role of each, and how turns are drawn where not by `sampling`.

    Raises:
        TraceError: one has no rollout engine, or is that role itself. OptionError: one is drawn by options that there are not.
    """
    if given is None:
        return (), ()
    if not isinstance(given, Mapping) or not given:
        now = "Name who speaks: speakers={'opponent': rival}."
        raise TraceError(f"{role}.rollout got speakers={describe(given)}; it takes policies by name", now=now)
    found, drawn = [], []
    for name, value in given.items():
        check_text("a name of speakers=", name)
        other = value
        if isinstance(value, Mapping):
            other, own = value.get("policy"), {key: one for key, one in value.items() if key != "policy"}
            drawn.append((name, _drawn_by(f"{role}.rollout got speakers={{{name!r}: ...}}", own, sampling)))
        of = getattr(other, "name", None)
        model = session.models.get(of) if isinstance(of, str) and getattr(other, "_session", None) is session else None
        if model is None or not model.is_policy:
            what = f"{role}.rollout got speakers={{{name!r}: {describe(other)}}}, which has no rollout engine"
            raise TraceError(what, now="Pass a Policy. One that nothing updates stays as it is: a frozen opponent, a judge.")
        if of == role:
            what = f"{role}.rollout got speakers={{{name!r}: {role}}}, which plays these episodes"
            raise TraceError(what, now="Further conversations with it need no name: chat.conversation('other').")
        found.append((name, str(of)))
    return tuple(found), tuple(drawn)


_OWN = ("temperature", "top_p", "top_k", "stop")


def _drawn_by(what: str, own: Mapping[str, object], sampling: Sampling) -> Sampling:
    """How a speaker's turns are drawn. Raises `OptionError`."""
    if unknown := [name for name in own if name not in _OWN]:
        now = did_you_mean(str(unknown[0]), _OWN, "Bounds of its conversations are those of chat.conversation(..., max_tokens=...).")
        raise OptionError(f"{what} with the option {unknown[0]!r:.60}; a policy goes with {', '.join(_OWN)}", now=now)
    given: dict[str, Any] = {name: as_texts(value) if name == "stop" else value for name, value in own.items()}
    return replace(sampling, **given)


def record_episodes(
    session: Session,
    role: str,
    agent: Callable[..., object],
    prompts: Ref,
    options: Mapping[str, object],
    shown: Mapping[str, object],
    bounds: Episodes,
    staleness: int,
    failed: Failed,
) -> EpisodeRows:
    """Record the calls of a rollout: the episodes, how many failed, and those that count."""
    name = str(getattr(agent, "__name__", "agent"))
    if not callable(agent) or not inspect.iscoroutinefunction(getattr(agent, "function", agent)):
        raise TraceError(f"{role}.rollout got {describe(agent)}, which is no agent", now="Pass an async function under @agent.")
    check_choice("failed", failed, Failed)
    shown = {"agent": name, **shown, **bounds.shown, **({"failed": failed} if failed != "mask" else {})}
    options = {**options, "agent": agent, "episodes": bounds, "repeat": session.count_generation(role, prompts.call)}
    return _record_played(session, role, "rollout", prompts, options, shown, staleness, failed)


def _record_played(
    session: Session,
    role: str,
    method: Literal["rollout", "branch"],
    prompts: Ref,
    options: Mapping[str, object],
    shown: Mapping[str, object],
    staleness: int,
    failed: Failed,
) -> EpisodeRows:
    bounds = options["episodes"]
    assert isinstance(bounds, Episodes)
    made = session.record(
        role=role,
        method=method,
        engine="rollout",
        granularity=Granularity.SAMPLE,
        inputs={"prompts": prompts},
        options={**options, "staleness": staleness},
        shown=shown,
        reads=tuple(f"{one}.weights" for one in dict.fromkeys((role, *(other for _, other in bounds.speakers)))),
        staleness=staleness,
    )
    episodes = Rows(session, made)
    common: dict[str, object] = {"timeout_s": None, "column": "value", "style": "columns", "columns": {}}
    counted = session.record(
        role=f"{role}.episodes",
        method="counted",
        engine="function",
        granularity=Granularity.BATCH,
        inputs={"samples": episodes.ref},
        options={"function": _counted, **common},
        shown={},
        is_aligned=False,
    )
    numbers = Metrics(session, counted)
    prefix = _prefix(role)
    causes = [kind for kind in get_args(EpisodeFailure) if bounds.speakers or kind != "unknown_speaker"]
    log(**{f"{prefix}/{kind}": numbers[kind] for kind in ("turns", "failed", *causes)})
    whole = session.record(
        role=f"{role}.episodes",
        method="whole",
        engine="function",
        granularity=Granularity.SAMPLE,
        inputs={"samples": episodes.ref},
        options={"function": Whole(failed), "gives": "kept", **common},
        shown={"failed": failed},
    )
    found = EpisodeRows(session, whole)
    found.failed = failed
    if not bounds.speakers:
        return found
    own = _said_by(found, "")
    own.speakers, own._of = bounds.speakers, {}
    return own


def _prefix(role: str) -> str:
    """The prefix of the names of what is logged about a role's episodes."""
    return "episodes" if role == "policy" else f"{role}/episodes"


def _branched(parents: EpisodeRows, n: int, at: object) -> EpisodeRows:
    """Record the calls of a branching: the turn for each parent, and those of the branches."""
    session, what = parents.session, f"{describe(parents)}.branch"
    if not is_count(n) or n > MAX_GROUP:
        raise OptionError(f"n is {n!r:.60}; an episode has from 1 to {MAX_GROUP} branches, a whole number")
    is_turn = isinstance(at, int) and not isinstance(at, bool) and 0 < abs(at) <= MOST_COUNTED
    if not (is_turn or (isinstance(at, str) and at == "random") or (isinstance(at, Rows) and at.column is not None)):
        now = "Say 'random', a number such as 2 or -1, or a handle with a number for each episode."
        raise OptionError(f"branch(at={describe(at) if isinstance(at, Handle) else repr(at):.60}): that is no turn", now=now)
    parents.check(session, what)
    _check_branches(session, parents, what)
    maker, parents = parents.maker, _with_all_said(parents)
    if isinstance(at, str):
        log(**{f"{_prefix(maker.role)}/silent_parents": (parents.num_turns == 0).sum()})
    repeat = session.count_generation(maker.role, parents.ref.call)
    inputs = Inputs(session, what)
    rows = parents.within(at) if isinstance(at, Rows) else parents
    inputs.rows(rows.ref, None, "rows")
    given = at.operand(inputs, "at=").name if isinstance(at, Rows) else None  # No column of theirs has such a name.
    function = BranchTurn(at if isinstance(at, int) else None, given, repeat)
    fields = None if rows.fields is None else rows.fields | {BRANCH_TURN}
    shown: dict[str, object] = {"at": at if given is None else "given"}
    turned = rows.samples_of(inputs.record(BRANCH_TURN, function, gives="rows", fields=fields, shown=shown))
    kept = ("agent", "episodes", "sampling", "kv", "late", "oversample")
    options = {**{name: maker.options[name] for name in kept}, "n": n, "repeat": repeat, "branches": True}
    name = str(getattr(maker.options["agent"], "__name__", "agent"))
    staleness = maker.options["staleness"]
    assert isinstance(staleness, int)
    return _record_played(session, maker.role, "branch", turned.ref, options, {"agent": name, "n": n}, staleness, parents.failed)


def _check_branches(session: Session, parents: EpisodeRows, what: str) -> None:
    """Raise TraceError for episodes that can't be branched."""
    makers = session.lineage.makers(parents.ref.call)
    if len(makers) > 1:
        made = " and ".join(f"{maker.name} ({maker.site})" for maker in makers)
        raise TraceError(f"{what}: they are of several rollouts, {made}", now="Branch those of each: first.branch(n=4).")
    if BRANCH_TURN in (parents.fields or ()) and makers[0].method != "branch":
        fault = f"they have a column {BRANCH_TURN!r} already, and branches get theirs under that name"
        raise TraceError(f"{what}: {fault}", now="Rename it.")


def _said_by(episodes: EpisodeRows, speaker: str) -> EpisodeRows:
    """Record the calls that take what one speaker said out of whole episodes; those in which it said nothing are left out."""
    session = episodes.session
    common: dict[str, object] = {"timeout_s": None, "column": "value", "style": "columns", "columns": {}}
    role, shown = f"{episodes.maker.role}.episodes", {"speaker": speaker} if speaker else {}
    bounds = episodes.maker.options["episodes"]
    assert isinstance(bounds, Episodes)
    sampled_by = dict(bounds.speakers).get(speaker, episodes.maker.role)
    drawn = dict(bounds.drawn_by).get(speaker)
    spoken = session.record(
        role=role,
        method="spoken",
        engine="function",
        granularity=Granularity.SAMPLE,
        inputs={"samples": episodes.ref},
        options={"function": Spoke(speaker), "gives": "kept", **common},
        shown=shown,
    )
    rows = Rows(session, spoken)
    own = session.record(
        role=role,
        method="said",
        engine="function",
        granularity=Granularity.SAMPLE,
        inputs={"samples": rows.ref},
        options={
            "function": Said(speaker, None if drawn is None else drawn.temperature),
            "gives": "rows",
            "fields": rows.fields,
            "sampled_by": sampled_by,
            **common,
        },
        shown=shown,
    )
    found = EpisodeRows(session, own)
    found.failed, found._whole = episodes.failed, episodes
    return found


def _with_all_said(episodes: EpisodeRows) -> EpisodeRows:
    """Episodes of which these rows have what one speaker said, with what all did."""
    whole = episodes._whole
    if whole is None:
        return episodes
    inputs = Inputs(episodes.session, "said_by_all")
    inputs.rows(whole.ref, None, "rows")
    said = whole.samples_of(inputs.record("said_by_all", Only(OF_SPEAKERS), gives="rows", fields=OF_SPEAKERS))
    inputs = Inputs(episodes.session, "said_by_all")
    inputs.rows(episodes.ref, None, "rows")
    inputs.rows(said.ref, None, "said")  # Its columns replace theirs.
    return episodes.samples_of(inputs.record("said_by_all", Without(()), gives="rows", fields=episodes.fields))


def _rewards_of(episodes: EpisodeRows) -> Scores:
    """Record the call that reads the rewards of episodes."""
    session = episodes.session
    call = session.record(
        role=f"{episodes.maker.role}.episodes",
        method="score",
        engine="function",
        granularity=Granularity.SAMPLE,
        inputs={"samples": episodes.ref},
        options={"function": EpisodeReward(), "timeout_s": None, "column": "reward", "style": "columns", "columns": {}},
        shown={},
    )
    return Scores(session, call)


def _counted(rows: Batch, values: Mapping[str, object]) -> dict[str, float]:
    """Mean number of turns, and how many episodes failed, in all and by cause."""
    how = [str(rows.ragged("failure").item(row)) for row in range(len(rows))] if len(rows) else []
    turns = float(np.mean(rows.dense("num_turns").astype(np.float64))) if len(rows) else math.nan
    return {"turns": turns, "failed": float(sum(map(bool, how)))} | {kind: float(how.count(kind)) for kind in get_args(EpisodeFailure)}


@dataclass(frozen=True)
class Whole:
    """Mark the episodes that count. Raises `OpError` for a failed one that may not."""

    failed: Failed

    def __call__(self, rows: Batch, values: Mapping[str, object]) -> Column:
        found = np.ones(len(rows), np.bool_)
        sampled = rows.ragged("loss_mask")
        for row, packed in enumerate(rows.ids.tolist()):
            how = str(rows.ragged("failure").item(row))
            if not how:
                continue
            ends = how in ("history_rewritten", "too_many_conversations", "unknown_speaker")
            if self.failed == "raise" or ends:
                record = rows.ragged("episode").item(row)
                error = record.get("error", "") if isinstance(record, Mapping) else ""
                now = "" if ends else "failed='mask' leaves such an episode out, and the number of them is logged."
                raise OpError(f"the episode of sample {SampleId.unpack(packed)} failed ({how}): {error}", now=now).about(packed)
            found[row] = self.failed == "zero" and bool(sampled.row(row).any())
        return found


# ---- users' roles

_MAY_WRITE = "_m2flow_may_write"
_names: weakref.WeakKeyDictionary[Session, set[str]] = weakref.WeakKeyDictionary()
"""Names of the roles of each flow that runs."""


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
    """Decorator: make a method of a `Role`, plain or async, a call of the graph.

    Units (`granularity`, `size`), arguments and `rng` are as for `m2flow.op`.

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
    """Metaclass of roles: calling a role's class in a flow makes a `RoleInFlow`."""

    def __call__(cls, *args: object, name: str | None = None, **kwargs: object) -> Any:
        session = current_session(f"the role {cls.__name__}")
        known = _names.setdefault(session, set())
        name = cls.__name__.lower() if name is None else name
        check_text("name", name)
        if name in known or name in session.models:
            raise TraceError(f"this flow has two roles named {name!r}", where=user_site().describe(), now=once_each(name))
        try:
            inspect.signature(inspect.getattr_static(cls, "__init__")).bind(None, *args, **kwargs)
        except TypeError as error:
            raise TraceError(
                f"{cls.__name__}(...) can't be made like this: {error}",
                where=user_site().describe(),
                now="Pass its arguments as its __init__ says.",
            ) from None
        known.add(name)
        return RoleInFlow(cls, session, name, functools.partial(_make, cls, *args, **kwargs))


class Role(metaclass=_RoleType):
    """Base class of users' roles: an object with state on a worker, whose methods under `@call` are calls of the graph.

    In a flow `MyRole(..., name="judge")` makes one; `name` is what plans and runs call it, by default the class's name in small letters.
    """

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
    """The stand-in of a role in its flow: its methods under `@call` record calls."""

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
        """The name of a resource of the class for this instance."""
        default = self._kind.__name__.lower()
        return f"{self._name}.{resource.removeprefix(f'{default}.')}" if resource.startswith(f"{default}.") else resource


@final
class FieldRows(OpRows):
    """A mapping for each sample; its fields are attributes, each a handle with rows."""

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


def may_write(instance: object, is_allowed: bool) -> None:
    """Allow or forbid that the next call sets the role's attributes."""
    vars(instance)[_MAY_WRITE] = is_allowed


def _make(kind: type, /, *args: object, **kwargs: object) -> object:
    """Make the real object on a worker."""
    return type.__call__(kind, *args, **kwargs)


def _methods(kind: type) -> dict[str, CallMethod]:
    return {name: member for name in dir(kind) if isinstance(member := inspect.getattr_static(kind, name), CallMethod)}
