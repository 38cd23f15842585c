"""The passes from the graph to the plan, one by one, and the plan that comes out."""

import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow import AdamW, Dataset, Policy, Reference, Reward, Sample, flow, load_flow, log, nll, op, ppo_clip, steps
from m2flow.errors import InternalError, PlanError
from m2flow.macro.graph import Call, Granularity, MacroGraph, Ref
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import Lowering, accumulation_unit, cut, legal_stages, lower
from m2flow.micro.lowering.routing import _with_transports
from m2flow.micro.protocol.plan import EngineSlot, Plan, Route, Stage, WeightSyncPlan, WorkerPlan
from m2flow.recipe import Sampling
from m2flow.spec import ChannelSpec, ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager, run_planned

ROOT = Path(__file__).parents[3]


def zero(sample: Sample) -> float:
    return 0.0


@op(granularity="group")
def ranks(samples: list[Sample]) -> list[int]:
    return list(range(len(samples)))


@flow
def whole() -> None:
    """Every kind of call."""
    policy, verifier = Policy("fake"), Reward(zero)
    prompts, demos = Dataset([{"prompt": "a"}] * 4), Dataset([{"prompt": "a", "target": "b"}] * 6, name="demos")
    policy.update(demos.all(), loss=nll())
    reference = Reference(policy)
    for _ in steps(3):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=5)
        ranks(responses)
        rewards = verifier.score(responses)
        rewards.mean()
        policy.update(responses, rewards, loss=ppo_clip(kl_coef=0.1), reference=reference, minibatch_size=2, epochs=2)


@flow
def only_trains() -> None:
    Policy("fake").update(Dataset([{"prompt": "a", "target": "b"}]).all(), loss=nll())


@flow
def only_generates() -> None:
    Reward(zero).score(Policy("fake").generate(Dataset([{"prompt": "a"}]).all(), max_new_tokens=5))


@flow
def waits() -> None:
    policy = Policy("fake")
    reference = Reference(policy)
    prompts = Dataset([{"prompt": "a"}])
    for _ in steps(3):
        responses = policy.generate(prompts.take(1), n=2, max_new_tokens=5)
        rewards = Reward(zero).score(responses)
        if float(rewards.mean()) < 1:
            policy.update(responses, rewards, reference=reference, loss=ppo_clip(kl_coef=0.1))


@flow
def asks_first() -> None:
    """Two policies, one of which is only asked for log-probabilities before Python waits."""
    policy, other = Policy("fake"), Policy("fake", name="other")
    prompts = Dataset([{"prompt": "a"}] * 4)
    responses = policy.generate(prompts.take(2), n=2, max_new_tokens=5)
    if float(other.logprobs(responses).sum(over="sample").mean()) != 0.0:  # What a trace takes it for.
        log(length=other.generate(prompts.take(1), n=2, max_new_tokens=5).length.mean())


@flow
def reads_only() -> None:
    len(Dataset([{"prompt": "a"}]).all())


def spec(placement: str = "time-shared", **kwargs: object) -> ClusterSpec:
    rollout = RolloutSpec(engine="fake", workers=kwargs.pop("workers", 1), max_running=7)
    train, functions = TrainSpec(engine="fake", token_budget=50), FunctionSpec(workers=kwargs.pop("function_workers", 1), chunk=3)
    return ClusterSpec(placement=placement, cores=4, device="cpu", rollout=rollout, train=train, functions=functions, **kwargs)


def plan_of(program: object, cluster: ClusterSpec, *, assume: float | None = 0.0, **kwargs: object) -> Plan:
    graph, models, num_steps = trace(program, {}, assume=assume)
    return lower(graph, models, cluster, num_steps=num_steps, **kwargs)


def hosts(plan: Plan) -> dict[str, list[str]]:
    return {worker.name: [slot.kind for slot in worker.engines] for worker in plan.workers}


def stage(plan: Plan, call: str) -> Stage:
    return next(s for s in plan.stages if s.call == call)


