"""The embedded engines with `deterministic=True`: a run that is killed and resumed has the bits of one that was not."""

from __future__ import annotations

import pytest
from deterministic_runs import embedded_cluster, ppo, sorts
from one_thread import commit_every
from resumed_runs import check_images

from m2flow.spec import RunSettings


def test_a_killed_run_of_the_embedded_engines_ends_with_the_same_bits(tmp_path, monkeypatch):
    commit_every(monkeypatch, 0.0)
    settings = RunSettings(runs_dir=str(tmp_path / "runs"), deterministic=True, checkpoint_steps=1)
    check_images(sorts, {}, embedded_cluster("split"), settings, tmp_path, most=5)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("program", [sorts, ppo], ids=lambda program: program.name)
@pytest.mark.parametrize("how", ["eager", "time-shared", "split"])
def test_a_killed_run_ends_with_the_same_bits_wherever_it_was_killed(tmp_path, monkeypatch, program, how):
    commit_every(monkeypatch, 0.0)
    settings = RunSettings(runs_dir=str(tmp_path / "runs"), deterministic=True, eager=how == "eager", checkpoint_steps=1)
    check_images(program, {}, embedded_cluster("split" if how == "eager" else how), settings, tmp_path, most=25)
