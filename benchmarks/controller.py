"""How much one controller holds: a real run of 256 workers with fake engines and 100,000 samples in flight, and what each part of it takes.

    python benchmarks/controller.py [--workers 16 64 256] [--samples 10240 102400] [--steps 2] [--hosts 8]

Controller, scheduler, ledger, segment files, the control link and the channels are the real ones, over TCP on loopback. The workers are
real too (`m2flow.micro.worker.worker`), with fake engines, and take turns in a few processes: 256 processes of Python would be 16 GB. A
step generates all its samples at once, scores them, and trains on them. What is measured is the controller's thread, in seconds of its
own processor time: on a shared machine these say more than the clock. `scheduler`, `records` (ledger, metrics, trace) and `link` are the
time inside these, `else` is what is left. `in_flight` is the most samples that workers had and had not finished.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil
from sides.periodic import Periodically
from sides.unbroken import Unbroken

from m2flow import Dataset, Policy, Reward, Sample, flow, steps
from m2flow.channels.parcels import ZmqInbox, ZmqOutbox
from m2flow.channels.zeromq import HeartbeatSender, LinkDialer, LinkListener, wait
from m2flow.micro.controller.controller import Controller
from m2flow.micro.controller.launcher import Job
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import Event, FromWorker
from m2flow.micro.records.audit import audit
from m2flow.micro.records.journal import Journal
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.micro.worker.worker import Worker, WorkerSettings
from m2flow.runner import run as runs
from m2flow.spec import ChannelSpec, ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

GROUP = 8
TOKENS = 8


def length(sample: Sample) -> float:
    return float(sample.num_tokens)


@flow
def wide(num_prompts: int = 128, num_steps: int = 2) -> None:
    policy, judge = Policy("fake"), Reward(length)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(1000)])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(num_prompts), n=GROUP, max_new_tokens=TOKENS)
        policy.update(responses, judge.score(responses), minibatch_size=max(num_prompts // 4, 1))


# A process of many workers


def host() -> None:
    """Have the workers whose settings come on standard input take turns in this process."""
    settings, token = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[list[WorkerSettings], str])
    made: list[tuple[Worker, LinkDialer, ZmqInbox, ZmqOutbox]] = []
    for one in settings:
        link, inbox, outbox = LinkDialer(), ZmqInbox(one.inbox, max_parcels=0), ZmqOutbox(one.tag, timeout_s=5.0)
        link.open(one.controller, one.tag, token)
        worker = Worker(one, link, inbox, outbox)
        pulse = functools.partial(_pulse, worker)
        HeartbeatSender(one.controller, one.tag, token, period_s=one.heartbeat_s, payload=pulse).open()
        worker.open()
        made.append((worker, link, inbox, outbox))
    parent = os.getppid()
    while not all(worker.is_stopping for worker, *_ in made) and os.getppid() == parent:
        if not any(worker.has_work for worker, *_ in made):
            wait([end for _, link, inbox, _ in made for end in (link, inbox)], 0.25)
        for worker, *_ in made:
            worker.turn()
    for worker, *_ in made:
        worker.close()
    time.sleep(1.0)  # Goodbyes are on their way; the process ends without waiting for each socket.
    os._exit(0)


def _pulse(worker: Worker) -> bytes:
    return m.encode(m.Heartbeat(worker.num_turns, time.process_time(), worker.is_in_users_code))


class Hosts(Unbroken):
    """Starts all workers, in a few processes."""

    num_processes = 8

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, controller: str) -> None:
        # Who trains, and who judges, gets a process of its own before those that generate share the others.
        kinds = sorted(self._plan.workers, key=lambda worker: worker.name.startswith("rollout"))
        shares: list[list[WorkerSettings]] = [[] for _ in range(min(self.num_processes, len(kinds)))]
        for number, worker in enumerate(kinds):
            shares[number % len(shares)].append(self.settings_for(worker, controller))
        for share in shares:
            with (self.run_dir / "logs" / "hosts.log").open("ab") as log:
                process = subprocess.Popen([sys.executable, __file__, "--as-host"], stdin=subprocess.PIPE, stdout=log, stderr=log)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode((share, self.token)))
            process.stdin.close()
            self._processes.append(process)

    def stop(self, leaving: Iterable[str], *, patience_s: float = 5.0) -> None:
        for process in self._processes:
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def cpu_s(self) -> float:
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return sum(one.user + one.system for one in times)


# What is measured


class Clock:
    """Processor time of the controller's thread, by part; what is inside a part that is inside another counts for the inner one."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, int] = {}
        self.single_ns: list[int] = []
        self.num_events = self.most_in_flight = 0
        self._in_flight = 0
        self._generating: set[int] = set()
        self._inside: list[list[int]] = []
        self._controller = 0
        self.began_ns = self.ended_ns = 0

    def of(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **more: Any) -> Any:
            if threading.get_ident() != self._controller:
                return method(*args, **more)
            start, inner = time.thread_time_ns(), [0]
            self._inside.append(inner)
            try:
                return method(*args, **more)
            finally:
                self._inside.pop()
                took = time.thread_time_ns() - start
                if self._inside:
                    self._inside[-1][0] += took
                self.spent_ns[part] = self.spent_ns.get(part, 0) + took - inner[0]
                if part == "scheduler":
                    self.single_ns.append(took)

        return timed

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Around the scheduler: events, and samples that workers have."""

        @functools.wraps(method)
        def counting(scheduler: Scheduler, *events: Event) -> Any:
            commands = method(scheduler, *events)
            self.num_events += len(events)
            for event in events:
                if isinstance(event, FromWorker) and isinstance(event.message, m.Finished) and event.message.task in self._generating:
                    self._in_flight -= len(event.message.ids)
            for command in commands:
                message = getattr(command, "message", None)
                if isinstance(message, m.Generate):
                    self._generating.add(message.number)
                    self._in_flight += len(message.ids)
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            return commands

        return counting

    def around(self, run: Callable[[Controller], None]) -> Callable[[Controller], None]:
        @functools.wraps(run)
        def timed(controller: Controller) -> None:
            self._controller = threading.get_ident()
            self.began_ns = time.thread_time_ns()
            try:
                run(controller)
            finally:
                self.ended_ns = time.thread_time_ns()

        return timed


def measure(num_workers: int, num_samples: int, num_steps: int) -> dict[str, object]:
    num_functions = max(num_workers // 64, 1)
    num_rollouts = num_workers - num_functions - 1
    num_prompts = num_samples // GROUP
    spec = ClusterSpec(
        placement="split",
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", workers=num_rollouts, max_running=-(-num_samples // num_rollouts // GROUP + 1) * GROUP),
        train=TrainSpec(engine="fake", token_budget=8192),
        functions=FunctionSpec(workers=num_functions),
        channels=ChannelSpec(transport="tcp"),
    )
    clock, before = Clock(), {}

    def replace(owner: type, name: str, made: Callable[..., Any]) -> None:
        before[owner, name] = getattr(owner, name)
        setattr(owner, name, made)

    replace(Scheduler, "handle", clock.counted(clock.of("scheduler", Scheduler.handle)))
    for name in [name for name, value in vars(Journal).items() if callable(value) and not name.startswith("_")]:
        replace(Journal, name, clock.of("records", getattr(Journal, name)))
    for name in ("send", "receive"):
        replace(LinkListener, name, clock.of("link", getattr(LinkListener, name)))
    replace(Controller, "_run", clock.around(Controller._run))
    launcher_for, runs.launcher_for = runs.launcher_for, Hosts  # type: ignore[assignment]
    me = psutil.Process()
    try:
        with tempfile.TemporaryDirectory() as directory:
            # A worker that takes turns with thirty others on a busy machine is no worker that hangs.
            settings = RunSettings(runs_dir=directory, hung_after_s=3600.0, start_timeout_s=900.0, heartbeat_s=1.0)
            run = runs.Run(wide, {"num_prompts": num_prompts, "num_steps": num_steps}, spec, settings)
            run.prepare()
            at_first = me.memory_info().rss
            peak = Peak(me)
            with Periodically(peak.look, every_s=0.1):
                summary = run.execute()
            found = audit(Path(summary.run_dir))
            ledger_bytes = (Path(summary.run_dir) / "ledger.db").stat().st_size
    finally:
        runs.launcher_for = launcher_for
        for (owner, name), method in before.items():
            setattr(owner, name, method)
    total_s = (clock.ended_ns - clock.began_ns) / 1e9
    parts = {name: spent / 1e9 for name, spent in clock.spent_ns.items()}
    parts["else"] = total_s - sum(parts.values())
    single = sorted(clock.single_ns)
    return {
        "workers": num_workers,
        "samples_a_step": num_prompts * GROUP,
        "steps": num_steps,
        "in_flight": clock.most_in_flight,
        "samples": summary.samples,
        "wall_s": summary.wall_s,
        "controller_cpu_s": round(total_s, 2),
        "of_it": {name: round(spent, 2) for name, spent in sorted(parts.items())},
        "events": clock.num_events,
        "events_a_cpu_second": round(clock.num_events / total_s),
        "us_a_sample": round(total_s / summary.samples * 1e6, 1),
        "us_a_decision": round(sum(single) / len(single) / 1e3, 1),
        "us_worst_of_1000": round(single[int(0.999 * (len(single) - 1))] / 1e3, 1),
        "mb_before": round(at_first / 1e6),
        "mb_most": round(peak.most / 1e6),
        "ledger_bytes_a_sample": round(ledger_bytes / summary.samples),
        "is_sound": found.is_sound,
    }


class Peak:
    """The most memory that a process has had."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.most = 0

    def look(self) -> None:
        self.most = max(self.most, self._process.memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--samples", type=int, nargs="+", default=[10_240, 102_400], help="of a step, all generated at once")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=8, help="processes that the workers share")
    parser.add_argument("--as-host", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_host:
        host()
    Hosts.num_processes = asked.hosts
    load = [round(os.getloadavg()[0], 2)]
    found = []
    for num_workers in asked.workers:
        for num_samples in asked.samples:
            found.append(measure(num_workers, num_samples, asked.steps))
            print(json.dumps(found[-1]), flush=True)
    load.append(round(os.getloadavg()[0], 2))
    hardware = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "load": load}
    print(json.dumps({"hardware": hardware, "runs": found}))


if __name__ == "__main__":
    main()
