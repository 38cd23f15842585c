"""What a random program does: its statements as calls of a flow, in the order in which Python would make them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

from m2flow.macro.combining import concat, where
from m2flow.macro.critics import Critic, gae
from m2flow.macro.datasets import Dataset
from m2flow.macro.handles import Metrics, Rows
from m2flow.macro.losses import nll, ppo_clip
from m2flow.macro.number import Number
from m2flow.macro.ops import log, steps
from m2flow.macro.roles import Policy, Reference, Reward
from m2flow.recipe import AdamW
from m2flow.testing.program_functions import (
    KEEPS,
    NUM_SAFE,
    REWARDS,
    digest_of_all,
    doubled_length,
    is_odd_text,
    lengths_differ,
    place_in_minibatch,
    raising_on_groups,
    raising_op,
    rank_in_group,
)
from m2flow.testing.programs import (
    Actor,
    ApplyOp,
    Combine,
    Demonstrate,
    Filter,
    Generate,
    Leave,
    Log,
    Logprobs,
    Look,
    OnStep,
    Program,
    Refill,
    Repeat,
    Score,
    Statement,
    Union,
    Update,
)

MOST_VARIABLES = 3
"""A program can reach so many results of each kind; older ones are released."""
MOST_SAMPLES = 18
"""Samples that a generation may have: small enough for thousands of programs."""

ROWS = [{"prompt": f"{i * 7919 % 1000}=", "target": str(i)} for i in range(5)]

T = TypeVar("T")


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
        rewards = REWARDS if program.fails else REWARDS[:NUM_SAFE]
        self._rewards = [Reward(function) for function in rewards]
        self._keeps = KEEPS if program.fails else KEEPS[:NUM_SAFE]
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
        log(**{f"value_{i}": value for i, value in enumerate(self._values)})

    def _do_all(self, statements: tuple[Statement, ...], *, guarded: bool = False) -> None:
        try:
            for statement in statements:
                self._do(statement)
        except _Leave:
            if not guarded:
                raise

    def _do(self, statement: Statement) -> None:  # one case a kind
        match statement:
            case Generate():
                self._generate(statement)
            case Refill(n=n, count=count):
                rows = _at(self._policies, statement.policy).generate(
                    _at(self._datasets, statement.dataset),
                    n=n,
                    max_new_tokens=14,
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
            case Logprobs(policy=policy):
                if self._samples:
                    said = _at(self._policies, policy).logprobs(_back(self._samples, statement.samples).rows)
                    self._values.append(said.mean())
                    log(said=self._values[-1])
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
                trained = _at(self._policies, statement.policy)
                passes = {"minibatch_size": minibatch or None, "optimizer": AdamW(1e-3)}
                self._metrics.append(trained.update(self._demonstrations.all(), loss=nll(), **passes))  # type: ignore[arg-type]
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
        functions["minibatch"] = place_in_minibatch
        result = functions.get(unit, digest_of_all)(samples.rows)
        if isinstance(result, Rows):
            self._numbers.append(_Numbers(result, samples))
            self._values.append(result.mean())
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
        self._values.append(rows.mean())

    def _filtered(self, samples: _Samples, how: str) -> Rows:
        match how:
            case "numbers":
                numbers = self._numbers_of(samples, 0).rows
                return samples.rows.select(numbers > numbers.mean())
            case "lengths":
                return samples.rows.filter(samples.rows.length > 2)
            case "samples":
                return samples.rows.filter(is_odd_text)
            case "groups":
                return samples.rows.filter_groups(lengths_differ)
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
