"""Whole runs in one thread, with their directories as they are after every event: what a run looks like that is killed just then.

The controller, the journal, the scheduler and the workers are the real ones; only sockets and processes are not there. Who moves next
is drawn from a seed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from m2flow.channels.channel import Dropped, MemoryInbox, MemoryOutbox
from m2flow.macro.flow import Flow, randomness_kept
from m2flow.micro.controller.call_futures import CallFutures
from m2flow.micro.controller.checkpoint_coordinator import CheckpointCoordinator
from m2flow.micro.controller.controller import Controller
from m2flow.micro.controller.controller_core import Post
from m2flow.micro.controller.launcher import Job, LocalLauncher
from m2flow.micro.controller.supervisor import Supervisor
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import Stopping
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.records import ledger
from m2flow.micro.records.journal import Journal
from m2flow.micro.worker.worker import Worker
from m2flow.runner.run import Run, Summary
from m2flow.spec import ClusterSpec, RunSettings
from m2flow.testing.world import Link

Hook = Callable[[], None]


class _Listener:
    """The controller's end of all links: one message at a time."""

    order: random.Random

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self.dropped = Dropped()

    def send(self, worker: str, *messages: bytes) -> None:
        self.links[worker].to_worker.extend(messages)

    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        waiting = [name for name, link in self.links.items() if link.to_controller]
        if not waiting:
            return []
        name = self.order.choice(waiting)
        return [(name, self.links[name].to_controller.popleft())]


def _nothing() -> None:
    """Watches nothing."""


class OneThread(Controller):
    """A controller that moves when the flow waits."""

    def __init__(
        self, plan: Plan, spec: ClusterSpec, settings: RunSettings, launcher: LocalLauncher, journal: Journal, *more: object
    ) -> None:
        super().__init__(plan, spec, settings, launcher, journal, *more)  # type: ignore[arg-type]
        self.order, self.hook = random.Random(0), _nothing
        self._listener = _Listener()  # type: ignore[assignment]
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()  # type: ignore[assignment]
        self._supervisor = Supervisor(plan, settings, launcher, self._listener, self._outbox, self._core, journal, print)  # type: ignore[arg-type]
        self._workers: dict[str, Worker] = {}

    def open(self) -> None:
        self._listener.order = self.order  # type: ignore[attr-defined]
        self._supervisor.set_own_address(self._inbox.open())
        for planned in self._plan.workers:
            link = self._listener.links[planned.name] = Link()  # type: ignore[attr-defined]
            settings = self._launcher.settings_for(planned, "")
            self._workers[planned.name] = Worker(settings, link, MemoryInbox(), MemoryOutbox())
            self._workers[planned.name].open()
        self._futures.wait_ready(60.0)

    def post(self, *posts: Post) -> None:
        for post in posts:
            self._posts.put(post)

    def wind_down(self) -> None:
        self.post(Stopping())
        self._futures.wait_wound_down()

    def move(self) -> None:
        """One thing happens somewhere."""
        if self.order.random() < 0.5:
            self._workers[self.order.choice(list(self._workers))].turn()
        else:
            self._process_inputs()
        self.hook()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.turn()  # It was told to give things up.
            worker.close()
        for link in self._listener.links.values():  # type: ignore[attr-defined]
            for body in link.to_controller:
                message = m.decode_to_controller(body)
                if isinstance(message, m.Spans):
                    self._journal.spans(message.block)
        for name in self._workers:
            self._records.settle(name, "the run ended")
        self._launcher.stop(self._workers)
        self._outbox.close()
        self._inbox.close()


class _Moving(CallFutures):
    """Waits by moving."""

    controller: OneThread

    def _wait(self, is_met, timeout_s: float | None = None) -> bool:  # type: ignore[no-untyped-def]
        with randomness_kept():
            for _ in range(200_000):
                if is_met():
                    return True
                if self._end is not None:
                    raise self._end
                self.controller.move()
        raise AssertionError("nothing moves any more: " + "; ".join(self.controller._scheduler.waiting()))


