"""What `--resume` says of runs that can't go on, and what it makes of damage."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
from click.testing import CliRunner, Result
from one_thread import OneThread, SteppedRun, commit_every, imaged, resumed
from resumed_runs import account, fake_cluster, loop

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, log, steps
from m2flow.cli.main import cli
from m2flow.errors import DivergenceError, RecordLost, RewardError, SpecError, StateLost, WorkerError
from m2flow.micro.controller.call_futures import CallFutures
from m2flow.micro.records.checkpoints import read
from m2flow.observe.metrics import read_metrics
from m2flow.runner.run import RetryLimit, Summary, hold_run_lock
from m2flow.runs.entrance import can_go_on
from m2flow.spec import RunSettings

SPEC = fake_cluster()


def settings(tmp_path: Path, how: str = "eager") -> RunSettings:
    return RunSettings(runs_dir=str(tmp_path / "runs"), eager=how == "eager", checkpoint_steps=1)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[dict[str, object], Path]:  # type: ignore[no-untyped-def]
    """What a whole run comes to, and its directory when it was killed in the third step."""
    tmp_path = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        commit_every(patch, 0.0)
        summary, images = imaged(loop, {}, SPEC, settings(tmp_path), tmp_path / "images")
    images_there = [path for path in images.paths if (path / "checkpoints" / "step-000002").exists()]
    third_step = [path for path in images_there if not (path / "checkpoints" / "step-000003").exists()]
    return dict(account(summary)), third_step[len(third_step) // 2]


@pytest.fixture
def image(killed, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    return Path(shutil.copytree(killed[1], tmp_path / "run"))


def go_on(image: Path, tmp_path: Path, program=loop) -> tuple[Summary, list[str]]:  # type: ignore[no-untyped-def]
    said: list[str] = []
    return SteppedRun(program, {}, SPEC, settings(tmp_path), resume=image, warn=said.append).execute(), said


def damage(file: Path) -> None:
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.unlink()  # It may be one file with another checkpoint's.
    file.write_bytes(bytes(body))


@pytest.mark.parametrize("what", ["policy/fake_train.json", "policy/m2flow_seal.json", "point.json", "missing"])
def test_a_checkpoint_that_is_damaged_is_passed_over_for_the_one_before(killed, image, tmp_path, what):
    newest = image / "checkpoints" / "step-000002"
    if what == "missing":
        (newest / "policy" / "fake_train.json").unlink()
    else:
        damage(newest / what)
    summary, said = go_on(image, tmp_path)
    assert account(summary) == killed[0]
    assert len(said) == 1
    assert "step-000002 is passed over" in said[0]
    assert read(newest).point.step == 1  # It was written anew.


def test_without_any_checkpoint_every_update_is_made_again_and_nothing_is_sampled_anew(killed, image, tmp_path):
    for path in (image / "checkpoints").iterdir():
        shutil.rmtree(path)
    summary, said = go_on(image, tmp_path)
    assert account(summary) == killed[0]
    assert said == []


def test_a_checkpoint_that_the_ledger_knows_nothing_of_is_passed_over(killed, image, tmp_path):
    (later,) = (killed[1].parent.parent / "runs").glob("*/checkpoints/step-000003")
    shutil.copytree(later, image / "checkpoints" / "step-000003")
    summary, said = go_on(image, tmp_path)
    assert account(summary) == killed[0]
    assert "does not have all that went into it" in said[0]


def test_a_damaged_segment_that_is_needed_is_named(image, tmp_path):
    for path in (image / "checkpoints").iterdir():
        shutil.rmtree(path)
    (segment,) = (image / "segments").glob("*.seg")
    damage(segment)
    with pytest.raises(RecordLost, match=r"the segment .*eager\.seg is damaged at byte") as raised:
        go_on(image, tmp_path)
    assert "Put the file back from a copy" in raised.value.now
    assert not can_go_on(raised.value)


def test_a_segment_that_was_deleted_is_said_to_be_missing_before_anything_is_begun(image, tmp_path):
    (segment,) = {path for path in (image / "segments").glob("*.seg") if path.stat().st_size}
    segment.unlink()
    with pytest.raises(SpecError, match=rf"1 of its segment files, which have its samples, are missing: {segment.name}"):
        go_on(image, tmp_path)
    assert not segment.exists()


def test_two_processes_never_write_one_run(image, tmp_path):
    with hold_run_lock(image), pytest.raises(SpecError, match=rf"the run in .* goes on by process {os.getpid()}"):
        go_on(image, tmp_path)
    go_on(image, tmp_path)
    with pytest.raises(SpecError, match="nothing to resume"):
        go_on(image, tmp_path)


def test_a_flow_that_was_changed_stops_at_the_first_line_that_differs(image, tmp_path):
    @flow
    def changed(num_steps: int = 3) -> None:
        policy = Policy("fake")
        for _ in steps(num_steps):
            policy.generate(Dataset([{"prompt": "1="}]).take(1), n=2, max_new_tokens=4)

    with pytest.raises(DivergenceError, match=r"call 0: .*dataset\.take .*recorded .*reference\.copy_of"):
        go_on(image, tmp_path, changed)


def judge_by(broken: Path, last_call: int) -> Callable[[Sample], float]:
    """A reward that fails after this call while the file is there."""

    def judge(sample: Sample) -> float:
        if broken.exists() and sample.id.call > last_call:
            raise ConnectionError("no answer")
        return float(sample.num_tokens)

    return judge


def test_a_run_that_failed_goes_on_when_what_failed_does_not_any_more(tmp_path):
    broken = tmp_path / "service-is-down"
    judge = judge_by(broken, 4)

    @flow
    def asks(num_steps: int = 3) -> None:
        policy, reward = Policy("fake"), Reward(judge)
        prompts = Dataset([{"prompt": f"{i}="} for i in range(7)])
        for _ in steps(num_steps):
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=5)
            metrics = policy.update(responses, reward.score(responses), optimizer=AdamW(1e-3))
            float(metrics["reward"])

    expected = account(SteppedRun(asks, {}, SPEC, settings(tmp_path / "whole")).execute())
    broken.touch()
    run = SteppedRun(asks, {}, SPEC, settings(tmp_path))
    with pytest.raises(RewardError, match="no answer"):
        run.execute()
    broken.unlink()
    summary, _ = go_on(run.run_dir, tmp_path, asks)
    assert account(summary) == expected


@pytest.mark.parametrize("how", ["planned", "eager"])
def test_logs_of_the_step_that_failed_are_neither_left_out_nor_written_twice(tmp_path, how):
    """One waits for what failed, and later ones of its step were written."""
    broken = tmp_path / "service-is-down"
    judge = judge_by(broken, 8)

    @flow
    def asks(num_steps: int = 3) -> None:
        policy, reward = Policy("fake"), Reward(judge)
        prompts = Dataset([{"prompt": f"{i}="} for i in range(7)])
        for step in steps(num_steps):
            log(began=float(step))
            responses = policy.generate(prompts.take(2), n=2, max_new_tokens=5)
            rewards = reward.score(responses)
            log(reward=rewards.mean(), at=float(step), length=responses.length.mean())
            policy.update(responses, rewards, optimizer=AdamW(1e-3))
            log(at=float(-step))

    def logs(run_dir: Path) -> tuple[list[object], int, object]:
        with contextlib.closing(sqlite3.connect(run_dir / "ledger.db")) as db:
            found = sorted(db.execute("SELECT * FROM logs").fetchall())
        return found, len((run_dir / "metrics.jsonl").read_text().splitlines()), read_metrics(run_dir)

    whole = SteppedRun(asks, {}, SPEC, settings(tmp_path / "whole", how)).execute()
    broken.touch()
    run = SteppedRun(asks, {}, SPEC, settings(tmp_path, how))
    with pytest.raises(RewardError, match="no answer"):
        run.execute()
    names = [name for _, name, _ in logs(run.run_dir)[0]]
    assert names.count("reward") < names.count("length")
    broken.unlink()
    resumed(asks, {}, SPEC, settings(tmp_path, how), run.run_dir)
    assert logs(run.run_dir) == logs(Path(whole.run_dir))


def test_a_worker_that_dies_while_all_come_up_again_is_one_more_loss_and_the_first_time_the_end(tmp_path, monkeypatch):
    dies = WorkerError("the worker rollout-0 (pid 7) was killed by signal 9")
    open_all, opened, events = OneThread.open, [], []

    def opens(self: OneThread) -> None:
        opened.append(self)
        if len(opened) == 2:
            raise dies
        open_all(self)

    def loses_the_trainer() -> None:
        events.append(1)
        if len(events) == 60:
            opened[0]._futures.end(StateLost("the worker train-0 was killed by signal 9"))
            CallFutures._wait(opened[0]._futures, lambda: False)  # It says so here, as wherever the flow waits.

    limits = settings(tmp_path, "planned").model_copy(update={"retry_wait_s": 0.0})
    expected = account(SteppedRun(loop, {}, SPEC, settings(tmp_path / "whole", "planned")).execute())
    with monkeypatch.context() as patch:
        patch.setattr(OneThread, "open", opens)
        summary = SteppedRun(loop, {}, SPEC, limits, hook=loses_the_trainer, warn=lambda said: None).execute()
        assert len(opened) == 3
        assert account(summary) == expected
        opened[:] = [opened[0]]
        with pytest.raises(WorkerError, match="rollout-0") as caught:
            SteppedRun(loop, {}, SPEC, limits).execute()
    assert caught.value is dies


def test_attempts_that_come_no_further_end_the_run_and_those_that_do_start_the_count_anew():
    lost = StateLost("the worker train-0 was killed", remote="its last words")
    attempts = RetryLimit(RunSettings(attempts=3, retry_wait_s=1.0))
    assert [
        attempts.record_failure(lost, 10),
        attempts.record_failure(lost, 10),
        attempts.record_failure(lost, 12),
        attempts.record_failure(lost, 11),
    ] == [1, 2, 1, 2]
    with pytest.raises(StateLost, match="has come this far 3 times, and no further") as caught:
        attempts.record_failure(lost, 12)
    assert caught.value.remote == "its last words"


# The command line

PROGRAM = """
from m2flow import AdamW, Dataset, Policy, Reward, flow, steps

