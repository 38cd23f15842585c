"""Implement `m2flow samples`, `rescore` and `branch`: query the samples of a run, score them anew, or continue episodes otherwise.

samples   query them, with prompts, responses, rewards and events, or write them to a file
rescore   judge them by another reward function
branch    generate an episode anew from one of its turns on
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from m2flow.cli.main import find_run
from m2flow.errors import OptionError
from m2flow.micro.records.accounting import Class, bias_of_run
from m2flow.micro.records.sample_query import COLUMNS, Conversation, Entry, SampleQuery, export
from m2flow.observe.spans import with_turns
from m2flow.observe.store import read_stays
from m2flow.samples import SampleId

if TYPE_CHECKING:
    from m2flow.runs.opened import Rescored


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
        entries = list(query.entries(where, order=order, limit=limit))
        stays = read_stays(run_dir, {_packed(entry) for entry in entries}) if has_life else {}
        for entry in entries:
            life = with_turns(entry.life, stays.get(_packed(entry), [])) if has_life else []
            click.echo("\n".join(_shown(entry, life)) + "\n")
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


def _shown(entry: Entry, life: Sequence[str]) -> list[str]:
    reward = "no reward" if entry.reward is None else f"reward {entry.reward:g}"
    head = f"{entry.sample}  step {entry.step}, {entry.response_tokens} tokens ({entry.finish}), {reward}, {entry.ending}"
    said = [f"  prompt:   {_one_line(entry.prompt_text)}", f"  response: {_one_line(entry.response_text)}"]
    lines = [head, *([line for one in entry.conversations for line in _spoken(one)] or said)]
    lines += [f"  {name}: {_one_line(str(value))[:_LONGEST]}" for name, value in entry.columns.items()]
    lines += [f"  {by}: {entry.rewards[by]:g}, of {_parts(of)}" for by, of in entry.parts.items()]
    return lines + [f"  - {event}" for event in life]


def _packed(entry: Entry) -> int:
    call, prompt, member = map(int, entry.sample.split("/"))
    return SampleId(call, prompt, member).pack()


def _spoken(one: Conversation) -> list[str]:
    """Format a conversation of an episode: its prompt, and turn by turn what the model was told and said."""
    reward = (f", by {one.by}" if one.by else "") + ("" if one.reward is None else f", reward {one.reward:g}")
    begins = [] if one.prompt is None else [f"    prompt:  {_one_line(one.prompt)}"]
    lines = [f"  {one.name}{reward}", *begins]
    for at, (told, said) in enumerate(itertools.zip_longest(one.told, one.turns), 1):
        lines += [f"    told:    {_one_line(told.strip())[:_LONGEST]}"] if told else []
        lines += [] if said is None else [f"    turn {at}:  {_one_line(said)}"]
    return lines


_LONGEST = 400
"""The most characters that are shown of a column of the dataset, or of what a model was told."""


def _parts(of: Mapping[str, float]) -> str:
    """Format the parts of a reward.

    >>> _parts({"right": 1.0, "brevity": -0.25})
    'right 1, brevity -0.25'
    """
    return ", ".join(f"{name} {value:g}" for name, value in of.items())


def _one_line(text: str) -> str:
    """Escape line breaks and control characters, so that a text stays on one line and can't act on the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


