"""Train a model that is split over stages, layers' matrices, sequences and experts, with Megatron-core.

    every rank:  the same micro-batch --shares--> samples of its data-parallel rank --cut--> passes through the stages
    last stage:  hidden states --vocabulary-parallel head--> log-probabilities --loss's terms--> gradients, back through the stages
                 gradients --summed over data-parallel ranks--> each rank's parts --AdamW--> weights

The contract is that of every trainer: terms of tokens, sums, the caller's denominator. So no number depends on the layout or on how many
passes a micro-batch takes. Weights come in and go out under the names of checkpoints; a checkpoint is the embedded trainer's, and any
trainer goes on from it in any layout.

A loss that raises is heard by all ranks when the passes are over: until then the last stage sends zeros back, since the other stages wait
for its gradients. The gradient is then a part of what it should be: `discard` it.

Limits:
    models: the families in `m2flow.engines.megatron.layout`, with any head (DeepSeek-V2 as policies alone, as in transformers); AdamW
        alone. Refused are windows, biases (but Qwen2's and those of routers), scaled rotary embeddings (but DeepSeek's), layers that
        predict further tokens, heads, layers or experts that the layout does not divide, and experts with `tp` but without
        `sequence_parallel`. Adapters of models without experts, and of policies; their checkpoints are gathered.
    start: every rank reads the whole model once, into the memory of its host. Unless checkpoints are spread, one is gathered there on
        the first rank, and read whole by all.
    kernels: torch's. Neither Transformer Engine nor Apex is used, and experts are computed one after the other.
    layouts: the trainers of one worker have the same.

Source: Shoeybi et al. 2019, arXiv:1909.08053; Narayanan et al. 2021, arXiv:2104.04473.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines.contract import (
    NO_AGREEMENT,
    NUM_SHARED,
    Agreement,
    EngineSettings,
    HeldCheckpoint,
    Memory,
    Objective,
    Sums,
    TrainEngine,
    WeightForm,
    WeightPiece,
    blended,
    bytes_on,
)
from m2flow.engines.distributed.ranks import RankedTrain, stopping_if_it_fails
from m2flow.engines.distributed.sequence_parallel import RowShard, gathered
from m2flow.engines.megatron import vocabulary
from m2flow.engines.megatron.layers import Latent, Routing
from m2flow.engines.megatron.layout import check_adapters, check_model, check_ranks, has_bias, is_latent, mixture_of, read
from m2flow.engines.megatron.library import Built, Groups, RowShardParams
from m2flow.engines.megatron.names import SCALAR_HEAD, Weights, check_names, layer_of, places, with_adapters
from m2flow.engines.megatron.parts import Held, Parts
from m2flow.engines.models import lora, packing, trainer_checkpoint
from m2flow.engines.models.hf_model import checkpoint_tensors, empty_cache, keep_freed_memory, load_model, use_threads
from m2flow.engines.models.model_files import config_of, load_tokenizer
from m2flow.engines.models.model_probe import longest_sequence
from m2flow.engines.models.optimizers import MOMENTS, packed_state, unpacked_state
from m2flow.engines.models.packing import Demonstrations
from m2flow.engines.models.requests import SamplingMask
from m2flow.engines.models.routing import BALANCE_LOSS, REROUTED, Z_LOSS, Balanced, Loads, Mixture, beside_experts, load_metrics, move_bias
from m2flow.engines.models.trainer_checkpoint import Pieces
from m2flow.engines.registry import built_in
from m2flow.errors import EngineError, M2FlowError, unexpected
from m2flow.recipe import TOP_LOGPROBS, AdamW, Loss, Model, Optimizer
from m2flow.samples import Batch

_HEAD_LOGITS = 1 << 26
"""Logits that a rank has at a time: 256 MiB of float32."""
_DTYPES = ("float32", "bfloat16")


@dataclass(eq=False)
class Pass:
    """A part of a micro-batch, on its way through the stages."""

    batch: Batch
    packed: packing.Packed
    shard: RowShard
    temperature: Tensor | None
    top: Tensor | int
    """Tokens whose log-probabilities are computed besides, [T, K], or how many of the likeliest to find; 0: none."""
    loss: Loss | None = None
    """None: nothing is trained."""
    weight: float = 0.0
    """0: it only keeps the ranks together."""
    top_ids: Tensor | None = None
    """Found by the head."""
    mask: SamplingMask | None = None
    """What the tokens were drawn from, which `top` then has."""
    routing: Routing | None = None
    """Routing of a mixture of experts."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    agreement: Agreement = NO_AGREEMENT


