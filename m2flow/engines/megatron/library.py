"""Megatron-core, unpatched: its parallel groups, its model with the shape of a Hugging Face one, its schedules and gradient buffers.

    Options, config --Built--> parts of the model on this rank --DistributedDataParallel--> gradients in flat buffers, summed over ranks
    micro-batches --run: 1F1B, interleaved or one after the other--> forward, and backward

All that imports the library is here. Layers are its local specification: column and row parallel matrices, router and experts are
Megatron's, norms and attention those of `m2flow.engines.megatron.layers`, which need neither Transformer Engine nor Apex. With Transformer
Engine (`modules`) matrices, norms and grouped experts are its; attention, positions and routing stay ours. Norms stand before their
matrices and not in them, so that weights have the same names, and adapters see what the matrix does.

Where release 0.16.1 deviates from what one expects (`tests/engines/megatron/layouts.py` tests each):

- `perform_initialization=False` leaves split weights unmarked, and the library's norm of the gradient then counts them wrongly: who has
  which part is known here by name (`m2flow.engines.megatron.parts`).
- Interleaved stages with batched sends pair them wrongly between two stages: they are sent one by one.
- Rotary embeddings ignore positions, and its own attention refuses packed rows over context-parallel ranks: both are replaced.
- Its embeddings have no padding token, which in transformers learns nothing from being read: a hook stops that gradient.
- A dense model's default dispatcher of tokens contradicts sequences of unequal lengths: another is named.
- Its groups are those of the process: trainers of one worker have one layout.

Source: Shoeybi et al. 2019, arXiv:1909.08053; Narayanan et al. 2021, arXiv:2104.04473 (interleaved 1F1B); Korthikanti et al. 2022,
arXiv:2205.05198 (sequence parallelism, selective recomputation); megatron-core 0.16.1.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines.distributed import layers_of_stages
from m2flow.engines.distributed.sequence_parallel import RowShard
from m2flow.engines.megatron.layers import (
    Adapters,
    Latent,
    LatentAttention,
    Limit,
    Modules,
    PackedCoreAttention,
    PositionedRotary,
    Routing,
    RowNorm,
    Switch,
    limit_of,
    put_on,
    route,
    with_bias,
)
from m2flow.engines.megatron.layout import Options, expert_width, has_bias, head_size, is_latent, num_dense, num_experts, shared_width
from m2flow.engines.megatron.names import ROUTER_BIAS, SCALAR_HEAD, Place, numbered
from m2flow.errors import EngineError, MissingExtra


@functools.cache
def core() -> Any:
    """Megatron-core, with the modules that are used here.

    Raises:
        MissingExtra: it is not installed, or a package named `megatron` that is another one.
    """
    logging.getLogger("megatron").setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of libraries that it would use if they were there.
            import megatron.core.distributed
            import megatron.core.extensions.transformer_engine
            import megatron.core.models.gpt.gpt_layer_specs
            import megatron.core.parallel_state
            import megatron.core.pipeline_parallel
            import megatron.core.tensor_parallel.mappings
            import megatron.core.tensor_parallel.random
            import megatron.core.transformer.spec_utils
            import megatron.core.transformer.transformer_block
            import megatron.core.transformer.transformer_layer
    except ImportError as error:
        raise MissingExtra(f"the train engine 'megatron' can't be loaded: {error}", now="pip install 'm2flow[megatron]'") from error
    return megatron.core


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what the library, and torch of the library's calls, warn of; a loss's own warnings are its user's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")
        yield


def modules(impl: str, device: str) -> Modules:
    """What layers are made of on a device, by the option `transformer_impl`.

    Raises:
        MissingExtra: Transformer Engine is asked for, and Megatron does not find it.
    """
    engine, parallel = core().extensions.transformer_engine, core().tensor_parallel
    if impl == "local" or (impl == "auto" and not (engine.HAVE_TE and torch.device(device).type == "cuda")):
        return Modules(RowNorm, parallel.ColumnParallelLinear, parallel.RowParallelLinear)
    if not engine.HAVE_TE:
        raise MissingExtra(
            "transformer_impl of the train engine 'megatron' is transformer_engine, and that package can't be loaded",
            now="pip install 'transformer-engine[pytorch]', which needs a GPU, or write transformer_impl: auto.",
        )
    # Releases before 1.9 have no grouped matrices: Megatron's experts are then those of its local specification.
    has_grouped = engine.TEColumnParallelGroupedLinear is not None
    return Modules(engine.TENorm, engine.TEColumnParallelLinear, engine.TERowParallelLinear, has_grouped)


_SEED = 1
"""Seed of random numbers that nothing reads: there is no dropout, and weights are set."""


@dataclass(frozen=True)
class Groups:
    """The groups of this process."""

    tensor: Any
    expert_tensor: Any
    context: Any
    data: Any
    """Ranks that have the same parameters, context-parallel ones among them."""
    expert_data: Any
    """Ranks that have the same parameters of experts."""
    stages: Any
    """Ranks that see the same rows: tensor-parallel ones, on all stages."""

    _open: ClassVar[list[Options]] = []
    """Layouts of the trainers in this process, which are all the same."""

    @classmethod
    def join(cls, options: Options) -> Groups:
        """Make the groups, or share those of the process's other trainers. Collective; `leave` is its counterpart.

        Raises:
            EngineError: another trainer of the process has another layout.
        """
        degrees = [(one.tp, one.pp, one.vpp, one.cp, one.ep, one.expert_tp) for one in (options, *cls._open[:1])]
        if degrees[0] != degrees[-1]:
            raise EngineError(
                "Megatron's groups are those of a process, and another trainer in this one has another layout",
                now="Give the trainers of a worker one layout.",
            )
        if not cls._open:
            core().parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=options.tp,
                pipeline_model_parallel_size=options.pp,
                virtual_pipeline_model_parallel_size=options.vpp if options.vpp > 1 else None,
                context_parallel_size=options.cp,
                expert_model_parallel_size=options.ep,
                expert_tensor_parallel_size=options.expert_tp,
                create_gloo_process_groups=False,
                distributed_timeout_minutes=options.collective_timeout_s / 60,
            )
            core().tensor_parallel.random.model_parallel_cuda_manual_seed(_SEED)
        cls._open.append(options)
        return cls(
            core().parallel_state.get_tensor_model_parallel_group(),
            core().parallel_state.get_expert_tensor_parallel_group(),
            core().parallel_state.get_context_parallel_group(),
            core().parallel_state.get_data_parallel_group(with_context_parallel=True),
            core().parallel_state.get_expert_data_parallel_group(),
            core().parallel_state.get_model_parallel_group(),
        )

    @classmethod
    def leave(cls) -> None:
        """End the groups, when the last trainer of the process closes; it then collects the library's models, which are in cycles."""
        cls._open.clear()
        core().parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

    @property
    def is_last_stage(self) -> bool:
        return bool(core().parallel_state.is_pipeline_last_stage(ignore_virtual=True))


