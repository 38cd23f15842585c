"""Implement `m2flow run`, `new` and `demo`: train with a flow, resume a run, and begin a project from a flow that comes with m2flow.

    m2flow run flows/grpo.py --setting stopped_after_s=4 --setting turn_limit_s=none
    m2flow run --resume runs/grpo-20260101-120000       flow, its options, seed, cluster: config.json; who runs where: plan.json

A resumed run keeps its flow, options and seed. An option given beside `--resume` that differs from the recorded one is refused by name.
Settings that change neither the mathematics nor the placement (`--setting`, `--json`, `--quiet`, `--checkpoint-every`, recording) may be
given anew; so may `--runs-dir` where the run is on a storage, from which it then continues in a local directory of its own.

Ctrl-C (or SIGTERM, or SIGHUP) finishes the update that is under way, stops the workers in order and prints how to resume; a second one
writes the ledger, kills the workers and ends the process at once.

`m2flow new` begins a project from a flow that comes with m2flow; `m2flow demo` runs the first of those as it is. In a checkout these flows
are in `flows/`; in a wheel setup.py puts them into the package, with the tiny model that most of them use.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
from pydantic import ValidationError
from rich.console import Console

from m2flow.cli.flow_options import SEED, find_target, flow_command
from m2flow.cli.main import Failure, failure_of, find_run
from m2flow.cli.plan import PlannedCommand, plan_inputs, recorded_options, value_of
from m2flow.errors import FlowError, OptionError, RunInterrupted, SpecError, did_you_mean
from m2flow.macro.flow import Flow, load_flow
from m2flow.macro.replay import read_structure
from m2flow.runs import display
from m2flow.runs.entrance import can_go_on, execute_watched, has_directory, leftovers
from m2flow.spec import ClusterSpec, RunSettings

if TYPE_CHECKING:
    from m2flow.micro.protocol.plan import Plan
    from m2flow.micro.protocol.staleness import Decisions
    from m2flow.runner.run import Run, Summary


# ---- m2flow run


if TYPE_CHECKING:
    ParamType = click.ParamType[Any]  # Generic in newer releases of click only.
else:
    ParamType = click.ParamType

# ---- option values

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Every(NamedTuple):
    """How often a checkpoint is written: every so many steps or seconds, whichever comes first; never if both are None."""

    steps: int | None
    seconds: float | None


class Cadence(ParamType):
    """The option type of `Every`: `20`, `90s`, `5m`, `1h`, `20,5m` or `never`."""

    name = "steps|time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if isinstance(value, Every):
            return value
        steps, seconds = None, None
        for part in str(value).split(","):
            text = part.strip()
            unit = _SECONDS.get(text[-1:])
            try:
                if text == "never":
                    continue
                if unit is None:
                    steps = int(text)
                else:
                    seconds = float(text[:-1]) * unit
            except ValueError:
                self.fail(f"{value!r} is no number of steps (20), no time (90s, 5m, 1h), not both (20,5m), and not `never`", param, ctx)
        if (steps is not None and steps < 1) or (seconds is not None and not 0 < seconds < float("inf")):
            self.fail(f"{value!r}: it must be more than nothing", param, ctx)
        return Every(steps, seconds)


_F = TypeVar("_F", bound=Callable[..., object])
_METRIC_SINKS = ("tensorboard", "wandb", "mlflow")


class MetricSinks(ParamType):
    """The option type of `--metrics-to`: names separated by commas, or `none`."""

    name = "name,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(",") if name.strip() not in ("", "none"))
        wrong = [name for name in names if name not in _METRIC_SINKS]
        if wrong:
            self.fail(f"{wrong[0]!r} is none of {', '.join(_METRIC_SINKS)}, none.", param, ctx)
        return names


to_option = click.option(
    "--metrics-to",
    type=MetricSinks(),
    metavar="NAME,...",
    help="Trackers for metrics: tensorboard, wandb, mlflow; or none.  [default: tensorboard, and those that the environment configures]",
)


def record_options(function: _F) -> _F:
    """Add the options `--otlp`, `--metrics-to` and `--record-every` to a command."""
    for option in (
        click.option(
            "--record-every",
            type=click.IntRange(min=1),
            metavar="N",
            help="Record N decode steps as one span, and one group in N sample by sample.",
        ),
        to_option,
        click.option(
            "--otlp", metavar="URL", help="An OpenTelemetry collector to send spans and metrics to.  [default: OTEL_EXPORTER_OTLP_ENDPOINT]"
        ),
    ):
        function = option(function)
    return function


def apply_recording_options(
    settings: RunSettings, otlp: str | None, metrics_to: tuple[str, ...] | None, record_every: int | None
) -> RunSettings:
    """Replace the recording settings that the command line gives."""
    given = {"otlp": otlp, "metrics_to": metrics_to, "record_every": record_every}
    return settings.model_copy(update={name: value for name, value in given.items() if value is not None})


_DEDICATED_OPTIONS = {
    "seed": "--seed",
    "eager": "--eager",
    "deterministic": "--deterministic",
    "runs_dir": "--runs-dir",
    "checkpoint_steps": "--checkpoint-every",
    "checkpoint_s": "--checkpoint-every",
    "checkpoints_kept": "--keep-checkpoints",
    "record_every": "--record-every",
    "otlp": "--otlp",
    "metrics_to": "--metrics-to",
}
SETTINGS = tuple(name for name in RunSettings.model_fields if name not in _DEDICATED_OPTIONS)
"""The settings that `--setting` can change: those without an option of their own."""

settings_option = click.option(
    "--setting",
    "given_settings",
    multiple=True,
    metavar="NAME=VALUE",
    help=f"A run setting, like stopped_after_s=4; may be repeated. There are {', '.join(SETTINGS)}; `m2flow help NAME` explains one.",
)


def apply_settings(settings: RunSettings, given: tuple[str, ...]) -> RunSettings:
    """Replace the settings that `--setting NAME=VALUE` gives.

    Raises:
        OptionError: there is no such setting, it has an option of its own, or it can't have this value.
    """
    found: dict[str, str | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name in _DEDICATED_OPTIONS:
            raise OptionError(f"--setting {text}: {name} has an option of its own", now=f"Give {_DEDICATED_OPTIONS[name]}.")
        if name not in SETTINGS or not equals:
            hint = f"Give {name}=VALUE." if name in SETTINGS else did_you_mean(name, SETTINGS)
            raise OptionError(f"--setting {text}: {'no value' if name in SETTINGS else f'there is no run setting {name!r}'}", now=hint)
        found[name] = None if value == "none" else value
    try:
        return RunSettings.model_validate({**settings.model_dump(), **found})
    except ValidationError as error:
        wrong = error.errors()[0]
        names = [str(part) for part in wrong.get("ctx", {}).get("at", wrong["loc"])]
        raise OptionError(
            f"--setting {'.'.join(names)}: {wrong['msg']}", now="`m2flow help RunSettings` says what each setting means."
        ) from None


# ---- resume

_OPTION = "--resume"
_CONFIG = "m2flow.resumed"
_NEW_RUN_ONLY = {
    "pin_plan": "--pin-plan",
    "pin_to": "--pin-to",
    "plan_file": "--plan",
    "profile": "--profile",
    "decisions": "--decisions",
    "runs_dir": "--runs-dir",
}
"""Parameter -> option, of those that only a new run takes."""


class RunCommand(PlannedCommand):
    """`m2flow run`: takes the flow from the command line, from the plan given by `--plan`, or from the run given by `--resume`."""

    plan_option = "--plan"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        run = value_of(_OPTION, args)
        if run is None:
            return super().parse_args(ctx, args)
        from m2flow.micro.records.rundir import read_config

        config = ctx.meta[_CONFIG] = read_config(find_run(run, Path("runs")))
        target = find_target(args, self.params)
        if target is None or not target.partition(":")[0].endswith(".py"):  # Any other positional argument is the value of a flow's option.
            args = [config.flow, *args]
        elif target != config.flow:
            raise OptionError(
                f"{target} is not the flow of {run}, which is {config.flow}", now=f"Say only: m2flow run {_OPTION} {shlex.quote(str(run))}"
            )
        if config.is_of_session:
            now = f"Define the flow there again, and call m2flow.run(flow, resume={str(config.run_dir)!r})."
            raise SpecError(f"{run} can't be resumed from here: {config.why_no_flow()}", now=now)
        if not config.flow_path.is_file():
            is_moved = Path(config.directory).resolve() == Path.cwd()
            now = "Put it back as it was." if is_moved else f"Begin in {config.directory}."
            raise SpecError(f"the flow of {run} is {config.flow}, and there is no such file here", now=now)
        return super().parse_args(ctx, args)

    def _given(self, ctx: click.Context) -> dict[str, object]:
        given = super()._given(ctx)
        if _CONFIG not in ctx.meta:
            return given
        recorded = recorded_options(self.flow_of(ctx), ctx.meta[_CONFIG].options)
        for name, value in given.items():
            if value != recorded.get(name, next(p.default for p in self.flow_of(ctx).parameters if p.name == name)):
                raise _refused(f"--{name.replace('_', '-')} {value}", f"with {name}={recorded.get(name, 'its default')}")
        return recorded


class ResumedRun(NamedTuple):
    """A run to resume, with the spec and the settings that it continues with."""

    run_dir: Path
    spec: ClusterSpec
    settings: RunSettings
    is_moved: bool
    """Whether the spec differs from the one that the run began with, so that it needs a new plan."""


def resumed_run(ctx: click.Context) -> ResumedRun | None:
    """Return the run to resume, with its cluster and settings; None if a new run begins.

    Raises:
        OptionError: an option differs from what the run was begun with.
    """
    if _CONFIG not in ctx.meta:
        return None
    from m2flow.micro.records.rundir import is_on_storage

    config = ctx.meta[_CONFIG]
    settings = config.settings
    is_stored = is_on_storage(config.run_dir)
    if is_stored and _is_given(ctx, "runs_dir"):
        settings = settings.model_copy(update={"runs_dir": str(ctx.params["runs_dir"])})
    for name, option in _NEW_RUN_ONLY.items():
        if name == "runs_dir" and is_stored:
            continue
        if _is_given(ctx, name):
            raise OptionError(f"{option} is for a new run, and {_OPTION} goes on with one", now=f"Leave {option} out.")
    for name in ("seed", "deterministic", "eager"):
        before = getattr(config.settings, name)
        if _is_given(ctx, name) and ctx.params[name] != before:
            raise _refused(f"--{name} {ctx.params[name]}", f"with {name} {before}")
    spec = config.cluster
    if _is_given(ctx, "cluster"):
        from m2flow.runs.cluster_file import load_cluster

        spec = load_cluster(ctx.params["cluster"])
    if config.repeats_decisions:
        raise SpecError("an eager run that repeats the decisions of another one can't be resumed", now="Begin it anew.")
    return ResumedRun(config.run_dir, spec, settings, spec != config.cluster)


def _refused(given: str, recorded: str) -> OptionError:
    return OptionError(f"{given}: the run was begun {recorded}, and goes on as it began", now="Leave it out, or begin a new run.")


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


# ---- run

_RESTARTED = "M2FLOW_RESTARTED"


@flow_command("run", RunCommand)
@click.option("--cluster", type=click.Path(path_type=Path), metavar="SPEC.yaml", help="The machines; by default one time-shared device.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Decides every random number of the run.")
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
@click.option(
    "--profile", type=click.Path(path_type=Path), metavar="FILE", help="Measured costs, of m2flow profile, for `placement: auto`."
)
@click.option(
    "--decisions",
    type=click.Path(path_type=Path),
    metavar="RUN_DIR",
    help="With --eager: repeat what time decided in that run (which weights generated each sample), and what its recorded tools gave.",
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
@click.option(
    "--keep-checkpoints", type=click.IntRange(min=1), metavar="N", help="How many of the newest checkpoints are kept.  [default: 2]"
)
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
    before = resumed_run(ctx)
    if before is None:
        inputs = plan_inputs(ctx, cluster, seed, profile=profile)
        spec, profile, seed = inputs.spec, inputs.profile, inputs.seed
        settings = RunSettings(seed=seed, deterministic=deterministic, eager=eager, runs_dir=str(runs_dir))
    else:
        spec, settings = before.spec, before.settings
        eager, deterministic = settings.eager, settings.deterministic
    spec = spec.with_policy(policy)
    settings = _apply_checkpoint_options(settings, checkpoint_every, keep_checkpoints)
    settings = apply_settings(apply_recording_options(settings, otlp, metrics_to, record_every), given_settings)
    if eager:
        _prepare_environment(1 if deterministic else spec.num_cores, deterministic=deterministic)
    from m2flow.runner.run import Run

    record = _read_decisions(decisions, is_eager=eager)
    # Bound to the stream now: what the flow prints may be redirected, and the display must not be.
    console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False, markup=False, emoji=False)
    pinned = _read_pinned_plan(plan_file, before, is_eager=eager)
    run = Run(
        flow,
        options,
        spec,
        settings,
        flow_file=target,
        pin_plan=pin_plan,
        pin_to=read_structure(pin_to) if pin_to else None,
        decisions=record,
        repeats=decisions,
        pinned=pinned,
        profile=profile,
        resume=None if before is None else before.run_dir,
        foresees=True,
        warn=lambda said: console.print(f"warning: {said}", soft_wrap=True),
    )
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        summary = _execute(run, console, is_eager=eager, is_quiet=quiet, is_resumed=before is not None)
        display.show_summary(console, flow.name, summary, run.tally)
    _conclude(run, summary, as_json=as_json)


def _conclude(run: Run, summary: Summary, *, as_json: bool) -> None:
    """Print the summary of a run that is over as JSON, if that is asked for.

    Raises:
        Failure: all of it was in vain: a script must not take the run for one that trained.
    """
    if as_json:
        click.echo(json.dumps(summary.as_dict()))
    if run.why_in_vain:
        now = f"What became of each sample, and why: m2flow samples {shlex.quote(summary.run_dir)} --life"
        raise Failure(FlowError(f"the run is over, and {run.why_in_vain}", now=now))


def _apply_checkpoint_options(settings: RunSettings, every: Every | None, num_kept: int | None) -> RunSettings:
    """Return the settings with what `--checkpoint-every` and `--keep-checkpoints` say; None where an option is not given."""
    if every is not None:
        settings = settings.model_copy(update={"checkpoint_steps": every.steps, "checkpoint_s": every.seconds})
    if num_kept is not None:
        settings = settings.model_copy(update={"checkpoints_kept": num_kept})
    return settings


def _read_decisions(run_dir: Path | None, *, is_eager: bool) -> Decisions | None:
    """Read what time decided in another run, for an eager one to repeat. Raises `OptionError` if this one is planned."""
    from m2flow.micro.records.ledger import read_decisions

    if run_dir is None:
        return None
    if not is_eager:
        raise OptionError("--decisions goes with --eager", now="A planned run decides by its own time. Add --eager.")
    return read_decisions(run_dir)


def _read_pinned_plan(plan_file: Path | None, before: ResumedRun | None, *, is_eager: bool) -> Plan | None:
    """Read the plan that this run keeps: that of the run that it resumes on the same cluster, else that of `--plan`."""
    from m2flow.micro.records.plan_file import read_plan

    if before is not None and not is_eager and not before.is_moved:
        return read_plan(before.run_dir / "plan.json")
    return read_plan(plan_file) if plan_file else None


def _execute(run: Run, console: Console, *, is_eager: bool, is_quiet: bool, is_resumed: bool) -> Summary:
    """Prepare and execute a run, and show its plan and progress.

    Raises:
        Failure: the run was interrupted or failed; it says what is left of it, and how to resume.
    """
    progress = display.Progress(console, run)
    try:
        return execute_watched(run, console, progress, is_eager=is_eager, is_quiet=is_quiet, ends_process=_owns_process())
    except (RunInterrupted, Exception) as error:
        goes_on = f"m2flow run --resume {shlex.quote(str(run.run_dir))}" if can_go_on(error) else ""
        left = leftovers(run, was_there=is_resumed, goes_on=goes_on)
        if isinstance(error, RunInterrupted):
            raise Failure(error, left) from None
        raise failure_of(error, run.run_dir if has_directory(run) else None, left) from error


def _owns_process() -> bool:
    """Whether this process runs nothing but the command, and no other program that has called the command line."""
    return bool(click.get_current_context().find_root().obj)


def _prepare_environment(threads: int, *, deterministic: bool) -> None:
    """Set the environment that matrix libraries read when they are loaded; if torch is loaded already, restart a process of ours."""
    from m2flow.micro.worker.fork_server import engine_environment

    wanted = engine_environment(threads, deterministic=deterministic)
    os.environ.update(wanted if deterministic else {name: value for name, value in wanted.items() if name not in os.environ})
    if _owns_process() and "torch" in sys.modules and _RESTARTED not in os.environ:
        os.environ[_RESTARTED] = "1"
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


# ---- m2flow new and m2flow demo


_PACKAGE = Path(__file__).resolve().parents[1]
_KINDS = (
    *(
        "grpo",
        "async_grpo",
        "best_of_n",
        "chat",
        "curriculum",
        "dapo",
        "decoupled_ppo",
        "distill",
        "duel",
        "external_agent",
        "gspo",
        "judge",
    ),
    *("ppo", "reinforce_pp", "moe_routing_replay", "nim", "reward_model_then_ppo", "search", "selfplay", "sft_then_dpo", "tool_use"),
    *("tree_rollout", "unit_tests"),
)
_NICKNAMES = {"agent": "tool_use"}
"""A subject -> the flow that shows it."""
_DEMO = "grpo"
_TINY = {"num_steps": 2, "warm_steps": 1, "pair_steps": 1, "batch": 2, "n": 2, "eval_every": 1, "model": "fake"}
"""Options of a run that a test makes with fake engines, for the flows that have them."""


def shipped_flows() -> Path:
    """The folder of the flows that come with m2flow.

    Raises:
        SpecError: this installation lacks it.
    """
    for folder in (_PACKAGE / "flows", _PACKAGE.parent / "flows"):
        if (folder / f"{_DEMO}.py").is_file():
            return folder
    raise SpecError("this installation of m2flow has no flows", now="Install the wheel, or work in a checkout.")


# ---- m2flow new


@click.command("new")
@click.argument("folder", metavar="NAME", type=click.Path(path_type=Path))
@click.option(
    "--from", "kind", type=click.Choice((*_KINDS, *_NICKNAMES)), default="grpo", show_default=True, help="The flow to begin with."
)
def new_command(folder: Path, kind: str) -> None:
    """Begin a project: a folder NAME with a flow to change, a cluster spec, a test and a README.

    The flow runs as it stands: `chat` with an instruct model of the Hugging Face hub, or with `--model models/chat --init
    random`, the others with a random model of 0.4 million parameters. The random models come along.

    \b
    Examples:
      m2flow new sums --from chat
      m2flow new calculator --from agent
      m2flow new sorting --from grpo
    """
    if folder.exists():
        raise SpecError(f"{folder} exists already", now="Give another name, or move it away.")
    shipped, kind = shipped_flows(), _NICKNAMES.get(kind, kind)
    files = {f"{name}.py": (shipped / f"{name}.py").read_text() for name in _needed(shipped, kind)}
    flow = load_flow(str(shipped / f"{kind}.py"))
    files |= {"cluster.yaml": _CLUSTER, f"test_{kind}.py": _test(kind, flow), "README.md": _readme(folder.name, kind, flow)}
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    if any('"models"' in text or "models/" in text for text in files.values()):
        shutil.copytree(shipped / "models", folder / "models")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            click.echo(path)
    click.echo(f"\nNext:\n  cd {folder}\n  m2flow plan {kind}.py\n  m2flow run {kind}.py")
    if kind == "chat":
        click.echo("Its model is one of the Hugging Face hub. Without a network add to both: --model models/chat --init random")


def _needed(shipped: Path, name: str) -> Iterator[str]:
    """A flow's file and those beside it that it imports."""
    yield name
    for node in ast.walk(ast.parse((shipped / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and (shipped / f"{node.module}.py").is_file():
            yield from _needed(shipped, node.module)


_CLUSTER = """\
# Where the flow runs. Every field has a default; `m2flow help ClusterSpec` explains each of them.
name: laptop
placement: time-shared    # rollout and training take turns on one device; `split` gives each its own

rollout:
  engine: embedded        # `m2flow engines` lists the others
  max_running: 256        # samples that decode together

train:
  engine: embedded
  token_budget: 8192      # tokens of a micro-batch; lower it if training runs out of memory
"""


def _test(kind: str, flow: Flow) -> str:
    small = {parameter.name: _TINY[parameter.name] for parameter in flow.parameters if parameter.name in _TINY}
    return f'''\
"""The flow gives the same whether its calls run one by one or as planned; with fake engines, in seconds."""

from pathlib import Path

from m2flow import load_flow
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec
from m2flow.testing.world import run_eager, run_planned

FLOW = load_flow(str(Path(__file__).with_name("{kind}.py")))
SMALL = {repr(small).replace("'", '"')}
FAKES = ClusterSpec(device="cpu", cores=2, rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))


def test_the_flow_is_the_same_planned_and_eager() -> None:
    eager = run_eager(FLOW, SMALL, FAKES)
    assert eager.error == ""
    assert run_planned(FLOW, SMALL, FAKES) == eager
'''


def _readme(name: str, kind: str, flow: Flow) -> str:
    options = "\n".join(f"- `--{one.name.replace('_', '-')}`, by default `{one.default!r}`" for one in flow.parameters)
    commands = "\n".join(
        f"    {line:<{len(kind) + 38}}# {what}"
        for line, what in (
            (f"m2flow plan {kind}.py", "its calls, and how they would run"),
            (f"m2flow run {kind}.py --cluster cluster.yaml", "train; Ctrl-C stops it, and it prints how to resume"),
            ("m2flow samples", "what the model said, and its rewards"),
            ("m2flow view", "the run in the browser"),
            ("m2flow export", "the trained model, for transformers"),
            ("pytest", "the flow, with fake engines"),
        )
    )
    return f"""\
# {name}

{flow.doc}

{commands}

Options of the flow:

{options}

What to change: the rows, in `Dataset`; the reward, a function of a sample (`m2flow help rewards` lists ready ones); the loss and
the advantages, in `policy.update` (`m2flow help Policy.update`).
"""


# ---- m2flow demo


@click.command("demo", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", metavar="[OPTIONS]", nargs=-1, type=click.UNPROCESSED)
def demo_command(arguments: tuple[str, ...]) -> None:
    """Train the tiny model of flows/grpo.py to sort digits, in about a minute: `m2flow run` on a flow that comes with m2flow.

    The options are those of `m2flow run`.

    \b
    Example:
      m2flow demo --num-steps 20
    """

    command.main([str(shipped_flows() / f"{_DEMO}.py"), *arguments], prog_name="m2flow run", standalone_mode=False)
