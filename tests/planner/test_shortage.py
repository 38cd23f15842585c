"""What is said when nothing fits: how many bytes are short, and changes that do fit when they are made."""

import pytest
from modelled_problems import modelled

from m2flow.errors import PlanError
from m2flow.micro.protocol.cost_terms import EngineId, Layout
from m2flow.planner.cost_model import ModelledCosts
from m2flow.planner.explaining import Allows, no_room
from m2flow.planner.model_shapes import shape_named
from m2flow.planner.search import find_plan
from m2flow.planner.workload import CallLoad, Extent, Workload
from m2flow.rollout_scheduling.lengths import parse_lengths
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, PoolSpec, RolloutSpec, TrainSpec

ROLLOUT, TRAIN = EngineId("policy", "rollout"), EngineId("policy", "train")
ENGINES = (ROLLOUT, TRAIN)
STEP = Workload(
    "grpo",
    (
        CallLoad("policy.generate", "generate", ROLLOUT, 128, 8, "sample", False, ()),
        CallLoad("policy.update", "update", TRAIN, 128, 8, "group", False, ("policy.generate",), num_optimizer_steps=1),
    ),
)
EXTENT = {"": Extent(prompt=200, response=4000, position=3000, longest=16_384)}


def costs(model: str, spec: ClusterSpec) -> ModelledCosts:
    return ModelledCosts(spec, STEP, {"policy": shape_named(model)}, EXTENT)


def cluster(nodes: int = 1, budget: int = 16_384, may_offload: bool = True, **pool: float) -> ClusterSpec:
    return ClusterSpec(
        pools={"main": PoolSpec(device="h100", nodes=nodes, **pool)},  # type: ignore[arg-type]
        rollout=RolloutSpec(engine="sglang"),
        train=TrainSpec(engine="deepspeed", token_budget=budget),
        may_offload=may_offload,
    )


def said(model: str, spec: ClusterSpec, allows: Allows | None = None) -> str:
    return str(no_room("grpo", ENGINES, costs(model, spec), spec, allows))


def test_an_engine_that_fits_nowhere_is_named_with_the_bytes_that_are_short() -> None:
    spec = cluster()
    asked = costs("DeepSeek-V3", spec)
    layouts = asked.layouts(ROLLOUT, "main", 8)
    need = min(asked.footprint(ROLLOUT, "main", layout).device_bytes for layout in layouts)
    there = asked.device_bytes("main")
    text = said("DeepSeek-V3", spec)
    assert text.startswith("policy.rollout does not fit: at the least, as tp")
    assert f"it needs {need / 2**30:.1f} GiB of a device: {(need - there) / 2**30:.1f} GiB more than the {there / 2**30:.1f} GiB" in text
    assert "- 32 devices instead of 8" in text
    assert "- b200 devices, of 179 GiB each" in text


def test_the_number_of_devices_that_would_fit_does_and_half_of_it_does_not() -> None:
    asked = costs("DeepSeek-V3", cluster(nodes=4))
    assert asked.unit(ROLLOUT, "main") == 32
    assert costs("DeepSeek-V3", cluster(nodes=2)).unit(ROLLOUT, "main") == 0


def test_a_pin_that_does_not_fit_is_told_the_stage_the_offload_and_the_devices_that_would() -> None:
    def pinned(engine: EngineId, pool: str, layout: Layout) -> bool:
        return engine == ROLLOUT or (layout.zero, layout.offload, layout.num_devices, layout.sp, layout.tp) == (1, False, 2, 2, 1)

    spec = cluster()
    text = said("Qwen2.5-7B", spec, pinned)
    assert text.startswith("policy.train does not fit: at the least, as sp2xzero1 (2 devices) on main")
    asked = costs("Qwen2.5-7B", spec)
    stage2 = asked.footprint(TRAIN, "main", Layout(sp=2, zero=2)).device_bytes
    assert stage2 <= asked.device_bytes("main")
    assert f"- ZeRO 2: {stage2 / 2**30:.1f} GiB" in text
    assert "- its optimiser in the host's memory (offload: true)" in text
    assert "on 4 devices of main" in text


def test_a_pin_that_leaves_nothing_is_told_what_fits_without_it() -> None:
    text = said("Qwen2.5-7B", cluster(), lambda engine, pool, layout: engine == ROLLOUT or layout.tp == 3)
    assert text.startswith("the pin of policy.train leaves no legal layout; without it, this would fit: ")


def test_micro_batches_that_are_too_large_are_told_a_size_that_fits() -> None:
    text = said("Qwen2.5-32B", cluster(budget=1_000_000))
    assert "- `train: {token_budget: 250000}`: smaller micro-batches" in text
    assert costs("Qwen2.5-32B", cluster(budget=250_000)).unit(TRAIN, "main")
    assert not costs("Qwen2.5-32B", cluster(budget=500_000)).unit(TRAIN, "main")