@dataclass(frozen=True, eq=False)
class RowShardParams:
    """A rank's share of a micro-batch, in the place of `PackedSeqParams`: Megatron hands it down to every attention, also when a layer is
    recomputed."""

    shard: RowShard
    routing: Routing | None = None
    """Routing of a mixture of experts."""
    qkv_format: str = "sbhd"
    """Rows, sequences, heads, size: not the format of cumulative lengths."""
    cp_group: None = None


def transformer_config(config: Any, options: Options, dtype: torch.dtype) -> Any:
    """Megatron's config of a model of transformers in a layout."""
    experts: dict[str, Any] = {}
    if num_experts(config):
        experts = {
            "num_moe_experts": num_experts(config),
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": expert_width(config),
            "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
            "moe_router_dtype": "fp32",
        }
    if is_latent(config):
        dense = num_dense(config)
        experts |= {
            "moe_layer_freq": [0] * dense + [1] * (config.num_hidden_layers - dense),
            "moe_shared_expert_intermediate_size": shared_width(config),
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_score_function": "sigmoid" if has_bias(config) else "softmax",
            "moe_router_pre_softmax": not has_bias(config),
        }
    recomputed: dict[str, Any] = {}
    if options.recompute:
        recomputed["recompute_granularity"] = options.recompute
    if options.recompute == "full":
        recomputed |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    is_interleaved = options.vpp > 1
    return core().transformer.TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type.startswith("qwen3"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp if is_interleaved else None,
        pipeline_model_parallel_layout=_uneven_stages(config.num_hidden_layers, options.pp * options.vpp),
        context_parallel_size=options.cp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=options.expert_tp,
        sequence_parallel=options.splits_rows,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,  # Gradients are sums; the caller's denominator divides them.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        **_sends(is_interleaved),
        **experts,
        **recomputed,
    )


