"""The ledger and its segments: told twice is told once, trained twice is an error, and damage is seen."""

import itertools
import json
import os
import resource
import sqlite3
import tempfile
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from fake_clusters import FAKES
from hypothesis import given, settings
from hypothesis import strategies as st
from one_thread import commit_every, imaged, resumed
from rich.console import Console

from m2flow import Dataset, Policy, Reward, flow, nll, steps
from m2flow.errors import EngineError, HostError, InternalError
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call
from m2flow.macro.tracing import trace
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.ledger import Ledger, add_endings, read_refills, read_samples, samples_digest
from m2flow.micro.records.rundir import reading_ledger
from m2flow.micro.records.segments import SegmentWriter
from m2flow.observe.metrics import read_metrics
from m2flow.observe.spans import SpanBlock
from m2flow.runner.run import Run
from m2flow.runs.display import show_summary
from m2flow.samples import Batch, Ragged, Segment, make_ids
from m2flow.spec import RunSettings

few = settings(max_examples=12, deadline=None)


@flow
def _scored() -> None:
    policy, judge, prompts = Policy("fake"), Reward(lambda s: 0.0, name="judge"), Dataset([{"prompt": "a"}] * 3)
    for _ in steps(1):
        judge.score(policy.generate(prompts.take(3), n=2, max_new_tokens=1))


SOURCE, GENERATE, SCORE = trace(_scored, {})[0].calls
IDS = make_ids(1, 3, 2).tolist()


def generated(ids: list[int]) -> Batch:
    rng = {i: np.random.default_rng(i % 997) for i in ids}
    lengths = {i: (2, int(rng[i].integers(1, 6))) for i in ids}
    return Batch(
        np.array(ids, np.int64),
        {
            "tokens": Ragged.of([rng[i].integers(0, 99, sum(lengths[i])) for i in ids], np.int32),
            "segment_kinds": Ragged.of([[Segment.PROMPT, Segment.GENERATED]] * len(ids), np.uint8),
            "segment_lengths": Ragged.of([lengths[i] for i in ids], np.int32),
        },
    )


def write(run_dir: Path, cuts: list[list[int]], rewards: dict[int, float] | None = None, calls: tuple[Call, ...] = (SCORE,)) -> Ledger:
    """A ledger of these samples, each cut a record of one of two segment files."""
    run_dir.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(run_dir / "ledger.db")
    ledger.open()
    writers = [SegmentWriter(run_dir / "segments", name) for name in ("a", "b")]
    for number, ids in enumerate(cuts):
        batch = generated(ids)
        tokens, made = batch.ragged("tokens").lengths.tolist(), batch.ragged("segment_lengths").values[1::2].tolist()
        ledger.samples_done(0, ids, tokens, made, [0] * len(ids), writers[number % 2].append(batch))
    for call in calls:
        ledger.rewarded(call, list(rewards or {}), list((rewards or {}).values()))
    for writer in writers:
        writer.close()
    return ledger


@few
@given(st.permutations(IDS), st.sets(st.integers(1, 5)), st.permutations(IDS))
def test_the_digest_depends_neither_on_the_order_of_writing_nor_on_how_records_are_cut(tmp_path_factory, order, cuts, scored):
    plain, other = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("other")
    edges = [0, *sorted(cuts), len(order)]
    parts = [list(order[a:b]) for a, b in itertools.pairwise(edges)]
    write(plain, [IDS], {i: i / 7 for i in IDS}).close()
    write(other, parts, {i: i / 7 for i in scored}).close()
    assert samples_digest(other) == samples_digest(plain)


def test_the_digest_changes_with_a_reward_a_token_and_a_sample_that_is_missing(tmp_path):
    write(tmp_path / "plain", [IDS], dict.fromkeys(IDS, 1.0)).close()
    write(tmp_path / "reward", [IDS], dict.fromkeys(IDS, 1.0) | {IDS[2]: 0.5}).close()
    write(tmp_path / "missing", [IDS[1:]], dict.fromkeys(IDS, 1.0)).close()
    assert len({samples_digest(tmp_path / name) for name in ("plain", "reward", "missing")}) == 3


def test_each_sample_comes_back_with_its_rewards_in_the_order_of_their_calls(tmp_path):
    later = replace(SCORE, ordinal=SCORE.ordinal + 1)
    ledger = write(tmp_path, [IDS[3:], IDS[:3]], {i: float(i) for i in IDS}, calls=(later, SCORE))
    ledger.close()
    read = list(read_samples(tmp_path))
    assert [int(sample.ids[0]) for sample, _ in read] == IDS
    assert all(rewards == [float(sample.ids[0])] * 2 for sample, rewards in read)
    first = generated(IDS[3:]).take([0]).ragged("tokens").values.tolist()
    assert read[3][0].ragged("tokens").values.tolist() == first


