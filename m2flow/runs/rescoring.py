"""Judge the samples of a run by another reward function, without generating a token: `m2flow rescore`, `Run.rescore`.

    ledger.db, segments/ --SampleQuery.batches--> rows of samples --function--> a reward each, beside the one that the run recorded

The function is called as a flow's `Reward` calls it, with what the run's samples were made of: texts, columns of the dataset, and of
an episode its turns, tool calls and rewards. The run is only read, also while it goes on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from m2flow.engines.contract import EngineSettings
from m2flow.engines.functions import PythonFunctions
from m2flow.macro.datasets import Dataset
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call
from m2flow.macro.handles import Scores
from m2flow.macro.roles import Reward
from m2flow.macro.tracing import trace
from m2flow.micro.protocol.call_semantics import without_parts
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.micro.worker.function_tasks import Functions
from m2flow.observe.spans import Recorder
from m2flow.samples import Batch, Sample

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
    made: list[Scores] = []

    def judging() -> None:
        made.append(Reward(function, timeout_s=timeout_s, on_error=on_error).judge(Dataset([{"prompt": ""}]).all()))

    trace(Flow(judging, 0), {})
    return made[-1].call


def _judged(functions: Functions, call: Call, rows: Batch) -> tuple[np.ndarray, list[dict[str, float]]]:
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
    """Of the samples that had no reward before; nan without any."""
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
