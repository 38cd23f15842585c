"""What the record of a run costs: the ledger for each step, and a checkpoint of a model that is trained.

    python benchmarks/ledger.py                                    1,024 samples of 256 + 1,024 tokens a step; a model of 25M parameters
    python benchmarks/ledger.py --groups 128 --group-size 16 --hidden 768 --layers 12

The ledger is driven as the controller drives it: calls, samples as they finish (8 at a time), rewards (64 at a time), consumption by
micro-batch, one commit. Its share is of a step of one second, which is short. A checkpoint is what the embedded trainer writes after
an AdamW step, its seal, and its commit; beside it a plain copy of as many bytes, synced, which no checkpoint can be faster than. The
best of the rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from training import PPO, make_samples, write_model

from m2flow.engines.contract import EngineSettings
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.macro.graph import Call, Granularity, Site
from m2flow.micro.records import checkpoints
from m2flow.micro.records.journal import Journal
from m2flow.recipe import AdamW, Model
from m2flow.samples import make_ids

_AT_A_TIME, _SCORED, _MICRO_BATCH = 8, 64, 64


def call(ordinal: int, method: str, step: int) -> Call:
    engine = {"generate": "rollout", "score": "function", "update": "train"}[method]
    site = Site("flows/grpo.py", 20 + ordinal % 3, f"policy.{method}(...)")
    return Call(ordinal, "policy", method, engine, Granularity.SAMPLE, (), {}, (), (), site, step, method != "update")  # type: ignore[arg-type]


def step_s(journal: Journal, step: int, groups: int, size: int) -> float:
    """Seconds that a step's record takes."""
    generate, score, update = (call(3 * step + i, method, step) for i, method in enumerate(("generate", "score", "update")))
    ids = make_ids(generate.ordinal, groups, size).tolist()
    start = time.perf_counter()
    for made in (generate, score, update):
        journal.record.called(made)
        journal.call_added(made)
    for i in range(0, len(ids), _AT_A_TIME):
        part = ids[i : i + _AT_A_TIME]
        numbers = [1280] * len(part), [1024] * len(part), [0] * len(part)
        journal.samples_done(generate, part, *numbers, ("rollout-0.seg", i * 10_000, 80_000, 12345), [])
    journal.call_done(generate, None)
    for i in range(0, len(ids), _SCORED):
        journal.rewarded(score, ids[i : i + _SCORED], [0.5] * len(ids[i : i + _SCORED]))
    journal.call_done(score, None)
    for i in range(0, len(ids), _MICRO_BATCH):
        journal.consumed(update, 0, ids[i : i + _MICRO_BATCH])
    journal.call_done(update, {"loss": 0.1, "reward": 0.5, "grad_norm": 1.0})
    journal.step_done(step)
    return time.perf_counter() - start


def measure_ledger(a: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        journal = Journal(Path(directory))
        journal.open()
        took = [step_s(journal, step, a.groups, a.group_size) for step in range(a.rounds)]
        journal.close()
    best, num_samples = min(took), a.groups * a.group_size
    return {
        "ledger_ms_a_step": round(best * 1e3, 2),
        "ledger_us_a_sample": round(best / num_samples * 1e6, 2),
        "ledger_percent_of_1_s": round(best * 100, 2),
    }


def measure_checkpoint(a: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as directory:
        write_model(model, a)
        engine = EmbeddedTrain(Model(model, init="random", seed=0), EngineSettings(threads=os.cpu_count() or 1))
        engine.start()
        few = argparse.Namespace(**{**vars(a), "prompts": 2, "group_size": 2})
        engine.accumulate(make_samples(few), PPO)
        engine.apply(AdamW(1e-4), 1.0)
        run_dir = Path(directory)
        (run_dir / "checkpoints").mkdir()
        best = dict.fromkeys(("save", "seal", "commit", "copy", "load_check"), float("inf"))
        for step in range(a.rounds):
            path = checkpoints.partial_path(run_dir, step, 0)

            def timed(name: str, start: float) -> float:
                now = time.perf_counter()
                best[name] = min(best[name], now - start)
                return now

            now = time.perf_counter()
            engine.save(str(path / "policy"))
            now = timed("save", now)
            checkpoints.seal(path / "policy")
            now = timed("seal", now)
            made = checkpoints.commit(path, checkpoints.Point(step, step, {"policy": step}))
            now = timed("commit", now)
            checkpoints.read(made.path)
            now = timed("load_check", now)
            size = sum(file.stat().st_size for file in made.path.rglob("*") if file.is_file())
            blank = os.urandom(1 << 20)
            now = time.perf_counter()
            with (run_dir / "copy").open("wb") as file:
                for _ in range(size >> 20):
                    file.write(blank)
                file.flush()
                os.fsync(file.fileno())
            timed("copy", now)
            checkpoints.keep_newest(run_dir, 1)
        engine.stop()
    trainer_s = best["save"] + best["seal"]
    return {
        "checkpoint_mb": round(size / 1e6, 1),
        **{f"{name}_ms": round(seconds * 1e3, 1) for name, seconds in best.items()},
        "trainer_mb_a_s": round(size / 1e6 / trainer_s, 1),
        "percent_of_10_minutes": round(trainer_s / 600 * 100, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8192)
    a = parser.parse_args()
    a.prompts, a.prompt_tokens, a.max_new, a.lengths = 2, 34, 16, "full"
    torch.manual_seed(0)
    found = measure_ledger(a) | measure_checkpoint(a)
    for name, value in found.items():
        print(f"{name:24} {value:>12,}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
