"""Measure the constants of a flow's cost model by running a few steps of different sizes on the workers of its plan.

    flow --> ProbeBackend (fewer prompts, given response lengths) --> the backend that executes --> a run directory --> Profile

Every constant is so measured where it counts: in the plan's processes, with their threads, with the controller and the rewards at work
too. The first steps are the flow's own (one to warm up, then two with its own lengths); in some of the others the number of prompts and
the tokens of each response are set, so that small and large batches, short and long contexts are seen. Steps of the flow's own come in
pairs, since one that follows another is as fast as in a run (`Observed.of_run`). What the flow does before its loop is cut to a few
mini-batches in all runs but the first; with it the responses of the first steps are those of the real run.

Responses of set lengths are wrong answers, and those of a model that was not trained before its loop may all be: a refill
(`generate(count=..., keep=...)`) would end without the groups that it needs. From there on it keeps every group. Turns of episodes have the
lengths that their agents ask for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from m2flow.errors import SpecError
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.handles import OnGroup
from m2flow.macro.replay import BackendWrapper, prints_muted
from m2flow.macro.session import Backend
from m2flow.macro.tracing import trace
from m2flow.micro.controller.launcher import GATHER_S
from m2flow.micro.lowering.placement import device_of
from m2flow.planner.measuring import Measurement, Observed, profile_of
from m2flow.planner.pools import offered
from m2flow.planner.profiles import Profile
from m2flow.recipe import Sampling
from m2flow.runner.run import Run
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, LayoutSpec, PinSpec, RunSettings

_RECORD = "probe.json"
_SETUP_MINIBATCHES = 4
_LONGEST = 512
_MOST_REPLICAS = 4
"""Tokens of a response of set length at most: longer ones follow from the cost terms, and would take minutes."""


@dataclass(frozen=True)
class Round:
    """The size of one step of a probe."""

    share: float = 1.0
    """Share of the step's prompts that are used."""
    length: float | None = None
    """Length of each response as a share of its limit; None: as the flow samples it."""

    @property
    def is_natural(self) -> bool:
        return self.length is None and self.share == 1.0


ROUNDS = (
    Round(),
    Round(),
    Round(),
    Round(1.0, 1.0),
    Round(0.25, 0.5),
    Round(0.06, 1.0),
    Round(),
    Round(),
    Round(0.5, 0.25),
    Round(0.12, 0.75),
    Round(),
    Round(),
)
"""The steps of a probe. The first warms up; if time runs out, the last ones are left out."""
_LEAST_ROUNDS = 4
"""Those that are made at any rate."""
_TINY = Round(0.0, 0.0)


class ProbeBackend(BackendWrapper):
    """A backend that resizes the flow's calls to the rounds of a probe before another backend executes them."""

    def __init__(self, live: Backend, rounds: Sequence[Round], cut: Mapping[int, int], *, budget_s: float, num_ahead: int = 1) -> None:
        """
        Args:
            num_ahead: steps whose calls are made before their turn comes.
        """
        super().__init__(live)
        self._rounds = rounds
        self._cut = cut
        self._budget_s = budget_s
        self._first_timed = num_ahead + 1
        """The step whose calls come when the first step is over, and with it what lies before the loop."""
        self._step = -1
        self._round = Round()
        self._is_distorted = False
        """The policy has been given responses of set lengths, and may have been trained on them."""
        self.started_s = time.monotonic()
        """When the workers were ready, by `time.monotonic`."""
        self._timed_s = float("inf")
        """When the first step was over, by `time.monotonic`."""
        self.natural_steps: list[int] = []

    def submit(self, call: Call) -> None:
        if call.step != self._step and call.step >= 0:
            self._begin(call.step)
        super().submit(self._sized(call))

    def _begin(self, step: int) -> None:
        self._step = step
        now_s = time.monotonic()
        if step == self._first_timed:
            self._timed_s = now_s
        is_late = step >= _LEAST_ROUNDS and now_s - self._timed_s > self._budget_s
        self._round = _TINY if is_late or step >= len(self._rounds) else self._rounds[step]
        if self._round.is_natural:
            self.natural_steps.append(step)

    def _sized(self, call: Call) -> Call:
        rows, sampling = call.options.get("rows"), call.options.get("sampling")
        if isinstance(rows, Batch):
            starts = [start for start, _ in rows.group_bounds()]  # Pairs of answers stay together.
            share = self._round.share if call.step >= 0 else self._cut.get(call.ordinal, len(rows)) / max(len(rows), 1)
            num = max(1, round(len(starts) * share))
            return _with(call, rows=rows.take(range(starts[num]))) if num < len(starts) else call
        if "refill" in call.options and call.step >= 0:
            call = self._refilled(call)
        if isinstance(sampling, Sampling) and call.step >= 0 and self._round.length is not None and "episodes" not in call.options:
            tokens = max(1, round(min(sampling.max_new_tokens, _LONGEST) * self._round.length))
            return _with(call, sampling=dataclasses.replace(sampling, max_new_tokens=tokens, min_new_tokens=tokens))
        return call

    def _refilled(self, call: Call) -> Call:
        """Scale what a refill needs as its candidates are, and have it keep every group where the policy's answers can't be relied on."""
        count, share = call.options["refill"], self._round.share
        assert isinstance(count, int)
        if share < 1.0:
            call = _with(call, refill=max(1, round(count * share)))
        self._is_distorted |= not self._round.is_natural
        keeps_all = call.method == "" and (self._is_distorted or bool(self._cut))
        return _with(call, function=OnGroup(_every_group)) if keeps_all else call


