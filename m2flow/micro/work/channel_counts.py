"""What went over each channel, as counters of the trace: written by workers while they run, summed up at the end.

Outbox.statistics --ChannelCounts.record--> counters "channel to NAME: samples" --channels_of--> the run's summary
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from m2flow.channels.contract import Statistics
from m2flow.observe.recorder import Recorder
from m2flow.observe.spans import Count

_PREFIX = "channel to "


@final
class ChannelCounts:
    """Of one worker."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[str, int] = {}

    def record(self, channels: Mapping[str, Statistics]) -> None:
        """The channels that something went over since the last time, by who is at the other end."""
        for peer, counted in channels.items():
            if self._known.get(peer) != counted.num_parcels:
                self._known[peer] = counted.num_parcels
                for what, value in _numbers(counted):
                    self._recorder.count(f"{_PREFIX}{peer}: {what}", value)


def channels_of(counts: Iterable[Count]) -> dict[str, dict[str, float]]:
    """By channel, the last value of each of its counters; those that stayed 0 are left out."""
    found: dict[str, dict[str, float]] = {}
    for count in sorted(counts, key=lambda count: count.at_ns):
        if count.name.startswith(_PREFIX):
            peer, _, what = count.name.removeprefix(_PREFIX).rpartition(": ")
            found.setdefault(f"{count.track} -> {peer}", {})[what] = count.value
    return found


def _numbers(counted: Statistics) -> list[tuple[str, float]]:
    numbers = [
        ("parcels", counted.num_parcels),
        ("samples", counted.num_samples),
        ("bytes", counted.num_bytes),
        ("shared bytes", counted.num_shared_bytes),
        ("bytes over torch.distributed", counted.num_pair_bytes),
        ("parcels not shared", counted.num_unshared),
        ("seconds blocked", round(counted.wait_s, 3)),
    ]
    return [(what, value) for what, value in numbers if value]
