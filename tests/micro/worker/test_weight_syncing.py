"""Runs whose weights travel over every transport equal eager ones; what an engine then holds is compared, tensor by tensor."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import programs
import pytest
from device_files import file_memory

from m2flow import AdamW, Dataset, Policy, Reward, Sample, flow, steps
from m2flow.channels.weights import TRANSPORTS
from m2flow.channels.weights.device import CudaIpc
from m2flow.engines.contract import Capabilities, EngineSettings, RolloutEngine
from m2flow.errors import ChannelError, EngineError
from m2flow.micro.lowering.passes import plan_syncs
from m2flow.micro.protocol.plan import EngineSlot, WorkerPlan
from m2flow.micro.worker.engine_host import EngineHost
from m2flow.micro.worker.weight_sync import WeightSettings, WeightSyncs, weight_settings
from m2flow.observe.spans import Recorder
from m2flow.observe.store import read_spans
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec, RolloutSpec, TrainSpec, WeightsSpec
from m2flow.testing.fakes import FakeTrain
from m2flow.testing.world import run_eager, run_planned

SCRIPT = Path(__file__).parents[2] / "support" / "synced_run.py"
DIGITS = Path(__file__).parents[3] / "flows" / "models" / "digits"


def num_nines(sample: Sample) -> float:
    return float(str(sample.text).count("9"))


@flow(staleness=1)
def plain() -> None:
    policy, verifier = Policy("fake"), Reward(num_nines)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(9)])
    for _ in steps(3):
        responses = policy.generate(prompts.take(3), n=2, max_new_tokens=9)
        policy.update(responses, verifier.score(responses))


def cluster(transport: str, changes: str, placement: str = "split") -> ClusterSpec:
    return ClusterSpec(
        placement=placement,  # type: ignore[arg-type]
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", workers=2, max_running=3),
        train=TrainSpec(engine="fake", token_budget=60),
        weights=WeightsSpec.model_validate({"transport": transport, "changes": changes}),
    )


@pytest.mark.parametrize("placement", ["split", "time-shared"])
@pytest.mark.parametrize(
    ("transport", "changes"), [("shared memory", "auto"), ("file", "always"), ("file", "never"), ("broadcast", "always"), ("tcp", "always")]
)
def test_a_run_over_any_transport_equals_the_eager_one(transport: str, changes: str, placement: str) -> None:
    spec = cluster(transport, changes, placement)
    for order_seed in range(2):
        planned = run_planned(plain, {}, spec, order_seed=order_seed)
        assert planned.error == ""
        assert run_eager(plain, {}, spec, decisions=planned.decisions) == planned


@pytest.mark.parametrize(
    ("engine", "transport", "changes"),
    [
        ("fake", "broadcast", "always"),
        pytest.param("fake", "shared memory", "auto", marks=pytest.mark.slow),
        pytest.param("fake", "file", "always", marks=pytest.mark.slow),
        pytest.param("embedded", "broadcast", "always", marks=pytest.mark.slow),
        pytest.param("embedded", "shared memory", "auto", marks=pytest.mark.slow),
        pytest.param("embedded", "file", "auto", marks=pytest.mark.slow),
    ],
)
def test_real_processes_train_the_same_model_over_any_transport(engine: str, transport: str, changes: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "runs"), engine, transport, changes]
    said = programs.run(command, timeout=240)
    assert said.returncode == 0, said.stdout + said.stderr
    run_dir = Path(said.stdout.split()[-1])
    loads = [span for span in read_spans(run_dir) if span.name == "weights.load"]
    assert {(span.track.partition("/")[0], span.attributes["version"]) for span in loads} >= {
        (worker, version) for worker in ("rollout-0", "rollout-1") for version in (1, 2)
    }
    proved = [span for span in read_spans(run_dir) if span.name == "rollout.probe"]
    assert {span.track.partition("/")[0] for span in proved} == {"rollout-0", "rollout-1"}
    published = [span for span in read_spans(run_dir) if span.name == "weights.publish"]
    for span in loads + published:
        assert transport in str(span.attributes["transport"])
        assert int(str(span.attributes["num_bytes"])) > 0
        assert float(str(span.attributes["gb_per_s"])) >= 0
    assert not (run_dir / "weights").exists() or not list((run_dir / "weights").iterdir())
    trained = next(row for row in said.stdout.splitlines() if row.startswith("weights "))
    assert _FIRST.setdefault(engine, trained) == trained


_FIRST: dict[str, str] = {}
"""What the first transport of an engine gave."""


@flow
def half(rollout_dtype: str = "") -> None:
    policy = Policy(DIGITS, init="random", rollout_dtype=rollout_dtype or None)  # type: ignore[arg-type]
    verifier = Reward(num_nines)
    prompts = Dataset([{"prompt": f"{i * 7919 % 10000}="} for i in range(6)], shuffle=False)
    for _ in steps(2):
        responses = policy.generate(prompts.take(2), n=2, max_new_tokens=6)
        policy.update(responses, verifier.score(responses), optimizer=AdamW(1e-3))


@pytest.mark.parametrize("placement", ["split", "time-shared"])
def test_engines_that_hold_another_type_than_the_trainer_hold_its_weights_rounded(placement: str) -> None:
    spec = cluster("file", "always", placement).model_copy(
        update={"rollout": RolloutSpec(workers=2, max_running=3), "train": TrainSpec(token_budget=30)}
    )
    planned = run_planned(half, {"rollout_dtype": "bfloat16"}, spec, deterministic=True)
    assert planned.error == ""
    assert planned == run_eager(half, {"rollout_dtype": "bfloat16"}, spec, deterministic=True)
    assert planned != run_eager(half, {}, spec, deterministic=True)


class Holding(RolloutEngine):
    """A rollout engine that only takes weights: as they are, under other names, or wrongly."""

    name = "holding"
    capabilities = Capabilities(kind="rollout")

    def __init__(self, how: str = "right") -> None:
        self._how = how
        self._held: dict[str, Any] = {"w": np.zeros(3, np.int64)}
        self._version = 0

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def add(self, requests: object) -> None: ...
    def step(self) -> list[Any]:
        return []

    def abort(self, ids: object) -> list[Any]:
        return []

    def snapshot(self, ids: object) -> list[Any]:
        return []

    def progress(self) -> dict[int, int]:
        return {}

    @property
    def num_unfinished(self) -> int:
        return 0

    @property
    def version(self) -> int:
        return self._version

    def load_weights(self, tensors: Iterable[tuple[str, Any]], version: int, *, under_requests: bool = False) -> None:
        self._held = {name: np.asarray(tensor).copy() for name, tensor in tensors}
        self._version = version
        if self._how == "wrong":
            name = max(self._held)
            self._held[name].reshape(-1)[0] += 1

    def weights(self) -> Iterator[tuple[str, Any]]:
        if self._how == "fused":
            yield "fused", np.concatenate([tensor.reshape(-1) for tensor in self._held.values()])
        else:
            yield from self._held.items()


@pytest.fixture
def trainer() -> Iterator[FakeTrain]:
    trainer = FakeTrain(Model("fake"), EngineSettings())
    trainer.start()
    yield trainer
    trainer.stop()


@pytest.fixture(autouse=True)
def files_for_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setitem(TRANSPORTS, "cuda ipc", CudaIpc(file_memory(tmp_path_factory.mktemp("gpu"))))


def syncing(prefix: str, loads: str = "shared memory", directory: str = "") -> WeightSyncs:
    settings = WeightSettings(loads={"policy": loads}, publishes={"policy": (loads,)}, directory=directory, changes="always")
    return WeightSyncs(prefix, f"m2flow-test-{os.getpid()}-{prefix}", {"policy": Model("fake")}, settings, Recorder(prefix))


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_an_engine_that_holds_something_else_than_it_was_given_is_found_by_tensor(
    transport: str, trainer: FakeTrain, tmp_path: Path
) -> None:
    with closing(syncing("trainer", transport, str(tmp_path))) as ours, closing(syncing("rollout", transport, str(tmp_path))) as theirs:
        manifest = ours.publish("policy", 1, trainer)
        name = max(entry.name for entry in manifest.tensors)
        with pytest.raises(EngineError, match=rf"weights of policy differ between trainer and rollout .*: {name}"):
            theirs.load("policy", 1, manifest, Holding("wrong"))
        with pytest.raises(EngineError, match=rf"\(same process\): {name}"):
            ours.copy("policy", 1, trainer, Holding("wrong"))


@pytest.mark.parametrize("how", ["right", "fused"])
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_damage_is_found_at_each_load_whatever_the_engine_lists(transport: str, how: str, trainer: FakeTrain, tmp_path: Path) -> None:
    """The first load and a later one, on arrival or in what the engine holds."""
    with closing(syncing("trainer", transport, str(tmp_path))) as ours, closing(syncing("rollout", transport, str(tmp_path))) as theirs:
        engine = Holding(how)
        for version in (1, 2, 3):
            manifest = ours.publish("policy", version, trainer)
            if version < 3:
                theirs.load("policy", version, manifest, engine)
        entry = manifest.tensors[-1]
        wrong = entry.__class__(entry.name, entry.dtype, entry.shape, entry.offset, entry.checksum ^ 1)
        damaged = msgspec.structs.replace(manifest, tensors=(*manifest.tensors[:-1], wrong))
        for each in (engine, Holding(how)):
            with pytest.raises((ChannelError, EngineError), match=entry.name):
                theirs.load("policy", 3, damaged, each)
        theirs.load("policy", 3, manifest, Holding(how))


def test_a_receiver_that_is_started_again_loads_the_current_version(trainer: FakeTrain, tmp_path: Path) -> None:
    for transport in sorted(TRANSPORTS):
        directory = str(tmp_path / transport)
        with closing(syncing("trainer", transport, directory)) as ours:
            for version in (1, 2):
                manifest = ours.publish("policy", version, trainer)
            for _ in range(2):
                with closing(syncing("rollout", transport, directory)) as theirs:
                    engine = Holding()
                    theirs.load("policy", 2, manifest, engine)
                    (name, held), *_ = engine.weights()
                    assert np.array_equal(held, dict(trainer.weights())[name])


def test_the_plan_says_which_transport_each_engine_loads_by_and_why() -> None:
    both = (EngineSlot("policy", "rollout", "fake"), EngineSlot("policy", "train", "fake"))
    workers = (
        WorkerPlan("device-0", "cpu", 1, both, "device-0"),
        *(WorkerPlan(f"rollout-{i}", "cpu", 1, both[:1]) for i in (1, 2)),
    )
    syncs = plan_syncs(workers, WeightsSpec())
    assert [(sync.target, sync.transport, sync.why) for sync in syncs] == [
        ("device-0", "same process", "one copy"),
        ("rollout-1", "shared memory", "same host: one copy in, one out for 2 receivers"),
        ("rollout-2", "shared memory", "same host: one copy in, one out for 2 receivers"),
    ]
    pinned = plan_syncs(workers, WeightsSpec(transport="file"))
    assert [sync.transport for sync in pinned] == ["same process", "file", "file"]
    ours = weight_settings("device-0", pinned, WeightsSpec(), "/x")
    assert (ours.publishes, ours.num_receivers, ours.loads) == ({"policy": ("file",)}, {"policy": 2}, {"policy": "same process"})
    assert weight_settings("rollout-1", pinned, WeightsSpec(), "/x").loads == {"policy": "file"}


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("placement", ["split", "time-shared"])
def test_nothing_is_generated_with_weights_that_are_not_what_was_published(
    placement: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits behind the load, and what runs while it is loaded, might else be finished and recorded before the run ends."""

    @flow(staleness=1)
    def trained() -> None:
        policy, verifier = Policy("fake"), Reward(num_nines)
        prompts = Dataset([{"prompt": f"{i}="} for i in range(9)])
        for _ in steps(3):
            responses = policy.generate(prompts.take(3), n=2, max_new_tokens=9, kv=kv)  # type: ignore[arg-type]
            policy.update(responses, verifier.score(responses))

    damaged, after = set[EngineHost](), list[str]()
    load, generate, step = EngineHost.load_weights, EngineHost.generate, EngineHost.step

    def loaded(self: EngineHost, *arguments: Any, **how: Any) -> None:
        load(self, *arguments, **how)
        damaged.add(self)
        raise EngineError("it holds something else")

    def noted(name: str, method: Any) -> Any:
        def run(self: EngineHost, *arguments: Any) -> Any:
            after.extend([name] if self in damaged else [])
            return method(self, *arguments)

        return run

    monkeypatch.setattr(EngineHost, "load_weights", loaded)
    monkeypatch.setattr(EngineHost, "generate", noted("begins", generate))
    monkeypatch.setattr(EngineHost, "step", noted("goes on", step))
    spec = ClusterSpec(
        placement=placement,  # type: ignore[arg-type]
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", max_running=4),
        train=TrainSpec(engine="fake"),
    )
    for order_seed in range(8):
        assert "it holds something else" in run_planned(trained, {}, spec, order_seed=order_seed).error
    assert len(damaged) == 8
    assert not after
