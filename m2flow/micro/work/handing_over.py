"""One engine leaves a device, another takes it: each as a span, with the bytes that moved and how fast.

    engine.memory() --offload, rest or onload--> engine.memory():   the difference is what moved

On a CPU the device is the host, and little moves: a rollout engine's cache is freed, weights stay where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from m2flow.engines.contract import Engine
from m2flow.micro.plan import EngineSlot
from m2flow.observe.recorder import Recorder
from m2flow.observe.spans import SpanName


def leave(recorder: Recorder, slot: EngineSlot, engine: Engine) -> None:
    """The devices are others' now."""
    _moved(recorder, SpanName.OFFLOAD, slot, engine, engine.rest if slot.stays else engine.offload)


def come(recorder: Recorder, slot: EngineSlot, engine: Engine) -> None:
    """The devices are this engine's."""
    _moved(recorder, SpanName.ONLOAD, slot, engine, engine.onload)


def _moved(recorder: Recorder, name: SpanName, slot: EngineSlot, engine: Engine, move: Callable[[], None]) -> None:
    before = engine.memory().total
    with recorder.span(name, label=f"{slot.role} {slot.kind}") as span:
        start = time.monotonic()
        move()
        took_s = time.monotonic() - start
        num_bytes = abs(engine.memory().total - before)
        span.set(num_bytes=num_bytes, gb_per_s=round(num_bytes / max(took_s, 1e-9) / 1e9, 4))