class MegatronTrain(RankedTrain):
    """Run the embedded trainer's losses on a model that Megatron has in parts."""

    name = "megatron"
    capabilities = built_in("megatron", "train")

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._options = read(settings.options)
        check_ranks(self._options, settings.num_ranks)
        if torch.device(settings.device).type not in self.capabilities.devices:
            raise EngineError(f"the train engine 'megatron' has no device {settings.device}", now="Give it GPUs, or take `fsdp`.")
        if model.dtype not in _DTYPES:
            raise EngineError(f"the train engine 'megatron' has no passes in {model.dtype}", now=f"Write {' or '.join(_DTYPES)}.")
        self._built: Built | None = None
        self._num_pending = 0
        """Micro-batches since the last step."""
        self._current: Pass | None = None
        """The pass whose last stage is being computed."""
        self._failure: Exception | None = None
        """What a loss raised."""
        self._away: list[tuple[Any, Tensor]] = []
        """Storages that are off the device, with what was in them."""
        self._experts: Mixture | None = None
        """The experts, where the model is a mixture."""
        self._loads = Loads()
        """Loads of its experts, by this rank's tokens since the last step."""

    @property
    def _num_alike(self) -> int:
        return self._options.num_alike

    @property
    def _share_number(self) -> int:
        return self._options.share_of(self._ranks.rank, self._ranks.count)

    @property
    def _reporters(self) -> Sequence[int]:
        return self._options.reporters(self._ranks.count)

    @stopping_if_it_fails
    def start(self) -> None:
        use_threads(self._settings.threads, self._settings.deterministic)
        keep_freed_memory()
        self._num_head_logits, self._is_exact = self._count("head_logits", _HEAD_LOGITS), self._flag("fp32_head", default=False)
        config = config_of(self._source)
        check_model(config, self._options)
        self._experts = mixture_of(self._source, config)
        check_adapters(self._source, config, self._options)
        self._ranks.open(leave=Groups.leave)
        self._groups = Groups.join(self._options)
        model = self._together(self._loaded)
        self._longest, self._rope = longest_sequence(config)
        self._num_layers = int(config.num_hidden_layers)
        self._codec = self._together(lambda: load_tokenizer(self._source))
        self._demonstrations = Demonstrations(self._codec)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._trained = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._biases = {name: buffer.shape for name, buffer in model.named_buffers() if name in self._shapes}
        scales = lora.scales(model)
        tensors = {one: view for name, held in lora.whole_state(model, adds=False) for one, view in checkpoint_tensors(model, name, held)}
        scalar = None if self._source.head == "lm" else model.score.bias is not None
        self._together(lambda: check_names(config, list(tensors), scalar))
        found = self._together(lambda: with_adapters(places(config, scalar), scales))
        adapted = (self._source.lora.rank if self._source.lora is not None else 0, scales, found)
        tensors |= dict(lora.adapter_state(model))
        dtype = getattr(torch, self._source.dtype)
        self._vocabulary = vocabulary.Vocabulary(config.vocab_size, self._groups.tensor, self._num_head_logits, self._is_exact)
        frequencies, latent = model.base_model.rotary_emb.inv_freq, Latent.of(model) if is_latent(config) else None
        padding = model.get_input_embeddings().padding_idx
        self._built = Built(
            config, self._options, dtype, self._settings.device, frequencies, padding, self._head_output, scalar, latent, adapted
        )
        self._weights = Weights(
            config,
            self._options,
            self._built.parameters | self._built.biases,
            {name: tensor.shape for name, tensor in tensors.items()},
            self._groups.tensor,
            self._groups.expert_tensor,
            self._ranks.group,
            scalar,
            scales,
        )
        self._weights.load(tensors)
        self._model = model.to("meta")  # Its class and config are what a checkpoint is written with.
        self._parts = self._stepped()
        for name, layer in self._built.named_layers():
            self._ranks.course.pass_through(layer, name)

    def _loaded(self) -> Any:
        """The model as transformers has it, in the memory of the host."""
        model = load_model(self._source, device="cpu", attention="eager")
        if self._source.lora is not None:
            lora.adapt(model, self._source.lora, self._source.seed)
        scaling = getattr(model.base_model.rotary_emb, "attention_scaling", 1.0)
        if scaling != 1.0 and not is_latent(model.config):
            raise EngineError(f"rotary embeddings that scale the attention, by {scaling:g}, are not those of Megatron's model here")
        return model

    def _stepped(self) -> Parts:
        assert self._built is not None
        is_first = dist.get_rank(self._groups.tensor) == 0
        held = {}
        for name, parameter in self._weights.own.items():
            place = self._weights.places[name]
            group = self._groups.expert_data if place.is_expert else self._groups.data
            counts = (place.dim is not None or is_first) and not self._built.has_copy(name)
            held[name] = Held(parameter, group, counts, place.group)
        groups = list(dict.fromkeys(place.group for place in self._weights.places.values() if place.is_trained))
        is_spread, on_host = self._options.zero == 1, self._options.offload_optimizer
        return Parts(held, self._built.buffers, self._ranks.group, groups, is_spread=is_spread, on_host=on_host)

    def stop(self) -> None:
        if self._built is not None:
            self._built.close()
        self._built = self._model = self._current = None
        self._away.clear()
        self._num_pending = 0
        for name in ("_parts", "_weights", "_groups", "_vocabulary"):
            self.__dict__.pop(name, None)
        empty_cache(self._settings.device)
        self._ranks.close()

    # Training

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        batch, loss = self._to_train(batch, objective.loss), objective.loss
        num_masked = packing.num_masked(batch.ragged("loss_mask"))
        metrics, agreement = dict[str, float](), NO_AGREEMENT
        if num_masked.any():
            own, weight = self._share(batch, num_masked, is_whole="group_ids" in loss.needs)
            passes = self._together(lambda: self._cut(own, weight, loss))
            self._num_pending += 1
            self._run(passes, forward_only=False)
            for one in passes:
                if one.routing is not None and self._experts is not None and one.weight:
                    one.routing.count(self._loads, self._experts)
            metrics = self._summed(passes)
            if "same_weights" in batch:
                agreement = self._agreed(Agreement.of_all([one.agreement for one in passes if one.weight]))
        return Sums.of_passes(batch, int(num_masked.sum()), metrics, agreement)

    def _cut(self, batch: Batch, weight: float, loss: Loss) -> list[Pass]:
        """The passes of this rank's samples, equally many on all ranks."""
        found = []
        for part, counts in self._cut_into(self._options.num_passes, batch, weight, is_whole="group_ids" in loss.needs):
            top = self._top_ids(part, loss) if TOP_LOGPROBS in loss.needs else 0
            found.append(self._pass(part, top, loss, counts))
        return found

    def _pass(self, batch: Batch, top: Tensor | int, loss: Loss | None = None, weight: float = 0.0) -> Pass:
        size = self._vocabulary.size
        if isinstance(top, Tensor) and len(top) and int(top.max()) >= size:
            said = f"the reference found token {int(top.max())} likely, and this model has {size} tokens"
            raise EngineError(said, now="Take a reference with the same tokenizer.")
        if isinstance(top, int) and top >= size:
            raise EngineError(f"top_k is {top}, and the model has {size} tokens", now="Take fewer than it has.")
        packed = self._pack(batch)
        if self._experts is not None and packed.experts is not None and packed.experts.shape[1] == self._num_layers:
            packed = replace(packed, experts=packed.experts[:, -self._experts.num :])  # A server reports layers without experts, too.
        shard = RowShard.of(packed, self._groups.context, self._options.tp)
        routing = None
        if self._experts is not None:
            if loss is not None and self._source.balance is not None:
                denominator = loss.denominator if weight else None
                balanced = Balanced.of(self._source.balance, packed, batch, denominator, self._experts)
                if balanced is not None:
                    balanced.is_sigmoid = has_bias(self._model.config)
                packed = replace(packed, balanced=balanced)
            part = (dist.get_rank(self._groups.tensor), self._options.tp) if self._options.splits_rows else (0, 1)
            split = (self._groups.tensor, self._options.splits_rows), (self._groups.context, self._options.cp > 1)
            routing = Routing.of(packed, shard, self._experts, part, [group for group, is_split in split if is_split])
        if self._source.head != "lm":
            return Pass(batch, packed, shard, None, 0, loss, weight, routing=routing)
        mask = self._sampling_mask(batch, top)
        top = top if mask is None else mask.ids
        return Pass(batch, packed, shard, self._temperature(batch), top, loss, weight, mask=mask, routing=routing)

    def _run(self, passes: Sequence[Pass], *, forward_only: bool) -> None:
        """Send passes through the stages. Raises on every rank what a loss raised on one."""
        assert self._built is not None
        self._failure = None

        def step(one: Pass) -> tuple[RowShardParams, Any]:
            self._current = one
            return RowShardParams(one.shard, one.routing), lambda output: self._loss(one, output)

        self._built.run(step, passes, forward_only=forward_only)
        self._together(self._raise_failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure if isinstance(self._failure, M2FlowError) else unexpected("the loss", self._failure)

    def _head_output(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        """What the last stage gives for the tokens that its rows predict: log-probability, entropy, those of `top`; [t, numbers]. Of a
        scalar head, whose numbers come in place of hidden states, these."""
        one = self._current
        assert one is not None
        own, which = hidden[one.shard.predictors], one.shard.which
        if weight is None:
            return own
        temperature = None if one.temperature is None else one.temperature[which]
        top_ids = one.top[which] if isinstance(one.top, Tensor) else None
        if isinstance(one.top, int) and one.top:
            top_ids = vocabulary.most_likely(own, weight, temperature, one.top, self._vocabulary)
            one.top_ids = top_ids
        found = vocabulary.token_logprobs(own, weight, one.packed.targets[which], temperature, top_ids, self._vocabulary)
        return torch.cat([found[0][:, None], found[1][:, None], found[2]], 1)

    def _loss(self, one: Pass, output: Tensor) -> Tensor:
        """On the last stage: the loss of a pass, from the head's output [1, t, numbers]."""
        values = gathered(output[0], one.shard, self._groups.context)
        if self._source.head != "lm":
            one.outputs = {"values": values[:, 0].float()}
        else:
            one.outputs = {"logprobs": values[:, 0], "entropy": values[:, 1], TOP_LOGPROBS: values[:, 2:]}
        if one.mask is not None:
            one.outputs = one.mask.among_left(one.outputs)
        if one.top_ids is not None:
            one.top_ids = gathered(one.top_ids, one.shard, self._groups.context)
        if one.loss is None:
            return values.sum()
        try:
            terms, one.metrics, one.agreement = self._terms_of(one.batch, one.loss, one.outputs)
            one.metrics[NUM_SHARED] = float(one.packed.num_shared)
            return terms.sum() * one.weight
        except Exception as error:  # The other stages wait for a gradient.
            self._failure = self._failure or error
            return values.sum() * 0.0
        finally:
            one.outputs = {}

    def _summed(self, passes: Sequence[Pass]) -> dict[str, float]:
        """Sum metrics over passes, and over the ranks that report. Only these know the names; of what routers did all have parts."""
        sums = self._sums_of([(one.metrics, one.weight) for one in passes])
        routed = [(one.routing, one.weight) for one in passes if one.routing is not None]
        if self._experts is not None and passes[0].packed.experts is not None:
            sums[REROUTED] = math.fsum(routing.share_rerouted(self._experts) * weight for routing, weight in routed)
        if passes[0].packed.balanced is not None:
            losses = [(routing.balanced.sums(), weight) for routing, weight in routed if routing.balanced is not None]
            sums |= {name: math.fsum(one[name] * weight for one, weight in losses) for name in (BALANCE_LOSS, Z_LOSS)}
        return self._ranks.total(sums)

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        assert self._built is not None
        if not self._num_pending:
            raise EngineError("there is no gradient to apply", now="accumulate() a micro-batch with masked tokens first.")
        try:
            if not isinstance(optimizer, AdamW):
                raise EngineError(f"the train engine {self.name!r} has no {type(optimizer).__name__}", now="Use AdamW.")
            if not (math.isfinite(denominator) and denominator > 0):
                raise EngineError(f"the denominator of a mini-batch must be a positive number, got {denominator}")
            rate = optimizer.rate(self._parts.client.num_steps.get(optimizer.state_key, 0))
            self._ranks.course.at("gradient reduction")
            self._built.add_up()
            self._ranks.course.at("optimizer step")
            norm, further = self._parts.step(optimizer, denominator)
            if not math.isfinite(norm):
                raise EngineError(
                    f"the gradient is not finite (its norm is {norm}); the weights were left as they were",
                    now="Look for infinite losses or advantages, and for a learning rate that is too high.",
                )
            return {"grad_norm": norm, "lr": rate, **further, **self._expert_loads()}
        finally:
            self.discard()

    def _expert_loads(self) -> dict[str, float]:
        """What a step says of experts; it moves the biases of routers."""
        if self._experts is None:
            return {}
        counts, balance = self._total(self._loads.taken()), self._source.balance
        if balance is not None and balance.bias_step and counts.any():
            for name, bias in self._built.biases.items() if self._built is not None else ():
                move_bias(bias, counts[layer_of(name) - self._num_layers], balance.bias_step)
        return load_metrics(counts)

    def discard(self) -> None:
        assert self._built is not None
        self._loads.taken()
        self._num_pending = 0
        self._built.clear_gradients()

    def _backward(self, loss: Tensor) -> None:
        raise NotImplementedError  # The schedule does it.

    # Passes without gradient

    def _scored(self, exchanges: Sequence[Batch]) -> list[npt.NDArray[Any]]:
        return self._of_runs(exchanges, "values", 0)

    def _of_runs(self, runs: Sequence[Batch], output: str, top_k: int) -> list[npt.NDArray[Any]]:
        """The numbers of each run, with the experts that are recorded beside them, on the last stage; elsewhere nothing."""
        recorded = self._recorded(output, top_k)
        more = -len(runs) % self._options.pp if self._options.vpp > 1 else 0
        passes = self._together(lambda: [self._pass(rows, top_k) for rows in (*runs, *[runs[0]] * more)])
        self._run(passes, forward_only=True)
        passes = passes[: len(runs)]
        chosen = [self._chosen(one, recorded) for one in passes] if recorded is not None else []
        if not self._groups.is_last_stage:
            return [np.zeros(0) for _ in runs]
        found = []
        for one, experts in itertools.zip_longest(passes, chosen):
            columns = [one.outputs[output][:, None].double()]
            if one.top_ids is not None:
                columns += [one.top_ids.double(), one.outputs[TOP_LOGPROBS].double()]
            numbers = torch.cat(columns, 1).cpu().numpy()
            if recorded is not None:
                numbers = beside_experts(numbers, one.batch.ragged("loss_mask"), (one.packed, experts), recorded)
            found.append(numbers)
        return found

    def _chosen(self, one: Pass, mixture: Mixture) -> Tensor:
        """The experts of a pass's rows, from the ranks that have some of them, or of its layers. Collective."""
        assert one.routing is not None
        return one.routing.everywhere(one.packed.num_rows, mixture, (self._groups.stages, self._groups.context))

    @property
    def _mixture(self) -> Mixture | None:
        return self._experts if self._source.routing is not None else None

    # Weights and states

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        assert self._built is not None
        yield from self._weights.merged(adds=self._built.switch.is_on)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights.whole(is_trained=True):
            yield lora.file_name(name), tensor

    def base(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights.merged(adds=False)

    @contextlib.contextmanager
    def with_adapters(self, adapters: Sequence[Tensor] | None) -> Iterator[None]:
        assert self._built is not None
        switch = self._built.switch
        switch.is_on = adapters is not None
        try:
            with super().with_adapters(adapters):
                yield
        finally:
            switch.is_on = True

    def adapter_values(self) -> list[Tensor]:
        found = {name: tensor.clone() for name, tensor in self._weights.whole(is_trained=True)}
        return [found[name] for name in self._trained]

    def read_adapters(self, path: str) -> list[Tensor]:
        found = self._together(lambda: trainer_checkpoint.read_weights(path, self._source, self._shapes))
        return [found[name] for name in self._trained]

    def put_adapters(self, values: Sequence[Tensor]) -> None:
        self._weights.load(dict(zip(self._trained, values, strict=True)), is_all=False)

    def weight_forms(self) -> Sequence[WeightForm] | None:
        if self._source.lora is not None:  # What is sent of adapted weights is a sum, which is made of whole ones.
            return None
        return [WeightForm(name, str(dtype).removeprefix("torch."), tuple(shape)) for name, dtype, shape in self._weights.forms()]

    def weight_pieces(self) -> Iterator[WeightPiece]:
        for name, parameter in self._weights.own.items():
            if self._parts.writes(name):
                for one, start, piece in self._weights.views(name, parameter.detach()):
                    yield WeightPiece(one, tuple(start), piece)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def copy_from(self, source: TrainEngine, share: float = 1.0) -> None:
        if not isinstance(source, MegatronTrain):
            raise EngineError(f"a trainer 'megatron' can't take the weights of {source.name!r}", now="Take the same engine for both roles.")
        if share == 1 and self._copy_adapters_only(source):
            return
        if source._source.lora is not None:
            raise EngineError("Megatron's model can't take weights that adapters are added to", now="Give both roles the same adapters.")
        other = source._weights.own
        for name, parameter in self._weights.own.items():
            if name not in other and (name in SCALAR_HEAD.values() or ".adapters." in name):
                continue  # A critic of a policy keeps its head. Adapters add nothing yet.
            if name not in other or other[name].shape != parameter.shape:
                raise EngineError(f"the models {source._source.path} and {self._source.path} differ in {name}")
            parameter.copy_(blended(parameter, other[name].detach(), share))

    def _own_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self._weights.own.items()

    def _set(self, tensor: Tensor, value: Tensor) -> None:
        raise NotImplementedError  # `Weights.load` does it.

    def save(self, path: str) -> None:
        """Save in the embedded trainer's format, gathered on the first rank, or each rank its part."""
        if self._options.spread_checkpoints:
            self._write_together(Path(path), *self._in_parts())
            return
        held = self.held_checkpoint(path)
        self._together(lambda: held.write() if held is not None else None)

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        """The first rank holds what is gathered, or each its part."""
        if self._options.spread_checkpoints:
            return self._held_together(Path(path), *self._in_parts(), self._model)
        adapter = self._by_module(self._weights.whole(is_trained=True), getattr(torch, self._source.dtype)) if self._source.lora else None
        weights = self._whole_on_first()
        optimizers = []
        for recipe, count in self._parts.client.num_steps.items():
            both = [self._by_module(self._weights.whole(self._parts.moments(recipe, which)), torch.float32) for which in (0, 1)]
            if self._is_first:
                optimizers.append(packed_state(recipe, count, [(both[0][name], both[1][name]) for name in self._trained]))
        masters: list[Tensor] = []
        if self._source.dtype != "float32":
            exact = self._by_module(self._weights.whole(self._parts.gathered(lambda part: part.stepped)), torch.float32)
            masters = [exact[name] for name in self._trained] if self._is_first else []
        state = {"optimizers": optimizers, "masters": masters}
        return trainer_checkpoint.held(path, self._model, self._codec, state, weights, adapter) if self._is_first else None

    def _whole_on_first(self) -> dict[str, Tensor]:
        """On the first rank, all weights by the names of transformers' modules; of a model with adapters, with what these add."""
        if self._source.lora is None:
            return self._by_module(self._weights.whole(), getattr(torch, self._source.dtype))
        found = ((name, tensor.to("cpu", copy=True) if self._is_first else tensor) for name, tensor in self.weights())
        return dict(found) if self._is_first else dict.fromkeys((name for name, _ in found), torch.empty(0))

    def _in_parts(self) -> tuple[dict[str, Pieces], dict[str, Any]]:
        """What this rank writes of a checkpoint in parts, and the rest of its state with marks in their place. Collective."""
        tensors = self._pieces(trainer_checkpoint.WEIGHT)
        optimizers = []
        for number, (recipe, count) in enumerate(self._parts.client.num_steps.items()):
            for which, moment in enumerate(MOMENTS):
                tensors |= self._pieces(f"state.{number}.{moment}.", self._parts.moments(recipe, which))
            marks = [[trainer_checkpoint.mark(f"state.{number}.{moment}.{name}") for moment in MOMENTS] for name in self._trained]
            optimizers.append(packed_state(recipe, count, marks))
        masters = []
        if self._source.dtype != "float32":
            tensors |= self._pieces("masters.", self._parts.gathered(lambda part: part.stepped))
            masters = [trainer_checkpoint.mark(f"masters.{name}") for name in self._trained]
        return tensors, {"optimizers": optimizers, "masters": masters}

    def _pieces(self, prefix: str, of: Callable[[str, Tensor], Tensor] | None = None) -> dict[str, Pieces]:
        """What this rank writes of all tensors, in the memory of its host, by prefix and the names of transformers' modules. Collective.

        Args:
            of: as of `Weights.whole`.
        """
        found = {name: Pieces(shape) for name, shape in (self._trained if of is not None else self._held_shapes).items()}
        for name, parameter in (self._weights.trained if of is not None else self._weights.own).items():
            value = parameter.detach() if of is None else of(name, parameter)
            if self._parts.writes(name):
                for module, start, piece in self._located(name, value):
                    found[module].add(start, piece.to("cpu", copy=True))
        return {prefix + name: pieces for name, pieces in found.items()}

    def _located(self, name: str, part: Tensor) -> Iterator[tuple[str, list[int], Tensor]]:
        """Yield `Weights.pieces` by the names of transformers' modules, which stack experts."""
        for one, start, piece in self._weights.pieces(name, part):
            module, view = self._places[one]
            place = np.array(np.unravel_index(view.storage_offset(), self._held_shapes[module]), np.int64)
            place[len(place) - len(start) :] += start
            yield module, place.tolist(), piece

    @functools.cached_property
    def _places(self) -> dict[str, tuple[str, Tensor]]:
        """By a checkpoint's names, the modules' tensors, and views without memory that say where in them a checkpoint's lie."""
        whole = {name: torch.empty(shape, device="meta") for name, shape in self._held_shapes.items()}
        return {part: (name, view) for name, held in whole.items() for part, view in checkpoint_tensors(self._model, name, held)}

    @property
    def _held_shapes(self) -> dict[str, torch.Size]:
        """The shapes of all weights that a checkpoint has, by the names of transformers' modules: parameters, and biases of routers."""
        return self._trained | self._biases

    @property
    def _is_first(self) -> bool:
        return self._ranks.rank == 0

    def _by_module(self, found: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
        """On the first rank, tensors by the names of transformers' modules, which stack experts, in the memory of the host."""
        if not self._is_first:
            for _ in found:
                pass
            return {}
        whole = {name: torch.empty(shape, dtype=dtype) for name, shape in self._trained.items()}
        whole |= {name: torch.empty(shape) for name, shape in self._biases.items()}
        views = self._views(whole)
        for name, tensor in found:
            views.pop(name).copy_(tensor)
        return {name: tensor for name, tensor in whole.items() if name not in views}  # Moments have no biases.

    def _views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of modules by the names of checkpoints, as views."""
        return {part: view for name, tensor in tensors.items() for part, view in checkpoint_tensors(self._model, name, tensor)}

    def load(self, path: str) -> None:
        if trainer_checkpoint.has_parts(path):
            self._load_parts(path)
        else:
            self._load_whole(path)

    def _load_parts(self, path: str) -> None:
        """Read what this rank holds, from parts that ranks of any layout or trainer wrote."""
        count = len(self._trained)

        def read_own() -> tuple[dict[str, Tensor], list[Any], dict[str, Tensor]]:
            state = trainer_checkpoint.marked_state(path, "cpu")
            marks = {name: trainer_checkpoint.mark(trainer_checkpoint.WEIGHT + name) for name in self._held_shapes}
            weights = self._own_of(path, marks, self._weights.own)
            states = []
            for recipe, num_steps, moments in [unpacked_state(saved, count) for saved in state["optimizers"]]:
                named = dict(zip(self._trained, moments, strict=True))
                of_both = [{name: None if pair is None else pair[which] for name, pair in named.items()} for which in (0, 1)]
                states.append((recipe, num_steps, [self._own_of(path, one, self._weights.trained) for one in of_both]))
            masters = dict(zip(self._trained, state.get("masters", []), strict=False))
            has_masters = any(one is not None for one in masters.values())
            return weights, states, self._own_of(path, masters, self._weights.trained) if has_masters else weights

        self._together(lambda: trainer_checkpoint.verify(Path(path)) if self._is_first else None)
        weights, states, exact = self._together(read_own)
        self.discard()
        with torch.no_grad():
            for name, parameter in self._weights.own.items():
                parameter.copy_(weights[name])
        self._parts.client.moments, self._parts.client.num_steps = {}, {}
        for recipe, num_steps, both in states:
            self._parts.set_moments(recipe, num_steps, both)
        self._parts.set_masters(exact)

    def _own_of(self, path: str, found: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of these parameters, float32, from a mark, a whole tensor or nothing (zeros) for a module's tensor."""
        whole = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        marks = {name: trainer_checkpoint.name_in_parts(value) for name, value in found.items()}
        wanted = {name: Pieces(shape) for name, shape in self._held_shapes.items() if marks.get(name)}
        own: dict[str, list[Tensor]] = {}
        for name, parameter in parameters.items():
            own[name] = []
            for module, start, piece in self._located(name, parameter.detach().to("meta")):
                buffer = torch.zeros(piece.shape)
                if module in wanted:
                    wanted[module].add(start, buffer)
                elif module in whole:
                    size = [1] * (len(start) - piece.ndim) + list(piece.shape)
                    held = whole[module][tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))]
                    buffer.copy_(held.reshape(piece.shape))
                own[name].append(buffer)
        trainer_checkpoint.read_pieces(path, {marks[name]: pieces for name, pieces in wanted.items()})
        return {name: self._weights.joined(name, own[name], parameter.shape) for name, parameter in parameters.items()}

    def _load_whole(self, path: str) -> None:
        def read_whole() -> tuple[dict[str, Tensor], dict[str, Any]]:
            return trainer_checkpoint.read_weights(path, self._source, self._shapes), trainer_checkpoint.read_state(path, "cpu")

        weights, state = self._together(read_whole)
        states = self._together(lambda: [unpacked_state(saved, len(self._trained)) for saved in state["optimizers"]])
        self.discard()
        self._weights.load(self._views(weights), is_all=self._source.lora is None)
        self._parts.client.moments, self._parts.client.num_steps = {}, {}
        for recipe, count, moments in states:
            zeros = {name: torch.zeros(shape) for name, shape in self._trained.items()}
            both = []
            for which in (0, 1):
                known = {name: pair[which] for name, pair in zip(self._trained, moments, strict=True) if pair is not None}
                both.append(dict(self._weights.local(self._views(zeros | known))))
            self._parts.set_moments(recipe, count, both)
        masters = [master for master in state.get("masters", []) if master is not None]
        exact = dict(zip(self._trained, masters, strict=True)) if masters else weights
        self._parts.set_masters(dict(self._weights.local(self._views(exact))))

    # The device

    def onload(self) -> None:
        self.onload_states()

    def offload(self) -> None:
        if torch.device(self._settings.device).type != "cpu":
            self.offload_states()

    def offload_states(self) -> None:
        """Move weights, gradients and the optimiser's states to the memory of the host, whatever the device is. States that are kept there
        stay as they are.

        Storages are emptied and not replaced, since the library's buffers and views of them are all over the place."""
        assert self._built is not None
        if self._away:
            return
        tensors = [*self._built.parameters.values(), *(() if self._options.offload_optimizer else self._parts.tensors())]
        for buffer in self._built.buffers:
            tensors += [one for one in (buffer.param_data, buffer.grad_data) if one is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
        for storage in storages.values():
            held = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._away.append((storage, held.to("cpu", copy=True)))
        for storage, _ in self._away:
            storage.resize_(0)
        empty_cache(self._settings.device)

    def onload_states(self) -> None:
        """Undo `offload_states`."""
        for storage, values in self._away:
            storage.resize_(values.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(values)
        self._away.clear()

    def memory(self) -> Memory:
        if self._built is None or self._away:
            return Memory()
        device, buffers = self._settings.device, self._built.buffers
        return Memory(
            weights=bytes_on(device, self._built.parameters.values()),
            gradients=bytes_on(device, (buffer.grad_data for buffer in buffers)),
            optimizer=bytes_on(device, self._parts.tensors()),
        )
