"""`m2flow run`: train with a flow, and show it while it goes on.

Ctrl-C (or SIGTERM, or SIGHUP) finishes the update that is under way, stops the workers in order and says how to go on; a second one
writes the ledger, kills the workers and ends the process at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
from rich.console import Console

from m2flow.cli import display
from m2flow.cli.cadence import Cadence, Every
from m2flow.cli.failures import Failure, failure_of
from m2flow.cli.flow_options import flow_command
from m2flow.cli.planned import asked
from m2flow.cli.record_options import record_options, recording
from m2flow.cli.resume import RunCommand, resumed
from m2flow.cli.run_settings import settings_option, with_given
from m2flow.errors import DivergenceError, OptionError, RunInterrupted
from m2flow.macro.flow import Flow
from m2flow.macro.pinning import read_structure
from m2flow.spec import RunSettings

if TYPE_CHECKING:
    from m2flow.micro.run import Run

_RESTARTED = "M2FLOW_RESTARTED"


@flow_command("run", RunCommand)
@click.option("--cluster", type=click.Path(path_type=Path), metavar="SPEC.yaml", help="The machines; by default one time-shared device.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides every random number of the run.")
@click.option("--deterministic", is_flag=True, help="The same result bit by bit each time, on a CPU; slower.")
@click.option("--eager", is_flag=True, help="Run the flow call by call in this process: the reference for every plan.")
@click.option("--pin-plan", is_flag=True, help="Stop at a step whose calls are not those of the first one.")
@click.option("--pin-to", type=click.Path(path_type=Path), metavar="PLAN.json", help="The same, with the step of `m2flow plan --json`.")
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    metavar="PLAN.json",
    help="The processes and sizes of this plan; without FLOW, all else too.",
)
@click.option("--policy", default="", metavar="NAME+...", help="Rollout policies, instead of the cluster's: longest-first+admission.")
@click.option("--profile", type=click.Path(path_type=Path), metavar="FILE", help="What `placement: auto` goes by, of m2flow profile.")
@click.option(
    "--decisions",
    type=click.Path(path_type=Path),
    metavar="RUN_DIR",
    help="With --eager: what time decided in that run (which weights generated each sample) is decided so again.",
)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where the run directory goes.")
@click.option(
    "--resume",
    metavar="RUN",
    help="Go on with a run that stopped: its directory, or its name in runs/. No FLOW is given; --cluster may differ.",
)
@click.option(
    "--checkpoint-every",
    type=Cadence(),
    help="Steps (20), time (90s, 5m, 1h), both (20,5m: whichever comes first), or `never`.  [default: 10m]",
)
@click.option("--keep-checkpoints", type=click.IntRange(min=1), metavar="N", help="The newest ones stay.  [default: 2]")
@record_options
@settings_option
@click.option("--json", "as_json", is_flag=True, help="The last line of stdout is the summary as JSON; all else goes to stderr.")
@click.option("--quiet", is_flag=True, help="Show no plan and no progress, only the summary.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    flow: Flow,
    options: dict[str, object],
    cluster: Path | None,
    seed: int,
    deterministic: bool,
    eager: bool,
    pin_plan: bool,
    pin_to: Path | None,
    plan_file: Path | None,
    policy: str,
    profile: Path | None,
    decisions: Path | None,
    runs_dir: Path,
    resume: str | None,
    checkpoint_every: Every | None,
    keep_checkpoints: int | None,
    otlp: str | None,
    metrics_to: tuple[str, ...] | None,
    record_every: int | None,
    given_settings: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Run a flow: train, and leave a run directory with samples, metrics, the schedule and the trained model.

    \b
    Examples:
      m2flow run flows/grpo.py
      m2flow run flows/grpo.py --num-steps 20 --seed 1 --runs-dir /tmp/runs
      m2flow run flows/grpo.py --help       also lists the flow's own options
      m2flow run --plan plan.json           what m2flow plan --out wrote: its flow, options and cluster

    \b
    Ctrl-C once: finish the update under way, stop, and say how to go on (m2flow run --resume RUN).
    Ctrl-C twice: write the ledger and end now. SIGTERM and SIGHUP do the same. The exit status is 130.
      m2flow run --resume runs/grpo-20260101-120000
    """
    before = resumed(ctx)
    if before is None:
        wanted = asked(ctx, cluster, seed, profile=profile)
        spec, profile, seed = wanted.spec, wanted.profile, wanted.seed
        settings = RunSettings(seed=seed, deterministic=deterministic, eager=eager, runs_dir=str(runs_dir))
    else:
        spec, settings = before.spec, before.settings
        eager, deterministic = settings.eager, settings.deterministic
    spec = spec.with_policy(policy)
    if checkpoint_every is not None:
        settings = settings.model_copy(update={"checkpoint_steps": checkpoint_every.steps, "checkpoint_s": checkpoint_every.seconds})
    if keep_checkpoints is not None:
        settings = settings.model_copy(update={"checkpoints_kept": keep_checkpoints})
    settings = with_given(recording(settings, otlp, metrics_to, record_every), given_settings)
    if eager:
        _prepare_environment(1 if deterministic else spec.num_cores, deterministic=deterministic)
    from m2flow.micro.plan_file import read_plan
    from m2flow.micro.record.ledger import read_decisions
    from m2flow.micro.run import Run

    if decisions is not None and not eager:
        raise OptionError("--decisions goes with --eager", now="A planned run decides by its own time. Add --eager.")
    # Given its stream now: what the flow prints goes through others, which its display must not.
    console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False, markup=False, emoji=False)
    structure = read_structure(pin_to) if pin_to else None
    record = read_decisions(decisions) if decisions else None
    pinned = read_plan(plan_file) if plan_file else None
    if before is not None and not eager and not before.is_moved:
        pinned = read_plan(before.run_dir / "plan.json")
    run = Run(
        flow,
        options,
        spec,
        settings,
        flow_file=target,
        pin_plan=pin_plan,
        pin_to=structure,
        decisions=record,
        pinned=pinned,
        profile=profile,
        resume=None if before is None else before.run_dir,
        foresees=True,
        warn=lambda said: console.print(f"warning: {said}", soft_wrap=True),
    )
    progress = display.Progress(console, run)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            with _interrupts(run, progress.stopping):
                plan = run.prepare()
                if not quiet:
                    display.show_plan(console, plan, is_eager=eager)
                    progress.expect(plan)
                with contextlib.nullcontext() if quiet else progress:
                    summary = run.execute()
        except KeyboardInterrupt as stop:
            error = stop if isinstance(stop, RunInterrupted) else RunInterrupted(f"stopped by {str(stop) or 'Ctrl-C'}")
            step = _reached(run.tally.num_steps, run.num_steps) if run.tally.num_samples else ""
            raise Failure(RunInterrupted(f"{error.what}{step}", now=error.where), _left_behind(run, was_there=before is not None)) from None
        except Exception as error:
            left = _left_behind(run, was_there=before is not None, goes_on=not isinstance(error, DivergenceError))
            raise failure_of(error, run.run_dir if _has_directory(run) else None, left) from error
        display.show_summary(console, flow.name, summary, run.tally)
    if as_json:
        click.echo(json.dumps(summary.as_dict()))


