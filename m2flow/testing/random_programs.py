"""Draw random programs, clusters and orders of events from a seed, and check that planned and eager runs of them agree.

    for number in range(1000):
        case = drawn_case(Dice(f"my seed, {number}"), "plain")
        assert case.difference() is None, str(case)

A case is a program with the conditions of one run. Random choices come from `Draws`: `Dice`, a cheap function of a seed, or hypothesis, for
which `programs`, `timed_programs`, `clusters` and `policies` are strategies. The text of a case recreates it and can be pasted into a test;
`shrunk` makes that text short.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, final

import msgspec
from hypothesis import strategies as st

from m2flow.errors import StateLost
from m2flow.macro.flow import Flow
from m2flow.macro.session import Backend
from m2flow.micro.protocol.plan import Plan
from m2flow.spec import ChannelSpec, ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing import programs as p
from m2flow.testing.program_calls import as_flow
from m2flow.testing.programs import Account, Answer
from m2flow.testing.world import run_eager, run_planned

T = TypeVar("T")


# ---- sources of random choices


class Draws(Protocol):
    """A source of random choices."""

    def integer(self, low: int, high: int) -> int:
        """Draw an integer, both ends included."""

    def choice(self, items: Sequence[T]) -> T: ...


@final
class Dice:
    """Choices that are a function of a seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def choice(self, items: Sequence[T]) -> T:
        return items[int(self._random() * len(items))]


