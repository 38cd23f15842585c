"""Provide costs as tables, for tests of what uses costs: every term can be set, and nothing is modelled.

>>> from m2flow.micro.protocol.cost_terms import DecodeCost, EngineId, EngineKind, Footprint, Layout
>>> policy = EngineId("policy", "rollout")
>>> costs = TableCosts({"gpus": 80}, {(policy, "gpus"): {Layout(dp=2): Entry(DecodeCost(0.01, 0.0001, 0.0, 64), Footprint(weights=16))}})
>>> costs.layouts(policy, "gpus", 2)
[Layout(tp=1, pp=1, sp=1, dp=2, ep=1, zero=0, offload=False)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from m2flow.micro.protocol.cost_terms import (
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
    """Costs that are the same for every engine of a kind, on every pool and in every layout."""

    decoding: DecodeCost = field(default_factory=lambda: DecodeCost(1.0, 0.0, 0.0, max_running=1_000_000))
    training: TrainCost = field(default_factory=lambda: TrainCost(NOTHING, NOTHING, 0.0))
    functions: Mapping[str, FunctionCost] = field(default_factory=dict)
    """Costs by call; other calls take no time."""
    switching: Switch = field(default_factory=lambda: Switch(0.0, 0.0))
    syncing_s: float = 0.0
    hopping_s: float = 0.0
    messaging_s: float = 0.0
    slower: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(kind of engine, kind beside it on a host) -> factor by which it is slowed down."""
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


class Entry(msgspec.Struct, frozen=True):
    """The costs of an engine in one layout."""

    cost: DecodeCost | TrainCost
    footprint: Footprint = Footprint()
    switch: Switch = Switch(0.0, 0.0)


class TableCosts(Costs):
    """Costs that are looked up in tables. The unit of an engine is the smallest entry that fits; others must be multiples of it."""

    def __init__(
        self,
        device_bytes: Mapping[str, int],
        entries: Mapping[tuple[EngineId, str], Mapping[Layout, Entry]],
        *,
        functions: Mapping[str, FunctionCost] | None = None,
        syncs_s: Mapping[tuple[str, Layout, Layout], tuple[float, float]] | None = None,
        host_bytes: int = 2**60,
        slowdowns: Mapping[str, float] | None = None,
    ) -> None:
        """`syncs_s`: (role, trainer's layout, rollout's layout) -> seconds on the same devices, and on others; 0 where it says nothing.
        `slowdowns`: kind of engine -> how many times as long it takes beside the other kind on one host."""
        self._device_bytes = dict(device_bytes)
        self._entries = {place: dict(table) for place, table in entries.items()}
        self._functions = dict(functions or {})
        self._syncs_s = dict(syncs_s or {})
        self._host_bytes = host_bytes
        self._slowdowns = dict(slowdowns or {})

    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        return [layout for layout in self._entries.get((engine, pool), {}) if layout.num_devices == num_devices]

    def unit(self, engine: EngineId, pool: str) -> int:
        table = self._entries.get((engine, pool), {})
        sizes = [layout.num_devices for layout, e in table.items() if e.footprint.device_bytes <= self._device_bytes[pool]]
        return min(sizes, default=0)

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        cost = self._entries[engine, pool][layout].cost
        assert isinstance(cost, DecodeCost), f"{engine} does not generate"
        return cost

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        cost = self._entries[engine, pool][layout].cost
        assert isinstance(cost, TrainCost), f"{engine} does not train"
        return cost

    def function(self, call: str) -> FunctionCost:
        return self._functions.get(call, FunctionCost((0.0,)))

    def footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        return self._entries[engine, pool][layout].footprint

    def device_bytes(self, pool: str) -> int:
        return self._device_bytes[pool]

    def host_bytes(self, pool: str) -> int:
        return self._host_bytes

    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        return next(e.switch for e in self._entries[engine, pool].values() if e.footprint == footprint)

    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        same_s, other_s = self._syncs_s.get((role, source[1], target[1]), (0.0, 0.0))
        return same_s if is_same_devices else other_s

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        return 0.0

    def slowdown(self, engine: EngineKind, beside: Literal["rollout", "train", "function"]) -> float:
        return self._slowdowns.get(engine, 1.0) if beside != engine else 1.0

    def constants(self) -> dict[str, Constant]:
        return {}
