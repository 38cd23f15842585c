"""Credits: nobody is sent more than it can hold, nothing waits for room for ever, and a plan in which it would is refused with the ring.

The real scheduler and workers in one thread, with channels so small that everything waits for room.
"""

from __future__ import annotations

import msgspec
import pytest

from m2flow import Dataset, Policy, Reference, Reward, Sample, flow, log, op, steps
from m2flow.errors import InternalError, PlanError
from m2flow.macro.tracing import trace
from m2flow.micro.controller.controller_core import Watchdog
from m2flow.micro.lowering.passes import lower
from m2flow.micro.lowering.routing import is_below_need
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.scheduler.call_lifecycle import Wait, find_deadlock
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.rollout_scheduling.policies import POLICIES
from m2flow.runner import run
from m2flow.spec import ChannelSpec, ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing.random_programs import Dice, drawn_case, shrunk
from m2flow.testing.world import run_eager, run_planned

NUM_CASES = 60
TIMES_LONG = 40
ROWS = [{"prompt": f"{i * 7919 % 100000}=", "target": str(i)} for i in range(12)]

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")


def share_of_sevens(sample: Sample) -> float:
    return str(sample.text).count("7") / 7


@op(granularity="batch")
def spread(samples: list[Sample]) -> float:
    return float(len({str(sample.text) for sample in samples}))


@flow(staleness=1)
def streams(num_steps: int = 3) -> None:
    """Rewards take samples as they come; the update takes what it has."""
    policy, verifier = Policy("fake"), Reward(share_of_sevens)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=12)
        rewards = verifier.score(responses)
        log(reward=policy.update(responses, rewards)["reward"])


@flow
def gathers(num_steps: int = 2) -> None:
    """An op takes all samples at once."""
    policy, verifier = Policy("fake"), Reward(share_of_sevens)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=12)
        log(spread=spread(responses))
        policy.update(responses, verifier.score(responses))


@flow
def compares(num_steps: int = 2) -> None:
    """A trainer's engine takes samples as they come, to say what the weights before training make of them."""
    policy, verifier = Policy("fake"), Reward(share_of_sevens)
    reference = Reference(policy)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=12)
        log(kl=reference.logprobs(responses).mean(), reward=verifier.score(responses).mean())


def spec_of(*, max_samples: int | None = None, max_bytes: int = 2**32, placement: str = "split", rollouts: int = 1) -> ClusterSpec:
    return ClusterSpec(
        placement=placement,  # type: ignore[arg-type]
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=rollouts, max_running=3),
        train=TrainSpec(engine="fake"),
        functions=FunctionSpec(workers=1, chunk=3),
        channels=ChannelSpec(max_samples=max_samples, max_bytes=max_bytes),
    )


def plan_of(program, spec, pinned=None):
    graph, models, _ = trace(program, {}, assume=0.0)
    return lower(graph, models, spec, pinned=pinned)


def forced(plan: Plan) -> Plan:
    """The plan with what it spills kept in channels that are too small for it."""
    return msgspec.structs.replace(plan, routes=tuple(msgspec.structs.replace(route, spills=False) for route in plan.routes))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kinds", [("plain", "raising"), ("timed",)], ids=["programs", "programs in which time counts"])
def test_a_random_program_ends_with_the_eager_answer_under_tight_credits(kinds, request):
    for number in range(NUM_CASES * (TIMES_LONG if request.config.getoption("--long") else 1)):
        case = drawn_case(Dice(f"tight, {number}"), kinds[number % len(kinds)], is_tight=True)
        found = case.difference()
        assert found is None, f"{found}\n{shrunk(case)}"


@pytest.mark.parametrize("rollouts", [1, 2])
@pytest.mark.parametrize(("max_samples", "max_bytes"), [(1, 2**32), (2, 2**32), (8, 2**32), (None, 100), (None, 1800)])
def test_no_more_is_under_way_than_there_is_room_for_but_one_group(max_samples, max_bytes, rollouts, monkeypatch):
    most: dict[str, tuple[int, int]] = {}
    handle = Scheduler.handle

    def watched(self, *events):
        commands = handle(self, *events)
        for channel in self.channels():
            samples, num_bytes = most.get(channel.target, (0, 0))
            most[channel.target] = max(samples, channel.used_samples), max(num_bytes, channel.used_bytes)
        return commands

    monkeypatch.setattr(Scheduler, "handle", watched)
    spec = spec_of(max_samples=max_samples, max_bytes=max_bytes, rollouts=rollouts)
    for order_seed in range(6):
        planned = run_planned(streams, {}, spec, order_seed=order_seed)
        assert planned.error == ""
    samples, num_bytes = most["functions-0"]
    group = 2
    assert 0 < samples <= (max_samples or 100) + group
    assert 0 < num_bytes <= max_bytes + group * (12 + 20) * 16


