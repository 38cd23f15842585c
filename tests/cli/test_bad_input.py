"""What goes wrong in a run: each ends with a message that says what, where and what now, with a status, and with nothing left behind.

Real runs in processes of their own. Where the model does not matter, a fake one saves the seconds that loading torch takes.
"""

import contextlib
import json
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import programs
import psutil
import pytest

from m2flow.micro.records.ledger import read_samples

DIGITS = Path(__file__).parents[2] / "flows" / "models" / "digits"
FAKES = "rollout: {engine: fake}\ntrain: {engine: fake}\n"
FLOW = """
import time
from m2flow import Dataset, Policy, Reward, flow, op, steps

def good(sample): return 1.0
def raises(sample): raise ValueError("no judge at home")
def nan(sample): return float("nan")
def nothing(sample): return None
def several(sample): return [1.0, 2.0]
def hangs(sample):
    open("hanging", "w").close()
    time.sleep(1000)

@op(granularity="group")
def too_few(group): return [1.0]

@flow
def bad(
    reward: str = "good", num_steps: int = 2, model: str = "fake", timeout_s: float = 1000, prompt: str = "12=", num_prompts: int = 4
):
    print("the flow speaks")
    policy = Policy(model, init="random")
    judge = Reward(globals()[reward], timeout_s=timeout_s)
    prompts = Dataset([{"prompt": prompt}] * num_prompts, name="problems")
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=8)
        if reward == "too_few":
            too_few(responses)
        else:
            judge.score(responses)
        policy.update(responses)
"""
SCORE_LINE = "judge.score(responses)"
NUM_TRIES = 5


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with the flow and specs; afterwards no worker of a run that began here is alive."""
    (tmp_path / "bad.py").write_text(FLOW)
    (tmp_path / "fakes.yaml").write_text(FAKES)
    (tmp_path / "split.yaml").write_text(FAKES + "placement: split\n")
    yield tmp_path
    deadline = time.monotonic() + 240
    while workers(tmp_path):  # They end by themselves, a moment after a run that was killed.
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers(place: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if "m2flow.micro.worker.worker_process" in process.cmdline() and process.cwd() == str(place):
                found.append(process)
        except psutil.Error:
            continue
    return found


def segments(processes: list[psutil.Process]) -> set[Path]:
    """The shared memory that these processes have mapped."""
    maps = (Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
    return {Path(path) for text in maps for path in re.findall(r"/dev/shm/m2flow\S+", text)}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "m2flow", "run", "bad.py", *arguments]


def run(place: Path, *arguments: str, status: int) -> str:
    """Standard error of a run that must end with this status and without a traceback of ours."""
    done = programs.run(command(*arguments), cwd=place)
    assert done.returncode == status, done.stdout + done.stderr
    assert not done.stderr.startswith("Traceback")
    assert "\nTraceback" not in done.stderr
    return done.stderr


def run_dir(place: Path) -> Path:
    (found,) = (place / "runs").iterdir()
    return found


def states_of_updates(place: Path) -> list[str]:
    """Of those that have trained on something."""
    with contextlib.closing(sqlite3.connect(run_dir(place) / "ledger.db")) as db:
        return [state for (state,) in db.execute("SELECT state FROM calls WHERE ordinal IN (SELECT update_call FROM consumption)")]


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run without an end."""
    return programs.Popen(
        command("--num-steps", "1000000", *arguments),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


TRAINED = r"step [1-9].* samples/s"
"""A line of a run that has done a step: all of its workers are up. Before that, one that takes long to come up tells so."""


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """The lines up to what matches it, which may be on several of them."""
    assert process.stdout is not None
    seen = ""
    while not re.search(pattern, " ".join(seen.split())):
        line = process.stdout.readline()
        assert line, seen
        seen += line
    return seen


def test_a_run_that_goes_well_ends_with_json_alone_on_stdout(place: Path) -> None:
    done = programs.run(command("--cluster", "split.yaml", "--json"), cwd=place)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    summary = json.loads(line)
    assert list(summary) == [
        "run_dir", "steps", "steps_asked", "ended_early", "samples", "tokens", "left_out", "calls_failed", "reward_first", "reward_last",
        "wall_s", "tokens_per_s", "samples_per_s", "busy_s", "channels", "calls_lowered", "calls_reused", "samples_sha256",
        "weights_sha256",
    ]  # fmt: skip
    assert [summary[name] for name in ("steps", "steps_asked", "ended_early", "samples")] == [2, 2, "", 16]
    assert (summary["calls_lowered"], summary["calls_reused"]) == (4, 4)
    assert f"m2flow view {summary['run_dir']}" in done.stderr
    assert "bad: split on cluster" in done.stderr
    assert "the flow speaks" in done.stderr


@pytest.mark.parametrize(
    ("reward", "message", "mode"),
    [
        ("raises", "the reward function raises raised ValueError on sample p", "planned"),
        ("raises", "the reward function raises raised ValueError on sample p", "eager"),
        ("nan", "the reward nan returned nan on sample p", "planned"),
        ("nothing", "the reward nothing returned NoneType: None on sample p", "planned"),
        ("several", "the reward several returned list: [1.0, 2.0] on sample p", "eager"),
        ("hangs", "the reward function hangs took longer than 1 s on sample p", "planned"),
    ],
)
def test_a_reward_that_gives_no_number_is_named_with_its_sample_and_line(place: Path, reward: str, message: str, mode: str) -> None:
    options = ["--eager"] if mode == "eager" else []
    options += ["--timeout-s", "1"] if reward == "hangs" else []
    said = run(place, "--reward", reward, "--cluster", "fakes.yaml", "--quiet", *options, status=1)
    assert re.search(rf"(?m)^RewardError: bad\.py:\d+  {re.escape(SCORE_LINE)}\n", said), said
    assert message in said
    assert ("Raise timeout_s" if reward == "hangs" else "0.0 for what can't be judged") in said
    assert f"samples so far are in {run_dir(place).relative_to(place)}" in said


def test_an_op_that_returns_the_wrong_count_is_named(place: Path) -> None:
    said = run(place, "--reward", "too_few", "--cluster", "fakes.yaml", "--quiet", status=1)
    assert re.search(r"(?m)^OpError: bad\.py:\d+  too_few\(responses\)\n", said)
    assert "too_few returned [1.0] for the group of prompt" in said
    assert "which has 2 samples" in said


def test_an_empty_dataset_is_refused_before_anything_starts(place: Path) -> None:
    said = run(place, "--num-prompts", "0", status=1)
    assert said.startswith("DatasetError: ")
    assert "the dataset 'problems' has no rows" in said
    assert not (place / "runs").exists()


def test_a_missing_model_is_named(place: Path) -> None:
    said = run(place, "--model", "nowhere/at/all", "--quiet", status=1)
    assert said.startswith("ModelError: there is no model at nowhere/at/all\n")
    assert "Give the directory of a Hugging Face model" in said


def test_a_broken_model_is_named(place: Path) -> None:
    (place / "broken").mkdir()
    for file in DIGITS.iterdir():
        (place / "broken" / file.name).write_bytes(file.read_bytes())
    (place / "broken" / "config.json").write_text('{"model_type":')
    said = run(place, "--model", "broken", "--quiet", "--eager", status=1)
    assert said.startswith("ModelError: ")
    assert "broken/config.json" in said


def test_a_prompt_longer_than_the_context_is_named_with_its_sample_and_line(place: Path) -> None:
    said = run(place, "--model", str(DIGITS), "--prompt", "1" * 80, "--quiet", status=1)
    assert re.search(r"(?m)^PromptTooLong: bad\.py:\d+  responses = policy\.generate", said)
    assert "no room for a response in the context of 64" in said
    assert "Shorten the prompt" in said


def test_a_port_in_use_is_named_with_how_to_find_who_has_it(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (place / "port.yaml").write_text(FAKES + f"channels: {{transport: tcp, port: {port}}}\n")
        said = run(place, "--cluster", "port.yaml", "--quiet", status=2)
    assert said.startswith(f"PortInUse: port {port} of 127.0.0.1 is taken by another program\n")
    assert "ss -ltnp" in said


@pytest.mark.parametrize("victim", ["rollout", "train"])
def test_a_run_goes_on_when_a_worker_is_killed_and_says_so(place: Path, victim: str) -> None:
    with start(place, "--cluster", "split.yaml") as process:
        read_until(process, TRAINED)
        alive = workers(place)
        shared = segments(alive)
        log = run_dir(place) / "logs" / f"{victim}-0.log"
        target = next(w for w in alive if Path(f"/proc/{w.pid}/fd/1").resolve() == log)
        target.kill()
        goes_on = "it is started again" if victim == "rollout" else "the run goes on from"
        said = read_until(process, rf"warning: the worker {victim}-0 .*was killed by signal 9 \(pid {target.pid}\).*; {goes_on}")
        said += read_until(process, "samples/s")
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=240)[0]
    assert process.returncode == 130, rest
    assert "Traceback" not in said + rest
    assert sum(1 for _ in read_samples(run_dir(place))) >= 8
    assert shared
    assert not [path for path in shared if path.exists()]


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")])
def test_an_interrupted_run_stops_in_order_and_says_what_is_on_disk(place: Path, number: signal.Signals, name: str) -> None:
    with start(place, "--cluster", "split.yaml") as process:
        read_until(process, TRAINED)
        shared = segments(workers(place))
        process.send_signal(number)
        said = process.communicate(timeout=240)[0]
    assert process.returncode == 130, said
    assert "stopping the workers; Ctrl-C once more ends at once" in said
    assert f"RunInterrupted: stopped by {name} in step" in said
    assert set(states_of_updates(place)) == {"done"}
    assert "Traceback" not in said
    assert f"m2flow view {run_dir(place).relative_to(place)}" in said
    assert f"to go on: m2flow run --resume {run_dir(place).relative_to(place)}" in said
    assert sum(1 for _ in read_samples(run_dir(place))) >= 8
    assert workers(place) == []
    assert not [path for path in shared if path.exists()]


def test_the_commands_that_a_run_names_can_be_given_to_a_shell_whatever_its_directory_is_called(place: Path) -> None:
    said = run(place, "--cluster", "fakes.yaml", "--runs-dir", "my runs' $HOME", "--set", "reward=raises", status=1)
    (made,) = (place / "my runs' $HOME").iterdir()
    for begin in (": m2flow view ", "to go on: m2flow run --resume "):
        (named,) = shlex.split(said.partition(begin)[2].splitlines()[0].partition("; to go on")[0])
        assert named == str(made.relative_to(place))
    done = programs.run(command("--cluster", "fakes.yaml", "--runs-dir", "other runs"), cwd=place)
    (made,) = (place / "other runs").iterdir()
    assert f" m2flow view '{made.relative_to(place)}'\n" in done.stdout + done.stderr


def test_a_run_takes_as_many_open_files_as_it_may_have(place: Path) -> None:
    """At the lower limit libzmq would end the controller or a worker without a word of ours."""
    limited = f"ulimit -Sn 24; exec {shlex.join(command('--cluster', 'split.yaml', '--quiet'))}"
    done = programs.run(["bash", "-c", limited], cwd=place)
    assert done.returncode == 0, done.stderr


def test_a_run_can_be_interrupted_while_its_workers_start(place: Path) -> None:
    with start(place, "--cluster", "split.yaml") as process:
        while not workers(place):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=240)[0]
    assert process.returncode == 130, said
    assert "RunInterrupted: stopped by Ctrl-C" in said
    assert "Traceback" not in said
    assert workers(place) == []


