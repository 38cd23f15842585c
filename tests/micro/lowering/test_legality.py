"""Each rule that the planner keeps is needed: without it, a legal-looking schedule of a small flow gives a wrong answer, or hangs.

The rules are listed in `m2flow.micro.lowering.passes`. Each test breaks exactly one of them and tries a few clusters and orders of
events; with the rule in place all of these agree with the eager interpreter.
"""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import pytest
from seeded_bugs import minibatches_by_arrival

from m2flow import Dataset, Policy, Reward, Role, Sample, call, flow, log, nll, op, steps
from m2flow.macro.flow import Flow
from m2flow.micro.lowering import passes
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import Stage
from m2flow.micro.scheduler import call_lifecycle, call_state, weights
from m2flow.micro.scheduler.call_lifecycle import CallLifecycle
from m2flow.micro.scheduler.call_state import CallState
from m2flow.micro.scheduler.weights import EngineWeights, Versions
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.programs import Answer
from m2flow.testing.random_programs import difference_of
from m2flow.testing.world import run_eager, run_planned

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")

Patch = pytest.MonkeyPatch
ROWS = [{"prompt": f"{i * 7919 % 1000}=", "target": str(i)} for i in range(6)]


def length(sample: Sample) -> float:
    return sample.num_tokens / 16


def raises_mostly(sample: Sample) -> float:
    raise ValueError(str(sample.text))


@op(granularity="group")
def rank(samples: list[Sample]) -> list[int]:
    order = sorted(range(len(samples)), key=lambda i: (samples[i].num_tokens, i))
    return [order.index(i) for i in range(len(samples))]


@op(granularity="batch")
def count(samples: list[Sample]) -> int:
    return len(samples)


@flow
def grpo(minibatch: int = 0) -> None:
    policy, reward = Policy("fake"), Reward(length)
    prompts = Dataset(ROWS)
    for _ in steps(2):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=9)
        policy.update(responses, reward.score(responses), minibatch_size=minibatch or None)


@flow
def minibatches() -> None:
    grpo(minibatch=1)


@flow
def on_groups() -> None:
    responses = Policy("fake").generate(Dataset(ROWS).take(3), n=3, max_new_tokens=9)
    log(ranks=rank(responses).map(float).sum())


@flow
def on_all() -> None:
    log(count=count(Policy("fake").generate(Dataset(ROWS).take(3), n=2, max_new_tokens=9)))


@flow
def two_updates() -> None:
    """Of which the second could begin before the first."""
    policy, demos, reward = Policy("fake"), Dataset(ROWS, shuffle=False), Reward(length)
    responses = policy.generate(demos.take(3), n=2, max_new_tokens=9)
    policy.update(responses, reward.score(responses))
    policy.update(demos.all(), loss=nll())


@flow
def looks_back() -> None:
    """The log-probabilities of the weights before an update that needs nothing of them."""
    policy, demos = Policy("fake"), Dataset(ROWS, shuffle=False)
    responses = policy.generate(demos.take(4), n=2, max_new_tokens=20)
    said = policy.logprobs(responses)
    policy.update(demos.all(), loss=nll())
    log(said=said.mean())


@flow
def samples_of_both() -> None:
    """Samples of the weights before an update that needs nothing of them, and of those after it."""
    policy, demos = Policy("fake"), Dataset(ROWS, shuffle=False)
    reward = Reward(length)
    before = policy.generate(demos.take(4), n=2, max_new_tokens=20)
    policy.update(demos.all(), loss=nll())
    after = policy.generate(demos.take(4), n=2, max_new_tokens=20)
    log(before=reward.score(before).mean(), after=reward.score(after).mean())


@flow
def samples_between() -> None:
    """Samples of weights that two updates, which need nothing of them, leave and replace."""
    policy, demos = Policy("fake"), Dataset(ROWS, shuffle=False)
    policy.update(demos.take(2), loss=nll())
    between = policy.generate(demos.take(4), n=2, max_new_tokens=20)
    policy.update(demos.all(), loss=nll())
    log(between=Reward(length).score(between).mean())


