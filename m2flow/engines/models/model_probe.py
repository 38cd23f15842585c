"""Learn what a transformers model asks of its attention, and probe every engine that runs one before its first batch.

    model, loaded eager --learn--> of each attention: all earlier tokens, a sliding window, or a chunk    (`reach_of`)
                        --plain--> logits of a few sequences, each alone, by transformers' own code       (`ModelProbe`)
    the same sequences, several in one pass, by the engine --judge--> equal, or `EngineError`

A mask is not guessed from names in a config: the model builds one, once, with transformers' mask functions, and it is compared position by
position with a window and with a chunk of that size; anything else is refused. So an engine's attention needs one number
of a layer, and computes its own mask from positions.

The probe goes beyond windows of up to 128 tokens. A longer window is verified by that comparison, and one that the config names and no
layer has shown is refused.

Limits:
    layers: those other than attention are refused (Mamba, LFM2, Qwen3-Next), as is code without transformers' `AttentionInterface` (Bloom,
        MPT, GPT-J).
    masks: full causal attention, sliding windows and chunks; others are refused. Keys outside a window stay in the cache. Soft caps and
        sinks keep attention scores in memory.
    positions: counted from 0 (not RoBERTa's), for each sequence alone: Llama 4 needs `attn_temperature_tuning` false in its `config.json`,
        which changes nothing in contexts below `floor_scale`.
    rotary embeddings: those that change with the longest sequence of a batch (`longrope`, `dynamic`) are refused beyond the length where
        they begin to: set `max_context` for rollout; a trainer refuses longer samples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from m2flow.errors import EngineError, is_out_of_memory

# Shapes: S sequences, H query heads, K heads of keys and values, Q queries, L keys, D size of a head, V vocabulary.

NUM_JUDGED = 4
"""Number of last tokens of each sequence whose logits are compared."""

_ASKING = "m2flow_asking"
_REACH = "m2flow_reach"
_LONGEST_REACH = 128
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.3}
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_SIZE_NAMES = re.compile(r"(^|_)window(_|$)|^attention_chunk_size$|^local_attention$")
_PLAIN_ARGUMENTS = frozenset(
    {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "logits_to_keep", "sliding_window"}
)


@dataclass(frozen=True)
class Reach:
    """Which earlier tokens an attention sees: a sliding window that ends at the token, or the chunk that the token is in."""

    kind: Literal["window", "chunk"]
    size: int
    """In tokens; a window's counts the token itself."""

    def first_seen(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first position that a query at each of these sees; all from there to its own are seen."""
        if self.kind == "chunk":
            return positions // self.size * self.size
        return np.maximum(positions - self.size + 1, 0)

    def visible(self, length: int, device: str | torch.device) -> Tensor:
        """For a whole sequence: bool [length, length], True where a query (row) sees a key."""
        positions = np.arange(length)
        is_seen = (positions <= positions[:, None]) & (positions >= self.first_seen(positions)[:, None])
        return torch.from_numpy(is_seen).to(device)


@dataclass(frozen=True, eq=False)
class Scoring:
    """What an attention does with its scores beyond a plain softmax: scale, soft cap, sinks."""

    scaling: float
    reach: Reach | None = None
    """None: all earlier tokens are seen."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    sinks: Tensor | None = None
    """[H]: one more score of each head, whose share of the softmax goes nowhere."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's `scaled_dot_product_attention` computes it."""
        return self.softcap is None and self.sinks is None

    def reach_within(self, length: int) -> Reach | None:
        """The reach, or None where no sequence of this length exceeds it."""
        return None if self.reach is None or length <= self.reach.size else self.reach


def reach_of(module: Any, sliding_window: int | None = None) -> Reach | None:
    """Return what `learn` found of an attention module. Raises `EngineError` if it has not seen the module, and it asks for a window."""
    if not hasattr(module, _REACH) and sliding_window is not None:
        raise EngineError(f"{type(module).__name__} asks for a sliding window of {sliding_window} tokens only now")
    return getattr(module, _REACH, None)


def scoring_of(
    module: Any, query: Tensor, attention_mask: Tensor | None, scaling: float | None, arguments: Mapping[str, object]
) -> Scoring:
    """Read what a model asks of a registered attention function. Raises `EngineError` naming what no engine here computes."""
    kind = type(module).__name__
    if attention_mask is not None:
        raise EngineError(f"{kind} wants an attention mask of its own")
    if arguments.get("is_causal") is False:
        raise EngineError(f"{kind} sees later tokens, as an encoder does")
    known = _PLAIN_ARGUMENTS | {"softcap", "s_aux"}
    asked = sorted(name for name, value in arguments.items() if name not in known and value is not None and value is not False)
    if asked:
        raise EngineError(f"{kind} asks its attention for {', '.join(asked)}, which the embedded engines do not compute")
    if arguments.get("dropout"):
        raise EngineError(f"{kind} asks its attention for dropout")
    return Scoring(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        reach=reach_of(module, cast("int | None", arguments.get("sliding_window"))),
        softcap=cast("float | None", arguments.get("softcap")),
        sinks=cast("Tensor | None", arguments.get("s_aux")),
    )


def explicit_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scoring: Scoring) -> Tensor:
    """Attention with its scores in memory, for what torch's fused one can't do: query [S, H, Q, D], key and value [S, K, L, D] ->
    [S, H, Q, D]. `visible` is bool and broadcasts to [S, 1, Q, L]; None: all. Softmax in float32."""
    num_heads = key.shape[1]
    grouped = query.unflatten(1, (num_heads, -1))  # [S, K, H / K, Q, D]
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(3, 4)) * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.float()
    if visible is not None:
        scores = scores.masked_fill(~(visible if visible.dim() == 2 else visible.unsqueeze(1)), float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(1, num_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights.to(value.dtype), value.unsqueeze(2)).flatten(1, 2)


def longest_sequence(config: Any) -> tuple[int, str]:
    """Tokens of a sequence up to which a model's rotary embeddings depend on its own positions alone, and the kind of those that change
    with the longest sequence of a batch beyond; the kind is empty for a model that has none such, whose limit is that of its context.

    0 tokens: any batch would change them.
    """
    text_config = config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or 1 << 20
    rope = getattr(text_config, "rope_parameters", None) or {}
    of_types = [rope, *(of_type for of_type in rope.values() if isinstance(of_type, Mapping))]
    for parameters in of_types:
        if (kind := parameters.get("rope_type")) in _BATCH_DEPENDENT_ROPE:
            original = parameters.get("original_max_position_embeddings") or getattr(text_config, "original_max_position_embeddings", None)
            return min(original or 0, context), str(kind)
    return context, ""


_KNOWN: set[tuple[object, ...]] = set()
"""Kinds of models that were judged in this process."""


@final
class ModelProbe:
    """A few sequences with the logits of transformers' own code for each alone. Prepares the model for a registered attention.

    Args:
        model: in eval mode, loaded with attention `eager`; its attentions learn their reach.
        plain: the numbers of one sequence int64 [1, L] that are compared, [1, L, V]; of a causal language model its logits.
        max_context: tokens of the longest sequence that there will be.
        what: a word for what `plain` gives.
    Raises:
        EngineError: the model has what no engine here computes, by name.
    """

    def __init__(self, model: Any, engine: str, max_context: int, plain: Callable[[Tensor], Tensor], what: str = "lm") -> None:
        self._model = model
        self._who = f"{engine} can't run {type(model).__name__}"
        config = model.config.get_text_config()
        self._refuse_by_config(config)
        kinds, dtype = frozenset(map(type, model.modules())), next(model.parameters()).dtype
        self._kind = engine, what, max_context, kinds, dtype, json.dumps(model.config.to_dict(), sort_keys=True, default=str)
        self.is_known = self._kind in _KNOWN
        """Whether this process has judged a model of the same code and config, and `remember` was called then."""
        with self.explained(), torch.no_grad():
            self.attentions = learn(model)
            if self.is_known:
                return
            sizes = [*{reach.size for module in self.attentions if (reach := reach_of(module)) is not None}]
            sizes += self._unseen(config, sizes, max_context)
            self.sequences = _sequences(config, sizes, max_context)
            self.wanted = [plain(self._row(sequence))[0, -NUM_JUDGED:].clone() for sequence in self.sequences]

    def explained(self) -> _Explained:
        """Turn errors of an engine's passes over a model into an `EngineError` that names the model."""
        return _Explained(self._who)

    def judge(self, computed: Sequence[Tensor]) -> None:
        """Compare the same numbers by an engine, [NUM_JUDGED, V] of each sequence. Raises `EngineError`: they differ.

        In float32 every number must agree. In half precision an expert may be chosen otherwise for a token: of a sequence the median
        must agree.
        """
        worst = 0.0
        for ours, theirs in zip(computed, self.wanted, strict=True):
            gaps = (ours.float() - theirs.float()).abs().amax(-1) / theirs.float().abs().amax(-1).clamp(min=1e-6)
            gap = float(gaps.max() if theirs.dtype == torch.float32 else gaps.median())
            worst = gap if not gap <= worst else worst  # NaN is worse than anything.
        if not worst <= _TOLERANCE[self.wanted[0].dtype]:
            raise EngineError(
                f"{self._who}: of several sequences in one pass, its logits differ by {worst:.2g} (of the largest) from the model's own",
                now="Use another engine for this model.",
            )

    def remember(self) -> None:
        """Have later probes of such models not judge them again."""
        _KNOWN.add(self._kind)

    def _row(self, sequence: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(sequence.astype(np.int64)).to(next(self._model.parameters()).device)[None]

    def _refuse_by_config(self, config: Any) -> None:
        features = []
        if strange := sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES):
            features.append(f"layers of type {', '.join(strange)}, which see neither all earlier tokens, nor a window, nor a chunk")
        if getattr(self._model.config, "is_encoder_decoder", False):
            features.append("an encoder beside its decoder")
        if getattr(config, "alibi", False):
            features.append("position biases (alibi)")
        if getattr(config, "attn_temperature_tuning", False) and 0 in (getattr(config, "no_rope_layers", None) or ()):
            raise EngineError(
                f"{self._who}: its attn_temperature_tuning takes rows of a batch for positions",
                now=f"For contexts below {getattr(config, 'floor_scale', 0)} tokens it changes nothing: set it to false in config.json.",
            )
        if features:
            raise EngineError(f"{self._who}: it has {' and '.join(features)}", now="Use another engine for this model.")

    def _unseen(self, config: Any, seen: Sequence[int], max_context: int) -> list[int]:
        """Sizes that the config names and no mask has shown, for the probe to go beyond. Raises `EngineError` for one that is too long."""
        unseen = {name: size for name, size in _named_sizes(config) if size < max_context and size not in seen}
        for name, size in unseen.items():
            if size > _LONGEST_REACH:
                raise EngineError(
                    f"{self._who}: its config says {name}={size}, and no layer's mask has shown it",
                    now=f"Set the engine's option `max_context` to {size} or less, or use another engine for this model.",
                )
        return list(unseen.values())


@final
class _Explained:
    """A context that turns errors of transformers' code into errors that name the model."""

    def __init__(self, who: str) -> None:
        self._who = who

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, EngineError):
            now = error.now or "Use another engine for this model."
            raise (error if error.what.startswith(self._who) else EngineError(f"{self._who}: {error.what}", now=now)) from error
        known = (TypeError, AttributeError, RuntimeError, ValueError, KeyError, IndexError, NotImplementedError, AssertionError)
        if isinstance(error, known) and not is_out_of_memory(error):
            what = (str(error).strip().splitlines() or [""])[0][:300]
            raise EngineError(f"{self._who}: {type(error).__name__}: {what}", now="Use another engine for this model.") from error