# Legality


def test_each_call_may_be_cut_down_to_its_declared_unit_and_only_a_function_on_a_batch_is_a_barrier():
    stages = legal_stages(trace(whole, {})[0])
    assert [(s.call, s.unit, s.is_barrier) for s in stages] == [
        ("demos.all", "sample", False),
        ("policy.update", "batch", False),
        ("reference.copy_of", "batch", True),
        ("dataset.take", "sample", False),
        ("policy.generate", "sample", False),
        ("ranks", "group", False),
        ("zero.score", "sample", False),
        ("mean", "batch", True),
        ("reference.logprobs", "sample", False),
        ("policy.update", "minibatch", False),
    ]


def test_an_update_that_writes_nothing_and_a_function_on_minibatches_of_no_size_are_refused_with_their_line():
    graph = trace(whole, {})[0]
    update, score = graph.calls[1], graph.calls[6]
    with pytest.raises(PlanError, match="declares no write") as unwritten:
        legal_stages(MacroGraph("f", (replace(update, writes=()),)))
    with pytest.raises(PlanError, match="does not say of how many prompts") as wrong:
        legal_stages(MacroGraph("f", (replace(score, granularity=Granularity.MINIBATCH),)))
    assert unwritten.value.where.startswith("tests/micro/lowering/test_lowering.py:")
    assert "verifier.score(responses)" in wrong.value.where


def test_gradients_add_up_on_groups_where_advantages_compare_siblings():
    calls = trace(whole, {})[0].calls
    assert [accumulation_unit(call) for call in (calls[1], calls[-1])] == [Granularity.SAMPLE, Granularity.GROUP]


# Placement, syncs, switches


def test_time_shared_rollout_and_training_share_a_leased_worker():
    plan = plan_of(whole, spec())
    assert hosts(plan) == {"device-0": ["rollout", "train", "train"], "functions-0": ["function"]}
    assert [(s.lease, s.worker) for s in plan.switches] == [("device-0", "device-0")]
    assert [(s.role, s.source, s.target, s.transport) for s in plan.syncs] == [("policy", "device-0", "device-0", "same process")]


def test_time_shared_further_rollout_workers_only_generate_and_get_weights_through_shared_memory():
    plan = plan_of(whole, spec(workers=3))
    assert hosts(plan) == {
        "device-0": ["rollout", "train", "train"],
        "rollout-1": ["rollout"],
        "rollout-2": ["rollout"],
        "functions-0": ["function"],
    }
    assert [w.lease for w in plan.workers] == ["device-0", "", "", ""]
    assert {(s.target, s.transport) for s in plan.syncs} == {
        ("device-0", "same process"),
        ("rollout-1", "shared memory"),
        ("rollout-2", "shared memory"),
    }
    assert stage(plan, "policy.generate").workers == ("device-0", "rollout-1", "rollout-2")


def test_split_has_rollout_workers_beside_one_trainer_and_no_lease():
    plan = plan_of(whole, spec("split", workers=2, function_workers=2))
    assert hosts(plan) == {
        "rollout-0": ["rollout"],
        "rollout-1": ["rollout"],
        "train-0": ["train", "train"],
        "functions-0": ["function"],
        "functions-1": ["function"],
    }
    assert plan.switches == ()
    assert not any(w.lease for w in plan.workers)
    assert {(s.source, s.target) for s in plan.syncs} == {("train-0", "rollout-0"), ("train-0", "rollout-1")}


@pytest.mark.parametrize("placement", ["time-shared", "split"])
def test_without_a_trainer_or_without_rollout_there_is_nothing_to_take_turns_or_to_sync(placement):
    for program, kind in ((only_generates, "rollout"), (only_trains, "train")):
        plan = plan_of(program, spec(placement))
        assert {k for kinds in hosts(plan).values() for k in kinds} == {kind, "function"}
        assert plan.syncs == plan.switches == ()
        assert not any(w.lease for w in plan.workers)


