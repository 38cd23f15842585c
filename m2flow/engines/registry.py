"""The registry of engines by name and kind, with their capabilities as data and as tables, without importing any.

The built-in ones are listed here; other packages register an `EngineInfo` under the entry point group `m2flow.engines`:

    [project.entry-points."m2flow.engines"]
    mine = "mypackage.engine:INFO"

`capability_tables` prints the tables of the documentation: one for rollout engines, one for trainers. `StepCheck` holds what a rollout
engine returns against its contract.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, cast, get_args

import numpy as np

from m2flow.engines.contract import (
    Capabilities,
    Engine,
    EngineKind,
    EngineSettings,
    FunctionEngine,
    Generated,
    ParallelLayouts,
    RolloutEngine,
    TrainEngine,
)
from m2flow.engines.installed import Product, check_compiler, check_options
from m2flow.errors import EngineError, M2FlowError, MissingExtra, did_you_mean, engine_that_raised
from m2flow.recipe import OPTIMIZERS, Head, Model
from m2flow.samples import Finish, SampleId


@dataclass(frozen=True)
class EngineInfo:
    """An engine as the registry knows it."""

    name: str
    factory: str
    """`module:class`, called with (model, settings); a function engine with (settings)."""
    capabilities: Capabilities
    """On one rank, with no options set: `capabilities_of` has them as the engine is configured."""
    summary: str
    requires: tuple[str, ...] = ()
    """Modules that must be importable."""
    extra: str = ""
    """The extra that brings them."""
    distribution: str = ""
    """What the extra's package is called, where its name is another."""
    compiles: bool = False
    """On a CPU it compiles a part of itself when it is first used (`m2flow.engines.installed`)."""
    ranked: str = ""
    """`module:class` of a trainer over several ranks, where that is another class."""
    server: str = ""
    """`module:name` of the `Product` that it starts in an interpreter of its own; looked at before a run too."""
    refuses: str = ""
    """`module:function` of a trainer, called with a model, its options and the number of ranks before a run: raises `EngineError`."""
    holds: str = ""
    """`module:function` of a trainer whose ranks hold other layers or experts, called with its options and the numbers of ranks, layers and
    experts: the spans of layers and the experts of each rank."""
    untested: str = ""
    """Where it has not been run; empty: nowhere that it says it can."""

    @property
    def kind(self) -> EngineKind:
        return self.capabilities.kind

    @property
    def missing(self) -> tuple[str, ...]:
        """Required modules that are not installed."""
        return tuple(name for name in self.requires if importlib.util.find_spec(name) is None)

    @property
    def version(self) -> str:
        """Installed version of the engine's extra, as in `deepspeed 0.19.8`; empty if it needs none, or it is not installed."""
        if not self.extra or self.missing:
            return ""
        version = version_of(self.distribution or self.extra)
        return f"{self.extra} {version}" if version else ""


