"""Where one controller stops: workers that answer at a set rate are added until it falls behind.

    python benchmarks/saturation.py [--workers 64 128 256 512 1024] [--rate 8] [--seconds 20]

Controller, scheduler, ledger, segments' index and the control link are the real ones, over TCP on loopback. The workers are hollow: one
process speaks for all of them and does nothing else. It takes samples, says that each is finished after a time drawn around
`SLOTS / rate` seconds, judges and trains at once, and beats as a worker does. So the other core has to do a small part of what 1,024 real
workers would do, and the controller sees what it would see from them: a message for each sample.

A step generates all samples of a measurement. `offered` is what the workers would do by themselves, samples a second; `done` what was
finished in the middle half of them; `core` the share of a core that the controller's thread took then; `events_a_core_second` the reports
that it acted on, a sample generated or judged being one, by the processor time that it took; `lag_ms` how old what a worker
says is when the controller acts on it, the median and 99 of 100, so how long the queue is. Where `done` is less than `offered` by a
twentieth, the controller is `full` if it had nine tenths of a core, and else `starved`: somebody else had it, and the row says only
what a sample costs. Nothing that a worker writes is there, so the run's own digests are not made.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import random
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import psutil
import zmq
from sides.unbroken import Unbroken

from m2flow import Dataset, Policy, Reward, Sample, flow
from m2flow.channels.parcels import ZmqInbox
from m2flow.channels.weights import Manifest
from m2flow.channels.zeromq import MAX_MESSAGES_AT_ONCE
from m2flow.micro.controller.controller import Controller
from m2flow.micro.protocol import messages as m
from m2flow.runner import run as runs
from m2flow.spec import ChannelSpec, ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

GROUP = 8
SLOTS = 32
"""Samples that a rollout worker has at once."""
TOKENS = 20
BEAT_S = 1.0


def length(sample: Sample) -> float:
    return float(sample.num_tokens)


@flow
def wide(num_prompts: int) -> None:
    policy, judge = Policy("fake"), Reward(length)
    prompts = Dataset([{"prompt": f"{i}="} for i in range(1000)])
    responses = policy.generate(prompts.take(num_prompts), n=GROUP, max_new_tokens=8)
    policy.update(responses, judge.score(responses), minibatch_size=max(num_prompts // 16, 1))


# The process that speaks for all workers


class Crowd:
    """Its workers, their links in one context."""

    def __init__(self, names: list[str], address: str, token: str, rate: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 65_535
        self._poller = zmq.Poller()
        self._random = random.Random(0)
        self._mean_s = SLOTS / rate
        self._due: list[tuple[float, int, str, m.Generate, int]] = []
        self._left: dict[tuple[str, int], int] = {}
        self._waiting: dict[str, deque[tuple[m.Generate, int]]] = {name: deque() for name in names}
        self._num_running = dict.fromkeys(names, 0)
        self._num_begun = dict.fromkeys(names, 0)
        self.links: dict[str, zmq.Socket[bytes]] = {}
        self._name_of: dict[Any, str] = {}
        self._beats: list[zmq.Socket[bytes]] = []
        self.finished: list[float] = []
        self.stopped: set[str] = set()
        self._number = 0
        self._inbox = ZmqInbox("tcp:127.0.0.1", max_parcels=0)
        """Prompts go to the workers."""
        address_of_all = self._inbox.open()
        for name in names:
            self.links[name] = self._dial(address, name, token)
            self._beats.append(self._dial(address, f"{name}.beat", token))
            self._name_of[self.links[name]] = name
            self._poller.register(self.links[name], zmq.POLLIN)
        for name in names:
            self.say(name, m.Ready(address_of_all, os.getpid()))

    def _dial(self, address: str, name: str, token: str) -> zmq.Socket[bytes]:
        link = self._context.socket(zmq.DEALER)
        link.linger, link.sndhwm, link.rcvhwm = 1000, 100_000, 100_000
        link.routing_id = b"\1" + secrets.token_bytes(15)
        link.connect(address)
        link.send_multipart([b"m2flow-hello-1", name.encode(), token.encode()])
        return link

    def say(self, name: str, message: m.ToController) -> None:
        self.links[name].send(m.encode(message))

    def beat(self) -> None:
        pulse = m.encode(m.Heartbeat(self._number, time.process_time(), is_in_users_code=False))
        for link in self._beats:
            link.send(pulse)

    def turn(self) -> None:
        wait_s = min(0.05, max(0.0, self._due[0][0] - time.monotonic())) if self._due else 0.05
        for link, _ in self._poller.poll(int(wait_s * 1000)):
            for _ in range(MAX_MESSAGES_AT_ONCE):
                try:
                    frames = link.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                for frame in frames:
                    self._take(self._name_of[link], m.decode_to_worker(frame))
        self._inbox.take()
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            _, _, name, task, packed = heapq.heappop(self._due)
            self._finish(name, task, packed, now_s)

    def _finish(self, name: str, task: m.Generate, packed: int, now_s: float) -> None:
        key = name, task.number
        self._left[key] -= 1
        ends = not self._left[key]
        if ends:
            del self._left[key]
        place = f"{name}.seg", packed % 1_000_000, 200, 0
        self.say(name, m.Finished(task.number, task.call, [packed], [TOKENS], [8], [], [0], ["1=", repr(now_s)], place, ends=ends))
        self.finished.append(now_s)
        self._num_running[name] -= 1
        self._begin(name, now_s)

    def _begin(self, name: str, now_s: float) -> None:
        """What waits and has a slot."""
        while self._waiting[name] and self._num_running[name] < SLOTS:
            task, packed = self._waiting[name].popleft()
            self._number += 1
            self._num_running[name] += 1
            self._num_begun[name] += 1
            heapq.heappush(self._due, (now_s + self._takes_s(self._num_begun[name] <= SLOTS), self._number, name, task, packed))

    def _take(self, name: str, message: m.ToWorker) -> None:
        match message:
            case m.Generate(number=number, ids=ids):
                self._left[name, number] = len(ids)
                self._waiting[name] += [(message, packed) for packed in ids]
                self._begin(name, time.monotonic())
            case m.RunFunction(number=number, call=call, ids=ids):
                self.say(name, m.Finished(number, call, ids, [0] * len(ids), [], [1.0] * len(ids), [], [], None, ends=True))
            case m.PublishWeights(number=number):
                self.say(name, m.TaskDone(number, manifest=Manifest("none", 0, ())))
            case m.Save(number=number):
                self.say(name, m.TaskDone(number, "0" * 64))
            case m.Apply(number=number, is_last=is_last):
                self.say(name, m.TaskDone(number, {"loss": 0.0} if is_last else None))
            case m.Task(number=number):
                self.say(name, m.TaskDone(number))
            case m.PeerLost(peer=peer):
                self.say(name, m.Missing(peer, {}))
            case m.Stop():
                self.stopped.add(name)
                self.say(name, m.Goodbye())

    def _takes_s(self, is_first: bool) -> float:
        """From half to one and a half of the mean; of those that begin together, what is left in the middle of a long run."""
        takes = self._random.uniform(0.5, 1.5)
        while is_first and self._random.uniform(0.0, 1.5) > takes:
            takes = self._random.uniform(0.5, 1.5)
        return self._mean_s * takes * (self._random.random() if is_first else 1.0)


def crowd() -> None:
    names, address, token, rate = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[list[str], str, str, float])
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    them = Crowd(names, address, token, rate)
    parent, beaten_s = os.getppid(), 0.0
    while len(them.stopped) < len(names) and os.getppid() == parent:
        them.turn()
        if time.monotonic() - beaten_s > BEAT_S:
            beaten_s = time.monotonic()
            them.beat()
    print(json.dumps({"finished": them.finished, "cpu_s": time.process_time()}), flush=True)
    time.sleep(0.5)  # Goodbyes are on their way.
    os._exit(0)


class Hollow(Unbroken):
    """Starts the process that speaks for all workers."""

    rate = 8.0
    said: Mapping[str, Any] = {}

    def start(self, controller: str) -> None:
        names = [worker.name for worker in self._plan.workers]
        self._process = subprocess.Popen([sys.executable, __file__, "--as-crowd"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode((names, controller, self.token, self.rate)))
        self._process.stdin.close()

    def stop(self, leaving: Iterable[str], *, patience_s: float = 5.0) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            Hollow.said = json.loads(self._process.stdout.readline() or "{}")
            self._process.stdout.close()
        self._process.kill()
        self._process.wait()


# What is measured


class Core:
    """Processor time of the controller's thread, sampled by the clock, and the most memory of the process."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []
        self.lags: list[tuple[float, float]] = []
        self.reports: list[tuple[float, int]] = []
        self.most_bytes = 0

    def heard(self, received: Any) -> Any:
        """Around what is done about a message."""

        def receiving(controller: Controller, worker: str, message: m.ToController) -> None:
            if isinstance(message, m.Finished):
                self.reports.append((time.monotonic(), len(message.ids)))
                if message.texts:
                    said_s = float(message.texts[1])
                    self.lags.append((said_s, time.monotonic() - said_s))
            received(controller, worker, message)

        return receiving

    def around(self, turn: Any) -> Any:
        me = psutil.Process()

        def turning(controller: Controller) -> None:
            turn(controller)
            now_s = time.monotonic()
            if not self.seen or now_s - self.seen[-1][0] > 0.1:
                self.seen.append((now_s, time.thread_time()))
                self.most_bytes = max(self.most_bytes, me.memory_info().rss)

        return turning

    def share(self, start_s: float, stop_s: float) -> float:
        inside = [one for one in self.seen if start_s <= one[0] <= stop_s]
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def measure(num_workers: int, rate: float, seconds: float) -> dict[str, object]:
    num_functions = max(num_workers // 64, 1)
    num_rollouts = num_workers - num_functions - 1
    offered = num_rollouts * rate
    num_samples = int(offered * seconds)
    spec = ClusterSpec(
        placement="split",
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", workers=num_rollouts, max_running=SLOTS),
        train=TrainSpec(engine="fake", token_budget=8192),
        functions=FunctionSpec(workers=num_functions),
        channels=ChannelSpec(transport="tcp"),
    )
    core, Hollow.rate = Core(), rate
    before = Controller._turn, Controller._received, runs.launcher_for, runs.samples_digest
    Controller._turn, Controller._received = core.around(Controller._turn), core.heard(Controller._received)  # type: ignore[method-assign]
    runs.launcher_for, runs.samples_digest = Hollow, lambda run_dir: ""  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as directory:
            settings = RunSettings(
                runs_dir=directory, hung_after_s=3600.0, start_timeout_s=900.0, heartbeat_s=BEAT_S, checkpoint_s=None, metrics_to=()
            )
            runs.Run(wide, {"num_prompts": num_samples // GROUP}, spec, settings).execute()
    finally:
        Controller._turn, Controller._received, runs.launcher_for, runs.samples_digest = before  # type: ignore[method-assign]
    finished = Hollow.said["finished"]
    start_s, stop_s = finished[len(finished) // 4], finished[3 * len(finished) // 4]
    lags = sorted(lag_s for at_s, lag_s in core.lags if start_s <= at_s <= stop_s)
    done = sum(start_s <= at_s < stop_s for at_s in finished) / (stop_s - start_s)
    share = core.share(start_s, stop_s)
    events = sum(count for at_s, count in core.reports if start_s <= at_s < stop_s) / (stop_s - start_s)
    return {
        "workers": num_workers,
        "samples": len(finished),
        "offered": round(offered),
        "done": round(done),
        "core": round(share, 2),
        "events_a_core_second": round(events / share),
        "us_a_sample": round(share / done * 1e6),
        "lag_ms": [round(lags[int(part * (len(lags) - 1))] * 1e3, 1) for part in (0.5, 0.99)],
        "crowd_core": round(Hollow.said["cpu_s"] / (finished[-1] - finished[0]), 2),
        "mb_most": round(core.most_bytes / 1e6),
        "state": "keeps up" if done >= 0.95 * offered else "full" if share > 0.9 else "starved",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--rate", type=float, nargs="+", default=[8.0], help="samples a second of each worker that generates")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--as-crowd", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_crowd:
        crowd()
    load, found = [round(os.getloadavg()[0], 2)], []
    for rate in asked.rate:
        for num_workers in asked.workers:
            found.append({"rate": rate, **measure(num_workers, rate, asked.seconds)})
            print(json.dumps(found[-1]), flush=True)
    load.append(round(os.getloadavg()[0], 2))
    hardware = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "load": load}
    print(json.dumps({"hardware": hardware, "runs": found}))


if __name__ == "__main__":
    main()
