"""The terms of the cost model: what a plan's time and memory are made of, in SI units.

    devices, model shapes, a profile --(m2flow.planner)--> Costs --> search, simulator

Data only. `Costs` is what the search and the simulator ask; who answers (a measured profile, or a model of the hardware) is told by each
constant's source. Seconds, bytes, tokens; never milliseconds, GiB or steps.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import msgspec

from m2flow.spec import ClusterSpec

EngineKind = Literal["rollout", "train"]


class Constant(msgspec.Struct, frozen=True):
    """A number with its unit and its source."""

    value: float
    unit: str
    source: str
    """`measured: ...` or `modelled: ...`, with the formula or the data sheet."""


class Layout(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """How one engine is parallelised over its devices: `dp` replicas of `tp * pp * sp` devices each."""

    tp: int = 1
    """Tensor parallel."""
    pp: int = 1
    """Pipeline parallel."""
    sp: int = 1
    """Sequence parallel (Ulysses)."""
    dp: int = 1
    """Data parallel: replicas of a trainer, instances of a rollout engine."""
    ep: int = 1
    """Expert parallel; within the other degrees, so that it adds no devices."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: what the replicas of a trainer shard."""
    offload: bool = False
    """Whether a trainer's optimiser is in the host's memory and stepped there."""
    recompute: bool = False
    """Whether a trainer keeps only the input of each layer, and computes the rest again in the backward pass."""

    @property
    def num_replica_devices(self) -> int:
        return self.tp * self.pp * self.sp

    @property
    def num_devices(self) -> int:
        return self.num_replica_devices * self.dp

    def has_replicas_of(self, other: Layout) -> bool:
        """Whether all degrees but `dp` are those of another layout."""
        return (self.tp, self.pp, self.sp, self.ep) == (other.tp, other.pp, other.sp, other.ep)

    @property
    def num_sharing(self) -> int:
        """Devices that have the same part of a trainer's model, which ZeRO shares out among them."""
        return self.dp * self.sp

    def __str__(self) -> str:
        names = [f"{name}{value}" for name in ("tp", "pp", "sp", "ep", "dp") if (value := getattr(self, name)) > 1]
        names += [f"zero{self.zero}"] if self.zero else []
        return "x".join(names + ["offload"] * self.offload + ["recompute"] * self.recompute) or "one device"


StageSchedule = Literal["1f1b", "zero-bubble"]
"""The order in which the stages of a trainer compute; `zero-bubble`: gradients of weights where a stage would wait."""


class StageOrder(msgspec.Struct, frozen=True):
    """How the micro-batches of a trainer pass through its stages; of one with a single stage, as here by default."""

    micro_batches: int = 1
    """Parts of a micro-batch, which follow each other."""
    vpp: int = 1
    """Chunks of layers that each stage has, in turns (interleaved)."""
    schedule: StageSchedule = "1f1b"