class SteppedRun(Run):
    """A run in this thread."""

    def __init__(self, flow: Flow, options: dict[str, object], spec: ClusterSpec, settings: RunSettings, **more: object) -> None:
        self._hook: Hook = more.pop("hook", lambda: None)  # type: ignore[assignment]
        self._order = random.Random(more.pop("order_seed", 0))  # type: ignore[arg-type]
        super().__init__(flow, options, spec, settings, **more)  # type: ignore[arg-type]

    def _make_controller(self, plan: Plan, journal: Journal, coordinator: CheckpointCoordinator) -> tuple[CallFutures, Controller]:
        restored, parts, attempt = self._restored
        settings = self.settings.model_copy(update={"hung_after_s": 1e9, "stopped_after_s": 1e9})  # Nobody beats here.
        launcher = LocalLauncher(Job(plan, self.spec, settings, self._models, self.run_dir, attempt, parts))
        futures = _Moving()
        controller = OneThread(plan, self.spec, settings, launcher, journal, futures, coordinator, restored, self._warn)
        controller.order, controller.hook = self._order, self._hook
        futures.controller = controller
        return futures, controller

    def _draw(self) -> None:
        """Pictures are another test's."""


class Images:
    """Copies of a run's directory as it was after events that changed it, evenly spaced over them.

    A run has thousands of such events and its directory megabytes: with `most` copies every second one is dropped, and of what
    follows every second event is passed over.
    """

    def __init__(self, where: Path, most: int | None = 48) -> None:
        self._where, self._most = where, most
        self.run: Run | None = None
        self.paths: list[Path] = []
        self._last: object = None
        self._num_events, self._every = 0, 1

    def take(self) -> Path | None:
        """The copy that was made now, if one was."""
        assert self.run is not None
        source = self.run.run_dir
        if not (source / "ledger.db").exists():
            return None
        state = sorted(_state(str(source)))
        if state == self._last:
            return None
        self._last, number = state, self._num_events
        self._num_events += 1
        if number % self._every:
            return None
        if len(self.paths) == self._most:
            for path in self.paths[1::2]:
                shutil.rmtree(path)
            self.paths, self._every = self.paths[::2], self._every * 2
            if number % self._every:
                return None
        path = self._where / f"{number:05}"
        self.paths.append(path)
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*-shm", "tensorboard"))
        return path


def _state(folder: str) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of all that is in a directory, but for what processes share of a database."""
    with os.scandir(folder) as found:
        for entry in found:
            if not entry.name.endswith("-shm"):
                about = entry.stat()
                yield entry.path, about.st_size, about.st_mtime_ns
                if entry.is_dir():
                    yield from _state(entry.path)


def imaged(
    flow: Flow,
    options: dict[str, object],
    spec: ClusterSpec,
    settings: RunSettings,
    where: Path,
    *,
    order_seed: int = 0,
    most: int | None = 48,
) -> tuple[Summary, Images]:
    """A run to its end, and images of it on the way: `most`, or all if that is None."""
    images = Images(where, most)
    run = images.run = SteppedRun(flow, options, spec, settings, hook=images.take, order_seed=order_seed)
    if settings.eager:
        after_each(run, images.take)
    return run.execute(), images


def after_each(run: Run, hook: Hook) -> None:
    """Have what an eager run tells its journal followed by the hook."""
    begin = run._run_eager

    def eager(plan: Plan) -> object:
        journal = run._journal
        assert journal is not None
        for name in ("call_added", "samples_done", "rewarded", "consumed", "call_done", "logged", "step_done", "make_durable"):
            setattr(journal, name, _followed(getattr(journal, name), hook))
        return begin(plan)

    run._run_eager = eager  # type: ignore[method-assign, assignment]


def _followed(told: Callable[..., None], hook: Hook) -> Callable[..., None]:
    def both(*arguments: object, **more: object) -> None:
        told(*arguments, **more)
        hook()

    return both


def commit_every(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(ledger, "_COMMIT_EVERY_S", seconds)
    monkeypatch.setattr(os, "fsync", lambda number: None)  # Nobody pulls the plug here, and a thousand of them take minutes.


def resumed(
    flow: Flow, options: dict[str, object], spec: ClusterSpec, settings: RunSettings, run_dir: Path, *, order_seed: int = 0, **more: object
) -> Summary:
    said: list[str] = []
    run = SteppedRun(flow, options, spec, settings, resume=run_dir, warn=said.append, order_seed=order_seed, **more)
    return run.execute()