def measure(
    flow: Flow, options: Mapping[str, object], spec: ClusterSpec, settings: RunSettings, *, budget_s: float, only: bool
) -> tuple[Profile, Path]:
    """Run the flow's first steps to measure them: on the spec's placement and, unless `only` is set, on others too. These are time-shared,
    split, and on CPU cores replicas: processes that have fewer threads each and share the samples.

    Args:
        budget_s: about the seconds that the steps of one placement may take, from the end of the first one on.
    Returns:
        The profile, and where it belongs: beside the first run.
    Raises:
        M2FlowError: an engine can't start, or the flow fails.
    """
    with prints_muted():
        graph, models, _ = trace(flow, options, seed=settings.seed)
    load = os.getloadavg()[0]
    measured: list[tuple[Measurement, Path]] = []
    for here in _clusters(spec, only=only or not _has_both(graph)):
        cut = setup_rows(graph) if measured else {}
        measured.append(_probe(flow, options, here, settings, cut, budget_s))
    profile = profile_of(flow.name, models, [one for one, _ in measured], gather_s=GATHER_S, load=load)
    return profile, measured[0][1] / "profile.json"


def _clusters(spec: ClusterSpec, *, only: bool) -> list[ClusterSpec]:
    """List the clusters to measure on: that of the spec's placement, and unless `only` is set the other placement, and replicas."""
    spec = spec.model_copy(update={"pools": {}, "pin": {}})
    others = {"time-shared": "split", "split": "time-shared"}
    first = spec.placement if spec.placement in others else "time-shared"
    found = [spec.model_copy(update={"placement": placement}) for placement in ((first,) if only else (first, others[first]))]
    count = next((k for k in range(_MOST_REPLICAS, 1, -1) if spec.num_cores % k == 0), 1)
    can = count > 1 and device_of(spec) == "cpu" and offered(spec.train.engine, "train").has_replicas_alone and spec.train.ranks is None
    if can and not only:
        pin = PinSpec(num_devices=spec.num_cores, layout=LayoutSpec(tp=spec.num_cores // count, dp=count))
        found.append(spec.model_copy(update={"placement": "auto", "pin": {"rollout": pin, "train": pin}}))
    return found


def measured_run(run_dir: Path, flow: Flow, options: Mapping[str, object]) -> Profile:
    """Read the profile of an earlier run from its trace.

    Raises:
        SpecError: it is no run of this flow, or has no trace.
    """
    try:
        config = json.loads((run_dir / "config.json").read_text())
        spec = ClusterSpec.model_validate(config["cluster"])
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(f"{run_dir} is no run: {error}", now="Give the directory of a run, as `m2flow run` names it.") from None
    settings = RunSettings.model_validate(config["settings"])
    if (its := (config.get("resolved") or {}).get("flow", flow.name)) != flow.name:
        raise SpecError(f"{run_dir} is a run of {its}, not of {flow.name}", now=f"Give a run of {flow.name}, or the file of {its}.")
    if settings.eager:
        raise SpecError(f"{run_dir} ran call by call, which says nothing about a plan", now="Give a run without --eager.")
    plain = {name: value for name, value in config["options"].items() if name in {p.name for p in flow.parameters}}
    run = Run(flow, {**plain, **options}, spec, settings)
    plan = run.prepare()
    record = run_dir / _RECORD
    natural = json.loads(record.read_text())["natural_steps"] if record.exists() else None
    observed = Observed.of_run(run_dir, natural_steps=natural)
    if not observed.decode and not observed.update:
        raise SpecError(f"{run_dir} has no trace of this flow's engines", now="Give a run of this flow that has made a few steps.")
    return profile_of(flow.name, run.models, [Measurement(plan, spec, observed)], gather_s=GATHER_S, load=0.0)


def _probe(
    flow: Flow, options: Mapping[str, object], spec: ClusterSpec, settings: RunSettings, cut: Mapping[int, int], budget_s: float
) -> tuple[Measurement, Path]:
    probes: list[ProbeBackend] = []

    def around(live: Backend) -> Backend:
        probes.append(ProbeBackend(live, ROUNDS, cut, budget_s=budget_s, num_ahead=flow.staleness_for(options) + 1))
        return probes[0]

    run = Run(flow, options, spec, settings, flow_file="", around=around, max_steps=len(ROUNDS))
    plan = run.prepare()
    start_s = time.monotonic()
    run.execute()
    natural = probes[0].natural_steps
    (run.run_dir / _RECORD).write_text(json.dumps({"natural_steps": natural}) + "\n")
    observed = Observed.of_run(run.run_dir, natural_steps=natural)
    return Measurement(plan, spec, observed, probes[0].started_s - start_s), run.run_dir


def setup_rows(graph: MacroGraph) -> dict[int, int]:
    """Rows of each dataset that the updates before the loop get: those of a few mini-batches."""
    found = {}
    for call in graph.calls:
        source, size = call.input("samples"), call.options.get("minibatch_size")
        if call.method == "update" and call.step < 0 and source is not None and isinstance(size, int):
            found[source.call] = size * _SETUP_MINIBATCHES
    return found


def _has_both(graph: MacroGraph) -> bool:
    return {"rollout", "train"} <= {call.engine for call in graph.calls}


def _every_group(group: object) -> bool:
    return True


def _with(call: Call, **options: object) -> Call:
    return dataclasses.replace(call, options={**call.options, **options})
