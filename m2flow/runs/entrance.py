"""Run a flow from Python (in a script, in a notebook's cell, in a test), and execute a run under the user's eyes.

    flow, cluster, seed, options --run--> Run          the same functions as under `m2flow run`
    a run's directory --open_run--> Run                its tables, its model, its picture (`m2flow.runs.opened`)
    PreparedRun --execute_watched--> Summary | RunInterrupted    signals stop it in order, a display shows it

`plan` and `simulate` are in `m2flow.runs.planning`. A flow may be defined in a notebook's cell: its lines are then called `In[3]:5`, and
its functions go to the workers by value, as those of a file do.

A notebook's stop button is Ctrl-C: the update under way is finished, the workers are stopped, and `RunInterrupted` says how to go on. A
second press kills the workers and leaves the kernel alive.

The first signal finishes the update that is under way and stops the workers. The second one kills them: on the command line the process
ends with them, in a Python session (a notebook's kernel, a script) KeyboardInterrupt is raised. Signals reach the main thread only; a
run that is started in another thread is stopped by nobody.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.console import Console

from m2flow.errors import DivergenceError, FlowLoadError, M2FlowError, OptionError, RecordLost, RunInterrupted, SpecError, did_you_mean
from m2flow.macro.flow import Flow, load_flow
from m2flow.macro.flow import flow as as_flow
from m2flow.macro.graph import shown_file
from m2flow.runs import display
from m2flow.runs.cluster_file import load_cluster
from m2flow.spec import LAPTOP, ClusterSpec, RunSettings

if TYPE_CHECKING:
    from m2flow.micro.protocol.plan import Plan
    from m2flow.micro.records.rundir import Config
    from m2flow.runner.run import Run as PreparedRun
    from m2flow.runner.run import Summary
    from m2flow.runs.opened import Run


# ---- under the user's eyes


def execute_watched(
    run: PreparedRun,
    console: Console,
    progress: display.Progress,
    *,
    is_eager: bool,
    is_quiet: bool,
    ends_process: bool,
    show_plan: Callable[[Plan], None] | None = None,
) -> Summary:
    """Prepare and execute a run, and show its plan and progress.

    Args:
        ends_process: a second signal ends the process with status 130; otherwise it raises KeyboardInterrupt.
        show_plan: shows the plan; None: it is printed to the console.
    Raises:
        RunInterrupted: a signal stopped it; the text says in which step.
        Exception: whatever ended the run, as it was raised.
    """
    try:
        with stopping_by_signals(run, progress.stopping, ends_process=ends_process):
            run.warm_up()
            plan = run.prepare()
            if not is_quiet:
                if show_plan is None:
                    display.show_plan(console, plan, is_eager=is_eager)
                else:
                    show_plan(plan)
                progress.expect(plan)
            with contextlib.nullcontext() if is_quiet else progress:
                return run.execute()
    except KeyboardInterrupt as stop:
        error = stop if isinstance(stop, RunInterrupted) else RunInterrupted(f"stopped by {str(stop) or 'Ctrl-C'}")
        step = stop_position(run.tally.num_steps, run.num_steps) if run.tally.num_samples else ""
        raise RunInterrupted(f"{error.what}{step}", now=error.where) from None


@contextlib.contextmanager
def stopping_by_signals(run: PreparedRun, stopping: Callable[[], None], *, ends_process: bool) -> Iterator[None]:
    """Turn the first signal into a KeyboardInterrupt, at once or after the update that this thread runs; the second kills the workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_stopping = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        reason = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        if is_stopping:
            run.end_now()
            if not ends_process:
                raise KeyboardInterrupt(f"{reason}, twice")
            with contextlib.suppress(OSError):  # After a SIGHUP the terminal is gone.
                os.write(2, b"\nended at once; the ledger is written\n")
            os._exit(130)
        is_stopping = True
        stopping()
        if not run.interrupt(reason):
            raise KeyboardInterrupt(reason)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handled = [
        number for number, handler in before.items() if handler is not signal.SIG_IGN
    ]  # An ignored signal stays ignored: a shell's background job.
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def stop_position(num_done: int, num_steps: int | None) -> str:
    """Say where a run was stopped.

    >>> stop_position(0, 2), stop_position(2, 2)
    (' in step 1', ' after its last step')
    """
    return " after its last step" if num_steps and num_done >= num_steps else f" in step {num_done + 1}"


def has_directory(run: display.Watched) -> bool:
    """Whether the run has come as far as to make its directory, which is still there."""
    return run.run_dir != Path() and run.run_dir.is_dir()