def _uneven_stages(num_layers: int, count: int) -> list[list[str]] | None:
    """What each chunk of a model has, the first of all stages first; None: the library spreads layers that chunks divide.

    >>> _uneven_stages(3, 2)
    [['embedding', 'decoder', 'decoder'], ['decoder', 'loss']]
    """
    if num_layers % count == 0:
        return None
    first, *others = (["decoder"] * len(layers) for layers in layers_of_stages(num_layers, count))
    stages = [["embedding", *first], *others]
    stages[-1].append("loss")
    return stages


def _sends(is_interleaved: bool) -> dict[str, bool]:
    """How stages send to each other: in batches, unless they would be paired wrongly."""
    return {"overlap_p2p_comm": is_interleaved, "batch_p2p_comm": not is_interleaved}


def _layers(config: Any, vp_stage: int | None, num_dense: int, latent: Latent | None, made_of: Modules) -> Any:
    """The specification of this rank's layers in a part of the model, the first of which have no experts."""
    block = core().transformer.transformer_block
    count = block.get_num_layers_to_build(config, vp_stage=vp_stage)
    first = core().transformer.transformer_layer.get_transformer_layer_offset(config, vp_stage=vp_stage)
    dense, other = (_layer(config, experts, latent, made_of) for experts in (None, config.num_moe_experts))
    specs = [dense if number < num_dense else other for number in range(first, first + count)]
    return block.TransformerBlockSubmodules(layer_specs=specs, layer_norm=made_of.norm)


def _layer(config: Any, num_experts: int | None, latent: Latent | None, made_of: Modules) -> Any:
    specs = core().models.gpt.gpt_layer_specs
    spec = specs.get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = made_of.norm
    if num_experts and made_of.has_grouped_experts:
        layer.mlp = specs.get_mlp_module_spec(use_te=True, num_experts=num_experts, moe_grouped_gemm=True)
    elif not num_experts:
        layer.mlp.submodules.linear_fc1, layer.mlp.submodules.linear_fc2 = made_of.column, made_of.row
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    attention.linear_qkv, attention.linear_proj = made_of.column, made_of.row
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = made_of.norm
    if latent is not None:
        how = {"latent": latent, "parallel": core().tensor_parallel, "modules": made_of}
        layer.self_attention = core().transformer.spec_utils.ModuleSpec(LatentAttention, params=how)
    return spec


def _first_layer(part: Any) -> int:
    """The number of a part's first layer in the whole model."""
    layers = part.decoder.layers
    return int(layers[0].layer_number) - 1 if len(layers) else 0


Head = Callable[[Tensor, Tensor | None], Tensor]
"""Hidden states of all rows [R, H], and this rank's rows of the head's weights, to what the last stage gives in place of logits. Of a
scalar head: its numbers of all rows [R, 1], and None."""