def _prepare_environment(threads: int, *, deterministic: bool) -> None:
    """Set what the matrix libraries read when they are loaded. If the flow has loaded torch already, start this process anew."""
    from m2flow.micro.control.spawning import engine_environment

    wanted = engine_environment(threads, deterministic=deterministic)
    os.environ.update(wanted if deterministic else {name: value for name, value in wanted.items() if name not in os.environ})
    if "torch" in sys.modules and _RESTARTED not in os.environ:
        os.environ[_RESTARTED] = "1"
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextlib.contextmanager
def _interrupts(run: Run, stopping: Callable[[], None]) -> Iterator[None]:
    """The first signal becomes a KeyboardInterrupt, now or at the end of an update that this thread is at; one more ends the process."""
    is_stopping = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        if is_stopping:
            run.end_now()
            with contextlib.suppress(OSError):  # After a SIGHUP there is no terminal.
                os.write(2, b"\nended at once; the ledger is written\n")
            os._exit(130)
        is_stopping = True
        stopping()
        reason = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        if not run.interrupt(reason):
            raise KeyboardInterrupt(reason)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]  # Ignored: a shell's background job.
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def _reached(num_done: int, num_steps: int | None) -> str:
    """Where a run was stopped.

    >>> _reached(0, 2), _reached(2, 2)
    (' in step 1', ' after its last step')
    """
    return " after its last step" if num_steps and num_done >= num_steps else f" in step {num_done + 1}"


def _has_directory(run: display.Watched) -> bool:
    return run.run_dir != Path()


def _left_behind(run: display.Watched, *, was_there: bool, goes_on: bool = True) -> str:
    """Lines about what an unfinished run has left on disk. `was_there`: it has gone on, so what it has is not what is counted here.
    `goes_on`: it could be resumed as it is."""
    if not _has_directory(run):
        return ""
    tally = run.tally
    if not tally.num_samples and was_there:
        return f"  What it had before is in {run.run_dir}."
    if not tally.num_samples:
        return f"  No sample was generated yet; the run's logs are in {run.run_dir / 'logs'}."
    done = "1 step is" if tally.num_steps == 1 else f"{tally.num_steps} steps are"
    return (
        f"  The {tally.num_samples:,} samples so far are in {run.run_dir} (ledger.db and segments/), {done} done.\n"
        f"  What was done when: m2flow view {run.run_dir}{f'; to go on: m2flow run --resume {run.run_dir}' if goes_on else ''}"
    )
