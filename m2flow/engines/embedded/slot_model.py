"""Run a Hugging Face causal language model on a slot cache: prefill, decode (on a GPU by CUDA graphs), weights or adapters in and out.

A `SlotModel` is built only if it computes the same as the model's own code: it passes the probe of every engine at the start
(`m2flow.engines.models.model_probe`), and what slots can't do (recurrent layers, masks other than windows and chunks, rotary tables that
change with the batch) is refused by name.

    base, kept in the host's memory --+ scale B A--> the module's weights, layer by layer      (`MergedAdapters`)

Each version of adapters is added to the base itself, never to the last sum, so errors do not accumulate: the weights are bit by bit those
that the trainer would have sent merged, if both multiply alike. This costs a second copy of the adapted layers in the host's memory, and
nothing in a forward pass. peft is not needed here. Limit: adapters of linear layers, as `m2flow.engines.models.lora` makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from m2flow.engines.contract import bytes_on
from m2flow.engines.embedded.kv_slots import ATTENTION_NAME, DecodePass, DevicePass, PrefillPass, SlotCache, SlotPass, slot_attention
from m2flow.engines.models import lora
from m2flow.engines.models.hf_model import checkpoint_tensors, hold_in, load_model, num_experts
from m2flow.engines.models.model_probe import NUM_JUDGED, Probe, longest_sequence
from m2flow.engines.models.packing import LEAVE_OUT, exact_linear
from m2flow.engines.models.routing import Routers
from m2flow.engines.models.trainer_checkpoint import named_weights
from m2flow.errors import EngineError, is_out_of_memory
from m2flow.recipe import Lora, Model
from m2flow.samples import compact_experts


@final
class MergedAdapters:
    """A module's base weights, and the adapters that are merged into them now.

    Args:
        module: as it was loaded: its weights are the base.
    """

    def __init__(self, module: Any, recipe: Lora) -> None:
        self._module = module
        self._scale = recipe.alpha / recipe.rank
        self._base: dict[str, Tensor] = {}
        """By the module's names: those of layers that adapters have come for."""
        self._held: dict[str, Tensor] = {}

    def add(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Merge adapters, given by the names of peft's files; each tensor need be valid only until the next is taken.

        Raises:
            EngineError: they are of other layers than the module has, or not of those of the time before; nothing has changed then.
        """
        came = {name: torch.tensor(given) if not isinstance(given, Tensor) else given.detach().cpu().clone() for name, given in tensors}
        layers = self._layers(came)
        if self._held and came.keys() != self._held.keys():
            changed = sorted(came.keys() ^ self._held.keys())
            raise EngineError(f"adapters of other layers came than before: {', '.join(changed[:4])}")
        with torch.no_grad():
            for stem, (b, a) in layers.items():
                layer = self._module.get_submodule(stem)
                if f"{stem}.weight" not in self._base:
                    self._base[f"{stem}.weight"] = _host_copy(layer.weight)
                base = self._base[f"{stem}.weight"]
                delta = lora.addend(b.to(layer.weight.device), a.to(layer.weight.device), self._scale, is_transposed=_is_transposed(layer))
                layer.weight.copy_(base.to(layer.weight.device) + delta)
        self._held = came

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters that are merged now, by the names of peft's files."""
        return iter(self._held.items())

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights without adapters, by checkpoints' names; of tied ones the first."""
        for name, tensor in lora.whole_state(self._module):
            yield from checkpoint_tensors(self._module, name, self._base.get(name, tensor).detach())

    def _layers(self, came: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer -> its B and A."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, b in came.items():
            if (stem := lora.layer_of(name, "B")) and (other := lora.file_name_of(stem, "A")) in came:
                found[stem] = b, came[other]
        known = dict(self._module.named_modules())
        if 2 * len(found) != len(came) or not came:
            raise EngineError(f"these are no adapters, in pairs: {', '.join(sorted(came)[:4]) or 'nothing came'}")
        for stem, (b, a) in found.items():
            weight = getattr(known.get(stem), "weight", None)
            shape = (b.shape[0], a.shape[1])[:: -1 if _is_transposed(known.get(stem)) else 1]
            if weight is None or weight.shape != shape or b.shape[1] != a.shape[0]:
                held = "no such layer" if weight is None else f"{list(weight.shape)} there"
                raise EngineError(
                    f"an adapter {list(b.shape)} x {list(a.shape)} came for {stem}, and the model has {held}",
                    now="Do trainer and rollout engine load the same model?",
                )
        return found


def _host_copy(weight: Tensor) -> Tensor:
    """Copy a weight to the host's memory; pinned for a GPU, since every version copies it back."""
    return weight.detach().cpu().pin_memory() if weight.is_cuda else weight.detach().clone()


def _is_transposed(layer: Any) -> bool:
    """Whether a layer stores its weights as [inputs, outputs], as GPT-2's do."""
    return isinstance(layer, Conv1D)


transformers.AttentionInterface.register(ATTENTION_NAME, slot_attention)

_WORTH_A_GRAPH = 4
"""Passes of a number of rows, without a larger graph, after which a graph of it saves more than capturing it costs."""
_WORTH_A_SMALLER = 32
"""The same where a larger graph, of twice as many rows at most, does."""


def rounded_rows(num_rows: int) -> int:
    """The rows of a graph for so many: a power of two up to 8, a multiple of 8 up to 64, of 32 beyond.

    >>> [rounded_rows(n) for n in (1, 3, 9, 64, 65, 130)]
    [1, 4, 16, 64, 96, 160]
    """
    if num_rows <= 8:
        return int(1 << (num_rows - 1).bit_length())
    step = 8 if num_rows <= 64 else 32
    return -(-num_rows // step) * step


class Capture(Protocol):
    """A pass that was recorded: `replay` runs it on what its inputs hold then, and fills `logits` [rows, V]."""

    logits: Tensor

    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], Tensor]], Capture]


