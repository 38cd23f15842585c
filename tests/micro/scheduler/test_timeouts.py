"""Samples that are late by the clock: `generate(..., late="drop", timeout_s=...)`."""

from __future__ import annotations

from pathlib import Path

import pytest
from cost_tables import NOTHING, PlainCosts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from machine_lines import ProgramLines, cluster, roles
from simulated import Given, ran, zero
from simulated import cluster as simulated_cluster

from m2flow import Dataset, Policy, Reward, Sample, flow, log, nll, steps
from m2flow.errors import OptionError
from m2flow.macro.loss_declarations import asynchrony
from m2flow.macro.tracing import trace
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import DecodeCost, PassCost, Switch, TrainCost
from m2flow.micro.protocol.events import TimedOut
from m2flow.micro.records.audit import audit
from m2flow.micro.records.ledger import read_decisions, read_left_out, read_samples
from m2flow.micro.scheduler.partial_rollouts import Deadlines
from m2flow.runner.run import Run
from m2flow.samples import by_group, group_key, make_ids
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing import world
from m2flow.testing.programs import Answer
from m2flow.testing.scheduler_model import Model
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 1000}="} for i in range(9)]


def length(sample: Sample) -> float:
    return sample.num_tokens / 16


@flow
def hurried(num_steps: int = 3, timeout_s: float | None = 60.0) -> None:
    policy, reward, prompts = Policy("fake"), Reward(length), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=9, late="drop", timeout_s=timeout_s)
        rewards = reward.score(responses)
        policy.update(responses, rewards, minibatch_size=2)
        log(reward=rewards.mean())


@flow
def hurried_and_cut(num_steps: int = 3) -> None:
    policy, reward, prompts = Policy("fake"), Reward(length), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=9, oversample=2.0, late="drop", timeout_s=60)
        policy.update(responses, reward.score(responses))


@flow
def hopeless() -> None:
    """Fewer run at once than a group has, so it is heard that it is late before it is whole. The rest shows that the run goes on."""
    policy, reward, prompts = Policy("fake"), Reward(length), Dataset(ROWS)
    late = policy.generate(prompts.take(2), n=2048, max_new_tokens=4000, min_new_tokens=4000, late="drop", timeout_s=1e-6)
    log(late=float(len(late)))
    policy.update(late, reward.score(late))
    policy.update(policy.generate(prompts.take(2), n=1, max_new_tokens=5), loss=nll())


def spec(num_rollouts: int = 2, max_running: int = 3, policies: str = "") -> ClusterSpec:
    made = ClusterSpec(
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", workers=num_rollouts, max_running=max_running),
        train=TrainSpec(engine="fake", token_budget=60),
        functions=FunctionSpec(workers=1, chunk=3),
    )
    return made.with_policy(policies)


several = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
policies = st.sampled_from(["", "longest-first", "probe+adaptive-concurrency", "least-loaded"])


def groups_of(planned: Answer) -> list[int]:
    """Of each generation, how many groups its result has."""
    by_call: dict[int, list[int]] = {}
    for packed, decision in planned.decisions.items():
        by_call.setdefault(decision.call, []).append(packed)
    return [len(by_group(rows)) for rows in by_call.values()]


@several
@given(
    st.integers(0, 2**30),
    st.integers(1, 3),
    st.sampled_from([1, 3, 64]),
    policies,
    st.sampled_from([hurried, hurried_and_cut]),
    st.sampled_from([0.01, 0.05, 0.3]),
)
def test_eager_that_knows_who_was_late_gives_what_the_run_gave(order_seed, rollouts, max_running, names, program, share):
    on = spec(rollouts, max_running, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "_SHARE", share)
        planned = run_planned(program, {}, on, order_seed=order_seed)
    assert not planned.error
    given_rows = {packed: rows for packed, rows in planned.samples.items() if packed in planned.decisions}
    eager = run_eager(program, {}, on, decisions=planned.decisions)
    assert eager.samples == given_rows
    assert (repr(eager.logs), eager.weights, eager.consumed) == (repr(planned.logs), planned.weights, planned.consumed)


@pytest.mark.parametrize("num_losses", [0, 2])
def test_groups_with_a_late_sample_are_in_no_result_and_the_others_are_whole(num_losses):
    found = []
    for order_seed in range(10):
        planned = run_planned(hurried, {}, spec(), order_seed=order_seed, num_losses=num_losses)
        if not planned.error.startswith("StateLost"):
            assert not planned.error
            assert len(planned.decisions) == 2 * sum(groups_of(planned))
            found += groups_of(planned)
    assert min(found) < 4
    assert max(found) == 4


def test_without_a_clock_nobody_is_late():
    on = spec()
    assert run_eager(hurried, {}, on).samples == run_eager(hurried, {"timeout_s": 1e9}, on).samples
    assert len(run_eager(hurried, {}, on).samples) == 3 * 4 * 2


def test_a_late_sample_that_is_done_after_all_is_not_given():
    """Its worker heard that it is late while it waited there for its turn."""
    model = Model(roles, cluster("split", 1, 64, 4096, 1))
    try:
        answers = ProgramLines().drop(0, count=4)
        model.submit()
        state = model.scheduler._state.calls[answers.ref.call]
        late = state.ids[3]
        model.tell(TimedOut(state.call.ordinal, [late]))
        model.drain()
        assert late in state.done
        assert state.result == [row for row in state.ids if group_key(row) != group_key(late)]
    finally:
        model.close()


