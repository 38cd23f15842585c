"""A DeepSeek model that is megatron-core's own: its `GPTModel` with its `MLASelfAttention`, weights drawn, in some layout on CPUs.

`python megatrons_latent.py DIRECTORY` loads the library, and then each rank is a fork of it. `DIRECTORY/wanted.json` has the model's
directory, the layout, and the numbers of tokens. Together they compute logits, which `DIRECTORY/logits.safetensors` has then, and save a
checkpoint, `DIRECTORY/saved`. `DIRECTORY/rank-RANK.safetensors` has what a rank holds, by the names that it has there.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import cpu_as_cuda
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

_HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None


def written(directory: Path, model: str, layout: dict[str, int], tokens: Tensor) -> tuple[Tensor, Path]:
    """Logits [sequences, tokens, vocabulary] of a model whose weights are drawn, and the checkpoint that Megatron wrote of it."""
    directory.mkdir()
    num_ranks = layout.get("tp", 1) * layout.get("pp", 1)
    wanted = {"model": model, "layout": layout, "tokens": tokens.tolist(), "num_ranks": num_ranks}
    (directory / "wanted.json").write_text(json.dumps(wanted))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(directory)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(directory / "logits.safetensors")["logits"], directory / "saved"


def _config(hf: Any, layout: dict[str, int]) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    is_v3 = hf.model_type == "deepseek_v3"
    rope = dict(hf.rope_parameters)
    is_yarn = rope["rope_type"] == "yarn"
    of_yarn = {"rotary_scaling_factor": rope["factor"]} if is_yarn else {}
    of_yarn |= {
        one: rope[one] for one in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim") if is_yarn
    }
    dense, has_groups = hf.first_k_dense_replace, (hf.n_group or 1) > 1
    return MLATransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        kv_channels=hf.v_head_dim,
        ffn_hidden_size=hf.intermediate_size,
        layernorm_epsilon=hf.rms_norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        q_lora_rank=hf.q_lora_rank,
        kv_lora_rank=hf.kv_lora_rank,
        qk_head_dim=hf.qk_nope_head_dim,
        qk_pos_emb_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        rope_type="yarn" if is_yarn else "rope",
        rotary_base=rope["rope_theta"],
        **of_yarn,
        num_moe_experts=hf.n_routed_experts,
        moe_layer_freq=[0] * dense + [1] * (hf.num_hidden_layers - dense) if dense else 1,
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        moe_shared_expert_intermediate_size=hf.moe_intermediate_size * hf.n_shared_experts,
        moe_router_topk=hf.num_experts_per_tok,
        moe_router_num_groups=hf.n_group if has_groups else None,
        moe_router_group_topk=hf.topk_group if has_groups else None,
        moe_router_topk_scaling_factor=hf.routed_scaling_factor,
        moe_router_score_function="sigmoid" if is_v3 else "softmax",
        moe_router_enable_expert_bias=is_v3,
        moe_router_pre_softmax=not is_v3,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=_HAS_ENGINE,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.get("tp", 1),
        sequence_parallel=layout.get("tp", 1) > 1,
        pipeline_model_parallel_size=layout.get("pp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", layout.get("tp", 1)),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


class _Causal(torch.nn.Module):  # type: ignore[misc]
    """What stands for Transformer Engine's attention: Megatron's other one has no values of a size of their own."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[tokens, sequences, heads, size] to [tokens, sequences, heads * size of a value]."""
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return found.permute(2, 0, 1, 3).flatten(2)


def _with_parts(spec: Any) -> None:
    """Put in an attention and, where the stand-in for Transformer Engine is not on the path, norms that rows may be split before."""
    from m2flow.engines.megatron.layers import RowNorm

    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = _Causal
    if _HAS_ENGINE:
        return
    spec.layer_norm = RowNorm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RowNorm
        own = layer.submodules.self_attention.submodules
        own.q_layernorm = own.kv_layernorm = RowNorm


def _built(hf: Any, layout: dict[str, int]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_latent_attention

    vars(multi_latent_attention)["HAVE_TE"] = _HAS_ENGINE  # It believes so where the package is not installed, too.
    config = _config(hf, layout)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=_HAS_ENGINE, normalization="RMSNorm")
    _with_parts(spec)
    model = GPTModel(
        config,
        spec,
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return model.eval()


@torch.no_grad()  # type: ignore[untyped-decorator]
def _draw(model: Any) -> None:
    """Draw all weights anew, so that no layer, part or expert is like another."""
    from megatron.core import parallel_state as state

    for name, tensor in [*model.named_parameters(), *((name, one) for name, one in model.named_buffers() if "expert_bias" in name)]:
        place = [state.get_pipeline_model_parallel_rank()]
        if ".experts." in name:
            place += [state.get_expert_model_parallel_rank(), state.get_expert_tensor_parallel_rank()]
        elif getattr(tensor, "tensor_model_parallel", False):
            place += [state.get_tensor_model_parallel_rank()]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {place}".encode()))
        drawn = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(1 + 0.2 * drawn if "norm" in name else drawn * (0.2 if "bias" in name else 0.3))


@torch.no_grad()  # type: ignore[untyped-decorator]
def _logits(model: Any, tokens: Tensor) -> Tensor | None:
    """Logits, on the last stage."""
    from megatron.core import parallel_state as state

    length, config = tokens.shape[1], model.config
    if not model.pre_process:
        hidden = torch.empty(length // config.tensor_model_parallel_size, len(tokens), config.hidden_size)
        dist.recv(hidden, state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    positions = torch.arange(length).expand_as(tokens)
    found: Tensor = model(tokens, positions, None)
    if not model.post_process:
        dist.send(found, state.get_pipeline_model_parallel_next_rank())
        return None
    return found


def rank_of(directory: Path, wanted: dict[str, Any], rank: int) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    layout, hf = wanted["layout"], AutoConfig.from_pretrained(wanted["model"])
    dist.init_process_group("gloo", init_method=f"file://{directory / 'meet'}", rank=rank, world_size=wanted["num_ranks"])
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", layout.get("tp", 1)),
    )
    model_parallel_cuda_manual_seed(1)
    model = _built(hf, layout)
    _draw(model)
    logits = _logits(model, torch.tensor(wanted["tokens"]))
    if logits is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
        save_file({"logits": logits.contiguous()}, directory / "logits.safetensors")
    held = {name: tensor for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)}
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, directory / f"rank-{rank}.safetensors")
    (directory / "saved").mkdir(exist_ok=True)
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(directory / "saved"))
    dist.barrier()
    dist.destroy_process_group()


def main(directory: Path) -> None:
    cpu_as_cuda.pretend()
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    wanted = json.loads((directory / "wanted.json").read_text())
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_of, args=(directory, wanted, rank)) for rank in range(wanted["num_ranks"])]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
