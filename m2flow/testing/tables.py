"""Costs that are written down: a planner's test says what each layout takes, and nothing is modelled.

>>> from m2flow.micro.costs.terms import DecodeCost, EngineId, EngineKind, Footprint, Layout
>>> policy = EngineId("policy", "rollout")
>>> costs = TableCosts({"gpus": 80}, {(policy, "gpus"): {Layout(dp=2): Entry(DecodeCost(0.01, 0.0001, 0.0, 64), Footprint(weights=16))}})
>>> costs.layouts(policy, "gpus", 2)
[Layout(tp=1, pp=1, sp=1, dp=2, ep=1, zero=0, offload=False)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from m2flow.micro.costs.terms import Constant, Costs, DecodeCost, EngineId, EngineKind, Footprint, FunctionCost, Layout, Switch, TrainCost


class Entry(msgspec.Struct, frozen=True):
    """An engine in one layout."""

    cost: DecodeCost | TrainCost
    footprint: Footprint = Footprint()
    switch: Switch = Switch(0.0, 0.0)


class TableCosts(Costs):
    """All that is asked is looked up. The unit of an engine is the smallest entry that fits, of which others must be multiples."""

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