def leftovers(run: display.Watched, *, was_there: bool, goes_on: str) -> str:
    """Describe what an unfinished run has left on disk.

    Args:
        was_there: the run was resumed, so that this process has not counted all of its samples.
        goes_on: how to resume it; empty: it can't be resumed as it is.
    """
    if not has_directory(run):
        return ""
    tally = run.tally
    if not tally.num_samples and was_there:
        return f"  What it had before is in {run.run_dir}."
    if not tally.num_samples:
        again = f"; to go on: {goes_on}" if goes_on and _has_record(run.run_dir) else ""
        return f"  No sample was generated yet; the run's logs are in {run.run_dir / 'logs'}{again}."
    done = "1 step is" if tally.num_steps == 1 else f"{tally.num_steps} steps are"
    return (
        f"  The {tally.num_samples:,} samples so far are in {run.run_dir} (ledger.db and segments/), {done} done.\n"
        f"  What was done when: m2flow view {shlex.quote(str(run.run_dir))}{f'; to go on: {goes_on}' if goes_on else ''}"
    )


def _has_record(run_dir: Path) -> bool:
    """Whether a resume finds a record of the flow. There is none if the disk was full before the ledger's tables were made."""
    from m2flow.micro.records.flow_record import read_record

    try:
        read_record(run_dir)
    except SpecError:
        return False
    return True


def can_go_on(error: BaseException) -> bool:
    """Whether the run can be resumed as it is after this error."""
    return not isinstance(error, DivergenceError | RecordLost)


def prepare_engines_here(threads: int, *, deterministic: bool) -> None:
    """Set the environment that matrix libraries read when they are loaded, for an eager run in this process.

    Raises:
        OptionError: the run is to be the same bit by bit, and torch was loaded without what that needs.
    """
    from m2flow.micro.worker.fork_server import engine_environment

    wanted = engine_environment(threads, deterministic=deterministic)
    if "torch" not in sys.modules:
        os.environ.update(wanted if deterministic else {name: value for name, value in wanted.items() if name not in os.environ})
        return
    import torch

    if deterministic and os.environ.get("MKL_CBWR") != wanted["MKL_CBWR"]:
        raise OptionError(
            "torch is loaded in this process without MKL_CBWR=AUTO, so an eager run in it would not be the same bit by bit",
            now="Set os.environ['MKL_CBWR'] = 'AUTO' before torch is imported, or leave eager= or deterministic= out.",
        )
    torch.set_num_threads(threads)


# ---- from Python


FlowLike = Flow | Callable[..., object] | str | Path
"""A flow as the entrance takes it: what `@flow` made, a plain function, or a file as `load_flow` takes it."""
ClusterLike = ClusterSpec | Mapping[str, object] | str | Path | None
"""A cluster as the entrance takes it: a spec, its fields, or the YAML file of one; None is one time-shared device."""


def run(
    flow: FlowLike | None = None,
    *,
    cluster: ClusterLike = None,
    seed: int = 0,
    deterministic: bool = False,
    eager: bool = False,
    plan: str | Path | None = None,
    profile: str | Path | None = None,
    policy: str = "",
    runs_dir: str | Path = "runs",
    resume: str | Path | Run | None = None,
    settings: RunSettings | Mapping[str, object] | None = None,
    quiet: bool = False,
    options: Mapping[str, object] | None = None,
    **flow_options: object,
) -> Run:
    """Run a flow to its end, and return its run: what `m2flow run` does.

    In a notebook it shows a live display under the cell, elsewhere it prints to standard output.

    Args:
        flow: what `@flow` made, a plain function, or a file (`"flows/grpo.py"`, `"flows/grpo.py:name"`); with `resume` it may be left out
            if the run's flow is in a file.
        cluster: a spec, its fields as a mapping, or its YAML file; None is one time-shared device.
        seed: decides every random number of the run.
        deterministic: the same result bit by bit each time, on a CPU; slower.
        eager: run the flow call by call in this process: the reference for every plan.
        plan: a plan file whose processes and sizes are used.
        profile: a file of measured costs, for `placement: auto`.
        policy: rollout policies, instead of the cluster's: `"longest-first+admission"`.
        runs_dir: where the run's directory goes.
        resume: a run that stopped, which goes on in its directory with its own options, seed and cluster. The flow must be the same.
        settings: run settings by name (`m2flow help RunSettings`), or as a whole.
        quiet: show neither plan nor progress.
        options: the flow's options, for those whose names are taken by the parameters above.
        flow_options: the flow's options: `num_steps=20, lr=1e-4`.
    Returns:
        The run, with its `summary`.
    Raises:
        OptionError: the flow has no such option, or needs one that is missing. SpecError: the cluster can't be read.
        RunInterrupted: it was stopped; the samples up to there are kept, and the text says how to go on.
        M2FlowError: what went wrong; a note says what is left of the run.

    >>> import m2flow
    >>> m2flow.run("flows/grpo.py", num_steps=20, seed=1)  # doctest: +SKIP
    Run(runs/grpo-20260102-030405: done, 20 steps, 7,168 samples, reward 0.31 -> 0.95 (means of the first and last 2 steps))
    """
    before = None if resume is None else read_resumed(resume, [*(options or {}), *flow_options], cluster, plan)
    taken = flow_of(before.flow if flow is None and before is not None else flow)
    if before is None:
        given = options_of(taken, options, flow_options)
        spec, chosen = spec_of(cluster).with_policy(policy), settings_of(settings, seed, deterministic, eager, runs_dir)
    else:
        given, spec, chosen = resumed_options(taken, before.options), before.cluster, before.settings
    return _run(taken, given, spec, chosen, before, plan=plan, profile=profile, is_quiet=quiet)


