"""Calls of one place are of one kind while nothing that they are given has changed; garbage is collected seldom while a flow runs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from m2flow import Dataset, Policy, Sample, flow, steps
from m2flow.macro.capture import Captures, Kinds, capture_guards
from m2flow.macro.graph import CallKind, Granularity, Site
from m2flow.macro.tracing import trace
from m2flow.micro.protocol.call_semantics import call_body, call_of

HERE = Site("flow.py", 1, "a line")
SCALE = 2


class Kinder:
    """Asks for the kind of one call of one place, with other options each time."""

    def __init__(self) -> None:
        self._kinds = Kinds(Captures())

    def __call__(self, **options: object) -> CallKind:
        return self._kinds.of(HERE, "op", "", "function", Granularity.SAMPLE, ("samples",), options, (), (), True)[0]


def scaled(sample: Sample) -> int:
    return SCALE * len(str(sample.text))


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, True), (0.0, -0.0), (1, 1.0), ("1", 1), ([1, 2], [1, 3]), ({"a": 1}, {"a": 1, "b": 2}), ({1: "a"}, {True: "a"}), ((1,), [1])],
)
def test_options_that_differ_in_anything_are_of_another_kind(first, second):
    kind = Kinder()
    before = kind(value=first)
    assert kind(value=first) is before
    after = kind(value=second)
    assert after is not before
    assert repr(after.options["value"]) == repr(second)


def test_a_list_that_was_changed_in_place_is_of_another_kind():
    kind, values = Kinder(), [1, 2]
    before = kind(value=values)
    values.append(3)
    assert kind(value=values).options["value"] == [1, 2, 3]
    assert before.options["value"] == [1, 2]


def test_what_is_new_with_each_call_is_of_no_kind():
    kinds = Kinds(Captures())
    asked = [
        kinds.of(HERE, "policy", "update", "train", Granularity.BATCH, (), {"epochs": 1, "windows": {i: (0, i)}}, (), (), False)
        for i in range(2)
    ]
    assert asked[0][0] is asked[1][0]
    assert [taken["windows"] for _, taken in asked] == [{0: (0, 0)}, {1: (0, 1)}]


Changing = tuple[Callable[..., object], Callable[[], object]]
"""A function, and what changes something that it captures."""


def in_a_module(text: str, name: str, value: object, new: object) -> Changing:
    space: dict[str, object] = {name: value} if value is not None else {}
    exec(text, space)
    function = space["judge"]
    assert callable(function)
    return function, lambda: space.update({name: new})


def in_a_cell() -> Changing:
    limit = 1000

    def function(sample: object) -> int:
        return limit

    def change() -> None:
        nonlocal limit
        limit += 1

    return function, change


def in_a_default() -> Changing:
    def function(sample: object, limit: int = 1000) -> int:
        return limit

    return function, lambda: setattr(function, "__defaults__", (1001,))


def in_its_code() -> Changing:
    def function(sample: object) -> int:
        return 1

    def other(sample: object) -> int:
        return 2

    return function, lambda: setattr(function, "__code__", other.__code__)


def in_an_attribute() -> Changing:
    def function(sample: object) -> int:
        return 1

    return function, lambda: setattr(function, "limit", 2)


@pytest.mark.parametrize(
    ("function", "change"),
    [
        in_a_module("def judge(s): return scale", "scale", 1000, 1001),
        in_a_module("def inner(): return scale\ndef judge(s): return inner()", "scale", 1000, 1001),
        in_a_module("def inner(): return 1\ndef judge(s): return inner()", "inner", None, len),
        in_a_module("def judge(s): return len(s)", "len", None, max),
        in_a_cell(),
        in_a_default(),
        in_its_code(),
        in_an_attribute(),
    ],
    ids=["global", "global of what it calls", "what it calls", "builtin", "cell", "default", "code", "attribute"],
)
def test_a_function_whose_captures_have_changed_is_of_another_kind(function, change):
    kind = Kinder()
    before = kind(function=function)
    assert kind(function=function) is before
    change()
    assert kind(function=function) is not before


def test_a_function_that_may_change_what_it_captures_is_not_watched():
    seen: list[int] = []
    assert capture_guards(lambda sample: seen.append(1)) is None
    assert capture_guards(scaled) is not None


@flow
def loop(num_steps: int = 3) -> None:
    policy, prompts = Policy("fake"), Dataset([{"prompt": "1="}])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(1), n=2, max_new_tokens=4)
        responses.map(lambda sample: len(sample.text) * SCALE)
        policy.update(responses, responses.map(scaled))


def test_the_lambda_of_a_loop_is_of_one_kind_and_its_calls_arrive_as_they_were_made():
    graph = trace(loop, {}, steps=3)[0]
    by_line: dict[str, set[int]] = {}
    for call in graph.calls:
        assert call.kind is not None
        by_line.setdefault(f"{call.site}{call.name}", set()).add(id(call.kind))
        sent = call_of(call_body(call))
        assert (sent.ordinal, sent.inputs, sent.reads, sent.writes, sent.site, sent.step) == (
            call.ordinal,
            call.inputs,
            call.reads,
            call.writes,
            call.site,
            call.step,
        )
        assert sent.options.keys() == call.options.keys() - {"rows"}
    assert all(len(kinds) == 1 for kinds in by_line.values())


def test_garbage_is_collected_seldom_while_a_flow_runs_and_as_before_afterwards():
    before, seen = gc.get_threshold(), []

    @flow
    def looking() -> None:
        Dataset([{"prompt": "1="}]).take(1)
        seen.append(gc.get_threshold()[0])

    try:
        for given in ((700, 10, 10), (60_000, 20, 50)):  # Python's, and those of who wants still fewer.
            gc.set_threshold(*given)
            trace(looking, {})
            assert gc.get_threshold() == given
    finally:
        gc.set_threshold(*before)
    assert seen[0] > 700
    assert seen[1] == 60_000


def test_whoever_has_switched_the_collection_off_keeps_it_off():
    seen = []

    @flow
    def looking() -> None:
        Dataset([{"prompt": "1="}]).take(1)
        seen.append((gc.isenabled(), gc.get_threshold()))

    gc.disable()
    try:
        before = gc.get_threshold()
        trace(looking, {})
        assert seen == [(False, before)]
    finally:
        gc.enable()