@final
class _Hypothesis:
    """Choices that hypothesis makes."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def choice(self, items: Sequence[T]) -> T:
        return self._draw(st.sampled_from(items))


# ---- statements; operands that are named by counting back are among the latest three


def _any(draws: Draws) -> int:
    return draws.integer(0, 2)


def _role(draws: Draws) -> int:
    return draws.integer(0, 1)


def _generate(draws: Draws, *, is_timed: bool = False) -> p.Statement:
    return p.Generate(
        policy=_role(draws),
        source=draws.choice(("take", "take", "all", "samples")),
        which=_any(draws),
        count=draws.integer(1, 3),
        n=draws.choice((2, 3, 1)),
        longest=draws.choice((2, 6, 14)),
        more=draws.integer(0, 2) if is_timed else 0,
        is_exact=is_timed and draws.choice((False, False, False, True)),
        carries=is_timed and draws.choice((False, True)),
        keeps=is_timed and draws.choice((False, False, True)),
        defers=is_timed and draws.choice((False, False, True)),
    )


def _timed_generate(draws: Draws) -> p.Statement:
    return _generate(draws, is_timed=True)


def _refill(draws: Draws) -> p.Statement:
    return p.Refill(
        policy=_role(draws),
        dataset=_role(draws),
        n=draws.integer(2, 3),
        count=draws.choice((2, 1, 3)),
        reward=draws.choice((5, 2, 0, 1)),
        keep=draws.choice((3, 0, 1, 2)),
        most=draws.choice((9, 9, 9, 3)),
    )


def _update(draws: Draws) -> p.Statement:
    return p.Update(
        policy=_role(draws),
        samples=_any(draws),
        numbers=_any(draws),
        minibatch=_any(draws),
        epochs=draws.integer(1, 2),
        form=draws.choice(("rewards", "advantages", "reference")),
    )


def _refer(draws: Draws) -> p.Statement:
    return p.Refer(policy=_role(draws), place=draws.choice((0, 0, 1)))


def _compare(draws: Draws) -> p.Statement:
    return p.Compare(samples=_any(draws))


def _safe_score(draws: Draws) -> p.Statement:
    return p.Score(reward=draws.integer(0, 2), samples=_any(draws))


def _score(draws: Draws) -> p.Statement:
    return p.Score(reward=draws.choice((0, 3, 4, 1, 2)), samples=_any(draws))


def _mix(draws: Draws) -> p.Statement:
    unit = draws.choice(_MIXED)
    return p.Mix(unit=unit, samples=_any(draws), first=_any(draws), second=_any(draws), value=_any(draws))


_UNITS: tuple[Literal["minibatch", "group", "sample", "batch"], ...] = ("minibatch", "group", "sample", "batch")
_MIXED: tuple[Literal["sample", "group", "batch"], ...] = ("sample", "group", "batch")
_ASKED: tuple[Literal["note", "digest", "compare", "forget", "plain"], ...] = ("note", "digest", "compare", "forget", "plain")
_COMBINED: tuple[Literal["weighted", "centred", "of group", "of key", "where"], ...] = (
    "weighted",
    "centred",
    "of group",
    "of key",
    "where",
)
_FILTERS: tuple[Literal["numbers", "lengths", "samples", "groups", "none"], ...] = ("numbers", "lengths", "samples", "groups", "none")
_LOOKED_AT: tuple[Literal["mean", "metric", "len", "value", "rows", "cursor"], ...] = ("mean", "metric", "len", "value", "rows", "cursor")
_LEAVES: tuple[Literal["break", "continue"], ...] = ("break", "continue")

_Maker = Callable[[Draws], p.Statement]
_OTHERS: tuple[_Maker, ...] = (
    _update,
    _update,
    _score,
    _score,
    lambda d: p.ApplyOp(unit=d.choice(_UNITS), samples=_any(d)),
    lambda d: p.Logprobs(policy=_role(d), samples=_any(d)),
    lambda d: p.Values(samples=_any(d)),
    _mix,
    lambda d: p.Ask(role=_role(d), how=d.choice(("note", *_ASKED)), samples=_any(d)),
    lambda d: p.Post(is_read=d.choice((False, True)), samples=_any(d)),
    lambda d: p.Combine(how=d.choice(_COMBINED), first=_any(d), second=_any(d)),
    lambda d: p.Filter(how=d.choice(_FILTERS), samples=_any(d)),
    lambda d: p.Union(first=_any(d), second=_any(d)),
    lambda d: p.Demonstrate(policy=_role(d), minibatch=d.choice((0, 2))),
    lambda d: p.Actor(policy=_role(d), samples=_any(d), numbers=_any(d)),
    lambda d: p.Log(which=d.integer(0, 5)),
    _refill,
    _refill,
)
_CALM: tuple[_Maker, ...] = (_generate, _generate, *(maker for maker in _OTHERS if maker not in (_score, _update)), _safe_score, _update)
"""Statements whose errors, where functions raise, are mostly those of a `try`."""
_PLAIN: tuple[_Maker, ...] = (_generate, _generate, *_OTHERS)
_TIMED: tuple[_Maker, ...] = (_timed_generate, _timed_generate, *_OTHERS)


def _block(draws: Draws, makers: Sequence[_Maker], most: int) -> tuple[p.Statement, ...]:
    return tuple(draws.choice(makers)(draws) for _ in range(draws.integer(0, most)))


def _inner(draws: Draws, makers: Sequence[_Maker]) -> tuple[p.Statement, ...]:
    """Draw the body of a branch or a loop inside a step; some leave the loop over steps."""
    return tuple(
        p.Leave(how=draws.choice(_LEAVES)) if draws.integer(0, 6) == 6 else draws.choice(makers)(draws) for _ in range(draws.integer(0, 2))
    )


def _nested(draws: Draws, makers: Sequence[_Maker]) -> p.Statement:
    match draws.integer(0, 11):
        case 8:
            return p.Look(draws.choice(_LOOKED_AT), _any(draws), _inner(draws, makers), _inner(draws, makers))
        case 9:
            return p.Lag(_any(draws), _any(draws), _inner(draws, makers), _inner(draws, makers))
        case 10:
            return p.OnStep(_inner(draws, makers))
        case 11:
            return p.Repeat(draws.integer(1, 2), _inner(draws, makers), draws.choice((False, True)))
    return draws.choice(makers)(draws)


def _body(
    draws: Draws, makers: Sequence[_Maker], nested: Callable[[Draws, Sequence[_Maker]], p.Statement] = _nested
) -> tuple[p.Statement, ...]:
    """Draw the body of a step; most begin with a generation and train on it."""
    inner = tuple(nested(draws, makers) for _ in range(draws.integer(0, 6)))
    return (makers[0](draws), *inner, *_block(draws, (_update,), 1))


def make_program(draws: Draws, *, fails: bool = False) -> p.Program:
    """Draw a program of a few statements; with `fails`, a user's function in it may raise on some samples."""
    return p.Program(
        num_policies=draws.integer(1, 2),
        num_steps=draws.integer(1, 2),
        before=_block(draws, _PLAIN, 2),
        body=_body(draws, _PLAIN),
        after=_block(draws, _PLAIN, 1),
        fails=fails,
    )


