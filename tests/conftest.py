"""Which tests run, and an account of those that do not.

    --write-skipped=FILE   one line for each test that was skipped: `did not run: GROUP (REASON)`, a tab, its node
    --long                 random programs twenty times as many, and the tests marked `long`
    --rest-of=FILE         what `-m "not slow and not gpu and not long"` left out, and what FILE says was skipped then
    --begin-until=TIME     tests that would begin later, in Unix seconds, are skipped, and named as all that are
    --cpu-times=FILE       what each test costs in CPU time (tests/support/cpu_times.py)

The group of a test is its mark, or else its file. Under pytest-xdist (`-n 2`) whoever collects and runs the tests tells it to the
process that reports: with each report of a test that was skipped, and at its own end.

What is random in tests is the same each time. New seeds are `make fuzz`'s.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import math
import os
import random
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# As `m2flow run --deterministic` does before torch is loaded: eager runs in this process are compared bit by bit with those of workers.
os.environ.setdefault("MKL_CBWR", "AUTO")
# As workers have it: eager runs and runs in this process ask torch for several threads, which would spin on cores that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Collected tests and torch's modules are no garbage: nothing is looked for while they are loaded, a third of that time, and nothing that
# is there by then is looked at again. What tests say of objects' ends they collect for themselves.
gc.disable()
gc.set_threshold(500_000, 20, 50)


def _leave() -> None:
    """At the end Python would go three times through all that is left. A process of xdist has said all by now, its exit status is not
    asked for, and to take its modules apart takes seconds for which the others wait."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    gc.freeze()


atexit.register(_leave)

_MARKS = ("gpu", "slow", "long")
_GROUP = "m2flow-group"
"""The key of a test's group in its reports, and of those left out in what a process of xdist hands over."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("m2flow")
    group.addoption("--write-skipped", metavar="FILE", help="write a line for each test that was skipped")
    group.addoption("--long", action="store_true", help="draw twenty times as many random programs")
    group.addoption("--begin-until", metavar="TIME", type=float, default=math.inf, help="skip what would begin after this Unix time")
    group.addoption("--cpu-times", metavar="FILE", help="write the CPU time of each phase of each test, and name the files that cost most")
    group.addoption("--rest-of", metavar="FILE", help="run what the core leaves out, and what FILE says was skipped there")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Account(config), "m2flow-account")
    if config.getoption("--cpu-times"):
        from cpu_times import CpuTimes

        config.pluginmanager.register(CpuTimes(config, Path(config.getoption("--cpu-times"))), "m2flow-cpu-times")
    # How long a case takes, or to draw one, says how busy the machine is. What is drawn goes by the test alone, so that it fails for a
    # change of the code and for nothing else: not by a seed of the day, not by what failed here before, and not by constants in modules
    # that other tests have loaded.
    settings.register_profile("m2flow", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("m2flow")
    providers._get_local_constants = providers.Constants  # type: ignore[attr-defined]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """What tests share, and scripts that they start, are no tests; some need an extra, or arguments."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[None]:
    """Examples in docstrings are the package's: tests have none, and looking for them takes a tenth of the collection."""
    found = yield
    return [one for one in found if not (isinstance(one, DoctestModule) and file_path.name.startswith("test_"))]


BEGIN_FIRST = (
    "test_random_programs.py", "test_agent_runs.py", "test_context_parallel.py", "test_megatron_numbers.py", "test_pipelines.py",
    "test_resume_layouts.py", "test_sglang.py",
)  # fmt: skip
"""Files that take minutes, which must not be what one process is left with when the others have nothing."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if config.getoption("--long"):
            item.add_marker(pytest.mark.timeout(0))
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="an hour and more in all; pytest --long runs it"))
    rest_of = config.getoption("--rest-of")
    if rest_of:
        skipped = _read(Path(rest_of))
        rest = [item for item in items if _group(item) or item.nodeid in skipped or item.location[0] in skipped]
        config.hook.pytest_deselected(items=[item for item in items if item not in rest])
        items[:] = rest
    items.sort(key=lambda item: item.path.name not in BEGIN_FIRST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Tests and modules stay to the end: no collection looks at them again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that draws from a global generator gets the same each time, whatever ran before it in its process."""
    if time.time() > item.config.getoption("--begin-until"):
        pytest.skip("the time for tests was over before it began")
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:  # `torch.manual_seed` writes down the stack for each kind of device that is not here: a millisecond a test.
        (torch.default_generator if torch.accelerator.current_accelerator() is None else torch).manual_seed(seed)


class _Account:
    """Collects what was skipped, and tells."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._lines: list[str] = []
        self._left_out: set[str] = set()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        if not self._config.getoption("--rest-of"):
            self._left_out.update(_group(item) for item in items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        if report.skipped:
            report.user_properties.append((_GROUP, _group(item)))
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._take(report, "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._take(report, str(dict(report.user_properties).get(_GROUP, "")))

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_GROUP] = sorted(self._left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left_out.update(getattr(node, "workeroutput", {}).get(_GROUP, ()))

    def _take(self, report: pytest.CollectReport | pytest.TestReport, group: str) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
            group = group or Path(report.nodeid.partition("::")[0]).stem.removeprefix("test_")
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            self._lines.append(f"did not run: {group} ({reason})\t{report.nodeid}\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for mark in sorted(self._left_out - {""}):
            terminalreporter.write_line(f"did not run: {mark} (left to `make test-all`)")
        for line in sorted({line.partition("\t")[0] for line in self._lines}):
            terminalreporter.write_line(line)
        path = self._config.getoption("--write-skipped")
        if path:
            Path(path).write_text("".join(self._lines))


def _group(item: pytest.Item) -> str:
    """The first of a test's marks that makes a group; empty for a test of the core."""
    return next((mark for mark in _MARKS if item.get_closest_marker(mark)), "")


def _read(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {line.partition("\t")[2] for line in path.read_text().splitlines()}


def _has_cuda() -> bool:
    """Without a driver PyTorch is not loaded to ask: a process that only collects tests may do without it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()
