"""One engine leaves a device, another takes it: each as a span, with the bytes that moved and how fast.

    engine.memory() --offload, rest or onload--> engine.memory():   the difference is what moved
    samples that leave a rollout engine --Draining--> how long it ran out of them before it left

On a CPU the device is the host, and little moves: a rollout engine's cache is freed, weights stay where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from m2flow.engines.contract import Engine, RolloutEngine
from m2flow.micro.plan import EngineSlot
from m2flow.observe.recorder import Recorder, now_ns
from m2flow.observe.spans import SpanName


@final
class Draining:
    """Of the rollout engines of one process: since when each has had nothing to put in the place of a sample that left."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: dict[str, list[int]] = {}
        """Role -> since when; how many have ended since, and how many were stopped."""

    def given(self, role: str) -> None:
        """The engine got more samples: it goes on."""
        self._open.pop(role, None)

    def left(self, role: str, engine: RolloutEngine, at_ns: int, *, num_ended: int = 0, num_stopped: int = 0) -> None:
        """Samples left the engine then: ended, or stopped before their end."""
        if not num_ended + num_stopped:
            return
        if role not in self._open:
            if engine.occupancy().num_queued:
                return
            self._open[role] = [at_ns, 0, 0]
        self._open[role][1] += num_ended
        self._open[role][2] += num_stopped

    def over(self, role: str) -> None:
        """The engine is about to leave its devices."""
        if (found := self._open.pop(role, None)) is not None:
            start, num_ended, num_stopped = found
            self._recorder.add(SpanName.DRAIN, start, now_ns(), label=f"{role} rollout", num_drained=num_ended, num_aborted=num_stopped)


def leave(recorder: Recorder, slot: EngineSlot, engine: Engine) -> None:
    """The devices are others' now."""
    _moved(recorder, SpanName.OFFLOAD, slot, engine, engine.rest if slot.stays else engine.offload)


def come(recorder: Recorder, slot: EngineSlot, engine: Engine) -> None:
    """The devices are this engine's."""
    _moved(recorder, SpanName.ONLOAD, slot, engine, engine.onload)


def condense(recorder: Recorder, slot: EngineSlot, engine: RolloutEngine) -> None:
    """Others come to the devices while this one still has samples there."""
    _moved(recorder, SpanName.OFFLOAD, slot, engine, engine.condense, " unused cache")


def _moved(recorder: Recorder, name: SpanName, slot: EngineSlot, engine: Engine, move: Callable[[], None], what: str = "") -> None:
    before = engine.memory().total
    with recorder.span(name, label=f"{slot.role} {slot.kind}{what}") as span:
        start = time.monotonic()
        move()
        took_s = time.monotonic() - start
        num_bytes = abs(engine.memory().total - before)
        span.set(num_bytes=num_bytes, gb_per_s=round(num_bytes / max(took_s, 1e-9) / 1e9, 4))
