"""Critics and reward models: both train engines pass the suite; the embedded one computes what Hugging Face's own classes do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CONFIGS, VOCABULARY, random_model, write_model

from m2flow.engines.contract import EngineSettings, TrainEngine
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.models.model_files import load_tokenizer
from m2flow.engines.registry import make_train
from m2flow.errors import EngineError, ModelError
from m2flow.recipe import Model
from m2flow.samples import Batch, Ragged, make_ids
from m2flow.testing.fakes import FakeTrain
from m2flow.testing.train_suite import VALUE, ScalarHeadSuite, copied, samples, started


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model's config and tokenizer."""
    path: Path = tmp_path_factory.mktemp("qwen2")
    write_model(path, CONFIGS["qwen2"]())
    return path


class TestFake(ScalarHeadSuite):
    is_exact = True

    def make(self, head: str) -> TrainEngine:
        return FakeTrain(Model("", seed=1, head=head), EngineSettings())  # type: ignore[arg-type]


class TestEmbedded(ScalarHeadSuite):
    @pytest.fixture(autouse=True)
    def _take_directory(self, directory: Path) -> None:
        self.directory = directory

    def make(self, head: str) -> TrainEngine:
        return EmbeddedTrain(random_model(self.directory, head), EngineSettings())


class TestEmbeddedDeterministic(TestEmbedded):
    def make(self, head: str) -> TrainEngine:
        return EmbeddedTrain(random_model(self.directory, head), EngineSettings(deterministic=True))

    def test_values_and_scores_are_the_same_bits_whatever_else_is_in_the_batch(self) -> None:
        batch = self.batch()
        with started(self.make("value")) as engine:
            self.warm_up(engine)
            whole, alone = engine.values(batch), [engine.values(batch.take([i])) for i in range(len(batch))]
        assert np.array_equal(whole.ragged("values").values, Batch.concat(alone).ragged("values").values)
        texts = Batch(batch.ids, {"prompt": Ragged.texts(["1+1="] * 12), "text": Ragged.texts([str(10**i) for i in range(12)])})
        with started(self.make("score")) as engine:
            whole, alone = engine.scores(texts), [engine.scores(texts.take([i])) for i in range(12)]
        assert np.array_equal(whole.dense("reward"), Batch.concat(alone).dense("reward"))


def plain_values(model: Any, tokens: np.ndarray[Any, Any]) -> torch.Tensor:
    """Hugging Face's own forward pass over one sample: a value after each token."""
    values: torch.Tensor = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0, :, 0]
    return values


