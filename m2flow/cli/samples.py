"""Implement `m2flow samples`: query a run's samples, with prompts, responses, rewards and events, or write them to a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from m2flow.cli.main import find_run
from m2flow.errors import OptionError
from m2flow.micro.records.length_bias import Class, bias_of_run
from m2flow.micro.records.sample_query import COLUMNS, Conversation, Entry, SampleQuery, export


@click.command("samples")
@click.argument("run", required=False)
@click.option("--where", default="", metavar="CONDITION", help='Choose samples by an SQL expression, like "reward < 0.5 and step = 3".')
@click.option("--order", default="", metavar="EXPRESSION", help='In which order, like "response_tokens desc".  [default: as drawn]')
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="How many to show; a file gets all.")
@click.option("--life", "has_life", is_flag=True, help="Show the events of each sample.")
@click.option("--lengths", "has_lengths", is_flag=True, help="Compare the lengths of trained samples with those of all sampled.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write all of them to a .jsonl or .parquet file."
)
@click.option("--columns", "lists_columns", is_flag=True, help="List what a condition may name.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def command(
    run: str | None,
    where: str,
    order: str,
    limit: int,
    has_life: bool,
    has_lengths: bool,
    as_json: bool,
    out: Path | None,
    lists_columns: bool,
    runs_dir: Path,
) -> None:
    """Show the samples of a run: prompt, response, rewards, and what became of each.

    RUN is a run directory or its name; the newest one by default. The run may still be going on.

    \b
    Examples:
      m2flow samples --where "reward < 0.5" --order "response_tokens desc"
      m2flow samples runs/grpo-20260102-030405 --where "sample = '3/17/2'" --life
      m2flow samples --lengths              trained, carried, dropped, truncated and stale ones beside all that were sampled
      m2flow samples --where "matches('carry the one') and reward = 0"      full-text search in prompts, responses and dataset columns
      m2flow samples --where "ending = 'consumed'" --out trained.parquet
    """
    if lists_columns:
        click.echo("\n".join(f"{name:16} {what}" for name, what in COLUMNS.items()))
        return
    if out is not None and out.suffix not in (".jsonl", ".parquet"):
        raise OptionError(f"--out {out}: the file's name must end in .jsonl or .parquet")
    run_dir = find_run(run, runs_dir)
    if has_lengths:
        click.echo("\n".join(_lengths(bias_of_run(run_dir), as_json=as_json)))
        return
    with SampleQuery(run_dir) as query:
        if out is not None:
            number = export(query.entries(where, order=order), out)
            click.echo(f"{number:,} samples in {out}")
            return
        if as_json:
            for entry in query.entries(where, order=order, limit=limit):
                click.echo(msgspec.json.encode(entry).decode())
            return
        found = query.count(where)
        for entry in query.entries(where, order=order, limit=limit):
            click.echo("\n".join(_shown(entry, has_life=has_life)) + "\n")
        click.echo(f"{min(found, limit):,} of {found:,} samples" + (f" where {where}" if where else "") + f" of {run_dir}")


def _lengths(bias: Mapping[str, Class], *, as_json: bool) -> list[str]:
    """Format the mean length and reward of each class of samples."""
    if as_json:
        return [msgspec.json.encode({name: of._asdict() for name, of in bias.items()}).decode()]
    if not bias:
        return ["no update has trained on samples yet"]
    whole = bias["sampled"].length
    rows = [["", "samples", "mean tokens", "of all", "mean reward"]]
    for name, of in bias.items():
        length = "" if of.length is None else f"{of.length:,.1f}"
        ratio = "" if of.length is None or not whole else f"{of.length / whole:.2f}x"
        rows.append([name, f"{of.num:,}", length, ratio, "" if of.reward is None else f"{of.reward:.4f}"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *[c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]]).rstrip() for row in rows]


def _shown(entry: Entry, *, has_life: bool) -> list[str]:
    reward = "no reward" if entry.reward is None else f"reward {entry.reward:g}"
    head = f"{entry.sample}  step {entry.step}, {entry.response_tokens} tokens ({entry.finish}), {reward}, {entry.ending}"
    said = [f"  prompt:   {_one_line(entry.prompt_text)}", f"  response: {_one_line(entry.response_text)}"]
    lines = [head, *([line for one in entry.conversations for line in _spoken(one)] or said)]
    lines += [f"  {name}: {_one_line(str(value))[:_LONGEST]}" for name, value in entry.columns.items()]
    lines += [f"  {by}: {entry.rewards[by]:g}, of {_parts(of)}" for by, of in entry.parts.items()]
    return lines + [f"  - {event}" for event in entry.life] if has_life else lines


def _spoken(one: Conversation) -> list[str]:
    """Format a conversation of an episode: its prompt, and what the model said, turn by turn."""
    reward = "" if one.reward is None else f", reward {one.reward:g}"
    begins = [] if one.prompt is None else [f"    prompt:  {_one_line(one.prompt)}"]
    return [f"  {one.name}{reward}", *begins, *(f"    turn {at}:  {_one_line(text)}" for at, text in enumerate(one.turns, 1))]


_LONGEST = 400
"""The most characters of a column of the dataset that are shown."""


def _parts(of: Mapping[str, float]) -> str:
    """Format the parts of a reward.

    >>> _parts({"right": 1.0, "brevity": -0.25})
    'right 1, brevity -0.25'
    """
    return ", ".join(f"{name} {value:g}" for name, value in of.items())


def _one_line(text: str) -> str:
    """Escape line breaks and control characters, so that a text stays on one line and can't act on the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
