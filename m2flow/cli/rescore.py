"""Implement `m2flow rescore`: judge the samples of a run by another reward function, and say what would have been different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from m2flow.cli.main import find_run
from m2flow.errors import OptionError
from m2flow.runs.planning import table

if TYPE_CHECKING:
    from m2flow.runs.rescoring import Rescored

_MOST_STEPS = 16
_MOST_CHANGED = 5


@click.command("rescore")
@click.argument("run")
@click.argument("function", metavar="FILE.py:FUNCTION")
@click.option("--where", default="", metavar="CONDITION", help='Choose samples by an SQL expression, like "reward < 0.5 and step = 3".')
@click.option("--limit", type=click.IntRange(min=1), help="How many at most.  [default: all]")
@click.option("--timeout-s", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True, help="Seconds for a sample.")
@click.option("--on-error", type=float, metavar="REWARD", help="The reward of a sample on which the function fails.  [default: stop there]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a sample.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a JSON object a sample to this file.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def command(
    run: str,
    function: str,
    where: str,
    limit: int | None,
    timeout_s: float,
    on_error: float | None,
    as_json: bool,
    out: Path | None,
    runs_dir: Path,
) -> None:
    """Judge the samples of RUN by another reward FUNCTION, without generating a token. The run is left as it is.

    RUN is a run directory or its name, and may still be going on. FUNCTION is one of a sample, as of `Reward`, in a Python file or an
    importable module; a class is called without arguments first.

    \b
    Examples:
      m2flow rescore runs/grpo-20260102-030405 rewards.py:strict
      m2flow rescore grpo-20260102-030405 m2flow.rewards:MathAnswer --where "step >= 90" --out judged.jsonl
    """
    from m2flow.macro.flow import load_function
    from m2flow.runs.rescoring import rescore

    judge = load_function(function)
    run_dir = find_run(run, runs_dir)
    how: Literal["raise"] | float = "raise" if on_error is None else on_error
    found = []
    with click.open_file(str(out or "-"), "w") as file:
        for one in rescore(run_dir, judge, where=where, limit=limit, timeout_s=timeout_s, on_error=how):
            found.append(one)
            if as_json or out is not None:
                file.write(_line(one) + "\n")
    if not found:
        raise OptionError(f"{run_dir} has no samples" + (f" where {where}" if where else ""), now="See them: m2flow samples RUN")
    if not as_json:
        click.echo("\n".join(_told(found, f"{run_dir}", function)))


def _line(one: Rescored) -> str:
    shown = {"sample": one.sample, "step": one.step, "before": one.before, "now": one.now}
    return json.dumps(shown | ({"parts": one.parts} if one.parts else {}))


def _told(found: list[Rescored], run: str, function: str) -> list[str]:
    from m2flow.runs.rescoring import summed

    whole = summed(found)
    lines = [f"{len(found):,} samples of {run}, judged by {function}"]
    if whole.num_new:
        lines.append(f"{whole.num_new:,} had no reward before; their mean is {_mean([one.now for one in found if one.before is None]):.4g}")
    if not whole.num:
        return lines
    steps = sorted({one.step for one in found})
    shown = steps if len(steps) <= _MOST_STEPS else steps[:: -(-len(steps) // _MOST_STEPS)]
    rows = [["step", "before", "now", "changed"]]
    for step in shown:
        of = [one for one in found if one.step == step and one.before is not None]
        if of:
            rows.append(
                [str(step), f"{_mean([one.before or 0.0 for one in of]):.4g}", f"{_mean([one.now for one in of]):.4g}", _changed(of)]
            )
    rows.append(["all", f"{whole.before:.4g}", f"{whole.now:.4g}", f"{whole.num_higher + whole.num_lower:,}"])
    lines += ["", *table(rows), "", f"{whole.num_higher:,} are higher now, {whole.num_lower:,} lower"]
    if whole.correlation is not None:
        lines[-1] += f"; the two correlate by {whole.correlation:.3f}"
    most = [one for one in sorted(found, key=lambda one: -abs(one.change)) if one.change][:_MOST_CHANGED]
    if most:
        lines.append("changed most: " + ", ".join(f"{one.sample} ({one.before:.4g} to {one.now:.4g})" for one in most))
        lines.append(f"look at one: m2flow samples {run} --where \"sample = '{most[0].sample}'\" --life")
    return lines


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _changed(of: list[Rescored]) -> str:
    return f"{sum(one.change != 0 for one in of):,}"
