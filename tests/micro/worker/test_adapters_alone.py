"""Adapters that are sent by themselves: what crosses, what the rollout engine computes with, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
import secrets
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from adapted_trainers import adapted_model
from lora_models import copied, sorting, started, trained

from m2flow import Lora
from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.embedded.slot_model import MergedAdapters
from m2flow.engines.models import lora
from m2flow.errors import EngineError
from m2flow.micro.lowering.capabilities import roles_syncing_adapters_only
from m2flow.micro.lowering.passes import plan_syncs
from m2flow.micro.protocol.plan import EngineSlot, WorkerPlan
from m2flow.micro.worker.weight_sync import WeightSettings, WeightSyncs, weight_settings
from m2flow.observe.spans import Recorder
from m2flow.observe.store import read_spans
from m2flow.recipe import Model
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, WeightsSpec

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")
WORKERS = (
    WorkerPlan("train-0", "cpu", 1, (EngineSlot("policy", "train", "embedded"),)),
    WorkerPlan("rollout-0", "cpu", 1, (EngineSlot("policy", "rollout", "embedded"),)),
)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return adapted_model(tmp_path / "model")


def rolling(model: Model) -> EmbeddedRollout:
    engine = EmbeddedRollout(model, EngineSettings(deterministic=True))
    engine.start()
    return engine


def held(engine: EmbeddedRollout) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def ends(alone: bool, name: str, transport: str = "shared memory", directory: str = "") -> tuple[WeightSettings, WeightSettings]:
    """Of a trainer and a rollout engine."""
    spec = WeightsSpec(transport=transport)  # type: ignore[arg-type]
    syncs = plan_syncs(WORKERS, spec, alone={"policy"} if alone else ())
    return weight_settings("train-0", syncs, spec, directory), weight_settings("rollout-0", syncs, spec, directory)


@needs_peft
def test_weights_with_adapters_added_here_are_bit_by_bit_those_that_the_trainer_sends_whole(model: Model) -> None:
    trainer, engine = started(model), rolling(model)
    for version in (1, 2):
        trained(trainer)
        engine.load_adapters(trainer.adapters(), version)
        sent, have = copied(trainer), held(engine)
        assert have.keys() <= sent.keys()
        assert all(torch.equal(have[name], sent[name]) for name in have)
        assert engine.version == version


@needs_peft
def test_layers_that_hold_their_weights_the_other_way_round_get_them_so() -> None:
    recipe = Lora(rank=2, targets=("c_attn", "c_proj"))
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=32)
    trained_one = transformers.AutoModelForCausalLM.from_config(config)
    other = copy.deepcopy(trained_one)
    with pytest.warns(UserWarning, match="fan_in_fan_out"):  # Of peft, which finds it out by itself.
        lora.adapt(trained_one, recipe, 0)
    with torch.no_grad():
        for number, (_, tensor) in enumerate(lora.adapter_state(trained_one)):
            tensor.normal_(generator=torch.Generator().manual_seed(number))
    MergedAdapters(other, recipe).add((lora.file_name(name), tensor) for name, tensor in lora.adapter_state(trained_one))
    sent = dict(lora.whole_state(trained_one))
    assert all(torch.equal(tensor, sent[name]) for name, tensor in lora.whole_state(other))
    assert not torch.equal(sent["transformer.h.0.attn.c_proj.weight"], trained_one.transformer.h[0].attn.c_proj.base_layer.weight)


@needs_peft
@pytest.mark.parametrize("transport", ["shared memory", "file", "tcp"])
def test_nothing_but_adapters_crosses_and_each_end_says_what_it_has(model: Model, transport: str, tmp_path: Path) -> None:
    trainer, engine = started(model), rolling(model)
    giving, taking = ends(True, "x", transport, str(tmp_path))
    recorder = Recorder("test")
    with (
        closing(WeightSyncs("train-0", f"m2flow-test-{secrets.token_hex(4)}", {"policy": model}, giving, recorder)) as source,
        closing(WeightSyncs("rollout-0", "", {"policy": model}, taking, recorder)) as target,
    ):
        for version in (1, 2, 3):
            trained(trainer)
            manifest = source.publish("policy", version, trainer)
            target.load("policy", version, manifest, engine)
            assert manifest.num_bytes < sum(tensor.nbytes for tensor in copied(trainer).values()) / 4
            assert {entry.name for entry in manifest.tensors} == {name for name, _ in trainer.adapters()}
            assert {entry.name for entry in manifest.base} == set(held(engine))
            sent, have = copied(trainer), held(engine)
            assert all(torch.equal(have[name], sent[name]) for name in have)


@needs_peft
def test_another_base_than_the_trainers_is_found_before_anything_is_added(model: Model) -> None:
    other = replace(model, init="random", seed=5)
    trainer, engine = trained(started(model)), rolling(other)
    before = held(engine)
    giving, taking = ends(True, "x")
    with (
        closing(WeightSyncs("train-0", f"m2flow-test-{secrets.token_hex(4)}", {"policy": model}, giving, Recorder("test"))) as source,
        closing(WeightSyncs("rollout-0", "", {"policy": model}, taking, Recorder("test"))) as target,
    ):
        manifest = source.publish("policy", 1, trainer)
        with pytest.raises(EngineError, match=r"beside the adapters of policy differ.*embed_tokens"):
            target.load("policy", 1, manifest, engine)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held(engine).items())


@needs_peft
def test_adapters_that_fit_no_layer_or_lack_their_half_leave_the_weights_and_are_named(model: Model) -> None:
    engine, trainer = rolling(model), started(model)
    before, adapters = held(engine), dict(trainer.adapters())
    name = next(iter(adapters))
    for wrong, said in (
        ({name: adapters[name]}, "no adapters, in pairs"),
        ({key.replace("q_proj", "x_proj"): tensor for key, tensor in adapters.items()}, "no such layer"),
        ({key: tensor[:, :-1] if "lora_A" in key else tensor for key, tensor in adapters.items()}, "there"),
    ):
        with pytest.raises(EngineError, match=said):
            engine.load_adapters(wrong.items(), 1)
        with pytest.raises(EngineError, match="mixture"):
            engine.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in held(engine).items())
    engine.load_adapters(adapters.items(), 1)
    with pytest.raises(EngineError, match="other layers came than before"):
        engine.load_adapters([(key, tensor) for key, tensor in adapters.items() if "q_proj" in key], 2)


@needs_peft
def test_after_whole_weights_there_is_nothing_to_add_adapters_to(model: Model) -> None:
    engine, trainer = rolling(model), started(model)
    engine.load_weights(trainer.weights(), 1)
    with pytest.raises(EngineError, match="other weights were loaded since"):
        engine.load_adapters(trainer.adapters(), 2)


def test_adapters_go_alone_where_every_engine_adds_them_in_the_trainers_type() -> None:
    adapted = Model("x", lora=Lora())
    assert roles_syncing_adapters_only({"policy": adapted}, WORKERS) == {"policy"}
    assert not roles_syncing_adapters_only({"policy": Model("x")}, WORKERS)
    assert not roles_syncing_adapters_only({"policy": replace(adapted, rollout_dtype="bfloat16")}, WORKERS)
    mixed = (*WORKERS, WorkerPlan("rollout-1", "cpu", 1, (EngineSlot("policy", "rollout", "sglang"),)))
    assert not roles_syncing_adapters_only({"policy": adapted}, mixed)


def test_within_a_process_or_lent_on_a_gpu_weights_go_with_their_adapters_added() -> None:
    together = (WorkerPlan("device-0", "cpu", 1, (*WORKERS[0].engines, *WORKERS[1].engines), lease="device-0"),)
    assert [sync.sends for sync in plan_syncs(together, WeightsSpec(), alone={"policy"})] == ["weights"]
    assert [sync.sends for sync in plan_syncs(WORKERS, WeightsSpec(), alone={"policy"})] == ["adapters"]
    lent = tuple(msgspec.structs.replace(worker, device="cuda:0") for worker in WORKERS)
    assert [sync.sends for sync in plan_syncs(lent, WeightsSpec(transport="cuda ipc"), alone={"policy"})] == ["weights"]


def split(adapters: str) -> ClusterSpec:
    return ClusterSpec(
        device="cpu",
        cores=2,
        placement="split",
        rollout=RolloutSpec(workers=2),
        weights=WeightsSpec.model_validate({"adapters": adapters}),
    )


@needs_peft
@pytest.mark.parametrize(("adapters", "sends"), [("alone", "adapters"), ("added", "weights")])
def test_the_spec_decides_and_the_plan_says_what_is_sent(model: Model, adapters: str, sends: str) -> None:
    plan = Run(sorting(model.path), {}, split(adapters), RunSettings()).prepare()
    assert {sync.sends for sync in plan.syncs} == {sends}
    assert ("adapters alone" in str(plan)) == (sends == "adapters")


@needs_peft
@pytest.mark.slow
def test_split_processes_send_adapters_alone_and_give_what_eager_gives(model: Model, tmp_path: Path) -> None:
    said = {}
    for name, sends in (("planned", "adapters"), ("eager", "weights")):
        settings = RunSettings(runs_dir=str(tmp_path / name), deterministic=True, eager=name == "eager")
        run = Run(sorting(model.path), {}, split("alone"), settings)
        report = run.execute()
        said[name] = report.weights_sha256, report.samples_sha256
        loads = [span for span in read_spans(run.run_dir) if span.name == "weights.load"]
        assert loads
        assert {span.attributes.get("sends", "weights") for span in loads} == {sends}
    assert said["planned"] == said["eager"]
