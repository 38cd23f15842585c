"""Runs that are killed after any event and resumed: flows and clusters for it, what a run came to, and the check on images of it."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from one_thread import imaged, resumed
from replayed import ROWS, digits

from m2flow import AdamW, Dataset, Flow, Policy, Reference, Reward, flow, log, ppo_clip, steps
from m2flow.micro.records.audit import audit
from m2flow.micro.records.flow_record import read_record
from m2flow.observe.metrics import read_metrics
from m2flow.runner.run import Summary
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

SPLIT_YAML = """
placement: split
device: cpu
cores: 2
rollout: {engine: fake, max_running: 4}
train: {engine: fake, token_budget: 60}
"""


def fake_cluster(placement: str = "split", workers: int = 1) -> ClusterSpec:
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
    if any(record.name == "keep" for record in read_record(run_dir).calls):
        # How many candidates are begun that turn out not to be needed depends on time.
        return {name: value for name, value in found.items() if name not in ("samples", "rewards")} | {
            "weights": summary.weights_sha256,
            "digest": summary.samples_sha256,
            "metrics": {line for line in lines if not line[1].startswith("lengths/")},
        }
    return found | {
        "weights": summary.weights_sha256,
        "digest": summary.samples_sha256,
        "metrics": lines,
        "num_lines": num_lines,
        "counts": (summary.steps, summary.samples, summary.tokens, summary.calls_failed, summary.reward_first, summary.reward_last),
    }


def check_images(
    program: Flow, options: dict[str, object], spec: ClusterSpec, settings: RunSettings, where: Path, *, most: int | None = 5
) -> None:
    """Resume a run from images of it, evenly spaced over its events; from all if `most` is None."""
    summary, images = imaged(program, options, spec, settings, where / "images", most=min(8 * most, 128) if most else None)
    expected = account(summary)
    for number, image in enumerate(_chosen(images.paths, most)):
        went_on = resumed(program, options, spec, settings, image, order_seed=number)
        found = account(went_on)
        assert (audited := audit(image)).is_sound, str(audited)
        assert found == expected, f"{image}: {[name for name in expected if found[name] != expected[name]]}"
        shutil.rmtree(image)


def _chosen(paths: list[Path], most: int | None) -> list[Path]:
    chosen = paths if most is None else paths[3 :: max(len(paths) // most, 1)]
    assert len(chosen) > 3
    return chosen


@flow
def long_answers(num_steps: int = 2) -> None:
    policy, judge, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(3), n=3, max_new_tokens=24)
        policy.update(responses, judge.score(responses), loss=ppo_clip(), optimizer=AdamW(1e-3))
