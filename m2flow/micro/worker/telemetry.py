"""Record a worker's samples and channels: a span for each stay of a sample in an engine, and counters of what went over each channel.

    admitted, first token seen --SampleSpans.ended--> span `sample`: waited_us, first_us, had, versions, num_tokens, finish
    an episode's agent         --SampleSpans.part---> spans `turn`, `tool`
    Outbox.statistics --ChannelCounts.record--> counters "channel to NAME: samples" --channels_of--> the run's summary

A sample that was stopped here and resumed elsewhere has a span in both places; the second says with how many tokens it came (`had`). With
`every` above 1, the samples of one group in so many are recorded, and as many decode steps are merged into one span.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, final

import numpy as np

from m2flow.channels.channel import Statistics
from m2flow.observe.spans import Count, Recorder, SpanName, now_ns
from m2flow.samples import SampleId

if TYPE_CHECKING:
    from m2flow.agents.episodes import Episodes
    from m2flow.engines.contract import Generated, RolloutEngine

GIVEN_UP = "given_up"
"""Finish reason of a sample that is not resumed."""


# ---- samples


@final
class SampleSpans:
    """Record spans of the samples and decode steps of one process."""

    def __init__(self, recorder: Recorder, *, every: int = 1) -> None:
        self._recorder = recorder
        self._every = every
        self._waiting: dict[int, int] = {}
        """Sample that has no new token yet -> tokens that it came with."""
        self._first_ns: dict[int, int] = {}
        self._steps: dict[str, _Steps] = {}
        """Role -> decode steps that are merged into one span."""

    def began(self, had: Mapping[int, int]) -> None:
        """Note samples that were queued, with the tokens that each has already."""
        self._waiting.update((packed, count) for packed, count in had.items() if self._is_kept(packed))

    def seen(self, counts: Mapping[int, int]) -> None:
        """Note first tokens, from the token counts of all in-flight samples after a decode step."""
        if not self._waiting:
            return
        begun = [packed for packed, had in self._waiting.items() if counts.get(packed, 0) > had]
        if begun:
            self._first_ns.update(dict.fromkeys(begun, now_ns()))
            for packed in begun:
                del self._waiting[packed]

    def ended(self, call: int, start_ns: int, end_ns: int, generated: Generated, *, had: int, waited_us: int) -> None:
        """Record a sample that leaves the engine, finished or stopped."""
        made = generated.versions[generated.versions >= 0]  # An episode has tokens between that nobody sampled.
        versions = made[had:] if len(made) > had else made
        about: dict[str, object] = {}
        if len(versions) and versions[0] != versions[-1]:
            starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
            about["versions"] = versions[starts].tolist()
            about["version_tokens"] = np.diff(starts, append=len(versions)).tolist()
        about["num_prompt_tokens"] = len(generated.prompt_tokens)
        version = int(made[-1]) if len(made) else -1
        self._ended(
            call, generated.id, start_ns, end_ns, generated.num_sampled, version, generated.finish.name.lower(), had, waited_us, about
        )

    def part(self, call: int, packed: int, name: str, start_ns: int, end_ns: int, about: Mapping[str, object]) -> None:
        """Record a turn or a tool call of an episode. Any thread may call this."""
        if self._is_kept(packed):
            self._recorder.add(name, start_ns, end_ns, call=call, sample=packed, **about)

    def given_up(self, call: int, packed: int, start_ns: int, num_tokens: int, version: int, *, had: int, waited_us: int) -> None:
        """Record a sample that leaves the engine and is not resumed."""
        self._ended(call, packed, start_ns, now_ns(), num_tokens, version, GIVEN_UP, had, waited_us, {})

    def _ended(
        self,
        call: int,
        packed: int,
        start_ns: int,
        end_ns: int,
        num_tokens: int,
        version: int,
        finish: str,
        had: int,
        waited_us: int,
        about: dict[str, object],
    ) -> None:
        self._waiting.pop(packed, None)
        first_ns = self._first_ns.pop(packed, None)
        if not self._is_kept(packed):
            return
        if first_ns is not None:
            about["first_us"] = (first_ns - start_ns) // 1000
        if had:
            about["had"] = had
        if waited_us:
            about["waited_us"] = waited_us
        self._recorder.add(
            SpanName.SAMPLE, start_ns, end_ns, call=call, sample=packed, num_tokens=num_tokens, version=version, finish=finish, **about
        )

    def stepped(self, role: str, start_ns: int, end_ns: int, num_running: int, version: int) -> None:
        """Record one decode step of a role's engine."""
        if self._every == 1:
            self._recorder.add(SpanName.ROLLOUT_STEP, start_ns, end_ns, num_samples=num_running, version=version, label=role)
            return
        steps = self._steps.get(role)
        if steps is not None and (steps.version != version or steps.num_steps >= self._every):
            self._flush(role)
            steps = None
        if steps is None:
            steps = self._steps[role] = _Steps(start_ns, version)
        steps.add(start_ns, end_ns, num_running)

    def flush(self, roles: Iterable[str] | None = None) -> None:
        """Record merged decode steps now: the engine has stopped, or another span follows."""
        for role in list(self._steps if roles is None else roles):
            self._flush(role)

    def _flush(self, role: str) -> None:
        steps = self._steps.pop(role, None)
        if steps is not None:
            self._recorder.add(
                SpanName.ROLLOUT_STEP,
                steps.start_ns,
                steps.start_ns + steps.busy_ns,
                num_samples=steps.num_samples,
                version=steps.version,
                label=role,
                num_steps=steps.num_steps,
            )

    def _is_kept(self, packed: int) -> bool:
        return self._every == 1 or SampleId.unpack(packed).prompt % self._every == 0