def make_timed_program(draws: Draws) -> p.Program:
    """Draw a program whose result depends on time: older weights, oversampling, and partial rollouts or tail batching of late samples."""
    return p.Program(
        num_policies=draws.integer(1, 2),
        num_steps=draws.integer(2, 4),
        before=_block(draws, _PLAIN, 1),
        body=_body(draws, _TIMED),
        after=_block(draws, _PLAIN, 1),
        staleness=draws.choice((1, 1, 2, 3, 0)),
    )


def _try(draws: Draws, makers: Sequence[_Maker]) -> p.Statement:
    """Draw a `try` whose body mostly judges samples, since what raises is mostly a reward, and what it does instead."""
    body = tuple(draws.choice((_score, _score, draws.choice(makers)))(draws) for _ in range(draws.integer(1, 2)))
    what = draws.choice(("mean", "mean", *_LOOKED_AT))
    return p.Try(body, what, draws.integer(0, 1), _inner(draws, makers), drops=draws.choice((True, True, False)))


def make_catching_program(draws: Draws) -> p.Program:
    """Draw a program whose functions may raise, and which catches some of their errors and goes on."""

    def nested(draws: Draws, makers: Sequence[_Maker]) -> p.Statement:
        return (_try if draws.integer(0, 1) else _nested)(draws, makers)

    return p.Program(
        num_policies=draws.integer(1, 2),
        num_steps=draws.integer(1, 3),
        before=_block(draws, _CALM, 2),
        body=_body(draws, _CALM, nested),
        after=_block(draws, _CALM, 1),
        fails=True,
        staleness=draws.choice((0, 0, 1, 2)),
    )


def make_referring_program(draws: Draws) -> p.Program:
    """Draw a program that makes references of its policies at any line, anew where there is one already."""
    makers = (*_TIMED, _refer, _refer, _refer, _compare, _compare)
    return p.Program(
        num_policies=draws.integer(1, 2),
        num_steps=draws.integer(2, 4),
        before=_block(draws, (*_PLAIN, _refer, _refer), 2),
        body=(*_body(draws, makers), *_block(draws, (_refer, _compare, _update), 2)),
        after=_block(draws, (_compare, _refer), 2),
        staleness=draws.choice((0, 0, 1, 2)),
    )


def _large_refill(draws: Draws) -> p.Statement:
    """Draw a refill of several groups, which mostly finds them."""
    return p.Refill(
        policy=_role(draws),
        dataset=_role(draws),
        n=draws.choice((2, 2, 1, 3)),
        count=draws.integer(3, 6),
        reward=draws.choice((5, 2, 0, 1)),
        keep=draws.choice((2, 2, 1, 3)),
        most=draws.choice((24, 24, 9)),
    )


def make_refilling_program(draws: Draws) -> p.Program:
    """Draw a program whose steps take, mostly sample by sample or in mini-batches, what a refill gives that draws many prompts."""
    makers = (_large_refill, _large_refill, _update, _update, *_OTHERS)
    return p.Program(
        num_policies=draws.integer(1, 2),
        num_steps=draws.integer(1, 3),
        before=_block(draws, makers, 2),
        body=_body(draws, makers),
        after=_block(draws, makers, 1),
        fails=draws.choice((False, False, True)),
        staleness=draws.choice((0, 0, 1, 2)),
    )


# ---- agents


def _say(draws: Draws) -> p.Act:
    return p.Say(
        chat=_any(draws),
        what=draws.choice(("row", "heard", "random", "messages")),
        longest=draws.choice((4, 9, 2, 14)),
        stops=draws.choice((False, False, True)),
        offers=draws.choice((True, False)),
    )


def _use(draws: Draws) -> p.Use:
    """Draw a call of a tool; few never end, since each of these takes its time."""
    tool = draws.choice((0, 1, 2, 3, 0, 1, 2, 3, 4)) if draws.integer(0, 8) else 5
    return p.Use(tool, wait=draws.choice((0, 0, 1, 2)), fits=draws.integer(0, 7) > 0)


