"""Real runs whose workers are killed, stopped and slowed at random, and whose controller is killed and resumed.

    python tests/support/chaos_run.py [--runs 10] [--flow scored|refilled|carried] [--model fake|flows/models/digits] [--seed 0]

Each run is disturbed at moments and in ways that its seed draws, until so many things have been done to it; it does not begin its last
step before that. What it leaves must be sound (`m2flow.micro.records.audit`), no process of it may be left, and where time is no part of
the flow's meaning its samples and weights must be those of a run that was left alone. Prints a line for each, and what was done in all;
ends with status 1 if a run failed. Disturbances follow the clock, so a seed says what is done, and only roughly when.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import programs
import psutil

from m2flow import Dataset, Policy, Reward, Sample, flow, op, steps
from m2flow.errors import M2FlowError
from m2flow.macro.flow import Flow
from m2flow.macro.session import Backend
from m2flow.micro.records.audit import audit
from m2flow.runner.run import Run
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

ROOT = Path(__file__).resolve().parents[2]
_LONGEST_S = 1200.0
"""Of one run, resumptions included."""
_GONE_S = 30.0
"""Until when the workers of a controller that was killed must have ended."""
_HELD_BY = "HELD_BY"
"""Names the file that a run waits for to be gone."""


def unhurried(sample: Sample) -> float:
    """Long enough for something to happen to it."""
    time.sleep(0.01)
    return float(len(sample.tokens) % 3)


@op(granularity="group")
def ranks(samples: list[Sample]) -> list[int]:
    return list(range(len(samples)))


def wait_if_held(is_last: bool) -> None:
    """The last step does not begin before enough was done to the run, however fast it is."""
    while is_last and os.environ.get(_HELD_BY) and Path(os.environ[_HELD_BY]).exists():
        time.sleep(0.01)


def differ(rewards: Sequence[float]) -> bool:
    return len(set(rewards)) > 1


PROMPTS = [{"prompt": f"{i}="} for i in range(64)]


@flow
def scored(model: str = "fake", num_steps: int = 6) -> None:
    policy, judge, prompts = Policy(model, init="pretrained" if model == "fake" else "random"), Reward(unhurried), Dataset(PROMPTS)
    for step in steps(num_steps):
        wait_if_held(step == num_steps - 1)
        responses = policy.generate(prompts.take(8), n=4, max_new_tokens=12)
        policy.update(responses, advantages=judge.score(responses) + ranks(responses), minibatch_size=4, epochs=2)


@flow
def refilled(model: str = "fake", num_steps: int = 4) -> None:
    policy, judge, prompts = Policy(model, init="pretrained" if model == "fake" else "random"), Reward(unhurried), Dataset(PROMPTS)
    for step in steps(num_steps):
        wait_if_held(step == num_steps - 1)
        responses = policy.generate(prompts, n=4, count=6, score=judge, max_new_tokens=12)
        policy.update(responses, judge.score(responses), minibatch_size=3)


@flow(staleness=1)
def carried(model: str = "fake", num_steps: int = 6) -> None:
    policy, judge, prompts = Policy(model, init="pretrained" if model == "fake" else "random"), Reward(unhurried), Dataset(PROMPTS)
    for step in steps(num_steps):
        wait_if_held(step == num_steps - 1)
        responses = policy.generate(prompts.take(8), n=4, max_new_tokens=24, oversample=1.5, late="carry")
        policy.update(responses, judge.score(responses))


FLOWS: dict[str, Flow] = {"scored": scored, "refilled": refilled, "carried": carried}
TIMED = {"carried"}
"""Flows of which time decides something: two runs need not have the same samples."""


def run_once(runs_dir: str, flow_name: str, model: str, resume: str) -> None:
    """One attempt at a run, in this process; says as JSON what it came to."""
    engine = "fake" if model == "fake" else "embedded"
    spec = ClusterSpec(
        placement="split",
        device="cpu",
        cores=4,
        rollout=RolloutSpec(engine=engine, workers=2, max_running=8, threads=1),
        train=TrainSpec(engine=engine, token_budget=200, threads=1),
        functions=FunctionSpec(workers=2, chunk=4),
    )
    settings = RunSettings(
        runs_dir=runs_dir,
        deterministic=True,
        checkpoint_steps=1,
        heartbeat_s=0.1,
        hung_after_s=4.0,
        restarts=1000,
        restart_wait_s=0.02,
        sample_attempts=1000,
        attempts=1000,
        retry_wait_s=0.02,
    )

    def up(backend: Backend) -> Backend:
        """The workers are up: now things may happen to them."""
        Path(f"{runs_dir}.up").touch()
        return backend

    run = Run(FLOWS[flow_name], {"model": model}, spec, settings, around=up, resume=Path(resume) if resume else None)
    try:
        summary = run.execute()
    except M2FlowError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        sys.exit(1)
    print(json.dumps({"samples": summary.samples_sha256, "weights": summary.weights_sha256, "run_dir": summary.run_dir}))


@dataclass
class Outcome:
    """What became of one disturbed run."""

    seed: int
    done: Counter[str] = field(default_factory=Counter)
    """What was done to it, and how often."""
    wall_s: float = 0.0
    wrong: str = ""
    """Empty: nothing."""

    def __str__(self) -> str:
        done = ", ".join(f"{count} x {what}" for what, count in sorted(self.done.items()))
        return f"seed {self.seed}: {'ok' if not self.wrong else 'WRONG: ' + self.wrong}  ({self.wall_s:.1f} s; {done or 'nothing done'})"


def attempt(runs_dir: Path, flow_name: str, model: str, resume: str = "", held_by: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--one", str(runs_dir), flow_name, model, resume]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), _HELD_BY: str(held_by or "")}
    return programs.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@functools.cache
def undisturbed(flow_name: str, model: str) -> dict[str, str]:
    """Samples and weights of a run that is left alone."""
    with tempfile.TemporaryDirectory() as runs_dir:
        said, _ = attempt(Path(runs_dir), flow_name, model).communicate(timeout=_LONGEST_S)
        found: dict[str, str] = json.loads(said.splitlines()[-1])
        return found


def disturbed(flow_name: str, model: str, seed: int, num_things: int, kept: Path | None = None) -> Outcome:
    """A run to which so many things are done. What is wrong with it is kept under `kept`."""
    rng, outcome, start = random.Random(seed), Outcome(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        runs_dir = Path(directory) / "runs"
        runs_dir.mkdir()
        try:
            said = _to_its_end(runs_dir, flow_name, model, rng, num_things, outcome)
            outcome.wrong = _wrong(said, flow_name, model)
        except (subprocess.TimeoutExpired, psutil.Error, AssertionError) as error:
            outcome.wrong = f"{type(error).__name__}: {error}"
        if outcome.wrong and kept is not None:
            shutil.copytree(runs_dir, kept / f"{flow_name}-{seed}", dirs_exist_ok=True)
    outcome.wall_s = time.monotonic() - start
    return outcome


def _to_its_end(runs_dir: Path, flow_name: str, model: str, rng: random.Random, num_things: int, outcome: Outcome) -> dict[str, str]:
    resume, deadline, up, held_by = "", time.monotonic() + _LONGEST_S, Path(f"{runs_dir}.up"), Path(f"{runs_dir}.held")
    held_by.touch()
    while True:
        up.unlink(missing_ok=True)
        process = attempt(runs_dir, flow_name, model, resume, held_by)
        try:
            workers = _disturb(process, up, held_by, rng, num_things, outcome)
            said, _ = process.communicate(timeout=max(deadline - time.monotonic(), 1.0))
        finally:
            process.kill()
        _, left = psutil.wait_procs(workers, timeout=_GONE_S)
        assert not left, f"the workers {[worker.pid for worker in left]} outlive their run"
        if process.returncode == -9:
            (run_dir,) = runs_dir.iterdir()
            resume = str(run_dir) if (run_dir / "ledger.db").exists() else ""
            if not resume:
                shutil.rmtree(run_dir)
            continue
        last = said.splitlines()[-1] if said else "{}"
        assert process.returncode == 0, f"status {process.returncode}: {said[-1500:]}"
        found: dict[str, str] = json.loads(last)
        return found


def _disturb(
    process: subprocess.Popen[str], up: Path, held_by: Path, rng: random.Random, num_things: int, outcome: Outcome
) -> list[psutil.Process]:
    """Do things to a run and its workers until it ends, or enough was done; all the workers that there were."""
    known: dict[int, psutil.Process] = {}
    me, deadline, next_s = psutil.Process(process.pid), time.monotonic() + _LONGEST_S, 0.0
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
        try:
            workers = me.children()
        except psutil.Error:
            break
        known.update({worker.pid: worker for worker in workers})
        if sum(outcome.done.values()) < num_things and workers:
            held_by.touch()
        else:  # Without workers the program must go on, to hear that the attempt has failed and begin the next.
            held_by.unlink(missing_ok=True)
            continue
        if not up.exists() or time.monotonic() < next_s:
            continue
        what = rng.choices(["kill", "stop", "slow", "hang", "kill the controller"], [5, 3, 2, 1, 1])[0]
        with contextlib.suppress(psutil.Error):  # It has ended meanwhile.
            _do(what, process, rng.choice(workers), rng)
            outcome.done[what] += 1
        next_s = time.monotonic() + rng.uniform(0.02, 0.6)
    for worker in known.values():
        with contextlib.suppress(psutil.Error):
            worker.resume()  # What is stopped can't see that its controller is gone.
    return list(known.values())


def _do(what: str, process: subprocess.Popen[str], worker: psutil.Process, rng: random.Random) -> None:
    match what:
        case "kill":
            worker.kill()
        case "stop":
            worker.suspend()
            time.sleep(rng.uniform(0.1, 1.5))
            worker.resume()
        case "slow":
            for _ in range(20):
                worker.suspend()
                time.sleep(0.04)
                worker.resume()
                time.sleep(0.01)
        case "hang":
            worker.suspend()
        case _:
            process.kill()


def _wrong(said: dict[str, str], flow_name: str, model: str) -> str:
    found = audit(Path(said["run_dir"]))
    if not found.is_sound:
        return f"its record is broken:\n{found}"
    if flow_name not in TIMED:
        whole = undisturbed(flow_name, model)
        for what in ("samples", "weights"):
            if said[what] != whole[what]:
                return f"its {what} are not those of a run that was left alone"
    return ""


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        run_once(*sys.argv[2:6])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--flow", choices=list(FLOWS), action="append")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--things", type=int, default=8, help="things that are done to each run")
    parser.add_argument("--keep", type=Path, help="where runs go with which something is wrong")
    asked = parser.parse_args()
    total: Counter[str] = Counter()
    num_wrong = 0
    for flow_name in asked.flow or FLOWS:
        for seed in range(asked.seed, asked.seed + asked.runs):
            outcome = disturbed(flow_name, asked.model, seed, asked.things, asked.keep)
            print(f"{flow_name:9} {outcome}", flush=True)
            total += outcome.done
            num_wrong += bool(outcome.wrong)
    print(json.dumps({"wrong": num_wrong, "done": dict(total)}))
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