@pytest.fixture
def critic_path(directory: Path, tmp_path: Path) -> str:
    """A checkpoint whose head is not zero."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(str(directory))
    config.num_labels = 1
    transformers.AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path / "critic")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, tmp_path / "critic" / name)
    return str(tmp_path / "critic")


def test_a_value_is_what_the_head_says_of_the_token_before(critic_path):
    batch = samples(VOCABULARY)
    plain = transformers.AutoModelForTokenClassification.from_pretrained(critic_path).eval()
    with started(EmbeddedTrain(Model(critic_path, head="value"), EngineSettings())) as engine:
        found = engine.values(batch).ragged("values")
    tokens, mask = batch.ragged("tokens"), batch.ragged("loss_mask")
    for row in range(len(batch)):
        masked = np.flatnonzero(mask.row(row))
        expected = plain_values(plain, tokens.row(row)).detach().numpy()[masked - 1]
        assert np.allclose(found.row(row)[masked], expected, atol=1e-6)
        assert np.abs(expected).max() > 1e-3


def test_the_gradient_of_the_value_loss_is_that_of_a_plain_forward_pass(critic_path):
    suite = TestEmbedded()
    batch = suite.batch()
    plain = transformers.AutoModelForTokenClassification.from_pretrained(critic_path).eval()
    total = torch.zeros(())
    for row in range(len(batch)):
        masked = np.flatnonzero(batch.ragged("loss_mask").row(row))
        values = plain_values(plain, batch.ragged("tokens").row(row))[masked - 1]
        returns, old = (torch.from_numpy(batch.ragged(name).row(row)[masked]) for name in ("returns", "old_values"))
        near = old + (values - old).clamp(-0.2, 0.2)
        total = total + 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()
    total.backward()
    with started(EmbeddedTrain(Model(critic_path, head="value"), EngineSettings())) as engine:
        sums = engine.accumulate(batch, VALUE)
        gradients = {name: parameter.grad for name, parameter in engine._model.named_parameters()}  # type: ignore[attr-defined]
    assert sums.metrics["loss"] == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5), name


def test_a_critic_from_a_language_model_has_its_body_and_expects_nothing_yet(directory, tmp_path):
    language = load_model(random_model(directory, "lm"), device="cpu", attention="eager")
    language.save_pretrained(tmp_path / "lm")
    load_tokenizer(random_model(directory, "lm")).save(str(tmp_path / "lm"))
    with started(EmbeddedTrain(Model(str(tmp_path / "lm"), head="value"), EngineSettings())) as engine:
        assert not engine.values(samples(VOCABULARY)).ragged("values").values.any()
        weights = copied(engine)
    body = {name: tensor.numpy() for name, tensor in language.state_dict().items() if name.startswith("model.")}
    assert body
    assert all(np.array_equal(weights[name], tensor) for name, tensor in body.items())
    assert not weights["score.weight"].any()


@pytest.fixture
def reward_path(directory: Path, tmp_path: Path) -> str:
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(str(directory))
    config.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "rm")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, tmp_path / "rm" / name)
    return str(tmp_path / "rm")


def test_a_reward_models_scores_are_those_of_hugging_faces_class_on_padded_rows(reward_path):
    prompts, texts = ["1+1=", "12*3="], ["2", "36", "", "1234567"]
    ids = make_ids(0, 2, 2)
    batch = Batch(ids, {"prompt": Ragged.texts([prompts[0]] * 2 + [prompts[1]] * 2), "text": Ragged.texts(texts)})
    with started(EmbeddedTrain(Model(reward_path, head="score"), EngineSettings())) as engine:
        found = np.asarray(engine.scores(batch).dense("reward"))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(reward_path)
    rows = tokenizer(
        [str(batch.ragged("prompt").item(i)) + texts[i] + "<eos>" for i in range(4)],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(reward_path).eval()
    with torch.no_grad():
        expected = plain(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits[:, 0].numpy()
    assert np.allclose(found, expected, atol=1e-6)
    assert np.ptp(expected) > 1e-3


def test_a_critic_may_start_from_a_reward_model_head_and_all(reward_path):
    head = transformers.AutoModelForSequenceClassification.from_pretrained(reward_path).score.weight.detach().numpy()
    with started(EmbeddedTrain(Model(reward_path, head="value"), EngineSettings())) as engine:
        weights = copied(engine)
    assert np.array_equal(weights["score.weight"], head)
    assert head.any()
    assert not weights["score.bias"].any()


def test_a_reward_model_without_a_head_is_refused(directory, tmp_path):
    load_model(random_model(directory, "lm"), device="cpu", attention="eager").save_pretrained(tmp_path / "lm")
    load_tokenizer(random_model(directory, "lm")).save(str(tmp_path / "lm"))
    with (
        pytest.raises(ModelError, match=r"lack 1 tensors of the model: score\.weight"),
        started(EmbeddedTrain(Model(str(tmp_path / "lm"), head="score"), EngineSettings())),
    ):
        pass


def test_an_exchange_longer_than_the_reward_models_context_is_named(reward_path):
    batch = Batch(make_ids(0, 1), {"prompt": Ragged.texts(["1" * 200]), "text": Ragged.texts(["2" * 100])})
    engine = EmbeddedTrain(Model(reward_path, head="score"), EngineSettings())
    with started(engine), pytest.raises(EngineError, match=r"p0/0 has 301 tokens .*context is 256"):
        engine.scores(batch)


def test_the_registry_asks_an_engine_only_for_heads_that_it_has(monkeypatch):
    from m2flow.engines import registry

    info = registry.EngineInfo("plain", "m2flow.testing.fakes:FakeTrain", registry.Capabilities("train"), "")
    monkeypatch.setattr(registry, "engines", lambda: [info])
    with pytest.raises(EngineError, match="can't hold a model with a value head"):
        make_train("plain", Model("", head="value"), EngineSettings())
