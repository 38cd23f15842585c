"""A real worker for a cluster in one thread (`m2flow.testing.world`): with a link and an inbox in memory, and no process."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping

import msgspec

from m2flow.channels.memory import MemoryInbox, MemoryOutbox
from m2flow.micro.plan import Plan, WorkerPlan
from m2flow.micro.rollouts.policies import report_every
from m2flow.micro.work.settings import WorkerSettings
from m2flow.micro.work.weight_syncing import weight_settings
from m2flow.micro.work.worker import Worker
from m2flow.recipe import Model
from m2flow.spec import ClusterSpec


class Link:
    """Both directions between the controller and one worker."""

    def __init__(self) -> None:
        self.to_worker: deque[bytes] = deque()
        self.to_controller: deque[bytes] = deque()

    def receive(self, timeout_s: float) -> list[bytes]:
        received = list(self.to_worker)
        self.to_worker.clear()
        return received

    def send(self, message: bytes) -> None:
        self.to_controller.append(message)


def made_worker(
    plan: Plan,
    worker: WorkerPlan,
    models: Mapping[str, Model],
    spec: ClusterSpec,
    seed: int,
    directory: str,
    incarnation: int,
    *,
    deterministic: bool,
    flush_tokens: int,
) -> tuple[Worker, Link, MemoryInbox]:
    """One of a plan's, which was this often started before; not open."""
    settings = _settings(worker, models, spec, seed, directory, incarnation, deterministic=deterministic)
    settings = msgspec.structs.replace(settings, flush_tokens=flush_tokens)
    weights = weight_settings(worker.name, plan.syncs, spec.weights, f"{directory}/weights")
    settings = msgspec.structs.replace(settings, weights=weights)
    link, inbox = Link(), MemoryInbox()
    return Worker(settings, link, inbox, MemoryOutbox()), link, inbox


def _settings(
    worker: WorkerPlan, models: Mapping[str, Model], spec: ClusterSpec, seed: int, directory: str, incarnation: int, *, deterministic: bool
) -> WorkerSettings:
    return WorkerSettings(
        name=worker.name,
        controller="",
        keys=None,
        inbox="",
        engines=worker.engines,
        models=dict(models),
        device="cpu",
        threads=1,
        deterministic=deterministic,
        run_seed=seed,
        run_dir=directory,
        shared_prefix=f"m2flow-world-{os.getpid()}-{worker.name}",
        rollout_options=spec.rollout.options,
        train_options=spec.train.options,
        function_concurrency=spec.functions.concurrency,
        function_patience_s=spec.functions.patience_s,
        max_running=spec.rollout.max_running,
        report_every=report_every(spec.rollout.policy, spec.rollout.predictor, turns=3),
        gather_s=0.0,
        flush_tokens=1,
        flush_s=1e9,
        heartbeat_s=1.0,
        parent=0,
        incarnation=incarnation,
        takes_turns=bool(worker.lease),
    )
