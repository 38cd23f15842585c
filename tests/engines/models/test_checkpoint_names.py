"""Weights go by checkpoints' names, for each architecture: what transformers saves is the judge, and logits after a round trip."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import save_config

from m2flow.channels.weights import Publisher, Subscriber, WeightOptions
from m2flow.channels.weights.tensors import from_wire, mark_tied, to_wire
from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.rollout_engine import EmbeddedRollout
from m2flow.engines.models.hf_model import EXPERTS, load_model
from m2flow.engines.models.model_files import modules_of_models
from m2flow.engines.models.trainer_checkpoint import named_weights
from m2flow.errors import EngineError
from m2flow.recipe import Model

MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Phi3": {},
    "Qwen2Moe": {**MIXTURE, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**MIXTURE, "head_dim": 8},
    "DeepseekV2": DEEPSEEK,
    "DeepseekV3": DEEPSEEK,
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Glm4Moe": {**DEEPSEEK, "head_dim": 8, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_values_are_those_that_transformers_saves_and_a_sync_gives_equal_logits(kind: str, tmp_path: Path) -> None:
    path = save_config(kind, tmp_path / "model", **KINDS[kind])
    trained, sampled = (load_model(Model(path, "random", seed), device="cpu", attention="eager") for seed in (0, 1))
    trained.save_pretrained(str(tmp_path / "saved"))
    saved = {name: tensor for file in (tmp_path / "saved").glob("*.safetensors") for name, tensor in load_file(file).items()}
    ours = dict(named_weights(trained))
    assert set(ours) == set(saved)
    assert all(torch.equal(ours[name], saved[name]) for name in saved)

    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        before, wanted = sampled(tokens).logits, trained(tokens).logits
        held = dict(named_weights(sampled))
        publisher = Publisher(f"m2flow-test-{secrets.token_hex(4)}", WeightOptions())
        with contextlib.closing(publisher), contextlib.closing(Subscriber("rollout-0")) as subscriber:
            manifest = publisher.publish(to_wire(mark_tied(named_weights(trained))), 1)
            for name, tensor in from_wire(subscriber.tensors(manifest, "shared memory"), wanted):
                held[name].copy_(tensor)
        assert not torch.equal(before, wanted)
        assert torch.equal(sampled(tokens).logits, wanted)


def test_every_architecture_with_stacked_experts_is_held_against_transformers(tmp_path: Path) -> None:
    found = {
        load_model(Model(save_config(kind, tmp_path / kind, **changes), "random"), device="cpu", attention="eager").config.model_type
        for kind, changes in KINDS.items()
    }
    assert set(EXPERTS) <= found


def test_a_rollout_engine_takes_a_mixtures_experts_one_by_one_and_misses_one_that_is_not_there(tmp_path: Path) -> None:
    path = save_config("Qwen3Moe", tmp_path / "model", **KINDS["Qwen3Moe"])
    trained = dict(named_weights(load_model(Model(path, "random", 0), device="cpu", attention="eager")))
    engine = EmbeddedRollout(Model(path, "random", 1), EngineSettings())
    engine.start()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(engine.stop)
        engine.load_weights(trained.items(), 1)
        assert all(torch.equal(tensor, trained[name]) for name, tensor in engine.weights())
        del trained["model.layers.1.mlp.experts.2.up_proj.weight"]
        with pytest.raises(EngineError, match=r"missing model.layers.1.mlp.experts.2.up_proj.weight"):
            engine.load_weights(trained.items(), 2)


def test_the_list_of_transformers_models_is_the_one_that_reading_their_files_again_gives():
    folder = Path(transformers.__file__).parent / "models"
    read_again = transformers.utils.import_utils.define_import_structure(str(folder / "__init__.py"))
    assert modules_of_models() == read_again
    assert any("llama.modeling_llama" in modules for modules in read_again.values())


@pytest.mark.slow
def test_transformers_models_are_loaded_without_reading_their_files_again():
    program = (
        "import transformers\n"
        "from transformers.utils import import_utils\n"
        "read = import_utils.create_import_structure_from_path.cache_info().misses\n"
        "import m2flow.engines.models.hf_model, transformers.models.llama\n"
        "assert import_utils.create_import_structure_from_path.cache_info().misses <= read + 1\n"  # Llama's own folder.
        "assert transformers.AutoModelForCausalLM and transformers.LlamaForCausalLM\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
