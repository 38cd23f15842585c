"""A run that is resumed goes on with what was unfinished: finished siblings stay, prefixes go on, and every token is in the account."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from one_thread import SteppedRun, commit_every, imaged, resumed
from replayed import ROWS, digits
from resumed_runs import account, fake_cluster, long_answers

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, steps
from m2flow.errors import DivergenceError, RewardError, SpecError
from m2flow.micro.controller.journal_records import CrashRecovery
from m2flow.micro.protocol.staleness import VersionSpan
from m2flow.micro.protocol.worker_state import stopped_at
from m2flow.micro.records.audit import audit, read_token_account
from m2flow.micro.records.journal import read_back
from m2flow.micro.records.ledger import Ledger
from m2flow.micro.records.rundir import read_config
from m2flow.micro.records.sample_query import SampleQuery
from m2flow.micro.records.segments import Kind, SegmentWriter, clear_scratch, scan_segments
from m2flow.samples import Batch, Finish
from m2flow.spec import RunSettings, TrainSpec

SPEC = fake_cluster("split", workers=2)


def settings(where: Path, flush_tokens: int = 2) -> RunSettings:
    return RunSettings(runs_dir=str(where / "runs"), checkpoint_steps=1, flush_tokens=flush_tokens)


def rows(run_dir: Path, query: str) -> list[tuple[int, ...]]:
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.db")) as db:
        return db.execute(query).fetchall()


def check_lives(run_dir: Path) -> int:
    """Over all attempts each sample was asked for, generated, rewarded and trained on once; how often samples went on from a prefix."""
    num_went_on = 0
    with SampleQuery(run_dir) as book:
        for entry in book.entries():
            events = [event.split(":")[0].split(" by ")[0] for event in entry.life]
            went_on = events.count("went on")
            num_went_on += went_on
            assert events.count("moved") <= went_on, entry.life
            rest = [event for event in events if event not in ("went on", "lost", "moved")]
            assert rest == ["asked for", "generated", "rewarded", "trained on"], entry.life
            assert events.index("generated") > max((at for at, event in enumerate(events) if event in ("went on", "lost")), default=0)
    return num_went_on


@pytest.mark.parametrize("seconds", [0.0, pytest.param(1e9, marks=pytest.mark.slow)], ids=["commits at once", "commits at checkpoints"])
def test_what_was_written_down_is_not_generated_again(tmp_path, monkeypatch, seconds):
    commit_every(monkeypatch, seconds)
    summary, images = imaged(long_answers, {}, SPEC, settings(tmp_path), tmp_path / "images", most=64)
    expected = account(summary)
    num_went_on = num_kept = num_told = 0
    for number, image in enumerate(images.paths[3 :: len(images.paths) // 9]):
        finished = dict(rows(image, f"SELECT id, offset FROM samples WHERE finish <> {int(Finish.ABORT)}"))
        went_on = resumed(long_answers, {}, SPEC, settings(tmp_path), image, order_seed=number)
        assert account(went_on) == expected
        assert finished.items() <= dict(rows(image, "SELECT id, offset FROM samples")).items()
        tokens = read_token_account(image)
        assert tokens.is_balanced, (image, tokens)
        assert (audited := audit(image)).is_sound, str(audited)
        pointed = {name for table in ("samples", "prefixes", "made", "expired") for (name,) in rows(image, f"SELECT segment FROM {table}")}
        scratch = {path.name for path in (image / "segments").glob("*-r*.seg")}
        assert scratch <= pointed
        num_told += check_lives(image)
        num_kept += len(finished)
        num_went_on += len(rows(image, "SELECT * FROM went_on"))
    assert num_told == num_went_on > 5
    assert num_kept > 20


def noted_when_scored(sample: Sample) -> float:
    with Path(os.environ["SCORED"]).open("a") as scored:
        print(sample.id.pack(), file=scored)
    return random.random()


@flow
def scores_what_it_keeps(num_steps: int = 2) -> None:
    policy, judge, again, prompts = Policy("fake"), Reward(digits), Reward(noted_when_scored, name="again"), Dataset(ROWS)
    for _ in steps(num_steps):
        kept = policy.generate(prompts, n=2, count=4, max_new_tokens=8, score=judge, max_draws=30)
        policy.update(kept, again.score(kept), minibatch_size=1, optimizer=AdamW(1e-3))


def test_what_was_scored_while_a_refill_still_drew_is_not_scored_again(tmp_path, monkeypatch):
    commit_every(monkeypatch, 0.0)
    monkeypatch.setenv("SCORED", os.devnull)
    _, images = imaged(scores_what_it_keeps, {}, SPEC, settings(tmp_path), tmp_path / "images", most=64)
    ours = "FROM rewards WHERE call IN (SELECT ordinal FROM calls WHERE name = 'again.score')"
    num_early = 0
    for number, image in enumerate(images.paths[3 :: len(images.paths) // 12]):
        known = dict(rows(image, f"SELECT sample, value {ours}"))
        num_early += len(known) % 8 != 0
        monkeypatch.setenv("SCORED", str(scored := tmp_path / f"scored-{number}"))
        resumed(scores_what_it_keeps, {}, SPEC, settings(tmp_path), image, order_seed=number)
        assert not known.keys() & set(map(int, scored.read_text().split() if scored.exists() else ()))
        assert known.items() <= dict(rows(image, f"SELECT sample, value {ours}")).items()
        assert (audited := audit(image)).is_sound, str(audited)
    assert num_early > 2


def test_scratch_files_that_nothing_points_into_are_deleted_and_their_names_are_not_given_again(tmp_path):
    for _ in range(3):
        writer = SegmentWriter(tmp_path, "rollout-0-running")
        place = writer.append(Batch(np.array([1, 2])), Kind.RUNNING, 7)
        writer.close()
    finished = SegmentWriter(tmp_path, "rollout-0")
    finished.append(Batch(np.array([1, 2])), Kind.FINISHED, 7)
    finished.close()
    clear_scratch(tmp_path, ["rollout-0-running.1.seg"], is_last=False)
    assert {path.name: path.stat().st_size > 0 for path in tmp_path.iterdir()} == {
        "rollout-0.seg": True,
        "rollout-0-running.1.seg": True,
        "rollout-0-running.2.seg": False,
    }
    assert place[0] == "rollout-0-running.2.seg"
    assert list(scan_segments(tmp_path, "rollout-0-running", {"rollout-0-running.1.seg": 10_000, place[0]: 10_000})) == []
    with contextlib.closing(SegmentWriter(tmp_path, "rollout-0-running")) as following:
        assert following.path.name == "rollout-0-running.3.seg"
    clear_scratch(tmp_path, [], is_last=True)
    assert [path.name for path in tmp_path.iterdir()] == ["rollout-0.seg"]


def test_rows_of_a_record_that_were_not_told_with_the_others_are_found(tmp_path):
    left, writer = CrashRecovery(tmp_path), SegmentWriter(tmp_path, "rollout-0")
    writer.append(Batch(np.array([1, 2])), Kind.FINISHED, 7)
    place = writer.append(Batch(np.array([3, 4, 5])), Kind.FINISHED, 7)
    left.reported(place, [4])
    writer.append(Batch(np.array([6])), Kind.FINISHED, 7)
    writer.close()
    assert [message.ids for message in left.of("rollout-0", {}).messages] == [[3, 5], [6]]
    assert left.of("rollout-0", {}).messages == []


def test_a_prefix_is_read_back_from_its_own_record_though_an_older_one_lies_beside_another_prefix(tmp_path):
    ledger, writer = Ledger(tmp_path / "ledger.db"), SegmentWriter(tmp_path / "segments", "rollout-0-running")
    ledger.open()
    for ids, count in (([1, 2], 3), ([2], 5)):
        place = writer.append(Batch(np.array(ids), {"count": np.full(len(ids), count)}), Kind.RUNNING, 7)
        ledger.flushed(7, ids, [count] * len(ids), [count] * len(ids), [[VersionSpan(count, 0)]] * len(ids), place)
    writer.close()
    rows = read_back(ledger, tmp_path, stopped_at(7), [1, 2], is_reward=False)
    ledger.close()
    assert rows.dense("count").tolist() == [3, 5]


OTHERS = [
    fake_cluster("time-shared"),
    fake_cluster("split", workers=3).model_copy(update={"train": TrainSpec(engine="fake", token_budget=25)}),
]


@pytest.mark.parametrize("other", [OTHERS[0], pytest.param(OTHERS[1], marks=pytest.mark.slow)], ids=["time-shared", "three workers"])
def test_a_run_goes_on_to_the_same_end_on_another_cluster(tmp_path, monkeypatch, other):
    commit_every(monkeypatch, 0.0)
    summary, images = imaged(long_answers, {}, SPEC, settings(tmp_path), tmp_path / "images")
    image = images.paths[len(images.paths) * 2 // 3]
    before = (image / "plan.json").read_bytes()
    assert account(resumed(long_answers, {}, other, settings(tmp_path), image)) == account(summary)
    assert (audited := audit(image)).is_sound, str(audited)
    assert read_config(image).cluster == other
    assert (image / "plan.before-1.json").read_bytes() == before != (image / "plan.json").read_bytes()


def test_another_engine_for_training_is_refused_with_the_reason(tmp_path, monkeypatch):
    commit_every(monkeypatch, 0.0)
    _, images = imaged(long_answers, {}, SPEC, settings(tmp_path), tmp_path / "images")
    other = SPEC.model_copy(update={"train": TrainSpec(engine="embedded")})
    with pytest.raises(SpecError, match=r"trained by the engine fake.* embedded"):
        resumed(long_answers, {}, other, settings(tmp_path), images.paths[-5])
    assert read_config(images.paths[-5]).cluster == SPEC


def broken(sample: Sample) -> float:
    return None if sample.prompt == ROWS[4]["prompt"] else digits(sample)  # type: ignore[return-value]


def mended(sample: Sample) -> float:
    return 0.625 if sample.prompt == ROWS[4]["prompt"] else digits(sample)


broken.__name__ = mended.__name__ = "right"
JUDGE = [broken]


@flow
def judged_by_what_there_is(num_steps: int = 4, lr: float = 1e-3) -> None:
    policy, judge, prompts = Policy("fake"), Reward(JUDGE[0], name="right"), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=8)
        policy.update(responses, judge.score(responses), optimizer=AdamW(lr))


@pytest.mark.parametrize("eager", [False, True], ids=["planned", "eager"])
def test_a_reward_that_ended_a_run_may_be_mended_and_the_run_goes_on(tmp_path, monkeypatch, eager):
    given = settings(tmp_path).model_copy(update={"eager": eager})
    monkeypatch.setattr(f"{__name__}.JUDGE", [broken])
    run = SteppedRun(judged_by_what_there_is, {}, SPEC, given)
    with pytest.raises(RewardError, match="NoneType"):
        run.execute()
    monkeypatch.setattr(f"{__name__}.JUDGE", [mended])
    with pytest.raises(DivergenceError, match="lr"):
        resumed(judged_by_what_there_is, {"lr": 1.0}, SPEC, given, run.run_dir)
    said: list[str] = []
    went_on = SteppedRun(judged_by_what_there_is, {}, SPEC, given, resume=run.run_dir, warn=said.append).execute()
    assert went_on.steps == 4
    assert [one for one in said if "right.score is another than before" in one]
    assert audit(run.run_dir).is_sound
    values = dict(rows(run.run_dir, "SELECT sample, value FROM rewards"))
    assert len(values) == 24
    assert list(values.values()).count(0.625) == 2


def test_a_function_that_failed_not_may_not_be_another_when_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.JUDGE", [mended])
    _, images = imaged(judged_by_what_there_is, {}, SPEC, settings(tmp_path), tmp_path / "images")
    monkeypatch.setattr(f"{__name__}.JUDGE", [broken])
    with pytest.raises(DivergenceError, match="function is right"):
        resumed(judged_by_what_there_is, {}, SPEC, settings(tmp_path), images.paths[len(images.paths) // 2])
