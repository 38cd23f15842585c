"""`m2flow run` on a terminal: the table lives while the flow runs, and the end says what to type next."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import programs
import pytest
from message_parts import lacks
from rich.console import Console
from terminal import shown_by

from m2flow import Dataset, Policy, flow
from m2flow.engines.contract import LOADING
from m2flow.micro.protocol.update_semantics import UpdateSteps
from m2flow.micro.records.accounting import Tally
from m2flow.micro.worker.eager_executor import EagerExecutor
from m2flow.runner.run import Run, Summary
from m2flow.runs.display import UpdatePace, change_of, logged, short_example, show_summary, stopping_text
from m2flow.spec import ClusterSpec, RolloutSpec, RunSettings, TrainSpec

FLOW = """
import os
import time
from pathlib import Path
from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, log, steps


def slowly(sample: Sample) -> float:
    deadline = time.monotonic() + 240
    while sample.id.call > 12 and not Path(os.environ["SEEN"]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)  # In the last step, until the table was seen.
    return float(sample.num_tokens)


@flow
def loop(num_steps: int = 4) -> None:
    policy, verifier = Policy("fake", init="random"), Reward(slowly, timeout_s=600.0)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(8)], shuffle=False)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=4, max_new_tokens=6)
        metrics = policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3))
        print("a line of the flow", step, float(metrics["reward"]) >= 0)
"""
CLUSTER = "placement: split\ndevice: cpu\ncores: 2\nrollout: {engine: fake}\ntrain: {engine: fake}\n"


@pytest.mark.slow
def test_the_table_lives_while_the_flow_runs_and_prints_of_the_flow_stay(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(FLOW)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    command = [sys.executable, "-m", "m2flow", "run", str(tmp_path / "loop.py"), "--cluster", str(tmp_path / "cluster.yaml")]
    seen = tmp_path / "seen"

    def look(text: str) -> None:
        if is_alive(text):
            seen.touch()

    environment = {**os.environ, "TERM": "xterm-256color", "SEEN": str(seen)}
    status, text = shown_by([*command, "--runs-dir", str(tmp_path / "runs")], env=environment, look=look)
    assert status == 0, text[-2000:]
    assert is_alive(text), text[-2000:]
    assert text.count("a line of the flow") == 4
    summary = text[text.rindex("done ") :]
    (run_dir,) = re.findall(r"run +(\S+/runs/loop-\S+)", summary)
    assert f"m2flow view {run_dir}" in summary
    assert f"m2flow analyze {run_dir}" in summary
    assert re.search(r"efficiency +\d+% of the bound", summary)


def is_alive(text: str) -> bool:
    """Frames told that a step was over, what a worker was at, and how long it would take."""
    _, *frames = text.split("step  ")
    return all(any(re.search(words, frame) for frame in frames) for words in (r"^\s*[123] / 4", r"functions-0 +slowly\.score", " left"))


def test_the_pace_goes_by_the_last_steps_and_a_step_that_takes_long_counts_already(monkeypatch: pytest.MonkeyPatch) -> None:
    tally, now_s = Tally(), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    paces = []
    for now_s, num_steps in ((10.0, 1), (11.0, 1), (12.0, 2), (16.0, 4), (17.0, 3)):
        tally.steps_done(num_steps)
        paces.append(tally.step_s(now_s))
    assert paces == [None, None, 2.0, 2.0, 2.0]
    assert tally.num_steps == 4
    assert tally.step_s(36.0) == 10.0


WARM = """
import os
import time
from pathlib import Path
from m2flow import AdamW, Dataset, Policy, flow, loss
from m2flow.recipe import Counts


def counted(counts: Counts) -> float:
    deadline = time.monotonic() + 240
    while counts.num_tokens > 9 and not Path(os.environ["SEEN"]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)  # In the last step, until a line has told of those before it.
    return float(counts.num_tokens)


@loss(needs=["logprobs"], denominator=counted)
def told(logprobs):
    return -logprobs


@flow
def warm() -> None:
    demos = Dataset([{"prompt": f"{i}=", "target": "1" * (4 if i < 3 else 30)} for i in range(4)], shuffle=False)
    Policy("fake", init="random").update(demos.take(4), loss=told, minibatch_size=1, optimizer=AdamW(1e-3))