def test_a_second_interrupt_ends_at_once_and_the_workers_end_themselves(place: Path) -> None:
    said = "RunInterrupted"
    for _ in range(NUM_TRIES):  # One that had stopped its workers before it got the second signal has ended in order.
        if "RunInterrupted" not in said:
            break
        (place / "hanging").unlink(missing_ok=True)
        with start(place, "--cluster", "fakes.yaml", "--reward", "hangs") as process:
            while not (place / "hanging").exists():  # Then the worker is inside the reward, and will not hear that it should stop.
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            read_until(process, "stopping the workers")
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=240)[0]
    assert process.returncode == 130
    assert "ended at once; the ledger is written" in said
    assert "RunInterrupted" not in said
    assert "Traceback" not in said


def test_an_eager_run_can_be_interrupted_inside_a_reward(place: Path) -> None:
    with start(place, "--cluster", "fakes.yaml", "--reward", "hangs", "--eager") as process:
        while not (place / "hanging").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=240)[0]
    assert process.returncode == 130, said
    assert "RunInterrupted: stopped by Ctrl-C" in said
    assert "Traceback" not in said


def test_deterministic_eager_runs_set_the_environment_before_torch_is_loaded(place: Path) -> None:
    stand_in = "import os\nTensor, FOUND = object, (os.environ.get('MKL_CBWR'), os.environ.get('OMP_NUM_THREADS'))\n"
    stand_in += "class accelerator:\n    current_accelerator = staticmethod(lambda: 'some')\n"
    (place / "torch.py").write_text(stand_in + "def manual_seed(seed): ...\ndef get_rng_state(): ...\ndef set_rng_state(state): ...\n")
    (place / "bad.py").write_text("import torch\n" + FLOW.replace('print("the flow speaks")', 'print("FOUND", *torch.FOUND)'))
    done = subprocess.run(
        command("--cluster", "fakes.yaml", "--eager", "--deterministic", "--quiet"), cwd=place, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"FOUND \w+ 1$", done.stdout, re.MULTILINE), done.stdout
    assert "FOUND None" not in done.stdout


@pytest.mark.parametrize("way", ["moved", "removed"])
def test_a_run_whose_directory_is_taken_away_stops_and_says_so_and_loses_nothing(place: Path, way: str) -> None:
    elsewhere = place / "elsewhere"
    with start(place, "--cluster", "split.yaml") as process:
        read_until(process, TRAINED)
        directory = run_dir(place)
        directory.rename(elsewhere)
        if way == "removed":
            shutil.rmtree(elsewhere)
        said = process.communicate(timeout=240)[0]
    assert process.returncode == 1, said
    assert not directory.exists()
    assert workers(place) == []
    named = directory.relative_to(place)
    if way == "removed":
        assert f"HostError: the run directory {named} was removed while the run was going on\n" in said
        assert "--resume" not in said
        return
    assert f"HostError: the run directory {named} was moved to {elsewhere} while the run was going on\n" in said
    assert f"; to go on: m2flow run --resume {elsewhere}\n" in said
    assert sum(1 for _ in read_samples(elsewhere)) >= 8
