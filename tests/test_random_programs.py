"""The first promise, for programs that nobody wrote: under every plan and order of events a flow gives what it gives call by call.

Random programs (`m2flow.testing.programs`) times random plans times random orders: calls of all granularities, several policies,
effects, loops in loops, branches on what was looked at, filters, unions, refills, ops of several inputs, roles with a state, functions
that raise. Where time is part of the meaning (older weights, late samples that are dropped or carried), eager is given what time
decided, and the program itself counts which versions each sample may have. `--long` draws more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_coming_ahead import ahead
from test_lending import lent

from m2flow.micro.plan import Plan
from m2flow.spec import ChannelSpec, ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.account import Account
from m2flow.testing.programs import (
    Actor,
    Ask,
    Demonstrate,
    Filter,
    Generate,
    Lag,
    Log,
    Look,
    OnStep,
    Program,
    Refill,
    Score,
    Union,
    Update,
)
from m2flow.testing.random_programs import clusters, difference, difference_of, programs, timed_programs
from m2flow.testing.world import run_eager, run_planned

NUM_CASES = 800
"""Of a property; less than two minutes in all on an idle core."""
TIMES_LONG = 20

orders = st.integers(0, 2**30)

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")


def seating(spec: ClusterSpec, how: str, share: float) -> Callable[[Plan], Plan]:
    """Of a split plan: its trainer lends its devices to all rollout workers but one, or comes to those of all while samples run."""
    names = [f"rollout-{i}" for i in range(spec.rollout.workers)]
    if spec.placement != "split" or how == "apart" or (how == "lent" and len(names) < 2):
        return lambda plan: plan
    return lent(share, *names[1:]) if how == "lent" else ahead(share, *names)


def check(config: pytest.Config, drawn: st.SearchStrategy[Program], num_cases: int = NUM_CASES) -> None:
    num_cases *= TIMES_LONG if config.getoption("--long") else 1

    @settings(max_examples=num_cases, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
    @given(
        drawn, clusters(), orders, st.booleans(), st.sampled_from(["apart", "apart", "lent", "ahead"]), st.sampled_from([0.01, 0.3, 0.8])
    )
    def agrees(program: Program, spec: ClusterSpec, order_seed: int, by_identity: bool, how: str, share: float) -> None:
        assert difference(program, spec, order_seed=order_seed, by_identity=by_identity, seated=seating(spec, how, share)) is None

    agrees()


@pytest.mark.timeout(0)
def test_a_random_program_gives_the_same_under_every_plan_and_order_of_events(request):
    check(request.config, programs())


@pytest.mark.timeout(0)
def test_a_random_program_whose_functions_raise_ends_with_the_same_error_everywhere(request):
    check(request.config, programs(fails=True))


@pytest.mark.timeout(0)
def test_a_random_program_in_which_time_counts_is_what_eager_gives_that_knows_what_time_decided(request):
    check(request.config, timed_programs(), NUM_CASES // 2)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None, phases=[Phase.generate])
@given(st.one_of(programs(fails=None), timed_programs()))
def test_a_program_is_legal_however_it_was_drawn(program):
    """What it ends with is a fault of its functions, or none: never one of the flow's text, or of ours."""
    error = run_eager(program.as_flow(), {}, SPEC).error
    assert not error or (program.fails and error.startswith(("RewardError", "OpError", "DatasetError"))) or "only" in error, error


SPEC = ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"), functions=FunctionSpec())
ASK = Generate(policy=0, source="take", which=0, count=2, n=2, longest=6)

FOUND = {
    "the rows of a dataset are looked at": Program(num_policies=1, num_steps=1, before=(), body=(ASK, OnStep(body=())), after=()),
    "prompts are what a refill has kept": Program(
        num_policies=1,
        num_steps=1,
        before=(),
        body=(
            Refill(policy=0, dataset=0, n=2, count=1, reward=2, keep=2, most=9),
            Generate(policy=0, source="samples", which=0, count=1, n=1, longest=6),
        ),
        after=(),
    ),
    "a keep raises on a group beyond the last one that a refill needs": Program(
        num_policies=2,
        num_steps=1,
        before=(Refill(policy=1, dataset=0, n=2, count=2, reward=0, keep=3, most=9),),
        body=(),
        after=(),
        fails=True,
    ),
    "a mean of no samples is logged": Program(
        num_policies=1, num_steps=1, before=(), body=(ASK, Filter("none", 0), Score(0, 0), Log(1), Look("mean", 0, (), ())), after=()
    ),
    "samples of two turns of a line that carries are brought together": Program(
        num_policies=1,
        num_steps=2,
        before=(),
        body=(replace(ASK, count=1, longest=14, more=2, carries=True), Union(first=2, second=2)),
        staleness=3,
    ),
}
"""What random programs have found, once each."""


