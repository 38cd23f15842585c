"""What a call costs before any engine works: to record it, to hand it on eagerly, and to dispatch it by a plan.

    python benchmarks/tracing.py [--calls 10 100 1000] [--steps 12] [--rounds 5]

The flow is made of blocks of ten calls (a dataset's batch, a generation, seven functions, an update), written in a helper function
two levels below the flow; engines are null: whatever is asked of them is done at once, on 8 rows. Three ways:

    record     `Session.record` and the handles, into a backend that does nothing
    eager      the same through the eager interpreter
    planned    the same with call bodies, lowering, the scheduler, and each message encoded and decoded once, in one thread;
               its parts are timed in rounds of their own, since that takes time too

Microseconds a call are of CPU time, since all of it is one thread, of the median step after the first two (which have nothing to
reuse) in the best round. `share_of_1s_step` is what a step of that many calls costs of a second. Beside them, in the same run: a
bare Python call that appends a tuple to a list, and cloudpickle on one of the flow's functions. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping

import cloudpickle
import numpy as np

from m2flow import Dataset, Policy, Reward, Sample, flow, op, steps
from m2flow.macro.eager import EagerBackend
from m2flow.macro.flow import Flow
from m2flow.macro.graph import Call, MacroGraph, Observation
from m2flow.macro.session import Backend
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.call_semantics import call_body
from m2flow.micro.protocol.events import CONTROLLER, CallAdded, Event, FromWorker, Released, Send, Sourced
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.samples import Batch
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, TrainSpec

WEIGHT = 0.5
ROWS = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(64)]
NUM_ROWS = 8


def right(sample: Sample) -> float:
    return WEIGHT * float(str(sample.text).strip() == sample["answer"])


def short(sample: Sample) -> float:
    return -WEIGHT * len(str(sample.text))


@op(granularity="sample")
def length(sample: Sample) -> int:
    return len(str(sample.text))


@op(granularity="group")
def ranks(samples: list[Sample]) -> list[int]:
    return sorted(range(len(samples)), key=lambda i: len(str(samples[i].text)))


def block(policy: Policy, rewards: list[Reward], prompts: Dataset) -> None:
    """Ten calls."""
    responses = policy.generate(prompts.take(NUM_ROWS // 2), n=2, max_new_tokens=8)
    first = rewards[0].score(responses)
    rewards[1].score(responses)
    length(responses)
    ranks(responses)
    first.mean()
    length(responses)
    ranks(responses)
    policy.update(responses, first)


@flow
def many_calls(num_steps: int = 12, num_blocks: int = 1) -> None:
    policy, rewards, prompts = Policy("null"), [Reward(right), Reward(short)], Dataset(ROWS)
    for _ in steps(num_steps):
        for _ in range(num_blocks):
            block(policy, rewards, prompts)


class Timed(Backend):
    """Does nothing, and notes when each step ends."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.num_calls = 0

    def submit(self, call: Call) -> None:
        self.num_calls += 1

    def value(self, ordinal: int) -> object:
        raise NotImplementedError("this flow observes nothing")

    def observed(self, observation: Observation) -> None:
        pass

    def log(self, step: int, values: Mapping[str, tuple[int, str | None] | float]) -> None:
        pass

    def release(self, ordinal: int) -> None:
        pass

    def end_step(self, step: int) -> None:
        self.ends_s.append(time.process_time())

    def finish(self) -> None:
        pass


class NullPerformer:
    """Engines and a journal that do nothing: the eager interpreter's."""

    def check(self, call: Call) -> None:
        pass

    def execute(self, call: Call, inputs: Mapping[str, object]) -> object:
        return None

    def call_done(self, call: Call, value: object) -> None:
        pass

    def logged(self, step: int, name: str, value: float) -> None:
        pass

    def step_done(self, step: int) -> None:
        pass


class Eager(Timed):
    def __init__(self) -> None:
        super().__init__()
        self._eager = EagerBackend(NullPerformer(), NullPerformer())

    def submit(self, call: Call) -> None:
        super().submit(call)
        self._eager.submit(call)

    def release(self, ordinal: int) -> None:
        self._eager.release(ordinal)

    def end_step(self, step: int) -> None:
        self._eager.end_step(step)
        super().end_step(step)