def learn(model: Any) -> list[Any]:
    """Ask each attention of a model for its mask, by a pass over a few tokens, and note on it what it sees.

    Returns:
        The modules in the order of their calls, one that is called twice twice; `reach_of` knows them now. The model is left with
        attention `eager`.
    Raises:
        EngineError: a mask is neither causal, nor a window's, nor a chunk's; or the model's code has an attention of its own.
    """
    asked: list[Any] = []
    model.set_attn_implementation(_ASKING)
    try:
        tokens = torch.arange(2, 2 + _NUM_ASKING, device=next(model.parameters()).device)[None] % model.config.get_text_config().vocab_size
        model.base_model(input_ids=tokens, use_cache=False, m2flow_asked=asked)
    finally:
        model.set_attn_implementation("eager")
    if not asked:
        raise EngineError("its modelling code has no exchangeable attention (AttentionInterface)")
    return asked


_NUM_ASKING = 3
_FULL = "all"


def _asking_mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **arguments: Any) -> Tensor:
    """Mask function that a model calls during `learn`: the eager mask, with a note of what it shows."""
    mask = eager_mask(mask_function=mask_function, **arguments)
    if mask is not None:
        setattr(mask, _REACH, _read_mask(mask_function, local_size, arguments.get("device", "cpu")))
    return mask


