"""What a function keeps in what it captures is gone when the call is over: it is named, with the line and what to do."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import warnings
from collections.abc import Callable

import pytest

from m2flow import Dataset, Policy, Reward, Role, Sample, call, flow, nll, op, steps
from m2flow.errors import LostState
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager, run_planned

FAKES = ClusterSpec(placement="split", cores=2, device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
ROWS = [{"prompt": f"{i}="} for i in range(4)]

COUNT = 0
SEEN: list[str] = []
BEST: dict[str, float] = {}
BY_LENGTH: dict[int, list[str]] = collections.defaultdict(list)
NUMBERS = itertools.count()
RNG = random.Random(0)
LIMITS = {"most": 4}


class Tally:
    def __init__(self) -> None:
        self.total = 0

    def add_one(self) -> None:
        self.total += 1

    def half(self) -> float:
        return self.total / 2


TALLY = Tally()


def counts(sample: Sample) -> float:
    global COUNT
    COUNT += 1
    return float(COUNT)


def counts_calls(unit: object) -> bool:
    global COUNT
    COUNT += 1
    return True


class Tallying:
    def __init__(self) -> None:
        self.total = 0

    def __call__(self, unit: object) -> bool:
        self.total += 1
        return True


def remembers(sample: Sample) -> float:
    SEEN.append(str(sample.text))
    return float(len(SEEN))


def keeps_the_best(sample: Sample) -> float:
    BEST[str(sample.prompt)] = max(BEST.get(str(sample.prompt), 0.0), float(sample.num_tokens))
    return BEST[str(sample.prompt)]


def sorts(sample: Sample) -> float:
    BY_LENGTH[sample.num_tokens].append(str(sample.text))
    return 1.0


def numbers(sample: Sample) -> float:
    return float(next(NUMBERS))


def draws(sample: Sample) -> float:
    return RNG.random()


def tallies(sample: Sample) -> float:
    TALLY.add_one()
    return 1.0


def through_another(sample: Sample) -> float:
    return remembers(sample)


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, sample: Sample) -> float:
        self.count += 1
        return float(self.count)


def reads(sample: Sample) -> float:
    found = [sample.num_tokens]
    found.append(LIMITS["most"])
    own = {"a": TALLY.half()}
    own["b"] = 1.0
    return float(sum(found)) + own["a"]


@functools.cache
def slow_table(count: int) -> dict[int, int]:
    return {i: i * i for i in range(count)}


def with_a_cache(sample: Sample) -> float:
    return float(slow_table(10)[3] + LIMITS["most"])


def nested_keeps_its_own(sample: Sample) -> float:
    found = LIMITS["most"]

    def more() -> None:
        nonlocal found
        found += 1

    more()
    return float(found)


def named(function: Callable[[Sample], float]) -> list[str]:
    """What is said, in both modes."""

    @flow
    def scored() -> None:
        policy, verifier = Policy("fake"), Reward(function, name="judge")
        for _ in steps(2):
            responses = policy.generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
            verifier.score(responses)
            policy.update(responses, loss=nll())

    said = []
    for run in (run_eager, run_planned):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert run(scored, {}, FAKES).error == ""
        found = [warning for warning in caught if warning.category is LostState]
        assert all(warning.filename == "tests/macro/test_lost_state.py" and warning.lineno for warning in found)
        said.append([str(warning.message) for warning in found])
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (counts, "COUNT"),
        (remembers, "SEEN"),
        (keeps_the_best, "BEST"),
        (sorts, "BY_LENGTH"),
        (numbers, "NUMBERS"),
        (draws, "RNG"),
        (tallies, "TALLY"),
        (lambda sample: SEEN.append(str(sample.text)) or 1.0, "SEEN"),
        (functools.partial(remembers), "SEEN"),
    ],
)
def test_a_global_that_a_reward_changes_is_named_once(function: Callable[[Sample], float], name: str) -> None:
    (said,) = named(function)
    assert f"changes `{name}`, which is a copy" in said
    assert "Keep state in a Role" in said


def test_the_function_that_changes_it_is_named_where_another_is_called() -> None:
    (said,) = named(through_another)
    assert said.startswith("`remembers`, which `through_another` calls, changes `SEEN`")


def test_an_object_that_counts_its_calls_is_named() -> None:
    (said,) = named(Counting())
    assert "changes `self's object`" in said


def test_a_cell_is_named_as_a_global_is() -> None:
    total = 0

    def adds(sample: Sample) -> float:
        nonlocal total
        total += 1
        return float(total)

    (said,) = named(adds)
    assert "changes `total`" in said


@pytest.mark.parametrize("function", [reads, with_a_cache, nested_keeps_its_own])
def test_what_only_reads_or_changes_its_own_is_not_named(function: Callable[[Sample], float]) -> None:
    assert named(function) == []


class Remembering(Role):
    def __init__(self) -> None:
        self.seen: list[str] = []

    @call(returns="reward", writes=["remembering.seen"])
    def score(self, sample: Sample) -> float:
        self.seen.append(str(sample.text))
        return float(len(self.seen))


def test_a_role_keeps_what_its_calls_write() -> None:
    @flow
    def remembered() -> None:
        policy, judge = Policy("fake"), Remembering()
        for _ in steps(2):
            responses = policy.generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4)
            judge.score(responses)
            policy.update(responses, loss=nll())

    for run in (run_eager, run_planned):
        with warnings.catch_warnings():
            warnings.simplefilter("error", LostState)
            answer = run(remembered, {}, FAKES)
        assert sorted(answer.rewards.values()) == [float(i) for i in range(1, 9)]


def test_an_op_is_looked_at_as_a_reward_is() -> None:
    @op(granularity="batch")
    def remember(samples: list[Sample]) -> int:
        SEEN.extend(str(sample.text) for sample in samples)
        return len(SEEN)

    @flow
    def remembered() -> None:
        remember(Policy("fake").generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4))

    with pytest.warns(LostState, match="changes `SEEN`"):
        run_eager(remembered, {}, FAKES)


@pytest.mark.parametrize("place", ["keep", "groups", "values", "values of groups"])
@pytest.mark.parametrize("function", [counts_calls, Tallying()])
def test_what_keeps_groups_or_gets_values_is_looked_at_as_a_reward_is(place: str, function: Callable[[object], bool]) -> None:
    @flow
    def kept() -> None:
        policy, judge, prompts = Policy("fake"), Reward(reads), Dataset(ROWS)
        if place == "keep":
            policy.generate(prompts, n=2, max_new_tokens=4, count=1, score=judge, keep=lambda group: True)
            policy.generate(prompts, n=2, max_new_tokens=4, count=1, score=judge, keep=function)
            return
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=4)
        match place:
            case "groups":
                responses.filter_groups(function)
            case "values":
                responses.text.filter(function)
            case _:
                responses.text.filter_groups(function)

    for run in (run_eager, run_planned):
        with pytest.warns(LostState, match=r"changes `(COUNT|self's object)`"):
            assert run(kept, {}, FAKES).error == ""