def test_of_samples_lost_with_a_worker_only_the_tokens_that_were_not_written_down_count_as_lost(tmp_path):
    ledger = write(tmp_path, [IDS[:3]])
    more, same, fewer = IDS[:3]
    known = {packed: ledger.tokens_of(packed) for packed in IDS[:3]}
    running = {more: known[more] + 4, same: known[same], fewer: known[fewer] - 1, IDS[3]: 2}
    assert ledger.lost(running, "rollout-0", "killed") == 4 + 2
    assert ledger.select("SELECT sample, num_tokens, worker, reason FROM lost ORDER BY sample") == [
        (more, 4, "rollout-0", "killed"),
        (IDS[3], 2, "rollout-0", "killed"),
    ]
    ledger.close()


def test_tokens_of_a_sample_that_is_begun_anew_are_written_down_no_more(tmp_path):
    ledger = write(tmp_path, [IDS[:2]])
    old, kept = IDS[:2]
    assert ledger.tokens_of(old) > 0
    ledger.expired(GENERATE, [old])
    assert ledger.tokens_of(old) == 0
    assert ledger.tokens_of(kept) > 0
    assert ledger.lost({old: 1}, "rollout-0", "killed") == 1
    ledger.close()


def test_samples_up_to_the_last_prompt_that_was_needed_count_and_no_others(tmp_path):
    ledger = write(tmp_path, [IDS])
    ledger.discarded(GENERATE.ordinal, 1)
    ledger.close()
    assert [int(sample.ids[0]) for sample, _ in read_samples(tmp_path)] == IDS[:4]  # Two of each prompt.


def test_a_sample_of_the_last_prompt_that_was_needed_ends_as_any_other_and_later_ones_are_unused(tmp_path):
    ledger = write(tmp_path, [IDS])
    ledger.discarded(GENERATE.ordinal, 1)
    ledger.dropped(GENERATE, IDS, "late")
    ledger.close()
    with reading_ledger(tmp_path) as db:
        add_endings(db)
        assert dict(db.execute("SELECT id, ending FROM endings")) == dict(zip(IDS, ["dropped"] * 4 + ["unused"] * 2, strict=True))


def test_a_failed_call_stays_failed_and_has_the_error_of_the_earliest_cause_which_is_told_last(tmp_path):
    ledger = write(tmp_path, [IDS])
    ledger.call_added(SCORE)
    for state, error in (("failed", "of another"), ("failed", "of an earlier one"), ("done", None)):
        ledger.call_ended(SCORE.ordinal, state, error)
    assert ledger.select("SELECT state, error FROM calls") == [("failed", "of an earlier one")]
    ledger.close()


def test_a_failed_sample_is_counted_and_a_part_of_a_reward_that_is_named_like_a_failure_is_not(tmp_path):
    judge = replace(SCORE, options={**SCORE.options, "on_error": -1.0})
    journal = Journal(tmp_path, tensorboard=False)
    journal.open()
    journal.rewarded(judge, IDS[:3], [-1.0, -1.0, 0.5], [{"died": 1.0}, {"invalid": 1.0}, {"invalid": 1.0, "length": 7.0}])
    journal.rewarded(SCORE, IDS[3:4], [0.5], [{"died": 1.0}])
    journal.close()
    assert journal.num_failed == {("judge", "died"): 1, ("judge", "invalid"): 1}


def test_a_line_of_an_update_has_the_seconds_that_workers_were_idle_since_the_one_before_and_no_metric_is_a_time(tmp_path):
    update = replace(SCORE, method="update", role="policy", step=0)

    def idle(worker: str, **seconds: float) -> SpanBlock:
        counts = [(f"idle seconds, {cause}", value, 0) for cause, value in seconds.items()]
        return SpanBlock(worker, 0, [], [("running, policy", 3.0, 0), *counts])

    journal = Journal(tmp_path, tensorboard=False)
    journal.open()
    journal.spans(idle("rollout-0", tool=1.5, task=0.25))
    journal.spans(idle("rollout-1", tool=2.0))
    journal.call_done(update, {"loss": 0.5})
    journal.spans(idle("rollout-0", tool=1.75, task=0.25))
    journal.spans(idle("rollout-1", tool=0.5))  # It was restarted.
    journal.call_done(replace(update, step=1), {"loss": 0.25})
    journal.call_done(replace(update, step=2), {"loss": 0.125})
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("idle_s") for line in lines if "loss" in line["values"]] == [
        {"tool": 3.5, "task": 0.25},
        {"tool": 0.75, "task": 0.0},
        None,
    ]
    assert not [name for name in read_metrics(tmp_path) if "idle" in name]


