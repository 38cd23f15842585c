"""One run from beginning to end: trace, lower, run, write down, sum up. What the command line calls, and a program may.

Plan, ClusterSpec --check_engines--> nothing; or an error that says what is missing and how to get it

An engine with an interpreter of its own is looked for in there, if that is on this host; workers of a Ray cluster look themselves.

One process at a time writes a run: it holds a lock on `run.lock`, which the operating system frees when the process ends, however that
comes. A run whose trainer died is taken up again in the same process, as `m2flow run --resume` would, unless attempt after attempt
gets no further. One whose trainer's ranks had no room for a micro-batch is, too, with smaller ones; that ends with single samples.

first signal   --KeyboardInterrupt in the flow's thread--> the updates that have begun are finished, all else is given up
    second signal  --end_now--> the ledger is written, the workers are killed, the process ends

A signal handler runs in the main thread between two of its instructions, so an eager run's update, which is that thread's own work,
only notes the first one. Limit: Python hears of a signal when code that is not Python's own returns.

Run(flow, options, spec, settings).prepare() -> plan;  .execute() -> Summary
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import final

from m2flow.engines.registry import check_engine
from m2flow.errors import FlowError, M2FlowError, MicroBatchTooLarge, SpecError, StateLost, WorkerError
from m2flow.macro.eager import EagerBackend
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph
from m2flow.macro.pinning import PinnedBackend, PinnedCall
from m2flow.macro.replay import Around, Recorder, ReplayBackend, check_same, prints_muted
from m2flow.macro.session import Backend
from m2flow.macro.tracing import Copies, anticipate, copies_made, explore, trace
from m2flow.micro.controller.call_futures import CallFutures
from m2flow.micro.controller.checkpoint_coordinator import CheckpointCoordinator, Keeper, keep_eagerly
from m2flow.micro.controller.controller import Controller
from m2flow.micro.controller.launcher import GATHER_S, Job, launcher_for
from m2flow.micro.controller.planned_backend import PlannedBackend, RunAhead
from m2flow.micro.lowering.arithmetic import TRACED_STEPS
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol.plan import Choice, Plan
from m2flow.micro.protocol.staleness import Decisions
from m2flow.micro.records.checkpoints import clear_leftovers
from m2flow.micro.records.flow_record import read_record
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.ledger import read_endings, read_num_failed, samples_digest
from m2flow.micro.records.plan_file import check_edited
from m2flow.micro.records.resume import DONE, Past, read_past
from m2flow.micro.records.rundir import create_run_dir, move, naming_a_full_disk, write_config, write_plan
from m2flow.micro.records.storage import brought_home, share, with_its_pictures
from m2flow.micro.records.tally import Alarm, Tally
from m2flow.micro.worker.eager_executor import EagerExecutor
from m2flow.micro.worker.telemetry import channels_of
from m2flow.observe.forwarding import Forwarding, destinations, has_tensorboard
from m2flow.observe.metrics import write_curve
from m2flow.observe.perfetto import write_trace
from m2flow.observe.spans import busy_seconds
from m2flow.observe.store import read_trace, to_otel
from m2flow.planner.measuring import measured_so_far
from m2flow.planner.planning import Forecast, forecast, is_searched, question_of, write_forecast
from m2flow.planner.profiles import read_profile
from m2flow.recipe import Model
from m2flow.rollout_scheduling.lengths import parse_lengths
from m2flow.simulator.machines import paced
from m2flow.spec import ClusterSpec, RunSettings


def check_engines(plan: Plan, spec: ClusterSpec) -> None:
    """
    Raises:
        EngineError: the plan names an engine that nobody knows. MissingExtra: what one needs is not installed.
    """
    options: dict[str, Mapping[str, object]] = {"rollout": spec.rollout.options, "train": spec.train.options}
    for worker in plan.workers:
        for slot in worker.engines:
            check_engine(slot.engine, slot.kind, worker.device, options.get(slot.kind) if spec.launcher == "local" else None)


_LOCK = "run.lock"


@contextlib.contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Be the one process that writes a run.

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


def in_smaller_parts(spec: ClusterSpec) -> ClusterSpec:
    """The same, but micro-batches go through the trainer in twice as many parts."""
    return spec.model_copy(update={"train": spec.train.model_copy(update={"parts": 2 * spec.train.parts})})


@final
class Attempts:
    """How often the run has come to the same place."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._num_vain = 0
        self._furthest = -1

    def broke(self, error: StateLost, num_done: int) -> float:
        """The run broke after so many calls were over; how many seconds to wait before it is taken up again.

        Raises:
            StateLost: it has come no further too often.
        """
        self._num_vain = 1 if num_done > self._furthest else self._num_vain + 1
        self._furthest = max(self._furthest, num_done)
        if self._num_vain >= self._settings.attempts:
            times = f"{self._num_vain} times" if self._num_vain > 1 else "once"
            what = f"{error.what}; the run has come this far {times}, and no further"
            raise StateLost(what, where=error.where, now=error.now, remote=error.remote) from error
        return float(self._settings.retry_wait_s * 2 ** (self._num_vain - 1))


