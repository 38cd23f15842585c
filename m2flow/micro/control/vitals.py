"""What a worker's heartbeats say of its process: processor, memory, GPU, clock; as counters of the trace.

    Pulse --heard--> Echo back to the worker, counters to the journal
    SpanBlock of the worker --recorded--> the same in the controller's time, to the journal

The clock of a worker on another host is not the controller's. A heartbeat asks for the controller's time, the echo says it, and the next
heartbeat says how that went (`m2flow.observe.clocks`); what the worker records is moved by the offset when it is stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import msgspec

from m2flow.errors import BrokenChannel
from m2flow.micro import messages as m
from m2flow.observe.clocks import ClockOffset, Exchange
from m2flow.observe.recorder import now_ns, unix_anchor_ns
from m2flow.observe.spans import SpanBlock

_PERIOD_NS = 1_000_000_000
"""Between two values of a counter."""
_CLOCK_PERIOD_NS = 10_000_000_000
"""The same of the clock's, which changes by drift alone."""


_MOST_HELD = 1000


@dataclass
class _Process:
    clock: ClockOffset = field(default_factory=ClockOffset)
    counted_ns: int = 0
    cpu_s: float = 0.0
    """By then."""
    clock_counted_ns: int = 0
    held: list[SpanBlock] = field(default_factory=list)
    """Came before anything was known of the clock."""


@final
class Vitals:
    """Of all workers. The controller's thread alone uses it."""

    def __init__(self, store: Callable[[SpanBlock], None], answer: Callable[[str, bytes], None]) -> None:
        """
        Args:
            store: takes what is to be in the trace.
            answer: sends something to a peer of the control link. May raise BrokenChannel.
        """
        self._store = store
        self._answer = answer
        self._anchor_ns = unix_anchor_ns()
        self._processes: dict[str, _Process] = {}

    def heard(self, worker: str, peer: str, pulse: m.Pulse) -> None:
        """A heartbeat has come, from this peer of the link."""
        at_ns = self._now_ns()
        if pulse.sent_ns:
            with contextlib.suppress(BrokenChannel):  # It has just ended.
                self._answer(peer, m.encode(m.Echo(pulse.sent_ns, at_ns, self._now_ns())))
        process = self._processes.setdefault(worker, _Process())
        if pulse.exchange is not None:
            process.clock.add(Exchange(*pulse.exchange))
            self._release(process)
        counts = self._counted(process, pulse, at_ns) + self._clock_counted(process, at_ns)
        if counts:
            self._store(SpanBlock(worker, 0, [], [(name, value, at_ns) for name, value in counts]))

    def recorded(self, worker: str, block: SpanBlock) -> None:
        """What a worker has recorded is stored in our time, as soon as it is known what that is."""
        process = self._processes.setdefault(worker, _Process())
        process.held.append(block)
        if process.clock.error_ns is not None or len(process.held) > _MOST_HELD:
            self._release(process)

    def forget(self, worker: str) -> None:
        """Its process is gone; the next one may have another clock."""
        process = self._processes.pop(worker, None)
        if process is not None:
            self._release(process)

    def close(self) -> None:
        """Nothing more comes."""
        for worker in list(self._processes):
            self.forget(worker)

    def _release(self, process: _Process) -> None:
        held, process.held = process.held, []
        for block in held:
            self._store(msgspec.structs.replace(block, anchor_ns=block.anchor_ns + process.clock.correction_ns))

    def _counted(self, process: _Process, pulse: m.Pulse, at_ns: int) -> list[tuple[str, float]]:
        passed_ns = at_ns - process.counted_ns
        if passed_ns < _PERIOD_NS:
            return []
        counts = [("cpu seconds", pulse.cpu_s)]
        if process.counted_ns:
            counts.append(("cpu cores", round(max(pulse.cpu_s - process.cpu_s, 0.0) / (passed_ns / 1e9), 3)))
        process.counted_ns, process.cpu_s = at_ns, pulse.cpu_s
        for name, value in (
            ("memory bytes", pulse.memory_bytes),
            ("gpu use", pulse.gpu_use),
            ("gpu memory bytes", pulse.gpu_memory_bytes),
        ):
            if value is not None:
                counts.append((name, value))
        return counts

    def _clock_counted(self, process: _Process, at_ns: int) -> list[tuple[str, float]]:
        clock = process.clock
        if clock.error_ns is None or at_ns - process.clock_counted_ns < _CLOCK_PERIOD_NS:
            return []
        process.clock_counted_ns = at_ns
        return [("clock offset s", clock.offset_ns / 1e9), ("clock error s", clock.error_ns / 1e9)]

    def _now_ns(self) -> int:
        return now_ns() + self._anchor_ns