def test_samples_and_rewards_that_are_told_twice_stay_as_they_were(tmp_path):
    ledger = write(tmp_path, [IDS, IDS], dict.fromkeys(IDS, 1.0), calls=(SCORE, SCORE))
    ledger.rewarded(SCORE, IDS, [2.0] * len(IDS))
    ledger.close()
    assert [rewards for _, rewards in read_samples(tmp_path)] == [[1.0]] * len(IDS)


def test_a_sample_that_is_trained_on_twice_in_an_epoch_is_an_error_and_in_two_epochs_is_not(tmp_path):
    ledger = write(tmp_path, [IDS])
    ledger.consumed(5, 0, IDS)
    ledger.consumed(5, 1, IDS)
    ledger.consumed(6, 0, IDS)
    with pytest.raises(InternalError, match="trained on twice in epoch 1 of call 5"):
        ledger.consumed(5, 1, IDS[:1])
    ledger.close()


def test_a_damaged_or_cut_segment_is_named_with_its_place(tmp_path):
    write(tmp_path, [IDS[:2], IDS[2:4], IDS[4:]]).close()
    path = tmp_path / "segments" / "a.seg"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) - 3] ^= 1
    for damaged in (bytes(flipped), whole[:-1], b""):
        path.write_bytes(damaged)
        with pytest.raises(EngineError, match=r"the segment .*a\.seg is damaged at byte"):
            samples_digest(tmp_path)


def test_a_segment_that_was_deleted_is_named_and_not_said_to_be_damaged(tmp_path):
    write(tmp_path, [IDS]).close()
    (tmp_path / "segments" / "a.seg").unlink()
    with pytest.raises(EngineError, match=r"the segment .*a\.seg is missing"):
        samples_digest(tmp_path)


def test_a_reader_sees_what_is_committed_while_the_writer_goes_on(tmp_path):
    ledger = write(tmp_path, [IDS[:2]])
    assert list(read_samples(tmp_path)) == []
    ledger.commit()
    ledger.samples_done(0, IDS[2:3], [1], [1], [0], ("a.seg", 0, 1, 0))
    assert len(list(read_samples(tmp_path))) == 2
    reader = sqlite3.connect(f"file:{tmp_path / 'ledger.db'}?mode=ro", uri=True)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("DELETE FROM samples")
    reader.close()
    ledger.close()


def test_calls_and_cursors_are_there_with_how_they_ended(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.open()
    for call in (SOURCE, GENERATE, SCORE):
        ledger.call_added(call)
    ledger.call_ended(GENERATE.ordinal, "done")
    ledger.call_ended(SCORE.ordinal, "failed", "it raised")
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        assert db.execute("SELECT name, state, error FROM calls").fetchall()[1:] == [
            ("policy.generate", "done", None),
            ("judge.score", "failed", "it raised"),
        ]
        assert db.execute("SELECT num_rows FROM cursors").fetchall() == [(3,)]
    db.close()


def test_a_ledger_is_opened_again_with_what_it_had(tmp_path):
    write(tmp_path, [IDS[:2]]).close()
    again = Ledger(tmp_path / "ledger.db")
    again.open()
    again.close()
    assert len(list(read_samples(tmp_path))) == 2


def test_nothing_is_written_to_a_ledger_after_what_a_full_disk_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.open()
    ledger.attempt_began(0, "", 0)
    ledger.commit(durably=True)
    ledger.before_commit.append(lambda: ledger.knows({"rollout-0.seg": 100}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "ledger.db-wal").stat().st_size + 4096, limits[1]))
    try:
        ledger.logged(1, "x" * 1_000_000, 1.0)
        with pytest.raises(HostError, match="can't write the ledger"):
            ledger.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(HostError, match="can't write the ledger"):
        ledger.logged(1, "after it", 1.0)
    with pytest.raises(HostError, match="can't write the ledger"):
        ledger.commit()
    ledger.attempt_ended(0, "the disk is full")
    with pytest.raises(HostError, match="can't write the ledger"):
        ledger.close()
    with reading_ledger(tmp_path) as db:
        assert db.execute("SELECT count(*) FROM logs").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM known").fetchone() == (0,), "what it says to be in the ledger is not"
        assert db.execute("SELECT reason FROM attempts").fetchone() == ("the disk is full",)


