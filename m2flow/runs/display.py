"""Show a run: in a terminal its plan, its progress and its summary, in a notebook also its curve, its verdict and its samples.

    plan, tally --Progress--> a live table on a terminal | a line every few seconds elsewhere

The run goes on in the main thread; a display thread reads its tally, which costs the run nothing. The efficiency is an analysis of the
run's trace in a third thread: it takes at most a hundredth of the time, and is not shown for traces beyond 64 MiB (`m2flow analyze` does).

    Run --run_html--> HTML           tally --NotebookProgress--> the cell's output, replaced twice a second

The HTML stands by itself: no scripts, no files, and colours that read on a light and on a dark page.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import math
import os
import re
import shlex
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, final

import msgspec
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from m2flow.errors import M2FlowError

if TYPE_CHECKING:
    from m2flow.micro.protocol.plan import Plan
    from m2flow.micro.protocol.update_semantics import UpdateSteps
    from m2flow.micro.records.accounting import Tally
    from m2flow.runner.run import Summary
    from m2flow.runs.opened import Run
    from m2flow.viewer.health import Alert
    from m2flow.viewer.run_trace import RunTrace


# ---- in a terminal


# ---- plan, summary and progress

_WINDOW_S = 15.0
"""The window over which rates are averaged."""
_LINE_S = 3.0
_QUIET_LINE_S = 15.0
"""Without a terminal: seconds between lines while no step is finished (`_LINE_S`: when one is)."""
_EXAMPLE_S = 5.0
"""How long a sample's text is shown, so that it can be read."""
_BARS = "▁▂▃▄▅▆▇█"
_TEXT_WIDTH = 72
_OPENING = re.compile(r"(?:<[^<>\s]+>\s*)+(?:assistant|model)(?:<[^<>\s]+>|\s)*$")
"""How chat templates open an answer, after the markup that ends the question: `<|im_end|>\\n<|im_start|>assistant\\n`."""


def stopping_text(update: UpdateSteps | None, again: str = "Ctrl-C once more") -> str:
    """Say what happens after Ctrl-C; the update that is under way is finished first."""
    if update is None or not 0 < update.done < update.of:
        return f"stopping the workers; {again} ends at once"
    return f"finishing the update under way ({update.done} of {update.of}), then stopping the workers; {again} ends at once"


class Watched(Protocol):
    """The part of `m2flow.runner.run.Run` that is shown."""

    run_dir: Path

    @property
    def tally(self) -> Tally: ...

    @property
    def running(self) -> Mapping[str, str]: ...

    @property
    def updating(self) -> UpdateSteps | None: ...

    @property
    def starting(self) -> Mapping[str, str]: ...


def show_plan(console: Console, plan: Plan, *, is_eager: bool) -> None:
    """Print the plan: its workers and engines, and the arithmetic of batches and steps."""
    where = "call by call in this process" if is_eager else f"{plan.mode} on {plan.cluster}"
    lines = [f"{plan.flow}: {where}"]
    if not is_eager:
        for worker in plan.workers:
            hosted = ", ".join(s.hosted for s in worker.engines)
            lines.append(f"  {worker.name}  {worker.device}, {_count(worker.threads, 'thread')}  {hosted}")
    width, value_width = (max(map(len, texts)) for texts in zip(*((line.name, line.value) for line in plan.arithmetic), strict=True))
    lines += [f"  {line.name:{width}}  {line.value:{value_width}}  {line.formula}" for line in plan.arithmetic]
    lines += [f"  note: {note}" for note in plan.notes]
    _print(console, "\n".join(lines))


