"""The simulator gives the commands that a run gives: recorded from worker processes, and simulated with what was seen there.

Lengths are those of the run's samples, and each kind of task takes what it took on average. Compared is what each worker is told, task
by task: of tasks of one call that follow each other, all rows together, since how many rows lie ready at a time is a matter of time.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from cost_tables import NOTHING, PlainCosts
from simulated import Given, zero

from m2flow import Dataset, Flow, Policy, Reward, flow, steps
from m2flow.micro.controller import controller
from m2flow.micro.lowering.passes import lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.cost_terms import DecodeCost, FunctionCost, PassCost, TrainCost
from m2flow.micro.protocol.events import CallAdded, Command, Event, FromWorker, Recalled, Send
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.rollout_scheduling.lengths import IntArray
from m2flow.runner.run import Run
from m2flow.samples import SampleId
from m2flow.simulator import simulation
from m2flow.simulator.machines import machines_of
from m2flow.simulator.simulation import follow_program
from m2flow.simulator.simulation_report import simulate
from m2flow.spec import ClusterSpec, FunctionSpec, RolloutSpec, RunSettings, TrainSpec

Told = tuple[str, str, int, tuple[int, ...]]
"""What a worker is told: kind of task, call, step, rows."""


@dataclass
class Log:
    """Events and commands of one scheduler, with their times."""

    events: list[tuple[Event, ...]] = field(default_factory=list)
    commands: list[list[Command]] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)

    def recorder(self) -> type[Scheduler]:
        log = self

        class Recorded(Scheduler):
            def handle(self, *events: Event) -> list[Command]:
                found = super().handle(*events)
                log.events.append(events)
                log.commands.append(list(found))
                log.at_s.append(time.monotonic())
                return found

        return Recorded

    @property
    def calls(self) -> dict[int, tuple[str, int]]:
        added = (event for events in self.events for event in events if isinstance(event, CallAdded | Recalled))
        return {event.call.ordinal: (event.call.name, event.call.step) for event in added}

    def told(self) -> dict[str, list[Told]]:
        """By worker, tasks of one call that follow each other as one."""
        calls = self.calls
        each: dict[str, list[tuple[tuple[str, str, int], list[int]]]] = defaultdict(list)
        for command in itertools.chain(*self.commands):
            if isinstance(command, Send) and isinstance(command.message, m.Task):
                name, step = calls.get(command.message.call, ("", -1))
                rows = getattr(command.message, "ids", [])
                each[command.worker].append(((type(command.message).__name__, name, step), list(rows)))
        return {
            worker: [
                (*key, tuple(sorted(itertools.chain(*(rows for _, rows in tasks)))))
                for key, tasks in itertools.groupby(told, key=lambda one: one[0])
            ]
            for worker, told in each.items()
        }

    def lengths(self) -> dict[int, list[tuple[int, int]]]:
        """By call, samples and how many tokens they generated."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for event in itertools.chain(*self.events):
            if isinstance(event, FromWorker) and isinstance(event.message, m.Finished) and event.message.num_generated:
                for row, length in zip(event.message.ids, event.message.num_generated, strict=True):
                    if length:
                        found[event.message.call].append((row, length))
        return {call: sorted(set(rows)) for call, rows in found.items()}

    def mean_s(self, kind: type[m.Task]) -> float:
        """From a command to its answer."""
        begun, took = {}, []
        for at, commands, events in zip(self.at_s, self.commands, self.events, strict=True):
            for event in events:
                if isinstance(event, FromWorker) and getattr(event.message, "task", None) in begun:
                    took.append(at - begun.pop(event.message.task))
            begun.update({c.message.number: at for c in commands if isinstance(c, Send) and isinstance(c.message, kind)})
        return float(np.mean(took)) if took else 0.0


@dataclass
class Replayed(Given):
    """The lengths of a run's steps."""

    by_step: Mapping[int, IntArray] = field(default_factory=dict)

    def draw(self, num_groups: int, n: int, seed: int, *, step: int = 0) -> IntArray:
        return self.by_step[step]


@flow
def loop(num_steps: int = 3, batch: int = 4, n: int = 3) -> None:
    policy, reward = Policy("fake"), Reward(zero)
    prompts = Dataset([{"prompt": f"{i * 7919 % 1000}="} for i in range(32)])
    for _ in steps(num_steps):
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=24)
        policy.update(responses, reward.score(responses), minibatch_size=2)


def cluster(placement: str, num_rollout: int = 1) -> ClusterSpec:
    return ClusterSpec(
        placement=placement,
        device="cpu",
        cores=2,
        rollout=RolloutSpec(engine="fake", max_running=16, workers=num_rollout),
        train=TrainSpec(engine="fake", token_budget=64),
        functions=FunctionSpec(chunk=64),
    )


