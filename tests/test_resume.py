"""A run that is killed after any event, and resumed, ends as one that was not: weights, samples, rewards, what was consumed, logs."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from one_thread import commit_every, imaged, resumed
from test_replay import ROWS, digits

from m2flow import AdamW, Dataset, Flow, Policy, Reference, Reward, flow, log, ppo_clip, steps
from m2flow.micro.run import Summary
from m2flow.observe.metrics import read_metrics
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec


def spec_of(placement: str = "split", workers: int = 1) -> ClusterSpec:
    return ClusterSpec(
        device="cpu",
        cores=2,
        placement=placement,
        rollout=RolloutSpec(engine="fake", max_running=4, workers=workers),
        train=TrainSpec(engine="fake", token_budget=60),
        functions=FunctionSpec(chunk=3),
    )


@flow
def loop(num_steps: int = 3) -> None:
    """What comes next depends on what was seen, and on the flow's own dice; an evaluation is needed by nobody."""
    policy, judge, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    reference = Reference(policy)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(2), n=random.choice([2, 3]), max_new_tokens=6)
        rewards = judge.score(responses)
        metrics = policy.update(responses, rewards, loss=ppo_clip(kl_coef=0.1), reference=reference, optimizer=AdamW(1e-3))
        log(again=judge.score(policy.generate(prompts.take(1), max_new_tokens=3)).mean(), step=float(step))
        if float(metrics["num_tokens"]) % 2:
            prompts.take(1)


def account(summary: Summary) -> Mapping[str, object]:
    """What a run came to, of which nothing may depend on its having been killed."""
    run_dir = Path(summary.run_dir)
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.db")) as db:
        tables = {
            "calls": "SELECT ordinal, name, state FROM calls ORDER BY 1",
            "consumption": "SELECT * FROM consumption ORDER BY 1, 2, 3",
            "rewards": "SELECT sample, call, value FROM rewards ORDER BY 1, 2",
            "logs": "SELECT * FROM logs ORDER BY rowid",
            "samples": "SELECT id, call, num_tokens, finish FROM samples ORDER BY 1",
            "cursors": "SELECT * FROM cursors ORDER BY 1",
            "looks": "SELECT kind, position, body FROM record ORDER BY 1, 2",
        }
        found: dict[str, object] = {name: db.execute(query).fetchall() for name, query in tables.items()}
    lines = Counter((step, name, value) for name, points in read_metrics(run_dir).items() for step, value in points)
    num_lines = len((run_dir / "metrics.jsonl").read_text().splitlines())
    return found | {
        "weights": summary.weights_sha256,
        "digest": summary.samples_sha256,
        "metrics": lines,
        "num_lines": num_lines,
        "counts": (summary.steps, summary.samples, summary.tokens, summary.reward_first, summary.reward_last),
    }


def check_images(
    program: Flow, options: dict[str, object], spec: ClusterSpec, settings: RunSettings, where: Path, *, most: int | None = 8
) -> None:
    """Resume a run from images of it, evenly spaced over its events; from all if `most` is None."""
    summary, images = imaged(program, options, spec, settings, where / "images")
    expected = account(summary)
    chosen = images.paths if most is None else images.paths[3 :: max(len(images.paths) // most, 1)]
    assert len(chosen) > 5
    for number, image in enumerate(chosen):
        went_on = resumed(program, options, spec, settings, image, order_seed=number)
        found = account(went_on)
        assert found == expected, f"{image}: {[name for name in expected if found[name] != expected[name]]}"
        shutil.rmtree(image)


def settings_of(how: str, where: Path) -> RunSettings:
    return RunSettings(runs_dir=str(where / "runs"), eager=how == "eager", checkpoint_steps=1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["eager", "time-shared", "split"])
def test_a_run_that_is_killed_after_some_event_ends_as_one_that_was_not(tmp_path, monkeypatch, how):
    commit_every(monkeypatch, 0.0)
    check_images(loop, {}, spec_of("split" if how == "eager" else how), settings_of(how, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["commits at once", "commits at checkpoints"])
@pytest.mark.parametrize("how", ["eager", "time-shared", "split"])
def test_a_run_that_is_killed_after_any_event_ends_as_one_that_was_not(tmp_path, monkeypatch, how, seconds):
    commit_every(monkeypatch, seconds)
    check_images(loop, {}, spec_of("split" if how == "eager" else how), settings_of(how, tmp_path), tmp_path, most=None)