def version_of(distribution: str) -> str:
    """Version of a distribution in this interpreter; empty if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


ONE_LAYOUT = ("megatron",)
"""Trainers that have one layout in a worker, chunks of stages included: their groups are those of the process."""
ONE_F_ONE_B: Final = "1f1b"
ZERO_BUBBLE: Final = "zero-bubble"
"""Orders in which the stages of a trainer compute: values of its option `schedule`."""
STACKED = ("deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Values of `model_type` whose experts `fsdp` can split over ranks."""
STAGED = ("llama", "qwen2", "qwen3", *STACKED)
"""Values of `model_type` whose layers `fsdp` can spread over stages."""
SPLIT = (
    *("apertus", "arcee", "cohere", "cohere2", "cohere_compass_text", "cwm", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "gemma"),
    *("gemma2", "gemma3_text", "gemma3n_text", "gemma4_unified_text", "glm4_moe", "granite", "helium", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "llama", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "olmo", "phi", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "vaultgemma", "youtu"),
)
"""Values of `model_type` whose layers `fsdp` and `deepspeed` can split by widths: transformers has plans for them in our styles."""
MAPPED = ("deepseek_v2", "deepseek_v3", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` whose weights have a place in Megatron's model."""
LOGPROB_TOKENS = 16384
"""The option `logprob_tokens` of trainers where it is not given: tokens that go through the model together in a forward pass."""
_DEVICES = ("cpu", "cuda")
_CONSTRAINTS = ("regex", "json_schema", "grammar")
"""Refused by servers: the log-probabilities that they return under a constraint are not the model's own but those of the tokens left."""
_CHECKPOINTS = "safetensors"
"""What `m2flow.engines.models.trainer_checkpoint` reads and writes."""
_HEADS, _OPTIMIZERS = get_args(Head), tuple(OPTIMIZERS)
_BUILT_IN = (
    EngineInfo(
        "embedded",
        "m2flow.engines.embedded.rollout_engine:EmbeddedRollout",
        Capabilities(
            "rollout",
            devices=_DEVICES,
            weights_under_requests=True,
            lora=True,
            rests=True,
            shrinks_kv_cache=True,
            probes=True,
            routed_experts=True,
            embeds=True,
        ),
        "Continuous batching for Hugging Face causal language models, in PyTorch.",
        ("torch", "transformers"),
    ),
    EngineInfo(
        "embedded",
        "m2flow.engines.embedded.trainer:EmbeddedTrain",
        Capabilities(
            "train",
            checkpoint_format=_CHECKPOINTS,
            sequences=True,
            heads=_HEADS,
            optimizers=_OPTIMIZERS,
            weight_groups=True,
            lora=True,
            retries_smaller=True,
            readable_offloaded=True,
            weight_pieces=True,
            routed_experts=True,
            balances_experts=True,
            devices=_DEVICES,
            parallel_layouts=ParallelLayouts(dp=None),
        ),
        "Packed micro-batches without padding, prompts shared within a group, in PyTorch; over several ranks, a replica on each.",
        ("torch", "transformers"),
        ranked="m2flow.engines.distributed.ranks:ReplicatedTrain",
    ),
    EngineInfo(
        "sglang",
        "m2flow.engines.servers.sglang:SglangRollout",
        Capabilities(
            "rollout",
            keyed_seeds=False,
            keyed_seeds_option="deterministic_inference",
            self_paced=True,
            weights_under_requests=True,
            deterministic=False,
            rests=True,
            probes=True,
            devices=("cuda", "cpu"),
            into_server=("files", "tensors", "group"),
            routed_experts=True,
            refused_sampling=("repetition_penalty", "logit_bias", "sampling_mask", *_CONSTRAINTS),
            parallel_layouts=ParallelLayouts(tp=None, pp=8, dp=None, ep=None),
        ),
        "An SGLang server in an interpreter of its own (rollout.options.python), over HTTP.",
        ("torch", "transformers", "httpx2"),
        server="m2flow.engines.installed:SGLANG",
        untested="cuda: CUDA IPC and NCCL into the server, tp, memory that it frees by tag; pp, ep",
    ),
    EngineInfo(
        "vllm",
        "m2flow.engines.servers.vllm:VllmRollout",
        Capabilities(
            "rollout",
            keyed_seeds=False,
            self_paced=True,
            weights_under_requests=True,
            deterministic=False,
            probes=True,
            into_server=("files",),
            devices=("cuda", "cpu"),
            routed_experts=True,
            refused_sampling=("sampling_mask", *_CONSTRAINTS),
            parallel_layouts=ParallelLayouts(tp=None),
        ),
        "A vLLM server in an interpreter of its own (rollout.options.python), over HTTP.",
        ("torch", "transformers", "httpx2"),
        server="m2flow.engines.installed:VLLM",
        untested="cuda, and `routed_experts`, which vLLM 0.32 has on GPUs alone",
    ),
    EngineInfo(
        "fsdp",
        "m2flow.engines.distributed.fsdp:FsdpTrain",
        Capabilities(
            "train",
            checkpoint_format=_CHECKPOINTS,
            sequences=True,
            heads=_HEADS,
            optimizers=tuple(name for name in _OPTIMIZERS if name != "AdamW8bit"),
            weight_groups=True,
            lora=True,
            weight_pieces=True,
            routed_experts=True,
            balances_experts=True,
            devices=_DEVICES,
            parallel_layouts=ParallelLayouts(
                tp=None,
                pp=None,
                sp=None,
                dp=None,
                ep=None,
                zero=(3,),
                divides_heads=True,
                families=(("tp", SPLIT), ("pp", STAGED), ("ep", STACKED)),
                excludes=(("pp", "windows"),),
                keeps_experts_whole=True,
                gathers_keys=True,
                recomputes="where needed",
                options=(
                    *(("tp", "tp"), ("pp", "pp"), ("sp", "cp"), ("ep", "ep")),
                    *(("micro_batches", "micro_batches"), ("vpp", "vpp"), ("schedule", "schedule")),
                ),
                of_stages=("vpp", "schedule", "micro_batches"),
            ),
        ),
        "The embedded trainer over any number of ranks: weights and states spread by FSDP2; experts, layers and sequences too.",
        ("torch", "transformers"),
        refuses="m2flow.engines.distributed:check_fsdp",
        holds="m2flow.engines.distributed:held_by_fsdp",
        untested="cuda with several ranks",
    ),
    EngineInfo(
        "deepspeed",
        "m2flow.engines.distributed.deepspeed:DeepSpeedTrain",
        Capabilities(
            "train",
            checkpoint_format=_CHECKPOINTS,
            sequences=True,
            heads=_HEADS,
            lora=True,
            routed_experts=True,
            balances_experts=True,
            devices=_DEVICES,
            parallel_layouts=ParallelLayouts(
                tp=None,
                sp=None,
                dp=None,
                zero=(0, 1, 2, 3),
                offload=True,
                divides_heads=True,
                excludes=(
                    ("tp", "sp"),
                    ("tp", "experts"),
                    ("tp", "adapters"),
                    ("adapters", "rounded"),
                    ("sp", "latent"),
                    ("zero 0", "half"),
                    ("zero 0", "offload"),
                    ("zero 0", "offload_optimizer: True"),
                ),
                families=(("tp", SPLIT),),
                recomputes="always",
                recompute_option=("activation_checkpointing", True),
                options=(("tp", "tp"), ("sp", "sp"), ("zero", "zero"), ("offload", "offload_optimizer")),
            ),
        ),
        "DeepSpeed: ZeRO 0 to 3 over any number of ranks, layers or sequences split among them, states in the host's memory.",
        ("torch", "transformers", "deepspeed", "ninja"),
        extra="deepspeed",
        compiles=True,
        refuses="m2flow.engines.distributed:check_deepspeed",
        untested="cuda",
    ),
    EngineInfo(
        "megatron",
        "m2flow.engines.megatron.trainer:MegatronTrain",
        Capabilities(
            "train",
            checkpoint_format=_CHECKPOINTS,
            heads=_HEADS,
            lora=True,
            weight_pieces=True,
            routed_experts=True,
            balances_experts=True,
            sequences=True,
            devices=("cuda",),
            parallel_layouts=ParallelLayouts(
                tp=None,
                pp=None,
                sp=None,
                dp=None,
                ep=None,
                zero=(0, 1),
                offload=True,
                divides_heads=True,
                excludes=(("windows",), ("tp", "experts", "sequence_parallel: False")),
                families=(("any", MAPPED),),
                recomputes="always",
                recompute_option=("recompute", "full"),
                options=(
                    ("tp", "tp"),
                    ("pp", "pp"),
                    ("sp", "cp"),
                    ("ep", "ep"),
                    ("zero", "zero"),
                    ("offload", "offload_optimizer"),
                    ("micro_batches", "micro_batches"),
                    ("vpp", "vpp"),
                ),
                of_stages=("vpp", "micro_batches"),
            ),
        ),
        "Megatron-core: layers, stages, sequences and experts split over any number of ranks, its optimiser's states spread.",
        ("torch", "transformers", "megatron"),
        extra="megatron",
        distribution="megatron-core",
        refuses="m2flow.engines.megatron.layout:check_before",
        holds="m2flow.engines.megatron.layout:held_by",
        untested="cuda; Transformer Engine and fused kernels are not used",
    ),
    EngineInfo("python", "m2flow.engines.functions:PythonFunctions", Capabilities("function"), "Rewards and ops: plain or async Python."),
    EngineInfo(
        "fake",
        "m2flow.testing.fakes:FakeRollout",
        Capabilities(
            "rollout", weights_under_requests=True, rests=True, shrinks_kv_cache=True, probes=True, routed_experts=True, embeds=True
        ),
        "Exact integers in place of a model: for tests of schedules.",
    ),
    EngineInfo(
        "fake",
        "m2flow.testing.fakes:FakeTrain",
        Capabilities(
            "train", sequences=True, heads=_HEADS, optimizers=_OPTIMIZERS, weight_groups=True, readable_offloaded=True, routed_experts=True
        ),
        "Exact integers in place of gradients: for tests of schedules.",
    ),
    EngineInfo(
        "fake-ranks",
        "m2flow.testing.fakes:FakeRanks",
        Capabilities(
            "train", sequences=True, heads=_HEADS, optimizers=_OPTIMIZERS, weight_groups=True, parallel_layouts=ParallelLayouts(dp=None)
        ),
        "The fake trainer over any number of ranks: for tests of trainers of several processes.",
    ),
)


def built_in(name: str, kind: EngineKind) -> Capabilities:
    """Return what a built-in engine can do, for its class to take from here. Raises `KeyError` if there is no such engine."""
    for info in _BUILT_IN:
        if (info.name, info.kind) == (name, kind):
            return info.capabilities
    raise KeyError(f"no built-in {kind} engine {name!r}")


def engines() -> list[EngineInfo]:
    """Every engine known, built-in ones first."""
    return [*_BUILT_IN, *_registered()]


@functools.cache
def _registered() -> tuple[EngineInfo, ...]:
    """Engines that other packages register, read once: reading entry points takes as long as a small run."""
    found = []
    for entry in importlib.metadata.entry_points(group="m2flow.engines"):
        package = entry.dist.name if entry.dist is not None else entry.module
        with _naming_what_is_broken(f"the entry point {entry.value} of the package {package}", f"uninstall {package}"):
            info = entry.load()
        if not isinstance(info, EngineInfo):
            raise EngineError(f"the entry point {entry.value} is no EngineInfo", now="See m2flow.engines.registry.")
        found.append(info)
    return tuple(found)


def capabilities_of(name: str, kind: EngineKind, options: Mapping[str, object], num_ranks: int = 1) -> Capabilities | None:
    """Return what an engine can do as it is configured: what its instance says of itself, and what plans go by.

    Args:
        options: the engine's own, from the cluster spec. num_ranks: of a trainer.
    Returns:
        None: no engine of this name and kind is registered.
    """
    info = next((info for info in engines() if (info.name, info.kind) == (name, kind)), None)
    return info.capabilities.configured(options, num_ranks) if info is not None else None


def engine_named(name: str, kind: EngineKind) -> EngineInfo:
    """The engine of that name and kind, whether or not it is installed. Raises `EngineError` if there is none."""
    known = [info for info in engines() if info.kind == kind]
    info = next((info for info in known if info.name == name), None)
    if info is None:
        names = [one.name for one in known]
        now = did_you_mean(name, names, f"There are {', '.join(names)}; see `m2flow engines`.")
        raise EngineError(f"there is no {kind} engine {name!r}", now=now)
    return info


def find_engine(name: str, kind: EngineKind) -> EngineInfo:
    """The engine of that name and kind.

    Raises:
        EngineError: there is none. MissingExtra: it needs what is not installed.
    """
    info = engine_named(name, kind)
    if info.missing:
        how = f"pip install 'm2flow[{info.extra}]'" if info.extra else f"pip install {' '.join(info.missing)}"
        raise MissingExtra(f"the {kind} engine {name!r} needs {', '.join(info.missing)}", now=how)
    return info


def check_adapters() -> None:
    """Check that `peft` is installed. Raises MissingExtra."""
    _check_package("peft", "a policy with lora=...", "lora")


def check_eight_bit() -> None:
    """Check that `torchao` is installed. Raises MissingExtra."""
    _check_package("torchao", "the optimiser AdamW8bit", "8bit")


def _check_package(package: str, what: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(f"{what} needs {package}", now=f"pip install 'm2flow[{extra}]'")


def check_engine(name: str, kind: EngineKind, device: str, options: Mapping[str, object] | None = None) -> None:
    """Refuse an engine that could not start in an environment like this one, before anything is started.

    Args:
        options: its own, from the cluster spec; None: they are about another host.

    Raises:
        EngineError: there is none of that name and kind. MissingExtra: what it needs is not installed.
    """
    info = find_engine(name, kind)
    if info.compiles and device.startswith("cpu"):
        check_compiler(name)
    if (product := server_of(info)) is not None and options is not None:
        check_options(product, options)


def check_trainer(name: str, model: Model, options: Mapping[str, object], num_ranks: int) -> None:
    """Refuse a model or a layout that a train engine can't have, before anything is started. Raises `EngineError`."""
    info = engine_named(name, "train")
    if info.refuses:
        module, _, function = info.refuses.partition(":")
        getattr(importlib.import_module(module), function)(model, options, num_ranks)


def held_by_ranks(
    name: str, options: Mapping[str, object], num_ranks: int, num_layers: int, num_experts: int
) -> list[tuple[list[range], range]]:
    """The spans of layers of each rank of a trainer, and the experts of each layer that it has; empty if all ranks have the same."""
    module, _, function = engine_named(name, "train").holds.partition(":")
    if not module:
        return []
    held: list[tuple[list[range], range]] = getattr(importlib.import_module(module), function)(options, num_ranks, num_layers, num_experts)
    return held if any(one != held[0] for one in held) else []


def train_options(name: str, options: Mapping[str, object], planned: Mapping[str, int | bool | str]) -> dict[str, object]:
    """The options of a train engine, with what a plan says of its layout. What they say themselves stays.

    Args:
        planned: degrees beyond one device (`tp`, `pp`, `sp`, `ep`, `zero`, `offload`), `recompute`,
            `micro_batches`, `vpp`, `schedule`, and `is_searched`: a search chose them.
    Raises:
        EngineError: the plan has a degree that this engine has not.

    >>> train_options("fsdp", {"share_prompts": False}, {"tp": 2, "sp": 4})
    {'tp': 2, 'cp': 4, 'share_prompts': False}
    """
    layouts = engine_named(name, "train").capabilities.parallel_layouts
    option, value = layouts.recompute_option
    if planned.get("is_searched") and {**planned, **options}.get("pp", 1) == 1:
        options = {name: value for name, value in options.items() if name not in layouts.of_stages}
    told = {known: planned[degree] for degree, known in layouts.options if degree in planned}
    is_fixed = planned.get("zero") in layouts.zero  # Of `fsdp` there is one stage, and no option.
    lacking = [
        name for name in planned if name not in ("recompute", "is_searched", *dict(layouts.options)) and not (name == "zero" and is_fixed)
    ]
    if lacking:
        plain = ONE_F_ONE_B if lacking[0] == "schedule" else 1
        raise EngineError(
            f"the plan lays the train engine {name!r} out with {lacking[0]} {planned[lacking[0]]}, which it does not have",
            now=f"Pin another layout (`pin: {{train: {{layout: {{{lacking[0]}: {plain}}}}}}}`), or take an engine that has it: "
            "`m2flow engines` lists them.",
        )
    return {**told, **({option: value} if planned.get("recompute") else {}), **options}


def server_of(info: EngineInfo) -> Product | None:
    """The inference server that an engine needs in an interpreter of its own."""
    if not info.server:
        return None
    module, _, name = info.server.partition(":")
    return cast(Product, getattr(importlib.import_module(module), name))


def make_rollout(name: str, model: Model, settings: EngineSettings) -> RolloutEngine:
    return cast(RolloutEngine, _as_registered(_made(find_engine(name, "rollout"), model, settings), name, "rollout", settings))


def make_train(name: str, model: Model, settings: EngineSettings) -> TrainEngine:
    info = find_engine(name, "train")
    if model.head not in info.capabilities.heads:
        raise EngineError(f"the train engine {name!r} can't hold a model with a {model.head} head", now="See `m2flow engines`.")
    if model.lora is not None and not info.capabilities.lora:
        raise EngineError(f"the train engine {name!r} can't train adapters", now="See `m2flow engines`, or leave `lora=` out.")
    if model.routing is not None and not info.capabilities.routed_experts:
        raise EngineError(f"the train engine {name!r} can't replay routing", now="See `m2flow engines`, or leave `replay_routing=` out.")
    if model.balance is not None and not info.capabilities.balances_experts:
        raise EngineError(f"the train engine {name!r} can't balance experts", now="See `m2flow engines`, or leave `balance=` out.")
    return cast(TrainEngine, _as_registered(_made(info, model, settings, is_ranked=settings.num_ranks > 1), name, "train", settings))


def make_function(name: str, settings: EngineSettings) -> FunctionEngine:
    return cast(FunctionEngine, _made(find_engine(name, "function"), settings))


def _made(info: EngineInfo, *given: object, is_ranked: bool = False) -> Any:
    place = info.ranked if is_ranked and info.ranked else info.factory
    module, _, name = place.partition(":")
    with _naming_what_is_broken(f"the {info.kind} engine {info.name!r} ({place})", "take another engine"):
        return getattr(importlib.import_module(module), name)(*given)


@contextlib.contextmanager
def _naming_what_is_broken(what: str, otherwise: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, M2FlowError) or engine_that_raised(error):
            raise
        now = f"Mend it, or {otherwise}: see m2flow.engines.registry."
        raise EngineError(f"{what} can't be loaded: {error!r}", now=now, remote=traceback.format_exc()) from error


def _as_registered(engine: Engine, name: str, kind: EngineKind, settings: EngineSettings) -> Engine:
    """Return the engine. Raises `EngineError`: it says other capabilities of itself than plans go by."""
    planned = capabilities_of(name, kind, settings.options, settings.num_ranks)
    if engine.capabilities != planned:
        wrong = [field.name for field in fields(Capabilities) if getattr(engine.capabilities, field.name) != getattr(planned, field.name)]
        raise EngineError(
            f"the {kind} engine {name!r} and its registration differ in {', '.join(wrong)}",
            now="Its class has `capabilities = INFO.capabilities`, and its constructor makes them "
            "`self.capabilities.configured(settings.options, settings.num_ranks)`.",
        )
    return engine


# ---- what rollout engines return


def vocabulary_of(engine: RolloutEngine, model: Model) -> int | None:
    """The number of token ids of an engine's model, as the config in its directory has it; None: not known."""
    if engine.has_own_ids:
        return None
    try:
        described = json.loads((Path(model.path).expanduser() / "config.json").read_text())
        return int({**described, **described.get("text_config", {})}["vocab_size"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


class StepCheck:
    """Check what `step` of a rollout engine returns against the contract.

    Args:
        role: whose samples the engine generates.
        vocabulary: the number of its model's token ids; None: not known.
        window_of: the oldest and newest version of the weights that may be among a request's tokens.
    """

    def __init__(self, engine: RolloutEngine, role: str, vocabulary: int | None, window_of: Callable[[int], tuple[int, int]]) -> None:
        self._window_of = window_of
        self._whose = f"the rollout engine {getattr(engine, 'name', type(engine).__name__)!r} of {role}"
        self._vocabulary = vocabulary

    def made(self, stepped: object, most_of: Callable[[int], int]) -> None:
        """Check what samples or turns are made of. Raises `EngineError`, which names engine and sample.

        Args:
            most_of: the most tokens that a request may be given.
        """
        if not isinstance(stepped, list | tuple) or not all(isinstance(one, Generated) for one in stepped):
            raise EngineError(f"{self._whose} returned {stepped!r:.200} from step(), which is no list of Generated", now=_SUITE)
        for one in stepped:
            if what := self._misshapen(one, most_of(one.id)):
                raise _fault(one.id, f"came from {self._whose} with {what}")
        # Hundreds may leave in one step, so their values are looked at together, and each by itself only to find the one.
        if stepped and self._wrong_values(stepped):
            for one in stepped:
                if what := self._wrong_values([one]):
                    raise _fault(one.id, f"came from {self._whose} with {what}")

    def _misshapen(self, one: Generated, most: int) -> str:
        finish, text = cast(object, one.finish), cast(object, one.text)
        if finish not in (Finish.STOP, Finish.LENGTH):
            return f"the finish {finish!r}, and step() returns what has ended by itself: Finish.STOP or Finish.LENGTH"
        if not isinstance(text, str):
            return f"the text {text!r:.80}, which is no str"
        columns = [getattr(one, name) for name in _MADE]
        odd = [name for name, column in zip(_MADE, columns, strict=True) if not isinstance(column, np.ndarray) or column.ndim != 1]
        if odd:
            return f"{', '.join(odd)} that are no one-dimensional array of NumPy"
        num, *others = map(len, columns)
        if others != [num] * len(others):
            return ", ".join(f"{len(column)} {name}" for name, column in zip(_MADE, columns, strict=True))
        return f"{num} tokens, and max_new_tokens is {most}" if num > most else ""

    def _wrong_values(self, some: Sequence[Generated]) -> str:
        """What is wrong with the values of these samples, taken together; where their windows differ, each alone may yet be right."""
        tokens, logprobs, versions = (np.concatenate([getattr(one, name) for one in some]) for name in _MADE[:3])
        if not len(tokens):
            return ""
        lowest, highest = tokens.min(), tokens.max()
        if tokens.dtype.kind != "i" or lowest < 0 or (self._vocabulary is not None and highest >= self._vocabulary):
            bound = "0 up" if self._vocabulary is None else f"0 to {self._vocabulary - 1}"
            return f"tokens of {lowest} to {highest}, and its model has the ids {bound}"
        if not np.isfinite(logprobs).all():
            return "log-probabilities that are not finite"
        windows = {self._window_of(one.id) for one in some}
        oldest, newest = max(first for first, _ in windows), min(last for _, last in windows)
        if not oldest <= versions.min() <= versions.max() <= newest:
            return f"tokens of versions {versions.min()} to {versions.max()} of the weights, and may have those of {oldest} to {newest}"
        return ""

    def ids(self, left: Sequence[int], running: Collection[int], *, is_idle: bool) -> None:
        """Check which requests it has returned as finished.

        Args:
            running: those that it had and has not returned before; where it is not idle, those of `left` are enough.
            is_idle: it says that it has no more.
        Raises:
            EngineError: it returned one that it did not have or had returned before, or it has lost one.
        """
        wrong = next((packed for packed, num in Counter(left).items() if num > 1 or packed not in running), None)
        if wrong is not None:
            raise _fault(wrong, f"was returned by {self._whose}, which did not have it or had returned it before")
        lost = sorted(set(running) - set(left)) if is_idle else []
        if lost:
            raise _fault(lost[0], f"was lost by {self._whose}: it has nothing left to do and has not returned it")


_MADE = ("tokens", "logprobs", "versions", "kv_stale")
_SUITE = "`m2flow.testing.rollout_suite` checks an engine against its contract (docs/guide/writing-engines.md)."


def _fault(packed: int, what: str) -> M2FlowError:
    """Make the error about a sample with which a rollout engine has broken its contract."""
    return EngineError(f"sample {SampleId.unpack(packed)} {what}", now=_SUITE).about(packed)


# ---- tables


_Row = tuple[str, Callable[[Capabilities], str]]


def _flag(name: str) -> Callable[[Capabilities], str]:
    return lambda can: "yes" if getattr(can, name) else "no"


def _with_option(has: bool, option: str) -> str:
    return "yes" if has else f"with `{option}`" if option else "no"


def _degree(name: str) -> Callable[[Capabilities], str]:
    def words(can: Capabilities) -> str:
        most = getattr(can.parallel_layouts, name)
        return "any number" if most is None else "no" if most == 1 else f"up to {most}"

    return words


def _layout(words: Callable[[ParallelLayouts], str]) -> Callable[[Capabilities], str]:
    return lambda can: words(can.parallel_layouts)


_ROLLOUT: tuple[_Row, ...] = (
    ("random numbers by sample and position", lambda can: _with_option(can.keyed_seeds, can.keyed_seeds_option)),
    ("bitwise with `--deterministic`", _flag("deterministic")),
    ('new weights under running samples (`kv="keep"`)', _flag("weights_under_requests")),
    ("takes adapters alone (`lora=`)", _flag("lora")),
    ("weights proved by a probe", _flag("probes")),
    ("weights can stay on the device while others work there", _flag("rests")),
    ("cache that running samples do not need can be given back", _flag("shrinks_kv_cache")),
    ("decodes in processes of its own", _flag("self_paced")),
    ("weights into its server (`into_server`)", lambda can: ", ".join(can.into_server) or "has none"),
    ("says which experts a token went to", _flag("routed_experts")),
    ("embeds prompts, to predict lengths (`difficulty: prefill`)", _flag("embeds")),
    ("options of `generate` that it refuses", lambda can: ", ".join(f"`{name}`" for name in can.refused_sampling) or "none"),
    ("tensor parallel", _degree("tp")),
    ("pipeline parallel", _degree("pp")),
    ("expert parallel", _degree("ep")),
)
_TRAIN: tuple[_Row, ...] = (
    ("heads", lambda can: ", ".join(f"`{head}`" for head in can.heads)),
    ("optimisers", lambda can: ", ".join(f"`{name}`" for name in can.optimizers)),
    ("groups of weights with rates and decays of their own", _flag("weight_groups")),
    ("adapters (`lora=`)", _flag("lora")),
    ("replays which experts a token went to (`replay_routing=`)", _flag("routed_experts")),
    ("keeps experts evenly loaded (`balance=`)", _flag("balances_experts")),
    ("bitwise with `--deterministic`", _flag("deterministic")),
    ("micro-batches beyond its memory are tried in halves", lambda can: "on one rank" if can.retries_smaller else "no"),
    ("weights can be copied while it is off its device", _flag("readable_offloaded")),
    ("each rank sends what it holds of the weights", _flag("weight_pieces")),
    ("checkpoints, which every engine with the same ones reads", lambda can: can.checkpoint_format or "its own"),
    ("data parallel", _degree("dp")),
    ("ZeRO stages", _layout(lambda layouts: ", ".join(map(str, layouts.zero)))),
    ("optimiser in the host's memory, as the plan says", _layout(lambda layouts: "yes" if layouts.offload else "no")),
    ("layers recomputed, as the plan says", _layout(lambda layouts: "no" if layouts.recomputes == "never" else layouts.recomputes)),
    ("tensor parallel", _degree("tp")),
    ("sequence parallel", _degree("sp")),
    ("pipeline parallel", _degree("pp")),
    ("expert parallel", _degree("ep")),
)


def capability_tables(infos: Sequence[EngineInfo]) -> str:
    """Print the capabilities of engines as Markdown tables; engines for tests are left out."""
    real = [info for info in infos if not info.factory.startswith("m2flow.testing.")]
    parts = []
    for kind, rows in (("rollout", _ROLLOUT), ("train", _TRAIN)):
        of_kind = [info for info in real if info.kind == kind]
        lines = [_line([kind, *(f"`{info.name}`" for info in of_kind)]), _line(["---"] * (len(of_kind) + 1))]
        lines += [_line([name, *(words(info.capabilities) for info in of_kind)]) for name, words in rows]
        lines.append(_line(["devices", *(", ".join(info.capabilities.devices) for info in of_kind)]))
        lines.append(_line(["of these untested", *(info.untested or "none" for info in of_kind)]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