def good(sample):
    return float(sample.num_tokens)

@flow
def tiny(num_steps: int = 2, kind: str = "x"):
    policy, prompts = Policy("fake"), Dataset([{"prompt": "1="}, {"prompt": "2="}])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(1), n=2, max_new_tokens=4)
        policy.update(responses, Reward(good, name=f"good_{_}").score(responses))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:  # type: ignore[no-untyped-def]
    folder: Path = tmp_path_factory.mktemp("ended")
    (folder / "tiny.py").write_text(PROGRAM)
    (folder / "cluster.yaml").write_text("{device: cpu, rollout: {engine: fake}, train: {engine: fake}}")
    command = [sys.executable, "-m", "m2flow", "run", "tiny.py", "--num-steps", "1", "--cluster", "cluster.yaml", "--quiet"]
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True, timeout=240)
    return folder


@pytest.fixture
def ended(place, monkeypatch) -> Path:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(place)
    return next(Path("runs").iterdir())


def said(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", *arguments])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "nothing to resume"),
        (["--seed", "0", "--num-steps", "1", "--cluster", "cluster.yaml"], "nothing to resume"),
        (["--seed", "3"], "--seed 3: the run was begun with seed 0, and goes on as it began"),
        (["--deterministic"], "--deterministic True: the run was begun with deterministic False"),
        (["--num-steps", "5"], "--num-steps 5: the run was begun with num_steps=1"),
        (["--kind", "y"], "--kind y: the run was begun with kind=its default"),
        (["--pin-plan"], "--pin-plan is for a new run, and --resume goes on with one"),
        (["--checkpoint-every", "0"], "--checkpoint-every: '0': it must be more than nothing"),
        (["--checkpoint-every", "soon"], "'soon' is no number of steps (20), no time (90s, 5m, 1h), not both (20,5m), and not `never`"),
    ],
)
def test_options_that_contradict_the_run_are_refused_by_name(ended, arguments, expected):
    refused = said("--resume", str(ended), *arguments)
    assert refused.exit_code == 2
    assert expected in refused.output


