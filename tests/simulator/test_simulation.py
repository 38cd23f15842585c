"""The simulator against closed forms, on cases that have them; and what holds of every run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from cost_tables import NOTHING, PlainCosts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import T0, T1, Given, Ran, cluster, decodes, evaluated, leased, plain, ran, stale, zero

from m2flow import Chat, Dataset, Policy, Reference, Reward, Sample, agent, flow, log, steps
from m2flow.errors import InternalError
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol.cost_terms import (
    Costs,
    DecodeCost,
    EngineId,
    EpisodeCosts,
    EpisodeTurn,
    Footprint,
    FunctionCost,
    Layout,
    PassCost,
    Switch,
    TrainCost,
)
from m2flow.micro.protocol.plan import Plan
from m2flow.planner.planning import UNKNOWN_TURNS, question_of, with_waits
from m2flow.planner.search import find_plan
from m2flow.planner.workload import Away, workload_of
from m2flow.rollout_scheduling.lengths import parse_lengths
from m2flow.simulator import virtual_worker
from m2flow.simulator.ablation import AblatedCosts, NoRewards, NoSwitches
from m2flow.simulator.machines import machines_of
from m2flow.simulator.simulation import follow_program
from m2flow.simulator.simulation_report import simulate
from m2flow.simulator.virtual_worker import Decoding, SampleRun
from m2flow.spec import ClusterSpec, PinSpec, PoolSpec, RolloutSpec, TrainSpec

some = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_one_sample_on_one_instance_takes_its_prefill_and_its_tokens_alone():
    costs = PlainCosts(decoding=decodes(prefill_s=0.5))
    result = ran(plain, costs, Given([[7]], prompt=4), cluster(), options={"batch": 1, "n": 1})
    assert result.makespans == [4 * 0.5 + 7 * (T0 + T1)]


def test_samples_of_a_group_share_their_prefill():
    costs = PlainCosts(decoding=decodes(prefill_s=0.5))
    result = ran(plain, costs, Given([[7]], prompt=4), cluster(), options={"batch": 1, "n": 3})
    assert result.makespans == [4 * 0.5 + 7 * (T0 + 3 * T1)]


@flow
def lower_bounded(least: int, ignore_eos: bool = False) -> None:
    policy = Policy("fake")
    for _ in steps(1):
        responses = policy.generate(Dataset([{"prompt": "a"}]).take(1), n=1, min_new_tokens=least, max_new_tokens=40, ignore_eos=ignore_eos)
        policy.update(responses, advantages=Reward(lambda sample: 0.0).score(responses))


@pytest.mark.parametrize(("options", "tokens"), [({"least": 0}, 7), ({"least": 20}, 20), ({"least": 0, "ignore_eos": True}, 40)])
def test_no_sample_ends_before_its_call_lets_it(options, tokens):
    result = ran(lower_bounded, PlainCosts(decoding=decodes()), Given([[7]]), cluster(), options=options)
    assert result.makespans == [tokens * (T0 + T1)]


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_equal_lengths_are_shared_out_evenly(instances):
    result = ran(plain, PlainCosts(decoding=decodes()), Given([[10]]), cluster(instances=instances), options={"batch": 8, "n": 1})
    assert result.makespans == [10 * (T0 + 8 // instances * T1)]


def test_what_does_not_fit_the_cache_waits_for_room():
    result = ran(plain, PlainCosts(decoding=decodes(max_running=2)), Given([[10]]), cluster(), options={"batch": 5, "n": 1})
    assert result.makespans == [2 * 10 * (T0 + 2 * T1) + 10 * (T0 + T1)]


def test_a_shorter_sample_leaves_the_others_faster():
    result = ran(plain, PlainCosts(decoding=decodes()), Given([[4, 10]]), cluster(), options={"batch": 1, "n": 2})
    assert result.makespans == [4 * (T0 + 2 * T1) + 6 * (T0 + T1)]


TRAINING = TrainCost(NOTHING, PassCost(0.0, 0.5, 0.0), 3.0)


@pytest.mark.parametrize("placed", ["one process", "a lease of several"])
def test_taking_turns_is_a_sum(placed):
    costs = PlainCosts(decodes(), TRAINING, switching=Switch(2.0, 5.0), syncing_s=11.0)
    spec = cluster("time-shared") if placed == "one process" else cluster("split", instances=2)
    change = (lambda plan: plan) if placed == "one process" else leased
    result = ran(plain, costs, Given([[10]], prompt=2), spec, options={"batch": 2, "n": 1, "num_steps": 2}, num_steps=2, placed=change)
    rollout_s = 10 * (T0 + 2 * T1) if placed == "one process" else 10 * (T0 + T1)
    train_s = 2 * 12 * 0.5 + 3.0
    assert result.makespans == [rollout_s + 7.0 + train_s, 7.0 + 11.0 + rollout_s + 7.0 + train_s]


@some
@given(st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=2), min_size=1, max_size=8), st.integers(1, 3))
def test_split_ends_when_the_trainer_has_done_what_is_released(groups, instances):
    """T = max_k (r_k + sum of p_i released from r_k on), and the optimiser's step."""
    costs = PlainCosts(decodes(), TRAINING)
    spec = cluster(instances=instances, token_budget=1)
    result = ran(plain, costs, Given(groups), spec, options={"batch": len(groups), "n": 2})
    ended = {run.id: run.ended_s for runs in result.history.sample_runs.values() for run in runs}
    ordered = sorted(ended)
    releases = [max(ended[first], ended[second]) for first, second in zip(ordered[::2], ordered[1::2], strict=True)]
    order = sorted(range(len(groups)), key=lambda i: releases[i], reverse=True)
    left, expected = 0.0, 0.0
    for i in order:
        left += 0.5 * sum(groups[i])
        expected = max(expected, releases[i] + left)
    assert result.makespans == [pytest.approx(expected + 3.0)]


