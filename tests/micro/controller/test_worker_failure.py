"""A worker is killed: nothing that was generated and written down is generated again, and every token is accounted for.

Real scheduler, real workers, fake engines in exact integers, in one thread; the turn at which a worker is killed is drawn, and so is how
much of what it had said arrives.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from types import SimpleNamespace
from typing import Any

import pytest

from m2flow import Dataset, Policy, Reward, Sample, flow, log, steps
from m2flow.channels.channel import MemoryOutbox
from m2flow.engines.contract import LOADING
from m2flow.errors import BrokenChannel
from m2flow.micro.controller.controller_core import ControllerCore, Records
from m2flow.micro.controller.supervisor import BEAT, Supervisor
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.plan import EngineSlot, Plan, WorkerPlan
from m2flow.micro.protocol.worker_state import tag_of
from m2flow.micro.records.audit import read_token_account
from m2flow.micro.scheduler.partial_rollouts import Deadlines
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.worker.worker_process import HeartbeatSource
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec
from m2flow.testing.world import run_eager, run_planned

ROWS = [{"prompt": f"{i * 7919 % 100000}=", "target": str(i)} for i in range(12)]
SPLIT = ClusterSpec(
    placement="split",
    cores=2,
    device="cpu",
    rollout=RolloutSpec(engine="fake", workers=3, max_running=6),
    train=TrainSpec(engine="fake", token_budget=60),
    functions=FunctionSpec(workers=2, chunk=2),
)

pytest_plugins = ["small_runs"]  # The fixture `quick`.
pytestmark = pytest.mark.usefixtures("quick")


def digits(sample: Sample) -> float:
    return float(sum(c.isdigit() for c in str(sample.text)))


@flow
def plain(num_steps: int = 2) -> None:
    policy, reward, prompts = Policy("fake"), Reward(digits), Dataset(ROWS)
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(4), n=2, max_new_tokens=30)
        rewards = reward.score(responses)
        log(loss=policy.update(responses, rewards)["loss"], reward=rewards.mean())


def test_a_run_that_loses_workers_is_the_run_that_loses_none():
    eager = run_eager(plain, {}, SPLIT)
    for seed in range(60):
        assert run_planned(plain, {}, SPLIT, order_seed=seed, num_losses=1 + seed % 4) == eager, seed


def test_every_token_is_trained_wasted_or_lost_and_prefixes_go_on(tmp_path):
    num_went_on = num_lost = 0
    for seed in range(30):
        run_planned(plain, {}, SPLIT, order_seed=seed, num_losses=3, run_dir=tmp_path / str(seed))
        account = read_token_account(tmp_path / str(seed))
        assert account.is_balanced, (seed, account)
        num_lost += sum(account.lost.values())
        with contextlib.closing(sqlite3.connect(tmp_path / str(seed) / "ledger.db")) as db:
            went_on = db.execute("SELECT sample, had FROM went_on").fetchall()
        num_went_on += len(went_on)
        assert all(had > 0 for _, had in went_on)
    assert num_went_on > 10
    assert num_lost > 0


def test_set_up_tells_how_far_a_worker_has_loaded_its_model_until_it_is_up():
    worker = WorkerPlan("train-0", "cpu", 1, (EngineSlot("policy", "train", "embedded"),))
    plan = Plan("f", "c", "split", "", (worker,), (), (), (), (), ())
    others: Any = SimpleNamespace(send=lambda *messages: None, spans=lambda block: None)
    core = ControllerCore(plan, Scheduler(plan), Records(), Deadlines())
    supervisor = Supervisor(plan, RunSettings(), others, others, MemoryOutbox(), core, others, print)
    source = HeartbeatSource(lambda: (0, False), None, 0)
    loaded = LOADING.counted(["embedding", "layer", "head"])
    for _ in range(3):
        next(loaded)
    supervisor.heard(tag_of(worker.name, 0) + BEAT, source.heartbeat())
    assert supervisor.starting() == {"train-0": f"loads policy for train (embedded): tensor 2 of 3 of model {LOADING.num_models}"}
    assert list(loaded) == []
    supervisor.heard(tag_of(worker.name, 0) + BEAT, source.heartbeat())
    assert supervisor.starting() == {"train-0": "loads policy for train (embedded)"}
    core.came_up(worker.name)
    assert supervisor.starting() == {"train-0": "ready"}


def test_what_is_said_to_a_worker_whose_link_is_gone_is_void_however_late_it_is_found_to_have_ended():
    looks = itertools.count()

    def send(peer: str, *messages: bytes) -> None:
        raise BrokenChannel(f"{peer} is gone from the control link")

    def ended() -> dict[str, str]:
        return {worker.name: "was killed by signal 9"} if next(looks) > 150 else {}

    worker = WorkerPlan("functions-0", "cpu", 1, (EngineSlot("*", "function", "python"),))
    plan = Plan("f", "c", "split", "", (worker,), (), (), (), (), ())
    launcher: Any = SimpleNamespace(ended=ended)
    others: Any = SimpleNamespace(send=send, spans=None)
    core = ControllerCore(plan, Scheduler(plan), Records(), Deadlines())
    core.came_up(worker.name)
    supervisor = Supervisor(plan, RunSettings(), launcher, others, MemoryOutbox(), core, others, print)
    supervisor.tell(worker.name, m.Forget(0))
    assert next(looks) > 150