@flow
def refilling() -> None:
    policy, reward = Policy("fake"), Reward(raises_mostly)
    policy.generate(Dataset(ROWS), n=3, max_new_tokens=9, count=2, score=reward)


class Keeper(Role):
    """Remembers lengths; which ones, and in which order, shows in what it says."""

    def __init__(self) -> None:
        self.seen = [3]

    @call(returns="reward", writes=["keeper.seen"])
    def note(self, sample: Sample) -> float:
        self.seen.append(sample.num_tokens)
        return float(len(self.seen))

    @call(reads=["keeper.seen"])
    def says(self, sample: Sample) -> int:
        return sum(place * length for place, length in enumerate(self.seen))


def is_wanted(sample: Sample) -> bool:
    return sample.num_tokens < 0


@flow
def notes_of_nothing() -> None:
    """Notes of no samples, one after notes that come late, the other after a read that comes later still."""
    policy, keeper, prompts = Policy("fake"), Keeper(), Dataset(ROWS)
    at_once = policy.generate(prompts.take(2), max_new_tokens=2)
    none = at_once.filter(is_wanted)
    keeper.note(policy.generate(prompts.take(2), max_new_tokens=30, min_new_tokens=20))
    keeper.note(none)
    early = keeper.says(at_once)
    late = keeper.says(policy.generate(prompts.take(2), max_new_tokens=60, min_new_tokens=40))
    keeper.note(none)
    keeper.note(at_once)
    log(early=early.map(float).mean(), late=late.map(float).mean())


@op()
def raises_at_the_end(sample: Sample, number: float) -> float:
    raise ValueError("at the end")


@flow
def fails_past_nothing() -> None:
    """A note of samples after one of none that has an error, if only among what it would say of them."""
    keeper = Keeper()
    responses = Policy("fake").generate(Dataset(ROWS).take(2), max_new_tokens=2)
    failed = raises_at_the_end(responses, Reward(length).score(responses))
    keeper.note(responses.filter(is_wanted).with_columns(failed=failed))
    keeper.note(responses)


def specs() -> Iterator[ClusterSpec]:
    for placement, workers, running, chunk in itertools.product(["split", "time-shared"], [2, 1], [2, 64], [1, 64]):
        yield ClusterSpec(
            placement=placement,  # type: ignore[arg-type]
            cores=2,
            device="cpu",
            rollout=RolloutSpec(engine="fake", workers=workers, max_running=running),
            train=TrainSpec(engine="fake", token_budget=20),
            functions=FunctionSpec(workers=2, chunk=chunk),
        )


@functools.cache
def eager_answer(program: Flow) -> Answer:
    return run_eager(program, {}, next(specs()))


def wrong(program: Flow) -> str | None:
    """What the first schedule gave that was not the eager answer."""
    for order_seed, spec in enumerate(specs()):
        try:
            planned = run_planned(program, {}, spec, order_seed=order_seed)
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        said = difference_of(planned, eager_answer(program))
        if said is not None:
            return said
    return None


def stage_with(**changes: object) -> Callable[[Callable[[object], Stage]], Callable[[object], Stage]]:
    """A first pass that gives functions another stage than it should."""
    return lambda whole: lambda call: msgspec.structs.replace(whole(call), **(changes if whole(call).engine == "function" else {}))


def granularity_closure(patch: Patch) -> None:
    patch.setattr(passes, "_stage", stage_with(unit="sample", is_barrier=False)(passes._stage))


def whole_groups(patch: Patch) -> None:
    patch.setattr(call_lifecycle, "by_group", lambda ids: {row: [row] for row in ids})
    patch.setattr(call_state, "group_key", lambda row: row)


def batch_barrier(patch: Patch) -> None:
    """All rows are one unit, but what is there of it is handed out."""
    whole = CallState.arrived

    def arrived(self: CallState, ids: list[int], num_tokens: dict[int, int]) -> bool:
        has_more = whole(self, ids, num_tokens)
        if self.stage.unit == "batch" and self.call.engine == "function" and ids and not self.ready:
            self.ready = deque(sorted(ids))
            return True
        return has_more

    patch.setattr(CallState, "arrived", arrived)


