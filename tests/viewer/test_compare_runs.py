"""`m2flow compare`: two runs beside each other, and a difference that is taken apart without a rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from observed_run import record_run, store_run

from m2flow.cli.main import cli
from m2flow.observe.metrics import MetricsWriter
from m2flow.observe.spans import Recorder, SpanBlock
from m2flow.samples import SampleId
from m2flow.viewer.comparison import BUSY, learned

MS = 1_000_000


def judged(score_ms: int, *, num_steps: int, score_line: str) -> list[SpanBlock]:
    """Steps of 2 ms of generation, some of judging and 1 ms of training, one sample each."""
    rollout, judge, trainer = Recorder("rollout-0"), Recorder("functions-0"), Recorder("train-0")
    for recorder in (rollout, judge, trainer):
        recorder.anchor_ns = 0
    now = 0
    for step in range(num_steps):
        calls = [{"call": 3 * step + i, "step": step} for i in range(3)]
        sample = SampleId(3 * step, 0, 0).pack()
        generate = {**calls[0], "label": "policy.generate", "flow_line": "f.py:1"}
        rollout.add("sample", now, now + 2 * MS, **generate, sample=sample, num_tokens=4 + step, version=step)
        rollout.add("rollout.step", now, now + 2 * MS, **generate, num_samples=1)
        now += 2 * MS
        score = {**calls[1], "label": "judge.score", "flow_line": score_line, "num_samples": 1, "samples": [sample]}
        judge.add("function.call", now, now + score_ms * MS, **score)
        now += score_ms * MS
        update = {**calls[2], "label": "policy.update", "flow_line": "f.py:9"}
        trainer.add("train.accumulate", now, now + MS, **update, samples=[sample], num_samples=1)
        now += MS
    return [recorder.drain() for recorder in (rollout, judge, trainer)]


def made(run_dir: Path, blocks: list[SpanBlock], *, batch: int, reward: float, num_steps: int) -> Path:
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"flow": "f.py", "options": {"batch": batch, "n": 4}}))
    with MetricsWriter(run_dir, tensorboard=False) as writer:
        for step in range(num_steps):
            writer.write(step, {"reward": reward + step})
    return store_run(run_dir, blocks)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """`slow`, whose judge takes 7 ms, and `quick`, two steps longer, whose judge takes 2 ms and stands two lines further down."""
    made(tmp_path / "slow", judged(7, num_steps=3, score_line="f.py:2"), batch=8, reward=0.25, num_steps=3)
    made(tmp_path / "quick", judged(2, num_steps=5, score_line="f.py:4"), batch=16, reward=0.5, num_steps=5)
    return tmp_path


def test_what_a_role_of_another_name_learned_is_compared_too(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with MetricsWriter(tmp_path / name, tensorboard=False) as writer:
            for step in range(2):
                values = {
                    "actor/reward": 0.5,
                    "actor/entropy": 1.0,
                    "actor/loss": 0.1,
                    "setup/actor/entropy": 2.0,
                    "actor/lengths/sampled_reward": 0,
                }
                writer.write(step, values)
    assert [one.name for one in learned([tmp_path / "one"], [tmp_path / "two"])] == ["actor/reward", "actor/entropy"]


def compared(runs: Path, one: str, other: str) -> dict:  # type: ignore[type-arg]
    done = CliRunner().invoke(cli, ["compare", one, other, "--runs-dir", str(runs), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_slow_reward_is_what_one_run_waited_for_and_both_accounts_add_up(two: Path) -> None:
    found = compared(two, "slow", "quick")
    assert found["steps"] == [0, 1, 2]
    assert (found["one"]["step_s"], found["other"]["step_s"]) == pytest.approx((0.010, 0.005))
    assert found["path"][0]["what"] == "judge.score"
    assert found["path"][0]["line"] == "f.py:4"  # The same call, though its line has moved.
    assert (found["path"][0]["one"], found["path"][0]["other"]) == pytest.approx((0.007, 0.002))
    for account, each in (("path", 1), ("idle", 2)):  # Of two devices, one generates and one trains.
        for side in ("one", "other"):
            assert sum(pair[side] for pair in found[account]) == pytest.approx(each * found[side]["step_s"], rel=1e-6), account
    assert next(pair for pair in found["idle"] if pair["what"] == "reward")["one"] == pytest.approx(2 * 0.007)
    assert next(pair for pair in found["idle"] if pair["what"] == BUSY)["other"] == pytest.approx(0.003)


def test_lengths_staleness_and_metrics_are_of_the_steps_that_both_have(two: Path) -> None:
    found = compared(two, "slow", "quick")
    assert {pair["what"]: (pair["one"], pair["other"]) for pair in found["lengths"]}["mean"] == (5.0, 5.0)
    (metric,) = found["metrics"]
    assert metric == {"name": "reward", "num_steps": 3, "one": 1.25, "other": 1.5, "one_last": 2.25, "other_last": 2.5}
    assert found["settings"] == ["options.batch: 8 -> 16"]


def test_the_text_names_the_line_and_the_cause(two: Path) -> None:
    done = CliRunner().invoke(cli, ["compare", str(two / "slow"), str(two / "quick")])
    assert done.exit_code == 0, done.output
    assert "quick is faster: 0.005 s a step instead of 0.010 s, -50%" in done.stdout
    assert "-0.005 s a step on the critical path: judge.score (f.py:4)" in done.stdout
    assert "-0.010 device seconds a step idle for reward" in done.stdout
    assert "options.batch: 8 -> 16" in done.stdout


def test_a_run_beside_itself_differs_in_nothing(two: Path) -> None:
    found = compared(two, "slow", "slow")
    assert found["explained"][0].startswith("the steps take alike")
    assert len(found["explained"]) == 2
    assert (found["settings"], found["plans"]) == ([], [])
    assert all(pair["one"] == pair["other"] for part in ("path", "idle", "lengths", "staleness") for pair in found[part])


def test_runs_without_a_step_in_common_say_so(two: Path) -> None:
    (two / "begun").mkdir()
    (two / "begun" / "config.json").write_text("{}")
    assert compared(two, "slow", "begun")["explained"] == ["the runs have no step in common"]
    done = CliRunner().invoke(cli, ["compare", "begun", "slow", "--runs-dir", str(two)])
    assert done.exit_code == 0, done.output
    missing = CliRunner().invoke(cli, ["compare", "slow", "nothing", "--runs-dir", str(two)])
    assert missing.exit_code == 2


def test_a_run_of_several_workers_is_compared_too(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        store_run(tmp_path / name, record_run(seed=seed))
    found = compared(tmp_path, "a", "b")
    assert sum(pair["one"] for pair in found["path"]) == pytest.approx(found["one"]["step_s"], rel=1e-6)
    assert sum(pair["other"] for pair in found["idle"]) == pytest.approx(3 * found["other"]["step_s"], rel=1e-6)