def _work(draws: Draws) -> p.Act:
    uses = tuple(_use(draws) for _ in range(draws.integer(1, 3)))
    return p.Work(_any(draws), uses, longest=draws.choice((5, 9)), is_told=draws.choice((True, True, False)))


def _acts(draws: Draws, depth: int, most: int) -> tuple[p.Act, ...]:
    return tuple(_act(draws, depth) for _ in range(draws.integer(1, most)))


_TESTED: tuple[Literal["text", "tokens", "cut", "result", "random"], ...] = ("text", "tokens", "cut", "result", "random")
_FAILS: tuple[Literal["raises", "fails", "times out", "is cancelled", "exits"], ...] = (
    "raises",
    "fails",
    "times out",
    "is cancelled",
    "exits",
)


def _act(draws: Draws, depth: int) -> p.Act:
    match draws.integer(0, 12 if depth else 8):
        case 0 | 1 | 2:
            return _say(draws)
        case 3 | 4 | 5:
            return _work(draws)
        case 6:
            return p.Follow(_any(draws), longest=draws.choice((4, 9)))
        case 7:
            return p.Pause(draws.integer(0, 3))
        case 8:  # Most that fail do so on some rows only.
            return p.Branch(draws.choice(_TESTED), (p.Fail(draws.choice(_FAILS)),), ())
        case 9 | 10:
            return p.Branch(draws.choice(_TESTED), _acts(draws, depth - 1, 2), _acts(draws, depth - 1, 2))
        case 11:
            apart: tuple[Literal["forked", "begun", "spoken"], ...] = ("forked", "begun", "spoken")
            return p.Gather(_any(draws), draws.choice(apart), _acts(draws, depth - 1, 2), _acts(draws, depth - 1, 2))
    if draws.integer(0, 1):
        return p.Times(draws.integer(1, 3), _acts(draws, depth - 1, 2))
    return p.Attempt(_acts(draws, depth - 1, 2), _acts(draws, depth - 1, 1))


def _rollout(draws: Draws) -> p.Statement:
    returns: tuple[Literal["number", "parts", "named", "broken"], ...] = ("number", "number", "parts", "named", "broken")
    failed: tuple[Literal["mask", "zero", "raise"], ...] = ("mask", "zero")
    return p.Rollout(
        policy=_role(draws),
        dataset=_role(draws),
        count=draws.integer(1, 3),
        n=draws.choice((2, 3, 1)),
        agent=(_say(draws), *_acts(draws, 2, 4)),
        longest=draws.choice((90, 60, 30)),
        max_turns=draws.choice((8, 4)),
        failed="raise" if draws.integer(0, 11) == 11 else draws.choice(failed),
        returns=draws.choice(returns),
        speaks=draws.choice((False, True)),
        reads=draws.choice((False, True)),
    )


def make_agent_program(draws: Draws) -> p.Program:
    """Draw a program in which random agents play, and what they said is trained."""
    makers = (_rollout, *_PLAIN, _rollout, _rollout)
    return p.Program(
        num_policies=draws.integer(1, 2),
        num_steps=draws.integer(1, 2),
        before=_block(draws, makers, 1),
        body=_body(draws, makers),
        after=_block(draws, makers, 1),
        staleness=draws.choice((0, 0, 1, 2)),
    )


ADVERSARIES = str(Path(__file__).with_name("fakes.py"))
_OWN_QUEUES = ("round-robin", "group-round-robin", "least-loaded", "lpt", "split")
_MORE_POLICIES = (
    "longest-first",
    "shortest-first",
    "oldest-first",
    "probe",
    "adaptive-concurrency:start=2",
    "admission:target=0.5",
    "repack",
    "gather:slack=0.5",
)
_PREDICTORS = ("siblings", "earlier-steps", "prompt-buckets")


def make_policies(draws: Draws) -> tuple[str, ...]:
    """Draw rollout policies that can be combined, including random ones (`fakes.Adversary`)."""
    seed = draws.integer(0, 1000)
    hands_out = draws.choice(("", f"{ADVERSARIES}:Adversary:seed={seed}", *_OWN_QUEUES))
    left, also = [*_MORE_POLICIES, f"{ADVERSARIES}:Shuffled:seed={seed}"], []
    for _ in range(draws.integer(0, 3)):
        also.append(draws.choice(left))
        left.remove(also[-1])
    return (*([hands_out] if hands_out else []), *also)