@pytest.mark.parametrize("placement", ["time-shared", "split"])
def test_a_flow_that_only_reads_needs_no_device(placement):
    assert hosts(plan_of(reads_only, spec(placement))) == {"functions-0": ["function"]}


def test_the_cores_are_shared_out_over_what_computes_at_once_and_deterministic_runs_take_one_each():
    threads = {w.name: w.threads for w in plan_of(whole, spec("split", workers=1)).workers}
    assert threads == {"rollout-0": 2, "train-0": 2, "functions-0": 1}
    assert {w.threads for w in plan_of(whole, spec("split"), deterministic=True).workers} == {1}
    assert max(w.threads for w in plan_of(whole, spec(workers=9)).workers) == 1


# Chunking, packing, routing


def test_chunks_and_budgets_are_the_specs():
    plan = plan_of(whole, spec())
    assert {s.call: (s.chunk, s.token_budget) for s in plan.stages if s.engine != "source"} == {
        "policy.update": (3, 50),
        "reference.copy_of": (3, 50),
        "policy.generate": (7, 0),
        "ranks": (3, 0),
        "zero.score": (3, 0),
        "mean": (3, 0),
        "reference.logprobs": (3, 50),
    }


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 60))
def test_a_cut_keeps_the_order_loses_nothing_is_as_long_as_it_may_be_and_never_above_the_budget(tokens, budget):
    sizes, start, parts = cut(tokens, budget), 0, []
    for size in sizes:
        parts.append(tokens[start : start + size])
        start += size
    assert [t for part in parts for t in part] == tokens
    assert all(len(part) == 1 or (part and sum(part) <= budget) for part in parts)
    assert all(sum(a) + b[0] > budget for a, b in itertools.pairwise(parts))


def test_rows_are_forwarded_at_once_to_each_consumer_with_a_single_worker():
    one, two = plan_of(whole, spec("split")), plan_of(whole, spec("split", function_workers=2))
    assert stage(one, "policy.generate").forward_to == ("functions-0", "train-0")
    assert stage(two, "policy.generate").forward_to == ("train-0",)
    assert stage(one, "zero.score").forward_to == ("functions-0", "train-0")
    assert stage(one, "dataset.take").forward_to == ("rollout-0",)


def test_a_route_joins_each_producer_with_each_consumer_and_holds_all_that_a_step_makes():
    plan = plan_of(whole, spec(workers=2))
    found = {
        (r.source, r.target): (r.transport, r.capacity)
        for r in plan.routes
        if (r.producer, r.consumer) == ("policy.generate", "policy.update")
    }
    assert found == {("device-0", "device-0"): ("same process", 8), ("rollout-1", "device-0"): ("zmq ipc", 8)}
    assert [r.source for r in plan.routes if r.producer == "dataset.take"] == ["controller", "controller"]
    tcp = plan_of(whole, spec(workers=2, channels=ChannelSpec(transport="tcp")))
    assert {r.transport for r in tcp.routes} == {"same process", "zmq tcp"}


@pytest.mark.parametrize(
    ("transport", "devices", "way"),
    [
        ("ipc", ("cpu", "cpu"), "shared memory"),
        ("distributed", ("cpu", "cpu"), "torch gloo"),
        ("distributed", ("cuda:0", "cuda:1"), "torch nccl"),
        ("distributed", ("cuda:0", "cuda:0"), "torch gloo"),
        ("distributed", ("cuda:0", "cpu"), "torch gloo"),
    ],
)
def test_large_columns_go_by_what_the_spec_says_and_both_ends_have(transport, devices, way):
    route = Route("policy.generate", "policy.update", "rollout-0", "train-0", "same process", 8)
    from_us = Route("dataset.take", "policy.generate", "controller", "rollout-0", "same process", 8)
    hosts = dict(zip(("rollout-0", "train-0"), devices, strict=True))
    cluster = spec(channels=ChannelSpec(transport=transport))
    found = _with_transports((route, from_us), {"policy.generate": 1 << 20}, hosts, cluster)
    assert [each.transport for each in found] == [way, "zmq ipc"]
    small = _with_transports((route,), {"policy.generate": 1 << 10}, hosts, cluster)
    assert [each.transport for each in small] == ["zmq ipc"]