class EngineId(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """An engine of the flow: the role whose model it holds, and its kind."""

    role: str
    kind: EngineKind

    def __str__(self) -> str:
        return f"{self.role}.{self.kind}"


class DecodeCost(msgspec.Struct, frozen=True):
    """Cost of decoding on one rollout instance: a step with one token for each of b samples takes `step_s + b * sample_s`.

    Source:
        Affine in the batch below the saturation batch: weights are read once a step, caches once a sample.
    """

    step_s: float
    sample_s: float
    """At the mean context of the samples."""
    prefill_token_s: float
    max_running: int
    """Samples that fit the cache at their mean length, or that the engine allows, whichever is less."""
    enter_s: float = 0.0
    """Added by each sample that enters: making its request and filling its slot."""
    leave_s: float = 0.0
    """Added by each sample that leaves: making, writing and sending its row."""
    handover_s: float = 0.0
    """Added each time that samples leave, however many leave together."""
    gather_s: float = 0.0
    """Finished samples wait this long for others, to leave together; the last ones of all do not."""

    def seconds(self, num_running: float) -> float:
        return self.step_s + num_running * self.sample_s


class PassCost(msgspec.Struct, frozen=True):
    """Cost of a pass over samples of s tokens on one trainer: `fixed_s` a micro-batch, `sample_s + token_s * s + token2_s * s**2` a sample.

    The pass is forward (log-probabilities, values, scores) or forward and backward, on all devices of the trainer.
    """

    fixed_s: float
    token_s: float
    token2_s: float
    sample_s: float = 0.0
    """Below 0 where samples of a group share the work on their prompt."""
    waits: float = 0.0
    """Of a forward pass through stages: runs that a call waits for, beside its own: those in which the stages fill and empty."""
    run_tokens: float = 0.0
    """Tokens of such a run, on all replicas, where a call has as many."""

    def wait_s(self, num_tokens: float) -> float:
        """Seconds that a call of so many tokens waits for stages."""
        return self.waits * self.token_s * min(num_tokens, self.run_tokens)

    def seconds(self, lengths: Sequence[int], num_microbatches: int = 1) -> float:
        work_s = sum(self.sample_s + self.token_s * s + self.token2_s * s * s for s in lengths)
        return num_microbatches * self.fixed_s + work_s + self.wait_s(sum(lengths))


class TrainCost(msgspec.Struct, frozen=True):
    """Cost of training on one trainer with all its devices."""

    forward: PassCost
    update: PassCost
    """Forward and backward."""
    optimizer_s: float
    """One optimiser step, with the reduction of gradients."""


class FunctionCost(msgspec.Struct, frozen=True):
    """Cost of a reward or an op on one unit of its granularity, in one process."""

    quantiles_s: tuple[float, ...]
    """Latency at evenly spaced probabilities from 0 to 1, both included: the whole distribution, with slow calls."""
    concurrency: int = 1
    """Units that a process works on at once."""
    task_s: float = 0.0
    """Added by each task, however many units it has."""

    @property
    def mean_s(self) -> float:
        """The mean of the distribution that is linear between the quantiles."""
        q = self.quantiles_s
        return sum((a + b) / 2 for a, b in itertools.pairwise(q)) / (len(q) - 1) if len(q) > 1 else q[0]

    def at(self, share: float) -> float:
        """Return the latency at a probability; the distribution is linear between its quantiles.

        >>> FunctionCost((1.0, 2.0, 4.0)).at(0.75)
        3.0
        """
        quantiles = self.quantiles_s
        if len(quantiles) == 1:
            return quantiles[0]
        position = share * (len(quantiles) - 1)
        low = min(int(position), len(quantiles) - 2)
        return quantiles[low] + (position - low) * (quantiles[low + 1] - quantiles[low])


class EpisodeTurn(msgspec.Struct, frozen=True):
    """A turn of an episode that was recorded, and what its agent waited for after it."""

    num_tokens: int
    """Generated; 0: what came before the first turn."""
    prefill_tokens: int = 0
    """Tokens before it that the engine had to read."""
    calls: tuple[tuple[tuple[str, float], ...], ...] = ()
    """Tool calls after it, those at once together, each with its seconds without those for a slot."""
    rest_s: float = 0.0
    """What else passed until the next turn, or the end: the agent's own time."""
    role: str = ""
    """Who spoke, where it was not the role whose episode it is."""


class ToolCost(msgspec.Struct, frozen=True):
    """What the calls of a tool take."""

    name: str
    quantiles_s: tuple[float, ...]
    """Latency at evenly spaced probabilities from 0 to 1, without that for a slot."""
    num: int
    """Calls that were measured."""
    slots: int = 0
    """Calls at once in a process; 0: as many as are asked for."""
    shares_slots: bool = True
    """Whether other tools have the same slots: those that are plain functions."""
    factor: float = 1.0
    """What its latency is multiplied by, in a simulation of a faster one."""


class EpisodeCosts(msgspec.Struct, frozen=True):
    """Episodes of one flow as they were recorded, and the tools that they called."""

    episodes: tuple[tuple[EpisodeTurn, ...], ...] = ()
    tools: tuple[ToolCost, ...] = ()

    def tool(self, name: str) -> ToolCost | None:
        return next((one for one in self.tools if one.name == name), None)


class Footprint(msgspec.Struct, frozen=True):
    """Bytes on each device of an engine, by class of tensor."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    kv: int = 0
    """KV cache: the least that the plan assumes."""
    activations: int = 0
    host: int = 0
    """Host memory for each device, while the engine has the device."""

    @property
    def device_bytes(self) -> int:
        """Bytes on the device while the engine works."""
        return self.weights + self.gradients + self.optimizer + self.kv + self.activations

    @property
    def kept_bytes(self) -> int:
        """Bytes that must survive a switch, on the device or on the host: caches and activations are dropped and rebuilt."""
        return self.weights + self.gradients + self.optimizer


class Switch(msgspec.Struct, frozen=True):
    """Time that an engine takes to leave its devices (offload) and to come back (onload). `is_resident`: it stays on the device."""

    leave_s: float
    come_s: float
    is_resident: bool = False
    kept_bytes: int = 0
    """Bytes that it keeps on each device while it is away: contexts, communication buffers, captured graphs."""
    rebuild_s: float = 0.0
    """Time in which a server that stays while others work on its devices rebuilds the cache and the graphs that it gave up for them."""


class HeldPart(msgspec.Struct, frozen=True):
    """What some ranks of a trainer hold of its model: layers of a stage, and of their experts some."""

    engine: EngineId
    ranks: tuple[int, ...]
    stage: int
    layers: tuple[tuple[int, int], ...]
    """Spans: the first layer and the one after the last. Several, if a stage has chunks of layers."""
    beside: tuple[str, ...] = ()
    """`embedding`, `head`: what else is of the stage."""
    experts: tuple[int, int] | None = None
    """The first and the one after the last, of each layer; None: it has all, or there is none."""


class Arithmetic(msgspec.Struct, frozen=True):
    """What one token costs an engine's model, and what a device has for it; for tokens a second, MFU and bandwidth in print."""

    token_flops: float
    """Operations of a forward pass for a token, beside attention."""
    attention_flops: float
    """Operations of attention over a sample of s tokens are this times s**2."""
    weights_bytes: float
    """Bytes of weights that a decode step of the usual batch reads, of all devices of an instance together."""
    token_bytes: float
    """Bytes of a token's KV cache, of all devices of an instance together."""
    peak_flops: float
    """FLOP/s of one device."""
    bytes_s: float
    """Peak memory bandwidth of one device."""


DRAWS_PER_GROUP = 2.0
"""Prompts that a refill is expected to draw for each group that it keeps, where no run has counted them. An assumption.

Source:
    verl's synchronous DAPO trainer requests two for each missing group (`replay_buffer.py`).
"""


class Costs(ABC):
    """Answers every question about time and memory of one flow on one cluster. `pool` is a name of `ClusterSpec.pools`."""

    @abstractmethod
    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        """List the legal layouts on exactly this many devices, regardless of memory. Empty if there is none."""

    def layouts_like(self, engine: EngineId, pool: str, num_devices: int, like: Layout) -> Sequence[Layout]:
        """List those of `layouts` that have the replicas of another one."""
        return [layout for layout in self.layouts(engine, pool, num_devices) if layout.has_replicas_of(like)]

    @abstractmethod
    def unit(self, engine: EngineId, pool: str) -> int:
        """Return the devices of the smallest legal layout that fits the memory: the grain of the search. 0 if none fits."""

    def like(self, engine: EngineId) -> EngineId:
        """Return an engine that costs the same in every layout, so that costs need be asked only once for both."""
        return engine

    @abstractmethod
    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost: ...

    @abstractmethod
    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost: ...

    @abstractmethod
    def function(self, call: str) -> FunctionCost:
        """Return the cost of a call on functions, by its name (`reward.score`)."""

    def episodes(self) -> EpisodeCosts:
        """Return recorded episodes; none where nobody measured any, so that a simulated episode is one turn."""
        return EpisodeCosts()

    @abstractmethod
    def footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint: ...

    @abstractmethod
    def device_bytes(self, pool: str) -> int:
        """Return the memory of a device that engines may use."""

    @abstractmethod
    def host_bytes(self, pool: str) -> int:
        """Return the host memory that engines may use, for each device."""

    @abstractmethod
    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        """Return the time that the engine takes to leave its devices and to come back."""

    @abstractmethod
    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        """Return the time of a weight sync from the trainer (pool, layout) to all its rollout instances."""

    @abstractmethod
    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        """Return the time of a transfer of samples between workers, by pool; `""` is a process on the host."""

    def message_s(self) -> float:
        """Return the latency of a message between controller and worker. 0 where nobody measured it."""
        return 0.0

    def smaller_caches(self, engine: EngineId, pool: str, layout: Layout) -> Sequence[tuple[Footprint, int]]:
        """Return KV caches smaller than the full one that a rollout engine may run with, each with the samples that it holds."""
        return ()

    def arithmetic(self, engine: EngineId, pool: str, layout: Layout) -> Arithmetic | None:
        """Return what a token costs; None where only times are known."""
        return None

    def stage_order(self, engine: EngineId, pool: str, layout: Layout) -> StageOrder:
        """How micro-batches of a trainer pass through its stages, if it has some and that is known."""
        return StageOrder()

    def held_parts(self, engine: EngineId, pool: str, layout: Layout) -> tuple[HeldPart, ...]:
        """What the ranks of a trainer hold, those that hold the same together; empty if all hold the same, or it is not known."""
        return ()

    def rest_s(self) -> float:
        """Return the time of a step that belongs to none of its calls: the program, metrics, moving its data. 0 where nobody knows it."""
        return 0.0

    def draws_per_group(self) -> float:
        """Return how many prompts a refill draws for each group that it keeps, 1 or more."""
        return DRAWS_PER_GROUP

    def spread(self, work: str) -> tuple[float, float]:
        """Return factors between which the time of a kind of work is believed to lie, predicted time being 1.

        Args:
            work: `generate`, `forward`, `update`, `function`, `sync`, `switch` or `rest`.
        """
        return 1.0, 1.0

    def slowdown(self, engine: EngineKind, beside: Literal["rollout", "train", "function"]) -> float:
        """Return the factor by which an engine is slower while one of kind `beside` works on other devices of its host.

        Processes on one machine share memory bandwidth, caches and power. 1 where nobody measured it.
        """
        return 1.0

    def for_spec(self, spec: ClusterSpec) -> Costs | None:
        """Return the costs of the same flow under another spec; None where these are not known."""
        return None

    @abstractmethod
    def constants(self) -> dict[str, Constant]:
        """Return every constant in use, by a dotted name (`policy.rollout.step_s`), with its source, as `m2flow plan` prints them."""
