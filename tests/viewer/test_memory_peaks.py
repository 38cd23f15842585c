"""The most memory that workers took: said by them, told by step, beside what the plan counts."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path

import msgspec
from click.testing import CliRunner
from observed_run import record_run, store_run

from m2flow.cli.main import cli
from m2flow.micro.protocol.cost_terms import EngineId, Footprint, Layout
from m2flow.micro.protocol.plan import Choice, EngineSlot, Placement, WorkerPlan
from m2flow.micro.worker.engine_host import PEAKS, EngineHost, Gauges
from m2flow.micro.worker.out_of_memory import peak_bytes
from m2flow.observe.spans import Recorder
from m2flow.viewer.analysis import memory_of, predicted_bytes
from m2flow.viewer.run_trace import RunTrace

MS = 1_000_000
ROLLOUT = Footprint(weights=10, kv=30, activations=5)
TRAIN = Footprint(weights=10, gradients=10, optimizer=20, activations=50, host=7)
SLOTS = (EngineSlot("policy", "rollout", "embedded"), EngineSlot("policy", "train", "embedded"))


def choice(*, tp: int = 1, is_swapped: bool = False) -> Choice:
    placements = tuple(
        Placement(EngineId("policy", kind), (), "", 0, tp, Layout(tp=tp), 1, need, "device-0", "time-shared", is_swapped)  # type: ignore[arg-type]
        for kind, need in (("rollout", ROLLOUT), ("train", TRAIN))
    )
    return Choice("f", "here", "time-shared", placements, 1.0, (), (), True, 0.0, "", (), 0.0, {}, {})


def test_the_plan_counts_who_works_in_a_turn_and_what_the_others_keep_meanwhile() -> None:
    on_gpu = WorkerPlan("device-0", "cuda:0", 1, SLOTS, "device-0")
    assert predicted_bytes(on_gpu, choice()) == TRAIN.device_bytes + ROLLOUT.weights
    assert predicted_bytes(on_gpu, choice(is_swapped=True)) == TRAIN.device_bytes
    alone = msgspec.structs.replace(on_gpu, engines=SLOTS[:1], lease="")
    assert predicted_bytes(alone, choice()) == ROLLOUT.device_bytes


def test_on_a_cpu_all_cores_are_one_process_with_what_is_put_away_in_it() -> None:
    on_cpu = WorkerPlan("device-0", "cpu", 2, SLOTS, "device-0")
    assert predicted_bytes(on_cpu, choice(tp=2, is_swapped=True)) == 2 * (TRAIN.device_bytes + TRAIN.host + ROLLOUT.kept_bytes)


def test_nothing_is_predicted_of_processes_that_are_not_the_workers_own() -> None:
    served = WorkerPlan("rollout-0", "cuda:0", 1, (EngineSlot("policy", "rollout", "sglang"),))
    assert predicted_bytes(served, choice()) is None
    assert predicted_bytes(WorkerPlan("functions-0", "cpu", 1, (EngineSlot("*", "function", "python"),)), choice()) is None


def told(run_dir: Path) -> Path:
    """A run of three steps in which one worker takes more in the second."""
    blocks = record_run(num_steps=3)
    trainer = Recorder("trainer-0")
    for block in blocks:
        trainer.anchor_ns = block.anchor_ns
    store_run(run_dir, blocks)
    trace = RunTrace(run_dir)
    trace.refresh()
    for step, peak in zip(trace.steps, (100, 300, 300), strict=True):
        trainer.count(PEAKS["host"], float(peak << 20), step.end - MS - trainer.anchor_ns)
    store_run(run_dir, [trainer.drain()])
    return run_dir


def test_each_step_has_the_peak_so_far(tmp_path: Path) -> None:
    trace = RunTrace(told(tmp_path))
    trace.refresh()
    (found,) = memory_of(trace)
    assert (found.worker, found.of, found.predicted) == ("trainer-0", "host", None)
    assert found.steps == [100 << 20, 300 << 20, 300 << 20]
    assert found.peak == 300 << 20


def test_analyze_shows_what_workers_took(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    run = told(tmp_path / "run")
    done = CliRunner().invoke(cli, ["analyze", str(run), "--no-suggest"])
    assert done.exit_code == 0, done.output
    (line,) = (line for line in done.stdout.splitlines() if "300.00 MiB" in line)
    assert line.split() == ["trainer-0", "host", "300.00", "MiB", "100.00", "MiB"]
    shown = json.loads(CliRunner().invoke(cli, ["analyze", str(run), "--no-suggest", "--json"]).stdout)
    assert shown["analysis"]["memory"][0]["steps"] == [100 << 20, 300 << 20, 300 << 20]


def test_a_worker_says_the_most_that_its_process_has_taken_and_again_only_when_it_is_more() -> None:
    recorder = Recorder("rollout-0")
    engine_host = EngineHost((), {}, {}, run_seed=0, recorder=recorder, shared_prefix="")
    gauges = Gauges(recorder, engine_host)
    before, of = peak_bytes()
    gauges.record({})
    held = bytearray(b"1") * (64 << 20)
    gauges.record({})
    gauges.record({})
    said = [value for name, value, _ in recorder.drain().counts if name == PEAKS[of]]
    assert said[0] >= before
    assert said == sorted(set(said))
    assert said[-1] <= peak_bytes()[0] + (1 << 20)
    assert len(held) == 64 << 20


def test_what_was_taken_can_be_said_while_another_thread_loads_torch(monkeypatch) -> None:
    half_loaded = types.ModuleType("torch")
    half_loaded.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    half_loaded.__spec__._initializing = True
    monkeypatch.setitem(sys.modules, "torch", half_loaded)
    peak, of = peak_bytes()
    assert peak > 0
    assert of == "host"
