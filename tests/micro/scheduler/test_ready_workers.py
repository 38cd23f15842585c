"""Only those workers are asked who may have something new to do: after each event nobody else has, whatever the program, plan and order.

The scheduler's own questions, put to everybody after every event. `test_scheduler` asks the same of its rig.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Policy, Reward, Sample, flow, log, nll, op, steps
from m2flow.errors import InternalError
from m2flow.micro.protocol.events import Command, Event
from m2flow.micro.scheduler.ready_queues import ReadyWorkers
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.spec import ChannelSpec, ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing import world
from m2flow.testing.program_calls import as_flow
from m2flow.testing.programs import Generate, Program, Score
from m2flow.testing.random_programs import clusters, programs
from m2flow.testing.world import run_planned

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")

ROWS = [{"prompt": f"{i * 7919 % 1000}=", "target": str(i)} for i in range(9)]


class NotAsked(BaseException):
    """Nothing in between takes it for an error of the program."""


@pytest.fixture(autouse=True)
def all_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Scheduler.handle

    def checked(self: Scheduler, *events: Event) -> list[Command]:
        commands = handle(self, *events)
        for worker in self._state.workers.values():
            if self._offer(worker) is not None:
                raise NotAsked(f"{worker.name}, after {events!r:.200}")
        for lease in self._state.leases.values():
            if self._turns.next_turn(lease):
                raise NotAsked(f"{lease.name}, after {events!r:.200}")
        return commands

    monkeypatch.setattr(Scheduler, "handle", checked)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(programs(fails=None), clusters(), st.integers(0, 2**30), st.booleans())
def test_nobody_who_has_work_is_passed_over(program: Program, spec: ClusterSpec, order_seed: int, by_identity: bool):
    run_planned(as_flow(program), {}, spec, order_seed=order_seed, deterministic=by_identity)


def test_others_may_have_the_rest_of_a_group_for_which_one_has_got_room():
    generate = Generate(policy=0, source="take", which=0, count=2, n=2, longest=14)
    again = Generate(policy=0, source="samples", which=2, count=1, n=3, longest=14)
    spec = ClusterSpec(
        device="cpu",
        cores=2,
        placement="split",
        rollout=RolloutSpec(engine="fake", workers=3, max_running=1),
        train=TrainSpec(engine="fake"),
        channels=ChannelSpec(max_samples=2, max_bytes=1000),
    )
    program = Program(num_policies=1, num_steps=1, before=(), body=(generate, again, Score(reward=2, samples=2)))
    run_planned(as_flow(program), {}, spec, order_seed=261985440)


def length(sample: Sample) -> float:
    return sample.num_tokens / 16


def informative(rewards: list[float]) -> bool:
    return len(set(rewards)) > 1


@flow(staleness=1)
def behind() -> None:
    policy, other, reward, prompts = Policy("fake"), Policy("fake", name="other"), Reward(length), Dataset(ROWS)
    for _ in steps(4):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=9)
        again = other.generate(prompts.take(2), n=3, max_new_tokens=5)
        policy.update(responses, reward.score(responses), minibatch_size=2)
        other.update(again, reward.score(again))


@flow(staleness=2)
def late() -> None:
    policy, reward, prompts = Policy("fake"), Reward(length), Dataset(ROWS)
    for _ in steps(3):
        responses = policy.generate(prompts.take(6), n=2, max_new_tokens=9, oversample=1.5, late="drop")
        policy.update(responses, reward.score(responses))


@flow(staleness=2)
def carried() -> None:
    policy, reward, prompts = Policy("fake"), Reward(length), Dataset(ROWS)
    for _ in steps(5):
        responses = policy.generate(prompts.take(6), n=2, max_new_tokens=9, oversample=1.5, late="carry")
        policy.update(responses, reward.score(responses))


@flow
def refilled() -> None:
    policy, reward, prompts = Policy("fake"), Reward(length), Dataset(ROWS)
    for _ in steps(2):
        responses = policy.generate(prompts, n=2, max_new_tokens=9, count=3, score=reward, keep=informative)
        policy.update(responses, reward.score(responses))


@flow
def in_turns() -> None:
    """Prompts of the second policy come one by one."""
    policy, other, reward, prompts = Policy("fake"), Policy("fake", name="other"), Reward(length), Dataset(ROWS)
    for _ in steps(2):
        first = policy.generate(prompts.take(5), n=2, max_new_tokens=9)
        second = other.generate(first, n=2, max_new_tokens=5)
        policy.update(first, reward.score(first))
        other.update(second, reward.score(second))


@flow
def looks_back() -> None:
    """Samples of the weights before an update that needs nothing of them, and of those after it."""
    policy, reward, demos = Policy("fake"), Reward(length), Dataset(ROWS, shuffle=False)
    before = policy.generate(demos.take(7), n=2, max_new_tokens=20)
    policy.update(demos.take(2), loss=nll())
    after = policy.generate(demos.take(4), n=2, max_new_tokens=20)
    log(before=reward.score(before).mean(), after=reward.score(after).mean())


@op(granularity="group")
def both(samples: list[Sample], again: list[Sample]) -> list[bool]:
    return [a.id == b.id for a, b in zip(samples, again, strict=True)]


@flow
def twice() -> None:
    """A call takes the same rows twice."""
    responses = Policy("fake").generate(Dataset(ROWS).take(4), n=2, max_new_tokens=9)
    log(same=both(responses, responses).map(float).mean())


SPECS = [
    ClusterSpec(
        placement=placement,  # type: ignore[arg-type]
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=workers, max_running=running),
        train=TrainSpec(engine="fake", token_budget=20),
        functions=FunctionSpec(workers=2, chunk=1),
    )
    for placement, workers, running in [("split", 3, 2), ("time-shared", 2, 3), ("split", 4, 64), ("time-shared", 1, 1)]
]


PROGRAMS = [behind, late, carried, refilled, in_turns, looks_back, twice]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_nobody_is_passed_over_with_several_versions_late_samples_refills_and_prompts_that_trickle(program):
    for spec in SPECS:
        for order_seed in range(3):
            assert run_planned(program, {}, spec, order_seed=order_seed).error == ""


@pytest.mark.parametrize("forgotten", ["feed_all", "wake_role", "wake_trainers", "rows_came", "wake"])
def test_whoever_is_forgotten_is_noticed(forgotten, monkeypatch):
    monkeypatch.setattr(ReadyWorkers, forgotten, lambda *args: None)
    monkeypatch.setattr(world, "MAX_TURNS", 5_000)
    runs = ((program, spec) for spec in SPECS for program in PROGRAMS)
    with pytest.raises((NotAsked, InternalError)):
        deque((run_planned(program, {}, spec) for program, spec in runs), maxlen=0)