# ---- m2flow rescore

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
def rescore_command(
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
    from m2flow.runs.opened import rescore

    judge = load_function(function)
    run_dir = find_run(run, runs_dir)
    how: Literal["raise"] | float = "raise" if on_error is None else on_error
    found = []
    with contextlib.ExitStack() as stack:
        file = None
        for one in rescore(run_dir, judge, where=where, limit=limit, timeout_s=timeout_s, on_error=how):
            found.append(one)
            if as_json or out is not None:
                file = file or stack.enter_context(click.open_file(str(out or "-"), "w"))  # What was there stays until there is something.
                file.write(_rescored_line(one) + "\n")
    if not found:
        raise OptionError(f"{run_dir} has no samples" + (f" where {where}" if where else ""), now="See them: m2flow samples RUN")
    if not as_json:
        click.echo("\n".join(_comparison(found, f"{run_dir}", function)))


def _rescored_line(one: Rescored) -> str:
    shown = {"sample": one.sample, "step": one.step, "before": one.before, "now": one.now}
    return json.dumps(shown | ({"parts": one.parts} if one.parts else {}))


def _comparison(found: list[Rescored], run: str, function: str) -> list[str]:
    from m2flow.runs.opened import summed
    from m2flow.runs.planning import table

    whole = summed(found)
    lines = [f"{len(found):,} samples of {run}, judged by {function}"]
    if whole.num_new:
        lines.append(f"{whole.num_new:,} had no reward before; their mean is {whole.mean_new:.4g}")
    if not whole.num:
        return lines
    steps = sorted({one.step for one in found})
    shown = [(str(step), summed([one for one in found if one.step == step])) for step in steps[:: -(-len(steps) // _MOST_STEPS)]]
    rows = [["step", "before", "now", "changed"]]
    for name, of in (*shown, ("all", whole)):
        if of.num:
            rows.append([name, f"{of.before:.4g}", f"{of.now:.4g}", f"{of.num_higher + of.num_lower:,}"])
    lines += ["", *table(rows), "", f"{whole.num_higher:,} are higher now, {whole.num_lower:,} lower"]
    if whole.correlation is not None:
        lines[-1] += f"; the two correlate by {whole.correlation:.3f}"
    most = [one for one in sorted(found, key=lambda one: -abs(one.change)) if one.change][:_MOST_CHANGED]
    if most:
        lines.append("changed most: " + ", ".join(f"{one.sample} ({one.before:.4g} to {one.now:.4g})" for one in most))
        lines.append(f"look at one: m2flow samples {shlex.quote(str(run))} --where \"sample = '{most[0].sample}'\" --life")
    return lines


# ---- m2flow branch


@click.command("branch")
@click.argument("run")
@click.argument("sample")
@click.option("--turn", type=click.IntRange(min=1), required=True, help="The first turn that is taken anew, from 1.")
@click.option("-n", "num", type=click.IntRange(min=1), default=8, show_default=True, help="How many times.")
@click.option("--step", type=click.IntRange(min=0), help="With the weights after so many steps.  [default: the newest]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a branch, with all that was said.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the engine.  [default: one a core]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs are looked for.")
def branch_command(
    run: str, sample: str, turn: int, num: int, step: int | None, as_json: bool, threads: int | None, runs_dir: Path
) -> None:
    """Play the episode SAMPLE of RUN on from one of its turns, several times, with embedded engines. The run is left as it is.

    The turns before are those of the record, and so is what tools gave in them; what a branch of an agent is worth there is the mean of the
    rewards. SAMPLE is an identity as `m2flow samples` prints it. Tools that are pure are run again for what they did to a
    sandbox; where another one is needed for that, nothing is branched. All that speak in the episode do so with their weights of that step.

    \b
    Example:
      m2flow branch tool_use-20260102-030405 3/17/2 --turn 2 -n 16
    """
    from m2flow.runs.branching import branch
    from m2flow.runs.planning import table

    found = branch(find_run(run, runs_dir), sample, turn, num, step=step, threads=threads)
    if as_json:
        for number, one in enumerate(found.branches):
            said: dict[str, object] = {"branch": number, "reward": one.reward, "failure": one.failure, "turns": list(one.turns)}
            said |= {"speakers": list(one.speakers)} if one.speakers else {}
            said |= {"rewards": dict(one.rewards)} if one.rewards else {}
            click.echo(json.dumps(said | ({"error": one.error} if one.error else {})))
        return
    before = "none" if found.reward is None else f"{found.reward:.4g}"
    turns = f"{found.num_turns} turn{'s' * (found.num_turns != 1)}"
    click.echo(f"episode {sample}, reward {before}, {turns}; from turn {turn} with the weights {found.weights}\n")
    names = sorted({name for one in found.branches for name in one.rewards})
    rows = [["", "reward", *names, "turns", "last turn"]]
    for number, one in enumerate(found.branches):
        reward = one.failure or ("none" if one.reward is None else f"{one.reward:.4g}")
        of_names = [f"{one.rewards[name]:.4g}" if name in one.rewards else "" for name in names]
        last = _one_line(one.turns[-1] if one.turns else "") + (f" ({one.speakers[-1]})" if one.speakers and one.speakers[-1] else "")
        rows.append([str(number), reward, *of_names, str(len(one.turns)), last])
    click.echo("\n".join(table(rows)))
    rewards = [one.reward for one in found.branches if one.reward is not None]
    failed = [one for one in found.branches if one.failure]
    if rewards:
        means = {name: [one.rewards[name] for one in found.branches if name in one.rewards] for name in names}
        of_each = "".join(f"; {name} {sum(of) / len(of):.4g}" for name, of in means.items())
        click.echo(f"\nmean reward {sum(rewards) / len(rewards):.4g} of {len(rewards)}{of_each}")
    if failed:
        click.echo(f"{len(failed)} failed, the first: {failed[0].failure}: {failed[0].error}")