def test_knowing_lengths_lets_the_longest_begin_first():
    """One at a time on two instances: in the order of the program the long one comes last; known, it comes first."""

    def knowing(plan: Plan) -> Plan:
        return msgspec.structs.replace(plan, policies=("lpt",), predictor="oracle")

    def made(placed: Callable[[Plan], Plan]) -> list[float]:
        costs, lengths = PlainCosts(decoding=decodes(max_running=1)), Given([[4], [4], [4], [12]])
        return ran(plain, costs, lengths, cluster(instances=2, max_running=1), options={"batch": 4, "n": 1}, placed=placed).makespans

    assert made(lambda plan: plan) == [16 * (T0 + T1)]
    assert made(knowing) == [12 * (T0 + T1)]


def test_without_waiting_for_groups_the_trainer_begins_with_the_first_member():
    def made(*, without_groups: bool) -> list[float]:
        costs = PlainCosts(decodes(), TrainCost(NOTHING, PassCost(0.0, 0.5, 0.0), 0.0))
        lengths, spec = Given([[4, 20]]), cluster(token_budget=1)
        return ran(plain, costs, lengths, spec, options={"batch": 1, "n": 2}, without_groups=without_groups).makespans

    rollout_s = 4 * (T0 + 2 * T1) + 16 * (T0 + T1)
    assert made(without_groups=False) == [rollout_s + 24 * 0.5]
    assert made(without_groups=True) == [rollout_s + 20 * 0.5]


def test_rewards_take_the_hands_that_there_are():
    costs = PlainCosts(decodes(), functions={"zero.score": FunctionCost((4.0,), concurrency=2)})
    result = ran(plain, costs, Given([[10]]), cluster(), options={"batch": 1, "n": 6})
    assert result.makespans == [10 * (T0 + 6 * T1) + 3 * 4.0]


@pytest.mark.parametrize("chunk", [1, 64])
def test_two_processes_for_rewards_share_the_work(chunk):
    costs = PlainCosts(decodes(), functions={"zero.score": FunctionCost((4.0,))})
    result = ran(plain, costs, Given([[10]]), cluster(functions=2, chunk=chunk), options={"batch": 1, "n": 6})
    assert result.makespans == [10 * (T0 + 6 * T1) + 3 * 4.0]


