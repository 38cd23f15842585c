"""`m2flow simulate rollout`: generation alone, under the decode model, for people who study scheduling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from m2flow.micro.rollouts.study import StepResult

_KNOWN = "known lengths"


@click.command("rollout")
@click.option("--lengths", "source", required=True, metavar="TRACE", help="JSON lines, a run directory, the name of a trace, or a formula.")
@click.option("--instances", "num_instances", type=click.IntRange(min=1), required=True, help="Rollout instances.")
@click.option("--t0", "t0_s", type=float, default=0.008, show_default=True, help="Seconds of a decode step.")
@click.option("--t1", "t1_s", type=float, default=0.00008, show_default=True, help="Seconds that each sample adds to it.")
@click.option("--max-batch", type=click.IntRange(min=1), default=128, show_default=True, help="Most samples at once on an instance.")
@click.option("--known-lengths", is_flag=True, help="Assign samples knowing how long they become.")
@click.option("--policy", metavar="NAME", help="Schedule without knowing it: a name, `all`, or FILE.py:CLASS.")
@click.option("--predictor", default="siblings", show_default=True, metavar="NAME", help="What a policy goes by. `oracle` knows.")
@click.option("--levels", "num_levels", type=click.IntRange(min=0), default=0, help="Levels of difficulty of prompts, for a formula.")
@click.option("--earlier", "num_earlier", type=click.IntRange(min=0), default=0, help="Answers of an earlier epoch, for a formula.")
@click.option("--whole", is_flag=True, help="The assignment with known lengths never pauses a sample.")
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
    policy: str | None,
    predictor: str,
    num_levels: int,
    num_earlier: int,
    whole: bool,
    num_steps: int | None,
    num_groups: int,
    n: int,
    seed: int,
    as_json: bool,
) -> None:
    """How long generation takes, per step and in total, beside the bound that no schedule without migration beats.

    A decode step of b samples takes t0 + t1 b seconds. The bound is max(fractional bound, (t0 + t1) x longest sample). Regret is the
    makespan over that of the assignment with known lengths. docs/guide/rollout-scheduling.md explains the policies and predictors.

    \b
    Lengths:
      FILE.jsonl              {"step": 0, "prompt_tokens": 112, "response_tokens": [450, 453]} in each line
      dapo-qwen2.5-32b        a trace that comes with m2flow; also video-qwen2.5-vl-7b
      runs/grpo-20260102-0304 what a run generated
      lognormal:median=4000,sigma=0.8,cap=32768,icc=0.3
      mixture:weights=0.7/0.3,median=400/6000,sigma=0.5/0.6,cap=32768

    \b
    Policies:
      round-robin, group-round-robin, least-loaded, lpt, longest-first, shortest-first, probe, repack, gather, split, adaptive

    \b
    Examples:
      m2flow simulate rollout --lengths dapo-qwen2.5-32b --instances 16 --known-lengths
      m2flow simulate rollout --lengths dapo-qwen2.5-32b --instances 4 --policy all
      m2flow simulate rollout --lengths lognormal:median=4000,sigma=0.8,icc=0.9 --instances 4 --policy adaptive --earlier 8 --json
    """
    from m2flow.micro.rollouts.decode import DecodeModel
    from m2flow.micro.rollouts.lengths import parse_lengths
    from m2flow.micro.rollouts.study import steps_of, study_known

    if known_lengths == (policy is not None):
        raise click.UsageError("Say how samples are scheduled: either --known-lengths or --policy NAME.")
    model = DecodeModel(t0_s, t1_s, max_batch)
    lengths = parse_lengths(source)
    steps = list(steps_of(lengths, num_steps, num_groups=num_groups, n=n, seed=seed, num_earlier=num_earlier, num_levels=num_levels))
    known = study_known(steps, model, num_instances, may_pause=not whole)
    results = {_KNOWN: known}
    if policy is not None:
        from m2flow.micro.rollouts.policies import POLICIES, make_policy, make_predictor
        from m2flow.micro.rollouts.predictors import Oracle
        from m2flow.micro.rollouts.study import study_policy

        for name in POLICIES if policy == "all" else [policy]:
            made = make_predictor(predictor)
            oracle = made if isinstance(made, Oracle) else None
            scheduler = make_policy(name, made)
            results[name] = study_policy(scheduler, steps, known, model, num_instances=num_instances, cap=lengths.cap, oracle=oracle)
    given = {"lengths": lengths.name, "instances": num_instances, "t0_s": t0_s, "t1_s": t1_s, "max_batch": max_batch}
    if as_json and policy == "all":
        click.echo(json.dumps({**given, "policies": {name: _document(of) for name, of in results.items()}}, indent=2))
    elif as_json:
        click.echo(json.dumps({**given, **_document(results[policy or _KNOWN])}, indent=2))
    else:
        click.echo(
            f"{lengths.name} on {num_instances} instances, a step of b samples takes {t0_s:g} + {t1_s:g} b seconds, b <= {max_batch}\n"
        )
        _print(_policy_rows(results) if policy == "all" else _step_rows(results[policy or _KNOWN], is_known=known_lengths))


def _document(results: Sequence[StepResult]) -> dict[str, object]:
    from m2flow.micro.rollouts.study import total

    return {"steps": [{"step": result.step, **_numbers(result)} for result in results], "total": _numbers(total(results))}


def _numbers(result: StepResult) -> dict[str, float]:
    return {
        "makespan_s": result.makespan_s,
        "bound_s": result.bound_s,
        "ratio": result.ratio,
        "known_s": result.known_s,
        "regret": result.regret,
        "num_pauses": result.num_pauses,
        "num_moves": result.num_moves,
    }


def _step_rows(results: Sequence[StepResult], *, is_known: bool) -> list[list[str]]:
    from m2flow.micro.rollouts.study import total

    rows = [["step", "samples", "tokens", "makespan s", "bound s", "ratio", *(["pauses"] if is_known else ["regret", "moves"])]]
    for name, result in [*((str(result.step), result) for result in results), ("total", total(results))]:
        last = [str(result.num_pauses)] if is_known else [f"{result.regret:.4f}", str(result.num_moves)]
        numbers = [f"{result.makespan_s:.3f}", f"{result.bound_s:.3f}", f"{result.ratio:.4f}"]
        rows.append([name, str(result.num_samples), str(result.num_tokens), *numbers, *last])
    return rows


def _policy_rows(results: Mapping[str, Sequence[StepResult]]) -> list[list[str]]:
    """The totals, and the step of the largest regret."""
    from m2flow.micro.rollouts.study import total

    rows = [["policy", "makespan s", "bound s", "ratio", "regret", "worst step", "moves"]]
    for name, of in results.items():
        whole = total(of)
        worst = max(result.regret for result in of)
        numbers = [f"{whole.makespan_s:.3f}", f"{whole.bound_s:.3f}", f"{whole.ratio:.4f}", f"{whole.regret:.4f}", f"{worst:.4f}"]
        rows.append([name, *numbers, str(whole.num_moves)])
    return rows


def _print(rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in rows[1:]:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table)
