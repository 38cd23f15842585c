"""Send a run's metrics to experiment trackers: Weights & Biases and MLflow.

    metrics.jsonl --WandbSink, MlflowSink--> a run in the tracker, of the same name

Each sink takes the settings that its library reads from the environment (WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME, ...). A resumed run continues in the tracker too. The libraries are imported in the forwarding process alone.
"""

from __future__ import annotations

import importlib.util
import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

from m2flow.errors import MissingExtra
from m2flow.observe.metrics import name_of_run, parameters_of
from m2flow.observe.record_sinks import LineFollower, Sink, Undelivered

Tracker = Literal["wandb", "mlflow"]
_MOST_TEXT = 500
"""Of a parameter's value, characters: MLflow's limit was that for long."""
_MOST_PARAMS = 100
"""Parameters in one request: MLflow's limit."""


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # A package that it would be in is not there.
        return False


def check_tracker(name: str) -> None:
    """Raises MissingExtra."""
    if not is_installed(name):
        raise MissingExtra(f"metrics are to go to {name}, which is not installed", now=f"pip install 'm2flow[{name}]'")


def trackers_configured(environment: Mapping[str, str] = os.environ) -> list[Tracker]:
    """The trackers that are installed and configured in the environment: a run is never reported unasked."""
    found: list[Tracker] = []
    says = any(environment.get(name) for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_BASE_URL"))
    is_off = environment.get("WANDB_MODE") == "disabled" or environment.get("WANDB_DISABLED", "").lower() in ("true", "1")
    if says and not is_off and is_installed("wandb"):
        found.append("wandb")
    if environment.get("MLFLOW_TRACKING_URI") and is_installed("mlflow"):
        found.append("mlflow")
    return found


class _TrackerSink(Sink):
    """Base of the two trackers: deliver whole lines of `metrics.jsonl`, in order."""

    def __init__(self, run_dir: Path, flow: str) -> None:
        super().__init__(run_dir)
        self._flow = flow
        self._lines = LineFollower(run_dir)
        self._is_begun = False

    def open(self) -> None:
        self._lines.acknowledge(self.sent.metrics_end)

    def pump(self) -> bool:
        lines = self._lines.more()
        if not lines:
            return False
        try:
            if not self._is_begun:
                self._begin()
                self._is_begun = True
            for line in lines:
                self._log(line.step, line.at_ns, line.values)
                self._lines.acknowledge(line.end)
                self.sent.metrics_end = line.end
                self.sent.num_points += len(line.values)
        except Undelivered:
            raise
        except Exception as error:  # Whatever a vendor's library raises is no reason to end anything.
            raise Undelivered(f"{type(error).__name__}: {error}") from error
        self._keep()
        return True

    @property
    def num_left_bytes(self) -> int:
        return self._lines.num_left_bytes

    @abstractmethod
    def _begin(self) -> None:
        """Start a run in the tracker, or continue the one that is there."""

    @abstractmethod
    def _log(self, step: int, at_ns: int, values: Mapping[str, float]) -> None:
        """Log the values of one line."""


@final
class WandbSink(_TrackerSink):
    """Sink for Weights & Biases."""

    name = "wandb"
    where = "Weights & Biases"

    def _begin(self) -> None:
        import wandb

        name = name_of_run(self.run_dir)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "m2flow"),
            name=os.environ.get("WANDB_NAME", name),
            id=os.environ.get("WANDB_RUN_ID", name),
            resume="allow",
            group=os.environ.get("WANDB_RUN_GROUP", self._flow),
            dir=str(self.run_dir),
            config=parameters_of(self.run_dir),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")
        if self._run.url:
            self.where = str(self._run.url)

    def _log(self, step: int, at_ns: int, values: Mapping[str, float]) -> None:
        # The step is a value of its own: theirs must never go back, and a resumed run does.
        self._run.log({**values, "step": step, "time_s": at_ns / 1e9})

    def close(self) -> None:
        if self._is_begun:
            import wandb

            self._run.finish()
            wandb.teardown()  # Until then its own process may still be writing.
            self._is_begun = False


@final
class MlflowSink(_TrackerSink):
    """Sink for MLflow."""

    name = "mlflow"
    where = "MLflow"

    def _begin(self) -> None:
        from mlflow.tracking import MlflowClient

        try:
            self._client: Any = MlflowClient()
        except Exception as error:
            if os.environ.get("MLFLOW_TRACKING_URI"):
                raise
            raise Undelivered(
                "MLFLOW_TRACKING_URI is not set, and this MLflow can't write where it would then: set it to the address of a server"
            ) from error
        self.where = f"MLflow at {self._client.tracking_uri}"
        name = name_of_run(self.run_dir)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", self._flow)
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        mine = self._client.search_runs([number], f"tags.`m2flow.run` = '{name}'", max_results=1)
        if mine:
            self._id = mine[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(number, run_name=name, tags={"m2flow.run": name}).info.run_id
        from mlflow.entities import Param

        found = [Param(_mlflow_name(key), str(value)[:_MOST_TEXT]) for key, value in parameters_of(self.run_dir).items()]
        for first in range(0, len(found), _MOST_PARAMS):
            self._client.log_batch(self._id, params=found[first : first + _MOST_PARAMS])

    def _log(self, step: int, at_ns: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        points = [Metric(_mlflow_name(name), value, at_ns // 1_000_000, step) for name, value in values.items() if math.isfinite(value)]
        self._client.log_batch(self._id, metrics=points)

    def close(self) -> None:
        if self._is_begun:
            self._client.set_terminated(self._id)
            self._is_begun = False


def _mlflow_name(name: str) -> str:
    """
    >>> _mlflow_name("tokens/s (mean)")
    'tokens/s _mean_'
    """
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)
