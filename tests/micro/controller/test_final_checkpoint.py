"""Ctrl-C at any moment: what is begun is finished and saved, and the run that goes on has nothing to make again."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from fake_flows import ppo
from one_thread import SteppedRun, after_each, commit_every, resumed
from resumed_runs import account, fake_cluster, long_answers, loop

from m2flow.macro.flow import Flow
from m2flow.micro.records.audit import audit
from m2flow.micro.records.checkpoints import read
from m2flow.spec import RunSettings

TOLD = ("samples", "prefixes", "given_up", "expired", "lost", "known")


def settings(where: Path, every: int) -> RunSettings:
    return RunSettings(runs_dir=str(where / "runs"), checkpoint_steps=every, flush_tokens=1000)


def interrupted(program: Flow, where: Path, at: int, every: int) -> Path | None:
    """The directory of a run that is stopped after so many moves; None: it had ended. How many moves it takes depends on time."""
    moves = iter(range(at))
    pressed: list[bool] = []

    def press() -> None:
        if next(moves, None) is None and not pressed:
            pressed.append(True)
            raise KeyboardInterrupt("Ctrl-C")

    run = SteppedRun(program, {}, fake_cluster("split"), settings(where, every), hook=press)
    with contextlib.suppress(KeyboardInterrupt):
        run.execute()
    return run.run_dir if pressed else None


def table(run_dir: Path, query: str) -> list[tuple[int, ...]]:
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.db")) as db:
        return db.execute(query).fetchall()


@pytest.mark.parametrize("every", [1, 1000], ids=["checkpoints under way", "no other checkpoint"])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=pytest.mark.slow if program is not loop else (), id=program.name)
        for program in (loop, ppo, long_answers)
    ],
)
def test_a_run_that_is_interrupted_saves_what_it_has_and_goes_on_without_making_it_again(tmp_path, monkeypatch, program, every):
    commit_every(monkeypatch, 0.0)
    moves = [0]

    def count() -> None:
        moves[0] += 1

    expected = account(SteppedRun(program, {}, fake_cluster("split"), settings(tmp_path / "whole", every), hook=count).execute())
    num_saved = 0
    for number in range(4):
        stopped = interrupted(program, tmp_path / str(number), (2 * number + 1) * moves[0] // 12, every)
        if stopped is None:
            continue
        points = [read(path).point for path in (stopped / "checkpoints").glob("step-*")]
        num_saved += len(points)
        assert (audited := audit(stopped)).is_sound, f"{audited} {[table(stopped, f'SELECT * FROM {name}') for name in TOLD]}"
        assert audited.tokens.get("lost", 0) == 0
        assert account(resumed(program, {}, fake_cluster("split"), settings(tmp_path, every), stopped, order_seed=number)) == expected
        assert (audited := audit(stopped)).is_sound, str(audited)
        if points or program is not ppo:  # Between its two updates there are values by weights that the first has replaced.
            assert table(stopped, "SELECT sum(reapplied) FROM attempts") == [(0,)]
    assert num_saved > 0


@pytest.mark.parametrize("eager", [False, True], ids=["planned", "eager"])
def test_a_signal_whose_exception_python_has_dropped_stops_the_run_at_its_next_call(tmp_path, eager):
    """As when the handler ran inside a handle's `__del__`."""
    steps: list[int] = []

    def dropped(run: SteppedRun) -> None:
        steps.append(run.tally.num_steps)
        if len(steps) == 20:
            run.interrupt("Ctrl-C")

    given = settings(tmp_path, 1).model_copy(update={"eager": eager})
    run = SteppedRun(loop, {"num_steps": 50}, fake_cluster("split"), given, hook=lambda: dropped(run))
    if eager:
        after_each(run, lambda: dropped(run))
    with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        run.execute()
    assert run.tally.num_steps < 50
