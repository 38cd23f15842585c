"""Implement the command `m2flow`: dispatch to its commands, and turn every failure into a message and an exit status.

    m2flow COMMAND ... --Commands--> the command in the module of m2flow.cli that `_PLACES` names

A command's module is imported when the command is called, so that `m2flow --help` and shell completion stay fast.

An `M2FlowError` carries its message. Any other exception is the flow's error if the innermost frame outside of libraries is the flow's,
and m2flow's otherwise; then the traceback goes into the run's logs, and its last lines to the terminal. Exit statuses: 0 done, 1 the run
failed or trained nothing, 2 the command line, the flow's file or the spec is wrong, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import click

from m2flow import __version__
from m2flow.errors import (
    FlowError,
    FlowLoadError,
    InternalError,
    M2FlowError,
    OptionError,
    RunInterrupted,
    SpecError,
    described,
    did_you_mean,
    engine_that_raised,
    host_error,
    is_compiled,
    unexpected,
)


def find_run(run: str | None, runs_dir: Path) -> Path:
    """Find the directory of a run (`m2flow.micro.records.rundir.find_run`), whose module is loaded when it is asked for."""
    from m2flow.micro.records import rundir

    return rundir.find_run(run, runs_dir)


# ---- groups of commands


class LazyGroup(click.Group):
    """A group that imports a command when it is called. A subclass lists the commands and their places."""

    lines: dict[str, str]
    """Name -> one line of help, repeated here so that listing the commands imports none."""
    places: dict[str, str]
    """Name -> `module:attribute` of the command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lines)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lines:
            return None
        module, _, attribute = self.places[cmd_name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert isinstance(found, click.Command)
        if ctx.find_root().obj is OWNS_PROCESS:
            gc.freeze()  # Modules stay to the end: no collection looks at them again.
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.lines.items()))


# ---- failures

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LIBRARY_FOLDERS = {"site-packages", "dist-packages"}
"""Folders of libraries in any environment, since one environment may extend another."""
_LAST_LINES = 8


class Failure(click.ClickException):
    """An error that ends the command line; `notes` are lines about what is left of the run."""

    def __init__(self, error: M2FlowError, notes: str = "") -> None:
        super().__init__(error.what)
        self.error = error
        self.notes = notes
        self.exit_code = status_of(error)  # type: ignore[misc]  # click reads it from the instance

    def format_message(self) -> str:
        text = f"{type(self.error).__name__}: {self.error}"
        if isinstance(self.error, InternalError):
            text += "\n  This is a fault of m2flow's own, not of your flow: please report it, with the run directory if there is one."
        return f"{text}\n{self.notes}".rstrip()

    def show(self, file: IO[str] | None = None) -> None:
        click.echo(self.format_message(), file=file or sys.stderr)


def _interrupted() -> Failure:
    return Failure(RunInterrupted("stopped by Ctrl-C before the run began"))


def _end_at_next_interrupt() -> None:
    """Have the next Ctrl-C end this process without a word: there is nothing left that it would stop in order, and Python would show a
    traceback of what it was at."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def status_of(error: M2FlowError) -> int:
    """Return the exit status: 130 for Ctrl-C, 2 for a wrong command line, flow file or spec, 1 for a run that failed."""
    if isinstance(error, RunInterrupted):
        return 130
    return 2 if isinstance(error, FlowLoadError | OptionError | SpecError) else 1


def failure_of(error: Exception, run_dir: Path | None = None, notes: str = "") -> Failure:
    """Make the failure of any exception, by whose code raised it: the flow's, the machine's or m2flow's."""
    if isinstance(error, M2FlowError):
        return Failure(error, notes)
    if engine_that_raised(error):
        return Failure(unexpected("m2flow", error), notes)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _owner(frame.filename) != "library"]
    theirs = [frame for frame in frames if _owner(frame.filename) == "user"]
    said = described(error)
    if theirs and frames[-1] is theirs[-1]:
        *outer, inner = theirs
        lines = [f"{_shown(inner.filename)}:{inner.lineno}  {inner.line}"]
        lines += [f"  called from {_shown(f.filename)}:{f.lineno} in {f.name}" for f in reversed(outer)]
        return Failure(FlowError(f"the flow raised {said}", where="\n".join(lines)), notes)
    refused = host_error("the machine refused something that m2flow needs", error)
    if refused is not None:
        return Failure(refused, notes)
    text = "".join(traceback.format_exception(error))
    now = "\n".join(text.rstrip().splitlines()[-_LAST_LINES:])
    if run_dir is not None:
        log = run_dir / "logs" / "m2flow.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
        now += f"\nThe whole traceback is in {log}."
    return Failure(InternalError(said, now=now), notes)