def _run(
    flow: Flow,
    options: Mapping[str, object],
    spec: ClusterSpec,
    settings: RunSettings,
    before: Config | None,
    *,
    plan: str | Path | None,
    profile: str | Path | None,
    is_quiet: bool,
) -> Run:
    """Run a flow, or go on with the run of `before`."""
    from m2flow.micro.records.plan_file import read_plan
    from m2flow.runner.run import Run as PreparedRun
    from m2flow.runs.opened import Run as OpenedRun

    if settings.eager:
        prepare_engines_here(1 if settings.deterministic else spec.num_cores, deterministic=settings.deterministic)
    plan_file = plan if before is None else None if settings.eager else before.run_dir / "plan.json"
    run = PreparedRun(
        flow,
        options,
        spec,
        settings,
        flow_file=target_of(flow) if before is None else before.flow,
        pinned=None if plan_file is None else read_plan(Path(plan_file)),
        profile=None if profile is None else Path(profile),
        resume=None if before is None else before.run_dir,
        foresees=True,
        warn=lambda said: warnings.warn(said, RuntimeWarning, stacklevel=2),
    )
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    progress, show = _display(console, run, is_eager=settings.eager)
    try:
        summary = execute_watched(run, console, progress, is_eager=settings.eager, is_quiet=is_quiet, ends_process=False, show_plan=show)
    except M2FlowError as error:
        again = f"m2flow.run({flow.name}, resume={str(run.run_dir)!r})" if can_go_on(error) else ""
        if has_directory(run):
            error.add_note(leftovers(run, was_there=before is not None, goes_on=again))
        raise
    if not is_quiet and show is None:
        display.show_summary(console, flow.name, summary, run.tally)
    return OpenedRun(Path(summary.run_dir), summary=summary)


def open_run(path: str | Path | None = None, *, runs_dir: str | Path = "runs") -> Run:
    """Open a run's directory, also while the run goes on or after it failed.

    Args:
        path: the directory, or its name in `runs_dir`; None: the newest there.
    Raises:
        SpecError: there is none.
    """
    from m2flow.micro.records.rundir import find_run
    from m2flow.runs.opened import Run as OpenedRun

    return OpenedRun(find_run(None if path is None else str(path), Path(runs_dir)))


# ---- what was given


def flow_of(flow: FlowLike | None) -> Flow:
    """The flow that was given.

    Raises:
        FlowLoadError: it is none of what the entrance takes, or its file can't be loaded.
    """
    if isinstance(flow, Flow):
        return flow
    if isinstance(flow, str | Path):
        return load_flow(str(flow))
    if not callable(flow):
        raise FlowLoadError(f"{flow!r:.60} is no flow", now="Give a function decorated with @flow, or the path of its file.")
    return as_flow(flow)


def target_of(flow: Flow) -> str:
    """Where the flow is, as the command line takes it: its file, `file.py:name` where that has several, `In[3]` for a cell."""
    file = inspect.getsourcefile(flow.function) or flow.function.__code__.co_filename
    name = shown_file(file)
    if not os.path.isfile(file):
        return name
    module = sys.modules.get(flow.function.__module__)
    flows = [value for value in vars(module).values() if isinstance(value, Flow)] if module else []
    return name if len(flows) <= 1 else f"{name}:{flow.name}"