def show_summary(console: Console, flow: str, summary: Summary, tally: Tally) -> None:
    """Print the results of a run, its directory, and the commands to look at it."""
    last = f", the last {tally.num_steps - tally.steps_before}" if tally.steps_before else ""
    steps = f"{summary.steps:,} of {_count(summary.steps_asked, 'step')}" if summary.ended_early else _count(summary.steps, "step")
    rows = [
        ("done", f"{flow}: {steps}{last} in {duration(summary.wall_s)}, {_count(summary.samples, 'sample')}, "
         f"{_count(summary.tokens, 'token')} ({summary.tokens_per_s:,.0f} tokens/s, {summary.samples_per_s:,.1f} samples/s)"),
    ]  # fmt: skip
    if summary.ended_early:
        rows.append(("stopped", summary.ended_early))
    elif not summary.steps_asked:
        rows.append(("steps", "the flow has no loop over steps(...), which gives metrics and checkpoints by step"))
    if summary.left_out:
        rows.append(("left out", ", ".join(f"{_count(number, 'sample')} {reason}" for reason, number in summary.left_out.items())))
    if summary.calls_failed:
        rows.append(("caught", f"{_count(summary.calls_failed, 'call')} failed, and the flow went on (ledger.db has each with its error)"))
    rows += [(name, f"{change_of(values, '.3f')}  {_sparkline(console, values)}") for name, values in tally.rewards.items()]
    rows += logged(tally)
    if tally.num_skipped:
        rows.append(("skipped", f"{_count(tally.num_skipped, 'optimiser step')} without a token to train on (num_steps in metrics.jsonl)"))
    if tally.apart is not None:
        worst = f"most in step {tally.apart.step}, by {tally.apart.mean:.3g} on average"
        said = f"trainer and rollout judge the same tokens differently in {_count(tally.apart.num_updates, 'update')}; {worst}"
        rows.append(("alarm", f"{said} (rollout_diff/mean in metrics.jsonl)"))
    rows += [("alert", f"{alert.title}: {alert.says} ({alert.page})") for alert in final_alerts(Path(summary.run_dir))]
    if summary.busy_s:
        shares = (f"{worker} {busy_s / max(summary.wall_s, 1e-9):.0%}" for worker, busy_s in summary.busy_s.items())
        rows.append(("busy", ", ".join(shares)))
    blocked = {name: counts["seconds blocked"] for name, counts in summary.channels.items() if counts.get("seconds blocked", 0) >= 0.1}
    if blocked:
        rows.append(("blocked", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in blocked.items())))
    efficiency = final_efficiency(Path(summary.run_dir))
    if efficiency is not None:
        rows.append(("efficiency", f"{efficiency:.0%} of the bound that no schedule of its steps can beat"))
    here = shlex.quote(summary.run_dir)
    rows += [("run", summary.run_dir), ("next", f"m2flow view {here}")]
    if efficiency is not None:
        rows.append(("", f"m2flow samples {here}    what the model said, with its rewards"))
        rows.append(("", f"m2flow analyze {here}    where the time went, and what would be faster"))
    width = max(len(name) for name, _ in rows)
    _print(console, "\n".join(f"{name:{width}}  {text}".rstrip() for name, text in rows))


