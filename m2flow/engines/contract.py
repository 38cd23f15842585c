"""The contract of rollout, train and function engines, their capabilities as data, and what they report of themselves.

An engine executes a role's calls inside one worker process. Constructors only assign; `start` loads, `stop` frees. The planner reads
`Capabilities` and never asks for what an engine can't do. The suites in `m2flow.testing` prove an engine to be one.

`Memory` says what an engine holds of its device, counted from the tensors that exist there; what else a process takes are activations.

`Agreement` compares the rollout engine's log-probabilities with the trainer's. Both compute the same function, so a difference is rounding,
another kernel, or a fault (a misplaced weight, a mask), which a policy gradient mistakes for a change of the policy.

Source: the estimator k3 of the divergence is Schulman's, http://joschu.net/blog/kl-approx.html; that rollout and training engines
differ, and what that does: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from m2flow.errors import EngineError, OpError
from m2flow.recipe import Loss, Model, Optimizer, Sampling
from m2flow.samples import Batch, Finish, Message, Prompt, Sample, Segment

# ---- loading


class Loading:
    """How far this process has loaded its models; an engine that can tell keeps `LOADING` up to date, and heartbeats carry it."""

    def __init__(self) -> None:
        self.num_models = 0
        """Models begun so far."""
        self.num_tensors = 0
        """Tensors of the newest one; 0: no model is being loaded."""
        self.num_loaded = 0

    def words(self) -> str:
        """Describe it: `tensor 120 of 290 of model 2`; empty if nothing is being loaded."""
        return f"tensor {self.num_loaded:,} of {self.num_tensors:,} of model {self.num_models}" if self.num_tensors else ""

    def counted(self, tensors: Collection[Any]) -> Iterator[Any]:
        """Pass on a model's tensors while they are loaded, and count them."""
        self.num_models, self.num_loaded, self.num_tensors = self.num_models + 1, 0, len(tensors)
        try:
            for tensor in tensors:
                yield tensor
                self.num_loaded += 1
        finally:
            self.num_tensors = 0


LOADING = Loading()

# ---- memory


