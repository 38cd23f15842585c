"""Execute a prepared run under the user's eyes: signals stop it in order, a display shows it, and an error says what is left.

    Run --execute_watched--> Summary | RunInterrupted

The first signal finishes the update that is under way and stops the workers. The second one kills them: on the command line the process
ends with them, in a Python session (a notebook's kernel, a script) KeyboardInterrupt is raised. Signals reach the main thread only; a
run that is started in another thread is stopped by nobody.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from m2flow.errors import DivergenceError, OptionError, RunInterrupted
from m2flow.runs import display

if TYPE_CHECKING:
    from m2flow.micro.protocol.plan import Plan
    from m2flow.runner.run import Run, Summary


def execute_watched(
    run: Run,
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
def stopping_by_signals(run: Run, stopping: Callable[[], None], *, ends_process: bool) -> Iterator[None]:
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
    """Whether the run has come as far as to make its directory."""
    return run.run_dir != Path()


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
        again = f"; to go on: {goes_on}" if goes_on and (run.run_dir / "ledger.db").exists() else ""
        return f"  No sample was generated yet; the run's logs are in {run.run_dir / 'logs'}{again}."
    done = "1 step is" if tally.num_steps == 1 else f"{tally.num_steps} steps are"
    return (
        f"  The {tally.num_samples:,} samples so far are in {run.run_dir} (ledger.db and segments/), {done} done.\n"
        f"  What was done when: m2flow view {run.run_dir}{f'; to go on: {goes_on}' if goes_on else ''}"
    )


def can_go_on(error: BaseException) -> bool:
    """Whether the run can be resumed as it is after this error."""
    return not isinstance(error, DivergenceError)


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