@pytest.mark.parametrize(("latency_s", "num_workers"), [(1e-5, 1), (4.0, 2)])
def test_rows_are_shared_out_unless_the_tasks_before_were_quick_as_in_a_run(latency_s, num_workers):
    costs = PlainCosts(decodes(), functions={"zero.score": FunctionCost((latency_s,))})
    result = ran(plain, costs, Given([[10]]), cluster(functions=2), options={"batch": 1, "n": 6, "num_steps": 3}, num_steps=3)
    calls = result.history.calls
    scored = [(calls[done.task.call].step, done.worker) for done in result.history.done_tasks if done.task.call in calls]
    scored = [(step, worker) for step, worker in scored if worker.startswith("functions")]
    assert len({worker for step, worker in scored if step == 0}) == 2  # Nothing is known yet.
    assert all(len({worker for step, worker in scored if step == later}) == num_workers for later in (1, 2))


def test_what_is_not_taken_away_from_costs_stays():
    """Messages and neighbours that cost nothing once another mechanism is taken away would be its gain."""
    asked = {name for name in vars(Costs) if not name.startswith("_")} - {"for_spec"}
    assert asked <= vars(AblatedCosts).keys()
    costs = NoSwitches(PlainCosts(messaging_s=0.5, slower={("train", "rollout"): 2.0}, switching=Switch(2.0, 5.0)))
    assert (costs.message_s(), costs.slowdown("train", "rollout")) == (0.5, 2.0)
    assert costs.switch(EngineId("policy", "train"), "", Footprint()) == Switch(0.0, 0.0)
    assert NoRewards(costs).message_s() == 0.0


def test_rows_need_time_on_their_way():
    result = ran(plain, PlainCosts(decodes(), hopping_s=0.5), Given([[10]]), cluster(), options={"batch": 1, "n": 1})
    # Prompts to the rollout, samples to the reward and (with their rewards) to the trainer.
    assert result.makespans == [0.5 + 10 * (T0 + T1) + 2 * 0.5]


def test_with_staleness_training_hides_behind_the_next_rollout():
    costs = PlainCosts(decodes(), TRAINING)
    lengths, options = Given([[40]]), {"batch": 2, "n": 1, "num_steps": 5}
    behind = ran(stale, costs, lengths, cluster(max_running=2), options={**options, "lag": 1}, num_steps=5)
    exact = ran(stale, costs, lengths, cluster(max_running=2), options={**options, "lag": 0}, num_steps=5)
    rollout_s, train_s = 40 * (T0 + 2 * T1), 2 * 40 * 0.5 + 3.0
    assert exact.makespans == [rollout_s + train_s] * 5
    assert behind.makespans == [rollout_s + train_s] + [rollout_s] * 4
    assert [step.staleness for step in behind.report.steps] == [{"0": 2}] + [{"1": 2}] * 4
    assert all(name.endswith("_between_releases") for step in behind.report.steps for name in step.lower_bounds_s)


@st.composite
def runs(draw):
    groups = draw(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), min_size=1, max_size=6))
    costs = PlainCosts(
        DecodeCost(
            draw(st.sampled_from([0.1, 1.0])),
            draw(st.sampled_from([0.0, 0.01, 0.5])),
            draw(st.sampled_from([0.0, 0.01])),
            draw(st.integers(1, 9)),
        ),
        TrainCost(NOTHING, PassCost(draw(st.sampled_from([0.0, 3.0])), draw(st.sampled_from([0.0, 0.01, 0.3])), 1e-5), 2.0),
        {"zero.score": FunctionCost((0.0, 1.0, 20.0), draw(st.integers(1, 3)))},
        Switch(draw(st.sampled_from([0.0, 5.0])), 2.0, draw(st.booleans())),
        draw(st.sampled_from([0.0, 4.0])),
        draw(st.sampled_from([0.0, 0.1])),
    )
    spec = cluster(
        draw(st.sampled_from(["time-shared", "split"])),
        instances=draw(st.integers(1, 3)),
        max_running=draw(st.sampled_from([1, 4, 100])),
        token_budget=draw(st.sampled_from([1, 300, 10_000])),
    )
    placed = leased if spec.placement == "split" and draw(st.booleans()) else lambda plan: plan
    options = {"batch": draw(st.integers(1, 5)), "n": draw(st.integers(1, 3)), "lag": draw(st.integers(0, 2)), "num_steps": 3}
    return costs, Given(groups, prompt=draw(st.integers(0, 50))), spec, options, placed