# The plan


def test_a_plan_comes_back_from_json_as_it_was():
    for cluster in (spec(workers=2), spec("split", workers=3, function_workers=2)):
        plan = plan_of(whole, cluster)
        assert msgspec.json.decode(plan.to_json(), type=Plan) == plan
        assert msgspec.json.decode(plan.to_json(), type=Plan).verify() == plan


def test_a_plan_that_is_wrong_is_told_what_is_wrong():
    plan = plan_of(whole, spec("split"))
    generate, update = stage(plan, "policy.generate"), stage(plan, "policy.update")

    def edited(old: Stage, **changes: object) -> Plan:
        stages = tuple(msgspec.structs.replace(s, **changes) if s is old else s for s in plan.stages)
        return msgspec.structs.replace(plan, stages=stages)

    sync = WeightSyncPlan("policy", "x", "rollout-0", "shared memory")
    route = Route("a", "b", "controller", "rollout-9", "zmq ipc", 1)
    wrong = {
        "no worker runs policy.generate": edited(generate, workers=()),
        "policy.generate is placed on train-0, which hosts no rollout engine": edited(generate, workers=("train-0",)),
        "policy.generate is placed on rollout-7, which": edited(generate, workers=("rollout-7",)),
        "policy.update has no token budget": edited(update, token_budget=0),
        "the worker 'rollout-9', which the plan does not have": msgspec.structs.replace(plan, routes=(*plan.routes, route)),
        "the worker 'x', which the plan does not have": msgspec.structs.replace(plan, syncs=(sync,)),
        "two workers of this plan have the same name": msgspec.structs.replace(plan, workers=(*plan.workers, plan.workers[0])),
    }
    assert plan.verify() is plan
    for message, bad in wrong.items():
        with pytest.raises(PlanError, match=message):
            bad.verify()


@pytest.mark.parametrize("placement", ["time-shared", "split"])
def test_the_plan_of_the_first_flow_reads_as_it_should(placement, monkeypatch):
    monkeypatch.chdir(ROOT)
    graph, models, num_steps = trace(load_flow("flows/grpo.py"), {}, assume=0.0)
    plan = lower(graph, models, ClusterSpec(name="laptop", cores=2, device="cpu", placement=placement), num_steps=num_steps)
    expected = ROOT / "tests" / "expected" / f"grpo-plan-{placement}.txt"
    assert f"{plan}\n" == expected.read_text()


# Segments of a running flow


def test_a_step_of_known_structure_reuses_its_stages_and_gets_the_same():
    graph, models, _ = trace(whole, {}, steps=3)
    plan = lower(graph, models, spec())
    lowering = Lowering(plan, spec())
    steps_of = [MacroGraph("whole", tuple(c for c in graph.calls if c.step == step)) for step in (-1, 0, 1, 2)]
    stages = [lowering.stages(segment) for segment in steps_of]
    assert (lowering.num_lowered, lowering.num_reused) == (10, 2 * 7)
    assert stages[1] == stages[2] == stages[3]
    assert [s.call for s in stages[1]] == [c.name for c in steps_of[3].calls]


def first_two() -> tuple[Lowering, MacroGraph, list[Call]]:
    """A dataset's batch and a generation from it, as a segment of their own."""
    graph, models, _ = trace(whole, {}, steps=1)
    generate = next(c for c in graph.calls if c.method == "generate")
    source = next(c for c in graph.calls if c.ordinal == generate.inputs[0][1].call)
    return Lowering(lower(graph, models, spec()), spec()), graph, [source, generate]


