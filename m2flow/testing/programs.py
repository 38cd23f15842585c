"""Small programs as data, and the flow that each of them is: what random tests of schedules run, planned and eager.

    Program --as_flow--> Flow --run_planned, run_eager--> two Answers --difference--> nothing, or where they differ

A statement names what it works on by counting back (`samples=0` are the newest samples, `1` those before), modulo what there is, and
does nothing where there is nothing. So every program is legal, however it was drawn or shrunk. What a program may still get wrong is
what users get wrong: a reward that raises, a refill that finds too few groups. Strategies that draw programs: `random_programs`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from m2flow.macro.combining import concat, where
from m2flow.macro.critics import Critic, gae
from m2flow.macro.datasets import Dataset
from m2flow.macro.flow import Flow
from m2flow.macro.handles import Metrics, Rows
from m2flow.macro.losses import nll, ppo_clip
from m2flow.macro.number import Number
from m2flow.macro.ops import log, op, steps
from m2flow.macro.refill import Keep, informative
from m2flow.macro.roles import Policy, Reference, Reward
from m2flow.recipe import AdamW
from m2flow.samples import Sample
from m2flow.testing.fakes import fake_hash

MOST_VARIABLES = 3
"""A program can reach so many results of each kind; older ones are released."""
MOST_SAMPLES = 18
"""Samples that a generation may have: small enough for thousands of programs."""

ROWS = [{"prompt": f"{i * 7919 % 1000}=", "target": str(i)} for i in range(5)]

T = TypeVar("T")


# Statements. Whole numbers that name a role, a dataset or a result are taken modulo what there is.


@dataclass(frozen=True)
class Generate:
    """Responses to rows of a dataset, or to samples that are there already."""

    policy: int
    source: Literal["take", "all", "samples"]
    which: int
    """The dataset, or the samples."""
    count: int
    n: int
    longest: int


@dataclass(frozen=True)
class Refill:
    """Dynamic sampling."""

    policy: int
    dataset: int
    n: int
    count: int
    reward: int
    keep: int
    most: int


@dataclass(frozen=True)
class Score:
    reward: int
    samples: int


@dataclass(frozen=True)
class ApplyOp:
    unit: Literal["sample", "group", "batch"]
    samples: int


@dataclass(frozen=True)
class Combine:
    """Numbers of two calls, on samples of which one may be filtered from the other's; or of numbers and one value."""

    how: Literal["weighted", "centred", "of group", "of key", "where"]
    first: int
    second: int


@dataclass(frozen=True)
class Filter:
    how: Literal["numbers", "lengths", "samples", "groups", "none"]
    samples: int


@dataclass(frozen=True)
class Union:
    first: int
    second: int


@dataclass(frozen=True)
class Update:
    """A policy on samples, with rewards or with advantages that were computed."""

    policy: int
    samples: int
    numbers: int
    minibatch: int
    """0: all."""
    epochs: int
    form: Literal["rewards", "advantages", "reference"]


@dataclass(frozen=True)
class Demonstrate:
    """A policy on demonstrations."""

    policy: int
    minibatch: int


@dataclass(frozen=True)
class Actor:
    """A critic's values, GAE, and an update of both."""

    policy: int
    samples: int
    numbers: int


@dataclass(frozen=True)
class Log:
    which: int


@dataclass(frozen=True)
class Look:
    """Wait for a value, and branch on it."""

    what: Literal["mean", "metric", "len", "value", "rows", "cursor"]
    which: int
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True)
class OnStep:
    """Every second step."""

    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Repeat:
    """A loop inside a step. With `until` it ends when a value that it looks at is odd."""

    times: int
    body: tuple[Statement, ...]
    until: bool


@dataclass(frozen=True)
class Leave:
    """`break` or `continue` of the loop over steps."""

    how: Literal["break", "continue"]


Statement = (
    Generate
    | Refill
    | Score
    | ApplyOp
    | Combine
    | Filter
    | Union
    | Update
    | Demonstrate
    | Actor
    | Log
    | Look
    | OnStep
    | Repeat
    | Leave
)


@dataclass(frozen=True)
class Program:
    """A whole program."""

    num_policies: int
    num_steps: int
    """0: no loop over steps."""
    before: tuple[Statement, ...]
    body: tuple[Statement, ...]
    after: tuple[Statement, ...] = ()
    fails: bool = False
    """One of its rewards, ops and keeps raises on some samples."""

    def as_flow(self) -> Flow:
        def program() -> None:
            Interpreter(self).run()

        return Flow(program)

    def statements(self) -> Iterator[Statement]:
        """All of them, those in bodies too."""
        todo = [*self.before, *self.body, *self.after]
        while todo:
            statement = todo.pop()
            yield statement
            for body in ("body", "then", "otherwise"):
                todo += getattr(statement, body, ())