@some
@given(runs())
def test_no_makespan_is_below_a_bound_and_every_device_second_is_counted_once(run):
    costs, lengths, spec, options, placed = run
    result = ran(stale, costs, lengths, spec, options=options, num_steps=3, placed=placed)
    for period in result.history.periods:
        assert sum(period.seconds.values()) == pytest.approx(period.makespan_s * result.history.num_devices)
    for step in result.report.steps:
        assert step.makespan_s >= max(step.lower_bounds_s.values()) * (1 - 1e-7)
        assert sum(step.staleness.values()) == options["batch"] * options["n"]
        assert all(int(behind) <= options["lag"] for behind in step.staleness)
    assert len(result.report.steps) == 3


@some
@given(runs())
def test_two_runs_of_the_same_are_equal_to_the_last_bit(run):
    costs, lengths, spec, options, placed = run
    first, second = (ran(stale, costs, lengths, spec, options=options, num_steps=3, placed=placed) for _ in range(2))
    assert first.report.steps == second.report.steps
    assert [(d.worker, d.task, d.start_s, d.end_s) for d in first.history.done_tasks] == [
        (d.worker, d.task, d.start_s, d.end_s) for d in second.history.done_tasks
    ]


def test_how_long_a_sample_is_depends_on_who_it_is_and_not_on_the_plan():
    lengths = parse_lengths("lognormal:median=50,sigma=0.8,icc=0.3")

    def tokens(spec, seed):
        result = ran(plain, PlainCosts(decodes()), lengths, spec, options={"batch": 6, "n": 3, "num_steps": 2}, num_steps=2, seed=seed)
        return {run.id: run.num_tokens for runs in result.history.sample_runs.values() for run in runs}

    assert tokens(cluster(), 1) == tokens(cluster("time-shared", instances=3, max_running=2), 1)
    assert tokens(cluster(), 1) != tokens(cluster(), 2)


def test_a_trace_is_replayed_where_its_groups_fit():
    lengths = parse_lengths("dapo-qwen2.5-32b")
    result = ran(plain, PlainCosts(decodes()), lengths, cluster(instances=4), options={"batch": 96, "n": 8, "num_steps": 2}, num_steps=2)
    recorded = [lengths.step(k, num_groups=96, n=8, seed=0).responses.sum() for k in range(2)]
    assert [step.trained_tokens for step in result.report.steps] == recorded
    assert result.history.drawn.num_replayed == 2


def test_an_evaluation_before_it_does_not_take_a_generation_its_recorded_step():
    lengths = parse_lengths("dapo-qwen2.5-32b")
    options = {"batch": 96, "n": 8, "num_steps": 2}
    result = ran(evaluated, PlainCosts(decodes()), lengths, cluster(instances=4), options=options, num_steps=2)
    recorded = [lengths.step(k, num_groups=96, n=8, seed=0).responses.sum() for k in range(2)]
    assert [step.trained_tokens for step in result.report.steps] == recorded
    assert (result.history.drawn.num_replayed, result.history.drawn.num_drawn) == (2, 2)


# Continuous batching, by itself.


def in_small_steps(runs: list[tuple[int, int]], cost: DecodeCost) -> dict[int, float]:
    """(id, tokens) in order: each turn one token of all that run, as an engine does it."""
    waiting, running, now, ended = list(runs), {}, 0.0, {}
    while waiting or running:
        while waiting and len(running) < cost.max_running:
            number, tokens = waiting.pop(0)
            running[number] = tokens
            now += cost.enter_s
        now += cost.seconds(len(running))
        running = {number: left - 1 for number, left in running.items()}
        ended |= dict.fromkeys([number for number, left in running.items() if not left], now)
        running = {number: left for number, left in running.items() if left}
    return ended


@some
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 8), st.sampled_from([0.0, 0.5]))
def test_from_finish_to_finish_is_as_long_as_token_by_token(tokens, max_running, enter_s):
    cost = DecodeCost(T0, T1, 0.0, max_running, enter_s=enter_s)
    virtual_worker = Decoding({"policy": cost})
    virtual_worker.add([SampleRun(i, "policy", 0, 0, n, 0, 0.0) for i, n in enumerate(tokens)], 0.0)
    ended = {}
    while (when_s := virtual_worker.next_s()) is not None:
        ended |= {run.id: when_s for run in virtual_worker.finished(when_s)}
    expected = in_small_steps(list(enumerate(tokens)), cost)
    assert ended == {number: pytest.approx(when_s) for number, when_s in expected.items()}