def recorded(program: Flow, options: Mapping[str, int], spec: ClusterSpec, runs: Path) -> tuple[Log, Plan]:
    """A run of worker processes."""
    log = Log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "Scheduler", log.recorder())
        run = Run(program, options, spec, RunSettings(runs_dir=str(runs)))
        plan = run.prepare()
        run.execute()
    return log, plan


def simulated(program: Flow, options: Mapping[str, int], spec: ClusterSpec, seen: Log) -> Log:
    """The same program on a virtual clock, with the lengths and the mean times of the tasks that were seen."""
    followed = follow_program(program, options, steps=options["num_steps"])
    plan = lower(followed.graph, followed.models, spec, num_steps=followed.num_steps)
    longest = max(length for rows in seen.lengths().values() for _, length in rows)
    t0_s = seen.mean_s(m.Generate) / longest
    training = TrainCost(NOTHING, PassCost(seen.mean_s(m.Accumulate), 0.0, 0.0), seen.mean_s(m.Apply))
    costs = PlainCosts(DecodeCost(t0_s, 0.0, 0.0, 1 << 20), training, {"zero.score": FunctionCost((seen.mean_s(m.RunFunction) / 8,))})
    by_step = {
        seen.calls[call][1]: np.array([length for _, length in rows], np.int64).reshape(options["batch"], options["n"])
        for call, rows in seen.lengths().items()
    }
    log = Log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "Scheduler", log.recorder())
        simulate(followed, plan, spec, costs, Replayed([[1]], by_step=by_step))
    assert machines_of(plan, spec, costs).keys() == {worker.name for worker in plan.workers}
    return log


def first_difference(ours: Iterable[Told], theirs: Iterable[Told]) -> str:
    return next((f"{a} and {b}" for a, b in itertools.zip_longest(ours, theirs) if a != b), "none")


@pytest.mark.parametrize("placement", ["time-shared", "split"])
def test_a_run_and_its_simulation_tell_each_worker_the_same_tasks_in_the_same_order(placement, tmp_path):
    """With one worker of a kind: which of several is there first is a matter of time, as below."""
    spec, options = cluster(placement), {"num_steps": 3, "batch": 4, "n": 3}
    real, plan = recorded(loop, options, spec, tmp_path)
    virtual = simulated(loop, options, spec, real)
    ours, theirs = real.told(), virtual.told()
    assert ours.keys() == theirs.keys()
    for worker in sorted(ours):
        assert ours[worker] == theirs[worker], f"{worker}: {first_difference(ours[worker], theirs[worker])}"
    assert {kind for told in ours.values() for kind, *_ in told} >= {"Generate", "RunFunction", "Accumulate", "Apply", "LoadWeights"}
    assert all(SampleId.unpack(row).prompt < options["batch"] for told in ours.values() for *_, rows in told for row in rows)

    again = Scheduler(plan)
    assert [again.handle(*events) for events in real.events] == real.commands


def generated_at(log: Log) -> tuple[dict[str, tuple[int, ...]], dict[int, list[int]]]:
    """The samples of the first step that each worker was given, and all samples of each step."""
    first: dict[str, tuple[int, ...]] = {}
    rows: dict[int, list[int]] = defaultdict(list)
    for worker, told in log.told().items():
        for kind, _, step, ids in told:
            if kind == "Generate":
                rows[step] += ids
                if step == 0:
                    first[worker] = (*first.get(worker, ()), *ids)
    return first, {step: sorted(ids) for step, ids in rows.items()}


@pytest.mark.parametrize("placement", ["time-shared", "split"])
def test_with_three_rollout_workers_a_run_and_its_simulation_share_out_and_train_alike(placement, tmp_path):
    """In the first step nobody waits for weights, so each has the same samples. Who takes weights first later, and so has which samples,
    is a matter of time; but all are made once, and what is done with them comes in the same order."""
    spec, options = cluster(placement, 3), {"num_steps": 3, "batch": 6, "n": 3}  # Two whole groups each.
    real, plan = recorded(loop, options, spec, tmp_path)
    virtual = simulated(loop, options, spec, real)
    (ours, made), (theirs, virtually_made) = generated_at(real), generated_at(virtual)
    assert ours == theirs
    assert sorted(map(len, ours.values())) == [6, 6, 6]
    assert made == virtually_made
    assert all(len(ids) == len(set(ids)) == 18 for ids in made.values())
    kinds = "RunFunction", "Accumulate", "Apply"
    of_both = [{worker: [one for one in told if one[0] in kinds] for worker, told in log.told().items()} for log in (real, virtual)]
    for worker in sorted(of_both[0] | of_both[1]):
        assert of_both[0][worker] == of_both[1][worker], f"{worker}: {first_difference(of_both[0][worker], of_both[1][worker])}"
    assert sum(map(len, of_both[0].values())) >= 3 * 4

    again = Scheduler(plan)
    assert [again.handle(*events) for events in real.events] == real.commands
