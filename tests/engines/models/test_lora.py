"""Adapters: what is trained, what rollout engines and files get, and who refuses."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from lora_models import copied, sorting, started, trained
from tiny_models import CONFIGS, write_model

from m2flow import Lora
from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.registry import make_train
from m2flow.errors import EngineError, ModelError, OptionError, PlanError
from m2flow.recipe import Model
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing.train_suite import samples

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return replace(write_model(tmp_path / "model", CONFIGS["qwen2"]()), lora=Lora(rank=4, alpha=8))


@needs_peft
def test_before_the_first_step_weights_are_those_of_the_model_without_adapters(model: Model) -> None:
    adapted, plain = copied(started(model)), copied(started(replace(model, lora=None)))
    assert list(adapted) == list(plain)
    assert all(torch.equal(adapted[name], plain[name]) for name in plain)


@needs_peft
def test_who_takes_weights_one_by_one_computes_with_gradients_meanwhile(model: Model) -> None:
    assert all(torch.is_grad_enabled() for _ in started(model).weights())


@needs_peft
def test_only_layers_with_adapters_change_and_what_is_sent_computes_what_is_trained(model: Model) -> None:
    targets = ("q_proj", "down_proj")
    engine = started(replace(model, lora=Lora(4, 8, targets)))
    before = copied(engine)
    trained(engine)
    after = copied(engine)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if name.split(".")[-2] in targets and name.endswith("weight")}
    whole = load_model(replace(model, lora=None), device="cpu", attention="eager")
    whole.load_state_dict(after, strict=False)
    batch = samples(32).in_order()
    said = engine.logprobs(batch)["reference_logprobs"]
    plain = started(replace(model, lora=None))
    for name, tensor in plain.weights():
        tensor.copy_(after[name])
    again = plain.logprobs(batch)["reference_logprobs"]
    torch.testing.assert_close(torch.tensor(said.values), torch.tensor(again.values), atol=2e-5, rtol=0)  # type: ignore[union-attr]


@needs_peft
def test_a_rollout_engine_takes_the_sum_of_weights_and_adapters(model: Model) -> None:
    engine = trained(started(model))
    rollout = EmbeddedRollout(model, EngineSettings(deterministic=True))
    rollout.start()
    rollout.load_weights(engine.weights(), 3)
    held, sent = dict(rollout.weights()), copied(engine)
    assert all(torch.equal(held[name], sent[name]) for name in held)


@needs_peft
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # Of peft's PeftModel.
def test_a_checkpoint_is_a_whole_model_and_an_adapter_and_training_goes_on_from_it(model: Model, tmp_path: Path) -> None:
    import peft

    engine = trained(started(model))
    engine.save(str(tmp_path / "saved"))
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    base = load_model(replace(model, lora=None), device="cpu", attention="eager")
    with_adapter = peft.PeftModel.from_pretrained(base, str(tmp_path / "saved" / "adapter")).eval()
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(whole.eval()(tokens).logits, with_adapter(tokens).logits, atol=1e-5, rtol=0)
    trained(engine, 2)
    resumed = started(model)
    resumed.load(str(tmp_path / "saved"))
    trained(resumed, 2)
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(engine.weights(), resumed.weights(), strict=True))


@needs_peft
def test_a_reference_and_a_critic_of_an_adapted_policy_share_its_base_in_memory_and_keep_what_it_was(model: Model) -> None:
    policy = trained(started(model))
    reference, critic = started(replace(model, is_policy=False)), started(replace(model, head="value", is_policy=False))
    batch = samples(32)
    for other in (reference, critic):
        other.copy_from(policy)
    before = policy.logprobs(batch).ragged("reference_logprobs").values
    assert (reference.logprobs(batch).ragged("reference_logprobs").values == before).all()
    sent = copied(policy)
    body = [name for name, _ in critic.weights() if name in sent]
    assert len(body) > 10
    assert all(torch.equal(tensor, sent[name]) for name, tensor in critic.weights() if name in sent)
    places = {tensor.data_ptr() for name, tensor in policy._model.state_dict().items() if "base_layer" in name}
    for other in (reference, critic):
        held = {tensor.data_ptr() for name, tensor in other._model.state_dict().items() if "layers" in name and "base_layer" in name}
        assert held  # Of the body; a critic's head is its own.
        assert held <= places
    trained(policy)
    assert (policy.logprobs(batch).ragged("reference_logprobs").values != before).any()
    assert (reference.logprobs(batch).ragged("reference_logprobs").values == before).all()


@needs_peft
def test_a_model_with_adapters_takes_the_weights_of_one_without(model: Model) -> None:
    plain, adapted = trained(started(replace(model, lora=None))), started(model)
    adapted.copy_from(plain)
    sent, held = copied(plain), copied(adapted)
    assert all(torch.equal(held[name], sent[name]) for name in sent)


@needs_peft
def test_a_checkpoint_of_another_rank_is_refused(model: Model, tmp_path: Path) -> None:
    started(model).save(str(tmp_path / "saved"))
    other = started(replace(model, lora=Lora(rank=2)))
    with pytest.raises(ModelError, match="of another rank"):
        other.load(str(tmp_path / "saved"))


@needs_peft
def test_layers_that_the_model_lacks_are_refused_with_those_that_it_has(model: Model) -> None:
    with pytest.raises(ModelError, match="query") as caught:
        started(replace(model, lora=Lora(targets=("query",))))
    assert "q_proj" in str(caught.value)


@needs_peft
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # Of peft, where no expert has adapters.
def test_adapters_on_stacks_of_experts_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    mixture = write_model(tmp_path / "mixture", transformers.Qwen3MoeConfig(**sizes, **heads))
    with pytest.raises(ModelError, match=r"stacks of experts.*mlp\.experts") as caught:
        started(replace(mixture, lora=Lora(rank=2)))
    assert "q_proj" in str(caught.value)
    started(replace(mixture, lora=Lora(rank=2, targets=("q_proj", "o_proj"))))


@needs_peft
def test_a_flow_with_adapters_gives_the_same_planned_and_eager(model: Model, tmp_path: Path) -> None:
    said = []
    for eager in (False, True):
        settings = RunSettings(runs_dir=str(tmp_path / f"runs-{eager}"), deterministic=True, eager=eager)
        said.append(Run(sorting(model.path), {}, ClusterSpec(device="cpu", cores=2), settings).execute())
    assert said[0].weights_sha256 == said[1].weights_sha256
    assert said[0].samples_sha256 == said[1].samples_sha256


@needs_peft
def test_a_plan_with_an_engine_that_trains_no_adapters_is_refused(model: Model) -> None:
    spec = ClusterSpec(device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    with pytest.raises(PlanError, match="can't train adapters") as caught:
        Run(sorting(model.path), {}, spec, RunSettings()).prepare()
    assert "embedded" in str(caught.value)
    with pytest.raises(EngineError, match="can't train adapters"):
        make_train("fake", model, EngineSettings())


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"rank": 2.5}, {"alpha": 0}, {"alpha": "much"}])
def test_numbers_of_adapters_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=rf"{next(iter(wrong))} is .*; it must be a"):
        Lora(**wrong)  # type: ignore[arg-type]