class Progress:
    """Show a run's progress while the `with` block lasts."""

    def __init__(self, console: Console, run: Watched) -> None:
        self._console = console
        self._run = run
        self._rates = Rates()
        self._efficiency = LiveEfficiency()
        self._update_pace = UpdatePace()
        self._num_steps = 0
        self._started_s = 0.0
        self._is_stopping = False
        self._example = ("", "")
        self._example_s = 0.0
        self._live: Live | None = None
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, name="m2flow-progress", daemon=True)

    def expect(self, plan: Plan) -> None:
        """Take the number of steps from the plan's arithmetic."""
        self._num_steps = next((int(line.value) for line in plan.arithmetic if line.name == "steps"), 0)

    def stopping(self) -> None:
        """Ctrl-C was pressed. Called from a signal handler, so it must not touch a stream that the main thread may be writing to."""
        self._is_stopping = True
        if self._live is None:
            with contextlib.suppress(OSError):
                os.write(2, f"\n{stopping_text(self._run.updating)}\n".encode())

    def __enter__(self) -> Progress:
        self._started_s = time.monotonic()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._lines.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self._ended.set()
            self._lines.join()
        if os.environ.get(WEBHOOK):
            self._efficiency.send_last(self._run.run_dir)

    def _table(self) -> Table:
        tally, running = self._run.tally, self._run.running
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="ellipsis", no_wrap=True)
        elapsed_s = time.monotonic() - self._started_s
        bar = Table.grid(padding=(0, 2))
        known = f" / {self._num_steps}" if self._num_steps >= tally.num_steps else ""
        left_s = self._left_s(tally)
        bar.add_row(
            f"{tally.num_steps}{known}",
            ProgressBar(max(self._num_steps, 1), tally.num_steps, width=30),
            duration(elapsed_s),
            "" if left_s is None else f"{duration(left_s)} left",
        )
        table.add_row("step", bar)
        update = self._run.updating
        if update is not None:
            done = Table.grid(padding=(0, 2))
            done.add_row(ProgressBar(update.of, update.done, width=30), self._update_pace.text(update, time.monotonic()))
            table.add_row("update", done)
        for name, values in list(tally.rewards.items()):
            table.add_row(Text(name), Text(f"{values[-1]:.3f}  {_sparkline(self._console, list(values))}"))
        for name, value in logged(tally):
            table.add_row(Text(name), Text(value))
        tokens_per_s, samples_per_s = self._rates.add(time.monotonic(), tally)
        table.add_row(
            "speed", f"{tokens_per_s:,.0f} tokens/s  {samples_per_s:,.1f} samples/s  {_count(tally.num_samples, 'sample')} so far"
        )
        efficiency = self._efficiency.look(self._run.run_dir, time.monotonic())
        if efficiency is not None:
            table.add_row("efficiency", f"{efficiency:.0%} of the bound")
        for alert in list(self._efficiency.alerts.values()):
            table.add_row(Text("alert", style="bold red" if alert.level == "bad" else "bold yellow"), Text(f"{alert.title}: {alert.says}"))
        for worker, doing in sorted(self._run.starting.items()) or sorted(running.items()) or [("running", self._phase(tally))]:
            table.add_row(Text(worker), Text(doing))
        prompt, response = self._sample(tally)
        if prompt or response:
            table.add_row("sample", Text(short_example(prompt, response)))
        if self._is_stopping:
            table.add_row("", Text(stopping_text(update), style="bold"))
        return table

    def _left_s(self, tally: Tally) -> float | None:
        """Estimate the seconds until the last step is done, at the pace of the last steps; None: not known."""
        step_s = tally.step_s(time.monotonic())
        left = self._num_steps - tally.num_steps
        return step_s * left if step_s is not None and left > 0 else None

    def _sample(self, tally: Tally) -> tuple[str, str]:
        now_s = time.monotonic()
        if now_s - self._example_s > _EXAMPLE_S:
            self._example, self._example_s = tally.example, now_s
        return self._example

    def _phase(self, tally: Tally) -> str:
        if not tally.num_samples:
            return "starting"
        return "saving" if tally.num_steps >= self._num_steps else "between two calls"

    def _print_lines(self) -> None:
        last_steps, last_s, example_s = 0, self._started_s, 0.0
        starting: Mapping[str, str] = {}
        said = set[str]()
        while not self._ended.wait(0.25):
            tally, now_s = self._run.tally, time.monotonic()
            rates = self._rates.add(now_s, tally)
            before, starting = starting, dict(self._run.starting)
            if starting and not self._is_stopping:
                wait_s = 0.0 if _num_ready(before) != _num_ready(starting) else _LINE_S if before != starting else _QUIET_LINE_S
                if not before or now_s - last_s > wait_s:
                    _print(self._console, self._starting_line(starting))
                    last_s = now_s
                else:
                    starting = before  # It is said later.
                continue
            has_moved = tally.num_steps > last_steps or ((update := self._run.updating) is not None and update.done > 0)
            is_due = now_s - last_s > (_LINE_S if has_moved else _QUIET_LINE_S)
            if self._is_stopping or not (is_due or (tally.num_steps and not last_steps)):
                continue
            _print(self._console, self._line(tally, rates))
            for rule, alert in list(self._efficiency.alerts.items()):
                if rule not in said:
                    _print(self._console, f"  alert  {alert.title}: {alert.says} ({alert.page})")
                    said.add(rule)
            if now_s - example_s > 3 * _EXAMPLE_S and tally.example != ("", ""):
                _print(self._console, f"  sample {short_example(*tally.example)}")
                example_s = now_s
            last_steps, last_s = tally.num_steps, now_s

    def _starting_line(self, starting: Mapping[str, str]) -> str:
        rest = [f"{worker} {what}" for worker, what in sorted(starting.items()) if what != "ready"]
        passed = f"{duration(time.monotonic() - self._started_s):>7}"
        return "  ".join([f"{passed}  set-up: {_num_ready(starting)} of {_count(len(starting), 'worker')} ready", *rest])

    def _line(self, tally: Tally, rates: tuple[float, float]) -> str:
        known = f"/{self._num_steps}" if self._num_steps >= tally.num_steps else ""
        parts = [f"{duration(time.monotonic() - self._started_s):>7}  step {tally.num_steps}{known}"]
        update = self._run.updating
        parts += [f"update {self._update_pace.text(update, time.monotonic())}"] if update is not None else []
        parts += [f"{name} {values[-1]:.3f}" for name, values in list(tally.rewards.items())]
        parts += [f"{name} {value}" for name, value in logged(tally)]
        parts += [f"{_count(tally.num_skipped, 'optimiser step')} skipped"] if tally.num_skipped else []
        parts += [f"{rates[0]:,.0f} tokens/s", f"{rates[1]:,.1f} samples/s"]
        efficiency, left_s = self._efficiency.look(self._run.run_dir, time.monotonic()), self._left_s(tally)
        parts += [f"efficiency {efficiency:.0%}"] if efficiency is not None else []
        parts += [f"{duration(left_s)} left"] if left_s is not None else []
        parts += [f"{worker}: {doing}" for worker, doing in sorted(self._run.running.items())]
        return "  ".join(parts)