@final
class DecodeGraphs:
    """Graphs of the decode passes over one cache, by their number of rows.

    A pass is hundreds of small kernels, which Python starts more slowly than a GPU runs them; a graph starts all of them at once. Rows are
    rounded up: further ones write to slots that nobody has, whose contents mean nothing. A graph is captured when a number of rows was
    asked for often enough, so that an engine that takes turns with others on its GPU pays for few.

    Args:
        run: computes the logits [rows, V] of tokens [rows], by a pass over the cache.
        captures: opens what records calls of functions on the device, whose records share memory; again when all records are forgotten.
    Source:
        CUDA graphs of decode steps, padded to fixed batch sizes, are vLLM's and SGLang's; capturing them as they are needed is ours.
    """

    def __init__(self, device: str, run: Callable[[Tensor, DevicePass], Tensor], captures: Callable[[], Recorder]) -> None:
        self._device = device
        self._run = run
        self._captures = captures
        self._capture: Recorder | None = None
        self._of: tuple[SlotCache, int] | None = None
        self._inputs = self._staged = torch.zeros(2, 0, dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None
        """After the last copy of the staged inputs to a GPU."""
        self._graphs: dict[int, Capture] = {}
        self._asked: dict[int, int] = {}

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that there are graphs for."""
        return sorted(self._graphs)

    def clear(self) -> None:
        """Forget all graphs, and free the memory that they hold."""
        self._of = None
        self._capture = None
        self._graphs.clear()
        self._asked.clear()

    def decode(self, cache: SlotCache, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Tensor:
        """Return the logits [B, V], which the next call overwrites."""
        if self._of is None or self._of[0] is not cache or self._of[1] != cache.generation:
            self.clear()
            self._of = cache, cache.generation
        num_rows = len(tokens)
        self._take(tokens, positions, max(cache.num_slots, rounded_rows(num_rows)))
        size = self._size_for(num_rows, cache.num_slots)
        if size is None:
            return self._pass(cache, num_rows, int(positions.max()) + 1)
        if size not in self._graphs:
            if self._capture is None:
                self._capture = self._captures()
            self._graphs[size] = self._capture(lambda: self._pass(cache, size, cache.length))
        self._graphs[size].replay()
        return self._graphs[size].logits[:num_rows]

    def _size_for(self, num_rows: int, num_slots: int) -> int | None:
        """The rows of the graph to use, which may not be there yet; None: none is worth it now."""
        own = min(rounded_rows(num_rows), num_slots)
        if own in self._graphs:
            return own
        self._asked[own] = self._asked.get(own, 0) + 1
        larger = min((size for size in self._graphs if num_rows <= size <= 2 * own), default=None)
        if self._asked[own] > (_WORTH_A_GRAPH if larger is None else _WORTH_A_SMALLER):
            return own
        return larger

    def _pass(self, cache: SlotCache, num_rows: int, seen: int) -> Tensor:
        return self._run(self._inputs[0, :num_rows], DevicePass(cache, self._inputs[1, :num_rows], seen))

    def _take(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], capacity: int) -> None:
        """Put tokens and positions where graphs read them; further rows read token 0 at position 0."""
        with torch.inference_mode():
            if self._inputs.shape[1] < capacity:
                self._graphs.clear()  # They read the old ones.
                self._capture = None
                self._inputs = torch.zeros(2, capacity, dtype=torch.int64, device=self._device)
                self._staged = torch.zeros(2, capacity, dtype=torch.int64, pin_memory=self._inputs.is_cuda)
            if self._copied is not None:
                self._copied.synchronize()  # Of passes one after the other, whose tokens nobody has read between, the last may wait yet.
            self._staged.zero_()
            self._staged[0, : len(tokens)] = torch.from_numpy(tokens)
            self._staged[1, : len(tokens)] = torch.from_numpy(positions)
            self._inputs.copy_(self._staged, non_blocking=True)
            if self._inputs.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(self._inputs.device))


@final
class CudaCapture:
    """A CUDA graph of a function's kernels.

    Args:
        pool: memory that graphs which never run at once share. It is gone with the last of them.
        side: the stream to capture on, the same for all: cuBLAS keeps a workspace of tens of megabytes for each stream that it was used on.
    Raises:
        RuntimeError: the function needs the host, or it runs out of memory.
    """

    def __init__(self, run: Callable[[], Tensor], pool: tuple[int, int], side: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.inference_mode(), torch.cuda.stream(side):
            run()  # Libraries set themselves up at the first call, which a capture does not allow.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.logits = run()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream(side.device).wait_stream(side)

    def replay(self) -> None:
        self._graph.replay()


def cuda_captures(device: str) -> Callable[[], Recorder]:
    """What opens recorders of CUDA graphs on a device."""

    def captures() -> Recorder:
        pool, side = torch.cuda.graph_pool_handle(), _capture_stream(torch.device(device).index or 0)
        return lambda run: CudaCapture(run, pool, side)

    return captures


@functools.cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


@final
class SlotModel:
    """A model with forward passes over a slot cache."""

    def __init__(self, module: Any, device: str, max_context: int | None, recipe: Lora | None = None) -> None:
        self._module = module
        self._recipe = recipe
        self._added = MergedAdapters(module, recipe) if recipe is not None else None
        """None: the weights are not those that adapters were trained beside."""
        self._device = device
        text_config = module.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        own_context = getattr(text_config, "max_position_embeddings", None) or 1 << 20
        self.max_context: int = min(own_context, max_context or own_context)
        self.is_mixture = num_experts(text_config) > 0
        self.num_weights: int = sum(parameter.numel() for parameter in module.parameters())
        self.kv_bytes_per_token = 0
        self._routers: Routers | None = None
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def load(cls, model: Model, device: str, max_context: int | None, *, graphs: bool = False) -> SlotModel:
        """Load a model. Raises `ModelError` for a broken directory, `EngineError` for a model that slots can't serve.

        Args:
            graphs: decode by CUDA graphs, if the device is a GPU and the model's passes do not depend on what is in them, as those of a
                mixture of experts do.
        """
        module = load_model(model, device=device, attention="eager")
        if model.rollout_dtype is not None:
            hold_in(module, model.rollout_dtype)
        loaded = cls(module, device, max_context, model.lora)
        if graphs and device != "cpu" and not loaded.is_mixture:
            loaded._graphs = DecodeGraphs(device, loaded._run_on_device, cuda_captures(device))
        loaded._check()
        if model.routing == "rollout":
            loaded._record_routing()
        return loaded

    @property
    def has_graphs(self) -> bool:
        """Whether decode passes are recorded as graphs, which are the quicker the less often the cache grows."""
        return self._graphs is not None

    def drop_graphs(self) -> None:
        """Free the memory of the graphs. They come again when passes do."""
        if self._graphs is not None:
            self._graphs.clear()

    def _record_routing(self) -> None:
        cache = SlotCache()
        cache.reserve(1, 8)
        self._routers = Routers(self._module)
        tokens = np.arange(8, dtype=np.int32) % self.vocab_size
        self._routers.check(lambda: self.prefill(cache, [tokens], 0, [0]).clone())

    @property
    def records_routing(self) -> bool:
        return self._routers is not None

    def routed(self) -> npt.NDArray[np.int16] | npt.NDArray[np.uint8]:
        """The experts of the tokens of the last pass, [tokens, layers, k], as `m2flow.samples.compact_experts` has them."""
        assert self._routers is not None
        return compact_experts(self._routers.chosen().cpu().numpy().astype(np.int16), self._routers.num_experts)

    def unknown_routing(self, num_tokens: int) -> npt.NDArray[np.int16] | npt.NDArray[np.uint8]:
        """The same for tokens of which nothing is known."""
        assert self._routers is not None
        shape = num_tokens, self._routers.num, self._routers.num_of_token
        return compact_experts(np.full(shape, -1, np.int16), self._routers.num_experts)

    def prefill(
        self, cache: SlotCache, sequences: Sequence[npt.NDArray[np.int32]], first_slot: int, sequence_of_slot: Sequence[int]
    ) -> Tensor:
        """Prefill slots from `first_slot` on; returns the logits after each sequence, [P, V]."""
        lengths = [len(sequence) for sequence in sequences]
        positions = np.concatenate([np.arange(length) for length in lengths])
        last = np.cumsum(lengths) - 1
        into = PrefillPass(cache, lengths, first_slot, sequence_of_slot, self._device)
        return self._forward(np.concatenate(sequences).astype(np.int64), positions, into, torch.from_numpy(last).to(self._device))

    def decode(self, cache: SlotCache, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Tensor:
        """Process one token for each of the slots 0..B-1; returns the logits after it, [B, V], until the next call."""
        if self._device == "cpu":
            return self._forward(tokens, positions, DecodePass(cache, positions), 0)
        if self._graphs is not None:
            try:
                return self._graphs.decode(cache, tokens, positions)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                print(f"decoding goes on without CUDA graphs, which this model's pass can't be: {error}", flush=True)
                self._graphs = None
        into = DevicePass(cache, torch.from_numpy(positions).to(self._device), int(positions.max()) + 1)
        return self._run_on_device(torch.from_numpy(tokens).to(self._device), into)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Compute log-probabilities of each token but the first. Half of each sequence is prefilled, the rest decoded token by token, in a
        cache of its own, so that both ways through the model are exercised."""
        rows = [np.asarray(sequence, np.int32) for sequence in sequences]
        heads = [max(1, len(row) // 2) for row in rows]
        cache = SlotCache()
        cache.reserve(len(rows), max(map(len, rows)))
        found = [np.zeros(len(row) - 1, np.float32) for row in rows]

        def note(logits_BV: Tensor, read: Sequence[int]) -> None:
            logprobs = logits_BV.float().log_softmax(-1)
            for slot, (row, count) in enumerate(zip(rows, read, strict=True)):
                if count < len(row):
                    found[slot][count - 1] = float(logprobs[slot, int(row[count])])

        into = PrefillPass(cache, heads, 0, range(len(rows)), self._device)
        positions = np.concatenate([np.arange(head) for head in heads])
        tokens = np.concatenate([row[:head] for row, head in zip(rows, heads, strict=True)]).astype(np.int64)
        logits = self._forward(tokens, positions, into, torch.arange(len(tokens), device=self._device)).float().log_softmax(-1)
        start = 0
        for slot, (row, head) in enumerate(zip(rows, heads, strict=True)):
            of_next = torch.from_numpy(row[1:head].astype(np.int64)).to(self._device)[:, None]
            found[slot][: head - 1] = logits[start : start + head - 1].gather(1, of_next)[:, 0].cpu().numpy()
            start += head
        last = torch.tensor(np.cumsum(heads) - 1, device=self._device)
        note(logits[last], heads)
        for turn in range(max(len(row) - head for row, head in zip(rows, heads, strict=True)) - 1):
            # Who is at its end reads its last token again, for nothing.
            read = [min(head + turn, len(row) - 1) for row, head in zip(rows, heads, strict=True)]
            step = np.array([int(row[at]) for row, at in zip(rows, read, strict=True)], np.int64)
            note(self.decode(cache, step, np.array(read, np.int64)), [at + 1 for at in read])
        return found

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers by checkpoints' names; tied ones once."""
        return named_weights(self._module)

    def load_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy weights in. Raises `EngineError` that names what is missing, unknown or of another shape; the weights are a mixture then."""
        self._added = None
        held = {
            each: part
            for name, tensor in self._module.state_dict(keep_vars=True).items()
            for each, part in checkpoint_tensors(self._module, name, tensor.detach())
        }
        missing = {name for name, _ in self.weights()}
        unknown: list[str] = []
        with torch.no_grad():
            for name, given in tensors:
                if name not in held:
                    unknown.append(name)
                    continue
                tensor = given if isinstance(given, Tensor) else torch.tensor(given)
                if tensor.shape != held[name].shape:
                    raise EngineError(f"weight {name} is {list(tensor.shape)}; the model has {list(held[name].shape)}")
                held[name].copy_(tensor)
                missing.discard(name)
        if unknown or missing:
            raise EngineError(
                f"the weights are not this model's: missing {_some(sorted(missing))}, unknown {_some(unknown)}",
                now="Do trainer and rollout engine load the same model?",
            )

    def compute_exact_logits(self) -> None:
        """Compute logits in float32 from now on, from hidden states and weights of any type.

        Raises:
            EngineError: the model's head is no plain layer.
        """
        layer = self._module.get_output_embeddings()
        if type(layer) is not torch.nn.Linear:
            raise EngineError(f"the head of a {self._module.config.model_type!r} model is a {type(layer).__name__}", now=LEAVE_OUT)
        layer.forward = lambda hidden: exact_linear(hidden, layer.weight, layer.bias)

    @property
    def added(self) -> MergedAdapters:
        """The merged adapters. Raises `EngineError`: the model has none, or a whole set of weights was loaded since."""
        if self._added is None:
            why = "other weights were loaded since" if self._recipe is not None else "the model has none"
            raise EngineError(f"adapters can't be added to these weights: {why}")
        return self._added

    def bytes_on(self, device: str) -> int:
        """Bytes of its weights on a device."""
        return bytes_on(device, [*self._module.parameters(), *self._module.buffers()])

    def to(self, device: str) -> None:
        self.drop_graphs()  # They read the weights where these are.
        self._module.to(device)

    def _forward(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], into: SlotPass, keep: Tensor | int) -> Tensor:
        return self._run(torch.from_numpy(tokens).to(self._device), torch.from_numpy(positions).to(self._device), into, keep)

    def _run_on_device(self, tokens: Tensor, into: DevicePass) -> Tensor:
        return self._run(tokens, into.positions, into, 0)

    def _run(self, tokens: Tensor, positions: Tensor, into: SlotPass, keep: Tensor | int) -> Tensor:
        with torch.inference_mode():
            output = self._module(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep,
                slot_pass=into,
            )
            logits: Tensor = output.logits[0]
        num_asked = len(keep) if isinstance(keep, Tensor) else len(tokens)
        if len(logits) != num_asked:
            raise EngineError(f"{type(self._module).__name__} gives {len(logits)} rows of logits where {num_asked} were asked for")
        return logits

    def _check(self) -> None:
        module, kind = self._module, type(self._module).__name__
        longest, rope = longest_sequence(module.config)
        if rope and self.max_context > longest:
            raise EngineError(
                f"{kind} has {rope} rotary embeddings, which change with the longest sequence of a batch",
                now=f"Set the engine's option `max_context` to {longest} or less." if longest else "",
            )
        probe = Probe(module, "the embedded engine", self.max_context, lambda tokens: module(input_ids=tokens, use_cache=False).logits)
        cache = SlotCache()
        layers = [attention.layer_idx for attention in probe.attentions]
        with probe.explained():
            if len(set(layers)) < len(layers):
                raise EngineError("it calls an attention twice in a pass, and a slot has one place for its keys and values")
            module.set_attn_implementation(ATTENTION_NAME)
            probe.judge(self._read(cache, probe.sequences))
            num_layers = module.config.get_text_config().num_hidden_layers
            if cache.num_layers != num_layers:
                raise EngineError(
                    f"{cache.num_layers} of its {num_layers} layers are attention",
                    now="Layers with a state of their own need another engine.",
                )
        self.kv_bytes_per_token = cache.bytes_per_token

    def _read(self, cache: SlotCache, sequences: Sequence[npt.NDArray[np.int32]]) -> list[Tensor]:
        """Logits after the last tokens of each sequence, [NUM_JUDGED, V]: all but the last tokens are prefilled together, these decoded."""
        cache.reserve(len(sequences), max(map(len, sequences)))
        heads = np.array([len(sequence) - NUM_JUDGED + 1 for sequence in sequences], np.int64)
        prompts = [sequence[:head] for sequence, head in zip(sequences, heads.tolist(), strict=True)]
        found = [self.prefill(cache, prompts, 0, range(len(prompts)))]
        for turn in range(NUM_JUDGED - 1):
            tokens = np.array([sequence[head + turn] for sequence, head in zip(sequences, heads.tolist(), strict=True)], np.int64)
            found.append(self.decode(cache, tokens, heads + turn))
        return list(torch.stack(found, 1))


def _some(names: Sequence[str]) -> str:
    return "nothing" if not names else ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
