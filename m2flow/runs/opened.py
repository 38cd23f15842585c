"""Read a run as tables, as a model and as a picture, and judge its samples anew: what `m2flow.run` and `m2flow.open_run` return.

    run directory --Run--> samples, metrics, steps, spans (pandas, polars or Arrow), policy (transformers), HTML

Everything is read when it is asked for, so a run that goes on can be looked at; nothing is ever written.

Tables are made as Arrow and handed on as pandas, polars or Arrow itself, whichever is asked for and installed. None of the three is a
dependency of m2flow; the extra `frames` brings Arrow and pandas.

Another reward function judges them without generating a token (`m2flow rescore`, `Run.rescore`).

    ledger.db, segments/ --SampleQuery.batches--> rows of samples --function--> a reward each, beside the one that the run recorded

The function is called as a flow's `Reward` calls it, with what the run's samples were made of: texts, columns of the dataset, and of
an episode its turns, tool calls and rewards. The run is only read, also while it goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final, get_args

import numpy as np

from m2flow.errors import MissingExtra, OptionError, did_you_mean
from m2flow.samples import Batch, Sample

if TYPE_CHECKING:
    from m2flow.macro.graph import Call
    from m2flow.macro.handles import Scores
    from m2flow.micro.worker.function_tasks import Functions
    from m2flow.runner.run import Summary
    from m2flow.viewer.comparison import RunComparison


# ---- tables


FrameKind = Literal["pandas", "polars", "arrow"]


def frame_of(columns: Mapping[str, Sequence[object]], kind: FrameKind | None = None) -> Any:
    """Make a table of columns of the same length. None in a column is a null.

    Args:
        kind: `pandas`, `polars`, or `arrow` (a `pyarrow.Table`); None: pandas if it is installed, else polars.
    Raises:
        OptionError: there is no such kind. MissingExtra: a package is not installed; the error says how to install it.
    """
    known = get_args(FrameKind)
    if kind is not None and kind not in known:
        raise OptionError(f"frame={kind!r:.40} is no kind of table", now=did_you_mean(str(kind), known))
    chosen = kind or next((name for name in ("pandas", "polars") if importlib.util.find_spec(name)), None)
    if chosen is None:
        raise MissingExtra("a table needs pandas or polars, and neither is installed", now="pip install 'm2flow[frames]'")
    arrow, package = _package("pyarrow"), _package(chosen) if chosen != "arrow" else None
    table = arrow.table({name: _array(arrow, values) for name, values in columns.items()})
    if chosen == "pandas":
        return table.to_pandas()
    return table if package is None else package.from_arrow(table)


def _package(name: str) -> Any:
    """Import a package of the extra `frames`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        extra = "pip install polars pyarrow" if name == "polars" else "pip install 'm2flow[frames]'"
        raise MissingExtra(f"a table needs the package {name}, which is not installed", now=extra) from None


def _array(arrow: Any, values: Sequence[object]) -> Any:
    """A column; one of mixed numbers is of floats, and whatever Arrow has no type for is text."""
    try:
        return arrow.array(values)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError):
        if all(value is None or isinstance(value, bool | int | float) for value in values):
            return arrow.array([None if value is None else float(value) for value in values])  # type: ignore[arg-type]
        return arrow.array([None if value is None else str(value) for value in values])


# ---- judging samples anew


_AT_ONCE = 256


@dataclass(frozen=True)
class Rescored:
    """A sample with both rewards."""

    sample: str
    step: int
    before: float | None
    """What the run recorded last; None: nothing rewarded it."""
    now: float
    parts: dict[str, float]
    """What the new reward is made of, where the function says."""

    @property
    def change(self) -> float:
        """By how much the reward is higher now; 0 where there was none."""
        return 0.0 if self.before is None else self.now - self.before


def rescore(
    run_dir: Path,
    function: Callable[[Sample], object],
    *,
    where: str = "",
    limit: int | None = None,
    timeout_s: float | None = 60.0,
    on_error: Literal["raise"] | float = "raise",
    run_seed: int = 0,
) -> Iterator[Rescored]:
    """Judge samples, in the order of identity; those of episodes that failed are left out, as a flow leaves them out.

    Args:
        function: as of `m2flow.Reward`, and so are `timeout_s` (seconds a sample) and `on_error`.
        where: chooses samples by an SQL expression over the columns: `"reward < 0.5 and step = 3"`.
        limit: how many at most.
    Raises:
        OptionError: the condition is no expression over the columns. OpError: the function raised, or gave no finite number.
        SpecError: there is no such run. EngineError: a segment file is damaged or missing.
    """
    from m2flow.engines.contract import EngineSettings
    from m2flow.engines.functions import PythonFunctions
    from m2flow.micro.records.sample_query import SampleQuery
    from m2flow.micro.worker.function_tasks import Functions
    from m2flow.observe.spans import Recorder

    call = _call(function, timeout_s, on_error)
    engine = PythonFunctions(EngineSettings(options={"concurrency": os.cpu_count() or 1}))
    engine.start()
    try:
        functions = Functions(engine, run=run_dir.name, run_seed=run_seed, recorder=Recorder("rescore"))
        with SampleQuery(run_dir) as query:
            for rows, known in query.batches(where, limit=limit, size=_AT_ONCE):
                if "failure" in rows:
                    whole = [at for at, sample in enumerate(rows.rows()) if not sample["failure"]]
                    rows, known = rows.take(whole), [known[at] for at in whole]
                rewards, parts = _judged(functions, call, rows)
                for at, (sample, step, before) in enumerate(known):
                    yield Rescored(sample, step, before, float(rewards[at]), parts[at] if parts else {})
    finally:
        engine.stop()


