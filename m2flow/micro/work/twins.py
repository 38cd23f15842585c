"""Roles of one process that have the same model: one engine holds it for all of them, or lends what it never changes.

    Reference(path), Reference(path)                      one engine, loaded once
    Policy(path, lora=...), Reference(path)               the reference computes from the policy's weights, without its adapters
    Policy(path, lora=...), Reference(policy)             likewise, with the adapters that the policy had

All only where the engines have the same turn: what leaves a device takes its memory with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from m2flow.micro.plan import EngineSlot
from m2flow.recipe import Model


def twin_of(slot: EngineSlot, slots: Sequence[EngineSlot], models: Mapping[str, Model]) -> str | None:
    """The first role before this one, in the process's order, whose trainer is the very same, for ever; None if there is none."""
    before = _alike(slot, slots[: slots.index(slot)])
    return next((one.role for one in before if models[one.role] == models[slot.role] and models[slot.role].is_frozen), None)


def lender_of(slot: EngineSlot, slots: Sequence[EngineSlot], models: Mapping[str, Model]) -> str | None:
    """The role of a policy with adapters, from whose weights this one's model can be computed; None if there is none."""
    own = models.get(slot.role)
    if slot.kind != "train" or own is None or own.is_policy:
        return None
    for one in _alike(slot, slots):
        policy = models[one.role]
        if policy.lora is None or not policy.is_policy:
            continue
        if own in (replace(policy, is_policy=False), replace(policy, lora=None, rollout_dtype=None, is_policy=False, is_frozen=True)):
            return one.role
    return None


def _alike(slot: EngineSlot, slots: Sequence[EngineSlot]) -> list[EngineSlot]:
    """Trainers of other roles, by the same engine, in the same turn."""
    same = (slot.kind, slot.engine, slot.takes_turn, slot.stays)
    return [one for one in slots if one.role != slot.role and (one.kind, one.engine, one.takes_turn, one.stays) == same]
