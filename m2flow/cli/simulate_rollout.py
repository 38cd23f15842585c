"""`m2flow simulate rollout`: generation alone, under the decode model, for people who study scheduling."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from m2flow.micro.rollouts.decode import DecodeModel
    from m2flow.micro.rollouts.study import StepResult


@click.command("rollout")
@click.option("--lengths", "source", required=True, metavar="TRACE", help="JSON lines, a run directory, the name of a trace, or a formula.")
@click.option("--instances", "num_instances", type=click.IntRange(min=1), required=True, help="Rollout instances.")
@click.option("--t0", "t0_s", type=float, default=0.008, show_default=True, help="Seconds of a decode step.")
@click.option("--t1", "t1_s", type=float, default=0.00008, show_default=True, help="Seconds that each sample adds to it.")
@click.option("--max-batch", type=click.IntRange(min=1), default=128, show_default=True, help="Most samples at once on an instance.")
@click.option("--known-lengths", is_flag=True, help="Assign samples knowing how long they become.")
@click.option("--whole", is_flag=True, help="With --known-lengths: never pause a sample.")
@click.option("--steps", "num_steps", type=click.IntRange(min=1), help="The first steps of a trace, or draws.  [default: all; 1 draw]")
@click.option("--groups", "num_groups", type=click.IntRange(min=1), default=64, show_default=True, help="Prompts of a step, for a formula.")
@click.option("--samples", "n", type=click.IntRange(min=1), default=8, show_default=True, help="Samples of a prompt, for a formula.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draws.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    source: str,
    num_instances: int,
    t0_s: float,
    t1_s: float,
    max_batch: int,
    known_lengths: bool,
    whole: bool,
    num_steps: int | None,
    num_groups: int,
    n: int,
    seed: int,
    as_json: bool,
) -> None:
    """How long generation takes, per step and in total, beside the bound that no schedule without migration beats.

    A decode step of b samples takes t0 + t1 b seconds. The bound is max(fractional bound, (t0 + t1) x longest sample).

    \b
    Lengths:
      FILE.jsonl              {"step": 0, "prompt_tokens": 112, "response_tokens": [450, 453]} in each line
      dapo-qwen2.5-32b        a trace that comes with m2flow; also video-qwen2.5-vl-7b
      runs/grpo-20260102-0304 what a run generated
      lognormal:median=4000,sigma=0.8,cap=32768,icc=0.3
      mixture:weights=0.7/0.3,median=400/6000,sigma=0.5/0.6,cap=32768

    \b
    Examples:
      m2flow simulate rollout --lengths dapo-qwen2.5-32b --instances 16 --known-lengths
      m2flow simulate rollout --lengths lognormal:median=4000,sigma=0.8,cap=32768 --groups 512 --instances 64 --known-lengths --json
    """
    from m2flow.micro.rollouts.decode import DecodeModel
    from m2flow.micro.rollouts.lengths import parse_lengths
    from m2flow.micro.rollouts.study import steps_of, study_known

    if not known_lengths:
        raise click.UsageError("Say how samples are assigned: --known-lengths.")
    model = DecodeModel(t0_s, t1_s, max_batch)
    lengths = parse_lengths(source)
    steps = list(steps_of(lengths, num_steps, num_groups=num_groups, n=n, seed=seed))
    results = study_known(steps, model, num_instances, may_pause=not whole)
    heading = f"{lengths.name} on {num_instances} instances, a step of b samples takes {t0_s:g} + {t1_s:g} b seconds, b <= {max_batch}"
    if as_json:
        click.echo(json.dumps(_document(results, lengths.name, num_instances, model), indent=2))
    else:
        click.echo(f"{heading}\n")
        _print_steps(results)


def _document(results: Sequence[StepResult], lengths: str, num_instances: int, model: DecodeModel) -> dict[str, object]:
    from m2flow.micro.rollouts.study import total

    return {
        "lengths": lengths,
        "instances": num_instances,
        "t0_s": model.t0_s,
        "t1_s": model.t1_s,
        "max_batch": model.max_batch,
        "steps": [{"step": result.step, **_numbers(result)} for result in results],
        "total": _numbers(total(results)),
    }


def _numbers(result: StepResult) -> dict[str, float]:
    return {"makespan_s": result.makespan_s, "bound_s": result.bound_s, "ratio": result.ratio, "num_pauses": result.num_pauses}


def _print_steps(results: Sequence[StepResult]) -> None:
    from m2flow.micro.rollouts.study import total

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("step", "samples", "tokens", "makespan s", "bound s", "ratio", "pauses"):
        table.add_column(heading, justify="right")
    for name, result in [*((str(result.step), result) for result in results), ("total", total(results))]:
        table.add_row(
            name,
            f"{result.num_samples}",
            f"{result.num_tokens}",
            f"{result.makespan_s:.3f}",
            f"{result.bound_s:.3f}",
            f"{result.ratio:.4f}",
            f"{result.num_pauses}",
        )
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table)