def test_of_a_changed_segment_only_the_call_that_changed_is_lowered_anew():
    lowering, _, (source, generate) = first_two()
    lowering.stages(MacroGraph("whole", (source, generate)))
    assert (lowering.num_lowered, lowering.num_reused) == (2, 0)
    lowering.stages(MacroGraph("whole", (source, replace(generate, options={**generate.options, "n": 3}))))
    # Its new consumer is another shape, so the source is wired to another shape too.
    assert (lowering.num_lowered, lowering.num_reused) == (4, 0)
    lowering.stages(MacroGraph("whole", (source, generate, replace(source, ordinal=generate.ordinal + 1))))
    assert (lowering.num_lowered, lowering.num_reused) == (5, 2)


def test_equal_calls_wired_otherwise_and_of_other_granularity_are_other_structures():
    lowering, _, (source, generate) = first_two()
    other = replace(source, ordinal=source.ordinal - 1)
    here = lowering.stages(MacroGraph("whole", (other, source, generate)))
    there = lowering.stages(MacroGraph("whole", (other, source, replace(generate, inputs=(("prompts", Ref(other.ordinal)),)))))
    assert [stage.forward_to for stage in here] == [(), ("device-0",), ()]
    assert [stage.forward_to for stage in there] == [("device-0",), (), ()]
    (grouped,) = lowering.stages(MacroGraph("whole", (replace(generate, granularity=Granularity.GROUP),)))
    assert (here[2].unit, grouped.unit) == ("sample", "group")


def test_one_call_more_in_a_long_step_is_one_call_lowered():
    graph, models, _ = trace(whole, {}, steps=1)
    lowering = Lowering(lower(graph, models, spec()), spec())
    step = tuple(c for c in graph.calls if c.step == 0)
    lowering.stages(MacroGraph("whole", step))
    before = lowering.num_lowered
    ranks_again = replace(next(c for c in step if c.role == "ranks"), ordinal=step[-1].ordinal + 1, role="others")
    lowering.stages(MacroGraph("whole", (*step, ranks_again)))
    # The new call, and the generation that has one consumer more.
    assert lowering.num_lowered - before == 2


def test_values_are_no_structure_and_cause_no_lowering():
    lowering, _, (source, generate) = first_two()
    lowering.stages(MacroGraph("whole", (source, generate)))
    hotter = Sampling(max_new_tokens=9, temperature=0.3)
    changed = replace(generate, options={**generate.options, "sampling": hotter, "stream": 7}, shown={"temperature": 0.3}, step=4)
    lowering.stages(MacroGraph("whole", (replace(source, options={}), changed)))
    assert (lowering.num_lowered, lowering.num_reused) == (2, 2)


@flow
def alternates(num_steps: int = 12) -> None:
    """Three structures in turn, with a value and a closure that never come back."""
    policy, prompts = Policy("fake"), Dataset([{"prompt": "a"}] * 4)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=5 + step)
        rewards = Reward(lambda sample, bonus=step: sample.num_tokens + bonus, name="bonus").score(responses)
        if step % 3 == 1:
            ranks(responses)
        elif step % 3 == 2:
            policy.update(responses, rewards, optimizer=AdamW(lr=1e-3 / (step + 1)))


def test_a_flow_that_alternates_between_structures_settles_to_no_lowering():
    graph, models, _ = trace(alternates, {}, steps=12)
    lowering = Lowering(lower(graph, models, spec()), spec())
    lowered = []
    for step in range(12):
        before = lowering.num_lowered
        lowering.stages(MacroGraph("alternates", tuple(c for c in graph.calls if c.step == step)))
        lowered.append(lowering.num_lowered - before)
    # The first step has three calls; a structure that differs lowers what is new and what feeds it.
    assert lowered[0] == 3
    assert all(0 < count <= 3 for count in lowered[1:3])
    assert lowered[3:] == [0] * 9


