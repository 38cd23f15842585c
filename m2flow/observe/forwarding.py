"""Forward a run's records to collectors and trackers from a process of its own, so that a slow receiver never delays the run.

    Forwarding --standard input--> python -m m2flow.observe.forwarding --reports, standard output--> Forwarding
    run directory ------------------------^

The run only writes its files. Each sink (`m2flow.observe.record_sinks`) has a thread in the forwarding process and retries with
exponential backoff; what could not be delivered is still on the disk. When standard input ends, because the run is over or its process
has died, the forwarding process takes up to `drain_s` more for what is left, reports how far each sink has come, and exits. After that
point a sink that fails twice is given up at once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

import msgspec

from m2flow.errors import described
from m2flow.observe.otlp import OtlpSink, check_otlp, endpoint_named
from m2flow.observe.record_sinks import Report, Sink, Undelivered
from m2flow.observe.trackers import SINKS, check_tracker, is_installed, trackers_configured
from m2flow.spec import RunSettings

_read_reports = msgspec.json.Decoder(list[Report]).decode

_PERIOD_S = 1.0
"""Before the second attempt at a place that did not take something."""
_READ_ON_BYTES = 1 << 20
"""Bytes of the run's files: where so many are not delivered yet, the next portion is sent at once."""
_LONGEST_WAIT_S = 30.0
"""Before an attempt at a place that did not take something."""
_LAST_TRIES = 2
"""At the end, with a place that takes nothing."""
_EXTRA_S = 4.0
"""A sink may overrun `drain_s` by this much: one request may be in flight."""
_REPORT_S = 30.0
"""After which the process is killed that should have said by then how far it has come."""


class Destinations(msgspec.Struct, frozen=True):
    """The sinks that a run's records are sent to, besides the run directory."""

    run_dir: str
    flow: str
    otlp: bool = False
    endpoint: str = ""
    """The OTLP endpoint; empty: what the environment says."""
    trackers: tuple[str, ...] = ()
    drain_s: float = 5.0
    """Seconds at the end of a run for what is not delivered yet."""
    samples: str = ""
    """`module:function` that reads samples for trackers (`m2flow.observe.trackers.ReadSamples`); empty: they get none."""

    def __bool__(self) -> bool:
        return self.otlp or bool(self.trackers)

    def sinks(self) -> list[Sink]:
        run_dir = Path(self.run_dir)
        made: list[Sink] = [OtlpSink(run_dir, self.endpoint)] if self.otlp else []
        for name in self.trackers:
            made.append(SINKS[name](run_dir, self.flow, self.samples))
        return made


_read_destinations = msgspec.json.Decoder(Destinations).decode


def destinations(settings: RunSettings, run_dir: Path, flow: str, warn: Callable[[str], None], samples: str = "") -> Destinations:
    """Read the destinations from the run settings, or from the environment where the settings say nothing.

    Args:
        samples: as in `Destinations`.
    Raises:
        MissingExtra: the settings name one whose package is not installed. SpecError: an endpoint that is none.
    """
    endpoint, trackers = settings.otlp, settings.metrics_to
    has_otlp = bool(endpoint)
    if has_otlp:
        check_otlp(endpoint)
    elif endpoint_named():
        has_otlp = is_installed("opentelemetry.exporter.otlp.proto.http")
        if not has_otlp:
            warn(f"the environment names the OTLP endpoint {endpoint_named()}, and nothing is sent there: pip install 'm2flow[otlp]'")
    if trackers is None:
        trackers = tuple(trackers_configured())
    for name in trackers:
        check_tracker(name)
    return Destinations(str(run_dir.resolve()), flow, has_otlp, endpoint, tuple(trackers), settings.drain_s, samples)


def has_tensorboard(settings: RunSettings) -> bool:
    """Whether the run's directory gets TensorBoard's files."""
    return settings.metrics_to is None or "tensorboard" in settings.metrics_to


