"""Costs with a few round numbers, for tests of what uses costs: every term can be said, and the rest is nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from m2flow.micro.costs.terms import (
    Constant,
    Costs,
    DecodeCost,
    EngineId,
    EngineKind,
    Footprint,
    FunctionCost,
    Layout,
    PassCost,
    Switch,
    TrainCost,
)

NOTHING = PassCost(0.0, 0.0, 0.0)


@dataclass
class PlainCosts(Costs):
    """The same for every engine of a kind, on every pool and in every layout."""

    decoding: DecodeCost = field(default_factory=lambda: DecodeCost(1.0, 0.0, 0.0, max_running=1_000_000))
    training: TrainCost = field(default_factory=lambda: TrainCost(NOTHING, NOTHING, 0.0))
    functions: Mapping[str, FunctionCost] = field(default_factory=dict)
    """By call; others take no time."""
    switching: Switch = field(default_factory=lambda: Switch(0.0, 0.0))
    syncing_s: float = 0.0
    hopping_s: float = 0.0
    messaging_s: float = 0.0
    slower: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(kind of engine, kind beside it) -> how many times as long it takes."""
    bytes_of: Footprint = field(default_factory=Footprint)

    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        return (Layout(dp=num_devices),)

    def unit(self, engine: EngineId, pool: str) -> int:
        return 1

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        return self.decoding

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        return self.training

    def function(self, call: str) -> FunctionCost:
        return self.functions.get(call, FunctionCost((0.0,)))

    def footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        return self.bytes_of

    def device_bytes(self, pool: str) -> int:
        return 1 << 60

    def host_bytes(self, pool: str) -> int:
        return 1 << 60

    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        return self.switching

    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        return self.syncing_s

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        return self.hopping_s

    def message_s(self) -> float:
        return self.messaging_s

    def slowdown(self, engine: EngineKind, beside: Literal["rollout", "train", "function"]) -> float:
        return self.slower.get((engine, beside), 1.0)

    def constants(self) -> dict[str, Constant]:
        return {}
