"""Workers that are lost and come back, under any order of events: the run gives what a run gives in which nobody was lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow import Dataset, Policy, Reward, Sample, flow, op, steps
from m2flow.channels.channel import MemoryInbox
from m2flow.macro.tracing import trace
from m2flow.micro.controller.controller_core import InflightRecovery
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.worker_state import RowStore
from m2flow.micro.scheduler.worker_failure import Recovery
from m2flow.samples import Batch, make_ids
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.random_programs import difference_of
from m2flow.testing.world import Link, make_worker, run_eager, run_planned

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")

some = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@op(granularity="group")
def ranks(samples: list[Sample]) -> list[int]:
    return list(range(len(samples)))


@flow
def scored(num_steps: int = 2) -> None:
    policy, judge = Policy("fake"), Reward(lambda sample: float(len(sample.text) % 5), name="judge")
    prompts = Dataset([{"prompt": f"{i}="} for i in range(12)])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=3, max_new_tokens=12)
        policy.update(responses, advantages=judge.score(responses) + ranks(responses), minibatch_size=2)


def spec(rollouts: int, functions: int, chunk: int) -> ClusterSpec:
    return ClusterSpec(
        placement="split",
        cores=4,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=rollouts),
        train=TrainSpec(engine="fake", token_budget=60),
        functions=FunctionSpec(workers=functions, chunk=chunk),
    )


def differs(order_seed: int, on: ClusterSpec, num_losses: int) -> str | None:
    """What a run with losses gives that one without does not; None also where only a checkpoint could help."""
    planned = run_planned(scored, {}, on, order_seed=order_seed, num_losses=num_losses)
    return None if planned.error.startswith("StateLost") else difference_of(planned, run_eager(scored, {}, on))


@some
@given(st.integers(0, 2**30), st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 3, 64]), st.integers(1, 4))
def test_whoever_is_lost_and_comes_back_whenever_nothing_is_lost_or_doubled(order_seed, rollouts, functions, chunk, num_losses):
    assert differs(order_seed, spec(rollouts, functions, chunk), num_losses) is None


def test_one_loss_is_always_made_good():
    """What a single worker takes with it, rows on their way included, others have or can make."""
    errors = [run_planned(scored, {}, spec(2, 2, 3), order_seed=seed, num_losses=1).error for seed in range(40)]
    assert errors.count("") >= 38


def test_what_is_asked_of_a_dead_worker_when_two_are_known_to_be_lost_at_once_is_missing_too():
    recovery = InflightRecovery()
    recovery.begin("a", "a", {}, ["c"])
    recovery.begin("b", "b", {}, ["c"])
    lost = recovery.done()
    assert next(lost) == ("a", {})
    recovery.note_sent("b", m.Push(7, [3], "c"))  # The scheduler does not know yet.
    assert next(lost) == ("b", {"c": {7: [3]}})


def test_what_a_dead_worker_should_take_over_from_an_earlier_call_and_send_on_is_missing_where_it_should_go():
    recovery = InflightRecovery()
    recovery.begin("a", "a", {"c": {1: [5]}}, ["c", "d"])
    recovery.note_sent("a", m.Reassign(2, 1, [5], ["c", "d~1"]))
    recovery.note_sent("c", m.Reassign(2, 1, [6], ["d~1"]))  # It lives.
    recovery.answered("c", m.Missing("a", {}))
    assert list(recovery.done()) == [("a", {"c": {2: [5]}, "d": {2: [5]}})]


BUGS = {
    "what never came is thought to be there": (Recovery, "never_came", lambda self, rows, to: None),
    "what a dead worker sent counts": (RowStore, "drop_sent_by", lambda self, sender, but: {}),
    "what never came is not sent again": (Recovery, "send_again", lambda self, place, rows: None),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=list(BUGS))
def test_what_is_on_its_way_and_lost_is_missed(bug, monkeypatch):
    monkeypatch.setattr("m2flow.testing.world.MAX_TURNS", 20_000)
    monkeypatch.setattr(*bug)

    def is_seen(seed: int) -> bool:
        try:
            return differs(seed, spec(2, 2, 3), 4) is not None
        except KeyError:
            return True  # A worker is told to send what it does not have.

    assert any(is_seen(seed) for seed in range(80))


def test_recovery_waits_only_for_peers_that_were_sent_rows_of_the_dead_worker():
    recovery = InflightRecovery()
    asked = recovery.begin("a", "a~1", {"b": {1: [5, 6]}, "controller": {1: [5]}}, ["b", "c"])
    assert {name: message.rows for name, message in asked.items()} == {"b": {1: [5, 6]}, "c": {}}
    recovery.answered("c", m.Missing("a~1", {}))
    recovery.not_sent("a", "c", 2, [7])
    assert not list(recovery.done())
    recovery.answered("b", m.Missing("a", {1: [5]}))
    assert not list(recovery.done()), "that was about an earlier process"
    recovery.answered("b", m.Missing("a~1", {1: [6]}))
    assert list(recovery.done()) == [("a", {"c": {2: [7]}, "b": {1: [6]}})]
    assert not list(recovery.done())


def test_recovery_does_not_wait_for_a_peer_that_dies_during_it():
    recovery = InflightRecovery()
    recovery.begin("a", "a", {"b": {1: [5]}}, ["b"])
    recovery.begin("b", "b", {}, [])
    assert [worker for worker, _ in recovery.done()] == ["a", "b"]


def test_of_a_dead_peer_only_what_was_told_stays():
    store = RowStore()
    ids = make_ids(0, 4).tolist()
    store.put(0, Batch(make_ids(0, 3)), "dead")
    store.put(0, Batch(make_ids(0, 4)[2:]), "alive")
    assert store.drop_sent_by("dead", {0: [ids[0], ids[2], ids[3]], 1: [ids[0]]}) == {1: [ids[0]]}
    assert store.ids(0) == [ids[0], ids[2], ids[3]]


class InParts(Link):
    """A link on which a worker hears what was said in parts: the next one each time that it asks."""

    def __init__(self, parts: Sequence[Sequence[m.ToWorker]]) -> None:
        super().__init__()
        self._parts = [[m.encode(message) for message in part] for part in parts]

    def receive(self, timeout_s: float) -> list[bytes]:
        return self._parts.pop(0) if self._parts else []


@pytest.mark.parametrize("heard_at_once", range(1, 6))
def test_rows_reach_a_peer_that_has_come_back_however_late_its_death_is_heard_of(heard_at_once, tmp_path):
    """Told to send to a dead peer, a worker reads on to hear of the death, and perhaps of the return before it."""
    graph, models, _ = trace(scored, {}, seed=0, assume=0.0)
    on = spec(1, 1, 3)
    plan = lower(graph, models, on)
    planned = next(worker for worker in plan.workers if worker.name == "rollout-0")
    worker, _, inbox = make_worker(plan, planned, models, on, 0, str(tmp_path), 0, deterministic=False, flush_tokens=64)
    inbox.open()
    dead, again = MemoryInbox(), MemoryInbox()
    gone = dead.open()
    dead.close()
    ids = make_ids(1, 2).tolist()
    said: list[m.ToWorker] = [
        m.Peers({"functions-0": gone}),
        m.Push(1, ids, "functions-0"),
        m.PeerLost("functions-0", {}),
        m.Peers({}),
        m.Peers({"functions-0~1": again.open()}),
        m.Push(1, ids, "functions-0~1"),
    ]
    worker._link = InParts([said[:heard_at_once], *([message] for message in said[heard_at_once:])])
    worker._store.put(1, Batch(make_ids(1, 2)))
    for _ in said:
        worker.turn()
    assert [(parcel.call, parcel.batch.ids.tolist()) for parcel in again.take()] == [(1, ids)]
    again.close()
    inbox.close()
    worker.close()