# What programs run on workers.


def digit_share(sample: Sample) -> float:
    text = str(sample.text)
    return round(sum(c.isdigit() for c in text) / (len(text) + 1), 6)


def length_penalty(sample: Sample) -> float:
    return -sample.num_tokens / 64


def at_random(sample: Sample) -> float:
    return float(_hash(sample) % 2)


def raises_on_some(sample: Sample) -> float:
    if _hash(sample) % 5 == 0:
        raise ValueError("no verdict")
    return float(_hash(sample) % 2)


def no_number_on_some(sample: Sample) -> object:
    return "none" if _hash(sample) % 7 == 0 else 0.5


def _hash(sample: Sample) -> int:
    return fake_hash(*(ord(c) for c in str(sample.text)))


@op()
def doubled_length(sample: Sample) -> float:
    return 2.0 * sample.num_tokens


@op(granularity="group")
def rank_in_group(samples: list[Sample]) -> list[int]:
    order = sorted(range(len(samples)), key=lambda i: (samples[i].num_tokens, i))
    return [order.index(i) for i in range(len(samples))]


@op(granularity="batch")
def digest_of_all(samples: list[Sample]) -> float:
    return float(fake_hash(len(samples), *(_hash(sample) & 0xFFFF for sample in samples)) % 997)


@op()
def raising_op(sample: Sample) -> float:
    return raises_on_some(sample)


@op(granularity="group")
def raising_on_groups(samples: list[Sample]) -> list[int]:
    if _hash(samples[0]) % 4 == 0:
        raise KeyError(samples[0].text)
    return [len(samples)] * len(samples)


def shorter_differ(group: list[Sample]) -> bool:
    return max(sample.num_tokens for sample in group) % 3 != 0


def every_second(group: list[Sample]) -> bool:
    return bool(_hash(group[0]) % 2)


def keep_raises(group: list[Sample]) -> bool:
    if _hash(group[0]) % 6 == 0:
        raise RuntimeError("can't say")
    return bool(_hash(group[0]) % 2)


def _is_odd(sample: Sample) -> bool:
    return bool(_hash(sample) % 2)


def _differ(samples: list[Sample]) -> bool:
    return len({s.num_tokens for s in samples}) > 1


REWARDS = (digit_share, length_penalty, at_random, raises_on_some, no_number_on_some)
KEEPS: tuple[Keep, ...] = (informative, shorter_differ, every_second, keep_raises)
_NUM_SAFE_REWARDS, _NUM_SAFE_KEEPS = 3, 3

# Running a program.


@dataclass(eq=False)
class _Samples:
    rows: Rows
    n: int
    """Samples of a prompt; 1 where updates can't compare them."""
    most: int
    made_by: frozenset[int]
    """Calls that made them."""
    parents: tuple[_Samples, ...] = ()
    """What they were filtered from: whatever has rows of these has rows of them."""
    is_union: bool = False


@dataclass(eq=False)
class _Numbers:
    rows: Rows
    of: _Samples


class _Leave(Exception):
    def __init__(self, how: str) -> None:
        self.how = how


def _recent() -> deque[T]:
    return deque(maxlen=MOST_VARIABLES)