"""


@pytest.mark.parametrize("how", [[], ["--eager"]])
def test_without_a_terminal_lines_tell_of_the_set_up_and_of_a_warm_starts_updates_and_loss(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "warm.py").write_text(WARM)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    seen = tmp_path / "seen"
    command = [sys.executable, "-m", "m2flow", "run", str(tmp_path / "warm.py"), "--cluster", str(tmp_path / "cluster.yaml"), *how]
    command += ["--setting", "fork_workers=false"]  # Forked ones are ready before a line is due.
    lines: list[str] = []
    environment = {**os.environ, "SEEN": str(seen)}
    with programs.Popen(
        [*command, "--runs-dir", str(tmp_path / "runs")], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(line)
            if re.search(r"update 3 of 4  loss \d", line):
                seen.touch()
    said = "".join(lines)
    assert run.returncode == 0, said
    assert seen.exists(), said
    if not how:  # In this process they load in no time.
        assert re.search(r"set-up: \d of \d workers ready  .*loads policy for train \(fake\)", said), said


@flow
def generates() -> None:
    Policy("fake", init="random").generate(Dataset([{"prompt": "1="}]).take(1), max_new_tokens=1)


def test_a_run_in_one_process_says_how_far_it_has_loaded_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec(device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"))
    run = Run(generates, {}, spec, RunSettings(eager=True, runs_dir=str(tmp_path)))
    seen: list[Mapping[str, str]] = []
    opened = EagerExecutor.open

    def slowly(executor: EagerExecutor) -> None:
        seen.extend(dict(run.starting) for _ in LOADING.counted(["one", "two", "three"]))
        seen.append(run.starting)
        opened(executor)

    monkeypatch.setattr(EagerExecutor, "open", slowly)
    run.execute()
    loads = "loads policy for rollout (fake)"
    steps_of = [f"{loads}: tensor {done} of 3 of model {LOADING.num_models}" for done in range(3)]
    assert [list(one.values()) for one in seen] == [[words, "starts"] for words in [*steps_of, loads]]


def test_an_evaluation_is_shown_with_its_interval_and_a_reward_that_is_shown_anyway_is_not_repeated() -> None:
    tally = Tally(
        rewards={"reward": [0.25]}, logs={"eval/avg": 0.5, "eval/avg low": 0.41, "eval/avg high": 0.59, "reward": 0.25, "cut off low": 3.0}
    )
    assert logged(tally) == [("eval/avg", "0.5 (0.41 to 0.59)"), ("cut off low", "3")]
    tally.logs["reward"] = 0.75
    assert ("reward", "0.75") in logged(tally)


@pytest.mark.parametrize(
    "opening",
    [
        "",
        "<|im_end|>\n<|im_start|>assistant\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<end_of_turn>\n<start_of_turn>model\n",
    ],
)
def test_the_example_of_a_chat_shows_the_question_and_not_the_markup_after_it(opening: str) -> None:
    assert short_example(f"Larger: 8 or 2?{opening}", "8") == "'Larger: 8 or 2?' -> '8'"


def test_the_time_that_an_update_has_left_goes_by_its_last_steps() -> None:
    pace = UpdatePace()
    said = [pace.text(UpdateSteps("policy.update", done, 10, loss), now_s) for now_s, done, loss in
            ((0.0, 0, math.nan), (5.0, 1, 2.0), (7.0, 3, 1.5), (8.0, 3, 1.5))]  # fmt: skip
    assert said == ["0 of 10", "1 of 10  loss 2  45.0 s left", "3 of 10  loss 1.5  16.3 s left", "3 of 10  loss 1.5  16.3 s left"]
    assert pace.text(UpdateSteps("policy.update", 1, 4, 1.0), 9.0) == "1 of 4  loss 1"


def test_an_interrupted_run_says_that_it_finishes_the_update_under_way() -> None:
    assert stopping_text(None).startswith("stopping the workers")
    assert stopping_text(UpdateSteps("policy.update", 4, 4, 1.0)).startswith("stopping the workers")
    said = stopping_text(UpdateSteps("policy.update", 120, 350, 1.0))
    assert not lacks(said, "finishing the update", "120 of 350", "then stopping the workers", "Ctrl-C")


EARLY = """
from m2flow import Best, Dataset, Policy, Reward, flow, steps


@flow
def early(num_steps: int = 12, patience: int = 2, until: int = 99) -> None:
    policy, reward = Policy("fake"), Reward(lambda sample: 1.0, name="one")
    prompts, best = Dataset([{"prompt": "1="}] * 2), Best(policy, patience=patience)
    for step in steps(num_steps):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=3)
        policy.update(responses, reward.score(responses))
        if best.stop(min(step, 2) / 4) or step == until:
            break