class Planned(Timed):
    """The real lowering and scheduler, and workers that are done with each task at once."""

    def __init__(self, num_blocks: int, *, is_timed: bool = False) -> None:
        super().__init__()
        self._is_timed = is_timed
        self._clock: Callable[[], float] = time.process_time if is_timed else float
        cluster = ClusterSpec(
            cores=2, device="cpu", rollout=RolloutSpec(engine="fake"), train=TrainSpec(engine="fake"), functions=FunctionSpec(workers=2)
        )
        graph, models, _ = trace(many_calls, {"num_blocks": num_blocks})
        plan = lower(graph, models, cluster)
        self.lowering = Lowering(plan, cluster)
        self.spent_s = {"body": 0.0, "lowering": 0.0, "scheduler": 0.0, "messages": 0.0}
        self._scheduler = Scheduler(plan)
        self._segment: list[Call] = []
        self._calls: dict[int, Call] = {}
        self._bodies: dict[int, bytes] = {}
        self._released: list[int] = []
        self._defined: dict[str, set[int]] = {worker.name: set() for worker in plan.workers}
        self._said: deque[FromWorker] = deque()

    def submit(self, call: Call) -> None:
        super().submit(call)
        start = self._clock()
        self._bodies[call.ordinal] = call_body(call)
        self.spent_s["body"] += self._clock() - start
        self._segment.append(call)

    def release(self, ordinal: int) -> None:
        self._released.append(ordinal)

    def end_step(self, step: int) -> None:
        calls, self._segment = self._segment, []
        start = self._clock()
        stages = self.lowering.stages(MacroGraph("many_calls", tuple(calls)))
        self.spent_s["lowering"] += self._clock() - start
        events: list[Event] = []
        for call, stage in zip(calls, stages, strict=True):
            self._calls[call.ordinal] = call
            events.append(CallAdded(call, stage))
            rows = call.options.get("rows")
            if isinstance(rows, Batch):
                events.append(Sourced(call.ordinal, rows.ids.tolist(), [9] * len(rows)))
        released, self._released = self._released, []
        self._handle(*events, *map(Released, released))
        while self._said:
            self._handle(self._said.popleft())
        if not self._scheduler.is_idle:
            raise SystemExit("the null engines left something undone: " + "; ".join(self._scheduler.waiting()))
        super().end_step(step)

    def _handle(self, *events: Event) -> None:
        if not self._is_timed:
            for command in self._scheduler.handle(*events):
                if isinstance(command, Send) and command.worker != CONTROLLER:
                    self._send(command.worker, command.message)
            return
        start = self._clock()
        commands = self._scheduler.handle(*events)
        between = self._clock()
        self.spent_s["scheduler"] += between - start
        for command in commands:
            if isinstance(command, Send) and command.worker != CONTROLLER:
                self._send(command.worker, command.message)
        self.spent_s["messages"] += self._clock() - between

    def _send(self, worker: str, message: m.ToWorker) -> None:
        if isinstance(message, m.Task) and message.call >= 0 and message.call not in self._defined[worker]:
            self._defined[worker].add(message.call)
            m.decode_to_worker(m.encode(m.Define(message.call, self._bodies[message.call])))
        received = m.decode_to_worker(m.encode(message))
        if not isinstance(received, m.Task):
            return
        if isinstance(received, m.Generate | m.RunFunction) and self._calls[received.call].is_aligned:
            num = len(received.ids)
            said = m.Finished(
                received.number, received.call, received.ids, [9] * num, [4] * num, [], [0] * num, [], None, ends=True, took_us=1
            )
            self._say(worker, said)
        else:
            self._say(worker, m.TaskDone(received.number))

    def _say(self, worker: str, message: m.Finished | m.TaskDone) -> None:
        said = m.decode_to_controller(m.encode(message))
        assert isinstance(said, m.Finished | m.TaskDone)
        self._said.append(FromWorker(worker, said))


def microseconds_a_call(backend: Timed, program: Flow, options: Mapping[str, object], num_calls: int) -> float:
    """Over the steps after the first two, the median step's."""
    program.run(backend, options)
    took_s = np.diff(np.array(backend.ends_s))[1:]
    return statistics.median(took_s.tolist()) / num_calls * 1e6


def best(work: Callable[[], float], rounds: int) -> float:
    return min(work() for _ in range(rounds))


def measure(num_calls: int, num_steps: int, rounds: int) -> dict[str, object]:
    num_blocks = max(num_calls // 10, 1)
    options = {"num_steps": num_steps, "num_blocks": num_blocks}
    found: dict[str, float] = {}
    parts: dict[str, float] = {}
    counters: dict[str, int] = {}
    for _ in range(rounds):
        ways: dict[str, Timed] = {"record": Timed(), "eager": Eager(), "planned": Planned(num_blocks)}
        for way, backend in ways.items():
            us = microseconds_a_call(backend, many_calls, options, num_blocks * 10)
            found[way] = min(us, found.get(way, us))
        planned = Planned(num_blocks, is_timed=True)
        many_calls.run(planned, options)
        mean_us = {part: spent_s / planned.num_calls * 1e6 for part, spent_s in planned.spent_s.items()}
        parts = {part: min(us, parts.get(part, us)) for part, us in mean_us.items()}
        counters = {name: getattr(planned.lowering, name) for name in ("num_lowered", "num_reused")}
    return {
        "us_a_call": {way: round(us, 1) for way, us in found.items()},
        "calls_a_second": {way: round(1e6 / us) for way, us in found.items()},
        "share_of_1s_step": {way: f"{us * num_blocks * 10 / 1e6:.2%}" for way, us in found.items()},
        "planned_parts_us": {part: round(us, 1) for part, us in parts.items()},
        **counters,
    }


def bare_us(num_calls: int) -> float:
    """A Python call that appends a tuple to a list."""
    kept: list[tuple[str, int, float]] = []

    def call(name: str, ordinal: int, value: float) -> None:
        kept.append((name, ordinal, value))

    start = time.process_time()
    for ordinal in range(num_calls):
        call("right.score", ordinal, 0.5)
    return (time.process_time() - start) / num_calls * 1e6


def cloudpickle_us(num_calls: int) -> float:
    start = time.process_time()
    for _ in range(num_calls):
        cloudpickle.dumps(right)
    return (time.process_time() - start) / num_calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="+", default=[10, 100, 1000], help="calls a step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Nothing uses what most of these calls give.
    load = [round(os.getloadavg()[0], 2)]
    references = {
        "bare_call_us": best(lambda: bare_us(10_000), options.rounds),
        "cloudpickle_us": best(lambda: cloudpickle_us(500), options.rounds),
    }
    by_calls = {str(count): measure(count, options.steps, options.rounds) for count in options.calls}
    load.append(round(os.getloadavg()[0], 2))
    last = by_calls[str(options.calls[-1])]["us_a_call"]
    assert isinstance(last, dict)
    ratios = {
        f"{way}_over_{name.removesuffix('_us')}": round(us / reference_us, 2)
        for way, us in last.items()
        for name, reference_us in references.items()
    }
    hardware = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "load": load}
    print(json.dumps({"hardware": hardware, **{n: round(us, 3) for n, us in references.items()}, "calls_a_step": by_calls, **ratios}))


if __name__ == "__main__":
    main()
