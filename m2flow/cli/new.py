"""Implement `m2flow new` and `m2flow demo`: begin a project from a flow that comes with m2flow, and run the first of those as it is.

In a checkout these flows are in `flows/`; in a wheel setup.py puts them into the package, with the tiny model that most of them use.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import click

from m2flow.errors import SpecError
from m2flow.macro.flow import Flow, load_flow

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
    *("ppo", "reinforce_pp", "moe_routing_replay", "nim", "reward_model_then_ppo", "selfplay", "sft_then_dpo", "tool_use", "tree_rollout"),
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
def command(folder: Path, kind: str) -> None:
    """Begin a project: a folder NAME with a flow to change, a cluster spec, a test and a README.

    The flow runs as it stands: `chat` with an instruct model of the Hugging Face hub, or with `--model models/chat --init
    random`, the others with a random model of 0.4 million parameters. Both random models come along.

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
    from m2flow.cli.run import command as run

    run.main([str(shipped_flows() / f"{_DEMO}.py"), *arguments], prog_name="m2flow run", standalone_mode=False)