def test_an_engine_for_one_device_is_told_one_that_spreads_a_model() -> None:
    spec = cluster().model_copy(update={"train": TrainSpec(engine="embedded")})
    assert "- `train: {engine: deepspeed}`, which spreads a model over devices" in said("Qwen2.5-32B", spec)


def test_engines_that_fit_alone_and_not_together_are_told_to_offload() -> None:
    spec = cluster(may_offload=False)
    text = said("Qwen2.5-72B", spec, lambda engine, pool, layout: engine == TRAIN or layout.tp == 2)
    assert "fits alone, but taking turns they keep" in text
    assert "- `may_offload: true`: engines that wait" in text
    assert "On devices of their own they need 2 for policy.rollout + 8 for policy.train at the least." in text


def test_fewer_samples_that_decode_together_are_named_where_they_make_room() -> None:
    spec = cluster(may_offload=False)
    text = said("Qwen2.5-14B", spec, lambda engine, pool, layout: engine == TRAIN or (layout.tp, layout.pp) == (1, 1))
    found = next(line for line in text.splitlines() if "max_running" in line)
    running = int(found.partition("max_running: ")[2].partition("}")[0])
    for number, fits in ((running, True), (2 * running, False)):
        asked = costs("Qwen2.5-14B", spec.model_copy(update={"rollout": RolloutSpec(engine="sglang", max_running=number)}))
        rollout = asked.footprint(ROLLOUT, "main", Layout(dp=8))
        trainers = [asked.footprint(TRAIN, "main", layout) for layout in asked.layouts(TRAIN, "main", 8)]
        least = min(
            (one for one in trainers if one.device_bytes <= asked.device_bytes("main")), key=lambda one: (one.kept_bytes, one.device_bytes)
        )
        kept = rollout.kept_bytes + least.kept_bytes
        most = max(rollout.device_bytes - rollout.kept_bytes, least.device_bytes - least.kept_bytes)
        assert (kept + most <= asked.device_bytes("main")) is fits


def test_what_offloaded_engines_keep_on_a_device_is_named_where_it_leaves_no_room() -> None:
    """Nothing is pinned, and each engine fits: what is short are the contexts of those that wait."""
    problem = modelled(1, device="l40s", model="Qwen2.5-1.5B", num_prompts=8)
    spec = problem.spec.model_copy(update={"train": TrainSpec(engine="fsdp", token_budget=16_384)})
    asked = problem.costs.for_spec(spec)
    assert asked is not None
    with pytest.raises(PlanError) as refusal:
        find_plan(problem.workload, problem.lengths, asked, spec)
    text = str(refusal.value)
    assert "pin" not in text
    assert "offloaded, the others keep 3.0 GiB on each device of main, beside" in text
    assert "more than the 41.4 GiB there are" in text
    assert "a100-80 devices, of 80 GiB each" in text


def test_a_host_without_room_is_told_how_much_it_would_need() -> None:
    text = said("Qwen2.5-7B", cluster(nodes=2, host_memory_gib=40))
    assert "in the host's memory" in text
    assert "GiB of host memory in a node" in text


def test_where_nothing_helps_it_is_said() -> None:
    spec = ClusterSpec(device="cpu", cores=2)
    text = str(no_room("grpo", ENGINES, costs("Qwen2.5-72B", spec), spec))
    assert text.startswith("policy.rollout does not fit: at the least, as tp2 (2 devices) on this machine")
    assert text.count("nothing that was tried would fit") == 2


def test_of_several_engines_that_do_not_fit_each_is_said_with_what_would() -> None:
    text = said("Qwen2.5-72B", cluster(devices_per_node=1))
    assert "policy.rollout does not fit" in text
    assert "; policy.train does not fit" in text
    rollout, train = text.partition("For policy.rollout: what would fit:")[2].split("For policy.train: what would fit:")
    assert "2 devices instead of 1" in rollout
    assert "8 devices instead of 1" in train


def test_the_search_says_so_where_a_pin_does_not_fit() -> None:
    pinned = PinSpec(num_devices=2, layout=LayoutSpec(sp=2, zero=1), offload=False)
    spec = cluster().model_copy(update={"pin": {"policy.train": pinned}})
    lengths = parse_lengths("lognormal:median=1000,sigma=0.5,cap=8000")
    with pytest.raises(PlanError, match=r"policy.train does not fit.* sp2xzero1 \(2 devices\)(.|\n)*- ZeRO 2: "):
        find_plan(STEP, lengths, costs("Qwen2.5-7B", spec), spec)
