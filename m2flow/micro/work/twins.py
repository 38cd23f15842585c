"""Roles of one process that have the same model: one engine holds it for all of them, or they share what neither changes.

    Reference(path), Reference(path)                      one engine, loaded once
    Policy(path, lora=...), Reference(path)               the reference computes from the policy's base, in the same memory

Both only where the engines have the same turn: what leaves a device takes its memory with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from m2flow.engines.contract import TrainEngine
from m2flow.micro.plan import EngineSlot
from m2flow.recipe import Model


def twin_of(slot: EngineSlot, slots: Sequence[EngineSlot], models: Mapping[str, Model]) -> str | None:
    """The first role before this one, in the process's order, whose trainer is the very same, for ever; None if there is none."""
    before = _alike(slot, slots[: slots.index(slot)])
    return next((one.role for one in before if models[one.role] == models[slot.role] and models[slot.role].is_frozen), None)


def share_bases(slots: Sequence[EngineSlot], models: Mapping[str, Model], engines: Mapping[str, TrainEngine]) -> None:
    """Have each frozen model take the memory of the policy whose adapters are beside the same weights."""
    for slot in slots:
        own = models.get(slot.role)
        if slot.kind != "train" or own is None or not own.is_frozen:
            continue
        for one in _alike(slot, slots):
            policy = models[one.role]
            if policy.lora is not None and replace(policy, lora=None, rollout_dtype=None, is_policy=False, is_frozen=True) == own:
                engines[slot.role].share_base(engines[one.role])


def _alike(slot: EngineSlot, slots: Sequence[EngineSlot]) -> list[EngineSlot]:
    """Trainers of other roles, by the same engine, in the same turn."""
    same = (slot.kind, slot.engine, slot.takes_turn, slot.stays)
    return [one for one in slots if one.role != slot.role and (one.kind, one.engine, one.takes_turn, one.stays) == same]