"""


@pytest.mark.parametrize(
    ("options", "steps", "why"),
    [
        ([], "5 of 12 steps", "Best(patience=2): the last 2 evaluations of policy brought nothing better than 0.5"),
        (["--until", "1"], "2 of 12 steps", "the flow left its loop"),
        (["--num-steps", "4"], "4 steps", ""),
    ],
)
def test_the_summary_says_of_how_many_steps_a_run_took_fewer_and_why(options: list[str], steps: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(EARLY)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    command = [sys.executable, "-m", "m2flow", "run", "early.py", "--eager", "--cluster", "cluster.yaml", *options]
    ran = programs.run(command, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert f"early: {steps} in " in ran.stdout
    assert re.findall(r"^stopped +(.*)", ran.stdout, re.MULTILINE) == ([why] if why else [])


@pytest.mark.parametrize(("num_steps", "is_said"), [(0, True), (3, False)])
def test_the_summary_of_a_flow_without_steps_says_so(num_steps: int, is_said: bool, tmp_path: Path) -> None:
    """A loop over `range` runs, and has no numbers by step."""
    done = Summary(str(tmp_path), num_steps, num_steps, "", 24, 84, {}, 0, None, None, 0.4, 196.0, 55.9, {}, {}, 0, 0, "", "")
    console = Console(file=io.StringIO(), width=200)
    show_summary(console, "by_range", done, Tally(num_steps=num_steps))
    assert ("no loop over steps(...)" in console.file.getvalue()) is is_said  # type: ignore[attr-defined]


VAIN = """
from m2flow import AdamW, Chat, Dataset, Policy, Reward, Sample, agent, flow, steps


@agent
async def player(chat: Chat, row: Sample) -> float:
    turn = await chat.say("go on", max_tokens=4)
    if row["fails"]:
        raise ValueError("the machine is gone")
    return float(len(turn.text))


def judged(sample: Sample) -> float:
    if sample["fails"]:
        raise ValueError("the machine is gone")
    return float(sample.num_tokens)


@flow
def vain(failing: int = 4, how: str = "mask", of: str = "episodes") -> None:
    policy, judge = Policy("fake", optimizer=AdamW(1e-3)), Reward(judged, on_error=0.0 if of == "rewards" else "raise")
    rows = Dataset([{"prompt": f"{i}", "fails": i < failing} for i in range(4)], shuffle=False)
    policy.update(Dataset([{"prompt": "1", "target": "2"}]).all())
    for _ in steps(2):
        if of == "rewards":
            responses = policy.generate(rows.take(4), n=2, max_new_tokens=4)
            policy.update(responses, judge.score(responses))
        else:
            episodes = policy.rollout(player, rows.take(4), n=2, max_tokens=20, failed=how)
            policy.update(episodes, episodes.reward)
"""


@pytest.mark.parametrize(
    ("of", "how", "why"),
    [
        ("episodes", "mask", r"none of its updates \(2\) had a token to train on"),
        ("episodes", "zero", r"each of its episodes \(16\) failed"),
        ("rewards", "zero", r"each of its rewards \(16\) failed"),
    ],
)
def test_a_run_in_which_everything_failed_ends_with_an_error(of: str, how: str, why: str, tmp_path: Path) -> None:
    """The warm start before the loop does not count; where some succeed, failures are what the flow says."""
    (tmp_path / "vain.py").write_text(VAIN)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    command = [sys.executable, "-m", "m2flow", "run", "vain.py", "--eager", "--cluster", "cluster.yaml", "--of", of, "--how", how]
    ran = programs.run(command, cwd=tmp_path)
    assert ran.returncode == 1, ran.stdout
    assert re.search(
        rf"FlowError: the run is over, and {why}\n +What became of each sample, and why: m2flow samples runs/vain-", ran.stderr
    )
    assert "done  " in ran.stdout
    some = programs.run([*command, "--failing", "2"], cwd=tmp_path)
    assert some.returncode == 0, some.stderr


def test_the_summary_tells_the_reward_by_means_over_tenths(tmp_path: Path) -> None:
    """Two single steps are noise."""
    done = Summary(str(tmp_path), 40, 40, "", 24, 84, {}, 0, 0.3, 0.2, 0.4, 196.0, 55.9, {}, {}, 0, 0, "", "")
    console = Console(file=io.StringIO(), width=200)
    rewards = [0.3, 0.1, 0.1, 0.1, *[0.4] * 32, 0.7, 0.7, 0.8, 0.2]
    show_summary(console, "noisy", done, Tally(num_steps=40, rewards={"reward": rewards}))
    assert re.search(r"reward +0\.150 -> 0\.600 \(means of the first and last 4 steps\)", console.file.getvalue())  # type: ignore[attr-defined]
    assert change_of([0.25, float("nan")]) == "0.25 -> 0.25 (first and last step)"
