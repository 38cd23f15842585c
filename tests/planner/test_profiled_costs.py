"""What the planner is told where something was measured: the profile's constants, the model's for the rest."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from profiled_runs import DECODE, PLAN, PROFILE, UPDATE, write_run

from m2flow.micro.protocol.cost_terms import EngineId, Footprint, Layout
from m2flow.micro.protocol.plan import EngineSlot, WorkerPlan
from m2flow.planner.cost_model import ModelledCosts
from m2flow.planner.measuring import Measurement, Observed, profile_of
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.profiles import MeasuredEngine, ProfiledCosts
from m2flow.planner.workload import CallLoad, Extent, Workload
from m2flow.simulator.machines import machines_of
from m2flow.spec import ClusterSpec, TrainSpec

ROLLOUT, TRAIN, REFERENCE = EngineId("policy", "rollout"), EngineId("policy", "train"), EngineId("reference", "train")


def costs(**spec: object) -> tuple[ProfiledCosts, ModelledCosts]:
    work = Workload(
        "grpo",
        (
            CallLoad("policy.generate", "generate", ROLLOUT, 32, 8, "sample", False, ()),
            CallLoad("rule.score", "function", None, 32, 8, "sample", False, ("policy.generate",)),
            CallLoad("reference.logprobs", "forward", REFERENCE, 32, 8, "sample", False, ("policy.generate",)),
            CallLoad("policy.update", "update", TRAIN, 32, 8, "batch", False, ("rule.score",), num_optimizer_steps=1),
        ),
    )
    extent = Extent.of([50] * 10, prompt=10)
    cluster = ClusterSpec(device="cpu", cores=4, **spec)  # type: ignore[arg-type]
    shape = shape_named("Qwen2.5-0.5B")
    modelled = ModelledCosts(cluster, work, {"policy": shape, "reference": shape}, {"": extent})
    return ProfiledCosts(PROFILE, modelled), modelled


def test_what_was_measured_is_used_and_the_context_is_that_of_the_workload() -> None:
    profiled, modelled = costs()
    cost = profiled.decode(ROLLOUT, "", Layout(tp=2))
    assert cost.step_s == DECODE.step_s
    assert cost.sample_s == pytest.approx(DECODE.sample_s + DECODE.context_s * modelled.extent("policy").context)
    assert (cost.enter_s, cost.leave_s, cost.gather_s) == (DECODE.enter_s, DECODE.leave_s, PROFILE.gather_s)
    each = profiled.decode(ROLLOUT, "", Layout(tp=2, dp=2))  # Two instances, each as it was measured.
    assert (each.step_s, each.sample_s) == (cost.step_s, cost.sample_s)
    trained = profiled.train(TRAIN, "", Layout(tp=2))
    assert (trained.update.fixed_s, trained.update.sample_s, trained.optimizer_s) == (UPDATE.fixed_s, UPDATE.sample_s, 0.002)
    assert profiled.slowdown("train", "rollout") == 1.25
    assert profiled.slowdown("rollout", "train") == 1.0
    assert profiled.hop_s(1000, "", "") == pytest.approx(PROFILE.hop_s / 2 + 1e-6)
    assert profiled.message_s() == PROFILE.hop_s / 2


def test_ranks_on_this_machine_have_the_price_of_as_many_ranks(tmp_path: Path) -> None:
    """Measured with two ranks of a thread each it is that; else the model's, corrected by what was measured."""
    write_run(tmp_path)
    workers = tuple(msgspec.structs.replace(one, threads=1, ranks=2) if one.lease else one for one in PLAN.workers)
    plan = msgspec.structs.replace(PLAN, workers=workers)
    profile = profile_of("grpo", {}, [Measurement(plan, ClusterSpec(), Observed.of_run(tmp_path))], gather_s=0.02, load=0.0)
    found = profile.engine("policy", "train", 2, ranks=2)
    assert found is not None
    assert found.update is not None
    assert profile.engine("policy", "train", 2) is None
    assert any(name.startswith("policy.train[2, 2 ranks].") for name in profile.constants())
    _, modelled = costs(train=TrainSpec(ranks=2, engine="fsdp"))
    assert modelled.layouts(TRAIN, "", 2) == (Layout(tp=1, dp=2),)
    assert modelled.layouts(TRAIN, "", 3) == ()
    profiled = ProfiledCosts(profile, modelled)
    assert profiled.train(TRAIN, "", Layout(tp=1, dp=2)).update.fixed_s == found.update.fixed_s
    off = found.update.token_s / modelled.train(TRAIN, "", Layout(tp=1, dp=2)).update.token_s
    alone = profiled.train(TRAIN, "", Layout(tp=2)).update.token_s
    assert alone == pytest.approx(modelled.train(TRAIN, "", Layout(tp=2)).update.token_s * off)
    with_one, _ = costs()
    assert with_one.train(TRAIN, "", Layout(tp=1, dp=2)).update.fixed_s != UPDATE.fixed_s  # It was measured in one process.