def test_the_records_of_a_run_are_read_where_nothing_may_be_made_beside_them() -> None:
    """As of another user's run, or on a disk that is mounted read-only."""
    user, nobody = os.geteuid(), 65_534
    with tempfile.TemporaryDirectory() as made:
        write(Path(made), [IDS]).close()
        os.chmod(made, 0o555)
        if user == 0:  # Root may write anywhere.
            os.seteuid(nobody)
        try:
            assert not os.access(made, os.W_OK, effective_ids=True)
            found = list(read_samples(Path(made)))
        finally:
            os.seteuid(user)
            os.chmod(made, 0o755)
        assert len(found) == len(IDS)


def test_the_records_of_a_run_are_read_whatever_its_directory_is_called(tmp_path: Path) -> None:
    run_dir = tmp_path / "50%25 done?" / "a#b"
    write(run_dir, [IDS]).close()
    assert [sample.ids.tolist() for sample, _ in read_samples(run_dir)] == [[one] for one in IDS]


@flow
def _filtered_after_a_refill() -> None:
    policy, judge, prompts = Policy("fake"), Reward(lambda s: float(s.num_tokens), name="judge"), Dataset([{"prompt": "a"}] * 9)
    for _ in steps(3):
        kept = policy.generate(prompts, n=2, max_new_tokens=8, count=3, score=judge, keep=lambda group: True)
        policy.update(kept.filter(lambda s: s.id.index == 0), loss=nll())


def test_what_is_filtered_of_a_refills_result_was_kept_by_the_refill(tmp_path: Path) -> None:
    run = Run(_filtered_after_a_refill, {}, FAKES, RunSettings(runs_dir=str(tmp_path)))
    assert read_refills(Path(run.execute().run_dir), 2) == (6, 6)


@flow
def _trained_twice() -> None:
    policy, judge, prompts = Policy("fake"), Reward(lambda s: float(s.num_tokens), name="judge"), Dataset([{"prompt": "a"}] * 9)
    for _ in steps(3):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=8)
        rewards = judge.score(responses)
        policy.update(responses, rewards)
        policy.update(responses, 100 + rewards)


def test_the_reward_of_a_step_is_that_of_the_line_that_reports_it_first(tmp_path: Path) -> None:
    done = Run(_trained_twice, {}, FAKES, RunSettings(runs_dir=str(tmp_path))).execute()
    told = read_metrics(done.run_dir)
    assert [reward for _, reward in told["update_2/reward"]] == [100 + reward for _, reward in told["reward"]]
    assert (done.reward_first, done.reward_last) == (told["reward"][0][1], told["reward"][-1][1])


@flow
def _rivals() -> None:
    one, two = (Policy("fake", name=name) for name in ("one", "two"))
    judge, prompts = Reward(lambda s: float(s.num_tokens), name="judge"), Dataset([{"prompt": "a"}] * 9)
    for _ in steps(3):
        responses = one.generate(prompts.take(3), n=2, max_new_tokens=8)
        rewards = judge.score(responses)
        one.update(responses, rewards)
        answers = two.generate(responses, max_new_tokens=8)
        two.update(answers, -100 - judge.score(answers), advantages="reinforce_pp")


def test_rewards_of_several_policies_are_told_apart(tmp_path: Path) -> None:
    run = Run(_rivals, {}, FAKES, RunSettings(runs_dir=str(tmp_path)))
    done = run.execute()
    told = {name: [reward for _, reward in read_metrics(done.run_dir)[name]] for name in ("one/reward", "two/reward")}
    assert run.tally.rewards == told
    assert (done.reward_first, done.reward_last) == (told["one/reward"][0], told["one/reward"][-1])
    shown = StringIO()
    show_summary(Console(file=shown, width=200), "rivals", done, run.tally)
    assert [line.split()[:2] for line in shown.getvalue().splitlines() if "/reward" in line] == [
        [name, f"{rewards[0]:.3f}"] for name, rewards in told.items()
    ]


@pytest.mark.parametrize("trained", [_trained_twice, _rivals])
def test_the_rewards_of_a_resumed_run_are_of_that_line_too(trained: Flow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_every(monkeypatch, 0.0)
    settings = RunSettings(runs_dir=str(tmp_path / "runs"))
    whole, images = imaged(trained, {}, FAKES, settings, tmp_path / "images", most=24)
    for image in images.paths[-3:]:
        again = resumed(trained, {}, FAKES, settings, image)
        assert (again.reward_first, again.reward_last) == (whole.reward_first, whole.reward_last)