@flow
def drawn(choices: tuple[tuple[int, int], ...] = ()) -> None:
    """Whatever calls the choices say, each on one of the results before it."""
    policy, rewards = Policy("fake"), [Reward(zero, name=f"r{i}") for i in range(2)]
    made = [policy.generate(Dataset([{"prompt": "a"}] * 4).take(2), n=2, max_new_tokens=5)]
    for kind, which in choices:
        rows = made[which % len(made)]
        match kind:
            case 0 | 1:
                rewards[kind].score(rows)
            case 2:
                made.append(ranks(rows))
            case 3:
                rewards[0].score(rows).mean()
            case 4:
                made.append(policy.generate(made[0], n=which + 1, max_new_tokens=5))
            case 5:
                policy.update(made[0], rewards[1].score(made[0]), minibatch_size=which + 1)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=12), min_size=1, max_size=4), st.integers(1, 2))
def test_what_is_remembered_gives_the_stages_that_the_passes_give(programs, function_workers):
    cluster = spec("split", function_workers=function_workers)
    everything = [(kind, 0) for kind in range(6)]
    graph, models, _ = trace(drawn, {"choices": everything})
    lowering = Lowering(lower(graph, models, cluster), cluster)
    for choices in programs:
        graph = trace(drawn, {"choices": choices})[0]
        assert lowering.stages(graph) == lower(graph, models, cluster).stages


def test_a_call_whose_input_is_of_an_earlier_segment_has_its_place_too():
    graph, models, _ = trace(whole, {}, steps=1)
    plan = lower(graph, models, spec("split"))
    score = next(c for c in graph.calls if c.method == "score")
    (found,) = Lowering(plan, spec("split")).stages(MacroGraph("whole", (score,)))
    assert (found.workers, found.forward_to) == (("functions-0",), ())


def test_a_call_without_a_place_in_a_later_segment_is_refused_with_its_line():
    graph, models, _ = trace(only_generates, {})
    lowering = Lowering(lower(graph, models, spec()), spec())
    update = next(c for c in trace(only_trains, {})[0].calls if c.method == "update")
    with pytest.raises(PlanError, match=r"no worker has a train engine for policy") as refused:
        lowering.stages(MacroGraph("later", (update,)))
    assert "Policy(" in refused.value.where


@pytest.mark.parametrize("placement", ["time-shared", "split"])
def test_where_python_waits_in_the_first_step_what_may_come_after_it_has_a_place(placement):
    plan = plan_of(waits, spec(placement), assume=None)
    assert {(slot.role, slot.kind) for worker in plan.workers for slot in worker.engines} == {
        ("policy", "rollout"),
        ("policy", "train"),
        ("reference", "train"),
        ("*", "function"),
    }
    assert "Python waits" in str(plan)


@pytest.mark.parametrize("placement", ["time-shared", "split"])
def test_a_policy_that_is_only_asked_for_logprobs_before_the_first_look_can_be_generated_from_after_it(placement):
    cluster = ClusterSpec(placement=placement, cores=2, device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    eager = run_eager(asks_first, {}, cluster)
    assert not eager.error
    assert len(eager.samples) == 6
    assert run_planned(asks_first, {}, cluster, order_seed=3) == eager


def test_a_worker_is_found_by_its_name():
    plan = plan_of(whole, spec())
    assert plan.worker("functions-0") == WorkerPlan("functions-0", "cpu", 1, (EngineSlot("*", "function", "python"),))


def test_a_pass_that_reads_an_option_which_is_no_structure_is_told_so(monkeypatch):
    lowering, _, (_, generate) = first_two()
    for read in (lambda call: call.options["sampling"], lambda call: call.options.get("stream")):
        monkeypatch.setattr("m2flow.micro.lowering.passes.legal_stages", lambda graph, read=read: [read(call) for call in graph.calls])
        with pytest.raises(InternalError, match="does not count as structure"):
            lowering.stages(MacroGraph("whole", (generate,)))
