"""The scheduler alone, with workers that answer when a test says so."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from m2flow import Dataset, Policy, Reference, Reward, Sample, flow, nll, op, ppo_clip, steps
from m2flow.channels.weights import Manifest
from m2flow.errors import RewardError
from m2flow.macro.graph import Call
from m2flow.macro.tracing import trace
from m2flow.micro.lowering.passes import Lowering, lower
from m2flow.micro.protocol import messages as m
from m2flow.micro.protocol.events import (
    CONTROLLER,
    CallAdded,
    Event,
    Forgotten,
    FromWorker,
    Reject,
    Released,
    Resolve,
    Send,
    Sourced,
)
from m2flow.micro.protocol.plan import Plan, Stage
from m2flow.micro.scheduler.scheduler import Scheduler
from m2flow.samples import Batch, group_key
from m2flow.spec import ClusterSpec


def zero(sample: Sample) -> float:
    return 0.0


def one(sample: Sample) -> float:
    return 1.0


@op(granularity="group")
def ranks(samples: list[Sample]) -> list[int]:
    return list(range(len(samples)))


@flow
def program(num_steps: int = 2, batch: int = 3, n: int = 2) -> None:
    policy, verifier, other = Policy("fake"), Reward(zero), Reward(one)
    prompts, demos = Dataset([{"prompt": "a"}] * 4), Dataset([{"prompt": "a", "target": "b"}] * 4, name="demos")
    policy.update(demos.all(), loss=nll())
    reference = Reference(policy)
    for _ in steps(num_steps):
        verifier.score(policy.generate(prompts.take(2), max_new_tokens=3, temperature=0)).mean()
        responses = policy.generate(prompts.take(batch), n=n, max_new_tokens=5)
        ranks(responses)
        other.score(responses)
        rewards = verifier.score(responses)
        policy.update(responses, rewards, loss=ppo_clip(kl_coef=0.1), reference=reference, minibatch_size=2, epochs=2)


class Rig:
    """Workers that do nothing but say that they did, and a judge of all that they are told."""

    def __init__(
        self,
        cluster: ClusterSpec,
        seed: int = 0,
        *,
        repeats: bool = False,
        fails: tuple[int, ...] = (),
        placed: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> None:
        graph, models, _ = trace(program, {}, steps=2)
        self.plan = placed(lower(graph, models, cluster))
        self.calls: dict[int, Call] = {call.ordinal: call for call in graph.calls}
        self.stages: dict[int, Stage] = dict(zip(self.calls, Lowering(self.plan, cluster).stages(graph), strict=True))
        self.scheduler = Scheduler(self.plan)
        self.random = random.Random(seed)
        self.repeats = repeats
        self.fails = fails
        """Calls whose every task fails."""
        self.resolved: set[int] = set()
        self.rejected: dict[int, str] = {}
        self.forgotten: set[int] = set()
        self.aborted: dict[str, set[int]] = {w.name: set() for w in self.plan.workers}
        self.at: dict[str, set[tuple[int, int]]] = {w.name: set() for w in self.plan.workers} | {CONTROLLER: set()}
        """Rows that are at a place or on the way there."""
        self.queues: dict[str, deque[m.Task]] = {w.name: deque() for w in self.plan.workers}
        self.generating: dict[str, dict[int, tuple[m.Generate, list[int]]]] = {w.name: {} for w in self.plan.workers}
        self.held = {(w.name, s.role): 0 for w in self.plan.workers for s in w.engines if s.kind == "rollout"}
        self.trained = {s.role: 0 for w in self.plan.workers for s in w.engines if s.kind == "train"}
        self.published: dict[str, int] = {}
        self.owner = {w.name: "rollout" for w in self.plan.workers if w.lease}
        self.accumulated: list[tuple[int, int, int]] = []
        self.said: list[FromWorker] = []
        self.speeds = {w.name: self.random.choice([0.001, 1.0, 1.0]) for w in self.plan.workers}

    # What the program does.

    def add(self, ordinal: int) -> None:
        call = self.calls[ordinal]
        self.tell(CallAdded(call, self.stages[ordinal]))
        rows = call.options.get("rows")
        if isinstance(rows, Batch):
            self.at[CONTROLLER].update((ordinal, row) for row in rows.ids.tolist())
            self.tell(Sourced(ordinal, rows.ids.tolist(), [9] * len(rows)))

    def run(self) -> None:
        """Add the calls one by one, release each when no later call takes it, and let the workers do things in between."""
        released: set[int] = set()
        for ordinal in self.calls:
            self.add(ordinal)
            for _ in range(self.random.randrange(12)):
                self.act()
            needed = {ref.call for later, call in self.calls.items() if later > ordinal for _, ref in call.inputs}
            for done in [o for o in self.calls if o <= ordinal and o not in needed | released and self.random.random() < 0.5]:
                released.add(done)
                self.tell(Released(done))
        while self.act():
            pass
        for ordinal in set(self.calls) - released:
            self.tell(Released(ordinal))

    # What the workers do.

    def act(self) -> bool:
        """Something happens at some worker; False if nothing can."""
        names = [name for name in self.queues if self.queues[name] or self.generating[name]]
        if not names:
            return False
        (name,) = self.random.choices(names, [self.speeds[name] for name in names])
        if self.generating[name] and (not self.queues[name] or self.random.random() < 0.7):
            self.generate_one(name)
        else:
            self.do(name, self.queues[name].popleft())
        if self.repeats and self.random.random() < 0.5:
            self.tell(self.random.choice(self.said))
        return True

    def do(self, name: str, task: m.Task) -> None:
        if task.call in self.fails and task.call not in self.aborted[name]:
            self.say(name, m.TaskFailed(task.number, task.call, RewardError(f"call {task.call} failed").to_record()))
            return
        if name in self.owner and task.call not in self.aborted[name]:
            self.check_turn(name, task)
        if isinstance(task, m.Generate) and task.call not in self.aborted[name]:
            role, version = self.calls[task.call].role, self.calls[task.call].reads[0].version
            assert self.held[name, role] == version, "a generation begins with other weights than the call reads"
            self.generating[name][task.number] = (task, list(task.ids))
            return
        manifest = None
        if isinstance(task, m.RunFunction | m.Accumulate) and task.call not in self.aborted[name]:
            assert self.inputs_of(task) <= self.at[name], "a task waits for rows that nobody makes before it"
        if isinstance(task, m.RunFunction) and self.calls[task.call].is_aligned:
            self.finish(name, task.number, task.call, task.ids)
        if isinstance(task, m.Accumulate) and task.call not in self.aborted[name]:
            self.accumulated += [(task.call, task.epoch, row) for row in task.ids]
        if isinstance(task, m.Apply) and task.is_last:
            self.trained[self.calls[task.call].role] = task.version
        if isinstance(task, m.PublishWeights):
            assert self.trained[task.role] == task.version
            self.published[task.role] = task.version
            manifest = Manifest(f"{task.role}-{task.version}", 1, ())
        if isinstance(task, m.LoadWeights):
            assert (self.trained if task.manifest is None else self.published)[task.role] == task.version
            self.held[name, task.role] = task.version
        if isinstance(task, m.Switch):
            self.owner[name] = task.to
        self.say(name, m.TaskDone(task.number, 1.0, manifest))

    def generate_one(self, name: str) -> None:
        number = self.random.choice(list(self.generating[name]))
        task, left = self.generating[name][number]
        row = left.pop(self.random.randrange(len(left)))
        self.finish(name, number, task.call, [row])
        if number in self.generating[name] and not left:
            del self.generating[name][number]
            self.say(name, m.TaskDone(number))

    def finish(self, name: str, number: int, call: int, ids: list[int]) -> None:
        for place in {name, *self.stages[call].forward_to}:
            self.at[place].update((call, row) for row in ids)
        self.say(name, m.Finished(number, call, ids, [9] * len(ids), [0] * len(ids), [], [0] * len(ids), [], None))

    def say(self, name: str, message: m.Finished | m.TaskDone | m.TaskFailed) -> None:
        self.said.append(FromWorker(name, message))
        self.tell(self.said[-1])

    # What they are told.

    def tell(self, event: Event) -> None:
        for command in self.scheduler.handle(event):
            match command:
                case Send(worker, message):
                    self.told(worker, message)
                case Resolve(call, _):
                    assert call not in self.resolved
                    assert call not in self.rejected
                    self.resolved.add(call)
                case Reject(call, error):
                    assert call not in self.resolved
                    assert call not in self.rejected
                    self.rejected[call] = str(error)
                case Forgotten(call):
                    assert call not in self.forgotten
                    assert call in self.resolved or call in self.rejected
                    self.forgotten.add(call)
        self.check_that_all_were_asked()

    def check_that_all_were_asked(self) -> None:
        """Only those are asked who may have something new to do; nobody else has."""
        for worker in self.scheduler._state.workers.values():
            assert self.scheduler._offer(worker) is None, f"{worker.name} was not asked"
        for lease in self.scheduler._state.leases.values():
            assert not self.scheduler._turns.next_turn(lease), f"{lease.name} was not asked for"

    def told(self, worker: str, message: m.ToWorker) -> None:
        match message:
            case m.Push(call=call, ids=ids, to=to):
                assert {(call, row) for row in ids} <= self.at[worker], "rows are pushed from where they are not"
                assert not {(call, row) for row in ids} & self.at[to], "a row is sent to where it is already"
                self.at[to].update((call, row) for row in ids)
            case m.Forget(call=call):
                self.at[worker] = {(c, row) for c, row in self.at[worker] if c != call}
            case m.Abort(call=call):
                self.abort(worker, call)
            case m.Task():
                self.check(worker, message)
                self.queues[worker].append(message)

    def abort(self, worker: str, call: int) -> None:
        self.aborted[worker].add(call)
        given_up = [task for task in self.queues[worker] if task.call == call]
        given_up += [task for task, _ in self.generating[worker].values() if task.call == call]
        self.queues[worker] = deque(task for task in self.queues[worker] if task.call != call)
        self.generating[worker] = {n: g for n, g in self.generating[worker].items() if g[0].call != call}
        self.queues[worker].extendleft(given_up)  # They end as done, without having been done.

    def check(self, worker: str, task: m.Task) -> None:
        assert task.call not in self.forgotten
        if task.call >= 0:
            assert task.call not in self.rejected
            assert worker in self.stages[task.call].workers
        if isinstance(task, m.Generate):
            call = self.calls[task.call]
            assert self.next_held(worker, call.role) == call.reads[0].version, "generation with other weights than the call reads"
            assert self.num_out(worker) < self.stages[task.call].chunk, "more samples than decode together"
            assert {(call.inputs[0][1].call, prompt) for prompt in task.prompts} <= self.at[worker]
            assert [group_key(row) & 0xFF for row in task.ids] == [group_key(p) & 0xFF for p in task.prompts]
        if isinstance(task, m.RunFunction | m.Accumulate):
            assert task.ids or self.stages[task.call].is_barrier
            # A call may wait in a worker's queue for the rows that an earlier task there makes.
            coming = {(earlier.call, row) for earlier in self.queues[worker] if isinstance(earlier, m.RunFunction) for row in earlier.ids}
            assert self.inputs_of(task) <= self.at[worker] | coming
        if isinstance(task, m.LoadWeights):
            assert not self.generating[worker], "weights change under running samples"
            assert not any(isinstance(t, m.Generate) for t in self.queues[worker])
        if isinstance(task, m.Apply):
            self.check_apply(self.calls[task.call])
        if worker in self.owner:
            self.check_lease(worker, task)

    def inputs_of(self, task: m.RunFunction | m.Accumulate) -> set[tuple[int, int]]:
        return {(ref.call, row) for _, ref in self.calls[task.call].inputs for row in task.ids}

    def num_out(self, worker: str) -> int:
        """Samples that a worker has."""
        queued = sum(len(task.ids) for task in self.queues[worker] if isinstance(task, m.Generate))
        return queued + sum(len(left) for _, left in self.generating[worker].values())

    def check_apply(self, update: Call) -> None:
        """Earlier calls that read the weights which are replaced have had them."""
        old = update.writes[0].version - 1
        for call in self.calls.values():
            reads_old = any((e.resource, e.version) == (update.writes[0].resource, old) for e in call.reads)
            if reads_old and call.ordinal < update.ordinal and call.ordinal not in (*self.resolved, *self.rejected):
                assert call.engine == "rollout"
                assert all(v >= old for (_, role), v in self.held.items() if role == update.role), (
                    "weights are replaced before they were taken"
                )

    def check_lease(self, worker: str, task: m.Task) -> None:
        if isinstance(task, m.Switch):
            assert not self.queues[worker], "a lease changes hands with tasks under way"
            assert not self.generating[worker]
            assert task.to != self.owner[worker]
            return
        kind, owner = _kind(task), self.next_owner(worker)
        assert kind == owner, f"a {kind} task for when {owner} has the device"

    def check_turn(self, worker: str, task: m.Task) -> None:
        """What begins is of the kind that has the device now."""
        if not isinstance(task, m.Switch):
            assert _kind(task) == self.owner[worker], f"a {_kind(task)} task begins while the other kind has the device"

    def next_held(self, worker: str, role: str) -> int:
        """The version that a worker will hold once it has done what it was told to: it does its tasks in order."""
        loads = [task.version for task in self.queues[worker] if isinstance(task, m.LoadWeights) and task.role == role]
        return loads[-1] if loads else self.held[worker, role]

    def next_owner(self, worker: str) -> str:
        """The kind that will have a worker's device then."""
        switches = [task.to for task in self.queues[worker] if isinstance(task, m.Switch)]
        return switches[-1] if switches else self.owner[worker]


def _kind(task: m.Task) -> str:
    return "rollout" if isinstance(task, m.Generate | m.LoadWeights) else "train"