class UpdatePace:
    """The progress of a long update, such as a warm start, and the time that it has left at the pace of its last steps."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, UpdateSteps]] = deque()

    def text(self, update: UpdateSteps, now_s: float) -> str:
        """Say how far an update is: `120 of 350  loss 0.4123  0:34 left`."""
        seen = self._seen
        if (seen and (seen[-1][1].call, seen[-1][1].of) != (update.call, update.of)) or (seen and update.done < seen[-1][1].done):
            seen.clear()
        if not seen or update.done > seen[-1][1].done:
            seen.append((now_s, update))
        while now_s - seen[0][0] > _WINDOW_S and len(seen) > 2:
            seen.popleft()
        parts = [f"{update.done} of {update.of}"]
        parts += [f"loss {update.loss:.4g}"] if update.loss == update.loss else []
        num_done = update.done - seen[0][1].done
        if num_done and update.done < update.of:
            parts.append(f"{duration((seen[-1][0] - seen[0][0]) / num_done * (update.of - update.done))} left")
        return "  ".join(parts)


class Rates:
    """Tokens and samples per second over the last `_WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def add(self, now_s: float, tally: Tally) -> tuple[float, float]:
        num_tokens, num_samples = tally.num_tokens - tally.tokens_before, tally.num_samples - tally.samples_before
        if self._seen and num_samples < self._seen[-1][2]:  # A trainer was lost: the run has resumed, and counts from there.
            self._seen.clear()
        self._seen.append((now_s, num_tokens, num_samples))
        while now_s - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        first_s, tokens, samples = self._seen[0]
        passed_s = max(now_s - first_s, 1e-9)
        return (num_tokens - tokens) / passed_s, (num_samples - samples) / passed_s


def sparkline(values: Sequence[float], *, width: int = 30) -> str:
    """Draw the means of up to `width` even parts as bars, from the lowest to the highest.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    parts = min(width, len(finite))
    bounds = [len(finite) * i // parts for i in range(parts + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] if high > low else _BARS[0] for mean in means)


def change_of(values: Sequence[float], form: str = ".3g") -> str:
    """Say how a metric changed by its means over the first and the last tenth of the steps, one at least: single steps are noise.

    >>> change_of([0.25, 0.75] * 10 + [0.5, 1.0] * 10), change_of([0.25, 0.5], ".3f")
    ('0.5 -> 0.75 (means of the first and last 4 steps)', '0.250 -> 0.500 (first and last step)')
    """
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    part = max(len(finite) // 10, 1)
    first, last = (math.fsum(some) / part for some in (finite[:part], finite[-part:]))
    of = f"means of the first and last {part} steps" if part > 1 else "first and last step"
    return f"{first:{form}} -> {last:{form}} ({of})"


def duration(seconds: float) -> str:
    """Format seconds for people.

    >>> duration(7.25), duration(83), duration(3725)
    ('7.2 s', '1:23', '1:02:05')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _sparkline(console: Console, values: Sequence[float]) -> str:
    return sparkline(values) if (console.encoding or "").lower().startswith("utf") else ""


def logged(tally: Tally) -> list[tuple[str, str]]:
    """The last value of each name that the flow logged, an evaluation's with its interval.

    The mean reward of the step is shown anyway: `log(reward=rewards.mean())` is not shown beside it. Of episodes, the causes of failures
    that there were.
    """
    logs, rows = dict(tally.logs), []
    shown = {f"{values[-1]:.3f}" for values in list(tally.rewards.values())}
    for name, value in logs.items():
        base = name.removesuffix(" low").removesuffix(" high")
        is_no_failure = "episodes/" in name and value == 0
        if is_no_failure or (base != name and base in logs) or (name == "reward" and f"{value:.3f}" in shown):
            continue
        low, high = logs.get(f"{name} low"), logs.get(f"{name} high")
        rows.append((name, f"{value:.4g}" + ("" if low is None or high is None else f" ({low:.2g} to {high:.2g})")))
    return rows


def _num_ready(starting: Mapping[str, str]) -> int:
    return sum(what == "ready" for what in starting.values())


def short_example(prompt: str, response: str) -> str:
    """Shorten a sample to the end of its prompt, without the chat template's opening of the answer, and the beginning of its response."""
    prompt, half = _OPENING.sub("", prompt), _TEXT_WIDTH // 2
    end = prompt if len(prompt) <= half else "..." + prompt[3 - half :]
    beginning = response if len(response) <= half else response[: half - 3] + "..."
    return f"{end!r} -> {beginning!r}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _print(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


# ---- efficiency

_LEAST_PAUSE_S = 5.0
"""Least time between two analyses."""
_PAUSE_FACTOR = 100
"""An analysis that took t seconds is repeated after this many times t."""
_MAX_TRACE_BYTES = 64 << 20
"""Larger traces are not analysed in passing."""
WEBHOOK = "M2FLOW_ALERT_WEBHOOK"
"""The environment variable with the URL that new alerts of a run go to."""
_WEBHOOK_S = 5.0


@final
class LiveEfficiency:
    """The efficiency of a running run, analysed again in the background from time to time."""

    def __init__(self) -> None:
        self.value: float | None = None
        """Bound over measured time of all finished steps, 0 to 1; None: not known."""
        self.alerts: dict[str, Alert] = {}
        """By rule, those that hold or held."""
        self.not_sent = ""
        """Why the webhook did not take the last alert."""
        self._due_s = 0.0
        self._thread: threading.Thread | None = None

    def look(self, run_dir: Path, now_s: float) -> float | None:
        """Return the latest value, and start an analysis if one is due."""
        if self._thread is None and now_s >= self._due_s and _size(run_dir) in range(1, _MAX_TRACE_BYTES):
            self._thread = threading.Thread(target=self._analyse, args=(run_dir,), name="m2flow-efficiency", daemon=True)
            self._thread.start()
        return self.value

    def send_last(self, run_dir: Path) -> None:
        """Send the alerts of a run that has ended which were not seen while it went on."""
        self._raise(run_dir, final_alerts(run_dir))

    def _raise(self, run_dir: Path, alerts: Sequence[Alert]) -> None:
        url = os.environ.get(WEBHOOK, "")
        for alert in alerts:
            if alert.rule not in self.alerts and url:
                try:
                    send_alert(url, run_dir.name, alert)
                except (OSError, ValueError) as error:
                    self.not_sent = str(error)
            self.alerts[alert.rule] = alert

    def _analyse(self, run_dir: Path) -> None:
        began_s = time.monotonic()
        with contextlib.suppress(Exception):  # The files are being written; a display must not fail for that.
            trace = _trace_of(run_dir)
            self.value = _efficiency(trace)
            self._raise(run_dir, alerts_of(run_dir, trace))
        took_s = time.monotonic() - began_s
        self._due_s = time.monotonic() + max(_LEAST_PAUSE_S, _PAUSE_FACTOR * took_s)
        self._thread = None


def efficiency_of(run_dir: Path) -> float | None:
    """Return the bound of a run's steps over the time that they took, 0 to 1; None: not known."""
    return _efficiency(_trace_of(run_dir))


def _efficiency(trace: RunTrace) -> float | None:
    from m2flow.viewer.analysis import analysis_of
    from m2flow.viewer.run_trace import idle_of

    return analysis_of(trace, idle_of(trace)).efficiency


def _trace_of(run_dir: Path) -> RunTrace:
    from m2flow.viewer.run_trace import RunTrace

    trace = RunTrace(run_dir)
    trace.refresh()
    return trace


def final_alerts(run_dir: Path) -> list[Alert]:
    """Return the alerts of a finished run; of one whose trace is too large to read in passing, those that need none."""
    with contextlib.suppress(Exception):
        return alerts_of(run_dir, _trace_of(run_dir) if _size(run_dir) in range(1, _MAX_TRACE_BYTES) else None)
    return []


def alerts_of(run_dir: Path, trace: RunTrace | None) -> list[Alert]:
    from m2flow.viewer.health import alerts_of

    return alerts_of(run_dir, trace)


def send_alert(url: str, run: str, alert: Alert) -> None:
    """Send an alert to a webhook: a POST of one JSON object.

    Raises:
        OSError: it was not taken.
    """
    body = msgspec.json.encode({"run": run, "text": f"{run}: {alert.title}: {alert.says}", **msgspec.structs.asdict(alert)})
    import urllib.request  # With TLS: what a run without a webhook does without.

    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_WEBHOOK_S):
        pass


def final_efficiency(run_dir: Path) -> float | None:
    """Return the efficiency of a finished run; None where its trace is too large to analyse in passing, or can't be read."""
    if _size(run_dir) not in range(1, _MAX_TRACE_BYTES):
        return None
    with contextlib.suppress(Exception):
        return efficiency_of(run_dir)
    return None


def _size(run_dir: Path) -> int:
    try:
        return (run_dir / "trace" / "spans.msgpack").stat().st_size
    except OSError:
        return 0


# ---- in a notebook


_REFRESH_S = 0.5
_WIDTH, _HEIGHT = 560, 150
_MOST_TOKENS = 240
_OTHERS = ("#56b4e9", "#cc79a7", "#e69f00")
_COLOURS = {"reward": "#0072b2", "accuracy": "#d55e00", "eval/accuracy": "#d55e00", "entropy": "#009e73"}
_DIM = "opacity:.65"


# ---- a run's picture


def in_a_line(run: Run) -> str:
    """Say how a run stands in a few words: `done, 20 steps, 7,168 samples, reward 0.31 -> 0.95 (means of ...)`."""
    try:
        parts = [run.state]
    except M2FlowError:
        return "no ledger"
    from m2flow.micro.records.rundir import reading_ledger
    from m2flow.observe.metrics import read_metrics, reward_names

    metrics = read_metrics(run.path)
    with reading_ledger(run.path, "calls") as db:
        done = db.execute("SELECT min(state = 'done') FROM calls WHERE step >= 0 GROUP BY step").fetchall()
    steps = sum(is_done for (is_done,) in done)
    parts.append(f"{steps} step{'' if steps == 1 else 's'}")
    if run.summary is not None:
        parts.append(f"{run.summary.samples:,} samples")
    for name in reward_names(metrics):
        values = [value for _, value in metrics[name] if math.isfinite(value)]
        parts += [f"{name} {change_of(values)}"] if values else []
    return ", ".join(parts)


def run_html(run: Run) -> str:
    """Draw a run: how it stands, its curve, the verdict on its time, and its best and worst last samples with their tokens coloured."""
    from m2flow.observe.metrics import read_metrics, reward_names

    metrics = read_metrics(run.path)
    lines = {name: metrics[name] for name in dict.fromkeys((*reward_names(metrics), *_COLOURS)) if name in metrics}
    said = [f"<b>{_text(run.path.name)}</b> <span style='{_DIM}'>{_text(in_a_line(run))}</span>"]
    options = run.config.get("options", {})
    if options:
        said.append(f"<div style='{_DIM}'>{_text(', '.join(f'{name}={value}' for name, value in options.items()))}</div>")
    said.append(curve(lines))
    verdict = verdict_of(run.path)
    if verdict:
        said.append(f"<div>{_text(verdict)}</div>")
    said += [sample_html(run.path, one) for one in _examples(run)]
    return _framed(said)


def verdict_of(run_dir: Path) -> str:
    """Say in a sentence what the newest steps of a run wait for; empty if no step has been recorded, or its records can't be read."""
    from m2flow.viewer.analysis import analysis_of
    from m2flow.viewer.run_trace import RunTrace, idle_of

    try:
        trace = RunTrace(run_dir)
        trace.refresh()
        verdict = analysis_of(trace, idle_of(trace)).verdict
    except (M2FlowError, OSError):
        return ""
    return verdict.sentence if verdict.num_steps else ""


def _examples(run: Run) -> list[int]:
    """The packed identities of the best and the worst sample of the last step that was rewarded."""
    from m2flow.micro.records.sample_query import SampleQuery
    from m2flow.samples import SampleId

    try:
        with SampleQuery(run.path) as query:
            last = query.columns("reward IS NOT NULL", order="step DESC", limit=1)["step"]
            if not last:
                return []
            chosen = [
                query.columns(f"reward IS NOT NULL AND step = {last[0]}", order=f"reward {way}", limit=1)["sample"][0]
                for way in ("DESC", "ASC")
            ]
    except M2FlowError:
        return []
    return [SampleId(*map(int, str(one).split("/"))).pack() for one in dict.fromkeys(chosen)]


def sample_html(run_dir: Path, packed: int) -> str:
    """Draw a sample: its prompt, then each token of its response on a colour that says how likely it was."""
    from m2flow.viewer.sample_pages import sample_pages

    page = next(sample_pages(run_dir, [packed]), None)
    if page is None:
        return ""
    pieces = zip(page.pieces, page.kinds, page.logprobs or [None] * len(page.pieces), strict=False)
    tokens = [_token(piece, kind, logprob) for piece, kind, logprob in list(pieces)[:_MOST_TOKENS]]
    more = f" <span style='{_DIM}'>and {len(page.pieces) - _MOST_TOKENS:,} more tokens</span>" if len(page.pieces) > _MOST_TOKENS else ""
    reward = ", ".join(f"{_text(by.partition(' ')[0])} {value:g}" for by, value in page.rewards.items())
    head = f"sample {page.call}/{page.prompt}/{page.member}, step {page.step}, {reward or 'no reward'}, {page.finish}"
    body = f"<div style='font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere'>{''.join(tokens)}{more}</div>"
    return f"<div style='margin-top:.6em'><span style='{_DIM}'>{_text(head)}</span>{body}</div>"


def _token(piece: str, kind: int, logprob: float | None) -> str:
    """A token: prompts dim, generated ones on red the darker the less likely they were, and what came from elsewhere underlined."""
    shown = _text(piece.replace("\n", "\u21b5\n"))
    if kind == 0:
        return f"<span style='{_DIM}'>{shown}</span>"
    if kind == 2 or logprob is None:
        return f"<u>{shown}</u>" if kind == 2 else shown
    surprise = min(-logprob / 5, 1.0)
    return f"<span title='probability {math.exp(logprob):.3g}' style='background:rgba(213,94,0,{surprise * 0.7:.2f})'>{shown}</span>"


# ---- curves


def curve(lines: dict[str, list[tuple[int, float]]]) -> str:
    """Draw metrics over steps as an SVG, all on one axis; empty where there are fewer than two points.

    >>> curve({"reward": [(0, 0.5)]})
    ''
    >>> curve({"reward": [(0, 0.5), (1, 1.0)]}).count("polyline")
    1
    """
    points = {name: [(step, value) for step, value in of if math.isfinite(value)] for name, of in lines.items()}
    points = {name: of for name, of in points.items() if len(of) > 1}
    if not points:
        return ""
    steps = [step for of in points.values() for step, _ in of]
    values = [value for of in points.values() for _, value in of]
    low, high = min(*values, 0.0), max(*values, 1.0 if max(values) > 0.2 and max(values) <= 1 else max(values))
    left, right = min(steps), max(steps)
    drawn = []
    others = [name for name in points if name not in _COLOURS]
    colours = _COLOURS | dict(zip(others, _OTHERS * len(others), strict=False))
    for name, of in points.items():
        path = " ".join(
            f"{_scaled(step, left, right, 36, _WIDTH - 8):.1f},{_scaled(value, low, high, _HEIGHT - 18, 8):.1f}" for step, value in of
        )
        drawn.append(f"<polyline points='{path}' fill='none' stroke='{colours[name]}' stroke-width='1.6'/>")
    labels = [
        f"<text x='{40 + 110 * at}' y='{_HEIGHT - 4}' fill='{colours[name]}'>{_text(name)} {of[-1][1]:.3g}</text>"
        for at, (name, of) in enumerate(points.items())
    ]
    axis = "".join(
        f"<text x='2' y='{_scaled(value, low, high, _HEIGHT - 18, 8) + 4:.1f}' fill='currentColor' opacity='.65'>{value:.3g}</text>"
        for value in (low, high)
    )
    steps_text = f"<text x='{_WIDTH - 8}' y='{_HEIGHT - 4}' text-anchor='end' fill='currentColor' opacity='.65'>step {right}</text>"
    size = f"width='{_WIDTH}' height='{_HEIGHT}' viewBox='0 0 {_WIDTH} {_HEIGHT}' style='max-width:100%;height:auto;display:block'"
    said = f"<title>{_text(', '.join(points))} over steps {left} to {right}</title>"
    return f"<svg {size} role='img' font-size='11' font-family='sans-serif'>{said}{axis}{''.join(drawn)}{''.join(labels)}{steps_text}</svg>"


def _scaled(value: float, low: float, high: float, at_low: float, at_high: float) -> float:
    return at_low if high == low else at_low + (value - low) / (high - low) * (at_high - at_low)


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _framed(parts: Sequence[str]) -> str:
    return f"<div style='font-size:13px;line-height:1.45;max-width:46em'>{''.join(parts)}</div>"


# ---- a run that goes on


class NotebookProgress(Progress):
    """Show a run under the cell that runs it, while the `with` block lasts; the last state stays there."""

    def __init__(self, console: Console, run: Watched, *, is_eager: bool) -> None:
        super().__init__(console, run)
        self._is_eager = is_eager
        self._handle: Any = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="m2flow-notebook", daemon=True)

    def show_plan(self, plan: Plan) -> None:
        """Show the plan's workers and its arithmetic, folded."""
        from IPython.display import HTML
        from IPython.display import display as show

        where = "call by call in this process" if self._is_eager else f"{plan.mode} on {plan.cluster}, {len(plan.workers)} workers"
        head = f"plan of {_text(plan.flow)}: {_text(where)}"
        show(HTML(f"<details><summary>{head}</summary><pre style='font-size:12px'>{_text(plan)}</pre></details>"))

    def stopping(self) -> None:
        """The stop button was pressed. Called from a signal handler: the display's thread says it."""
        self._is_stopping = True

    def __enter__(self) -> NotebookProgress:
        from IPython.display import HTML
        from IPython.display import display as show

        self._started_s = time.monotonic()
        self._handle = show(HTML(self.html()), display_id=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._update(is_over=True)

    def _follow(self) -> None:
        while not self._over.wait(_REFRESH_S):
            self._update(is_over=False)

    def _update(self, *, is_over: bool) -> None:
        from IPython.display import HTML

        self._handle.update(HTML(self.html(is_over=is_over)))

    def html(self, *, is_over: bool = False) -> str:
        """The state of the run as HTML."""
        tally, now_s = self._run.tally, time.monotonic()
        known = max(self._num_steps, tally.num_steps)
        rows = [
            f"<progress value='{tally.num_steps}' max='{max(known, 1)}' style='width:14em' aria-label='steps'></progress> "
            f"step {tally.num_steps} of {known}, {duration(now_s - self._started_s)}"
        ]
        left_s = self._left_s(tally)
        if left_s is not None and not is_over:
            rows[0] += f", {duration(left_s)} left"
        update = self._run.updating
        if update is not None and not is_over:
            rows.append(f"update {_text(self._update_pace.text(update, now_s))}")
        rows += [f"{_text(name)} {_text(value)}" for name, value in logged(tally)]
        tokens_per_s, samples_per_s = self._rates.add(now_s, tally)
        rows.append(f"{tokens_per_s:,.0f} tokens/s, {samples_per_s:,.1f} samples/s, {tally.num_samples:,} samples so far")
        doing = sorted(self._run.starting.items()) or sorted(self._run.running.items())
        rows += [] if is_over else [f"<span style='{_DIM}'>{_text(worker)}</span> {_text(what)}" for worker, what in doing]
        prompt, response = self._sample(tally)
        if prompt or response:
            rows.append(f"<code>{_text(short_example(prompt, response))}</code>")
        if self._is_stopping:
            rows.append(f"<b>{_text(stopping_text(None if is_over else update, 'once more'))}</b>")
        return _framed(
            [*(f"<div>{row}</div>" for row in rows), curve({name: list(enumerate(values)) for name, values in list(tally.rewards.items())})]
        )
