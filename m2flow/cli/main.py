"""The command `m2flow`: finds the command that was asked for, and turns every failure into a message and an exit status.

    m2flow COMMAND ... --Commands--> m2flow.cli.<command>.command

A command's file is imported when it is called, not before, so `m2flow --help` and shell completion stay fast. Exit statuses: 0 done,
1 the run failed, 2 the command line, the flow's file or the spec is wrong, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import io
import sys

import click

from m2flow import __version__
from m2flow.cli.failures import Failure, failure_of
from m2flow.cli.lazy import LazyGroup
from m2flow.errors import M2FlowError, RunInterrupted, did_you_mean

_COMMANDS = {
    "run": "Run a flow: train, and leave a run directory.",
    "plan": "Show a flow's calls and how they would run, without running them.",
    "diff": "Show what differs between two plans.",
    "samples": "Show the samples of a run, choose among them, or write them to a file.",
    "simulate": "Say what would happen, on a virtual clock: a flow's steps, or generation alone.",
    "profile": "Measure what a flow's work takes, for the planner.",
    "view": "Show runs in the browser, live; or write one as a file.",
    "analyze": "Say why the steps of a run took what they took, and what would be faster.",
    "compare": "Say what differs between two runs, and where the time went in each.",
    "export": "Write the trained model of a run for other tools, as a Hugging Face directory.",
    "trace": "Write the schedule of a run as a file for Perfetto.",
    "send": "Send the records of a run to OpenTelemetry, Weights & Biases or MLflow.",
    "cluster": "Write and check cluster specs: the machines, and what runs on them.",
    "keys": "Make the key that the channels of a cluster use between hosts.",
    "doctor": "Check what this machine has and what is missing.",
    "engines": "List the engines, what they can do, and which work here.",
}


class Commands(LazyGroup):
    """The commands, each imported from a file of its name when it is needed."""

    lines = _COMMANDS
    module = "m2flow.cli.{}"

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
            raise Failure(RunInterrupted("stopped by Ctrl-C before the run began")) from None
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise failure_of(error) from error
        except Exception as error:
            raise failure_of(error) from error


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `m2flow run flows/grpo.py`; `m2flow COMMAND --help` tells more about a command.",
)
@click.version_option(__version__, prog_name="m2flow")
def cli() -> None:
    """RL post-training of language models: a plain Python loop, traced, planned and scheduled sample by sample."""


def main() -> None:
    """The entry point of the shell command and of `python -m m2flow`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A model's text must not end a run because the terminal can't show it.
    cli.main(prog_name="m2flow")


if __name__ == "__main__":
    main()