@dataclass(frozen=True)
class Memory:
    """Bytes that an engine holds on its device; of a trainer of several ranks, on the first rank's."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Moments, and float32 copies of weights."""
    kv: int = 0
    """Keys and values."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.kv

    def words(self) -> str:
        """Describe the parts, the largest first.

        >>> Memory(weights=3 << 20, kv=5 << 30).words()
        'kv 5.00 GiB, weights 3.00 MiB'
        """
        parts = sorted(((getattr(self, each.name), each.name) for each in fields(self)), reverse=True)
        return ", ".join(f"{name} {size_of(count)}" for count, name in parts if count) or "nothing"


def size_of(num_bytes: float) -> str:
    """Write a size with a binary unit.

    >>> size_of(512), size_of(3 << 20)
    ('512 B', '3.00 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def bytes_on(device: str, tensors: Iterable[Any]) -> int:
    """Add up the bytes of torch tensors on a kind of device; shared memory counts once."""
    kind = device.partition(":")[0]
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        local = _local(tensor)
        if local.device.type == kind and local.numel():
            found[local.data_ptr()] = max(found.get(local.data_ptr(), 0), local.numel() * local.element_size())
    return sum(found.values())


def _local(tensor: Any) -> Any:
    """This rank's part of a DTensor, or of a parameter that DeepSpeed's stage 3 has partitioned."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    part = getattr(tensor, "ds_tensor", None)
    return tensor if part is None or tensor.numel() else part


# ---- agreement of rollout engine and trainer

PREFIX = "rollout_diff/"
"""Prefix of the metrics' names."""
MEAN = f"{PREFIX}mean"
MAX = f"{PREFIX}max"
K3 = f"{PREFIX}k3"


@dataclass(frozen=True)
class Agreement:
    """Difference of log-probabilities as sums over tokens, so that no number depends on how a batch was cut."""

    num_tokens: int = 0
    total: float = 0.0
    """Sum of the absolute differences, in nats."""
    largest: float = 0.0
    total_k3: float = 0.0

    @classmethod
    def of_all(cls, parts: Sequence[Agreement]) -> Agreement:
        """Combine the agreements of parts, in any order."""
        return cls(
            sum(part.num_tokens for part in parts),
            math.fsum(part.total for part in parts),
            max((part.largest for part in parts), default=0.0),
            math.fsum(part.total_k3 for part in parts),
        )

    @property
    def mean(self) -> float:
        """Mean absolute difference of a token, in nats."""
        return self.total / max(self.num_tokens, 1)

    def metrics(self) -> dict[str, float]:
        """Metrics by name; none if no token was compared.

        >>> agreement_of([-1.0, -2.0], [-1.0, -2.5]).metrics()["rollout_diff/mean"]
        0.25
        """
        if not self.num_tokens:
            return {}
        return {MEAN: self.mean, MAX: self.largest, K3: self.total_k3 / self.num_tokens, f"{PREFIX}tokens": float(self.num_tokens)}


NO_AGREEMENT = Agreement()
"""Nothing was compared."""


def agreement_of(trained: npt.ArrayLike, sampled: npt.ArrayLike) -> Agreement:
    """Compare the log-probabilities of tokens that the rollout engine sampled.

        k3 = exp(d) - 1 - d,   d = log p_trainer - log p_rollout:   an estimate of KL(rollout || trainer), never negative

    Args:
        trained: log-probabilities by the trainer, [T]. sampled: by the rollout engine, [T].
    """
    difference = np.asarray(trained, np.float64) - np.asarray(sampled, np.float64)
    if not len(difference):
        return NO_AGREEMENT
    # Beyond 700 exp would be infinite, and so far apart are only engines that have nothing in common.
    k3 = np.expm1(np.minimum(difference, 700.0)) - difference
    absolute = np.abs(difference)
    return Agreement(len(difference), float(absolute.sum()), float(absolute.max()), float(k3.sum()))


RATIO_COUNT = "rollout_ratio_count:"
"""Prefix of the names of counts of tokens by their ratio, which become the metrics of `ratio_quantiles`."""
_STEPS_PER_DECADE = 16
_RATIO_BOUNDS = 10.0 ** (np.arange(-4 * _STEPS_PER_DECADE, 20 + 1) / _STEPS_PER_DECADE)
"""Bounds of buckets of absolute log-ratios, from 1e-4 to 18 nats: each 15 % above the one before."""
_LOG_RATIO_BOUNDS = np.concatenate((-_RATIO_BOUNDS[::-1], _RATIO_BOUNDS))


def ratio_counts(trained: npt.ArrayLike, sampled: npt.ArrayLike) -> dict[str, float]:
    """Count tokens by the log-ratio of their probabilities under trainer and rollout engine: counts of parts of a batch add up.

    Args:
        trained: log-probabilities by the trainer, [T]. sampled: by the rollout engine, [T].
    Returns:
        a count for every bucket, so that all ranks have the same names.
    """
    difference = np.asarray(trained, np.float64) - np.asarray(sampled, np.float64)
    counts = np.bincount(np.searchsorted(_LOG_RATIO_BOUNDS, difference), minlength=len(_LOG_RATIO_BOUNDS) + 1)
    return {f"{RATIO_COUNT}{i}": float(count) for i, count in enumerate(counts.tolist())}


def ratio_quantiles(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute quantiles of tokens' ratios p_trainer / p_rollout from summed `ratio_counts`, the same however the batch was cut.

    The log-ratio of the token that the quantile names is exact to 8 %, and to 1e-4 where it is smaller; beyond 18 nats it is 18.

    Returns:
        `rollout_ratio_p01`, `rollout_ratio_p50` and `rollout_ratio_p99`; none if no token was counted.

    >>> counts = ratio_counts([0.0, 0.0, 0.5], [0.0, 0.0, 0.0])
    >>> {name: round(ratio, 1) for name, ratio in ratio_quantiles(counts).items()}
    {'rollout_ratio_p01': 1.0, 'rollout_ratio_p50': 1.0, 'rollout_ratio_p99': 1.7}
    """
    counts = np.array([sums.get(f"{RATIO_COUNT}{i}", 0.0) for i in range(len(_LOG_RATIO_BOUNDS) + 1)])
    if not counts.sum():
        return {}
    middles = np.sqrt(_RATIO_BOUNDS[:-1] * _RATIO_BOUNDS[1:])
    held = np.concatenate((-_RATIO_BOUNDS[-1:], -middles[::-1], [0.0], middles, _RATIO_BOUNDS[-1:]))
    shares = np.cumsum(counts) / counts.sum()
    wanted = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
    return {f"rollout_ratio_{name}": float(np.exp(held[np.searchsorted(shares, share - 1e-12)])) for name, share in wanted.items()}


BUCKET_SUM = "rollout_bucket:"
"""Prefix of the names of sums over the tokens of a bucket, which become the metrics of `bucket_metrics`."""
_BUCKETS = {
    "age": {"age_0": 0, "age_1": 1, "age_2": 2, "age_3": 3, "age_4_up": 4},
    "place": {f"token_{first}_up": first for first in (0, 16, 64, 256, 1024, 4096)},
}
"""Names of buckets, with the first age or place in the response that belongs to each."""
_SHARE = "effective_sample_share"


def bucket_sums(
    metrics: Mapping[str, npt.NDArray[np.float64]], ages: npt.NDArray[np.int64] | None, places: npt.NDArray[np.int64]
) -> dict[str, float]:
    """Sum metrics over tokens of one version age, and over tokens of one stretch of responses: sums of parts of a batch add up.

    Args:
        metrics: of tokens, each [T]. ages: the column `version_ages`, [T]; None: unknown. places: of a token in its response, from 0, [T].
    Returns:
        sums and counts for every bucket, so that all ranks have the same names.
    """
    found: dict[str, float] = {}
    for kind, keys in (("age", ages), ("place", places)):
        if keys is None:
            continue
        of_token = np.searchsorted(list(_BUCKETS[kind].values()), keys.clip(0), side="right") - 1
        for name, values in {"": np.ones(len(places)), **metrics}.items():
            sums = np.bincount(of_token, values, minlength=len(_BUCKETS[kind]))
            found |= {f"{BUCKET_SUM}{bucket}:{name}": float(one) for bucket, one in zip(_BUCKETS[kind], sums, strict=True)}
    return found


def bucket_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute means over the tokens of each bucket that has some, from summed `bucket_sums`: `rollout_kl/age_2`, `rollout_kl/token_64_up`.

    >>> bucket_metrics(bucket_sums({"rollout_kl": np.array([0.1, 0.3])}, np.array([0, 5]), np.array([0, 1])))
    {'rollout_kl/age_0': 0.1, 'rollout_kl/age_4_up': 0.3, 'rollout_kl/token_0_up': 0.2}
    """
    found: dict[str, float] = {}
    for bucket in (name for names in _BUCKETS.values() for name in names):
        prefix = f"{BUCKET_SUM}{bucket}:"
        if count := sums.get(prefix, 0.0):
            of_bucket = {name.removeprefix(prefix): total / count for name, total in sums.items() if name.startswith(prefix)}
            found |= {f"{name}/{bucket}": mean for name, mean in with_effective_share(of_bucket).items() if name}
    return found


def with_effective_share(means: Mapping[str, float]) -> dict[str, float]:
    """Replace the mean square of a correction's weights by the share of samples that they are worth: mean^2 / mean of squares."""
    found = {name: mean for name, mean in means.items() if name != "correction_weight_square"}
    square = means.get("correction_weight_square", 0.0)
    return {**found, _SHARE: means["correction_weight"] ** 2 / square} if square else found


MOVED = "weights_moved"
"""The metric of an optimiser step on weights in half precision: the share of those (of this rank) that have another value after it."""

EngineKind = Literal["rollout", "train", "function"]

Tensor = Any
"""A torch.Tensor, or a NumPy array from a fake. Torch is not imported here: the CLI reads this file."""


# ---- capabilities and settings


@dataclass(frozen=True)
class ParallelLayouts:
    """The largest degree of each kind of parallelism that an engine supports; None: any. By default one device.

    Legality beyond this is the planner's: heads and widths must divide, tensor and sequence parallel groups lie inside a node.
    """

    tp: int | None = 1
    """Tensor parallel."""
    pp: int | None = 1
    """Pipeline parallel."""
    sp: int | None = 1
    """Sequence parallel: ranks that share each sequence, and in the attention its heads (Ulysses), or as `gathers_keys` says."""
    dp: int | None = 1
    """Replicas; of a rollout engine, instances, which any engine may have as many of as there are workers."""
    ep: int | None = 1
    """Expert parallel: within a replica of a rollout engine, across the replicas of a trainer."""
    zero: tuple[Literal[0, 1, 2, 3], ...] = (0,)
    """ZeRO stages of a trainer."""
    offload: bool = False
    """A trainer's optimiser can live in the host's memory and be stepped there."""
    divides_heads: bool = False
    """Ranks that split layers or sequences must divide the heads of keys and values: none are replicated."""
    keeps_experts_whole: bool = False
    """A trainer spreads experts over `tp * ep` devices by number, where others split each over `tp`; replicas share out their widths."""
    gathers_keys: bool = False
    """Ranks that share sequences gather keys and values of all rows, where others exchange heads: these need not divide."""
    excludes: tuple[tuple[str, ...], ...] = ()
    """Words that a trainer refuses together: of a layout (`tp`: above 1, `zero 0`: where replicas could share, `offload`), of a model
    (`experts`, `latent`, `adapters`, `windows`, `half`: computed below float32, `rounded` to it), and of its options (`name: value`)."""
    families: tuple[tuple[Literal["any", "tp", "pp", "sp", "ep"], tuple[str, ...]], ...] = ()
    """Values of `model_type` that a degree is for, where it is not for all; those of `any` are all that the trainer can have."""
    recomputes: Literal["never", "where needed", "always"] = "never"
    """When a plan has a trainer keep only the input of each layer, and compute the rest again: where memory demands it, or always."""
    recompute_option: tuple[str, bool | str] = ("recompute", True)
    """The option that tells it to, and its value. Where a spec has the option, plans go by that."""
    options: tuple[tuple[Literal["tp", "pp", "sp", "ep", "zero", "offload", "micro_batches", "vpp", "schedule"], str], ...] = ()
    """What a trainer's degrees are called among its options. Where a spec has such an option, plans go by that; else a run by the plan."""
    of_stages: tuple[str, ...] = ()
    """Options that a run whose plan has one stage leaves out."""

    @property
    def has_replicas_alone(self) -> bool:
        """Whether all ranks of a trainer, where it has several, hold the whole model."""
        return self.dp != 1 and self.zero == (0,) and (self.tp, self.pp, self.sp, self.ep) == (1, 1, 1, 1)

    def names(self) -> list[str]:
        """Name what is supported beyond one device: `tp`, `dp`, `zero 3`, `offload`."""
        kinds = [kind for kind in ("tp", "pp", "sp", "dp", "ep") if getattr(self, kind) != 1]
        return kinds + [f"zero {stage}" for stage in self.zero if stage] + ["offload"] * self.offload


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do beyond the contract of its kind: in the registry on one rank, with no options set; `configured` as it runs."""

    kind: EngineKind
    keyed_seeds: bool = True
    """The random number of a token is a function of the sample's seed and the token's position."""
    keyed_seeds_option: str = ""
    """Rollout: the option of the engine that gives it `keyed_seeds`, where it has them only if that is set."""
    self_paced: bool = False
    """Rollout: it decodes in processes of its own; `step` returns what has finished since, and waits a moment if nothing has."""
    weights_under_requests: bool = False
    """Rollout: weights may change under running requests, which keep their KV cache."""
    deterministic: bool = True
    """With `EngineSettings.deterministic`, results are bitwise a function of a sample's identity, whatever else runs."""
    heads: tuple[str, ...] = ("lm",)
    """Train: which `m2flow.recipe.Model.head` it can hold."""
    optimizers: tuple[str, ...] = ("AdamW",)
    """Train: which optimisers of `m2flow.recipe` it can step."""
    weight_groups: bool = False
    """Train: it can step groups of weights with rates and decays of their own (`m2flow.recipe.WeightGroup`)."""
    lora: bool = False
    """Train: it can train LoRA adapters. Rollout: it can receive them alone (`load_adapters`) and add them itself."""
    rests: bool = False
    """Rollout: it can release its KV cache and keep its weights on the device (`rest`) while another engine works there."""
    shrinks_kv_cache: bool = False
    """Rollout: it can release the KV cache that running samples do not need (`shrink_kv_cache`)."""
    readable_offloaded: bool = False
    """Train: another trainer can copy its weights while it is offloaded; otherwise it is onloaded for the copy."""
    weight_pieces: bool = False
    """Train: each of several ranks knows its pieces of the weights (`TrainEngine.weight_pieces`), adapters aside; so none gathers them."""
    probes: bool = False
    """Rollout: it can compute log-probabilities of given tokens (`RolloutEngine.logprobs`), by which a weight sync is checked."""
    into_server: tuple[str, ...] = ()
    """Rollout: the transports of weights into its own server (`m2flow.spec.WeightsSpec.into_server`)."""
    routed_experts: bool = False
    """Rollout: it can report which experts of a mixture each token was routed to (`Generated.routed_experts`). Train: it can replay them
    (`m2flow.recipe.Model.routing`)."""
    embeds: bool = False
    """Rollout: it can embed prompts (`RolloutEngine.embeddings`), so that lengths of responses can be predicted from what they say."""
    balances_experts: bool = False
    """Train: its updates can keep the experts of a mixture evenly loaded (`m2flow.recipe.Balance`)."""
    checkpoint_format: str = ""
    """Train: what its checkpoints are, weights and states. A run goes on with another engine that has the same one; with "" with none."""
    sequences: bool = False
    """Train: it reads each sequence of a row by itself, where episodes have several (`m2flow.samples.sequences_of`)."""
    refused_sampling: tuple[str, ...] = ()
    """Rollout: fields of `m2flow.recipe.Sampling` that must have their defaults."""
    retries_smaller: bool = False
    """Train, on one rank: after `accumulate` ran out of memory, `discard` restores its state after the last step, so smaller parts can be
    tried. Of several ranks one alone runs out of memory, and the others wait for it in a collective."""
    devices: tuple[str, ...] = ("cpu",)
    parallel_layouts: ParallelLayouts = ParallelLayouts()

    def configured(self, options: Mapping[str, object], num_ranks: int = 1) -> Capabilities:
        """Return what the engine can do with these options of its own, over this many ranks.

        >>> Capabilities("rollout", keyed_seeds=False, keyed_seeds_option="seeds").configured({"seeds": True}).keyed_seeds
        True
        """
        keyed_seeds = self.keyed_seeds or bool(options.get(self.keyed_seeds_option))
        return replace(self, keyed_seeds=keyed_seeds, retries_smaller=self.retries_smaller and num_ranks == 1)


@dataclass(frozen=True)
class EngineSettings:
    """How the plan has an engine run. Affects time only; nothing here changes the mathematics."""

    device: str = "cpu"
    threads: int = 1
    deterministic: bool = False
    max_running: int = 256
    """Rollout: most requests that decode together."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The engine's own, from the cluster spec."""
    rank: int = 0
    """Train: this process among the ranks that hold one model. Every rank gets the same tasks, with the same rows, in the same order."""
    num_ranks: int = 1
    rendezvous: str = ""
    """With several ranks: where they meet, `file:///PATH` or `tcp://HOST:PORT`."""
    parts: int = 1
    """Train, with several ranks: the number of parts that the caller cuts each micro-batch into."""
    tp: int = 1
    """Rollout: devices that share each layer, in processes of the engine's own; `pp` and `ep` likewise for stages and experts."""
    pp: int = 1
    ep: int = 1
    into_server: str = "auto"
    """Rollout: the transport of weights into the engine's own server (`m2flow.spec.WeightsSpec.into_server`)."""


# ---- engines


class Engine(ABC):
    """Life cycle of an engine of any kind: start, stop, onload, offload."""

    capabilities: Capabilities
    name: str

    @abstractmethod
    def start(self) -> None:
        """Load the model. Raises `ModelError` for a path that is missing or broken, `EngineError` for anything else."""

    @abstractmethod
    def stop(self) -> None:
        """Free everything. May be called twice."""

    def onload(self) -> None:
        """Take the device back: load what `offload` moved away."""

    def offload(self) -> None:
        """Leave the device to another engine: move state to the host's memory, and free what can be rebuilt."""

    def memory(self) -> Memory:
        """What it holds on its device now; all zero if it does not know."""
        return Memory()

    def rest(self) -> None:
        """Let another engine work on the device beside this one's state: free what is not needed meanwhile."""


@dataclass(frozen=True)
class Request:
    """One sample to generate."""

    id: int
    """A packed `SampleId`."""
    prompt: Prompt | tuple[int, ...]
    """A text or messages, which the engine tokenises, or token ids."""
    seed: int
    """64 bits; with the position of a token it decides that token's random number."""
    sampling: Sampling
    prefix: tuple[int, ...] = ()
    """Tokens generated before, to continue from."""
    prefix_logprobs: tuple[float, ...] = ()
    prefix_versions: tuple[int, ...] = ()
    prefix_kv_stale: tuple[bool, ...] = ()
    """Empty: none was. Passed through only: a prefix is prefilled again, so later tokens see a cache of the weights held."""
    prompt_text: str | None = None
    """Text of a prompt in token ids that a chat template made, passed through."""
    prefix_masks: tuple[int, ...] = ()
    """With `sampling.sampling_mask`: what the prefix was drawn from, as `m2flow.samples.packed_masks` has it."""
    keeps_kv: bool = False
    """Requests that begin with its tokens are to be expected: its KV is worth keeping where there is room."""


@dataclass(frozen=True)
class Generated:
    """One sample that left a rollout engine, finished or aborted."""

    id: int
    prompt_tokens: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    """Generated tokens, the prefix and a final end-of-sequence token included."""
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    kv_stale: npt.NDArray[np.bool_]
    finish: Finish
    text: str
    """The generated tokens as text, without special tokens."""
    routed_experts: npt.NDArray[np.int16] | npt.NDArray[np.uint8] | None = None
    """Experts of each token of prompt and response, [T, layers, experts of a token], where the engine of a mixture reports them, as
    `m2flow.samples.compact_experts` has them. Unknown are those of the last token, which no layer has seen."""
    prompt_text: str | None = None
    """The prompt as the chat template made it; None where none did."""
    segments: tuple[tuple[Segment, int], ...] = ()
    """Runs of an episode's tokens after the prompt, each with its number of tokens. Empty: all of them were generated."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Column -> what an episode adds to its row."""
    sampling_mask: npt.NDArray[np.int32] | None = None
    """With `sampling.sampling_mask`: what each token was drawn from (`m2flow.samples.packed_masks`), and `logprobs` are among those."""
    num_cached: int = 0
    """Tokens of its prompt and prefix that were found in the engine's prefix cache; 0 also if it does not say."""

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model generated; an episode has others between them."""
        return sum(count for kind, count in self.segments if kind is Segment.GENERATED) if self.segments else len(self.tokens)


class Language(Protocol):
    """A model's tokenizer and chat template, as conversations need them."""

    @property
    def template(self) -> str:
        """The chat template's source; empty without one."""

    eos_ids: frozenset[int]
    """Ids that end a turn of the model."""

    @property
    def special_texts(self) -> Sequence[str]:
        """The special tokens as they are written in a text."""

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Encode the first prompt of a model without tools, as a generation does."""

    def prompt_text(self, prompt: Prompt) -> str | None:
        """The first prompt as the chat template writes it; None where it is a raw text."""

    def encode_target(self, text: str) -> list[int]:
        """Encode a text as it stands; special tokens that are written in it count as such."""

    def decode(self, ids: list[int]) -> str:
        """Decode tokens, leaving out special ones."""

    def decode_all(self, ids: list[int]) -> str:
        """Decode tokens, special ones included."""

    def conversation(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> str:
        """Write messages by the chat template, up to where the model's turn begins. Raises `DatasetError`: the template refuses them."""


_MORE_TOKENS = 8
"""Tokens before those that a stop text can be of, so that what decoders do to the start of a text does not reach it."""


@dataclass(frozen=True)
class StopTexts:
    """The stop texts of a sample (`Sampling.stop`): whether its last token completes one, as a function of its tokens alone.

    Tokens are decoded a few at a time. So a text may begin and end within tokens, and a character be made of several.
    """

    texts: tuple[str, ...]
    is_included: bool
    first: int
    """Tokens that a sample has at least: `Sampling.min_new_tokens`."""
    decode: Callable[[list[int]], str]
    """Decodes tokens, leaving out special ones."""
    special_ids: frozenset[int]
    """Tokens without a text."""

    @classmethod
    def of(cls, sampling: Sampling, decode: Callable[[list[int]], str], special_ids: frozenset[int]) -> StopTexts | None:
        """The stop texts of these sampling parameters; None if there are none."""
        return cls(sampling.stop, sampling.include_stop, sampling.min_new_tokens, decode, special_ids) if sampling.stop else None

    def are_completed(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Whether the last of a sample's tokens completes a stop text."""
        if len(tokens) < max(self.first, 1) or int(tokens[-1]) in self.special_ids:
            return False
        # Each token that is not special has a byte or more.
        wanted = max(len(text.encode()) for text in self.texts) + _MORE_TOKENS
        tail: list[int] = []
        for token in reversed(tokens.tolist()):
            if token not in self.special_ids:
                tail.append(token)
                if len(tail) == wanted:
                    break
        return self._found(tail[::-1]) is not None

    def shorten(self, tokens: npt.NDArray[np.int32]) -> str:
        """The text of a sample whose last token completes a stop text: up to the stop text, or with it."""
        found = self._found(tokens.tolist())
        return self.decode(tokens.tolist()) if found is None else found

    def _found(self, tokens: list[int]) -> str | None:
        """The text of these tokens up to the first stop text that the last token completes, or with it; None if it completes none."""
        text = self.decode(tokens)
        if not any(stop in text for stop in self.texts):
            return None
        # Without what is the begin of a character.
        num_before = len(self.decode(tokens[:-1]).rstrip("\ufffd"))
        places = [(at, stop) for stop in self.texts if (at := text.find(stop, max(num_before - len(stop) + 1, 0))) >= 0]
        if not places:
            return None
        at, stop = min(places)
        return text[: at + len(stop)] if self.is_included else text[:at]


class Occupancy(NamedTuple):
    """How full a rollout engine is."""

    num_running: int
    num_queued: int = 0
    """Requests that wait for room."""
    kv_used: int = 0
    """Tokens that its KV cache holds or has reserved."""
    kv_capacity: int = 0
    """Tokens that the cache can hold; 0: not known."""
    num_put_back: int = 0
    """Since its start: times that a running request was preempted, keeping its tokens, because memory ran out."""
    num_cached: int = 0
    """Since its start: tokens of prompts and resumed prefixes found in its prefix cache; 0 also if it does not report them."""


class RolloutEngine(Engine):
    """Generate with continuous batching: requests come and go between any two steps.

    Three properties hold for every engine, since scheduling and recovery build on them: samples leave one by one, as they finish
    (`step`); a request can be taken out at any time, with its tokens so far (`abort`); a request may bring tokens that were generated
    elsewhere (`Request.prefix`).
    """

    has_own_ids = False
    """Whether its token ids are not those of its model's vocabulary, as a fake's."""

    def rest(self) -> None:
        """Free the KV cache and keep the weights on the device (`Capabilities.rests`), until `onload`. Running requests return to the
        queue with their tokens. An engine that can't do so offloads everything."""
        self.offload()

    def shrink_kv_cache(self) -> None:
        """Free KV cache beyond what running requests use (`Capabilities.shrinks_kv_cache`); they go on."""

    @abstractmethod
    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises `PromptTooLong`, and queues none, if a prompt fills the context; a response that does ends by LENGTH."""

    @abstractmethod
    def step(self) -> list[Generated]:
        """Admit what fits, decode one token for each running request, and return those that finished; empty if there is nothing to do.

        Out of memory, fewer requests run, and the others wait with their tokens. Raises `OutOfMemory`: a single request does not fit."""

    @abstractmethod
    def abort(self, ids: Iterable[int]) -> list[Generated]:
        """Remove requests, and return them with their tokens so far and `Finish.ABORT`. Unknown ids are ignored."""

    @abstractmethod
    def snapshot(self, ids: Iterable[int]) -> list[Generated]:
        """Return what `abort` would, without removing or changing anything. Unknown ids are ignored, and so are requests for which it is
        not known yet which weights made which token."""

    @abstractmethod
    def progress(self) -> Mapping[int, int]:
        """Number of tokens so far of each request, its prefix included."""

    def occupancy(self) -> Occupancy:
        """How full it is. An engine that does not know its cache says only how many requests it has."""
        return Occupancy(self.num_unfinished)

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Requests queued or running."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights held."""

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, under_requests: bool = False) -> None:
        """Load weights by Hugging Face name. All must be given.

        Args:
            tensors: each is valid until the next is taken, since it may lie in a buffer that is reused; in the type of
                `Model.rollout_dtype`, if the recipe has one.
            under_requests: running requests go on between two tokens with their KV cache; tokens from here on are `kv_stale`. The
                engine may compute a cache anew instead; then they are not. Without it no request may be running.
        Raises:
            EngineError: weights are missing or do not fit; or requests are running, without `under_requests` or in an engine that does
                not declare `weights_under_requests`.
        Source: Piché et al. 2025, PipelineRL, arXiv:2509.19128: in-flight weight updates.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights held, by Hugging Face name, for checksums. What is held under another name, type or shape than received (fused,
        say) is compared before it is loaded instead, so leave that out. Each tensor must be valid until the next is asked for."""

    def load_adapters(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, under_requests: bool = False) -> None:
        """Compute with the initial weights plus these adapters of the model's recipe, by the names of peft's files.

        As `load_weights`, but not allowed after a whole set of weights was loaded. All adapters must be given. Also raises `EngineError` if
        the engine takes none (its `capabilities.lora` is false)."""
        raise EngineError(f"the rollout engine {self.name!r} takes no adapters alone")

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters that were loaded last, for checksums."""
        raise EngineError(f"the rollout engine {self.name!r} takes no adapters alone")

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that adapters are added to, by Hugging Face name, for checksums."""
        raise EngineError(f"the rollout engine {self.name!r} takes no adapters alone")

    def language(self) -> Language:
        """The tokenizer and chat template of the model, for episodes; also of an engine that is not started, where the model speaks from
        another process. Raises `EngineError`: it has none here."""
        raise EngineError(f"the rollout engine {self.name!r} holds no conversations", now="Use policy.generate, or another rollout engine.")

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Compute the log-probability of each token but the first, given those before it, at temperature 1: float32 [L_i - 1].

        Queued and running requests are not affected. Raises `EngineError`: it can't (its `capabilities.probes` is false)."""
        raise EngineError(f"the rollout engine {self.name!r} does not say the log-probabilities of given tokens")

    def embeddings(self, requests: Sequence[Request]) -> npt.NDArray[np.float32]:
        """Compute a few numbers for the prompt of each request by the weights held, float32 [P, K]: of one model always the same K.

        Queued and running requests are not affected. Raises as `add`, and `EngineError`: it can't (its `capabilities.embeds` is false)."""
        raise EngineError(f"the rollout engine {self.name!r} embeds no prompts")


class WeightForm(NamedTuple):
    """A tensor of a model without its values."""

    name: str
    """Its Hugging Face name."""
    dtype: str
    shape: tuple[int, ...]


class WeightPiece(NamedTuple):
    """A box of a tensor, which a rank holds."""

    name: str
    """The Hugging Face name of the whole tensor."""
    start: tuple[int, ...]
    """Where the box begins in each dimension."""
    values: Tensor
    """Values, of as many dimensions."""


Advantage = Callable[[npt.NDArray[np.float32], Batch], npt.NDArray[np.float32]]
"""Rewards [N] and the whole groups they belong to -> one advantage a sample [N]."""


@dataclass(frozen=True)
class Objective:
    """What a train engine minimises on a batch."""

    loss: Loss


PER_GROUP = "group:"
NUM_SHARED = "shared tokens"
"""Among what a pass sums up: its part of `Sums.num_shared_tokens`."""


@dataclass(frozen=True)
class Sums:
    """Sums over a micro-batch, so that no number depends on how a mini-batch was cut."""

    num_sequences: int
    num_tokens: int
    """Tokens under the loss mask."""
    num_context_tokens: int
    """All tokens that went through the model."""
    metrics: Mapping[str, float]
    """Each a sum over the tokens under the mask: `loss`, and what the loss reports. One whose name begins with `PER_GROUP` is a sum over
    groups of the group's mean, and is averaged over groups: what a loss on groups reports. Those of `RATIO_COUNT` are counts."""
    agreement: Agreement = NO_AGREEMENT
    """With the rollout engine, over the tokens that the column `same_weights` marks; empty if the batch has no such column."""
    num_shared_tokens: int = 0
    """Context tokens that went through the model with another sequence, which begins alike. Depends on the cut, so no metric has it."""

    @classmethod
    def of_passes(cls, batch: Batch, num_tokens: int, sums: Mapping[str, float], agreement: Agreement) -> Sums:
        """The sums over a micro-batch whose passes summed up these, `NUM_SHARED` among them."""
        metrics = {name: value for name, value in sums.items() if name != NUM_SHARED}
        num_shared = round(sums.get(NUM_SHARED, 0.0))
        return cls(len(batch), num_tokens, len(batch.ragged("tokens").values), metrics, agreement, num_shared)


class TrainEngine(Engine):
    """Updates weights, and computes log-probabilities of given tokens."""

    @abstractmethod
    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        """Run forward and backward over one micro-batch, and add the gradient of the *sum* of the loss terms.

        A model with a value head gives the loss `values`, any other `logprobs` and `entropy`. The batch has the token columns of
        `m2flow.samples` (`tokens`, `loss_mask`, `logprobs` as behaviour) and a column for each further need of the loss: one number a
        sample (`advantages` [N]), or ragged with one for each token (`reference_logprobs`, `returns`). A loss that needs
        `top_logprobs` gets those of the column `reference_top_ids`, with gradient (`TrainEngine.top_logprobs`). Where the loss
        `is_of_groups`, the batch has whole groups; those of a loss that needs `group_ids` are divided over no ranks either. A batch
        with `prompt` and `target` texts instead of `tokens` is a set of demonstrations, tokenised here, its loss mask on the target and
        the end-of-sequence token. `same_weights`, ragged bool, names the tokens that were sampled with the very weights held now."""

    @abstractmethod
    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        """Divide the gradient by the denominator, clip, step, and clear it.

        Returns `grad_norm` (2-norm after the division, before the clipping) and `lr`, which is `optimizer.rate(num_steps)` after so many
        steps under its `state_key`, by which moments go; of weights in half precision also `MOVED`. Raises `EngineError` if the gradient is
        not finite; the weights are then left as they were. The caller counts versions: see `m2flow.engines.contract`."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the gradient accumulated so far."""

    @abstractmethod
    def logprobs(self, batch: Batch) -> Batch:
        """Compute `reference_logprobs`, ragged float32 [T_i], aligned with `tokens` (0 outside the loss mask); returned by identity."""

    def top_logprobs(self, batch: Batch, top_k: int) -> Batch:
        """Compute what `logprobs` does, and the `top_k` likeliest tokens in the place of each masked token.

        Returns ragged columns over masked tokens alone: `reference_top_ids`, int32 [T_i, K], and `reference_top_logprobs`, float32
        [T_i, K + 1], the last that of all other tokens together."""
        raise EngineError(f"the train engine {self.name!r} gives no log-probabilities of likeliest tokens")

    def values(self, batch: Batch) -> Batch:
        """Compute `values`, ragged float32 [T_i], aligned with `tokens` (0 outside the loss mask); returned by identity.

        A token's value is that of the state before it, from a model whose head is `value`."""
        raise EngineError(f"the train engine {self.name!r} has no value heads")

    def scores(self, batch: Batch) -> Batch:
        """Compute `reward`, float64 [N], by a model whose head is `score`, from `prompt` and `text`; returned by identity."""
        raise EngineError(f"the train engine {self.name!r} has no reward models")

    @abstractmethod
    def num_training_tokens(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Count the tokens that each sample puts through the model, int64 [N], for packing. Demonstrations are tokenised and cached."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by Hugging Face name: without a copy where this process has them whole, else gathered one by one. Each is valid
        until the next is taken."""

    def weight_forms(self) -> Sequence[WeightForm] | None:
        """Return what `weights` would yield, in its order and without its values, if every rank knows its pieces of it (`weight_pieces`).

        None: they don't; weights are gathered on the first rank. Not collective: it is asked of the first rank alone."""
        return None

    def weight_pieces(self) -> Iterator[WeightPiece]:
        """Yield this rank's pieces of the tensors of `weight_forms`: together, the ranks' pieces are each tensor exactly once.

        No rank waits for another. A piece is a view of what the rank holds, or a copy that is small beside it; it is valid until the next
        is taken."""
        raise EngineError(f"the train engine {self.name!r} does not know its pieces of the weights")

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters alone, by the names of peft's files. (`weights` yields the sum of `base` and adapters.)"""
        raise EngineError(f"the train engine {self.name!r} trains no adapters")

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that the adapters are added to, which no step changes, by Hugging Face name."""
        raise EngineError(f"the train engine {self.name!r} trains no adapters")

    def copy_from(self, source: TrainEngine, share: float = 1.0) -> None:
        """Copy the current weights of another engine of the same kind and ranks; what that one lacks (a head) stays. With a `share` below 1
        they become `1 - share` of their own and `share` of the other's (`blended`); never of adapters alone."""
        target = dict(self.weights())
        for name, tensor in source.weights():
            if name in target:
                target[name][...] = blended(target[name], tensor, share)

    def adapter_reference(self, role: str, model: Model) -> TrainEngine | None:
        """Make a frozen engine for another role, whose model is this one's without its adapters, or with others that it copies: it computes
        log-probabilities from this engine's weights while they are onloaded. None: not supported; the role then has a model of its own."""
        return None

    @abstractmethod
    def save(self, path: str) -> None:
        """Write model and tokenizer in Hugging Face format, and the optimisers' state beside them, to a directory."""

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        """Copy what `save` would write now, and return what writes it while the engine goes on. None: it can't; `save` it."""
        return None

    @abstractmethod
    def load(self, path: str) -> None:
        """Load what `save` wrote."""


def blended(own: Tensor, other: Tensor, share: float) -> Tensor:
    """What a tensor becomes that keeps `1 - share` of its own: summed in float32, in its type, on its device; the other itself for 1,
    and of whole numbers."""
    return other if share == 1 or not own.is_floating_point() else own.float().lerp_(other.to(own.device).float(), share).to(own.dtype)


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint in the host's memory. Both may be called in another thread than the engine's, one after the other."""

    write: Callable[[], None]
    """As `TrainEngine.save`, with the same errors."""
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    """As `TrainEngine.weights`, of that moment."""


OnDone = Callable[[int, object], None]
"""Called with the position of a unit and its result, as soon as it is there."""


@dataclass(frozen=True)
class Isolation:
    """How a function's units run in child processes, each of which can be killed alone (`m2flow.engines.process_pool`)."""

    is_wanted: bool
    """For all units; else only for those of a function that turns out to need a main thread, as signals do."""
    function: object
    """What a child calls, once it has unpickled it. It gets what `argument` made, and returns, or gives when awaited, what JSON can say."""
    argument: Callable[[Sample | list[Sample]], object]
    """A unit as it crosses to the child, pickled."""
    result: Callable[[object], object]
    """What has crossed back, as the function in this process would have given it."""
    preload: tuple[str, ...] = ()
    """Modules that every child has at hand."""


Failure = Literal["raised", "timed_out", "died", "invalid"]
"""How a unit failed: its function raised, took too long, ended its process, or returned what it may not."""
OnFailure = Callable[[Sample | list[Sample], Failure, OpError], object]
"""What counts as the result of a unit that failed."""


@dataclass
class Ahead:
    """The call that may follow one of a single unit: the thread that ran this unit begins the next one without waiting for the caller."""

    prepare: Callable[[object], Mapping[str, Any] | None] | None = None
    """Makes of the unit's result the next call's arguments of `FunctionEngine.call`, on the unit's thread. Set while the unit runs."""
    finish: Callable[..., Sequence[object]] | None = None
    """Once the next call has begun: does the rest, given `on_done`, `meanwhile`, `on_failure`, `ahead`. Call this or `drop`."""
    drop: Callable[[], None] | None = None
    """Leaves the next call alone: nobody wants its result."""


class FunctionEngine(Engine):
    """Runs users' Python functions on whole units of their granularity."""

    @abstractmethod
    def call(
        self,
        function: Callable[..., object],
        batch: Batch,
        *,
        granularity: str,
        timeout_s: float | None,
        size: int | None = None,
        in_turn: bool = False,
        on_done: OnDone | None = None,
        meanwhile: Callable[[], None] | None = None,
        isolation: Isolation | None = None,
        on_failure: OnFailure | None = None,
        ahead: Ahead | None = None,
    ) -> Sequence[object]:
        """One result a unit (sample, group, mini-batch or batch), in order of identity.

        Args:
            size: groups in a mini-batch.
            in_turn: one unit after the other, each seeing what the one before it left.
            on_done: of a unit that turned out well, unless one has failed before.
            meanwhile: what the caller has to do besides; called when the first unit has begun, and again while units run, ever more seldom.
            isolation: None: the function must run in this process.
            on_failure: gives the result of a unit that fails; without it the first failure is raised.
            ahead: what may follow the call's only unit at once, if the engine has threads.
        Raises:
            OpError: the function raises, takes longer than `timeout_s` for one unit, or ends its process; the sample is named.
        """


RolloutFactory = Callable[[Model, EngineSettings], RolloutEngine]
TrainFactory = Callable[[Model, EngineSettings], TrainEngine]
