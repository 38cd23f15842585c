"""The audit of a run's record: every kind of run passes, and each kind of damage is found by the check that looks for it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from m2flow import Dataset, Policy, Reward, Sample, flow, nll, open_run, reinforce, steps
from m2flow.cli.main import cli
from m2flow.errors import OpError, RewardError, SpecError
from m2flow.micro.records.audit import audit
from m2flow.micro.records.journal import Journal
from m2flow.micro.records.resume import read_resume_state
from m2flow.micro.records.rundir import reading_ledger
from m2flow.runner.run import Run
from m2flow.samples import SampleId
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

SPEC = ClusterSpec(
    placement="split",
    device="cpu",
    cores=2,
    rollout=RolloutSpec(engine="fake", workers=2, max_running=6),
    train=TrainSpec(engine="fake", token_budget=100),
    functions=FunctionSpec(chunk=3),
)
ROWS = [{"prompt": f"{i}=", "target": "x"} for i in range(40)]


def length(sample: Sample) -> float:
    return float(sample.num_tokens)


def breaks(sample: Sample) -> float:
    if sample.num_tokens > 25:
        raise ValueError("no")
    return 1.0


def is_long(sample: Sample) -> bool:
    return sample.num_tokens > 10


def differ(rewards: list[float]) -> bool:
    return len(set(rewards)) > 1


@flow
def plain(num_steps: int = 3) -> None:
    policy, judge, prompts = Policy("fake"), Reward(length), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=30)
        policy.update(responses, judge.score(responses), minibatch_size=2, epochs=2)
    judge.score(policy.generate(prompts.take(1), max_new_tokens=9))


@flow
def everything(num_steps: int = 2) -> None:
    """Demonstrations, a filter, a refill, an evaluation."""
    policy, judge, prompts, demos = Policy("fake"), Reward(length), Dataset(ROWS), Dataset(ROWS[:4], name="demos")
    policy.update(demos.all(), loss=nll())
    for _ in steps(num_steps):
        responses = policy.generate(prompts, n=2, count=3, score=judge, keep=differ, max_new_tokens=20)
        policy.update(responses, judge.score(responses))
        others = policy.generate(prompts.take(3), n=3, max_new_tokens=20)
        kept = others.filter(is_long)
        policy.update(kept, judge.score(kept), loss=reinforce())


@flow(staleness=1)
def carried(num_steps: int = 4) -> None:
    policy, judge, prompts = Policy("fake"), Reward(length), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(6), n=2, max_new_tokens=60, oversample=1.5, late="carry")
        policy.update(responses, judge.score(responses))


@flow(staleness=1)
def dropped(num_steps: int = 3) -> None:
    policy, judge, prompts = Policy("fake"), Reward(length), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(6), n=2, max_new_tokens=60, oversample=1.5, late="drop")
        policy.update(responses, judge.score(responses))


@flow
def failing() -> None:
    policy, judge, prompts = Policy("fake"), Reward(breaks), Dataset(ROWS)
    for _ in steps(3):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=30)
        policy.update(responses, judge.score(responses))


def run(flow_, tmp_path: Path, *, eager: bool = False) -> Path:  # type: ignore[no-untyped-def]
    made = Run(flow_, {}, SPEC, RunSettings(runs_dir=str(tmp_path), eager=eager))
    try:
        made.execute()
    except (OpError, RewardError):
        assert flow_ is failing
    return made.run_dir


@pytest.mark.parametrize("made", [plain, everything, failing], ids=lambda made: made.name)
def test_an_eager_run_is_sound(tmp_path, made):
    found = audit(run(made, tmp_path, eager=True))
    assert found.is_sound, str(found)


@pytest.mark.parametrize("made", [everything, carried, dropped, failing], ids=lambda made: made.name)
def test_a_planned_run_is_sound_and_its_samples_end_in_the_ways_of_its_flow(tmp_path, made):
    found = audit(run(made, tmp_path))
    assert found.is_sound, str(found)
    expected = {"everything": {"consumed", "filtered"}, "carried": {"consumed"}, "dropped": {"consumed"}, "failing": {"failed", "unused"}}
    assert expected[made.name] <= found.endings.keys(), str(found)
    assert sum(found.tokens.values()) > 0


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(plain, tmp_path_factory.mktemp("runs"), eager=True)


FIRST = SampleId(1, 0, 0).pack()
"""Of the first generation, which has call 1."""
UPDATE = 3
DAMAGES = {
    "a call of another name": ("UPDATE calls SET name='x' WHERE ordinal=1", "the calls are those"),
    "a call too few": ("DELETE FROM calls WHERE ordinal=2", "the calls are those"),
    "an unfinished call": ("UPDATE calls SET state='pending' WHERE ordinal=2", "a call that is done"),
    "a state that is none": ("UPDATE calls SET state='waiting' WHERE ordinal=2", "a call that is done"),
    "a failure without an error": ("UPDATE calls SET state='failed' WHERE ordinal=2", "a call that is done"),
    "an update left out": (f"UPDATE calls SET state='pending' WHERE ordinal={UPDATE}", "versions of weights"),
    "an epoch left out": (f"DELETE FROM consumption WHERE update_call={UPDATE} AND epoch=1", "an update trains"),
    "a sample left out": (f"DELETE FROM consumption WHERE sample={FIRST}", "an update trains"),
    "a sample left out of an epoch": (f"DELETE FROM consumption WHERE sample={FIRST} AND epoch=1", "an update trains"),
    "training on nobody": (f"INSERT INTO consumption VALUES ({UPDATE}, 0, {SampleId(1, 30, 0).pack()})", "an update trains"),
    "training by a reward": (f"INSERT INTO consumption VALUES (2, 0, {FIRST})", "an update trains"),
    "another index": (f"UPDATE samples SET member=1 WHERE id={FIRST}", "each sample is who"),
    "an index too many": (f"UPDATE samples SET id={SampleId(1, 0, 7).pack()}, member=7 WHERE id={FIRST}", "each sample is who"),
    "half a group": (f"DELETE FROM samples WHERE id={FIRST}", "results have whole groups"),
    "a group too few": ("DELETE FROM samples WHERE call=1 AND prompt=0", "results have whole groups"),
    "training on what was dropped": (f"INSERT INTO dropped VALUES ({FIRST}, 1, 'late')", "each sample ends once"),
    "training on what was not needed": ("INSERT INTO discarded VALUES (1, 2)", "each sample ends once"),
    "training on what was not finished": (f"UPDATE samples SET finish=2 WHERE id={FIRST}", "each sample ends once"),
    "a reward that is none": (f"UPDATE rewards SET value=9e999 WHERE sample={FIRST}", "each reward"),
    "a reward of nobody": (f"UPDATE rewards SET sample={SampleId(9, 0, 0).pack()} WHERE sample={FIRST}", "each reward"),
    "a reward by another": ("UPDATE rewards SET name='x' WHERE call=2", "each reward"),
    "no rewards": ("DELETE FROM rewards", "each reward"),
    "a reward too few": (f"DELETE FROM rewards WHERE sample={FIRST}", "each reward"),
    "a token too many": (f"UPDATE samples SET num_tokens=num_tokens+1 WHERE id={FIRST}", "the segments"),
    "a generated token too many": (f"UPDATE samples SET num_generated=num_generated+1 WHERE id={FIRST}", "the segments"),
    "a wrong checksum": (f"UPDATE samples SET checksum=checksum+1 WHERE id={FIRST}", "the segments"),
    "a record of others": (
        f"UPDATE samples SET (segment, offset, size, checksum) = (SELECT segment, offset, size, checksum FROM samples WHERE call=5 LIMIT 1)"
        f" WHERE id={FIRST}",
        "the segments",
    ),
    "old weights": (
        f"INSERT INTO decisions SELECT id, 9, x'{'91930b00c2'}' FROM samples WHERE id={FIRST}",
        "every token",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_by_the_check_that_looks_for_it(sound, tmp_path, damage):
    statement, check = DAMAGES[damage]
    shutil.copytree(sound, tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "ledger.db") as db:
        assert db.execute(statement).rowcount > 0
    db.close()
    found = audit(tmp_path / "run")
    assert any(broken.name.startswith(check) for broken in found.checks if not broken.holds), str(found)


def test_a_run_whose_resume_ended_before_it_repeated_anything_is_not_called_broken(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with sqlite3.connect(tmp_path / "run" / "ledger.db") as db:
        (update,) = db.execute("SELECT min(update_call) FROM consumption").fetchone()
        db.execute("UPDATE calls SET state='pending' WHERE ordinal=?", (update,))
        db.execute("UPDATE attempts SET ended=NULL, reason=NULL")
    db.close()
    resumed = Journal(tmp_path / "run", read_resume_state(tmp_path / "run", lambda said: None), keeps=True)
    resumed.open()
    resumed.close()
    with reading_ledger(tmp_path / "run") as db:
        assert db.execute("SELECT 1 FROM calls WHERE ordinal=?", (update,)).fetchone() is None
    (calls,) = [check for check in audit(tmp_path / "run").checks if check.name.startswith("the calls are")]
    assert calls.holds, calls


def test_a_configuration_that_is_cut_off_is_named(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "copy")
    file = tmp_path / "copy" / "config.json"
    file.write_bytes(file.read_bytes()[:-9])
    for read in (audit, lambda path: open_run(path).config):
        with pytest.raises(SpecError, match=r"config\.json does not say what the run was"):
            read(tmp_path / "copy")


def test_a_damaged_and_a_missing_segment_are_found(sound, tmp_path):
    for name, change in (("damaged", lambda path: path.write_bytes(path.read_bytes()[:-9])), ("missing", Path.unlink)):
        shutil.copytree(sound, tmp_path / name)
        (segment,) = (tmp_path / name).glob("segments/*.seg")
        change(segment)
        (broken,) = [check for check in audit(tmp_path / name).checks if not check.holds]
        assert "the segments" in broken.name


def test_doctor_prints_the_checks_of_a_run_and_ends_with_their_verdict(sound, tmp_path):
    told = CliRunner().invoke(cli, ["doctor", str(sound)])
    assert told.exit_code == 0, told.output
    assert "BROKEN" not in told.output
    assert "generated tokens:" in told.output
    shutil.copytree(sound, tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "ledger.db") as db:
        db.execute("DELETE FROM consumption WHERE epoch=1")
    db.close()
    told = CliRunner().invoke(cli, ["doctor", "run", "--runs-dir", str(tmp_path), "--json"])
    assert told.exit_code == 1
    assert json.loads(told.stdout)["is_sound"] is False
    assert "is broken" in told.stderr


def test_a_directory_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no run"):
        audit(tmp_path)