_PATIENCE_S = 2.0


@final
class Shielding(Around):
    """An eager backend whose updates are not broken off: half of one would be made twice when the run is taken up again."""

    def __init__(self, live: Backend) -> None:
        super().__init__(live)
        self._is_updating = False
        self._reason = ""

    def interrupt(self, reason: str) -> bool:
        """Stop at the end of the update that is under way; False if none is. From a signal handler."""
        if self._is_updating:
            self._reason = reason
        return self._is_updating

    def submit(self, call: Call) -> None:
        self._is_updating = call.method == "update"
        try:
            super().submit(call)
        finally:
            self._is_updating = False
        if self._reason:
            raise KeyboardInterrupt(self._reason)


def end_now(steps: Iterable[Callable[[], None]]) -> None:
    """Do these one after the other, each as far as it comes in two seconds: a lock that it needs may be held by who was interrupted."""
    for step in steps:
        thread = threading.Thread(target=_quietly, args=(step,), daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)


def _quietly(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:  # The process ends; what can't be done now is found by the next run.
        return


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    run_dir: str
    steps: int
    samples: int
    """Generated, evaluations included."""
    tokens: int
    """Generated."""
    left_out: dict[str, int]
    """Samples that are in no result, by reason: `late` ones were dropped; `unused` ones carried, and no later turn gave them."""
    calls_failed: int
    """Whose errors the flow caught; with them counts what needed them."""
    reward_first: float | None
    """Mean reward of the first update that had rewards."""
    reward_last: float | None
    wall_s: float
    """From the first call to the last, without the workers' start; of a run that was resumed, since then."""
    tokens_per_s: float
    """In that time, as are `samples_per_s` and `busy_s`."""
    samples_per_s: float
    busy_s: dict[str, float]
    """Seconds that each worker was at work."""
    channels: dict[str, dict[str, float]]
    """Of each way from a worker to another: parcels, samples and bytes, how many of these in shared memory, seconds blocked."""
    calls_lowered: int
    """Calls that were new to the lowering, or newly wired."""
    calls_reused: int
    """Calls whose stage was there already; a flow whose steps look alike has these alone after the first."""
    samples_sha256: str
    weights_sha256: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Run:
    """One run of a flow. With `decisions` of another run (`m2flow.micro.records.ledger.read_decisions`), an eager one repeats what time
    decided; with a `pinned` plan, processes and sizes are that one's; a `profile` is what a search for a placement goes by. What `around`
    makes of the backend gets the flow's calls, for `max_steps` of its steps. With `resume`, the directory of a run that stopped, it goes
    on in there; flow, options and settings must be those of that run (`m2flow.micro.records.rundir.read_config`). One that `foresees`
    writes
    what the plan should take (`m2flow.planner.planning`), also where it was not searched for."""

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
        self.spec = spec
        self.settings = settings
        self._flow_file = flow_file
        self._pin_to = pin_to
        self._is_pinned = pin_plan or pin_to is not None
        self._decisions = decisions
        self._pinned_plan = pinned
        self._profile = profile
        self._around = around
        self._max_steps = max_steps
        self._resume = resume
        self._foresees = foresees
        self._forecast: Forecast | None = None
        self._warn = warn
        self._past: Past | None = None
        self._start_ns = 0
        """When its first call was next, Unix time."""
        self._has_broken = False
        """An attempt of this process was up, and lost what only a checkpoint has."""
        self._replay: ReplayBackend | None = None
        self._graph: MacroGraph | None = None
        """What a placement was searched for."""
        self._plan: Plan | None = None
        self._num_steps: int | None = None
        self._models: dict[str, Model] = {}
        self._journal: Journal | None = None
        self._controller: Controller | None = None
        self._shield: Shielding | None = None
        self._lowering: Lowering | None = None
        self.run_dir = Path()

    def prepare(self) -> Plan:
        """Trace the first step and lower it. Runs no engine; makes no directory.

        The search seats the calls that it is shown: for it the flow is followed past the values that it waits for, to the outcomes with
        the most calls. The rules of `split` and `time-shared` leave room for what nobody knows.
        """
        with prints_muted():  # They come when the flow runs.
            graph, self._models, num_steps = trace(self.flow, self.options, seed=self.settings.seed, steps=TRACED_STEPS)
        self._num_steps = num_steps
        if self._resume is not None and (self._resume / "ledger.db").exists():
            check_same(read_record(self._resume), graph)
        if self.spec.pools and self.spec.launcher == "local":
            raise SpecError(
                f"{self.spec.name} has pools of devices, and the local launcher runs on this machine only",
                now="Plan and simulate with it; to run here, leave `pools` out.",
            )
        pinned, is_deterministic, choice = self._pinned_plan, self.settings.deterministic, None
        is_whole = num_steps <= TRACED_STEPS and not graph.observations and not is_searched(self.spec)
        copies = Copies() if is_whole else copies_made(self.flow, self.options, num_steps=num_steps, seed=self.settings.seed)
        self._models = {**copies.models, **self._models}
        if is_searched(self.spec) and pinned is None:
            graph = self._anticipated(graph)
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
        if self._foresees and self._plan.choice is None and not self.settings.eager:
            if not any(call.method == "update" and call.step >= 0 for call in graph.calls):  # A value was waited for before it.
                graph = self._anticipated(graph)
            ask = partial(question_of, graph, self._models, profile=self._profile)
            self._forecast = forecast(self._plan, self.spec, ask)
        return self._plan

    def _anticipated(self, graph: MacroGraph) -> MacroGraph:
        """A graph that goes on past the values that the flow waits for; the given one where that can't be said."""
        with contextlib.suppress(FlowError):  # Of invented values; the flow's own errors come when it runs.
            exploration = explore(self.flow, self.options, seed=self.settings.seed)
            graph = anticipate(self.flow, self.options, exploration, steps=TRACED_STEPS, seed=self.settings.seed)
            self._models = dict(exploration.models)
        return graph

    @property
    def models(self) -> Mapping[str, Model]:
        """Of the flow's roles, once it is prepared."""
        return self._models

    @property
    def num_steps(self) -> int | None:
        """Of the program, once it is prepared; None: it is not known."""
        return self._num_steps

    @property
    def tally(self) -> Tally:
        """Counts so far; may be read while the run goes on."""
        return self._journal.tally if self._journal else Tally()

    @property
    def running(self) -> Mapping[str, str]:
        """What each worker does now, in words."""
        return self._controller.running() if self._controller else {}

    def execute(self) -> Summary:
        """Run the flow to its end.

        Raises:
            M2FlowError: what went wrong; the samples up to there are in `run_dir`.
        """
        plan = self._plan or self.prepare()
        check_engines(plan, self.spec)
        destinations(self.settings, Path(), self.flow.name, lambda said: None)  # What is missing is said before there is a directory.
        with naming_a_full_disk(self.settings.runs_dir):
            self.run_dir = brought_home(self._resume, self.settings.runs_dir) if self._resume else self._new_run_dir()
            with only_writer(self.run_dir):
                if self._resume is None:
                    write_config(
                        self.run_dir,
                        flow_file=self._flow_file,
                        options=self.options,
                        settings=self.settings,
                        spec=self.spec,
                        repeats_decisions=self._decisions is not None,
                    )
                    write_plan(self.run_dir, plan)
                else:
                    self._past = read_past(self.run_dir, self._warn)
                    if move(self.run_dir, self.spec, plan, self._past.attempt):
                        self._warn(f"the run goes on with another cluster spec, {self.spec.name}, and a new plan")
                if self._forecast is not None:
                    write_forecast(self.run_dir, self._forecast)
                forwarding = Forwarding(destinations(self.settings, self.run_dir, self.flow.name, self._warn), self._warn)
                forwarding.open()
                try:
                    wall_s, digests = self._attempts(plan)
                finally:
                    forwarding.end()
                    self._draw()
                    forwarding.close()
            return self._sum_up(wall_s, digests)

    def _new_run_dir(self) -> Path:
        run_dir, storage = create_run_dir(self.settings.runs_dir, self.flow.name), self.spec.storage
        if storage.directory:
            share(run_dir, storage.directory, storage.every_s)
        return run_dir

    def _attempts(self, plan: Plan) -> tuple[float, Mapping[str, str]]:
        """Run to the end; where a worker dies with what only a checkpoint has, or has no room for what can be cut, from there again."""
        attempts, how = Attempts(self.settings), ""
        while True:
            try:
                return self._attempt(plan, how)
            except (StateLost, MicroBatchTooLarge) as error:
                self._has_broken = True
                past, wait_s, how = read_past(self.run_dir, self._warn), 0.0, ""
                if isinstance(error, MicroBatchTooLarge):
                    self.spec = in_smaller_parts(self.spec)
                    move(self.run_dir, self.spec, plan, past.attempt)
                    how = f"every micro-batch goes through in {self.spec.train.parts} parts"
                else:
                    wait_s = attempts.broke(error, len(past.done))
                self._warn(f"{error.what}; the run goes on from {past.where}{', and ' if how else ''}{how}")
                time.sleep(wait_s)
                self._past = past

    def _attempt(self, plan: Plan, how: str) -> tuple[float, Mapping[str, str]]:
        clear_leftovers(self.run_dir)
        alarm, tensorboard = Alarm(self.spec.weights.warn_above, self._warn), has_tensorboard(self.settings)
        self._journal = Journal(self.run_dir, self._past, keeps=not self.settings.eager, tensorboard=tensorboard, alarm=alarm)
        self._journal.open()
        if how:
            self._journal.incident("out of memory", "controller", how)
        reason = "killed"
        try:
            wall_s, digests = self._eager(plan) if self.settings.eager else self._planned(plan)
            reason = DONE
        except BaseException as error:
            reason = f"{type(error).__name__}: {error.what if isinstance(error, M2FlowError) else error}"
            raise
        finally:
            # What can't be closed must not hide why the run failed.
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

    def _planned(self, plan: Plan) -> tuple[float, Mapping[str, str]]:
        assert self._journal is not None
        keeper = self._keeper()
        outcomes, self._controller = self._assembled(plan, self._journal, keeper)
        self._lowering = Lowering(plan, self.spec)
        ahead = RunAhead(self.flow.staleness_for(self.options), self.spec.run_ahead_bytes)
        keeping: CheckpointCoordinator | None = None
        backend = PlannedBackend(self.flow.name, self._lowering, self._controller, outcomes, self._journal, ahead)
        try:
            self._start(self._controller)
            start = self._begin()
            begin = backend.begin_checkpoint
            keeping = CheckpointCoordinator(
                self._replayed(backend), keeper, begin=begin, end=lambda step: None, num_over=lambda: outcomes.num_well
            )
            self._run_flow(keeping)
            wall_s = time.monotonic() - start
            return wall_s, backend.save(self.run_dir / "checkpoints" / "final")
        except KeyboardInterrupt:
            with contextlib.suppress(M2FlowError):
                self._controller.wind_down()
                if keeping is not None and self._is_live:
                    self._controller.save_last(keeping.begin_last(self._controller.holds))
            raise
        finally:
            self._controller.close()

    def _begin(self) -> float:
        """The time, monotonic, from which on the run is measured."""
        self._start_ns = time.time_ns()
        return time.monotonic()

    def _start(self, controller: Controller) -> None:
        """Have the workers come up. The first time one that dies ends the run; after that it is one more loss."""
        try:
            controller.open()
        except WorkerError as error:
            if not self._has_broken:
                raise
            raise StateLost(error.what, where=error.where, now=error.now, remote=error.remote) from error

    def _assembled(self, plan: Plan, journal: Journal, keeper: Keeper) -> tuple[CallFutures, Controller]:
        restored, parts, attempt = self._restored
        launcher = launcher_for(Job(plan, self.spec, self.settings, self._models, self.run_dir, attempt, parts, self._flow_file))
        outcomes = CallFutures()
        search_anew = None if self._graph is None else partial(self._search_anew, self._graph, plan)
        return outcomes, Controller(plan, self.spec, self.settings, launcher, journal, outcomes, keeper, restored, self._warn, search_anew)

    def _search_anew(self, graph: MacroGraph, plan: Plan) -> Callable[[ClusterSpec], Choice]:
        """What searches for the best plan, with answers as long as those of the run so far, and with work that takes what it took."""
        profile = read_profile(self._profile) if self._profile else None
        newer = measured_so_far(self.flow.name, self._models, plan, self.spec, self.run_dir, gather_s=GATHER_S)
        profile = profile.updated(newer) if profile and newer else newer or profile
        return lambda spec: question_of(graph, self._models, spec, lengths=parse_lengths(str(self.run_dir)), profile=profile).choose()

    def _eager(self, plan: Plan) -> tuple[float, Mapping[str, str]]:
        assert self._journal is not None
        journal, keeper = self._journal, self._keeper()
        performer = EagerExecutor(plan, self.spec, self.settings, self._models, self.run_dir, journal, self._decisions, self._past)
        keeping: CheckpointCoordinator | None = None

        def save(step: int) -> None:
            keep_eagerly(keeper, step, performer, journal.make_durable)

        try:
            performer.open()
            start = self._begin()
            backend = self._shield = Shielding(EagerBackend(performer, journal))
            keeping = CheckpointCoordinator(self._replayed(backend), keeper, begin=lambda due: None, end=save, num_over=journal.num_well)
            self._run_flow(keeping)
            wall_s = time.monotonic() - start
            return wall_s, performer.save(self.run_dir / "checkpoints" / "final")
        except KeyboardInterrupt:
            with contextlib.suppress(M2FlowError):
                due = keeping.begin_last(performer.versions.__eq__) if keeping is not None and self._is_live else None
                if due is not None:
                    save(due.step)
            raise
        finally:
            performer.close()

    def interrupt(self, reason: str) -> bool:
        """Stop as soon as the update that is under way in this thread is done; False: there is none. From a signal handler."""
        return self._shield is not None and self._shield.interrupt(reason)

    def end_now(self) -> None:
        """Write the ledger and end the workers, as far as that is possible at once; the process must end then. From a signal handler."""
        steps = [self._journal.make_durable] if self._journal else []
        end_now([*steps, self._controller.abandon] if self._controller else steps)

    def _run_flow(self, backend: Backend) -> None:
        with prints_muted(lambda: self._replay is not None and not self._replay.is_live):
            self.flow.run(self._watched(backend), self.options, seed=self.settings.seed, max_steps=self._max_steps)

    @property
    def _is_live(self) -> bool:
        """Whether the program is beyond what an earlier attempt did."""
        return self._replay is None or self._replay.is_live

    @property
    def _restored(self) -> tuple[Mapping[str, int], Mapping[str, str], int]:
        """Versions and parts that the trainers begin with, and the number of the attempt."""
        return ({}, {}, 0) if self._past is None else (self._past.versions, self._past.parts, self._past.attempt)

    def _keeper(self) -> Keeper:
        return Keeper(self.run_dir, self.settings, self._restored[2], None if self._past is None else self._past.checkpoint)

    def _replayed(self, live: Backend) -> Backend:
        """The backend as it goes on from where the run stopped."""
        past = self._past
        if past is None:
            return live
        self._replay = ReplayBackend(past.record, live, reperform=past.redo, logged=past.logged, left=past.left, failed=past.failed)
        return self._replay

    def _watched(self, backend: Backend) -> Backend:
        """The backend as the flow gets it: what it does is recorded, and held to one structure if that was asked for."""
        assert self._journal is not None
        recorder: Backend = Recorder(backend if self._around is None else self._around(backend), self._journal.record)
        if not self._is_pinned:
            return recorder
        return PinnedBackend(recorder, self._pin_to, source="the given plan" if self._pin_to is not None else "the first step")

    def _draw(self) -> None:
        """The pictures and exports of the run, also of one that failed. What can't be drawn must not hide why it failed."""
        try:
            to_otel(self.run_dir)
            write_trace(self.run_dir, self.run_dir / "trace.json.gz", devices=self._plan.device_names if self._plan else None)
            if self.tally.rewards:
                write_curve(self.run_dir, self.run_dir / "curve.svg")
            with_its_pictures(self.run_dir)
        except (M2FlowError, OSError, sqlite3.Error) as error:
            with contextlib.suppress(OSError):
                (self.run_dir / "logs" / "pictures.log").write_text(f"{error}\n")

    def _sum_up(self, wall_s: float, digests: Mapping[str, str]) -> Summary:
        tally, recorded = self.tally, read_trace(self.run_dir)
        during = self._start_ns, self._start_ns + round(wall_s * 1e9)
        one = next(iter(digests.values())) if len(digests) == 1 else ""
        weights = one or hashlib.sha256("\n".join(f"{role} {d}" for role, d in sorted(digests.items())).encode()).hexdigest()
        return Summary(
            run_dir=str(self.run_dir),
            steps=tally.num_steps,
            samples=tally.num_samples,
            tokens=tally.num_tokens,
            left_out=read_endings(self.run_dir),
            calls_failed=read_num_failed(self.run_dir),
            reward_first=tally.rewards[0] if tally.rewards else None,
            reward_last=tally.rewards[-1] if tally.rewards else None,
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