@pytest.mark.parametrize("program", FOUND.values(), ids=list(FOUND))
@pytest.mark.parametrize("order_seed", range(3))
def test_what_was_found_once_stays_right(program, order_seed):
    assert run_eager(program.as_flow(), {}, SPEC).error == ""
    assert difference(program, SPEC, order_seed=order_seed) is None


NARROW = {
    "a generation whose weights come after those of one with a later taker": (
        Program(
            num_policies=1,
            num_steps=1,
            before=(),
            body=(
                replace(ASK, count=1, longest=2),
                replace(ASK, count=1, longest=2),
                Demonstrate(policy=0, minibatch=0),
                Refill(policy=0, dataset=0, n=2, count=2, reward=5, keep=3, most=9),
                Union(first=1, second=0),
            ),
            after=(),
        ),
        SPEC.model_copy(update={"placement": "time-shared", "channels": ChannelSpec(max_samples=1)}),
    ),
    "the earliest taker ends when all that it took is free already": (
        Program(
            num_policies=1,
            num_steps=2,
            before=(),
            body=(replace(ASK, count=1, longest=2), Actor(policy=0, samples=1, numbers=0), Score(reward=0, samples=0)),
            after=(),
            staleness=1,
        ),
        SPEC.model_copy(update={"placement": "split", "channels": ChannelSpec(max_bytes=100)}),
    ),
}
"""Programs that have stood still for want of room in a channel in which there was nothing."""


@pytest.mark.parametrize(("program", "spec"), NARROW.values(), ids=list(NARROW))
@pytest.mark.parametrize("order_seed", range(3))
def test_nobody_waits_for_ever_for_room_in_an_empty_channel(program, spec, order_seed):
    assert difference(program, spec, order_seed=order_seed) is None


WRONG = {
    "a role's second note is of no samples, and is not the first to end": (
        Program(
            num_policies=1,
            num_steps=2,
            before=(replace(ASK, count=1, longest=2),),
            body=(
                replace(ASK, source="all", count=1, longest=2),
                replace(ASK, source="samples", count=1, longest=2),
                Filter(how="samples", samples=2),
                Ask(role=0, how="note", samples=1),
            ),
            staleness=1,
        ),
        SPEC.model_copy(update={"placement": "time-shared", "channels": ChannelSpec(max_samples=1)}),
    ),
}
"""Programs that have ended with another value than eager."""


@pytest.mark.parametrize(("program", "spec"), WRONG.values(), ids=list(WRONG))
@pytest.mark.parametrize("order_seed", range(3))
def test_a_program_that_once_gave_another_value_gives_the_eager_one(program, spec, order_seed):
    assert difference(program, spec, order_seed=order_seed) is None


def test_a_program_counts_the_versions_and_the_steps_that_it_may_see():
    again = Program(1, 3, (), (ASK, Update(0, 0, 0, 0, 1, "rewards"), Lag(0, 1, (), ())), staleness=1)
    account = Account()
    answer = run_planned(again.as_flow(account), {}, SPEC, order_seed=2)
    assert [window for _, window in sorted(account.windows.items())] == [(0, 0), (0, 1), (1, 2)]
    (first, none), (second, seen), _ = account.lags
    assert (first, none) == (None, None)
    assert isinstance(seen, dict)
    assert account.wrong(answer, {second: seen, account.lags[2][0]: account.lags[2][1]}.__getitem__) is None
    assert str(account.wrong(answer, lambda call: {"loss": 0.5})).startswith(f"lagged gave {seen}, which is not what call {second}")
    account.windows = dict.fromkeys(account.windows, (7, 8))
    assert str(account.wrong(answer)).endswith("and may have 7 to 8")


def test_a_difference_is_told_in_words():
    trained = Program(1, 1, (), (ASK, Update(0, 0, 0, 0, 1, "rewards")))
    otherwise = Program(1, 1, (), (ASK, Update(0, 0, 0, 0, 1, "advantages")))
    planned, eager = run_planned(otherwise.as_flow(), {}, SPEC), run_eager(trained.as_flow(), {}, SPEC)
    assert str(difference_of(planned, eager)).startswith("weights: planned 1 with {'policy_0': ")
    planned.consumed *= 2
    assert difference_of(planned, eager) == "planned: a sample was trained on twice in an epoch"
    planned.error = "OpError: no"
    assert difference_of(planned, planned) == "planned: a sample was trained on twice in an epoch"
    planned.consumed = []
    assert difference_of(planned, eager) == "planned ended with 'OpError: no', eager with 'no error'"