def _owner(filename: str) -> str:
    if is_compiled(filename):
        return "library"
    path = str(Path(filename).resolve()) if not filename.startswith("<") else filename
    if path.startswith(_PACKAGE):
        return "m2flow"
    is_library = path.startswith((*_LIBRARIES, "<frozen")) or not _LIBRARY_FOLDERS.isdisjoint(Path(path).parts)
    return "library" if is_library else "user"


def _shown(filename: str) -> str:
    try:
        return str(Path(filename).resolve().relative_to(Path.cwd()))
    except ValueError:
        return filename


# ---- the command m2flow

_COMMANDS = {
    "demo": "Train a tiny model to sort digits: the first flow that comes with m2flow.",
    "new": "Begin a project from a flow that comes with m2flow.",
    "run": "Run a flow: train, and leave a run directory.",
    "plan": "Show a flow's calls and how they would run, without running them.",
    "diff": "Show what differs between two plans.",
    "samples": "Show the samples of a run, choose among them, or write them to a file.",
    "rescore": "Judge the samples of a run by another reward function.",
    "branch": "Play an episode of a run on from one of its turns, several times.",
    "simulate": "Say what would happen, on a virtual clock: a flow's steps, or generation alone.",
    "profile": "Measure what a flow's work takes, for the planner.",
    "view": "Show runs in the browser, live; or write one as a file.",
    "analyze": "Say why the steps of a run took what they took, and what would be faster.",
    "compare": "Say what differs between two runs, and where the time went in each.",
    "export": "Write the trained model of a run for other tools, as a Hugging Face directory.",
    "serve": "Serve the trained model of a run as OpenAI's chat completions.",
    "trace": "Write the schedule of a run as a file for Perfetto.",
    "send": "Send the records of a run to OpenTelemetry, Weights & Biases or MLflow.",
    "cluster": "Write and check cluster specs: the machines, and what runs on them.",
    "keys": "Make the key that the channels of a cluster use between hosts.",
    "doctor": "Check what this machine has and what is missing.",
    "engines": "List the engines, what they can do, and which work here.",
    "help": "Say what a name of m2flow means: a role, an option, an error, a field of a spec.",
}


_ELSEWHERE = {
    "demo": "run:demo_command",
    "new": "run:new_command",
    "view": "analyze:view_command",
    "compare": "analyze:compare_command",
    "diff": "plan:diff_command",
    "rescore": "samples:rescore_command",
    "branch": "samples:branch_command",
    "profile": "plan:profile_command",
    "engines": "doctor:engines_command",
    "serve": "export:serve_command",
    "trace": "export:trace_command",
    "send": "export:send_command",
    "keys": "cluster:keys_command",
    "simulate": "main:simulate",
    "cluster": "main:cluster",
}
"""Name -> `module:attribute` under `m2flow.cli`, for commands that are not `command` in the module of their name."""
_PLACES = {name: f"m2flow.cli.{_ELSEWHERE.get(name, f'{name}:command')}" for name in _COMMANDS}


