"""Does a worker hang? From its beats: what tells one that is stuck from one that has much to do.

    silent     no beat, which a thread of its own sends: the process is stopped, or something keeps the interpreter's lock
    stopped    silent, and its host says that a signal stopped it: one that waits for a processor is not, so less patience is enough
    idle       beats, but its main loop makes no turn, and no thread uses the processor: it waits for what does not come
    endless    beats and uses the processor, but one turn lasts longer than the run settings allow

A large micro-batch uses the processor (a thread that waits for a GPU does too), and a slow reward is the user's own, whose time limit
is the flow's: neither is ever idle or endless. Pure: it is told the time.
"""

from __future__ import annotations

from typing import final

_IS_WORKING = 0.005
"""Processor time of a process that works, as a share of the time; a beat costs a tenth of this."""


@final
class Watch:
    """Of one process, from when it is up."""

    def __init__(self, now_s: float, *, hung_after_s: float, turn_limit_s: float | None, num_ranks: int = 1) -> None:
        self._hung_after_s = hung_after_s
        self._turn_limit_s = turn_limit_s
        self._seen_s = self._beat_s = self._turn_s = self._idle_s = now_s
        self._num_turns = -1
        self._cpu_s = 0.0
        self._ranks_seen_s = dict.fromkeys(range(1, num_ranks), now_s)
        self._ranks_cpu_s = dict.fromkeys(range(1, num_ranks), 0.0)

    def seen(self, now_s: float) -> None:
        """Something was heard of it."""
        self._seen_s = now_s

    def beat(self, now_s: float, num_turns: int, cpu_s: float, *, is_in_users_code: bool) -> None:
        """Its pulse: the turns of its main loop so far, and the processor time of all its threads."""
        self._seen_s = self._beat_s = now_s
        cpu_s += sum(self._ranks_cpu_s.values())  # A rank may wait for one that works.
        if num_turns != self._num_turns or is_in_users_code:
            self._num_turns, self._turn_s = num_turns, now_s
            self._idle_s, self._cpu_s = now_s, cpu_s
        elif cpu_s - self._cpu_s > _IS_WORKING * max(now_s - self._idle_s, 1.0):
            self._idle_s, self._cpu_s = now_s, cpu_s

    def rank_beat(self, now_s: float, rank: int, cpu_s: float) -> None:
        """The pulse of another rank of its trainer. That one has no turns: it waits for this process, and only its silence counts."""
        self._ranks_seen_s[rank], self._ranks_cpu_s[rank] = now_s, cpu_s

    def excuse(self, seconds: float) -> None:
        """For so long nobody could have heard it."""
        self._seen_s += seconds
        self._beat_s += seconds
        self._turn_s += seconds
        self._idle_s += seconds
        for rank in self._ranks_seen_s:
            self._ranks_seen_s[rank] += seconds

    def silent_rank(self, now_s: float) -> int:
        """The rank after the first that is silent; 0: none is."""
        quietest = min(self._ranks_seen_s, key=self._ranks_seen_s.__getitem__, default=0)
        return quietest if quietest and now_s - self._ranks_seen_s[quietest] > self._hung_after_s else 0

    def silence_s(self, now_s: float, rank: int) -> float:
        """For how long nothing was heard of a rank."""
        return now_s - (self._ranks_seen_s[rank] if rank else self._seen_s)

    def why_hung(self, now_s: float) -> str:
        """How it hangs; empty if it does not."""
        if rank := self.silent_rank(now_s):  # First: the others wait for it.
            return f"has a rank {rank} that gave no sign of life for {now_s - self._ranks_seen_s[rank]:.0f} s"
        if now_s - self._seen_s > self._hung_after_s:
            return f"gave no sign of life for {now_s - self._seen_s:.0f} s"
        if self._beat_s - self._idle_s > self._hung_after_s:
            return f"made no turn for {self._beat_s - self._turn_s:.0f} s and did nothing"
        if self._turn_limit_s is not None and self._beat_s - self._turn_s > self._turn_limit_s:
            return f"was at one turn for {self._beat_s - self._turn_s:.0f} s"
        return ""