def _call(function: Callable[[Sample], object], timeout_s: float | None, on_error: Literal["raise"] | float) -> Call:
    """The call by which a flow judges samples."""
    from m2flow.macro.datasets import Dataset
    from m2flow.macro.flow import Flow
    from m2flow.macro.roles import Reward
    from m2flow.macro.tracing import trace

    made: list[Scores] = []

    def judging() -> None:
        made.append(Reward(function, timeout_s=timeout_s, on_error=on_error).judge(Dataset([{"prompt": ""}]).all()))

    trace(Flow(judging, 0), {})
    return made[-1].call


def _judged(functions: Functions, call: Call, rows: Batch) -> tuple[np.ndarray, list[dict[str, float]]]:
    from m2flow.micro.protocol.call_semantics import without_parts

    found = functions.run_call(call, {name: rows for name, _ in call.inputs}, {})
    assert isinstance(found, Batch)
    judged, parts = without_parts(found)
    return np.asarray(judged.select(rows.ids)["reward"]), [{name: float(value) for name, value in each.items()} for each in parts]


@dataclass(frozen=True)
class Summed:
    """What judging anew came to, over samples that have both rewards."""

    num: int
    num_new: int
    """Samples that had no reward before."""
    before: float
    now: float
    num_higher: int
    num_lower: int
    mean_new: float
    """Mean reward of the samples that had none before; nan without any."""
    correlation: float | None
    """Pearson's; None where one of the two is the same for all."""


def summed(found: Sequence[Rescored]) -> Summed:
    """Sum up samples that were judged anew.

    >>> both = [Rescored("0/0/0", 0, 1.0, 0.0, {}), Rescored("0/0/1", 0, 0.0, 0.0, {}), Rescored("0/0/2", 0, None, 1.0, {})]
    >>> summed(both)
    Summed(num=2, num_new=1, before=0.5, now=0.0, num_higher=0, num_lower=1, mean_new=1.0, correlation=None)
    """
    both = np.array([(one.before, one.now) for one in found if one.before is not None], float).reshape(-1, 2)
    new = [one.now for one in found if one.before is None]
    mean_new = float(np.mean(new)) if new else math.nan
    if not len(both):
        return Summed(0, len(new), math.nan, math.nan, 0, 0, mean_new, None)
    before, now = both.T
    is_flat = before.std() == 0 or now.std() == 0
    return Summed(
        len(both),
        len(new),
        float(before.mean()),
        float(now.mean()),
        int((now > before).sum()),
        int((now < before).sum()),
        mean_new,
        None if is_flat else float(np.corrcoef(before, now)[0, 1]),
    )


# ---- the run


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
        from m2flow.micro.records.provenance import read_configuration

        return read_configuration(self.path)

    @property
    def state(self) -> str:
        """How the run stands: `done`, `running`, `stopped` with the reason, or `simulated`."""
        from m2flow.micro.records.ledger import state_of

        return "simulated" if (self.path / "report.json").is_file() else state_of(self.path)

    def samples(self, where: str = "", *, order: str = "", limit: int | None = None, frame: FrameKind | None = None) -> Any:
        """The samples as a table: a row each, with the columns that `m2flow samples --columns` lists, both texts, and the columns of
        its dataset, where a name is taken as `column/NAME`.

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

        found = list(rescore(self.path, function, where=where, limit=limit))
        return frame_of({name: [getattr(one, name) for one in found] for name in ("sample", "step", "before", "now")}, frame)

    def metrics(self, *, frame: FrameKind | None = None) -> Any:
        """The metrics as a table: a row for each step, a column for each name; null where a step has no such value.

        Where two lines of the flow train a policy in a step, what both report is `loss` of the first, `update_2/loss` of the second. Of
        several values of one name in a step, as of updates at one line or where a flow logs a `loss` of its own, it has the last;
        `metrics.jsonl` has all. `step` is the step, and what a flow logs by that name is `log/step`.

        Args:
            frame: `pandas`, `polars` or `arrow`.
        """
        from m2flow.observe.metrics import read_metrics

        found = {name: dict(points) for name, points in read_metrics(self.path).items()}
        steps = sorted({step for points in found.values() for step in points})
        columns: dict[str, list[object]] = {"step": list(steps)}
        columns |= {"log/step" if name == "step" else name: [points.get(step) for step in steps] for name, points in found.items()}
        return frame_of(columns, frame)

    def steps(self, *, frame: FrameKind | None = None) -> Any:
        """The steps as a table: seconds since the first span, makespan and bound, tokens, busy and idle device seconds by cause.

        Args:
            frame: `pandas`, `polars` or `arrow`.
        """
        from m2flow.viewer.analysis import analysis_of
        from m2flow.viewer.run_trace import RunTrace, idle_of

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
            others: one run, or several seeds of it; of each its directory, or its name beside this run's.
        Raises:
            SpecError: there is no such run.
        """
        from m2flow.micro.records.rundir import find_run
        from m2flow.viewer.comparison import compare

        return compare([self.path], [one.path if isinstance(one, Run) else find_run(str(one), self.path.parent) for one in others])

    def __repr__(self) -> str:
        from m2flow.runs.display import in_a_line

        return f"Run({self.path}: {in_a_line(self)})"

    def _repr_html_(self) -> str:
        from m2flow.runs.display import run_html

        return run_html(self)


_ATTRIBUTES = ("call", "step", "label", "flow_line", "version", "num_samples", "num_tokens", "finish")


def _identity(sample: Any) -> str:
    return f"{sample.call}/{sample.prompt}/{sample.index}"
