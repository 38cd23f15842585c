"""The first promise, for programs that nobody wrote: under every plan and order of events a flow gives what it gives call by call.

Random programs (`m2flow.testing.programs`) times random plans times random orders: calls of all granularities, several policies,
effects, loops in loops, branches on what was looked at, filters, unions, refills, ops of several inputs, roles with a state, functions
that raise, errors that are caught, references that are made anew, agents that branch, work at once, fail and speak with each other.
Where time is part of the meaning (older weights, late samples that are dropped or carried), eager is given what time decided, and the
program itself counts which versions each sample may have. The cases are always the same ones; `--long` has more of them, and `make fuzz`
draws new ones.
"""

from __future__ import annotations

from dataclasses import replace

import campaign
import pytest
from message_parts import lacks

from m2flow.spec import ChannelSpec, ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing import programs, random_programs
from m2flow.testing.program_calls import as_flow
from m2flow.testing.programs import (
    Account,
    Actor,
    Ask,
    Demonstrate,
    Filter,
    Generate,
    Lag,
    Log,
    Look,
    OnStep,
    Post,
    Program,
    Refill,
    Score,
    Try,
    Union,
    Update,
    Values,
)
from m2flow.testing.random_programs import ADVERSARIES, KINDS, Case, Dice, Kind, difference, difference_of, drawn_case, scheduled, shrunk
from m2flow.testing.world import run_eager, run_planned

NUM_CASES = 800
"""Of a property; three minutes in all on an idle core."""
TIMES_LONG = 20
in_quarters = pytest.mark.parametrize("quarter", [0, *(pytest.param(which, marks=pytest.mark.slow) for which in (1, 2, 3))])
"""The core draws the first quarter of a property's programs, `make test-all` the others."""

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")


