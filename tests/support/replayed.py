"""Recorded flows that are run again: rows and a reward, and backends that count what is executed and keep what is not looked at."""

from __future__ import annotations

import random

from m2flow import Sample
from m2flow.macro.graph import Call
from m2flow.macro.replay import BackendWrapper, MemoryRecord, Recorder
from m2flow.macro.session import Backend

ROWS = [{"prompt": f"{i * i}="} for i in range(11)]


def digits(sample: Sample) -> float:
    random.random()  # A reward's own draws are not the flow's.
    return sum(map(str.isdigit, str(sample.text))) / max(sample.num_tokens, 1)


class Counting(BackendWrapper):
    """Counts what is executed."""

    def __init__(self, live: Backend) -> None:
        super().__init__(live)
        self.calls: list[Call] = []

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        super().submit(call)


class Keeping(Recorder):
    """Also keeps the rows that the flow does not look at, as a ledger does of samples and rewards."""

    def __init__(self, live: Backend, record: MemoryRecord) -> None:
        super().__init__(live, record)
        self.record = record

    def submit(self, call: Call) -> None:
        super().submit(call)
        if (call.engine == "rollout" or call.method == "score") and not call.is_gated:
            self.record.keep(call, self._live.value(call.ordinal))
