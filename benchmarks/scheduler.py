"""What a decision of the scheduler costs: one step of many samples over many workers, on virtual time.

    python benchmarks/scheduler.py [--workers 1 8 128 2048] [--samples 1024 16384 102400] [--running 64]
        [--policy first-come-first-served longest-first]

One step of five calls (a generation of 8 samples a prompt, a reward, an op on samples, an op on groups, an update) and its dataset.
The workers are a heap of events: a generation takes a time drawn from the sample's identity, and every other task one that goes with
its rows, so that samples are finished one by one and in an order of their own. The scheduler is the real one, with a real plan.

Each row of `runs` is one step. `us_an_event` is CPU time in `Scheduler.handle`; `worst_us` the 99.9th percentile of single events;
`sample_events_a_second` counts what is reported of a sample by one of the four calls that work on samples or groups (the update
reports micro-batches). `over_heap` is the ratio to the same run without a scheduler: a heap of the same events, and what was said
repeated. `in_flight` is the most samples that workers had at one time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import os
import platform
import time
from collections.abc import Iterable

import msgspec
import numpy as np

from m2flow import Dataset, Policy, Reward, Sample, flow, op, steps
from m2flow.channels.weights import Manifest
from m2flow.macro.graph import Call
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import CallAdded, Command, Event, FromWorker, Released, Send, Sourced
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec

GROUP = 8
TOKENS = 512
"""Of each sample, as far as the packing of micro-batches goes."""


def right(sample: Sample) -> float:
    return 1.0


@op(granularity="sample")
def length(sample: Sample) -> int:
    return 1


@op(granularity="group")
def ranks(samples: list[Sample]) -> list[int]:
    return list(range(len(samples)))


@flow
def five_calls(num_prompts: int = 128) -> None:
    policy, reward = Policy("null"), Reward(right)
    prompts = Dataset([{"prompt": "a"}] * num_prompts)
    for _ in steps(1):
        responses = policy.generate(prompts.take(num_prompts), n=GROUP, max_new_tokens=8)
        rewards = reward.score(responses)
        length(responses)
        ranks(responses)
        policy.update(responses, rewards, minibatch_size=max(num_prompts // 4, 1))


class Workers:
    """Says when what was told is done."""

    def __init__(self, calls: dict[int, Call]) -> None:
        self._calls = calls
        self._heap: list[tuple[float, int, FromWorker]] = []
        self._num_said = 0
        self._busy_until_s: dict[str, float] = {}
        self._left: dict[int, int] = {}
        self.now_s = 0.0
        self.num_running = 0
        self.most_running = 0

    def told(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, m.Task):
                self._start(command.worker, command.message)

    def next(self) -> FromWorker | None:
        if not self._heap:
            return None
        self.now_s, _, said = heapq.heappop(self._heap)
        if isinstance(said.message, m.Finished) and said.message.task in self._left:
            self.num_running -= 1
            number = said.message.task
            self._left[number] -= 1
            if not self._left[number]:
                del self._left[number]
                return FromWorker(said.worker, msgspec.structs.replace(said.message, ends=True))
        return said

    def _start(self, worker: str, task: m.Task) -> None:
        if isinstance(task, m.Generate):
            self._left[task.number] = len(task.ids)
            self.num_running += len(task.ids)
            self.most_running = max(self.most_running, self.num_running)
            for row in task.ids:
                self._say(self.now_s + 1.0 + (row * 2654435761 % 2**32) / 2**32, worker, _finished(task, [row]))
            return
        ids = getattr(task, "ids", [])
        end_s = max(self._busy_until_s.get(worker, 0.0), self.now_s) + 1e-6 * (1 + len(ids))
        self._busy_until_s[worker] = end_s
        if isinstance(task, m.RunFunction) and self._calls[task.call].is_aligned:
            self._say(end_s, worker, _finished(task, ids, ends=True))
            return
        manifest = Manifest("weights", 1, ()) if isinstance(task, m.PublishWeights) else None
        self._say(end_s, worker, m.TaskDone(task.number, 1.0, manifest))

    def _say(self, when_s: float, worker: str, message: m.Finished | m.TaskDone) -> None:
        self._num_said += 1
        heapq.heappush(self._heap, (when_s, self._num_said, FromWorker(worker, message)))


def _finished(task: m.Generate | m.RunFunction, ids: list[int], *, ends: bool = False) -> m.Finished:
    return m.Finished(
        task.number, task.call, ids, [TOKENS] * len(ids), [1 + row % TOKENS for row in ids], [], [0] * len(ids), [], None, ends=ends
    )


class Repeating:
    """A scheduler that says again what another one has said."""

    def __init__(self, said: list[list[Command]]) -> None:
        self._said = iter(said)

    def handle(self, event: Event) -> list[Command]:
        return next(self._said)


def measure(num_workers: int, num_samples: int, running: int, policy: str) -> dict[str, object]:
    num_prompts = num_samples // GROUP
    cluster = ClusterSpec(
        placement="split",
        cores=2,
        device="cpu",
        rollout=RolloutSpec(engine="fake", workers=num_workers, max_running=running),
        train=TrainSpec(engine="fake", token_budget=32 * TOKENS),
        functions=FunctionSpec(workers=min(max(num_workers // 8, 2), 64)),
    ).with_policy(policy)
    graph, models, _ = trace(five_calls, {"num_prompts": num_prompts})
    plan = lower(graph, models, cluster)
    stages = Lowering(plan, cluster).stages(graph)
    calls = {call.ordinal: call for call in graph.calls}
    added: list[Event] = []
    for call, stage in zip(graph.calls, stages, strict=True):
        added.append(CallAdded(call, stage))
        rows = call.options.get("rows")
        if isinstance(rows, Batch):
            added.append(Sourced(call.ordinal, rows.ids.tolist(), [9] * len(rows)))
    added += [Released(call.ordinal) for call in graph.calls]

    scheduler = Scheduler(plan)
    took_ns, said, workers, num_reports = run(scheduler, added, calls)
    if not scheduler.is_idle:
        raise SystemExit("something was left undone: " + "; ".join(scheduler.waiting()))
    heap_ns = run(Repeating(said), added, calls)[0]
    single_us = np.array(took_ns) / 1000
    return {
        "policy": policy or "first-come-first-served",
        "workers": num_workers,
        "samples": num_prompts * GROUP,
        "in_flight": workers.most_running,
        "events": len(took_ns),
        "seconds": round(sum(took_ns) / 1e9, 2),
        "us_an_event": round(float(single_us.mean()), 2),
        "worst_us": round(float(np.quantile(single_us, 0.999)), 1),
        "sample_events_a_second": round(num_reports / (sum(took_ns) / 1e9)),
        "over_heap": round(sum(took_ns) / sum(heap_ns), 1),
    }


def run(
    scheduler: Scheduler | Repeating, added: list[Event], calls: dict[int, Call]
) -> tuple[list[int], list[list[Command]], Workers, int]:
    """CPU nanoseconds of each event, of a `Repeating` of the heap's part too; what was said; how many samples were reported."""
    workers = Workers(calls)
    is_bare = isinstance(scheduler, Repeating)
    took_ns: list[int] = []
    said: list[list[Command]] = []
    num_reports = 0
    gc.collect()
    gc.disable()
    try:
        todo = iter(added)
        while True:
            start = time.process_time_ns()
            event: Event | None = next(todo, None) or workers.next()
            if event is None:
                return took_ns, said, workers, num_reports
            if not is_bare:
                start = time.process_time_ns()
            commands = scheduler.handle(event)
            if is_bare:
                workers.told(commands)
                took_ns.append(time.process_time_ns() - start)
                continue
            took_ns.append(time.process_time_ns() - start)
            workers.told(commands)
            said.append(commands)
            if isinstance(event, FromWorker) and isinstance(event.message, m.Finished):
                num_reports += len(event.message.ids)
    finally:
        gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 128, 2048])
    parser.add_argument("--samples", type=int, nargs="+", default=[1024, 16384, 102400])
    parser.add_argument("--running", type=int, default=0, help="samples that decode together in a worker; 0: all")
    parser.add_argument("--policy", nargs="+", default=[""], help="rollout policies, each measured; several together as a+b")
    options = parser.parse_args()
    load = [round(os.getloadavg()[0], 2)]
    runs = []
    for num_samples, num_workers, policy in itertools.product(options.samples, options.workers, options.policy):
        runs.append(measure(num_workers, num_samples, options.running or max(num_samples // num_workers, 1), policy))
        print(json.dumps(runs[-1]), flush=True)
    load.append(round(os.getloadavg()[0], 2))
    hardware = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "load": load}
    print(json.dumps({"hardware": hardware, "runs": runs}))


if __name__ == "__main__":
    main()
