"""Run a flow from beginning to end: trace it, lower it to a plan, execute the plan, write the records, sum up.

    Run(flow, options, spec, settings).prepare() -> Plan;  .execute() -> Summary

The command line uses this, and programs may.

Engines. Before workers start, each engine of the plan must be installed. An engine with an interpreter of its own is looked for in there,
if that is on this host; workers of a Ray cluster look themselves.

Failures. One process at a time writes a run: it holds a lock on `run.lock`, which the operating system frees however the process ends. If
a trainer is lost with state that only a checkpoint has, the run resumes in the same process, as `m2flow run --resume` would, unless
attempt after attempt gets no further. If a trainer has no memory for a micro-batch, the run resumes with smaller ones, down to single
samples.

Signals.

    first signal   --KeyboardInterrupt in the flow's thread--> updates that have begun are finished, all else is given up
    second signal  --end_now--> the ledger is written, the workers are killed, the process ends

A signal handler runs in the main thread between two of its instructions, so an eager run, whose updates are that thread's own work, only
notes the first signal during an update (`Interruptible`). Limit: Python sees a signal only when native code returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import resource
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import final

from m2flow.engines.contract import LOADING
from m2flow.engines.registry import check_engine, engine_named
from m2flow.errors import EngineError, FlowError, M2FlowError, MicroBatchTooLarge, SpecError, StateLost, WorkerError, naming_engine_errors
from m2flow.macro.eager import EagerBackend
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.replay import BackendWrapper, PinnedBackend, PinnedCall, Recorder, ReplayBackend, check_same, prints_muted
from m2flow.macro.session import Backend, Session
from m2flow.macro.tracing import Copies, anticipate, copies_made, explore, trace
from m2flow.micro.controller.call_futures import CallFutures
from m2flow.micro.controller.checkpoint_coordinator import CheckpointCoordinator, CheckpointingBackend, checkpoint_eagerly
from m2flow.micro.controller.controller import Controller, Lookahead, PlannedBackend
from m2flow.micro.controller.launcher import GATHER_S, Job, Launcher, LocalLauncher, warm_up
from m2flow.micro.controller.online_replanning import bits_kept
from m2flow.micro.lowering.arithmetic import TRACED_STEPS
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.lowering.placement import device_of
from m2flow.micro.protocol.plan import Choice, Plan
from m2flow.micro.protocol.staleness import Decisions
from m2flow.micro.protocol.update_semantics import UpdateSteps
from m2flow.micro.records.accounting import Alarm, Tally
from m2flow.micro.records.checkpoints import clear_leftovers
from m2flow.micro.records.flow_record import read_record
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.ledger import lengths_of_run, read_failed_episodes, read_left_out, read_num_failed, samples_digest
from m2flow.micro.records.plan_file import check_edited
from m2flow.micro.records.provenance import resolved_of
from m2flow.micro.records.resume import DONE, ResumeState, read_mendable, read_resume_state
from m2flow.micro.records.rundir import (
    copy_pictures,
    create_run_dir,
    fetch_run_dir,
    move,
    naming_disk_errors,
    share,
    write_config,
    write_plan,
)
from m2flow.micro.records.sample_query import SHOWN_BY
from m2flow.micro.worker.eager_executor import EagerExecutor
from m2flow.micro.worker.fork_server import end_unneeded
from m2flow.micro.worker.telemetry import channels_of
from m2flow.observe.forwarding import Forwarding, destinations, has_tensorboard
from m2flow.observe.metrics import reward_names, write_curve
from m2flow.observe.perfetto import write_trace
from m2flow.observe.spans import busy_seconds
from m2flow.observe.store import read_trace, to_otel
from m2flow.planner.measuring import measured_so_far
from m2flow.planner.planning import Forecast, check_trainers, find_models, forecast, is_searched, question_of, write_forecast
from m2flow.planner.profiles import read_profile
from m2flow.recipe import Model
from m2flow.simulator.machines import paced
from m2flow.spec import ClusterSpec, RunSettings


def check_engines(plan: Plan, spec: ClusterSpec, models: Mapping[str, Model]) -> None:
    """Check that every engine of a plan is installed, and that trainers can have the models of their roles.

    Raises:
        EngineError: the plan names an engine that nobody knows, or a model or layout that one can't have. MissingExtra: what one needs is
            not installed.
    """
    options: dict[str, Mapping[str, object]] = {"rollout": spec.rollout.options, "train": spec.train.options}
    for worker in plan.workers:
        for slot in worker.engines:
            check_engine(slot.engine, slot.kind, worker.device, options.get(slot.kind) if spec.launcher == "local" else None)
    check_trainers(plan, spec, models)


_LOCK = "run.lock"


@contextlib.contextmanager
def hold_run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory, so that one process at a time writes the run.

    Raises:
        SpecError: another one does.
    """
    with (run_dir / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip()
            by = f" by process {holder}" if holder else ""
            raise SpecError(f"the run in {run_dir} goes on{by}", now="Wait for it, or stop that process first.") from None
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


_MOST_FILES = 65_536


def raise_file_limit() -> None:
    """Let this process and the workers that it starts have as many open files as is permitted. At its limit libzmq aborts a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def with_smaller_microbatches(spec: ClusterSpec) -> ClusterSpec:
    """The spec with micro-batches split into twice as many parts."""
    return spec.model_copy(update={"train": spec.train.model_copy(update={"parts": 2 * spec.train.parts})})


@final
class RetryLimit:
    """Counts failures of a run without progress in between, and gives up after too many."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._num_without_progress = 0
        self._furthest = -1

    def record_failure(self, error: StateLost, num_done: int) -> float:
        """Record a failure after `num_done` finished calls, and return the seconds to wait before the run resumes.

        Raises:
            StateLost: it has come no further too often.
        """
        self._num_without_progress = 1 if num_done > self._furthest else self._num_without_progress + 1
        self._furthest = max(self._furthest, num_done)
        if self._num_without_progress >= self._settings.attempts:
            times = f"{self._num_without_progress} times" if self._num_without_progress > 1 else "once"
            what = f"{error.what}; the run has come this far {times}, and no further"
            raise StateLost(what, where=error.where, now=error.now, remote=error.remote) from error
        return float(self._settings.retry_wait_s * 2 ** (self._num_without_progress - 1))


_PATIENCE_S = 2.0


@final
class Interruptible(BackendWrapper):
    """A flow's backend, whose calls are where a signal stops it at the latest.

    Python drops what a signal handler raises inside a `__del__`, of which a handle on results has one; the next call raises it again. An
    update that this thread runs itself is finished first: half of one would be made twice when the run resumes.
    """

    def __init__(self, live: Backend, reason: str = "") -> None:
        super().__init__(live)
        self._is_updating = False
        self.reason = reason
        """Why the flow is to stop; empty: it is not."""

    def interrupt(self, reason: str) -> bool:
        """Stop at the next call, or at the end of the update that is under way; False if there is none. For a signal handler."""
        self.reason = reason
        return self._is_updating

    def submit(self, call: Call) -> None:
        self._stop_if_asked()
        self._is_updating = call.method == "update"
        try:
            super().submit(call)
        finally:
            self._is_updating = False
        self._stop_if_asked()

    def value(self, ordinal: int) -> object:
        self._stop_if_asked()
        return super().value(ordinal)

    def end_step(self, step: int) -> None:
        self._stop_if_asked()
        super().end_step(step)

    def finish(self) -> None:
        self._stop_if_asked()
        super().finish()

    def _stop_if_asked(self) -> None:
        if self.reason:
            raise KeyboardInterrupt(self.reason)


def end_now(steps: Iterable[Callable[[], None]]) -> None:
    """Run these steps in order, each for two seconds at most: a lock that one needs may be held by the interrupted thread."""
    for step in steps:
        thread = threading.Thread(target=_quietly, args=(step,), daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)


def _quietly(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:  # The process ends; the next run finds what can't be done now.
        return


@dataclass(frozen=True)
class Summary:
    """Totals of a finished run."""

    run_dir: str
    steps: int
    steps_asked: int
    """Steps that the flow's loops ask for; more than `steps` where it left one early."""
    ended_early: str
    """Why it did; empty where it did not."""
    samples: int
    """Samples generated, evaluations included."""
    tokens: int
    """Tokens generated."""
    left_out: dict[str, int]
    """Samples that are in no result, by reason: `late` ones were dropped; `unused` ones were carried over and never used."""
    calls_failed: int
    """Failed calls whose errors the flow caught, and the calls that needed these."""
    reward_first: float | None
    """Mean reward of the first update that had rewards, of the role `policy` or else the first by name; None: no update had any."""
    reward_last: float | None
    """That of the last update of the same role."""
    wall_s: float
    """Seconds from the first call to the last, without the start of workers; of a resumed run, since it was resumed."""
    tokens_per_s: float
    """Generated tokens per second of `wall_s`; `samples_per_s` and `busy_s` are over the same time."""
    samples_per_s: float
    busy_s: dict[str, float]
    """Seconds that each worker was busy."""
    channels: dict[str, dict[str, float]]
    """For each pair of workers: parcels, samples and bytes, how many of these through shared memory, and seconds blocked."""
    calls_lowered: int
    """Calls that were lowered: new ones, and those with a new wiring."""
    calls_reused: int
    """Calls whose stage was reused; all calls after the first step, if a flow's steps look alike."""
    samples_sha256: str
    weights_sha256: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Run:
    """One run of a flow.

    Args:
        pin_plan, pin_to: hold every step to the structure of the first one, or to the given calls.
        decisions: of another run (`m2flow.micro.records.ledger.read_decisions`): an eager run repeats what was decided by time there.
        repeats: the directory of that run: what its tools gave is not asked of them again.
        pinned: a plan whose processes and sizes are used.
        profile: a file of measured costs, which the search for a placement goes by.
        around: wraps the backend that gets the flow's calls.
        max_steps: steps of the flow after which the run ends.
        resume: the directory of a stopped run, which goes on in there; flow, options and settings must be those of that run
            (`m2flow.micro.records.rundir.read_config`).
        foresees: write a forecast of the plan (`m2flow.planner.planning`), also where it was not searched for.
        warn: tells the user something.
    """

    def __init__(
        self,
        flow: Flow,
        options: Mapping[str, object],
        spec: ClusterSpec,
        settings: RunSettings,
        *,
        flow_file: str = "",
        pin_plan: bool = False,
        pin_to: Sequence[PinnedCall] | None = None,
        decisions: Decisions | None = None,
        repeats: Path | None = None,
        pinned: Plan | None = None,
        profile: Path | None = None,
        around: Callable[[Backend], Backend] | None = None,
        max_steps: int | None = None,
        resume: Path | None = None,
        foresees: bool = False,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.flow = flow
        self.options = dict(options)
        self.spec = spec.with_equal_micro_batches() if settings.deterministic else spec
        self.settings = settings
        self._flow_file = flow_file
        self._pin_to = pin_to
        self._is_pinned = pin_plan or pin_to is not None
        self._decisions, self._repeats = decisions, repeats
        self._pinned_plan = pinned
        self._profile = profile
        self._around = around
        self._max_steps = max_steps
        self._resume = resume
        self._foresees = foresees
        self._forecast: Forecast | None = None
        self._warn = warn
        self._resumed: ResumeState | None = None
        self._start_ns = 0
        """Unix time in ns at which the measured part of the run begins."""
        self._has_lost_state = False
        """An attempt of this process had started, and lost state that only a checkpoint has."""
        self._replay: ReplayBackend | None = None
        self._graph: MacroGraph | None = None
        """The graph that a placement was searched for."""
        self._traced: MacroGraph | None = None
        """The graph of the flow's first steps."""
        self._plan: Plan | None = None
        self._num_steps: int | None = None
        self._steps_asked, self._ended_early = 0, ""
        self._models: dict[str, Model] = {}
        self._journal: Journal | None = None
        self._controller: Controller | None = None
        self._executor: EagerExecutor | None = None
        self._loading: dict[str, str] = {}
        """In an eager run: what this process loads now."""
        self._interruptible: Interruptible | None = None
        self._changes: set[str] = set()
        self._lowering: Lowering | None = None
        self.run_dir = Path()

    def warm_up(self) -> None:
        """Begin to load what workers on this machine will need, while the flow is traced and planned. Returns at once."""
        spec, settings = self.spec, self.settings
        if settings.eager or spec.launcher != "local" or any(pool.device != "cpu" for pool in spec.planned_pools.values()):
            end_unneeded()
            return
        with contextlib.suppress(EngineError):  # That there is none of such a name is said where it is looked for.
            engines = engine_named(spec.rollout.engine, "rollout"), engine_named(spec.train.engine, "train")
            warm_up(settings, has_models=any("torch" in engine.requires for engine in engines))

    def prepare(self) -> Plan:
        """Trace the first steps and lower them to a plan. Runs no engine; makes no directory.

        The search places the calls that it is shown: for it the flow is followed past the values that it waits for, to the outcomes with
        the most calls. The rules of `split` and `time-shared` leave room for what nobody knows.
        """
        with prints_muted():  # The flow prints when it runs.
            graph, self._models, num_steps = trace(self.flow, self.options, seed=self.settings.seed, steps=TRACED_STEPS)
        self._num_steps, self._traced = num_steps, graph
        find_models(self._models, self.spec, with_weights=False)
        if self._resume is not None and (self._resume / "ledger.db").exists():
            record = read_record(self._resume)
            check_same(record, graph, read_mendable(self._resume, record))
        if self.spec.pools and self.spec.launcher == "local":
            raise SpecError(
                f"{self.spec.name} has pools of devices, and the local launcher runs on this machine only",
                now="Plan and simulate with it; to run here, leave `pools` out.",
            )
        pinned, is_deterministic, choice = self._pinned_plan, self.settings.deterministic, None
        is_whole = num_steps <= TRACED_STEPS and not graph.observations and not is_searched(self.spec, self._models)
        copies = Copies() if is_whole else copies_made(self.flow, self.options, num_steps=num_steps, seed=self.settings.seed)
        self._models = {**copies.models, **self._models}
        if is_searched(self.spec, self._models) and pinned is None:
            graph = self._trace_further(graph)
            choice = question_of(graph, self._models, self.spec, profile=self._profile, copies=copies.sources).choose()
            self._graph = graph
        self._plan = lower(
            graph,
            self._models,
            self.spec,
            num_steps=num_steps,
            deterministic=is_deterministic,
            choice=choice,
            pinned=pinned,
            copies=copies.sources,
        )
        if pinned is not None:
            check_edited(pinned, self._plan, self.spec)
        self._plan = paced(self._plan, graph, self._models, self.spec, self._profile)
        if self._foresees and self._models and self._plan.choice is None and not self.settings.eager:
            # The trace ended before it because a value is needed.
            if not any(call.method == "update" and call.step >= 0 for call in graph.calls):
                graph = self._trace_further(graph)
            ask = partial(question_of, graph, self._models, profile=self._profile)
            self._forecast = forecast(self._plan, self.spec, ask)
        return self._plan

    def _trace_further(self, graph: MacroGraph) -> MacroGraph:
        """The graph traced on past the values that the flow needs; the given one where that is not possible."""
        with contextlib.suppress(FlowError):  # An error that comes of invented values; the flow's own errors come when it runs.
            exploration = explore(self.flow, self.options, seed=self.settings.seed)
            graph = anticipate(self.flow, self.options, exploration, steps=TRACED_STEPS, seed=self.settings.seed)
            self._models = dict(exploration.models)
        return graph

    @property
    def models(self) -> Mapping[str, Model]:
        """The models of the flow's roles; empty before `prepare`."""
        return self._models

    @property
    def num_steps(self) -> int | None:
        """Steps of the flow; None before `prepare`."""
        return self._num_steps

    @property
    def tally(self) -> Tally:
        """Counts so far; may be read by another thread during the run."""
        return self._journal.tally if self._journal else Tally()

    @property
    def why_in_vain(self) -> str:
        """Why a run that is over was in vain: no update made a step, or each episode or reward failed. Empty: it was not."""
        if self.tally.num_in_vain:
            return f"none of its updates ({self.tally.num_in_vain:,}) had a token to train on"
        if not self.tally.updates:
            return ""
        failed, episodes = read_failed_episodes(self.run_dir)
        if 0 < episodes <= failed:
            return f"each of its episodes ({episodes:,}) failed"
        failed = self._journal.num_failed.total() if self._journal else 0
        return f"each of its rewards ({failed:,}) failed" if 0 < self.tally.num_judged <= failed else ""

    @property
    def running(self) -> Mapping[str, str]:
        """What each worker does now, in words."""
        return self._controller.running() if self._controller else {}

    @property
    def updating(self) -> UpdateSteps | None:
        """How far the running update is, if it takes several optimiser steps."""
        found = self._controller or self._executor
        return found.updating if found else None

    @property
    def starting(self) -> Mapping[str, str]:
        """What each worker loads, and how far it is, before all are ready; empty before and after that."""
        if self._controller:
            return self._controller.starting
        words = LOADING.words()  # Of this process, which does the work of all workers.
        return {worker: f"{what}: {words}" if words and what.startswith("loads") else what for worker, what in self._loading.items()}

    def execute(self) -> Summary:
        """Run the flow to its end.

        Raises:
            M2FlowError: what went wrong; the samples up to there are in `run_dir`.
        """
        plan = self._plan or self.prepare()
        check_engines(plan, self.spec, self._models)
        raise_file_limit()
        find_models(self._models, self.spec, with_weights=True)
        # Missing packages and accounts are reported before there is a directory.
        destinations(self.settings, Path(), self.flow.name, lambda said: None)
        with naming_disk_errors(self._resume or self.settings.runs_dir):
            self.run_dir = fetch_run_dir(self._resume, self.settings.runs_dir) if self._resume else self._new_run_dir()
            with hold_run_lock(self.run_dir):
                if self._resume is None:
                    self.write_config(self.run_dir)
                    write_plan(self.run_dir, plan)
                else:
                    self._resumed = read_resume_state(self.run_dir, self._warn)
                    if move(self.run_dir, self.spec, plan, self._resumed.attempt):
                        self._warn(f"the run goes on with another cluster spec, {self.spec.name}, and a new plan")
                if self._forecast is not None:
                    write_forecast(self.run_dir, self._forecast)
                to = destinations(self.settings, self.run_dir, self.flow.name, self._warn, SHOWN_BY)
                forwarding = Forwarding(to, self._warn)
                forwarding.open()
                try:
                    wall_s, digests = self._run_with_retries(plan)
                finally:
                    forwarding.end()
                    self._write_pictures()
                    forwarding.close()
            return self._sum_up(wall_s, digests)

    def write_config(self, run_dir: Path) -> None:
        """Write what the run is, as far as `prepare` has found it out, to a directory's `config.json`."""
        write_config(
            run_dir,
            flow_file=self._flow_file,
            options=self.options,
            settings=self.settings,
            spec=self.spec,
            models=self._models,
            repeats_decisions=self._decisions is not None,
            resolved=None if self._traced is None else resolved_of(self.flow, self.options, self._traced),
        )

    def _new_run_dir(self) -> Path:
        run_dir, storage = create_run_dir(self.settings.runs_dir, self.flow.name), self.spec.storage
        if storage.directory:
            share(run_dir, storage.directory, storage.every_s)
        return run_dir

    def _run_with_retries(self, plan: Plan) -> tuple[float, Mapping[str, str]]:
        """Run to the end; resume after a loss of state that only a checkpoint has, or with smaller micro-batches after an out-of-memory
        error.
        """
        attempts, how = RetryLimit(self.settings), ""
        while True:
            try:
                return self._run_once(plan, how)
            except (StateLost, MicroBatchTooLarge) as error:
                self._has_lost_state = True
                resumed, wait_s, how = read_resume_state(self.run_dir, self._warn), 0.0, ""
                if isinstance(error, MicroBatchTooLarge):
                    self.spec = with_smaller_microbatches(self.spec)
                    move(self.run_dir, self.spec, plan, resumed.attempt)
                    how = f"every micro-batch goes through in {self.spec.train.parts} parts"
                else:
                    wait_s = attempts.record_failure(error, len(resumed.done))
                self._warn(f"{error.what}; the run goes on from {resumed.where}{', and ' if how else ''}{how}")
                time.sleep(wait_s)
                self._resumed = resumed

    def _run_once(self, plan: Plan, how: str) -> tuple[float, Mapping[str, str]]:
        clear_leftovers(self.run_dir)
        alarm = Alarm(self.spec.weights.warn_above, self._warn, self.spec.weights.alarms)
        tensorboard = has_tensorboard(self.settings)
        self._journal = Journal(self.run_dir, self._resumed, keeps=not self.settings.eager, tensorboard=tensorboard, alarm=alarm)
        self._journal.open()
        if how:
            self._journal.incident("out of memory", "controller", how)
        reason = "killed"
        try:
            with naming_engine_errors("the run"):
                wall_s, digests = self._run_eager(plan) if self.settings.eager else self._run_planned(plan)
                self._journal.make_certain()  # Also that the run directory is where the trained model was saved.
            reason = DONE
        except BaseException as error:
            reason = f"{type(error).__name__}: {error.what if isinstance(error, M2FlowError) else error}"
            raise
        finally:
            self.run_dir = self._journal.directory or self.run_dir
            # An error of closing must not hide why the run failed.
            with contextlib.nullcontext() if reason == DONE else contextlib.suppress(M2FlowError, OSError, sqlite3.Error):
                self._journal.ended(reason)
            with contextlib.nullcontext() if reason == DONE else contextlib.suppress(M2FlowError, OSError, sqlite3.Error):
                self._journal.close()
            for (role, how), count in sorted(self._journal.num_failed.items()):
                of = f"{count} sample{'s' if count > 1 else ''} of the reward {role}"
                self._warn(
                    f"{of} {how.replace('_', ' ')}: they count as its on_error says. m2flow samples --where \"parts ->> '{how}' = 1\""
                )
        return wall_s, digests

    def _run_planned(self, plan: Plan) -> tuple[float, Mapping[str, str]]:
        assert self._journal is not None
        coordinator = self._checkpoint_coordinator()
        futures, self._controller = self._make_controller(plan, self._journal, coordinator)
        self._lowering = Lowering(plan, self.spec)
        ahead = Lookahead(self.flow.staleness_for(self.options), self.spec.run_ahead_bytes)
        checkpointing: CheckpointingBackend | None = None
        backend = PlannedBackend(self.flow.name, self._lowering, self._controller, futures, self._journal, ahead)
        try:
            self._start(self._controller)
            start = self._begin(self._controller.unix_ns)
            begin = backend.begin_checkpoint
            checkpointing = CheckpointingBackend(
                self._replayed(backend), coordinator, begin=begin, end=lambda step: None, num_over=lambda: futures.num_well
            )
            self._run_flow(checkpointing)
            wall_s = time.monotonic() - start
            return wall_s, backend.save(self.run_dir / "checkpoints" / "final")
        except KeyboardInterrupt:
            with contextlib.suppress(M2FlowError):
                self._controller.wind_down()
                if checkpointing is not None and self._is_live:
                    self._controller.save_last(checkpointing.begin_last(self._controller.holds))
            raise
        finally:
            self._controller.close()

    def _begin(self, at_ns: int) -> float:
        """Note that the measured part of the run begins, and return when it does (`time.monotonic`).

        Args:
            at_ns: the same time by the clock of the trace, from which the host's may have departed since the workers were started.
        """
        self._start_ns = at_ns
        return time.monotonic()

    def _start(self, controller: Controller) -> None:
        """Start the workers. In the first attempt a worker that dies ends the run; in a later one it counts as another loss of state."""
        try:
            controller.open()
        except WorkerError as error:
            if not self._has_lost_state:
                raise
            raise StateLost(error.what, where=error.where, now=error.now, remote=error.remote) from error

    def _make_controller(self, plan: Plan, journal: Journal, coordinator: CheckpointCoordinator) -> tuple[CallFutures, Controller]:
        restored, parts, attempt = self._restored
        launcher = launcher_for(Job(plan, self.spec, self.settings, self._models, self.run_dir, attempt, parts, self._flow_file))
        futures = CallFutures()
        search_anew = None if self._graph is None else partial(self._make_replanner, self._graph, plan)
        return futures, Controller(
            plan, self.spec, self.settings, launcher, journal, futures, coordinator, restored, self._warn, search_anew
        )

    def _make_replanner(self, graph: MacroGraph, plan: Plan) -> Callable[[ClusterSpec], Choice]:
        """Make what searches for the best plan again, by the response lengths and durations of the run so far."""
        profile = read_profile(self._profile) if self._profile else None
        newer = measured_so_far(self.flow.name, self._models, plan, self.spec, self.run_dir, gather_s=GATHER_S)
        profile = profile.updated(newer) if profile and newer else newer or profile

        def choose(spec: ClusterSpec) -> Choice:
            if self.settings.deterministic and plan.choice is not None:
                spec = bits_kept(plan.choice, spec, device_of(self.spec))
            return question_of(graph, self._models, spec, lengths=lengths_of_run(self.run_dir), profile=profile).choose()

        return choose

    def _run_eager(self, plan: Plan) -> tuple[float, Mapping[str, str]]:
        assert self._journal is not None
        journal, coordinator = self._journal, self._checkpoint_coordinator()
        repeated = self._decisions, self._resumed, self._repeats
        executor = EagerExecutor(plan, self.spec, self.settings, self._models, self.run_dir, journal, *repeated)
        self._executor = executor
        checkpointing: CheckpointingBackend | None = None

        def save(step: int) -> None:
            checkpoint_eagerly(coordinator, step, executor, journal.make_durable)

        try:
            self._loading = {worker.name: worker.loads for worker in plan.workers if worker.loads}
            executor.open()
            self._loading = {}
            start = self._begin(executor.unix_ns)
            backend = EagerBackend(executor, journal)
            checkpointing = CheckpointingBackend(
                self._replayed(backend), coordinator, begin=lambda due: None, end=save, num_over=journal.num_well
            )
            self._run_flow(checkpointing)
            wall_s = time.monotonic() - start
            return wall_s, executor.save(self.run_dir / "checkpoints" / "final")
        except KeyboardInterrupt:
            with contextlib.suppress(M2FlowError):
                due = checkpointing.begin_last(executor.versions.__eq__) if checkpointing is not None and self._is_live else None
                if due is not None:
                    save(due.step)
            raise
        finally:
            executor.close()

    def interrupt(self, reason: str) -> bool:
        """Stop at the flow's next call, or as soon as the update that is under way in this thread is done; False: there is none. For a
        signal handler.
        """
        return self._interruptible is not None and self._interruptible.interrupt(reason)

    def end_now(self) -> None:
        """Write the ledger and kill the workers, as far as that is possible at once; the process must end then. For a signal handler."""
        steps = [self._journal.make_durable] if self._journal else []
        end_now([*steps, self._controller.abandon] if self._controller else steps)

    def _run_flow(self, backend: Backend) -> None:
        with prints_muted(lambda: self._replay is not None and not self._replay.is_live):
            reason = self._interruptible.reason if self._interruptible is not None else ""
            backend = self._interruptible = Interruptible(self._recorded(backend), reason)
            seed, sessions = self.settings.seed, list[Session]()
            self.flow.run(backend, self.options, seed=seed, max_steps=self._max_steps, begun=sessions.append)
            self._steps_asked, self._ended_early = sessions[0].num_steps, sessions[0].why_early

    @property
    def _is_live(self) -> bool:
        """Whether the program is past what earlier attempts recorded."""
        return self._replay is None or self._replay.is_live

    @property
    def _restored(self) -> tuple[Mapping[str, int], Mapping[str, str], int]:
        """Weight versions and checkpoint parts that the trainers begin with, and the number of the attempt."""
        return ({}, {}, 0) if self._resumed is None else (self._resumed.versions, self._resumed.parts, self._resumed.attempt)

    def _checkpoint_coordinator(self) -> CheckpointCoordinator:
        return CheckpointCoordinator(
            self.run_dir, self.settings, self._restored[2], None if self._resumed is None else self._resumed.checkpoint
        )

    def _replayed(self, live: Backend) -> Backend:
        """The backend with replay of earlier attempts, if the run is resumed."""
        resumed = self._resumed
        if resumed is None:
            return live
        self._replay = ReplayBackend(
            resumed.record,
            live,
            redoes=resumed.redo,
            logged=resumed.logged,
            left=resumed.left,
            failed=resumed.failed,
            may_change=resumed.may_change,
            changed=self._function_changed,
        )
        return self._replay

    def _function_changed(self, name: str) -> None:
        what = f"the function of {name} is another than before: calls that were over keep what it gave then"
        if what not in self._changes:
            self._changes.add(what)
            self._warn(what)
            assert self._journal is not None
            self._journal.incident("changed", "controller", what)

    def _recorded(self, backend: Backend) -> Backend:
        """The backend that the flow gets: it records the calls, and checks their structure if that is pinned."""
        assert self._journal is not None
        recorder: Backend = Recorder(backend if self._around is None else self._around(backend), self._journal.record)
        if not self._is_pinned:
            return recorder
        return PinnedBackend(recorder, self._pin_to, source="the given plan" if self._pin_to is not None else "the first step")

    def _write_pictures(self) -> None:
        """Write pictures and exports of the run, also of a failed one. An error in here must not hide why it failed."""
        if not self.run_dir.is_dir():
            return
        try:
            to_otel(self.run_dir)
            write_trace(self.run_dir, self.run_dir / "trace.json.gz", devices=self._plan.device_names if self._plan else None)
            if self.tally.rewards:
                write_curve(self.run_dir, self.run_dir / "curve.svg")
            copy_pictures(self.run_dir)
        except (M2FlowError, OSError, sqlite3.Error) as error:
            with contextlib.suppress(OSError):
                (self.run_dir / "logs" / "pictures.log").write_text(f"{error}\n")

    def _sum_up(self, wall_s: float, digests: Mapping[str, str]) -> Summary:
        tally, recorded = self.tally, read_trace(self.run_dir)
        rewards = next((tally.rewards[name] for name in reward_names(tally.rewards)), [])
        during = self._start_ns, self._start_ns + round(wall_s * 1e9)
        one = next(iter(digests.values())) if len(digests) == 1 else ""
        weights = one or hashlib.sha256("\n".join(f"{role} {d}" for role, d in sorted(digests.items())).encode()).hexdigest()
        return Summary(
            run_dir=str(self.run_dir),
            steps=tally.num_steps,
            steps_asked=self._steps_asked,
            ended_early=self._ended_early,
            samples=tally.num_samples,
            tokens=tally.num_tokens,
            left_out=read_left_out(self.run_dir),
            calls_failed=read_num_failed(self.run_dir),
            reward_first=rewards[0] if rewards else None,
            reward_last=rewards[-1] if rewards else None,
            wall_s=round(wall_s, 3),
            tokens_per_s=round((tally.num_tokens - tally.tokens_before) / max(wall_s, 1e-9), 1),
            samples_per_s=round((tally.num_samples - tally.samples_before) / max(wall_s, 1e-9), 2),
            busy_s={track: round(busy, 3) for track, busy in busy_seconds(recorded.spans, during).items()},
            channels=channels_of(recorded.counts),
            calls_lowered=self._lowering.num_lowered if self._lowering else 0,
            calls_reused=self._lowering.num_reused if self._lowering else 0,
            samples_sha256=samples_digest(self.run_dir),
            weights_sha256=weights,
        )


def launcher_for(job: Job) -> Launcher:
    """Return a launcher that is ready to start the plan's workers, by `launcher` of the cluster spec.

    Raises:
        SpecError, PlanError: the cluster is not there, or too small.
    """
    if job.spec.launcher == "local":
        return LocalLauncher(job)
    from m2flow.micro.controller.ray_cluster import RayLauncher

    launcher = RayLauncher(job)
    launcher.connect()
    return launcher