def options_of(flow: Flow, options: Mapping[str, object] | None, flow_options: Mapping[str, object]) -> dict[str, object]:
    """The flow's options.

    Raises:
        OptionError: the flow has no such option, one is given twice, or one is missing.
    """
    twice = sorted(set(options or ()) & set(flow_options))
    if twice:
        raise OptionError(f"{twice[0]} is given twice: as an argument, and in options=", now="Leave one of them out.")
    given = {**(options or {}), **flow_options}
    flow.check_options(given)
    return given


def spec_of(cluster: ClusterLike) -> ClusterSpec:
    """The cluster spec that was given.

    Raises:
        SpecError: it can't be read, or a field of it can't have its value.
    """
    if cluster is None:
        return LAPTOP
    if isinstance(cluster, ClusterSpec):
        return cluster
    if isinstance(cluster, str | Path):
        return load_cluster(cluster)
    try:
        return ClusterSpec.model_validate(dict(cluster))
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(
            f"cluster: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            now=did_you_mean(str(first["loc"][0]), ClusterSpec.model_fields, "`m2flow help ClusterSpec` lists the fields."),
        ) from None


_OF_THE_COMMAND = {
    "checkpoint_every": "That is the command's; here checkpoint_steps is a number of steps, and checkpoint_s one of seconds.",
    "keep_checkpoints": "That is the command's; here it is checkpoints_kept.",
}
"""What an option of `m2flow run` is called here, where its name is another."""


def settings_of(
    settings: RunSettings | Mapping[str, object] | None, seed: int, deterministic: bool, eager: bool, runs_dir: str | Path
) -> RunSettings:
    """The run settings, with those that have parameters of their own.

    Raises:
        OptionError: there is no such setting, or it can't have its value.
    """
    own: dict[str, object] = {"seed": seed, "deterministic": deterministic, "eager": eager, "runs_dir": str(runs_dir)}
    more = settings.model_dump(exclude_unset=True) if isinstance(settings, RunSettings) else dict(settings or {})
    for name in more:
        if name not in RunSettings.model_fields:
            instead = _OF_THE_COMMAND.get(name) or did_you_mean(name, RunSettings.model_fields)
            raise OptionError(f"settings: there is no run setting {name!r}", now=instead)
    try:
        return RunSettings.model_validate({**own, **more})
    except ValidationError as error:
        first = error.errors()[0]
        raise OptionError(f"settings: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


# ---- a run that goes on


def read_resumed(resume: str | Path | Run, given: Sequence[str], cluster: ClusterLike, plan: str | Path | None) -> Config:
    """The configuration of the run that goes on.

    Raises:
        OptionError: something is given that the run has from its beginning.
    """
    from m2flow.micro.records.rundir import read_config
    from m2flow.runs.opened import Run as OpenedRun

    run_dir = resume.path if isinstance(resume, OpenedRun) else open_run(resume).path
    refused = [*given, *(["cluster"] if cluster is not None else []), *(["plan"] if plan is not None else [])]
    if refused:
        raise OptionError(f"{refused[0]} is given, and the run in {run_dir} goes on as it began", now="Leave it out, or begin a new run.")
    return read_config(run_dir)


def resumed_options(flow: Flow, written: Mapping[str, object]) -> dict[str, object]:
    """Options of the flow as the configuration holds them, converted to the types of its parameters.

    Raises:
        OptionError: the flow has no such parameter any more, or one that a file can't hold.
    """
    from m2flow.micro.records.rundir import option_from_text

    known = {parameter.name: parameter for parameter in flow.parameters}
    lost = [name for name in written if name not in known]
    if lost:
        raise OptionError(
            f"the run was made with {lost[0]}={written[lost[0]]}, and the flow {flow.name} has no such parameter any more",
            now="Put the parameter back, or begin a new run.",
        )
    return {name: option_from_text(value, known[name].type) for name, value in written.items()}


# ---- showing it


def is_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _display(console: Console, run: display.Watched, *, is_eager: bool) -> tuple[display.Progress, Callable[[Plan], None] | None]:
    """The display of a run, and what shows its plan; None: printed to the console."""
    if not is_in_notebook():
        return display.Progress(console, run), None
    from m2flow.runs.display import NotebookProgress

    progress = NotebookProgress(console, run, is_eager=is_eager)
    return progress, progress.show_plan