def test_all_room_is_free_when_everything_is_over(monkeypatch):
    seen: list[Scheduler] = []
    handle = Scheduler.handle
    monkeypatch.setattr(Scheduler, "handle", lambda self, *events: (seen.append(self), handle(self, *events))[1])
    run_planned(streams, {}, spec_of(max_samples=8), order_seed=3)
    assert seen[-1].channels()
    assert all((channel.used_samples, channel.used_bytes) == (0, 0) for channel in seen[-1].channels())


@flow(staleness=1)
def leaves_some(num_steps: int = 3) -> None:
    """Of four groups the first two that are whole are the result."""
    policy, verifier = Policy("fake"), Reward(share_of_sevens)
    prompts = Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=12, oversample=2.0, late="drop")
        policy.update(responses, verifier.score(responses))


def test_finished_samples_that_are_in_no_result_take_no_room(monkeypatch):
    finished, held = set(), set()
    handle = Scheduler.handle

    def watched(self, *events):
        commands = handle(self, *events)
        for claim in (claim for channel in self.channels() for claim in channel.reservations.values() if claim.call_state.is_done):
            left_out = claim.call_state.done.difference(claim.call_state.result)
            finished.update(left_out)
            held.update(left_out & claim.held.keys())
        return commands

    monkeypatch.setattr(Scheduler, "handle", watched)
    for order_seed in range(4):
        assert run_planned(leaves_some, {"num_steps": 6}, spec_of(max_samples=8), order_seed=order_seed).error == ""
    assert finished
    assert not held


def test_a_plan_says_what_is_limited_and_what_is_spilled():
    text = str(plan_of(gathers, spec_of(max_samples=4)))
    assert "policy.generate -> spread" in text
    assert "4 samples, 4,294,967,296 bytes; spills to segment files" in text
    assert "spills" not in str(plan_of(gathers, spec_of(max_samples=8)))


def test_what_is_spilled_comes_from_the_segment_file(monkeypatch):
    spec = spec_of(max_samples=4)
    eager = run_eager(gathers, {}, spec)
    for order_seed in range(4):
        assert run_planned(gathers, {}, spec, order_seed=order_seed) == eager


def test_a_limit_that_nothing_can_reach_is_none():
    assert all(not stage.rooms for stage in plan_of(streams, spec_of()).stages)


@pytest.mark.parametrize("program", [gathers, streams], ids=["a batch op", "an update"])
def test_a_plan_that_could_come_to_a_halt_is_refused_with_the_ring(program):
    spec = spec_of(max_samples=4)
    spilling = plan_of(program, spec)
    assert any(route.spills for route in spilling.routes)
    with pytest.raises(PlanError, match=r"halt: .* all 8 samples of policy\.generate .* room in the channel"):
        plan_of(program, spec, pinned=forced(spilling))


def leased(plan: Plan) -> Plan:
    """The plan with rollout and training in processes of their own on the same device."""
    workers = tuple(msgspec.structs.replace(w, lease="" if w.name == "functions-0" else "devices") for w in plan.workers)
    return msgspec.structs.replace(plan, workers=workers)


def test_a_plan_in_which_a_lease_closes_the_ring_is_refused_with_the_lease():
    spec = spec_of(max_samples=4)
    streaming = plan_of(compares, spec)
    assert not any(route.spills for route in streaming.routes if route.target == "train-0")
    spilling = plan_of(compares, spec, pinned=leased(streaming))
    assert any(route.spills for route in spilling.routes if route.target == "train-0")
    with pytest.raises(PlanError, match=r"the lease devices; the lease devices waits for policy\.generate"):
        plan_of(compares, spec, pinned=forced(spilling))


def test_a_plan_in_which_a_lease_closes_the_ring_comes_to_a_halt_when_it_is_forced():
    spec = spec_of(max_samples=4)
    spilling = plan_of(compares, spec, pinned=leased(plan_of(compares, spec)))
    assert run_planned(compares, {}, spec, order_seed=1, placed=lambda plan: spilling).error == ""
    assert "nothing moves any more" in run_planned(compares, {}, spec, order_seed=1, placed=lambda plan: forced(spilling)).error


@pytest.mark.parametrize("program", [gathers, streams], ids=["a batch op", "an update"])
@pytest.mark.parametrize("rollouts", [1, 2])
def test_a_plan_that_is_refused_does_come_to_a_halt_when_it_is_forced(program, rollouts):
    spec = spec_of(max_samples=4, rollouts=rollouts)
    assert any(is_below_need(route) for route in forced(plan_of(program, spec)).routes)
    assert run_planned(program, {}, spec, order_seed=1).error == ""
    assert "nothing moves any more" in run_planned(program, {}, spec, order_seed=1, placed=forced).error