# Seeded bugs: each must be seen.


def test_a_decoder_that_is_too_fast_is_found_out_by_the_bounds(monkeypatch):
    monkeypatch.setattr(
        virtual_worker.Decoding, "next_s", lambda self, inner=virtual_worker.Decoding.next_s: (s := inner(self)) and s * 0.9
    )
    with pytest.raises(InternalError, match="no schedule takes less"):
        ran(plain, PlainCosts(decodes()), Given([[100, 100]]), cluster())


def test_a_sample_that_ends_early_is_found_out(monkeypatch):
    admit = virtual_worker.Decoding._admit

    def with_fewer(self, now_s):
        for waiting in self._waiting.values():
            for run in waiting:
                run.num_tokens -= run.num_tokens // 10
        admit(self, now_s)

    monkeypatch.setattr(virtual_worker.Decoding, "_admit", with_fewer)
    result = ran(plain, PlainCosts(decodes()), Given([[100, 100]]), cluster())
    generated = sum(run.ended - run.begun for runs in result.history.sample_runs.values() for run in runs)
    assert generated != pytest.approx(sum(step.trained_tokens for step in result.report.steps))


def test_what_is_generated_is_what_is_trained_on():
    result = ran(plain, PlainCosts(decodes()), Given([[100, 31]]), cluster())
    generated = sum(run.ended - run.begun for runs in result.history.sample_runs.values() for run in runs)
    assert generated == pytest.approx(sum(step.trained_tokens for step in result.report.steps))
    assert np.sum([step.wasted_tokens for step in result.report.steps]) == 0


# ---- several who speak in an episode


@agent
async def judged(chat: Chat, row: Sample) -> float:
    return 0.0


@flow
def contested(batch: int = 1) -> None:
    policy, judge = Policy("fake"), Policy("fake", name="judge")
    for _ in steps(1):
        played = policy.rollout(judged, Dataset([{"prompt": "a"}] * batch).take(batch), n=1, max_tokens=99, speakers={"judge": judge})
        log(reward=played.reward.mean())


ALTERNATELY = (
    EpisodeTurn(0),
    EpisodeTurn(3, prefill_tokens=2),
    EpisodeTurn(2, prefill_tokens=4, role="judge"),
    EpisodeTurn(1, prefill_tokens=1, rest_s=0.5),
    EpisodeTurn(2, prefill_tokens=0, role="judge"),
)
"""An episode in which a judge speaks twice."""


@dataclass
class OfTwo(PlainCosts):
    """A judge takes twice as long for a token, and an episode is known."""

    most: int = 1_000_000

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        return DecodeCost(2.0 if engine.role == "judge" else 1.0, 0.0, 0.25, self.most)

    def episodes(self) -> EpisodeCosts:
        return EpisodeCosts((ALTERNATELY,))


def contested_in(costs: Costs, batch: int = 1, *, is_apart: bool, engine: str = "fake") -> Ran:
    spec = cluster().model_copy(update={"pin": {"judge.rollout": PinSpec(num_devices=1)}} if is_apart else {})
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"engine": engine})})
    return ran(contested, costs, Given([[8]], prompt=2), spec, options={"batch": batch})


def test_an_episode_waits_for_the_answers_of_one_who_speaks_from_another_engine():
    own_s, judges_s, rest_s = 4 * 1.0 + (2 + 1) * 0.25, 4 * 2.0 + 4 * 0.25, 0.5
    for is_apart in (True, False):
        result = contested_in(OfTwo(), is_apart=is_apart)
        assert result.makespans == [own_s + judges_s + rest_s], is_apart
    (run,) = [run for runs in contested_in(OfTwo(), is_apart=True).history.sample_runs.values() for run in runs]
    assert run.spoken == [3, 1]
    assert run.tokens_until(run.ended) == 4, "what a judge said is none of the policy's decoding"


def test_servers_of_one_worker_decode_at_the_same_time_and_engines_in_its_process_one_after_the_other():
    costs, batch = OfTwo(most=2), 6
    served, apart, in_process = (
        contested_in(costs, batch, is_apart=is_apart, engine=engine)
        for is_apart, engine in ((False, "vllm"), (True, "vllm"), (False, "fake"))
    )
    (host,) = [machine for machine in served.machines.values() if machine.decode]
    assert set(host.lanes) == {("policy",), ("judge",)}
    assert served.makespans == apart.makespans
    work_s = batch * (4 * 1.0 + 4 * 2.0) / 2  # Two at once of each.
    assert served.makespans[0] < work_s <= in_process.makespans[0]