@final
class Forwarding:
    """Start and stop the forwarding process. Nothing here raises: a run never fails because its records could not be sent."""

    def __init__(self, wanted: Destinations, warn: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        self.reports: list[Report] = []
        """One for each sink, once the process has ended."""

    def open(self) -> None:
        if not self._wanted:
            return
        log = Path(self._wanted.run_dir) / "logs" / "forwarding.log"
        path = os.pathsep.join(path for path in sys.path if path)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "m2flow.observe.forwarding"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C is for the run.
                )
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(self._wanted) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self._warn(f"nothing is sent to {self._names}: {error}")

    def end(self) -> None:
        """Tell the process that nothing more will be written."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.stdin = None

    def close(self) -> None:
        """Wait until everything is delivered or `drain_s` is over, and warn of what was not."""
        self.end()
        if self._process is None:
            return
        process, self._process = self._process, None
        said = b""
        with contextlib.suppress(OSError, ValueError):
            try:
                said, _ = process.communicate(timeout=self._wanted.drain_s + _EXTRA_S + _REPORT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
        try:
            self.reports = _read_reports(said)
        except msgspec.MsgspecError:
            self._warn(f"sending to {self._names} ended without a report; see {self._wanted.run_dir}/logs/forwarding.log")
        for report in self.reports:
            if report.is_short:
                left = f"{report.num_left_bytes:,} bytes of the records were not delivered to {report.where}"
                self._warn(f"{left}: {report.error or 'there was no time'}. Later: m2flow send {self._wanted.run_dir}")

    @property
    def _names(self) -> str:
        return ", ".join([*(["OTLP"] if self._wanted.otlp else []), *self._wanted.trackers])


@final
class SinkThread:
    """Deliver to one sink, in a thread of its own."""

    def __init__(self, sink: Sink, ends: threading.Event, drain_s: float) -> None:
        self._sink = sink
        self._ends = ends
        """Nothing more will come."""
        self._drain_s = drain_s
        self.error = ""

    def run(self) -> None:
        """Deliver until the records have ended and everything is sent, or `drain_s` is over."""
        deadline, failures, is_open, is_finished = float("inf"), 0, False, False
        last_tries = _LAST_TRIES
        while time.monotonic() < deadline:
            has_ended = self._ends.is_set()
            if has_ended and deadline == float("inf"):
                deadline = time.monotonic() + self._drain_s
            try:
                if not is_open:
                    self._sink.open()
                    is_open = True
                did = self._sink.pump()
                if not did and has_ended:
                    self._sink.finish()
                    is_finished = True
                failures, self.error = 0, ""
            except Undelivered as error:
                failures, did, self.error = failures + 1, False, str(error)
            except Exception as error:  # A fault here must not look like an end.
                failures, did, self.error = failures + 1, False, described(error)
            if has_ended and failures:
                last_tries -= 1
            if is_finished or not last_tries:
                break
            if did and (has_ended or self._sink.num_left_bytes >= _READ_ON_BYTES):
                continue
            wait_s = min(_PERIOD_S * 2.0 ** (failures - 1), _LONGEST_WAIT_S) if failures else self._sink.period_s
            if has_ended:
                time.sleep(min(wait_s, 0.5, max(deadline - time.monotonic(), 0.0)))
            else:
                self._ends.wait(wait_s)
        with contextlib.suppress(Exception):
            self._sink.close()


def deliver(sinks: Iterable[Sink], ends: threading.Event, drain_s: float) -> list[Report]:
    """Deliver what there is and what comes until `ends` to each sink independently. Returns how far each has come."""
    deliveries = [(sink, SinkThread(sink, ends, drain_s)) for sink in sinks]
    threads = [threading.Thread(target=delivery.run, name=sink.name, daemon=True) for sink, delivery in deliveries]
    for thread in threads:
        thread.start()
    ends.wait()
    deadline = time.monotonic() + drain_s + _EXTRA_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    silent = {sink.name for (sink, _), thread in zip(deliveries, threads, strict=True) if thread.is_alive()}
    return [sink.report(delivery.error or ("it did not answer" if sink.name in silent else "")) for sink, delivery in deliveries]


def main() -> None:
    """Run the forwarding process: read destinations from the first line of standard input, write reports when that input ends."""
    with contextlib.suppress(OSError):
        os.nice(5)
    out = os.dup(1)
    os.dup2(2, 1)  # What a library prints is not the report.
    wanted = _read_destinations(sys.stdin.buffer.readline())
    ends = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        ends.set()

    threading.Thread(target=watch, daemon=True, name="end-of-run").start()
    reports = deliver(wanted.sinks(), ends, wanted.drain_s)
    for report in reports:
        print(report.describe(), file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        os.write(out, msgspec.json.encode(reports))
    os._exit(0)  # A thread that waits for a silent receiver must not keep the process alive.


if __name__ == "__main__":
    main()