def _read_mask(mask_function: Callable[..., Tensor], local_size: int | None, device: Any) -> Reach | str:
    """The reach of a mask; `_FULL` for all earlier tokens. Otherwise what is wrong, as the end of a sentence."""
    span = 4 * (local_size or 16) + 3
    edges = np.arange(span) if span <= 512 else np.unique(np.concatenate([np.arange(k * span // 8, k * span // 8 + 40) for k in range(8)]))
    if local_size:
        edges = np.unique(np.concatenate([edges, *(np.arange(max(0, k * local_size - 3), k * local_size + 4) for k in range(5))]))
    rows = torch.from_numpy(edges).to(device)
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    if _reads_tokens(mask_function):
        return "a matter of more than positions"
    shown = mask_function(zero, zero, rows[:, None], rows[None, :]).expand(len(edges), len(edges)).cpu().numpy()
    is_earlier = edges[None] <= edges[:, None]
    if (shown == is_earlier).all():
        return _FULL
    for kind in cast("tuple[Literal['window', 'chunk'], ...]", ("window", "chunk")):
        reach = Reach(kind, local_size or 1)
        if local_size and (shown == (is_earlier & (edges[None] >= reach.first_seen(edges)[:, None]))).all():
            return reach
    return "neither causal, nor a sliding window, nor a chunk"


def _reads_tokens(held: Any) -> bool:
    """Whether a mask function looks something up for each token; at positions beyond those, a GPU would end the process."""
    if isinstance(held, Tensor):
        return bool(held.numel() > 1)
    if isinstance(held, tuple | list):
        return any(map(_reads_tokens, held))
    return any(_reads_tokens(cell.cell_contents) for cell in getattr(held, "__closure__", None) or ())


def _asking_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    m2flow_asked: list[Any] | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention function that a model calls during `learn`: notes what is asked, and returns zeros."""
    kind = type(module).__name__
    if m2flow_asked is None:
        raise EngineError(f"{kind} does not hand keyword arguments on to its attention")
    found = getattr(attention_mask, _REACH, _FULL if attention_mask is None else "of its own making")
    scoring_of(module, query, None, scaling, {**arguments, "sliding_window": None})
    if isinstance(found, str) and found != _FULL:
        raise EngineError(f"{kind} wants an attention mask that is {found}")
    setattr(module, _REACH, None if found == _FULL else found)
    m2flow_asked.append(module)
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(_ASKING, _asking_attention)
AttentionMaskInterface.register(_ASKING, _asking_mask)


def _named_sizes(config: Any) -> Iterator[tuple[str, int]]:
    """Sizes of windows and chunks that a config names and does not switch off."""
    types = getattr(config, "layer_types", None)
    if types and not set(types) - {"full_attention"}:
        return
    if getattr(config, "use_sliding_window", True) is False:
        return
    for name, given in vars(config).items():
        if _SIZE_NAMES.search(name):
            for size in given if isinstance(given, list | tuple) else [given]:
                if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                    yield name, size


def _sequences(config: Any, sizes: Sequence[int], max_context: int) -> list[npt.NDArray[np.int32]]:
    """Token ids: two that have all but their ends in common, short ones, and some that go beyond each size that a pass can afford."""
    short = [size for size in sizes if size <= _LONGEST_REACH]
    longest = max(12, *(2 * size + 3 for size in short)) if short else 12
    lengths = [min(length, max_context) for length in (9, 5, 7, longest, longest - 5)]
    if min(lengths) < NUM_JUDGED:
        raise EngineError(f"a context of {max_context} tokens is too short to try the model", now=f"Allow at least {NUM_JUDGED}.")
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, config.vocab_size, length).astype(np.int32) for length in lengths]
    twin = rows[0].copy()
    twin[-NUM_JUDGED + 1 :] = generator.integers(0, config.vocab_size, NUM_JUDGED - 1)
    return [rows[0], twin, *rows[1:]]