def test_a_late_sample_that_is_stopped_is_not_handed_out_again():
    model = Model(roles, cluster("split", 2, 64, 4096, 1))
    try:
        answers = ProgramLines().drop(0, count=4)
        model.submit()
        state = model.scheduler._state.calls[answers.ref.call]
        while not any(fake.generating() and not fake.inbox for fake in model.fakes.values()):
            model.turn(0)
        late = next(row for fake in model.fakes.values() if not fake.inbox for row in fake.generating())
        model.tell(TimedOut(state.call.ordinal, [late]))
        model.drain()  # The model judges what is handed out.
        assert late not in (state.result or ())
    finally:
        model.close()


def test_a_step_in_which_every_group_is_late_trains_nothing():
    eager = run_eager(hurried, {}, spec(), decisions={})
    assert (eager.error, eager.samples, eager.consumed) == ("", {}, [])


def test_when_every_group_is_late_the_result_is_empty():
    model = Model(roles, cluster("split", 1, 1, 4096, 1))
    try:
        answers = ProgramLines().drop(0, count=4)
        model.submit()
        state = model.scheduler._state.calls[answers.ref.call]
        model.tell(TimedOut(state.call.ordinal, state.ids))
        assert state.call.ordinal in model.resolved
        assert state.result == []
        model.end()
    finally:
        model.close()


def test_each_sample_is_due_once_by_the_time_that_it_had_first():
    graph, _, _ = trace(hurried, {"num_steps": 1})
    call = next(call for call in graph.calls if call.method == "generate")
    ids = make_ids(call.ordinal, 2, 2).tolist()
    due = Deadlines()
    assert due.began(m.Generate(1, call.ordinal, ids[:2], [], [], call.ordinal), call, 5.0) == 65.0
    due.began(m.Generate(2, call.ordinal, ids, [], [], call.ordinal), call, 7.0)  # Two have moved.
    assert due.due(64.0) == []
    assert due.due(65.0) == [TimedOut(call.ordinal, ids[:2])]
    assert due.due(100.0) == [TimedOut(call.ordinal, ids[2:])]
    assert due.due(1e9) == []


@flow
def patient(num_steps: int = 2) -> None:
    policy, reward = Policy("fake"), Reward(zero)
    prompts = Dataset([{"prompt": "a"}] * 5)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(5), n=2, max_new_tokens=5, late="drop", timeout_s=45.0)
        policy.update(responses, reward.score(responses))


def test_on_a_virtual_clock_the_long_group_is_dropped_when_its_time_is_up():
    costs = PlainCosts(DecodeCost(1.0, 0.25, 0.0, 1000), TrainCost(NOTHING, PassCost(0.0, 0.01, 0.0), 1.0))
    lengths = Given([[10, 10], [10, 10], [500, 20], [10, 10], [10, 10]])
    result = ran(patient, costs, lengths, simulated_cluster(), num_steps=1)
    first = result.report.steps[0]
    assert first.trained_tokens == 80
    # Ten samples take ten turns of 3.5 s, then two run for the ten seconds that are left, a turn in 1.5 s.
    assert first.makespan_s == pytest.approx(45.0 + 0.8 + 1.0)
    assert first.wasted_tokens == pytest.approx(2 * (10 + 10 / 1.5), abs=2)


@pytest.mark.parametrize("placement", ["split", "time-shared"])
def test_time_for_devices_and_weights_to_come_is_no_time_of_a_sample(placement):
    decoding, training = DecodeCost(1.0, 0.25, 0.0, 1000), TrainCost(NOTHING, PassCost(0.0, 0.01, 0.0), 1.0)
    costs = PlainCosts(decoding, training, switching=Switch(20.0, 20.0), syncing_s=40.0)  # Ten tokens take 35 s.
    result = ran(patient, costs, Given([[10, 10]] * 5), simulated_cluster(placement), num_steps=2)
    assert [step.trained_tokens for step in result.report.steps] == [100, 100]


def test_worker_processes_stop_what_is_late_and_the_run_goes_on(tmp_path):
    runs = RunSettings(runs_dir=str(tmp_path))
    said: list[str] = []
    planned = Run(hopeless, {}, spec(1, 128), runs, warn=said.append).execute()
    assert [part for part in said if "skipped an optimiser step" in part]
    decisions = read_decisions(Path(planned.run_dir))
    assert len(decisions) == 0
    assert len(list(read_samples(Path(planned.run_dir)))) == 2
    assert planned.left_out == read_left_out(Path(planned.run_dir)) == {"late": 4096}
    assert [check for check in audit(Path(planned.run_dir)).checks if not check.holds] == []
    eager = Run(hopeless, {}, spec(1, 128), runs.model_copy(update={"eager": True}), decisions=decisions, warn=said.append).execute()
    assert (eager.samples_sha256, eager.weights_sha256) == (planned.samples_sha256, planned.weights_sha256)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"late": "drop", "timeout_s": 0}, "timeout_s=0"),
        ({"late": "drop", "timeout_s": "1 min"}, "timeout_s='1 min'"),
        ({"timeout_s": 5}, "with late='wait'"),
        ({"late": "drop"}, "over-sampling is for what comes late"),
    ],
)
def test_a_time_out_that_means_nothing_is_refused(options, said):
    @flow
    def wrong() -> None:
        Policy("fake").generate(Dataset(ROWS).take(2), n=2, max_new_tokens=4, **options)

    with pytest.raises(OptionError, match=r"late|timeout_s") as refused:
        trace(wrong, {})
    assert said in str(refused.value)


def test_the_plan_says_what_time_decides():
    graph, _, _ = trace(hurried, {})
    assert "late='drop', timeout_s=60.0" in str(graph)

    assert any("whole in 60 s, and drops those" in note for note in asynchrony(graph, graph.names()))