def reads_wait_for_writes(patch: Patch) -> None:
    add = CallLifecycle.add_call

    def at_once(self: CallLifecycle, call: object, stage: Stage) -> CallState:
        state = add(self, call, stage)  # type: ignore[arg-type]
        if state.call.engine == "rollout":
            state.waits_for.clear()
            self._start_if_ready(state)
        return state

    patch.setattr(CallLifecycle, "add_call", at_once)
    patch.setattr(weights, "may_use", lambda state, version, role="": True)


def writes_wait_for_reads(patch: Patch) -> None:
    patch.setattr(Versions, "reads_before", lambda self, call: iter(()))


def writes_wait_for_writes(patch: Patch) -> None:
    add = CallLifecycle.add_call

    def at_once(self: CallLifecycle, call: object, stage: Stage) -> CallState:
        state = add(self, call, stage)  # type: ignore[arg-type]
        if state.is_update:
            state.waits_for.clear()
            self._start_if_ready(state)
        return state

    patch.setattr(CallLifecycle, "add_call", at_once)


def versions_match(patch: Patch) -> None:
    patch.setattr(weights, "may_use", lambda state, version, role="": True)


def weights_stay_until_they_are_taken(patch: Patch) -> None:
    patch.setattr(EngineWeights, "needs_loading", lambda self, reader, role: False)


def rows_are_kept_while_they_are_needed(patch: Patch) -> None:
    release = CallLifecycle.release

    def at_once(self: CallLifecycle, ordinal: int) -> None:
        release(self, ordinal)
        for place in self._state.rows._places.get(ordinal, {}):
            self._state.send(place, m.Forget(ordinal))

    patch.setattr(CallLifecycle, "release", at_once)


def refills_judge_groups(patch: Patch) -> None:
    patch.setattr(passes, "_stage", stage_with(unit="sample")(passes._stage))


def calls_without_rows_wait_too(patch: Patch) -> None:
    prepare = CallLifecycle._prepare

    def at_once(self: CallLifecycle, state: CallState) -> None:
        prepare(self, state)
        if state.is_prepared and state.call.is_aligned and not (state.ids or state.is_over):
            self.complete(state, None)

    patch.setattr(CallLifecycle, "_prepare", at_once)


RULES: list[tuple[Callable[[Patch], None], Flow]] = [
    (granularity_closure, on_groups),
    (whole_groups, grpo),
    (batch_barrier, on_all),
    (minibatches_by_arrival, minibatches),
    (reads_wait_for_writes, grpo),
    (writes_wait_for_reads, looks_back),
    (writes_wait_for_writes, two_updates),
    (versions_match, samples_of_both),
    (weights_stay_until_they_are_taken, samples_between),
    (rows_are_kept_while_they_are_needed, grpo),
    (refills_judge_groups, refilling),
    (calls_without_rows_wait_too, notes_of_nothing),
]


@pytest.mark.parametrize("program", dict.fromkeys(program for _, program in RULES), ids=lambda program: program.name)
def test_with_every_rule_all_schedules_agree(program):
    assert wrong(program) is None


@pytest.mark.parametrize(("broken", "program"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_a_schedule_that_breaks_the_rule_is_seen_to_be_wrong(broken, program, monkeypatch):
    eager_answer(program)  # With the rule.
    broken(monkeypatch)
    assert wrong(program) is not None


def test_what_depends_on_a_failure_through_calls_without_rows_is_not_done_either():
    spec = next(specs())
    eager = run_eager(fails_past_nothing, {}, spec)
    assert "at the end" in eager.error
    for order_seed in range(4):
        planned = run_planned(fails_past_nothing, {}, spec, order_seed=order_seed)
        assert (planned.error, planned.rewards) == (eager.error, eager.rewards)


def test_a_long_chain_of_calls_without_rows_ends_without_recursion():
    @flow
    def chained() -> None:
        keeper = Keeper()
        responses = Policy("fake").generate(Dataset(ROWS).take(1), max_new_tokens=20)
        none = responses.filter(is_wanted)
        keeper.note(responses)
        for _ in range(600):
            keeper.note(none)
        log(said=keeper.says(responses).map(float).mean())

    spec = next(specs())
    assert difference_of(run_planned(chained, {}, spec), run_eager(chained, {}, spec)) is None