def test_two_processes_have_a_gpu_in_turn_and_a_host_at_the_same_time():
    graph, models, _ = trace(contested, {"batch": 2})
    spec = cluster().model_copy(update={"rollout": RolloutSpec(engine="vllm")})
    plan = lower(graph, models, spec)
    assert [machine.lanes for machine in machines_of(plan, spec, OfTwo()).values() if machine.decode] == [(("policy",), ("judge",))]
    workers = tuple(msgspec.structs.replace(worker, device="cuda:0") for worker in plan.workers)
    on_gpu = machines_of(msgspec.structs.replace(plan, workers=workers), spec, OfTwo())
    assert [machine.lanes for machine in on_gpu.values() if machine.decode] == [(("policy", "judge"),)]


def own_and_judges(*lengths: int) -> tuple[EpisodeTurn, ...]:
    """An episode in which both speak in turns, a judge twice as long as the policy."""
    return tuple(turn for n in lengths for turn in (EpisodeTurn(n), EpisodeTurn(2 * n, role="judge")))


@dataclass
class OfOne(OfTwo):
    """Both take turns in all episodes alike."""

    def episodes(self) -> EpisodeCosts:
        return EpisodeCosts((own_and_judges(5, 3, 4),))


BESIDE = ClusterSpec(
    pools={"gpus": PoolSpec(device="h100", devices_per_node=2)},
    rollout=RolloutSpec(engine="fake"),
    train=TrainSpec(engine="fake"),
    pin={"judge.rollout": PinSpec(num_devices=1)},
)


@pytest.mark.parametrize("batch", [1, 6, 16])
def test_a_search_counts_what_episodes_wait_for_those_who_speak_elsewhere_as_a_simulation_does(batch):
    costs, lengths = OfOne(hopping_s=0.5), Given([[36]], prompt=2)
    graph, models, _ = trace(contested, {"batch": batch})
    without = workload_of(graph, BESIDE)
    workload, unknown = with_waits(without, costs, BESIDE)
    assert not unknown
    choice = find_plan(workload, lengths, costs, BESIDE, is_alone=True)
    program = follow_program(contested, {"batch": batch}, steps=1)
    simulated = simulate(program, lower(program.graph, models, BESIDE, choice=choice), BESIDE, costs, lengths)
    found_s = simulated.history.periods[1].makespan_s
    assert choice.predicted_step_s == pytest.approx(found_s, rel=0.1)
    assert find_plan(without, lengths, costs, BESIDE, is_alone=True).predicted_step_s != pytest.approx(found_s, rel=0.1)


@flow
def using_tools(batch: int = 1) -> None:
    policy = Policy("fake")
    for _ in steps(1):
        played = policy.rollout(judged, Dataset([{"prompt": "a"}] * batch).take(batch), n=1, max_tokens=99)
        log(reward=played.reward.mean())