def scheduled(spec: ClusterSpec, names: tuple[str, ...], predictor: str = "siblings") -> ClusterSpec:
    """Return the cluster with these rollout policies."""
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"policy": names, "predictor": predictor})})


def make_cluster(draws: Draws) -> ClusterSpec:
    """Draw a cluster: a placement, worker counts, chunks and budgets that the planner might choose."""
    found = ClusterSpec(
        placement=draws.choice(("time-shared", "split")),
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=draws.integer(1, 3), max_running=draws.choice((64, 5, 2, 1))),
        train=TrainSpec(engine="fake", token_budget=draws.choice((4096, 60, 20, 1))),
        functions=FunctionSpec(workers=draws.integer(1, 2), chunk=draws.choice((64, 3, 1))),
        channels=ChannelSpec(max_samples=draws.choice((None, 1, 2, 5, 9, 30)), max_bytes=draws.choice((2**32, 2**32, 100, 1000, 4000))),
    )
    chunk = found.rollout.max_running if draws.choice((True, False)) else None
    return found.model_copy(update={"rollout": found.rollout.model_copy(update={"chunk": chunk})})


def make_tight_cluster(draws: Draws) -> ClusterSpec:
    """Draw a cluster whose channels have credits for only a few samples."""
    channels = ChannelSpec(max_samples=draws.choice((1, 2, 3, 5, 8, 13)), max_bytes=draws.choice((2**32, 100, 700, 2000, 9000)))
    return make_cluster(draws).model_copy(update={"channels": channels})


# ---- strategies for hypothesis


@st.composite
def programs(draw: st.DrawFn, *, fails: bool | None = False) -> p.Program:
    """Strategy for programs of a few statements.

    Args:
        fails: whether a user's function in it may raise on some samples; None: in some.
    """
    return make_program(_Hypothesis(draw), fails=draw(st.booleans()) if fails is None else fails)


@st.composite
def timed_programs(draw: st.DrawFn) -> p.Program:
    """Strategy for programs whose result depends on time."""
    return make_timed_program(_Hypothesis(draw))


@st.composite
def policies(draw: st.DrawFn) -> tuple[str, ...]:
    """Strategy for rollout policies that can be combined."""
    return make_policies(_Hypothesis(draw))


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """Strategy for clusters that the planner might choose."""
    return make_cluster(_Hypothesis(draw))


# ---- cases

Kind = Literal["plain", "raising", "timed", "catching", "referring", "refilling", "agents"]
KINDS: tuple[Kind, ...] = ("plain", "raising", "timed", "catching", "referring", "refilling", "agents")
"""Programs without errors, with functions that raise on some samples, whose result depends on time, which catch errors and go on, which
make references anew while they run, whose refills draw many prompts, and in which agents play."""
DeviceSharing = Literal["apart", "lent", "ahead"]
_DEVICE_SHARINGS: tuple[DeviceSharing, ...] = ("apart", "apart", "lent", "ahead")


_MAKERS: Mapping[Kind, Callable[[Draws], p.Program]] = {
    "plain": make_program,
    "raising": functools.partial(make_program, fails=True),
    "timed": make_timed_program,
    "catching": make_catching_program,
    "referring": make_referring_program,
    "refilling": make_refilling_program,
    "agents": make_agent_program,
}


@dataclass(frozen=True)
class Case:
    """A program, and the conditions of its planned run: cluster, seeds, shared devices and lost workers."""

    program: p.Program
    spec: ClusterSpec
    order_seed: int
    by_identity: bool = False
    device_sharing: DeviceSharing = "apart"
    """In a split plan: `lent`, the trainer lends its devices to all rollout workers but one; `ahead`, it loads onto those of all while
    samples run."""
    share: float = 0.0
    """Share of finished samples at which it does."""
    num_losses: int = 0
    """Number of workers that die and are restarted."""

    def difference(self) -> str | None:
        """Describe where the planned run differs from the eager one, or return None; an unexpected exception counts as a difference."""
        try:
            return difference(
                self.program,
                self.spec,
                order_seed=self.order_seed,
                by_identity=self.by_identity,
                placed=self._placed,
                num_losses=self.num_losses,
            )
        except Exception:
            return traceback.format_exc()

    def _placed(self, plan: Plan) -> Plan:
        names = [f"rollout-{i}" for i in range(self.spec.rollout.workers)]
        if self.spec.placement != "split" or self.device_sharing == "apart" or (self.device_sharing == "lent" and len(names) < 2):
            return plan
        if self.device_sharing == "lent":
            return beside_the_trainer(*names[1:], rollout={"lent_until": self.share})(plan)
        return beside_the_trainer(*names, train={"onload_at": self.share})(plan)

    def __str__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shown = {name: repr(value) for name, value in fields.items() if name not in ("program", "spec")}
        spec = repr(self.spec.model_dump(exclude_unset=True, exclude_none=True)).replace(ADVERSARIES, "m2flow/testing/fakes.py")
        shown["spec"] = f"ClusterSpec.model_validate({spec})"
        return f"Case(program={_text(self.program)}, {', '.join(f'{name}={text}' for name, text in shown.items())})"


