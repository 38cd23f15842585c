"""Read a run as tables, as a model and as a picture: what `m2flow.run` and `m2flow.open_run` return.

    run directory --Run--> samples, metrics, steps, spans (pandas, polars or Arrow), policy (transformers), HTML

Everything is read when it is asked for, so a run that goes on can be looked at; nothing is ever written.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from m2flow.runs.frames import FrameKind, frame_of

if TYPE_CHECKING:
    from m2flow.runner.run import Summary
    from m2flow.runs.comparing import RunComparison
    from m2flow.samples import Sample


@final
class Run:
    """A run: its tables, its model, its picture.

    Made by `m2flow.run` and `m2flow.open_run`. Tables are pandas frames, or polars frames where only polars is installed;
    `frame="polars"` or `"arrow"` asks for another kind, and `pip install 'm2flow[frames]'` brings what pandas frames need.
    `summary` has the totals of a run that this process made.
    """

    def __init__(self, path: Path, *, summary: Summary | None = None) -> None:
        self.path = path
        """The run's directory."""
        self.summary = summary
        """Totals of the run (`m2flow.runner.run.Summary`), if this process made it; else None."""

    @property
    def config(self) -> dict[str, Any]:
        """What the run was: options, cluster, settings, and under `resolved` what they came to (`config.json`)."""
        found = json.loads((self.path / "config.json").read_text())
        return dict(found)

    @property
    def state(self) -> str:
        """How the run stands: `done`, `running`, `stopped` with the reason, or `simulated`."""
        from m2flow.micro.records.ledger import state_of

        return "simulated" if (self.path / "report.json").is_file() else state_of(self.path)

    def samples(self, where: str = "", *, order: str = "", limit: int | None = None, frame: FrameKind | None = None) -> Any:
        """The samples as a table: a row each, with the columns that `m2flow samples --columns` lists, and both texts.

        Args:
            where: chooses samples by an SQL expression over the columns: `"reward < 0.5 and step = 3"`.
            order: in which order, as an SQL expression: `"response_tokens desc"`; empty: as drawn.
            limit: how many at most.
            frame: `pandas`, `polars` or `arrow`.
        Raises:
            OptionError: the condition is no expression over the columns. MissingExtra: the packages of tables are not installed.
        """
        from m2flow.micro.records.sample_query import SampleQuery

        with SampleQuery(self.path) as query:
            return frame_of(query.columns(where, order=order, limit=limit), frame)

    def rescore(
        self, function: Callable[[Sample], object], *, where: str = "", limit: int | None = None, frame: FrameKind | None = None
    ) -> Any:
        """Judge samples by another reward function, without generating a token, as a table: `sample`, `step`, `before` and `now`.

        Args:
            function: of a sample, as of `m2flow.Reward`.
            where, limit, frame: as of `samples`.
        Raises:
            OpError: the function raised, or gave no finite number.
        """
        from m2flow.runs.rescoring import rescore

        found = list(rescore(self.path, function, where=where, limit=limit))
        return frame_of({name: [getattr(one, name) for one in found] for name in ("sample", "step", "before", "now")}, frame)

    def metrics(self, *, frame: FrameKind | None = None) -> Any:
        """The metrics as a table: a row for each step, a column for each name; null where a step has no such value.

        Args:
            frame: `pandas`, `polars` or `arrow`.
        """
        from m2flow.observe.metrics import read_metrics

        found = {name: dict(points) for name, points in read_metrics(self.path).items()}
        steps = sorted({step for points in found.values() for step in points})
        columns: dict[str, list[object]] = {"step": list(steps)}
        columns |= {name: [points.get(step) for step in steps] for name, points in found.items()}
        return frame_of(columns, frame)

    def steps(self, *, frame: FrameKind | None = None) -> Any:
        """The steps as a table: seconds since the first span, makespan and bound, tokens, busy and idle device seconds by cause.

        Args:
            frame: `pandas`, `polars` or `arrow`.
        """
        from m2flow.viewer.analysis import analysis_of
        from m2flow.viewer.idle import idle_of
        from m2flow.viewer.run_trace import RunTrace

        trace = RunTrace(self.path)
        trace.refresh()
        steps = analysis_of(trace, idle_of(trace)).steps
        causes = list(dict.fromkeys(cause for step in steps for cause in step.idle_s))
        columns: dict[str, list[object]] = {
            "step": [step.step for step in steps],
            "start_s": [step.start / 1e6 for step in steps],
            "makespan_s": [step.makespan_s for step in steps],
            "bound_s": [max(step.bounds_s.values(), default=None) for step in steps],
            "efficiency": [step.efficiency for step in steps],
            "tokens": [step.tokens for step in steps],
            "busy_s": [step.busy_s for step in steps],
        }
        columns |= {f"idle_s/{cause}": [step.idle_s.get(cause, 0.0) for step in steps] for cause in causes}
        return frame_of(columns, frame)

    def spans(self, *, frame: FrameKind | None = None) -> Any:
        """The spans as a table: worker, engine, name, times in seconds since the first one, and what `m2flow.observe.spans` says of
        them; attributes that not every run has are JSON in `attributes`.

        Args:
            frame: `pandas`, `polars` or `arrow`.
        """
        from m2flow.observe.spans import sample_of
        from m2flow.observe.store import read_trace
        from m2flow.samples import SampleId

        spans = read_trace(self.path).spans
        origin_ns = min((span.start_ns for span in spans), default=0)
        samples = [sample_of(span) for span in spans]
        columns: dict[str, list[object]] = {
            "worker": [span.lane[0] for span in spans],
            "engine": [span.lane[1] for span in spans],
            "name": [str(span.name) for span in spans],
            "start_s": [(span.start_ns - origin_ns) / 1e9 for span in spans],
            "end_s": [(span.end_ns - origin_ns) / 1e9 for span in spans],
            "sample": [None if one is None else _identity(SampleId.unpack(one)) for one in samples],
        }
        columns |= {name: [span.attributes.get(name) for span in spans] for name in _ATTRIBUTES}
        hidden = {*_ATTRIBUTES, "sample", "samples"}
        rest = [{name: value for name, value in span.attributes.items() if name not in hidden} for span in spans]
        columns["attributes"] = [json.dumps(one) if one else None for one in rest]
        return frame_of(columns, frame)

    def policy(self, role: str | None = None, *, step: int | None = None) -> Any:
        """The trained model of a role, as transformers loads it. Its weights are compared with those that the trainer held.

        Args:
            role: `"policy"`; None: the only one that is trained.
            step: the checkpoint after so many steps; None: the final one, or the newest.
        Raises:
            SpecError: there is no such checkpoint, or no such role in it. ModelError: it is not whole.
        """
        from transformers import AutoModelForCausalLM

        from m2flow.micro.records.checkpoints import export_part, find_part

        part = find_part(self.path, step, role)
        with tempfile.TemporaryDirectory(prefix="m2flow-policy-") as directory:
            export_part(part, Path(directory) / "model")
            return AutoModelForCausalLM.from_pretrained(Path(directory) / "model")

    def tokenizer(self, role: str | None = None, *, step: int | None = None) -> Any:
        """The tokenizer of a role's model, as transformers loads it.

        Args:
            role, step: as of `policy`.
        """
        from transformers import AutoTokenizer

        from m2flow.micro.records.checkpoints import find_part

        return AutoTokenizer.from_pretrained(find_part(self.path, step, role).path)

    def compare(self, *others: Run | str | Path) -> RunComparison:
        """Say what differs between this run and another, or several of another kind: what was asked for, the time, the learning.

        Args:
            others: one run, or several seeds of it.
        """
        from m2flow.runs.comparing import compare

        return compare([self.path], [one.path if isinstance(one, Run) else Path(one) for one in others])

    def __repr__(self) -> str:
        from m2flow.runs.notebook import in_a_line

        return f"Run({self.path}: {in_a_line(self)})"

    def _repr_html_(self) -> str:
        from m2flow.runs.notebook import run_html

        return run_html(self)


_ATTRIBUTES = ("call", "step", "label", "flow_line", "version", "num_samples", "num_tokens", "finish")


def _identity(sample: Any) -> str:
    return f"{sample.call}/{sample.prompt}/{sample.index}"