def test_the_watchdog_names_the_ring_of_a_run_that_was_forced_into_a_halt(monkeypatch):
    seen: list[Scheduler] = []
    handle = Scheduler.handle
    monkeypatch.setattr(Scheduler, "handle", lambda self, *events: (seen.append(self), handle(self, *events))[1])
    run_planned(gathers, {}, spec_of(max_samples=4), order_seed=1, placed=forced)
    watchdog, waits = Watchdog(patience_s=3.0), seen[-1].waits()
    assert watchdog.look(waits, 100.0) is None
    assert watchdog.look(waits, 102.9) is None
    halted = watchdog.look(waits, 103.0)
    assert halted is not None
    words = str(halted)
    assert "for 3 s now" in words
    assert "the channel from policy.generate to functions-0 (room: 0 of 4 samples" in words
    assert "spread of" in words
    assert "in step 0" in words


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worker_processes_that_are_forced_into_a_halt_end_with_the_ring(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "lower", lambda *args, **named: forced(lower(*args, **named)))
    with pytest.raises(InternalError, match=r"halt, .* the channel from policy\.generate to functions-0 .*; spread of"):
        run.Run(gathers, {}, spec_of(max_samples=4), RunSettings(runs_dir=str(tmp_path))).execute()


@op(granularity="sample")
def first(sample: Sample) -> int:
    return len(str(sample["prompt"]))


@op(granularity="sample")
def go_on(value: int) -> int:
    return value + 1


@flow
def turns(num_turns: int = 6):
    values = first(Dataset(ROWS).take(2))
    for _ in range(num_turns):
        values = go_on(values)


def test_calls_of_one_line_that_wait_for_each_other_are_no_ring(monkeypatch):
    handle, seen = Scheduler.handle, []

    def watched(self, *events):
        commands = handle(self, *events)
        seen.append(len(self.waits()))
        assert find_deadlock(self.waits()) == []
        return commands

    monkeypatch.setattr(Scheduler, "handle", watched)
    assert run_planned(turns, {}, spec_of(max_samples=8), order_seed=1).error == ""
    assert max(seen) >= 4


def test_a_ring_that_changes_is_none():
    one = [Wait("a", "b", "rows, of which 1 of 4 are done"), Wait("b", "a", "its result")]
    other = [Wait("a", "b", "rows, of which 2 of 4 are done"), Wait("b", "a", "its result")]
    watchdog = Watchdog(patience_s=3.0)
    for now_s in range(0, 20, 2):
        assert watchdog.look(one if now_s % 4 else other, float(now_s)) is None


def test_waits_that_lead_nowhere_are_no_ring():
    assert find_deadlock([Wait("a", "b", ""), Wait("b", "c", ""), Wait("a", "c", ""), Wait("d", "a", "")]) == []
    ring = find_deadlock([Wait("a", "b", ""), Wait("a", "c", ""), Wait("c", "d", ""), Wait("d", "c", "")])
    assert [wait.who for wait in ring] == ["c", "d"]


def test_a_channel_that_one_of_its_takers_can_empty_is_in_no_ring():
    waits = [Wait("a", "channel", ""), Wait("channel", "b", "", True), Wait("channel", "c", "", True), Wait("b", "a", "")]
    assert find_deadlock(waits) == []
    assert len(find_deadlock([*waits, Wait("c", "a", "")])) == 3


def test_a_call_that_waits_twice_for_one_that_goes_on_is_in_no_ring():
    """It waits for its result and for its rows."""
    waits = [Wait("a", "b", "its result"), Wait("a", "b", "rows"), Wait("channel", "a", "", True), Wait("channel", "c", "", True)]
    assert find_deadlock([*waits, Wait("c", "channel", "")]) == []


def test_a_long_chain_of_waits_is_looked_through_without_recursion():
    chain = [Wait(str(i), str(i + 1), "") for i in range(5000)]
    assert find_deadlock(chain) == []
    assert len(find_deadlock([*chain, Wait("5000", "0", "")])) == 5001


@pytest.mark.parametrize("program", [gathers, streams])
def test_while_a_run_goes_on_no_ring_is_seen(program, monkeypatch):
    handle = Scheduler.handle

    def watched(self, *events):
        commands = handle(self, *events)
        assert find_deadlock(self.waits()) == []
        return commands

    monkeypatch.setattr(Scheduler, "handle", watched)
    for order_seed in range(4):
        for placement in ("split", "time-shared"):
            assert run_planned(program, {}, spec_of(max_samples=8, placement=placement), order_seed=order_seed).error == ""


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_is_shown_what_there_is_room_for_and_the_run_ends(policy):
    spec = spec_of(max_samples=8, max_bytes=2500, rollouts=2)
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"policy": (policy,)})})
    eager = run_eager(streams, {}, spec)
    assert eager.error == ""
    for order_seed in range(2):
        assert run_planned(streams, {}, spec, order_seed=order_seed).error == ""
