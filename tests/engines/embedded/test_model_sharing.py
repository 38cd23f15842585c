"""Roles of one process with the same model: what they hold once, and what each must have of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import CONFIGS, write_model

from m2flow import Dataset, Lora, Policy, Reference, flow
from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.trainer import AdapterReference, EmbeddedTrain
from m2flow.engines.models.hf_model import load_model
from m2flow.errors import EngineError
from m2flow.macro.tracing import trace
from m2flow.micro.protocol.plan import EngineSlot
from m2flow.micro.worker.engine_host import EngineHost
from m2flow.observe.spans import Recorder
from m2flow.recipe import AdamW, Model
from m2flow.testing.train_suite import PPO, samples

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="lora: the extra lora is not installed")


@pytest.fixture
def frozen(tmp_path: Path) -> Model:
    drawn = write_model(tmp_path / "model", CONFIGS["qwen2"]())
    load_model(drawn, device="cpu", attention="eager").save_pretrained(drawn.path)
    return replace(drawn, init="pretrained", is_policy=False, is_frozen=True)


@contextmanager
def bench(models: dict[str, Model], **turns: str) -> Iterator[dict[str, EmbeddedTrain]]:
    """The trainers of a process that has these roles."""
    slots = [EngineSlot(role, "train", "embedded", turns.get(role, "")) for role in models]
    made = EngineHost(slots, models, {"train": EngineSettings()}, run_seed=0, recorder=Recorder("test"), shared_prefix="")
    made.open()
    try:
        yield made._train  # type: ignore[misc]
    finally:
        made.close()


def places(engine: EmbeddedTrain) -> set[int]:
    return {tensor.data_ptr() for tensor in engine._model.state_dict().values()}


def test_frozen_roles_with_the_same_model_are_one_engine_and_others_are_not(frozen: Model) -> None:
    changing = replace(frozen, is_frozen=False)
    models = {"teacher": frozen, "reference": frozen, "other": replace(frozen, seed=7), "copy": changing, "copy2": changing}
    with bench(models) as engines:
        assert engines["teacher"] is engines["reference"]
        assert len(set(map(id, engines.values()))) == 4
        batch = samples(32)
        said = [engines[role].logprobs(batch).ragged("reference_logprobs").values for role in ("teacher", "reference", "copy")]
        assert (said[0] == said[1]).all()
        assert (said[0] == said[2]).all()


def test_frozen_roles_whose_turns_differ_have_a_copy_each(frozen: Model) -> None:
    with bench({"teacher": frozen, "reference": frozen}, reference="train reference") as engines:
        assert engines["teacher"] is not engines["reference"]
        assert not places(engines["teacher"]) & places(engines["reference"])


@needs_peft
def test_references_of_an_adapted_policy_have_no_weights_and_stay_what_they_were(frozen: Model) -> None:
    policy = replace(frozen, is_policy=True, is_frozen=False, lora=Lora(rank=4))
    models = {"reference": frozen, "then": replace(policy, is_policy=False), "policy": policy, "plain": replace(policy, lora=None)}
    with bench(models) as engines:
        assert {role for role, engine in engines.items() if isinstance(engine, AdapterReference)} == {"reference", "then"}
        batch = samples(32)
        before = engines["reference"].logprobs(batch).ragged("reference_logprobs").values
        assert (before == engines["plain"].logprobs(batch).ragged("reference_logprobs").values).all()
        assert engines["reference"].memory().total == 0
        engines["then"].copy_from(engines["policy"])
        for _ in range(3):
            sums = engines["policy"].accumulate(batch, PPO)
            engines["policy"].apply(AdamW(1e-2), sums.num_tokens)
        assert (engines["policy"].logprobs(batch).ragged("reference_logprobs").values != before).any()
        for role in ("reference", "then"):
            assert (engines[role].logprobs(batch).ragged("reference_logprobs").values == before).all()
        with pytest.raises(EngineError, match="can't be trained"):
            engines["then"].accumulate(batch, PPO)


@needs_peft
def test_models_that_are_not_a_policys_own_or_have_other_turns_are_loaded(frozen: Model) -> None:
    policy = replace(frozen, is_policy=True, is_frozen=False, lora=Lora(rank=4))
    then = replace(policy, is_policy=False)
    models = {"policy": policy, "other": replace(frozen, seed=7), "critic": replace(then, head="value"), "later": then}
    with bench(models, later="train later") as engines:
        assert all(isinstance(engine, EmbeddedTrain) for engine in engines.values())


def test_only_references_of_a_path_are_frozen_from_the_start() -> None:
    @flow
    def two() -> None:
        policy = Policy("fake")
        first, second = Reference("fake", name="teacher"), Reference(policy)
        responses = policy.generate(Dataset([{"prompt": "1+1="}]).take(1), max_new_tokens=2)
        first.logprobs(responses)
        second.logprobs(responses)

    _, models, _ = trace(two, {})
    assert {role: model.is_frozen for role, model in models.items()} == {"policy": False, "teacher": True, "reference": False}