class Commands(LazyGroup):
    """The group of all commands; suggests the nearest name of an unknown one."""

    lines = _COMMANDS
    places = _PLACES

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            is_flow = name.partition(":")[0].endswith(".py")
            hint = f"To run that flow: m2flow run {name}" if is_flow else did_you_mean(name, _COMMANDS)
            raise click.UsageError(f"There is no command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except M2FlowError as error:
            raise Failure(error) from error
        except KeyboardInterrupt:
            if ctx.find_root().obj is OWNS_PROCESS:
                _end_at_next_interrupt()
            raise _interrupted() from None
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise failure_of(error) from error
        except Exception as error:
            raise failure_of(error) from error


_SIMULATE = {
    "flow": "The steps of a flow, by the scheduler that would run them; the word may be left out.",
    "rollout": "Generation alone: how long the samples of a step take, by assignment or policy.",
}
"""Name -> one line of help; the command is `simulate_<name>_command` in `m2flow.cli.plan`."""
_SIMULATE_PLACES = {name: f"m2flow.cli.plan:simulate_{name}_command" for name in _SIMULATE}

_SIMULATE_DEFAULT = "flow"


class Simulations(LazyGroup):
    """The group of the commands of `m2flow simulate`; `flow` is the default."""

    lines = _SIMULATE
    places = _SIMULATE_PLACES

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _SIMULATE and _SIMULATE_DEFAULT in _SIMULATE:
            return _SIMULATE_DEFAULT, self.get_command(ctx, _SIMULATE_DEFAULT), args
        return super().resolve_command(ctx, args)


@click.command("simulate", cls=Simulations, context_settings={"ignore_unknown_options": True})
def simulate() -> None:
    """Say what would happen, on a virtual clock.

    \b
    Examples:
      m2flow simulate flows/grpo.py --cluster clusters/h100-8.yaml --shape policy=Qwen2.5-7B --max-new-tokens 4096 --steps 2
      m2flow simulate rollout --lengths dapo-qwen2.5-32b --instances 16 --known-lengths
    """


_CLUSTER = {
    "init": "Write a spec for this machine, or for a Ray cluster.",
    "check": "Say what is missing on which node, before a run.",
    "scale": "Have rollout workers join a run that goes on, or leave it.",
    "schema": "Print the JSON Schema of specs, for editors.",
}
"""Name -> one line of help; the command is `<name>_command` in `m2flow.cli.cluster`."""
_CLUSTER_PLACES = {name: f"m2flow.cli.cluster:{name}_command" for name in _CLUSTER}


class Clusters(LazyGroup):
    """The group of the commands of `m2flow cluster`, each imported when it is called."""

    lines = _CLUSTER
    places = _CLUSTER_PLACES


@click.command("cluster", cls=Clusters)
def cluster() -> None:
    """Write and check cluster specs: the machines, and what runs on them.

    \b
    Examples:
      m2flow cluster init mine.yaml
      m2flow cluster check mine.yaml
    """


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `m2flow demo`, or with `m2flow new NAME` for a flow to change; `m2flow COMMAND --help` tells more about a command.",
)
@click.version_option(__version__, prog_name="m2flow")
def cli() -> None:
    """RL post-training of language models: a plain Python loop, traced, planned and scheduled sample by sample."""


OWNS_PROCESS = "this process runs nothing but the command"
"""The object of click's root context where that is so; where another program calls the command line, it is None."""


_THRESHOLDS = 50_000, 20, 50
"""Of the garbage collector: a session changes nothing more (`infrequent_gc`). With those of Python 3.11, which look after 700 new objects,
a tenth of a short run is spent on modules."""


def main() -> None:
    """Run the command line: the entry point of `m2flow` and of `python -m m2flow`."""
    gc.set_threshold(*_THRESHOLDS)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A model's text must not end a run because the terminal can't show it.
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # A parent that ignores it, as some containers' do, hands that on; then nobody waits.
    try:
        _load_ahead(sys.argv[1:])
        cli.main(prog_name="m2flow", obj=OWNS_PROCESS)
    except KeyboardInterrupt:  # Outside of a command: while what it needs is loaded.
        _end_at_next_interrupt()
        failure = _interrupted()
        failure.show()
        sys.exit(failure.exit_code)
    finally:
        _end_at_next_interrupt()
        # What the command leaves is finalized as ever. Through what is left then Python would go three times more: a fifth of a second.
        gc.collect()
        gc.freeze()


_RUNS = ("run", "demo")
_UNLIKE = re.compile(r"-h|--(help|eager|resume|plan)(=.*)?|.*fork_workers.*")
"""Arguments with which a run forks no workers, or of which it isn't known yet."""
_OTHER_CLUSTER = re.compile(r"\b(ray|cuda|auto|pools|fake|engine)\b")
"""Words in a cluster's spec whose workers may be elsewhere, may not be forked, or may not need torch."""


def _load_ahead(arguments: Sequence[str]) -> None:
    """Where a run of embedded engines on this machine is asked for, load what its workers need beside what the command line needs.

    This only guesses: a run that needs it not ends it, and one that needs it starts what is not there.
    """
    if not arguments or arguments[0] not in _RUNS or any(_UNLIKE.fullmatch(argument) for argument in arguments):
        return
    if arguments[0] == "run" and len(arguments) == 1:
        return
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        path = value if option == "--cluster" else option.removeprefix("--cluster=") if option.startswith("--cluster=") else ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            # A pipe, as of `--cluster <(...)`, can be read once: it is left to the command.
            if path and (not Path(path).is_file() or _OTHER_CLUSTER.search(Path(path).read_text())):
                return
    from m2flow.micro.worker.fork_server import load_ahead

    load_ahead(deterministic="--deterministic" in arguments)


if __name__ == "__main__":
    main()
