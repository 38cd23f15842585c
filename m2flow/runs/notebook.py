"""Show runs in a notebook: a display that follows a run under its cell, and a run's picture (curve, verdict, samples with their tokens).

    Run --run_html--> HTML           tally --NotebookProgress--> the cell's output, replaced twice a second

The HTML stands by itself: no scripts, no files, and colours that read on a light and on a dark page.
"""

from __future__ import annotations

import html
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from m2flow.errors import M2FlowError
from m2flow.runs import display

if TYPE_CHECKING:
    from m2flow.micro.protocol.plan import Plan
    from m2flow.runs.opened import Run

_REFRESH_S = 0.5
_WIDTH, _HEIGHT = 560, 150
_MOST_TOKENS = 240
_COLOURS = {"reward": "#0072b2", "accuracy": "#d55e00", "eval/accuracy": "#d55e00", "entropy": "#009e73"}
_DIM = "opacity:.65"


# ---- a run's picture


def in_a_line(run: Run) -> str:
    """Say how a run stands in a few words: `done, 20 steps, 7,168 samples, reward 0.31 -> 0.95`."""
    try:
        parts = [run.state]
    except M2FlowError:
        return "no ledger"
    from m2flow.micro.records.rundir import reading_ledger
    from m2flow.observe.metrics import read_metrics

    metrics = read_metrics(run.path)
    with reading_ledger(run.path, "calls") as db:
        (steps,) = db.execute("SELECT count(DISTINCT step) FROM calls WHERE step >= 0").fetchone()
    parts.append(f"{steps} step{'' if steps == 1 else 's'}")
    if run.summary is not None:
        parts.append(f"{run.summary.samples:,} samples")
    reward = [value for _, value in metrics.get("reward", []) if math.isfinite(value)]
    if reward:
        parts.append(f"reward {reward[0]:.3g} -> {reward[-1]:.3g}")
    return ", ".join(parts)


def run_html(run: Run) -> str:
    """Draw a run: how it stands, its curve, the verdict on its time, and its best and worst last samples with their tokens coloured."""
    from m2flow.observe.metrics import read_metrics

    metrics = read_metrics(run.path)
    lines = {name: metrics[name] for name in _COLOURS if name in metrics}
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
    from m2flow.viewer.idle import idle_of
    from m2flow.viewer.run_trace import RunTrace

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
    for name, of in points.items():
        path = " ".join(
            f"{_scaled(step, left, right, 36, _WIDTH - 8):.1f},{_scaled(value, low, high, _HEIGHT - 18, 8):.1f}" for step, value in of
        )
        drawn.append(f"<polyline points='{path}' fill='none' stroke='{_COLOURS.get(name, '#cc79a7')}' stroke-width='1.6'/>")
    labels = [
        f"<text x='{40 + 110 * at}' y='{_HEIGHT - 4}' fill='{_COLOURS.get(name, '#cc79a7')}'>{_text(name)} {of[-1][1]:.3g}</text>"
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


class NotebookProgress(display.Progress):
    """Show a run under the cell that runs it, while the `with` block lasts; the last state stays there."""

    def __init__(self, console: Console, run: display.Watched, *, is_eager: bool) -> None:
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
            f"step {tally.num_steps} of {known}, {display.duration(now_s - self._started_s)}"
        ]
        left_s = self._left_s(tally)
        if left_s is not None and not is_over:
            rows[0] += f", {display.duration(left_s)} left"
        update = self._run.updating
        if update is not None and not is_over:
            rows.append(f"update {_text(self._update_pace.text(update, now_s))}")
        rows += [f"{_text(name)} {_text(value)}" for name, value in display.logged(tally)]
        tokens_per_s, samples_per_s = self._rates.add(now_s, tally)
        rows.append(f"{tokens_per_s:,.0f} tokens/s, {samples_per_s:,.1f} samples/s, {tally.num_samples:,} samples so far")
        doing = sorted(self._run.starting.items()) or sorted(self._run.running.items())
        rows += [] if is_over else [f"<span style='{_DIM}'>{_text(worker)}</span> {_text(what)}" for worker, what in doing]
        prompt, response = self._sample(tally)
        if prompt or response:
            rows.append(f"<code>{_text(display.short_example(prompt, response))}</code>")
        if self._is_stopping:
            rows.append(f"<b>{_text(display.stopping_text(None if is_over else update, 'once more'))}</b>")
        return _framed([*(f"<div>{row}</div>" for row in rows), curve({"reward": list(enumerate(tally.rewards))})])