def _text(value: object) -> str:
    """Format a program as code, without fields that have their defaults."""
    if isinstance(value, tuple):
        return f"({''.join(f'{_text(item)}, ' for item in value)})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    shown = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return f"{type(value).__name__}({', '.join(f'{field.name}={_text(held)}' for field, held in shown if held != field.default)})"


def drawn_case(draws: Draws, kind: Kind, *, is_tight: bool = False, loses: bool = False) -> Case:
    """Draw a case of a kind, with tight or ample channels, and with or without workers that die."""
    program = _MAKERS[kind](draws)
    spec = (make_tight_cluster if is_tight else make_cluster)(draws)
    if kind == "agents" and draws.integer(0, 1):  # Few others stop episodes midway and have them go on elsewhere.
        spec = scheduled(spec, (f"{ADVERSARIES}:Adversary:seed={draws.integer(0, 1000)}",))
    elif draws.integer(0, 2) == 2:
        spec = scheduled(spec, make_policies(draws), draws.choice(_PREDICTORS))
    return Case(
        program,
        spec,
        order_seed=draws.integer(0, 2**30),
        by_identity=draws.choice((False, True)),
        device_sharing=draws.choice(_DEVICE_SHARINGS),
        share=draws.choice((0.01, 0.3, 0.8)),
        num_losses=draws.integer(1, 3) if loses else 0,
    )


def shrunk(case: Case, *, most_tries: int = 400) -> Case:
    """Shrink a case that has a difference: leave out whatever can be left out while it still differs."""
    tries = 0
    while True:
        for smaller in _smaller(case):
            tries += 1
            if tries > most_tries:
                return case
            if smaller.difference() is not None:
                case = smaller
                break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield the case with one thing less."""
    program = case.program
    for name in ("after", "before", "body"):
        for block in _without_one(getattr(program, name)):
            yield dataclasses.replace(case, program=dataclasses.replace(program, **{name: block}))  # type: ignore[arg-type]
    plainer: dict[str, Any] = {"num_losses": 0, "device_sharing": "apart", "share": 0.0, "by_identity": False}
    for name, value in plainer.items():
        if getattr(case, name) != value:
            yield dataclasses.replace(case, **{name: value})
    less: dict[str, Any] = {"num_policies": 1, "fails": False, "num_steps": program.num_steps - 1, "staleness": program.staleness - 1}
    for name, value in less.items():
        if getattr(program, name) > value >= 0:
            yield dataclasses.replace(case, program=dataclasses.replace(program, **{name: value}))
    if case.spec.rollout.policy:
        yield dataclasses.replace(case, spec=scheduled(case.spec, ()))


def _without_one(block: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield a block without one of its statements, or acts, or with the body of one in its place, or with a smaller body."""
    for place, statement in enumerate(block):
        before, after = block[:place], block[place + 1 :]
        yield before + after
        for name in ("body", "then", "otherwise", "first", "second", "agent"):
            inner = getattr(statement, name, ())
            if isinstance(inner, tuple) and inner:
                if name != "agent":
                    yield before + inner + after
                for fewer in _without_one(inner):
                    yield (*before, dataclasses.replace(statement, **{name: fewer}), *after)


