"""How full a worker's engines and channels are, as counters of the trace, each time its spans leave.

engines, Outbox.statistics --Gauges.record--> "running, policy", "kv tokens, policy", "tokens/s", "channel to NAME: samples", ...
the process                                   "peak memory bytes", "peak gpu memory bytes"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from m2flow.channels.contract import Statistics
from m2flow.micro.work.channel_counts import ChannelCounts
from m2flow.micro.work.memory_shortage import peak_bytes
from m2flow.micro.work.workbench import Workbench
from m2flow.observe.recorder import Recorder, now_ns

PEAKS = {"host": "peak memory bytes", "GPU": "peak gpu memory bytes"}
"""Counters of the most that a process has taken so far, by where."""
_STEP_BYTES = 1 << 20
"""They are said in steps, so that a process that grows does not fill the trace with it."""


@final
class Gauges:
    """Of one worker."""

    def __init__(self, recorder: Recorder, bench: Workbench) -> None:
        self._recorder = recorder
        self._bench = bench
        self._channels = ChannelCounts(recorder)
        self._said: dict[str, float] = {}
        """By counter, its last value."""
        self._num_tokens = 0
        self._at_ns = now_ns()

    def record(self, channels: Mapping[str, Statistics]) -> None:
        """What has changed since the last time."""
        self._channels.record(channels)
        at_ns = now_ns()
        has_engines = False
        for role, occupancy, version in self._bench.gauges():
            has_engines = True
            self._say(f"running, {role}", occupancy.num_running, at_ns)
            self._say(f"waiting, {role}", occupancy.num_queued, at_ns)
            if occupancy.kv_capacity:
                self._say(f"kv tokens, {role}", occupancy.kv_used, at_ns)
                self._say(f"kv capacity, {role}", occupancy.kv_capacity, at_ns)
            if occupancy.num_put_back:
                self._say(f"put back for want of memory, {role}", occupancy.num_put_back, at_ns)
            if occupancy.num_cached:
                self._say(f"tokens found in the cache, {role}", occupancy.num_cached, at_ns)
            self._say(f"version, {role}", version, at_ns)
        peak, of = peak_bytes()
        self._say(PEAKS[of], -(-peak // _STEP_BYTES) * _STEP_BYTES, at_ns)
        if has_engines:
            num_tokens, _ = self._bench.tokens()
            passed_s = max(at_ns - self._at_ns, 1) / 1e9
            self._say("tokens/s", round((num_tokens - self._num_tokens) / passed_s, 1), at_ns)
            self._say("generated tokens", num_tokens, at_ns)
            self._num_tokens, self._at_ns = num_tokens, at_ns

    def _say(self, name: str, value: float, at_ns: int) -> None:
        if self._said.get(name) != value:
            self._said[name] = value
            self._recorder.count(name, value, at_ns)
