"""What tests cost in CPU time: `pytest --cpu-times=FILE`.

FILE receives a line for each phase of each test, and for each process's imports and collection: seconds of CPU time, seconds of wall time,
phase, node, separated by tabs. The summary names the files that cost most. CPU time is that of the process that runs the test, of the
processes that it has waited for, and of those that still run; so a server that a module shares counts where it works. On a machine shared
with other work it tells more than how long a test took.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

_KEY = "m2flow-cpu"
_LOOKS_EVERY_S = 0.05
"""Shorter phases do not look for running processes: that takes some milliseconds."""


class CpuTimes:
    """The plugin, in processes that run tests and in the one that reports."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config, self._path = config, path
        self._costs: Counter[str] = Counter()
        self._looked, self._running = 0.0, 0.0
        self._collected: tuple[float, float] | None = None
        if not hasattr(config, "workerinput"):
            path.write_text("")

    def pytest_collection_finish(self) -> None:
        self._collected = self._so_far(), time.time() - psutil.Process().create_time()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._measured(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._measured(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._measured(item, "teardown"))

    def _measured(self, item: pytest.Item, phase: str) -> Iterator[None]:
        cpu, wall = self._so_far(), time.perf_counter()
        try:
            return (yield)
        finally:
            item.user_properties = [(key, value) for key, value in item.user_properties if key != _KEY]
            item.user_properties.append((_KEY, [self._so_far() - cpu, time.perf_counter() - wall, phase]))

    def _so_far(self) -> float:
        now = time.perf_counter()
        if now - self._looked > _LOOKS_EVERY_S:
            self._running = _of_running()
            self._looked = time.perf_counter()
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + reaped.ru_utime + reaped.ru_stime + self._running

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key, value in report.user_properties:
            if key == _KEY and value[2] == report.when and not hasattr(self._config, "workerinput"):
                self._take(*value, report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_KEY] = self._collected
        elif self._collected:
            self._take(*self._collected, "collection", "main")
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        collected = getattr(node, "workeroutput", {}).get(_KEY)
        if collected:
            self._take(*collected, "collection", node.gateway.id)

    def _take(self, cpu: float, wall: float, phase: str, node: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{cpu:.3f}\t{wall:.3f}\t{phase}\t{node}\n")
        self._costs["imports and collection" if phase == "collection" else node.partition("::")[0]] += cpu

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{sum(self._costs.values()):.0f} s of CPU time; most by")
        for name, cpu in self._costs.most_common(50):
            terminalreporter.write_line(f"{cpu:8.1f}s {name}")


def _of_running() -> float:
    """CPU seconds of this process's descendants, with those that they have waited for."""
    parents, times = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(fields[1])
            times[int(name)] = sum(map(int, fields[11:15]))
    total, found = 0, [os.getpid()]
    while found:
        parent = found.pop()
        for child in [pid for pid, its in parents.items() if its == parent]:
            total += times[child]
            found.append(child)
    return total / os.sysconf("SC_CLK_TCK")