def test_a_run_that_is_not_resumed_is_not_said_to_have_no_samples(ended):
    refused = said("--resume", str(ended)).output
    assert "No sample was generated" not in refused
    assert f"What it had before is in {ended}." in refused


def test_what_is_no_run_is_not_resumed(ended, place, monkeypatch):
    assert "there is no run nowhere" in said("--resume", "nowhere").output
    (place / "other.py").write_text(PROGRAM)
    assert f"other.py is not the flow of {ended}, which is tiny.py" in said("other.py", "--resume", str(ended)).output
    Path("tiny.py").rename("gone.py")
    assert "Put it back as it was" in said("--resume", ended.name).output
    monkeypatch.chdir(place.parent)
    assert f"Begin in {place}" in said("--resume", str(place / ended)).output


@pytest.mark.parametrize("mode", ["--eager", "--no-eager"])
def test_a_flow_that_was_edited_is_refused_with_its_line_before_anything_starts_and_says_to_put_it_back(mode, tmp_path):
    text = """
from m2flow import Dataset, Policy, Reward, flow, steps

@flow
def edited() -> None:
    policy, reward, prompts = Policy("fake"), Reward(lambda sample: 1.0, name="one"), Dataset([{"prompt": f"{i}="} for i in range(9)])
    for _ in steps(3):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
        rewards = reward.score(responses)
        if float(rewards.mean()) > 0:
            raise RuntimeError("stops here")
        policy.update(responses, rewards)
"""
    file, cluster = tmp_path / "edited.py", tmp_path / "fakes.yaml"
    file.write_text(text)
    cluster.write_text("cores: 2\ndevice: cpu\nrollout: {engine: fake}\ntrain: {engine: fake}\n")

    def m2flow(*arguments: str) -> subprocess.CompletedProcess[str]:
        """An eager run begins its process anew where torch is loaded already, as it may be in this one."""
        command = [sys.executable, "-m", "m2flow", "run", *arguments, "--quiet"]
        return programs.run(command, timeout=240)

    begun = m2flow(str(file), "--cluster", str(cluster), "--runs-dir", str(tmp_path / "runs"), *(["--eager"] if mode == "--eager" else []))
    assert begun.returncode != 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    file.write_text(text.replace("n=2", "n=3"))
    answer = m2flow("--resume", str(run_dir))
    said = answer.stdout + answer.stderr
    assert answer.returncode != 0
    assert "DivergenceError" in said
    assert "n=3, max_new_tokens=6" in said
    assert "Put back what was changed, and resume" in said
    assert "plan FLOW --out" not in said
    assert "to go on" not in said


def test_of_a_run_whose_ledger_found_no_room_nobody_says_that_it_goes_on(tmp_path: Path) -> None:
    flow_file = Path(__file__).parents[3] / "flows" / "grpo.py"
    limited = ["bash", "-c", 'ulimit -f 32; exec "$@"', "-", sys.executable, "-m", "m2flow", "run", str(flow_file)]
    begun = programs.run([*limited, "--runs-dir", str(tmp_path)], timeout=240)
    said = begun.stdout + begun.stderr
    assert "HostError: can't write the records of the run" in said
    assert "No sample was generated yet" in said
    assert "to go on" not in said
    (run_dir,) = tmp_path.iterdir()
    resumed = programs.run([sys.executable, "-m", "m2flow", "run", "--resume", str(run_dir)], timeout=240)
    assert "begin it anew" in resumed.stderr