@pytest.mark.parametrize(("of_replicas", "layout"), [(0.5, Layout(tp=2, dp=2)), (2.0, Layout(tp=4))])
def test_cores_are_threads_of_one_process_or_of_replicas_by_what_was_measured(of_replicas: float, layout: Layout) -> None:
    threads = MeasuredEngine("policy", "train", "embedded", "cpu", 4, update=UPDATE, optimizer_s=0.002)
    less = msgspec.structs.replace(UPDATE, **{name: of_replicas * getattr(UPDATE, name) for name in ("fixed_s", "sample_s", "token_s")})
    replicas = msgspec.structs.replace(threads, update=less, ranks=2)
    _, modelled = costs()
    profiled = ProfiledCosts(msgspec.structs.replace(PROFILE, engines=(threads, replicas)), modelled)
    measured = [one for one in profiled.layouts(TRAIN, "", 4) if one.dp <= 2]
    assert min(measured, key=lambda one: profiled.train(TRAIN, "", one).update.token_s) == layout


def test_a_simulated_trainer_of_two_ranks_has_the_devices_and_the_costs_of_both() -> None:
    profiled, modelled = costs(train=TrainSpec(ranks=2, engine="fsdp"))
    slot = EngineSlot("policy", "train", "fsdp")
    workers = (
        WorkerPlan("train-0", "cpu", 1, (slot,), ranks=2),
        WorkerPlan("rollout-0", "cpu", 2, (EngineSlot("policy", "rollout", "x"),)),
    )
    machines = machines_of(msgspec.structs.replace(PLAN, workers=workers), modelled.spec, profiled)
    assert machines["train-0"].num_devices == 2
    assert machines["train-0"].train["policy"] == profiled.train(TRAIN, "", Layout(tp=1, dp=2))
    assert machines["rollout-0"].decode["policy"] == profiled.decode(ROLLOUT, "", Layout(tp=2))


def test_what_was_not_measured_is_the_model_s_corrected_where_the_engine_is_known() -> None:
    profiled, modelled = costs()
    off = DECODE.step_s / modelled.decode(ROLLOUT, "", Layout(tp=2)).step_s
    assert profiled.decode(ROLLOUT, "", Layout(tp=4)).step_s == pytest.approx(modelled.decode(ROLLOUT, "", Layout(tp=4)).step_s * off)
    off = UPDATE.token_s / modelled.train(TRAIN, "", Layout(tp=2)).update.token_s
    assert profiled.train(TRAIN, "", Layout()).update.token_s == pytest.approx(modelled.train(TRAIN, "", Layout()).update.token_s * off)
    assert profiled.train(REFERENCE, "", Layout()) == modelled.train(REFERENCE, "", Layout())
    assert profiled.function("rule.score") == modelled.function("rule.score")
    assert profiled.footprint(TRAIN, "", Layout()) == modelled.footprint(TRAIN, "", Layout())
    assert profiled.unit(TRAIN, "") == modelled.unit(TRAIN, "")
    apart = (("", Layout()), ("", Layout()))
    assert profiled.sync_s("policy", *apart, is_same_devices=False) == modelled.sync_s("policy", *apart, is_same_devices=False)
    assert profiled.sync_s("policy", *apart, is_same_devices=True) == pytest.approx(0.006 + 0.003)
    assert profiled.switch(ROLLOUT, "", Footprint()).come_s == pytest.approx(0.001)


def test_each_constant_says_whether_it_was_measured_or_modelled() -> None:
    profiled, _ = costs()
    constants = profiled.constants()
    sources = {name: constant.source for name, constant in constants.items()}
    assert sources["policy.rollout[2].step_s"].startswith("measured: 100 timings, R2 0.990")
    assert sources["rule.score.latency_s"].startswith("modelled:")
    assert any(name.startswith("reference.train") and source.startswith("modelled:") for name, source in sources.items())
    assert not any(name.startswith("policy.rollout.") for name in sources)  # Measured: the model's are not in use.
    assert all(source.startswith(("measured:", "modelled:", "data sheet", "estimate")) or source for source in sources.values())
