"""Loading models: what is wrong with a directory is said by name, and nobody's random state moves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_models import DIGITS, save_config

from m2flow.engines.contract import LOADING
from m2flow.engines.models.hf_model import load_model
from m2flow.engines.models.model_files import load_tokenizer
from m2flow.errors import DatasetError, EngineError, MissingExtra, ModelError
from m2flow.recipe import Model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with config, tokenizer and weights."""
    path = save_config("Qwen2", tmp_path / "model")
    load(path, init="random").save_pretrained(path)
    return Path(path)


def load(path: str | Path, init: str = "pretrained", seed: int = 0) -> torch.nn.Module:
    return load_model(Model(str(path), init=init, seed=seed), device="cpu", attention="sdpa")  # type: ignore[arg-type]


def test_random_weights_are_a_function_of_the_seed_and_move_no_random_state() -> None:
    before = torch.get_rng_state()
    first, again, other = load(DIGITS, "random", 3), load(DIGITS, "random", 3), load(DIGITS, "random", 4)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    assert not first.training


def test_the_digits_model_reads_and_writes_character_by_character(tmp_path: Path) -> None:
    codec = load_tokenizer(Model(str(DIGITS)))
    assert codec.encode_prompt("04534=") == [3, 7, 8, 6, 7, 13]
    assert codec.encode_target("1x\n") == [4, 2, 2]
    assert codec.decode([3, 3, 7, 1]) == "004"
    assert (codec.eos_ids, codec.eos_id) == ({1}, 1)
    codec.save(str(tmp_path))
    assert load_tokenizer(Model(str(tmp_path))).encode_prompt("04534=") == [3, 7, 8, 6, 7, 13]


def test_half_a_surrogate_pair_is_an_error_of_the_dataset_with_its_place(saved: Path) -> None:
    codec = load_tokenizer(Model(str(saved)))
    for encode in (codec.encode_prompt, codec.encode_target, lambda text: codec.encode_exchange("1=", text)):
        with pytest.raises(DatasetError, match=r"half of a surrogate pair, '\\ud800', at character \d") as caught:
            encode("12=\ud800")
        assert "12=" in caught.value.what


def test_further_end_tokens_come_from_the_generation_config(saved: Path) -> None:
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    codec = load_tokenizer(Model(str(saved)))
    assert (codec.eos_ids, codec.eos_id) == ({1, 5}, 1)


def test_weights_survive_saving_and_loading_quietly(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for a, b in zip(load(saved).parameters(), load(saved, "random").parameters(), strict=True):
        assert torch.equal(a, b)
    assert capfd.readouterr() == ("", "")


def test_it_is_counted_how_many_of_a_models_tensors_are_loaded(saved: Path) -> None:
    before = LOADING.num_models
    load(saved)
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert LOADING.num_loaded == len(file.keys()) > 10
    assert LOADING.num_models == before + 1
    assert LOADING.words() == ""


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model at .*nowhere\n.*Give the directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="neither a directory nor"):
        load(DIGITS / "config.json")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(tmp_path)


def test_a_broken_config_is_named(saved: Path) -> None:
    config = saved / "config.json"
    config.write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        load(saved)
    config.write_text("{}")
    with pytest.raises(ModelError, match="does not say its `model_type`"):
        load(saved)
    config.write_text('{"model_type": "qwen99"}')
    with pytest.raises(ModelError, match="'qwen99' model that this installation can't read"):
        load(saved)
    config.write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match="not a causal language model"):
        load(saved)


def test_broken_weights_are_named(saved: Path) -> None:
    file = saved / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="can't be read"):
        load(saved)
    file.unlink()
    with pytest.raises(ModelError, match=r"has no weights: no \*\.safetensors"):
        load(saved)


def test_weights_of_another_model_are_named(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (saved / "config.json").write_text(json.dumps({**config, **layers}))
    with pytest.raises(ModelError, match=r"lack \d+ tensors of the model: model\.layers\.2"):
        load(saved)
    (saved / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(ModelError, match=r"not a causal language model that|can't be read"):
        load(saved)


def test_a_broken_tokenizer_is_named(saved: Path) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        load_tokenizer(Model(str(saved), chat=True))
    (saved / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"the tokenizer in .* can't be read"):
        load_tokenizer(Model(str(saved)))
    (saved / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(Model(str(saved)))


def test_a_chat_template_wraps_the_prompt(saved: Path) -> None:
    (saved / "chat_template.jinja").write_text(
        "{% for m in messages %}1{{ m.content }}2{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    assert load_tokenizer(Model(str(saved), chat=True)).encode_prompt("77") == [4, 10, 10, 5, 13]


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineError, match="device 'nonsense' can't be used"):
        load_model(Model(str(DIGITS), init="random"), device="nonsense", attention="sdpa")


def test_a_broken_gguf_file_or_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    missing = [name for name in ("gguf", "sentencepiece", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        with pytest.raises(MissingExtra, match=rf"needs the package `{missing[0]}`\n.*pip install"):
            load(file)
        return
    with pytest.raises(ModelError, match=r"model\.gguf can't be dequantised"):
        load(file)
    assert not [entry for entry in (tmp_path / "cache" / "m2flow" / "gguf").iterdir() if entry.is_dir()]