class _Steps:
    """Decode steps of one engine that become one span, as long as their durations together: time between them is not work."""

    __slots__ = ("busy_ns", "num_samples", "num_steps", "start_ns", "version")

    def __init__(self, start_ns: int, version: int) -> None:
        self.start_ns, self.version = start_ns, version
        self.busy_ns = self.num_samples = self.num_steps = 0

    def add(self, start_ns: int, end_ns: int, num_running: int) -> None:
        self.busy_ns += end_ns - start_ns
        self.num_samples = max(self.num_samples, num_running)
        self.num_steps += 1


@final
class Draining:
    """Record for each rollout engine of a process the time from when samples that left were not replaced until its turn ended."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: dict[str, list[int]] = {}
        """Role -> start in ns, number of samples ended since, number of samples stopped since."""

    def given(self, role: str) -> None:
        """Note that the engine got more samples: it is not draining."""
        self._open.pop(role, None)

    def left(self, role: str, engine: RolloutEngine | Episodes, at_ns: int, *, num_ended: int = 0, num_stopped: int = 0) -> None:
        """Note samples that left the engine at `at_ns`, ended or stopped before their end."""
        if not num_ended + num_stopped:
            return
        if role not in self._open:
            if engine.occupancy().num_queued:
                return
            self._open[role] = [at_ns, 0, 0]
        self._open[role][1] += num_ended
        self._open[role][2] += num_stopped

    def over(self, role: str) -> None:
        """Record the drain: the engine is about to be offloaded."""
        if (found := self._open.pop(role, None)) is not None:
            start, num_ended, num_stopped = found
            self._recorder.add(SpanName.DRAIN, start, now_ns(), label=f"{role} rollout", num_drained=num_ended, num_aborted=num_stopped)


# ---- channels

_PREFIX = "channel to "


@final
class ChannelCounts:
    """Record counters of one worker's outgoing channels."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[str, int] = {}

    def record(self, channels: Mapping[str, Statistics]) -> None:
        """Record the channels, by peer, over which something was sent since the last call."""
        for peer, counted in channels.items():
            if self._known.get(peer) != counted.num_parcels:
                self._known[peer] = counted.num_parcels
                for what, value in _numbers(counted):
                    self._recorder.count(f"{_PREFIX}{peer}: {what}", value)


def channels_of(counts: Iterable[Count]) -> dict[str, dict[str, float]]:
    """Return channel -> last value of each of its counters. Counters that stayed 0 are left out."""
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
