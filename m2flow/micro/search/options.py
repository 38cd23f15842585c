"""Where an engine may be: its layouts in every pool, with their times, their memory and what it costs to step aside.

    Costs, ClusterSpec --options_of--> Options of each engine (resident, or in the host's memory between its calls)

What a pin forbids, and what does not fit the device alone, is not here. `unfit` remembers the latter, for the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from m2flow.micro.costs.terms import Costs, EngineId, Footprint, Layout, Switch
from m2flow.spec import ClusterSpec, PinSpec

_FREE_PIN = PinSpec()


class Option(msgspec.Struct, frozen=True):
    """One way to place an engine. What the search asks of each again and again is worked out by `of`."""

    pool: str
    layout: Layout
    footprint: Footprint
    num_devices: int
    kept_bytes: int
    """On the device while others work there."""
    device_bytes: int
    """While the engine works."""
    host_bytes: int
    """In the host's memory, for each device: room for what leaves is reserved for good."""
    is_swapped: bool = False
    """It comes to its devices before its calls and leaves them after, with all that it keeps; otherwise it stays."""
    leave_s: float = 0.0
    come_s: float = 0.0

    @classmethod
    def of(cls, pool: str, layout: Layout, footprint: Footprint) -> Option:
        """That stays on its devices."""
        return cls(pool, layout, footprint, layout.num_devices, footprint.kept_bytes, footprint.device_bytes, footprint.host)

    def swapped(self, switch: Switch) -> Option:
        """The same one, if it leaves its devices between its calls."""
        host = self.host_bytes + self.kept_bytes
        pool, layout, footprint, num, device = self.pool, self.layout, self.footprint, self.num_devices, self.device_bytes
        return Option(pool, layout, footprint, num, 0, device, host, True, switch.leave_s, switch.come_s)


@dataclass
class Options:
    """All ways to place each engine."""

    of: dict[EngineId, list[Option]] = field(default_factory=dict)
    unfit: dict[EngineId, list[Option]] = field(default_factory=dict)


def options_of(engines: Sequence[EngineId], costs: Costs, spec: ClusterSpec, counts: dict[str, Sequence[int]] | None = None) -> Options:
    """Every option of every engine, at all device counts that are multiples of the engine's unit.

    With `counts`, by pool, only at those, and with an optimiser in the host's memory only where nothing else fits.
    """
    found = Options()
    for engine in engines:
        like, pin = costs.like(engine), pin_of(engine, spec)
        if like in found.of and pin is _FREE_PIN is pin_of(like, spec):
            found.of[engine], found.unfit[engine] = found.of[like], found.unfit[like]
            continue
        found.of[engine], found.unfit[engine] = [], []
        for pool, size in spec.planned_pools.items():
            if pin.pool not in (None, pool):
                continue
            unit = costs.unit(engine, pool)
            for num in _counts(unit, size.num_devices, counts[pool] if counts else None):
                if not _count_allowed(num, pin):
                    continue
                layouts = [layout for layout in costs.layouts(engine, pool, num) if pin is _FREE_PIN or _layout_allowed(layout, pin)]
                on_device = [layout for layout in layouts if not layout.offload]
                before = len(found.of[engine])
                for some in (on_device, [layout for layout in layouts if layout.offload]):
                    if some is on_device or counts is None or len(found.of[engine]) == before:
                        for layout in some:
                            _add(found, engine, pool, layout, costs, may_swap=spec.may_offload and len(engines) > 1)
            if not unit and not found.unfit[engine]:
                _add_unfit(found, engine, pool, size.num_devices, costs)
    return found


def options_near(engines: Mapping[EngineId, tuple[str, Layout, Sequence[int]]], costs: Costs, spec: ClusterSpec) -> Options:
    """Of each engine, the options in one pool on these numbers of devices whose replicas are as a layout has them."""
    found = Options()
    for engine, (pool, like, counts) in engines.items():
        found.of[engine], found.unfit[engine] = [], []
        for num in _counts(costs.unit(engine, pool), max(counts), counts):
            for layout in costs.layouts(engine, pool, num):
                is_like = (layout.tp, layout.pp, layout.sp, layout.ep) == (like.tp, like.pp, like.sp, like.ep)
                if is_like and is_allowed(engine, pool, layout, spec):
                    _add(found, engine, pool, layout, costs, may_swap=spec.may_offload and len(engines) > 1)
    return found


def _counts(unit: int, num_devices: int, wanted: Iterable[int] | None) -> list[int]:
    if not unit:
        return []
    return sorted({num // unit * unit for num in (range(unit, num_devices + 1, unit) if wanted is None else wanted)} - {0})


def _add(found: Options, engine: EngineId, pool: str, layout: Layout, costs: Costs, *, may_swap: bool) -> None:
    footprint = costs.footprint(engine, pool, layout)
    stays = Option.of(pool, layout, footprint)
    if stays.device_bytes > costs.device_bytes(pool) or stays.host_bytes > costs.host_bytes(pool):
        found.unfit[engine].append(stays)
        return
    found.of[engine].append(stays)
    if may_swap and stays.kept_bytes:
        away = stays.swapped(costs.switch(engine, pool, footprint))
        if away.host_bytes <= costs.host_bytes(pool):
            found.of[engine].append(away)


def _add_unfit(found: Options, engine: EngineId, pool: str, num_devices: int, costs: Costs) -> None:
    found.unfit[engine] += [
        Option.of(pool, layout, costs.footprint(engine, pool, layout)) for layout in costs.layouts(engine, pool, num_devices)
    ]


def pin_of(engine: EngineId, spec: ClusterSpec) -> PinSpec:
    """What the spec fixes for an engine."""
    is_pinned = spec.pin and not spec.pin.keys().isdisjoint((engine.kind, engine.role, str(engine)))
    return spec.pin_of(engine.role, engine.kind) if is_pinned else _FREE_PIN


def pinned_counts(pin: PinSpec, size: int) -> list[int]:
    """Of a pool of that size, the numbers of devices that a pin leaves to its engine, where it says anything of them: its own, or multiples
    of what its layout fixes, whose other degrees are powers of two."""
    layout = pin.layout
    if pin.num_devices is not None or pin.devices is not None:
        num = pin.num_devices if pin.num_devices is not None else pin.devices[1] - pin.devices[0] if pin.devices else 0
        return [num] if num <= size else []
    fixed = math.prod(degree or 1 for degree in (layout.tp, layout.pp, layout.sp, layout.dp))
    return [fixed << i for i in range(size.bit_length()) if fixed << i <= size] if fixed > 1 else []


def is_allowed(engine: EngineId, pool: str, layout: Layout, spec: ClusterSpec) -> bool:
    """Whether what the spec fixes leaves an engine this pool and this layout."""
    pin = pin_of(engine, spec)
    return pin.pool in (None, pool) and _count_allowed(layout.num_devices, pin) and _layout_allowed(layout, pin)


def _count_allowed(num: int, pin: PinSpec) -> bool:
    if pin.devices is not None and num != pin.devices[1] - pin.devices[0]:
        return False
    return pin.num_devices in (None, num)


def _layout_allowed(layout: Layout, pin: PinSpec) -> bool:
    fixed = [(name, value) for name, value in pin.layout if value is not None]
    return all(getattr(layout, name) == value for name, value in fixed) and pin.offload in (None, layout.offload)