class ScalarHead(torch.nn.Module):  # type: ignore[misc]
    """The head of a critic or a reward model in the place of `GPTModel.output_layer`: a number for each row, on every tensor rank.

    Where tensor ranks split rows, each computes its own, and numbers are gathered in place of hidden states: the gradient of the weights
    is then a part of a sum, as that of a norm. Otherwise all ranks compute the same, and their gradients are whole.
    """

    def __init__(self, config: Any, *, has_bias: bool, answer: Head) -> None:
        super().__init__()
        self._answer, self._splits_rows = answer, config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype)) if has_bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Hidden states [R / tp or R, 1, H] to [T, 1, 1]."""
        found = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self._splits_rows:
            # Every rank sends the same gradient back, of which each needs its rows'.
            found = core().tensor_parallel.mappings.gather_from_sequence_parallel_region(found, tensor_parallel_output_grad=False)
        return self._answer(found[:, 0], None)[:, None], None


class Built:
    """This rank's parts of a model: one, or as many as it has virtual stages.

    Args:
        frequencies: of the rotary embedding, float32 [D / 2].
        padding: a token whose embedding learns nothing from where it is read, as in transformers.
        head: computes the last stage's output. scalar: the head is one of numbers: with a bias, or without. None: of a language model.
        latent: what its attention has, where that is latent.
        adapted: rank of adapters, what they are multiplied by, by the names of their layers' weights, and places of all weights.
    """

    def __init__(
        self,
        config: Any,
        options: Options,
        dtype: torch.dtype,
        device: str,
        frequencies: Tensor,
        padding: int | None,
        head: Head,
        scalar: bool | None = None,
        latent: Latent | None = None,
        adapted: tuple[int, Mapping[str, float], Mapping[str, Place]] = (0, {}, {}),
    ) -> None:
        self.options = options
        self._padding, self._head, self._scalar, self._latent = padding, head, scalar, latent
        self._adapted, self.switch = adapted, Switch()
        with _quiet():
            self._build(config, dtype, device, frequencies)
        self._run = core().pipeline_parallel.get_forward_backward_func()

    def _build(self, config: Any, dtype: torch.dtype, device: str, frequencies: Tensor) -> None:
        options = self.options
        self.config = transformer_config(config, options, dtype)
        made_of = modules(options.transformer_impl, device)
        parts = [self._part(config, vp if options.vpp > 1 else None, frequencies, made_of) for vp in range(options.vpp)]
        for part in parts:
            self._adapt(part)
            part.to(device)
        how = core().distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=options.zero == 1, overlap_grad_reduce=False
        )
        self.parameters = {name: parameter for part in parts for name, parameter in self._named(part).items()}
        self.biases = {name: bias for part in parts for name, bias in self._biases(part).items()}
        """Biases of this rank's routers, by the names of the whole model; the buffers that they are."""
        self.chunks = [
            core().distributed.DistributedDataParallel(self.config, how, part, disable_bucketing=i > 0) for i, part in enumerate(parts)
        ]

    def _adapt(self, part: Any) -> None:
        """Freeze a part, and put adapters on its matrices, if the model has some."""
        rank, scales, places = self._adapted
        if not scales:
            return
        for parameter in part.parameters():
            parameter.requires_grad_(False)
        of_part = dict(part.named_modules())
        for name, parameter in self._named(part).items():
            own = {one: scales[one] for one in places[name].names if one in scales}
            if own:
                matrix = next(module for module in of_part.values() if getattr(module, "weight", None) is parameter)
                mappings = core().tensor_parallel.mappings
                put_on(matrix, Adapters(self.config, places[name], rank, own, parameter, self.options.tp, self.switch, mappings))
        if part.pre_process and self.options.recompute:
            # What is computed again must have an input with a gradient.
            part.embedding.register_forward_hook(lambda _, __, found: found.detach().requires_grad_())

    def close(self) -> None:
        """Break the cycles that go through autograd's graph, which Python's collector does not see: a dispatcher of experts keeps what
        it computed last, whose graph keeps the layer. They would keep the model's weights, and its groups with their threads."""
        for chunk in self.chunks:
            for module in chunk.modules():
                dispatcher = getattr(module, "token_dispatcher", None)
                if dispatcher is not None:
                    vars(dispatcher).update({name: None for name, value in vars(dispatcher).items() if isinstance(value, Tensor)})

    def _part(self, config: Any, vp_stage: int | None, frequencies: Tensor, made_of: Modules) -> Any:
        def is_end(ask: Callable[..., bool]) -> bool:
            return bool(ask(ignore_virtual=False, vp_stage=vp_stage))

        tp = self.options.tp
        part = core().models.gpt.GPTModel(
            config=self.config,
            transformer_layer_spec=_layers(self.config, vp_stage, num_dense(config), self._latent, made_of),
            vocab_size=-(-config.vocab_size // tp) * tp,
            max_sequence_length=config.max_position_embeddings,
            pre_process=is_end(core().parallel_state.is_pipeline_first_stage),
            post_process=is_end(core().parallel_state.is_pipeline_last_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=config.tie_word_embeddings and self._scalar is None,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        part.rotary_pos_emb = PositionedRotary(frequencies)
        limit: Limit | None = limit_of(config)
        for layer in part.decoder.layers:
            if layer.is_moe_layer:
                route(layer, layer.layer_number - 1 - num_dense(config), limit)
                if has_bias(config):
                    with_bias(layer.mlp.router)
        if part.pre_process and self._padding is not None:
            part.embedding.register_forward_hook(self._without_padding, with_kwargs=True)
        if part.post_process and self._scalar is not None:
            part.output_layer = ScalarHead(self.config, has_bias=self._scalar, answer=self._head)
        elif part.post_process:
            layer = part.output_layer
            layer.forward = lambda hidden, weight=None, **_: self._output(hidden, layer.weight if weight is None else weight)
        return part

    def _without_padding(self, embedding: Any, arguments: Any, named: Mapping[str, Tensor], found: Tensor) -> Tensor:
        """Embeddings [R / tp or R, 1, H] through which no gradient goes to the padding token's."""
        is_padding = named["input_ids"][0] == self._padding
        if self.config.sequence_parallel:
            is_padding = is_padding.chunk(self.options.tp)[core().parallel_state.get_tensor_model_parallel_rank()]
        return torch.where(is_padding[:, None, None], found.detach(), found)

    def _output(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        """The last layer's hidden states [R / tp or R, 1, H] to the head's output, [T, 1, numbers]."""
        mappings = core().tensor_parallel.mappings
        if self.config.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden)
        return self._head(hidden[:, 0], weight)[:, None], None

    def _named(self, part: Any) -> dict[str, Tensor]:
        """Parameters by the names of the whole model. The last stage's copy of tied embeddings has their name."""
        first = _first_layer(part)
        of_each = (self.config.num_moe_experts or 0) // self.options.ep
        first_expert = of_each * core().parallel_state.get_expert_model_parallel_rank()
        found = {numbered(name, first, first_expert): parameter for name, parameter in part.named_parameters()}
        if part.share_embeddings_and_output_weights and "output_layer.weight" in found:
            found["embedding.word_embeddings.weight"] = found.pop("output_layer.weight")
        if self._scalar is not None:
            found = {SCALAR_HEAD.get(name, name): parameter for name, parameter in found.items()}
        return found

    def _biases(self, part: Any) -> dict[str, Tensor]:
        first = _first_layer(part)
        return {numbered(name, first, 0): bias for name, bias in part.named_buffers() if name.endswith(ROUTER_BIAS)}

    def named_layers(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """What passes go through here, by the names of the whole model."""
        for chunk in self.chunks:
            part = chunk.module
            yield from ((f"decoder.layers.{layer.layer_number - 1}", layer) for layer in part.decoder.layers)
            if part.pre_process:
                yield "embedding", part.embedding

    @property
    def buffers(self) -> list[Any]:
        """The library's flat buffers of gradients and, in ZeRO stage 1, of weights."""
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def has_copy(self, name: str) -> bool:
        """Whether this rank's parameter of that name is the last stage's copy of one that the first stage has."""
        is_first = core().parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        return name == "embedding.word_embeddings.weight" and not is_first

    def run(self, step: Callable[[Any], tuple[Any, Callable[[Tensor], Tensor]]], items: Sequence[Any], *, forward_only: bool) -> None:
        """Pass micro-batches through the stages. Collective; all ranks of a layout have equally many.

        Args:
            step: of a micro-batch -> this rank's share of it, and on the last stage what computes a loss from the head's output.
        """

        def forward(iterator: Any, chunk: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
            rows, loss = step(next(iterator))
            output = chunk(rows.shard.input_ids, rows.shard.positions[None], None, packed_seq_params=rows)
            # The count of tokens is not read: nothing is divided here.
            return output, lambda found: (loss(found), torch.ones((), dtype=torch.int, device=found.device), {})

        iterators = [iter(items) for _ in self.chunks]
        with _quiet():
            self._run(
                forward_step_func=forward,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(items),
                seq_length=1,  # Each micro-batch says its own.
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def add_up(self) -> None:
        """Sum gradients over the ranks that share parameters. Collective."""
        for parameter in self.parameters.values():
            if getattr(parameter, "is_partial", False):
                dist.all_reduce(parameter.main_grad, group=core().parallel_state.get_tensor_model_parallel_group())
        with _quiet():
            core().distributed.finalize_model_grads(self.chunks)

    def clear_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