def check(config: pytest.Config, kind: Kind, quarter: int, num_cases: int = NUM_CASES, *, loses: bool = False) -> None:
    num_cases *= TIMES_LONG if config.getoption("--long") else 1
    for number in range(num_cases * quarter // 4, num_cases * (quarter + 1) // 4):
        case = drawn_case(Dice(f"{kind}, {number}"), kind, loses=loses)
        found = case.difference()
        assert found is None, f"{found}\n{shrunk(case)}"


@pytest.mark.timeout(0)
@in_quarters
def test_a_random_program_gives_the_same_under_every_plan_and_order_of_events(quarter, request):
    check(request.config, "plain", quarter)


@pytest.mark.timeout(0)
@in_quarters
def test_a_random_program_whose_functions_raise_ends_with_the_same_error_everywhere(quarter, request):
    check(request.config, "raising", quarter)


@pytest.mark.timeout(0)
@in_quarters
def test_a_random_program_in_which_time_counts_is_what_eager_gives_that_knows_what_time_decided(quarter, request):
    check(request.config, "timed", quarter, NUM_CASES // 2)


@pytest.mark.timeout(0)
@in_quarters
def test_a_random_program_that_catches_errors_goes_on_as_python_does(quarter, request):
    check(request.config, "catching", quarter, NUM_CASES // 8)


@pytest.mark.timeout(0)
@in_quarters
def test_a_random_program_that_makes_its_references_anew_compares_with_the_weights_of_that_line(quarter, request):
    check(request.config, "referring", quarter, NUM_CASES // 8)


@pytest.mark.timeout(0)
@in_quarters
def test_a_random_program_that_takes_what_a_refill_gives_while_it_draws_gives_the_same(quarter, request):
    check(request.config, "refilling", quarter, NUM_CASES // 8)


@pytest.mark.timeout(0)
@in_quarters
def test_a_random_program_in_which_random_agents_play_gives_the_same_to_the_token(quarter, request):
    check(request.config, "agents", quarter, NUM_CASES // 10)


@pytest.mark.timeout(0)
@in_quarters
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_program_whose_workers_die_and_come_back_gives_the_same(kind, quarter, request):
    check(request.config, kind, quarter, NUM_CASES // (10 if kind in KINDS[:3] else 30), loses=True)


def test_a_program_is_legal_however_it_was_drawn():
    """What it ends with is a fault of its functions, or none: never one of the flow's text, or of ours."""
    for number in range(80):
        program = drawn_case(Dice(f"legal, {number}"), KINDS[number % len(KINDS)]).program
        error = run_eager(as_flow(program), {}, SPEC).error
        is_users = program.fails and error.startswith(("RewardError", "OpError", "DatasetError"))
        is_agents = error.startswith("OpError: the episode of sample")
        is_unplanned = error.startswith("PlanError: no worker has")  # A branch that the plan has not seen.
        assert not error or is_users or is_agents or is_unplanned or "only" in error, error


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
    assert run_eager(as_flow(program), {}, SPEC).error == ""
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


def split_spec(workers: int, max_running: int, budget: int, chunk: int, **channels: int) -> ClusterSpec:
    return ClusterSpec(
        device="cpu",
        cores=2,
        placement="split",
        rollout=RolloutSpec(engine="fake", workers=workers, max_running=max_running),
        train=TrainSpec(engine="fake", token_budget=budget),
        functions=FunctionSpec(workers=2, chunk=chunk),
        channels=ChannelSpec(**channels),
    )


WRONG = {
    "a role's second note is of no samples, and is not the first to end": Case(
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
        order_seed=0,
    ),
    "a dropped sample ends after its call, whose policy is another call's by then": Case(
        Program(
            num_policies=1,
            num_steps=2,
            before=(),
            body=(
                Generate(policy=1, source="samples", which=2, count=3, n=1, longest=14, more=2, carries=True, keeps=True),
                Generate(policy=0, source="take", which=2, count=2, n=2, longest=2, more=2),
            ),
        ),
        scheduled(split_spec(2, 2, 1, 1, max_samples=5), ("split", "repack", "admission:target=0.5", "probe", "longest-first")),
        order_seed=467346721,
    ),
    "a carried sample ends after its call, likewise": Case(
        Program(
            num_policies=2,
            num_steps=4,
            before=(),
            body=(
                Generate(policy=1, source="all", which=2, count=2, n=1, longest=2, carries=True, defers=True),
                Lag(
                    metrics=2,
                    steps=2,
                    then=(
                        Score(reward=3, samples=0),
                        Generate(policy=0, source="take", which=2, count=3, n=2, longest=2, more=1, carries=True, defers=True),
                    ),
                    otherwise=(),
                ),
                Look(what="value", which=1, then=(), otherwise=()),
                Update(policy=1, samples=2, numbers=2, minibatch=0, epochs=1, form="reference"),
            ),
            staleness=2,
        ),
        scheduled(split_spec(3, 5, 1, 3, max_samples=3, max_bytes=100), (f"{ADVERSARIES}:Adversary:seed=662",)),
        order_seed=867970550,
    ),
    "a sample is moved to a worker that has taken newer weights meanwhile": Case(
        Program(
            num_policies=1,
            num_steps=3,
            before=(),
            body=(
                Generate(policy=1, source="take", which=1, count=1, n=2, longest=6, keeps=True, is_exact=True),
                Update(policy=1, samples=1, numbers=0, minibatch=2, epochs=2, form="reference"),
            ),
        ),
        scheduled(
            split_spec(3, 5, 20, 64, max_samples=13, max_bytes=700),
            (f"{ADVERSARIES}:Adversary:seed=401", "probe", "adaptive-concurrency:start=2"),
            "earlier-steps",
        ),
        order_seed=293116344,
    ),
    "a worker that has given back its devices dies and is back": Case(
        Program(
            num_policies=1,
            num_steps=1,
            before=(),
            body=(Generate(policy=1, source="all", which=1, count=2, n=2, longest=2), Values(samples=1)),
        ),
        scheduled(split_spec(2, 64, 20, 1, max_samples=5), ("round-robin",), "earlier-steps"),
        order_seed=987969023,
        device_sharing="lent",
        share=0.3,
        num_losses=2,
    ),
    "a refill runs dry whose samples are of weights that time decided": Case(
        Program(
            num_policies=1,
            num_steps=1,
            before=(),
            body=(
                Generate(policy=1, source="take", which=1, count=3, n=1, longest=14, more=1, carries=True, defers=True),
                Update(policy=1, samples=2, numbers=2, minibatch=0, epochs=2, form="advantages"),
                Refill(policy=1, dataset=0, n=2, count=3, reward=5, keep=2, most=3),
            ),
            staleness=1,
        ),
        split_spec(3, 2, 60, 1, max_samples=5),
        order_seed=626244062,
    ),
    "a log follows an update that failed, of samples that may be of older weights": Case(
        Program(
            num_policies=1,
            num_steps=1,
            before=(),
            body=(
                Refill(policy=0, dataset=1, n=3, count=2, reward=0, keep=3, most=3),
                Update(policy=0, samples=0, numbers=1, minibatch=2, epochs=2, form="reference"),
                Try(
                    body=(Generate(policy=1, source="take", which=2, count=2, n=2, longest=2),),
                    what="metric",
                    which=1,
                    otherwise=(Values(samples=0),),
                ),
            ),
            fails=True,
            staleness=1,
        ),
        SPEC.model_copy(update={"placement": "time-shared", "channels": ChannelSpec(max_samples=2)}),
        order_seed=875036343,
    ),
    "the worker of a call that writes dies again, after some of its rows were reported": Case(
        Program(
            num_policies=1,
            num_steps=1,
            before=(),
            body=(Generate(policy=0, source="take", which=0, count=2, n=1, longest=6, more=1), Post(is_read=False, samples=1)),
            after=(Update(policy=1, samples=0, numbers=1, minibatch=1, epochs=2, form="reference"),),
        ),
        SPEC.model_copy(
            update={
                "placement": "time-shared",
                "rollout": RolloutSpec(engine="fake"),
                "train": TrainSpec(engine="fake", token_budget=20),
                "functions": FunctionSpec(chunk=1),
                "channels": ChannelSpec(max_samples=2),
            }
        ),
        order_seed=6794691,
        num_losses=3,
    ),
    "a call that takes over carried samples allows fewer tokens than the one that drew them": Case(
        Program(
            num_policies=1,
            num_steps=2,
            before=(),
            body=(
                Generate(policy=0, source="take", which=2, count=1, n=3, longest=2, more=2, carries=True),
                Generate(policy=0, source="take", which=2, count=3, n=3, longest=6, more=1, carries=True),
            ),
            staleness=1,
        ),
        SPEC.model_copy(update={"rollout": RolloutSpec(engine="fake", max_running=5), "channels": ChannelSpec(max_samples=9)}),
        order_seed=618470792,
    ),
}
"""Cases that have ended otherwise than eager, as `make fuzz` prints them."""


@pytest.mark.parametrize("case", WRONG.values(), ids=list(WRONG))
def test_a_case_that_once_ended_otherwise_is_the_eager_one(case):
    for order_seed in range(case.order_seed, case.order_seed + 3):
        assert replace(case, order_seed=order_seed).difference() is None


def test_a_program_counts_the_versions_and_the_steps_that_it_may_see():
    again = Program(1, 3, (), (ASK, Update(0, 0, 0, 0, 1, "rewards"), Lag(0, 1, (), ())), staleness=1)
    account = Account()
    answer = run_planned(as_flow(again, account), {}, SPEC, order_seed=2)
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
    planned, eager = run_planned(as_flow(otherwise), {}, SPEC), run_eager(as_flow(trained), {}, SPEC)
    assert str(difference_of(planned, eager)).startswith("weights: planned 1 with {'policy_0': ")
    planned.consumed *= 2
    twice = difference_of(planned, eager)
    assert not lacks(str(twice), "planned: ", "trained on twice")
    planned.error = "OpError: no"
    assert difference_of(planned, planned) == twice
    planned.consumed = []
    assert not lacks(str(difference_of(planned, eager)), "planned", "'OpError: no'", "eager", "'no error'")


def test_a_case_is_made_again_by_its_text_and_its_seed():
    for number in range(60):
        case = drawn_case(Dice(f"text, {number}"), KINDS[number % len(KINDS)], is_tight=number % 2 == 0, loses=number % 5 == 0)
        names = vars(programs) | {"Case": Case, "ClusterSpec": ClusterSpec}
        assert eval(str(case).replace("m2flow/testing/fakes.py", ADVERSARIES), names) == case == numbered(number)


def numbered(number: int) -> Case:
    return drawn_case(Dice(f"text, {number}"), KINDS[number % len(KINDS)], is_tight=number % 2 == 0, loses=number % 5 == 0)


def test_a_case_that_differs_is_made_shorter_while_it_does(monkeypatch):
    """What is left is what the difference needs: here a note after a filter, which a runtime with a fault gets wrong."""
    monkeypatch.setattr(Case, "difference", lambda self: "it differs" if len(asked(self)) > 1 else None)
    case = next(found for number in range(900) if len(asked(found := drawn_case(Dice(f"short, {number}"), "timed", loses=True))) > 2)
    smaller = shrunk(case)
    assert list(smaller.program.statements()) == asked(smaller)
    assert len(asked(smaller)) == 2
    assert (smaller.num_losses, smaller.device_sharing, smaller.program.num_steps, smaller.program.staleness) == (0, "apart", 0, 0)


def asked(case: Case) -> list[object]:
    return [statement for statement in case.program.statements() if isinstance(statement, Ask)]


def test_a_campaign_runs_the_cases_of_its_seed_and_ends_with_status_1_after_a_difference(monkeypatch, capsys):
    assert campaign.main(["--seed", "a", "--only", "3"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text == [str(campaign.numbered_case("a", 3)), "no difference"]
    monkeypatch.setattr(random_programs, "difference_of", lambda planned, eager: "they differ")
    assert campaign.main(["--seed", "a", "--only", "3"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "they differ"