@dataclass
class OfTools(PlainCosts):
    """Each episode looks something up after each of its turns, two things of the last one at once."""

    lengths: tuple[int, ...] = (12,)
    most: int = 1_000_000

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        return DecodeCost(1.0, 0.0, 0.25, self.most)

    def episodes(self) -> EpisodeCosts:
        looks = (("look", 0.5),), (("look", 0.2), ("look", 0.5))
        return EpisodeCosts(tuple((EpisodeTurn(0), *(EpisodeTurn(4, 0, looks),) * (n // 4)) for n in self.lengths))


ON_ONE = ClusterSpec(
    pools={"gpus": PoolSpec(device="h100", devices_per_node=1)}, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake")
)


@pytest.mark.parametrize(("batch", "most"), [(1, 64), (16, 64), (64, 4)])
def test_a_search_counts_what_episodes_wait_for_tools_as_a_simulation_does(batch, most):
    """A batch that is full hides what some of many wait."""
    costs, lengths = OfTools(most=most), Given([[12]], prompt=0)
    graph, models, _ = trace(using_tools, {"batch": batch})
    without = workload_of(graph, ON_ONE)
    workload, _ = with_waits(without, costs, ON_ONE)
    choice = find_plan(workload, lengths, costs, ON_ONE, is_alone=True)
    program = follow_program(using_tools, {"batch": batch}, steps=1)
    spec = ON_ONE.model_copy(update={"rollout": RolloutSpec(engine="fake", max_running=most)})
    simulated = simulate(program, lower(program.graph, models, spec, choice=choice), spec, costs, lengths)
    found_s = simulated.history.periods[1].makespan_s
    assert choice.predicted_step_s == pytest.approx(found_s, rel=0.15)
    if batch < most:
        assert find_plan(without, lengths, costs, ON_ONE, is_alone=True).predicted_step_s < 0.9 * found_s


@pytest.mark.parametrize(
    ("lengths", "token_s", "episode_s"),
    [((12,), 0.0, 3.0), ((4, 12), 0.25, 0.0), ((4, 4, 12), 0.25, 0.0), ((), 0.0, 0.0), ((0,), 0.0, 0.0)],
)
def test_what_longer_episodes_wait_for_tools_is_a_line_through_what_was_recorded(lengths, token_s, episode_s):
    workload, _ = with_waits(workload_of(trace(using_tools, {})[0], ON_ONE), OfTools(lengths=lengths), ON_ONE)
    (call,) = [call for call in workload.calls if call.is_played]
    assert call.away == Away(0.0, pytest.approx(token_s), pytest.approx(episode_s))


def test_a_plan_says_once_that_the_turns_of_those_who_speak_elsewhere_are_not_known():
    spec = BESIDE.model_copy(update={"shapes": {"policy": "Qwen2.5-1.5B", "judge": "Qwen2.5-1.5B"}})
    graph, models, _ = trace(contested, {"batch": 2})
    said = [doubt for doubt in question_of(graph, models, spec).doubts if "judge" in doubt]
    assert said == [UNKNOWN_TURNS.format("judge")]


def test_turns_that_are_asked_for_elsewhere_take_the_way_there_and_back():
    here, there = (contested_in(OfTwo(hopping_s=0.125), is_apart=is_apart).makespans[0] for is_apart in (False, True))
    assert there - here == pytest.approx(2 * 2 * 0.125)


def test_a_judge_on_devices_of_its_own_works_while_others_play_and_one_in_the_process_of_the_episodes_holds_them_up():
    apart, together = (contested_in(OfTwo(most=2), 6, is_apart=is_apart) for is_apart in (True, False))
    alone_s = 3 * (4 * 2.0 + 2 * 4 * 0.25)
    assert alone_s < apart.makespans[0] < alone_s + 3 * 1.0 + 1.0 + 2 * 0.5 + 3 * 0.5
    assert together.makespans[0] > apart.makespans[0] + 2.0
    assert sum(map(len, apart.history.sample_runs.values())) == 6, "a judge's turns are no samples of its own"
    assert apart.totals.idle_s["tool"] > 0


APART = ClusterSpec(
    pools={"gpus": PoolSpec(device="h100", devices_per_node=5)},
    rollout=RolloutSpec(engine="fake"),
    train=TrainSpec(engine="fake"),
    pin={"rollout": PinSpec(num_devices=4), "train": PinSpec(num_devices=1)},
)


HEAVY = parse_lengths("lognormal:median=1000,sigma=0.9,cap=8000,prompt=0")


@pytest.mark.parametrize(
    ("lag", "slots", "train_s"),
    [(0, 64, 0.05), (0, 24, 0.05), (0, 8, 0.01), (1, 64, 0.2), (2, 64, 0.05), (4, 64, 0.05), (2, 16, 0.05), (4, 16, 0.2)],
)
def test_steps_are_predicted_as_they_are_simulated_with_waves_of_samples_and_with_batches_of_several_steps(lag, slots, train_s):
    """256 samples over four instances: all at once, or more than there are slots; on policy, and with steps that overlap."""
    costs = PlainCosts(
        decoding=DecodeCost(0.01, 0.0003, 0.0, slots), training=TrainCost(NOTHING, PassCost(0.0, 0.0, 0.0, sample_s=train_s), 0.0)
    )
    spec = APART.model_copy(update={"rollout": RolloutSpec(engine="fake", max_running=slots)})
    num_steps = 24
    options = {"num_steps": num_steps, "batch": 64, "n": 4, "lag": lag, "max_new_tokens": 8000}
    graph, models, _ = trace(stale, options, steps=2)
    choice = find_plan(workload_of(graph, spec), HEAVY, costs, spec, is_alone=True)
    program = follow_program(stale, options, steps=num_steps)
    simulated = simulate(program, lower(program.graph, models, spec, choice=choice), spec, costs, HEAVY)
    each = [simulated.history.periods[step].makespan_s for step in range(4, num_steps - 4)]
    assert choice.predicted_step_s == pytest.approx(np.mean(each), rel=0.2)


@flow
def penalized(num_steps: int = 3) -> None:
    policy = Policy("fake")
    reference, reward, prompts = Reference(policy), Reward(zero), Dataset([{"prompt": "a"}] * 8)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(8), max_new_tokens=8000)
        kl = (responses.logprobs - reference.logprobs(responses)).sum(over="sample")
        policy.update(responses, advantages=reward.score(responses) - kl)


@pytest.mark.parametrize("reference", [0, 5])
def test_what_is_between_the_calls_is_counted_once_a_step_whoever_has_the_first_devices(reference):
    """A reference's engine computes as a trainer does, and gets no weights."""

    @dataclass
    class Resting(PlainCosts):
        between_s: float = 0.0

        def rest_s(self) -> float:
            return self.between_s

    pins = {
        "reference": PinSpec(devices=(reference, reference + 1)),
        "policy.rollout": PinSpec(devices=(1, 4)),
        "policy.train": PinSpec(devices=(4, 5)),
    }
    spec = APART.model_copy(update={"pools": {"gpus": PoolSpec(device="h100", devices_per_node=6)}, "pin": pins})
    graph, models, _ = trace(penalized, {}, steps=2)
    found = []
    for between_s in (0.0, 100.0):
        costs = Resting(decoding=DecodeCost(0.01, 0.0, 0.0, 64), between_s=between_s)
        choice = find_plan(workload_of(graph, spec), HEAVY, costs, spec, is_alone=True)
        program = follow_program(penalized, {}, steps=3)
        simulated = simulate(program, lower(program.graph, models, spec, choice=choice), spec, costs, HEAVY)
        found.append((choice.predicted_step_s, simulated.history.periods[2].makespan_s))
    assert [after - before for before, after in zip(*found, strict=True)] == pytest.approx([100.0, 100.0])


@flow
def drawing(num_steps: int = 10, batch: int = 48, n: int = 4, size: int = 0) -> None:
    policy, reward = Policy("fake"), Reward(zero)
    prompts = Dataset([{"prompt": "a"}] * 1000)
    for _ in steps(num_steps):
        responses = policy.generate(prompts, n=n, max_new_tokens=8000, count=batch, score=reward, keep=lambda group: len(group) > 0)
        policy.update(responses, advantages=responses.reward, minibatch_size=size or None)


@pytest.mark.parametrize(
    ("slots", "train_s", "size"), [(64, 0.02, 0), (64, 0.2, 0), (24, 0.02, 0), (24, 0.6, 0), (24, 0.6, 6), (64, 0.6, 6)]
)
def test_a_refill_is_predicted_as_it_is_simulated(slots, train_s, size):
    """Half of the groups are kept; others begin as verdicts come, and the update with those that are certain to be kept."""
    costs = PlainCosts(
        decoding=DecodeCost(0.01, 0.0003, 0.0, slots), training=TrainCost(NOTHING, PassCost(0.0, 0.0, 0.0, sample_s=train_s), 0.0)
    )
    spec = APART.model_copy(update={"rollout": RolloutSpec(engine="fake", max_running=slots)})
    graph, models, _ = trace(drawing, {"size": size}, steps=2)
    choice = find_plan(workload_of(graph, spec), HEAVY, costs, spec, is_alone=True)
    program = follow_program(drawing, {"size": size}, steps=10)
    simulated = simulate(program, lower(program.graph, models, spec, choice=choice), spec, costs, HEAVY)
    each = [simulated.history.periods[step].makespan_s for step in range(2, 10)]
    assert choice.predicted_step_s == pytest.approx(np.mean(each), rel=0.2)