def beside_the_trainer(*names: str, **fields: Mapping[str, object]) -> Callable[[Plan], Plan]:
    """Place these rollout workers of a split plan on the trainer's devices; the others keep their own. `fields` of slots, by their kind."""

    def placed(plan: Plan) -> Plan:
        workers = []
        for worker in plan.workers:
            if worker.name in (*names, "train-0"):
                slots = [msgspec.structs.replace(slot, **fields.get(slot.kind, {})) for slot in worker.engines]
                worker = msgspec.structs.replace(worker, lease="shared", engines=tuple(slots))
            workers.append(worker)
        return msgspec.structs.replace(plan, workers=tuple(workers)).verify()

    return placed


def difference(
    program: p.Program,
    spec: ClusterSpec,
    *,
    order_seed: int,
    seed: int = 0,
    by_identity: bool = False,
    placed: Callable[[Plan], Plan] = lambda plan: plan,
    num_losses: int = 0,
) -> str | None:
    """Run a program planned and eager, and describe what differs, or return None.

    The eager run is given what time decided in the planned run. In the planned run `placed` may change which workers share devices, and
    `num_losses` workers die; if one dies with state that no other has, there is nothing to compare.
    """
    account = Account()
    flow = as_flow(program, account)
    planned = run_planned(flow, {}, spec, seed=seed, order_seed=order_seed, deterministic=by_identity, placed=placed, num_losses=num_losses)
    if num_losses and (planned.error.startswith(StateLost.__name__) or _lost_an_episode(planned)):
        return None
    wrong, lags, caught = account.wrong(planned), list(account.lags), list(account.caught)
    if wrong is not None:
        return f"planned: {wrong}"
    eager, value = eager_of(flow, spec, planned, seed=seed)
    if not eager.error:
        wrong = account.wrong(eager, value)
        if wrong is not None or lags != account.lags:
            return f"eager: {wrong}" if wrong else f"lagged: planned {_brief(lags, account.lags)}, eager {_brief(account.lags, lags)}"
    if caught != account.caught and not eager.error:  # How far a run goes on after an error that it ends with depends on the plan.
        return f"caught: planned {_brief(caught, account.caught)}, eager {_brief(account.caught, caught)}"
    return difference_of(planned, eager)


def _lost_an_episode(planned: Answer) -> bool:
    """Whether a worker died while a tool ran for an episode that may not run twice."""
    return "failed (lost)" in planned.error or any("lost" in detail for detail in planned.details.values())


def eager_of(flow: Flow, spec: ClusterSpec, planned: Answer, *, seed: int = 0) -> tuple[Answer, Callable[[int], object]]:
    """Run a flow eagerly, given what time decided in a planned run; also return the function from calls to their single values."""
    backends: list[Backend] = []

    def around(backend: Backend) -> Backend:
        backends.append(backend)
        return backend

    answer = run_eager(flow, {}, spec, seed=seed, decisions=planned.decisions or None, around=around)
    return answer, backends[0].value


def difference_of(planned: Answer, eager: Answer) -> str | None:
    """Describe what differs between two answers, or return None.

    A run that ends with an error has done all that comes before the error; how much else it has done depends on time.
    """
    for name, answer in (("planned", planned), ("eager", eager)):
        if len(answer.consumed) != len(set(answer.consumed)):
            return f"{name}: a sample was trained on twice in an epoch"
    if planned.error != eager.error:
        return f"planned ended with {planned.error or 'no error'!r}, eager with {eager.error or 'no error'!r}"
    fields = ["samples", "details", "rewards", "parts", "logs"] + (["consumed", "weights"] if not eager.error else [])
    for field in fields:
        ours, theirs = getattr(planned, field), getattr(eager, field)
        if eager.error and field != "logs":
            shared = ours.keys() & theirs.keys()
            ours, theirs = ({key: held[key] for key in shared} for held in (ours, theirs))
        if repr(ours) != repr(theirs) if field == "logs" else ours != theirs:  # A NaN in a log does not equal itself.
            return f"{field}: planned {_brief(ours, theirs)}, eager {_brief(theirs, ours)}"
    return None


def _brief(mine: object, other: object) -> str:
    if isinstance(mine, dict) and isinstance(other, dict):
        return f"{len(mine)} with {dict([(k, v) for k, v in mine.items() if other.get(k) != v][:2])}"
    if isinstance(mine, list) and isinstance(other, list):
        return f"{len(mine)} with {[item for item in mine if item not in other][:2]}"
    return repr(mine)