@dataclass
class Interpreter:
    """Makes the calls of a program, inside a flow."""

    program: Program
    _samples: deque[_Samples] = field(default_factory=_recent)
    _numbers: deque[_Numbers] = field(default_factory=_recent)
    _values: deque[Number] = field(default_factory=_recent)
    _metrics: deque[Metrics] = field(default_factory=_recent)

    def run(self) -> None:
        program, statements = self.program, list(self.program.statements())
        self._policies = [Policy("fake", name=f"policy_{i}") for i in range(program.num_policies)]
        uses = {s.form for s in statements if isinstance(s, Update)}
        self._heldout = Dataset(ROWS[:3], name="heldout", shuffle=False)
        self._datasets = [Dataset(ROWS), self._heldout]
        self._demonstrations = Dataset(ROWS, name="demonstrations", shuffle=False)
        self._heldout.take(1)  # A flow that makes no call is none.
        self._reference = Reference(self._policies[0]) if "reference" in uses else None
        self._critic = Critic(self._policies[0]) if any(isinstance(s, Actor) for s in statements) else None
        rewards = REWARDS if program.fails else REWARDS[:_NUM_SAFE_REWARDS]
        self._rewards = [Reward(function) for function in rewards]
        self._keeps = KEEPS if program.fails else KEEPS[:_NUM_SAFE_KEEPS]
        if any(isinstance(s, OnStep) for s in statements):
            len(self._heldout.all())  # What the first step does not use has a place only if it may come after a look.
        self._step = -1
        self._do_all(program.before, guarded=True)
        for step in steps(program.num_steps):
            self._step = step
            try:
                self._do_all(program.body)
            except _Leave as left:
                if left.how == "break":
                    break
        self._do_all(program.after, guarded=True)

    def _do_all(self, statements: tuple[Statement, ...], *, guarded: bool = False) -> None:
        try:
            for statement in statements:
                self._do(statement)
        except _Leave:
            if not guarded:
                raise

    def _do(self, statement: Statement) -> None:  # noqa: C901  # one case a kind
        match statement:
            case Generate():
                self._generate(statement)
            case Refill(n=n, count=count):
                rows = _at(self._policies, statement.policy).generate(
                    _at(self._datasets, statement.dataset),
                    n=n,
                    max_new_tokens=6,
                    count=count,
                    score=_at(self._rewards, statement.reward),
                    keep=_at(self._keeps, statement.keep),
                    max_draws=statement.most,
                )
                self._samples.append(_Samples(rows, n, n * count, frozenset({rows.call.ordinal})))
            case Score(reward=reward):
                if self._samples:
                    samples = _back(self._samples, statement.samples)
                    self._score(_at(self._rewards, reward), samples)
            case ApplyOp(unit=unit):
                if self._samples:
                    self._apply(unit, _back(self._samples, statement.samples))
            case Combine():
                self._combine(statement)
            case Filter(how=how):
                if self._samples:
                    samples = _back(self._samples, statement.samples)
                    parents = (samples, *samples.parents)
                    rows = self._filtered(samples, how)
                    self._samples.append(_Samples(rows, samples.n, samples.most, samples.made_by, parents, samples.is_union))
            case Union():
                self._unite(statement)
            case Update():
                self._update(statement)
            case Demonstrate(minibatch=minibatch):
                policy = _at(self._policies, statement.policy)
                passes = {"minibatch_size": minibatch or None}
                self._metrics.append(policy.update(self._demonstrations.all(), loss=nll(), optimizer=AdamW(1e-3), **passes))
            case Actor():
                self._act(statement)
            case Log(which=which):
                if self._values and (which % 2 or not self._metrics):
                    log(value=_back(self._values, which // 2))
                elif self._metrics:
                    log(metric=_back(self._metrics, which // 2)["num_tokens"])
            case Look(then=then, otherwise=otherwise):
                self._do_all(then if self._is_odd(statement.what, statement.which) else otherwise)
            case OnStep(body=body):
                if self._step % 2:
                    self._do_all(body)
            case Repeat(times=times, body=body, until=until):
                for turn in range(times):
                    self._do_all(body)
                    if until and self._is_odd("metric" if turn % 2 else "mean", 0):
                        break
            case Leave(how=how):
                raise _Leave(how)

    def _generate(self, statement: Generate) -> None:
        policy, n = _at(self._policies, statement.policy), statement.n
        if statement.source == "samples":
            asked = [samples for samples in self._samples if not samples.is_union and samples.most * n <= MOST_SAMPLES]
            if not asked:
                return
            samples = _back(asked, statement.which)
            rows = policy.generate(samples.rows, n=n, max_new_tokens=statement.longest)
            most = samples.most * n
        else:
            dataset = _at(self._datasets, statement.which)
            prompts = dataset.all() if statement.source == "all" else dataset.take(statement.count)
            rows = policy.generate(prompts, n=n, max_new_tokens=statement.longest)
            most = n * (len(dataset) if statement.source == "all" else statement.count)
        self._samples.append(_Samples(rows, n, most, frozenset({rows.call.ordinal})))

    def _score(self, reward: Reward, samples: _Samples) -> _Numbers:
        scores = reward.score(samples.rows)
        self._numbers.append(_Numbers(scores, samples))
        self._values.append(scores.mean())
        return self._numbers[-1]

    def _apply(self, unit: str, samples: _Samples) -> None:
        fails = self.program.fails
        functions = {"sample": raising_op if fails else doubled_length, "group": raising_on_groups if fails else rank_in_group}
        result = functions.get(unit, digest_of_all)(samples.rows)
        if isinstance(result, Rows):
            self._numbers.append(_Numbers(result, samples))
        else:
            self._values.append(Number(result))

    def _combine(self, statement: Combine) -> None:
        if not self._numbers:
            return
        first = _back(self._numbers, statement.first)
        fitting = [other for other in self._numbers if other.of in (first.of, *first.of.parents)]
        other = _back(fitting, statement.second).rows
        match statement.how:
            case "weighted":
                rows = first.rows - 0.5 * other
            case "centred":
                rows = first.rows - first.rows.mean()
            case "of group":
                rows = first.rows - other.mean(over="group")
            case "of key":
                rows = first.rows * other.groupby(other > 0.2).transform("count")
            case "where":
                rows = where(first.rows > other, first.rows, 0.25)
        self._numbers.append(_Numbers(rows, first.of))

    def _filtered(self, samples: _Samples, how: str) -> Rows:
        match how:
            case "numbers":
                numbers = self._numbers_of(samples, 0).rows
                return samples.rows.select(numbers > numbers.mean())
            case "lengths":
                return samples.rows.filter(samples.rows.length > 2)
            case "samples":
                return samples.rows.filter(_is_odd)
            case "groups":
                return samples.rows.filter_groups(_differ)
        return samples.rows.filter(samples.rows.length < 0)

    def _unite(self, statement: Union) -> None:
        if not self._samples:
            return
        first = _back(self._samples, statement.first)
        others = [other for other in self._samples if not other.made_by & first.made_by and "reward" not in _columns(other, first)]
        if not others:
            return
        second = _back(others, statement.second)
        rows = concat([first.rows, second.rows])
        most, n = first.most + second.most, min(first.n, second.n)
        self._samples.append(_Samples(rows, n, most, first.made_by | second.made_by, is_union=True))

    def _update(self, statement: Update) -> None:
        if not self._samples:
            return
        samples = _back(self._samples, statement.samples)
        numbers = self._numbers_of(samples, statement.numbers)
        form = statement.form if samples.n > 1 else "advantages"
        passes = {"minibatch_size": statement.minibatch or None, "epochs": statement.epochs}
        policy = _at(self._policies, statement.policy)
        if form == "advantages":
            metrics = policy.update(samples.rows, advantages=numbers.rows, **passes)  # type: ignore[arg-type]
        elif form == "reference" and self._reference is not None:
            loss = ppo_clip(kl_coef=0.1)
            metrics = policy.update(samples.rows, numbers.rows, loss=loss, reference=self._reference, **passes)  # type: ignore[arg-type]
        else:
            metrics = policy.update(samples.rows, numbers.rows, **passes)  # type: ignore[arg-type]
        self._metrics.append(metrics)

    def _act(self, statement: Actor) -> None:
        if not self._samples or self._critic is None:
            return
        samples = _back(self._samples, statement.samples)
        numbers = self._numbers_of(samples, statement.numbers)
        values = self._critic.values(samples.rows)
        estimate = gae(samples.rows, numbers.rows, values, lam=0.5)
        policy = _at(self._policies, statement.policy)
        self._metrics.append(policy.update(samples.rows, advantages=estimate.advantages))
        self._critic.update(samples.rows, returns=estimate.returns, old_values=values)

    def _numbers_of(self, samples: _Samples, which: int) -> _Numbers:
        fitting = [numbers for numbers in self._numbers if numbers.of in (samples, *samples.parents)]
        return _back(fitting, which) if fitting else self._score(self._rewards[0], samples)

    def _is_odd(self, what: str, which: int) -> bool:
        """Look at something; an odd number is true."""
        if what == "mean" and self._values:
            return _odd(float(_back(self._values, which)))
        if what == "value" and self._values:
            return bool(_back(self._values, which) > 0.3)
        if what == "metric" and self._metrics:
            return _odd(float(_back(self._metrics, which)["loss" if which % 2 else "num_tokens"]))
        if what == "len" and self._samples:
            return len(_back(self._samples, which).rows) % 2 == 1
        if what == "rows" and self._numbers:
            return _odd(sum(_odd(float(str(number))) for number in _back(self._numbers, which).rows))
        return what == "cursor" and _at(self._datasets, which).cursor % 2 == 1


def _columns(*samples: _Samples) -> set[str]:
    """Columns that only samples of a refill have."""
    return {"reward" for each in samples if each.rows.scored_by is not None}


def _odd(number: float) -> bool:
    return math.isfinite(number) and round(number * 1e6) % 2 == 1  # The mean of no samples is no number.


def _at(items: list[T] | tuple[T, ...], which: int) -> T:
    return items[which % len(items)]


def _back(items: deque[T] | list[T], which: int) -> T:
    """Counting from the newest."""
    return items[-1 - which % len(items)]
