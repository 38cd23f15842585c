"""Costs from a profile: what was measured where it was, a model of the hardware for the rest, and which is which.

    Profile, ModelledCosts --ProfiledCosts--> search, simulator

A profile of `m2flow profile` speaks of this machine alone (the pool named ""); what a run has measured of itself, of the pools that its
engines are in. An engine on another number of its devices than was measured is modelled, and then corrected by how far the model is off
where both are known; so is a trainer in another number of ranks. Pools elsewhere, memory and legality are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, final

import msgspec

from m2flow.micro.costs.modelled import ModelledCosts
from m2flow.micro.costs.profile import MeasuredEngine, MeasuredPass, Profile
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
from m2flow.spec import ClusterSpec

HERE = ""
"""The pool that is this machine."""

C = TypeVar("C", bound=msgspec.Struct)


@final
class ProfiledCosts(Costs):
    """Measured costs of one flow on this machine, before those of the model that `modelled` is."""

    def __init__(self, profile: Profile, modelled: ModelledCosts) -> None:
        self.profile = profile
        self.modelled = modelled

    def for_spec(self, spec: ClusterSpec) -> ProfiledCosts:
        return ProfiledCosts(self.profile, self.modelled.for_spec(spec))

    def layouts(self, engine: EngineId, pool: str, num_devices: int) -> Sequence[Layout]:
        return self.modelled.layouts(engine, pool, num_devices)

    def unit(self, engine: EngineId, pool: str) -> int:
        return self.modelled.unit(engine, pool)

    def decode(self, engine: EngineId, pool: str, layout: Layout) -> DecodeCost:
        modelled = self.modelled.decode(engine, pool, layout)
        measured = self._measured(engine, pool, layout.num_replica_devices)
        if measured is not None and measured.decode is not None:
            return self._decode_cost(engine, measured, modelled)
        known = self._other(engine, pool, lambda one: one.decode is not None)
        if known is None:
            return modelled
        there = known.layout
        return _scaled(modelled, self.decode(engine, pool, there), self.modelled.decode(engine, pool, there))

    def train(self, engine: EngineId, pool: str, layout: Layout) -> TrainCost:
        modelled = self.modelled.train(engine, pool, layout)
        measured = self._measured(engine, pool, layout.num_devices, layout.dp)
        known = measured or self._other(engine, pool, lambda one: one.update is not None or one.forward is not None)
        if known is None:
            return modelled
        there = modelled if measured else self.modelled.train(engine, pool, known.layout)
        update = _pass_cost(known.update) if known.update else there.update
        # Of a trainer that never looked at log-probabilities alone: a third of forward and backward.
        forward = _pass_cost(known.forward) if known.forward else _times(update, 1 / 3) if known.update else there.forward
        optimizer_s = known.optimizer_s or there.optimizer_s
        if measured:
            return TrainCost(forward, update, optimizer_s)
        ratio = modelled.optimizer_s / there.optimizer_s if there.optimizer_s else 1.0
        return TrainCost(
            _scaled(modelled.forward, forward, there.forward), _scaled(modelled.update, update, there.update), optimizer_s * ratio
        )

    def function(self, call: str) -> FunctionCost:
        found = self.profile.function(call.partition("@")[0])
        return self.modelled.function(call) if found is None else FunctionCost(found.quantiles_s, found.concurrency, found.task_s)

    def footprint(self, engine: EngineId, pool: str, layout: Layout) -> Footprint:
        return self.modelled.footprint(engine, pool, layout)

    def device_bytes(self, pool: str) -> int:
        return self.modelled.device_bytes(pool)

    def host_bytes(self, pool: str) -> int:
        return self.modelled.host_bytes(pool)

    def switch(self, engine: EngineId, pool: str, footprint: Footprint) -> Switch:
        modelled = self.modelled.switch(engine, pool, footprint)
        known = self._other(engine, pool, lambda one: one.come_s > 0)
        return modelled if known is None else Switch(0.0, known.come_s, modelled.is_resident)

    def sync_s(self, role: str, source: tuple[str, Layout], target: tuple[str, Layout], *, is_same_devices: bool) -> float:
        transport = "same process" if is_same_devices else "shared memory"
        found = next((sync for sync in self.profile.syncs if (sync.role, sync.transport) == (role, transport)), None)
        if found is None or (source[0], target[0]) != (HERE, HERE):
            return self.modelled.sync_s(role, source, target, is_same_devices=is_same_devices)
        return found.publish_s + found.load_s + self.profile.turn_s  # New weights come once a step, as the program's turn does.

    def hop_s(self, num_bytes: float, source: str, target: str) -> float:
        if (source, target) == (HERE, HERE) and self.profile.hop_s:
            return self.message_s() + num_bytes * self.profile.byte_s
        return self.modelled.hop_s(num_bytes, source, target)

    def message_s(self) -> float:
        return self.profile.hop_s / 2  # To the controller, and from it.

    def slowdown(self, engine: EngineKind, beside: Literal["rollout", "train", "function"]) -> float:
        return max((one.slowdown.get(beside, 1.0) for one in self.profile.engines if one.kind == engine), default=1.0)

    def constants(self) -> dict[str, Constant]:
        """What was measured, and of the model what is still in use."""
        measured = self.profile.constants()
        engines = {f"{one.name}.{one.pool}." for one in self.profile.engines}
        functions = {f"{one.call}." for one in self.profile.functions}
        rest = {
            name: constant
            for name, constant in self.modelled.constants().items()
            if not any(name.startswith(one) for one in engines | functions)
        }
        return measured | rest

    def _measured(self, engine: EngineId, pool: str, num_devices: int, ranks: int = 1) -> MeasuredEngine | None:
        return self.profile.engine(engine.role, engine.kind, num_devices, ranks, pool)

    def _other(self, engine: EngineId, pool: str, has: Callable[[MeasuredEngine], bool]) -> MeasuredEngine | None:
        """The largest layout of the engine that was measured in this respect."""
        wanted = engine.role, engine.kind, pool
        known = [one for one in self.profile.engines if (one.role, one.kind, one.pool) == wanted and has(one)]
        return max(known, key=lambda one: one.num_devices, default=None)

    def _decode_cost(self, engine: EngineId, measured: MeasuredEngine, modelled: DecodeCost) -> DecodeCost:
        decode = measured.decode
        assert decode is not None
        context = self.modelled.extent(engine.role).context
        return DecodeCost(
            step_s=decode.step_s,
            sample_s=decode.sample_s + decode.context_s * context,
            prefill_token_s=decode.prefill_token_s,
            max_running=modelled.max_running,
            enter_s=decode.enter_s,
            leave_s=decode.leave_s,
            handover_s=decode.handover_s,
            gather_s=self.profile.gather_s,
        )


def _pass_cost(measured: MeasuredPass) -> PassCost:
    return PassCost(measured.fixed_s, measured.token_s, measured.token2_s, measured.sample_s)


def _times(cost: PassCost, factor: float) -> PassCost:
    return PassCost(cost.fixed_s * factor, cost.token_s * factor, cost.token2_s * factor, cost.sample_s * factor)


def _scaled(modelled: C, known: C, known_modelled: C) -> C:
    """The model's numbers, each corrected by what it is off by where it was measured; what it does not have is as it was measured."""
    changes = {}
    for name in modelled.__struct_fields__:
        here, measured, there = (getattr(one, name) for one in (modelled, known, known_modelled))
        if isinstance(measured, float):
            changes[name] = here * measured / there if there else measured
    return msgspec.structs.replace(modelled, **changes)
